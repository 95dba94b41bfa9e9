"""Supervision, phase 2: strategies that condition a generator on groups from regional evidence."""
