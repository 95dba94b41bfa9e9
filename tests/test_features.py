from __future__ import annotations

import math
import tracemalloc
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import sparse
from torch.utils._python_dispatch import TorchDispatchMode

from mobatlas import CityConfig, MobatlasError, TrajectoryDataset, prepare, write_city_folder
from mobatlas.data.vocabulary import FIRST_POI, HOME, OTHER, PAD, WORK, Vocabulary, build_vocabulary
from mobatlas.features import (
    BUILDERS,
    FeatureMap,
    SoftTrajectories,
    Trajectories,
    build_feature,
    register_feature,
)

EVERY_SPECIAL = ("HOME", "WORK", "OTHER")
MASKS: tuple[tuple[str, ...], ...] = ((), EVERY_SPECIAL)


@dataclass(frozen=True)
class StartFeature:
    """A user's own map, which looks at a position: where does the window begin?"""

    name: str
    counted: npt.NDArray[np.int64]  # (vocabulary,)

    @property
    def bins(self) -> tuple[str, ...]:
        return ("start:home", "start:elsewhere")

    def counts(self, trajectories: Trajectories) -> sparse.csr_array:
        rows = np.zeros((len(trajectories), 2))
        for row, (first, end) in enumerate(pairwise(trajectories.offsets)):
            if first < end:
                token = trajectories.tokens[first]
                rows[row, int(token != HOME)] = self.counted[token]
        return sparse.csr_array(rows)

    def soft(self, trajectories: SoftTrajectories) -> Any:
        first = trajectories.tokens[:, 0]
        counted = first * (torch.tensor(self.counted) if isinstance(first, torch.Tensor) else self.counted)
        home = counted[:, HOME]
        both = (home, counted.sum(-1) - home)
        return torch.stack(both, 1) if isinstance(first, torch.Tensor) else np.stack(both, 1)


def start_feature(vocabulary: Vocabulary, mask: Sequence[str]) -> FeatureMap:
    masked = {HOME + EVERY_SPECIAL.index(word) for word in mask}
    return StartFeature("start", np.array([int(t >= HOME and t not in masked) for t in range(len(vocabulary))]))


NAMES = [*BUILDERS, "start"]


@pytest.fixture(scope="module", autouse=True)
def own_feature() -> Iterator[None]:
    register_feature("start", start_feature)
    yield
    del BUILDERS["start"]


def make_vocabulary(pois: Sequence[tuple[str, float, float, str | None]]) -> Vocabulary:
    ids, lats, lons, categories = zip(*pois, strict=True)
    return build_vocabulary(
        pa.table(
            {
                "poi_id": pa.array(ids, pa.string()),
                "lat": pa.array(lats, pa.float64()),
                "lon": pa.array(lons, pa.float64()),
                "category": pa.array(categories, pa.string()),
                "visits": pa.array([1] * len(pois), pa.int64()),
            }
        )
    )


TOWN = make_vocabulary(
    [
        ("bakery", 0.0, 0.001, "food"),
        ("diner", 0.0, 0.03, "food"),
        ("park", 0.1, 0.0, None),
        ("gym", 0.0, 0.3, "sport"),
        ("airport", 1.0, 1.0, "other"),
        ("nowhere", math.nan, math.nan, "unknown"),
    ]
)
BAKERY, DINER, PARK = FIRST_POI, FIRST_POI + 1, FIRST_POI + 2
DOWNTOWN = (0.0, 0.0, 0.0, 0.06)  # works 6.7 km from home
NAN = math.nan


def hand_made(
    rows: Sequence[Sequence[int]],
    anchors: Sequence[Sequence[float]] | None = None,
    hours: Sequence[Sequence[int]] | None = None,
) -> Trajectories:
    return Trajectories(
        tokens=np.array([token for row in rows for token in row], dtype=np.int32),
        offsets=np.cumsum([0, *map(len, rows)]),
        anchors=np.array(anchors if anchors is not None else [DOWNTOWN] * len(rows)),
        hours=None if hours is None else np.array([hour for row in hours for hour in row], dtype=np.int64),
    )


def one_hot(trajectories: Trajectories, vocabulary: int) -> SoftTrajectories:
    """The same trajectories as certain probabilities, with zero rows after the end."""
    length = max([1, *np.diff(trajectories.offsets).tolist()])
    tokens = np.zeros((len(trajectories), length, vocabulary))
    hours = np.zeros((len(trajectories), length, 24))
    for row, (first, end) in enumerate(pairwise(trajectories.offsets)):
        for position, place in enumerate(range(first, end)):
            tokens[row, position, trajectories.tokens[place]] = 1
            if trajectories.hours is not None:
                hours[row, position, trajectories.hours[place]] = 1
    return SoftTrajectories(tokens, trajectories.anchors, None if trajectories.hours is None else hours)


