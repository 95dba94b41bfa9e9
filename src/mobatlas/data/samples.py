"""Samples from a file: what `generate` wrote, or somebody else, in the words of a dataset.

A place outside the vocabulary is OTHER and a run of such places one visit, as `prepare` has it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from mobatlas.data.dataset import DAY
from mobatlas.data.schema import ANCHORS
from mobatlas.data.trajectories import Trajectories
from mobatlas.data.trajectories import monday as monday_of
from mobatlas.data.vocabulary import HOME, OTHER, WORK, Vocabulary
from mobatlas.errors import MobatlasError, out_of_memory
from mobatlas.groups import Groups
from mobatlas.io.tables import require_columns

REQUIRED = ("trajectory", "poi_id")
TIMES = ("arrival", "departure")
MICROSECONDS = 1_000_000  # of a second
NAMED = 3  # places of a warning
DEGREES = (90.0, 180.0, 90.0, 180.0)  # the furthest that an anchor can be
AGAIN = "number trajectories anew when you put files together"
Tokens = npt.NDArray[np.int32]
Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Samples:
    """Trajectories of a file, each of a group or all of everybody."""

    path: Path
    trajectories: Trajectories
    groups: (
        Ints | None
    )  # (trajectories,) -1: of none; None where the file tells none, and each may stand for any group
    unknown_places: int = 0
    unknown_visits: int = 0
    warnings: tuple[str, ...] = ()

    def of_group(self, number: int) -> Trajectories:
        """Those of a group, or everybody's."""
        if self.groups is None:
            return self.trajectories
        return self.trajectories.take(np.flatnonzero(self.groups == number))


