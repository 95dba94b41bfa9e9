"""Published group tables: what each row means, in which period, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from mobatlas import (
    CityConfig,
    MobatlasError,
    TrajectoryDataset,
    build_regions,
    load_regions,
    prepare,
    write_city_folder,
)
from mobatlas.regions.build import RegionsOptions
from mobatlas.regions.types import GroupEvidence, Regions
from tests.outcomes import refused, run

ORDER = ("<30, M", "<30, F", "30-40, M", "30-40, F", "40-50, M", "40-50, F", ">50, M", ">50, F")
PEOPLE = dict(zip(ORDER, (40, 30, 20, 10, 25, 35, 5, 15), strict=True))  # of a region


@pytest.fixture(scope="module")
def city(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tables")
    write_city_folder(root / "city", CityConfig(users=600, pois=40, days=6, districts=4), seed=2)
    prepare(root / "city", root / "dataset", preset="small")
    people = pd.read_parquet(root / "city" / "people.parquet")
    pd.DataFrame(
        [
            {"region": district, "group": group, "count": count}
            for district in sorted(set(people.home_district))
            for group, count in PEOPLE.items()
        ]
    ).to_csv(root / "census.csv", index=False)
    return root


@pytest.fixture(scope="module")
def means(city: Path) -> dict[str, float]:
    """Mean visits of training people to each category, per window of three days."""
    dataset = TrajectoryDataset.open(city / "dataset")
    totals: dict[int, list[np.ndarray[Any, Any]]] = {}
    names = list(dict.fromkeys(name or "unknown" for name in dataset.vocabulary.categories[4:]))
    for number in dataset.split("train"):
        visited = [dataset.vocabulary.categories[token] for token in dataset.trajectory(number)]
        counts = np.array([visited.count(name) for name in names])
        totals.setdefault(int(dataset.person[number]), []).append(counts)
    mean = np.mean([np.mean(windows, axis=0) for windows in totals.values()], axis=0)
    return dict(zip(names, mean.tolist(), strict=True))


def build(city: Path, out: Path, *tables: Path, **options: Any) -> Regions:
    chosen = RegionsOptions(
        by="home_district", composition=city / "census.csv", group_tables=tables, **options
    )
    return build_regions(city / "dataset", out, chosen)


def write(path: Path, columns: Mapping[str, Any]) -> Path:
    pd.DataFrame(dict(columns)).to_csv(path, index=False)
    return path


def read(city: Path, folder: Path, columns: Mapping[str, Any]) -> GroupEvidence:
    [evidence] = build(city, folder / "out", write(folder / "t.csv", columns)).evidence
    return evidence


def mixture(*groups: str) -> list[float]:
    total = sum(PEOPLE[group] for group in groups)
    return [PEOPLE[name] / total if name in groups else 0 for name in ORDER]


def test_a_row_is_the_mixture_of_the_groups_that_it_covers(
    city: Path, tmp_path: Path, means: dict[str, float]
) -> None:
    home = means["home"]
    factors = np.array([1.1, 1.0, 0.9, 1.0, 1.05])
    people = [10, 20, 30, 40, 50]
    columns = {
        "age": ["<30", "<30", "", "", "40 to 50"],
        "sex": ["female", "", "Women", "all", "m"],
        "feature": ["category:home"] * 5,
        "value": factors * home,
        "n": people,
    }
    evidence = read(city, tmp_path, columns)
    expected = {
        10: mixture("<30, F"),
        20: mixture("<30, M", "<30, F"),
        30: mixture(*(name for name in ORDER if name.endswith("F"))),
        40: mixture(*ORDER),
        50: mixture("40-50, M"),
    }
    assert (evidence.name, evidence.kind) == ("t.csv", "table")
    assert evidence.same_population and evidence.standard_error is None
    by_n = dict(zip(evidence.n.tolist(), evidence.shares, strict=True))
    for n, shares in expected.items():
        np.testing.assert_allclose(by_n[n], shares, atol=1e-12)
    values = dict(zip(evidence.n.tolist(), evidence.values[:, 0].tolist(), strict=True))
    assert values == pytest.approx(dict(zip(people, factors * home, strict=True)))


def test_an_age_range_over_two_groups_has_people_of_both(
    city: Path, tmp_path: Path, means: dict[str, float]
) -> None:
    columns = {"age": ["25-34"], "feature": ["category:home"], "value": [means["home"]], "n": [9]}
    [shares] = read(city, tmp_path, columns).shares
    # Five of its ten years are below 30; within an age, genders are mixed as in the population.
    np.testing.assert_allclose(shares, [0.5 * 4 / 7, 0.5 * 3 / 7, 0.5 * 2 / 3, 0.5 / 3, 0, 0, 0, 0])
    notes = load_regions(tmp_path / "out").details["notes"]
    assert any("age range '25-34' are spread evenly" in note for note in notes)


def test_cells_without_a_value_are_unknown_and_standard_errors_are_those_of_the_table(
    city: Path, tmp_path: Path, means: dict[str, float]
) -> None:
    columns = {
        "group": [*ORDER[:2], ORDER[0], ORDER[3]],
        "feature": ["category:home", "category:home", "category:work", "category:work"],
        "value": [means["home"], "", means["work"], means["work"]],
        "standard_error": [0.1, 0.1, 0.2, 0.3],
    }
    evidence = read(city, tmp_path, columns)
    assert evidence.features == ("category:home", "category:work")
    assert evidence.shares.argmax(1).tolist() == [0, 3]
    np.testing.assert_allclose(
        evidence.values, [[means["home"], means["work"]], [np.nan, means["work"]]]
    )
    assert evidence.standard_error is not None
    np.testing.assert_allclose(evidence.standard_error, [[0.1, 0.2], [np.nan, 0.3]])
    assert np.isinf(evidence.n).all()


@pytest.mark.parametrize(("per", "days"), [("day", 1), ("week", 7), ("month", 30.4375)])
def test_values_and_errors_are_converted_from_their_period_to_the_window(
    city: Path, tmp_path: Path, means: dict[str, float], per: str, days: float
) -> None:
    columns = {
        "gender": ["M", "F"],
        "feature": ["category:home"] * 2,
        "value": [means["home"] * days / 3, 1.2 * means["home"] * days / 3],
        "standard_error": [days, 2 * days],
        "per": [per] * 2,
    }
    evidence = read(city, tmp_path, columns)
    assert evidence.values[:, 0].tolist() == pytest.approx([means["home"], 1.2 * means["home"]])
    assert evidence.standard_error is not None
    assert evidence.standard_error[:, 0].tolist() == pytest.approx([3, 6])
    assert evidence.same_population


def test_a_period_is_not_guessed(city: Path, tmp_path: Path, means: dict[str, float]) -> None:
    values = [7 / 3 * means["home"]] * 2
    columns = {"gender": ["M", "F"], "feature": "category:home", "value": values, "n": 50}
    table = write(tmp_path / "week.csv", columns)
    arguments = ["--by", "home_district", "--group-table", table, "--out", tmp_path / "out"]
    message = refused("regions", city / "dataset", *arguments)
    assert "week.csv: people make" in message and "add a column 'per' with day, week" in message
    assert sorted(path.name for path in tmp_path.iterdir()) == ["week.csv"]


def test_the_level_of_a_table_from_elsewhere_is_not_used(
    city: Path, tmp_path: Path, means: dict[str, float], caplog: pytest.LogCaptureFixture
) -> None:
    columns = {
        "gender": ["M", "F"],
        "feature": ["category:home"] * 2,
        "value": [means["home"]] * 2,
        "n": [50, 50],
    }
    assert read(city, tmp_path, columns).same_population
    (tmp_path / "elsewhere").mkdir()
    there = read(city, tmp_path / "elsewhere", columns | {"place": ["elsewhere"] * 2})
    assert not there.same_population and "visits per window" not in caplog.text
    (tmp_path / "other").mkdir()

    def as_often(times: float, **more: list[str]) -> dict[str, Any]:
        return columns | {"value": [times * means["home"]] * 2, "per": ["window"] * 2} | more

    assert not read(city, tmp_path / "other", as_often(2)).same_population
    assert "t.csv: people make" in caplog.text and "in the table, but" in caplog.text
    caplog.clear()
    elsewhere = {"place": ["elsewhere"] * 2}
    (tmp_path / "often").mkdir()
    assert not read(city, tmp_path / "often", as_often(9, **elsewhere)).same_population
    assert "people make" not in caplog.text
    for number, totals in enumerate((as_often(9), as_often(50, **elsewhere))):
        (tmp_path / f"totals{number}").mkdir()
        with pytest.raises(MobatlasError, match="whether its values are per person"):
            read(city, tmp_path / f"totals{number}", totals)


def test_evidence_survives_the_folder_and_stays_with_some_regions(
    city: Path, tmp_path: Path, means: dict[str, float]
) -> None:
    shared = {"feature": ["category:home"] * 2, "value": [means["home"], means["home"] / 1.1]}
    first = write(tmp_path / "a.csv", {"gender": ["M", "F"], "n": [7, 8], **shared})
    second = write(tmp_path / "b.csv", {"age": ["<30", ">50"], "standard_error": 0.3, **shared})
    built = build(city, tmp_path / "out", first, second, labelled_sample=40)
    assert [each.name for each in built.evidence] == ["labelled people", "a.csv", "b.csv"]
    again = load_regions(tmp_path / "out")
    for written, loaded in zip(built.evidence, again.evidence, strict=True):
        for name, value in vars(written).items():
            np.testing.assert_array_equal(getattr(loaded, name), value)
    assert again.select(np.array([1])).evidence == again.evidence
    build(city, tmp_path / "same", first, second, labelled_sample=40)
    for path in (tmp_path / "out").rglob("*.parquet"):
        other = tmp_path / "same" / path.relative_to(tmp_path / "out")
        assert path.read_bytes() == other.read_bytes()


def test_a_changed_evidence_file_is_noticed(
    city: Path, tmp_path: Path, means: dict[str, float]
) -> None:
    columns = {"gender": ["M"], "feature": "category:home", "value": [means["home"]], "n": 5}
    read(city, tmp_path, columns)
    file = next((tmp_path / "out" / "evidence").rglob("aggregates.parquet"))
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    assert "differs from its entry in manifest.json" in refused("diagnose", tmp_path / "out")


def test_masked_tokens_are_left_out_with_a_note(
    city: Path, tmp_path: Path, means: dict[str, float]
) -> None:
    columns = {
        "gender": ["M", "M"],
        "feature": ["category:home", "category:work"],
        "value": [means["home"], means["work"]],
        "n": 5,
    }
    table = write(tmp_path / "t.csv", columns)
    regions = build(city, tmp_path / "out", table, mask=("HOME",))
    assert regions.evidence[0].features == ("category:work",)
    assert any("1 rows of masked tokens are left out" in n for n in regions.details["notes"])


def test_the_command_takes_several_tables(
    city: Path, tmp_path: Path, means: dict[str, float]
) -> None:
    shared = {"feature": ["category:home"], "value": [means["home"]], "n": [5]}
    options = [
        word
        for name, attribute, level in (("a", "gender", "F"), ("b", "age", "<30"))
        for word in (
            "--group-table",
            write(tmp_path / f"{name}.csv", {attribute: [level], **shared}),
        )
    ]
    arguments = ["--by", "home_district", *options, "--out", tmp_path / "out"]
    done = run("regions", city / "dataset", *arguments)
    assert done.code == 0 and "a.csv: 1 rows with means of 1 features" in done.out
    assert len(load_regions(tmp_path / "out").evidence) == 2


GOOD: dict[str, Any] = {
    "age": ["<30", ">50"],
    "feature": ["category:home", "category:home"],
    "value": [3.0, 3.0],
    "n": [40, 40],
}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"age": ["<30", "<30"]}, "group '<30' has two rows of 'category:home'; keep one"),
        ({"value": [3.0, -1.0]}, "the value of 'category:home' in group '>50' is negative"),
        ({"value": ["", ""]}, "no row has a value of a feature that is counted"),
        ({"age": ["<30", "teens"]}, "level 'teens' of 'age' does not exist (known: <30"),
        ({"age": ["<30", ">5O"]}, "level '>5O' of 'age' does not exist; did you mean '>50'?"),
        ({"feature": ["category:hom", "category:home"]}, "did you mean 'category:home'?"),
        ({"feature": ["home", "category:home"]}, "did you mean 'category:home'?"),
        (
            {"feature": ["poi:qqqqqqqq", "category:home"]},
            "feature 'poi:qqqqqqqq' does not exist in",
        ),
        ({"n": None}, "column 'n' or 'standard_error' is missing"),
        ({"n": None, "standard_error": [0.1, 0.0]}, "'standard_error' is not above 0 in row 2"),
        ({"n": [40, 0]}, "group '>50' has no people"),
        (
            {"per": ["day", "daily"]},
            "column 'per': 'daily' is not a period; write day, week, month",
        ),
        ({"place": ["here", "there"]}, "column 'place' has 'there'; write elsewhere or here"),
        ({"age": None}, "column 'group' is missing"),
        ({"age": None, "group": ["<30, X", ">50, M"]}, "group '<30, X' does not exist"),
        (
            {"age": None, "gender": ["M", "F"], "age_group": ["a", "b"]},
            "is not an attribute of the",
        ),
        ({"feature": ["visits:3", "visits:4"], "per": ["day", "day"]}, "give it per window"),
    ],
)
def test_a_bad_table_is_refused_in_one_sentence_and_nothing_is_written(
    city: Path, tmp_path: Path, changes: dict[str, Any], sentence: str
) -> None:
    columns = {name: each for name, each in {**GOOD, **changes}.items() if each is not None}
    table = write(tmp_path / "t.csv", columns)
    arguments = ["--by", "home_district", "--group-table", table, "--out", tmp_path / "out"]
    message = refused("regions", city / "dataset", *arguments)
    assert sentence in message and "t.csv" in message
    assert sorted(path.name for path in tmp_path.iterdir()) == ["t.csv"]


def test_a_suggestion_is_given_only_when_one_name_is_clearly_meant(
    city: Path, tmp_path: Path
) -> None:
    for feature in ("poi:p0000", "category:x", "poi:"):
        table = write(tmp_path / "t.csv", {**GOOD, "feature": [feature, "category:home"]})
        arguments = ["--by", "home_district", "--group-table", table, "--out", tmp_path / "out"]
        assert "did you mean" not in refused("regions", city / "dataset", *arguments), feature


def test_groups_that_the_regions_do_not_have_are_refused_before_their_table(
    city: Path, tmp_path: Path, means: dict[str, float]
) -> None:
    census = pd.read_csv(city / "census.csv")
    census.loc[census["group"].str.startswith(">50"), "count"] = 0
    census.to_csv(tmp_path / "census.csv", index=False)
    columns = {"age": [">50"], "feature": ["category:home"], "value": [means["home"]], "n": [9]}
    arguments = ["--by", "home_district", "--composition", tmp_path / "census.csv"]
    table = write(tmp_path / "t.csv", columns)
    options = ["--group-table", table, "--out", tmp_path / "out"]
    message = refused("regions", city / "dataset", *arguments, *options)
    assert "census.csv: no region has people of group '>50, M' or '>50, F'; merge it" in message
