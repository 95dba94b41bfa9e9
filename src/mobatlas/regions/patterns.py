"""Patterns of SafeGraph and Advan: visitors of each place by home region, as rows of aggregates.

Each row is a place in a week or month. A JSON column counts its visitors by home block group or
tract. V needs visits, so visitors of every home are assumed to visit a place equally often:
visits = visitors * raw_visit_counts / raw_visitor_counts.
"""

import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pandas as pd

from mobatlas.data.prepare.tables import csv_header, duckdb_reason, literal, parquet_schema
from mobatlas.data.schema import region_column
from mobatlas.data.vocabulary import FIRST_POI, Vocabulary
from mobatlas.errors import MobatlasError
from mobatlas.io.tables import require_columns
from mobatlas.regions.periods import DATES
from mobatlas.regions.places import CATEGORIES, COORDINATES, NAMES, match_places, plain_names

HOMES = {11: "visitor_home_aggregation", 12: "visitor_home_cbgs"}  # by digits of their regions
KEY = "placekey"
COUNTS = ("raw_visit_counts", "raw_visitor_counts")
DEVICES = ("number_devices_residing", "n", "devices", "people")
SUFFIXES = (".parquet", ".csv", ".csv.gz")
CENSUS_DIGITS = (2, 5, 11, 12)  # of a state, county, tract and block group
# Two, three or four visitors are all published as 4; the variance is that of the three numbers.
SMALL_COUNT, SMALL_MEAN, SMALL_VARIANCE = 4, 3.0, 2 / 3
MOST_VISITORS = 1e9
ASSUMPTIONS = (
    "visits are visitors times raw_visit_counts / raw_visitor_counts of the place, as if visitors "
    "of every home came equally often",
    "a count of 4 stands for 2 to 4 visitors and is read as 3; a home that is not listed counts "
    "as no visitor; the noise that the supplier adds is unknown and not modelled",
)


def table_files(path: Path) -> list[Path]:
    """The tables of a folder, or the file itself."""
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    return [file for file in files if file.is_file() and file.name.lower().endswith(SUFFIXES)]


def column_names(path: Path) -> list[str]:
    """The columns of a CSV or Parquet table, or of the first one in a folder; none if unknown."""
    try:
        file, *_ = [*table_files(path), None]
        if file is None:
            return []
        is_parquet = file.suffix.lower() == ".parquet"
        names = parquet_schema(file).names if is_parquet else csv_header(file)[0]
    except MobatlasError:  # whoever reads the table explains the fault
        return []
    return [name.strip() for name in names]


def is_patterns(columns: Sequence[str]) -> bool:
    """Whether a table with these columns has visitors by home as JSON."""
    return not set(HOMES.values()).isdisjoint(columns)


def census_digits(regions: Sequence[str]) -> int | None:
    """The length of census ids, such as 11 for tracts; None for other ids."""
    plain = [re.sub(r"^\d{7}US", "", name) for name in regions]
    sizes = {len(name) if name.isdigit() else 0 for name in plain}
    return sizes.pop() if len(sizes) == 1 and sizes <= set(CENSUS_DIGITS) else None


def read_panel(path: Path, digits: int | None) -> pd.DataFrame:
    """Devices by home region, as columns region and n; several months are averaged.

    Block groups are added up to regions of `digits` digits.
    """
    columns = column_names(path)
    region = region_column(path, columns)
    devices = next((name for name in DEVICES if name in columns), DEVICES[0])
    require_columns(str(path), columns, (devices,))
    size = 12 if digits is None else digits
    with _open(path) as (engine, source):
        panel = engine.execute(
            f"""
            WITH panel AS (
                SELECT lpad(CAST({_name(region)} AS VARCHAR),
                    if(len(CAST({_name(region)} AS VARCHAR)) = 11 AND {size} = 12, 12, 0), '0')
                    AS home, TRY_CAST({_name(devices)} AS DOUBLE) AS n FROM {source}
            ), homes AS (SELECT home, avg(n) AS n, bool_or(n IS NULL) AS bad FROM panel GROUP BY 1)
            SELECT {"home" if digits is None else f"left(home, {digits})"} AS region,
                sum(n) AS n, bool_or(bad) AS bad FROM homes GROUP BY 1 ORDER BY 1
            """
        ).df()
    if panel.bad.any():
        raise MobatlasError(
            f"{path}: column '{devices}' is empty or not a number for region "
            f"'{panel.region[panel.bad.argmax()]}'; correct it"
        )
    return panel[panel.n >= 1]


