"""Faults for commands: signals before a chosen file operation, a full disk, too little memory.

Everything is done to one tiny run, made once a session: its stages are what the commands read.
"""

from __future__ import annotations

import atexit
import fcntl
import functools
import json
import os
import re
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import yaml
from safetensors import safe_open

from mobatlas.io.manifest import read_manifest
from tests.commands import Outcome, Warm

VALUES: dict[str, Any] = {
    "title": "A tiny city",
    "seed": 3,
    "preset": "small",
    "simulate": {
        "users": 130,
        "pois": 16,
        "districts": 3,
        "days": 9,
        "attributes": {"gender": ["M", "F"]},
    },
    "prepare": {"split": {"train": 0.6, "val": 0.2, "test": 0.2}},
    "train": {
        "generator": "autoregressive",
        "options": {
            "length": 12,
            "network": {"depth": 1, "width": 16, "heads": 2, "embedding": 4},
            "training": {"steps": 12, "batch": 16},
        },
    },
    "supervise": {
        "options": {
            "weighted_fit": {"steps": 4, "warmup": 1},
            "calibration": {"pool": 64, "candidates": 4},
        }
    },
    "samples": {"each": 12},
    "strong": False,
    "audit": True,
    "regions": {"demogroups": {"partition": "demogroups"}},
}
ALSO = "import mobatlas.pipeline.run, mobatlas.generators.network_generator\n"
# Every file operation of Python below a folder appends a dot to a file; before a chosen one the
# process receives a signal.
WATCH = """
import os, sys
dots_file = os.open({dots!r}, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
def watch(event, arguments, left=[{at}], dots=dots_file):
    if event not in ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "shutil.rmtree"):
        return
    writes = event != "open" or (arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
    path = arguments[0]
    if writes and {place!r} in os.fsdecode("" if isinstance(path, int) else path):
        os.write(dots, b".")
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), {number})
sys.addaudithook(watch)
"""
SMALL_FILES = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({size}, {size}))"
LITTLE_MEMORY = """
import resource
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + {more}, used + {more}))
"""
CLOCK_RUNS_BACK = """
import itertools, time
moments = itertools.count(2_000_000_000, -3600)
time.time = lambda: float(next(moments))
time.time_ns = lambda: next(moments) * 10**9
"""


@dataclass(frozen=True)
class World:
    """A finished run, and a process to run commands in."""

    root: Path
    warm: Warm

    @property
    def config(self) -> Path:
        return self.root / "run.yaml"

    @property
    def run(self) -> Path:
        return self.root / "run"


@functools.cache
def tiny_world(base: Path) -> World:
    """Made once below the folder of a session, whichever of its processes comes first."""
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    root = shared / "faults"
    root.mkdir(exist_ok=True)
    warm = Warm(Path(mkdtemp(prefix="warm-", dir=base)), ALSO)
    atexit.register(warm.close)
    world = World(root, warm)
    with (root / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (world.run / "report.html").exists():
            world.config.write_text(yaml.safe_dump(VALUES))
            done = warm.run(
                "run", world.config, "--out", world.run, "--quiet", before=watched(root)
            )
            assert done.code == 0, done.err
    return world


@dataclass(frozen=True)
class Command:
    """A long command: its arguments but for --out, what it writes, and how to go on with it."""

    name: str
    arguments: Callable[[World], list[object]]
    out: str = "out"
    goes_on: tuple[str, ...] = ()
    before: str = ""

    def line(self, world: World, folder: Path, *more: object) -> list[object]:
        return [*self.arguments(world), "--out", folder / self.out, *more]


COMMANDS = {
    command.name: command
    for command in (
        Command("simulate", lambda w: ["simulate", "--config", w.config, "--quiet"]),
        Command("prepare", lambda w: ["prepare", w.run / "city", "--config", w.config, "--quiet"]),
        Command("regions", lambda w: ["regions", w.run / "dataset", "--partition", "demogroups"]),
        Command(
            "train",
            lambda w: ["train", w.run / "dataset", "--config", w.config, "--quiet"],
            goes_on=("--resume",),
        ),
        Command(
            "supervise",
            lambda w: [
                "supervise",
                w.run / "baseline",
                w.run / "regions" / "demogroups",
                "--config",
                w.config,
                "--quiet",
            ],
            goes_on=("--resume",),
        ),
        Command(
            "generate",
            lambda w: [
                "generate",
                w.run / "models" / "demogroups",
                "--n",
                40,
                "--group",
                "F",
                "--calibrate",
                "--quiet",
            ],
            out="out.parquet",
        ),
        Command("report", lambda w: ["report", w.run], out="out.html"),
        Command("run", lambda w: ["run", w.config, "--quiet"]),
    )
}


def samples(world: World, name: str = "demogroups") -> Path:
    return world.run / "samples" / f"{name}.parquet"


def watched(folder: Path, at: int = 0, number: signal.Signals = signal.SIGKILL) -> str:
    """Python code that counts file operations below a folder and sends a signal before one."""
    return WATCH.format(at=at, dots=str(folder) + ".dots", place=str(folder), number=int(number))


def operations(folder: Path) -> int:
    """How many were counted."""
    return Path(str(folder) + ".dots").stat().st_size


def contents(out: Path) -> dict[str, Any]:
    """The contents of a result by file, without times, durations and its own path."""
    if out.is_file():
        return {"": _content(out, out)}
    return {
        path.relative_to(out).as_posix(): _content(path, out)
        for path in sorted(out.rglob("*"))
        if path.is_file()
    }


def _content(path: Path, out: Path) -> Any:
    if path.suffix not in (".json", ".jsonl", ".html"):
        return path.read_bytes()
    text = path.read_text().replace(str(out), "OUT")
    if path.suffix == ".html":
        return re.sub(r"[\d.]+ s\b", "SECONDS", text)
    lines = text.splitlines() if path.suffix == ".jsonl" else [text]
    return [_timeless(json.loads(line)) for line in lines]


def _timeless(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            key: _timeless(each)
            for key, each in value.items()
            if not re.search("second|sha256|peak_gb|^path$", key)
        }
    return [_timeless(each) for each in value] if isinstance(value, list) else value


def check_whole(folder: Path) -> None:
    """Check that every file is complete and that every manifest lists what its folder holds."""
    for path in folder.rglob("*"):
        hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if hidden or not path.is_file():
            continue
        if path.name == "manifest.json":
            read_manifest(path.parent, json.loads(path.read_text())["kind"])
        elif path.suffix == ".json":
            json.loads(path.read_text())
        elif path.suffix == ".parquet":
            assert isinstance(pq.read_table(path), pa.Table)
        elif path.suffix == ".safetensors":
            with safe_open(path, "pt") as opened:
                assert list(opened.keys())
        elif path.suffix == ".html":
            assert path.read_text().rstrip().endswith("</html>")


def leftovers(folder: Path) -> list[str]:
    """Hidden files, half-written or forgotten."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob(".*"))


def check_one_sentence(outcome: Outcome) -> None:
    """Check that a command failed with one sentence and without a traceback."""
    assert "Traceback" not in outcome.err, outcome.err
    assert outcome.said.startswith(("mobatlas: ", "python -m bench: ")), outcome.err
    assert len(re.findall(r"^(?:mobatlas|python -m bench): ", outcome.err, re.M)) == 1, outcome.err
    assert "unexpected" not in outcome.said, outcome.said
