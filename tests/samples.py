"""A few records of every source, in its exact published layout."""

from __future__ import annotations

import gzip
from datetime import datetime
from pathlib import Path
from typing import Any

from mobatlas.data.prepare.engine import Engine

Row = dict[str, Any]

EMBEE_VISITS = """\
panelist_id,arrival_ts,departure_ts,latitude,longitude,poi_raw_id,location_name,brand,category,distance,is_home,is_work
p1,2021-03-01 08:00:00,2021-03-01 09:30:00,37.5407,-77.4360,771,Corner Cafe,,Coffee,1.2,0,0
p1,2021-03-01 18:00:00,2021-03-04 07:00:00,37.5500,-77.4500,,,,,4.0,1,0
p1,2021-03-04 09:00:00,2021-03-04 17:00:00,37.5600,-77.4600,,,,,2.0,0,1
p2,2021-03-01 12:00:00,2021-03-01 12:40:00,37.54069,-77.43604,,"Bob's, Grill",Bob's,Food,0.3,0,0
p2,2021-03-01 13:00:00,2021-03-01 13:10:00,37.5000,-77.4000,,,,,0.3,0,0
"""
EMBEE_PEOPLE = """\
panelist_id,age,gender,income,home_lat,home_lon,work_lat,work_lon
p1,29,FEMALE,50k,37.55,-77.45,37.56,-77.46
p2,30,MALE,20k,37.51,-77.41,,
p3,40,male,20k,37.51,-77.41,,
p4,50,F,20k,37.51,-77.41,,
p5,>50,Non-binary,20k,37.51,-77.41,,
p6,999,,20k,37.51,-77.41,,
"""
VERASET_HEADER = (
    "UTC_TIMESTAMP,LOCAL_TIMESTAMP,ID_TYPE,CAID,LOCATION_NAME,TOP_CATEGORY,SUB_CATEGORY,"
    "GEOHASH_5,CENSUS_BLOCK_GROUP,NAICS_CODE,MINIMUM_DWELL,SAFEGRAPH_PLACE_ID,PLACEKEY\n"
)
VERASET_DAY1 = """\
1577894400,1577865600,aaid,dev1,Cafe,Restaurants,Snack Bars,ezs42,060371234001,722515,30,\
sg:1,222-222@abc
1577898000,2020-01-01T09:00:00-08:00,aaid,dev1,Home,,,9q8yy,,,5,sg:2,223-222@abc
1577898000,2020-01-01 10:00:00,aaid,dev1,home,,,9q8yy,60750101001,,600.5,home,
"""
VERASET_DAY2 = """\
1577984400,1577955600,aaid,dev1,home,,,9q8yy,060750101001,,60,home,
1577984400,1577955600,aaid,dev1,home,,,9q8yy,060750999001,,60,home,
1577984400,1577955600,aaid,dev2,Market,,,9q8yy,060750101002,445110,12,sg:3,224-222@abc
1577984400,1577955600,aaid,dev2,home,,,,060750000002,,10,home,
1577984400,1577955600,aaid,dev2,home,,,,060750000001,,10,home,
1577984400,1577955600,aaid,dev2,work,,,9q8yy,060750000003,,10,work,
"""
TSMC2014 = (
    "470\t49bbd6c0f964a520f4531fe3\t4bf58dd8d48988d127951735\tArts & Crafts Store\t"
    "40.719810\t-74.002581\t-240\t"
    "Tue Apr 03 18:00:09 +0000 2012\n"
    '979\t4a43c0aef964a520c6a61fe3\t4bf58dd8d48988d16d941735\tCaf\xe9 "Nero"\t40.6\t-74.04\t-240\t'
    "Wed Apr 04 02:30:00 +0000 2012\n"
)
TIST2015_CHECKINS = (
    "50756\tv1\tTue Apr 03 18:00:06 +0000 2012\t240\n"
    "190571\tv2\tTue Apr 03 18:00:07 +0000 2012\t-180\n"
    "221021\tlost\tTue Apr 03 18:00:08 +0000 2012\t0\n"
)
TIST2015_POIS = "v1\t25.2\t55.3\tMall\tAE\nv2\t-23.5\t-46.6\tB\xf4teco\tBR\n"
YJMOB = "uid,d,t,x,y\n0,0,1,77,135\n0,1,47,100,100\n1,74,0,101,100\n1,74,1,999,999\n"
YJMOB_CELLS = "x,y,POIcategory,POI_count\n77,135,12,3\n77,135,4,3\n77,135,80,1\n100,100,7,2\n"
PLT_HEADER = (
    "Geolife trajectory\r\nWGS 84\r\nAltitude is in Feet\r\nReserved 3\r\n"
    "0,2,255,My Track,0,0,2,8421376\r\n0\r\n"
)


