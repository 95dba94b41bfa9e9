"""Training with real signals, a full disk and real processes."""

from __future__ import annotations

import multiprocessing
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mobatlas import MobatlasError
from mobatlas.training.checkpoints import Checkpoints, StageIdentity
from mobatlas.training.devices import launch_fabric
from mobatlas.training.loop import Stopped
from tests.commands import wait_until
from tests.trainers import (
    FINAL,
    at_step,
    lines,
    make_stage,
    make_trainer,
    names,
    train,
    undisturbed_bytes,
)

ROOT = Path(__file__).parents[1]
# Processes start from a server that has already imported torch, which takes longer than the tests.
_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(["lightning_fabric", __name__])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "model" / "training"


@pytest.fixture(scope="module")
def undisturbed() -> bytes:
    return undisturbed_bytes()


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Ctrl-C as Python has it, even where the tests run in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def start(work: Callable[..., None], *arguments: Any) -> BaseProcess:
    process = _processes.Process(target=work, args=arguments)
    process.start()
    return process


def kill(process: BaseProcess) -> None:
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()


def train_quietly(folder: Path, steps: int, checkpoint_steps: int, said: Path) -> None:
    """What a process does: train, and leave its last words in a file."""
    try:
        train(folder, make_stage(steps), checkpoint_steps=checkpoint_steps)
    except MobatlasError as error:
        said.write_text(str(error))
        sys.exit(2)


def test_a_run_killed_at_ten_random_moments_ends_in_the_same_bytes(
    tmp_path: Path, folder: Path
) -> None:
    steps, moments = 1200, random.Random(0)
    train(tmp_path / "whole" / "training", make_stage(steps))
    for number in range(10):
        process = start(train_quietly, folder, steps, 1, tmp_path / "said")
        if number % 2 == 0:  # the others are killed while they start, as likely as not
            wait_for_step(folder, last_step(folder) + moments.randint(1, 15), process)
        time.sleep(moments.uniform(0, 0.1 if number % 2 else 0.005))
        kill(process)
    assert last_step(folder) >= 5 and FINAL not in names(folder), (
        "the kills came too early or too late to matter"
    )
    process = start(train_quietly, folder, steps, 50, tmp_path / "said")
    process.join()
    assert process.exitcode == 0
    assert (folder / FINAL).read_bytes() == (tmp_path / "whole" / "training" / FINAL).read_bytes()
    assert names(folder) == [FINAL]
    assert [line["step"] for line in lines(folder)] == [1, *range(10, steps + 1, 10)]


def last_step(folder: Path) -> int:
    found = names(folder) if folder.exists() else []
    return max((int(name[4:12]) for name in found if name[4:12].isdigit()), default=0)


def wait_for_step(folder: Path, step: int, process: BaseProcess) -> None:
    deadline = time.monotonic() + 60
    while last_step(folder) < step:
        assert process.is_alive() and time.monotonic() < deadline
        time.sleep(0.001)


def checkpoints_in(folder: Path) -> Checkpoints:
    return Checkpoints(folder, StageIdentity("mlp", 0, {}, {}))


def write_for_ever(folder: Path, step: int) -> None:
    while True:
        step += 1
        tensors = {
            str(part): torch.full((256, 1024), float(step)) for part in range(4)
        }  # 4 MB that tell their step
        checkpoints_in(folder).save(step, tensors, {})


def test_the_newest_checkpoint_is_whole_after_twenty_kills_while_writing(tmp_path: Path) -> None:
    moments, last, halves = random.Random(1), 0, 0
    for number in range(20):
        process = start(write_for_ever, tmp_path, last)
        wait_for_step(tmp_path, last + 1, process)
        if number % 2:
            time.sleep(moments.uniform(0, 0.03))
        else:  # however busy the machine is
            wait_until(lambda: any(tmp_path.glob(".*.partial")), "a file half-written")
        kill(process)
        halves += len(list(tmp_path.glob(".*.partial")))
        found = checkpoints_in(tmp_path).newest()
        assert found is not None and found.step > last
        assert all((tensor == found.step).all() for tensor in found.tensors.values())
        assert len(list(tmp_path.glob("mlp-*"))) <= 3  # two, and one that the kill kept from going
        last = found.step
        checkpoints_in(tmp_path).sweep()
        assert not list(tmp_path.glob(".*"))
    assert halves > 0, "no kill came while a file was being written"


def test_ctrl_c_saves_the_step_and_says_how_to_go_on(tmp_path: Path, folder: Path) -> None:
    steps, said = 300, tmp_path / "said"
    train(tmp_path / "whole" / "training", make_stage(steps))
    process = start(train_quietly, folder, steps, 20, said)
    wait_for_step(folder, 20, process)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGINT)
    process.join()
    assert process.exitcode == 2
    step = last_step(folder)
    assert (
        said.read_text() == f"stopped at step {step} of {steps} of the mlp; continue with --resume"
    )
    train(folder, make_stage(steps))
    assert (folder / FINAL).read_bytes() == (tmp_path / "whole" / "training" / FINAL).read_bytes()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_waits_for_the_end_of_the_step_and_the_handlers_come_back(
    folder: Path, undisturbed: bytes, ctrl_c: None, number: signal.Signals
) -> None:
    before = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(
        Stopped, match=r"stopped at step 8 of 12 of the mlp; continue with --resume"
    ) as stopped:
        train(folder, make_stage(loss=at_step(7, lambda: signal.raise_signal(number))))
    assert stopped.value.signal == number
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == before
    with pytest.raises(
        Stopped, match=r"stopped after the mlp"
    ):  # its work is done, the next stage's is not
        train(folder, make_stage(loss=at_step(11, lambda: signal.raise_signal(number))))
    assert (folder / FINAL).read_bytes() == undisturbed


