"""Intervals from samples that are spread over posterior draws, as `generate --posterior` writes.

Means of draws differ for two reasons: the posterior, and the finite number of samples in a draw.
With D draws, B is the variance between their means and W the variance of a mean of finitely many
samples. Then B (D - 1) / T has a chi-squared distribution with D - 1 degrees of freedom, where
T = V + W and V is the variance of the posterior. With the prior 1/T for T above W, V is estimated
by E[T | B, T > W] - W, which is never zero and has its own uncertainty in it. The interval of the
mean has the variance

    V (1 + 1/D) + W/D + S/pool

where S is the variance between samples, and `pool` the number of samples that calibrations were
fitted on. For a feature map whose samples show a share r of the spread of the draws, V is divided
by r squared.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from scipy import sparse, special

from mobatlas.data.arrays import Floats, Ints
from mobatlas.data.samples import Samples
from mobatlas.data.trajectories import Trajectories
from mobatlas.errors import MobatlasError

MIN_DRAWS = 10  # the variance between fewer is too uncertain
LEAST_SPREAD = 0.25  # a smaller share is not corrected for


class _FeatureMap(Protocol):
    @property
    def name(self) -> str: ...

    def counts(self, trajectories: Trajectories) -> Any: ...


Statistic = _FeatureMap | Callable[[Trajectories], Any]


@dataclass(frozen=True)
class PosteriorIntervals:
    """Means of statistics by group, with intervals that include posterior and sampling errors.

    Attributes
    ----------
    groups
        (groups,) numbers of the groups; -1 for samples without a group.
    mean, low, high
        (groups, statistics) the means and the ends of their intervals.

    Examples
    --------
    >>> intervals = posterior_intervals(samples, statistic)  # doctest: +SKIP
    >>> intervals.high - intervals.low  # doctest: +SKIP
    """

    groups: Ints
    mean: Floats
    low: Floats
    high: Floats


def posterior_intervals(
    samples: Samples, statistic: Statistic, level: float = 0.9
) -> PosteriorIntervals:
    """Estimate means of a statistic by group, with posterior intervals.

    Parameters
    ----------
    samples
        Samples of `generate --posterior`, as `read_samples` returns them.
    statistic
        A feature map, or a function of trajectories that returns one value for each, or a row of
        values: an array or a sparse matrix (trajectories, statistics).
    level
        Probability of each interval.

    Returns
    -------
    PosteriorIntervals
        Means and ends of intervals. A statistic that is the same in all samples has no width.

    Examples
    --------
    >>> samples = read_samples("samples.parquet", vocabulary, groups)  # doctest: +SKIP
    >>> category = build_feature("category", vocabulary)  # doctest: +SKIP
    >>> posterior_intervals(samples, category).low  # doctest: +SKIP
    """
    if not 0 < level < 1:
        raise MobatlasError(f"level {level:g}: give a probability between 0 and 1, such as 0.9")
    counts: Any = getattr(statistic, "counts", statistic)
    values = counts(samples.trajectories)
    if not sparse.issparse(values):
        values = np.asarray(values, dtype=np.float64).reshape(len(samples.trajectories), -1)
    values = sparse.csr_array(values)
    groups, cells, draws = _cells(samples)
    size = np.asarray(cells.sum(1)).ravel().reshape(-1, draws, 1)  # (groups, draws, 1)
    shape = (len(groups), draws, values.shape[1])
    total = (cells @ values).toarray().reshape(shape)
    squares = (cells @ values.power(2)).toarray().reshape(shape)
    means = total / size
    freedom = np.maximum(size.sum(1) - draws, 1)
    between_samples = np.maximum(squares - total * means, 0).sum(1) / freedom  # S
    noise = between_samples * (1 / size).mean(1)  # W
    facts = samples.posterior or {}
    shares = facts.get("spread", {})
    reached = shares.get(getattr(statistic, "name", None), 1.0)
    posterior = _posterior_variance(means.var(1, ddof=1), noise, draws)
    posterior /= np.clip(reached, LEAST_SPREAD, 1.0) ** 2
    variance = posterior * (1 + 1 / draws) + noise / draws
    variance += between_samples / facts.get("pool", np.inf)
    mean = means.mean(1)
    positive = bool(values.nnz == 0 or values.data.min() >= 0)
    return PosteriorIntervals(groups, mean, *_ends(mean, variance, level, positive))


def _cells(samples: Samples) -> tuple[Ints, sparse.csr_array, int]:
    """Groups, which samples are in each cell (groups x draws, samples), and the number of draws."""
    if samples.draws is None:
        raise MobatlasError(
            f"{samples.path}: the file has no column 'draw', so that its samples do not show the "
            "error of group means; write it with `mobatlas generate --posterior`"
        )
    n = len(samples.draws)
    groups = np.full(n, -1) if samples.groups is None else samples.groups
    names, row = np.unique(groups, return_inverse=True)
    numbers, column = np.unique(samples.draws, return_inverse=True)
    draws = len(numbers)
    cell = row * draws + column
    size = len(names) * draws
    if draws < MIN_DRAWS or not np.bincount(cell, minlength=size).all():
        raise MobatlasError(
            f"{samples.path}: intervals need at least {MIN_DRAWS} draws, each with samples of "
            "every group; write the whole file with `mobatlas generate --posterior`"
        )
    ones = (np.ones(n), (cell, np.arange(n)))
    return names, sparse.csr_array(ones, shape=(size, n)), draws


def _posterior_variance(between: Floats, noise: Floats, draws: int) -> Floats:
    """E[T | B, T > W] - W, where T has an inverse gamma distribution."""
    shape = (draws - 1) / 2
    scale = (draws - 1) / 2 * between
    x = np.maximum(scale / np.maximum(noise, 1e-300), 1e-9)
    below = special.gammainc(shape, x)
    # For small x both functions are powers of x, and underflow.
    ratio = np.where(
        x < 1e-3, shape / x, special.gammainc(shape - 1, x) / np.maximum(below, 1e-300)
    )
    total = np.where(scale > 0, scale / (shape - 1) * ratio, noise * shape / (shape - 1))
    return np.asarray(np.maximum(total - noise, 0))


def _ends(mean: Floats, variance: Floats, level: float, positive: bool) -> tuple[Floats, Floats]:
    """Ends of intervals: log-normal where a statistic is never negative, otherwise normal."""
    quantile = special.ndtri(0.5 + level / 2)
    if not positive:
        reach = quantile * np.sqrt(variance)
        return mean - reach, mean + reach
    relative = np.sqrt(variance) / np.where(mean > 0, mean, 1.0)
    log_variance = np.log1p(relative**2)
    median = mean * np.exp(-log_variance / 2)
    reach = np.exp(quantile * np.sqrt(log_variance))
    return median / reach, median * reach
