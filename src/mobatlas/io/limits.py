"""Refuse a small table whose unpacked size would exhaust the memory, before it is read."""

import gzip
import re
import zipfile
import zlib
from contextlib import suppress
from functools import reduce
from itertools import accumulate
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from mobatlas.errors import MobatlasError

MAX_BYTES = 192 * 2**20  # unpacked
MAX_CELLS = 50_000_000  # rows times columns of a Parquet table or of a sheet
CHUNK = 2**20
SHEET = re.compile(r"xl/(worksheets/[^/]+|sharedStrings)\.xml|content\.xml")
CELL = re.compile(r'\br="([A-Z]{1,3})(\d{1,7})"')
# In OpenDocument, a cell with content that is repeated, or a repeated row with such a cell.
REPEATED = re.compile(
    r'<table:table-cell[^>]*number-columns-repeated="\d{5,}"[^>]*[^/]>'
    r'|<table:table-row[^>]*number-rows-repeated="\d{5,}"[^>]*>'
    r"(?:(?!</table:table-row>).)*?office:value-type",
    re.DOTALL,
)
START = 8 * CHUNK  # unpacked bytes that show how well a file is packed
MAX_EQUAL_ROWS = 10_000_000  # fewer do no harm


def refuse_oversized(path: Path, max_bytes: int = MAX_BYTES, max_cells: int = MAX_CELLS) -> None:
    """Refuse a table that is too large for its purpose; it takes less than a second.

    Parameters
    ----------
    path
        Text (also as .gz), Parquet, or a zipped spreadsheet. A file that cannot be read raises the
        error of gzip, zipfile or pyarrow.
    max_bytes
        Largest unpacked size.
    max_cells
        Largest number of rows times columns of a Parquet table or of a sheet.

    Examples
    --------
    >>> refuse_oversized(Path("census.csv.gz"))  # doctest: +SKIP
    """
    size, cells = _unpacked_size(path, max_bytes)
    if size > max_bytes or cells > max_cells:
        raise MobatlasError(
            f"{path}: the table is larger than {max_bytes // 2**20} MB after unpacking, or has "
            f"more than {max_cells:,} cells; give the table that was meant, or fewer rows"
        )


def refuse_bomb(path: Path) -> None:
    """Refuse files that unpack to far more than real data would, in a source of any size."""
    for file in filter(Path.is_file, [path, *path.rglob("*")]):
        with suppress(pa.ArrowException, OSError, EOFError, zlib.error):
            rows, _ = parquet_size(file)
            packed = file.stat().st_size
            unpacked = 0
            if file.suffix.lower() == ".gz":
                with file.open("rb") as raw, gzip.open(raw) as text:
                    unpacked = sum(len(text.read(CHUNK)) for _ in range(START // CHUNK))
                    packed = raw.tell()  # of the start
            # Text of visits is packed to a twentieth or so, equal lines to a thousandth.
            is_bomb = unpacked == START and unpacked > 200 * packed
            if is_bomb or (rows > MAX_EQUAL_ROWS and rows > 4 * packed):
                raise MobatlasError(
                    f"{file}: {packed:,} bytes unpack to {max(rows, unpacked):,} "
                    f"{'rows' if rows else 'bytes or more'}, all nearly equal; give the file that "
                    "was meant"
                )


def parquet_size(path: Path) -> tuple[int, int]:
    """Rows and columns of a Parquet file or folder; zeros for other files."""
    if path.is_dir():
        sizes = [parquet_size(part) for part in sorted(path.rglob("*.parquet"))]
        return sum(rows for rows, _ in sizes), max((columns for _, columns in sizes), default=0)
    if path.suffix.lower() not in (".parquet", ".pq"):
        return 0, 0
    metadata = pq.read_metadata(path)
    return metadata.num_rows, metadata.num_columns


def _unpacked_size(path: Path, limit: int) -> tuple[int, int]:
    """Bytes after unpacking, counted until they exceed the limit, and cells where known."""
    rows, columns = parquet_size(path)
    if rows:
        return 0, rows * columns
    if path.suffix.lower() == ".gz":
        with gzip.open(path) as file:
            sizes = accumulate(iter(lambda: len(file.read(CHUNK)), 0))
            return next((size for size in sizes if size > limit), 0), 0
    if not zipfile.is_zipfile(path):
        return path.stat().st_size, 0
    with zipfile.ZipFile(path) as archive:
        size = sum(member.file_size for member in archive.infolist())
        sheets = [name for name in archive.namelist() if SHEET.fullmatch(name) and size <= limit]
        return size, max((_spanned_cells(archive.read(name)) for name in sheets), default=0)


def _spanned_cells(sheet: bytes) -> int:
    """Rows times columns that the cells of a sheet span, however few they are."""
    text = sheet.decode(errors="replace")
    if REPEATED.search(text):
        return MAX_CELLS**2
    places = [match.groups() for match in CELL.finditer(text)]
    rows = max((int(row) for _, row in places), default=0)
    names = {letters for letters, _ in places}  # of columns: A, B, ..., AA
    columns = (reduce(lambda n, letter: 26 * n + ord(letter) - 64, name, 0) for name in names)
    return rows * max(columns, default=0)
