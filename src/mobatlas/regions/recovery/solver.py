"""Posterior modes and covariances of log-linear group means, for many bins at once.

Row r of the evidence is a mean over people: a region, a labelled group, a line of a table. For
every bin j

    V_r ~ quasi-Poisson(q_r, weight N_r),  q_r = exp(X_r a) sum_c P_rc m_c exp(b_c)
    (b, a) ~ N(0, K)

where the variance of V_r is q_r / N_r. Columns c are groups; further blocks of columns describe the
same groups as regions or tables show them. Newton steps with the expected information find the
mode; Laplace's method gives covariance and evidence.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from mobatlas.data.types import Floats, Ints

ITERATIONS = 40
TOLERANCE = 1e-4  # of the largest change of a logarithm
LONGEST_STEP = 1.5  # of a logarithm
HALVINGS = 6
CELLS = 250_000  # bins x rows that are computed at once, to stay in the cache
PAIR_CELLS = 6_000_000  # rows x columns x columns that are kept; beyond it chunks share weights
SHARED_BINS = 32  # bins of a chunk that share relative weights
SMALLEST = 1e-300
SKEW = 1.0  # of the link below zero


@dataclass(frozen=True)
class Rows:
    """What rows of evidence are means of."""

    shares: Floats  # P (rows, columns)
    covariates: Floats  # X (rows, covariates)

    @property
    def columns(self) -> int:
        return self.shares.shape[1]

    def select(self, rows: Ints) -> Rows:
        """Some of the rows."""
        return Rows(self.shares[rows], self.covariates[rows])


@dataclass(frozen=True)
class Observed:
    """Values of rows in some bins."""

    values: Floats  # V (bins, rows), not negative; 0 where unknown
    weight: Floats  # N (bins, rows); 0 where unknown
    centre: Floats  # m (bins, columns), positive

    def select(self, bins: Ints | slice) -> Observed:
        """Some of the bins."""
        return Observed(self.values[bins], self.weight[bins], self.centre[bins])

    def of_rows(self, rows: Ints) -> Observed:
        """Some of the rows."""
        return Observed(self.values[:, rows], self.weight[:, rows], self.centre)


@dataclass(frozen=True)
class Modes:
    """Posterior modes of (b, a), and the likelihood around them as a Gaussian."""

    mode: Floats  # (bins, parameters)
    information: Floats  # W (bins, parameters, parameters) expected, at the mode
    score: Floats  # W mode + gradient of the log likelihood (bins, parameters)
    log_likelihood: Floats  # (bins,) at the mode, with the terms that depend on the weights
    prior: Floats  # (bins,) of the log density of the prior at the mode, without its determinant

    def evidence(self, root: Floats) -> Floats:
        """Laplace's log evidence (bins,) under the prior whose modes these are."""
        inner = np.eye(root.shape[-1]) + _sandwich(root, self.information)
        return np.asarray(
            self.log_likelihood + self.prior - 0.5 * np.linalg.slogdet(inner)[1], dtype=np.float64
        )

    def under(self, root: Floats) -> tuple[Floats, Floats, Floats]:
        """Means, covariances and relative log evidence under another prior K = root root'.

        The likelihood is replaced by its Gaussian approximation around the mode.
        """
        inner = np.eye(root.shape[-1]) + _sandwich(root, self.information)
        lift = np.broadcast_to(np.swapaxes(root, -1, -2), inner.shape)
        covariance = lift.swapaxes(1, 2) @ np.linalg.solve(inner, lift)
        mean = np.einsum("jab,jb->ja", covariance, self.score)
        gain = 0.5 * np.einsum("ja,ja->j", self.score, mean)
        return mean, covariance, gain - 0.5 * np.linalg.slogdet(inner)[1]


def find_modes(rows: Rows, observed: Observed, root: Floats) -> Modes:
    """Fit all bins; `root` R with K = R R' is (parameters, parameters) or has one for each bin."""
    parts = [
        _find(rows, observed.select(bins), root if root.ndim == 2 else root[bins])
        for bins in _chunks(rows, len(observed.centre))
    ]
    return Modes(
        *(
            np.concatenate([getattr(part, name) for part in parts])
            for name in ("mode", "information", "score", "log_likelihood", "prior")
        )
    )


def information(rows: Rows, observed: Observed, mode: Floats) -> Floats:
    """The expected information W (bins, parameters, parameters) of some rows at given modes."""
    return np.concatenate(
        [
            _Chunk(rows, observed.select(bins)).information(mode[bins])
            for bins in _chunks(rows, len(mode))
        ]
    )


def link(b: Floats) -> Floats:
    """The log ratio of a group mean to its centre: b, and below zero b - SKEW b^2 / 2.

    Groups that hardly do a thing are common, and groups that do it many times as often as the
    average are not, because all groups together are the average.
    """
    low = np.minimum(b, 0)
    return np.asarray(b - SKEW / 2 * low**2)


def link_slope(b: Floats) -> Floats:
    """The derivative of the link."""
    return np.asarray(1 - SKEW * np.minimum(b, 0))


