"""The strategies of phase 2: each turns a model and evidence into a model of groups.

Only `strong` reads labels of individuals. Add a strategy with `register_strategy`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from pydantic import Field, create_model

from mobatlas.config import Section, build, merge, preset_values
from mobatlas.data.dataset import TrajectoryDataset
from mobatlas.data.types import Floats
from mobatlas.errors import MobatlasError, log, refuse_unknown
from mobatlas.generators.protocol import Draw, Examples, Family, Generator, has_times
from mobatlas.progress import track
from mobatlas.regions.recovery.recover import GROUPS_EXPLAIN
from mobatlas.registry import Registry
from mobatlas.supervision.calibration import (
    Calibration,
    CalibrationConfig,
    PlainSampler,
    fit_calibration,
)
from mobatlas.supervision.evidence import Evidence, Moments, labelled_moments
from mobatlas.supervision.finetune import PRESETS, FinetuneConfig, finetune
from mobatlas.supervision.tilt import GroupTilts, TiltConfig, fit_group_tilts, fit_weighted
from mobatlas.training.loop import Trainer

AUTO = "auto"
STRONG = "strong"


class SuperviseConfig(Section):
    """Options that strategies share; each strategy may add a section of its own name."""

    # Tilts keep the spread of the number of visits, see evidence.Visits. Without it they are the
    # paper's I-projection, which meets the aggregates and nothing else.
    visits: bool = True
    # Upper bound of differences between groups, relative to those between people; see recover.
    groups_explain: float = Field(GROUPS_EXPLAIN, gt=0, le=1e6)
    calibration: CalibrationConfig = CalibrationConfig()


class StrongConfig(Section):
    """Options of `strong`."""

    # Feature maps whose labelled means a calibration reaches; none: no calibration.
    features: tuple[str, ...] = ("poi",)
    mask: tuple[str, ...] = ()  # HOME, WORK, OTHER: bins to leave out of these means


@dataclass(frozen=True)
class StrategyOptions:
    """The checked options of one supervision.

    Parameters
    ----------
    config
        Options that strategies share.
    section
        The strategy's own options, an instance of `Strategy.config`; None if it has none.
    membership
        Whether each person is weighted by the composition of the person's own region.
    from_scratch
        Whether training starts from new random weights, not from those of phase 1.
    quiet
        Print log lines instead of progress bars.

    Examples
    --------
    >>> StrategyOptions(membership=True).config.visits
    True
    """

    config: SuperviseConfig = field(default_factory=SuperviseConfig)
    section: Any = None
    membership: bool = False
    from_scratch: bool = False
    quiet: bool = False


@dataclass(frozen=True)
class Supervised:
    """The result of a strategy: a generator, and the other contents of its MODEL folder.

    Parameters
    ----------
    generator
        The generator. If it has no groups, samples are selected by `calibration`.
    report
        Entries of the training report.
    calibration
        The calibration to save.
    tilt
        lambda (groups, features) over training people, saved with the estimated means.
    curve
        The learning curve, one row per validation.
    facts
        Entries for the manifest.
    moments
        The means behind the calibration of a strategy that needs no regions.

    Examples
    --------
    >>> Supervised(fitted, {"loss": 2.1})  # doctest: +SKIP
    """

    generator: Generator
    report: dict[str, Any]
    calibration: Calibration | None = None
    tilt: Floats | None = None
    curve: Sequence[Mapping[str, Any]] | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    moments: Moments | None = None


# The third argument is None for a strategy that needs no regions.
RunStrategy = Callable[[Generator, TrajectoryDataset, Any, Trainer, StrategyOptions], Supervised]


@dataclass(frozen=True)
class Strategy:
    """A strategy of phase 2.

    Parameters
    ----------
    name
        The value of `--strategy`.
    run
        Called with the generator of phase 1, the dataset, the evidence, the trainer and the
        options; returns a `Supervised`.
    run_untrainable
        The same for a generator that cannot be trained; None if the strategy needs training.
    config
        Options of the strategy, set as `--set NAME.key=value`. A field `divergence` is also set by
        `--divergence`.
    presets
        Values of `config` by the name of a preset, for `--preset`.
    flags
        The flags that it accepts: "--membership", "--from-scratch".
    needs_regions
        Whether it learns from a REGIONS folder.
    reads_labels
        Whether it learns from labels of individuals.
    continues
        Whether it also accepts a model that already has groups.

    Examples
    --------
    >>> def run(model, dataset, evidence, trainer, options):
    ...     return Supervised(model.with_groups(evidence.groups, trainer.seed), {})
    >>> register_strategy(Strategy("untrained", run))  # doctest: +SKIP
    """

    name: str
    run: RunStrategy
    run_untrainable: RunStrategy | None = None
    config: type[Section] | None = None
    presets: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    flags: frozenset[str] = frozenset()
    needs_regions: bool = True
    reads_labels: bool = False
    continues: bool = False

    @property
    def sections(self) -> set[str]:
        """The sections of the configuration that it uses."""
        shared = {"visits", "groups_explain"} if self.needs_regions else set()
        return shared | ({self.name} if self.config is not None else set()) | {"calibration"}

    @property
    def options(self) -> frozenset[str]:
        """The options of the command line that it accepts."""
        fields = self.config.model_fields if self.config is not None else {}
        options = {"--divergence"} & {f"--{name}" for name in fields}
        options |= {"--preset"} if self.presets else set()
        return self.flags | options | {f"--set {section}" for section in self.sections}


STRATEGIES = Registry[Strategy]("strategy", "--strategy")


def register_strategy(strategy: Strategy) -> None:
    """Add a strategy of phase 2; a name that exists is refused.

    Parameters
    ----------
    strategy
        The strategy; `Strategy` shows how to write `run`.

    Examples
    --------
    >>> register_strategy(Strategy("untrained", run))  # doctest: +SKIP
    """
    if strategy.name == AUTO:
        raise MobatlasError(f"strategy '{AUTO}' exists already; choose another name")
    STRATEGIES.register(strategy.name, strategy)


def get_strategy(name: str) -> Strategy:
    """The strategy of that name; an unknown name is refused."""
    refuse_unknown(f"--strategy {name}", name, (AUTO, *STRATEGIES))
    return STRATEGIES[name]


def choose_strategy(model: Generator, family: Family) -> tuple[str, str]:
    """The strategy that `auto` stands for, and the reason."""
    if model.groups is not None:
        raise MobatlasError(
            "--strategy auto: this model already has groups; pass a model of phase 1, "
            "or pass --strategy finetune to continue from it"
        )
    if not family.trainable:
        return (
            "resample",
            f"the generator {family.name} cannot be trained, so samples are selected by group",
        )
    return "tilt", "the default for generators that can be trained"


def runner_for(
    strategy: Strategy, family: Family, values: Mapping[str, Any], *, from_scratch: bool = False
) -> RunStrategy:
    """Return the function that runs a strategy with a family.

    `values` are options of the generator; a family that cannot be trained refuses them.
    """
    if family.trainable:
        return strategy.run
    if strategy.run_untrainable is None:
        able = " or ".join(each.name for each in STRATEGIES.values() if each.run_untrainable)
        raise MobatlasError(
            f"--strategy {strategy.name} trains the generator, and {family.name} cannot be "
            f"trained; pass --strategy {able}, which select among its samples"
        )
    unused = ["--from-scratch"] if from_scratch else [f"--set {key}" for key in values]
    if unused:
        raise MobatlasError(
            f"{unused[0]}: the generator {family.name} cannot be trained, so this has no effect; "
            "leave it out"
        )
    return strategy.run_untrainable


def config_class() -> type[SuperviseConfig]:
    """`SuperviseConfig` with the sections of all registered strategies."""
    sections: dict[str, Any] = {
        each.name: (each.config, each.config()) for each in STRATEGIES.values() if each.config
    }
    return create_model("SuperviseConfig", __base__=SuperviseConfig, **sections)


def build_options(
    strategy: Strategy,
    values: Mapping[str, Any],
    options: StrategyOptions,
    *,
    preset: str | None = None,
    divergence: str | None = None,
) -> StrategyOptions:
    """Check the options of a strategy and add its configuration to `options`.

    `values` are sections of `config_class`. Options that the strategy does not accept are refused.
    """
    present = {
        "--preset": preset is not None,
        "--divergence": divergence is not None,
        "--membership": options.membership,
        "--from-scratch": options.from_scratch,
        **{f"--set {section}": True for section in values},
    }
    for option, is_set in present.items():
        if is_set and option not in strategy.options:
            others = [each.name for each in STRATEGIES.values() if option in each.options]
            raise MobatlasError(
                f"{option} is for the strategy {' and '.join(others)}, not {strategy.name}; "
                "leave it out"
            )
    base = (
        {strategy.name: preset_values(preset, strategy.presets, "--preset {}")}
        if preset is not None
        else {}
    )
    chosen = {strategy.name: {"divergence": divergence}} if divergence else {}
    config = build(config_class(), merge(base, values, chosen), "supervise")
    return replace(options, config=config, section=getattr(config, strategy.name, None))


def _run_tilt(
    model: Generator,
    dataset: TrajectoryDataset,
    evidence: Evidence,
    trainer: Trainer,
    options: StrategyOptions,
) -> Supervised:
    """Weight training people, train on them, calibrate."""
    tilts = fit_group_tilts(evidence, dataset, options.section, membership=options.membership)
    conditioned, metrics = fit_weighted(
        model, dataset, evidence, tilts, trainer, from_scratch=options.from_scratch
    )
    moments = evidence.moments_by(options.membership)
    calibration = None
    if has_times(conditioned) or len(moments.phi.timed_maps) < len(moments.phi.maps):
        calibration = _calibrate(conditioned, moments, trainer, options)
    else:
        log.warning(
            "%s: samples of this model have no times, so there is no calibration", evidence.source
        )
    return _tilt_result(conditioned, tilts, evidence, metrics, calibration)


def _run_tilt_untrainable(
    model: Generator,
    dataset: TrajectoryDataset,
    evidence: Evidence,
    trainer: Trainer,
    options: StrategyOptions,
) -> Supervised:
    """Weight training people, and select samples with the means that these weights reach."""
    model.to(trainer.device.type)
    tilts = fit_group_tilts(evidence, dataset, options.section, membership=options.membership)
    moments = evidence.moments_by(options.membership)
    reached = replace(moments, means=moments.means - tilts.unmet)
    return _tilt_result(model, tilts, evidence, {}, _calibrate(model, reached, trainer, options))


def _tilt_result(
    model: Generator,
    tilts: GroupTilts,
    evidence: Evidence,
    metrics: Mapping[str, float],
    calibration: Calibration | None,
) -> Supervised:
    report = tilts.report(evidence)
    rows = report["groups"].items()
    return Supervised(
        model,
        {"tilt": {**metrics, **report}, **_calibration_report(calibration)},
        calibration=calibration,
        tilt=np.stack([tilt.coefficients for tilt in tilts.tilts]),
        facts={"effective_sample_size": {name: row["effective_sample_size"] for name, row in rows}},
    )


def _run_resample(
    model: Generator,
    dataset: TrajectoryDataset,
    evidence: Evidence,
    trainer: Trainer,
    options: StrategyOptions,
) -> Supervised:
    """Calibrate the baseline; nothing is trained."""
    if model.groups is not None:
        raise MobatlasError(
            "--strategy resample: this model already has groups; pass a model of phase 1"
        )
    model.to(trainer.device.type)
    calibration = _calibrate(model, evidence.moments, trainer, options)
    facts = {}
    if calibration is not None:
        rows = zip(calibration.groups.names, calibration.population, strict=True)
        sizes = {name: round(row.effective_sample_size * calibration.pool, 1) for name, row in rows}
        facts = {"effective_sample_size": sizes}
    return Supervised(model, _calibration_report(calibration), calibration=calibration, facts=facts)


def _calibrate(
    model: Generator, moments: Moments, trainer: Trainer, options: StrategyOptions
) -> Calibration | None:
    """Calibrate in the main process; None in the others."""
    if trainer.share.rank:
        return None
    with track("calibrating", 100, options.quiet) as tracker:
        return fit_calibration(model, moments, options.config.calibration, trainer.seed, tracker)


def _calibration_report(calibration: Calibration | None) -> dict[str, Any]:
    return {} if calibration is None else {"calibration": calibration.report()}


def _run_finetune(
    model: Generator,
    dataset: TrajectoryDataset,
    evidence: Evidence,
    trainer: Trainer,
    options: StrategyOptions,
) -> Supervised:
    """The paper's phase 2, from phase 1 or from a tilted model."""
    config: FinetuneConfig = options.section
    moments = evidence.aggregate_moments

    def distances(current: Generator) -> dict[str, float]:
        """JSD between samples of each group and its estimated means, for the learning curve."""
        sampler = PlainSampler(current, evidence.anchors)
        distance = {}
        for group, name in enumerate(evidence.groups.names):
            samples = sampler.sample(config.validation_samples, group, trainer.seed).trajectories
            mean = np.asarray(moments.phi.counts(samples).mean(0)).ravel()
            distance[f"js {name}"] = moments.distance(mean, moments.means[group])["js"]
        return {"js average": float(np.mean(list(distance.values()))), **distance}

    tuned, report = finetune(model, dataset, evidence.folder, trainer, config, distances)
    curve = report.pop("curve")
    report["from_tilted"] = model.groups is not None
    return Supervised(tuned, {"finetune": report}, curve=curve)


