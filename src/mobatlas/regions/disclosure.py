"""Disclosure: what is done to aggregates before anybody sees them, and how noisy that makes them.

Small cells hide, totals are rounded, or totals get noise of differential privacy: whoever sees them learns hardly more about a
person than if the person had not been counted. Recovery is told the variance of what was added.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import sparse

from mobatlas.errors import MobatlasError
from mobatlas.regions.types import Aggregates, Floats

ROUNDED = 1 / 12  # variance of rounding to whole numbers


@dataclass(frozen=True)
class Disclosure:
    """The rules; none of them by default."""

    suppress: int = 0  # cells with fewer people behind them hide, zeros do not
    rounding: float = 0.0  # totals of visits become multiples of it
    epsilon: float | None = None  # of differential privacy, adding or removing one person
    max_visits: float | None = (
        None  # of a person in a window, over all bins: more are scaled down to it
    )

    def __post_init__(self) -> None:
        if self.suppress < 0 or self.rounding < 0:
            raise MobatlasError(
                "--suppress and --round are numbers of people and of visits, 0 or more"
            )
        if self.epsilon is None:
            if self.max_visits is not None:
                raise MobatlasError("--max-visits goes with --epsilon; give both or neither")
            return
        if not 0 < self.epsilon < float("inf"):
            raise MobatlasError(f"--epsilon {self.epsilon:g}: give a positive number, such as 1")
        if self.max_visits is None or not 0 < self.max_visits < float("inf"):
            raise MobatlasError(
                "--epsilon needs --max-visits: the most visits of a person in a window that count; choose it without looking "
                "at the data"
            )
        if self.suppress:
            raise MobatlasError(
                "--suppress looks at exact counts, which --epsilon promises to hide; leave one of them out"
            )

    @property
    def asked(self) -> bool:
        return bool(self.suppress or self.rounding or self.epsilon)

    def details(self) -> dict[str, Any]:
        """For manifests."""
        return {
            "suppress": self.suppress,
            "rounding": self.rounding,
            "epsilon": self.epsilon,
            "max_visits": self.max_visits,
        }


AS_COUNTED = Disclosure()


def clipped(phi: sparse.csr_array, most: float) -> sparse.csr_array:
    """People with more visits than that have all their counts scaled down to it."""
    visits = np.asarray(phi.sum(1)).ravel()
    return sparse.csr_array(phi.multiply(np.minimum(1, most / np.maximum(visits, 1e-300))[:, None]))


def protected(
    v: Aggregates, phi: sparse.csr_array, region: npt.NDArray[np.int64], disclosure: Disclosure
) -> Aggregates:
    """What may be shown of aggregates that were counted on phi (people, bins); `region` is the number of each person's, or -1.

    With an epsilon phi must be clipped. Noise comes from OpenDP, which no seed repeats: who could repeat it could take it off.
    """
    totals, variance = v.values * v.n[:, None], np.zeros(v.values.shape)  # (regions, features)
    if disclosure.suppress:
        rows = np.flatnonzero(region >= 0)
        shape = (len(v.regions), phi.shape[0])
        belongs = sparse.csr_array((np.ones(len(rows)), (region[rows], rows)), shape=shape)
        people = np.asarray((belongs @ (phi > 0).astype(np.float64)).todense())
        totals[(people > 0) & (people < disclosure.suppress)] = np.nan
    if disclosure.epsilon is not None:
        assert disclosure.max_visits is not None
        scale = disclosure.max_visits / disclosure.epsilon
        totals = _with_laplace(totals, scale)
        variance += 2 * scale**2
    if disclosure.rounding:
        totals = np.round(totals / disclosure.rounding) * disclosure.rounding
        variance += ROUNDED * disclosure.rounding**2
    noise = variance / v.n[:, None] ** 2 if variance.any() else None
    spread = v.spread if disclosure.epsilon is None else None  # it was counted exactly
    return replace(v, values=totals / v.n[:, None], noise=noise, spread=spread)


def _with_laplace(totals: Floats, scale: float) -> Floats:
    try:
        import opendp.prelude as dp
    except ImportError:
        raise MobatlasError("--epsilon needs OpenDP: pip install 'mobatlas[dp]'") from None
    dp.enable_features("contrib")
    domain = dp.vector_domain(dp.atom_domain(T=float, nan=False))
    mechanism = dp.m.make_laplace(domain, dp.l1_distance(T=float), scale=scale)
    return np.array(mechanism(totals.ravel().tolist())).reshape(totals.shape)
