"""The canonical tables visits, people and pois: their columns, and how columns are recognised."""

from collections.abc import Sequence
from pathlib import Path

from mobatlas.io.tables import require_columns

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


def looks_like_region(column: str) -> bool:
    """Whether a column of people is a region by its name, with or without the prefix `home_`."""
    return column.lower().removeprefix("home_") in REGION_NAMES


def region_column(path: Path, columns: Sequence[str]) -> str:
    """The column that names the region: `region`, a census GEO_ID, or one that looks like it."""
    exact = [name for name in columns if name.lower() == "region"]
    census = [name for name in columns if name.lower() in ("geo_id", "geoid")]
    candidates = [*exact, *census, *filter(looks_like_region, columns)]
    if not candidates:
        require_columns(str(path), columns, ("region",))
    return candidates[0]
