"""Commands as a user types them, in processes that can be killed, and a small trained model."""

from __future__ import annotations

import atexit
import functools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import yaml

from mobatlas.data.dataset import TrajectoryDataset
from mobatlas.io.manifest import read_manifest
from tests.tiny import OPTIONS, small_city

FAMILY = "latent-diffusion"
BRIEF = {"steps": 60, "batch": 16}
CONFIG: dict[str, Any] = {
    "train": {
        "generator": FAMILY,
        "options": {
            **OPTIONS[FAMILY],
            "autoencoder": OPTIONS[FAMILY]["autoencoder"] | BRIEF,
            "denoiser": OPTIONS[FAMILY]["denoiser"] | BRIEF,
        },
    }
}
FILES = [
    "anchors.json",
    "config.json",
    "manifest.json",
    "metrics.jsonl",
    "vocabulary.parquet",
    "weights.safetensors",
]
SAME = ["anchors.json", "config.json", "vocabulary.parquet", "weights.safetensors"]
CALIBRATED = [*FILES, "calibration.json", "calibration.safetensors", "group_means.parquet"]
DIFFERENT = ["manifest.json", "metrics.jsonl"]  # times
OFTEN = ("--checkpoint-seconds", 0.2)
PATIENCE = 600  # seconds, on a machine that does other things as well
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}
# Importing torch takes longer than these commands. This process has imported it and forks for each
# command that it receives. It reaps a child only when asked to, so that its process id stays valid.
WARM = """
import gc, json, os, sys
from mobatlas.cli import main
import bench.__main__, bench.commands, mobatlas.cli.commands
import lightning_fabric, mobatlas.pipeline.models
from mobatlas.generators.protocol import family_of
family_of("latent-diffusion")
gc.freeze()
print("ready", flush=True)
while line := sys.stdin.readline():
    arguments, out, err, before = json.loads(line)
    child = os.fork()
    if not child:
        for stream, path in ((0, os.devnull), (1, out), (2, err)):
            os.dup2(os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC), stream)
        program = "bench" if arguments[:1] == ["bench"] else "mobatlas"
        sys.argv, code = [program, *arguments[program == "bench":]], 0
        exec(before)
        try:
            bench.__main__.main() if program == "bench" else main()
        except SystemExit as end:
            code = end.code or 0
        sys.stdout.flush()
        os._exit(code)  # to take all modules down takes longer than to refuse a bad option
    print(child, flush=True)
    sys.stdin.readline()
    _, status, used = os.wait4(child, 0)
    seconds = used.ru_utime + used.ru_stime
    print(os.waitstatus_to_exitcode(status), seconds, used.ru_maxrss / 1024, flush=True)
os._exit(0)
"""


@dataclass(frozen=True)
class Outcome:
    """What a command came to."""

    code: int
    out: str
    err: str
    seconds: float = 0.0  # of a processor
    peak_mb: float = 0.0  # of memory, with what the process was warmed up with

    @property
    def said(self) -> str:
        """The last line on stderr, the sentence of a failure."""
        return self.err.strip().splitlines()[-1] if self.err.strip() else ""


@dataclass(frozen=True)
class Running:
    """A command under way."""

    pid: int
    finish: Callable[[], Outcome]

    def signal(self, number: signal.Signals) -> Outcome:
        os.kill(self.pid, number)
        return self.finish()


class Warm:
    """Runs commands in processes that have imported torch already."""

    def __init__(self, folder: Path, first: str = "") -> None:
        """`first` is Python that the process runs before it is warm."""
        self._out = folder / "stdout"
        self._err = folder / "stderr"
        self._server = subprocess.Popen(
            [sys.executable, "-c", first + WARM],
            env=ENVIRONMENT,
            stdin=-1,
            stdout=-1,
            text=True,
            bufsize=1,
        )
        assert self._server.stdin and self._server.stdout
        self._ask = self._server.stdin
        self._answer = self._server.stdout
        assert self._answer.readline() == "ready\n"

    def start(self, *arguments: object, before: str = "") -> Running:
        """Start a command, after some Python that makes its world worse."""
        self._ask.write(
            json.dumps([[str(a) for a in arguments], str(self._out), str(self._err), before]) + "\n"
        )
        pid = int(self._answer.readline())
        alarm = threading.Timer(PATIENCE, os.kill, (pid, signal.SIGKILL))
        alarm.start()

        def finish() -> Outcome:
            self._ask.write("\n")
            code, seconds, peak = self._answer.readline().split()
            alarm.cancel()
            out, err = (path.read_text(errors="replace") for path in (self._out, self._err))
            return Outcome(int(code), out, err, float(seconds), float(peak))

        return Running(pid, finish)

    def run(self, *arguments: object, before: str = "") -> Outcome:
        return self.start(*arguments, before=before).finish()

    def close(self) -> None:
        self._ask.close()
        self._server.wait()


