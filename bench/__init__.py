"""Benchmarks, run as `python -m bench NAME`: research questions, real people, recovery, speed."""
