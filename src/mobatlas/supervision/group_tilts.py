"""Teach: training trajectories weighed to the recovered means of each group, and a generator that goes on training on them
(steps 2 and 3 of the tilt; Theorem "Exponential-tilt characterization of the I-projection")."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy import sparse, special

from mobatlas.data.arrays import Floats
from mobatlas.data.dataset import TrajectoryDataset
from mobatlas.data.trajectories import Trajectories
from mobatlas.data.vocabulary import FIRST_POI
from mobatlas.errors import MobatlasError, suggestion
from mobatlas.features.divergences import normalise
from mobatlas.generators.layers import has_group_bias, set_group_bias
from mobatlas.generators.protocol import Draw, Examples, Generator
from mobatlas.groups import Groups
from mobatlas.regions.aggregates import person_means
from mobatlas.supervision.evidence import Evidence
from mobatlas.supervision.moments import Ints
from mobatlas.supervision.tilt import Scaled, Tilt, fit_tilt, scaled_features
from mobatlas.training.loop import Trainer

log = logging.getLogger("mobatlas")
UNITS = ("trajectory", "person")
RIDGE = 3e-3
FURTHEST = 2.0  # logits: how often a group visits what hardly anybody does is hardly known
MOST_UNITS = 300_000  # their means are known to within half a per cent of a standard deviation: less than the ridge leaves


@dataclass(frozen=True)
class GroupTilts:
    """w_d: one distribution over the training trajectories for each group."""

    groups: Groups
    indices: Ints  # (trajectories,) of the dataset
    base: Floats  # (trajectories,) everybody alike: 1 / (people * windows of the person)
    weights: Floats  # (groups, trajectories), rows sum to 1
    tilts: tuple[Tilt, ...]  # one a group, over units
    gaps: Floats  # (groups,) primal less dual value, zero at the solution
    unit: str
    ridge: float
    membership: bool

    @property
    def effective_sample_sizes(self) -> Floats:
        """In units: trajectories or people (groups,)."""
        return np.array([tilt.effective_sample_size for tilt in self.tilts])

    @property
    def unmet(self) -> Floats:
        """The moments less those that the weights reach (groups, features)."""
        return np.stack([tilt.unmet for tilt in self.tilts])

    def report(self, evidence: Evidence) -> dict[str, Any]:
        """What to say of the tilts, for JSON."""
        told, moments, scale = evidence.information(), evidence.moments, evidence.told.scale
        groups = {}
        for number, (name, tilt) in enumerate(zip(self.groups.names, self.tilts, strict=True)):
            unmet, sd = np.abs(tilt.unmet) / moments.scale, evidence.recovery.sd[number]
            groups[name] = {
                "effective_sample_size": round(tilt.effective_sample_size, 1),
                "relative_size": round(tilt.relative_size, 4),
                "converged": bool(tilt.converged),
                "dual": float(tilt.dual),
                "gap": float(self.gaps[number]),
                "unmet": {
                    "scaled": float(np.linalg.norm(unmet)),
                    "bin": moments.phi.features[int(np.argmax(unmet))],
                },
                "information": round(told[name], 4),
                "posterior_sd": {
                    "relative": float(sd.sum() / max(evidence.means[number].sum(), 1e-300)),
                    "bin": evidence.phi.features[int(np.argmax(sd / scale))],
                },
            }
        reached = evidence.means - self.unmet[:, : evidence.means.shape[1]]
        baseline = np.tile(evidence.recovery.baseline, (len(reached), 1))
        return {
            "unit": self.unit,
            "ridge": self.ridge,
            "membership": self.membership,
            "units": len(self.tilts[0].weights),
            "groups": groups,
            "validation": evidence.against_validation(reached),
            "validation_baseline": evidence.against_validation(baseline),
            "warnings": list(evidence.warnings),
        }


def fit_group_tilts(
    evidence: Evidence,
    dataset: TrajectoryDataset,
    *,
    unit: str = "trajectory",
    ridge: float = RIDGE,
    membership: bool = False,
) -> GroupTilts:
    """Weigh unlabelled training trajectories so that their mean of phi is each group's recovered one.

    With the person as the unit all windows of a person share its weight. `membership` begins from p(d|g) of the region that
    each person lives in instead of from everybody alike. Of more than `MOST_UNITS` units the tilts are fitted on a sample,
    and weigh all of them.
    """
    if unit not in UNITS:
        raise MobatlasError(
            f"tilt: the unit '{unit}' does not exist{suggestion(unit, UNITS)} (known: {', '.join(UNITS)})"
        )
    indices = dataset.split("train")
    moments = evidence.moments
    phi = moments.phi.counts(Trajectories.of(dataset, indices))  # (trajectories, features)
    row = np.searchsorted(
        evidence.people, dataset.person[indices]
    )  # (trajectories,) places in evidence.people
    people, windows = len(evidence.people), np.bincount(row, minlength=len(evidence.people))
    base = 1 / (people * windows[row])  # (trajectories,)
    if membership:
        _say_membership(evidence)
    of_person = unit == "person"
    rows = person_means(phi, row, people) if of_person else phi  # (units, features)
    alike = np.full(people, 1 / people) if of_person else base  # (units,)
    belongs = evidence.membership() if membership else None  # (people, groups)
    fitting = _Fitting.of(rows, ridge)
    scaled = (
        scaled_features(fitting.phi, _shares(alike[fitting.units])) if belongs is None else None
    )
    tilts, gaps, weights = [], [], np.empty((len(evidence.groups), len(indices)))
    for group, name in enumerate(evidence.groups.names):
        prior = (
            alike
            if belongs is None
            else alike * (belongs[:, group] if of_person else belongs[row, group])
        )
        if not prior.sum() > 0:
            raise MobatlasError(
                f"--membership: no training person lives in a region with anybody of group '{name}'"
            )
        tilt, gap = fitting.fit(moments.means[group], prior, scaled)
        if not tilt.converged:
            log.warning(
                "group '%s': its means lie outside of what training people do; the nearest is taken",
                name,
            )
        weights[group] = tilt.weights[row] / windows[row] if of_person else tilt.weights
        tilts.append(tilt if of_person else replace(tilt, weights=weights[group]))
        gaps.append(gap)
    return GroupTilts(
        groups=evidence.groups,
        indices=indices,
        base=base,
        weights=weights,
        tilts=tuple(tilts),
        gaps=np.array(gaps),
        unit=unit,
        ridge=ridge,
        membership=membership,
    )


@dataclass(frozen=True)
class _Fitting:
    """Rows to weigh, and those of them that tilts are fitted on."""

    rows: sparse.csr_array  # (units, features)
    units: Ints  # among them
    phi: sparse.csr_array  # of those
    ridge: float

    @classmethod
    def of(cls, rows: sparse.csr_array, ridge: float) -> _Fitting:
        units = np.arange(rows.shape[0])
        if len(units) <= MOST_UNITS:
            return cls(rows, units, rows, ridge)
        some = np.sort(np.random.default_rng(len(units)).choice(units, MOST_UNITS, replace=False))
        return cls(rows, some, rows[some], ridge)

    def fit(self, target: Floats, prior: Floats, scaled: Scaled | None) -> tuple[Tilt, float]:
        """The tilt of all rows, and the duality gap where it was fitted."""
        mine = _shares(prior[self.units])
        tilt = fit_tilt(self.phi, target, self.ridge, prior=mine, scaled_phi=scaled)
        gap = _duality_gap(tilt, self.phi, target, self.ridge, mine)
        return (
            tilt if len(self.units) == self.rows.shape[0] else tilt.over(self.rows, target, prior)
        ), gap


def tilted_draw(tilts: GroupTilts, seed: int, shares: Floats | None = None) -> Draw:
    """Batches of (x, z, d): d by `shares`, x by w_d, and z are the anchors of x's person.

    Groups are drawn equally often unless shares say otherwise: what is learnt is the distribution given d, every group is
    evaluated alike, and by shares of the population a small group would be seen a tenth as often as a large one. Both draws
    are stratified, one point in each of as many equal parts of the cumulative weights, so that a batch strays little from them.
    """
    shares = np.ones(len(tilts.groups)) if shares is None else shares
    if (
        shares.shape != (len(tilts.groups),)
        or not (shares >= 0).all()
        or not 0 < shares.sum() < np.inf
    ):
        raise MobatlasError(
            f"tilt: shares must be {len(tilts.groups)} numbers, none negative, not all zero"
        )
    of_groups, of_rows = _cumulative(shares), [_cumulative(weights) for weights in tilts.weights]

    def draw(size: int, step: int) -> Examples:
        rng = np.random.default_rng([seed, step])
        groups = np.searchsorted(of_groups, _strata(size, rng), side="right")  # (batch,) ascending
        indices = np.empty(size, dtype=np.int64)
        for group in np.unique(groups):
            here = groups == group
            rows = np.searchsorted(of_rows[group], _strata(int(here.sum()), rng), side="right")
            indices[here] = tilts.indices[rows]
        order = rng.permutation(size)  # a stage may tell noise levels by the place in the batch
        return Examples(indices[order], groups[order])

    return draw


def teach_tilts(
    model: Generator,
    dataset: TrajectoryDataset,
    evidence: Evidence,
    trainer: Trainer,
    *,
    unit: str = "trajectory",
    ridge: float = RIDGE,
    membership: bool = False,
    shares: Floats | None = None,
    from_scratch: bool = False,
) -> tuple[Generator, dict[str, Any]]:
    """The model after phase 2: told groups, and continued on trajectories drawn by their tilts; and what to report."""
    tilts = fit_group_tilts(evidence, dataset, unit=unit, ridge=ridge, membership=membership)
    manner: dict[str, Any] = {"shares": shares, "from_scratch": from_scratch}
    taught, metrics = teach(model, dataset, evidence, tilts, trainer, **manner)
    return taught, {"tilt": metrics, **tilts.report(evidence)}


def teach(
    model: Generator,
    dataset: TrajectoryDataset,
    evidence: Evidence,
    tilts: GroupTilts,
    trainer: Trainer,
    *,
    shares: Floats | None = None,
    from_scratch: bool = False,
) -> tuple[Generator, dict[str, float]]:
    """Step 3 alone: the model told groups and trained on, and what the training came to."""
    taught = model.with_groups(tilts.groups, trainer.seed, from_scratch)
    if has_group_bias(taught.network):
        told = any(name.startswith("poi:") for name in evidence.phi.features)
        set_group_bias(taught.network, token_shifts(tilts, dataset, by_place=told))
    draw = tilted_draw(tilts, trainer.seed, shares)
    return taught, trainer.run(
        taught.weighted_fit_stage(dataset, draw, "tilt", trainer, fresh=from_scratch)
    )


def token_shifts(tilts: GroupTilts, dataset: TrajectoryDataset, *, by_place: bool) -> Floats:
    """How much oftener a group visits each place than everybody, by the weights of its tilt, as logits (groups, vocabulary).

    Where regions tell no places, how much oftener those of its category. They leave the odds of going out as they are, which
    is for teaching to say, and so are HOME and the like.
    """
    vocabulary, visits = dataset.vocabulary, Trajectories.of(dataset, tilts.indices)
    told = (
        np.arange(len(vocabulary))
        if by_place
        else np.unique([str(c) for c in vocabulary.categories], return_inverse=True)[1]
    )
    out = visits.tokens >= FIRST_POI
    kind, owner, shifts = (
        told[visits.tokens[out]],
        visits.owner[out],
        np.zeros((len(tilts.groups), len(vocabulary))),
    )
    if not len(kind):
        return shifts

    def shares(weights: Floats) -> Floats:
        return normalise(np.bincount(kind, weights[owner], told.max() + 1))  # (kinds,)

    often = shares(tilts.base)
    for group, weights in enumerate(tilts.weights):
        ratio = np.divide(shares(weights), often, out=np.ones(len(often)), where=often > 0)
        steep = np.clip(np.log(np.maximum(ratio, 1e-300)), -FURTHEST, FURTHEST)
        shifts[group, FIRST_POI:] = (steep - np.log(often @ np.exp(steep)))[told[FIRST_POI:]]
    return shifts


def _say_membership(evidence: Evidence) -> None:
    log.warning(
        "%s: weights begin from the region that each person lives in (--membership)",
        evidence.source,
    )
    if evidence.regions.randomised:
        log.warning(
            "%s: --membership under a controlled partition can be the label itself; do not compare it with runs without",
            evidence.source,
        )


def _duality_gap(
    tilt: Tilt, phi: sparse.csr_array, target: Floats, ridge: float, prior: Floats
) -> float:
    """KL(w | prior) + |unmet|^2 / (2 ridge), in scaled coordinates, less the dual value; without a ridge KL alone."""
    scale = np.sqrt(np.maximum(phi.T @ prior, 1 / phi.shape[0]))
    primal = float(special.rel_entr(tilt.weights, prior).sum())
    if ridge > 0:
        primal += float(((tilt.unmet / scale) ** 2).sum()) / (2 * ridge)
    return primal + tilt.dual


def _shares(weights: Floats) -> Floats:
    return np.asarray(weights / weights.sum())


def _cumulative(weights: Floats) -> Floats:
    total = np.cumsum(weights)
    return total / total[-1]


def _strata(n: int, rng: np.random.Generator) -> Floats:
    """One point in each of n equal parts of [0, 1)."""
    return np.minimum((np.arange(n) + rng.random(n)) / n, np.nextafter(1, 0))
