"""The form `given` of calibration: anchors stay, and of K candidates with the same anchors one is taken.

Weights are exp(<lambda, phi(x)> + b_a n(x)) normalised among the K. n is the number of visits, and b_a, of each anchor, holds
its mean at what the candidates have, times one ratio for the group: places add to <lambda, phi>, so that without it people who
live near what a group prefers would go out more. lambda minimises
    mean_a min_b log mean_k exp(<lambda, phi(x_ak)> + b (n(x_ak) - goal_a)) - <lambda, target> + ridge/2 |lambda|^2,
the dual of the nearest distribution with these means and, for every anchor, this number of visits.
"""

from __future__ import annotations

import numpy as np
from scipy import sparse, special

from mobatlas.data.arrays import Floats
from mobatlas.supervision.tilt import Product, minimise_dual, refuse_unusable, scaled_features

ROUNDS = 100  # of Newton's steps, at most
EXACT = 1e-10  # visits
FURTHEST = 50.0  # b, of one visit: all or nothing


def fit_given_tilt(
    phi: sparse.csr_array,
    target: Floats,
    candidates: int,
    ridge: float,
    numbers: Floats | None = None,
    ratio: float = 1.0,
) -> tuple[Floats, bool]:
    """lambda (features,), and whether it converged; rows are K candidates in a row for each anchor.

    `numbers` (rows,) are visits, None to leave them free; their mean becomes `ratio` times what it is.
    """
    refuse_unusable(phi, target, ridge, None)
    scale, scaled, transposed = scaled_features(phi)
    wanted, shape = target / scale, (phi.shape[0] // candidates, candidates)
    visits = np.zeros(shape) if numbers is None else numbers.reshape(shape)
    goal = _goals(visits, ratio)
    off = visits - goal[:, None]  # (anchors, K)

    def held(x: Floats) -> Floats:
        logits = (scaled @ x).reshape(shape)
        return np.asarray(logits + _hold(logits, visits, goal)[:, None] * off)

    def dual(x: Floats) -> tuple[float, Floats]:
        logits = held(x)
        partition = special.logsumexp(logits, axis=1) - np.log(candidates)  # (anchors,)
        weights = special.softmax(logits, axis=1).ravel() / shape[0]
        return float(
            partition.mean() - x @ wanted + ridge / 2 * (x @ x)
        ), transposed @ weights - wanted + ridge * x

    def curvature(x: Floats) -> Product:
        weights = special.softmax(held(x), axis=1)  # (anchors, K)
        among = off - (weights * off).sum(1, keepdims=True)
        variance = np.maximum((weights * among**2).sum(1, keepdims=True), 1e-300)

        def product(v: Floats) -> Floats:
            along = (scaled @ v).reshape(shape)
            along = along - (weights * along).sum(1, keepdims=True)
            free = (
                along - among * (weights * along * among).sum(1, keepdims=True) / variance
            )  # b moves along
            return np.asarray(transposed @ (weights * free / shape[0]).ravel() + ridge * v)

        return product

    x, converged = minimise_dual(dual, curvature, np.zeros(phi.shape[1]))
    return x / scale, converged


def given_weights(logits: Floats, visits: Floats, ratio: Floats | float) -> Floats:
    """Weights of candidates (anchors, K), rows sum to 1; `visits` of the same shape, `ratio` of each anchor or of all."""
    goal = _goals(visits, ratio)
    return np.asarray(
        special.softmax(logits + _hold(logits, visits, goal)[:, None] * visits, axis=1)
    )


def _goals(visits: Floats, ratio: Floats | float) -> Floats:
    """The mean number of visits of each anchor (anchors,), well inside what its candidates have."""
    least, most = visits.min(1), visits.max(1)
    margin = (most - least) / (
        2 * visits.shape[1]
    )  # less than the mean of K numbers is away from their ends
    return np.clip(ratio * visits.mean(1), least + margin, most - margin)


def _hold(logits: Floats, visits: Floats, goal: Floats) -> Floats:
    """b (anchors,), so that weights exp(logits + b visits) have the mean `goal`: Newton's steps inside a bracket."""
    low, high = np.full(len(goal), -FURTHEST), np.full(len(goal), FURTHEST)
    b = np.zeros(len(goal))
    for _ in range(ROUNDS):
        weights = special.softmax(logits + b[:, None] * visits, axis=1)
        mean = (weights * visits).sum(1)
        missing = goal - mean
        if np.abs(missing).max(initial=0) < EXACT:
            break
        low, high = np.where(missing > 0, b, low), np.where(missing < 0, b, high)
        variance = (weights * (visits - mean[:, None]) ** 2).sum(1)
        step = b + missing / np.maximum(variance, 1e-12)
        inside = (step > low) & (step < high)
        b = np.where(missing == 0, b, np.where(inside, step, (low + high) / 2))
    return b
