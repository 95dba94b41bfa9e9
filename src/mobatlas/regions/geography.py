"""Geography: where the people of regions live, and the surface that recovery removes.

Real regions differ because their people differ, and because they lie elsewhere: central or remote,
rich or poor. Recovery does not attribute a smooth surface over the map to groups.
"""

from __future__ import annotations

import numpy as np

from mobatlas.data.arrays import Floats, Ints
from mobatlas.data.dataset import TrajectoryDataset
from mobatlas.data.geodesy import KM_PER_DEGREE

MIN_SURFACE_REGIONS = 24  # with fewer regions a surface would absorb the effect of composition


def region_centroids(dataset: TrajectoryDataset, region: Ints, regions: int) -> Floats | None:
    """The mean home (regions, 2) of the people of each region; None if a region has no home.

    `region` (people,) holds region numbers, -1 for none.
    """
    homes = dataset.anchors[:, :2]
    usable = (region >= 0) & ~np.isnan(homes).any(1)
    n = np.bincount(region[usable], minlength=regions)
    if not n.all():
        return None
    return np.stack(
        [np.bincount(region[usable], homes[usable, axis], regions) / n for axis in (0, 1)], axis=1
    )


def surface(centroids: Floats | None, regions: int) -> Floats:
    """Covariates (regions, columns): ones, then log distance from the centre, north and east.

    The surface is quadratic. It has ones only without centroids or with few regions.
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
