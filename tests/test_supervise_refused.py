"""Phase 2 refuses options, models, regions and calibrations that do not fit, in one sentence."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from mobatlas import build_regions
from mobatlas.io.manifest import MANIFEST
from mobatlas.io.output import new_folder
from mobatlas.regions.build import RegionsOptions
from tests.outcomes import refused
from tests.supervised import GROUP, HOW, World, made_world, remade
from tests.tiny import small_city


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return made_world(tmp_path_factory.mktemp("world"))


@pytest.mark.parametrize(
    ("strategy", "options", "sentence"),
    [
        ("tilt", ["--n", 5], "--calibrate needs groups"),
        ("tilt", ["--n", 5, "--group", "30-40, W"], "did you mean '30-40, F'?"),
        ("model", ["--n", 5, "--group", GROUP], "has no groups"),
    ],
)
def test_what_cannot_be_calibrated_is_refused(
    world: World, tmp_path: Path, strategy: str, options: list[object], sentence: str
) -> None:
    model = world.model if strategy == "model" else world.supervised(strategy)
    assert sentence in refused("generate", model, *options, "--calibrate", "--out", tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


def test_a_calibration_of_other_tensors_is_refused(world: World, tmp_path: Path) -> None:
    source = world.supervised("tilt")
    manifest = json.loads((source / MANIFEST).read_text())
    with new_folder(tmp_path / "broken", "model", config=manifest["config"]) as folder:
        shutil.copytree(
            source, folder.path, dirs_exist_ok=True, ignore=shutil.ignore_patterns(MANIFEST)
        )
        folder.details |= manifest["details"]
        (folder.path / "calibration.json").write_text("{}")
    asked = ("--n", 5, "--group", GROUP, "--calibrate", "--out", tmp_path / "a")
    assert "this is not a calibration" in refused("generate", tmp_path / "broken", *asked)


# ---- bad input


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--strategy", "tlit"], "--strategy tlit does not exist; did you mean 'tilt'?"),
        (
            ["--strategy", "tilt", "--divergence", "js"],
            "--divergence is for the strategy finetune, not tilt",
        ),
        (["--divergence", "js"], "--divergence is for the strategy finetune, not tilt"),
        (
            ["--strategy", "finetune", "--membership"],
            "--membership is for the strategy tilt, not finetune",
        ),
        (
            ["--strategy", "resample", "--from-scratch"],
            "--from-scratch is for the strategy tilt and strong, not",
        ),
        (
            ["--strategy", "resample", "--set", "tilt.ridge=1"],
            "--set tilt is for the strategy tilt, not resample",
        ),
        (
            ["--strategy", "tilt", "--set", "strong.features=[poi]"],
            "--set strong is for the strategy strong, not tilt",
        ),
        (["--strategy", "strong", "--set", "strong.features=[po]"], "po does not exist"),
        (["--strategy", "finetune", "--divergence", "helinger"], "did you mean 'hellinger'?"),
        (
            ["--strategy", "finetune", "--preset", "papr"],
            "--preset papr does not exist; did you mean 'paper'?",
        ),
        (
            ["--strategy", "finetune", "--set", "finetune.stepps=3"],
            "unknown key 'stepps' in 'finetune'",
        ),
        (["--set", "tilt.ridge=-1"], "tilt.ridge"),
        (["--set", "calibration.pool=10"], "a pool of 10 is too small"),
        (["--set", "groups_explain=0"], "groups_explain"),
        (["--strategy", "strong", "--set", "groups_explain=1"], "--set groups_explain is for"),
    ],
)
def test_a_bad_option_is_one_sentence_and_nothing_is_left(
    world: World, tmp_path: Path, options: list[str], sentence: str
) -> None:
    assert sentence in refused(
        "supervise", world.model, world.groups, "--out", tmp_path / "new", *options
    )
    assert list(tmp_path.iterdir()) == []


def test_all_strategies_but_strong_need_regions(world: World, tmp_path: Path) -> None:
    for strategy in HOW:
        said = refused("supervise", world.model, "--strategy", strategy, "--out", tmp_path / "new")
        assert "needs REGIONS" in said
    assert "no such regions folder" in refused(
        "supervise", world.model, tmp_path / "no", "--out", tmp_path / "new"
    )
    assert "not a regions" in refused(
        "supervise", world.model, world.dataset.path, "--out", tmp_path / "new"
    )
    assert "overlaps with" in refused(
        "supervise", world.model, world.groups, "--out", world.groups / "new"
    )


def test_a_model_of_groups_is_not_supervised_anew(world: World, tmp_path: Path) -> None:
    for strategy, sentence in (
        ("auto", "already has groups"),
        ("tilt", "already"),
        ("resample", "already"),
    ):
        command = ("--strategy", strategy, "--out", tmp_path / "new")
        assert sentence in refused("supervise", world.supervised("tilt"), world.groups, *command)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("strategy", ["tilt", "resample", "finetune"])
def test_regions_that_tell_nothing_are_refused(world: World, tmp_path: Path, strategy: str) -> None:
    def broken(table: str, column: str, change: Callable[[pd.DataFrame], Any]) -> str:
        folder = remade(
            world.groups,
            tmp_path / "regions" / f"{len(list(tmp_path.rglob('*')))}",
            table,
            column,
            change,
        )
        return refused(
            "supervise", world.model, folder, "--strategy", strategy, "--out", tmp_path / "new"
        )

    assert "is zero" in broken("aggregates.parquet", "value", lambda rows: np.zeros(len(rows)))
    assert "is suppressed" in broken(
        "aggregates.parquet", "value", lambda rows: np.full(len(rows), np.nan)
    )
    absent = broken(
        "composition.parquet",
        "share",
        lambda rows: np.where(rows["group"] == GROUP, 0, rows["share"]),
    )
    assert f"no region has people of group '{GROUP}'" in absent
    assert not (tmp_path / "new").exists()


def test_regions_of_another_dataset_are_refused(world: World, tmp_path: Path) -> None:
    other = small_city(tmp_path, users=60, pois=14)
    build_regions(
        other.path, tmp_path / "regions", RegionsOptions(partition="demogroups", features=("poi",))
    )
    for strategy in ("tilt", "resample", "finetune"):
        command = ("--strategy", strategy, "--out", tmp_path / "new")
        assert "belong to another dataset" in refused(
            "supervise", world.model, tmp_path / "regions", *command
        )
