"""Phase 1: is the generator as good as real training people, and does conditioning bite when labels are given?"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from bench.cells import rounded
from bench.score_models import FLOOR, score_everybody, score_groups
from bench.summary import write_result
from mobatlas.config import load_run
from mobatlas.data.city import write_city_folder
from mobatlas.data.dataset import TrajectoryDataset
from mobatlas.data.prepare.pipeline import prepare
from mobatlas.evaluation.comparison import gap_closed, sampling_floor
from mobatlas.evaluation.metrics import MetricSpec
from mobatlas.generators.latent_diffusion.generator import LatentDiffusion
from mobatlas.generators.protocol import Generator
from mobatlas.generators.store import load_model
from mobatlas.io.manifest import library_versions
from mobatlas.io.output import new_folder
from mobatlas.pipeline.supervise import SuperviseOptions, supervise
from mobatlas.pipeline.train import train
from mobatlas.progress import SILENT, Tracker
from mobatlas.training.loop import Execution

POOLED = (
    "spatial",
    "poi",
    "travel_distance",
    "trip",
    "length",
)  # must be near the floor, everybody together
RATIO, MARGIN = 1.2, 0.02  # how near: times the floor, or bits above it, whichever is larger
SOLVERS = (("dpm++", 5), ("dpm++", 10), ("dpm++", 20), ("ddim", 50))


def run(
    out: Path,
    seeds: int = 1,
    first_seed: int = 0,
    *,
    values: Mapping[str, Any] | None = None,
    from_scratch: bool = False,
    overwrite: bool = False,
    quiet: bool = False,
    tracker: Tracker = SILENT,
) -> dict[str, Any]:
    """Train baseline and strong on simulated cities with preset `small`, measure both, write phase1.json."""
    with new_folder(
        out, "benchmark", seed=first_seed, config={"seeds": seeds}, overwrite=overwrite
    ) as folder:
        rows = []
        for number in range(seeds):
            tracker.step(number, f"seed {first_seed + number}")
            place = folder.scratch() / str(number)
            rows.append(_one(place, first_seed + number, values or {}, from_scratch, quiet))
        scratch = " --from-scratch" if from_scratch else ""
        command = f"python -m bench phase1 --seeds {seeds} --first-seed {first_seed}{scratch} --out {out.name}"
        result = {
            "command": command,
            "seed": first_seed,
            "versions": library_versions(),
            "measure": "JSD in bits against test people at equal sizes; floor: training people against test people",
            "rows": rows,
        }
        write_result(folder.path, "phase1", result)
    tracker.step(seeds, "done")
    return result


def _one(
    place: Path, seed: int, values: Mapping[str, Any], from_scratch: bool, quiet: bool
) -> dict[str, Any]:
    write_city_folder(place / "city", load_run(preset="small").simulate, seed)
    prepare(place / "city", place / "dataset", preset="small")
    dataset = TrajectoryDataset.open(place / "dataset")
    execution = Execution(quiet=quiet)
    times: dict[str, float] = {}
    models: dict[str, Generator] = {}
    start = time.perf_counter()
    report = train(
        dataset.path,
        place / "baseline",
        generator="latent-diffusion",
        preset="small",
        values=values,
        seed=seed,
        execution=execution,
    )
    times["baseline"] = time.perf_counter() - start
    models["baseline"] = load_model(place / "baseline").generator
    for name in ("strong", *(["strong_from_scratch"] if from_scratch else [])):
        start = time.perf_counter()
        supervise(
            place / "baseline",
            place / name,
            None,
            SuperviseOptions("strong", from_scratch=name != "strong", values=values),
            seed=seed,
            execution=execution,
        )
        times[name] = time.perf_counter() - start
        models[name] = load_model(place / name).generator
    baseline = models["baseline"]
    assert isinstance(baseline, LatentDiffusion)
    stages = [
        json.loads(line) for line in (place / "baseline" / "metrics.jsonl").read_text().splitlines()
    ]
    return {
        "seed": seed,
        "threads": torch.get_num_threads(),
        "reconstruction": report["autoencoder"]["reconstruction"],
        "truncated": report["truncated"],
        "training_seconds": {name: round(value, 1) for name, value in times.items()},
        "stage_seconds": {line["stage"]: line["seconds"] for line in stages},
        "training_peak_gb": report["peak_gb"],
        "everybody": pooled(dataset, models["baseline"], seed),
        "groups": by_group(dataset, models, seed),
        "solvers": solvers(dataset, baseline, seed),
    }


def pooled(dataset: TrajectoryDataset, model: Generator, seed: int) -> dict[str, Any]:
    """All groups together: baseline and floor on every metric, and whether the baseline is near enough."""
    spec = MetricSpec.of(dataset)
    found = score_everybody(dataset, spec, model, seed).average
    floor = sampling_floor(dataset, spec, seed=seed).everybody.average
    limits = {name: max(RATIO * floor[name], floor[name] + MARGIN) for name in POOLED}
    return {
        "baseline": rounded(found),
        "floor": rounded(floor),
        "limit": rounded(limits),
        "within": {name: found[name] <= limit for name, limit in limits.items()},
    }


def by_group(
    dataset: TrajectoryDataset, models: Mapping[str, Generator], seed: int
) -> dict[str, Any]:
    """Averages over groups of every model and the floor, and the share of baseline to floor that the others close."""
    scores = score_groups(dataset, MetricSpec.of(dataset), models, seed)
    average = {label: found.average for label, found in scores.items()}
    baseline, floor = average["baseline"], average[FLOOR]
    closed = {
        label: {
            metric: gap_closed(value, baseline[metric], floor[metric])
            for metric, value in values.items()
        }
        for label, values in average.items()
        if label not in ("baseline", FLOOR)
    }
    return {"jsd": {label: rounded(values) for label, values in average.items()}, "closed": closed}


def solvers(dataset: TrajectoryDataset, model: LatentDiffusion, seed: int) -> list[dict[str, Any]]:
    """What each solver costs and reaches, on validation people, because the default is chosen by it."""
    spec, rows = MetricSpec.of(dataset), []
    for solver, steps in SOLVERS:
        start = time.perf_counter()
        found = score_everybody(
            dataset, spec, model.with_solver(solver, steps), seed, "val"
        ).average
        seconds = round(time.perf_counter() - start, 2)
        rows.append(
            {
                "solver": solver,
                "steps": steps,
                "seconds": seconds,
                **rounded({m: found[m] for m in POOLED}),
            }
        )
    return rows
