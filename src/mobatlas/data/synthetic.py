"""Samples as a table, a row a visit: as `generate` writes it, and as it is read back."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mobatlas.data.dataset import DAY
from mobatlas.data.prepare.engine import parquet_schema
from mobatlas.data.schema import ANCHORS
from mobatlas.data.trajectories import Trajectories, monday
from mobatlas.data.vocabulary import HOME, WORK, Vocabulary
from mobatlas.errors import MobatlasError
from mobatlas.io.manifest import read_parquet
from mobatlas.io.tables import require_columns

TEXT, NUMBER = pa.string(), pa.float64()
SCHEMA = pa.schema(  # HOME and WORK are at the anchors, OTHER is nowhere; what is unknown is null
    [
        ("trajectory", pa.int64()),
        ("position", pa.int32()),
        ("poi_id", TEXT),
        ("lat", NUMBER),
        ("lon", NUMBER),
    ]
    + [("category", TEXT), ("group", TEXT), ("region", TEXT)]
    + [(name, NUMBER) for name in ANCHORS]
)
# Of generators that tell when, naive local times as in tables of visits. Days of the week mean something, dates do not: all
# windows begin in one week.
TIME, TIMES = pa.timestamp("us"), ("arrival", "departure")
TIMED = pa.schema([*SCHEMA, *((name, TIME) for name in TIMES)])
MONDAY = int(np.datetime64("2024-01-01", "s").astype(np.int64))
MICROSECONDS = 1_000_000  # of a second
READ = ("trajectory", "position", "poi_id", "group", "region", *ANCHORS)
Names = npt.NDArray[np.object_]


def rows_of(
    made: Trajectories, first: int, groups: pa.Array, region: str | None, vocabulary: Vocabulary
) -> pa.RecordBatch:
    """Visits of trajectories that are numbered from `first` on."""
    owner, tokens = made.owner, made.tokens
    anchors = made.anchors[owner]  # (tokens, 4)
    places = np.where((tokens == HOME)[:, None], anchors[:, :2], vocabulary.coordinates[tokens])
    places = np.where((tokens == WORK)[:, None], anchors[:, 2:], places)  # (tokens, 2)
    degrees = [
        pa.array(column, from_pandas=True) for column in (*places.T, *anchors.T)
    ]  # NaN becomes null
    poi_id, category = (
        vocabulary.table[name].combine_chunks().take(pa.array(tokens))
        for name in ("poi_id", "category")
    )
    regions = (
        pa.nulls(len(tokens), TEXT) if region is None else pa.repeat(pa.scalar(region), len(tokens))
    )
    position = (np.arange(len(tokens)) - made.offsets[owner]).astype(np.int32)
    where = [*degrees[:2], category, groups.take(pa.array(owner)), regions, *degrees[2:]]
    columns = [pa.array(first + owner), pa.array(position), poi_id, *where]
    if made.arrivals is None or made.stays is None:
        return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)
    times = (
        pa.array((MONDAY + seconds) * MICROSECONDS).view(TIME)
        for seconds in (made.arrivals, made.arrivals + made.stays)
    )
    return pa.RecordBatch.from_arrays([*columns, *times], schema=TIMED)


def read_synthetic(path: Path | str, vocabulary: Vocabulary) -> tuple[Trajectories, Names, Names]:
    """Trajectories of a file that `generate` wrote, with the group and the region of each, None where unknown."""
    file = Path(path)
    if not file.is_file():
        raise MobatlasError(f"{file}: no such file")
    require_columns(str(file), parquet_schema(file).names, READ)
    columns = [*READ, *(name for name in TIMES if name in parquet_schema(file).names)]
    try:
        table = read_parquet(file, columns=columns).cast(
            pa.schema([TIMED.field(name) for name in columns])
        )
    except (OSError, pa.ArrowException) as error:
        reason = str(error).splitlines()[0]
        raise MobatlasError(
            f"{file}: is cut short, or a column is not as mobatlas writes it ({reason})"
        ) from None
    for name in READ[:3]:
        if table[name].null_count or not table.num_rows:
            raise MobatlasError(
                f"{file}: column '{name}' is empty{' in some rows' if table.num_rows else ''}"
            )
    number, position = (table[name].to_numpy() for name in READ[:2])
    order = np.lexsort((position, number))
    same = np.diff(number[order]) == 0  # (rows - 1,)
    again = np.flatnonzero(same & (np.diff(position[order]) == 0))
    if len(again):
        twice = int(again[0])
        raise MobatlasError(
            f"{file}: trajectory {number[order][twice]} has position {position[order][twice]} twice; number trajectories "
            "anew when you put files together"
        )
    starts = np.concatenate(([0], np.flatnonzero(~same) + 1))  # (trajectories,)
    firsts = table.take(pa.array(order[starts]))
    anchors = np.stack(
        [firsts[name].to_numpy(zero_copy_only=False).astype(np.float64) for name in ANCHORS], axis=1
    )
    tokens = _tokens(file, table["poi_id"], vocabulary)[order]
    groups, regions = (
        np.array(firsts[name].to_pylist(), dtype=object) for name in ("group", "region")
    )
    return (
        Trajectories(tokens, np.append(starts, len(order)), anchors, *_times(table, order, starts)),
        groups,
        regions,
    )


def _times(
    table: pa.Table, order: npt.NDArray[np.int64], starts: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64] | None, npt.NDArray[np.int64] | None]:
    """Arrivals and stays as `Trajectories` have them, None where the table does not tell them all."""
    if any(name not in table.column_names or table[name].null_count for name in TIMES):
        return None, None
    arrivals, departures = (
        table[name].cast(pa.int64()).to_numpy()[order] // MICROSECONDS for name in TIMES
    )
    mondays = DAY * monday(arrivals[starts] // DAY)  # (trajectories,)
    return arrivals - np.repeat(
        mondays, np.diff(np.append(starts, len(order)))
    ), departures - arrivals


def _tokens(file: Path, poi_ids: pa.ChunkedArray, vocabulary: Vocabulary) -> npt.NDArray[np.int32]:
    coded = poi_ids.combine_chunks().dictionary_encode()
    token_of = {
        name: token
        for token, name in reversed(list(enumerate(vocabulary.poi_ids)))
        if token >= HOME
    }
    for name in coded.dictionary.to_pylist():
        if name not in token_of:
            raise MobatlasError(
                f"{file}: poi_id '{name}' is no place of the vocabulary; was it made for another dataset?"
            )
    tokens = np.array(
        [token_of[name] for name in coded.dictionary.to_pylist()], dtype=np.int32
    )  # (distinct,)
    return tokens[coded.indices.to_numpy()]
