"""Controlled partitions, and the assignment of people to regions.

A partition is a nominal P: the paper's matrices (appendix, "Partition construction matrices"),
hot16, random ones or a table. People are assigned at random to match it. Functions on people take
the region number of each person, -1 for none.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy import optimize, sparse

from mobatlas.data.dataset import TrajectoryDataset
from mobatlas.data.types import Flags, Floats, Ints
from mobatlas.errors import MobatlasError, suggestion
from mobatlas.groups import Groups
from mobatlas.regions.composition import read_composition
from mobatlas.regions.types import Composition

# As printed in the paper, six decimals; columns are the default groups in order.
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
ROUNDING = 1e-6  # of the linear program
STREAMS = {"halves": 1, "shuffle": 2, "train": 3, "val": 4, "labelled": 5}  # random streams by use


def nominal_partition(name: str, groups: Groups, seed: int = 0) -> Composition:
    """The nominal P of a partition: one of `PARTITIONS`, or a composition table by its path."""
    if name == "demogroups":
        shares = np.eye(len(groups))
    elif name in PAPER:
        if len(groups) != len(PAPER[name]):
            raise MobatlasError(
                f"--partition {name}: the paper's matrix has 8 groups, your data has "
                f"{len(groups)}; choose demogroups, hot16, dirichlet:G:alpha or your own table"
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
        raise MobatlasError(
            f"--partition {name} does not exist{suggestion(name, PARTITIONS)} "
            f"(known: {', '.join(PARTITIONS)}, or the path of a table)"
        )
    regions = tuple(f"R{number + 1}" for number in range(len(shares)))
    return Composition(groups, regions, shares, np.full(len(shares), np.inf))


def assign(groups_of_people: Ints, nominal: Composition, seed: int) -> Ints:
    """A region (people,) for each person at random within the group.

    Surplus people and people without a group (-1) get -1. Every cell is less than one person off
    the nominal composition. Sizes make the smallest region as large as possible, then use as many
    people as possible.
    """
    members = [np.flatnonzero(groups_of_people == group) for group in range(len(nominal.groups))]
    available = np.array([len(people) for people in members])  # (groups,)
    counts = _whole_people(nominal, available)  # (regions, groups)
    region = np.full(len(groups_of_people), -1, dtype=np.int64)
    rng = np.random.default_rng([seed, len(nominal.regions)])
    for group, people in enumerate(members):
        regions = np.repeat(np.arange(len(counts)), counts[:, group])
        region[rng.permutation(people)[: len(regions)]] = regions
    return region


def derive_seed(seed: int, use: str) -> int:
    """An independent seed for each use."""
    return int(np.random.SeedSequence([seed, STREAMS[use]]).generate_state(1)[0])


def first_half(dataset: TrajectoryDataset, seed: int) -> Flags:
    """A random half of the people (people,), which depends only on each user id."""
    salt = derive_seed(seed, "halves")
    digests = (
        hashlib.md5(f"{salt}:{user}".encode(), usedforsecurity=False)
        for user in dataset.people["user_id"].to_pylist()
    )
    return np.array([digest.digest()[0] < 128 for digest in digests])


def shuffle_people(region: Ints, splits: Sequence[Ints], seed: int) -> Ints:
    """Exchange people between regions within each split; region sizes stay."""
    rng = np.random.default_rng(derive_seed(seed, "shuffle"))
    shuffled = region.copy()
    for members in splits:
        shuffled[members] = rng.permutation(region[members])
    return shuffled


def restrict(region: Ints, people: Any) -> Ints:
    """The regions of some people, -1 for all others."""
    restricted = np.full(len(region), -1, dtype=np.int64)
    restricted[people] = region[people]
    return restricted


def renumber(names: Sequence[str], keep: Ints) -> tuple[tuple[str, ...], Ints]:
    """The names of some regions, and the new number of each old one; the last is for -1."""
    number = np.full(len(names) + 1, -1, dtype=np.int64)
    number[keep] = np.arange(len(keep))
    return tuple(names[code] for code in keep.tolist()), number


def region_sizes(region: Ints, regions: int) -> Ints:
    """The number of people of each region."""
    return np.bincount(region[region >= 0], minlength=regions)


def _hot(groups: int) -> Floats:
    """Regions with mostly one group each, then balanced pairs of neighbours."""
    eye = np.eye(groups)
    hot = HOT_SHARE * eye + (1 - HOT_SHARE) / max(groups - 1, 1) * (1 - eye)
    shares = np.concatenate([hot, (eye + np.roll(eye, 1, axis=1)) / 2])
    return np.asarray(shares / shares.sum(1, keepdims=True))  # (2 groups, groups)


def _dirichlet(name: str, groups: int, seed: int) -> Floats:
    try:
        _, regions, alpha = name.split(":")
        if int(regions) < 1 or not 0 < float(alpha) < np.inf:
            raise ValueError
    except ValueError:
        raise MobatlasError(
            f"--partition {name}: write dirichlet:G:alpha with G regions and a positive alpha, "
            "for example dirichlet:40:0.5"
        ) from None
    rng = np.random.default_rng(seed)
    return np.asarray(rng.dirichlet(np.full(groups, float(alpha)), size=int(regions)))


def _whole_people(nominal: Composition, available: Ints) -> Ints:
    """Numbers of people (regions, groups) that realise a nominal composition."""
    shares = nominal.shares
    lacking = (shares > 0) & (available == 0)
    if lacking.any():
        region, group = np.argwhere(lacking)[0]
        raise MobatlasError(
            f"--partition: region '{nominal.regions[region]}' needs people of "
            f"'{nominal.groups.names[group]}', but the data has none; choose another partition "
            "or use more data"
        )
    ideal = np.floor(_nominal_sizes(shares, available) + ROUNDING)
    for fewer in range(3):  # rounding in the linear program may yield one person too many
        sizes = ideal - fewer
        if sizes.min() < 1:
            break
        counts = _round_counts(sizes[:, None] * shares, sizes, available)
        if counts is not None:
            return counts
    raise MobatlasError(
        f"--partition: {available.sum():,} people with known groups are too few: region "
        f"'{nominal.regions[int(np.argmin(ideal))]}' would be empty; choose a partition with fewer "
        "regions or use more data"
    )


def _nominal_sizes(shares: Floats, available: Ints) -> Floats:
    """Sizes N_g with sum_g N_g P_gd <= available_d: the smallest as large as possible, then all."""
    demand = shares.sum(0)  # (groups,) by regions of one person each
    # If any sizes are feasible, equal sizes as large as their smallest are feasible too.
    smallest = float((available[demand > 0] / demand[demand > 0]).min())
    constraints: Any = sparse.csr_array(shares.T)  # (groups, regions)
    solution = optimize.linprog(
        -np.ones(len(shares)),
        A_ub=constraints,
        b_ub=available,
        bounds=(smallest * (1 - 1e-9), None),
    )
    if not solution.success:
        return np.full(len(shares), smallest)
    return np.asarray(solution.x, dtype=np.float64)  # (regions,)


def _round_counts(quota: Floats, sizes: Floats, available: Ints) -> Ints | None:
    """Round each cell down or up; rows sum to `sizes`, columns stay within `available`.

    Rows and columns form a flow, whose linear program has integer solutions. The chosen one rounds
    up the largest remainders.
    """
    down = np.floor(quota + 1e-9)
    row, column = np.nonzero(quota - down > 1e-9)  # the cells to round
    counts = down.astype(np.int64)
    if len(row):
        cell = np.arange(len(row))
        ones = np.ones(len(row))
        in_row: Any = sparse.csr_array((ones, (row, cell)), shape=(len(quota), len(row)))
        in_column: Any = sparse.csr_array((ones, (column, cell)), shape=(len(available), len(row)))
        solution = optimize.linprog(
            -(quota - down)[row, column],
            A_ub=in_column,
            b_ub=available - down.sum(0),
            A_eq=in_row,
            b_eq=sizes - down.sum(1),
            bounds=(0, 1),
            method="highs-ds",  # the simplex method ends in a vertex, that is in whole people
        )
        if not solution.success:
            return None
        counts[row, column] += np.rint(np.asarray(solution.x, dtype=np.float64)).astype(np.int64)
    return counts if (counts.sum(0) <= available).all() else None
