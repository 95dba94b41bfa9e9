"""How long work shows itself: a bar with an ETA on a terminal, plain log lines elsewhere."""

from __future__ import annotations

import logging
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

log = logging.getLogger("mobatlas")
SECONDS_BETWEEN_LINES = 5.0
SHARE_BETWEEN_LINES = 0.05  # of the time so far: a day's work is a few hundred lines


class Tracker(Protocol):
    """Told how far the work has come."""

    def step(self, done: float, note: str = "") -> None: ...


class _Bar:
    def __init__(self, progress: Progress, title: str, total: float) -> None:
        self._progress = progress
        self._title = title
        self._task = progress.add_task(title, total=total)

    def step(self, done: float, note: str = "") -> None:
        self._progress.update(
            self._task,
            completed=done,
            description=f"{self._title}: {note}" if note else self._title,
        )


class _Lines:
    def __init__(self, title: str, total: float) -> None:
        self._title, self._total = title, total
        self._start = time.monotonic()
        self._last = -SECONDS_BETWEEN_LINES
        self._doing = ""

    def step(self, done: float, note: str = "") -> None:
        elapsed = time.monotonic() - self._start
        doing = re.split(r"\d", note, maxsplit=1)[0]  # "loss 0.51" is the same work as "loss 0.49"
        waited = elapsed - self._last >= max(SECONDS_BETWEEN_LINES, elapsed * SHARE_BETWEEN_LINES)
        if doing == self._doing and done < self._total and not waited:
            return
        self._last, self._doing = elapsed, doing
        eta = (
            f", about {elapsed / done * (self._total - done):.0f} s left"
            if 0 < done < self._total and elapsed > 1
            else ""
        )
        log.info(
            "%s: %s%.0f of %.0f (%.1f s%s)",
            self._title,
            f"{note}, " if note else "",
            done,
            self._total,
            elapsed,
            eta,
        )


class _Silent:
    def step(self, done: float, note: str = "") -> None:
        pass


SILENT: Tracker = _Silent()


@contextmanager
def track(title: str, total: float, quiet: bool = False) -> Iterator[Tracker]:
    """A tracker for one piece of long work."""
    if quiet or not sys.stderr.isatty():
        yield _Lines(title, total)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        yield _Bar(progress, title, total)
