"""Visits to trajectories: schema, readers, pipeline, vocabulary, dataset, and the simulated city."""
