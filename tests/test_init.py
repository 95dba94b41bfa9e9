"""`init` checks every table and writes a configuration that runs without editing.

Three analysts start from tables as they are published. Each gets the right window and the right
period, and the run's group means have the level of the visits.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from mobatlas import TrajectoryDataset, load_regions, load_run
from mobatlas.config import format_assignments
from mobatlas.pipeline import check
from mobatlas.regions.aggregates import level_of_dataset
from tests.outcomes import refused, run
from tests.spreadsheets import write_xlsx

TRACTS = ("51059000100", "51059000200", "51059000300")
CATEGORIES = ("food", "gym", "shop")
DEVICES = 5_000  # of a region
TINY: dict[str, Any] = {
    "audit": False,
    "samples": {"each": 8},
    "train": {
        "options": {
            "length": 12,
            "network": {"depth": 1, "width": 16, "heads": 1, "embedding": 4},
            "training": {"steps": 2, "batch": 16},
            "weighted_fit": {"steps": 1},
        }
    },
    "supervise": {"options": {"calibration": {"pool": 32, "candidates": 2}}},
}


@dataclass(frozen=True)
class Tables:
    """Visits of people, and the mean visits per day of each region to each place."""

    folder: Path
    visits: pd.DataFrame
    daily: pd.DataFrame  # (places, regions)

    def write(self, name: str, table: pd.DataFrame) -> Path:
        path = self.folder / name
        table.to_csv(path, index=False)
        return path

    def aggregates(self, days: float) -> pd.DataFrame:
        """Visits of all devices to each category in some days, without the period."""
        by_category = self.daily.groupby(self.daily.index.str.partition(" ").get_level_values(0))
        rows = (by_category.sum() * days * DEVICES).round().rename_axis("category").reset_index()
        rows = rows.melt("category", var_name="region", value_name="visits")
        return rows.assign(devices=DEVICES)


def tables(folder: Path, days: int, per_day: float, *, departures: bool = True) -> Tables:
    """Visits of 90 people who are at home until 8:00 and then go out."""
    rng = np.random.default_rng(0)
    rows: list[tuple[Any, ...]] = []
    for person in range(90):
        for day in range(days):
            midnight = pd.Timestamp("2024-03-04") + pd.Timedelta(days=day)
            lat, lon = 38.8 + person / 1e3, -77.1
            if departures:
                home = midnight + pd.Timedelta(hours=8)
                rows.append((f"p{person:02d}", None, None, lat, lon, midnight, home, True))
            hours = rng.choice(14, size=1 + rng.poisson(per_day - 1), replace=False)
            for hour in sorted(8 + hours):
                category = CATEGORIES[rng.choice(3, p=np.roll([0.5, 0.3, 0.2], person % 3))]
                start = midnight + pd.Timedelta(hours=int(hour))
                place = (f"{category} {rng.integers(12)}", category, 38.85, -77.1)
                end = start + pd.Timedelta(minutes=40)
                rows.append((f"p{person:02d}", *place, start, end, False))
    columns = ["user_id", "poi_id", "category", "lat", "lon", "arrival", "departure", "is_home"]
    visits = pd.DataFrame(rows, columns=columns)
    out = visits[~visits.is_home]
    region = out.user_id.str[1:].astype(int) % 3
    counts = out.groupby([out.poi_id, region]).size().unstack() / (days * 30)
    daily = counts.set_axis(list(TRACTS), axis=1).rename_axis(columns=None)
    if not departures:
        visits = visits.drop(columns=["departure", "is_home"])
    return Tables(folder, visits, daily)


def patterns(source: Tables) -> pd.DataFrame:
    """Monthly Patterns: each visitor comes twice."""
    homes = (source.daily * 31 * DEVICES / 2).round().astype(int)
    return pd.DataFrame(
        {
            "placekey": homes.index,
            "top_category": homes.index.str.partition(" ").get_level_values(0),
            "date_range_start": "2024-03-01T00:00:00-05:00",
            "date_range_end": "2024-04-01T00:00:00-04:00",
            "raw_visit_counts": 2 * homes.sum(axis=1).to_numpy(),
            "raw_visitor_counts": homes.sum(axis=1).to_numpy(),
            "visitor_home_aggregation": [json.dumps(row) for row in homes.to_dict("records")],
        }
    )


def acs() -> pd.DataFrame:
    """Table B01001 with a second row of names."""
    cells: dict[str, Any] = {f"B01001_{number:03d}E": "Estimate" for number in range(1, 50)}
    rows = [{"GEO_ID": "Geography", "NAME": "Area", **cells}]
    for number, tract in enumerate(TRACTS):
        people: dict[str, Any] = {
            key: 40 + 30 * ((k * (number + 1)) % 7) for k, key in enumerate(cells)
        }
        rows.append({"GEO_ID": f"1400000US{tract}", "NAME": tract, **people})
    return pd.DataFrame(rows)


def panel_of_two_weeks(folder: Path) -> tuple[list[object], dict[str, Any]]:
    source = tables(folder, days=14, per_day=3)
    devices = pd.DataFrame({"census_block_group": [f"{tract}1" for tract in TRACTS]})
    weekly = source.aggregates(7).groupby("category").visits.sum() / DEVICES / 3
    trips = pd.DataFrame(
        {"gender": "F", "feature": "category:" + weekly.index, "value": weekly, "n": 800}
    )
    return [
        *("--visits", source.write("visits.csv", source.visits)),
        *("--composition", source.write("acs.csv", acs())),
        *("--aggregates", source.write("patterns.csv", patterns(source))),
        *("--home-panel", source.write("panel.csv", devices.assign(n=DEVICES))),
        *("--group-table", source.write("trips.csv", trips)),
    ], {
        "window": 3,
        "per": {"trips.csv": "week"},
        "days": 31,
        "says": "36 places, matched to the dataset: 36 by id",
    }


def diary_of_a_day(folder: Path) -> tuple[list[object], dict[str, Any]]:
    source = tables(folder, days=1, per_day=4)
    ages = ("0-29", "30+")
    rows: list[list[str | float]] = [
        ["Table 3. Population by sex and age"],
        [],
        ["", "Men", "", "Women", "", "Total"],
        ["District", *ages, *ages, ""],
    ]
    for number, tract in enumerate(TRACTS):
        cells = [900.0 + 400 * number, 800, 1_200 - 300 * number, 700]
        rows.append([f"{tract}", *cells, sum(cells)])
    rows += [["Source: National institute of statistics"]]
    census = write_xlsx(folder / "office.xlsx", {"Table 3": rows}, ("B3:C3", "D3:E3"))
    return [
        *("--visits", source.write("diary.csv", source.visits)),
        *("--composition", census),
        *("--aggregates", source.write("visits.csv", source.aggregates(1))),
    ], {
        "window": 1,
        "per": {"visits.csv": "day"},
        "days": 1,
        "says": "5,000 and 3,600): is the census in thousands?",
    }


def check_ins(folder: Path) -> tuple[list[object], dict[str, Any]]:
    source = tables(folder, days=21, per_day=2, departures=False)
    wide = pd.DataFrame({"region": TRACTS})
    for k, name in enumerate(("Male 0-29", "Male 30+", "Female 0-29", "Female 30+")):
        wide[name] = [500 + 300 * ((k + number) % 3) for number in range(3)]
    renamed = source.visits.rename(columns={"user_id": "device_id"})
    return [
        *("--visits", source.write("check-ins.csv", renamed)),
        *("--rename", "user_id=device_id"),
        *("--composition", source.write("wide.csv", wide)),
        *("--aggregates", source.write("visits.csv", source.aggregates(7))),
    ], {
        "window": 7,
        "per": {"visits.csv": "week"},
        "days": 7,
        "says": "days: the period of a value in the published table",
    }


@pytest.mark.parametrize("analyst", [panel_of_two_weeks, diary_of_a_day, check_ins])
def test_init_then_run_have_the_right_window_period_and_level(
    analyst: Callable[[Path], tuple[list[object], dict[str, Any]]], tmp_path: Path
) -> None:
    options, expected = analyst(tmp_path)
    config, out = tmp_path / "run.yaml", tmp_path / "run"
    screen = run("init", *options, "--out", config)
    assert screen.code == 0, screen.err
    assert len(screen.out.splitlines()) < 45 and not screen.err, screen
    assert expected["says"] in " ".join(screen.out.split())
    found = load_run(config)
    assert found.prepare.window.days == found.prepare.window.stride == expected["window"]
    assert found.regions["census"].per == expected["per"]
    for name in expected["per"]:
        line = next(line for line in config.read_text().splitlines() if f'"{name}": ' in line)
        assert "# a value covers about" in line
    sets = [word for text in format_assignments(TINY) for word in ("--set", text)]
    finished = run("run", config, "--out", out, "--quiet", *sets)
    assert finished.code == 0, finished.err
    regions = load_regions(out / "regions" / "census")
    assert regions.details["days"] == pytest.approx(expected["days"])
    means = pd.read_parquet(out / "models" / "census" / "group_means.parquet")
    features = [name for name in means.feature.unique() if name.startswith("category:")]
    of_groups = means[means.feature.isin(features)].groupby("group", sort=False)["mean"].sum()
    share = regions.composition.shares.mean(axis=0)
    recovered = float(of_groups[list(regions.groups.names)].to_numpy() @ share)
    dataset = TrajectoryDataset.open(out / "dataset")
    assert recovered == pytest.approx(level_of_dataset(dataset, features), rel=0.2)


def labelled_town(folder: Path, column: str = "home_district") -> Tables:
    """A folder of visits and labelled people, with their region in a column."""
    (folder / "town").mkdir()
    town = tables(folder / "town", days=1, per_day=4)
    town.write("visits.csv", town.visits)
    people = pd.DataFrame({"user_id": [f"p{person:02d}" for person in range(90)]})
    people["age"] = np.where(people.index % 2, "<30", "30+")
    people["gender"] = np.where(people.index // 2 % 2, "M", "F")
    people[column] = np.array(TRACTS)[people.index % 3]
    town.write("people.csv", people)
    return town


def census(folder: Path) -> Path:
    rows = [
        (t, age, sex, 100 + 90 * k)
        for k, t in enumerate(TRACTS)
        for age in ("<30", "30+")
        for sex in "MF"
    ]
    table = pd.DataFrame(rows, columns=["region", "age", "gender", "count"])
    table.loc[::3, "count"] += 150
    table.to_csv(folder / "census.csv", index=False)
    return folder / "census.csv"


@pytest.mark.parametrize(
    ("column", "with_census", "expected"),
    [
        (None, False, {"hot16": {"partition": "hot16"}}),
        ("home_district", False, {"homes": {"by": "home_district"}}),
        ("quarter", True, {"census": {"by": "quarter", "composition": Path("census.csv")}}),
    ],
)
def test_regions_of_labelled_people(
    column: str | None, with_census: bool, expected: dict[str, Any], tmp_path: Path
) -> None:
    labelled_town(tmp_path, column or "home_district")
    options: list[object] = ["--visits", tmp_path / "town", "--out", tmp_path / "run.yaml"]
    options += ["--by", column] if column else []
    options += ["--composition", census(tmp_path)] if with_census else []
    done = run("init", *options)
    assert done.code == 0, done.err
    config = load_run(tmp_path / "run.yaml")
    regions = {
        name: source.model_dump(exclude_defaults=True) for name, source in config.regions.items()
    }
    assert regions == expected
    assert config.source is not None and config.source.path == Path("town")
    # `prepare` does not recognise this column by its name.
    assert config.prepare.regions == (("quarter",) if column == "quarter" else None)
    refusal = refused("init", *options)
    assert "this file exists already; choose another name, or pass --overwrite" in refusal


OPTIONS = {
    "--composition census.csv": "--aggregates is missing; give the aggregates of the same regions. "
    "To count them from your visits instead, pass --by with the region column of people, such as "
    "home_district",
    "--aggregates visits.csv": "--composition is missing; aggregates need the composition",
    "--composition census.csv --by home_distric": "the table has no column 'home_distric'; did you "
    "mean 'home_district'?",
    "--composition census.csv --by home_district --aggregates visits.csv": "--by home_district "
    "counts aggregates from your visits, but --aggregates gives them too",
    "--composition census.csv --by age": "--by age: this is not a column of regions; give the "
    "column with each person's region, such as home_district",
    "--composition nowhere.csv --aggregates visits.csv": "--composition nowhere.csv: this path "
    "does not exist; check it",
    "--composition census.csv --aggregates nowhere.csv": "--aggregates nowhere.csv: this path",
}


def test_options_that_do_not_fit_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    town = labelled_town(tmp_path)
    census(tmp_path)
    town.aggregates(1).to_csv("visits.csv", index=False)
    town.write("visits.csv", pd.DataFrame({"user_id": ["p00"]}))  # refused before it is prepared
    for options, sentence in OPTIONS.items():
        done = run("init", "--visits", "town", *options.split(), "--out", "run.yaml")
        first, second = done.err.splitlines()[1:3]
        assert (done.code, first[:3], second[:3]) == (2, "1. ", "2. "), done.err
        assert sentence in first and "column 'poi_id' is missing" in second, done.err
        assert not Path("run.yaml").exists()
    refusal = refused("init", "--composition", "census.csv", "--out", "run.yaml")
    assert OPTIONS["--composition census.csv"].rpartition(",")[0] in refusal


def test_all_problems_are_listed_at_once(tmp_path: Path) -> None:
    """A census with a wrong total, an unknown category, two bad group tables, a missing file."""
    source = tables(tmp_path, days=1, per_day=4)
    bad = pd.DataFrame({"region": [*TRACTS, TRACTS[0]], "age": [*["<30"] * 3, "30+"]})
    aggregates = source.aggregates(1).replace("food", "museum")
    options = [
        *("--visits", source.write("visits.csv", source.visits)),
        *("--composition", source.write("census.csv", bad.assign(count=[10, 20, -5, 30]))),
        *("--aggregates", source.write("aggregates.csv", aggregates)),
        *("--group-table", source.write("trips.csv", bad.assign(feature="category:food"))),
        *("--labelled", tmp_path / "nowhere"),
    ]
    done = run("init", *options, "--out", tmp_path / "run.yaml")
    first, *lines = done.err.strip().splitlines()
    assert done.code == 2 and not (tmp_path / "run.yaml").exists()
    assert first == f"mobatlas: {len(lines)} problems:"
    assert [line.split(".")[0] for line in lines] == [f"{k + 1}" for k in range(len(lines))]
    for number, part in enumerate(
        (
            f"--labelled {tmp_path / 'nowhere'}: this path does not exist",
            f"{tmp_path / 'census.csv'}: ",
            f"{tmp_path / 'aggregates.csv'}: feature 'category:museum' does not exist",
        )
    ):
        assert part in lines[number], lines


def test_a_second_group_table_is_checked_although_the_first_is_wrong(tmp_path: Path) -> None:
    source = tables(tmp_path, days=1, per_day=4)
    trips = pd.DataFrame({"gender": ["F"], "feature": "category:food", "value": 900.0, "n": 50})
    options = [
        *("--visits", source.write("visits.csv", source.visits)),
        *("--composition", census(tmp_path)),
        *("--aggregates", source.write("aggregates.csv", source.aggregates(1))),
        *("--group-table", source.write("level.csv", trips)),
        *("--group-table", source.write("feature.csv", trips.assign(feature="category:zoo"))),
    ]
    done = run("init", *options, "--out", tmp_path / "run.yaml")
    _, *lines = done.err.strip().splitlines()
    assert done.code == 2 and len(lines) == 2, done.err
    assert "people make 900 visits in the table" in lines[0]
    assert "feature 'category:zoo' does not exist in the table of visits" in lines[1]


@pytest.mark.parametrize(
    ("visits", "composition", "aggregates", "sentence"),
    [
        ("census", "visits", "aggregates", "are those of a table for --composition, not for --v"),
        ("visits", "visits", "aggregates", "are those of a table for --visits, not for --comp"),
    ],
)
def test_tables_that_are_interchanged(
    visits: str, composition: str, aggregates: str, sentence: str, tmp_path: Path
) -> None:
    source = tables(tmp_path, days=1, per_day=4)
    census(tmp_path)
    source.write("visits.csv", source.visits)
    source.write("aggregates.csv", source.aggregates(1))
    given = {"visits": visits, "composition": composition, "aggregates": aggregates}
    options = [
        word for key, name in given.items() for word in (f"--{key}", tmp_path / f"{name}.csv")
    ]
    done = run("init", *options, "--out", tmp_path / "run.yaml")
    assert done.code == 2 and sentence in done.err
    assert "Traceback" not in done.err and not (tmp_path / "run.yaml").exists()


@pytest.mark.parametrize(
    "command", [("generate", "model", "--out", "x.parquet"), ("evaluate", "x", "--dataset", "y")]
)
def test_every_reader_takes_other_names_of_columns(command: tuple[str, ...]) -> None:
    said = refused(*command, "--rename", "poi_id")
    assert "--rename poi_id: write it as expected=theirs, user_id=device_id" in said


def test_totals_that_no_period_explains_are_refused(tmp_path: Path) -> None:
    source = tables(tmp_path, days=1, per_day=4)
    options = [
        *("--visits", source.write("visits.csv", source.visits)),
        *("--composition", census(tmp_path)),
        *("--aggregates", source.write("aggregates.csv", source.aggregates(90))),
    ]
    said = refused("init", *options, "--out", tmp_path / "run.yaml")
    assert "add a column 'per' with day, week, month or window, or pass --per" in said
    done = run("init", *options, "--per", "90 days", "--out", tmp_path / "run.yaml")
    assert done.code == 0, done.err
    assert load_run(tmp_path / "run.yaml").regions["census"].per == {"aggregates.csv": "90 days"}


def test_a_dry_run_estimates_from_a_sample_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "MOST_ROWS", 300)
    town = labelled_town(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    config = tmp_path / "run.yaml"
    values = {
        "source": {"path": "town"},
        "preset": "small",
        "prepare": {
            "window": {"days": 1, "stride": 1},
            "quality": {"min_coverage": 0},
            "anchors": {"require_both": False},
        },
        "regions": {"homes": {"by": "home_district", "features": ["category"]}},
    }
    config.write_text(json.dumps(values))
    sets = [word for text in format_assignments(TINY) for word in ("--set", text)]
    sets += ["--set", "train.options.training.steps=4000"]
    done = run("run", config, *sets, "--dry-run", "--json")
    assert done.code == 0, done.err
    facts = json.loads(done.out)
    costs = facts["costs"]
    assert list(costs) == ["prepare", "baseline", "strong", "regions homes"]
    # 4,000 steps against one step and a few samples
    assert costs["baseline"]["seconds"] > 10 * costs["strong"]["seconds"]
    assert all(each["memory_gb"] > 0.05 and each["disk_gb"] > 0 for each in costs.values())
    assert facts["share"] == pytest.approx(300 / len(town.visits))
    assert facts["visits"]["users"] < 80
    shown = run("run", config, *sets, "--dry-run").out
    assert "Estimates for this machine" in shown and "of the people were read" in shown
    assert {*tmp_path.rglob("*")} == {*before, config}
    values["source"] = {"path": "nowhere"}
    config.write_text(json.dumps(values))
    said = refused("run", config, "--dry-run")
    assert "this path does not exist; `source.path` is relative to the configuration file" in said
