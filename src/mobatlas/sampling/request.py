"""What to sample, and the sampling of chunks that any process can do; reads no labels.

The person and the tokens of sample i are a function of (seed, i). Chunks, shards, processes and the
number of samples do not change a row.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

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
from mobatlas.supervision.samplers import BLOCK, PIECE, CalibratedSampler
from mobatlas.training.loop import Share
from mobatlas.training.resources import peak_gb

PER_CHUNK = 1_024  # trajectories, about: seconds of work, so that progress shows
DRAWS = 1  # a stream of random numbers
POPULATION = "population"  # a form of calibration


@dataclass(frozen=True)
class SampleRequest:
    """What to sample and how; the defaults sample the whole population.

    Parameters
    ----------
    group
        A group such as "30-40, F", several groups, or "all". Each group gets n trajectories.
    region
        Sample groups and homes as the people of this region have them.
    regions
        The REGIONS folder that has the region, if the model holds no regions.
    anchors
        A table of home_lat, home_lon, work_lat, work_lon and optionally group. Its rows are used in
        order; without `region` and `anchors`, homes are drawn from all training people.
    lengths
        "model", or "empirical" to draw lengths from the training trajectories.
    coarsen
        Move homes and workplaces: "1km" at random within a radius, "grid:500m" to a grid.
    calibrate
        Select samples of groups so that they have the estimated means.
    seed
        Random seed; group number k uses `seed + k`.
    accelerator
        "auto", "cpu", "cuda" or "mps".
    devices
        Number of processes; the result does not depend on it.
    shard
        "3/8" writes the third of eight parts, with the trajectory numbers of the whole.
    chunk
        Tiles of the generator that are sampled at a time; by default about a second of work.

    Examples
    --------
    >>> SampleRequest(group=("<30, F", "<30, M"), calibrate=True, seed=1).group
    ('<30, F', '<30, M')
    """

    group: str | Sequence[str] | None = None
    region: str | None = None
    regions: Path | str | None = None
    anchors: Path | str | None = None
    lengths: str = "model"
    coarsen: float | str | None = None
    calibrate: bool = False
    seed: int = 0
    accelerator: str = "auto"
    devices: int = 1
    shard: str | None = None
    chunk: int | None = None


@dataclass(frozen=True)
class Shard:
    """One of several parts of all samples, counted from 1."""

    number: int = 1
    of: int = 1

    @classmethod
    def parse(cls, text: str) -> Shard:
        """Read "3/8"."""
        match = re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", text)
        number, of = map(int, match.groups()) if match else (0, 0)
        if not 1 <= number <= of:
            raise MobatlasError(
                f"--shard {text}: give I/K, the I-th of K parts with I from 1 to K, such as 3/8"
            )
        return cls(number, of)

    def samples(self, n: int, unit: int) -> tuple[int, int]:
        """First and last number of its part of n samples: contiguous, in whole units, balanced."""
        units = Share(self.number - 1, self.of).rows(-(-n // unit))
        return min(n, units.start * unit), min(n, units.stop * unit)


@dataclass(frozen=True)
class People:
    """The people to sample: rows of anchors, and optionally a group for each row."""

    anchors: Floats  # (rows, 4) home lat, lon, work lat, lon; NaN where unknown
    names: tuple[str, ...] = ()  # of groups
    groups: Ints | None = None  # (rows,) numbers of groups
    in_order: bool = False  # rows in turn, then from the first again; else rows are drawn
    residence: Floats | None = None  # (rows, groups) p(d | home region), to draw rows of a group

    def conditions(self, shares: Floats | None, draws: Floats, first: int) -> tuple[Ints, Floats]:
        """Groups (n,) and anchors (n, 4) of samples from `first` on, each by its row of draws.

        Groups are those of the rows, or are drawn by shares (groups,).
        """
        if self.in_order:
            rows = (first + np.arange(len(draws))) % len(self.anchors)  # (n,)
        else:
            use_residence = self.residence is not None and shares is not None
            weights = self.residence @ shares if use_residence else None  # type: ignore[operator]
            rows = draw_rows(draws[:, 0], len(self.anchors), weights) % len(self.anchors)
        if self.groups is not None:
            groups = self.groups[rows]
        elif shares is not None:
            groups = draw_rows(draws[:, 1], len(shares), shares)
        else:
            groups = np.full(len(rows), UNKNOWN, dtype=np.int64)
        return groups, self.anchors[rows]


@dataclass(frozen=True)
class Part:
    """The samples of one group, of a mixture of groups, or of the whole population."""

    shares: Floats | None  # (groups,); None: no group, or those of the table of anchors
    seed: int
    first: int  # number of its first trajectory in the file


@dataclass(frozen=True)
class Plan:
    """All that samples depend on beside the model; it is sent to other processes."""

    people: People
    parts: tuple[Part, ...]
    n: int  # trajectories of each part
    lengths: str = "model"
    region: str | None = None
    form: str | None = None  # of the calibration, see calibration.FORMS
    calibration: Calibration | None = None
    tiles: int | None = None  # of the generator that are sampled at a time


class Task(NamedTuple):
    """Samples `start` to before `stop` of a part."""

    part: int
    start: int
    stop: int


@dataclass(frozen=True)
class Chunk:
    """The rows of some samples, and what they cost."""

    rows: pa.RecordBatch
    n: int
    candidates: int
    peak_gb: float  # of the process


class ChunkSampler:
    """Samples the chunks of a plan."""

    def __init__(self, plan: Plan, model: Model) -> None:
        self.plan = plan
        self.model = model
        self._sampler = None
        if plan.calibration is not None:
            people = plan.people
            self._sampler = CalibratedSampler.of(
                model.generator, plan.calibration, people.anchors, people.residence
            )

    def tasks(self, shard: Shard) -> list[Task]:
        """The chunks of a shard, in order: its share of every part."""
        plan = self.plan
        unit = self.model.generator.tile  # samples that are computed together
        per_sample = plan.calibration.candidates if plan.calibration else 1
        step = unit * (plan.tiles or max(1, PER_CHUNK // unit // per_sample))
        if plan.form == POPULATION:
            unit = PIECE
            step = PIECE
        first, last = shard.samples(plan.n, unit)
        return [
            Task(part, start, min(start + step, last))
            for part in range(len(plan.parts))
            for start in range(first, last, step)
        ]

    def sample(self, task: Task) -> Chunk:
        """The rows of a chunk."""
        part = self.plan.parts[task.part]
        draw = self._from_population if self.plan.form == POPULATION else self._from_people
        samples, groups, candidates = draw(part, task.start, task.stop)
        names = [self.plan.people.names[code] if code != UNKNOWN else None for code in groups]
        rows = rows_of(
            samples,
            part.first + task.start,
            pa.array(names, pa.string()),
            self.plan.region,
            self.model.generator.vocabulary,
        )
        return Chunk(rows, task.stop - task.start, candidates, peak_gb())

    def _from_population(self, part: Part, start: int, stop: int) -> tuple[Trajectories, Ints, int]:
        """Calibrated samples of one group with anchors of the population."""
        assert self._sampler is not None and part.shares is not None
        size = stop - start
        group = int(part.shares.argmax())
        tiles = self.plan.tiles
        block = self.model.generator.tile * tiles if tiles else BLOCK
        accepted = self._sampler.sample_piece(start // PIECE, size, group, part.seed, block=block)
        return accepted.trajectories, np.full(size, group, dtype=np.int64), accepted.drawn

    def _from_people(self, part: Part, start: int, stop: int) -> tuple[Trajectories, Ints, int]:
        """Samples for the plan's people, calibrated or not."""
        size = stop - start
        draws = uniforms(part.seed, start, stop, DRAWS)  # (size, 4)
        groups, anchors = self.plan.people.conditions(part.shares, draws, start)
        if self._sampler is not None:
            samples = self._sampler.sample_at_anchors(groups, anchors, part.seed, first=start)
            return samples, groups, size * self._sampler.calibration.candidates
        generator = self.model.generator
        lengths = None
        if self.plan.lengths == "empirical":
            lengths = draw_rows(draws[:, 2], len(self.model.lengths), self.model.lengths)
        conditions = None if generator.groups is None else groups
        samples = generator.sample(
            size, conditions, anchors, part.seed, first=start, lengths=lengths
        )
        return samples, groups, size

    def calibration_report(self) -> dict[str, Any]:
        """Distances of the sampled groups to their estimated means, on the calibration's pool."""
        calibration = self.plan.calibration
        form = self.plan.form
        assert calibration is not None and form is not None
        if self.plan.people.groups is not None:
            numbers = np.unique(self.plan.people.groups)
        else:
            numbers = np.flatnonzero(np.sum([np.asarray(p.shares) for p in self.plan.parts], 0))
        groups = {}
        for number in numbers.tolist():
            row = getattr(calibration, form)[number]
            groups[calibration.groups.names[number]] = {"before": row.before, "after": row.after}
        return {"form": form, "groups": groups}
