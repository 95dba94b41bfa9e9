"""The door: a source's visits as typed columns; rows that cannot be true are counted, named, refused or dropped."""

from __future__ import annotations

from dataclasses import dataclass

import ibis
from ibis import ir

from mobatlas.config import PrepareConfig
from mobatlas.data.prepare.columns import (
    FALSE_WORDS,
    NO_ANSWER,
    TRUE_WORDS,
    as_flag,
    as_number,
    as_text,
    is_word,
)
from mobatlas.data.prepare.engine import Engine, one
from mobatlas.data.readers.base import Source
from mobatlas.data.schema import VISITS_REQUIRED
from mobatlas.data.vocabulary import SPECIALS
from mobatlas.errors import MobatlasError
from mobatlas.io.tables import require_columns

DAY = 86_400  # seconds
ISO_LOCAL = r"^\d{4}-\d{2}-\d{2}([ T]\d{2}:\d{2}(:\d{2}(\.\d{1,9})?)?)?$"
# Columns as given, to tell what is absent from what is wrong.
RAW = ("raw_arrival", "raw_departure", "raw_lat", "raw_lon", "raw_is_home", "raw_is_work")


@dataclass(frozen=True)
class RowCounts:
    """What became of the rows of the source."""

    rows: int
    missing_coordinates: int
    not_poi: int
    invalid: int


@dataclass(frozen=True)
class _Fault:
    """A way in which a row cannot be true."""

    name: str
    rows: ir.Value  # boolean
    columns: tuple[str, ...]  # shown in the message
    sentence: str


def canonical_visits(source: Source) -> ir.Table:
    """Typed columns; times as seconds of the local clock since 1970, null where the text is not a time."""
    table = source.visits
    require_columns(source.where, table.columns, VISITS_REQUIRED)
    for name in ("arrival", "departure"):
        if name in table.columns:
            _refuse_time_type(source.where, name, table[name])

    def optional(name: str, otherwise: ir.Value) -> ir.Value:
        return table[name] if name in table.columns else otherwise

    departure = optional("departure", ibis.null("timestamp"))
    home, work = (optional(name, ibis.literal(False)) for name in ("is_home", "is_work"))
    return table.select(
        user_id=as_text(table.user_id),
        poi_id=as_text(table.poi_id),
        lat=as_number(table.lat),
        lon=as_number(table.lon),
        category=as_text(optional("category", ibis.null("string"))),
        start=_as_seconds(table.arrival),
        end=_as_seconds(departure),
        home=as_flag(home),
        work=as_flag(work),
        **dict(zip(RAW, (table.arrival, departure, table.lat, table.lon, home, work), strict=True)),
    )


def check_rows(
    visits: ir.Table, source: Source, engine: Engine, config: PrepareConfig
) -> tuple[ir.Table, RowCounts]:
    """Count what is wrong; refuse, or leave only the rows that can be used."""
    faults = _faults(visits, config)
    invalid = faults[0].rows
    for fault in faults[1:]:
        invalid = invalid | fault.rows
    # a row is counted once: as invalid, else as missing, else as no POI
    missing = ~invalid & (visits.lat.isnull() | visits.lon.isnull())
    not_poi = ~invalid & ~missing & visits.poi_id.isnull() & ~visits.home & ~visits.work
    counts = one(
        engine,
        visits.aggregate(
            n=visits.count(),
            n_missing=missing.sum(),
            n_not_poi=not_poi.sum(),
            n_invalid=invalid.sum(),
            **{fault.name: fault.rows.sum() for fault in faults},
        ),
    )
    rows = int(counts["n"])
    if rows == 0:
        raise MobatlasError(f"{source.where}: the table has no rows")
    for fault in faults:
        if counts[fault.name] and config.invalid_rows == "refuse":
            raise MobatlasError(
                _describe(fault, visits, source, engine, int(counts[fault.name]), rows)
            )
    n_missing = int(counts["n_missing"])
    if n_missing > config.max_missing_coordinates * rows:
        raise MobatlasError(
            f"{source.where}: columns 'lat' and 'lon' are missing in {n_missing:,} of {rows:,} rows, more than "
            f"max_missing_coordinates = {config.max_missing_coordinates:g} allows; fill them or raise the limit"
        )
    counted = RowCounts(
        rows, n_missing, int(counts["n_not_poi"] or 0), int(counts["n_invalid"] or 0)
    )
    if not (counted.missing_coordinates or counted.not_poi or counted.invalid):
        return visits.drop(
            *RAW
        ), counted  # asking every row again, in every pass, costs a tenth of a preparation
    return visits.filter(~(missing | not_poi | invalid)).drop(*RAW), counted


