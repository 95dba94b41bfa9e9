"""Visits of a source as typed columns; invalid rows are refused or dropped."""

import calendar
import re
from contextlib import suppress
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import NamedTuple

import ibis
from ibis import ir

from mobatlas.config import PrepareConfig
from mobatlas.data.prepare.engine import Engine, one
from mobatlas.data.prepare.tables import (
    FALSE_WORDS,
    NO_ANSWER,
    TRUE_WORDS,
    as_flag,
    as_number,
    as_text,
    is_word,
)
from mobatlas.data.readers.base import Source
from mobatlas.data.types import DAY, SPECIALS, VISITS_REQUIRED
from mobatlas.errors import MobatlasError
from mobatlas.io.tables import require_columns

ISO_LOCAL = r"^\d{4}-\d{2}-\d{2}([ T]\d{2}:\d{2}(:\d{2}(\.\d{1,9})?)?)?$"
# A visit outside these years is a broken record.
YEARS = (1971, 2100)
# What the text of a time may be, and what to do about it.
TIME_CAUSES = {
    r"\d{9,10}": "seconds since 1970, so write local times",
    r"\d{12,13}": "milliseconds since 1970, so write local times",
    r"\d{15,16}": "microseconds since 1970, so write local times",
    r"\d{18,19}": "nanoseconds since 1970, so write local times",
    r"\d{1,2}[/.]\d{1,2}[/.]\d{4}.*": "day and month in an unknown order, so write the year first",
    r".*\d(Z|[+-]\d{2}:?\d{2})": "times with a zone, so write local times without it",
}
# The columns of the source, which distinguish a missing value from a wrong one.
RAW = ("raw_arrival", "raw_departure", "raw_lat", "raw_lon", "raw_is_home", "raw_is_work")


@dataclass(frozen=True)
class RowCounts:
    """Rows of the source, and how many of them are dropped."""

    rows: int
    missing_coordinates: int
    not_poi: int
    invalid: int

    @property
    def usable(self) -> int:
        """Rows that are not dropped."""
        return self.rows - self.missing_coordinates - self.not_poi - self.invalid


class _Fault(NamedTuple):
    """A reason why a row is invalid."""

    rows: ir.Value  # boolean
    columns: tuple[str, ...]  # shown in the message
    sentence: str


def canonical_visits(source: Source) -> ir.Table:
    """Typed columns; times are local seconds since 1970, null where the text is not a time."""
    table = source.visits
    require_columns(source.where, table.columns, VISITS_REQUIRED)
    times = {name: table[name] for name in ("arrival", "departure") if name in table.columns}
    for name, column in times.items():
        _refuse_time_type(source.where, name, column)
        if column.type().is_numeric():  # refused as text that is not a time
            times[name] = column.try_cast("int64").cast("string")

    def optional(name: str, default: ir.Value) -> ir.Value:
        return table[name] if name in table.columns else default

    arrival, departure = times["arrival"], times.get("departure", ibis.null("timestamp"))
    home = optional("is_home", ibis.literal(False))
    work = optional("is_work", ibis.literal(False))
    return table.select(
        user_id=as_text(table.user_id),
        poi_id=as_text(table.poi_id),
        lat=as_number(table.lat),
        lon=as_number(table.lon),
        category=as_text(optional("category", ibis.null("string"))),
        start=_as_seconds(arrival),
        end=_as_seconds(departure),
        home=as_flag(home),
        work=as_flag(work),
        **dict(zip(RAW, (arrival, departure, table.lat, table.lon, home, work), strict=True)),
    )


def check_rows(
    visits: ir.Table, source: Source, engine: Engine, config: PrepareConfig
) -> tuple[ir.Table, RowCounts]:
    """Count what is wrong; refuse it, or return only the rows that can be used."""
    faults = _faults(visits, config)
    invalid = reduce(or_, [fault.rows for fault in faults.values()])
    # each row counts once: as invalid, else as without coordinates, else as not at a POI
    missing = ~invalid & (visits.lat.isnull() | visits.lon.isnull())
    not_poi = ~invalid & ~missing & visits.poi_id.isnull() & ~visits.home & ~visits.work
    totals = {
        "rows": visits.count(),
        "missing_coordinates": missing.sum(),
        "not_poi": not_poi.sum(),
        "invalid": invalid.sum(),
    }
    by_fault = {name: fault.rows.sum() for name, fault in faults.items()}
    row = one(engine, visits.aggregate(**totals, **by_fault))
    if row["rows"] == 0:
        raise MobatlasError(f"{source.where}: the table has no rows")
    counts = RowCounts(**{name: int(row[name]) for name in totals})
    for name, fault in faults.items():
        if row[name] and config.invalid_rows == "refuse":
            values = _example(fault, visits, engine)
            shown = ", ".join(f"{key} {value!r}" for key, value in values.items())
            raise MobatlasError(
                f"{source.where}: {fault.sentence} in {row[name]:,} of {counts.rows:,} rows "
                f"(for example {shown}); {_cause(values)}, or set "
                "invalid_rows: drop in the section prepare to leave such rows out"
            )
    if counts.missing_coordinates > config.max_missing_coordinates * counts.rows:
        raise MobatlasError(
            f"{source.where}: columns 'lat' and 'lon' are missing in "
            f"{counts.missing_coordinates:,} of {counts.rows:,} rows, more than "
            f"max_missing_coordinates = {config.max_missing_coordinates:g} allows; "
            "fill them or raise the limit"
        )
    if counts.usable < counts.rows:
        visits = visits.filter(~(missing | not_poi | invalid))
    return visits.drop(*RAW), counts


