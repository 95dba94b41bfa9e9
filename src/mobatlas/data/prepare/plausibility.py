"""Checks of visits and people that are valid row by row, but improbable together.

The engine counts: one query over all visits, and small ones over people and days. Only a check that
fails asks for an example.
"""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import ibis
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from ibis import ir

from mobatlas.data.prepare.engine import Engine, one
from mobatlas.data.prepare.steps import HOUR
from mobatlas.data.types import DAY, FIRST_POI, Flags, Floats
from mobatlas.errors import MobatlasError

CELL = 2  # degrees
NEAR = 3.0  # degrees
COLUMNS = 1_000  # more than there are cells from west to east
TOWNS = (-57.0, 73.0)  # latitudes beyond which there are none
NIGHT = 3  # o'clock
NOON = 13
# In local time the fewest visits begin between 1 and 7 o'clock; habits differ by less than 4 hours.
QUIET_START = 1
QUIET_HOURS = 6
MAX_SHIFT = 4
MIN_VISITS = 500  # fewer say little about hours
SHORT_ID = re.compile(r"\d{0,5}|\D")  # coincides with other names by chance
WORDS = "words.parquet"
# What may have happened to coordinates; each undoes itself.
MIRRORS: dict[str, Callable[[Floats, Floats], tuple[Floats, Floats]]] = {
    "latitude and longitude are swapped": lambda lat, lon: (lon, lat),
    "the sign of the latitude is flipped": lambda lat, lon: (-lat, lon),
    "the sign of the longitude is flipped": lambda lat, lon: (lat, -lon),
    "both signs are flipped": lambda lat, lon: (-lat, -lon),
}


def _cell(lat: ir.Value, lon: ir.Value) -> ir.Value:
    row, column = ((axis / CELL).floor().cast("int64") for axis in (lat + 90, lon + 180))
    return row * COLUMNS + column


def _centres(cells: pa.Table) -> Floats:
    """Latitudes and longitudes of squares of the map, (2, cells)."""
    row_column = np.stack(np.divmod(cells["cell"].to_numpy(), COLUMNS))
    return np.asarray(CELL * (row_column + 0.5) - [[90], [180]])


def _near(points: tuple[Floats, Floats] | Floats, places: Floats) -> Flags:
    """Whether points (2, points) are near any of the places (2, places)."""
    north, east = (np.abs(points[axis][:, None] - places[axis]) for axis in (0, 1))
    return np.asarray(((north <= NEAR) & (np.minimum(east, 360 - east) <= NEAR)).any(1))


