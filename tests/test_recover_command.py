"""`recover` as a user types it: sentences and a table, files, a figure, and bad options."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from rich.console import Console

from mobatlas import (
    CityConfig,
    build_regions,
    load_regions,
    prepare,
    recover,
    write_city_folder,
)
from mobatlas.groups import Groups
from mobatlas.regions.build import RegionsOptions
from mobatlas.regions.recovery.summary import summarise_recovery
from mobatlas.regions.types import GroupEvidence, Regions
from mobatlas.report.recovery import RecoveryView, write_recovery
from tests.outcomes import refused, run
from tests.test_recovery_summary import posterior

COLUMNS = ["group", "feature", "compared_with", "value", "low", "high", "reference"]
COLUMNS += ["ratio", "ratio_low", "ratio_high", "verdict", "from_regions"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A REGIONS folder with places and categories, and 60 labelled people."""
    root = tmp_path_factory.mktemp("city")
    write_city_folder(root / "city", CityConfig(users=400, pois=40, days=15), seed=3)
    prepare(root / "city", root / "dataset", preset="small")
    options = RegionsOptions(partition="hot16", features=["poi", "category"], labelled_sample=60)
    build_regions(root / "dataset", root / "regions", options)
    return root / "regions"


@pytest.fixture(autouse=True)
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


def output(*arguments: object) -> str:
    done = run(*arguments)
    assert done.code == 0, done.err
    return done.out


def joined(text: str) -> str:
    """Wrapped lines as one."""
    return " ".join(text.split())


def test_the_table_fits_a_terminal_and_says_what_is_known(folder: Path) -> None:
    text = output("recover", folder)
    assert max(map(len, text.splitlines())) <= 80
    assert "These 16 regions and 60 labelled people show" in joined(text)
    assert "from the average (8 groups, 15 features of category)" in joined(text)
    assert "At most 10 % of the verdicts more and less are expected to be wrong" in joined(text)
    assert "These are the 4 most certain of 15 features" in joined(text)
    assert "Information on category: " in text and "labelled people" in text
    assert "For other features pass --feature poi." in text
    summary = summarise_recovery(recover(load_regions(folder), quiet=True))
    first = summary.features[summary.most_certain("category", 1)[0]].partition(":")[2]
    lines = text.splitlines()
    start = next(number for number, line in enumerate(lines) if line.split()[:1] == [first])
    assert [lines[start + 1 + row].split("  ")[1].strip() for row in range(8)] == list(summary.rows)


def test_places_have_their_category(folder: Path) -> None:
    text = output("recover", folder, "--feature", "poi", "--top", 2, "--by", "gender")
    assert max(map(len, text.splitlines())) <= 80
    parents = load_regions(folder).parents
    place, category = next(
        (feature.partition(":")[2], parent.partition(":")[2])
        for feature, parent in parents.items()
        if feature.partition(":")[2] in text.split()
    )
    assert f"{place} ({category})" in joined(text)
    assert "(2 levels, " in text and "most certain of" in joined(text)


def test_levels_and_comparisons(folder: Path) -> None:
    ages = output("recover", folder, "--by", "age", "--top", 1)
    for level in ("<30", "30-40", "40-50", ">50"):
        assert f"\n   {level} " in ages
    sides = output("recover", folder, "--compare", "F", "M", "--level", "0.95")
    assert "F / M" in sides and "between F and M (15 features of category)" in joined(sides)
    assert "a probability of 95 %. At most 5 % of the verdicts" in joined(sides)
    groups = output("recover", folder, "--compare", "<30, F", ">50, F", "--top", 3)
    assert "between <30, F and >50, F" in joined(groups)


def test_files_hold_the_same_numbers(folder: Path, tmp_path: Path) -> None:
    for name in ("means.csv", "means.parquet", "means.json"):
        output("recover", folder, "--by", "age", "--out", tmp_path / name)
    csv = pd.read_csv(tmp_path / "means.csv")
    parquet = pd.read_parquet(tmp_path / "means.parquet")
    values = json.loads((tmp_path / "means.json").read_text())
    printed = json.loads(output("recover", folder, "--by", "age", "--json"))
    assert printed == values
    assert list(csv.columns)[: len(COLUMNS)] == COLUMNS
    assert {"from_labelled_people", "from_assumption"} <= set(csv.columns)
    features = load_regions(folder).aggregates.features
    assert len(csv) == 4 * len(features)
    assert csv["feature"].tolist() == list(features) * 4
    for table in (parquet, pd.DataFrame(values["rows"])):
        pd.testing.assert_frame_equal(
            csv, table, check_exact=False, rtol=1e-12, check_dtype=False, check_column_type=False
        )
    assert values["level"] == 0.9 and values["wrong_verdicts"] == 0.1
    summary = summarise_recovery(recover(load_regions(folder), quiet=True), by="age")
    assert csv["value"].to_numpy() == pytest.approx(summary.value.ravel())
    shares = csv[[name for name in csv.columns if name.startswith("from_")]].sum(axis=1)
    assert shares.to_numpy() == pytest.approx(1)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "means.csv",
        "means.json",
        "means.parquet",
    ]


