"""Moments: what each group should do on average, in the bins that regions tell, and how far something is from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt
from scipy import sparse

from mobatlas.data.arrays import Floats
from mobatlas.data.trajectories import Trajectories
from mobatlas.data.vocabulary import Vocabulary
from mobatlas.errors import MobatlasError, suggestion
from mobatlas.features.divergences import js, normalise
from mobatlas.features.maps import FeatureMap, build_feature
from mobatlas.groups import Groups
from mobatlas.regions.types import bins_by_map

TIMES = "hour"  # the one map that counts when, which few generators tell
VISITS = "visits"
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Phi:
    """The bins of aggregates, of one feature map or of several, as counts in trajectories."""

    features: tuple[str, ...]  # `map:bin`
    mask: tuple[str, ...]
    maps: tuple[FeatureMap, ...]
    columns: Ints  # (features,) among the bins of all maps

    @classmethod
    def of(cls, features: Sequence[str], vocabulary: Vocabulary, mask: Sequence[str] = ()) -> Phi:
        """Built from the names of the bins; refuses bins that the vocabulary does not have."""
        maps = tuple(build_feature(name, vocabulary, mask) for name in bins_by_map(features))
        position = {
            name: number for number, name in enumerate(name for each in maps for name in each.bins)
        }
        for name in features:
            if name not in position:
                raise MobatlasError(
                    f"feature '{name}' is not in the vocabulary{suggestion(name, position)}"
                )
        return cls(
            tuple(features),
            tuple(mask),
            maps,
            np.array([position[name] for name in features], dtype=np.int64),
        )

    def counts(self, trajectories: Trajectories) -> sparse.csr_array:
        """phi of each trajectory, (trajectories, features)."""
        counted = sparse.hstack([each.counts(trajectories) for each in self.maps], format="csr")
        return sparse.csr_array(counted[:, self.columns])

    @property
    def visits(self) -> Floats:
        """How many visits the bins of their number stand for, (features,); 0 for all others."""
        least = [
            name.removeprefix(f"{VISITS}:").rstrip("+").partition("-")[0] for name in self.features
        ]
        pairs = zip(self.features, least, strict=True)
        return np.array(
            [float(first) if name.startswith(f"{VISITS}:") else 0.0 for name, first in pairs]
        )

    def joined(self, other: Phi) -> Phi:
        """The bins of both."""
        columns = np.concatenate(
            [self.columns, other.columns + sum(len(each.bins) for each in self.maps)]
        )
        return Phi(self.features + other.features, self.mask, self.maps + other.maps, columns)

    def chosen(self, keep: Ints) -> Phi:
        """Some of the bins, and the maps that they are of."""
        features = tuple(self.features[k] for k in keep.tolist())
        maps = tuple(each for each in self.maps if each.name in bins_by_map(features))
        position = {
            name: number for number, name in enumerate(name for each in maps for name in each.bins)
        }
        return Phi(
            features,
            self.mask,
            maps,
            np.array([position[name] for name in features], dtype=np.int64),
        )


@dataclass(frozen=True)
class Moments:
    """What each group should do on average, and where people live: all that calibration asks of regions."""

    source: Path  # that told it
    groups: Groups
    phi: Phi
    means: Floats  # (groups, features)
    baseline: Floats  # (features,) of everybody
    anchors: Floats  # (people, 4) of the population
    # (people, groups) how likely it is that who lives there is of a group, where regions are told to say so; else all alike
    lives: Floats | None = None

    @property
    def scale(self) -> Floats:
        """sqrt(mu0) (features,), in which counts are about equally noisy."""
        return np.sqrt(np.maximum(self.baseline, 1 / max(len(self.anchors), 1)))

    def distance(self, means: Floats, target: Floats) -> dict[str, float]:
        """Between two means of phi: norm in scaled coordinates, and JSD in bits of shares within each map, averaged."""
        return {kind: float(value) for kind, value in self.distances(means, target).items()}

    def distances(self, means: Floats, targets: Floats) -> dict[str, Floats]:
        """The same row by row (rows, features)."""
        pairs = ((np.maximum(means[..., part], 0), targets[..., part]) for part in self._columns)
        apart = [js(normalise(one), normalise(other)) for one, other in pairs]
        return {
            "scaled": np.linalg.norm((means - targets) / self.scale, axis=-1),
            "js": np.mean(apart, axis=0),
        }

    @cached_property
    def _columns(self) -> list[Ints]:
        return list(bins_by_map(self.phi.features).values())

    def without(self, name: str) -> Moments:
        """The same without one feature map."""
        keep = np.flatnonzero([feature.partition(":")[0] != name for feature in self.phi.features])
        if {each.name for each in self.phi.maps} <= {name, VISITS}:
            raise MobatlasError(
                f"{self.source}: has no feature but '{name}', which samples do not show; add another"
            )
        means, baseline = self.means[:, keep], self.baseline[keep]
        return replace(self, phi=self.phi.chosen(keep), means=means, baseline=baseline)
