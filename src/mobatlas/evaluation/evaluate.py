"""Evaluation of a file of samples: by group and all together, beside a baseline, a labelled model and the sampling floor."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np

from mobatlas.data.dataset import TrajectoryDataset
from mobatlas.data.samples import Samples, read_samples
from mobatlas.data.trajectories import Trajectories
from mobatlas.errors import MobatlasError
from mobatlas.evaluation.comparison import (
    EVERYBODY,
    Interval,
    People,
    Scores,
    bootstrap,
    evaluate_groups,
    floor_closed,
    gap_closed,
    group_members,
)
from mobatlas.evaluation.diversity import diversity
from mobatlas.evaluation.metrics import ALL_METRICS, Ints, Yardstick

BASELINE, OURS, STRONG, FLOOR = "baseline", "ours", "strong", "floor"  # in the order of tables
TRAIN = "train"
MIXING = 3  # a stream of random numbers
ByGroup = dict[str, Trajectories]


@dataclass(frozen=True)
class Closed:
    """The share of a difference that ours closes; None, and why, where there is nothing to close."""

    share: float | None
    reason: str | None = None


@dataclass(frozen=True)
class Standing:
    """All models and the floor against the same real people, at equal sizes."""

    scores: dict[str, Scores]  # model -> divergences
    intervals: dict[str, dict[str, Interval]]  # model -> metric -> of the average, over people
    floor_closed: dict[str, Closed]  # metric -> of baseline - floor; empty without a baseline
    gap_closed: dict[str, Closed]  # metric -> of baseline - strong; empty without both

    @property
    def sizes(self) -> dict[str, int]:
        """Trajectories on either side, by group."""
        return self.scores[OURS].sizes

    def as_dict(self) -> dict[str, Any]:
        """For reports."""
        return {
            "scores": {label: found.as_dict() for label, found in self.scores.items()},
            "intervals": {label: _plain(found) for label, found in self.intervals.items()},
            "floor_closed": _plain(self.floor_closed),
            "gap_closed": _plain(self.gap_closed),
        }


@dataclass(frozen=True)
class Evaluation:
    """How good the samples of a file are."""

    dataset: str
    split: str
    files: dict[
        str, dict[str, Any]
    ]  # model -> path, trajectories, whether by group and timed, what is unknown
    groups: Standing | None  # None where the dataset has no labels
    everybody: Standing  # the people of these groups together, mixed alike on all sides; its scores hold the diversity
    left_out: dict[str, str]  # group -> why
    warnings: tuple[str, ...]
    yardstick: dict[str, Any]
    seed: int

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "dataset": self.dataset,
            "split": self.split,
            "seed": self.seed,
            "files": self.files,
            "groups": None if self.groups is None else self.groups.as_dict(),
            "everybody": self.everybody.as_dict(),
            "left_out": self.left_out,
            "warnings": list(self.warnings),
            "yardstick": self.yardstick,
        }


def evaluate(
    samples: Path | str,
    dataset: Path | str,
    *,
    split: str = "test",
    baseline: Path | str | None = None,
    strong: Path | str | None = None,
    seed: int = 0,
    resamples: int = 200,
) -> Evaluation:
    """Score a file of samples against the people of a split, and beside it those of a baseline and of a labelled model.

    A file that tells no groups is of everybody and meets the people of each group. In every group all sides, the floor
    included, have as many trajectories as the smallest; a group that one of them lacks is left out for all.
    """
    opened = TrajectoryDataset.open(dataset)
    _check_split(opened, split)
    labelled = opened.groups is not None and opened.labels() is not None
    paths = {BASELINE: baseline, OURS: samples, STRONG: strong}
    files = {
        label: read_samples(path, opened.vocabulary, opened.groups if labelled else None)
        for label, path in paths.items()
        if path is not None
    }
    real, training = (Trajectories.of(opened, opened.split(side)) for side in (split, TRAIN))
    scene = _Scene(opened, split, files, Yardstick.of(opened), seed, resamples)
    groups, left_out = scene.by_group() if labelled else (None, {})
    by_group = groups is not None and any(file.groups is not None for file in files.values())
    everybody = (
        scene.mixed(groups.sizes)
        if groups is not None and by_group
        else scene.together(real, training)
    )
    varieties = {
        label: diversity(file.trajectories, training, real) for label, file in files.items()
    }
    scores = {
        label: replace(each, diversity=varieties.get(label))
        for label, each in everybody.scores.items()
    }
    return Evaluation(
        dataset=str(dataset),
        split=split,
        files={label: _facts(file) for label, file in files.items()},
        groups=groups,
        everybody=replace(everybody, scores=scores),
        left_out=left_out,
        warnings=(
            *(warning for file in files.values() for warning in file.warnings),
            *(
                ()
                if labelled
                else (
                    f"{dataset}: has no labels, so all people are compared together and no group is",
                )
            ),
        ),
        yardstick=scene.yardstick.as_dict(),
        seed=seed,
    )


@dataclass(frozen=True)
class _Scene:
    """What stands against what."""

    dataset: TrajectoryDataset
    split: str
    files: Mapping[str, Samples]
    yardstick: Yardstick
    seed: int
    resamples: int

    def by_group(self) -> tuple[Standing, dict[str, str]]:
        """Every group that has people and samples on all sides; why others are left out."""
        real, sides, people = self._groups
        reasons = {
            **{label: f"has no trajectory in {file.path}" for label, file in self.files.items()},
            FLOOR: f"has no people in split '{TRAIN}', so no floor",
        }
        left_out = {}
        for name, held_out in real.items():
            lacking = [reasons[label] for label in (OURS, *sides) if not len(sides[label][name])]
            if not len(held_out):
                left_out[name] = f"has no people in split '{self.split}'"
            elif lacking:
                left_out[name] = lacking[0]
        chosen = [name for name in real if name not in left_out]
        if not chosen:
            name, reason = next(iter(left_out.items()))
            raise MobatlasError(
                f"{self.files[OURS].path}: no group can be compared: '{name}' {reason}; give samples of groups that have "
                "people, or another --split"
            )
        some = {label: {name: side[name] for name in chosen} for label, side in sides.items()}
        return self._standing({name: real[name] for name in chosen}, some, people), left_out

    def mixed(self, sizes: Mapping[str, int]) -> Standing:
        """The groups together, so many of each on all sides; a file of everybody as it is."""
        real, sides, people = self._groups
        whole = {
            label: file.trajectories for label, file in self.files.items() if file.groups is None
        }
        rows = _thinned(real, sizes, self.seed)
        return self._together(
            _joined(real, rows),
            {
                label: whole.get(label, _joined(side, _thinned(side, sizes, self.seed)))
                for label, side in sides.items()
            },
            np.concatenate([people[name][found] for name, found in rows.items()]),
        )

    def together(self, real: Trajectories, training: Trajectories) -> Standing:
        """Everybody, whether labelled or not."""
        sides = {label: file.trajectories for label, file in self.files.items()} | {FLOOR: training}
        return self._together(real, sides, self.dataset.person[self.dataset.split(self.split)])

    @cached_property
    def _groups(self) -> tuple[ByGroup, dict[str, ByGroup], dict[str, People]]:
        """Real people by group, each side by group, and who the real people are."""
        trajectories = Trajectories.of(self.dataset)
        members, training = (group_members(self.dataset, side) for side in (self.split, TRAIN))
        real, floor = (
            {name: trajectories.take(rows) for name, rows in each.items()}
            for each in (members, training)
        )
        sides = {
            label: {name: file.of_group(number) for number, name in enumerate(members)}
            for label, file in self.files.items()
        }
        return (
            real,
            sides | {FLOOR: floor},
            {name: self.dataset.person[rows] for name, rows in members.items()},
        )

    def _together(
        self, real: Trajectories, sides: Mapping[str, Trajectories], people: People
    ) -> Standing:
        one = {label: {EVERYBODY: side} for label, side in sides.items()}
        return self._standing({EVERYBODY: real}, one, {EVERYBODY: people})

    def _standing(
        self, real: ByGroup, sides: Mapping[str, ByGroup], people: Mapping[str, People]
    ) -> Standing:
        size = {
            name: min(len(found), *(len(side[name]) for side in sides.values()))
            for name, found in real.items()
        }
        scores, intervals = {}, {}
        for label, side in sides.items():
            scores[label] = evaluate_groups(self.yardstick, real, side, size=size, seed=self.seed)
            intervals[label] = bootstrap(
                self.yardstick,
                real,
                side,
                people,
                size=size,
                seed=self.seed,
                resamples=self.resamples,
            )
        return Standing(
            scores,
            intervals,
            _closed(intervals, FLOOR, floor_closed),
            _closed(intervals, STRONG, gap_closed),
        )


def _check_split(dataset: TrajectoryDataset, split: str) -> None:
    members = dataset.split(split)
    if split == TRAIN:
        raise MobatlasError(
            "--split train: models learn from these people and the floor is made of them; take val or test"
        )
    if not len(members):
        raise MobatlasError(
            f"--split {split}: {dataset.path} has no people in it; choose another, or prepare more people"
        )


def _thinned(parts: ByGroup, sizes: Mapping[str, int], seed: int) -> dict[str, Ints]:
    """Which of each group's stay, so many at random."""
    return {
        name: np.sort(
            np.random.default_rng([seed, crc32(name.encode()), MIXING]).permutation(
                len(parts[name])
            )[:n]
        )
        for name, n in sizes.items()
    }


