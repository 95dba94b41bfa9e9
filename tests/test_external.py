"""An external generator: a pool of samples becomes a model without training."""

from __future__ import annotations

import functools
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from mobatlas import MobatlasError, TrajectoryDataset, build_regions, generate, load_model, train
from mobatlas.data.dataset import Trajectories
from mobatlas.data.types import FIRST_POI, HOME, OTHER
from mobatlas.features.divergences import js
from mobatlas.generators.external import External, Pool
from mobatlas.generators.protocol import family_of
from mobatlas.io.manifest import read_manifest
from mobatlas.regions.build import RegionsOptions
from mobatlas.sampling.chunks import SampleRequest
from mobatlas.supervision import strategies
from mobatlas.supervision.calibration import CalibrationConfig
from mobatlas.training.loop import Execution
from tests.outcomes import refused, run
from tests.tiny import OPTIONS, small_city
from tests.written import sequences

GROUP = "30-40, F"
FEW = ("--set", "calibration.candidates=2", "--set", "visits=false")
SMALL = (*FEW, "--set", "calibration.pool=512", "--set", "calibration.ridge=0.1")
LEAST = (*FEW, "--set", "calibration.pool=16", "--set", "calibration.ridge=1")
HOW_TO = Path(__file__).parent.parent / "docs" / "how-to.md"


@dataclass(frozen=True)
class World:
    """A city, samples of a generator of another family, and its groups as regions."""

    root: Path
    dataset: TrajectoryDataset

    @property
    def pool(self) -> Path:
        return self.root / "pool.parquet"

    @property
    def regions(self) -> Path:
        return self.root / "groups"

    @property
    def model(self) -> Path:
        """Trained on the pool as a user types it, when it is first asked for."""
        out = self.root / "model"
        if not out.exists():
            done = run(*self.train(out, f"pool={self.pool}"))
            assert done.code == 0 and "trajectories 800" in done.out, done.err
        return out

    def train(self, out: Path, *settings: str) -> list[object]:
        options = [word for setting in settings for word in ("--set", setting)]
        return [
            "train",
            self.dataset.path,
            "--generator",
            "external",
            *options,
            "--out",
            out,
            "--quiet",
        ]

    def supervised(self, strategy: str) -> Path:
        out = self.root / strategy
        if not out.exists():
            done = run(
                "supervise",
                self.model,
                self.regions,
                "--strategy",
                strategy,
                *SMALL,
                "--out",
                out,
                "--quiet",
            )
            assert done.code == 0, done.err
        return out


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    root = tmp_path_factory.mktemp("world")
    made = World(root, small_city(root, users=240, pois=20))
    brief = OPTIONS["autoregressive"] | {
        "training": OPTIONS["autoregressive"]["training"] | {"steps": 30}
    }
    quiet = Execution(quiet=True)
    train(made.dataset.path, root / "other", values=brief, execution=quiet)
    generate(root / "other", made.pool, 800)
    build_regions(
        made.dataset.path, made.regions, RegionsOptions(partition="demogroups", features=("poi",))
    )
    return made


def shares(names: list[tuple[str, ...]], dataset: TrajectoryDataset) -> np.ndarray:
    """Of visits to each POI."""
    place = {name: token for token, name in enumerate(dataset.vocabulary.poi_ids)}
    tokens = np.array([place[name] for row in names for name in row])
    counts = np.bincount(tokens[tokens >= FIRST_POI], minlength=len(place))[FIRST_POI:].astype(
        float
    )
    return counts / counts.sum()


# ---- a pool


def test_a_pool_becomes_a_model_that_does_not_need_the_file(world: World, tmp_path: Path) -> None:
    copy = tmp_path / "copy.parquet"
    shutil.copy(world.pool, copy)
    assert run(*world.train(tmp_path / "model", f"pool={copy}")).code == 0
    copy.unlink()
    for out, n in (("a", 50), ("b", 50), ("more", 80)):
        assert (
            run("generate", tmp_path / "model", "--n", n, "--seed", 4, "--out", tmp_path / out).code
            == 0
        )
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert sequences(tmp_path / "more")[:50] == sequences(tmp_path / "a")
    assert set(sequences(tmp_path / "more")) <= set(sequences(world.pool)), (
        "nothing but what the pool holds"
    )


