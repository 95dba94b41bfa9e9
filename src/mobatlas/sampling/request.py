"""Samples in chunks that any process can make: whom sample number i is of, and its tokens, are a function of (seed, i).

So neither how many are asked for nor the chunks, shards and processes in which they are made change a row. No label is read
here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from mobatlas.data.arrays import Floats, Ints
from mobatlas.data.synthetic import rows_of
from mobatlas.data.trajectories import Trajectories
from mobatlas.errors import MobatlasError
from mobatlas.generators.protocol import UNKNOWN
from mobatlas.generators.rng import draw_rows, uniforms
from mobatlas.generators.store import Model
from mobatlas.supervision.calibration import Calibration
from mobatlas.supervision.resample import BLOCK, PIECE, CalibratedSampler
from mobatlas.training.loop import Share
from mobatlas.training.resources import peak_gb

PER_CHUNK = 1_024  # trajectories, about: seconds of work, so that progress shows
DRAWS = 1  # a stream of random numbers
Range = tuple[int, int]  # samples from the first number to before the second


@dataclass(frozen=True)
class Shard:
    """One of so many pieces of all samples, counted from 1."""

    number: int = 1
    of: int = 1

    @classmethod
    def parse(cls, told: str) -> Shard:
        """From "3/8"."""
        found = re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", told)
        number, of = map(int, found.groups()) if found else (0, 0)
        if not 1 <= number <= of:
            raise MobatlasError(
                f"--shard {told}: give I/K, the I-th of K pieces with I from 1 to K, such as 3/8"
            )
        return cls(number, of)

    def samples(self, n: int, unit: int) -> Range:
        """Its part of n samples: contiguous, in whole units, as many as the others' to within one."""
        units = Share(self.number - 1, self.of).rows(-(-n // unit))
        return min(n, units.start * unit), min(n, units.stop * unit)


@dataclass(frozen=True)
class People:
    """Whom to sample: rows of anchors, and a group for each row or shares to draw it by."""

    anchors: Floats  # (rows, 4) home lat, lon, work lat, lon; NaN where unknown
    names: tuple[str, ...] = ()  # of groups
    shares: Floats | None = None  # (groups,)
    groups: Ints | None = None  # (rows,) places in `names`
    in_order: bool = False  # each row in its turn, then from the first again; else rows are drawn
    lives: Floats | None = (
        None  # (rows, groups) how likely a row is of a group, where one group is asked for; None: all alike
    )

    def conditions(self, draws: Floats, first: int) -> tuple[Ints, Floats]:
        """Groups (n,) and anchors (n, 4) of samples from `first` on, each by its row of draws."""
        numbers = first + np.arange(len(draws)) if self.in_order else self._drawn(draws[:, 0])
        rows = numbers % len(self.anchors)  # (n,)
        if self.groups is not None:
            return self.groups[rows], self.anchors[rows]
        unknown = np.full(len(rows), UNKNOWN, dtype=np.int64)
        return unknown if self.shares is None else draw_rows(
            draws[:, 1], len(self.shares), self.shares
        ), self.anchors[rows]

    def _drawn(self, uniform: Floats) -> Ints:
        weights = None if self.lives is None or self.shares is None else self.lives @ self.shares
        return draw_rows(uniform, len(self.anchors), weights)


@dataclass(frozen=True)
class Plan:
    """All that samples depend on beside the model, to be sent to other processes."""

    people: People
    n: int
    seed: int
    lengths: str  # model or empirical
    region: str | None = None
    form: str | None = None  # of the calibration: population or given
    calibration: Calibration | None = None
    tiles: int | None = None  # of the generator that are made at a time


@dataclass(frozen=True)
class Chunk:
    """Some samples, and what they cost."""

    rows: pa.RecordBatch
    n: int
    candidates: int
    peak_gb: float  # of the process


class Maker:
    """Makes the samples of a plan, those that are asked for."""

    def __init__(self, plan: Plan, model: Model) -> None:
        self.plan, self.model, self._sampler = plan, model, None
        if plan.calibration is not None:
            people = plan.people
            self._sampler = CalibratedSampler.of(
                model.generator, plan.calibration, people.anchors, people.lives
            )

    def chunks(self, shard: Shard) -> list[Range]:
        """Those of a shard, in order."""
        plan, tile = self.plan, self.model.generator.tile
        unit = PIECE if plan.form == "population" else tile  # what is made as a whole
        each = plan.calibration.candidates if plan.calibration and plan.form == "given" else 1
        step = (
            unit
            if plan.form == "population"
            else tile * (plan.tiles or max(1, PER_CHUNK // tile // each))
        )
        first, last = shard.samples(plan.n, unit)
        return [(start, min(start + step, last)) for start in range(first, last, step)]

    def make(self, samples: Range) -> Chunk:
        """The rows of some samples."""
        start, stop = samples
        made, groups, candidates = (
            self._population if self.plan.form == "population" else self._drawn
        )(start, stop)
        names = [self.plan.people.names[code] if code != UNKNOWN else None for code in groups]
        vocabulary = self.model.generator.vocabulary
        rows = rows_of(made, start, pa.array(names, pa.string()), self.plan.region, vocabulary)
        return Chunk(rows, stop - start, candidates, peak_gb())

    def _population(self, start: int, stop: int) -> tuple[Trajectories, Ints, int]:
        plan, size = self.plan, stop - start
        assert self._sampler is not None and plan.people.shares is not None
        group = int(plan.people.shares.argmax())  # one group was asked for
        block = self.model.generator.tile * plan.tiles if plan.tiles else BLOCK
        accepted = self._sampler.sample_piece(start // PIECE, size, group, plan.seed, block=block)
        return accepted.trajectories, np.full(size, group, dtype=np.int64), accepted.drawn

    def _drawn(self, start: int, stop: int) -> tuple[Trajectories, Ints, int]:
        plan, generator, size = self.plan, self.model.generator, stop - start
        draws = uniforms(plan.seed, start, stop, DRAWS)  # (size, 4)
        groups, anchors = plan.people.conditions(draws, start)
        if self._sampler is not None:
            made = self._sampler.sample_given(groups, anchors, plan.seed, first=start)
            return made, groups, size * self._sampler.calibration.candidates
        told = None if generator.groups is None else groups
        ends = (
            draw_rows(draws[:, 2], len(self.model.lengths), self.model.lengths)
            if plan.lengths == "empirical"
            else None
        )
        return (
            generator.sample(size, told, anchors, plan.seed, first=start, lengths=ends),
            groups,
            size,
        )

    def calibrated(self) -> dict[str, Any]:
        """Of the groups that were asked for: how far they are from the recovered means, on the pool of the calibration."""
        calibration, people, form = self.plan.calibration, self.plan.people, self.plan.form
        assert calibration is not None and form is not None
        asked = (
            np.flatnonzero(np.asarray(people.shares)) if people.groups is None else people.groups
        )
        rows = {
            calibration.groups.names[k]: getattr(calibration, form)[k]
            for k in np.unique(asked).tolist()
        }
        return {
            "form": form,
            "groups": {
                name: {"before": row.before, "after": row.after} for name, row in rows.items()
            },
        }