def _run_strong(
    model: Generator,
    dataset: TrajectoryDataset,
    evidence: None,
    trainer: Trainer,
    options: StrategyOptions,
) -> Supervised:
    """The labelled upper bound, and its calibration to the means of labelled people."""
    config: StrongConfig = options.section
    _refuse_unlabelled(dataset)
    moments = labelled_moments(dataset, config.features, config.mask)  # refuses unknown features
    fitted, report = fit_labels(model, dataset, trainer, from_scratch=options.from_scratch)
    timed = set(moments.phi.timed_maps)
    if set(config.features) <= (set() if has_times(fitted) else timed):
        if timed:
            log.warning(
                "%s: samples of this model have no times, so there is no calibration", dataset.path
            )
        return Supervised(fitted, {STRONG: report})
    if timed and not has_times(fitted):
        moments = moments.without_times(dataset.vocabulary)
    calibration = _calibrate(fitted, moments, trainer, options)
    return Supervised(
        fitted,
        {STRONG: report, **_calibration_report(calibration)},
        calibration=calibration,
        moments=moments,
        facts={"mask": list(config.mask)},
    )


def _refuse_unlabelled(dataset: TrajectoryDataset) -> None:
    if dataset.groups is None or not np.any(
        dataset.person_groups()[dataset.split_people("train")] >= 0
    ):
        raise MobatlasError(
            f"{dataset.path}: no training person has a label, and --strategy strong needs labels"
        )


