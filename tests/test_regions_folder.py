from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest

from bench import survey
from mobatlas import (
    CityConfig,
    MobatlasError,
    TrajectoryDataset,
    prepare,
    recover,
    write_city_folder,
)
from mobatlas.features.maps import build_feature
from mobatlas.groups import DEFAULT_GROUPS
from mobatlas.regions.aggregates import aggregates_from_dataset
from mobatlas.regions.build import RegionsOptions
from mobatlas.regions.composition import read_composition
from mobatlas.regions.store import RegionsFolder, build_regions, load_regions
from mobatlas.regions.types import Regions, with_rest

DIARY = survey.DIARY | {"vocabulary_size": 500}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("city")
    write_city_folder(root / "city", CityConfig(users=900, pois=40, days=6, districts=6), seed=1)
    prepare(root / "city", root / "dataset", preset="small")
    return root / "dataset"


@pytest.fixture(scope="module")
def santiago(tmp_path_factory: pytest.TempPathFactory, data_folder: Path) -> Path:
    out = tmp_path_factory.mktemp("santiago") / "dataset"
    prepare(data_folder / "santiago", out, values=DIARY)
    return out


def files(tmp_path: Path, regions: list[str], rest: str = "category:home") -> dict[str, Any]:
    """Two published tables: region i has i + 1 women per man and i + 3 visits per person."""
    composition = tmp_path / "p.csv"
    aggregates = tmp_path / "v.csv"
    pd.DataFrame(
        {
            "region": np.repeat(regions, len(DEFAULT_GROUPS)),
            "group": DEFAULT_GROUPS.names * len(regions),
            "count": [count for number in range(len(regions)) for count in (1, number + 1) * 4],
        }
    ).to_csv(composition, index=False)
    values = [number + 3 for number in range(len(regions))]
    pd.DataFrame({"region": regions[::-1], "feature": rest, "value": values[::-1], "n": 50}).to_csv(
        aggregates, index=False
    )
    return {"composition": composition, "aggregates": aggregates}


def test_a_controlled_partition_counts_the_people_it_assigned(path: Path, tmp_path: Path) -> None:
    regions = build_regions(path, tmp_path / "regions", RegionsOptions(partition="messy"), seed=3)
    dataset = TrajectoryDataset.open(path)
    assignment = RegionsFolder.open(tmp_path / "regions").assignment
    assert assignment is not None
    ids = dataset.people["user_id"].to_pylist()
    labels = dataset.person_groups()
    split = {
        ids[row]: name
        for name in ("train", "val", "test")
        for row in dataset.split_people(name).tolist()
    }
    assert {split[user] for user in assignment} == {"train", "val"}
    counts = np.zeros((8, 8))
    for user, group in zip(ids, labels, strict=True):
        if user in assignment and split[user] == "train":
            counts[regions.composition.regions.index(assignment[user]), group] += 1
    assert regions.composition.n.tolist() == regions.aggregates.n.tolist() == counts.sum(1).tolist()
    assert regions.composition.shares == pytest.approx(counts / counts.sum(1, keepdims=True))
    nominal = np.array(regions.details["nominal"]["shares"])
    assert np.abs(regions.composition.shares - nominal).max() < 1 / counts.sum(1).min()
    assert regions.randomised
    assert regions.details["features"] == ["poi"]
    assert regions.details["separation"] == "controlled partition"
    people = regions.details["people"]
    assert people["assigned"] == counts.sum()
    assert people["assigned"] + people["surplus"] == len(dataset.split_people("train"))


def test_a_controlled_partition_knows_the_population_it_was_dealt_from(
    path: Path, tmp_path: Path
) -> None:
    regions = build_regions(
        path,
        tmp_path / "regions",
        RegionsOptions(partition="messy", features=("category",)),
        seed=3,
    )
    dataset = TrajectoryDataset.open(path)
    train = dataset.split_people("train")
    known = regions.population
    assert known is not None
    assert known.n == len(train) == sum(regions.details["people"].values())
    assert known.shares == pytest.approx(
        np.bincount(dataset.person_groups()[train], minlength=8) / len(train)
    )
    everybody = build_regions(
        path, tmp_path / "groups", RegionsOptions(partition="demogroups", features=("category",))
    )
    people = everybody.aggregates.n  # demogroups leave nobody over
    assert known.values == pytest.approx(people @ everybody.aggregates.values / people.sum())
    table = pq.read_table(tmp_path / "regions" / "population.parquet")
    assert table.column_names == ["table", "name", "value", "n"]
    assert table["name"].to_pylist() == [*regions.groups.names, *regions.aggregates.features]


