"""The simulated city: people with known groups and their visits, for the demo, the tests and the benchmarks."""

from __future__ import annotations

from mobatlas.data.city.folder import write_city_folder
from mobatlas.data.city.simulation import (
    City,
    expected_poi_distribution,
    simulate,
    simulate_visits,
    write_city,
)

__all__ = [
    "City",
    "expected_poi_distribution",
    "simulate",
    "simulate_visits",
    "write_city",
    "write_city_folder",
]
