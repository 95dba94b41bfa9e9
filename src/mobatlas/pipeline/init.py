"""A first configuration from a user's files: what was found in them stands beside what it leads to."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import duckdb

from mobatlas.data.schema import ANCHORS, ATTRIBUTE_NAMES, looks_like_region
from mobatlas.errors import MobatlasError, suggestion
from mobatlas.io.manifest import write_whole
from mobatlas.io.output import only_writer
from mobatlas.io.tables import find_table

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


@dataclass(frozen=True)
class _People:
    """A table of people beside visits."""

    path: Path | None
    columns: tuple[str, ...]

    @property
    def regions(self) -> tuple[str, ...]:
        """Columns that say where people live, by their names."""
        return tuple(filter(looks_like_region, self.columns))


@dataclass(frozen=True)
class _Known:
    """How regions are known: by two tables, or by the column of people that names theirs, with a census or without."""

    composition: Path | None
    aggregates: Path | None
    by: str | None


def write_configuration(
    out: Path,
    visits: Path | None,
    composition: Path | None,
    aggregates: Path | None,
    by: str | None = None,
    *,
    overwrite: bool = False,
) -> list[str]:
    """Write the YAML file; what to say of it."""
    if out.is_dir():
        raise MobatlasError(f"--out {out}: is a folder; give the name of a YAML file")
    if out.exists() and not overwrite:
        raise MobatlasError(f"{out}: exists already; choose another name, or pass --overwrite")
    for option, path in {
        "visits": visits,
        "composition": composition,
        "aggregates": aggregates,
    }.items():
        if path is not None and not path.exists():
            raise MobatlasError(f"--{option} {path}: does not exist; give the file that holds them")
    known = _Known(composition, aggregates, by)
    people = _people_beside(visits)
    _refuse_unusable(known, people)
    seen = None if visits is None else _look(visits)
    lines = [
        *_head(),
        *_source(seen, out.parent),
        *_named(by, people),
        "",
        *_regions(known, out.parent),
        *_rest(),
    ]
    with only_writer(out):
        write_whole(out, ("\n".join(lines) + "\n").encode())
    found = []
    if seen is not None:
        found.append(
            f"{seen.path}: {seen.rows:,} visits of {seen.people:,} people over {seen.days:,} days"
        )
    if by is None and composition is None and people.regions:
        found.append(
            f"regions: a controlled partition, which reads labels; --by {people.regions[0]} takes real ones"
        )
    return [*found, f"{out}: written; look through it, then: mobatlas run {out}"]


def _refuse_unusable(known: _Known, people: _People) -> None:
    """Tables that do not go together, and a column that names nobody's region."""
    such = f", such as {' or '.join(people.regions)}" if people.regions else ""
    if known.by is None:
        if known.composition is None and known.aggregates is not None:
            raise MobatlasError(
                "--composition: is missing; composition and aggregates tell of the same regions, so give both"
            )
        if known.composition is not None and known.aggregates is None:
            raise MobatlasError(
                "--aggregates: is missing; composition and aggregates tell of the same regions, so give both, or --by, the "
                f"column of people that names their region{such}, and your visits are counted by it"
            )
        return
    if known.aggregates is not None:
        raise MobatlasError(
            f"--by {known.by}: counts your visits by region, which --aggregates tells already; leave one out"
        )
    if people.path is None:
        raise MobatlasError(
            f"--by {known.by}: is a column of people; give --visits, a folder with visits and people"
        )
    if known.by not in people.columns:
        raise MobatlasError(
            f"{people.path}: has no column '{known.by}' to count by{suggestion(known.by, people.columns)} "
            f"(columns: {', '.join(people.columns)})"
        )
    if known.by == "user_id" or known.by in ANCHORS or known.by.lower() in ATTRIBUTE_NAMES:
        raise MobatlasError(
            f"--by {known.by}: is no region; name the column that says where people live{such}"
        )
    if known.composition is None and not any(
        name.lower() in ATTRIBUTE_NAMES for name in people.columns
    ):
        raise MobatlasError(
            f"--composition: is missing; {people.path} has no attributes (age, gender) to count a composition by"
        )


