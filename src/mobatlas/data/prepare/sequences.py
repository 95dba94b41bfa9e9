"""Trajectories on disk: the long table as Parquet, and one row a trajectory as an Arrow file that can be memory-mapped."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from mobatlas.data.prepare.summary import SplitCounts
from mobatlas.io.manifest import ROWS_PER_GROUP, rechunk

TRAJECTORIES = "trajectories.parquet"
SEQUENCES = "sequences.arrow"
SPLITS = ("train", "val", "test")

# What the engine hands over, in order: people by number, times in seconds of the local clock, cut at midnights.
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
# Times are distinct and ascending: their differences take half the space, and no dictionary is tried in vain.
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


def write_sequences(
    folder: Path, batches: Iterable[pa.RecordBatch], people: pa.Table
) -> dict[str, SplitCounts]:
    """Write both forms from pieces in order of user, window and time; `people` holds user, user_id and split, by user."""
    numbers = people["user"].to_numpy()
    ids = people["user_id"].combine_chunks()
    split_of = np.array(
        [SPLITS.index(split) for split in people["split"].to_pylist()], dtype=np.int64
    )  # (people,)
    counts = {
        name: SplitCounts(users=int(np.count_nonzero(split_of == code)))
        for code, name in enumerate(SPLITS)
    }
    ordered = (
        pa.RecordBatch.from_arrays([b[n] for n in PIECES.names], PIECES.names).cast(PIECES)
        for b in batches
    )
    with (
        pq.ParquetWriter(folder / TRAJECTORIES, LONG, **ENCODING) as long_file,
        pa.OSFile(str(folder / SEQUENCES), "wb") as sink,
        pa.ipc.new_file(sink, WIDE) as wide_file,
    ):
        for pieces in whole_trajectories(rechunk(ordered, PIECES, ROWS_PER_GROUP)):
            rows = collapse(pieces)
            person = np.searchsorted(numbers, rows["user"].to_numpy())
            long_file.write_table(_long(rows, ids, person), row_group_size=2 * ROWS_PER_GROUP)
            wide_file.write_batch(_wide(rows, person))
            _count(rows, split_of[person], counts)
    return counts


def whole_trajectories(tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """The same rows, cut only between trajectories."""
    held: pa.Table | None = None
    for table in tables:
        table = pa.concat_tables([held, table]).combine_chunks() if held is not None else table
        starts = trajectory_starts(table)
        held = table.slice(starts[-1])
        if starts[-1]:
            yield table.slice(0, starts[-1]).combine_chunks()
    if held is not None:
        yield held.combine_chunks()


def collapse(pieces: pa.Table) -> pa.Table:
    """Run-length encoding: consecutive pieces of one token become one, from the first arrival to the latest departure."""
    columns = {name: pieces[name].to_numpy() for name in PIECES.names}
    keys = [columns[name] for name in ("user", "window", "token")]
    changes = np.logical_or.reduce([key[1:] != key[:-1] for key in keys])
    starts = np.concatenate(([0], np.flatnonzero(changes) + 1))
    runs = {name: values[starts] for name, values in columns.items()}
    runs["departure"] = np.maximum.reduceat(columns["departure"], starts)
    return pa.table(runs, schema=PIECES)


def trajectory_starts(rows: pa.Table) -> npt.NDArray[np.int64]:
    """The rows at which trajectories begin."""
    user, window = rows["user"].to_numpy(), rows["window"].to_numpy()
    changes = (user[1:] != user[:-1]) | (window[1:] != window[:-1])
    return np.concatenate(([0], np.flatnonzero(changes) + 1)).astype(np.int64)


def _long(rows: pa.Table, ids: pa.StringArray, person: npt.NDArray[np.int64]) -> pa.Table:
    times = [
        rows[name].cast(pa.timestamp("s")).cast(pa.timestamp("us"))
        for name in ("arrival", "departure")
    ]
    starts = trajectory_starts(rows)
    lengths = np.diff(np.append(starts, rows.num_rows))
    position = pa.array((np.arange(rows.num_rows) - np.repeat(starts, lengths)).astype(np.int32))
    columns = [ids.take(pa.array(person)), rows["window"], position, rows["token"], *times]
    return pa.Table.from_arrays(columns, schema=LONG)


def _wide(rows: pa.Table, person: npt.NDArray[np.int64]) -> pa.RecordBatch:
    starts = trajectory_starts(rows)
    offsets = pa.array(np.append(starts, rows.num_rows).astype(np.int32))

    def gather(name: str, kind: pa.DataType) -> pa.ListArray:
        return pa.ListArray.from_arrays(offsets, rows[name].combine_chunks().cast(kind))

    columns = [
        pa.array(person[starts].astype(np.int32)),
        pa.array(rows["window"].to_numpy()[starts]),
        gather("token", pa.int32()),
        gather("arrival", pa.timestamp("s")),
        gather("departure", pa.timestamp("s")),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=WIDE)


def _count(rows: pa.Table, split: npt.NDArray[np.int64], counts: dict[str, SplitCounts]) -> None:
    starts = trajectory_starts(rows)
    lengths = np.diff(np.append(starts, rows.num_rows))
    tokens = rows["token"].to_numpy()
    for code, name in enumerate(SPLITS):
        counts[name].add(tokens[split == code], lengths[split[starts] == code])
