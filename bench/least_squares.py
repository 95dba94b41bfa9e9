"""Group means by least squares, which give no error bars: what `recover` is compared with."""

from __future__ import annotations

import numpy as np
from scipy import linalg

from mobatlas.data.types import Floats
from mobatlas.regions.types import Regions, population_mean, with_rest


def least_squares(regions: Regions) -> Floats:
    """The paper's estimate (groups, features)."""
    return pseudo_inverse(*_evidence(regions))


def least_squares_on_simplex(regions: Regions) -> Floats:
    """The same (groups, features), where rows are shares times the mean total."""
    return simplex_least_squares(*_evidence(regions))


def _evidence(regions: Regions) -> tuple[Floats, Floats]:
    """P (regions, groups) and V (regions, features), with the mean in suppressed cells."""
    complete = with_rest(regions)
    shares = complete.composition.shares
    values = complete.aggregates.values
    mean = population_mean(shares, complete.aggregates)[1]
    return shares, np.where(np.isnan(values), mean, values)


def pseudo_inverse(shares: Floats, values: Floats) -> Floats:
    """The M of least norm that minimises |P M - V| (Lemma "Stability under aggregate ...")."""
    return np.asarray(linalg.pinv(shares) @ values, dtype=np.float64)


def simplex_least_squares(shares: Floats, values: Floats, iterations: int = 2_000) -> Floats:
    """Minimise |P M - V| where rows of M are shares times the mean total.

    The method is accelerated projected gradient.
    """
    total = values.sum(1).mean()
    target = values / np.maximum(values.sum(1, keepdims=True), 1e-300)
    step = 1 / max(float(np.linalg.norm(shares, 2)) ** 2, 1e-12)
    means = np.tile(target.mean(0), (shares.shape[1], 1))
    point = means
    momentum = 1.0
    for _ in range(iterations):
        updated = _project_to_simplex(point - step * shares.T @ (shares @ point - target))
        next_momentum = (1 + np.sqrt(1 + 4 * momentum**2)) / 2
        point = updated + (momentum - 1) / next_momentum * (updated - means)
        if np.abs(updated - means).max() < 1e-12:
            break
        means = updated
        momentum = next_momentum
    return np.asarray(means * total)


def _project_to_simplex(rows: Floats) -> Floats:
    """The nearest point of the simplex to each row (Held, Wolfe and Crowder 1974)."""
    ordered = -np.sort(-rows, axis=1)
    excess = (np.cumsum(ordered, 1) - 1) / np.arange(1, rows.shape[1] + 1)
    last = (ordered > excess).sum(1) - 1
    return np.maximum(rows - np.take_along_axis(excess, last[:, None], 1), 0)
