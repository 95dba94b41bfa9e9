"""Write a first configuration for `mobatlas run` from a user's files."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import duckdb
from jinja2 import Environment, PackageLoader, StrictUndefined

from mobatlas.data.schema import ANCHORS, ATTRIBUTE_NAMES, looks_like_region
from mobatlas.errors import MobatlasError, suggestion
from mobatlas.io.manifest import write_atomic
from mobatlas.io.output import lock_output
from mobatlas.io.tables import find_table

REQUIRED = ("user_id", "poi_id", "arrival")
DAYS_OF_A_MONTH = 28
TEMPLATE = "configuration.yaml.j2"


@dataclass(frozen=True)
class InputFiles:
    """The tables of a user, each of which may be missing.

    Regions are given by composition and aggregates, or by the column of people that names a
    person's region, with or without a composition.
    """

    visits: Path | None = None
    composition: Path | None = None
    aggregates: Path | None = None
    by: str | None = None


@dataclass(frozen=True)
class _Visits:
    """What a table of visits contains."""

    path: Path
    rows: int
    people: int
    days: int  # from the first to the last visit
    days_per_person: float  # days with visits, median
    has_departure: bool

    @property
    def window(self) -> int:
        """Days of a trajectory: one for a diary, three for a few weeks, else two weeks."""
        if self.days_per_person < 3:
            return 1
        return 3 if self.days_per_person <= DAYS_OF_A_MONTH else 14


@dataclass(frozen=True)
class _People:
    """A table of people next to the visits, if there is one."""

    path: Path | None
    columns: tuple[str, ...]

    @property
    def region_columns(self) -> tuple[str, ...]:
        """Columns whose names say that they hold regions."""
        return tuple(filter(looks_like_region, self.columns))


def write_configuration(out: Path, files: InputFiles, *, overwrite: bool = False) -> list[str]:
    """Write the YAML file and return the lines to print about it."""
    if out.is_dir():
        raise MobatlasError(f"--out {out}: is a folder; give the name of a YAML file")
    if out.exists() and not overwrite:
        raise MobatlasError(f"{out}: exists already; choose another name, or pass --overwrite")
    for option in ("visits", "composition", "aggregates"):
        path = getattr(files, option)
        if path is not None and not path.exists():
            raise MobatlasError(f"--{option} {path}: does not exist; check the path")
    people = _read_people(files.visits)
    _check_regions(files, people)
    visits = None if files.visits is None else _read_visits(files.visits)
    with lock_output(out):
        write_atomic(out, _render(files, visits, people, out.parent).encode())
    lines = []
    if visits is not None:
        lines.append(
            f"{visits.path}: {visits.rows:,} visits of {visits.people:,} people "
            f"over {visits.days:,} days"
        )
    if files.by is None and files.composition is None and people.region_columns:
        lines.append(
            "regions: the configuration uses a controlled partition, which needs labels; "
            f"pass --by {people.region_columns[0]} to use the regions of your people"
        )
    return [*lines, f"{out}: written; check it, then start: mobatlas run {out}"]


def _render(files: InputFiles, visits: _Visits | None, people: _People, base: Path) -> str:
    engine = Environment(
        loader=PackageLoader("mobatlas.pipeline", "."),
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    engine.filters["path"] = partial(_quote_path, base=base)
    engine.filters["word"] = _quote
    # A region column is found by its name; another one must be listed.
    listed = files.by is not None and not looks_like_region(files.by)
    page = engine.get_template(TEMPLATE).render(
        files=files,
        visits=visits,
        window=visits.window if visits is not None else None,
        region_columns=(*people.region_columns, files.by) if listed else (),
    )
    return page.rstrip() + "\n"


def _check_regions(files: InputFiles, people: _People) -> None:
    """Refuse tables that do not fit together and columns that hold no regions."""
    example = f", such as {' or '.join(people.region_columns)}" if people.region_columns else ""
    if files.by is None:
        if files.composition is None and files.aggregates is not None:
            raise MobatlasError(
                "--composition: is missing; aggregates need the composition of the same regions"
            )
        if files.composition is not None and files.aggregates is None:
            raise MobatlasError(
                "--aggregates: is missing; give the aggregates of the same regions, or pass --by "
                f"with the column of people that names their region{example}, to count aggregates "
                "from your visits"
            )
        return
    if files.aggregates is not None:
        raise MobatlasError(
            f"--by {files.by}: counts aggregates from your visits, but --aggregates gives them "
            "too; remove one of the two"
        )
    if people.path is None:
        raise MobatlasError(
            f"--by {files.by}: is a column of people; give --visits, a folder with the tables "
            "visits and people"
        )
    if files.by not in people.columns:
        raise MobatlasError(
            f"{people.path}: has no column '{files.by}'{suggestion(files.by, people.columns)} "
            f"(columns: {', '.join(people.columns)})"
        )
    if files.by == "user_id" or files.by in ANCHORS or files.by.lower() in ATTRIBUTE_NAMES:
        raise MobatlasError(
            f"--by {files.by}: holds no regions; give the column that says where people "
            f"live{example}"
        )
    attributes = [name for name in people.columns if name.lower() in ATTRIBUTE_NAMES]
    if files.composition is None and not attributes:
        raise MobatlasError(
            f"--composition: is missing; {people.path} has no attributes (age, gender) from which "
            "to count one"
        )


def _read_people(visits: Path | None) -> _People:
    """The table of people in a folder of visits, if there is one."""
    table = find_table(visits, "people") if visits is not None and visits.is_dir() else None
    if table is None:
        return _People(None, ())
    with duckdb.connect() as engine:
        return _People(table, _column_names(engine, table))


def _column_names(engine: duckdb.DuckDBPyConnection, table: Path) -> tuple[str, ...]:
    query = f"DESCRIBE SELECT * FROM {_read_function(table)}(?)"
    try:
        rows = engine.execute(query, [str(table)]).fetchall()
    except duckdb.Error as error:
        raise MobatlasError(
            f"{table}: cannot be read ({str(error).splitlines()[0]}); give Parquet or CSV"
        ) from None
    return tuple(str(row[0]) for row in rows)


def _read_function(table: Path) -> str:
    return "read_parquet" if table.suffix == ".parquet" else "read_csv"


def _read_visits(path: Path) -> _Visits:
    """Count the visits, people and days of a table."""
    table = path if path.is_file() else find_table(path, "visits")
    if table is None:
        raise MobatlasError(
            f"{path}: contains neither visits.parquet nor visits.csv; give the file itself, or "
            "set `source.format` in the configuration"
        )
    with duckdb.connect() as engine:
        columns = _column_names(engine, table)
        missing = [name for name in REQUIRED if name not in columns]
        if missing:
            raise MobatlasError(
                f"{table}: has no column '{missing[0]}'; rename a column, or set `source.format` "
                "in the configuration"
            )
        query = f"""
            WITH visits AS (
                SELECT user_id, CAST(arrival AS TIMESTAMP) AS arrival
                FROM {_read_function(table)}(?)
            ), people AS (
                SELECT user_id, count(DISTINCT arrival::DATE) AS days FROM visits GROUP BY user_id
            )
            SELECT
                (SELECT count(*) FROM visits),
                (SELECT count(*) FROM people),
                (SELECT median(days) FROM people),
                (SELECT date_diff('day', min(arrival), max(arrival)) + 1 FROM visits)
            """
        try:
            counts = engine.execute(query, [str(table)]).fetchone()
        except duckdb.Error as error:
            raise MobatlasError(
                f"{table}: column 'arrival' contains values that are no times "
                f"({str(error).splitlines()[0]}); write times as 2024-03-04 08:00"
            ) from None
    assert counts is not None
    rows, people, days_per_person, days = counts
    if not rows:
        raise MobatlasError(f"{table}: contains no visits; give a table with rows")
    return _Visits(
        path,
        int(rows),
        int(people),
        int(days or 0),
        float(days_per_person or 0),
        "departure" in columns,
    )


def _quote_path(path: Path, base: Path) -> str:
    """A YAML string, relative to the configuration if the path lies below it."""
    absolute = path.resolve()
    below = absolute.is_relative_to(base.resolve())
    return _quote((absolute.relative_to(base.resolve()) if below else absolute).as_posix())


def _quote(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
