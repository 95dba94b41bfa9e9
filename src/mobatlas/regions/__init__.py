"""Regions: composition P, aggregates V, what they identify, and the recovery of group means."""
