"""Finetune, the paper's phase 2 (Section "Model Training"); reads no labels.

Each step simulates one region g and minimises dist(sum_d p(d|g) E[phi(x) | d, z], nu(g)). The loss
of phase 1 on unlabelled trajectories is added, which keeps samples realistic.
"""

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import Field, field_validator
from scipy import sparse
from torch import Tensor, nn

from mobatlas.config import Section
from mobatlas.data.dataset import TrajectoryDataset
from mobatlas.data.types import Floats, Ints, Vocabulary
from mobatlas.errors import MobatlasError, log
from mobatlas.features.divergences import DIVERGENCES, normalise
from mobatlas.features.maps import FeatureMap, build_feature
from mobatlas.generators.protocol import Generator, unlabelled
from mobatlas.groups import Groups
from mobatlas.regions.store import RegionsFolder, region_of
from mobatlas.regions.types import Aggregates, bins_by_map
from mobatlas.supervision.calibration import PlainSampler, Sampler
from mobatlas.supervision.evidence import Phi
from mobatlas.training.loop import Share, Stage, Trainer


class FinetuneConfig(Section):
    """Options of `finetune`; the defaults are the preset `small`."""

    steps: int = Field(200, ge=1)
    # Simulated trajectories per step, all of one region: more make its mean less noisy.
    batch: int = Field(256, ge=1)
    learning_rate: float = Field(5e-4, gt=0)  # fifty times the paper's, for 1/150 of its steps
    warmup: int = Field(50, ge=0)  # the first moments of Adam come from few regions
    rollout_steps: int | None = Field(5, ge=1)  # sampler steps in training; None: all
    differentiable: int = Field(1, ge=1)  # K, last rollout steps with gradient; each takes memory
    early: bool = True  # the rollout ends at a random step, see Generator.soft_sample
    divergence: str = "js"  # smooth at its minimum, where tv is not; the paper tries both
    weight: float = Field(
        1.0, ge=0
    )  # lambda_agg, of the divergence relative to the loss of phase 1
    coordinate_dropout: float = Field(0.0, ge=0, le=1)  # share of people with hidden anchors
    mask: tuple[str, ...] = ()  # HOME, WORK, OTHER: bins to leave out of the divergence
    ema: float | None = Field(0.99, ge=0, lt=1)  # of the weights: a step sees one region only
    validate_every: int = Field(50, ge=1)  # steps; the weights of the best validation are used
    validation_samples: int = Field(256, ge=1)  # of a region
    validation_regions: int = Field(32, ge=1)  # at most, chosen once

    def stage(self, phase1: Stage) -> Stage:
        """The stage of phase 1 with the optimiser of finetuning."""
        return replace(
            phase1,
            steps=self.steps,
            learning_rate=self.learning_rate,
            warmup=self.warmup,
            decay="none",
            clip=1.0,
            ema=self.ema,
            validate_every=self.validate_every,
            examples_per_step=self.batch,
        )

    @field_validator("divergence")
    @classmethod
    def _known_divergence(cls, value: str) -> str:
        DIVERGENCES.get_entry(value)
        return value


PRESETS: Mapping[str, Mapping[str, Any]] = {
    "small": {},
    "paper": {
        "steps": 30_000,
        "batch": 512,
        "learning_rate": 1e-5,
        "warmup": 1_000,
        "rollout_steps": 50,
        "early": False,
        "ema": None,
        "validate_every": 1_000,
    },
}


@dataclass(frozen=True)
class Goal:
    """The aggregates of one feature map in each region."""

    feature: FeatureMap
    columns: Ints  # (known bins,) bins of the map that the aggregates hold
    values: Floats  # nu (regions, known bins), NaN where suppressed

    def divergence(self, name: str, simulated: Any, region: int) -> Any:
        """Divergence of a simulated aggregate (bins,), array or tensor, as shares of known bins."""
        known = ~np.isnan(self.values[region])  # (known bins,)
        ours = simulated[self.columns[known]]
        observed = self.values[region, known]
        target = ours.new_tensor(observed) if isinstance(ours, Tensor) else observed
        # KL of the aggregate from the model is finite; the reverse is infinite where it is zero.
        return DIVERGENCES.get_entry(name)(normalise(target), normalise(ours))


