"""Feature vectors phi(x) of a dataset, and the means of phi that groups are calibrated to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import compress
from pathlib import Path

import numpy as np
from scipy import optimize, sparse

from mobatlas.data.arrays import Floats, Ints
from mobatlas.data.dataset import TrajectoryDataset
from mobatlas.data.trajectories import Trajectories
from mobatlas.data.vocabulary import Vocabulary
from mobatlas.errors import MobatlasError, suggestion
from mobatlas.features.divergences import js, normalise
from mobatlas.features.maps import FEATURES, FeatureMap, build_feature
from mobatlas.groups import Groups
from mobatlas.regions.aggregates import person_means
from mobatlas.regions.types import bins_by_map

STEEPEST = 3.0  # tilt of the number of visits, per standard deviation
VISITS = "visits"


@dataclass(frozen=True)
class Phi:
    """The feature vector phi(x): chosen bins of one or more feature maps."""

    features: tuple[str, ...]  # `map:bin`
    mask: tuple[str, ...]
    maps: tuple[FeatureMap, ...]
    columns: Ints  # (features,) among the bins of all maps

    @classmethod
    def of(cls, features: Sequence[str], vocabulary: Vocabulary, mask: Sequence[str] = ()) -> Phi:
        """Build phi from the names of its bins; bins that the vocabulary lacks are refused."""
        maps = tuple(build_feature(name, vocabulary, mask) for name in bins_by_map(features))
        bins = [name for each in maps for name in each.bins]
        position = {name: number for number, name in enumerate(bins)}
        for name in features:
            if name not in position:
                raise MobatlasError(
                    f"feature '{name}' is not in the vocabulary{suggestion(name, position)}"
                )
        columns = np.array([position[name] for name in features], dtype=np.int64)
        return cls(tuple(features), tuple(mask), maps, columns)

    @property
    def timed_maps(self) -> list[str]:
        """The feature maps that need arrival times, which few generators sample."""
        return [each.name for each in self.maps if FEATURES[each.name].needs_times]

    def counts(self, trajectories: Trajectories) -> sparse.csr_array:
        """phi of each trajectory, (trajectories, features)."""
        counts = sparse.hstack([each.counts(trajectories) for each in self.maps], format="csr")
        return sparse.csr_array(counts[:, self.columns])

    @property
    def visits(self) -> Floats:
        """The number of visits that each bin of the map `visits` stands for, else 0 (features,)."""
        prefix = f"{VISITS}:"
        least = (name.removeprefix(prefix).rstrip("+").partition("-")[0] for name in self.features)
        pairs = zip(self.features, least, strict=True)
        return np.array([float(low) if name.startswith(prefix) else 0.0 for name, low in pairs])


@dataclass(frozen=True)
class Moments:
    """The target means of each group and the anchors of the population, for calibration."""

    source: Path  # the folder or file that they come from
    groups: Groups
    phi: Phi
    means: Floats  # (groups, features)
    baseline: Floats  # (features,) of the whole population
    anchors: Floats  # (people, 4) of the population
    residence: Floats | None = None  # (people, groups) p(d | home region); None: not used

    @property
    def scale(self) -> Floats:
        """sqrt(mu0) (features,), in which counts are about equally noisy."""
        return np.sqrt(np.maximum(self.baseline, 1 / max(len(self.anchors), 1)))

    def distance(self, means: Floats, target: Floats) -> dict[str, float]:
        """Distances between two means of phi.

        "scaled" is the norm in scaled coordinates; "js" is the JSD in bits of the shares within
        each map, averaged over maps.
        """
        return {kind: float(value) for kind, value in self.distances(means, target).items()}

    def distances(self, means: Floats, targets: Floats) -> dict[str, Floats]:
        """The same, row by row (rows, features)."""
        pairs = ((np.maximum(means[..., part], 0), targets[..., part]) for part in self._map_bins)
        divergences = [js(normalise(one), normalise(other)) for one, other in pairs]
        return {
            "scaled": np.linalg.norm((means - targets) / self.scale, axis=-1),
            "js": np.mean(divergences, axis=0),
        }

    @cached_property
    def _map_bins(self) -> list[Ints]:
        return list(bins_by_map(self.phi.features).values())

    def without_times(self, vocabulary: Vocabulary) -> Moments:
        """The moments of samples without arrival times."""
        timed = self.phi.timed_maps
        if {each.name for each in self.phi.maps} <= {*timed, VISITS}:
            raise MobatlasError(
                f"{self.source}: '{' and '.join(timed)}' is the only feature, and samples of this "
                "model have no times; add another feature"
            )
        timeless = [name.partition(":")[0] not in timed for name in self.phi.features]
        phi = Phi.of(list(compress(self.phi.features, timeless)), vocabulary, self.phi.mask)
        return replace(
            self, phi=phi, means=self.means[:, timeless], baseline=self.baseline[timeless]
        )


@dataclass(frozen=True)
class Visits:
    """Visits per trajectory: the population's distribution, tilted to the mean of each group.

    Mean counts alone do not fix the spread of their sum. Tilts to them prefer unusual trajectories
    with very many or very few visits.
    """

    phi: Phi  # features of the aggregates, then bins of the number of visits
    means: Floats  # (groups, bins), rows sum to 1
    baseline: Floats  # (bins,) of the population


def labelled_moments(
    dataset: TrajectoryDataset, features: Sequence[str], mask: Sequence[str] = ()
) -> Moments:
    """The means of labelled training people, which calibrate the labelled upper bound.

    `features` are names of feature maps; the number of visits is kept in any case. A group without
    people has the mean of the population.
    """
    groups = dataset.groups
    assert groups is not None  # the strategy has checked it
    maps = [
        build_feature(name, dataset.vocabulary, mask) for name in dict.fromkeys([*features, VISITS])
    ]
    phi = Phi.of([name for each in maps for name in each.bins], dataset.vocabulary, mask)
    indices = dataset.split("train")
    people, row = np.unique(dataset.person[indices], return_inverse=True)
    counts = person_means(phi.counts(Trajectories.of(dataset, indices)), row, len(people))
    group = dataset.person_groups()[people]
    baseline = np.asarray(counts.mean(0)).ravel()
    members = [counts[np.flatnonzero(group == number)] for number in range(len(groups))]
    means = [np.asarray(each.mean(0)).ravel() if each.shape[0] else baseline for each in members]
    anchors = dataset.anchors[dataset.split_people("train")]
    return Moments(dataset.path, groups, phi, np.stack(means), baseline, anchors)


def tilt_to_mean(weights: Floats, number: Floats, level: float) -> Floats:
    """Weights times exp(b number) such that the mean number becomes `level` times its value."""
    mean = float(weights @ number)
    spread = float(np.sqrt(weights @ (number - mean) ** 2)) or 1.0

    def tilt(b: float) -> Floats:
        logits = b * (number - mean) / spread
        changed = weights * np.exp(logits - logits.max())
        return np.asarray(changed / changed.sum())

    def missing(b: float) -> float:
        return float(tilt(b) @ number) - level * mean

    if missing(-STEEPEST) >= 0:  # the target is out of reach
        return tilt(-STEEPEST)
    if missing(STEEPEST) <= 0:
        return tilt(STEEPEST)
    return tilt(optimize.brentq(missing, -STEEPEST, STEEPEST))