@pytest.mark.parametrize("strategy", ["resample", "tilt"])
def test_supervised_samples_of_a_group_are_closer_to_its_visits(
    world: World, tmp_path: Path, strategy: str
) -> None:
    """Places that a group visits are nearer to those of its real people than the pool's are."""
    model = world.supervised(strategy)
    dataset = world.dataset
    loaded = load_model(model)
    assert (
        loaded.strategy == strategy
        and loaded.groups == dataset.groups
        and loaded.generator.groups is None
    )
    assert dataset.groups is not None
    group_of = dataset.person_groups()
    train_rows = dataset.split("train")
    everybody = shares(sequences(world.pool), dataset)
    before = []
    after = []
    for number, name in enumerate(dataset.groups.names):
        out = tmp_path / f"{number}.parquet"
        generate(model, out, 150, SampleRequest(group=name, seed=1))
        real = Trajectories.of(dataset, train_rows[group_of[dataset.person[train_rows]] == number])
        names = [tuple(dataset.vocabulary.poi_ids[token] for token in real.tokens)]
        before.append(js(everybody, shares(names, dataset)))
        after.append(js(shares(sequences(out), dataset), shares(names, dataset)))
    assert np.mean(after) < 0.5 * np.mean(before)
    report = read_manifest(model, "model").details["report"]
    assert ("tilt" in report) == (strategy == "tilt") and "calibration" in report


def test_auto_chooses_resample_and_gives_the_reason(world: World, tmp_path: Path) -> None:
    done = run(
        "supervise", world.model, world.regions, *LEAST, "--out", tmp_path / "new", "--quiet"
    )
    assert "supervised by resample (the generator external cannot be trained" in " ".join(
        done.out.split()
    ), done.err
    assert load_model(tmp_path / "new").strategy == "resample"


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            ["--strategy", "finetune"],
            "--strategy finetune trains the generator, and external cannot be trained; pass",
        ),
        (
            ["--strategy", "strong"],
            "--strategy strong trains the generator, and external cannot be trained; pass",
        ),
        (
            ["--strategy", "tilt", "--from-scratch"],
            "--from-scratch: the generator external cannot be trained, so this has no effect",
        ),
        (
            ["--set", "weighted_fit.steps=5"],
            "--set weighted_fit: the generator external cannot be trained, so this has no effect",
        ),
        (
            ["--set", "pool=other.parquet"],
            "--set pool: the generator external cannot be trained, so this has no effect",
        ),
    ],
)
def test_options_that_would_train_it_are_refused(
    world: World, tmp_path: Path, options: list[str], sentence: str
) -> None:
    assert sentence in refused(
        "supervise", world.model, world.regions, *options, "--out", tmp_path / "new"
    )
    assert list(tmp_path.iterdir()) == []


