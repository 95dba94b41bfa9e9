"""Preparation: visits of a source become a dataset folder, with a summary of what was dropped."""

import re
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import duckdb
import ibis
import pyarrow as pa
from ibis import ir

from mobatlas.config import PrepareConfig, build, merge, preset_values
from mobatlas.data.dataset import KIND, LABELS, VOCABULARY
from mobatlas.data.prepare import steps
from mobatlas.data.prepare.canonical import RowCounts, canonical_visits, check_rows
from mobatlas.data.prepare.engine import Engine, one, open_engine
from mobatlas.data.prepare.people import (
    PeopleColumns,
    anchors_from_visits,
    canonical_people,
    find_groups,
    join_people,
    refuse_bad_rows,
    require_known_people,
    sort_columns,
)
from mobatlas.data.prepare.plausibility import (
    check_copies,
    check_days,
    check_homes,
    check_place_names,
    check_visits,
)
from mobatlas.data.prepare.sequences import SplitCounts, write_sequences
from mobatlas.data.prepare.tables import as_number, as_text
from mobatlas.data.readers import READERS
from mobatlas.data.readers.base import Source, require_path
from mobatlas.data.types import (
    ANCHORS,
    FIRST_POI,
    POIS_REQUIRED,
    VOCABULARY_SCHEMA,
    build_vocabulary,
)
from mobatlas.errors import MobatlasError, log
from mobatlas.groups import Groups
from mobatlas.io.limits import refuse_bomb
from mobatlas.io.manifest import write_json, write_parquet
from mobatlas.io.output import new_folder, refuse_overlap
from mobatlas.io.tables import require_columns
from mobatlas.progress import SILENT, Tracker

STEPS = 7
MANY_LEVELS = 12  # of an attribute; more are mentioned in the summary
MANY_RARE = 0.1  # of visits at places with few visitors; a warning


@dataclass(frozen=True)
class WindowCounts:
    """Windows with at least one observed day."""

    kept: int
    dropped: dict[str, int]  # windows by the first reason that applies


