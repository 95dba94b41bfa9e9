"""Recovery in simulated cities: the error of recovered group means, and coverage of error bars."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from scipy import sparse, special

from bench.least_squares import least_squares, least_squares_on_simplex
from bench.runner import Cell, Command, Experiment, Runner
from bench.summary import write_result
from mobatlas.config import CityConfig
from mobatlas.data.city import write_city_folder
from mobatlas.data.dataset import Trajectories, TrajectoryDataset
from mobatlas.data.prepare.pipeline import prepare
from mobatlas.data.types import Flags, Floats, Ints
from mobatlas.features.maps import build_feature
from mobatlas.groups import Groups
from mobatlas.regions.aggregates import aggregate, person_means
from mobatlas.regions.composition import composition_from_labels
from mobatlas.regions.partitions import assign, nominal_partition
from mobatlas.regions.recovery.recover import recover
from mobatlas.regions.types import Recovery, Regions

USERS = 24_000
PANEL = 2_900  # people behind the aggregates
MASK = ("HOME", "WORK", "OTHER")
PARTITIONS = ("demogroups", "fullrank", "rankdef", "messy", "hot16", "dirichlet:24:0.5")
DISTRICTS = "home_district"
SHUFFLED = "shuffled "
SHUFFLED_PARTITION = "hot16"
FLOOR = 1e-3  # of the mean that an error is divided by
LEVEL = 0.9
MEAN_COLUMNS = ("error", "baseline", "pseudo_inverse", "simplex", "coverage")


@dataclass(frozen=True)
class CityPeople:
    """The people of one city: features, groups and home districts."""

    groups: Groups
    group: Ints  # (people,)
    district: Ints  # (people,)
    phi: dict[str, sparse.csr_array]  # feature -> (people, bins)


@dataclass(frozen=True)
class Truth:
    """Group means of people that recovery does not see."""

    means: Floats  # (groups, bins)
    standard_error: Floats  # (groups, bins): they are a sample themselves

    @property
    def scale(self) -> Floats:
        """The means that errors are divided by."""
        return np.maximum(self.means.mean(0), FLOOR)


def run(experiment: Experiment, users: int = USERS, panel: int = PANEL) -> dict[str, Any]:
    """Simulate a city for each seed, recover its groups, and write recovery.json."""
    command = Command("recovery")
    inputs = {"users": users, "panel": panel}

    def measure(seed: int) -> dict[str, Any]:
        people = simulate_people(experiment.out, CityConfig(users=users), seed)
        return {"rows": measure_city(people, panel, seed)}

    cells = [Cell(seed, "recovery", inputs, partial(measure, seed)) for seed in experiment.numbers]
    results = Runner(experiment, "recovery", command).run(cells)
    header = command.header(experiment)
    result = {
        "command": header.pop("command"),
        "users": users,
        "panel": panel,
        **header,
        "error": "root of the mean over groups of sum_j (difference_j^2 / mean_j)",
        "rows": summarise([row for each in results for row in each["rows"]]),
    }
    write_result(experiment.out, "recovery", result)
    return result


def simulate_people(out: Path, config: CityConfig, seed: int) -> CityPeople:
    """Simulate a city, prepare it with preset `small`, and average the features of each person.

    Nothing stays in the folder `out`.
    """
    with tempfile.TemporaryDirectory(prefix=".city-", dir=out) as scratch:
        write_city_folder(Path(scratch) / "city", config, seed)
        prepare(
            Path(scratch) / "city",
            Path(scratch) / "dataset",
            preset="small",
            values={"min_people_per_place": 0},
        )
        return _read_people(TrajectoryDataset.open(Path(scratch) / "dataset"))


def _read_people(dataset: TrajectoryDataset) -> CityPeople:
    assert dataset.groups is not None
    trajectories = Trajectories.of(dataset)
    features = {"poi": ("poi", MASK), "poi, unmasked": ("poi", ()), "category": ("category", ())}
    present = np.unique(dataset.person)
    phi = {}
    for name, (feature, mask) in features.items():
        counts = build_feature(feature, dataset.vocabulary, mask).counts(trajectories)
        means = person_means(counts, dataset.person, dataset.people.num_rows)
        phi[name] = sparse.csr_array(means[present])
    districts = np.unique(dataset.people[DISTRICTS].to_pylist(), return_inverse=True)[1]
    return CityPeople(
        dataset.groups,
        dataset.person_groups()[present],
        districts[present].astype(np.int64),
        phi,
    )


def measure_city(people: CityPeople, panel: int, seed: int) -> list[dict[str, Any]]:
    """Return a row for every partition.

    Its regions are computed from `panel` random people, the truth from all others.
    """
    rng = np.random.default_rng([seed, 0])
    order = rng.permutation(len(people.group))
    members = order[:panel]
    others = order[panel:]
    truth = {
        feature: group_truth(phi[others], people.group[others], people.groups)
        for feature, phi in people.phi.items()
    }
    cases = [
        *_partition_cases(people, members, "poi", PARTITIONS, (seed, rng)),
        *_partition_cases(people, members, "poi, unmasked", PARTITIONS[:-1], (seed, rng)),
        *_district_cases(people, members, rng),
    ]
    return [
        {"partition": partition, "feature": feature, "seed": seed}
        | score_recovery(regions, truth[feature])
        for partition, feature, regions in cases
    ]


Case = tuple[str, str, Regions]  # partition, feature, regions


def _partition_cases(
    people: CityPeople,
    members: Ints,
    feature: str,
    partitions: Sequence[str],
    randomness: tuple[int, np.random.Generator],  # seed of partitions, generator of shuffling
) -> Iterator[Case]:
    """Yield regions of controlled partitions, one of them also shuffled."""
    seed, rng = randomness
    phi = people.phi[feature][members]
    group = people.group[members]
    for name in partitions:
        nominal = nominal_partition(name, people.groups, seed)
        region = assign(group, nominal, seed)
        composition = composition_from_labels(group, region, people.groups, nominal.regions)
        observed = {name: region}
        if name == SHUFFLED_PARTITION:
            observed[SHUFFLED + name] = _shuffle(region, rng)
        for case, where in observed.items():
            yield case, feature, Regions(composition, aggregate(phi, where, nominal.regions), True)


def _district_cases(people: CityPeople, members: Ints, rng: np.random.Generator) -> Iterator[Case]:
    """Yield home districts and shuffled districts: P of one half of the people, V of the other.

    The population is left out, so that regions alone are measured.
    """
    phi = people.phi["category"][members]
    group = people.group[members]
    home = people.district[members]
    names = [str(number) for number in range(int(people.district.max()) + 1)]
    first_half = np.arange(len(members)) < len(members) // 2
    for case, district in {"districts": home, SHUFFLED + "districts": _shuffle(home, rng)}.items():
        counted = np.where(first_half, district, -1)
        observed = np.where(first_half, -1, district)
        sizes = [np.bincount(part[part >= 0], minlength=len(names)) for part in (counted, observed)]
        large = np.flatnonzero(np.minimum(*sizes) >= 2)
        number = np.full(len(names) + 1, -1)
        number[large] = np.arange(len(large))
        regions = [names[code] for code in large]
        composition = composition_from_labels(group, number[counted], people.groups, regions)
        aggregates = aggregate(phi, number[observed], regions)
        yield case, "category", Regions(composition, aggregates, False)


def group_truth(phi: sparse.csr_array, group: Ints, groups: Groups) -> Truth:
    """Return group means and their standard errors."""
    means = aggregate(phi, group, groups.names)
    squares = aggregate(sparse.csr_array(phi.multiply(phi)), group, groups.names).values
    variance = np.maximum(squares - means.values**2, 0)
    return Truth(means.values, np.sqrt(variance / np.maximum(means.n - 1, 1)[:, None]))


def score_recovery(regions: Regions, truth: Truth) -> dict[str, Any]:
    """Return the errors of all methods, and the coverage of the error bars of `recover`."""
    recovered = recover(regions)
    return {
        "error": recovery_error(recovered.means, truth),
        "baseline": recovery_error(np.tile(recovered.baseline, (len(truth.means), 1)), truth),
        "pseudo_inverse": recovery_error(least_squares(regions), truth),
        "simplex": recovery_error(least_squares_on_simplex(regions), truth),
        "coverage": coverage(recovered, truth),
        "variances": recovered.variances,
    }


def recovery_error(means: Floats, truth: Truth) -> float:
    """Return the root of the mean over groups of sum_j (difference_j^2 / mean_j)."""
    return float(np.sqrt((((means - truth.means) ** 2) / truth.scale).sum(1).mean()))


def coverage(recovered: Recovery, truth: Truth) -> float:
    """Return the share of true means inside their intervals, bins weighted by their mean.

    The truth is a sample, so its standard error widens the intervals.
    """
    inside = covered(recovered, truth.means, truth.standard_error**2, LEVEL)
    return float(np.average(inside.mean(0), weights=truth.means.mean(0)))


def covered(recovery: Recovery, means: Floats, variance: Floats, level: float) -> Flags:
    """Whether intervals contain means (groups, features) that have a sampling variance.

    Intervals are longer above the estimate than below; each side is widened by the variance.
    """
    low, high = recovery.interval(level)
    reach = np.where(means < recovery.means, recovery.means - low, high - recovery.means)
    sampling = special.ndtri(0.5 + level / 2) ** 2 * variance
    return np.asarray(np.abs(means - recovery.means) <= np.sqrt(reach**2 + sampling))


def summarise(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each partition and feature: averages over seeds, and wins of recovery."""
    summary = []
    for partition, feature in dict.fromkeys((row["partition"], row["feature"]) for row in rows):
        own = [row for row in rows if (row["partition"], row["feature"]) == (partition, feature)]
        ratio = np.array([row["error"] / row["baseline"] for row in own])  # (seeds,)
        mean = {name: round(float(np.mean([row[name] for row in own])), 4) for name in MEAN_COLUMNS}
        summary.append(
            {"partition": partition, "feature": feature, "seeds": len(own)}
            | mean
            | {
                "wins": int((ratio < 1).sum()),
                "ratio": round(float(ratio.mean()), 4),
                "worst_ratio": round(float(ratio.max()), 4),
                "coverage_by_seed": [round(row["coverage"], 3) for row in own],
                "ratio_by_seed": [round(float(value), 4) for value in ratio],
            }
        )
    return summary


def _shuffle(region: Ints, rng: np.random.Generator) -> Ints:
    """Exchange people between regions of the same sizes."""
    shuffled = region.copy()
    placed = np.flatnonzero(region >= 0)
    shuffled[placed] = rng.permutation(region[placed])
    return shuffled
