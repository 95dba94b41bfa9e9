"""`generate` and the reader of samples refuse bad input in one sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow.parquet as pq
import pytest

from mobatlas import MobatlasError
from mobatlas.data.samples import SCHEMA, read_samples
from mobatlas.sampling.chunks import SampleRequest
from mobatlas.sampling.generate import generate
from tests.tiny import small_city
from tests.worlds import GROUP, World, cut, remade, small_world, write_homes
from tests.written import generate_with


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return small_world(tmp_path_factory.getbasetemp())


@pytest.fixture
def homes(world: World, tmp_path: Path) -> Path:
    return write_homes(world, tmp_path / "homes.csv")


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no trajectory": ({"n": 0}, "--n 0: ask for at least 1 trajectory"),
    "no number": ({"n": None}, "--n is missing"),
    "a negative seed": ({"seed": -1}, "--seed -1: give a whole number"),
    "a group that is not there": (
        {"group": "30-40, W"},
        "group '30-40, W' does not exist; did you mean '30-40, F'",
    ),
    "a negative radius": ({"coarsen": -1.0}, "--coarsen -1.0: give a radius of 0 km or more"),
    "a radius that is no number": ({"coarsen": float("nan")}, "--coarsen nan"),
    "a radius in miles": (
        {"coarsen": "1 mile"},
        "--coarsen 1 mile: give a radius of 0 km or more, such as 1km, or a grid",
    ),
    "a grid without squares": ({"coarsen": "grid:0m"}, "--coarsen grid:0m: give"),
    "a region of nowhere": ({"region": "R1"}, "has no regions; pass --regions"),
    "regions without a region": ({"regions": "REGIONS"}, "--regions needs --region"),
    "an unknown region": (
        {"region": "R33", "regions": "REGIONS"},
        "regions has no such region",
    ),
    "two places": (
        {"region": "R1", "anchors": "x.csv"},
        "--anchors FILE and --region both choose the homes of people",
    ),
    "no such table": ({"anchors": "nowhere.csv"}, "nowhere.csv: no such file"),
    "no such model": ({"model": "nowhere"}, "nowhere: no such model folder"),
    "a dataset for a model": ({"model": "DATASET"}, "is a dataset folder, not a model folder"),
    "a table of commas": (
        {"out": "out.CSV"},
        "out.CSV: samples are written as Parquet; name a file that ends in .parquet",
    ),
    "a dataset that is gone": (
        {"dataset": "nowhere", "anchors": "observed"},
        "there is no dataset at nowhere; pass --dataset",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_in_one_sentence_and_writes_nothing(
    world: World, tmp_path: Path, case: str
) -> None:
    changes, sentence = BAD[case]
    named: dict[str, Any] = {"REGIONS": world.regions, "DATASET": world.dataset.path}
    options: dict[str, Any] = {
        key: named.get(str(value), value) for key, value in ({"n": 10} | changes).items()
    }
    with pytest.raises(MobatlasError) as caught:
        model = options.pop("model", world.grouped)
        generate_with(model, tmp_path / "new" / options.pop("out", "out"), **options)
    assert sentence in str(caught.value) and "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("columns", "sentence"),
    [
        (
            {"home_lat": "95"},
            "row 1 (95, -77.4): 'home_lat' and 'home_lon' are outside -90..90 and -180..180",
        ),
        ({"work_lon": "west"}, "column 'work_lon' is empty or not a number in row 1 ('west')"),
        (
            {"work_lon": ""},
            "row 1 (37.5, nan): only one of 'work_lat' and 'work_lon' is filled; give both or none",
        ),
        (
            {"home_lat": "-77.4", "home_lon": "37.5"},
            "'home_lat' and 'home_lon' are far from all places of",
        ),
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
        generate(world.grouped, tmp_path / "out", request=SampleRequest(anchors=path))
    assert str(caught.value).startswith(f"{path}: ") and sentence in str(caught.value)


def test_groups_are_refused_where_they_have_no_place(
    world: World, homes: Path, tmp_path: Path
) -> None:
    with pytest.raises(
        MobatlasError,
        match="model: this model of phase 1 has no groups; run `mobatlas supervise` first",
    ):
        generate(world.model, tmp_path / "out", 10, SampleRequest(group=GROUP))
    pd.read_csv(homes).assign(group=GROUP).to_csv(homes, index=False)
    with pytest.raises(MobatlasError, match=r"--group: .* also has a column 'group'"):
        generate(world.grouped, tmp_path / "out", 10, SampleRequest(group=GROUP, anchors=homes))


def test_another_dataset_is_refused_for_its_places_and_warned_of_for_its_people(
    world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = small_city(tmp_path / "other", pois=30).path
    with pytest.raises(
        MobatlasError, match=r"dataset: its vocabulary is not the one that .*model was trained on"
    ):
        generate(
            world.model, tmp_path / "out", 10, SampleRequest(anchors="observed"), dataset=other
        )
    moved = remade(
        world.dataset.path,
        tmp_path / "moved",
        lambda folder: (folder / "summary.json").write_text("{}"),
    )
    generate(
        world.model,
        tmp_path / "out",
        10,
        SampleRequest(region="R1", regions=world.regions),
        dataset=moved,
    )
    assert "moved: this is not the dataset that" in caplog.text
    assert "regions: these regions are from another dataset than" in caplog.text


def test_the_groups_of_regions_must_be_those_of_the_model(world: World, tmp_path: Path) -> None:
    def rename(folder: Path) -> None:
        table = pd.read_parquet(folder / "composition.parquet")
        table.assign(group=table.group.str.replace("F", "W")).to_parquet(
            folder / "composition.parquet"
        )

    regions = remade(world.regions, tmp_path / "regions", rename)
    with pytest.raises(
        MobatlasError, match=r"regions: its groups \(<30, M; <30, W; .* are not those of .*grouped"
    ):
        generate(world.grouped, tmp_path / "out", 10, SampleRequest(region="R1", regions=regions))


def test_published_regions_know_no_people(world: World, tmp_path: Path) -> None:
    regions = remade(
        world.regions, tmp_path / "regions", lambda folder: (folder / "assignment.parquet").unlink()
    )
    with pytest.raises(
        MobatlasError, match="has fewer than 10 training people with a home there; pass --anchors"
    ):
        generate(world.grouped, tmp_path / "out", 10, SampleRequest(region="R1", regions=regions))


def changed(source: Path, out: Path, **columns: Any) -> Path:
    table = pd.read_parquet(source)
    dropped = [name for name, value in columns.items() if value is None]
    table.assign(**columns).drop(columns=dropped).to_parquet(out)
    return out


def test_a_file_of_samples_that_cannot_be_read_is_refused_by_name(
    world: World, tmp_path: Path
) -> None:
    good = tmp_path / "good.parquet"
    bad = tmp_path / "bad.parquet"
    vocabulary = world.dataset.vocabulary
    generate(world.model, good, 20)
    for columns, sentence in (
        ({"trajectory": None}, "bad.parquet: column 'trajectory' is missing"),
        ({"poi_id": None}, "bad.parquet: column 'poi_id' is missing"),
        ({"poi_id": pd.NA}, "column 'poi_id' is empty in"),
        ({"position": "first"}, "column 'position' cannot be read"),
        ({"home_lat": "north"}, "column 'home_lat' cannot be read"),
        ({"trajectory": 7}, "trajectory 7 has one position twice; give trajectories new numbers"),
    ):
        with pytest.raises(MobatlasError) as caught:
            read_samples(changed(good, bad, **columns), vocabulary)
        assert sentence in str(caught.value)
    pq.write_table(SCHEMA.empty_table(), bad)
    with pytest.raises(MobatlasError, match="has no rows; give a file with"):
        read_samples(bad, vocabulary)
    cut(good)
    for path, sentence in (
        (good, "not a readable Parquet file"),
        (tmp_path / "nowhere", "no such file"),
    ):
        with pytest.raises(MobatlasError, match=sentence):
            read_samples(path, vocabulary)
