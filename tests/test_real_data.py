"""The real data of MOBATLAS_DATA is prepared; expected figures are counted with plain SQL."""

from __future__ import annotations

from pathlib import Path

import duckdb
import numpy as np

from bench.survey import DIARY
from mobatlas import TrajectoryDataset, prepare
from mobatlas.data.types import HOME


def count(query: str) -> int:
    return int(duckdb.execute(query).fetchall()[0][0])


def test_santiago_prepares_with_a_one_day_window(data_folder: Path, tmp_path: Path) -> None:
    source = data_folder / "santiago"
    summary = prepare(source, tmp_path / "dataset", values=DIARY)
    dataset = TrajectoryDataset.open(tmp_path / "dataset")
    visits = f"'{source / 'visits.parquet'}'"
    assert summary.rows.rows == count(f"SELECT count(*) FROM {visits}") == 157_441
    assert dataset.people.num_rows == count(f"SELECT count(DISTINCT user_id) FROM {visits}")
    nights = f"SELECT DISTINCT user_id, arrival::DATE FROM {visits} UNION "
    nights += (
        f"SELECT user_id, departure::DATE FROM {visits} "
        "WHERE departure > date_trunc('day', departure)"
    )
    assert summary.windows.kept == count(f"SELECT count(*) FROM ({nights})")
    assert dataset.groups is not None
    assert dataset.groups.as_dict() == {
        "age_group": ["00-24", "25-44", "45-64", "65+"],
        "gender": ["M", "F"],
    }
    assert dataset.region_columns == ("home_zone", "home_comuna")
    first = np.array([dataset.trajectory(index)[0] for index in range(0, len(dataset), 50)])
    assert (first == HOME).mean() > 0.9


def test_foursquare_nyc_prepares_as_check_ins(data_folder: Path, tmp_path: Path) -> None:
    source = data_folder / "foursquare_nyc" / "visits.parquet"
    values = {"quality": {"min_coverage": 0, "min_tokens": 4}, "anchors": {"require_both": False}}
    summary = prepare(source, tmp_path / "dataset", values=values)
    assert summary.users == count(f"SELECT count(DISTINCT user_id) FROM '{source}'") == 1_083
    assert summary.inferred == ("home", "work")
    dataset = TrajectoryDataset.open(tmp_path / "dataset")
    assert dataset.lengths.min() >= 4
    assert len(dataset) == summary.windows.kept > 5_000
    assert dataset.labels() is None


def test_geolife_prepares_from_raw_gps(data_folder: Path, tmp_path: Path) -> None:
    values = {"window": {"days": 1, "stride": 1}}
    summary = prepare(
        data_folder / "geolife", tmp_path / "dataset", format="geolife", values=values
    )
    dataset = TrajectoryDataset.open(tmp_path / "dataset")
    people = sorted(path.name for path in (data_folder / "geolife").iterdir() if path.is_dir())
    assert set(dataset.people["user_id"].to_pylist()) <= set(people)
    assert summary.windows.kept > 50
    known = dataset.vocabulary.coordinates[7:]
    assert (np.abs(np.median(known, axis=0) - [39.98, 116.33]) < 0.1).all()  # Haidian, Beijing
