"""An unfinished, truncated, changed or malicious model folder is refused and runs nothing."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from mobatlas import MobatlasError
from mobatlas.generators.store import load_model
from mobatlas.training.checkpoints import WEIGHTS
from tests.malice import Malice
from tests.worlds import World, cut, remade, small_world

MALICE = pickle.dumps(Malice(Path("executed")))  # leaves its marker in the folder one stands in


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return small_world(tmp_path_factory.getbasetemp())


def test_an_unfinished_model_is_refused_with_the_command_to_resume(tmp_path: Path) -> None:
    (tmp_path / "model" / "training").mkdir(parents=True)
    with pytest.raises(
        MobatlasError, match=r"model: its training is not finished; continue with .* --resume"
    ):
        load_model(tmp_path / "model")


def described(**changes: Any) -> Callable[[Path], Any]:
    """A change of config.json."""

    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            lambda f: cut(f / WEIGHTS),
            "weights.safetensors: this is not a readable safetensors file",
        ),
        (lambda f: (f / WEIGHTS).write_bytes(MALICE), "is not a readable safetensors file"),
        (
            lambda f: (f / WEIGHTS).unlink(),
            "weights.safetensors: this is not a readable safetensors file",
        ),
        (
            lambda f: cut(f / "vocabulary.parquet"),
            "vocabulary.parquet: this is not a readable Parquet file",
        ),
        (
            lambda f: pd.DataFrame({"a": [1]}).to_parquet(f / "vocabulary.parquet"),
            "is not a table of tokens",
        ),
        (lambda f: cut(f / "config.json"), "config.json: the file is missing or not valid JSON"),
        (
            lambda f: (f / "config.json").write_text("[]"),
            "config.json: the file is damaged or was not written by mobatlas",
        ),
        (
            described(generator="latent-difusion"),
            "does not exist; did you mean 'latent-diffusion'?",
        ),
        (
            described(config={"lenght": 16}),
            "config.json: unknown key 'lenght'; did you mean 'length'?",
        ),
        (described(config={"length": 16}), "its weights do not fit config.json"),
        (
            described(groups={"age": ["young", "young"]}),
            "config.json: attribute 'age': its levels are",
        ),
        (described(groups={"age": ["young", "old"]}), "its weights do not fit config.json"),
        (described(more=1), "config.json: unknown key 'more'"),
    ],
)
def test_an_incomplete_model_folder_is_refused(
    world: World,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[Path], Any],
    sentence: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(MobatlasError) as caught:
        load_model(remade(world.model, tmp_path / "model", change))
    assert sentence in str(caught.value) and "\n" not in str(caught.value)
    assert not (tmp_path / "executed").exists()


def test_weights_changed_after_training_are_refused(world: World, tmp_path: Path) -> None:
    for name, spoil in (("cut", cut), ("pickle", lambda path: path.write_bytes(MALICE))):
        shutil.copytree(world.model, tmp_path / name)
        spoil(tmp_path / name / WEIGHTS)
        with pytest.raises(MobatlasError, match=r"differs from its entry in manifest\.json"):
            load_model(tmp_path / name)
