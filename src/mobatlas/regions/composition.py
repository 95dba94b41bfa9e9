"""Composition P: the share of each group in each region, from census tables or from labels."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from mobatlas.data.types import ATTRIBUTE_NAMES, Floats, Ints, looks_like_region, region_column
from mobatlas.errors import MobatlasError, clear_suggestion, suggestion
from mobatlas.groups import DEFAULT_GROUPS, SEPARATOR, Groups, order_levels
from mobatlas.io.tables import key_column, number_column, read_table, require_columns
from mobatlas.regions.types import Composition

Keys = tuple[Ints, Sequence[str]]  # the code of each row, and the name of each code
STRADDLE = ("refuse", "uniform")
TOLERANCE = 1e-3  # of the sum of shares: published shares are rounded
OLDEST = 99  # the last year of an open-ended range whose people are spread over years
GENDERS = {
    "M": ("m", "male", "males", "man", "men"),
    "F": ("f", "female", "females", "woman", "women"),
}
ALL = "\0all"  # in the place of a level: all levels; no table can contain it
MEASURES = ("count", "share", "n")
ACS_COLUMN = re.compile(r"B01001_?(\d{3})E?", re.IGNORECASE)
# B01001_003 to _025 are men of these ages, _027 to _049 women; 001, 002 and 026 are totals.
ACS_AGES = (
    "<5", "5-9", "10-14", "15-17", "18-19", "20", "21", "22-24", "25-29", "30-34", "35-39",
    "40-44", "45-49", "50-54", "55-59", "60-61", "62-64", "65-66", "67-69", "70-74", "75-79",
    "80-84", "85+",
)  # fmt: skip


@dataclass(frozen=True)
class _Cells:
    """A table of any layout, as people of each cell in each region."""

    regions: tuple[str, ...]
    attributes: tuple[str, ...] | None  # None: levels are parts of group names
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
    """Read the composition P from a census table.

    Parameters
    ----------
    path
        CSV or Parquet: region, group and count or share; attribute columns instead of group; an
        age range with columns of men and women; or ACS B01001.
    groups
        The groups to read; default: the groups named in the table.
    n
        People per region behind shares; default: the shares are exact.
    straddle
        "uniform" spreads an age range that covers two groups evenly over its years; "refuse"
        raises an error.
    notes
        A list that receives one sentence per decision.

    Returns
    -------
    Composition
        Shares of groups per region.

    Examples
    --------
    >>> composition = read_composition("census.csv", straddle="uniform")  # doctest: +SKIP
    """
    path = Path(path)
    cells, inferred = _read_cells(path, groups, straddle)
    return _composition(path, cells, groups or inferred, n, (straddle, notes))


def read_margin(
    path: Path,
    groups: Groups | None,
    n: float | None = None,
    straddle: str = "refuse",
    notes: list[str] | None = None,
) -> Composition:
    """As `read_composition`, for only those attributes of the groups that the table has."""
    cells, own = _read_cells(path, groups, straddle)
    if groups is not None:
        columns = [_own_column(path, cells, groups, k) for k in range(len(groups.attributes))]
        pairs = zip(groups.attributes, columns, strict=True)
        own = Groups(tuple(each for each, column in pairs if column is not None))
    return _composition(path, cells, own, n, (straddle, notes))


def _read_cells(path: Path, groups: Groups | None, straddle: str) -> tuple[_Cells, Groups]:
    """A table of any layout, and the groups that it names."""
    if straddle not in STRADDLE:
        raise MobatlasError(f"straddle '{straddle}' does not exist (known: {', '.join(STRADDLE)})")
    table = read_table(path)
    cells = _acs(path, table) or _men_and_women(path, table, groups) or _long(path, table, groups)
    _check_values(path, cells)
    if groups is not None:
        return cells, groups
    # 46 groups are too many to estimate: an ACS table is read into the default groups.
    is_acs = any(map(ACS_COLUMN.fullmatch, table.columns))
    return cells, DEFAULT_GROUPS if is_acs else _infer_groups(path, cells)


def _composition(
    path: Path,
    cells: _Cells,
    groups: Groups,
    n: float | None,
    options: tuple[str, list[str] | None],
) -> Composition:
    straddle, notes = options
    weights = _cell_weights(path, cells, groups, straddle, [] if notes is None else notes)
    people = cells.values @ weights  # (regions, groups)
    total = people.sum(1)
    refuse_empty_regions(path, cells.regions, total)
    if not cells.shares:
        return Composition(groups, cells.regions, people / total[:, None], total)
    if n is not None and not n > 0:
        raise MobatlasError(f"{path}: n is {n:g}; give a number of people above 0")
    size = np.full(len(total), np.inf if n is None else float(n))
    if n is None and cells.n is not None:
        size = cells.n
    return Composition(groups, cells.regions, people / total[:, None], size)


def composition_from_labels(
    group_of_person: Ints,
    region_of_person: Sequence[str | None] | npt.NDArray[Any],
    groups: Groups,
    regions: Sequence[str] | None = None,
) -> Composition:
    """Count P from labelled people, ignoring people without a group (-1) or a region."""
    codes, names = region_codes(region_of_person, regions)
    counted = (group_of_person >= 0) & (codes >= 0)
    cell = codes[counted] * len(groups) + group_of_person[counted]
    flat = np.bincount(cell, minlength=len(names) * len(groups)).astype(np.float64)
    counts = flat.reshape(len(names), len(groups))
    n = counts.sum(1)
    refuse_empty_regions("labels", names, n, "people with known labels")
    return Composition(groups, names, counts / n[:, None], n)


def region_codes(
    region_of_person: Sequence[str | None] | npt.NDArray[Any], regions: Sequence[str] | None = None
) -> tuple[Ints, tuple[str, ...]]:
    """Region numbers by person and region names.

    The input has ids, where None or an unlisted region becomes -1, or region numbers.
    """
    values = np.asarray(region_of_person)
    if regions is not None and np.issubdtype(values.dtype, np.integer):
        return values.astype(np.int64), tuple(regions)
    ids = [None if value is None else str(value) for value in values.tolist()]
    if regions is None:
        regions = sorted({name for name in ids if name is not None})
    position: dict[str | None, int] = {name: code for code, name in enumerate(regions)}
    return np.array([position.get(name, -1) for name in ids], dtype=np.int64), tuple(regions)


def pivot(
    path: Path,
    region: Keys,
    cell: Keys,
    values: Floats,
    absent: float = 0.0,
    kind: str = "region",
) -> Floats:
    """Values (regions, cells) from rows; each pair of region and cell may have one row."""
    flat = region[0] * len(cell[1]) + cell[0]
    repeated = pd.Series(flat).duplicated().to_numpy()
    if repeated.any():
        row = int(np.argmax(repeated))
        raise MobatlasError(
            f"{path}: {kind} '{region[1][region[0][row]]}' has two rows of "
            f"'{cell[1][cell[0][row]]}'; keep one"
        )
    pivoted = np.full((len(region[1]), len(cell[1])), absent)
    pivoted.flat[flat] = values
    return pivoted


def refuse_negative(
    path: Path,
    measure: str,
    regions: Sequence[str],
    cells: Sequence[str],
    values: Floats,
    kind: str = "region",
) -> None:
    """Refuse a table of counts or shares (regions, cells) with a negative value."""
    if (values < 0).any():
        region, cell = np.argwhere(values < 0)[0]
        raise MobatlasError(
            f"{path}: the {measure} of '{cells[cell]}' in {kind} '{regions[region]}' is negative "
            f"({values[region, cell]:g}); correct it"
        )


def refuse_empty_regions(
    source: Path | str, regions: Sequence[str], n: Floats, people: str = "people"
) -> None:
    """Refuse a table without regions, or with a region of n = 0 people."""
    if not len(n) or not (n > 0).all():
        which = f"region '{regions[int(np.argmin(n))]}'" if len(n) else "every region"
        raise MobatlasError(f"{source}: {which} has no {people}; remove it")


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
    # data.census.gov writes long names under the header: "Geography", "Estimate!!Total:!!Male:"
    if not any(str(table[column].iloc[0])[-1:].isdigit() for column in (region, number[3])):
        table = table.iloc[1:]
    codes, names = key_column(path, table, region)
    if len(names) < len(codes):
        twice = names[int(np.argmax(np.bincount(codes) > 1))]
        raise MobatlasError(f"{path}: region '{twice}' has two rows; keep one row per region")
    values = np.stack([number_column(path, table, number[code]) for code in ages], axis=1)
    levels = tuple((age, gender) for gender in GENDERS for age in ACS_AGES)
    return _Cells(names, ("age", "gender"), levels, values)


def _men_and_women(path: Path, table: pd.DataFrame, groups: Groups | None) -> _Cells | None:
    columns = {
        gender: [c for c in table.columns if c.lower() in words]
        for gender, words in GENDERS.items()
    }
    if any(len(names) != 1 for names in columns.values()):
        return None
    region = key_column(path, table, region_column(path, list(table.columns)))
    ages = [c for c in table.columns if "age" in c.lower().split("_")][:1]
    known = {name.lower() for name in groups.attribute_names} if groups is not None else set()
    others = [c for c in table.columns if c.lower() in known and c not in ages]
    cell = np.zeros_like(region[0])
    levels: list[tuple[str, ...]] = [()]
    if ages or others:
        cell, levels = _level_cells(path, table, [*ages, *others])
    names = [SEPARATOR.join(level) for level in levels]
    values = np.concatenate(
        [
            pivot(path, region, (cell, names), number_column(path, table, columns[gender][0]))
            for gender in GENDERS
        ],
        axis=1,
    )
    attributes = (*("age" for _ in ages), *others, "gender")
    everyone = tuple((*level, gender) for gender in GENDERS for level in levels)
    return _Cells(region[1], attributes, everyone, values)


def _long(path: Path, table: pd.DataFrame, groups: Groups | None) -> _Cells:
    columns = list(table.columns)
    id_column = region_column(path, columns)
    if "count" not in columns and "share" not in columns:
        require_columns(str(path), columns, ("count",))
    attributes = label_columns(path, columns, id_column, groups)
    region = key_column(path, table, id_column)
    cell, levels = _level_cells(path, table, attributes)
    named = attributes != ["group"]
    shares = "count" not in columns
    values = number_column(path, table, "share" if shares else "count")
    pivoted = pivot(path, region, (cell, [SEPARATOR.join(level) for level in levels]), values)
    n = None
    if "n" in columns:
        n = np.zeros(len(region[1]))
        n[region[0]] = number_column(path, table, "n")
    return _Cells(
        region[1], tuple(attributes) if named else None, tuple(levels), pivoted, shares, n
    )


def _level_cells(
    path: Path, table: pd.DataFrame, attributes: list[str]
) -> tuple[Ints, list[tuple[str, ...]]]:
    """The cell of each row, and the levels of each cell, of attribute columns or of `group`."""
    parts = [key_column(path, table, name) for name in attributes]
    present, cell = np.unique(
        np.stack([codes for codes, _ in parts], axis=1), axis=0, return_inverse=True
    )
    levels = [
        tuple(names[code] for (_, names), code in zip(parts, row, strict=True)) for row in present
    ]
    if attributes == ["group"]:
        levels = [tuple(name.split(SEPARATOR)) for (name,) in levels]
    return cell.ravel(), levels


def group_weights(path: Path, table: pd.DataFrame, attributes: list[str], groups: Groups) -> Floats:
    """The part (rows, groups) of each row in each group; an age range is split over its years."""
    cell, levels = _level_cells(path, table, attributes)
    named = tuple(attributes) if attributes != ["group"] else None
    cells = _Cells((), named, tuple(levels), np.zeros((0, len(levels))))
    return _cell_weights(path, cells, groups, "uniform", [])[cell]


def mixtures(
    path: Path, table: pd.DataFrame, groups: Groups, population: Floats, notes: list[str]
) -> tuple[Ints, list[str], Floats]:
    """Rows of a table by group or by some attributes, as mixtures of groups.

    An attribute without a column, or with an empty cell, covers all its levels. Groups within a
    row have the proportions of `population` (groups,). Returns the cell of each row, and the name
    and composition (cells, groups) of each cell; the latter is zero if it has none of the groups.
    """
    attributes = label_columns(path, list(table.columns), "feature", groups)
    empty = table[attributes].astype("string").fillna("").isin(("", "all"))
    filled = table[attributes].astype(object).mask(empty, ALL)
    cell, levels = _level_cells(path, filled, attributes)
    named = tuple(attributes) if attributes != ["group"] else None
    cells = _Cells((), named, tuple(levels), np.zeros((0, len(levels))))
    shares = np.tile(population, (len(levels), 1))  # (cells, groups)
    used = set()
    for attribute, (_, own) in enumerate(groups.attributes):
        column = _own_column(path, cells, groups, attribute)
        if column is not None:
            used.add(column)
            codes = groups.level_codes[:, attribute]
            parts = _level_parts(path, cells, groups, (attribute, column), "uniform", notes)
            # An age range that spans two levels has people of both, whatever the population is.
            margin = np.bincount(codes, population, len(own))
            parts = np.where(parts.sum(1, keepdims=True) > 1, 1, parts / np.maximum(margin, 1e-300))
            shares = shares * parts[:, codes]
    for column, name in enumerate(named or ()):
        if column not in used:
            raise MobatlasError(
                f"{path}: column '{name}' is not an attribute of the groups (attributes: "
                f"{', '.join(groups.attribute_names)}); give means over its levels"
            )
    total = shares.sum(1, keepdims=True)
    names = [SEPARATOR.join(part for part in level if part != ALL) or "all" for level in levels]
    return cell, names, shares / np.where(total > 0, total, 1)


def label_columns(path: Path, columns: list[str], key: str, groups: Groups | None) -> list[str]:
    """The column `group` of a table, or its attribute columns."""
    attributes = ["group"] if "group" in columns else _attribute_columns(columns, key, groups)
    if not attributes:
        require_columns(str(path), columns, ("group",))
    return attributes


def _attribute_columns(columns: list[str], region: str, groups: Groups | None) -> list[str]:
    candidates = [
        name for name in columns if name not in (region, *MEASURES) and not looks_like_region(name)
    ]
    if groups is None:
        return [name for name in candidates if name.lower() != "name"]
    attributes = {name.lower() for name in (*groups.attribute_names, *ATTRIBUTE_NAMES)}
    return [name for name in candidates if name.lower() in attributes]


def _check_values(path: Path, cells: _Cells) -> None:
    names = [SEPARATOR.join(level) for level in cells.levels]
    refuse_negative(path, "share" if cells.shares else "count", cells.regions, names, cells.values)
    total = cells.values.sum(1)
    refuse_empty_regions(path, cells.regions, total)
    wrong = np.abs(total - 1) > TOLERANCE
    if cells.shares and wrong.any():
        row = int(np.argmax(wrong))
        raise MobatlasError(
            f"{path}: the shares of region '{cells.regions[row]}' sum to {total[row]:.4g}, not 1; "
            "pass counts, or normalise the shares"
        )
    if cells.n is not None:
        refuse_empty_regions(path, cells.regions, cells.n)


def _infer_groups(path: Path, cells: _Cells) -> Groups:
    """Groups from the names in the file."""
    by_width = {len(level): SEPARATOR.join(level) for level in cells.levels}
    if len(by_width) > 1:
        one, two, *_ = by_width.values()
        raise MobatlasError(
            f"{path}: group names '{one}' and '{two}' have different numbers of levels; "
            "write every group with the same attributes"
        )
    familiar = {levels: name for name, levels in DEFAULT_GROUPS.attributes}
    attributes = {}
    for number in range(min(by_width)):
        levels = order_levels({level[number] for level in cells.levels})
        name = familiar.get(levels, f"attribute{number + 1}")
        attributes[cells.attributes[number] if cells.attributes else name] = levels
    return Groups.of(attributes)


def _cell_weights(
    path: Path, cells: _Cells, groups: Groups, straddle: str, notes: list[str]
) -> Floats:
    """The part of the people of each cell that belongs to each group: (cells, groups)."""
    weights = np.ones((len(cells.levels), len(groups)))
    for attribute, (name, _) in enumerate(groups.attributes):
        column = _own_column(path, cells, groups, attribute)
        if column is None:
            raise MobatlasError(
                f"{path}: no column for '{name}' (columns: {', '.join(cells.attributes or ())}); "
                "add one"
            )
        parts = _level_parts(path, cells, groups, (attribute, column), straddle, notes)
        weights *= parts[:, groups.level_codes[:, attribute]]
    return weights


def _own_column(path: Path, cells: _Cells, groups: Groups, attribute: int) -> int | None:
    """The table's column for an attribute, matched by name, else by the form of its levels."""
    name, levels = groups.attributes[attribute]
    if cells.attributes is None:
        wrong = [level for level in cells.levels if len(level) != len(groups.attributes)]
        if wrong:
            raise _unknown_group(path, SEPARATOR.join(wrong[0]), groups)
        return attribute
    names = [own.lower() for own in cells.attributes]
    if name.lower() in names:
        return names.index(name.lower())
    others = {other.lower() for other in groups.attribute_names}
    free = [column for column in range(len(names)) if names[column] not in others]
    for parse in (parse_age, _gender):
        for column in free:
            own = {level[column] for level in cells.levels} - {ALL}
            if own and all(map(parse, levels)) and all(map(parse, own)):
                return column
    return None


