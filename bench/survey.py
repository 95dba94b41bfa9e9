"""A labelled survey as benchmarks use it: people who train, and people of another kind of day."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from bench.runner import compute_once
from mobatlas.config import merge
from mobatlas.data.dataset import TrajectoryDataset
from mobatlas.data.prepare.pipeline import prepare
from mobatlas.data.prepare.tables import parquet_schema
from mobatlas.data.types import (
    ATTRIBUTE_NAMES,
    PEOPLE_REQUIRED,
    VISITS_REQUIRED,
    looks_like_region,
)
from mobatlas.errors import MobatlasError, suggestion
from mobatlas.io.manifest import file_hash, read_parquet
from mobatlas.io.output import refuse_overlap
from mobatlas.io.tables import require_columns
from mobatlas.pipeline.run import STEPS_FILE, StepCache
from mobatlas.regions.composition import read_composition

DIARY: dict[str, Any] = {
    "window": {"days": 1, "stride": 1},
    "quality": {"min_coverage": 0},
    "min_people_per_place": 0,
    "anchors": {"require_both": False},
    "vocabulary_size": 2_000,
}
WEEKDAY = "weekday"
# In the folder of a benchmark:
DATASET = "dataset"  # training people
SHIFT = "shift"  # people of another kind of day
SOURCES = "sources"  # their tables
FOLDERS = (SOURCES, DATASET, SHIFT)
REQUIRED = {"people": PEOPLE_REQUIRED, "visits": VISITS_REQUIRED}


def check_survey(
    source: Path,
    regions: Sequence[str] = (),
    prepared: Mapping[str, Any] | None = None,
    census: Path | None = None,
) -> None:
    """Refuse a survey without labels or region columns, before anything is written."""
    if census is not None and not census.is_file():
        raise MobatlasError(
            f"--census {census}: is not a file; give a table of people by region, age and gender"
        )
    people = _table(source, "people")
    schema = parquet_schema(people)
    attributes = (prepared or {}).get("attributes")
    if attributes is None and not any(name.lower() in ATTRIBUTE_NAMES for name in schema.names):
        raise MobatlasError(
            f"{people}: has no attribute of people ({', '.join(ATTRIBUTE_NAMES)}), so their "
            "groups are unknown; give a labelled dataset"
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
    """Return the columns of people that `prepare` recognises as regions."""
    return [
        name for name in parquet_schema(source / "people.parquet").names if looks_like_region(name)
    ]


def display_names(source: Path, census: Path | None) -> tuple[str, str | None]:
    """Return the names of folder and census for result files, without paths of this machine."""
    folder = source.absolute()
    if census is None:
        return folder.name, None
    inside = census.absolute().parent == folder
    return folder.name, f"{folder.name}/{census.name}" if inside else census.name


def prepare_survey(source: Path, out: Path) -> TrajectoryDataset:
    """Prepare all people of a survey once, as a dataset in `out`; refuse people of one group."""
    refuse_overlap(source, out)
    inputs = _inputs(source, None, DIARY)
    with _survey_folder(source, out, inputs) as cache:
        compute = partial(prepare, source, out / DATASET, values=DIARY, overwrite=True)
        dataset = TrajectoryDataset.open(
            compute_once(cache, DATASET, out / DATASET, inputs, compute)
        )
        if dataset.groups is None or len(dataset.groups) < 2:
            raise MobatlasError(
                f"{source / 'people.parquet'}: all people are of one group; give people of several"
            )
        return dataset


def split_survey(
    source: Path, out: Path, shift: str | None = None, prepared: Mapping[str, Any] | None = None
) -> tuple[Path, Path | None]:
    """Prepare people who train and people who do not, once; return both datasets.

    The second is None if all people train.
    """
    refuse_overlap(source, out)
    column = _shift_column(source, shift)
    values = merge(DIARY, prepared or {})
    inputs = _inputs(source, column, values)
    with _survey_folder(source, out, inputs) as cache:
        parts = {DATASET: source}
        if column is not None:
            parts = _write_parts(source, cache, column, inputs)
        datasets = {}
        for name, part in parts.items():
            # The vocabulary comes from training people; others may visit any place.
            limit = {} if name == DATASET else {"vocabulary_size": 1_000_000}
            compute = partial(
                prepare, part, out / name, values=merge(values, limit), overwrite=True
            )
            datasets[name] = compute_once(cache, name, out / name, inputs, compute)
    return datasets[DATASET], datasets.get(SHIFT)


def prepare_people(
    source: Path, out: Path, values: Mapping[str, Any] | None = None
) -> TrajectoryDataset:
    """Prepare the one-day diaries of a folder, again if they exist."""
    prepare(source, out, values=merge(DIARY, values or {}), overwrite=True)
    return TrajectoryDataset.open(out)


def census_column(dataset: TrajectoryDataset, columns: Sequence[str], census: Path) -> str:
    """Return the region column that shares most regions with the census."""
    known = set(read_composition(census, dataset.groups, straddle="uniform").regions)
    shared = {name: len(known & set(dataset.people[name].unique().to_pylist())) for name in columns}
    best = max(shared, key=lambda name: shared[name])
    if not shared[best]:
        raise MobatlasError(
            f"--census {census}: has no region of {', '.join(columns)}; "
            "write the ids the same way in both"
        )
    return best


def _inputs(source: Path, column: str | None, values: Mapping[str, Any]) -> dict[str, Any]:
    files = {
        path.name: file_hash(path)
        for path in sorted(source.glob("*.parquet"))
        if path.stem in REQUIRED
    }
    return {"files": files, "shift": column, "prepared": values}


@contextmanager
def _survey_folder(source: Path, out: Path, inputs: Mapping[str, Any]) -> Iterator[StepCache]:
    """Yield the step cache of a folder that is new or has the same people.

    If the people are refused, everything that was written is removed.
    """
    if out.exists() and not out.is_dir():
        raise MobatlasError(f"--out {out}: is a file; give a folder to fill")
    cache = StepCache(out)
    if cache.has_other_inputs(DATASET, inputs):
        raise MobatlasError(
            f"{out}: contains other people than --data {source}, or prepared in another way; "
            "choose another --out"
        )
    new_folders = [path for path in (out, *map(out.joinpath, FOLDERS)) if not path.exists()]
    first_attempt = not (out / STEPS_FILE).exists()
    try:
        yield cache
    except MobatlasError:
        if first_attempt:
            (out / STEPS_FILE).unlink(missing_ok=True)
        for path in new_folders:
            shutil.rmtree(path, ignore_errors=True)
        raise


def _shift_column(source: Path, shift: str | None) -> str | None:
    """Return the column that is false for people who do not train; None if all train."""
    people = _table(source, "people")
    schema = parquet_schema(people)
    if shift is not None and shift not in schema.names:
        raise MobatlasError(
            f"--shift {shift}: {people} has no such column{suggestion(shift, schema.names)}"
        )
    column = shift or WEEKDAY
    if column not in schema.names or not pa.types.is_boolean(schema.field(column).type):
        if shift is not None:
            raise MobatlasError(
                f"--shift {shift}: this column of {people} must contain only true or false"
            )
        return None
    marked = read_parquet(people, [column])[column]
    if not pc.any(marked).as_py():
        raise MobatlasError(
            f"--shift {column}: is false for all people in {people}, so no one would train; "
            "set it to true for people who do"
        )
    return None if pc.all(marked).as_py() else column


def _table(source: Path, name: str) -> Path:
    """Return the path of people or visits; refuse a table that is missing, damaged or empty."""
    if source.is_file():
        raise MobatlasError(f"--data {source}: is a file; give its folder")
    if not source.exists():
        raise MobatlasError(f"--data {source}: does not exist; give a folder of labelled people")
    path = source / f"{name}.parquet"
    if not path.is_file():
        raise MobatlasError(
            f"--data {source}: has no {path.name}; give labelled people.parquet and visits.parquet"
        )
    try:
        require_columns(str(path), parquet_schema(path).names, REQUIRED[name])
        rows = pq.read_metadata(path).num_rows
    except (pa.ArrowInvalid, OSError):
        raise MobatlasError(f"{path}: is damaged; write it again as Parquet") from None
    if not rows:
        raise MobatlasError(f"{path}: the table has no rows; give a labelled dataset")
    return path


def _write_parts(
    source: Path, cache: StepCache, column: str, inputs: Mapping[str, Any]
) -> dict[str, Path]:
    """Write the tables of people who are marked and of the others, once."""
    parts = {}
    for name, condition in ((DATASET, f'"{column}"'), (SHIFT, f'NOT "{column}"')):
        folder = cache.folder / SOURCES / name
        compute = partial(write_people, source, folder, condition)
        parts[name] = compute_once(cache, f"{SOURCES} {name}", folder, inputs, compute)
    return parts


def write_people(source: Path, folder: Path, condition: str) -> None:
    """Write the people that fulfil a condition, and their visits."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        with duckdb.connect() as connection:
            people = connection.read_parquet(str(source / "people.parquet")).filter(condition)
            people.write_parquet(str(folder / "people.parquet"))
            ids = connection.read_parquet(str(folder / "people.parquet")).project("user_id")
            visits = connection.read_parquet(str(source / "visits.parquet"))
            visits.join(ids, "user_id", how="semi").write_parquet(str(folder / "visits.parquet"))
    except (
        duckdb.InvalidInputException,
        duckdb.ConversionException,
        duckdb.BinderException,
    ) as error:
        reason = str(error).splitlines()[0]
        raise MobatlasError(
            f"--data {source}: people.parquet or visits.parquet cannot be read ({reason}); "
            "write them again"
        ) from None
