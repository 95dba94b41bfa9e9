from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mobatlas import MobatlasError, TrajectoryDataset, build_regions, load_regions
from mobatlas.artifacts import MANIFEST, new_folder
from mobatlas.data.schema import ANCHORS
from mobatlas.data.vocabulary import FIRST_POI
from mobatlas.features import haversine_km
from mobatlas.generation import SCHEMA, _uniform, generate, read_synthetic
from mobatlas.generators.base import Generator
from mobatlas.generators.folder import load_model, save_model
from mobatlas.generators.weights import WEIGHTS
from mobatlas.regions.folder import load_assignment
from tests.tiny import fitted, small_city

FAMILY = "latent-diffusion"
GROUP = "30-40, F"
TINY: dict[str, Any] = {
    "length": 16,
    "autoencoder": {"encoder_layers": 1, "width": 32, "feedforward": 64, "latent": 8, "batch": 64}
    | {"steps": 100, "learning_rate": 5e-3, "warmup": 5},
    "denoiser": {"depth": 2, "width": 32, "heads": 2, "embedding": 8, "steps": 40, "batch": 64, "warmup": 5},
}


@dataclass(frozen=True)
class World:
    """A dataset and what was made of it."""

    dataset: TrajectoryDataset
    model: Path  # of phase 1
    grouped: Path  # can be told groups
    regions: Path  # hot16: one group is most of each region


def keep(out: Path, generator: Generator, dataset: TrajectoryDataset) -> Path:
    with new_folder(out, "model") as folder:
        save_model(folder.path, generator, FAMILY, dataset)
        folder.details["dataset"] = {"path": str(dataset.path), "hash": dataset.manifest.content_hash}
    return out


def remade(source: Path, out: Path, change: Callable[[Path], Any]) -> Path:
    """A model folder whose files were changed before its manifest was written."""
    manifest = json.loads((source / MANIFEST).read_text())
    with new_folder(out, manifest["kind"], config=manifest["config"]) as folder:
        shutil.copytree(source, folder.path, dirs_exist_ok=True, ignore=shutil.ignore_patterns(MANIFEST))
        folder.details |= manifest["details"]
        change(folder.path)
    return out


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    root = tmp_path_factory.mktemp("world")
    dataset = small_city(root, users=400)
    generator = fitted(FAMILY, dataset, **TINY)
    assert dataset.groups is not None
    grouped = keep(root / "grouped", generator.with_groups(dataset.groups, 1), dataset)
    build_regions(dataset.path, root / "regions", partition="hot16")
    return World(dataset, keep(root / "model", generator, dataset), grouped, root / "regions")


@pytest.fixture
def homes(world: World, tmp_path: Path) -> Path:
    """Anchors of five people, the last without work."""
    table = pd.DataFrame(world.dataset.anchors[:5], columns=list(ANCHORS))
    table.loc[4, ["work_lat", "work_lon"]] = None
    table.to_csv(tmp_path / "homes.csv", index=False)
    return tmp_path / "homes.csv"


def firsts(path: Path) -> pd.DataFrame:
    """One row a trajectory."""
    return pd.read_parquet(path).groupby("trajectory", sort=False).head(1)


def rows(frame: pd.DataFrame) -> set[tuple[float, ...]]:
    return set(map(tuple, frame[list(ANCHORS)].to_numpy().tolist()))


def test_the_same_seed_gives_the_same_bytes_whatever_the_chunks(world: World, tmp_path: Path) -> None:
    options: dict[str, Any] = {"region": "R3", "regions": world.regions, "coarsen": 1.0, "lengths": "empirical"}
    for chunk in (1, 2, None):
        generate(world.grouped, tmp_path / f"{chunk}", 600, seed=4, chunk=chunk, **options)
    assert (tmp_path / "1").read_bytes() == (tmp_path / "2").read_bytes() == (tmp_path / "None").read_bytes()


def test_a_sample_does_not_depend_on_how_many_there_are(world: World, tmp_path: Path) -> None:
    few, many = tmp_path / "few", tmp_path / "many"
    generate(world.model, few, 300)
    generate(world.model, many, 600)
    table = pq.read_table(many)
    assert pq.read_table(few).equals(table.slice(0, pq.read_metadata(few).num_rows))
    assert table.schema.equals(SCHEMA) and table["trajectory"].unique().to_pylist() == list(range(600))