def _joined(parts: ByGroup, rows: Mapping[str, Ints]) -> Trajectories:
    return Trajectories.joined([parts[name].take(found) for name, found in rows.items()])


def _closed(
    intervals: Mapping[str, Mapping[str, Interval]],
    target: str,
    share_of: Callable[[float, float, float, float], float | None],
) -> dict[str, Closed]:
    """By metric; nothing where there is no baseline or no target."""
    if BASELINE not in intervals or target not in intervals:
        return {}
    found = {}
    three = [intervals[label] for label in (OURS, BASELINE, target)]
    for metric in ALL_METRICS:
        if not all(metric.name in each for each in three):
            continue
        ours, begin, end = (each[metric.name] for each in three)
        spread, gap = math.hypot(begin.spread, end.spread), begin.estimate - end.estimate
        share = share_of(ours.estimate, begin.estimate, end.estimate, spread)
        reason = (
            f"the baseline is no worse than {target}"
            if gap <= 0
            else f"baseline - {target} is {gap:.4f}, within the spread {spread:.4f} of resampled people"
        )
        found[metric.name] = Closed(share, reason if share is None else None)
    return found


def _facts(file: Samples) -> dict[str, Any]:
    return {
        "path": str(file.path),
        "trajectories": len(file.trajectories),
        "by_group": file.groups is not None,
        "times": file.trajectories.stays is not None,
        "unknown_places": file.unknown_places,
        "unknown_visits": file.unknown_visits,
    }


def _plain(rows: Mapping[str, Interval | Closed]) -> dict[str, dict[str, Any]]:
    return {name: asdict(row) for name, row in rows.items()}
