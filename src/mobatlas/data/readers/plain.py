"""`plain`: the canonical tables as Parquet or CSV; a file of visits, or a folder of all three."""

from pathlib import Path

from mobatlas.data.prepare.engine import Engine
from mobatlas.data.readers.base import NoOptions, Reader, Source, open_table
from mobatlas.errors import MobatlasError
from mobatlas.io.tables import find_table


def read(path: Path, engine: Engine, options: NoOptions) -> Source:
    """Read visits, and people and pois if the folder has them."""
    if path.is_file():
        return Source(where=str(path), visits=open_table(path, engine))
    files = {name: find_table(path, name) for name in ("visits", "people", "pois")}
    if not any(files.values()) and any(path.glob("*.parquet")):
        files["visits"] = path  # the parts of one table, as Spark writes them
    if files["visits"] is None:
        raise MobatlasError(f"{path}: the folder contains no visits.parquet or visits.csv")
    tables = {name: open_table(file, engine) for name, file in files.items() if file}
    return Source(
        where=str(files["visits"]),
        people_where=str(files["people"]),
        pois_where=str(files["pois"]),
        **tables,
    )


READER = Reader(name="plain", description="the canonical tables as Parquet or CSV", read=read)
