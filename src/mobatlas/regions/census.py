"""Layouts of census tables, read as people of each cell (age range, gender, ...) by region."""

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd

from mobatlas.data.types import (
    ATTRIBUTE_NAMES,
    Flags,
    Floats,
    Ints,
    looks_like_region,
    region_column,
)
from mobatlas.errors import SYNONYMS, MobatlasError, plain_text
from mobatlas.groups import GENDERS, SEPARATOR, Groups, gender, plain_level
from mobatlas.io.tables import key_column, number_column, plain_numbers, require_columns
from mobatlas.regions.ages import age_ranges, parse_age

Keys = tuple[Ints, Sequence[str]]  # the code of each row, and the name of each code
Cell = tuple[str | None, str | None]  # age and gender of a column; None: the column has no such
MEASURES = ("count", "share", "n", "moe")
NO_ATTRIBUTES = ("name", "year", "date", "time", "period", "time_period", "obs_flag")
TOTAL = "total"
TOTALS = (  # without spaces, in lower case
    "total", "totals", "all", "allages", "allpersons", "persons", "bothsexes", "both", "everyone",
    "everybody", "totalpopulation", "t", "-t", "insgesamt", "ensemble", "ambossexos",
)  # fmt: skip
UNKNOWN = ("unk", "unknown", "notstated", "notknown", "missing", "unspecified", "noanswer")
NOT_AVAILABLE = (":", "..", "...", "*", "**", "x", "c", "n/a", "na", "nan", "-", "\u2013", "(d)")
ROUNDED = 0.01  # relative difference of a published total from the sum of its parts
EXACT = 1e-6
FEW = 5  # people; statistical offices round small counts
LISTED = 3  # names in a note
CONFIDENCE = 1.645  # standard errors in a margin of error of the US Census Bureau (90 %)
ACS_COLUMN = re.compile(r"B01001_?(\d{3})E?", re.IGNORECASE)
ACS_LABEL = "Label (Grouping)"
# B01001_003 to _025 are men of these ages, _027 to _049 women; 001, 002 and 026 are totals.
ACS_AGES = (
    "<5", "5-9", "10-14", "15-17", "18-19", "20", "21", "22-24", "25-29", "30-34", "35-39",
    "40-44", "45-49", "50-54", "55-59", "60-61", "62-64", "65-66", "67-69", "70-74", "75-79",
    "80-84", "85+",
)  # fmt: skip
ACS_CELLS = dict(
    zip(
        [*range(3, 26), *range(27, 50)],
        [(age, sex) for sex in GENDERS for age in ACS_AGES],
        strict=True,
    )
)
US_AREAS = ("state", "county", "tract", "block group")  # columns of the API of the Census Bureau
GENDER_WORDS = "|".join(sorted((w for words in GENDERS.values() for w in words), key=len)[::-1])
GENDER_FIRST = re.compile(
    rf"(?P<before>)(?P<word>{GENDER_WORDS})(?![a-z])(?P<after>.*)", re.IGNORECASE
)
GENDER_LAST = re.compile(
    rf"(?P<before>.*?)(?<![a-z])(?P<word>{GENDER_WORDS})(?P<after>)", re.IGNORECASE
)


@dataclass(frozen=True)
class CensusCells:
    """A table of any layout, as people of each cell in each region."""

    regions: tuple[str, ...]
    attributes: tuple[str, ...] | None  # None: levels are parts of group names
    levels: tuple[tuple[str, ...], ...]  # (cells, attributes)
    values: Floats  # (regions, cells); NaN where a count is not available
    absent: Flags  # (regions, cells) without a row: their values are zero
    shares: bool = False
    n: Floats | None = None  # (regions,)
    variance: Floats | None = None  # (regions, cells) of counts that a survey estimates

    def select(self, regions: Flags, cells: Flags) -> "CensusCells":
        """Keep some regions and some cells."""
        part = np.ix_(regions, cells)
        return replace(
            self,
            regions=tuple(itertools.compress(self.regions, regions)),
            levels=tuple(itertools.compress(self.levels, cells)),
            values=self.values[part],
            absent=self.absent[part],
            n=None if self.n is None else self.n[regions],
            variance=None if self.variance is None else self.variance[part],
        )


