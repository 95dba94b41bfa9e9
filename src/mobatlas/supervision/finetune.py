"""Finetune, the paper's phase 2: simulated aggregates of regions are pulled to the observed ones (Section "Model Training").

A step simulates one region g and goes down dist(sum_d p(d|g) E[phi(x) | d, z], nu(g)), together with the loss of phase 1 on
unlabelled trajectories, which keeps the model plausible. No label is read.
"""

from __future__ import annotations

import copy
import logging
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
from mobatlas.data.arrays import Floats, Ints
from mobatlas.data.dataset import TrajectoryDataset
from mobatlas.data.vocabulary import Vocabulary
from mobatlas.errors import MobatlasError, suggestion
from mobatlas.features.divergences import DIVERGENCES, normalise, tv
from mobatlas.features.maps import FeatureMap, build_feature
from mobatlas.generators.protocol import Generator, unlabelled
from mobatlas.groups import Groups
from mobatlas.regions.store import RegionsFolder
from mobatlas.regions.types import Aggregates
from mobatlas.supervision.resample import PlainSampler, Sampler
from mobatlas.training.loop import Share, Trainer

log = logging.getLogger("mobatlas")
COMPARED = 4  # regions whose gradients are compared
PARTS = ("groups", "anchors", "weights")  # of simulated people


class FinetuneConfig(Section):
    """How to finetune; the defaults are the preset `small`."""

    steps: int = Field(200, ge=1)
    batch: int = Field(
        256, ge=1
    )  # simulated trajectories a step, all of one region: more make its mean less noisy
    learning_rate: float = Field(5e-4, gt=0)  # fifty times the paper's, for one in 150 of its steps
    warmup: int = Field(50, ge=0)  # the first moments of Adam know a few regions only
    rollout_steps: int | None = Field(
        5, ge=1
    )  # of the sampler in training, most of a step; None: all
    differentiable: int = Field(
        1, ge=1
    )  # K, the last steps of the rollout that the gradient passes; each takes memory
    early: bool = True  # the rollout ends at a random step, where the denoiser still hesitates: see Generator.soft_sample
    divergence: str = "js"  # smooth at its minimum, where tv is not; the paper tries both
    weight: float = Field(1.0, ge=0)  # lambda_agg, of the divergence beside the loss of phase 1
    coordinate_dropout: float = Field(
        0.0, ge=0, le=1
    )  # share of simulated people whose home and work are hidden
    mask: tuple[
        str, ...
    ] = ()  # HOME, WORK, OTHER: bins to leave out of the divergence, beside the mask of the regions
    ema: float | None = Field(
        0.99, ge=0, lt=1
    )  # of the weights: a step sees one region, a hundred of them see all
    validate_every: int = Field(50, ge=1)  # steps; the weights of the best validation are kept
    validation_samples: int = Field(256, ge=1)  # of a region
    validation_regions: int = Field(
        32, ge=1
    )  # at most, chosen once: a thousand would take longer than the training

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
    """What one feature map should come to in each region."""

    feature: FeatureMap
    columns: Ints  # (told,) bins of the map that the aggregates tell
    values: Floats  # nu (regions, told), NaN where unknown

    def divergence(self, name: str, simulated: Any, region: int) -> Any:
        """Between the aggregate and a simulated one (bins,), array or tensor, as shares of the bins that are known."""
        known = ~np.isnan(self.values[region])  # (told,)
        ours, theirs = simulated[self.columns[known]], self.values[region, known]
        target = ours.new_tensor(theirs) if isinstance(ours, Tensor) else theirs
        # The aggregate is the first: its KL from the model is finite, the model's from it is not where nobody was seen.
        return DIVERGENCES.get_entry(name)(normalise(target), normalise(ours))


@dataclass(frozen=True)
class Simulated:
    """People to simulate, so that the weighted sum of their features estimates the aggregate of a region."""

    groups: Ints  # (n,)
    anchors: Floats  # (n, 4)
    weights: Floats  # (n,) p(d|g) over the number of samples of group d


