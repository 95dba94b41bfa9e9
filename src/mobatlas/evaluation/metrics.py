"""Metrics: what is counted in real and synthetic trajectories, in bins that real data fixed, and the JSD of the two in bits.

The first four are the paper's. Nothing here looks at the synthetic side before the bins stand.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import sparse

from mobatlas.data.dataset import TrajectoryDataset
from mobatlas.data.geodesy import haversine_km
from mobatlas.data.trajectories import Trajectories
from mobatlas.data.vocabulary import HOME, SPECIALS, WORK, Vocabulary
from mobatlas.errors import MobatlasError
from mobatlas.features.maps import FeatureMap, build_feature

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Counts = Floats | sparse.csr_array  # (bins,), or (1, bins) where most are empty

# Kilometres of a trajectory: equal widths up to that quantile of real ones, then one bin for the rest.
TRAVEL_BINS, TRAVEL_QUANTILE = 50, 0.99
# Kilometres a day: equal shares of real trajectories. Equal widths would repeat the travel distance in another unit.
DAILY_BINS = 20
# Minutes of a stay: about half as long again from bin to bin; the first holds instants, the last is open.
DWELL_EDGES = (
    1,
    5,
    10,
    15,
    20,
    30,
    45,
    60,
    90,
    120,
    180,
    240,
    360,
    480,
    600,
    720,
    960,
    1_440,
    2_880,
    5_760,
    10_080,
)


@dataclass(frozen=True)
class Metric:
    """A divergence between two samples of trajectories; 0 is best."""

    name: str
    title: str
    description: str
    lower: float = 0.0
    upper: float = 1.0


METRICS = (
    Metric("spatial", "Spatial", "JSD of visits over the cells of a grid."),
    Metric(
        "travel_distance", "Travel distance", "JSD of the kilometres that a trajectory travels."
    ),
    Metric("trip", "Trip", "JSD of pairs (origin cell, destination cell) of consecutive visits."),
    Metric("poi", "POI frequency", "JSD of visits over POIs, without HOME, WORK and OTHER."),
    Metric(
        "poi_all", "POI frequency with anchors", "JSD of visits over POIs, HOME, WORK and OTHER."
    ),
    Metric(
        "trip_marginals",
        "Trip marginals",
        "Mean of the JSD of origin cells and the JSD of destination cells.",
    ),
    Metric("length", "Length", "JSD of the number of visits of a trajectory."),
    Metric("category", "Category", "JSD of visits over categories."),
    Metric("transitions", "Transitions", "JSD of pairs of categories of consecutive visits."),
    Metric(
        "daily_distance",
        "Daily distance",
        "JSD of kilometres a day, in bins of equal shares of real trajectories.",
    ),
)
TIME_METRICS = (  # of samples that tell when
    Metric("hour", "Hour of arrival", "JSD of arrivals over the hours of the day."),
    Metric("dwell", "Dwell", "JSD of how long visits last, in bins from a minute to a week."),
)
ALL_METRICS = METRICS + TIME_METRICS
PAPER_METRICS = ("spatial", "travel_distance", "trip", "poi")


@dataclass(frozen=True)
class Yardstick:
    """The grid and the edges that both sides are counted with.

    Visits without coordinates (OTHER, unknown anchors) are skipped in geometry: a trip leads to the next place that has some.
    Every trajectory has one distance and one length, be it zero; an edge belongs to the bin above it.
    """

    vocabulary: Vocabulary = field(repr=False)
    cells: int  # along each side of the grid
    box: tuple[float, float, float, float]  # south, west, north, east
    travel_edges: tuple[float, ...]  # km of a trajectory; the last bin is open
    daily_edges: tuple[float, ...]  # km a day; the last bin is open
    longest: int  # visits; the last bin holds longer trajectories
    days: int  # of a window

    @classmethod
    def of(cls, dataset: TrajectoryDataset, cells: int = 40, *, split: str = "train") -> Yardstick:
        """Fixed by the people of `split`: their longest trajectory and distances, the box around their anchors and all POIs."""
        if cells < 1:
            raise MobatlasError(
                f"a grid of {cells} x {cells} cells does not exist; give cells of at least 1"
            )
        real = Trajectories.of(dataset, dataset.split(split))
        if not len(real):
            raise MobatlasError(
                f"{dataset.path}: no trajectory in split '{split}' to fix grids and edges with"
            )
        km = travel_distance(real, dataset.vocabulary)
        days = dataset.window_days
        # Where hardly anybody moves the quantile is zero, and bins without a width would hold nothing.
        top = float(np.quantile(km, TRAVEL_QUANTILE)) or float(km.max()) or 1.0
        return cls(
            vocabulary=dataset.vocabulary,
            cells=cells,
            box=_box(
                np.vstack(
                    (dataset.vocabulary.coordinates, real.anchors[:, :2], real.anchors[:, 2:])
                ),
                dataset,
            ),
            travel_edges=tuple(np.linspace(0, top, TRAVEL_BINS + 1)[1:].tolist()),
            daily_edges=tuple(
                np.unique(np.quantile(km / days, np.arange(1, DAILY_BINS) / DAILY_BINS)).tolist()
            ),
            longest=int(np.diff(real.offsets).max()),
            days=days,
        )

    def as_dict(self) -> dict[str, Any]:
        """For reports."""
        south, west, north, east = self.box
        middle = (south + north) / 2
        height = haversine_km(np.array([south, west]), np.array([north, west])) / self.cells
        width = haversine_km(np.array([middle, west]), np.array([middle, east])) / self.cells
        return {
            "cells": self.cells,
            "box": {"south": south, "west": west, "north": north, "east": east},
            "cell_km": [round(float(height), 3), round(float(width), 3)],
            "travel_edges_km": list(self.travel_edges),
            "daily_edges_km": list(self.daily_edges),
            "dwell_edges_minutes": list(DWELL_EDGES),
            "longest": self.longest,
            "days": self.days,
        }

    @cached_property
    def _features(self) -> dict[str, FeatureMap]:
        names = ("poi", "category", "transitions", "hour")
        maps = {
            name: build_feature(name, self.vocabulary, SPECIALS[HOME:] if name == "poi" else ())
            for name in names
        }
        return maps | {"poi_all": build_feature("poi", self.vocabulary)}

    def cell(self, places: Floats) -> Ints:
        """The cell of each latitude and longitude; outside the box it is cells * cells, one past the last."""
        low, high = np.array(self.box[:2]), np.array(self.box[2:])
        width = np.where(high > low, high - low, 1.0)
        # The north and the east edge belong to the last cells, or the outermost POI would lie outside its own box.
        step = np.minimum(
            ((places - low) / width * self.cells).astype(np.int64), self.cells - 1
        )  # (places, 2)
        inside = ((places >= low) & (places <= high)).all(-1)
        return np.where(inside, step[..., 0] * self.cells + step[..., 1], self.cells**2)

    def counts(self, trajectories: Trajectories) -> dict[str, sparse.csr_array]:
        """What each trajectory contributes to each metric: name -> (trajectories, bins); to when only if it tells when."""
        n, cells = len(trajectories), self.cells**2 + 1
        owner, places = located(trajectories, self.vocabulary)
        cell = self.cell(places)  # (located,)
        same = owner[:-1] == owner[1:]
        traveller, origin, destination = (
            owner[:-1][same],
            cell[:-1][same],
            cell[1:][same],
        )  # (trips,)
        km = _kilometres(n, owner, places)
        travel, daily = (
            np.searchsorted(edges, distance, side="right")
            for edges, distance in ((self.travel_edges, km), (self.daily_edges, km / self.days))
        )
        length = np.minimum(np.diff(trajectories.offsets), self.longest + 1)
        each = np.arange(n)
        found = {
            "spatial": _table(owner, cell, (n, cells)),
            "travel_distance": _table(each, travel, (n, len(self.travel_edges) + 1)),
            "trip": _table(traveller, origin * cells + destination, (n, cells**2)),
            # Side by side the two have equal mass, so the JSD of both together is the mean of their JSDs.
            "trip_marginals": _table(
                np.tile(traveller, 2), np.concatenate((origin, cells + destination)), (n, 2 * cells)
            ),
            "length": _table(each, length, (n, self.longest + 2)),
            "daily_distance": _table(each, daily, (n, len(self.daily_edges) + 1)),
        }
        if trajectories.stays is not None:
            dwell = np.searchsorted(60 * np.array(DWELL_EDGES), trajectories.stays, side="right")
            found["dwell"] = _table(trajectories.owner, dwell, (n, len(DWELL_EDGES) + 1))
        features = {
            name: each
            for name, each in self._features.items()
            if name != "hour" or "dwell" in found
        }
        found |= {name: feature.counts(trajectories) for name, feature in features.items()}
        return {metric.name: found[metric.name] for metric in ALL_METRICS if metric.name in found}

    def histograms(self, trajectories: Trajectories) -> dict[str, sparse.csr_array]:
        """The counts of all trajectories together: name -> (1, bins)."""
        return {name: column_sums(counts) for name, counts in self.counts(trajectories).items()}


def travel_distance(trajectories: Trajectories, vocabulary: Vocabulary) -> Floats:
    """Kilometres of each trajectory, from place to place; places without coordinates are skipped."""
    return _kilometres(len(trajectories), *located(trajectories, vocabulary))


def jsd(real: Counts, synthetic: Counts) -> float:
    """Jensen-Shannon divergence in bits of two histograms of counts, dense or sparse, over the bins that occur.

    Where one side counted nothing it is 1, as for any two without a bin in common; where neither did, it is 0.
    """
    rows = [
        side if isinstance(side, sparse.csr_array) else sparse.csr_array(side[None])
        for side in (real, synthetic)
    ]
    if rows[0].shape != rows[1].shape:
        raise ValueError(
            f"histograms of {rows[0].shape[1]} and {rows[1].shape[1]} bins cannot be compared"
        )
    return float(jsd_rows(*(row.toarray() for row in compact(*rows)))[0])


def jsd_rows(real: Floats, synthetic: Floats) -> Floats:
    """The same for many pairs of dense histograms: (pairs, bins) -> (pairs,)."""
    sums = [side.sum(-1, keepdims=True) for side in (real, synthetic)]
    row, column = np.nonzero(
        (real > 0) & (synthetic > 0)
    )  # of trips there are few: elsewhere a share is its own divergence
    p, q = (
        side[row, column] / total[row, 0]
        for side, total in zip((real, synthetic), sums, strict=True)
    )
    common = np.log2(2 * p / (p + q)) * p + np.log2(2 * q / (p + q)) * q - p - q
    found = 1 + np.bincount(row, weights=common, minlength=len(real)) / 2
    both_empty = (sums[0] == 0) & (sums[1] == 0)
    return np.where(both_empty[:, 0], 0.0, np.clip(found, 0, 1))


def compact(a: sparse.csr_array, b: sparse.csr_array) -> tuple[sparse.csr_array, sparse.csr_array]:
    """The same two tables with only those columns that occur in either: what is left of millions of trips may be dense."""
    occurring, place = np.unique(np.concatenate((a.indices, b.indices)), return_inverse=True)
    places = (place[: a.nnz], place[a.nnz :])
    first, second = (
        sparse.csr_array(
            (table.data, columns, table.indptr), shape=(table.shape[0], len(occurring))
        )
        for table, columns in zip((a, b), places, strict=True)
    )
    return first, second


def column_sums(counts: sparse.csr_array) -> sparse.csr_array:
    """The histogram of all rows together, (1, bins)."""
    bins = counts.shape[1]
    if bins <= counts.nnz:
        sums = np.bincount(counts.indices, weights=counts.data, minlength=bins)
        return sparse.csr_array(sums[None])
    # Of the possible trips few occur: nothing as long as their number is laid out.
    occurring, place = np.unique(counts.indices, return_inverse=True)
    sums = np.bincount(place, weights=counts.data, minlength=len(occurring))
    return sparse.csr_array((sums, occurring, [0, len(occurring)]), shape=(1, bins))


def _box(points: Floats, dataset: TrajectoryDataset) -> tuple[float, float, float, float]:
    known = points[~np.isnan(points).any(1)]
    if not len(known):
        raise MobatlasError(
            f"{dataset.path}: no POI and no anchor has coordinates; there is nothing to lay a grid over"
        )
    (south, west), (north, east) = known.min(0).tolist(), known.max(0).tolist()
    return south, west, north, east


def located(trajectories: Trajectories, vocabulary: Vocabulary) -> tuple[Ints, Floats]:
    """The trajectory and the coordinates of every visit that has some."""
    owner, tokens = trajectories.owner, trajectories.tokens
    places = vocabulary.coordinates[tokens]  # (tokens, 2)
    for token, columns in ((HOME, slice(0, 2)), (WORK, slice(2, 4))):
        here = tokens == token
        places[here] = trajectories.anchors[owner[here], columns]
    known = ~np.isnan(places).any(1)
    return owner[known], places[known]


def _kilometres(n: int, owner: Ints, places: Floats) -> Floats:
    legs = haversine_km(places[:-1], places[1:]) * (owner[:-1] == owner[1:])
    return np.bincount(owner[:-1], weights=legs, minlength=n).astype(np.float64)


def _table(
    rows: Ints, columns: npt.NDArray[np.integer[Any]], shape: tuple[int, int]
) -> sparse.csr_array:
    return sparse.csr_array((np.ones(len(rows)), (rows, columns)), shape=shape)
