"""Evaluation: how close synthetic trajectories are to real people, and what they disclose."""
