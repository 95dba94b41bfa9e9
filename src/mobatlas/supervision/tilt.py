"""Tilt: the I-projection of weighted rows onto given feature means, w(x) ~ exp(<lambda, phi(x)>), by its convex dual
(Theorem "Exponential-tilt characterization of the I-projection")."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from scipy import optimize, sparse
from scipy.sparse import linalg

from mobatlas.data.arrays import Floats
from mobatlas.errors import MobatlasError

TOLERANCE = 1e-10  # of the gradient of the dual, in scaled coordinates
STEPS, NEWTON_STEPS = 2_000, 5
NEAR, CONVERGED = 1e-4, 1e-6
Dual = Callable[[Floats], tuple[float, Floats]]  # value and gradient
Product = Callable[[Floats], Floats]  # with the second derivatives
Scaled = tuple[Floats, sparse.csr_array, sparse.csc_array]  # see `scaled_features`


@dataclass(frozen=True)
class Tilt:
    """Weights of rows, and how they were found."""

    coefficients: Floats  # lambda (features,)
    weights: Floats  # (rows,) sum to 1
    effective_sample_size: float  # 1 / sum of squared weights
    unmet: Floats  # (features,) target minus reached mean
    dual: float  # value at the end: log-partition less <lambda, target>, and the ridge
    converged: bool

    @property
    def relative_size(self) -> float:
        """The effective sample size as a share of the rows."""
        return self.effective_sample_size / len(self.weights)

    def over(self, phi: sparse.csr_array, target: Floats, prior: Floats) -> Tilt:
        """The same coefficients on other rows."""
        with np.errstate(divide="ignore"):
            weights, _ = softmax(np.log(prior) + phi @ self.coefficients)
        size = float(1 / (weights**2).sum())
        return replace(
            self, weights=weights, effective_sample_size=size, unmet=target - phi.T @ weights
        )


def fit_tilt(
    phi: sparse.csr_array,
    target: Floats,
    ridge: float = 1e-3,
    *,
    prior: Floats | None = None,
    start: Floats | None = None,
    steps: int = STEPS,
    scaled_phi: Scaled | None = None,
) -> Tilt:
    """The weights nearest to `prior` (uniform by default, in Kullback-Leibler) whose mean of `phi` is the target.

    Minimises log sum_x prior(x) exp(<lambda, phi(x)>) - <lambda, target> + ridge/2 |lambda|^2 with features scaled by the root
    of their mean, in which counts are about equally noisy. The ridge leaves moments unmet that would cost much: unmet = ridge
    lambda there; without it and with a target outside the hull of the rows there is no solution, and `converged` says so.
    Who fits many targets scales the features once and passes them as `scaled_phi`.
    """
    refuse_unusable(phi, target, ridge, prior)
    weight = np.full(phi.shape[0], 1 / phi.shape[0]) if prior is None else prior / prior.sum()
    with np.errstate(divide="ignore"):
        log_prior = np.log(weight)  # -inf: rows that may not be used
    scale, scaled, transposed = scaled_phi or scaled_features(phi, weight)
    wanted = target / scale

    def tilted(x: Floats) -> tuple[Floats, float]:
        logits = scaled @ x
        logits += log_prior
        return softmax(logits)

    def dual(x: Floats) -> tuple[float, Floats]:
        weights, partition = tilted(x)
        value = float(partition - x @ wanted + ridge / 2 * (x @ x))
        return value, transposed @ weights - wanted + ridge * x

    def curvature(x: Floats) -> Product:
        weights, _ = tilted(x)
        centre = transposed @ weights

        def product(v: Floats) -> Floats:
            return np.asarray(
                transposed @ (weights * (scaled @ v)) - centre * (centre @ v) + ridge * v
            )

        return product

    x, converged = minimise_dual(
        dual, curvature, np.zeros(phi.shape[1]) if start is None else start * scale, steps
    )
    weights, _ = tilted(x)
    reached = np.asarray(phi.T @ weights)
    return Tilt(
        coefficients=x / scale,
        weights=weights,
        effective_sample_size=float(1 / (weights**2).sum()),
        unmet=target - reached,
        dual=dual(x)[0],
        converged=converged,
    )


def scaled_features(phi: sparse.csr_array, weight: Floats | None = None) -> Scaled:
    """The root of the mean of each feature (features,), phi in its units (rows, features), and that transposed."""
    mean = phi.mean(0) if weight is None else phi.T @ weight
    scale = np.sqrt(np.maximum(np.asarray(mean).ravel(), 1 / phi.shape[0]))
    narrow = (
        np.int32 if phi.nnz < 2**31 else np.int64
    )  # half the memory to go through in every product
    places = phi.indices.astype(narrow), phi.indptr.astype(narrow)
    scaled = sparse.csr_array((phi.data / scale[phi.indices], *places), shape=phi.shape)
    return scale, scaled, scaled.T


def softmax(logits: Floats) -> tuple[Floats, float]:
    """exp(logits) so that they sum to 1, in their place, and the logarithm of what they sum to."""
    top = float(logits.max())
    logits -= top
    np.exp(logits, out=logits)
    total = float(logits.sum())
    logits /= total
    return logits, top + float(np.log(total))


def minimise_dual(
    dual: Dual, curvature: Callable[[Floats], Product], start: Floats, steps: int = STEPS
) -> tuple[Floats, bool]:
    """L-BFGS, then Newton's steps; whether it converged."""
    found = optimize.minimize(
        dual,
        start,
        jac=True,
        method="L-BFGS-B",
        options={
            "maxiter": steps,
            "maxfun": 2 * steps,
            "ftol": 1e-12,
            "gtol": TOLERANCE,
            "maxcor": 20,
        },
    )

    def operator(x: Floats) -> linalg.LinearOperator:
        product, size = curvature(x), len(x)
        return linalg.LinearOperator(
            (size, size), matvec=lambda v: product(v.ravel()), dtype=np.float64
        )

    x, slope = _polished(found.x, dual, operator)
    return x, slope < CONVERGED


