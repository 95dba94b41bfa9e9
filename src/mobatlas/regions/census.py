"""Layouts of census tables, read as people of each cell (age range, gender, ...) by region."""

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd

from mobatlas.data.arrays import Flags, Floats, Ints
from mobatlas.data.schema import ATTRIBUTE_NAMES, looks_like_region, region_column
from mobatlas.errors import SYNONYMS, MobatlasError, plain_text
from mobatlas.groups import GENDERS, SEPARATOR, Groups, gender, plain_level
from mobatlas.io.tables import key_column, number_column, plain_numbers, require_columns
from mobatlas.regions.ages import age_ranges, parse_age

Keys = tuple[Ints, Sequence[str]]  # the code of each row, and the name of each code
Cell = tuple[str | None, str | None]  # age and gender of a column; None: the column has no such
MEASURES = ("count", "share", "n")
TIMES = ("year", "date", "time", "period", "time_period")
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
ACS_COLUMN = re.compile(r"B01001_?(\d{3})(E|M)?", re.IGNORECASE)
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
GENDER_FIRST = re.compile(rf"({GENDER_WORDS})(?![a-z])(.*)", re.IGNORECASE)
GENDER_LAST = re.compile(rf"(.*?)(?<![a-z])({GENDER_WORDS})", re.IGNORECASE)


@dataclass(frozen=True)
class CensusCells:
    """A table of any layout, as people of each cell in each region."""

    regions: tuple[str, ...]
    attributes: tuple[str, ...] | None  # None: levels are parts of group names
    levels: tuple[tuple[str, ...], ...]  # (cells, attributes)
    values: Floats  # (regions, cells)
    shares: bool = False
    n: Floats | None = None  # (regions,)
    variance: Floats | None = None  # (regions, cells) of counts that a survey estimates

    def select(self, regions: Flags | None = None, cells: Flags | None = None) -> "CensusCells":
        """Keep some regions or some cells."""
        rows = np.flatnonzero(np.ones(len(self.regions)) if regions is None else regions)
        columns = np.flatnonzero(np.ones(len(self.levels)) if cells is None else cells)
        part = np.ix_(rows, columns)
        return replace(
            self,
            regions=tuple(self.regions[row] for row in rows),
            levels=tuple(self.levels[column] for column in columns),
            values=self.values[part],
            n=None if self.n is None else self.n[rows],
            variance=None if self.variance is None else self.variance[part],
        )

    def name(self, cell: int) -> str:
        """The levels of a cell as the name of a group."""
        return SEPARATOR.join(self.levels[cell])


def read_cells(
    path: Path, table: pd.DataFrame, groups: Groups | None, notes: list[str]
) -> CensusCells:
    """Read the cells of a table in one of the layouts, without totals and empty regions."""
    table = _tidy(path, table, notes)
    columns = _acs_columns(path, table) or _wide_columns(table)
    if columns:
        cells = _wide(path, table, columns, groups, notes)
    else:
        cells = _long(path, table, groups, notes)
    return _without_empty_regions(path, _without_totals(path, cells, notes), notes)


def is_acs(table: pd.DataFrame) -> bool:
    """Whether the table is B01001, whose 46 groups are too many to estimate."""
    return any(map(ACS_COLUMN.fullmatch, table.columns)) or _is_grouped(table)


def _is_grouped(table: pd.DataFrame) -> bool:
    return str(table.columns[0]).lower().startswith("label (grouping")


def _tidy(path: Path, table: pd.DataFrame, notes: list[str]) -> pd.DataFrame:
    """Bring layouts with their own rows or packed columns to one row per region or cell."""
    first = str(table.columns[0])
    if _is_grouped(table):
        return _transposed(path, table)
    if "," in first and "\\" in first:
        return _eurostat(path, table, notes)
    areas = [name for name in US_AREAS if name in table.columns]
    if areas[:2] == ["state", "county"] and any(map(ACS_COLUMN.fullmatch, table.columns)):
        joined = table[areas].agg("".join, axis=1)
        notes.append(f"{path.name}: region ids are {' + '.join(areas)}, such as '{joined.iloc[0]}'")
        return table.drop(columns=areas).assign(region=joined)
    for name, others in (
        ("count", ("share",)),
        ("region", filter(looks_like_region, table.columns)),
    ):
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
    areas = {
        name: name.rpartition("!!")[0] for name in table.columns if name.endswith("!!Estimate")
    }
    rows = []
    for column, area in areas.items():
        margin = f"{area}!!Margin of Error"
        row = {"region": area}
        for number in range(49):
            row[f"B01001_{number + 1:03d}E"] = table[column].iloc[number]
            if margin in table.columns:
                row[f"B01001_{number + 1:03d}M"] = table[margin].iloc[number].lstrip("\u00b1")
        rows.append(row)
    return pd.DataFrame(rows)


