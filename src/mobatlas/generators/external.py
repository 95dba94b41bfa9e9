"""The external generator: a pool of samples of another program, or a function that returns samples.

It has no network to train. The strategies `resample` and `tilt` choose among its samples.

A sample of a pool for anchors z is one of the samples whose people live (and work, where known)
nearest to z: the conditional distribution by nearest neighbours. Draws are independent, so a small
pool repeats. A function is imported only if the user trusts it:

    def sample(anchors, seeds):
        return [["HOME", random.Random(seed).choice(PLACES), "HOME"] for seed in seeds]

Anchors are rows of home lat, lon, work lat, lon; NaN where unknown. For each row and its seed the
function returns the poi_id of the visited places, in order. If a trajectory depends only on its row
and its seed, the number of samples does not change it.
"""

import importlib
import os
import re
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn, Self

import numpy as np
from pydantic import Field, field_validator, model_validator
from safetensors.numpy import save
from scipy.spatial import cKDTree

from mobatlas.config import Section
from mobatlas.data.dataset import Trajectories, TrajectoryDataset
from mobatlas.data.samples import read_samples
from mobatlas.data.types import EARTH_KM, FIRST_POI, HOME, OTHER, Floats, Ints, Vocabulary
from mobatlas.errors import MobatlasError, log, suggestion
from mobatlas.generators.protocol import UNKNOWN, Family, draw_rows, uniforms
from mobatlas.groups import Groups
from mobatlas.io.manifest import file_hash, write_atomic
from mobatlas.training.checkpoints import WEIGHTS, read_weights
from mobatlas.training.loop import Trainer

POOL_STREAM = 31  # of random numbers
PER_TRAJECTORY = ("offsets", "anchors")  # every other array has a row for each token
TRUST = "MOBATLAS_TRUST_CODE"
CODE_STREAM = 32  # of random numbers
SEEDS = 2**32
TRIED = 16  # samples that training draws
NAMED = 3  # places that a warning names
HOME_DECIMALS = 2  # about a kilometre: a MODEL folder holds no home
# entry points that the user named: on the command line, in a configuration, from Python
_trusted: set[str] = set()

Function = Callable[[Floats, Sequence[int]], Any]
TILE = 64  # rows that code is called with at a time; samples do not depend on it


@dataclass(frozen=True)
class NeighbourIndex:
    """Rows of a pool by home (2 columns of anchors), or by home and work (4 columns)."""

    rows: Ints  # (rows,) of the pool, those of one place together
    starts: Ints  # (places,) of each place among the rows
    tree: cKDTree  # of the places, in km
    cosine: float  # of the middle latitude

    @classmethod
    def build(cls, rows: Ints, anchors: Floats) -> Self:
        """Index rows by anchors (rows, 2 or 4), all known."""
        places, place = np.unique(anchors, axis=0, return_inverse=True)
        cosine = float(np.cos(np.radians(places[:, 0].mean())))
        starts = np.searchsorted(np.sort(place), np.arange(len(places)))
        order = np.argsort(place, kind="stable")
        return cls(rows[order], starts, cKDTree(_to_km(places, cosine)), cosine)

    def pick(self, anchors: Floats, uniform: Floats, neighbours: int) -> Ints:
        """Pick one of the nearest rows for each of the anchors.

        There are at least `neighbours` of them; all rows of a place are equally near.
        """
        counts = np.diff(self.starts, append=len(self.rows))  # (places,)
        k = min(neighbours, len(counts))
        _, nearest = self.tree.query(_to_km(anchors, self.cosine), k=range(1, k + 1))
        nearest = np.asarray(nearest)  # (n, k) places
        each = np.arange(len(nearest))
        until = np.cumsum(counts[nearest], axis=1)  # (n, k) rows so far
        enough = np.minimum((until < neighbours).sum(1), k - 1)  # (n,)
        chosen = (uniform * until[each, enough]).astype(np.int64)  # (n,) among those rows
        place = (until <= chosen[:, None]).sum(1)
        before = np.where(place > 0, until[each, place - 1], 0)
        return self.rows[self.starts[nearest[each, place]] + chosen - before]


