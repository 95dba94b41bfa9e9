"""Generators: one protocol, several families."""
