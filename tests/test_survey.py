"""Surveys that benchmarks are given: what is refused before anything is written, and folders that were begun."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bench import prediction
from bench.cells import in_one_folder
from bench.real import run
from bench.survey import divided_people, said_files
from mobatlas import MobatlasError
from mobatlas.config import CityConfig, load_run
from mobatlas.data.city import write_city_folder
from mobatlas.training.checkpoints import START_OVER
from mobatlas.training.loop import Stopped

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


def spoilt(folder: Path, kind: str) -> Path:
    """A survey that is none."""
    folder.mkdir()
    people = pa.table({"user_id": ["a", "b"], "age": ["<30", "<30"], "weekday": [False, False]})
    path, visited = folder / "people.parquet", folder / "visits.parquet"
    pq.write_table(VISITS, visited)
    whole = visited.read_bytes()
    pq.write_table(people.set_column(2, "weekday", pa.array([True, False])), path)
    match kind:
        case "no visits":
            visited.unlink()
        case "cut visits":
            visited.write_bytes(whole[:-20])
        case "no arrival":
            pq.write_table(VISITS.drop_columns("arrival"), visited)
        case "no visit":
            pq.write_table(VISITS.slice(0, 0), visited)
        case "a word":
            words = pa.array(["morning"] * len(VISITS))
            pq.write_table(VISITS.set_column(4, "arrival", words), visited)
        case "a hole":
            visited.write_bytes(whole[:100] + b"\xff" * 20_000 + whole[20_100:])
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


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("nothing", r"people\.parquet: .*read"),
        ("nobody", r"people\.parquet: the table has no rows; give a labelled dataset"),
        ("no weekday", "--shift weekday: is true for nobody in"),
        ("no people", "has no people.parquet; give labelled people.parquet and visits.parquet"),
        ("no visits", "has no visits.parquet; give labelled people.parquet and visits.parquet"),
        ("cut visits", r"visits\.parquet: .*read"),
        ("no arrival", r"visits\.parquet: column 'arrival' is missing"),
        ("no visit", r"visits\.parquet: the table has no rows"),
        (
            "a hole",
            r"--data .*data: people.parquet or visits.parquet cannot be read .*; write them anew",
        ),
        ("a word", r"arrival"),
        ("a file", "is a file; give its folder"),
        ("elsewhere", "does not exist; give a folder of labelled people"),
    ],
)
@pytest.mark.parametrize(
    "benchmark", [run, lambda data, out: prediction.run(out, data=data, generator=FAMILY)]
)
def test_what_is_no_survey_is_refused_and_leaves_nothing(
    tmp_path: Path, benchmark: Callable[[Path, Path], Any], kind: str, sentence: str
) -> None:
    with pytest.raises(MobatlasError, match=sentence):
        benchmark(spoilt(tmp_path / "data", kind), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("asked", "sentence"),
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
        ({"census": Path("nowhere.csv")}, "--census nowhere.csv: is no file"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_prepared(
    city: Path, tmp_path: Path, asked: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(MobatlasError, match=sentence):
        run(city, tmp_path / "out", 1, **asked)
    assert not (tmp_path / "out").exists()


def test_a_folder_apart_from_the_survey_is_filled(city: Path, tmp_path: Path) -> None:
    with pytest.raises(MobatlasError, match="overlaps with the source"):
        divided_people(city, city / "out")
    (tmp_path / "file").write_text("mine")
    with pytest.raises(MobatlasError, match=r"--out .*file: is a file; give a folder to fill"):
        divided_people(city, tmp_path / "file")
    assert not (city / "out").exists() and (tmp_path / "file").read_text() == "mine"


def test_results_name_files_without_the_way_to_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    survey = tmp_path / "survey"
    survey.mkdir()
    monkeypatch.chdir(survey)
    assert said_files(Path(), Path("census.csv")) == ("survey", "survey/census.csv")
    assert (
        said_files(survey, tmp_path / "census.csv") == ("survey", "census.csv")
        and said_files(survey, None)[1] is None
    )


def test_a_folder_goes_on_with_the_people_it_was_begun_with(city: Path, tmp_path: Path) -> None:
    prepared = load_run(preset="small").prepare.model_dump()
    first = divided_people(city, tmp_path / "out", prepared=prepared)
    assert divided_people(city, tmp_path / "out", prepared=prepared) == first
    shutil.copytree(city, tmp_path / "half")
    people = pq.read_table(tmp_path / "half" / "people.parquet")
    pq.write_table(people.slice(0, people.num_rows // 2), tmp_path / "half" / "people.parquet")
    with pytest.raises(
        MobatlasError,
        match=r"out: was begun with other people than --data .*half; choose another --out",
    ):
        divided_people(tmp_path / "half", tmp_path / "out", prepared=prepared)


def test_benchmarks_point_at_no_option_that_they_do_not_have() -> None:
    with (
        pytest.raises(Stopped, match=r"stopped at step 3; the same command goes on$") as stopped,
        in_one_folder(),
    ):
        raise Stopped("stopped at step 3", [int(signal.SIGTERM)])
    assert stopped.value.signal == signal.SIGTERM
    with (
        pytest.raises(
            MobatlasError, match=r"model: is of another configuration; choose another --out$"
        ),
        in_one_folder(),
    ):
        raise MobatlasError(f"model: is of another configuration; {START_OVER}")
