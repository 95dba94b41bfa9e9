"""Sampling: requests, parallel generation, coarsening of homes and workplaces."""
