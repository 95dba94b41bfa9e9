"""A pool of samples that any other program made, and how it is drawn from.

Samples of somebody who lives at z are those of the pool whose people live, and work where that is known, nearest to z: the
conditional distribution by nearest neighbours. Draws are independent, so a small pool repeats itself.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

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
from mobatlas.generators.rng import uniforms
from mobatlas.io.manifest import write_whole
from mobatlas.training.weights import WEIGHTS

log = logging.getLogger("mobatlas")
STREAM = 31  # of random numbers
OF_TRAJECTORIES = ("offsets", "anchors")  # every other array has a row for each token


@dataclass(frozen=True)
class Near:
    """Some rows of a pool, by where their people live (2 columns of anchors) or live and work (4)."""

    rows: Ints  # (rows,) of the pool, those of one place together
    starts: Ints  # (places,) of each place among them
    tree: cKDTree  # of the places, in km
    cosine: float  # of the latitude in the middle

    @classmethod
    def of(cls, rows: Ints, anchors: Floats) -> Near:
        """`anchors` (rows, 2 or 4), all known."""
        places, which = np.unique(anchors, axis=0, return_inverse=True)
        cosine = float(np.cos(np.radians(places[:, 0].mean())))
        starts = np.searchsorted(np.sort(which), np.arange(len(places)))
        return cls(
            rows[np.argsort(which, kind="stable")], starts, cKDTree(_km(places, cosine)), cosine
        )

    def pick(self, anchors: Floats, chance: Floats, neighbours: int) -> Ints:
        """For each of the anchors one of the nearest rows, at least so many; all rows of a place are as near."""
        counts = np.diff(self.starts, append=len(self.rows))  # (places,)
        k = min(neighbours, len(counts))
        near = np.asarray(
            self.tree.query(_km(anchors, self.cosine), k=range(1, k + 1))[1]
        )  # (n, k) places
        each = np.arange(len(near))
        until = np.cumsum(counts[near], axis=1)  # (n, k) rows so far
        enough = np.minimum((until < neighbours).sum(1), k - 1)  # (n,)
        chosen = (chance * until[each, enough]).astype(np.int64)  # (n,) among those rows
        place = (until <= chosen[:, None]).sum(1)
        before = np.where(place > 0, until[each, place - 1], 0)
        return self.rows[self.starts[near[each, place]] + chosen - before]


@dataclass(frozen=True)
class Pool:
    """Samples, and how they were read."""

    samples: Trajectories
    neighbours: int
    facts: Mapping[str, Any] = field(default_factory=dict)  # to report
    _indices: dict[int, dict[int, Near]] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def read(cls, path: Path, vocabulary: Vocabulary, neighbours: int, longest: int | None) -> Pool:
        """Of a Parquet file as `generate` writes it; places outside the vocabulary are OTHER, as `evaluate` has it."""
        read = read_samples(path, vocabulary)
        for warning in read.warnings:
            log.warning("%s", warning)
        samples, lengths = read.trajectories, np.diff(read.trajectories.offsets)
        if not (samples.tokens >= FIRST_POI).any():
            raise MobatlasError(
                f"{path}: none of its visits is to a place that the dataset knows; its poi_id must be those of the dataset's "
                "vocabulary.parquet"
            )
        most = int(lengths.max()) if longest is None else longest
        known = ~np.isnan(samples.anchors)
        facts = {
            "trajectories": len(samples),
            "tokens": len(samples.tokens),
            "with_home": int(known[:, :2].all(1).sum()),
            "with_home_and_work": int(known.all(1).sum()),
            "unknown_places": read.unknown_places,
            "unknown_visits": read.unknown_visits,
            "truncated": int((lengths > most).sum()),
        }
        return cls(cut(samples, np.minimum(lengths, most)), neighbours, facts)

    @cached_property
    def lengths(self) -> Ints:
        """Tokens of each sample."""
        return np.diff(self.samples.offsets)

    def draw(self, anchors: Floats, seed: int, first: int, lengths: Ints | None) -> Trajectories:
        """One sample for each row; where a length is forced, one of that length, or the beginning of one a little longer."""
        chance = uniforms(seed, first, first + len(anchors), STREAM)[:, 0]
        if lengths is None:
            return replace(self.samples.take(self._pick(0, anchors, chance)), anchors=anchors)
        rows = np.zeros(len(anchors), dtype=np.int64)
        for length in np.unique(lengths):
            here = lengths == length
            rows[here] = self._pick(self._least(int(length)), anchors[here], chance[here])
        return cut(replace(self.samples.take(rows), anchors=anchors), lengths)

    def _least(self, length: int) -> int:
        """The least length that samples have from that one on."""
        longer = self.lengths[self.lengths >= length]
        if not len(longer) or length < 1:
            raise MobatlasError(
                f"lengths: {length} is not from 1 to {self.lengths.max()}, which the pool has; leave it out"
            )
        return int(longer.min())

    def _pick(self, length: int, anchors: Floats, chance: Floats) -> Ints:
        """Rows of that length, 0 for any, by anchors; anybody's where they, or those of the pool, are unknown."""
        rows = np.flatnonzero(self.lengths == length) if length else np.arange(len(self.samples))
        found = rows[(chance * len(rows)).astype(np.int64)]
        for columns, near in self._near(length, rows).items():
            asked = ~np.isnan(anchors[:, :columns]).any(1)
            if asked.any():
                found[asked] = near.pick(anchors[asked, :columns], chance[asked], self.neighbours)
        return found

    def _near(self, length: int, rows: Ints) -> dict[int, Near]:
        """By home, then by home and work, as far as the samples know them; made once."""
        if length not in self._indices:
            known = {
                columns: rows[~np.isnan(self.samples.anchors[rows, :columns]).any(1)]
                for columns in (2, 4)
            }
            self._indices[length] = {
                columns: Near.of(some, self.samples.anchors[some, :columns])
                for columns, some in known.items()
                if len(some)
            }
        return self._indices[length]

    def save(self, folder: Path) -> None:
        """The arrays, so that the folder stands alone."""
        found = {each.name: getattr(self.samples, each.name) for each in fields(Trajectories)}
        arrays = {
            name: np.ascontiguousarray(array) for name, array in found.items() if array is not None
        }
        write_whole(folder / WEIGHTS, save(arrays))

    @classmethod
    def load(cls, folder: Path, vocabulary: Vocabulary, neighbours: int, longest: int) -> Pool:
        """What `save` wrote."""
        path = folder / WEIGHTS
        try:
            arrays = load_file(path)
        except (OSError, SafetensorError, ValueError):
            raise MobatlasError(
                f"{path}: is not a readable safetensors file (cut short, or not written by mobatlas); train the model again"
            ) from None
        try:
            samples = Trajectories(**arrays)
            fitting = _fits(samples, arrays, len(vocabulary), longest)
        except (TypeError, ValueError, IndexError):
            fitting = False
        if not fitting:
            raise MobatlasError(
                f"{path}: its samples are not those of config.json; train the model again"
            )
        return cls(samples, neighbours)


