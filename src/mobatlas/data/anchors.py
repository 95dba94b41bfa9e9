"""Synthetic homes and workplaces: cells with at least k people, and flows between them.

Homes and workplaces are uniform within the cells of dyadic subdivisions of the earth, so no
boundary is a coordinate of a person. Given the home cell, the work cell follows a gravity model

    p(work cell j | home cell i)  proportional to  attraction_j deterrence(distance of i and j) F_ij

that iterative proportional fitting makes meet the people of every cell, the distances and, by F,
the flows between zones. Only numbers of at least k people are met.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np

from mobatlas.config import MIN_PEOPLE
from mobatlas.data.types import KM_PER_DEGREE, Flags, Floats, Ints, haversine_km

SYNTHETIC = "synthetic"
OBSERVED = "observed"
# Times k people. With just k, who is among them would show in what is drawn.
CELL = 2
FLOW = 4
MAX_CELLS = 1_000
MIN_KM = 0.1  # side of a cell
EARTH = (-90.0, -180.0, 90.0, 180.0)  # south, west, north, east
ROWS = (20_000, 200_000)  # of a population, at least and at most
PER_PERSON = 5  # rows of a population
OUTLIERS = 0.1  # a cell shrinks if at most this share of its people are outside
BANDS = np.array([0.25, 0.5, 1, 1.5, 2, 3, 4, 5, 6, 8, 10, 12, 15, 20, 25, 30, 40, 60, 100, 200])
ROUNDS = 30  # of iterative proportional fitting
# What is known of a person: home + 2 work + (1 if both are the same place).
NOTHING, HOME_ONLY, WORK_ONLY, BOTH, SAME = range(5)
HOME = slice(0, 2)  # columns of anchors
WORK = slice(2, 4)
ABSENT = -2  # the region of people without a home


class Residents(NamedTuple):
    """People with their anchors and the numbers of their home regions."""

    anchors: Floats  # (people, 4) home lat, lon, work lat, lon; NaN where unknown
    region: Ints  # (people,) -1: none


class _Cells(NamedTuple):
    """Cells with at least k people each, or the earth if there are fewer."""

    boxes: Floats  # (cells, 4)
    people: Ints  # (cells,)
    region: Ints  # (cells,)
    cell: Ints  # (people,) -1: none


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
    work_cells: Floats  # (works, 4)
    kinds: Floats  # (1 + regions, 5) shares of people by what is known; the first row: no region
    home_zone: Ints  # (homes,)
    work_zone: Ints  # (works,)
    attraction: Floats  # (works,)
    deterrence: Floats  # (bands,) by the distance between the centres of cells
    flows: Floats  # (home zones, work zones) F

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
        homes = _cells_by_region(anchors[:, HOME], np.where(home, numbers, ABSENT), len(regions), k)
        works = _cells_by_region(anchors[:, WORK], np.where(work & ~same, -1, ABSENT), 0, k)
        both = np.flatnonzero((kind == BOTH) & (homes.cell >= 0) & (works.cell >= 0))
        return cls(
            people=len(anchors),
            k=k,
            regions=tuple(regions),
            home_cells=homes.boxes,
            home_people=homes.people,
            home_region=homes.region,
            work_cells=works.boxes,
            kinds=_kinds(kind, numbers, len(regions), k),
            **_fit_flows(homes, works, anchors, both, k),
        )

    def population(self, region: int | None = None) -> Residents:
        """The same people at every call, of all regions or of one."""
        return self.draw(int(np.clip(PER_PERSON * self.people, *ROWS)), region=region)

    def draw(self, n: int, seed: int = 0, region: int | None = None) -> Residents:
        """Draw n people, of all regions or of one; none if the model does not have the region."""
        rng = np.random.default_rng(seed)
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
        work = _points(self.work_cells[self._work_cells(cell, rng.random(n))], rng)
        work[kind == SAME] = home[kind == SAME]
        work[kind <= HOME_ONLY] = np.nan
        home[(kind == NOTHING) | (kind == WORK_ONLY)] = np.nan
        return Residents(np.hstack([home, work]), self.home_region[cell])

    def _work_cells(self, cell: Ints, uniform: Floats) -> Ints:
        """Draw a work cell (n,) for each home cell (n,) by uniform numbers (n,)."""
        band = _bands(self.home_cells, self.work_cells)
        weights = self.attraction * self.deterrence[band]  # (homes, works)
        weights *= self.flows[self.home_zone][:, self.work_zone]
        shares = np.cumsum(weights, axis=1)
        shares = shares / np.maximum(shares[:, -1:], 1e-300) + np.arange(len(shares))[:, None]
        chosen = np.searchsorted(shares.ravel(), cell + uniform, side="right")
        return np.minimum(chosen - cell * shares.shape[1], shares.shape[1] - 1)

    def as_dict(self) -> dict[str, Any]:
        """All fields, for JSON."""
        return {
            name: value.tolist() if isinstance(value, np.ndarray) else value
            for name, value in vars(self).items()
        }

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """The inverse of `as_dict`; ValueError or TypeError if it does not describe a model."""
        arrays: dict[str, Any] = {
            name: np.array(value) if isinstance(value, list) else value
            for name, value in values.items()
        }
        model = cls(**arrays | {"regions": tuple(values["regions"])})
        homes, works = (np.shape(cells)[:1] for cells in (model.home_cells, model.work_cells))
        sizes = {
            "people": (),
            "home_cells": (*homes, 4),
            "home_people": homes,
            "home_region": homes,
            "home_zone": homes,
            "work_cells": (*works, 4),
            "work_zone": works,
            "attraction": works,
            "deterrence": (len(BANDS) + 1,),
            "flows": np.shape(model.flows),
            "kinds": (len(model.regions) + 1, SAME + 1),
        }
        fields = {name: np.asarray(getattr(model, name)) for name in sizes}
        if any(
            value.shape != sizes[name] or value.dtype.kind not in "if"
            for name, value in fields.items()
        ):
            raise ValueError("its fields are not numbers of matching sizes")
        return model


def _fit_flows(
    homes: _Cells, works: _Cells, anchors: Floats, commuters: Ints, k: int
) -> dict[str, Any]:
    """Fit zones, attraction, deterrence and flows to the people with home and workplace."""
    known = anchors[commuters]
    home, work = homes.cell[commuters], works.cell[commuters]
    everyone = np.arange(len(known))
    least = int(np.sqrt(2 * FLOW * k * len(known)))  # enough people for most pairs of zones
    zones = [_centres(_cells(known[:, part], everyone, least)[0]) for part in (HOME, WORK)]
    home_zone, work_zone = (
        haversine_km(_centres(cells.boxes)[:, None], centres).argmin(1)
        for cells, centres in zip((homes, works), zones, strict=True)
    )
    shape = (len(zones[0]), len(zones[1]))
    pair = home_zone[:, None] * shape[1] + work_zone  # (homes, works)
    band = _bands(homes.boxes, works.boxes)
    in_band = np.bincount(band[home, work], minlength=len(BANDS) + 1)
    in_pair = np.bincount(pair[home, work], minlength=shape[0] * shape[1])
    # Distances of few people do not occur; flows of few people follow from the other numbers.
    shares = [
        np.where(people >= few, people / max(len(known), 1), rare)
        for people, few, rare in ((in_band, k, 0.0), (in_pair, FLOW * k, np.nan))
    ]
    rows, columns = (cells.people / cells.people.sum() for cells in (homes, works))
    attraction, (deterrence, flows) = fit_proportionally(rows, columns, (band, pair), shares)
    return {
        "home_zone": home_zone,
        "work_zone": work_zone,
        "attraction": attraction,
        "deterrence": deterrence,
        "flows": flows.reshape(shape),
    }


def fit_proportionally(
    rows: Floats, columns: Floats, indices: Sequence[Ints], shares: Sequence[Floats]
) -> tuple[Floats, list[Floats]]:
    """Fit attraction (works,) and factors by iterative proportional fitting.

    Parameters
    ----------
    rows, columns
        Shares of people by home cell (homes,) and by work cell (works,).
    indices
        For each kind of factor its number for two cells (homes, works).
    shares
        The shares of people that each factor must meet; NaN for any.

    Returns
    -------
    tuple
        The factors whose product is proportional to p(work cell | home cell).
    """
    attraction = columns
    factors = [np.ones(len(share)) for share in shares]
    for _ in range(ROUNDS):
        weights = attraction * factors[0][indices[0]] * factors[1][indices[1]]  # (homes, works)
        weights *= (rows / np.maximum(weights.sum(1), 1e-300))[:, None]
        ratio = columns / np.maximum(weights.sum(0), 1e-300)
        attraction = attraction * ratio
        weights *= ratio
        for number, (index, share) in enumerate(zip(indices, shares, strict=True)):
            found = np.bincount(index.ravel(), weights.ravel(), len(share))
            ratio = np.where(np.isnan(share), 1, share / np.maximum(found, 1e-300)).clip(0.1, 10)
            factors[number] = factors[number] * ratio
            weights *= ratio[index]
    return attraction / attraction.sum(), factors


def _bands(homes: Floats, works: Floats) -> Ints:
    """The band of the distance between cells (homes, works)."""
    return np.searchsorted(BANDS, haversine_km(_centres(homes)[:, None], _centres(works)))


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


def _cells_by_region(places: Floats, region: Ints, regions: int, k: int) -> _Cells:
    """Divide each region, and the people without one; people who are ABSENT have no cell."""
    least = max(CELL * k, int((region > ABSENT).sum()) // MAX_CELLS)
    cell = np.full(len(places), -1)
    parts = [(np.array([EARTH]), np.array([-1]))]
    for number in range(-1, regions):
        rows = np.flatnonzero(region == number)
        if len(rows) >= k:
            boxes, within = _cells(places, rows, least)
            cell[rows] = within[rows] + sum(len(part) for part, _ in parts[1:])
            parts.append((boxes, np.full(len(boxes), number)))
    boxes, owner = (np.concatenate(each) for each in zip(*(parts[1:] or parts), strict=True))
    people = np.bincount(cell[cell >= 0], minlength=len(boxes))
    return _Cells(boxes, np.maximum(people, 1), owner, cell)


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
