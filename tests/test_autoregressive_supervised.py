"""Sequence generators from the command line: trained, supervised by every strategy, sampled."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from mobatlas import TrajectoryDataset, build_regions, generate, load_model, supervise
from mobatlas.cli import main
from mobatlas.pipeline.models import SuperviseOptions
from mobatlas.regions.build import RegionsOptions
from mobatlas.sampling.chunks import SampleRequest
from mobatlas.training.loop import Execution
from tests.tiny import OPTIONS, small_city

FAMILIES = ("autoregressive", "vae")
GROUP = "30-40, F"
SMALL: dict[str, Any] = {"calibration": {"pool": 64, "candidates": 2}, "visits": False}
TUNING = {
    "steps": 20,
    "batch": 64,
    "learning_rate": 3e-3,
    "warmup": 3,
    "ema": None,
    "validate_every": 10,
}
VALUES: dict[str, dict[str, Any]] = {
    "tilt": SMALL | {"weighted_fit": {"steps": 6, "warmup": 2}},
    "resample": SMALL,
    "finetune": {"finetune": TUNING},
    "strong": {"weighted_fit": {"steps": 6, "warmup": 2}},
}


@dataclass(frozen=True)
class World:
    """A city with a model of phase 1 of each family, and its groups as regions."""

    root: Path
    dataset: TrajectoryDataset


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    root = tmp_path_factory.mktemp("world")
    dataset = small_city(root, users=160, pois=20)
    build_regions(
        dataset.path, root / "groups", RegionsOptions(partition="demogroups", features=("poi",))
    )
    return World(root, dataset)


def model(world: World, name: str) -> Path:
    """Trained as a user types it, when it is first asked for."""
    out = world.root / name
    argv = sys.argv
    if not out.exists():
        options = OPTIONS[name] | {
            "training": OPTIONS[name]["training"] | {"steps": 40, "batch": 32}
        }
        settings = [
            f"{part}.{key}={value}"
            for part in ("network", "training")
            for key, value in options[part].items()
        ]
        sys.argv = [
            "mobatlas",
            "train",
            str(world.dataset.path),
            "--generator",
            name,
            "--out",
            str(out),
            "--quiet",
        ]
        sys.argv += [word for setting in ("length=12", *settings) for word in ("--set", setting)]
        try:
            main()
        except SystemExit as end:
            assert not end.code
        finally:
            sys.argv = argv
    return out


@pytest.mark.parametrize("strategy", VALUES)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_model_of_every_strategy_samples_groups(
    name: str, strategy: str, world: World, tmp_path: Path
) -> None:
    regions = None if strategy == "strong" else world.root / "groups"
    options = SuperviseOptions(strategy, values=VALUES[strategy])
    quiet = Execution(quiet=True)
    report = supervise(model(world, name), tmp_path / "model", regions, options, execution=quiet)
    assert report["strategy"] == strategy
    made = load_model(tmp_path / "model")
    assert (made.name, made.strategy) == (name, strategy)
    generate(tmp_path / "model", tmp_path / "some.parquet", 20, SampleRequest(group=GROUP, seed=3))
    generate(tmp_path / "model", tmp_path / "more.parquet", 30, SampleRequest(group=GROUP, seed=3))
    some, more = (pd.read_parquet(tmp_path / f"{each}.parquet") for each in ("some", "more"))
    assert set(some["group"]) == {GROUP} and some["trajectory"].nunique() == 20
    pd.testing.assert_frame_equal(more[more["trajectory"] < 20], some)
    if strategy == "finetune":
        said = report["finetune"]
        assert said["best"]["step"] > 0, "nearer to the regions than it began"
