"""Samples made by several processes on one machine, in the order that one would make them in.

They tell each other nothing, so there is no group of processes to set up: each makes the chunks that are its turn, and waits
until they are read, which bounds the memory. One that dies ends the others, and they end if the first one does.
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
from mobatlas.sampling.request import Chunk, Maker, Plan, Range
from mobatlas.training.resources import keep_memory

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True)
class _Work:
    """What one process is told."""

    plan: Plan
    model: Path
    dataset: Path
    content_hash: str  # of the model
    chunks: list[Range]
    device: str
    threads: int


@contextmanager
def made_by(
    maker: Maker, chunks: list[Range], kind: str, devices: int
) -> Iterator[Iterator[Chunk]]:
    """The chunks as they come, from this process or from as many others as there are devices to use."""
    count = min(devices, len(chunks))
    if devices == 1 or not count:
        yield map(maker.make, chunks)
        return
    model, threads = maker.model, max(1, torch.get_num_threads() // count)
    started: list[tuple[BaseProcess, Connection]] = []
    try:
        for _ in range(count):
            with _signals_held():
                started.append(_start())
        for rank, (_, connection) in enumerate(
            started
        ):  # all are on their way before one is waited for
            device, mine = f"{kind}:{rank}" if kind == "cuda" else kind, chunks[rank::count]
            told = _Work(
                maker.plan,
                model.path,
                model.dataset,
                model.manifest.content_hash,
                mine,
                device,
                threads,
            )
            with suppress(ConnectionError):  # it died, and is missed when its chunks are
                connection.send(told)
        yield _in_order(started, len(chunks))
    finally:
        for process, connection in started:
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
            found = connection.recv()
        except (EOFError, OSError):
            process.join()
            raise MobatlasError(
                f"process {rank + 1} of {len(workers)} died (exit code {process.exitcode}) and nothing was left half-written; "
                "if memory is short, ask for fewer --devices"
            ) from None
        if isinstance(found, Exception):
            raise found
        yield found


def _run(connection: Connection) -> None:
    """What another process does."""
    logging.disable(logging.WARNING)  # the first one has said it
    keep_memory()
    threading.Thread(target=_end_with_the_first, daemon=True).start()
    try:
        work: _Work = connection.recv()
        torch.set_num_threads(work.threads)
        model = load_model(work.model, work.dataset)
        if model.manifest.content_hash != work.content_hash:
            raise MobatlasError(f"{work.model}: was replaced meanwhile; run it again")
        model.generator.to(work.device)
        maker = Maker(work.plan, model)
        for chunk in work.chunks:
            connection.send(maker.make(chunk))
    except (EOFError, ConnectionError):  # the first process is gone
        pass
    except Exception as error:
        connection.send(error)


def _end_with_the_first() -> None:
    """Killed, it cannot say so."""
    first = multiprocessing.parent_process()
    assert first is not None
    first.join()
    os._exit(1)


@contextmanager
def _signals_held() -> Iterator[None]:
    """What is started here never hears Ctrl-C or a polite kill: the first process does, and ends the others."""
    resource_tracker.ensure_running()  # started later, it would let signals through again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
