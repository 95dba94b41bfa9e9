"""Damaged checkpoints, pickles and checkpoints of another run are refused and never executed."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from mobatlas import MobatlasError
from tests.malice import Malice
from tests.trainers import CONFIG, FINAL, interrupted_training, make_stage, train, undisturbed_bytes


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "model" / "training"


@pytest.fixture(scope="module")
def undisturbed() -> bytes:
    return undisturbed_bytes()


def test_a_truncated_checkpoint_is_refused_with_what_to_do(
    folder: Path, undisturbed: bytes
) -> None:
    newest = interrupted_training(folder)
    os.truncate(newest, newest.stat().st_size // 2)
    with pytest.raises(
        MobatlasError,
        match=r"mlp-00000005.*not a readable checkpoint.*delete it to continue from step 4",
    ):
        train(folder)
    newest.unlink()
    train(folder)
    assert (folder / FINAL).read_bytes() == undisturbed


@pytest.mark.parametrize("name", ["mlp-00000006.safetensors", FINAL])
def test_a_pickle_named_like_a_checkpoint_is_refused_and_not_run(folder: Path, name: str) -> None:
    interrupted_training(folder)
    marker = folder / "marker"
    (folder / name).write_bytes(pickle.dumps(Malice(marker)))
    with pytest.raises(MobatlasError, match=rf"{name}: this is not a readable checkpoint"):
        train(folder)
    assert not marker.exists()
    pickle.loads((folder / name).read_bytes())
    assert marker.exists(), "the pickle would have done it"


@pytest.mark.parametrize(
    "header",
    [
        None,
        {"other": "{}"},
        {"mobatlas": "[]"},
        {"mobatlas": "{"},
        {"mobatlas": '{"format": 2, "step": "x"}'},
    ],
)
def test_tensors_that_mobatlas_did_not_write_are_refused(
    folder: Path, header: dict[str, str] | None
) -> None:
    newest = interrupted_training(folder)
    save_file(load_file(newest), newest, header)
    with pytest.raises(MobatlasError, match=r"not a readable checkpoint"):
        train(folder)


def test_a_checkpoint_of_an_older_format_is_refused_with_what_to_do(folder: Path) -> None:
    newest = interrupted_training(folder)
    with safe_open(newest, framework="pt") as opened:
        facts = json.loads(opened.metadata()["mobatlas"])
    save_file(load_file(newest), newest, {"mobatlas": json.dumps(facts | {"format": 1})})
    with pytest.raises(MobatlasError, match=r"checkpoint format 1.*; start over with --overwrite"):
        train(folder)


def test_a_checkpoint_of_another_run_is_refused_by_the_first_difference(folder: Path) -> None:
    interrupted_training(folder)
    deeper = {**CONFIG, "denoiser": {"depth": 6, "width": 16}}
    with pytest.raises(
        MobatlasError,
        match=r"denoiser.depth is 4 in the file and 6 now; pass the same config.*--overwrite",
    ):
        train(folder, config=deeper)
    with pytest.raises(MobatlasError, match=r"dropout is absent in the file and 0.1 now"):
        train(folder, config=CONFIG | {"dropout": 0.1})
    with pytest.raises(MobatlasError, match=r"batch is 32 in the file and absent now"):
        train(folder, config={"denoiser": CONFIG["denoiser"]})
    with pytest.raises(MobatlasError, match=r"seed is 5 in the file and 6 now"):
        train(folder, seed=6)
    with pytest.raises(MobatlasError, match=r"mlp.learning_rate is 0.01 in the file and 0.02 now"):
        train(folder, make_stage(learning_rate=0.02))
    train(folder)
    with pytest.raises(MobatlasError, match=r"mlp-final.*seed is 5 in the file and 6 now"):
        train(folder, seed=6)


def test_names_shapes_and_dtypes_must_all_agree(folder: Path) -> None:
    interrupted_training(folder)
    with pytest.raises(
        MobatlasError,
        match=r"network/0.weight is float32 \[16, 4\] in the file and float32 \[8, 4\] now",
    ):
        train(folder, make_stage(width=8))
    double = make_stage()
    double.network.double()
    with pytest.raises(
        MobatlasError, match=r"network/0.weight is float32 .* in the file and float64"
    ):
        train(folder, double)
    longer = make_stage()
    longer.network.register_buffer("extra", torch.zeros(1))
    with pytest.raises(MobatlasError, match=r"network/extra is absent in the file"):
        train(folder, longer)
    shorter = make_stage()
    shorter.network.get_submodule("3").register_parameter("bias", None)
    with pytest.raises(MobatlasError, match=r"/3.bias is float32 \[1\] in the file and absent now"):
        train(folder, shorter)