def check_visits(
    visits: ir.Table, users: ir.Table, where: str, engine: Engine
) -> tuple[pa.Table, list[str]]:
    """Rows by cell of the map, and warnings; coordinates that are mostly wrong are refused.

    `visits` are numbers with home flags and departures, `users` maps their numbers to ids.
    """
    keyed = visits.mutate(cell=_cell(visits.lat, visits.lon), hour=visits.start % DAY // HOUR)
    counts = {"rows": keyed.count()}
    for clock in (NIGHT, NOON):
        # how often the clock shows that hour during the visit
        first, last = ((time - clock * HOUR) // DAY for time in (keyed.start - 1, keyed.end))
        counts[f"all_{clock}"] = (last - first).sum()
        counts[f"home_{clock}"] = ibis.ifelse(keyed.home, last - first, 0).sum()
    counted = engine.collect(keyed.group_by("cell", "hour").aggregate(**counts))
    cells = counted.group_by("cell").aggregate([("rows", "sum")]).rename_columns(["cell", "rows"])
    main = _centres(cells)[:, [cells["rows"].to_numpy().argmax()]]  # (2, 1)
    [[lat], [lon]] = main.tolist()
    if not TOWNS[0] < lat < TOWNS[1]:
        raise MobatlasError(
            f"{where}: most visits are near latitude {lat:g} and longitude {lon:g}, where there "
            "are no towns; lat and lon seem to be swapped, or their signs flipped, so correct them"
        )
    rows = visits.join(users.select("user", "user_id"), "user")
    misplaced = _misplaced(cells, main, rows, f"{where}: {{}} visits", engine)
    return cells, [*misplaced, *_shifted_times(where, counted)]


def _misplaced(
    cells: pa.Table, places: Floats, rows: ir.Table, subject: str, engine: Engine
) -> Iterator[str]:
    """Warn of rows that are near the places only in a mirror; refuse them if they are many."""
    centres, counts = _centres(cells), cells["rows"].to_numpy()
    near, total = _near(centres, places), counts.sum()
    for name, mirror in MIRRORS.items():
        found = ~near & _near(mirror(*centres), places)
        n = counts[found].sum()
        # Visits all over the world are near their mirror images by chance.
        if not n or counts[near | found].sum() < 0.8 * total:
            continue
        wrong = rows.filter(
            _cell(rows.lat, rows.lon).isin(cells.filter(pa.array(found))["cell"].to_pylist())
        )
        example = one(
            engine, wrong.select("user_id", "lat", "lon").order_by("user_id", "lat", "lon").limit(1)
        )
        sentence = (
            f"{subject.format(f'{n:,} of {total:,}')} are far from all places of the visits "
            f"(for example user_id '{example['user_id']}', lat {example['lat']:g}, "
            f"lon {example['lon']:g}), as if {name}; correct them"
        )
        if n > 0.05 * total:
            raise MobatlasError(sentence)
        yield sentence


def _shifted_times(where: str, counted: pa.Table) -> Iterator[str]:
    """Warn if the quiet hours are not at night, or few people are at home then."""
    hours = np.bincount(counted["hour"].to_numpy(), counted["rows"].to_numpy(), minlength=24)
    night, home_night, noon, home_noon = (
        counted[f"{name}_{clock}"].to_numpy().sum()
        for clock in (NIGHT, NOON)
        for name in ("all", "home")
    )
    quiet = np.array([np.roll(hours, -hour)[:QUIET_HOURS].sum() for hour in range(24)])
    start = int(quiet.argmin())
    shift, reason = (start - QUIET_START + 12) % 24 - 12, ""
    # Hours show a night if visits are spread over half a day, but not evenly over all of it.
    if quiet[start] < 0.15 * hours.sum() and (hours > 0).sum() > 12 and abs(shift) >= MAX_SHIFT:
        end = (start + QUIET_HOURS) % 24
        reason = f" by {shift:+d} hours: the fewest visits begin between {start}:00 and {end}:00"
    elif min(night, noon) > MIN_VISITS and home_night / night < min(home_noon / noon, 0.5):
        reason = (
            f": of the visits at {NIGHT}:00, {home_night / night:.0%} are at home, and "
            f"{home_noon / noon:.0%} of those at {NOON}:00"
        )
    if reason and hours.sum() >= MIN_VISITS:
        yield f"{where}: times look shifted{reason}; if they are in UTC, convert them to local time"


def check_copies(visits: ir.Table, users: ir.Table, where: str, engine: Engine) -> Iterator[str]:
    """Warn if people have exactly the visits of another person."""
    totals = {name: visits[name].sum() for name in ("start", "poi")}
    people = visits.group_by("user").aggregate(rows=visits.count(), **totals)
    long = people.filter(people.rows >= 5)  # equal short diaries are no surprise
    same = (
        long.group_by(["rows", *totals])
        .aggregate(n=long.count(), one=long.user.min(), other=long.user.max())
        .filter(lambda t: t.n > 1)
    )
    copies = one(engine, same.aggregate(n=(same.n - 1).sum()))["n"] or 0
    everyone = one(engine, users.aggregate(n=users.count()))["n"]
    if copies > 0.02 * everyone:
        pair = one(engine, same.select("one", "other").order_by("one").limit(1))
        ids = users.filter(users.user.isin(pair.values())).order_by("user_id").select("user_id")
        names = engine.collect(ids)["user_id"].to_pylist()
        yield (
            f"{where}: {copies:,.0f} of {everyone:,} people have exactly the visits of "
            f"another person (for example '{names[0]}' and '{names[1]}'); keep each person once"
        )


def check_homes(people: ir.Table, cells: pa.Table, where: str, engine: Engine) -> Iterator[str]:
    """Compare homes and workplaces of people with the places of visits."""
    for name in ("home", "work"):
        rows = people.select("user_id", lat=f"{name}_lat", lon=f"{name}_lon").drop_null()
        keyed = rows.mutate(cell=_cell(rows.lat, rows.lon))
        counted = engine.collect(keyed.group_by("cell").aggregate(rows=keyed.count()))
        subject = f"{where}: the {name} places of {{}} people"
        yield from _misplaced(counted, _centres(cells), rows, subject, engine)


def check_place_names(path: Path, users: ir.Table, engine: Engine) -> Iterator[str]:
    """Warn if places of the vocabulary are named after people: models and samples have the names.

    Short numbers do not count, because ids of people and of places coincide by chance.
    """
    vocabulary = pq.read_table(path, columns=["poi_id", "category"]).slice(FIRST_POI)
    for column in vocabulary.column_names:
        texts = vocabulary[column].fill_null("").to_pylist()
        words = [{text, *re.split(r"[^\w-]+|_", text)} for text in texts]
        distinct = sorted(word for word in set().union(*words) if not SHORT_ID.fullmatch(word))
        pq.write_table(pa.table({"word": pa.array(distinct, pa.string())}), engine.work / WORDS)
        ids = engine.read(engine.work / WORDS)
        found = set(engine.collect(ids.semi_join(users, ids.word == users.user_id))[0].to_pylist())
        rows = [row for row, each in enumerate(words, FIRST_POI + 1) if found & each]
        if rows:
            yield (
                f"{path.name}: column '{column}' has the user_id of a person in {len(rows):,} of "
                f"{len(words):,} places (the first in row {rows[0]:,}); rename these places, "
                "because models and samples contain their names"
            )


def check_days(
    days: ir.Table, users: ir.Table, where: str, window: int, engine: Engine
) -> Iterator[str]:
    """Warn of visits that overlap, and of windows that are longer than the observation."""
    facts = one(
        engine,
        days.aggregate(
            visits=days.visits.sum(),
            overlapping=days.overlapping.sum(),
            span=days.day.max() - days.day.min() + 1,
        ),
    )
    if facts["span"] < window:
        yield (
            f"{where}: the visits cover {facts['span']} days, fewer than a window of {window}; set "
            f"window.days={facts['span']} or less"
        )
    if facts["overlapping"] > 0.2 * facts["visits"]:
        worst = days.join(users.select("user", "user_id"), "user")
        row = one(engine, worst.order_by([worst.overlapping.desc(), "user_id", "day"]).limit(1))
        yield (
            f"{where}: {facts['overlapping'] / facts['visits']:.0%} of the visits begin before an "
            f"earlier visit of the same person ends (for example {row['overlapping']:.0f} of "
            f"{row['visits']} of user_id '{row['user_id']}' on {np.datetime64(row['day'], 'D')}); "
            "correct the departures, or leave out places that contain others"
        )
