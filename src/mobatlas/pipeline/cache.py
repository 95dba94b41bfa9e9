"""The step cache of a run: a finished step whose inputs have not changed is not computed again."""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mobatlas.errors import MobatlasError
from mobatlas.io.manifest import file_hash, write_json
from mobatlas.progress import log

STEPS_FILE = "steps.json"


@dataclass(frozen=True)
class StepCache:
    """The steps of one folder, each with a hash of its inputs.

    The file is read again before every step, so several processes can compute different steps.

    Examples
    --------
    >>> cache = StepCache(Path("run"))  # doctest: +SKIP
    >>> cache.run("city", Path("run/city"), {"seed": 0}, write_city)  # doctest: +SKIP
    """

    folder: Path
    recompute: bool = False  # compute every step again

    def is_done(self, name: str, out: Path, inputs: Mapping[str, Any]) -> bool:
        """Return whether `out` exists and was computed from `inputs`."""
        step = {"key": _key(inputs), "done": True}
        return not self.recompute and self._read().get(name) == step and out.exists()

    def has_other_inputs(self, name: str, inputs: Mapping[str, Any]) -> bool:
        """Return whether a step was started or finished with other inputs."""
        step = self._read().get(name)
        return step is not None and step.get("key") != _key(inputs)

    def run(
        self, name: str, out: Path, inputs: Mapping[str, Any], compute: Callable[[bool], Any]
    ) -> Path:
        """Compute `out` from `inputs` unless it exists; return its path.

        `compute` receives whether an interrupted attempt with the same inputs may be resumed.
        """
        if self.is_done(name, out, inputs):
            log.info("%s: already computed", name)
            return out
        key = _key(inputs)
        same_inputs = not self.recompute and self._read().get(name, {}).get("key") == key
        self._record(name, key, done=False)
        out.parent.mkdir(parents=True, exist_ok=True)
        compute(same_inputs)
        self._record(name, key, done=True)
        return out

    def _read(self) -> dict[str, dict[str, Any]]:
        try:
            steps = json.loads((self.folder / STEPS_FILE).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):  # missing or damaged: compute everything
            return {}
        valid = isinstance(steps, dict) and all(isinstance(step, dict) for step in steps.values())
        return steps if valid else {}

    def _record(self, name: str, key: str, *, done: bool) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        steps = {**self._read(), name: {"key": key, "done": done}}
        write_json(self.folder / STEPS_FILE, steps)


def _key(inputs: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(inputs, sort_keys=True, default=str).encode()).hexdigest()


def refuse_foreign_folder(folder: Path) -> None:
    """Refuse a folder that has files but no step cache; a run writes the cache first.

    Hidden files do not count: a process killed while it writes the cache leaves only those.
    """
    entries = list(folder.iterdir()) if folder.is_dir() else []
    visible = [path.name for path in entries if not path.name.startswith(".")]
    if visible and STEPS_FILE not in visible:
        raise MobatlasError(
            f"{folder}: the folder contains files that are not from a run of this version; "
            "choose another --out"
        )


def path_hash(path: Path) -> str:
    """A hash of a file, or of all files in a folder with their names."""
    if path.is_file():
        return file_hash(path)
    files = sorted(each for each in path.rglob("*") if each.is_file())
    lines = [f"{each.relative_to(path).as_posix()} {file_hash(each)}" for each in files]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
