"""Many regions: what regions, recovery and tilts cost with ten thousand regions and a hundred groups, and how near they come to
means that are known, because the world is made of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from bench.speed import Measured, measure
from mobatlas.data.arrays import Floats
from mobatlas.data.dataset import TrajectoryDataset
from mobatlas.data.prepare.pipeline import prepare
from mobatlas.groups import Groups
from mobatlas.progress import SILENT, Tracker
from mobatlas.regions.build import RegionsOptions
from mobatlas.regions.identifiability import diagnose
from mobatlas.regions.recovery.recover import recover
from mobatlas.regions.store import build_regions, load_regions
from mobatlas.regions.types import Recovery
from mobatlas.supervision.evidence import gather_evidence
from mobatlas.supervision.group_tilts import fit_group_tilts

SIZES = ((1_000, 18), (10_000, 18), (10_000, 90))  # regions, groups
PANEL, RESIDENTS = 30, 1_500  # people of a region whose visits are known, and whom a census counts
POIS, CATEGORIES = 9_000, 60
VISITS, MOST_VISITS = (6.0, 10.0), 24  # of a day: the mean is between these by group
# Spread between levels of the logarithms of preferences, and of shares of a region; men and women live together.
PREFER = {"age": 0.4, "sex": 0.3, "income": 0.4}
LIVE_APART = {"age": 0.5, "sex": 0.1, "income": 0.8}
OWN = 0.2  # of both, group by group
DIARY = {
    "window": {"days": 1, "stride": 1},
    "quality": {"min_coverage": 0.0},
    "anchors": {"infer": "never", "require_both": False},
}
MIDDLE, REACH = (40.0, -100.0), 0.3  # degrees
TRUTH = "means.npy"
LEVEL = 0.9
Result = TypeVar("Result")
STEPS = 5  # of a size


@dataclass(frozen=True)
class World:
    """What groups do, and who lives where."""

    groups: Groups
    preferences: Floats  # (groups, pois) sum to 1
    visits: Floats  # (groups,) mean number in a day
    shares: Floats  # (regions, groups) sum to 1

    @property
    def means(self) -> Floats:
        """Visits of a day (groups, pois); the same place twice in a row is one visit."""
        visits = self.visits[:, None]
        return self.preferences * (visits - (visits - 1) * self.preferences)


def rows(
    scratch: Path, seed: int, tracker: Tracker = SILENT, sizes: Sequence[tuple[int, int]] = SIZES
) -> list[dict[str, Any]]:
    """For each size what regions, their diagnosis, recovery and tilts take, and the error that recovery leaves."""
    found: list[dict[str, Any]] = []
    for number, (regions, groups) in enumerate(sizes):
        folder = scratch / f"{regions}x{groups}"
        tracker.step(STEPS * number, f"{regions:,} regions, {groups} groups")
        people = measure(write_dataset, folder, make_world(regions, groups, seed), seed).value
        size = f"{regions:,} regions, {groups} groups, {POIS:,} POIs, {people:,} people"
        for step, (what, work) in enumerate(WORK.items(), start=1):
            tracker.step(STEPS * number + step, what)
            found.append(_row(what, size, measure(work, folder)))
    tracker.step(STEPS * len(sizes), "done")
    return found


def make_world(regions: int, groups: int, seed: int, pois: int | None = None) -> World:
    """Preferences and shares that follow age, sex and income, each with something of its own."""
    named, pois = groups_of(groups), pois or POIS
    rng = np.random.default_rng([seed, regions, groups])
    popular = -np.log(np.arange(1, pois + 1) + 10.0)
    preferences = np.exp(popular + _by_level(named, PREFER, rng, pois).T)
    living = np.exp(_by_level(named, LIVE_APART, rng, regions))  # (regions, groups)
    return World(
        named,
        preferences / preferences.sum(1, keepdims=True),
        rng.uniform(*VISITS, groups),
        living / living.sum(1, keepdims=True),
    )


def groups_of(number: int) -> Groups:
    """Age and sex, and in five parts income where the number allows it."""
    incomes = 5 if number % 10 == 0 and number > 10 else 1
    ages = number // 2 // incomes
    attributes = {"age": [f"{10 * k}-{10 * k + 9}" for k in range(1, ages + 1)], "sex": ["M", "F"]}
    if incomes > 1:
        attributes["income"] = [f"I{k}" for k in range(1, incomes + 1)]
    return Groups.of(attributes)


def write_dataset(folder: Path, world: World, seed: int) -> int:
    """Visits and people as a user has them, prepared into a dataset, beside a census of the regions; how many people."""
    regions, pois = len(world.shares), world.preferences.shape[1]
    rng = np.random.default_rng([seed, regions])
    source = folder / "source"
    source.mkdir(parents=True)
    np.save(folder / TRUTH, world.means)
    region = rng.integers(regions, size=PANEL * regions)
    group = _drawn(world.shares, region, rng)
    _write_people(source / "people.parquet", world, region, group, rng)
    _write_visits(source / "visits.parquet", world, group, rng)
    _write_census(folder / "census.parquet", world, rng)
    values = DIARY | {"vocabulary_size": pois, "attributes": list(world.groups.attribute_names)}
    prepare(source, folder / "dataset", values=values)
    return len(region)


def error(recovery: Recovery, truth: Floats) -> dict[str, float]:
    """|M - truth| as a share of visits, averaged over groups, of recovered means and of everybody's in their place; and how
    often intervals hold the truth, places weighed by visits."""
    low, high = recovery.interval(LEVEL)
    visits = truth.sum(1)
    weight = truth / truth.sum()
    return {
        "error": float((np.abs(recovery.means - truth).sum(1) / visits).mean()),
        "baseline_error": float((np.abs(recovery.baseline - truth).sum(1) / visits).mean()),
        "coverage": float((((low <= truth) & (truth <= high)) * weight).sum()),
    }


def true_means(folder: Path, features: Sequence[str]) -> Floats:
    """Of features in their order (groups, features); nobody goes to OTHER, HOME or WORK."""
    means = np.load(folder / TRUTH, allow_pickle=False)
    place = {f"poi:{_poi(number)}": number for number in range(means.shape[1])}
    padded = np.column_stack([means, np.zeros(len(means))])
    return np.asarray(padded[:, [place.get(name, -1) for name in features]])


def _row(what: str, size: str, found: Measured) -> dict[str, Any]:
    return {
        "what": what,
        "size": size,
        "seconds": found.value.pop("seconds"),
        "peak_gb": found.peak_gb,
        **found.value,
    }


def _timed(work: Callable[[], Result]) -> tuple[Result, dict[str, Any]]:
    """What it gives, and its seconds: those that passed, and those that it had of a processor."""
    start = time.perf_counter(), time.process_time()
    result = work()
    return result, {
        "seconds": time.perf_counter() - start[0],
        "cpu_seconds": time.process_time() - start[1],
    }


def _regions(folder: Path) -> dict[str, Any]:
    made, took = _timed(
        lambda: build_regions(
            folder / "dataset",
            folder / "regions",
            RegionsOptions(by="region", composition=folder / "census.parquet", features=("poi",)),
            overwrite=True,
        )
    )
    return took | {"kept": len(made.composition.regions)}


def _diagnose(folder: Path) -> dict[str, Any]:
    made = load_regions(folder / "regions")
    found, took = _timed(lambda: diagnose(made.composition, aggregates=made.aggregates))
    return took | {"effective_rank": found.effective_rank}


def _recover(folder: Path) -> dict[str, Any]:
    made = load_regions(folder / "regions")
    found, took = _timed(lambda: recover(made))
    return took | error(found, true_means(folder, found.features))


def _tilt(folder: Path) -> dict[str, Any]:
    dataset = TrajectoryDataset.open(folder / "dataset")
    evidence = gather_evidence(dataset, folder / "regions")
    found, took = _timed(lambda: fit_group_tilts(evidence, dataset))
    return took | {
        "seconds_per_group": took["seconds"] / len(found.groups),
        "converged": float(np.mean([each.converged for each in found.tilts])),
        "relative_size": float(np.mean([each.relative_size for each in found.tilts])),
    }


WORK = {"regions": _regions, "diagnose": _diagnose, "recovery": _recover, "tilts": _tilt}


def _by_level(
    groups: Groups, spread: dict[str, float], rng: np.random.Generator, columns: int
) -> Floats:
    """Sums over attributes of normal numbers that groups of one level share, (columns, groups)."""
    total = OWN * rng.standard_normal((columns, len(groups)))
    for number, (name, levels) in enumerate(groups.attributes):
        total += (
            spread[name]
            * rng.standard_normal((columns, len(levels)))[:, groups.level_codes[:, number]]
        )
    return total


def _drawn(shares: Floats, row: Any, rng: np.random.Generator) -> Any:
    """For each row a column by its shares."""
    cumulative = np.cumsum(shares, 1)[row]
    return np.minimum((rng.random(len(row))[:, None] > cumulative).sum(1), shares.shape[1] - 1)


def _poi(number: int) -> str:
    return f"P{number:05d}"


def _write_people(
    path: Path, world: World, region: Any, group: Any, rng: np.random.Generator
) -> None:
    homes = MIDDLE + REACH * rng.standard_normal((len(world.shares), 2))
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
    """A visit every forty minutes from midnight on."""
    number = 1 + np.minimum(rng.poisson(world.visits[group] - 1), MOST_VISITS - 1)  # (people,)
    person = np.repeat(np.arange(len(group)), number)
    turn = np.arange(len(person)) - np.repeat(np.cumsum(number) - number, number)
    token = np.empty(len(person), dtype=np.int64)
    for code, cumulative in enumerate(np.cumsum(world.preferences, 1)):
        here = np.flatnonzero(group[person] == code)
        token[here] = np.searchsorted(
            cumulative / cumulative[-1], rng.random(len(here)), side="right"
        )
    places = MIDDLE + REACH * rng.standard_normal((world.preferences.shape[1], 2))
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
    """Residents counted by region and attribute, one row a cell."""
    counts = rng.multinomial(RESIDENTS, world.shares)  # (regions, groups)
    region, group = (each.ravel() for each in np.indices(counts.shape))
    attributes = {
        name: pa.array(levels).take(pa.array(world.groups.level_codes[group, number]))
        for number, (name, levels) in enumerate(world.groups.attributes)
    }
    names = pa.array([f"R{code:05d}" for code in range(len(counts))]).take(pa.array(region))
    pq.write_table(pa.table({"region": names, **attributes, "count": counts.ravel()}), path)
