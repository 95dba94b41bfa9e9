"""Speed: each row is a ratio to a reference measured in the same run, with the peak memory of its own process."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from bench.summary import write_result
from mobatlas.config import CityConfig
from mobatlas.data.city import write_city_folder
from mobatlas.data.dataset import TrajectoryDataset
from mobatlas.data.prepare.pipeline import prepare
from mobatlas.data.schema import ANCHORS
from mobatlas.data.trajectories import Trajectories
from mobatlas.errors import MobatlasError
from mobatlas.evaluation.evaluate import evaluate
from mobatlas.io.manifest import library_versions
from mobatlas.io.output import new_folder
from mobatlas.progress import SILENT, Tracker
from mobatlas.training.resources import keep_memory, peak_gb

EVALUATED = 100_000  # trajectories
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
# Goals: `import mobatlas` under half a second, `mobatlas --help` under one.
STARTUP = {
    "import mobatlas": ("-c", "import mobatlas"),
    "mobatlas --help": ("-m", "mobatlas", "--help"),
}
STARTS = 5  # processes of which the fastest counts
# What the bar counts to.
STEPS = {"quick": 5.0, "full": 5.0, "prepare": 9.0, "processes": 1.0, "regions": 15.0}


@dataclass(frozen=True)
class Measured:
    """One piece of work in a process of its own."""

    seconds: float
    peak_gb: float
    value: Any


def run(
    out: Path,
    profile: str = "quick",
    seed: int = 0,
    *,
    overwrite: bool = False,
    tracker: Tracker = SILENT,
) -> dict[str, Any]:
    """Measure everything and write speed.json."""
    if profile not in STEPS:
        raise MobatlasError(f"--profile {profile} does not exist (known: {', '.join(STEPS)})")
    with new_folder(
        out, "benchmark", seed=seed, config={"profile": profile}, overwrite=overwrite
    ) as folder:
        with tempfile.TemporaryDirectory(dir=folder.scratch()) as scratch:
            rows = _rows(Path(scratch), profile, seed, tracker)
        result = {
            "command": f"python -m bench speed --profile {profile} --seed {seed} --out {out.name}",
            "profile": profile,
            "seed": seed,
            "versions": library_versions(),
            "startup": startup_seconds(),
            "rows": rows,
        }
        write_result(folder.path, "speed", result)
    tracker.step(STEPS[profile], "done")
    return result


def startup_seconds() -> dict[str, float]:
    """Seconds until `import mobatlas` and `mobatlas --help` are done: the best of a few processes."""
    return {
        name: round(min(_process_seconds(words) for _ in range(STARTS)), 3)
        for name, words in STARTUP.items()
    }


def _process_seconds(words: Sequence[str]) -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, *words], check=True, capture_output=True)
    return time.perf_counter() - start


def _rows(scratch: Path, profile: str, seed: int, tracker: Tracker) -> list[dict[str, Any]]:
    # how it grows; these modules measure by what is here
    if profile == "prepare":
        from bench import growth

        return growth.rows(scratch, seed, tracker)
    if profile == "processes":
        from bench import processes

        return processes.rows(scratch, seed, tracker)
    if profile == "regions":
        from bench import many_regions

        return many_regions.rows(scratch, seed, tracker)
    rows = _data_rows(scratch, PROFILES[profile].visits, seed, tracker)
    tracker.step(3, "evaluating")
    rows.append(_evaluation_row(scratch, seed))
    tracker.step(4, "training and sampling")
    return rows + list(measure(_model_rows, scratch, PROFILES[profile], seed).value)


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


def _evaluation_row(scratch: Path, seed: int) -> dict[str, Any]:
    """`evaluate` of a large file: people of the city again and again, as if a model had made them."""
    groups = measure(_write_samples, scratch / "dataset", scratch / "samples.parquet", seed).value
    found = measure(_evaluate, scratch / "samples.parquet", scratch / "dataset")
    size = f"{EVALUATED:,} trajectories, {groups} groups"
    return {
        "what": "evaluate",
        "size": size,
        "seconds": found.seconds,
        "peak_gb": found.peak_gb,
        "test_trajectories": found.value,
    }


def measure(work: Callable[..., Any], *arguments: Any) -> Measured:
    """Time a function in a fresh process, so that its peak memory is its own."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(_timed, work, *arguments).result()


def _timed(work: Callable[..., Any], *arguments: Any) -> Measured:
    if work is not _model_rows:  # which measures what it saves
        keep_memory()  # as commands do
    start = time.perf_counter()
    value = work(*arguments)
    seconds = time.perf_counter() - start
    return Measured(seconds, peak_gb(), value)


def _simulate(folder: Path, config: CityConfig, seed: int) -> int:
    return int(write_city_folder(folder, config, seed)["visits"])


def _bare_copy(source: Path, target: Path) -> None:
    spill = str(target.with_suffix(".spill"))
    with duckdb.connect(
        config={
            "memory_limit": MEMORY_LIMIT,
            "temp_directory": spill,
            "preserve_insertion_order": False,
        }
    ) as connection:
        connection.execute("SET enable_progress_bar = false")
        table = connection.read_parquet(str(source)).order("user_id, arrival")
        table.write_parquet(str(target))


def _model_rows(scratch: Path, profile: Profile, seed: int) -> list[dict[str, Any]]:
    from bench import model_speed

    return model_speed.rows(scratch, profile.options, profile.samples, profile.compared, seed)


def _write_samples(dataset: Path, out: Path, seed: int) -> int:
    """A file as a foreign program might write it; how many groups it tells."""
    opened = TrajectoryDataset.open(dataset)
    assert opened.groups is not None  # a simulated city has labels
    rows = np.random.default_rng(seed).choice(opened.split("train"), EVALUATED)
    made = Trajectories.of(opened, rows)
    names = np.array(opened.groups.names, dtype=object)[opened.person_groups()[opened.person[rows]]]
    places = opened.vocabulary.table["poi_id"].combine_chunks().take(pa.array(made.tokens))
    anchors = {name: made.anchors[made.owner, k] for k, name in enumerate(ANCHORS)}
    pq.write_table(
        pa.table(
            {"trajectory": made.owner, "poi_id": places, "group": names[made.owner], **anchors}
        ),
        out,
    )
    return len(opened.groups)


def _evaluate(samples: Path, dataset: Path) -> int:
    found = evaluate(samples, dataset)
    return sum(found.groups.sizes.values()) if found.groups is not None else 0


def _prepare(source: Path, out: Path) -> int:
    return prepare(source, out, preset="paper", values={"memory_limit": MEMORY_LIMIT}).windows.kept
