"""Write a first configuration for `mobatlas run` from a user's files."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import duckdb
from jinja2 import Environment, PackageLoader, StrictUndefined

from mobatlas.config import DEFAULT_GENERATOR
from mobatlas.data.types import ANCHORS, ATTRIBUTE_NAMES, looks_like_region
from mobatlas.errors import MobatlasError, refuse_faults, suggestion
from mobatlas.io.manifest import write_atomic
from mobatlas.io.output import lock_output
from mobatlas.io.tables import find_table
from mobatlas.regions.periods import infer_window

REQUIRED = ("user_id", "poi_id", "arrival")
TEMPLATE = "configuration.yaml.j2"
VISITS_QUERY = """
    WITH visits AS (
        SELECT user_id, CAST(arrival AS TIMESTAMP) AS arrival FROM {read}(?)
    ), people AS (
        SELECT user_id, count(DISTINCT arrival::DATE) AS days FROM visits GROUP BY user_id
    )
    SELECT
        (SELECT count(*) FROM visits),
        (SELECT count(*) FROM people),
        (SELECT coalesce(date_diff('day', min(arrival), max(arrival)) + 1, 0) FROM visits),
        (SELECT coalesce(median(days), 0) FROM people)
    """


@dataclass(frozen=True)
class InputFiles:
    """The tables of a user; each may be missing.

    Regions come from a composition and aggregates, or from `by`, a region column of the people
    table. With `by`, the composition is optional. Several tables of composition are combined.
    """

    visits: Path | None = None
    composition: Path | Sequence[Path] | None = None
    aggregates: Path | None = None
    by: str | None = None
    group_tables: Sequence[Path] = ()
    labelled: Path | None = None

    @property
    def census(self) -> Sequence[Path]:
        """The tables of the composition."""
        tables = self.composition or ()
        return (tables,) if isinstance(tables, Path) else tables

    def all_paths(self) -> list[tuple[str, Path]]:
        """Each path, after the option that gives it."""
        single = {
            "--visits": self.visits,
            "--aggregates": self.aggregates,
            "--labelled": self.labelled,
        }
        lists = {"--composition": self.census, "--group-table": self.group_tables}
        return [
            *((option, path) for option, path in single.items() if path is not None),
            *((option, path) for option, paths in lists.items() for path in paths),
        ]


@dataclass(frozen=True)
class _Visits:
    """Counts of a table of visits."""

    path: Path
    rows: int
    people: int
    days: int  # from the first to the last visit
    days_per_person: float  # days with visits, median
    has_departure: bool

    @property
    def window(self) -> tuple[int, str]:
        """Days of a trajectory, and the reason in words."""
        return infer_window(self.days, self.days_per_person)


def write_configuration(out: Path, files: InputFiles, *, overwrite: bool = False) -> list[str]:
    """Write the YAML file and return the lines to print about it."""
    absent = {
        f"{option} {path}: this path does not exist; check it": not path.exists()
        for option, path in files.all_paths()
    }
    refuse_faults(
        {
            f"--out {out}: this is a folder; give the name of a YAML file": out.is_dir(),
            f"{out}: this file exists already; choose another name, or pass --overwrite": (
                out.exists() and not overwrite
            ),
            **absent,
        }
    )
    people = _people_table(files.visits)
    columns = () if people is None else _column_names(people)
    region_columns = tuple(filter(looks_like_region, columns))
    _check_regions(files, people, columns, region_columns)
    visits = None if files.visits is None else _read_visits(files.visits)
    with lock_output(out):
        write_atomic(out, _render(files, visits, region_columns, out.parent).encode())
    lines = []
    if visits is not None:
        lines.append(
            f"{visits.path}: {visits.rows:,} visits of {visits.people:,} people "
            f"over {visits.days:,} days"
        )
    if files.by is None and not files.composition and region_columns:
        lines.append(
            "regions: the configuration uses a controlled partition, which needs labels; "
            f"pass --by {region_columns[0]} to use the regions of your people"
        )
    return [*lines, f"wrote {out}; check it, then start: mobatlas run {out}"]


def _render(
    files: InputFiles, visits: _Visits | None, region_columns: tuple[str, ...], base: Path
) -> str:
    engine = Environment(
        loader=PackageLoader("mobatlas.pipeline", "."),
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    engine.filters["path"] = partial(_quote_path, base=base)
    engine.filters["paths"] = partial(_quote_paths, base=base)
    engine.filters["word"] = _quote
    # `prepare` recognises region columns by name; other columns must be listed.
    listed = files.by is not None and not looks_like_region(files.by)
    page = engine.get_template(TEMPLATE).render(
        files=files,
        generator=DEFAULT_GENERATOR,
        visits=visits,
        window=visits.window if visits is not None else (None, None),
        region_columns=(*region_columns, files.by) if listed else (),
    )
    return page.rstrip() + "\n"


def _check_regions(
    files: InputFiles, people: Path | None, columns: Sequence[str], region_columns: Sequence[str]
) -> None:
    """Refuse tables that do not fit together and columns that are not regions."""
    by = files.by
    example = f", such as {' or '.join(region_columns)}" if region_columns else ""
    attributes = [name for name in columns if name.lower() in ATTRIBUTE_NAMES]
    refuse_faults(
        {
            "--composition is missing; aggregates need the composition of the same regions": (
                by is None and not files.composition and files.aggregates is not None
            ),
            "--aggregates is missing; give the aggregates of the same regions. To count them from "
            f"your visits instead, pass --by with the region column of people{example}": (
                by is None and bool(files.composition) and files.aggregates is None
            ),
            f"--by {by} counts aggregates from your visits, but --aggregates gives them too; "
            "remove one of the two": (by is not None and files.aggregates is not None),
            f"--by {by} needs a table of people; give --visits, a folder with the tables "
            "visits and people": (by is not None and people is None),
            f"{people}: the table has no column '{by}'{suggestion(by or '', columns)} "
            f"(columns: {', '.join(columns)})": (by is not None and by not in columns),
            f"--by {by}: this is not a column of regions; give the column with each person's region"
            f"{example}": (by == "user_id" or by in ANCHORS or by in attributes),
            f"--composition is missing; give it, because {people} has no attributes (age, gender) "
            "to count it from": (by is not None and not files.composition and not attributes),
        }
    )


def _people_table(visits: Path | None) -> Path | None:
    """The table of people in a folder of visits, if there is one."""
    return find_table(visits, "people") if visits is not None and visits.is_dir() else None


def _column_names(table: Path) -> tuple[str, ...]:
    rows = _query(
        table, "DESCRIBE SELECT * FROM {read}(?)", "cannot be read", "give Parquet or CSV"
    )
    return tuple(str(row[0]) for row in rows)


def _query(table: Path, query: str, problem: str, advice: str) -> list[Any]:
    """The rows of a query with `{read}(?)` for the table; `problem` and `advice` if it fails."""
    read = "read_parquet" if table.suffix == ".parquet" else "read_csv"
    try:
        with duckdb.connect() as engine:
            return engine.execute(query.format(read=read), [str(table)]).fetchall()
    except duckdb.Error as error:
        raise MobatlasError(
            f"{table}: {problem} ({str(error).splitlines()[0]}); {advice}"
        ) from None


def _read_visits(path: Path) -> _Visits:
    """Count the visits, people and days of a table."""
    table = path if path.is_file() else find_table(path, "visits")
    if table is None:
        raise MobatlasError(
            f"{path}: the folder contains neither visits.parquet nor visits.csv; give the file "
            "itself, or set `source.format` in the configuration"
        )
    columns = _column_names(table)
    missing = [name for name in REQUIRED if name not in columns]
    if missing:
        raise MobatlasError(
            f"{table}: the table has no column '{missing[0]}'; rename a column, or set "
            "`source.format` in the configuration"
        )
    [(rows, people, days, days_per_person)] = _query(
        table,
        VISITS_QUERY,
        "column 'arrival' contains values that are not times",
        "write times as 2024-03-04 08:00",
    )
    if not rows:
        raise MobatlasError(f"{table}: the table contains no visits; give a table with rows")
    return _Visits(path, rows, people, days, float(days_per_person), "departure" in columns)


def _quote_path(path: Path, base: Path) -> str:
    """A YAML string, relative to the configuration if the path is below it."""
    absolute = path.resolve()
    below = absolute.is_relative_to(base.resolve())
    return _quote((absolute.relative_to(base.resolve()) if below else absolute).as_posix())


def _quote_paths(paths: Sequence[Path], base: Path) -> str:
    """One YAML string, or a list of several."""
    texts = [_quote_path(path, base) for path in paths]
    return texts[0] if len(texts) == 1 else f"[{', '.join(texts)}]"


def _quote(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
