"""Metrics of real and synthetic trajectories, and the bins that they count in.

Each metric is the JSD in bits between the counts of two samples (paper, Section 5). Bins come from
real people only: synthetic trajectories never move a grid or an edge.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from scipy import sparse

from mobatlas.data.arrays import Floats, Ints
from mobatlas.data.dataset import TrajectoryDataset
from mobatlas.data.geodesy import haversine_km
from mobatlas.data.trajectories import Trajectories
from mobatlas.data.vocabulary import HOME, SPECIALS, WORK, Vocabulary
from mobatlas.errors import MobatlasError
from mobatlas.features.divergences import column_sums
from mobatlas.features.maps import FeatureMap, build_feature, count_bins
from mobatlas.registry import Registry

# Travel distance: equal widths up to this quantile of real trajectories, then one bin for the rest.
TRAVEL_BINS = 50
TRAVEL_QUANTILE = 0.99
# Daily distance: equal shares of real trajectories, to differ from the travel distance.
DAILY_BINS = 20
# Minutes of a stay: the first bin is below a minute, the last is open.
DWELL_EDGES = (
    *(1, 5, 10, 15, 20, 30, 45, 60, 90, 120, 180, 240, 360, 480, 600, 720, 960),
    *(1_440, 2_880, 5_760, 10_080),
)
PAPER_METRICS = ("spatial", "travel_distance", "trip", "poi")


@dataclass(frozen=True)
class Metric:
    """A count of trajectories; `evaluate` reports the JSD between real and synthetic counts.

    Parameters
    ----------
    name
        Key in `evaluation.json`.
    title
        Name in tables and in the report.
    description
        One sentence, shown in the report.
    count
        A function that takes a `MetricInput` and returns counts (trajectories, bins). The number
        of bins may depend on `MetricInput.spec` alone, which is the same for both samples.
    needs_times
        Whether only trajectories with arrival times can be counted.

    Examples
    --------
    >>> register_metric(
    ...     Metric.from_feature("distance", "Distance from home", "JSD of visits over distances.")
    ... )  # doctest: +SKIP
    """

    name: str
    title: str
    description: str
    count: Callable[[MetricInput], sparse.csr_array]
    needs_times: bool = False

    @classmethod
    def from_feature(
        cls,
        name: str,
        title: str,
        description: str,
        *,
        feature: str = "",
        mask: Sequence[str] = (),
        needs_times: bool = False,
    ) -> Metric:
        """A metric that counts with a feature map, by default the one with the same name.

        Parameters
        ----------
        name, title, description, needs_times
            As for `Metric`.
        feature
            A registered feature map.
        mask
            Tokens that are not counted: any of "HOME", "WORK", "OTHER".
        """

        def count(sample: MetricInput) -> sparse.csr_array:
            return sample.spec.feature_map(feature or name, tuple(mask)).counts(sample.trajectories)

        return cls(name, title, description, count, needs_times)


@dataclass(frozen=True)
class MetricSpec:
    """The grid and the bin edges that all samples are counted with.

    Visits without coordinates (OTHER, unknown anchors) are skipped in geometry: a trip leads to
    the next visit with coordinates. A value on an edge belongs to the bin above it.

    Examples
    --------
    >>> spec = MetricSpec.of(dataset)  # doctest: +SKIP
    >>> compare(spec, real, synthetic)["poi"]  # doctest: +SKIP
    """

    vocabulary: Vocabulary = field(repr=False)
    cells: int  # along each side of the grid
    box: tuple[float, float, float, float]  # south, west, north, east
    travel_edges: tuple[float, ...]  # km of a trajectory; the last bin is open
    daily_edges: tuple[float, ...]  # km a day; the last bin is open
    longest: int  # visits; the last bin holds longer trajectories
    days: int  # of a window

    @classmethod
    def of(cls, dataset: TrajectoryDataset, cells: int = 40, *, split: str = "train") -> MetricSpec:
        """Fix the bins by the people of a split.

        Parameters
        ----------
        dataset
            The prepared dataset.
        cells
            Number of grid cells along each side of the map.
        split
            The people whose anchors, distances and lengths fix the bins.

        Returns
        -------
        MetricSpec
            Pass it to `compare` and `evaluate_groups`.
        """
        if cells < 1:
            raise MobatlasError(
                f"a grid cannot have {cells} x {cells} cells; cells must be at least 1"
            )
        real = Trajectories.of(dataset, dataset.split(split))
        if not len(real):
            raise MobatlasError(
                f"{dataset.path}: split '{split}' has no trajectories to compute bins from"
            )
        points = (dataset.vocabulary.coordinates, real.anchors[:, :2], real.anchors[:, 2:])
        km = travel_distance(real, dataset.vocabulary)
        days = dataset.window_days
        # If hardly anybody moves the quantile is zero, and all bins would have no width.
        top = float(np.quantile(km, TRAVEL_QUANTILE)) or float(km.max()) or 1.0
        daily = np.quantile(km / days, np.arange(1, DAILY_BINS) / DAILY_BINS)
        return cls(
            vocabulary=dataset.vocabulary,
            cells=cells,
            box=_bounding_box(np.vstack(points), dataset),
            travel_edges=tuple(np.linspace(0, top, TRAVEL_BINS + 1)[1:].tolist()),
            daily_edges=tuple(np.unique(daily).tolist()),
            longest=int(np.diff(real.offsets).max()),
            days=days,
        )

    def as_dict(self) -> dict[str, Any]:
        """The bins, for JSON."""
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
    def _feature_maps(self) -> dict[tuple[str, ...], FeatureMap]:
        return {}

    def feature_map(self, name: str, mask: tuple[str, ...] = ()) -> FeatureMap:
        """A registered feature map over the vocabulary, built once."""
        key = (name, *mask)
        if key not in self._feature_maps:
            self._feature_maps[key] = build_feature(name, self.vocabulary, mask)
        return self._feature_maps[key]

    def cell(self, places: Floats) -> Ints:
        """The cell of each latitude and longitude; cells * cells if it is outside the box."""
        low = np.array(self.box[:2])
        high = np.array(self.box[2:])
        width = np.where(high > low, high - low, 1.0)
        # Points on the north and east edge belong to the last cells, not outside.
        step = ((places - low) / width * self.cells).astype(np.int64)  # (places, 2)
        step = np.minimum(step, self.cells - 1)
        inside = ((places >= low) & (places <= high)).all(-1)
        return np.where(inside, step[..., 0] * self.cells + step[..., 1], self.cells**2)

    def counts(self, trajectories: Trajectories) -> dict[str, sparse.csr_array]:
        """The counts of each trajectory for each metric.

        Returns
        -------
        dict
            Metric -> counts (trajectories, bins). Metrics of time are left out if the
            trajectories have no times.
        """
        sample = MetricInput(trajectories, self)
        return {metric.name: metric.count(sample) for metric in metrics(sample.has_times)}

    def histograms(self, trajectories: Trajectories) -> dict[str, sparse.csr_array]:
        """The counts of all trajectories together: metric -> (1, bins)."""
        return {name: column_sums(counts) for name, counts in self.counts(trajectories).items()}


@dataclass(frozen=True)
class MetricInput:
    """Trajectories that metrics count, the bins, and the geometry that several metrics share."""

    trajectories: Trajectories
    spec: MetricSpec

    @property
    def has_times(self) -> bool:
        return self.trajectories.stays is not None

    @cached_property
    def visits(self) -> tuple[Ints, Floats]:
        """The trajectory (visits,) and the coordinates (visits, 2) of visits that have some."""
        return located(self.trajectories, self.spec.vocabulary)

    @cached_property
    def cells(self) -> Ints:
        """The grid cell of each of these visits."""
        return self.spec.cell(self.visits[1])

    @cached_property
    def trips(self) -> tuple[Ints, Ints, Ints]:
        """The trajectory, the cell of origin and the cell of destination, (trips,) each."""
        owner = self.visits[0]
        same = owner[:-1] == owner[1:]
        return owner[:-1][same], self.cells[:-1][same], self.cells[1:][same]

    @cached_property
    def km(self) -> Floats:
        """The kilometres of each trajectory."""
        return _kilometres(len(self.trajectories), *self.visits)

    def count(self, rows: Ints, bins: Ints, number_of_bins: int) -> sparse.csr_array:
        """How often the trajectory `rows[i]` has the bin `bins[i]`: (trajectories, bins)."""
        return count_bins(rows, bins, (len(self.trajectories), number_of_bins))

    def count_each(self, bins: Ints, number_of_bins: int) -> sparse.csr_array:
        """One bin for each trajectory."""
        return self.count(np.arange(len(self.trajectories)), bins, number_of_bins)


def travel_distance(trajectories: Trajectories, vocabulary: Vocabulary) -> Floats:
    """Kilometres of each trajectory from visit to visit, skipping visits without coordinates."""
    return _kilometres(len(trajectories), *located(trajectories, vocabulary))


def located(trajectories: Trajectories, vocabulary: Vocabulary) -> tuple[Ints, Floats]:
    """The trajectory and the coordinates of every visit that has some."""
    owner = trajectories.owner
    tokens = trajectories.tokens
    places = vocabulary.coordinates[tokens]  # (tokens, 2)
    for token, columns in ((HOME, slice(0, 2)), (WORK, slice(2, 4))):
        visits = tokens == token
        places[visits] = trajectories.anchors[owner[visits], columns]
    known = ~np.isnan(places).any(1)
    return owner[known], places[known]


def _kilometres(n: int, owner: Ints, places: Floats) -> Floats:
    legs = haversine_km(places[:-1], places[1:]) * (owner[:-1] == owner[1:])
    return np.bincount(owner[:-1], weights=legs, minlength=n).astype(np.float64)


def _bounding_box(points: Floats, dataset: TrajectoryDataset) -> tuple[float, float, float, float]:
    known = points[~np.isnan(points).any(1)]
    if not len(known):
        raise MobatlasError(
            f"{dataset.path}: no POI, home or workplace has coordinates, and metrics need a map; "
            "add lat and lon to the visits"
        )
    (south, west), (north, east) = known.min(0).tolist(), known.max(0).tolist()
    return south, west, north, east


def _spatial(sample: MetricInput) -> sparse.csr_array:
    return sample.count(sample.visits[0], sample.cells, sample.spec.cells**2 + 1)


def _travel_distance(sample: MetricInput) -> sparse.csr_array:
    edges = sample.spec.travel_edges
    return sample.count_each(np.searchsorted(edges, sample.km, side="right"), len(edges) + 1)


def _daily_distance(sample: MetricInput) -> sparse.csr_array:
    edges = sample.spec.daily_edges
    bins = np.searchsorted(edges, sample.km / sample.spec.days, side="right")
    return sample.count_each(bins, len(edges) + 1)


def _trip(sample: MetricInput) -> sparse.csr_array:
    cells = sample.spec.cells**2 + 1
    owner, origin, destination = sample.trips
    return sample.count(owner, origin * cells + destination, cells**2)


def _trip_marginals(sample: MetricInput) -> sparse.csr_array:
    # Origins and destinations have equal mass: the JSD of both together is the mean of their JSDs.
    cells = sample.spec.cells**2 + 1
    owner, origin, destination = sample.trips
    return sample.count(np.tile(owner, 2), np.concatenate((origin, cells + destination)), 2 * cells)


def _length(sample: MetricInput) -> sparse.csr_array:
    longest = sample.spec.longest
    length = np.minimum(np.diff(sample.trajectories.offsets), longest + 1)
    return sample.count_each(length, longest + 2)


def _dwell(sample: MetricInput) -> sparse.csr_array:
    trajectories = sample.trajectories
    assert trajectories.stays is not None  # the metric needs times
    bins = np.searchsorted(60 * np.array(DWELL_EDGES), trajectories.stays, side="right")
    return sample.count(trajectories.owner, bins, len(DWELL_EDGES) + 1)


METRICS = Registry[Metric]("metric", "--metric")


def register_metric(metric: Metric) -> None:
    """Add a metric to every evaluation, its tables and the report.

    Parameters
    ----------
    metric
        Its name must be new.

    Examples
    --------
    >>> def count_long(sample):
    ...     return sample.count_each((sample.km > 100).astype(int), 2)
    >>> register_metric(
    ...     Metric("long", "Long distance", "JSD of trajectories above 100 km.", count_long)
    ... )  # doctest: +SKIP
    """
    METRICS.register(metric.name, metric)


def metrics(with_times: bool = False) -> list[Metric]:
    """The registered metrics in order; without those that need times unless `with_times`."""
    return [metric for metric in METRICS.values() if with_times or not metric.needs_times]


for _metric in (
    Metric("spatial", "Spatial", "JSD of visits over the cells of a grid.", _spatial),
    Metric(
        "travel_distance",
        "Travel distance",
        "JSD of the kilometres that a trajectory travels.",
        _travel_distance,
    ),
    Metric(
        "trip", "Trip", "JSD of pairs (origin cell, destination cell) of consecutive visits.", _trip
    ),
    Metric.from_feature(
        "poi",
        "POI frequency",
        "JSD of visits over POIs, without HOME, WORK and OTHER.",
        mask=SPECIALS[HOME:],
    ),
    Metric.from_feature(
        "poi_all",
        "POI frequency with anchors",
        "JSD of visits over POIs, HOME, WORK and OTHER.",
        feature="poi",
    ),
    Metric(
        "trip_marginals",
        "Trip marginals",
        "Mean of the JSD of origin cells and the JSD of destination cells.",
        _trip_marginals,
    ),
    Metric("length", "Length", "JSD of the number of visits of a trajectory.", _length),
    Metric.from_feature("category", "Category", "JSD of visits over categories."),
    Metric.from_feature(
        "transitions", "Transitions", "JSD of pairs of categories of consecutive visits."
    ),
    Metric(
        "daily_distance",
        "Daily distance",
        "JSD of kilometres a day, in bins of equal shares of real trajectories.",
        _daily_distance,
    ),
    Metric.from_feature(
        "hour", "Hour of arrival", "JSD of arrivals over the hours of the day.", needs_times=True
    ),
    Metric(
        "dwell",
        "Dwell",
        "JSD of the duration of visits, in bins from a minute to a week.",
        _dwell,
        needs_times=True,
    ),
):
    register_metric(_metric)
