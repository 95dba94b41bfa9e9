"""The experiment runner that all benchmarks share: it computes cells once and resumes.

A cell is one result, `seed-N/NAME.json`. The step cache of `mobatlas run` records its inputs, so
the same command resumes a benchmark. Benchmarks with the same `--out` share datasets, regions and
models.
"""

from __future__ import annotations

import json
import logging
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from mobatlas.errors import MobatlasError
from mobatlas.io.manifest import library_versions, write_json
from mobatlas.pipeline.run import StepCache
from mobatlas.progress import track

log = logging.getLogger("mobatlas")
# Advice of errors, reworded: benchmarks have neither --resume nor --overwrite.
HINTS: Mapping[str, str] = {
    r"\w+ with --resume": "the same command resumes",
    r"(pass|\w+ \w+ with) --overwrite( to [a-z ]+)?": "choose another --out",
}


@dataclass(frozen=True)
class Experiment:
    """The folder of a benchmark and the seeds that it runs."""

    out: Path
    seeds: int = 1
    first_seed: int = 0
    quiet: bool = False  # log lines instead of bars

    @property
    def numbers(self) -> range:
        """The seeds."""
        return range(self.first_seed, self.first_seed + self.seeds)


@dataclass(frozen=True)
class Command:
    """A command line of `python -m bench`, for result files."""

    name: str
    options: Mapping[str, Sequence[str]] = field(default_factory=dict)  # option -> its values
    flags: Sequence[str] = ()
    one_seed: bool = False  # the benchmark has --seed instead of --seeds and --first-seed

    def line(self, experiment: Experiment, seed: int | None = None) -> str:
        """Return the command of all seeds, or that of one seed."""
        words = [
            word
            for option, values in self.options.items()
            for value in values
            for word in (option, value)
        ]
        count = experiment.seeds if seed is None else 1
        first = experiment.first_seed if seed is None else seed
        seeds = ["--seeds", str(count), "--first-seed", str(first)]
        if self.one_seed:
            seeds = ["--seed", str(first)]
        words += [*self.flags, *seeds, "--out", experiment.out.name]
        return shlex.join(["python", "-m", "bench", self.name, *words])

    def header(self, experiment: Experiment) -> dict[str, Any]:
        """Return the first keys of a result."""
        return {
            "command": self.line(experiment),
            "seed": experiment.first_seed,
            "versions": library_versions(),
        }


@dataclass(frozen=True)
class Cell:
    """One result of a benchmark and how to compute it."""

    seed: int | None  # None: shared by all seeds
    name: str  # of its file
    inputs: Mapping[str, Any]  # all that the result depends on, except the code
    compute: Callable[[], Mapping[str, Any]]
    label: str = ""  # for progress; the name by default
    minutes: float = 0  # a forecast; 0: unknown


@dataclass(frozen=True)
class Runner:
    """Computes the cells of a folder that are not finished."""

    experiment: Experiment
    title: str
    command: Command
    folder: Path | None = None  # of the cells; that of the experiment by default

    @property
    def out(self) -> Path:
        """The folder of the cells."""
        return self.folder or self.experiment.out

    def run(self, cells: Sequence[Cell]) -> list[dict[str, Any]]:
        """Compute unfinished cells, with a forecast and progress; return all results."""
        pending = [cell for cell in cells if not self._is_done(cell)]
        minutes = sum(cell.minutes for cell in pending)
        forecast = f", about {minutes:.0f} minutes on two cores" if minutes else ""
        finished = len(cells) - len(pending)
        log.info("%s: %d cells, %d of them finished%s", self.title, len(cells), finished, forecast)
        # Lines instead of a bar, because training shows its own bars.
        with resume_hints(), track(self.title, max(len(pending), 1), quiet=True) as tracker:
            for done, cell in enumerate(pending):
                seed = "" if cell.seed is None else f"seed {cell.seed}, "
                tracker.step(done, f"{seed}{cell.label or cell.name}")
                self._compute(cell)
        return [read_cell(self.out, cell.seed, cell.name) for cell in cells]

    def _is_done(self, cell: Cell) -> bool:
        path = cell_path(self.out, cell.seed, cell.name)
        return StepCache(path.parent).is_done(cell.name, path, cell.inputs)

    def _compute(self, cell: Cell) -> None:
        path = cell_path(self.out, cell.seed, cell.name)

        def write(_: bool) -> None:
            facts = {
                "command": self.command.line(self.experiment, cell.seed),
                "seed": cell.seed,
                "versions": library_versions(),
                "threads": torch.get_num_threads(),
            }
            write_json(path, {**facts, **cell.compute()})

        StepCache(path.parent).run(cell.name, path, cell.inputs, write)


def cell_name(*words: str) -> str:
    """Return a name for the file of a cell."""
    return "-".join(words).replace(",", "").replace(" ", "-")


def compute_once(
    cache: StepCache, name: str, out: Path, inputs: Mapping[str, Any], compute: Callable[[], Any]
) -> Path:
    """Compute `out`, which cells share, unless it is finished."""
    if not cache.is_done(name, out, inputs):
        cache.run(name, out, inputs, lambda _: compute())
    return out


def cell_path(out: Path, seed: int | None, name: str) -> Path:
    """Return the file of a cell."""
    folder = out if seed is None else out / f"seed-{seed}"
    return folder / f"{name}.json"


def read_cell(out: Path, seed: int | None, name: str) -> dict[str, Any]:
    """Read the result of a finished cell."""
    text = cell_path(out, seed, name).read_text(encoding="utf-8")
    result: dict[str, Any] = json.loads(text)
    return result


@contextmanager
def resume_hints() -> Iterator[None]:
    """Replace options that benchmarks do not have in the advice of an error."""
    try:
        yield
    except MobatlasError as error:
        message = str(error)
        for pattern, advice in HINTS.items():
            message = re.sub(pattern, advice, message)
        error.args = (message,)
        raise