def read_patterns(
    path: Path, vocabulary: Vocabulary, regions: Sequence[str], panel: Path | None, notes: list[str]
) -> pd.DataFrame:
    """Visits of regions to places and categories of the dataset, with noise_sd, n and period.

    `regions` are those of the composition; block groups are added up to them.
    """
    columns = column_names(path)
    require_columns(str(path), columns, (KEY, *COUNTS))
    finest = max(size for size, name in HOMES.items() if name in columns)
    digits = census_digits(regions) or finest
    if digits > finest:
        raise MobatlasError(
            f"{path}: has no visitors by block group, such as '{regions[0]}' of the composition; "
            "give a composition by tract"
        )
    homes = next(name for size, name in HOMES.items() if size >= digits and name in columns)
    with _open(path) as (engine, source):
        _load(engine, path, source, columns, homes)
        days = _days(engine, path) if set(DATES) <= set(columns) else None
        engine.register("features", _features(engine, path, vocabulary, notes))
        visits = engine.execute(
            f"""
            WITH cells AS (
                SELECT {KEY}, unnest(map_keys(homes)) AS home, unnest(map_values(homes)) AS people,
                    visits / visitors AS factor FROM places WHERE visitors > 0
            )
            SELECT left(home, {digits}) AS region, feature,
                sum(factor * if(people = {SMALL_COUNT}, {SMALL_MEAN}, people)) AS visits,
                sqrt(sum(factor ** 2 * if(people = {SMALL_COUNT}, {SMALL_VARIANCE}, 0)))
                    AS noise_sd
            FROM cells JOIN features USING ({KEY}) GROUP BY ALL ORDER BY ALL
            """
        ).df()
    if visits.empty:
        raise MobatlasError(f"{path}: column '{homes}' lists no visitors of the dataset's places")
    notes += [f"{path.name}: {sentence}" for sentence in ASSUMPTIONS]
    if days is not None:
        notes.append(f"{path.name}: covers {days:,} days, by its columns {' and '.join(DATES)}")
        visits["per"] = f"{days} days"
    return visits if panel is None else with_panel(path, visits, panel, digits, notes)


def with_panel(
    path: Path, table: pd.DataFrame, panel: Path, digits: int | None, notes: list[str]
) -> pd.DataFrame:
    """Add the people `n` of each region from the table of a panel."""
    joined = table.merge(read_panel(panel, digits), "left", "region")
    absent = joined.loc[joined.n.isna(), "region"].nunique()
    if absent == table["region"].nunique():
        raise MobatlasError(
            f"{panel}: has no devices in any region of {path}, such as '{table['region'].iloc[0]}';"
            " use the same ids in both"
        )
    if absent:
        notes.append(
            f"{path.name}: {absent:,} regions without devices in {panel.name} are left out"
        )
    return joined[joined.n.notna()].drop(columns="bad").reset_index(drop=True)


@contextmanager
def _open(path: Path) -> Iterator[tuple[duckdb.DuckDBPyConnection, str]]:
    """An engine with bounded memory, and the tables of a path as SQL; CSV as text."""
    files = table_files(path)
    if not files:
        raise MobatlasError(f"{path}: no table; give CSV or Parquet files")
    listed = ", ".join(map(literal, files))
    if files[0].suffix.lower() == ".parquet":
        source = f"read_parquet([{listed}], union_by_name=true)"
    else:
        headers = {tuple(csv_header(file)[0]): csv_header(file)[1] for file in files}
        if len(headers) > 1:
            raise MobatlasError(f"{path}: its tables have different columns; give them separately")
        [(names, delimiter)] = headers.items()
        types = ", ".join(f"{literal(name.strip())}: 'VARCHAR'" for name in names)
        source = (
            f"read_csv([{listed}], auto_detect=false, header=true, delim={literal(delimiter)}, "
            f"quote='\"', escape='\"', columns={{{types}}})"
        )
    with tempfile.TemporaryDirectory(prefix="mobatlas-") as spill:
        config: dict[str, Any] = {"memory_limit": "2GB", "temp_directory": spill}
        with duckdb.connect(config=config) as engine:
            try:
                yield engine, source
            except duckdb.Error as error:
                raise MobatlasError(f"{path}: {duckdb_reason(error)}; correct the file") from None


