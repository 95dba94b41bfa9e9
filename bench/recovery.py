"""Recovery: how near recovered group means come to the truth in simulated cities, and whether their error bars say so."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import sparse, special

from bench.summary import write_result
from mobatlas.config import CityConfig
from mobatlas.data.arrays import Floats
from mobatlas.data.city import write_city_folder
from mobatlas.data.dataset import TrajectoryDataset
from mobatlas.data.prepare.pipeline import prepare
from mobatlas.data.trajectories import Trajectories
from mobatlas.features.maps import build_feature
from mobatlas.groups import Groups
from mobatlas.io.manifest import library_versions
from mobatlas.io.output import new_folder
from mobatlas.progress import SILENT, Tracker
from mobatlas.regions.aggregates import aggregate, person_means
from mobatlas.regions.composition import composition_from_labels
from mobatlas.regions.partitions import assign, nominal_partition
from mobatlas.regions.recovery.recover import recover
from mobatlas.regions.types import Recovery, Regions

USERS, PANEL = 24_000, 2_900
MASK = ("HOME", "WORK", "OTHER")
PARTITIONS = ("demogroups", "fullrank", "rankdef", "messy", "hot16", "dirichlet:24:0.5")
DISTRICTS = "home_district"
SHUFFLED = "shuffled "
FLOOR = 1e-3  # of the mean that an error is measured against
LEVEL = 0.9
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class People:
    """One city: what its people do, who they are and where they live."""

    groups: Groups
    group: Ints  # (people,)
    district: Ints  # (people,)
    phi: dict[str, sparse.csr_array]  # feature -> (people, bins)


@dataclass(frozen=True)
class Truth:
    """Group means counted on people that recovery never saw."""

    means: Floats  # (groups, bins)
    standard_error: Floats  # (groups, bins): they are a sample themselves

    @property
    def scale(self) -> Floats:
        return np.maximum(self.means.mean(0), FLOOR)


def run(
    out: Path,
    seeds: int = 20,
    first_seed: int = 0,
    *,
    users: int = USERS,
    panel: int = PANEL,
    overwrite: bool = False,
    tracker: Tracker = SILENT,
) -> dict[str, Any]:
    """Simulate a city a seed, recover its groups from every partition, and write recovery.json."""
    config = {"seeds": seeds, "first_seed": first_seed, "users": users, "panel": panel}
    with new_folder(
        out, "benchmark", seed=first_seed, config=config, overwrite=overwrite
    ) as folder:
        found: list[dict[str, Any]] = []
        for seed in range(first_seed, first_seed + seeds):
            tracker.step(seed - first_seed, f"seed {seed}")
            with tempfile.TemporaryDirectory(dir=folder.scratch()) as scratch:
                people = simulate_people(Path(scratch), CityConfig(users=users), seed)
            found += one_city(people, panel, seed)
        result = {
            "command": f"python -m bench recovery --seeds {seeds} --first-seed {first_seed} --out {out.name}",
            "users": users,
            "panel": panel,
            "seed": first_seed,
            "versions": library_versions(),
            "error": "root of the mean over groups of sum_j (difference_j^2 / mean_j)",
            "rows": summarise(found),
        }
        write_result(folder.path, "recovery", result)
    tracker.step(seeds, "done")
    return result


def simulate_people(scratch: Path, config: CityConfig, seed: int) -> People:
    """Simulate, prepare with the small preset, and keep only what each person does on average."""
    write_city_folder(scratch / "city", config, seed)
    prepare(scratch / "city", scratch / "dataset", preset="small")
    dataset = TrajectoryDataset.open(scratch / "dataset")
    assert dataset.groups is not None
    trajectories = Trajectories.of(dataset)
    features = {"poi": ("poi", MASK), "poi, unmasked": ("poi", ()), "category": ("category", ())}
    seen = np.unique(dataset.person)
    phi = {}
    for name, (feature, mask) in features.items():
        counts = build_feature(feature, dataset.vocabulary, mask).counts(trajectories)
        phi[name] = sparse.csr_array(
            person_means(counts, dataset.person, dataset.people.num_rows)[seen]
        )
    districts = np.unique(dataset.people[DISTRICTS].to_pylist(), return_inverse=True)[1]
    return People(
        dataset.groups, dataset.person_groups()[seen], districts[seen].astype(np.int64), phi
    )


def one_city(people: People, panel: int, seed: int) -> list[dict[str, Any]]:
    """A row for every partition, its regions known from `panel` random people and the truth from all others."""
    rng = np.random.default_rng([seed, 0])
    order = rng.permutation(len(people.group))
    members, others = order[:panel], order[panel:]
    truth = {
        name: group_truth(phi[others], people.group[others], people.groups)
        for name, phi in people.phi.items()
    }
    rows = []
    for feature in ("poi", "poi, unmasked"):
        phi = people.phi[feature][members]
        for name in PARTITIONS if feature == "poi" else PARTITIONS[:-1]:
            nominal = nominal_partition(name, people.groups, seed)
            region = assign(people.group[members], nominal, seed)
            cases = {name: region}
            if name == "hot16":
                cases[SHUFFLED + name] = _shuffled(region, rng)
            for case, where in cases.items():
                regions = _regions(
                    people, phi, members, region, where, nominal.regions, randomised=True
                )
                rows.append(
                    {"partition": case, "feature": feature, "seed": seed}
                    | judge(regions, truth[feature])
                )
    phi = people.phi["category"][members]
    lives = people.district[members]
    names = [str(number) for number in range(int(people.district.max()) + 1)]
    for case, where in {"districts": lives, SHUFFLED + "districts": _shuffled(lives, rng)}.items():
        half = np.arange(panel) < panel // 2
        first, second = np.where(half, where, -1), np.where(half, -1, where)
        sizes = [np.bincount(part[part >= 0], minlength=len(names)) for part in (first, second)]
        kept = np.flatnonzero(np.minimum(*sizes) >= 2)
        number = np.full(len(names) + 1, -1)
        number[kept] = np.arange(len(kept))
        regions = _regions(
            people,
            phi,
            members,
            number[first],
            number[second],
            [names[code] for code in kept],
            randomised=False,
        )
        rows.append(
            {"partition": case, "feature": "category", "seed": seed}
            | judge(regions, truth["category"])
        )
    return rows


def group_truth(phi: sparse.csr_array, group: Ints, groups: Groups) -> Truth:
    """Means of groups and their standard errors."""
    found = aggregate(phi, group, groups.names)
    squares = aggregate(sparse.csr_array(phi.multiply(phi)), group, groups.names).values
    variance = np.maximum(squares - found.values**2, 0)
    return Truth(found.values, np.sqrt(variance / np.maximum(found.n - 1, 1)[:, None]))


def judge(regions: Regions, truth: Truth) -> dict[str, Any]:
    """Errors of all methods, and the share of the truth inside the intervals of ours."""
    recovered = recover(regions)
    return {
        "error": recovery_error(recovered.means, truth),
        "baseline": recovery_error(np.tile(recovered.baseline, (len(truth.means), 1)), truth),
        "pseudo_inverse": recovery_error(recover(regions, "least-squares").means, truth),
        "simplex": recovery_error(recover(regions, "simplex").means, truth),
        "coverage": coverage(recovered, truth),
        "variances": recovered.variances,
    }


def recovery_error(means: Floats, truth: Truth) -> float:
    """Root of the mean over groups of sum_j (difference_j^2 / mean_j)."""
    return float(np.sqrt((((means - truth.means) ** 2) / truth.scale).sum(1).mean()))


def coverage(recovered: Recovery, truth: Truth) -> float:
    """The share of true means inside their intervals, bins weighted by their mean; the truth is a sample too."""
    reach = special.ndtri(0.5 + LEVEL / 2) * np.hypot(recovered.sd, truth.standard_error)
    inside = np.abs(recovered.means - truth.means) <= reach  # (groups, bins)
    return float(np.average(inside.mean(0), weights=truth.means.mean(0)))


def summarise(found: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row a partition and feature: averages over seeds, and in how many of them recovery won."""
    rows = []
    for key in dict.fromkeys((row["partition"], row["feature"]) for row in found):
        of = [row for row in found if (row["partition"], row["feature"]) == key]
        ratio = np.array([row["error"] / row["baseline"] for row in of])
        mean = {
            name: round(float(np.mean([row[name] for row in of])), 4)
            for name in ("error", "baseline", "pseudo_inverse", "simplex", "coverage")
        }
        rows.append(
            {"partition": key[0], "feature": key[1], "seeds": len(of)}
            | mean
            | {
                "wins": int((ratio < 1).sum()),
                "ratio": round(float(ratio.mean()), 4),
                "worst_ratio": round(float(ratio.max()), 4),
                "coverage_by_seed": [round(row["coverage"], 3) for row in of],
                "ratio_by_seed": [round(float(value), 4) for value in ratio],
            }
        )
    return rows


def _regions(
    people: People,
    phi: sparse.csr_array,
    members: Ints,
    counted: Ints,
    observed: Ints,
    names: Sequence[str],
    randomised: bool,
) -> Regions:
    """P from those counted, V from those observed; without the population, so that regions alone are measured."""
    composition = composition_from_labels(people.group[members], counted, people.groups, names)
    return Regions(composition, aggregate(phi, observed, names), randomised)


def _shuffled(region: Ints, rng: np.random.Generator) -> Ints:
    """The same sizes with other people: nothing to learn."""
    shuffled = region.copy()
    placed = np.flatnonzero(region >= 0)
    shuffled[placed] = rng.permutation(region[placed])
    return shuffled
