"""A pool of samples of another program, and draws from it.

A sample for anchors z is one of the samples whose people live (and work, where known) nearest to z:
the conditional distribution by nearest neighbours. Draws are independent, so a small pool repeats.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save
from scipy.spatial import cKDTree

from mobatlas.data.arrays import Floats, Ints
from mobatlas.data.geodesy import EARTH_KM
from mobatlas.data.samples import read_samples
from mobatlas.data.trajectories import Trajectories
from mobatlas.data.vocabulary import FIRST_POI, HOME, Vocabulary
from mobatlas.errors import MobatlasError
from mobatlas.generators.rng import draw_rows, uniforms
from mobatlas.io.manifest import write_atomic
from mobatlas.progress import log
from mobatlas.training.checkpoints import WEIGHTS

STREAM = 31  # of random numbers
PER_TRAJECTORY = ("offsets", "anchors")  # every other array has a row for each token


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
        samples = read.trajectories
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
        return cls(truncate(samples, np.minimum(lengths, limit)), neighbours, facts)

    @cached_property
    def lengths(self) -> Ints:
        """The number of tokens of each sample."""
        return np.diff(self.samples.offsets)

    def draw(self, anchors: Floats, seed: int, first: int, lengths: Ints | None) -> Trajectories:
        """Draw one sample for each row of anchors.

        With `lengths` (n,) samples have these lengths. Where the pool has none of a length, the
        next longer samples are truncated.
        """
        uniform = uniforms(seed, first, first + len(anchors), STREAM)[:, 0]
        if lengths is None:
            return replace(self.samples.take(self._pick(0, anchors, uniform)), anchors=anchors)
        rows = np.zeros(len(anchors), dtype=np.int64)
        for length in np.unique(lengths):
            here = lengths == length
            rows[here] = self._pick(self._at_least(int(length)), anchors[here], uniform[here])
        return truncate(replace(self.samples.take(rows), anchors=anchors), lengths)

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
        try:
            arrays = load_file(path)
        except (OSError, SafetensorError, ValueError):
            raise MobatlasError(
                f"{path}: this is not a readable safetensors file (cut short, or not written by "
                "mobatlas); train the model again"
            ) from None
        try:
            samples = Trajectories(**arrays)
            if not _is_valid(samples, len(vocabulary), longest):
                raise ValueError
        except (TypeError, ValueError, IndexError):
            raise MobatlasError(
                f"{path}: its samples do not fit config.json; train the model again"
            ) from None
        return cls(samples, neighbours)


def truncate(samples: Trajectories, lengths: Ints) -> Trajectories:
    """Return the first tokens of samples, `lengths` (samples,) of each, at most all of them."""
    owner = samples.owner
    inside = np.arange(len(samples.tokens)) - samples.offsets[owner] < lengths[owner]
    tokens: Any = {
        name: array[inside] for name, array in _arrays(samples) if name not in PER_TRAJECTORY
    }
    return replace(samples, **tokens, offsets=np.concatenate(([0], np.cumsum(lengths))))


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
    scale = np.where(np.arange(degrees.shape[1]) % 2, cosine, 1.0)
    return np.radians(degrees) * EARTH_KM * scale
