"""Benchmarks: each turns a configuration into tables and figures that can be made again."""
