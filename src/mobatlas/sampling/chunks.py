"""What to sample, and how: requests, the people they select, and chunks in one or more processes.

The person and the tokens of sample i are a function of (seed, i). Chunks, shards, processes and the
number of samples do not change a row. Worker processes do not communicate with each other. Each
samples every k-th chunk and waits until it is read, which bounds the memory. If one dies the others
end, and all end with the main process. Nothing here reads labels.

Random displacements of homes and workplaces are keyed by the places of all people together, not by
the seed. The seed is written in the file, and a reader who knows it could displace a suspected home
in the same way. A place moves in the same way in every file of a population, so averaging files
does not reveal it.
"""

import logging
import multiprocessing
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from mobatlas.config import Coarsening
from mobatlas.data.anchors import OBSERVED, SYNTHETIC
from mobatlas.data.dataset import Trajectories
from mobatlas.data.samples import to_rows
from mobatlas.data.types import EARTH_KM, Flags, Floats, Ints
from mobatlas.errors import MobatlasError, log
from mobatlas.generators.protocol import UNKNOWN, draw_rows, uniforms
from mobatlas.generators.store import Model, load_model
from mobatlas.sampling.copies import ATTEMPTS, find_copies, redraw_seed
from mobatlas.supervision.calibration import (
    BLOCK,
    PIECE,
    PIECE_STRIDE,
    CalibratedSampler,
    Calibration,
)
from mobatlas.training.loop import Share
from mobatlas.training.resources import keep_memory, peak_gb

POPULATION = "population"  # a form of calibration
DRAWS = 20  # from the posterior
MAX_KM = 100  # a larger number is probably in metres
DEGREE_KM = EARTH_KM * np.pi / 180  # of latitude
PER_CHUNK = 1_024  # trajectories, approximately: seconds of work, so that progress is visible
DRAW_STREAM = 1  # of random numbers


@dataclass(frozen=True)
class SampleRequest:
    """What to sample and how; the defaults sample the whole population.

    Parameters
    ----------
    group
        A group such as "30-40, F", several groups, or "all". Each group gets n trajectories.
    region
        Sample groups and homes with their distribution in this region.
    regions
        The REGIONS folder that has the region, if the model itself has no regions.
    anchors
        "synthetic" homes and workplaces, the "observed" ones of training people, or a table of
        home_lat, home_lon, work_lat, work_lon and optionally group, whose rows are used in order.
    rename
        Columns of the table of anchors: the expected name to the name in the table.
    coarsen
        Move homes and workplaces that are not synthetic: "1km" at random within a radius,
        "grid:500m" to a grid.
    calibrate
        Select samples of groups so that they have the estimated means.
    posterior
        Select them so that they have means drawn from the posterior. Sample number i of a group
        belongs to draw i modulo `draws`; draw k is one state of all groups.
    draws
        Number of draws with `posterior`.
    seed
        Random seed; group number k uses `seed + k`, and all groups the draws of `seed`.
    accelerator
        "auto", "cpu", "cuda" or "mps".
    devices
        Number of processes; the result does not depend on it.
    shard
        "3/8" writes the third of eight parts. Trajectories are numbered over all parts.
    chunk
        Tiles of the generator that are sampled at a time; by default about a second of work.
    reject_copies
        Redraw samples that reproduce a long or rare training trajectory. After a few attempts they
        are left out. Needs the dataset.

    Examples
    --------
    >>> SampleRequest(group=("<30, F", "<30, M"), calibrate=True, seed=1).group
    ('<30, F', '<30, M')
    """

    group: str | Sequence[str] | None = None
    region: str | None = None
    regions: Path | str | None = None
    anchors: Path | str = SYNTHETIC
    rename: Mapping[str, str] = field(default_factory=dict)
    coarsen: float | str | None = None
    calibrate: bool = False
    posterior: bool = False
    draws: int = DRAWS
    seed: int = 0
    accelerator: str = "auto"
    devices: int = 1
    shard: str | None = None
    chunk: int | None = None
    reject_copies: bool = False

    @property
    def table(self) -> Path | None:
        """The table of anchors."""
        return None if self.anchors in (SYNTHETIC, OBSERVED) else Path(self.anchors)