@dataclass(frozen=True)
class Pool:
    """Samples, and counts that describe them."""

    samples: Trajectories
    neighbours: int
    facts: Mapping[str, Any] = field(default_factory=dict)
    _indices: dict[int, dict[int, NeighbourIndex]] = field(
        default_factory=dict, repr=False, compare=False
    )

    @classmethod
    def read(cls, path: Path, vocabulary: Vocabulary, neighbours: int, longest: int | None) -> Self:
        """Read a Parquet file as `generate` writes it; unknown places become OTHER."""
        read = read_samples(path, vocabulary)
        for warning in read.warnings:
            log.warning("%s", warning)
        samples = replace(
            read.trajectories, anchors=np.round(read.trajectories.anchors, HOME_DECIMALS)
        )
        lengths = np.diff(samples.offsets)
        if not (samples.tokens >= FIRST_POI).any():
            raise MobatlasError(
                f"{path}: none of its visits is to a place of the dataset; its poi_id must be "
                "those of the dataset's vocabulary.parquet"
            )
        limit = int(lengths.max()) if longest is None else longest
        known = ~np.isnan(samples.anchors)
        facts = {
            "trajectories": len(samples),
            "tokens": len(samples.tokens),
            "with_home": int(known[:, :2].all(1).sum()),
            "with_home_and_work": int(known.all(1).sum()),
            "unknown_places": read.unknown_places,
            "unknown_visits": read.unknown_visits,
            "truncated": int((lengths > limit).sum()),
        }
        return cls(samples.cut(limit), neighbours, facts)

    @cached_property
    def lengths(self) -> Ints:
        """The number of tokens of each sample."""
        return np.diff(self.samples.offsets)

    def draw(self, anchors: Floats, seed: int, first: int, lengths: Ints | None) -> Trajectories:
        """Draw one sample for each row of anchors.

        With `lengths` (n,) samples have these lengths. Where the pool has none of a length, the
        next longer samples are truncated.
        """
        uniform = uniforms(seed, first, first + len(anchors), POOL_STREAM)[:, 0]
        if lengths is None:
            return replace(self.samples.take(self._pick(0, anchors, uniform)), anchors=anchors)
        rows = np.zeros(len(anchors), dtype=np.int64)
        for length in np.unique(lengths):
            here = lengths == length
            rows[here] = self._pick(self._at_least(int(length)), anchors[here], uniform[here])
        return replace(self.samples.take(rows), anchors=anchors).cut(lengths)

    def _at_least(self, length: int) -> int:
        """Return the smallest length of samples that is at least `length`."""
        longer = self.lengths[self.lengths >= length]
        if not len(longer) or length < 1:
            raise MobatlasError(
                f"lengths: {length} is outside 1 to {self.lengths.max()}, the lengths in the pool; "
                "leave it out"
            )
        return int(longer.min())

    def _pick(self, length: int, anchors: Floats, uniform: Floats) -> Ints:
        """Pick rows of a length (0: any) by anchors, or any rows where anchors are unknown."""
        rows = np.flatnonzero(self.lengths == length) if length else np.arange(len(self.samples))
        picked: Ints = rows[draw_rows(uniform, len(rows))]
        for columns, index in self._neighbour_indices(length, rows).items():
            known = ~np.isnan(anchors[:, :columns]).any(1)
            if known.any():
                picked[known] = index.pick(
                    anchors[known, :columns], uniform[known], self.neighbours
                )
        return picked

    def _neighbour_indices(self, length: int, rows: Ints) -> dict[int, NeighbourIndex]:
        """Return the indices by home and by home and work, if samples have them."""
        if length not in self._indices:
            anchors = self.samples.anchors
            known = {n: rows[~np.isnan(anchors[rows, :n]).any(1)] for n in (2, 4)}
            self._indices[length] = {
                n: NeighbourIndex.build(some, anchors[some, :n])
                for n, some in known.items()
                if len(some)
            }
        return self._indices[length]

    def save(self, folder: Path) -> None:
        """Write the samples, so that the folder does not need the pool's file."""
        arrays = {name: np.ascontiguousarray(array) for name, array in _arrays(self.samples)}
        write_atomic(folder / WEIGHTS, save(arrays))

    @classmethod
    def load(cls, folder: Path, vocabulary: Vocabulary, neighbours: int, longest: int) -> Self:
        """Read what `save` wrote."""
        path = folder / WEIGHTS
        arrays: Any = {name: array.numpy() for name, array in read_weights(path).items()}
        try:
            samples = Trajectories(**arrays)
            if not _is_valid(samples, len(vocabulary), longest):
                raise ValueError
        except (TypeError, ValueError, IndexError):
            raise MobatlasError(
                f"{path}: its samples do not fit config.json; train the model again"
            ) from None
        return cls(samples, neighbours)