@dataclass(frozen=True)
class Target:
    """The regions as the people of one split tell them."""

    split: str
    goals: list[Goal]
    divergence: str
    shares: Floats  # p(d|g) (regions, groups)
    anchors: list[Floats]  # (people, 4) of each region
    usable: Ints  # regions of which any aggregate is known

    def people(
        self, region: int, n: int, rng: np.random.Generator, hidden: float = 0.0
    ) -> Simulated:
        """Groups in fixed proportions, stratified: expects what groups drawn at random do, with less noise. Homes at random."""
        counts = allocate(self.shares[region], n)  # (groups,)
        groups = np.repeat(np.arange(len(counts)), counts)
        anchors = rng.choice(self.anchors[region], n)
        anchors[rng.random(n) < hidden] = np.nan
        return Simulated(groups, anchors, (self.shares[region] / np.maximum(counts, 1))[groups])

    def loss(self, simulated: Sequence[Any], region: int) -> Any:
        """The sum over feature maps, each normalised on its own."""
        pairs = zip(self.goals, simulated, strict=True)
        return sum(goal.divergence(self.divergence, each, region) for goal, each in pairs)

    def soft_loss(
        self, model: Generator, region: int, rng: np.random.Generator, config: FinetuneConfig
    ) -> Tensor:
        """The loss of a region whose people are simulated, differentiable in the model."""
        people = self.people(region, config.batch, rng, config.coordinate_dropout)
        how: dict[str, Any] = {
            "steps": config.rollout_steps,
            **config.model_dump(include={"differentiable", "early"}),
        }
        soft = model.soft_sample(people.groups, people.anchors, int(rng.integers(2**62)), **how)
        weights = soft.tokens.new_tensor(people.weights)  # (n,)
        found: Tensor = self.loss(
            [weights @ goal.feature.soft(soft) for goal in self.goals], region
        )
        return found

    def agreement(self, model: Generator, config: FinetuneConfig, seed: int) -> float:
        """The mean cosine between gradients of the same region from two batches: near 0 they are noise, near 1 exact."""
        trained = [parameter for parameter in model.network.parameters() if parameter.requires_grad]
        found = []
        for region in self.usable[:COMPARED].tolist():
            both = []
            for batch in range(2):
                loss = self.soft_loss(
                    model, region, np.random.default_rng([seed, region, batch, 2]), config
                )
                gradients = torch.autograd.grad(loss, trained, allow_unused=True)
                both.append(torch.cat([each.flatten() for each in gradients if each is not None]))
            found.append(float(nn.functional.cosine_similarity(both[0], both[1], dim=0)))
        return float(np.mean(found))

    def exam(self, config: FinetuneConfig, seed: int) -> dict[int, Simulated]:
        """People of some regions, the same whenever it is asked."""
        rng = np.random.default_rng([seed, 0, 1])  # no step draws from it
        chosen = rng.permutation(self.usable)[: config.validation_regions].tolist()
        return {region: self.people(region, config.validation_samples, rng) for region in chosen}

    def score(self, sampler: Sampler, people: Mapping[int, Simulated], seed: int) -> float:
        """The mean loss of regions whose people are sampled as a user would and counted exactly."""
        groups, anchors, weights = (
            np.concatenate([getattr(each, name) for each in people.values()]) for name in PARTS
        )
        rows = np.repeat(np.arange(len(people)), [len(each.groups) for each in people.values()])
        mixing = sparse.csr_array((weights, (rows, np.arange(len(rows)))))  # (regions, samples)
        made = sampler.sample_given(groups, anchors, seed)
        found = [
            (mixing @ goal.feature.counts(made)).toarray() for goal in self.goals
        ]  # (regions, bins) each
        return float(
            np.mean(
                [
                    self.loss([each[row] for each in found], region)
                    for row, region in enumerate(people)
                ]
            )
        )


def allocate(shares: Floats, n: int) -> Ints:
    """Samples of each group, (groups,): one for every group that is there, the rest in proportion by largest remainders."""
    counts = (shares > 0).astype(np.int64)
    ideal = shares / shares.sum() * (n - counts.sum())
    counts += np.floor(ideal).astype(np.int64)
    largest = np.argsort(np.floor(ideal) - ideal, kind="stable")
    counts[largest[: n - counts.sum()]] += 1
    return counts