def test_those_left_over_are_what_the_population_has_more(path: Path, tmp_path: Path) -> None:
    regions = build_regions(
        path, tmp_path / "regions", RegionsOptions(partition="messy", features=("category",))
    )
    dataset = TrajectoryDataset.open(path)
    assignment = RegionsFolder.open(tmp_path / "regions").assignment
    assert assignment is not None
    ids = dataset.people["user_id"].to_pylist()
    labels = dataset.person_groups()
    over = [row for row in dataset.split_people("train").tolist() if ids[row] not in assignment]
    codes = np.full(len(ids), -1)
    codes[over] = 0
    counted = aggregates_from_dataset(
        dataset, [build_feature("category", dataset.vocabulary)], codes, "train", ("x",)
    )
    extended = with_rest(regions)
    assert extended.aggregates.n[-1] == len(over)
    assert extended.composition.shares[-1] == pytest.approx(
        np.bincount(labels[over], minlength=8) / len(over)
    )
    assert extended.aggregates.values[-1] == pytest.approx(counted.values[0], abs=1e-9)


def test_a_partition_without_the_rest_has_no_population(path: Path, tmp_path: Path) -> None:
    options = RegionsOptions(partition="messy", features=("category",))
    known = build_regions(path, tmp_path / "known", options, seed=3)
    alone = build_regions(path, tmp_path / "alone", replace(options, rest=False), seed=3)
    assert known.population is not None and alone.population is None
    assert not (tmp_path / "alone" / "population.parquet").exists()
    assert load_regions(tmp_path / "alone").population is None
    for name in ("composition.parquet", "aggregates.parquet"):
        contents = [(tmp_path / each / name).read_bytes() for each in ("known", "alone")]
        assert contents[0] == contents[1], "only the population is left out"
    assert alone.details["people"] == known.details["people"]
    assert len(with_rest(known).aggregates.n) == len(known.aggregates.n) + 1
    assert len(with_rest(alone).aggregates.n) == len(alone.aggregates.n)


def test_recovery_without_the_rest_sees_only_the_regions(path: Path, tmp_path: Path) -> None:
    """No region of rankdef shows some groups, which only the rest of the people identifies."""
    options = RegionsOptions(partition="rankdef", features=("category",))
    known = build_regions(path, tmp_path / "known", options)
    build_regions(path, tmp_path / "alone", replace(options, rest=False))
    alone = recover(load_regions(tmp_path / "alone"), quiet=True)
    stripped = recover(replace(known, population=None), quiet=True)
    np.testing.assert_array_equal(alone.means, stripped.means)
    np.testing.assert_array_equal(alone.covariance, stripped.covariance)
    both = recover(load_regions(tmp_path / "known"), quiet=True)
    assert np.abs(both.means - alone.means).max() > 1e-6
    variances = [np.trace(each.covariance, axis1=1, axis2=2).mean() for each in (both, alone)]
    assert variances[0] < variances[1], "the rest is evidence"


@pytest.mark.parametrize("source", ["by", "tables"])
def test_only_a_partition_can_leave_the_rest_out(tmp_path: Path, source: str) -> None:
    options: dict[str, Any] = {"by": "home_district"}
    if source == "tables":
        options = files(tmp_path, ["a", "b"])
    with pytest.raises(MobatlasError, match=r"--without-rest needs --partition NAME; remove it"):
        RegionsOptions(**options, rest=False)


def test_real_regions_and_published_tables_cover_their_population(
    path: Path, tmp_path: Path
) -> None:
    for name, options in {
        "by": RegionsOptions(by="home_district"),
        "tables": RegionsOptions(**files(tmp_path, ["a", "b"])),
    }.items():
        assert build_regions(path, tmp_path / name, options).population is None
        assert not (tmp_path / name / "population.parquet").exists()


def test_demogroups_are_the_groups_themselves(path: Path, tmp_path: Path) -> None:
    regions = build_regions(
        path,
        tmp_path / "regions",
        RegionsOptions(partition="demogroups", features=("category", "hour")),
    )
    assert np.array_equal(regions.composition.shares, np.eye(8))
    assert regions.details["features"] == ["category", "hour"]
    validation = RegionsFolder.open(tmp_path / "regions").validation
    assert validation is not None
    assert validation.features == regions.aggregates.features
    assert validation.n.sum() < regions.aggregates.n.sum() / 4


