"""Group means M from (P, V, n): factor-structured empirical Bayes, or least squares.

For every bin, in units of its standard deviation between people, minus the population mean mu0:

    y = X alpha + P b + e
    b ~ N(0, lambda S),  S = C (sum_a rho_a [same level of attribute a] + rho_0 I) C',  C = I - 1 w'
    e_g ~ N(0, 1 / n_g + lambda omega + lambda tr(S D_g))

- w are the population shares, so that the groups together keep the population mean.
- X are ones and, where people chose their regions and centroids are known, a surface over the map.
  alpha has a flat prior.
- lambda omega is a region effect that composition does not explain; 0 under random assignment.
- D_g is the covariance of an uncertain composition.

Restricted likelihood fits the variances, with weak priors on their ratios. Directions that the
regions do not identify stay at the population mean, and the posterior covariance shows it. Means
are not negative. If the population includes people outside all regions, w and mu0 describe the
population, and these people form one more region.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from scipy import linalg

from mobatlas.data.arrays import Floats, Ints
from mobatlas.errors import MobatlasError
from mobatlas.groups import Groups
from mobatlas.progress import log
from mobatlas.regions.composition import refuse_empty_regions
from mobatlas.regions.recovery.category_prior import CategoryPrior
from mobatlas.regions.recovery.geography import (
    MIN_BLOCKED_REGIONS,
    BlockValidation,
    confounding,
    surface,
)
from mobatlas.regions.recovery.posterior import (
    CompositionError,
    Design,
    Fit,
    Variances,
    calibrate_composition,
    independent_columns,
    nonnegative,
)
from mobatlas.regions.recovery.variances import BinSet, Deviations, Stratum, fit_variances, strata
from mobatlas.regions.types import (
    Aggregates,
    Composition,
    Recovery,
    Regions,
    bins_by_map,
    population_mean,
    with_rest,
)

# Bounds of a group's noise variance relative to the population's: it grows with the mean.
HETEROSCEDASTIC = (0.2, 10.0)
# Where people chose their regions, aggregates also follow composition because the regions differ.
# These contextual slopes are not group differences, and only their size reveals them. Groups
# explain at most this share of the variance between people. Larger slopes are attributed to groups
# in proportion. In the Santiago survey, age and sex explain 0.06 of the variance of a category on
# average, and 0.37 for education. Of 0.1, 0.2 and 0.4, its validation people support 0.2.
GROUPS_EXPLAIN = 0.2
# In rare bins, that share would let groups differ by several times the mean. Below this squared
# ratio of mean to standard deviation, the limit therefore falls in proportion.
RARE = 0.1
METHODS = ("bayes", "least-squares", "simplex")
MIN_PREDICTED = 2e-4  # of the observed sum of squares: smaller predictions are not tested
MOSTLY_PRIOR = 0.5  # with less information, an estimate depends mostly on the prior


@dataclass(frozen=True)
class RecoveryOptions:
    """Assumptions of the Bayesian recovery.

    Parameters
    ----------
    region_effects
        Whether regions differ for reasons other than composition; each feature map is then fitted
        separately. Default: unless people were assigned to regions at random.
    exact_composition
        Whether the composition has no counting error. Default: if people were assigned at random.
    geography
        Whether to remove a smooth surface over the map. Default: as `region_effects`.
    groups_explain
        The largest share of the variance between people that groups explain, with region effects.
        100 removes this limit.

    Examples
    --------
    >>> without_limit = RecoveryOptions(groups_explain=100)
    >>> recover(load_regions("regions"), options=without_limit)  # doctest: +SKIP
    """

    region_effects: bool | None = None
    exact_composition: bool | None = None
    geography: bool | None = None
    groups_explain: float = GROUPS_EXPLAIN

    def __post_init__(self) -> None:
        if not self.groups_explain > 0:
            raise MobatlasError(
                f"groups_explain={self.groups_explain}: give a number above 0, such as 0.2"
            )


DEFAULT_OPTIONS = RecoveryOptions()


def recover(
    regions: Regions,
    method: str = "bayes",
    *,
    options: RecoveryOptions = DEFAULT_OPTIONS,
    parents: Mapping[str, str] | None = None,
    quiet: bool = False,
) -> Recovery:
    """Estimate group means from regions, and from the rest of the population where it is known.

    Parameters
    ----------
    regions
        Composition and aggregates, as `load_regions` returns them.
    method
        "bayes", "least-squares" (the paper's pseudo-inverse) or "simplex".
    options
        Assumptions of "bayes".
    parents
        The parent of a feature, such as the category of a place. Estimates of places then borrow
        strength from their category.
    quiet
        Do not log warnings about confounding with places.

    Returns
    -------
    Recovery
        Means, covariances and intervals per group and feature.

    Examples
    --------
    >>> recovery = recover(load_regions("regions"))  # doctest: +SKIP
    >>> recovery.means.shape  # doctest: +SKIP
    (8, 40)
    """
    if method not in METHODS:
        raise MobatlasError(
            f"recovery method '{method}' does not exist (known: {', '.join(METHODS)})"
        )
    _check_regions(regions)
    regions = with_rest(regions)
    aggregates = regions.aggregates
    if method != "bayes":
        return fit_least_squares(regions.composition, aggregates, method == "simplex")
    model = _BayesModel.of(regions, options)
    population = regions.population
    # With published noise, the mean of the population is a better estimate.
    known_mean = None if population is None or aggregates.noise is None else population.values
    recovery = model.fit(aggregates, known_mean)
    prior = CategoryPrior.of(recovery, parents or {})
    if prior is not None:
        residuals = replace(aggregates, values=aggregates.values - model.shares @ prior.full_shift)
        recovery = prior.combine(recovery, model.fit(residuals, recovery.baseline, prior.shift))
    for warning in () if quiet else confounding(recovery):
        log.warning("%s", warning)
    return recovery


@dataclass(frozen=True)
class _BayesModel:
    """The part of the Bayesian model that is the same for all feature maps."""

    groups: Groups
    shares: Floats  # calibrated P (regions, groups)
    composition_error: CompositionError | None
    centroids: Floats | None  # (regions, 2)
    groups_explain: float | None  # None: no region effects

    @classmethod
    def of(cls, regions: Regions, options: RecoveryOptions) -> _BayesModel:
        composition = regions.composition
        randomised = regions.randomised
        exact = randomised if options.exact_composition is None else options.exact_composition
        effects = not randomised if options.region_effects is None else options.region_effects
        geography = effects if options.geography is None else options.geography
        calibrated = (composition.shares, None) if exact else calibrate_composition(composition)
        return cls(
            composition.groups,
            *calibrated,
            centroids=regions.centroids if geography else None,
            groups_explain=options.groups_explain if effects else None,
        )

    def fit(
        self, aggregates: Aggregates, known_mean: Floats | None, shift: Floats | None = None
    ) -> Recovery:
        """Fit all feature maps: separately with region effects, because these differ by map.

        `shift` (groups, features) is the prior mean minus mu0, already removed from the aggregates.
        """
        if self.groups_explain is None:
            return self._fit_map(aggregates, known_mean, shift)
        maps = bins_by_map(aggregates.features)
        fitted = [
            self._fit_map(
                aggregates.select_features(bins),
                None if known_mean is None else known_mean[bins],
                None if shift is None else shift[:, bins],
            )
            for bins in maps.values()
        ]
        order = np.argsort(np.concatenate(list(maps.values())))
        return replace(
            fitted[0],
            features=aggregates.features,
            means=np.concatenate([each.means for each in fitted], 1)[:, order],
            covariance=np.concatenate([each.covariance for each in fitted])[order],
            prior_variance=np.concatenate([each.prior_variance for each in fitted], 1)[:, order],
            baseline=np.concatenate([each.baseline for each in fitted])[order],
            variances={
                f"{name} {key}" if len(maps) > 1 else key: value
                for name, each in zip(maps, fitted, strict=True)
                for key, value in each.variances.items()
            },
            group_share=np.concatenate([each.group_share for each in fitted])[order],
            transfer={name: value for each in fitted for name, value in each.transfer.items()},
        )

    def _fit_map(
        self, aggregates: Aggregates, known_mean: Floats | None, shift: Floats | None
    ) -> Recovery:
        w, mean = population_mean(self.shares, aggregates)
        # Noise may make the mean of a rare place negative.
        mu0 = np.maximum(mean, 0) if known_mean is None else known_mean
        scale = _person_sd(aggregates, mu0)
        attributes, factors = _factors(self.groups)
        centring = np.eye(len(self.groups)) - np.outer(np.ones(len(self.groups)), w)
        covariates = independent_columns(surface(self.centroids, len(self.shares)))
        design = Design(
            self.shares, aggregates.n, self.composition_error, factors, centring, covariates
        )
        y = Deviations(aggregates.values, mu0, scale, aggregates.noise)
        members = strata(aggregates.features, mu0 / scale)
        ratios, overall, fitted = fit_variances(design, y, members, self.groups_explain is not None)
        centroids = None if self.groups_explain is None else self.centroids
        transfer = _transfer(design, y, centroids, members, fitted)
        group_share = self._group_share(mu0, scale, members, fitted, transfer)
        start = np.zeros((len(mu0), len(w))) if shift is None else shift.T / scale[:, None]
        means, covariance, prior = _posteriors(
            design, y, members, overall, fitted, group_share, start
        )
        components = {
            f"share_{name}": float(share)
            for name, share in zip((*attributes, "group"), ratios, strict=True)
        }
        return Recovery(
            groups=self.groups,
            features=aggregates.features,
            means=means.T * scale,
            covariance=covariance,
            prior_variance=np.outer((overall.root**2).sum(1), prior * scale**2),
            baseline=mu0,
            shares=w,
            variances=components
            | {"region_effect": overall.region_effect, "group_scale": overall.scale},
            group_share=group_share,
            transfer=transfer,
        )

    def _group_share(
        self,
        mu0: Floats,
        scale: Floats,
        members: Mapping[Stratum, Ints],
        fitted: Mapping[Stratum, Variances],
        transfer: Mapping[str, float],
    ) -> Floats:
        """The share of each bin's slopes that is attributed to groups (features,)."""
        share = np.ones(len(mu0))
        if self.groups_explain is None:
            return share
        for stratum, bins in members.items():
            frequency = np.maximum((mu0 / scale)[bins] ** 2, 1e-300)
            limit = self.groups_explain * min(1.0, float(np.exp(np.log(frequency).mean())) / RARE)
            share[bins] = min(1.0, limit / fitted[stratum].scale) * transfer.get(stratum[0], 1.0)
        share[mu0 <= 0] = 1.0  # a bin that is zero for everyone is zero for every group
        return share


def _posteriors(
    design: Design,
    y: Deviations,
    members: Mapping[Stratum, Ints],
    overall: Variances,
    fitted: Mapping[Stratum, Variances],
    group_share: Floats,
    start: Floats,
) -> tuple[Floats, Floats, Floats]:
    """Means (features, groups) in units of the bins, covariances, and the scale of the prior."""
    population = y.mean / y.scale  # (features,)
    # Bins that every region suppresses stay at the prior.
    means = population[:, None] + start
    covariance = np.repeat(  # (features, groups, groups)
        (overall.scale * overall.root @ overall.root.T)[None], len(means), axis=0
    )
    prior = np.full(len(means), overall.scale)
    for stratum, bins in members.items():
        variances = fitted[stratum]
        all_regions = Fit.of(design, variances)
        prior[bins] = group_share[bins] * variances.scale
        share = float(group_share[bins[0]])
        for part in y.bin_sets(design, bins):
            means[part.bins], covariance[part.bins] = _posterior(
                part,
                part.fit(all_regions, variances),
                population[part.bins],
                means[part.bins],
                part.mean_variance(variances.added_noise),
                share,
            )
    covariance *= (y.scale**2)[:, None, None]
    return means, covariance, prior


def _posterior(
    part: BinSet, fit: Fit, population: Floats, start: Floats, mean_variance: float, share: float
) -> tuple[Floats, Floats]:
    """Means (bins, groups) and covariances (bins, groups, groups), in units of the bins.

    `population` (bins,) is mu0, `start` (bins, groups) the prior mean, and `share` the part of the
    slopes' variance due to groups. Noise grows with the mean: a group that visits a place more
    than the population is less certain.
    """
    slopes = fit.means(part.design, part.y).T  # (bins, groups)
    remaining = share**2 * fit.covariance() + share * (1 - share) * fit.lift @ fit.lift.T
    means, covariance = nonnegative(start + share * slopes, remaining)
    ratio = np.clip(  # (bins, groups)
        means / np.maximum(population, 1e-300)[:, None], *HETEROSCEDASTIC
    )
    sampling = np.minimum(
        share**2 * fit.sampling_variance(), np.diagonal(covariance, axis1=1, axis2=2)
    )
    covariance += mean_variance
    variance = np.diagonal(covariance, axis1=1, axis2=2)
    inflated = np.maximum(variance + (ratio - 1) * (sampling + mean_variance), 0)
    inflation = np.sqrt(inflated / np.maximum(variance, 1e-300))
    # Rows and columns are scaled alike, so that correlations do not change.
    covariance *= inflation[:, :, None]
    covariance *= inflation[:, None, :]
    return means, covariance


def _transfer(
    design: Design,
    y: Deviations,
    centroids: Floats | None,
    members: Mapping[Stratum, Ints],
    fitted: Mapping[Stratum, Variances],
) -> dict[str, float]:
    """How much of each feature map's slopes transfers between parts of the map: 0 to 1."""
    if centroids is None or len(centroids) < MIN_BLOCKED_REGIONS:
        return {}
    validation = BlockValidation(design, centroids)
    noise = y.added_noise(np.arange(len(y.mean)))
    sums: dict[str, Floats] = {}
    for stratum, bins in members.items():
        chunks = map(y.of, y.chunks(bins[y.complete[bins]]))
        compared = validation.compare(chunks, fitted[stratum]._replace(added_noise=noise))
        sums[stratum[0]] = sums.get(stratum[0], np.zeros(3)) + compared
    return {
        name: float(np.clip(product / predicted, 0, 1))
        for name, (product, predicted, observed) in sums.items()
        if predicted > MIN_PREDICTED * observed
    }


def _factors(groups: Groups) -> tuple[list[str], tuple[Floats, ...]]:
    """Attributes that several groups share, and [same level] of each, then the identity."""
    same = {
        name: groups.level_codes[:, [a]] == groups.level_codes[:, a]
        for a, name in enumerate(groups.attribute_names)
    }
    useful = {
        name: factor.astype(np.float64)
        for name, factor in same.items()
        if not factor.all() and factor.sum() > len(groups)
    }
    return list(useful), (*useful.values(), np.eye(len(groups)))


def _person_sd(aggregates: Aggregates, mu0: Floats) -> Floats:
    """Standard deviation between people; that of Poisson visits where it is unknown."""
    variance = mu0 if aggregates.spread is None else np.maximum(aggregates.spread, 0.1 * mu0)
    return np.sqrt(np.maximum(variance, 1 / aggregates.n.sum()))


def _check_regions(regions: Regions) -> None:
    aggregates = regions.aggregates
    if not len(aggregates.features):
        raise MobatlasError(
            "aggregates: no feature is left; choose another --feature or less --mask"
        )
    refuse_empty_regions("aggregates", aggregates.regions, aggregates.n)
    if not ((aggregates.values != 0) & ~np.isnan(aggregates.values)).any():
        raise MobatlasError(
            "aggregates: every value is zero or suppressed; nothing can be estimated"
        )
    if np.isnan(regions.composition.shares).any():
        raise MobatlasError("composition: some shares are missing (NaN); complete the table")


def fit_least_squares(
    composition: Composition, aggregates: Aggregates, on_simplex: bool
) -> Recovery:
    """Least squares, with the population mean in suppressed cells; no uncertainty."""
    w, mu0 = population_mean(composition.shares, aggregates)
    values = np.where(np.isnan(aggregates.values), mu0, aggregates.values)
    estimate = simplex_least_squares if on_simplex else pseudo_inverse
    means = estimate(composition.shares, values)  # (groups, features)
    return Recovery(
        groups=composition.groups,
        features=aggregates.features,
        means=means,
        covariance=np.zeros((len(mu0), len(w), len(w))),
        prior_variance=np.zeros_like(means),
        baseline=mu0,
        shares=w,
        variances={},
        group_share=np.ones(len(mu0)),
    )


def pseudo_inverse(shares: Floats, values: Floats) -> Floats:
    """The M of least norm that minimises |P M - V| (Lemma "Stability under aggregate ...")."""
    return np.asarray(linalg.pinv(shares) @ values, dtype=np.float64)


def simplex_least_squares(shares: Floats, values: Floats, iterations: int = 2_000) -> Floats:
    """Minimise |P M - V| where rows of M are shares times the mean total.

    The method is accelerated projected gradient.
    """
    total = values.sum(1).mean()
    target = values / np.maximum(values.sum(1, keepdims=True), 1e-300)
    step = 1 / max(float(np.linalg.norm(shares, 2)) ** 2, 1e-12)
    means = np.tile(target.mean(0), (shares.shape[1], 1))
    point = means
    momentum = 1.0
    for _ in range(iterations):
        updated = _project_to_simplex(point - step * shares.T @ (shares @ point - target))
        next_momentum = (1 + np.sqrt(1 + 4 * momentum**2)) / 2
        point = updated + (momentum - 1) / next_momentum * (updated - means)
        if np.abs(updated - means).max() < 1e-12:
            break
        means = updated
        momentum = next_momentum
    return np.asarray(means * total)


def _project_to_simplex(rows: Floats) -> Floats:
    """The nearest point of the simplex to each row (Held, Wolfe and Crowder 1974)."""
    ordered = -np.sort(-rows, axis=1)
    excess = (np.cumsum(ordered, 1) - 1) / np.arange(1, rows.shape[1] + 1)
    last = (ordered > excess).sum(1) - 1
    return np.maximum(rows - np.take_along_axis(excess, last[:, None], 1), 0)