@dataclass(frozen=True)
class Summary:
    """What a preparation kept and dropped; summary.json and `--json` contain `as_dict()`.

    Parameters
    ----------
    rows
        Rows of the source, and how many were dropped.
    duplicates
        Rows that repeat another row.
    users
        People with a usable visit.
    windows
        Windows that were kept, and dropped ones by reason.
    pois
        Distinct places that are neither home nor work of the visitor.
    splits
        Counts of `train`, `val` and `test`.
    rare
        `places` with fewer than `min_people` visitors among training people, which became OTHER,
        and the `share_of_visits` to places that they had.
    inferred
        Anchors (`home`, `work`) that were inferred because the source has none.
    columns
        Columns of people by their use.
    users_in_people
        Users that the people table lists; None without such a table.
    notes
        Sentences about how the source was read.
    warnings
        Sentences about rows that look wrong. `as_dict()` has no id of a person.
    share
        The share of the source that was read; less than 1 for a check of a large source.
    named
        The people whose ids notes and warnings quote, as files name them.

    Examples
    --------
    >>> summary = prepare("city", "dataset")  # doctest: +SKIP
    >>> summary.windows.dropped["short"]  # doctest: +SKIP
    17
    """

    rows: RowCounts
    duplicates: int
    users: int
    windows: WindowCounts
    pois: int
    splits: Mapping[str, SplitCounts]
    rare: Mapping[str, float]
    inferred: tuple[str, ...] = ()
    columns: PeopleColumns = field(default_factory=PeopleColumns)
    users_in_people: int | None = None
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    share: float = 1.0
    named: Mapping[str, str] = field(default_factory=dict)

    def _without_ids(self, sentence: str) -> str:
        for user_id, description in self.named.items():
            sentence = sentence.replace(f"'{user_id}'", description)
        return sentence

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON, without the ids of people."""
        return {
            "visits": asdict(self.rows) | {"duplicates": self.duplicates},
            "users": self.users,
            "users_in_people": self.users_in_people,
            "pois": self.pois,
            "rare_places": dict(self.rare),
            "windows": {"kept": self.windows.kept, "fell": self.windows.dropped},
            "splits": {name: counts.as_dict() for name, counts in self.splits.items()},
            "inferred_anchors": list(self.inferred),
            "people_columns": {key: list(names) for key, names in asdict(self.columns).items()},
            "notes": [self._without_ids(note) for note in self.notes],
            "warnings": [self._without_ids(warning) for warning in self.warnings],
        }


@dataclass(frozen=True)
class _Observed:
    """Tables and counts before the vocabulary is built."""

    rows: ir.Table  # every usable row of the source, unchanged
    visits: ir.Table  # distinct and in numbers, with home and work flags
    users: ir.Table  # with anchors, columns of people, and who is eligible
    places: ir.Table
    counts: RowCounts
    duplicates: int
    inferred: tuple[str, ...]
    in_people: int | None  # users with visits that the people table lists
    config: PrepareConfig  # as it suits the rows
    notes: tuple[str, ...]
    warnings: tuple[str, ...]


def prepare_config(
    format: str,  # noqa: A002
    values: Mapping[str, Any] | None = None,
    where: str = "prepare",
) -> PrepareConfig:
    """Merge the defaults, the values that suit the source, and those of the user."""
    return build(PrepareConfig, merge(READERS.get_entry(format).suggests, values or {}), where)


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
    most_rows: int | None = None,
) -> Summary:
    """Prepare a source of visits into a DATASET folder.

    Parameters
    ----------
    source, out, overwrite, tracker
        A file or folder in the layout of `format`, and the DATASET folder to write or replace.
    format, engine
        The reader, such as `plain` or `veraset`; `duckdb` or `spark`, which write the same bytes.
    preset, values
        `small` or `paper`, and fields of `PrepareConfig` that differ from it.
    most_rows
        For a check: read a sample of people with so many rows, and do not log warnings.

    Returns
    -------
    Summary
        What was kept and what was dropped.

    Examples
    --------
    >>> summary = prepare("city", "dataset", preset="small")  # doctest: +SKIP
    >>> summary.windows.kept  # doctest: +SKIP
    2134
    """
    config = prepare_config(format, merge(preset_values(preset).get("prepare", {}), values or {}))
    _refuse_addresses(str(source), str(out))
    refuse_overlap(Path(source), Path(out))
    refuse_bomb(require_path(Path(source)))  # before an engine starts: Java takes seconds
    recorded: dict[str, Any] = {"format": format}
    with new_folder(Path(out), KIND, config=recorded, overwrite=overwrite) as folder:
        with (
            _explain_memory_errors(config.memory_limit, source),
            closing(open_engine(engine, folder.scratch(), config.memory_limit)) as running,
        ):
            tracker.step(0, "reading")
            tables = READERS[format].open(Path(source), running, config.reader, config.rename)
            tables, share = _sample(tables, most_rows, running)
            summary, groups, config = _run(tables, running, config, folder.path, tracker)
            recorded["prepare"] = config.model_dump(mode="json", exclude={"memory_limit"})
        folder.details.update(
            attributes=groups.as_dict() if groups else None, regions=list(summary.columns.regions)
        )
        folder.unlisted.add(LABELS)  # with others it is the same dataset
        write_json(folder.path / "summary.json", summary.as_dict())
    for warning in summary.warnings if most_rows is None else ():
        log.warning("%s", warning)
    tracker.step(STEPS, "done")
    return replace(summary, share=share)


def _sample(source: Source, most_rows: int | None, engine: Engine) -> tuple[Source, float]:
    """A sample of people with about as many rows, and its share; a small source as it is."""
    visits = source.visits
    if most_rows is None or "user_id" not in visits.columns:
        return source, 1.0
    share = most_rows / max(one(engine, visits.aggregate(n=visits.count()))["n"], 1)
    if share >= 1:
        return source, 1.0
    salted = ibis.literal("sample:") + visits.user_id.cast("string").fill_null("")
    chosen = salted.hexdigest("md5").substr(0, 8) < f"{round(share * 16**8):08x}"
    return replace(source, visits=visits.filter(chosen)), share


@contextmanager
def _explain_memory_errors(memory_limit: str, source: Path | str) -> Iterator[None]:
    try:
        yield
    except duckdb.OutOfMemoryException:
        raise MobatlasError(
            f"memory_limit '{memory_limit}' is too little for {source}; raise it"
        ) from None


def _refuse_addresses(*paths: str) -> None:
    """Refuse hdfs://, s3a:// and the like, also as `Path` writes them, with one slash."""
    for path in paths:
        if re.match(r"[a-z][a-z0-9+.-]+:/", path, re.IGNORECASE) and not Path(path).exists():
            raise MobatlasError(
                f"{path}: this is an address, not a path; mount that storage (on every worker "
                "too) and give its path"
            )