def test_what_is_written_is_what_is_read(path: Path, tmp_path: Path) -> None:
    built = build_regions(
        path, tmp_path / "here" / "regions", RegionsOptions(partition="hot16", mask=("HOME",))
    )
    loaded = load_regions(tmp_path / "here" / "regions")
    assert np.array_equal(built.aggregates.values, loaded.aggregates.values)
    assert loaded.aggregates.spread is not None
    assert (loaded.aggregates.spread >= 0).all()
    assert "poi:HOME" not in loaded.aggregates.features
    assert loaded.details["mask"] == ["HOME"]
    manifest = json.loads((tmp_path / "here" / "regions" / "manifest.json").read_text())
    assert str(tmp_path) not in json.dumps(manifest)
    assert (
        tmp_path / "here" / "regions" / loaded.details["dataset"]["path"]
    ).resolve() == path.resolve()
    assert (
        loaded.details["dataset"]["content_hash"]
        == TrajectoryDataset.open(path).manifest.content_hash
    )
    table = pq.read_table(tmp_path / "here" / "regions" / "composition.parquet")
    assert table.column_names == ["region", "group", "share", "n"]
    again = read_composition(tmp_path / "here" / "regions" / "composition.parquet")
    assert again.groups == DEFAULT_GROUPS
    assert again.shares == pytest.approx(loaded.composition.shares)
    assert again.n.tolist() == loaded.composition.n.tolist()


def test_the_same_seed_makes_the_same_folder(path: Path, tmp_path: Path) -> None:
    def content(name: str, options: RegionsOptions, seed: int) -> list[bytes]:
        build_regions(path, tmp_path / name, options, seed=seed)
        return [file.read_bytes() for file in sorted((tmp_path / name).glob("*.parquet"))]

    for options in (RegionsOptions(partition="messy"), RegionsOptions(by="home_district")):
        name = options.partition or options.by
        one = content(f"{name}-1", options, 1)
        assert one == content(f"{name}-again", options, 1)
        assert one != content(f"{name}-2", options, 2)


def test_real_regions_count_composition_and_aggregates_on_different_people(
    path: Path, tmp_path: Path
) -> None:
    regions = build_regions(path, tmp_path / "regions", RegionsOptions(by="home_district"))
    dataset = TrajectoryDataset.open(path)
    assert regions.details["separation"] == "disjoint halves"
    assert regions.details["features"] == ["category"]
    assert not regions.randomised
    district = np.array(dataset.people["home_district"].to_pylist())[dataset.split_people("train")]
    for name, labelled, counted in zip(
        regions.composition.regions, regions.composition.n, regions.aggregates.n, strict=True
    ):
        assert labelled + counted == np.count_nonzero(district == name)
    share = regions.composition.n.sum() / len(district)
    assert 0.4 < share < 0.6
    together = build_regions(
        path, tmp_path / "same", RegionsOptions(by="home_district", same_people=True)
    )
    assert together.details["separation"] == "same people"
    assert together.composition.n.tolist() == together.aggregates.n.tolist()
    assert together.composition.n.sum() == len(district)


def test_half_of_the_people_is_a_matter_of_their_ids(path: Path, tmp_path: Path) -> None:
    """Halves do not depend on labels: aggregates stay when labels are shuffled."""
    shutil.copytree(path, tmp_path / "copy")
    labels = pq.read_table(path / "labels.parquet").to_pandas()
    labels["gender"] = labels["gender"].to_numpy()[::-1]
    labels.to_parquet(tmp_path / "copy" / "labels.parquet", index=False)
    one = build_regions(path, tmp_path / "one", RegionsOptions(by="home_district"))
    two = build_regions(tmp_path / "copy", tmp_path / "two", RegionsOptions(by="home_district"))
    assert np.array_equal(one.aggregates.values, two.aggregates.values)
    assert not np.array_equal(one.composition.shares, two.composition.shares)