def _chunks(rows: Rows, bins: int) -> Iterator[slice]:
    size = max(CELLS // max(len(rows.shares), 1), 1)
    if rows.shares.size * rows.columns > PAIR_CELLS:
        size = min(size, SHARED_BINS)
    return (slice(start, start + size) for start in range(0, bins, size))


def _sandwich(root: Floats, inner: Floats) -> Floats:
    return np.asarray(np.swapaxes(root, -1, -2) @ inner @ root)


def _find(rows: Rows, observed: Observed, root: Floats) -> Modes:
    chunk = _Chunk(rows, observed)
    size = root.shape[-1]
    u = np.zeros((len(observed.centre), size))  # whitened parameters
    point = np.zeros_like(u)
    objective = chunk.log_likelihood(point)
    for _ in range(ITERATIONS):
        slope = chunk.gradient(point)
        w = chunk.information(point)
        inner = np.eye(size) + _sandwich(root, w)
        gradient = _apply(np.swapaxes(root, -1, -2), slope) - u
        step = np.asarray(np.linalg.solve(inner, gradient[:, :, None])[:, :, 0], dtype=np.float64)
        longest = np.abs(_apply(root, step)).max(1)
        step *= np.minimum(1, LONGEST_STEP / np.maximum(longest, SMALLEST))[:, None]
        u, point, objective, moved = _search(chunk, root, (u, step, objective))
        if moved < TOLERANCE:
            break
    w = chunk.information(point)
    score = np.einsum("jab,jb->ja", w, point) + chunk.gradient(point)
    return Modes(point, w, score, chunk.log_likelihood(point), -0.5 * (u**2).sum(1))


def _search(
    chunk: _Chunk, root: Floats, state: tuple[Floats, Floats, Floats]
) -> tuple[Floats, Floats, Floats, float]:
    """Shorten steps until the posterior of no bin decreases."""
    u, step, objective = state
    length = np.ones(len(u))
    for _ in range(HALVINGS):
        proposal = u + length[:, None] * step
        point = _apply(root, proposal)
        value = chunk.log_likelihood(point) - 0.5 * (proposal**2).sum(1)
        worse = ~(value >= objective - 1e-9 * np.abs(objective) - 1e-9)
        if not worse.any():
            break
        length[worse] /= 3
    else:
        proposal = np.where(worse[:, None], u, proposal)
        value = np.where(worse, objective, value)
        point = _apply(root, proposal)
    return proposal, point, value, float(np.abs(point - _apply(root, u)).max(initial=0))


def _apply(matrix: Floats, vectors: Floats) -> Floats:
    """One matrix, or one for each bin, times vectors (bins, parameters)."""
    if matrix.ndim == 2:
        return np.asarray(vectors @ matrix.T)
    return np.asarray(np.einsum("jab,jb->ja", matrix, vectors))


class _Chunk:
    """Likelihood of some bins."""

    def __init__(self, rows: Rows, observed: Observed) -> None:
        self._rows = rows
        self._observed = observed
        p = rows.shares
        self._shared = p.size * rows.columns > PAIR_CELLS
        x = rows.covariates
        if not self._shared:
            self._pairs = (p[:, :, None] * p[:, None]).reshape(len(p), -1)
        self._mixed = (p[:, :, None] * x[:, None]).reshape(len(p), -1)
        self._squares = (x[:, :, None] * x[:, None]).reshape(len(p), -1)

    def _state(self, point: Floats) -> tuple[Floats, Floats, Floats]:
        """M (bins, columns), exp(X a) (bins, rows) or 1, q (bins, rows)."""
        b, a = np.split(point, [self._rows.columns], axis=1)
        means = self._observed.centre * np.exp(np.clip(link(b), -60, 20))
        q = means @ self._rows.shares.T
        factor = np.ones((1, 1))
        if a.shape[1]:
            factor = np.exp(np.clip(a @ self._rows.covariates.T, -20, 20))
            q = q * factor
        return means, factor, np.maximum(q, SMALLEST)

    def log_likelihood(self, point: Floats) -> Floats:
        q = self._state(point)[2]
        return np.asarray((self._observed.weight * (self._observed.values * np.log(q) - q)).sum(1))

    def gradient(self, point: Floats) -> Floats:
        means, factor, q = self._state(point)
        residual = self._observed.weight * (self._observed.values / q - 1)
        steep = means * link_slope(point[:, : means.shape[1]])
        by_columns = steep * ((residual * factor) @ self._rows.shares)
        return np.hstack([by_columns, (residual * q) @ self._rows.covariates])

    def information(self, point: Floats) -> Floats:
        means, factor, q = self._state(point)
        weight = self._observed.weight
        p = self._rows.shares
        bins, columns = means.shape
        means = means * link_slope(point[:, :columns])
        covariates = self._rows.covariates.shape[1]
        relative = weight * factor**2 / q
        if self._shared:
            level = relative.mean(1)
            shape = (relative / np.maximum(level, SMALLEST)[:, None]).mean(0)
            gram = (p * shape[:, None]).T @ p * level[:, None, None]
        else:
            gram = (relative @ self._pairs).reshape(bins, columns, columns)
        w = np.empty((bins, columns + covariates, columns + covariates))
        w[:, :columns, :columns] = gram * means[:, :, None] * means[:, None]
        if covariates:
            mixed = ((weight * factor) @ self._mixed).reshape(bins, columns, covariates)
            w[:, :columns, columns:] = mixed * means[:, :, None]
            w[:, columns:, :columns] = np.swapaxes(w[:, :columns, columns:], 1, 2)
            squares = ((weight * q) @ self._squares).reshape(bins, covariates, covariates)
            w[:, columns:, columns:] = squares
        return w
