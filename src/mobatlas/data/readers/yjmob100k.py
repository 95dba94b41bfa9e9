"""`yjmob100k`: the grid-cell records of Yabe et al. (2024), in a city whose place, north and calendar are undisclosed.

Coordinates and dates are nominal: a grid of 500 m cells around a point of your choice, and a first day of your choice.
"""

from __future__ import annotations

import math
import re
from datetime import date
from pathlib import Path

import duckdb
from pydantic import field_validator

from mobatlas.config import Section
from mobatlas.data.prepare.engine import Engine, first_line, literal
from mobatlas.data.readers.base import Reader, Source
from mobatlas.data.readers.conversion import convert
from mobatlas.data.readers.plain import require_path
from mobatlas.errors import MobatlasError
from mobatlas.io.tables import require_columns

RECORDS = {"uid": "VARCHAR", "d": "INTEGER", "t": "INTEGER", "x": "INTEGER", "y": "INTEGER"}
CATEGORY_NAMES = ("poicategory", "poi_category")
CELLS = 200  # a side
CELL_KM = 0.5
KM_PER_DEGREE = math.radians(6371.0088)
SLOT_MINUTES = 30
SUFFIXES = (".csv", ".csv.gz")


class Yjmob100kOptions(Section):
    """Where and when the undisclosed city is put."""

    origin: tuple[float, float] = (
        0.0,
        0.0,
    )  # lat, lon of the grid's centre; on the equator all distances are right
    first_day: date = date(2000, 1, 3)  # day 0; a Monday

    @field_validator("origin")
    @classmethod
    def _on_the_globe(cls, value: tuple[float, float]) -> tuple[float, float]:
        if abs(value[0]) > 80 or abs(value[1]) > 179:
            raise ValueError(
                "give a latitude within -80..80 and a longitude within -179..179, so that the grid fits"
            )
        return value


def read(path: Path, engine: Engine, options: Yjmob100kOptions) -> Source:
    records = _find(require_path(path))
    categories = next(
        (file for file in _tables(records.parent) if file.name.lower().startswith("cell_poicat")),
        None,
    )
    notes = [
        "coordinates, compass and dates are nominal, because the city is undisclosed; distances are true"
    ]
    pois, cells = None, "(SELECT NULL::INTEGER AS x, NULL::INTEGER AS y, NULL::VARCHAR AS category)"
    if categories:
        pois = engine.work / "source_pois.parquet"
        poi_id, lat, lon = _cell(options)
        columns = f"{poi_id} AS poi_id, {lat} AS lat, {lon} AS lon, category, n_poi, x, y"
        query = f"SELECT {columns} FROM {_cells(categories)}"
        _write(query, pois, categories, "x, y, category and count in whole numbers")
        cells = f"read_parquet({literal(pois)})"
    else:
        notes.append(f"no cell_POIcat.csv beside {records.name}, so that no cell has a category")
    target = engine.work / "source_visits.parquet"
    _write(_visits(records, cells, options), target, records, "uid,d,t,x,y in whole numbers")
    return Source(
        where=str(records),
        visits=engine.read(target),
        pois=engine.read(pois).drop("x", "y") if pois else None,
        notes=tuple(notes),
    )


def _find(path: Path) -> Path:
    if path.is_file():
        require_columns(str(path), _header(path), RECORDS)
        return path
    found = [file for file in _tables(path) if set(RECORDS) <= set(_header(file))]
    if not found:
        raise MobatlasError(
            f"{path}: holds no .csv or .csv.gz with the columns {', '.join(RECORDS)}"
        )
    if len(found) > 1:
        names = ", ".join(file.name for file in found)
        raise MobatlasError(
            f"{path}: holds several datasets ({names}); give the path of one of them"
        )
    return found[0]


def _tables(folder: Path) -> list[Path]:
    return sorted(file for file in folder.iterdir() if file.name.lower().endswith(SUFFIXES))


def _header(file: Path) -> list[str]:
    return [name.strip().strip('"') for name in first_line(file).split(",")]


def _scan(file: Path, types: dict[str, str]) -> str:
    columns = ", ".join(
        f"{literal(name)}: '{types.get(name, 'VARCHAR')}'" for name in _header(file)
    )
    return f"read_csv({literal(file)}, delim=',', header=true, auto_detect=false, columns={{{columns}}})"


def _cell(options: Yjmob100kOptions, inside: str = "true") -> tuple[str, str, str]:
    """SQL for the id and the nominal coordinates of the cell (x, y); x grows to the east, y to the north."""
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
    """SQL for the cells with POIs: the most frequent category (the smallest number where several tie) and the total."""
    header = _header(file)
    category = next((name for name in header if name.lower() in CATEGORY_NAMES), "POIcategory")
    require_columns(str(file), header, ("x", "y", category, "POI_count"))
    scan = _scan(
        file, {"x": "INTEGER", "y": "INTEGER", category: "INTEGER", "POI_count": "INTEGER"}
    )
    modal = f'concat(\'poi_\', first("{category}" ORDER BY "POI_count" DESC, "{category}"))'
    return f'(SELECT x, y, {modal} AS category, sum("POI_count")::BIGINT AS n_poi FROM {scan} GROUP BY x, y)'


def _visits(records: Path, cells: str, options: Yjmob100kOptions) -> str:
    # masked cells are 999 in the files of the challenge: they have no place, and the row is dropped and counted later
    poi_id, lat, lon = _cell(options, f"x BETWEEN 1 AND {CELLS} AND y BETWEEN 1 AND {CELLS}")
    arrival = (
        f"TIMESTAMP '{options.first_day} 00:00:00' + to_minutes(d * 1440 + t * {SLOT_MINUTES})"
    )
    return (
        f"SELECT uid AS user_id, {poi_id} AS poi_id, {lat} AS lat, {lon} AS lon, category, {arrival} AS arrival, "
        f"{arrival} + to_minutes({SLOT_MINUTES}) AS departure FROM {_scan(records, RECORDS)} "
        f"LEFT JOIN (SELECT x, y, category FROM {cells}) USING (x, y)"
    )


def _write(query: str, target: Path, source: Path, expected: str) -> None:
    try:
        convert(query, target)
    except duckdb.Error as error:
        line = re.search(r"Line: (\d+)", str(error))
        place = f"line {line[1]} is" if line else "some line is"
        raise MobatlasError(
            f"{source}: {place} not {expected}; mend it or download the file again"
        ) from None


READER = Reader(
    name="yjmob100k",
    description="YJMob100K, 30-minute records on a grid of 500 m cells",
    read=read,
    options=Yjmob100kOptions,
    # Home and work must be inferred from half-hour records, and many people show only one of them.
    suggests={"anchors": {"require_both": False}},
)
