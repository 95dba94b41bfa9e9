"""`plain`: the canonical tables themselves, as Parquet or CSV; a visits file, or a folder with visits, people and pois."""

from __future__ import annotations

from pathlib import Path

from ibis import ir

from mobatlas.data.prepare.engine import Engine, is_csv, parquet_schema
from mobatlas.data.readers.base import NoOptions, Reader, Source
from mobatlas.errors import MobatlasError
from mobatlas.io.tables import find_table


def require_path(path: Path) -> Path:
    """Refuse a path that is not there."""
    if not path.exists():
        raise MobatlasError(f"{path}: no such file or folder")
    return path


def open_table(path: Path, engine: Engine) -> ir.Table:
    """One table, after a look at whether it is what its name says."""
    require_path(path)
    if path.is_file() and path.stat().st_size == 0:
        raise MobatlasError(f"{path}: the file is empty")
    if not is_csv(path):
        parquet_schema(path)
    return engine.read(path)


def read(path: Path, engine: Engine, options: NoOptions) -> Source:
    if require_path(path).is_file():
        return Source(where=str(path), visits=open_table(path, engine))
    found = {name: find_table(path, name) for name in ("visits", "people", "pois")}
    if not any(found.values()) and any(path.glob("*.parquet")):
        found["visits"] = path  # the parts of one table, as Spark writes them
    if found["visits"] is None:
        raise MobatlasError(f"{path}: holds no visits.parquet or visits.csv")
    tables = {name: open_table(file, engine) if file else None for name, file in found.items()}
    return Source(
        str(found["visits"]),
        tables["visits"],
        people=tables["people"],
        pois=tables["pois"],
        people_where=str(found["people"]),
        pois_where=str(found["pois"]),
    )


READER = Reader(name="plain", description="the canonical tables as Parquet or CSV", read=read)
