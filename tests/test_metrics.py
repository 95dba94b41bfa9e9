"""Metrics against plain loops, in a town counted by hand, and their mathematics."""

from __future__ import annotations

import json
import math
import tracemalloc
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import FrozenInstanceError, replace
from functools import cache
from itertools import pairwise, permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import sparse
from scipy.spatial.distance import jensenshannon

from mobatlas import MobatlasError, TrajectoryDataset
from mobatlas.data.dataset import Trajectories
from mobatlas.data.types import FIRST_POI, HOME, OTHER, WORK, Vocabulary
from mobatlas.evaluation.comparison import compare
from mobatlas.evaluation.metrics import (
    DWELL_EDGES,
    MORE_PLACES,
    PAPER_METRICS,
    MetricInput,
    MetricSpec,
    daily_motifs,
    gyration_km,
    metrics,
    register_metric,
    travel_distance,
)
from mobatlas.features.divergences import column_sums, jsd
from mobatlas.features.maps import (
    FEATURES,
    FeatureMap,
    build_feature,
    feature_maps,
    register_feature,
)
from tests.small_town import ANCHORS, CAFE, NAMES, PARK, SHOP, TOWN, small_dataset, walks

Place = tuple[float, float]
Moves = tuple[tuple[int, int], ...]  # (from, to) between numbered places
ALL_NAMES = [metric.name for metric in metrics(with_times=True)]
DAY = 86_400
BANDS_KM = (1, 2, 5, 10, 20, 50)  # of distance from home
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


def slow_bin(edges: Sequence[float], value: float) -> int:
    """The number of edges at or below a value; an edge may be the same leg, but for rounding."""
    return sum(edge <= value * (1 + 1e-12) for edge in edges)


def slow_gyration(places: Sequence[Place]) -> float:
    """Root mean square distance from the mean place, on a plane that touches the globe there."""
    if not places:
        return 0.0
    lat = sum(place[0] for place in places) / len(places)
    lon = sum(place[1] for place in places) / len(places)
    squares = 0.0
    for place in places:
        north = (place[0] - lat) * DEGREE_KM
        east = (place[1] - lon) * DEGREE_KM * math.cos(math.radians(lat))
        squares += north * north + east * east
    return math.sqrt(squares / len(places))


@cache
def slow_motif(moves: Moves) -> Moves:
    """The same for two networks if and only if one is the other with other names of places."""
    names = sorted({place for move in moves for place in move})
    renamed = [dict(zip(names, order, strict=True)) for order in permutations(range(len(names)))]
    return min((tuple(sorted((to[a], to[b]) for a, b in moves)) for to in renamed), default=())


def slow_days(
    tokens: Sequence[int], arrivals: Sequence[int], stays: Sequence[int], most: int
) -> list[list[int]]:
    """The tokens of each day, in order; a stay is in all of its days, in at most `most` + 1."""
    days: defaultdict[int, list[int]] = defaultdict(list)
    for token, arrival, stay in zip(tokens, arrivals, stays, strict=True):
        day = arrival // DAY
        days[day].append(token)
        for later in range(day + 1, day + most + 1):
            if arrival + stay > later * DAY:
                days[later].append(token)
    return [days[day] for day in sorted(days)]


def slow_network(day: Sequence[int]) -> Hashable:
    if len(set(day)) > 6:
        return "more than six places"
    return slow_motif(tuple(sorted({(a, b) for a, b in pairwise(day) if a != b})))


def networks_of(trajectories: Trajectories, most: int) -> list[Hashable]:
    """The network of every day."""
    assert trajectories.arrivals is not None and trajectories.stays is not None
    result: list[Hashable] = []
    for start, end in pairwise(trajectories.offsets.tolist()):
        tokens, arrivals, stays = (
            part[start:end].tolist()
            for part in (trajectories.tokens, trajectories.arrivals, trajectories.stays)
        )
        result += map(slow_network, slow_days(tokens, arrivals, stays, most))
    return result


