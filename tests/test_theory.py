"""Theorem "Equivalence of aggregate matching and demographic recovery", and Example 1.

Trajectories come from a finite space, so every expectation is a sum and nothing is sampled.
"""

from __future__ import annotations

import numpy as np
import pytest
from scipy import sparse

from bench.least_squares import pseudo_inverse
from mobatlas.data.types import Floats
from mobatlas.supervision.tilt import fit_tilt

STATES = 40  # trajectories in the space
FEATURES = 5
GROUPS = 4
REGIONS = 7
EXACT = 1e-7


def minimal_features(generator: np.random.Generator) -> Floats:
    """Counts (states, features) without an affine dependence between the features."""
    phi = generator.poisson(2.0, size=(STATES, FEATURES)).astype(float)
    with_constant = np.column_stack([np.ones(STATES), phi])
    assert np.linalg.matrix_rank(with_constant) == FEATURES + 1
    return phi


def exponential_family(base: Floats, phi: Floats, parameters: Floats) -> Floats:
    """P_eta(x) ~ exp(<eta, phi(x)>) rho(x), one row for each eta: (groups, states)."""
    weights = base * np.exp(parameters @ phi.T)
    return weights / weights.sum(1, keepdims=True)


class World:
    """Group distributions of a minimal exponential family, and regions that mix the groups."""

    def __init__(self, seed: int) -> None:
        generator = np.random.default_rng(seed)
        self.phi = minimal_features(generator)
        self.base = generator.dirichlet(np.ones(STATES))  # rho
        self.parameters = generator.normal(0, 0.5, size=(GROUPS, FEATURES))  # eta
        self.distributions = exponential_family(self.base, self.phi, self.parameters)
        self.composition = generator.dirichlet(np.full(GROUPS, 0.5), size=REGIONS)  # P
        self.means = self.distributions @ self.phi  # (groups, features)
        self.aggregates = self.composition @ self.means  # V (regions, features)

    def recover_means(self, aggregates: Floats) -> Floats:
        """M = P^+ V."""
        return pseudo_inverse(self.composition, aggregates)

    def recover_distribution(self, mean: Floats) -> Floats:
        """The member of the family with this mean, found by the tilt of the base measure."""
        tilt = fit_tilt(sparse.csr_array(self.phi), mean, ridge=0.0, prior=self.base)
        assert tilt.converged
        return tilt.weights


@pytest.mark.parametrize("seed", range(5))
def test_equal_aggregates_mean_equal_group_means_and_equal_distributions(seed: int) -> None:
    """(i) => (ii) => (iii): from V alone the whole distribution of each group comes back."""
    world = World(seed)
    assert np.linalg.matrix_rank(world.composition) == GROUPS  # Condition 1
    means = world.recover_means(world.aggregates)
    np.testing.assert_allclose(means, world.means, atol=EXACT)
    for mean, distribution in zip(means, world.distributions, strict=True):
        np.testing.assert_allclose(world.recover_distribution(mean), distribution, atol=EXACT)


@pytest.mark.parametrize("seed", range(3))
def test_equal_aggregates_leave_no_distance_in_any_unit_functional_of_the_features(
    seed: int,
) -> None:
    """Theorem "Recovery up to phi-IPM", with the supremum over w found by search."""
    world = World(seed)
    functionals = np.random.default_rng(seed).normal(size=(20_000, FEATURES))
    functionals /= np.linalg.norm(functionals, axis=1, keepdims=True)

    def distance(first: Floats, second: Floats) -> float:
        expected = functionals @ world.phi.T  # f_w(x), (functionals, states)
        return float(np.abs(expected @ (first - second)).max())

    recovered = world.recover_distribution(world.recover_means(world.aggregates)[0])
    assert distance(recovered, world.distributions[0]) < EXACT
    norm = float(np.linalg.norm(world.means[0] - world.means[1]))
    between_groups = distance(world.distributions[0], world.distributions[1])
    assert 0.9 * norm < between_groups <= norm * (1 + EXACT)


@pytest.mark.parametrize("seed", range(5))
def test_another_distribution_of_one_group_changes_its_mean_and_the_aggregates(seed: int) -> None:
    """Not (iii) => not (ii) => not (i): a change within the family cannot hide."""
    world = World(seed)
    shift = np.random.default_rng(seed).normal(0, 0.1, FEATURES)
    changed = exponential_family(world.base, world.phi, world.parameters[:1] + shift)[0]
    assert np.abs(changed - world.distributions[0]).max() > EXACT
    means = world.means.copy()
    means[0] = changed @ world.phi
    assert np.abs(means[0] - world.means[0]).max() > EXACT
    assert np.abs(world.composition @ means - world.aggregates).max() > EXACT


def test_without_full_rank_equal_aggregates_allow_other_group_means() -> None:
    """(i) does not imply (ii) if two groups have the same share in every region."""
    world = World(0)
    composition = world.composition.copy()
    composition[:, 0] = composition[:, 1]
    difference = np.zeros((GROUPS, FEATURES))
    difference[0] = 1.0
    difference[1] = -1.0
    assert np.linalg.matrix_rank(composition) == GROUPS - 1
    np.testing.assert_allclose(
        composition @ (world.means + difference), composition @ world.means, atol=EXACT
    )


def test_without_identifying_features_equal_means_allow_other_distributions() -> None:
    """(ii) does not imply (iii) for distributions outside of the exponential family."""
    world = World(0)
    distribution = world.distributions[0]
    constraints = np.column_stack([np.ones(STATES), world.phi]).T
    null_direction = np.linalg.svd(constraints)[2][-1]
    negative = null_direction < 0
    step = 0.5 * (distribution[negative] / -null_direction[negative]).min()
    other = distribution + step * null_direction
    assert (other >= 0).all() and np.abs(other - distribution).max() > 1e-6
    np.testing.assert_allclose(other @ world.phi, world.means[0], atol=EXACT)
    # The tilt selects the member of the family: the I-projection of the base.
    np.testing.assert_allclose(
        world.recover_distribution(other @ world.phi), distribution, atol=EXACT
    )


@pytest.mark.parametrize("seed", range(3))
def test_the_moment_map_of_a_minimal_family_is_the_gradient_of_a_strictly_convex_function(
    seed: int,
) -> None:
    """Example 1: grad A(eta) = E[phi], and the Hessian, the covariance of phi, is definite."""
    world = World(seed)

    def log_partition(eta: Floats) -> float:
        return float(np.log((world.base * np.exp(world.phi @ eta)).sum()))

    eta = world.parameters[0]
    step = 1e-6
    gradient = [
        (log_partition(eta + step * axis) - log_partition(eta - step * axis)) / (2 * step)
        for axis in np.eye(FEATURES)
    ]
    np.testing.assert_allclose(gradient, world.means[0], rtol=1e-6)
    centred = world.phi - world.means[0]
    covariance = centred.T @ (world.distributions[0][:, None] * centred)
    assert np.linalg.eigvalsh(covariance).min() > 0


def test_in_a_family_that_is_not_minimal_two_parameters_give_one_distribution() -> None:
    """Example 1 needs minimality: with a repeated feature eta is not identified, P_eta still is."""
    world = World(0)
    repeated = np.column_stack([world.phi, world.phi[:, 0]])
    first = np.append(world.parameters[0], 0.0)
    second = first.copy()
    second[0] -= 0.3
    second[-1] += 0.3
    family = exponential_family(world.base, repeated, np.array([first, second]))
    np.testing.assert_allclose(family[0], family[1], atol=EXACT)
