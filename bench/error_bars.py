"""Recovered group means against labelled people: their error, coverage, and the gap they close.

Regions differ in more than their people, so recovery takes several precautions. They are added one
by one and measured on validation people. Training people are weighted by recovered means, by means
known from labels, and by residence, and compared with test people. No model sees these
measurements.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
from scipy import sparse, special

from bench.cells import PARTITIONS, Job, SeedFolder
from bench.people import DRAWING, METRICS, WeightedPeople
from bench.recovery import covered
from bench.reweight import RIDGE, person_features
from bench.runner import Cell, Runner
from mobatlas.data.dataset import TrajectoryDataset
from mobatlas.data.types import Floats, Ints
from mobatlas.groups import Groups
from mobatlas.io.manifest import read_manifest
from mobatlas.regions.composition import composition_from_labels, region_codes
from mobatlas.regions.recovery.geography import confounding
from mobatlas.regions.recovery.recover import GROUPS_EXPLAIN, RecoveryOptions, recover
from mobatlas.regions.store import KIND as REGIONS
from mobatlas.regions.store import RegionsFolder, region_of
from mobatlas.regions.types import Recovery
from mobatlas.supervision.evidence import residence_shares, shrunk_shares
from mobatlas.supervision.tilt import fit_tilt

# Weights of training people: means from labels or from recovery, or the groups of
# their home region from the composition or from labels of all people.
KNOWN = "known means"
RECOVERED = "recovered means"
RESIDENCE = "residence"
KNOWN_RESIDENCE = "known residence"
STAGES = (KNOWN, RECOVERED, RESIDENCE, KNOWN_RESIDENCE)
LEVEL = 0.9  # of the error bars
MIN_VISITS = 30.0  # expected visits of test people in a cell that counts
MEASURED = ("coverage", "coverage_of_labels", "error")
NO_LIMIT = 1e6  # groups may explain all variance between regions
# Each adds to the one before: error of the composition; effects of regions, in each feature map;
# a surface over the map with a prior from the whole map; a limit to what groups explain.
PRECAUTIONS: Mapping[str, Mapping[str, Any]] = {
    "none": {"exact_composition": True, "region_effects": False, "geography": False},
    "composition": {"region_effects": False, "geography": False},
    "regions": {"geography": False, "groups_explain": NO_LIMIT},
    "map": {"groups_explain": NO_LIMIT},
    "all": {},
}


def error_bars(
    runner: Runner, folders: Sequence[SeedFolder], jobs: Sequence[Job]
) -> list[dict[str, Any]]:
    """Return a row for each kind of regions: means over seeds, warnings of the first seed."""
    kinds = {job.regions: job for job in jobs}
    dataset = folders[0].dataset

    @cache
    def people() -> WeightedPeople:
        return WeightedPeople.of(dataset)

    def measure(folder: SeedFolder, job: Job) -> dict[str, Any]:
        return _measure(folder, job, people())

    cells = [
        Cell(
            folder.seed,
            f"error-bars-{job.regions}",
            _inputs(folder, job),
            partial(measure, folder, job),
        )
        for job in kinds.values()
        for folder in folders
    ]
    results = runner.run(cells)
    n = len(folders)
    return [_row(job, results[i * n : (i + 1) * n]) for i, job in enumerate(kinds.values())]


def _row(job: Job, cells: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    first = cells[0]
    row: dict[str, Any] = {
        "partition": job.partition,
        "features": list(job.features),
        "census": job.census,
        "shuffled": job.shuffled,
        "labelled": job.labelled,
        **{name: _mean([cell[name] for cell in cells]) for name in MEASURED},
        "cells": first["cells"],
        "said": first["said"],
        "people": {
            stage: {
                metric: _mean([cell["people"][stage][metric] for cell in cells])
                for metric in METRICS
            }
            for stage in first["people"]
        },
    }
    if job.partition not in PARTITIONS:
        row["precautions"] = {
            name: _mean([cell["precautions"][name] for cell in cells]) for name in PRECAUTIONS
        }
    return row


def _inputs(folder: SeedFolder, job: Job) -> dict[str, Any]:
    return {
        "dataset": folder.dataset.manifest.content_hash,
        "regions": read_manifest(folder.regions(job), REGIONS).content_hash,
        "level": LEVEL,
        "min_visits": MIN_VISITS,
        "metrics": METRICS,
        "ridge": RIDGE,
        "precautions": PRECAUTIONS,
        "people": DRAWING,
        "stages": STAGES,
        "groups_explain": GROUPS_EXPLAIN,
        **_assumptions(folder),
    }


def _assumptions(folder: SeedFolder) -> dict[str, Any]:
    """Return the options of recovery that the models of this folder use."""
    values = folder.setup.values
    return {name: value for name, value in values.items() if name == "groups_explain"}


def _measure(folder: SeedFolder, job: Job, people: WeightedPeople) -> dict[str, Any]:
    dataset = folder.dataset
    regions_folder = RegionsFolder.open(folder.regions(job))
    regions = regions_folder.regions
    phi = person_features(dataset, regions)  # (people, features)

    def recover_with(assumptions: Mapping[str, Any]) -> Recovery:
        options = RecoveryOptions(**{**_assumptions(folder), **assumptions})
        parents = dataset.vocabulary.parents
        return recover(regions, parents=parents, options=options, quiet=True)

    recovery = recover_with({})
    train = GroupSample.of(dataset, phi, "train")
    known = train.means
    result: dict[str, Any] = {
        "error": relative_error(recovery, known),
        **coverage(recovery, train, GroupSample.of(dataset, phi, "test")),
        "said": confounding(recovery),
    }
    members = np.intersect1d(dataset.split_people("train"), dataset.person)
    means = {KNOWN: np.where(np.isnan(known), recovery.means, known), RECOVERED: recovery.means}
    weights = {stage: _tilt_weights(phi[members], each) for stage, each in means.items()}
    if job.partition not in PARTITIONS:
        names = regions.composition.regions
        region = region_of(dataset, members, regions_folder.assignment, names)
        if region is not None:
            weights[RESIDENCE] = residence_shares(shrunk_shares(regions), region)
            weights[KNOWN_RESIDENCE] = known_residence(names, region, people.group, regions.groups)
    result["people"] = {stage: people.gap_closed(each) for stage, each in weights.items()}
    if job.partition not in PARTITIONS:
        validation = GroupSample.of(dataset, phi, "val").means
        result["precautions"] = {
            name: relative_error(recover_with(assumptions), validation)
            for name, assumptions in PRECAUTIONS.items()
        }
    return result


def known_residence(regions: Sequence[str], region: Ints, group: Ints, groups: Groups) -> Floats:
    """Return the shares of groups among labelled people of the same region, (people, groups).

    People without a region or label have the shares of all people.
    """
    names = np.array([*regions, None], dtype=object)[region]
    names[group < 0] = None
    shares = composition_from_labels(group, names, groups).shares
    return residence_shares(shares, region_codes(names)[0])


def relative_error(recovery: Recovery, truth: Floats) -> float | None:
    """Return the distance of recovered means to the truth (groups, features).

    1 is the distance of the population mean. Groups of NaN do not count.
    """
    scale = np.sqrt(np.maximum(recovery.baseline, 1e-6))
    known = ~np.isnan(truth).any(1)
    if not known.any():
        return None
    error = float(np.linalg.norm(((recovery.means - truth) / scale)[known]))
    baseline = float(np.linalg.norm(((recovery.baseline - truth) / scale)[known]))
    return error / max(baseline, 1e-12)


@dataclass(frozen=True)
class GroupSample:
    """People of a split by group: their number, means and variances."""

    n: Floats  # (groups,)
    means: Floats  # (groups, features), NaN for a group without people
    variance: Floats  # (groups, features) between people

    @classmethod
    def of(cls, dataset: TrajectoryDataset, phi: sparse.csr_array, split: str) -> GroupSample:
        """Average phi (people, features) over the people of a split."""
        people = np.intersect1d(dataset.split_people(split), dataset.person)
        group = dataset.person_groups()
        assert dataset.groups is not None  # regions need groups
        members = [people[group[people] == number] for number in range(len(dataset.groups))]
        means = np.stack([_mean_of(phi[rows]) for rows in members])
        squares = np.stack([_mean_of(phi[rows].multiply(phi[rows])) for rows in members])
        n = np.array([float(len(rows)) for rows in members])
        return cls(n, means, np.maximum(squares - means**2, 0))


def coverage(recovery: Recovery, train: GroupSample, test: GroupSample) -> dict[str, Any]:
    """Return how often error bars, and bars from labels, contain the means of test people.

    An error bar describes a group, and test people are a sample of it, so bars are widened by their
    sampling error. Training people are unsuitable: recovery smooths their means. Only cells with
    `MIN_VISITS` expected visits of test people count. Places are in the vocabulary because training
    people visit them often, and test people visit them less. So even bars around labelled training
    means are below their level.
    """
    with np.errstate(divide="ignore", invalid="ignore"):  # a group may have no people
        sampling_error = train.variance / test.n[:, None]
        known = recovery.baseline * test.n[:, None] >= MIN_VISITS
        known &= ~np.isnan(test.means) & ~np.isnan(train.means)
        of_labels = train.variance / train.n[:, None] + sampling_error
        z = special.ndtri(0.5 + LEVEL / 2)
        inside = {
            "coverage": covered(recovery, test.means, sampling_error, LEVEL),
            "coverage_of_labels": np.abs(test.means - train.means) <= z * np.sqrt(of_labels),
        }
    shares: dict[str, Any] = {
        name: float(each[known].mean()) if known.any() else None for name, each in inside.items()
    }
    return shares | {"cells": int(known.sum())}


def _mean_of(phi: sparse.csr_array) -> Floats:
    if not phi.shape[0]:
        return np.full(phi.shape[1], np.nan)
    return np.asarray(phi.mean(0)).ravel()


def _tilt_weights(phi: sparse.csr_array, means: Floats) -> Floats:
    """Return weights (people, groups) so that weighted people have the means of each group."""
    return np.stack([fit_tilt(phi, mean, RIDGE).weights for mean in means], axis=1)


def _mean(values: Sequence[float | None]) -> float | None:
    """Return the mean, or None if a value is None."""
    known = [value for value in values if value is not None]
    return round(float(np.mean(known)), 4) if len(known) == len(values) else None