def read_samples(path: Path | str, vocabulary: Vocabulary, groups: Groups | None = None) -> Samples:
    """The samples of a Parquet file with columns trajectory and poi_id, one row a visit.

    Visits are ordered by `position`, or as they stand in the file; anchors are unknown where it has none, and so are times
    unless it has `arrival` and `departure`. Without `groups` its column `group` is not looked at.
    """
    file = _File.open(Path(path))
    words = file.coded("trajectory")
    number, places = words.indices.to_numpy(), file.coded("poi_id", pa.string())
    position = file.column("position", pa.int64()).to_numpy() if "position" in file.names else None
    order = (
        np.argsort(number, kind="stable") if position is None else np.lexsort((position, number))
    )
    same = np.diff(number[order]) == 0  # (rows - 1,)
    told = _Rows(file, order, same, words)
    if position is not None:
        told.refuse(np.diff(position[order]) == 0, f"has one position twice; {AGAIN}")
    starts = np.concatenate(([0], np.flatnonzero(~same) + 1))  # (trajectories,)
    of_group = told.groups(groups)[starts] if groups is not None and "group" in file.names else None
    anchors = file.anchors(order[starts])  # (trajectories, 4)
    token_of = _token_of(places.dictionary, vocabulary)  # (distinct,)
    tokens = token_of[places.indices.to_numpy()][order]
    unknown = np.bincount(places.indices.to_numpy(), minlength=len(token_of)) * (
        token_of < 0
    )  # (distinct,)
    arrivals, departures, of_times = told.times()
    tokens, kept = _collapsed(tokens, same)
    offsets = np.concatenate(([0], np.cumsum(kept)))[
        np.append(starts, len(kept))
    ]  # (trajectories + 1,)
    times: dict[str, Ints] = {}
    if arrivals is not None and departures is not None:
        monday = DAY * monday_of(arrivals[starts] // DAY)  # (trajectories,)
        departures = np.maximum.reduceat(departures, np.flatnonzero(kept))
        times["arrivals"] = arrivals[kept] - np.repeat(monday, np.diff(offsets))
        times["stays"] = departures - arrivals[kept]
    warnings = [*_of_places(file.path, places, unknown), *_of_anchors(file, tokens), *of_times]
    if of_group is not None and (of_group < 0).all():
        of_group = None
    if of_group is not None and (of_group < 0).any():
        none = int(np.count_nonzero(of_group < 0))
        warnings.append(
            f"{file.path}: {none:,} of {len(starts):,} trajectories are of no group and are left out"
        )
    return Samples(
        path=file.path,
        trajectories=Trajectories(tokens, offsets, anchors, **times),
        groups=of_group,
        unknown_places=int(np.count_nonzero(unknown)),
        unknown_visits=int(unknown.sum()),
        warnings=tuple(warnings),
    )


@dataclass(frozen=True)
class _File:
    """A Parquet file, a column at a time."""

    path: Path
    parquet: pq.ParquetFile
    names: list[str]

    @classmethod
    def open(cls, path: Path) -> _File:
        if not path.is_file():
            raise MobatlasError(
                f"{path}: {'is a folder; give one Parquet file' if path.is_dir() else 'no such file'}"
            )
        try:
            parquet = pq.ParquetFile(path, memory_map=True)
        except (OSError, pa.ArrowException) as error:
            raise MobatlasError(
                f"{path}: not a readable Parquet file ({_first_line(error)}); give one as `mobatlas generate` writes it"
            ) from None
        names = parquet.schema_arrow.names
        require_columns(str(path), names, REQUIRED)
        if not parquet.metadata.num_rows:
            raise MobatlasError(
                f"{path}: holds no trajectory, it has no rows; generate at least one"
            )
        return cls(path, parquet, names)

    def column(
        self, name: str, kind: pa.DataType | None = None, missing: bool = False
    ) -> pa.ChunkedArray:
        """Cast to a type, if one is given; `missing` allows nulls."""
        try:
            values = self.parquet.read(columns=[name], use_threads=False)[name]
            values = values if kind is None else values.cast(kind)
        except (OSError, pa.ArrowException) as error:
            if out_of_memory(error):
                raise
            raise self._unreadable(name, error) from None
        if values.null_count and not missing:
            raise MobatlasError(
                f"{self.path}: column '{name}' is empty in {values.null_count:,} rows; fill it"
            )
        return values

    def coded(
        self, name: str, kind: pa.DataType | None = None, missing: bool = False
    ) -> pa.DictionaryArray:
        """A column as distinct values, in order of appearance, and the number of each row's."""
        try:
            return self.column(name, kind, missing).dictionary_encode().combine_chunks()
        except pa.ArrowException as error:
            raise self._unreadable(name, error) from None

    def anchors(self, rows: Ints) -> Floats:
        """Of some rows, (rows, 4); NaN where unknown. One column at a time, because only a row a trajectory is needed."""
        found = np.full((len(rows), len(ANCHORS)), np.nan)
        for place, (name, furthest) in enumerate(zip(ANCHORS, DEGREES, strict=True)):
            if name not in self.names:
                continue
            values = (
                self.column(name, pa.float64(), missing=True).to_numpy().astype(np.float64)[rows]
            )
            wrong = np.flatnonzero(np.abs(values) > furthest)
            if len(wrong):
                raise MobatlasError(
                    f"{self.path}: column '{name}' holds {values[wrong[0]]:g}, outside -{furthest:g}..{furthest:g}; "
                    "give degrees"
                )
            found[:, place] = values
        return found

    def _unreadable(self, name: str, error: Exception) -> MobatlasError:
        return MobatlasError(
            f"{self.path}: column '{name}' cannot be read ({_first_line(error)}); write it as `mobatlas generate` does"
        )


@dataclass(frozen=True)
class _Rows:
    """The rows of a file in order of trajectory and position."""

    file: _File
    order: Ints  # (rows,)
    same: Flags  # (rows - 1,) whether a row is of the trajectory of the one before
    words: pa.DictionaryArray  # (rows,) trajectories as the file calls them

    def refuse(self, wrong: Flags, sentence: str) -> None:
        """Name the first trajectory that has two rows in a row of which this is wrong."""
        found = np.flatnonzero(self.same & wrong)
        if len(found):
            name = self.words[int(self.order[found[0]])].as_py()
            raise MobatlasError(f"{self.file.path}: trajectory {name} {sentence}")

    def times(self) -> tuple[Ints | None, Ints | None, list[str]]:
        """Arrivals and departures in seconds, None where the file does not tell them all; what there is to say of it."""
        there = [name for name in TIMES if name in self.file.names]
        columns = [self.file.column(name, pa.timestamp("us"), missing=True) for name in there]
        if all(column.null_count == len(column) for column in columns):
            return None, None, []
        if len(there) < len(TIMES) or any(column.null_count for column in columns):
            said = f"{self.file.path}: not every visit has '{TIMES[0]}' and '{TIMES[1]}', so times are not compared"
            return None, None, [said]
        arrivals, departures = (
            column.cast(pa.int64()).to_numpy()[self.order] // MICROSECONDS for column in columns
        )  # (rows,) each
        self.refuse(
            np.diff(arrivals) < 0, "arrives at a visit before the one before it; order them by time"
        )
        if (departures < arrivals).any():
            row = int(self.order[int(np.argmax(departures < arrivals))])
            raise MobatlasError(
                f"{self.file.path}: trajectory {self.words[row].as_py()} leaves a visit before it arrives; correct its times"
            )
        return arrivals, departures, []

    def groups(self, groups: Groups) -> Ints:
        """The group of each row, -1 where it has none."""
        coded = self.file.coded("group", pa.string(), missing=True)
        try:
            numbers = [groups.index(name) for name in coded.dictionary.to_pylist()]
        except MobatlasError as error:
            raise MobatlasError(f"{self.file.path}: column 'group': {error}") from None
        found = np.array([*numbers, -1])[pc.fill_null(coded.indices, -1).to_numpy()][self.order]
        self.refuse(np.diff(found) != 0, f"is of two groups; {AGAIN}")
        return found


def _token_of(places: pa.Array, vocabulary: Vocabulary) -> Tokens:
    """The token of each place, -1 where it is none; those before HOME are for models alone."""
    known = vocabulary.table["poi_id"].combine_chunks()[HOME:]
    return (pc.fill_null(pc.index_in(places, known), -1 - HOME).to_numpy() + HOME).astype(np.int32)


def _collapsed(tokens: Tokens, same: Flags) -> tuple[Tokens, Flags]:
    """Tokens with OTHER for -1, which is no visit of its own beside another -1 or OTHER, and which rows are left (rows,)."""
    nowhere, unknown = (tokens < 0) | (tokens == OTHER), tokens < 0
    again = same & nowhere[1:] & nowhere[:-1] & (unknown[1:] | unknown[:-1])
    kept = np.concatenate(([True], ~again))  # (rows,)
    return np.where(unknown, np.int32(OTHER), tokens)[kept], kept


def _of_places(path: Path, places: pa.DictionaryArray, unknown: Ints) -> Iterator[str]:
    found = np.flatnonzero(unknown)
    if len(found):
        names = ", ".join(f"'{places.dictionary[int(number)].as_py()}'" for number in found[:NAMED])
        visits, more = int(unknown.sum()), ", ..." if len(found) > NAMED else ""
        yield (
            f"{path}: {visits:,} visits ({visits / len(places):.1%}) are to {len(found):,} places that the dataset does not "
            f"know and count as OTHER ({names}{more})"
        )


def _of_anchors(file: _File, tokens: Tokens) -> Iterator[str]:
    for token, name, columns in ((HOME, "HOME", ANCHORS[:2]), (WORK, "WORK", ANCHORS[2:])):
        missing = [column for column in columns if column not in file.names]
        if missing and (tokens == token).any():
            yield f"{file.path}: has no column '{missing[0]}', so visits to {name} are left out in space"


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