@pytest.mark.parametrize("name", ["means.csv", "means.parquet", "means.json"])
def test_a_file_is_replaced_only_if_asked_and_ours(folder: Path, tmp_path: Path, name: str) -> None:
    out = tmp_path / name
    summary = summarise_recovery(
        posterior(Groups.of({"sex": ("M", "F")}), np.zeros((2, 1)), np.eye(2))
    )
    write_recovery(out, summary)
    before = out.read_bytes()
    assert "exists already" in refused("recover", folder, "--out", out)
    assert out.read_bytes() == before
    output("recover", folder, "--out", out, "--overwrite")
    assert out.read_bytes() != before
    out.write_text("group,visits\nwomen,3\n")
    message = refused("recover", folder, "--out", out, "--overwrite")
    assert "was not written by mobatlas" in message
    assert out.read_text() == "group,visits\nwomen,3\n"


@pytest.mark.parametrize("options", [[], ["--compare", "F", "M"], ["--by", "age", "--top", "2"]])
def test_a_figure_is_drawn(folder: Path, tmp_path: Path, options: list[str]) -> None:
    figure = tmp_path / "means.png"
    output("recover", folder, *options, "--figure", figure)
    content = figure.read_bytes()
    assert content.startswith(b"\x89PNG") and len(content) > 10_000


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--level", 90], "level 90: give a probability between 0 and 1"),
        (["--by", "ages"], "attribute 'ages' does not exist; did you mean 'age'?"),
        (["--compare", "women", "men"], "group 'women' does not exist"),
        (["--compare", "F", "<30"], "'F' is a level of gender and '<30' of age"),
        (["--compare", "F", "M", "--by", "age"], "not both"),
        (["--feature", "hour"], "no feature map 'hour'"),
        (["--out", "means.xlsx"], "--out means.xlsx: give a file that ends in .csv, .parquet or"),
        (["--top", 0], "invalid value for '--top'"),
    ],
)
def test_bad_options_are_refused_in_a_sentence(
    folder: Path, options: list[object], sentence: str
) -> None:
    assert sentence in refused("recover", folder, *options)


def test_a_file_inside_the_regions_folder_is_refused(folder: Path) -> None:
    assert "overlaps" in refused("recover", folder, "--out", folder / "means.csv")
    assert not (folder / "means.csv").exists()


def view(regions: Regions, groups: Groups, log_ratios: Any, sd: float, **options: Any) -> str:
    """The text for a posterior with independent errors, in 80 columns."""
    size, bins = np.shape(log_ratios)
    features = tuple(f"category:{'pickup_dropoff_goods' * (not n)}{n}" for n in range(bins))
    recovery = posterior(groups, np.array(log_ratios), sd**2 * np.eye(size), features=features)
    console = Console(width=80, file=io.StringIO())
    summary = summarise_recovery(replace(recovery, notes=("the table contradicts.",)), **options)
    console.print(RecoveryView(summary, regions).as_rich())
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert max(map(len, text.splitlines())) <= 80
    assert "\N{HORIZONTAL ELLIPSIS}" not in text
    return text


def test_what_is_not_known_is_said(folder: Path) -> None:
    regions = load_regions(folder)
    groups = Groups.of({"age": ("<30", "30+"), "sex": ("M", "F")})
    nothing = view(regions, groups, np.zeros((4, 2)), 0.5)
    assert "show no clear difference from the average (4 groups, 2 features" in joined(nothing)
    assert "Nothing in category distinguishes <30 from 30+." in nothing
    assert "Nothing in category distinguishes M from F." in nothing
    assert "note: the table contradicts." in nothing
    ages = view(regions, groups, [[1, 0], [1, 0], [-1, 0], [-1, 0]], 0.1)
    assert "show 4 clear differences from the average" in joined(ages)
    assert "30 have" not in ages and "times the average in" in joined(ages)
    assert "Nothing in category distinguishes M from F." in ages
    assert "distinguishes <30" not in ages
    sides = view(regions, groups, np.zeros((4, 2)), 0.5, compare=("F", "M"))
    assert "Nothing in category distinguishes F from M." in sides
    one = view(regions, groups, [[2, 0], [0, 0], [0, 0], [0, 0]], 0.2)
    assert "distinguishes these from the average" not in one or "<30, F" in one


def test_a_published_table_is_evidence(folder: Path) -> None:
    regions = load_regions(folder)
    table = GroupEvidence(
        "trips.csv", "table", np.eye(8)[:1], ("category:gym",), np.ones((1, 1)), np.array([90.0])
    )
    text = view(
        replace(regions, evidence=(*regions.evidence, table)), regions.groups, np.zeros((8, 2)), 1
    )
    assert "These 16 regions, 60 labelled people and the table trips.csv show" in joined(text)
    alone = regions.select(np.array([0]))
    text = view(replace(alone, evidence=()), regions.groups, np.zeros((8, 2)), 1)
    assert "This region shows no clear difference" in joined(text)


def test_long_names_of_groups_and_features_fit(folder: Path) -> None:
    long = Groups.of(
        {
            "age": ("under thirty years", "thirty and over"),
            "education": ("none", "university degree"),
        }
    )
    text = view(load_regions(folder), long, np.zeros((4, 12)), 1.0)
    assert "under thirty years, 1.00 (0.19-5.18)" in joined(text)
    assert text.count("60%") == 4 * 8 + 1  # the last column is not cut
    names = (long.names[0], long.names[3])
    text = view(load_regions(folder), long, np.zeros((4, 12)), 1.0, compare=names)
    assert "between under thirty years, none and thirty and over, university" in joined(text)
    assert "category first second ratio verdict evidence" in joined(text)
    assert text.count("60%") == 12 + 1
