"""`geolife`: the GPS logs of GeoLife (Zheng et al. 2010) as published, turned into stays and the stays into places.

Times are GMT in the files; one offset makes them local, so that the few trips outside China keep Beijing time.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pacsv
import pyarrow.parquet as pq
from pydantic import Field

from mobatlas.config import Section
from mobatlas.data.prepare.engine import Engine
from mobatlas.data.readers.base import Reader, Source
from mobatlas.data.readers.plain import require_path
from mobatlas.data.readers.stays import Floats, Stays, cluster_places, detect_stays, place_centres
from mobatlas.errors import MobatlasError

COLUMNS = ("lat", "lon", "zero", "feet", "days", "date", "time")
HEADER_LINES = 6


class GeolifeOptions(Section):
    """How points become stays and places."""

    utc_offset_hours: float = Field(8.0, ge=-12, le=14)  # Beijing
    stay_metres: float = Field(200.0, gt=0)
    stay_minutes: float = Field(20.0, gt=0)
    max_gap_minutes: float = Field(
        720.0, gt=0
    )  # a silent night at home is one stay, a silent day is not believed
    place_metres: float = Field(100.0, gt=0)
    place_min_stays: int = Field(
        1, ge=1
    )  # above 1, a stay that nobody repeats nearby is no POI, and is dropped


def read(path: Path, engine: Engine, options: GeolifeOptions) -> Source:
    people = _trajectory_folders(require_path(path))
    found: dict[str, Stays] = {}
    broken = 0
    for user, folder in people.items():
        lat, lon, seconds, dropped = read_points(folder)
        broken += dropped
        found[user] = detect_stays(
            lat,
            lon,
            seconds,
            options.stay_metres,
            options.stay_minutes * 60,
            options.max_gap_minutes * 60,
        )
    if not sum(map(len, found.values())):
        raise MobatlasError(
            f"{path}: no stay of {options.stay_minutes:g} minutes within {options.stay_metres:g} m in the tracks of "
            f"{len(people)} people; lower the reader options stay_minutes or raise stay_metres"
        )
    visits, pois = _tables(found, options)
    pq.write_table(visits, engine.work / "source_visits.parquet")
    pq.write_table(pois, engine.work / "source_pois.parquet")
    notes = [
        f"{visits.num_rows:,} stays at {pois.num_rows:,} places, from the tracks of {len(people):,} people"
    ]
    if broken:
        notes.append(
            f"{broken:,} GPS points left out: truncated lines, or coordinates outside the globe"
        )
    return Source(
        where=str(path),
        visits=engine.read(engine.work / "source_visits.parquet"),
        pois=engine.read(engine.work / "source_pois.parquet"),
        notes=tuple(notes),
    )


def _trajectory_folders(path: Path) -> dict[str, Path]:
    base = path / "Data" if (path / "Data").is_dir() else path
    folders = {
        folder.parent.name: folder
        for folder in sorted(base.glob("*/Trajectory"))
        if any(folder.glob("*.plt"))
    }
    if not folders:
        raise MobatlasError(
            f"{path}: holds no <person>/Trajectory/*.plt; give GeoLife's folder 'Data'"
        )
    return folders


def read_points(folder: Path) -> tuple[Floats, Floats, Floats, int]:
    """One person's points sorted by time (lat, lon, seconds since 1970 GMT), and how many lines were left out."""
    tables, truncated = [], 0
    for file in sorted(folder.glob("*.plt")):
        table, skipped = _read_file(file)
        tables.append(table)
        truncated += skipped
    points = pa.concat_tables(tables)
    lat = points["lat"].to_numpy()
    lon = points["lon"].to_numpy()
    seconds = points["seconds"].to_numpy()
    good = (np.abs(lat) <= 90) & (np.abs(lon) <= 180) & ~np.isnan(seconds)
    order = np.argsort(seconds[good], kind="stable")
    return lat[good][order], lon[good][order], seconds[good][order], truncated + int((~good).sum())


def _read_file(file: Path) -> tuple[pa.Table, int]:
    skipped = 0

    def skip(row: pacsv.InvalidRow) -> str:
        nonlocal skipped
        skipped += 1
        return "skip"

    content = file.read_bytes()
    if not content.isascii():
        raise MobatlasError(
            f"{file}: not a GeoLife track (there are bytes in it that are no text); mend or remove it"
        )
    types = {"lat": pa.float64(), "lon": pa.float64(), "date": pa.string(), "time": pa.string()}
    try:
        table = pacsv.read_csv(
            pa.BufferReader(content),
            pacsv.ReadOptions(skip_rows=HEADER_LINES, column_names=COLUMNS, use_threads=False),
            pacsv.ParseOptions(invalid_row_handler=skip),
            pacsv.ConvertOptions(column_types=types, include_columns=list(types)),
        )
    except pa.ArrowInvalid as error:
        if "Empty CSV file" in str(error):
            return _points(pa.table({name: pa.array([], kind) for name, kind in types.items()})), 0
        raise MobatlasError(
            f"{file}: not a GeoLife track ({str(error).splitlines()[0]}); mend or remove it"
        ) from None
    return _points(table), skipped


def _points(table: pa.Table) -> pa.Table:
    clock = pc.binary_join_element_wise(table["date"], table["time"], " ")
    moment = pc.strptime(clock, format="%Y-%m-%d %H:%M:%S", unit="s", error_is_null=True)
    seconds = pc.cast(pc.cast(moment, pa.int64()), pa.float64())
    return pa.table({"lat": table["lat"], "lon": table["lon"], "seconds": seconds})


def _tables(found: dict[str, Stays], options: GeolifeOptions) -> tuple[pa.Table, pa.Table]:
    lat = np.concatenate([stays.lat for stays in found.values()])  # (stays,)
    lon = np.concatenate([stays.lon for stays in found.values()])
    labels = cluster_places(lat, lon, options.place_metres, options.place_min_stays)
    place_lat, place_lon = place_centres(lat, lon, labels)  # (places,)
    places = np.array([f"place:{label}" for label in range(len(place_lat))], dtype=object)
    placed = labels >= 0
    lat[placed], lon[placed] = place_lat[labels[placed]], place_lon[labels[placed]]
    ids = np.full(len(labels), None, dtype=object)
    ids[placed] = places[labels[placed]]
    users = np.repeat(list(found), [len(stays) for stays in found.values()])
    visits = {
        "user_id": users,
        "poi_id": pa.array(ids, pa.string()),
        "lat": lat,
        "lon": lon,
        "arrival": _local([stays.arrival for stays in found.values()], options.utc_offset_hours),
        "departure": _local(
            [stays.departure for stays in found.values()], options.utc_offset_hours
        ),
    }
    pois = {"poi_id": pa.array(places, pa.string()), "lat": place_lat, "lon": place_lon}
    return pa.table(visits), pa.table(pois)


def _local(seconds: list[Floats], offset_hours: float) -> pa.Array:
    local = np.concatenate(seconds) + offset_hours * 3600
    return pa.array(np.rint(local).astype("datetime64[s]")).cast(pa.timestamp("us"))


READER = Reader(
    name="geolife",
    description="GeoLife GPS tracks (.plt), by stay points and DBSCAN places",
    read=read,
    options=GeolifeOptions,
    # Loggers were switched on for trips: most of a day is unobserved, and few people show both a home and a workplace.
    suggests={"quality": {"min_coverage": 0.0}, "anchors": {"require_both": False}},
)
