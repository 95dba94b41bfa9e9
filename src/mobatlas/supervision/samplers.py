"""Samplers of groups: a generator as it is, or with candidates selected by a calibration.

Each sample is a function of (seed, number of the candidate). It does not depend on how many samples
are drawn or in which chunks, and no candidate is used twice. Labels are not read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from mobatlas.data.arrays import Floats, Ints
from mobatlas.data.trajectories import Trajectories
from mobatlas.errors import MobatlasError
from mobatlas.generators.protocol import Generator
from mobatlas.generators.rng import draw_rows, uniforms
from mobatlas.groups import Groups
from mobatlas.supervision.calibration import Calibration
from mobatlas.supervision.evidence import Phi
from mobatlas.supervision.tilt import fixed_anchor_weights

BLOCK = 4_096  # candidates drawn at a time, at most
PATIENCE = 10  # give up after this many times the expected number of candidates
PIECE = 1_024  # samples that have candidates of their own
PIECE_STRIDE = 2**32  # candidate numbers between two pieces
# Streams of random numbers.
POPULATION_STREAM = 21
FIXED_ANCHOR_STREAM = 22
REPEAT_STREAM = 23


@dataclass(frozen=True)
class Accepted:
    """Samples of one group, and how many candidates they took."""

    trajectories: Trajectories
    numbers: Ints  # (n,) of the candidates, ascending
    following: int  # the candidate to continue from
    drawn: int  # candidates that were drawn


@runtime_checkable
class Sampler(Protocol):
    """Anything that samples trajectories of groups."""

    @property
    def groups(self) -> Groups | None:
        """None for a baseline, which samples the whole population for every group."""
        ...

    def sample(self, n: int, group: int, seed: int = 0, *, first: int = 0) -> Accepted:
        """Draw n samples of a group with anchors of the population, from candidate `first` on."""
        ...

    def sample_at_anchors(
        self, groups: Ints, anchors: Floats, seed: int = 0, *, first: int = 0, draws: int = 1
    ) -> Trajectories:
        """Sample one trajectory for each group (n,) and anchors (n, 4), numbered from `first`.

        With several `draws` the result holds draw after draw.
        """
        ...


@dataclass(frozen=True)
class PlainSampler:
    """A generator as it is: every candidate is accepted."""

    model: Generator
    anchors: Floats  # (rows, 4) of the population
    residence: Floats | None = None  # see Moments

    @property
    def groups(self) -> Groups | None:
        return self.model.groups

    def sample(self, n: int, group: int, seed: int = 0, *, first: int = 0) -> Accepted:
        """See Sampler."""
        uniform = uniforms(_stream(seed, POPULATION_STREAM, group), first, first + n)[:, 0]
        anchors = _draw_anchors(uniform, self.anchors, self.residence, group)
        groups = np.full(n, group, dtype=np.int64)
        samples = self.sample_at_anchors(groups, anchors, seed, first=first)
        return Accepted(samples, first + np.arange(n), first + n, n)

    def sample_at_anchors(
        self, groups: Ints, anchors: Floats, seed: int = 0, *, first: int = 0, draws: int = 1
    ) -> Trajectories:
        """See Sampler."""
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
    ) -> CalibratedSampler:
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

        To continue, pass `following` as `first`. An error is raised after ten times the expected
        number of candidates. `block` candidates are drawn at a time, which does not change the
        result.
        """
        if n < 1 or not 0 <= group < len(self.groups):
            raise MobatlasError(
                f"ask for at least 1 sample of one of {len(self.groups)} groups, not {n} of {group}"
            )
        expected = 1 / self.calibration.population[group].cap  # share of candidates
        tile = self.model.tile
        limit = int(PATIENCE * n / expected) + tile  # candidates
        parts: list[tuple[Trajectories, Ints]] = []
        count = 0
        position = first
        while count < n:
            if position - first >= limit:
                raise MobatlasError(
                    f"group '{self.groups.names[group]}': {count} of {position - first:,} "
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
        following = int(numbers[-1]) + 1
        samples = Trajectories.joined([part for part, _ in parts])
        return Accepted(samples, numbers, following, following - first)

    def _accept(
        self, first: int, size: int, group: int, seed: int, most: int
    ) -> tuple[Trajectories, Ints]:
        """The accepted ones among `size` candidates from `first` on, at most `most`."""
        weighting = self.calibration.population[group]
        own = _stream(seed, POPULATION_STREAM, group)
        uniform = uniforms(own, first, first + size)  # (size, 4)
        anchors = _draw_anchors(uniform[:, 0], self.anchors, self.residence, group)
        groups = np.full(size, group, dtype=np.int64) if self.calibration.conditioned else None
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
        """
        k = self.calibration.candidates
        own = _stream(seed, FIXED_ANCHOR_STREAM, 0)
        conditions = np.repeat(groups, k) if self.calibration.conditioned else None
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


def _draw_anchors(uniform: Floats, anchors: Floats, residence: Floats | None, group: int) -> Floats:
    """Anchors (n, 4) by uniform numbers (n,), weighted by where the group lives."""
    weights = None if residence is None else residence[:, group]
    return anchors[draw_rows(uniform, len(anchors), weights)]


def _stream(seed: int, stream: int, group: int) -> int:
    """A seed of its own for each form and group: no candidate serves two of them."""
    return int(np.random.SeedSequence([seed, stream, group]).generate_state(1, np.uint64)[0] >> 1)
