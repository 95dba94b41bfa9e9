"""People: anchors and regions are kept apart from labels, so that no model sees a label."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import and_

import ibis
import pyarrow as pa
from ibis import ir

from mobatlas.config import PrepareConfig
from mobatlas.data.prepare.engine import Engine, one
from mobatlas.data.prepare.steps import DEGREES, whole_degrees
from mobatlas.data.prepare.tables import as_number, as_text, is_word
from mobatlas.data.readers.base import Source
from mobatlas.data.types import ANCHORS, ATTRIBUTE_NAMES, PEOPLE_REQUIRED, looks_like_region
from mobatlas.errors import MobatlasError, suggestion
from mobatlas.groups import Groups, order_levels
from mobatlas.io.tables import require_columns


@dataclass(frozen=True)
class PeopleColumns:
    """The columns of people by their use."""

    attributes: tuple[str, ...] = ()
    regions: tuple[str, ...] = ()
    others: tuple[str, ...] = ()  # neither: stored with the labels

    @property
    def inside(self) -> dict[str, str]:
        """For each column, a name that differs from every column of the pipeline."""
        return {
            name: f"described_{number}"
            for number, name in enumerate((*self.attributes, *self.regions, *self.others))
        }


def sort_columns(source: Source, config: PrepareConfig) -> PeopleColumns:
    """Attributes and regions as configured, or by their names."""
    configured = {"attributes": config.attributes, "regions": config.regions}
    if source.people is None:
        for key, names in configured.items():
            if names is not None:
                raise MobatlasError(
                    f"{source.where}: the source has no people table; remove '{key}'"
                )
        return PeopleColumns()
    columns = [name for name in source.people.columns if name not in ("user_id", *ANCHORS)]
    require_columns(source.people_where, source.people.columns, PEOPLE_REQUIRED)
    for key, names in configured.items():
        for name in names or ():
            if name not in columns:
                raise MobatlasError(
                    f"{key}: {source.people_where} has no column '{name}'"
                    f"{suggestion(name, columns)}"
                )
    attributes = config.attributes
    if attributes is None:
        attributes = tuple(name for name in columns if name.lower() in ATTRIBUTE_NAMES)
    regions = config.regions
    if regions is None:
        unnamed = [name for name in columns if name not in attributes]
        regions = tuple(filter(looks_like_region, unnamed))
    both = set(attributes) & set(regions)
    if both:
        raise MobatlasError(
            f"{source.people_where}: column '{min(both)}' is named both as an attribute and as a "
            "region"
        )
    return PeopleColumns(
        attributes=tuple(attributes),
        regions=tuple(regions),
        others=tuple(name for name in columns if name not in (*attributes, *regions)),
    )


def canonical_people(source: Source, columns: PeopleColumns, engine: Engine) -> ir.Table | None:
    """One row per person: anchors as numbers, everything else as text."""
    table = source.people
    if table is None:
        return None
    present = [name for name in ANCHORS if name in table.columns]
    refuse_bad_rows(table, source.people_where, "user_id", present, engine)
    missing = ibis.null("float64")
    return table.select(
        user_id=as_text(table.user_id),
        **{name: as_number(table[name]) if name in present else missing for name in ANCHORS},
        **{inside: as_text(table[name]) for name, inside in columns.inside.items()},
    )


def refuse_bad_rows(
    table: ir.Table, where: str, key: str, coordinates: Sequence[str], engine: Engine
) -> None:
    """Refuse a table with repeated or empty keys, or with invalid coordinates."""
    rows = table.select(
        key=as_text(table[key]),
        **{name: as_number(table[name]) for name in coordinates},
        **{f"raw_{name}": table[name] for name in coordinates},
    )
    faults = {"rows": rows.count(), "distinct": rows.key.nunique()}
    for name in coordinates:
        limit = 90 if name.endswith("lat") else 180
        not_a_number = rows[name].isnull() & is_word(rows[f"raw_{name}"])
        faults[name] = ((rows[name].abs() > limit).fill_null(False) | not_a_number).sum()
    counts = one(engine, rows.aggregate(**faults))
    if counts["rows"] != counts["distinct"]:
        raise MobatlasError(
            f"{where}: column '{key}' is empty or repeated in some rows; fix these rows"
        )
    for name in coordinates:
        if counts[name]:
            raise MobatlasError(
                f"{where}: column '{name}' is not a valid coordinate in {counts[name]:,} rows; "
                "correct them, or leave them empty"
            )


def require_known_people(users: ir.Table, people: ir.Table, source: Source, engine: Engine) -> int:
    """Count the users with visits who are in people; zero means that the ids do not match."""
    matched = users.semi_join(people, "user_id").aggregate(n=lambda t: t.count())
    known = int(one(engine, matched)["n"])
    if known:
        return known
    in_visits, in_people = (
        engine.collect(table.select("user_id").order_by("user_id").limit(1))["user_id"].to_pylist()
        for table in (users, people)
    )
    if in_visits and not in_people:
        raise MobatlasError(
            f"{source.people_where}: the table has no rows; leave it out, or give a row for each "
            "person"
        )
    if in_visits:
        raise MobatlasError(
            f"{source.people_where}: the table has no user_id of {source.where} "
            f"(people have '{in_people[0]}', visits have '{in_visits[0]}'); "
            "write the ids the same way in both"
        )
    return known


def anchors_from_visits(visits: ir.Table) -> ir.Table:
    """Mean coordinates of each user's home and work visits."""
    flags = {"home": visits.home, "work": visits.work & ~visits.home}
    totals = {f"{place}_n": flag.cast("int64").sum() for place, flag in flags.items()}
    for name in ANCHORS:
        place, axis = name.split("_")
        totals[name] = ibis.ifelse(flags[place], whole_degrees(visits[axis]), 0).sum()
    sums = visits.filter(visits.home | visits.work).group_by("user").aggregate(**totals)
    return sums.select(
        "user",
        **{
            f"seen_{name}": sums[name].cast("float64") / sums[f"{name[:4]}_n"].nullif(0) / DEGREES
            for name in ANCHORS
        },
    )


