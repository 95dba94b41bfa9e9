"""By default, no published place, region or group stands for fewer than ten people."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from mobatlas import prepare
from mobatlas.cli.commands import app
from mobatlas.data.prepare.pipeline import Summary
from tests.logs import Visit, write_visits

HALVES: dict[str, Any] = {
    "window": {"days": 1, "stride": 1},
    "quality": {"min_coverage": 0.0},
    "anchors": {"infer": "never", "require_both": False},
    "split": {"train": 0.5, "val": 0.25, "test": 0.25},
    "min_people_per_place": 10,
}
PEOPLE = [f"person-{number:03d}" for number in range(60)]


def visits(places: dict[str, Sequence[str]], first: int = 8) -> list[Visit]:
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
    assert "--min-people-per-place (0 keeps all places)" in warning


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
