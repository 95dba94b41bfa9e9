"""Group feature means from (P, V, n): factor-structured empirical Bayes, and the least squares it is compared with.

For every bin, in units of its standard deviation between people, y = P (1 alpha + b) + e:

    b ~ N(0, lambda S),  S = C (sum_a rho_a [same level of attribute a] + rho_0 I) C',  C = I - 1 w'
    e_g ~ N(0, 1 / n_g + lambda omega + lambda c_g)

alpha is the population mean (flat prior; rows of P sum to 1, so it is a shift of all groups), w are the population shares,
lambda omega is a region effect that composition does not explain (0 where people were assigned at random), and lambda c_g is
what an uncertain composition adds. The variances are fitted by restricted likelihood with weak priors on their ratios; what
the regions do not identify stays at the population mean, and the posterior covariance says how far that may be off.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import linalg, optimize, stats

from mobatlas.errors import MobatlasError
from mobatlas.groups import Groups
from mobatlas.regions.least_squares import pseudo_inverse, simplex_least_squares
from mobatlas.regions.table import Aggregates, Composition, Floats, Regions

FIT_CELLS = 200_000  # regions x bins on which the variances are fitted; the most frequent bins, at least 64
BAND = 4.0  # bins whose frequencies lie within this factor share a prior variance
# Log variance of an attribute relative to what is a group's own, a priori: mean and standard deviation. In the paper's
# Figure "Pairwise JSD" all pairs of groups are nearly equally far apart, so what groups of one age or gender share is small.
RATIO_PRIOR = (np.log(0.15), 1.0)
STRATUM_SPREAD = 3.0  # prior standard deviation of the log scale of a stratum around the overall one
HETEROSCEDASTIC = (0.2, 10.0)  # bounds of a group's noise variance relative to the population's: it grows with the mean
EFFECT_PRIOR = (np.log(0.1), 2.0)  # of log omega
SCALE_PRIOR = (np.log(0.02), 3.0)  # of log lambda: groups differ by about a seventh of a person's standard deviation
BOUNDS = (-14.0, 6.0)  # of the logarithms
METHODS = ("bayes", "least-squares", "simplex")


@dataclass(frozen=True)
class Recovery:
    """Recovered group means and how sure they are."""

    groups: Groups
    features: tuple[str, ...]
    means: Floats  # M (groups, features)
    covariance: Floats  # (features, groups, groups) posterior; zero where the method has none
    prior: Floats  # (groups, features) prior variance of a group's deviation from the population
    baseline: Floats  # mu0 (features,): everyone is the population
    shares: Floats  # w (groups,)
    variances: dict[str, float]  # the fitted ones

    @property
    def sd(self) -> Floats:
        """Posterior standard deviations (groups, features)."""
        return np.sqrt(np.diagonal(self.covariance, axis1=1, axis2=2).T)

    def interval(self, level: float = 0.9) -> tuple[Floats, Floats]:
        """Posterior intervals; counts are not negative."""
        z = stats.norm.ppf(0.5 + level / 2)
        return np.maximum(self.means - z * self.sd, 0), np.maximum(self.means + z * self.sd, 0)

    def information(self) -> Floats:
        """Per group, the share of the prior variance that the regions removed: 0 is all prior, 1 is all data."""
        removed = 1 - np.minimum(self.sd**2 / np.maximum(self.prior, 1e-300), 1)
        return np.asarray(removed @ self.baseline / max(self.baseline.sum(), 1e-300))


def recover(
    regions: Regions,
    method: str = "bayes",
    *,
    region_effects: bool | None = None,
    exact_composition: bool | None = None,
) -> Recovery:
    """Group means from regions.

    `region_effects` defaults to whether people chose their regions; `exact_composition` to whether the composition was counted
    on the very people of the aggregates.
    """
    if method not in METHODS:
        raise MobatlasError(f"recovery method '{method}' does not exist (known: {', '.join(METHODS)})")
    composition, aggregates = regions.composition, regions.aggregates
    _refuse_unusable(composition, aggregates)
    if method != "bayes":
        return _least_squares(composition, aggregates, on_simplex=method == "simplex")
    exact = regions.randomised if exact_composition is None else exact_composition
    effects = not regions.randomised if region_effects is None else region_effects
    shares, certainty = (composition.shares, None) if exact else calibrate_composition(composition)
    return _bayes(composition.groups, shares, certainty, aggregates, effects)


def population(shares: Floats, aggregates: Aggregates) -> tuple[Floats, Floats]:
    """The population's composition w (groups,) and mean mu0 (features,), regions weighted by their people."""
    weight = aggregates.n / aggregates.n.sum()
    known = ~np.isnan(aggregates.values)
    per_bin = weight[:, None] * known
    mean = np.nansum(per_bin * np.nan_to_num(aggregates.values), 0) / np.maximum(per_bin.sum(0), 1e-300)
    return weight @ shares, mean


