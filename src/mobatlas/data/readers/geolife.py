"""`geolife`: the GPS tracks of GeoLife (Zheng et al. 2010), turned into stays and places.

Stay-point detection follows Li et al. (2008), places are DBSCAN clusters (Ester et al. 1996). Times
are GMT in the files; one offset makes them local, so the few trips outside China keep Beijing time.
"""

from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pacsv
import pyarrow.parquet as pq
from pydantic import Field

from mobatlas.config import Section
from mobatlas.data.prepare.engine import Engine
from mobatlas.data.readers.base import Reader, Source
from mobatlas.data.types import EARTH_KM, Floats, Ints, haversine_km
from mobatlas.errors import MobatlasError

COLUMNS = ("lat", "lon", "zero", "feet", "days", "date", "time")
TYPES = {"lat": pa.float64(), "lon": pa.float64(), "date": pa.string(), "time": pa.string()}
HEADER_LINES = 6


class GeolifeOptions(Section):
    """How points become stays and places."""

    utc_offset_hours: float = Field(8.0, ge=-12, le=14)  # Beijing
    stay_metres: float = Field(200.0, gt=0)
    stay_minutes: float = Field(20.0, gt=0)
    max_gap_minutes: float = Field(720.0, gt=0)  # a night at home without signal is one stay
    place_metres: float = Field(100.0, gt=0)


def read(path: Path, engine: Engine, options: GeolifeOptions) -> Source:
    """Detect the stays of every person and cluster them into places."""
    folders = _trajectory_folders(path)
    by_person = {}
    skipped = 0
    for user, folder in folders.items():
        points, seconds, invalid_lines = _read_points(folder)
        skipped += invalid_lines
        by_person[user] = detect_stays(
            points,
            seconds,
            metres=options.stay_metres,
            min_seconds=options.stay_minutes * 60,
            max_gap=options.max_gap_minutes * 60,
        )
    stays = pd.concat(by_person, names=["user_id"]).reset_index("user_id")
    if stays.empty:
        raise MobatlasError(
            f"{path}: no stay of {options.stay_minutes:g} minutes within "
            f"{options.stay_metres:g} m in the tracks of {len(folders)} people; "
            "lower the reader option stay_minutes or raise stay_metres"
        )
    visits, pois = _tables(stays, options)
    tables = {}
    for name, table in (("visits", visits), ("pois", pois)):
        file = engine.work / f"source_{name}.parquet"
        pq.write_table(table, file)
        tables[name] = engine.read(file)
    notes = [
        f"{visits.num_rows:,} stays at {pois.num_rows:,} places, "
        f"from the tracks of {len(folders):,} people"
    ]
    if skipped:
        notes.append(
            f"{skipped:,} GPS points left out: truncated lines, or coordinates outside the globe"
        )
    return Source(where=str(path), notes=tuple(notes), **tables)


def detect_stays(
    points: Floats, seconds: Floats, metres: float, min_seconds: float, max_gap: float = np.inf
) -> pd.DataFrame:
    """Stays of one person whose points (points, 2) are sorted by time.

    From an anchor point the stay lasts while points are within `metres` of the anchor. It counts if
    its first and last point are at least `min_seconds` apart. The next anchor is then the point
    after the stay; otherwise it is the next point. A gap of up to `max_gap` seconds between two
    points near the anchor belongs to the stay, because loggers lose the signal indoors. A longer
    gap ends it, because the person may have been anywhere.

    Returns one row per stay: mean `lat` and `lon` of its points, `arrival` and `departure` in
    seconds, and the number of `points`.
    """
    n = len(seconds)
    gaps = np.flatnonzero(np.diff(seconds) > max_gap) + 1  # first points after a gap
    segment_end = np.append(gaps, n)[np.searchsorted(gaps, np.arange(n), side="right")]  # (points,)
    # (points,) the first point that makes a stay long enough
    enough = np.searchsorted(seconds, seconds + min_seconds)
    candidates = np.flatnonzero(enough < segment_end)
    # People on the move are dropped first, so that the loop visits few anchors.
    km = haversine_km(points[candidates], points[enough[candidates]])
    candidates = candidates[km * 1000 <= metres]

    bounds: list[tuple[int, int]] = []
    position = 0
    while position < len(candidates):
        start = int(candidates[position])
        stop = int(segment_end[start])
        end = _first_far_point(points[start:stop], int(enough[start]) + 1 - start, metres) + start
        position += 1
        if end > enough[start]:
            bounds.append((start, end))
            position = int(np.searchsorted(candidates, end))
    starts, ends = np.array(bounds, dtype=np.int64).reshape(-1, 2).T
    columns = {
        name: np.array([axis[start:end].mean() for start, end in bounds], np.float64)
        for name, axis in zip(("lat", "lon"), points.T, strict=True)
    }
    times = {"arrival": seconds[starts], "departure": seconds[ends - 1]}
    return pd.DataFrame({**columns, **times, "points": ends - starts})


