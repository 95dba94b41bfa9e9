"""Metrics of real and synthetic trajectories, and the bins that they count in.

Each metric is the JSD in bits between the counts of two samples (paper, Section 5). Bins come from
real people only: synthetic trajectories never move a grid or an edge.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import permutations
from typing import Any, Self

import numpy as np
from scipy import sparse

from mobatlas.data.dataset import Trajectories, TrajectoryDataset
from mobatlas.data.types import DAY, EARTH_KM, HOME, WORK, Floats, Ints, Vocabulary, haversine_km
from mobatlas.errors import MobatlasError
from mobatlas.features.divergences import column_sums
from mobatlas.features.maps import FEATURES, Feature, FeatureMap, build_feature

MAX_PLACES = 6  # days with more places share one bin
MORE_PLACES = -1
COMMON = 60  # motifs of real days with bins of their own
# Travel distance: equal widths up to this quantile of real trajectories, then one bin for the rest.
TRAVEL_BINS = 50
TRAVEL_QUANTILE = 0.99
QUANTILE_BINS = 20  # of other distances: equal shares of real trajectories or legs
RANKS = 20  # places of a trajectory by number of visits; the last bin has the others
# Minutes of a stay: the first bin is below a minute, the last is open.
DWELL_EDGES = (
    *(1, 5, 10, 15, 20, 30, 45, 60, 90, 120, 180, 240, 360, 480, 600, 720, 960),
    *(1_440, 2_880, 5_760, 10_080),
)
PAPER_METRICS = ("spatial", "travel_distance", "trip", "poi")
MetricCount = Callable[["MetricInput"], sparse.csr_array]


def daily_motifs(trajectories: Trajectories, window_days: int) -> tuple[Ints, Ints]:
    """The motif of every day of every trajectory with times.

    A day has the places where a person stays during it, also those of a stay that begins the day
    before. Its motif is the directed graph of moves between different places, up to the names of
    the places.

    Parameters
    ----------
    trajectories
        Trajectories with times.
    window_days
        Longest stay that is counted, in days.

    Returns
    -------
    tuple
        The trajectory of each day, in ascending order, and the code of its motif: one bit for each
        move, or `MORE_PLACES`.
    """
    assert trajectories.arrivals is not None and trajectories.stays is not None
    owner, day, token = _visits_by_day(trajectories, window_days)
    if not len(owner):
        return owner, owner
    new_day = np.append(True, (np.diff(owner) != 0) | (np.diff(day) != 0))
    number = np.cumsum(new_day) - 1  # of the day, (visits,)
    place = _order_of_places(number, token)  # (visits,)
    places = np.zeros(int(number[-1]) + 1, dtype=np.int64)
    np.maximum.at(places, number, place + 1)
    moves = (number[:-1] == number[1:]) & (place[:-1] != place[1:])
    small = places[number[:-1]] <= MAX_PLACES
    bit = (place[:-1] * MAX_PLACES + place[1:])[moves & small]
    codes = np.zeros(len(places), dtype=np.int64)
    np.bitwise_or.at(codes, number[:-1][moves & small], np.left_shift(1, bit))
    distinct, back = np.unique(codes, return_inverse=True)
    codes = np.array([_canonical(code) for code in distinct.tolist()], dtype=np.int64)[back]
    return owner[new_day], np.where(places > MAX_PLACES, MORE_PLACES, codes)


def common_motifs(trajectories: Trajectories, window_days: int) -> tuple[int, ...]:
    """The most frequent motifs of real days, at most `COMMON` of them."""
    _, codes = daily_motifs(trajectories, window_days)
    distinct, days = np.unique(codes[codes != MORE_PLACES], return_counts=True)
    return tuple(sorted(distinct[np.argsort(-days, kind="stable")][:COMMON].tolist()))


def motif_bins(codes: Ints, known: Ints) -> Ints:
    """The bin of each code: its place in `known`, then other motifs, then more places."""
    if not len(known):
        return np.where(codes == MORE_PLACES, 1, 0)
    place = np.minimum(np.searchsorted(known, codes), len(known) - 1)
    bins = np.where(known[place] == codes, place, len(known))
    return np.where(codes == MORE_PLACES, len(known) + 1, bins)


def _visits_by_day(trajectories: Trajectories, window_days: int) -> tuple[Ints, Ints, Ints]:
    """The trajectory, the day and the token of each visit on each of its days, in order."""
    arrivals = trajectories.arrivals
    stays = trajectories.stays
    assert arrivals is not None and stays is not None
    first = arrivals // DAY
    # A stay that ends at midnight does not reach the next day.
    last = np.maximum((arrivals + stays - 1) // DAY, first)
    days = np.minimum(last - first, window_days) + 1  # (visits,)
    visit = np.repeat(np.arange(len(days)), days)
    day = first[visit] + np.arange(len(visit)) - np.repeat(np.cumsum(days) - days, days)
    owner = trajectories.owner[visit]
    order = np.lexsort((visit, day, owner))
    return owner[order], day[order], trajectories.tokens[visit][order].astype(np.int64)


def _order_of_places(number: Ints, token: Ints) -> Ints:
    """For each visit the place as a number: the first place of a day is 0, the next new one 1."""
    size = int(token.max(initial=0)) + 1
    _, first, back = np.unique(number * size + token, return_index=True, return_inverse=True)
    is_first = np.zeros(len(token), dtype=bool)
    is_first[first] = True
    seen = np.cumsum(is_first)  # new places up to each visit, over all days
    starts = np.append(True, np.diff(number) != 0)
    before = np.maximum.accumulate(np.where(starts, seen - 1, 0))
    return (seen - 1 - before)[first[back]]


@cache
def _canonical(code: int) -> int:
    """The smallest code of a motif under all names of its places."""
    edges = [divmod(bit, MAX_PLACES) for bit in range(MAX_PLACES**2) if code >> bit & 1]
    places = 1 + max((max(edge) for edge in edges), default=0)
    return min(
        sum(1 << (names[a] * MAX_PLACES + names[b]) for a, b in edges)
        for names in permutations(range(places))
    )


@dataclass(frozen=True)
class MetricSpec:
    """The grid and the bin edges that all samples are counted with.

    Visits without coordinates (OTHER, unknown anchors) are skipped in geometry: a leg leads to the
    next visit with coordinates, and a trip starts at the first. A value on an edge belongs to the
    bin above it.

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
    leg_edges: tuple[float, ...]  # km from a visit to the next; the last bin is open
    gyration_edges: tuple[float, ...]  # km; the last bin is open
    longest: int  # visits; the last bin holds longer trajectories
    most_places: int  # distinct ones of a trajectory; the last bin holds trajectories with more
    motifs: tuple[int, ...]  # networks of real days, see daily_motifs
    days: int  # of a window

    @classmethod
    def of(cls, dataset: TrajectoryDataset, cells: int = 40, *, split: str = "train") -> Self:
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
            Pass it to `compare`.
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
        vocabulary = dataset.vocabulary
        points = (vocabulary.coordinates, real.anchors[:, :2], real.anchors[:, 2:])
        days = dataset.window_days
        owner, places = located(real, vocabulary)
        legs, first = _legs(owner, places)
        km = sums_by(owner[first], legs, len(real))
        # If hardly anybody moves the quantile is zero, and all bins would have no width.
        top = float(np.quantile(km, TRAVEL_QUANTILE)) or float(km.max()) or 1.0
        return cls(
            vocabulary=vocabulary,
            cells=cells,
            box=_bounding_box(np.vstack(points), dataset),
            travel_edges=tuple(np.linspace(0, top, TRAVEL_BINS + 1)[1:].tolist()),
            daily_edges=_quantile_edges(km / days),
            leg_edges=_quantile_edges(legs),
            gyration_edges=_quantile_edges(gyration_km(len(real), owner, places)),
            longest=int(np.diff(real.offsets).max()),
            most_places=int(distinct_places(real).max()),
            motifs=common_motifs(real, days),
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
            "leg_edges_km": list(self.leg_edges),
            "gyration_edges_km": list(self.gyration_edges),
            "dwell_edges_minutes": list(DWELL_EDGES),
            "longest": self.longest,
            "most_places": self.most_places,
            "motifs": len(self.motifs),
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
            Metric -> counts (trajectories, bins), where entries of a bin may repeat. Metrics of
            time are left out if the trajectories have no times.
        """
        sample = MetricInput(trajectories, self)
        return {metric.name: sample.counts(metric) for metric in metrics(sample.has_times)}

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
    def legs(self) -> tuple[Floats, Ints]:
        """The kilometres of each leg, and the number of the visit where it starts."""
        return _legs(*self.visits)

    @cached_property
    def km(self) -> Floats:
        """The kilometres of each trajectory."""
        legs, first = self.legs
        return sums_by(self.visits[0][first], legs, len(self.trajectories))

    def counts(self, metric: Feature) -> sparse.csr_array:
        """The counts (trajectories, bins) of a metric."""
        if metric.count is not None:
            return metric.count(self)
        return self.spec.feature_map(metric.name, metric.mask).counts(self.trajectories)

    def count(
        self, rows: Ints, bins: Ints, number_of_bins: int, weights: Floats | None = None
    ) -> sparse.csr_array:
        """How often trajectory `rows[i]` has bin `bins[i]`, as (trajectories, bins); rows ascend.

        Counts of the same row and bin may be several entries: sums of them are what matters.
        """
        shape = (len(self.trajectories), number_of_bins)
        ends = np.cumsum(np.bincount(rows, minlength=shape[0]))
        data = np.ones(len(rows)) if weights is None else weights
        return sparse.csr_array((data, bins, np.concatenate(([0], ends))), shape=shape)

    def count_each(self, bins: Ints, number_of_bins: int) -> sparse.csr_array:
        """One bin for each trajectory."""
        return self.count(np.arange(len(self.trajectories)), bins, number_of_bins)


def travel_distance(trajectories: Trajectories, vocabulary: Vocabulary) -> Floats:
    """Kilometres of each trajectory from visit to visit, skipping visits without coordinates."""
    owner, places = located(trajectories, vocabulary)
    legs, first = _legs(owner, places)
    return sums_by(owner[first], legs, len(trajectories))


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


def sums_by(owner: Ints, values: Floats, n: int) -> Floats:
    """The sum of the values of each owner, (n,)."""
    return np.bincount(owner, weights=values, minlength=n).astype(np.float64)


def gyration_km(n: int, owner: Ints, places: Floats) -> Floats:
    """The radius of gyration (n,): root mean square distance of visits from their centre.

    `owner` (visits,) and `places` (visits, 2) are those of `located`; 0 without visits.
    """
    visits = np.maximum(np.bincount(owner, minlength=n), 1)  # (n,)
    start = places[np.searchsorted(owner, owner)]  # of the trajectory, (visits, 2)
    # Degrees from the start, which may pass the antimeridian.
    degrees = (places - start + 180) % 360 - 180
    centre = np.stack([sums_by(owner, degrees[:, axis], n) / visits for axis in (0, 1)], 1)
    # On a plane that touches the globe at the centre.
    north, east = np.radians(degrees - centre[owner]).T * EARTH_KM
    east = east * np.cos(np.radians(start[:, 0] + centre[owner, 0]))
    return np.asarray(np.sqrt(sums_by(owner, north**2 + east**2, n) / visits))


def distinct_places(trajectories: Trajectories) -> Ints:
    """How many different tokens each trajectory has, (trajectories,)."""
    owner, _, _ = visits_of_places(trajectories)
    return np.bincount(owner, minlength=len(trajectories))


def visits_of_places(trajectories: Trajectories) -> tuple[Ints, Ints, Ints]:
    """The trajectory, the token and the number of visits of each place that a trajectory visits."""
    size = int(trajectories.tokens.max(initial=0)) + 1
    pairs, visits = np.unique(trajectories.owner * size + trajectories.tokens, return_counts=True)
    return pairs // size, pairs % size, visits


def _legs(owner: Ints, places: Floats) -> tuple[Floats, Ints]:
    """Kilometres from each visit to the next of the same trajectory, and where each leg starts."""
    first = np.flatnonzero(owner[:-1] == owner[1:])
    return haversine_km(places[first], places[first + 1]), first


def _quantile_edges(km: Floats) -> tuple[float, ...]:
    """Edges between bins of equal shares; fewer where values are equal."""
    if not len(km):
        return (1.0,)
    return tuple(np.unique(np.quantile(km, np.arange(1, QUANTILE_BINS) / QUANTILE_BINS)).tolist())


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
    return _by_edges(sample, sample.km, sample.spec.travel_edges)


def _daily_distance(sample: MetricInput) -> sparse.csr_array:
    return _by_edges(sample, sample.km / sample.spec.days, sample.spec.daily_edges)


def _gyration(sample: MetricInput) -> sparse.csr_array:
    km = gyration_km(len(sample.trajectories), *sample.visits)
    return _by_edges(sample, km, sample.spec.gyration_edges)


def _by_edges(sample: MetricInput, values: Floats, edges: tuple[float, ...]) -> sparse.csr_array:
    return sample.count_each(np.searchsorted(edges, values, side="right"), len(edges) + 1)


def _jump_length(sample: MetricInput) -> sparse.csr_array:
    edges = sample.spec.leg_edges
    km, first = sample.legs
    bins = np.searchsorted(edges, km, side="right")
    return sample.count(sample.visits[0][first], bins, len(edges) + 1)


def _trip(sample: MetricInput) -> sparse.csr_array:
    owner = sample.visits[0]
    starts = np.flatnonzero(np.diff(owner, prepend=-1))  # (trajectories with coordinates,)
    return _count_pairs(sample, starts, np.append(starts, len(owner))[1:] - 1)


def _flows(sample: MetricInput) -> sparse.csr_array:
    first = sample.legs[1]
    return _count_pairs(sample, first, first + 1)


def _count_pairs(sample: MetricInput, origin: Ints, destination: Ints) -> sparse.csr_array:
    """Count pairs of the cells of two visits of the same trajectory."""
    cells = sample.spec.cells**2 + 1
    pairs = sample.cells[origin] * cells + sample.cells[destination]
    return sample.count(sample.visits[0][origin], pairs, cells**2)


def _length(sample: MetricInput) -> sparse.csr_array:
    longest = sample.spec.longest
    length = np.minimum(np.diff(sample.trajectories.offsets), longest + 1)
    return sample.count_each(length, longest + 2)


def _distinct_places(sample: MetricInput) -> sparse.csr_array:
    most = sample.spec.most_places
    return sample.count_each(np.minimum(distinct_places(sample.trajectories), most + 1), most + 2)


def _rank_frequency(sample: MetricInput) -> sparse.csr_array:
    owner, _, visits = visits_of_places(sample.trajectories)
    order = np.lexsort((-visits, owner))
    starts = np.flatnonzero(np.diff(owner, prepend=-1))
    rank = np.arange(len(owner)) - np.repeat(starts, np.diff(np.append(starts, len(owner))))
    return sample.count(owner, np.minimum(rank, RANKS), RANKS + 1, visits[order].astype(np.float64))


def _motifs(sample: MetricInput) -> sparse.csr_array:
    owner, codes = daily_motifs(sample.trajectories, sample.spec.days)
    known = np.array(sample.spec.motifs, dtype=np.int64)
    return sample.count(owner, motif_bins(codes, known), len(known) + 2)


def _dwell(sample: MetricInput) -> sparse.csr_array:
    trajectories = sample.trajectories
    assert trajectories.stays is not None  # the metric needs times
    bins = np.searchsorted(60 * np.array(DWELL_EDGES), trajectories.stays, side="right")
    return sample.count(trajectories.owner, bins, len(DWELL_EDGES) + 1)


def _poi_all(sample: MetricInput) -> sparse.csr_array:
    return sample.spec.feature_map("poi").counts(sample.trajectories)


def register_metric(
    name: str, count: MetricCount, *, title: str, description: str = "", needs_times: bool = False
) -> None:
    """Add a metric to every evaluation, its tables and the report.

    Parameters
    ----------
    name
        Key in `evaluation.json`; no other metric and no feature map may have it.
    count
        A function that takes a `MetricInput` and returns counts (trajectories, bins). The number
        of bins may depend on `MetricInput.spec` alone, which is the same for both samples.
    title
        Name in tables and in the report.
    description
        One sentence, shown in the report.
    needs_times
        Whether only trajectories with arrival times can be counted.

    Examples
    --------
    >>> def count_long(sample):
    ...     return sample.count_each((sample.km > 100).astype(int), 2)
    >>> register_metric("long", count_long, title="Above 100 km")  # doctest: +SKIP
    """
    FEATURES.register(
        name,
        Feature(name, title=title, description=description, count=count, needs_times=needs_times),
    )


def metrics(with_times: bool = False) -> list[Feature]:
    """The registered metrics, those of the paper first; `with_times` includes those of times."""
    order = {name: place for place, name in enumerate(PAPER_METRICS)}
    found = [
        each for each in FEATURES.values() if each.title and (with_times or not each.needs_times)
    ]
    return sorted(found, key=lambda each: order.get(each.name, len(order)))


for _name, _count, _title, _description in (
    ("spatial", _spatial, "Spatial", "JSD of visits over the cells of a grid."),
    (
        "travel_distance",
        _travel_distance,
        "Travel distance",
        "JSD of the kilometres that a trajectory travels.",
    ),
    (
        "trip",
        _trip,
        "Trip",
        "JSD of pairs (cell of the first visit, cell of the last visit) of a trajectory.",
    ),
    ("flows", _flows, "Flows", "JSD of pairs of cells of consecutive visits."),
    (
        "poi_all",
        _poi_all,
        "POI frequency with anchors",
        "JSD of visits over POIs, HOME, WORK and OTHER, as in the paper.",
    ),
    ("length", _length, "Length", "JSD of the number of visits of a trajectory."),
    (
        "daily_distance",
        _daily_distance,
        "Daily distance",
        "JSD of kilometres a day, in bins of equal shares of real trajectories.",
    ),
    (
        "jump_length",
        _jump_length,
        "Jump length",
        "JSD of the kilometres between consecutive visits, in bins of equal shares of real ones.",
    ),
    (
        "radius_of_gyration",
        _gyration,
        "Radius of gyration",
        "JSD of the spread of visits around their centre, in bins of equal shares of real ones.",
    ),
    (
        "distinct_places",
        _distinct_places,
        "Distinct places",
        "JSD of the number of different places of a trajectory.",
    ),
    (
        "rank_frequency",
        _rank_frequency,
        "Rank frequency",
        "JSD of visits over a trajectory's places, from the most to the least visited.",
    ),
):
    register_metric(_name, _count, title=_title, description=_description)
register_metric(
    "motifs",
    _motifs,
    title="Daily motifs",
    description="JSD of the networks of places and moves of a day (Schneider et al. 2013).",
    needs_times=True,
)
register_metric(
    "dwell",
    _dwell,
    title="Dwell",
    description="JSD of the duration of visits, in bins from a minute to a week.",
    needs_times=True,
)
