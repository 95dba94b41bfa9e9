"""From a configuration and a seed to the three canonical tables of a city, in chunks of people."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from mobatlas.config import CityConfig
from mobatlas.data.arrays import Floats
from mobatlas.data.city.behaviour import Behaviour, build_behaviour, mean_pairwise_jsd
from mobatlas.data.city.days import (
    DAY_SLOTS,
    HOME,
    WORK,
    People,
    Rows,
    Tables,
    draw_people,
    simulate_days,
)
from mobatlas.data.city.places import CATEGORIES, Places, build_places, coordinates
from mobatlas.data.schema import ANCHORS
from mobatlas.errors import refuse_faults
from mobatlas.groups import Groups
from mobatlas.io.manifest import write_parquet
from mobatlas.io.output import new_folder
from mobatlas.progress import SILENT, Tracker

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
    groups = Groups.of(config.attributes)
    taken = {"user_id", *ANCHORS, "home_district"} & set(groups.attribute_names)
    refuse_faults(
        {
            f"seed is {seed}; a seed is zero or a positive whole number": seed < 0,
            f"simulate.attributes: '{min(taken, default='')}' is already a column of people; "
            "choose another name": taken,
            f"simulate: {len(groups)} groups and {config.pois} POIs are too many together; "
            "use fewer levels or POIs": len(groups) ** 2 * config.pois > MAX_PAIRS_BY_POIS,
        }
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