def cut(samples: Trajectories, lengths: Ints) -> Trajectories:
    """The beginnings of samples, of so many tokens each; none may be longer than the sample."""
    owner = samples.owner
    kept = np.arange(len(samples.tokens)) - samples.offsets[owner] < lengths[owner]
    arrays = {each.name: getattr(samples, each.name) for each in fields(Trajectories)}
    tokens = {
        name: each[kept]
        for name, each in arrays.items()
        if name not in OF_TRAJECTORIES and each is not None
    }
    return replace(samples, **tokens, offsets=np.concatenate(([0], np.cumsum(lengths))))


def _fits(samples: Trajectories, arrays: Mapping[str, Any], words: int, longest: int) -> bool:
    """Whether arrays are those of samples in that many words, none longer than the longest."""
    tokens, lengths = samples.tokens, np.diff(samples.offsets)
    return bool(
        [each.dtype for each in (tokens, samples.offsets, samples.anchors)]
        == [np.int32, np.int64, np.float64]
        and len(samples) > 0
        and samples.offsets[0] == 0
        and 1 <= lengths.min() <= lengths.max() <= longest
        and samples.anchors.shape == (len(samples), 4)
        and all(
            len(each) == samples.offsets[-1]
            for name, each in arrays.items()
            if name not in OF_TRAJECTORIES
        )
        and HOME <= tokens.min() <= tokens.max() < words
    )


def _km(degrees: Floats, cosine: float) -> Floats:
    """Latitudes and longitudes in turn (n, 2 or 4) as kilometres of a plane."""
    shrunk = np.where(np.arange(degrees.shape[1]) % 2, cosine, 1.0)
    return np.radians(degrees) * EARTH_KM * shrunk
