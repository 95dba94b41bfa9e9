"""The cells of a text file or spreadsheet, and where its table begins and ends."""

import csv
import gzip
import json
import re
from collections import Counter
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from python_calamine import CalamineError, CalamineWorkbook

from mobatlas.errors import MobatlasError, first_line
from mobatlas.io.limits import refuse_sparse_sheets

SPREADSHEETS = (".xlsx", ".xlsm", ".xls", ".ods")
DELIMITERS = {"\t": "tabs", ";": "semicolons", "|": "vertical bars", ",": "commas"}
SAMPLE = 20_000  # characters from which the delimiter is detected
HEADER_ROWS = 60  # among which the header is sought
LONGEST_NOTE = 60  # characters of a left-out line that a note quotes
FOOTNOTE = re.compile(r"[*(†‡¹²³\d]|sources?\b|notes?\b|fuente|nota|quelle", re.IGNORECASE)
NUMBER = re.compile(r"-?[\d.,'\s\u00a0\u202f]*\d%?")


def read_sheet(path: Path, notes: list[str]) -> pd.DataFrame:
    """The table in a text file or spreadsheet as text, with "" in empty cells.

    Titles, footnotes and headers of several rows are recognised; `notes` receives a sentence for
    each such decision.
    """
    is_book = path.suffix.lower() in SPREADSHEETS
    grid = _spreadsheet(path, notes) if is_book else _text_grid(path, notes)
    filled = (grid != "").to_numpy()
    table_columns = np.flatnonzero(filled.any(0))
    first, last = _extent(grid, filled)
    _note_left_out(path, grid, (0, first), "above", notes)
    _note_left_out(path, grid, (last, len(grid)), "below", notes)
    header, rows = _header(grid.iloc[first:last, table_columns])
    named = max((number + 1 for number, name in enumerate(header) if name), default=0)
    if named < len(header):
        raise ValueError("rows have more fields than the header")
    if rows > 1:
        notes.append(f"{path.name}: {rows} rows of headers are joined")
    table = grid.iloc[first + rows : last, table_columns]
    table = table[filled[first + rows : last].any(1)].reset_index(drop=True)
    table.columns = pd.Index([name or f"column {k + 1}" for k, name in enumerate(header)])
    return table


def _text_grid(path: Path, notes: list[str]) -> pd.DataFrame:
    text = _decode(path, notes)
    if text.lstrip().startswith("[["):  # as the API of the US Census Bureau answers
        rows = json.loads(text)
        return pd.DataFrame([["" if cell is None else str(cell) for cell in row] for row in rows])
    sample = text[:SAMPLE].splitlines()
    delimiter = max(DELIMITERS, key=lambda each: _agreement(sample, each))
    width = max(map(len, csv.reader(StringIO(text), delimiter=delimiter)), default=0)
    if delimiter != "," and path.suffix.lower() != ".tsv":
        notes.append(f"{path.name}: {DELIMITERS[delimiter]} separate the columns")
    grid = pd.read_csv(
        StringIO(text),
        sep=delimiter,
        header=None,
        names=range(width),
        dtype=str,
        keep_default_na=False,
        skip_blank_lines=False,
    )
    grid = grid.fillna("")
    return grid.apply(lambda cells: cells.map({text: text.strip() for text in cells.unique()}))


def _decode(path: Path, notes: list[str]) -> str:
    with gzip.open(path) if path.suffix.lower() == ".gz" else path.open("rb") as file:
        data = file.read()
    if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return data.decode("utf-16")
    if b"\0" in data:
        raise ValueError("it contains binary data")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = data.decode("cp1252")
    notes.append(f"{path.name}: the file is not UTF-8; it is read as Windows-1252")
    return text


def _agreement(lines: list[str], delimiter: str) -> int:
    """The number of lines that a delimiter splits into the same number of fields."""
    widths = Counter(len(row) for row in csv.reader(lines, delimiter=delimiter))
    return max((count for width, count in widths.items() if width > 1), default=0)


