"""Phase 2 on disk: condition a MODEL folder on groups and write another MODEL folder."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mobatlas.config import build, merge
from mobatlas.errors import MobatlasError
from mobatlas.generators.protocol import Family, family_of
from mobatlas.generators.store import SUPERVISION, Model, load_model
from mobatlas.io.manifest import read_manifest
from mobatlas.io.output import is_complete, refuse_overlap
from mobatlas.pipeline.train import (
    Identity,
    finished_report,
    model_folder,
    save_training,
)
from mobatlas.regions.store import KIND as REGIONS
from mobatlas.supervision.evidence import Evidence, gather_evidence
from mobatlas.supervision.store import save_calibration, save_curve, save_evidence
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
from mobatlas.training.loop import DEFAULT_EXECUTION, Execution

log = logging.getLogger("mobatlas")


@dataclass(frozen=True)
class SuperviseOptions:
    """What phase 2 does.

    Parameters
    ----------
    strategy
        "auto", "tilt", "resample", "finetune", "strong", or one added with `register_strategy`.
    divergence
        For "finetune": "js", "tv", "kl" or "hellinger"; "js" if None.
    membership
        For "tilt": start the weights from the composition of each person's own region.
    from_scratch
        For "strong" and "tilt": train the conditional part from new weights.
    preset
        For "finetune": "small" or "paper".
    values
        Options of the generator (`{"weighted_fit": {"steps": 500}}`) and of phase 2 (`visits`,
        `groups_explain`, `calibration`, and a section named like the strategy).
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
    regions: Path | str | None = None,
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
    source = Path(model)
    target = Path(out)
    if options.strategy != AUTO:
        get_strategy(options.strategy)
    refuse_overlap(source, target)
    loaded = load_model(source, Path(dataset) if dataset else None)
    plan = _plan(loaded, options, regions, target, execution.quiet)
    opened = loaded.open_dataset()
    identity = Identity(
        {
            "generator": loaded.name,
            "dataset": opened.manifest.content_hash,
            "model": loaded.manifest.content_hash,
            **plan.settings(),
        },
        seed,
    )
    if execution.resume and is_complete(target):
        return finished_report(target, identity)
    evidence = plan.evidence(opened)
    if options.strategy == AUTO:
        log.info("Strategy %s: %s.", plan.strategy.name, plan.reason)
    with model_folder(target, identity, execution) as (folder, trainer):
        base = plan.family.load(source, plan.config, opened.vocabulary, loaded.generator.groups)
        result = plan.run(base, opened, evidence, trainer, plan.options)
        facts = {"strategy": plan.strategy.name, "reason": plan.reason, **plan.describe(evidence)}
        if folder is not None:
            _save_supervision(folder, result, evidence, facts)
        return save_training(folder, result.generator, loaded.name, opened, facts | result.report)


@dataclass(frozen=True)
class _Plan:
    """One supervision with all choices made and checked."""

    strategy: Strategy
    reason: str
    run: RunStrategy
    options: StrategyOptions
    config: Any  # of the generator
    regions: Path | None
    family: Family
    base_membership: bool  # whether the model that finetuning continues from used membership

    def settings(self) -> dict[str, Any]:
        """What identifies this supervision besides the model and the dataset."""
        options = self.options
        return {
            "strategy": self.strategy.name,
            "regions": self.regions and read_manifest(self.regions, REGIONS).content_hash,
            "membership": options.membership,
            "from_scratch": options.from_scratch,
            "supervise": options.config.model_dump(mode="json", include=self.strategy.sections),
            **self.config.model_dump(mode="json"),
        }

    def evidence(self, dataset: Any) -> Evidence | None:
        """The evidence of the REGIONS folder, if the strategy uses one."""
        if self.regions is None:
            return None
        config = self.options.config
        return gather_evidence(
            dataset, self.regions, visits=config.visits, groups_explain=config.groups_explain
        )

    def describe(self, evidence: Evidence | None) -> dict[str, Any]:
        """What the report says about the evidence."""
        if evidence is None:
            return {}
        return {
            "regions": {"path": str(evidence.source.resolve()), "hash": evidence.content_hash},
            "membership": self.options.membership or self.base_membership,
            "information": {
                name: round(share, 4) for name, share in evidence.information().items()
            },
            "warnings": list(evidence.warnings),
        }


def _plan(
    loaded: Model, options: SuperviseOptions, regions: Path | str | None, out: Path, quiet: bool
) -> _Plan:
    """Choose the strategy and check its options, before anything is written."""
    family = family_of(loaded.name)
    if options.strategy == AUTO:
        name, reason = choose_strategy(loaded.generator, family)
    else:
        name = options.strategy
        reason = "chosen by the user"
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
    _refuse_labelled(loaded, strategy)
    config = loaded.generator.config.model_dump()
    earlier = loaded.manifest.details.get(SUPERVISION, {})
    return _Plan(
        strategy=strategy,
        reason=reason,
        run=run,
        options=checked,
        config=build(family.config, merge(config, generator_values), "supervise"),
        regions=folder,
        family=family,
        base_membership=bool(earlier.get("membership", False)),
    )


def check_options(generator: str, preset: str, values: Mapping[str, Any]) -> None:
    """Refuse wrong options of either phase before anything is written."""
    family = family_of(generator)
    supervision_values, generator_values = split_options(values)
    resolved = family.resolve(generator_values, Path())
    build(family.config, merge(family.presets[preset], resolved), "--set")
    build(config_class(), supervision_values, "--set")


def split_options(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split options into those of phase 2 and those of the generator."""
    known = config_class().model_fields
    supervision = {key: value for key, value in values.items() if key in known}
    generator = {key: value for key, value in values.items() if key not in known}
    return supervision, generator


def _regions_folder(
    strategy: Strategy, requested: str, regions: Path | str | None, out: Path
) -> Path | None:
    """The REGIONS folder to learn from; None for a strategy that needs none."""
    if not strategy.needs_regions:
        if regions is not None:
            log.warning(
                "--strategy %s needs no regions. Those in %s are not used.",
                requested,
                regions,
            )
        return None
    if regions is None:
        raise MobatlasError(
            f"--strategy {requested} needs REGIONS, a folder that `mobatlas regions` wrote; "
            "give it after MODEL"
        )
    refuse_overlap(Path(regions), out)
    return Path(regions)


def _refuse_labelled(model: Model, strategy: Strategy) -> None:
    """Refuse to continue from a model that learnt groups from individual labels."""
    if not strategy.continues or model.generator.groups is None:
        return
    earlier = STRATEGIES.get(model.strategy or "")
    if earlier is None or earlier.reads_labels:
        raise MobatlasError(
            f"{model.path}: this model learnt groups from labels, and {strategy.name} must not; "
            "give a model of phase 1 or a tilted one"
        )


def _save_supervision(
    folder: Any, result: Supervised, evidence: Evidence | None, facts: dict[str, Any]
) -> None:
    """Write what a MODEL folder of phase 2 holds besides the generator."""
    folder.details[SUPERVISION] = facts | result.facts
    if evidence is not None:
        save_evidence(folder.path, evidence, result.tilt)
        folder.details[SUPERVISION] |= {
            "groups": evidence.groups.as_dict(),
            "mask": list(evidence.phi.mask),
        }
    if result.calibration is not None:
        save_calibration(folder.path, result.calibration)
    if result.curve is not None:
        save_curve(folder.path, result.curve)
