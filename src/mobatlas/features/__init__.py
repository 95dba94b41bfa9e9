"""Feature maps, which count events in trajectories, and divergences between the counts."""
