"""Feature maps, which count what happens in trajectories, and divergences between the counts."""
