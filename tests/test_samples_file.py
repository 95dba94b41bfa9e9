"""Files of samples of any program: rows become trajectories, impossible times are refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mobatlas import MobatlasError, read_samples
from mobatlas.data.types import HOME, OTHER
from mobatlas.groups import DEFAULT_GROUPS
from tests.small_town import PARK, SHOP, TOWN, walks
from tests.written import table_of

trips = st.lists(
    st.lists(st.sampled_from([HOME, OTHER, PARK, SHOP]), min_size=1, max_size=5),
    min_size=1,
    max_size=6,
)


@settings(max_examples=40)
@given(trips, st.randoms(use_true_random=False), st.booleans(), st.booleans())
def test_a_file_is_read_whatever_its_rows_are_called_and_however_they_lie(
    tmp_path_factory: pytest.TempPathFactory,
    walked: list[list[int]],
    shuffle: Any,
    positions: bool,
    words: bool,
) -> None:
    made = walks(*walked)
    path = tmp_path_factory.getbasetemp() / "read.parquet"
    table = table_of(
        made, TOWN.vocabulary.table["poi_id"].combine_chunks(), ["30-40,F"] * len(made)
    )
    order = list(range(table.num_rows))
    if positions:
        shuffle.shuffle(order)
    else:  # trajectories may lie in one another, visits of one in order
        order = sorted(order, key=lambda row: (table["position"][row].as_py(), shuffle.random()))
        table = table.drop_columns(["position"])
    table = table.take(order)
    if words:
        names = pa.array([f"walk {number}" for number in table["trajectory"].to_pylist()])
        table = table.set_column(0, "trajectory", names.dictionary_encode())
    pq.write_table(table, path, row_group_size=3)
    read = read_samples(path, TOWN.vocabulary, DEFAULT_GROUPS)
    seen = list(
        dict.fromkeys(made.owner[order].tolist())
    )  # trajectories are numbered as they appear
    expected = made.take(np.array(seen))
    assert read.trajectories.tokens.tolist() == expected.tokens.tolist()
    assert read.trajectories.offsets.tolist() == expected.offsets.tolist()
    assert np.array_equal(read.trajectories.anchors, expected.anchors, equal_nan=True)
    assert read.groups is not None and set(read.groups) == {DEFAULT_GROUPS.index("30-40, F")}
    assert read.warnings == ()


def test_the_least_a_file_must_hold_is_trajectories_and_places(tmp_path: Path) -> None:
    rows = {"trajectory": ["b", "b", "a", "b"], "poi_id": ["HOME", "park", "cafe", "shop"]}
    pq.write_table(pa.table(rows), tmp_path / "least.parquet")
    read = read_samples(tmp_path / "least.parquet", TOWN.vocabulary, DEFAULT_GROUPS)
    assert read.trajectories.offsets.tolist() == [0, 3, 4] and read.groups is None
    assert np.isnan(read.trajectories.anchors).all()
    assert [warning.partition(": ")[2] for warning in read.warnings] == [
        "the file has no column 'home_lat', so visits to HOME have no position"
    ]
    theirs = pa.table({"id": rows["trajectory"], "placekey": rows["poi_id"]})
    pq.write_table(theirs, tmp_path / "theirs.parquet")
    names = {"trajectory": "id", "poi_id": "placekey"}
    same = read_samples(tmp_path / "theirs.parquet", TOWN.vocabulary, rename=names)
    assert same.trajectories.tokens.tolist() == read.trajectories.tokens.tolist()


def test_places_outside_the_vocabulary_are_other_and_a_run_of_them_one_visit(
    tmp_path: Path,
) -> None:
    places = ["Oz", "park", "Oz", "Utopia", "OTHER", "park", "OTHER", "OTHER", "<pad>", "Thule"]
    rows = {"trajectory": [1] + [0] * 8 + [2], "poi_id": places}
    pq.write_table(pa.table(rows), tmp_path / "far.parquet")
    read = read_samples(tmp_path / "far.parquet", TOWN.vocabulary)
    assert read.trajectories.tokens.tolist() == [OTHER, PARK, OTHER, PARK, OTHER, OTHER, OTHER]
    assert read.trajectories.offsets.tolist() == [0, 1, 6, 7]
    assert (read.unknown_places, read.unknown_visits) == (4, 5)
    (warning,) = read.warnings
    assert "5 visits (50.0%) are to 4 places that are not in the dataset" in warning
    assert warning.endswith("count as OTHER ('Oz', 'Utopia', '<pad>', ...)")


def moments(*hours: float) -> pa.Array:
    """Of Thursday 2024-05-09, by the clock."""
    start = np.datetime64("2024-05-09", "us")
    return pa.array([start + np.timedelta64(round(3600 * hour), "s") for hour in hours])


def timed(path: Path, **columns: Any) -> Path:
    """Two people, of whom the first goes to three places."""
    rows = {"trajectory": [4, 4, 4, 8], "poi_id": ["park", "Oz", "Utopia", "shop"]}
    pq.write_table(pa.table(rows | columns), path)
    return path


def test_times_are_seconds_of_the_week_and_a_run_of_places_outside_is_one_stay(
    tmp_path: Path,
) -> None:
    columns = {"arrival": moments(8, 10, 12.5, 23), "departure": moments(9, 12, 13, 25)}
    read = read_samples(timed(tmp_path / "a.parquet", **columns), TOWN.vocabulary).trajectories
    thursday = 3 * 86_400
    assert read.arrivals is not None and read.stays is not None
    assert read.arrivals.tolist() == [thursday + 3600 * hour for hour in (8, 10, 23)]
    assert read.stays.tolist() == [3600, 3 * 3600, 2 * 3600], (
        "until the last of those places is left"
    )


@pytest.mark.parametrize(
    ("arrival", "departure", "sentence"),
    [
        (
            moments(8, 7, 12, 23),
            moments(9, 12, 13, 25),
            "trajectory 4 has visits out of order",
        ),
        (
            moments(8, 10, 12, 23),
            moments(9, 12, 13, 22),
            "trajectory 8 has a departure before its arrival",
        ),
        (moments(8, 10, 12, 23), ["late"] * 4, "column 'departure' cannot be read"),
        ([True] * 4, moments(9, 12, 13, 25), "column 'arrival' cannot be read"),
    ],
)
def test_times_that_cannot_be_are_refused(
    tmp_path: Path, arrival: Any, departure: Any, sentence: str
) -> None:
    path = timed(tmp_path / "a.parquet", arrival=arrival, departure=departure)
    with pytest.raises(MobatlasError, match=f"^{re.escape(str(path))}: {sentence}"):
        read_samples(path, TOWN.vocabulary)


@pytest.mark.parametrize(
    "columns",
    [
        {"arrival": moments(8, 10, 12, 23)},
        {"arrival": moments(8, 10, 12, 23), "departure": [None, *moments(1, 2, 3)]},
    ],
)
def test_times_of_some_visits_alone_are_left_out_and_it_says_so(
    tmp_path: Path, columns: dict[str, Any]
) -> None:
    read = read_samples(timed(tmp_path / "a.parquet", **columns), TOWN.vocabulary)
    assert read.trajectories.arrivals is None and read.trajectories.stays is None
    assert any(
        "not every visit has 'arrival' and 'departure', so times are not compared" in each
        for each in read.warnings
    )
