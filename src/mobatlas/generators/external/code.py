"""A function of the user's own that makes samples: found, called and checked here, and imported only where the user wants it.

    def sample(anchors, seeds):
        return [["HOME", random.Random(seed).choice(PLACES), "HOME"] for seed in seeds]

gives for each row of anchors (home lat, lon, work lat, lon, NaN where unknown) and its seed the names of the places visited, in
order. A trajectory that depends on its row and its seed alone is the same whatever else is asked for.
"""

from __future__ import annotations

import importlib
import logging
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
from mobatlas.generators.rng import uniforms

log = logging.getLogger("mobatlas")
TRUST = "MOBATLAS_TRUST_CODE"
STREAM = 32  # of random numbers
SEEDS = 2**32
TRIED = 16  # samples that training asks for
NAMED = 3  # places of a warning
_asked_for: set[str] = (
    set()
)  # by the user of this process: on the command line, in a configuration, from Python

Function = Callable[[Floats, Sequence[int]], Any]


def ask_for(entry_point: str) -> None:
    """The user named this code, so it may be imported."""
    _asked_for.add(entry_point)


@dataclass(frozen=True)
class Code:
    """The samples of an entry point, `package.module:function`."""

    entry_point: str
    vocabulary: Vocabulary
    longest: int
    tile: int  # rows it is given at a time, those of one number // tile
    folder: Path | None = None  # of the model that names it, if the user does not
    _said: list[str] = field(default_factory=list, repr=False, compare=False)

    def draw(self, anchors: Floats, seed: int, first: int, lengths: Ints | None) -> Trajectories:
        """One sample for each row."""
        if lengths is not None:
            raise MobatlasError(
                f"--lengths empirical: '{self.entry_point}' itself decides how long its trajectories are; leave it out"
            )
        numbers = first + np.arange(len(anchors))
        seeds = (uniforms(seed, first, first + len(anchors), STREAM)[:, 0] * SEEDS).astype(np.int64)
        ends = [0, *(np.flatnonzero(np.diff(numbers // self.tile)) + 1).tolist(), len(anchors)]
        parts = [self._made(anchors[a:b], seeds[a:b].tolist()) for a, b in pairwise(ends) if b > a]
        none = Trajectories(np.zeros(0, np.int32), np.zeros(1, np.int64), np.zeros((0, 4)))
        return Trajectories.joined([none, *parts])

    def tried(self, anchors: Floats, seed: int) -> dict[str, Any]:
        """What a few samples are like; warns of code that does not keep to the seed."""
        anchors = anchors[:TRIED]
        made, half = self.draw(anchors, seed, 0, None), len(anchors) // 2
        if not (made.tokens >= FIRST_POI).any():
            raise MobatlasError(
                f"{self.entry_point}: none of {len(made)} trajectories is to a place that the dataset knows; names must be "
                "poi_id of its vocabulary.parquet"
            )
        again = self.draw(anchors[half:], seed, half, None)
        if not np.array_equal(made.tokens[made.offsets[half] :], again.tokens):
            log.warning(
                "%s: a trajectory depends on more than its row and its seed, so the same seed may give other files",
                self.entry_point,
            )
        return {
            "tried": len(made),
            "tokens": len(made.tokens),
            "other": int((made.tokens == OTHER).sum()),
        }

    def _made(self, anchors: Floats, seeds: list[int]) -> Trajectories:
        """What the function gives for these, as tokens."""
        function = self._function  # outside: what it says is said already
        try:
            names = [self._names(row) for row in function(anchors.copy(), seeds)]
        except MobatlasError:
            raise
        except (Exception, SystemExit) as error:
            raise MobatlasError(f"{self.entry_point}: failed ({_place(error)}); mend it") from error
        if len(names) != len(seeds):
            raise MobatlasError(
                f"{self.entry_point}: returned {len(names)} trajectories for {len(seeds)} rows of anchors; return one for each"
            )
        flat = [name for row in names for name in row]
        owner = np.repeat(np.arange(len(names)), [len(row) for row in names])
        tokens = np.array([self._tokens.get(name, -1) for name in flat], dtype=np.int32)
        self._say_unknown(flat, tokens.tolist())
        tokens[tokens < 0] = OTHER
        again = (
            (tokens[1:] == OTHER) & (tokens[:-1] == OTHER) & (owner[1:] == owner[:-1])
        )  # as `prepare` has it
        kept = np.concatenate(([True], ~again))
        tokens, owner = tokens[kept], owner[kept]
        place = np.arange(len(owner)) - np.searchsorted(owner, owner)
        tokens, owner = tokens[place < self.longest], owner[place < self.longest]
        return Trajectories(tokens, np.searchsorted(owner, np.arange(len(names) + 1)), anchors)

    def _names(self, row: Any) -> list[str]:
        """A trajectory, if it is one."""
        names = [] if isinstance(row, str) else list(row)
        if isinstance(row, str) or not all(isinstance(name, str) for name in names):
            raise MobatlasError(
                f"{self.entry_point}: returned {str(row)[:40]!r} for a trajectory; return a list of names of places"
            )
        if not names:
            raise MobatlasError(
                f"{self.entry_point}: returned an empty trajectory; give each at least one place"
            )
        return names

    def _say_unknown(self, names: Sequence[str], tokens: Sequence[int]) -> None:
        """Once."""
        unknown = list(
            dict.fromkeys(name for name, token in zip(names, tokens, strict=True) if token < 0)
        )
        if unknown and not self._said:
            self._said.extend(unknown)
            named = ", ".join(f"'{name}'" for name in unknown[:NAMED])
            more = ", ..." if len(unknown) > NAMED else ""
            log.warning(
                "%s: places that the dataset does not know count as OTHER (%s%s)",
                self.entry_point,
                named,
                more,
            )

    @cached_property
    def _tokens(self) -> dict[str, int]:
        return {
            name: token
            for token, name in reversed(list(enumerate(self.vocabulary.poi_ids)))
            if token >= HOME
        }

    @cached_property
    def _function(self) -> Function:
        """Imported when it is first needed, if the user wants it."""
        if self.entry_point not in _asked_for and os.environ.get(TRUST, "0") in ("", "0"):
            raise MobatlasError(
                f"{self.folder or 'this model'}: its samples come from the code '{self.entry_point}', which is imported only "
                f"if you trust it; pass --trust-code, or set {TRUST}=1"
            )
        module, _, name = self.entry_point.partition(":")
        here = str(Path.cwd())  # where commands, unlike `python -m`, do not look by themselves
        if here not in sys.path:
            sys.path.append(here)  # what is installed comes first
        try:
            found: Any = importlib.import_module(module)
        except (Exception, SystemExit) as error:
            raise MobatlasError(
                f"entry_point {self.entry_point}: '{module}' cannot be imported ({_place(error)}); give "
                "package.module:function that Python finds from here"
            ) from error
        function = getattr(found, name, None)
        if not callable(function):
            near = suggestion(
                name, [each for each in vars(found) if callable(getattr(found, each))]
            )
            raise MobatlasError(
                f"entry_point {self.entry_point}: '{module}' has no function '{name}'{near}"
            )
        return function


def _place(error: BaseException) -> str:
    """What happened, and in which line of the user's."""
    said = str(error).strip().splitlines()
    frames = [
        f"{Path(each.filename).name} line {each.lineno}"
        for each in traceback.extract_tb(error.__traceback__)
        if each.filename not in (__file__, importlib.__file__) and not each.filename.startswith("<")
    ]
    return ", ".join(
        [type(error).__name__ + "".join(f": {line}" for line in said[:1]), *frames[-1:]]
    )
