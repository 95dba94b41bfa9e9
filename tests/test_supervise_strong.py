"""`supervise --strategy strong` learns groups from labels; bad input is refused."""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.commands import (
    FILES,
    OFTEN,
    Refusal,
    World,
    kill_until,
    lines,
    names,
    refusal_of,
    trained_world,
)
from tests.tiny import small_city

KEPT = (
    "autoencoder.",
    "denoiser.conditioning.centre",
    "denoiser.conditioning.extent",
    "denoiser.prototypes",
)  # by supervision


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return trained_world(tmp_path_factory.getbasetemp())


@pytest.fixture
def refusal(world: World, tmp_path: Path) -> Refusal:
    return functools.partial(refusal_of, world, tmp_path)


@pytest.fixture(scope="module")
def taught(world: World) -> Path:
    out = world.root / "taught"
    made = world.warm.run(*world.supervise(out, "--json"))
    assert made.code == 0, made.err
    report = json.loads(made.out)
    assert (report["strategy"], set(report)) == (
        "strong",
        {"strategy", "reason", "strong", "peak_gb"},
    )
    return out


def test_supervise_gives_a_model_the_groups_of_the_labels(world: World, taught: Path) -> None:
    assert names(taught) == FILES
    described = json.loads((taught / "config.json").read_text())
    assert world.dataset.groups is not None
    assert described["groups"] == world.dataset.groups.as_dict()
    assert {line["stage"] for line in lines(taught)} == {"strong"}
    before, after = (load_file(path / "weights.safetensors") for path in (world.model, taught))
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]) == name.startswith(KEPT), name
    assert {name.split(".")[1] for name in after.keys() - before.keys()} == {"conditioning"}


def test_supervision_killed_at_three_random_moments_ends_in_the_same_bytes(
    world: World, taught: Path, tmp_path: Path
) -> None:
    command = world.supervise(tmp_path / "model", *OFTEN)
    kill_until(3, command, tmp_path / "model", taught, 0.4 * world.seconds, world.warm)


def test_supervision_can_begin_from_scratch(world: World, taught: Path, tmp_path: Path) -> None:
    few = ("--set", "denoiser.steps=10", "--from-scratch")
    made = world.warm.run(*world.supervise(tmp_path / "anew", *few))
    assert made.code == 0, made.err
    assert max(line["step"] for line in lines(tmp_path / "anew")) == 10, (
        "as many steps as phase 1 has"
    )
    anew, before = (
        load_file(path / "weights.safetensors") for path in (tmp_path / "anew", world.model)
    )
    for name, tensor in before.items():
        assert torch.equal(tensor, anew[name]) == name.startswith(KEPT), name
    other = world.warm.run(*world.supervise(taught, "--resume", *few))
    assert other.code == 2 and "another configuration" in other.said


def test_a_strategy_that_does_not_exist_is_refused_with_the_nearest(
    world: World, refusal: Refusal, tmp_path: Path
) -> None:
    sentence = refusal("supervise", world.model, "--strategy", "storng", "--out", tmp_path / "new")
    assert "--strategy storng does not exist; did you mean 'strong'?" in sentence


def test_strong_needs_labels(world: World, refusal: Refusal, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(world.dataset.path, bare)
    (bare / "labels.parquet").unlink()
    assert "labels" in refusal(*world.supervise(tmp_path / "new", "--dataset", bare))


def test_a_dataset_of_other_places_is_refused(
    world: World, refusal: Refusal, tmp_path: Path
) -> None:
    other = small_city(tmp_path, users=60, pois=20)
    sentence = refusal(*world.supervise(tmp_path / "new", "--dataset", other.path))
    assert f"{other.path}: its vocabulary is not the one" in sentence


def test_a_dataset_that_has_moved_is_asked_for(
    world: World, refusal: Refusal, tmp_path: Path
) -> None:
    moved = world.dataset.path.rename(world.root / "moved")
    try:
        assert "pass --dataset" in refusal(*world.supervise(tmp_path / "new"))
        found = world.warm.run(
            *world.supervise(tmp_path / "new", "--dataset", moved, "--set", "weighted_fit.steps=1")
        )
        assert found.code == 0, found.err
    finally:
        moved.rename(world.dataset.path)


def test_a_supervised_model_is_not_supervised_again(
    refusal: Refusal, taught: Path, tmp_path: Path
) -> None:
    assert "already" in refusal(
        "supervise", taught, "--strategy", "strong", "--out", tmp_path / "new"
    )


def test_supervision_cannot_change_what_phase_1_built(
    world: World, refusal: Refusal, tmp_path: Path
) -> None:
    sentence = refusal(*world.supervise(tmp_path / "new", "--set", "denoiser.depth=3"))
    assert "weights" in sentence or "denoiser.depth" in sentence


@pytest.mark.parametrize("what", ["nowhere", "dataset", "city"])
def test_what_is_not_a_model_is_not_supervised(
    world: World, refusal: Refusal, tmp_path: Path, what: str
) -> None:
    command = ["supervise", world.root / what, "--strategy", "strong", "--out", tmp_path / "new"]
    assert f"{world.root / what}: " in refusal(*command)
