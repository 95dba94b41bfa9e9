"""A labelled survey as benchmarks use it: those who train, and those of another kind of day, each prepared once."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from mobatlas.config import merge
from mobatlas.data.dataset import TrajectoryDataset
from mobatlas.data.prepare.engine import parquet_schema
from mobatlas.data.prepare.pipeline import prepare
from mobatlas.data.schema import (
    ATTRIBUTE_NAMES,
    PEOPLE_REQUIRED,
    VISITS_REQUIRED,
    looks_like_region,
)
from mobatlas.errors import MobatlasError, suggestion
from mobatlas.io.manifest import file_hash, read_parquet, write_json
from mobatlas.io.output import refuse_overlap
from mobatlas.io.tables import require_columns
from mobatlas.regions.composition import read_composition

DIARY: dict[str, Any] = {
    "window": {"days": 1, "stride": 1},
    "quality": {"min_coverage": 0},
    "anchors": {"require_both": False},
    "vocabulary_size": 2_000,
}
WEEKDAY = "weekday"
# In the folder of a benchmark: those who train, the others, their tables, and whom it was begun with.
DATASET, SHIFT, SOURCES, BEGUN = "dataset", "shift", "sources", "survey.json"
REQUIRED = {"people": PEOPLE_REQUIRED, "visits": VISITS_REQUIRED}


def check_survey(
    source: Path,
    regions: Sequence[str] = (),
    prepared: Mapping[str, Any] | None = None,
    census: Path | None = None,
) -> None:
    """Refuse what is no labelled survey, or has not these columns, before anything is written."""
    if census is not None and not census.is_file():
        raise MobatlasError(
            f"--census {census}: is no file; give a table of people by region, age and gender"
        )
    people = _table(source, "people")
    schema = parquet_schema(people)
    named = (prepared or {}).get("attributes")
    if named is None and not any(name.lower() in ATTRIBUTE_NAMES for name in schema.names):
        raise MobatlasError(
            f"{people}: has no attribute of people ({', '.join(ATTRIBUTE_NAMES)}), so that nobody's group is known; "
            "give a labelled dataset"
        )
    _table(source, "visits")
    for name in regions:
        if name not in schema.names:
            known = region_columns(source)
            raise MobatlasError(
                f"--regions {name}: {people} has no such column{suggestion(name, known)} "
                f"(regions: {', '.join(known) or 'none'})"
            )


def region_columns(source: Path) -> list[str]:
    """Columns of people that look like regions, as `prepare` takes them for."""
    return [
        name for name in parquet_schema(source / "people.parquet").names if looks_like_region(name)
    ]


def said_files(source: Path, census: Path | None) -> tuple[str, str | None]:
    """How a result names its files: without the way to them on this machine."""
    name = source.absolute().name
    if census is None:
        return name, None
    return (
        name,
        f"{name}/{census.name}" if census.absolute().parent == source.absolute() else census.name,
    )


def divided_people(
    source: Path, out: Path, shift: str | None = None, prepared: Mapping[str, Any] | None = None
) -> tuple[Path, Path | None]:
    """The dataset to train on, and that of those who do not train, None where nobody is marked; made if they are not there."""
    refuse_overlap(source, out)
    column, values = _shift_column(source, shift), merge(DIARY, prepared or {})
    with _begun(source, out, {"shift": column, "prepared": values}):
        return _prepared(source, out, column, values)


def _prepared(
    source: Path, out: Path, column: str | None, values: Mapping[str, Any]
) -> tuple[Path, Path | None]:
    parts = {DATASET: source} if column is None else _divided(source, out, column)
    made = {}
    for name, part in parts.items():
        made[name] = out / name
        # Whatever place those who do not train visit is known by its name, and it is the vocabulary of the others that counts.
        own = values if name == DATASET else merge(values, {"vocabulary_size": 1_000_000})
        if not made[name].exists():
            prepare(part, made[name], values=own)
    return made[DATASET], made.get(SHIFT)


def census_column(dataset: TrajectoryDataset, columns: Sequence[str], census: Path) -> str:
    """The column most of whose regions the census knows."""
    known = set(read_composition(census, dataset.groups, straddle="uniform").regions)
    shared = {name: len(known & set(dataset.people[name].unique().to_pylist())) for name in columns}
    best = max(shared, key=lambda name: shared[name])
    if not shared[best]:
        raise MobatlasError(
            f"--census {census}: has no region of {', '.join(columns)}; write the ids the same way in both"
        )
    return best


@contextmanager
def _begun(source: Path, out: Path, manner: Mapping[str, Any]) -> Iterator[None]:
    """A folder goes on with the people that it was begun with; people who are refused begin none."""
    if out.exists() and not out.is_dir():
        raise MobatlasError(f"--out {out}: is a file; give a folder to fill")
    files = {
        path.name: file_hash(path)
        for path in sorted(source.glob("*.parquet"))
        if path.stem in ("people", "visits")
    }
    mine = json.loads(json.dumps({"files": files, **manner}, default=str))
    kept = out / BEGUN
    if kept.exists() and json.loads(kept.read_text(encoding="utf-8")) != mine:
        raise MobatlasError(
            f"{out}: was begun with other people than --data {source}; choose another --out"
        )
    new, first = not out.exists(), not kept.exists()
    missing = [out / name for name in (SOURCES, DATASET, SHIFT) if not (out / name).exists()]
    out.mkdir(parents=True, exist_ok=True)
    write_json(kept, mine)
    try:
        yield
    except MobatlasError:
        for path in missing if first else ():
            shutil.rmtree(path, ignore_errors=True)
        if first:
            kept.unlink()
        if new:
            shutil.rmtree(out)  # with locks and whatever else was written since
        raise


def _shift_column(source: Path, asked: str | None) -> str | None:
    """The column that marks who does not train; None where all do."""
    people = _table(source, "people")
    schema = parquet_schema(people)
    if asked is not None and asked not in schema.names:
        raise MobatlasError(
            f"--shift {asked}: {people} has no such column{suggestion(asked, schema.names)}"
        )
    column = asked or WEEKDAY
    if column not in schema.names or not pa.types.is_boolean(schema.field(column).type):
        if asked is not None:
            raise MobatlasError(
                f"--shift {asked}: is no column of true and false in {people}; make it one"
            )
        return None
    marked = read_parquet(people, [column])[column]
    if not pc.any(marked).as_py():
        raise MobatlasError(
            f"--shift {column}: is true for nobody in {people}, so that nobody would train; mark those who do"
        )
    return None if pc.all(marked).as_py() else column


def _table(source: Path, name: str) -> Path:
    """People, or visits: refused where it is not there, not readable, or empty."""
    if not source.is_dir():
        what = (
            "is a file; give its folder"
            if source.exists()
            else "does not exist; give a folder of labelled people"
        )
        raise MobatlasError(f"--data {source}: {what}")
    path = source / f"{name}.parquet"
    if not path.is_file():
        raise MobatlasError(
            f"--data {source}: has no {path.name}; give labelled people.parquet and visits.parquet"
        )
    try:
        require_columns(str(path), parquet_schema(path).names, REQUIRED[name])
        rows = pq.read_metadata(path).num_rows
    except (pa.ArrowInvalid, OSError):
        raise MobatlasError(f"{path}: is damaged; write it anew as Parquet") from None
    if not rows:
        raise MobatlasError(f"{path}: the table has no rows; give a labelled dataset")
    return path


def _divided(source: Path, out: Path, column: str) -> dict[str, Path]:
    """The tables of those who are marked and of the others, written once."""
    parts = {}
    for name, condition in ((DATASET, "{}"), (SHIFT, "NOT {}")):
        folder = parts[name] = out / SOURCES / name
        if folder.exists():
            continue
        partial = folder.with_name(f".{name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        try:
            _write_some(source, partial, condition.format(f'"{column}"'))
        except (
            duckdb.InvalidInputException,
            duckdb.ConversionException,
            duckdb.BinderException,
        ) as error:
            reason = str(error).splitlines()[0]
            raise MobatlasError(
                f"--data {source}: people.parquet or visits.parquet cannot be read ({reason}); write them anew"
            ) from None
        partial.rename(folder)
    return parts


def _write_some(source: Path, out: Path, condition: str) -> None:
    """People for whom a condition holds, and their visits."""
    people, visits = (f"{table}.parquet" for table in ("people", "visits"))
    with duckdb.connect() as connection:
        connection.read_parquet(str(source / people)).filter(condition).write_parquet(
            str(out / people)
        )
        ids = connection.read_parquet(str(out / people)).project("user_id")
        theirs = connection.read_parquet(str(source / visits)).join(ids, "user_id", how="semi")
        theirs.write_parquet(str(out / visits))
