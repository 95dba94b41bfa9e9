"""Refuse a small table whose unpacked size would exhaust the memory, before it is read."""

import gzip
import zipfile
import zlib
from contextlib import suppress
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from mobatlas.errors import MobatlasError

MAX_BYTES = 192 * 2**20  # unpacked
MAX_CELLS = 50_000_000  # rows times columns of a Parquet table
CHUNK = 2**20
START = 8 * CHUNK  # unpacked bytes that show how well a file is packed
MAX_EQUAL_ROWS = 10_000_000  # fewer do no harm


def refuse_oversized(path: Path, max_bytes: int = MAX_BYTES, max_cells: int = MAX_CELLS) -> None:
    """Refuse a table that is too large for its purpose; it takes less than a second.

    Parameters
    ----------
    path
        Text (also as .gz), a Parquet file or folder, or a zipped spreadsheet. A file that cannot
        be read passes: its reader explains why.
    max_bytes
        Largest unpacked size.
    max_cells
        Largest number of rows times columns of a Parquet table.

    Examples
    --------
    >>> refuse_oversized(Path("census.csv.gz"))  # doctest: +SKIP
    """
    try:
        rows, columns = parquet_size(path)
        size = unpacked_size(path, max_bytes)
    except (pa.ArrowException, OSError, EOFError, zlib.error, zipfile.BadZipFile):
        return
    if rows * columns > max_cells:
        raise MobatlasError(
            f"{path}: the table has {rows:,} rows and {columns:,} columns; it may have at most "
            f"{max_cells:,} cells, so give the table that was meant, or fewer rows"
        )
    if size > max_bytes:
        raise MobatlasError(
            f"{path}: the unpacked table is larger than {max_bytes // 2**20} MB; give the table "
            "that was meant, or fewer rows"
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


def unpacked_size(path: Path, limit: int) -> int:
    """Bytes of a file after unpacking; counting ends beyond the limit."""
    if path.is_dir():
        return 0
    if path.suffix.lower() == ".gz":
        size = 0
        with gzip.open(path) as file:
            while size <= limit and (chunk := file.read(CHUNK)):
                size += len(chunk)
        return size
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            return sum(member.file_size for member in archive.infolist())
    if path.suffix.lower() in (".parquet", ".pq"):
        metadata = pq.read_metadata(path)
        return sum(
            metadata.row_group(number).total_byte_size for number in range(metadata.num_row_groups)
        )
    return path.stat().st_size
