"""Metrics against plain loops, in a town counted by hand, and their mathematics."""

from __future__ import annotations

import json
import math
import tracemalloc
from bisect import bisect_right
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import FrozenInstanceError, replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import sparse
from scipy.spatial.distance import jensenshannon

from mobatlas import MobatlasError, TrajectoryDataset
from mobatlas.data.trajectories import Trajectories
from mobatlas.data.vocabulary import FIRST_POI, HOME, OTHER, WORK
from mobatlas.evaluation.comparison import compare
from mobatlas.evaluation.metrics import (
    DWELL_EDGES,
    METRICS,
    PAPER_METRICS,
    Metric,
    MetricInput,
    MetricSpec,
    metrics,
    register_metric,
    travel_distance,
)
from mobatlas.features.divergences import jsd
from tests.small_town import ANCHORS, CAFE, NAMES, PARK, SHOP, TOWN, small_dataset, walks

Place = tuple[float, float]
DEGREE_KM = 6371.0088 * math.pi / 180
UNKNOWN = (math.nan,) * 4
SOUTH_WEST, SOUTH_EAST, NORTH_WEST, NORTH_EAST, OUTSIDE = range(5)
anybody = st.sampled_from(
    [ANCHORS, UNKNOWN, (*ANCHORS[:2], math.nan, math.nan), (9.0, 9.0, 1.9, 0.1)]
)
somewhere = st.lists(st.sampled_from([HOME, WORK, OTHER, PARK, CAFE, SHOP]), max_size=7)
samples = st.lists(st.tuples(somewhere, anybody), min_size=1, max_size=8).map(
    lambda rows: walks(*(walk for walk, _ in rows), anchors=[anchors for _, anchors in rows])
)
histograms = st.integers(1, 12).flatmap(
    lambda bins: st.tuples(
        *(
            st.lists(st.sampled_from([0, 0, 1, 2, 50, 10**6]), min_size=bins, max_size=bins).filter(
                sum
            ),
        )
        * 2
    )
)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> TrajectoryDataset:
    return small_dataset(tmp_path_factory.mktemp("city"))


@pytest.fixture(scope="module")
def spec(dataset: TrajectoryDataset) -> MetricSpec:
    return MetricSpec.of(dataset, cells=12)


def counted(trajectories: Trajectories, metric: str, spec: MetricSpec = TOWN) -> dict[int, float]:
    row = spec.histograms(trajectories)[metric]
    return dict(zip(row.indices.tolist(), row.data.tolist(), strict=True))


def slow_km(a: Place, b: Place) -> float:
    (lat_a, lon_a), (lat_b, lon_b) = (tuple(map(math.radians, place)) for place in (a, b))
    h = (
        math.sin((lat_b - lat_a) / 2) ** 2
        + math.cos(lat_a) * math.cos(lat_b) * math.sin((lon_b - lon_a) / 2) ** 2
    )
    return 2 * 6371.0088 * math.atan2(math.sqrt(h), math.sqrt(1 - h))


def slow_places(spec: MetricSpec, tokens: Sequence[int], anchors: Sequence[float]) -> list[Place]:
    result = []
    for token in tokens:
        if token == HOME:
            place = (anchors[0], anchors[1])
        elif token == WORK:
            place = (anchors[2], anchors[3])
        else:
            row = spec.vocabulary.table.slice(token, 1).to_pylist()[0]
            place = (math.nan, math.nan) if row["lat"] is None else (row["lat"], row["lon"])
        if not any(map(math.isnan, place)):
            result.append(place)
    return result


def slow_cell(spec: MetricSpec, place: Place) -> Hashable:
    south, west, north, east = spec.box
    if not (south <= place[0] <= north and west <= place[1] <= east):
        return "outside"
    row = int((place[0] - south) / (north - south) * spec.cells)
    column = int((place[1] - west) / (east - west) * spec.cells)
    return min(row, spec.cells - 1), min(column, spec.cells - 1)


