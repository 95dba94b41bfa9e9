"""Aggregates as people buy or download them: read correctly, refused with the cause, or warned of.

A small city has the truth: the mean visits of each district, written in many layouts.
"""

from __future__ import annotations

import gzip
import json
import sqlite3
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from mobatlas import (
    MobatlasError,
    RegionsOptions,
    TrajectoryDataset,
    build_regions,
    load_regions,
    recover,
)
from mobatlas.data.types import FIRST_POI
from mobatlas.evaluation.evaluate import BASELINE
from mobatlas.features.maps import build_feature
from mobatlas.regions.aggregates import aggregates_from_dataset
from mobatlas.regions.periods import infer_period, infer_window, period_days
from mobatlas.regions.types import Aggregates
from tests.outcomes import refused, run
from tests.tiny import small_city

DAYS = 3  # of a window of this city
TRACTS = ("51059000100", "51059000200", "51059000300", "51059000400")
PEOPLE = 400  # devices of each block group


@dataclass(frozen=True)
class City:
    """The dataset, the visits of its districts, and a census of them."""

    dataset: TrajectoryDataset
    truth: Aggregates
    census: pd.DataFrame

    @property
    def long(self) -> pd.DataFrame:
        """Rows of region, feature, value and n."""
        v = self.truth
        region, feature = np.indices(v.values.shape)
        return pd.DataFrame(
            {
                "region": np.array(v.regions)[region.ravel()],
                "feature": np.array(v.features)[feature.ravel()],
                "value": v.values.ravel(),
                "n": v.n[region.ravel()],
            }
        )

    def rows(self, kind: str) -> pd.DataFrame:
        """The rows of one feature map, with the name of the bin."""
        table = self.long[self.long.feature.str.startswith(f"{kind}:")].reset_index(drop=True)
        return table.assign(bin=table.feature.str.partition(":")[2])

    def wide(self, kind: str) -> pd.DataFrame:
        return self.rows(kind).pivot(index=["region", "n"], columns="bin", values="value")

    @property
    def places(self) -> pd.DataFrame:
        table = self.dataset.vocabulary.table.to_pandas()
        return table[table.token >= FIRST_POI].reset_index(drop=True)


@pytest.fixture(scope="module")
def city(tmp_path_factory: pytest.TempPathFactory) -> City:
    dataset = small_city(tmp_path_factory.mktemp("aggregates"))
    maps = [build_feature(name, dataset.vocabulary) for name in ("category", "poi")]
    truth = aggregates_from_dataset(dataset, maps, dataset.people["home_district"].to_pylist())
    assert dataset.groups is not None
    rows = [
        {"region": region, "group": group, "count": 50 + 40 * ((number + code) % 5)}
        for number, region in enumerate(truth.regions)
        for code, group in enumerate(dataset.groups.names)
    ]
    return City(dataset, truth, pd.DataFrame(rows))


def patterns(city: City, start: str = "2024-03-01", end: str = "2024-04-01") -> pd.DataFrame:
    """Monthly Patterns: each tract has two block groups, and each visitor comes twice."""
    days = (pd.Timestamp(end) - pd.Timestamp(start)).days
    visits = city.rows("poi").pivot(index="bin", columns="region", values="value")
    rows = []
    for place in city.places.itertuples():
        each = visits.loc[str(place.poi_id)].to_numpy() * days / DAYS * PEOPLE  # of one block group
        homes = {
            f"{tract}{block}": int(count / 2) if round(count / 2) != 4 else 5
            for tract, count in zip(TRACTS, each, strict=True)
            for block in "12"
            if count >= 4
        }
        total = max(sum(homes.values()), 1)
        rows.append(
            {
                "placekey": place.poi_id,
                "location_name": f"Shop {place.token}",
                "top_category": place.category,
                "naics_code": "445110",
                "latitude": place.lat,
                "longitude": place.lon,
                "date_range_start": f"{start}T00:00:00-05:00",
                "date_range_end": f"{end}T00:00:00-04:00",
                "raw_visit_counts": 2 * total,
                "raw_visitor_counts": total,
                "visitor_home_cbgs": json.dumps(homes),
                "visitor_home_aggregation": json.dumps(
                    {
                        tract: homes.get(f"{tract}1", 0) + homes.get(f"{tract}2", 0)
                        for tract in TRACTS
                        if f"{tract}1" in homes
                    }
                ),
            }
        )
    return pd.DataFrame(rows)


def panel() -> pd.DataFrame:
    cells = [(f"{tract}{block}", PEOPLE) for tract in TRACTS for block in "12"]
    return pd.DataFrame(cells, columns=["census_block_group", "number_devices_residing"])


