"""Group feature means from (P, V, n): factor-structured empirical Bayes, and the least squares it is compared with.

For every bin, in units of its standard deviation between people, with the population mean mu0 taken off, y = X alpha + P b + e:

    b ~ N(0, lambda S),  S = C (sum_a rho_a [same level of attribute a] + rho_0 I) C',  C = I - 1 w'
    e_g ~ N(0, 1 / n_g + lambda omega + lambda tr(S D_g))

w are the population shares, so that the groups together stay the population; X are ones and, where people chose their regions
and it is known where those lie, a surface over the map: alpha has a flat prior and is what regions have in common beyond mu0,
and what is due to where they are; lambda omega is a region effect that composition does not explain (0 where people were
assigned at random), and D_g is the covariance of an uncertain composition. The variances are fitted by restricted likelihood
with weak priors on their ratios; what the regions do not identify stays at the population mean, and the posterior covariance
says how far that may be off. Means are not negative. Where the population is larger than the people dealt to regions, w and
mu0 are the population's, and the rest of it is one more region.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
from scipy import special

from mobatlas.errors import MobatlasError
from mobatlas.groups import Groups
from mobatlas.regions.composition_error import calibrate_composition
from mobatlas.regions.geography import surface
from mobatlas.regions.population import with_rest
from mobatlas.regions.recovery.category_prior import Nesting
from mobatlas.regions.recovery.least_squares import pseudo_inverse, simplex_least_squares
from mobatlas.regions.recovery.posterior import Doubt, Fit, Problem, independent, nonnegative
from mobatlas.regions.recovery.strata import (
    Deviations,
    Part,
    Strata,
    Stratum,
    Variances,
    maps_of,
    strata,
)
from mobatlas.regions.recovery.transfer import FEWEST as FEWEST_BLOCKED
from mobatlas.regions.recovery.transfer import Blocks, confounding
from mobatlas.regions.recovery.variances import fit_variances
from mobatlas.regions.types import Aggregates, Composition, Floats, Regions, mean_over_regions

log = logging.getLogger("mobatlas")
HETEROSCEDASTIC = (
    0.2,
    10.0,
)  # bounds of a group's noise variance relative to the population's: it grows with the mean
# Where people chose their regions, aggregates also follow composition because places with other people are other places. Such
# contextual slopes are not group differences, and only their size tells: groups are assumed to explain at most so much of the
# variance between people, and a slope beyond it is believed in that proportion. In the Santiago survey age and sex explain 0.06
# of a category on average, 0.37 of education; of 0.1, 0.2 and 0.4, validation people there speak for 0.2.
GROUPS_EXPLAIN = 0.2
# Nor do groups differ by several times the mean, which a share of the variance of a rare bin would allow: below this square of
# mean over standard deviation the limit falls with it.
RARE = 0.1
METHODS = ("bayes", "least-squares", "simplex")
UNHEARD = 2e-4  # of what is seen: slopes that predict less are none to speak of
MOSTLY_PRIOR = 0.5  # information about a group below which its means are more assumption than data


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
    believed: Floats | None = (
        None  # (features,) share of what follows composition that is ascribed to groups; None: all
    )
    transfer: Mapping[str, float] = field(
        default_factory=dict
    )  # feature map -> how much of it holds all over the map

    @property
    def sd(self) -> Floats:
        """Posterior standard deviations (groups, features)."""
        return np.sqrt(np.diagonal(self.covariance, axis1=1, axis2=2).T)

    def interval(self, level: float = 0.9) -> tuple[Floats, Floats]:
        """Posterior intervals; counts are not negative."""
        z = special.ndtri(0.5 + level / 2)
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
    geography: bool | None = None,
    groups_explain: float = GROUPS_EXPLAIN,
    parents: Mapping[str, str] | None = None,
    quiet: bool = False,
) -> Recovery:
    """Group means from regions, and from the rest of the population where it is known (`with_rest`), whatever the method.

    `region_effects` and `geography`, a surface over the map, default to whether people chose their regions; `exact_composition`
    to whether the composition was counted on the very people of the aggregates. Without region effects all that follows
    composition is ascribed to groups; with them each feature map is fitted by itself, groups differ by at most
    `groups_explain` times the variance between people, in rare bins by little more than their mean, and where that binds it is
    logged, unless `quiet`. `parents` names the feature that another is part of, such as the category of a place, from which it
    then borrows (`nested`).
    """
    if method not in METHODS:
        raise MobatlasError(
            f"recovery method '{method}' does not exist (known: {', '.join(METHODS)})"
        )
    if not groups_explain > 0:
        raise MobatlasError(
            f"groups_explain={groups_explain}: groups explain something; give a number above 0"
        )
    _refuse_unusable(regions.composition, regions.aggregates)
    regions = with_rest(regions)
    composition, aggregates = regions.composition, regions.aggregates
    if method != "bayes":
        return _least_squares(composition, aggregates, on_simplex=method == "simplex")
    exact = regions.randomised if exact_composition is None else exact_composition
    effects = not regions.randomised if region_effects is None else region_effects
    shares, doubt = (composition.shares, None) if exact else calibrate_composition(composition)
    mapped = effects if geography is None else geography
    # With noise in what regions publish, everybody's mean is better known from elsewhere.
    known = (
        regions.population.values
        if regions.population is not None and aggregates.noise is not None
        else None
    )
    places, most = regions.places if mapped else None, groups_explain if effects else None
    fit = partial(_bayes, composition.groups, shares, doubt, places, most)
    fit = partial(_by_map, fit) if effects else fit
    found = fit(aggregates, known)
    nesting = Nesting.of(found, parents or {})
    if nesting is not None:
        left = replace(aggregates, values=aggregates.values - shares @ nesting.whole)
        mine = fit(left, found.baseline, nesting.shift)
        found = nesting.joined(found, mine)
    for sentence in () if quiet else confounding(found):
        log.warning("%s", sentence)
    return found


def population(shares: Floats, aggregates: Aggregates) -> tuple[Floats, Floats]:
    """The population's composition w (groups,) and mean mu0 (features,), regions weighted by their people."""
    weight = aggregates.n / aggregates.n.sum()
    return weight @ shares, mean_over_regions(aggregates.values, weight)


