"""Shards and several processes write, bit for bit, the rows that one process writes."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import duckdb
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mobatlas import (
    MobatlasError,
    TrajectoryDataset,
    build_regions,
    generate,
    load_model,
    supervise,
)
from mobatlas.data.types import ANCHORS
from mobatlas.generators.store import save_model
from mobatlas.io.manifest import METADATA
from mobatlas.io.output import new_folder
from mobatlas.pipeline.models import SuperviseOptions
from mobatlas.regions.build import RegionsOptions
from mobatlas.sampling.chunks import SampleRequest, Shard
from mobatlas.supervision.calibration import PIECE
from mobatlas.training.loop import Execution
from tests.commands import finish_cold, names, start_cold, wait_until
from tests.outcomes import refused, run
from tests.tiny import OPTIONS, fitted, small_city
from tests.written import generate_with

GROUP = "30-40, F"
REGION = "R3"
CALIBRATION = {"calibration": {"pool": 64, "candidates": 2}}


@dataclass(frozen=True)
class World:
    """A city, its regions, and untrained models."""

    root: Path
    dataset: TrajectoryDataset

    @property
    def regions(self) -> Path:
        return self.root / "regions"

    def model(self, family: str) -> Path:
        out = self.root / family
        if not out.exists():
            steps = {"steps": 2, "batch": 16, "warmup": 1}
            brief = {
                name: OPTIONS[family].get(name, {}) | steps
                for name in ("training", "autoencoder", "denoiser")
            }
            options = {name: value for name, value in brief.items() if name in OPTIONS[family]}
            generator = fitted(family, self.dataset, **options)
            with new_folder(out, "model") as folder:
                save_model(folder.path, generator, family, self.dataset)
                hash_ = self.dataset.manifest.content_hash
                folder.details["dataset"] = {"path": str(self.dataset.path), "hash": hash_}
        return out

    def supervised(self, strategy: str, family: str = "autoregressive") -> Path:
        out = self.root / f"{family}-{strategy}"
        if not out.exists():
            values = CALIBRATION | (
                {"weighted_fit": {"steps": 2, "warmup": 1}} if strategy == "tilt" else {}
            )
            options = SuperviseOptions(strategy, values=values)
            quiet = Execution(quiet=True)
            supervise(self.model(family), out, self.regions, options, execution=quiet)
        return out


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    root = tmp_path_factory.mktemp("world")
    dataset = small_city(root, users=160, pois=20)
    build_regions(
        dataset.path,
        root / "regions",
        RegionsOptions(partition="demogroups", features=("category",)),
    )
    return World(root, dataset)


@pytest.fixture
def homes(world: World, tmp_path: Path) -> Path:
    table = pd.DataFrame(world.dataset.anchors[:40], columns=list(ANCHORS))
    table.assign(group=[GROUP, "<30, M"] * 20).to_csv(tmp_path / "homes.csv", index=False)
    return tmp_path / "homes.csv"


def union(model: Path, folder: Path, shards: int, **options: Any) -> pa.Table:
    """Each shard by itself, one behind the other."""
    for number in range(1, shards + 1):
        generate_with(model, folder / f"{number}", shard=f"{number}/{shards}", **options)
    return pa.concat_tables(
        [pq.read_table(folder / f"{number}") for number in range(1, shards + 1)]
    )


def check_shards(model: Path, folder: Path, shards: int = 2, **options: Any) -> pa.Table:
    generate_with(model, folder / "whole", **options)
    whole = pq.read_table(folder / "whole")
    made = union(model, folder, shards, **options)
    assert made.schema.equals(whole.schema) and made.equals(whole)
    parts = [
        len(pq.read_table(folder / f"{number}")["trajectory"].unique())
        for number in range(1, shards + 1)
    ]
    assert sum(parts) == len(whole["trajectory"].unique()) and sum(part > 0 for part in parts) > 1
    return whole


@pytest.mark.parametrize("family", OPTIONS)
def test_shards_of_every_family_are_the_whole(world: World, tmp_path: Path, family: str) -> None:
    check_shards(world.model(family), tmp_path, n=520, seed=4)


def test_shards_of_a_region_of_a_table_and_of_coarse_homes_are_the_whole(
    world: World, homes: Path, tmp_path: Path
) -> None:
    model = world.supervised("tilt")
    ways: dict[str, dict[str, Any]] = {
        "region": {"n": 520, "region": REGION},
        "group": {"n": 520, "group": GROUP},
        "anchors": {"n": 520, "anchors": homes, "coarsen": "1km"},
        "grid": {"n": 520, "anchors": homes, "coarsen": "grid:500m"},
    }
    for name, options in ways.items():
        (tmp_path / name).mkdir()
        check_shards(model, tmp_path / name, seed=1, **options)


@pytest.mark.parametrize(
    ("strategy", "family"), [("tilt", "autoregressive"), ("resample", "external")]
)
def test_shards_of_calibrated_samples_are_the_whole(
    world: World, homes: Path, tmp_path: Path, strategy: str, family: str
) -> None:
    model = world.supervised(strategy, family)
    ways: dict[str, dict[str, Any]] = {
        "given": {"n": 520, "anchors": homes},
        "region": {"n": 520, "region": REGION},
        "population": {"n": PIECE + 300, "group": GROUP, "coarsen": 0.5},
        "draws": {"n": 520, "anchors": homes, "posterior": True, "draws": 10},
        "draws of a group": {"n": PIECE + 300, "group": GROUP, "posterior": True, "draws": 10},
    }
    for name, options in ways.items():
        (tmp_path / name).mkdir()
        check_shards(model, tmp_path / name, calibrate=True, seed=2, **options)


def test_pieces_of_calibrated_samples_have_candidates_of_their_own(
    world: World, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"group": GROUP, "calibrate": True, "seed": 5}
    model = world.supervised("tilt")
    generate(model, tmp_path / "many", 2 * PIECE, SampleRequest(**options))
    made = generate(model, tmp_path / "few", 100, SampleRequest(**options))
    assert made.acceptance_rate is not None and 0 < made.acceptance_rate <= 1
    many, few = (pd.read_parquet(tmp_path / name) for name in ("many", "few"))
    pd.testing.assert_frame_equal(
        few, many[: len(few)]
    )  # how many are asked for changes none of them
    first, second = (many[many.trajectory // PIECE == piece].poi_id.tolist() for piece in (0, 1))
    assert first != second


@given(st.integers(1, 10**12), st.integers(1, 5_000), st.integers(1, 200))
def test_shards_lie_end_to_end_and_are_alike_to_within_a_unit(n: int, unit: int, of: int) -> None:
    parts = [Shard(number, of).samples(n, unit) for number in range(1, of + 1)]
    assert parts[0][0] == 0 and parts[-1][1] == n
    assert all(stop == start for (_, stop), (start, _) in pairwise(parts))
    assert all(start % unit == 0 for start, stop in parts if start < stop)
    sizes = [stop - start for start, stop in parts]
    assert max(sizes) - min(sizes) <= 2 * unit


def test_a_shard_says_which_it_is_and_may_be_empty(world: World, tmp_path: Path) -> None:
    model = world.model("point-process")
    made = [
        generate(model, tmp_path / f"{k}", 10, SampleRequest(shard=f"{k}/3")) for k in (1, 2, 3)
    ]
    assert [each.n for each in made] == [0, 0, 10] and [each.shard for each in made] == [
        "1/3",
        "2/3",
        "3/3",
    ]
    facts = [json.loads(pq.read_schema(each.path).metadata[METADATA]) for each in made]
    assert [(each["shard"], each["n"]) for each in facts] == [("1/3", 10), ("2/3", 10), ("3/3", 10)]
    empty, full = (pq.read_schema(tmp_path / name) for name in ("1", "3"))
    assert empty.equals(full) and "arrival" in empty.names


def test_duckdb_puts_the_parts_together(world: World, tmp_path: Path) -> None:
    whole = check_shards(world.model("autoregressive"), tmp_path, n=520, shards=3)
    for number in (1, 2, 3):
        (tmp_path / f"{number}").rename(tmp_path / f"part-{number}.parquet")
    parts = tmp_path / "part-*.parquet"
    out = tmp_path / "all.parquet"
    duckdb.sql(f"COPY (SELECT * FROM '{parts}' ORDER BY trajectory, position) TO '{out}'")
    assert pq.read_table(out).equals(whole)


@pytest.mark.parametrize(
    "shard",
    ["0/4", "5/4", "x", "1/0", "-1/4", "1.5/4", "3", "1/4/2", " 1/4", "²/4", "1/" + 5_000 * "9"],
)
def test_a_shard_that_is_none_is_refused(world: World, tmp_path: Path, shard: str) -> None:
    command = (
        "generate",
        world.model("external"),
        "--n",
        10,
        "--out",
        tmp_path / "a",
        f"--shard={shard}",
    )
    assert f"--shard {shard}: give I/K, the I-th of K parts" in refused(*command)
    assert not list(tmp_path.iterdir())


# ---- several processes


@pytest.fixture
def orphans() -> Iterator[None]:
    """There are none afterwards."""
    yield
    assert not multiprocessing.active_children()


PROCESSES = [
    pytest.param(
        "autoregressive-tilt",
        {"n": PIECE + 300, "group": GROUP, "calibrate": True},
        id="calibrated",
    ),
    pytest.param("latent-diffusion", {"n": 1_200, "chunk": 1}, marks=pytest.mark.slow, id="plain"),
]


@pytest.mark.parametrize(("model", "options"), PROCESSES)
def test_two_processes_write_the_bytes_of_one(
    world: World, tmp_path: Path, orphans: None, model: str, options: dict[str, Any]
) -> None:
    folder = world.supervised("tilt") if model.endswith("tilt") else world.model(model)
    one, two = (generate_with(folder, tmp_path / f"{k}", devices=k, **options) for k in (1, 2))
    assert (tmp_path / "1").read_bytes() == (tmp_path / "2").read_bytes()
    assert (one.devices, two.devices) == (1, 2) and one.acceptance_rate == two.acceptance_rate
    assert (one.n, one.tokens, one.calibration) == (two.n, two.tokens, two.calibration)


def test_a_process_that_dies_is_one_sentence_and_nothing_is_left(
    world: World, tmp_path: Path, orphans: None
) -> None:
    class Killing:
        def step(self, done: float, note: str = "") -> None:
            victim = sorted(
                multiprocessing.active_children(), key=lambda process: process.pid or 0
            )[1]
            os.kill(victim.pid or 0, signal.SIGKILL)

    with pytest.raises(
        MobatlasError,
        match=r"^process 2 of 2 died \(exit code -9\), and nothing was written; .*",
    ):
        generate(
            world.model("external"),
            tmp_path / "a" / "out",
            10_000,
            SampleRequest(devices=2, chunk=1),
            tracker=Killing(),
        )
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_what_goes_wrong_in_a_process_is_said_as_if_in_one(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, orphans: None
) -> None:
    """The folder is replaced after the first process has loaded it."""
    model = world.model("external")
    manifest = load_model(model).manifest
    monkeypatch.setattr(type(manifest), "content_hash", "of another")
    with pytest.raises(MobatlasError, match="the model was replaced; run the command again"):
        generate(model, tmp_path / "a" / "out", 1_000, SampleRequest(devices=2, chunk=1))
    assert not list(tmp_path.iterdir())


def test_ctrl_c_ends_all_processes_with_one_sentence(world: World, tmp_path: Path) -> None:
    out = tmp_path / "out.parquet"
    process = start_cold(
        "generate",
        world.model("external"),
        "--n",
        10**9,
        "--devices",
        2,
        "--accelerator",
        "cpu",
        "--out",
        out,
    )
    partial = tmp_path / ".out.parquet.partial"
    wait_until(lambda: partial.exists() and partial.stat().st_size > 1_000, "rows from both")
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to all
    stopped = finish_cold(process)
    assert stopped.code == 130 and stopped.said == "mobatlas: stopped; no incomplete file was left"
    assert "Traceback" not in stopped.err and names(tmp_path) == []


@pytest.mark.parametrize("devices", [0, -1])
def test_no_process_at_all_is_refused(world: World, tmp_path: Path, devices: int) -> None:
    command = (
        "generate",
        world.model("external"),
        "--n",
        10,
        "--out",
        tmp_path / "a",
        f"--devices={devices}",
    )
    assert f"--devices {devices}" in refused(*command)
    assert not list(tmp_path.iterdir())


def test_json_says_shard_and_devices(world: World, tmp_path: Path) -> None:
    done = run(
        "generate",
        world.model("external"),
        "--n",
        100,
        "--shard",
        "2/2",
        "--out",
        tmp_path / "a",
        "--json",
    )
    found = json.loads(done.out)
    assert (found["shard"], found["devices"], found["n"]) == ("2/2", 1, 64 - 28)
