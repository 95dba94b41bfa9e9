"""`supervise --strategy strong` learns groups from labels; bad input is refused."""

from __future__ import annotations

import functools
import json
import shutil
from collections import Counter, defaultdict
from pathlib import Path

import pandas as pd
import pytest
import torch
from safetensors.torch import load_file

from mobatlas import TrajectoryDataset
from tests.commands import (
    CALIBRATED,
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
        {"strategy", "reason", "strong", "calibration", "peak_gb"},
    )
    return out


def test_supervise_gives_a_model_the_groups_of_the_labels(world: World, taught: Path) -> None:
    assert names(taught) == sorted(CALIBRATED)
    described = json.loads((taught / "config.json").read_text())
    assert world.dataset.groups is not None
    assert described["groups"] == world.dataset.groups.as_dict()
    assert {line["stage"] for line in lines(taught)} == {"strong"}
    before, after = (load_file(path / "weights.safetensors") for path in (world.model, taught))
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]) == name.startswith(KEPT), name
    assert {name.split(".")[1] for name in after.keys() - before.keys()} == {"conditioning"}


def slow_means(dataset: TrajectoryDataset) -> dict[tuple[str, str], float]:
    """Visits of each POI in a window: the mean of each person, then of the people of a group."""
    assert dataset.groups is not None
    train = dataset.split("train").tolist()
    windows = Counter(dataset.person[train].tolist())
    codes = dataset.person_groups().tolist()
    members = Counter(codes[person] for person in windows)
    means: defaultdict[tuple[str, str], float] = defaultdict(float)
    for row in train:
        person = int(dataset.person[row])
        group = codes[person]
        for token in dataset.trajectory(row).tolist():
            key = dataset.groups.names[group], f"poi:{dataset.vocabulary.poi_ids[token]}"
            means[key] += 1 / windows[person] / members[group]
    return means


def test_strong_keeps_the_means_of_labelled_training_people(world: World, taught: Path) -> None:
    kept = pd.read_parquet(taught / "group_means.parquet")
    assert list(kept) == ["group", "feature", "mean", "population"]
    expected = slow_means(world.dataset)
    poi = kept[kept["feature"].str.startswith("poi:")]
    assert len(poi) >= len(expected)
    found = dict(zip(zip(poi["group"], poi["feature"], strict=True), poi["mean"], strict=True))
    assert {key: mean for key, mean in found.items() if mean > 0} == pytest.approx(dict(expected))
    others = set(kept["feature"]) - set(poi["feature"])
    assert all(name.startswith("visits:") for name in others), "numbers of visits are kept too"
    report = json.loads((taught / "manifest.json").read_text())["details"]["report"]
    assert set(report["calibration"]["groups"]) == set(kept["group"])


def test_strong_can_do_without_a_calibration(world: World, tmp_path: Path) -> None:
    few = ("--set", "strong.features=[]", "--set", "weighted_fit.steps=1")
    made = world.warm.run(*world.supervise(tmp_path / "plain", *few))
    assert made.code == 0, made.err
    assert names(tmp_path / "plain") == FILES


def test_samples_of_strong_are_calibrated_if_asked_for(world: World, taught: Path) -> None:
    folder = world.root / "calibrated"
    folder.mkdir()
    for name, options in (("plain", ()), ("calibrated", ("--calibrate",))):
        command = ["generate", taught, "--n", 20, "--group", "30-40, F", "--quiet", *options]
        made = world.warm.run(*command, "--out", folder / f"{name}.parquet")
        assert made.code == 0, made.err
    plain, calibrated = (
        pd.read_parquet(folder / f"{name}.parquet") for name in ("plain", "calibrated")
    )
    assert plain["trajectory"].nunique() == calibrated["trajectory"].nunique() == 20
    assert plain["poi_id"].tolist() != calibrated["poi_id"].tolist()


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
