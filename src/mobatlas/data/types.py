"""The arrays, tables, places and tokens that all packages work with.

The canonical tables are visits, people and pois. A vocabulary has special tokens, then HOME, WORK
and OTHER, then the most frequent POIs. Places are coordinates in degrees, and distances
great-circle distances on one radius.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mobatlas.io.tables import require_columns

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
Tokens = npt.NDArray[np.int32]
EARTH_KM = 6371.0088  # mean radius (IUGG)
KM_PER_DEGREE = math.radians(EARTH_KM)  # of latitude
# The first four are for models (padding, start, end, masked span) and never occur in a dataset.
PAD: Final = 0
BOS: Final = 1
EOS: Final = 2
MASK: Final = 3
HOME: Final = 4
WORK: Final = 5
OTHER: Final = 6
FIRST_POI: Final = 7
SPECIALS: Final = ("<pad>", "<bos>", "<eos>", "<mask>", "HOME", "WORK", "OTHER")

VOCABULARY_SCHEMA = pa.schema(
    [
        ("token", pa.int32()),
        ("poi_id", pa.string()),
        ("lat", pa.float64()),  # null before FIRST_POI
        ("lon", pa.float64()),
        ("category", pa.string()),
        ("visits", pa.int64()),  # of training people
    ]
)
DAY = 86_400  # seconds
# Times are naive, local and in whole seconds; departure, category and flags may be missing.
VISITS = {
    "user_id": "string",
    "poi_id": "string",
    "lat": "float64",
    "lon": "float64",
    "category": "string",
    "arrival": "timestamp",
    "departure": "timestamp",
    "is_home": "boolean",
    "is_work": "boolean",
}
VISITS_REQUIRED = ("user_id", "poi_id", "lat", "lon", "arrival")
POIS_REQUIRED = ("poi_id", "lat", "lon")
PEOPLE_REQUIRED = ("user_id",)
ANCHORS = ("home_lat", "home_lon", "work_lat", "work_lon")

# Columns of people that are attributes or regions if the configuration names none. Every other
# column is stored with the labels: a description of a person must not reach a model by accident.
ATTRIBUTE_NAMES = ("age", "age_group", "age_bin", "gender", "sex")
REGION_NAMES = frozenset(
    {
        "region",
        "district",
        "zone",
        "comuna",
        "commune",
        "municipality",
        "county",
        "province",
        "state",
        "tract",
        "cbg",
        "block_group",
        "census_block_group",
        "zip",
        "zipcode",
        "zip_code",
        "postcode",
        "postal_code",
        "ward",
        "borough",
        "neighborhood",
        "neighbourhood",
        "msa",
    }
)


def haversine_km(a: Floats, b: Floats) -> Floats:
    """Great-circle distance of coordinates in degrees, (..., 2) against (..., 2)."""
    (lat_a, lon_a), (lat_b, lon_b) = (np.moveaxis(np.radians(x), -1, 0) for x in (a, b))
    h = (
        np.sin((lat_b - lat_a) / 2) ** 2
        + np.cos(lat_a) * np.cos(lat_b) * np.sin((lon_b - lon_a) / 2) ** 2
    )
    return np.asarray(2 * EARTH_KM * np.arcsin(np.sqrt(np.clip(h, 0, 1))))


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of a dataset.

    Parameters
    ----------
    table
        One row per token, in order, with the columns of `VOCABULARY_SCHEMA`.

    Examples
    --------
    >>> vocabulary = TrajectoryDataset.open("dataset").vocabulary  # doctest: +SKIP
    >>> vocabulary.poi_ids[4:8]  # doctest: +SKIP
    ['HOME', 'WORK', 'OTHER', 'p00013']
    """

    table: pa.Table

    def __len__(self) -> int:
        return int(self.table.num_rows)

    @cached_property
    def poi_ids(self) -> list[str]:
        """The POI of each token."""
        return list(self.table["poi_id"].to_pylist())

    @cached_property
    def coordinates(self) -> Floats:
        """Latitude and longitude of each token, NaN where it has none: (tokens, 2)."""
        return np.stack([self.table[n].to_numpy().astype(np.float64) for n in ("lat", "lon")], 1)

    @cached_property
    def categories(self) -> list[str | None]:
        """The category of each token."""
        return list(self.table["category"].to_pylist())

    @cached_property
    def parents(self) -> dict[str, str]:
        """The category feature of each POI feature whose POI has a category."""
        return {
            f"poi:{poi_id}": f"category:{category}"
            for poi_id, category in zip(self.poi_ids, self.categories, strict=True)
            if category is not None
        }


def build_vocabulary(places: pa.Table) -> Vocabulary:
    """Number the places, in their order, after the special tokens."""
    specials = pa.table(
        {
            "token": pa.array(range(FIRST_POI)),
            "poi_id": pa.array(SPECIALS),
            "lat": pa.nulls(FIRST_POI),
            "lon": pa.nulls(FIRST_POI),
            "category": pa.array([None] * HOME + ["home", "work", "other"]),
            "visits": pa.nulls(FIRST_POI),
        }
    )
    tokens = pa.array(range(FIRST_POI, FIRST_POI + places.num_rows), pa.int32())
    pois = places.append_column("token", tokens).select(VOCABULARY_SCHEMA.names)
    parts = [table.cast(VOCABULARY_SCHEMA) for table in (specials, pois)]
    return Vocabulary(pa.concat_tables(parts).combine_chunks())


def looks_like_region(column: str) -> bool:
    """Whether a column of people is a region by its name, with or without the prefix `home_`."""
    return column.lower().removeprefix("home_") in REGION_NAMES


def region_column(path: Path, columns: Sequence[str]) -> str:
    """The column that names the region: `region`, a census GEO_ID, or one that looks like it."""
    exact = [name for name in columns if name.lower() == "region"]
    census = [name for name in columns if name.lower() in ("geo_id", "geoid")]
    if not (candidates := [*exact, *census, *filter(looks_like_region, columns)]):
        require_columns(str(path), columns, ("region",))
    return candidates[0]