def _by_map(
    fit: Callable[..., Recovery],
    aggregates: Aggregates,
    known: Floats | None,
    start: Floats | None = None,
) -> Recovery:
    """Each feature map by itself: one may follow places where another follows people, and they would share a region effect."""
    parts = maps_of(aggregates.features)
    found = []
    for bins in parts.values():
        mine, begun = (None if each is None else each[..., bins] for each in (known, start))
        found.append(fit(aggregates.of_features(bins), mine, begun))
    order = np.argsort(np.concatenate(list(parts.values())))
    variances = {
        f"{name} {key}" if len(parts) > 1 else key: value
        for name, each in zip(parts, found, strict=True)
        for key, value in each.variances.items()
    }
    return replace(
        found[0],
        features=aggregates.features,
        means=np.concatenate([each.means for each in found], 1)[:, order],
        covariance=np.concatenate([each.covariance for each in found])[order],
        prior=np.concatenate([each.prior for each in found], 1)[:, order],
        baseline=np.concatenate([each.baseline for each in found])[order],
        variances=variances,
        believed=np.concatenate([each.believed for each in found if each.believed is not None])[
            order
        ],
        transfer={name: value for each in found for name, value in each.transfer.items()},
    )


def _bayes(
    groups: Groups,
    shares: Floats,
    doubt: Doubt | None,
    places: Floats | None,
    most: float | None,
    aggregates: Aggregates,
    known: Floats | None,
    start: Floats | None = None,
) -> Recovery:
    """`most`: what groups explain of the variance between people, at most; None without region effects.

    `start` (groups, features) is where groups begin less mu0, and is no part of the aggregates; None: all begin at mu0.
    """
    w, mean = population(shares, aggregates)
    mu0 = (
        np.maximum(mean, 0) if known is None else known
    )  # noise may take a rare place below nothing
    scale = _person_sd(aggregates, mu0)
    names, factors = _factors(groups)
    centring = np.eye(len(groups)) - np.outer(np.ones(len(groups)), w)
    covariates = independent(surface(places, len(shares)))
    problem = Problem(shares, aggregates.n, doubt, factors, centring, covariates)
    y = Deviations(aggregates.values, mu0, scale, aggregates.noise)
    members = strata(aggregates.features, mu0 / scale)
    ratios, overall, fitted = fit_variances(problem, y, members, most is not None)
    holds = {} if most is None else _transfer(problem, y, places, members, fitted)
    believed = np.ones(len(mu0))
    for name, bins in members.items():
        if most is not None:
            often = np.maximum((mu0 / scale)[bins] ** 2, 1e-300)  # of bins of like frequency
            limit = most * min(1.0, float(np.exp(np.log(often).mean())) / RARE)
            believed[bins] = min(1.0, limit / fitted[name].scale) * holds.get(name[0], 1.0)
    believed[mu0 <= 0] = 1.0  # what nobody does no group does otherwise
    begun = np.zeros((len(mu0), len(groups))) if start is None else start.T / scale[:, None]
    means, covariance, prior = _posteriors(problem, y, members, overall, fitted, believed, begun)
    return Recovery(
        groups=groups,
        features=aggregates.features,
        means=means.T * scale,
        covariance=covariance,
        prior=np.outer((overall.root**2).sum(1), prior * scale**2),
        baseline=mu0,
        shares=w,
        variances={
            f"share_{name}": float(share)
            for name, share in zip((*names, "group"), ratios, strict=True)
        }
        | {"region_effect": overall.effect, "group_scale": overall.scale},
        believed=believed,
        transfer=holds,
    )


