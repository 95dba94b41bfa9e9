"""Supervision, phase 2: group behaviour taught to a generator from recovered means; each strategy fits every generator."""
