"""Progress of long work: a bar with an ETA on a terminal, log lines elsewhere."""

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

from mobatlas.errors import log

SECONDS_BETWEEN_LINES = 5.0
SHARE_BETWEEN_LINES = 0.05  # of the elapsed time, so that a day of work gives a few hundred lines


class Tracker(Protocol):
    """Receives the progress of long work."""

    def step(self, done: float, note: str = "") -> None:
        """Show how much is done."""


class _Bar:
    def __init__(self, progress: Progress, title: str, total: float) -> None:
        self._progress = progress
        self._title = title
        self._task = progress.add_task(title, total=total)

    def step(self, done: float, note: str = "") -> None:
        description = f"{self._title}: {note}" if note else self._title
        self._progress.update(self._task, completed=done, description=description)


class _Lines:
    def __init__(self, title: str, total: float) -> None:
        self._title = title
        self._total = total
        self._start = time.monotonic()
        self._last_line = -SECONDS_BETWEEN_LINES
        self._activity = ""

    def step(self, done: float, note: str = "") -> None:
        elapsed = time.monotonic() - self._start
        # The text before a number: "loss 0.51" and "loss 0.49" are the same activity.
        activity = re.split(r"\d", note, maxsplit=1)[0]
        pause = max(SECONDS_BETWEEN_LINES, elapsed * SHARE_BETWEEN_LINES)
        is_due = activity != self._activity or done >= self._total
        if not is_due and elapsed - self._last_line < pause:
            return
        self._last_line = elapsed
        self._activity = activity
        has_eta = 0 < done < self._total and elapsed > 1
        eta = f", about {elapsed / done * (self._total - done):.0f} s left" if has_eta else ""
        progress = f"{done:.0f} of {self._total:.0f} ({elapsed:.1f} s{eta})"
        log.info("%s: %s%s", self._title, f"{note}, " if note else "", progress)


class _Silent:
    def step(self, done: float, note: str = "") -> None:
        """Show nothing."""


SILENT: Tracker = _Silent()


@contextmanager
def track(title: str, total: float, quiet: bool = False) -> Iterator[Tracker]:
    """A tracker for one piece of long work."""
    if quiet or not sys.stderr.isatty():
        yield _Lines(title, total)
        return
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    ) as progress:
        yield _Bar(progress, title, total)
