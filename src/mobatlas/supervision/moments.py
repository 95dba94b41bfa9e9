"""Moments: the target feature means of each group, and distances from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
from scipy import sparse

from mobatlas.data.arrays import Floats, Ints
from mobatlas.data.trajectories import Trajectories
from mobatlas.data.vocabulary import Vocabulary
from mobatlas.errors import MobatlasError, suggestion
from mobatlas.features.divergences import js, normalise
from mobatlas.features.maps import FeatureMap, build_feature
from mobatlas.groups import Groups
from mobatlas.regions.types import bins_by_map

TIMES = "hour"  # the one map that needs arrival times, which few generators sample
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
        return cls(tuple(features), tuple(mask), maps, _columns(features, maps))

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

    def join(self, other: Phi) -> Phi:
        """The bins of both."""
        shift = sum(len(each.bins) for each in self.maps)
        columns = np.concatenate([self.columns, other.columns + shift])
        return Phi(self.features + other.features, self.mask, self.maps + other.maps, columns)

    def select(self, keep: Ints) -> Phi:
        """Some of the bins, with the maps they belong to."""
        features = tuple(self.features[k] for k in keep.tolist())
        maps = tuple(each for each in self.maps if each.name in bins_by_map(features))
        return Phi(features, self.mask, maps, _columns(features, maps))


def _columns(features: Sequence[str], maps: Sequence[FeatureMap]) -> Ints:
    """The position of each feature among the bins of all maps (features,)."""
    bins = [name for each in maps for name in each.bins]
    position = {name: number for number, name in enumerate(bins)}
    for name in features:
        if name not in position:
            raise MobatlasError(
                f"feature '{name}' is not in the vocabulary{suggestion(name, position)}"
            )
    return np.array([position[name] for name in features], dtype=np.int64)


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

    def without(self, name: str) -> Moments:
        """The same without one feature map."""
        keep = np.flatnonzero([feature.partition(":")[0] != name for feature in self.phi.features])
        if {each.name for each in self.phi.maps} <= {name, VISITS}:
            raise MobatlasError(
                f"{self.source}: '{name}' is the only feature, and samples of this model do not "
                "show it; add another feature"
            )
        means = self.means[:, keep]
        return replace(self, phi=self.phi.select(keep), means=means, baseline=self.baseline[keep])
