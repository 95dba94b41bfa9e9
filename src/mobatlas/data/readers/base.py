"""What a reader is: a name, the settings its source calls for, and a function from a path to the canonical tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ibis import ir
from pydantic import BaseModel

from mobatlas.config import Section, build
from mobatlas.data.prepare.engine import Engine


@dataclass(frozen=True)
class Source:
    """The canonical tables of one source, before validation; times may still be strings in ISO form."""

    where: str  # named in errors
    visits: ir.Table
    people: ir.Table | None = None
    pois: ir.Table | None = None
    notes: tuple[str, ...] = ()  # what the user should know of how it was read
    people_where: str = "people"
    pois_where: str = "pois"


class NoOptions(Section):
    """A reader without options of its own."""


@dataclass(frozen=True)
class Reader:
    """One source's layout."""

    name: str
    description: str
    read: Callable[[Path, Engine, Any], Source]  # (path, engine, options) -> Source
    options: type[BaseModel] = NoOptions
    suggests: Mapping[str, Any] = field(
        default_factory=dict
    )  # values of PrepareConfig that suit this source

    def open(self, path: Path, engine: Engine, options: Mapping[str, Any]) -> Source:
        """Read with checked options."""
        return self.read(
            path, engine, build(self.options, options, f"options of the reader '{self.name}'")
        )