def test_a_failed_training_keeps_the_old_model(world: World, tmp_path: Path) -> None:
    out = tmp_path / "model"
    pool = tmp_path / "pool.parquet"
    shutil.copy(world.pool, pool)
    command = world.train(out, f"pool={pool}")
    assert run(*command).code == 0
    manifest = (out / "manifest.json").read_bytes()
    assert "exists already" in refused(*command)
    assert run(*command, "--resume").code == 0, "finished is finished"
    few = pq.read_table(world.pool)
    pq.write_table(few.slice(0, few.num_rows // 2), pool)
    assert "with another configuration" in refused(*command, "--resume"), "the pool is another one"
    missing = world.train(out, f"pool={tmp_path / 'none.parquet'}")
    assert "no such file" in refused(*missing, "--overwrite")
    assert (out / "manifest.json").read_bytes() == manifest
    assert run(*command, "--overwrite").code == 0
    assert (out / "manifest.json").read_bytes() != manifest


def test_a_failed_command_leaves_no_files(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(External, "save", full)
    assert run(*world.train(tmp_path / "model", f"pool={world.pool}")).code == 1
    assert list(tmp_path.iterdir()) == []


def written(path: Path, **columns: Any) -> Path:
    pq.write_table(pa.table(columns), path)
    return path


BAD_POOLS: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda path: None, "no such file"),
    "folder": (lambda path: path.mkdir(), "is a folder; pass one Parquet file"),
    "text": (lambda path: path.write_text("a,b\n"), "not a readable Parquet file"),
    "no rows": (
        lambda path: written(
            path, trajectory=pa.array([], pa.int64()), poi_id=pa.array([], pa.string())
        ),
        "has no rows; give a file with",
    ),
    "no places": (lambda path: written(path, trajectory=[1]), "poi_id"),
    "unknown places": (
        lambda path: written(path, trajectory=[1, 1], poi_id=["HOME", "atlantis"]),
        "none of its visits",
    ),
    "null": (
        lambda path: written(path, trajectory=[1, None], poi_id=["HOME", "WORK"]),
        "is empty in 1 rows",
    ),
}


@pytest.mark.parametrize("name", BAD_POOLS)
def test_a_file_that_is_not_a_pool_is_refused(world: World, tmp_path: Path, name: str) -> None:
    make, sentence = BAD_POOLS[name]
    path = tmp_path / "given.parquet"
    make(path)
    assert sentence in refused(*world.train(tmp_path / "model", f"pool={path}"))
    assert not (tmp_path / "model").exists()


def test_unknown_places_become_other_with_a_warning(
    world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    known = world.dataset.vocabulary.poi_ids[FIRST_POI]
    columns = {"trajectory": [7, 7, 7, 9], "poi_id": [known, "atlantis", "avalon", "HOME"]}
    done = run(
        *world.train(tmp_path / "model", f"pool={written(tmp_path / 'pool.parquet', **columns)}"),
        "--json",
    )
    assert (
        "2 places that are not in the dataset and count as OTHER ('atlantis', 'avalon')"
        in caplog.text
    )
    report = json.loads(done.out)["pool"]
    assert (report["trajectories"], report["unknown_places"], report["unknown_visits"]) == (2, 2, 2)
    pool = load_model(tmp_path / "model").generator.sample(40)
    assert set(pool.tokens.tolist()) == {FIRST_POI, OTHER, HOME}


def test_samples_of_a_pool_with_times_have_times(world: World, tmp_path: Path) -> None:
    place = world.dataset.vocabulary.poi_ids[FIRST_POI]
    hours = np.array([1, 3, 8, 9]).astype("timedelta64[h]") + np.datetime64(
        "2024-05-07", "us"
    )  # a Tuesday
    columns = {
        "trajectory": [1, 1, 1, 2],
        "poi_id": ["HOME", place, "HOME", place],
        "arrival": hours,
    }
    path = written(tmp_path / "pool.parquet", **columns, departure=hours + np.timedelta64(20, "m"))
    assert run(*world.train(tmp_path / "model", f"pool={path}")).code == 0
    assert run("generate", tmp_path / "model", "--n", 20, "--out", tmp_path / "samples").code == 0
    made = pd.read_parquet(tmp_path / "samples")
    arrival = made["arrival"].dt
    assert set(zip(made["poi_id"], arrival.day_name(), arrival.hour, strict=True)) == {
        ("HOME", "Tuesday", 1), (place, "Tuesday", 3), ("HOME", "Tuesday", 8), (place, "Tuesday", 9)
    }  # fmt: skip
    assert ((made["departure"] - made["arrival"]).dt.seconds == 1_200).all()


def test_it_needs_a_pool(world: World, tmp_path: Path) -> None:
    assert "pass --set pool=FILE.parquet" in refused(*world.train(tmp_path / "model"))
    assert "known: pool" in refused(*world.train(tmp_path / "model", "pol=a"))


# ---- how a pool is drawn from


def pool_of(homes: list[list[float]], tokens: list[list[int]], neighbours: int = 2) -> Pool:
    """Hand-made samples: where their people live and work, and their tokens."""
    offsets = np.concatenate(([0], np.cumsum([len(row) for row in tokens])))
    flat = np.array([token for row in tokens for token in row], dtype=np.int32)
    return Pool(Trajectories(flat, offsets, np.array(homes, dtype=np.float64)), neighbours)


NAN = float("nan")
EAST = [1.0, 9.0, 1.1, 9.0]
WEST = [1.0, 2.0, 1.1, 2.0]


def drawn(pool: Pool, anchors: list[float], n: int = 200) -> set[int]:
    made = pool.draw(np.tile(np.array(anchors), (n, 1)), np.linspace(0, 1, n, endpoint=False))
    assert np.array_equal(made.anchors, np.tile(anchors, (n, 1)), equal_nan=True), (
        "those asked for, not those of the pool"
    )
    return set(made.tokens.tolist())


def test_samples_come_from_people_with_the_nearest_homes() -> None:
    pool = pool_of([EAST, WEST, EAST, [1.0, 4.0, 1.1, 4.0]], [[7], [8], [9], [10]])
    assert drawn(pool, [1.02, 8.9, 1.1, 9.0]) == {7, 9}
    assert drawn(pool, [1.02, 2.1, 1.1, 2.0]) == {8, 10}
    assert drawn(pool, [NAN] * 4) == {7, 8, 9, 10}, "of anybody, where nothing is asked"
    assert drawn(pool_of([[NAN] * 4] * 2, [[7], [8]]), EAST) == {7, 8}, (
        "or where the pool knows nothing"
    )


def test_all_samples_of_one_home_are_equally_likely() -> None:
    """Homes at the middle of a zone: more of them than neighbours."""
    pool = pool_of([EAST] * 6 + [WEST], [[token] for token in range(7, 14)])
    assert drawn(pool, EAST) == set(range(7, 13))


def test_known_workplaces_count_as_well_as_homes() -> None:
    works = [[1.0, 9.0, 1.0, 5.0], [1.0, 9.0, 1.0, 1.0], [1.0, 9.0, NAN, NAN]]
    pool = pool_of(works, [[7], [8], [9]], neighbours=1)
    assert drawn(pool, [1.0, 9.0, 1.0, 4.8]) == {7}
    assert drawn(pool, [1.0, 9.0, NAN, NAN]) == {7, 8, 9}


def test_longer_samples_are_truncated_and_counted(world: World, tmp_path: Path) -> None:
    report = train(
        world.dataset.path,
        tmp_path / "model",
        generator="external",
        values={"pool": world.pool, "length": 3},
        execution=Execution(quiet=True),
    )
    loaded = load_model(tmp_path / "model").generator
    assert (
        report["pool"]["truncated"] > 0
        and np.diff(loaded.sample(200).offsets).max() == loaded.max_length == 3
    )


@pytest.mark.parametrize("wrong", ["tokens", "offsets", "anchors"])
def test_arrays_that_are_not_samples_are_refused(world: World, tmp_path: Path, wrong: str) -> None:
    loaded = load_model(world.model).generator
    samples = Pool.load(world.model, loaded.vocabulary, 1, loaded.max_length).samples
    changed = {
        "tokens": samples.tokens + np.int32(len(loaded.vocabulary)),
        "offsets": samples.offsets[::-1].copy(),
        "anchors": samples.anchors[1:],
    }
    broken: Any = {wrong: changed[wrong]}
    pool = Pool(replace(samples, **broken), 1)
    config: Any = loaded.config
    External(config, loaded.vocabulary, pool).save(tmp_path)
    with pytest.raises(MobatlasError, match=r"do not fit config\.json"):
        family_of("external").load(tmp_path, loaded.config, loaded.vocabulary, None)


# ---- the whole way


def test_a_run_reads_a_pool_relative_to_its_configuration(world: World, tmp_path: Path) -> None:
    shutil.copytree(world.root / "city", tmp_path / "city")
    shutil.copy(world.pool, tmp_path / "pool.parquet")
    config: dict[str, Any] = {
        "preset": "small",
        "source": {"path": "city"},
        "train": {"generator": "external", "options": {"pool": "pool.parquet"}},
        "supervise": {
            "options": {"calibration": {"pool": 16, "candidates": 2, "ridge": 1}, "visits": False}
        },
        "samples": {"each": 5},
        "regions": {"groups": {"partition": "demogroups", "features": ["category"]}},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    command = ("run", tmp_path / "run.yaml", "--out", tmp_path / "out", "--quiet")
    done = run(*command)
    assert done.code == 0 and (tmp_path / "out" / "report.html").exists(), done.err
    assert not (tmp_path / "out" / "strong").exists(), "it cannot be taught labels either"
    (tmp_path / "pool.parquet").write_text("another")
    assert "pool.parquet: this is not a readable Parquet file" in refused(*command), (
        "what it was made of is another file"
    )
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config | {"strong": True}))
    assert "strong: the generator external cannot be trained on labels; remove `strong`" in refused(
        *command
    )
    (tmp_path / "pool.parquet").unlink()
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    assert f"{tmp_path / 'pool.parquet'}: no such file" in refused(*command)


def test_the_commands_of_the_how_to_page_run(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    section = HOW_TO.read_text().split("## Bring your own generator")[1].split("\n## ")[0]
    blocks = re.findall(r"```python\n(.*?)```", section, flags=re.DOTALL)
    assert blocks and sum(len(block.splitlines()) for block in blocks) <= 20
    shutil.copytree(world.dataset.path, tmp_path / "dataset")
    shutil.copytree(world.regions, tmp_path / "regions")
    monkeypatch.chdir(tmp_path)
    brief = functools.partial(CalibrationConfig, pool=64, ridge=1.0)
    monkeypatch.setattr(strategies.SuperviseConfig.model_fields["calibration"], "default", brief())
    scope: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, "how-to.md", "exec"), scope)
    women = scope["women"].to_pandas()
    assert set(women["group"]) == {GROUP} and women["trajectory"].nunique() == 500
