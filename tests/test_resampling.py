"""Sampling errors over people: no excess by chance, intervals that cover, partners, and gaps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import sparse

from mobatlas import MetricSpec, Trajectories, TrajectoryDataset
from mobatlas.data.arrays import Floats, Ints
from mobatlas.data.vocabulary import FIRST_POI, build_vocabulary
from mobatlas.evaluation.comparison import (
    EVERYBODY,
    Comparison,
    Scores,
    compare_models,
    gap_closed,
    interval,
    match_groups,
    real_groups,
    sampling_floor,
)
from mobatlas.evaluation.resampling import (
    Divergence,
    Pairing,
    diverge,
    match_people,
    pair_at_random,
    resample,
)
from mobatlas.features.divergences import jsd, jsd_rows
from tests.small_town import ANCHORS, PARK, SHOP, TOWN, small_dataset, walks

KINDS = 2_000  # of people, each with preferences of its own
MODERATE = 0.4
FAR = 1.0
PERSONS = st.lists(st.integers(0, 6), max_size=25).map(lambda some: np.array(some, dtype=np.int64))


@dataclass(frozen=True)
class Sample:
    """Visits to bins: those of the windows of people, or independent trajectories."""

    offsets: Ints  # (trajectories + 1,)
    visits: Ints  # bins
    person: Ints  # (trajectories,)
    bins: int

    @property
    def table(self) -> sparse.csr_array:
        shape = (len(self.offsets) - 1, self.bins)
        return sparse.csr_array((np.ones(len(self.visits)), self.visits, self.offsets), shape=shape)

    @property
    def histogram(self) -> Floats:
        return np.bincount(self.visits, minlength=self.bins).astype(np.float64)

    def trajectories(self, *, of_people: bool = True) -> Trajectories:
        """The same visits as tokens, of people or without people."""
        return Trajectories(
            tokens=(FIRST_POI + self.visits).astype(np.int32),
            offsets=self.offsets,
            anchors=np.tile(np.array(ANCHORS), (len(self.offsets) - 1, 1)),
            person=self.person if of_people else None,
        )


@dataclass(frozen=True)
class Population:
    """People with habits: each kind prefers other bins, with Dirichlet shares."""

    shares: Floats  # (kinds, bins)

    @classmethod
    def of(cls, bins: int, shift: float = 0.0) -> Population:
        """Few bins are frequent; a shift multiplies their shares by random factors."""
        rng = np.random.default_rng([bins, round(100 * shift)])
        base = np.exp(shift * rng.standard_normal(bins)) / np.arange(1, bins + 1)
        return cls(rng.dirichlet(5 * base / base.sum() + 1e-9, size=KINDS))

    @cached_property
    def _cumulative(self) -> Floats:
        """Cumulative shares of all kinds in one ascending row: those of kind k are in (k, k + 1)."""
        return (np.cumsum(self.shares, 1) + np.arange(KINDS)[:, None]).ravel()

    def sample(self, windows: Ints, rng: np.random.Generator, *, habits: bool = True) -> Sample:
        """So many windows of each person; without habits each window is a person of its own."""
        everyone = np.arange(len(windows) if habits else windows.sum())
        person = np.repeat(everyone, windows) if habits else everyone
        kind = rng.integers(KINDS, size=len(everyone))
        pace = rng.gamma(3, 2, size=len(everyone))
        length = 1 + rng.poisson(pace[person])
        row = np.repeat(np.arange(len(person)), length)
        bins = self.shares.shape[1]
        whose = kind[person[row]]
        drawn = np.searchsorted(self._cumulative, rng.random(len(row)) + whose, side="right")
        place = drawn - whose * bins
        offsets = np.concatenate(([0], np.cumsum(length)))
        return Sample(offsets, np.minimum(place, bins - 1), person, bins)


@dataclass(frozen=True)
class Scenario:
    """Two populations of equally many people and windows; the other side may have no people."""

    people: int
    bins: int
    shift: float = 0.0
    windows: float = 4.0  # mean
    habits: bool = True  # of the other side

    def populations(self) -> tuple[Population, Population]:
        return Population.of(self.bins), Population.of(self.bins, self.shift)

    def draw(
        self, populations: tuple[Population, Population], rng: np.random.Generator
    ) -> tuple[Sample, Sample]:
        windows = 1 + rng.poisson(self.windows - 1, size=self.people)
        real, other = populations
        return real.sample(windows, rng), other.sample(windows, rng, habits=self.habits)


def pairing_of(real: Sample, other: Sample, rng: np.random.Generator) -> Pairing:
    """Windows of people are in the order of their partners, others are paired at random."""
    has_people = len(np.unique(other.person)) < len(other.person) or np.array_equal(
        real.person, other.person
    )
    partner = other.person if has_people else pair_at_random(real.person, rng)
    return Pairing(real.person, partner, other.person, [int(rng.integers(2**31))])


def compared(real: Sample, other: Sample, rng: np.random.Generator) -> tuple[Divergence, Floats]:
    """The JSD with its error, and bootstrap draws."""
    pairing = pairing_of(real, other, rng)
    found = diverge(real.table, other.table, pairing)
    draws = found.jsd + resample(pairing.people, 200, rng) @ found.real
    return found, draws + resample(pairing.units, 200, rng) @ found.other


def standard_errors_from(target: float, values: list[float]) -> float:
    return (float(np.mean(values)) - target) / (float(np.std(values, ddof=1)) / len(values) ** 0.5)


@pytest.mark.parametrize("bins", [12, 200])
@pytest.mark.parametrize("people", [20, 100, 500])
def test_two_samples_of_the_same_people_have_no_excess(people: int, bins: int) -> None:
    scenario = Scenario(people, bins)
    populations = scenario.populations()
    rng = np.random.default_rng([people, bins])
    found = [compared(*scenario.draw(populations, rng), rng)[0] for _ in range(50)]
    assert abs(standard_errors_from(0, [each.excess for each in found])) < 2
    assert np.mean([each.jsd for each in found]) > 10 * abs(np.mean([one.excess for one in found]))


@pytest.mark.parametrize(("shift", "rough"), [(MODERATE, 0.1), (FAR, 0.05)])
def test_the_excess_is_the_jsd_of_the_distributions_if_bins_are_few(
    shift: float, rough: float
) -> None:
    scenario = Scenario(200, 12, shift)
    populations = scenario.populations()
    truth = jsd(*(each.shares.mean(0) for each in populations))
    rng = np.random.default_rng(0)
    found = [compared(*scenario.draw(populations, rng), rng)[0] for _ in range(50)]
    assert np.mean([each.excess for each in found]) == pytest.approx(truth, rel=rough)
    assert np.mean([each.jsd for each in found]) > 1.1 * truth


def town_of(bins: int, *names: str) -> MetricSpec:
    """A spec of so many POIs on a line, in four categories, that counts only some metrics."""
    pois = {
        "poi_id": [f"poi {number}" for number in range(bins)],
        "lat": np.linspace(0, 2, bins).tolist(),
        "lon": np.linspace(0, 2, bins).tolist(),
        "category": [f"category {number % 4}" for number in range(bins)],
        "visits": [1] * bins,
    }
    town = replace(TOWN, vocabulary=build_vocabulary(pa.table(pois)))

    class SomeMetrics(MetricSpec):
        def counts(self, trajectories: Trajectories) -> dict[str, sparse.csr_array]:
            every = super().counts(trajectories)
            return {name: every[name] for name in names}

    return SomeMetrics(**{name: getattr(town, name) for name in town.__dataclass_fields__})


@pytest.mark.parametrize("people", [20, 100, 500])
def test_two_groups_of_the_same_people_have_no_excess_in_any_metric(people: int) -> None:
    metrics = ("poi", "category", "trip", "length")  # 100, 4, 25 and 6 bins
    town = town_of(100, *metrics)
    population = Population.of(100)
    rng = np.random.default_rng(people)
    excess: dict[str, list[float]] = {name: [] for name in metrics}
    for seed in range(50):
        sides = [
            population.sample(1 + rng.poisson(2, size=people), rng).trajectories() for _ in range(2)
        ]
        real, floor = ({"x": side} for side in sides)
        scores = compare_models(town, real, {"floor": floor}, seed=seed, resamples=2).scores
        for name in metrics:
            excess[name].append(scores["floor"].excess[name])
    for name, values in excess.items():
        assert abs(standard_errors_from(0, values)) < 2, name


# Coverage of the expected JSD by 95 % intervals in 400 repetitions, by `Scenario`.
COVERED = [
    Scenario(30, 20),
    Scenario(100, 20),
    Scenario(100, 200),
    Scenario(400, 20, windows=1),
    Scenario(400, 200),
    Scenario(30, 20, MODERATE),
    Scenario(100, 20, MODERATE),
    Scenario(100, 200, MODERATE),
    Scenario(400, 20, MODERATE),
    Scenario(400, 200, MODERATE),
    Scenario(100, 20, FAR),
    Scenario(400, 200, FAR),
    Scenario(30, 20, windows=12),
    Scenario(100, 20, MODERATE, windows=12),
    Scenario(100, 200, MODERATE, windows=12),
    Scenario(30, 20, habits=False),
    Scenario(100, 200, habits=False),
    Scenario(30, 20, MODERATE, habits=False),
    Scenario(100, 20, MODERATE, habits=False),
    Scenario(100, 200, MODERATE, habits=False),
    Scenario(400, 20, MODERATE, habits=False),
]


def coverage(scenario: Scenario, repetitions: int = 200, redraws: int = 300) -> float:
    """The share of intervals that cover the mean JSD of other draws."""
    populations = scenario.populations()
    rng = np.random.default_rng(scenario.people + scenario.bins)
    histograms = [
        [side.histogram for side in scenario.draw(populations, rng)] for _ in range(redraws)
    ]
    expected = jsd_rows(*np.stack(histograms, axis=1)).mean()
    covered = []
    for _ in range(repetitions):
        found, draws = compared(*scenario.draw(populations, rng), rng)
        one = interval(found.jsd, draws)
        covered.append(one.low <= expected <= one.high)
    return float(np.mean(covered))


@pytest.mark.parametrize("scenario", COVERED, ids=str)
def test_intervals_over_people_cover_the_expected_jsd(scenario: Scenario) -> None:
    assert 0.85 <= coverage(scenario) <= 0.97
