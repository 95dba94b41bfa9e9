"""Surveys as input of benchmarks: what is refused, and folders that hold a survey already."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bench import prediction
from bench.prediction import PredictionOptions
from bench.real import RealOptions, run
from bench.runner import Experiment
from bench.survey import display_names, split_survey
from mobatlas import MobatlasError
from mobatlas.config import CityConfig, load_run
from mobatlas.data.city import write_city_folder

FAMILY = "autoregressive"


@pytest.fixture(scope="module")
def city(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """People of weekdays and of weekends."""
    folder = tmp_path_factory.mktemp("survey") / "city"
    write_city_folder(folder, CityConfig(users=200, pois=30, districts=4, days=15), seed=3)
    people = pq.read_table(folder / "people.parquet")
    marked = people.append_column("weekday", pa.array(np.arange(people.num_rows) % 5 != 0))
    pq.write_table(marked, folder / "people.parquet")
    return folder


VISITS = pa.table(
    {
        "user_id": ["a"] * 2_000,
        "poi_id": [f"{number * 7919 % 2_000}-{number}" for number in range(2_000)],
        "lat": np.linspace(1.0, 2.0, 2_000),
        "lon": np.linspace(1.0, 2.0, 2_000),
        "arrival": pa.array(np.arange(2_000) * 10**9, pa.timestamp("us")),
    }
)


def write_bad_survey(folder: Path, kind: str) -> Path:
    """Write a survey that benchmarks refuse."""
    folder.mkdir()
    people = pa.table({"user_id": ["a", "b"], "age": ["<30", "<30"], "weekday": [False, False]})
    path = folder / "people.parquet"
    visited = folder / "visits.parquet"
    pq.write_table(VISITS, visited)
    content = visited.read_bytes()
    pq.write_table(people.set_column(2, "weekday", pa.array([True, False])), path)
    match kind:
        case "no visits":
            visited.unlink()
        case "cut visits":
            visited.write_bytes(content[:-20])
        case "no arrival":
            pq.write_table(VISITS.drop_columns("arrival"), visited)
        case "no visit":
            pq.write_table(VISITS.slice(0, 0), visited)
        case "a word":
            words = pa.array(["morning"] * len(VISITS))
            pq.write_table(VISITS.set_column(4, "arrival", words), visited)
        case "a hole":
            visited.write_bytes(content[:100] + b"\xff" * 20_000 + content[20_100:])
        case "nothing":
            path.write_bytes(b"")
        case "nobody":
            pq.write_table(people.slice(0, 0), path)
        case "no weekday":
            pq.write_table(people, path)
        case "no people":
            path.unlink()
        case "a file":
            pq.write_table(people, path)
            return path
        case "elsewhere":
            return folder / "elsewhere"
    return folder


def run_real(data: Path, out: Path) -> None:
    run(data, Experiment(out, seeds=3), RealOptions())


def run_prediction(data: Path, out: Path) -> None:
    prediction.run(Experiment(out), PredictionOptions(data=data, generator=FAMILY))


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("nothing", r"people\.parquet: .*read"),
        ("nobody", r"people\.parquet: the table has no rows; give a labelled dataset"),
        ("no weekday", "--shift weekday: is false for all people in"),
        ("no people", "has no people.parquet; give labelled people.parquet and visits.parquet"),
        ("no visits", "has no visits.parquet; give labelled people.parquet and visits.parquet"),
        ("cut visits", r"visits\.parquet: .*read"),
        ("no arrival", r"visits\.parquet: column 'arrival' is missing"),
        ("no visit", r"visits\.parquet: the table has no rows"),
        (
            "a hole",
            r"--data .*data: people.parquet or visits.parquet cannot be read .*; write them again",
        ),
        ("a word", r"arrival"),
        ("a file", "is a file; give its folder"),
        ("elsewhere", "does not exist; give a folder of labelled people"),
    ],
)
@pytest.mark.parametrize("benchmark", [run_real, run_prediction])
def test_a_bad_survey_is_refused_and_leaves_nothing(
    tmp_path: Path, benchmark: Callable[[Path, Path], Any], kind: str, sentence: str
) -> None:
    with pytest.raises(MobatlasError, match=sentence):
        benchmark(write_bad_survey(tmp_path / "data", kind), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"generator": "autoregresive"}, "did you mean 'autoregressive'"),
        (
            {"values": {"weighted_fit": {"stepz": 3}}},
            "--set: unknown key 'stepz' in 'weighted_fit'; did you mean 'steps'",
        ),
        (
            {"values": {"groups_explain": -1}},
            "--set: 'groups_explain' is wrong: input should be greater than 0",
        ),
        (
            {"regions": ["home_distrikt"]},
            "--regions home_distrikt: .* has no such column; did you mean 'home_district'",
        ),
        ({"census": Path("nowhere.csv")}, "--census nowhere.csv: is not a file"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_prepared(
    city: Path, tmp_path: Path, options: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(MobatlasError, match=sentence):
        run(city, Experiment(tmp_path / "out"), RealOptions(**options))
    assert not (tmp_path / "out").exists()


def test_the_output_folder_must_not_overlap_the_survey(city: Path, tmp_path: Path) -> None:
    with pytest.raises(MobatlasError, match="overlaps with the source"):
        split_survey(city, city / "out")
    (tmp_path / "file").write_text("mine")
    with pytest.raises(MobatlasError, match=r"--out .*file: is a file; give a folder to fill"):
        split_survey(city, tmp_path / "file")
    assert not (city / "out").exists() and (tmp_path / "file").read_text() == "mine"


def test_results_name_files_without_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    survey = tmp_path / "survey"
    survey.mkdir()
    monkeypatch.chdir(survey)
    assert display_names(Path(), Path("census.csv")) == ("survey", "survey/census.csv")
    assert (
        display_names(survey, tmp_path / "census.csv") == ("survey", "census.csv")
        and display_names(survey, None)[1] is None
    )


def test_a_folder_of_other_people_is_refused(city: Path, tmp_path: Path) -> None:
    prepared = load_run(preset="small").prepare.model_dump()
    first = split_survey(city, tmp_path / "out", prepared=prepared)
    assert split_survey(city, tmp_path / "out", prepared=prepared) == first
    shutil.copytree(city, tmp_path / "half")
    people = pq.read_table(tmp_path / "half" / "people.parquet")
    pq.write_table(people.slice(0, people.num_rows // 2), tmp_path / "half" / "people.parquet")
    with pytest.raises(
        MobatlasError,
        match=r"out: contains other people than --data .*half, .*; choose another --out",
    ):
        split_survey(tmp_path / "half", tmp_path / "out", prepared=prepared)
