"""Composition P: the share of each group in each region, from census tables or from labels."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from mobatlas.data.types import Floats, Ints
from mobatlas.errors import MobatlasError, plain_text
from mobatlas.groups import (
    DEFAULT_GROUPS,
    SEPARATOR,
    Groups,
    gender,
    order_levels,
    plain_level,
    same_group,
)
from mobatlas.io.tables import read_table
from mobatlas.regions.ages import age_ranges, parse_age
from mobatlas.regions.census import (
    TOTALS,
    CensusCells,
    is_acs,
    label_columns,
    level_cells,
    read_cells,
)
from mobatlas.regions.types import Composition

STRADDLE = ("refuse", "uniform")
TOLERANCE = 1e-3  # of the sum of shares: published shares are rounded
SHARES = {1: "fractions? Call", 100: "percentages? Divide by 100 and call"}  # by their sum
PERCENT = 0.01  # relative difference of the sum of rounded percentages
OLDEST = 99  # the last year of an open-ended range whose people are spread over years
ALL = "\0all"  # in the place of a level: all levels; no table can contain it


def read_composition(
    path: Path | str,
    groups: Groups | None = None,
    n: float | None = None,
    straddle: str = "refuse",
    notes: list[str] | None = None,
    rename: Mapping[str, str] | None = None,
    partial: bool = False,
) -> Composition:
    """Read the composition P from a census table.

    Parameters
    ----------
    path
        Parquet, text or spreadsheet: region, group and count or share; attribute columns instead of
        group; a column per age range, gender or both; ACS B01001; or a table of Eurostat.
    groups
        The groups to read; default: the groups named in the table.
    n
        People per region behind shares; default: the shares are exact.
    straddle
        "uniform" spreads an age range that covers two groups evenly over its years; "refuse"
        raises an error.
    notes
        A list that receives one sentence per decision.
    rename
        The table's name of a column for the expected name, such as `{"region": "tract"}`.
    partial
        The table may lack attributes of the groups; only those that it has are read.

    Returns
    -------
    Composition
        Shares of groups per region.

    Examples
    --------
    >>> composition = read_composition("census.csv", straddle="uniform")  # doctest: +SKIP
    """
    path = Path(path)
    notes = [] if notes is None else notes
    if straddle not in STRADDLE:
        raise MobatlasError(f"straddle '{straddle}' does not exist (known: {', '.join(STRADDLE)})")
    table = read_table(path, rename, notes)
    cells = read_cells(path, table, groups, notes)
    _check_values(path, cells, notes)
    if groups is None:
        # 46 groups are too many to estimate: an ACS table is read into the default groups.
        groups = DEFAULT_GROUPS if is_acs(table) else _infer_groups(path, cells)
    elif partial:
        columns = [_own_column(path, cells, groups, k) for k in range(len(groups.attributes))]
        pairs = zip(groups.attributes, columns, strict=True)
        groups = Groups(tuple(each for each, column in pairs if column is not None))
    return _composition(path, cells, groups, n, (straddle, notes))


def _composition(
    path: Path,
    cells: CensusCells,
    groups: Groups,
    n: float | None,
    options: tuple[str, list[str]],
) -> Composition:
    straddle, notes = options
    weights = _cell_weights(path, cells, groups, straddle, notes)
    people = cells.values @ weights  # (regions, groups)
    total = people.sum(1)
    refuse_empty_regions(path, cells.regions, total)
    shares = people / total[:, None]
    if not cells.shares:
        sample = None
        if cells.variance is not None:
            sample = _sample_size(shares, total, cells.variance @ weights**2)
        return Composition(groups, cells.regions, shares, total, sample)
    if n is not None and not n > 0:
        raise MobatlasError(f"{path}: n is {n:g}; give a number of people above 0")
    size = np.full(len(total), np.inf if n is None else float(n))
    if n is None and cells.n is not None:
        size = cells.n
    return Composition(groups, cells.regions, shares, size)


def _sample_size(shares: Floats, total: Floats, variance: Floats) -> Floats:
    """People (regions,) of a simple random sample as precise as counts (regions, groups)."""
    whole = variance.sum(1, keepdims=True)
    of_shares = (variance * (1 - 2 * shares) + shares**2 * whole) / total[:, None] ** 2
    one_person = (shares * (1 - shares)).sum(1)
    return np.clip(one_person / np.maximum(of_shares.sum(1), 1e-300), 1, total)


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


def group_weights(path: Path, table: pd.DataFrame, attributes: list[str], groups: Groups) -> Floats:
    """The part (rows, groups) of each row in each group; an age range is split over its years."""
    cell, cells = level_cells(path, table, attributes, [])
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
    texts = table[attributes].astype("string").fillna("")
    empty = texts.map(plain_text).isin(("", *TOTALS))
    filled = table[attributes].astype(object).mask(empty, ALL)
    cell, cells = level_cells(path, filled, attributes, notes)
    shares = np.tile(population, (len(cells.levels), 1))  # (cells, groups)
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
    for column, name in enumerate(cells.attributes or ()):
        if column not in used:
            raise MobatlasError(
                f"{path}: column '{name}' is not an attribute of the groups (attributes: "
                f"{', '.join(groups.attribute_names)}); give means over its levels"
            )
    total = shares.sum(1, keepdims=True)
    known = [[part for part in level if part != ALL] for level in cells.levels]
    names = [SEPARATOR.join(parts) or "all" for parts in known]
    return cell, names, shares / np.where(total > 0, total, 1)


def _check_values(path: Path, cells: CensusCells, notes: list[str]) -> None:
    names = [SEPARATOR.join(level) for level in cells.levels]
    refuse_negative(path, "share" if cells.shares else "count", cells.regions, names, cells.values)
    total = cells.values.sum(1)
    wrong = np.abs(total - 1) > TOLERANCE
    if cells.shares and wrong.any():
        row = int(np.argmax(wrong))
        raise MobatlasError(
            f"{path}: the shares of region '{cells.regions[row]}' sum to {total[row]:.4g}, not 1; "
            "pass counts, or normalise the shares"
        )
    if cells.n is not None:
        refuse_empty_regions(path, cells.regions, cells.n)
    whole = (cells.values == np.rint(cells.values)).all()
    for size, advice in () if cells.shares else SHARES.items():
        if (np.abs(total - size) > size * PERCENT).any():
            continue
        problem = f"the counts of each region sum to {size}; are they {advice} the column 'share'"
        if not whole:
            raise MobatlasError(f"{path}: {problem}")
        notes += [f"{path.name}: {problem}"] * (len(total) > 1)


def _infer_groups(path: Path, cells: CensusCells) -> Groups:
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
        other = [level for level in levels if not parse_age(level)]
        if len(other) < len(levels) / 2 and other:
            raise MobatlasError(
                f"{path}: '{other[0]}' is not an age range like '{levels[0]}'; correct it (a "
                "spreadsheet may turn 10-14 into a date)"
            )
        name = familiar.get(levels, f"attribute{number + 1}")
        attributes[cells.attributes[number] if cells.attributes else name] = levels
    return Groups.of(attributes)


def _cell_weights(
    path: Path, cells: CensusCells, groups: Groups, straddle: str, notes: list[str]
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


def _own_column(path: Path, cells: CensusCells, groups: Groups, attribute: int) -> int | None:
    """The table's column for an attribute, matched by name, else by the form of its levels."""
    name, levels = groups.attributes[attribute]
    if cells.attributes is None:
        wrong = [level for level in cells.levels if len(level) != len(groups.attributes)]
        if wrong:
            raise _unknown_group(path, SEPARATOR.join(wrong[0]), groups)
        parts = list(zip(*cells.levels, strict=True))  # the levels of each column
        fits = [column for column, own in enumerate(parts) if _same_kind(own, levels)]
        return attribute if attribute in fits or not fits else fits[0]
    names = [own.lower() for own in cells.attributes]
    if name.lower() in names:
        return names.index(name.lower())
    others = {other.lower() for other in groups.attribute_names}
    for column, own in enumerate(names):
        known = {level[column] for level in cells.levels} - {ALL}
        if own not in others and known and _same_kind(known, levels):
            return column
    return None


