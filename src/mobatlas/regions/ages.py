"""Age ranges as census tables and surveys write them: `<30`, `30-40`, `65+`, `Under 5 years`."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np


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
    # `30-50` beside `>50` alone leaves no other reading.
    exclusive = bool(ends & starts or (not follows and ends & over))
    closed = {end if exclusive else end + 1 for end in ends}
    closed |= {high for _, high, form in ages if form == "below"}
    ranges: list[tuple[int, float]] = []
    for low, high, form in ages:
        if form == "over":
            ranges.append((low if low in closed else low + 1, np.inf))
        else:
            ranges.append((low, high + 1 if form == "closed" and not exclusive else high))
    return ranges


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
    if match := re.fullmatch(r"(\d+)", text):
        return int(match[1]), float(match[1]) + 1, "year"
    return None