def fit_labels(
    model: Generator, dataset: TrajectoryDataset, trainer: Trainer, *, from_scratch: bool = False
) -> tuple[Generator, dict[str, float]]:
    """Train a copy of the model on pairs of trajectory and label; also return its metrics."""
    _refuse_unlabelled(dataset)
    assert dataset.groups is not None
    fitted = model.with_groups(dataset.groups, trainer.seed, from_scratch)
    stage = fitted.weighted_fit_stage(
        dataset, labelled_draw(dataset, trainer.seed), STRONG, trainer, fresh=from_scratch
    )
    return fitted, trainer.run(stage)


def labelled_draw(dataset: TrajectoryDataset, seed: int) -> Draw:
    """All training trajectories once an epoch with their person's group; UNKNOWN if unlabelled."""
    group_of = dataset.person_groups()  # (people,)

    def draw(size: int, step: int) -> Examples:
        indices = dataset.order("train", size, seed, step)
        return Examples(indices, group_of[dataset.person[indices]])

    return draw


register_strategy(
    Strategy(
        "tilt",
        _run_tilt,
        run_untrainable=_run_tilt_untrainable,
        config=TiltConfig,
        flags=frozenset({"--membership", "--from-scratch"}),
    )
)
register_strategy(Strategy("resample", _run_resample, run_untrainable=_run_resample))
register_strategy(
    Strategy("finetune", _run_finetune, config=FinetuneConfig, presets=PRESETS, continues=True)
)
register_strategy(
    Strategy(
        STRONG,
        _run_strong,
        config=StrongConfig,
        flags=frozenset({"--from-scratch"}),
        needs_regions=False,
        reads_labels=True,
    )
)
