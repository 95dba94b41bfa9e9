"""Distances on Earth: one radius, kilometres per degree, and the great-circle distance."""

import math

import numpy as np

from mobatlas.data.arrays import Floats

EARTH_KM = 6371.0088  # mean radius (IUGG)
KM_PER_DEGREE = math.radians(EARTH_KM)  # of latitude


def haversine_km(a: Floats, b: Floats) -> Floats:
    """Great-circle distance of coordinates in degrees, (..., 2) against (..., 2)."""
    (lat_a, lon_a), (lat_b, lon_b) = (np.moveaxis(np.radians(x), -1, 0) for x in (a, b))
    h = (
        np.sin((lat_b - lat_a) / 2) ** 2
        + np.cos(lat_a) * np.cos(lat_b) * np.sin((lon_b - lon_a) / 2) ** 2
    )
    return np.asarray(2 * EARTH_KM * np.arcsin(np.sqrt(np.clip(h, 0, 1))))
