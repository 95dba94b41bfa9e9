"""Where the Ibis expressions run: DuckDB in this process, or any Spark session. Both stage their tables as Parquet."""

from __future__ import annotations

import csv
import gzip
import hashlib
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import duckdb
import ibis
import pyarrow as pa
import pyarrow.dataset as pads
import pyarrow.parquet as pq
from ibis import ir

from mobatlas.data.prepare import spark
from mobatlas.errors import MobatlasError
from mobatlas.io.tables import refuse_duplicate_columns

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
        self._read: dict[Path, str] = {}  # the files of the user, and what DuckDB calls them

    def read(self, path: Path) -> ir.Table:
        several = path.is_dir()
        found = path / "**" / "*.parquet" if several else parquet_of(path, self.work)
        self._read[path] = str(found)
        with self._blaming():
            return self._backend.read_parquet(
                str(found), **({"hive_partitioning": False} if several else {})
            )

    def stage(self, expression: ir.Table, name: str) -> ir.Table:
        path = self.work / f"{name}.parquet"
        with self._blaming():
            self._backend.to_parquet(expression, path, compression="lz4_raw")
        return self._backend.read_parquet(str(path))

    def collect(self, expression: ir.Table) -> pa.Table:
        with self._blaming():
            return self._backend.to_pyarrow(expression)

    def sorted_batches(self, expression: ir.Table, by: Sequence[str]) -> Iterator[pa.RecordBatch]:
        # not `to_pyarrow_batches`: Ibis 12 calls a method that DuckDB 2 no longer has
        query = str(self._backend.compile(expression.order_by(list(by))))
        yield from self._backend.con.sql(query).to_arrow_reader(BATCH_ROWS)

    @contextmanager
    def _blaming(self) -> Iterator[None]:
        """An error of a query is that of the first file which cannot be read to its end, if there is one."""
        try:
            yield
        except (duckdb.OutOfMemoryException, duckdb.InterruptException):
            raise
        except duckdb.Error:
            for path, found in self._read.items():
                _read_whole(path, found)
            raise

    def close(self) -> None:
        self._backend.disconnect()


class SparkEngine:
    """A Spark session: local by default, on a cluster as Spark is configured (spark-submit, SPARK_CONF_DIR)."""

    name = "spark"

    def __init__(self, work: Path, memory_limit: str = "2GB") -> None:
        self.work = work
        work.mkdir(parents=True, exist_ok=True)
        self._session, self._owned = spark.open_session(memory_limit)
        self._before = {key: self._session.conf.get(key, None) for key in spark.SETTINGS}
        for key, value in spark.SETTINGS.items():
            self._session.conf.set(key, value)
        self._backend = ibis.pyspark.connect(self._session)

    def read(self, path: Path) -> ir.Table:
        path = parquet_of(path, self.work)
        with spark.in_sentences(self.work):
            table = self._backend.read_parquet(_local(path), recursiveFileLookup="true")
        nanoseconds = {
            field.name: (table[field.name] // 1_000_000_000).as_timestamp("s")
            for field in parquet_schema(path)
            if pa.types.is_timestamp(field.type)
            and field.type.unit == "ns"
            and table[field.name].type().is_integer()
        }
        return table.mutate(**nanoseconds) if nanoseconds else table

    def stage(self, expression: ir.Table, name: str) -> ir.Table:
        return self._backend.read_parquet(_local(self._write(expression, name)))

    def collect(self, expression: ir.Table) -> pa.Table:
        with spark.in_sentences(self.work):
            found = self._frame(expression).toArrow()
        return found.cast(expression.schema().to_pyarrow())

    def sorted_batches(self, expression: ir.Table, by: Sequence[str]) -> Iterator[pa.RecordBatch]:
        path = self._write(expression.order_by(list(by)), "sorted")
        # orderBy partitions by range, and the parts are numbered in that order
        for part in sorted(path.glob("part-*.parquet")):
            yield from pq.ParquetFile(part).iter_batches(BATCH_ROWS)

    def close(self) -> None:
        if self._owned:
            spark.stop_session(self._session)
            return
        for key, value in self._before.items():
            self._session.conf.unset(key) if value is None else self._session.conf.set(key, value)

    def _frame(self, expression: ir.Table) -> Any:
        return self._session.sql(str(self._backend.compile(expression)))

    def _write(self, expression: ir.Table, name: str) -> Path:
        """The rows in Parquet, all of them: workers with disks of their own would leave theirs there."""
        path = self.work / f"{name}.parquet"
        with spark.in_sentences(self.work):
            written = spark.write(self._frame(expression), _local(path))
        if pads.dataset(path, format="parquet").count_rows() != written:
            raise MobatlasError(spark.not_shared(self.work))
        return path


def open_engine(name: str, work: Path, memory_limit: str = "2GB") -> Engine:
    """The engine of that name, working in that folder."""
    if name == "duckdb":
        try:
            return DuckDBEngine(work, memory_limit)
        except duckdb.Error as error:
            raise MobatlasError(
                f"memory_limit '{memory_limit}': DuckDB refused it ({error})"
            ) from None
    if name == "spark":
        return SparkEngine(work, memory_limit)
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
    options = f"auto_detect=false, header=true, delim={literal(delimiter)}, quote='\"', escape='\"', columns={{{columns}}}"
    try:
        with duckdb.connect(
            config={"temp_directory": str(work / "spill"), "memory_limit": "1GB"}
        ) as connection:
            connection.execute("SET enable_progress_bar = false")
            connection.execute(
                f"COPY (SELECT * FROM read_csv({literal(path)}, {options})) TO {literal(copy)} (FORMAT parquet)"
            )
    except duckdb.Error as error:
        raise MobatlasError(
            f"{path}: not a readable CSV file in UTF-8: {_first_words(error)}"
        ) from None
    return copy


def _read_whole(path: Path, found: str) -> None:
    """Refuse a path that DuckDB, which calls it by another name, does not read to its end."""
    try:
        with duckdb.connect() as connection:  # that of a query that failed may be of no more use
            connection.execute(
                f"SELECT max(hash(COLUMNS(*))) FROM read_parquet({literal(found)})"
            ).fetchall()
    except duckdb.Error as error:
        raise MobatlasError(f"{path}: is damaged, or not Parquet ({_first_words(error)})") from None


def _first_words(error: duckdb.Error) -> str:
    return " ".join(str(error).split("Possible")[0].split())[:200]


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
        raise MobatlasError(
            f"{path}: the first line names no columns, it is longer than {LONGEST_HEADER:,} characters"
        )
    return first


def literal(value: object) -> str:
    """A value as SQL text."""
    return "'" + str(value).replace("'", "''") + "'"


def parquet_schema(path: Path) -> pa.Schema:
    """The Arrow schema of a Parquet file or folder."""
    try:
        schema = (
            pads.dataset(path, format="parquet").schema if path.is_dir() else pq.read_schema(path)
        )
    except (pa.ArrowInvalid, OSError) as error:
        raise MobatlasError(
            f"{path}: not a readable Parquet file; give .parquet or .csv ({str(error).splitlines()[0]})"
        ) from None
    refuse_duplicate_columns(str(path), schema.names)
    return schema


def one(engine: Engine, expression: ir.Table) -> dict[str, Any]:
    """The single row of an aggregate."""
    row: dict[str, Any] = engine.collect(expression).to_pylist()[0]
    return row
