"""From visits to trajectories: readers, preparation, vocabulary, dataset, and a simulated city."""
