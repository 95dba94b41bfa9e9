"""Where the Ibis expressions run: DuckDB in this process, or any Spark session. Both stage their tables as Parquet."""

from __future__ import annotations

import csv
import gzip
import hashlib
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import duckdb
import ibis
import pyarrow as pa
import pyarrow.dataset as pads
import pyarrow.parquet as pq
from ibis import ir

from mobatlas.errors import MobatlasError

ENGINES = ("duckdb", "spark")
BATCH_ROWS = 65_536
LONGEST_HEADER = 131_072  # characters; what has no end of line before is no table


class Engine(Protocol):
    """A place to evaluate expressions in bounded memory."""

    name: str
    work: Path

    def read(self, path: Path) -> ir.Table:
        """A Parquet file or folder, or a CSV file (every column text)."""
        ...

    def stage(self, expression: ir.Table, name: str) -> ir.Table:
        """Evaluate once, keep the rows on disk, and go on from there."""
        ...

    def collect(self, expression: ir.Table) -> pa.Table:
        """A small result."""
        ...

    def sorted_batches(self, expression: ir.Table, by: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """A large result in order, a batch at a time."""
        ...

    def close(self) -> None:
        """Give back what the engine holds."""
        ...


class DuckDBEngine:
    """DuckDB embedded; spills into the work folder beyond its memory limit."""

    name = "duckdb"

    def __init__(self, work: Path, memory_limit: str = "2GB") -> None:
        self.work = work
        spill = work / "spill"
        spill.mkdir(parents=True, exist_ok=True)
        self._backend = ibis.duckdb.connect(
            temp_directory=str(spill), preserve_insertion_order=False, memory_limit=memory_limit
        )
        self._backend.con.execute("SET enable_progress_bar = false")  # ours is enough

    def read(self, path: Path) -> ir.Table:
        if path.is_dir():
            return self._backend.read_parquet(str(path / "**" / "*.parquet"), hive_partitioning=False)
        return self._backend.read_parquet(str(parquet_of(path, self.work)))

    def stage(self, expression: ir.Table, name: str) -> ir.Table:
        path = self.work / f"{name}.parquet"
        self._backend.to_parquet(expression, path, compression="lz4_raw")
        return self._backend.read_parquet(str(path))

    def collect(self, expression: ir.Table) -> pa.Table:
        return self._backend.to_pyarrow(expression)

    def sorted_batches(self, expression: ir.Table, by: Sequence[str]) -> Iterator[pa.RecordBatch]:
        # not `to_pyarrow_batches`: Ibis 12 calls a method that DuckDB 2 no longer has
        query = str(self._backend.compile(expression.order_by(list(by))))
        yield from self._backend.con.sql(query).to_arrow_reader(BATCH_ROWS)

    def close(self) -> None:
        self._backend.disconnect()


class SparkEngine:
    """A Spark session: local mode by default, a cluster through the usual Spark configuration (spark-submit, SPARK_*)."""

    name = "spark"

    def __init__(self, work: Path) -> None:
        try:
            from pyspark.sql import SparkSession
        except ImportError:
            raise MobatlasError("--engine spark needs the extra: pip install 'mobatlas[spark]'") from None
        self.work = work
        work.mkdir(parents=True, exist_ok=True)
        active = SparkSession.getActiveSession()
        builder = SparkSession.builder.appName("mobatlas").config("spark.ui.showConsoleProgress", "false")
        self._session = active or builder.getOrCreate()
        self._owned = active is None
        # Naive local times must not be moved by the session's zone; nanosecond files are read as integers and rescaled.
        self._session.conf.set("spark.sql.session.timeZone", "UTC")
        self._session.conf.set("spark.sql.legacy.parquet.nanosAsLong", "true")
        self._backend = ibis.pyspark.connect(self._session)

    def read(self, path: Path) -> ir.Table:
        path = parquet_of(path, self.work)
        table = self._backend.read_parquet(_local(path), recursiveFileLookup="true")
        nanoseconds = {
            field.name: (table[field.name] // 1_000_000_000).as_timestamp("s")
            for field in parquet_schema(path)
            if pa.types.is_timestamp(field.type) and field.type.unit == "ns" and table[field.name].type().is_integer()
        }
        return table.mutate(**nanoseconds) if nanoseconds else table

    def stage(self, expression: ir.Table, name: str) -> ir.Table:
        path = self.work / f"{name}.parquet"
        self._backend.to_parquet(expression, _local(path), mode="overwrite")
        return self._backend.read_parquet(_local(path))

    def collect(self, expression: ir.Table) -> pa.Table:
        return self._backend.to_pyarrow(expression)

    def sorted_batches(self, expression: ir.Table, by: Sequence[str]) -> Iterator[pa.RecordBatch]:
        path = self.work / "sorted.parquet"
        self._backend.to_parquet(expression.order_by(list(by)), _local(path), mode="overwrite")
        # orderBy partitions by range, and the parts are numbered in that order
        for part in sorted(path.glob("part-*.parquet")):
            yield from pq.ParquetFile(part).iter_batches(BATCH_ROWS)

    def close(self) -> None:
        if self._owned:
            self._session.stop()


def open_engine(name: str, work: Path, memory_limit: str = "2GB") -> Engine:
    """The engine of that name, working in that folder."""
    if name == "duckdb":
        try:
            return DuckDBEngine(work, memory_limit)
        except duckdb.Error as error:
            raise MobatlasError(f"memory_limit '{memory_limit}': DuckDB refused it ({error})") from None
    if name == "spark":
        return SparkEngine(work)
    raise MobatlasError(f"--engine {name} does not exist (known: {', '.join(ENGINES)})")


def _local(path: Path) -> str:
    """A path that Spark does not look for on the cluster's own file system."""
    return f"file://{path.absolute()}"


def is_csv(path: Path) -> bool:
    """CSV by name, compressed or not."""
    return path.name.lower().endswith((".csv", ".csv.gz", ".txt", ".tsv"))


def parquet_of(path: Path, work: Path) -> Path:
    """The path itself, or for CSV a copy as Parquet, every column text: one parser, whatever the engine."""
    if path.is_dir() or not is_csv(path):
        return path
    names, delimiter = csv_header(path)
    digest = hashlib.sha256(str(path.absolute()).encode()).hexdigest()[:12]
    copy = work / f"{path.name.split('.')[0]}-{digest}.parquet"
    columns = ", ".join(f"{literal(name)}: 'VARCHAR'" for name in names)
    options = (
        f"auto_detect=false, header=true, delim={literal(delimiter)}, quote='\"', escape='\"', columns={{{columns}}}"
    )
    try:
        with duckdb.connect(config={"temp_directory": str(work / "spill"), "memory_limit": "1GB"}) as connection:
            connection.execute("SET enable_progress_bar = false")
            connection.execute(
                f"COPY (SELECT * FROM read_csv({literal(path)}, {options})) TO {literal(copy)} (FORMAT parquet)"
            )
    except duckdb.Error as error:
        said = " ".join(str(error).split("Possible")[0].split())[:200]
        raise MobatlasError(f"{path}: not a readable CSV file in UTF-8: {said}") from None
    return copy


def csv_header(path: Path) -> tuple[list[str], str]:
    """The column names of a CSV file and what separates them."""
    first = first_line(path)
    delimiter = max(",;\t|", key=first.count)
    names = next(csv.reader([first.rstrip("\r\n")], delimiter=delimiter), [])
    if not any(name.strip() for name in names):
        raise MobatlasError(f"{path}: the first line names no columns")
    if len(set(names)) != len(names):
        raise MobatlasError(f"{path}: two columns have the same name in the first line")
    return names, delimiter


def first_line(path: Path) -> str:
    """The first line of a text file, compressed or not; refused if it does not end."""
    open_text = gzip.open if path.suffix == ".gz" else Path.open
    try:
        with open_text(path, "rt", encoding="utf-8-sig") as lines:
            first = str(lines.readline(LONGEST_HEADER))
    except (OSError, EOFError, UnicodeError, zlib.error) as error:
        raise MobatlasError(f"{path}: not a readable CSV file in UTF-8 ({error})") from None
    if len(first) >= LONGEST_HEADER:
        raise MobatlasError(f"{path}: the first line names no columns, it is longer than {LONGEST_HEADER:,} characters")
    return first


def literal(value: object) -> str:
    """A value as SQL text."""
    return "'" + str(value).replace("'", "''") + "'"


def parquet_schema(path: Path) -> pa.Schema:
    """The Arrow schema of a Parquet file or folder."""
    try:
        return pads.dataset(path, format="parquet").schema if path.is_dir() else pq.read_schema(path)
    except (pa.ArrowInvalid, OSError) as error:
        raise MobatlasError(
            f"{path}: not a readable Parquet file; give .parquet or .csv ({str(error).splitlines()[0]})"
        ) from None


def one(engine: Engine, expression: ir.Table) -> dict[str, Any]:
    """The single row of an aggregate."""
    row: dict[str, Any] = engine.collect(expression).to_pylist()[0]
    return row
