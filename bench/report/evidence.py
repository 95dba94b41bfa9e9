"""Tables of recovered group means, and of what evidence beside regions adds."""

from __future__ import annotations

from typing import Any

import numpy as np

from bench.reweight import METRICS
from bench.summary import Result
from mobatlas.report.tables import SHARE, Cell, Table

FORMATS = dict.fromkeys(("recovered", "targets", "least squares", "simplex", "EM4"), SHARE)
COVERAGE = ("covered by mean", "covered bins")
NOTE = "±: standard deviation between seeds. No figure: the gap is within three standard errors."


def group_means_table(result: Result) -> Table:
    """Return the gap closed by recovered means, the coverage of intervals, and their scores."""
    rows: list[tuple[Cell, ...]] = [
        (
            row["regions"],
            row["feature"],
            _with_spread(row["recovered"], row["by_seed"]),
            row["aims"],
            row["least_squares"],
            row["simplex"],
            row["em4"],
            row["coverage_by_mean"],
            row["coverage_of_bins"],
            row["interval_score"],
            row["prior_score"],
        )
        for row in result["rows"]
    ]
    scores = ("interval score", "score of the prior")
    columns = ("regions", "feature", *FORMATS, *COVERAGE, *scores)
    caption = (
        f"{result['source']}: gap closed from the mean of everybody to the means of labelled "
        "people, and coverage of 90% intervals."
    )
    formats = FORMATS | dict.fromkeys(COVERAGE, SHARE) | dict.fromkeys(scores, ".2f")
    note = f"{NOTE} Interval scores are relative to the mean; lower is better."
    return Table(columns, tuple(rows), caption, formats, note)


def evidence_table(result: Result) -> Table:
    """Return the gap closed by each kind of evidence."""
    rows: list[tuple[Cell, ...]] = []
    for row in result["rows"]:
        flagged = row.get("contradicts")
        shares = (_with_spread(row[name], row[f"{name}_by_seed"]) for name in METRICS)
        seeds = None if flagged is None else f"{flagged} of {row['seeds']} seeds"
        rows.append((row["evidence"], *shares, seeds))
    caption = (
        "Training people weighted by recovered means: gap closed from all people to people of the "
        "group."
    )
    return Table(
        ("evidence", *METRICS, "reported as contradicting"), tuple(rows), caption, note=NOTE
    )


def _with_spread(share: float | None, by_seed: list[Any]) -> str | None:
    if share is None:
        return None
    known = [each for each in by_seed if each is not None]
    spread = f" ± {np.std(known, ddof=1):{SHARE}}" if len(known) > 1 else ""
    return f"{share:{SHARE}}{spread}"
