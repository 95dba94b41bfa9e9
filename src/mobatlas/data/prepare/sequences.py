"""Trajectories on disk: one row per visit as Parquet, one row per trajectory as Arrow."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from mobatlas.data.types import HOME, OTHER, WORK, Ints
from mobatlas.io.manifest import ROWS_PER_GROUP, rechunk

SEQUENCES = "sequences.arrow"
SPLITS = ("train", "val", "test")

# Rows of an engine, in order: people by number, local times in seconds, split at midnights.
PIECES = pa.schema(
    [
        ("user", pa.int64()),
        ("window", pa.int32()),
        ("token", pa.int32()),
        ("arrival", pa.int64()),
        ("departure", pa.int64()),
    ]
)
LONG = pa.schema(
    [
        ("user_id", pa.string()),
        ("window", pa.int32()),
        ("position", pa.int32()),
        ("token", pa.int32()),
        ("arrival", pa.timestamp("us")),
        ("departure", pa.timestamp("us")),
    ]
)
# Times are distinct and ascending: delta encoding halves their size, and a dictionary is useless.
ENCODING: dict[str, Any] = {
    "compression": "zstd",
    "use_dictionary": ["user_id", "window", "position", "token"],
    "column_encoding": {"arrival": "DELTA_BINARY_PACKED", "departure": "DELTA_BINARY_PACKED"},
}
WIDE = pa.schema(
    [
        ("person", pa.int32()),  # row of people.parquet and splits.parquet
        ("window", pa.int32()),
        ("tokens", pa.list_(pa.int32())),
        ("arrivals", pa.list_(pa.timestamp("s"))),
        ("departures", pa.list_(pa.timestamp("s"))),
    ]
)


@dataclass
class SplitCounts:
    """Counts of one split, added up while its trajectories are written."""

    users: int = 0
    trajectories: int = 0
    tokens: int = 0
    poi_tokens: int = 0  # neither HOME nor WORK
    other_tokens: int = 0  # OTHER
    lengths: Ints = field(default_factory=lambda: np.zeros(1, np.int64))  # trajectories by length

    def add(self, tokens: npt.NDArray[np.int32], lengths: Ints) -> None:
        """Count some trajectories by all their tokens and the length of each."""
        self.trajectories += len(lengths)
        self.tokens += len(tokens)
        self.poi_tokens += int(np.count_nonzero((tokens != HOME) & (tokens != WORK)))
        self.other_tokens += int(np.count_nonzero(tokens == OTHER))
        histogram = np.bincount(lengths, minlength=len(self.lengths))
        histogram[: len(self.lengths)] += self.lengths
        self.lengths = histogram

    def as_dict(self) -> dict[str, Any]:
        """Return the counts of the split for summary.json; lengths are None if it is empty."""
        # the smallest length that a share of the trajectories does not exceed
        targets = np.array([0.5, 0.95, 1.0]) * self.trajectories
        quantiles = np.searchsorted(np.cumsum(self.lengths), targets).tolist()
        median, p95, longest = quantiles if self.trajectories else (None, None, None)
        return {
            "users": self.users,
            "trajectories": self.trajectories,
            "tokens": self.tokens,
            # the share of POI visits whose POI has a token of its own
            "vocabulary_coverage": (
                1 - self.other_tokens / self.poi_tokens if self.poi_tokens else None
            ),
            "length_median": median,
            "length_p95": p95,
            "length_max": longest,
        }


def write_sequences(
    folder: Path, batches: Iterable[pa.RecordBatch], people: pa.Table
) -> dict[str, SplitCounts]:
    """Write both files from pieces in order of user, window and time.

    `people` has the columns user, user_id and split, in order of user.
    """
    numbers = people["user"].to_numpy()
    ids = people["user_id"].combine_chunks()
    split_of = np.array([SPLITS.index(split) for split in people["split"].to_pylist()])  # (people,)
    counts = {
        name: SplitCounts(users=int(np.count_nonzero(split_of == code)))
        for code, name in enumerate(SPLITS)
    }
    ordered = (
        pa.RecordBatch.from_arrays([batch[name] for name in PIECES.names], PIECES.names).cast(
            PIECES
        )
        for batch in batches
    )
    with (
        pq.ParquetWriter(folder / "trajectories.parquet", LONG, **ENCODING) as long_file,
        pa.OSFile(str(folder / SEQUENCES), "wb") as sink,
        pa.ipc.new_file(sink, WIDE) as wide_file,
    ):
        for pieces in whole_trajectories(rechunk(ordered, PIECES, ROWS_PER_GROUP)):
            rows = _merge_runs(pieces)
            person = np.searchsorted(numbers, rows["user"].to_numpy())
            starts = _starts(rows, "user", "window")
            lengths = np.diff(np.append(starts, rows.num_rows))
            position = np.arange(rows.num_rows) - np.repeat(starts, lengths)
            long_file.write_table(
                _long(rows, ids.take(pa.array(person)), position),
                row_group_size=2 * ROWS_PER_GROUP,
            )
            wide_file.write_batch(_wide(rows, person, starts))
            split = split_of[person]
            tokens = rows["token"].to_numpy()
            for code, name in enumerate(SPLITS):
                counts[name].add(tokens[split == code], lengths[split[starts] == code])
    return counts


def whole_trajectories(tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """Yield the same rows in tables that end where a trajectory ends."""
    rest: pa.Table | None = None
    for table in tables:
        joined = pa.concat_tables([rest, table]).combine_chunks() if rest is not None else table
        last_start = _starts(joined, "user", "window")[-1]
        rest = joined.slice(last_start)
        if last_start:
            yield joined.slice(0, last_start).combine_chunks()
    if rest is not None:
        yield rest.combine_chunks()


def _merge_runs(pieces: pa.Table) -> pa.Table:
    """Merge consecutive pieces of one token, from the first arrival to the latest departure."""
    starts = _starts(pieces, "user", "window", "token")
    columns = {name: pieces[name].to_numpy() for name in PIECES.names}
    runs = {name: values[starts] for name, values in columns.items()}
    runs["departure"] = np.maximum.reduceat(columns["departure"], starts)
    return pa.table(runs, schema=PIECES)


def _starts(rows: pa.Table, *keys: str) -> Ints:
    """The rows at which one of the key columns changes, row 0 included."""
    changes = np.logical_or.reduce([np.diff(rows[key].to_numpy()) != 0 for key in keys])
    return np.concatenate(([0], np.flatnonzero(changes) + 1)).astype(np.int64)


def _long(rows: pa.Table, user_ids: pa.StringArray, position: Ints) -> pa.Table:
    times = [
        rows[name].cast(pa.timestamp("s")).cast(pa.timestamp("us"))
        for name in ("arrival", "departure")
    ]
    positions = pa.array(position.astype(np.int32))
    return pa.Table.from_arrays(
        [user_ids, rows["window"], positions, rows["token"], *times], schema=LONG
    )


def _wide(rows: pa.Table, person: Ints, starts: Ints) -> pa.RecordBatch:
    offsets = pa.array(np.append(starts, rows.num_rows).astype(np.int32))
    lists = [
        pa.ListArray.from_arrays(
            offsets, rows[name].combine_chunks().cast(WIDE.field(f"{name}s").type.value_type)
        )
        for name in ("token", "arrival", "departure")
    ]
    people = pa.array(person[starts].astype(np.int32))
    windows = pa.array(rows["window"].to_numpy()[starts])
    return pa.RecordBatch.from_arrays([people, windows, *lists], schema=WIDE)
