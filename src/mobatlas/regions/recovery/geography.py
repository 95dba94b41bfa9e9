"""Geography in recovery: the surface over the map that is removed, and the test of transfer.

Real regions differ because of their people, and because of their location: central or remote, rich
or poor. Recovery does not attribute a smooth surface over the map to groups.

Slopes due to groups are the same everywhere; slopes due to places are not. The map is cut into
blocks. Slopes from all blocks but one predict the aggregates of that block, with geography
removed from both. The regression of observed on predicted is about 1 where slopes transfer.
"""

import numpy as np
from scipy.cluster import vq

from mobatlas.data.types import KM_PER_DEGREE, Floats, Ints
from mobatlas.regions.recovery.solver import Observed, Rows, find_modes, link
from mobatlas.regions.types import Recovery, bins_by_map

MIN_SURFACE_REGIONS = 24  # with fewer regions a surface would absorb the effect of composition
BLOCKS = 5
LOW_TRANSFER = 0.5  # below it a feature map is reported as confounded with geography
LOW_GROUP_SHARE = 0.2  # below it a bin is reported as due to places
MIN_BLOCKED_REGIONS = 60  # with fewer regions a block is too small to test a prediction
MIN_PREDICTED = 2e-4  # of the observed sum of squares: smaller predictions are not tested


def surface(centroids: Floats | None, regions: int) -> Floats:
    """Covariates (regions, columns): log distance from the centre, north, east, and squares.

    Columns are independent of each other and of ones, with squares that average to 1. There are
    none without centroids, or with few regions.
    """
    if centroids is None or regions < MIN_SURFACE_REGIONS:
        return np.zeros((regions, 0))
    centre = np.median(centroids, axis=0)
    north, east = ((centroids - centre) * KM_PER_DEGREE * [1.0, np.cos(np.radians(centre[0]))]).T
    size = max(float(np.sqrt(np.mean(north**2 + east**2))), 1e-9)
    distance = np.log1p(np.hypot(north, east))
    north = north / size
    east = east / size
    return independent_columns(
        np.column_stack([distance, north, east, north * east, north**2, east**2, distance**2])
    )


def independent_columns(columns: Floats) -> Floats:
    """Drop columns that depend linearly on ones or on earlier columns."""
    basis = np.ones((len(columns), 1))
    for column in columns.T:
        residual = column - basis @ np.linalg.lstsq(basis, column, rcond=None)[0]
        size = float(np.linalg.norm(residual))
        if size > 1e-6 * float(np.linalg.norm(column)) and basis.shape[1] + 1 < len(columns):
            basis = np.column_stack([basis, residual * np.sqrt(len(residual)) / size])
    return basis[:, 1:]


def transfer(rows: Rows, observed: Observed, root: Floats, centroids: Floats) -> float | None:
    """How much of the slopes of a feature map transfers between parts of the map: 0 to 1.

    None if they are too small, or the regions too few, to test. `root` is the prior of all
    columns and covariates of `rows`.
    """
    if len(centroids) < MIN_BLOCKED_REGIONS:
        return None
    east = np.cos(np.radians(np.median(centroids[:, 0])))
    block = vq.kmeans2(centroids * [1.0, east], BLOCKS, minit="++", seed=0)[1]  # (regions,)
    sums = np.zeros(3)
    mean = observed.centre.mean(1)  # (bins,)
    for number in range(BLOCKS):
        inside = np.flatnonzero(block == number)
        outside = np.flatnonzero(block != number)
        if len(inside) <= BLOCKS:
            continue
        modes = find_modes(rows.select(outside), observed.of_rows(outside), root)
        slopes = np.exp(link(modes.mode[:, : rows.columns]))  # (bins, groups)
        weight = np.sqrt(observed.weight[:, inside].mean(0))[:, None]  # (regions, 1)
        columns = surface(centroids[inside], len(inside))
        covariates = np.hstack([np.ones((len(inside), 1)), columns]) * weight
        scale = np.sqrt(observed.weight[:, inside].mean(1) / mean)  # (bins,)
        shown = observed.values[:, inside].T * scale * weight
        predicted = (rows.shares[inside] @ (observed.centre * slopes).T) * scale * weight
        shown = _residuals(covariates, shown)
        predicted = _residuals(covariates, predicted)
        sums += [(shown * predicted).sum(), (predicted**2).sum(), (shown**2).sum()]
    product, square, total = sums
    return None if square <= MIN_PREDICTED * total else float(np.clip(product / square, 0, 1))


def confounding(recovery: Recovery) -> list[str]:
    """Warnings about feature maps that follow places more than groups."""
    warnings = []
    for name, bins in bins_by_map(recovery.features).items():
        transferred = recovery.transfer.get(name, 1.0)
        if transferred < LOW_TRANSFER:
            weight = recovery.baseline[bins]
            share = float(weight @ recovery.group_share[bins] / max(weight.sum(), 1e-300))
            warnings.append(
                f"'{name}' is confounded with where people live: only {transferred:.0%} of the "
                "differences between groups estimated in one part of the map hold in the others. "
                f"The estimates attribute {share:.0%} of the variation with composition to groups, "
                "the rest to places."
            )
        else:
            excessive = recovery.regions_differ & (recovery.group_share < LOW_GROUP_SHARE)
            warnings += _excess_slopes(recovery, bins[excessive[bins]])
    return warnings


def _excess_slopes(recovery: Recovery, bins: Ints) -> list[str]:
    """A warning about bins where regions differ by more than groups can explain."""
    bins = bins[recovery.baseline[bins] > 0]
    if not len(bins):
        return []
    excess = np.abs(np.log(recovery.means[:, bins] / recovery.baseline[bins])).max(0)
    worst = int(bins[np.argmax(excess)])
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
