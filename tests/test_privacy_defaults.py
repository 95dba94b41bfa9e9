"""By default, no published place, region or group stands for fewer than ten people."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from mobatlas import (
    MobatlasError,
    Trajectories,
    TrajectoryDataset,
    build_regions,
    prepare,
)
from mobatlas.cli.commands import app
from mobatlas.config import RunConfig
from mobatlas.data.prepare.pipeline import Summary
from mobatlas.evaluation.privacy.audit import quick_answer
from mobatlas.pipeline.run import StepCache, Steps
from mobatlas.regions.build import RegionsOptions
from tests.logs import Visit, write_visits
from tests.tiny import small_city
from tests.written import write

HALVES: dict[str, Any] = {
    "window": {"days": 1, "stride": 1},
    "quality": {"min_coverage": 0.0},
    "anchors": {"infer": "never", "require_both": False},
    "split": {"train": 0.5, "val": 0.25, "test": 0.25},
    "min_people_per_place": 10,
}
PEOPLE = [f"person-{number:03d}" for number in range(60)]


def visits(places: Mapping[str, Sequence[str]], first: int = 8) -> list[Visit]:
    """Everybody visits each of their places for an hour, one after another."""
    return [
        Visit(user, place, f"2024-03-04 {hour:02d}:00", f"2024-03-04 {hour + 1:02d}:00")
        for hour, (place, users) in enumerate(places.items(), first)
        for user in users
    ]


@pytest.fixture(scope="module")
def splits(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[str]]:
    """The people of each split."""
    folder = tmp_path_factory.mktemp("splits")
    prepare(write_visits(folder / "raw", visits({"hall": PEOPLE})), folder / "out", values=HALVES)
    rows = pq.read_table(folder / "out" / "splits.parquet").to_pylist()
    return lambda split: [row["user_id"] for row in rows if row["split"] == split]


def test_places_of_fewer_than_ten_training_people_become_other(
    tmp_path: Path, splits: Callable[[str], list[str]]
) -> None:
    train = splits("train")
    places = {
        "hall": PEOPLE,
        "ten": train[:10],
        "nine": train[:9] * 3,  # more visits, but by fewer people
        "others": [*splits("val"), *splits("test"), *train[:9]],
    }
    raw = write_visits(tmp_path / "raw", visits(places))
    summary = prepare(raw, tmp_path / "out", values=HALVES)
    vocabulary = pq.read_table(tmp_path / "out" / "vocabulary.parquet")["poi_id"].to_pylist()
    assert {*vocabulary} & {*places} == {"hall", "ten"}
    recorded = json.loads((tmp_path / "out" / "summary.json").read_text())["rare_places"]
    # equal visits of a person count once, so `nine` has 9
    share = (9 + 9) / (len(train) + 10 + 9 + 9)
    assert recorded == {"min_people": 10, "places": 2, "share_of_visits": pytest.approx(share)}
    (warning,) = summary.warnings
    assert f"{share:.0%} of the visits to places became OTHER" in warning
    assert "2 places have fewer than 10 visitors" in warning
    assert "lower --min-people-per-place only for data that you will not share" in warning


@pytest.mark.parametrize(
    ("option", "expected"), [((), {"hall"}), (("--min-people-per-place", "0"), {"hall", "den"})]
)
def test_the_option_keeps_rare_places(
    tmp_path: Path, option: tuple[str, ...], expected: set[str]
) -> None:
    raw = write_visits(tmp_path / "raw", visits({"hall": PEOPLE, "den": PEOPLE[:8]}))
    sets = [f"--set={key}={json.dumps(value)}" for key, value in HALVES.items()]
    result = CliRunner().invoke(
        app, ["prepare", str(raw), "--out", str(tmp_path / "out"), *sets, *option, "--json"]
    )
    assert result.exit_code == 0, result.output
    vocabulary = pq.read_table(tmp_path / "out" / "vocabulary.parquet")["poi_id"].to_pylist()
    assert {*vocabulary} & {"hall", "den"} == expected


@pytest.mark.parametrize(
    ("place", "category", "column"),
    [
        ("person-007", "shop", "poi_id"),
        ("home of person-007", "shop", "poi_id"),
        ("villa_person-007_garden", "shop", "poi_id"),
        ("villa", "person-007", "category"),
        ("person-0070", "shop", None),
        ("17", "shop", None),
    ],
)
def test_places_with_the_id_of_a_person_are_warned_about(
    tmp_path: Path, place: str, category: str, column: str | None
) -> None:
    named = [replace(visit, category=category) for visit in visits({place: PEOPLE[:20]}, 9)]
    raw = write_visits(tmp_path / "raw", [*visits({"hall": [*PEOPLE, "17"]}), *named])
    summary = prepare(raw, tmp_path / "out", values=HALVES | {"min_people_per_place": 0})
    expected = f"vocabulary.parquet: column '{column}' has the user_id of a person in 1 of 2 places"
    assert [warning[: len(expected)] for warning in summary.warnings] == [expected] * bool(column)
    if column:
        table = pq.read_table(tmp_path / "out" / "vocabulary.parquet")
        row = table["poi_id"].to_pylist().index(place) + 1
        assert f"the first in row {row})" in summary.warnings[0]
        assert "person-007" not in summary.warnings[0]


def test_files_name_no_person_whom_a_warning_names(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The terminal shows an example; summary.json has its place in the order of ids."""
    days = [f"2024-03-{day:02d}" for day in range(4, 10)]
    copies = ("it's me", "it's you")
    rows = [Visit(user, "hall", f"{day} 08:00", f"{day} 09:00") for user in copies for day in days]
    with caplog.at_level(logging.WARNING):
        summary: Summary = prepare(
            write_visits(tmp_path / "raw", rows), tmp_path / "out", values=HALVES
        )
    named = [warning for warning in summary.warnings if "exactly the visits" in warning]
    assert all(user in named[0] and user in caplog.text for user in copies)
    written = (tmp_path / "out" / "summary.json").read_text()
    assert not any(user in written for user in copies)
    assert "number 1 in the order of user_id" in written and "number 2" in written


