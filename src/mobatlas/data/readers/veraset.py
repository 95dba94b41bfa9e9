"""`veraset`: the Visits product of Veraset as distributed through Dewey, a file or a folder."""

from pathlib import Path

import ibis
import pyarrow as pa
import pyarrow.parquet as pq
from ibis import ir
from pydantic import Field

from mobatlas.config import Section
from mobatlas.data.prepare.engine import Engine
from mobatlas.data.prepare.steps import first_by
from mobatlas.data.prepare.tables import as_number, as_text, nearest_whole
from mobatlas.data.readers.base import Reader, Source, open_table
from mobatlas.errors import MobatlasError
from mobatlas.io.tables import require_columns

PLACE_KEYS = ("placekey", "safegraph_place_id")
CBG_DIGITS = 12
NAICS_DIGITS = 4  # the industry group, about as fine as TOP_CATEGORY
GEOHASH_ALPHABET = "0123456789bcdefghjkmnpqrstuvwxyz"


class VerasetOptions(Section):
    """Where coordinates and categories come from."""

    # a SafeGraph Places table: placekey or safegraph_place_id, latitude, longitude
    places: Path | None = None
    # the category is a NAICS prefix; None: TOP_CATEGORY, else four digits
    naics_digits: int | None = Field(None, ge=2, le=6)


def read(path: Path, engine: Engine, options: VerasetOptions) -> Source:
    """Read visits, and the home region of each device."""
    where = str(path)
    table = _open(path, engine)
    require_columns(where, table.columns, ("caid", "local_timestamp"))
    if not set(PLACE_KEYS) & set(table.columns):
        raise MobatlasError(
            f"{where}: columns 'placekey' and 'safegraph_place_id' are missing; "
            "add one of them to identify the POI"
        )
    table, notes = _locate(table, where, engine, options)
    is_home = _marked(table, "home")
    is_work = _marked(table, "work")
    poi_id = ibis.coalesce(_text(table, "placekey"), _text(table, "safegraph_place_id"))
    start = _local_time(table.local_timestamp)
    # Text that is not a time stays, so that the check of rows can show it.
    arrival = (
        ibis.coalesce(start.strftime("%Y-%m-%d %H:%M:%S"), table.local_timestamp)
        if table.local_timestamp.type().is_string()
        else start
    )
    naics = _text(table, "naics_code").substr(0, options.naics_digits or NAICS_DIGITS)
    top = ibis.null("string") if options.naics_digits else _text(table, "top_category")
    visits = {
        "user_id": table.caid,
        "poi_id": ibis.ifelse(is_home | is_work, ibis.null("string"), poi_id),
        "lat": table.lat,
        "lon": table.lon,
        "category": ibis.coalesce(top, naics),
        "arrival": arrival,
        "is_home": is_home,
        "is_work": is_work,
    }
    if "minimum_dwell" in table.columns:
        dwell = nearest_whole(as_number(table.minimum_dwell) * 60)
        visits["departure"] = (start.epoch_seconds().cast("int64") + dwell).as_timestamp("s")
    has_regions = "census_block_group" in table.columns
    return Source(
        where=where,
        visits=table.select(**visits),
        people=_home_regions(table.filter(is_home)) if has_regions else None,
        notes=tuple(notes),
    )


def _marked(table: ir.Table, kind: str) -> ir.Value:
    """Whether a row is at home or work; a shop called "Home" is not, because it has a place id."""
    place_id = _text(table, "safegraph_place_id").lower()
    placekey = _text(table, "placekey").lower()
    name = _text(table, "location_name").lower()
    marked = (place_id == kind) | (placekey == kind) | ((name == kind) & place_id.isnull())
    return marked.fill_null(False)


def _open(path: Path, engine: Engine) -> ir.Table:
    if path.is_file():
        return _lower(open_table(path, engine))
    has_parquet = any(path.rglob("*.parquet"))
    csv = sorted(
        file for file in path.rglob("*") if file.name.lower().endswith((".csv", ".csv.gz"))
    )
    if has_parquet and csv:
        raise MobatlasError(
            f"{path}: the folder contains both Parquet and CSV files; keep one kind"
        )
    if has_parquet:
        return _lower(open_table(path, engine))
    if not csv:
        raise MobatlasError(f"{path}: the folder contains no .parquet, .csv or .csv.gz file")
    tables = [_lower(open_table(file, engine)) for file in csv]
    columns = tables[0].columns
    for file, table in zip(csv, tables, strict=True):
        require_columns(str(file), table.columns, columns)
    if len(tables) == 1:
        return tables[0]
    return ibis.union(*(table.select(*columns) for table in tables))


def _lower(table: ir.Table) -> ir.Table:
    return table.rename({name.lower(): name for name in table.columns})


def _text(table: ir.Table, name: str) -> ir.Value:
    return as_text(table[name]) if name in table.columns else ibis.null("string")