def read_cells(
    path: Path, table: pd.DataFrame, groups: Groups | None, notes: list[str]
) -> CensusCells:
    """Read the cells of a table in one of the layouts, without totals and empty regions."""
    table = _tidy(path, table, notes)
    columns = _acs_columns(path, table) or _wide_columns(table)
    if columns:
        table = _melt(path, table, columns, groups, notes)
    cells = _without_totals(path, _long(path, table, groups, notes), notes)
    return _without_empty_regions(path, cells, notes)


def is_acs(table: pd.DataFrame) -> bool:
    """Whether the table is B01001, whose 46 groups are too many to estimate."""
    return any(map(ACS_COLUMN.fullmatch, table.columns)) or table.columns[0] == ACS_LABEL


def _tidy(path: Path, table: pd.DataFrame, notes: list[str]) -> pd.DataFrame:
    """Unpack layouts with packed or transposed columns, and find synonyms of columns."""
    first = str(table.columns[0])
    if first == ACS_LABEL:
        return _transposed(path, table)
    if "," in first and "\\" in first:
        table = _eurostat(path, table, notes)
    areas = [name for name in US_AREAS if name in table.columns]
    if is_acs(table) and areas[:2] == ["state", "county"]:
        table = table.assign(region=table[areas].agg("".join, axis=1)).drop(columns=areas)
        notes.append(f"{path.name}: region ids are {' + '.join(areas)}")
    # data.census.gov writes long names under the header: "Geography", "Estimate!!Total:!!Male:"
    elif is_acs(table) and not any(str(cell)[-1:].isdigit() for cell in table.iloc[0]):
        table = table.iloc[1:].reset_index(drop=True)
    regions = [name for name in table.columns if looks_like_region(name)]
    for name, others in (("count", ["share"]), ("region", regions)):
        synonyms = {plain_text(each) for each in SYNONYMS[name]}
        theirs = [each for each in table.columns if plain_text(each) in synonyms]
        if len(theirs) == 1 and not {name, *others} & set(table.columns):
            notes.append(f"{path.name}: column '{theirs[0]}' is read as '{name}'")
            table = table.rename(columns={theirs[0]: name})
    return table


def _transposed(path: Path, table: pd.DataFrame) -> pd.DataFrame:
    """B01001 as data.census.gov shows it: a row per cell, and two columns per area."""
    if len(table) != 49:
        raise MobatlasError(
            f"{path}: the table has {len(table)} rows, and B01001 has 49; download all its rows"
        )
    parts = [
        table.filter(regex=f"!!{kind}$")
        .rename(columns=lambda name: name.rpartition("!!")[0])
        .T.set_axis([f"B01001_{number:03d}{suffix}" for number in range(1, 50)], axis=1)
        for kind, suffix in (("Estimate", "E"), ("Margin of Error", "M"))
    ]
    return pd.concat(parts, axis=1).rename_axis("region").reset_index()


def _eurostat(path: Path, table: pd.DataFrame, notes: list[str]) -> pd.DataFrame:
    """The packed first column as columns, and the last period with values as counts."""
    packed = str(table.columns[0])
    names = [name.partition("\\")[0].strip().lower() for name in packed.split(",")]
    keys = table[packed].str.split(",", expand=True).set_axis(names, axis=1)
    # `:` may be followed by the reason, as in `: c`.
    values = table.drop(columns=packed).replace(r"^:.*", ":", regex=True)
    period = max(values.columns, key=lambda name: ((values[name] != ":").any(), name))
    notes.append(f"{path.name}: of {len(values.columns)} periods, {period} is read")
    known = [name for name in names if name in ("geo", *ATTRIBUTE_NAMES)]
    return keys[known].assign(count=values[period])