def _level_parts(
    path: Path,
    cells: _Cells,
    groups: Groups,
    match: tuple[int, int],
    straddle: str,
    notes: list[str],
) -> Floats:
    """The part (cells, levels) of each cell in each level of an attribute; all ones for `ALL`.

    `match` is the number of the attribute, and that of the table's column for it.
    """
    attribute, column = match
    name, levels = groups.attributes[attribute]
    own = [level[column] for level in cells.levels]
    named = [level for level in dict.fromkeys(own) if level != ALL]
    parts = _level_weights(path, named, levels, straddle, notes) | {ALL: np.ones(len(levels))}
    unknown = next((level for level in own if level not in parts), None)
    if unknown is not None and cells.attributes is None:
        raise _unknown_group(path, SEPARATOR.join(cells.levels[own.index(unknown)]), groups)
    if unknown is not None:
        hint = f"{clear_suggestion(unknown, levels)} (known: {', '.join(levels)})"
        raise MobatlasError(f"{path}: level '{unknown}' of '{name}' does not exist{hint}")
    return np.stack([parts[level] for level in own])


def _level_weights(
    path: Path, own: list[str], levels: tuple[str, ...], straddle: str, notes: list[str]
) -> dict[str, Floats]:
    """For each known level of a table, its parts in the levels of an attribute."""
    exact = np.eye(len(levels))
    genders = [_gender(level) for level in levels]
    forms = [parse_age(level) for level in levels]
    own_ages = age_ranges(own)
    ages = age_ranges(levels)
    parts: dict[str, Floats] = {}
    for number, level in enumerate(own):
        if level in levels:
            parts[level] = exact[levels.index(level)]
        elif _gender(level) and _gender(level) in genders:
            parts[level] = exact[genders.index(_gender(level))]
        elif parse_age(level) and parse_age(level) in forms:  # `40 to 50` is `40-50`
            parts[level] = exact[forms.index(parse_age(level))]
        elif own_ages is not None and ages is not None:
            parts[level], note = _split_age_range(
                path, level, own_ages[number], levels, ages, straddle
            )
            notes += note
    return parts


