"""Faults in every long command: one sentence each, no partial file, and resuming gives equal bytes.

Signals arrive before chosen file operations; in `make test-slow` before every one of them, and at
random moments as well.
"""

from __future__ import annotations

import fcntl
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.commands import finish_cold, start_cold
from tests.faults import (
    CLOCK_RUNS_BACK,
    COMMANDS,
    LITTLE_MEMORY,
    SMALL_FILES,
    Command,
    World,
    check_one_sentence,
    check_whole,
    contents,
    leftovers,
    operations,
    tiny_world,
    watched,
)

CELLS = """
import functools, bench.phase2 as phase2
city = {"users": 400, "pois": 16, "districts": 3, "days": 9}
phase2.run = functools.partial(phase2.run, city=city)
"""
TINY = (
    *(
        "length=12",
        "autoencoder.steps=4",
        "autoencoder.width=32",
        "autoencoder.latent=8",
        "denoiser.steps=4",
    ),
    *(
        "denoiser.width=32",
        "denoiser.depth=1",
        "denoiser.heads=2",
        "weighted_fit.steps=4",
        "weighted_fit.warmup=1",
    ),
    *("calibration.pool=64", "calibration.candidates=4", "diffusion.steps=2", "finetune.steps=2"),
)
BENCHMARK = Command(
    "benchmark",
    lambda _: [
        *("bench", "phase2", "--seeds", 1, "--partition", "messy", "--quiet"),
        *(word for each in TINY for word in ("--set", each)),
    ],
    before=CELLS,
)
LONG = [*COMMANDS.values(), BENCHMARK]


def also_slow(quick: tuple[str, ...]) -> pytest.MarkDecorator:
    """All long commands, those that are not named here in `make test-slow`."""
    marks = [
        pytest.param(each, id=each.name, marks=() if each.name in quick else pytest.mark.slow)
        for each in LONG
    ]
    return pytest.mark.parametrize("command", marks)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return tiny_world(tmp_path_factory.getbasetemp())


@cache
def undisturbed(world: World, name: str) -> tuple[dict[str, Any], int]:
    """The result of a command and its number of file operations; a run is the world itself."""
    if name == "run":
        return contents(world.run), operations(world.root)
    command = next(each for each in LONG if each.name == name)
    folder = world.root / f"undisturbed-{name}-{os.getpid()}"
    folder.mkdir()
    done = world.warm.run(*command.line(world, folder), before=command.before + watched(folder))
    assert done.code == 0, done.err
    return contents(folder / command.out), operations(folder)


def finished(command: Command, folder: Path) -> bool:
    """Whether there is nothing to go on with: the lock may be left, the result is there."""
    out = folder / command.out
    if command.name in ("run", "benchmark"):
        return False
    return out.exists() and (
        out.is_file() or ((out / "manifest.json").exists() and not (out / "training").exists())
    )


def start_again(command: Command, folder: Path) -> None:
    out = folder / command.out
    shutil.rmtree(out) if out.is_dir() else out.unlink()


def end(world: World, command: Command, folder: Path) -> None:
    """Let it finish; it is as if nothing had happened, and nothing is left over."""
    done = world.warm.run(*command.line(world, folder, *command.goes_on), before=command.before)
    assert done.code == 0, done.err
    assert contents(folder / command.out) == undisturbed(world, command.name)[0]
    assert leftovers(folder) == []
    assert [path.name for path in folder.iterdir()] == [command.out]


def kill_before(world: World, command: Command, folder: Path, moments: list[int]) -> None:
    for at in moments:
        before = command.before + watched(folder, at)
        code = world.warm.run(*command.line(world, folder, *command.goes_on), before=before).code
        assert code in (0, -signal.SIGKILL)  # what was finished before leaves less to do
        check_whole(folder)
        if finished(command, folder):
            assert contents(folder / command.out) == undisturbed(world, command.name)[0]
            start_again(command, folder)
    end(world, command, folder)


@also_slow(tuple(COMMANDS))
def test_killed_before_two_file_operations_it_ends_in_the_same_bytes(
    world: World, tmp_path: Path, command: Command
) -> None:
    count = undisturbed(world, command.name)[1]
    kill_before(world, command, tmp_path, random.Random(command.name).sample(range(2, count), 2))


