"""Calibration: tilts fitted on a model's own samples, and samplers that select candidates by them.

This is step 4 of the strategy `tilt`. For each group there are two forms of the distribution that
is nearest to the model's in Kullback-Leibler divergence and has the group's means:

population
    Anchors and trajectory are tilted together, by a factor of at most `cap`. A candidate is
    accepted with probability w(x) / cap, on average one in `cap`. See `fit_capped_tilt`.
fixed_anchors
    Anchors stay as they are, and one of K candidates is chosen. See `fit_fixed_anchor_tilt`.

Both are fitted on anchors of all training people, or of the regions where a group lives.

Each sample is a function of (seed, number of the candidate). It does not depend on how many samples
are drawn or in which chunks, and no candidate is used twice. Labels are not read.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from typing import Any, NamedTuple, Self

import numpy as np
from pydantic import ConfigDict, Field, TypeAdapter, model_validator
from scipy import sparse

from mobatlas.config import Section
from mobatlas.data.dataset import Trajectories
from mobatlas.data.types import Floats, Ints
from mobatlas.errors import MobatlasError, log
from mobatlas.generators.protocol import UNKNOWN, Generator, draw_rows, has_times, uniforms
from mobatlas.groups import Groups
from mobatlas.progress import SILENT, Tracker
from mobatlas.supervision.evidence import Moments, Phi
from mobatlas.supervision.tilt import (
    CALIBRATION_RIDGE,
    fit_capped_tilt,
    fit_fixed_anchor_tilt,
    fixed_anchor_weights,
)

POOL = 4_096  # samples per group: the remaining distance falls with the root of their number
RIDGE_FACTORS = (30.0, 10.0, 3.0)  # for fixed anchors: a pool has fewer anchors than features
CAPS = (2.0, 3.0, 5.0, 8.0, 12.0)
ENOUGH = 0.95  # of the largest improvement: the cheapest tilt that reaches it is used
POOL_BLOCK = 1_024  # samples drawn at a time
BLOCK = 4_096  # candidates drawn at a time, at most
PATIENCE = 10  # give up after this many times the expected number of candidates
PIECE = 1_024  # samples that have candidates of their own
PIECE_STRIDE = 2**32  # candidate numbers between two pieces
# Streams of random numbers.
POOL_STREAM = 11
POPULATION_STREAM = 21
FIXED_ANCHOR_STREAM = 22
REPEAT_STREAM = 23
FORMS = ("population", "fixed_anchors")
SETTINGS = ("conditioned", "candidates", "pool", "ridge")
STRICT = ConfigDict(arbitrary_types_allowed=True, extra="forbid")
Fit = tuple[Floats, float, bool]  # lambda (features,), nu or the ratio of visits, converged


class CalibrationConfig(Section):
    """How a calibration is fitted."""

    # Samples of each group, by default 4,096; 8,192 in one pool if the model has no groups.
    pool: int | None = Field(None, ge=1)
    # K, for each anchor. With 4, the JSD to the means doubled; 16 did not reduce it.
    candidates: int = Field(8, ge=2)
    ridge: float = Field(CALIBRATION_RIDGE, ge=0)

    @model_validator(mode="after")
    def _pool_is_large_enough(self) -> Self:
        pool = self.pool or POOL
        if pool < 4 * self.candidates:
            raise ValueError(
                f"a pool of {pool} is too small for {self.candidates} candidates; "
                "use at least four times as many samples"
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
    # One per group. With posterior draws, one per group and draw: those of a draw follow each
    # other, and a form that is not needed is empty.
    population: tuple[Weighting, ...]
    fixed_anchors: tuple[Weighting, ...]

    def tensors(self) -> dict[str, Floats]:
        """lambda of both forms, (groups, features) each."""
        return {
            form: np.stack([each.coefficients for each in getattr(self, form)]) for form in FORMS
        }

    def as_dict(self) -> dict[str, Any]:
        """Everything but the tensors, for JSON; `of` reads both."""
        forms = {form: [asdict(each) for each in getattr(self, form)] for form in FORMS}
        for row in chain(*forms.values()):
            del row["coefficients"]
        return {
            "groups": self.groups.as_dict(),
            "features": list(self.features),
            "mask": list(self.mask),
            **{name: getattr(self, name) for name in SETTINGS},
            **forms,
        }

    @classmethod
    def of(cls, values: Mapping[str, Any], tensors: Mapping[str, Floats]) -> Self:
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
        rows = (*calibration.population, *calibration.fixed_anchors)
        if any(tensors[form].shape != shape for form in FORMS) or not all(
            "js" in each.before and "js" in each.after for each in rows
        ):
            raise ValueError(f"a calibration has tensors of shape {shape} and distances of means")
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
    size = (config.pool or (2 * POOL if model.groups is None else POOL)) // candidates * candidates
    moments = comparable_moments(model, moments)
    pools = sample_pools(model, moments, size, candidates, seed, tracker)
    population: list[Weighting] = []
    fixed_anchors: list[Weighting] = []
    for name, target, phi in zip(moments.groups.names, moments.means, pools, strict=True):
        fit = PoolFit(moments, phi, target, config.ridge)
        population.append(fit.best_weighting(None))
        fixed_anchors.append(fit.best_weighting(candidates))
        log.info(
            "Group '%s': the JSD to its estimated means is %.4f before and %.4f after calibration; "
            "1 in %g candidates is accepted.",
            name,
            population[-1].before["js"],
            population[-1].after["js"],
            population[-1].cap,
        )
    return Calibration(
        groups=moments.groups,
        features=moments.phi.features,
        mask=moments.phi.mask,
        conditioned=model.groups is not None,
        candidates=candidates,
        pool=size,
        ridge=config.ridge,
        population=tuple(population),
        fixed_anchors=tuple(fixed_anchors),
    )


@dataclass(frozen=True)
class PoolFit:
    """Fits tilts of one pool to the means of one group.

    `candidates` below is K with fixed anchors, and None in the form `population`.
    """

    moments: Moments
    phi: sparse.csr_array  # (rows, features)
    target: Floats  # (features,)
    ridge: float

    def best_weighting(self, candidates: int | None) -> Weighting:
        """Return the cheapest or gentlest tilt that is nearly as close to the target as the best.

        Each half of the pool is weighted by a fit on the other half. One choice is not to tilt, so
        that a pool too small for its features does no harm.
        """
        tilts = (
            [Choice(cap, self.ridge) for cap in CAPS]
            if candidates is None
            else [Choice(candidates, factor * self.ridge) for factor in RIDGE_FACTORS]
        )
        choices = [Choice(1.0, self.ridge), *tilts]
        distances = {
            each: self.moments.distance(self.held_out_mean(each, candidates), self.target)
            for each in choices
        }
        start = distances[choices[0]]["scaled"]
        bound = start - ENOUGH * (start - min(each["scaled"] for each in distances.values()))
        chosen = next(each for each in choices if distances[each]["scaled"] <= bound)
        return replace(self.weighting(chosen, candidates), after=distances[chosen])

    def weighting(self, chosen: Choice, candidates: int | None) -> Weighting:
        """One tilt; its distance `after` is that of the pool it was fitted on."""
        coefficients, level, converged = self._fit(self.phi, chosen, candidates)
        w = self._weights(self.phi, (coefficients, level, converged), chosen, candidates)
        return Weighting(
            coefficients=coefficients,
            offset=level if candidates is None else 0.0,
            visits=level if candidates is not None and chosen.cap > 1 else 1.0,
            cap=chosen.cap if candidates is None else float(candidates),
            ridge=chosen.ridge,
            effective_sample_size=float(w.sum() ** 2 / (w**2).sum() / len(w)),
            converged=converged,
            before=self.moments.distance(np.asarray(self.phi.mean(0)).ravel(), self.target),
            after=self.moments.distance(self.phi.T @ w / w.sum(), self.target),
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

    def held_out_mean(self, choice: Choice, candidates: int | None) -> Floats:
        """The mean (features,) that a tilt reaches on samples that it was not fitted on."""
        k = candidates or 1
        middle = self.phi.shape[0] // 2 // k * k
        halves = self.phi[:middle], self.phi[middle:]
        means = []
        for rows, others in (halves, halves[::-1]):
            w = self._weights(rows, self._fit(others, choice, candidates), choice, candidates)
            means.append(rows.T @ w / w.sum())
        return np.asarray(np.mean(means, axis=0))


def sample_pools(
    model: Generator,
    moments: Moments,
    size: int,
    candidates: int,
    seed: int,
    tracker: Tracker = SILENT,
) -> Iterator[sparse.csr_array]:
    """phi of the pool of each group, (rows, features); `candidates` rows for each anchor."""
    rng = np.random.default_rng([seed, POOL_STREAM])
    people = _draw_people(moments, size // candidates, rng)
    seeds = rng.integers(2**62, size=len(moments.groups)).tolist()
    anchors = [moments.anchors[rows].repeat(candidates, axis=0) for rows in people]
    return _sample_pools(model, moments, anchors, seeds, tracker)


def _draw_people(moments: Moments, n: int, rng: np.random.Generator) -> list[Ints]:
    """Rows of n people for the pool of each group; one pool for all groups without `residence`."""
    people = len(moments.anchors)
    if moments.residence is None:
        rounds = -(-n // people)  # how often people are drawn differs by at most one
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

    `anchors` has one entry per group, or a single entry for a pool that all groups share.
    """
    conditioned = model.groups is not None
    separate = conditioned or len(anchors) > 1
    n = len(anchors[0])
    for group, seed in enumerate(seeds if separate else seeds[:1]):
        parts: list[sparse.csr_array] = []
        for start in range(0, n, POOL_BLOCK):
            block = anchors[group % len(anchors)][start : start + POOL_BLOCK]
            groups = np.full(len(block), group, dtype=np.int64) if conditioned else None
            samples = model.sample(len(block), groups, block, seed, first=start)
            parts.append(moments.phi.counts(samples))
            tracker.step(100 * (group + (start + len(block)) / n) / (len(seeds) if separate else 1))
        phi = sparse.csr_array(sparse.vstack(parts, format="csr"))
        yield from [phi] if separate else [phi] * len(seeds)