def _acs_columns(path: Path, table: pd.DataFrame) -> dict[str, Cell]:
    matches = {name: ACS_COLUMN.fullmatch(name) for name in table.columns}
    number = {int(match[1]): name for name, match in matches.items() if match}
    missing = [code for code in ACS_CELLS if code not in number]
    if number and missing:
        raise MobatlasError(
            f"{path}: column 'B01001_{missing[0]:03d}E' is missing; download the whole table B01001"
        )
    return {number[code]: cell for code, cell in ACS_CELLS.items() if number}


def _wide_columns(table: pd.DataFrame) -> dict[str, Cell]:
    """The columns that are named by an age range, a gender or both; none in a long table."""
    parsed = {name: _parse_column(str(name)) for name in table.columns}
    cells = {name: cell for name, cell in parsed.items() if cell is not None}
    proper = [cell for cell in cells.values() if not set(cell) <= {TOTAL, None}]
    if len(proper) < 2 or {"count", "share"} & set(table.columns):
        return {}
    has_age, has_gender = (any(cell[k] not in (TOTAL, None) for cell in proper) for k in (0, 1))
    # A column of men beside columns of men of each age is their total.
    return {
        name: ((age or TOTAL) if has_age else None, (sex or TOTAL) if has_gender else None)
        for name, (age, sex) in cells.items()
    }


def _parse_column(name: str) -> Cell | None:
    """The age and the gender in the name of a column; None if it has other words."""
    words = re.sub(r"[!:_,/|()\s]+", " ", name).strip()
    text = re.sub(r"^(?:estimate|population|pop) ", "", words, flags=re.IGNORECASE)
    match = GENDER_FIRST.fullmatch(text) or GENDER_LAST.fullmatch(text)
    rest = text if match is None else (match["before"] or match["after"] or "").strip(" -")
    age = re.sub(r"^total\b ?| ?\btotal$", "", rest, flags=re.IGNORECASE)
    if not age or plain_text(age) in TOTALS:
        return (None, gender(match["word"])) if match else (TOTAL, TOTAL)
    return (age, gender(match["word"]) if match else None) if parse_age(age) else None


def _melt(
    path: Path,
    table: pd.DataFrame,
    columns: dict[str, Cell],
    groups: Groups | None,
    notes: list[str],
) -> pd.DataFrame:
    """A table with a column per cell as one with a row per cell."""
    known = {name.lower() for name in groups.attribute_names} if groups is not None else set()
    others = [name for name in table.columns if name not in columns]
    ages = [name for name in others if "age" in name.lower().split("_")][:1]
    rows = [name for name in others if name in ages or name.lower() in {*known, "sex", "gender"}]
    rest = [name for name in others if name not in rows]
    texts = [name for name in rest if table[name].astype(str).str.contains(r"[^\d.,-]").any()]
    region = _region_of(path, table, rest, texts if len(texts) == 1 else [], notes)
    empty = (table[[*columns]].astype("string").fillna("") == "").all(axis=1)
    if empty.any():
        titles = ", ".join(f"'{name}'" for name in table[region][empty].unique()[:LISTED])
        notes.append(f"{path.name}: rows without any count are not read: {titles}")
        table = table[~empty]
    unread = [name for name in others if name not in (region, *rows)]
    if unread and not is_acs(table):
        notes.append(f"{path.name}: columns that are not read: {', '.join(unread)}")
    table = plain_numbers(path, table, [*columns], True, notes)
    for name in columns:  # here, because a refusal names the row and the column of the file
        number_column(path, table, name, missing=True, words=NOT_AVAILABLE)
    keys = table[[region, *rows]].rename(columns={region: "region"} | dict.fromkeys(ages, "age"))
    parts = []
    for name, (age, sex) in columns.items():
        cell = {"age": age, "gender": sex, "count": table[name]}
        margin = table.get(f"{name.rstrip('Ee')}M") if is_acs(table) else None
        cell |= {} if margin is None else {"moe": margin}
        parts.append(keys.assign(**{key: each for key, each in cell.items() if each is not None}))
    return pd.concat(parts, ignore_index=True)


