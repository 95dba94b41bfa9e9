"""Tables of a user, Parquet, text or spreadsheet: their columns, keys and numbers."""

import csv
import re
import zipfile
import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd

from mobatlas.errors import MobatlasError, first_line, same_column
from mobatlas.io.limits import refuse_oversized
from mobatlas.io.sheets import read_sheet

SUFFIXES = (".parquet", ".csv", ".csv.gz")
UNREADABLE = (
    ValueError,
    TypeError,
    OSError,
    EOFError,
    RuntimeError,
    csv.Error,
    zlib.error,
    zipfile.BadZipFile,
)
NUMBER = re.compile(r"-?\d[\d.,]*")
FORMS = {  # decimal mark and thousands separator
    (".", ""): re.compile(r"-?\d+(\.\d+)?"),
    (",", ""): re.compile(r"-?\d+(,\d+)?"),
    (".", ","): re.compile(r"-?(\d{1,3}|[1-9]\d{0,2}(,\d{3})+)(\.\d+)?"),
    (",", "."): re.compile(r"-?(\d{1,3}|[1-9]\d{0,2}(\.\d{3})+)(,\d+)?"),
}
SPACES = re.compile(r"(?<=\d)[\s'\u2019\u00a0\u202f](?=\d{3}(?!\d))")
FLAG = re.compile(r"(?<=\d)(?:\s+[a-z]{1,3}|\s*\([a-z]\)|[*\u2020\u2021]+)$")


def find_table(folder: Path, name: str) -> Path | None:
    """The first existing file of that name with one of the suffixes."""
    return next(filter(Path.exists, (folder / f"{name}{suffix}" for suffix in SUFFIXES)), None)


def require_columns(where: str, columns: Iterable[str], required: Iterable[str]) -> None:
    """Refuse a table without a required column; a column with this meaning is suggested."""
    columns = list(columns)
    refuse_duplicate_columns(where, columns)
    for name in required:
        if name not in columns:
            raise MobatlasError(
                f"{where}: column '{name}' is missing{same_column(name, columns)} "
                f"(columns: {', '.join(columns) or 'none'})"
            )


def refuse_duplicate_columns(where: str, columns: Sequence[str]) -> None:
    """Refuse a table with two columns of one name."""
    for position, name in enumerate(columns):
        if name in columns[:position]:
            raise MobatlasError(f"{where}: two columns are called '{name}'; rename one")


def read_table(
    path: Path, rename: Mapping[str, str] | None = None, notes: list[str] | None = None
) -> pd.DataFrame:
    """Read a table of Parquet, text or a spreadsheet; other than Parquet as text.

    `rename` has the user's name of a column for the name that mobatlas expects. `notes` receives
    a sentence for each decision.
    """
    if not path.is_file():
        raise MobatlasError(f"{path}: no such file")
    if not path.stat().st_size:
        raise MobatlasError(f"{path}: the file is empty; give a table with rows")
    try:
        refuse_oversized(path)
        if path.suffix.lower() in (".parquet", ".pq"):
            table = pd.read_parquet(path)
        else:
            table = read_sheet(path, [] if notes is None else notes)
    except UNREADABLE as error:
        raise MobatlasError(
            f"{path}: the table cannot be read as Parquet, CSV or a spreadsheet "
            f"({first_line(error)}); quote names that contain a comma"
        ) from None
    if table.empty:
        raise MobatlasError(f"{path}: the table has no rows; give a table with rows")
    for name in table.columns:
        if pd.api.types.infer_dtype(table[name], skipna=True) == "bytes":
            raise MobatlasError(f"{path}: column '{name}' contains bytes; write text or numbers")
    names = renamed_columns([" ".join(str(name).split()) for name in table.columns], rename or {})
    refuse_duplicate_columns(str(path), names)
    return table.set_axis(names, axis=1)


def renamed_columns(columns: Sequence[str], rename: Mapping[str, str]) -> list[str]:
    """Names of columns after renaming; a column whose name is taken over gets another one."""
    ours = {theirs: name for name, theirs in rename.items() if theirs in columns}
    taken = set(ours.values())
    return [ours.get(name, f"{name} (unused)" if name in taken else name) for name in columns]


