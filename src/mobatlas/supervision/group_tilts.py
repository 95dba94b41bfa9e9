"""Training trajectories weighted to the estimated means of each group, and a fit on them.

Steps 2 and 3 of the strategy `tilt` (Theorem "Exponential-tilt characterization of the
I-projection").
"""

from dataclasses import dataclass, replace
from typing import Any, Literal, Self

import numpy as np
from pydantic import Field
from scipy import sparse, special

from mobatlas.config import Section
from mobatlas.data.dataset import Trajectories, TrajectoryDataset
from mobatlas.data.types import FIRST_POI, Floats, Ints
from mobatlas.errors import MobatlasError
from mobatlas.features.divergences import normalise
from mobatlas.generators.layers import has_group_bias, set_group_bias
from mobatlas.generators.protocol import Draw, Examples, Generator
from mobatlas.groups import Groups
from mobatlas.progress import log
from mobatlas.regions.aggregates import person_means
from mobatlas.supervision.evidence import Evidence
from mobatlas.supervision.tilt import ScaledFeatures, Tilt, fit_tilt, scale_features
from mobatlas.training.loop import Trainer

MAX_SHIFT = 2.0  # logits: visits to rare places say little about a group
# With this many units, means are known to within half a per cent of a standard deviation.
MAX_UNITS = 300_000


class TiltConfig(Section):
    """How training people are weighted."""

    # With "person", all windows of a person share one weight.
    unit: Literal["trajectory", "person"] = "trajectory"
    ridge: float = Field(3e-3, ge=0)  # leaves costly moments unmet


