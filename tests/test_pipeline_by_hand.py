"""Small logs with the expected tokens, days and windows written out by hand."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mobatlas import MobatlasError, prepare
from tests.logs import VISITS, Visit, read_sequences, write_visits

ONE_DAY: dict[str, Any] = {
    "window": {"days": 1, "stride": 1},
    "quality": {"min_coverage": 0.0},
    "anchors": {"infer": "never", "require_both": False},
    "split": {
        "train": 1.0,
        "val": 0.0,
        "test": 0.0,
    },  # so that the vocabulary comes from everybody in the log
}


def prepared(tmp_path: Path, visits: list[Visit], overwrite: bool = False, **changes: Any) -> Path:
    out = tmp_path / "dataset"
    prepare(
        write_visits(tmp_path / "raw", visits), out, values=ONE_DAY | changes, overwrite=overwrite
    )
    return out


def days_with(days: int, **quality: float) -> dict[str, Any]:
    return {"window": {"days": days, "stride": days}, "quality": quality}


def test_a_day_is_home_shop_home(tmp_path: Path) -> None:
    visits = [
        Visit("a", "home", "2024-03-04 00:00", "2024-03-04 08:00"),
        Visit("a", "bakery", "2024-03-04 08:10", "2024-03-04 08:20"),
        Visit("a", "home", "2024-03-04 08:30", "2024-03-05 00:00"),
    ]
    assert read_sequences(prepared(tmp_path, visits)) == {("a", 0): ["HOME", "bakery", "HOME"]}


def test_a_three_day_stay_counts_on_all_three_days(tmp_path: Path) -> None:
    visits = [Visit("a", "cabin", "2024-03-04 20:00", "2024-03-06 09:00")]
    assert read_sequences(prepared(tmp_path, visits)) == {
        ("a", 0): ["cabin"],
        ("a", 1): ["cabin"],
        ("a", 2): ["cabin"],
    }


def test_each_piece_of_a_stay_is_cut_at_midnight(tmp_path: Path) -> None:
    out = prepared(tmp_path, [Visit("a", "cabin", "2024-03-04 20:00", "2024-03-06 09:00")])
    rows = pq.read_table(out / "trajectories.parquet").to_pylist()
    assert [(row["arrival"], row["departure"]) for row in rows] == [
        (datetime(2024, 3, 4, 20), datetime(2024, 3, 5)),
        (datetime(2024, 3, 5), datetime(2024, 3, 6)),
        (datetime(2024, 3, 6), datetime(2024, 3, 6, 9)),
    ]


def test_a_stay_that_ends_at_midnight_does_not_touch_the_next_day(tmp_path: Path) -> None:
    visits = [Visit("a", "home", "2024-03-04 20:00", "2024-03-05 00:00")]
    assert read_sequences(prepared(tmp_path, visits)) == {("a", 0): ["HOME"]}


def test_consecutive_identical_tokens_become_one_that_spans_them(tmp_path: Path) -> None:
    visits = [
        Visit("a", "cafe", "2024-03-04 08:00", "2024-03-04 09:00"),
        Visit("a", "cafe", "2024-03-04 10:00", "2024-03-04 11:00"),
        Visit("a", "gym", "2024-03-04 12:00", "2024-03-04 13:00"),
        Visit("a", "cafe", "2024-03-04 14:00", "2024-03-04 15:00"),
    ]
    out = prepared(tmp_path, visits)
    rows = pq.read_table(out / "trajectories.parquet").to_pylist()
    assert read_sequences(out) == {("a", 0): ["cafe", "gym", "cafe"]}
    assert (rows[0]["arrival"].hour, rows[0]["departure"].hour) == (8, 11)


def test_a_stay_over_midnight_is_one_token_inside_a_longer_window(tmp_path: Path) -> None:
    visits = [
        Visit("a", "home", "2024-03-04 00:00", "2024-03-06 10:00"),
        Visit("a", "gym", "2024-03-06 11:00", "2024-03-06 12:00"),
    ]
    out = prepared(tmp_path, visits, **days_with(3, min_coverage=0.0))
    assert read_sequences(out) == {("a", 0): ["HOME", "gym"]}


def test_places_outside_the_vocabulary_become_other_and_collapse(tmp_path: Path) -> None:
    visits = [
        Visit("a", "big", "2024-03-04 08:00", "2024-03-04 09:00"),
        Visit("a", "rare1", "2024-03-04 10:00", "2024-03-04 11:00"),
        Visit("a", "rare2", "2024-03-04 12:00", "2024-03-04 13:00"),
        Visit("a", "big", "2024-03-04 14:00", "2024-03-04 15:00"),
    ]
    out = prepared(tmp_path, visits, vocabulary_size=1)
    assert read_sequences(out) == {("a", 0): ["big", "OTHER", "big"]}


def test_a_tie_in_frequency_goes_to_the_smaller_id(tmp_path: Path) -> None:
    visits = [Visit("a", "z", "2024-03-04 08:00"), Visit("a", "m", "2024-03-04 09:00")]
    assert read_sequences(prepared(tmp_path, visits, vocabulary_size=1)) == {
        ("a", 0): ["OTHER", "m"]
    }


def test_windows_are_calendar_days_from_the_first_observed_day(tmp_path: Path) -> None:
    """Days 0, 1 and 9 with a stride of 7 lie in windows 0 (days 0-6) and 1 (days 7-13)."""
    visits = [
        Visit("a", name, f"2024-03-{day:02d} 12:00")
        for name, day in (("x", 4), ("y", 5), ("z", 13))
    ]
    out = prepared(tmp_path, visits, **days_with(7, min_coverage=0.0))
    assert read_sequences(out) == {("a", 0): ["x", "y"], ("a", 1): ["z"]}


def test_windows_overlap_when_the_stride_is_shorter(tmp_path: Path) -> None:
    """Window k covers days k*2 .. k*2+3."""
    visits = [Visit("a", f"p{day}", f"2024-03-{4 + day:02d} 12:00") for day in range(6)]
    out = prepared(tmp_path, visits, window={"days": 4, "stride": 2}, quality={"min_coverage": 0.0})
    assert read_sequences(out) == {
        ("a", 0): ["p0", "p1", "p2", "p3"],
        ("a", 1): ["p2", "p3", "p4", "p5"],
        ("a", 2): ["p4", "p5"],
    }


def test_a_window_needs_eighty_percent_of_well_covered_days(tmp_path: Path) -> None:
    """Four of five days need 0.2 of 1440 minutes, which is 288; b has 287 on the fourth day."""

    def days(user: str, last_hour: str) -> list[Visit]:
        full = [
            Visit(user, "home", f"2024-03-{day:02d} 00:00", f"2024-03-{day:02d} 04:48")
            for day in (4, 5, 6)
        ]
        return [*full, Visit(user, "home", "2024-03-07 00:00", f"2024-03-07 {last_hour}")]

    visits = days("a", "04:48") + days("b", "04:47")
    out = prepared(tmp_path, visits, **days_with(5, min_coverage=0.2))
    assert set(read_sequences(out)) == {("a", 0)}


def test_overlapping_visits_are_observed_once(tmp_path: Path) -> None:
    """Three visits of two hours each that overlap cover 3 hours (0.125 of a day), not 6 (0.25)."""
    visits = [
        Visit("a", "x", "2024-03-04 08:00", "2024-03-04 10:00"),
        Visit("a", "y", "2024-03-04 08:30", "2024-03-04 10:30"),
        Visit("a", "z", "2024-03-04 09:00", "2024-03-04 11:00"),
    ]
    with pytest.raises(MobatlasError, match="no window passed"):
        prepared(tmp_path, visits, **days_with(1, min_coverage=0.2))
    out = prepared(tmp_path, visits, **days_with(1, min_coverage=0.125))
    assert read_sequences(out) == {("a", 0): ["x", "y", "z"]}


def test_a_day_of_more_than_800_km_is_unreliable(tmp_path: Path) -> None:
    """One degree of latitude is 111.2 km: 7.1 degrees are 789 km, 7.3 degrees are 812 km."""

    def trip(user: str, degrees: float) -> list[Visit]:
        return [
            Visit(user, "here", "2024-03-04 08:00", "2024-03-04 09:00", lat=40.0),
            Visit(user, "there", "2024-03-04 18:00", "2024-03-04 19:00", lat=40.0 + degrees),
        ]

    out = prepared(tmp_path, trip("near", 7.1) + trip("far", 7.3))
    assert set(read_sequences(out)) == {("near", 0)}


def test_a_short_day_across_the_antimeridian_is_reliable(tmp_path: Path) -> None:
    visits = [
        Visit("a", "east", "2024-03-04 08:00", "2024-03-04 09:00", lat=-17.0, lon=179.9),
        Visit("a", "west", "2024-03-04 18:00", "2024-03-04 19:00", lat=-17.0, lon=-179.9),
    ]
    assert set(read_sequences(prepared(tmp_path, visits))) == {("a", 0)}


def test_duplicate_rows_are_dropped_and_counted(tmp_path: Path) -> None:
    visit = Visit("a", "cafe", "2024-03-04 08:00", "2024-03-04 09:00")
    raw = write_visits(tmp_path / "raw", [visit, visit, visit])
    summary = prepare(raw, tmp_path / "dataset", values=ONE_DAY)
    assert summary.duplicates == 2
    assert pq.read_table(tmp_path / "dataset" / "vocabulary.parquet")["visits"].to_pylist()[-1] == 1


def test_daylight_saving_nights_are_ordinary_days_of_the_local_clock(tmp_path: Path) -> None:
    """02:30 does not exist in New York on 10 March 2024, but a naive local time can be 02:30."""
    visits = [
        Visit("a", "home", "2024-03-09 22:00", "2024-03-10 02:30"),
        Visit("a", "bar", "2024-03-10 02:30", "2024-03-10 03:30"),
    ]
    out = prepared(tmp_path, visits)
    rows = pq.read_table(out / "trajectories.parquet").to_pylist()
    assert read_sequences(out) == {("a", 0): ["HOME"], ("a", 1): ["HOME", "bar"]}
    assert rows[1]["departure"] == datetime(2024, 3, 10, 2, 30)


def test_only_people_with_home_and_work_are_kept_by_default(tmp_path: Path) -> None:
    both = [
        Visit("both", "home", "2024-03-04 00:00", "2024-03-04 08:00"),
        Visit("both", "work", "2024-03-04 09:00"),
    ]
    one = [Visit("one", "home", "2024-03-04 00:00", "2024-03-04 08:00")]
    out = prepared(tmp_path, both + one, anchors={"infer": "never"})
    assert set(read_sequences(out)) == {("both", 0)}


def test_anchors_are_the_mean_of_the_flagged_visits(tmp_path: Path) -> None:
    visits = [
        Visit("a", "home", "2024-03-04 00:00", "2024-03-04 08:00", lat=10.0, lon=20.0),
        Visit("a", "home", "2024-03-05 00:00", "2024-03-05 08:00", lat=10.2, lon=20.4),
        Visit("a", "work", "2024-03-05 09:00", "2024-03-05 17:00", lat=11.0, lon=21.0),
    ]
    people = pq.read_table(prepared(tmp_path, visits) / "people.parquet").to_pylist()
    assert people == [
        {"user_id": "a", "home_lat": 10.1, "home_lon": 20.2, "work_lat": 11.0, "work_lon": 21.0}
    ]


def test_home_and_work_are_inferred_from_the_hours(tmp_path: Path) -> None:
    """Three nights at n and three weekdays at w; a long weekend stay does not make w home."""
    visits = []
    for day in (4, 5, 6):
        visits += [
            Visit("a", "n", f"2024-03-{day:02d} 22:00", f"2024-03-{day + 1:02d} 06:00"),
            Visit("a", "w", f"2024-03-{day + 1:02d} 09:00", f"2024-03-{day + 1:02d} 17:00"),
            Visit("a", "c", f"2024-03-{day + 1:02d} 18:00", f"2024-03-{day + 1:02d} 19:00"),
        ]
    out = prepared(
        tmp_path, visits, anchors={"require_both": True}, **days_with(4, min_coverage=0.0)
    )
    expected = ["HOME", "WORK", "c"] * 3
    assert read_sequences(out) == {("a", 0): expected}


def test_a_place_seen_on_two_nights_only_is_not_home(tmp_path: Path) -> None:
    visits = [
        Visit("a", "n", f"2024-03-{day:02d} 22:00", f"2024-03-{day + 1:02d} 05:00")
        for day in (4, 8)
    ]
    out = prepared(
        tmp_path,
        visits,
        anchors={"require_both": False, "min_days": 5},
        **days_with(6, min_coverage=0.0),
    )
    assert read_sequences(out) == {("a", 0): ["n"]}


def test_missing_departures_can_last_until_the_next_arrival(tmp_path: Path) -> None:
    visits = [
        Visit("a", "x", "2024-03-04 08:00"),
        Visit("a", "y", "2024-03-04 10:00"),
        Visit("b", "x", "2024-03-04 08:00"),
    ]
    out = prepared(tmp_path, visits, missing_departure="until_next", max_gap_hours=3)
    rows = pq.read_table(out / "trajectories.parquet").to_pylist()
    assert [row["departure"].hour for row in rows] == [10, 13, 11]


def test_too_short_trajectories_fall_and_are_counted(tmp_path: Path) -> None:
    visits = [
        Visit("a", "x", "2024-03-04 08:00"),
        Visit("b", "x", "2024-03-04 08:00"),
        Visit("b", "y", "2024-03-04 09:00"),
    ]
    summary = prepare(
        write_visits(tmp_path / "raw", visits),
        tmp_path / "dataset",
        values=ONE_DAY | {"quality": {"min_coverage": 0.0, "min_tokens": 2}},
    )
    assert (summary.windows.kept, summary.windows.dropped["short"]) == (1, 1)


def test_a_fixed_origin_counts_windows_from_that_day_for_everybody(tmp_path: Path) -> None:
    visits = [
        Visit("a", "x", "2024-03-05 12:00"),
        Visit("b", "x", "2024-03-12 12:00"),
        Visit("c", "x", "2024-03-01 12:00"),
    ]
    window = {"days": 7, "stride": 7, "origin": "2024-03-04"}
    out = prepared(tmp_path, visits, window=window, quality={"min_coverage": 0.0})
    assert set(read_sequences(out)) == {("a", 0), ("b", 1)}


def test_of_two_arrivals_at_one_moment_both_last_until_the_next_later_one(tmp_path: Path) -> None:
    visits = [
        Visit("a", "x", "2024-03-04 08:00"),
        Visit("a", "x", "2024-03-04 08:00", "2024-03-04 08:10"),
        Visit("a", "y", "2024-03-04 08:00"),
        Visit("a", "z", "2024-03-04 12:00"),
    ]
    for order in (visits, visits[::-1]):
        out = prepared(tmp_path, order, missing_departure="until_next", overwrite=True)
        rows = pq.read_table(out / "trajectories.parquet").to_pylist()
        assert [(row["arrival"].hour, row["departure"].hour) for row in rows] == [
            (8, 12),
            (8, 12),
            (12, 0),
        ]


def with_people(
    tmp_path: Path, visits: list[Visit], people: dict[str, list[Any]], **changes: Any
) -> Path:
    raw = write_visits(tmp_path / "raw", visits)
    pq.write_table(pa.table(people), raw / "people.parquet")
    prepare(raw, tmp_path / "dataset", values=ONE_DAY | changes)
    return tmp_path / "dataset"


def test_a_half_given_anchor_is_not_mixed_with_the_seen_one(tmp_path: Path) -> None:
    visits = [Visit("a", "home", "2024-03-04 00:00", "2024-03-04 08:00", lat=10.0, lon=20.0)]
    out = with_people(tmp_path, visits, {"user_id": ["a"], "home_lat": [50.0], "home_lon": [None]})
    person = pq.read_table(out / "people.parquet").to_pylist()[0]
    assert (person["home_lat"], person["home_lon"]) == (10.0, 20.0)


def test_visits_near_a_given_home_are_at_home_and_a_hotel_is_not(tmp_path: Path) -> None:
    """0.001 degrees of latitude are 111 m."""
    visits = [
        Visit(
            "a", "hotel", f"2024-03-{day:02d} 22:00", f"2024-03-{day:02d} 23:00", lat=54.9, lon=37.0
        )
        for day in (4, 5, 6)
    ]
    visits.append(Visit("a", "flat", "2024-03-06 23:30", "2024-03-06 23:50", lat=55.001, lon=37.0))
    people: dict[str, list[Any]] = {"user_id": ["a"], "home_lat": [55.0], "home_lon": [37.0]}
    out = with_people(tmp_path, visits, people, anchors={"require_both": False, "min_days": 1})
    assert read_sequences(out)["a", 2] == ["hotel", "HOME"]


def test_a_night_worker_with_a_flagged_home_works_where_the_nights_are_spent(
    tmp_path: Path,
) -> None:
    visits = []
    for day in (4, 5, 6, 7):
        visits += [
            Visit("a", "home", f"2024-03-{day:02d} 16:00", f"2024-03-{day:02d} 20:00"),
            Visit("a", "hospital", f"2024-03-{day:02d} 21:00", f"2024-03-{day + 1:02d} 10:00"),
        ]
    out = prepared(
        tmp_path, visits, anchors={"require_both": True}, **days_with(5, min_coverage=0.0)
    )
    assert read_sequences(out) == {("a", 0): ["HOME", "WORK"] * 4}


def test_a_home_without_a_place_id_stays_home_when_anchors_are_inferred_always(
    tmp_path: Path,
) -> None:
    raw = write_visits(tmp_path / "raw", [])
    rows = [
        Visit("a", "home", f"2024-03-{day:02d} 00:00", f"2024-03-{day:02d} 08:00").row()
        for day in (4, 5, 6)
    ]
    rows = [row | {"poi_id": None} for row in rows]
    pq.write_table(pa.Table.from_pylist(rows, VISITS), raw / "visits.parquet")
    prepare(
        raw,
        tmp_path / "dataset",
        values=ONE_DAY | {"anchors": {"infer": "always", "require_both": False}},
    )
    assert set(map(tuple, read_sequences(tmp_path / "dataset").values())) == {("HOME",)}


def test_columns_of_people_may_be_called_like_ours(tmp_path: Path) -> None:
    people = {
        "user_id": ["a"],
        "split": ["secret"],
        "user": ["x"],
        "Eligible": ["y"],
        "age": ["<30"],
    }
    out = with_people(tmp_path, [Visit("a", "p", "2024-03-04 08:00")], people, regions=["user"])
    assert pq.read_table(out / "labels.parquet").to_pylist() == [
        {"user_id": "a", "age": "<30", "split": "secret", "Eligible": "y"}
    ]
    assert pq.read_table(out / "people.parquet")["user"].to_pylist() == ["x"]


def test_what_describes_a_home_is_not_taken_for_a_region(tmp_path: Path) -> None:
    people = {"user_id": ["a"], "home_language": ["es"], "home_income": ["low"], "home_zone": ["7"]}
    out = with_people(tmp_path, [Visit("a", "p", "2024-03-04 08:00")], people)
    assert set(pq.read_schema(out / "people.parquet").names) >= {"home_zone"}
    assert not {"home_language", "home_income"} & set(pq.read_schema(out / "people.parquet").names)


def test_a_folder_of_parts_is_one_table_of_visits(tmp_path: Path) -> None:
    for number, user in enumerate("ab"):
        part = write_visits(tmp_path / "parts", [Visit(user, "p", "2024-03-04 08:00")])
        (part / "visits.parquet").rename(part / f"part-{number}.parquet")
    prepare(tmp_path / "parts", tmp_path / "dataset", values=ONE_DAY)
    assert set(read_sequences(tmp_path / "dataset")) == {("a", 0), ("b", 0)}
