"""Places of published tables, matched to the vocabulary of a dataset."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy.spatial import cKDTree

from mobatlas.data.types import KM_PER_DEGREE, Flags, Floats, Ints, Vocabulary
from mobatlas.errors import MobatlasError

RADIUS_KM = 0.1  # within which two places of one name are the same
CANDIDATES = 8  # places of the vocabulary that are compared with a published place
MARGIN = 0.2  # degrees around the places of a dataset
SIGNS = {
    "the sign of latitude is wrong": (-1, 1),
    "the sign of longitude is wrong": (1, -1),
    "the signs of latitude and longitude are wrong": (-1, -1),
}
IDS = ("poi_id", "placekey", "place_id", "safegraph_place_id", "place", "poi")
NAMES = ("location_name", "name")
CATEGORIES = ("category", "top_category", "sub_category", "naics_code")
COORDINATES = (("latitude", "longitude"), ("lat", "lon"))
DESCRIPTION = (*NAMES, *CATEGORIES, *COORDINATES[0], *COORDINATES[1])


def match_places(
    path: Path, places: pd.DataFrame, vocabulary: Vocabulary, notes: list[str]
) -> Ints:
    """The token (places,) of each place, -1 for none.

    Places match by an id column, or within `RADIUS_KM` by a name that is the dataset's poi_id, or
    as the only place of the same category there. A token found by coordinates has one place.
    """
    token = np.full(len(places), -1, dtype=np.int64)
    known = pd.Index(vocabulary.poi_ids)
    for column in (name for name in IDS if name in places.columns):
        found = known.get_indexer(pd.Index(places[column].astype(str).str.strip()))
        token = np.where(token < 0, found, token)
    by_id = int((token >= 0).sum())
    axes = next((pair for pair in COORDINATES if set(pair) <= set(places.columns)), None)
    if axes is not None:
        numbers = places[list(axes)].apply(pd.to_numeric, errors="coerce")
        coordinates = numbers.to_numpy(dtype=np.float64)
        refuse_misplaced(path, coordinates, vocabulary.coordinates)
        rows = np.flatnonzero((token < 0) & np.isfinite(coordinates).all(1))
        found = _by_coordinates(places.iloc[rows], coordinates[rows], vocabulary)
        # A place that was found by its id is not found again by another one's coordinates.
        token[rows] = np.where(np.isin(found, token), -1, found)
    matched = int((token >= 0).sum())
    notes.append(
        f"{path.name}: {len(places):,} places, matched to the dataset: {by_id:,} by id, "
        f"{matched - by_id:,} by name or category within 100 m; {len(places) - matched:,} are left "
        "out"
    )
    return token


def _by_coordinates(places: pd.DataFrame, coordinates: Floats, vocabulary: Vocabulary) -> Ints:
    """The token (places,) of each place by name or category within the radius, -1 for none."""
    located = np.flatnonzero(np.isfinite(vocabulary.coordinates).all(1))
    if not len(located):
        return np.full(len(places), -1)
    km = KM_PER_DEGREE * np.array(
        [1, np.cos(np.radians(vocabulary.coordinates[located, 0].mean()))]
    )
    near, index = cKDTree(vocabulary.coordinates[located] * km).query(
        coordinates * km, k=CANDIDATES, distance_upper_bound=RADIUS_KM
    )  # (places, candidates), in order of distance
    within = np.isfinite(near)
    candidates = located[np.where(within, index, 0)]
    alone = within & (within.sum(1, keepdims=True) == 1)
    allowed = np.zeros_like(within)
    known: dict[tuple[str, ...], tuple[Sequence[object], Flags]] = {
        NAMES: (vocabulary.poi_ids, within),
        CATEGORIES: (vocabulary.categories, alone),
    }
    for columns, (theirs, eligible) in known.items():
        for column in (name for name in columns if name in places.columns):
            same = _plain(places[column])[:, None] == _plain(theirs)[candidates]
            allowed |= eligible & same & (_plain(places[column]) != "")[:, None]
    choice = np.argmax(allowed, axis=1)[:, None]
    found, token, distance = (
        np.take_along_axis(each, choice, 1)[:, 0] for each in (allowed, candidates, near)
    )
    nearest = pd.Series(np.where(found, distance, np.inf)).groupby(token).transform("min")
    found &= distance == nearest
    return np.where(found, token, -1)


def refuse_misplaced(where: Path | str, coordinates: Floats, reference: Floats) -> None:
    """Refuse latitudes and longitudes (n, 2) that only fit the reference when exchanged."""
    known = reference[np.isfinite(reference).all(1)]
    given = coordinates[np.isfinite(coordinates).all(1)]
    if not len(known) or not len(given):
        return
    low, high = known.min(0) - MARGIN, known.max(0) + MARGIN

    def inside(points: Floats) -> float:
        return float(((points >= low) & (points <= high)).all(1).mean())

    shares = {"latitude and longitude are swapped": inside(given[:, ::-1])}
    shares |= {fault: inside(given * np.array(sign)) for fault, sign in SIGNS.items()}
    fault = max(shares, key=lambda each: shares[each])
    if shares[fault] > 2 * inside(given) and shares[fault] > 0.5:
        raise MobatlasError(
            f"{where}: {fault}: only then are its coordinates, such as {given[0, 0]:.6g}, "
            f"{given[0, 1]:.6g}, in the area of the dataset; correct the columns"
        )
    if (np.abs(given) > (90, 180)).any():
        row = int(np.argmax((np.abs(given) > (90, 180)).any(1)))
        raise MobatlasError(
            f"{where}: {given[row, 0]:.6g}, {given[row, 1]:.6g} is not a latitude and a longitude; "
            "give coordinates in degrees (WGS 84)"
        )


def _plain(names: Sequence[object] | pd.Series) -> npt.NDArray[np.object_]:
    """Names without case, spaces and punctuation."""
    texts = pd.Series(names, dtype=object).fillna("").astype(str).str.casefold()
    return np.asarray(texts.str.replace(r"[\W_]", "", regex=True), dtype=object)
