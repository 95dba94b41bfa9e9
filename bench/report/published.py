"""The numbers that the paper's tables print, to compare with ours."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypedDict

from mobatlas.errors import MobatlasError, suggestion

QUESTIONS = ("rq1", "rq1_groups", "rq2", "rq2_groups", "rq3")
STATES = ("Virginia", "California")
TABLES = Path(__file__).with_name("published.json")
AVERAGE = "average"  # over groups


class PublishedRow(TypedDict):
    """One cell of one of the paper's tables."""

    state: str
    partition: str | None  # None for models without regions: baseline, strong, real
    feature: str | None  # of the aggregates; None for models without regions
    model: str  # baseline, strong, atlas-js, atlas-tv; in rq3 real instead of strong
    metric: str
    group: str  # or AVERAGE
    mean: float
    std: float | None  # over seeds for a group, over groups for the average
    gap_closed: float | None  # a share; only in rq1, and not for the baseline


@cache
def published() -> Mapping[str, Any]:
    """Return `source` with its caveat, `remarks` on odd values, and a table for each question."""
    tables: Mapping[str, Any] = json.loads(TABLES.read_text(encoding="utf-8"))
    return tables


def published_rows(question: str, state: str) -> list[PublishedRow]:
    """Return the cells of a question and a state, in the paper's order."""
    for kind, name, known in (("question", question, QUESTIONS), ("state", state, STATES)):
        if name not in known:
            raise MobatlasError(
                f"the paper has no {kind} '{name}'{suggestion(name, known)} "
                f"(known: {', '.join(known)})"
            )
    table = published()[question]
    [(axis, columns)] = table["columns"].items()  # metric or group
    return [
        _cell(row, axis, column, place)
        for row in table["rows"]
        if row["state"] == state
        for place, column in enumerate(columns)
    ]


def _cell(row: Mapping[str, Any], axis: str, column: str, place: int) -> PublishedRow:
    percent = row["gap_closed_percent"][place] if "gap_closed_percent" in row else None
    return PublishedRow(
        state=row["state"],
        partition=row["partition"],
        feature=row["feature"],
        model=row["model"],
        metric=column if axis == "metric" else row["metric"],
        group=column if axis == "group" else AVERAGE,
        mean=row["mean"][place],
        std=row["std"][place] if "std" in row else None,
        gap_closed=None if percent is None else percent / 100,
    )
