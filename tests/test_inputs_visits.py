"""Plausible mistakes in visits and people: each is read correctly, refused, or warned of."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from mobatlas import MobatlasError, TrajectoryDataset, prepare
from mobatlas.data.prepare.pipeline import Summary

WINDOW = {"window": {"days": 7, "stride": 7}, "split": {"train": 1, "val": 0, "test": 0}}
LAT, LON = -33.45, -70.66
ANCHORS = {name: name[-3:] for name in ("home_lat", "home_lon", "work_lat", "work_lon")}


@dataclass
class Tables:
    """Tables of a source, which a case changes."""

    visits: pd.DataFrame
    people: pd.DataFrame


@functools.cache
def town() -> Tables:
    """Forty people of Santiago for two weeks: home at night, work, and a shop or two."""
    rng = np.random.default_rng(0)
    rows = []
    places = rng.normal([LAT, LON], 0.05, (40, 2, 2)).round(5)
    for person, (home, work) in enumerate(places):
        for day in range(14):
            start = pd.Timestamp("2024-03-04") + pd.Timedelta(days=day)
            hours = [0, rng.uniform(6, 10), rng.uniform(15, 17), rng.uniform(17, 23), 24]
            shop = int(rng.integers(12))
            plan = (("home", home), ("work", work), (f"shop {shop}", (LAT, LON)), ("home", home))
            for number, (name, (lat, lon)) in enumerate(plan):
                times = [start + pd.Timedelta(hours=h).floor("s") for h in hours[number:][:2]]
                is_home, is_work = name == "home", name == "work"
                place = None if is_home or is_work else name
                row = (f"{person + 1:04d}", place, lat, lon, *times, is_home, is_work)
                rows.append(row)
    columns = ["user_id", "poi_id", "lat", "lon", "arrival", "departure", "is_home", "is_work"]
    visits = pd.DataFrame(rows, columns=columns)
    anchors = pd.DataFrame(places.reshape(40, 4), columns=list(ANCHORS))
    people = anchors.assign(
        user_id=[f"{person + 1:04d}" for person in range(40)],
        age=np.where(np.arange(40) % 3, "<30", "30+"),
        gender=np.where(np.arange(40) % 2, "M", "F"),
    )
    return Tables(visits, people)


def hours_later(tables: Tables, hours: float, rows: slice = slice(None)) -> None:
    for name in ("arrival", "departure"):
        tables.visits.loc[rows, name] += pd.Timedelta(hours=hours)


def swap(table: pd.DataFrame, lat: str, lon: str, rows: slice = slice(None)) -> None:
    table.loc[rows, [lat, lon]] = table.loc[rows, [lon, lat]].to_numpy(copy=True)


def since_1970(tables: Tables, unit: str, kind: str = "int64") -> None:
    for name in ("arrival", "departure"):
        times = tables.visits[name].to_numpy().astype(f"datetime64[{unit}]")
        tables.visits[name] = times.astype(np.int64).astype(kind)


def as_format(tables: Tables, format: str) -> None:  # noqa: A002
    for name in ("arrival", "departure"):
        tables.visits[name] = tables.visits[name].dt.strftime(format)


def with_zone(tables: Tables, unit: str) -> None:
    zoned = tables.visits["arrival"].dt.tz_localize("America/Santiago")
    tables.visits["arrival"] = zoned.dt.as_unit(unit)


def edit(table: str, **columns: Any) -> Callable[[Tables], None]:
    """Replace columns; a function receives the old column."""

    def change(tables: Tables) -> None:
        frame = getattr(tables, table)
        for name, value in columns.items():
            frame[name] = value(frame[name]) if callable(value) else value

    return change


def long_visits(tables: Tables) -> None:
    tables.visits["departure"] += pd.Timedelta(hours=30)


def copy_people(tables: Tables) -> None:
    """Every person a second time under another id, as a delivery loaded twice."""
    again = tables.visits.assign(user_id="again " + tables.visits["user_id"])
    tables.visits = pd.concat([tables.visits, again], ignore_index=True)


def repeat_person(tables: Tables) -> None:
    tables.people = pd.concat([tables.people, tables.people.iloc[[4]]], ignore_index=True)


def one_day(tables: Tables) -> None:
    tables.visits = tables.visits[tables.visits["arrival"] < "2024-03-05"]


SWAPPED = "latitude and longitude are swapped"
CASES: dict[str, tuple[Callable[[Tables], Any], str, str]] = {
    # visits: coordinates
    "all swapped": (
        lambda t: swap(t.visits, "lat", "lon"),
        "refused",
        r"visits\.parquet: most visits are near latitude -71 and longitude -33, where there are no "
        r"towns; lat and lon seem to be swapped",
    ),
    "all swapped, out of range": (
        edit("visits", lat=151.2, lon=-33.9),
        "refused",
        r"column 'lat' is outside -90..90 .*latitude and longitude seem to be swapped",
    ),
    "projected metres": (
        edit("visits", lat=6_298_000.0, lon=346_000.0),
        "refused",
        r"'lat' is outside .*\(for example .*\); these are not degrees, so convert them",
    ),
    "a tenth swapped": (
        lambda t: swap(t.visits, "lat", "lon", slice(0, 224)),
        "refused",
        rf"22\d of 2,240 visits are far .*user_id '0001', lat -70.*as if {SWAPPED}; correct them",
    ),
    "a few swapped": (
        lambda t: swap(t.visits, "lat", "lon", slice(0, 2)),
        "warned",
        rf"3 of 2,2\d\d visits are far from all places .*as if {SWAPPED}",
    ),
    "a few flipped": (
        lambda t: t.visits.loc[:2, ["lon"]].mul(-1).pipe(t.visits.update),
        "warned",
        "3 of 2,2.. visits are far .*lon 70.*as if the sign of the longitude is flipped",
    ),
    # people: coordinates
    "homes swapped": (
        lambda t: swap(t.people, "home_lat", "home_lon"),
        "refused",
        rf"people\.parquet: the home places of 40 of 40 people .*as if {SWAPPED}; correct them",
    ),
    "one workplace swapped": (
        lambda t: swap(t.people, "work_lat", "work_lon", slice(7, 7)),
        "warned",
        rf"the work places of 1 of 40 people .*user_id '0008'.*as if {SWAPPED}",
    ),
    "homes without the sign": (
        edit("people", home_lat=abs, home_lon=abs),
        "refused",
        "the home places of 40 of 40 .*as if both signs are flipped",
    ),
    # ids
    "no leading zeros in people": (
        edit("people", user_id=lambda ids: ids.astype(int)),
        "refused",
        "40 of 40 people with visits have another form of user_id here .people have '1', visits "
        "have '0001'.; write the ids the same way in both",
    ),
    "half without leading zeros": (
        edit("people", user_id=lambda ids: ids.where(np.arange(40) % 2 == 0, ids.str.lstrip("0"))),
        "warned",
        "20 of 40 people with visits have another form of user_id here .people have '2', visits "
        "have '0002'",
    ),
    "decimals in people": (
        edit("people", user_id=lambda ids: ids.astype(float)),
        "refused",
        "another form of user_id here .people have '1.0', visits have '0001'",
    ),
    "decimals in visits": (
        lambda t: [
            edit("visits", user_id=lambda ids: ids.astype(float))(t),
            edit("people", user_id=lambda ids: ids.astype(int))(t),
        ],
        "refused",
        "another form of user_id here .people have '1', visits have '1.0'",
    ),
    "other ids": (
        edit("people", user_id=lambda ids: "p" + ids),
        "refused",
        "the table has no user_id of .*people have 'p0001', visits have '0001'",
    ),
    # times
    "times nine hours early": (
        lambda t: hours_later(t, -9),
        "warned",
        r"times look shifted by (-8|-9|-10) hours: the fewest visits begin between .*UTC",
    ),
    "times eight hours late": (
        lambda t: hours_later(t, 8),
        "warned",
        r"times look shifted by \+(7|8|9) hours",
    ),
    "day workers at home by day": (
        lambda t: t.visits.assign(is_home=t.visits["is_work"], is_work=t.visits["is_home"]).pipe(
            lambda frame: setattr(t, "visits", frame)
        ),
        "warned",
        "times look shifted: of the visits at 3:00, 0% are at home, and .* of those at 13:00",
    ),
    "seconds": (
        lambda t: since_1970(t, "s"),
        "refused",
        r"not local times .*arrival '1709\d{6}'.*these are seconds since 1970, so write local",
    ),
    "seconds with decimals": (
        lambda t: since_1970(t, "s", "float64"),
        "refused",
        "these are seconds since 1970, so write local times",
    ),
    "milliseconds as text": (
        lambda t: since_1970(t, "ms", "str"),
        "refused",
        "these are milliseconds since 1970, so write local times",
    ),
    "milliseconds read as seconds": (
        lambda t: hours_later(t, 8_760 * 120),
        "refused",
        "column 'arrival' is not between the years 1971 and 2100 in 2,240 of 2,240 rows",
    ),
    "seconds read as milliseconds": (
        lambda t: hours_later(t, -24 * 19_700),
        "refused",
        "column 'arrival' is not between the years 1971 and 2100",
    ),
    "day first": (
        lambda t: as_format(t, "%d/%m/%Y %H:%M"),
        "refused",
        "these are day and month in an unknown order, so write the year first",
    ),
    "an offset": (
        lambda t: as_format(t, "%Y-%m-%dT%H:%M:%S-03:00"),
        "refused",
        "these are times with a zone, so write local times without it",
    ),
    "a zone in nanoseconds": (
        lambda t: with_zone(t, "ns"),
        "refused",
        r"visits\.parquet: column 'arrival' has the time zone UTC; convert it to naive local",
    ),
    "times of day only": (
        lambda t: edit("visits", arrival=lambda column: column.dt.time)(t),
        "refused",
        "column 'arrival' contains no dates with times .it has the type time.; give local",
    ),
    # people and groups
    "a repeated person": (
        repeat_person,
        "refused",
        r"'user_id' is empty or repeated in 1 of 41 rows \(for example '0005'\); keep one row",
    ),
    "people twice under other ids": (
        copy_people,
        "warned",
        "40 of 80 people have exactly the visits of another person .for example '0001' and "
        "'again 0001'.; keep each person once",
    ),
    "ages in years": (
        edit("people", age=np.arange(18.0, 78.0, 1.5)),
        "refused",
        r"people\.parquet: column 'age' has 40 different numbers from 18 to 76.5, and each would "
        r"be a group; give the limits of bins, such as --set bins.age=\[30,40,50\]",
    ),
    "ages as text": (
        edit("people", age=np.arange(20, 60).astype(str)),
        "refused",
        "column 'age' has 40 different numbers from 20 to 59",
    ),
    # stays
    "overlapping visits": (
        long_visits,
        "warned",
        r"8\d% of the visits begin before an earlier visit of the same person ends .for example .* "
        r"of user_id '0\d+' on 2024-03-\d\d.; correct the departures",
    ),
    "a window longer than the visits": (
        lambda t: one_day(t),
        "warned",
        r"the visits cover 1 days, fewer than a window of 7; set window\.days=1 or less",
    ),
    # empty
    "no visits": (
        lambda t: setattr(t, "visits", t.visits[:0]),
        "refused",
        r"visits\.parquet: the table has no rows",
    ),
    "no people": (
        lambda t: setattr(t, "people", t.people[:0]),
        "refused",
        r"people\.parquet: the table has no rows; leave it out",
    ),
}


def prepared(
    tmp_path: Path, change: Callable[[Tables], Any], engine: str = "duckdb", **values: Any
) -> Summary:
    tables = Tables(town().visits.copy(), town().people.copy())
    change(tables)
    raw = tmp_path / "raw"
    raw.mkdir(exist_ok=True)
    tables.visits.to_parquet(raw / "visits.parquet", index=False)
    tables.people.to_parquet(raw / "people.parquet", index=False)
    quality = {"quality": {"min_coverage": 0, "min_high_quality": 0}}
    return prepare(
        raw,
        tmp_path / "dataset",
        values=WINDOW | quality | values,
        engine=engine,
        overwrite=True,
    )


def check(tmp_path: Path, case: str, engine: str) -> None:
    change, outcome, sentence = CASES[case]
    if outcome == "refused":
        with pytest.raises(MobatlasError) as refusal:
            prepared(tmp_path, change, engine)
        assert re.search(sentence, str(refusal.value)), refusal.value
        assert not (tmp_path / "dataset").exists()
        return
    summary = prepared(tmp_path, change, engine)
    [warning] = summary.warnings
    assert re.search(sentence, warning), warning
    [stored] = json.loads((tmp_path / "dataset" / "summary.json").read_text())["warnings"]
    raw = [pd.read_parquet(tmp_path / "raw" / f"{name}.parquet") for name in ("visits", "people")]
    users = {str(user) for table in raw for user in table["user_id"]}
    named = [user for user in users if f"'{user}'" in warning]
    assert not any(f"'{user}'" in stored for user in users), "files have no id of a person"
    assert (stored == warning) == (not named)


@pytest.mark.parametrize("case", CASES)
def test_a_plausible_mistake_is_refused_or_warned_of(tmp_path: Path, case: str) -> None:
    check(tmp_path, case, "duckdb")


SPARK_CASES = (
    "a tenth swapped",
    "half without leading zeros",
    "people twice under other ids",
    "times eight hours late",
    "ages in years",
    "a zone in nanoseconds",
    "seconds",
    "overlapping visits",
)


@pytest.mark.spark
@pytest.mark.parametrize("case", SPARK_CASES)
def test_spark_finds_the_same_mistakes(tmp_path: Path, spark_session: Any, case: str) -> None:
    check(tmp_path, case, "spark")


def test_correct_tables_give_no_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    summary = prepared(tmp_path, lambda tables: None)
    assert summary.warnings == () and caplog.text == ""


def test_a_warning_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    prepared(tmp_path, lambda tables: hours_later(tables, 8))
    assert "times look shifted" in caplog.text


def test_invalid_years_can_be_dropped(tmp_path: Path) -> None:
    def spoil(tables: Tables) -> None:
        hours_later(tables, 8_760 * 120, slice(0, 1))

    assert prepared(tmp_path, spoil, invalid_rows="drop").rows.invalid == 2


@pytest.mark.parametrize(
    ("age", "levels"),
    [
        (np.arange(18.0, 78.0, 1.5), ["<30", "30-50", ">50"]),
        (np.where(np.arange(40) == 0, 999, 31), ["30-50"]),
    ],
)
def test_bins_make_groups_of_numbers(tmp_path: Path, age: Any, levels: list[str]) -> None:
    prepared(tmp_path, edit("people", age=age), bins={"age": [30, 50]})
    groups = TrajectoryDataset.open(tmp_path / "dataset").groups
    assert groups is not None and groups.as_dict()["age"] == levels


def test_a_few_codes_of_ages_are_levels(tmp_path: Path) -> None:
    assert prepared(tmp_path, edit("people", age=np.arange(40) % 8)).warnings == ()


@pytest.mark.parametrize("limits", [[], [50, 30]])
def test_bins_that_cannot_be(tmp_path: Path, limits: list[float]) -> None:
    with pytest.raises(MobatlasError, match="give at least one limit, in increasing order"):
        prepared(tmp_path, lambda tables: None, bins={"age": limits})


def test_bins_of_a_column_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(MobatlasError, match=r"bins: .*people\.parquet has no column 'agee'"):
        prepared(tmp_path, lambda tables: None, bins={"agee": [30]})


@pytest.mark.parametrize("missing", ["column", "values"])
def test_check_ins_need_no_settings(tmp_path: Path, missing: str) -> None:
    tables = Tables(town().visits.copy(), town().people.copy())
    visits = tables.visits.drop(columns=["is_home", "is_work"]).dropna(subset="poi_id")
    if missing == "values":
        visits["departure"] = pd.NaT
    else:
        visits = visits.drop(columns="departure")
    visits.to_csv(tmp_path / "visits.csv", index=False)
    summary = prepare(tmp_path / "visits.csv", tmp_path / "dataset", values=WINDOW)
    assert summary.windows.kept == 80 and sum(summary.windows.dropped.values()) == 0
    assert "the source has no departures" in summary.notes[0]
    dataset = TrajectoryDataset.open(tmp_path / "dataset")
    assert dataset.manifest.config["prepare"]["quality"]["min_coverage"] == 0
    assert dataset.manifest.config["prepare"]["anchors"]["require_both"] is False
    assert dataset.window_days == 7


def test_settings_of_the_user_win_over_those_of_check_ins(tmp_path: Path) -> None:
    visits = town().visits.drop(columns="departure").dropna(subset="poi_id")
    visits.to_csv(tmp_path / "visits.csv", index=False)
    values = WINDOW | {"quality": {"min_coverage": 0.3}}
    with pytest.raises(MobatlasError, match="no window passed the quality rule"):
        prepare(tmp_path / "visits.csv", tmp_path / "dataset", values=values)


def test_a_window_without_enough_days_is_refused_with_one_that_fits(tmp_path: Path) -> None:
    with pytest.raises(MobatlasError, match=r"on 1 days or fewer \(window.days=1\)"):
        tables = town().visits
        day = tables[tables["departure"] <= "2024-03-05"]
        day.to_csv(tmp_path / "visits.csv", index=False)
        prepare(tmp_path / "visits.csv", tmp_path / "dataset", values=WINDOW)


def test_real_check_ins_are_in_another_zone(data_folder: Path, tmp_path: Path) -> None:
    source = data_folder / "foursquare_nyc" / "visits.parquet"
    summary = prepare(source, tmp_path / "dataset")
    assert len(summary.warnings) == 1 and "times look shifted by +10 hours" in summary.warnings[0]
    assert summary.windows.kept > 10_000


def test_a_real_survey_gives_no_warning(data_folder: Path, tmp_path: Path) -> None:
    values = {"window": {"days": 1, "stride": 1}, "quality": {"min_coverage": 0}}
    summary = prepare(data_folder / "santiago", tmp_path / "dataset", values=values)
    assert summary.warnings == ()
