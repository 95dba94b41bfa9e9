"""Geography in recovery: the surface over the map that is removed, and the test of transfer.

Real regions differ because of their people, and because of their location: central or remote, rich
or poor. Recovery does not attribute a smooth surface over the map to groups.

Slopes due to groups are the same everywhere; slopes due to places are not. The map is cut into
blocks. Slopes from all blocks but one predict the aggregates of that block, with geography
removed from both. The regression of observed on predicted is about 1 where slopes transfer.
"""

from collections.abc import Iterable

import numpy as np
from scipy.cluster import vq

from mobatlas.data.arrays import Floats, Ints
from mobatlas.data.geodesy import KM_PER_DEGREE
from mobatlas.regions.recovery.posterior import Design, Fit, Variances, independent_columns
from mobatlas.regions.types import Recovery, bins_by_map

MIN_SURFACE_REGIONS = 24  # with fewer regions a surface would absorb the effect of composition
BLOCKS = 5
LOW_TRANSFER = 0.5  # below it a feature map is reported as confounded with geography
LOW_GROUP_SHARE = 0.2  # below it a bin is reported as due to places
MIN_BLOCKED_REGIONS = 60  # with fewer regions a block is too small to test a prediction


def surface(centroids: Floats | None, regions: int) -> Floats:
    """Covariates (regions, columns): ones, then log distance from the centre, north and east.

    The surface is quadratic. Without centroids, or with few regions, there are only ones.
    """
    ones = np.ones((regions, 1))
    if centroids is None or regions < MIN_SURFACE_REGIONS:
        return ones
    centre = np.median(centroids, axis=0)
    north, east = ((centroids - centre) * KM_PER_DEGREE * [1.0, np.cos(np.radians(centre[0]))]).T
    size = max(float(np.sqrt(np.mean(north**2 + east**2))), 1e-9)
    distance = np.log1p(np.hypot(north, east))
    north = north / size
    east = east / size
    return np.column_stack(
        [ones, distance, north, east, north * east, north**2, east**2, distance**2]
    )


def map_blocks(centroids: Floats) -> Ints:
    """The block of each region: blocks are neighbours on the map and depend only on centroids."""
    east = np.cos(np.radians(np.median(centroids[:, 0])))
    return np.asarray(
        vq.kmeans2(centroids * [1.0, east], BLOCKS, minit="++", seed=0)[1], dtype=np.int64
    )


class BlockValidation:
    """Cross-validation over blocks of the map."""

    def __init__(self, design: Design, centroids: Floats) -> None:
        block = map_blocks(centroids)
        self._folds = []
        for number in range(BLOCKS):
            inside = np.flatnonzero(block == number)
            outside = np.flatnonzero(block != number)
            if len(inside) > BLOCKS:
                covariates = independent_columns(surface(centroids[inside], len(inside)))
                self._folds.append((inside, outside, design.select(outside), covariates))
        self._shares = design.shares
        self._n = design.n

    def compare(self, ys: Iterable[Floats], variances: Variances) -> Floats:
        """Sums of observed x predicted, predicted squared and observed squared.

        The sums are over the bins ys (regions, bins), which share their variances.
        """
        fits = [
            Fit.of(design, variances._replace(added_noise=variances.added_noise[outside]))
            for _, outside, design, _ in self._folds
        ]
        sums = np.zeros(3)
        for y in ys:
            for (inside, outside, design, covariates), fit in zip(self._folds, fits, strict=True):
                slopes = fit.means(design, y[outside])  # (groups, bins)
                weight = np.sqrt(self._n[inside])[:, None]
                observed = _residuals(covariates * weight, y[inside] * weight)
                shares = _residuals(covariates * weight, self._shares[inside] * weight)
                predicted = shares @ slopes
                sums += [
                    (observed * predicted).sum(),
                    (predicted**2).sum(),
                    (observed**2).sum(),
                ]
        return sums


def confounding(recovery: Recovery) -> list[str]:
    """Warnings about feature maps that follow places more than groups."""
    warnings = []
    for name, bins in bins_by_map(recovery.features).items():
        transfer = recovery.transfer.get(name, 1.0)
        if transfer < LOW_TRANSFER:
            weight = recovery.baseline[bins]
            share = float(weight @ recovery.group_share[bins] / max(weight.sum(), 1e-300))
            warnings.append(
                f"'{name}' is confounded with where people live: only {transfer:.0%} of the "
                "differences between groups estimated in one part of the map hold in the others. "
                f"The estimates attribute {share:.0%} of the variation with composition to groups, "
                "the rest to places."
            )
        else:
            warnings += _excess_slopes(recovery, bins[recovery.group_share[bins] < LOW_GROUP_SHARE])
    return warnings


def _excess_slopes(recovery: Recovery, bins: Ints) -> list[str]:
    """A warning about bins where regions differ by more than groups can explain."""
    if not len(bins):
        return []
    variance = np.maximum(recovery.prior_variance[:, bins], 1e-300)
    excess = (recovery.means - recovery.baseline)[:, bins] ** 2 / variance
    worst = int(bins[np.argmax(excess.max(0))])
    others = f" (and {len(bins) - 1:,} more)" if len(bins) > 1 else ""
    return [
        f"regions differ in '{recovery.features[worst]}' by more than groups can plausibly explain"
        f"{others}. Only {recovery.group_share[worst]:.0%} of this is attributed to groups, so "
        "estimates stay close to the city average, and intervals are valid only under this "
        "assumption. If your regions differ only in who lives there, set groups_explain=100 to "
        "remove the limit."
    ]


def _residuals(covariates: Floats, columns: Floats) -> Floats:
    """The residuals of columns after regression on covariates."""
    return np.asarray(columns - covariates @ np.linalg.lstsq(covariates, columns, rcond=None)[0])
