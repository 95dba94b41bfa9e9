"""The simulated city with the defaults, and slow, independent counts of what happens in it."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mobatlas.config import CityConfig, RunConfig
from mobatlas.data.city import City, simulate
from mobatlas.groups import Groups

Array = NDArray[Any]
DAY = 86_400


@functools.cache
def small_city(seed: int) -> City:
    return simulate(CityConfig(), seed)


def codes(column: Any) -> Array:
    """Strings as the ranks of their sorted values."""
    return np.unique(column.to_numpy(), return_inverse=True)[1]


def persons(city: City) -> Array:
    """The row in the people table of every visit."""
    return np.searchsorted(city.people["user_id"].to_numpy(), city.visits["user_id"].to_numpy())


def seconds(city: City, column: str) -> Array:
    """Whole seconds since the first midnight."""
    times = city.visits[column].to_numpy()
    midnight = city.visits["arrival"].to_numpy().min().astype("datetime64[D]")
    return (times - midnight).astype("timedelta64[us]").astype(np.int64) // 1_000_000


def groups_of(city: City, config: CityConfig) -> Array:
    groups = Groups.of(config.attributes)
    return groups.codes({name: city.people[name].to_pylist() for name in groups.attribute_names})


def at_pois(city: City) -> Array:
    return ~(city.visits["is_home"].to_numpy() | city.visits["is_work"].to_numpy())


def poi_numbers(city: City) -> Array:
    """The row in the pois table of every visit to a POI."""
    return np.searchsorted(
        city.pois["poi_id"].to_numpy(), city.visits["poi_id"].to_numpy()[at_pois(city)]
    )


def visit_counts(city: City, config: CityConfig, group: Array | None = None) -> Array:
    """Visits of every group to every POI, (groups, pois)."""
    group = groups_of(city, config) if group is None else group
    counts = np.zeros((len(Groups.of(config.attributes)), config.pois))
    np.add.at(counts, (group[persons(city)[at_pois(city)]], poi_numbers(city)), 1)
    return counts


def jsd(p: Array, q: Array) -> float:
    """Jensen-Shannon divergence in bits, from counts or shares."""
    p = p / p.sum()
    q = q / q.sum()
    middle = (p + q) / 2
    kl = [float((a[a > 0] * np.log2(a[a > 0] / middle[a > 0])).sum()) for a in (p, q)]
    return (kl[0] + kl[1]) / 2


def pairwise(rows: Array) -> dict[tuple[int, int], float]:
    return {(a, b): jsd(rows[a], rows[b]) for a, b in itertools.combinations(range(len(rows)), 2)}


def mean_jsd(rows: Array) -> float:
    return float(np.mean(list(pairwise(rows).values())))


def km(lat: Array, lon: Array, other_lat: Array, other_lon: Array) -> Array:
    east = (lon - other_lon) * np.cos(np.radians(37.54))
    return np.asarray(np.hypot(east, lat - other_lat) * 111.195)


def covered(city: City, config: CityConfig) -> Array:
    """Observed share of every person's every day, (people, days)."""
    since = seconds(city, "arrival")
    until = seconds(city, "departure")
    person = persons(city)
    share = np.zeros((config.users, config.days))
    for later in range(config.days):
        day = since // DAY + later
        inside = np.minimum(until, (day + 1) * DAY) - np.maximum(since, day * DAY)
        reaches = (inside > 0) & (day < config.days)
        np.add.at(share, (person[reaches], day[reaches]), inside[reaches] / DAY)
    return share


def window_lengths(city: City, run: RunConfig) -> tuple[Array, float]:
    """Tokens of every window that passes the coverage rule, and the share that passes."""
    config = run.simulate
    window = run.prepare.window
    person = persons(city)
    home, work = (city.visits[flag].to_numpy() for flag in ("is_home", "is_work"))
    poi = np.full(len(person), -1)
    poi[at_pois(city)] = poi_numbers(city)
    visits = np.bincount(poi[poi >= 0], minlength=config.pois)
    frequent = np.zeros(config.pois, bool)
    frequent[np.argsort(-visits, kind="stable")[: run.prepare.vocabulary_size]] = True
    token = np.select([home, work, frequent[poi]], [-1, -2, poi], -3)
    first_day = seconds(city, "arrival") // DAY
    last_day = np.maximum(first_day, (seconds(city, "departure") - 1) // DAY)
    good = covered(city, config) >= run.prepare.quality.min_coverage  # (people, days)
    lengths = []
    passing = []
    for start in range(0, config.days - window.days + 1, window.stride):
        inside = (first_day < start + window.days) & (last_day >= start)
        people = person[inside]
        tokens = token[inside]
        changes = (people[1:] != people[:-1]) | (tokens[1:] != tokens[:-1])
        begins = np.r_[True, changes]
        passes = (
            good[:, start : start + window.days].mean(1) >= run.prepare.quality.min_high_quality
        )
        lengths.append(np.bincount(people[begins], minlength=config.users)[passes])
        passing.append(passes.mean())
    return np.concatenate(lengths), float(np.mean(passing))
