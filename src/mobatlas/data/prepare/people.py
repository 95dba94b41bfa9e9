"""People: anchors and regions on one side, labels on the other, so that no model sees the second by accident."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import ibis
import pyarrow as pa
from ibis import ir

from mobatlas.config import PrepareConfig
from mobatlas.data.prepare.columns import as_number, as_text, is_word
from mobatlas.data.prepare.engine import Engine, one
from mobatlas.data.readers.base import Source
from mobatlas.data.schema import ANCHORS, ATTRIBUTE_NAMES, PEOPLE_REQUIRED, looks_like_region
from mobatlas.data.vocabulary import DEGREES, whole
from mobatlas.errors import MobatlasError, suggestion
from mobatlas.groups import Groups, order_levels
from mobatlas.io.tables import require_columns


@dataclass(frozen=True)
class PeopleColumns:
    """Which column of people is what."""

    attributes: tuple[str, ...] = ()
    regions: tuple[str, ...] = ()
    others: tuple[str, ...] = ()  # neither: kept with the labels

    @property
    def inside(self) -> dict[str, str]:
        """For each column, a name that cannot meet one of the pipeline's own."""
        return {
            name: f"described_{number}"
            for number, name in enumerate((*self.attributes, *self.regions, *self.others))
        }


def sort_columns(source: Source, config: PrepareConfig) -> PeopleColumns:
    """Attributes and regions as configured, or by their names."""
    if source.people is None:
        for key, value in (("attributes", config.attributes), ("regions", config.regions)):
            if value is not None:
                raise MobatlasError(
                    f"{source.where}: the source has no people table, so '{key}' cannot be given"
                )
        return PeopleColumns()
    columns = [name for name in source.people.columns if name != "user_id" and name not in ANCHORS]
    require_columns(source.people_where, source.people.columns, PEOPLE_REQUIRED)
    for key, names in (("attributes", config.attributes or ()), ("regions", config.regions or ())):
        for name in names:
            if name not in columns:
                raise MobatlasError(
                    f"{key}: {source.people_where} has no column '{name}'{suggestion(name, columns)}"
                )
    attributes = (
        tuple(config.attributes)
        if config.attributes is not None
        else tuple(name for name in columns if name.lower() in ATTRIBUTE_NAMES)
    )
    regions = (
        tuple(config.regions)
        if config.regions is not None
        else tuple(name for name in columns if looks_like_region(name) and name not in attributes)
    )
    both = set(attributes) & set(regions)
    if both:
        raise MobatlasError(
            f"{source.people_where}: column '{min(both)}' is named both as an attribute and as a region"
        )
    others = tuple(name for name in columns if name not in attributes and name not in regions)
    return PeopleColumns(attributes, regions, others)


def canonical_people(source: Source, columns: PeopleColumns, engine: Engine) -> ir.Table | None:
    """One row a person: anchors as numbers, everything else as text."""
    table = source.people
    if table is None:
        return None
    where = source.people_where
    given = [name for name in ANCHORS if name in table.columns]
    everything = table.select(
        user_id=as_text(table.user_id),
        **{
            name: as_number(table[name]) if name in given else ibis.null("float64")
            for name in ANCHORS
        },
        **{f"raw_{name}": table[name] for name in given},
        **{inside: as_text(table[name]) for name, inside in columns.inside.items()},
    )
    outside = {
        name: (everything[name].abs() > (90 if name.endswith("lat") else 180)).fill_null(False)
        for name in ANCHORS
    }
    words = {
        f"word_{name}": everything[name].isnull() & is_word(everything[f"raw_{name}"])
        for name in given
    }
    counts = one(
        engine,
        everything.aggregate(
            rows=everything.count(),
            distinct=everything.user_id.nunique(),
            **{name: rows.sum() for name, rows in (outside | words).items()},
        ),
    )
    if counts["rows"] != counts["distinct"]:
        raise MobatlasError(
            f"{where}: column 'user_id' is empty or repeated in some rows; give each person one row"
        )
    for name in ANCHORS:
        if counts[name]:
            raise MobatlasError(
                f"{where}: column '{name}' is outside the globe in {counts[name]:,} rows; mend them"
            )
        if counts.get(f"word_{name}"):
            raise MobatlasError(
                f"{where}: column '{name}' is no number in {counts[f'word_{name}']:,} rows; leave them empty"
            )
    return everything.drop(*(f"raw_{name}" for name in given))


