"""Composition P: the share of each group among the people of each region, from census-like tables or from labels."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from mobatlas.data.schema import ATTRIBUTE_NAMES, looks_like_region, region_column
from mobatlas.errors import MobatlasError, suggestion
from mobatlas.groups import DEFAULT_GROUPS, SEPARATOR, Groups, order_levels
from mobatlas.io.tables import keys, numbers, read_table, require_columns
from mobatlas.regions.ages import age_ranges, parse_age
from mobatlas.regions.types import Composition, Floats

STRADDLE = ("refuse", "uniform")
TOLERANCE = 1e-3  # of shares that should sum to 1: published ones are rounded
OLDEST = 99  # the last year of an open-ended range, where its people must be spread over years
GENDERS = {
    "M": ("m", "male", "males", "man", "men"),
    "F": ("f", "female", "females", "woman", "women"),
}
MEASURES = ("count", "share", "n")
ACS_COLUMN = re.compile(r"B01001_?(\d{3})E?", re.IGNORECASE)
# B01001_003 to _025 are men of these ages, _027 to _049 women; 001, 002 and 026 are totals.
ACS_AGES = (
    "<5", "5-9", "10-14", "15-17", "18-19", "20", "21", "22-24", "25-29", "30-34", "35-39", "40-44", "45-49", "50-54",
    "55-59", "60-61", "62-64", "65-66", "67-69", "70-74", "75-79", "80-84", "85+",
)  # fmt: skip


@dataclass(frozen=True)
class _Cells:
    """A table of any layout, as people of each cell in each region."""

    regions: tuple[str, ...]
    attributes: tuple[str, ...] | None  # None: parts of group names, which say no attribute
    levels: tuple[tuple[str, ...], ...]  # (cells, attributes)
    values: Floats  # (regions, cells)
    shares: bool = False
    n: Floats | None = None  # (regions,)


def read_composition(
    path: Path | str,
    groups: Groups | None = None,
    n: float | None = None,
    straddle: str = "refuse",
    notes: list[str] | None = None,
) -> Composition:
    """P from a census-like table; `notes` collects what was decided on the way, one sentence each.

    Layouts: region, group and count or share; attribute columns instead of group; an age range with columns of men and women;
    ACS B01001. `n` is the people per region behind shares (None: exact). `straddle="uniform"` spreads the people of an age
    range that covers two groups evenly over its years.
    """
    if straddle not in STRADDLE:
        raise MobatlasError(f"straddle '{straddle}' does not exist (known: {', '.join(STRADDLE)})")
    path, notes = Path(path), [] if notes is None else notes
    table = read_table(path)
    cells = _acs(path, table) or _men_and_women(path, table) or _long(path, table, groups)
    _check_values(path, cells)
    if groups is None:
        # 23 age ranges x 2 are too many groups for anybody: a bare ACS table is read into the default ones
        groups = (
            DEFAULT_GROUPS
            if any(map(ACS_COLUMN.fullmatch, table.columns))
            else _inferred(path, cells)
        )
    people = cells.values @ _cell_weights(path, cells, groups, straddle, notes)  # (regions, groups)
    total = people.sum(1)
    if not total.all():
        nobody = np.flatnonzero(total == 0)
        raise MobatlasError(
            f"{path}: region '{cells.regions[nobody[0]]}' has no people; leave it out"
        )
    if cells.shares and n is not None and not n > 0:
        raise MobatlasError(f"{path}: n is {n:g}, but people per region are more than none")
    given = cells.n if n is None else np.full(len(total), float(n))
    known = np.full(len(total), np.inf) if given is None else given
    return Composition(
        groups, cells.regions, people / total[:, None], known if cells.shares else total
    )


def composition_from_labels(
    group_of_person: npt.NDArray[np.int64],
    region_of_person: Sequence[str | None] | npt.NDArray[Any],
    groups: Groups,
    regions: Sequence[str] | None = None,
) -> Composition:
    """P counted from people with known labels; who has no group (-1) or no region is not counted."""
    codes, names = region_codes(region_of_person, regions)
    counted = (group_of_person >= 0) & (codes >= 0)
    cell = codes[counted] * len(groups) + group_of_person[counted]
    counts = (
        np.bincount(cell, minlength=len(names) * len(groups))
        .reshape(len(names), len(groups))
        .astype(np.float64)
    )
    n = counts.sum(1)
    if not len(n) or not n.all():
        which = f"region '{names[int(np.argmin(n))]}'" if len(n) else "every region"
        raise MobatlasError(f"labels: {which} has no people with known labels; leave it out")
    return Composition(groups, names, counts / n[:, None], n)


def region_codes(
    region_of_person: Sequence[str | None] | npt.NDArray[Any], regions: Sequence[str] | None = None
) -> tuple[npt.NDArray[np.int64], tuple[str, ...]]:
    """Numbers of regions, -1 for none, from ids (None or a region not listed: none) or from such numbers."""
    values = np.asarray(region_of_person)
    if regions is not None and np.issubdtype(values.dtype, np.integer):
        return values.astype(np.int64), tuple(regions)
    ids = [None if value is None else str(value) for value in values.tolist()]
    names = (
        tuple(regions)
        if regions is not None
        else tuple(sorted({name for name in ids if name is not None}))
    )
    position: dict[str | None, int] = {name: code for code, name in enumerate(names)}
    return np.array([position.get(name, -1) for name in ids], dtype=np.int64), names


def _acs(path: Path, table: pd.DataFrame) -> _Cells | None:
    matches = {name: ACS_COLUMN.fullmatch(name) for name in table.columns}
    number = {int(match.group(1)): name for name, match in matches.items() if match}
    if not number:
        return None
    ages = [*range(3, 26), *range(27, 50)]
    for code in ages:
        if code not in number:
            raise MobatlasError(
                f"{path}: column 'B01001_{code:03d}E' is missing; download the whole table B01001"
            )
    region = region_column(path, list(table.columns))
    # data.census.gov writes long names under the header: "Geography", "Estimate!!Total:!!Male:!!Under 5 years"
    if not any(str(table[column].iloc[0])[-1:].isdigit() for column in (region, number[3])):
        table = table.iloc[1:]
    codes, names = keys(path, table, region)
    if len(names) < len(codes):
        twice = names[int(np.argmax(np.bincount(codes) > 1))]
        raise MobatlasError(f"{path}: region '{twice}' appears twice; give each region one row")
    values = np.stack([numbers(path, table, number[code]) for code in ages], axis=1)
    levels = tuple((age, gender) for gender in GENDERS for age in ACS_AGES)
    return _Cells(names, ("age", "gender"), levels, values)


def _men_and_women(path: Path, table: pd.DataFrame) -> _Cells | None:
    columns = {
        gender: [c for c in table.columns if c.lower() in words]
        for gender, words in GENDERS.items()
    }
    if any(len(found) != 1 for found in columns.values()):
        return None
    region, region_names = keys(path, table, region_column(path, list(table.columns)))
    ages = [c for c in table.columns if "age" in c.lower().split("_")]
    age, age_names = keys(path, table, ages[0]) if ages else (np.zeros_like(region), ("all",))
    values = [
        _pivot(path, region, region_names, age, age_names, numbers(path, table, columns[g][0]))
        for g in GENDERS
    ]
    levels = tuple((name, gender) for gender in GENDERS for name in age_names)
    cells = _Cells(region_names, ("age", "gender"), levels, np.concatenate(values, axis=1))
    return (
        cells
        if ages
        else _Cells(region_names, ("gender",), tuple((g,) for g in GENDERS), cells.values)
    )


def _long(path: Path, table: pd.DataFrame, groups: Groups | None) -> _Cells:
    columns = list(table.columns)
    where = region_column(path, columns)
    if "count" not in columns and "share" not in columns:
        require_columns(str(path), columns, ("count",))
    attributes = ["group"] if "group" in columns else _attribute_columns(columns, where, groups)
    if not attributes:
        require_columns(str(path), columns, ("group",))
    region, region_names = keys(path, table, where)
    parts = [keys(path, table, name) for name in attributes]
    cell = np.ravel_multi_index([codes for codes, _ in parts], [len(names) for _, names in parts])
    present, cell = np.unique(cell, return_inverse=True)
    places = np.unravel_index(present, [len(names) for _, names in parts])
    levels = [
        tuple(n[p] for (_, n), p in zip(parts, place, strict=True))
        for place in zip(*places, strict=True)
    ]
    if attributes == ["group"]:
        levels = [tuple(name.split(SEPARATOR)) for (name,) in levels]
    shares = "count" not in columns
    values = numbers(path, table, "share" if shares else "count")
    pivoted = _pivot(
        path, region, region_names, cell, [SEPARATOR.join(level) for level in levels], values
    )
    people = None
    if "n" in columns:
        people = np.zeros(len(region_names))
        people[region] = numbers(path, table, "n")
    named = None if attributes == ["group"] else tuple(attributes)
    return _Cells(region_names, named, tuple(levels), pivoted, shares, people)


def _attribute_columns(columns: list[str], region: str, groups: Groups | None) -> list[str]:
    rest = [
        name for name in columns if name not in (region, *MEASURES) and not looks_like_region(name)
    ]
    if groups is None:
        return [name for name in rest if name.lower() != "name"]
    wanted = {name.lower() for name in (*groups.attribute_names, *ATTRIBUTE_NAMES)}
    return [name for name in rest if name.lower() in wanted]


def _pivot(
    path: Path,
    region: npt.NDArray[np.int64],
    regions: Sequence[str],
    cell: npt.NDArray[np.int64],
    cells: Sequence[str],
    values: Floats,
) -> Floats:
    flat = region * len(cells) + cell
    twice = pd.Series(flat).duplicated().to_numpy()
    if twice.any():
        row = int(np.argmax(twice))
        raise MobatlasError(
            f"{path}: region '{regions[region[row]]}' has '{cells[cell[row]]}' twice; give each group of a region one row"
        )
    pivoted = np.zeros((len(regions), len(cells)))
    pivoted.flat[flat] = values
    return pivoted


def _check_values(path: Path, cells: _Cells) -> None:
    what = "share" if cells.shares else "count"
    if (cells.values < 0).any():
        region, cell = np.argwhere(cells.values < 0)[0]
        name, value = SEPARATOR.join(cells.levels[cell]), cells.values[region, cell]
        raise MobatlasError(
            f"{path}: the {what} of '{name}' in region '{cells.regions[region]}' is negative ({value:g}); mend it"
        )
    total = cells.values.sum(1)
    if (total == 0).any():
        raise MobatlasError(
            f"{path}: region '{cells.regions[int(np.argmin(total))]}' has no people; leave it out"
        )
    wrong = np.abs(total - 1) > TOLERANCE
    if cells.shares and wrong.any():
        row = int(np.argmax(wrong))
        raise MobatlasError(
            f"{path}: shares of region '{cells.regions[row]}' sum to {total[row]:.4g}, not 1; pass counts, or normalise them"
        )
    if cells.n is not None and not (cells.n > 0).all():
        raise MobatlasError(
            f"{path}: region '{cells.regions[int(np.argmin(cells.n))]}' has no people; leave it out"
        )


def _inferred(path: Path, cells: _Cells) -> Groups:
    """Groups from the names in the file."""
    attributes = {}
    by_width = {len(level): SEPARATOR.join(level) for level in cells.levels}
    if len(by_width) > 1:
        one, two, *_ = by_width.values()
        raise MobatlasError(
            f"{path}: group names '{one}' and '{two}' differ in their number of levels; mend them"
        )
    for number in range(min(by_width)):
        levels = order_levels({level[number] for level in cells.levels})
        known = [name for name, default in DEFAULT_GROUPS.attributes if default == levels]
        name = (
            cells.attributes[number]
            if cells.attributes
            else (known[0] if known else f"attribute{number + 1}")
        )
        attributes[name] = levels
    return Groups.of(attributes)


def _cell_weights(
    path: Path, cells: _Cells, groups: Groups, straddle: str, notes: list[str]
) -> Floats:
    """Which part of the people of each cell is in each group: (cells, groups)."""
    weights = np.ones((len(cells.levels), len(groups)))
    for attribute, (name, levels) in enumerate(groups.attributes):
        own = _own_levels(path, cells, groups, attribute)
        distinct = list(dict.fromkeys(own))
        table = _level_weights(path, distinct, levels, straddle, notes)
        unknown = [level for level, row in zip(distinct, table, strict=True) if row is None]
        if unknown and cells.attributes is None:
            raise _no_such_group(path, SEPARATOR.join(cells.levels[own.index(unknown[0])]), groups)
        if unknown:
            hint = f"{suggestion(unknown[0], levels)} (known: {', '.join(levels)})"
            raise MobatlasError(f"{path}: level '{unknown[0]}' of '{name}' does not exist{hint}")
        place = {level: row for level, row in zip(distinct, table, strict=True) if row is not None}
        weights *= np.stack([place[level] for level in own])[:, groups.level_codes[:, attribute]]
    return weights


def _own_levels(path: Path, cells: _Cells, groups: Groups, attribute: int) -> list[str]:
    """The table's level of one attribute of the groups, cell by cell; matched by name, else by what the levels look like."""
    name, levels = groups.attributes[attribute]
    if cells.attributes is None:
        wrong = [level for level in cells.levels if len(level) != len(groups.attributes)]
        if wrong:
            raise _no_such_group(path, SEPARATOR.join(wrong[0]), groups)
        return [level[attribute] for level in cells.levels]
    columns = {
        own.lower(): [level[n] for level in cells.levels] for n, own in enumerate(cells.attributes)
    }
    if name.lower() in columns:
        return columns[name.lower()]
    for kind in (_all_ages, _all_genders):
        for own in columns.values():
            if kind(levels) and kind(own):
                return own
    raise MobatlasError(
        f"{path}: nothing in it says '{name}' (it has: {', '.join(cells.attributes)}); add a column"
    )


