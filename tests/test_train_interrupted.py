"""`mobatlas train`, killed or stopped by a signal: it says how to resume, to equal bytes."""

from __future__ import annotations

import fcntl
import os
import random
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from mobatlas.io.output import checkpoint_folder, is_complete, resumable_folder
from tests.commands import (
    OFTEN,
    World,
    check_same,
    finish_cold,
    kill_until,
    last_step,
    names,
    start_cold,
    trained_world,
    wait_until,
)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return trained_world(tmp_path_factory.getbasetemp())


def test_killed_at_three_random_moments_it_ends_in_the_same_bytes(
    world: World, tmp_path: Path
) -> None:
    command = world.train(tmp_path / "model", *OFTEN)
    kill_until(3, command, tmp_path / "model", world.model, 0.6 * world.seconds, world.warm)


@pytest.mark.slow
def test_killed_at_ten_random_moments_it_ends_in_the_same_bytes(
    world: World, tmp_path: Path
) -> None:
    command = world.train(tmp_path / "model", "--checkpoint-seconds", 0.05)
    kill_until(10, command, tmp_path / "model", world.model, 0.5 * world.seconds, world.warm)


@pytest.mark.slow
def test_killed_as_the_shell_starts_it_it_ends_in_the_same_bytes(
    world: World, tmp_path: Path
) -> None:
    """With all of the start-up that a warm process leaves out."""
    command, moments = world.train(tmp_path / "model", *OFTEN, "--resume"), random.Random(0)
    for _ in range(3):
        process = start_cold(*command)
        time.sleep(moments.uniform(0, 15 + world.seconds))
        process.kill()
        finish_cold(process)
    assert finish_cold(start_cold(*command)).code == 0
    check_same(tmp_path / "model", world.model)


def test_killed_as_each_of_its_files_appears_it_ends_in_the_same_bytes(
    world: World, tmp_path: Path
) -> None:
    """Between the stages and at the very end, where random moments seldom fall."""
    out = tmp_path / "model"
    marker = checkpoint_folder(out) / "unfinished.json"
    for path in (
        marker,
        checkpoint_folder(out) / "autoencoder-final.safetensors",
        checkpoint_folder(out) / "latents.npy",
        checkpoint_folder(out) / "denoiser-final.safetensors",
        out / "weights.safetensors",
        out / "manifest.json",
    ):
        running = world.warm.start(*world.train(out, *OFTEN, "--resume"))
        wait_until(path.exists, path.name)
        assert running.signal(signal.SIGKILL).code in (0, -signal.SIGKILL)
        if path != marker:
            assert (out / "training").exists() or path.name == "manifest.json"
    assert world.warm.run(*world.train(out, *OFTEN, "--resume")).code == 0
    check_same(out, world.model)


def test_a_model_killed_after_its_last_file_is_tidied_up_by_resuming(
    world: World, tmp_path: Path
) -> None:
    """The model is complete, but its lock and its checkpoints are still there."""
    out = tmp_path / "model"
    shutil.copytree(world.model, out)
    checkpoint_folder(out).mkdir()
    for left in (
        checkpoint_folder(out) / "unfinished.json",
        checkpoint_folder(out) / "latents.npy",
        tmp_path / ".model.lock",
    ):
        left.write_text("{}")
    assert world.warm.run(*world.train(out, "--resume")).code == 0
    check_same(out, world.model)
    assert names(tmp_path) == ["model"]


class Killed(BaseException):
    """The process dies here."""


@pytest.mark.parametrize("removals", range(4))
def test_a_model_killed_while_it_sweeps_up_is_tidied_up_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, removals: int
) -> None:
    """Whichever file was the last to go, the next run knows that the rest is to go too."""
    out, unlink = tmp_path / "model", os.unlink
    gone: list[Any] = []

    def until_killed(path: Any, **options: Any) -> None:
        if str(path).endswith((".json", ".npy", ".safetensors")):
            if len(gone) == removals:
                raise Killed
            gone.append(path)
        unlink(path, **options)

    with pytest.raises(Killed), resumable_folder(out, "model") as folder:
        (folder.path / "weights").write_text("w")
        for name in ("autoencoder-final.safetensors", "denoiser-final.safetensors", "latents.npy"):
            (checkpoint_folder(out) / name).write_text("for going on")
        monkeypatch.setattr(os, "unlink", until_killed)
    monkeypatch.undo()
    assert len(gone) == removals
    assert is_complete(out)
    assert names(out) == ["manifest.json", "weights"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_ctrl_c_says_how_to_go_on_and_the_rest_ends_in_the_same_bytes(
    world: World, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    out = tmp_path / "model"
    stage = "autoencoder" if number == signal.SIGINT else "denoiser"
    running = world.warm.start(*world.train(out, *OFTEN))
    wait_until(lambda: last_step(out, stage) > 0, "a checkpoint")
    stopped = running.signal(number)
    step = last_step(out, stage)
    assert (
        stopped.said
        == f"mobatlas: stopped at step {step} of 60 of the {stage}; continue with --resume"
    )
    resumed = world.warm.run(*world.train(out, "--resume"))
    assert resumed.code == 0
    assert f"{stage}: resumes from step {step} of 60" in resumed.err
    check_same(out, world.model)
    assert stopped.code == code


INTERRUPTED_ENCODING = """
import signal
import mobatlas.generators.latent_diffusion.generator as generator
encode = generator.encode_split
generator.encode_split = lambda *arguments: signal.raise_signal(signal.SIGINT) or encode(*arguments)
"""


def test_ctrl_c_between_the_stages_says_how_to_go_on(world: World, tmp_path: Path) -> None:
    """While latents are encoded there is no step to wait for the end of."""
    out = tmp_path / "model"
    stopped = world.warm.run(*world.train(out), before=INTERRUPTED_ENCODING)
    assert stopped.code == 130
    assert world.warm.run(*world.train(out, "--resume")).code == 0
    check_same(out, world.model)
    assert "--resume" in stopped.said


def test_a_second_process_is_kept_out(world: World, tmp_path: Path) -> None:
    out = tmp_path / "model"
    for more in ((), ("--resume",), ("--overwrite",)):
        with (tmp_path / ".model.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            refused = world.warm.run(*world.train(out, *more))
        assert refused.code == 2
        assert "another mobatlas process is writing it" in refused.said
        assert names(tmp_path) == [".model.lock"]
