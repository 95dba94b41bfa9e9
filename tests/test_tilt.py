"""The tilt is the I-projection, by a general solver of the primal and by optimality conditions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize, sparse

from mobatlas.data.types import Floats
from mobatlas.supervision.tilt import fit_tilt


def counts(seed: int, rows: int = 40, features: int = 3) -> tuple[sparse.csr_array, Floats]:
    """Rows of counts, and a target inside their hull."""
    rng = np.random.default_rng(seed)
    phi = rng.poisson(1.5, (rows, features)).astype(float)
    return sparse.csr_array(phi), rng.dirichlet(np.full(rows, 2.0)) @ phi


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**31))
def test_a_target_inside_the_hull_is_met(seed: int) -> None:
    phi, target = counts(seed)
    tilt = fit_tilt(phi, target, ridge=0)
    assert tilt.converged
    assert phi.T @ tilt.weights == pytest.approx(target, abs=1e-8)
    assert tilt.unmet == pytest.approx(np.zeros(3), abs=1e-8)
    assert tilt.weights.sum() == pytest.approx(1)


def test_the_weights_are_those_of_the_primal_problem() -> None:
    """min KL(w | prior) subject to the moments, by SLSQP over the weights themselves."""
    phi, target = counts(3, rows=12, features=2)
    prior = np.random.default_rng(0).dirichlet(np.ones(12))
    dense = phi.toarray()
    minimise: Any = optimize.minimize
    solved = minimise(
        lambda w: float(np.sum(w * np.log(np.maximum(w, 1e-300) / prior))),
        np.full(12, 1 / 12),
        jac=lambda w: np.log(np.maximum(w, 1e-300) / prior) + 1,
        bounds=[(1e-12, 1)] * 12,
        constraints=[
            {"type": "eq", "fun": lambda w: w.sum() - 1},
            {"type": "eq", "fun": lambda w: dense.T @ w - target},
        ],
        method="SLSQP",
        options={"maxiter": 1_000, "ftol": 1e-14},
    )
    assert solved.success
    tilt = fit_tilt(phi, target, ridge=0, prior=prior)
    assert tilt.weights == pytest.approx(solved.x, abs=1e-5)
    assert -tilt.dual == pytest.approx(solved.fun, abs=1e-8)  # no gap between primal and dual


def test_weights_are_an_exponential_of_the_features() -> None:
    phi, target = counts(5)
    tilt = fit_tilt(phi, target, ridge=0.01)
    logits = phi @ tilt.coefficients
    expected = np.exp(logits - logits.max())
    assert tilt.weights == pytest.approx(expected / expected.sum())
    assert tilt.effective_sample_size == pytest.approx(1 / (tilt.weights**2).sum())
    assert 0 < tilt.relative_size <= 1


def test_the_ridge_leaves_exactly_its_share_of_a_moment_unmet() -> None:
    """Where the gradient of the dual is zero, target - reached = ridge mean_j lambda_j."""
    phi, target = counts(7)
    tilt = fit_tilt(phi, target, ridge=0.05)
    mean = np.asarray(phi.mean(0)).ravel()
    assert tilt.unmet == pytest.approx(0.05 * mean * tilt.coefficients, abs=1e-7)
    assert np.abs(tilt.unmet).max() > 1e-4


def test_the_current_mean_needs_no_tilt() -> None:
    phi, _ = counts(9)
    tilt = fit_tilt(phi, np.asarray(phi.mean(0)).ravel())
    assert tilt.weights == pytest.approx(np.full(40, 1 / 40))
    assert tilt.effective_sample_size == pytest.approx(40)


def test_a_target_outside_the_hull_is_approached_and_not_converged() -> None:
    phi = sparse.csr_array(np.array([[0.0], [1.0], [2.0]]))
    near = fit_tilt(phi, np.array([5.0]), ridge=0.01)
    assert near.weights[2] > 0.99
    assert near.unmet[0] == pytest.approx(3, abs=0.02)
    assert not fit_tilt(phi, np.array([5.0]), ridge=0).converged


def test_rows_without_prior_weight_have_no_weight() -> None:
    phi, target = counts(11)
    prior = np.arange(40.0)
    tilt = fit_tilt(phi, target, prior=prior)
    assert tilt.weights[0] == 0
    assert fit_tilt(phi, target, prior=prior * 7).weights == pytest.approx(tilt.weights)


def test_a_feature_without_counts_does_not_change_the_weights() -> None:
    phi, target = counts(13)
    wider = sparse.csr_array(sparse.hstack([phi, sparse.csr_array((40, 1))]))
    assert fit_tilt(wider, np.append(target, 0.0)).weights == pytest.approx(
        fit_tilt(phi, target).weights, abs=1e-6
    )


def test_large_counts_do_not_overflow() -> None:
    phi, target = counts(15)
    tilt = fit_tilt(sparse.csr_array(phi * 1e4), target * 1e4, ridge=0)
    assert np.isfinite(tilt.weights).all()
    assert phi.T @ tilt.weights == pytest.approx(target, rel=1e-5)
