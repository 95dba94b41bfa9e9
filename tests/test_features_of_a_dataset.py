"""Feature maps of a dataset against a slow reading of its long table."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mobatlas import CityConfig, TrajectoryDataset, prepare, write_city_folder
from mobatlas.data.dataset import Trajectories
from mobatlas.data.types import FIRST_POI
from mobatlas.features.maps import build_feature
from tests.feature_maps import (
    EVERY_SPECIAL,
    MASKS,
    NAMES,
    as_tensors,
    named,
    one_hot,
    start_registered,
)


@pytest.fixture(scope="module", autouse=True)
def own_feature() -> Iterator[None]:
    with start_registered():
        yield


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> TrajectoryDataset:
    """A small city, in several record batches."""
    root = tmp_path_factory.mktemp("city")
    write_city_folder(root / "city", CityConfig(users=120, days=28), seed=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mobatlas.data.prepare.sequences.ROWS_PER_GROUP", 2_000)
        prepare(root / "city", root / "dataset", preset="small")
    opened = TrajectoryDataset.open(root / "dataset")
    assert len(opened._tokens) > 2
    return opened


def great_circle_km(lat_a: float, lon_a: float, lat_b: float, lon_b: float) -> float:
    """By the angle between the two directions from the centre of the earth."""
    a, b = (
        (math.cos(lat) * math.cos(lon), math.cos(lat) * math.sin(lon), math.sin(lat))
        for lat, lon in (
            (math.radians(lat_a), math.radians(lon_a)),
            (math.radians(lat_b), math.radians(lon_b)),
        )
    )
    cross = (a[1] * b[2] - a[2] * b[1], a[2] * b[0] - a[0] * b[2], a[0] * b[1] - a[1] * b[0])
    return 6371.0088 * math.atan2(math.hypot(*cross), sum(x * y for x, y in zip(a, b, strict=True)))


def slowly(
    name: str, visits: list[dict[str, Any]], person: dict[str, Any], mask: Sequence[str]
) -> Counter[str]:
    """What a map counts, from the words of its definition: one visit at a time, by name."""
    categories = [visit["category"] or "unknown" for visit in visits]
    is_counted = [visit["poi_id"] not in mask for visit in visits]
    result: Counter[str] = Counter()
    for number, visit in enumerate(visits):
        if not is_counted[number]:
            continue
        match name:
            case "poi":
                result[f"poi:{visit['poi_id']}"] += 1
            case "category":
                result[f"category:{categories[number]}"] += 1
            case "transitions":
                if number + 1 < len(visits) and is_counted[number + 1]:
                    result[f"transitions:{categories[number]}>{categories[number + 1]}"] += 1
            case "hour":
                result[f"hour:{visit['arrival'].hour:02d}"] += 1
            case "distance":
                lat = visit["lat"]
                lon = visit["lon"]
                if visit["poi_id"] == "WORK":
                    lat = person["work_lat"]
                    lon = person["work_lon"]
                if visit["poi_id"] != "HOME" and None not in (
                    lat,
                    lon,
                    person["home_lat"],
                    person["home_lon"],
                ):
                    km = great_circle_km(person["home_lat"], person["home_lon"], lat, lon)
                    for band in ("0-1", "1-2", "2-5", "5-10", "10-20", "20-50"):
                        if km < float(band.split("-")[1]):
                            result[f"distance:{band}"] += 1
                            break
                    else:
                        result["distance:50+"] += 1
    return result


@pytest.mark.parametrize("mask", [(), ("WORK",), EVERY_SPECIAL])
@pytest.mark.parametrize("name", ["poi", "category", "transitions", "distance", "hour"])
def test_counts_are_those_of_a_slow_reading_of_the_long_table(
    dataset: TrajectoryDataset, name: str, mask: Sequence[str]
) -> None:
    people = {row["user_id"]: row for row in dataset.people.to_pylist()}
    places = pq.read_table(dataset.path / "vocabulary.parquet").to_pylist()
    windows: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for row in pq.read_table(dataset.path / "trajectories.parquet").to_pylist():
        windows.setdefault((row["user_id"], row["window"]), []).append(
            {**places[row["token"]], **row}
        )
    feature = build_feature(name, dataset.vocabulary, mask)
    result = named(feature, feature.counts(Trajectories.of(dataset)))
    users = dataset.people["user_id"].to_pylist()
    assert len(result) == len(windows) > 100
    for number, counts in enumerate(result):
        user = users[dataset.person[number]]
        assert counts == slowly(
            name, windows[user, int(dataset.window[number])], people[user], mask
        )
    assert sum(map(len, result)) > 0


def test_the_real_city_agrees_in_both_forms(dataset: TrajectoryDataset) -> None:
    some = Trajectories.of(dataset, np.arange(0, len(dataset), 17))
    soft = one_hot(some, len(dataset.vocabulary))
    for name, mask in product(NAMES, MASKS):
        feature = build_feature(name, dataset.vocabulary, mask)
        exact = feature.counts(some).toarray()
        assert exact.sum() > 0 or (name, mask) == ("start", EVERY_SPECIAL)
        np.testing.assert_allclose(feature.soft(soft), exact, atol=1e-9)
        np.testing.assert_allclose(
            feature.soft(as_tensors(soft, torch.float32)).numpy(), exact, atol=1e-4
        )


def test_phi_counts_the_visits_of_one_window(dataset: TrajectoryDataset) -> None:
    trajectories = Trajectories.of(dataset)

    def total(name: str, mask: Sequence[str] = ()) -> list[float]:
        counts = build_feature(name, dataset.vocabulary, mask).counts(trajectories)
        return [float(row.sum()) for row in counts.toarray()]

    lengths = dataset.lengths.tolist()
    assert total("poi") == total("category") == total("hour") == lengths
    assert total("transitions") == [length - 1 for length in lengths]
    pois = [int((dataset.trajectory(i) >= FIRST_POI).sum()) for i in range(len(dataset))]
    assert (
        total("poi", EVERY_SPECIAL)
        == total("hour", EVERY_SPECIAL)
        == total("distance", EVERY_SPECIAL)
        == pois
    )
    assert sum(pois) < sum(lengths)


@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_chosen_trajectories_come_in_the_order_asked_for(
    dataset: TrajectoryDataset, data: st.DataObject
) -> None:
    chosen = data.draw(
        st.lists(st.integers(0, len(dataset) - 1), max_size=30)
    )  # also none, and one twice
    trajectories = Trajectories.of(dataset, np.array(chosen, dtype=np.int64))
    assert len(trajectories) == len(chosen)
    for row, index in enumerate(chosen):
        here = slice(*trajectories.offsets[row : row + 2].tolist())
        assert trajectories.tokens[here].tolist() == dataset.trajectory(index).tolist()
        np.testing.assert_array_equal(
            trajectories.anchors[row], dataset.anchors[dataset.person[index]]
        )
        assert (trajectories.owner[here] == row).all()


def test_hours_are_those_of_the_arrivals(dataset: TrajectoryDataset) -> None:
    shuffled = np.random.default_rng(0).permutation(len(dataset))
    hours = dataset.all_times()[0].astype("datetime64[s]").astype("datetime64[h]").astype(int) % 24
    by_trajectory = np.split(hours, np.cumsum(dataset.lengths)[:-1])
    trajectories = Trajectories.of(dataset, shuffled)
    assert trajectories.hours is not None
    expected = np.concatenate([by_trajectory[index] for index in shuffled])
    assert np.array_equal(trajectories.hours, expected)
    assert len(set(trajectories.hours.tolist())) > 12


def test_by_default_all_trajectories_come_in_order(dataset: TrajectoryDataset) -> None:
    trajectories = Trajectories.of(dataset)
    assert trajectories.tokens.tolist() == dataset.all_tokens().tolist()
    assert np.diff(trajectories.offsets).tolist() == dataset.lengths.tolist()
