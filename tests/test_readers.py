from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mobatlas import prepare
from mobatlas.config import PrepareConfig, build
from mobatlas.data.prepare.engine import Engine, SparkEngine
from mobatlas.data.readers import READERS
from mobatlas.data.readers.base import NoOptions, Reader, Source, open_table
from mobatlas.data.readers.veraset import geohash_centre
from mobatlas.data.types import VISITS, VISITS_REQUIRED
from mobatlas.errors import MobatlasError
from tests.samples import EMBEE_VISITS, SAMPLES, rows, time, write_embee, write_veraset


@pytest.mark.parametrize("name", READERS)
def test_every_reader_gives_the_canonical_columns(name: str, folder: Path, engine: Engine) -> None:
    reader = READERS[name]
    source = reader.open(SAMPLES[name](folder), engine, {})
    assert set(VISITS_REQUIRED) <= set(source.visits.columns) <= set(VISITS)
    assert engine.collect(source.visits).num_rows > 0
    assert source.people is None or "user_id" in source.people.columns
    assert source.pois is None or {"poi_id", "lat", "lon"} <= set(source.pois.columns)
    build(PrepareConfig, reader.suggests, name)


@pytest.mark.parametrize("name", READERS)
def test_every_reader_refuses_an_empty_folder_and_a_missing_path_by_name(
    name: str, folder: Path, engine: Engine
) -> None:
    with pytest.raises(MobatlasError, match="it's a source: the folder contains no"):
        READERS[name].open(folder, engine, {})
    with pytest.raises(MobatlasError, match=r"nowhere: no such file"):
        READERS[name].open(folder / "nowhere", engine, {})
    with pytest.raises(MobatlasError, match=f"'{name}': unknown key 'colour'"):
        READERS[name].open(folder, engine, {"colour": 1})


def check_embee(source: Source, engine: Engine) -> None:
    visits = rows(engine, source.visits, "user_id", "arrival")
    assert [row["poi_id"] for row in visits] == [
        "771",
        None,
        None,
        "bob's, grill@375407,-774360",
        None,
    ]
    assert [(row["is_home"], row["is_work"]) for row in visits] == [
        (False, False),
        (True, False),
        (False, True),
        (False, False),
        (False, False),
    ]
    assert visits[0] | {
        "arrival": str(visits[0]["arrival"]),
        "departure": str(visits[0]["departure"]),
    } == {
        "user_id": "p1",
        "poi_id": "771",
        "lat": "37.5407",
        "lon": "-77.4360",
        "category": "Coffee",
        "arrival": "2021-03-01 08:00:00",
        "departure": "2021-03-01 09:30:00",
        "is_home": False,
        "is_work": False,
    }
    people = rows(engine, source.people, "user_id")
    assert [row["age"] for row in people] == ["<30", "30-40", "40-50", ">50", ">50", None]
    assert [row["gender"] for row in people] == ["F", "M", "M", "F", "Non-binary", None]
    assert (
        people[0]["home_lat"] == "37.55"
        and people[1]["work_lon"] is None
        and people[0]["income"] == "50k"
    )


def test_the_panel_is_read_with_its_survey(folder: Path, engine: Engine) -> None:
    check_embee(READERS["embee"].open(write_embee(folder), engine, {}), engine)


def test_the_panel_is_read_from_parquet_by_other_names_in_any_case(
    folder: Path, engine: Engine
) -> None:
    table = {
        "User_ID": [7, 7],
        "LAT": [1.00004, float("nan")],
        "lng": [2.0, 2.0],
        "Arrival": pa.array([0, 1], pa.timestamp("s")),
        "POI_name": ["Zoo", "Zoo"],
        "home_flag": [None, True],
        "is_poi": [True, False],
    }
    pq.write_table(pa.table(table), folder / "visits.parquet")
    pq.write_table(
        pa.table({"user_id": [7, 8], "Sex": ["M", None], "age": [49.9, None]}),
        folder / "people.parquet",
    )
    source = READERS["embee"].open(folder, engine, {"age_edges": [18, 65]})
    visits = rows(engine, source.visits, "arrival")
    assert [(row["poi_id"], row["is_home"]) for row in visits] == [
        ("zoo@10000,20000", False),
        (None, True),
    ]
    people = [
        {"user_id": 7, "age": "18-65", "gender": "M"},
        {"user_id": 8, "age": None, "gender": None},
    ]
    assert rows(engine, source.people, "user_id") == people


def test_a_column_of_the_panel_can_be_named_and_a_missing_one_is_refused(
    folder: Path, engine: Engine
) -> None:
    write_embee(folder)
    (folder / "traj.csv").write_text(EMBEE_VISITS.replace("arrival_ts", "began"))
    with pytest.raises(
        MobatlasError, match=r"traj\.csv: column 'arrival_ts' is missing.*columns\.arrival"
    ):
        READERS["embee"].open(folder, engine, {})
    check_embee(READERS["embee"].open(folder, engine, {"columns": {"arrival": "began"}}), engine)
    with pytest.raises(MobatlasError, match="'arival' is not a field; did you mean 'arrival'"):
        READERS["embee"].open(folder, engine, {"columns": {"arival": "began"}})


