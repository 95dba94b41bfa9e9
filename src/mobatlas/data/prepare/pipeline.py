"""Preparation: a reader's visits through the pipeline into a dataset folder, with a summary of what was kept and why."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb
import ibis
import pyarrow as pa
from ibis import ir

from mobatlas.config import PrepareConfig, build, merge, preset_values
from mobatlas.data.dataset import KIND, LABELS
from mobatlas.data.prepare import steps as pipeline
from mobatlas.data.prepare.canonical import RowCounts, canonical_visits, check_rows
from mobatlas.data.prepare.columns import as_number, as_text, is_word
from mobatlas.data.prepare.engine import Engine, one, open_engine
from mobatlas.data.prepare.people import (
    PeopleColumns,
    anchors_from_visits,
    canonical_people,
    find_groups,
    join_people,
    require_known_people,
    sort_columns,
)
from mobatlas.data.prepare.sequences import write_sequences
from mobatlas.data.prepare.summary import Summary, WindowCounts
from mobatlas.data.readers import Source, reader_named
from mobatlas.data.readers.plain import require_path
from mobatlas.data.schema import ANCHORS, POIS_REQUIRED
from mobatlas.data.vocabulary import FIRST_POI, build_vocabulary, modal_categories, most_frequent
from mobatlas.data.vocabulary import SCHEMA as VOCABULARY_SCHEMA
from mobatlas.errors import MobatlasError
from mobatlas.groups import Groups
from mobatlas.io.manifest import write_json, write_parquet
from mobatlas.io.output import new_folder, refuse_overlap
from mobatlas.io.tables import require_columns
from mobatlas.progress import SILENT, Tracker

STEPS = 7
FEW_LEVELS = 12


@dataclass(frozen=True)
class _Observed:
    """What the first half of the preparation knows."""

    rows: ir.Table  # every usable row as the source has it
    visits: ir.Table  # distinct and in numbers, with home and work flags
    users: ir.Table  # with anchors, columns of people, and who is eligible
    places: ir.Table
    counts: RowCounts
    duplicates: int
    inferred: tuple[str, ...]
    in_people: int | None  # users with visits whom the people table knows


def prepare_config(
    format: str,  # noqa: A002
    values: Mapping[str, Any] | None = None,
    where: str = "prepare",
) -> PrepareConfig:
    """Defaults, then what suits the source, then what the user wants."""
    return build(PrepareConfig, merge(reader_named(format).suggests, values or {}), where)


def prepare(
    source: Path | str,
    out: Path | str,
    *,
    format: str = "plain",  # noqa: A002
    preset: str | None = None,
    values: Mapping[str, Any] | None = None,
    engine: str = "duckdb",
    overwrite: bool = False,
    tracker: Tracker = SILENT,
) -> Summary:
    """Prepare `source` into the dataset folder `out`; `values` are fields of PrepareConfig."""
    config = prepare_config(format, merge(preset_values(preset).get("prepare", {}), values or {}))
    for place in (source, out):
        _refuse_address(str(place))
    refuse_overlap(Path(source), Path(out))
    require_path(Path(source))  # before an engine starts: Java takes seconds
    reader = reader_named(format)
    recorded = {
        "format": format,
        "prepare": config.model_dump(mode="json", exclude={"memory_limit"}),
    }
    with new_folder(Path(out), KIND, config=recorded, overwrite=overwrite) as folder:
        running = open_engine(engine, folder.scratch(), config.memory_limit)
        try:
            tracker.step(0, "reading")
            opened = reader.open(Path(source), running, config.reader)
            summary, details = _run(opened, running, config, folder.path, tracker)
        except duckdb.OutOfMemoryException:
            raise MobatlasError(
                f"memory_limit '{config.memory_limit}' is too little for {source}; raise it"
            ) from None
        finally:
            running.close()
        folder.details.update(details)
        folder.unlisted.add(
            LABELS
        )  # a dataset without its labels, or with others, is the same dataset
        write_json(folder.path / "summary.json", summary.as_dict())
    tracker.step(STEPS, "done")
    return summary


def _refuse_address(place: str) -> None:
    """hdfs://, s3a:// and the like, also as a Path has them, with one stroke."""
    if re.match(r"[a-z][a-z0-9+.-]+:/", place, re.IGNORECASE) and not Path(place).exists():
        raise MobatlasError(
            f"{place}: is an address, not a path; mount that storage, on every worker too, and give the path"
        )