def _people_beside(visits: Path | None) -> _People:
    """The table of people in a folder of visits, where there is one."""
    table = find_table(visits, "people") if visits is not None and visits.is_dir() else None
    if table is None:
        return _People(None, ())
    with duckdb.connect() as engine:
        return _People(table, _columns(engine, table))


def _columns(engine: duckdb.DuckDBPyConnection, table: Path) -> tuple[str, ...]:
    try:
        described = engine.execute(
            f"DESCRIBE SELECT * FROM {_reader(table)}(?)", [str(table)]
        ).fetchall()
    except duckdb.Error as error:
        raise MobatlasError(
            f"{table}: cannot be read ({str(error).splitlines()[0]}); give Parquet or CSV"
        ) from None
    return tuple(str(row[0]) for row in described)


def _reader(table: Path) -> str:
    return "read_parquet" if table.suffix == ".parquet" else "read_csv"


def _look(path: Path) -> _Visits:
    """Read a table of visits; only what is needed of it."""
    table = _table_of(path)
    reader = _reader(table)
    with duckdb.connect() as engine:
        columns = _columns(engine, table)
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
    found = path if path.is_file() else find_table(path, "visits")
    if found is None:
        raise MobatlasError(
            f"{path}: has neither visits.parquet nor visits.csv; give the file itself, or set `source.format`"
        )
    return found


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
    lines.append(
        "  anchors: {require_both: false}  # true: only people with a home and a workplace"
    )
    return lines


def _named(by: str | None, people: _People) -> list[str]:
    """Region columns, where one does not look like it by its name; what is named replaces the guess."""
    if by is None or looks_like_region(by):
        return []
    columns = ", ".join(map(_word, (*people.regions, by)))
    return [f"  regions: [{columns}]  # columns of people that say where they live"]


def _window(seen: _Visits) -> int:
    """A day for a diary, three days for a few weeks, two weeks for what is longer."""
    if seen.days_each < 3:
        return 1
    return 3 if seen.days_each <= A_MONTH else 14


def _regions(known: _Known, home: Path) -> list[str]:
    files = {"composition": known.composition, "aggregates": known.aggregates}
    told = [f"{name}: {_quoted(path, home)}" for name, path in files.items() if path is not None]
    if known.by is None and not told:
        return [
            "# How regions are known, one or several ways: two published tables, a column of people, or (of labelled people) a",
            "# controlled partition: demogroups, fullrank, hot16, rankdef, messy.",
            "regions:",
            "  # census: {composition: census.csv, aggregates: visits_by_region.csv}",
            "  # districts: {by: home_district}",
            "  hot16: {partition: hot16}",
            "",
        ]
    if known.by is None:
        return ["regions:", f"  census: {{{', '.join(told)}}}", ""]
    column = f"by: {_word(known.by)}"
    if not told:
        return [
            "# Without a census the composition is that of half of your labelled people.",
            "regions:",
            f"  homes: {{{column}}}",
            "",
        ]
    return [
        "# What people of a region do is counted on your visits. `straddle: uniform` splits ages of the census that your",
        "# groups divide, evenly over their years.",
        "regions:",
        f"  census: {{{column}, {', '.join(told)}}}",
        "",
    ]


def _rest() -> list[str]:
    return [
        "train:",
        "  generator: autoregressive  # learns fastest; the paper's is latent-diffusion",
        "  options: {}  # of the generator, e.g. {training: {steps: 3000}}",
        "supervise:",
        "  strategy: auto  # tilt, resample or finetune",
        "  membership: false  # true: begin from the composition of each person's own region",
        "  options: {}  # e.g. {weighted_fit: {steps: 1500}, calibration: {pool: 4096}}",
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
    return _word(shown)


def _word(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
