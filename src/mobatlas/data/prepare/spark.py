"""The Spark session that is there, or one of our own; and what its errors mean."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from mobatlas.errors import MobatlasError

# Naive local times must not be moved by the session's zone; nanosecond files are read as integers and rescaled.
SETTINGS = {"spark.sql.session.timeZone": "UTC", "spark.sql.legacy.parquet.nanosAsLong": "true"}
MORE_MEMORY = "raise memory_limit, or on a cluster --driver-memory and --executor-memory"


def open_session(memory_limit: str) -> tuple[Any, bool]:
    """A session, and whether it is ours to stop; what Spark is told elsewhere, about memory too, is left as it is."""
    try:
        from pyspark.sql import SparkSession
    except ImportError:
        raise MobatlasError(
            "--engine spark needs the extra: pip install 'mobatlas[spark]'"
        ) from None
    active = SparkSession.getActiveSession()
    if active is not None:
        return active, False
    os.environ.setdefault(
        "SPARK_DRIVER_MEMORY", heap(memory_limit)
    )  # the last place in which Spark looks
    builder = SparkSession.builder.appName("mobatlas").config(
        "spark.ui.showConsoleProgress", "false"
    )
    try:
        with _own_interrupts():
            session = builder.getOrCreate()
    except _errors() as error:
        raise MobatlasError(_why_not_started(str(error), memory_limit)) from error
    if session.sparkContext.master.startswith("local"):
        session.sparkContext.setLogLevel(
            "ERROR"
        )  # it warns of every numbering of people and places
    return session, True


def heap(memory_limit: str) -> str:
    """`2GB` as Java writes it."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([MGT])(i?)B?\s*", memory_limit, re.IGNORECASE)
    if not found:
        raise MobatlasError(f"memory_limit '{memory_limit}': give a number and a unit, such as 4GB")
    number, unit, binary = found.groups()
    size = float(number) * (1024 if binary else 1000) ** ("MGT".index(unit.upper()) + 2)
    return f"{int(size) // 2**20}m"


def stop_session(session: Any) -> None:
    """Stop a session, if there still is one."""
    with suppress(*_errors()):  # Java is gone, and why has been said
        session.stop()


def write(frame: Any, address: str) -> int:
    """Write a table as Parquet; how many rows the workers wrote."""
    from pyspark.sql import Observation
    from pyspark.sql import functions as f

    counted = Observation()
    frame.observe(counted, f.count(f.lit(1)).alias("rows")).write.parquet(address, mode="overwrite")
    return int(counted.get["rows"])


@contextmanager
def in_sentences(work: Path) -> Iterator[None]:
    """What a person can do something about is said in a sentence; other errors pass."""
    try:
        yield
    except _errors() as error:
        sentence = _sentence(error, work)
        if sentence is None:
            raise
        raise MobatlasError(sentence) from error


def not_shared(work: Path) -> str:
    """The sentence about workers that read and write elsewhere."""
    return f"Spark's workers do not share {work.parent}; give a source and an --out on storage that all of them mount"


def _errors() -> tuple[type[Exception], ...]:
    from py4j.protocol import Py4JError  # type: ignore[import-untyped]
    from pyspark.errors import PySparkException

    return PySparkException, Py4JError, ConnectionError, EOFError


def _sentence(error: Exception, work: Path) -> str | None:
    said = str(error)
    if "OutOfMemoryError" in said or "spark.driver.maxResultSize" in said:
        return f"Spark ran out of memory; {MORE_MEMORY}"
    if isinstance(error, (ConnectionError, EOFError)) or type(error).__name__ in (
        "Py4JError",
        "Py4JNetworkError",
    ):
        return f"Spark's Java process ended, most often for want of memory; {MORE_MEMORY}"
    if re.search(
        r"FileNotFoundException|FILE_NOT_EXIST|Mkdirs failed|UNABLE_TO_INFER_SCHEMA", said
    ):
        return not_shared(work)
    return None


def _why_not_started(said: str, memory_limit: str) -> str:
    if "JAVA_GATEWAY_EXITED" in said:
        return "Spark did not start, for the reason above; it needs Java 17 or 21, on the PATH or in JAVA_HOME"
    if "System memory" in said:
        return f"memory_limit '{memory_limit}' is too little for Spark; give 1GB or more"
    reason = re.search(r"(?:Exception|Error): (.*)", said)
    return f"Spark did not start ({reason[1] if reason else said.splitlines()[0]}); mend its configuration"


@contextmanager
def _own_interrupts() -> Iterator[None]:
    """Ctrl-C stays what it was: Spark would take it for itself."""
    handler = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, handler)