def test_a_shuffled_partition_keeps_its_composition_and_loses_the_groups(
    path: Path, tmp_path: Path
) -> None:
    """A region of demogroups is a group: shuffling changes its aggregates only."""
    real = build_regions(
        path,
        tmp_path / "real",
        RegionsOptions(partition="demogroups", mask=("HOME", "WORK", "OTHER")),
    )
    control = build_regions(
        path,
        tmp_path / "control",
        RegionsOptions(
            partition="demogroups", mask=("HOME", "WORK", "OTHER"), shuffle_regions=True
        ),
    )
    assert np.array_equal(control.composition.shares, real.composition.shares)
    apart, together = (regions.aggregates.values.std(0).mean() for regions in (real, control))
    assert together < 0.7 * apart


def test_a_shuffled_partition_exchanges_people_with_those_left_over(
    path: Path, tmp_path: Path
) -> None:
    """Surplus people are shuffled too; otherwise the rest would reveal the groups."""
    real = build_regions(path, tmp_path / "real", RegionsOptions(partition="messy"))
    control = build_regions(
        path, tmp_path / "control", RegionsOptions(partition="messy", shuffle_regions=True)
    )
    assert control.population is not None
    assert real.population is not None
    assert np.array_equal(control.population.values, real.population.values)
    assert np.array_equal(control.aggregates.n, real.aggregates.n)
    dealt, shuffled = (
        RegionsFolder.open(tmp_path / name).assignment for name in ("real", "control")
    )
    assert dealt is not None
    assert shuffled is not None
    assert len(dealt) == len(shuffled)
    assert dealt.keys() != shuffled.keys()


def test_shuffled_people_keep_region_sizes_and_lose_their_composition(
    path: Path, tmp_path: Path
) -> None:
    real = build_regions(path, tmp_path / "real", RegionsOptions(by="home_district"))
    control = build_regions(
        path, tmp_path / "control", RegionsOptions(by="home_district", shuffle_regions=True)
    )
    assert control.details["shuffled"]
    assert not real.details["shuffled"]
    assert (real.composition.n + real.aggregates.n).tolist() == (
        control.composition.n + control.aggregates.n
    ).tolist()

    def excess(regions: Regions) -> float:
        """Chi-squared per degree of freedom of compositions: 1 where regions are alike."""
        shares = regions.composition.shares
        n = regions.composition.n[:, None]
        mean = (n * shares).sum(0) / n.sum()
        return float(
            (n * (shares - mean) ** 2 / mean).sum() / ((len(n) - 1) * (shares.shape[1] - 1))
        )

    assert excess(real) > 2 * excess(control)
    assert excess(control) < 2


