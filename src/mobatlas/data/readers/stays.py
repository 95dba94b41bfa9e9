"""GPS points to stays, and stays to places: stay-point detection (Li et al. 2008) and DBSCAN (Ester et al. 1996)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

EARTH_METRES = 6_371_008.8

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
Coordinates = Floats | float


@dataclass(frozen=True)
class Stays:
    """The stays of one person in order of time; every array has one element a stay."""

    lat: Floats  # mean of the stay's points
    lon: Floats
    arrival: Floats  # seconds, of the first point
    departure: Floats  # seconds, of the last point
    points: Integers  # how many points the stay is made of

    def __len__(self) -> int:
        return len(self.lat)


def metres_between(
    lat: Coordinates, lon: Coordinates, other_lat: Coordinates, other_lon: Coordinates
) -> Floats:
    """Great-circle distance (haversine); the arguments broadcast."""
    south, north = np.radians(lat), np.radians(other_lat)
    east = np.radians(other_lon) - np.radians(lon)
    chord = np.sin((north - south) / 2) ** 2 + np.cos(south) * np.cos(north) * np.sin(east / 2) ** 2
    return np.asarray(
        2 * EARTH_METRES * np.arcsin(np.sqrt(np.minimum(chord, 1.0))), dtype=np.float64
    )


def detect_stays(
    lat: Floats,
    lon: Floats,
    seconds: Floats,
    metres: float,
    seconds_min: float,
    gap_max: float = np.inf,
) -> Stays:
    """Stays of one person whose points (points,) are sorted by time.

    From an anchor point the stay goes on while points lie within `metres` of the anchor; it counts if its first and
    last point are at least `seconds_min` apart, and the next anchor is the point after it. Otherwise the next point is
    the anchor. Silence up to `gap_max` seconds between two points near the anchor belongs to the stay, because phones
    and loggers go silent indoors; a longer silence ends it, because nobody knows where the person was.
    """
    n = len(seconds)
    silences = (
        np.flatnonzero(np.diff(seconds) > gap_max) + 1
    )  # first points after a silence that ends a stay
    last = np.append(silences, n)[
        np.searchsorted(silences, np.arange(n), side="right")
    ]  # (points,) end of the segment
    enough = np.searchsorted(
        seconds, seconds + seconds_min
    )  # (points,) the first point that makes a stay long enough
    candidates = np.flatnonzero(enough < last)
    reach = enough[candidates]
    near = metres_between(lat[candidates], lon[candidates], lat[reach], lon[reach]) <= metres
    candidates = candidates[
        near
    ]  # people on the move are out by now, so that the loop visits few anchors

    starts, ends = [], []
    position = 0
    while position < len(candidates):
        start = int(candidates[position])
        end = _first_far_point(lat, lon, start, int(enough[start]) + 1, int(last[start]), metres)
        if end > enough[start]:
            starts.append(start)
            ends.append(end)
            position = int(np.searchsorted(candidates, end))
        else:
            position += 1
    return _summarise(
        lat, lon, seconds, np.array(starts, dtype=np.int64), np.array(ends, dtype=np.int64)
    )


def _first_far_point(
    lat: Floats, lon: Floats, anchor: int, look_until: int, stop: int, metres: float
) -> int:
    begin, until = anchor + 1, min(max(look_until, anchor + 2), stop)
    while begin < stop:
        far = metres_between(lat[anchor], lon[anchor], lat[begin:until], lon[begin:until]) > metres
        if far.any():
            return begin + int(far.argmax())
        # stays of a whole day have tens of thousands of points, most have few: look further in doubling steps
        begin, until = until, min(until + 2 * (until - begin), stop)
    return stop


def _summarise(
    lat: Floats, lon: Floats, seconds: Floats, starts: Integers, ends: Integers
) -> Stays:
    def mean(values: Floats) -> Floats:
        return np.array(
            [values[start:end].mean() for start, end in zip(starts, ends, strict=True)],
            dtype=np.float64,
        )

    return Stays(mean(lat), mean(lon), seconds[starts], seconds[ends - 1], ends - starts)


def cluster_places(lat: Floats, lon: Floats, metres: float, min_samples: int = 1) -> Integers:
    """The place of each stay (stays,): stays chained by steps of at most `metres` share one.

    Places are numbered from 0. With `min_samples` above 1, a stay with fewer stays around it (itself included) and no
    place within reach belongs to none, -1.
    """
    from sklearn.cluster import (
        DBSCAN,  # here, because it takes a second to import and few commands need it
    )

    if len(lat) == 0:
        return np.zeros(0, dtype=np.int64)
    clusters = DBSCAN(
        eps=metres / EARTH_METRES,
        min_samples=min_samples,
        metric="haversine",
        algorithm="ball_tree",
    )
    return np.asarray(clusters.fit_predict(np.radians(np.column_stack([lat, lon]))), dtype=np.int64)


def place_centres(lat: Floats, lon: Floats, labels: Integers) -> tuple[Floats, Floats]:
    """Mean coordinates of each place (places,), over the stays that belong to one."""
    member = labels >= 0
    counts = np.bincount(labels[member])
    return (
        np.bincount(labels[member], weights=lat[member]) / counts,
        np.bincount(labels[member], weights=lon[member]) / counts,
    )
