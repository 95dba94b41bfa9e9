"""Evaluate a file of samples, by group and for everybody, against real people.

A baseline, a labelled model and the sampling floor are scored too (paper, Section 5).
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np

from mobatlas.data.arrays import Ints
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
    diversity,
    evaluate_groups,
    gap_closed,
    group_members,
    labelled_groups,
    present,
    real_groups,
)
from mobatlas.evaluation.metrics import MetricSpec
from mobatlas.groups import Groups

BASELINE = "baseline"
OURS = "ours"
STRONG = "strong"
FLOOR = "floor"
MODELS = (BASELINE, OURS, STRONG, FLOOR)  # in the order of tables
TRAIN = "train"
MIXING = 3  # a stream of random numbers
ByGroup = dict[str, Trajectories]
# Real people, model -> trajectories, and the person of each real trajectory.
_Everybody = tuple[Trajectories, dict[str, Trajectories], People]


@dataclass(frozen=True)
class GapClosed:
    """The share of a gap that the samples close; None, with the reason, if there is no gap."""

    share: float | None
    reason: str | None = None


@dataclass(frozen=True)
class ModelScores:
    """All models and the floor against the same real people, at equal sizes."""

    scores: dict[str, Scores]  # model -> divergences
    intervals: dict[str, dict[str, Interval]]  # model -> metric -> interval of the average
    gap_closed_floor: dict[str, GapClosed]  # by metric; empty without a baseline
    gap_closed_strong: dict[str, GapClosed]  # by metric; empty without baseline and strong

    @property
    def sizes(self) -> dict[str, int]:
        """Trajectories on either side, by group."""
        return self.scores[OURS].sizes


@dataclass(frozen=True)
class Evaluation:
    """How close the samples of a file are to real people; see `evaluate`."""

    dataset: str
    split: str
    seed: int
    files: dict[str, dict[str, Any]]  # model -> path, trajectories, by_group, times, unknown places
    groups: ModelScores | None  # None if the dataset has no labels
    everybody: ModelScores  # these groups together, in equal proportions; scores hold diversity
    left_out: dict[str, str]  # group -> reason
    warnings: tuple[str, ...]
    metric_spec: dict[str, Any]

    def as_dict(self) -> dict[str, Any]:
        """All numbers, for JSON."""
        return asdict(self, dict_factory=present)


def evaluate(
    samples: Samples | Path | str,
    dataset: TrajectoryDataset | Path | str,
    *,
    split: str = "test",
    baseline: Samples | Path | str | None = None,
    strong: Samples | Path | str | None = None,
    seed: int = 0,
    resamples: int = 200,
) -> Evaluation:
    """Score a file of samples against the real people of a split.

    Parameters
    ----------
    samples
        A file that `generate` wrote. Without groups it is compared with the people of each group.
    dataset
        The prepared dataset.
    split
        "test" or "val".
    baseline, strong
        Samples of the model without groups and of the model trained on labels, also scored.
    seed
        Decides which trajectories are compared; all sides have equally many of a group.
    resamples
        Bootstrap resamples of people for the 95 % intervals.

    Returns
    -------
    Evaluation
        Scores by group and for everybody; `evaluation_tables` turns them into tables.

    Examples
    --------
    >>> evaluate("samples.parquet", "dataset", baseline="base.parquet")  # doctest: +SKIP
    """
    opened = dataset if isinstance(dataset, TrajectoryDataset) else TrajectoryDataset.open(dataset)
    _check_split(opened, split)
    labels = labelled_groups(opened)
    files = {
        label: file if isinstance(file, Samples) else read_samples(file, opened.vocabulary, labels)
        for label, file in ((BASELINE, baseline), (OURS, samples), (STRONG, strong))
        if file is not None
    }
    scorer = _Scorer(opened, split, files, MetricSpec.of(opened), seed, resamples)
    groups, left_out = (None, {}) if labels is None else scorer.by_group()
    return Evaluation(
        dataset=str(opened.path),
        split=split,
        seed=seed,
        files={label: _file_facts(file) for label, file in files.items()},
        groups=groups,
        everybody=scorer.everybody(groups),
        left_out=left_out,
        warnings=tuple(scorer.warnings(labels)),
        metric_spec=scorer.spec.as_dict(),
    )


def sample_reader(dataset: TrajectoryDataset) -> Callable[..., Samples]:
    """A function of a path and `groups` that reads each file of samples once."""
    return cache(partial(read_samples, vocabulary=dataset.vocabulary))


@dataclass(frozen=True)
class _Scorer:
    """Scores all files and the floor against the same people."""

    dataset: TrajectoryDataset
    split: str
    files: Mapping[str, Samples]
    spec: MetricSpec
    seed: int
    resamples: int

    def warnings(self, labels: Groups | None) -> Iterator[str]:
        for file in self.files.values():
            yield from file.warnings
        if labels is None:
            yield f"{self.dataset.path}: has no labels; scores are for everybody, not by group"

    def by_group(self) -> tuple[ModelScores, dict[str, str]]:
        """Scores of the groups that all sides have, and why other groups are left out."""
        reasons = {
            **{label: f"has no trajectory in {file.path}" for label, file in self.files.items()},
            FLOOR: f"has no people in split '{TRAIN}', which the floor needs",
        }
        left_out = {}
        for name, held_out in self._real.items():
            missing = [
                reasons[label]
                for label in (OURS, *self._sides)
                if not len(self._sides[label][name])
            ]
            if not len(held_out):
                left_out[name] = f"has no people in split '{self.split}'"
            elif missing:
                left_out[name] = missing[0]
        real = {name: side for name, side in self._real.items() if name not in left_out}
        if not real:
            name, reason = next(iter(left_out.items()))
            raise MobatlasError(
                f"{self.files[OURS].path}: no group can be compared: '{name}' {reason}; "
                "give samples of groups that have people, or another --split"
            )
        sides = {label: {name: side[name] for name in real} for label, side in self._sides.items()}
        return self._score(real, sides, self._people), left_out

    def everybody(self, groups: ModelScores | None) -> ModelScores:
        """Scores and diversity of all people together; groups in the proportions of `groups`."""
        by_group = any(file.groups is not None for file in self.files.values())
        real, sides, people = self._mixed(groups.sizes) if groups and by_group else self._together()
        result = self._score(
            {EVERYBODY: real},
            {label: {EVERYBODY: side} for label, side in sides.items()},
            {EVERYBODY: people},
        )
        held_out, training = (
            Trajectories.of(self.dataset, self.dataset.split(side)) for side in (self.split, TRAIN)
        )
        for label, file in self.files.items():
            result.scores[label] = replace(
                result.scores[label], diversity=diversity(file.trajectories, training, held_out)
            )
        return result

    def _mixed(self, sizes: Mapping[str, int]) -> _Everybody:
        """The groups together, `sizes` of each on all sides; files without groups as they are."""
        without_groups = {
            label: file.trajectories for label, file in self.files.items() if file.groups is None
        }
        rows = self._thinned_rows(self._real, sizes)
        sides = {
            label: without_groups.get(label, _joined(side, self._thinned_rows(side, sizes)))
            for label, side in self._sides.items()
        }
        people = np.concatenate([self._people[name][chosen] for name, chosen in rows.items()])
        return _joined(self._real, rows), sides, people

    def _together(self) -> _Everybody:
        """Everybody, with or without labels."""
        rows = self.dataset.split(self.split)
        sides = {label: file.trajectories for label, file in self.files.items()}
        sides[FLOOR] = Trajectories.of(self.dataset, self.dataset.split(TRAIN))
        return Trajectories.of(self.dataset, rows), sides, self.dataset.person[rows]

    @cached_property
    def _real(self) -> ByGroup:
        return real_groups(self.dataset, self.split)

    @cached_property
    def _sides(self) -> dict[str, ByGroup]:
        sides = {
            label: {name: file.of_group(number) for number, name in enumerate(self._real)}
            for label, file in self.files.items()
        }
        return sides | {FLOOR: real_groups(self.dataset, TRAIN)}

    @cached_property
    def _people(self) -> dict[str, People]:
        return {
            name: self.dataset.person[rows]
            for name, rows in group_members(self.dataset, self.split).items()
        }

    def _thinned_rows(self, parts: ByGroup, sizes: Mapping[str, int]) -> dict[str, Ints]:
        """Which trajectories of each group are mixed, at random."""
        rows = {}
        for name, n in sizes.items():
            rng = np.random.default_rng([self.seed, crc32(name.encode()), MIXING])
            rows[name] = np.sort(rng.permutation(len(parts[name]))[:n])
        return rows

    def _score(
        self, real: ByGroup, sides: Mapping[str, ByGroup], people: Mapping[str, People]
    ) -> ModelScores:
        size = {
            name: min(len(rows), *(len(side[name]) for side in sides.values()))
            for name, rows in real.items()
        }
        scores = {}
        intervals = {}
        for label, side in sides.items():
            scores[label] = evaluate_groups(self.spec, real, side, size=size, seed=self.seed)
            intervals[label] = bootstrap(
                self.spec, real, side, people, size=size, seed=self.seed, resamples=self.resamples
            )
        floor, strong = (_gaps_closed(intervals, target) for target in (FLOOR, STRONG))
        return ModelScores(scores, intervals, floor, strong)


def _check_split(dataset: TrajectoryDataset, split: str) -> None:
    if split == TRAIN:
        raise MobatlasError(
            "--split train: models are trained on these people and the floor is computed from "
            "them; choose val or test"
        )
    if not len(dataset.split(split)):
        raise MobatlasError(
            f"--split {split}: {dataset.path} has no people in this split; "
            "choose another, or prepare more people"
        )


def _joined(parts: ByGroup, rows: Mapping[str, Ints]) -> Trajectories:
    return Trajectories.joined([parts[name].take(chosen) for name, chosen in rows.items()])


def _gaps_closed(
    intervals: Mapping[str, Mapping[str, Interval]], target: str
) -> dict[str, GapClosed]:
    """The gap from baseline to target that ours closes, by metric."""
    if BASELINE not in intervals or target not in intervals:
        return {}
    gaps = {}
    for metric, ours in intervals[OURS].items():
        if metric not in intervals[BASELINE] or metric not in intervals[target]:
            continue
        start = intervals[BASELINE][metric]
        end = intervals[target][metric]
        spread = math.hypot(start.spread, end.spread)
        gap = start.estimate - end.estimate
        share = gap_closed(ours.estimate, start.estimate, end.estimate, spread)
        reason = (
            f"the baseline is no worse than {target}"
            if gap <= 0
            else f"the gap from baseline to {target} is {gap:.4f}, below its bootstrap spread of "
            f"{spread:.4f}"
        )
        gaps[metric] = GapClosed(share, reason if share is None else None)
    return gaps


def _file_facts(file: Samples) -> dict[str, Any]:
    return {
        "path": str(file.path),
        "trajectories": len(file.trajectories),
        "by_group": file.groups is not None,
        "times": file.trajectories.stays is not None,
        "unknown_places": file.unknown_places,
        "unknown_visits": file.unknown_visits,
    }
