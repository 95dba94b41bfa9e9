"""Spark on many partitions writes the bytes of DuckDB and explains its errors."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import ibis
import pyarrow as pa
import pyarrow.dataset as pads
import pyarrow.parquet as pq
import pytest

from bench import growth
from mobatlas import CityConfig, MobatlasError, prepare, write_city_folder
from mobatlas.data.prepare import engine
from tests.test_engines_agree import assert_same_folder

PARTS = 12


def write_parts(folder: Path, users: int, seed: int) -> int:
    """Write a city whose visits are dealt out to several files; returns the number of visits."""
    visits = int(write_city_folder(folder, CityConfig(users=users, pois=600), seed)["visits"])
    whole = pq.read_table(folder / "visits.parquet")
    (folder / "visits.parquet").unlink()
    (folder / "visits.parquet").mkdir()
    for part in range(PARTS):
        pq.write_table(
            whole.take(pa.array(range(part, visits, PARTS))),
            folder / "visits.parquet" / f"{part}.parquet",
        )
    return visits


def prepare_both(folder: Path, session: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Prepare with both engines; into how many parts Spark sorted each of its results."""
    parts = []

    class Watched(engine.SparkEngine):
        def _write(self, expression: ibis.ir.Table, name: str) -> Path:
            path = super()._write(expression, name)
            if name == "sorted":
                parts.append(
                    sum(pq.read_metadata(part).num_rows > 0 for part in path.glob("part-*.parquet"))
                )
            return path

    monkeypatch.setitem(engine.ENGINES, "spark", Watched)
    settings = {
        "spark.sql.shuffle.partitions": "7",
        "spark.sql.files.maxPartitionBytes": "1m",
        "spark.sql.adaptive.enabled": "false",  # it would join small partitions again
    }
    before = {key: session.conf.get(key) for key in settings}
    try:
        for key, value in settings.items():
            session.conf.set(key, value)
        for name in ("duckdb", "spark"):
            prepare(folder / "city", folder / name, preset="small", engine=name)
    finally:
        for key, value in before.items():
            session.conf.set(key, value)
    return parts


@pytest.mark.spark
@pytest.mark.parametrize("users", [750, pytest.param(15_000, marks=pytest.mark.slow)])
def test_many_partitions_give_the_bytes_of_duckdb(
    tmp_path: Path, spark_session: Any, monkeypatch: pytest.MonkeyPatch, users: int
) -> None:
    visits = write_parts(tmp_path / "city", users, seed=5)
    assert visits > 60 * users
    parts = prepare_both(tmp_path, spark_session, monkeypatch)
    assert parts == [7, 7]  # people, trajectories
    assert json.loads((tmp_path / "spark" / "summary.json").read_text())["windows"]["kept"] > users
    assert_same_folder(tmp_path / "duckdb", tmp_path / "spark")


@pytest.mark.spark
def test_a_session_of_the_user_is_given_back_as_it_was(tmp_path: Path, spark_session: Any) -> None:
    spark_session.conf.set("spark.sql.session.timeZone", "America/New_York")
    spark_session.conf.unset("spark.sql.legacy.parquet.nanosAsLong")
    running = engine.open_engine("spark", tmp_path / "work", "1GB")
    assert spark_session.conf.get("spark.sql.session.timeZone") == "UTC"
    running.close()
    assert spark_session.conf.get("spark.sql.session.timeZone") == "America/New_York"
    assert spark_session.conf.get("spark.sql.legacy.parquet.nanosAsLong") == "false"
    assert spark_session.range(3).count() == 3  # not stopped