def test_ten_people_and_an_audit_are_the_default() -> None:
    """In a process of its own, because the other tests set them to 0."""
    code = """
from mobatlas.config import PrepareConfig, RegionsConfig, RunConfig
run = RunConfig()
print(PrepareConfig().min_people_per_place, RegionsConfig().min_people,
      run.prepare.min_people_per_place, run.audit)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["10", "10", "10", "True"]
    assert RegionsOptions.min_people == 10


@pytest.fixture(scope="module")
def town(tmp_path_factory: pytest.TempPathFactory) -> TrajectoryDataset:
    return small_city(tmp_path_factory.mktemp("town"), users=160, pois=20)


def people_of(dataset: TrajectoryDataset, column: str) -> Counter[str]:
    """Training people with a trajectory, by a column of people."""
    rows = np.intersect1d(dataset.split_people("train"), dataset.person)
    return Counter(dataset.people[column].take(pa.array(rows)).to_pylist())


def test_regions_of_few_people_are_left_out_with_a_sentence(
    town: TrajectoryDataset, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert town.groups is not None
    sizes = people_of(town, "home_district")
    smallest = min(sizes, key=sizes.__getitem__)
    census = pd.DataFrame(
        [(region, *group.split(", "), 50) for region in sizes for group in town.groups.names],
        columns=["region", "age", "gender", "count"],
    )
    census.to_csv(tmp_path / "census.csv", index=False)
    options = RegionsOptions(
        by="home_district",
        composition=tmp_path / "census.csv",
        min_people=sizes[smallest] + 1,
    )
    with caplog.at_level(logging.WARNING):
        built = build_regions(town.path, tmp_path / "regions", options)
    assert smallest not in built.composition.regions
    assert 0 < len(built.composition.regions) == sum(n > sizes[smallest] for n in sizes.values())
    assert f"with fewer than {sizes[smallest] + 1} people behind composition" in caplog.text
    assert "left out: 1 (" in caplog.text
    assert f"'{smallest}'" in caplog.text and "or lower --min-people" in caplog.text


def test_published_regions_of_few_people_are_left_out(
    town: TrajectoryDataset, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert town.groups is not None
    rows = [(r, *g.split(", "), n) for r, n in (("a", 50), ("b", 1)) for g in town.groups.names]
    census = pd.DataFrame(rows, columns=["region", "age", "gender", "count"])
    census.to_csv(tmp_path / "census.csv", index=False)
    values = [("a", "category:home", 4.3, 30), ("b", "category:home", 4.4, 30)]
    table = pd.DataFrame(values, columns=["region", "feature", "value", "n"])
    table.to_csv(tmp_path / "visits.csv", index=False)
    options = RegionsOptions(
        composition=tmp_path / "census.csv", aggregates=tmp_path / "visits.csv", min_people=10
    )
    with caplog.at_level(logging.WARNING):
        built = build_regions(town.path, tmp_path / "regions", options)
    assert built.composition.regions == ("a",)
    assert (
        "fewer than 10 people behind composition or aggregates are left out: 1 ('b')" in caplog.text
    )
    with pytest.raises(MobatlasError, match="every region has fewer than 900 people"):
        build_regions(town.path, tmp_path / "none", replace(options, min_people=900))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            RegionsOptions(partition="hot16", min_people=10),
            r"--partition hot16: region 'R\d+' would have \d people, fewer than 10; choose a",
        ),
        (
            RegionsOptions(partition="dirichlet:2:5", min_people=25),
            r"the labels: group '.*' has \d+ people in all regions, fewer than 25; merge it",
        ),
    ],
)
def test_partitions_and_groups_of_few_people_are_refused(
    town: TrajectoryDataset, tmp_path: Path, options: RegionsOptions, sentence: str
) -> None:
    with pytest.raises(MobatlasError, match=sentence):
        build_regions(town.path, tmp_path / "regions", options)
    assert not (tmp_path / "regions").exists()
    build_regions(town.path, tmp_path / "regions", replace(options, min_people=0))


def test_a_run_of_few_people_warns_instead_of_auditing_unless_an_audit_was_asked_for(
    town: TrajectoryDataset, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    audited = {}
    for asked in (False, True):
        config = RunConfig.model_construct({"audit"} if asked else set(), audit=True)
        steps = Steps(config, tmp_path, tmp_path, StepCache(tmp_path), quiet=True)
        steps.__dict__["dataset"] = town
        with caplog.at_level(logging.WARNING):
            audited[asked] = steps._audited
    assert audited == {False: False, True: True}
    assert re.search(r"no privacy audit: .*split 'test' has \d+ people", caplog.text)


@pytest.mark.parametrize(
    ("known", "n", "words"),
    [
        (True, 10, "Not audited: .*split .* has 15 people, .* needs 20 or more"),
        (False, 10, "Not audited: there is no dataset at .*; run mobatlas audit out.parquet"),
        (True, 30_000, "Not audited: that may take minutes; run mobatlas audit out.parquet"),
    ],
)
def test_generate_says_why_it_could_not_answer(
    town: TrajectoryDataset, tmp_path: Path, known: bool, n: int, words: str
) -> None:
    write(tmp_path / "out.parquet", town, Trajectories.of(town, np.arange(n % 100 + 1)))
    folder = town.path if known else tmp_path / "nowhere"
    line = quick_answer(tmp_path / "out.parquet", folder, n).replace(f"{tmp_path}/", "")
    assert re.search(words, line) and line.startswith("Are these samples safe to share? ")
