"""Means that are as uneven as those of samples of people.

Posterior means are smoother than the truth, place by place, as every estimate with the least
expected error is. Distributions are compared by a divergence, with a finite sample of people that
is rougher than the truth, and there a smooth estimate loses. Expectation maximisation steps of the
likelihood lead from the posterior towards the observed values, in the directions that regions
identify. Draws from the posterior show which share of the way has the least expected divergence
from a sample of held-out people.
"""

import numpy as np

from mobatlas.data.arrays import Floats, Ints
from mobatlas.features.divergences import js
from mobatlas.regions.types import Recovery, Regions, bins_by_map, blocks

STEPS = 2  # of expectation maximisation
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)  # of the way to the result of these steps
HELD_OUT = 0.1  # of the people of a group, as in an evaluation
DRAWS = 8
SEED = 0


def sample_like(recovery: Recovery, regions: Regions, dispersion: Floats) -> Floats:
    """Means (groups, features) with the least expected divergence from samples of people."""
    targets = recovery.means.copy()
    for bins in bins_by_map(recovery.features).values():
        visited = bins[recovery.baseline[bins] > 0]
        if len(visited) > 1:
            targets[:, visited] = _best(recovery, regions, dispersion, visited)
    return targets


def _best(recovery: Recovery, regions: Regions, dispersion: Floats, bins: Ints) -> Floats:
    means = recovery.means[:, bins]
    rough = np.empty_like(means)
    for some in blocks(len(bins), regions.aggregates.values.shape[0]):
        rough[:, some] = _maximise(regions, means[:, some], bins[some])
    rough = np.maximum(rough, 1e-12 * recovery.baseline[bins])
    samples = _samples(recovery, regions, dispersion, bins)
    candidates = [means ** (1 - share) * rough**share for share in SHARES]
    expected = [float(np.mean([js(each, sample) for sample in samples])) for each in candidates]
    return candidates[int(np.argmin(expected))]


def _maximise(regions: Regions, means: Floats, bins: Ints) -> Floats:
    """Multiplicative steps of expectation maximisation (groups, bins)."""
    p = regions.composition.shares
    v = np.maximum(regions.aggregates.values[:, bins], 0)  # (regions, bins)
    people = p * regions.aggregates.n[:, None]  # (regions, groups)
    known = ~np.isnan(v)
    for _ in range(STEPS):
        ratio = np.where(known, v, 0) / np.maximum(p @ means, 1e-300)
        means = means * (people.T @ ratio) / np.maximum(people.T @ known, 1e-300)
    return means


def _samples(recovery: Recovery, regions: Regions, dispersion: Floats, bins: Ints) -> Floats:
    """Mean counts of simulated held-out people of each group (draws, groups, bins)."""
    rng = np.random.default_rng(SEED)
    n = HELD_OUT * regions.aggregates.n.sum() * recovery.shares  # (groups,)
    samples = np.empty((DRAWS, len(n), len(bins)))
    assert recovery.log_covariance is not None
    for some in blocks(len(bins), len(n) ** 2):
        chosen = bins[some]
        values, vectors = np.linalg.eigh(recovery.log_covariance[chosen])
        root = vectors * np.sqrt(np.maximum(values, 0))[:, None]
        people = np.maximum(n, 1)[:, None] / dispersion[chosen]  # (groups, bins)
        noise = rng.normal(size=(DRAWS, len(chosen), len(n)))
        moved = np.clip(np.einsum("jab,ijb->iaj", root, noise), -20, 20)
        truth = recovery.means[:, chosen] * np.exp(moved)
        counts = rng.poisson(np.minimum(truth * people, 1e9)).astype(np.float64)
        samples[:, :, some] = np.maximum(counts, 1e-12) / people
    return samples