def _run(
    source: Source, engine: Engine, config: PrepareConfig, folder: Path, tracker: Tracker
) -> tuple[Summary, Groups | None, PrepareConfig]:
    columns = sort_columns(source, config)
    observed = _observe(source, engine, config, columns, tracker)
    config = observed.config

    tracker.step(3, "vocabulary")
    tokens, rare = _write_vocabulary(observed, source, engine, config, folder)

    tracker.step(4, "days")
    split = steps.split_at_midnights(steps.tokenise(observed.visits, tokens))
    pieces = engine.stage(steps.compare_neighbours(split), "pieces")
    days = engine.stage(steps.judge_days(pieces, config), "days")

    tracker.step(5, "windows")
    origins = None
    if config.window.origin == "user":
        origins = engine.stage(days.group_by("user").aggregate(origin=days.day.min()), "origins")
    days_of_windows = steps.in_windows(days, origins, config.window)
    windows = engine.stage(steps.judge_windows(days_of_windows, observed.users, config), "windows")
    counts = _count_windows(windows, engine)
    if not counts.kept:
        raise MobatlasError(_no_window_passed(source, observed, counts, days, engine))

    tracker.step(6, "trajectories")
    kept = windows.filter(windows.reason.isnull()).select("user", "window")
    # not `collect`: a Spark driver may refuse to collect this many rows
    people = pa.Table.from_batches(
        engine.sorted_batches(observed.users.semi_join(kept, "user"), ["user"])
    )
    groups = _write_people(people, config, columns, folder)
    pieces_of_windows = steps.assemble(steps.in_windows(pieces, origins, config.window), kept)
    batches = engine.sorted_batches(pieces_of_windows, steps.IN_ORDER)
    visits_to_pois = observed.visits.filter(~observed.visits.home & ~observed.visits.work)
    notes = (*source.notes, *observed.notes, *_many_levels(groups))
    warnings = (
        *observed.warnings,
        *_many_rare_places(rare, source.where),
        *check_place_names(folder / VOCABULARY, observed.users, engine),
        *check_days(days, observed.users, source.where, config.window.days, engine),
    )
    summary = Summary(
        rows=observed.counts,
        duplicates=observed.duplicates,
        users=one(engine, observed.users.aggregate(n=observed.users.count()))["n"],
        windows=counts,
        pois=int(one(engine, visits_to_pois.aggregate(n=visits_to_pois.poi.nunique()))["n"]),
        splits=write_sequences(folder, batches, people),
        rare=rare,
        inferred=observed.inferred,
        columns=columns,
        users_in_people=observed.in_people,
        notes=notes,
        warnings=warnings,
        named=_people_named(" ".join((*notes, *warnings)), observed.users, source, engine),
    )
    return summary, groups, config


def _observe(
    source: Source, engine: Engine, config: PrepareConfig, columns: PeopleColumns, tracker: Tracker
) -> _Observed:
    """Clean, numbered, distinct visits with home and work flags, and their users."""
    tracker.step(0, "checking rows")
    clean, counts = check_rows(canonical_visits(source), source, engine, config)
    tracker.step(1, "people and places")
    people = canonical_people(source, columns, engine, config)
    numbered = engine.stage(steps.number_users(clean, config.split), "users")
    known, warnings = (
        (None, []) if people is None else require_known_people(numbered, people, source, engine)
    )
    places = engine.stage(steps.number_places(clean), "places")
    tracker.step(2, "visits")
    encoded = engine.stage(steps.encode(clean, numbered, places), "visits")
    flagged = {"home": encoded.home.any(), "work": encoded.work.any()}
    departures = encoded.end.count()
    facts = one(engine, encoded.aggregate(rows=encoded.count(), ends=departures, **flagged))
    if not facts["rows"]:
        raise MobatlasError(
            f"{source.where}: no row is left of {counts.rows:,} "
            f"({counts.missing_coordinates:,} without coordinates, "
            f"{counts.not_poi:,} not at a POI, {counts.invalid:,} invalid)"
        )
    config, notes = (config, ()) if facts["ends"] else _for_check_ins(config)
    visits = steps.fill_departures(encoded, config)
    infer = config.anchors.infer
    missing = tuple(
        place for place in flagged if infer == "always" or (infer == "auto" and not facts[place])
    )
    if missing:
        inferred = engine.stage(steps.infer_anchors(visits, config.anchors, missing), "anchors")
        anchors = None
        if people is not None:
            anchors = numbered.join(people, "user_id").select("user", *ANCHORS)
        flags = steps.flag_anchors(visits, inferred, anchors, missing, config.anchors)
        visits = engine.stage(flags, "flagged")
    cells, unlikely = check_visits(visits, numbered, source.where, engine)
    warnings += [*unlikely, *check_copies(visits, numbered, source.where, engine)]
    if people is not None:
        warnings += check_homes(people, cells, source.people_where, engine)
    return _Observed(
        rows=clean,
        visits=visits,
        users=engine.stage(
            join_people(numbered, anchors_from_visits(visits), people, config), "people"
        ),
        places=places,
        counts=counts,
        duplicates=counts.usable - int(facts["rows"]),
        inferred=missing,
        in_people=known,
        config=config,
        notes=notes,
        warnings=tuple(warnings),
    )


