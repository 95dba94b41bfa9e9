"""DuckDB, Spark and a slow second implementation give the same trajectories."""

from __future__ import annotations

import json
import shutil
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from mobatlas import CityConfig, prepare, write_city_folder
from mobatlas.config import SplitConfig
from mobatlas.data.dataset import split_by_hash
from tests.logs import VISITS, most_visited, slow_preparation

VALUES: dict[str, Any] = {
    "window": {"days": 5, "stride": 2},
    "quality": {"min_coverage": 0.05},
    "anchors": {"infer": "never", "require_both": False},
    "vocabulary_size": 3,
}
START = datetime(2024, 3, 8)  # two days before the clocks change in New York
PLACES = ("home", "work", "p1", "p2", "p3", "p4", "p5")

# Times fall on a coarse grid, so that ties, midnights, overlaps and repeated rows happen often.
moments = st.integers(0, 9 * 24).map(lambda quarter: START + timedelta(hours=quarter))
stays = st.one_of(
    st.none(),
    st.integers(0, 6).map(lambda n: timedelta(hours=n)),
    st.integers(1, 5).map(lambda n: timedelta(hours=12 * n)),
    st.integers(1, 3 * 86_400).map(lambda n: timedelta(seconds=n)),
)


@st.composite
def visit_rows(draw: st.DrawFn, user: str) -> dict[str, Any]:
    arrival = draw(moments)
    stay = draw(stays)
    place = draw(st.sampled_from(PLACES))
    far = draw(st.integers(0, 30)) == 0
    return {
        "user_id": user,
        "poi_id": place,
        "lat": 49.5 if far else 40.0,  # 1,056 km away: an unreliable day
        "lon": -74.0,
        "category": place[0],
        "arrival": arrival,
        "departure": None if stay is None else arrival + stay,
        "is_home": place == "home",
        "is_work": place == "work",
    }


@st.composite
def logs(draw: st.DrawFn, people: int) -> list[dict[str, Any]]:
    rows = []
    for number in range(people):
        own = draw(st.lists(visit_rows(f"person {number}"), min_size=1, max_size=14))
        rows += own + own[: draw(st.integers(0, 2))]  # some rows twice
    return rows


def write_log(folder: Path, rows: list[dict[str, Any]]) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(rows, VISITS), folder / "visits.parquet")
    return folder


def read_dataset(folder: Path) -> dict[tuple[str, int], list[tuple[str, datetime, datetime]]]:
    vocabulary = pq.read_table(folder / "vocabulary.parquet")
    names = dict(
        zip(vocabulary["token"].to_pylist(), vocabulary["poi_id"].to_pylist(), strict=True)
    )
    found: dict[tuple[str, int], list[tuple[str, datetime, datetime]]] = {}
    for row in pq.read_table(folder / "trajectories.parquet").to_pylist():
        token = (names[row["token"]], row["arrival"], row["departure"])
        found.setdefault((row["user_id"], row["window"]), []).append(token)
    return found


def expected(
    rows: list[dict[str, Any]],
) -> dict[tuple[str, int], list[tuple[str, datetime, datetime]]]:
    users = sorted({row["user_id"] for row in rows})
    train = {
        user
        for user, split in zip(users, split_by_hash(users, SplitConfig()), strict=True)
        if split == 0
    }
    vocabulary = most_visited(rows, train, 3)
    return slow_preparation(rows, days=5, stride=2, min_coverage=0.05, vocabulary=vocabulary)


def assert_same_folder(one: Path, other: Path) -> None:
    names = sorted(path.name for path in one.iterdir())
    assert names == sorted(path.name for path in other.iterdir())
    for name in names:
        assert (one / name).read_bytes() == (other / name).read_bytes(), name


@settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(rows=logs(people=3))
def test_duckdb_agrees_with_the_definitions_on_any_log(
    tmp_path: Path, rows: list[dict[str, Any]]
) -> None:
    wanted = expected(rows)
    out = tmp_path / "dataset"
    source = write_log(tmp_path / "raw", rows)
    if wanted:
        prepare(source, out, values=VALUES, overwrite=True)
        assert read_dataset(out) == wanted
    else:
        with pytest.raises(Exception, match="no window passed"):
            prepare(source, out, values=VALUES, overwrite=True)


