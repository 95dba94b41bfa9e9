"""`yjmob100k`: the grid-cell records of Yabe et al. (2024), from an undisclosed city.

Coordinates and dates are nominal: options choose the centre of the grid and the first day.
"""

import math
import re
from datetime import date
from pathlib import Path

import duckdb
from pydantic import field_validator

from mobatlas.config import Section
from mobatlas.data.prepare.engine import Engine
from mobatlas.data.prepare.tables import convert, first_line, literal
from mobatlas.data.readers.base import Reader, Source, require_one
from mobatlas.data.types import KM_PER_DEGREE
from mobatlas.errors import MobatlasError
from mobatlas.io.tables import require_columns

RECORDS = {"uid": "VARCHAR", "d": "INTEGER", "t": "INTEGER", "x": "INTEGER", "y": "INTEGER"}
CATEGORY_NAMES = ("poicategory", "poi_category")
CELLS = 200  # a side
CELL_KM = 0.5
SLOT_MINUTES = 30
SUFFIXES = (".csv", ".csv.gz")


class Yjmob100kOptions(Section):
    """The nominal place and time of the undisclosed city."""

    # lat, lon of the grid's centre; on the equator all distances are correct
    origin: tuple[float, float] = (0.0, 0.0)
    first_day: date = date(2000, 1, 3)  # day 0; a Monday

    @field_validator("origin")
    @classmethod
    def _on_the_globe(cls, value: tuple[float, float]) -> tuple[float, float]:
        if abs(value[0]) > 80 or abs(value[1]) > 179:
            raise ValueError(
                "give a latitude within -80..80 and a longitude within -179..179, "
                "so that the grid fits"
            )
        return value


def read(path: Path, engine: Engine, options: Yjmob100kOptions) -> Source:
    """Convert the records to Parquet, with the categories of cells if there is a table of them."""
    records = path
    if path.is_dir():
        records = require_one(
            path,
            (file for file in _tables(path) if set(RECORDS) <= set(_header(file))),
            f".csv or .csv.gz with the columns {', '.join(RECORDS)}",
        )
    require_columns(str(records), _header(records), RECORDS)
    notes = [
        "coordinates, directions and dates are nominal, because the city is undisclosed; "
        "distances are correct"
    ]
    tables = {}
    cells = "(SELECT NULL::INTEGER AS x, NULL::INTEGER AS y, NULL::VARCHAR AS category)"
    cell_files = [f for f in _tables(records.parent) if f.name.lower().startswith("cell_poicat")]
    if cell_files:
        pois = engine.work / "source_pois.parquet"
        poi_id, lat, lon = _cell(options)
        columns = f"{poi_id} AS poi_id, {lat} AS lat, {lon} AS lon, category, n_poi, x, y"
        query = f"SELECT {columns} FROM {_cells(cell_files[0])}"
        _write(query, pois, cell_files[0], "x, y, category and count in whole numbers")
        tables["pois"] = engine.read(pois).drop("x", "y")
        cells = f"read_parquet({literal(pois)})"
    else:
        notes.append(f"no cell_POIcat.csv next to {records.name}, so cells have no categories")
    target = engine.work / "source_visits.parquet"
    _write(_visits(records, cells, options), target, records, "uid,d,t,x,y in whole numbers")
    return Source(str(records), engine.read(target), notes=tuple(notes), **tables)


def _tables(folder: Path) -> list[Path]:
    return sorted(file for file in folder.iterdir() if file.name.lower().endswith(SUFFIXES))


def _header(file: Path) -> list[str]:
    return [name.strip().strip('"') for name in first_line(file).split(",")]


def _scan(file: Path, types: dict[str, str]) -> str:
    columns = ", ".join(
        f"{literal(name)}: '{types.get(name, 'VARCHAR')}'" for name in _header(file)
    )
    return (
        f"read_csv({literal(file)}, delim=',', header=true, auto_detect=false, "
        f"columns={{{columns}}})"
    )


def _cell(options: Yjmob100kOptions, inside: str = "true") -> tuple[str, str, str]:
    """SQL for the id and nominal coordinates of cell (x, y); x grows eastwards, y northwards."""
    lat, lon = options.origin
    middle = (CELLS + 1) / 2
    north = CELL_KM / KM_PER_DEGREE
    east = north / math.cos(math.radians(lat))
    return (
        f"CASE WHEN {inside} THEN concat(x, ':', y) END",
        f"CASE WHEN {inside} THEN {lat!r} + (y - {middle}) * {north!r}::DOUBLE END",
        f"CASE WHEN {inside} THEN {lon!r} + (x - {middle}) * {east!r}::DOUBLE END",
    )


def _cells(file: Path) -> str:
    """SQL for cells with POIs: the total, and the most frequent category, ties by number."""
    header = _header(file)
    category = next((name for name in header if name.lower() in CATEGORY_NAMES), "POIcategory")
    columns = ("x", "y", category, "POI_count")
    require_columns(str(file), header, columns)
    modal = f'concat(\'poi_\', first("{category}" ORDER BY "POI_count" DESC, "{category}"))'
    return (
        f'(SELECT x, y, {modal} AS category, sum("POI_count")::BIGINT AS n_poi '
        f"FROM {_scan(file, dict.fromkeys(columns, 'INTEGER'))} GROUP BY x, y)"
    )


def _visits(records: Path, cells: str, options: Yjmob100kOptions) -> str:
    # Masked cells are 999 in the files of the challenge: without a place, their rows are dropped.
    poi_id, lat, lon = _cell(options, f"x BETWEEN 1 AND {CELLS} AND y BETWEEN 1 AND {CELLS}")
    arrival = (
        f"TIMESTAMP '{options.first_day} 00:00:00' + to_minutes(d * 1440 + t * {SLOT_MINUTES})"
    )
    return (
        f"SELECT uid AS user_id, {poi_id} AS poi_id, {lat} AS lat, {lon} AS lon, category, "
        f"{arrival} AS arrival, {arrival} + to_minutes({SLOT_MINUTES}) AS departure "
        f"FROM {_scan(records, RECORDS)} "
        f"LEFT JOIN (SELECT x, y, category FROM {cells}) USING (x, y)"
    )


def _write(query: str, target: Path, source: Path, expected: str) -> None:
    try:
        convert(query, target)
    except duckdb.Error as error:
        line = re.search(r"Line: (\d+)", str(error))
        place = f"line {line[1]} is" if line else "some line is"
        raise MobatlasError(
            f"{source}: {place} not {expected}; correct it or download the file again"
        ) from None


READER = Reader(
    name="yjmob100k",
    description="YJMob100K, 30-minute records on a grid of 500 m cells",
    read=read,
    options=Yjmob100kOptions,
    # Home and work are inferred from half-hour records, and many people show only one of them.
    suggests={"anchors": {"require_both": False}},
)