def _load(
    engine: duckdb.DuckDBPyConnection, path: Path, source: str, columns: list[str], homes: str
) -> None:
    """Read the rows into the table `places`, and refuse rows that cannot be right."""
    described = (KEY, *NAMES, *CATEGORIES, *DATES, *chain(*COORDINATES))
    kept = ", ".join(_name(name) for name in described if name in columns)
    visits, visitors = (f"TRY_CAST({_name(name)} AS DOUBLE)" for name in COUNTS)
    engine.execute(
        f"""
        CREATE TABLE places AS SELECT row_number() OVER () AS row, {kept}, {visits} AS visits,
            {visitors} AS visitors, trim(coalesce(CAST({homes} AS VARCHAR), '')) AS text,
            TRY_CAST(TRY_CAST(nullif(text, '') AS JSON) AS MAP(VARCHAR, DOUBLE)) AS homes
        FROM {source}
        """
    )
    values = "list_transform(map_values(homes), lambda each: coalesce(each, -1))"
    faults = {
        f"{KEY} IS NULL OR {KEY} = ''": f"column '{KEY}' is empty",
        f"text <> '' AND (homes IS NULL OR list_min({values}) < 0 OR "
        f"list_max({values}) > {MOST_VISITORS})": f"column '{homes}' is not a JSON object of "
        "numbers of visitors",
        f"coalesce(visits NOT BETWEEN 0 AND {MOST_VISITORS}, true) OR "
        f"coalesce(visitors NOT BETWEEN 0 AND {MOST_VISITORS}, true)": f"{' or '.join(COUNTS)} is "
        "not a number of people",
        "visits < visitors": f"{COUNTS[0]} is less than {COUNTS[1]}: are the columns exchanged?",
    }
    for condition, fault in faults.items():
        bad = engine.execute(f"SELECT min(row), count(*) FROM places WHERE {condition}").fetchone()
        assert bad is not None
        if bad[1]:
            raise MobatlasError(
                f"{path}: row {bad[0]:,}: {fault} ({bad[1]:,} such rows); correct the file"
            )


def _days(engine: duckdb.DuckDBPyConnection, path: Path) -> int:
    """The days of all weeks or months in the table; refuse repeated and overlapping ones."""
    start, end = (f"TRY_CAST(left(CAST({name} AS VARCHAR), 10) AS DATE)" for name in DATES)
    [(days, span, unknown)] = engine.execute(
        f"""
        SELECT sum(date_diff('day', a, b)), date_diff('day', min(a), max(b)),
            bool_or(a IS NULL OR b IS NULL OR b <= a)
        FROM (SELECT DISTINCT {start} AS a, {end} AS b FROM places)
        """
    ).fetchall()
    if unknown:
        raise MobatlasError(f"{path}: {' or '.join(DATES)} is not a date, or the end is not later")
    if days > span:
        raise MobatlasError(
            f"{path}: its periods overlap, such as weeks with months; give one or the other"
        )
    twice = engine.execute(
        f"SELECT {KEY} FROM places GROUP BY {KEY}, {start} HAVING count(*) > 1 LIMIT 1"
    ).fetchone()
    if twice is not None:
        raise MobatlasError(f"{path}: place '{twice[0]}' has two rows for one period; keep one")
    return int(days)


def _features(
    engine: duckdb.DuckDBPyConnection, path: Path, vocabulary: Vocabulary, notes: list[str]
) -> pd.DataFrame:
    """The features of each place: the place and its category in the dataset.

    If no place is in the dataset, categories of the table that the dataset has.
    """
    described = [
        name
        for name in engine.table("places").columns
        if name in (*NAMES, *CATEGORIES, *chain(*COORDINATES))
    ]
    kept = "".join(f", any_value({_name(name)}) AS {_name(name)}" for name in described)
    places = engine.execute(
        f"SELECT {KEY}, sum(visits) AS visits{kept} FROM places GROUP BY {KEY} ORDER BY {KEY}"
    ).df()
    token = match_places(path, places, vocabulary, notes)
    found = token >= FIRST_POI
    parts = [[f"poi:{name}" for name in np.array(vocabulary.poi_ids)[token[found]]]]
    parts.append([vocabulary.parents.get(name, "") for name in parts[0]])
    if not found.any():
        names = [name for name in vocabulary.categories if name]
        known = dict(zip(plain_names(names), names, strict=True))
        columns = [name for name in CATEGORIES if name in places.columns]
        own = [map(known.get, plain_names(places[name].astype(str).tolist())) for name in columns]
        first = [next(filter(None, each), None) for each in zip(*own, strict=True)]
        found = np.array([name is not None for name in first] or np.zeros(len(places)), dtype=bool)
        parts = [[f"category:{name}" for name in first if name]]
    share = places.visits[found].sum() / max(places.visits.sum(), 1e-300)
    if not found.any():
        raise MobatlasError(
            f"{path}: none of its {len(places):,} places is in the dataset, by id, name or "
            "category; use the dataset's poi_id as placekey, or its categories"
        )
    notes.append(f"{path.name}: {share:.0%} of all visits are to places that are used")
    keys = places[KEY][found]
    rows = pd.concat([pd.DataFrame({KEY: keys, "feature": part}) for part in parts])
    return rows[rows.feature != ""]


def _name(column: str) -> str:
    return '"' + column.replace('"', '""') + '"'
