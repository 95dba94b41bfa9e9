"""Benchmarks: the paper's research questions, real people, recovery, speed; run as `python -m bench NAME`."""
