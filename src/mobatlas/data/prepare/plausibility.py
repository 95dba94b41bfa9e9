"""Checks of visits and people that are valid row by row, but improbable together.

The engine counts: one query over all visits, and a few over people and days. Only a check that
fails asks for an example.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import ibis
import numpy as np
from ibis import ir

from mobatlas.config import PrepareConfig
from mobatlas.data.arrays import Flags, Floats, Ints
from mobatlas.data.prepare.engine import Engine, one
from mobatlas.data.prepare.steps import HOUR
from mobatlas.data.readers.base import Source
from mobatlas.data.schema import DAY
from mobatlas.errors import MobatlasError

CELL = 2  # degrees
NEAR = 3.0  # degrees
CONCENTRATED = 0.8  # share of the visits in one place, mirrored ones included
REFUSED = 0.05  # share of misplaced rows above which they are an error
POLES = (-57.0, 73.0)  # latitudes beyond which there are no towns
NIGHT = 3  # o'clock
NOON = 13
QUIET_HOURS = 6  # the longest part of the night in which few people leave home or arrive
QUIET_START = 1  # o'clock, in local time
MAX_SHIFT = 4  # hours that habits may differ from that
QUIET_SHARE = 0.15  # of the visits; above that, hours show no night
MIN_VISITS = 500  # fewer say little about hours
MIN_NIGHTS = 100
OVERLAPPING = 0.2  # share of visits
COPIED = 0.02  # share of people
MIN_COPIED = 5  # visits that two people must share
# What may have happened to a coordinate; each undoes itself.
MIRRORS: dict[str, Callable[[Floats, Floats], tuple[Floats, Floats]]] = {
    "with latitude and longitude swapped": lambda lat, lon: (lon, lat),
    "with the sign of the latitude flipped": lambda lat, lon: (-lat, lon),
    "with the sign of the longitude flipped": lambda lat, lon: (lat, -lon),
    "with both signs flipped": lambda lat, lon: (-lat, -lon),
}


@dataclass(frozen=True)
class Cells:
    """Numbers of rows by square of the map."""

    lat: Floats  # (cells,) centres
    lon: Floats
    rows: Ints
    key: Ints

    @property
    def main(self) -> Floats:
        """The centre of the square with most rows, (1, 2)."""
        best = int(np.argmax(self.rows))
        return np.array([[self.lat[best], self.lon[best]]])

    def near(self, lat: Floats, lon: Floats, places: Floats) -> Flags:
        """Whether points (cells,) are near any of the places (places, 2)."""
        north = np.abs(lat[:, None] - places[:, 0])  # (cells, places)
        east = np.abs(lon[:, None] - places[:, 1])
        return ((north <= NEAR) & (np.minimum(east, 360 - east) <= NEAR)).any(1)

    def mirrored(self, places: Floats) -> Iterator[tuple[str, Flags]]:
        """For each mirror, the cells that are near the places only in the mirror."""
        far = ~self.near(self.lat, self.lon, places)
        for name, mirror in MIRRORS.items():
            found = far & self.near(*mirror(self.lat, self.lon), places)
            if found.any():
                far &= ~found
                yield name, found


def cell_of(lat: ir.Value, lon: ir.Value) -> ir.Value:
    """The number of the square of the map."""
    row, column = ((axis / CELL).floor().cast("int64") for axis in (lat + 90, lon + 180))
    return row * 1_000 + column


def _cells(key: Ints, rows: Ints) -> Cells:
    distinct, position = np.unique(key, return_inverse=True)
    row, column = np.divmod(distinct, 1_000)
    lat, lon = (CELL * (part + 0.5) - limit for part, limit in ((row, 90), (column, 180)))
    return Cells(lat, lon, np.bincount(position, rows).astype(np.int64), distinct)


def check_visits(
    visits: ir.Table, users: ir.Table, source: Source, engine: Engine
) -> tuple[Cells, list[str]]:
    """Where the visits are, and warnings; coordinates that are mostly wrong are refused.

    `visits` are numbers with home flags and departures, `users` maps their numbers to ids.
    """
    keys = {"cell": cell_of(visits.lat, visits.lon), "hour": visits.start % DAY // HOUR}
    keyed = visits.mutate(**keys)
    counts = {"rows": keyed.count()}
    for clock in (NIGHT, NOON):
        since = clock * HOUR
        # how often the clock shows that hour during the visit
        times = (keyed.end - since) // DAY - (keyed.start - 1 - since) // DAY
        counts[f"all_{clock}"] = times.sum()
        counts[f"home_{clock}"] = ibis.ifelse(keyed.home, times, 0).sum()
    counted = engine.collect(keyed.group_by(list(keys)).aggregate(**counts))
    facts = {name: counted[name].to_numpy() for name in (*keys, *counts)}
    cells = _cells(facts["cell"], facts["rows"])

    def example(wrong: ir.Value) -> str:
        found = visits.filter(wrong).join(users.select("user", "user_id"), "user")
        row = found.select("user_id", "lat", "lon").order_by(["user_id", "lat", "lon"]).limit(1)
        return _shown(one(engine, row))

    place = cell_of(visits.lat, visits.lon)
    _refuse_polar(source.where, cells)
    warnings = []
    for name, found in cells.mirrored(cells.main):
        together = found | cells.near(cells.lat, cells.lon, cells.main)
        if cells.rows[together].sum() >= CONCENTRATED * cells.rows.sum():
            where = example(place.isin(cells.key[found].tolist()))
            warnings += _misplaced(source.where, "visits", name, found, cells, where)
    zero = (visits.lat == 0) & (visits.lon == 0)
    at_zero = cells.near(cells.lat, cells.lon, np.zeros((1, 2)))
    if at_zero.any() and not cells.near(*cells.main.T, np.zeros((1, 2))).any():
        n = int(one(engine, visits.aggregate(n=zero.sum()))["n"] or 0)
        if n:
            warnings.append(
                f"{source.where}: {n:,} visits are at latitude 0 and longitude 0, which often "
                f"stand for an unknown place ({example(zero)}); leave such coordinates empty"
            )
    hours = np.bincount(facts["hour"], facts["rows"], minlength=24)
    passed = {name: int(facts[name].sum()) for name in counts}
    return cells, [*warnings, *_shifted_times(source.where, hours, passed)]


def _shown(row: dict[str, object]) -> str:
    return "for example " + ", ".join(f"{name} {value!r}" for name, value in row.items())


def _refuse_polar(where: str, cells: Cells) -> None:
    """Refuse visits that are mostly where there are no towns."""
    south, north = POLES
    outside = (cells.lat < south) | (cells.lat > north)
    if cells.rows[outside].sum() > cells.rows.sum() / 2:
        [(lat, lon)] = cells.main.tolist()
        raise MobatlasError(
            f"{where}: most visits are near latitude {lat:g} and longitude {lon:g}, where there "
            "are no towns; columns 'lat' and 'lon' seem to be swapped, or their signs flipped"
        )


def _misplaced(
    where: str, rows: str, mirror: str, found: Flags, cells: Cells, example: str
) -> list[str]:
    n = int(cells.rows[found].sum())
    total = int(cells.rows.sum())
    sentence = (
        f"{where}: {n:,} of {total:,} {rows} are far from all others, but near them {mirror} "
        f"({example}); correct them"
    )
    if n > REFUSED * total:
        raise MobatlasError(sentence)
    return [sentence]


def _shifted_times(where: str, hours: Floats, passed: dict[str, int]) -> Iterator[str]:
    """Warn if the quiet hours are not at night, or few people are at home then."""
    advice = "are they in UTC? Convert arrival and departure to local time"
    quiet = np.array([np.roll(hours, -hour)[:QUIET_HOURS].sum() for hour in range(24)])
    start = int(quiet.argmin())
    shift = (start - QUIET_START + 12) % 24 - 12
    is_clear = quiet[start] < QUIET_SHARE * hours.sum() and (hours > 0).sum() > 12
    if hours.sum() >= MIN_VISITS and is_clear and abs(shift) >= MAX_SHIFT:
        yield (
            f"{where}: times look shifted by about {shift:+d} hours, because the fewest visits "
            f"begin between {start}:00 and {(start + QUIET_HOURS) % 24}:00; {advice}"
        )
        return
    if min(passed[f"all_{NIGHT}"], passed[f"all_{NOON}"]) < MIN_NIGHTS:
        return
    night, noon = (passed[f"home_{clock}"] / passed[f"all_{clock}"] for clock in (NIGHT, NOON))
    if night < min(noon, 0.5):
        yield (
            f"{where}: times look shifted, because {night:.0%} of the visits at {NIGHT}:00 and "
            f"{noon:.0%} of those at {NOON}:00 are at home; {advice}"
        )


def copied_people(visits: ir.Table, users: ir.Table, source: Source, engine: Engine) -> list[str]:
    """Warn of people who have exactly the visits of another person."""
    totals = {name: visits[name].sum() for name in ("start", "end", "poi")}
    people = visits.group_by("user").aggregate(rows=visits.count(), **totals)
    long = people.filter(people.rows >= MIN_COPIED)
    same = long.group_by(["rows", *totals]).aggregate(
        n=lambda t: t.count(), first=lambda t: t.user.min(), last=lambda t: t.user.max()
    )
    repeated = same.filter(same.n > 1)
    copies = one(engine, repeated.aggregate(n=(repeated.n - 1).sum()))["n"] or 0
    everyone = one(engine, users.aggregate(n=users.count()))["n"]
    if copies <= COPIED * everyone:
        return []
    row = one(engine, repeated.order_by("first").limit(1))
    ids = users.filter(users.user.isin([row["first"], row["last"]])).order_by("user")
    names = engine.collect(ids.select("user_id"))["user_id"].to_pylist()
    return [
        f"{source.where}: {copies:,} of {everyone:,} people have exactly the visits of "
        f"another person (for example '{names[0]}' and '{names[1]}'); keep each person once"
    ]


def check_homes(people: ir.Table, cells: Cells, where: str, engine: Engine) -> list[str]:
    """Compare homes and workplaces of people with the places of visits."""
    warnings = []
    visited = np.column_stack([cells.lat, cells.lon])
    for name in ("home", "work"):
        lat, lon = people[f"{name}_lat"], people[f"{name}_lon"]
        known = people.mutate(cell=cell_of(lat, lon), lat=lat, lon=lon).filter(
            lat.notnull() & lon.notnull()
        )
        counted = engine.collect(known.group_by("cell").aggregate(rows=known.count()))
        if not counted.num_rows:
            continue
        places = _cells(counted["cell"].to_numpy(), counted["rows"].to_numpy())
        for mirror, found in places.mirrored(visited):
            wrong = known.filter(known.cell.isin(places.key[found].tolist()))
            row = wrong.select("user_id", f"{name}_lat", f"{name}_lon").order_by("user_id")
            example = _shown(one(engine, row.limit(1)))
            warnings += _misplaced(where, f"{name}s", mirror, found, places, example)
    return warnings


def check_days(days: ir.Table, users: ir.Table, config: PrepareConfig, engine: Engine) -> list[str]:
    """Warn of visits that overlap, and of windows that are longer than the observation."""
    facts = one(
        engine,
        days.aggregate(
            visits=days.visits.sum(),
            overlapping=days.overlapping.sum(),
            first=days.day.min(),
            last=days.day.max(),
        ),
    )
    warnings = []
    span = facts["last"] - facts["first"] + 1
    if span < config.window.days:
        warnings.append(
            f"the visits cover {span} days, fewer than a window of {config.window.days}; "
            f"set window.days={span} and window.stride={span}, or less"
        )
    if facts["overlapping"] > OVERLAPPING * facts["visits"]:
        worst = days.join(users.select("user", "user_id"), "user")
        row = one(engine, worst.order_by([worst.overlapping.desc(), worst.user_id]).limit(1))
        when = np.datetime64(int(row["day"]), "D")
        warnings.append(
            f"{facts['overlapping'] / facts['visits']:.0%} of the visits begin before an earlier "
            f"visit of the same person ends (for example {row['overlapping']} of "
            f"{row['visits']} visits of '{row['user_id']}' on {when}); correct the departures, or "
            "leave out places that contain others"
        )
    return warnings
