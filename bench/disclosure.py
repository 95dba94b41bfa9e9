"""Disclosure control against quality: how near recovered group means stay to the truth as aggregates tell less of a person."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from scipy import sparse

from bench.recovery import People, Truth, coverage, group_truth, recovery_error, simulate_people
from bench.summary import write_result
from mobatlas.config import CityConfig
from mobatlas.io.manifest import library_versions
from mobatlas.io.output import new_folder
from mobatlas.progress import SILENT, Tracker
from mobatlas.regions.aggregates import aggregate
from mobatlas.regions.composition import composition_from_labels
from mobatlas.regions.disclosure import Disclosure, apply_disclosure, clip_visits
from mobatlas.regions.partitions import assign, nominal_partition
from mobatlas.regions.recovery.recover import recover
from mobatlas.regions.types import Population, Regions

USERS = 24_000
PANELS = (3_000, 12_000)  # people behind the aggregates
PARTITIONS = ("demogroups", "hot16")
FEATURES = ("category", "poi")
MAX_VISITS = (
    60.0  # of a person in a window, chosen before anything was counted: four a day for a fortnight
)
EPSILONS = (0.1, 0.3, 1.0, 3.0, 10.0)
RULES = {
    "exact": Disclosure(),
    "cells under 10 people hidden": Disclosure(suppress=10),
    "totals rounded to 10 visits": Disclosure(rounding=10.0),
} | {f"epsilon {each:g}": Disclosure(epsilon=each, max_visits=MAX_VISITS) for each in EPSILONS}


def run(
    out: Path,
    seeds: int = 3,
    first_seed: int = 0,
    *,
    users: int = USERS,
    panels: Sequence[int] = PANELS,
    draw: Callable[[Path, list[dict[str, Any]]], None] | None = None,
    overwrite: bool = False,
    tracker: Tracker = SILENT,
) -> dict[str, Any]:
    """Simulate a city a seed, show its aggregates under every rule, recover groups from them, and write disclosure.json.

    `draw` makes disclosure.png of the rows.
    """
    config = {"seeds": seeds, "first_seed": first_seed, "users": users, "panels": list(panels)}
    with new_folder(
        out, "benchmark", seed=first_seed, config=config, overwrite=overwrite
    ) as folder:
        found: list[dict[str, Any]] = []
        for seed in range(first_seed, first_seed + seeds):
            tracker.step(seed - first_seed, f"seed {seed}")
            with tempfile.TemporaryDirectory(dir=folder.scratch()) as scratch:
                people = simulate_people(Path(scratch), CityConfig(users=users), seed)
            for panel in panels:
                found += _one_city(people, panel, seed)
        result = {
            "command": f"python -m bench disclosure --seeds {seeds} --first-seed {first_seed} --out {out.name}",
            "users": users,
            "seed": first_seed,
            "max_visits": MAX_VISITS,
            "versions": library_versions(),
            "measure": "error: of recovered group means, 1 is that of the population's mean for everybody; covered: truth in "
            "90 % error bars; means over seeds. Noise of differential privacy cannot be repeated, so its rows vary a little",
            "rows": _summarised(found),
        }
        write_result(folder.path, "disclosure", result)
        if draw is not None:
            draw(folder.path / "disclosure.png", _summarised(found))
    tracker.step(seeds, "done")
    return result


def _one_city(people: People, panel: int, seed: int) -> list[dict[str, Any]]:
    order = np.random.default_rng([seed, 0]).permutation(len(people.group))
    members, others = order[:panel], order[panel:]
    rows = []
    for feature in FEATURES:
        phi = people.phi[feature]
        truth = group_truth(phi[others], people.group[others], people.groups)
        for partition in PARTITIONS:
            nominal = nominal_partition(partition, people.groups, seed)
            region = assign(people.group[members], nominal, seed)
            composition = composition_from_labels(
                people.group[members], region, people.groups, nominal.regions
            )
            for rule, disclosure in RULES.items():
                seen = (
                    phi[members]
                    if disclosure.max_visits is None
                    else clip_visits(phi[members], disclosure.max_visits)
                )
                names = tuple(f"{feature}:{number}" for number in range(phi.shape[1]))
                shown = apply_disclosure(
                    aggregate(seen, region, nominal.regions, names), seen, region, disclosure
                )
                found = _judged(Regions(composition, shown, randomised=True), truth, phi[members])
                rows.append(
                    {"panel": panel, "partition": partition, "feature": feature, "rule": rule}
                    | found
                )
    return rows


def _judged(regions: Regions, truth: Truth, phi: sparse.csr_array) -> dict[str, float]:
    """What everybody does is known from trajectories, whatever is done to aggregates: supervision has them."""
    mean, v = np.asarray(phi.mean(0)).ravel(), regions.aggregates
    everybody = Population(v.n / v.n.sum() @ regions.composition.shares, mean, float(phi.shape[0]))
    recovered = recover(regions if v.noise is None else replace(regions, population=everybody))
    error = recovery_error(recovered.means, truth) / recovery_error(
        np.tile(mean, (len(truth.means), 1)), truth
    )
    return {"error": error, "covered": coverage(recovered, truth)}


def _summarised(found: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Means over seeds."""
    keys = ("panel", "partition", "feature", "rule")
    rows = []
    for key in dict.fromkeys(tuple(row[name] for name in keys) for row in found):
        of = [row for row in found if tuple(row[name] for name in keys) == key]
        mean = {
            name: round(float(np.mean([row[name] for row in of])), 4)
            for name in ("error", "covered")
        }
        by_seed = [round(row["error"], 4) for row in of]
        rows.append(dict(zip(keys, key, strict=True)) | mean | {"error_by_seed": by_seed})
    return rows