@pytest.mark.spark
def test_workers_that_keep_rows_to_themselves_are_noticed(
    tmp_path: Path, spark_session: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = engine.SparkEngine(tmp_path / "work")
    rows = running._backend.sql("SELECT id FROM range(0, 100, 1, 4)")
    empty = running.stage(rows.filter(rows.id < 0), "empty")
    assert running.collect(empty).num_rows == 0
    assert running.collect(
        running.stage(rows, "rows").aggregate(n=lambda t: t.id.sum())
    ).to_pylist() == [{"n": 4950}]

    original = engine.write_frame

    def write(frame: Any, address: str) -> int:
        """As if one of four workers had a disk of its own."""
        count = original(frame, address)
        max((tmp_path / "work" / "rows.parquet").glob("part-*")).unlink()
        return count

    written = running.stage(rows, "seen")
    for part in (tmp_path / "work" / "seen.parquet").glob("part-*"):
        part.unlink()
    with pytest.raises(MobatlasError, match="Spark's workers do not share"):
        running.collect(written)
    monkeypatch.setattr(engine, "write_frame", write)
    with pytest.raises(MobatlasError, match="Spark's workers do not share"):
        running.stage(rows, "rows")
    assert pads.dataset(tmp_path / "work" / "rows.parquet").count_rows() == 75


@pytest.mark.spark
@pytest.mark.parametrize(
    ("raised", "sentence"),
    [
        (ConnectionRefusedError(), "Spark's Java process ended"),
        (
            EOFError("java.lang.OutOfMemoryError: Java heap space"),
            "Spark ran out of memory; raise memory_limit",
        ),
    ],
)
def test_an_error_of_spark_is_a_sentence(tmp_path: Path, raised: Exception, sentence: str) -> None:
    pytest.importorskip("pyspark")
    with pytest.raises(MobatlasError, match=sentence), engine.explain_spark_errors(tmp_path):
        raise raised


@pytest.mark.parametrize(
    ("limit", "heap"),
    [("2GB", "1907m"), ("1.5 gb", "1430m"), ("512MiB", "512m"), ("4GiB", "4096m")],
)
def test_a_local_session_has_the_memory_limit_as_its_heap(limit: str, heap: str) -> None:
    assert engine.java_heap(limit) == heap


def test_a_memory_limit_that_is_none() -> None:
    with pytest.raises(MobatlasError, match="memory_limit '80%': give a number and a unit"):
        engine.java_heap("80%")


@pytest.mark.spark
def test_without_java_there_is_a_sentence(tmp_path: Path) -> None:
    pytest.importorskip("pyspark")
    write_parts(tmp_path / "city", users=3, seed=0)
    command = [
        sys.executable,
        "-m",
        "mobatlas",
        "prepare",
        "city",
        "--out",
        "dataset",
        "--engine",
        "spark",
        "--quiet",
    ]
    found = subprocess.run(
        command,
        cwd=tmp_path,
        env={"PATH": "/bin:/usr/sbin", "JAVA_HOME": "/nowhere"},
        capture_output=True,
        text=True,
    )
    assert found.returncode == 2
    assert found.stderr.splitlines()[-1] == (
        "mobatlas: Spark did not start, for the reason above; it needs Java 17 or 21, "
        "on the PATH or in JAVA_HOME"
    )


@pytest.mark.parametrize(
    "place", ["hdfs://cluster/visits", "s3a:/bucket/visits.parquet", "file:///visits"]
)
def test_an_address_is_refused(tmp_path: Path, place: str) -> None:
    with pytest.raises(MobatlasError, match="is an address, not a path; mount that storage"):
        prepare(place, tmp_path / "dataset", engine="spark")
    with pytest.raises(MobatlasError, match="is an address"):
        prepare(tmp_path, place)


@pytest.mark.slow
@pytest.mark.spark
def test_growth_is_a_row_for_each_engine(tmp_path: Path) -> None:
    if shutil.which("java") is None:
        pytest.skip("Spark needs Java, and there is none here")
    pytest.importorskip("pyspark")
    duckdb, on_spark = growth.rows(tmp_path, seed=1, sizes=(20_000,), master="local[2]")
    assert duckdb["size"] == on_spark["size"]
    assert on_spark["identical"] and on_spark["differing"] == []
    assert on_spark["partitions"] > 1
    assert on_spark["ratio"] == on_spark["seconds"] / duckdb["seconds"]
    assert 0.05 < duckdb["peak_gb"] < on_spark["peak_gb"] < 5  # Java counts
    assert 0 < on_spark["start_seconds"] < on_spark["seconds"]
    assert list(tmp_path.iterdir()) == []


def test_growth_names_what_differs(tmp_path: Path) -> None:
    for name, content in (("one", "a"), ("other", "b")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "same").write_text("same")
        (tmp_path / name / "changed").write_text(content)
    (tmp_path / "other" / "more").touch()
    assert growth.differing(tmp_path / "one", tmp_path / "other") == ["changed", "more"]
