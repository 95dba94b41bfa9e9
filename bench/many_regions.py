"""Cost and error of regions, recovery and tilts with up to ten thousand regions and 90 groups.

The world is simulated, so its true group means are known.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from bench.measure import Measured, Row, measure
from mobatlas.data.dataset import TrajectoryDataset
from mobatlas.data.prepare.pipeline import prepare
from mobatlas.data.types import Floats
from mobatlas.groups import Groups
from mobatlas.progress import SILENT, Tracker
from mobatlas.regions.build import RegionsOptions
from mobatlas.regions.identifiability import diagnose
from mobatlas.regions.recovery.recover import recover
from mobatlas.regions.store import build_regions, load_regions
from mobatlas.regions.types import Recovery
from mobatlas.supervision.evidence import gather_evidence
from mobatlas.supervision.tilt import fit_group_tilts

SIZES = ((1_000, 18), (10_000, 18), (10_000, 90))  # regions, groups
PANEL = 30  # people of a region whose visits are known
RESIDENTS = 1_500  # people of a region in the census
POIS = 9_000
CATEGORIES = 60
MEAN_VISITS = (6.0, 10.0)  # range of the mean visits per day of a group
MAX_VISITS = 24  # per day
# Standard deviations between levels, of log preferences and of log shares of a region.
PREFERENCE_SPREAD = {"age": 0.4, "sex": 0.3, "income": 0.4}
SEGREGATION = {"age": 0.5, "sex": 0.1, "income": 0.8}
GROUP_SPREAD = 0.2  # standard deviation of both between groups of the same levels
DIARY = {
    "window": {"days": 1, "stride": 1},
    "quality": {"min_coverage": 0.0},
    "min_people_per_place": 0,
    "anchors": {"infer": "never", "require_both": False},
}
CENTRE = (40.0, -100.0)  # latitude, longitude
EXTENT = 0.3  # degrees
TRUTH = "means.npy"
LEVEL = 0.9  # of intervals
STEPS = 5  # of the progress bar, for each size
Result = TypeVar("Result")


@dataclass(frozen=True)
class World:
    """The true preferences of groups and the true composition of regions."""

    groups: Groups
    preferences: Floats  # (groups, pois) sum to 1
    visits: Floats  # (groups,) mean number in a day
    shares: Floats  # (regions, groups) sum to 1

    @property
    def means(self) -> Floats:
        """Mean visits per day, (groups, pois); repeated visits in a row count once."""
        visits = self.visits[:, None]
        return self.preferences * (visits - (visits - 1) * self.preferences)


def rows(
    scratch: Path, seed: int, tracker: Tracker = SILENT, sizes: Sequence[tuple[int, int]] = SIZES
) -> list[Row]:
    """Return a row for each size and task; the row of recovery also has its error."""
    table: list[Row] = []
    for number, (regions, groups) in enumerate(sizes):
        folder = scratch / f"{regions}x{groups}"
        tracker.step(STEPS * number, f"{regions:,} regions, {groups} groups")
        people = measure(write_dataset, folder, make_world(regions, groups, seed), seed).value
        size = f"{regions:,} regions, {groups} groups, {POIS:,} POIs, {people:,} people"
        for step, (task, work) in enumerate(WORK.items(), start=1):
            tracker.step(STEPS * number + step, task)
            table.append(_row(task, size, measure(work, folder)))
    tracker.step(STEPS * len(sizes), "done")
    return table


def make_world(regions: int, groups: int, seed: int, pois: int | None = None) -> World:
    """Draw preferences and shares that depend on age, sex and income, and a little on the group."""
    all_groups = groups_of(groups)
    places = pois or POIS
    rng = np.random.default_rng([seed, regions, groups])
    popularity = -np.log(np.arange(1, places + 1) + 10.0)
    preferences = np.exp(popularity + _by_level(all_groups, PREFERENCE_SPREAD, rng, places).T)
    residents = np.exp(_by_level(all_groups, SEGREGATION, rng, regions))  # (regions, groups)
    return World(
        all_groups,
        preferences / preferences.sum(1, keepdims=True),
        rng.uniform(*MEAN_VISITS, groups),
        residents / residents.sum(1, keepdims=True),
    )


def groups_of(number: int) -> Groups:
    """Return `number` groups of age and sex, and of five incomes if the number allows it."""
    incomes = 5 if number % 10 == 0 and number > 10 else 1
    ages = number // 2 // incomes
    attributes = {"age": [f"{10 * k}-{10 * k + 9}" for k in range(1, ages + 1)], "sex": ["M", "F"]}
    if incomes > 1:
        attributes["income"] = [f"I{k}" for k in range(1, incomes + 1)]
    return Groups.of(attributes)


def write_dataset(folder: Path, world: World, seed: int) -> int:
    """Write people, visits, a census and the prepared dataset; return the number of people."""
    regions = len(world.shares)
    pois = world.preferences.shape[1]
    rng = np.random.default_rng([seed, regions])
    source = folder / "source"
    source.mkdir(parents=True)
    np.save(folder / TRUTH, world.means)
    region = rng.integers(regions, size=PANEL * regions)
    group = _draw_columns(world.shares, region, rng)
    _write_people(source / "people.parquet", world, region, group, rng)
    _write_visits(source / "visits.parquet", world, group, rng)
    _write_census(folder / "census.parquet", world, rng)
    values = DIARY | {"vocabulary_size": pois, "attributes": list(world.groups.attribute_names)}
    prepare(source, folder / "dataset", values=values)
    return len(region)


def error(recovery: Recovery, truth: Floats) -> dict[str, float]:
    """Return errors of recovered means and of the population mean, and the coverage of intervals.

    An error is |M - truth| as a share of visits, averaged over groups. Coverage weighs places by
    their visits.
    """
    low, high = recovery.interval(LEVEL)
    visits = truth.sum(1)
    weight = truth / truth.sum()
    return {
        "error": float((np.abs(recovery.means - truth).sum(1) / visits).mean()),
        "baseline_error": float((np.abs(recovery.baseline - truth).sum(1) / visits).mean()),
        "coverage": float((((low <= truth) & (truth <= high)) * weight).sum()),
    }


def true_means(folder: Path, features: Sequence[str]) -> Floats:
    """Return true means, (groups, features); OTHER, HOME and WORK have no visits."""
    means = np.load(folder / TRUTH, allow_pickle=False)
    place = {f"poi:{_poi(number)}": number for number in range(means.shape[1])}
    padded = np.column_stack([means, np.zeros(len(means))])
    return np.asarray(padded[:, [place.get(name, -1) for name in features]])


def _row(task: str, size: str, measured: Measured) -> Row:
    facts = {"task": task, "size": size, "seconds": None, "peak_gb": measured.peak_gb}
    return facts | measured.value


def _timed(work: Callable[[], Result]) -> tuple[Result, dict[str, Any]]:
    """Return the result of a function, and its wall clock and CPU seconds."""
    start = time.perf_counter()
    cpu_start = time.process_time()
    result = work()
    return result, {
        "seconds": time.perf_counter() - start,
        "cpu_seconds": time.process_time() - cpu_start,
    }


def _regions(folder: Path) -> dict[str, Any]:
    options = RegionsOptions(
        by="region", composition=folder / "census.parquet", features=("poi",), min_people=0
    )
    regions, times = _timed(
        lambda: build_regions(folder / "dataset", folder / "regions", options, overwrite=True)
    )
    return times | {"kept": len(regions.composition.regions)}


def _diagnose(folder: Path) -> dict[str, Any]:
    regions = load_regions(folder / "regions")
    diagnosis, times = _timed(lambda: diagnose(regions.composition, aggregates=regions.aggregates))
    return times | {"effective_rank": diagnosis.effective_rank}


def _recover(folder: Path) -> dict[str, Any]:
    regions = load_regions(folder / "regions")
    recovery, times = _timed(lambda: recover(regions))
    return times | error(recovery, true_means(folder, recovery.features))


def _tilt(folder: Path) -> dict[str, Any]:
    dataset = TrajectoryDataset.open(folder / "dataset")
    evidence = gather_evidence(dataset, folder / "regions")
    fitted, times = _timed(lambda: fit_group_tilts(evidence, dataset))
    return times | {
        "seconds_per_group": times["seconds"] / len(fitted.groups),
        "converged": float(np.mean([tilt.converged for tilt in fitted.tilts])),
        "relative_size": float(np.mean([tilt.relative_size for tilt in fitted.tilts])),
    }


WORK = {"regions": _regions, "diagnose": _diagnose, "recovery": _recover, "tilts": _tilt}


def _by_level(
    groups: Groups, spread: dict[str, float], rng: np.random.Generator, columns: int
) -> Floats:
    """Sum normal effects of attribute levels and of groups, (columns, groups)."""
    total = GROUP_SPREAD * rng.standard_normal((columns, len(groups)))
    for number, (name, levels) in enumerate(groups.attributes):
        effects = rng.standard_normal((columns, len(levels)))
        total += spread[name] * effects[:, groups.level_codes[:, number]]
    return total


def _draw_columns(shares: Floats, row: Any, rng: np.random.Generator) -> Any:
    """Draw a column for each row by the shares of the row."""
    cumulative = np.cumsum(shares, 1)[row]
    return np.minimum((rng.random(len(row))[:, None] > cumulative).sum(1), shares.shape[1] - 1)


def _poi(number: int) -> str:
    return f"P{number:05d}"


def _write_people(
    path: Path, world: World, region: Any, group: Any, rng: np.random.Generator
) -> None:
    homes = CENTRE + EXTENT * rng.standard_normal((len(world.shares), 2))
    codes = world.groups.level_codes[group]  # (people, attributes)
    attributes = {
        name: pa.array(levels).take(pa.array(codes[:, number]))
        for number, (name, levels) in enumerate(world.groups.attributes)
    }
    columns = {
        "user_id": [f"u{number}" for number in range(len(region))],
        "home_lat": homes[region, 0],
        "home_lon": homes[region, 1],
        "region": [f"R{number:05d}" for number in region.tolist()],
    }
    pq.write_table(pa.table(columns | attributes), path)


def _write_visits(path: Path, world: World, group: Any, rng: np.random.Generator) -> None:
    """Write a visit every forty minutes from midnight."""
    number = 1 + np.minimum(rng.poisson(world.visits[group] - 1), MAX_VISITS - 1)  # (people,)
    person = np.repeat(np.arange(len(group)), number)
    turn = np.arange(len(person)) - np.repeat(np.cumsum(number) - number, number)
    token = np.empty(len(person), dtype=np.int64)
    for code, cumulative in enumerate(np.cumsum(world.preferences, 1)):
        own = np.flatnonzero(group[person] == code)
        draws = rng.random(len(own))
        token[own] = np.searchsorted(cumulative / cumulative[-1], draws, side="right")
    places = CENTRE + EXTENT * rng.standard_normal((world.preferences.shape[1], 2))
    arrival = np.datetime64("2024-03-04T00:00:00", "s") + 2_400 * turn
    names = [_poi(code) for code in range(len(places))]
    kinds = [f"C{code % CATEGORIES:02d}" for code in range(len(places))]
    columns = {
        "user_id": pa.array([f"u{code}" for code in range(len(group))]).take(pa.array(person)),
        "poi_id": pa.array(names).take(pa.array(token)),
        "category": pa.array(kinds).take(pa.array(token)),
        "lat": places[token, 0],
        "lon": places[token, 1],
        "arrival": arrival,
        "departure": arrival + 1_800,
        "is_home": np.zeros(len(person), dtype=bool),
        "is_work": np.zeros(len(person), dtype=bool),
    }
    pq.write_table(pa.table(columns), path)


def _write_census(path: Path, world: World, rng: np.random.Generator) -> None:
    """Write the counts of residents, one row for each region and group."""
    counts = rng.multinomial(RESIDENTS, world.shares)  # (regions, groups)
    region, group = (each.ravel() for each in np.indices(counts.shape))
    attributes = {
        name: pa.array(levels).take(pa.array(world.groups.level_codes[group, number]))
        for number, (name, levels) in enumerate(world.groups.attributes)
    }
    names = pa.array([f"R{code:05d}" for code in range(len(counts))]).take(pa.array(region))
    pq.write_table(pa.table({"region": names, **attributes, "count": counts.ravel()}), path)
