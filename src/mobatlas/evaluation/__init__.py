"""Evaluation: how close synthetic trajectories come to real people, group by group."""
