"""Coarsening: move the homes and workplaces of samples away from those of real people.

Random displacements are keyed by the places of all people together, not by the seed: the seed is
written in the file, and whoever knows it could displace a suspect's home in the same way. A place
moves alike in every file of a population, so that files cannot be averaged to find it.
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
MAX_KM = 100  # a larger number is probably in metres
DEGREE_KM = EARTH_KM * np.pi / 180  # of latitude


def coarsen_anchors(anchors: Floats, coarsening: Coarsening, secret: Floats) -> Floats:
    """Move homes and workplaces (rows, 4); unknown ones stay unknown.

    `secret` holds the anchors of all people, which key the random displacement.
    """
    if coarsening.km > MAX_KM:
        raise MobatlasError(
            f"--coarsen {coarsening}: give at most {MAX_KM} km, such as 3km, 500m or grid:1km"
        )
    if not coarsening.km:
        log.warning("--coarsen %s: homes and workplaces are not moved", coarsening)
        return anchors
    home = anchors[:, :2]
    work = anchors[:, 2:]
    if coarsening.form == "grid":
        return np.hstack([_snap_to_grid(places, coarsening.km) for places in (home, work)])
    key = blake2b(np.unique(secret, axis=0).tobytes()).digest()
    return np.hstack([_displace(places, coarsening.km, key) for places in (home, work)])


def _displace(places: Floats, km: float, key: bytes) -> Floats:
    """Random points of the discs around places (rows, 2); equal places move alike."""
    distinct, row = np.unique(places, axis=0, return_inverse=True)
    # The radius is hashed as well: the same direction at two radii would point back at the place.
    words = (
        blake2b(np.append(place, km).tobytes(), key=key, digest_size=16).digest()
        for place in distinct
    )
    draws = np.frombuffer(b"".join(words), dtype="<u8").reshape(-1, 2) / 2.0**64  # (distinct, 2)
    lat, lon = np.radians(distinct).T
    angle = 2 * np.pi * draws[:, 1]
    arc = km / EARTH_KM * np.sqrt(draws[:, 0])  # the root makes it uniform over the area
    to_lat = np.arcsin(np.sin(lat) * np.cos(arc) + np.cos(lat) * np.sin(arc) * np.cos(angle))
    turn = np.arctan2(
        np.sin(angle) * np.sin(arc) * np.cos(lat), np.cos(arc) - np.sin(lat) * np.sin(to_lat)
    )
    moved = np.stack([np.degrees(to_lat), (np.degrees(lon + turn) + 180) % 360 - 180], axis=1)
    return moved[row.ravel()]


def _snap_to_grid(places: Floats, km: float) -> Floats:
    """Centres of squares: bands of latitude, each divided into squares of its own width."""
    bands = max(1, round(180 * DEGREE_KM / km))
    band = np.clip(np.floor((places[:, 0] + 90) / 180 * bands), 0, bands - 1)  # (rows,)
    lat = (band + 0.5) * 180 / bands - 90
    columns = np.maximum(1, np.round(360 * DEGREE_KM * np.cos(np.radians(lat)) / km))
    column = np.clip(np.floor((places[:, 1] + 180) / 360 * columns), 0, columns - 1)
    return np.stack([lat, (column + 0.5) * 360 / columns - 180], axis=1)
