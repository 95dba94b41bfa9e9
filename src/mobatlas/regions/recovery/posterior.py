"""Posteriors of log group means: mixtures of priors, normalisation, and sources of information."""

from collections.abc import Mapping, Sequence

import numpy as np

from mobatlas.data.types import Floats, Ints
from mobatlas.regions.recovery.map_model import MapModel
from mobatlas.regions.recovery.priors import mixture_weights, select_modes
from mobatlas.regions.recovery.solver import Modes, link, link_slope

PILOT_BINS = 32  # bins that show which priors matter
LEAST_SHARE = 0.01  # of these bins: priors with less are left out
UPPER_END = 1.645  # standard deviations: the 95 % quantile
OVERSHOOT = 1.0  # of a logarithm
HEAVY_TAILS = 0.5  # more variance where it is assumed, as of t with 5 degrees of freedom
Posterior = tuple[Floats, Floats]  # means and covariances of linked log ratios


def mixture(
    modes: Modes, roots: Sequence[Floats], counts: Floats
) -> tuple[list[int], Floats, list[Posterior]]:
    """Numbers of the priors that matter, their weights (bins, priors), and posteriors."""
    chosen = list(range(len(roots)))
    if len(modes.mode) >= 2 * PILOT_BINS:
        pilot = select_modes(modes, np.linspace(0, len(modes.mode) - 1, PILOT_BINS).astype(int))
        evidence = np.stack([pilot.under(root)[2] for root in roots], axis=1)
        share = mixture_weights(evidence, counts).mean(0)
        chosen = np.flatnonzero(share >= min(LEAST_SHARE, share.max())).tolist()
    posteriors = [modes.under(roots[number]) for number in chosen]
    evidence = np.stack([each[2] for each in posteriors], axis=1)
    weights = mixture_weights(evidence, counts[chosen])
    return chosen, weights, [(mean, covariance) for mean, covariance, _ in posteriors]


def log_covariance(posterior: Posterior) -> Floats:
    """The covariance of log ratios, from that of the linked parameters.

    Far below zero the link is so steep that its slope would give an upper end without meaning.
    There, the upper end of a Gaussian in log ratios is OVERSHOOT above that of the linked one.
    """
    mean, covariance = posterior
    reach = UPPER_END * np.sqrt(np.diagonal(covariance, axis1=1, axis2=2))
    rise = link(mean + reach) - link(mean) + OVERSHOOT
    slope = np.minimum(link_slope(mean), rise / np.maximum(reach, 1e-9))
    return np.asarray(covariance * slope[:, :, None] * slope[:, None])


def normalised(model: MapModel, bins: Ints, ratio: Floats) -> Floats:
    """Log means (bins, groups) that average to the population mean."""
    log_means = np.log(model.centre[bins]) + link(ratio)
    total = np.exp(log_means) @ model.population
    return np.asarray(log_means + np.log(model.regions.mean[bins] / total)[:, None])


def contrast_variance(population: Floats, covariance: Floats) -> Floats:
    """The variance of each group's log ratio to the population, (..., groups)."""
    centring = np.eye(len(population)) - population
    return np.einsum("ab,...bc,ac->...a", centring, covariance, centring)


def with_heavy_tails(population: Floats, posterior: Posterior, informed: Floats) -> Posterior:
    """A posterior with more variance where a covariance C is not information W: in C - C W C."""
    mean, covariance = posterior
    centring = np.eye(len(population)) - population
    part = centring @ (covariance - covariance @ informed @ covariance) @ centring.T
    values, vectors = np.linalg.eigh((part + part.swapaxes(1, 2)) / 2)
    assumed = (vectors * np.maximum(values, 0)[:, None]) @ vectors.swapaxes(1, 2)
    return mean, covariance + HEAVY_TAILS * assumed


def effective_information(
    information: Floats, columns: slice, nuisance_variance: Floats, confounder: Floats | None
) -> Floats:
    """What rows tell of b (bins, groups, groups), given their information on all parameters.

    Rows show b + t in some columns, with the covariance of t in `confounder`, and nuisance
    parameters with prior variances follow all columns.
    """
    w = information[:, columns, columns]
    first = information.shape[1] - len(nuisance_variance)
    if len(nuisance_variance):
        inner = information[:, first:, first:] + np.diag(1 / nuisance_variance)
        mixed = information[:, columns, first:]
        w = w - mixed @ np.linalg.solve(inner, mixed.swapaxes(1, 2))
    if confounder is not None:
        return np.asarray(np.linalg.solve(np.eye(w.shape[1]) + w @ confounder, w), dtype=np.float64)
    return w


def shares_of_information(
    population: Floats, prior: Floats, informed: Mapping[str, Floats]
) -> dict[str, Floats]:
    """The share of each source, and of the assumptions, in what is known of group differences.

    With S = (K^-1 + sum W_k)^-1 the variance S is the sum of S W_k S and S K^-1 S.
    """
    size = len(population)
    total = sum(informed.values(), np.zeros((size, size)))  # (bins, groups, groups)
    inner = np.eye(size) + prior @ total
    s = np.asarray(np.linalg.solve(inner, np.broadcast_to(prior, total.shape)), dtype=np.float64)
    variance = np.maximum(contrast_variance(population, s), 1e-300)
    shares = {
        name: np.clip(contrast_variance(population, s @ w @ s.swapaxes(1, 2)) / variance, 0, 1)
        for name, w in informed.items()
    }
    return shares | {"assumption": np.maximum(1 - np.asarray(sum(shares.values())), 0.0)}
