"""Controlled partitions: the paper's four matrices, hot16 and others as nominal P, and people assigned at random to match."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import optimize, sparse

from mobatlas.errors import MobatlasError, suggestion
from mobatlas.groups import Groups
from mobatlas.regions.composition import read_composition
from mobatlas.regions.types import Composition, Floats

# As printed in the paper (appendix, "Partition construction matrices"), six decimals; columns are the default groups in order.
PAPER = {
    "fullrank": (
        (0.000000, 0.000000, 0.000000, 0.500101, 0.499899, 0.000000, 0.000000, 0.000000),
        (0.000000, 0.000000, 0.500101, 0.000000, 0.000000, 0.000000, 0.000000, 0.499899),
        (0.000000, 0.500101, 0.000000, 0.000000, 0.000000, 0.000000, 0.499899, 0.000000),
        (0.500101, 0.000000, 0.000000, 0.000000, 0.000000, 0.499899, 0.000000, 0.000000),
        (0.500101, 0.000000, 0.000000, 0.499899, 0.000000, 0.000000, 0.000000, 0.000000),
        (0.000000, 0.000000, 0.500101, 0.000000, 0.000000, 0.499899, 0.000000, 0.000000),
        (0.000000, 0.500101, 0.000000, 0.000000, 0.499899, 0.000000, 0.000000, 0.000000),
        (0.000000, 0.000000, 0.000000, 0.000000, 0.000000, 0.000000, 0.500101, 0.499899),
    ),
    "rankdef": (
        (0.500000, 0.000000, 0.000000, 0.500000, 0.000000, 0.000000, 0.000000, 0.000000),
        (0.000000, 0.500000, 0.000000, 0.000000, 0.500000, 0.000000, 0.000000, 0.000000),
        (0.000000, 0.000000, 0.500000, 0.000000, 0.000000, 0.000000, 0.000000, 0.500000),
        (0.000000, 0.000000, 0.000000, 0.000000, 0.000000, 0.500000, 0.500000, 0.000000),
        (0.500000, 0.000000, 0.000000, 0.000000, 0.000000, 0.500000, 0.000000, 0.000000),
        (0.000000, 0.000000, 0.000000, 0.500000, 0.000000, 0.000000, 0.500000, 0.000000),
        (0.125130, 0.125130, 0.125130, 0.125130, 0.124870, 0.124870, 0.124870, 0.124870),
        (0.299948, 0.100156, 0.000000, 0.250000, 0.099896, 0.150104, 0.099896, 0.000000),
    ),
    "messy": (
        (0.250000, 0.250000, 0.250000, 0.250000, 0.000000, 0.000000, 0.000000, 0.000000),
        (0.200000, 0.000000, 0.200000, 0.200000, 0.200000, 0.200000, 0.000000, 0.000000),
        (0.000000, 0.000000, 0.000000, 0.250000, 0.250000, 0.250000, 0.250000, 0.000000),
        (0.000000, 0.200000, 0.200000, 0.000000, 0.000000, 0.200000, 0.200000, 0.200000),
        (0.225000, 0.125000, 0.225000, 0.225000, 0.100000, 0.100000, 0.000000, 0.000000),
        (0.000000, 0.100000, 0.100000, 0.125000, 0.125000, 0.225000, 0.225000, 0.100000),
        (0.140000, 0.060000, 0.200000, 0.140000, 0.140000, 0.200000, 0.060000, 0.060000),
        (0.150000, 0.150000, 0.150000, 0.250000, 0.100000, 0.100000, 0.100000, 0.000000),
    ),
}
PARTITIONS = ("demogroups", *PAPER, "hot16", "dirichlet:G:alpha")
HOT_SHARE = 0.85  # of one group in each of the first regions of hot16
ROUNDING = 1e-6  # of the linear programme


def nominal_partition(name: str, groups: Groups, seed: int = 0) -> Composition:
    """The P that a partition aims at: one of `PARTITIONS`, or a composition table by its path."""
    if name == "demogroups":
        shares = np.eye(len(groups))
    elif name in PAPER:
        if len(groups) != len(PAPER[name]):
            raise MobatlasError(
                f"--partition {name}: the paper's matrix is for 8 groups, these are {len(groups)}; choose demogroups, hot16, "
                "dirichlet:G:alpha or a table of your own"
            )
        shares = np.array(PAPER[name])
        shares /= shares.sum(1, keepdims=True)
    elif name == "hot16":
        shares = _hot(len(groups))
    elif name.startswith("dirichlet"):
        shares = _dirichlet(name, len(groups), seed)
    elif Path(name).suffix or Path(name).exists():
        return read_composition(Path(name), groups)
    else:
        known = ", ".join(PARTITIONS)
        raise MobatlasError(
            f"--partition {name} does not exist{suggestion(name, PARTITIONS)} (known: {known}, or the path of a table)"
        )
    regions = tuple(f"R{number + 1}" for number in range(len(shares)))
    return Composition(groups, regions, shares, np.full(len(shares), np.inf))


def assign(
    groups_of_people: npt.NDArray[np.int64], nominal: Composition, seed: int
) -> npt.NDArray[np.int64]:
    """A region for each person, at random within the group; -1 for surplus people and those without a group (-1).

    The composition comes as near to the nominal one as whole people allow, less than one person off in every cell. Sizes
    make the smallest region as large as possible, then use as many people as possible.
    """
    members = [np.flatnonzero(groups_of_people == group) for group in range(len(nominal.groups))]
    available = np.array([len(people) for people in members])  # (groups,)
    counts = _whole_people(nominal, available)  # (regions, groups)
    region = np.full(len(groups_of_people), -1, dtype=np.int64)
    rng = np.random.default_rng([seed, len(nominal.regions)])
    for group, people in enumerate(members):
        dealt = np.repeat(np.arange(len(counts)), counts[:, group])
        region[rng.permutation(people)[: len(dealt)]] = dealt
    return region  # (people,)


def _hot(groups: int) -> Floats:
    """Regions with mostly one group each, then balanced pairs of neighbours."""
    eye = np.eye(groups)
    hot = HOT_SHARE * eye + (1 - HOT_SHARE) / max(groups - 1, 1) * (1 - eye)
    pairs = (eye + np.roll(eye, 1, axis=1)) / 2
    shares = np.concatenate([hot, pairs])
    return np.asarray(shares / shares.sum(1, keepdims=True))  # (2 groups, groups)


def _dirichlet(name: str, groups: int, seed: int) -> Floats:
    try:
        _, regions, alpha = name.split(":")
        if int(regions) < 1 or not 0 < float(alpha) < np.inf:
            raise ValueError
    except ValueError:
        raise MobatlasError(
            f"--partition {name}: write it as dirichlet:G:alpha, G regions and a positive alpha (dirichlet:40:0.5)"
        ) from None
    draws = np.random.default_rng(seed).dirichlet(np.full(groups, float(alpha)), size=int(regions))
    return np.asarray(draws)


def _whole_people(nominal: Composition, available: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    shares = nominal.shares
    lacking = (shares > 0) & (available == 0)
    if lacking.any():
        region, group = np.argwhere(lacking)[0]
        raise MobatlasError(
            f"--partition: region '{nominal.regions[region]}' needs people of '{nominal.groups.names[group]}', and there are "
            "none; choose another partition or larger data"
        )
    ideal = np.floor(_region_sizes(shares, available) + ROUNDING)
    for fewer in range(3):  # the programme's own rounding may have promised one person too many
        sizes = ideal - fewer
        if sizes.min() < 1:
            break
        counts = _rounded(sizes[:, None] * shares, sizes, available)
        if counts is not None:
            return counts
    smallest = nominal.regions[int(np.argmin(ideal))]
    raise MobatlasError(
        f"--partition: {available.sum():,} people with known groups are too few, region '{smallest}' would be empty; choose a "
        "partition with fewer regions or larger data"
    )


def _region_sizes(shares: Floats, available: npt.NDArray[np.int64]) -> Floats:
    """Sizes N_g with sum_g N_g P_gd <= available_d: the smallest as large as possible, then the total."""
    asked = shares.sum(0)  # (groups,) by regions of one person each
    # Where some sizes will do, all as large as the smallest of them will.
    smallest = float((available[asked > 0] / asked[asked > 0]).min())
    demand: Any = sparse.csr_array(shares.T)  # (groups, regions)
    regions, least = len(shares), smallest * (1 - 1e-9)
    total = optimize.linprog(-np.ones(regions), A_ub=demand, b_ub=available, bounds=(least, None))
    return np.asarray(
        total.x if total.success else np.full(regions, smallest), dtype=np.float64
    )  # (regions,)


def _rounded(
    quota: Floats, sizes: Floats, available: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64] | None:
    """Whole people beside fractional ones: each cell rounded down or up, rows sum to `sizes`, columns stay available.

    Rows and columns make a flow, whose programme has whole solutions: among them the one that rounds up the largest remainders.
    """
    down = np.floor(quota + 1e-9)
    row, column = np.nonzero(quota - down > 1e-9)  # the cells to round
    counts = down.astype(np.int64)
    if len(row):
        each = np.arange(len(row))
        in_row: Any = sparse.csr_array(
            (np.ones(len(row)), (row, each)), shape=(len(quota), len(row))
        )
        in_column: Any = sparse.csr_array(
            (np.ones(len(row)), (column, each)), shape=(len(available), len(row))
        )
        solution = optimize.linprog(
            -(quota - down)[row, column],
            A_ub=in_column,
            b_ub=available - down.sum(0),
            A_eq=in_row,
            b_eq=sizes - down.sum(1),
            bounds=(0, 1),
            method="highs-ds",  # the simplex method ends in a corner, that is in whole people
        )
        if not solution.success:
            return None
        counts[row, column] += np.rint(np.asarray(solution.x, dtype=np.float64)).astype(np.int64)
    return counts if (counts.sum(0) <= available).all() else None
