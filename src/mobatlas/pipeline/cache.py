"""Stages of a long run: what is finished and still wanted as it was is not made again."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mobatlas.errors import MobatlasError
from mobatlas.io.manifest import file_hash, read_manifest, write_json

log = logging.getLogger("mobatlas")
FILE = "stages.json"


@dataclass
class Stages:
    """The stages of one folder, each with the hash of all that it was made of."""

    folder: Path
    anew: bool = False  # make everything again
    _known: dict[str, dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        try:
            self._known = json.loads((self.folder / FILE).read_text(encoding="utf-8"))
        except (
            OSError,
            ValueError,
            RecursionError,
        ):  # nothing yet, or nothing that can be read: all is made again
            self._known = {}
        if not isinstance(self._known, dict) or not all(
            isinstance(each, dict) for each in self._known.values()
        ):
            self._known = {}

    def run(self, name: str, out: Path, of: Mapping[str, Any], make: Callable[[bool], Any]) -> Path:
        """`out`, made of what `of` says; `make` is told whether to go on with what it began for the same."""
        key = hashlib.sha256(json.dumps(of, sort_keys=True, default=str).encode()).hexdigest()
        last = {} if self.anew else self._known.get(name, {})
        if last.get("key") == key and last.get("done") and out.exists():
            log.info("%s: is there already", name)
            return out
        same = last.get("key") == key
        self._note(name, key, done=False)
        make(same)
        self._note(name, key, done=True)
        return out

    def _note(self, name: str, key: str, *, done: bool) -> None:
        self._known[name] = {"key": key, "done": done}
        self.folder.mkdir(parents=True, exist_ok=True)
        write_json(self.folder / FILE, self._known)


def refuse_other(folder: Path) -> None:
    """Refuse a folder that was not filled by stages: their file is the first thing that they write.

    What is hidden does not count: a process that was killed while it wrote that file leaves nothing else.
    """
    held = (
        [path.name for path in folder.iterdir() if not path.name.startswith(".")]
        if folder.is_dir()
        else []
    )
    if held and FILE not in held:
        raise MobatlasError(f"{folder}: holds something that is not a run; choose another --out")


def content_of(path: Path) -> str:
    """What a file or a folder holds, as a hash."""
    if path.is_file():
        return file_hash(path)
    found = sorted(each for each in path.rglob("*") if each.is_file())
    parts = [f"{each.relative_to(path).as_posix()} {file_hash(each)}" for each in found]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def made(folder: Path, kind: str) -> str:
    """What a folder of ours holds: the hash that its manifest has."""
    return read_manifest(folder, kind).content_hash