def _unknown_group(path: Path, group: str, groups: Groups) -> MobatlasError:
    hint = f"{suggestion(group, groups.names)} (known: {'; '.join(groups.names)})"
    return MobatlasError(f"{path}: group '{group}' does not exist{hint}")


def _gender(level: str) -> str | None:
    return next((gender for gender, words in GENDERS.items() if level.lower() in words), None)


def _split_age_range(
    path: Path,
    own: str,
    years: tuple[int, float],
    levels: tuple[str, ...],
    ranges: list[tuple[int, float]],
    straddle: str,
) -> tuple[Floats, list[str]]:
    """The part of an age range in each level, and a note if its people are split or left out."""
    low = years[0]
    high = min(years[1], max(OLDEST, low) + 1)
    overlap = np.array([max(0.0, min(high, end) - max(low, start)) for start, end in ranges])
    overlap = overlap / (high - low)
    touched = [f"'{level}'" for level, part in zip(levels, overlap, strict=True) if part > 0]
    if not touched:
        return overlap, [
            f"{path.name}: people of age range '{own}' belong to no group and are left out"
        ]
    if overlap.max() >= 1 - 1e-9:
        return overlap, []
    both = " and ".join(touched if len(touched) > 1 else [*touched, "no group"])
    if straddle == "refuse":
        raise MobatlasError(
            f"{path}: age range '{own}' straddles {both}; give finer ranges, or spread its people "
            "evenly over its years with --split-ages (straddle: uniform in a configuration)"
        )
    ending = f" (assumed to end at {OLDEST})" if np.isinf(years[1]) else ""
    return overlap, [
        f"{path.name}: people of age range '{own}'{ending} are spread evenly over its years, "
        f"to {both}"
    ]