def _arrays(samples: Trajectories) -> list[tuple[str, Any]]:
    """Return the names and arrays of samples that are not None."""
    arrays = [(each.name, getattr(samples, each.name)) for each in fields(Trajectories)]
    return [(name, array) for name, array in arrays if array is not None]


def _is_valid(samples: Trajectories, vocabulary: int, longest: int) -> bool:
    """Whether arrays are samples with tokens of a vocabulary, none longer than `longest`."""
    tokens = samples.tokens
    offsets = samples.offsets
    anchors = samples.anchors
    lengths = np.diff(offsets)
    return bool(
        [array.dtype for array in (tokens, offsets, anchors)] == [np.int32, np.int64, np.float64]
        and len(samples) > 0
        and offsets[0] == 0
        and 1 <= lengths.min() <= lengths.max() <= longest
        and anchors.shape == (len(samples), 4)
        and all(
            len(array) == offsets[-1]
            for name, array in _arrays(samples)
            if name not in PER_TRAJECTORY
        )
        and HOME <= tokens.min() <= tokens.max() < vocabulary
    )


def _to_km(degrees: Floats, cosine: float) -> Floats:
    """Return latitudes and longitudes in turn (n, 2 or 4) as kilometres on a plane."""
    return np.radians(degrees) * EARTH_KM * np.where(np.arange(degrees.shape[1]) % 2, cosine, 1.0)


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
        seeds = (SEEDS * uniforms(seed, first, first + len(anchors), CODE_STREAM)[:, 0]).astype(
            np.int64
        )
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
        return Trajectories(tokens[distinct], offsets, anchors).cut(self.longest)

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


class ExternalConfig(Section):
    """The source of samples."""

    pool: str | None = None  # a Parquet file as `mobatlas generate` writes it
    sha256: str | None = None  # of that file, filled in
    entry_point: str | None = None  # package.module:function, see `Code`
    neighbours: int = Field(32, ge=1)  # a sample is drawn from at least this many of a pool
    # longer samples are truncated; None: the longest of pool or dataset
    length: int | None = Field(None, ge=1, le=100_000)

    @field_validator("entry_point")
    @classmethod
    def _is_function_name(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*", value):
            raise ValueError("write it as package.module:function")
        return value

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.pool is None) == (self.entry_point is None):
            problem = "pass only one" if self.pool is not None else "pass one of them"
            raise ValueError(
                "the generator external needs a source of samples, --set pool=FILE.parquet or "
                f"--set entry_point=package.module:function; {problem}"
            )
        return self


def _refuse_training(*_: Any, **__: Any) -> NoReturn:
    raise MobatlasError(
        "an external generator cannot be trained; choose among its samples with "
        "--strategy resample or --strategy tilt"
    )


