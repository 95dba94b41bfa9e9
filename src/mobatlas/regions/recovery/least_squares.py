"""Group means by least squares: the paper's pseudo-inverse, and the same with every group's shares on the simplex."""

from __future__ import annotations

import numpy as np
from scipy import linalg

from mobatlas.regions.types import Floats


def pseudo_inverse(shares: Floats, values: Floats) -> Floats:
    """M with P M = V as nearly as can be, and of least norm (Lemma "Stability under aggregate perturbations")."""
    return np.asarray(linalg.pinv(shares) @ values, dtype=np.float64)


def simplex_least_squares(shares: Floats, values: Floats, rounds: int = 2_000) -> Floats:
    """min |P M - V| over M whose rows are shares times the mean total, by accelerated projected gradient."""
    total = values.sum(1).mean()
    target = values / np.maximum(values.sum(1, keepdims=True), 1e-300)
    step = 1 / max(float(np.linalg.norm(shares, 2)) ** 2, 1e-12)
    means = np.tile(target.mean(0), (shares.shape[1], 1))
    ahead, momentum = means, 1.0
    for _ in range(rounds):
        moved = _project_to_simplex(ahead - step * shares.T @ (shares @ ahead - target))
        following = (1 + np.sqrt(1 + 4 * momentum**2)) / 2
        ahead = moved + (momentum - 1) / following * (moved - means)
        if np.abs(moved - means).max() < 1e-12:
            break
        means, momentum = moved, following
    return np.asarray(means * total)


def _project_to_simplex(rows: Floats) -> Floats:
    """The nearest point of the simplex to each row (Held, Wolfe and Crowder 1974)."""
    ordered = -np.sort(-rows, axis=1)
    excess = (np.cumsum(ordered, 1) - 1) / np.arange(1, rows.shape[1] + 1)
    last = (ordered > excess).sum(1) - 1
    return np.maximum(rows - np.take_along_axis(excess, last[:, None], 1), 0)