def _faults(visits: ir.Table, config: PrepareConfig) -> dict[str, _Fault]:
    has_arrival = _has_value(visits.raw_arrival)
    bad_arrival = visits.start.isnull() & has_arrival
    bad_departure = visits.end.isnull() & _has_value(visits.raw_departure)
    bad_lat = visits.lat.isnull() & is_word(visits.raw_lat)
    bad_lon = visits.lon.isnull() & is_word(visits.raw_lon)
    flags = (*TRUE_WORDS, *FALSE_WORDS, *NO_ANSWER)
    bad_flag = is_word(visits.raw_is_home, flags) | is_word(visits.raw_is_work, flags)
    reserved = visits.poi_id.isin(SPECIALS).fill_null(False) & ~visits.home & ~visits.work
    stay = visits.end - visits.start
    times = RAW[:2]
    return {
        "no_user": _Fault(
            visits.user_id.isnull(), ("poi_id", "raw_arrival"), "column 'user_id' is empty"
        ),
        "bad_time": _Fault(
            bad_arrival | bad_departure,
            times,
            "columns 'arrival' and 'departure' are not local times without a zone, "
            "like 2024-03-04 08:15:00,",
        ),
        "no_time": _Fault(~has_arrival, ("user_id", "poi_id"), "column 'arrival' is empty"),
        "bad_number": _Fault(
            bad_lat | bad_lon, RAW[2:4], "columns 'lat' and 'lon' are not numbers"
        ),
        "bad_lat": _Fault(
            _is_true(visits.lat.abs() > 90), RAW[2:4], "column 'lat' is outside -90..90"
        ),
        "bad_lon": _Fault(
            _is_true(visits.lon.abs() > 180), RAW[2:4], "column 'lon' is outside -180..180"
        ),
        "bad_flag": _Fault(
            bad_flag, RAW[4:], "columns 'is_home' and 'is_work' are neither true nor false"
        ),
        "reserved": _Fault(
            reserved,
            ("poi_id",),
            "column 'poi_id' uses a reserved word (flag the row as is_home or is_work, or rename "
            "the place)",
        ),
        "far": _Fault(
            _is_true(~visits.start.between(*(calendar.timegm((y, 1, 1, 0, 0, 0)) for y in YEARS))),
            times,
            "column 'arrival' is not between the years {} and {}".format(*YEARS),
        ),
        "reversed": _Fault(_is_true(stay < 0), times, "column 'departure' is before 'arrival'"),
        "long_stay": _Fault(
            _is_true(stay > config.max_stay_days * DAY),
            times,
            f"the visit lasts longer than max_stay_days = {config.max_stay_days}",
        ),
    }


def _example(fault: _Fault, visits: ir.Table, engine: Engine) -> dict[str, str]:
    """The columns of the first row with that fault, as text."""
    columns = {
        name.removeprefix("raw_"): visits[name].cast("string")
        for name in ("user_id", *fault.columns)
    }
    rows = visits.filter(fault.rows).select(**columns)
    row = one(engine, rows.order_by(rows.columns).limit(1))
    return {name: value for name, value in row.items() if value is not None}


def _cause(values: dict[str, str]) -> str:
    """What the values of an invalid row seem to be, and what to do about it."""
    for name in ("arrival", "departure"):
        for pattern, cause in TIME_CAUSES.items():
            if re.fullmatch(pattern, values.get(name, "")):
                return f"these are {cause}"
    with suppress(KeyError, ValueError):  # other columns, or words
        lat, lon = (abs(float(values[name])) for name in ("lat", "lon"))
        if lat <= 180 and lon <= 90:
            return "latitude and longitude seem to be swapped, so swap them"
        if lat > 360 or lon > 360:
            return "these are not degrees, so convert them from the metres of their projection"
    return "correct them"


def _refuse_time_type(where: str, name: str, column: ir.Value) -> None:
    kind = column.type()
    if kind.is_timestamp() and kind.timezone:
        raise MobatlasError(
            f"{where}: column '{name}' has the time zone {kind.timezone}; "
            "convert it to naive local time"
        )
    usable = (kind.is_timestamp(), kind.is_date(), kind.is_string(), kind.is_null())
    if not (any(usable) or kind.is_numeric()):
        shown = "" if kind.is_unknown() else f" (it has the type {kind})"
        raise MobatlasError(
            f"{where}: column '{name}' contains no dates with times{shown}; give local "
            "timestamps, or text in ISO form"
        )


def _as_seconds(column: ir.Value) -> ir.Value:
    kind = column.type()
    if kind.is_string():
        iso = ibis.ifelse(column.re_search(ISO_LOCAL), column, ibis.null("string"))
        column = iso.try_cast("timestamp")
    elif not kind.is_timestamp():
        column = column.cast("timestamp")
    # engines round a fraction of a second differently
    return column.truncate("s").epoch_seconds().cast("int64")


def _has_value(raw: ir.Value) -> ir.Value:
    return _is_true(raw != "") if raw.type().is_string() else raw.notnull()


def _is_true(condition: ir.Value) -> ir.Value:
    return condition.fill_null(False)
