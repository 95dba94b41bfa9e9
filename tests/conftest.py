from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from mobatlas.config import PrepareConfig, RegionsConfig, RunConfig
from mobatlas.data.prepare.engine import DuckDBEngine, Engine
from mobatlas.regions.build import RegionsOptions

settings.register_profile("mobatlas", deadline=None)  # a busy machine is not a bug
settings.load_profile("mobatlas")


# Test files are distributed in order: the slowest come first, so that all processes end at about
# the same time.
LONGEST = (
    "engines_agree",
    "readers",
    "pipeline_by_hand",
    "docs",
    "speed",
    "questions",
    "supervise_command",
    "phase2_benchmark",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    rank = {f"test_{name}": place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(item.path.stem, len(rank)))


@pytest.fixture(scope="session", autouse=True)
def without_privacy_defaults() -> None:
    """Tests use datasets of a few people; `tests/test_privacy*.py` test the defaults."""
    for section, name in (
        (PrepareConfig, "min_people_per_place"),
        (RegionsConfig, "min_people"),
        (RunConfig, "audit"),
    ):
        field = section.model_fields[name]
        field.default = type(field.default)(0)
        section.model_rebuild(force=True)
    *others, _ = RegionsOptions.__init__.__defaults__ or ()  # min_people is the last field
    RegionsOptions.__init__.__defaults__ = (*others, 0)


@pytest.fixture(scope="session")
def data_folder() -> Path:
    """The real data that the tests read in place."""
    folder = os.environ.get("MOBATLAS_DATA")
    if not folder:
        pytest.skip("MOBATLAS_DATA is unset: no real data to test on")
    return Path(folder)


@pytest.fixture(scope="session")
def spark_session() -> Iterator[Any]:
    """One local Spark session for all tests; its time zone has daylight saving time.

    The results must not depend on it.
    """
    if shutil.which("java") is None:
        pytest.skip("Spark needs Java, and there is none here")
    pyspark = pytest.importorskip("pyspark.sql")
    session = (
        pyspark.SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.sql.session.timeZone", "America/New_York")
        .config("spark.driver.memory", "2g")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.host", "127.0.0.1")
        .getOrCreate()
    )
    session.sparkContext.setLogLevel("ERROR")
    yield session
    session.stop()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    source = tmp_path / "it's a source"  # a quote in the path must not reach any SQL
    source.mkdir()
    return source


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    opened = DuckDBEngine(tmp_path / "wo'rk")
    yield opened
    opened.close()
