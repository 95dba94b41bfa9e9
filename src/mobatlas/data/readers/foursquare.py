"""`foursquare`: the check-ins of Yang et al., TSMC2014 (two cities) and TIST2015 (the world)."""

import re
from pathlib import Path

import duckdb
from pydantic import Field

from mobatlas.config import Section
from mobatlas.data.prepare.engine import Engine
from mobatlas.data.prepare.tables import MAX_HEADER, convert, literal
from mobatlas.data.readers.base import Reader, Source, require_one
from mobatlas.errors import MobatlasError

ENCODING = "latin-1"
EXAMPLE_TIME = "Tue Apr 03 18:00:09 +0000 2012"
TIME_FORMAT = "%a %b %d %H:%M:%S +0000 %Y"
TIME = re.compile(r"[A-Z][a-z]{2} [A-Z][a-z]{2} \d{2} \d{2}:\d{2}:\d{2} \+0000 \d{4}")
NUMBER = re.compile(r"[+-]?[\d.]+([eE][+-]?\d+)?")

# The files have no header; the number of columns identifies the layout.
TSMC2014 = {
    "user_id": "VARCHAR",
    "venue": "VARCHAR",
    "category_id": "VARCHAR",
    "category": "VARCHAR",
    "lat": "DOUBLE",
    "lon": "DOUBLE",
    "offset_minutes": "INTEGER",
    "utc": "VARCHAR",
}
TIST2015 = {
    "user_id": "VARCHAR",
    "venue": "VARCHAR",
    "utc": "VARCHAR",
    "offset_minutes": "INTEGER",
}
POIS = {
    "venue": "VARCHAR",
    "lat": "DOUBLE",
    "lon": "DOUBLE",
    "category": "VARCHAR",
    "country": "VARCHAR",
}
CHECKINS = (TSMC2014, TIST2015)
LAYOUTS = {len(layout): layout for layout in (*CHECKINS, POIS)}


class FoursquareOptions(Section):
    """Which part of the world."""

    country: str | None = Field(None, pattern=r"^[A-Za-z]{2}$")  # ISO code, of TIST2015 only


def read(path: Path, engine: Engine, options: FoursquareOptions) -> Source:
    """Convert the check-ins to Parquet, with the coordinates of their venues."""
    checkins, pois = _find(path)
    if pois is None and options.country:
        raise MobatlasError(
            f"{checkins}: TSMC2014 has no countries; remove the reader option country"
        )
    place = "p" if pois else "c"  # the table with the coordinates
    query = (
        f"SELECT c.user_id, venue AS poi_id, {place}.lat, {place}.lon, {place}.category, "
        f"strptime(c.utc, '{TIME_FORMAT}') + to_minutes(c.offset_minutes) AS arrival "
        f"FROM {_scan(checkins)} c"
    )
    if pois is not None:
        query += f" LEFT JOIN {_scan(pois)} p USING (venue)"
    if options.country:
        query += f" WHERE p.country = {literal(options.country.upper())}"
    target = engine.work / "source_visits.parquet"
    try:
        convert(query, target)
    except duckdb.Error as error:
        for file in filter(None, (checkins, pois)):
            _refuse_bad_line(file)
        raise MobatlasError(
            f"{checkins}: the file cannot be read ({str(error).splitlines()[0]})"
        ) from None
    return Source(
        where=str(checkins), visits=engine.read(target), notes=("check-ins have no departures",)
    )


def _find(path: Path) -> tuple[Path, Path | None]:
    """The check-ins, and the POIs if the layout has a file of them."""
    checkins = path
    if path.is_dir():
        checkins = require_one(
            path,
            (file for file in sorted(path.glob("*.txt")) if _layout(file) in CHECKINS),
            "check-ins, dataset_TSMC2014_*.txt or dataset_TIST2015_Checkins.txt",
        )
    if _layout(checkins) not in CHECKINS:
        raise MobatlasError(
            f"{path}: the first line has {_count_columns(path)} tab-separated columns; "
            "check-ins have 8 (TSMC2014) or 4 (TIST2015)"
        )
    if _layout(checkins) is TSMC2014:
        return checkins, None
    return checkins, require_one(
        checkins.parent,
        (file for file in sorted(checkins.parent.glob("*.txt")) if _layout(file) is POIS),
        "dataset_TIST2015_POIs.txt, the coordinates of TIST2015; put it next to the check-ins",
    )


def _count_columns(file: Path) -> int:
    with file.open(encoding=ENCODING) as lines:
        return len(lines.readline(MAX_HEADER).rstrip("\n").split("\t"))


def _layout(file: Path) -> dict[str, str] | None:
    return LAYOUTS.get(_count_columns(file))


def _scan(file: Path) -> str:
    layout = LAYOUTS[_count_columns(file)].items()
    columns = ", ".join(f"'{name}': '{kind}'" for name, kind in layout)
    return (
        f"read_csv({literal(file)}, delim='\t', header=false, quote='', escape='', "
        f"encoding='{ENCODING}', auto_detect=false, columns={{{columns}}})"
    )


def _refuse_bad_line(file: Path) -> None:
    """Name the first line that does not have the layout."""
    layout = LAYOUTS[_count_columns(file)]
    with file.open(encoding=ENCODING) as lines:
        for row, line in enumerate(lines, start=1):
            values = line.rstrip("\r\n").split("\t")
            fault = ""
            if len(values) != len(layout):
                fault = f"{len(values)} columns, not {len(layout)}"
            for (name, kind), value in zip(layout.items(), values, strict=False):
                if name == "utc" and not TIME.fullmatch(value):
                    fault = fault or f"the time '{value}', not one like '{EXAMPLE_TIME}'"
                if kind != "VARCHAR" and value and not NUMBER.fullmatch(value):
                    fault = fault or f"{name} '{value}', not a number"
            if fault:
                raise MobatlasError(f"{file}: line {row} has {fault}; correct it")


READER = Reader(
    name="foursquare",
    description="Foursquare check-ins, TSMC2014 or TIST2015",
    read=read,
    options=FoursquareOptions,
    # A check-in is a moment: it covers no time, and seldom shows a home or a workplace.
    suggests={"quality": {"min_coverage": 0.0}, "anchors": {"require_both": False}},
)
