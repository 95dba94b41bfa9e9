"""Coarsening: homes and workplaces of samples that are not quite those of people.

What is moved at random is moved by numbers that only the places of all people together give: the seed is written in the file,
and who knows it could move a suspect's home in the same way and look it up. And a place moves alike in every file of a
population, or several files would average to where it is.
"""

from __future__ import annotations

import logging
from hashlib import blake2b

import numpy as np

from mobatlas.config import Coarsening
from mobatlas.data.arrays import Floats
from mobatlas.data.geodesy import EARTH_KM
from mobatlas.errors import MobatlasError

log = logging.getLogger("mobatlas")
WIDEST_KM = 100  # who asks for more means metres
DEGREE_KM = EARTH_KM * np.pi / 180  # of latitude


def coarsened(anchors: Floats, how: Coarsening, secret: Floats) -> Floats:
    """Homes and workplaces (rows, 4) moved; `secret` holds the places of all people. What is unknown stays so."""
    if how.km > WIDEST_KM:
        raise MobatlasError(
            f"--coarsen {how}: give at most {WIDEST_KM} km, such as 3km, 500m or grid:1km"
        )
    if not how.km:
        log.warning("--coarsen %s: homes and workplaces stay where they are", how)
        return anchors
    if how.form == "grid":
        return np.hstack([_snapped(anchors[:, two], how.km) for two in (slice(0, 2), slice(2, 4))])
    key = blake2b(np.unique(secret, axis=0).tobytes()).digest()
    return np.hstack(
        [_displaced(anchors[:, two], how.km, key) for two in (slice(0, 2), slice(2, 4))]
    )


def _displaced(places: Floats, km: float, key: bytes) -> Floats:
    """At random points of the discs around them: places (rows, 2) that are equal move alike."""
    distinct, row = np.unique(places, axis=0, return_inverse=True)
    # The radius is hashed as well: the same direction at two radii would point back at the place.
    words = (
        blake2b(np.append(place, km).tobytes(), key=key, digest_size=16).digest()
        for place in distinct
    )
    draws = np.frombuffer(b"".join(words), dtype="<u8").reshape(-1, 2) / 2.0**64  # (distinct, 2)
    (lat, lon), angle = np.radians(distinct).T, 2 * np.pi * draws[:, 1]
    way = km / EARTH_KM * np.sqrt(draws[:, 0])  # the root makes it uniform over the area
    to_lat = np.arcsin(np.sin(lat) * np.cos(way) + np.cos(lat) * np.sin(way) * np.cos(angle))
    turn = np.arctan2(
        np.sin(angle) * np.sin(way) * np.cos(lat), np.cos(way) - np.sin(lat) * np.sin(to_lat)
    )
    moved = np.stack([np.degrees(to_lat), (np.degrees(lon + turn) + 180) % 360 - 180], axis=1)
    return moved[row.ravel()]


def _snapped(places: Floats, km: float) -> Floats:
    """To the middle of a square: bands of latitude, each divided into squares of its own width."""
    bands = max(1, round(180 * DEGREE_KM / km))
    band = np.clip(np.floor((places[:, 0] + 90) / 180 * bands), 0, bands - 1)  # (rows,)
    lat = (band + 0.5) * 180 / bands - 90
    columns = np.maximum(1, np.round(360 * DEGREE_KM * np.cos(np.radians(lat)) / km))
    column = np.clip(np.floor((places[:, 1] + 180) / 360 * columns), 0, columns - 1)
    return np.stack([lat, (column + 0.5) * 360 / columns - 180], axis=1)