def _same_kind(names: Collection[str], levels: Collection[str]) -> bool:
    """Whether all are age ranges, all are genders, or the names are among the levels."""
    return any(all(map(parse, (*names, *levels))) for parse in (parse_age, gender)) or {
        *map(plain_level, names)
    } <= {*map(plain_level, levels)}


def _level_parts(
    path: Path,
    cells: CensusCells,
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
        hint = f"{same_group(unknown, levels)} (known: {', '.join(levels)})"
        raise MobatlasError(f"{path}: level '{unknown}' of '{name}' does not exist{hint}")
    return np.stack([parts[level] for level in own])


def _level_weights(
    path: Path, own: list[str], levels: tuple[str, ...], straddle: str, notes: list[str]
) -> dict[str, Floats]:
    """For each known level of a table, its parts in the levels of an attribute."""
    exact = np.eye(len(levels))
    own_ages = age_ranges(own)
    ages = age_ranges(levels)
    parts: dict[str, Floats] = {}
    respelled = []
    for number, level in enumerate(own):
        forms = {plain_level(level), parse_age(level)} - {None}  # `40 to 50` is `40-50`
        same = [each for each in levels if forms & {plain_level(each), parse_age(each)}]
        known = level if level in levels else next(iter(same), None)
        if known is not None:
            parts[level] = exact[levels.index(known)]
            respelled += [f"'{level}' as '{known}'"] * (level != known)
        elif own_ages is not None and ages is not None:
            years = own_ages[number]
            parts[level] = _split_age_range(path, level, years, (levels, ages), straddle, notes)
    if respelled:
        notes.append(f"{path.name}: levels are read as those of the groups: {', '.join(respelled)}")
    return parts


def _unknown_group(path: Path, group: str, groups: Groups) -> MobatlasError:
    hint = f"{same_group(group, groups.names)} (known: {'; '.join(groups.names)})"
    return MobatlasError(f"{path}: group '{group}' does not exist{hint}")


def _split_age_range(
    path: Path,
    own: str,
    years: tuple[int, float],
    known: tuple[tuple[str, ...], list[tuple[int, float]]],
    straddle: str,
    notes: list[str],
) -> Floats:
    """The part of an age range in each of the known levels, which have names and ranges."""
    low = years[0]
    high = min(years[1], max(OLDEST, low) + 1)
    overlap = np.array([max(0.0, min(high, end) - max(low, start)) for start, end in known[1]])
    overlap = overlap / (high - low)
    touched = [f"'{level}'" for level, part in zip(known[0], overlap, strict=True) if part > 0]
    if not touched:
        notes.append(
            f"{path.name}: people of age range '{own}' belong to no group and are left out"
        )
    elif overlap.max() < 1 - 1e-9:
        both = " and ".join(touched if len(touched) > 1 else [*touched, "no group"])
        if straddle == "refuse":
            raise MobatlasError(
                f"{path}: age range '{own}' straddles {both}; give finer ranges, or spread its "
                "people evenly over its years with --split-ages (straddle: uniform in a "
                "configuration)"
            )
        ending = f" (assumed to end at {OLDEST})" if np.isinf(years[1]) else ""
        notes.append(
            f"{path.name}: people of age range '{own}'{ending} are spread evenly over its years, "
            f"to {both}"
        )
    return overlap