def _level_weights(
    path: Path, own: list[str], levels: tuple[str, ...], straddle: str, notes: list[str]
) -> list[Floats | None]:
    """For each level of a table, its parts in the levels of an attribute; None where it cannot be placed."""
    exact = np.eye(len(levels))
    genders = [_gender(level) for level in levels]
    theirs, ours = age_ranges(own), age_ranges(levels)
    rows: list[Floats | None] = []
    for number, level in enumerate(own):
        if level in levels:
            rows.append(exact[levels.index(level)])
        elif _gender(level) and _gender(level) in genders:
            rows.append(exact[genders.index(_gender(level))])
        elif theirs is not None and ours is not None:
            rows.append(_parts(path, level, theirs[number], levels, ours, straddle, notes))
        else:
            rows.append(None)
    return rows


def _no_such_group(path: Path, group: str, groups: Groups) -> MobatlasError:
    hint = f"{suggestion(group, groups.names)} (known: {'; '.join(groups.names)})"
    return MobatlasError(f"{path}: group '{group}' does not exist{hint}")


def _all_ages(levels: Sequence[str]) -> bool:
    return all(map(parse_age, levels))


def _all_genders(levels: Sequence[str]) -> bool:
    return all(map(_gender, levels))


def _gender(level: str) -> str | None:
    return next((gender for gender, words in GENDERS.items() if level.lower() in words), None)


def _parts(
    path: Path,
    own: str,
    years: tuple[int, float],
    levels: tuple[str, ...],
    ranges: list[tuple[int, float]],
    straddle: str,
    notes: list[str],
) -> Floats:
    low, high = years[0], min(years[1], max(OLDEST, years[0]) + 1)
    overlap = np.array([max(0.0, min(high, end) - max(low, start)) for start, end in ranges]) / (
        high - low
    )
    touched = [f"'{level}'" for level, part in zip(levels, overlap, strict=True) if part > 0]
    if not touched:
        notes.append(f"{path.name}: people of age range '{own}' are in no group and are left out")
    elif overlap.max() < 1 - 1e-9:
        both = " and ".join(touched if len(touched) > 1 else [*touched, "no group"])
        if straddle == "refuse":
            raise MobatlasError(
                f"{path}: age range '{own}' straddles {both}; give finer ranges, or spread its people evenly over its years "
                "(--split-ages; straddle: uniform in a configuration)"
            )
        ending = f" (taken to end at {OLDEST})" if np.isinf(years[1]) else ""
        notes.append(
            f"{path.name}: people of age range '{own}'{ending} are spread evenly over its years to {both}"
        )
    return overlap
