"""`generate --reject-copies` writes no long or rare training trajectory, however it is run."""

from __future__ import annotations

import logging
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from mobatlas import (
    MobatlasError,
    Trajectories,
    TrajectoryDataset,
    build_regions,
    generate,
    supervise,
)
from mobatlas.data.samples import read_samples
from mobatlas.pipeline.models import SuperviseOptions
from mobatlas.regions.build import RegionsOptions
from mobatlas.sampling.chunks import SampleRequest
from mobatlas.sampling.copies import LONG, RARE, find_copies, protected_trajectories
from mobatlas.training.loop import Execution
from tests.tiny import fitted, small_city
from tests.worlds import keep
from tests.written import sequences, write

N = 700  # trajectories, in several chunks
GROUP = "30-40, F"


class World:
    """Models whose samples are trajectories of training and of validation people."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.dataset = small_city(root, users=160, pois=20)
        self.everybody = self._model("everybody", ("train", "val", "test"))
        self.training = self._model("training", ("train",))
        self.protected = protected_trajectories(self.dataset, 10_000)
        partition = RegionsOptions(partition="demogroups", features=("category",))
        build_regions(self.dataset.path, root / "regions", partition)
        self.calibrated = root / "calibrated"
        options = SuperviseOptions(
            "resample", values={"calibration": {"pool": 64, "candidates": 2}}
        )
        supervise(
            self.everybody,
            self.calibrated,
            root / "regions",
            options,
            execution=Execution(quiet=True),
        )

    def _model(self, name: str, splits: tuple[str, ...]) -> Path:
        rows = np.concatenate([self.dataset.split(split) for split in splits])
        pool = write(
            self.root / f"{name}.parquet", self.dataset, Trajectories.of(self.dataset, rows)
        )
        model = fitted("external", self.dataset, pool=str(pool))
        return keep(self.root / f"model of {name}", model, self.dataset, "external")

    def copies(self, path: Path) -> int:
        samples = read_samples(path, self.dataset.vocabulary).trajectories
        return int(find_copies(samples, self.protected).sum())


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("copies"))


def test_long_trajectories_and_those_of_few_training_people_are_protected(world: World) -> None:
    dataset: TrajectoryDataset = world.dataset
    people = defaultdict(set)
    everything = Trajectories.of(dataset)
    names = [tuple(walk.tolist()) for walk in np.split(everything.tokens, everything.offsets[1:-1])]
    for row in dataset.split("train").tolist():
        people[names[row]].add(dataset.person[row])
    expected = [
        len(people[walk]) > 0 and (len(walk) >= LONG or len(people[walk]) <= RARE) for walk in names
    ]
    assert find_copies(everything, world.protected).tolist() == expected
    train = np.isin(np.arange(len(names)), dataset.split("train"))
    assert any(expected) and not all(np.array(expected)[train])


@pytest.mark.parametrize("calibrated", [False, True])
def test_no_sample_copies_a_protected_trajectory_and_the_others_stay(
    world: World, tmp_path: Path, calibrated: bool
) -> None:
    model = world.calibrated if calibrated else world.everybody
    request: dict[str, Any] = {"group": GROUP, "calibrate": True} if calibrated else {}
    with_copies, without = tmp_path / "with.parquet", tmp_path / "without.parquet"
    generate(model, with_copies, N, SampleRequest(**request))
    result = generate(model, without, N, SampleRequest(**request, reject_copies=True))
    assert result.copies is not None and result.copies["rejected"] >= world.copies(with_copies) > 0
    assert world.copies(without) == 0
    left = pd.read_parquet(without)
    assert result.n == left["trajectory"].nunique() == N - result.copies["left_out"]
    before = dict(enumerate(sequences(with_copies)))
    after = dict(zip(left["trajectory"].unique(), sequences(without), strict=True))
    samples = read_samples(with_copies, world.dataset.vocabulary).trajectories
    fine = np.flatnonzero(~find_copies(samples, world.protected)).tolist()
    assert fine and all(after[number] == before[number] for number in fine)


@pytest.mark.parametrize(
    ("options", "calibrated"),
    [
        ({"chunk": 1}, False),
        ({"chunk": 1}, True),
        ({"shards": 3}, False),
        ({"shards": 3}, True),
        ({"devices": 2}, True),
    ],
)
def test_chunks_shards_and_processes_do_not_change_what_is_redrawn(
    world: World, tmp_path: Path, options: dict[str, Any], calibrated: bool
) -> None:
    model = world.calibrated if calibrated else world.everybody
    request: dict[str, Any] = {"reject_copies": True, "seed": 5}
    request |= {"group": GROUP, "calibrate": True} if calibrated else {}
    generate(model, tmp_path / "whole.parquet", N, SampleRequest(**request))
    shards = options.get("shards", 1)
    other = {name: value for name, value in options.items() if name != "shards"}
    parts = []
    for number in range(1, shards + 1):
        path = tmp_path / f"{number}.parquet"
        shard = f"{number}/{shards}" if shards > 1 else None
        generate(model, path, N, SampleRequest(**request, **other, shard=shard))
        parts.append(pd.read_parquet(path))
    pd.testing.assert_frame_equal(
        pd.concat(parts, ignore_index=True), pd.read_parquet(tmp_path / "whole.parquet")
    )


def test_samples_that_remain_copies_are_left_out_with_a_warning(
    world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        out = tmp_path / "out.parquet"
        result = generate(world.training, out, 60, SampleRequest(reject_copies=True))
    assert result.copies is not None and 0 < result.copies["left_out"] == 60 - result.n
    assert f"{result.copies['left_out']} samples still reproduced a training" in caplog.text
    assert world.copies(out) == 0


def test_copies_cannot_be_rejected_without_the_dataset(world: World, tmp_path: Path) -> None:
    with pytest.raises(MobatlasError, match=r"there is no dataset at .*; pass --dataset"):
        generate(
            world.everybody,
            tmp_path / "out.parquet",
            10,
            SampleRequest(reject_copies=True),
            dataset=tmp_path / "nowhere",
        )