def start_cold(*arguments: object) -> subprocess.Popen[str]:
    """The command as the shell starts it, in a group of its own."""
    words = list(map(str, arguments))
    module = words if words[:1] == ["bench"] else ["mobatlas", *words]
    command = [sys.executable, "-m", *module]
    return subprocess.Popen(
        command,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish_cold(process: subprocess.Popen[str]) -> Outcome:
    try:
        out, err = process.communicate(timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return Outcome(process.returncode, out, err)


@dataclass(frozen=True)
class World:
    """A dataset, a model that nothing happened to, and how it was asked for."""

    root: Path
    dataset: TrajectoryDataset
    config: Path
    model: Path
    report: dict[str, Any]
    warm: Warm
    seconds: float  # that the same training takes in a warm process

    def train(self, out: Path, *more: object) -> list[object]:
        return ["train", self.dataset.path, "--out", out, "--config", self.config, "--quiet", *more]

    def supervise(self, out: Path, *more: object) -> list[object]:
        small = ("--set", "calibration.pool=64", "--set", "calibration.candidates=2")
        options = ["--strategy", "strong", *small, "--out", out, "--quiet", *more]
        return ["supervise", self.model, *options]


@functools.cache
def trained_world(base: Path) -> World:
    """A trained model, once per session: training takes longer than most tests of it."""
    root = Path(mkdtemp(prefix="world-", dir=base))
    dataset = small_city(root, users=120)
    config = root / "run.yaml"
    config.write_text(yaml.safe_dump(CONFIG))
    warm = Warm(Path(mkdtemp(prefix="warm-", dir=base)))
    atexit.register(warm.close)
    command = ["train", dataset.path, "--config", config, "--quiet", "--json", "--out"]
    first = finish_cold(start_cold(*command, root / "model"))
    assert first.code == 0, first.err
    start = time.monotonic()
    assert warm.run(*command, root / "again").code == 0
    seconds = time.monotonic() - start
    return World(root, dataset, config, root / "model", json.loads(first.out), warm, seconds)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def snapshot(folder: Path) -> dict[str, tuple[int, int]]:
    """Every file and folder below, with its size and when it was written."""
    return {
        path.relative_to(folder).as_posix(): (0, 0)
        if path.is_dir()
        else (path.stat().st_size, path.stat().st_mtime_ns)
        for path in folder.rglob("*")
    }


def lines(model: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (model / "metrics.jsonl").read_text().splitlines()]


def check_same(model: Path, other: Path) -> None:
    """Finished, and not to be told from the other one, except by when it was made."""
    assert names(model) == names(other) and set(FILES) <= set(names(model)), names(model)
    for name in set(names(model)).difference(DIFFERENT):
        assert (model / name).read_bytes() == (other / name).read_bytes(), name
    ours, theirs = (read_manifest(path, "model") for path in (model, other))
    assert (ours.content_hash, ours.config, ours.seed) == (
        theirs.content_hash,
        theirs.config,
        theirs.seed,
    )
    timing = ("seconds", "examples_per_second")
    plain = [
        [{k: v for k, v in line.items() if k not in timing} for line in lines(path)]
        for path in (model, other)
    ]
    assert plain[0] == plain[1], "metrics.jsonl"


def wait_until(happened: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not happened():
        assert time.monotonic() < deadline, f"{what}: did not happen"
        time.sleep(0.001)


def last_step(model: Path, stage: str) -> int:
    """Of the newest checkpoint of a stage."""
    steps = [
        path.stem.removeprefix(f"{stage}-")
        for path in (model / "training").glob(f"{stage}-*.safetensors")
    ]
    return max((int(step) for step in steps if step.isdigit()), default=0)


def kill_until(
    kills: int, command: list[object], out: Path, whole: Path, longest: float, warm: Warm
) -> None:
    """Kill a command at `kills` random moments, start over if it was faster, then let it end."""
    moments = random.Random(kills)
    done = 0
    while done < kills:
        running = warm.start(*command, "--resume")
        time.sleep(moments.uniform(0, longest))
        code = running.signal(signal.SIGKILL).code
        assert code in (0, -signal.SIGKILL)
        done += code != 0
        if code == 0:
            check_same(out, whole)
            shutil.rmtree(out)
    finished = warm.run(*command, "--resume")
    assert finished.code == 0, finished.err
    check_same(out, whole)
    assert names(out.parent) == [out.name], "no lock, nothing half-written"


Refusal = Callable[..., str]  # `refusal_of` for a world and a folder beside it


def refusal_of(world: World, tmp_path: Path, *command: object) -> str:
    """The sentence that refuses a command, after a check that no file changed."""
    before = snapshot(world.root), snapshot(tmp_path)
    refused = world.warm.run(*command)
    assert refused.code == 2, refused.err
    assert refused.out == "", refused.out
    assert refused.err.startswith("mobatlas: ") and refused.err.count("\n") == 1, refused.err
    assert (snapshot(world.root), snapshot(tmp_path)) == before, "something was written or removed"
    return refused.said
