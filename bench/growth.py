"""How preparation grows: the same visits through DuckDB and through a Spark cluster on this machine, byte for byte."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from bench.speed import MEMORY_LIMIT, VISITS_PER_USER, Measured, measure
from mobatlas.config import CityConfig
from mobatlas.data.city import write_city_folder
from mobatlas.data.prepare import spark
from mobatlas.data.prepare.pipeline import prepare
from mobatlas.io.manifest import file_hash
from mobatlas.progress import SILENT, Tracker

SIZES = (1_000_000, 5_000_000, 20_000_000)
MASTER = "local-cluster[2,1,1024]"  # two workers, each a process of its own with one core and 1 GB, Spark's default
PARTS = 16  # files of visits, for the workers to share
OPTIONS = "--conf spark.sql.files.maxPartitionBytes=16m --conf spark.sql.shuffle.partitions=32"
STEPS = 3  # of a size
KILOBYTE = 1024


@dataclass(frozen=True)
class Cost:
    """What a preparation took besides time."""

    cpu_seconds: float
    partitions: int = 1  # of the visits, as they are read
    start_seconds: float = 0.0
    java_gb: float | None = 0.0  # None: cannot be known here


def rows(
    scratch: Path,
    seed: int,
    tracker: Tracker = SILENT,
    sizes: Sequence[int] = SIZES,
    master: str = MASTER,
) -> list[dict[str, Any]]:
    """Two rows of the speed table for each size, about so many visits: DuckDB, and Spark beside it."""
    found = []
    for number, visits in enumerate(sizes):
        with tempfile.TemporaryDirectory(dir=scratch) as folder:
            found += _of_size(Path(folder), visits, seed, master, tracker, number * STEPS)
    return found


def _of_size(
    folder: Path, visits: int, seed: int, master: str, tracker: Tracker, done: int
) -> list[dict[str, Any]]:
    config = CityConfig(users=max(1, round(visits / VISITS_PER_USER)), pois=9_000, districts=36)
    tracker.step(done, f"simulating {visits:,} visits")
    visits = measure(_simulate, folder / "city", config, seed).value
    tracker.step(done + 1, f"{visits:,} visits with DuckDB")
    here = measure(_with_duckdb, folder / "city", folder / "duckdb")
    tracker.step(done + 2, f"{visits:,} visits with Spark")
    there = measure(_with_spark, folder / "city", folder / "spark", master)
    differ = differing(folder / "duckdb", folder / "spark")
    on_spark = _row("prepare, Spark", visits, there) | {
        "reference": "prepare, DuckDB",
        "reference_seconds": here.seconds,
        "ratio": there.seconds / here.seconds,
        "start_seconds": there.value.start_seconds,
        "master": master,
        "partitions": there.value.partitions,
        "identical": not differ,
        "differing": differ,
    }
    return [_row("prepare, DuckDB", visits, here), on_spark]


def _row(what: str, visits: int, measured: Measured) -> dict[str, Any]:
    cost: Cost = measured.value
    return {
        "what": what,
        "size": f"{visits:,} visits",
        "seconds": measured.seconds,
        "cpu_seconds": cost.cpu_seconds,
        "visits_per_second": round(visits / measured.seconds),
        "peak_gb": None if cost.java_gb is None else measured.peak_gb + cost.java_gb,
    }


def differing(one: Path, other: Path) -> list[str]:
    """The names of files that are not in both folders with the same bytes."""
    hashes = [{path.name: file_hash(path) for path in folder.iterdir()} for folder in (one, other)]
    names = sorted(hashes[0].keys() | hashes[1].keys())
    return [name for name in names if hashes[0].get(name) != hashes[1].get(name)]


def _simulate(folder: Path, config: CityConfig, seed: int) -> int:
    """A city whose visits are a folder of parts, as Spark writes them."""
    visits = int(write_city_folder(folder, config, seed)["visits"])
    whole = folder / "whole.parquet"
    (folder / "visits.parquet").rename(whole)
    (folder / "visits.parquet").mkdir()
    rows_of_part = -(-visits // PARTS)
    for number, batch in enumerate(pq.ParquetFile(whole).iter_batches(rows_of_part)):
        with pq.ParquetWriter(
            folder / "visits.parquet" / f"part-{number:05}.parquet", batch.schema
        ) as writer:
            writer.write_batch(batch)
    whole.unlink()
    return visits


def _with_duckdb(source: Path, out: Path) -> Cost:
    prepare(source, out, preset="paper", values={"memory_limit": MEMORY_LIMIT})
    return Cost(time.process_time())


def _with_spark(source: Path, out: Path, master: str) -> Cost:
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    os.environ["PYSPARK_SUBMIT_ARGS"] = f"--master {master} {OPTIONS} pyspark-shell"
    home = out.with_name("spark-home")
    if master.startswith("local-cluster"):
        os.environ["SPARK_HOME"] = str(_own_home(home))
    start = time.perf_counter()
    session, _ = spark.open_session(MEMORY_LIMIT)
    started = time.perf_counter() - start
    try:
        partitions = session.read.parquet(str(source / "visits.parquet")).rdd.getNumPartitions()
        prepare(source, out, preset="paper", engine="spark")
        java_gb, cpu_seconds = _taken_by_children()
    finally:
        spark.stop_session(session)
        shutil.rmtree(home, ignore_errors=True)
    return Cost(time.process_time() + cpu_seconds, int(partitions), started, java_gb)


def _own_home(home: Path) -> Path:
    """Spark as it is installed, but its workers keep their files here and not beside it."""
    import pyspark

    home.mkdir()
    for entry in Path(pyspark.__file__).parent.iterdir():
        (home / entry.name).symlink_to(entry)
    return home


def _taken_by_children() -> tuple[float | None, float]:
    """Memory and processor time of the processes below this one; each at its own peak, so an upper bound."""
    processes = {int(path.name): _stat(path) for path in Path("/proc").glob("[0-9]*")}
    if not processes:
        return None, 0.0
    below, waiting = [], [os.getpid()]
    while waiting:
        parent = waiting.pop()
        children = [pid for pid, stat in processes.items() if stat and int(stat[1]) == parent]
        below += children
        waiting += children
    ticks = sum(
        int(ticks) for pid in below for ticks in processes[pid][11:15]
    )  # user, system, and those that ended
    return sum(map(_peak_kilobytes, below)) * KILOBYTE / 1e9, ticks / os.sysconf("SC_CLK_TCK")


def _stat(process: Path) -> list[str]:
    """What /proc says of a process after its name; nothing if it ended meanwhile."""
    try:
        return (process / "stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return []


def _peak_kilobytes(pid: int) -> int:
    try:
        status = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in status if line.startswith("VmHWM:"))
