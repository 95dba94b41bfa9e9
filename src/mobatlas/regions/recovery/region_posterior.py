"""The posterior of some bins of a feature map, from regions alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from mobatlas.data.types import Floats, Ints
from mobatlas.regions.recovery.map_model import REGIONS, SURFACE_SD, MapFit, MapModel, Slopes
from mobatlas.regions.recovery.posterior import (
    Posterior,
    contrast_variance,
    effective_information,
    log_covariance,
    mixture,
    normalised,
    shares_of_information,
    with_heavy_tails,
)
from mobatlas.regions.recovery.priors import (
    CONCENTRATION,
    LEVEL,
    GroupFactors,
    average,
)
from mobatlas.regions.recovery.solver import Modes, Observed, Rows, find_modes, link

OWN_SCALES = ((1.0, 0.5), (0.25, 0.25), (4.0, 0.25))  # of the assumed variance, with weights
NEGLIGIBLE = 1e-3  # a smaller doubt changes nothing


def fit_regions(model: MapModel, bins: Ints, slopes: Slopes) -> MapFit:
    """The posterior of a stratum."""
    regions = model.regions.select(bins)
    factors = model.factors
    d = len(model.population)
    rows = Rows(regions.shares, regions.surface)
    variants = _variants(factors, slopes)
    counts = np.array([count for _, count in variants])

    def fit(chosen: Slopes) -> tuple[Modes, list[Slopes], Floats, list[Posterior]]:
        covariance = factors.covariance(chosen.shown())
        weight = regions.weight(slopes.effect, covariance)
        observed = Observed(regions.values, weight, regions.centre)
        modes = find_modes(rows, observed, model.region_root(covariance))
        roots = [model.region_root(factors.covariance(each.shown())) for each, _ in variants]
        numbers, weights, parts = mixture(modes, roots, counts)
        priors = [variants[number][0] for number in numbers]
        return modes, priors, weights, [(mean[:, :d], c[:, :d, :d]) for mean, c in parts]

    modes, priors, weights, parts = fit(slopes)
    best = priors[int(weights.mean(0).argmax())]
    if best is not slopes:
        modes, priors, weights, parts = fit(best)
    shown = average(weights, parts)
    posterior = shown
    if slopes.context is not None:
        attributed = [
            _attribute(model, each, part) for each, part in zip(priors, parts, strict=True)
        ]
        posterior = average(weights, attributed)
    if slopes.doubt > NEGLIGIBLE:
        posterior = _doubted(model, bins, slopes, posterior)
    prior = _prior_variance(model, bins, slopes, (priors, weights))
    return _finish(model, bins, posterior, shown[0], (modes, best, prior))


def _variants(factors: GroupFactors, slopes: Slopes) -> list[tuple[Slopes, float]]:
    """Variants of the prior, the fitted one first, with their prior counts of bins."""
    if slopes.context is None:
        return [(replace(slopes, own=own), count) for own, count in factors.variants(slopes.own)]
    variants = [
        (replace(slopes, own=scale * slopes.own, context=context), share * count)
        for scale, share in OWN_SCALES
        for context, count in factors.variants(slopes.context, raised=False)
    ]
    return [(slopes, CONCENTRATION), *variants[1:]]


def _attribute(model: MapModel, slopes: Slopes, shown: Posterior) -> Posterior:
    """Log ratios of groups, from what regions show: the rest is due to places.

    E[b | b + c] = G (b + c), and some of the variance of b remains.
    """
    own = model.factors.covariance(slopes.own) + LEVEL
    both = model.factors.covariance(slopes.shown()) + LEVEL
    gain = np.linalg.solve(both + 1e-9 * np.eye(len(own)), own).T
    rest = own - gain @ own
    mean, variance = shown
    return mean @ gain.T, gain @ variance @ gain.T + (rest + rest.T) / 2


def _doubted(model: MapModel, bins: Ints, slopes: Slopes, posterior: Posterior) -> Posterior:
    """Average with the prior, as far as regions do not differ with their composition."""
    mean, covariance = posterior
    own = _doubted_variances(model, bins, slopes)
    centring = np.eye(len(model.population)) - model.population
    centred = centring @ model.factors.covariance(own) @ centring.T
    level = np.einsum("a,jab,b->j", model.population, covariance, model.population)
    prior = centred + level[:, None, None]
    weights = np.tile([1 - slopes.doubt, slopes.doubt], (len(mean), 1))
    return average(weights, [posterior, (np.zeros_like(mean), prior)])


def _doubted_variances(model: MapModel, bins: Ints, slopes: Slopes) -> Floats:
    """Variances of factors where regions say nothing, averaged over their scales."""
    if model.confounded:
        return slopes.own
    return sum(scale * share for scale, share in OWN_SCALES) * model.usual_variances(bins)


def _finish(
    model: MapModel,
    bins: Ints,
    posterior: Posterior,
    shown: Floats,
    fitted: tuple[Modes, Slopes, Floats],
) -> MapFit:
    """Ratios as means that average to the population, with the information of regions."""
    modes, slopes, prior = fitted
    own = model.factors.covariance(slopes.own)
    confounder = None if slopes.context is None else model.factors.covariance(slopes.context)
    surface = np.full(modes.information.shape[1] - len(own), SURFACE_SD**2)
    informed = effective_information(modes.information, slice(0, len(own)), surface, confounder)
    informed = (1 - slopes.doubt) * informed
    if confounder is None:
        posterior = with_heavy_tails(model.population, posterior, informed)
    return MapFit(
        log_means=normalised(model, bins, posterior[0]),
        log_covariance=log_covariance(posterior),
        prior_variance=prior,
        region_ratio=np.exp(link(shown)),
        sources=shares_of_information(model.population, own + LEVEL, {REGIONS: informed}),
        variances={},
        group_share=np.full(len(bins), slopes.own.sum() / max(slopes.shown().sum(), 1e-300)),
    )


def _prior_variance(
    model: MapModel, bins: Ints, slopes: Slopes, mixed: tuple[list[Slopes], Floats]
) -> Floats:
    """Prior variances (bins, groups) of log ratios to the population, averaged over variants."""
    priors, weights = mixed

    def variance(own: Floats) -> Floats:
        return contrast_variance(model.population, model.factors.covariance(own))

    fitted = weights @ np.stack([variance(each.own) for each in priors])
    if slopes.doubt <= NEGLIGIBLE:
        return np.asarray(fitted)
    doubted = variance(_doubted_variances(model, bins, slopes))
    return np.asarray((1 - slopes.doubt) * fitted + slopes.doubt * doubted)
