"""The simulated city: people with known groups and their visits, for demo, tests and benchmarks."""

from mobatlas.data.city.simulation import (
    City,
    expected_poi_distribution,
    simulate,
    write_city_folder,
)

__all__ = ["City", "expected_poi_distribution", "simulate", "write_city_folder"]
