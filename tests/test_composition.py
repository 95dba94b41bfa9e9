from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from mobatlas.errors import MobatlasError
from mobatlas.groups import DEFAULT_GROUPS, Groups
from mobatlas.regions.ages import age_ranges
from mobatlas.regions.composition import composition_from_labels, read_composition

SURVEY = Groups.of({"age_group": ("00-24", "25-44", "45-64", "65+"), "gender": ("M", "F")})
AGES = Groups.of({"age": ("<30", "30-40", "40-50", ">50")})


def table(tmp_path: Path, columns: Mapping[str, object], name: str = "composition.csv") -> Path:
    path = tmp_path / name
    frame = pd.DataFrame(dict(columns))
    if name.endswith(".csv"):
        frame.to_csv(path, index=False)
    else:
        frame.to_parquet(path, index=False)
    return path


def acs(style: str = "E") -> dict[str, list[Any]]:
    """Two tracts: ten people in every cell; the second has 230 more women of 85 and over."""
    columns: dict[str, list[Any]] = {
        "GEO_ID": ["1400000US01001020100", "1400000US01001020200"],
        "NAME": ["A", "B"],
    }
    for number in range(1, 50):
        columns[f"B01001_{number:03d}{style}"] = [10, 10]
        columns[f"B01001_{number:03d}M"] = [3, -555555555]
    columns[f"B01001_049{style}"] = [10, 240]
    return columns


@pytest.mark.parametrize("name", ["composition.csv", "composition.parquet"])
def test_counts_become_shares_and_missing_groups_count_as_zero(tmp_path: Path, name: str) -> None:
    rows = {
        "region": ["A", "A", "B"],
        "group": ["<30, M", ">50, F", "30-40, F"],
        "count": [3, 1, 5],
    }
    composition = read_composition(table(tmp_path, rows, name), DEFAULT_GROUPS)
    assert composition.regions == ("A", "B")
    assert composition.shares.tolist() == [[0.75, 0, 0, 0, 0, 0, 0, 0.25], [0, 0, 0, 1, 0, 0, 0, 0]]
    assert composition.n.tolist() == [4, 5]


def test_groups_are_read_from_their_names(tmp_path: Path) -> None:
    rows = {"region": [1, 1, 2], "group": ["65+,F", "0-24, M", "25-64, F"], "count": [1, 1, 1]}
    composition = read_composition(table(tmp_path, rows))
    assert composition.groups.as_dict() == {
        "attribute1": ["0-24", "25-64", "65+"],
        "gender": ["M", "F"],
    }
    assert composition.regions == ("1", "2")
    default = {"region": ["A"] * 8, "group": list(DEFAULT_GROUPS.names), "share": [0.125] * 8}
    assert read_composition(table(tmp_path, default)).groups == DEFAULT_GROUPS


def test_attribute_columns_stand_for_a_group_column(tmp_path: Path) -> None:
    rows = {
        "region": ["A", "A", "B"],
        "sex": ["Female", "Male", "Male"],
        "age": ["30-34", "20-24", "85+"],
        "count": [1, 3, 2],
    }
    composition = read_composition(table(tmp_path, rows), DEFAULT_GROUPS)
    assert composition.shares.tolist() == [[0.75, 0, 0, 0.25, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 1, 0]]
    by_age = read_composition(table(tmp_path, rows), AGES)
    assert by_age.shares.tolist() == [[0.75, 0.25, 0, 0], [0, 0, 0, 1]]
    inferred = read_composition(table(tmp_path, rows)).groups
    assert inferred.as_dict() == {"sex": ["Male", "Female"], "age": ["20-24", "30-34", "85+"]}


def test_shares_are_exact_unless_people_are_stated(tmp_path: Path) -> None:
    rows: dict[str, list[Any]] = {"region": ["A", "A"], "group": ["M", "F"], "share": [0.4996, 0.5]}
    path = table(tmp_path, rows)
    composition = read_composition(path)
    assert composition.shares.sum() == pytest.approx(1, abs=1e-15)
    assert np.isinf(composition.n).all()
    assert read_composition(path, n=1000).n.tolist() == [1000]
    assert read_composition(table(tmp_path, rows | {"n": [40, 40]})).n.tolist() == [40]


