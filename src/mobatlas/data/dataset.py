"""TrajectoryDataset: a prepared folder, memory-mapped; batches are a function of (seed, step)."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mobatlas.config import SplitConfig, WindowConfig, build
from mobatlas.data.prepare.sequences import SEQUENCES, SPLITS, WIDE
from mobatlas.data.prepare.steps import split_thresholds
from mobatlas.data.schema import ANCHORS
from mobatlas.data.vocabulary import PAD, Vocabulary
from mobatlas.data.vocabulary import SCHEMA as VOCABULARY
from mobatlas.errors import MobatlasError
from mobatlas.groups import Groups
from mobatlas.io.manifest import (
    HASHED_ON_LOAD,
    Manifest,
    read_manifest,
    read_parquet,
    refuse_corrupt,
)

KIND = "dataset"
DAY = 86_400  # seconds
LABELS = "labels.parquet"
Int = TypeVar("Int", np.int32, np.int64)


@dataclass(frozen=True)
class Batch:
    """Some trajectories, padded to the longest of them."""

    indices: npt.NDArray[np.int64]  # (batch,) trajectories of the dataset
    tokens: npt.NDArray[np.int32]  # (batch, length), PAD after the end
    lengths: npt.NDArray[np.int64]  # (batch,)
    anchors: npt.NDArray[np.float64]  # (batch, 4) home lat, lon, work lat, lon; NaN where unknown


@dataclass(frozen=True)
class TrajectoryDataset:
    """Trajectories without labels; `labels()` is a separate door, for `strong`, controlled partitions and evaluation."""

    path: Path
    manifest: Manifest
    vocabulary: Vocabulary
    people: pa.Table  # user_id, anchors, region columns
    person: npt.NDArray[np.int32]  # (trajectories,) row of people
    window: npt.NDArray[np.int32]  # (trajectories,)
    _tokens: tuple[npt.NDArray[np.int32], ...]  # one per record batch, memory-mapped
    _starts: npt.NDArray[np.int64]  # (trajectories,) first token within its record batch
    _lengths: npt.NDArray[np.int64]  # (trajectories,)
    _bounds: npt.NDArray[np.int64]  # (record batches + 1,) first trajectory of each
    _split_of_person: npt.NDArray[np.int64]  # (people,)

    @classmethod
    def open(cls, path: Path | str) -> TrajectoryDataset:
        """Map a folder that `prepare` wrote; refuses one whose splits share a person."""
        folder = Path(path)
        manifest = read_manifest(folder, KIND)
        with refuse_corrupt(folder):
            opened = cls._map(folder, manifest)
            opened._check()
        return opened

    @classmethod
    def _map(cls, folder: Path, manifest: Manifest) -> TrajectoryDataset:
        people = read_parquet(folder / "people.parquet", memory_map=True)
        split_of_person = _checked_splits(folder, manifest, people)
        batches = _map_sequences(folder / SEQUENCES)
        offsets = [batch["tokens"].offsets.to_numpy() for batch in batches]
        return cls(
            path=folder,
            manifest=manifest,
            vocabulary=Vocabulary(read_parquet(folder / "vocabulary.parquet")),
            people=people,
            person=np.concatenate([batch["person"].to_numpy() for batch in batches]),
            window=np.concatenate([batch["window"].to_numpy() for batch in batches]),
            _tokens=tuple(batch["tokens"].values.to_numpy() for batch in batches),
            _starts=np.concatenate([offset[:-1] for offset in offsets]).astype(np.int64),
            _lengths=np.concatenate([np.diff(offset) for offset in offsets]).astype(np.int64),
            _bounds=np.cumsum([0, *(batch.num_rows for batch in batches)]),
            _split_of_person=split_of_person,
        )

    def _check(self) -> None:
        """Numbers that point somewhere point into the folder; the tokens of large files are not read for it."""
        people, words = self.people.num_rows, len(self.vocabulary)
        small = sum(part.nbytes for part in self._tokens) <= HASHED_ON_LOAD
        if (
            not len(self)
            or not _within(self.person, people)
            or not all(_within(part, words) for part in self._tokens if small)
            or self._lengths.min() < 1
            or self.anchors.shape != (people, len(ANCHORS))
            or self.vocabulary.table.schema != VOCABULARY
            or not set(self.region_columns) <= set(self.people.column_names)
            or not self.windows
            or (self.groups is not None and not len(self.groups))
        ):
            raise ValueError(f"{self.path}: its files do not fit each other")

    def __len__(self) -> int:
        return len(self.person)

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of each trajectory."""
        return self._lengths

    @cached_property
    def groups(self) -> Groups | None:
        """The groups that the labels span, None where there are none."""
        attributes = self.manifest.details.get("attributes")
        return Groups.of(attributes) if attributes else None

    @property
    def region_columns(self) -> tuple[str, ...]:
        return tuple(self.manifest.details.get("regions", ()))

    def split(self, name: str) -> npt.NDArray[np.int64]:
        """The trajectories of `train`, `val` or `test` people."""
        return np.flatnonzero(self._split_of_person[self.person] == _split_code(name))

    def split_people(self, name: str) -> npt.NDArray[np.int64]:
        """The rows of people in that split."""
        return np.flatnonzero(self._split_of_person == _split_code(name))

    def trajectory(self, index: int) -> npt.NDArray[np.int32]:
        """The tokens of one trajectory, a view of the file."""
        index = range(len(self))[index]
        part = int(np.searchsorted(self._bounds, index, side="right")) - 1
        start = self._starts[index]
        return self._tokens[part][start : start + self._lengths[index]]

    def all_tokens(self) -> npt.NDArray[np.int32]:
        """The tokens of all trajectories, end to end."""
        return np.concatenate(self._tokens)

    def gather(
        self, indices: Sequence[int] | npt.NDArray[np.int64], max_length: int | None = None
    ) -> Batch:
        """Trajectories by number, padded; those past `max_length` are truncated."""
        chosen = np.asarray(indices, dtype=np.int64)
        if len(chosen) and not (chosen.min() >= 0 and chosen.max() < len(self)):
            raise IndexError(f"trajectories are numbered 0 to {len(self) - 1}")
        lengths = (
            self._lengths[chosen]
            if max_length is None
            else np.minimum(self._lengths[chosen], max_length)
        )
        tokens = self._padded(self._tokens, chosen, max_length)
        return Batch(chosen, tokens, lengths, self.anchors[self.person[chosen]])

    def _padded(
        self,
        parts: Sequence[npt.NDArray[Int]],
        chosen: npt.NDArray[np.int64],
        max_length: int | None,
    ) -> npt.NDArray[Int]:
        """Values of some trajectories (batch, length), from one array per record batch; PAD after the end."""
        lengths = (
            self._lengths[chosen]
            if max_length is None
            else np.minimum(self._lengths[chosen], max_length)
        )
        columns = np.arange(int(lengths.max(initial=0)))
        valid = columns < lengths[:, None]  # (batch, length)
        position = self._starts[chosen, None] + columns  # (batch, length) within the record batch
        values = np.full(valid.shape, PAD, dtype=parts[0].dtype)
        part = np.searchsorted(self._bounds, chosen, side="right") - 1
        for number in np.unique(part):
            here = valid & (part == number)[:, None]
            values[here] = parts[number][position[here]]
        return values

    def batch(
        self, split: str, size: int, seed: int, step: int, max_length: int | None = None
    ) -> Batch:
        """The batch of that step: every trajectory once an epoch, in an order that only the seed and the epoch decide."""
        return self.gather(self.order(split, size, seed, step), max_length)

    def order(self, split: str, size: int, seed: int, step: int) -> npt.NDArray[np.int64]:
        """Which trajectories the batch of that step holds."""
        members = self.split(split)
        if not len(members):
            raise MobatlasError(f"{self.path}: no trajectory in split '{split}'")
        places = step * size + np.arange(size)
        epochs = places // len(members)
        chosen = np.empty(size, dtype=np.int64)
        for epoch in np.unique(epochs):
            order = _permutation(len(members), seed, int(epoch))
            here = epochs == epoch
            chosen[here] = members[order[places[here] % len(members)]]
        return chosen

    def order_by_length(
        self, split: str, size: int, seed: int, step: int, among: int = 8
    ) -> npt.NDArray[np.int64]:
        """As `order`, but `among` batches in a row are dealt anew by length, for less padding."""
        block, place = divmod(step, among)
        chosen = self.order(split, size * among, seed, block)
        chosen = chosen[np.argsort(self._lengths[chosen], kind="stable")]
        which = np.random.default_rng([seed, block, among]).permutation(among)[place]
        return chosen[which * size : (which + 1) * size]

    @cached_property
    def anchors(self) -> npt.NDArray[np.float64]:
        """Home lat, lon, work lat, lon of each person; NaN where unknown."""
        columns = [
            self.people[name].to_numpy(zero_copy_only=False).astype(np.float64) for name in ANCHORS
        ]
        return np.stack(columns, axis=1)  # (people, 4)

    def times(self) -> tuple[pa.ChunkedArray, pa.ChunkedArray]:
        """Arrivals and departures of every trajectory, in step with its tokens."""
        table = pa.Table.from_batches(_map_sequences(self.path / SEQUENCES))
        return table["arrivals"], table["departures"]

    @cached_property
    def windows(self) -> WindowConfig:
        """Which days a trajectory is of."""
        return WindowConfig.model_validate(self.manifest.config["prepare"]["window"])

    @property
    def window_days(self) -> int:
        return self.windows.days

    @cached_property
    def first_days(self) -> npt.NDArray[np.int64]:
        """The day on which the window of each trajectory begins, counted from 1970-01-01.

        Where windows are counted from a person's first observed day, which is not kept, it is the latest that can be.
        """
        origin = self.windows.origin
        since = self.window.astype(np.int64) * self.windows.stride  # (trajectories,)
        if origin != "user":
            return np.asarray(np.datetime64(origin, "D").astype(np.int64) + since)
        part = np.searchsorted(self._bounds, np.arange(len(self)), side="right") - 1
        arrival = np.zeros(len(self), dtype=np.int64)
        for number, (arrivals, _) in enumerate(self._times):
            arrival[part == number] = arrivals[self._starts[part == number]]
        earliest = np.full(self.people.num_rows, np.iinfo(np.int64).max)
        np.minimum.at(earliest, self.person, arrival // DAY - since)
        return np.asarray(earliest[self.person] + since)

    def all_times(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Arrivals and departures in seconds of the local clock since 1970-01-01, end to end like `all_tokens`."""
        arrivals, departures = (np.concatenate(parts) for parts in zip(*self._times, strict=True))
        return arrivals, departures

    def gather_times(
        self, indices: npt.NDArray[np.int64], max_length: int | None = None
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Arrivals and departures (batch, length) in step with the tokens that `gather` gives; 0 after the end."""
        arrivals, departures = (
            self._padded(parts, indices, max_length) for parts in zip(*self._times, strict=True)
        )
        return arrivals, departures

    @cached_property
    def _times(self) -> tuple[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]], ...]:
        """Arrivals and departures, one pair per record batch, memory-mapped."""
        return tuple(
            (
                batch["arrivals"].values.view(pa.int64()).to_numpy(),
                batch["departures"].values.view(pa.int64()).to_numpy(),
            )
            for batch in _map_sequences(self.path / SEQUENCES)
        )

    def labels(self) -> pa.Table | None:
        """Attributes of people, row for row, null for people without any; None where the source knew none."""
        path = self.path / LABELS
        if not path.exists():
            return None
        with refuse_corrupt(path):
            table = read_parquet(path)
            row = {user: number for number, user in enumerate(table["user_id"].to_pylist())}
            users = self.people["user_id"].to_pylist()
            aligned = table.take(pa.array([row.get(user) for user in users], pa.int64()))
            told = aligned.set_column(
                aligned.schema.get_field_index("user_id"), "user_id", pa.array(users, pa.string())
            )
            names = self.groups.attribute_names if self.groups is not None else ()
            if not all(
                _is_text(told[name].type) for name in names
            ):  # others write the same text as other types
                raise ValueError
            return told

    def person_groups(self) -> npt.NDArray[np.int64]:
        """The group of each person from the labels, -1 where it is unknown."""
        labels = self.labels()
        if labels is None or self.groups is None:
            raise MobatlasError(f"{self.path}: this dataset has no labels")
        return self.groups.codes(
            {name: labels[name].to_pylist() for name in self.groups.attribute_names}
        )


