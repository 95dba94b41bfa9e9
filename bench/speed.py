"""Speed of mobatlas: each row has a reference that was measured in the same run."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from bench import evaluation_speed, growth, many_regions, processes
from bench.measure import MEMORY_LIMIT, Row, city_of, measure, run_in_process
from bench.summary import write_result
from mobatlas.config import CityConfig
from mobatlas.data.city import write_city_folder
from mobatlas.data.dataset import Trajectories, TrajectoryDataset
from mobatlas.data.prepare.pipeline import prepare
from mobatlas.data.types import ANCHORS
from mobatlas.errors import MobatlasError
from mobatlas.evaluation.evaluate import evaluate
from mobatlas.io.manifest import library_versions
from mobatlas.io.output import new_folder
from mobatlas.progress import SILENT, Tracker

EVALUATED = 100_000  # trajectories
STARTS = 5  # processes; the fastest one counts


@dataclass(frozen=True)
class Workload:
    """The amount of work that a profile measures."""

    visits: int  # about
    options: Mapping[str, Any]  # of the generator
    samples: int  # that are timed
    compared: int | None = None  # samples compared with test people; None: one per test trajectory


@dataclass(frozen=True)
class Startup:
    """A command that must start fast."""

    name: str
    arguments: tuple[str, ...]  # of Python
    limit_seconds: float


SHORT_TRAINING = {"autoencoder": {"steps": 250}, "denoiser": {"steps": 250}}
WORKLOADS = {
    "quick": Workload(1_000_000, SHORT_TRAINING, 128, 128),
    "full": Workload(10_000_000, {}, 512),
}
GROWTH: dict[str, Callable[[Path, int, Tracker], list[Row]]] = {
    "prepare": growth.rows,
    "processes": processes.rows,
    "regions": many_regions.rows,
    "evaluation": evaluation_speed.rows,
}
STARTUPS = (
    Startup("import mobatlas", ("-c", "import mobatlas"), 0.5),
    Startup("mobatlas --help", ("-m", "mobatlas", "--help"), 1.0),
)
# Steps of the progress bar of each profile.
STEPS = {
    "quick": 5.0,
    "full": 5.0,
    "prepare": 9.0,
    "processes": 1.0,
    "regions": 15.0,
    "evaluation": 3.0,
}


def run(
    out: Path,
    profile: str = "quick",
    seed: int = 0,
    *,
    overwrite: bool = False,
    tracker: Tracker = SILENT,
) -> dict[str, Any]:
    """Measure one profile and write speed.json."""
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
            "startup": startup_rows(),
            "rows": rows,
        }
        write_result(folder.path, "speed", result)
    tracker.step(STEPS[profile], "done")
    return result


def startup_rows(startups: Sequence[Startup] = STARTUPS) -> list[Row]:
    """Measure each command as the fastest of several processes, and compare it with its limit."""
    rows: list[Row] = []
    for startup in startups:
        seconds = min(_process_seconds(startup.arguments) for _ in range(STARTS))
        rows.append(
            {
                "command": startup.name,
                "seconds": round(seconds, 3),
                "limit_seconds": startup.limit_seconds,
                "within_limit": seconds <= startup.limit_seconds,
            }
        )
    return rows


def _process_seconds(arguments: Sequence[str]) -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, capture_output=True)
    return time.perf_counter() - start


def _rows(scratch: Path, profile: str, seed: int, tracker: Tracker) -> list[Row]:
    if profile in GROWTH:
        return GROWTH[profile](scratch, seed, tracker)
    workload = WORKLOADS[profile]
    rows = _data_rows(scratch, workload.visits, seed, tracker)
    tracker.step(3, "evaluating")
    rows.append(_evaluation_row(scratch, seed))
    tracker.step(4, "training and sampling")
    return rows + list(run_in_process(_model_rows, scratch, workload, seed))


def _data_rows(scratch: Path, visits: int, seed: int, tracker: Tracker) -> list[Row]:
    tracker.step(0, "simulating")
    city = measure(_simulate, scratch / "city", city_of(visits), seed)
    size = f"{city.value:,} visits"
    tracker.step(1, "bare sorted copy")
    bare = measure(_bare_copy, scratch / "city" / "visits.parquet", scratch / "bare.parquet")
    tracker.step(2, "prepare")
    prepared = measure(_prepare, scratch / "city", scratch / "dataset")
    return [
        {
            "task": "simulate",
            "size": size,
            "seconds": city.seconds,
            "peak_gb": city.peak_gb,
            "visits_per_second": round(city.value / city.seconds),
        },
        {
            "task": "prepare",
            "size": size,
            "seconds": prepared.seconds,
            "reference": "COPY (... ORDER BY user_id, arrival) TO Parquet, same DuckDB",
            "reference_seconds": bare.seconds,
            "ratio": prepared.seconds / bare.seconds,
            "peak_gb": prepared.peak_gb,
            "reference_peak_gb": bare.peak_gb,
        },
    ]


def _evaluation_row(scratch: Path, seed: int) -> Row:
    """Evaluate a large file of samples: trajectories of the city, drawn with replacement."""
    groups = measure(_write_samples, scratch / "dataset", scratch / "samples.parquet", seed).value
    evaluated = measure(_evaluate, scratch / "samples.parquet", scratch / "dataset")
    return {
        "task": "evaluate",
        "size": f"{EVALUATED:,} trajectories, {groups} groups",
        "seconds": evaluated.seconds,
        "peak_gb": evaluated.peak_gb,
        "test_trajectories": evaluated.value,
    }


def _simulate(folder: Path, config: CityConfig, seed: int) -> int:
    return int(write_city_folder(folder, config, seed)["visits"])


def _bare_copy(source: Path, target: Path) -> None:
    config: dict[str, Any] = {
        "memory_limit": MEMORY_LIMIT,
        "temp_directory": str(target.with_suffix(".spill")),
        "preserve_insertion_order": False,
    }
    with duckdb.connect(config=config) as connection:
        connection.execute("SET enable_progress_bar = false")
        table = connection.read_parquet(str(source)).order("user_id, arrival")
        table.write_parquet(str(target))


def _prepare(source: Path, out: Path) -> int:
    values = {"memory_limit": MEMORY_LIMIT, "min_people_per_place": 0}
    return prepare(source, out, preset="paper", values=values).windows.kept


def _write_samples(dataset: Path, out: Path, seed: int) -> int:
    """Write training trajectories as a file of samples; return the number of groups."""
    opened = TrajectoryDataset.open(dataset)
    assert opened.groups is not None  # a simulated city has labels
    rows = np.random.default_rng(seed).choice(opened.split("train"), EVALUATED)
    samples = Trajectories.of(opened, rows)
    names = np.array(opened.groups.names, dtype=object)[opened.person_groups()[opened.person[rows]]]
    places = opened.vocabulary.table["poi_id"].combine_chunks().take(pa.array(samples.tokens))
    columns = {
        "trajectory": samples.owner,
        "poi_id": places,
        "group": names[samples.owner],
        **{name: samples.anchors[samples.owner, k] for k, name in enumerate(ANCHORS)},
    }
    pq.write_table(pa.table(columns), out)
    return len(opened.groups)


def _evaluate(samples: Path, dataset: Path) -> int:
    evaluation = evaluate(samples, dataset)
    return 0 if evaluation.groups is None else sum(evaluation.groups.sizes.values())


def _model_rows(scratch: Path, workload: Workload, seed: int) -> list[Row]:
    from bench import model_speed  # torch takes seconds to import

    return model_speed.rows(scratch, workload.options, workload.samples, workload.compared, seed)