def decoded(motif: int) -> Moves:
    """The network of a motif of a `MetricSpec`: bit 6 a + b stands for a move from a to b."""
    return slow_motif(tuple((bit // 6, bit % 6) for bit in range(36) if motif >> bit & 1))


def slow_counts(spec: MetricSpec, trajectories: Trajectories) -> dict[str, Counter[Hashable]]:
    counts: dict[str, Counter[Hashable]] = {name: Counter() for name in ALL_NAMES}
    categories = spec.vocabulary.categories
    for number, (start, end) in enumerate(pairwise(trajectories.offsets.tolist())):
        tokens = trajectories.tokens[start:end].tolist()
        anchors = trajectories.anchors[number].tolist()
        places = slow_places(spec, tokens, anchors)
        cells = [slow_cell(spec, place) for place in places]
        legs = [slow_km(a, b) for a, b in pairwise(places)]
        counts["spatial"].update(cells)
        if cells:
            counts["trip"][cells[0], cells[-1]] += 1
        counts["flows"].update(pairwise(cells))
        counts["jump_length"].update(slow_bin(spec.leg_edges, km) for km in legs)
        counts["travel_distance"][slow_bin(spec.travel_edges, sum(legs))] += 1
        counts["daily_distance"][slow_bin(spec.daily_edges, sum(legs) / spec.days)] += 1
        counts["radius_of_gyration"][slow_bin(spec.gyration_edges, slow_gyration(places))] += 1
        counts["length"]["longer" if len(tokens) > spec.longest else len(tokens)] += 1
        counts["poi"].update(token for token in tokens if token >= FIRST_POI)
        counts["poi_all"].update(tokens)
        counts["category"].update(categories[token] for token in tokens)
        counts["transitions"].update((categories[a], categories[b]) for a, b in pairwise(tokens))
        for token in tokens:
            home, place = (slow_places(spec, [each], anchors) for each in (HOME, token))
            if token != HOME and home and place:
                counts["distance"][slow_bin(BANDS_KM, slow_km(home[0], place[0]))] += 1
        visits = Counter(tokens)
        counts["distinct_places"]["more" if len(visits) > spec.most_places else len(visits)] += 1
        for rank, times in enumerate(sorted(visits.values(), reverse=True)):
            counts["rank_frequency"][rank if rank < 20 else "rest"] += times
    assert trajectories.arrivals is not None and trajectories.stays is not None
    counts["hour"] = Counter(second % DAY // 3_600 for second in trajectories.arrivals.tolist())
    counts["dwell"] = Counter(
        bisect_right(DWELL_EDGES, second / 60) for second in trajectories.stays.tolist()
    )
    bins = {"more than six places", *map(decoded, spec.motifs)}
    counts["motifs"] = Counter(
        network if network in bins else "unknown"
        for network in networks_of(trajectories, spec.days)
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
            assert sorted(row.data[row.data > 0].tolist()) == sorted(expected[name].values()), name
    result = compare(spec, real, synthetic)
    assert list(result) == ALL_NAMES
    expected_jsd = {name: slow_jsd(slow[0][name], slow[1][name]) for name in ALL_NAMES}
    assert result == pytest.approx(expected_jsd, abs=1e-9)
    assert min(result.values()) > 0.01


def test_training_and_test_people_agree_with_a_slow_count(
    dataset: TrajectoryDataset, spec: MetricSpec
) -> None:
    train, test = (
        Trajectories.of(dataset, dataset.split(split)[:150]) for split in ("train", "test")
    )
    slow = [slow_counts(spec, sample) for sample in (train, test)]
    expected = {name: slow_jsd(slow[0][name], slow[1][name]) for name in ALL_NAMES}
    assert compare(spec, train, test) == pytest.approx(expected, abs=1e-9)


def slow_quantiles(values: Sequence[float], shares: Sequence[float]) -> list[float]:
    ordered = sorted(values)
    result = []
    for share in shares:
        place = share * (len(ordered) - 1)
        low = min(int(place), len(ordered) - 2)
        result.append(ordered[low] + (place - low) * (ordered[low + 1] - ordered[low]))
    return result


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
    walked = [dataset.trajectory(row).tolist() for row in train.tolist()]
    located = [
        slow_places(spec, tokens, anchors)
        for tokens, anchors in zip(
            walked, dataset.anchors[dataset.person[train]].tolist(), strict=True
        )
    ]
    legs = [[slow_km(a, b) for a, b in pairwise(places)] for places in located]
    km = [sum(each) for each in legs]
    assert spec.travel_edges[-1] == pytest.approx(slow_quantiles(km, [0.99])[0])
    assert np.diff(spec.travel_edges) == pytest.approx(spec.travel_edges[0])
    twentieths = [number / 20 for number in range(1, 20)]
    for edges, values in (
        (spec.daily_edges, [each / 3 for each in km]),
        (spec.leg_edges, [each for some in legs for each in some]),
        (spec.gyration_edges, [slow_gyration(places) for places in located]),
    ):
        expected = slow_quantiles(values, twentieths)
        kept = [a for a, b in pairwise([*expected, math.inf]) if b - a > 1e-9]
        assert edges == pytest.approx(kept)
    assert (spec.longest, spec.days) == (max(map(len, walked)), 3)
    assert spec.most_places == max(len(set(tokens)) for tokens in walked)


def test_the_most_frequent_motifs_of_training_days_have_bins_of_their_own(
    dataset: TrajectoryDataset, spec: MetricSpec
) -> None:
    days = Counter(networks_of(Trajectories.of(dataset, dataset.split("train")), spec.days))
    del days["more than six places"]
    known = [decoded(motif) for motif in spec.motifs]
    assert len(set(known)) == len(known) == min(60, len(days))
    frequent = sorted(days.values(), reverse=True)[: len(known)]
    assert sorted((days[motif] for motif in known), reverse=True) == frequent
    assert spec.motifs == tuple(sorted(spec.motifs))


def test_bins_of_distances_hold_equal_shares_of_training_people(
    dataset: TrajectoryDataset, spec: MetricSpec
) -> None:
    train = Trajectories.of(dataset, dataset.split("train"))
    for metric, edges in (
        ("daily_distance", spec.daily_edges),
        ("jump_length", spec.leg_edges),
        ("radius_of_gyration", spec.gyration_edges),
    ):
        shares = spec.histograms(train)[metric].toarray()[0]
        shares /= shares.sum()
        assert len(shares) == len(edges) + 1
        assert np.median(shares) == pytest.approx(0.05, abs=0.01)


def test_the_four_metrics_of_the_paper_come_first() -> None:
    assert PAPER_METRICS == ("spatial", "travel_distance", "trip", "poi")
    assert tuple(NAMES[:4]) == tuple(ALL_NAMES[:4]) == PAPER_METRICS
    assert len(set(ALL_NAMES)) == len(ALL_NAMES)
    timed = {"hour", "dwell", "motifs"}
    assert set(ALL_NAMES) - set(NAMES) == timed
    assert {each.name for each in metrics(with_times=True) if each.needs_times} == timed
    assert all(metric.title and metric.description for metric in metrics(with_times=True))


def test_metrics_of_time_are_left_out_of_samples_without_times(
    dataset: TrajectoryDataset, spec: MetricSpec
) -> None:
    real = Trajectories.of(dataset, dataset.split("test"))
    untimed = replace(real, arrivals=None, stays=None)
    assert list(compare(spec, real, untimed)) == NAMES


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
    flows = {OUTSIDE * 5 + SOUTH_WEST: 1, SOUTH_WEST * 5 + OUTSIDE: 1}
    assert counted(walks([HOME, PARK, WORK], anchors=[away]), "flows") == flows
    assert counted(walks([HOME, PARK, WORK], anchors=[away]), "trip") == {OUTSIDE * 5 + OUTSIDE: 1}


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
    for metric in (
        *("spatial", "trip", "flows", "travel_distance", "daily_distance"),
        *("jump_length", "radius_of_gyration", "poi"),
    ):
        assert counted(with_it, metric) == counted(without, metric)
    assert counted(with_it, "length") == {3: 1}
    assert sum(counted(with_it, "poi_all").values()) == 3


def test_a_trip_leads_from_the_first_to_the_last_visit_of_a_trajectory() -> None:
    assert counted(walks([PARK, SHOP, CAFE]), "trip") == {SOUTH_WEST * 5 + NORTH_EAST: 1}
    assert counted(walks([PARK, SHOP, PARK]), "trip") == {SOUTH_WEST * 5 + SOUTH_WEST: 1}
    assert counted(walks([SHOP]), "trip") == {NORTH_WEST * 5 + NORTH_WEST: 1}


def test_a_trip_skips_visits_without_coordinates_at_both_ends() -> None:
    lost = walks([OTHER, HOME, PARK, SHOP, OTHER], [OTHER, HOME], [], anchors=[UNKNOWN] * 3)
    assert counted(lost, "trip") == {SOUTH_WEST * 5 + NORTH_WEST: 1}
    assert TOWN.counts(lost)["trip"].sum(1).tolist() == [1, 0, 0]


def test_flows_are_pairs_of_consecutive_visits_of_one_trajectory() -> None:
    assert counted(walks([PARK, SHOP], [CAFE]), "flows") == {SOUTH_WEST * 5 + NORTH_WEST: 1}
    assert counted(walks([PARK, SHOP, CAFE]), "flows") == {
        SOUTH_WEST * 5 + NORTH_WEST: 1,
        NORTH_WEST * 5 + NORTH_EAST: 1,
    }


def test_the_radius_of_gyration_is_the_spread_around_the_mean_place() -> None:
    owner = np.array([0, 0, 1, 1, 1, 3])
    places = np.array([[0, 0], [2, 0], [60, 1], [60, 1], [60, 4], [5, 5]], dtype=np.float64)
    result = gyration_km(4, owner, places)
    # Two places at one degree from their mean, then three at 1, 1 and 2 half degrees of longitude.
    assert result == pytest.approx([DEGREE_KM, math.sqrt(2) * 0.5 * DEGREE_KM, 0, 0])


def test_the_radius_of_gyration_does_not_jump_at_the_antimeridian() -> None:
    owner = np.zeros(2, dtype=np.int64)
    here, there = (
        gyration_km(1, owner, np.array([[-17.0, west], [-17.5, east]]))
        for west, east in ((10.0, 11.0), (179.5, -179.5))
    )
    assert there == pytest.approx(here)


def test_places_are_ranked_by_the_visits_of_their_trajectory() -> None:
    walked = walks([PARK, CAFE, CAFE, PARK, CAFE, SHOP], [SHOP], [])
    assert TOWN.counts(walked)["rank_frequency"].toarray()[:, :4].tolist() == [
        [3, 2, 1, 0],
        [1, 0, 0, 0],
        [0, 0, 0, 0],
    ]
    assert TOWN.counts(walked)["rank_frequency"].shape == (3, 21)
    many = walks([*range(FIRST_POI, FIRST_POI + 25), FIRST_POI + 24])
    rows = MetricInput(many, TOWN).counts(FEATURES["rank_frequency"]).toarray()
    assert rows.tolist() == [[2, *[1] * 19, 5]]


def test_trajectories_of_more_different_places_than_real_ones_share_a_bin() -> None:
    walked = walks([], [PARK] * 5, [PARK, SHOP, PARK], [PARK, SHOP, CAFE], [HOME, WORK, PARK, CAFE])
    assert counted(walked, "distinct_places") == {0: 1, 1: 1, 2: 1, 3: 2}


def timed(*days: tuple[int, float, float], offsets: Sequence[int] | None = None) -> Trajectories:
    """Walks of (token, arrival in hours, stay in hours)."""
    tokens, arrivals, stays = zip(*days, strict=True)
    walked = walks(tokens)
    return replace(
        walked,
        arrivals=np.array([round(3_600 * hour) for hour in arrivals]),
        stays=np.array([round(3_600 * hours) for hours in stays]),
        **({} if offsets is None else {"offsets": np.array(offsets)}),
    )


def motifs_of(walked: Trajectories, days: int = 3) -> list[Moves | str]:
    _, codes = daily_motifs(walked, days)
    return ["more" if code == MORE_PLACES else decoded(code) for code in codes.tolist()]


STAY: Moves = ()
THERE: Moves = ((0, 1),)
THERE_AND_BACK: Moves = ((0, 1), (1, 0))


def test_a_stay_over_midnight_belongs_to_both_days() -> None:
    walked = timed((HOME, 0, 9), (PARK, 10, 4), (HOME, 20, 14), (CAFE, 34, 2))
    assert motifs_of(walked) == [THERE_AND_BACK, THERE]
    until_midnight = timed((HOME, 0, 9), (PARK, 10, 14), (HOME, 24, 10))
    assert motifs_of(until_midnight) == [THERE, STAY]
    assert motifs_of(timed((HOME, 20, 60))) == [STAY] * 4
    assert motifs_of(timed((HOME, 20, 24 * 30))) == [STAY] * 4, "at most the days of a window more"


def test_moves_within_one_place_are_no_moves() -> None:
    assert motifs_of(timed((HOME, 1, 1), (HOME, 3, 1), (PARK, 5, 0), (PARK, 6, 0))) == [THERE]


def test_a_day_of_more_than_six_places_shares_a_bin_with_others_of_that_kind() -> None:
    six = [(token, token, 0.5) for token in range(HOME, HOME + 6)]
    assert motifs_of(timed(*six)) == [tuple((place, place + 1) for place in range(5))]
    assert motifs_of(timed(*six, (HOME + 6, 20, 1))) == ["more"]
    town = replace(TOWN, motifs=(int(daily_motifs(timed((HOME, 1, 1)), 2)[1][0]),))
    days = timed(
        *((HOME, 1, 1), (PARK, 26, 1), (CAFE, 28, 1)),
        *((token, 50 + token / 2, 0.2) for token in range(HOME, HOME + 7)),
    )
    assert motifs_of(days) == [STAY, THERE, "more"]
    histogram = column_sums(MetricInput(days, town).counts(FEATURES["motifs"]))
    assert histogram.toarray().tolist() == [[1, 1, 1]]
    without = column_sums(MetricInput(days, TOWN).counts(FEATURES["motifs"]))
    assert without.toarray().tolist() == [[2, 1]]


@given(
    day=st.lists(st.integers(0, 5), min_size=1, max_size=12),
    names=st.permutations(range(HOME, HOME + 6)),
)
def test_a_motif_does_not_depend_on_the_names_of_places(day: list[int], names: list[int]) -> None:
    walked = [
        timed(*((base, hour, 0.5) for hour, base in enumerate(tokens)))
        for tokens in ([HOME + place for place in day], [names[place] for place in day])
    ]
    first, second = (daily_motifs(each, 3)[1].tolist() for each in walked)
    assert first == second
    assert motifs_of(walked[0]) == [slow_network(day)]


@given(days=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=5), min_size=2, max_size=2))
def test_two_days_have_one_motif_only_if_their_networks_are_the_same(days: list[list[int]]) -> None:
    codes = [
        daily_motifs(timed(*((HOME + place, hour, 0.5) for hour, place in enumerate(day))), 3)[1][0]
        for day in days
    ]
    assert (codes[0] == codes[1]) == (slow_network(days[0]) == slow_network(days[1]))


def test_a_day_does_not_continue_in_the_next_trajectory() -> None:
    walked = timed((HOME, 1, 1), (PARK, 3, 1), (HOME, 5, 1), (CAFE, 6, 1), offsets=[0, 2, 2, 4])
    owner, _ = daily_motifs(replace(walked, anchors=np.array([ANCHORS] * 3)), 3)
    assert owner.tolist() == [0, 2]
    assert motifs_of(replace(walked, anchors=np.array([ANCHORS] * 3))) == [THERE, THERE]


def test_every_trajectory_has_a_distance_and_a_length() -> None:
    nothing_to_see = walks([], [OTHER], [PARK], [PARK, SHOP], [PARK] * 9)
    assert travel_distance(nothing_to_see, TOWN.vocabulary) == pytest.approx(
        [0, 0, 0, 2 * DEGREE_KM, 0]
    )
    assert counted(nothing_to_see, "travel_distance") == {0: 4, 2: 1}
    assert counted(nothing_to_see, "daily_distance") == {0: 4, 1: 1}
    assert counted(nothing_to_see, "jump_length") == {0: 8, 1: 1}
    assert counted(nothing_to_see, "radius_of_gyration") == {0: 4, 1: 1}
    assert counted(nothing_to_see, "length") == {0: 1, 1: 2, 2: 1, TOWN.longest + 1: 1}


def test_an_edge_belongs_to_the_bin_above_it() -> None:
    zero = (0.0, 1.0)
    from_zero = replace(
        TOWN, travel_edges=zero, daily_edges=zero, leg_edges=zero, gyration_edges=zero
    )
    for metric in ("travel_distance", "daily_distance", "jump_length", "radius_of_gyration"):
        assert counted(walks([PARK, PARK]), metric, from_zero) == {1: 1}


def test_a_box_without_a_width_is_one_cell() -> None:
    point = replace(TOWN, cells=3, box=(2.0, 0.0, 2.0, 0.0))
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
    for name in ("daily", "leg", "gyration"):
        assert tuple(printed[f"{name}_edges_km"]) == getattr(spec, f"{name}_edges")
    assert printed["most_places"] == spec.most_places
    assert printed["motifs"] == len(spec.motifs)
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
    # A first rank of places is common to all: 3 of 3 visits here, 2 of 3 there.
    ranks = slow_jsd(Counter({0: 4}), Counter({0: 4, 1: 2}))
    expected = dict.fromkeys(NAMES, 1.0) | {"rank_frequency": ranks}
    assert compare(TOWN, here, there) == pytest.approx(expected)


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

    register_metric("stops", count_stops, title="Stops", description="JSD of numbers of stops.")
    try:
        assert compare(TOWN, walks([PARK], []), walks([PARK], [SHOP, PARK]))["stops"] == 0.5
        assert metrics()[-1].title == "Stops"
        with pytest.raises(MobatlasError, match="feature 'stops' exists already"):
            register_metric("stops", count_stops, title="Stops again")
    finally:
        del FEATURES["stops"]
    assert "stops" not in compare(TOWN, walks([PARK]), walks([PARK]))


def test_a_feature_map_with_a_title_is_a_metric_as_well() -> None:
    def build_again(vocabulary: Vocabulary, mask: Sequence[str]) -> FeatureMap:
        return build_feature("category", vocabulary, mask)

    walked = walks([PARK, CAFE]), walks([PARK, SHOP, SHOP])
    register_feature("again", build_again, title="Category again")
    register_feature("silent", build_again)
    try:
        result = compare(TOWN, *walked)
        assert result["again"] == result["category"] > 0
        assert "silent" not in result
        assert {"again", "silent"} <= set(feature_maps())
    finally:
        del FEATURES["again"], FEATURES["silent"]


def test_metrics_and_feature_maps_share_one_list_of_names() -> None:
    def count_nothing(sample: MetricInput) -> sparse.csr_array:
        return sample.count_each(np.zeros(len(sample.trajectories), dtype=np.int64), 1)

    for taken in ("visits", "poi", "trip"):
        with pytest.raises(MobatlasError, match=f"feature '{taken}' exists already"):
            register_metric(taken, count_nothing, title="Another")
    assert "visits" not in ALL_NAMES, "a feature map without a title is no metric"
    assert not {"trip", "flows", "motifs"} & set(feature_maps())
    with pytest.raises(MobatlasError, match=r"trip does not exist.*known: poi, category"):
        build_feature("trip", TOWN.vocabulary)
