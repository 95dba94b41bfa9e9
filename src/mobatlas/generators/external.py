"""The external generator: a pool of samples that another program wrote.

It has no network to train. The strategies `resample` and `tilt` choose among its samples.

A sample for anchors z is one of the samples whose people live (and work, where known) nearest to z:
the conditional distribution by nearest neighbours. Draws are independent, so a small pool repeats.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn, Self

import numpy as np
from pydantic import Field, model_validator
from safetensors.numpy import save
from scipy.spatial import cKDTree

from mobatlas.config import Section
from mobatlas.data.dataset import Trajectories, TrajectoryDataset
from mobatlas.data.samples import read_samples
from mobatlas.data.types import EARTH_KM, FIRST_POI, HOME, Floats, Ints, Vocabulary
from mobatlas.errors import MobatlasError, log
from mobatlas.generators.protocol import UNKNOWN, Family, draw_rows, uniforms
from mobatlas.groups import Groups
from mobatlas.io.manifest import file_hash, write_atomic
from mobatlas.training.checkpoints import WEIGHTS, read_weights
from mobatlas.training.loop import Trainer

POOL_STREAM = 31  # of random numbers
PER_TRAJECTORY = ("offsets", "anchors")  # every other array has a row for each token
HOME_DECIMALS = 2  # about a kilometre: a MODEL folder holds no home
TILE = 64  # rows that calibrations draw at a time; samples do not depend on it


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

    def draw(self, anchors: Floats, uniform: Floats) -> Trajectories:
        """Draw one sample for each row of anchors (n, 4) and number in [0, 1) (n,)."""
        rows: Ints = draw_rows(uniform, len(self.samples))  # any, where anchors are unknown
        for columns, index in self._indices.items():
            known = ~np.isnan(anchors[:, :columns]).any(1)
            if known.any():
                rows[known] = index.pick(anchors[known, :columns], uniform[known], self.neighbours)
        return replace(self.samples.take(rows), anchors=anchors)

    @cached_property
    def _indices(self) -> dict[int, NeighbourIndex]:
        """The indices by home, and by home and work, as far as samples have them."""
        anchors = self.samples.anchors
        known = {n: np.flatnonzero(~np.isnan(anchors[:, :n]).any(1)) for n in (2, 4)}
        return {
            n: NeighbourIndex.build(rows, anchors[rows, :n])
            for n, rows in known.items()
            if len(rows)
        }

    @classmethod
    def load(cls, folder: Path, vocabulary: Vocabulary, neighbours: int, longest: int) -> Self:
        """Read what `External.save` wrote."""
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


class ExternalConfig(Section):
    """The source of samples."""

    pool: str | None = None  # a Parquet file as `mobatlas generate` writes it
    sha256: str | None = None  # of that file, filled in
    neighbours: int = Field(32, ge=1)  # a sample is drawn from at least this many of a pool
    # longer samples are truncated; None: the longest of the pool
    length: int | None = Field(None, ge=1, le=100_000)

    @model_validator(mode="after")
    def _has_pool(self) -> Self:
        if self.pool is None:
            raise ValueError(
                "the generator external needs a pool of samples; pass --set pool=FILE.parquet"
            )
        return self


def _refuse_training(*_: Any, **__: Any) -> NoReturn:
    raise MobatlasError(
        "an external generator cannot be trained; choose among its samples with "
        "--strategy resample or --strategy tilt"
    )


class External:
    """Samples of a pool. `Generator` documents its methods."""

    groups: Groups | None = None
    tile = TILE
    network = property(_refuse_training)
    with_groups = _refuse_training
    weighted_fit_stage = _refuse_training
    soft_sample = _refuse_training

    def __init__(self, config: ExternalConfig, vocabulary: Vocabulary, pool: Pool) -> None:
        self.config = config
        self.vocabulary = vocabulary
        self.pool = pool

    @property
    def max_length(self) -> int:
        assert self.config.length is not None
        return self.config.length

    @property
    def has_times(self) -> bool:
        return self.pool.samples.arrivals is not None

    def fit(self, dataset: TrajectoryDataset, trainer: Trainer) -> dict[str, Any]:
        """Report what the pool contains. Nothing is fitted."""
        return {"pool": dict(self.pool.facts)}

    def sample(
        self,
        n: int,
        groups: Ints | None = None,
        anchors: Floats | None = None,
        seed: int = 0,
        *,
        first: int = 0,
    ) -> Trajectories:
        """Draw samples; their anchors are the requested ones, not those of the pool."""
        if groups is not None and (groups != UNKNOWN).any():
            raise MobatlasError(
                "this model is not conditioned on groups; supervise it first (mobatlas supervise)"
            )
        anchors = np.full((n, 4), np.nan) if anchors is None else anchors
        return self.pool.draw(anchors, uniforms(seed, first, first + n, POOL_STREAM)[:, 0])

    def to(self, device: str) -> None:
        """Do nothing: there is no network."""

    def save(self, folder: Path) -> None:
        """Write the samples, so that the folder does not need the pool's file."""
        arrays = {name: np.ascontiguousarray(array) for name, array in _arrays(self.pool.samples)}
        write_atomic(folder / WEIGHTS, save(arrays))


def _resolve(values: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Find and hash the pool that a user names."""
    pool = values.get("pool")
    if not isinstance(pool, str | Path):
        return dict(values)
    path = folder / pool
    if not path.is_file():
        problem = "this is a folder; pass one Parquet file" if path.is_dir() else "no such file"
        raise MobatlasError(f"{path}: {problem} (option pool)")
    return dict(values) | {"pool": str(path), "sha256": file_hash(path)}


def _create(config: ExternalConfig, dataset: TrajectoryDataset, seed: int) -> Any:
    pool = Pool.read(Path(str(config.pool)), dataset.vocabulary, config.neighbours, config.length)
    longest = int(np.diff(pool.samples.offsets).max())
    return External(config.model_copy(update={"length": longest}), dataset.vocabulary, pool)


def _load(
    folder: Path, config: ExternalConfig, vocabulary: Vocabulary, groups: Groups | None
) -> Any:
    if groups is not None or config.length is None:
        raise MobatlasError(
            f"{folder}: its samples do not fit config.json; an external generator has a length and "
            "no groups; train the model again"
        )
    pool = Pool.load(folder, vocabulary, config.neighbours, config.length)
    return External(config, vocabulary, pool)


FAMILY = Family(
    "external",
    ExternalConfig,
    {"small": {}, "paper": {}},
    _create,
    _load,
    trainable=False,
    resolve=_resolve,
)
