"""Training as a user asks for it: a dataset becomes a MODEL folder, a MODEL folder another one; both can be resumed."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mobatlas.config import build, merge
from mobatlas.data.dataset import TrajectoryDataset
from mobatlas.errors import MobatlasError, suggestion
from mobatlas.generators.protocol import Generator, family_of
from mobatlas.generators.store import (
    COMPOSITION,
    CONFIG,
    KIND,
    LENGTHS,
    REGION_ANCHORS,
    SUPERVISION,
    VOCABULARY,
    Model,
    load_model,
    save_model,
)
from mobatlas.io.manifest import read_manifest
from mobatlas.io.output import is_complete, refuse_overlap, resumable_folder, unfinished
from mobatlas.regions.store import KIND as REGIONS
from mobatlas.supervision.evidence import Evidence, gather_evidence
from mobatlas.supervision.resample import FILES as CALIBRATION
from mobatlas.supervision.resample import save_calibration
from mobatlas.supervision.store import CURVE, MEANS, keep_curve, keep_evidence
from mobatlas.supervision.strategies import (
    AUTO,
    SuperviseConfig,
    Supervised,
    build_options,
    choose_strategy,
    sections_of,
    strategy_named,
    way_of,
)
from mobatlas.training.loop import METRICS, Trainer
from mobatlas.training.resources import peak_gb
from mobatlas.training.weights import WEIGHTS

log = logging.getLogger("mobatlas")
TRAINED = (
    CONFIG,
    LENGTHS,
    VOCABULARY,
    WEIGHTS,
    METRICS,
    "tensorboard",
)  # what a MODEL folder holds
CUT = 0.05  # of training trajectories that may be longer than the model without a word
SUPERVISED = (
    COMPOSITION,
    REGION_ANCHORS,
    MEANS,
    CURVE,
    *CALIBRATION,
)  # and what one of phase 2 may hold beside


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
    hardware: Hardware = Hardware(),  # noqa: B008
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
    asked = family.resolve(values or {}, Path())
    config = build(family.config, merge(family.presets[preset] if preset else {}, asked), "train")
    opened = TrajectoryDataset.open(source)
    refuse_overlap(source, target)
    identity = {
        "generator": generator,
        "dataset": opened.manifest.content_hash,
        **config.model_dump(mode="json"),
    }
    if resume and is_complete(target):
        return _finished(target, identity, seed)
    with _model_folder(target, identity, seed, resume, overwrite, hardware, tensorboard, quiet) as (
        folder,
        trainer,
    ):
        model = family.create(config, opened, seed)
        if family.trainable:
            _warn_of_cuts(model, opened)
        report = model.fit(opened, trainer)
        return _keep(folder, model, generator, opened, trainer, report)


def _warn_of_cuts(model: Generator, dataset: TrajectoryDataset) -> None:
    """Where more than a few trajectories are longer than the model; says before training which length would do."""
    lengths = dataset.lengths[dataset.split("train")]
    cut = float(np.mean(lengths > model.max_length))
    if cut > CUT:
        longest = int(np.quantile(lengths, 1 - CUT, method="higher"))
        log.warning(
            "%s: %.0f %% of the training trajectories are longer than the model's %d tokens and are cut off there; "
            "--set length=%d keeps all but %.0f %% whole, or prepare shorter windows (window.days)",
            *(dataset.path, 100 * cut, model.max_length, longest, 100 * CUT),
        )


def supervise(
    model: Path | str,
    out: Path | str,
    regions: Path | str | None = None,
    *,
    strategy: str = AUTO,
    divergence: str | None = None,
    membership: bool = False,
    from_scratch: bool = False,
    preset: str | None = None,
    values: Mapping[str, Any] | None = None,
    dataset: Path | str | None = None,
    seed: int = 0,
    resume: bool = False,
    overwrite: bool = False,
    hardware: Hardware = Hardware(),  # noqa: B008
    tensorboard: bool = False,
    quiet: bool = False,
) -> dict[str, Any]:
    """Phase 2: give a model groups, as a REGIONS folder tells them; returns the report that the manifest keeps.

    `strong` needs no regions: it learns labels, an upper bound. `values` are those of the generator (`weighted_fit.steps`) and of
    `SuperviseConfig` (`tilt`, `calibration`, `finetune`, `visits`, `groups_explain`).
    """
    source, target = Path(model), Path(out)
    if strategy != AUTO:
        strategy_named(strategy)
    refuse_overlap(source, target)
    loaded = load_model(source, Path(dataset) if dataset else None)
    family = family_of(loaded.name)
    name, reason = (
        choose_strategy(loaded.generator, family)
        if strategy == AUTO
        else (strategy, "it was asked for")
    )
    sections, rest = divided(values or {})
    way = way_of(name, family, rest, from_scratch=from_scratch)
    given: dict[str, Any] = {
        "divergence": divergence,
        "membership": membership,
        "from_scratch": from_scratch,
    }
    options = build_options(name, sections, preset=preset, quiet=quiet, **given)
    folder_of_regions = _regions_for(name, strategy, regions, target)
    _refuse_labelled(loaded, name)
    opened = loaded.open_dataset()
    config = build(family.config, merge(loaded.generator.config.model_dump(), rest), "supervise")
    identity = {
        "generator": loaded.name,
        "dataset": opened.manifest.content_hash,
        "model": loaded.manifest.content_hash,
        "strategy": name,
        "regions": folder_of_regions and read_manifest(folder_of_regions, REGIONS).content_hash,
        "membership": membership,
        "from_scratch": from_scratch,
        "supervise": options.config.model_dump(mode="json", include=sections_of(name)),
        **config.model_dump(mode="json"),
    }
    if resume and is_complete(target):
        return _finished(target, identity, seed)
    known = {name: getattr(options.config, name) for name in ("visits", "groups_explain")}
    evidence = gather_evidence(opened, folder_of_regions, **known) if folder_of_regions else None
    if strategy == AUTO:
        log.info("strategy %s: %s", name, reason)
    with _model_folder(target, identity, seed, resume, overwrite, hardware, tensorboard, quiet) as (
        folder,
        trainer,
    ):
        base = family.load(source, config, opened.vocabulary, loaded.generator.groups)
        made = way(base, opened, evidence, trainer, options)
        before = loaded.manifest.details.get(SUPERVISION, {}).get(
            "membership", False
        )  # of the tilt that finetune goes on from
        said = {"strategy": name, "reason": reason, **_told(evidence, membership or before)}
        if folder is not None:
            _keep_supervision(folder, made, evidence, said)
        return _keep(folder, made.generator, loaded.name, opened, trainer, said | made.report)


def check_options(generator: str, preset: str, values: Mapping[str, Any]) -> None:
    """Refuse values of either phase that are wrong, before anything is made."""
    family, (own, theirs) = family_of(generator), divided(values)
    build(family.config, merge(family.presets[preset], family.resolve(theirs, Path())), "--set")
    build(SuperviseConfig, own, "--set")


def divided(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The values of phase 2, and those of the generator."""
    own = SuperviseConfig.model_fields
    return {k: v for k, v in values.items() if k in own}, {
        k: v for k, v in values.items() if k not in own
    }


