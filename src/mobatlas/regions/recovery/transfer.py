"""Transfer: does what one part of the map tells about groups hold in the others?

Slopes that are due to groups are the same everywhere; those that are due to places are not. The map is cut into blocks, the
slopes are taken from all blocks but one, and the aggregates of that one are regressed on what they predict there, geography
taken off both: about 1 where they hold, about 0 where they do not.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from scipy.cluster import vq

from mobatlas.regions.geography import surface
from mobatlas.regions.recovery.posterior import Fit, Problem, independent
from mobatlas.regions.recovery.strata import Variances
from mobatlas.regions.types import Floats

if TYPE_CHECKING:
    from mobatlas.regions.recovery.recover import Recovery

BLOCKS = 5
HOLDS, PLACES = 0.5, 0.2  # transfer, and belief, below which a feature is said to be about places
FEWEST = 60  # regions: with fewer, a block has too few to tell anything by


def blocks_of(places: Floats) -> npt.NDArray[np.int64]:
    """The block of each region: neighbours on the map, the same for the same places."""
    east = np.cos(np.radians(np.median(places[:, 0])))
    return np.asarray(
        vq.kmeans2(places * [1.0, east], BLOCKS, minit="++", seed=0)[1], dtype=np.int64
    )


class Blocks:
    """Each block held out in turn."""

    def __init__(self, problem: Problem, places: Floats) -> None:
        block = blocks_of(places)
        self._parts = []
        for number in range(BLOCKS):
            inside, outside = np.flatnonzero(block == number), np.flatnonzero(block != number)
            if len(inside) > BLOCKS:
                own = independent(surface(places[inside], len(inside)))
                self._parts.append((inside, outside, problem.of_regions(outside), own))
        self._shares, self._n = problem.shares, problem.n

    def compared(self, ys: Iterable[Floats], variances: Variances) -> Floats:
        """Over bins ys (regions, bins) of one scale, sums of seen times predicted, of predicted squared and of seen squared."""
        root, scale, effect, noise = variances
        fits = [
            Fit.of(problem, root, scale, effect, noise[outside])
            for _, outside, problem, _ in self._parts
        ]
        sums = np.zeros(3)
        for y in ys:
            for (inside, outside, problem, own), fit in zip(self._parts, fits, strict=True):
                slopes = fit.means(problem, y[outside])  # (groups, bins)
                weight = np.sqrt(self._n[inside])[:, None]
                seen, shares = (
                    _without(own * weight, each * weight)
                    for each in (y[inside], self._shares[inside])
                )
                predicted = shares @ slopes
                sums += [(seen * predicted).sum(), (predicted**2).sum(), (seen**2).sum()]
        return sums


def confounding(recovery: Recovery) -> list[str]:
    """A sentence for every feature map whose slopes are due to places more than to groups, and what was done about it."""
    if recovery.believed is None:
        return []
    maps = np.array([name.partition(":")[0] for name in recovery.features])
    said = []
    for name in dict.fromkeys(maps.tolist()):
        weight = recovery.baseline * (maps == name)
        belief = float(weight @ recovery.believed / max(weight.sum(), 1e-300))
        holds = recovery.transfer.get(name, 1.0)
        ascribed = f"{belief:.0%} of how '{name}' follows composition is ascribed to groups, the rest to places"
        if holds < HOLDS:
            told = f"of what some parts of the map tell about groups only {holds:.0%} holds in the others"
            said.append(f"'{name}' is confounded with where people live: {told}; {ascribed}")
        else:
            said += _steep(recovery, np.flatnonzero((maps == name) & (recovery.believed < PLACES)))
    return said


def _steep(recovery: Recovery, bins: npt.NDArray[np.int64]) -> list[str]:
    """A sentence where regions differ by far more than groups are believed to, named by the bin that does so most."""
    if not len(bins) or recovery.believed is None:
        return []
    apart = (recovery.means - recovery.baseline)[:, bins] ** 2 / np.maximum(
        recovery.prior[:, bins], 1e-300
    )
    most = int(bins[np.argmax(apart.max(0))])
    others = f" (and {len(bins) - 1:,} held with it)" if len(bins) > 1 else ""
    return [
        f"regions differ in '{recovery.features[most]}' by more than groups are believed to explain: of how it{others} follows "
        f"composition {recovery.believed[most]:.0%} is ascribed to groups, so group means are held near everybody's and "
        "intervals hold under that belief alone; groups_explain=100 lifts it, if regions differ in their people and no more"
    ]


def _without(known: Floats, columns: Floats) -> Floats:
    """What is left of columns after those that are known."""
    return np.asarray(columns - known @ np.linalg.lstsq(known, columns, rcond=None)[0])
