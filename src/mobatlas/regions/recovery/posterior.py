"""The Gaussian model behind recovery: its likelihood and posterior in groups x groups (Woodbury), and positivity."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import linalg

from mobatlas.regions.types import Floats

SWEEPS = 1_000  # of Hildreth's method; a few dozen are enough unless groups are all but confounded
HALF_NORMAL = 2 / np.pi  # of its variance a Gaussian loses when it is cut at its mean


@dataclass(frozen=True)
class Doubt:
    """What is not known of a composition: its covariance in region g is axes diag(variance_g) axes'."""

    axes: Floats  # (groups, directions)
    variance: Floats  # (regions, directions)


@dataclass(frozen=True)
class Problem:
    """Everything about the regions that does not depend on the bin."""

    shares: Floats  # P (regions, groups)
    n: Floats  # (regions,)
    doubt: Doubt | None  # of the composition; None: exact
    factors: tuple[Floats, ...]  # one (groups, groups) matrix an attribute, then the identity
    centring: Floats  # C (groups, groups)
    covariates: Floats  # X (regions, covariates): what regions have in common, ones, and what else explains them

    def of_regions(self, rows: npt.NDArray[np.int64]) -> Problem:
        """The same with these regions alone."""
        doubt = None if self.doubt is None else Doubt(self.doubt.axes, self.doubt.variance[rows])
        covariates = independent(self.covariates[rows])
        return Problem(
            self.shares[rows], self.n[rows], doubt, self.factors, self.centring, covariates
        )

    def prior(self, rho: Floats) -> Floats:
        """F with S = F F', trace of S equal to the number of groups."""
        inner = sum(weight * factor for weight, factor in zip(rho, self.factors, strict=True))
        root = self.centring @ linalg.cholesky(inner, lower=True)
        size = np.sqrt(max((root**2).sum() / len(root), 1e-12))
        return np.asarray(root / size)

    def noise(self, root: Floats, scale: float, effect: float, published: Floats) -> Floats:
        """d (regions,): the variance of a regional mean that group means do not explain; `published` (regions,) is of noise."""
        noise = 1 / self.n + scale * effect + published
        if self.doubt is not None:
            noise = noise + scale * self.doubt.variance @ ((root.T @ self.doubt.axes) ** 2).sum(0)
        return noise


@dataclass(frozen=True)
class Sums:
    """What regions add up to, whatever the bin: parts of them are summed on their own, and added or taken off."""

    groups: Floats  # P' D^-1 P (groups, groups)
    common: Floats  # P' D^-1 X (groups, covariates)
    covariates: Floats  # X' D^-1 X (covariates, covariates)
    log_noise: float  # log determinant of D

    @classmethod
    def of(cls, shares: Floats, covariates: Floats, noise: Floats) -> Sums:
        weighted = shares / noise[:, None]
        known = covariates / noise[:, None]
        return cls(
            shares.T @ weighted,
            weighted.T @ covariates,
            covariates.T @ known,
            float(np.log(noise).sum()),
        )

    def __sub__(self, other: Sums) -> Sums:
        return Sums(
            self.groups - other.groups,
            self.common - other.common,
            self.covariates - other.covariates,
            self.log_noise - other.log_noise,
        )


