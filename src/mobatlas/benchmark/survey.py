"""A labelled survey as benchmarks use it: those who train, and those of another kind of day, each prepared once."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.compute as pc

from mobatlas.artifacts import file_hash, read_parquet, write_json
from mobatlas.config import merge
from mobatlas.data.dataset import TrajectoryDataset
from mobatlas.data.engine import parquet_schema
from mobatlas.data.prepare import prepare
from mobatlas.data.schema import ATTRIBUTE_NAMES
from mobatlas.errors import MobatlasError, suggestion
from mobatlas.regions.composition import read_composition

DIARY: dict[str, Any] = {
    "window": {"days": 1, "stride": 1},
    "quality": {"min_coverage": 0},
    "anchors": {"require_both": False},
    "vocabulary_size": 2_000,
}
SHIFT, WEEKDAY = "shift", "weekday"
BEGUN = "survey.json"  # in the folder of a benchmark: whom it was begun with


def check_survey(
    source: Path,
    regions: Sequence[str] = (),
    prepared: Mapping[str, Any] | None = None,
    census: Path | None = None,
) -> None:
    """Refuse what is no labelled survey, or has not these columns, before anything is written."""
    if census is not None and not census.is_file():
        raise MobatlasError(f"--census {census}: is no file; give a table of people by region, age and gender")
    schema = parquet_schema(_people(source))
    named = (prepared or {}).get("attributes")
    if named is None and not any(name.lower() in ATTRIBUTE_NAMES for name in schema.names):
        raise MobatlasError(
            f"{_people(source)}: has no attribute of people ({', '.join(ATTRIBUTE_NAMES)}), so that nobody's group is known; "
            "give a labelled dataset"
        )
    for name in regions:
        if name not in schema.names:
            raise MobatlasError(
                f"--regions {name}: {_people(source)} has no such column{suggestion(name, schema.names)}"
            )


def divided_people(
    source: Path, out: Path, shift: str | None = None, prepared: Mapping[str, Any] | None = None
) -> tuple[Path, Path | None]:
    """The dataset to train on, and that of those who do not train, None where nobody is marked; made if they are not there."""
    column, values = _shift_column(source, shift), merge(DIARY, prepared or {})
    _refuse_others(source, out, {"shift": column, "prepared": values})
    parts = {"dataset": source} if column is None else _divided(source, out, column)
    made = {}
    for name, part in parts.items():
        made[name] = out / name
        # Whatever place those who do not train visit is known by its name, and it is the vocabulary of the others that counts.
        own = values if name == "dataset" else merge(values, {"vocabulary_size": 1_000_000})
        if not made[name].exists():
            prepare(part, made[name], values=own)
    return made["dataset"], made.get(SHIFT)


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


def _refuse_others(source: Path, out: Path, manner: Mapping[str, Any]) -> None:
    """A folder goes on with the people that it was begun with."""
    files = {
        path.name: file_hash(path) for path in sorted(source.glob("*.parquet")) if path.stem in ("people", "visits")
    }
    mine = json.loads(json.dumps({"files": files, **manner}, default=str))
    kept = out / BEGUN
    if kept.exists() and json.loads(kept.read_text(encoding="utf-8")) != mine:
        raise MobatlasError(f"{out}: was begun with other people than --data {source}; choose another --out")
    out.mkdir(parents=True, exist_ok=True)
    write_json(kept, mine)


def _shift_column(source: Path, asked: str | None) -> str | None:
    """The column that marks who does not train; None where all do."""
    people = _people(source)
    schema = parquet_schema(people)
    if asked is not None and asked not in schema.names:
        raise MobatlasError(f"--shift {asked}: {people} has no such column{suggestion(asked, schema.names)}")
    column = asked or WEEKDAY
    if column not in schema.names or not pa.types.is_boolean(schema.field(column).type):
        if asked is not None:
            raise MobatlasError(f"--shift {asked}: is no column of true and false in {people}; make it one")
        return None
    marked = read_parquet(people, [column])[column]
    if not pc.any(marked).as_py():
        raise MobatlasError(
            f"--shift {column}: is true for nobody in {people}, so that nobody would train; mark those who do"
        )
    return None if pc.all(marked).as_py() else column


def _people(source: Path) -> Path:
    if not source.is_dir():
        what = "is a file; give its folder" if source.exists() else "does not exist; give a folder of labelled people"
        raise MobatlasError(f"--data {source}: {what}")
    path = source / "people.parquet"
    if not path.exists():
        raise MobatlasError(f"--data {source}: has no people.parquet with labels; give a labelled dataset")
    parquet_schema(path)  # or it is not readable
    if not read_parquet(path, []).num_rows:
        raise MobatlasError(f"{path}: the table has no rows; give a labelled dataset")
    return path


def _divided(source: Path, out: Path, column: str) -> dict[str, Path]:
    """The tables of those who are marked and of the others, written once."""
    parts = {}
    for name, condition in (("dataset", "{}"), (SHIFT, "NOT {}")):
        folder = parts[name] = out / "sources" / name
        if folder.exists():
            continue
        partial = folder.with_name(f".{name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        with duckdb.connect() as connection:
            people, visits = (str(source / f"{table}.parquet") for table in ("people", "visits"))
            chosen = connection.read_parquet(people).filter(condition.format(f'"{column}"'))
            chosen.write_parquet(str(partial / "people.parquet"))
            ids = connection.read_parquet(str(partial / "people.parquet")).project("user_id")
            connection.read_parquet(visits).join(ids, "user_id", how="semi").write_parquet(
                str(partial / "visits.parquet")
            )
        partial.rename(folder)
    return parts