@pytest.mark.parametrize("style", ["E", ""])
def test_an_acs_table_is_read_into_the_default_groups(tmp_path: Path, style: str) -> None:
    """Of 23 age ranges nine end below 30, two lie in 30-40, two in 40-50, ten from 50 on."""
    composition = read_composition(table(tmp_path, acs(style)))
    assert composition.groups == DEFAULT_GROUPS
    assert composition.regions == ("1400000US01001020100", "1400000US01001020200")
    assert composition.n.tolist() == [460, 690]
    assert composition.shares[0] == pytest.approx(np.array([9, 9, 2, 2, 2, 2, 10, 10]) / 46)
    assert composition.shares[1] == pytest.approx(
        np.array([90, 90, 20, 20, 20, 20, 100, 330]) / 690
    )


def test_the_second_header_of_a_census_download_is_skipped(tmp_path: Path) -> None:
    path = table(
        tmp_path, {name: ["Estimate!!Total:!!Male:", *values] for name, values in acs().items()}
    )
    assert read_composition(path).n.tolist() == [460, 690]


def test_people_of_no_group_are_left_out_and_it_is_noted(tmp_path: Path) -> None:
    grown_up = Groups.of({"age": ("18-64", "65+"), "gender": ("M", "F")})
    notes: list[str] = []
    composition = read_composition(table(tmp_path, acs()), grown_up, notes=notes)
    assert composition.n.tolist() == [380, 610]  # four ranges of each gender are below 18
    left_out = [note for note in notes if "belong to no group and are left out" in note]
    assert left_out[0].startswith("composition.csv: people of age range '<5'")
    assert len(left_out) == 4


@pytest.mark.parametrize(
    ("levels", "expected"),
    [
        (("<30", "30-40", "40-50", ">50"), [(0, 30), (30, 40), (40, 50), (50, np.inf)]),
        (("25-44", "45-64", "65+"), [(25, 45), (45, 65), (65, np.inf)]),
        (("00-24", "25-44"), [(0, 25), (25, 45)]),
        (("18-29", "30-49", ">49"), [(18, 30), (30, 50), (50, np.inf)]),
        (("<50", ">50"), [(0, 50), (50, np.inf)]),
        (
            ("Under 5 years", "5 to 9 years", "60 and 61 years", "85 years and over"),
            [(0, 5), (5, 10), (60, 62), (85, np.inf)],
        ),
        (("20 years", "22\u201324"), [(20, 21), (22, 25)]),
    ],
)  # fmt: skip
def test_age_ranges_end_as_their_neighbours_say(
    levels: tuple[str, ...], expected: list[tuple[float, float]]
) -> None:
    assert age_ranges(levels) == expected


def test_what_is_no_age_is_no_age_range() -> None:
    assert age_ranges(("<30", "retired")) is None
    assert age_ranges(("40-30",)) is None


def test_a_straddling_range_is_refused_or_split_by_years(tmp_path: Path) -> None:
    """Five years of 25-34 are below 30; five of the 55 years of 45-99 are below 50."""
    rows: dict[str, list[Any]] = {"region": ["A", "A"], "age": ["25-34", "45+"], "count": [10, 110]}
    path = table(tmp_path, rows)
    with pytest.raises(
        MobatlasError,
        match=r"age range '25-34' straddles '<30' and '30-40'; .*--split-ages .straddle: uniform",
    ):
        read_composition(path, AGES)
    notes: list[str] = []
    composition = read_composition(path, AGES, straddle="uniform", notes=notes)
    assert composition.shares[0] * 120 == pytest.approx([5, 5, 10, 100])
    assert "assumed to end at 99" in notes[1]