@dataclass(frozen=True)
class Fit:
    """The algebra of one set of variances, all of it groups x groups (Woodbury)."""

    weight: Floats  # 1/d (regions,); 0: of a region that does not tell
    sums: Sums
    lift: Floats  # sqrt(lambda) F (groups, groups)
    inner: Any  # Cholesky factor of A = I + B' D^-1 B, B = P sqrt(lambda) F
    common: Floats  # B' D^-1 X (groups, covariates)
    flat: Any  # Cholesky factor of X' Sigma^-1 X
    log_determinant: float  # of Sigma and of X' Sigma^-1 X

    @classmethod
    def of(
        cls, problem: Problem, root: Floats, scale: float, effect: float, published: Floats
    ) -> Fit:
        noise = problem.noise(root, scale, effect, published)
        return cls._of(
            1 / noise, Sums.of(problem.shares, problem.covariates, noise), np.sqrt(scale) * root
        )

    @classmethod
    def _of(cls, weight: Floats, sums: Sums, lift: Floats) -> Fit:
        inner = linalg.cho_factor(np.eye(lift.shape[1]) + lift.T @ sums.groups @ lift, lower=True)
        common = lift.T @ sums.common
        precision = sums.covariates - common.T @ linalg.cho_solve(inner, common)
        flat = linalg.cho_factor(precision + 1e-10 * np.diag(np.diag(precision)), lower=True)
        determinants = sums.log_noise + 2 * sum(
            np.log(np.diag(each[0])).sum() for each in (inner, flat)
        )
        return cls(weight, sums, lift, inner, common, flat, float(determinants))

    def without(self, problem: Problem, regions: npt.NDArray[np.int64]) -> Fit:
        """The same where these regions do not tell: what they add up to is taken off, which costs no more than they are."""
        lost = Sums.of(
            problem.shares[regions], problem.covariates[regions], 1 / self.weight[regions]
        )
        weight = self.weight.copy()
        weight[regions] = 0
        return self._of(weight, self.sums - lost, self.lift)

    def project(self, problem: Problem, y: Floats) -> tuple[Floats, Floats, Floats]:
        """B' D^-1 y (groups, bins), X' Sigma^-1 y (covariates, bins), y' D^-1 y (bins,)."""
        weighted = y * self.weight[:, None]
        z = self.lift.T @ (problem.shares.T @ weighted)
        total = problem.covariates.T @ weighted - self.common.T @ linalg.cho_solve(self.inner, z)
        return z, total, np.einsum("gj,gj->j", weighted, y)

    def deviance(self, problem: Problem, y: Floats) -> Floats:
        """-2 log restricted likelihood of each bin (bins,)."""
        z, total, squares = self.project(problem, y)
        explained = (z * linalg.cho_solve(self.inner, z)).sum(0) + (
            total * linalg.cho_solve(self.flat, total)
        ).sum(0)
        return np.asarray(self.log_determinant + squares - explained)

    def means(self, problem: Problem, y: Floats) -> Floats:
        """Posterior means of b (groups, bins): deviations from the population mean."""
        z, total, _ = self.project(problem, y)
        alpha = linalg.cho_solve(self.flat, total)  # (covariates, bins)
        return np.asarray(self.lift @ linalg.cho_solve(self.inner, z - self.common @ alpha))

    def covariance(self) -> Floats:
        """Posterior covariance of b for one bin (groups, groups)."""
        own = self.lift @ linalg.cho_solve(self.inner, self.lift.T)
        return np.asarray(own + self._shift @ linalg.cho_solve(self.flat, self._shift.T))

    def sampling_variance(self) -> Floats:
        """The part of each group's posterior variance that is the noise of the regional means (groups,)."""
        slopes = self.covariance()
        surface = self._shift @ linalg.cho_solve(
            self.flat, np.eye(len(self.flat[0]))
        )  # (groups, covariates)
        # The means are (slopes P' - surface X') D^-1 y, and the variance of y is D.
        total = slopes @ self.sums.groups @ slopes + surface @ self.sums.covariates @ surface.T
        both = slopes @ self.sums.common @ surface.T
        return np.maximum(np.diag(total - both - both.T), 0)

    @property
    def _shift(self) -> Floats:
        """By how much b moves with each covariate, (groups, covariates)."""
        return np.asarray(self.lift @ linalg.cho_solve(self.inner, self.common))


def independent(columns: Floats) -> Floats:
    """Those columns that the ones before them do not make up; the first are ones."""
    kept = np.ones((len(columns), 1))
    for column in columns.T[1:]:
        rest = column - kept @ np.linalg.lstsq(kept, column, rcond=None)[0]
        left, whole = (float(np.linalg.norm(each)) for each in (rest, column))
        if left > 1e-6 * whole and kept.shape[1] + 1 < len(columns):
            kept = np.column_stack([kept, rest * np.sqrt(len(rest)) / left])
    return kept


def nonnegative(means: Floats, covariance: Floats) -> tuple[Floats, Floats]:
    """The likeliest points without negative entries of Gaussians with these means (bins, groups) and one covariance.

    Nobody visits a place less than never, which also tells about the groups that one is confounded with: min |M - means| in
    the metric of the covariance, M >= 0, by coordinate ascent on its multipliers (Hildreth 1957). The covariances
    (bins, groups, groups) lose what half a Gaussian has less than a whole one, along the groups that are held at zero.
    """
    likeliest = means.copy()
    multipliers = np.zeros_like(means)
    variance = np.diag(covariance)
    moving = np.flatnonzero((means < 0).any(1))
    for _ in range(SWEEPS):
        if not len(moving):
            break
        largest = np.zeros(len(moving))
        for group in np.flatnonzero(variance > 1e-12 * variance.max(initial=0)):
            old = multipliers[moving, group]
            new = np.maximum(old - likeliest[moving, group] / variance[group], 0)
            likeliest[moving] += np.outer(new - old, covariance[group])
            multipliers[moving, group] = new
            largest = np.maximum(largest, np.abs(new - old) * np.sqrt(variance[group]))
        moving = moving[largest > 1e-9]
    each = np.repeat(covariance[None], len(means), axis=0)
    patterns, which = np.unique(multipliers > 0, axis=0, return_inverse=True)
    for number, held in enumerate(map(np.flatnonzero, patterns)):
        if len(held):
            known = (
                covariance[:, held]
                @ linalg.pinvh(covariance[np.ix_(held, held)])
                @ covariance[held]
            )
            each[which.ravel() == number] -= HALF_NORMAL * known
    return np.maximum(likeliest, 0), each
