"""Check a user's tables and write a first configuration for `mobatlas run`."""

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined

from mobatlas.config import DEFAULT_GENERATOR, RegionsConfig, build_run
from mobatlas.data.types import ANCHORS, ATTRIBUTE_NAMES, looks_like_region
from mobatlas.errors import refuse_faults, suggestion
from mobatlas.io.manifest import write_atomic
from mobatlas.io.output import lock_output
from mobatlas.io.tables import find_table
from mobatlas.pipeline.check import Check, check_run
from mobatlas.pipeline.run import region_files
from mobatlas.regions.patterns import column_names
from mobatlas.regions.periods import infer_window, period_days

TEMPLATE = "configuration.yaml.j2"


def write_configuration(
    out: Path, visits: Path | None, source: RegionsConfig, *, overwrite: bool = False
) -> dict[str, Any]:
    """Check all tables, write a YAML file, and return what the tables hold.

    The window, and the periods of published tables, are inferred. All problems are refused at once.

    Parameters
    ----------
    out
        The YAML file.
    visits
        A table of visits, or a folder with visits, people and pois; without it, the configuration
        has a simulated city, and tables are not checked.
    source
        The other tables. Its renamed columns may be those of the visits.
    overwrite
        Replace an existing file.
    """
    tables = _source_tables(visits)
    columns = {name: column_names(path) for name, path in tables.items()}
    problems = [*_problems(visits, source, tables.get("people"), columns.get("people", []))]
    refuse_faults(
        {
            f"--out {out}: this is a folder; give the name of a YAML file": out.is_dir(),
            f"{out}: this file exists already; choose another name, or pass --overwrite": (
                out.exists() and not overwrite
            ),
        }
        | dict.fromkeys(problems if visits is None else (), True)
    )
    render = partial(_render, visits, source, columns, out.parent)
    # Days of a window, and the reason in words: first to see which window suits the visits.
    window: tuple[int, str] = (1, "")
    facts: dict[str, Any] = {}
    for _ in range(0 if visits is None else 2):
        config = build_run(yaml.safe_load(render(window, {})))
        with check_run(config, out.parent, problems, facts.get("days", 1)) as check:
            if facts or problems or check.dataset is None:
                check.raise_problems()
                facts = check.as_dict() | {"window": {"days": window[0], "reason": window[1]}}
            else:
                window, days = _infer_window(check, source.aggregates)
                facts = {"days": days}
    text = render(window, facts.get("periods", {}))
    with lock_output(out):
        write_atomic(out, text.encode())
    return facts


def _infer_window(check: Check, aggregates: Path | None) -> tuple[tuple[int, str], int]:
    """The window that suits aggregates and visits, read with 1-day windows; days of the visits."""
    assert check.dataset is not None
    first_days = check.dataset.first_days
    span = int(first_days.max() - first_days.min()) + 1
    days = [built.regions.details.get("days") for built in check.regions.values()]
    if aggregates is not None and aggregates.name in check.periods:
        days = [period_days("", check.periods[aggregates.name][0], 1)]
    per_person = float(np.median(np.bincount(check.dataset.person)))
    return infer_window(span, per_person, next(filter(None, days), None)), span


def _source_tables(visits: Path | None) -> dict[str, Path]:
    """The tables of visits, people and places, by name."""
    if visits is None or not visits.is_dir():
        return {"visits": visits} if visits is not None and visits.exists() else {}
    found = {name: find_table(visits, name) for name in ("visits", "people", "pois")}
    return {name: path for name, path in found.items() if path is not None}


def _render(
    visits: Path | None,
    source: RegionsConfig,
    columns: Mapping[str, Sequence[str]],
    base: Path,
    window: tuple[int, str],
    periods: Mapping[str, tuple[str, str]],
) -> str:
    """The configuration as YAML with comments."""
    engine = Environment(
        loader=PackageLoader("mobatlas.pipeline", "."),
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    engine.filters["json"] = partial(json.dumps, ensure_ascii=False)  # JSON is YAML
    names = {name for each in columns.values() for name in each}
    rename = {name: theirs for name, theirs in source.rename.items() if theirs in names}
    # `prepare` recognises region columns by name; other columns must be listed.
    people = {*columns.get("people", ())} - {*ATTRIBUTE_NAMES}
    listed = source.by in people and not looks_like_region(str(source.by))
    page = engine.get_template(TEMPLATE).render(
        visits=_plain(visits, base),
        generator=DEFAULT_GENERATOR,
        window=window,
        has_departure="departure" in names | {*rename},
        rename=rename,
        regions={
            key: _plain(value, base)
            for key, value in source.model_dump(exclude_defaults=True, exclude={"per"}).items()
        },
        periods={name: (period, "") for name, period in source.per.items()} | dict(periods),
        region_columns=[*filter(looks_like_region, people), source.by] if listed else [],
    )
    return page.rstrip() + "\n"


def _plain(value: Any, base: Path) -> Any:
    """A value for YAML; a path is relative to the configuration if it is below it."""
    if isinstance(value, tuple):
        return [_plain(each, base) for each in value]
    if not isinstance(value, Path):
        return value
    absolute, root = value.resolve(), base.resolve()
    return (absolute.relative_to(root) if absolute.is_relative_to(root) else absolute).as_posix()


def _problems(
    visits: Path | None, source: RegionsConfig, people: Path | None, columns: Sequence[str]
) -> Iterator[str]:
    """Paths that do not exist, options that do not fit together, columns that are not regions."""
    by, census, published = source.by, source.composition is not None, source.aggregates is not None
    region_columns = list(filter(looks_like_region, columns))
    example = f", such as {' or '.join(region_columns)}" if region_columns else ""
    attributes = [name for name in columns if name.lower() in ATTRIBUTE_NAMES]
    faults = {
        f"--{key.replace('tables', 'table').replace('_', '-')} {path}: "
        "this path does not exist; check it": (not path.exists())
        for key, paths in {"visits": visits and (visits,), **region_files(source)}.items()
        for path in paths or ()
    } | {
        "--composition is missing; aggregates need the composition of the same regions": (
            by is None and published and not census
        ),
        "--aggregates is missing; give the aggregates of the same regions. To count them from "
        f"your visits instead, pass --by with the region column of people{example}": (
            by is None and census and not published
        ),
        f"--by {by} counts aggregates from your visits, but --aggregates gives them too; "
        "remove one of the two": by is not None and published,
        f"--by {by} needs a table of people; give --visits, a folder with the tables "
        "visits and people": by is not None and people is None,
        f"{people}: the table has no column '{by}'{suggestion(by or '', columns)} "
        f"(columns: {', '.join(columns)})": (
            by is not None and people is not None and by not in columns
        ),
        f"--by {by}: this is not a column of regions; give the column with each person's region"
        f"{example}": by == "user_id" or by in ANCHORS or by in attributes,
        f"--composition is missing; give it, because {people or visits} has no attributes (age, "
        "gender) to count it from": (
            not census and not published and visits is not None and not attributes
        ),
    }
    yield from (sentence for sentence, applies in faults.items() if applies)
