"""Growth of preparation: DuckDB and a Spark cluster on this machine write the same bytes."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq

from bench.measure import MEMORY_LIMIT, Measured, Row, city_of, measure
from mobatlas.config import CityConfig
from mobatlas.data.city import write_city_folder
from mobatlas.data.prepare.engine import open_spark_session, stop_spark_session
from mobatlas.data.prepare.pipeline import prepare
from mobatlas.io.manifest import file_hash
from mobatlas.progress import SILENT, Tracker

SIZES = (1_000_000, 5_000_000, 20_000_000)  # visits, about
MASTER = "local-cluster[2,1,1024]"  # two worker processes with one core and 1 GB each
PARTS = 16  # files of visits, for the workers to share
OPTIONS = "--conf spark.sql.files.maxPartitionBytes=16m --conf spark.sql.shuffle.partitions=32"
STEPS = 3  # of the progress bar, for each size
KILOBYTE = 1024


@dataclass(frozen=True)
class Cost:
    """The resources of a preparation besides time."""

    cpu_seconds: float
    partitions: int = 1  # of the visits, as they are read
    start_seconds: float = 0.0
    java_gb: float | None = 0.0  # None: unknown on this system


def rows(
    scratch: Path,
    seed: int,
    tracker: Tracker = SILENT,
    sizes: Sequence[int] = SIZES,
    master: str = MASTER,
) -> list[Row]:
    """Return two rows for each size: DuckDB, and Spark with DuckDB as its reference."""
    table: list[Row] = []
    for number, visits in enumerate(sizes):
        done = number * STEPS
        with tempfile.TemporaryDirectory(dir=scratch) as name:
            folder = Path(name)
            tracker.step(done, f"simulating {visits:,} visits")
            exact = measure(_simulate, folder / "city", city_of(visits), seed).value
            tracker.step(done + 1, f"{exact:,} visits with DuckDB")
            on_duckdb = measure(_with_duckdb, folder / "city", folder / "duckdb")
            tracker.step(done + 2, f"{exact:,} visits with Spark")
            on_spark = measure(_with_spark, folder / "city", folder / "spark", master)
            different = differing(folder / "duckdb", folder / "spark")
        table.append(_row("prepare, DuckDB", exact, on_duckdb))
        table.append(
            _row("prepare, Spark", exact, on_spark)
            | {
                "reference": "prepare, DuckDB",
                "reference_seconds": on_duckdb.seconds,
                "ratio": on_spark.seconds / on_duckdb.seconds,
                "start_seconds": on_spark.value.start_seconds,
                "master": master,
                "partitions": on_spark.value.partitions,
                "identical": not different,
                "differing": different,
            }
        )
    return table


def _row(task: str, visits: int, measured: Measured) -> Row:
    cost: Cost = measured.value
    return {
        "task": task,
        "size": f"{visits:,} visits",
        "seconds": measured.seconds,
        "cpu_seconds": cost.cpu_seconds,
        "visits_per_second": round(visits / measured.seconds),
        "peak_gb": None if cost.java_gb is None else measured.peak_gb + cost.java_gb,
    }


def differing(one: Path, other: Path) -> list[str]:
    """Return the names of files that do not have the same bytes in both folders."""
    hashes = [{path.name: file_hash(path) for path in folder.iterdir()} for folder in (one, other)]
    names = sorted(hashes[0].keys() | hashes[1].keys())
    return [name for name in names if hashes[0].get(name) != hashes[1].get(name)]


def _simulate(folder: Path, config: CityConfig, seed: int) -> int:
    """Simulate a city and split its visits into a folder of parts, as Spark writes them."""
    visits = int(write_city_folder(folder, config, seed)["visits"])
    one_file = folder / "one-file.parquet"
    (folder / "visits.parquet").rename(one_file)
    (folder / "visits.parquet").mkdir()
    rows_of_part = -(-visits // PARTS)
    for number, batch in enumerate(pq.ParquetFile(one_file).iter_batches(rows_of_part)):
        part = folder / "visits.parquet" / f"part-{number:05}.parquet"
        with pq.ParquetWriter(part, batch.schema) as writer:
            writer.write_batch(batch)
    one_file.unlink()
    return visits


def _with_duckdb(source: Path, out: Path) -> Cost:
    prepare(
        source,
        out,
        preset="paper",
        values={"memory_limit": MEMORY_LIMIT, "min_people_per_place": 0},
    )
    return Cost(time.process_time())


def _with_spark(source: Path, out: Path, master: str) -> Cost:
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    os.environ["PYSPARK_SUBMIT_ARGS"] = f"--master {master} {OPTIONS} pyspark-shell"
    home = out.with_name("spark-home")
    if master.startswith("local-cluster"):
        os.environ["SPARK_HOME"] = str(_spark_home(home))
    start = time.perf_counter()
    session, _ = open_spark_session(MEMORY_LIMIT)
    started = time.perf_counter() - start
    try:
        partitions = session.read.parquet(str(source / "visits.parquet")).rdd.getNumPartitions()
        prepare(source, out, preset="paper", engine="spark", values={"min_people_per_place": 0})
        java_gb, cpu_seconds = _usage_of_children()
    finally:
        stop_spark_session(session)
        shutil.rmtree(home, ignore_errors=True)
    return Cost(time.process_time() + cpu_seconds, int(partitions), started, java_gb)


def _spark_home(home: Path) -> Path:
    """Link the installed Spark into a folder where its workers may write."""
    import pyspark

    home.mkdir()
    for entry in Path(pyspark.__file__).parent.iterdir():
        (home / entry.name).symlink_to(entry)
    return home


def _usage_of_children() -> tuple[float | None, float]:
    """Return memory in GB and CPU seconds of the processes below this one.

    Memory is the sum of their peaks, an upper bound. It is None where there is no /proc.
    """
    processes = {int(path.name): _stat(path) for path in Path("/proc").glob("[0-9]*")}
    if not processes:
        return None, 0.0
    below: list[int] = []
    waiting = [os.getpid()]
    while waiting:
        parent = waiting.pop()
        children = [pid for pid, stat in processes.items() if stat and int(stat[1]) == parent]
        below += children
        waiting += children
    # Fields 11 to 14: user and system time, of the process and of its children that ended.
    ticks = sum(int(ticks) for pid in below for ticks in processes[pid][11:15])
    memory = sum(map(_peak_kilobytes, below)) * KILOBYTE / 1e9
    return memory, ticks / os.sysconf("SC_CLK_TCK")


def _stat(process: Path) -> list[str]:
    """Read the fields after the name in /proc/PID/stat; none if the process ended meanwhile."""
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