def as_tensors(soft: SoftTrajectories, dtype: torch.dtype = torch.float64) -> SoftTrajectories:
    hours = None if soft.hours is None else torch.tensor(soft.hours, dtype=dtype)
    return replace(soft, tokens=torch.tensor(soft.tokens, dtype=dtype), hours=hours)


def named(feature: FeatureMap, counts: sparse.csr_array) -> list[dict[str, float]]:
    """The bins of each trajectory that are not zero."""
    rows = counts.toarray()
    return [{feature.bins[j]: float(row[j]) for j in np.flatnonzero(row)} for row in rows]


@st.composite
def random_trajectories(draw: st.DrawFn) -> Trajectories:
    """Of any length, some empty; some people have no home or no work."""
    rows = draw(st.lists(st.lists(st.integers(HOME, len(TOWN) - 1), max_size=9), min_size=1, max_size=6))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    anchors = rng.uniform(-0.3, 0.3, (len(rows), 4))
    for part in (slice(0, 2), slice(2, 4)):
        anchors[rng.random(len(rows)) < 0.25, part] = np.nan
    return hand_made(rows, anchors.tolist(), [rng.integers(0, 24, len(row)).tolist() for row in rows])


contract = pytest.mark.parametrize(("name", "mask"), list(product(NAMES, MASKS)))


@contract
@settings(max_examples=25, deadline=None)
@given(trajectories=random_trajectories())
def test_both_forms_agree_on_certain_tokens(name: str, mask: Sequence[str], trajectories: Trajectories) -> None:
    feature = build_feature(name, TOWN, mask)
    exact = feature.counts(trajectories).toarray()
    assert exact.shape == (len(trajectories), len(feature.bins))
    soft = one_hot(trajectories, len(TOWN))
    np.testing.assert_allclose(feature.soft(soft), exact, atol=1e-9)
    np.testing.assert_allclose(feature.soft(as_tensors(soft)).numpy(), exact, atol=1e-9)
    single = feature.soft(as_tensors(soft, torch.float32))
    assert single.dtype == torch.float32
    np.testing.assert_allclose(single.numpy(), exact, atol=1e-4)


