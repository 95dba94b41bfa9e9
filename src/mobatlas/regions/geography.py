"""Geography: where the people of each region live, and the surface over the map that recovery takes out of the aggregates.

Real regions differ because their people do, and because they are other places: near the centre or far from it, in the rich
part or in the poor. What follows a smooth surface over the map is not taken for a difference between groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from mobatlas.data.dataset import TrajectoryDataset
from mobatlas.data.geodesy import KM_PER_DEGREE
from mobatlas.io.manifest import read_parquet
from mobatlas.regions.types import Floats

FEWEST = 24  # regions: over fewer, a surface would take out what their composition tells


def region_places(
    dataset: TrajectoryDataset, region: npt.NDArray[np.int64], regions: int
) -> Floats | None:
    """The mean home of the people of each region (regions, 2), who are numbers or -1; None where some region has none."""
    homes = dataset.anchors[:, :2]
    here = (region >= 0) & ~np.isnan(homes).any(1)
    n = np.bincount(region[here], minlength=regions)
    if not n.all():
        return None
    return np.stack(
        [np.bincount(region[here], homes[here, axis], regions) / n for axis in (0, 1)], axis=1
    )


def surface(places: Floats | None, regions: int) -> Floats:
    """Ones, and over enough regions that are somewhere how far from the middle (log), north and east, to the second power."""
    ones = np.ones((regions, 1))
    if places is None or regions < FEWEST:
        return ones
    middle = np.median(places, axis=0)
    north, east = ((places - middle) * KM_PER_DEGREE * [1.0, np.cos(np.radians(middle[0]))]).T
    size = max(float(np.sqrt(np.mean(north**2 + east**2))), 1e-9)
    far, north, east = np.log1p(np.hypot(north, east)), north / size, east / size
    return np.column_stack([ones, far, north, east, north * east, north**2, east**2, far**2])


def write_places(path: Path, regions: Sequence[str], places: Floats) -> None:
    """One row a region: region, lat, lon."""
    pq.write_table(
        pa.table({"region": list(regions), "lat": places[:, 0], "lon": places[:, 1]}), path
    )


def load_places(path: Path) -> Floats | None:
    """What `write_places` wrote; None where nothing was."""
    if not path.exists():
        return None
    table = read_parquet(path)
    return np.stack([table[name].to_numpy() for name in ("lat", "lon")], axis=1)
