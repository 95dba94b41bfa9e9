"""A first configuration from a user's files: what was found in them stands beside what it leads to."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import duckdb

from mobatlas.artifacts import write_whole
from mobatlas.errors import MobatlasError
from mobatlas.folders import only_writer

REQUIRED = ("user_id", "poi_id", "arrival")
A_MONTH = 28


@dataclass(frozen=True)
class _Visits:
    """What a table of visits holds."""

    path: Path
    rows: int
    people: int
    days: int  # from the first to the last
    days_each: float  # on which a person is seen, median
    columns: tuple[str, ...]


def write_configuration(
    out: Path, visits: Path | None, composition: Path | None, aggregates: Path | None, *, overwrite: bool = False
) -> list[str]:
    """Write the YAML file; what to say of it."""
    if out.exists() and not overwrite:
        raise MobatlasError(f"{out}: exists already; choose another name, or pass --overwrite")
    if (composition is None) != (aggregates is None):
        missing = "--aggregates" if aggregates is None else "--composition"
        raise MobatlasError(f"{missing}: is missing; composition and aggregates tell of the same regions, so give both")
    for option, path in {"visits": visits, "composition": composition, "aggregates": aggregates}.items():
        if path is not None and not path.exists():
            raise MobatlasError(f"--{option} {path}: does not exist; give the file that holds them")
    seen = None if visits is None else _look(visits)
    lines = [*_head(), *_source(seen, out.parent), *_regions(composition, aggregates, out.parent), *_rest()]
    with only_writer(out):
        write_whole(out, ("\n".join(lines) + "\n").encode())
    found = []
    if seen is not None:
        found.append(f"{seen.path}: {seen.rows:,} visits of {seen.people:,} people over {seen.days:,} days")
    return [*found, f"{out}: written; look through it, then: mobatlas run {out}"]


def _look(path: Path) -> _Visits:
    """Read a table of visits; only what is needed of it."""
    table = _table_of(path)
    reader = "read_parquet" if table.suffix == ".parquet" else "read_csv"
    with duckdb.connect() as engine:
        try:
            described = engine.execute(f"DESCRIBE SELECT * FROM {reader}(?)", [str(table)]).fetchall()
        except duckdb.Error as error:
            raise MobatlasError(
                f"{table}: cannot be read ({str(error).splitlines()[0]}); give Parquet or CSV"
            ) from None
        columns = tuple(str(row[0]) for row in described)
        missing = [name for name in REQUIRED if name not in columns]
        if missing:
            raise MobatlasError(
                f"{table}: has no column '{missing[0]}'; rename its columns, or set `source.format` to the layout that it has"
            )
        query = f"""
            WITH visits AS (SELECT user_id, CAST(arrival AS TIMESTAMP) AS arrival FROM {reader}(?)),
                 people AS (SELECT user_id, count(DISTINCT arrival::DATE) AS days FROM visits GROUP BY user_id)
            SELECT (SELECT count(*) FROM visits), (SELECT count(*) FROM people), (SELECT median(days) FROM people),
                   (SELECT date_diff('day', min(arrival), max(arrival)) + 1 FROM visits)
            """
        try:
            facts = engine.execute(query, [str(table)]).fetchone()
        except duckdb.Error as error:
            raise MobatlasError(
                f"{table}: column 'arrival' holds no times ({str(error).splitlines()[0]}); write them as 2024-03-04 08:00"
            ) from None
    assert facts is not None
    rows, people, each, days = facts
    if not rows:
        raise MobatlasError(f"{table}: holds no visits, it has no rows; give a table with some")
    return _Visits(path, int(rows), int(people), int(days or 0), float(each or 0), columns)


def _table_of(path: Path) -> Path:
    if path.is_file():
        return path
    for name in ("visits.parquet", "visits.csv"):
        if (path / name).exists():
            return path / name
    raise MobatlasError(
        f"{path}: has neither visits.parquet nor visits.csv; give the file itself, or set `source.format`"
    )


def _head() -> list[str]:
    return [
        "# A run of mobatlas: mobatlas run THIS_FILE --out FOLDER. Paths are relative to this file. Every value has a default;",
        "# what is misspelt is refused with the name that was meant.",
        "title: Synthetic mobility by group",
        "preset: small  # or paper, for GPUs",
        "seed: 0",
        "",
    ]


def _source(seen: _Visits | None, home: Path) -> list[str]:
    if seen is None:
        return [
            "# Your visits: Parquet or CSV with user_id, poi_id, lat, lon, arrival and, if known, departure, category, is_home",
            "# and is_work; or a folder with tables visits, people and pois. Without it a city is simulated.",
            "# source: {path: visits.parquet, format: plain}",
            "simulate: {users: 4000, pois: 240}",
            "",
        ]
    window = _window(seen)
    lines = [
        f"# {seen.rows:,} visits of {seen.people:,} people over {seen.days:,} days; half of them are seen on at least "
        f"{seen.days_each:g} of them.",
        f"source: {{path: {_quoted(seen.path, home)}, format: plain}}",
        "prepare:",
        f"  window: {{days: {window}, stride: {window}}}  # a trajectory is what a person does in so many days",
    ]
    if "departure" not in seen.columns or window == 1:
        reason = (
            "a diary covers its day"
            if window == 1
            else "without departures nobody knows how much of a day was observed"
        )
        lines.append(f"  quality: {{min_coverage: 0}}  # {reason}")
    lines.append("  anchors: {require_both: false}  # true: only people with a home and a workplace")
    return [*lines, ""]


def _window(seen: _Visits) -> int:
    """A day for a diary, three days for a few weeks, two weeks for what is longer."""
    if seen.days_each < 3:
        return 1
    return 3 if seen.days_each <= A_MONTH else 14


def _regions(composition: Path | None, aggregates: Path | None, home: Path) -> list[str]:
    if composition is None or aggregates is None:
        return [
            "# How regions are known, one or several ways: two published tables, a column of people, or (of labelled people) a",
            "# controlled partition: demogroups, fullrank, hot16, rankdef, messy.",
            "regions:",
            "  # census: {composition: census.csv, aggregates: visits_by_region.csv}",
            "  # districts: {by: home_district}",
            "  hot16: {partition: hot16}",
            "",
        ]
    both = f"composition: {_quoted(composition, home)}, aggregates: {_quoted(aggregates, home)}"
    return ["regions:", f"  census: {{{both}}}", ""]


def _rest() -> list[str]:
    return [
        "train:",
        "  generator: autoregressive  # learns fastest; the paper's is latent-diffusion",
        "  options: {}  # of the generator, e.g. {training: {steps: 3000}}",
        "supervise:",
        "  strategy: auto  # tilt, resample or finetune",
        "  membership: false  # true: begin from the composition of each person's own region",
        "  options: {}  # e.g. {teaching: {steps: 1500}, calibration: {pool: 4096}}",
        "# strong: true  # also the labelled upper bound, where people have labels",
        "audit: true  # also what the samples give away of training people",
        "samples:",
        "  each: 500  # trajectories of each group",
        "  # coarsen: 3km  # homes and workplaces move at random within it; the audit says whether that is enough",
    ]


def _quoted(path: Path, home: Path) -> str:
    """As YAML takes it, relative to the configuration where that is shorter."""
    try:
        shown = path.resolve().relative_to(home.resolve()).as_posix()
    except ValueError:
        shown = path.resolve().as_posix()
    return "'" + shown.replace("'", "''") + "'"
