"""Disclosure control: rules applied to aggregates before release, and the noise they add.

Small cells are suppressed, totals are rounded, or totals get the noise of differential privacy.
This noise hides whether a person was counted. Recovery uses the variance of the added noise.
"""

import math
from dataclasses import dataclass, replace

import numpy as np
from scipy import sparse

from mobatlas.data.types import Floats, Ints
from mobatlas.errors import MobatlasError, refuse_faults
from mobatlas.regions.types import Aggregates

ROUNDING_VARIANCE = 1 / 12  # of rounding to whole numbers


@dataclass(frozen=True)
class Disclosure:
    """Rules of disclosure control; none by default.

    Parameters
    ----------
    suppress
        Suppress cells with fewer than this many people; zeros are kept.
    rounding
        Round totals of visits to multiples of this.
    epsilon
        Budget of differential privacy for adding or removing one person.
    max_visits
        With epsilon: the most visits per person and window; larger counts are scaled down.

    Examples
    --------
    >>> Disclosure(suppress=10).active
    True
    """

    suppress: int = 0
    rounding: float = 0.0
    epsilon: float | None = None
    max_visits: float | None = None

    def __post_init__(self) -> None:
        epsilon, visits = self.epsilon, self.max_visits
        refuse_faults(
            {
                "--suppress and --round must be 0 or more": self.suppress < 0
                or not 0 <= self.rounding < math.inf,
                "--max-visits needs --epsilon; pass both or neither": epsilon is None
                and visits is not None,
                f"--epsilon {epsilon or 0:g}: give a positive number, such as 1": epsilon
                is not None
                and not 0 < epsilon < math.inf,
                "--epsilon needs --max-visits, the most visits per person and window that count; "
                "choose it without looking at the data": epsilon is not None
                and not (visits is not None and 0 < visits < math.inf),
                "--suppress uses exact counts, which --epsilon must hide; remove one of "
                "them": epsilon is not None and self.suppress,
            }
        )

    @property
    def active(self) -> bool:
        return bool(self.suppress or self.rounding or self.epsilon)


NO_DISCLOSURE = Disclosure()


def clip_visits(phi: sparse.csr_array, most: float) -> sparse.csr_array:
    """Scale down the counts of people with more visits than `most`."""
    visits = np.asarray(phi.sum(1)).ravel()
    return sparse.csr_array(phi.multiply(np.minimum(1, most / np.maximum(visits, 1e-300))[:, None]))


def apply_disclosure(
    v: Aggregates, phi: sparse.csr_array, region: Ints, disclosure: Disclosure
) -> Aggregates:
    """Aggregates for release, given phi (people, bins) and the region of each person or -1.

    With an epsilon, phi must be clipped. The noise comes from OpenDP and ignores every seed:
    anyone who could repeat it could remove it.
    """
    totals = v.values * v.n[:, None]  # (regions, features)
    variance = np.zeros(v.values.shape)  # (regions, features)
    if disclosure.suppress:
        rows = np.flatnonzero(region >= 0)
        membership = sparse.csr_array(
            (np.ones(len(rows)), (region[rows], rows)), shape=(len(v.regions), phi.shape[0])
        )
        people = np.asarray((membership @ (phi > 0).astype(np.float64)).todense())
        totals[(people > 0) & (people < disclosure.suppress)] = np.nan
    if disclosure.epsilon is not None:
        assert disclosure.max_visits is not None
        scale = disclosure.max_visits / disclosure.epsilon
        totals = _add_laplace_noise(totals, scale)
        variance += 2 * scale**2
    if disclosure.rounding:
        totals = np.round(totals / disclosure.rounding) * disclosure.rounding
        variance += ROUNDING_VARIANCE * disclosure.rounding**2
    noise = variance / v.n[:, None] ** 2 if variance.any() else None
    spread = v.spread if disclosure.epsilon is None else None  # an exact count is not private
    # The largest norm is that of one person.
    return replace(v, values=totals / v.n[:, None], noise=noise, spread=spread, largest=None)


def _add_laplace_noise(totals: Floats, scale: float) -> Floats:
    try:
        import opendp.prelude as dp
    except ImportError:
        raise MobatlasError("--epsilon needs OpenDP: pip install 'mobatlas[dp]'") from None
    dp.enable_features("contrib")
    domain = dp.vector_domain(dp.atom_domain(T=float, nan=False))
    mechanism = dp.m.make_laplace(domain, dp.l1_distance(T=float), scale=scale)
    return np.array(mechanism(totals.ravel().tolist())).reshape(totals.shape)