def test_a_second_ctrl_c_stops_at_once(folder: Path, undisturbed: bytes, ctrl_c: None) -> None:
    def twice() -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        train(folder, make_stage(loss=at_step(7, twice)), checkpoint_steps=5)
    assert names(folder) == ["mlp-00000005.safetensors"]
    train(folder)
    assert (folder / FINAL).read_bytes() == undisturbed


def fill_the_disk(folder: Path, said: Path) -> None:
    """From step 8 on no file may grow past 1000 bytes."""
    full = at_step(
        7, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
    )
    try:
        train(folder, make_stage(loss=full), checkpoint_steps=3)
    except MobatlasError as error:
        said.write_text(str(error))


def test_a_full_disk_leaves_the_last_checkpoint_and_no_half_file(
    tmp_path: Path, folder: Path, undisturbed: bytes
) -> None:
    process = start(fill_the_disk, folder, tmp_path / "said")
    process.join()
    path = folder / "mlp-00000009.safetensors"
    assert (tmp_path / "said").read_text() == (
        f"{path}: could not be written (File too large); the checkpoint of step 6 is intact; make "
        "room, then continue with --resume"
    )
    assert names(folder) == ["mlp-00000003.safetensors", "mlp-00000006.safetensors"]
    train(folder)
    assert (folder / FINAL).read_bytes() == undisturbed


IN_TWO_PROCESSES = """
import atexit, os, signal, sys
from dataclasses import replace
from pathlib import Path
import torch
from mobatlas.training.loop import Stopped
from tests.trainers import at_step, make_stage, make_trainer
folder = Path(sys.argv[1])
talking = torch.distributed.is_initialized
# runs last
atexit.register(lambda: (folder / f"talking-{trainer.share.rank}").write_text(str(talking())))
trainer = make_trainer(folder, devices=2, log_every=1, precision="32-true")
stage = make_stage(dropout=0.0, examples_per_step=16)
trainer.path("cache.npy").touch()
tell_one = at_step(6, lambda: trainer.share.rank == 1 and os.kill(os.getpid(), signal.SIGTERM))
try:
    trainer.run(replace(stage, loss=tell_one))
except Stopped as stopped:
    (folder / f"said-{trainer.share.rank}").write_text(str(stopped))
trainer.run(stage)
trainer.run(replace(stage, name="again"))
"""


def test_two_processes_go_down_the_same_losses_as_one(tmp_path: Path, folder: Path) -> None:
    stage = make_stage(dropout=0.0)
    one = make_trainer(tmp_path / "one" / "training", log_every=1, precision="32-true")
    for name in ("mlp", "again"):  # two stages of one network
        one.run(replace(stage, name=name))
    script = tmp_path / "script.py"
    script.write_text(IN_TWO_PROCESSES)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    run = subprocess.run(
        [sys.executable, script, folder],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    said = "stopped at step 7 of 12 of the mlp; continue with --resume"
    assert [(folder / f"said-{rank}").read_text() for rank in range(2)] == [said, said]
    parted = [(folder / f"talking-{rank}").read_text() for rank in range(2)]
    assert parted == ["False", "False"], (
        "threads that talk while Python ends abort the process now and then"
    )
    assert sorted(path.name for path in folder.glob("*.npy")) == ["cache-1.npy", "cache.npy"], (
        "each has its own"
    )
    alone, together = lines(tmp_path / "one" / "training"), lines(folder)
    assert [(line["stage"], line["step"]) for line in together] == [
        (line["stage"], line["step"]) for line in alone
    ]
    for key in ("loss", "grad_norm", "lr"):
        assert [line[key] for line in together] == pytest.approx(
            [line[key] for line in alone], abs=1e-5
        )
    for name in (FINAL, "again-final.safetensors"):
        ours, theirs = load_file(tmp_path / "one" / "training" / name), load_file(folder / name)
        for key, tensor in ours.items():
            torch.testing.assert_close(theirs[key], tensor, atol=1e-5, rtol=1e-5)


def test_processes_of_another_number_than_devices_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")  # as torchrun tells it
    with pytest.raises(
        MobatlasError,
        match="--devices 1: the launcher started 2 processes; start as many as --devices",
    ):
        make_trainer(None)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    with pytest.raises(MobatlasError, match="on one machine"):
        make_trainer(None, devices=2)


def test_a_task_of_a_batch_system_starts_its_own_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning_fabric import Fabric

    said = {
        "NTASKS": "1",
        "JOB_NAME": "train",
        "PROCID": "0",
        "LOCALID": "0",
        "NODEID": "0",
        "NODELIST": "localhost",
    }
    for name, value in said.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setattr(Fabric, "launch", lambda _: None)
    assert launch_fabric("cpu", 2, "auto").world_size == 2