def _faults(visits: ir.Table, config: PrepareConfig) -> list[_Fault]:
    unparsed = (visits.start.isnull() & _is_given(visits.raw_arrival)) | (
        visits.end.isnull() & _is_given(visits.raw_departure)
    )
    words = (visits.lat.isnull() & is_word(visits.raw_lat)) | (
        visits.lon.isnull() & is_word(visits.raw_lon)
    )
    times = ("raw_arrival", "raw_departure")
    flags = (*TRUE_WORDS, *FALSE_WORDS, *NO_ANSWER)
    unclear = is_word(visits.raw_is_home, flags) | is_word(visits.raw_is_work, flags)
    reserved = visits.poi_id.isin(SPECIALS).fill_null(False) & ~visits.home & ~visits.work
    return [
        _Fault(
            "no_user",
            visits.user_id.isnull(),
            ("poi_id", "raw_arrival"),
            "column 'user_id' is empty",
        ),
        _Fault(
            "bad_time",
            unparsed,
            times,
            "columns 'arrival' and 'departure' must be local times like 2024-03-04 08:15:00, without a zone, and are not",
        ),
        _Fault(
            "no_time",
            ~_is_given(visits.raw_arrival),
            ("user_id", "poi_id"),
            "column 'arrival' is empty",
        ),
        _Fault(
            "bad_number",
            words,
            ("raw_lat", "raw_lon"),
            "columns 'lat' and 'lon' must be numbers, and are not",
        ),
        _Fault(
            "bad_lat",
            (visits.lat.abs() > 90).fill_null(False),
            ("raw_lat",),
            "column 'lat' is outside -90..90",
        ),
        _Fault(
            "bad_lon",
            (visits.lon.abs() > 180).fill_null(False),
            ("raw_lon",),
            "column 'lon' is outside -180..180",
        ),
        _Fault(
            "bad_flag",
            unclear,
            ("raw_is_home", "raw_is_work"),
            "columns 'is_home' and 'is_work' must be true or false",
        ),
        _Fault(
            "reserved",
            reserved,
            ("poi_id",),
            "column 'poi_id' uses a reserved word; flag the row as is_home or is_work, or rename the place;",
        ),
        _Fault(
            "reversed",
            (visits.end < visits.start).fill_null(False),
            times,
            "column 'departure' is before 'arrival'",
        ),
        _Fault(
            "long_stay",
            (visits.end - visits.start > config.max_stay_days * DAY).fill_null(False),
            times,
            f"the visit lasts longer than max_stay_days = {config.max_stay_days}",
        ),
    ]


def _describe(
    fault: _Fault, visits: ir.Table, source: Source, engine: Engine, count: int, rows: int
) -> str:
    names = dict.fromkeys(("user_id", *fault.columns))
    shown = visits.filter(fault.rows).select(
        **{name.removeprefix("raw_"): visits[name].cast("string") for name in names}
    )
    example = engine.collect(shown.order_by(shown.columns).limit(1)).to_pylist()[0]
    values = ", ".join(f"{name} {value!r}" for name, value in example.items() if value is not None)
    return (
        f"{source.where}: {fault.sentence} in {count:,} of {rows:,} rows (for example {values}); "
        "mend them, or set invalid_rows: drop to leave such rows out"
    )


def _refuse_time_type(where: str, name: str, column: ir.Value) -> None:
    kind = column.type()
    if kind.is_timestamp() and getattr(kind, "timezone", None) not in (None, ""):
        raise MobatlasError(
            f"{where}: column '{name}' carries the time zone {kind.timezone}; convert it to naive local time"
        )
    if not (kind.is_timestamp() or kind.is_date() or kind.is_string() or kind.is_null()):
        raise MobatlasError(
            f"{where}: column '{name}' is of type {kind}; give local timestamps, or text in ISO form"
        )


def _as_seconds(column: ir.Value) -> ir.Value:
    kind = column.type()
    if kind.is_string():
        column = ibis.ifelse(column.re_search(ISO_LOCAL), column, ibis.null("string")).try_cast(
            "timestamp"
        )
    elif not kind.is_timestamp():
        column = column.cast("timestamp")
    return (
        column.truncate("s").epoch_seconds().cast("int64")
    )  # engines round a fraction of a second differently


def _is_given(raw: ir.Value) -> ir.Value:
    return (raw != "").fill_null(False) if raw.type().is_string() else raw.notnull()
