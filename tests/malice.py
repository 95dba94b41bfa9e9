"""A pickle that shows whether somebody ran it."""

from __future__ import annotations

from pathlib import Path
from typing import Any


class Malice:
    """Unpickled, it leaves a marker."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.marker,)
