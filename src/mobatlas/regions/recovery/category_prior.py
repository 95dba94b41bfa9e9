"""Prior means of rare places from their category.

Regions say much about a category c and little about one of its places j. Each group's prior mean
of a place is mu0_j m_dc / mu0_c: the group visits the places of a category in the
population's proportions. Recovery then estimates deviations from it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from mobatlas.data.arrays import Floats, Ints
from mobatlas.regions.types import Recovery

MIN_GROUP_SHARE = 0.02  # of a parent's slopes: a parent with less is not used


@dataclass(frozen=True)
class CategoryPrior:
    """Prior means of bins that are part of another bin."""

    children: Ints  # (nested,) bins
    parents: Ints  # (nested,) the parent bin of each
    share: Floats  # (nested,) mu0_j / mu0_c
    shift: Floats  # (groups, features) prior mean minus mu0; w' shift = 0
    full_shift: Floats  # (groups, features) the same before slopes were attributed to groups

    @classmethod
    def of(cls, recovery: Recovery, parents: Mapping[str, str]) -> CategoryPrior | None:
        """From recovered parents; None if no bin has a usable parent."""
        children, parent = _pairs(recovery.features, parents).T
        baseline = recovery.baseline
        group_share = recovery.group_share
        share = baseline[children] / np.maximum(baseline[parent], 1e-300)
        # Noise may make a part larger than the whole.
        usable = (baseline[parent] > 0) & (share <= 1) & (group_share[parent] >= MIN_GROUP_SHARE)
        if not usable.any():
            return None
        children = children[usable]
        parent = parent[usable]
        share = share[usable]
        shift = np.zeros_like(recovery.means)
        shift[:, children] = share * (recovery.means - baseline)[:, parent]
        shift -= recovery.shares @ shift
        full_shift = shift.copy()
        full_shift[:, children] /= group_share[parent]
        return cls(children, parent, share, shift, full_shift)

    def combine(self, parents: Recovery, children: Recovery) -> Recovery:
        """Replace nested bins by their own estimates, adding the uncertainty of the parents."""
        nested = self.children
        scale = self.share**2
        means = parents.means.copy()
        means[:, nested] = children.means[:, nested]
        # Slightly conservative: the category's variance ignores the evidence from its places.
        covariance = parents.covariance.copy()
        covariance[nested] = (
            children.covariance[nested] + scale[:, None, None] * parents.covariance[self.parents]
        )
        prior_variance = parents.prior_variance.copy()
        prior_variance[:, nested] = (
            children.prior_variance[:, nested] + scale * parents.prior_variance[:, self.parents]
        )
        return replace(parents, means=means, covariance=covariance, prior_variance=prior_variance)


def _pairs(features: Sequence[str], parents: Mapping[str, str]) -> Ints:
    """(nested, 2): numbers of child and parent bins."""
    position = {name: number for number, name in enumerate(features)}
    pairs = [
        (number, position[parents[name]])
        for name, number in position.items()
        if parents.get(name) in position
    ]
    return np.array(pairs, dtype=np.int64).reshape(-1, 2)
