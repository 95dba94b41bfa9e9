"""An unfinished model: `train` and `supervise` resume, replace or refuse it."""

from __future__ import annotations

import os
import pickle
import shutil
import signal
from pathlib import Path

import pytest

from mobatlas.io.output import checkpoint_folder
from tests.commands import World, check_same, last_step, snapshot, trained_world, wait_until
from tests.malice import Malice


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return trained_world(tmp_path_factory.getbasetemp())


@pytest.fixture(scope="module")
def interrupted(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was killed in the middle of its second stage, with two checkpoints of it."""
    out = tmp_path_factory.mktemp("interrupted") / "model"
    running = world.warm.start(*world.train(out, "--checkpoint-seconds", 0.01))
    wait_until(lambda: last_step(out, "denoiser") >= 5, "a checkpoint")
    assert running.signal(signal.SIGKILL).code == -signal.SIGKILL
    assert not (out / "manifest.json").exists()
    *older, _, _ = sorted(checkpoint_folder(out).glob("denoiser-*"))
    for path in [*older, *checkpoint_folder(out).glob(".*")]:  # what resuming sweeps up
        path.unlink()
    return out


@pytest.fixture
def half(interrupted: Path, tmp_path: Path) -> Path:
    """A copy of it, to be hurt."""
    shutil.copytree(interrupted, tmp_path / "model")
    return tmp_path / "model"


def refused_unchanged(world: World, half: Path, *more: object) -> str:
    """The sentence with which a command leaves an unfinished model as it is."""
    before = snapshot(half.parent)
    refused = world.warm.run(*world.train(half, *more))
    assert refused.code == 2, refused.err
    assert "Traceback" not in refused.err
    after = snapshot(half.parent)
    # The marker and the latents may be written again.
    for name in ("unfinished.json", "latents.npy"):
        after.pop(f"model/training/{name}", None)
        before.pop(f"model/training/{name}", None)
    assert after == before
    return refused.said


def test_an_unfinished_model_asks_for_resume_or_overwrite(world: World, half: Path) -> None:
    sentence = refused_unchanged(world, half)
    assert "is unfinished" in sentence and "--resume" in sentence and "--overwrite" in sentence


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        (("--set", "denoiser.depth=3"), "denoiser.depth is 2 in the file and 3 now"),
        (
            ("--set", "autoencoder.noise=0.2", "--set", "diffusion.steps=5"),
            "autoencoder.noise is 0.3 in the file and 0.2",
        ),
        (("--seed", "7"), "seed is 0 in the file and 7 now"),
    ],
)
def test_an_unfinished_model_names_the_first_value_that_is_another(
    world: World, half: Path, change: tuple[str, ...], difference: str
) -> None:
    sentence = refused_unchanged(world, half, "--resume", *change)
    assert difference in sentence and "--overwrite" in sentence


def test_an_unfinished_model_starts_anew_with_overwrite(world: World, half: Path) -> None:
    assert world.warm.run(*world.train(half, "--overwrite")).code == 0
    check_same(half, world.model)


def test_a_file_of_somebody_else_in_an_unfinished_model_survives_overwrite(
    world: World, half: Path
) -> None:
    (half / "notes.txt").write_text("mine")
    sentence = refused_unchanged(world, half, "--overwrite")
    assert "notes.txt" in sentence


def test_an_unfinished_model_cannot_be_supervised_and_says_why(world: World, half: Path) -> None:
    out = half.parent / "taught"
    refused = world.warm.run("supervise", half, "--strategy", "strong", "--out", out)
    assert refused.code == 2
    assert "its training is not finished" in refused.said and "--resume" in refused.said
    assert not out.exists()


def newest_checkpoint(half: Path) -> Path:
    return checkpoint_folder(half) / f"denoiser-{last_step(half, 'denoiser'):08d}.safetensors"


def test_a_truncated_checkpoint_is_refused_and_the_one_before_it_will_do(
    world: World, half: Path
) -> None:
    newest = newest_checkpoint(half)
    os.truncate(newest, newest.stat().st_size // 2)
    sentence = refused_unchanged(world, half, "--resume")
    newest.unlink()
    before = last_step(half, "denoiser")
    assert before > 0
    assert f"{newest.name}: this is not a readable checkpoint" in sentence
    assert f"delete it to continue from step {before}" in sentence
    assert world.warm.run(*world.train(half, "--resume")).code == 0
    check_same(half, world.model)


@pytest.mark.parametrize("stage", ["denoiser", "autoencoder"])
def test_a_pickle_named_like_a_checkpoint_is_refused_and_not_run(
    world: World, half: Path, stage: str
) -> None:
    path = (
        newest_checkpoint(half)
        if stage == "denoiser"
        else checkpoint_folder(half) / "autoencoder-final.safetensors"
    )
    marker = half.parent.parent / f"{half.parent.name}-marker"
    path.write_bytes(pickle.dumps(Malice(marker)))
    sentence = refused_unchanged(world, half, "--resume")
    assert f"{path.name}: this is not a readable checkpoint" in sentence
    assert not marker.exists()
    pickle.loads(path.read_bytes())
    assert marker.exists(), "the pickle would have done it"


def test_a_pickle_in_place_of_the_latents_is_not_run(world: World, half: Path) -> None:
    marker = half.parent.parent / f"{half.parent.name}-marker"
    (checkpoint_folder(half) / "latents.npy").unlink()
    (checkpoint_folder(half) / "latents.npy").write_bytes(pickle.dumps(Malice(marker)))
    resumed = world.warm.run(*world.train(half, "--resume"))
    assert not marker.exists()
    assert resumed.code == 0, "latents can be computed again"
    check_same(half, world.model)
