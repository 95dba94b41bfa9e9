"""From a configuration and a seed to the three canonical tables of a city, in chunks of people.

People make outings, whose destinations follow exploration and preferential return (Song et al.
2010). The hour decides the category. A person who knows S places explores with probability
rho * S^-gamma. Otherwise the person returns to the place of a uniformly drawn earlier visit of that
category.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from mobatlas.config import CityConfig
from mobatlas.data.city.behaviour import (
    ACTIVITY_SPREAD,
    ATTENDANCE,
    CATEGORIES,
    MIDDAY,
    SLOTS,
    WORK_BY_WEEKDAY,
    Behaviour,
    Places,
    build_behaviour,
    build_places,
    coordinates,
    decay,
    mean_pairwise_jsd,
    scatter,
    slot_rates,
    weekdays,
)
from mobatlas.data.types import ANCHORS, DAY, Flags, Floats, Ints
from mobatlas.errors import MobatlasError
from mobatlas.groups import Groups
from mobatlas.io.manifest import write_parquet
from mobatlas.io.output import new_folder
from mobatlas.progress import SILENT, Tracker

Draws = NDArray[np.float32]

HOME = -1  # places that are not POIs
WORK = -2
RHO = 0.6
GAMMA = 0.21
HOUR = 3_600
TRIP_START = 240  # seconds at the start of a trip without movement
SECONDS_PER_KM = 144  # 25 km/h
MIN_STAY = 300  # seconds
MIN_HOME_STAY = 1_500
WORK_HOURS = (8.7, 17.0)

# The slots of a day in order: five outings, and work before and after the midday outing.
MORNING_WORK = 1
AFTERNOON_WORK = 3
OUTINGS = np.array([0, 2, 4, 5, 6])
DAY_SLOTS = 7
# Chunks depend on the configuration only, and so do the random numbers of their people.
CHUNK_PEOPLE = 8_192
CHUNK_SLOTS = 3_000_000
MAX_PAIRS_BY_POIS = 10**9  # cost of comparing all pairs of groups

VISITS_SCHEMA = pa.schema(
    [
        ("user_id", pa.string()),
        ("poi_id", pa.string()),
        ("lat", pa.float64()),
        ("lon", pa.float64()),
        ("category", pa.string()),
        ("arrival", pa.timestamp("us")),
        ("departure", pa.timestamp("us")),
        ("is_home", pa.bool_()),
        ("is_work", pa.bool_()),
    ]
)


@dataclass(frozen=True)
class People:
    """The people of the city."""

    group: Ints  # (people,)
    district: Ints  # (people,)
    home_cell: Ints  # (people,)
    work_cell: Ints  # (people,)
    employed: Flags  # (people,) only then are work cell and position valid
    home: Floats  # (people, 2)
    work: Floats  # (people, 2)
    activity: Floats  # (people,) factor on the rate of outings
    attendance: Floats  # (people,) chance of going to work on a weekday

    def __len__(self) -> int:
        return len(self.group)

    def part(self, rows: slice) -> Self:
        """A slice of the people."""
        return type(self)(**{name: column[rows] for name, column in vars(self).items()})


class Rows(NamedTuple):
    """Visits of some people, ordered by person and time."""

    person: Ints
    place: Ints  # a POI, HOME or WORK
    arrival: Ints  # seconds since the first midnight
    departure: Ints


class Outings(NamedTuple):
    """Planned outings, ordered by person and time."""

    person: Ints
    slot: Ints
    category: Ints  # undefined for outings to work
    candidate: Ints  # the POI to visit if the person explores
    start: Ints  # seconds since the first midnight
    end: Ints


class Steps(NamedTuple):
    """The outings as they happen."""

    place: Ints
    arrival: Ints
    departure: Ints
    home_from: Ints  # a stay at home before the outing, if there was time for one
    home_until: Ints
    last_home: Ints  # (people,) when each person is home for the last time


def draw_people(
    config: CityConfig, places: Places, behaviour: Behaviour, rng: np.random.Generator
) -> People:
    """Draw group, home, work and activity of every person."""
    district = rng.choice(config.districts, config.users, p=places.district_sizes)
    group = _pick(places.composition, district, rng)
    home_cell = _pick(places.home_cells, district, rng)
    work_cell = _pick(places.work_cells, home_cell, rng)
    activity = rng.lognormal(-(ACTIVITY_SPREAD**2) / 2, ACTIVITY_SPREAD, config.users)
    return People(
        group=group,
        district=district,
        home_cell=home_cell,
        work_cell=work_cell,
        employed=rng.random(config.users) < behaviour.habits.employed[group],
        home=scatter(places.cells[home_cell], rng),
        work=scatter(places.cells[work_cell], rng),
        activity=activity * config.activity * behaviour.habits.activity[group],
        attendance=rng.beta(*ATTENDANCE, config.users),
    )


class Tables:
    """Per group, which POI a person explores from an origin cell in a category.

    The POIs of category c seen from cell o fill the interval [k, k + 1) of one ascending array,
    with k = o * categories + c. One search then samples for all people at once.
    """

    CACHE_BYTES = 300_000_000  # larger tables are rebuilt for every chunk of people

    def __init__(self, places: Places, behaviour: Behaviour) -> None:
        self.places = places
        self.behaviour = behaviour
        self.cache: dict[int, Floats] = {}

    def explore(self, group: int, cells: Ints, categories: Ints, rng: np.random.Generator) -> Ints:
        """A POI for each origin cell and category."""
        bounds = self.places.category_bounds
        at = cells * len(CATEGORIES) + categories + rng.random(len(cells))
        pois = np.searchsorted(self._table(group), at, side="right") % len(self.places.pois)
        # Rounding may end an interval slightly early.
        return np.clip(pois, bounds[categories], bounds[categories + 1] - 1)

    def _table(self, group: int) -> Floats:
        if group in self.cache:
            return self.cache[group]
        weights = decay(self.places, self.behaviour.habits.range_km[group])  # (cells, pois)
        weights *= self.places.popularity * self.behaviour.tilt[group]
        totals = np.add.reduceat(weights, self.places.category_bounds[:-1], 1)
        weights /= totals[:, self.places.category]  # (cells, categories) to (cells, pois)
        table = weights.ravel().cumsum()
        if table.nbytes * len(self.behaviour.tilt) <= self.CACHE_BYTES:
            self.cache[group] = table
        return table


def simulate_days(
    config: CityConfig, people: People, tables: Tables, rng: np.random.Generator
) -> Rows:
    """All visits of some people."""
    outings = _plan_outings(config, people, tables, rng)
    steps = _carry_out(people, outings, tables.places, rng)
    rows = _add_home_stays(outings.person, steps, config.days * DAY)
    return _drop_unobserved_days(config, rows, len(people), rng)


def _pick(table: Floats, rows: Ints, rng: np.random.Generator) -> Ints:
    """Draw a column for each of these rows of probabilities."""
    # Row r fills the interval [r, r + 1) of one ascending array.
    cells = np.searchsorted(table.ravel().cumsum(), rows + rng.random(len(rows)), side="right")
    return np.clip(cells - rows * table.shape[1], 0, table.shape[1] - 1)


def _is_work(slot: Ints) -> Flags:
    return (slot == MORNING_WORK) | (slot == AFTERNOON_WORK)


def _plan_outings(
    config: CityConfig, people: People, tables: Tables, rng: np.random.Generator
) -> Outings:
    """Draw the outings of all days at once."""
    weekday = weekdays(config)  # (days,)
    shape = (len(people), config.days)
    attends = people.attendance[:, None] * people.employed[:, None] * WORK_BY_WEEKDAY[weekday]
    at_work = rng.random(shape, np.float32) < attends  # (people, days)
    chance = 1 - np.exp(-people.activity[:, None, None, None] * slot_rates())
    everyone = np.arange(len(people))[:, None]
    chance_today = chance[everyone, at_work.astype(np.int64), weekday]  # (people, days, slots)
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
    """Planned start and end of each outing, in seconds."""
    settings = np.zeros((len(SLOTS), DAY_SLOTS, 3))
    settings[:, OUTINGS] = [[(s.hour, s.spread, s.stay) for s in slots] for slots in SLOTS]
    hour, spread, stay = settings[workday, slot].T  # (outings,) each
    noise = rng.standard_normal((2, len(slot)))
    start = hour + spread * noise[0]
    end = start + stay * np.exp(0.5 * noise[1]) / 60

    at_work = _is_work(slot)
    start[at_work] = WORK_HOURS[0] + 0.6 * noise[0, at_work]
    end[at_work] = WORK_HOURS[1] + 0.7 * noise[1, at_work]
    # A midday outing is between the two halves of work, so its neighbours are work.
    midday = np.flatnonzero((slot == OUTINGS[MIDDAY]) & (workday == 1))
    end[midday - 1] = start[midday] - 1 / 6
    start[midday + 1] = end[midday] + 1 / 6

    seconds = (day * DAY + np.round(start * HOUR)).astype(np.int64)
    until = (day * DAY + np.round(end * HOUR)).astype(np.int64)
    return seconds, np.maximum(until, seconds + MIN_STAY)


def _candidates(
    people: People,
    person: Ints,
    slot: Ints,
    workday: Ints,
    tables: Tables,
    rng: np.random.Generator,
) -> tuple[Ints, Ints]:
    """The category of each outing, and the POI to visit if the person explores."""
    category, candidate = np.zeros((2, len(person)), np.int64)
    to_poi = np.flatnonzero(~_is_work(slot))
    group = people.group[person[to_poi]]
    by_group = to_poi[np.argsort(group, kind="stable")]
    ends = np.cumsum(np.bincount(group, minlength=len(tables.behaviour.tilt)))
    for index, at in enumerate(np.split(by_group, ends[:-1])):
        if len(at) == 0:
            continue
        outing = np.searchsorted(OUTINGS, slot[at])
        appetite = tables.behaviour.appetite[index].reshape(-1, len(CATEGORIES))
        category[at] = _pick(appetite, workday[at] * len(OUTINGS) + outing, rng)
        from_work = (workday[at] == 1) & (outing == MIDDAY)
        cells = np.where(from_work, people.work_cell[person[at]], people.home_cell[person[at]])
        candidate[at] = tables.explore(index, cells, category[at], rng)
    return category, candidate


def _carry_out(people: People, outings: Outings, places: Places, rng: np.random.Generator) -> Steps:
    """Step all people through their outings together, with stays at home where time allows."""
    count = np.bincount(outings.person, minlength=len(people))  # (people,)
    # Busiest people first, so that people with remaining outings are always at the front.
    busiest = np.argsort(-count, kind="stable")
    first = (np.cumsum(count) - count)[busiest]
    steps = -np.arange(1, count.max(initial=0) + 1)
    remaining = np.searchsorted(-count[busiest], steps, side="right")  # (steps,) people

    memory = _Memory(outings, len(people), len(places.pois))
    explores, recalls = rng.random((2, len(outings.person)), np.float32)
    home = people.home[busiest]  # (people, 2)
    work = people.work[busiest]
    position = home.copy()
    left = np.full(len(people), -TRIP_START)  # (people,) the first stay at home begins at midnight
    to_work = _is_work(outings.slot)
    place, arrival, departure, home_from, home_until = np.empty((5, len(to_work)), np.int64)
    for step, active in enumerate(remaining):
        at = first[:active] + step  # (active,) one outing per person
        poi = memory.choose(busiest[:active], at, explores[at], recalls[at], ~to_work[at])
        place[at] = np.where(to_work[at], WORK, poi)
        target = np.where(to_work[at, None], work[:active], places.pois[poi])
        home_from[at] = left[:active] + _travel(position[:active], home[:active])
        start = outings.start[at]
        home_until[at] = start - _travel(home[:active], target)
        direct = left[:active] + _travel(position[:active], target)
        via_home = home_until[at] - home_from[at] >= MIN_HOME_STAY
        arrival[at] = np.where(via_home, start, np.maximum(start, direct))
        # A late person stays shorter, so that delays do not add up over the day.
        departure[at] = np.maximum(outings.end[at], arrival[at] + MIN_STAY)
        left[:active] = departure[at]
        position[:active] = target

    last_home = (left + _travel(position, home))[np.argsort(busiest)]
    return Steps(place, arrival, departure, home_from, home_until, last_home)


class _Memory:
    """The POIs that people have visited, by category."""

    def __init__(self, outings: Outings, people: int, pois: int) -> None:
        self.outings = outings
        key = outings.person * len(CATEGORIES) + outings.category
        capacity = np.bincount(key, minlength=people * len(CATEGORIES))
        self.first = np.cumsum(capacity) - capacity  # (people * categories,)
        self.seen = np.zeros_like(capacity)
        self.visits = np.zeros(len(key), np.int64)  # in order of person, category, time
        self.known = np.zeros((people, pois // 8 + 1), np.uint8)  # one bit per POI
        self.places = np.zeros(people, np.int64)  # S of Song et al.

    def choose(
        self, people: Ints, at: Ints, explores: Draws, recalls: Draws, counts: Flags
    ) -> Ints:
        """The POI of one outing of each person; it is remembered where `counts` is true."""
        key = people * len(CATEGORIES) + self.outings.category[at]
        seen = self.seen[key]
        first = self.first[key]
        is_new = (seen == 0) | (explores < RHO * np.maximum(self.places[people], 1) ** -GAMMA)
        earlier = np.minimum((recalls * seen).astype(np.int64), np.maximum(seen - 1, 0))
        poi = np.where(is_new, self.outings.candidate[at], self.visits[first + earlier])
        person = people[counts]
        visited = poi[counts]
        self.visits[(first + seen)[counts]] = visited
        self.seen[key[counts]] += 1
        bit = (1 << (visited & 7)).astype(np.uint8)
        self.places[person] += (self.known[person, visited >> 3] & bit) == 0
        self.known[person, visited >> 3] |= bit
        return poi


def _travel(origin: Floats, destination: Floats) -> Ints:
    km = np.hypot(origin[:, 0] - destination[:, 0], origin[:, 1] - destination[:, 1])
    return np.asarray(TRIP_START + np.ceil(km * SECONDS_PER_KM), np.int64)


def _add_home_stays(person: Ints, steps: Steps, horizon: int) -> Rows:
    """Outings, stays at home before them, and last stays at home, in order, up to the horizon."""
    people = len(steps.last_home)
    via_home = steps.home_until - steps.home_from >= MIN_HOME_STAY
    # (outings,) each earlier person also has a last stay at home
    row = np.cumsum(1 + via_home) - 1 + person
    before = row[via_home] - 1
    rows_each = 1 + sum(np.bincount(who, minlength=people) for who in (person, person[via_home]))
    last = np.cumsum(rows_each) - 1  # (people,)
    rows = Rows(np.repeat(np.arange(people), rows_each), *np.full((3, last[-1] + 1), HOME))
    rows.place[row] = steps.place
    rows.arrival[row] = steps.arrival
    rows.arrival[before] = steps.home_from[via_home]
    rows.arrival[last] = steps.last_home
    rows.departure[row] = steps.departure
    rows.departure[before] = steps.home_until[via_home]
    rows.departure[last] = horizon
    return _cut_rows(rows, horizon)


def _drop_unobserved_days(
    config: CityConfig, rows: Rows, people: int, rng: np.random.Generator
) -> Rows:
    """Remove visits that begin on an unobserved day, and end those that would last into one."""
    unobserved = rng.random((people, config.days), np.float32) < config.dropout
    upcoming = np.where(unobserved, np.arange(config.days), config.days)
    # (people, days) the first unobserved day from each day on
    upcoming = np.minimum.accumulate(upcoming[:, ::-1], 1)[:, ::-1]
    return _cut_rows(rows, upcoming[rows.person, rows.arrival // DAY] * DAY)


def _cut_rows(rows: Rows, end: int | Ints) -> Rows:
    """End visits at `end`, and drop those that begin later."""
    cut = rows._replace(departure=np.minimum(rows.departure, end))
    return Rows(*(column[rows.arrival < end] for column in cut))


@dataclass(frozen=True)
class City:
    """The three canonical tables of a simulated city.

    Examples
    --------
    >>> simulate(CityConfig(users=5, pois=12, days=3), seed=0).pois.num_rows
    12
    """

    visits: Any  # pyarrow.Table
    people: Any  # pyarrow.Table, with the attributes
    pois: Any  # pyarrow.Table


@dataclass(frozen=True)
class _Plan:
    config: CityConfig
    seed: int
    places: Places
    behaviour: Behaviour
    people: People


def simulate(config: CityConfig, seed: int) -> City:
    """Simulate a city in memory.

    Parameters
    ----------
    config
        Size, attributes and divergence of the city.
    seed
        Random seed.

    Returns
    -------
    City
        Its visits, people and pois.

    Examples
    --------
    >>> city = simulate(CityConfig(users=5, pois=12, days=3), seed=0)
    >>> city.people.num_rows
    5
    """
    plan = _plan(config, seed)
    return City(
        visits=pa.Table.from_batches(_visits(plan, SILENT), VISITS_SCHEMA),
        people=_people_table(plan),
        pois=_pois_table(plan),
    )


def write_city_folder(
    out: Path | str,
    config: CityConfig,
    seed: int = 0,
    *,
    overwrite: bool = False,
    tracker: Tracker = SILENT,
) -> dict[str, Any]:
    """Simulate a city into a folder, in bounded memory.

    Parameters
    ----------
    out
        The folder; it gets visits.parquet, people.parquet and pois.parquet.
    config
        Size, attributes and divergence of the city.
    seed
        Random seed.
    overwrite
        Replace an existing folder.
    tracker
        Shows progress.

    Returns
    -------
    dict
        The numbers of people, POIs, districts, groups, days and visits, and the divergence.

    Examples
    --------
    >>> facts = write_city_folder("city", CityConfig(users=500), seed=1)  # doctest: +SKIP
    >>> facts["people"]  # doctest: +SKIP
    500
    """
    recorded = {"simulate": config.model_dump(mode="json")}
    with new_folder(Path(out), "city", seed=seed, config=recorded, overwrite=overwrite) as folder:
        plan = _plan(config, seed)
        for name, table in (("people", _people_table(plan)), ("pois", _pois_table(plan))):
            write_parquet(folder.path / f"{name}.parquet", table.schema, table.to_batches())
        facts = {
            "people": config.users,
            "pois": config.pois,
            "districts": config.districts,
            "groups": len(plan.behaviour.expected),
            "days": config.days,
            "visits": write_parquet(
                folder.path / "visits.parquet", VISITS_SCHEMA, _visits(plan, tracker)
            ),
            "divergence": round(mean_pairwise_jsd(plan.behaviour.expected), 4),
        }
        folder.details.update(facts)
    return facts


def expected_poi_distribution(config: CityConfig, seed: int) -> Floats:
    """The expected distribution of POI visits of each group, (groups, pois).

    The setting `divergence` is measured on it. Groups are in the order of `Groups`, POIs in the
    order of the pois table.
    """
    return _plan(config, seed).behaviour.expected


def _plan(config: CityConfig, seed: int) -> _Plan:
    if seed < 0:
        raise MobatlasError(f"seed is {seed}; a seed is zero or a positive whole number")
    groups = Groups.of(config.attributes)
    if taken := {"user_id", *ANCHORS, "home_district"} & set(groups.attribute_names):
        raise MobatlasError(
            f"simulate.attributes: '{min(taken)}' is already a column of people; "
            "choose another name"
        )
    if len(groups) ** 2 * config.pois > MAX_PAIRS_BY_POIS:
        raise MobatlasError(
            f"simulate: {len(groups)} groups and {config.pois} POIs are too many together; "
            "use fewer levels or POIs"
        )
    rng = _generator(seed, 0)
    places = build_places(config, rng)
    behaviour = build_behaviour(config, places, rng)
    return _Plan(config, seed, places, behaviour, draw_people(config, places, behaviour, rng))


def _generator(seed: int, *key: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed, spawn_key=key)))


def _visits(plan: _Plan, tracker: Tracker) -> Iterator[Any]:
    """Record batches of a few thousand people each, ordered by person and time."""
    config = plan.config
    tables = Tables(plan.places, plan.behaviour)
    size = int(np.clip(CHUNK_SLOTS // (config.days * DAY_SLOTS), 1, CHUNK_PEOPLE))
    for chunk, begin in enumerate(range(0, config.users, size)):
        part = slice(begin, begin + size)
        people = plan.people.part(part)
        rows = simulate_days(config, people, tables, _generator(plan.seed, 1, chunk))
        yield _batch(plan, people, _ids("u", 6, config.users, part), rows)
        tracker.step(begin + len(people))


def _batch(plan: _Plan, people: People, user_ids: list[str], rows: Rows) -> Any:
    """Rows of visits; the places of these people are indexed as POIs, homes, then works."""
    pois = len(plan.places.pois)
    at_home = rows.place == HOME
    at_work = rows.place == WORK
    homes = pois + rows.person
    index = np.select([at_home, at_work], [homes, homes + len(people)], rows.place)
    ids = [
        *_ids("p", 5, pois),
        *(f"home:{user}" for user in user_ids),
        *(f"work:{user}" for user in user_ids),
    ]
    lat, lon = coordinates(np.concatenate([plan.places.pois, people.home, people.work]))
    poi_category = plan.places.category[index % pois]
    category = np.select([at_home, at_work], [len(CATEGORIES), len(CATEGORIES) + 1], poi_category)
    first_midnight = np.datetime64(plan.config.start, "us")
    return pa.record_batch(
        [
            pa.array(user_ids).take(pa.array(rows.person)),
            pa.array(ids).take(pa.array(index)),
            lat[index],
            lon[index],
            pa.array([*CATEGORIES, "home", "work"]).take(pa.array(category)),
            first_midnight + rows.arrival.astype("timedelta64[s]"),
            first_midnight + rows.departure.astype("timedelta64[s]"),
            at_home,
            at_work,
        ],
        schema=VISITS_SCHEMA,
    )


def _people_table(plan: _Plan) -> Any:
    config = plan.config
    people = plan.people
    home_lat, home_lon = coordinates(people.home)
    work_lat, work_lon = coordinates(people.work)
    columns = {
        "user_id": pa.array(_ids("u", 6, config.users)),
        "home_lat": home_lat,
        "home_lon": home_lon,
        "work_lat": pa.array(work_lat, mask=~people.employed),
        "work_lon": pa.array(work_lon, mask=~people.employed),
        "home_district": pa.array(_ids("D", 2, config.districts)).take(pa.array(people.district)),
    }
    groups = Groups.of(config.attributes)
    for (name, levels), codes in zip(groups.attributes, groups.level_codes.T, strict=True):
        columns[name] = pa.array(levels).take(pa.array(codes[people.group]))
    return pa.table(columns)


def _pois_table(plan: _Plan) -> Any:
    lat, lon = coordinates(plan.places.pois)
    category = pa.array(list(CATEGORIES)).take(pa.array(plan.places.category))
    poi_id = pa.array(_ids("p", 5, len(lat)))
    return pa.table({"poi_id": poi_id, "lat": lat, "lon": lon, "category": category})


def _ids(prefix: str, min_digits: int, count: int, part: slice = slice(None)) -> list[str]:
    """Ids with numbers from 1, of equal width; `part` selects some of them."""
    width = max(min_digits, len(str(count)))
    return [f"{prefix}{number:0{width}d}" for number in range(1, count + 1)[part]]
