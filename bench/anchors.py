"""What synthetic homes and workplaces cost, and what they disclose.

Models of a simulated city are sampled with synthetic and with observed anchors and compared with
test people. Emitted homes, workplaces and pairs of both near a training person are counted, and
those near a held-out person: a difference would reveal who was in the data.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from scipy.spatial import cKDTree

from bench.cells import Job, SeedFolder, Setup, rounded
from bench.runner import Cell, Command, Experiment, Runner
from bench.score_models import BASELINE, FLOOR, draw_groups, score_samples
from bench.summary import write_result
from mobatlas.config import parse_assignments
from mobatlas.data.anchors import AnchorModel
from mobatlas.data.dataset import Trajectories, TrajectoryDataset
from mobatlas.data.types import KM_PER_DEGREE, Floats, haversine_km
from mobatlas.evaluation.comparison import compare, gap_closed, real_groups
from mobatlas.evaluation.metrics import MetricSpec
from mobatlas.generators.protocol import Generator
from mobatlas.generators.store import load_model
from mobatlas.supervision.calibration import PlainSampler, Sampler
from mobatlas.supervision.store import load_sampler

METRICS = ("poi", "spatial", "travel_distance", "trip", "flows")
TILT = "tilt, calibrated"
JOB = Job("demogroups", "tilt")
KM = (0.03, 0.3)  # around a person
EMITTED = 200_000
DRAWS = 500  # of people, for intervals
TIMED = 1_000  # trajectories
PLANTED_KM = 15.0  # from the nearest person
MEASURE = (
    "jsd in bits against test people: average over groups, and everybody as one; closed: share of "
    "the gap from the baseline to the floor; near: emitted homes, workplaces or pairs of both per "
    "training person within a distance, minus those per held-out person, with the 90 % interval "
    "over people; planted: a person added 15 km from everybody"
)


def run(
    experiment: Experiment, assignments: Sequence[str] = (), data: Path | None = None
) -> dict[str, Any]:
    """Compare both kinds of anchors for each seed and write anchors.json.

    With `data`, only the distances from the people of that dataset are measured.
    """
    options = {"--data": [data.name] if data else [], "--set": assignments}
    command = Command("anchors", options)
    values = parse_assignments(list(assignments))
    setup = Setup(values=values, generator="autoregressive", data=data, quiet=experiment.quiet)
    cells = []
    for seed in experiment.numbers:
        folder = SeedFolder(experiment.out, seed, setup)
        compute = partial(_compare, folder) if data is None else partial(_measure, folder)
        cells.append(Cell(seed, "anchors", setup.inputs(), compute))
    rows = Runner(experiment, "anchors", command).run(cells)
    result = {**command.header(experiment), "measure": MEASURE, "rows": rows}
    write_result(experiment.out, "anchors", result)
    return result


def _measure(folder: SeedFolder) -> dict[str, Any]:
    folder.prepare()
    return {"seed": folder.seed, "near": distances(folder.dataset, folder.seed)}


def _compare(folder: SeedFolder) -> dict[str, Any]:
    """Return the scores of one seed with both kinds of anchors, and the distances."""
    baseline = load_model(folder.baseline())
    model = load_model(folder.supervise(JOB)[0])
    dataset = folder.dataset
    spec = MetricSpec.of(dataset)
    scores: dict[str, Any] = {}
    for name, observed in (("observed", True), ("synthetic", False)):
        people = baseline.observed() if observed else baseline.population
        models: dict[str, Generator | Sampler] = {
            BASELINE: PlainSampler(baseline.generator, people.anchors),
            TILT: load_sampler(model, observed=observed),
        }
        scores[name] = _score(dataset, spec, models, folder.seed)
    return {
        "seed": folder.seed,
        **scores,
        "seconds": _seconds(model.path, folder.seed),
        "near": distances(dataset, folder.seed),
    }


def _score(
    dataset: TrajectoryDataset,
    spec: MetricSpec,
    models: Mapping[str, Generator | Sampler],
    seed: int,
) -> dict[str, Any]:
    samples = draw_groups(dataset, models, 1, seed, anchors="population")[0]
    real = real_groups(dataset, "test")
    scores = score_samples(dataset, spec, samples, real, seed)
    groups = {label: _chosen(each.average) for label, each in scores.items()}
    everybody = Trajectories.joined(list(real.values()))
    closed = {
        metric: gap_closed(groups[TILT][metric], groups[BASELINE][metric], groups[FLOOR][metric])
        for metric in METRICS
    }
    return {
        "groups": groups,
        "everybody": {
            label: _chosen(compare(spec, everybody, Trajectories.joined(list(each.values()))))
            for label, each in samples.items()
        },
        "gap_error": _chosen(scores[TILT].gap_error or {}),
        "closed": closed,
    }


def _chosen(values: Mapping[str, float]) -> dict[str, float]:
    return rounded({name: values[name] for name in METRICS if name in values})


def _seconds(path: Path, seed: int) -> dict[str, float]:
    """Return the seconds of synthetic people and of sampling trajectories for them."""
    model = load_model(path)
    start = time.perf_counter()
    people = model.population
    drawn = time.perf_counter()
    model.generator.sample(
        TIMED, np.zeros(TIMED, dtype=np.int64), people.anchors[:TIMED], seed=seed
    )
    end = time.perf_counter()
    return rounded({"anchors": drawn - start, f"{TIMED} trajectories": end - drawn})


def distances(dataset: TrajectoryDataset, seed: int) -> dict[str, Any]:
    """Count what is emitted near training, near held-out people and near a planted person."""
    train = dataset.anchors[dataset.split_people("train")]
    others = np.concatenate([dataset.split_people(name) for name in ("val", "test")])
    held_out = dataset.anchors[others]
    emitted = AnchorModel.fit(train).draw(EMITTED, seed).anchors
    planted = np.nanmax(train, axis=0) + PLANTED_KM / KM_PER_DEGREE
    alone = AnchorModel.fit(np.vstack([train, planted]))
    homes = alone.draw(EMITTED, seed).anchors[:, :2]
    result: dict[str, Any] = {
        "people": [len(train), len(held_out)],
        "cells": {"homes": len(alone.home_cells), "fewest_people": int(alone.home_people.min())},
        "planted": {"nearest_km": round(float(np.nanmin(haversine_km(homes, planted[:2]))), 1)},
    }
    for name, columns in (("home", [0, 1]), ("work", [2, 3]), ("pair", [0, 1, 2, 3])):
        for km in KM:
            near, elsewhere = (
                _near(emitted[:, columns], people[:, columns], km) for people in (train, held_out)
            )
            result[f"{name} within {1000 * km:.0f} m"] = _difference(near, elsewhere, seed)
    return result


def _near(emitted: Floats, people: Floats, km: float) -> Floats:
    """Return how many emitted places or pairs are near each person (people,)."""
    scale = np.resize([1.0, np.cos(np.radians(np.nanmean(people[:, 0])))], people.shape[1])
    known = [each[~np.isnan(each).any(1)] * scale * KM_PER_DEGREE for each in (emitted, people)]
    distinct = np.unique(known[0], axis=0)
    # The largest distance of home and of workplace: both are near.
    trees = [(cKDTree(distinct[:, k : k + 2]), k) for k in range(0, people.shape[1], 2)]
    near = [tree.query_ball_point(known[1][:, k : k + 2], km) for tree, k in trees]
    return np.array([len(set.intersection(*map(set, each))) for each in zip(*near, strict=True)])


def _difference(training: Floats, held_out: Floats, seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    means = [
        rng.choice(each, (DRAWS, len(each))).mean(1) if len(each) else np.zeros(DRAWS)
        for each in (training, held_out)
    ]
    low, high = np.quantile(means[0] - means[1], [0.05, 0.95])
    return {
        "training": round(float(np.mean(training)), 5),
        "held_out": round(float(np.mean(held_out)), 5),
        "interval": [round(float(low), 5), round(float(high), 5)],
        "contains_zero": bool(low <= 0 <= high),
    }