def _run(
    source: Source, engine: Engine, config: PrepareConfig, folder: Path, tracker: Tracker
) -> tuple[Summary, dict[str, Any]]:
    columns = sort_columns(source, config)
    observed = _observe(source, engine, config, columns, tracker)

    tracker.step(3, "vocabulary")
    tokens = _vocabulary(observed, source, engine, config, folder)

    tracker.step(4, "days")
    split = pipeline.split_at_midnights(pipeline.tokenise(observed.visits, tokens))
    pieces = engine.stage(pipeline.compare_neighbours(split), "pieces")
    days = engine.stage(pipeline.judge_days(pieces, config), "days")

    tracker.step(5, "windows")
    per_user = config.window.origin == "user"
    origins = (
        engine.stage(days.group_by("user").aggregate(origin=days.day.min()), "origins")
        if per_user
        else None
    )
    judged = pipeline.judge_windows(
        pipeline.in_windows(days, origins, config.window), observed.users, config
    )
    windows = engine.stage(judged, "windows")
    counts = _count_windows(windows, engine)
    if not counts.kept:
        raise MobatlasError(_nothing_kept(source, observed, counts, config, engine))

    tracker.step(6, "trajectories")
    people, groups = _write_people(windows, observed.users, engine, config, columns, folder)
    long_form = pipeline.assemble(pipeline.in_windows(pieces, origins, config.window), windows)
    batches = engine.sorted_batches(long_form, pipeline.IN_ORDER)
    splits = write_sequences(folder, batches, people)
    summary = Summary(
        rows=observed.counts,
        duplicates=observed.duplicates,
        users=one(engine, observed.users.aggregate(n=observed.users.count()))["n"],
        windows=counts,
        pois=_count_pois(observed.visits, engine),
        splits=splits,
        inferred=observed.inferred,
        columns={
            "attributes": columns.attributes,
            "regions": columns.regions,
            "others": columns.others,
        },
        users_in_people=observed.in_people,
        notes=(*source.notes, *_many_levels(groups)),
    )
    return summary, {
        "attributes": groups.as_dict() if groups else None,
        "regions": list(columns.regions),
    }


def _observe(
    source: Source, engine: Engine, config: PrepareConfig, columns: PeopleColumns, tracker: Tracker
) -> _Observed:
    """Clean, numbered, de-duplicated visits with their home and work flags, and everybody who made them."""
    tracker.step(0, "checking rows")
    clean, counts = check_rows(canonical_visits(source), source, engine, config)
    tracker.step(1, "people and places")
    people = canonical_people(source, columns, engine)
    numbered = engine.stage(pipeline.number_users(clean, config.split), "users")
    known = None if people is None else require_known_people(numbered, people, source, engine)
    places = engine.stage(pipeline.number_places(clean), "places")
    tracker.step(2, "visits")
    usable = counts.rows - counts.missing_coordinates - counts.not_poi - counts.invalid
    encoded = engine.stage(pipeline.encode(clean, numbered, places), "visits")
    facts = one(
        engine,
        encoded.aggregate(rows=encoded.count(), home=encoded.home.any(), work=encoded.work.any()),
    )
    if not facts["rows"]:
        raise MobatlasError(
            f"{source.where}: no row is left of {counts.rows:,} ({counts.missing_coordinates:,} without coordinates, "
            f"{counts.not_poi:,} not at a POI, {counts.invalid:,} invalid)"
        )
    visits = pipeline.fill_departures(encoded, config)
    lacking = tuple(
        place
        for place in ("home", "work")
        if config.anchors.infer == "always" or (config.anchors.infer == "auto" and not facts[place])
    )
    if lacking:
        given = (
            None if people is None else numbered.join(people, "user_id").select("user", *ANCHORS)
        )
        anchors = engine.stage(pipeline.infer_anchors(visits, config.anchors, lacking), "anchors")
        visits = engine.stage(
            pipeline.flag_anchors(visits, anchors, given, lacking, config.anchors), "flagged"
        )
    users = engine.stage(
        join_people(numbered, anchors_from_visits(visits), people, config), "people"
    )
    return _Observed(
        clean, visits, users, places, counts, usable - int(facts["rows"]), lacking, known
    )


def _vocabulary(
    observed: _Observed, source: Source, engine: Engine, config: PrepareConfig, folder: Path
) -> ir.Table:
    """Write vocabulary.parquet; returns the token of each POI's number."""
    users = observed.users
    training = users.select("user", train=(users.split == "train") & users.eligible)
    with_split = observed.visits.join(training, "user")
    frequent = engine.stage(
        most_frequent(with_split, observed.places, config.vocabulary_size), "frequent"
    )
    categories = modal_categories(observed.rows, frequent)
    described = frequent.left_join(categories, "poi_id").select(
        "poi_id", "visits", "lat", "lon", categories.category
    )
    if source.pois is not None:
        described = _described_by(described, source.pois, source.pois_where, engine)
    vocabulary = build_vocabulary(
        engine.collect(described.order_by([described.visits.desc(), described.poi_id]))
    )
    path = folder / "vocabulary.parquet"
    write_parquet(path, VOCABULARY_SCHEMA, vocabulary.table.to_batches())
    table = engine.read(path)
    own = table.filter(table.token >= FIRST_POI)
    return own.join(frequent.select("poi", "poi_id"), "poi_id").select("poi", "token")


