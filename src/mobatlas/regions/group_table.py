"""Published tables of mean visits by group or by some attributes, as evidence beside regions.

A row that covers several groups, such as all women, is a mixture of them.
"""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from mobatlas.data.dataset import TrajectoryDataset
from mobatlas.data.types import Floats, Ints
from mobatlas.errors import MobatlasError, refuse_faults, suggestion
from mobatlas.features.maps import build_feature, feature_maps
from mobatlas.io.tables import (
    key_column,
    number_column,
    plain_numbers,
    read_table,
    require_columns,
)
from mobatlas.regions.aggregates import (
    MOST_TOTAL,
    SMALLEST_VALUE,
    level_of_dataset,
    people_behind,
    refuse_absurd,
    refuse_interchanged,
)
from mobatlas.regions.census import Keys, pivot
from mobatlas.regions.composition import mixtures, refuse_negative
from mobatlas.regions.periods import (
    check_level,
    same_level,
    windows_per_period,
)
from mobatlas.regions.types import (
    GroupEvidence,
    Regions,
    ReportedEvidence,
    mean_over_regions,
)

PLACES = ("elsewhere", "here")
FIXED = "visits:"  # these bins describe a whole window, so their values cannot be converted


def read_group_table(
    path: Path | str,
    dataset: TrajectoryDataset,
    regions: Regions,
    mask: Sequence[str] = (),
    rename: Mapping[str, str] | None = None,
    per: str | None = None,
    strict: bool = False,
) -> ReportedEvidence:
    """Read mean visits per person by group.

    Parameters
    ----------
    path
        CSV or Parquet: `group` or some attribute columns, `feature`, `value`, and `n` (people) or
        `standard_error`. Optional: `per` (day, week, month, window or dates) and `place` (here or
        elsewhere). An attribute without a column, or with an empty cell, covers all its levels.
    dataset, regions, mask, rename, per, strict
        Features and windows; groups and their shares; tokens that are not counted; columns, as in
        `read_composition`; the period of a table without one; whether a period is required.

    Returns
    -------
    ReportedEvidence
        The evidence, with notes and warnings.

    Examples
    --------
    >>> read_group_table("trips_by_age.csv", dataset, regions)  # doctest: +SKIP
    """
    path = Path(path)
    notes: list[str] = []
    table = _usable_rows(path, dataset, mask, rename, notes)
    cell, names, shares = mixtures(path, table, regions.groups, regions.population_shares, notes)
    feature = key_column(path, table, "feature")
    value, scale, declared = _values_per_window(path, table, dataset.window_days, per)
    values = pivot(path, (cell, names), feature, value, np.nan, "group")  # (rows, features)
    refuse_negative(path, "value", names, feature[1], values, "group")
    n, error = _precision(path, table, (cell, names), feature, scale)
    known = _described_rows(path, names, shares, notes)
    weight = (shares[known] > 0) @ regions.population_shares
    level = float(mean_over_regions(values[known], weight).sum())
    ours = level_of_dataset(dataset, feature[1], mask)
    elsewhere = _is_elsewhere(path, table)
    known_period = {"declared": declared, "strict": strict, "elsewhere": elsewhere}
    warnings = check_level(path, level, ours, dataset.window_days, **known_period)
    notes.append(f"{path.name}: {len(known)} rows with means of {len(feature[1])} features")
    evidence = GroupEvidence(
        path.name,
        "table",
        shares[known],
        tuple(feature[1]),
        values[known],
        n[known],
        None if error is None else error[known],
        same_population=same_level(level, ours) and not elsewhere,
    )
    if not evidence.same_population:
        notes.append(f"{path.name}: only differences between its rows are used, not their level")
    return ReportedEvidence(evidence, notes, warnings)


def _described_rows(path: Path, names: Sequence[str], shares: Floats, notes: list[str]) -> Ints:
    """The rows with people of the population; `shares` (rows, groups) of others are zero."""
    known = np.flatnonzero(shares.sum(1))
    if not len(known):
        raise MobatlasError(f"{path}: no row describes people of these regions; check its levels")
    if len(known) < len(names):
        absent = "; ".join(names[each] for each in np.flatnonzero(shares.sum(1) == 0).tolist())
        notes.append(f"{path.name}: left out, because the population has no such people: {absent}")
    return known