def _for_check_ins(config: PrepareConfig) -> tuple[PrepareConfig, tuple[str, ...]]:
    """The configuration for visits without departures, and a note of what it changes."""
    suited = {"quality": {"min_coverage": 0.0}, "anchors": {"require_both": False}}
    chosen = merge(suited, config.model_dump(exclude_unset=True))  # the user's values win
    changed = PrepareConfig.model_validate(chosen)
    if changed == config or config.missing_departure != "instant":
        return config, ()
    return changed, (
        "the source has no departures, so visits are moments: unless you set them, "
        "quality.min_coverage is 0 and anchors.require_both is false",
    )


def _write_vocabulary(
    observed: _Observed, source: Source, engine: Engine, config: PrepareConfig, folder: Path
) -> tuple[ir.Table, dict[str, float]]:
    """Write vocabulary.parquet; returns the token of each POI number, and what became OTHER."""
    users = observed.users
    training = users.filter((users.split == "train") & users.eligible)
    visits = observed.visits.semi_join(training, "user")
    fewest = config.min_people_per_place
    counted = engine.stage(steps.count_visitors(visits, fewest), "visitors")
    totals = {
        "visits": counted.visits.sum(),
        "places": counted.rare.cast("int64").sum(),
        "lost": ibis.ifelse(counted.rare, counted.visits, 0).sum(),
    }
    facts = {name: int(n or 0) for name, n in one(engine, counted.aggregate(**totals)).items()}
    share = facts["lost"] / max(1, facts["visits"])
    rare = {"min_people": fewest, "places": facts["places"], "share_of_visits": share}
    ranked = steps.most_frequent(counted, observed.places, config.vocabulary_size)
    frequent = engine.stage(ranked, "frequent")
    categories = steps.modal_categories(observed.rows, frequent)
    described = frequent.left_join(categories, "poi_id").select(
        "poi_id", "visits", "lat", "lon", categories.category
    )
    if source.pois is not None:
        described = _with_poi_table(described, source.pois, source.pois_where, engine)
    ordered = described.order_by([described.visits.desc(), described.poi_id])
    vocabulary = build_vocabulary(engine.collect(ordered)).table
    path = folder / VOCABULARY
    write_parquet(path, VOCABULARY_SCHEMA, vocabulary.to_batches())
    tokens = engine.read(path).filter(lambda table: table.token >= FIRST_POI)
    return tokens.join(frequent.select("poi", "poi_id"), "poi_id").select("poi", "token"), rare


def _many_rare_places(rare: Mapping[str, float], where: str) -> Iterator[str]:
    if rare["share_of_visits"] > MANY_RARE:
        yield (
            f"{where}: {rare['share_of_visits']:.0%} of the visits to places became OTHER, because "
            f"{rare['places']:,} places have fewer than {rare['min_people']} visitors among "
            "training people; use coarser places; lower --min-people-per-place only for data that "
            "you will not share (0 keeps all places)"
        )


def _people_named(text: str, users: ir.Table, source: Source, engine: Engine) -> dict[str, str]:
    """The people whose ids are quoted in a text, and how files name them."""
    marks = [mark.start() for mark in re.finditer("'", text)]
    quoted = sorted({text[start + 1 : end] for start, end in combinations(marks, 2)})
    found = users.filter(users.user_id.isin(quoted)).select("user_id", "user").order_by("user")
    rows = engine.collect(found).to_pylist() if quoted else []
    named = {row["user_id"]: f"number {row['user'] + 1} in the order of user_id" for row in rows}
    if quoted and source.people is not None:
        ids = source.people.select(user_id=as_text(source.people.user_id))
        others = engine.collect(ids.filter(ids.user_id.isin(quoted)))["user_id"].to_pylist()
        named = dict.fromkeys(others, "someone in the people table") | named
    return named


