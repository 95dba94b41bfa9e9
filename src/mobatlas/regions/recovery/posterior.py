"""The Gaussian model of recovery: error in P, likelihood, posterior and nonnegative means.

All algebra is groups x groups (Woodbury), whatever the number of regions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from scipy import linalg

from mobatlas.data.arrays import Floats, Ints
from mobatlas.regions.types import Composition

SWEEPS = 1_000  # of Hildreth's method; a few dozen suffice unless groups are nearly confounded
HALF_NORMAL = 2 / np.pi  # share of its variance that a Gaussian loses when cut at its mean


@dataclass(frozen=True)
class CompositionError:
    """Uncertainty of a composition: its covariance in region g is axes diag(variance_g) axes'."""

    axes: Floats  # (groups, directions)
    variance: Floats  # (regions, directions)


def calibrate_composition(composition: Composition) -> tuple[Floats, CompositionError | None]:
    """Regression calibration of a composition counted on n people: E[p | counts] and its error.

    True shares vary between regions. Their covariance is the observed one beyond what n explains,
    direction by direction: ages may differ between regions where sexes do not. Using the counted
    shares directly would attenuate every difference between groups.
    """
    shares = composition.shares
    n = composition.n
    # (regions,) in units of one person's variance
    sampling = np.where(np.isfinite(n), 1 / np.maximum(n, 1), 0.0)
    if not sampling.any():
        return shares, None
    weight = 1 / (sampling + 1 / len(n))
    weight = weight / weight.sum()
    centre = weight @ shares  # (groups,)
    # The covariance of one person's group.
    values, vectors = np.linalg.eigh(np.diag(centre) - np.outer(centre, centre))
    spans = values > 1e-9
    axes = vectors[:, spans] * np.sqrt(values[spans])  # (groups, directions)
    whitening = vectors[:, spans] / np.sqrt(values[spans])
    whitened = (shares - centre) @ whitening  # (regions, directions)
    observed = (whitened * weight[:, None]).T @ whitened / max(1 - float(weight @ weight), 1e-12)
    identity = np.eye(len(axes.T))
    expected = float(weight @ sampling)
    # With few regions the directions cannot be distinguished: shrink towards a common variance.
    trust = len(n) / (len(n) + len(identity))
    common = (1 - trust) * np.trace(observed) / max(len(identity), 1)
    observed = trust * observed + common * identity
    # The more regions differ, the less people vary within: observed = between + (1 - between) / n.
    variance, turn = np.linalg.eigh((observed - expected * identity) / max(1 - expected, 1e-12))
    variance = np.clip(variance, 0, 1)  # (directions,) between regions
    counting = (1 - variance) * sampling[:, None]  # (regions, directions)
    reliability = variance / np.maximum(variance + counting, 1e-300)
    calibrated = centre + ((whitened @ turn) * reliability) @ (axes @ turn).T
    return calibrated, CompositionError(axes @ turn, variance * (1 - reliability))


class Variances(NamedTuple):
    """Variance components of a stratum of bins."""

    root: Floats  # F (groups, groups) with S = F F'
    scale: float  # lambda
    region_effect: float  # omega
    added_noise: Floats  # (regions,) variance of published noise


@dataclass(frozen=True)
class Design:
    """The part of the model that is the same for every bin."""

    shares: Floats  # P (regions, groups)
    n: Floats  # (regions,)
    composition_error: CompositionError | None  # None: the composition is exact
    factors: tuple[Floats, ...]  # one (groups, groups) matrix per attribute, then the identity
    centring: Floats  # C (groups, groups)
    covariates: Floats  # X (regions, covariates): ones, then the surface over the map

    def select(self, rows: Ints) -> Design:
        """The design of some regions."""
        error = self.composition_error
        if error is not None:
            error = CompositionError(error.axes, error.variance[rows])
        return replace(
            self,
            shares=self.shares[rows],
            n=self.n[rows],
            composition_error=error,
            covariates=independent_columns(self.covariates[rows]),
        )

    def prior_root(self, rho: Floats) -> Floats:
        """F with S = F F', where the trace of S is the number of groups."""
        inner = sum(weight * factor for weight, factor in zip(rho, self.factors, strict=True))
        root = self.centring @ linalg.cholesky(inner, lower=True)
        size = np.sqrt(max((root**2).sum() / len(root), 1e-12))
        return np.asarray(root / size)

    def residual_variance(self, variances: Variances) -> Floats:
        """d (regions,): the variance of a regional mean that group means do not explain."""
        residual = 1 / self.n + variances.scale * variances.region_effect + variances.added_noise
        error = self.composition_error
        if error is not None:
            along = ((variances.root.T @ error.axes) ** 2).sum(0)
            residual = residual + variances.scale * error.variance @ along
        return residual


