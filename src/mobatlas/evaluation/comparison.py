"""Comparison: real against synthetic trajectories by group, the sampling floor, the gap closed, and error bars."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import numpy as np
import numpy.typing as npt
from scipy import sparse

from mobatlas.data.dataset import TrajectoryDataset
from mobatlas.data.trajectories import Trajectories
from mobatlas.errors import MobatlasError
from mobatlas.evaluation.metrics import (
    ALL_METRICS,
    METRICS,
    Floats,
    Ints,
    Yardstick,
    column_sums,
    compact,
    jsd,
    jsd_rows,
)

EVERYBODY = "everybody"
REAL, SYNTHETIC, AGAIN = 0, 1, 2  # streams of random numbers
BLOCK = 4_000_000  # numbers of a block of resampled histograms: 32 MB
People = npt.NDArray[np.integer[Any]]  # (trajectories,) the person of each
Size = int | Mapping[str, int] | None  # trajectories of a group, at most


@dataclass(frozen=True)
class Scores:
    """Divergences by group, and their unweighted mean over groups."""

    groups: dict[str, dict[str, float]]  # group -> metric -> JSD in bits
    sizes: dict[str, int]  # trajectories on either side
    average: dict[str, float]
    diversity: dict[str, Any] | None = None  # of the samples of all groups, see `diversity`

    def as_dict(self) -> dict[str, Any]:
        """For reports."""
        said = {"groups": self.groups, "sizes": self.sizes, "average": self.average}
        return said if self.diversity is None else {**said, "diversity": self.diversity}


@dataclass(frozen=True)
class Floor:
    """What sampling alone leaves between training and other people."""

    groups: Scores | None  # None where the dataset has no labels
    everybody: Scores  # one group, labelled or not


@dataclass(frozen=True)
class Interval:
    """An estimate with a confidence interval and the standard deviation of its resamples."""

    estimate: float
    low: float
    high: float
    spread: float


def compare(yardstick: Yardstick, real: Trajectories, synthetic: Trajectories) -> dict[str, float]:
    """Every metric of two samples as they are; give them equal sizes, because JSD falls with the size of either.

    Hours and dwell are compared where both tell when.
    """
    ours, theirs = yardstick.histograms(real), yardstick.histograms(synthetic)
    return {name: jsd(ours[name], theirs[name]) for name in ours if name in theirs}


def evaluate_groups(
    yardstick: Yardstick,
    real: Mapping[str, Trajectories],
    synthetic: Mapping[str, Trajectories],
    *,
    size: Size = None,
    seed: int = 0,
) -> Scores:
    """Every metric by group at equal sizes: as many trajectories as the smaller side has, and at most `size`.

    The larger side is thinned at random. Who stays depends on the seed, the name of the group and the number, not on the
    other side, so that models of one size meet the same real trajectories.
    """
    groups, sizes = {}, {}
    for name in _common(real, synthetic):
        mine, theirs = _equal(name, len(real[name]), len(synthetic[name]), size, seed)
        groups[name] = compare(yardstick, real[name].take(mine), synthetic[name].take(theirs))
        sizes[name] = len(mine)
    return Scores(groups, sizes, average_scores(groups))


def sampling_floor(
    dataset: TrajectoryDataset,
    yardstick: Yardstick | None = None,
    *,
    split: str = "test",
    size: Size = None,
    seed: int = 0,
) -> Floor:
    """Real training people against real people of `split`, by group and all together, at equal sizes.

    Equal numbers of trajectories are drawn at random, without replacement, among those of each split. A person may give
    several windows to one side, but nobody is on both, because people are split and not windows. Pass the sizes of the
    scores that stand beside the floor; a mapping may also name 'everybody'.
    """
    yardstick = Yardstick.of(dataset) if yardstick is None else yardstick
    trajectories, sides = Trajectories.of(dataset), (split, "train")
    everybody = [{EVERYBODY: trajectories.take(dataset.split(side))} for side in sides]
    groups = None
    if dataset.groups is not None and dataset.labels() is not None:
        members = [group_members(dataset, side) for side in sides]
        real, other = (
            {name: trajectories.take(rows) for name, rows in found.items()} for found in members
        )
        groups = evaluate_groups(yardstick, real, other, size=size, seed=seed)
    return Floor(groups, evaluate_groups(yardstick, *everybody, size=size, seed=seed))


def group_members(dataset: TrajectoryDataset, split: str) -> dict[str, Ints]:
    """The numbers of the trajectories of each group, among the people of a split."""
    members = dataset.split(split)
    group = dataset.person_groups()[dataset.person[members]]
    assert dataset.groups is not None  # or its people would have none
    return {name: members[group == number] for number, name in enumerate(dataset.groups.names)}


def real_groups(dataset: TrajectoryDataset, split: str = "train") -> dict[str, Trajectories]:
    """The trajectories of real people by group."""
    return {
        name: Trajectories.of(dataset, rows) for name, rows in group_members(dataset, split).items()
    }


def gap_closed(model: float, baseline: float, strong: float, spread: float = 0.0) -> float | None:
    """How far a model comes from the baseline to the strong one: 0 at the baseline, 1 at strong, more beyond it.

    None where the baseline is not worse than strong, or by less than `spread`: there is no gap to close.
    """
    gap = baseline - strong
    if not (math.isfinite(model) and math.isfinite(gap)) or gap <= 0 or gap < spread:
        return None
    return 1 - (model - strong) / gap


def floor_closed(model: float, baseline: float, floor: float, spread: float = 0.0) -> float | None:
    """How far a model comes from the baseline to the sampling floor, under the same terms."""
    return gap_closed(model, baseline, floor, spread)


def bootstrap(
    yardstick: Yardstick,
    real: Mapping[str, Trajectories],
    synthetic: Mapping[str, Trajectories],
    people: Mapping[str, People],
    *,
    size: Size = None,
    seed: int = 0,
    resamples: int = 200,
    level: float = 0.95,
) -> dict[str, Interval]:
    """Confidence intervals of the averages that `evaluate_groups` gives for the same arguments.

    `people` holds the person of each real trajectory. Real people with all their windows, and synthetic trajectories, are
    drawn again with replacement. Resamples of sparse histograms lie further apart than the samples do, so their deviations
    from their own mean are laid around the estimate: the interval is about JSD at this sample size, like the estimate.
    """
    names, timed = (
        _common(real, synthetic),
        all(each.stays is not None for each in (*real.values(), *synthetic.values())),
    )
    draws = {metric.name: np.zeros(resamples) for metric in (ALL_METRICS if timed else METRICS)}
    estimates = dict.fromkeys(draws, 0.0)
    for name in names:
        mine, theirs = _equal(name, len(real[name]), len(synthetic[name]), size, seed)
        rng = np.random.default_rng([seed, crc32(name.encode()), AGAIN])
        drawn = (
            _redraw(people[name][mine], resamples, rng),
            _redraw(np.arange(len(theirs)), resamples, rng),
        )
        ours, others = (
            yardstick.counts(real[name].take(mine)),
            yardstick.counts(synthetic[name].take(theirs)),
        )
        for metric in draws:
            estimates[metric] += jsd(column_sums(ours[metric]), column_sums(others[metric]))
            draws[metric] += _redrawn_jsd(compact(ours[metric], others[metric]), drawn)
    return {
        metric: interval(estimates[metric] / len(names), found / len(names), level)
        for metric, found in draws.items()
    }


def _common(real: Mapping[str, Trajectories], synthetic: Mapping[str, Trajectories]) -> list[str]:
    """The groups, in the order of the real side; an average over fewer than asked for would mislead."""
    for name in [*real, *synthetic]:
        missing = "real" if name not in real else "synthetic"
        if name not in real or name not in synthetic:
            raise MobatlasError(
                f"group '{name}' has no {missing} trajectories; give the same groups on both sides"
            )
    if not real:
        raise MobatlasError("no group to evaluate; give at least one on both sides")
    return list(real)


def _equal(name: str, real: int, synthetic: int, size: Size, seed: int) -> tuple[Ints, Ints]:
    """Which trajectories of a group stay on either side, equally many."""
    limit = size.get(name) if isinstance(size, Mapping) else size
    n = min(real, synthetic) if limit is None else min(real, synthetic, limit)
    if n < 1:
        raise MobatlasError(
            f"group '{name}': {real} real trajectories against {synthetic} leave nothing to compare"
            + ("" if limit is None else f" at size {limit}")
        )
    mine, theirs = (
        np.sort(np.random.default_rng([seed, crc32(name.encode()), side]).permutation(total)[:n])
        for side, total in ((REAL, real), (SYNTHETIC, synthetic))
    )
    return mine, theirs


def average_scores(groups: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    names = [
        metric.name for metric in ALL_METRICS if all(metric.name in row for row in groups.values())
    ]
    return {name: float(np.mean([row[name] for row in groups.values()])) for name in names}


def _redraw(unit: People, resamples: int, rng: np.random.Generator) -> Floats:
    """How often each row is drawn, (resamples, rows), when as many units as there are come back with all their rows."""
    _, number = np.unique(unit, return_inverse=True)
    units = int(number.max()) + 1
    drawn = rng.multinomial(units, np.full(units, 1 / units), size=resamples)  # (resamples, units)
    return drawn[:, number].astype(np.float64)


def _redrawn_jsd(
    tables: tuple[sparse.csr_array, sparse.csr_array], drawn: tuple[Floats, Floats]
) -> Floats:
    """The JSD of each resample: weights times counts, some resamples at a time."""
    resamples, bins = len(drawn[0]), tables[0].shape[1]
    block = max(1, BLOCK // max(1, bins))
    found = [
        jsd_rows(
            *(
                weights[start : start + block] @ table
                for weights, table in zip(drawn, tables, strict=True)
            )
        )
        for start in range(0, resamples, block)
    ]
    return np.concatenate(found)  # (resamples,)


def interval(estimate: float, draws: Floats, level: float) -> Interval:
    """Of a number between 0 and 1: how resamples deviate from their own mean, around the estimate."""
    low, high = estimate + np.quantile(draws - draws.mean(), ((1 - level) / 2, (1 + level) / 2))
    return Interval(estimate, max(0.0, float(low)), min(1.0, float(high)), float(draws.std(ddof=1)))
