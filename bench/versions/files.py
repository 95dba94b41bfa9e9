"""Compares the files that two versions wrote: tables, tensors, JSON, and the numbers in text."""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml
from safetensors.numpy import load_file

from bench.versions.renames import RENAMES, Renames, rename_path

TOLERANCE = 1e-9  # relative, for floats
HASH = re.compile(r"[0-9a-f]{64}")
NUMBER = re.compile(r"(?<![\w#.])-?\d+(?:[.,]\d+)*")
ROW = re.compile(r"<tr[^>]*>(.*?)</tr>", re.DOTALL)
CELL = re.compile(r"<t[dh][^>]*>(.*?)</t[dh]>", re.DOTALL)
LONGEST_VALUE = 6  # words; a cell with more of them is a sentence, which may change
MINUS = "\N{MINUS SIGN}"
IMAGE = re.compile(r'data:image/png;base64,[^"]*')
Leaves = dict[tuple[str, ...], Any]


@dataclass
class Comparison:
    """The differences found so far; `inexact` counts floats that agree only roughly."""

    renames: Renames = RENAMES
    tolerance: float = TOLERANCE
    differences: list[str] = field(default_factory=list)
    inexact: int = 0
    files: int = 0

    def add(self, where: str, difference: str) -> None:
        self.differences.append(f"{where}: {difference}")

    def values(self, where: str, old: Any, new: Any) -> None:
        """Compare two plain values."""
        if isinstance(old, str) and isinstance(new, str):
            hashes = HASH.fullmatch(old) and HASH.fullmatch(new)
            if self.renames.values.get(old, old) != new and not hashes:
                self.add(where, f"{old!r} became {new!r}")
        elif _is_number(old) and _is_number(new):
            if old != new and not (math.isnan(old) and math.isnan(new)):
                self.inexact += 1
                if not math.isclose(old, new, rel_tol=self.tolerance):
                    self.add(where, f"{old!r} became {new!r}")
        elif type(old) is not type(new) or old != new:
            self.add(where, f"{old!r} became {new!r}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def compare_outputs(old: Path, new: Path, comparison: Comparison) -> None:
    """Compare a file or a folder with its counterpart."""
    renames = comparison.renames
    if old.is_file() and new.is_file():
        _compare_file(old, new, old.name, comparison)
        return
    expected = {
        "/".join(renames.files.get(part, part) for part in name.parts): name for name in _files(old)
    }
    found = {name.as_posix() for name in _files(new)}
    for name in sorted(expected.keys() - found):
        comparison.add(f"{old.name}/{name}", "is missing")
    for name in sorted(found - expected.keys()):
        comparison.add(f"{old.name}/{name}", "is new")
    for name in sorted(expected.keys() & found):
        _compare_file(old / expected[name], new / name, f"{old.name}/{name}", comparison)


def _files(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name not in RENAMES.ignored_files:
            yield path.relative_to(folder)


def _compare_file(old: Path, new: Path, where: str, comparison: Comparison) -> None:
    comparison.files += 1
    compare = COMPARISONS.get(old.suffix, _compare_bytes)
    try:
        compare(old, new, where, comparison)
    except Exception as error:  # a file that cannot be read is a difference
        comparison.add(where, f"cannot be compared ({type(error).__name__}: {error})")


def _compare_bytes(old: Path, new: Path, where: str, comparison: Comparison) -> None:
    if old.read_bytes() != new.read_bytes():
        comparison.add(where, "bytes differ")


# ---- JSON and YAML


def _compare_json(old: Path, new: Path, where: str, comparison: Comparison) -> None:
    before, after = (json.loads(path.read_text()) for path in (old, new))
    compare_documents(where, before, after, comparison)


def _compare_lines(old: Path, new: Path, where: str, comparison: Comparison) -> None:
    before, after = (list(map(json.loads, path.read_text().splitlines())) for path in (old, new))
    compare_documents(where, before, after, comparison)


def _compare_yaml(old: Path, new: Path, where: str, comparison: Comparison) -> None:
    before, after = (yaml.safe_load(path.read_text()) for path in (old, new))
    compare_documents(where, before, after, comparison)


def compare_documents(where: str, old: Any, new: Any, comparison: Comparison) -> None:
    """Compare two JSON documents value by value, the old one after renaming its keys."""
    renames = comparison.renames
    rules = {**renames.config_keys, **renames.json_keys}
    before = {rename_path(path, rules): value for path, value in _flatten(old, renames).items()}
    after = _flatten(new, renames)
    for path in [*before, *(path for path in after if path not in before)]:
        place = f"{where} {'.'.join(path)}"
        if path not in after:
            comparison.add(place, f"is missing, was {before[path]!r}")
        elif path not in before:
            comparison.add(place, f"is new: {after[path]!r}")
        else:
            comparison.values(place, before[path], after[path])


def _flatten(value: Any, renames: Renames, path: tuple[str, ...] = ()) -> Leaves:
    """The values of a document by their paths, without values that are not compared."""
    if path in renames.ignored_paths or (path and path[-1] in renames.ignored_keys):
        return {}
    if path and path[-1] in renames.prose_keys:
        return {path: len(value) if isinstance(value, list | dict) else type(value).__name__}
    if not isinstance(value, list | dict) or not value:
        return {path: value}
    items = value.items() if isinstance(value, dict) else enumerate(value)
    leaves: Leaves = {}
    for key, item in items:
        leaves |= _flatten(item, renames, (*path, str(key)))
    return leaves


# ---- tables


def _compare_parquet(old: Path, new: Path, where: str, comparison: Comparison) -> None:
    before = pq.read_table(old)
    after = pq.read_table(new)
    _compare_tables(where, before, after, comparison)
    tables = (before, after)
    notes = [note for table in tables if (note := (table.schema.metadata or {}).get(b"mobatlas"))]
    if len(notes) == 2:
        old_facts, new_facts = (_unwrap(json.loads(note)) for note in notes)
        compare_documents(f"{where} metadata", old_facts, new_facts, comparison)
    elif notes:
        comparison.add(f"{where} metadata", "only one version writes it")


def _unwrap(facts: Any) -> Any:
    """Return the facts of a file of one group, which the base version lists in a run."""
    return facts[0] if isinstance(facts, list) and len(facts) == 1 else facts


def _compare_arrow(old: Path, new: Path, where: str, comparison: Comparison) -> None:
    tables = []
    for path in (old, new):
        with pa.memory_map(str(path)) as source:
            tables.append(pa.ipc.open_file(source).read_all())
    _compare_tables(where, tables[0], tables[1], comparison)


def _compare_tables(where: str, old: pa.Table, new: pa.Table, comparison: Comparison) -> None:
    renames = comparison.renames
    old = old.select([name for name in old.column_names if name not in renames.ignored_columns])
    old = old.rename_columns([renames.columns.get(name, name) for name in old.column_names])
    new = new.select([name for name in new.column_names if name not in renames.ignored_columns])
    if old.column_names != new.column_names:
        comparison.add(where, f"columns {old.column_names} became {new.column_names}")
    if old.num_rows != new.num_rows:
        comparison.add(where, f"{old.num_rows} rows became {new.num_rows}")
        return
    for name in old.column_names:
        if name not in new.column_names:
            continue
        if old[name].type != new[name].type:
            comparison.add(f"{where} {name}", f"type {old[name].type} became {new[name].type}")
        if not old[name].equals(new[name]):
            _compare_columns(f"{where} {name}", old[name], new[name], comparison)


def _compare_columns(where: str, old: Any, new: Any, comparison: Comparison) -> None:
    for row, pair in enumerate(zip(old.to_pylist(), new.to_pylist(), strict=True)):
        if any(isinstance(value, list | dict) for value in pair):
            compare_documents(f"{where}[{row}]", *pair, comparison)
        else:
            comparison.values(f"{where}[{row}]", *pair)


def _compare_csv(old: Path, new: Path, where: str, comparison: Comparison) -> None:
    before, after = (list(csv.reader(path.read_text().splitlines())) for path in (old, new))
    before[:1] = [
        [comparison.renames.columns.get(name, name) for name in row] for row in before[:1]
    ]
    old_cells, new_cells = ([list(map(_parse, row)) for row in table] for table in (before, after))
    compare_documents(where, old_cells, new_cells, comparison)


def _parse(cell: str) -> str | float:
    try:
        return float(cell)
    except ValueError:
        return cell


# ---- tensors


def _compare_tensors(old: Path, new: Path, where: str, comparison: Comparison) -> None:
    rules = comparison.renames.tensors
    before = {
        ".".join(rename_path(tuple(name.split(".")), rules)): tensor
        for name, tensor in load_file(old).items()
    }
    after = load_file(new)
    for name in sorted(before.keys() ^ after.keys()):
        comparison.add(f"{where} {name}", "is missing" if name in before else "is new")
    for name in sorted(before.keys() & after.keys()):
        a, b = before[name], after[name]
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            comparison.add(f"{where} {name}", f"{a.dtype}{a.shape} became {b.dtype}{b.shape}")
        elif a.tobytes() != b.tobytes():
            apart = np.abs(a.astype(np.float64) - b.astype(np.float64)).max()
            comparison.add(f"{where} {name}", f"values differ by up to {apart:.3g}")


# ---- text: its words may change, its numbers may not


def _compare_numbers(old: Path, new: Path, where: str, comparison: Comparison) -> None:
    before, after = (NUMBER.findall(path.read_text()) for path in (old, new))
    compare_documents(f"{where} numbers", before, after, comparison)


def _compare_pages(old: Path, new: Path, where: str, comparison: Comparison) -> None:
    """Compare embedded images, and the numbers of table rows; the new tables have more columns."""
    pages = [path.read_text().replace(MINUS, "-") for path in (old, new)]
    if IMAGE.findall(pages[0]) != IMAGE.findall(pages[1]):
        comparison.add(where, "embedded images differ")
    before, after = ([row for row in ROW.findall(page) if "<td" in row] for page in pages)
    if len(before) != len(after):
        comparison.add(where, f"{len(before)} rows of tables became {len(after)}")
    for number, (old_row, new_row) in enumerate(zip(before, after, strict=False)):
        expected = _row_numbers(old_row)
        remaining = iter(_row_numbers(new_row))
        if not all(value in remaining for value in expected):
            comparison.add(f"{where} row {number}", f"{expected} became {_row_numbers(new_row)}")


def _row_numbers(row: str) -> list[str]:
    cells = [cell for cell in CELL.findall(row) if len(cell.split()) <= LONGEST_VALUE]
    return [number for cell in cells for number in NUMBER.findall(cell)]


def _exists(old: Path, new: Path, where: str, comparison: Comparison) -> None:
    """Figures have labels, so their pixels are not compared."""


COMPARISONS: dict[str, Callable[[Path, Path, str, Comparison], None]] = {
    ".json": _compare_json,
    ".jsonl": _compare_lines,
    ".yaml": _compare_yaml,
    ".parquet": _compare_parquet,
    ".arrow": _compare_arrow,
    ".csv": _compare_csv,
    ".safetensors": _compare_tensors,
    ".md": _compare_numbers,
    ".tex": _compare_numbers,
    ".html": _compare_pages,
    ".png": _exists,
}