@pytest.mark.spark
@settings(
    max_examples=3, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
)
@given(rows=logs(people=25))
def test_spark_writes_the_same_bytes_as_duckdb_on_any_log(
    tmp_path: Path, spark_session: Any, rows: list[dict[str, Any]]
) -> None:
    at_home = {
        "user_id": "stays in",
        "poi_id": "home",
        "lat": 40.0,
        "lon": -74.0,
        "category": "h",
        "is_work": False,
    }
    rows = [
        *rows,
        at_home | {"arrival": START, "departure": START + timedelta(days=9), "is_home": True},
    ]
    source = write_log(tmp_path / "raw", rows)
    for engine in ("duckdb", "spark"):
        prepare(source, tmp_path / engine, values=VALUES, engine=engine, overwrite=True)
    assert read_dataset(tmp_path / "spark") == expected(rows)
    assert_same_folder(tmp_path / "duckdb", tmp_path / "spark")


@pytest.mark.spark
def test_spark_writes_the_same_bytes_as_duckdb_on_the_simulated_city(
    tmp_path: Path, spark_session: Any
) -> None:
    write_city_folder(tmp_path / "city", CityConfig(users=150, days=14), seed=3)
    for engine in ("duckdb", "spark"):
        rare = {"min_people_per_place": 10}
        prepare(tmp_path / "city", tmp_path / engine, preset="small", engine=engine, values=rare)
    summary = json.loads((tmp_path / "spark" / "summary.json").read_text())
    assert summary["windows"]["kept"] > 300 and summary["rare_places"]["places"] > 0
    assert_same_folder(tmp_path / "duckdb", tmp_path / "spark")


@pytest.mark.spark
def test_spark_infers_the_same_anchors_from_csv_check_ins(
    tmp_path: Path, spark_session: Any
) -> None:
    """CSV, no departures, no flags, times as text, quoted commas: every conversion of readers."""
    lines = ["user_id,poi_id,lat,lon,arrival"]
    for day in range(4, 12):
        lines += [
            f'"x, y",flat,40.1,-74.1,2024-03-{day:02d} 23:00:00',
            f'"x, y",office,40.2,-74.2,2024-03-{day:02d}T10:30',
        ]
        lines += [
            f"verve,villa,40.1,-74.1,2024-03-{day:02d} 02:00:00.75",
            f"verve,,40.1,-74.1,2024-03-{day:02d}",
        ]
    source = tmp_path / "visits.csv"
    source.write_text("\n".join(lines) + "\n")
    values = {
        "window": {"days": 2, "stride": 2},
        "quality": {"min_coverage": 0},
        "anchors": {"require_both": False},
    }
    for engine in ("duckdb", "spark"):
        summary = prepare(source, tmp_path / engine, values=values, engine=engine)
        assert summary.rows.not_poi == 8
        assert summary.inferred == ("home", "work")
    assert_same_folder(tmp_path / "duckdb", tmp_path / "spark")
    tokens = pq.read_table(tmp_path / "spark" / "trajectories.parquet").to_pylist()
    assert [row["token"] for row in tokens if row["user_id"] == "x, y"][:4] == [5, 4, 5, 4]


@pytest.mark.spark
def test_spark_reads_nanosecond_timestamps(tmp_path: Path, spark_session: Any) -> None:
    table = pa.table(
        {
            "user_id": ["a"],
            "poi_id": ["p"],
            "lat": [1.0],
            "lon": [2.0],
            "arrival": pa.array([datetime(2024, 3, 10, 2, 30)], pa.timestamp("ns")),
        }
    )
    pq.write_table(table, tmp_path / "visits.parquet")
    values = {
        "window": {"days": 1, "stride": 1},
        "quality": {"min_coverage": 0},
        "anchors": {"require_both": False},
    }
    for engine in ("duckdb", "spark"):
        prepare(tmp_path / "visits.parquet", tmp_path / engine, values=values, engine=engine)
    assert_same_folder(tmp_path / "duckdb", tmp_path / "spark")