class Sums(NamedTuple):
    """Sums over regions that do not depend on the bin. Sums of some regions can be subtracted."""

    groups: Floats  # P' D^-1 P (groups, groups)
    common: Floats  # P' D^-1 X (groups, covariates)
    covariates: Floats  # X' D^-1 X (covariates, covariates)
    log_noise: float  # log determinant of D

    @classmethod
    def of(cls, shares: Floats, covariates: Floats, noise: Floats) -> Sums:
        weighted = shares / noise[:, None]
        return cls(
            shares.T @ weighted,
            weighted.T @ covariates,
            covariates.T @ (covariates / noise[:, None]),
            float(np.log(noise).sum()),
        )

    def minus(self, other: Sums) -> Sums:
        return Sums(
            self.groups - other.groups,
            self.common - other.common,
            self.covariates - other.covariates,
            self.log_noise - other.log_noise,
        )


@dataclass(frozen=True)
class Fit:
    """Matrix factors for one set of variances, all groups x groups."""

    weight: Floats  # 1/d (regions,); 0 for regions without a value
    sums: Sums
    lift: Floats  # sqrt(lambda) F (groups, groups)
    inner: tuple[Floats, bool]  # Cholesky factor of A = I + B' D^-1 B, B = P sqrt(lambda) F
    common: Floats  # B' D^-1 X (groups, covariates)
    flat: tuple[Floats, bool]  # Cholesky factor of X' Sigma^-1 X
    log_determinant: float  # of Sigma and of X' Sigma^-1 X

    @classmethod
    def of(cls, design: Design, variances: Variances) -> Fit:
        noise = design.residual_variance(variances)
        sums = Sums.of(design.shares, design.covariates, noise)
        return cls._of(1 / noise, sums, np.sqrt(variances.scale) * variances.root)

    @classmethod
    def _of(cls, weight: Floats, sums: Sums, lift: Floats) -> Fit:
        inner = linalg.cho_factor(np.eye(lift.shape[1]) + lift.T @ sums.groups @ lift, lower=True)
        common = lift.T @ sums.common
        precision = sums.covariates - common.T @ linalg.cho_solve(inner, common)
        flat = linalg.cho_factor(precision + 1e-10 * np.diag(np.diag(precision)), lower=True)
        determinants = sums.log_noise + 2 * sum(
            np.log(np.diag(factor[0])).sum() for factor in (inner, flat)
        )
        return cls(weight, sums, lift, inner, common, flat, float(determinants))

    def without(self, design: Design, regions: Ints) -> Fit:
        """The fit without some regions; the cost depends only on their number."""
        removed = Sums.of(
            design.shares[regions], design.covariates[regions], 1 / self.weight[regions]
        )
        weight = self.weight.copy()
        weight[regions] = 0
        return self._of(weight, self.sums.minus(removed), self.lift)

    def project(self, design: Design, y: Floats) -> tuple[Floats, Floats, Floats]:
        """B' D^-1 y (groups, bins), X' Sigma^-1 y (covariates, bins), y' D^-1 y (bins,)."""
        weighted = y * self.weight[:, None]
        z = self.lift.T @ (design.shares.T @ weighted)
        total = design.covariates.T @ weighted - self.common.T @ linalg.cho_solve(self.inner, z)
        return z, total, np.einsum("gj,gj->j", weighted, y)

    def deviance(self, design: Design, y: Floats) -> Floats:
        """-2 log restricted likelihood of each bin (bins,)."""
        z, total, squares = self.project(design, y)
        by_groups = (z * linalg.cho_solve(self.inner, z)).sum(0)
        by_covariates = (total * linalg.cho_solve(self.flat, total)).sum(0)
        return np.asarray(self.log_determinant + squares - (by_groups + by_covariates))

    def means(self, design: Design, y: Floats) -> Floats:
        """Posterior means of b (groups, bins): deviations from the population mean."""
        z, total, _ = self.project(design, y)
        alpha = linalg.cho_solve(self.flat, total)  # (covariates, bins)
        return np.asarray(self.lift @ linalg.cho_solve(self.inner, z - self.common @ alpha))

    def covariance(self) -> Floats:
        """Posterior covariance of b for one bin (groups, groups)."""
        own = self.lift @ linalg.cho_solve(self.inner, self.lift.T)
        return np.asarray(own + self._shift @ linalg.cho_solve(self.flat, self._shift.T))

    def sampling_variance(self) -> Floats:
        """The part of each group's posterior variance due to noise in regional means (groups,)."""
        slopes = self.covariance()
        identity = np.eye(len(self.flat[0]))
        surface = self._shift @ linalg.cho_solve(self.flat, identity)  # (groups, covariates)
        # The means are (slopes P' - surface X') D^-1 y, and the variance of y is D.
        total = slopes @ self.sums.groups @ slopes + surface @ self.sums.covariates @ surface.T
        both = slopes @ self.sums.common @ surface.T
        return np.maximum(np.diag(total - both - both.T), 0)

    @property
    def _shift(self) -> Floats:
        """By how much b moves with each covariate, (groups, covariates)."""
        return np.asarray(self.lift @ linalg.cho_solve(self.inner, self.common))