def calibrate_composition(composition: Composition) -> tuple[Floats, Floats]:
    """Regression calibration of a composition counted on n people: E[p | counts] and how many people that is worth.

    True shares vary between regions like Dirichlet(a w); `a` comes from how much more the counted ones vary than n explains.
    Plugging in the counted shares would attenuate every group difference.
    """
    shares, n = composition.shares, composition.n
    finite = np.isfinite(n)
    if not finite.any():
        return shares, np.full(len(n), np.inf)
    weight = np.where(finite, n, n[finite].max()) / np.where(finite, n, n[finite].max()).sum()
    centre = weight @ shares  # (groups,)
    spread = ((shares - centre) ** 2).sum(1) / max(1 - (centre**2).sum(), 1e-12)  # (regions,) in units of one person's
    sampling = np.where(finite, 1 / np.maximum(n, 1), 0)
    between = float(weight @ (spread - sampling)) / max(float(weight @ (1 - sampling)), 1e-12)
    if between <= 0:
        return np.tile(centre, (len(n), 1)), np.full(len(n), 1e12)
    a = max(1 / min(between, 1) - 1, 0.0)
    counted = np.where(finite, n, 1e12)
    return (counted[:, None] * shares + a * centre) / (counted + a)[:, None], np.where(finite, counted + a, np.inf)


@dataclass(frozen=True)
class _Problem:
    """Everything about the regions that does not depend on the bin."""

    shares: Floats  # P (regions, groups)
    n: Floats  # (regions,)
    certainty: Floats | None  # (regions,) people that the composition is worth; None: exact
    factors: tuple[Floats, ...]  # one (groups, groups) matrix an attribute, then the identity
    centring: Floats  # C (groups, groups)

    def prior(self, rho: Floats) -> Floats:
        """F with S = F F', trace of S equal to the number of groups."""
        inner = sum(weight * factor for weight, factor in zip(rho, self.factors, strict=True))
        root = self.centring @ linalg.cholesky(inner, lower=True)
        size = np.sqrt(max((root**2).sum() / len(root), 1e-12))
        return np.asarray(root / size)

    def noise(self, root: Floats, scale: float, effect: float, published: float) -> Floats:
        """d (regions,): the variance of a regional mean that group means do not explain."""
        noise = 1 / self.n + scale * effect + published
        if self.certainty is not None:
            covariance = root @ root.T
            own = self.shares @ np.diag(covariance) - np.einsum("gk,kl,gl->g", self.shares, covariance, self.shares)
            noise = noise + scale * np.maximum(own, 0) / (self.certainty + 1)
        return noise


