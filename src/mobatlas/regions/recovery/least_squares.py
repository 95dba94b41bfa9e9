"""Least squares: the paper's pseudo-inverse, and rows on the simplex. They give no error bars."""

import numpy as np
from scipy import linalg

from mobatlas.data.arrays import Floats
from mobatlas.regions.types import Aggregates, Composition, Recovery, population_mean


def fit_least_squares(
    composition: Composition, aggregates: Aggregates, on_simplex: bool
) -> Recovery:
    """Least squares, with the population mean in suppressed cells; no uncertainty."""
    w, mu0 = population_mean(composition.shares, aggregates)
    values = np.where(np.isnan(aggregates.values), mu0, aggregates.values)
    estimate = simplex_least_squares if on_simplex else pseudo_inverse
    means = estimate(composition.shares, values)  # (groups, features)
    return Recovery(
        groups=composition.groups,
        features=aggregates.features,
        means=means,
        log_covariance=None,
        prior_variance=np.zeros_like(means),
        baseline=mu0,
        shares=w,
        variances={},
        group_share=np.ones(len(mu0)),
        regions_differ=np.ones(len(mu0), dtype=bool),
    )


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
