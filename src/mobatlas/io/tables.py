"""Tables of a user, Parquet or CSV: their columns, keys and numbers."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd

from mobatlas.errors import MobatlasError, first_line, suggestion
from mobatlas.groups import SEPARATOR
from mobatlas.io.limits import refuse_oversized

SUFFIXES = (".parquet", ".csv", ".csv.gz")


def find_table(folder: Path, name: str) -> Path | None:
    """The first existing file of that name with one of the suffixes."""
    return next(filter(Path.exists, (folder / f"{name}{suffix}" for suffix in SUFFIXES)), None)


def require_columns(where: str, columns: Iterable[str], required: Iterable[str]) -> None:
    """Refuse a table without a required column, and suggest a similar column."""
    columns = list(columns)
    refuse_duplicate_columns(where, columns)
    for name in required:
        if name not in columns:
            raise MobatlasError(
                f"{where}: column '{name}' is missing{suggestion(name, columns)} "
                f"(columns: {', '.join(columns) or 'none'})"
            )


def refuse_duplicate_columns(where: str, columns: Sequence[str]) -> None:
    """Refuse a table with two columns of one name."""
    for position, name in enumerate(columns):
        if name in columns[:position]:
            raise MobatlasError(f"{where}: two columns are called '{name}'; rename one")


def read_table(path: Path) -> pd.DataFrame:
    """Read a Parquet or CSV table; CSV as text, so that region ids keep leading zeros."""
    if not path.is_file():
        raise MobatlasError(f"{path}: no such file")
    refuse_oversized(path)
    try:
        if path.suffix.lower() in (".parquet", ".pq"):
            table = pd.read_parquet(path)
        else:
            table = pd.read_csv(
                path,
                dtype=str,
                keep_default_na=False,
                encoding="utf-8-sig",
                sep="\t" if ".tsv" in path.suffixes else ",",
            )
    except (ValueError, OSError) as error:  # from pyarrow or pandas
        raise MobatlasError(
            f"{path}: the table cannot be read as Parquet or CSV ({first_line(error)}); "
            "quote names that contain a comma"
        ) from None
    if not isinstance(table.index, pd.RangeIndex):
        raise MobatlasError(
            f"{path}: rows have more fields than the header; quote group names with commas"
        )
    if table.empty:
        raise MobatlasError(f"{path}: the table has no rows; give a table with rows")
    for name in table.columns:
        if pd.api.types.infer_dtype(table[name], skipna=True) == "bytes":
            raise MobatlasError(f"{path}: column '{name}' contains bytes; write text or numbers")
    return table.rename(columns=lambda name: str(name).strip())


def key_column(
    path: Path, table: pd.DataFrame, column: str
) -> tuple[npt.NDArray[np.int64], tuple[str, ...]]:
    """A text column as codes and distinct names, in order of appearance.

    Spaces around commas do not matter.
    """
    try:
        codes, values = pd.factorize(np.asarray(table[column], dtype=object))
    except TypeError:
        raise MobatlasError(
            f"{path}: column '{column}' contains lists; give one name per row"
        ) from None
    texts = [str(int(v)) if isinstance(v, float) and v.is_integer() else str(v) for v in values]
    texts = [
        SEPARATOR.join(part.strip() for part in text.split(SEPARATOR.strip())) for text in texts
    ]
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


def number_column(
    path: Path, table: pd.DataFrame, column: str, missing: bool = False
) -> npt.NDArray[np.float64]:
    """A column of finite numbers; with `missing`, empty cells are NaN."""
    raw = table[column]
    values = np.asarray(pd.to_numeric(raw, errors="coerce"), dtype=np.float64)
    empty = np.asarray(raw.isna())
    if not pd.api.types.is_numeric_dtype(raw):
        empty = empty | np.asarray(raw.astype(str).str.strip() == "")
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
