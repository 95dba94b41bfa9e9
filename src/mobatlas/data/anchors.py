"""Synthetic homes and workplaces: cells with at least k people, and flows between them.

Homes and workplaces are uniform within the cells of dyadic subdivisions of the earth, so no
boundary is a coordinate of a person. Given the home cell, the work cell follows a gravity model

    p(work cell j | home cell i)  proportional to  attraction_j deterrence(distance of i and j) F_ij

that iterative proportional fitting makes meet the people of every cell, the distances and, by F,
the flows between zones; only numbers of at least k people are met. Among several candidates,
distances to the home itself then choose the workplace.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

import numpy as np

from mobatlas.data.types import KM_PER_DEGREE, Flags, Floats, Ints, haversine_km

SYNTHETIC = "synthetic"
OBSERVED = "observed"
MIN_PEOPLE = 10  # k, behind every published number
MAX_CELLS = 1_000
MIN_KM = 0.1  # side of a cell
EARTH = (-90.0, -180.0, 90.0, 180.0)  # south, west, north, east
ROWS = (20_000, 200_000)  # of a population, at least and at most
PER_PERSON = 5  # rows of a population
OUTLIERS = 0.1  # a cell shrinks if at most this share of its people, and fewer than k, are outside
BANDS = np.array([0.25, 0.5, 1, 1.5, 2, 3, 4, 5, 6, 8, 10, 12, 15, 20, 25, 30, 40, 60, 100, 200])
ROUNDS = 30  # of iterative proportional fitting
CANDIDATES = 8  # workplaces, of which the distance to the home chooses one
DISTANCE_ROUNDS = 6
STREAM = 41  # of random numbers
# What is known of a person: home + 2 work + (1 if both are the same place).
NOTHING, HOME_ONLY, WORK_ONLY, BOTH, SAME = range(5)
HOME = slice(0, 2)  # columns of anchors
WORK = slice(2, 4)
ABSENT = -2  # the region of people without a home


class Residents(NamedTuple):
    """People with their anchors and the numbers of their home regions."""

    anchors: Floats  # (people, 4) home lat, lon, work lat, lon; NaN where unknown
    region: Ints  # (people,) -1: none


@dataclass(frozen=True)
class AnchorModel:
    """A distribution of homes and workplaces that describes no cell of fewer than k people.

    Examples
    --------
    >>> model = AnchorModel.fit(dataset.anchors[dataset.split_people("train")])  # doctest: +SKIP
    >>> model.draw(1_000).anchors.shape  # doctest: +SKIP
    (1000, 4)
    """

    people: int  # that it was fitted on
    k: int
    regions: tuple[str, ...]
    home_cells: Floats  # (homes, 4) south, west, north, east
    home_people: Ints  # (homes,)
    home_region: Ints  # (homes,) number of the region, -1: none
    home_zone: Ints  # (homes,)
    work_cells: Floats  # (works, 4)
    work_zone: Ints  # (works,)
    attraction: Floats  # (works,)
    deterrence: Floats  # (bands,) by the distance between the centres of cells
    flows: Floats  # (home zones, work zones) F
    distances: Floats  # (bands,) weights of the distances between home and work
    kinds: Floats  # (1 + regions, 5) shares of people by what is known; the first row: no region

    @classmethod
    def fit(
        cls,
        anchors: Floats,
        region: Ints | None = None,
        regions: Sequence[str] = (),
        k: int = MIN_PEOPLE,
    ) -> Self:
        """Fit the model to people.

        Parameters
        ----------
        anchors
            (people, 4) home latitude, longitude, work latitude, longitude; NaN where unknown.
        region
            (people,) number of each person's region, -1 if it has none.
        regions
            The names of the regions. A region with fewer than k homes is treated as none.
        k
            People behind every number.

        Returns
        -------
        AnchorModel
            The model.
        """
        home, work = (~np.isnan(anchors[:, part]).any(1) for part in (HOME, WORK))
        same = home & work & (anchors[:, HOME] == anchors[:, WORK]).all(1)
        kind = home + 2 * work + same  # NOTHING to SAME
        numbers = np.full(len(anchors), -1) if region is None else region
        large = np.bincount(numbers[home] + 1, minlength=len(regions) + 1)[1:] >= k
        numbers = np.where(np.append(large, False)[numbers], numbers, -1)
        home_cells, home_cell, home_region = _home_cells(
            anchors[:, HOME], np.where(home, numbers, ABSENT), len(regions), k
        )
        works = np.flatnonzero(work & ~same)
        work_cells, work_cell = _cells(anchors[:, WORK], works if len(works) >= k else works[:0], k)
        people = np.bincount(home_cell[home_cell >= 0], minlength=len(home_cells))
        model = cls(
            people=len(anchors),
            k=k,
            regions=tuple(regions),
            home_cells=home_cells,
            home_people=np.maximum(people, 1),
            home_region=home_region,
            home_zone=np.zeros(len(home_cells), dtype=np.int64),
            work_cells=work_cells,
            work_zone=np.zeros(len(work_cells), dtype=np.int64),
            attraction=np.ones(len(work_cells)),
            deterrence=np.ones(len(BANDS) + 1),
            flows=np.ones((1, 1)),
            distances=np.ones(len(BANDS) + 1),
            kinds=_kinds(kind, numbers, len(regions), k),
        )
        both = np.flatnonzero((kind == BOTH) & (home_cell >= 0) & (work_cell >= 0))
        if len(both) < k:
            return model
        fitted = model._with_flows(anchors[both], home_cell[both], work_cell[both])
        return fitted._with_distances(_distance_counts(anchors[both]))

    def _with_flows(self, anchors: Floats, home: Ints, work: Ints) -> Self:
        """Fit attraction, deterrence and flows to people in these cells."""
        everyone = np.arange(len(anchors))
        least = int(np.sqrt(2 * self.k * len(anchors)))  # about k people for each pair of zones
        zones = [_centres(_cells(anchors[:, part], everyone, least)[0]) for part in (HOME, WORK)]
        own = _centres(self.home_cells), _centres(self.work_cells)
        home_zone, work_zone = (
            haversine_km(cells[:, None], centres).argmin(1)
            for cells, centres in zip(own, zones, strict=True)
        )
        pair = home_zone[:, None] * len(zones[1]) + work_zone  # (homes, works)
        band = self._bands()
        pool = pooled(np.bincount(band[home, work], minlength=len(BANDS) + 1), self.k)
        band = pool[band]
        rows, columns, flows, by_band = (
            np.bincount(each, minlength=size)
            for each, size in (
                (home, len(self.home_cells)),
                (work, len(self.work_cells)),
                (pair[home, work], len(zones[0]) * len(zones[1])),
                (band[home, work], pool.max() + 1),
            )
        )
        targets = np.where(flows >= self.k, flows, np.nan)
        attraction, deterrence, factors = fit_flows(
            rows, columns, (band, by_band.astype(np.float64)), (pair, targets)
        )
        return replace(
            self,
            home_zone=home_zone,
            work_zone=work_zone,
            attraction=attraction,
            deterrence=deterrence[pool],
            flows=factors.reshape(len(zones[0]), len(zones[1])),
        )

    def _with_distances(self, observed: Ints) -> Self:
        """Fit the weights of distances to the people in each band."""
        pool = pooled(observed, self.k)
        target = np.bincount(pool, observed) / observed.sum()
        model = self
        for _ in range(DISTANCE_ROUNDS):
            counts = np.bincount(pool, _distance_counts(model.draw(ROWS[0]).anchors))
            ratio = target * counts.sum() / np.maximum(counts, 1)
            model = replace(model, distances=model.distances * np.clip(ratio, 0.2, 5)[pool])
        return model

    def population(self, region: int | None = None) -> Residents:
        """The same people at every call, of all regions or of one."""
        return self.draw(int(np.clip(PER_PERSON * self.people, *ROWS)), region=region)

    def draw(self, n: int, seed: int = 0, region: int | None = None) -> Residents:
        """Draw n people, of all regions or of one; none if the model does not have the region."""
        rng = np.random.default_rng([seed, STREAM])
        weights = self.home_people * (True if region is None else self.home_region == region)
        if not weights.any():
            return Residents(np.zeros((0, 4)), np.zeros(0, dtype=np.int64))
        # One number in each of n equal parts of [0, 1): cells have their shares of the people.
        uniform = (np.arange(n) + rng.random(n)) / n
        cell = np.searchsorted(np.cumsum(weights) / weights.sum(), uniform, side="right")
        cell = np.minimum(cell, np.flatnonzero(weights)[-1])
        shares = np.cumsum(self.kinds[self.home_region[cell] + 1], axis=1)
        kind = np.minimum((shares <= rng.random((n, 1))).sum(1), SAME)
        home = _points(self.home_cells[cell], rng)
        work = self._workplaces(cell, home, rng)
        work[kind == SAME] = home[kind == SAME]
        work[kind <= HOME_ONLY] = np.nan
        home[(kind == NOTHING) | (kind == WORK_ONLY)] = np.nan
        return Residents(np.hstack([home, work]), self.home_region[cell])

    def _workplaces(self, cell: Ints, home: Floats, rng: np.random.Generator) -> Floats:
        """A workplace (n, 2) for each home (n, 2) and its cell (n,)."""
        weights = self.attraction * self.deterrence[self._bands()]  # (homes, works)
        weights *= self.flows[self.home_zone][:, self.work_zone]
        shares = np.cumsum(weights, axis=1)
        shares = shares / np.maximum(shares[:, -1:], 1e-300) + np.arange(len(shares))[:, None]
        uniform = cell[:, None] + rng.random((len(cell), CANDIDATES))
        chosen = np.searchsorted(shares.ravel(), uniform, side="right")
        chosen = np.minimum(chosen - cell[:, None] * len(self.work_cells), len(self.work_cells) - 1)
        places = _points(self.work_cells[chosen], rng)  # (n, candidates, 2)
        band = np.searchsorted(BANDS, haversine_km(home[:, None], places))
        until = np.cumsum(self.distances[band], axis=1)
        choice = (until <= rng.random((len(cell), 1)) * until[:, -1:]).sum(1)
        return places[np.arange(len(cell)), np.minimum(choice, CANDIDATES - 1)]

    def _bands(self) -> Ints:
        """The band of the distance between cells (homes, works)."""
        homes, works = _centres(self.home_cells), _centres(self.work_cells)
        return np.searchsorted(BANDS, haversine_km(homes[:, None], works))

    def as_dict(self) -> dict[str, Any]:
        """All fields, for JSON."""
        return {
            name: value.tolist() if isinstance(value, np.ndarray) else value
            for name, value in vars(self).items()
        }

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """The inverse of `as_dict`; ValueError or TypeError if it does not describe a model."""
        fields: dict[str, Any] = {
            name: np.array(value) if isinstance(value, list) else value
            for name, value in values.items()
        }
        model = cls(**fields | {"regions": tuple(values["regions"])})
        homes, works = len(model.home_cells), len(model.work_cells)
        if (
            model.home_cells.shape != (homes, 4)
            or model.work_cells.shape != (works, 4)
            or {len(model.home_people), len(model.home_region), len(model.home_zone)} != {homes}
            or {len(model.work_zone), len(model.attraction)} != {works}
            or {len(model.deterrence), len(model.distances)} != {len(BANDS) + 1}
            or model.kinds.shape != (len(model.regions) + 1, SAME + 1)
        ):
            raise ValueError("the sizes of its fields do not match")
        return model


def fit_flows(
    rows: Ints, columns: Ints, bands: tuple[Ints, Floats], pairs: tuple[Ints, Floats]
) -> tuple[Floats, Floats, Floats]:
    """Fit attraction (works,), deterrence and factors of pairs of zones by proportional fitting.

    Parameters
    ----------
    rows, columns
        People in each home cell (homes,) and work cell (works,).
    bands, pairs
        The number of the band, or of the pair of zones, of two cells (homes, works), and the
        people in each; NaN where they are not used.

    Returns
    -------
    tuple
        The factors whose product is proportional to p(work cell | home cell).
    """
    attraction = columns / columns.sum()
    factors = [np.ones(len(people)) for _, people in (bands, pairs)]
    for _ in range(ROUNDS):
        weights = attraction * factors[0][bands[0]] * factors[1][pairs[0]]  # (homes, works)
        weights *= (rows / np.maximum(weights.sum(1), 1e-300))[:, None]
        ratio = columns / np.maximum(weights.sum(0), 1e-300)
        attraction = attraction * ratio
        weights *= ratio
        for number, (index, people) in enumerate((bands, pairs)):
            found = np.bincount(index.ravel(), weights.ravel(), len(people))
            ratio = np.where(np.isnan(people), 1, people / np.maximum(found, 1e-300))
            ratio = np.clip(ratio, 0.1, 10)
            factors[number] = factors[number] * ratio
            weights *= ratio[index]
    return attraction / attraction.sum(), factors[0], factors[1]


def pooled(people: Ints, k: int) -> Ints:
    """Pool neighbouring bins until each pool has k people; the pool of each bin (bins,)."""
    pools: list[int] = []
    total = 0
    for count in people.tolist():
        pools.append((pools[-1] + 1 if total >= k else pools[-1]) if pools else 0)
        total = count if total >= k else total + count
    number = np.array(pools, dtype=np.int64)
    return np.minimum(number, number[-1] - 1) if total < k and number[-1] else number


def _kinds(kind: Ints, region: Ints, regions: int, k: int) -> Floats:
    """Shares of people by what is known (1 + regions, 5); pooled where fewer than k are behind."""
    counts = np.zeros((regions + 1, SAME + 1))
    np.add.at(counts, (region + 1, kind), 1)
    everyone = counts.sum(0)
    everyone[everyone < k] = 0
    everyone[NOTHING] += not everyone.any()
    few = ((counts > 0) & (counts < k)).any(1) | ~counts.any(1)
    counts[few] = everyone
    return np.asarray(counts / counts.sum(1, keepdims=True))


def _home_cells(places: Floats, region: Ints, regions: int, k: int) -> tuple[Floats, Ints, Ints]:
    """Cells of homes (homes, 4) by region, the cell of each person, the region of each cell."""
    least = max(k, int((region >= -1).sum()) // MAX_CELLS)
    cell = np.full(len(places), -1)
    boxes: list[Floats] = []
    owners: list[int] = []
    for number in range(-1, regions):
        rows = np.flatnonzero(region == number)
        if len(rows) >= k:
            own, within = _cells(places, rows, least)
            cell[rows] = within[rows] + len(owners)
            boxes.append(own)
            owners.extend([number] * len(own))
    if not boxes:
        return np.array([EARTH]), cell, np.array([-1])
    return np.vstack(boxes), cell, np.array(owners)


def _cells(places: Floats, rows: Ints, least: int) -> tuple[Floats, Ints]:
    """Cells (cells, 4) with at least `least` of these people, and the cell of each (people,).

    If all are fewer than that, there is one cell, which shrinks to where they are.
    """
    moved = places.copy()
    cell = np.full(len(places), -1)
    boxes: list[Floats] = []
    pending = [(np.array(EARTH), rows)]
    while pending:
        box, here = pending.pop()
        parts = _divide(box, moved[here], least)
        if not parts:
            cell[here] = len(boxes)
            boxes.append(box)
        for part, inside in parts:
            members = here[inside]
            moved[members] = np.clip(moved[members], part[:2], part[2:])
            pending.append((part, members))
    return np.stack(boxes), cell


def _divide(box: Floats, points: Floats, least: int) -> list[tuple[Floats, Flags]]:
    """Parts of a cell with the points (n, 2) that belong to each; none if it cannot be divided."""
    sides = (box[2:] - box[:2]) * KM_PER_DEGREE
    sides[1] *= np.cos(np.radians((box[0] + box[2]) / 2))
    outliers = min(least - 1, int(OUTLIERS * len(points)))
    for axis in np.argsort(-sides, kind="stable").tolist():
        if not len(points) or sides[axis] < 2 * MIN_KM:
            continue
        quarters = np.linspace(box[axis], box[axis + 2], 5)
        place = points[:, axis]
        halves = [
            (place >= low) & (place <= high)
            for low, high in zip(quarters[:3], quarters[2:], strict=True)
        ]
        best = int(np.argmax([half.sum() for half in halves]))
        if (~halves[best]).sum() <= outliers:
            return [(_part(box, axis, quarters[best : best + 3]), np.ones(len(points), dtype=bool))]
        west = place < quarters[2]
        if min(west.sum(), (~west).sum()) >= least:
            return [
                (_part(box, axis, quarters[:3]), west),
                (_part(box, axis, quarters[2:]), ~west),
            ]
    return []


def _part(box: Floats, axis: int, quarters: Floats) -> Floats:
    part = box.copy()
    part[[axis, axis + 2]] = quarters[[0, -1]]
    return part


def _centres(boxes: Floats) -> Floats:
    return np.asarray((boxes[:, :2] + boxes[:, 2:]) / 2)


def _points(boxes: Floats, rng: np.random.Generator) -> Floats:
    """A uniform point (..., 2) of each box (..., 4)."""
    low, high = boxes[..., :2], boxes[..., 2:]
    return np.asarray(low + rng.random(low.shape) * (high - low))


def _distance_counts(anchors: Floats) -> Ints:
    """People in each band of the distance between home and another workplace (bands,)."""
    apart = ~np.isnan(anchors).any(1) & (anchors[:, HOME] != anchors[:, WORK]).any(1)
    km = haversine_km(anchors[apart][:, HOME], anchors[apart][:, WORK])
    return np.bincount(np.searchsorted(BANDS, km), minlength=len(BANDS) + 1)
