from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from mobatlas.data.prepare.engine import Engine
from mobatlas.data.readers import READERS
from mobatlas.errors import MobatlasError
from tests.samples import (
    PLT_HEADER,
    TIST2015_CHECKINS,
    TSMC2014,
    YJMOB,
    rows,
    time,
    write_foursquare,
    write_geolife,
    write_tist2015,
    write_yjmob100k,
)


def test_new_york_check_ins_have_local_times(folder: Path, engine: Engine) -> None:
    source = READERS["foursquare"].open(write_foursquare(folder), engine, {})
    assert rows(engine, source.visits, "user_id") == [
        {
            "user_id": "470",
            "poi_id": "49bbd6c0f964a520f4531fe3",
            "lat": 40.719810,
            "lon": -74.002581,
            "category": "Arts & Crafts Store",
            "arrival": time("2012-04-03 14:00:09"),
        },
        {
            "user_id": "979",
            "poi_id": "4a43c0aef964a520c6a61fe3",
            "lat": 40.6,
            "lon": -74.04,
            "category": 'Café "Nero"',
            "arrival": time("2012-04-03 22:30:00"),
        },
    ]


def test_world_check_ins_are_joined_with_their_venues_and_filtered_by_country(
    folder: Path, engine: Engine
) -> None:
    source = READERS["foursquare"].open(write_tist2015(folder), engine, {})
    found = rows(engine, source.visits, "arrival")
    assert [(row["poi_id"], row["lat"], row["category"]) for row in found] == [
        ("v2", -23.5, "Bôteco"),
        ("lost", None, None),
        ("v1", 25.2, "Mall"),
    ]
    assert found[0]["arrival"] == time("2012-04-03 15:00:07")
    brazil = READERS["foursquare"].open(
        folder / "dataset_TIST2015_Checkins.txt", engine, {"country": "br"}
    )
    assert [row["user_id"] for row in rows(engine, brazil.visits)] == ["190571"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (TSMC2014 + "1\tv\n", r"NYC\.txt: line 3 has 2 columns, not 8"),
        (
            TSMC2014.replace("Wed Apr 04", "Wed the 4th"),
            r"NYC\.txt: line 2 has the time 'Wed the 4th",
        ),
        (TSMC2014.replace("40.6", "north"), r"NYC\.txt: line 2 has lat 'north', not a number"),
        ("a\tb\n", r"NYC\.txt: the first line has 2 tab-separated columns; check-ins have 8"),
    ],
)
def test_a_broken_line_of_check_ins_is_named(
    text: str, message: str, folder: Path, engine: Engine
) -> None:
    file = folder / "dataset_TSMC2014_NYC.txt"
    file.write_text(text, encoding="latin-1")
    with pytest.raises(MobatlasError, match=message):
        READERS["foursquare"].open(file, engine, {})


def test_check_ins_without_venues_and_two_cities_at_once_are_refused(
    folder: Path, engine: Engine
) -> None:
    (folder / "dataset_TIST2015_Checkins.txt").write_text(TIST2015_CHECKINS)
    with pytest.raises(MobatlasError, match=r"dataset_TIST2015_POIs\.txt"):
        READERS["foursquare"].open(folder, engine, {})
    write_foursquare(folder)
    with pytest.raises(
        MobatlasError,
        match=r"several files fit \(dataset_TIST2015_Checkins\.txt, dataset_TSMC",
    ):
        READERS["foursquare"].open(folder, engine, {})


def test_grid_records_become_half_hour_visits_to_cells(folder: Path, engine: Engine) -> None:
    source = READERS["yjmob100k"].open(write_yjmob100k(folder), engine, {})
    visits = rows(engine, source.visits, "user_id", "arrival")
    assert [(row["poi_id"], row["category"], row["arrival"]) for row in visits] == [
        ("77:135", "poi_4", time("2000-01-03 00:30:00")),  # a tie, and the smaller number wins
        ("100:100", "poi_7", time("2000-01-04 23:30:00")),
        ("101:100", None, time("2000-03-17 00:00:00")),
        (None, None, time("2000-03-17 00:30:00")),  # masked
    ]
    assert visits[1]["departure"] == time("2000-01-05 00:00:00")
    assert (visits[2]["lon"] - visits[1]["lon"]) * 111.195 == pytest.approx(
        0.5, rel=1e-5
    )  # 500 m between neighbours
    assert (visits[0]["lat"] - visits[1]["lat"]) * 111.195 == pytest.approx(17.5, rel=1e-5)
    assert visits[3]["lat"] is None and visits[3]["lon"] is None
    pois = rows(engine, source.pois, "poi_id")
    assert [(row["poi_id"], row["category"], row["n_poi"]) for row in pois] == [
        ("100:100", "poi_7", 2),
        ("77:135", "poi_4", 7),
    ]


