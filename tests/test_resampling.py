"""Sampling errors over people: no excess by chance, intervals that cover, partners, and gaps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import sparse

from bench.floors import sampling_floor
from mobatlas import MetricSpec, Trajectories, TrajectoryDataset
from mobatlas.data.types import FIRST_POI, Floats, Ints, build_vocabulary
from mobatlas.evaluation.comparison import (
    EVERYBODY,
    Comparison,
    Scores,
    compare_models,
    gap_closed,
    interval,
    match_groups,
    real_groups,
)
from mobatlas.evaluation.metrics import MetricInput
from mobatlas.evaluation.resampling import (
    Divergence,
    Pairing,
    diverge,
    match_people,
    pair_at_random,
    resample,
)
from mobatlas.features.divergences import jsd, jsd_rows
from mobatlas.features.maps import FEATURES
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
        """Cumulative shares of all kinds in one ascending row, those of kind k from k to k + 1."""
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
    assert standard_errors_from(0, [each.jsd for each in found]) > 10, "chance alone has a JSD"


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
            sample = MetricInput(trajectories, self)
            return {name: sample.counts(FEATURES[name]) for name in names}

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


@pytest.mark.parametrize("of_people", [True, False])
def test_samples_of_the_population_have_no_excess_over_that_of_training_people(
    of_people: bool,
) -> None:
    town = town_of(100, "poi", "category")
    population = Population.of(100)
    rng = np.random.default_rng(3)
    excess: dict[str, list[float]] = {"poi": [], "category": []}
    for seed in range(50):
        windows = 1 + rng.poisson(3, size=40)
        real = population.sample(windows, rng).trajectories()
        training = population.sample(1 + rng.poisson(3, size=400), rng).trajectories()
        ours = population.sample(windows, rng, habits=of_people).trajectories(of_people=of_people)
        scores = compare_models(
            town,
            {"x": real},
            {"ours": {"x": ours}},
            seed=seed,
            resamples=2,
            reference={"x": training},
        ).scores["ours"]
        for name, values in excess.items():
            values.append(scores.excess[name])
    for name, values in excess.items():
        assert abs(standard_errors_from(0, values)) < 2, name


# Coverage of the expected JSD by 95 % intervals in 400 repetitions, by `Scenario`.
COVERED = [
    Scenario(30, 20),
    Scenario(100, 20),
    Scenario(100, 200),
    Scenario(400, 20),
    Scenario(400, 20, windows=1),
    Scenario(400, 20, habits=False),
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
    Scenario(30, 200, windows=12, habits=False),
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


def mean_jsd(town: MetricSpec, pairs: list[tuple[Sample, Sample]], metric: str) -> float:
    histograms = [
        [town.histograms(side.trajectories())[metric].toarray()[0] for side in pair]
        for pair in pairs
    ]
    return float(jsd_rows(*np.stack(histograms, axis=1)).mean())


def test_intervals_of_a_comparison_cover_the_expected_average_over_groups() -> None:
    town = town_of(40, "poi")
    scenario = Scenario(40, 40, MODERATE, windows=3, habits=False)
    populations = scenario.populations()
    rng = np.random.default_rng(8)
    # Both groups are alike, so the average has the mean of each.
    redrawn = [scenario.draw(populations, rng) for _ in range(600)]
    expected = mean_jsd(town, redrawn, "poi")
    covered = []
    for seed in range(200):
        drawn = {name: scenario.draw(populations, rng) for name in ("a", "b")}
        real = {name: pair[0].trajectories() for name, pair in drawn.items()}
        ours = {name: pair[1].trajectories(of_people=False) for name, pair in drawn.items()}
        found = compare_models(town, real, {"ours": ours}, seed=seed).intervals("ours")["poi"]
        covered.append(found.low <= expected <= found.high)
    assert 0.85 <= np.mean(covered) <= 0.97


def matched(person: Ints, candidates: Ints, seed: int = 0) -> tuple[Ints, Ints, Ints]:
    return match_people(person, candidates, np.random.default_rng(seed))


@given(person=PERSONS, candidates=PERSONS, seed=st.integers(0, 99))
def test_each_partner_has_as_many_trajectories(person: Ints, candidates: Ints, seed: int) -> None:
    rows, chosen, partner = matched(person, candidates, seed)
    assert len(rows) == len(chosen) == len(partner)
    assert len(set(rows.tolist())) == len(rows) and len(set(chosen.tolist())) == len(chosen)
    pairs = set(zip(partner.tolist(), candidates[chosen].tolist(), strict=True))
    assert len(pairs) == len({mine for mine, _ in pairs}) == len({theirs for _, theirs in pairs})
    assert Counter(person[rows].tolist()) == Counter(partner.tolist())
    assert len(pairs) == min(len(set(person.tolist())), len(set(candidates.tolist())))
    mine, theirs = (
        sorted(Counter(side.tolist()).values(), reverse=True) for side in (person, candidates)
    )
    kept = sum(min(two) for two in zip(mine, theirs, strict=False))
    assert len(rows) == kept, "no trajectory is lost that another choice of partners would keep"


@given(person=PERSONS, seed=st.integers(0, 99))
def test_nothing_is_lost_if_candidates_have_enough_trajectories(person: Ints, seed: int) -> None:
    candidates = np.repeat(np.arange(100, 107), 25)
    rows, _, _ = matched(person, candidates, seed)
    assert rows.tolist() == list(range(len(person)))


def test_without_candidates_or_real_people_there_are_no_pairs() -> None:
    some = np.array([3, 3, 5])
    none = np.zeros(0, dtype=np.int64)
    for person, candidates in ((some, none), (none, some), (none, none)):
        assert [part.tolist() for part in matched(person, candidates)] == [[], [], []]


def test_few_candidates_leave_people_out_and_shorten_others() -> None:
    rows, chosen, partner = matched(np.array([1, 1, 1, 1, 2, 3]), np.array([9, 9, 8]))
    assert sorted(partner.tolist()) == [1, 1, partner.max()] and partner.max() in (2, 3)
    assert (len(rows), sorted(chosen.tolist())) == (3, [0, 1, 2])


def test_partners_are_chosen_at_random_among_those_with_enough_trajectories() -> None:
    person = np.repeat(np.arange(3), 2)
    candidates = np.repeat(np.arange(20), 3)
    partners = {tuple(matched(person, candidates, seed)[1].tolist()) for seed in range(30)}
    assert len(partners) > 25
    rows = {row for chosen in partners for row in chosen}
    assert len(rows) > 40, "any trajectory of any of them may be chosen"
    again = [[part.tolist() for part in matched(person, candidates, seed)] for seed in (4, 4)]
    assert again[0] == again[1]


def one_pair(seed: int = 0, habits: bool = True) -> tuple[Sample, Sample, Pairing]:
    scenario = Scenario(25, 30, FAR, habits=habits)
    rng = np.random.default_rng(seed)
    real, other = scenario.draw(scenario.populations(), rng)
    return real, other, pairing_of(real, other, rng)


def test_the_order_of_the_sides_does_not_matter() -> None:
    real, other, pairing = one_pair()
    turned = Pairing(pairing.unit, pairing.person, pairing.person, pairing.seed)
    there = diverge(real.table, other.table, pairing)
    back = diverge(other.table, real.table, turned)
    assert (back.jsd, back.excess) == pytest.approx((there.jsd, there.excess), abs=1e-6)
    assert back.real == pytest.approx(there.other, rel=1e-4)
    assert back.other == pytest.approx(there.real, rel=1e-4)


@pytest.mark.parametrize("habits", [True, False])
def test_names_of_bins_and_people_and_the_order_of_trajectories_do_not_matter(habits: bool) -> None:
    real, other, pairing = one_pair(1, habits)
    rng = np.random.default_rng(0)
    plain = diverge(real.table, other.table, pairing)
    bins = rng.permutation(30)
    renamed = diverge(real.table[:, bins], other.table[:, bins], pairing)
    units = rng.permutation(pairing.units)
    order = rng.permutation(len(pairing.person))
    rows = rng.permutation(len(pairing.unit))
    moved = diverge(
        real.table[order],
        other.table[rows],
        Pairing(
            pairing.person[order], pairing.partner[rows], units[pairing.unit][rows], pairing.seed
        ),
    )
    for each in (renamed, moved):
        assert (each.jsd, each.excess) == pytest.approx((plain.jsd, plain.excess), abs=1e-6)
        assert each.real == pytest.approx(plain.real, rel=1e-4)
    assert moved.other[units] == pytest.approx(plain.other, rel=1e-4)


def test_a_bin_may_be_counted_in_several_entries() -> None:
    real, other, pairing = one_pair(2)
    tables = []
    for side in (real, other):
        summed = side.table.copy()
        summed.sum_duplicates()
        assert summed.nnz < side.table.nnz
        tables.append(summed)
    once = diverge(tables[0], tables[1], pairing)
    several = diverge(real.table, other.table, pairing)
    assert (once.jsd, once.excess) == pytest.approx((several.jsd, several.excess), abs=1e-6)
    assert once.real == pytest.approx(several.real, rel=1e-4)


def test_few_counts_in_very_many_bins_take_little_memory() -> None:
    real, other, pairing = one_pair(3)
    plain = diverge(real.table, other.table, pairing)
    far_apart = [
        sparse.csr_array(
            (side.table.data, 10**7 * side.visits, side.offsets),
            shape=(len(side.offsets) - 1, 10**9),
        )
        for side in (real, other)
    ]
    wide = diverge(far_apart[0], far_apart[1], pairing)
    assert (wide.jsd, wide.excess) == pytest.approx((plain.jsd, plain.excess), abs=1e-6)


def test_a_metric_without_counts_has_no_error() -> None:
    table = sparse.csr_array(np.array([[1.0, 2.0], [0.0, 1.0]]))
    empty = sparse.csr_array((2, 2))
    two = np.arange(2)
    pairing = Pairing(two, two, two, [0])
    nothing = diverge(empty, empty, pairing)
    assert (nothing.jsd, nothing.excess) == (0, 0)
    for sides in ((table, empty), (empty, table), (empty, empty)):
        found = diverge(sides[0], sides[1], pairing)
        assert found.real.tolist() == found.other.tolist() == [0, 0]
        assert found.jsd == (sides[0].nnz + sides[1].nnz > 0)


def test_samples_without_any_count_of_a_metric_have_the_largest_excess() -> None:
    people = np.arange(30)
    table = sparse.csr_array(np.ones((30, 2)))
    pairing = Pairing(people, people, people, [0])
    assert diverge(table, sparse.csr_array((30, 2)), pairing).excess > 0.5


def test_equal_samples_have_no_divergence_and_no_percentage() -> None:
    town = town_of(12, "poi", "category")
    same = Population.of(12).sample(np.full(20, 3), np.random.default_rng(0)).trajectories()
    models = {name: {"x": same} for name in ("ours", "floor")}
    found = compare_models(town, {"x": same}, models)
    for name in ("poi", "category"):
        assert found.gap_closed("ours", name, "ours", "floor") is None
    alike = replace(same, person=None)
    scores = compare_models(town, {"x": alike}, {"ours": {"x": alike}}).scores["ours"]
    assert scores.average == pytest.approx({"poi": 0, "category": 0}, abs=1e-12)
    assert scores.excess["poi"] < 0, "two samples of one population would differ by chance"


def alone(*tokens: int) -> Trajectories:
    """Three windows of one person."""
    return replace(walks(*[tokens] * 3), person=np.full(3, 7))


def test_one_person_is_compared_without_a_sampling_error() -> None:
    found = compare_models(TOWN, {"x": alone(PARK, SHOP)}, {"ours": {"x": alone(PARK)}})
    scores = found.scores["ours"]
    assert scores.people == {"x": 1} and scores.sizes == {"x": 3}
    assert scores.average["poi"] > 0
    assert all(np.isfinite(list(scores.excess.values())))
    # The swap of the only pair changes nothing. A single visit has no legs: that is far from some.
    legs = ("transitions", "flows", "jump_length")
    expected = {name: 1.0 if name in legs else 0.0 for name in scores.average}
    assert scores.excess == pytest.approx(expected, abs=1e-6)
    for one in found.intervals("ours").values():
        assert 0 <= one.low <= one.estimate + 1e-6 and one.estimate - 1e-6 <= one.high <= 1


def test_one_person_gives_no_percentage() -> None:
    models = {
        "baseline": {"x": alone(PARK, PARK, SHOP)},
        "ours": {"x": alone(SHOP)},
        "floor": {"x": alone(PARK, SHOP)},
    }
    found = compare_models(TOWN, {"x": alone(PARK, SHOP)}, models)
    assert found.gap_closed("ours", "poi", "baseline", "floor") is None


def two_models(seed: int = 0) -> tuple[Trajectories, dict[str, Mapping[str, Trajectories]]]:
    rng = np.random.default_rng(seed)
    windows = np.full(30, 3)
    real = Population.of(12).sample(windows, rng).trajectories()
    near = Population.of(12, MODERATE).sample(windows, rng, habits=False)
    floor = Population.of(12).sample(windows, rng)
    return real, {
        "near": {"x": near.trajectories(of_people=False)},
        "floor": {"x": floor.trajectories()},
    }


def test_the_seed_alone_decides_scores_and_draws() -> None:
    town = town_of(12, "poi")
    real, models = two_models()
    first, again, other = (
        compare_models(town, {"x": real}, models, seed=seed, size=50) for seed in (3, 3, 4)
    )
    assert first.scores == again.scores
    for model in models:
        assert np.array_equal(first.draws[model]["poi"], again.draws[model]["poi"])
        assert first.scores[model].excess != other.scores[model].excess
    alone = compare_models(town, {"x": real}, {"floor": models["floor"]}, seed=3, size=50)
    backwards = compare_models(town, {"x": real}, dict(reversed(models.items())), seed=3, size=50)
    assert alone.scores["floor"] == first.scores["floor"] == backwards.scores["floor"]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> TrajectoryDataset:
    return small_dataset(tmp_path_factory.mktemp("city"))


@pytest.mark.parametrize("size", [None, 40])
def test_the_floor_has_equal_numbers_of_people_and_trajectories_and_repeats_none(
    dataset: TrajectoryDataset, size: int | None
) -> None:
    sides = [real_groups(dataset, split) for split in ("test", "train")]
    pairs = match_groups(sides[0], {"model": sides[1]}, size, 2)
    floor = sampling_floor(dataset, size=size, seed=2)
    assert floor.groups is not None and floor.everybody.sizes[EVERYBODY] > 0
    for name, (real, others) in pairs.items():
        training = others["model"]
        assert len(real) == len(training) == floor.groups.sizes[name]
        people = [Counter(side.people.tolist()) for side in (real, training)]
        assert not people[0].keys() & people[1].keys()
        assert sorted(people[0].values()) == sorted(people[1].values())
        assert len(people[0]) == floor.groups.people[name]
        assert len(set(zip(real.people.tolist(), training.people.tolist(), strict=True))) == len(
            people[0]
        ), "rows of partners are in one order"


def test_several_models_with_people_are_compared_at_the_same_real_trajectories() -> None:
    real = replace(walks(*[[PARK]] * 8), person=np.array([0, 0, 0, 0, 1, 1, 2, 3]))
    first = replace(walks(*[[SHOP]] * 8), person=np.array([5, 5, 6, 6, 7, 7, 8, 9]))
    second = replace(walks(*[[SHOP]] * 8), person=np.array([1, 1, 1, 1, 1, 1, 2, 2]))
    sides = {"a": {"x": first}, "b": {"x": second}, "c": {"x": walks(*[[PARK]] * 8)}}
    ours, others = match_groups({"x": real}, sides)["x"]
    assert {len(ours), *map(len, others.values())} == {len(ours)}
    for label in ("a", "b"):
        pairs = set(zip(ours.people.tolist(), others[label].people.tolist(), strict=True))
        assert len(pairs) == len(set(ours.people.tolist()))
        assert len(pairs) == len(set(others[label].people.tolist()))


def comparison_of(averages: Mapping[str, float], spread: float, *, shared: bool) -> Comparison:
    rng = np.random.default_rng(0)
    common = spread * rng.standard_normal(2_000)
    draws = {
        name: {"poi": value + (common if shared else spread * rng.standard_normal(2_000))}
        for name, value in averages.items()
    }
    scores = {
        name: Scores({}, {}, {}, {"poi": value}, {"poi": value}, {"poi": spread})
        for name, value in averages.items()
    }
    return Comparison(scores, draws)


@given(
    model=st.floats(0, 1),
    baseline=st.floats(0, 1),
    target=st.floats(0, 1),
    error=st.floats(0, 0.3),
)
def test_there_is_a_percentage_only_for_a_gap_of_three_standard_errors(
    model: float, baseline: float, target: float, error: float
) -> None:
    share = gap_closed(model, baseline, target, standard_error=error)
    clear = baseline > target and baseline - target >= 3 * error
    assert (share is not None) == clear
    if share is not None and error > 0:
        assert abs(1 - share) <= abs(model - target) / (3 * error) * (1 + 1e-9)


def test_a_comparison_gives_no_percentage_of_a_gap_within_three_standard_errors() -> None:
    averages = {"ours": 0.9, "baseline": 0.31, "floor": 0.29}
    noisy = comparison_of(averages, 0.02, shared=False)
    gap, error = noisy.gap("poi", "baseline", "floor")
    assert gap == pytest.approx(0.02)
    assert error == pytest.approx(0.02 * 2**0.5, rel=0.1)
    assert noisy.gap_closed("ours", "poi", "baseline", "floor") is None
    assert noisy.gap_closed("ours", "poi", "ours", "floor") == pytest.approx(0)
    assert noisy.gap_closed("baseline", "poi", "ours", "floor") == pytest.approx(0.967, abs=1e-3)
    assert noisy.gap_closed("ours", "poi", "floor", "baseline") is None
    shared = comparison_of(averages, 0.02, shared=True)
    assert shared.gap("poi", "baseline", "floor")[1] == pytest.approx(0, abs=1e-12)
    assert shared.gap_closed("baseline", "poi", "baseline", "floor") is None, "no known error"


def test_a_baseline_at_the_floor_gives_no_percentage_however_bad_the_model() -> None:
    town = town_of(12, "poi", "category")
    population = Population.of(12)
    far = Population.of(12, FAR)
    rng = np.random.default_rng(1)
    windows = np.full(25, 3)
    shares = []
    for seed in range(100):
        real, baseline, floor = (population.sample(windows, rng).trajectories() for _ in range(3))
        ours = far.sample(windows, rng, habits=False).trajectories(of_people=False)
        models = {"baseline": {"x": baseline}, "ours": {"x": ours}, "floor": {"x": floor}}
        found = compare_models(town, {"x": real}, models, seed=seed)
        shares.append(found.gap_closed("ours", "poi", "baseline", "floor"))
        shares.append(found.gap_closed("ours", "category", "baseline", "floor"))
    assert len([share for share in shares if share is not None]) <= 4  # of 200


def test_the_error_of_a_gap_knows_that_both_models_meet_the_same_real_people() -> None:
    town = town_of(12, "poi")
    base = Population.of(12)
    worse = Population.of(12, FAR)
    rng = np.random.default_rng(2)
    windows = np.full(40, 4)
    gaps = []
    errors = []
    apart = []
    for seed in range(100):
        real = base.sample(windows, rng).trajectories()
        models = {
            name: {"x": worse.sample(2 * windows, rng, habits=False).trajectories(of_people=False)}
            for name in ("first", "second")
        }
        found = compare_models(town, {"x": real}, models, seed=seed)
        gap, error = found.gap("poi", "first", "second")
        gaps.append(gap)
        errors.append(error)
        first, second = (found.scores[name].standard_error["poi"] for name in models)
        apart.append(np.hypot(first, second))
    assert abs(standard_errors_from(0, gaps)) < 2.5
    assert np.mean(errors) == pytest.approx(np.std(gaps, ddof=1), rel=0.2)
    assert np.mean(errors) < 0.8 * np.mean(apart)
