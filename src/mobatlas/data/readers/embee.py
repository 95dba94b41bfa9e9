"""`embee`: the paper's source, a phone panel with home and work flags, and a survey."""

from collections.abc import Mapping
from pathlib import Path

import ibis
from ibis import ir
from pydantic import Field, field_validator

from mobatlas.config import BinLimits, Section
from mobatlas.data.prepare.engine import Engine
from mobatlas.data.prepare.tables import as_bin, as_flag, as_number, as_text, nearest_whole
from mobatlas.data.readers.base import Reader, Source, open_table
from mobatlas.data.types import ANCHORS
from mobatlas.errors import MobatlasError, same_column, suggestion
from mobatlas.io.tables import find_table

VISITS_FILES = ("traj", "visits")
PEOPLE_FILES = ("demo", "people", "survey")

# The names of a field in deliveries of the panel, the usual one first; case does not matter.
VISIT_SYNONYMS: dict[str, tuple[str, ...]] = {
    "user_id": ("panelist_id", "user_id"),
    "lat": ("latitude", "lat"),
    "lon": ("longitude", "lon", "lng"),
    "arrival": ("arrival_ts", "arrival", "arrival_time"),
    "departure": ("departure_ts", "departure", "departure_time"),
    "poi_id": ("poi_raw_id", "poi_id", "place_id"),
    "name": ("location_name", "poi_name", "name"),
    "brand": ("brand", "brand_name"),
    "category": ("category", "poi_category"),
    "is_home": ("is_home", "home_flag", "home"),
    "is_work": ("is_work", "work_flag", "work"),
    "is_poi": ("is_poi", "poi_flag"),
}
PEOPLE_SYNONYMS: dict[str, tuple[str, ...]] = {
    "user_id": ("panelist_id", "user_id"),
    "age": ("age", "age_years"),
    "gender": ("gender", "sex"),
    "home_lat": ("home_lat", "home_latitude"),
    "home_lon": ("home_lon", "home_longitude", "home_lng"),
    "work_lat": ("work_lat", "work_latitude"),
    "work_lon": ("work_lon", "work_longitude", "work_lng"),
}
REQUIRED = ("user_id", "lat", "lon", "arrival")
FIELDS = {**VISIT_SYNONYMS, **PEOPLE_SYNONYMS}
MAX_AGE = 120  # surveys write 999 and the like for no answer


class EmbeeOptions(Section):
    """Names and bins that differ between deliveries."""

    columns: dict[str, str] = Field({})  # field -> column, if it has none of the names above
    age_edges: BinLimits = (30, 40, 50)  # of a numeric age; the paper's four bins

    @field_validator("columns")
    @classmethod
    def _known_fields(cls, value: dict[str, str]) -> dict[str, str]:
        for field in value:
            if field not in FIELDS:
                raise ValueError(
                    f"'{field}' is not a field{suggestion(field, FIELDS)} "
                    f"(known: {', '.join(FIELDS)})"
                )
        return value


def read(path: Path, engine: Engine, options: EmbeeOptions) -> Source:
    """Read the visits, and the survey if the folder has one."""
    visits_file = path if path.is_file() else _first_table(path, VISITS_FILES)
    people_file = None if path.is_file() else _first_table(path, PEOPLE_FILES)
    if visits_file is None:
        raise MobatlasError(
            f"{path}: the folder contains no table traj or visits, as .csv or .parquet"
        )
    return Source(
        where=str(visits_file),
        visits=_visits(open_table(visits_file, engine), str(visits_file), options),
        people=_people(open_table(people_file, engine), str(people_file), options)
        if people_file
        else None,
    )


def _first_table(folder: Path, names: tuple[str, ...]) -> Path | None:
    return next(filter(None, (find_table(folder, name) for name in names)), None)


def _visits(table: ir.Table, where: str, options: EmbeeOptions) -> ir.Table:
    fields = _fields(table, where, VISIT_SYNONYMS, options.columns, REQUIRED)
    if not {"poi_id", "name", "brand"} & set(fields):
        raise MobatlasError(
            f"{where}: no column identifies the POI; add poi_raw_id, location_name or brand"
        )
    names = [as_text(fields[name]) for name in ("name", "brand") if name in fields]
    label = ibis.coalesce(*names, ibis.null("string"))
    # Whole ten-thousandths of a degree (about 10 m), because engines print fractions differently.
    lat, lon = (
        nearest_whole(as_number(fields[axis]) * 10_000).cast("string") for axis in ("lat", "lon")
    )
    poi_id = label.lower() + "@" + lat + "," + lon
    if "poi_id" in fields:
        poi_id = ibis.coalesce(as_text(fields["poi_id"]), poi_id)
    if "is_poi" in fields:
        poi_id = ibis.ifelse(as_flag(fields["is_poi"]), poi_id, ibis.null("string"))
    unchanged = ("user_id", "lat", "lon", "category", "arrival", "departure")
    columns = {name: fields[name] for name in unchanged if name in fields}
    flags = {name: as_flag(fields[name]) for name in ("is_home", "is_work") if name in fields}
    return table.select(**columns, **flags, poi_id=poi_id)


def _people(table: ir.Table, where: str, options: EmbeeOptions) -> ir.Table:
    fields = _fields(table, where, PEOPLE_SYNONYMS, options.columns, ("user_id",))
    columns = {name: fields[name] for name in ("user_id", *ANCHORS) if name in fields}
    if "age" in fields:
        columns["age"] = as_bin(fields["age"], options.age_edges, MAX_AGE)
    if "gender" in fields:
        columns["gender"] = _gender(fields["gender"])
    used = {column.get_name() for column in fields.values()}
    others = [name for name in table.columns if name not in used and name.lower() not in columns]
    return table.select(**columns, **{name: table[name] for name in others})


def _fields(
    table: ir.Table,
    where: str,
    synonyms: Mapping[str, tuple[str, ...]],
    named: Mapping[str, str],
    required: tuple[str, ...],
) -> dict[str, ir.Value]:
    by_lower = {name.lower(): name for name in table.columns}
    fields = {}
    for field, usual in synonyms.items():
        names = (named[field].lower(),) if field in named else usual
        column = next((by_lower[name] for name in names if name in by_lower), None)
        if column:
            fields[field] = table[column]
        elif field in required:
            raise MobatlasError(
                f"{where}: column '{names[0]}' is missing{same_column(names[0], table.columns)} "
                f"(columns: {', '.join(table.columns) or 'none'}); "
                f"name it in the reader option columns.{field}"
            )
    return fields


def _gender(gender: ir.Value) -> ir.Value:
    text = as_text(gender)
    known = text.upper().cases(("MALE", "M"), ("M", "M"), ("FEMALE", "F"), ("F", "F"))
    return ibis.coalesce(known, text)


READER = Reader(
    name="embee",
    description="a phone panel of POI visits with home and work flags, and a survey "
    "(traj.csv, demo.csv)",
    read=read,
    options=EmbeeOptions,
)
