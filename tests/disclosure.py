"""Finds people of a dataset in files: coordinates of their homes and workplaces, and their ids."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from mobatlas import TrajectoryDataset

NUMBER = re.compile(rb"-?\d+\.\d{3,}")
WORD = re.compile(rb"[\w.\-]+")


def found(path: Path, dataset: TrajectoryDataset) -> list[str]:
    """The people whose home, workplace or id is in a file or in the files of a folder."""
    files = [path] if path.is_file() else [each for each in path.rglob("*") if each.is_file()]
    users = dataset.people["user_id"].to_pylist()
    known = dataset.vocabulary.coordinates
    places = {tuple(pair) for pair in known[~np.isnan(known).any(1)].tolist()}
    people: list[str] = []
    for file in files:
        numbers, words = _content(file)
        for user, row in zip(users, dataset.anchors.tolist(), strict=True):
            anchors = [pair for pair in (row[:2], row[2:]) if tuple(pair) not in places]
            rounded = [np.float32(pair).tolist() for pair in anchors]
            if user in words or any(set(pair) <= numbers for pair in (*anchors, *rounded)):
                people.append(f"{file.name}: {user}")
    return people


def _content(file: Path) -> tuple[set[float], set[str]]:
    """All numbers of a file, as text, of 64 and of 32 bits, and all words."""
    content = file.read_bytes()
    numbers = [np.array([float(word) for word in NUMBER.findall(content)])]
    words = {word.decode() for word in WORD.findall(content)}
    if content[:4] == b"PAR1":
        columns = [_flat(column) for column in pq.read_table(file).columns]
        numbers += [each for each in columns if each.dtype.kind == "f"]
        words |= {str(value) for each in columns if each.dtype.kind == "O" for value in set(each)}
    else:
        numbers += [
            np.frombuffer(content[: len(content) // 8 * 8], kind) for kind in ("<f8", "<f4")
        ]
    with np.errstate(invalid="ignore"):
        return {x for each in numbers for x in each[np.abs(each) < 1_000].tolist()}, words


def _flat(column: pa.ChunkedArray) -> Any:
    while pa.types.is_list(column.type) or pa.types.is_fixed_size_list(column.type):
        parts = [chunk.flatten() for chunk in column.chunks]
        column = pa.chunked_array(parts, column.type.value_type)
    return column.to_numpy()
