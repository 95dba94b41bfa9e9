"""A strategy from outside the package is trained, supervised, sampled and refused like our own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from mobatlas import (
    MobatlasError,
    SampleRequest,
    Strategy,
    StrategyOptions,
    Supervised,
    SuperviseOptions,
    TrajectoryDataset,
    build_regions,
    generate,
    load_model,
    register_strategy,
    supervise,
    train,
)
from mobatlas.config import Section
from mobatlas.generators.protocol import Examples, Generator
from mobatlas.regions.build import RegionsOptions
from mobatlas.supervision.evidence import Evidence
from mobatlas.supervision.strategies import STRATEGIES
from mobatlas.training.loop import Execution, Trainer
from tests.outcomes import refused, run
from tests.tiny import OPTIONS, small_city

NAME = "by-region"
QUIET = Execution(quiet=True)


class RegionConfig(Section):
    """Options of the strategy."""

    sharpness: float = 1.0


def run_by_region(
    model: Generator,
    dataset: TrajectoryDataset,
    evidence: Evidence,
    trainer: Trainer,
    options: StrategyOptions,
) -> Supervised:
    """Draw the group of a person by the composition of the person's region."""
    shares = evidence.membership() ** options.section.sharpness  # (people, groups)
    cumulative = np.cumsum(shares / shares.sum(1, keepdims=True), axis=1)

    def draw(size: int, step: int) -> Examples:
        indices = dataset.order("train", size, trainer.seed, step)
        rows = np.searchsorted(evidence.people, dataset.person[indices])
        uniform = np.random.default_rng([trainer.seed, step]).random((size, 1))
        groups = np.minimum((cumulative[rows] <= uniform).sum(1), len(evidence.groups) - 1)
        return Examples(indices, groups)

    fitted = model.with_groups(evidence.groups, trainer.seed)
    report = trainer.run(fitted.weighted_fit_stage(dataset, draw, NAME, trainer))
    return Supervised(fitted, {NAME: {**report, "sharpness": options.section.sharpness}})


@pytest.fixture(scope="module", autouse=True)
def strategy() -> Iterator[Strategy]:
    added = Strategy(NAME, run_by_region, config=RegionConfig, presets={"soft": {"sharpness": 0.5}})
    register_strategy(added)
    yield added
    del STRATEGIES[NAME]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("city")
    dataset = small_city(root, users=160, pois=20)
    values = OPTIONS["autoregressive"] | {"training": {"steps": 10, "batch": 16, "warmup": 2}}
    values |= {"weighted_fit": {"steps": 4, "warmup": 1}}
    train(dataset.path, root / "model", values=values, execution=QUIET)
    options = RegionsOptions(partition="demogroups", features=("category",))
    build_regions(dataset.path, root / "regions", options)
    return root


def test_it_supervises_a_model_that_samples_every_group_in_one_call(
    world: Path, tmp_path: Path
) -> None:
    calibration: dict[str, Any] = {"pool": 64, "candidates": 2}
    options = SuperviseOptions(NAME, preset="soft", values={"calibration": calibration})
    report = supervise(
        world / "model", tmp_path / "new", world / "regions", options, execution=QUIET
    )
    assert report["strategy"] == NAME and report[NAME]["sharpness"] == 0.5
    model = load_model(tmp_path / "new")
    assert model.strategy == NAME and model.groups is not None
    request = SampleRequest(group="all", calibrate=True, seed=3)
    result = generate(model.path, tmp_path / "all.parquet", 20, request)
    assert result.n == 20 * len(model.groups) and result.calibration is not None
    assert set(result.calibration["groups"]) == set(model.groups.names)
    together = pd.read_parquet(tmp_path / "all.parquet")
    for number, name in enumerate(model.groups.names):
        one = SampleRequest(group=name, calibrate=True, seed=3 + number)
        generate(model.path, tmp_path / "one.parquet", 20, one, overwrite=True)
        alone = pd.read_parquet(tmp_path / "one.parquet")
        alone["trajectory"] += 20 * number
        rows = together[together["group"] == name].reset_index(drop=True)
        pd.testing.assert_frame_equal(rows, alone)


def test_the_command_line_knows_it(world: Path, tmp_path: Path) -> None:
    command = ("supervise", world / "model", world / "regions", "--strategy", NAME)
    out = ("--out", tmp_path / "new", "--quiet")
    assert f"--membership is for the strategy tilt, not {NAME}" in refused(
        *command, "--membership", *out
    )
    assert "sharpness" in refused(*command, "--set", f"{NAME}.sharpnes=2", *out)
    assert "--preset hard does not exist" in refused(*command, "--preset", "hard", *out)
    done = run(*command, "--set", f"{NAME}.sharpness=2", *out)
    assert done.code == 0 and f"supervised by {NAME}" in " ".join(done.out.split()), done.err
    pair = ("--group", "<30, M", "--group", "<30, F")
    sampled = run("generate", tmp_path / "new", "--n", 5, *pair, "--out", tmp_path / "a.parquet")
    assert sampled.code == 0, sampled.err
    rows = pd.read_parquet(tmp_path / "a.parquet").groupby("group")["trajectory"].unique()
    assert rows["<30, M"].tolist() == [0, 1, 2, 3, 4] and rows["<30, F"].tolist() == [5, 6, 7, 8, 9]


def test_a_name_is_registered_once(strategy: Strategy) -> None:
    with pytest.raises(MobatlasError, match=f"strategy '{NAME}' exists already"):
        register_strategy(strategy)
    with pytest.raises(MobatlasError, match="strategy 'auto' exists already"):
        register_strategy(Strategy("auto", run_by_region))