def require_known_people(users: ir.Table, people: ir.Table, source: Source, engine: Engine) -> int:
    """How many of those who made visits are in people; none at all is a mistake in the ids."""
    known = int(
        one(engine, users.semi_join(people, "user_id").aggregate(n=lambda t: t.count()))["n"]
    )
    if not known:
        firsts = [
            engine.collect(table.select("user_id").order_by("user_id").limit(1))
            for table in (users, people)
        ]
        there, here = (first["user_id"].to_pylist() for first in firsts)
        if there and not here:
            raise MobatlasError(
                f"{source.people_where}: holds nobody; leave it out, or give a row for each person"
            )
        if there:
            raise MobatlasError(
                f"{source.people_where}: no user_id of {source.where} is in it (there '{there[0]}', here '{here[0]}'); "
                "write the ids the same way in both"
            )
    return known


def anchors_from_visits(visits: ir.Table) -> ir.Table:
    """Mean coordinates of each user's home and work visits."""
    at_home, at_work = visits.home, visits.work & ~visits.home
    sums = visits.filter(visits.home | visits.work).group_by("user")
    totals = sums.aggregate(
        home_n=at_home.cast("int64").sum(),
        work_n=at_work.cast("int64").sum(),
        **{
            f"{place}_{axis}": ibis.ifelse(where, whole(visits[axis]), 0).sum()
            for place, where in (("home", at_home), ("work", at_work))
            for axis in ("lat", "lon")
        },
    )
    return totals.select(
        "user",
        **{
            f"seen_{name}": totals[name].cast("float64")
            / totals[f"{name[:4]}_n"].nullif(0)
            / DEGREES
            for name in ANCHORS
        },
    )


def join_people(
    users: ir.Table, seen: ir.Table, people: ir.Table | None, config: PrepareConfig
) -> ir.Table:
    """Everybody with anchors (given, else seen), and whether they are complete enough to be kept."""
    joined = users.left_join(seen, "user").drop("user_right")
    if people is not None:
        joined = joined.left_join(people, "user_id").drop("user_id_right")
        # a place is a pair of coordinates: never one of each
        given = {
            place: joined[f"{place}_lat"].notnull() & joined[f"{place}_lon"].notnull()
            for place in ("home", "work")
        }
        anchors = {
            name: ibis.ifelse(given[name[:4]], joined[name], joined[f"seen_{name}"])
            for name in ANCHORS
        }
    else:
        anchors = {name: joined[f"seen_{name}"] for name in ANCHORS}
    joined = joined.mutate(**anchors).drop(*(f"seen_{name}" for name in ANCHORS))
    complete = ibis.literal(True)
    if config.anchors.require_both:
        for name in ANCHORS:
            complete = complete & joined[name].notnull()
    return joined.mutate(eligible=complete)


def find_groups(
    labels: Mapping[str, pa.ChunkedArray], config: PrepareConfig, columns: PeopleColumns
) -> Groups | None:
    """The groups that the attribute columns span."""
    if not columns.attributes:
        return None
    levels: dict[str, tuple[str, ...]] = {}
    for name in columns.attributes:
        found = {value for value in labels[name].unique().to_pylist() if value is not None}
        if isinstance(config.attributes, dict) and config.attributes[name]:
            levels[name] = config.attributes[name]
            unknown = sorted(found - set(levels[name]))
            if unknown:
                raise MobatlasError(
                    f"attributes.{name}: people holds '{unknown[0]}', which is not among the levels "
                    f"{', '.join(levels[name])}"
                )
        elif not found:
            raise MobatlasError(
                f"people: attribute column '{name}' is empty for everybody who was kept"
            )
        else:
            levels[name] = order_levels(found)
    return Groups.of(levels)
