"""Training as a user asks for it: a dataset becomes a MODEL folder, a MODEL folder another one; both can be resumed."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mobatlas.artifacts import is_complete, read_manifest, refuse_overlap, resumable_folder, unfinished
from mobatlas.config import build, merge
from mobatlas.data.dataset import TrajectoryDataset
from mobatlas.errors import MobatlasError, suggestion
from mobatlas.generators.base import Generator, family_of
from mobatlas.generators.folder import KIND, load_model, save_model
from mobatlas.generators.training import Trainer
from mobatlas.resources import peak_gb
from mobatlas.supervision.strong import teach_labels

STRATEGIES = ("strong",)


@dataclass(frozen=True)
class Hardware:
    """Where to train; the defaults find out."""

    accelerator: str = "auto"  # cpu, cuda or mps
    devices: int = 1  # processes, one to a device
    precision: str = "auto"
    checkpoint_seconds: float = 30.0  # between checkpoints, at most


def train(
    dataset: Path | str,
    out: Path | str,
    *,
    generator: str = "latent-diffusion",
    preset: str | None = None,
    values: Mapping[str, Any] | None = None,
    seed: int = 0,
    resume: bool = False,
    overwrite: bool = False,
    hardware: Hardware = Hardware(),  # noqa: B008 (it is immutable)
    tensorboard: bool = False,
    quiet: bool = False,
) -> dict[str, Any]:
    """Phase 1: fit a generator without demographics; returns the report that the manifest keeps."""
    source, target = Path(dataset), Path(out)
    family = family_of(generator)
    if preset is not None and preset not in family.presets:
        raise MobatlasError(
            f"--preset {preset} does not exist{suggestion(preset, family.presets)} (known: {', '.join(family.presets)})"
        )
    config = build(family.config, merge(family.presets[preset] if preset else {}, values or {}), "train")
    opened = TrajectoryDataset.open(source)
    refuse_overlap(source, target)
    identity = {
        "generator": generator,
        "dataset": opened.manifest.content_hash,
        **config.model_dump(mode="json"),
    }
    if resume and is_complete(target):
        return _finished(target, identity, seed)
    with _model_folder(target, identity, seed, resume, overwrite, hardware, tensorboard, quiet) as (folder, trainer):
        model = family.create(config, opened, seed)
        report = model.fit(opened, trainer)
        return _keep(folder, model, generator, opened, trainer, report)


def supervise(
    model: Path | str,
    out: Path | str,
    *,
    strategy: str = "strong",
    from_scratch: bool = False,
    values: Mapping[str, Any] | None = None,
    dataset: Path | str | None = None,
    seed: int = 0,
    resume: bool = False,
    overwrite: bool = False,
    hardware: Hardware = Hardware(),  # noqa: B008 (it is immutable)
    tensorboard: bool = False,
    quiet: bool = False,
) -> dict[str, Any]:
    """Give a model of phase 1 groups; `strong` learns them from the dataset's labels, as an upper bound."""
    if strategy not in STRATEGIES:
        raise MobatlasError(
            f"--strategy {strategy} does not exist{suggestion(strategy, STRATEGIES)} (known: {', '.join(STRATEGIES)})"
        )
    source, target = Path(model), Path(out)
    refuse_overlap(source, target)
    loaded = load_model(source, Path(dataset) if dataset else None)
    opened = loaded.open_dataset()
    family = family_of(loaded.name)
    config = build(family.config, merge(loaded.generator.config.model_dump(), values or {}), "supervise")
    identity = {
        "generator": loaded.name,
        "dataset": opened.manifest.content_hash,
        "model": loaded.manifest.content_hash,
        "strategy": strategy,
        "from_scratch": from_scratch,
        **config.model_dump(mode="json"),
    }
    if resume and is_complete(target):
        return _finished(target, identity, seed)
    with _model_folder(target, identity, seed, resume, overwrite, hardware, tensorboard, quiet) as (folder, trainer):
        base = family.load(source, config, opened.vocabulary, loaded.generator.groups)
        taught, report = teach_labels(base, opened, trainer, from_scratch=from_scratch)
        return _keep(folder, taught, loaded.name, opened, trainer, {"strategy": strategy, "strong": report})


@contextmanager
def _model_folder(
    out: Path,
    identity: dict[str, Any],
    seed: int,
    resume: bool,
    overwrite: bool,
    hardware: Hardware,
    tensorboard: bool,
    quiet: bool,
) -> Iterator[tuple[Any, Trainer]]:
    first = os.environ.get("LOCAL_RANK", "0") == "0"  # the other processes of this run are started by the first
    manner: dict[str, Any] = {"seed": seed, "config": identity, "resume": resume, "overwrite": overwrite}
    with resumable_folder(out, KIND, **manner) if first else nullcontext() as folder:
        trainer = Trainer(
            unfinished(out),
            seed=seed,
            config=identity,
            resume=resume,
            accelerator=hardware.accelerator,
            devices=hardware.devices,
            precision=hardware.precision,
            checkpoint_seconds=hardware.checkpoint_seconds,
            tensorboard=tensorboard,
            quiet=quiet,
        )
        yield folder, trainer


def _keep(
    folder: Any, model: Generator, name: str, dataset: TrajectoryDataset, trainer: Trainer, report: dict[str, Any]
) -> dict[str, Any]:
    report = report | {"peak_gb": round(peak_gb(), 3)}
    if folder is not None:
        save_model(folder.path, model, name, dataset)
        folder.details |= {
            "dataset": {"path": str(dataset.path.resolve()), "hash": dataset.manifest.content_hash},
            "report": report,
        }
        folder.unlisted |= {"metrics.jsonl"} | {
            path.relative_to(folder.path).as_posix() for path in folder.path.glob("tensorboard/*")
        }
    return report


def _finished(out: Path, identity: dict[str, Any], seed: int) -> dict[str, Any]:
    manifest = read_manifest(out, KIND)
    if manifest.config != identity or manifest.seed != seed:
        raise MobatlasError(
            f"{out}: is finished, with another configuration or seed; pass --overwrite to train it anew"
        )
    report: dict[str, Any] = manifest.details["report"]
    return report