def _region_of(
    path: Path, table: pd.DataFrame, columns: list[str], others: list[str], notes: list[str]
) -> str:
    """The column of regions by its name; of several, such as state and county, the finest.

    If no column has such a name, it is one of `others`.
    """
    named = [name for name in columns if looks_like_region(name)]
    exact = [name for name in columns if plain_text(name) in ("region", "geoid")]
    if exact or not (named or others):
        return region_column(path, exact or columns)
    finest = max(named or others, key=lambda name: table[name].nunique())
    if named[1:] or not named:
        notes.append(f"{path.name}: column '{finest}' is read as 'region'")
    return finest


def _long(path: Path, table: pd.DataFrame, groups: Groups | None, notes: list[str]) -> CensusCells:
    columns = list(table.columns)
    id_column = _region_of(path, table, columns, [], notes)
    measure = "share" if "share" in columns and "count" not in columns else "count"
    require_columns(str(path), columns, (measure,))
    if groups is None:  # a column such as `unit` with one value is no attribute
        columns = [
            name
            for name in columns
            if name in ("group", *ATTRIBUTE_NAMES) or table[name].nunique() > 1
        ]
    attributes = label_columns(path, columns, id_column, groups)
    region = key_column(path, table, id_column)
    cell, cells = level_cells(path, table, attributes, notes)
    keys = (cell, [SEPARATOR.join(level) for level in cells.levels])
    table = plain_numbers(path, table, [measure], measure == "count", notes)
    counts = number_column(path, table, measure, missing=True, words=NOT_AVAILABLE)
    n = None
    if "n" in table.columns:
        n = np.zeros(len(region[1]))
        n[region[0]] = number_column(path, table, "n")
    return replace(
        cells,
        regions=region[1],
        values=pivot(path, region, keys, counts),
        absent=np.isinf(pivot(path, region, keys, 0 * counts, np.inf)),
        shares=measure == "share",
        n=n,
        variance=_variance(path, table, (region, keys), notes) if "moe" in table else None,
    )


def _variance(path: Path, table: pd.DataFrame, keys: tuple[Keys, Keys], notes: list[str]) -> Floats:
    """Variance (regions, cells) from margins of error as those of ACS."""
    texts = table["moe"].astype(str).str.lstrip("\u00b1").str.replace(",", "")
    # Negative codes and words say that there is no margin, because the number is controlled.
    margin = pd.to_numeric(texts, errors="coerce").fillna(0).clip(lower=0).to_numpy(np.float64)
    notes.append(f"{path.name}: margins of error are used as errors of the composition")
    return pivot(path, *keys, (margin / CONFIDENCE) ** 2)


def level_cells(
    path: Path, table: pd.DataFrame, attributes: list[str], notes: list[str]
) -> tuple[Ints, CensusCells]:
    """The cell of each row, and the cells without regions, of attribute columns or of `group`.

    Levels that differ in case, spaces or order are one level.
    """
    named = attributes != ["group"]
    parts = [key_column(path, table, name) for name in attributes]
    present, cell = np.unique(
        np.stack([codes for codes, _ in parts], axis=1), axis=0, return_inverse=True
    )
    levels = [
        tuple(names[code] for (_, names), code in zip(parts, row, strict=True)) for row in present
    ]
    if not named:
        levels = [tuple(part.strip() for part in name.split(",")) for (name,) in levels]
        width = max(map(len, levels))
        # A single word may stand for everybody in all attributes.
        levels = [
            each * width if len(each) == 1 and _is_total(each[0]) else each for each in levels
        ]
    first = next((each for each in levels if not any(map(_is_total, each))), levels[0])
    levels = [each if named else _in_order(each, first) for each in levels]
    known: dict[tuple[int, str], str] = {}
    merged = [
        tuple(known.setdefault((k, plain_level(part)), part) for k, part in enumerate(each))
        for each in levels
    ]
    pairs = [
        pair for old, new in zip(levels, merged, strict=True) for pair in zip(old, new, strict=True)
    ]
    notes += [
        f"{path.name}: '{old}' is read as '{new}'"
        for old, new in dict.fromkeys(pairs)
        if old != new
    ]
    distinct = list(dict.fromkeys(merged))
    number = np.array([distinct.index(each) for each in merged], dtype=np.int64)
    none = np.empty((0, 0))
    cells = CensusCells(
        (), tuple(attributes) if named else None, tuple(distinct), none, none.astype(np.bool_)
    )
    return number[cell.ravel()], cells