def plt(*points: tuple[float, float, str]) -> str:
    return PLT_HEADER + "".join(
        f"{lat},{lon},0,492,39744.1,2008-10-23,{time}\r\n" for lat, lon, time in points
    )


def write_plain(folder: Path) -> Path:
    (folder / "visits.csv").write_text(
        "user_id,poi_id,lat,lon,arrival\nu,a,1,2,2020-01-01 08:00:00\n"
    )
    return folder


def write_embee(folder: Path) -> Path:
    (folder / "traj.csv").write_text(EMBEE_VISITS)
    (folder / "demo.csv").write_text(EMBEE_PEOPLE)
    return folder


def write_veraset(folder: Path) -> Path:
    for day, rows in (("2020-01-01", VERASET_DAY1), ("2020-01-02", VERASET_DAY2)):
        (folder / day).mkdir()
        (folder / day / "visits.csv.gz").write_bytes(
            gzip.compress((VERASET_HEADER + rows).encode())
        )
    return folder


def write_foursquare(folder: Path) -> Path:
    (folder / "dataset_TSMC2014_readme.txt").write_text("This dataset includes check-ins.\n")
    (folder / "dataset_TSMC2014_NYC.txt").write_text(TSMC2014, encoding="latin-1")
    return folder


def write_tist2015(folder: Path) -> Path:
    (folder / "dataset_TIST2015_Checkins.txt").write_text(TIST2015_CHECKINS)
    (folder / "dataset_TIST2015_POIs.txt").write_text(TIST2015_POIS, encoding="latin-1")
    return folder


def write_yjmob100k(folder: Path) -> Path:
    (folder / "yjmob100k-dataset1.csv.gz").write_bytes(gzip.compress(YJMOB.encode()))
    (folder / "cell_POIcat.csv").write_text(YJMOB_CELLS)
    return folder


def write_geolife(folder: Path) -> Path:
    tracks = folder / "Data" / "000" / "Trajectory"
    tracks.mkdir(parents=True)
    (tracks / "20081023020000.plt").write_text(
        plt(
            (40.0, 116.3, "02:00:00"),
            (400.166666666667, 116.3, "02:10:00"),
            (40.0002, 116.3, "02:30:00"),
        )
    )
    (tracks / "20081023150000.plt").write_text(
        plt((40.1, 116.3, "15:00:00"), (40.1, 116.3, "16:30:00")) + "40.2,116.3,0,49"
    )
    (tracks / "20081023170000.plt").write_text(PLT_HEADER)
    other = folder / "Data" / "001" / "Trajectory"
    other.mkdir(parents=True)
    (other / "20081023020000.plt").write_text(
        plt((40.0005, 116.3, "02:00:00"), (40.0005, 116.3, "02:45:00"))
    )
    return folder


SAMPLES = {
    "plain": write_plain,
    "embee": write_embee,
    "veraset": write_veraset,
    "foursquare": write_foursquare,
    "yjmob100k": write_yjmob100k,
    "geolife": write_geolife,
}


def rows(engine: Engine, table: Any, *order: str) -> list[Row]:
    found: list[Row] = engine.collect(table).to_pylist()
    return sorted(found, key=lambda row: [str(row[name]) for name in order])


def time(text: str) -> datetime:
    return datetime.fromisoformat(text)
