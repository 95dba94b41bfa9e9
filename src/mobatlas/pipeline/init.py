"""Write a first configuration for `mobatlas run` from a user's files."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined

from mobatlas.config import DEFAULT_GENERATOR, RunConfig, build_run
from mobatlas.data.types import ANCHORS, ATTRIBUTE_NAMES, looks_like_region
from mobatlas.errors import refuse_faults, suggestion
from mobatlas.io.manifest import write_atomic
from mobatlas.io.output import lock_output
from mobatlas.io.tables import find_table
from mobatlas.pipeline.check import Check, check_run, days_of_visits
from mobatlas.regions.patterns import column_names
from mobatlas.regions.periods import infer_window, period_days

TEMPLATE = "configuration.yaml.j2"
CHECKED = "census"  # the name of the regions in the configuration


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
    home_panel: Path | None = None
    per: Mapping[str, str] = field(default_factory=dict)  # by file name
    rename: Mapping[str, str] = field(default_factory=dict)  # expected name: name in a table

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
            "--home-panel": self.home_panel,
        }
        lists = {"--composition": self.census, "--group-table": self.group_tables}
        return [
            *((option, path) for option, path in single.items() if path is not None),
            *((option, path) for option, paths in lists.items() for path in paths),
        ]


@dataclass(frozen=True)
class _Window:
    """Days of a trajectory, and the reason in words."""

    days: int
    reason: str
    periods: Mapping[str, tuple[str, str]] = field(default_factory=dict)  # that were found


def write_configuration(
    out: Path, files: InputFiles, *, overwrite: bool = False
) -> dict[str, Any]:
    """Check all tables, write the YAML file, and return what was found.

    The periods of the visits and of the published tables are inferred. All problems are refused at
    once.
    """
    refuse_faults(
        {
            f"--out {out}: this is a folder; give the name of a YAML file": out.is_dir(),
            f"{out}: this file exists already; choose another name, or pass --overwrite": (
                out.exists() and not overwrite
            ),
        }
    )
    sources = _source_tables(files.visits)
    people = sources.get("people")
    columns = column_names(people) if people is not None else []
    problems = [*_problems(files, people, columns)]
    write = partial(_render, files, sources, columns, out.parent)
    window = _Window(1, "")
    facts: dict[str, Any] = {}
    for _ in range(2 if files.visits is not None else 0):
        # first with windows of a day, to find the window that suits the visits
        with check_run(
            _parse(write(window)),
            out.parent,
            infer=True,
            build=not problems,
            span=facts.get("days"),
        ) as check:
            check.problems = problems + check.problems
            if not facts and check.dataset is not None:
                window = _infer_window(check, files.aggregates)
            else:
                check.raise_problems()
                window = replace(window, periods=check.periods)
            facts = check.as_dict()
    text = write(window)
    config = _parse(text)  # before it is written
    with lock_output(out):
        write_atomic(out, text.encode())
    return facts | {"out": str(out), "window": {"days": window.days, "reason": window.reason}}


def _infer_window(check: Check, aggregates: Path | None) -> _Window:
    """The window that suits the visits, read as windows of a day, and the aggregates."""
    assert check.dataset is not None
    span, days_per_person = days_of_visits(check.dataset)
    days = [built.regions.details.get("days") for built in check.regions.values()]
    if aggregates is not None and aggregates.name in check.periods:
        days = [period_days("", check.periods[aggregates.name][0], 1)]
    return _Window(*infer_window(span, days_per_person, next(filter(None, days), None)))


def _source_tables(visits: Path | None) -> dict[str, Path]:
    """The tables of visits, people and places, by name."""
    if visits is None or not visits.is_dir():
        return {} if visits is None else {"visits": visits}
    found = {name: find_table(visits, name) for name in ("visits", "people", "pois")}
    return {name: path for name, path in found.items() if path is not None}


def _render(
    files: InputFiles,
    sources: Mapping[str, Path],
    columns: Sequence[str],
    base: Path,
    window: _Window,
) -> str:
    """The configuration as YAML with comments."""
    engine = Environment(
        loader=PackageLoader("mobatlas.pipeline", "."),
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    engine.filters["word"] = _quote
    # `prepare` recognises region columns by name; other columns must be listed.
    listed = files.by is not None and not looks_like_region(files.by)
    names = {name for path in sources.values() if path.exists() for name in column_names(path)}
    rename = {name: theirs for name, theirs in files.rename.items() if theirs in names}
    has_departure = "departure" in ({*names} - {*rename.values()} | {*rename})
    page = engine.get_template(TEMPLATE).render(
        files=files,
        visits=None if files.visits is None else _quote_path(files.visits, base),
        generator=DEFAULT_GENERATOR,
        window=window,
        has_departure=has_departure,
        rename=_quote_mapping(rename),
        regions=_regions(files, base),
        periods={
            _quote(name): (_quote(period), reason)
            for name, (period, reason) in window.periods.items()
        }
        | {_quote(name): (_quote(period), "") for name, period in files.per.items()},
        region_columns=[*filter(looks_like_region, columns), files.by] if listed else [],
    )
    return page.rstrip() + "\n"


def _regions(files: InputFiles, base: Path) -> dict[str, str]:
    """The keys of the regions in YAML, without periods."""
    paths = {
        "composition": files.census,
        "aggregates": files.aggregates,
        "home_panel": files.home_panel,
        "labelled": files.labelled,
    }
    texts = {
        key: _quote_paths((value,) if isinstance(value, Path) else value, base)
        for key, value in paths.items()
        if value
    }
    if files.group_tables:
        texts["group_tables"] = f"[{', '.join(_quote_path(each, base) for each in files.group_tables)}]"
    if files.by is not None:
        texts["by"] = _quote(files.by)
    if not {"by", "composition", "aggregates"} & texts.keys():
        texts["partition"] = "hot16"
    if files.rename:
        texts["rename"] = _quote_mapping(files.rename)
    return texts


def _parse(text: str) -> RunConfig:
    return build_run(yaml.safe_load(text))


def _problems(files: InputFiles, people: Path | None, columns: Sequence[str]) -> Iterator[str]:
    """Paths that do not exist, options that do not fit together, columns that are not regions."""
    by = files.by
    region_columns = list(filter(looks_like_region, columns))
    example = f", such as {' or '.join(region_columns)}" if region_columns else ""
    attributes = [name for name in columns if name.lower() in ATTRIBUTE_NAMES]
    alone = by is None and not files.composition and files.aggregates is None
    faults = {
        f"{option} {path}: this path does not exist; check it": not path.exists()
        for option, path in files.all_paths()
    } | {
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
        f"(columns: {', '.join(columns)})": (
            by is not None and people is not None and by not in columns
        ),
        f"--by {by}: this is not a column of regions; give the column with each person's region"
        f"{example}": (by == "user_id" or by in ANCHORS or by in attributes),
        f"--composition is missing; give it, because {people} has no attributes (age, gender) "
        "to count it from": (
            by is not None and not files.composition and people is not None and not attributes
        ),
        "--composition is missing; the people of these visits have no attributes (age, gender), "
        f"so give a census with --aggregates, or with --by and a region column{example}": (
            alone and files.visits is not None and files.visits.exists() and not attributes
        ),
    }
    yield from (sentence for sentence, applies in faults.items() if applies)


def _quote_path(path: Path, base: Path) -> str:
    """A YAML string, relative to the configuration if the path is below it."""
    absolute = path.resolve()
    below = absolute.is_relative_to(base.resolve())
    return _quote((absolute.relative_to(base.resolve()) if below else absolute).as_posix())


def _quote_paths(paths: Sequence[Path], base: Path) -> str:
    """One YAML string, or a list of several."""
    texts = [_quote_path(path, base) for path in paths]
    return texts[0] if len(texts) == 1 else f"[{', '.join(texts)}]"


def _quote_mapping(texts: Mapping[str, str]) -> str:
    pairs = (f"{_quote(name)}: {_quote(text)}" for name, text in texts.items())
    return f"{{{', '.join(pairs)}}}" if texts else ""


def _quote(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