class External:
    """Samples of a pool or of code. `Generator` documents its methods."""

    groups: Groups | None = None
    tile = TILE
    network = property(_refuse_training)
    with_groups = _refuse_training
    weighted_fit_stage = _refuse_training
    soft_sample = _refuse_training

    def __init__(self, config: ExternalConfig, vocabulary: Vocabulary, source: Pool | Code) -> None:
        self.config = config
        self.vocabulary = vocabulary
        self.source = source

    @property
    def max_length(self) -> int:
        assert self.config.length is not None
        return self.config.length

    @property
    def has_times(self) -> bool:
        return isinstance(self.source, Pool) and self.source.samples.arrivals is not None

    def fit(self, dataset: TrajectoryDataset, trainer: Trainer) -> dict[str, Any]:
        """Report what the pool contains, or try the code. Nothing is fitted."""
        if isinstance(self.source, Pool):
            return {"pool": dict(self.source.facts)}
        anchors = dataset.anchors[dataset.split_people("train")]
        return {"entry_point": self.source.try_out(anchors, trainer.seed)}

    def sample(
        self,
        n: int,
        groups: Ints | None = None,
        anchors: Floats | None = None,
        seed: int = 0,
        *,
        first: int = 0,
        lengths: Ints | None = None,
    ) -> Trajectories:
        """Draw samples; their anchors are the requested ones, not those of the pool."""
        if groups is not None and (groups != UNKNOWN).any():
            raise MobatlasError(
                "this model is not conditioned on groups; supervise it first (mobatlas supervise)"
            )
        anchors = np.full((n, 4), np.nan) if anchors is None else anchors
        return self.source.draw(anchors, seed, first, lengths)

    def to(self, device: str) -> None:
        """Do nothing: there is no network."""

    def save(self, folder: Path) -> None:
        """Write the samples of a pool. For code, the configuration has the entry point."""
        if isinstance(self.source, Pool):
            self.source.save(folder)


def _resolve(values: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Find and hash the pool that a user names, and trust the code that a user names."""
    pool = values.get("pool")
    entry_point = values.get("entry_point")
    if isinstance(entry_point, str):
        trust(entry_point)
    if not isinstance(pool, str | Path):
        return dict(values)
    path = folder / pool
    if not path.is_file():
        problem = "this is a folder; pass one Parquet file" if path.is_dir() else "no such file"
        raise MobatlasError(f"{path}: {problem} (option pool)")
    return dict(values) | {"pool": str(path), "sha256": file_hash(path)}


def _create(config: ExternalConfig, dataset: TrajectoryDataset, seed: int) -> Any:
    if config.pool is not None:
        pool = Pool.read(Path(config.pool), dataset.vocabulary, config.neighbours, config.length)
        complete = config.model_copy(update={"length": int(pool.lengths.max())})
        return External(complete, dataset.vocabulary, pool)
    length = config.length or int(dataset.lengths[dataset.split("train")].max())
    complete = config.model_copy(update={"length": length})
    code = Code(str(config.entry_point), dataset.vocabulary, length, TILE)
    return External(complete, dataset.vocabulary, code)


def _load(
    folder: Path, config: ExternalConfig, vocabulary: Vocabulary, groups: Groups | None
) -> Any:
    if groups is not None or config.length is None:
        raise MobatlasError(
            f"{folder}: its samples do not fit config.json; an external generator has a length and "
            "no groups; train the model again"
        )
    if config.pool is not None:
        pool = Pool.load(folder, vocabulary, config.neighbours, config.length)
        return External(config, vocabulary, pool)
    code = Code(str(config.entry_point), vocabulary, config.length, TILE, folder)
    return External(config, vocabulary, code)


FAMILY = Family(
    "external",
    ExternalConfig,
    {"small": {}, "paper": {}},
    _create,
    _load,
    trainable=False,
    resolve=_resolve,
)
