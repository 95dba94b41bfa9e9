"""MODEL folders: phase 1 trains a generator on a dataset, phase 2 conditions a model on groups.

Training that was interrupted can be resumed.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mobatlas.config import DEFAULT_GENERATOR, build, merge, preset_values
from mobatlas.data.anchors import AnchorModel
from mobatlas.data.dataset import TrajectoryDataset
from mobatlas.errors import MobatlasError, log
from mobatlas.generators.protocol import Family, Generator, family_of
from mobatlas.generators.store import (
    ANCHOR_MODEL,
    COMPOSITION,
    CONFIG,
    KIND,
    SUPERVISION,
    VOCABULARY,
    Model,
    load_model,
    save_model,
)
from mobatlas.io.manifest import SNAPSHOTS, read_manifest
from mobatlas.io.output import checkpoint_folder, is_complete, refuse_overlap, resumable_folder
from mobatlas.regions.store import RegionsFolder
from mobatlas.supervision.evidence import Evidence, gather_evidence
from mobatlas.supervision.store import (
    CALIBRATION_FILES,
    CURVE,
    MEANS,
    save_calibration,
    save_curve,
    save_evidence,
    save_moments,
)
from mobatlas.supervision.strategies import (
    AUTO,
    STRATEGIES,
    RunStrategy,
    Strategy,
    StrategyOptions,
    Supervised,
    build_options,
    choose_strategy,
    config_class,
    get_strategy,
    runner_for,
)
from mobatlas.training.checkpoints import WEIGHTS
from mobatlas.training.loop import DEFAULT_EXECUTION, METRICS, Execution, Trainer
from mobatlas.training.resources import peak_gb

# The files that a MODEL folder may hold: after phase 1, and those that phase 2 adds.
PHASE1_FILES = (CONFIG, VOCABULARY, ANCHOR_MODEL, WEIGHTS, METRICS, SNAPSHOTS)
PHASE2_FILES = (COMPOSITION, MEANS, CURVE, *CALIBRATION_FILES)
MAX_TRUNCATED = 0.05  # share of training trajectories that may exceed the model without a warning
BY_USER = "chosen by the user"


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
    config = configure(family, preset, values or {})
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
        return save_training(folder, model, generator, opened, model.fit(opened, trainer))


def configure(family: Family, preset: str | None, values: Mapping[str, Any]) -> Any:
    """The configuration of a generator: a preset with the user's changes."""
    base = preset_values(preset, family.presets, "--preset {}")
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
    folder: Any,
    model: Generator,
    name: str,
    dataset: TrajectoryDataset,
    report: dict[str, Any],
    anchors: AnchorModel | None = None,
) -> dict[str, Any]:
    """Write a trained generator into its folder and return the report with the memory used."""
    report = report | {"peak_gb": round(peak_gb(), 3)}
    if folder is not None:
        save_model(folder.path, model, name, dataset, anchors)
        folder.details |= {
            "dataset": {"path": str(dataset.path.resolve()), "hash": dataset.manifest.content_hash},
            "report": report,
        }
        folder.unlisted.add(METRICS)
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


@dataclass(frozen=True)
class SuperviseOptions:
    """Options of phase 2.

    Parameters
    ----------
    strategy
        "auto", "tilt", "resample", "finetune", "strong", or one added with `register_strategy`.
    divergence
        For "finetune": "js", "tv", "kl" or "hellinger"; "js" if None.
    membership
        For "tilt": weight each person by the composition of the person's own region.
    from_scratch
        For "strong" and "tilt": train from new random weights, not from those of phase 1.
    preset
        For "finetune": "small" or "paper".
    values
        Options of the generator (`{"weighted_fit": {"steps": 500}}`) and of phase 2 (`visits`,
        `groups_explain`, `calibration`, and a section named like the strategy).

    Examples
    --------
    >>> SuperviseOptions(strategy="tilt", values={"calibration": {"pool": 8192}}).membership
    False
    """

    strategy: str = AUTO
    divergence: str | None = None
    membership: bool = False
    from_scratch: bool = False
    preset: str | None = None
    values: Mapping[str, Any] = field(default_factory=dict)


DEFAULT_OPTIONS = SuperviseOptions()


def supervise(
    model: Path | str,
    out: Path | str,
    regions: RegionsFolder | Path | str | None = None,
    options: SuperviseOptions = DEFAULT_OPTIONS,
    *,
    dataset: Path | str | None = None,
    seed: int = 0,
    execution: Execution = DEFAULT_EXECUTION,
) -> dict[str, Any]:
    """Phase 2: condition a model on groups so that its regions match the observed aggregates.

    Parameters
    ----------
    model
        A MODEL folder of phase 1; "finetune" also continues from a tilted one.
    out
        The MODEL folder to write.
    regions
        A REGIONS folder. The strategy "strong" learns from labels and needs none.
    options
        The strategy and its options.
    dataset
        The folder of the model's dataset, if it has moved.
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
    >>> tilt = SuperviseOptions(strategy="tilt")
    >>> supervise("model", "model-by-group", "regions", tilt)  # doctest: +SKIP
    """
    target = Path(out)
    if options.strategy != AUTO:
        get_strategy(options.strategy)  # an unknown name is refused before the model is loaded
    refuse_overlap(Path(model), target)
    loaded = load_model(Path(model), Path(dataset) if dataset else None)
    plan = _plan(loaded, options, regions, target, execution.quiet)
    opened = loaded.open_dataset()
    identity = Identity(plan.settings(opened), seed)
    if execution.resume and is_complete(target):
        return finished_report(target, identity)
    return plan.train(opened, target, identity, execution)


