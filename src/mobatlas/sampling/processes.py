"""Sampling of chunks, in this process or in several on one machine; reads no labels.

The person and the tokens of sample i are a function of (seed, i). Chunks, shards, processes and the
number of samples do not change a row.

Worker processes do not communicate with each other. Each samples every k-th chunk and waits until
it is read, which bounds the memory. If one dies the others end, and all end with the main process.
"""

import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import torch

from mobatlas.data.arrays import Ints
from mobatlas.data.samples import to_rows
from mobatlas.data.trajectories import Trajectories
from mobatlas.errors import MobatlasError
from mobatlas.generators.protocol import UNKNOWN
from mobatlas.generators.rng import draw_rows, uniforms
from mobatlas.generators.store import Model, load_model
from mobatlas.sampling.request import POPULATION, Part, Plan
from mobatlas.supervision.calibration import BLOCK, PIECE, PIECE_STRIDE, CalibratedSampler
from mobatlas.training.resources import keep_memory, peak_gb

PER_CHUNK = 1_024  # trajectories, approximately: seconds of work, so that progress is visible
DRAWS = 1  # a stream of random numbers


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
        samples, groups, candidates = draw(*task)
        names = [self.plan.people.names[code] if code != UNKNOWN else None for code in groups]
        rows = to_rows(
            samples,
            task.part.first + task.start,
            pa.array(names, pa.string()),
            self.plan.region,
            self.model.generator.vocabulary,
            self._draws(task.start, task.stop),
        )
        return Chunk(rows, task.stop - task.start, candidates, peak_gb())

    def _draws(self, start: int, stop: int) -> Ints | None:
        """The posterior draw of each sample; None without draws."""
        return np.arange(start, stop) % self.plan.draws if self.plan.draws else None

    def _from_population(self, part: Part, start: int, stop: int) -> tuple[Trajectories, Ints, int]:
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
        candidates = sum(each.drawn for each in accepted)
        return samples, np.full(size, group, dtype=np.int64), candidates

    def _from_people(self, part: Part, start: int, stop: int) -> tuple[Trajectories, Ints, int]:
        """Samples for the plan's people, calibrated or not."""
        size = stop - start
        draws = uniforms(part.seed, start, stop, DRAWS)  # (size, 4)
        groups, anchors = self.plan.people.conditions(part.shares, draws, start)
        if self._sampler is not None:
            codes = groups
            if (numbers := self._draws(start, stop)) is not None:
                drawn = groups + numbers * len(self._sampler.groups)
                codes = np.where(groups == UNKNOWN, UNKNOWN, drawn)
            samples = self._sampler.sample_at_anchors(codes, anchors, part.seed, first=start)
            return samples, groups, size * self._sampler.calibration.candidates
        generator = self.model.generator
        lengths = None
        if self.plan.lengths == "empirical":
            lengths = draw_rows(draws[:, 2], len(self.model.lengths), self.model.lengths)
        samples = generator.sample(
            size,
            None if generator.groups is None else groups,
            anchors,
            part.seed,
            first=start,
            lengths=lengths,
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
