"""The point process: a generator of visits with arrival and departure times."""
