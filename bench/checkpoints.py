"""Learning curves: the snapshots of a training, scored against held-out people on test metrics.

Labels are read here, after training; training itself never sees them. The snapshots come from
`mobatlas train` or `mobatlas supervise` with `--snapshot-steps N`.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from bench.floors import sampling_floor
from bench.runner import Cell, Command, Experiment, Runner
from bench.score_models import FLOOR, score_everybody, score_groups
from bench.summary import write_result
from mobatlas.data.dataset import TrajectoryDataset
from mobatlas.errors import MobatlasError
from mobatlas.evaluation.comparison import EVERYBODY, Scores
from mobatlas.evaluation.metrics import PAPER_METRICS, MetricSpec
from mobatlas.generators.store import Model, load_model
from mobatlas.io.manifest import SNAPSHOTS, file_hash
from mobatlas.training.checkpoints import (
    STEP_PATTERN,
    copy_strictly,
    named_tensors,
    read_weights,
)

METRICS = (*PAPER_METRICS, "poi_all", "flows", "length")
MODEL = "model"
SPLITS = ("test", "val")  # held-out people


def run(
    model: Path, experiment: Experiment, *, dataset: Path | None = None, split: str = "test"
) -> dict[str, Any]:
    """Score every snapshot of a model and write learning_curve.json.

    Samples have the homes of training people of their group, and as many trajectories as the
    split has. A cell is the score of one snapshot, so that an interrupted run resumes.
    """
    if split not in SPLITS:
        raise MobatlasError(f"--split {split}: choose test or val")
    loaded = load_model(model, dataset)
    stage, snapshots = _snapshots(loaded)
    opened = loaded.open_dataset()
    inputs = {"dataset": opened.manifest.content_hash, "split": split, "metrics": METRICS}
    cells = [
        Cell(
            seed,
            f"step-{step:08d}",
            inputs | {"snapshot": file_hash(path)},
            partial(_score, loaded, path, opened, seed, split),
            label=f"step {step} of the {stage}",
        )
        for seed in experiment.numbers
        for step, path in snapshots.items()
    ]
    options = {"--split": [] if split == "test" else [split]}
    command = Command("checkpoints", options, [model.name])
    results = Runner(experiment, "learning curve", command).run(cells)
    steps = [step for _ in experiment.numbers for step in snapshots]
    result = {
        **command.header(experiment),
        "model": model.name,
        "stage": stage,
        "measure": f"JSD in bits against {split} people, average over groups and by group",
        "rows": [
            {"step": step, **{name: cell[name] for name in ("seed", MODEL, FLOOR)}}
            for step, cell in zip(steps, results, strict=True)
        ],
    }
    write_result(experiment.out, "learning_curve", result)
    return result


def _snapshots(model: Model) -> tuple[str, dict[int, Path]]:
    """The stage of the sampling network that has snapshots, and its snapshots by step."""
    names = {path.stem[:-9] for path in (model.path / SNAPSHOTS).glob("*.safetensors")}
    names -= {"autoencoder"}  # not the network that samples
    if not names:
        raise MobatlasError(
            f"{model.path}: this model has no snapshots; train it with --snapshot-steps N"
        )
    stage = min(names)
    return stage, list_snapshots(model.path, stage)


def _score(
    model: Model, path: Path, dataset: TrajectoryDataset, seed: int, split: str
) -> dict[str, Any]:
    generator: Any = model.generator
    load_snapshot(path, generator.network)
    spec = MetricSpec.of(dataset)
    if generator.groups is None or dataset.groups is None:
        floor = sampling_floor(dataset, spec, split=split, seed=seed).everybody
        scores = {MODEL: score_everybody(dataset, spec, generator, seed, split), FLOOR: floor}
    else:
        scores = score_groups(dataset, spec, {MODEL: generator}, seed, split)
    return {name: _curve_point(scores[name]) for name in (MODEL, FLOOR)}


def _curve_point(scores: Scores) -> dict[str, Any]:
    point: dict[str, Any] = {
        metric: {
            "jsd": round(scores.average[metric], 5),
            "excess": round(scores.excess[metric], 5),
            "standard_error": round(scores.standard_error[metric], 5),
        }
        for metric in METRICS
    }
    if EVERYBODY not in scores.groups:
        point["groups"] = {
            name: {metric: round(values[metric], 5) for metric in METRICS}
            for name, values in scores.groups.items()
        }
    return point


def list_snapshots(folder: Path, stage: str) -> dict[int, Path]:
    """The snapshots of a stage in the folder of a model, by step."""
    paths = sorted((folder / SNAPSHOTS).glob(f"{stage}-{STEP_PATTERN}.safetensors"))
    return {int(path.stem[-8:]): path for path in paths}


def load_snapshot(path: Path, network: nn.Module) -> None:
    """Read a snapshot into the network that it was written from."""
    copy_strictly(path, read_weights(path), named_tensors(network), "it belongs to another model")
