"""Geohash cells to coordinates, for sources that give the cell instead of the place."""

from __future__ import annotations

ALPHABET = "0123456789bcdefghjkmnpqrstuvwxyz"
_VALUE = {letter: value for value, letter in enumerate(ALPHABET)}


def centre(geohash: str) -> tuple[float, float] | None:
    """Latitude and longitude of the middle of a cell; None where the text is not a geohash."""
    text = geohash.strip().lower()
    if not text or any(letter not in _VALUE for letter in text):
        return None
    bounds = [
        [-180.0, 180.0],
        [-90.0, 90.0],
    ]  # longitude first: bits alternate, and the first halves the longitude
    axis = 0
    for letter in text:
        for bit in (16, 8, 4, 2, 1):
            low, high = bounds[axis]
            bounds[axis][0 if _VALUE[letter] & bit else 1] = (low + high) / 2
            axis = 1 - axis
    return sum(bounds[1]) / 2, sum(bounds[0]) / 2