def _local_time(column: ir.Value) -> ir.Value:
    """A naive timestamp from seconds, a timestamp, or ISO text without its offset."""
    kind = column.type()
    if kind.is_timestamp():
        # Through seconds: a cast would shift a column marked UTC by the zone of the session.
        return column.epoch_seconds().as_timestamp("s")
    if kind.is_string():
        seconds = column.try_cast("int64")
        iso = column.substr(0, 19).try_cast("timestamp")
        return ibis.ifelse(seconds.notnull(), seconds.as_timestamp("s"), iso)
    return column.cast("int64").as_timestamp("s")


def _locate(
    table: ir.Table, where: str, engine: Engine, options: VerasetOptions
) -> tuple[ir.Table, list[str]]:
    """Add lat and lon: of the delivery, else of the places table, else of the geohash cell."""
    if {"latitude", "longitude"} <= set(table.columns):
        return table.rename(lat="latitude", lon="longitude"), []
    if options.places is None and "geohash_5" not in table.columns:
        raise MobatlasError(
            f"{where}: columns 'latitude' and 'longitude' are missing, and so is 'geohash_5'; "
            "give the reader option places, a table of placekey, latitude and longitude"
        )
    origins = []
    notes = []
    if options.places is not None:
        table = _join_places(table, where, engine, options.places)
        origins.append("place")
        notes.append(f"coordinates come from {options.places}")
    if "geohash_5" in table.columns:
        table = _join_cells(table, engine)
        origins.append("cell")
        rest = "for rows without a match, including homes, " if options.places else ""
        notes.append(
            f"{rest}coordinates are centres of GEOHASH_5 cells, with errors up to about 2.4 km"
        )
    lat, lon = (
        ibis.coalesce(*(table[f"{origin}_{axis}"] for origin in origins)) for axis in ("lat", "lon")
    )
    return table.mutate(lat=lat, lon=lon), notes


def _join_places(table: ir.Table, where: str, engine: Engine, path: Path) -> ir.Table:
    places = _lower(open_table(path, engine))
    require_columns(str(path), places.columns, ("latitude", "longitude"))
    key = next((key for key in PLACE_KEYS if key in table.columns and key in places.columns), None)
    if key is None:
        raise MobatlasError(
            f"{path}: the table shares neither 'placekey' nor 'safegraph_place_id' with {where}; "
            "add one"
        )
    named = places.select(
        place=as_text(places[key]), lat=as_number(places.latitude), lon=as_number(places.longitude)
    )
    # A table of places may list several releases of one place, a few metres apart.
    once = named.group_by("place").agg(place_lat=named.lat.max(), place_lon=named.lon.max())
    return table.left_join(once, as_text(table[key]) == once.place)


def _join_cells(table: ir.Table, engine: Engine) -> ir.Table:
    cells = engine.collect(table.select(cell=as_text(table.geohash_5)).distinct())["cell"]
    centres = {cell: geohash_centre(cell) for cell in cells.to_pylist() if cell}
    types = {"cell": pa.string(), "cell_lat": pa.float64(), "cell_lon": pa.float64()}
    rows = [
        dict(zip(types, (cell, *centre), strict=True)) for cell, centre in centres.items() if centre
    ]
    path = engine.work / "source_cells.parquet"
    pq.write_table(pa.Table.from_pylist(rows, pa.schema(types)), path)
    decoded = engine.read(path)
    return table.left_join(decoded, as_text(table.geohash_5) == decoded.cell)


def geohash_centre(geohash: str) -> tuple[float, float] | None:
    """Latitude and longitude of the middle of a cell; None where the text is not a geohash."""
    codes = [GEOHASH_ALPHABET.find(letter) for letter in geohash.strip().lower()]
    if not codes or min(codes) < 0:
        return None
    # Bits alternate between the axes, and the first one halves the longitude.
    bounds = [[-180.0, 180.0], [-90.0, 90.0]]
    for number, bit in enumerate("".join(f"{code:05b}" for code in codes)):
        axis = bounds[number % 2]
        axis[0 if bit == "1" else 1] = sum(axis) / 2
    return sum(bounds[1]) / 2, sum(bounds[0]) / 2


def _home_regions(homes: ir.Table) -> ir.Table:
    """The block group of most home visits of a device; ties are broken by id."""
    named = homes.select(user_id=homes.caid, home_cbg=_block_group(homes.census_block_group))
    named = named.filter(named.home_cbg.notnull())
    counted = named.group_by("user_id", "home_cbg").agg(n=named.count())
    return first_by(counted, "user_id", [counted.n.desc(), counted.home_cbg]).drop("n")


def _block_group(column: ir.Value) -> ir.Value:
    if column.type().is_numeric():
        column = column.cast("int64")
    digits = as_text(as_text(column).re_replace(r"\.0$", ""))  # of a column that was a float
    return ibis.ifelse(digits.length() < CBG_DIGITS, digits.lpad(CBG_DIGITS, "0"), digits)


READER = Reader(
    name="veraset",
    description="Veraset Visits, as distributed through Dewey",
    read=read,
    options=VerasetOptions,
    # MINIMUM_DWELL is a lower bound, so coverage is not meaningful; workplaces are seldom marked.
    suggests={"quality": {"min_coverage": 0.0}, "anchors": {"require_both": False}},
)
