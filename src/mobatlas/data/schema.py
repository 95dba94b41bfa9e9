"""The canonical tables visits, people and pois, and the checks they pass where they enter."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mobatlas.io.tables import require_columns

# Times are naive local and counted in whole seconds; departure, category and the flags may be absent.
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

# Columns of people that are taken for attributes or regions when the configuration names none. What is neither stays with
# the labels: a column that might describe the person must not reach the models by accident.
ATTRIBUTE_NAMES = ("age", "age_group", "age_bin", "gender", "sex")
REGION_NAMES = (
    *(
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
    ),
    *(
        "block_group",
        "census_block_group",
        "zip",
        "zipcode",
        "zip_code",
        "postcode",
        "postal_code",
        "ward",
        "borough",
    ),
    *("neighborhood", "neighbourhood", "msa"),
)


def looks_like_region(column: str) -> bool:
    """Whether a column of people is a region when nobody said so: a word of the list, with or without `home_` before it."""
    return column.lower().removeprefix("home_") in REGION_NAMES


def region_column(path: Path, columns: Sequence[str]) -> str:
    """Which column names the region: `region`, a census GEO_ID, or one that looks like it."""
    for accepts in (lambda c: c == "region", lambda c: c in ("geo_id", "geoid"), looks_like_region):
        for column in columns:
            if accepts(column.lower()):
                return column
    require_columns(str(path), columns, ("region",))
    raise AssertionError
