"""Bins within bins: a rare place borrows from its category what its own counts do not tell.

Of a category c all regions together tell much, of one of its places j little. So each group's mean of a place begins at
mu0_j m_dc / mu0_c, as if the group went to all places of a category in the population's proportions, and what is recovered of
the place itself are deviations from that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from mobatlas.regions.types import Floats

if TYPE_CHECKING:
    from mobatlas.regions.recovery.recover import Recovery


LEAST = 0.02  # of what a parent follows composition that is ascribed to groups; of less nothing can be told


@dataclass(frozen=True)
class Nesting:
    """Where each nested bin of a recovery begins."""

    children: npt.NDArray[np.int64]  # (nested,) bins
    parents: npt.NDArray[np.int64]  # (nested,) the bin that each of them is part of
    share: Floats  # (nested,) mu0_j / mu0_c
    shift: Floats  # (groups, features) where groups begin less mu0; w of it is zero
    whole: Floats  # the same, of all that follows composition: what is not ascribed to groups is no child's own either

    @classmethod
    def of(cls, found: Recovery, parents: Mapping[str, str]) -> Nesting | None:
        """Of bins whose parents were recovered as well, None where there are none."""
        children, whole = _pairs(found.features, parents).T
        believed = np.ones(len(found.baseline)) if found.believed is None else found.believed
        share = found.baseline[children] / np.maximum(found.baseline[whole], 1e-300)
        keep = (
            (found.baseline[whole] > 0) & (share <= 1) & (believed[whole] >= LEAST)
        )  # noise may make a part the larger
        if not keep.any():
            return None
        children, whole, share = children[keep], whole[keep], share[keep]
        shift = np.zeros_like(found.means)
        shift[:, children] = share * (found.means - found.baseline)[:, whole]
        shift -= found.shares @ shift
        full = shift.copy()
        full[:, children] /= believed[whole]
        return cls(children, whole, share, shift, full)

    def joined(self, parents: Recovery, children: Recovery) -> Recovery:
        """Nested bins as recovered from where they begin, with the doubt about their parents; all others as they were."""
        means, covariance, prior = (
            parents.means.copy(),
            parents.covariance.copy(),
            parents.prior.copy(),
        )
        own, scale = self.children, self.share**2
        means[:, own] = children.means[:, own]
        # that of the category is counted as if the places told nothing of it, so a little twice
        covariance[own] = (
            children.covariance[own] + scale[:, None, None] * parents.covariance[self.parents]
        )
        prior[:, own] = children.prior[:, own] + scale * parents.prior[:, self.parents]
        return replace(parents, means=means, covariance=covariance, prior=prior)


def _pairs(features: Sequence[str], parents: Mapping[str, str]) -> npt.NDArray[np.int64]:
    place = {name: number for number, name in enumerate(features)}
    found = [
        (number, place[parents[name]])
        for name, number in place.items()
        if parents.get(name) in place
    ]
    return np.array(found, dtype=np.int64).reshape(-1, 2)