def test_a_census_gives_the_composition_and_everybody_the_aggregates(
    path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    dataset = TrajectoryDataset.open(path)
    districts = dataset.people["home_district"].to_pylist()
    census = files(tmp_path, [*sorted(set(districts))[1:], "elsewhere"])["composition"]
    shutil.copytree(path, tmp_path / "unlabelled")
    (tmp_path / "unlabelled" / "labels.parquet").unlink()
    regions = build_regions(
        tmp_path / "unlabelled",
        tmp_path / "regions",
        RegionsOptions(by="home_district", composition=census),
    )
    assert regions.details["separation"] == "census file"
    assert regions.details["dropped_regions"] == 1
    assert "1 region of home_district is left out, because p.csv has no such region" in caplog.text
    assert regions.composition.n.tolist() == [8, 12, 16, 20, 24]
    train = [districts[row] for row in dataset.split_people("train").tolist()]
    assert regions.aggregates.n.tolist() == [
        train.count(name) for name in regions.aggregates.regions
    ]


def test_two_published_tables_meet_by_region(path: Path, tmp_path: Path) -> None:
    tables = files(tmp_path, ["a", "b", "c"])
    extra = pd.read_csv(tables["composition"])
    nowhere = pd.DataFrame({"region": ["nowhere"], "group": ["<30, F"], "count": [9]})
    pd.concat([extra, nowhere]).to_csv(tables["composition"], index=False)
    regions = build_regions(path, tmp_path / "regions", RegionsOptions(**tables))
    assert regions.composition.regions == ("c", "b", "a")
    women = regions.composition.shares[:, 1::2].sum(1)
    assert women.tolist() == pytest.approx([3 / 4, 2 / 3, 1 / 2])
    assert regions.aggregates.values.ravel().tolist() == [5, 4, 3]
    assert regions.aggregates.n.tolist() == [50, 50, 50]
    assert regions.aggregates.spread is None
    assert regions.details["only_in_composition"] == 1
    assert regions.details["features"] == ["category"]
    assert RegionsFolder.open(tmp_path / "regions").assignment is None
    assert RegionsFolder.open(tmp_path / "regions").validation is None
    shuffled = build_regions(
        path, tmp_path / "shuffled", RegionsOptions(**tables, shuffle_regions=True), seed=1
    )
    assert sorted(shuffled.composition.n.tolist()) == [8, 12, 16]
    assert shuffled.aggregates.values.ravel().tolist() == [5, 4, 3]
    assert shuffled.composition.n.tolist() != regions.composition.n.tolist()


def test_regions_that_one_table_alone_has_are_counted_and_named(
    path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    composition = files(tmp_path, ["North", "South", "a", "b", "c", "d"])["composition"]
    (tmp_path / "other").mkdir()
    aggregates = files(tmp_path / "other", ["Nord", "South"])["aggregates"]
    regions = build_regions(
        path, tmp_path / "regions", RegionsOptions(composition=composition, aggregates=aggregates)
    )
    assert regions.composition.regions == ("South",)
    assert (regions.details["only_in_composition"], regions.details["only_in_aggregates"]) == (5, 1)
    assert (
        "5 regions of p.csv are left out, because v.csv has no such region ('North', 'a', 'b', "
        "...; its ids are like 'Nord'); do both use the same ids?"
    ) in caplog.text
    assert (
        "1 region of v.csv is left out, because p.csv has no such region ('Nord'; its ids are like "
        "'North')"
    ) in caplog.text


def test_tables_of_the_same_regions_leave_no_region_out(
    path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    build_regions(path, tmp_path / "regions", RegionsOptions(**files(tmp_path, ["a", "b"])))
    assert "left out" not in caplog.text


@pytest.mark.parametrize("times", [1.0, 1.4, 4.0, 0.25])
def test_other_windows_in_the_aggregates_are_refused_at_once(
    path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, times: float
) -> None:
    dataset = TrajectoryDataset.open(path)
    visits = build_feature("category", dataset.vocabulary)
    everybody = aggregates_from_dataset(
        dataset, [visits], ["all"] * dataset.people.num_rows
    ).values[0]
    tables = files(tmp_path, ["a", "b"])
    rows = [
        (region, name, times * value, 50)
        for region in "ab"
        for name, value in zip(visits.bins, everybody, strict=True)
    ]
    pd.DataFrame(rows, columns=["region", "feature", "value", "n"]).to_csv(
        tables["aggregates"], index=False
    )
    total = everybody.sum()
    sentence = (
        f"v.csv: people make {times * total:.3g} visits in the table, "
        f"but {total:.3g} per 3-day window in the dataset; add a column 'per'"
    )
    if times in (4.0, 0.25):
        with pytest.raises(MobatlasError, match=sentence):
            build_regions(path, tmp_path / "regions", RegionsOptions(**tables))
    else:
        build_regions(path, tmp_path / "regions", RegionsOptions(**tables))
        assert "people make" not in caplog.text
    pd.read_csv(tables["aggregates"]).drop(columns="n").to_csv(tables["aggregates"], index=False)
    caplog.clear()
    build_regions(path, tmp_path / "shares", RegionsOptions(**tables))
    assert "people make" not in caplog.text


def test_census_ids_meet_plain_ones(path: Path, tmp_path: Path) -> None:
    composition = files(tmp_path, ["1400000US01001020100", "1400000US01001020200"])["composition"]
    (tmp_path / "other").mkdir()
    aggregates = files(tmp_path / "other", ["01001020100", "01001020200"])["aggregates"]
    regions = build_regions(
        path, tmp_path / "regions", RegionsOptions(composition=composition, aggregates=aggregates)
    )
    assert regions.composition.regions == ("01001020200", "01001020100")
    assert regions.composition.n.tolist() == [12, 8]


def test_a_table_without_devices_is_marked_as_pooled(path: Path, tmp_path: Path) -> None:
    tables = files(tmp_path, ["a", "b"])
    pd.read_csv(tables["aggregates"]).drop(columns="n").to_csv(tables["aggregates"], index=False)
    regions = build_regions(path, tmp_path / "regions", RegionsOptions(**tables))
    assert regions.aggregates.pooled
    assert "only shares of visits are known" in regions.details["notes"][0]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({}, "choose one of --partition"),
        ({"partition": "messy", "by": "home_district"}, "choose one of --partition"),
        ({"composition": "p.csv"}, "choose one of --partition"),
        (
            {"by": "home_district", "composition": "p.csv", "aggregates": "v.csv"},
            "choose one of --partition",
        ),
        ({"partition": "messy", "same_people": True}, "--same-people needs --by"),
        (
            {"by": "home_distrikt"},
            "--by home_distrikt: .* has no such region column.*did you mean 'home_district'",
        ),
        ({"partition": "mesy"}, "--partition mesy does not exist"),
        ({"partition": "messy", "features": ("pois",)}, "--feature pois does not exist"),
        ({"partition": "dirichlet:900:1"}, "--partition dirichlet:900:1: .* too few"),
    ],
)
def test_bad_options_are_refused_and_leave_nothing(
    path: Path, tmp_path: Path, options: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(MobatlasError, match=sentence):
        build_regions(path, tmp_path / "regions", RegionsOptions(**options))
    assert not list(tmp_path.iterdir())


def test_a_dataset_without_labels_cannot_count_groups(path: Path, tmp_path: Path) -> None:
    shutil.copytree(path, tmp_path / "unlabelled")
    (tmp_path / "unlabelled" / "labels.parquet").unlink()
    with pytest.raises(MobatlasError, match=r"--partition messy: .* has no labels"):
        build_regions(
            tmp_path / "unlabelled", tmp_path / "regions", RegionsOptions(partition="messy")
        )
    with pytest.raises(
        MobatlasError,
        match=r"--by home_district: .* has no labels .*pass a census with --composition FILE",
    ):
        build_regions(
            tmp_path / "unlabelled", tmp_path / "regions", RegionsOptions(by="home_district")
        )


def test_published_tables_that_do_not_meet_are_refused(path: Path, tmp_path: Path) -> None:
    composition = files(tmp_path, ["a", "b"])["composition"]
    (tmp_path / "other").mkdir()
    aggregates = files(tmp_path / "other", ["c", "d"])["aggregates"]
    with pytest.raises(MobatlasError, match="no region in common"):
        build_regions(
            path,
            tmp_path / "regions",
            RegionsOptions(composition=composition, aggregates=aggregates),
        )
    strange = files(tmp_path, ["a", "b"], rest="category:hom")
    with pytest.raises(
        MobatlasError, match=r"'category:hom' does not exist in the dataset.*'category:home'"
    ):
        build_regions(path, tmp_path / "regions", RegionsOptions(**strange))
    with pytest.raises(MobatlasError, match="has no feature of poi"):
        build_regions(
            path,
            tmp_path / "regions",
            RegionsOptions(**files(tmp_path, ["a", "b"]), features=("poi",)),
        )


def test_comunas_of_santiago_by_survey_and_by_census(
    santiago: Path, data_folder: Path, tmp_path: Path
) -> None:
    by_survey = build_regions(santiago, tmp_path / "survey", RegionsOptions(by="home_comuna"))
    assert len(by_survey.composition.regions) == 45
    assert by_survey.details["dropped_regions"] == 0
    census = data_folder / "santiago" / "census_comuna.parquet"
    with pytest.raises(MobatlasError, match="'25-64' straddles '25-44' and '45-64'"):
        build_regions(
            santiago, tmp_path / "census", RegionsOptions(by="home_comuna", composition=census)
        )
    by_census = build_regions(
        santiago,
        tmp_path / "census",
        RegionsOptions(by="home_comuna", composition=census, straddle="uniform"),
    )
    assert by_census.composition.regions == by_survey.composition.regions
    assert "spread evenly over its years" in "".join(by_census.details["notes"])
    assert by_census.aggregates.n.sum() > 1.8 * by_survey.aggregates.n.sum()
    gender = by_survey.groups.level_codes[:, 1]
    women = [
        regions.composition.shares[:, gender == 1].sum(1) for regions in (by_survey, by_census)
    ]
    assert np.abs(np.median(women[0]) - np.median(women[1])) < 0.05


def test_zones_of_santiago_too_small_for_two_halves_are_dropped_and_counted(
    santiago: Path, tmp_path: Path
) -> None:
    regions = build_regions(santiago, tmp_path / "zones", RegionsOptions(by="home_zone"))
    zones = set(TrajectoryDataset.open(santiago).people["home_zone"].to_pylist())
    assert regions.details["dropped_regions"] + len(regions.composition.regions) == len(zones)
    assert min(regions.composition.n.min(), regions.aggregates.n.min()) >= 2