@dataclass(frozen=True)
class _Fit:
    """The algebra of one set of variances, all of it groups x groups (Woodbury)."""

    weight: Floats  # 1/d (regions,)
    lift: Floats  # sqrt(lambda) F (groups, groups)
    inner: Any  # Cholesky factor of A = I + B' D^-1 B
    ones: Floats  # B' D^-1 1 (groups,)
    flat: float  # 1' Sigma^-1 1
    log_determinant: float

    @classmethod
    def of(cls, problem: _Problem, root: Floats, scale: float, effect: float, published: float) -> _Fit:
        noise = problem.noise(root, scale, effect, published)
        weight = 1 / noise
        lift = np.sqrt(scale) * root
        design = problem.shares @ lift  # B (regions, groups)
        weighted = design * weight[:, None]
        inner = linalg.cho_factor(np.eye(design.shape[1]) + design.T @ weighted, lower=True)
        ones = weighted.sum(0)
        flat = float(weight.sum() - ones @ linalg.cho_solve(inner, ones))
        log_determinant = float(np.log(noise).sum() + 2 * np.log(np.diag(inner[0])).sum())
        return cls(weight, lift, inner, ones, max(flat, 1e-300), log_determinant)

    def project(self, problem: _Problem, y: Floats) -> tuple[Floats, Floats, Floats]:
        """B' D^-1 y (groups, bins), 1' Sigma^-1 y (bins,), y' D^-1 y (bins,)."""
        weighted = y * self.weight[:, None]
        z = self.lift.T @ (problem.shares.T @ weighted)
        total = weighted.sum(0) - self.ones @ linalg.cho_solve(self.inner, z)
        return z, total, np.einsum("gj,gj->j", weighted, y)

    def deviance(self, problem: _Problem, y: Floats) -> Floats:
        """-2 log restricted likelihood of each bin (bins,)."""
        z, total, squares = self.project(problem, y)
        quadratic = squares - (z * linalg.cho_solve(self.inner, z)).sum(0) - total**2 / self.flat
        return np.asarray(self.log_determinant + np.log(self.flat) + quadratic)

    def means(self, problem: _Problem, y: Floats) -> Floats:
        """Posterior means 1 alpha + b (groups, bins)."""
        z, total, _ = self.project(problem, y)
        alpha = total / self.flat
        return np.asarray(alpha + self.lift @ linalg.cho_solve(self.inner, z - np.outer(self.ones, alpha)))

    def sampling_variance(self, problem: _Problem) -> Floats:
        """The part of each group's posterior variance that is the noise of the regional means (groups,)."""
        lifted = self.lift @ linalg.cho_solve(self.inner, self.lift.T @ (problem.shares * self.weight[:, None]).T)
        shift = 1 - self.lift @ linalg.cho_solve(self.inner, self.ones)
        against = self.weight - (problem.shares @ self.lift @ linalg.cho_solve(self.inner, self.ones)) * self.weight
        gain = lifted + np.outer(shift, against) / self.flat  # (groups, regions): the means are gain @ y
        return np.asarray((gain**2 / self.weight).sum(1))

    def covariance(self) -> Floats:
        """Posterior covariance of the means of one bin (groups, groups)."""
        own = self.lift @ linalg.cho_solve(self.inner, self.lift.T)
        shift = 1 - self.lift @ linalg.cho_solve(self.inner, self.ones)
        return np.asarray(own + np.outer(shift, shift) / self.flat)