def test_another_seed_gives_other_people_and_trajectories(world: World, tmp_path: Path) -> None:
    for seed in (0, 1):
        generate(world.model, tmp_path / f"{seed}", 50, seed=seed)
    one, two = (pq.read_table(tmp_path / f"{seed}") for seed in (0, 1))
    assert one["poi_id"].to_pylist() != two["poi_id"].to_pylist()
    assert not rows(firsts(tmp_path / "0")) <= rows(firsts(tmp_path / "1"))


@given(st.integers(0, 2**63 - 1), st.integers(0, 10**12), st.integers(0, 20), st.integers(0, 20))
def test_random_numbers_can_begin_anywhere(seed: int, start: int, some: int, more: int) -> None:
    whole = _uniform(seed, 1, start, start + some + more)
    assert np.array_equal(_uniform(seed, 1, start + some, start + some + more), whole[some:])


def test_anchors_are_those_of_training_people(world: World, tmp_path: Path) -> None:
    generate(world.model, tmp_path / "out", 2_000)
    train = world.dataset.anchors[world.dataset.split_people("train")]
    made = rows(firsts(tmp_path / "out"))
    assert made <= set(map(tuple, train.tolist())) and len(made) > 0.95 * len(train)


def test_home_and_work_are_at_the_anchors_and_places_where_they_are(world: World, tmp_path: Path) -> None:
    generate(world.model, tmp_path / "out", 500)
    made = pd.read_parquet(tmp_path / "out")
    home, work = made[made.poi_id == "HOME"], made[made.poi_id == "WORK"]
    assert len(home) and (home.lat == home.home_lat).all() and (home.lon == home.home_lon).all()
    assert len(work) and (work.lat == work.work_lat).all() and (work.lon == work.work_lon).all()
    known = world.dataset.vocabulary.table.to_pandas().set_index("poi_id").iloc[FIRST_POI:]
    places = made[made.poi_id.isin(known.index)].join(known, on="poi_id", rsuffix="_known")
    assert len(places) and (places.lat == places.lat_known).all() and (places.category == places.category_known).all()
    assert set(made.category[made.poi_id == "HOME"]) == {"home"}


def test_a_group_can_be_asked_for(world: World, tmp_path: Path) -> None:
    for name, group in (("women", GROUP), ("men", "30-40,M"), ("all", None)):
        generate(world.grouped, tmp_path / name, 60, group=group)
    women, men, everybody = (pd.read_parquet(tmp_path / name) for name in ("women", "men", "all"))
    assert set(women.group) == {GROUP} and everybody.group.isna().all()
    assert women.poi_id.tolist() != men.poi_id.tolist()
    assert rows(women) == rows(men) == rows(everybody)  # the same people, whatever is said of them


def test_a_region_gives_its_people_and_its_composition(world: World, tmp_path: Path) -> None:
    generate(world.grouped, tmp_path / "out", 2_000, region="R12", regions=world.regions)
    made, composition = firsts(tmp_path / "out"), load_regions(world.regions).composition
    shares = made.group.value_counts(normalize=True).reindex(composition.groups.names, fill_value=0)
    expected = composition.shares[composition.regions.index("R12")]
    assert np.abs(shares.to_numpy() - expected).max() < 0.05 and set(made.region) == {"R12"}
    region, dataset = load_assignment(world.regions), world.dataset
    assert region is not None
    train, users = dataset.split_people("train"), dataset.people["user_id"].to_pylist()
    lives = [person for person in train.tolist() if region.get(users[person]) == "R12"]
    assert rows(made) == set(map(tuple, dataset.anchors[lives].tolist()))


def test_a_group_of_a_region_and_a_baseline_of_a_region(world: World, tmp_path: Path) -> None:
    generate(world.grouped, tmp_path / "group", 20, region="R2", regions=world.regions, group=GROUP)
    generate(world.model, tmp_path / "baseline", 20, region="R2", regions=world.regions)
    assert set(firsts(tmp_path / "group").group) == {GROUP}
    assert firsts(tmp_path / "baseline").group.isna().all()
    assert rows(firsts(tmp_path / "group")) == rows(firsts(tmp_path / "baseline"))


