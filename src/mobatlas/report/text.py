"""Tables for the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

REASON_WORDS = {
    "unreliable": "too many days above max_day_km",
    "coverage": "too few well-covered days",
    "short": "too few tokens",
    "anchors": "no known home and work",
}


def summary_table(summary: Mapping[str, Any], out: Path) -> RenderableType:
    """What a preparation kept, per split, and why the rest fell."""
    table = Table(title=f"{out}", title_justify="left")
    table.add_column("split")
    for name in ("users", "trajectories", "tokens", "median length", "p95", "named POIs"):
        table.add_column(name, justify="right")
    for split, counts in summary["splits"].items():
        coverage = counts["vocabulary_coverage"]
        table.add_row(
            split,
            f"{counts['users']:,}",
            f"{counts['trajectories']:,}",
            f"{counts['tokens']:,}",
            _or_dash(counts["length_median"]),
            _or_dash(counts["length_p95"]),
            "-" if coverage is None else f"{coverage:.1%}",
        )
    return Group(table, Text("\n".join(_summary_lines(summary))))


def _summary_lines(summary: Mapping[str, Any]) -> list[str]:
    visits, windows = summary["visits"], summary["windows"]
    dropped = {
        "without coordinates": visits["missing_coordinates"],
        "not at a POI": visits["not_poi"],
        "invalid": visits["invalid"],
        "duplicates": visits["duplicates"],
    }
    said = ", ".join(f"{count:,} {name}" for name, count in dropped.items() if count) or "none"
    fell = ", ".join(f"{count:,} {REASON_WORDS[name]}" for name, count in windows["fell"].items() if count) or "none"
    kept = sum(counts["users"] for counts in summary["splits"].values())
    known = summary["users_in_people"]
    in_people = "" if known is None else f"; {known:,} are in people"
    lines = [
        f"visits: {visits['rows']:,} read, dropped: {said}; POIs: {summary['pois']:,}",
        f"users: {summary['users']:,}, {kept:,} of them with a trajectory{in_people}",
        f"windows: {windows['kept']:,} kept; fell: {fell}",
    ]
    columns = {key: names for key, names in summary["people_columns"].items() if names}
    if columns:
        words = {"attributes": "attributes", "regions": "regions", "others": "kept with the labels"}
        lines.append("people: " + "; ".join(f"{words[key]}: {', '.join(names)}" for key, names in columns.items()))
    if summary["inferred_anchors"]:
        lines.append(f"inferred from the hours of visits: {' and '.join(summary['inferred_anchors'])}")
    return lines + [f"note: {note}" for note in summary["notes"]]


def city_table(facts: Mapping[str, Any], out: Path) -> RenderableType:
    """What a simulation wrote."""
    table = Table(title=f"{out}", title_justify="left", show_header=False)
    for name, value in facts.items():
        table.add_row(name.replace("_", " "), f"{value:,}" if isinstance(value, int) else str(value))
    return table


def speed_table(result: Mapping[str, Any]) -> RenderableType:
    """The rows of `benchmark speed`."""
    table = Table(title=f"speed, profile {result['profile']}", title_justify="left")
    for name in ("what", "size", "seconds", "reference", "seconds", "ratio", "peak memory"):
        table.add_column(name, justify="left" if name in ("what", "reference") else "right")
    for row in result["rows"]:
        reference = row.get("reference_seconds")
        table.add_row(
            row["what"],
            row["size"],
            f"{row['seconds']:.1f}",
            row.get("reference", "-"),
            "-" if reference is None else f"{reference:.1f}",
            "-" if row.get("ratio") is None else f"{row['ratio']:.2f}",
            f"{row['peak_gb']:.2f} GB",
        )
    return table


def _or_dash(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"