def _spreadsheet(path: Path, notes: list[str]) -> pd.DataFrame:
    """The first sheet with a table; merged cells are filled."""
    refuse_sparse_sheets(path)
    try:
        book = CalamineWorkbook.from_path(path)
        sheets = [book.get_sheet_by_name(name) for name in book.sheet_names]
        grids = {sheet.name: _cells_of(sheet) for sheet in sheets if sheet.height and sheet.width}
    except (CalamineError, OSError) as error:
        raise MobatlasError(
            f"{path}: the spreadsheet cannot be read ({first_line(error)}); save it again, or as "
            "CSV"
        ) from None
    tables = [name for name, grid in grids.items() if ((grid != "").sum(axis=1) > 1).sum() > 1]
    if not tables:
        raise MobatlasError(f"{path}: no sheet has a table; give a table with a header and rows")
    if len(tables) > 1:
        others = ", ".join(f"'{name}'" for name in tables[1:])
        notes.append(f"{path.name}: sheet '{tables[0]}' is read, and not {others}")
    return grids[tables[0]]


def _cells_of(sheet: Any) -> pd.DataFrame:
    rows = [[_cell_text(cell) for cell in row] for row in sheet.to_python(skip_empty_area=False)]
    for (top, left), (bottom, right) in sheet.merged_cell_ranges or ():
        for row in rows[top : bottom + 1]:
            row[left : right + 1] = [rows[top][left]] * len(row[left : right + 1])
    return pd.DataFrame(rows)


def _cell_text(cell: object) -> str:
    """Numbers as text without a needless `.0`."""
    return str(int(cell)) if isinstance(cell, float) and cell.is_integer() else str(cell).strip()


def _extent(grid: pd.DataFrame, filled: Any) -> tuple[int, int]:
    """The first row of the header, and the end of the table, without titles and footnotes."""
    counts = filled.sum(1)
    # Cells merged over a whole title are one text.
    texts = np.array([len({*row} - {""}) for row in grid.head(HEADER_ROWS).to_numpy()])
    wide = max(2, counts.max(initial=0) / 2)
    first = next((row for row, count in enumerate(texts) if count >= wide), 0)
    # A row of merged headers has gaps above the names of the columns.
    while first and texts[first - 1] > 1 and "" in (grid.iat[first - 1, 0], grid.iat[first, 0]):
        first -= 1
    last = len(grid)
    while last > first + 1 and (
        not counts[last - 1]
        or (counts[last - 1] == 1 and filled[last - 1, 0] and _is_footnote(grid, filled, last - 1))
    ):
        last -= 1
    return first, last


def _is_footnote(grid: pd.DataFrame, filled: Any, row: int) -> bool:
    text = grid.iat[row, 0]
    return bool(FOOTNOTE.match(text)) or len(text.split()) > 3 or not filled[row - 1].any()


def _note_left_out(
    path: Path, grid: pd.DataFrame, rows: tuple[int, int], where: str, notes: list[str]
) -> None:
    texts = [" ".join(filter(None, row)) for row in grid.iloc[slice(*rows)].to_numpy()]
    texts = [text[:LONGEST_NOTE] for text in texts if text]
    if texts:
        notes.append(
            f"{path.name}: {len(texts)} lines {where} the table are not read ('{texts[0]}')"
        )


def _header(grid: pd.DataFrame) -> tuple[list[str], int]:
    """The names of the columns, and how many rows they take.

    A second row of headers names the columns below a merged cell of the first row.
    """
    upper = list(grid.iloc[0])
    lower = list(grid.iloc[1]) if len(grid) > 2 else upper
    below = sum(not over and bool(under) for over, under in zip(upper[1:], lower[1:], strict=True))
    below += len(list(filter(None, upper))) - len({*upper} - {""})
    numbers = [cell for cell in lower if NUMBER.fullmatch(cell)]
    ages = all(cell.isdecimal() and int(cell) < 130 for cell in numbers)
    if lower is upper or not below or (numbers and not (below > 1 and ages)):
        return upper, 1
    names = []
    merged = ""
    for over, under in zip(upper, lower, strict=True):
        merged = over or merged
        parts = (merged if under and names else over, under)
        names.append(" ".join(dict.fromkeys(filter(None, parts))))
    return names, 2