@dataclass(frozen=True)
class Simulated:
    """People to simulate; the weighted sum of their features estimates a region's aggregate."""

    groups: Ints  # (n,)
    anchors: Floats  # (n, 4)
    weights: Floats  # (n,) p(d|g) over the number of samples of group d


@dataclass(frozen=True)
class Target:
    """The regions, with aggregates and homes of the people of one split."""

    split: str
    goals: list[Goal]
    divergence: str
    shares: Floats  # p(d|g) (regions, groups)
    anchors: list[Floats]  # (people, 4) of each region
    usable: Ints  # regions with a known aggregate

    def people(
        self, region: int, n: int, rng: np.random.Generator, hidden: float = 0.0
    ) -> Simulated:
        """Draw people of a region: groups in fixed proportions, which is less noisy; homes random.

        `hidden` is the share of people without anchors.
        """
        counts = allocate(self.shares[region], n)  # (groups,)
        groups = np.repeat(np.arange(len(counts)), counts)
        anchors = rng.choice(self.anchors[region], n)
        anchors[rng.random(n) < hidden] = np.nan
        return Simulated(groups, anchors, (self.shares[region] / np.maximum(counts, 1))[groups])

    def loss(self, simulated: Sequence[Any], region: int) -> Any:
        """The sum over feature maps, each normalised on its own."""
        return sum(
            goal.divergence(self.divergence, each, region)
            for goal, each in zip(self.goals, simulated, strict=True)
        )

    def soft_loss(
        self, model: Generator, region: int, rng: np.random.Generator, config: FinetuneConfig
    ) -> Tensor:
        """The loss of one simulated region, differentiable in the model."""
        people = self.people(region, config.batch, rng, config.coordinate_dropout)
        soft = model.soft_sample(
            people.groups,
            people.anchors,
            int(rng.integers(2**62)),
            steps=config.rollout_steps,
            differentiable=config.differentiable,
            early=config.early,
        )
        # Mixed precision is for the network: means of counts need all digits.
        soft = replace(soft, tokens=soft.tokens.float())
        with torch.autocast(soft.tokens.device.type, enabled=False):
            weights = soft.tokens.new_tensor(people.weights)  # (n,)
            return self.loss([weights @ goal.feature.soft(soft) for goal in self.goals], region)

    def validation_people(self, config: FinetuneConfig, seed: int) -> dict[int, Simulated]:
        """People of some regions, the same in every call."""
        rng = np.random.default_rng([seed, 0, 1])  # no training step uses it
        chosen = rng.permutation(self.usable)[: config.validation_regions].tolist()
        return {region: self.people(region, config.validation_samples, rng) for region in chosen}

    def score(self, sampler: Sampler, people: Mapping[int, Simulated], seed: int) -> float:
        """The mean loss of regions whose people are sampled as a user would sample them."""
        regions = people.values()
        groups, anchors, weights = (
            np.concatenate([getattr(each, name) for each in regions])
            for name in ("groups", "anchors", "weights")
        )
        rows = np.repeat(np.arange(len(people)), [len(each.groups) for each in regions])
        mixing = sparse.csr_array((weights, (rows, np.arange(len(rows)))))  # (regions, samples)
        samples = sampler.sample_at_anchors(groups, anchors, seed)
        # (regions, bins) of each map
        simulated = [(mixing @ goal.feature.counts(samples)).toarray() for goal in self.goals]
        losses = [
            self.loss([each[row] for each in simulated], region)
            for row, region in enumerate(people)
        ]
        return float(np.mean(losses))


def allocate(shares: Floats, n: int) -> Ints:
    """Samples per group (groups,): at least one if present, the rest by largest remainders."""
    counts = (shares > 0).astype(np.int64)
    ideal = shares / shares.sum() * (n - counts.sum())
    counts += np.floor(ideal).astype(np.int64)
    counts[np.argsort(np.floor(ideal) - ideal, kind="stable")[: n - counts.sum()]] += 1
    return counts


