"""Weighted training people instead of samples, scored in the same way as samples.

They show the gap that weights close before any generator is trained: same metrics, same test
people, equal sizes. Unweighted training people are the baseline, those of the group the floor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy import sparse

from mobatlas.data.dataset import Trajectories, TrajectoryDataset
from mobatlas.data.types import Floats, Ints
from mobatlas.evaluation.comparison import gap_closed, group_members
from mobatlas.evaluation.metrics import MetricSpec
from mobatlas.evaluation.resampling import resample
from mobatlas.features.divergences import jsd_rows

METRICS = ("poi", "travel_distance", "category", "transitions", "spatial")
DRAWS = 60  # they are cheap
SEED = (0, 5)
DRAWING = {"draws": DRAWS, "seed": list(SEED), "repeated": "by weight alone"}  # for result files


@dataclass(frozen=True)
class WeightedPeople:
    """Counts of training and test trajectories in each metric, for surveys of one day a person."""

    counts: Mapping[str, sparse.csr_array]  # metric -> (training trajectories, bins)
    row: Ints  # (training trajectories,) index of the person among training people
    group: Ints  # (training people,)
    real: Mapping[str, list[sparse.csr_array]]  # metric -> test trajectories of each group, bins
    sizes: Ints  # (groups,) test trajectories

    @classmethod
    def of(cls, dataset: TrajectoryDataset) -> WeightedPeople:
        """Count a dataset; labels are used only for the comparison."""
        spec = MetricSpec.of(dataset)
        train = dataset.split("train")
        people = np.unique(dataset.person[train])
        test = group_members(dataset, "test").values()
        counted = [spec.counts(Trajectories.of(dataset, rows)) for rows in test]
        counts = spec.counts(Trajectories.of(dataset, train))
        real = {metric: [each[metric] for each in counted] for metric in METRICS}
        return cls(
            {metric: counts[metric] for metric in METRICS},
            np.searchsorted(people, dataset.person[train]),
            dataset.person_groups()[people],
            real,
            np.array([len(rows) for rows in test]),
        )

    def gap_closed(self, weights: Floats) -> dict[str, float | None]:
        """Return the gap that weights (people, groups) close in each metric."""
        baseline, floor = self._ends
        gap_error = self._gap_error
        scores = self._divergences(weights)
        return {
            metric: gap_closed(
                float(scores[metric].mean()),
                float(baseline[metric].mean()),
                float(floor[metric].mean()),
                standard_error=gap_error[metric],
            )
            for metric in METRICS
        }

    @property
    def _own_group(self) -> Floats:
        """Weights (people, groups) of the people of each group alone."""
        return (self.group[:, None] == np.arange(len(self.sizes))).astype(float)

    @cached_property
    def _ends(self) -> tuple[dict[str, Floats], dict[str, Floats]]:
        """Baseline and floor: equal weights, and the people of the group alone."""
        return self._divergences(np.ones_like(self._own_group)), self._divergences(self._own_group)

    @cached_property
    def _gap_error(self) -> dict[str, float]:
        """The standard error of the gap from baseline to floor, if test people are resampled."""
        baseline, floor = (
            self._divergences(weights, resampled=True)
            for weights in (np.ones_like(self._own_group), self._own_group)
        )
        return {metric: float((baseline[metric] - floor[metric]).std(ddof=1)) for metric in METRICS}

    def _divergences(self, weights: Floats, *, resampled: bool = False) -> dict[str, Floats]:
        """Return the mean JSD over groups of each draw, at the sizes of the test trajectories.

        Groups without test trajectories do not count.
        """
        # The same random numbers for all weights, so that their noise cancels in part.
        rng = np.random.default_rng(SEED)
        other_rng = np.random.default_rng([*SEED, 1])
        scores: dict[str, list[Floats]] = {metric: [] for metric in METRICS}
        for group, size in enumerate(self.sizes.tolist()):
            expected = np.maximum(weights[self.row, group], 0)  # (training trajectories,)
            if not size or not expected.sum() > 0:
                continue
            rows = np.stack([draw_rows(expected, size, rng) for _ in range(DRAWS)])
            draw = np.repeat(np.arange(DRAWS), size)
            shape = (DRAWS, len(expected))
            repeats = sparse.csr_array((np.ones(rows.size), (draw, rows.ravel())), shape=shape)
            drawn = np.ones((DRAWS, size))  # how often each test trajectory counts
            if resampled:
                drawn += resample(size, DRAWS, other_rng)
            for metric, counts in self.counts.items():
                histograms = (repeats @ counts).toarray()  # (draws, bins)
                real = np.asarray(drawn @ self.real[metric][group])
                scores[metric].append(jsd_rows(real, histograms))
        return {metric: np.mean(values, axis=0) for metric, values in scores.items()}


def draw_rows(weights: Floats, size: int, rng: np.random.Generator) -> Ints:
    """Draw `size` rows in proportion to weights by Pareto sampling (Rosen 1997).

    The whole part of an expected count is certain; the rest is drawn without repetition. Sampling
    with replacement would repeat people. Groups are smaller than the population, so repeats would
    raise the floor.
    """
    expected = weights * (size / weights.sum())  # (rows,)
    certain = np.floor(expected + 1e-9).astype(np.int64)
    rest = np.maximum(expected - certain, 0)
    chance = rng.random(len(weights))
    candidates = np.flatnonzero(rest > 1e-12)
    left = size - int(certain.sum())
    odds = chance[candidates] / (1 - chance[candidates])
    keys = odds * (1 - rest[candidates]) / rest[candidates]
    last = candidates[np.argpartition(keys, left - 1)[:left]] if left else candidates[:0]
    return np.concatenate([np.repeat(np.arange(len(weights)), certain), last])
