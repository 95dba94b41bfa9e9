"""Age ranges in the words of census tables."""

import re
from collections.abc import Sequence

import numpy as np

WORDS = re.compile(r"\b(?:years?|yrs|old|age[ds]?|a\u00f1os|anos|ans|jahren?)\b")
AND = "(?:and|or|y|et|und|oder|ou|e)"
OLDER = "(?:over|older|more|above|m\u00e1s|mas|plus|mehr|\u00e4lter|mais)"
BELOW = re.compile(r"(?:<|under|below|less than|unter|menos de|moins de) ?(\d+)")
OPEN = re.compile(rf"(?:>=|\u2265) ?(\d+)|(\d+) ?(?:\+|plus|{AND} {OLDER})")
CLOSED = re.compile(r"(\d+)(?: ?(?:-|to|and|a|\u00e0|bis) ?| )(\d+)")
OLDEST_YEAR = 130  # a larger number is not an age


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
    text = WORDS.sub("", level.lower().replace("\u2013", "-").replace("_", " ")).strip()
    text = re.sub(r"^y ?ge ?(\d+)$", r"\1+", re.sub(r"^y ?lt ?", "<", text))  # of Eurostat
    text = " ".join(re.sub(r"^y(?=\d)", "", text).split())
    if match := BELOW.fullmatch(text):
        return 0, float(match[1]), "below"
    if match := re.fullmatch(r"(?:>|over|more than) ?(\d+)", text):
        return int(match[1]), np.inf, "over"
    if match := OPEN.fullmatch(text):
        return int(match[1] or match[2]), np.inf, "open"
    if match := CLOSED.fullmatch(text):
        return (int(match[1]), float(match[2]), "closed") if int(match[1]) < int(match[2]) else None
    match = re.fullmatch(r"(\d{1,3})(?:\.0+)?", text)  # 34.0 where other ages are empty
    if match and int(match[1]) < OLDEST_YEAR:
        return int(match[1]), float(match[1]) + 1, "year"
    return None
