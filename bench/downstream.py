"""The downstream comparison of the paper's RQ3: predictors that learnt from different trajectories, tested on the same people.

One predictor is trained for each group and material (real people, the baseline's samples, a supervised model's samples), and
tested on held-out real people of the group. Labels say who validates and who tests, and nothing else: validation people are of
the group, because by everybody's loss training would stop where a group begins to differ from the rest.
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
from mobatlas.data.dataset import TrajectoryDataset
from mobatlas.data.trajectories import Trajectories
from mobatlas.errors import MobatlasError, suggestion
from mobatlas.evaluation.comparison import Size, real_groups
from mobatlas.progress import Tracker, track

ByGroup = Mapping[str, Trajectories]
FEWEST = 100  # trajectories to learn a group from


def compare_predictors(
    dataset: TrajectoryDataset,
    materials: Mapping[str, ByGroup],
    config: NextPoiConfig,
    *,
    size: Size = None,
    fewest: int = FEWEST,
    seed: int = 0,
    accelerator: str = "auto",
    quiet: bool = False,
) -> dict[str, Any]:
    """Train and test a predictor for each group and material; the result is plain, for reports.

    In a group all materials are of one size, stated in `sizes`: that of the smallest, and at most `size`, where trajectories
    of fewer than two visits do not count. Larger ones are thinned at random. The predictors of a group begin alike, stop by
    the same validation people, and answer the same test people. A group where a material has fewer than `fewest`, or where
    nobody validates or tests, is in `left_out` with the reason, for every material; averages are means over the other groups.
    """
    held_out = {split: _with_questions(real_groups(dataset, split)) for split in ("val", "test")}
    given = {
        name: _with_questions(_known(name, material, held_out["test"]))
        for name, material in materials.items()
    }
    if not given:
        raise MobatlasError(
            "no material to compare; give at least one mapping of groups to trajectories"
        )
    reasons = {group: _why_not(group, held_out, given, fewest) for group in held_out["test"]}
    left_out = {group: reason for group, reason in reasons.items() if reason}
    sizes = {group: _size(group, given, size) for group in reasons if group not in left_out}
    plan = [(group, name) for group in sizes for name in given]
    found: dict[str, dict[str, dict[str, Any]]] = {name: {} for name in given}
    with track("next-POI prediction", len(plan), quiet) as tracker:
        for done, (group, name) in enumerate(plan):
            predictor = train_predictor(
                _thinned(given[name][group], sizes[group], group, seed),
                held_out["val"][group],
                config,
                dataset.vocabulary,
                seed,
                accelerator=accelerator,
                progress=partial(_part, tracker, done, f"{name}, {group}"),
            )
            found[name][group] = {
                **score_predictor(predictor, held_out["test"][group]).as_dict(),
                "learnt": predictor.learnt,
                "steps": predictor.steps,
                "best_step": predictor.best_step,
                "validation_loss": predictor.validation_loss,
            }
            tracker.step(done + 1, f"{name}, {group}")
    return {
        "config": config.model_dump(mode="json"),
        "seed": seed,
        "sizes": sizes,
        "left_out": left_out,
        "materials": {
            name: {"groups": groups, "average": _average(groups)} for name, groups in found.items()
        },
    }


def _known(name: str, material: ByGroup, groups: ByGroup) -> ByGroup:
    """Refuses groups that the dataset does not have; they would be forgotten without a word."""
    for group in material:
        if group not in groups:
            raise MobatlasError(
                f"material '{name}': the dataset has no group '{group}'{suggestion(group, groups)} (known: "
                f"{'; '.join(groups)})"
            )
    return material


def _with_questions(groups: ByGroup) -> dict[str, Trajectories]:
    return {group: with_two_visits(trajectories) for group, trajectories in groups.items()}


def _why_not(
    group: str, held_out: Mapping[str, ByGroup], given: Mapping[str, ByGroup], fewest: int
) -> str | None:
    """Why a group cannot be compared; None if it can."""
    for split, what in (("test", "test"), ("val", "validation")):
        if not len(held_out[split][group]):
            return f"no {what} person of the group has two visits"
    name, n = min(_lengths(group, given).items(), key=lambda item: item[1])
    return (
        f"material '{name}' has {n} trajectories of two visits, fewer than {fewest}"
        if n < max(1, fewest)
        else None
    )


def _size(group: str, given: Mapping[str, ByGroup], size: Size) -> int:
    """Trajectories that every material gives to a group."""
    limit = size.get(group) if isinstance(size, Mapping) else size
    if limit is not None and limit < 1:
        raise MobatlasError(
            f"size {limit} of group '{group}' leaves nothing to learn from; give at least 1"
        )
    return min(n for n in (limit, *_lengths(group, given).values()) if n is not None)


def _lengths(group: str, given: Mapping[str, ByGroup]) -> dict[str, int]:
    return {name: len(groups[group]) if group in groups else 0 for name, groups in given.items()}


def _thinned(trajectories: Trajectories, n: int, group: str, seed: int) -> Trajectories:
    rng = np.random.default_rng([seed, crc32(group.encode())])
    return trajectories.take(np.sort(rng.permutation(len(trajectories))[:n]))


def _average(groups: Mapping[str, Mapping[str, Any]]) -> dict[str, float | None]:
    """Over the groups that have the metric: those are the same for every material."""
    average: dict[str, float | None] = {}
    for metric in NEXT_POI_METRICS:
        values = [scores[metric] for scores in groups.values() if scores[metric] is not None]
        average[metric] = float(np.mean(values)) if values else None
    return average


@dataclass(frozen=True)
class _Part:
    """The tracker of one predictor within that of all."""

    whole: Tracker
    before: int  # predictors
    label: str
    total: float  # steps

    def step(self, done: float, note: str = "") -> None:
        self.whole.step(
            self.before + done / self.total, f"{self.label}, {note}" if note else self.label
        )


@contextmanager
def _part(whole: Tracker, before: int, label: str, _: str, total: float) -> Iterator[Tracker]:
    yield _Part(whole, before, label, total)
