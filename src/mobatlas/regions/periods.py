"""Periods of published tables, and their conversion to windows of the dataset.

A visit of a dataset is a stay at one place: consecutive records of a person at the same place are
one visit. Published counts often count such repeats, so they may be higher, but not much.
"""

import math
import re
from pathlib import Path

import numpy as np
import pandas as pd

from mobatlas.data.types import Floats
from mobatlas.errors import MobatlasError
from mobatlas.io.tables import key_column

DAYS = {"day": 1.0, "week": 7.0, "month": 365.25 / 12}  # of a period
SHARE = "share"  # the table holds shares of visits: no period applies
MOST_DAYS = 3_660
SAME_LEVEL = 1.5  # values of one period may differ by this factor in visits per person
MOST_REPEATS = 3.0  # repeats at one place, and suppressed cells, explain no larger factor
MOST_ELSEWHERE = 10.0  # as MOST_REPEATS, for people of another place or time
LONGEST_WINDOW = 14
DAYS_OF_A_MONTH = 28


class UndeclaredPeriod(MobatlasError):  # noqa: N818
    """A table does not say which period its values cover; `infer_period` may find it."""

    def __init__(self, path: Path, published: float, ours: float, window_days: int) -> None:
        likely = infer_period(published, ours, window_days)
        hint = f"; {likely[1]}, so it may be '{likely[0]}'" if likely else ""
        super().__init__(
            f"{path}: people make {published:.3g} visits in the table, but {ours:.3g} per "
            f"{window_days}-day window in the dataset; add a column 'per' with {', '.join(DAYS)} "
            f"or window, or pass --per{hint}"
        )
        self.path = path
        self.comparison = (published, ours, window_days)  # for `infer_period`


def period_days(where: str, text: str, window_days: float) -> float:
    """Days of a period: week, 10 days, 2024-03-01 to 2024-03-31; NaN for shares."""
    word = text.strip().lower()
    known = DAYS | {"window": window_days, SHARE: math.nan}
    if word in known:
        return known[word]
    number = re.fullmatch(r"(\d{1,4}(?:\.\d+)?) days?", word)
    ends = pd.to_datetime(pd.Series(word.split(" to ")), format="%Y-%m-%d", errors="coerce")
    between = (ends.iloc[-1] - ends.iloc[0]).days + 1 if len(ends) == 2 else 0
    days = float(number[1]) if number else between
    if not 0 < days <= MOST_DAYS:
        raise MobatlasError(
            f"{where}: '{text}' is not a period; write {', '.join(known)}, 10 days, or "
            "2024-03-01 to 2024-03-31"
        )
    return days


def windows_per_period(
    path: Path, table: pd.DataFrame, window_days: float, declared: str | None = None
) -> Floats | None:
    """The factor (rows,) from a value of a table to a value per window; NaN for shares.

    The period is in the column `per` or declared; None if it is in neither.
    """
    if "per" not in table.columns:
        if declared is None:
            return None
        days = period_days(f"--per for {path.name}", declared, window_days)
        return np.full(len(table), window_days / days)
    codes, words = key_column(path, table, "per")
    if declared is not None:
        raise MobatlasError(
            f"{path}: the table says that values are per {words[0]}; remove the option 'per'"
        )
    lengths = [period_days(f"{path}: column 'per'", word, window_days) for word in words]
    return window_days / np.array(lengths)[codes]


def same_level(published: float, ours: float) -> bool:
    """Whether two numbers of visits per person may come from periods of one length."""
    return 1 / SAME_LEVEL < published / max(ours, 1e-300) < SAME_LEVEL


def compare_levels(published: float, ours: float, where: str = "aggregates") -> list[str]:
    """A warning if a published table and the dataset differ in visits per person and window."""
    if same_level(published, ours):
        return []
    return [
        f"people make {published:.3g} visits per window in the {where}, but {ours:.3g} in the "
        "dataset: do both use windows of the same length?"
    ]


def check_level(
    path: Path,
    published: float,
    ours: float,
    window_days: int,
    *,
    declared: bool,
    elsewhere: bool = False,
    strict: bool = False,
) -> list[str]:
    """Refuse a table whose visits per person and window cannot be those of the dataset.

    Without a declared period, values are taken per window only if they agree; if `strict`, a
    period is required. The result is a warning if a declared period agrees only roughly. People
    `elsewhere` may make other visits.
    """
    factor = published / max(ours, 1e-300)
    if not declared and (strict or not same_level(published, ours)):
        raise UndeclaredPeriod(path, published, ours, window_days)
    if same_level(published, ours):
        return []
    sentence = (
        f"{path}: people make {published:.3g} visits per {window_days}-day window in the table, "
        f"but {ours:.3g} in the dataset"
    )
    most = MOST_ELSEWHERE if elsewhere else MOST_REPEATS
    if not 1 / most < factor < most:
        raise MobatlasError(
            f"{sentence}; repeated records of one stay do not explain so much. Check its period "
            "(per), whether its values are per person, and whether both describe the same places"
        )
    if elsewhere:
        return []
    return [
        f"{sentence}: the table may "
        + ("count repeated records of one stay" if factor > 1 else "lack suppressed visits")
    ]


def infer_period(
    published: float, ours: float, window_days: int, span_days: int | None = None
) -> tuple[str, str] | None:
    """The period of a table whose people make `published` visits, and `ours` in a window.

    Candidates are day, week, month, the window, and all days of the visits (`span_days`). The
    result is a period as `per` has it, and the reason in words; None if no candidate explains the
    level.

    Examples
    --------
    >>> infer_period(published=30.6, ours=5.89, window_days=3, span_days=14)[0]
    '14 days'
    """
    covered = published / max(ours, 1e-300) * window_days
    candidates = DAYS | {"window": float(window_days)}
    if span_days is not None and span_days not in candidates.values():
        candidates[f"{span_days} days"] = float(span_days)
    name = min(candidates, key=lambda each: abs(math.log(max(covered, 1e-300) / candidates[each])))
    reason = f"a value covers about {covered:.3g} days of the dataset's visits"
    return (name, reason) if same_level(covered, candidates[name]) else None


def infer_window(
    span_days: int, days_per_person: float, table_days: float | None = None
) -> tuple[int, str]:
    """Days of a window, from the days of visits and the period of a table, and the reason in words.

    Examples
    --------
    >>> infer_window(span_days=1, days_per_person=1)[0]
    1
    """
    if days_per_person < 3:
        return 1, "half of the people have visits on fewer than 3 days, as in a diary"
    if table_days is not None and 1 <= table_days <= min(span_days, LONGEST_WINDOW):
        return round(table_days), "the period of a value in the published table"
    if days_per_person <= DAYS_OF_A_MONTH:
        return 3, "half of the people have visits on at most 28 days"
    return LONGEST_WINDOW, "half of the people have visits on more than 28 days"
