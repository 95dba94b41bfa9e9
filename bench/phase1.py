"""Phase 1: is the generator as good as real training people, and does it use labels?"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.cells import STRONG, SeedFolder, Setup, rounded
from bench.floors import sampling_floor
from bench.runner import Cell, Command, Experiment, Runner
from bench.score_models import BASELINE, FLOOR, score_everybody, score_groups
from bench.summary import write_result
from mobatlas.data.dataset import TrajectoryDataset
from mobatlas.evaluation.comparison import gap_closed
from mobatlas.evaluation.metrics import MetricSpec
from mobatlas.generators.latent_diffusion.generator import LatentDiffusion
from mobatlas.generators.protocol import Generator
from mobatlas.generators.store import load_model
from mobatlas.pipeline.models import SuperviseOptions, supervise, train
from mobatlas.training.loop import METRICS, Execution

# Metrics of all groups together that must be close to the floor.
POOLED = ("spatial", "poi", "travel_distance", "flows", "length")
RATIO = 1.2  # times the floor, or
MARGIN = 0.02  # bits above it, whichever is larger, is close
SOLVERS = (("dpm++", 5), ("dpm++", 10), ("dpm++", 20), ("ddim", 50))
FROM_SCRATCH = "strong_from_scratch"
MEASURE = (
    "JSD in bits against test people at equal sizes; floor: training people against test people"
)


def run(
    experiment: Experiment, values: Mapping[str, Any] | None = None, *, from_scratch: bool = False
) -> dict[str, Any]:
    """Train baseline and strong on simulated cities, measure both, and write phase1.json.

    `values` change the preset `small`.
    """
    setup = Setup(values or {}, quiet=experiment.quiet)
    inputs = setup.inputs()
    names = [BASELINE, STRONG, *([FROM_SCRATCH] if from_scratch else [])]
    command = Command("phase1", flags=["--from-scratch"] if from_scratch else [])
    runner = Runner(experiment, "phase 1", command)
    rows = []
    for seed in experiment.numbers:
        task = _Task(SeedFolder(experiment.out, seed, setup))
        *trained, scores = runner.run(
            [
                *(Cell(seed, task.cell(name), inputs, partial(task.train, name)) for name in names),
                Cell(seed, "phase1-scores", inputs | {"models": names}, partial(task.score, names)),
            ]
        )
        rows.append(
            {
                "seed": seed,
                "threads": torch.get_num_threads(),
                **trained[0]["report"],
                "training_seconds": {
                    name: cell["training_seconds"]
                    for name, cell in zip(names, trained, strict=True)
                },
                **{name: scores[name] for name in ("everybody", "groups", "solvers")},
            }
        )
    result = {**command.header(experiment), "measure": MEASURE, "rows": rows}
    write_result(experiment.out, "phase1", result)
    return result


@dataclass(frozen=True)
class _Task:
    """The models of one seed."""

    folder: SeedFolder

    def cell(self, name: str) -> str:
        return f"phase1-{name}"

    def path(self, name: str) -> Path:
        return self.folder.path / self.cell(name)

    def train(self, name: str) -> dict[str, Any]:
        """Train a model from the start, since its time is measured."""
        setup = self.folder.setup
        seed = self.folder.seed
        execution = Execution(overwrite=True, quiet=setup.quiet)
        dataset = self.folder.prepare()
        start = time.perf_counter()
        if name == BASELINE:
            report = train(
                dataset,
                self.path(name),
                generator=setup.generator,
                preset=setup.preset,
                values=setup.values,
                seed=seed,
                execution=execution,
            )
        else:
            from_scratch = name == FROM_SCRATCH
            options = SuperviseOptions(STRONG, from_scratch=from_scratch, values=setup.values)
            baseline = self.path(BASELINE)
            supervise(baseline, self.path(name), None, options, seed=seed, execution=execution)
        seconds = round(time.perf_counter() - start, 1)
        if name != BASELINE:
            return {"training_seconds": seconds}
        lines = (self.path(name) / METRICS).read_text(encoding="utf-8").splitlines()
        stages = [json.loads(line) for line in lines]
        facts = {
            "reconstruction": report["autoencoder"]["reconstruction"],
            "truncated": report["truncated"],
            "stage_seconds": {line["stage"]: line["seconds"] for line in stages},
            "training_peak_gb": report["peak_gb"],
        }
        return {"training_seconds": seconds, "report": facts}

    def score(self, names: Sequence[str]) -> dict[str, Any]:
        models = {name: load_model(self.path(name)).generator for name in names}
        baseline = models[BASELINE]
        assert isinstance(baseline, LatentDiffusion)
        dataset = self.folder.dataset
        seed = self.folder.seed
        return {
            "everybody": pooled(dataset, baseline, seed),
            "groups": by_group(dataset, models, seed),
            "solvers": solvers(dataset, baseline, seed),
        }


def pooled(dataset: TrajectoryDataset, model: Generator, seed: int) -> dict[str, Any]:
    """Compare baseline and floor for all groups together, and mark metrics that are close."""
    spec = MetricSpec.of(dataset)
    scores = score_everybody(dataset, spec, model, seed).average
    floor = sampling_floor(dataset, spec, seed=seed).everybody.average
    limits = {name: max(RATIO * floor[name], floor[name] + MARGIN) for name in POOLED}
    return {
        "baseline": rounded(scores),
        "floor": rounded(floor),
        "limit": rounded(limits),
        "within": {name: scores[name] <= limit for name, limit in limits.items()},
    }


def by_group(
    dataset: TrajectoryDataset, models: Mapping[str, Generator], seed: int
) -> dict[str, Any]:
    """Return averages over groups of every model and of the floor, and the gap closed."""
    scores = score_groups(dataset, MetricSpec.of(dataset), models, seed)
    average = {label: each.average for label, each in scores.items()}
    baseline = average[BASELINE]
    floor = average[FLOOR]
    closed = {
        label: {
            metric: gap_closed(value, baseline[metric], floor[metric])
            for metric, value in values.items()
        }
        for label, values in average.items()
        if label not in (BASELINE, FLOOR)
    }
    return {"jsd": {label: rounded(values) for label, values in average.items()}, "closed": closed}


def solvers(dataset: TrajectoryDataset, model: LatentDiffusion, seed: int) -> list[dict[str, Any]]:
    """Return time and scores of each solver, on validation people."""
    spec = MetricSpec.of(dataset)
    rows = []
    for solver, steps in SOLVERS:
        start = time.perf_counter()
        scores = score_everybody(dataset, spec, model.with_solver(solver, steps), seed, "val")
        seconds = round(time.perf_counter() - start, 2)
        metrics = rounded({metric: scores.average[metric] for metric in POOLED})
        rows.append({"solver": solver, "steps": steps, "seconds": seconds, **metrics})
    return rows