@pytest.mark.parametrize(
    ("columns", "sentence"),
    [
        (
            {"share": [0.5, 0.33, 1.0]},
            "the shares of region 'R17' sum to 0.83, not 1; pass counts, or normalise the shares",
        ),
        ({"count": [5, -3, 1]}, "the count of '>50, F' in region 'R17' is negative"),
        ({"count": [0, 0, 0]}, "every region has no people"),
        ({"count": [5, None, 1]}, "column 'count' is empty or not a number in row 2"),
        ({"count": [5, "many", 1]}, "column 'count' is empty or not a number in row 2"),
        (
            {"group": ["<30, M", "30-4O, F", "<30, M"]},
            "group '30-4O, F' does not exist; did you mean '30-40, F'",
        ),
        ({"group": ["<30, M", "<30", "<30, M"]}, "group '<30' does not exist"),
        (
            {"group": ["<30, M", "<30,M ", "<30, M"]},
            "region 'R17' has two rows of '<30, M'; keep one",
        ),
        ({"group": ["<30, M", "", "<30, M"]}, "column 'group' is empty in row 2"),
        ({"region": ["R17", None, "R18"]}, "column 'region' is empty in row 2"),
    ],
)
def test_bad_tables_are_refused_in_one_sentence(
    tmp_path: Path, columns: dict[str, list[Any]], sentence: str
) -> None:
    rows: dict[str, list[Any]] = {
        "region": ["R17", "R17", "R18"],
        "group": ["<30, M", ">50, F", "<30, M"],
    }
    measure = {} if "share" in columns else {"count": [1, 1, 1]}
    with pytest.raises(MobatlasError) as error:
        read_composition(table(tmp_path, rows | measure | columns), DEFAULT_GROUPS)
    assert f"composition.csv: {sentence}" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("columns", "sentence"),
    [
        ({"area": ["A"], "group": ["M"], "count": [1]}, "column 'region' is missing"),
        ({"region": ["A"], "group": ["M"], "number": [1]}, "column 'count' is missing"),
        ({"region": ["A"], "count": [1]}, "column 'group' is missing"),
        ({"region": [], "group": [], "count": []}, "the table has no rows"),
        (
            {"region": ["A", "A"], "group": ["M", "M, 30"], "count": [1, 1]},
            "have different numbers of levels",
        ),
        ({**acs(), "GEO_ID": ["a1", "a1"]}, "region 'a1' has two rows of '<5, M'; keep one"),
        (
            {name: values for name, values in acs().items() if name != "B01001_030E"},
            "column 'B01001_030E' is missing",
        ),
    ],
)
def test_bad_layouts_are_refused_in_one_sentence(
    tmp_path: Path, columns: dict[str, list[Any]], sentence: str
) -> None:
    with pytest.raises(MobatlasError, match=f"composition.csv: .*{sentence}"):
        read_composition(table(tmp_path, columns))


def test_an_attribute_that_the_table_lacks_is_named(tmp_path: Path) -> None:
    income = Groups.of({"age": ("<30", ">30"), "income": ("low", "high")})
    with pytest.raises(MobatlasError, match="no column for 'income'"):
        read_composition(table(tmp_path, acs()), income)


def test_an_unquoted_comma_a_missing_file_and_a_wrong_option_are_explained(tmp_path: Path) -> None:
    path = tmp_path / "composition.csv"
    path.write_text("region,group,count\nA,30-40, F,3\n")
    with pytest.raises(MobatlasError, match=r"more fields than the header.*quote names"):
        read_composition(path)
    path.write_text("region,group,count\nA,M,3\nA,30-40, F,3\n")
    with pytest.raises(MobatlasError, match="quote names"):
        read_composition(path)
    with pytest.raises(MobatlasError, match="no such file"):
        read_composition(tmp_path / "absent.parquet")
    with pytest.raises(MobatlasError, match="straddle 'even' does not exist"):
        read_composition(path, straddle="even")


def test_labels_are_counted_where_group_and_region_are_known() -> None:
    groups = Groups.of({"gender": ("M", "F")})
    labels = np.array([0, 1, 1, -1, 0, 1])
    composition = composition_from_labels(labels, ["b", "b", "b", "b", "a", None], groups)
    assert composition.regions == ("a", "b")
    assert composition.n.tolist() == [1, 3]
    assert composition.shares[1] == pytest.approx([1 / 3, 2 / 3])
    with pytest.raises(MobatlasError, match="region 'd' has no people"):
        composition_from_labels(labels, ["b"] * 5 + ["c"], groups, ["b", "c", "d"])


def test_one_group_is_a_composition(tmp_path: Path) -> None:
    composition = read_composition(
        table(tmp_path, {"region": ["A"], "group": ["all"], "count": [9]})
    )
    assert composition.shares.tolist() == [[1.0]]


def test_the_census_of_santiago_is_split_only_on_request(data_folder: Path) -> None:
    """A comuna of Santiago: 56,052 men of 0-24 and 139,082 of 25-64, half of them 25-44."""
    path = data_folder / "santiago" / "census_comuna.parquet"
    with pytest.raises(MobatlasError, match="'25-64' straddles '25-44' and '45-64'"):
        read_composition(path, SURVEY)
    composition = read_composition(path, SURVEY, straddle="uniform")
    assert len(composition.regions) == 52
    row = composition.regions.index("SANTIAGO")
    people = composition.shares[row] * composition.n[row]
    assert people == pytest.approx([56052, 52710, 69541, 63316, 69541, 63316, 11544, 18475])
    own = read_composition(path).groups
    assert own.as_dict() == {"age": ["0-24", "25-64", "65+"], "gender": ["M", "F"]}
