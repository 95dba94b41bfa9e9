"""Samples of a function that the user provides, which is imported only if the user trusts it.

    def sample(anchors, seeds):
        return [["HOME", random.Random(seed).choice(PLACES), "HOME"] for seed in seeds]

Anchors are rows of home lat, lon, work lat, lon; NaN where unknown. For each row and its seed the
function returns the poi_id of the visited places, in order. If a trajectory depends only on its row
and its seed, the number of samples does not change it.
"""

import importlib
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from mobatlas.data.arrays import Floats, Ints
from mobatlas.data.trajectories import Trajectories
from mobatlas.data.vocabulary import FIRST_POI, HOME, OTHER, Vocabulary
from mobatlas.errors import MobatlasError, suggestion
from mobatlas.generators.external.pool import truncate
from mobatlas.generators.rng import uniforms
from mobatlas.progress import log

TRUST = "MOBATLAS_TRUST_CODE"
STREAM = 32  # of random numbers
SEEDS = 2**32
TRIED = 16  # samples that training draws
NAMED = 3  # places that a warning names
# entry points that the user named: on the command line, in a configuration, from Python
_trusted: set[str] = set()

Function = Callable[[Floats, Sequence[int]], Any]


def trust(entry_point: str) -> None:
    """Allow the import of code that the user named."""
    _trusted.add(entry_point)


