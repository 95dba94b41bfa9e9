"""Text layouts become Parquet once, in the embedded DuckDB, whatever engine goes on from there."""

from __future__ import annotations

from pathlib import Path

import duckdb

from mobatlas.data.prepare.engine import literal


def convert(query: str, target: Path) -> None:
    """Write the rows of a query over text files as Parquet, in bounded memory."""
    spill = str(target.parent / "spill")
    with duckdb.connect(
        config={"memory_limit": "1GB", "temp_directory": spill, "preserve_insertion_order": False}
    ) as connection:
        connection.execute("SET enable_progress_bar = false")
        connection.execute(f"COPY ({query}) TO {literal(target)} (FORMAT parquet)")