def _usable_rows(
    path: Path,
    dataset: TrajectoryDataset,
    mask: Sequence[str],
    rename: Mapping[str, str] | None,
    notes: list[str],
) -> pd.DataFrame:
    """The rows with a value of a known feature that is not masked."""
    refuse_interchanged(path, "--group-table")
    table = read_table(path, rename, notes)
    require_columns(str(path), list(table.columns), ("feature", "value"))
    measures = [name for name in ("value", "standard_error") if name in table.columns]
    table = plain_numbers(path, table, measures, False, notes)
    codes, features = key_column(path, table, "feature")
    bins, counted = (
        {
            name
            for each in feature_maps()
            for name in build_feature(each, dataset.vocabulary, m).bins
        }
        for m in ((), mask)
    )
    for name in features:
        if name not in bins:
            raise MobatlasError(
                f"{path}: feature '{name}' does not exist in {dataset.path}"
                f"{_similar_feature(name, bins)}"
            )
    masked = np.array([name not in counted for name in features])[codes]
    empty = np.isnan(number_column(path, table, "value", missing=True))
    for reason, rows in (("without a value", empty & ~masked), ("of masked tokens", masked)):
        if rows.any():
            notes.append(f"{path.name}: {int(rows.sum()):,} rows {reason} are left out")
    if (empty | masked).all():
        raise MobatlasError(f"{path}: no row has a value of a feature that is counted")
    return table[~(empty | masked)].reset_index(drop=True)


def _similar_feature(name: str, bins: Collection[str]) -> str:
    """A suggestion: a similar bin of the same map, or the only bin with this name."""
    feature_map, _, word = name.rpartition(":")
    if feature_map:
        return suggestion(name, [bin_ for bin_ in bins if bin_.startswith(f"{feature_map}:")])
    same = [bin_ for bin_ in bins if bin_.partition(":")[2] == word]
    return f"; did you mean '{same[0]}'?" if len(same) == 1 else ""


def _values_per_window(
    path: Path, table: pd.DataFrame, window_days: int, per: str | None
) -> tuple[Floats, Floats, bool]:
    """Values and their factors (table rows,), and whether their period is known.

    Absurd values, shares and counts that cannot be converted are refused.
    """
    period = windows_per_period(path, table, window_days, per)
    scale = np.ones(len(table)) if period is None else period
    values = number_column(path, table, "value")
    refuse_absurd(path, "value", values, (-MOST_TOTAL, MOST_TOTAL), SMALLEST_VALUE)
    fixed = np.asarray(table["feature"].astype(str).str.startswith(FIXED))
    refuse_faults(
        {
            f"{path}: shares are not means; give visits per person": np.isnan(scale).any(),
            f"{path}: the number of visits per window cannot be converted from another period; "
            "give it per window": (fixed & (scale != 1)).any(),
        }
    )
    return values * scale, scale, period is not None


def _is_elsewhere(path: Path, table: pd.DataFrame) -> bool:
    """Whether the optional column `place` says that the table describes another population."""
    words = key_column(path, table, "place")[1] if "place" in table.columns else ()
    for word in words:
        if word not in PLACES:
            raise MobatlasError(f"{path}: column 'place' has '{word}'; write {' or '.join(PLACES)}")
    return PLACES[0] in words


def _precision(
    path: Path, table: pd.DataFrame, rows: Keys, feature: Keys, scale: Floats
) -> tuple[Floats, Floats | None]:
    """People (rows,), infinite where unknown, and standard errors (rows, features) if known."""
    counted = "n" in table.columns
    if not counted and "standard_error" not in table.columns:
        raise MobatlasError(
            f"{path}: column 'n' or 'standard_error' is missing; give the people behind each row, "
            "or the standard error of each value"
        )
    n = people_behind(path, table, rows, "group")
    n = np.full(len(rows[1]), np.inf) if n is None else n
    if "standard_error" not in table.columns:
        return n, None
    error = number_column(path, table, "standard_error", missing=counted)
    refuse_absurd(path, "standard_error", error, (0, MOST_TOTAL), SMALLEST_VALUE)
    if (error <= 0).any():
        raise MobatlasError(
            f"{path}: column 'standard_error' is not above 0 in row "
            f"{int(np.argmax(error <= 0)) + 1}; correct it"
        )
    return n, pivot(path, rows, feature, error * scale, np.nan, "group")