@dataclass(frozen=True)
class GroupTilts:
    """w_d: one distribution over the training trajectories for each group."""

    groups: Groups
    indices: Ints  # (trajectories,) of the dataset
    base: Floats  # (trajectories,) equal weight per person: 1 / (people * windows of the person)
    weights: Floats  # (groups, trajectories), rows sum to 1
    tilts: tuple[Tilt, ...]  # one per group, over units
    gaps: Floats  # (groups,) primal less dual value, zero at the solution
    config: TiltConfig
    membership: bool

    @property
    def unmet(self) -> Floats:
        """The target moments less those that the weights reach (groups, features)."""
        return np.stack([tilt.unmet for tilt in self.tilts])

    def report(self, evidence: Evidence) -> dict[str, Any]:
        """A description of the tilts, for JSON."""
        means = evidence.means
        reached = means - self.unmet[:, : means.shape[1]]
        baseline = np.tile(evidence.recovery.baseline, (len(reached), 1))
        return {
            "unit": self.config.unit,
            "ridge": self.config.ridge,
            "membership": self.membership,
            "units": len(self.tilts[0].weights),
            "groups": {
                name: self._group_report(evidence, number)
                for number, name in enumerate(self.groups.names)
            },
            "validation": evidence.validation_distance(reached),
            "validation_baseline": evidence.validation_distance(baseline),
            "warnings": list(evidence.warnings),
        }

    def _group_report(self, evidence: Evidence, number: int) -> dict[str, Any]:
        tilt = self.tilts[number]
        unmet = np.abs(tilt.unmet) / evidence.moments.scale
        sd = evidence.recovery.sd[number]
        return {
            "effective_sample_size": round(tilt.effective_sample_size, 1),
            "relative_size": round(tilt.relative_size, 4),
            "converged": bool(tilt.converged),
            "dual": float(tilt.dual),
            "gap": float(self.gaps[number]),
            "unmet": {
                "scaled": float(np.linalg.norm(unmet)),
                "bin": evidence.moments.phi.features[int(np.argmax(unmet))],
            },
            "information": round(evidence.information()[self.groups.names[number]], 4),
            "posterior_sd": {
                "relative": float(sd.sum() / max(evidence.means[number].sum(), 1e-300)),
                "bin": evidence.phi.features[int(np.argmax(sd / evidence.aggregate_moments.scale))],
            },
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
    With more than `MAX_UNITS` units, tilts are fitted on a sample and applied to all.
    """
    indices = dataset.split("train")
    phi = evidence.moments.phi.counts(Trajectories.of(dataset, indices))  # (trajectories, features)
    # (trajectories,) rows of evidence.people
    row = np.searchsorted(evidence.people, dataset.person[indices])
    people = len(evidence.people)
    windows = np.bincount(row, minlength=people)
    base = 1 / (people * windows[row])  # (trajectories,)
    by_person = config.unit == "person"
    units = _Units.of(person_means(phi, row, people) if by_person else phi, config.ridge)
    uniform = np.full(people, 1 / people) if by_person else base  # (units,)
    priors = _group_priors(evidence, uniform, None if by_person else row) if membership else None
    scaled = (
        None if membership else scale_features(units.fit_rows, normalise(uniform[units.sample]))
    )
    tilts: list[Tilt] = []
    gaps: list[float] = []
    weights = np.empty((len(evidence.groups), len(indices)))
    for group, name in enumerate(evidence.groups.names):
        prior = uniform if priors is None else priors[group]
        tilt, gap = units.fit(evidence.moments.means[group], prior, scaled)
        if not tilt.converged:
            log.warning(
                "Group '%s': no weighting of training people has its estimated means. "
                "The nearest weighting is used.",
                name,
            )
        weights[group] = tilt.weights[row] / windows[row] if by_person else tilt.weights
        tilts.append(tilt if by_person else replace(tilt, weights=weights[group]))
        gaps.append(gap)
    log.info(
        "Tilts fitted: the effective sample size of a group is at least %.0f of %d %s.",
        min(tilt.effective_sample_size for tilt in tilts),
        units.rows.shape[0],
        "people" if by_person else "trajectories",
    )
    return GroupTilts(
        groups=evidence.groups,
        indices=indices,
        base=base,
        weights=weights,
        tilts=tuple(tilts),
        gaps=np.array(gaps),
        config=config,
        membership=membership,
    )


def _group_priors(evidence: Evidence, uniform: Floats, row: Ints | None) -> list[Floats]:
    """Prior weights of the units (units,) for each group, by the regions of their people."""
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
    priors = [
        uniform * (shares if row is None else shares[row])  # shares (people,) of one group
        for shares in evidence.membership().T
    ]
    for name, prior in zip(evidence.groups.names, priors, strict=True):
        if not prior.sum() > 0:
            raise MobatlasError(
                f"--membership: no training person lives in a region with people of group '{name}'"
            )
    return priors


@dataclass(frozen=True)
class _Units:
    """Rows to weight, and the sample of them that tilts are fitted on."""

    rows: sparse.csr_array  # (units, features)
    sample: Ints  # rows that are fitted
    fit_rows: sparse.csr_array
    ridge: float

    @classmethod
    def of(cls, rows: sparse.csr_array, ridge: float) -> Self:
        units = np.arange(rows.shape[0])
        if len(units) <= MAX_UNITS:
            return cls(rows, units, rows, ridge)
        sample = np.sort(np.random.default_rng(len(units)).choice(units, MAX_UNITS, replace=False))
        return cls(rows, sample, rows[sample], ridge)

    def fit(
        self, target: Floats, prior: Floats, scaled: ScaledFeatures | None
    ) -> tuple[Tilt, float]:
        """The tilt of all rows, and the duality gap on the fitted ones."""
        own = normalise(prior[self.sample])
        tilt = fit_tilt(self.fit_rows, target, self.ridge, prior=own, scaled_phi=scaled)
        # KL(w | prior) + |unmet|^2 / (2 ridge), in scaled coordinates, less the dual value
        scale = np.sqrt(np.maximum(self.fit_rows.T @ own, 1 / self.fit_rows.shape[0]))
        primal = float(special.rel_entr(tilt.weights, own).sum())
        if self.ridge > 0:
            primal += float(((tilt.unmet / scale) ** 2).sum()) / (2 * self.ridge)
        gap = primal + tilt.dual
        if len(self.sample) < self.rows.shape[0]:
            tilt = tilt.apply_to(self.rows, target, prior)
        return tilt, gap


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