@dataclass(frozen=True)
class Shard:
    """One of several parts of all samples, counted from 1."""

    number: int = 1
    of: int = 1

    @classmethod
    def parse(cls, text: str | None) -> Self:
        """Read "3/8"; None is the only part."""
        match = re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", text or "1/1")
        number, of = map(int, match.groups()) if match else (0, 0)
        if not 1 <= number <= of:
            raise MobatlasError(
                f"--shard {text}: give I/K, the I-th of K parts with I from 1 to K, such as 3/8"
            )
        return cls(number, of)

    def samples(self, n: int, unit: int) -> tuple[int, int]:
        """Return the range (start, stop) of its part of n samples, in whole units."""
        units = Share(self.number - 1, self.of).rows(-(-n // unit))
        return min(n, units.start * unit), min(n, units.stop * unit)


@dataclass(frozen=True)
class People:
    """The people to sample: rows of anchors, and optionally a group for each row."""

    anchors: Floats  # (rows, 4) home lat, lon, work lat, lon; NaN where unknown
    names: tuple[str, ...] = ()  # of groups
    groups: Ints | None = None  # (rows,) numbers of groups
    in_order: bool = False  # use rows in order, repeatedly; otherwise draw rows
    residence: Floats | None = None  # (rows, groups) p(d | home region), to draw rows of a group

    def conditions(self, shares: Floats | None, draws: Floats, first: int) -> tuple[Ints, Floats]:
        """Return groups (n,) and anchors (n, 4) of the samples from number `first` on.

        Each row of `draws` selects the person of one sample. Groups come from the table of people,
        or are drawn by shares (groups,).
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
    """Everything except the model that samples depend on; it is sent to other processes."""

    people: People
    parts: tuple[Part, ...]
    n: int  # trajectories of each part
    shard: Shard = Shard()
    coarsening: Coarsening | None = None  # of the anchors, which are coarsened already
    region: str | None = None
    form: str | None = None  # of the calibration, see calibration.FORMS
    calibration: Calibration | None = None
    draws: int = 0  # from the posterior; 0: the samples of a group aim at the same means
    posterior: dict[str, Any] | None = None  # facts about the draws, for the metadata
    tiles: int | None = None  # of the generator that are sampled at a time
    protected: frozenset[bytes] | None = None  # hashes of trajectories that no sample may copy


def coarsen_anchors(anchors: Floats, coarsening: Coarsening, secret: Floats) -> Floats:
    """Move homes and workplaces (rows, 4); unknown ones stay unknown.

    `secret` is the anchors of all people, from which the key of random displacements is computed.
    """
    if coarsening.km > MAX_KM:
        raise MobatlasError(
            f"--coarsen {coarsening}: give at most {MAX_KM} km, such as 3km, 500m or grid:1km"
        )
    if not coarsening.km:
        log.warning("--coarsen %s: homes and workplaces are not moved", coarsening)
        return anchors
    home_and_work = (anchors[:, :2], anchors[:, 2:])
    if coarsening.form == "grid":
        return np.hstack([_snap_to_grid(places, coarsening.km) for places in home_and_work])
    key = blake2b(np.unique(secret, axis=0).tobytes()).digest()
    return np.hstack([_displace(places, coarsening.km, key) for places in home_and_work])


def _displace(places: Floats, km: float, key: bytes) -> Floats:
    """Random points of the discs around places (rows, 2); equal places have equal displacements."""
    distinct, row = np.unique(places, axis=0, return_inverse=True)
    # The radius is hashed as well: the same direction at two radii would point back at the place.
    words = (
        blake2b(np.append(place, km).tobytes(), key=key, digest_size=16).digest()
        for place in distinct
    )
    draws = np.frombuffer(b"".join(words), dtype="<u8").reshape(-1, 2) / 2.0**64  # (distinct, 2)
    lat, lon = np.radians(distinct).T
    angle = 2 * np.pi * draws[:, 1]
    arc = km / EARTH_KM * np.sqrt(draws[:, 0])  # the root makes it uniform over the area
    to_lat = np.arcsin(np.sin(lat) * np.cos(arc) + np.cos(lat) * np.sin(arc) * np.cos(angle))
    turn = np.arctan2(
        np.sin(angle) * np.sin(arc) * np.cos(lat), np.cos(arc) - np.sin(lat) * np.sin(to_lat)
    )
    moved = np.stack([np.degrees(to_lat), (np.degrees(lon + turn) + 180) % 360 - 180], axis=1)
    return moved[row.ravel()]


def _snap_to_grid(places: Floats, km: float) -> Floats:
    """Centres of squares: bands of latitude, each divided into squares of its own width."""
    bands = max(1, round(180 * DEGREE_KM / km))
    band = np.clip(np.floor((places[:, 0] + 90) / 180 * bands), 0, bands - 1)  # (rows,)
    lat = (band + 0.5) * 180 / bands - 90
    columns = np.maximum(1, np.round(360 * DEGREE_KM * np.cos(np.radians(lat)) / km))
    column = np.clip(np.floor((places[:, 1] + 180) / 360 * columns), 0, columns - 1)
    return np.stack([lat, (column + 0.5) * 360 / columns - 180], axis=1)


class Task(NamedTuple):
    """Samples `start` to before `stop` of a part."""

    part: Part
    start: int
    stop: int


@dataclass(frozen=True)
class Chunk:
    """The rows of some samples, and their cost."""

    rows: pa.RecordBatch
    n: int
    candidates: int
    peak_gb: float  # of the process
    rejected: int = 0  # copies of training trajectories, each time that one was drawn
    left_out: int = 0  # still copies after the last attempt


Drawn = tuple[Trajectories, Ints, int]  # samples, the group of each, candidates
Draw = Callable[[Part, int, int], Drawn]


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

    def tasks(self) -> list[Task]:
        """The chunks of the plan's shard, in order: its share of every part."""
        plan = self.plan
        unit = self.model.generator.tile  # samples that are computed together
        per_sample = plan.calibration.candidates if plan.calibration else 1
        step = unit * (plan.tiles or max(1, PER_CHUNK // unit // per_sample))
        if plan.form == POPULATION:
            unit = PIECE
            step = PIECE
        first, last = plan.shard.samples(plan.n, unit)
        return [
            Task(part, start, min(start + step, last))
            for part in plan.parts
            for start in range(first, last, step)
        ]

    def sample(self, task: Task) -> Chunk:
        """The rows of a chunk."""
        draw = self._from_population if self.plan.form == POPULATION else self._from_people
        drawn = draw(*task)
        copies = np.zeros(task.stop - task.start, dtype=bool)
        rejected = 0
        if self.plan.protected is not None:
            drawn, copies, rejected = self._redraw_copies(draw, task, drawn, self.plan.protected)
        samples, groups, candidates = drawn
        names = [self.plan.people.names[code] if code != UNKNOWN else None for code in groups]
        rows = to_rows(
            samples,
            task.part.first + task.start,
            pa.array(names, pa.string()),
            self.plan.region,
            self.model.generator.vocabulary,
            self._draws(task.start, task.stop),
        )
        if copies.any():  # their numbers are missing in the file
            numbers = pa.array(task.part.first + task.start + np.flatnonzero(copies))
            rows = rows.filter(pc.invert(pc.is_in(rows["trajectory"], numbers)))
        left_out = int(copies.sum())
        return Chunk(rows, len(copies) - left_out, candidates, peak_gb(), rejected, left_out)

    def _redraw_copies(
        self, draw: Draw, task: Task, drawn: Drawn, protected: frozenset[bytes]
    ) -> tuple[Drawn, Flags, int]:
        """Redraw samples that copy a training trajectory; also which ones still do, and rejects."""
        samples, groups, candidates = drawn
        rejected = 0
        for attempt in range(ATTEMPTS):
            copies = find_copies(samples, protected)
            if not copies.any():
                break
            rejected += int(copies.sum())
            part = replace(task.part, seed=redraw_seed(task.part.seed, attempt))
            others, groups_of_others, more = draw(part, task.start, task.stop)
            rows = np.arange(len(copies)) + len(copies) * copies
            samples = Trajectories.joined([samples, others]).take(rows)
            groups = np.where(copies, groups_of_others, groups)
            candidates += more
        return (samples, groups, candidates), find_copies(samples, protected), rejected

    def _draws(self, start: int, stop: int) -> Ints | None:
        """The posterior draw of each sample; None without draws."""
        return np.arange(start, stop) % self.plan.draws if self.plan.draws else None

    def _from_population(self, part: Part, start: int, stop: int) -> Drawn:
        """Calibrated samples of one group with anchors of the population."""
        assert self._sampler is not None and part.shares is not None
        size = stop - start
        group = int(part.shares.argmax())
        draws = self._draws(start, stop)
        codes = np.full(size, group) if draws is None else group + draws * len(self._sampler.groups)
        block = self.model.generator.tile * self.plan.tiles if self.plan.tiles else BLOCK
        first = start // PIECE * PIECE_STRIDE  # a piece is a function of the seed and its number
        rows = [np.flatnonzero(codes == code) for code in np.unique(codes)]
        accepted = [
            self._sampler.sample(
                len(each), int(codes[each[0]]), part.seed, first=first, block=block
            )
            for each in rows
        ]
        samples = Trajectories.joined([each.trajectories for each in accepted])
        if draws is not None:
            samples = samples.take(np.argsort(np.concatenate(rows)))
        return samples, np.full(size, group, dtype=np.int64), sum(each.drawn for each in accepted)

    def _from_people(self, part: Part, start: int, stop: int) -> Drawn:
        """Samples for the plan's people, calibrated or not."""
        size = stop - start
        draws = uniforms(part.seed, start, stop, DRAW_STREAM)  # (size, 4)
        groups, anchors = self.plan.people.conditions(part.shares, draws, start)
        if self._sampler is not None:
            codes = groups
            if (numbers := self._draws(start, stop)) is not None:
                drawn = groups + numbers * len(self._sampler.groups)
                codes = np.where(groups == UNKNOWN, UNKNOWN, drawn)
            samples = self._sampler.sample_at_anchors(codes, anchors, part.seed, first=start)
            return samples, groups, size * self._sampler.calibration.candidates
        generator = self.model.generator
        samples = generator.sample(
            size,
            None if generator.groups is None else groups,
            anchors,
            part.seed,
            first=start,
        )
        return samples, groups, size


@dataclass(frozen=True)
class _Work:
    """The work of one process."""

    plan: Plan
    model: Path
    dataset: Path
    content_hash: str  # of the model
    tasks: list[Task]
    device: str
    threads: int


@contextmanager
def sample_chunks(
    sampler: ChunkSampler, tasks: list[Task], kind: str, devices: int
) -> Iterator[Iterator[Chunk]]:
    """Yield the chunks in order, from this process or from one process per device."""
    count = min(devices, len(tasks))
    if devices == 1 or not count:
        yield map(sampler.sample, tasks)
        return
    model = sampler.model
    threads = max(1, torch.get_num_threads() // count)
    workers: list[tuple[BaseProcess, Connection]] = []
    try:
        for _ in range(count):
            with _blocked_signals():
                workers.append(_start())
        for rank, (_, connection) in enumerate(workers):  # all start before any gets its work
            work = _Work(
                sampler.plan,
                model.path,
                model.dataset,
                model.manifest.content_hash,
                tasks[rank::count],
                f"{kind}:{rank}" if kind == "cuda" else kind,
                threads,
            )
            with suppress(
                ConnectionError
            ):  # a dead process is reported when its chunks are missing
                connection.send(work)
        yield _in_order(workers, len(tasks))
    finally:
        for process, connection in workers:
            connection.close()
            process.kill()
            process.join()


def _start() -> tuple[BaseProcess, Connection]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_run, args=(theirs,), daemon=True)
    process.start()
    theirs.close()  # otherwise `recv` would not notice the end of the process
    return process, ours


def _in_order(workers: list[tuple[BaseProcess, Connection]], chunks: int) -> Iterator[Chunk]:
    for number in range(chunks):
        rank = number % len(workers)
        process, connection = workers[rank]
        try:
            result = connection.recv()
        except (EOFError, OSError):
            process.join()
            raise MobatlasError(
                f"process {rank + 1} of {len(workers)} died (exit code {process.exitcode}), and "
                "nothing was written; if memory ran out, pass fewer --devices"
            ) from None
        if isinstance(result, Exception):
            raise result
        yield result


def _run(connection: Connection) -> None:
    """The main function of a worker process."""
    logging.disable(logging.WARNING)  # the main process has logged it
    keep_memory()
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    try:
        work: _Work = connection.recv()
        torch.set_num_threads(work.threads)
        model = load_model(work.model, work.dataset)
        if model.manifest.content_hash != work.content_hash:
            raise MobatlasError(f"{work.model}: the model was replaced; run the command again")
        model.generator.to(work.device)
        sampler = ChunkSampler(work.plan, model)
        for task in work.tasks:
            connection.send(sampler.sample(task))
    except (EOFError, ConnectionError):  # the main process is gone
        pass
    except Exception as error:
        connection.send(error)


def _exit_with_parent() -> None:
    """End this process when the main process ends, even if that was killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


@contextmanager
def _blocked_signals() -> Iterator[None]:
    """Processes started here ignore Ctrl-C and SIGTERM: the main process ends them."""
    resource_tracker.ensure_running()  # started later, it would unblock the signals
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
