"""What regions are warned of: tables that lack a part, and places without categories."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pyarrow.parquet as pq
import pytest

from mobatlas import MobatlasError, TrajectoryDataset, build_regions, prepare
from mobatlas.regions.build import RegionsOptions
from tests.tiny import small_city


@pytest.fixture(scope="module")
def city(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("warned")
    small_city(root)
    return root


def test_groups_that_a_census_counts_nowhere_are_refused_by_name(
    city: Path, tmp_path: Path
) -> None:
    dataset = TrajectoryDataset.open(city / "dataset")
    assert dataset.groups is not None
    missing = ("<30, F", ">50, M")
    cells = [
        {"region": region, "group": name, "count": 0 if name in missing else 5}
        for region in sorted(set(dataset.people["home_district"].to_pylist()))
        for name in dataset.groups.names
    ]
    pd.DataFrame(cells).to_csv(tmp_path / "census.csv", index=False)
    options = RegionsOptions(by="home_district", composition=tmp_path / "census.csv")
    sentence = "census.csv: no region has people of group '<30, F' or '>50, M'; merge it"
    with pytest.raises(MobatlasError, match=sentence):
        build_regions(dataset.path, tmp_path / "regions", options)
    assert not (tmp_path / "regions").exists()


def test_categories_of_places_without_any_are_warned_of(
    city: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in ("visits", "people"):
        table = pq.read_table(city / "city" / f"{name}.parquet")
        remaining = [each for each in table.column_names if each != "category"]
        pq.write_table(table.select(remaining), source / f"{name}.parquet")
    prepare(source, tmp_path / "dataset", preset="small")
    warned = "no place has a category, so category and transitions can only distinguish home"
    both = ["category", "transitions"]
    build_regions(
        city / "dataset", tmp_path / "known", RegionsOptions(by="home_district", features=both)
    )
    build_regions(
        tmp_path / "dataset",
        tmp_path / "places",
        RegionsOptions(partition="demogroups", features=["poi"]),
    )
    assert warned not in caplog.text
    build_regions(
        tmp_path / "dataset", tmp_path / "real", RegionsOptions(by="home_district", features=both)
    )
    assert warned in caplog.text
    caplog.clear()
    build_regions(
        tmp_path / "dataset",
        tmp_path / "dealt",
        RegionsOptions(partition="demogroups", features=both),
    )
    assert warned in caplog.text