def _bayes(groups: Groups, shares: Floats, certainty: Floats | None, aggregates: Aggregates, effects: bool) -> Recovery:
    w, mu0 = population(shares, aggregates)
    scale = _person_sd(aggregates, mu0)
    same = [(codes[:, None] == codes[None]).astype(np.float64) for codes in groups.level_codes.T]
    useful = [factor for factor in same if 1 < np.linalg.matrix_rank(factor) < len(groups)]
    factors = (*useful, np.eye(len(groups)))
    centring = np.eye(len(groups)) - np.outer(np.ones(len(groups)), w)
    problem = _Problem(shares, aggregates.n, certainty, factors, centring)
    y = (aggregates.values - mu0) / scale  # (regions, features)
    published = np.zeros(len(mu0)) if aggregates.noise is None else aggregates.noise / scale**2
    complete = np.asarray(~np.isnan(y).any(0))
    enough = max(FIT_CELLS // len(y), 64)
    frequent = np.argsort(-mu0 * complete, kind="stable")[: min(enough, int(complete.sum()))]
    ratios, effect, overall = _fit_variances(problem, y[:, frequent], float(published.mean()), effects)
    root = problem.prior(ratios)
    stratum = _strata(mu0 / scale)
    means = np.empty((len(groups), len(mu0)))
    covariance = np.empty((len(mu0), len(groups), len(groups)))
    prior = np.empty(len(mu0))
    for number in range(int(stratum.max()) + 1):
        members = np.flatnonzero(stratum == number)
        known = members[complete[members]]
        noise = float(published[members].mean())
        centre = _fit_scale(problem, root, y[:, known], effect, noise, overall) if len(known) else overall
        prior[members] = centre
        for part, rows in [(known, slice(None)), *_by_missing(y, members[~complete[members]])]:
            if len(part):
                held, steepness = _subset(problem, rows), scale[part] / np.maximum(mu0[part], 1e-300)
                found = _posterior(held, root, y[rows][:, part], (centre, effect, noise), steepness)
                means[:, part], covariance[part] = found
    factor_names = [name for name, factor in zip(groups.attribute_names, same, strict=True) if _among(factor, useful)]
    variances = {f"share_{name}": float(r) for name, r in zip((*factor_names, "group"), ratios, strict=True)}
    variances |= {"region_effect": effect, "group_scale": overall}
    return Recovery(
        groups=groups,
        features=aggregates.features,
        means=np.maximum(mu0 + scale * means, 0),
        covariance=covariance * (scale**2)[:, None, None],
        prior=np.outer((root**2).sum(1), prior * scale**2),
        baseline=mu0,
        shares=w,
        variances=variances,
    )


def _among(factor: Floats, useful: list[Floats]) -> bool:
    return any(factor is candidate for candidate in useful)


def _fit_variances(problem: _Problem, y: Floats, published: float, effects: bool) -> tuple[Floats, float, float]:
    """Shares of the attributes in the variance between groups, the region effect relative to it, and its scale."""
    attributes = len(problem.factors) - 1

    def unpack(x: Floats) -> tuple[Floats, float, float]:
        rho = np.exp(np.append(x[1 : 1 + attributes], 0.0))
        effect = float(np.exp(x[-1])) if effects else 0.0
        return rho / rho.sum(), effect, float(np.exp(x[0]))

    def objective(x: Floats) -> float:
        rho, effect, scale = unpack(x)
        penalty = (((x[1 : 1 + attributes] - RATIO_PRIOR[0]) / RATIO_PRIOR[1]) ** 2).sum()
        penalty += ((x[0] - SCALE_PRIOR[0]) / SCALE_PRIOR[1]) ** 2
        if effects:
            penalty += ((x[-1] - EFFECT_PRIOR[0]) / EFFECT_PRIOR[1]) ** 2
        return _Fit.of(problem, problem.prior(rho), scale, effect, published).deviance(problem, y).sum() + float(
            penalty
        )

    start = np.concatenate(
        ([SCALE_PRIOR[0]], np.full(attributes, RATIO_PRIOR[0]), [EFFECT_PRIOR[0]] if effects else [])
    )
    bounds = [BOUNDS, *[(-6.0, 6.0)] * attributes, *([BOUNDS] if effects else [])]
    found = optimize.minimize(objective, start, method="L-BFGS-B", bounds=bounds, options={"maxiter": 60})
    return unpack(found.x)


def _fit_scale(problem: _Problem, root: Floats, y: Floats, effect: float, published: float, overall: float) -> float:
    """Frequent bins differ more between groups, in units of noise, than rare ones: each stratum has its own scale."""

    def objective(x: float) -> float:
        prior = ((x - np.log(overall)) / STRATUM_SPREAD) ** 2
        return _Fit.of(problem, root, float(np.exp(x)), effect, published).deviance(problem, y).sum() + float(prior)

    found = optimize.minimize_scalar(
        objective, bounds=(np.log(overall) - 6, np.log(overall) + 4), method="bounded", options={"xatol": 0.02}
    )
    return float(np.exp(found.x))


def _posterior(
    problem: _Problem, root: Floats, y: Floats, variances: tuple[float, float, float], steepness: Floats
) -> tuple[Floats, Floats]:
    """Means (groups, bins) and covariances (bins, groups, groups) in units of the bins.

    `steepness` is a bin's standard deviation over its mean: noise grows with the mean, so a group above it is less certain.
    """
    fit = _Fit.of(problem, root, *variances)
    means = fit.means(problem, y)
    relative = np.clip(1 + steepness * means, *HETEROSCEDASTIC)  # (groups, bins)
    covariance = np.repeat(fit.covariance()[None], y.shape[1], axis=0)
    groups = np.arange(len(means))
    covariance[:, groups, groups] += ((relative - 1) * fit.sampling_variance(problem)[:, None]).T
    return means, covariance


def _strata(frequency: Floats) -> npt.NDArray[np.int64]:
    """Bins by powers of four of their frequency: what everybody does daily differs otherwise than what few do ever."""
    bands = np.floor(np.log(np.maximum(frequency, 1e-12)) / np.log(BAND)).astype(np.int64)
    return np.asarray(np.unique(bands, return_inverse=True)[1].ravel(), dtype=np.int64)


def _person_sd(aggregates: Aggregates, mu0: Floats) -> Floats:
    """Standard deviation between people; where nobody measured it, as if visits were Poisson."""
    variance = mu0 if aggregates.spread is None else np.maximum(aggregates.spread, 0.1 * mu0)
    return np.sqrt(np.maximum(variance, 1 / aggregates.n.sum()))


def _by_missing(y: Floats, members: npt.NDArray[np.int64]) -> Iterator[tuple[Any, Any]]:
    """Bins with suppressed cells, grouped by which regions are left."""
    if not len(members):
        return
    patterns, which = np.unique(~np.isnan(y[:, members]), axis=1, return_inverse=True)
    for number in range(patterns.shape[1]):
        rows = np.flatnonzero(patterns[:, number])
        if len(rows):
            yield members[which.ravel() == number], rows


def _subset(problem: _Problem, rows: Any) -> _Problem:
    certainty = None if problem.certainty is None else problem.certainty[rows]
    return _Problem(problem.shares[rows], problem.n[rows], certainty, problem.factors, problem.centring)


def _least_squares(composition: Composition, aggregates: Aggregates, on_simplex: bool) -> Recovery:
    """The paper's pseudo-inverse, or the same with every group's shares on the simplex."""
    w, mu0 = population(composition.shares, aggregates)
    values = np.where(np.isnan(aggregates.values), mu0, aggregates.values)
    means = (simplex_least_squares if on_simplex else pseudo_inverse)(composition.shares, values)
    groups = len(composition.groups)
    return Recovery(
        groups=composition.groups,
        features=aggregates.features,
        means=means,
        covariance=np.zeros((len(mu0), groups, groups)),
        prior=np.zeros_like(means),
        baseline=mu0,
        shares=w,
        variances={},
    )


def _refuse_unusable(composition: Composition, aggregates: Aggregates) -> None:
    if not len(aggregates.features):
        raise MobatlasError("aggregates: no feature is left; choose another feature map or fewer masks")
    if not (aggregates.n > 0).all():
        empty = aggregates.regions[int(np.flatnonzero(~(aggregates.n > 0))[0])]
        raise MobatlasError(f"aggregates: region '{empty}' has no people; leave it out")
    if not np.nansum(np.abs(aggregates.values)):
        raise MobatlasError("aggregates: every value is zero or suppressed; there is nothing to recover from")
    if np.isnan(composition.shares).any():
        raise MobatlasError("composition: some shares are NaN; mend the table")
