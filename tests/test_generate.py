"""Files of `generate`: the sampled people, equal bytes for equal seeds, and metadata."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mobatlas import MobatlasError, load_regions
from mobatlas.config import MIN_PEOPLE, Coarsening
from mobatlas.data.anchors import AnchorModel
from mobatlas.data.samples import SCHEMA, read_samples
from mobatlas.data.types import ANCHORS, FIRST_POI, haversine_km
from mobatlas.generators.protocol import uniforms
from mobatlas.generators.store import load_model
from mobatlas.io.manifest import METADATA, write_json
from mobatlas.regions.store import RegionsFolder
from mobatlas.sampling.chunks import SampleRequest, coarsen_anchors
from mobatlas.sampling.generate import generate
from tests.worlds import GROUP, World, firsts, remade, rows, small_world, write_homes


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return small_world(tmp_path_factory.getbasetemp())


@pytest.fixture
def homes(world: World, tmp_path: Path) -> Path:
    return write_homes(world, tmp_path / "homes.csv")


def test_the_same_seed_gives_the_same_bytes_whatever_the_chunks(
    world: World, tmp_path: Path
) -> None:
    options: dict[str, Any] = {
        "region": "R3",
        "regions": world.regions,
        "anchors": "observed",
        "coarsen": "1km",
    }
    for chunk in (1, 2, None):
        generate(
            world.grouped, tmp_path / f"{chunk}", 600, SampleRequest(seed=4, chunk=chunk, **options)
        )
    assert (
        (tmp_path / "1").read_bytes()
        == (tmp_path / "2").read_bytes()
        == (tmp_path / "None").read_bytes()
    )


def test_a_sample_does_not_depend_on_how_many_there_are(world: World, tmp_path: Path) -> None:
    few = tmp_path / "few"
    many = tmp_path / "many"
    generate(world.model, few, 300)
    generate(world.model, many, 600)
    table = pq.read_table(many)
    assert pq.read_table(few).equals(table.slice(0, pq.read_metadata(few).num_rows))
    assert table.schema.equals(SCHEMA) and table["trajectory"].unique().to_pylist() == list(
        range(600)
    )


def test_another_seed_gives_other_people_and_trajectories(world: World, tmp_path: Path) -> None:
    for seed in (0, 1):
        generate(world.model, tmp_path / f"{seed}", 50, SampleRequest(seed=seed))
    one, two = (pq.read_table(tmp_path / f"{seed}") for seed in (0, 1))
    assert one["poi_id"].to_pylist() != two["poi_id"].to_pylist()
    assert not rows(firsts(tmp_path / "0")) <= rows(firsts(tmp_path / "1"))


@given(st.integers(0, 2**63 - 1), st.integers(0, 10**12), st.integers(0, 20), st.integers(0, 20))
def test_random_numbers_can_begin_anywhere(seed: int, start: int, some: int, more: int) -> None:
    whole = uniforms(seed, start, start + some + more, 1)
    assert np.array_equal(uniforms(seed, start + some, start + some + more, 1), whole[some:])


def test_observed_anchors_are_those_of_training_people(
    world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    generate(world.model, tmp_path / "out", 2_000, SampleRequest(anchors="observed"))
    assert caplog.text.count("disclose where training people") == 1
    train = world.dataset.anchors[world.dataset.split_people("train")]
    made = rows(firsts(tmp_path / "out"))
    assert made <= set(map(tuple, train.tolist())) and len(made) > 0.95 * len(train)


def test_home_and_work_are_at_the_anchors_and_places_where_they_are(
    world: World, tmp_path: Path
) -> None:
    generate(world.model, tmp_path / "out", 500)
    made = pd.read_parquet(tmp_path / "out")
    home = made[made.poi_id == "HOME"]
    work = made[made.poi_id == "WORK"]
    assert len(home) and (home.lat == home.home_lat).all() and (home.lon == home.home_lon).all()
    assert len(work) and (work.lat == work.work_lat).all() and (work.lon == work.work_lon).all()
    known = world.dataset.vocabulary.table.to_pandas().set_index("poi_id").iloc[FIRST_POI:]
    places = made[made.poi_id.isin(known.index)].join(known, on="poi_id", rsuffix="_known")
    assert (
        len(places)
        and (places.lat == places.lat_known).all()
        and (places.category == places.category_known).all()
    )
    assert set(made.category[made.poi_id == "HOME"]) == {"home"}


def test_a_group_can_be_asked_for(world: World, tmp_path: Path) -> None:
    for name, group in (("women", GROUP), ("men", "30-40,M"), ("all", None)):
        generate(world.grouped, tmp_path / name, 60, SampleRequest(group=group))
    women, men, everybody = (pd.read_parquet(tmp_path / name) for name in ("women", "men", "all"))
    assert set(women.group) == {GROUP} and everybody.group.isna().all()
    assert women.poi_id.tolist() != men.poi_id.tolist()
    assert rows(women) == rows(men) == rows(everybody)  # the same people, whatever is said of them


def test_a_region_gives_its_people_and_its_composition(world: World, tmp_path: Path) -> None:
    request = SampleRequest(region="R12", regions=world.regions, anchors="observed")
    generate(world.grouped, tmp_path / "out", 2_000, request)
    made = firsts(tmp_path / "out")
    composition = load_regions(world.regions).composition
    shares = made.group.value_counts(normalize=True).reindex(composition.groups.names, fill_value=0)
    expected = composition.shares[composition.regions.index("R12")]
    assert np.abs(shares.to_numpy() - expected).max() < 0.05 and set(made.region) == {"R12"}
    region = RegionsFolder.open(world.regions).assignment
    dataset = world.dataset
    assert region is not None
    train = dataset.split_people("train")
    users = dataset.people["user_id"].to_pylist()
    residents = [person for person in train.tolist() if region.get(users[person]) == "R12"]
    assert rows(made) == set(map(tuple, dataset.anchors[residents].tolist()))


def test_a_group_of_a_region_and_a_baseline_of_a_region(world: World, tmp_path: Path) -> None:
    generate(
        world.grouped,
        tmp_path / "group",
        20,
        SampleRequest(region="R2", regions=world.regions, group=GROUP),
    )
    generate(
        world.model, tmp_path / "baseline", 20, SampleRequest(region="R2", regions=world.regions)
    )
    assert set(firsts(tmp_path / "group").group) == {GROUP}
    assert firsts(tmp_path / "baseline").group.isna().all()
    assert rows(firsts(tmp_path / "group")) == rows(firsts(tmp_path / "baseline"))


def test_a_model_supervised_with_regions_needs_nothing_else(
    world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    regions = load_regions(world.regions).composition.regions
    munich = np.tile([48.1, 11.5, 48.2, 11.6], (MIN_PEOPLE, 1))

    def add(folder: Path) -> None:
        shutil.copy(world.regions / "composition.parquet", folder)
        anchors = AnchorModel.fit(munich, np.zeros(MIN_PEOPLE, np.int64), regions)
        write_json(folder / "anchors.json", anchors.as_dict())

    model = remade(world.grouped, tmp_path / "supervised", add)
    generate(
        model,
        tmp_path / "out",
        20,
        SampleRequest(region="R1", regions=world.regions),
        dataset=tmp_path / "nowhere",
    )
    made = firsts(tmp_path / "out")[list(ANCHORS)].to_numpy()
    assert 0 < np.abs(made - munich[0]).max() < 0.002
    assert "--regions" in caplog.text and "is not read" in caplog.text
    with pytest.raises(
        MobatlasError,
        match=r"--region R2: .* has fewer than 10 training people with a home there; pass",
    ):
        generate(model, tmp_path / "out2", 20, SampleRequest(region="R2"))


def test_a_table_of_anchors_is_used_in_order_and_again_from_the_top(
    world: World, homes: Path, tmp_path: Path
) -> None:
    generate(
        world.model,
        tmp_path / "rows",
        request=SampleRequest(anchors=homes),
        dataset=tmp_path / "needs no dataset",
    )
    table = pd.read_csv(homes)
    theirs = tmp_path / "theirs.csv"  # other names of columns
    table.rename(columns={"home_lat": "latitude"}).to_csv(theirs, index=False)
    request = SampleRequest(anchors=theirs, rename={"home_lat": "latitude"})
    generate(world.model, tmp_path / "twice", 12, request)
    pd.testing.assert_frame_equal(
        firsts(tmp_path / "rows")[list(ANCHORS)].reset_index(drop=True), table
    )
    again = firsts(tmp_path / "twice")[list(ANCHORS)].reset_index(drop=True)
    pd.testing.assert_frame_equal(
        again, table.loc[[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1]].reset_index(drop=True)
    )


def test_a_table_may_say_the_group_of_each_row(
    world: World, homes: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    groups = ["<30, M", ">50, F", GROUP, "<30,M", GROUP]
    pd.read_csv(homes).assign(group=groups).to_parquet(tmp_path / "homes.parquet")
    for name, model in (("told", world.grouped), ("not", world.model)):
        generate(model, tmp_path / name, request=SampleRequest(anchors=tmp_path / "homes.parquet"))
    expected = ["<30, M", ">50, F", GROUP, "<30, M", GROUP]
    assert (
        firsts(tmp_path / "told").group.tolist()
        == firsts(tmp_path / "not").group.tolist()
        == expected
    )
    assert "has no groups, so the column 'group'" in caplog.text


def test_coarsening_moves_each_person_once_and_no_farther_than_asked(
    world: World, tmp_path: Path
) -> None:
    for name, coarsen in (("exact", None), ("coarse", "1km")):
        request = SampleRequest(anchors="observed", coarsen=coarsen)
        generate(world.model, tmp_path / name, 2_000, request)
    exact, coarse = (
        firsts(tmp_path / name)[list(ANCHORS)].to_numpy() for name in ("exact", "coarse")
    )
    for two in (slice(0, 2), slice(2, 4)):
        km = haversine_km(exact[:, two], coarse[:, two])
        assert km.max() <= 1 + 1e-9 and abs(np.mean(km) - 2 / 3) < 0.05  # uniform over the disc
    assert len(np.unique(np.hstack([exact, coarse]), axis=0)) == len(np.unique(exact, axis=0))


def test_a_place_moves_alike_in_every_file_and_by_what_no_file_tells(
    world: World, tmp_path: Path
) -> None:
    model = load_model(world.model)
    people = model.observed().anchors
    observed: dict[str, Any] = {"anchors": "observed"}
    moved = coarsen_anchors(people, Coarsening.parse("1km"), people)
    for seed in (0, 1):
        request = SampleRequest(coarsen="1km", seed=seed, **observed)
        generate(world.model, tmp_path / f"{seed}", 600, request)
        assert rows(firsts(tmp_path / f"{seed}")) <= set(map(tuple, moved.tolist()))
    generate(
        world.model,
        tmp_path / "region",
        100,
        SampleRequest(coarsen="1000 m", region="R3", regions=world.regions, **observed),
    )
    assert rows(firsts(tmp_path / "region")) <= set(map(tuple, moved.tolist()))
    others = people.copy()
    others[-1] += 1e-6  # one other neighbour, and nobody moves as before
    assert (np.abs(coarsen_anchors(people, Coarsening.parse("1km"), others) - moved) > 1e-9).any(
        1
    ).mean() > 0.99
    wider = coarsen_anchors(people, Coarsening.parse("2km"), people)
    assert (
        np.abs(wider - people - 2 * (moved - people)).max() > 1e-3
    )  # or two files would point back at the place


@pytest.mark.parametrize("form", ["disc", "grid"])
def test_homes_that_would_move_out_of_the_country_are_refused_and_zero_moves_are_reported(
    form: Literal["disc", "grid"], caplog: pytest.LogCaptureFixture
) -> None:
    place = np.array([[1.0, 2.0, 3.0, 4.0]])
    for far in (Coarsening(form, 100.1), Coarsening(form, 500.0)):
        with pytest.raises(
            MobatlasError, match=f"--coarsen {far}: give at most 100 km, such as 3km"
        ):
            coarsen_anchors(place, far, place)
    assert np.array_equal(coarsen_anchors(place, Coarsening(form, 0.0), place), place)
    assert "homes and workplaces are not moved" in caplog.text


def test_homes_move_to_the_middle_of_a_square_of_the_size_asked_for(
    world: World, tmp_path: Path
) -> None:
    for name, coarsen in (("exact", None), ("grid", "grid:500m")):
        request = SampleRequest(anchors="observed", coarsen=coarsen)
        generate(world.model, tmp_path / name, 600, request)
    exact, grid = (firsts(tmp_path / name)[list(ANCHORS)].to_numpy() for name in ("exact", "grid"))
    for two in (slice(0, 2), slice(2, 4)):
        assert 0.2 < haversine_km(exact[:, two], grid[:, two]).max() <= 0.5 / np.sqrt(2) * 1.01
    assert np.array_equal(coarsen_anchors(grid, Coarsening.parse("grid:500m"), grid), grid)
    metadata = json.loads(pq.read_schema(tmp_path / "grid").metadata[METADATA])
    assert metadata["coarsen"] == "grid:0.5km"


@given(st.floats(-90, 90), st.floats(-180, 180), st.floats(0.05, 50))
def test_every_place_of_the_earth_is_near_the_middle_of_its_square(
    lat: float, lon: float, km: float
) -> None:
    place = np.array([[lat, lon, np.nan, np.nan]])
    moved = coarsen_anchors(place, Coarsening("grid", km), place)
    assert np.isnan(moved[:, 2:]).all() and (np.abs(moved[:, :2]) <= (90, 180)).all()
    assert haversine_km(place[:, :2], moved[:, :2])[0] <= 0.8 * km


def test_what_is_read_back_is_what_was_sampled(world: World, homes: Path, tmp_path: Path) -> None:
    model = load_model(world.grouped)
    generate(
        world.grouped, tmp_path / "out", 300, SampleRequest(anchors=homes, group=GROUP, seed=8)
    )
    anchors = pd.read_csv(homes).to_numpy()[np.arange(300) % 5]
    assert model.generator.groups is not None
    sampled = model.generator.sample(
        300, np.full(300, model.generator.groups.index(GROUP)), anchors, seed=8
    )
    shuffled = pd.read_parquet(tmp_path / "out").sample(frac=1, random_state=0)
    shuffled.to_parquet(tmp_path / "shuffled")
    for name in ("out", "shuffled"):
        table = pd.read_parquet(tmp_path / name)
        numbers = table["trajectory"].unique()  # (trajectories,) in order of appearance
        samples = read_samples(tmp_path / name, world.dataset.vocabulary, model.generator.groups)
        read = samples.trajectories.take(np.argsort(numbers))
        assert np.array_equal(read.tokens, sampled.tokens)
        assert np.array_equal(read.offsets, sampled.offsets)
        assert np.array_equal(read.anchors, anchors, equal_nan=True)
        assert samples.groups is not None
        assert samples.groups.tolist() == [model.generator.groups.index(GROUP)] * 300
        assert table["region"].isna().all()


def test_labels_are_never_read(world: World, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(world.dataset.path, bare, ignore=shutil.ignore_patterns("labels.parquet"))
    for name, dataset in (("with", world.dataset.path), ("without", bare)):
        generate(
            world.grouped,
            tmp_path / name,
            300,
            SampleRequest(region="R5", regions=world.regions),
            dataset=dataset,
        )
    assert (tmp_path / "with").read_bytes() == (tmp_path / "without").read_bytes()


def test_the_file_says_what_made_it_and_not_where(world: World, tmp_path: Path) -> None:
    done: list[float] = []

    class Counting:
        def step(self, now: float, note: str = "") -> None:
            done.append(now)

    made = generate(
        world.model,
        tmp_path / "a" / "b" / "out.parquet",
        600,
        SampleRequest(seed=5, chunk=1),
        tracker=Counting(),
    )
    facts = json.loads(pq.read_schema(made.path).metadata[b"mobatlas"])
    assert facts["model"] == load_model(world.model).manifest.content_hash
    assert (facts["seed"], facts["n"], facts["group"], facts["region"]) == (5, 600, None, None)
    assert "mobatlas" in facts["versions"] and str(tmp_path.parent) not in json.dumps(facts)
    assert (
        done == [256, 512, 600] and made.as_dict()["tokens"] == pq.read_metadata(made.path).num_rows
    )
    assert [path.name for path in (tmp_path / "a" / "b").iterdir()] == ["out.parquet"]


def test_a_file_that_is_there_is_replaced_only_if_asked_to_and_only_ours(
    world: World, tmp_path: Path
) -> None:
    out = tmp_path / "out.parquet"
    thesis = tmp_path / "thesis.tex"
    thesis.write_text("years of work")
    (tmp_path / ".out.parquet.partial").write_text("of a process that was killed")
    generate(world.model, out, 10)
    before = out.read_bytes()
    with pytest.raises(
        MobatlasError,
        match=r"out\.parquet: this output exists already; choose another --out or pass --overwrite",
    ):
        generate(world.model, out, 10)
    with pytest.raises(MobatlasError, match="was not written by mobatlas"):
        generate(world.model, thesis, 10, overwrite=True)
    with pytest.raises(MobatlasError, match=r"is a folder; give a file"):
        generate(world.model, tmp_path, 10, overwrite=True)
    with pytest.raises(MobatlasError, match="overlaps with the source"):
        generate(world.model, world.model / "out.parquet", 10)
    assert out.read_bytes() == before and thesis.read_text() == "years of work"
    generate(world.model, out, 10, SampleRequest(seed=1), overwrite=True)
    assert out.read_bytes() != before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.parquet", "thesis.tex"]


def test_memory_does_not_grow_with_the_number_of_samples(world: World, tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from mobatlas import SampleRequest, generate\n"
        "model, out = map(Path, sys.argv[1:])\n"
        "request = SampleRequest(seed=1)\n"
        "for n in (2_000, 20_000): print(generate(model, out / str(n), n, request).peak_gb)"
    )
    command = [sys.executable, "-c", code, str(world.model), str(tmp_path)]
    done = subprocess.run(
        command,
        check=True,
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    before, after = map(float, done.stdout.split())  # the peak of a process never falls
    assert after < 2 and after < before + 0.4