def join_people(
    users: ir.Table, seen: ir.Table, people: ir.Table | None, config: PrepareConfig
) -> ir.Table:
    """All users with anchors (of people, else of visits), and whether they may be kept."""
    joined = users.left_join(seen, "user").drop("user_right")
    anchors = {name: joined[f"seen_{name}"] for name in ANCHORS}
    if people is not None:
        joined = joined.left_join(people, "user_id").drop("user_id_right")
        for name in ANCHORS:
            # a place is a pair of coordinates: never one from people and one from visits
            is_known = joined[f"{name[:4]}_lat"].notnull() & joined[f"{name[:4]}_lon"].notnull()
            anchors[name] = ibis.ifelse(is_known, joined[name], joined[f"seen_{name}"])
    joined = joined.mutate(**anchors).drop(*(f"seen_{name}" for name in ANCHORS))
    required = [joined[name].notnull() for name in ANCHORS if config.anchors.require_both]
    return joined.mutate(eligible=reduce(and_, required, ibis.literal(True)))


def find_groups(
    labels: Mapping[str, pa.ChunkedArray], config: PrepareConfig, columns: PeopleColumns
) -> Groups | None:
    """The groups that the attribute columns span."""
    if not columns.attributes:
        return None
    configured = config.attributes if isinstance(config.attributes, dict) else {}
    levels: dict[str, tuple[str, ...]] = {}
    for name in columns.attributes:
        values = set(labels[name].unique().to_pylist()) - {None}
        levels[name] = configured.get(name) or order_levels(values)
        if not levels[name]:
            raise MobatlasError(
                f"people: column '{name}' is empty for all people with a trajectory; fill it, or "
                "leave it out of attributes"
            )
        unknown = values - set(levels[name])
        if unknown:
            raise MobatlasError(
                f"attributes.{name}: people has '{min(unknown)}', which is not among the "
                f"levels {', '.join(levels[name])}"
            )
    return Groups.of(levels)
