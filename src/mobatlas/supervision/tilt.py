"""Exponential tilts of weighted rows to target feature means, each by its convex dual.

Theorem "Exponential-tilt characterization of the I-projection": among all distributions with the
target means, the one nearest to the rows in Kullback-Leibler divergence has weights
w(x) ~ exp(<lambda, phi(x)>). There are three forms:

- `fit_tilt` reweights rows, such as training people.
- `fit_capped_tilt` bounds the weights, so that samples can be drawn by rejection.
- `fit_fixed_anchor_tilt` chooses among K candidates per anchor and does not change the anchors.

The strategy `tilt` weights training trajectories to the estimated means of each group, and fits a
generator on them.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
from pydantic import Field
from scipy import optimize, sparse, special
from scipy.sparse import linalg

from mobatlas.config import Section
from mobatlas.data.dataset import Trajectories, TrajectoryDataset
from mobatlas.data.types import FIRST_POI, Floats, Ints
from mobatlas.errors import MobatlasError, log
from mobatlas.features.divergences import normalise
from mobatlas.generators.layers import has_group_bias, set_group_bias
from mobatlas.generators.protocol import Draw, Examples, Generator
from mobatlas.groups import Groups
from mobatlas.supervision.evidence import Evidence
from mobatlas.training.loop import Trainer

TOLERANCE = 1e-10  # of the gradient of the dual, in scaled coordinates
LBFGS_STEPS = 2_000
NEWTON_STEPS = 5
NEAR = 1e-4  # Newton steps start below this gradient
CONVERGED = 1e-6
CALIBRATION_RIDGE = 3e-2  # ten times that of training people: a pool has fewer rows
SLOPE_ROUNDS = 100
SLOPE_TOLERANCE = 1e-10  # visits
STEEPEST_SLOPE = 50.0  # logits per visit

Dual = Callable[[Floats], tuple[float, Floats]]  # value and gradient
Product = Callable[[Floats], Floats]  # of the Hessian with a vector
ScaledFeatures = tuple[Floats, sparse.csr_array, sparse.csc_array]  # see `scale_features`
MAX_SHIFT = 2.0  # logits: visits to rare places say little about a group
# With this many rows, means are known to within half a per cent of a standard deviation.
MAX_ROWS = 300_000


@dataclass(frozen=True)
class Tilt:
    """Weights of rows, and how the fit ended."""

    coefficients: Floats  # lambda (features,)
    weights: Floats  # (rows,) sum to 1
    effective_sample_size: float  # 1 / sum of squared weights
    unmet: Floats  # (features,) target minus reached mean
    dual: float  # log-partition less <lambda, target>, plus the ridge term
    converged: bool

    @property
    def relative_size(self) -> float:
        """The effective sample size as a share of the rows."""
        return self.effective_sample_size / len(self.weights)

    def apply_to(self, phi: sparse.csr_array, target: Floats, prior: Floats) -> Self:
        """The same coefficients on other rows."""
        with np.errstate(divide="ignore"):
            weights, _ = _softmax(np.log(prior) + phi @ self.coefficients)
        return replace(
            self,
            weights=weights,
            effective_sample_size=float(1 / (weights**2).sum()),
            unmet=target - phi.T @ weights,
        )


def fit_tilt(
    phi: sparse.csr_array,
    target: Floats,
    ridge: float = 1e-3,
    *,
    prior: Floats | None = None,
    scaled_phi: ScaledFeatures | None = None,
) -> Tilt:
    """Find the weights nearest to `prior` (uniform by default) whose mean of `phi` is the target.

    Minimises log sum_x prior(x) exp(<lambda, phi(x)>) - <lambda, target> + ridge/2 |lambda|^2 in
    scaled features. The ridge leaves costly moments unmet: unmet = ridge lambda. Without a ridge, a
    target outside the hull of the rows has no solution, and `converged` is False. To fit many
    targets, scale the features once and pass `scaled_phi`.
    """
    weight = np.full(phi.shape[0], 1 / phi.shape[0]) if prior is None else prior / prior.sum()
    with np.errstate(divide="ignore"):
        log_prior = np.log(weight)  # -inf excludes a row
    scale, scaled, transposed = scaled_phi or scale_features(phi, weight)
    scaled_target = target / scale

    def tilt(x: Floats) -> tuple[Floats, float]:
        logits = scaled @ x
        logits += log_prior
        return _softmax(logits)

    def dual(x: Floats) -> tuple[float, Floats]:
        weights, partition = tilt(x)
        value = float(partition - x @ scaled_target + ridge / 2 * (x @ x))
        return value, transposed @ weights - scaled_target + ridge * x

    def curvature(x: Floats) -> Product:
        weights, _ = tilt(x)
        centre = transposed @ weights

        def product(v: Floats) -> Floats:
            spread = transposed @ (weights * (scaled @ v))
            return np.asarray(spread - centre * (centre @ v) + ridge * v)

        return product

    x, converged = _minimise(dual, curvature, np.zeros(phi.shape[1]))
    weights, _ = tilt(x)
    return Tilt(
        coefficients=x / scale,
        weights=weights,
        effective_sample_size=float(1 / (weights**2).sum()),
        unmet=target - np.asarray(phi.T @ weights),
        dual=dual(x)[0],
        converged=converged,
    )


def fit_capped_tilt(
    phi: sparse.csr_array, target: Floats, cap: float, ridge: float = CALIBRATION_RIDGE
) -> tuple[Floats, float, bool]:
    """Fit weights w(x) = min(exp(<lambda, phi(x)> - nu), cap) of mean 1.

    (lambda, nu) minimise mean f*(<lambda, phi(x)> - nu) + nu - <lambda, target>
    + ridge/2 |lambda|^2, where f*(s) = exp(s) up to log cap and is linear beyond. Returns lambda
    (features,), nu, and whether the fit converged.
    """
    if cap <= 1:  # weights of mean 1 are all 1
        return np.zeros(phi.shape[1]), 0.0, True
    scale, scaled, transposed = scale_features(phi)
    scaled_target = target / scale
    top = np.log(cap)
    rows = phi.shape[0]

    def dual(x: Floats) -> tuple[float, Floats]:
        coefficients = x[:-1]
        offset = x[-1]
        s = scaled @ coefficients - offset
        weights = np.exp(np.minimum(s, top))  # (rows,)
        conjugate = np.mean(weights + cap * np.maximum(s - top, 0))  # f*
        penalty = ridge / 2 * (coefficients @ coefficients)
        value = conjugate + offset - coefficients @ scaled_target + penalty
        slope = transposed @ weights / rows - scaled_target + ridge * coefficients
        return float(value), np.append(slope, 1 - weights.mean())

    def curvature(x: Floats) -> Product:
        s = scaled @ x[:-1] - x[-1]
        weights = np.where(s < top, np.exp(np.minimum(s, top)), 0) / rows

        def product(v: Floats) -> Floats:
            along = weights * (scaled @ v[:-1] - v[-1])
            return np.append(transposed @ along + ridge * v[:-1], -along.sum())

        return product

    x, converged = _minimise(dual, curvature, np.zeros(phi.shape[1] + 1))
    return x[:-1] / scale, float(x[-1]), converged


def fit_fixed_anchor_tilt(
    phi: sparse.csr_array,
    target: Floats,
    candidates: int,
    ridge: float,
    visits: Floats | None = None,
    ratio: float = 1.0,
) -> tuple[Floats, bool]:
    """Fit weights exp(<lambda, phi(x)> + b_a n(x)), normalised among the K candidates of an anchor.

    n is the number of visits. The slope b_a of each anchor fixes its mean number of visits at
    `ratio` times that of its candidates: without it, people near places that a group prefers would
    go out more. lambda minimises mean_a min_b log mean_k exp(<lambda, phi(x_ak)>
    + b (n(x_ak) - goal_a)) - <lambda, target> + ridge/2 |lambda|^2.

    Rows are K consecutive candidates per anchor. `visits` (rows,) is None to leave the number free.
    Returns lambda (features,) and whether the fit converged.
    """
    scale, scaled, transposed = scale_features(phi)
    scaled_target = target / scale
    shape = (phi.shape[0] // candidates, candidates)
    number = np.zeros(shape) if visits is None else visits.reshape(shape)
    goal = _visit_goals(number, ratio)
    excess = number - goal[:, None]  # (anchors, K)

    def balance(x: Floats) -> Floats:
        logits = (scaled @ x).reshape(shape)
        return np.asarray(logits + _visit_slopes(logits, number, goal)[:, None] * excess)

    def dual(x: Floats) -> tuple[float, Floats]:
        logits = balance(x)
        partition = special.logsumexp(logits, axis=1) - np.log(candidates)  # (anchors,)
        weights = special.softmax(logits, axis=1).ravel() / shape[0]
        value = float(partition.mean() - x @ scaled_target + ridge / 2 * (x @ x))
        return value, transposed @ weights - scaled_target + ridge * x

    def curvature(x: Floats) -> Product:
        weights = special.softmax(balance(x), axis=1)  # (anchors, K)
        centred = excess - (weights * excess).sum(1, keepdims=True)
        variance = np.maximum((weights * centred**2).sum(1, keepdims=True), 1e-300)

        def product(v: Floats) -> Floats:
            along = (scaled @ v).reshape(shape)
            along = along - (weights * along).sum(1, keepdims=True)
            covariance = (weights * along * centred).sum(1, keepdims=True)
            free = along - centred * covariance / variance  # b moves with x
            return np.asarray(transposed @ (weights * free / shape[0]).ravel() + ridge * v)

        return product

    x, converged = _minimise(dual, curvature, np.zeros(phi.shape[1]))
    return x / scale, converged


def fixed_anchor_weights(logits: Floats, visits: Floats, ratio: Floats | float) -> Floats:
    """Weights of candidates (anchors, K), rows sum to 1; `ratio` is per anchor or common."""
    slopes = _visit_slopes(logits, visits, _visit_goals(visits, ratio))
    return np.asarray(special.softmax(logits + slopes[:, None] * visits, axis=1))


def scale_features(phi: sparse.csr_array, weight: Floats | None = None) -> ScaledFeatures:
    """Scale features by the root of their mean, in which counts are about equally noisy.

    Returns the scale (features,), the scaled phi (rows, features), and its transpose.
    """
    mean = phi.mean(0) if weight is None else phi.T @ weight
    scale = np.sqrt(np.maximum(np.asarray(mean).ravel(), 1 / phi.shape[0]))
    narrow = np.int32 if phi.nnz < 2**31 else np.int64  # half the memory traffic of each product
    layout = phi.indices.astype(narrow), phi.indptr.astype(narrow)
    scaled = sparse.csr_array((phi.data / scale[phi.indices], *layout), shape=phi.shape)
    return scale, scaled, scaled.T


def _visit_goals(visits: Floats, ratio: Floats | float) -> Floats:
    """The target number of visits of each anchor (anchors,), inside the range of its candidates."""
    least = visits.min(1)
    most = visits.max(1)
    margin = (most - least) / (2 * visits.shape[1])  # a mean of K numbers is further from the ends
    return np.clip(ratio * visits.mean(1), least + margin, most - margin)


def _visit_slopes(logits: Floats, visits: Floats, goal: Floats) -> Floats:
    """b (anchors,) such that weights exp(logits + b visits) have the mean `goal`.

    It uses Newton steps inside a bracket.
    """
    low = np.full(len(goal), -STEEPEST_SLOPE)
    high = np.full(len(goal), STEEPEST_SLOPE)
    b = np.zeros(len(goal))
    for _ in range(SLOPE_ROUNDS):
        weights = special.softmax(logits + b[:, None] * visits, axis=1)
        mean = (weights * visits).sum(1)
        missing = goal - mean
        if np.abs(missing).max(initial=0) < SLOPE_TOLERANCE:
            break
        low = np.where(missing > 0, b, low)
        high = np.where(missing < 0, b, high)
        variance = (weights * (visits - mean[:, None]) ** 2).sum(1)
        step = b + missing / np.maximum(variance, 1e-12)
        inside = (step > low) & (step < high)
        b = np.where(missing == 0, b, np.where(inside, step, (low + high) / 2))
    return b


def _softmax(logits: Floats) -> tuple[Floats, float]:
    """Softmax in place, and the log of the normaliser."""
    top = float(logits.max())
    logits -= top
    np.exp(logits, out=logits)
    total = float(logits.sum())
    logits /= total
    return logits, top + float(np.log(total))


def _minimise(
    dual: Dual, curvature: Callable[[Floats], Product], start: Floats
) -> tuple[Floats, bool]:
    """Minimise by L-BFGS, then Newton steps; also return whether it converged."""
    options: Any = {
        "maxiter": LBFGS_STEPS,
        "maxfun": 2 * LBFGS_STEPS,
        "ftol": 1e-12,
        "gtol": TOLERANCE,
        "maxcor": 20,
    }
    x = optimize.minimize(dual, start, jac=True, method="L-BFGS-B", options=options).x
    gradient = dual(x)[1]
    # The value of the dual alone cannot distinguish gradients below 1e-8 from zero.
    for _ in range(NEWTON_STEPS):
        if not TOLERANCE <= np.abs(gradient).max(initial=0) < NEAR:
            break
        hessian = linalg.LinearOperator((len(x), len(x)), matvec=curvature(x), dtype=np.float64)
        step, _ = linalg.cg(hessian, -gradient, rtol=1e-4, maxiter=100)
        next_gradient = dual(x + step)[1]
        if not np.abs(next_gradient).max() < np.abs(gradient).max():
            break
        x = x + step
        gradient = next_gradient
    return x, float(np.abs(gradient).max(initial=0)) < CONVERGED


class TiltConfig(Section):
    """How training people are weighted."""

    ridge: float = Field(3e-3, ge=0)  # leaves costly moments unmet


@dataclass(frozen=True)
class GroupTilts:
    """w_d: one distribution over the training trajectories for each group."""

    groups: Groups
    indices: Ints  # (trajectories,) of the dataset
    base: Floats  # (trajectories,) equal weight per person: 1 / (people * windows of the person)
    weights: Floats  # (groups, trajectories), rows sum to 1
    tilts: tuple[Tilt, ...]  # one per group
    config: TiltConfig
    membership: bool

    @property
    def unmet(self) -> Floats:
        """The target moments less those that the weights reach (groups, features)."""
        return np.stack([tilt.unmet for tilt in self.tilts])

    def report(self, evidence: Evidence) -> dict[str, Any]:
        """A description of the tilts, for JSON."""
        return {
            "ridge": self.config.ridge,
            "membership": self.membership,
            "trajectories": len(self.indices),
            "groups": {
                name: self._group_report(evidence, number)
                for number, name in enumerate(self.groups.names)
            },
            "warnings": list(evidence.warnings),
        }

    def _group_report(self, evidence: Evidence, number: int) -> dict[str, Any]:
        tilt = self.tilts[number]
        unmet = np.abs(tilt.unmet) / evidence.moments.scale
        return {
            "effective_sample_size": round(tilt.effective_sample_size, 1),
            "relative_size": round(tilt.relative_size, 4),
            "converged": bool(tilt.converged),
            "dual": float(tilt.dual),
            "unmet": {
                "scaled": float(np.linalg.norm(unmet)),
                "bin": evidence.moments.phi.features[int(np.argmax(unmet))],
            },
            "information": round(evidence.information()[self.groups.names[number]], 4),
        }


def fit_group_tilts(
    evidence: Evidence,
    dataset: TrajectoryDataset,
    config: TiltConfig = TiltConfig(),  # noqa: B008
    *,
    membership: bool = False,
) -> GroupTilts:
    """Weight unlabelled training trajectories so that their mean of phi is that of each group.

    With `membership`, the prior of a person is p(d|g) of the person's region instead of uniform.
    With more than `MAX_ROWS` trajectories, tilts are fitted on a sample and applied to all.
    """
    indices = dataset.split("train")
    phi = evidence.moments.phi.counts(Trajectories.of(dataset, indices))  # (trajectories, features)
    # (trajectories,) rows of evidence.people
    row = np.searchsorted(evidence.people, dataset.person[indices])
    people = len(evidence.people)
    windows = np.bincount(row, minlength=people)
    base = 1 / (people * windows[row])  # (trajectories,)
    rows = _FittedRows.of(phi, config.ridge)
    priors = _group_priors(evidence, base, row) if membership else None
    scaled = None if membership else scale_features(rows.fitted, normalise(base[rows.sample]))
    tilts: list[Tilt] = []
    weights = np.empty((len(evidence.groups), len(indices)))
    for group, name in enumerate(evidence.groups.names):
        prior = base if priors is None else priors[group]
        tilt = rows.fit(evidence.moments.means[group], prior, scaled)
        if not tilt.converged:
            log.warning(
                "Group '%s': no weighting of training people has its estimated means. "
                "The nearest weighting is used.",
                name,
            )
        weights[group] = tilt.weights
        tilts.append(replace(tilt, weights=weights[group]))  # not a copy
    log.info(
        "Tilts fitted: the effective sample size of a group is at least %.0f of %d trajectories.",
        min(tilt.effective_sample_size for tilt in tilts),
        len(indices),
    )
    return GroupTilts(
        groups=evidence.groups,
        indices=indices,
        base=base,
        weights=weights,
        tilts=tuple(tilts),
        config=config,
        membership=membership,
    )


def _group_priors(evidence: Evidence, base: Floats, row: Ints) -> list[Floats]:
    """Prior weights (trajectories,) for each group, by the regions of their people."""
    log.warning(
        "%s: --membership weights each person by the composition of the person's home region",
        evidence.source,
    )
    if evidence.regions.randomised:
        log.warning(
            "%s: with a controlled partition, --membership can reveal the label itself. "
            "Do not compare this run with runs without it.",
            evidence.source,
        )
    # shares (people,) of one group each
    priors = [base * shares[row] for shares in evidence.membership().T]
    for name, prior in zip(evidence.groups.names, priors, strict=True):
        if not prior.sum() > 0:
            raise MobatlasError(
                f"--membership: no training person lives in a region with people of group '{name}'"
            )
    return priors


@dataclass(frozen=True)
class _FittedRows:
    """Rows to weight, and the sample of them that tilts are fitted on."""

    rows: sparse.csr_array  # (rows, features)
    sample: Ints  # numbers of the rows that are fitted
    fitted: sparse.csr_array
    ridge: float

    @classmethod
    def of(cls, rows: sparse.csr_array, ridge: float) -> Self:
        n = rows.shape[0]
        if n <= MAX_ROWS:
            return cls(rows, np.arange(n), rows, ridge)
        sample = np.sort(np.random.default_rng(n).choice(n, MAX_ROWS, replace=False))
        return cls(rows, sample, rows[sample], ridge)

    def fit(self, target: Floats, prior: Floats, scaled: ScaledFeatures | None) -> Tilt:
        """The tilt of all rows."""
        own = normalise(prior[self.sample])
        tilt = fit_tilt(self.fitted, target, self.ridge, prior=own, scaled_phi=scaled)
        if len(self.sample) < self.rows.shape[0]:
            tilt = tilt.apply_to(self.rows, target, prior)
        return tilt


def tilted_draw(tilts: GroupTilts, seed: int) -> Draw:
    """Batches of (x, z, d): d uniform, x by w_d, and z the anchors of x's person.

    Groups are drawn equally often: all groups are evaluated with equal weight, and small
    groups would otherwise be rare. Both draws are stratified, so that batches vary little.
    """
    cumulative_shares = _cumulative(np.ones(len(tilts.groups)))
    cumulative_weights = [_cumulative(weights) for weights in tilts.weights]

    def draw(size: int, step: int) -> Examples:
        rng = np.random.default_rng([seed, step])
        # (batch,) ascending
        groups = np.searchsorted(cumulative_shares, _strata(size, rng), side="right")
        indices = np.empty(size, dtype=np.int64)
        for group in np.unique(groups):
            mine = groups == group
            uniform = _strata(int(mine.sum()), rng)
            rows = np.searchsorted(cumulative_weights[group], uniform, side="right")
            indices[mine] = tilts.indices[rows]
        order = rng.permutation(size)  # a stage may assign noise levels by position in the batch
        return Examples(indices[order], groups[order])

    return draw


def fit_weighted(
    model: Generator,
    dataset: TrajectoryDataset,
    evidence: Evidence,
    tilts: GroupTilts,
    trainer: Trainer,
    *,
    from_scratch: bool = False,
) -> tuple[Generator, dict[str, float]]:
    """Condition a model on groups and train it on trajectories drawn by their tilts.

    Returns the conditioned copy and its training metrics.
    """
    conditioned = model.with_groups(tilts.groups, trainer.seed, from_scratch)
    if has_group_bias(conditioned.network):
        by_place = any(name.startswith("poi:") for name in evidence.phi.features)
        set_group_bias(conditioned.network, token_shifts(tilts, dataset, by_place=by_place))
    stage = conditioned.weighted_fit_stage(
        dataset, tilted_draw(tilts, trainer.seed), "tilt", trainer, fresh=from_scratch
    )
    return conditioned, trainer.run(stage)


def token_shifts(tilts: GroupTilts, dataset: TrajectoryDataset, *, by_place: bool) -> Floats:
    """Log odds of each place in a tilted group relative to the population (groups, vocabulary).

    Without `by_place`, the log odds of the place's category. The odds of going
    out, of HOME and of other special tokens stay unchanged; training learns these.
    """
    vocabulary = dataset.vocabulary
    visits = Trajectories.of(dataset, tilts.indices)
    if by_place:
        kinds = np.arange(len(vocabulary))  # (vocabulary,)
    else:
        kinds = np.unique([str(name) for name in vocabulary.categories], return_inverse=True)[1]
    out = visits.tokens >= FIRST_POI
    kind = kinds[visits.tokens[out]]  # (visits,)
    owner = visits.owner[out]
    shifts = np.zeros((len(tilts.groups), len(vocabulary)))
    if not len(kind):
        return shifts

    def shares(weights: Floats) -> Floats:
        return normalise(np.bincount(kind, weights[owner], kinds.max() + 1))  # (kinds,)

    base = shares(tilts.base)
    for group, weights in enumerate(tilts.weights):
        ratio = np.divide(shares(weights), base, out=np.ones(len(base)), where=base > 0)
        logits = np.clip(np.log(np.maximum(ratio, 1e-300)), -MAX_SHIFT, MAX_SHIFT)
        shifts[group, FIRST_POI:] = (logits - np.log(base @ np.exp(logits)))[kinds[FIRST_POI:]]
    return shifts


def _cumulative(weights: Floats) -> Floats:
    total = np.cumsum(weights)
    return total / total[-1]


def _strata(n: int, rng: np.random.Generator) -> Floats:
    """One point in each of n equal parts of [0, 1)."""
    return np.minimum((np.arange(n) + rng.random(n)) / n, np.nextafter(1, 0))