def finetune(
    model: Generator,
    dataset: TrajectoryDataset,
    regions_folder: RegionsFolder | Path | str,
    trainer: Trainer,
    config: FinetuneConfig = FinetuneConfig(),  # noqa: B008
    on_validation: Callable[[Generator], dict[str, float]] | None = None,
) -> tuple[Generator, dict[str, Any]]:
    """Train a copy of a model on aggregates; return its best weights and the report.

    The model may already have groups. `on_validation` adds numbers to each point of the learning
    curve; training does not depend on them.
    """
    if trainer.share.world > 1:
        raise MobatlasError(
            "finetune: a region cannot be split between processes; pass --devices 1"
        )
    folder = RegionsFolder.open(regions_folder)
    student = _copy_with_groups(model, folder.regions.groups, trainer.seed)
    task = TargetBuilder(folder, dataset, student.vocabulary, config)
    target = task.target(folder.regions.aggregates, "train")
    held_out = task.held_out(target)
    people = held_out.validation_people(config, trainer.seed)
    phase1 = student.weighted_fit_stage(
        dataset, unlabelled(dataset, trainer.seed), "finetune", trainer
    )
    tuned = _TunedNetwork(student.network).to(trainer.device)

    def loss(network: nn.Module, step: int, share: Share) -> Tensor:
        rng = np.random.default_rng([trainer.seed, step])
        with trainer.fabric.autocast():
            divergence = target.soft_loss(student, int(rng.choice(target.usable)), rng, config)
        tuned.since += torch.stack((divergence.detach(), torch.ones_like(divergence)))
        return phase1.loss(network, step, share) + config.weight * divergence

    def validate(network: nn.Module) -> dict[str, float]:
        scores = {
            "validation": held_out.score(
                PlainSampler(student, dataset.anchors), people, trainer.seed
            ),
            **(on_validation(student) if on_validation else {}),
        }
        tuned.add_row(scores, rows=2 + (config.steps - 1) // config.validate_every)
        return scores

    validate(tuned)
    stage = replace(config.stage(phase1), network=tuned, loss=loss, validate=validate)
    trainer.run(replace(stage, exported=student.network))
    student.network.load_state_dict(tuned.best.state_dict())
    curve = tuned.learning_curve(config)
    return student, {
        "left_out": np.delete(folder.regions.composition.regions, target.usable).tolist(),
        "validated_on": held_out.split,
        "best": min(curve, key=lambda row: float(row["validation"])),
        "curve": curve,
    }


def regional_loss(
    sampler: Sampler,
    dataset: TrajectoryDataset,
    regions_folder: RegionsFolder | Path | str,
    config: FinetuneConfig = FinetuneConfig(),  # noqa: B008
    seed: int = 0,
) -> float:
    """The validation loss of finetuning, for any sampler.

    It is the mean divergence of simulated regions from the regions of validation people.
    """
    folder = RegionsFolder.open(regions_folder)
    task = TargetBuilder(folder, dataset, dataset.vocabulary, config)
    held_out = task.held_out(task.target(folder.regions.aggregates, "train"))
    return held_out.score(sampler, held_out.validation_people(config, seed), seed)


class _TunedNetwork(nn.Module):
    """A network in training, with its best weights and learning curve in the same checkpoint."""

    curve: Tensor
    filled: Tensor
    since: Tensor

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        self.best = copy.deepcopy(network).requires_grad_(False)
        self.register_buffer("filled", torch.zeros((), dtype=torch.int64))  # rows of the curve
        self.register_buffer("since", torch.zeros(2))  # sum and number of losses since a row

    def forward(self, *inputs: Any, **options: Any) -> Any:
        return self.network(*inputs, **options)

    def add_row(self, scores: Mapping[str, float], rows: int) -> None:
        """Add a row to the curve of `rows` rows; keep the weights if they are the best."""
        row = int(self.filled)
        if not row:
            self.columns = ("train", *scores)
            self.register_buffer("curve", self.since.new_full((rows, len(self.columns)), math.nan))
        values = {"train": float(self.since[0] / self.since[1]), **scores}
        self.curve[row] = self.curve.new_tensor(
            [values.get(name, math.nan) for name in self.columns]
        )
        if self.curve[: row + 1, 1].argmin() == row:
            self.best.load_state_dict(self.network.state_dict())
        self.since.zero_()
        self.filled += 1

    def learning_curve(self, config: FinetuneConfig) -> list[dict[str, Any]]:
        """Per validation: the step, the mean loss since the last one, and the scores."""
        curve = []
        for number, row in enumerate(self.curve[: int(self.filled)].tolist()):
            values = [None if math.isnan(value) else value for value in row]
            step = min(number * config.validate_every, config.steps)
            curve.append({"step": step, **dict(zip(self.columns, values, strict=True))})
        return curve


@dataclass(frozen=True)
class TargetBuilder:
    """Builds the targets from the inputs, and checks them."""

    folder: RegionsFolder
    dataset: TrajectoryDataset
    vocabulary: Vocabulary
    config: FinetuneConfig

    def held_out(self, training: Target) -> Target:
        """Aggregates and homes of validation people, or the training target without any."""
        aggregates = self.folder.validation
        names = self.folder.regions.composition.regions
        if aggregates is None:
            log.warning(
                "%s: there are no validation people, so the best weights are chosen on "
                "training people",
                self.folder.path,
            )
            return training
        values = np.full((len(names), len(aggregates.features)), np.nan)
        values[[names.index(name) for name in aggregates.regions]] = aggregates.values
        return self.target(replace(aggregates, values=values), "val")

    def target(self, aggregates: Aggregates, split: str) -> Target:
        """The goals of these aggregates, with the homes of people of a split."""
        goals = self._goals(aggregates)
        anchors = self._anchors(split)
        shares = self.folder.regions.composition.shares
        usable = np.flatnonzero(np.any([~np.isnan(goal.values).all(1) for goal in goals], axis=0))
        if not len(usable):
            raise MobatlasError(
                f"{self.folder.path}: all aggregates are zero, masked or suppressed; use other "
                "features"
            )
        if empty := [region for region in usable.tolist() if not len(anchors[region])]:
            raise MobatlasError(
                f"{self.folder.path}: region '{self.folder.regions.composition.regions[empty[0]]}' "
                f"has no {split} people of this dataset; create it again with `mobatlas regions`"
            )
        present = (shares[usable] > 0).sum(1).max()
        if min(self.config.batch, self.config.validation_samples) < present:
            raise MobatlasError(
                f"finetune: a region has {present} groups; set finetune.batch and "
                f"finetune.validation_samples to at least {present}"
            )
        return Target(split, goals, self.config.divergence, shares, anchors, usable)

    def _goals(self, aggregates: Aggregates) -> list[Goal]:
        """One goal per feature map; masked tokens are removed from samples and aggregates."""
        mask = self.folder.regions.details["mask"]
        goals = []
        for name, bins in bins_by_map(aggregates.features).items():
            phi = Phi.of([aggregates.features[n] for n in bins], self.vocabulary, mask)
            visible = set(build_feature(name, self.vocabulary, [*mask, *self.config.mask]).bins)
            known = np.array([feature in visible for feature in phi.features])  # (bins,)
            values = aggregates.values[:, bins[known]]  # (regions, known bins)
            values = np.where(np.nansum(values, 1, keepdims=True) > 0, values, np.nan)
            goals.append(Goal(phi.maps[0], phi.columns[known], values))
        return goals

    def _anchors(self, split: str) -> list[Floats]:
        """Anchors of each region's people; of all people if they are not assigned to regions."""
        names = self.folder.regions.composition.regions
        # Aggregates count only people with a window.
        people = np.intersect1d(self.dataset.split_people(split), self.dataset.person)
        if (region := region_of(self.dataset, people, self.folder.assignment, names)) is None:
            return [self.dataset.anchors[people]] * len(names)
        return [self.dataset.anchors[people[region == number]] for number in range(len(names))]


def _copy_with_groups(model: Generator, groups: Groups, seed: int) -> Generator:
    """Return a copy with the groups; a model that already has groups must have the same ones."""
    if model.groups is None:
        return model.with_groups(groups, seed, equal_groups=True)
    if model.groups != groups:
        raise MobatlasError(
            f"finetune: the model has the groups {model.groups.names}, but the regions have "
            f"{groups.names}; pass regions with the groups of the model"
        )
    return copy.deepcopy(model)