def age_ranges(levels: Sequence[str]) -> list[tuple[int, float]] | None:
    """Completed years [first, end) of each level; None if one of them is not an age range.

    `30-40` ends before 40 where another level starts at 40, and after 40 elsewhere (`25-44`,
    `45-64`).
    """
    ages = [age for age in map(parse_age, levels) if age is not None]
    if len(ages) < len(levels):
        return None
    starts = {low for low, _, form in ages if form in ("closed", "open", "year")}
    over = {low for low, _, form in ages if form == "over"}
    ends = {high for _, high, form in ages if form == "closed"}
    follows = {end + 1 for end in ends} & starts
    # Next to `>50`, `30-50` must include 50.
    exclusive = bool(ends & starts or (not follows and ends & over))
    closed = {end if exclusive else end + 1 for end in ends}
    closed |= {high for _, high, form in ages if form == "below"}
    return [
        (
            low + 1 if form == "over" and low not in closed else low,
            high + 1 if form == "closed" and not exclusive else high,
        )
        for low, high, form in ages
    ]


def parse_age(level: str) -> tuple[int, float, str] | None:
    """First year, end and form (below, over, open, closed, year); None if it is not an age."""
    text = re.sub(r"\byears?\b|\bold\b|\bage[ds]?\b", "", level.lower()).replace("\u2013", "-")
    text = " ".join(text.split())
    if match := re.fullmatch(r"(?:<|under|below|less than) ?(\d+)", text):
        return 0, float(match[1]), "below"
    if match := re.fullmatch(r"(?:>|over|more than) ?(\d+)", text):
        return int(match[1]), np.inf, "over"
    if match := re.fullmatch(
        r"(?:>=|\u2265) ?(\d+)|(\d+) ?(?:\+|(?:and|or) (?:over|older|more|above))", text
    ):
        return int(match[1] or match[2]), np.inf, "open"
    if match := re.fullmatch(r"(\d+) ?(?:-|to|and) ?(\d+)", text):
        return (int(match[1]), float(match[2]), "closed") if int(match[1]) < int(match[2]) else None
    if match := re.fullmatch(r"(\d+)(?:\.0+)?", text):  # 34.0 where other ages are empty
        return int(match[1]), float(match[1]) + 1, "year"
    return None