@dataclass(frozen=True)
class _Plan:
    """A supervision with checked options."""

    model: Model
    strategy: Strategy
    reason: str  # why this strategy
    run: RunStrategy
    options: StrategyOptions
    config: Any  # of the generator
    regions: RegionsFolder | None

    def settings(self, dataset: TrajectoryDataset) -> dict[str, Any]:
        """What identifies this supervision besides the seed."""
        options = self.options
        return {
            "generator": self.model.name,
            "dataset": dataset.manifest.content_hash,
            "model": self.model.manifest.content_hash,
            "strategy": self.strategy.name,
            "regions": self.regions and self.regions.manifest.content_hash,
            "membership": options.membership,
            "from_scratch": options.from_scratch,
            "supervise": options.config.model_dump(mode="json", include=self.strategy.sections),
            **self.config.model_dump(mode="json"),
        }

    def train(
        self, dataset: TrajectoryDataset, out: Path, identity: Identity, execution: Execution
    ) -> dict[str, Any]:
        """Gather the evidence, run the strategy and write the MODEL folder."""
        evidence = None
        facts: dict[str, Any] = {"strategy": self.strategy.name, "reason": self.reason}
        if self.regions is not None:
            evidence = gather_evidence(
                dataset,
                self.regions,
                visits=self.options.config.visits,
                groups_explain=self.options.config.groups_explain,
            )
            facts |= self._describe(evidence)
        if self.reason != BY_USER:
            log.info("Strategy %s: %s.", self.strategy.name, self.reason)
        with model_folder(out, identity, execution) as (folder, trainer):
            model = self.model
            base = family_of(model.name).load(
                model.path, self.config, dataset.vocabulary, model.generator.groups
            )
            result = self.run(base, dataset, evidence, trainer, self.options)
            if folder is not None:
                _save_supervision(folder, result, evidence, facts)
            anchors = None if evidence is None else evidence.anchor_model
            return save_training(
                folder, result.generator, model.name, dataset, facts | result.report, anchors
            )

    def _describe(self, evidence: Evidence) -> dict[str, Any]:
        """Facts about the evidence, for the report."""
        # Finetuning may continue from a model that was supervised with membership.
        earlier = self.model.manifest.details.get(SUPERVISION, {})
        return {
            "regions": {
                "path": str(evidence.source.resolve()),
                "hash": evidence.folder.manifest.content_hash,
            },
            "membership": self.options.membership or bool(earlier.get("membership", False)),
            "information": {
                name: round(share, 4) for name, share in evidence.information().items()
            },
            "informed": {
                name: round(share, 4) for name, share in evidence.recovery.evidence_by_map().items()
            },
            "evidence": [each.as_dict() for each in evidence.regions.evidence],
            "warnings": list(evidence.warnings),
        }


def _plan(
    model: Model,
    options: SuperviseOptions,
    regions: RegionsFolder | Path | str | None,
    out: Path,
    quiet: bool,
) -> _Plan:
    """Choose the strategy and check its options, before anything is written."""
    family = family_of(model.name)
    name = options.strategy
    reason = BY_USER
    if name == AUTO:
        name, reason = choose_strategy(model.generator, family)
    strategy = get_strategy(name)
    supervision_values, generator_values = split_options(options.values)
    run = runner_for(strategy, family, generator_values, from_scratch=options.from_scratch)
    checked = build_options(
        strategy,
        supervision_values,
        StrategyOptions(
            membership=options.membership, from_scratch=options.from_scratch, quiet=quiet
        ),
        preset=options.preset,
        divergence=options.divergence,
    )
    folder = _regions_folder(strategy, options.strategy, regions, out)
    _refuse_labelled(model, strategy)
    values = merge(model.generator.config.model_dump(), generator_values)
    config = build(family.config, values, "supervise")
    return _Plan(model, strategy, reason, run, checked, config, folder)


def split_options(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split options into those of phase 2 and those of the generator."""
    known = config_class().model_fields
    supervision = {key: value for key, value in values.items() if key in known}
    return supervision, {key: value for key, value in values.items() if key not in known}


def _regions_folder(
    strategy: Strategy, requested: str, regions: RegionsFolder | Path | str | None, out: Path
) -> RegionsFolder | None:
    """The REGIONS folder to learn from; None for a strategy that needs none."""
    if not strategy.needs_regions:
        if regions is not None:
            path = getattr(regions, "path", regions)
            log.warning("--strategy %s needs no regions; %s is not used.", requested, path)
        return None
    if regions is None:
        raise MobatlasError(
            f"--strategy {requested} needs REGIONS, a folder that `mobatlas regions` wrote; "
            "give it after MODEL"
        )
    folder = RegionsFolder.open(regions)
    refuse_overlap(folder.path, out)
    return folder


def _refuse_labelled(model: Model, strategy: Strategy) -> None:
    """Refuse to continue from a model that learnt groups from individual labels."""
    if not strategy.continues or model.generator.groups is None:
        return
    earlier = STRATEGIES.get(model.strategy or "")
    if earlier is None or earlier.reads_labels:
        raise MobatlasError(
            f"{model.path}: this model learnt groups from labels, so {strategy.name} cannot "
            "continue from it; give a model of phase 1 or a tilted one"
        )


def _save_supervision(
    folder: Any, result: Supervised, evidence: Evidence | None, facts: dict[str, Any]
) -> None:
    """Write the files that phase 2 adds to a MODEL folder."""
    folder.details[SUPERVISION] = facts | result.facts
    if evidence is not None:
        save_evidence(folder.path, evidence, result.tilt)
        folder.details[SUPERVISION] |= {
            "groups": evidence.groups.as_dict(),
            "mask": list(evidence.phi.mask),
        }
    if result.moments is not None:
        save_moments(folder.path, result.moments)
    if result.calibration is not None:
        save_calibration(folder.path, result.calibration)
    if result.curve is not None:
        save_curve(folder.path, result.curve)
