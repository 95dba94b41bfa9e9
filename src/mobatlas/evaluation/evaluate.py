"""Evaluate a file of samples, by group and for everybody, against real people.

A baseline, a labelled model and the sampling floor are scored too (paper, Section 5). Without
labels, samplers predict the regions of held-out people, and the recovery predicts regions that are
left out.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from mobatlas.data.dataset import Trajectories, TrajectoryDataset
from mobatlas.data.samples import Samples, read_samples
from mobatlas.data.types import Floats
from mobatlas.errors import MobatlasError, refuse_faults
from mobatlas.evaluation.comparison import (
    EVERYBODY,
    FLOOR,
    RESAMPLES,
    SIGNAL,
    Comparison,
    Interval,
    Scores,
    compare_models,
    diversity,
    labelled_groups,
    match_groups,
    present,
    real_groups,
)
from mobatlas.evaluation.metrics import MetricSpec
from mobatlas.features.divergences import js, normalise
from mobatlas.groups import Groups
from mobatlas.regions.recovery.recover import recover
from mobatlas.regions.store import RegionsFolder
from mobatlas.regions.types import Regions
from mobatlas.supervision.calibration import Sampler
from mobatlas.supervision.finetune import FinetuneConfig, regional_loss

BASELINE = "baseline"
OURS = "ours"
STRONG = "strong"
STRONG_CALIBRATED = "strong, calibrated"
MODELS = (BASELINE, OURS, STRONG, STRONG_CALIBRATED, FLOOR)  # in the order of tables
TRAIN = "train"
ByGroup = dict[str, Trajectories]
FOLDS = 5


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
    gap_closed_floor: dict[str, GapClosed]  # baseline to floor by metric; empty without a baseline
    gap_closed_strong: dict[str, GapClosed]  # baseline to strong, the paper's; empty without both

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
    strong_calibrated: Samples | Path | str | None = None,
    seed: int = 0,
    resamples: int = RESAMPLES,
    rename: Mapping[str, str] | None = None,
) -> Evaluation:
    """Score a file of samples against the real people of a split.

    Parameters
    ----------
    samples, rename
        A file as of `generate`, and its names of columns. Without groups, all groups are compared.
    dataset, split
        The prepared dataset, and "test" or "val".
    baseline, strong, strong_calibrated
        Samples of the model without groups, of that trained on labels, and of the latter calibrated
        to labelled means, the ceiling. They are scored as well.
    seed, resamples
        Decides which trajectories are compared; all sides have equally many of a group. Bootstrap
        resamples of people for the 95 % intervals.

    Returns
    -------
    Evaluation
        Scores by group and for everybody.

    Examples
    --------
    >>> evaluate("samples.parquet", "dataset", baseline="base.parquet")  # doctest: +SKIP
    """
    opened = dataset if isinstance(dataset, TrajectoryDataset) else TrajectoryDataset.open(dataset)
    _check_split(opened, split, resamples)
    labels = labelled_groups(opened)
    sources = (baseline, samples, strong, strong_calibrated)
    files = {
        label: file
        if isinstance(file, Samples)
        else read_samples(file, opened.vocabulary, labels, rename)
        for label, file in zip(MODELS[:-1], sources, strict=True)  # the last is the floor
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
            yield f"{self.dataset.path}: has no labels; scores are for all people together"

    def by_group(self) -> tuple[ModelScores, dict[str, str]]:
        """Scores of the groups that all sides have, and why other groups are left out."""
        reasons = {
            **{label: f"has no trajectory in {file.path}" for label, file in self.files.items()},
            FLOOR: f"has no people in split '{TRAIN}', which the floor needs",
        }
        left_out = {}
        for name, held_out in self._all_real.items():
            missing = [
                reasons[label]
                for label in (OURS, *self._sides)
                if not len(self._sides[label][name])
            ]
            if not len(held_out):
                left_out[name] = f"has no people in split '{self.split}'"
            elif missing:
                left_out[name] = missing[0]
        real = {name: side for name, side in self._all_real.items() if name not in left_out}
        if not real:
            name, reason = next(iter(left_out.items()))
            raise MobatlasError(
                f"{self.files[OURS].path}: no group can be compared: '{name}' {reason}; "
                "give samples of groups that have people, or another --split"
            )
        sides = {label: {name: side[name] for name in real} for label, side in self._sides.items()}
        return self._score(real, sides, self._sides[FLOOR]), left_out

    def everybody(self, groups: ModelScores | None) -> ModelScores:
        """Scores and diversity of all people together; groups in the proportions of `groups`."""
        by_group = any(file.groups is not None for file in self.files.values())
        real, sides = self._mixed(groups.sizes) if groups and by_group else self._together()
        held_out, training = (
            Trajectories.of(self.dataset, self.dataset.split(side)) for side in (self.split, TRAIN)
        )
        result = self._score(
            {EVERYBODY: real},
            {label: {EVERYBODY: side} for label, side in sides.items()},
            {EVERYBODY: training},
        )
        for label, file in self.files.items():
            result.scores[label] = replace(
                result.scores[label], diversity=diversity(file.trajectories, training, held_out)
            )
        return result

    def _mixed(self, sizes: Mapping[str, int]) -> tuple[Trajectories, ByGroup]:
        """The compared trajectories of all groups together; files without groups as they are."""
        real = {name: self._all_real[name] for name in sizes}
        sides = {label: {name: side[name] for name in sizes} for label, side in self._sides.items()}
        matched = match_groups(real, sides, seed=self.seed)  # the rows that `by_group` compares
        joined = {
            label: Trajectories.joined([chosen[label] for _, chosen in matched.values()])
            for label in sides
        }
        without_groups = {
            label: file.trajectories for label, file in self.files.items() if file.groups is None
        }
        return Trajectories.joined([ours for ours, _ in matched.values()]), joined | without_groups

    def _together(self) -> tuple[Trajectories, ByGroup]:
        """Everybody, with or without labels."""
        sides = {label: file.trajectories for label, file in self.files.items()}
        sides[FLOOR] = Trajectories.of(self.dataset, self.dataset.split(TRAIN))
        return Trajectories.of(self.dataset, self.dataset.split(self.split)), sides

    @cached_property
    def _all_real(self) -> ByGroup:
        return real_groups(self.dataset, self.split)

    @cached_property
    def _sides(self) -> dict[str, ByGroup]:
        sides = {
            label: {name: file.of_group(number) for number, name in enumerate(self._all_real)}
            for label, file in self.files.items()
        }
        return sides | {FLOOR: real_groups(self.dataset, TRAIN)}

    def _score(
        self, real: ByGroup, sides: Mapping[str, ByGroup], reference: ByGroup
    ) -> ModelScores:
        comparison = compare_models(
            self.spec,
            real,
            sides,
            seed=self.seed,
            resamples=self.resamples,
            reference=reference,
        )
        return ModelScores(
            comparison.scores,
            {label: comparison.intervals(label) for label in sides},
            _gaps_closed(comparison, FLOOR),
            _gaps_closed(comparison, STRONG),
        )


def _check_split(dataset: TrajectoryDataset, split: str, resamples: int) -> None:
    refuse_faults(
        {
            f"resamples={resamples}: pass at least 2, such as {RESAMPLES}": resamples < 2,
            "--split train: models are trained on these people and the floor is computed from "
            "them; choose val or test": split == TRAIN,
            f"--split {split}: {dataset.path} has no people in this split; choose another, or "
            "prepare more people": not len(dataset.split(split)),
        }
    )


def _gaps_closed(comparison: Comparison, target: str) -> dict[str, GapClosed]:
    """The gap from baseline to target that ours closes, by metric."""
    compared = [comparison.scores.get(label) for label in (BASELINE, OURS, target)]
    gaps: dict[str, GapClosed] = {}
    if None in compared:
        return gaps
    for metric in comparison.scores[OURS].average:
        if not all(scores is not None and metric in scores.average for scores in compared):
            continue
        share = comparison.gap_closed(OURS, metric, BASELINE, target)
        gap, error = comparison.gap(metric, BASELINE, target)
        if gap <= 0:
            reason = f"the baseline is no worse than {target}"
        elif not comparison.has_error(error):
            reason = "its standard error is unknown, because a group has one person only"
        else:
            reason = (
                f"the gap from baseline to {target} is {gap:.4f}, less than {SIGNAL:g} standard "
                f"errors of {error:.4f}"
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


def held_out_people(
    samplers: Mapping[str, Sampler],
    dataset: TrajectoryDataset,
    regions_folder: RegionsFolder | Path | str,
    seed: int = 0,
) -> dict[str, float] | None:
    """JSD in bits between the regions that each sampler simulates and those of validation people.

    None if the folder has no aggregates of validation people.
    """
    folder = RegionsFolder.open(regions_folder)
    if folder.validation is None:
        return None
    config = FinetuneConfig()
    return {
        name: regional_loss(sampler, dataset, folder, config, seed)
        for name, sampler in samplers.items()
    }


def held_out_regions(
    regions: Regions, seed: int = 0, folds: int = FOLDS, *, parents: Mapping[str, str] | None = None
) -> dict[str, Any] | None:
    """JSD in bits between regions and their prediction from the other regions.

    Predictions are by group means and by the mean of everybody. None if there are too few regions
    to leave some out.
    """
    count = len(regions.composition.regions)
    if count < 2 * folds:
        return None
    fold = np.random.default_rng([seed, 5]).permutation(count) % folds
    by_groups = np.zeros(count)
    by_everybody = np.zeros(count)
    for number in range(folds):
        test = np.flatnonzero(fold == number)
        recovery = recover(
            regions.select(np.flatnonzero(fold != number)), parents=parents, quiet=True
        )
        predicted = regions.composition.shares[test] @ recovery.means  # (regions, features)
        for row, region in zip(predicted, test.tolist(), strict=True):
            values = regions.aggregates.values[region]
            by_groups[region] = _jsd_of_known(row, values)
            by_everybody[region] = _jsd_of_known(recovery.baseline, values)
    weight = regions.aggregates.n
    return {
        "regions": count,
        "by_groups": float(np.average(by_groups, weights=weight)),
        "by_everybody": float(np.average(by_everybody, weights=weight)),
        "better_in": float((by_groups < by_everybody).mean()),
    }


def _jsd_of_known(predicted: Floats, values: Floats) -> float:
    """The JSD of shares over the bins that are not suppressed."""
    known = ~np.isnan(values)
    if not known.any() or not values[known].sum() > 0:
        return 0.0
    return float(js(normalise(np.maximum(predicted[known], 0)), normalise(values[known])))