def comparable_moments(model: Generator, moments: Moments) -> Moments:
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


@dataclass(frozen=True)
class Accepted:
    """Samples of one group, and how many candidates they took."""

    trajectories: Trajectories
    numbers: Ints  # (n,) of the candidates, ascending
    next_candidate: int  # the candidate to continue from
    drawn: int  # candidates that were drawn


@dataclass(frozen=True)
class PlainSampler:
    """A generator without calibration: every candidate is accepted."""

    model: Generator
    anchors: Floats  # (rows, 4) of the population
    residence: Floats | None = None  # see Moments

    @property
    def groups(self) -> Groups | None:
        """None for a baseline, which samples the whole population for every group."""
        return self.model.groups

    def sample(self, n: int, group: int, seed: int = 0, *, first: int = 0) -> Accepted:
        """Draw n samples of a group with anchors of the population, from candidate `first` on."""
        uniform = uniforms(_stream(seed, POPULATION_STREAM, group), first, first + n)[:, 0]
        anchors = _draw_anchors(uniform, self.anchors, self.residence, group)
        groups = np.full(n, group, dtype=np.int64)
        samples = self.sample_at_anchors(groups, anchors, seed, first=first)
        return Accepted(samples, first + np.arange(n), first + n, n)

    def sample_at_anchors(
        self, groups: Ints, anchors: Floats, seed: int = 0, *, first: int = 0, draws: int = 1
    ) -> Trajectories:
        """Sample one trajectory for each group (n,) and anchors (n, 4), numbered from `first`.

        With several `draws`, all trajectories of a draw come before those of the next.
        """
        conditions = None if self.model.groups is None else groups
        seeds = [seed, *(_stream(seed, REPEAT_STREAM, draw) for draw in range(1, draws))]
        return Trajectories.joined(
            [self.model.sample(len(groups), conditions, anchors, own, first=first) for own in seeds]
        )


