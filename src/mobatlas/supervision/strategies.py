"""The strategies of phase 2 under one roof: each makes of a model, and of what regions tell, a model of groups.

One of them, `strong`, reads labels of individuals; the others get nothing but evidence.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
from pydantic import Field, model_validator

from mobatlas.config import Section, build, merge
from mobatlas.data.arrays import Floats
from mobatlas.data.dataset import TrajectoryDataset
from mobatlas.errors import MobatlasError, suggestion
from mobatlas.generators.protocol import Family, Generator, has_times
from mobatlas.progress import track
from mobatlas.regions.recovery.recover import GROUPS_EXPLAIN
from mobatlas.supervision import calibration, finetune
from mobatlas.supervision import group_tilts as teach
from mobatlas.supervision.calibration import Calibration, fit_calibration
from mobatlas.supervision.evidence import Evidence
from mobatlas.supervision.finetune import FinetuneConfig
from mobatlas.supervision.moments import TIMES, Moments
from mobatlas.supervision.resample import PlainSampler, resample
from mobatlas.supervision.strong import teach_labels
from mobatlas.training.loop import Trainer

log = logging.getLogger("mobatlas")
AUTO, STRONG = "auto", "strong"


class TiltConfig(Section):
    """How training people are weighed."""

    unit: Literal["trajectory", "person"] = (
        "trajectory"  # person: all windows of one share its weight
    )
    ridge: float = Field(teach.RIDGE, ge=0)  # leaves moments unmet that would cost much


class CalibrationConfig(Section):
    """How samples are weighed."""

    # Samples of each group, 4,096 by default; in `resample` of all groups together, 8,192.
    pool: int | None = None
    candidates: int = Field(
        calibration.CANDIDATES, ge=2
    )  # for each anchor, where anchors are given
    ridge: float = Field(calibration.RIDGE, ge=0)

    @model_validator(mode="after")
    def _pool_is_divided(self) -> CalibrationConfig:
        if self.pool is not None and self.pool < 4 * self.candidates:
            raise ValueError(
                f"a pool of {self.pool} is too small for {self.candidates} candidates; give four times as many"
            )
        return self

    def arguments(self) -> dict[str, Any]:
        """Of `fit_calibration` and `resample`."""
        return self.model_dump(exclude_none=True)


class SuperviseConfig(Section):
    """What phase 2 can be told beside the configuration of the generator."""

    # Tilts keep the spread of the number of visits, see evidence.Visits; without it they are the paper's I-projection, which
    # meets what regions tell and nothing else.
    visits: bool = True
    # How much groups differ relative to the variance between people, at most, where these chose their regions; see recovery.
    groups_explain: float = Field(GROUPS_EXPLAIN, gt=0, le=1e6)
    tilt: TiltConfig = TiltConfig()
    calibration: CalibrationConfig = CalibrationConfig()
    finetune: FinetuneConfig = FinetuneConfig()


@dataclass(frozen=True)
class Options:
    """How a strategy is asked for."""

    config: SuperviseConfig = field(default_factory=SuperviseConfig)
    membership: bool = False
    from_scratch: bool = False
    quiet: bool = False


@dataclass(frozen=True)
class Supervised:
    """What a strategy came to, and what the MODEL folder keeps beside the weights."""

    generator: Generator
    report: dict[str, Any]
    calibration: Calibration | None = None
    tilt: Floats | None = None  # lambda (groups, features) over training people
    curve: Sequence[Mapping[str, Any]] | None = None  # of finetuning
    facts: dict[str, Any] = field(default_factory=dict)  # for the manifest


Run = Callable[
    [Generator, TrajectoryDataset, Any, Trainer, Options], Supervised
]  # the third: Evidence, if it is asked for


@dataclass(frozen=True)
class Strategy:
    """A way to supervise: what it does, and which options concern it."""

    run: Run
    options: frozenset[str]
    needs_regions: bool = True
    untaught: Run | None = (
        None  # what it does with a generator that cannot be taught; None: nothing
    )


def choose_strategy(model: Generator, family: Family) -> tuple[str, str]:
    """What `auto` stands for, and why."""
    if model.groups is not None:
        raise MobatlasError(
            "--strategy auto: this model knows groups already; give one of phase 1, or --strategy finetune to go on from it"
        )
    if not family.trainable:
        return (
            "resample",
            f"the generator {family.name} cannot be taught, so groups are chosen among its samples",
        )
    return (
        "tilt",
        "unlike finetune it need not simulate while it trains, and it refuses fewer candidates than resample",
    )


def strategy_named(name: str) -> Strategy:
    """The strategy of that name."""
    if name not in STRATEGIES:
        known = (AUTO, *STRATEGIES)
        raise MobatlasError(
            f"--strategy {name} does not exist{suggestion(name, known)} (known: {', '.join(known)})"
        )
    return STRATEGIES[name]


def way_of(
    name: str, family: Family, values: Mapping[str, Any], *, from_scratch: bool = False
) -> Run:
    """How a strategy goes with a family; `values` are options of the generator, which one that cannot be taught refuses."""
    strategy = strategy_named(name)
    if family.trainable:
        return strategy.run
    known = " or ".join(each for each, found in STRATEGIES.items() if found.untaught is not None)
    if strategy.untaught is None:
        raise MobatlasError(
            f"--strategy {name} teaches the generator, and {family.name} cannot be taught; take --strategy {known}, which "
            "choose among its samples"
        )
    unused = ["--from-scratch"] if from_scratch else [f"--set {key}" for key in values]
    if unused:
        raise MobatlasError(
            f"{unused[0]}: the generator {family.name} is not trained here, so this does nothing; leave it out"
        )
    return strategy.untaught


def sections_of(name: str) -> set[str]:
    """The sections of `SuperviseConfig` that concern a strategy."""
    return {
        section
        for section in SuperviseConfig.model_fields
        if f"--set {section}" in STRATEGIES[name].options
    }


def build_options(
    name: str,
    values: Mapping[str, Any],
    *,
    preset: str | None = None,
    divergence: str | None = None,
    membership: bool = False,
    from_scratch: bool = False,
    quiet: bool = False,
) -> Options:
    """Options of a strategy; those that do not concern it are refused. `values` are sections of `SuperviseConfig`."""
    given = {
        "--preset": preset is not None,
        "--divergence": divergence is not None,
        "--membership": membership,
        "--from-scratch": from_scratch,
        **{f"--set {section}": True for section in values},
    }
    for option in (option for option, there in given.items() if there):
        if option not in STRATEGIES[name].options:
            others = " and ".join(
                each for each, found in STRATEGIES.items() if option in found.options
            )
            raise MobatlasError(
                f"{option} concerns the strategy {others}, not {name}; leave it out"
            )
    if preset is not None and preset not in finetune.PRESETS:
        known = finetune.PRESETS
        raise MobatlasError(
            f"--preset {preset} does not exist{suggestion(preset, known)} (known: {', '.join(known)})"
        )
    tuning = {"finetune": finetune.PRESETS[preset]} if preset else {}
    own = {"finetune": {"divergence": divergence}} if divergence else {}
    config = build(SuperviseConfig, merge(tuning, values, own), "supervise")
    return Options(config, membership, from_scratch, quiet)


def _tilt(
    model: Generator,
    dataset: TrajectoryDataset,
    evidence: Evidence,
    trainer: Trainer,
    options: Options,
) -> Supervised:
    """Weigh training people, teach, and calibrate what was taught."""
    tilts = _weighed(dataset, evidence, options)
    taught, metrics = teach.teach(
        model, dataset, evidence, tilts, trainer, from_scratch=options.from_scratch
    )
    fitted = _calibrated(
        fit_calibration, taught, evidence.moments_by(options.membership), trainer, options
    )
    return _tilted(taught, tilts, evidence, metrics, fitted)


def _tilt_untaught(
    model: Generator,
    dataset: TrajectoryDataset,
    evidence: Evidence,
    trainer: Trainer,
    options: Options,
) -> Supervised:
    """Weigh training people, and choose samples that do on average what these do: moments that nobody reaches are not asked."""
    model.to(trainer.device.type)
    tilts = _weighed(dataset, evidence, options)
    moments = evidence.moments_by(options.membership)
    reached = replace(moments, means=moments.means - tilts.unmet)
    return _tilted(
        model, tilts, evidence, {}, _calibrated(resample, model, reached, trainer, options)
    )


def _weighed(dataset: TrajectoryDataset, evidence: Evidence, options: Options) -> teach.GroupTilts:
    config = options.config.tilt
    tilts = teach.fit_group_tilts(
        evidence, dataset, unit=config.unit, ridge=config.ridge, membership=options.membership
    )
    smallest, units = tilts.effective_sample_sizes.min(), len(tilts.tilts[0].weights)
    log.info("tilts fitted: of %d units at least %.0f count for a group", units, smallest)
    return tilts


def _tilted(
    model: Generator,
    tilts: teach.GroupTilts,
    evidence: Evidence,
    metrics: Mapping[str, float],
    fitted: Calibration | None,
) -> Supervised:
    found = tilts.report(evidence)
    return Supervised(
        model,
        {"tilt": {**metrics, **found}, **_of(fitted)},
        calibration=fitted,
        tilt=np.stack([tilt.coefficients for tilt in tilts.tilts]),
        facts={
            "effective_sample_size": {
                name: row["effective_sample_size"] for name, row in found["groups"].items()
            },
            "dual_gap": {name: row["gap"] for name, row in found["groups"].items()},
        },
    )


def _resample(
    model: Generator,
    dataset: TrajectoryDataset,
    evidence: Evidence,
    trainer: Trainer,
    options: Options,
) -> Supervised:
    """Calibrate the baseline; nothing is trained."""
    model.to(trainer.device.type)
    fitted = _calibrated(resample, model, evidence, trainer, options)
    sizes = {}
    if fitted is not None:
        weighed = zip(fitted.groups.names, fitted.population, strict=True)
        sizes = {name: round(each.effective_sample_size * fitted.pool, 1) for name, each in weighed}
    return Supervised(
        model, _of(fitted), calibration=fitted, facts={"effective_sample_size": sizes}
    )


def _finetune(
    model: Generator,
    dataset: TrajectoryDataset,
    evidence: Evidence,
    trainer: Trainer,
    options: Options,
) -> Supervised:
    """The paper's phase 2, from phase 1 or from a tilted model."""
    tilted, config = model.groups is not None, options.config.finetune

    def by_group(now: Generator) -> dict[str, float]:
        """JSD between samples of each group and its recovered means; evaluation sets it beside labels."""
        sampler, told = PlainSampler(now, evidence.anchors), evidence.told
        found = {}
        for group, name in enumerate(evidence.groups.names):
            made = sampler.sample(config.validation_samples, group, trainer.seed).trajectories
            mean = np.asarray(told.phi.counts(made).mean(0)).ravel()
            found[name] = told.distance(mean, told.means[group])["js"]
        return {
            "js average": float(np.mean(list(found.values()))),
            **{f"js {name}": js for name, js in found.items()},
        }

    manner: dict[str, Any] = {"start_from_tilted": tilted, "on_validation": by_group}
    tuned, report = finetune.finetune(model, dataset, evidence.source, trainer, config, **manner)
    curve = report.pop("curve")
    return Supervised(tuned, {"finetune": report | {"from_tilted": tilted}}, curve=curve)