def slow_counts(spec: MetricSpec, trajectories: Trajectories) -> dict[str, Counter[Hashable]]:
    counts: dict[str, Counter[Hashable]] = {
        name: Counter() for name in [*NAMES, "origins", "destinations"]
    }
    categories = spec.vocabulary.categories
    for number, (start, end) in enumerate(pairwise(trajectories.offsets.tolist())):
        tokens = trajectories.tokens[start:end].tolist()
        places = slow_places(spec, tokens, trajectories.anchors[number].tolist())
        cells = [slow_cell(spec, place) for place in places]
        km = sum(slow_km(a, b) for a, b in pairwise(places))
        counts["spatial"].update(cells)
        counts["trip"].update(pairwise(cells))
        counts["origins"].update(cells[:-1])
        counts["destinations"].update(cells[1:])
        counts["travel_distance"][bisect_right(spec.travel_edges, km)] += 1
        counts["daily_distance"][bisect_right(spec.daily_edges, km / spec.days)] += 1
        counts["length"]["longer" if len(tokens) > spec.longest else len(tokens)] += 1
        counts["poi"].update(token for token in tokens if token >= FIRST_POI)
        counts["poi_all"].update(tokens)
        counts["category"].update(categories[token] for token in tokens)
        counts["transitions"].update((categories[a], categories[b]) for a, b in pairwise(tokens))
    assert trajectories.arrivals is not None and trajectories.stays is not None
    counts["hour"] = Counter(second % 86_400 // 3_600 for second in trajectories.arrivals.tolist())
    counts["dwell"] = Counter(
        bisect_right(DWELL_EDGES, second / 60) for second in trajectories.stays.tolist()
    )
    return counts


def slow_jsd(a: Counter[Hashable], b: Counter[Hashable]) -> float:
    total = 0.0
    for key in a.keys() | b.keys():
        p = a[key] / a.total()
        q = b[key] / b.total()
        total += sum(x / 2 * math.log2(2 * x / (p + q)) for x in (p, q) if x)
    return total


def random_walks(dataset: TrajectoryDataset, n: int = 150) -> Trajectories:
    """Unlikely trajectories: too long, empty, without anchors, or with anchors outside the box."""
    rng = np.random.default_rng(5)
    tokens = [
        rng.integers(HOME, len(dataset.vocabulary), size=size).tolist()
        for size in rng.integers(0, 40, size=n)
    ]
    anchors = dataset.anchors[rng.integers(len(dataset.anchors), size=n)].copy()
    anchors[::5, :2] = np.nan
    anchors[1::7] += 3.0
    visits = sum(map(len, tokens))
    arrivals = rng.integers(10 * 86_400, size=visits)
    stays = rng.integers(1 + 60 * rng.choice(DWELL_EDGES, size=visits))
    return replace(walks(*tokens, anchors=anchors.tolist()), arrivals=arrivals, stays=stays)


def test_every_metric_agrees_with_a_slow_count(
    dataset: TrajectoryDataset, spec: MetricSpec
) -> None:
    real = Trajectories.of(dataset, dataset.split("test"))
    synthetic = random_walks(dataset)
    slow = [slow_counts(spec, sample) for sample in (real, synthetic)]
    for sample, expected in zip((real, synthetic), slow, strict=True):
        for name, row in spec.histograms(sample).items():
            both = (
                [expected[name]]
                if name != "trip_marginals"
                else [expected["origins"], expected["destinations"]]
            )
            assert sorted(row.data.tolist()) == sorted(n for part in both for n in part.values()), (
                name
            )
    result = compare(spec, real, synthetic)
    names = [metric.name for metric in METRICS.values() if metric.name != "trip_marginals"]
    expected_jsd = {name: slow_jsd(slow[0][name], slow[1][name]) for name in names}
    expected_jsd["trip_marginals"] = (
        sum(slow_jsd(slow[0][x], slow[1][x]) for x in ("origins", "destinations")) / 2
    )
    assert result == pytest.approx(expected_jsd, abs=1e-9)
    assert min(result.values()) > 0.01


def test_training_people_fix_the_bins(dataset: TrajectoryDataset, spec: MetricSpec) -> None:
    train = dataset.split("train")
    points = [
        (row["lat"], row["lon"])
        for row in dataset.vocabulary.table.to_pylist()
        if row["lat"] is not None
    ]
    for person in set(dataset.person[train].tolist()):
        points += [
            tuple(dataset.anchors[person, part].tolist()) for part in (slice(0, 2), slice(2, 4))
        ]
    lat, lon = ([x for x in axis if not math.isnan(x)] for axis in zip(*points, strict=True))
    assert spec.box == (min(lat), min(lon), max(lat), max(lon))
    km = [
        sum(
            slow_km(a, b)
            for a, b in pairwise(slow_places(spec, dataset.trajectory(i).tolist(), anchors))
        )
        for i, anchors in zip(
            train.tolist(), dataset.anchors[dataset.person[train]].tolist(), strict=True
        )
    ]
    assert spec.travel_edges[-1] == pytest.approx(np.quantile(km, 0.99))
    assert np.diff(spec.travel_edges) == pytest.approx(spec.travel_edges[0])
    assert spec.daily_edges == pytest.approx(np.quantile(km, np.arange(1, 20) / 20) / 3)
    assert (spec.longest, spec.days) == (max(dataset.lengths[train]), 3)


def test_the_four_metrics_of_the_paper_are_registered() -> None:
    assert PAPER_METRICS == ("spatial", "travel_distance", "trip", "poi")
    assert set(PAPER_METRICS) < set(NAMES)
    assert len(set(NAMES)) == len(metrics())
    assert all(metric.title and metric.description for metric in METRICS.values())


def test_home_and_work_are_at_the_anchors_of_the_person() -> None:
    assert counted(walks([HOME, WORK], [HOME], anchors=[ANCHORS, (0.5, 1.5, 0, 0)]), "spatial") == {
        SOUTH_WEST: 1,
        SOUTH_EAST: 1,
        NORTH_EAST: 1,
    }


def test_a_point_outside_the_box_counts_as_outside() -> None:
    away = (-0.1, 0.5, 0.5, 2.1)
    assert counted(walks([HOME, PARK, WORK], anchors=[away]), "spatial") == {
        OUTSIDE: 2,
        SOUTH_WEST: 1,
    }
    trips = {OUTSIDE * 5 + SOUTH_WEST: 1, SOUTH_WEST * 5 + OUTSIDE: 1}
    assert counted(walks([HOME, PARK, WORK], anchors=[away]), "trip") == trips


def test_the_outermost_points_are_inside() -> None:
    assert counted(walks([PARK, CAFE, SHOP]), "spatial") == {
        SOUTH_WEST: 1,
        NORTH_EAST: 1,
        NORTH_WEST: 1,
    }


@pytest.mark.parametrize("nowhere", [OTHER, HOME])
def test_a_place_without_coordinates_is_skipped_in_geometry(nowhere: int) -> None:
    with_it = walks([PARK, nowhere, SHOP], anchors=[UNKNOWN])
    without = walks([PARK, SHOP])
    for metric in ("spatial", "trip", "trip_marginals", "travel_distance", "daily_distance", "poi"):
        assert counted(with_it, metric) == counted(without, metric)
    assert counted(with_it, "length") == {3: 1}
    assert sum(counted(with_it, "poi_all").values()) == 3


def test_trips_do_not_lead_from_one_trajectory_into_the_next() -> None:
    assert counted(walks([PARK, SHOP], [CAFE]), "trip") == {SOUTH_WEST * 5 + NORTH_WEST: 1}


def test_trip_marginals_hold_origins_beside_destinations() -> None:
    result = counted(walks([PARK, SHOP, CAFE]), "trip_marginals")
    assert result == {SOUTH_WEST: 1, NORTH_WEST: 1, 5 + NORTH_WEST: 1, 5 + NORTH_EAST: 1}


def test_every_trajectory_has_a_distance_and_a_length() -> None:
    nothing_to_see = walks([], [OTHER], [PARK], [PARK, SHOP], [PARK] * 9)
    assert travel_distance(nothing_to_see, TOWN.vocabulary) == pytest.approx(
        [0, 0, 0, 2 * DEGREE_KM, 0]
    )
    assert counted(nothing_to_see, "travel_distance") == {0: 4, 2: 1}
    assert counted(nothing_to_see, "daily_distance") == {0: 4, 1: 1}
    assert counted(nothing_to_see, "length") == {0: 1, 1: 2, 2: 1, TOWN.longest + 1: 1}


def test_an_edge_belongs_to_the_bin_above_it() -> None:
    from_zero = replace(TOWN, travel_edges=(0.0, 1.0), daily_edges=(0.0, 1.0))
    for metric in ("travel_distance", "daily_distance"):
        assert counted(walks([PARK]), metric, from_zero) == {1: 1}


def test_a_box_without_a_width_is_one_cell() -> None:
    point = MetricSpec(TOWN.vocabulary, 3, (2.0, 0.0, 2.0, 0.0), (1.0,), (1.0,), 4, 1)
    assert point.cell(np.array([[2.0, 0.0], [2.0, 0.1]])).tolist() == [0, 9]


@given(sample=samples)
def test_histograms_are_the_column_sums_of_the_counts(sample: Trajectories) -> None:
    histograms = TOWN.histograms(sample)
    for name, table in TOWN.counts(sample).items():
        assert table.shape[0] == len(sample)
        assert histograms[name].toarray()[0].tolist() == table.toarray().sum(0).tolist()


def test_trip_counts_stay_sparse(dataset: TrajectoryDataset) -> None:
    fine = MetricSpec.of(dataset, cells=300)  # 8e9 possible trips
    real = Trajectories.of(dataset, dataset.split("test"))
    tracemalloc.start()
    compare(fine, real, real)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 50e6


def test_synthetic_data_do_not_move_the_grid(dataset: TrajectoryDataset, spec: MetricSpec) -> None:
    real = Trajectories.of(dataset, dataset.split("test"))
    before = spec.histograms(real)["spatial"].toarray()[0]
    ruler = json.dumps(spec.as_dict())
    far = Trajectories(real.tokens, real.offsets, real.anchors + 40)
    moved = spec.histograms(far)["spatial"].toarray()[0]
    anchored = np.isin(real.tokens, [HOME, WORK]).sum()
    assert moved[-1] == anchored
    assert (moved[:-1] <= before[:-1]).all()
    assert json.dumps(spec.as_dict()) == ruler
    with pytest.raises(FrozenInstanceError):
        spec.cells = 100  # type: ignore[misc]


def test_the_bins_can_be_written_as_json(spec: MetricSpec) -> None:
    printed = json.loads(json.dumps(spec.as_dict(), allow_nan=False))
    assert (printed["cells"], printed["days"]) == (12, 3)
    assert len(printed["travel_edges_km"]) == 50
    height, width = TOWN.as_dict()["cell_km"]
    assert (height, width) == pytest.approx(
        (DEGREE_KM, DEGREE_KM * math.cos(math.radians(1))), abs=1e-3
    )


def test_bins_need_cells_and_people(dataset: TrajectoryDataset) -> None:
    with pytest.raises(MobatlasError, match="at least 1"):
        MetricSpec.of(dataset, cells=0)
    with pytest.raises(MobatlasError, match="split"):
        MetricSpec.of(dataset, split="tests")


@given(pair=histograms)
def test_jsd_is_the_square_of_scipys_distance_in_bits(pair: tuple[list[int], list[int]]) -> None:
    a, b = (np.array(values, dtype=np.float64) for values in pair)
    expected = pytest.approx(jensenshannon(a, b, base=2) ** 2, abs=1e-7)
    assert jsd(a, b) == expected
    assert jsd(sparse.csr_array(a[None]), sparse.csr_array(b[None])) == expected
    assert jsd(sparse.csr_array(a[None]), b) == expected


def test_an_empty_histogram_has_the_largest_divergence() -> None:
    some = np.array([1.0, 2.0])
    none = np.zeros(2)
    assert (jsd(some, none), jsd(none, some), jsd(none, none)) == (1, 1, 0)


def test_histograms_of_different_bins_are_refused() -> None:
    with pytest.raises(ValueError, match="2 and 3 bins"):
        jsd(np.ones(2), np.ones(3))


@given(sample=samples)
def test_identical_samples_give_zero(sample: Trajectories) -> None:
    assert compare(TOWN, sample, sample) == pytest.approx(dict.fromkeys(NAMES, 0.0), abs=1e-12)


def test_disjoint_samples_give_one() -> None:
    here = walks([PARK, PARK], [PARK, PARK], anchors=[UNKNOWN, UNKNOWN])
    there = walks([CAFE, SHOP, CAFE], [CAFE, SHOP, CAFE])
    assert compare(TOWN, here, there) == pytest.approx(dict.fromkeys(NAMES, 1.0))


@given(a=samples, b=samples)
def test_both_sides_count_alike(a: Trajectories, b: Trajectories) -> None:
    result = compare(TOWN, a, b)
    assert compare(TOWN, b, a) == pytest.approx(result)
    assert all(0 <= result[name] <= 1 + 1e-12 for name in NAMES)


@given(a=samples, b=samples, seed=st.integers(0, 99))
def test_the_order_of_trajectories_does_not_matter(
    a: Trajectories, b: Trajectories, seed: int
) -> None:
    shuffled = a.take(np.random.default_rng(seed).permutation(len(a)))
    assert compare(TOWN, shuffled, b) == compare(TOWN, a, b)


def test_a_metric_can_be_added_from_outside_the_package() -> None:
    def count_stops(sample: MetricInput) -> sparse.csr_array:
        bins = np.minimum(np.diff(sample.trajectories.offsets), 2)
        return sample.count_each(bins, 3)

    metric = Metric(
        "stops", "Stops", "JSD of trajectories with no, one or more visits.", count_stops
    )
    register_metric(metric)
    try:
        assert compare(TOWN, walks([PARK], []), walks([PARK], [SHOP, PARK]))["stops"] == 0.5
        with pytest.raises(MobatlasError, match="metric 'stops' exists already"):
            register_metric(metric)
    finally:
        del METRICS["stops"]
    assert "stops" not in compare(TOWN, walks([PARK]), walks([PARK]))