def tract_census(city: City, ids: Callable[[str], str] = str) -> pd.DataFrame:
    names = dict(zip(city.truth.regions, map(ids, TRACTS), strict=True))
    return city.census.assign(region=city.census.region.map(names))


def block_census(city: City) -> pd.DataFrame:
    tracts = tract_census(city)
    return pd.concat([tracts.assign(region=tracts.region + block) for block in "12"])


def write(path: Path, table: pd.DataFrame) -> Path:
    if path.suffix == ".parquet":
        table.to_parquet(path, index=False)
    else:
        table.to_csv(path, index=False)
    return path


def build(
    city: City, folder: Path, aggregates: pd.DataFrame, name: str = "visits.csv", **options: Any
) -> Aggregates:
    """The aggregates of a REGIONS folder that is built from a census and this table."""
    census = write(folder / "census.csv", options.pop("census", city.census))
    for option in ("home_panel",):
        if option in options:
            options[option] = write(folder / f"{option}.csv", options[option])
    build_regions(
        city.dataset.path,
        folder / "regions",
        RegionsOptions(composition=census, aggregates=write(folder / name, aggregates), **options),
        overwrite=True,
    )
    return load_regions(folder / "regions").aggregates


def notes(folder: Path) -> str:
    return "\n".join(load_regions(folder / "regions").details["notes"])


def assert_truth(city: City, read: Aggregates, kind: str, tolerance: float = 1e-6) -> None:
    """The aggregates are those of the city, by name of region and feature."""
    assert read.regions == city.truth.regions
    wanted = city.rows(kind).set_index(["region", "feature"]).value
    assert len(read.features) == city.rows(kind).feature.nunique()
    for row, region in enumerate(read.regions):
        for column, feature in enumerate(read.features):
            assert read.values[row, column] == pytest.approx(
                wanted[region, feature], abs=tolerance
            ), (region, feature)


# ---- plain tables: long and wide

