"""Patterns of SafeGraph and Advan: visitors of each place by home region, as rows of aggregates.

Each row is a place in a week or month. A JSON column counts its visitors by home block group or
tract. V needs visits, so visitors of every home are assumed to visit a place equally often:
visits = visitors * raw_visit_counts / raw_visitor_counts.
"""

import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import duckdb
import pandas as pd

from mobatlas.data.prepare.tables import (
    as_parquet,
    csv_header,
    duckdb_reason,
    is_csv,
    literal,
    parquet_schema,
)
from mobatlas.data.types import FIRST_POI, Vocabulary, region_column
from mobatlas.errors import MobatlasError, refuse_faults
from mobatlas.io.tables import number_column, read_table, require_columns
from mobatlas.regions.places import DESCRIPTION, match_places

HOMES = {11: "visitor_home_aggregation", 12: "visitor_home_cbgs"}  # by digits of their regions
KEY = "placekey"
DATES = ("date_range_start", "date_range_end")  # the end is the day after the last
COUNTS = ("raw_visit_counts", "raw_visitor_counts")
DEVICES = ("number_devices_residing", "n", "devices", "people")
SUFFIXES = (".parquet", ".csv", ".csv.gz")
CENSUS_DIGITS = (2, 5, 11, 12)  # of a state, county, tract and block group
# Two, three or four visitors are all published as 4; the variance is that of the three numbers.
SMALL_COUNT, SMALL_MEAN, SMALL_VARIANCE = 4, 3.0, 2 / 3
MOST_VISITORS = 1e9
COVERED = 0.9  # of the dataset's visits of a category, in a table that has its total
ASSUMPTIONS = (
    "visits are visitors times raw_visit_counts / raw_visitor_counts of the place, as if visitors "
    "of every home came equally often",
    "a count of 4 stands for 2 to 4 visitors and is read as 3; a home that is not listed counts "
    "as no visitor; the noise that the supplier adds is unknown and not modelled",
)


def column_names(path: Path) -> list[str]:
    """The columns of a CSV or Parquet table, or of the first one in a folder; none if unknown."""
    for file in _table_files(path)[:1]:
        with suppress(MobatlasError):  # the reader of the table explains the fault
            names = csv_header(file)[0] if is_csv(file) else parquet_schema(file).names
            return [name.strip() for name in names]
    return []


def census_digits(regions: Sequence[str]) -> int | None:
    """The length of census ids, such as 11 for tracts; None for other ids."""
    plain = [re.sub(r"^\d{7}US", "", name) for name in regions]
    sizes = {len(name) if name.isdigit() else 0 for name in plain}
    return sizes.pop() if len(sizes) == 1 and sizes <= set(CENSUS_DIGITS) else None


def with_people(
    path: Path, table: pd.DataFrame, panel: Path | str, digits: int | None, notes: list[str]
) -> pd.DataFrame:
    """Add the people `n` of each region: its devices in the table `panel`, averaged over months.

    Block groups are added up to regions of `digits` digits.
    """
    panel = Path(panel)
    homes = read_table(panel).rename(columns=str.lower)
    columns = list(homes.columns)
    devices = next((name for name in DEVICES if name in columns), DEVICES[0])
    require_columns(str(panel), columns, (devices,))
    # In a panel summary of Advan, `region` is the state.
    block = "census_block_group"
    region = block if block in columns else region_column(panel, columns)
    ids = homes[region].astype(str).str.strip()
    ids = ids.str.zfill(0 if digits is None else int(ids.str.len().max()))  # of numbers
    mean = pd.Series(number_column(panel, homes, devices)).groupby(ids.to_numpy()).mean()
    n = mean.groupby(mean.index.str[:digits]).sum()
    joined = table.assign(n=table["region"].map(n[n >= 1]))
    absent = joined.region[joined.n.isna()]
    if len(absent) == len(joined):
        raise MobatlasError(
            f"{panel}: has no devices in any region of {path}, such as '{absent.iloc[0]}'; use the "
            "same ids in both"
        )
    notes.append(f"{path.name}: {absent.nunique():,} regions have no devices in {panel.name}")
    return joined.dropna(subset="n").reset_index(drop=True)


def read_patterns(
    path: Path,
    vocabulary: Vocabulary,
    regions: Sequence[str],
    panel: Path | str | None,
    notes: list[str],
) -> pd.DataFrame:
    """Visits of regions to places and categories of the dataset, with noise_sd, n and period.

    `regions` are those of the composition; block groups are added up to them.
    """
    columns = [name.lower() for name in column_names(path)]
    require_columns(str(path), columns, (KEY, *COUNTS, *DATES))
    finest = max(size for size, name in HOMES.items() if name in columns)
    digits = census_digits(regions) or finest
    homes = [name for size, name in HOMES.items() if size >= digits and name in columns]
    if not homes:
        raise MobatlasError(
            f"{path}: has no visitors by block group, such as '{regions[0]}' of the composition; "
            "give a composition by tract"
        )
    with _open(path) as (engine, source):
        days = _load(engine, path, source, columns, homes[0])
        engine.register("features", _features(engine, path, vocabulary, notes))
        visits = engine.execute(
            f"""
            WITH cells AS (
                SELECT {KEY}, unnest(map_keys(homes)) AS home, unnest(map_values(homes)) AS people,
                    visits / visitors AS factor FROM places WHERE visitors > 0
            )
            SELECT left(home, {digits}) AS region, feature, '{days} days' AS per,
                sum(factor * if(people = {SMALL_COUNT}, {SMALL_MEAN}, people)) AS visits,
                sqrt(sum(factor ** 2 * if(people = {SMALL_COUNT}, {SMALL_VARIANCE}, 0)))
                    AS noise_sd
            FROM cells JOIN features USING ({KEY}) GROUP BY ALL ORDER BY ALL
            """
        ).df()
    if visits.empty:
        raise MobatlasError(f"{path}: column '{homes[0]}' is empty for the dataset's places")
    notes += [f"{path.name}: {each}" for each in (f"covers {days:,} days", *ASSUMPTIONS)]
    return visits if panel is None else with_people(path, visits, panel, digits, notes)