@dataclass(frozen=True)
class Code:
    """The samples of an entry point, `package.module:function`."""

    entry_point: str
    vocabulary: Vocabulary
    longest: int
    tile: int  # rows per call; calls start at multiples of it
    folder: Path | None = None  # of the model that names it
    _unknown: list[str] = field(default_factory=list, repr=False, compare=False)  # warned of

    def draw(self, anchors: Floats, seed: int, first: int, lengths: Ints | None) -> Trajectories:
        """Draw one sample for each row of anchors."""
        if lengths is not None:
            raise MobatlasError(
                f"--lengths empirical: '{self.entry_point}' chooses the lengths of its "
                "trajectories; leave it out"
            )
        seeds = (uniforms(seed, first, first + len(anchors), STREAM)[:, 0] * SEEDS).astype(np.int64)
        tiles = (first + np.arange(len(anchors))) // self.tile
        ends = [0, *(np.flatnonzero(np.diff(tiles)) + 1).tolist(), len(anchors)]
        parts = [self._call(anchors[a:b], seeds[a:b].tolist()) for a, b in pairwise(ends) if b > a]
        none = Trajectories(np.zeros(0, np.int32), np.zeros(1, np.int64), np.zeros((0, 4)))
        return Trajectories.joined([none, *parts])

    def try_out(self, anchors: Floats, seed: int) -> dict[str, Any]:
        """Report on a few samples; warn if they depend on more than their rows and seeds."""
        anchors = anchors[:TRIED]
        half = len(anchors) // 2
        samples = self.draw(anchors, seed, 0, None)
        if not (samples.tokens >= FIRST_POI).any():
            raise MobatlasError(
                f"{self.entry_point}: none of {len(samples)} trajectories visits a place of the "
                "dataset; return poi_id of its vocabulary.parquet"
            )
        repeated = self.draw(anchors[half:], seed, half, None)
        if not np.array_equal(samples.tokens[samples.offsets[half] :], repeated.tokens):
            log.warning(
                "%s: a trajectory depends on more than its row and its seed, so the same seed may "
                "give different files",
                self.entry_point,
            )
        return {
            "tried": len(samples),
            "tokens": len(samples.tokens),
            "other": int((samples.tokens == OTHER).sum()),
        }

    def _call(self, anchors: Floats, seeds: list[int]) -> Trajectories:
        """Call the function, and return its places as tokens."""
        function = self._function  # outside the try: its messages are complete
        try:
            names = [self._check_names(row) for row in function(anchors.copy(), seeds)]
        except MobatlasError:
            raise
        except (Exception, SystemExit) as error:
            raise MobatlasError(
                f"{self.entry_point}: the function failed ({_describe(error)})"
            ) from error
        if len(names) != len(seeds):
            raise MobatlasError(
                f"{self.entry_point}: the function returned {len(names)} trajectories for "
                f"{len(seeds)} rows of anchors; return one for each"
            )
        flat = [name for row in names for name in row]
        owner = np.repeat(np.arange(len(names)), [len(row) for row in names])
        tokens = np.array([self._tokens.get(name, -1) for name in flat], dtype=np.int32)
        self._warn_of_unknown(flat, tokens.tolist())
        tokens[tokens < 0] = OTHER
        # consecutive visits to OTHER are one, as in `prepare`
        repeats = (tokens[1:] == OTHER) & (tokens[:-1] == OTHER) & (owner[1:] == owner[:-1])
        distinct = np.concatenate(([True], ~repeats))
        offsets = np.searchsorted(owner[distinct], np.arange(len(names) + 1))
        samples = Trajectories(tokens[distinct], offsets, anchors)
        return truncate(samples, np.minimum(np.diff(offsets), self.longest))

    def _check_names(self, row: Any) -> list[str]:
        names = [] if isinstance(row, str) else list(row)
        if isinstance(row, str) or not all(isinstance(name, str) for name in names):
            raise MobatlasError(
                f"{self.entry_point}: the function returned {str(row)[:40]!r} for a trajectory; "
                "return a list of poi_id"
            )
        if not names:
            raise MobatlasError(
                f"{self.entry_point}: the function returned an empty trajectory; return at least "
                "one place"
            )
        return names

    def _warn_of_unknown(self, names: Sequence[str], tokens: Sequence[int]) -> None:
        """Warn of places that the dataset does not have, once."""
        pairs = zip(names, tokens, strict=True)
        unknown = list(dict.fromkeys(name for name, token in pairs if token < 0))
        if unknown and not self._unknown:
            self._unknown.extend(unknown)
            named = ", ".join(f"'{name}'" for name in unknown[:NAMED])
            more = ", ..." if len(unknown) > NAMED else ""
            log.warning(
                "%s: places that the dataset does not have count as OTHER (%s%s)",
                self.entry_point,
                named,
                more,
            )

    @cached_property
    def _tokens(self) -> dict[str, int]:
        """The first token of each place that a trajectory may contain."""
        tokens = reversed(range(HOME, len(self.vocabulary)))
        return {self.vocabulary.poi_ids[token]: token for token in tokens}

    @cached_property
    def _function(self) -> Function:
        """The function, imported when it is first needed and if the user trusts it."""
        if self.entry_point not in _trusted and os.environ.get(TRUST, "0") in ("", "0"):
            raise MobatlasError(
                f"{self.folder or 'this model'}: its samples come from the code "
                f"'{self.entry_point}', which is imported only if you trust it; pass --trust-code, "
                f"or set {TRUST}=1"
            )
        module_name, _, name = self.entry_point.partition(":")
        folder = str(Path.cwd())  # `python -m` searches it, but an installed command does not
        if folder not in sys.path:
            sys.path.append(folder)  # last, so that installed packages come first
        try:
            module: Any = importlib.import_module(module_name)
        except (Exception, SystemExit) as error:
            raise MobatlasError(
                f"entry_point {self.entry_point}: '{module_name}' cannot be imported "
                f"({_describe(error)}); pass a package.module:function that Python can import here"
            ) from error
        function = getattr(module, name, None)
        if not callable(function):
            functions = [each for each in vars(module) if callable(getattr(module, each))]
            raise MobatlasError(
                f"entry_point {self.entry_point}: '{module_name}' has no function '{name}'"
                f"{suggestion(name, functions)}"
            )
        return function


def _describe(error: BaseException) -> str:
    """Return the error, and the line of the user's code that raised it."""
    lines = str(error).strip().splitlines()
    frames = [
        f"{Path(frame.filename).name} line {frame.lineno}"
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename not in (__file__, importlib.__file__)
        and not frame.filename.startswith("<")
    ]
    message = type(error).__name__ + "".join(f": {line}" for line in lines[:1])
    return ", ".join([message, *frames[-1:]])
