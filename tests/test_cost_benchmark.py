"""The benchmark of the cost of phase 2."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench import cost
from bench.runner import Experiment
from mobatlas import MobatlasError, TrajectoryDataset
from mobatlas.data.dataset import Trajectories
from mobatlas.data.types import Floats, Ints
from mobatlas.evaluation.comparison import group_members
from mobatlas.generators.store import load_model
from mobatlas.supervision.calibration import Accepted, PlainSampler
from mobatlas.supervision.finetune import FinetuneConfig, regional_loss
from tests.test_phase2_benchmark import CITY, VALUES


def test_all_strategies_start_from_one_baseline_and_are_measured_alike(tmp_path: Path) -> None:
    out = tmp_path / "out"
    experiment = Experiment(out, first_seed=3, quiet=True)
    result = cost.run(experiment, steps=2, values=VALUES, city=CITY)
    names = [row["strategy"] for row in result["rows"]]
    tuned = [f"finetune, {name}" for name in ("early", "5-step rollout", "as published")]
    assert names == ["baseline", "tilt, calibrated", *tuned]
    assert all(row["seconds"] > 0 and 0 < row["regional_loss"] < 1 for row in result["rows"][1:])
    tilt = result["rows"][1]
    published = result["rows"][-1]
    assert result["times_faster"] == pytest.approx(published["seconds"] / tilt["seconds"], abs=0.1)
    assert result["reaches_the_same_loss"] == (tilt["regional_loss"] <= published["regional_loss"])
    assert json.loads((out / "cost.json").read_text()) == json.loads(json.dumps(result))
    assert sorted(path.name for path in out.iterdir()) == [
        "cost.json",
        "cost.summary.json",
        "seed-3",
    ]  # no model of the measurement stays
    assert cost.run(experiment, steps=2, values=VALUES, city=CITY) == result, "times are kept"

    model = load_model(out / "seed-3" / "baseline")
    dataset = model.open_dataset()
    regions = out / "seed-3" / "regions" / "demogroups"
    config = FinetuneConfig(validation_samples=64)
    baseline = PlainSampler(model.generator, dataset.anchors)
    loss = regional_loss(baseline, dataset, regions, config, 3)
    real_people: Any = _RealPeople(dataset)
    assert regional_loss(real_people, dataset, regions, config, 3) < 0.7 * loss


def test_a_misspelt_partition_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(MobatlasError, match=r"--partition demogrups does not exist.*demogroups"):
        cost.run(Experiment(tmp_path / "out"), partition="demogrups")
    assert not (tmp_path / "out").exists()


class _RealPeople:
    """Real training people of each group, which no model can beat."""

    def __init__(self, dataset: TrajectoryDataset) -> None:
        self.dataset = dataset
        self.groups = dataset.groups
        self.members = list(group_members(dataset, "train").values())

    def sample(self, n: int, group: int, seed: int = 0, *, first: int = 0) -> Accepted:
        people = self.sample_at_anchors(np.full(n, group), np.full((n, 4), np.nan), seed)
        return Accepted(people, first + np.arange(n), first + n, n)

    def sample_at_anchors(
        self, groups: Ints, anchors: Floats, seed: int = 0, *, first: int = 0, draws: int = 1
    ) -> Trajectories:
        rng = np.random.default_rng(seed)
        rows = [rng.choice(self.members[group]) for group in np.tile(groups, draws)]
        return Trajectories.of(self.dataset, np.array(rows))
