"""Regions as polygons, GeoJSON or GeoPackage: the region of each person is the one around home."""

import json
import re
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from mobatlas.data.types import Floats
from mobatlas.errors import MobatlasError, first_line, refuse_faults, suggestion
from mobatlas.regions.places import refuse_misplaced

# WGS 84 and systems within two metres of it
DEGREES = ("CRS84", ":4326", ":4269", ":4258")
POLYGONS = {3, 6}  # numbers of the types polygon and multipolygon
ENVELOPE = (0, 32, 48, 48, 64)  # bytes between header and geometry of a GeoPackage, by its flags
UNREADABLE = (ValueError, OSError, TypeError, LookupError, AttributeError, RecursionError)
Layer = tuple[list[tuple[dict[str, Any], Any]], str]  # and its coordinate system


def regions_of_homes(path: Path, column: str, homes: Floats, notes: list[str]) -> list[str | None]:
    """The value of a column of the polygon around each home (people, 2), None outside all."""
    try:
        import shapely
    except ImportError:
        raise MobatlasError("--polygons needs shapely: pip install 'mobatlas[geo]'") from None
    try:
        read = _geopackage if path.suffix == ".gpkg" else _geojson
        rows, system = read(path, shapely)
    except (*UNREADABLE, sqlite3.Error, shapely.GEOSException) as e:
        raise MobatlasError(
            f"{path}: these are not polygons in GeoJSON or GeoPackage ({first_line(e)})"
        ) from None
    columns = list(dict.fromkeys(name for properties, _ in rows for name in properties))
    ids = [properties.get(column) for properties, _ in rows]
    shapes = np.array([shape for _, shape in rows])
    refuse_faults(
        {
            f"{path}: coordinates are in {system}, not in degrees; convert the file, for example "
            "with ogr2ogr -t_srs EPSG:4326": not system.endswith(DEGREES),
            f"--by {column}: the polygons of {path} have no such property"
            f"{suggestion(column, columns)} (known: {', '.join(columns) or 'none'})": column
            not in columns,
            f"{path}: a polygon has no '{column}'; fill it": None in ids,
            f"{path}: a shape is not a polygon; remove it": not set(
                shapely.get_type_id(shapes).tolist()
            )
            <= POLYGONS,
        }
    )
    box = np.array(shapely.total_bounds(shapes))[[1, 0, 3, 2]].reshape(2, 2)  # south-west, ...
    known = np.flatnonzero(np.isfinite(homes).all(1))
    refuse_misplaced(f"homes against {path}", homes[known], box)
    points = shapely.points(homes[known, 1], homes[known, 0])
    person, polygon = shapely.STRtree(shapes).query(points, predicate="covered_by")
    if not len(person):
        raise MobatlasError(f"{path}: none of {len(known):,} homes is inside a polygon")
    regions: list[str | None] = [None] * len(homes)
    for row, number in zip(known[person].tolist(), polygon.tolist(), strict=True):
        regions[row] = regions[row] or re.sub(r"\.0$", "", str(ids[number]))
    outside = len(known) - len(np.unique(person))
    notes.append(
        f"{path.name}: {len(known) - outside:,} of {len(homes):,} people live in one of "
        f"{len(rows):,} polygons; {outside:,} homes are outside, "
        f"{len(person) - len(np.unique(person)):,} are in more than one, and the first counts"
    )
    return regions


def _geojson(path: Path, shapely: Any) -> Layer:
    """Properties and shape of each feature."""
    content = json.loads(path.read_text(encoding="utf-8-sig"))
    system = str(((content.get("crs") or {}).get("properties") or {}).get("name", "CRS84"))
    features = content["features"]
    shapes = shapely.from_geojson([json.dumps(each["geometry"]) for each in features])
    properties = [each["properties"] or {} for each in features]
    return list(zip(properties, shapes, strict=True)), system


def _geopackage(path: Path, shapely: Any) -> Layer:
    """Columns and shape of each row of the only layer."""
    with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as file:
        query = "SELECT table_name, column_name, srs_id FROM gpkg_geometry_columns"
        layers = file.execute(query).fetchall()
        if len(layers) != 1:
            raise MobatlasError(f"{path}: has {len(layers)} layers; give a file with one")
        [(table, geometry, system)] = layers
        file.row_factory = sqlite3.Row
        rows = [dict(row) for row in file.execute(f"SELECT * FROM [{table}]")]
    blobs = [row.pop(geometry) for row in rows]
    shapes = shapely.from_wkb([blob[8 + ENVELOPE[blob[3] >> 1 & 7] :] for blob in blobs])
    return list(zip(rows, shapes, strict=True)), f"EPSG:{system}"
