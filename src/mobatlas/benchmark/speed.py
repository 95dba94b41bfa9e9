"""Speed: each row is a ratio to a reference measured in the same run, with the peak memory of its own process."""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb

from mobatlas.artifacts import library_versions, write_json
from mobatlas.config import CityConfig
from mobatlas.data.city import write_city_folder
from mobatlas.data.prepare import prepare
from mobatlas.errors import MobatlasError
from mobatlas.folders import new_folder
from mobatlas.progress import SILENT, Tracker
from mobatlas.resources import peak_gb

STEPS = 4
MEMORY_LIMIT = "2GB"  # of DuckDB, for the reference as for us
VISITS_PER_USER = 67.0  # of the default city in 28 days; the table says how many there really were


@dataclass(frozen=True)
class Profile:
    """How much is measured."""

    visits: int  # about
    options: dict[str, Any]  # of the generator
    samples: int  # that are timed
    compared: int | None = None  # that are compared with test people; None: as many as there are


BRIEF = {"autoencoder": {"steps": 250}, "denoiser": {"steps": 250}}
PROFILES = {"quick": Profile(1_000_000, BRIEF, 128, 128), "full": Profile(10_000_000, {}, 512)}


@dataclass(frozen=True)
class Measured:
    """One piece of work in a process of its own."""

    seconds: float
    peak_gb: float
    value: Any


def run(
    out: Path, profile: str = "quick", seed: int = 0, *, overwrite: bool = False, tracker: Tracker = SILENT
) -> dict[str, Any]:
    """Measure everything and write speed.json."""
    if profile not in PROFILES:
        raise MobatlasError(f"--profile {profile} does not exist (known: {', '.join(PROFILES)})")
    with new_folder(out, "benchmark", seed=seed, config={"profile": profile}, overwrite=overwrite) as folder:
        with tempfile.TemporaryDirectory(dir=folder.scratch()) as scratch:
            rows = _data_rows(Path(scratch), PROFILES[profile].visits, seed, tracker)
            tracker.step(3, "training and sampling")
            rows += measure(_model_rows, Path(scratch), PROFILES[profile], seed).value
        result = {
            "command": f"mobatlas benchmark speed --profile {profile} --seed {seed} --out {out.name}",
            "profile": profile,
            "seed": seed,
            "versions": library_versions(),
            "rows": rows,
        }
        write_json(folder.path / "speed.json", result)
    tracker.step(STEPS, "done")
    return result


def _data_rows(scratch: Path, visits: int, seed: int, tracker: Tracker) -> list[dict[str, Any]]:
    config = CityConfig(users=max(1, round(visits / VISITS_PER_USER)), pois=9_000, districts=36)
    tracker.step(0, "simulating")
    city = measure(_simulate, scratch / "city", config, seed)
    size = f"{city.value:,} visits"
    tracker.step(1, "bare sorted copy")
    bare = measure(_bare_copy, scratch / "city" / "visits.parquet", scratch / "bare.parquet")
    tracker.step(2, "prepare")
    prepared = measure(_prepare, scratch / "city", scratch / "dataset")
    return [
        {
            "what": "simulate",
            "size": size,
            "seconds": city.seconds,
            "peak_gb": city.peak_gb,
            "visits_per_second": round(city.value / city.seconds),
        },
        {
            "what": "prepare",
            "size": size,
            "seconds": prepared.seconds,
            "reference": "COPY (... ORDER BY user_id, arrival) TO Parquet, same DuckDB",
            "reference_seconds": bare.seconds,
            "ratio": prepared.seconds / bare.seconds,
            "peak_gb": prepared.peak_gb,
            "reference_peak_gb": bare.peak_gb,
        },
    ]


def measure(work: Callable[..., Any], *arguments: Any) -> Measured:
    """Time a function in a fresh process, so that its peak memory is its own."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(_timed, work, *arguments).result()


def _timed(work: Callable[..., Any], *arguments: Any) -> Measured:
    start = time.perf_counter()
    value = work(*arguments)
    seconds = time.perf_counter() - start
    return Measured(seconds, peak_gb(), value)


def _simulate(folder: Path, config: CityConfig, seed: int) -> int:
    return int(write_city_folder(folder, config, seed)["visits"])


def _bare_copy(source: Path, target: Path) -> None:
    spill = str(target.with_suffix(".spill"))
    with duckdb.connect(
        config={"memory_limit": MEMORY_LIMIT, "temp_directory": spill, "preserve_insertion_order": False}
    ) as connection:
        connection.execute("SET enable_progress_bar = false")
        table = connection.read_parquet(str(source)).order("user_id, arrival")
        table.write_parquet(str(target))


def _model_rows(scratch: Path, profile: Profile, seed: int) -> list[dict[str, Any]]:
    from mobatlas.benchmark import model_speed  # torch only in the process that needs it

    return model_speed.rows(scratch, profile.options, profile.samples, profile.compared, seed)


def _prepare(source: Path, out: Path) -> int:
    return prepare(source, out, preset="paper", values={"memory_limit": MEMORY_LIMIT}).windows.kept