@lru_cache(maxsize=4)
def _permutation(n: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    return np.random.default_rng([seed, epoch]).permutation(n)


def split_by_hash(user_ids: Sequence[str], config: SplitConfig) -> npt.NDArray[np.int64]:
    """The split of each user id: 0 train, 1 val, 2 test."""
    val, test = split_thresholds(config)
    digests = np.array(
        [
            hashlib.md5(f"{config.salt}:{user}".encode(), usedforsecurity=False).hexdigest()[:8]
            for user in user_ids
        ],
        dtype="U8",
    )
    return (digests >= val).astype(np.int64) + (digests >= test).astype(np.int64)


def _within(numbers: npt.NDArray[np.int32], end: int) -> bool:
    return bool(numbers.min(initial=0) >= 0 and numbers.max(initial=0) < end)


def _split_code(name: str) -> int:
    if name not in SPLITS:
        raise MobatlasError(f"--split {name} does not exist (known: {', '.join(SPLITS)})")
    return SPLITS.index(name)


def _checked_splits(folder: Path, manifest: Manifest, people: pa.Table) -> npt.NDArray[np.int64]:
    splits = read_parquet(folder / "splits.parquet")
    users = splits["user_id"].to_pylist()
    codes = {name: code for code, name in enumerate(SPLITS)}
    stored = np.array([codes.get(name, -1) for name in splits["split"].to_pylist()], dtype=np.int64)
    config = build(
        SplitConfig, manifest.config.get("prepare", {}).get("split", {}), f"{folder}: manifest"
    )
    if len(set(users)) != len(users) or users != people["user_id"].to_pylist():
        raise MobatlasError(
            f"{folder / 'splits.parquet'}: a person is in two splits or in none; prepare the dataset again"
        )
    if not np.array_equal(stored, split_by_hash(users, config)):
        raise MobatlasError(
            f"{folder / 'splits.parquet'}: is not the split of these user ids; prepare the dataset again"
        )
    return stored


def _is_text(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
    )


def _map_sequences(path: Path) -> list[pa.RecordBatch]:
    reader = pa.ipc.open_file(pa.memory_map(str(path)))
    batches = [reader.get_batch(number) for number in range(reader.num_record_batches)]
    for batch in batches:
        batch.validate(
            full=batch.nbytes <= HASHED_ON_LOAD
        )  # offsets into memory that nobody else looks at
        if not batch.schema.equals(WIDE) or any(
            column.null_count or column.offset for column in batch.columns
        ):
            raise ValueError(f"{path}: is not a table of sequences")
    return batches
