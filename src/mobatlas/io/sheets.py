"""The cells of a text file or spreadsheet, and where its table begins and ends."""

import csv
import gzip
import json
import re
from collections import Counter
from collections.abc import Iterable
from io import StringIO
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from python_calamine import CalamineError, CalamineWorkbook

from mobatlas.errors import first_line

SPREADSHEETS = (".xlsx", ".xlsm", ".xls", ".ods")
DELIMITERS = {"\t": "tabs", ";": "semicolons", "|": "vertical bars", ",": "commas"}
SAMPLE = 20_000  # characters from which the delimiter is detected
HEADER_ROWS = 60  # among which the header is sought
LONGEST_NOTE = 60  # characters of a left-out line that a note quotes
FOOTNOTE = re.compile(r"[*(†‡¹²³\d]|sources?\b|notes?\b|fuente|nota|quelle", re.IGNORECASE)
NUMBER = re.compile(r"-?[\d.,'\s\u00a0\u202f]*\d%?")


def read_sheet(path: Path, notes: list[str]) -> pd.DataFrame:
    """The table in a text file or spreadsheet as text, with "" in empty cells.

    Titles, footnotes and headers of two rows are recognised; `notes` receives a sentence for each
    such decision.
    """
    is_book = path.suffix.lower() in SPREADSHEETS
    grid = _spreadsheet(path, notes) if is_book else _text_grid(path, notes)
    filled = (grid != "").to_numpy()
    first, last = _extent(grid, filled)
    for where, rows in (("above", grid[:first]), ("below", grid[last:])):
        texts = [" ".join(filter(None, row))[:LONGEST_NOTE] for row in rows.to_numpy()]
        if any(texts):
            notes.append(f"{path.name}: lines {where} the table are not read: '{max(texts)}'")
    used = np.flatnonzero(filled[first:last].any(0))
    header, start = _header(grid.iloc[first:last, used])
    notes += [f"{path.name}: two rows of headers are joined"] * (start - 1)
    if not header[-1]:
        raise ValueError("rows have more fields than the header")
    table = grid.iloc[first + start : last, used]
    table = table[(table != "").any(axis=1)].reset_index(drop=True)
    return table.set_axis([name or f"column {k + 1}" for k, name in enumerate(header)], axis=1)


def _text_grid(path: Path, notes: list[str]) -> pd.DataFrame:
    with gzip.open(path) if path.suffix.lower() == ".gz" else path.open("rb") as file:
        text = _decode(path, file.read(), notes)
    if text.lstrip().startswith("[["):  # as the API of the US Census Bureau answers
        return pd.DataFrame(json.loads(text)).fillna("").astype(str)
    sample = text[:SAMPLE].splitlines()

    def agreement(delimiter: str) -> int:
        widths = Counter(map(len, csv.reader(sample, delimiter=delimiter)))
        return max((lines for width, lines in widths.items() if width > 1), default=0)

    delimiter = max(DELIMITERS, key=agreement)
    if delimiter != "," and path.suffix.lower() != ".tsv":
        notes.append(f"{path.name}: {DELIMITERS[delimiter]} separate the columns")
    grid = pd.read_csv(
        StringIO(text),
        sep=delimiter,
        header=None,
        names=range(max(map(len, csv.reader(StringIO(text), delimiter=delimiter)), default=0)),
        dtype=str,
        keep_default_na=False,
        skip_blank_lines=False,
    ).fillna("")
    return grid.apply(lambda cells: cells.map({text: _one_line(text) for text in cells.unique()}))


def _decode(path: Path, data: bytes, notes: list[str]) -> str:
    wide = data[:2] in (b"\xff\xfe", b"\xfe\xff")
    if b"\0" in data and not wide:
        raise ValueError("it contains binary data")
    try:
        return data.decode("utf-16" if wide else "utf-8-sig")
    except UnicodeDecodeError:
        notes.append(f"{path.name}: the file is not UTF-8; it is read as Windows-1252")
        return data.decode("cp1252")


