"""The downstream comparison of RQ3: predictors that learn from different materials.

A predictor is trained for each group and material (real people, samples of the baseline, samples of
a supervised model) and tested on held-out real people of the group. Labels only select who
validates and who tests. Validation people are of the same group: the loss of all people would stop
training too early.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from zlib import crc32

import numpy as np

from bench.next_poi import (
    NEXT_POI_METRICS,
    NextPoiConfig,
    score_predictor,
    train_predictor,
    with_two_visits,
)
from mobatlas.data.dataset import Trajectories, TrajectoryDataset
from mobatlas.errors import MobatlasError
from mobatlas.evaluation.comparison import Size, real_groups
from mobatlas.groups import same_group
from mobatlas.progress import Tracker, track

ByGroup = Mapping[str, Trajectories]
MIN_TRAJECTORIES = 100  # to learn a group from


@dataclass(frozen=True)
class Comparison:
    """How materials are compared."""

    size: Size = None  # trajectories of each group at most
    fewest: int = MIN_TRAJECTORIES  # a group with fewer is left out
    seed: int = 0
    accelerator: str = "auto"
    quiet: bool = False


def compare_predictors(
    dataset: TrajectoryDataset,
    materials: Mapping[str, ByGroup],
    config: NextPoiConfig,
    comparison: Comparison | None = None,
) -> dict[str, Any]:
    """Train and test a predictor for each group and material.

    All materials of a group have the size of the smallest, stated in `sizes`; trajectories with
    fewer than two visits do not count. The predictors of a group start from the same weights and
    have the same validation and test people. `left_out` names groups with too little material or
    without validation or test people. Averages are over the other groups.
    """
    how = comparison or Comparison()
    held_out = {split: _long_enough(real_groups(dataset, split)) for split in ("val", "test")}
    usable = {
        name: _long_enough(_check_groups(name, material, held_out["test"]))
        for name, material in materials.items()
    }
    if not usable:
        raise MobatlasError(
            "there is no material to compare; give at least one mapping of groups to trajectories"
        )
    reasons = {
        group: _reason_left_out(group, held_out, usable, how.fewest) for group in held_out["test"]
    }
    left_out = {group: reason for group, reason in reasons.items() if reason}
    sizes = {group: _size(group, usable, how.size) for group in reasons if group not in left_out}
    plan = [(group, name) for group in sizes for name in usable]
    scores: dict[str, dict[str, dict[str, Any]]] = {name: {} for name in usable}
    with track("next-POI prediction", len(plan), how.quiet) as tracker:
        for done, (group, name) in enumerate(plan):
            predictor = train_predictor(
                _thin(usable[name][group], sizes[group], group, how.seed),
                held_out["val"][group],
                config,
                dataset.vocabulary,
                how.seed,
                accelerator=how.accelerator,
                progress=partial(_part, tracker, done, f"{name}, {group}"),
            )
            scores[name][group] = {
                **score_predictor(predictor, held_out["test"][group]).as_dict(),
                "learnt": predictor.learnt,
                "steps": predictor.steps,
                "best_step": predictor.best_step,
                "validation_loss": predictor.validation_loss,
            }
            tracker.step(done + 1, f"{name}, {group}")
    return {
        "config": config.model_dump(mode="json"),
        "seed": how.seed,
        "sizes": sizes,
        "left_out": left_out,
        "materials": {
            name: {"groups": groups, "average": average_metrics(groups)}
            for name, groups in scores.items()
        },
    }


def _check_groups(name: str, material: ByGroup, groups: ByGroup) -> ByGroup:
    """Refuse groups that the dataset does not have."""
    for group in material:
        if group not in groups:
            raise MobatlasError(
                f"material '{name}': the dataset has no group '{group}'"
                f"{same_group(group, groups)} (known: {'; '.join(groups)})"
            )
    return material


def _long_enough(groups: ByGroup) -> dict[str, Trajectories]:
    return {group: with_two_visits(trajectories) for group, trajectories in groups.items()}


def _reason_left_out(
    group: str, held_out: Mapping[str, ByGroup], materials: Mapping[str, ByGroup], fewest: int
) -> str | None:
    """Return why a group cannot be compared; None if it can."""
    for split, word in (("test", "test"), ("val", "validation")):
        if not len(held_out[split][group]):
            return f"no {word} person of the group has two visits"
    name, n = min(_lengths(group, materials).items(), key=lambda item: item[1])
    if n >= max(1, fewest):
        return None
    return f"material '{name}' has {n} trajectories of two visits, fewer than {fewest}"


def _size(group: str, materials: Mapping[str, ByGroup], size: Size) -> int:
    """Return the number of trajectories of a group that every material provides."""
    limit = size.get(group) if isinstance(size, Mapping) else size
    if limit is not None and limit < 1:
        raise MobatlasError(
            f"size {limit} of group '{group}' leaves nothing to learn from; give at least 1"
        )
    return min(n for n in (limit, *_lengths(group, materials).values()) if n is not None)


def _lengths(group: str, materials: Mapping[str, ByGroup]) -> dict[str, int]:
    return {
        name: len(groups[group]) if group in groups else 0 for name, groups in materials.items()
    }


def _thin(trajectories: Trajectories, n: int, group: str, seed: int) -> Trajectories:
    """Keep n trajectories at random."""
    rng = np.random.default_rng([seed, crc32(group.encode())])
    return trajectories.take(np.sort(rng.permutation(len(trajectories))[:n]))


def average_metrics(groups: Mapping[str, Mapping[str, Any]]) -> dict[str, float | None]:
    """Average over the groups that have a metric; those are the same for every material."""
    average: dict[str, float | None] = {}
    for metric in NEXT_POI_METRICS:
        values = [scores[metric] for scores in groups.values() if scores[metric] is not None]
        average[metric] = float(np.mean(values)) if values else None
    return average


@dataclass(frozen=True)
class _Part:
    """The tracker of one predictor within that of all."""

    tracker: Tracker
    before: int  # finished predictors
    label: str
    total: float  # steps

    def step(self, done: float, note: str = "") -> None:
        text = f"{self.label}, {note}" if note else self.label
        self.tracker.step(self.before + done / self.total, text)


@contextmanager
def _part(tracker: Tracker, before: int, label: str, _: str, total: float) -> Iterator[Tracker]:
    yield _Part(tracker, before, label, total)