Layout = tuple[Callable[[City], pd.DataFrame], str, dict[str, Any], str]
LAYOUTS: dict[str, Layout] = {
    "region, category, visits, devices": (
        lambda city: (
            city.rows("category")
            .assign(visits=lambda table: table.value * table.n)
            .rename(columns={"bin": "category", "n": "devices", "region": "district"})
            .drop(columns=["feature", "value"])
        ),
        "category",
        {},
        "",
    ),
    "region, place, visits, devices": (
        lambda city: (
            city.rows("poi")
            .assign(count=lambda table: table.value * table.n)
            .rename(columns={"bin": "place_id", "n": "devices"})
            .drop(columns=["feature", "value"])
        ),
        "poi",
        {},
        "",
    ),
    "wide, a column for each category, means": (
        lambda city: city.wide("category").reset_index(),
        "category",
        {},
        "",
    ),
    "wide, whole numbers are totals": (
        lambda city: (
            (
                city.wide("category").mul(city.wide("category").index.get_level_values("n"), axis=0)
                * 1_000
            )
            .round()
            .astype(int)
            .reset_index()
            .assign(n=lambda table: (table.n * 1_000).astype(int))
        ),
        "category",
        {},
        "whole numbers are totals of visits",
    ),
    "per week": (
        lambda city: city.rows("category").assign(value=lambda t: t.value * 7 / DAYS, per="week"),
        "category",
        {},
        "",
    ),
    "per month, declared beside the table": (
        lambda city: city.rows("category").assign(value=lambda t: t.value * 30.4375 / DAYS),
        "category",
        {"per": {"visits.csv": "month"}},
        "",
    ),
    "dates, declared beside the table": (
        lambda city: city.rows("category").assign(value=lambda t: t.value * 10 / DAYS),
        "category",
        {"per": {"visits.csv": "2024-03-01 to 2024-03-10"}},
        "",
    ),
    "a column of dates": (
        lambda city: city.rows("category").assign(
            value=lambda t: t.value * 14 / DAYS, per="2024-03-04 to 2024-03-17"
        ),
        "category",
        {},
        "",
    ),
    "people in a panel table": (
        lambda city: (
            city.rows("category")
            .assign(visits=lambda table: table.value * table.n)
            .drop(columns=["n", "value"])
        ),
        "category",
        {"panel": True},
        "",
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_is_read_as_the_truth(city: City, tmp_path: Path, layout: str) -> None:
    table, kind, options, note = LAYOUTS[layout]
    if options.get("panel"):
        devices = pd.DataFrame({"region": city.truth.regions, "devices": city.truth.n})
        options = {"home_panel": devices}
    columns = [name for name in table(city).columns if name != "bin"]
    read = build(city, tmp_path, table(city)[columns], **options)
    tolerance = 1e-3 if "whole" in layout else 1e-6
    assert_truth(city, read, kind, tolerance)
    assert not read.pooled
    assert note in notes(tmp_path)


def test_declared_shares_of_total_visits(city: City, tmp_path: Path) -> None:
    rows = city.rows("category").assign(visits=lambda table: table.value * table.n * 7)
    table = rows.drop(columns=["bin", "value"])
    read = build(city, tmp_path, table, per={"visits.csv": "share"})
    assert read.pooled and read.values.sum(1) == pytest.approx(np.ones(len(read.regions)))


@pytest.mark.parametrize("whole", [1, 100])
def test_fractions_and_percentages_are_shares(city: City, tmp_path: Path, whole: int) -> None:
    rows = city.rows("category")
    total = rows.groupby("region").value.transform("sum")
    shares = (rows.value / total * whole).round(4)
    table = rows.assign(value=shares).drop(columns="bin")
    read = build(city, tmp_path, table)
    assert read.pooled
    assert read.values.sum(1) == pytest.approx(np.ones(len(read.regions)))
    assert f"sum to {whole}, so they are shares of visits" in notes(tmp_path)


def test_one_unknown_place_is_left_out_and_counted(city: City, tmp_path: Path) -> None:
    rows = city.rows("poi").drop(columns="bin")
    rows["feature"] = rows.feature.replace(rows.feature[5], "poi:elsewhere")
    read = build(city, tmp_path, rows)
    assert len(read.features) == rows.feature.nunique() - 1
    assert "1 of 43 places are not in the dataset" in notes(tmp_path)
    assert "% of the visits in the table remain" in notes(tmp_path)


# ---- Patterns


@pytest.mark.parametrize(
    ("ids", "name"),
    [
        (str, "patterns.csv"),
        (lambda tract: f"1400000US{tract}", "patterns.parquet"),
    ],
)
def test_monthly_patterns_are_visits_per_window(
    city: City, tmp_path: Path, ids: Callable[[str], str], name: str
) -> None:
    """Tracts of the census; every visitor comes twice, so visits are twice the visitors."""
    read = build(
        city, tmp_path, patterns(city), name, census=tract_census(city, ids), home_panel=panel()
    )
    assert read.regions == TRACTS
    assert read.n.tolist() == [2 * PEOPLE] * 4
    column = {name: number for number, name in enumerate(read.features)}
    wanted = city.rows("poi").pivot(index="region", columns="feature", values="value")
    for feature in (name for name in read.features if name.startswith("poi:")):
        assert read.values[:, column[feature]] == pytest.approx(wanted[feature], abs=0.002)
    parent = city.dataset.vocabulary.parents
    for category in {name for name in read.features if name.startswith("category:")}:
        parts = [
            column[place] for place, own in parent.items() if own == category and place in column
        ]
        assert read.values[:, column[category]] == pytest.approx(read.values[:, parts].sum(1))
    said = notes(tmp_path)
    assert "raw_visit_counts / raw_visitor_counts" in said
    assert "covers 31 days" in said
    assert "100% of all visits are to places that are used" in said


def test_capital_names_empty_rows_and_partial_categories(city: City, tmp_path: Path) -> None:
    """A category is left out where the table lacks a tenth of its visits; its places remain."""
    table = patterns(city)
    whole = build(city, tmp_path, table, census=tract_census(city), home_panel=panel())
    category = city.places.category[0]
    table.loc[0, ["raw_visit_counts", "raw_visitor_counts"]] = None
    table.loc[0, ["visitor_home_cbgs", "visitor_home_aggregation"]] = "{}"
    table = table.rename(columns=str.upper)
    read = build(
        city,
        tmp_path,
        table[city.places.poi_id[0] != table.PLACEKEY],
        census=tract_census(city),
        home_panel=panel().rename(columns=str.upper).assign(REGION="va"),
    )
    assert set(whole.features) - set(read.features) == {
        f"poi:{city.places.poi_id[0]}",
        f"category:{category}",
    }
    with_empty_row = build(city, tmp_path, table, census=tract_census(city), home_panel=panel())
    assert with_empty_row.features == read.features


def test_block_groups_are_regions_if_the_census_has_them(city: City, tmp_path: Path) -> None:
    census = block_census(city)
    read = build(city, tmp_path, patterns(city), census=census, home_panel=panel())
    assert read.regions == tuple(f"{tract}{block}" for tract in TRACTS for block in "12")
    assert read.n.tolist() == [PEOPLE] * 8


def test_weeks_of_patterns_in_a_folder_are_added_up(city: City, tmp_path: Path) -> None:
    folder = tmp_path / "weekly"
    folder.mkdir()
    weeks = [("2024-03-04", "2024-03-11"), ("2024-03-11", "2024-03-18")]
    for number, (start, end) in enumerate(weeks):
        with gzip.open(folder / f"part{number}.csv.gz", "wt") as file:
            patterns(city, start, end).to_csv(file, index=False)
    census = write(tmp_path / "census.csv", tract_census(city))
    out = tmp_path / "regions"
    options = RegionsOptions(
        composition=census, aggregates=folder, home_panel=write(tmp_path / "panel.csv", panel())
    )
    build_regions(city.dataset.path, out, options)
    read = load_regions(out).aggregates
    places = np.array([name.startswith("poi:p") for name in read.features])
    names = city.rows("poi").bin.str.startswith("p")
    wanted = city.rows("poi")[names].groupby("region").value.sum()
    assert read.values[:, places].sum(1) == pytest.approx(wanted.to_numpy(), rel=0.05)
    assert "covers 14 days" in notes(tmp_path)


def test_a_count_of_four_is_two_to_four_visitors(city: City, tmp_path: Path) -> None:
    table = patterns(city)
    small = {f"{tract}{block}": 4 for tract in TRACTS for block in "12"}
    table.loc[0, ["visitor_home_cbgs", "visitor_home_aggregation"]] = json.dumps(small)
    census = block_census(city)
    read = build(city, tmp_path, table, census=census, home_panel=panel())
    column = read.features.index(f"poi:{table.placekey[0]}")
    assert read.values[:, column] == pytest.approx(3 * 2 / PEOPLE * DAYS / 31)
    assert read.noise is not None
    assert read.noise[:, column] == pytest.approx(2 / 3 * (2 / PEOPLE * DAYS / 31) ** 2)
    means = recover(load_regions(tmp_path / "regions"), quiet=True).means
    assert np.isfinite(means).all() and (means >= 0).all()


def test_places_match_by_name_or_category_within_the_radius(city: City, tmp_path: Path) -> None:
    table = patterns(city)
    table["placekey"] = [f"zzw-222@{number}" for number in range(len(table))]
    table.loc[: len(table) // 2, "location_name"] = city.places.poi_id[: len(table) // 2 + 1]
    table.loc[: len(table) // 2, "top_category"] = "unknown"
    table["latitude"] += 0.0003  # 33 m
    read = build(city, tmp_path, table, census=tract_census(city), home_panel=panel())
    assert "poi:" + city.places.poi_id[0] in read.features
    assert "poi:" + city.places.poi_id.iloc[-1] in read.features
    assert "0 by id, 40 by name or category within 100 m; 0 are left out" in notes(tmp_path)


def test_far_places_are_left_out_and_counted(city: City, tmp_path: Path) -> None:
    table = patterns(city)
    table.loc[:9, "placekey"] = [f"zzw-222@{number}" for number in range(10)]
    table.loc[:9, "latitude"] += 0.01
    read = build(city, tmp_path, table, census=tract_census(city), home_panel=panel())
    assert sum(name.startswith("poi:") for name in read.features) == len(table) - 10
    assert "30 by id, 0 by name or category within 100 m; 10 are left out" in notes(tmp_path)


def test_without_a_panel_patterns_are_shares(city: City, tmp_path: Path) -> None:
    assert build(city, tmp_path, patterns(city), census=tract_census(city)).pooled
    assert "only shares of visits are known" in notes(tmp_path)


# ---- refused, in one sentence, with nothing written

Change = Callable[[pd.DataFrame], pd.DataFrame]
PATTERNS_REFUSED: dict[str, tuple[Change, str]] = {
    "coordinates swapped": (
        lambda t: t.rename(columns={"latitude": "longitude", "longitude": "latitude"}),
        "latitude and longitude are swapped",
    ),
    "sign of longitude": (lambda t: t.assign(longitude=-t.longitude), "sign of longitude is wrong"),
    "sign of latitude": (lambda t: t.assign(latitude=-t.latitude), "sign of latitude is wrong"),
    "broken JSON": (
        lambda t: t.assign(
            **{name: "{'51059000100': 5}" for name in t.columns if name.startswith("visitor_home")}
        ),
        "row 1: column 'visitor_home_aggregation' is not a JSON object",
    ),
    "negative visitors": (
        lambda t: t.assign(visitor_home_aggregation='{"51059000100": -3}'),
        "is not a JSON object of numbers of visitors",
    ),
    "counts exchanged": (
        lambda t: t.rename(
            columns={
                "raw_visit_counts": "raw_visitor_counts",
                "raw_visitor_counts": "raw_visit_counts",
            }
        ),
        "are the columns exchanged?",
    ),
    "counts absent": (
        lambda t: t.assign(raw_visit_counts=""),
        "raw_visit_counts or raw_visitor_counts is not a number",
    ),
    "no raw_visitor_counts": (
        lambda t: t.drop(columns="raw_visitor_counts"),
        "column 'raw_visitor_counts' is missing",
    ),
    "a month twice": (
        lambda t: pd.concat([t, t]),
        "row 41: the place has another row for this period (40 such rows)",
    ),
    "a week within the month": (
        lambda t: pd.concat(
            [t, t.assign(date_range_start="2024-03-04", date_range_end="2024-03-11")]
        ),
        "its periods overlap",
    ),
    "no rows": (lambda t: t.iloc[:0], "no row has visits"),
    "no place of the dataset": (
        lambda t: t.assign(
            placekey=[f"zzw@{number}" for number in range(len(t))],
            latitude=t.latitude + 0.1,
            top_category="Couriers",
        ),
        "none of its 40 places is in the dataset",
    ),
    "a year called a month": (
        lambda t: t.assign(raw_visit_counts=t.raw_visit_counts * 12),
        "do not explain so much",
    ),
}


@pytest.mark.parametrize("case", PATTERNS_REFUSED)
def test_wrong_patterns_are_refused(city: City, tmp_path: Path, case: str) -> None:
    change, sentence = PATTERNS_REFUSED[case]
    with pytest.raises(MobatlasError) as caught:
        build(
            city,
            tmp_path,
            change(patterns(city)),
            census=tract_census(city),
            home_panel=panel(),
        )
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "regions").exists()


PLAIN_REFUSED: dict[str, tuple[Change, dict[str, Any], str]] = {
    "values x 1e300": (lambda t: t.assign(value=t.value * 1e300), {}, "column 'value' is"),
    "values of 1e-300": (
        lambda t: t.assign(value=np.where(t.index == 3, 1e-300, t.value)),
        {},
        "column 'value' is 1e-300 in row 4",
    ),
    "a thousand visits a minute": (
        lambda t: t.assign(value=np.where(t.index == 3, 1e7, t.value)),
        {},
        "column 'value per person' is 1e+07 in row 4",
    ),
    "n of 1e-300": (lambda t: t.assign(n=1e-300), {}, "column 'n' is 1e-300 in row 1"),
    "n of 1e308": (lambda t: t.assign(n=1e308), {}, "column 'n' is 1e+308 in row 1"),
    "n is not a number": (lambda t: t.assign(n="nan"), {}, "column 'n' is empty or not a number"),
    "a value is nan": (
        lambda t: t.assign(value=["nan", *t.value[1:]]),
        {},
        "column 'value' is empty or not a number in row 1",
    ),
    "negative noise": (lambda t: t.assign(noise_sd=-1.0), {}, "column 'noise_sd' is -1 in row 1"),
    "absurd noise": (lambda t: t.assign(noise_sd=1e300), {}, "column 'noise_sd' is 1e+300"),
    "a month without a period": (
        lambda t: t.assign(value=t.value * 30.4375 / DAYS),
        {},
        "so it may be 'month'",
    ),
    "a month called a day": (
        lambda t: t.assign(value=t.value * 30.4375 / DAYS),
        {"per": {"visits.csv": "day"}},
        "do not explain so much",
    ),
    "a period nobody knows": (
        lambda t: t,
        {"per": {"visits.csv": "fortnight"}},
        "'fortnight' is not a period",
    ),
    "an impossible date": (
        lambda t: t,
        {"per": {"visits.csv": "2024-02-30 to 2024-03-02"}},
        "'2024-02-30 to 2024-03-02' is not a period",
    ),
    "two periods": (
        lambda t: t.assign(per="week", value=t.value * 7 / DAYS),
        {"per": {"visits.csv": "month"}},
        "the table says that values are per week; remove the option 'per'",
    ),
    "a period of another table": (
        lambda t: t,
        {"per": {"vists.csv": "month"}},
        "no table of aggregates or group table has this name",
    ),
    "percentages called visits a week": (
        lambda t: t.assign(value=t.value / t.groupby("region").value.transform("sum") * 100),
        {"per": {"visits.csv": "week"}},
        "sum to 100, so they are shares",
    ),
    "a category that does not exist": (
        lambda t: t.assign(feature=t.feature.replace("category:grocery", "category:grocry")),
        {},
        "feature 'category:grocry' does not exist in the dataset; did you mean",
    ),
    "only regions": (lambda t: t[["region"]].drop_duplicates(), {}, "no column has visits"),
    "a category that nothing resembles": (
        lambda t: t.assign(feature=t.feature.replace("category:grocery", "category:population")),
        {},
        "feature 'category:population' does not exist in the dataset (one of 1",
    ),
    "three dates": (
        lambda t: t,
        {"per": {"visits.csv": "2024-03-01 to 2024-03-02 to 2024-03-03"}},
        "is not a period",
    ),
    "visitors only": (
        lambda t: t.rename(columns={"value": "visitors"}),
        {},
        "has visitors, but aggregates count visits",
    ),
}


@pytest.mark.parametrize("case", PLAIN_REFUSED)
def test_wrong_tables_are_refused(city: City, tmp_path: Path, case: str) -> None:
    change, options, sentence = PLAIN_REFUSED[case]
    with pytest.raises(MobatlasError) as caught:
        build(city, tmp_path, change(city.rows("category").drop(columns="bin")), **options)
    assert sentence in str(caught.value)
    assert not (tmp_path / "regions").exists()


def test_a_declared_period_that_agrees_roughly_is_warned_of(
    city: City, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    table = city.rows("category").assign(value=lambda t: t.value * 2, per="window")
    build(city, tmp_path, table.drop(columns="bin"))
    assert "may count repeated records of one stay" in caplog.text


def interchanged(city: City) -> Mapping[str, tuple[dict[str, pd.DataFrame], str]]:
    visits = city.rows("category").drop(columns="bin")
    groups = city.dataset.groups
    assert groups is not None
    by_group = pd.DataFrame(
        {"group": groups.names, "feature": "category:grocery", "value": 1.0, "n": 50}
    )
    census = city.census
    return {
        "both": (
            {"composition": visits, "aggregates": census},
            "columns are those of a table for --aggregates, not for --composition",
        ),
        "a census twice": (
            {"composition": census, "aggregates": census},
            "columns are those of a table for --composition, not for --aggregates",
        ),
        "aggregates twice": (
            {"composition": visits, "aggregates": visits},
            "columns are those of a table for --aggregates, not for --composition",
        ),
        "a group table as aggregates": (
            {"composition": census, "aggregates": by_group},
            "columns are those of a table for --group-table, not for --aggregates",
        ),
        "aggregates as a group table": (
            {"composition": census, "aggregates": visits, "group-table": visits},
            "columns are those of a table for --aggregates, not for --group-table",
        ),
    }


@pytest.mark.parametrize(
    "case",
    [
        "both",
        "a census twice",
        "aggregates twice",
        "a group table as aggregates",
        "aggregates as a group table",
    ],
)
def test_interchanged_tables_are_named(city: City, tmp_path: Path, case: str) -> None:
    tables, sentence = interchanged(city)[case]
    words: list[object] = []
    for option, table in tables.items():
        words += [f"--{option}", write(tmp_path / f"{option}.csv", table)]
    said = refused("regions", city.dataset.path, "--out", tmp_path / "regions", *words)
    assert sentence in said
    assert not (tmp_path / "regions").exists()


# ---- exit codes of absurd numbers and empty groups, before anything is trained


def test_absurd_numbers_end_with_exit_code_2_and_silence(
    city: City, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    census = write(tmp_path / "census.csv", city.census)
    for factor in (1e300, 1e-300):
        table = city.rows("category").drop(columns="bin")
        path = write(tmp_path / "visits.csv", table.assign(value=table.value * factor))
        refused(
            *("regions", city.dataset.path, "--out", tmp_path / "regions"),
            *("--composition", census, "--aggregates", path),
        )
    assert capfd.readouterr().out == ""


def test_extreme_but_possible_numbers_are_recovered_in_silence(
    city: City, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    table = city.rows("category").drop(columns="bin")
    table["n"] = table.region.map(dict(zip(city.truth.regions, (1, 10, 1e6, 1e10), strict=True)))
    table.loc[0, "value"] = 2e-9
    build(city, tmp_path, table)
    means = recover(load_regions(tmp_path / "regions"), quiet=True).means
    assert np.isfinite(means).all()
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize("source", ["tables", "by"])
def test_a_group_without_people_is_refused_where_regions_are_built(
    city: City, tmp_path: Path, source: str
) -> None:
    """`supervise` refuses it with the same words; `run` builds regions before it trains."""
    table = city.census.assign(
        count=np.where(city.census.group == "30-40, F", 0, city.census["count"])
    )
    census = write(tmp_path / "census.csv", table)
    visits = write(tmp_path / "visits.csv", city.rows("category").drop(columns="bin"))
    words = ("--aggregates", visits) if source == "tables" else ("--by", "home_district")
    said = refused(
        *("regions", city.dataset.path, "--out", tmp_path / "regions"),
        *("--composition", census, *words),
    )
    assert "census.csv: no region has people of group '30-40, F'; merge it" in said
    assert not (tmp_path / "regions").exists()


# ---- polygons


def squares(city: City) -> dict[str, list[list[float]]]:
    """Four rectangles that meet at the median home: names and rings of longitude, latitude."""
    homes = city.dataset.anchors[:, :2]
    low, middle, high = homes.min(0) - 0.01, np.median(homes, axis=0), homes.max(0) + 0.01
    rings = {}
    for north in (0, 1):
        for east in (0, 1):
            south_west = [(low, middle)[north][0], (low, middle)[east][1]]
            north_east = [(middle, high)[north][0], (middle, high)[east][1]]
            (s, w), (n, e) = south_west, north_east
            rings[f"{'NS'[1 - north]}{'EW'[1 - east]}"] = [[w, s], [e, s], [e, n], [w, n], [w, s]]
    return rings


def geojson(
    city: City, path: Path, *, flip: bool = False, kind: str = "Polygon", **changes: Any
) -> Path:
    features = [
        {
            "type": "Feature",
            "properties": {"zone": name},
            "geometry": {
                "type": kind,
                "coordinates": [[point[::-1] if flip else point for point in ring]]
                if kind == "Polygon"
                else ring[0],
            },
        }
        for name, ring in squares(city).items()
    ]
    path.write_text(json.dumps({"type": "FeatureCollection", "features": features} | changes))
    return path


def geopackage(city: City, path: Path, srs: int = 4326) -> Path:
    """The tables that a GeoPackage needs, with one layer of multipolygons with an envelope."""
    with sqlite3.connect(path) as file:
        file.execute(
            "CREATE TABLE gpkg_geometry_columns (table_name, column_name, geometry_type_name, "
            "srs_id, z, m)"
        )
        file.execute(
            "INSERT INTO gpkg_geometry_columns VALUES ('zones', 'geom', 'MULTIPOLYGON', ?, 0, 0)",
            (srs,),
        )
        file.execute("CREATE TABLE zones (fid INTEGER PRIMARY KEY, geom BLOB, zone TEXT)")
        for name, ring in squares(city).items():
            points = b"".join(struct.pack("<dd", *point) for point in ring)
            polygon = struct.pack("<BIII", 1, 3, 1, len(ring)) + points
            header = b"GP" + bytes([0, 0b0000_0011]) + struct.pack("<i4d", srs, 0, 0, 0, 0)
            blob = header + struct.pack("<BII", 1, 6, 1) + polygon
            file.execute("INSERT INTO zones (geom, zone) VALUES (?, ?)", (blob, name))
    file.close()
    return path


@pytest.mark.parametrize("form", ["geojson", "gpkg"])
def test_polygons_around_homes_are_regions(city: City, tmp_path: Path, form: str) -> None:
    pytest.importorskip("shapely", reason="polygons need the extra 'geo'")
    path = tmp_path / f"zones.{form}"
    (geojson if form == "geojson" else geopackage)(city, path)
    names = list(squares(city))
    census = write(
        tmp_path / "census.csv",
        city.census.assign(
            region=city.census.region.map(dict(zip(city.truth.regions, names, strict=True)))
        ),
    )
    options = RegionsOptions(by="zone", polygons=path, composition=census)
    build_regions(city.dataset.path, tmp_path / "regions", options)
    homes = city.dataset.anchors[:, :2]
    middle = np.median(homes, axis=0)
    train = np.intersect1d(city.dataset.split_people("train"), city.dataset.person)
    north, east = (homes[train] > middle).T
    n = dict(
        zip(
            *(
                load_regions(tmp_path / "regions").aggregates.__dict__[key]
                for key in ("regions", "n")
            ),
            strict=True,
        )
    )
    assert n == {
        "NE": (north & east).sum(),
        "NW": (north & ~east).sum(),
        "SE": (~north & east).sum(),
        "SW": (~north & ~east).sum(),
    }
    assert "0 homes are outside" in notes(tmp_path)


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


PROJECTED = {"type": "name", "properties": {"name": "urn:ogc:def:crs:EPSG::3857"}}
POLYGONS_REFUSED: dict[str, tuple[Callable[[City, Path], Path], str, str]] = {
    "projected GeoJSON": (
        lambda city, path: geojson(city, path, crs=PROJECTED),
        "zone",
        "coordinates are in urn:ogc:def:crs:EPSG::3857, not in degrees",
    ),
    "projected GeoPackage": (
        lambda city, path: geopackage(city, path.with_suffix(".gpkg"), 3857),
        "zone",
        "coordinates are in EPSG:3857, not in degrees",
    ),
    "another property": (geojson, "zones", "have no such property; did you mean 'zone'?"),
    "points": (
        lambda city, path: geojson(city, path, kind="Point"),
        "zone",
        "a shape is not a polygon",
    ),
    "a list": (
        lambda city, path: written(path, "[]"),
        "zone",
        "these are not polygons in GeoJSON or GeoPackage",
    ),
    "not polygons": (
        lambda city, path: write(path.with_suffix(".geojson"), city.census),
        "zone",
        "these are not polygons in GeoJSON or GeoPackage",
    ),
    "latitude before longitude": (
        lambda city, path: geojson(city, path, flip=True),
        "zone",
        "latitude and longitude are swapped",
    ),
}


@pytest.mark.parametrize("case", POLYGONS_REFUSED)
def test_wrong_polygons_are_refused(city: City, tmp_path: Path, case: str) -> None:
    pytest.importorskip("shapely", reason="polygons need the extra 'geo'")
    make, by, sentence = POLYGONS_REFUSED[case]
    path = make(city, tmp_path / "zones.geojson")
    said = refused(
        *("regions", city.dataset.path, "--out", tmp_path / "regions"),
        *("--by", by, "--polygons", path),
    )
    assert sentence in said


# ---- periods


@pytest.mark.parametrize(
    ("text", "days"),
    [
        ("day", 1),
        ("week", 7),
        ("month", 30.4375),
        ("window", 14),
        ("10 days", 10),
        ("2024-02-01 to 2024-02-29", 29),
    ],
)
def test_a_period_has_days(text: str, days: float) -> None:
    assert period_days("visits.csv", text, window_days=14) == days


@pytest.mark.parametrize(
    ("published", "ours", "window", "span", "name"),
    [
        (30.6, 5.89, 3, 14, "14 days"),  # the table of a first day
        (5.9, 5.89, 3, 14, "window"),
        (60, 5.89, 3, 90, "month"),
        (13, 5.89, 3, 90, "week"),
        (2.1, 5.89, 3, 90, "day"),
        (1_000, 5.89, 3, 90, None),
    ],
)
def test_the_period_of_a_table_is_inferred_with_a_reason(
    published: float, ours: float, window: int, span: int, name: str | None
) -> None:
    found = infer_period(published, ours, window, span)
    assert (found and found[0]) == name
    assert found is None or "a value covers about" in found[1]


@pytest.mark.parametrize(
    ("span", "per_person", "table", "days"),
    [(1, 1, None, 1), (14, 12, 30.4, 3), (14, 12, 7, 7), (90, 60, None, 14), (400, 60, 7, 7)],
)
def test_the_window_is_inferred_with_a_reason(
    span: int, per_person: float, table: float | None, days: int
) -> None:
    found, reason = infer_window(span, per_person, table)
    assert found == days and reason


def test_the_command_takes_a_period(city: City, tmp_path: Path) -> None:
    table = city.rows("category").assign(value=lambda t: t.value * 7 / DAYS)
    visits = write(tmp_path / "visits.csv", table.drop(columns="bin"))
    done = run(
        *("regions", city.dataset.path, "--out", tmp_path / "regions", "--per", "week"),
        *("--composition", write(tmp_path / "census.csv", city.census), "--aggregates", visits),
    )
    assert done.code == 0, done.err
    assert_truth(city, load_regions(tmp_path / "regions").aggregates, "category")


def test_a_run_refuses_empty_groups_and_absurd_numbers_before_it_trains(
    city: City, tmp_path: Path
) -> None:
    """Keys of the configuration reach the regions of a run, which come before any model."""
    source = city.dataset.path.parent / "city"
    visits = city.rows("category").drop(columns="bin")
    write(tmp_path / "census.csv", city.census)
    emptied = city.census.assign(count=city.census["count"].where(city.census.group != "<30, F", 0))
    write(tmp_path / "emptied.csv", emptied)
    write(tmp_path / "visits.csv", visits)
    write(tmp_path / "absurd.csv", visits.assign(value=visits.value * 1e300))
    for regions, sentence in (
        ("composition: emptied.csv, aggregates: visits.csv", "no region has people of group"),
        ("composition: census.csv, aggregates: absurd.csv", "column 'value' is"),
        (
            "composition: census.csv, aggregates: visits.csv, per: {visits.csv: month}",
            "do not explain so much",
        ),
    ):
        config = tmp_path / "run.yaml"
        config.write_text(
            f"preset: small\nsource: {{path: '{source}'}}\nregions:\n  tables: {{{regions}}}\n"
        )
        assert sentence in refused("run", config, "--out", tmp_path / "out")
        assert (tmp_path / "out" / "dataset").exists()
        assert not (tmp_path / "out" / BASELINE).exists()
