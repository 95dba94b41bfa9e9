"""Files of a simulated city: equal for equal seeds; bad configurations are refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from mobatlas.config import CityConfig
from mobatlas.data.city import simulate, write_city_folder
from mobatlas.data.city import simulation as city_module
from mobatlas.errors import MobatlasError


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_the_same_seed_gives_the_same_bytes_and_another_seed_does_not(tmp_path: Path) -> None:
    config = CityConfig(users=300)
    for name, seed in (("a", 7), ("b", 7), ("c", 8)):
        write_city_folder(tmp_path / name, config, seed)
    first, again, other = (files(tmp_path / name) for name in "abc")
    tables = {"visits.parquet", "people.parquet", "pois.parquet"}
    assert set(first) == {*tables, "manifest.json"}
    assert first == again
    assert all(first[name] != other[name] for name in first)


def test_written_and_in_memory_tables_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(city_module, "CHUNK_PEOPLE", 300)
    config = CityConfig(users=1_000, days=9)
    people_done: list[int] = []

    class Steps:
        def step(self, done: float, note: str = "") -> None:
            people_done.append(int(done))

    facts = write_city_folder(tmp_path / "city", config, 2, tracker=Steps())
    assert people_done == [300, 600, 900, 1_000]
    city = simulate(config, 2)
    for name in ("visits", "people", "pois"):
        assert pq.read_table(tmp_path / "city" / f"{name}.parquet").equals(getattr(city, name))
    assert facts["visits"] == city.visits.num_rows


def test_tables_that_are_not_cached_give_the_same_visits(monkeypatch: pytest.MonkeyPatch) -> None:
    config = CityConfig(users=500, days=7)
    cached = simulate(config, 1).visits
    monkeypatch.setattr("mobatlas.data.city.simulation.Tables.CACHE_BYTES", 0)
    assert simulate(config, 1).visits.equals(cached)


def test_a_city_folder_has_a_manifest_and_is_not_overwritten_unasked(tmp_path: Path) -> None:
    config = CityConfig(users=50, days=3)
    facts = write_city_folder(tmp_path / "city", config, 0)
    assert pq.read_metadata(tmp_path / "city" / "visits.parquet").num_rows == facts["visits"]
    assert (tmp_path / "city" / "manifest.json").is_file()
    with pytest.raises(MobatlasError, match="overwrite"):
        write_city_folder(tmp_path / "city", config, 0)


@pytest.mark.parametrize(
    "options",
    [
        {"users": 1},
        {"users": 5, "districts": 300},
        {"days": 1},
        {"pois": 12},
        {"dropout": 0.99},
        {"activity": 5},
        {"activity": 0.001, "dropout": 0},
        {"segregation": 10, "districts": 2},
    ],
)
def test_extreme_cities_work(options: dict[str, Any]) -> None:
    city = simulate(CityConfig(**({"users": 200} | options)), 0)
    assert city.people.num_rows == options.get("users", 200)
    assert city.visits.schema == city_module.VISITS_SCHEMA
    assert city.visits.num_rows > 0
    assert all(city.visits[name].null_count == 0 for name in city.visits.column_names)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"attributes": {"age": ("under 30, student", "30+")}}, "comma"),
        ({"attributes": {"age": ("x", "x")}}, "each only once"),
        ({"attributes": {}}, "at least one attribute"),
        ({"attributes": {"home_district": ("x", "y")}}, "already a column"),
        ({"pois": 12, "divergence": 0.89}, "cannot be reached with 12 POIs"),
        ({"attributes": {f"a{i}": ("0", "1") for i in range(13)}}, "too many together"),
    ],
)
def test_bad_cities_are_refused_in_one_sentence(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(MobatlasError, match=sentence):
        simulate(CityConfig(**({"users": 20} | options)), 0)


def test_a_negative_seed_is_refused() -> None:
    with pytest.raises(MobatlasError, match="seed"):
        simulate(CityConfig(users=1), -1)


@pytest.mark.slow
def test_ten_million_visits_are_written_in_bounded_memory(tmp_path: Path) -> None:
    program = (
        "import resource, sys; from pathlib import Path; from mobatlas.config import CityConfig; "
        "from mobatlas.data.city import write_city_folder; "
        "facts = write_city_folder(Path(sys.argv[1]), CityConfig(users=155_000), 0); "
        "print(facts['visits'], resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    )
    run = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "city")],
        capture_output=True,
        text=True,
        check=True,
    )
    visits, peak = map(int, run.stdout.split())
    assert visits > 10_000_000
    assert peak * (1 if sys.platform == "darwin" else 1024) < 1.5e9
