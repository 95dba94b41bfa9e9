"""The days of the people of the simulated city: when they go out, where to, and the visits that follow.

Where to is exploration and preferential return (Song et al. 2010). The hour decides the category; a person who knows S
places then looks around with probability rho * S^-gamma, and else goes back to where a uniformly drawn earlier visit of
that category went, which is preferential return.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mobatlas.config import CityConfig
from mobatlas.data.city.behaviour import (
    ACTIVITY_SPREAD,
    ATTENDANCE,
    MIDDAY,
    SLOTS,
    WORK_BY_WEEKDAY,
    Behaviour,
    decay,
    slot_rates,
    weekdays,
)
from mobatlas.data.city.places import CATEGORIES, Floats, Ints, Places, scatter

Draws = NDArray[np.float32]

HOME, WORK = -1, -2  # places that are no POI
RHO, GAMMA = 0.6, 0.21
DAY, HOUR, MINUTE = 86_400, 3_600, 60
SETTING_OUT, SECONDS_PER_KM = 4 * MINUTE, 144  # 25 km/h
SHORTEST_STAY, SHORTEST_HOME = 5 * MINUTE, 25 * MINUTE
WORK_HOURS = (8.7, 17.0)

# The slots of a day in order: the five of the rhythm, and work before and after a midday outing.
MORNING_WORK, AFTERNOON_WORK = 1, 3
OUTINGS = np.array([0, 2, 4, 5, 6])
DAY_SLOTS = 7


@dataclass(frozen=True)
class People:
    """Who lives in the city; a slice of people is people."""

    group: Ints  # (people,)
    district: Ints  # (people,)
    home_cell: Ints  # (people,)
    work_cell: Ints  # (people,)
    employed: NDArray[np.bool_]  # (people,) whether the work cell and position mean anything
    home: Floats  # (people, 2)
    work: Floats  # (people, 2)
    activity: Floats  # (people,) factor on the rate of outings
    attendance: Floats  # (people,) chance of going to work on a weekday

    def __len__(self) -> int:
        return len(self.group)

    def part(self, rows: slice) -> People:
        """Some of the people."""
        return People(**{name: column[rows] for name, column in vars(self).items()})


class Rows(NamedTuple):
    """Visits of some people, ordered by person and time."""

    person: Ints
    place: Ints  # a POI, HOME or WORK
    arrival: Ints  # seconds since the first midnight
    departure: Ints


class Outings(NamedTuple):
    """What people intend to do, ordered by person and time."""

    person: Ints
    slot: Ints
    category: Ints  # nonsense where the outing is to work
    candidate: Ints  # the POI that is visited if the person explores
    start: Ints  # seconds since the first midnight
    end: Ints


class Steps(NamedTuple):
    """What became of the outings."""

    place: Ints
    arrival: Ints
    departure: Ints
    home_from: Ints  # a stay at home before the outing, if there was time for one
    home_until: Ints
    last_home: Ints  # (people,) when everybody is home at last

    @property
    def via_home(self) -> NDArray[np.bool_]:
        return np.asarray(self.home_until - self.home_from >= SHORTEST_HOME)


def draw_people(
    config: CityConfig, places: Places, behaviour: Behaviour, rng: np.random.Generator
) -> People:
    """Who lives where, works where, and how active they are."""
    district = rng.choice(config.districts, config.users, p=places.district_sizes)
    group = _pick(places.composition, district, rng)
    home_cell = _pick(places.home_cells, district, rng)
    work_cell = _pick(places.work_cells, home_cell, rng)
    spread = rng.lognormal(-(ACTIVITY_SPREAD**2) / 2, ACTIVITY_SPREAD, config.users)
    return People(
        group=group,
        district=district,
        home_cell=home_cell,
        work_cell=work_cell,
        employed=rng.random(config.users) < behaviour.habits.employed[group],
        home=scatter(places.cells[home_cell], rng),
        work=scatter(places.cells[work_cell], rng),
        activity=spread * config.activity * behaviour.habits.activity[group],
        attendance=rng.beta(*ATTENDANCE, config.users),
    )


class Tables:
    """Per group, which POI a person explores from an origin cell in a category, as one ascending array.

    The POIs of category c seen from cell o fill the interval [k, k + 1) with k = o * categories + c, so that one search
    over the whole array samples for all people at once.
    """

    KEEP_BYTES = 300_000_000  # beyond it tables are rebuilt for every chunk of people

    def __init__(self, places: Places, behaviour: Behaviour) -> None:
        self.places, self.behaviour = places, behaviour
        size = behaviour.tilt.size * len(places.cells) * 8
        self.kept: dict[int, Floats] | None = {} if size <= self.KEEP_BYTES else None

    def explore(self, group: int, cells: Ints, categories: Ints, rng: np.random.Generator) -> Ints:
        """A POI for each origin cell and category."""
        bounds = self.places.category_bounds
        at = cells * len(CATEGORIES) + categories + rng.random(len(cells))
        found = np.searchsorted(self._table(group), at, side="right") % len(self.places.pois)
        # Rounding may end an interval a hair early.
        return np.clip(found, bounds[categories], bounds[categories + 1] - 1)

    def _table(self, group: int) -> Floats:
        if self.kept is not None and group in self.kept:
            return self.kept[group]
        starts = self.places.category_bounds[:-1]
        weights = decay(self.places, self.behaviour.habits.range_km[group])  # (cells, pois)
        weights *= self.places.popularity * self.behaviour.tilt[group]
        totals = np.add.reduceat(weights, starts, 1)  # (cells, categories)
        weights /= totals[:, self.places.category]
        table = weights.ravel().cumsum()
        if self.kept is not None:
            self.kept[group] = table
        return table


def live(config: CityConfig, people: People, tables: Tables, rng: np.random.Generator) -> Rows:
    """All visits of some people."""
    outings = _intend(config, people, tables, rng)
    steps = _carry_out(people, outings, tables.places, rng)
    rows = _interleave(outings.person, steps, config.days * DAY)
    return _silence(config, rows, len(people), rng)


def _pick(table: Floats, rows: Ints, rng: np.random.Generator) -> Ints:
    """A column for each of the rows named, with the probabilities of that row."""
    # Row r fills the interval [r, r + 1) of one ascending array.
    found = np.searchsorted(table.ravel().cumsum(), rows + rng.random(len(rows)), side="right")
    return np.clip(found - rows * table.shape[1], 0, table.shape[1] - 1)


def _intend(
    config: CityConfig, people: People, tables: Tables, rng: np.random.Generator
) -> Outings:
    """Draw the outings of all days at once."""
    weekday = weekdays(config)  # (days,)
    shape = (len(people), config.days)
    attends = people.attendance[:, None] * people.employed[:, None] * WORK_BY_WEEKDAY[weekday]
    at_work = rng.random(shape, np.float32) < attends  # (people, days)
    chance = 1 - np.exp(
        -people.activity[:, None, None, None] * slot_rates()
    )  # (people, 2, 7, slots)
    chance_today = chance[
        np.arange(len(people))[:, None], at_work.astype(np.int64), weekday
    ]  # (people, days, slots)
    going = np.zeros((*shape, DAY_SLOTS), bool)
    going[..., OUTINGS] = rng.random(chance_today.shape, np.float32) < chance_today
    going[..., MORNING_WORK] = at_work
    going[..., AFTERNOON_WORK] = at_work & going[..., OUTINGS[MIDDAY]]

    person, day, slot = (axis.astype(np.int64) for axis in np.nonzero(going))
    workday = at_work[person, day].astype(np.int64)
    start, end = _times(day, slot, workday, rng)
    category, candidate = _candidates(people, person, slot, workday, tables, rng)
    return Outings(person, slot, category, candidate, start, end)


def _times(day: Ints, slot: Ints, workday: Ints, rng: np.random.Generator) -> tuple[Ints, Ints]:
    """When each outing is meant to start and end."""
    outing = np.full(DAY_SLOTS, -1)
    outing[OUTINGS] = np.arange(len(OUTINGS))
    mean, spread, stay = (
        np.array(
            [[getattr(SLOTS[kind][s], name) if s >= 0 else 0 for s in outing] for kind in (0, 1)]
        )
        for name in ("hour", "spread", "stay")
    )  # (2, day slots) each
    noise = rng.standard_normal((2, len(slot)))
    start = mean[workday, slot] + spread[workday, slot] * noise[0]
    end = start + stay[workday, slot] * np.exp(0.5 * noise[1]) / 60

    at_work = (slot == MORNING_WORK) | (slot == AFTERNOON_WORK)
    start[at_work] = WORK_HOURS[0] + 0.6 * noise[0, at_work]
    end[at_work] = WORK_HOURS[1] + 0.7 * noise[1, at_work]
    # A midday outing is always between the two halves of work, so its neighbours are known.
    midday = np.flatnonzero((slot == OUTINGS[MIDDAY]) & (workday == 1))
    end[midday - 1] = start[midday] - 1 / 6
    start[midday + 1] = end[midday] + 1 / 6

    seconds = (day * DAY + np.round(start * HOUR)).astype(np.int64)
    until = (day * DAY + np.round(end * HOUR)).astype(np.int64)
    return seconds, np.maximum(until, seconds + SHORTEST_STAY)


def _candidates(
    people: People,
    person: Ints,
    slot: Ints,
    workday: Ints,
    tables: Tables,
    rng: np.random.Generator,
) -> tuple[Ints, Ints]:
    """The category of each outing, and the POI that it leads to if the person explores."""
    category = np.zeros(len(person), np.int64)
    candidate = np.zeros(len(person), np.int64)
    to_poi = np.flatnonzero((slot != MORNING_WORK) & (slot != AFTERNOON_WORK))
    group = people.group[person[to_poi]]
    by_group = to_poi[np.argsort(group, kind="stable")]
    ends = np.cumsum(np.bincount(group, minlength=len(tables.behaviour.tilt)))
    for index, at in enumerate(np.split(by_group, ends[:-1])):
        if len(at) == 0:
            continue
        which = np.searchsorted(OUTINGS, slot[at])
        appetite = tables.behaviour.appetite[index].reshape(
            -1, len(CATEGORIES)
        )  # (2 * slots, categories)
        category[at] = _pick(appetite, workday[at] * len(OUTINGS) + which, rng)
        from_work = (workday[at] == 1) & (which == MIDDAY)
        cells = np.where(from_work, people.work_cell[person[at]], people.home_cell[person[at]])
        candidate[at] = tables.explore(index, cells, category[at], rng)
    return category, candidate


def _carry_out(people: People, outings: Outings, places: Places, rng: np.random.Generator) -> Steps:
    """Step everybody through their outings together: choose the place, travel there, go home in between if it pays."""
    count = np.bincount(outings.person, minlength=len(people))  # (people,)
    # The busiest first, so that those who still have an outing are always the first ones.
    busiest = np.argsort(-count, kind="stable")
    first = (np.cumsum(count) - count)[busiest]
    remaining = np.searchsorted(
        -count[busiest], -np.arange(1, count.max(initial=0) + 1), side="right"
    )

    memory = _Memory(outings, len(people), len(places.pois))
    explores, recalls = rng.random((2, len(outings.person)), np.float32)
    home, work = people.home[busiest], people.work[busiest]  # (people, 2)
    here = home.copy()  # (people, 2)
    left = np.full(
        len(people), -SETTING_OUT
    )  # (people,) so that the first stay at home begins at midnight
    to_work = (outings.slot == MORNING_WORK) | (outings.slot == AFTERNOON_WORK)

    place = np.empty(len(to_work), np.int64)
    arrival, departure = np.empty((2, len(to_work)), np.int64)
    home_from, home_until = np.empty((2, len(to_work)), np.int64)
    for step, active in enumerate(remaining):
        at = first[:active] + step  # (active,) outings, one a person
        poi = memory.choose(busiest[:active], at, explores[at], recalls[at], ~to_work[at])
        place[at] = np.where(to_work[at], WORK, poi)
        there = np.where(to_work[at, None], work[:active], places.pois[poi])
        home_from[at] = left[:active] + _travel(here[:active], home[:active])
        home_until[at] = outings.start[at] - _travel(home[:active], there)
        straight = np.maximum(outings.start[at], left[:active] + _travel(here[:active], there))
        via_home = home_until[at] - home_from[at] >= SHORTEST_HOME
        arrival[at] = np.where(via_home, outings.start[at], straight)
        # Who is late stays shorter, so that delays do not add up over the day.
        departure[at] = np.maximum(outings.end[at], arrival[at] + SHORTEST_STAY)
        left[:active] = departure[at]
        here[:active] = there

    last_home = np.empty(len(people), np.int64)
    last_home[busiest] = left + _travel(here, home)
    return Steps(place, arrival, departure, home_from, home_until, last_home)


class _Memory:
    """Which POIs people have been to, by category."""

    def __init__(self, outings: Outings, people: int, pois: int) -> None:
        self.category, self.candidate = outings.category, outings.candidate
        key = outings.person * len(CATEGORIES) + outings.category
        capacity = np.bincount(key, minlength=people * len(CATEGORIES))
        self.first = np.cumsum(capacity) - capacity  # (people * categories,)
        self.seen = np.zeros_like(capacity)
        self.visits = np.zeros(len(key), np.int64)  # in the order of person, category, time
        self.known = np.zeros((people, pois // 8 + 1), np.uint8)  # one bit a POI
        self.places = np.zeros(
            people, np.int64
        )  # S of the paper on exploration and preferential return

    def choose(
        self, people: Ints, at: Ints, explores: Draws, recalls: Draws, counts: NDArray[np.bool_]
    ) -> Ints:
        """The POI of one outing of each person, remembered where it counts."""
        key = people * len(CATEGORIES) + self.category[at]
        seen, first = self.seen[key], self.first[key]
        new = (seen == 0) | (explores < RHO * np.maximum(self.places[people], 1) ** -GAMMA)
        earlier = np.minimum((recalls * seen).astype(np.int64), np.maximum(seen - 1, 0))
        poi = np.where(new, self.candidate[at], self.visits[first + earlier])
        who, what, where = people[counts], poi[counts], (first + seen)[counts]
        self.visits[where] = what
        self.seen[key[counts]] += 1
        bit = (1 << (what & 7)).astype(np.uint8)
        self.places[who] += (self.known[who, what >> 3] & bit) == 0
        self.known[who, what >> 3] |= bit
        return poi


def _travel(origin: Floats, destination: Floats) -> Ints:
    km = np.hypot(origin[:, 0] - destination[:, 0], origin[:, 1] - destination[:, 1])
    return np.asarray(SETTING_OUT + np.ceil(km * SECONDS_PER_KM), np.int64)


def _interleave(person: Ints, steps: Steps, horizon: int) -> Rows:
    """Outings, the stays at home before them, and everybody's last stay at home, in order and within the horizon."""
    people, via_home = len(steps.last_home), steps.via_home
    row = (
        np.cumsum(1 + via_home) - 1 + person
    )  # (outings,) every earlier person also has a last stay at home
    before = row[via_home] - 1
    rows_each = (
        np.bincount(person, minlength=people) + np.bincount(person[via_home], minlength=people) + 1
    )
    last = np.cumsum(rows_each) - 1  # (people,)
    who = np.repeat(np.arange(people), rows_each)
    where, since, until = np.full((3, len(who)), HOME)
    where[row] = steps.place
    since[row], since[before], since[last] = (
        steps.arrival,
        steps.home_from[via_home],
        steps.last_home,
    )
    until[row], until[before], until[last] = steps.departure, steps.home_until[via_home], horizon
    kept = since < horizon
    return Rows(who[kept], where[kept], since[kept], np.minimum(until, horizon)[kept])


def _silence(config: CityConfig, rows: Rows, people: int, rng: np.random.Generator) -> Rows:
    """Remove what begins on a silent day, and cut what would last into one."""
    silent = rng.random((people, config.days), np.float32) < config.dropout
    upcoming = np.where(silent, np.arange(config.days), config.days)
    upcoming = np.minimum.accumulate(upcoming[:, ::-1], 1)[
        :, ::-1
    ]  # (people, days) the first silent day from here on
    end = upcoming[rows.person, rows.arrival // DAY] * DAY
    heard = end > rows.arrival
    cut = rows._replace(departure=np.minimum(rows.departure, end))
    return Rows(*(column[heard] for column in cut))
