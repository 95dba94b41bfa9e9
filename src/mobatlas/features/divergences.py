"""Divergences between distributions: JS and KL in bits, total variation, Hellinger; one code for numpy and torch.

The last axis holds the distribution. Logarithms and slopes see at least a floor, which keeps KL and every gradient finite.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mobatlas.errors import MobatlasError, suggestion

FLOOR = 1e-12
Array = Any  # numpy.ndarray or torch.Tensor; a function returns what it was given


def normalise(values: Array) -> Array:
    """Shares along the last axis; what sums to zero stays zero."""
    return values / _at_least(values.sum(-1)[..., None], FLOOR)


def js(p: Array, q: Array) -> Array:
    """Jensen-Shannon divergence in bits, between 0 and 1."""
    middle = (p + q) / 2
    return _at_least((_relative_entropy(p, middle) + _relative_entropy(q, middle)) / 2, 0.0)


def kl(p: Array, q: Array) -> Array:
    """Kullback-Leibler divergence of p from q in bits."""
    return _at_least(_relative_entropy(p, q), 0.0)


def tv(p: Array, q: Array) -> Array:
    """Total variation, between 0 and 1."""
    return abs(p - q).sum(-1) / 2


def hellinger(p: Array, q: Array) -> Array:
    """Hellinger distance, between 0 and 1."""
    gap = _root(p) - _root(q)
    return _root((gap**2).sum(-1) / 2)


DIVERGENCES: dict[str, Callable[[Array, Array], Array]] = {
    "js": js,
    "tv": tv,
    "kl": kl,
    "hellinger": hellinger,
}


def divergence_named(name: str) -> Callable[[Array, Array], Array]:
    """The divergence of that name."""
    if name not in DIVERGENCES:
        known = ", ".join(DIVERGENCES)
        raise MobatlasError(
            f"--divergence {name} does not exist{suggestion(name, DIVERGENCES)} (known: {known})"
        )
    return DIVERGENCES[name]


def _relative_entropy(p: Array, q: Array) -> Array:
    # Not cut at zero: rounding may leave it just below, and in JS the slopes of its two halves must cancel.
    return (p * (_log2(_at_least(p, FLOOR)) - _log2(_at_least(q, FLOOR)))).sum(-1)


def _root(values: Array) -> Array:
    # Zero at zero like the square root, but with a slope of at most 1 / FLOOR there.
    return values / _at_least(values, FLOOR**2) ** 0.5


def _at_least(values: Array, least: float) -> Array:
    return values.clip(min=least)


def _log2(values: Array) -> Array:
    return values.log2() if hasattr(values, "log2") else np.log2(values)
