"""Regions: composition P and aggregates V, what they can tell, and the group means recovered from them."""