def _polished(
    x: Floats, dual: Dual, curvature: Callable[[Floats], linalg.LinearOperator]
) -> tuple[Floats, float]:
    """A few Newton steps: the value of the dual alone cannot tell gradients below 1e-8 from zero. Also the largest slope."""
    gradient = dual(x)[1]
    for _ in range(NEWTON_STEPS):
        if (
            not TOLERANCE <= np.abs(gradient).max(initial=0) < NEAR
        ):  # done, or without a solution to step to
            break
        step, _ = linalg.cg(curvature(x), -gradient, rtol=1e-4, maxiter=100)
        ahead = dual(x + step)[1]
        if not np.abs(ahead).max() < np.abs(gradient).max():
            break
        x, gradient = x + step, ahead
    return x, float(np.abs(gradient).max(initial=0))


def refuse_unusable(
    phi: sparse.csr_array, target: Floats, ridge: float, prior: Floats | None
) -> None:
    rows, features = phi.shape
    if not rows:
        raise MobatlasError("tilt: there are no rows to weigh")
    if target.shape != (features,):
        raise MobatlasError(
            f"tilt: {features} features but a target of {target.size}; give one mean per feature"
        )
    if not np.isfinite(target).all():
        raise MobatlasError(
            "tilt: the target holds NaN; recover the means of suppressed features first, or leave them out"
        )
    if not ridge >= 0:
        raise MobatlasError(f"tilt: the ridge is {ridge:g}; give zero or more")
    if prior is not None and (
        prior.shape != (rows,) or not (prior >= 0).all() or not 0 < prior.sum() < np.inf
    ):
        raise MobatlasError(
            f"tilt: prior weights must be {rows:,} numbers, none negative, not all zero"
        )
