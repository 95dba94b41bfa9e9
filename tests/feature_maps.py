"""A feature map from outside the package, and a town with trajectories to count."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from scipy import sparse

from mobatlas.data.dataset import SoftTrajectories, Trajectories
from mobatlas.data.types import HOME, Vocabulary, build_vocabulary
from mobatlas.features.maps import FEATURES, FeatureMap, feature_maps, register_feature

EVERY_SPECIAL = ("HOME", "WORK", "OTHER")
MASKS: tuple[tuple[str, ...], ...] = ((), EVERY_SPECIAL)
NAMES = [*feature_maps(), "start"]
DOWNTOWN = (0.0, 0.0, 0.0, 0.06)  # works 6.7 km from home


@dataclass(frozen=True)
class StartFeature:
    """A user's own map, which looks at a position: where does the window begin?"""

    name: str
    counted: npt.NDArray[np.int64]  # (vocabulary,)

    @property
    def bins(self) -> tuple[str, ...]:
        return ("start:home", "start:elsewhere")

    def counts(self, trajectories: Trajectories) -> sparse.csr_array:
        rows = np.zeros((len(trajectories), 2))
        for row, (first, end) in enumerate(pairwise(trajectories.offsets)):
            if first < end:
                token = trajectories.tokens[first]
                rows[row, int(token != HOME)] = self.counted[token]
        return sparse.csr_array(rows)

    def soft(self, trajectories: SoftTrajectories) -> Any:
        first = trajectories.tokens[:, 0]
        counted = first * (
            torch.tensor(self.counted) if isinstance(first, torch.Tensor) else self.counted
        )
        home = counted[:, HOME]
        both = (home, counted.sum(-1) - home)
        return torch.stack(both, 1) if isinstance(first, torch.Tensor) else np.stack(both, 1)


def start_feature(vocabulary: Vocabulary, mask: Sequence[str]) -> FeatureMap:
    masked = {HOME + EVERY_SPECIAL.index(word) for word in mask}
    return StartFeature(
        "start", np.array([int(t >= HOME and t not in masked) for t in range(len(vocabulary))])
    )


@contextmanager
def start_registered() -> Iterator[None]:
    """With the user's own map among those of mobatlas."""
    register_feature("start", start_feature)
    yield
    del FEATURES["start"]


def make_vocabulary(pois: Sequence[tuple[str, float, float, str | None]]) -> Vocabulary:
    ids, lats, lons, categories = zip(*pois, strict=True)
    return build_vocabulary(
        pa.table(
            {
                "poi_id": pa.array(ids, pa.string()),
                "lat": pa.array(lats, pa.float64()),
                "lon": pa.array(lons, pa.float64()),
                "category": pa.array(categories, pa.string()),
                "visits": pa.array([1] * len(pois), pa.int64()),
            }
        )
    )


TOWN = make_vocabulary(
    [
        ("bakery", 0.0, 0.001, "food"),
        ("diner", 0.0, 0.03, "food"),
        ("park", 0.1, 0.0, None),
        ("gym", 0.0, 0.3, "sport"),
        ("airport", 1.0, 1.0, "other"),
        ("nowhere", math.nan, math.nan, "unknown"),
    ]
)


def build_trajectories(
    rows: Sequence[Sequence[int]],
    anchors: Sequence[Sequence[float]] | None = None,
    hours: Sequence[Sequence[int]] | None = None,
) -> Trajectories:
    return Trajectories(
        tokens=np.array([token for row in rows for token in row], dtype=np.int32),
        offsets=np.cumsum([0, *map(len, rows)]),
        anchors=np.array(anchors if anchors is not None else [DOWNTOWN] * len(rows)),
        arrivals=None
        if hours is None
        else 3600 * np.array([hour for row in hours for hour in row], dtype=np.int64),
    )


def one_hot(trajectories: Trajectories, vocabulary: int) -> SoftTrajectories:
    """The same trajectories as certain probabilities, with zero rows after the end."""
    length = max([1, *np.diff(trajectories.offsets).tolist()])
    tokens = np.zeros((len(trajectories), length, vocabulary))
    hours = np.zeros((len(trajectories), length, 24))
    for row, (first, end) in enumerate(pairwise(trajectories.offsets)):
        for position, place in enumerate(range(first, end)):
            tokens[row, position, trajectories.tokens[place]] = 1
            if trajectories.hours is not None:
                hours[row, position, trajectories.hours[place]] = 1
    return SoftTrajectories(
        tokens, trajectories.anchors, None if trajectories.hours is None else hours
    )


def as_tensors(soft: SoftTrajectories, dtype: torch.dtype = torch.float64) -> SoftTrajectories:
    hours = None if soft.hours is None else torch.tensor(soft.hours, dtype=dtype)
    return replace(soft, tokens=torch.tensor(soft.tokens, dtype=dtype), hours=hours)


def named(feature: FeatureMap, counts: sparse.csr_array) -> list[dict[str, float]]:
    """The bins of each trajectory that are not zero."""
    rows = counts.toarray()
    return [{feature.bins[j]: float(row[j]) for j in np.flatnonzero(row)} for row in rows]
