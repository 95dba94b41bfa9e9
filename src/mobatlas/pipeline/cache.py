"""The step cache of a run: a finished step whose inputs have not changed is not computed again."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mobatlas.errors import MobatlasError
from mobatlas.io.manifest import file_hash, write_json

log = logging.getLogger("mobatlas")
STEPS_FILE = "steps.json"


@dataclass
class StepCache:
    """The steps of one folder, each with a hash of its inputs.

    Examples
    --------
    >>> cache = StepCache(Path("run"))  # doctest: +SKIP
    >>> cache.run("city", Path("run/city"), {"seed": 0}, write_city)  # doctest: +SKIP
    """

    folder: Path
    recompute: bool = False  # compute every step again
    _steps: dict[str, dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        try:
            steps = json.loads((self.folder / STEPS_FILE).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):  # missing or damaged: compute everything
            steps = {}
        if isinstance(steps, dict) and all(isinstance(step, dict) for step in steps.values()):
            self._steps = steps

    def run(
        self, name: str, out: Path, inputs: Mapping[str, Any], compute: Callable[[bool], Any]
    ) -> Path:
        """Compute `out` from `inputs` unless it exists; return its path.

        `compute` receives whether an interrupted attempt with the same inputs may be resumed.
        """
        text = json.dumps(inputs, sort_keys=True, default=str)
        key = hashlib.sha256(text.encode()).hexdigest()
        last = {} if self.recompute else self._steps.get(name, {})
        same_inputs = last.get("key") == key
        if same_inputs and last.get("done") and out.exists():
            log.info("%s: already computed", name)
            return out
        self._record(name, key, done=False)
        out.parent.mkdir(parents=True, exist_ok=True)
        compute(same_inputs)
        self._record(name, key, done=True)
        return out

    def _record(self, name: str, key: str, *, done: bool) -> None:
        self._steps[name] = {"key": key, "done": done}
        self.folder.mkdir(parents=True, exist_ok=True)
        write_json(self.folder / STEPS_FILE, self._steps)


def refuse_foreign_folder(folder: Path) -> None:
    """Refuse a folder that holds files but no step cache, which is the first file of a run.

    Hidden files do not count: a process killed while it writes the cache leaves only those.
    """
    entries = list(folder.iterdir()) if folder.is_dir() else []
    visible = [path.name for path in entries if not path.name.startswith(".")]
    if visible and STEPS_FILE not in visible:
        raise MobatlasError(
            f"{folder}: holds files that are not from a run of this version; choose another --out"
        )


def path_hash(path: Path) -> str:
    """A hash of a file, or of all files in a folder with their names."""
    if path.is_file():
        return file_hash(path)
    files = sorted(each for each in path.rglob("*") if each.is_file())
    lines = [f"{each.relative_to(path).as_posix()} {file_hash(each)}" for each in files]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
