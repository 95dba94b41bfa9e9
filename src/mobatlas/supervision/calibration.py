"""Calibration: tilts fitted on a model's own samples; sampling selects candidates by them.

This is step 4 of the strategy `tilt`. For each group there are two forms of the distribution that
is nearest to the model's in Kullback-Leibler divergence and has the group's means:

population
    Anchors and trajectory are tilted together, by a factor of at most `cap`. A candidate is
    accepted with probability w(x) / cap, so one in `cap` is. See `fit_capped_tilt`.
fixed_anchors
    Anchors stay as they are, and one of K candidates is chosen. See `fit_fixed_anchor_tilt`.

Both are fitted on anchors of all training people, or of the regions where a group lives. Labels are
not read.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
from pydantic import ConfigDict, Field, TypeAdapter, model_validator
from scipy import sparse

from mobatlas.config import Section
from mobatlas.data.arrays import Floats, Ints
from mobatlas.errors import MobatlasError
from mobatlas.generators.protocol import Generator, has_times
from mobatlas.generators.rng import draw_rows
from mobatlas.groups import Groups
from mobatlas.progress import SILENT, Tracker
from mobatlas.supervision.evidence import Moments
from mobatlas.supervision.tilt import (
    CALIBRATION_RIDGE,
    fit_capped_tilt,
    fit_fixed_anchor_tilt,
    fixed_anchor_weights,
)

log = logging.getLogger("mobatlas")
POOL = 4_096  # samples per group: the remaining distance falls with the root of their number
RIDGE_FACTORS = (30.0, 10.0, 3.0)  # for fixed anchors: a pool has fewer anchors than features
CAPS = (2.0, 3.0, 5.0, 8.0, 12.0)
ENOUGH = 0.95  # of the largest improvement: the cheapest tilt that reaches it is used
BLOCK = 1_024  # samples drawn at a time
STREAM = 11  # of random numbers
FORMS = ("population", "fixed_anchors")
SETTINGS = ("conditioned", "candidates", "pool", "ridge")
STRICT = ConfigDict(arbitrary_types_allowed=True, extra="forbid")
Fit = tuple[Floats, float, bool]  # lambda (features,), nu or the ratio of visits, converged


class CalibrationConfig(Section):
    """How a calibration is fitted."""

    # Samples of each group, by default 4,096; 8,192 in one pool if the model has no groups.
    pool: int | None = Field(None, ge=1)
    # K, for each anchor: with 4 the means were twice as far off (JSD), with 16 not nearer.
    candidates: int = Field(8, ge=2)
    ridge: float = Field(CALIBRATION_RIDGE, ge=0)

    @model_validator(mode="after")
    def _pool_is_large_enough(self) -> CalibrationConfig:
        pool = self.pool or POOL
        if pool < 4 * self.candidates:
            raise ValueError(
                f"a pool of {pool} is too small for {self.candidates} candidates; "
                "give at least four times as many"
            )
        return self


class Choice(NamedTuple):
    """One possible tilt of a pool; a cap of 1 is no tilt."""

    cap: float
    ridge: float


@dataclass(frozen=True)
class Weighting:
    """The tilt of one group in one form: its cost, and the distance to the estimated means."""

    __pydantic_config__ = STRICT
    coefficients: Floats  # lambda (features,)
    offset: float  # nu
    visits: float  # visits of the group relative to the model's samples, with fixed anchors
    cap: float  # candidates per sample on average; K with fixed anchors
    ridge: float
    effective_sample_size: float  # of the weighted pool, as a share of it
    converged: bool
    before: dict[str, float]  # distance of the model's own means, see Moments.distance
    after: dict[str, float]  # distance of reweighted samples that the tilt was not fitted on


@dataclass(frozen=True)
class Calibration:
    """Tilts of every group in both forms, with all that is needed to apply them."""

    __pydantic_config__ = STRICT
    groups: Groups
    features: tuple[str, ...]
    mask: tuple[str, ...]
    conditioned: bool  # candidates are samples of the group, not of the whole population
    candidates: int  # K
    pool: int  # samples behind each fit
    ridge: float
    population: tuple[Weighting, ...]  # one per group
    fixed_anchors: tuple[Weighting, ...]

    def tensors(self) -> dict[str, Floats]:
        """lambda of both forms, (groups, features) each."""
        return {
            form: np.stack([each.coefficients for each in getattr(self, form)]) for form in FORMS
        }

    def as_dict(self) -> dict[str, Any]:
        """Everything but the tensors, for JSON; `of` reads both."""
        forms = {form: [asdict(each) for each in getattr(self, form)] for form in FORMS}
        for row in (row for form in forms.values() for row in form):
            del row["coefficients"]
        names = {"features": list(self.features), "mask": list(self.mask)}
        settings = {name: getattr(self, name) for name in SETTINGS}
        return {"groups": self.groups.as_dict()} | names | settings | forms

    @classmethod
    def of(cls, values: Mapping[str, Any], tensors: Mapping[str, Floats]) -> Calibration:
        """The inverse of `as_dict` and `tensors`.

        Raises ValueError, KeyError or TypeError if they do not describe one calibration.
        """
        forms = {
            form: [
                {"coefficients": coefficients, **facts}
                for coefficients, facts in zip(tensors[form], values[form], strict=True)
            ]
            for form in FORMS
        }
        fields = {**values, **forms, "groups": Groups.of(values["groups"])}
        calibration = TypeAdapter(cls).validate_python(fields)
        shape = (len(calibration.groups), len(calibration.features))
        if any(tensors[form].shape != shape for form in FORMS):
            raise ValueError(f"tensors of a calibration must have the shape {shape}")
        return calibration

    def report(self) -> dict[str, Any]:
        """The settings, and both forms by group, for JSON."""
        values = self.as_dict()
        groups = {
            name: {form: values[form][k] for form in FORMS}
            for k, name in enumerate(self.groups.names)
        }
        return {name: values[name] for name in SETTINGS} | {"groups": groups}


def fit_calibration(
    model: Generator,
    moments: Moments,
    config: CalibrationConfig = CalibrationConfig(),  # noqa: B008
    seed: int = 0,
    tracker: Tracker = SILENT,
) -> Calibration:
    """Fit both forms for every group on the model's own samples.

    A pool is `config.candidates` samples for each of some anchors of the population. A model
    without groups has one pool for all groups. The tracker counts per cent.
    """
    candidates = config.candidates
    conditioned = model.groups is not None
    pool = config.pool or (POOL if conditioned else 2 * POOL)
    moments = _comparable_moments(model, moments)
    rng = np.random.default_rng([seed, STREAM])
    people = _draw_people(moments, pool // candidates, rng)
    seeds = rng.integers(2**62, size=len(moments.groups)).tolist()
    anchors = [moments.anchors[rows].repeat(candidates, axis=0) for rows in people]
    pools = _sample_pools(model, moments, anchors, seeds, tracker)
    population: list[Weighting] = []
    fixed_anchors: list[Weighting] = []
    for name, target, phi in zip(moments.groups.names, moments.means, pools, strict=True):
        fit = _PoolFit(moments, phi, target, config.ridge)
        population.append(fit.best_weighting(None))
        fixed_anchors.append(fit.best_weighting(candidates))
        log.info(
            "Group '%s': JSD to its estimated means %.4f, calibrated %.4f, accepting 1 in %g.",
            name,
            population[-1].before["js"],
            population[-1].after["js"],
            population[-1].cap,
        )
    return Calibration(
        groups=moments.groups,
        features=moments.phi.features,
        mask=moments.phi.mask,
        conditioned=conditioned,
        candidates=candidates,
        pool=candidates * (pool // candidates),
        ridge=config.ridge,
        population=tuple(population),
        fixed_anchors=tuple(fixed_anchors),
    )


@dataclass(frozen=True)
class _PoolFit:
    """Fits tilts of one pool to the means of one group.

    `candidates` below is K with fixed anchors, and None in the form `population`.
    """

    moments: Moments
    phi: sparse.csr_array  # (rows, features)
    target: Floats  # (features,)
    ridge: float

    def best_weighting(self, candidates: int | None) -> Weighting:
        """The cheapest or gentlest tilt that comes about as near as the best.

        Each half of the pool is weighted by a fit on the other half. No tilt is among the choices,
        so that a pool too small for its features does no harm.
        """
        if candidates is None:
            choices = [Choice(cap, self.ridge) for cap in CAPS]
        else:
            choices = [Choice(candidates, factor * self.ridge) for factor in RIDGE_FACTORS]
        choices = [Choice(1.0, self.ridge), *choices]
        distances = {each: self._held_out_distance(each, candidates) for each in choices}
        start = distances[choices[0]]["scaled"]
        least = min(each["scaled"] for each in distances.values())
        bound = start - ENOUGH * (start - least)
        chosen = next(each for each in choices if distances[each]["scaled"] <= bound)
        coefficients, level, converged = self._fit(self.phi, chosen, candidates)
        w = self._weights(self.phi, (coefficients, level, converged), chosen, candidates)
        mean = np.asarray(self.phi.mean(0)).ravel()
        return Weighting(
            coefficients=coefficients,
            offset=level if candidates is None else 0.0,
            visits=level if candidates is not None and chosen.cap > 1 else 1.0,
            cap=chosen.cap if candidates is None else float(candidates),
            ridge=chosen.ridge,
            effective_sample_size=float(w.sum() ** 2 / (w**2).sum() / len(w)),
            converged=converged,
            before=self.moments.distance(mean, self.target),
            after=distances[chosen],
        )

    def _fit(self, rows: sparse.csr_array, choice: Choice, candidates: int | None) -> Fit:
        if candidates is None or choice.cap <= 1:
            return fit_capped_tilt(rows, self.target, choice.cap, choice.ridge)
        visits = rows @ self.moments.phi.visits
        wanted = self.target @ self.moments.phi.visits
        ratio = float(wanted / visits.mean()) if visits.any() else 1.0
        coefficients, converged = fit_fixed_anchor_tilt(
            rows, self.target, candidates, choice.ridge, visits, ratio
        )
        return coefficients, ratio, converged

    def _weights(
        self, rows: sparse.csr_array, fit: Fit, choice: Choice, candidates: int | None
    ) -> Floats:
        coefficients, level, _ = fit
        logits = rows @ coefficients
        if candidates is None or choice.cap <= 1:
            return np.asarray(np.exp(np.minimum(logits - level, np.log(choice.cap))))
        visits = (rows @ self.moments.phi.visits).reshape(-1, candidates)
        return fixed_anchor_weights(logits.reshape(-1, candidates), visits, level).ravel()

    def _held_out_distance(self, choice: Choice, candidates: int | None) -> dict[str, float]:
        k = candidates or 1
        middle = self.phi.shape[0] // 2 // k * k
        halves = self.phi[:middle], self.phi[middle:]
        means = []
        for rows, others in (halves, halves[::-1]):
            fit = self._fit(others, choice, candidates)
            w = self._weights(rows, fit, choice, candidates)
            means.append(rows.T @ w / w.sum())
        return self.moments.distance(np.mean(means, axis=0), self.target)


def _draw_people(moments: Moments, n: int, rng: np.random.Generator) -> list[Ints]:
    """Rows of n people for the pool of each group; one pool if groups may live anywhere."""
    people = len(moments.anchors)
    if moments.residence is None:
        rounds = -(-n // people)  # each person equally often, to within one
        return [np.concatenate([rng.permutation(people) for _ in range(rounds)])[:n]]
    # one number in each of n equal parts of [0, 1)
    strata = np.minimum((rng.permutation(n) + rng.random(n)) / n, np.nextafter(1, 0))
    return [draw_rows(strata, people, weights) for weights in moments.residence.T]


def _sample_pools(
    model: Generator,
    moments: Moments,
    anchors: Sequence[Floats],
    seeds: Sequence[int],
    tracker: Tracker,
) -> Iterator[sparse.csr_array]:
    """phi of the pool of each group, (rows, features); a shared pool is sampled once.

    `anchors` holds the anchors of each group's pool, or those of one pool for all groups.
    """
    conditioned = model.groups is not None
    separate = conditioned or len(anchors) > 1
    n = len(anchors[0])
    for group, seed in enumerate(seeds if separate else seeds[:1]):
        parts: list[sparse.csr_array] = []
        for start in range(0, n, BLOCK):
            block = anchors[group % len(anchors)][start : start + BLOCK]
            groups = np.full(len(block), group, dtype=np.int64) if conditioned else None
            samples = model.sample(len(block), groups, block, seed, first=start)
            parts.append(moments.phi.counts(samples))
            done = group + (start + len(block)) / n
            tracker.step(100 * done / (len(seeds) if separate else 1))
        phi = sparse.csr_array(sparse.vstack(parts, format="csr"))
        yield from [phi] if separate else [phi] * len(seeds)


def _comparable_moments(model: Generator, moments: Moments) -> Moments:
    """The moments that samples of the model can be compared with."""
    if model.groups is not None and model.groups.names != moments.groups.names:
        raise MobatlasError(
            f"calibration: the groups of the model ({'; '.join(model.groups.names)}) are not those "
            f"of {moments.source} ({'; '.join(moments.groups.names)})"
        )
    if has_times(model) or not moments.phi.timed_maps:
        return moments
    log.warning(
        "%s: samples of this model have no times, so the feature '%s' is not calibrated",
        moments.source,
        "' and '".join(moments.phi.timed_maps),
    )
    return moments.without_times(model.vocabulary)
