"""The canonical tables visits, people and pois, and the checks they pass where they enter."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from mobatlas.errors import MobatlasError, suggestion

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
SUFFIXES = (".parquet", ".csv", ".csv.gz")


def find_table(folder: Path, name: str) -> Path | None:
    """`name` in any of the forms we read, in a folder."""
    found = (folder / f"{name}{suffix}" for suffix in SUFFIXES)
    return next((path for path in found if path.exists()), None)


def require_columns(where: str, columns: Iterable[str], required: Iterable[str]) -> None:
    """Refuse a table that lacks a column, naming the nearest one it has."""
    columns = list(columns)
    refuse_namesakes(where, columns)
    for name in required:
        if name not in columns:
            hint = suggestion(name, columns)
            raise MobatlasError(
                f"{where}: column '{name}' is missing{hint} (columns: {', '.join(columns) or 'none'})"
            )


def refuse_namesakes(where: str, columns: Sequence[str]) -> None:
    """Refuse a table that has two columns of one name."""
    twice = next((name for name, times in Counter(columns).items() if times > 1), None)
    if twice is not None:
        raise MobatlasError(f"{where}: two columns are called '{twice}'; rename one")


def looks_like_region(column: str) -> bool:
    """Whether a column of people is a region when nobody said so: a word of the list, with or without `home_` before it."""
    return column.lower().removeprefix("home_") in REGION_NAMES
