"""Time and memory of an evaluation: 100,000 trajectories of eight groups on every side."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from bench.measure import Row, city_of, measure
from mobatlas.data.city import write_city_folder
from mobatlas.data.dataset import Trajectories, TrajectoryDataset
from mobatlas.data.prepare.pipeline import prepare
from mobatlas.data.types import Ints
from mobatlas.evaluation.comparison import compare_models
from mobatlas.evaluation.metrics import MetricSpec
from mobatlas.progress import SILENT, Tracker

TRAJECTORIES = 100_000
GROUPS = 8
WINDOWS = 8  # trajectories of a real person
CELLS = (40, 100)
VISITS = 400_000  # of the simulated city


def rows(
    scratch: Path, seed: int, tracker: Tracker = SILENT, trajectories: int = TRAJECTORIES
) -> list[Row]:
    """Return a row for each grid: samples and floor against real people, with intervals."""
    tracker.step(0, "simulating")
    write_city_folder(scratch / "city", city_of(VISITS), seed)
    prepare(
        scratch / "city", scratch / "dataset", preset="small", values={"min_people_per_place": 0}
    )
    table = []
    for number, cells in enumerate(CELLS):
        tracker.step(number + 1, f"{cells} x {cells} cells")
        measured = measure(_compare, scratch / "dataset", cells, trajectories, seed)
        table.append(
            {
                "task": "compare models",
                "size": f"{trajectories:,} trajectories of each side, {GROUPS} groups, "
                f"{cells} x {cells} cells, {measured.value} metrics",
                "seconds": measured.seconds,
                "peak_gb": measured.peak_gb,
            }
        )
    return table


def _compare(path: Path, cells: int, trajectories: int, seed: int) -> int:
    """Compare trajectories that are drawn from the training people; return how many metrics."""
    dataset = TrajectoryDataset.open(path)
    spec = MetricSpec.of(dataset, cells)
    sides = [_draw(dataset, trajectories, seed + number) for number in range(3)]
    people = np.arange(trajectories) // WINDOWS
    real, floor = (_groups(replace(side, person=people), people % GROUPS) for side in sides[:2])
    samples = _groups(replace(sides[2], person=None), np.arange(trajectories) % GROUPS)
    comparison = compare_models(
        spec, real, {"samples": samples, "floor": floor}, seed=seed, reference=floor
    )
    return len(comparison.scores["floor"].average)


def _draw(dataset: TrajectoryDataset, n: int, seed: int) -> Trajectories:
    return Trajectories.of(dataset, np.random.default_rng(seed).choice(dataset.split("train"), n))


def _groups(side: Trajectories, group: Ints) -> dict[str, Trajectories]:
    return {str(number): side.take(np.flatnonzero(group == number)) for number in range(GROUPS)}
