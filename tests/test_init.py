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

from mobatlas import RunConfig, TrajectoryDataset, load_regions, load_run
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
        rows = by_category.sum().stack().rename("visits").rename_axis(["category", "region"])
        return rows.mul(days * DEVICES).round().reset_index().assign(devices=DEVICES)


def tables(folder: Path, days: int, per_day: float, *, departures: bool = True) -> Tables:
    """Visits of 90 people who are at home until 8:00 and then go out."""
    rng = np.random.default_rng(0)
    rows = []
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
    cells = {f"B01001_{number:03d}E": "Estimate" for number in range(1, 50)}
    rows = [{"GEO_ID": "Geography", "NAME": "Area", **cells}]
    for number, tract in enumerate(TRACTS):
        people = {key: 40 + 30 * ((k * (number + 1)) % 7) for k, key in enumerate(cells)}
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
    ], {"window": 3, "per": {"trips.csv": "week"}, "days": 31}


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
    ], {"window": 1, "per": {"visits.csv": "day"}, "days": 1}


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
    ], {"window": 7, "per": {"visits.csv": "week"}, "days": 7}


@pytest.mark.parametrize("analyst", [panel_of_two_weeks, diary_of_a_day, check_ins])
def test_init_then_run_have_the_right_window_period_and_level(
    analyst: Callable[[Path], tuple[list[object], dict[str, Any]]], tmp_path: Path
) -> None:
    options, expected = analyst(tmp_path)
    config, out = tmp_path / "run.yaml", tmp_path / "run"
    screen = run("init", *options, "--out", config)
    assert screen.code == 0, screen.err
    assert len(screen.out.splitlines()) < 45 and not screen.err, screen
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