def _posteriors(
    problem: Problem,
    y: Deviations,
    members: Strata,
    overall: Variances,
    fitted: Mapping[Stratum, Variances],
    believed: Floats,
    begun: Floats,
) -> tuple[Floats, Floats, Floats]:
    """Means (features, groups) in units of the bins, covariances (features, groups, groups), and the scale of the prior."""
    everybody = y.mean / y.scale  # (features,)
    # What no region tells about stays as the prior has it.
    means = everybody[:, None] + begun
    covariance = np.repeat(
        (overall.scale * overall.root @ overall.root.T)[None], len(means), axis=0
    )
    prior = np.full(len(means), overall.scale)
    for name, bins in members.items():
        variances, whole = fitted[name], Fit.of(problem, *fitted[name])
        prior[bins] = believed[bins] * variances.scale
        for part in y.parts(problem, bins):
            fit, belief = part.fit(whole, variances), float(believed[bins[0]])
            means[part.bins], covariance[part.bins] = _posterior(
                part, fit, everybody[part.bins], means[part.bins], variances.published, belief
            )
    covariance *= (y.scale**2)[:, None, None]
    return means, covariance, prior


def _transfer(
    problem: Problem,
    y: Deviations,
    places: Floats | None,
    members: Strata,
    fitted: Mapping[Stratum, Variances],
) -> dict[str, float]:
    """Of each feature map, how much of what is learnt in some parts of the map holds in the others: 0 is nothing, 1 is all."""
    if places is None or len(places) < FEWEST_BLOCKED:
        return {}
    blocks, published = Blocks(problem, places), y.published(np.arange(len(y.mean)))
    sums: dict[str, Floats] = {}
    for name, bins in members.items():
        known = map(y.of, y.in_turn(bins[y.complete[bins]]))
        found = blocks.compared(known, fitted[name]._replace(published=published))
        sums[name[0]] = sums.get(name[0], np.zeros(3)) + found
    heard = {name: each for name, each in sums.items() if each[1] > UNHEARD * each[2]}
    return {name: float(np.clip(each[0] / each[1], 0, 1)) for name, each in heard.items()}


def _posterior(
    part: Part, fit: Fit, everybody: Floats, begun: Floats, published: Floats, believed: float
) -> tuple[Floats, Floats]:
    """Means (bins, groups) and covariances (bins, groups, groups) in units of the bins, from mu0 (bins,) and where they begin.

    `believed` is the share of the slopes' variance that is due to people, the rest being due to where they live. Noise grows
    with the mean: a group that goes somewhere more than the population is less certain.
    """
    own = part.mean_variance(published)
    slopes = fit.means(part.problem, part.y).T  # (bins, groups)
    left = believed**2 * fit.covariance() + believed * (1 - believed) * fit.lift @ fit.lift.T
    means, covariance = nonnegative(begun + believed * slopes, left)
    relative = np.clip(
        means / np.maximum(everybody, 1e-300)[:, None], *HETEROSCEDASTIC
    )  # (bins, groups)
    sampling = np.minimum(
        believed**2 * fit.sampling_variance(), np.diagonal(covariance, axis1=1, axis2=2)
    )
    covariance += own
    variance = np.diagonal(covariance, axis1=1, axis2=2)
    wider = np.sqrt(
        np.maximum(variance + (relative - 1) * (sampling + own), 0) / np.maximum(variance, 1e-300)
    )
    covariance *= wider[:, :, None]
    covariance *= wider[:, None, :]  # correlations stay as they are
    return means, covariance


def _factors(groups: Groups) -> tuple[list[str], tuple[Floats, ...]]:
    """[same level of attribute a] for every attribute that is neither constant nor the group itself, then the identity."""
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
    """Standard deviation between people; where nobody measured it, as if visits were Poisson."""
    variance = mu0 if aggregates.spread is None else np.maximum(aggregates.spread, 0.1 * mu0)
    return np.sqrt(np.maximum(variance, 1 / aggregates.n.sum()))


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
        raise MobatlasError(
            "aggregates: no feature is left; choose another feature map or fewer masks"
        )
    if not (aggregates.n > 0).all():
        empty = aggregates.regions[int(np.flatnonzero(~(aggregates.n > 0))[0])]
        raise MobatlasError(f"aggregates: region '{empty}' has no people; leave it out")
    if not ((aggregates.values != 0) & ~np.isnan(aggregates.values)).any():
        raise MobatlasError(
            "aggregates: every value is zero or suppressed; there is nothing to recover from"
        )
    if np.isnan(composition.shares).any():
        raise MobatlasError("composition: some shares are NaN; mend the table")
