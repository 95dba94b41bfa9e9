"""Training people in the place of samples: drawn for each group by weights, and measured as samples of a model are.

What a stage closes before there is any generator so stands beside what models close: the same metrics against the same test
people, at equal sizes, from unweighted training people to those of the group.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy import sparse

from mobatlas.data.arrays import Floats, Ints
from mobatlas.data.dataset import TrajectoryDataset
from mobatlas.data.trajectories import Trajectories
from mobatlas.evaluation.comparison import gap_closed, group_members
from mobatlas.evaluation.metrics import MetricSpec
from mobatlas.features.divergences import jsd_rows

METRICS = ("poi", "travel_distance", "category", "transitions", "spatial")
DRAWS = 60  # they cost little
SEED = (0, 5)
MANNER = {"draws": DRAWS, "seed": list(SEED), "repeated": "by weight alone"}  # how they are drawn


@dataclass(frozen=True)
class Crowd:
    """What training trajectories count in each metric, and what test people of each group do."""

    counts: Mapping[str, sparse.csr_array]  # metric -> (training trajectories, bins)
    row: Ints  # (training trajectories,) the place of each person among training people
    group: Ints  # (training people,)
    real: Mapping[str, Floats]  # metric -> (groups, bins)
    sizes: Ints  # (groups,) test trajectories

    @classmethod
    def of(cls, dataset: TrajectoryDataset) -> Crowd:
        """Labels serve to compare, and for nothing else."""
        spec, train = MetricSpec.of(dataset), dataset.split("train")
        people = np.unique(dataset.person[train])
        tested = group_members(dataset, "test").values()
        histograms = [spec.histograms(Trajectories.of(dataset, rows)) for rows in tested]
        counts = spec.counts(Trajectories.of(dataset, train))
        return cls(
            {metric: counts[metric] for metric in METRICS},
            np.searchsorted(people, dataset.person[train]),
            dataset.person_groups()[people],
            {
                metric: np.vstack([each[metric].toarray() for each in histograms])
                for metric in METRICS
            },
            np.array([len(rows) for rows in tested]),
        )

    def closed(self, weights: Floats) -> dict[str, float | None]:
        """Metric by metric the share of the way that people weighed for each group (people, groups) close."""
        ends, found = self._ends, self._divergences(weights)
        return {
            metric: gap_closed(found[metric], *(end[metric] for end in ends)) for metric in METRICS
        }

    @cached_property
    def _ends(self) -> tuple[dict[str, float], dict[str, float]]:
        """Everybody alike, and the people of the group alone."""
        alone = (self.group[:, None] == np.arange(len(self.sizes))).astype(float)
        return self._divergences(np.ones_like(alone)), self._divergences(alone)

    def _divergences(self, weights: Floats) -> dict[str, float]:
        """Mean over groups and draws of as many trajectories as the group has test ones; nobody tested, not counted."""
        rng = np.random.default_rng(
            SEED
        )  # the same for all weights, whose noise so cancels in part
        found: dict[str, list[float]] = {metric: [] for metric in METRICS}
        for group, size in enumerate(self.sizes.tolist()):
            each = np.maximum(weights[self.row, group], 0)  # (training trajectories,)
            if not size or not each.sum() > 0:
                continue
            drawn = np.stack([_some(each, size, rng) for _ in range(DRAWS)])
            where = (np.repeat(np.arange(DRAWS), size), drawn.ravel())
            times = sparse.csr_array((np.ones(drawn.size), where), shape=(DRAWS, len(each)))
            for metric, counts in self.counts.items():
                made = (times @ counts).toarray()
                real = np.broadcast_to(self.real[metric][group], made.shape)
                found[metric].append(float(jsd_rows(real, made).mean()))
        return {metric: float(np.mean(values)) for metric, values in found.items()}


def _some(weights: Floats, size: int, rng: np.random.Generator) -> Ints:
    """So many rows, each as often as its weight says: whole times for certain, what is left by Pareto sampling (Rosen 1997).

    Whoever is drawn twice by chance tells nothing new, and a group has fewer people to repeat than the population: so drawn,
    the floor would be worse than samples of so many are, and all else would seem near to it.
    """
    expected = weights * (size / weights.sum())  # (rows,)
    whole = np.floor(expected + 1e-9).astype(np.int64)
    part, chance = np.maximum(expected - whole, 0), rng.random(len(weights))
    open_, left = np.flatnonzero(part > 1e-12), size - int(whole.sum())
    keys = chance[open_] / (1 - chance[open_]) * (1 - part[open_]) / part[open_]
    last = open_[np.argpartition(keys, left - 1)[:left]] if left else open_[:0]
    return np.concatenate([np.repeat(np.arange(len(weights)), whole), last])