@contract
@settings(max_examples=5, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_the_soft_form_is_the_expectation_over_independent_positions(name: str, mask: Sequence[str], seed: int) -> None:
    """Every sequence of three of five tokens, weighted by its probability."""
    rng = np.random.default_rng(seed)
    feature = build_feature(name, TOWN, mask)
    support = rng.choice(np.arange(HOME, len(TOWN)), 5, replace=False)
    shares = rng.dirichlet(np.ones(5), 3)  # (length, support)
    choices = list(product(range(5), repeat=3))
    hours = rng.integers(0, 24, 3).tolist()
    every = hand_made([support[list(choice)].tolist() for choice in choices], hours=[hours] * len(choices))
    weights = np.array([math.prod(shares[i, k] for i, k in enumerate(choice)) for choice in choices])
    tokens = np.zeros((1, 3, len(TOWN)))
    tokens[0][:, support] = shares
    soft = SoftTrajectories(tokens, np.array([DOWNTOWN]), np.eye(24)[None, hours])
    expected = weights @ feature.counts(every).toarray()
    np.testing.assert_allclose(feature.soft(soft)[0], expected, atol=1e-9)
    np.testing.assert_allclose(feature.soft(as_tensors(soft))[0].numpy(), expected, atol=1e-9)


@contract
def test_gradients_flow(name: str, mask: Sequence[str]) -> None:
    feature = build_feature(name, TOWN, mask)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(2, 3, len(TOWN), generator=generator, dtype=torch.float64, requires_grad=True)
    hours = torch.randn(2, 3, 24, generator=generator, dtype=torch.float64, requires_grad=True)

    def counts(token_logits: torch.Tensor, hour_logits: torch.Tensor) -> Any:
        probabilities = torch.softmax(token_logits, -1), torch.softmax(hour_logits, -1)
        return feature.soft(SoftTrajectories(probabilities[0], np.array([DOWNTOWN] * 2), probabilities[1]))

    assert torch.autograd.gradcheck(counts, (tokens, hours), fast_mode=True)
    (counts(tokens, hours) ** 2).sum().backward()
    wanted = hours if name == "hour" else tokens
    assert wanted.grad is not None
    assert wanted.grad.abs().sum() > 1e-3


@contract
def test_bins_are_unique_and_carry_the_name_of_their_map(name: str, mask: Sequence[str]) -> None:
    for vocabulary in (
        TOWN,
        make_vocabulary([("x", 0, 0, "a>b"), ("y", 0, 0, "c"), ("z", 0, 0, "a"), ("w", 0, 0, "b>c")]),
    ):
        feature = build_feature(name, vocabulary, mask)
        assert feature.name == name
        assert len(set(feature.bins)) == len(feature.bins) > 0
        assert all(bin_.startswith(f"{name}:") for bin_ in feature.bins)


@contract
def test_tokens_for_models_are_never_counted(name: str, mask: Sequence[str]) -> None:
    feature = build_feature(name, TOWN, mask)
    padding = hand_made([range(PAD, HOME)], hours=[range(HOME - PAD)])
    assert feature.counts(padding).sum() == 0
    assert feature.soft(one_hot(padding, len(TOWN))).sum() == 0


@contract
def test_nothing_at_all_counts_as_nothing(name: str, mask: Sequence[str]) -> None:
    feature = build_feature(name, TOWN, mask)
    assert feature.counts(hand_made([[], []], hours=[[], []])).toarray().tolist() == [[0.0] * len(feature.bins)] * 2
    none = Trajectories(np.zeros(0, np.int32), np.zeros(1, np.int64), np.zeros((0, 4)), np.zeros(0, np.int64))
    assert feature.counts(none).shape == (0, len(feature.bins))


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> TrajectoryDataset:
    """A small city, in several record batches."""
    root = tmp_path_factory.mktemp("city")
    write_city_folder(root / "city", CityConfig(users=120, days=28), seed=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mobatlas.data.sequences.ROWS_PER_GROUP", 2_000)
        prepare(root / "city", root / "dataset", preset="small")
    opened = TrajectoryDataset.open(root / "dataset")
    assert len(opened._tokens) > 2
    return opened


def great_circle_km(lat_a: float, lon_a: float, lat_b: float, lon_b: float) -> float:
    """By the angle between the two directions from the centre of the earth."""
    a, b = (
        (math.cos(lat) * math.cos(lon), math.cos(lat) * math.sin(lon), math.sin(lat))
        for lat, lon in ((math.radians(lat_a), math.radians(lon_a)), (math.radians(lat_b), math.radians(lon_b)))
    )
    cross = (a[1] * b[2] - a[2] * b[1], a[2] * b[0] - a[0] * b[2], a[0] * b[1] - a[1] * b[0])
    return 6371.0088 * math.atan2(math.hypot(*cross), sum(x * y for x, y in zip(a, b, strict=True)))


def slowly(name: str, visits: list[dict[str, Any]], person: dict[str, Any], mask: Sequence[str]) -> Counter[str]:
    """What a map counts, from the words of its definition: one visit at a time, by name."""
    categories = [visit["category"] or "unknown" for visit in visits]
    kept = [visit["poi_id"] not in mask for visit in visits]
    found: Counter[str] = Counter()
    for number, visit in enumerate(visits):
        if not kept[number]:
            continue
        match name:
            case "poi":
                found[f"poi:{visit['poi_id']}"] += 1
            case "category":
                found[f"category:{categories[number]}"] += 1
            case "transitions":
                if number + 1 < len(visits) and kept[number + 1]:
                    found[f"transitions:{categories[number]}>{categories[number + 1]}"] += 1
            case "hour":
                found[f"hour:{visit['arrival'].hour:02d}"] += 1
            case "distance":
                lat, lon = visit["lat"], visit["lon"]
                if visit["poi_id"] == "WORK":
                    lat, lon = person["work_lat"], person["work_lon"]
                if visit["poi_id"] != "HOME" and None not in (lat, lon, person["home_lat"], person["home_lon"]):
                    km = great_circle_km(person["home_lat"], person["home_lon"], lat, lon)
                    for band in ("0-1", "1-2", "2-5", "5-10", "10-20", "20-50"):
                        if km < float(band.split("-")[1]):
                            found[f"distance:{band}"] += 1
                            break
                    else:
                        found["distance:50+"] += 1
    return found


@pytest.mark.parametrize("mask", [(), ("WORK",), EVERY_SPECIAL])
@pytest.mark.parametrize("name", ["poi", "category", "transitions", "distance", "hour"])
def test_counts_are_those_of_a_slow_reading_of_the_long_table(
    dataset: TrajectoryDataset, name: str, mask: Sequence[str]
) -> None:
    people = {row["user_id"]: row for row in dataset.people.to_pylist()}
    places = pq.read_table(dataset.path / "vocabulary.parquet").to_pylist()
    windows: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for row in pq.read_table(dataset.path / "trajectories.parquet").to_pylist():
        windows.setdefault((row["user_id"], row["window"]), []).append({**places[row["token"]], **row})
    feature = build_feature(name, dataset.vocabulary, mask)
    found = named(feature, feature.counts(Trajectories.of(dataset)))
    users = dataset.people["user_id"].to_pylist()
    assert len(found) == len(windows) > 100
    for number, counts in enumerate(found):
        user = users[dataset.person[number]]
        assert counts == slowly(name, windows[user, int(dataset.window[number])], people[user], mask)
    assert sum(map(len, found)) > 0


def test_the_real_city_agrees_in_both_forms(dataset: TrajectoryDataset) -> None:
    some = Trajectories.of(dataset, np.arange(0, len(dataset), 17))
    soft = one_hot(some, len(dataset.vocabulary))
    for name, mask in product(NAMES, MASKS):
        feature = build_feature(name, dataset.vocabulary, mask)
        exact = feature.counts(some).toarray()
        assert exact.sum() > 0 or (name, mask) == ("start", EVERY_SPECIAL)
        np.testing.assert_allclose(feature.soft(soft), exact, atol=1e-9)
        np.testing.assert_allclose(feature.soft(as_tensors(soft, torch.float32)).numpy(), exact, atol=1e-4)


def test_phi_counts_the_visits_of_one_window(dataset: TrajectoryDataset) -> None:
    trajectories = Trajectories.of(dataset)

    def total(name: str, mask: Sequence[str] = ()) -> list[float]:
        counts = build_feature(name, dataset.vocabulary, mask).counts(trajectories)
        return [float(row.sum()) for row in counts.toarray()]

    lengths = dataset.lengths.tolist()
    assert total("poi") == total("category") == total("hour") == lengths
    assert total("transitions") == [length - 1 for length in lengths]
    pois = [int((dataset.trajectory(i) >= FIRST_POI).sum()) for i in range(len(dataset))]
    assert total("poi", EVERY_SPECIAL) == total("hour", EVERY_SPECIAL) == total("distance", EVERY_SPECIAL) == pois
    assert sum(pois) < sum(lengths)


@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_chosen_trajectories_come_in_the_order_asked_for(dataset: TrajectoryDataset, data: st.DataObject) -> None:
    chosen = data.draw(st.lists(st.integers(0, len(dataset) - 1), max_size=30))  # also none, and one twice
    trajectories = Trajectories.of(dataset, np.array(chosen, dtype=np.int64))
    assert len(trajectories) == len(chosen)
    for row, index in enumerate(chosen):
        here = slice(*trajectories.offsets[row : row + 2].tolist())
        assert trajectories.tokens[here].tolist() == dataset.trajectory(index).tolist()
        np.testing.assert_array_equal(trajectories.anchors[row], dataset.anchors[dataset.person[index]])
        assert (trajectories.owner[here] == row).all()


def test_hours_are_those_of_the_arrivals(dataset: TrajectoryDataset) -> None:
    shuffled = np.random.default_rng(0).permutation(len(dataset))
    arrivals = dataset.times()[0].to_pylist()
    trajectories = Trajectories.of(dataset, shuffled)
    assert trajectories.hours is not None
    assert trajectories.hours.tolist() == [time.hour for index in shuffled for time in arrivals[index]]
    assert len(set(trajectories.hours.tolist())) > 12


def test_by_default_all_trajectories_come_in_order(dataset: TrajectoryDataset) -> None:
    trajectories = Trajectories.of(dataset)
    assert trajectories.tokens.tolist() == dataset.all_tokens().tolist()
    assert np.diff(trajectories.offsets).tolist() == dataset.lengths.tolist()


def test_pois_of_one_category_share_a_bin_and_a_poi_without_one_is_unknown() -> None:
    feature = build_feature("category", TOWN)
    found = named(feature, feature.counts(hand_made([[BAKERY, DINER, BAKERY, PARK], [HOME, WORK]])))
    assert found == [{"category:food": 3, "category:unknown": 1}, {"category:home": 1, "category:work": 1}]


def test_transitions_stay_within_a_trajectory_and_do_not_jump_over_what_is_masked() -> None:
    rows = [[BAKERY, HOME, PARK, DINER], [BAKERY]]
    plain, masked = build_feature("transitions", TOWN), build_feature("transitions", TOWN, ("HOME",))
    assert named(plain, plain.counts(hand_made(rows))) == [
        {"transitions:food>home": 1, "transitions:home>unknown": 1, "transitions:unknown>food": 1},
        {},
    ]
    assert named(masked, masked.counts(hand_made(rows))) == [{"transitions:unknown>food": 1}, {}]


def test_a_place_without_coordinates_is_at_no_distance() -> None:
    feature = build_feature("distance", TOWN)
    nowhere = len(TOWN) - 1
    rows = [[HOME, BAKERY, WORK, OTHER, DINER, nowhere], [OTHER, nowhere]]
    assert named(feature, feature.counts(hand_made(rows))) == [
        {"distance:0-1": 1, "distance:5-10": 1, "distance:2-5": 1},
        {},
    ]


def test_people_without_a_home_are_at_no_distance_and_without_work_only_their_work_is_not() -> None:
    feature = build_feature("distance", TOWN)
    trajectories = hand_made([[WORK, BAKERY]] * 2, [(NAN, NAN, 0.0, 0.06), (0.0, 0.0, NAN, NAN)])
    assert named(feature, feature.counts(trajectories)) == [{}, {"distance:0-1": 1}]
    soft = feature.soft(one_hot(trajectories, len(TOWN)))
    assert np.isfinite(soft).all()
    assert soft.sum(1).tolist() == [0, 1]


def test_the_mask_holds_for_distances_and_hours_too() -> None:
    trajectories = hand_made([[HOME, WORK, BAKERY]], hours=[[7, 9, 18]])
    distance, hour = (build_feature(name, TOWN, ("WORK",)) for name in ("distance", "hour"))
    assert named(distance, distance.counts(trajectories)) == [{"distance:0-1": 1}]
    assert named(hour, hour.counts(trajectories)) == [{"hour:07": 1, "hour:18": 1}]


def test_hours_need_times() -> None:
    feature = build_feature("hour", TOWN)
    trajectories = hand_made([[HOME]])
    with pytest.raises(MobatlasError, match="carry no times; choose another feature") as caught:
        feature.counts(trajectories)
    assert "\n" not in str(caught.value)
    with pytest.raises(MobatlasError, match="does not tell when; choose another feature"):
        feature.soft(one_hot(trajectories, len(TOWN)))


class LargestTensor(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Remembers the size of the largest tensor that any operation made."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.elements = max(self.elements, result.numel())
        return result


@pytest.mark.parametrize("name", ["poi", "category", "distance"])
def test_the_soft_form_takes_no_more_memory_than_its_input(name: str) -> None:
    """One-hot weights of 7,000 POIs would be 392 MB."""
    size = 7_000
    vocabulary = make_vocabulary([(f"p{i}", 0.0, i / size, f"c{i // 2}") for i in range(size)])
    feature = build_feature(name, vocabulary)
    tokens = np.full((4, 2, len(vocabulary)), 1 / len(vocabulary))
    soft = SoftTrajectories(tokens, np.array([DOWNTOWN] * 4))
    tracemalloc.start()
    try:
        values = feature.soft(soft)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    tensors = as_tensors(soft)
    tensors.tokens.requires_grad_()
    with LargestTensor() as largest:  # type: ignore[no-untyped-call]
        differentiable = feature.soft(tensors)
        differentiable.sum().backward()
    np.testing.assert_allclose(differentiable.detach().numpy(), values, atol=1e-9)
    assert peak < 20e6
    assert largest.elements <= tokens.size


def test_a_wrong_feature_or_mask_names_the_nearest() -> None:
    with pytest.raises(MobatlasError, match="--feature transition does not exist; did you mean 'transitions'"):
        build_feature("transition", TOWN)
    with pytest.raises(MobatlasError, match="mask 'home' does not exist; did you mean 'HOME'"):
        build_feature("poi", TOWN, ("home",))
    with pytest.raises(MobatlasError, match="mask '<pad>' does not exist"):
        build_feature("poi", TOWN, ("<pad>",))
    with pytest.raises(MobatlasError, match="feature 'poi' exists already"):
        register_feature("poi", start_feature)