@pytest.mark.slow
@pytest.mark.parametrize("command", LONG, ids=lambda each: each.name)
def test_killed_before_any_file_operation_it_ends_in_the_same_bytes(
    world: World, tmp_path: Path, command: Command
) -> None:
    count = undisturbed(world, command.name)[1]
    kill_before(world, command, tmp_path, list(range(1, count + 1, max(1, count // 40))))


@pytest.mark.slow
@pytest.mark.parametrize("command", LONG, ids=lambda each: each.name)
def test_killed_at_random_moments_it_ends_in_the_same_bytes(
    world: World, tmp_path: Path, command: Command
) -> None:
    """While engines write by themselves, unseen by Python."""
    folder, dice, start = tmp_path / "killed", random.Random(command.name), time.monotonic()
    folder.mkdir()
    assert world.warm.run(*command.line(world, tmp_path), before=command.before).code == 0
    longest = time.monotonic() - start
    for _ in range(6):
        running = world.warm.start(
            *command.line(world, folder, *command.goes_on), before=command.before
        )
        time.sleep(dice.uniform(0, longest))
        assert running.signal(signal.SIGKILL).code in (0, -signal.SIGKILL)
        check_whole(folder)
        if finished(command, folder):
            start_again(command, folder)
    end(world, command, folder)


@pytest.mark.parametrize(
    "command",
    [
        COMMANDS["simulate"],
        pytest.param(COMMANDS["prepare"], marks=pytest.mark.slow),
        pytest.param(COMMANDS["regions"], marks=pytest.mark.slow),
    ],
    ids=lambda each: each.name,
)
def test_killed_while_it_overwrites_it_loses_neither_the_old_nor_the_new(
    world: World, tmp_path: Path, command: Command
) -> None:
    """Between the two renames the output is missing; the next run restores the old folder first."""
    out = tmp_path / command.out
    assert world.warm.run(*command.line(world, tmp_path)).code == 0
    old, count = contents(out), undisturbed(world, command.name)[1]
    for at in range(count - 4, count + 4):
        world.warm.run(*command.line(world, tmp_path, "--overwrite"), before=watched(tmp_path, at))
        if not out.exists():
            refused = world.warm.run(*command.line(world, tmp_path))
            assert (refused.code, "exists already" in refused.said) == (2, True)
        check_whole(tmp_path)
        assert contents(out) == old
    assert world.warm.run(*command.line(world, tmp_path, "--overwrite")).code == 0
    assert leftovers(tmp_path) == []


@also_slow(("supervise", "generate"))
def test_ctrl_c_is_one_sentence_and_the_rest_ends_in_the_same_bytes(
    world: World, tmp_path: Path, command: Command
) -> None:
    count = undisturbed(world, command.name)[1]
    for at in random.Random(command.name).sample(range(2, count), 3):
        before = command.before + watched(tmp_path, at, signal.SIGINT)
        stopped = world.warm.run(*command.line(world, tmp_path, *command.goes_on), before=before)
        assert stopped.code in (0, 130), stopped.err
        if stopped.code:
            check_one_sentence(stopped)
            assert "stopped" in stopped.said
        assert all(name.endswith(".lock") for name in leftovers(tmp_path)), (
            "the interrupt came as the lock went"
        )
        if finished(command, tmp_path):
            start_again(command, tmp_path)
    end(world, command, tmp_path)


def test_ctrl_c_while_it_imports_is_one_sentence() -> None:
    """Engines and torch take seconds to import."""
    process = start_cold("bench", "phase2", "--help")
    time.sleep(0.7)
    process.send_signal(signal.SIGINT)
    stopped = finish_cold(process)
    assert "Traceback" not in stopped.err
    assert stopped.code == 0 or (stopped.code == 130 and "stopped" in stopped.said), stopped.err


def test_ctrl_c_within_what_is_executed_ends_with_its_exit_code(tmp_path: Path) -> None:
    """After an interrupt inside exec(), Python exits by the signal, not by our exit code."""
    (tmp_path / "interrupted.py").write_text(
        "import mobatlas.cli as cli\n"
        "stopped = cli._catch_signals()\n"
        "try:\n"
        "    exec('import os, signal; os.kill(os.getpid(), signal.SIGINT)')\n"
        "except BaseException:\n"
        "    cli._fail('mobatlas', 'stopped', 128 + stopped[0])\n"
    )
    command = [sys.executable, "-m", "interrupted"]
    assert subprocess.run(command, cwd=tmp_path, capture_output=True, check=False).returncode == 130


@also_slow(("train", "generate", "report"))
def test_a_full_disk_is_one_sentence_and_the_rest_ends_in_the_same_bytes(
    world: World, tmp_path: Path, command: Command
) -> None:
    largest = max(path.stat().st_size for path in _files(world, command))
    for size in (largest - 1, max(2_000, largest // 2)):
        full = world.warm.run(
            *command.line(world, tmp_path, *command.goes_on),
            before=command.before + SMALL_FILES.format(size=size),
        )
        if full.code == 0:  # only what it says went over the limit
            assert finished(command, tmp_path)
            start_again(command, tmp_path)
            continue
        check_one_sentence(full)
        assert "make room" in full.said
        assert leftovers(tmp_path) == []
        check_whole(tmp_path)
    end(world, command, tmp_path)


def _files(world: World, command: Command) -> Iterator[Path]:
    undisturbed(world, command.name)
    made = world.root / f"undisturbed-{command.name}-{os.getpid()}" / command.out
    out = world.run if command.name == "run" else made
    return (path for path in (out.rglob("*") if out.is_dir() else [out]) if path.is_file())


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Of a quarter of a megabyte."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = shutil.which("mount")
    made = mount and subprocess.run(
        [mount, "-t", "tmpfs", "-o", "size=256k", "tmpfs", place], capture_output=True
    )
    if not made or made.returncode:
        pytest.skip("only root may mount a small disk")
    yield place
    subprocess.run(["umount", place], check=True)


def test_a_disk_that_fills_up_is_one_sentence(world: World, small_disk: Path) -> None:
    command = COMMANDS["prepare"]
    (small_disk / "other").write_bytes(bytes(180_000))
    full = world.warm.run(*command.line(world, small_disk))
    assert full.code == 1
    check_one_sentence(full)
    assert "the disk is full" in full.said
    assert [path.name for path in small_disk.iterdir()] == ["other"]


@pytest.mark.parametrize(
    ("name", "asks"),
    [("simulate", ("--users", 5_000_000)), ("train", ("--set", "training.batch=1000000"))],
)
def test_too_little_memory_is_one_sentence_and_leaves_nothing(
    world: World, tmp_path: Path, name: str, asks: tuple[object, ...]
) -> None:
    command = COMMANDS[name]
    failed = world.warm.run(
        *command.line(world, tmp_path, *asks), before=LITTLE_MEMORY.format(more=2**26)
    )
    assert failed.code == 1, failed.err
    check_one_sentence(failed)
    assert "not enough memory" in failed.said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["generate", "report"])
def test_however_little_memory_there_is_a_sentence_or_a_whole_result(
    world: World, tmp_path: Path, name: str
) -> None:
    """With very little memory the C library ends the process; no partial file stays."""
    command, codes = COMMANDS[name], []
    for power in (18, 19, 20, 21, 22, 23):
        folder = tmp_path / str(power)
        folder.mkdir()
        ended = world.warm.run(
            *command.line(world, folder), before=LITTLE_MEMORY.format(more=2**power)
        )
        codes.append(ended.code)
        if ended.code == 1:
            check_one_sentence(ended)
            assert "not enough memory" in ended.said
        if ended.code != 0:
            assert ended.code != 2, f"bad input was blamed: {ended.err}"
            assert not (folder / command.out).exists()
    assert 1 in codes, codes


def test_an_engine_that_dies_for_want_of_memory_leaves_no_half_dataset(
    world: World, tmp_path: Path
) -> None:
    """DuckDB may end the process without a message; the next run is not affected."""
    command = COMMANDS["prepare"]
    failed = world.warm.run(*command.line(world, tmp_path), before=LITTLE_MEMORY.format(more=2**24))
    assert failed.code != 0
    assert not (tmp_path / "out").exists()
    end(world, command, tmp_path)


@also_slow(tuple(command.name for command in LONG if command is not BENCHMARK))
def test_a_second_process_is_refused(world: World, tmp_path: Path, command: Command) -> None:
    if command is BENCHMARK:
        pytest.skip("benchmarks may share a folder: their cells are locked one by one")
    with (tmp_path / f".{command.out}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        refused = world.warm.run(*command.line(world, tmp_path))
    check_one_sentence(refused)
    assert (refused.code, "another mobatlas process is writing it" in refused.said) == (2, True)
    assert [path.name for path in tmp_path.iterdir()] == [f".{command.out}.lock"]


@pytest.mark.slow
def test_of_two_processes_that_start_together_one_finishes_and_one_is_refused(
    world: World, tmp_path: Path
) -> None:
    command = COMMANDS["run"]
    both = [start_cold(*command.line(world, tmp_path)) for _ in range(2)]
    ends = sorted((finish_cold(process) for process in both), key=lambda outcome: outcome.code)
    assert [each.code for each in ends] == [0, 2], ends
    check_one_sentence(ends[1])
    assert contents(tmp_path / "out") == undisturbed(world, "run")[0]


@also_slow(("train",))
def test_a_clock_that_runs_back_changes_nothing(
    world: World, tmp_path: Path, command: Command
) -> None:
    """Nor do files from the future: what is newest is told by names and steps."""
    if command.goes_on:
        before = (
            command.before
            + CLOCK_RUNS_BACK
            + watched(tmp_path, undisturbed(world, command.name)[1] // 2)
        )
        assert world.warm.run(*command.line(world, tmp_path), before=before).code == -signal.SIGKILL
        for number, path in enumerate(sorted(tmp_path.rglob("*"))):
            os.utime(path, (4e9 - number, 4e9 - number))
    end(world, replace(command, before=command.before + CLOCK_RUNS_BACK), tmp_path)


@pytest.mark.parametrize("name", ["train", "supervise", "generate"])
def test_a_gpu_that_is_not_there_is_one_sentence(world: World, tmp_path: Path, name: str) -> None:
    hidden = "import os; os.environ['CUDA_VISIBLE_DEVICES'] = ''"
    refused = world.warm.run(
        *COMMANDS[name].line(world, tmp_path, "--accelerator", "cuda"), before=hidden
    )
    check_one_sentence(refused)
    assert (
        refused.code,
        "--accelerator cuda: this machine has no such device" in refused.said,
    ) == (
        2,
        True,
    )
    assert list(tmp_path.iterdir()) == []