def _table_files(path: Path) -> list[Path]:
    """The tables of a folder, or the file itself."""
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    return [file for file in files if file.is_file() and file.name.lower().endswith(SUFFIXES)]


@contextmanager
def _open(path: Path) -> Iterator[tuple[duckdb.DuckDBPyConnection, str]]:
    """An engine with bounded memory, and the tables of a path as SQL; CSV as text."""
    with tempfile.TemporaryDirectory(prefix="mobatlas-") as work:
        files = [literal(as_parquet(file, Path(work))) for file in _table_files(path)]
        config: dict[str, Any] = {"memory_limit": "1GB", "temp_directory": work}
        with duckdb.connect(f"{work}/rows.duckdb", config=config) as engine:
            try:
                yield engine, f"read_parquet([{', '.join(files)}], union_by_name=true)"
            except duckdb.Error as error:
                raise MobatlasError(f"{path}: {duckdb_reason(error)}; correct the file") from None


def _load(
    engine: duckdb.DuckDBPyConnection, path: Path, source: str, columns: list[str], homes: str
) -> int:
    """Read the rows into the table `places`, refuse rows that cannot be right, count the days."""
    kept = ", ".join(f"{name} AS {name}" for name in (KEY, *DESCRIPTION) if name in columns)
    visits, visitors = (f"TRY_CAST({name} AS DOUBLE)" for name in COUNTS)
    start, end = (f"TRY_CAST(left(CAST({name} AS VARCHAR), 10) AS DATE)" for name in DATES)
    engine.execute(
        f"""
        CREATE TABLE places AS SELECT row, {kept}, {visits} AS visits,
            {visitors} AS visitors, {start} AS first, {end} AS last,
            trim(coalesce(CAST({homes} AS VARCHAR), '')) AS text,
            TRY_CAST(TRY_CAST(nullif(text, '') AS JSON) AS MAP(VARCHAR, DOUBLE)) AS homes
        FROM (SELECT *, row_number() OVER () AS row FROM {source})
        WHERE coalesce(CAST({COUNTS[0]} AS VARCHAR), '') <> '' OR text NOT IN ('', '{{}}')
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
        "coalesce(last <= first, true)": f"{' to '.join(DATES)} is not a period",
        f"row IN (SELECT max(row) FROM places GROUP BY {KEY}, first HAVING count(*) > 1)": "the "
        "place has another row for this period",
    }
    for condition, fault in faults.items():
        query = f"SELECT min(row), count(*) FROM places WHERE {condition}"
        [(row, count)] = engine.execute(query).fetchall()
        if count:
            raise MobatlasError(
                f"{path}: row {row:,}: {fault} ({count:,} such rows); correct the file"
            )
    query = "SELECT sum(last - first), max(last) - min(first) FROM "
    query += "(SELECT DISTINCT first, last FROM places)"
    [(days, span)] = engine.execute(query).fetchall()
    refuse_faults(
        {
            f"{path}: no row has visits": not days,
            f"{path}: its periods overlap; give either weeks or months": (days or 0) > (span or 0),
        }
    )
    return int(days)


def _features(
    engine: duckdb.DuckDBPyConnection, path: Path, vocabulary: Vocabulary, notes: list[str]
) -> pd.DataFrame:
    """The features of each place: the place and its category in the dataset."""
    described = [name for name in engine.table("places").columns if name in DESCRIPTION]
    kept = "".join(f", any_value({name}) AS {name}" for name in described)
    places = engine.execute(
        f"SELECT {KEY}, sum(visits) AS visits{kept} FROM places GROUP BY {KEY} ORDER BY {KEY}"
    ).df()
    token = match_places(path, places, vocabulary, notes)
    found = token >= FIRST_POI
    if not found.any():
        raise MobatlasError(
            f"{path}: none of its {len(places):,} places is in the dataset, by id, or by name or "
            "category and coordinates; use the dataset's poi_id as placekey"
        )
    known = vocabulary.table.to_pandas()
    visits = [each.groupby("category").visits.sum() for each in (known.iloc[token[found]], known)]
    covered = visits[0] / visits[1]  # by category
    whole = {f"category:{name}" for name in covered.index[covered >= COVERED]}
    share = places.visits[found].sum() / max(places.visits.sum(), 1e-300)
    notes.append(
        f"{path.name}: {share:.0%} of all visits are to places that are used; they cover "
        f"{len(whole):,} of {int((visits[1] > 0).sum()):,} categories of the dataset"
    )
    names = pd.Series("poi:" + known.poi_id.to_numpy(dtype=object)[token[found]])
    parents = names.map(vocabulary.parents)
    features = pd.concat([names, parents.where(parents.isin(whole))], ignore_index=True)
    keys = pd.concat([places[KEY][found]] * 2, ignore_index=True)
    return pd.DataFrame({KEY: keys, "feature": features}).dropna()