@dataclass(frozen=True)
class CalibratedSampler:
    """A generator whose candidates are selected by a calibration.

    The generator knows groups, or it is a baseline (strategy `resample`).
    """

    model: Generator
    calibration: Calibration
    anchors: Floats  # (rows, 4) of training people
    phi: Phi
    residence: Floats | None = None  # see Moments

    @classmethod
    def of(
        cls,
        model: Generator,
        calibration: Calibration,
        anchors: Floats,
        residence: Floats | None = None,
    ) -> Self:
        """Combine a model with its calibration; that of another model is refused."""
        if model.groups != (calibration.groups if calibration.conditioned else None):
            raise MobatlasError(
                "calibration: its groups are not those of the model; supervise the model again"
            )
        phi = Phi.of(calibration.features, model.vocabulary, calibration.mask)
        return cls(model, calibration, anchors, phi, residence)

    @property
    def groups(self) -> Groups:
        return self.calibration.groups

    def sample(
        self,
        n: int,
        group: int,
        seed: int = 0,
        *,
        first: int = 0,
        block: int = BLOCK,
    ) -> Accepted:
        """Form `population`: accept or reject candidates from number `first` on until there are n.

        To continue, pass `next_candidate` as `first`. An error is raised after ten times the
        expected number of candidates. `block` candidates are drawn at a time, which does not
        change the result. With posterior draws, `group` is that of draw 0 plus the number of
        groups for each draw.
        """
        rows = self.calibration.population
        if n < 1 or not 0 <= group < len(rows):
            raise MobatlasError(
                f"sample: n is {n} and group is {group}; pass n of at least 1 and one of "
                f"{len(rows)} groups, counted from 0"
            )
        expected = 1 / rows[group].cap  # share of candidates
        tile = self.model.tile
        limit = int(PATIENCE * n / expected) + tile  # candidates
        parts: list[tuple[Trajectories, Ints]] = []
        count = 0
        position = first
        while count < n:
            if position - first >= limit:
                name = self.groups.names[group % len(self.groups)]
                raise MobatlasError(
                    f"group '{name}': {count} of {position - first:,} "
                    f"candidates were accepted where {expected:.0%} were expected; supervise the "
                    "model again with a larger pool (--set calibration.pool=N)"
                )
            stop = position + min(block, int((n - count) / expected))
            stop = -(-stop // tile) * tile  # a whole tile costs as much as a part
            size = min(stop, first + limit) - position
            parts.append(self._accept(position, size, group, seed, n - count))
            count += len(parts[-1][1])
            position += size
        numbers = np.concatenate([part for _, part in parts])
        next_candidate = int(numbers[-1]) + 1
        return Accepted(
            Trajectories.joined([part for part, _ in parts]),
            numbers,
            next_candidate,
            next_candidate - first,
        )

    def _accept(
        self, first: int, size: int, group: int, seed: int, most: int
    ) -> tuple[Trajectories, Ints]:
        """Return the accepted ones of `size` candidates from number `first` on, at most `most`."""
        weighting = self.calibration.population[group]
        own = _stream(seed, POPULATION_STREAM, group)
        uniform = uniforms(own, first, first + size)  # (size, 4)
        number = group % len(self.groups)
        anchors = _draw_anchors(uniform[:, 0], self.anchors, self.residence, number)
        groups = np.full(size, number, dtype=np.int64) if self.calibration.conditioned else None
        candidates = self.model.sample(size, groups, anchors, own, first=first)
        logits = self.phi.counts(candidates) @ weighting.coefficients - weighting.offset
        probability = np.exp(np.minimum(logits - np.log(weighting.cap), 0))  # w(x) / cap
        accepted = np.flatnonzero(uniform[:, 1] < probability)[:most]
        return candidates.take(accepted), first + accepted

    def sample_at_anchors(
        self, groups: Ints, anchors: Floats, seed: int = 0, *, first: int = 0, draws: int = 1
    ) -> Trajectories:
        """Form `fixed_anchors`: choose one of K candidates per row by the weights of its group.

        A row of UNKNOWN group has equal weights. Several draws choose among the same candidates.
        For numbers of groups with posterior draws, see `sample`.
        """
        k = self.calibration.candidates
        own = _stream(seed, FIXED_ANCHOR_STREAM, 0)
        numbers = np.where(groups == UNKNOWN, UNKNOWN, groups % len(self.groups))
        conditions = np.repeat(numbers, k) if self.calibration.conditioned else None
        candidates = self.model.sample(
            k * len(groups), conditions, np.repeat(anchors, k, axis=0), own, first=k * first
        )
        weightings = self.calibration.fixed_anchors
        unknown = np.zeros(len(self.phi.features))  # UNKNOWN, -1, is the last row
        table = np.vstack([*(each.coefficients for each in weightings), unknown])
        ratio = np.array([*(each.visits for each in weightings), 1.0])
        counts = self.phi.counts(candidates)
        scores = counts @ table.T  # (candidates, groups + 1)
        logits = scores[np.arange(len(scores)), np.repeat(groups, k)].reshape(-1, k)  # (n, K)
        visits = (counts @ self.phi.visits).reshape(-1, k)
        weights = np.cumsum(fixed_anchor_weights(logits, visits, ratio[groups]), axis=1)
        streams = [own, *(_stream(seed, REPEAT_STREAM, draw) for draw in range(1, draws))]
        # (draws, n)
        uniform = np.stack([uniforms(each, first, first + len(groups))[:, 0] for each in streams])
        chosen = (weights <= uniform[..., None] * weights[:, -1:]).sum(-1)
        return candidates.take((k * np.arange(len(groups)) + chosen).ravel())


Sampler = PlainSampler | CalibratedSampler


def _draw_anchors(uniform: Floats, anchors: Floats, residence: Floats | None, group: int) -> Floats:
    """Anchors (n, 4) by uniform numbers (n,), weighted by where the group lives."""
    return anchors[
        draw_rows(uniform, len(anchors), None if residence is None else residence[:, group])
    ]


def _stream(seed: int, stream: int, group: int) -> int:
    """A separate seed for each form and group, so that they share no candidates."""
    return int(np.random.SeedSequence([seed, stream, group]).generate_state(1, np.uint64)[0] >> 1)
