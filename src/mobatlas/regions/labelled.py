"""Labelled people: the mean counts of each group among people whose attributes are known.

A labelled person of group d is an observation of row d of M without regional confounding.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from mobatlas.data.arrays import Floats, Ints
from mobatlas.data.dataset import TrajectoryDataset
from mobatlas.errors import MobatlasError
from mobatlas.features.maps import FeatureMap
from mobatlas.groups import Groups
from mobatlas.regions.aggregates import aggregates_from_dataset
from mobatlas.regions.partitions import derive_seed, renumber
from mobatlas.regions.types import Aggregates, GroupEvidence, Regions, population_mean

NAME = "labelled people"
MIN_PEOPLE = 2  # of a group: one person has no variance
MIN_EXPECTED = 5.0  # people in a cell of a chi-square test; smaller cells are merged
SIGNIFICANT = 0.001  # p-value of a difference that is reported
CLEAR = 0.1  # share of people that would have to move; smaller differences are not reported


@dataclass(frozen=True)
class Labelled:
    """Evidence from labelled people, and what to report about it."""

    evidence: GroupEvidence
    notes: list[str]
    warnings: list[str]


def sample_labelled(dataset: TrajectoryDataset, n: int, seed: int) -> Ints:
    """The groups (people,) of n random labelled training people, -1 for all others.

    The order in which people are drawn does not depend on labels, so that labels of people who are
    not drawn have no influence.
    """
    if dataset.groups is None or dataset.labels() is None:
        raise MobatlasError(f"--labelled-sample {n}: {dataset.path} has no labels to draw from")
    group = dataset.person_groups()
    people = np.intersect1d(dataset.split_people("train"), dataset.person)
    order = np.random.default_rng(derive_seed(seed, "labelled")).permutation(people)
    order = order[group[order] >= 0]
    if not 0 < n <= len(order):
        raise MobatlasError(
            f"--labelled-sample {n}: give a number from 1 to {len(order):,}, the labelled training "
            f"people of {dataset.path}"
        )
    drawn = np.full(len(group), -1, dtype=np.int64)
    drawn[order[:n]] = group[order[:n]]
    return drawn


def evidence_of_people(
    dataset: TrajectoryDataset, group: Ints, maps: Sequence[FeatureMap], regions: Regions
) -> Labelled:
    """Means of labelled training people of the dataset.

    `group` (people,) has group numbers, -1 for people without a known label.
    """
    number, rows, notes = _counted_groups(group, regions.groups)
    means = aggregates_from_dataset(dataset, maps, number[group], "train", rows)
    return Labelled(
        _evidence(means, regions.groups), notes, group_warnings(group[group >= 0], regions)
    )


def _counted_groups(group: Ints, groups: Groups) -> tuple[Ints, tuple[str, ...], list[str]]:
    """The row of each group, -1 for groups with too few people; the rows; and a note."""
    people = np.bincount(group[group >= 0], minlength=len(groups))  # (groups,)
    kept = np.flatnonzero(people >= MIN_PEOPLE)
    if not len(kept):
        raise MobatlasError(
            f"{NAME}: no group has {MIN_PEOPLE} labelled people with trajectories; label more "
            "people"
        )
    rows, number = renumber(groups.names, kept)
    single = [groups.names[each] for each in np.flatnonzero(people == 1)]
    notes = [f"{NAME}: {int(people.sum()):,} people of {len(kept)} groups"]
    if single:
        notes.append(f"{NAME}: left out, because the group has one person: {'; '.join(single)}")
    return number, rows, notes


def _evidence(means: Aggregates, groups: Groups) -> GroupEvidence:
    """Evidence from the means of some groups, which are the regions of `means`."""
    rows = [groups.index(name) for name in means.regions]
    return GroupEvidence(
        NAME,
        "labelled",
        np.eye(len(groups))[rows],
        means.features,
        means.values,
        means.n,
        spread=means.spread,
    )


def group_warnings(group: Ints, regions: Regions) -> list[str]:
    """Warnings about groups without labelled people, and about an uneven choice of groups."""
    people = np.bincount(group, minlength=len(regions.groups)).astype(np.float64)
    shares = (
        population_mean(regions.composition.shares, regions.aggregates)[0]
        if regions.population is None
        else regions.population.shares
    )
    absent = [regions.groups.names[each] for each in np.flatnonzero((people == 0) & (shares > 0))]
    warnings = []
    if absent:
        warnings.append(f"no labelled people of {'; '.join(absent)}: other evidence decides there")
    cell = largest_difference(people, shares)
    if cell is not None:
        warnings.append(
            f"the groups of the labelled people differ from the population: "
            f"{people[cell] / people.sum():.0%} are '{regions.groups.names[cell]}', but "
            f"{shares[cell]:.0%} of the population; estimates correct for this if the labelled "
            "people of a group behave as others of that group do"
        )
    return warnings


def region_warnings(labelled: Ints, everyone: Ints, names: Sequence[str]) -> list[str]:
    """A warning if labelled people live in other regions than all people; numbers, -1: unknown."""
    people, others = (
        np.bincount(each[each >= 0], minlength=len(names)).astype(np.float64)
        for each in (labelled, everyone)
    )
    if not people.any():
        return []
    shares = others / others.sum()
    cell = largest_difference(people, shares)
    if cell is None:
        return []
    return [
        f"the labelled people live in other regions than the dataset's people: "
        f"{people[cell] / people.sum():.0%} in '{names[cell]}', but {shares[cell]:.0%} of all; "
        "their behaviour may be that of their regions, so label people everywhere if you can"
    ]


def largest_difference(people: Floats, shares: Floats) -> int | None:
    """The cell with the largest difference from expected shares; None if there is none to report.

    A difference is reported if a chi-square test finds it and if it is not small.
    """
    shares = shares / shares.sum()
    expected = people.sum() * shares
    merged = _merge_small(expected)
    observed, expected = np.bincount(merged, people), np.bincount(merged, expected)
    if len(observed) < 2:
        return None
    distance = np.abs(observed - expected).sum() / 2 / people.sum()
    statistic = ((observed - expected) ** 2 / np.maximum(expected, 1e-300)).sum()
    if distance < CLEAR or stats.chi2.sf(statistic, len(observed) - 1) > SIGNIFICANT:
        return None
    return int(np.argmax(np.abs(people / people.sum() - shares)))


def _merge_small(expected: Floats) -> Ints:
    """The number of the merged cell of each cell; merged cells are neighbours."""
    merged = np.zeros(len(expected), dtype=np.int64)
    cell, total = 0, 0.0
    for number, each in enumerate(expected.tolist()):
        merged[number] = cell
        total += each
        if total >= MIN_EXPECTED:
            cell, total = cell + 1, 0.0
    return np.minimum(merged, max(cell - 1, 0))  # what is left joins the last full cell