def _strong(
    model: Generator, dataset: TrajectoryDataset, evidence: None, trainer: Trainer, options: Options
) -> Supervised:
    """The labelled upper bound."""
    taught, report = teach_labels(model, dataset, trainer, from_scratch=options.from_scratch)
    return Supervised(taught, {STRONG: report})


def _calibrated(
    fit: Callable[..., Calibration],
    model: Generator,
    evidence: Evidence | Moments,
    trainer: Trainer,
    options: Options,
) -> Calibration | None:
    """Fitted in one process, since one keeps it; None where samples show nothing of what the regions tell."""
    blind = not has_times(model) and all(each.name == TIMES for each in evidence.phi.maps)
    if fit is fit_calibration and blind:
        log.warning("%s: samples do not tell when, so there is no calibration", evidence.source)
        return None
    if trainer.share.rank:
        return None
    with track("calibrating", 100, options.quiet) as tracker:
        return fit(
            model,
            evidence,
            seed=trainer.seed,
            tracker=tracker,
            **options.config.calibration.arguments(),
        )


def _of(fitted: Calibration | None) -> dict[str, Any]:
    return {} if fitted is None else {"calibration": fitted.report()}


OF_EVIDENCE = (
    "--set visits",
    "--set groups_explain",
)  # what every strategy that asks regions can be told of them
STRATEGIES: Mapping[str, Strategy] = {
    "tilt": Strategy(
        _tilt,
        frozenset(
            {"--membership", "--from-scratch", "--set tilt", "--set calibration", *OF_EVIDENCE}
        ),
        untaught=_tilt_untaught,
    ),
    "resample": Strategy(
        _resample, frozenset({"--set calibration", *OF_EVIDENCE}), untaught=_resample
    ),
    "finetune": Strategy(
        _finetune,
        frozenset(
            {"--preset", "--divergence", "--set finetune", "--set calibration", *OF_EVIDENCE}
        ),
    ),
    STRONG: Strategy(_strong, frozenset({"--from-scratch"}), needs_regions=False),
}
