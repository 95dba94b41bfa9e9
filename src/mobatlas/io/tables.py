"""Published tables of regions, Parquet or CSV: their columns, keys and numbers, with one sentence for what is wrong."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd

from mobatlas.data.schema import looks_like_region, require_columns
from mobatlas.errors import MobatlasError
from mobatlas.groups import SEPARATOR
from mobatlas.regions.types import Floats


def read_table(path: Path) -> pd.DataFrame:
    """A Parquet or CSV table; CSV as text, so that region ids keep their zeros."""
    if not path.is_file():
        raise MobatlasError(f"{path}: no such file")
    try:
        if path.suffix.lower() in (".parquet", ".pq"):
            table = pd.read_parquet(path)
        else:
            separator = "\t" if ".tsv" in path.suffixes else ","
            table = pd.read_csv(
                path, dtype=str, keep_default_na=False, encoding="utf-8-sig", sep=separator
            )
    except (ValueError, OSError) as error:  # of pyarrow and of pandas' parser
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise MobatlasError(
            f"{path}: cannot be read as Parquet or CSV ({reason}); quote names that hold a comma"
        ) from None
    if not isinstance(table.index, pd.RangeIndex):
        raise MobatlasError(
            f"{path}: rows have more fields than the header; quote group names, they hold a comma"
        )
    if table.empty:
        raise MobatlasError(f"{path}: the table has no rows; give one that has")
    for name in table.columns:
        if pd.api.types.infer_dtype(table[name], skipna=True) == "bytes":
            raise MobatlasError(f"{path}: column '{name}' holds bytes; write it as text or numbers")
    return table.rename(columns=lambda name: str(name).strip())


def keys(
    path: Path, table: pd.DataFrame, column: str
) -> tuple[npt.NDArray[np.int64], tuple[str, ...]]:
    """A text column as numbers and distinct names, in order of appearance; spaces around commas do not matter."""
    try:
        codes, values = pd.factorize(np.asarray(table[column], dtype=object))
    except TypeError:
        raise MobatlasError(f"{path}: column '{column}' holds lists; give one name a row") from None
    texts = [str(int(v)) if isinstance(v, float) and v.is_integer() else str(v) for v in values]
    texts = [
        SEPARATOR.join(part.strip() for part in text.split(SEPARATOR.strip())) for text in texts
    ]
    distinct = tuple(dict.fromkeys(texts))
    position = {text: code for code, text in enumerate(distinct)}
    merged = np.array([*(position[text] for text in texts), -1])[
        codes
    ]  # the last is for code -1, a missing value
    missing = (merged < 0) | np.array([not text for text in distinct] + [False])[merged]
    if missing.any():
        raise MobatlasError(
            f"{path}: column '{column}' is empty in row {int(np.argmax(missing)) + 1}; fill it"
        )
    return merged.astype(np.int64), distinct


def numbers(path: Path, table: pd.DataFrame, column: str, missing: bool = False) -> Floats:
    """A column of finite numbers; `missing` allows empty cells as NaN."""
    raw = table[column]
    values = np.asarray(pd.to_numeric(raw, errors="coerce"), dtype=np.float64)
    empty = np.asarray(raw.isna())
    if not pd.api.types.is_numeric_dtype(raw):
        empty = empty | np.asarray(raw.astype(str).str.strip() == "")
    bad = ~np.isfinite(values) & ~(missing & empty)
    if column == "n":  # our own tables write exact shares as known from infinitely many people
        bad &= ~np.isposinf(values)
    if bad.any():
        row = int(np.argmax(bad))
        value = raw.iloc[row]
        shown = repr(value) if isinstance(value, str) else str(value)
        raise MobatlasError(
            f"{path}: column '{column}' is empty or not a number in row {row + 1} ({shown}); mend it"
        )
    return values


def region_column(path: Path, columns: Sequence[str]) -> str:
    """Which column names the region: `region`, a census GEO_ID, or one that looks like it."""
    for accepts in (lambda c: c == "region", lambda c: c in ("geo_id", "geoid"), looks_like_region):
        for column in columns:
            if accepts(column.lower()):
                return column
    require_columns(str(path), columns, ("region",))
    raise AssertionError
