"""`foursquare`: the check-ins of Yang et al. as published, TSMC2014 (New York or Tokyo) and TIST2015 (the world)."""

from __future__ import annotations

import re
from pathlib import Path

import duckdb
from pydantic import Field

from mobatlas.config import Section
from mobatlas.data.prepare.engine import LONGEST_HEADER, Engine, literal
from mobatlas.data.readers.base import Reader, Source
from mobatlas.data.readers.conversion import convert
from mobatlas.data.readers.plain import require_path
from mobatlas.errors import MobatlasError

ENCODING = "latin-1"
TIME_FORMAT = "%a %b %d %H:%M:%S +0000 %Y"
TIME = re.compile(r"[A-Z][a-z]{2} [A-Z][a-z]{2} \d{2} \d{2}:\d{2}:\d{2} \+0000 \d{4}")

# The files have no header; what they are shows in the number of their columns.
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
TIST2015_CHECKINS = {
    "user_id": "VARCHAR",
    "venue": "VARCHAR",
    "utc": "VARCHAR",
    "offset_minutes": "INTEGER",
}
TIST2015_POIS = {
    "venue": "VARCHAR",
    "lat": "DOUBLE",
    "lon": "DOUBLE",
    "category": "VARCHAR",
    "country": "VARCHAR",
}
LAYOUTS = {len(layout): layout for layout in (TSMC2014, TIST2015_CHECKINS, TIST2015_POIS)}


class FoursquareOptions(Section):
    """Which part of the world."""

    country: str | None = Field(None, pattern=r"^[A-Za-z]{2}$")  # ISO code, of TIST2015 only


def read(path: Path, engine: Engine, options: FoursquareOptions) -> Source:
    checkins, pois = _find(require_path(path))
    if pois is None and options.country:
        raise MobatlasError(
            f"{checkins}: TSMC2014 names no countries; leave the reader option country out"
        )
    if pois is None:
        query = f"SELECT {_columns('c', 'c')} FROM {_scan(checkins)} c"
    else:
        where = f"WHERE p.country = {literal(options.country.upper())}" if options.country else ""
        query = f"SELECT {_columns('c', 'p')} FROM {_scan(checkins)} c LEFT JOIN {_scan(pois)} p USING (venue) {where}"
    target = engine.work / "source_visits.parquet"
    try:
        convert(query, target)
    except duckdb.Error as error:
        for file in filter(None, (checkins, pois)):
            _blame(file)
        raise MobatlasError(f"{checkins}: cannot be read ({str(error).splitlines()[0]})") from None
    return Source(
        where=str(checkins), visits=engine.read(target), notes=("check-ins have no departures",)
    )


def _find(path: Path) -> tuple[Path, Path | None]:
    """The check-ins, and the POIs if the layout keeps them apart."""
    if path.is_file():
        if _layout(path) not in (TSMC2014, TIST2015_CHECKINS):
            raise MobatlasError(
                f"{path}: the first line has {_count_columns(path)} tab-separated columns; "
                "check-ins have 8 (TSMC2014) or 4 (TIST2015)"
            )
        checkins = path
    else:
        texts = [
            file
            for file in sorted(path.glob("*.txt"))
            if _layout(file) in (TSMC2014, TIST2015_CHECKINS)
        ]
        if not texts:
            raise MobatlasError(
                f"{path}: holds no check-ins, dataset_TSMC2014_*.txt or dataset_TIST2015_Checkins.txt"
            )
        if len(texts) > 1:
            raise MobatlasError(
                f"{path}: holds several files of check-ins ({_names(texts)}); give the path of one"
            )
        checkins = texts[0]
    if _layout(checkins) is TSMC2014:
        return checkins, None
    pois = [
        file for file in sorted(checkins.parent.glob("*.txt")) if _layout(file) is TIST2015_POIS
    ]
    if len(pois) != 1:
        found = f"several ({_names(pois)})" if pois else "none"
        raise MobatlasError(
            f"{checkins}: TIST2015 keeps coordinates in dataset_TIST2015_POIs.txt; put it beside this (found {found})"
        )
    return checkins, pois[0]


def _names(files: list[Path]) -> str:
    return ", ".join(file.name for file in files)


def _count_columns(file: Path) -> int:
    with file.open(encoding=ENCODING) as lines:
        return len(lines.readline(LONGEST_HEADER).rstrip("\n").split("\t"))


def _layout(file: Path) -> dict[str, str] | None:
    return LAYOUTS.get(_count_columns(file))


def _scan(file: Path) -> str:
    columns = ", ".join(
        f"'{name}': '{kind}'" for name, kind in LAYOUTS[_count_columns(file)].items()
    )
    return (
        f"read_csv({literal(file)}, delim='\t', header=false, quote='', escape='', encoding='{ENCODING}', "
        f"auto_detect=false, columns={{{columns}}})"
    )


def _columns(checkin: str, place: str) -> str:
    utc = f"strptime({checkin}.utc, '{TIME_FORMAT}')"
    return (
        f"{checkin}.user_id, venue AS poi_id, {place}.lat, {place}.lon, {place}.category, "
        f"{utc} + to_minutes({checkin}.offset_minutes) AS arrival"
    )


def _blame(file: Path) -> None:
    """Look for the line that the query stumbled over, and name it."""
    layout = LAYOUTS[_count_columns(file)]
    with file.open(encoding=ENCODING) as lines:
        for row, line in enumerate(lines, start=1):
            values = line.rstrip("\r\n").split("\t")
            if len(values) != len(layout):
                raise MobatlasError(
                    f"{file}: line {row} has {len(values)} columns, not {len(layout)}; mend it"
                )
            for (name, kind), value in zip(layout.items(), values, strict=True):
                if name == "utc" and not TIME.fullmatch(value):
                    example = "Tue Apr 03 18:00:09 +0000 2012"
                    raise MobatlasError(
                        f"{file}: line {row} has the time '{value}', not one like '{example}'; mend it"
                    )
                if (
                    kind != "VARCHAR"
                    and value
                    and not re.fullmatch(r"[+-]?[\d.]+([eE][+-]?\d+)?", value)
                ):
                    raise MobatlasError(
                        f"{file}: line {row} has {name} '{value}', not a number; mend it"
                    )


READER = Reader(
    name="foursquare",
    description="Foursquare check-ins, TSMC2014 or TIST2015",
    read=read,
    options=FoursquareOptions,
    # A check-in is a moment: coverage is 0 by nature, and it seldom shows a home or a workplace.
    suggests={"quality": {"min_coverage": 0.0}, "anchors": {"require_both": False}},
)