def finetune(
    model: Generator,
    dataset: TrajectoryDataset,
    regions_folder: RegionsFolder | Path | str,
    trainer: Trainer,
    config: FinetuneConfig = FinetuneConfig(),  # noqa: B008
    *,
    start_from_tilted: bool = False,
    on_validation: Callable[[Generator], dict[str, float]] | None = None,
) -> tuple[Generator, dict[str, Any]]:
    """A copy of the model, taught by the aggregates, as it was at its best validation; and the learning curve.

    `on_validation` may add numbers to each point of the curve, of the model as it is then; nothing here depends on them.
    """
    if trainer.share.world > 1:
        raise MobatlasError("finetune needs whole regions in one process; pass --devices 1")
    folder = RegionsFolder.open(regions_folder)
    regions = folder.regions
    student = _student(model, regions.groups, trainer.seed, start_from_tilted)
    task = _Task(folder, dataset, student.vocabulary, config)
    target = task.target(regions.aggregates, "train")
    held_out = task.held_out(target)
    exam = held_out.exam(config, trainer.seed)
    phase1 = student.weighted_fit_stage(
        dataset, unlabelled(dataset, trainer.seed), "finetune", trainer
    )
    kept = _Kept(student.network).to(trainer.device)

    def loss(network: nn.Module, step: int, share: Share) -> Tensor:
        rng = np.random.default_rng([trainer.seed, step])
        with trainer.fabric.autocast():
            divergence = target.soft_loss(student, int(rng.choice(target.usable)), rng, config)
        kept.since += torch.stack((divergence.detach(), torch.ones_like(divergence)))
        return phase1.loss(network, step, share) + config.weight * divergence

    def validate(network: nn.Module) -> dict[str, float]:
        found = {
            "validation": held_out.score(PlainSampler(student, dataset.anchors), exam, trainer.seed)
        }
        found |= on_validation(student) if on_validation else {}
        kept.add(found, rows=2 + (config.steps - 1) // config.validate_every)
        return found

    validate(kept)
    agreement = target.agreement(student, config, trainer.seed)
    own = config.model_dump(include={"steps", "learning_rate", "warmup", "ema", "validate_every"})
    constant: dict[str, Any] = {"decay": "none", "clip": 1.0, "examples_per_step": config.batch}
    trainer.run(replace(phase1, network=kept, loss=loss, validate=validate, **own, **constant))
    student.network.load_state_dict(kept.best.state_dict())
    curve = kept.rows(config)
    return student, {
        "left_out": np.delete(np.array(regions.composition.regions), target.usable).tolist(),
        "validated_on": held_out.split,
        "best": min(curve, key=lambda row: float(row["validation"])),
        "gradient_agreement": round(agreement, 3),
        "soft_gap": soft_gap(student, target.goals, next(iter(exam.values())), trainer.seed),
        "curve": curve,
    }


def regional_loss(
    sampler: Sampler,
    dataset: TrajectoryDataset,
    regions_folder: RegionsFolder | Path | str,
    config: FinetuneConfig = FinetuneConfig(),  # noqa: B008
    seed: int = 0,
) -> float:
    """What finetuning goes down, of any sampler: the mean divergence of simulated regions from those of validation people."""
    folder = RegionsFolder.open(regions_folder)
    task = _Task(folder, dataset, dataset.vocabulary, config)
    held_out = task.held_out(task.target(folder.regions.aggregates, "train"))
    return held_out.score(sampler, held_out.exam(config, seed), seed)


def soft_gap(
    model: Generator, goals: Sequence[Goal], people: Simulated, seed: int
) -> dict[str, float]:
    """For each feature map the total variation between what the gradient sees and what is sampled from the same noise."""
    soft = model.soft_sample(people.groups, people.anchors, seed)
    made = model.sample(len(people.groups), people.groups, people.anchors, seed)
    gap = {}
    for goal in goals:
        both = (
            goal.feature.soft(soft).detach().cpu().numpy(),
            goal.feature.counts(made),
        )  # (n, bins)
        gap[goal.feature.name] = float(
            tv(*(normalise((people.weights @ each)[goal.columns]) for each in both))
        )
    return gap


class _Kept(nn.Module):
    """A network in training with what must outlive a kill beside its weights: the best ones so far and the learning curve."""

    curve: Tensor
    filled: Tensor
    since: Tensor

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network, self.best = network, copy.deepcopy(network).requires_grad_(False)
        self.register_buffer("filled", torch.zeros((), dtype=torch.int64))  # rows of the curve
        self.register_buffer("since", torch.zeros(2))  # the last row: sum and number of losses

    def forward(self, *inputs: Any, **options: Any) -> Any:
        return self.network(*inputs, **options)

    def add(self, found: Mapping[str, float], rows: int) -> None:
        """Another row of the curve, which will have so many; the weights are kept if none before them did better."""
        row = int(self.filled)
        if not row:
            self.columns = ("train", *found)
            self.register_buffer("curve", self.since.new_full((rows, len(self.columns)), math.nan))
        values = {"train": float(self.since[0] / self.since[1]), **found}
        self.curve[row] = self.curve.new_tensor(
            [values.get(name, math.nan) for name in self.columns]
        )
        if self.curve[: row + 1, 1].argmin() == row:
            self.best.load_state_dict(self.network.state_dict())
        self.since.zero_()
        self.filled += 1

    def rows(self, config: FinetuneConfig) -> list[dict[str, Any]]:
        """Step, mean loss of the steps since the row before, what was found at that validation; None where there is none."""
        values = [
            [None if math.isnan(x) else x for x in row]
            for row in self.curve[: int(self.filled)].tolist()
        ]
        steps = [min(number * config.validate_every, config.steps) for number in range(len(values))]
        return [
            {"step": n, **dict(zip(self.columns, row, strict=True))}
            for n, row in zip(steps, values, strict=True)
        ]


@dataclass(frozen=True)
class _Task:
    """What is asked for, checked as it is put together."""

    folder: RegionsFolder
    dataset: TrajectoryDataset
    vocabulary: Vocabulary
    config: FinetuneConfig

    def held_out(self, training: Target) -> Target:
        """Of validation people, their aggregates and their homes; of training people where none are known."""
        aggregates, names = self.folder.validation, self.folder.regions.composition.regions
        if aggregates is None:
            log.warning(
                "%s: knows no validation people, so training people choose the best weights",
                self.folder.path,
            )
            return training
        values = np.full((len(names), len(aggregates.features)), np.nan)
        values[[names.index(name) for name in aggregates.regions]] = aggregates.values
        return self.target(replace(aggregates, values=values), "val")

    def target(self, aggregates: Aggregates, split: str) -> Target:
        """The goals of these aggregates, with people of that split to take homes from."""
        goals, anchors, config = self._goals(aggregates), self._anchors(split), self.config
        names, shares = (
            self.folder.regions.composition.regions,
            self.folder.regions.composition.shares,
        )
        usable = np.flatnonzero(np.any([~np.isnan(goal.values).all(1) for goal in goals], axis=0))
        if not len(usable):
            raise MobatlasError(
                f"{self.folder.path}: all aggregates are zero, masked or suppressed; choose others"
            )
        empty = [names[region] for region in usable.tolist() if not len(anchors[region])]
        if empty:
            raise MobatlasError(
                f"{self.folder.path}: region '{empty[0]}' has no {split} people; make regions of this dataset"
            )
        present = (shares[usable] > 0).sum(1).max()
        if min(config.batch, config.validation_samples) < present:
            raise MobatlasError(
                f"finetune: a region has {present} groups; raise batch and validation_samples to it"
            )
        return Target(split, goals, config.divergence, shares, anchors, usable)

    def _goals(self, aggregates: Aggregates) -> list[Goal]:
        """One for each feature map; a masked word takes away its bins on both sides, and never part of a bin."""
        goals, mask, features = [], self.folder.regions.details["mask"], aggregates.features
        for name in dict.fromkeys(each.partition(":")[0] for each in features):
            feature = build_feature(name, self.vocabulary, mask)
            position = {each: n for n, each in enumerate(feature.bins)}
            unknown = [
                each for each in features if each.partition(":")[0] == name and each not in position
            ]
            if unknown:
                near = suggestion(unknown[0], position) or "; make the regions of its dataset"
                raise MobatlasError(
                    f"{self.folder.path}: the model has no feature '{unknown[0]}'{near}"
                )
            shown = set(build_feature(name, self.vocabulary, [*mask, *self.config.mask]).bins)
            told = [n for n, each in enumerate(features) if each in shown]
            columns = np.array([position[features[n]] for n in told], dtype=np.int64)
            values = aggregates.values[:, told]  # (regions, told)
            goals.append(
                Goal(
                    feature,
                    columns,
                    np.where(np.nansum(values, 1, keepdims=True) > 0, values, np.nan),
                )
            )
        return goals

    def _anchors(self, split: str) -> list[Floats]:
        """Where people of each region live and work; everybody where it is not known who lives in which."""
        dataset, names = self.dataset, self.folder.regions.composition.regions
        people = np.intersect1d(
            dataset.split_people(split), dataset.person
        )  # aggregates are of people with a window
        assignment = self.folder.assignment
        if assignment is None:
            return [dataset.anchors[people]] * len(names)
        users = dataset.people["user_id"].to_pylist()
        region = np.array([assignment.get(users[person], "") for person in people.tolist()])
        return [dataset.anchors[people[region == name]] for name in names]


def _student(model: Generator, groups: Groups, seed: int, start_from_tilted: bool) -> Generator:
    """A copy that knows the groups: a baseline is given them, a tilted model has them."""
    if (model.groups is None) == start_from_tilted:
        raise MobatlasError(
            "finetune: give a model of phase 1, which knows no groups, or a tilted one and say so"
        )
    if model.groups is None:
        return model.with_groups(groups, seed, alike=True)
    if model.groups != groups:
        raise MobatlasError(
            f"finetune: the model knows the groups {model.groups.names}, the regions {groups.names}"
        )
    return copy.deepcopy(model)
