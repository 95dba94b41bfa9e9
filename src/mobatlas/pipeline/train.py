"""Phase 1 on disk: train a generator on a dataset and write a MODEL folder that can be resumed."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mobatlas.config import DEFAULT_GENERATOR, build, merge
from mobatlas.data.dataset import TrajectoryDataset
from mobatlas.errors import MobatlasError, suggestion
from mobatlas.generators.protocol import Family, Generator, family_of
from mobatlas.generators.store import (
    COMPOSITION,
    CONFIG,
    KIND,
    LENGTHS,
    REGION_ANCHORS,
    VOCABULARY,
    save_model,
)
from mobatlas.io.manifest import SNAPSHOTS, read_manifest
from mobatlas.io.output import checkpoint_folder, is_complete, refuse_overlap, resumable_folder
from mobatlas.progress import log
from mobatlas.supervision.store import CALIBRATION_FILES, CURVE, MEANS
from mobatlas.training.checkpoints import WEIGHTS
from mobatlas.training.loop import DEFAULT_EXECUTION, METRICS, Execution, Trainer
from mobatlas.training.resources import peak_gb

# The files that a MODEL folder may hold: after phase 1, and those that phase 2 adds.
PHASE1_FILES = (CONFIG, LENGTHS, VOCABULARY, WEIGHTS, METRICS, "tensorboard", SNAPSHOTS)
PHASE2_FILES = (COMPOSITION, REGION_ANCHORS, MEANS, CURVE, *CALIBRATION_FILES)
MAX_TRUNCATED = 0.05  # share of training trajectories that may exceed the model without a warning


@dataclass(frozen=True)
class Identity:
    """Configuration and seed of a MODEL folder; training resumes only if both are the same."""

    config: dict[str, Any]
    seed: int


def train(
    dataset: Path | str,
    out: Path | str,
    *,
    generator: str = DEFAULT_GENERATOR,
    preset: str | None = None,
    values: Mapping[str, Any] | None = None,
    seed: int = 0,
    execution: Execution = DEFAULT_EXECUTION,
) -> dict[str, Any]:
    """Phase 1: fit a generator without demographics and write it to a MODEL folder.

    Parameters
    ----------
    dataset
        A dataset folder, as `prepare` writes it.
    out
        The MODEL folder to write.
    generator
        The generator family: "autoregressive", "latent-diffusion", "vae", "point-process",
        "external", or one added with `register_generator`.
    preset
        "small" or "paper".
    values
        Options of the generator that change the preset, such as `{"training": {"steps": 500}}`.
    seed
        Random seed.
    execution
        Hardware, checkpoints and progress.

    Returns
    -------
    dict
        The training report, which the manifest also holds.

    Examples
    --------
    >>> train("dataset", "model", preset="small")  # doctest: +SKIP
    """
    target = Path(out)
    family = family_of(generator)
    config = _configure(family, preset, values or {})
    opened = TrajectoryDataset.open(dataset)
    refuse_overlap(opened.path, target)
    settings = {"generator": generator, "dataset": opened.manifest.content_hash}
    identity = Identity(settings | config.model_dump(mode="json"), seed)
    if execution.resume and is_complete(target):
        return finished_report(target, identity)
    with model_folder(target, identity, execution) as (folder, trainer):
        model = family.create(config, opened, seed)
        if family.trainable:
            _warn_of_truncation(model, opened)
        report = model.fit(opened, trainer)
        return save_training(folder, model, generator, opened, report)


def _configure(family: Family, preset: str | None, values: Mapping[str, Any]) -> Any:
    """The configuration of a generator: a preset with the user's changes."""
    if preset is not None and preset not in family.presets:
        raise MobatlasError(
            f"--preset {preset} does not exist{suggestion(preset, family.presets)} "
            f"(known: {', '.join(family.presets)})"
        )
    base = family.presets[preset] if preset else {}
    return build(family.config, merge(base, family.resolve(values, Path())), "train")


def _warn_of_truncation(model: Generator, dataset: TrajectoryDataset) -> None:
    """Warn if the model truncates many trajectories, and suggest a sufficient length."""
    lengths = dataset.lengths[dataset.split("train")]
    truncated = float(np.mean(lengths > model.max_length))
    if truncated > MAX_TRUNCATED:
        sufficient = int(np.quantile(lengths, 1 - MAX_TRUNCATED, method="higher"))
        log.warning(
            "%s: %.0f %% of the training trajectories have more than %d tokens; the model "
            "truncates them. Pass --set length=%d to truncate at most %.0f %%, or prepare shorter "
            "windows (window.days).",
            dataset.path,
            100 * truncated,
            model.max_length,
            sufficient,
            100 * MAX_TRUNCATED,
        )


@contextmanager
def model_folder(
    out: Path, identity: Identity, execution: Execution
) -> Iterator[tuple[Any, Trainer]]:
    """Open a resumable MODEL folder and its trainer; the folder is None in secondary processes."""
    is_main = os.environ.get("LOCAL_RANK", "0") == "0"  # it starts the other processes
    writer = resumable_folder(
        out,
        KIND,
        names=(*PHASE1_FILES, *PHASE2_FILES),
        seed=identity.seed,
        config=identity.config,
        resume=execution.resume,
        overwrite=execution.overwrite,
    )
    with writer if is_main else nullcontext() as folder:
        trainer = Trainer(
            checkpoint_folder(out), execution, seed=identity.seed, config=identity.config
        )
        yield folder, trainer


def save_training(
    folder: Any, model: Generator, name: str, dataset: TrajectoryDataset, report: dict[str, Any]
) -> dict[str, Any]:
    """Write a trained generator into its folder and return the report with the memory used."""
    report = report | {"peak_gb": round(peak_gb(), 3)}
    if folder is not None:
        save_model(folder.path, model, name, dataset)
        folder.details |= {
            "dataset": {"path": str(dataset.path.resolve()), "hash": dataset.manifest.content_hash},
            "report": report,
        }
        logs = folder.path.glob("tensorboard/*")
        folder.unlisted |= {METRICS} | {path.relative_to(folder.path).as_posix() for path in logs}
    return report


def finished_report(out: Path, identity: Identity) -> dict[str, Any]:
    """The report of a finished MODEL folder; one of another configuration or seed is refused."""
    manifest = read_manifest(out, KIND)
    if manifest.config != identity.config or manifest.seed != identity.seed:
        raise MobatlasError(
            f"{out}: training finished with another configuration or seed; "
            "pass --overwrite to train again"
        )
    return manifest.details["report"]