def check_veraset(source: Source, engine: Engine) -> None:
    visits = rows(engine, source.visits, "user_id", "arrival", "poi_id")
    brief = [
        (row["poi_id"], str(row["arrival"]), str(row["departure"]), row["is_home"], row["is_work"])
        for row in visits
    ]
    assert brief[:3] == [
        ("222-222@abc", "2020-01-01 08:00:00", "2020-01-01 08:30:00", False, False),
        (
            "223-222@abc",
            "2020-01-01 09:00:00",
            "2020-01-01 09:05:00",
            False,
            False,
        ),  # a shop that is called Home
        (None, "2020-01-01 10:00:00", "2020-01-01 20:00:30", True, False),
    ]
    assert sorted(row["is_work"] for row in visits) == [False] * 8 + [True]
    assert {row["poi_id"]: row["category"] for row in visits} == {
        "222-222@abc": "Restaurants",
        "223-222@abc": None,
        "224-222@abc": "4451",
        None: None,
    }
    assert (visits[0]["lat"], visits[0]["lon"]) == pytest.approx((42.605, -5.603), abs=1e-3)
    assert rows(engine, source.people, "user_id") == [
        {"user_id": "dev1", "home_cbg": "060750101001"},
        {"user_id": "dev2", "home_cbg": "060750000001"},
    ]
    assert any("2.4 km" in note for note in source.notes)


def test_veraset_visits_are_read_from_a_folder_of_csv_files(folder: Path, engine: Engine) -> None:
    check_veraset(READERS["veraset"].open(write_veraset(folder), engine, {}), engine)


def test_veraset_takes_coordinates_from_a_places_table_where_it_knows_the_place(
    folder: Path, engine: Engine
) -> None:
    pq.write_table(
        pa.table(
            {
                "caid": ["d", "d"],
                "local_timestamp": pa.array([0, 3_600_000_000], pa.timestamp("us", "UTC")),
                "minimum_dwell": [10, None],
                "placekey": ["k1", "k2"],
                "naics_code": [722515, 445110],
                "geohash_5": ["9q8yy", "9q8yy"],
            }
        ),
        folder / "part-0.parquet",
    )
    places = folder.parent / "places.csv"
    places.write_text("PLACEKEY,LATITUDE,LONGITUDE\nk1,10.5,20.5\n")
    source = READERS["veraset"].open(folder, engine, {"places": str(places), "naics_digits": 2})
    first, second = rows(engine, source.visits, "poi_id")
    assert (first["lat"], first["lon"], first["category"]) == (10.5, 20.5, "72")
    assert (first["arrival"], first["departure"]) == (
        time("1970-01-01 00:00:00"),
        time("1970-01-01 00:10:00"),
    )
    assert second["lat"] == pytest.approx(37.77, abs=0.03) and second["departure"] is None


def test_veraset_without_any_coordinates_asks_for_places(folder: Path, engine: Engine) -> None:
    (folder / "v.csv").write_text("CAID,LOCAL_TIMESTAMP,PLACEKEY\nd,0,k\n")
    with pytest.raises(MobatlasError, match="option places"):
        READERS["veraset"].open(folder, engine, {})
    (folder / "v.csv").write_text("CAID,PLACEKEY\nd,k\n")
    with pytest.raises(MobatlasError, match="column 'local_timestamp' is missing"):
        READERS["veraset"].open(folder, engine, {})


def test_a_geohash_is_the_middle_of_its_cell() -> None:
    assert geohash_centre("ezs42") == pytest.approx((42.60498, -5.60303), abs=1e-5)
    assert geohash_centre("u4pruydqqvj") == pytest.approx((57.64911, 10.40744), abs=1e-5)
    assert geohash_centre("aaaa") is None and geohash_centre("") is None


@pytest.mark.spark
def test_spark_reads_the_panel_and_veraset_as_duckdb_does(
    tmp_path: Path, spark_session: Any
) -> None:
    spark = SparkEngine(tmp_path / "work")
    for name, check in (("embee", check_embee), ("veraset", check_veraset)):
        (tmp_path / name).mkdir()
        check(READERS[name].open(SAMPLES[name](tmp_path / name), spark, {}), spark)


def test_a_reader_can_be_added_from_outside_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(path: Path, engine: Engine, options: NoOptions) -> Source:
        table = open_table(path, engine)
        return Source(where=str(path), visits=table.rename(user_id="who", poi_id="place"))

    monkeypatch.setitem(READERS, "diary", READERS["plain"])  # restored after the test
    del READERS["diary"]
    suggests = {"quality": {"min_coverage": 0.0}, "anchors": {"require_both": False}}
    READERS.register("diary", Reader("diary", "a diary of visits", read, suggests=suggests))
    rows = ["who,place,lat,lon,arrival"]
    rows += [f"ann,{place},37.5,-77.4,2024-03-0{day} 12:00:00" for day in (4, 5) for place in "ab"]
    (tmp_path / "diary.csv").write_text("\n".join(rows))
    values = {"window": {"days": 2, "stride": 2}, "quality": {"min_tokens": 1}}
    summary = prepare(tmp_path / "diary.csv", tmp_path / "dataset", format="diary", values=values)
    assert summary.windows.kept == 1
    with pytest.raises(MobatlasError, match="--format diarry does not exist; did you mean 'diary'"):
        prepare(tmp_path / "diary.csv", tmp_path / "other", format="diarry")
