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
from mobatlas.data.prepare.tables import NO_ANSWER, as_bin, as_number, as_text, is_word
from mobatlas.data.readers.base import Source
from mobatlas.data.types import ANCHORS, ATTRIBUTE_NAMES, PEOPLE_REQUIRED, looks_like_region
from mobatlas.errors import MobatlasError, suggestion
from mobatlas.groups import Groups, order_levels
from mobatlas.io.tables import require_columns

MAX_NUMBERS = 12  # levels of a numeric attribute, such as codes of age groups
OLDEST = 120  # surveys write 999 and the like for no answer


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
    configured = {"attributes": config.attributes, "regions": config.regions, "bins": config.bins}
    if source.people is None:
        for key, names in configured.items():
            if names:
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


def canonical_people(
    source: Source, columns: PeopleColumns, engine: Engine, config: PrepareConfig
) -> ir.Table | None:
    """One row per person: anchors as numbers, everything else as text."""
    table = source.people
    if table is None:
        return None
    binned = {}
    for name, limits in config.bins.items():
        largest = OLDEST if name.lower().startswith("age") else float("inf")
        binned[name] = as_bin(table[name], limits, largest)
    table = table.mutate(**binned)
    if not isinstance(config.attributes, dict):  # which lists the levels
        _refuse_numeric_attributes(table, columns, source.people_where, engine)
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
        by_key = rows.group_by("key").aggregate(n=rows.count())
        first = by_key.filter((by_key.n > 1) | by_key.key.isnull()).order_by("key").limit(1)
        shown = one(engine, first)["key"]
        raise MobatlasError(
            f"{where}: column '{key}' is empty or repeated in "
            f"{counts['rows'] - counts['distinct']:,} of {counts['rows']:,} rows"
            f"{f' (for example {shown!r})' if shown else ''}; keep one row for each"
        )
    for name in coordinates:
        if counts[name]:
            raise MobatlasError(
                f"{where}: column '{name}' is not a valid coordinate in {counts[name]:,} rows; "
                "correct them, or leave them empty"
            )


def require_known_people(
    users: ir.Table, people: ir.Table, source: Source, engine: Engine
) -> tuple[int, list[str]]:
    """Count the users with visits who are in people, and warn of ids that differ in form.

    No user in people means that the ids do not match, which is refused.
    """
    # staged, because Ibis cannot join the result of a join with the same table again
    unknown = engine.stage(users.anti_join(people, "user_id").select("user_id"), "unknown")
    everyone, missing, listed = (
        int(one(engine, table.aggregate(n=table.count()))["n"])
        for table in (users, unknown, people)
    )
    if everyone and not listed:
        raise MobatlasError(
            f"{source.people_where}: the table has no rows; leave it out, or give a row for each "
            "person"
        )
    other_form = unknown.select(visits="user_id", form=_id_form(unknown.user_id)).join(
        people.select(people="user_id", form=_id_form(people.user_id)), "form"
    )
    pairs = engine.collect(other_form.order_by(["visits", "people"]).limit(1)).to_pylist()
    if not missing or (missing < everyone and not pairs):
        return everyone - missing, []
    if pairs:
        n = one(engine, other_form.aggregate(n=other_form.visits.nunique()))["n"]
        problem = f"{n:,} of {everyone:,} people with visits have another form of user_id here"
    else:
        first = {"visits": users.user_id.min(), "people": people.user_id.min()}
        pairs = [{name: engine.collect(key.as_table())[0][0] for name, key in first.items()}]
        problem = f"the table has no user_id of {source.where}"
    sentence = (
        f"{source.people_where}: {problem} (people have '{pairs[0]['people']}', visits have "
        f"'{pairs[0]['visits']}'); write the ids the same way in both"
    )
    if missing == everyone:
        raise MobatlasError(sentence)
    return everyone - missing, [sentence]


def _id_form(user_id: ir.Value) -> ir.Value:
    """An id without what programs add or drop: case, spaces, leading zeros, and `.0`."""
    return user_id.lower().re_replace(r"^\s*0*|(\.0+)?\s*$", "")


def _refuse_numeric_attributes(
    table: ir.Table, columns: PeopleColumns, where: str, engine: Engine
) -> None:
    """Refuse attributes that are measured in numbers, each of which would be a group."""
    for name in columns.attributes:
        number = as_number(table[name])
        facts = {
            "words": (number.isnull() & ~as_text(table[name]).lower().isin(NO_ANSWER)).sum(),
            "levels": number.nunique(),
            "low": number.min(),
            "high": number.max(),
        }
        row = one(engine, table.aggregate(**facts))
        if not row["words"] and row["levels"] > MAX_NUMBERS:
            raise MobatlasError(
                f"{where}: column '{name}' has {row['levels']:,} different numbers from "
                f"{row['low']:g} to {row['high']:g}, and each would be a group; give the limits of "
                f"bins, such as --set bins.{name}=[30,40,50]"
            )


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