def _spreadsheet(path: Path, notes: list[str]) -> pd.DataFrame:
    """The first sheet with a table; merged cells are filled."""
    try:
        book = CalamineWorkbook.from_path(path)
        grids = {name: _cells_of(book.get_sheet_by_name(name)) for name in book.sheet_names}
    except CalamineError as error:
        raise ValueError(first_line(error)) from None
    tables = [name for name, grid in grids.items() if ((grid != "").sum(axis=1) > 1).sum() > 1]
    if not tables:
        raise ValueError("no sheet has a table")
    if len(tables) > 1:
        others = ", ".join(f"'{name}'" for name in tables[1:])
        notes.append(f"{path.name}: sheet '{tables[0]}' is read, and not {others}")
    return grids[tables[0]]


def _cells_of(sheet: Any) -> pd.DataFrame:
    rows = [
        # Numbers are floats: `2020.0` is 2020.
        [_one_line(re.sub(r"\.0$", "", str(cell))) for cell in row]
        for row in sheet.to_python(skip_empty_area=False)
    ]
    for (top, left), (bottom, right) in sheet.merged_cell_ranges or ():
        for row in rows[top : bottom + 1]:
            row[left : right + 1] = [rows[top][left]] * len(row[left : right + 1])
    return pd.DataFrame(rows)


def _one_line(text: str) -> str:
    return " ".join(text.split()) if "\n" in text or "\r" in text else text.strip()


def _extent(grid: pd.DataFrame, filled: Any) -> tuple[int, int]:
    """The first row of the header, and the end of the table, without titles and footnotes."""
    counts = filled.sum(1)
    # Cells merged over a whole title are one text.
    texts = [len({*row} - {""}) for row in grid.head(HEADER_ROWS).to_numpy()]
    most = counts.max(initial=0)
    # A block of rows with keys and values may precede the block of the table.
    block = pd.Series(counts).groupby((counts == 0).cumsum()).transform("max")
    wide = [count >= max(2, most / 2) and block[row] == most for row, count in enumerate(texts)]
    first = wide.index(True) if any(wide) else 0
    # A row of merged headers has gaps above the names of the columns.
    while first and texts[first - 1] > 1:
        above, below = str(grid.iat[first - 1, 0]), str(grid.iat[first, 0])
        if above and below and above != below:  # not merged
            break
        first -= 1
    last = len(grid)
    while last > first + 1 and counts[last - 1] < 2 and _is_footnote(grid, filled, last - 1):
        last -= 1
    return first, last


def _is_footnote(grid: pd.DataFrame, filled: Any, row: int) -> bool:
    text = str(grid.iat[row, 0])
    alone = not filled[row - 1].any() or len(text.split()) > 3
    return not filled[row].any() or (filled[row, 0] and (alone or bool(FOOTNOTE.match(text))))


def _header(grid: pd.DataFrame) -> tuple[list[str], int]:
    """The names of the columns, and how many rows they take.

    A second row of headers names the columns below a merged cell of the first row.
    """
    upper = list(grid.iloc[0])
    lower = list(grid.iloc[1]) if len(grid) > 2 else upper
    below = sum(not over and bool(under) for over, under in zip(upper[1:], lower[1:], strict=True))
    below += len(list(filter(None, upper))) - len({*upper} - {""})
    numbers = [cell for cell in lower if NUMBER.fullmatch(cell)]
    ages = below > 1 and all(cell.isdecimal() and int(cell) < 130 for cell in numbers)
    if lower is upper or not below or (numbers and not ages):
        return upper, 1
    merged: Iterable[str] = accumulate(upper, lambda last, cell: cell or last)
    over = [cell if under else own for cell, own, under in zip(merged, upper, lower, strict=True)]
    over[0] = upper[0]
    pairs = zip(over, lower, strict=True)
    return [" ".join(dict.fromkeys(filter(None, pair))) for pair in pairs], 2