def independent_columns(columns: Floats) -> Floats:
    """Drop columns that depend linearly on earlier ones; the first column is ones."""
    basis = np.ones((len(columns), 1))
    for column in columns.T[1:]:
        residual = column - basis @ np.linalg.lstsq(basis, column, rcond=None)[0]
        size = float(np.linalg.norm(residual))
        if size > 1e-6 * float(np.linalg.norm(column)) and basis.shape[1] + 1 < len(columns):
            basis = np.column_stack([basis, residual * np.sqrt(len(residual)) / size])
    return basis


def nonnegative(means: Floats, covariance: Floats) -> tuple[Floats, Floats]:
    """Posterior modes under the constraint M >= 0, for means (bins, groups) with one covariance.

    Counts are not negative, which also informs about groups that are confounded. The mode
    minimises |M - means| in the metric of the covariance, by coordinate ascent on the multipliers
    (Hildreth 1957). For groups at the constraint, the covariances (bins, groups, groups)
    lose the share of variance that truncation at the mean removes.
    """
    mode = means.copy()
    multipliers = np.zeros_like(means)
    variance = np.diag(covariance)
    active = np.flatnonzero((means < 0).any(1))
    for _ in range(SWEEPS):
        if not len(active):
            break
        largest = np.zeros(len(active))
        for group in np.flatnonzero(variance > 1e-12 * variance.max(initial=0)):
            old = multipliers[active, group]
            new = np.maximum(old - mode[active, group] / variance[group], 0)
            mode[active] += np.outer(new - old, covariance[group])
            multipliers[active, group] = new
            largest = np.maximum(largest, np.abs(new - old) * np.sqrt(variance[group]))
        active = active[largest > 1e-9]
    covariances = np.repeat(covariance[None], len(means), axis=0)
    patterns, pattern_of_bin = np.unique(multipliers > 0, axis=0, return_inverse=True)
    for number, bound in enumerate(map(np.flatnonzero, patterns)):
        if len(bound):
            inverse = linalg.pinvh(covariance[np.ix_(bound, bound)])
            explained = covariance[:, bound] @ inverse @ covariance[bound]
            covariances[pattern_of_bin.ravel() == number] -= HALF_NORMAL * explained
    return np.maximum(mode, 0), covariances
