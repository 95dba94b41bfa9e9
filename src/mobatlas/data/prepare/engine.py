"""Engines for Ibis expressions: DuckDB in this process, or a Spark session; both stage Parquet."""

import os
import re
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import duckdb
import ibis
import pyarrow as pa
import pyarrow.dataset as pads
import pyarrow.parquet as pq
from ibis import ir

from mobatlas.data.prepare.tables import as_parquet, parquet_schema, refuse_damaged
from mobatlas.errors import MobatlasError

BATCH_ROWS = 65_536
ZONED = "timestamp('UTC')"
# Spark must not shift naive local times by the session's zone, and reads nanoseconds as integers.
SPARK_SETTINGS = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.legacy.parquet.nanosAsLong": "true",
}
MORE_MEMORY = "raise memory_limit, or on a cluster --driver-memory and --executor-memory"
MISSING_FILE = r"FileNotFoundException|FILE_NOT_EXIST|Mkdirs failed|UNABLE_TO_INFER_SCHEMA"


@dataclass
class Renaming:
    """Columns of the source that are read under another name, and those that were found."""

    columns: Mapping[str, str] = field(default_factory=dict)  # expected name: name in the source
    found: set[str] = field(default_factory=set)


class DuckDBEngine:
    """DuckDB in this process; it spills into the work folder beyond its memory limit."""

    def __init__(self, work: Path, memory_limit: str = "2GB") -> None:
        self.work = work
        self.renaming = Renaming()
        spill = work / "spill"
        spill.mkdir(parents=True, exist_ok=True)
        self._backend = ibis.duckdb.connect(
            temp_directory=str(spill), preserve_insertion_order=False, memory_limit=memory_limit
        )
        self._backend.con.execute("SET enable_progress_bar = false")  # mobatlas has its own
        self._sources: dict[Path, str] = {}  # the user's paths, and the patterns DuckDB reads

    def read(self, path: Path) -> ir.Table:
        """A Parquet file or folder, or a CSV file (every column text)."""
        is_folder = path.is_dir()
        pattern = path / "**" / "*.parquet" if is_folder else as_parquet(path, self.work)
        self._sources[path] = str(pattern)
        options = {"hive_partitioning": False} if is_folder else {}
        with self._naming_damaged_files():
            table = self._backend.read_parquet(str(pattern), **options)
        # Ibis does not know nanoseconds with a zone.
        unknown = [name for name, kind in table.schema().items() if kind.is_unknown()]
        zoned = {
            name: table[name].cast(ZONED)
            for name in unknown
            if "TIMESTAMPTZ" in str(table[name].type())
        }
        return table.mutate(**zoned) if zoned else table

    def stage(self, expression: ir.Table, name: str) -> ir.Table:
        """Evaluate once and keep the rows on disk."""
        path = self.work / f"{name}.parquet"
        with self._naming_damaged_files():
            self._backend.to_parquet(expression, path, compression="lz4_raw")
        return self._backend.read_parquet(str(path))

    def collect(self, expression: ir.Table) -> pa.Table:
        """A small result."""
        with self._naming_damaged_files():
            return self._backend.to_pyarrow(expression)

    def sorted_batches(self, expression: ir.Table, by: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """A large result in order, one batch at a time."""
        # not `to_pyarrow_batches`: Ibis 12 calls a method that DuckDB 2 no longer has
        query = str(self._backend.compile(expression.order_by(list(by))))
        yield from self._backend.con.sql(query).to_arrow_reader(BATCH_ROWS)

    @contextmanager
    def _naming_damaged_files(self) -> Iterator[None]:
        """If a query fails, name the first source file that cannot be read to its end."""
        try:
            yield
        except (duckdb.OutOfMemoryException, duckdb.InterruptException):
            raise
        except duckdb.Error:
            for path, pattern in self._sources.items():
                refuse_damaged(path, pattern)
            raise

    def close(self) -> None:
        """Release the resources of the engine."""
        self._backend.disconnect()


class SparkEngine:
    """Like DuckDBEngine, on a Spark session: local by default, or on a cluster as configured."""

    def __init__(self, work: Path, memory_limit: str = "2GB") -> None:
        self.work = work
        self.renaming = Renaming()
        work.mkdir(parents=True, exist_ok=True)
        self._session, self._owned = open_spark_session(memory_limit)
        self._old_settings = {key: self._session.conf.get(key, None) for key in SPARK_SETTINGS}
        for key, value in SPARK_SETTINGS.items():
            self._session.conf.set(key, value)
        self._backend = ibis.pyspark.connect(self._session)

    def read(self, path: Path) -> ir.Table:
        source = as_parquet(path, self.work)
        with explain_spark_errors(self.work):
            table = self._backend.read_parquet(_file_url(source), recursiveFileLookup="true")
        nanoseconds = {
            field.name: (table[field.name] // 1_000_000_000)
            .as_timestamp("s")
            .cast(ZONED if field.type.tz else "timestamp")
            for field in parquet_schema(source)
            if pa.types.is_timestamp(field.type)
            and field.type.unit == "ns"
            and table[field.name].type().is_integer()
        }
        return table.mutate(**nanoseconds) if nanoseconds else table

    def stage(self, expression: ir.Table, name: str) -> ir.Table:
        return self._backend.read_parquet(_file_url(self._write(expression, name)))

    def collect(self, expression: ir.Table) -> pa.Table:
        with explain_spark_errors(self.work):
            rows = self._frame(expression).toArrow()
        return rows.cast(expression.schema().to_pyarrow())

    def sorted_batches(self, expression: ir.Table, by: Sequence[str]) -> Iterator[pa.RecordBatch]:
        path = self._write(expression.order_by(list(by)), "sorted")
        # orderBy partitions by range, and the parts are numbered in that order
        for part in sorted(path.glob("part-*.parquet")):
            yield from pq.ParquetFile(part).iter_batches(BATCH_ROWS)

    def close(self) -> None:
        if self._owned:
            stop_spark_session(self._session)
            return
        for key, value in self._old_settings.items():
            self._session.conf.unset(key) if value is None else self._session.conf.set(key, value)

    def _frame(self, expression: ir.Table) -> Any:
        return self._session.sql(str(self._backend.compile(expression)))

    def _write(self, expression: ir.Table, name: str) -> Path:
        """Write the rows as Parquet, and check that all of them are on this machine's storage."""
        path = self.work / f"{name}.parquet"
        with explain_spark_errors(self.work):
            written = write_frame(self._frame(expression), _file_url(path))
        if pads.dataset(path, format="parquet").count_rows() != written:
            raise MobatlasError(_storage_not_shared(self.work))
        return path


Engine = DuckDBEngine | SparkEngine
ENGINES: dict[str, type[Engine]] = {"duckdb": DuckDBEngine, "spark": SparkEngine}


def open_engine(name: str, work: Path, memory_limit: str = "2GB") -> Engine:
    """The engine of that name, working in that folder."""
    if name not in ENGINES:
        raise MobatlasError(f"--engine {name} does not exist (known: {', '.join(ENGINES)})")
    try:
        return ENGINES[name](work, memory_limit)
    except duckdb.Error as error:
        raise MobatlasError(f"memory_limit '{memory_limit}': DuckDB refused it ({error})") from None


def one(engine: Engine, expression: ir.Table) -> dict[str, Any]:
    """The single row of an aggregate."""
    return dict(engine.collect(expression).to_pylist()[0])


def _file_url(path: Path) -> str:
    """A URL that keeps Spark from looking on the cluster's own file system."""
    return f"file://{path.absolute()}"


def open_spark_session(memory_limit: str) -> tuple[Any, bool]:
    """A Spark session, and whether it is ours to stop; an active session keeps its settings."""
    try:
        from pyspark.sql import SparkSession
    except ImportError:
        raise MobatlasError(
            "--engine spark needs the extra: pip install 'mobatlas[spark]'"
        ) from None
    active = SparkSession.getActiveSession()
    if active is not None:
        return active, False
    # Spark reads this last, so that other memory settings take precedence
    os.environ.setdefault("SPARK_DRIVER_MEMORY", java_heap(memory_limit))
    interrupt_handler = signal.getsignal(signal.SIGINT)
    try:
        session = (
            SparkSession.builder.appName("mobatlas")
            .config("spark.ui.showConsoleProgress", "false")
            .getOrCreate()
        )
    except _spark_errors() as error:
        raise MobatlasError(_why_not_started(str(error), memory_limit)) from error
    finally:
        # Spark replaces this program's handler of Ctrl-C
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, interrupt_handler)
    if session.sparkContext.master.startswith("local"):
        # Spark warns whenever people and places are numbered
        session.sparkContext.setLogLevel("ERROR")
    return session, True


def stop_spark_session(session: Any) -> None:
    """Stop a session if its Java process still runs; else an earlier error explains why not."""
    with suppress(*_spark_errors()):
        session.stop()


def write_frame(frame: Any, url: str) -> int:
    """Write a Spark frame as Parquet; returns how many rows the workers wrote."""
    from pyspark.sql import Observation, functions

    counted = Observation()
    frame.observe(counted, functions.count(functions.lit(1)).alias("rows")).write.parquet(
        url, mode="overwrite"
    )
    return int(counted.get["rows"])


@contextmanager
def explain_spark_errors(work: Path) -> Iterator[None]:
    """Turn errors that the user can act on into one sentence; others pass."""
    try:
        yield
    except _spark_errors() as error:
        lost_java = isinstance(error, (ConnectionError, EOFError)) or type(error).__name__ in (
            "Py4JError",
            "Py4JNetworkError",
        )
        if re.search(r"OutOfMemoryError|spark\.driver\.maxResultSize", str(error)):
            raise MobatlasError(f"Spark ran out of memory; {MORE_MEMORY}") from error
        if lost_java:
            raise MobatlasError(
                f"Spark's Java process ended, usually because of too little memory; {MORE_MEMORY}"
            ) from error
        if re.search(MISSING_FILE, str(error)):
            raise MobatlasError(_storage_not_shared(work)) from error
        raise


def _storage_not_shared(work: Path) -> str:
    return (
        f"Spark's workers do not share {work.parent}; give a source and an --out on storage "
        "that all of them mount"
    )


def java_heap(memory_limit: str) -> str:
    """`2GB` as Java writes it."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([MGT])(i?)B?\s*", memory_limit, re.IGNORECASE)
    if not match:
        raise MobatlasError(f"memory_limit '{memory_limit}': give a number and a unit, such as 4GB")
    number, unit, binary = match.groups()
    size = float(number) * (1024 if binary else 1000) ** ("MGT".index(unit.upper()) + 2)
    return f"{int(size) // 2**20}m"


def _spark_errors() -> tuple[type[Exception], ...]:
    from py4j.protocol import Py4JError  # type: ignore[import-untyped]
    from pyspark.errors import PySparkException

    return PySparkException, Py4JError, ConnectionError, EOFError


def _why_not_started(text: str, memory_limit: str) -> str:
    if "JAVA_GATEWAY_EXITED" in text:
        return (
            "Spark did not start, for the reason above; it needs Java 17 or 21, "
            "on the PATH or in JAVA_HOME"
        )
    if "System memory" in text:
        return f"memory_limit '{memory_limit}' is too little for Spark; give 1GB or more"
    match = re.search(r"(?:Exception|Error): (.*)", text)
    cause = match[1] if match else text.splitlines()[0]
    return f"Spark did not start ({cause}); correct its configuration"