def _eurostat(path: Path, table: pd.DataFrame, notes: list[str]) -> pd.DataFrame:
    """The packed first column as columns, and the last period with values as counts."""
    packed = str(table.columns[0])
    names = [name.partition("\\")[0].strip().lower() for name in packed.split(",")]
    keys = table[packed].str.split(",", expand=True).set_axis(names, axis=1)
    periods = [
        name for name in table.columns[1:] if (~table[name].str.lstrip().str.startswith(":")).any()
    ]
    if not periods:
        raise MobatlasError(f"{path}: no period has a value; give a table with values")
    period = max(periods)
    if len(table.columns) > 2:
        notes.append(f"{path.name}: of {len(table.columns) - 1} periods, {period} is read")
    known = {"geo", *ATTRIBUTE_NAMES}
    for name in set(names) - known:
        if keys[name].nunique() > 1:
            raise MobatlasError(
                f"{path}: '{name}' has several values, such as '{keys[name].iloc[0]}'; keep one"
            )
    # `:` is followed by the reason, as in `: c`.
    values = table[period].where(~table[period].str.lstrip().str.startswith(":"), ":")
    return (
        keys[[name for name in names if name in known]]
        .assign(count=values)
        .rename(columns={"geo": "region"})
    )


def _acs_columns(path: Path, table: pd.DataFrame) -> dict[str, Cell]:
    matches = {name: ACS_COLUMN.fullmatch(name) for name in table.columns}
    number = {
        int(match[1]): name
        for name, match in matches.items()
        if match and (match[2] or "E").upper() == "E"
    }
    for code in ACS_CELLS if number else ():
        if code not in number:
            raise MobatlasError(
                f"{path}: column 'B01001_{code:03d}E' is missing; download the whole table B01001"
            )
    return {number[code]: cell for code, cell in ACS_CELLS.items()} if number else {}


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
    text = re.sub(r"[!:_,/|()\s]+", " ", name).strip()
    text = re.sub(r"^(?:estimate|population|pop)\s+", "", text, flags=re.IGNORECASE)
    first, last = GENDER_FIRST.fullmatch(text), GENDER_LAST.fullmatch(text)
    word, rest = (first[1], first[2]) if first else (last[2], last[1]) if last else ("", text)
    rest = " ".join(part for part in rest.split() if plain_text(part) not in ("total", "-"))
    sex = gender(word) if word else None
    if not rest or plain_text(rest) in TOTALS:
        return (None, sex) if word else (TOTAL, TOTAL)
    return (rest.strip(" -"), sex) if parse_age(rest.strip(" -")) else None


