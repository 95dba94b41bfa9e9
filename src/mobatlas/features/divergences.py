"""Divergences between distributions: JS and KL in bits, total variation, Hellinger.

`js`, `kl`, `tv` and `hellinger` compare shares along the last axis, in numpy or torch. Logarithms
and slopes are computed at FLOOR or above, so KL and every gradient stay finite. `jsd` and
`jsd_rows` compare counts. They read only bins that occur, because 10^9 trips are possible.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from scipy import sparse

from mobatlas.data.types import Floats
from mobatlas.registry import Registry

FLOOR = 1e-12
Array = Any  # numpy.ndarray or torch.Tensor; a function returns the kind that it takes
Divergence = Callable[[Array, Array], Array]


def normalise(values: Array) -> Array:
    """Shares along the last axis; a row that sums to zero stays zero."""
    return values / values.sum(-1)[..., None].clip(min=FLOOR)


def js(p: Array, q: Array) -> Array:
    """Jensen-Shannon divergence in bits, between 0 and 1."""
    middle = (p + q) / 2
    return ((_relative_entropy(p, middle) + _relative_entropy(q, middle)) / 2).clip(min=0.0)


def kl(p: Array, q: Array) -> Array:
    """Kullback-Leibler divergence of p from q in bits."""
    return _relative_entropy(p, q).clip(min=0.0)


def tv(p: Array, q: Array) -> Array:
    """Total variation, between 0 and 1."""
    return abs(p - q).sum(-1) / 2


def hellinger(p: Array, q: Array) -> Array:
    """Hellinger distance, between 0 and 1."""
    gap = _root(p) - _root(q)
    return _root((gap**2).sum(-1) / 2)


DIVERGENCES = Registry[Divergence](
    "divergence", "--divergence", {"js": js, "tv": tv, "kl": kl, "hellinger": hellinger}
)


def jsd(real: Floats | sparse.csr_array, synthetic: Floats | sparse.csr_array) -> float:
    """Jensen-Shannon divergence in bits of two histograms of counts.

    Each is (bins,), or sparse (1, bins). The divergence of an empty histogram is 1 from
    any other, and 0 from another empty one.
    """
    first, second = (
        side if isinstance(side, sparse.csr_array) else sparse.csr_array(side[None])
        for side in (real, synthetic)
    )
    if first.shape != second.shape:
        raise ValueError(f"histograms of {first.shape[1]} and {second.shape[1]} bins")
    return float(jsd_rows(*(row.toarray() for row in drop_empty_bins(first, second)))[0])


def jsd_rows(real: Floats, synthetic: Floats) -> Floats:
    """The same for many pairs of dense histograms: (pairs, bins) -> (pairs,)."""
    real_sum = real.sum(-1)  # (pairs,)
    synthetic_sum = synthetic.sum(-1)
    # A bin that only one side has adds half its share; only common bins need logarithms.
    row, column = np.nonzero((real > 0) & (synthetic > 0))
    p = real[row, column] / real_sum[row]
    q = synthetic[row, column] / synthetic_sum[row]
    common = np.log2(2 * p / (p + q)) * p + np.log2(2 * q / (p + q)) * q - p - q
    divergence = 1 + np.bincount(row, weights=common, minlength=len(real)) / 2
    both_empty = (real_sum == 0) & (synthetic_sum == 0)
    return np.where(both_empty, 0.0, np.clip(divergence, 0, 1))


def drop_empty_bins(
    a: sparse.csr_array, b: sparse.csr_array
) -> tuple[sparse.csr_array, sparse.csr_array]:
    """Drop columns that are empty in both tables, so that dense arrays fit in memory."""
    occurring, place = np.unique(np.concatenate((a.indices, b.indices)), return_inverse=True)
    first, second = (
        sparse.csr_array((table.data, columns, table.indptr), (table.shape[0], len(occurring)))
        for table, columns in ((a, place[: a.nnz]), (b, place[a.nnz :]))
    )
    return first, second


def column_sums(counts: sparse.csr_array) -> sparse.csr_array:
    """The histogram of all rows together, (1, bins)."""
    bins = counts.shape[1]
    if bins <= counts.nnz:
        return sparse.csr_array(
            np.bincount(counts.indices, weights=counts.data, minlength=bins)[None]
        )
    # Few of the possible trips occur: an array of all bins would not fit into memory.
    occurring, place = np.unique(counts.indices, return_inverse=True)
    sums = np.bincount(place, weights=counts.data, minlength=len(occurring))
    return sparse.csr_array((sums, occurring, [0, len(occurring)]), shape=(1, bins))


def _relative_entropy(p: Array, q: Array) -> Array:
    # Not clipped at zero: in JS the gradients of the two halves must cancel.
    return (p * (_log2(p.clip(min=FLOOR)) - _log2(q.clip(min=FLOOR)))).sum(-1)


def _root(values: Array) -> Array:
    # Zero at zero like the square root, but with a slope of at most 1 / FLOOR there.
    return values / values.clip(min=FLOOR**2) ** 0.5


def _log2(values: Array) -> Array:
    return values.log2() if hasattr(values, "log2") else np.log2(values)
