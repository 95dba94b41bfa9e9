"""Labelled people as evidence: whose means they are, and what their labels may not reach."""

from __future__ import annotations

import re
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest

from mobatlas import (
    CityConfig,
    MobatlasError,
    TrajectoryDataset,
    build_regions,
    prepare,
    write_city_folder,
)
from mobatlas.groups import Groups
from mobatlas.regions.build import RegionsOptions
from mobatlas.regions.identifiability import diagnose_regions
from mobatlas.regions.labelled import _draw
from mobatlas.regions.recovery.recover import recover
from mobatlas.regions.types import Aggregates, Composition, GroupEvidence, Regions
from tests.outcomes import refused, run

ORDER = ("<30, M", "<30, F", "30-40, M", "30-40, F", "40-50, M", "40-50, F", ">50, M", ">50, F")


@pytest.fixture(scope="module")
def city(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset, its visits, and a census of its districts that is not counted on its people."""
    root = tmp_path_factory.mktemp("labelled")
    write_city_folder(root / "city", CityConfig(users=900, pois=40, days=6, districts=6), seed=1)
    common = {"min_people_per_place": 10}  # which a survey of few people does not inherit
    prepare(root / "city", root / "dataset", preset="small", values=common)
    districts = sorted(
        set(pq.read_table(root / "city" / "people.parquet")["home_district"].to_pylist())
    )
    rng = np.random.default_rng(0)
    pd.DataFrame(
        [
            {"region": district, "group": group, "count": int(rng.integers(50, 200))}
            for district in districts
            for group in ORDER
        ]
    ).to_csv(root / "census.csv", index=False)
    return root


def people_of(city: Path) -> pd.DataFrame:
    return pd.read_parquet(city / "city" / "people.parquet").astype({"user_id": str})


def build(city: Path, out: Path, seed: int = 0, **options: Any) -> Regions:
    chosen = RegionsOptions(by="home_district", composition=city / "census.csv", **options)
    return build_regions(city / "dataset", out, chosen, seed=seed)


def content(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def visits_per_person(dataset: Path, users: set[str], column: str) -> pd.DataFrame:
    """Mean visits per window of each person to each place or category, counted visit by visit."""
    tokens = pd.read_parquet(dataset / "vocabulary.parquet").set_index("token")
    visits = pd.read_parquet(dataset / "trajectories.parquet")
    visits = visits[visits.user_id.isin(users)]
    windows = visits.groupby("user_id").window.nunique()
    bins = visits.token.map(tokens[column].fillna("unknown"))
    counts = pd.crosstab(visits.user_id, bins)
    return counts.div(windows, axis=0)


def training_users(dataset: Path) -> set[str]:
    splits = pd.read_parquet(dataset / "splits.parquet")
    seen = set(pd.read_parquet(dataset / "trajectories.parquet").user_id)
    return set(splits.user_id[splits.split == "train"]) & seen


def test_the_evidence_is_the_mean_of_the_labelled_people_of_each_group(
    city: Path, tmp_path: Path
) -> None:
    people = people_of(city).iloc[::3]
    people[["user_id", "age", "gender"]].to_csv(tmp_path / "some.csv", index=False)
    regions = build(city, tmp_path / "regions", labelled=tmp_path / "some.csv")
    [evidence] = regions.evidence
    used = people[people.user_id.isin(training_users(city / "dataset"))].set_index("user_id")
    group = used.age + ", " + used.gender
    assert {name.partition(":")[0] for name in evidence.features} == {"category", "poi"}
    assert evidence.same_population and evidence.kind == "labelled"
    assert (evidence.shares == np.eye(8)).all()
    assert evidence.n.tolist() == [int((group == name).sum()) for name in ORDER]
    assert evidence.spread is not None
    for column, prefix in (("category", "category"), ("poi_id", "poi")):
        phi = visits_per_person(city / "dataset", set(used.index), column)
        for name in phi.columns:
            feature = evidence.features.index(f"{prefix}:{name}")
            means = [phi[name][group == each].mean() for each in ORDER]
            np.testing.assert_allclose(evidence.values[:, feature], means, atol=1e-12)
            within = sum(
                ((phi[name][group == each] - mean) ** 2).sum()
                for each, mean in zip(ORDER, means, strict=True)
            )
            assert evidence.spread[feature] == pytest.approx(within / (len(group) - 8), abs=1e-12)


def test_a_place_has_its_category_as_parent_also_in_evidence_only(
    city: Path, tmp_path: Path
) -> None:
    regions = build(city, tmp_path / "regions", labelled_sample=50)
    tokens = pd.read_parquet(city / "dataset" / "vocabulary.parquet").set_index("poi_id")
    places = [name for name in regions.evidence[0].features if name.startswith("poi:")]
    assert places
    assert {name: regions.parents[name] for name in places} == {
        name: f"category:{tokens.category[name.removeprefix('poi:')]}" for name in places
    }
    assert not any(name.startswith("poi:") for name in regions.aggregates.features)
    assert regions.select(np.array([0, 1])).evidence is regions.evidence


def test_a_seed_draws_the_sample_again_and_writes_the_same_bytes(
    city: Path, tmp_path: Path
) -> None:
    [first] = build(city, tmp_path / "a", labelled_sample=60).evidence
    build(city, tmp_path / "b", labelled_sample=60)
    [other] = build(city, tmp_path / "c", seed=1, labelled_sample=60).evidence
    assert content(tmp_path / "a") == content(tmp_path / "b")
    assert (first.n.sum(), other.n.sum()) == (60, 60)
    assert not np.array_equal(first.values, other.values)


def test_labels_of_labelled_people_reach_nothing_but_their_evidence(
    city: Path, tmp_path: Path
) -> None:
    """A generator and a strategy read regions, which are the same bytes with and without labels."""
    without = build(city, tmp_path / "without")
    with_labels = build(city, tmp_path / "with", labelled_sample=60)
    before, after = content(tmp_path / "without"), content(tmp_path / "with")
    added = {name for name in after if before.get(name) != after[name]}
    assert before.keys() <= after.keys()
    assert added - {"manifest.json"} == {name for name in after if name.startswith("evidence/")}
    plain = replace(with_labels, evidence=())
    assert recover(plain, quiet=True).means == pytest.approx(recover(without, quiet=True).means)


@pytest.mark.parametrize("change", ["shuffled", "deleted"])
def test_labels_of_other_people_do_not_reach_the_folder(
    city: Path, tmp_path: Path, change: str
) -> None:
    shutil.copytree(city / "dataset", tmp_path / "dataset")
    shutil.copy(city / "census.csv", tmp_path / "census.csv")
    build(tmp_path, tmp_path / "before", labelled_sample=60)
    drawn = _draw(TrajectoryDataset.open(tmp_path / "dataset"), 60, seed=0) >= 0
    assert drawn.sum() == 60
    users = pd.read_parquet(tmp_path / "dataset" / "people.parquet").user_id
    labels = pq.read_table(tmp_path / "dataset" / "labels.parquet").to_pandas()
    others = np.flatnonzero(~labels.user_id.isin(users[drawn]))
    columns = ["age", "gender"]
    shuffled = np.random.default_rng(3).permutation(others)
    values = labels[columns].to_numpy()[shuffled] if change == "shuffled" else None
    labels.loc[labels.index[others], columns] = values
    labels.to_parquet(tmp_path / "dataset" / "labels.parquet", index=False)
    build(tmp_path, tmp_path / "after", labelled_sample=60)
    assert content(tmp_path / "before") == content(tmp_path / "after")


def test_a_table_of_labels_replaces_those_of_the_dataset(city: Path, tmp_path: Path) -> None:
    shutil.copytree(city / "dataset", tmp_path / "dataset")
    shutil.copy(city / "census.csv", tmp_path / "census.csv")
    people_of(city).iloc[:200][["user_id", "age", "gender"]].to_csv(tmp_path / "l.csv", index=False)
    build(tmp_path, tmp_path / "before", labelled=tmp_path / "l.csv")
    (tmp_path / "dataset" / "labels.parquet").unlink()
    build(tmp_path, tmp_path / "after", labelled=tmp_path / "l.csv")
    assert content(tmp_path / "before") == content(tmp_path / "after")


def test_the_folder_has_no_user_id_beside_the_assignment_of_people(
    city: Path, tmp_path: Path
) -> None:
    people_of(city).iloc[:300][["user_id", "age", "gender"]].to_csv(tmp_path / "l.csv", index=False)
    build(city, tmp_path / "regions", labelled=tmp_path / "l.csv")
    users = set(people_of(city).user_id)
    for path in (tmp_path / "regions").rglob("*.parquet"):
        table = pq.read_table(path)
        values = {str(each) for column in table.columns for each in column.unique().to_pylist()}
        assert bool(users & values) == (path.name == "assignment.parquet"), path
    manifest = (tmp_path / "regions" / "manifest.json").read_text()
    assert not users & set(re.findall(r"\w+", manifest))


def test_ages_in_years_are_binned_and_people_who_cannot_be_used_are_counted(
    city: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    splits = pd.read_parquet(city / "dataset" / "splits.parquet").set_index("user_id").split
    users = sorted(training_users(city / "dataset"))
    held_out = sorted(splits.index[splits != "train"])[:7]
    years = {20: "<30", 29: "<30", 35: "30-40", 47: "40-50", 62: ">50"}
    known: list[tuple[Any, ...]] = list(zip(users[:40], [*years] * 8, "MMFF" * 10, strict=True))
    rows = [*known, *((user, 30, "M") for user in held_out), ("stranger", 30, "M")]
    rows.append((users[-1], None, "F"))
    pd.DataFrame(rows, columns=["user_id", "age", "sex"]).to_csv(tmp_path / "l.csv", index=False)
    regions = build(city, tmp_path / "regions", labelled=tmp_path / "l.csv")
    [evidence] = regions.evidence
    counted = Counter(f"{years[age]}, {sex}" for _, age, sex in known)
    names = [ORDER[number] for number in evidence.shares.argmax(1)]
    assert dict(zip(names, evidence.n.tolist(), strict=True)) == counted
    notes = " ".join(regions.details["notes"])
    assert "1 not in the dataset, 7 validation or test people, 1 without a known group" in notes
    assert f"{len(rows)} people; not used" in notes
    assert "no labelled people of" not in caplog.text


def test_groups_with_too_few_labelled_people_are_named(
    city: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    people = people_of(city)
    people = people[people.user_id.isin(training_users(city / "dataset"))]
    group = people.age + ", " + people.gender
    some = pd.concat(
        [people[group == name].iloc[: 1 if name == "40-50, M" else 6] for name in ORDER[1:]]
    )
    some[["user_id", "age", "gender"]].to_csv(tmp_path / "l.csv", index=False)
    regions = build(city, tmp_path / "regions", labelled=tmp_path / "l.csv")
    [evidence] = regions.evidence
    assert (evidence.rows, evidence.n.tolist()) == (6, [6] * 6)
    assert any("has one person: 40-50, M" in note for note in regions.details["notes"])
    assert "no labelled people of <30, M: other evidence decides there" in caplog.text


def test_an_uneven_choice_of_people_is_warned_of_and_a_random_one_is_not(
    city: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    people = people_of(city)
    people = people[people.user_id.isin(training_users(city / "dataset"))]
    counted = people.groupby(["home_district", "age", "gender"]).size().reset_index(name="count")
    counted.rename(columns={"home_district": "region"}).to_csv(tmp_path / "census.csv", index=False)
    (tmp_path / "dataset").symlink_to(city / "dataset")
    choices = {
        "random": people.sample(200, random_state=1),
        "district": people[people.home_district == people.home_district.iloc[0]],
        "age": people[(people.age == "<30") | (people.index % 5 == 0)],
    }
    said = {}
    for name, chosen in choices.items():
        caplog.clear()
        chosen[["user_id", "age", "gender"]].to_csv(tmp_path / "l.csv", index=False)
        build(tmp_path, tmp_path / name, labelled=tmp_path / "l.csv")
        said[name] = [
            phrase
            for phrase in ("groups of the labelled people differ", "live in other regions")
            if phrase in caplog.text
        ]
    assert said["random"] == []
    assert said["district"] == ["live in other regions"]
    assert said["age"] == ["groups of the labelled people differ"]


def survey(city: Path, folder: Path, renamed: int = 0) -> pd.DataFrame:
    """Visits and people of a survey with ids of its own; some places have other names."""
    folder.mkdir()
    people = people_of(city).iloc[:150].copy()
    visits = pd.read_parquet(city / "city" / "visits.parquet").astype({"user_id": str})
    visits = visits[visits.user_id.isin(people.user_id)].copy()
    places = sorted(set(visits.poi_id[~visits.is_home & ~visits.is_work]))
    visits["poi_id"] = visits.poi_id.replace({each: f"other {each}" for each in places[:renamed]})
    for table in (visits, people):
        table["user_id"] = "s" + table.user_id
    visits.to_parquet(folder / "visits.parquet", index=False)
    people.drop(columns="home_district").to_csv(folder / "people.csv", index=False)
    return people


def test_a_separate_survey_is_prepared_like_the_dataset(city: Path, tmp_path: Path) -> None:
    people = survey(city, tmp_path / "survey", renamed=3).set_index("user_id")
    regions = build(city, tmp_path / "regions", labelled=tmp_path / "survey")
    [evidence] = regions.evidence
    assert not evidence.same_population
    prepare(tmp_path / "survey", tmp_path / "own", preset="small")
    phi = visits_per_person(tmp_path / "own", set(people.index), "poi_id")
    group = (people.age + ", " + people.gender)[phi.index]
    assert evidence.n.tolist() == [int((group == name).sum()) for name in ORDER]
    known = [name for name in phi.columns if f"poi:{name}" in evidence.features]
    unknown = [name for name in phi.columns if f"poi:{name}" not in evidence.features]
    assert sum(name.startswith("other ") for name in unknown) == 3
    for row, name in enumerate(ORDER):
        mine = phi[group == name].mean()
        for place in set(known) - {"OTHER"}:
            value = evidence.values[row, evidence.features.index(f"poi:{place}")]
            assert value == pytest.approx(mine[place], abs=1e-12)
        other = mine[unknown].sum() + (mine["OTHER"] if "OTHER" in known else 0)
        value = evidence.values[row, evidence.features.index("poi:OTHER")]
        assert value == pytest.approx(other, abs=1e-12)
    assert any("count as OTHER" in note for note in regions.details["notes"])


def test_a_survey_with_other_windows_is_scaled_with_a_note(city: Path, tmp_path: Path) -> None:
    survey(city, tmp_path / "survey")
    one_day = {"window": {"days": 1, "stride": 1}, "quality": {"min_coverage": 0}}
    prepare(tmp_path / "survey", tmp_path / "diary", preset="small", values=one_day)
    regions = build(
        city, tmp_path / "regions", labelled=tmp_path / "diary", features=("category", "visits")
    )
    [evidence] = regions.evidence
    people = pd.read_parquet(tmp_path / "diary" / "labels.parquet").set_index("user_id")
    phi = visits_per_person(tmp_path / "diary", set(people.index), "category")
    group = (people.age + ", " + people.gender)[phi.index]
    home = evidence.values[:, evidence.features.index("category:home")]
    expected = [3 * phi["home"][group == name].mean() for name in ORDER]
    np.testing.assert_allclose(home, expected)
    assert not any(name.startswith("visits:") for name in evidence.features)
    assert any("windows of 1 days are scaled to 3 days" in n for n in regions.details["notes"])


def test_people_of_the_survey_who_are_held_out_are_not_used(city: Path, tmp_path: Path) -> None:
    folder = tmp_path / "survey"
    folder.mkdir()
    for name in ("visits", "people"):  # with another name of a column
        table = pd.read_parquet(city / "city" / f"{name}.parquet")
        table.rename(columns={"user_id": "uid"}).to_parquet(folder / f"{name}.parquet")
    rename = {"user_id": "uid"}
    [evidence] = build(city, tmp_path / "regions", labelled=folder, rename=rename).evidence
    assert evidence.n.sum() == len(training_users(city / "dataset"))


@pytest.mark.parametrize(
    ("table", "sentence"),
    [
        ({"user_id": ["a", "b"], "age": ["<30", "<30"], "gender": ["M", "M"]}, "no user_id is in"),
        ({"person": ["a"], "age": ["<30"]}, "column 'user_id' is missing"),
        ({"user_id": ["a", "a"], "age": ["<30"] * 2, "gender": ["M"] * 2}, "'a' has two rows"),
        ({"user_id": ["a"], "age": ["<30"]}, "no column for 'gender'"),
        ({"user_id": ["a"], "income": ["high"]}, "column 'group' is missing"),
        ({"user_id": ["a"], "age": ["<30"], "gender": ["X"]}, "level 'X' of 'gender' does not"),
        ({"user_id": ["a"], "group": [">50, Mann"]}, "group '>50, Mann' does not exist"),
    ],
)
def test_a_bad_table_of_labels_is_refused_and_nothing_is_written(
    city: Path, tmp_path: Path, table: dict[str, list[str]], sentence: str
) -> None:
    pd.DataFrame(table).to_csv(tmp_path / "l.csv", index=False)
    arguments = ["--by", "home_district", "--labelled", tmp_path / "l.csv"]
    message = refused("regions", city / "dataset", *arguments, "--out", tmp_path / "out")
    assert sentence in message and "l.csv" in message
    assert sorted(path.name for path in tmp_path.iterdir()) == ["l.csv"]


def test_impossible_sources_of_labels_are_refused(city: Path, tmp_path: Path) -> None:
    survey(city, tmp_path / "survey", renamed=1_000)
    (tmp_path / "nobody").mkdir()
    shutil.copy(tmp_path / "survey" / "visits.parquet", tmp_path / "nobody")
    cases: list[tuple[dict[str, Any], str]] = [
        ({"labelled": tmp_path / "no.csv"}, "no such file"),
        ({"labelled": city / "dataset"}, "this is the dataset itself"),
        ({"labelled": tmp_path / "survey"}, "no place of the survey is in"),
        ({"labelled": tmp_path / "nobody"}, "the folder has no people.parquet or people.csv"),
        ({"labelled_sample": 0}, "give a number from 1 to"),
        ({"labelled_sample": 100_000}, "give a number from 1 to"),
        ({"labelled_sample": 5, "labelled": tmp_path}, "choose one of --labelled PATH and"),
    ]
    for options, sentence in cases:
        with pytest.raises(MobatlasError, match=re.escape(sentence)):
            build(city, tmp_path / "out", **options)
        assert not (tmp_path / "out").exists()


# ---- which groups all evidence distinguishes


def two_alike(*evidence: GroupEvidence) -> Regions:
    """Two regions of equal composition: they tell women from men in nothing."""
    groups = Groups.of({"sex": ("M", "F")})
    regions = ("north", "south")
    n = np.full(2, 400.0)
    composition = Composition(groups, regions, np.full((2, 2), 0.5), n)
    bins = ("category:gym", "transitions:gym>gym")
    aggregates = Aggregates(regions, bins, np.full((2, 2), 2.0), n, spread=np.full(2, 4.0))
    return Regions(composition, aggregates, True, evidence=evidence)


def means_of_either(**changes: Any) -> GroupEvidence:
    """A table with a mean of each sex."""
    values = np.array([[1.0], [3.0]])
    facts: dict[str, Any] = {
        "name": "trips.csv",
        "kind": "table",
        "shares": np.eye(2),
        "features": ("category:gym",),
        "values": values,
        "n": np.full(2, 100.0),
    }
    return GroupEvidence(**(facts | changes))


def test_people_of_either_group_identify_what_regions_do_not() -> None:
    alone = diagnose_regions(two_alike())
    assert alone.effective_rank == 1 and alone.effective_rank_with_evidence is None
    assert not alone.contrasts[0].identified
    labelled = means_of_either(name="labelled people", kind="labelled")
    both = diagnose_regions(two_alike(labelled))
    assert (both.effective_rank, both.effective_rank_with_evidence) == (1, 2)
    assert both.evidence == ("200 labelled people",) and both.contrasts[0].identified
    # M - F is measured by 100 people of each: the root of 1/100 + 1/100 standard deviations.
    assert both.contrasts[0].standard_error == pytest.approx(np.sqrt(0.02))


def test_a_table_with_standard_errors_counts_as_the_people_that_they_imply() -> None:
    """A variance of 4 and a standard error of 0.4 are those of 25 people."""
    table = means_of_either(n=np.full(2, np.inf), standard_error=np.full((2, 1), 0.4))
    contrast = diagnose_regions(two_alike(table)).contrasts[0]
    assert contrast.standard_error == pytest.approx(np.sqrt(2 / 25))


def test_a_table_of_other_people_does_not_count_and_a_partial_one_says_what_it_lacks() -> None:
    elsewhere = diagnose_regions(two_alike(means_of_either(same_population=False)))
    assert elsewhere.effective_rank_with_evidence == 1 and not elsewhere.contrasts[0].identified
    assert any("the table trips.csv is about other people" in each for each in elsewhere.warnings)
    partial = diagnose_regions(two_alike(means_of_either()))
    assert "the table trips.csv says nothing about transitions" in partial.warnings


def test_the_command_counts_labelled_people(city: Path, tmp_path: Path) -> None:
    build(city, tmp_path / "alone", features=("category",))
    build(city, tmp_path / "both", features=("category",), labelled_sample=160)
    alone, both = (run("diagnose", tmp_path / name) for name in ("alone", "both"))
    assert (alone.code, both.code) == (0, 0)
    assert "labelled people" not in alone.out
    said = " ".join(both.out.split())
    assert "regions, with 160 labelled people, can distinguish all 8 groups." in said
    assert "not identified" in alone.out and "not identified" not in both.out
