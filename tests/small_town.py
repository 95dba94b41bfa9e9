"""A town small enough to measure by hand, walks in it, and a small dataset."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from mobatlas import CityConfig, TrajectoryDataset, prepare, write_city_folder
from mobatlas.data.dataset import Trajectories
from mobatlas.data.types import FIRST_POI, build_vocabulary
from mobatlas.evaluation.metrics import MetricSpec, metrics

PARK = FIRST_POI
CAFE = FIRST_POI + 1
SHOP = FIRST_POI + 2
NAMES = [metric.name for metric in metrics()]
ANCHORS = (0.5, 0.5, 1.5, 1.5)
# A town of 2 x 2 degrees: park in the south-west corner, cafe north-east, shop north-west.
TOWN = MetricSpec(
    vocabulary=build_vocabulary(
        pa.table(
            {
                "poi_id": ["park", "cafe", "shop"],
                "lat": [0.0, 2.0, 2.0],
                "lon": [0.0, 2.0, 0.0],
                "category": ["leisure", "food", "food"],
                "visits": [1, 1, 1],
            }
        )
    ),
    cells=2,
    box=(0.0, 0.0, 2.0, 2.0),
    travel_edges=(100.0, 200.0, 300.0),
    daily_edges=(10.0, 150.0),
    leg_edges=(100.0, 250.0),
    gyration_edges=(50.0, 120.0),
    longest=4,
    most_places=2,
    motifs=(),
    days=2,
)


def walks(*tokens: Sequence[int], anchors: Sequence[Sequence[float]] | None = None) -> Trajectories:
    return Trajectories(
        tokens=np.array([token for walk in tokens for token in walk], dtype=np.int32),
        offsets=np.cumsum([0, *map(len, tokens)]),
        anchors=np.array(
            [ANCHORS] * len(tokens) if anchors is None else anchors, dtype=np.float64
        ).reshape(-1, 4),
    )


def small_dataset(folder: Path) -> TrajectoryDataset:
    """Of a city of 600 people, enough for every group."""
    write_city_folder(folder / "city", CityConfig(users=600, days=14), seed=1)
    prepare(folder / "city", folder / "dataset", preset="small")
    return TrajectoryDataset.open(folder / "dataset")