def test_a_model_supervised_with_regions_needs_nothing_else(
    world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    home = [48.1, 11.5, 48.2, 11.6]

    def add(folder: Path) -> None:
        shutil.copy(world.regions / "composition.parquet", folder)
        pq.write_table(
            pa.table({"region": ["R1"], **dict(zip(ANCHORS, ([x] for x in home), strict=True))}),
            folder / "anchors.parquet",
        )

    model = remade(world.grouped, tmp_path / "supervised", add)
    generate(model, tmp_path / "out", 20, region="R1", dataset=tmp_path / "nowhere", regions=world.regions)
    assert rows(firsts(tmp_path / "out")) == {tuple(home)}
    assert "--regions" in caplog.text and "is not read" in caplog.text
    with pytest.raises(
        MobatlasError, match=r"--region R2: .* knows no training person who lives there; pass --anchors"
    ):
        generate(model, tmp_path / "out2", 20, region="R2")


def test_a_table_of_anchors_is_used_in_order_and_again_from_the_top(world: World, homes: Path, tmp_path: Path) -> None:
    generate(world.model, tmp_path / "rows", anchors=homes, dataset=tmp_path / "needs no dataset")
    generate(world.model, tmp_path / "twice", 12, anchors=homes)
    table = pd.read_csv(homes)
    pd.testing.assert_frame_equal(firsts(tmp_path / "rows")[list(ANCHORS)].reset_index(drop=True), table)
    again = firsts(tmp_path / "twice")[list(ANCHORS)].reset_index(drop=True)
    pd.testing.assert_frame_equal(again, table.loc[[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1]].reset_index(drop=True))


def test_a_table_may_say_the_group_of_each_row(
    world: World, homes: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    groups = ["<30, M", ">50, F", GROUP, "<30,M", GROUP]
    pd.read_csv(homes).assign(group=groups).to_parquet(tmp_path / "homes.parquet")
    for name, model in (("told", world.grouped), ("not", world.model)):
        generate(model, tmp_path / name, anchors=tmp_path / "homes.parquet")
    expected = ["<30, M", ">50, F", GROUP, "<30, M", GROUP]
    assert firsts(tmp_path / "told").group.tolist() == firsts(tmp_path / "not").group.tolist() == expected
    assert "knows no groups, so column 'group'" in caplog.text and "changes no sample" in caplog.text


def test_coarsening_moves_each_person_once_and_no_farther_than_asked(world: World, tmp_path: Path) -> None:
    for name, coarsen in (("exact", None), ("zero", 0.0), ("coarse", 1.0)):
        generate(world.model, tmp_path / name, 2_000, coarsen=coarsen)
    exact, zero, coarse = (firsts(tmp_path / name)[list(ANCHORS)].to_numpy() for name in ("exact", "zero", "coarse"))
    assert np.array_equal(exact, zero)
    for two in (slice(0, 2), slice(2, 4)):
        km = haversine_km(exact[:, two], coarse[:, two])
        assert km.max() <= 1 + 1e-9 and abs(np.mean(km) - 2 / 3) < 0.05  # uniform over the disc
    assert len(np.unique(np.hstack([exact, coarse]), axis=0)) == len(np.unique(exact, axis=0))


def test_empirical_lengths_are_those_of_all_training_trajectories(world: World, tmp_path: Path) -> None:
    generate(world.model, tmp_path / "out", 4_000, lengths="empirical")
    lengths = np.bincount(pd.read_parquet(tmp_path / "out").groupby("trajectory").size(), minlength=17)
    train = np.minimum(world.dataset.lengths[world.dataset.split("train")], 16)
    expected = np.bincount(train, minlength=17) / len(train)
    assert not lengths[expected == 0].any()
    assert np.abs(lengths / 4_000 - expected).max() < 0.03


def test_what_is_read_back_is_what_was_sampled(world: World, homes: Path, tmp_path: Path) -> None:
    model = load_model(world.grouped)
    generate(world.grouped, tmp_path / "out", 300, anchors=homes, group=GROUP, seed=8)
    anchors = pd.read_csv(homes).to_numpy()[np.arange(300) % 5]
    assert model.generator.groups is not None
    sampled = model.generator.sample(300, np.full(300, model.generator.groups.index(GROUP)), anchors, seed=8)
    shuffled = pd.read_parquet(tmp_path / "out").sample(frac=1, random_state=0)
    shuffled.to_parquet(tmp_path / "shuffled")
    for name in ("out", "shuffled"):
        read, groups, regions = read_synthetic(tmp_path / name, world.dataset.vocabulary)
        assert np.array_equal(read.tokens, sampled.tokens) and np.array_equal(read.offsets, sampled.offsets)
        assert np.array_equal(read.anchors, anchors, equal_nan=True)
        assert groups.tolist() == [GROUP] * 300 and regions.tolist() == [None] * 300


def test_labels_are_never_read(world: World, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(world.dataset.path, bare, ignore=shutil.ignore_patterns("labels.parquet"))
    for name, dataset in (("with", world.dataset.path), ("without", bare)):
        generate(world.grouped, tmp_path / name, 300, dataset=dataset, region="R5", regions=world.regions)
    assert (tmp_path / "with").read_bytes() == (tmp_path / "without").read_bytes()


def test_the_file_says_what_made_it_and_not_where(world: World, tmp_path: Path) -> None:
    done: list[float] = []

    class Counting:
        def step(self, now: float, note: str = "") -> None:
            done.append(now)

    made = generate(world.model, tmp_path / "a" / "b" / "out.parquet", 600, seed=5, chunk=1, tracker=Counting())
    facts = json.loads(pq.read_schema(made.path).metadata[b"mobatlas"])
    assert facts["model"] == load_model(world.model).manifest.content_hash
    assert (facts["seed"], facts["n"], facts["group"], facts["region"]) == (5, 600, None, None)
    assert "mobatlas" in facts["versions"] and str(tmp_path.parent) not in json.dumps(facts)
    assert done == [256, 512, 600] and made.as_dict()["tokens"] == pq.read_metadata(made.path).num_rows
    assert [path.name for path in (tmp_path / "a" / "b").iterdir()] == ["out.parquet"]


def test_a_file_that_is_there_is_replaced_only_if_asked_to_and_only_ours(world: World, tmp_path: Path) -> None:
    out, thesis = tmp_path / "out.parquet", tmp_path / "thesis.tex"
    thesis.write_text("years of work")
    (tmp_path / ".out.parquet.partial").write_text("of a process that was killed")
    generate(world.model, out, 10)
    before = out.read_bytes()
    with pytest.raises(MobatlasError, match=r"out\.parquet: exists already; choose another --out or pass --overwrite"):
        generate(world.model, out, 10)
    with pytest.raises(MobatlasError, match="was not written by mobatlas"):
        generate(world.model, thesis, 10, overwrite=True)
    with pytest.raises(MobatlasError, match=r"is a folder; give a file"):
        generate(world.model, tmp_path, 10, overwrite=True)
    with pytest.raises(MobatlasError, match="lies over the source"):
        generate(world.model, world.model / "out.parquet", 10)
    assert out.read_bytes() == before and thesis.read_text() == "years of work"
    generate(world.model, out, 10, seed=1, overwrite=True)
    assert out.read_bytes() != before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.parquet", "thesis.tex"]


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no trajectory": ({"n": 0}, "--n 0: ask for at least 1 trajectory"),
    "no number": ({"n": None}, "--n is missing"),
    "a negative seed": ({"seed": -1}, "--seed -1: give a whole number"),
    "a group that is not there": ({"group": "30-40, W"}, "group '30-40, W' does not exist; did you mean '30-40, "),
    "a word for lengths": ({"lengths": "emprical"}, "--lengths emprical does not exist; did you mean 'empirical'?"),
    "a negative radius": ({"coarsen": -1.0}, "--coarsen -1.0: give a radius of 0 km or more"),
    "a radius that is no number": ({"coarsen": float("nan")}, "--coarsen nan"),
    "a region of nowhere": ({"region": "R1"}, "knows no regions; pass --regions"),
    "regions without a region": ({"regions": "REGIONS"}, "--regions goes with --region"),
    "an unknown region": ({"region": "R33", "regions": "REGIONS"}, "--region R33: is no region of"),
    "two places": ({"region": "R1", "anchors": "x.csv"}, "--anchors and --region each say where people live"),
    "no such table": ({"anchors": "nowhere.csv"}, "nowhere.csv: no such file"),
    "no such model": ({"model": "nowhere"}, "nowhere: no such model folder"),
    "a dataset for a model": ({"model": "DATASET"}, "holds a dataset, not a model"),
    "a dataset that is gone": ({"dataset": "nowhere"}, "there is no dataset at nowhere; pass --dataset"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_in_one_sentence_and_writes_nothing(world: World, tmp_path: Path, case: str) -> None:
    changes, sentence = BAD[case]
    named: dict[str, Any] = {"REGIONS": world.regions, "DATASET": world.dataset.path}
    options: dict[str, Any] = {key: named.get(str(value), value) for key, value in ({"n": 10} | changes).items()}
    with pytest.raises(MobatlasError) as caught:
        generate(options.pop("model", world.grouped), tmp_path / "new" / "out", **options)
    assert sentence in str(caught.value) and "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("columns", "sentence"),
    [
        ({"home_lat": "95"}, "in row 1 (95, -77.4) 'home_lat' and 'home_lon' are outside -90..90 and -180..180"),
        ({"work_lon": "west"}, "column 'work_lon' is empty or not a number in row 1 ('west')"),
        ({"work_lon": ""}, "in row 1 (37.5, nan) only one of 'work_lat' and 'work_lon' is given; give both or none"),
        ({"home_lat": "-77.4", "home_lon": "37.5"}, "'home_lat' and 'home_lon' are far from all places of"),
        ({"home_lon": None}, "column 'home_lon' is missing"),
        ({"group": "teenagers"}, "column 'group': group 'teenagers' does not exist"),
        ({}, "the table has no rows"),
    ],
)
def test_a_bad_table_of_anchors_is_refused(
    world: World, tmp_path: Path, columns: dict[str, str | None], sentence: str
) -> None:
    good = {"home_lat": "37.5", "home_lon": "-77.4", "work_lat": "37.5", "work_lon": "-77.4"}
    table = {name: value for name, value in (good | columns).items() if value is not None}
    path = tmp_path / "homes.csv"
    path.write_text(",".join(table) + "\n" + (",".join(table.values()) + "\n" if columns else ""))
    with pytest.raises(MobatlasError) as caught:
        generate(world.grouped, tmp_path / "out", anchors=path)
    assert str(caught.value).startswith(f"{path}: ") and sentence in str(caught.value)


def test_groups_are_refused_where_they_have_no_place(world: World, homes: Path, tmp_path: Path) -> None:
    with pytest.raises(MobatlasError, match="model: knows no groups, it is of phase 1; supervise it first"):
        generate(world.model, tmp_path / "out", 10, group=GROUP)
    pd.read_csv(homes).assign(group=GROUP).to_csv(homes, index=False)
    with pytest.raises(MobatlasError, match=r"--group: .* has a column 'group' already"):
        generate(world.grouped, tmp_path / "out", 10, group=GROUP, anchors=homes)


def test_another_dataset_is_refused_for_its_places_and_warned_of_for_its_people(
    world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = small_city(tmp_path / "other", pois=30).path
    with pytest.raises(MobatlasError, match=r"dataset: its vocabulary is not the one that .*model was trained on"):
        generate(world.model, tmp_path / "out", 10, dataset=other)
    moved = remade(world.dataset.path, tmp_path / "moved", lambda folder: (folder / "summary.json").write_text("{}"))
    generate(world.model, tmp_path / "out", 10, dataset=moved, region="R1", regions=world.regions)
    assert "moved: is not the dataset that" in caplog.text
    assert "regions: was made of another dataset than" in caplog.text


def test_the_groups_of_regions_must_be_those_of_the_model(world: World, tmp_path: Path) -> None:
    def rename(folder: Path) -> None:
        table = pd.read_parquet(folder / "composition.parquet")
        table.assign(group=table.group.str.replace("F", "W")).to_parquet(folder / "composition.parquet")

    regions = remade(world.regions, tmp_path / "regions", rename)
    with pytest.raises(MobatlasError, match=r"regions: its groups \(<30, M; <30, W; .* are not those of .*grouped"):
        generate(world.grouped, tmp_path / "out", 10, region="R1", regions=regions)


def test_published_regions_know_no_people(world: World, tmp_path: Path) -> None:
    regions = remade(world.regions, tmp_path / "regions", lambda folder: (folder / "assignment.parquet").unlink())
    with pytest.raises(MobatlasError, match="knows no training person who lives there; pass --anchors"):
        generate(world.grouped, tmp_path / "out", 10, region="R1", regions=regions)


def test_a_model_that_is_not_trained_to_the_end_says_how_to_go_on(tmp_path: Path) -> None:
    (tmp_path / "model" / "training").mkdir(parents=True)
    with pytest.raises(MobatlasError, match=r"model: is not trained to the end; continue it with .* --resume"):
        load_model(tmp_path / "model")


class Evil:
    """Unpickled, it leaves a trace."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("executed",)


def cut(path: Path, share: float = 0.5) -> None:
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])


def described(**changes: Any) -> Callable[[Path], Any]:
    """A change of config.json."""

    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda f: cut(f / WEIGHTS), "weights.safetensors: is not a readable safetensors file"),
        (lambda f: (f / WEIGHTS).write_bytes(pickle.dumps(Evil())), "is not a readable safetensors file"),
        (lambda f: (f / WEIGHTS).unlink(), "weights.safetensors: is not a readable safetensors file"),
        (lambda f: cut(f / "vocabulary.parquet"), "vocabulary.parquet: not a readable Parquet file"),
        (lambda f: pd.DataFrame({"a": [1]}).to_parquet(f / "vocabulary.parquet"), "is not a table of tokens"),
        (lambda f: cut(f / "config.json"), "config.json: is missing or not valid JSON"),
        (lambda f: (f / "config.json").write_text("[]"), "config.json: does not hold what mobatlas writes there"),
        (described(generator="latent-difusion"), "does not exist; did you mean 'latent-diffusion'?"),
        (described(config={"lenght": 16}), "config.json: unknown key 'lenght'; did you mean 'length'?"),
        (described(config={"length": 16}), "its weights are not those of config.json"),
        (described(groups={"age": ["young", "young"]}), "config.json: attribute 'age': its levels are"),
        (described(groups={"age": ["young", "old"]}), "its weights are not those of config.json"),
        (described(more=1), "config.json: unknown key 'more'"),
        (
            lambda f: (f / "lengths.json").write_text('{"counts": [0, 1]}'),
            "does not count trajectories of 1 to 16 tokens",
        ),
    ],
)
def test_a_model_folder_that_is_not_whole_is_refused(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], Any], sentence: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(MobatlasError) as caught:
        load_model(remade(world.model, tmp_path / "model", change))
    assert sentence in str(caught.value) and "\n" not in str(caught.value)
    assert not (tmp_path / "executed").exists()


def test_weights_changed_after_training_are_refused(world: World, tmp_path: Path) -> None:
    for name, spoil in (("cut", cut), ("pickle", lambda path: path.write_bytes(pickle.dumps(Evil())))):
        shutil.copytree(world.model, tmp_path / name)
        spoil(tmp_path / name / WEIGHTS)
        with pytest.raises(MobatlasError, match=r"is not the file that manifest\.json lists"):
            load_model(tmp_path / name)


def changed(source: Path, out: Path, **columns: Any) -> Path:
    table = pd.read_parquet(source)
    dropped = [name for name, value in columns.items() if value is None]
    table.assign(**columns).drop(columns=dropped).to_parquet(out)
    return out


def test_a_synthetic_file_that_cannot_be_read_is_refused_by_name(world: World, tmp_path: Path) -> None:
    good, bad, words = tmp_path / "good.parquet", tmp_path / "bad.parquet", world.dataset.vocabulary
    generate(world.model, good, 20)
    for columns, sentence in (
        ({"position": None}, "bad.parquet: column 'position' is missing"),
        ({"home_lat": None}, "bad.parquet: column 'home_lat' is missing"),
        ({"poi_id": "Atlantis"}, "poi_id 'Atlantis' is no place of the vocabulary"),
        ({"poi_id": "<pad>"}, "poi_id '<pad>' is no place of the vocabulary"),
        ({"poi_id": pd.NA}, "column 'poi_id' is empty in some rows"),
        ({"trajectory": "first"}, "a column is not as mobatlas writes it"),
        ({"trajectory": 7}, "trajectory 7 has position 0 twice; number trajectories anew"),
    ):
        with pytest.raises(MobatlasError) as caught:
            read_synthetic(changed(good, bad, **columns), words)
        assert sentence in str(caught.value)
    pq.write_table(SCHEMA.empty_table(), bad)
    with pytest.raises(MobatlasError, match="column 'trajectory' is empty"):
        read_synthetic(bad, words)
    cut(good)
    for path, sentence in ((good, "not a readable Parquet file"), (tmp_path / "nowhere", "no such file")):
        with pytest.raises(MobatlasError, match=sentence):
            read_synthetic(path, words)


def test_memory_does_not_grow_with_the_number_of_samples(world: World, tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from mobatlas.generation import generate; model, out = map(Path, sys.argv[1:])\n"
        "for n in (2_000, 20_000): print(generate(model, out / str(n), n, lengths='empirical').peak_gb)"
    )
    command = [sys.executable, "-c", code, str(world.model), str(tmp_path)]
    done = subprocess.run(
        command, check=True, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    before, after = map(float, done.stdout.split())  # the peak of a process never falls
    assert after < 2 and after < before + 0.4