def _wide(
    path: Path,
    table: pd.DataFrame,
    columns: dict[str, Cell],
    groups: Groups | None,
    notes: list[str],
) -> CensusCells:
    """A table with a column per cell; further attributes may be in rows."""
    names = list(columns)
    known = {name.lower() for name in groups.attribute_names} if groups is not None else set()
    has_age, has_gender = (any(cell[k] is not None for cell in columns.values()) for k in (0, 1))
    others = [name for name in table.columns if name not in columns]
    rows = [
        name
        for name in others
        if (not has_age and "age" in name.lower().split("_"))
        or (not has_gender and name.lower() in ("sex", "gender"))
        or name.lower() in known
    ]
    region_name = _region_of(path, table, [name for name in others if name not in rows], notes)
    # data.census.gov writes long names under the header: "Geography", "Estimate!!Total:!!Male:"
    first = [str(table[name].iloc[0])[-1:] for name in (region_name, names[0])]
    if is_acs(table) and not any(map(str.isdigit, first)):
        table = table.iloc[1:].reset_index(drop=True)
    region = key_column(path, table, region_name)
    cell, levels = level_cells(path, table, rows, notes) if rows else (0 * region[0], [()])
    keys = (cell, [SEPARATOR.join(level) for level in levels])
    unused = [name for name in others if name not in (region_name, *rows) and not is_acs(table)]
    if unused:
        notes.append(f"{path.name}: columns that are not read: {', '.join(unused)}")
    table = plain_numbers(path, table, names, True, notes)
    values = [pivot(path, region, keys, _counts(path, table, name), np.nan) for name in names]
    own = [tuple(part for part in columns[name] if part is not None) for name in names]
    attributes = [*rows, *(["age"] if has_age else []), *(["gender"] if has_gender else [])]
    cells = CensusCells(
        region[1],
        tuple("age" if "age" in name.lower().split("_") else name for name in attributes),
        tuple((*level, *each) for each in own for level in levels),
        _zero_where_absent(path, region, keys, np.concatenate(values, axis=1), notes),
    )
    return replace(cells, variance=_variance(path, table, names, notes))


def _counts(path: Path, table: pd.DataFrame, column: str) -> Floats:
    """People (rows,); NaN where the count is not available."""
    return number_column(path, table, column, missing=True, words=NOT_AVAILABLE)


def _variance(path: Path, table: pd.DataFrame, names: list[str], notes: list[str]) -> Floats | None:
    """Variance (regions, cells) from the margins of error of ACS; None without them."""
    margins = [f"{name.rstrip('Ee')}M" for name in names]
    if not set(margins) <= set(table.columns):
        return None
    table = plain_numbers(path, table, margins, True, [])
    # Negative codes say that there is no margin, because the number is controlled.
    columns = [pd.to_numeric(table[name], errors="coerce").fillna(0) for name in margins]
    notes.append(f"{path.name}: margins of error are used as errors of the composition")
    margin = np.maximum(np.stack(columns, axis=1).astype(np.float64), 0)
    return np.asarray((margin / CONFIDENCE) ** 2)


def _region_of(path: Path, table: pd.DataFrame, columns: list[str], notes: list[str]) -> str:
    """The column of regions: by its name, or the only column of text."""
    named = [name for name in columns if name.lower() in ("region", "geo_id", "geoid")]
    if named or any(map(looks_like_region, columns)):
        return region_column(path, columns)
    texts = [
        name for name in columns if not table[name].astype(str).str.fullmatch(r"-?[\d.,]*").all()
    ]
    if len(texts) != 1:
        require_columns(str(path), list(table.columns), ("region",))
    notes.append(f"{path.name}: column '{texts[0]}' is read as 'region'")
    return texts[0]


def _long(path: Path, table: pd.DataFrame, groups: Groups | None, notes: list[str]) -> CensusCells:
    columns = list(table.columns)
    id_column = region_column(path, columns)
    if "count" not in columns and "share" not in columns:
        require_columns(str(path), columns, ("count",))
    for name in columns:
        if name.lower() in TIMES and table[name].nunique() > 1:
            one, two = table[name].unique()[:2]
            raise MobatlasError(
                f"{path}: column '{name}' has '{one}' and '{two}'; keep the rows of one of them"
            )
    if groups is None:  # a column such as `unit` with one value is no attribute
        changing = {name for name in columns if table[name].nunique() > 1}
        columns = [name for name in columns if name in {*changing, "group", *ATTRIBUTE_NAMES}]
    attributes = label_columns(path, columns, id_column, groups)
    region = key_column(path, table, id_column)
    cell, levels = level_cells(path, table, attributes, notes)
    named = attributes != ["group"]
    shares = "count" not in table.columns
    measure = "share" if shares else "count"
    table = plain_numbers(path, table, [measure], not shares, notes)
    keys = (cell, [SEPARATOR.join(level) for level in levels])
    values = pivot(path, region, keys, _counts(path, table, measure), np.nan)
    n = None
    if "n" in table.columns:
        n = np.zeros(len(region[1]))
        n[region[0]] = number_column(path, table, "n")
    values = _zero_where_absent(path, region, keys, values, notes)
    return CensusCells(
        region[1], tuple(attributes) if named else None, tuple(levels), values, shares, n
    )


