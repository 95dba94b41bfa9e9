"""Recovery in simulated cities: groups of people that it does not see."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.recovery import measure_city, simulate_people
from mobatlas.config import CityConfig

CITY = CityConfig(users=1_600, pois=150, days=6, districts=40)
SEEDS = range(3)
CASES = [
    "demogroups",
    "fullrank",
    "rankdef",
    "messy",
    "hot16",
    "shuffled hot16",
    "dirichlet:24:0.5",
    "districts",
    "shuffled districts",
]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """A row for each seed, partition and feature map, with 1,000 people in the regions."""
    folder = tmp_path_factory.mktemp("cities")
    return [row for seed in SEEDS for row in measured(folder, seed)]


def measured(folder: Path, seed: int) -> list[dict[str, Any]]:
    return measure_city(simulate_people(folder, CITY, seed), 1_000, seed)


def mean_of(rows: list[dict[str, Any]], case: str, column: str) -> float:
    return float(np.mean([row[column] for row in rows if row["partition"] == case]))


@pytest.mark.parametrize("case", CASES)
def test_recovery_is_not_worse_than_the_population_mean(
    rows: list[dict[str, Any]], case: str
) -> None:
    assert mean_of(rows, case, "error") < 1.02 * mean_of(rows, case, "baseline")


@pytest.mark.parametrize("case", CASES)
def test_recovery_is_not_worse_than_least_squares(rows: list[dict[str, Any]], case: str) -> None:
    for method in ("pseudo_inverse", "simplex"):
        assert mean_of(rows, case, "error") < mean_of(rows, case, method)


@pytest.mark.parametrize("case", CASES)
def test_intervals_cover_the_means_of_other_people(rows: list[dict[str, Any]], case: str) -> None:
    assert mean_of(rows, case, "coverage") > 0.85


@pytest.mark.parametrize("case", ["demogroups", "fullrank", "hot16"])
def test_partitions_that_identify_groups_help(rows: list[dict[str, Any]], case: str) -> None:
    assert mean_of(rows, case, "error") < 0.9 * mean_of(rows, case, "baseline")
