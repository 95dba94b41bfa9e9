"""Regions with known group means: compositions, simulated counts of visits, and errors."""

from __future__ import annotations

import numpy as np

from mobatlas.data.types import Floats
from mobatlas.groups import DEFAULT_GROUPS, Groups
from mobatlas.regions.types import Aggregates, Composition, Recovery, Regions

TWO = Groups.of({"sex": ("M", "F")})
THREE = Groups.of({"age": ("young", "middle", "old")})
FOUR = Groups.of({"age": ("young", "old"), "sex": ("M", "F")})


def regions_of(
    shares: Floats,
    values: Floats,
    n: Floats | float = 1_000.0,
    groups: Groups = DEFAULT_GROUPS,
    *,
    counted: Floats | float = np.inf,
    spread: Floats | None = None,
    noise: Floats | None = None,
    randomised: bool = True,
) -> Regions:
    """Regions with these compositions, aggregates and numbers of people."""
    names = tuple(f"R{number}" for number in range(len(shares)))
    each = np.broadcast_to(np.asarray(n, dtype=np.float64), (len(shares),)).copy()
    people = np.broadcast_to(np.asarray(counted, dtype=np.float64), (len(shares),)).copy()
    bins = tuple(f"category:{number}" for number in range(values.shape[1]))
    aggregates = Aggregates(names, bins, values, each, spread=spread, noise=noise)
    return Regions(Composition(groups, names, shares, people), aggregates, randomised)


def group_means(groups: Groups, bins: int, seed: int, sd: float = 0.3, mean: float = 1.0) -> Floats:
    """M (groups, bins): log-normal around `mean`, half of the variance from the first attribute."""
    rng = np.random.default_rng(seed)
    codes = groups.level_codes[:, 0]
    shared = rng.normal(0, sd / np.sqrt(2), (codes.max() + 1, bins))[codes]
    own = rng.normal(0, sd / np.sqrt(2), (len(groups), bins))
    return np.asarray(mean * np.exp(shared + own))


def simulate(
    shares: Floats,
    n: Floats | float,
    seed: int,
    groups: Groups = DEFAULT_GROUPS,
    *,
    bins: int = 30,
    sd: float = 0.3,
    mean: float = 1.0,
) -> tuple[Regions, Floats]:
    """Regions whose people visit places independently (Poisson), and the means of their groups."""
    means = group_means(groups, bins, seed, sd, mean)
    each = np.broadcast_to(np.asarray(n, dtype=np.float64), (len(shares),))
    expected = shares @ means
    counts = np.random.default_rng([seed, 1]).poisson(expected * each[:, None])
    return regions_of(shares, counts / each[:, None], each, groups), means


def error(means: Floats, truth: Floats) -> float:
    """The root mean square error."""
    return float(np.sqrt(((means - truth) ** 2).mean()))


def baseline_error(recovery: Recovery, truth: Floats) -> float:
    """The error of the population mean as an estimate of every group."""
    return error(np.tile(recovery.baseline, (len(truth), 1)), truth)


def coverage(recovery: Recovery, truth: Floats, level: float = 0.9) -> float:
    """The share of true means within their intervals."""
    low, high = recovery.interval(level)
    return float(((low <= truth) & (truth <= high)).mean())


def dirichlet(regions: int, groups: int, alpha: float = 0.5, seed: int = 0) -> Floats:
    """Random compositions (regions, groups)."""
    return np.asarray(np.random.default_rng(seed).dirichlet(np.full(groups, alpha), regions))
