"""A reader: its name, settings that suit its source, and a function to canonical tables."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ibis import ir
from pydantic import BaseModel

from mobatlas.config import Section, build
from mobatlas.data.prepare.engine import Engine
from mobatlas.data.prepare.tables import is_csv, parquet_schema
from mobatlas.errors import MobatlasError


@dataclass(frozen=True)
class Source:
    """The canonical tables of a source, before validation; times may be text in ISO form."""

    where: str  # the path of the visits, for error messages
    visits: ir.Table
    people: ir.Table | None = None
    pois: ir.Table | None = None
    notes: tuple[str, ...] = ()  # for the summary
    people_where: str = "people"
    pois_where: str = "pois"


class NoOptions(Section):
    """A reader without options of its own."""


@dataclass(frozen=True)
class Reader:
    """The layout of one source."""

    name: str
    description: str
    read: Callable[[Path, Engine, Any], Source]  # (path, engine, options) -> Source
    options: type[BaseModel] = NoOptions
    suggests: Mapping[str, Any] = field(default_factory=dict)  # fields of PrepareConfig

    def open(self, path: Path, engine: Engine, options: Mapping[str, Any]) -> Source:
        """Check the options and read."""
        checked = build(self.options, options, f"options of the reader '{self.name}'")
        return self.read(require_path(path), engine, checked)


def require_path(path: Path) -> Path:
    """Refuse a path that does not exist."""
    if not path.exists():
        raise MobatlasError(f"{path}: no such file or folder")
    return path


def require_one(folder: Path, files: Iterable[Path], expected: str) -> Path:
    """The only file; refuse a folder with none or several."""
    paths = list(files)
    if not paths:
        raise MobatlasError(f"{folder}: the folder contains no {expected}")
    if len(paths) > 1:
        names = ", ".join(path.name for path in paths)
        raise MobatlasError(f"{folder}: several files fit ({names}); give the path of one of them")
    return paths[0]


def open_table(path: Path, engine: Engine) -> ir.Table:
    """Read one table, after a check that its content matches its name."""
    require_path(path)
    if path.is_file() and path.stat().st_size == 0:
        raise MobatlasError(f"{path}: the file is empty")
    if not is_csv(path):
        parquet_schema(path)
    return engine.read(path)