def _regions_for(name: str, strategy: str, regions: Path | str | None, out: Path) -> Path | None:
    """The folder to learn from, None for a strategy that needs none; `name` is what the one asked for came to."""
    if not strategy_named(name).needs_regions:
        if regions is not None:
            log.warning(
                "--strategy %s learns from labels, so REGIONS %s is not read", strategy, regions
            )
        return None
    if regions is None:
        raise MobatlasError(
            f"--strategy {strategy} needs REGIONS, the folder that `mobatlas regions` wrote, after MODEL; give it"
        )
    refuse_overlap(Path(regions), out)
    return Path(regions)


def _refuse_labelled(model: Model, strategy: str) -> None:
    """Finetuning may begin from a model of groups, unless labels of individuals taught it them."""
    if (
        strategy == "finetune"
        and model.generator.groups is not None
        and model.strategy not in ("tilt", "finetune")
    ):
        raise MobatlasError(
            f"{model.path}: finetune goes on from a model of phase 1 or a tilted one, and this one learnt groups from labels"
        )


def _told(evidence: Evidence | None, membership: bool) -> dict[str, Any]:
    """What there is to say of the regions."""
    if evidence is None:
        return {}
    return {
        "regions": {"path": str(evidence.source.resolve()), "hash": evidence.content_hash},
        "membership": membership,
        "information": {name: round(share, 4) for name, share in evidence.information().items()},
        "warnings": list(evidence.warnings),
    }


def _keep_supervision(
    folder: Any, made: Supervised, evidence: Evidence | None, said: dict[str, Any]
) -> None:
    """What the folder holds beside the generator."""
    folder.details[SUPERVISION] = said | made.facts
    if evidence is not None:
        keep_evidence(folder.path, evidence, made.tilt)
        folder.details[SUPERVISION] |= {
            "groups": evidence.groups.as_dict(),
            "mask": list(evidence.phi.mask),
        }
    if made.calibration is not None:
        save_calibration(folder.path, made.calibration)
    if made.curve is not None:
        keep_curve(folder.path, made.curve)


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
    first = (
        os.environ.get("LOCAL_RANK", "0") == "0"
    )  # the other processes of this run are started by the first
    manner: dict[str, Any] = {
        "seed": seed,
        "config": identity,
        "resume": resume,
        "overwrite": overwrite,
    }
    with (
        resumable_folder(out, KIND, names=(*TRAINED, *SUPERVISED), **manner)
        if first
        else nullcontext() as folder
    ):
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
    folder: Any,
    model: Generator,
    name: str,
    dataset: TrajectoryDataset,
    trainer: Trainer,
    report: dict[str, Any],
) -> dict[str, Any]:
    report = report | {"peak_gb": round(peak_gb(), 3)}
    if folder is not None:
        save_model(folder.path, model, name, dataset)
        folder.details |= {
            "dataset": {"path": str(dataset.path.resolve()), "hash": dataset.manifest.content_hash},
            "report": report,
        }
        folder.unlisted |= {METRICS} | {
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