def _in_order(level: tuple[str, ...], first: tuple[str, ...]) -> tuple[str, ...]:
    """The parts of a group name in the order of another name, if their kinds are unambiguous."""
    order = {_kind(part): number for number, part in enumerate(first)}
    known = sorted(map(_kind, level)) == sorted(order)
    return tuple(sorted(level, key=lambda part: order[_kind(part)])) if known else level


def _kind(level: str) -> str:
    return "gender" if gender(level) else "age" if parse_age(level) else ""


def label_columns(path: Path, columns: list[str], key: str, groups: Groups | None) -> list[str]:
    """The column `group` of a table, or its attribute columns."""
    if "group" in columns:
        return ["group"]
    names = {*ATTRIBUTE_NAMES, *(groups.attribute_names if groups is not None else ())}
    known = {name.lower() for name in names}
    attributes = [
        name
        for name in columns
        if name.lower() in known
        or (groups is None and name not in (key, *MEASURES) and not looks_like_region(name))
    ]
    attributes = [name for name in attributes if name.lower() not in NO_ATTRIBUTES]
    if not attributes:
        require_columns(str(path), columns, ("group",))
    return attributes


def _is_total(level: str) -> bool:
    return plain_text(level) in TOTALS


def _without_totals(path: Path, cells: CensusCells, notes: list[str]) -> CensusCells:
    """Leave out totals over levels, after a comparison with the sum of their parts."""
    columns = range(min(map(len, cells.levels)))
    totals = [_total_levels(path, [level[k] for level in cells.levels]) for k in columns]
    is_total = np.array([any(level[k] in totals[k] for k in columns) for level in cells.levels])
    gap = 0.0
    for number in np.flatnonzero(is_total).tolist():
        own = [totals[k].get(cells.levels[number][k], [cells.levels[number][k]]) for k in columns]
        parts = np.array([all(map(list.__contains__, own, level)) for level in cells.levels])
        gap = max(gap, _compare_total(path, cells, number, np.flatnonzero(parts & ~is_total)))
    if is_total.any():
        names = ", ".join(f"'{name}'" for name in dict.fromkeys(itertools.chain(*totals)))
        equal = f"differ by at most {gap:,g} from" if gap > EXACT else "equal"
        notes.append(f"{path.name}: totals ({names}) {equal} the sum of their parts; left out")
    unknown = [any(plain_text(part) in UNKNOWN for part in level) for level in cells.levels]
    other = np.array(unknown) & ~is_total
    if other.any():
        share = np.nansum(cells.values[:, other]) / np.nansum(cells.values[:, ~is_total])
        name = SEPARATOR.join(cells.levels[int(np.argmax(other))])
        notes.append(f"{path.name}: '{name}' is no group; these {share:.2%} of people are left out")
    cells = cells.select(np.ones(len(cells.regions), dtype=np.bool_), ~(is_total | other))
    if cells.absent.any():
        row, column = np.argwhere(cells.absent)[0]
        notes.append(
            f"{path.name}: {int(cells.absent.sum()):,} of {cells.absent.size:,} cells have no row "
            f"and count as zero, such as '{SEPARATOR.join(cells.levels[column])}' in region "
            f"'{cells.regions[row]}'"
        )
    return cells


