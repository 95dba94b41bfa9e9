"""Disclosure control: the error of recovered group means when aggregates are protected."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from scipy import sparse

from bench.recovery import (
    CityPeople,
    Truth,
    coverage,
    group_truth,
    recovery_error,
    simulate_people,
)
from bench.runner import Cell, Command, Experiment, Runner
from bench.summary import write_result
from mobatlas.config import CityConfig
from mobatlas.data.types import Ints
from mobatlas.regions.aggregates import aggregate
from mobatlas.regions.composition import composition_from_labels
from mobatlas.regions.disclosure import Disclosure, apply_disclosure, clip_visits
from mobatlas.regions.partitions import assign, nominal_partition
from mobatlas.regions.recovery.recover import recover
from mobatlas.regions.types import Aggregates, Population, Regions

USERS = 24_000
PANELS = (3_000, 12_000)  # people behind the aggregates
PARTITIONS = ("demogroups", "hot16")
FEATURES = ("category", "poi")
MAX_VISITS = 60.0  # of a person in a window, fixed before counting: four a day for a fortnight
EPSILONS = (0.1, 0.3, 1.0, 3.0, 10.0)
RULES = {
    "exact": Disclosure(),
    "cells under 10 people hidden": Disclosure(suppress=10),
    "totals rounded to 10 visits": Disclosure(rounding=10.0),
} | {f"epsilon {each:g}": Disclosure(epsilon=each, max_visits=MAX_VISITS) for each in EPSILONS}
KEYS = ("panel", "partition", "feature", "rule")
MEASURE = (
    "error: of recovered group means, 1 is that of the population's mean for everybody; covered: "
    "truth in 90 % error bars; means over seeds. Noise of differential privacy cannot be repeated, "
    "so its rows vary a little"
)
Draw = Callable[[Path, list[dict[str, Any]]], None]  # (image file, rows)


def run(
    experiment: Experiment,
    users: int = USERS,
    panels: Sequence[int] = PANELS,
    draw: Draw | None = None,
) -> dict[str, Any]:
    """Protect the aggregates of a city for each seed, recover its groups, write disclosure.json.

    `draw` draws the rows into disclosure.png.
    """
    command = Command("disclosure")
    inputs = {"users": users, "panels": panels, "rules": RULES}

    def measure(seed: int) -> dict[str, Any]:
        people = simulate_people(experiment.out, CityConfig(users=users), seed)
        return {"rows": [row for panel in panels for row in measure_city(people, panel, seed)]}

    cells = [
        Cell(seed, "disclosure", inputs, partial(measure, seed)) for seed in experiment.numbers
    ]
    results = Runner(experiment, "disclosure", command).run(cells)
    rows = _summarise([row for each in results for row in each["rows"]])
    header = command.header(experiment)
    result = {
        "command": header.pop("command"),
        "users": users,
        "seed": header.pop("seed"),
        "max_visits": MAX_VISITS,
        **header,
        "measure": MEASURE,
        "rows": rows,
    }
    write_result(experiment.out, "disclosure", result)
    if draw is not None:
        draw(experiment.out / "disclosure.png", rows)
    return result


def measure_city(people: CityPeople, panel: int, seed: int) -> list[dict[str, Any]]:
    """Return a row for each feature, partition and rule.

    Regions are computed from `panel` random people, the truth from all others.
    """
    order = np.random.default_rng([seed, 0]).permutation(len(people.group))
    members = order[:panel]
    others = order[panel:]
    rows = []
    for feature in FEATURES:
        phi = people.phi[feature]
        truth = group_truth(phi[others], people.group[others], people.groups)
        for partition in PARTITIONS:
            nominal = nominal_partition(partition, people.groups, seed)
            group = people.group[members]
            region = assign(group, nominal, seed)
            composition = composition_from_labels(group, region, people.groups, nominal.regions)
            panel_phi = _PanelFeatures(phi[members], region, nominal.regions, feature)
            for rule, disclosure in RULES.items():
                aggregates = panel_phi.protect(disclosure)
                regions = Regions(composition, aggregates, randomised=True)
                case = dict(zip(KEYS, (panel, partition, feature, rule), strict=True))
                rows.append(case | _score(regions, truth, phi[members]))
    return rows


@dataclass(frozen=True)
class _PanelFeatures:
    """Features of the people behind the aggregates, and their regions."""

    phi: sparse.csr_array  # (people, bins)
    region: Ints  # (people,)
    regions: Sequence[str]
    feature: str

    def protect(self, disclosure: Disclosure) -> Aggregates:
        """Return aggregates under a rule."""
        limit = disclosure.max_visits
        phi = self.phi if limit is None else clip_visits(self.phi, limit)
        names = tuple(f"{self.feature}:{number}" for number in range(phi.shape[1]))
        exact = aggregate(phi, self.region, self.regions, names)
        return apply_disclosure(exact, phi, self.region, disclosure)


def _score(regions: Regions, truth: Truth, phi: sparse.csr_array) -> dict[str, float]:
    """Return the error relative to the population mean, and the coverage of error bars.

    The population mean comes from trajectories, which disclosure control does not change.
    """
    mean = np.asarray(phi.mean(0)).ravel()  # (bins,)
    aggregates = regions.aggregates
    shares = aggregates.n / aggregates.n.sum() @ regions.composition.shares
    population = Population(shares, mean, float(phi.shape[0]))
    noisy = aggregates.noise is not None
    recovered = recover(replace(regions, population=population) if noisy else regions)
    baseline = recovery_error(np.tile(mean, (len(truth.means), 1)), truth)
    error = recovery_error(recovered.means, truth) / baseline
    return {"error": error, "covered": coverage(recovered, truth)}


def _summarise(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return means over seeds."""
    summary = []
    for key in dict.fromkeys(tuple(row[name] for name in KEYS) for row in rows):
        own = [row for row in rows if tuple(row[name] for name in KEYS) == key]
        mean = {
            name: round(float(np.mean([row[name] for row in own])), 4)
            for name in ("error", "covered")
        }
        by_seed = [round(row["error"], 4) for row in own]
        summary.append(dict(zip(KEYS, key, strict=True)) | mean | {"error_by_seed": by_seed})
    return summary