def _with_poi_table(places: ir.Table, pois: ir.Table, where: str, engine: Engine) -> ir.Table:
    """Prefer coordinates and category of the source's table of POIs."""
    require_columns(where, pois.columns, POIS_REQUIRED)
    refuse_bad_rows(pois, where, "poi_id", ("lat", "lon"), engine)
    described = pois.select(
        poi_id=as_text(pois.poi_id),
        poi_lat=as_number(pois.lat),
        poi_lon=as_number(pois.lon),
        poi_category=as_text(pois.category) if "category" in pois.columns else ibis.null("string"),
    )
    joined = places.left_join(described, "poi_id")
    preferred = {
        name: ibis.coalesce(joined[f"poi_{name}"], joined[name])
        for name in ("category", "lat", "lon")
    }
    return joined.select("poi_id", "visits", **preferred)


def _many_levels(groups: Groups | None) -> list[str]:
    return [
        f"attribute '{name}' has {len(levels)} levels; bin it if these are not the groups you want"
        for name, levels in (groups.attributes if groups else ())
        if len(levels) > MANY_LEVELS
    ]


def _count_windows(windows: ir.Table, engine: Engine) -> WindowCounts:
    counted = engine.collect(windows.group_by("reason").aggregate(n=windows.count()))
    by_reason = {row["reason"]: int(row["n"]) for row in counted.to_pylist()}
    return WindowCounts(
        kept=by_reason.get(None, 0),
        dropped={reason: by_reason.get(reason, 0) for reason in steps.REASONS},
    )


def _no_window_passed(
    source: Source, observed: _Observed, counts: WindowCounts, days: ir.Table, engine: Engine
) -> str:
    config = observed.config
    instants = observed.visits.end == observed.visits.start
    facts = one(engine, observed.visits.aggregate(all_instants=instants.all()))
    observed_days = days.group_by("user").aggregate(n=days.count()).n
    typical = int(engine.collect(observed_days.approx_median().as_table())[0][0].as_py())
    dropped = counts.dropped
    advice = {
        "coverage": "the source has no departures: set quality.min_coverage=0, or "
        "missing_departure=until_next"
        if facts["all_instants"]
        else "lower quality.min_coverage or quality.min_high_quality, or take shorter windows: "
        f"half of the people have visits on {typical} days or fewer (window.days={typical})",
        "unreliable": "raise quality.max_day_km or quality.max_unreliable",
        "short": "lower quality.min_tokens",
        "anchors": "set anchors.require_both=false to keep people without a known home and work",
        "": "window.origin is after the last visit; choose an earlier date",
    }
    worst = max(dropped, key=dropped.__getitem__) if any(dropped.values()) else ""
    return (
        f"{source.where}: no window passed the quality rule: {sum(dropped.values()):,} windows of "
        f"{config.window.days} days were dropped ("
        f"{dropped['unreliable']:,} with too many unreliable days, "
        f"{dropped['coverage']:,} with too few well-covered days, {dropped['short']:,} too short, "
        f"{dropped['anchors']:,} of people without home and work); {advice[worst]}"
    )


def _write_people(
    people: pa.Table, config: PrepareConfig, columns: PeopleColumns, folder: Path
) -> Groups | None:
    """Write people.parquet, splits.parquet and, if the source has attributes, labels.parquet."""
    texts = {name: people[inside].cast(pa.string()) for name, inside in columns.inside.items()}
    labels = {name: texts[name] for name in (*columns.attributes, *columns.others)}
    anchors = {name: people[name].cast(pa.float64()) for name in ANCHORS}
    files = {
        "people.parquet": anchors | {name: texts[name] for name in columns.regions},
        "splits.parquet": {"split": people["split"].cast(pa.string())},
    }
    if labels:
        files[LABELS] = labels
    for name, values in files.items():
        table = pa.table({"user_id": people["user_id"].cast(pa.string())} | values)
        write_parquet(folder / name, table.schema, table.to_batches())
    return find_groups(labels, config, columns)