def _first_far_point(points: Floats, look_until: int, metres: float) -> int:
    """The first point farther than `metres` from the first one, or the number of points."""
    begin = 1
    until = max(look_until, 2)
    while begin < len(points):
        far = haversine_km(points[0], points[begin:until]) * 1000 > metres
        if far.any():
            return begin + int(far.argmax())
        # Most stays have few points, but a day has tens of thousands: the step doubles.
        step = 2 * (until - begin)
        begin = until
        until += step
    return len(points)


def cluster_places(lat: Floats, lon: Floats, metres: float) -> Ints:
    """The place of each stay (stays,): stays chained by steps of at most `metres` share one.

    Places are numbered from 0.
    """
    # The import takes a second, and few commands need it.
    from sklearn.cluster import DBSCAN

    clusters = DBSCAN(
        eps=metres / (EARTH_KM * 1000),
        min_samples=1,
        metric="haversine",
        algorithm="ball_tree",
    )
    return np.asarray(clusters.fit_predict(np.radians(np.column_stack([lat, lon]))), dtype=np.int64)


def place_centres(lat: Floats, lon: Floats, labels: Ints) -> tuple[Floats, Floats]:
    """Mean coordinates of each place (places,)."""
    counts = np.bincount(labels)
    return np.bincount(labels, weights=lat) / counts, np.bincount(labels, weights=lon) / counts


def _trajectory_folders(path: Path) -> dict[str, Path]:
    base = path / "Data" if (path / "Data").is_dir() else path
    folders = {
        file.parent.parent.name: file.parent for file in sorted(base.glob("*/Trajectory/*.plt"))
    }
    if not folders:
        raise MobatlasError(
            f"{path}: the folder contains no <person>/Trajectory/*.plt; give GeoLife's folder "
            "'Data'"
        )
    return folders


def _read_points(folder: Path) -> tuple[Floats, Floats, int]:
    """One person's points (points, 2) by time, seconds since 1970 GMT, and lines left out."""
    tables, truncated = zip(*map(_read_file, sorted(folder.glob("*.plt"))), strict=True)
    table = pa.concat_tables(tables)
    clock = pc.binary_join_element_wise(table["date"], table["time"], " ")
    moment = pc.strptime(clock, format="%Y-%m-%d %H:%M:%S", unit="s", error_is_null=True)
    seconds = moment.cast(pa.int64()).cast(pa.float64()).to_numpy()
    points = np.column_stack([table["lat"].to_numpy(), table["lon"].to_numpy()])
    valid = (np.abs(points) <= [90, 180]).all(1) & ~np.isnan(seconds)
    order = np.flatnonzero(valid)[np.argsort(seconds[valid], kind="stable")]
    return points[order], seconds[order], sum(truncated) + int((~valid).sum())


def _read_file(file: Path) -> tuple[pa.Table, int]:
    """The points of one file, and how many truncated lines it has."""
    skipped: list[pacsv.InvalidRow] = []

    def skip(row: pacsv.InvalidRow) -> str:
        skipped.append(row)
        return "skip"

    content = file.read_bytes()
    if not content.isascii():
        raise MobatlasError(
            f"{file}: this is not a GeoLife track (it has bytes that are not text); correct or "
            "remove it"
        )
    try:
        table = pacsv.read_csv(
            pa.BufferReader(content),
            pacsv.ReadOptions(skip_rows=HEADER_LINES, column_names=COLUMNS, use_threads=False),
            pacsv.ParseOptions(invalid_row_handler=skip),
            pacsv.ConvertOptions(column_types=TYPES, include_columns=list(TYPES)),
        )
    except pa.ArrowInvalid as error:
        if "Empty CSV file" in str(error):
            return pa.schema(TYPES).empty_table(), 0
        raise MobatlasError(
            f"{file}: this is not a GeoLife track ({str(error).splitlines()[0]}); correct or "
            "remove it"
        ) from None
    return table, len(skipped)


def _tables(stays: pd.DataFrame, options: GeolifeOptions) -> tuple[pa.Table, pa.Table]:
    """The tables visits and pois."""
    lat = stays["lat"].to_numpy()
    lon = stays["lon"].to_numpy()
    labels = cluster_places(lat, lon, options.place_metres)
    centres = place_centres(lat, lon, labels)  # (places,) each
    places = pa.array([f"place:{label}" for label in range(len(centres[0]))], pa.string())
    visits = {
        "user_id": pa.array(stays["user_id"], pa.string()),
        "poi_id": places.take(pa.array(labels)),
        "lat": centres[0][labels],
        "lon": centres[1][labels],
    }
    for name in ("arrival", "departure"):
        local = np.rint(stays[name].to_numpy() + options.utc_offset_hours * 3600)
        visits[name] = pa.array(local.astype("datetime64[s]")).cast(pa.timestamp("us"))
    return pa.table(visits), pa.table({"poi_id": places, "lat": centres[0], "lon": centres[1]})


READER = Reader(
    name="geolife",
    description="GeoLife GPS tracks (.plt), by stay points and DBSCAN places",
    read=read,
    options=GeolifeOptions,
    # Loggers ran during trips: most of a day is unobserved, and few people show home and work.
    suggests={"quality": {"min_coverage": 0.0}, "anchors": {"require_both": False}},
)