def _described_by(places: ir.Table, pois: ir.Table, where: str, engine: Engine) -> ir.Table:
    """Coordinates and category from the source's own table of POIs, where it has them."""
    require_columns(where, pois.columns, POIS_REQUIRED)
    category = as_text(pois.category) if "category" in pois.columns else ibis.null("string")
    everything = pois.select(
        poi_id=as_text(pois.poi_id),
        poi_lat=as_number(pois.lat),
        poi_lon=as_number(pois.lon),
        poi_category=category,
        raw_lat=pois.lat,
        raw_lon=pois.lon,
    )
    words = (everything.poi_lat.isnull() & is_word(everything.raw_lat)) | (
        everything.poi_lon.isnull() & is_word(everything.raw_lon)
    )
    outside = ((everything.poi_lat.abs() > 90) | (everything.poi_lon.abs() > 180)).fill_null(False)
    counts = one(
        engine,
        everything.aggregate(
            rows=everything.count(),
            distinct=everything.poi_id.nunique(),
            wrong=(words | outside).sum(),
        ),
    )
    if counts["rows"] != counts["distinct"]:
        raise MobatlasError(
            f"{where}: column 'poi_id' is empty or repeated in some rows; give each POI one row"
        )
    if counts["wrong"]:
        raise MobatlasError(
            f"{where}: columns 'lat' and 'lon' are no place on the globe in {counts['wrong']:,} rows; mend them"
        )
    described = everything.drop("raw_lat", "raw_lon")
    joined = places.left_join(described, "poi_id")
    return joined.select(
        "poi_id",
        "visits",
        category=ibis.coalesce(joined.poi_category, joined.category),
        lat=ibis.coalesce(joined.poi_lat, joined.lat),
        lon=ibis.coalesce(joined.poi_lon, joined.lon),
    )


def _many_levels(groups: Groups | None) -> list[str]:
    return [
        f"attribute '{name}' has {len(levels)} levels; bin it if these are not the groups you want"
        for name, levels in (groups.attributes if groups else ())
        if len(levels) > FEW_LEVELS
    ]


def _count_pois(visits: ir.Table, engine: Engine) -> int:
    elsewhere = visits.filter(~visits.home & ~visits.work)
    return int(one(engine, elsewhere.aggregate(n=elsewhere.poi.nunique()))["n"])


def _count_windows(windows: ir.Table, engine: Engine) -> WindowCounts:
    counted = windows.group_by("reason").aggregate(n=windows.count())
    by_reason = {row["reason"]: int(row["n"]) for row in engine.collect(counted).to_pylist()}
    return WindowCounts(
        kept=by_reason.pop(None, 0),
        fell={name: by_reason.get(name, 0) for name in pipeline.REASONS},
    )


def _nothing_kept(
    source: Source, observed: _Observed, counts: WindowCounts, config: PrepareConfig, engine: Engine
) -> str:
    visits = observed.visits
    instants = bool(
        one(engine, visits.aggregate(all_instants=(visits.end == visits.start).all()))[
            "all_instants"
        ]
    )
    fell = counts.fell
    worst = max(fell, key=lambda name: fell[name]) if any(fell.values()) else ""
    advice = {
        "coverage": "the source has no departures: set quality.min_coverage=0, or missing_departure=until_next"
        if instants
        else "lower quality.min_coverage or quality.min_high_quality, or take shorter windows (window.days)",
        "unreliable": "raise quality.max_day_km or quality.max_unreliable",
        "short": "lower quality.min_tokens",
        "anchors": "set anchors.require_both=false to keep people without a known home and work",
        "": "window.origin lies after the last visit",
    }[worst]
    return (
        f"{source.where}: no window passed the quality rule: {sum(fell.values()):,} windows of {config.window.days} days, "
        f"{fell['unreliable']:,} with too many unreliable days, {fell['coverage']:,} with too few well-covered days, "
        f"{fell['short']:,} too short, {fell['anchors']:,} of people without home and work; {advice}"
    )


def _write_people(
    windows: ir.Table,
    users: ir.Table,
    engine: Engine,
    config: PrepareConfig,
    columns: PeopleColumns,
    folder: Path,
) -> tuple[pa.Table, Groups | None]:
    """people.parquet, splits.parquet and, where the source knows attributes, labels.parquet: those with a trajectory."""
    kept = windows.filter(windows.reason.isnull()).select("user").distinct()
    # not `collect`: there may be too many of them for what a Spark driver collects
    people = pa.Table.from_batches(engine.sorted_batches(users.semi_join(kept, "user"), ["user"]))
    described = {name: people[inside].cast(pa.string()) for name, inside in columns.inside.items()}
    user_id = {"user_id": people["user_id"].cast(pa.string())}
    labels = {name: described[name] for name in (*columns.attributes, *columns.others)}
    files = {
        "people.parquet": {name: people[name].cast(pa.float64()) for name in ANCHORS}
        | {name: described[name] for name in columns.regions},
        "splits.parquet": {"split": people["split"].cast(pa.string())},
    } | ({LABELS: labels} if labels else {})
    for name, values in files.items():
        table = pa.table(user_id | values)
        write_parquet(folder / name, table.schema, table.to_batches())
    return people, find_groups(labels, config, columns)
