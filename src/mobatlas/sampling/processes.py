"""Chunks sampled by several processes of one machine, in the order of a single process.

The processes do not communicate with each other. Each samples every k-th chunk and waits until it
is read, which bounds the memory. If one dies the others end, and all end with the main process.
"""

from __future__ import annotations

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

import torch

from mobatlas.errors import MobatlasError
from mobatlas.generators.store import load_model
from mobatlas.sampling.request import Chunk, ChunkSampler, Plan, Task
from mobatlas.training.resources import keep_memory

SIGNALS = (signal.SIGINT, signal.SIGTERM)


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
            with suppress(ConnectionError):  # it died, which shows when its chunks are missing
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
    theirs.close()  # or its end would never be seen here
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
                "nothing was written; if memory is short, pass fewer --devices"
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
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
