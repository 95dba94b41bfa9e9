"""The small input files of the cases, derived from a simulated city without code of the package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml

ANCHORS = ["home_lat", "home_lon", "work_lat", "work_lon"]
WINDOW_DAYS = 3
READER_PEOPLE = 60
TRAINING = {"steps": 20, "batch": 32, "warmup": 2}
RUN: dict[str, Any] = {
    "title": "A tiny city",
    "seed": 3,
    "preset": "small",
    "simulate": {"users": 240, "pois": 24, "districts": 4, "days": 15},
    "prepare": {"split": {"train": 0.6, "val": 0.1, "test": 0.3}},  # an audit needs test people
    "train": {
        "generator": "autoregressive",
        "options": {
            "length": 12,
            "network": {"depth": 1, "width": 16, "heads": 2, "embedding": 8},
            "training": TRAINING,
        },
    },
    "supervise": {
        "options": {
            "teaching": {"steps": 4, "warmup": 1},
            "calibration": {"pool": 64, "candidates": 4},
        }
    },
    "samples": {"each": 20},
    "audit": True,
    "regions": {"hot16": {"partition": "hot16"}, "districts": {"by": "home_district"}},
}


def write_inputs(city: Path, folder: Path) -> None:
    """Write every input file of the cases into `folder`, from the tables of a simulated city."""
    folder.mkdir(parents=True)
    visits, people, pois = (
        pd.read_parquet(city / f"{name}.parquet") for name in ("visits", "people", "pois")
    )
    people["group"] = people["age"] + ", " + people["gender"]
    _write_published(folder, visits, people)
    _write_anchors(folder, people)
    _write_pool(folder, people, pois)
    _write_configurations(folder, city)
    few = visits[visits["user_id"].isin(people["user_id"][:READER_PEOPLE])].reset_index(drop=True)
    few_people = people[:READER_PEOPLE]
    _write_plain(folder / "plain", few, few_people)
    _write_embee(folder / "embee", few, few_people)
    _write_veraset(folder / "veraset", few)
    _write_foursquare(folder / "foursquare", few)
    _write_tist(folder / "tist", few)
    _write_yjmob(folder / "yjmob", few)
    _write_geolife(folder / "geolife", few)


def _write_published(folder: Path, visits: pd.DataFrame, people: pd.DataFrame) -> None:
    """The composition by region in three layouts, and the aggregates."""
    counted = people.groupby(["home_district", "group"]).size().unstack(fill_value=0) * 10 + 1
    census = counted.rename_axis("region").reset_index().melt("region", value_name="count")
    census.to_csv(folder / "census.csv", index=False)
    shares = counted.div(counted.sum(axis=1), axis=0).rename_axis("region").reset_index()
    shares.melt("region", value_name="share").to_csv(folder / "partition.csv", index=False)
    ages = pd.Series(np.where(np.arange(len(people)) % 2, "<35", "35+"), name="age")
    straddling = people.groupby(["home_district", ages, "gender"]).size().rename("count")
    straddling.rename_axis(["region", "age", "gender"]).reset_index().to_csv(
        folder / "ages.csv", index=False
    )
    known = visits[~visits["is_home"] & ~visits["is_work"]].merge(people, on="user_id")
    observed = people.groupby("home_district").size()
    windows = visits["arrival"].dt.normalize().nunique() / WINDOW_DAYS
    table = known.groupby(["home_district", "category"]).size().rename("visits").reset_index()
    table["n"] = table["home_district"].map(observed)
    table["value"] = (table["visits"] / table["n"] / windows).round(6)
    table["feature"] = "category:" + table["category"]
    table = table.rename(columns={"home_district": "region"})
    table[["region", "feature", "value", "n"]].to_csv(folder / "aggregates.csv", index=False)


def _write_anchors(folder: Path, people: pd.DataFrame) -> None:
    homes = people[ANCHORS][:12].copy()
    homes.loc[4, ["work_lat", "work_lon"]] = None
    homes.to_csv(folder / "anchors.csv", index=False)
    people[[*ANCHORS, "group"]][:24].to_csv(folder / "homes.csv", index=False)


def _write_pool(folder: Path, people: pd.DataFrame, pois: pd.DataFrame) -> None:
    rng = np.random.default_rng(5)
    rows = []
    for number in range(600):
        anchors = people[ANCHORS].iloc[number % len(people)].tolist()
        stops = rng.choice(pois["poi_id"], rng.integers(1, 6))
        rows += [(number, place, *anchors) for place in ("HOME", *stops, "WORK", "HOME")]
    pool = pd.DataFrame(rows, columns=["trajectory", "poi_id", *ANCHORS])
    pool.to_parquet(folder / "pool.parquet")


def _write_configurations(folder: Path, city: Path) -> None:
    (folder / "run.yaml").write_text(yaml.safe_dump(RUN))
    (folder / "unlabelled").mkdir()
    people = pd.read_parquet(city / "people.parquet").drop(columns=["age", "gender"])
    people.to_parquet(folder / "unlabelled" / "people.parquet")
    for name in ("visits", "pois"):
        table = pd.read_parquet(city / f"{name}.parquet")
        table.to_parquet(folder / "unlabelled" / f"{name}.parquet")
    published = {"composition": "census.csv", "aggregates": "aggregates.csv"}
    rest = {key: value for key, value in RUN.items() if key not in ("simulate", "audit")}
    unlabelled = rest | {"source": {"path": "unlabelled"}, "regions": {"census": published}}
    (folder / "unlabelled.yaml").write_text(yaml.safe_dump(unlabelled))


# ---- one folder for each reader


def _write_plain(folder: Path, visits: pd.DataFrame, people: pd.DataFrame) -> None:
    """Check-ins: CSV without departures, flags or given anchors."""
    folder.mkdir()
    visits.drop(columns=["departure", "is_home", "is_work"]).to_csv(
        folder / "visits.csv", index=False
    )
    people.drop(columns=[*ANCHORS, "group"]).to_csv(folder / "people.csv", index=False)


def _write_embee(folder: Path, visits: pd.DataFrame, people: pd.DataFrame) -> None:
    folder.mkdir()
    names = {"user_id": "panelist_id", "arrival": "arrival_ts", "departure": "departure_ts"}
    table = visits.rename(columns={**names, "lat": "latitude", "lon": "longitude"})
    anchor = table["is_home"] | table["is_work"]
    table["poi_raw_id"] = table["poi_id"].where(~anchor)
    table["location_name"] = table["category"].where(~anchor)
    flags = table[["is_home", "is_work"]].astype(int)
    table.drop(columns="poi_id").assign(**flags).to_csv(folder / "traj.csv", index=False)
    survey = people.drop(columns=["group", "home_district"])
    survey = survey.rename(columns={"user_id": "panelist_id"})
    survey["age"] = 18 + np.arange(len(survey)) % 60
    survey.to_csv(folder / "demo.csv", index=False)


def _write_veraset(folder: Path, visits: pd.DataFrame) -> None:
    folder.mkdir()
    anchor = np.select([visits["is_home"], visits["is_work"]], ["home", "work"], "")
    table = pd.DataFrame({"CAID": visits["user_id"]})
    table["LOCAL_TIMESTAMP"] = visits["arrival"].dt.strftime("%Y-%m-%dT%H:%M:%S-05:00")
    table["MINIMUM_DWELL"] = (visits["departure"] - visits["arrival"]).dt.seconds / 60
    table["LOCATION_NAME"] = np.where(anchor == "", visits["category"], anchor)
    table["TOP_CATEGORY"] = visits["category"].where(anchor == "")
    cells = np.array(["dq8vt", "dq8vv", "dq8vy", "dq8vw"])
    table["GEOHASH_5"] = cells[(visits["lat"] * 1e4).astype(int) % len(cells)]
    table["CENSUS_BLOCK_GROUP"] = 510870000001 + visits.index % 7
    table["SAFEGRAPH_PLACE_ID"] = np.where(anchor == "", "sg:" + visits["poi_id"], anchor)
    table["PLACEKEY"] = visits["poi_id"].where(anchor == "")
    table.to_csv(folder / "visits.csv.gz", index=False)


def _write_foursquare(folder: Path, visits: pd.DataFrame) -> None:
    folder.mkdir()
    utc = (visits["arrival"] + pd.Timedelta(hours=4)).dt.strftime("%a %b %d %H:%M:%S +0000 %Y")
    columns = ["user_id", "poi_id", "category", "category", "lat", "lon"]
    table = visits[columns].set_axis(list("abcdef"), axis=1).assign(g=-240, h=utc)
    path = folder / "dataset_TSMC2014_NYC.txt"
    table.to_csv(path, sep="\t", header=False, index=False)


def _write_tist(folder: Path, visits: pd.DataFrame) -> None:
    folder.mkdir()
    utc = visits["arrival"].dt.strftime("%a %b %d %H:%M:%S +0000 %Y")
    checkins = visits[["user_id", "poi_id"]].assign(utc=utc, offset=-240)
    path = folder / "dataset_TIST2015_Checkins.txt"
    checkins.to_csv(path, sep="\t", header=False, index=False)
    pois = visits.drop_duplicates("poi_id")[["poi_id", "lat", "lon", "category"]]
    pois = pois.assign(country=np.where(np.arange(len(pois)) % 5, "US", "CA"))
    path = folder / "dataset_TIST2015_POIs.txt"
    pois.to_csv(path, sep="\t", header=False, index=False)


def _write_yjmob(folder: Path, visits: pd.DataFrame) -> None:
    folder.mkdir()
    arrival = visits["arrival"]
    table = pd.DataFrame({"uid": visits["user_id"].str[1:].astype(int)})
    table["d"] = (arrival - arrival.min()).dt.days
    table["t"] = arrival.dt.hour * 2 + arrival.dt.minute // 30
    table["x"] = ((visits["lon"] + 77.8) * 200).astype(int).clip(1, 200)
    table["y"] = ((visits["lat"] - 37.2) * 200).astype(int).clip(1, 200)
    path = folder / "yjmob100k-dataset1.csv.gz"
    table.sort_values(["uid", "d", "t"]).to_csv(path, index=False)
    cells = table[["x", "y"]].drop_duplicates()
    cells = cells.assign(POIcategory=cells["x"] % 9 + 1, POI_count=cells["y"] % 4 + 1)
    cells.to_csv(folder / "cell_POIcat.csv", index=False)


def _write_geolife(folder: Path, visits: pd.DataFrame) -> None:
    """Two points for each stay."""
    header = "Geolife trajectory\r\nWGS 84\r\nAltitude is in Feet\r\nReserved 3\r\n0,2\r\n0\r\n"
    for number, (_, own) in enumerate(visits.groupby("user_id")):
        if number == 8:
            break
        tracks = folder / "Data" / f"{number:03d}" / "Trajectory"
        tracks.mkdir(parents=True)
        lines = [
            f"{row['lat']},{row['lon']},0,492,39744.1,{row[time]:%Y-%m-%d,%H:%M:%S}\r\n"
            for row in own.to_dict("records")
            for time in ("arrival", "departure")
        ]
        (tracks / "20240304000000.plt").write_text(header + "".join(lines))