def test_the_undisclosed_city_can_be_put_anywhere(folder: Path, engine: Engine) -> None:
    options = {"origin": [60, 25], "first_day": "2023-05-01"}
    source = READERS["yjmob100k"].open(write_yjmob100k(folder), engine, options)
    visits = rows(engine, source.visits, "user_id", "arrival")
    assert visits[1]["arrival"] == time("2023-05-02 23:30:00") and visits[1][
        "lat"
    ] == pytest.approx(60, abs=0.01)
    assert (visits[2]["lon"] - visits[1]["lon"]) * 111.195 == pytest.approx(
        1.0, rel=1e-5
    )  # half as long at 60 degrees


def test_several_datasets_or_broken_records_of_the_grid_are_refused(
    folder: Path, engine: Engine
) -> None:
    write_yjmob100k(folder)
    second = folder / "yjmob100k-dataset2.csv"
    second.write_text(YJMOB + "1,x,0,3,4\n")
    with pytest.raises(
        MobatlasError, match=r"yjmob100k-dataset1\.csv\.gz, yjmob100k-dataset2\.csv\)"
    ):
        READERS["yjmob100k"].open(folder, engine, {})
    with pytest.raises(
        MobatlasError, match=r"dataset2\.csv: line 6 is not uid,d,t,x,y in whole numbers"
    ):
        READERS["yjmob100k"].open(second, engine, {})
    second.write_text("uid,d,t,x\n1,2,3,4\n")
    with pytest.raises(MobatlasError, match=r"dataset2\.csv: column 'y' is missing"):
        READERS["yjmob100k"].open(second, engine, {})


def test_gps_tracks_become_stays_at_shared_places_in_local_time(
    folder: Path, engine: Engine
) -> None:
    source = READERS["geolife"].open(write_geolife(folder), engine, {})
    visits = rows(engine, source.visits, "user_id", "arrival")
    assert [
        (row["user_id"], row["poi_id"], row["arrival"], row["departure"]) for row in visits
    ] == [
        ("000", "place:0", time("2008-10-23 10:00:00"), time("2008-10-23 10:30:00")),
        ("000", "place:1", time("2008-10-23 23:00:00"), time("2008-10-24 00:30:00")),
        ("001", "place:0", time("2008-10-23 10:00:00"), time("2008-10-23 10:45:00")),
    ]
    assert visits[0]["lat"] == visits[2]["lat"] == pytest.approx((40.0001 + 40.0005) / 2)
    assert any(
        note.startswith("2 GPS points left out") for note in source.notes
    )  # latitude 400, and the cut last line


def test_tracks_without_a_stay_and_files_that_are_no_tracks_are_refused(
    folder: Path, engine: Engine
) -> None:
    with pytest.raises(
        MobatlasError, match="no stay of 500 minutes within 200 m in the tracks of 2 people"
    ):
        READERS["geolife"].open(write_geolife(folder), engine, {"stay_minutes": 500})
    for line in (b"a,b,0,1,2,3,4\n", b"40,116,0,492,39744\x80-10-23,02:45:00\n"):
        (folder / "Data" / "000" / "Trajectory" / "bad.plt").write_bytes(PLT_HEADER.encode() + line)
        with pytest.raises(MobatlasError, match=r"bad\.plt: this is not a GeoLife track"):
            READERS["geolife"].open(folder, engine, {})


def test_real_geolife_tracks_become_believable_stays(data_folder: Path, engine: Engine) -> None:
    source = READERS["geolife"].open(data_folder / "geolife", engine, {})
    visits = rows(engine, source.visits, "user_id", "arrival")
    assert len({row["user_id"] for row in visits}) > 5 and len(visits) > 100
    for before, after in pairwise(visits):
        assert (before["departure"] - before["arrival"]).total_seconds() >= 20 * 60
        if before["user_id"] == after["user_id"]:
            assert before["departure"] <= after["arrival"]
    beijing = sum(39 < row["lat"] < 41 and 115 < row["lon"] < 118 for row in visits)
    assert beijing > len(visits) / 2