def _zero_where_absent(
    path: Path, region: Keys, cell: Keys, values: Floats, notes: list[str]
) -> Floats:
    """Zero in place of pairs of region and cell that have no row."""
    absent = np.ones((len(region[1]), len(cell[1])), dtype=np.bool_)
    absent[region[0], cell[0]] = False
    if absent.any():
        row, column = np.argwhere(absent)[0]
        notes.append(
            f"{path.name}: {int(absent.sum()):,} of {absent.size:,} cells have no row and count as "
            f"zero, such as '{cell[1][column]}' in region '{region[1][row]}'"
        )
    return np.where(np.tile(absent, values.shape[1] // absent.shape[1]), 0.0, values)


def level_cells(
    path: Path, table: pd.DataFrame, attributes: list[str], notes: list[str]
) -> tuple[Ints, list[tuple[str, ...]]]:
    """The cell of each row, and the levels of each cell, of attribute columns or of `group`.

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
        levels = [each * width if _is_total(each[0]) else each for each in levels]
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
    return number[cell.ravel()], distinct


def _in_order(level: tuple[str, ...], first: tuple[str, ...]) -> tuple[str, ...]:
    """The parts of a group name in the order of another name, if their kinds are unambiguous."""
    kinds = [_kind(part) for part in level]
    wanted = [_kind(part) for part in first]
    if kinds == wanted or sorted(kinds) != sorted(wanted) or len({*kinds}) < len(kinds):
        return level
    return tuple(level[kinds.index(kind)] for kind in wanted)


def _kind(level: str) -> str:
    return "gender" if gender(level) else "age" if parse_age(level) else ""


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
        return [name for name in candidates if name.lower() not in ("name", *TIMES)]
    attributes = {name.lower() for name in (*groups.attribute_names, *ATTRIBUTE_NAMES)}
    return [name for name in candidates if name.lower() in attributes]


def _is_total(level: str) -> bool:
    return plain_text(level) in TOTALS


def _without_totals(path: Path, cells: CensusCells, notes: list[str]) -> CensusCells:
    """Leave out totals over levels and regions, after a comparison with the sum of their parts."""
    columns = range(min(map(len, cells.levels), default=0))
    totals = [
        _total_levels(path, list(dict.fromkeys(level[k] for level in cells.levels)))
        for k in columns
    ]
    is_total = np.array([any(level[k] in totals[k] for k in columns) for level in cells.levels])
    gap = 0.0
    for number in np.flatnonzero(is_total).tolist():
        wanted = [
            totals[k].get(cells.levels[number][k], [cells.levels[number][k]]) for k in columns
        ]
        parts = [
            k
            for k, level in enumerate(cells.levels)
            if not is_total[k] and all(map(list.__contains__, wanted, level))
        ]
        gap = max(gap, _compare_total(path, cells, number, parts))
    if is_total.any():
        names = ", ".join(f"'{name}'" for name in dict.fromkeys(itertools.chain(*totals)))
        equal = f"differ by at most {gap:,g} from" if gap > EXACT else "equal"
        notes.append(f"{path.name}: totals ({names}) {equal} the sum of their parts; left out")
        cells = cells.select(cells=~is_total)
    cells = _without_unknown(path, cells, notes)
    return _without_total_region(path, cells, notes)


def _total_levels(path: Path, own: list[str]) -> dict[str, list[str]]:
    """For each level that is a total or a wider age range, the levels that it is the sum of."""
    proper = [level for level in own if not _is_total(level)]
    totals = {level: proper for level in own if _is_total(level)} if proper else {}
    ages = [level for level in proper if plain_text(level) not in UNKNOWN]
    ranges = age_ranges(ages)
    if ranges is None:
        return totals
    wider = {}
    order = np.argsort([end - start for start, end in ranges], kind="stable")
    finest: list[int] = []
    for number in order.tolist():
        start, end = ranges[number]
        inside = [k for k in finest if ranges[k][0] < end and start < ranges[k][1]]
        if not inside:
            finest.append(number)
            continue
        covers = (min(ranges[k][0] for k in inside), max(ranges[k][1] for k in inside))
        length = sum(ranges[k][1] - ranges[k][0] for k in inside)
        if covers != (start, end) or (np.isfinite(length) and length != end - start):
            one, two = sorted((ages[inside[0]], ages[number]))
            raise MobatlasError(
                f"{path}: age ranges '{one}' and '{two}' overlap; keep ranges that do not"
            )
        wider[ages[number]] = [ages[k] for k in inside]
    parts = [level for level in proper if level not in wider]
    return dict.fromkeys(totals, parts) | wider


def _compare_total(path: Path, cells: CensusCells, number: int, parts: list[int]) -> float:
    """The largest difference of a total from the sum of its parts; a large one is refused."""
    total = cells.values[:, number]
    below = cells.values[:, parts].sum(1)
    gap = np.nan_to_num(np.abs(total - below))  # zero where a count is not available
    allowed = np.maximum(0.0 if cells.shares else min(FEW, len(parts)), ROUNDED * np.abs(total))
    if (gap > allowed).any():
        row = int(np.argmax(gap > allowed))
        raise MobatlasError(
            f"{path}: '{cells.name(number)}' of region '{cells.regions[row]}' is {total[row]:,g}, "
            f"but its parts sum to {below[row]:,g}; correct the table, or remove the totals"
        )
    return float(gap.max(initial=0))


def _without_unknown(path: Path, cells: CensusCells, notes: list[str]) -> CensusCells:
    unknown = np.array(
        [any(plain_text(part) in UNKNOWN for part in level) for level in cells.levels]
    )
    if not unknown.any() or unknown.all():
        return cells
    share = np.nansum(cells.values[:, unknown]) / np.nansum(cells.values)
    notes.append(
        f"{path.name}: '{cells.name(int(np.argmax(unknown)))}' is no group; these {share:.2%} of "
        "people are left out"
    )
    return cells.select(cells=~unknown)


def _without_total_region(path: Path, cells: CensusCells, notes: list[str]) -> CensusCells:
    """Leave out a region called Total, or one that equals the sum of at least two others."""
    if len(cells.regions) < 3 or cells.shares:
        return cells
    others = np.nansum(cells.values, axis=0) - cells.values  # (regions, cells)
    close = np.abs(others - cells.values) <= np.maximum(FEW, ROUNDED * cells.values)
    equal = (others == cells.values).all(1) & (cells.values.sum(1) > 0)
    named = np.array([_is_total(name) for name in cells.regions])
    for row in np.flatnonzero(named | equal).tolist():
        agrees = "equals" if close[row].all() else "does not equal"
        notes.append(
            f"{path.name}: region '{cells.regions[row]}' is left out as a total; it {agrees} the "
            "sum of the other regions"
        )
    return cells.select(regions=~(named | equal))


def _without_empty_regions(path: Path, cells: CensusCells, notes: list[str]) -> CensusCells:
    """Leave out regions without people, and regions with a count that is not available."""
    unknown = np.isnan(cells.values).any(1)
    empty = ~unknown & (cells.values == 0).all(1)
    for rows, reason in ((unknown, "a count is not available"), (empty, "they have no people")):
        names = [f"'{cells.regions[row]}'" for row in np.flatnonzero(rows).tolist()]
        if names:
            more = f" and {len(names) - LISTED:,} others" if len(names) > LISTED else ""
            notes.append(
                f"{path.name}: regions {', '.join(names[:LISTED])}{more} are left out: {reason}"
            )
    if (unknown | empty).all():
        raise MobatlasError(
            f"{path}: every region has {'no people' if empty.all() else 'a missing count'}; check "
            "the columns of counts"
        )
    return cells.select(regions=~(unknown | empty))


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
        name = cell[1][cell[0][row]]
        of = f" of '{name}'" if name else ""
        raise MobatlasError(
            f"{path}: {kind} '{region[1][region[0][row]]}' has two rows{of}; keep one"
        )
    pivoted = np.full((len(region[1]), len(cell[1])), absent)
    pivoted.flat[flat] = values
    return pivoted
