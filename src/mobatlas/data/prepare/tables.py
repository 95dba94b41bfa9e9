"""Tables of a source: CSV and Parquet files, and columns as text, number or flag.

The embedded DuckDB parses text once, and the expressions mean the same on every engine.
"""

import csv
import gzip
import hashlib
import zlib
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import duckdb
import ibis
import pyarrow as pa
import pyarrow.dataset as pads
import pyarrow.parquet as pq
from ibis import ir

from mobatlas.errors import MobatlasError
from mobatlas.io.tables import refuse_duplicate_columns

MAX_HEADER = 131_072  # characters; a file without an end of line before that is not a table
TRUE_WORDS = ("true", "t", "yes", "y", "1", "1.0")
FALSE_WORDS = ("false", "f", "no", "n", "0", "0.0")
NO_ANSWER = ("", "nan", "na", "none", "null")


def as_text(column: ir.Value) -> ir.Value:
    """Text, null where empty. (No `strip`: on Spark, Ibis 12 strips the letters v and f too.)"""
    return column.cast("string").nullif("")


def as_number(column: ir.Value) -> ir.Value:
    """A float, null where the value is not a number."""
    is_number = column.type().is_numeric() or column.type().is_boolean()
    value = column.cast("float64") if is_number else as_text(column).try_cast("float64")
    return ibis.ifelse(value.isnan(), ibis.null("float64"), value)


def as_flag(column: ir.Value) -> ir.Value:
    """A boolean from booleans, numbers or words."""
    if column.type().is_boolean():
        return column.fill_null(False)
    return column.cast("string").lower().isin(TRUE_WORDS).fill_null(False)


def is_word(raw: ir.Value, known: tuple[str, ...] = NO_ANSWER) -> ir.Value:
    """Whether a column is text other than the known words."""
    if not raw.type().is_string():
        return raw.isnull() & raw.notnull()  # false in every row
    return (~raw.lower().isin(known)).fill_null(False)


def nearest_whole(value: ir.Value) -> ir.Value:
    """Rounded to an integer: engines differ in how they round, but not in how they floor."""
    return (value + 0.5).floor().cast("int64")


def as_bin(column: ir.Value, limits: Sequence[float], largest: float = float("inf")) -> ir.Value:
    """`<30`, `30-40` (40 excluded), ..., `>50` (50 and more); other text stays.

    Negative numbers and those above the largest stand for no answer.
    """
    number = as_number(column)
    text = as_text(column)
    known = ibis.ifelse(text.lower().isin(NO_ANSWER), ibis.null("string"), text)
    bins = [
        (number < min(0, limits[0]), ibis.null("string")),
        (number < limits[0], f"<{limits[0]:g}"),
    ]
    bins += [(number < high, f"{low:g}-{high:g}") for low, high in pairwise(limits)]
    bins += [(number <= largest, f">{limits[-1]:g}")]
    return ibis.ifelse(number.isnull(), known, ibis.cases(*bins, else_=ibis.null("string")))


def is_csv(path: Path) -> bool:
    """Whether the name is that of a text table, compressed or not."""
    return path.name.lower().endswith((".csv", ".csv.gz", ".txt", ".tsv"))


def as_parquet(path: Path, work: Path) -> Path:
    """The path itself, or a copy of a CSV file as Parquet in which every column is text."""
    if path.is_dir() or not is_csv(path):
        return path
    names, delimiter = csv_header(path)
    digest = hashlib.sha256(str(path.absolute()).encode()).hexdigest()[:12]
    copy = work / f"{path.name.split('.')[0]}-{digest}.parquet"
    columns = ", ".join(f"{literal(name)}: 'VARCHAR'" for name in names)
    options = (
        f"auto_detect=false, header=true, delim={literal(delimiter)}, quote='\"', escape='\"', "
        f"columns={{{columns}}}"
    )
    try:
        convert(f"SELECT * FROM read_csv({literal(path)}, {options})", copy, keep_order=True)
    except duckdb.Error as error:
        raise MobatlasError(
            f"{path}: this is not a readable CSV file in UTF-8: {duckdb_reason(error)}"
        ) from None
    return copy


def convert(query: str, target: Path, keep_order: bool = False) -> None:
    """Write the rows of a DuckDB query over text files as Parquet, in bounded memory."""
    config: dict[str, str | bool | int | float | list[str]] = {
        "memory_limit": "1GB",
        "temp_directory": str(target.parent / "spill"),
        "preserve_insertion_order": keep_order,
    }
    with duckdb.connect(config=config) as connection:
        connection.execute("SET enable_progress_bar = false")
        connection.execute(f"COPY ({query}) TO {literal(target)} (FORMAT parquet)")


def refuse_damaged(path: Path, pattern: str) -> None:
    """Refuse a path whose Parquet files DuckDB cannot read to the end."""
    try:
        # a new connection, because a failed query can make the old one unusable
        with duckdb.connect() as connection:
            connection.execute(
                f"SELECT max(hash(COLUMNS(*))) FROM read_parquet({literal(pattern)})"
            ).fetchall()
    except duckdb.Error as error:
        raise MobatlasError(
            f"{path}: the data is damaged or not Parquet ({duckdb_reason(error)})"
        ) from None


def duckdb_reason(error: duckdb.Error) -> str:
    """The reason in an error of DuckDB, without its suggestions."""
    return " ".join(str(error).split("Possible")[0].split())[:200]


def csv_header(path: Path) -> tuple[list[str], str]:
    """The column names of a CSV file and the delimiter."""
    first = first_line(path)
    delimiter = max(",;\t|", key=first.count)
    names = next(csv.reader([first.rstrip("\r\n")], delimiter=delimiter), [])
    if not any(name.strip() for name in names):
        raise MobatlasError(f"{path}: the first line has no column names")
    refuse_duplicate_columns(str(path), names)
    return names, delimiter


def first_line(path: Path) -> str:
    """The first line of a text file, compressed or not; a line without an end is refused."""
    open_text = gzip.open if path.suffix == ".gz" else Path.open
    try:
        with open_text(path, "rt", encoding="utf-8-sig") as lines:
            first = str(lines.readline(MAX_HEADER))
    except (OSError, EOFError, UnicodeError, zlib.error) as error:
        raise MobatlasError(f"{path}: this is not a readable CSV file in UTF-8 ({error})") from None
    if len(first) >= MAX_HEADER:
        raise MobatlasError(
            f"{path}: the first line is longer than {MAX_HEADER:,} characters; give a table"
        )
    return first


def literal(value: object) -> str:
    """A value as SQL text."""
    return "'" + str(value).replace("'", "''") + "'"


def parquet_schema(path: Path) -> pa.Schema:
    """The Arrow schema of a Parquet file or folder."""
    try:
        schema = (
            pads.dataset(path, format="parquet").schema if path.is_dir() else pq.read_schema(path)
        )
    except (pa.ArrowInvalid, OSError) as error:
        raise MobatlasError(
            f"{path}: this is not a readable Parquet file; give .parquet or .csv "
            f"({str(error).splitlines()[0]})"
        ) from None
    refuse_duplicate_columns(str(path), schema.names)
    return schema