def _total_levels(path: Path, levels: Sequence[str]) -> dict[str, list[str]]:
    """For each level that is a total or a wider age range, the levels that it is the sum of."""
    own = [level for level in dict.fromkeys(levels) if not _is_total(level)]
    ages = [level for level in own if plain_text(level) not in UNKNOWN]
    ranges = dict(zip(ages, age_ranges(ages) or (), strict=False))
    parts_of: dict[str, list[str]] = {}
    for level, (start, end) in sorted(ranges.items(), key=lambda item: item[1][1] - item[1][0]):
        finest = [each for each, parts in parts_of.items() if not parts]
        inside = [each for each in finest if ranges[each][0] < end and start < ranges[each][1]]
        edges = [edge for each in inside for edge in ranges[each]]
        if inside and (min(edges), max(edges)) != (start, end):
            one, two = sorted((level, inside[0]))
            raise MobatlasError(
                f"{path}: age ranges '{one}' and '{two}' overlap; keep ranges that do not"
            )
        parts_of[level] = inside
    wider = {level: parts for level, parts in parts_of.items() if parts}
    parts = [level for level in own if level not in wider]
    return wider | {level: parts for level in levels if own and _is_total(level)}


def _compare_total(path: Path, cells: CensusCells, number: int, parts: Ints) -> float:
    """The largest difference of a total from the sum of its parts; a large one is refused."""
    total = cells.values[:, number]
    below = cells.values[:, parts].sum(1)
    gap = np.nan_to_num(np.abs(total - below))  # zero where a count is not available
    gap[cells.absent[:, number]] = 0
    allowed = np.maximum(0.0 if cells.shares else min(FEW, len(parts)), ROUNDED * np.abs(total))
    if (gap > allowed).any():
        row = int(np.argmax(gap > allowed))
        raise MobatlasError(
            f"{path}: '{SEPARATOR.join(cells.levels[number])}' of region '{cells.regions[row]}' is "
            f"{total[row]:,g}, but its parts sum to {below[row]:,g}; correct the table, or remove "
            "the totals"
        )
    return float(gap.max(initial=0))


def _without_empty_regions(path: Path, cells: CensusCells, notes: list[str]) -> CensusCells:
    """Leave out totals over regions, regions without people, and those with missing counts."""
    values = cells.values
    others = np.nansum(values, axis=0) - values  # (regions, cells)
    named = np.array([_is_total(name) for name in cells.regions])
    several = len(values) > 2 and not cells.shares
    equal = (others == values).all(1) & (values.sum(1) > 0) & several
    close = (np.abs(others - values) <= np.maximum(FEW, ROUNDED * values)).all(1)
    reasons = {
        "a count is not available": np.isnan(values).any(1),
        "they have no people": (values == 0).all(1),
        "a total equals the sum of the other regions": equal | (named & close & several),
        "a total does not equal the sum of the other regions": named & ~close & ~equal & several,
    }
    for reason, rows in reasons.items():
        names = [f"'{name}'" for name in itertools.compress(cells.regions, rows)]
        more = f" and {len(names) - LISTED:,} others" if len(names) > LISTED else ""
        if names:
            listed = f"{', '.join(names[:LISTED])}{more}"
            notes.append(f"{path.name}: regions {listed} are left out: {reason}")
    left_out = np.any(list(reasons.values()), axis=0)
    if left_out.all():
        raise MobatlasError(f"{path}: every region has no people or missing counts; correct them")
    return cells.select(~left_out, np.ones(len(cells.levels), dtype=np.bool_))


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
            f"'{cell[1][cell[0][row]]}'; keep one, and check that no column is missing, "
            "such as sex or year"
        )
    pivoted = np.full((len(region[1]), len(cell[1])), absent)
    pivoted.flat[flat] = values
    return pivoted