def key_column(
    path: Path, table: pd.DataFrame, column: str
) -> tuple[npt.NDArray[np.int64], tuple[str, ...]]:
    """A text column as codes and distinct names without outer spaces, in order of appearance."""
    try:
        codes, values = pd.factorize(np.asarray(table[column], dtype=object))
    except TypeError:
        raise MobatlasError(
            f"{path}: column '{column}' contains lists; give one name per row"
        ) from None
    whole = [isinstance(each, float) and each.is_integer() for each in values]
    texts = [str(int(v) if w else v).strip() for v, w in zip(values, whole, strict=True)]
    distinct = tuple(dict.fromkeys(texts))
    position = {text: code for code, text in enumerate(distinct)}
    # The last entry is for code -1, a missing value.
    merged = np.array([*(position[text] for text in texts), -1])[codes]
    missing = (merged < 0) | np.array([not text for text in distinct] + [False])[merged]
    if missing.any():
        raise MobatlasError(
            f"{path}: column '{column}' is empty in row {int(np.argmax(missing)) + 1}; fill it"
        )
    return merged.astype(np.int64), distinct


def plain_numbers(
    path: Path, table: pd.DataFrame, columns: Sequence[str], whole: bool, notes: list[str]
) -> pd.DataFrame:
    """Rewrite text numbers with decimal commas, thousands separators or flags as plain numbers.

    `whole` says that the columns count people, so that a fraction is not expected.
    """
    texts = [name for name in columns if not pd.api.types.is_numeric_dtype(table[name])]
    values = table[texts].astype("string").fillna("")
    cells = list(dict.fromkeys(values.to_numpy().ravel()))
    plain = {cell: FLAG.sub("", SPACES.sub("", cell)) for cell in cells}
    decimal, separator = _marks(path, list(plain.values()), whole)
    tidy = {
        cell: text.replace(separator, "").replace(decimal, ".") if NUMBER.fullmatch(text) else cell
        for cell, text in plain.items()
    }
    if all(tidy[cell] == cell for cell in cells):
        return table
    decisions = {
        f"'{separator}' is read as a thousands separator": bool(separator),
        "spaces or apostrophes are read as thousands separators": any(map(SPACES.search, cells)),
        "',' is read as the decimal mark": decimal == "," and any("," in cell for cell in cells),
        "flags behind numbers, such as 'p' or '*', are left out": any(
            FLAG.search(cell) and NUMBER.fullmatch(plain[cell]) for cell in cells
        ),
    }
    notes += [f"{path.name}: {text}" for text, applies in decisions.items() if applies]
    return table.assign(**{name: values[name].map(tidy) for name in texts})


def _marks(path: Path, texts: Sequence[str], whole: bool) -> tuple[str, str]:
    """The decimal mark and the thousands separator ("" for none) of some numbers."""
    numbers = [text for text in texts if NUMBER.fullmatch(text)]
    marked = [text for text in numbers if not text.lstrip("-").isdecimal()]
    possible = [
        (decimal, separator)
        for (decimal, separator), form in FORMS.items()
        if all(map(form.fullmatch, numbers)) and any(separator in text for text in marked)
    ]
    if len(possible) < 2:
        return possible[0] if possible else (".", "")
    if possible[0] == (".", "") and not whole:
        return possible[0]
    # In `987` and `2.329`, only the larger number has a separator; in `2,329` a comma is one.
    separators = [separator for _, separator in possible if separator]
    unmarked = len(marked) < len(numbers)
    if len(separators) > 1 or not whole or (separators == ["."] and not unmarked):
        raise MobatlasError(
            f"{path}: '{marked[0]}' can be a whole number or a fraction; write numbers without "
            "thousands separators"
        )
    return possible[-1]


def number_column(
    path: Path,
    table: pd.DataFrame,
    column: str,
    missing: bool = False,
    words: Collection[str] = ("",),
) -> npt.NDArray[np.float64]:
    """A column of finite numbers; with `missing`, cells with one of the words are NaN."""
    raw = table[column]
    values = np.asarray(pd.to_numeric(raw, errors="coerce"), dtype=np.float64)
    empty = np.asarray(raw.isna())
    if not pd.api.types.is_numeric_dtype(raw):
        empty = empty | np.asarray(raw.astype(str).str.strip().str.lower().isin(list(words)))
    bad = ~np.isfinite(values) & ~(missing & empty)
    if column == "n":  # mobatlas writes an infinite n for exact shares
        bad &= ~np.isposinf(values)
    if bad.any():
        row = int(np.argmax(bad))
        value = raw.iloc[row]
        shown = repr(value) if isinstance(value, str) else str(value)
        raise MobatlasError(
            f"{path}: column '{column}' is empty or not a number in row {row + 1} ({shown}); "
            "correct it"
        )
    return values
