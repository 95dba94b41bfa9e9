"""Tables of benchmark results for the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from mobatlas.evaluation.metrics import PAPER_METRICS
from mobatlas.report.tables import Table


def phase1_table(result: Mapping[str, Any]) -> RenderableType:
    """Show the result of `python -m bench phase1`, one table for each seed."""
    tables: list[RenderableType] = []
    for row in result["rows"]:
        everybody = row["everybody"]
        by_group = row["groups"]["jsd"]
        rows = [
            {"metric": name}
            | {key: everybody[key][name] for key in ("baseline", "floor")}
            | {f"groups: {label}": values[name] for label, values in by_group.items()}
            for name in everybody["baseline"]
        ]
        seconds = ", ".join(
            f"{name} {value:.0f} s" for name, value in row["training_seconds"].items()
        )
        title = f"seed {row['seed']}: {100 * row['reconstruction']:.1f} % reconstructed; {seconds}"
        tables.append(Table.from_records(rows, title).as_rich())
    return Group(*tables)


def phase2_table(result: Mapping[str, Any]) -> RenderableType:
    """Show the result of `python -m bench phase2`: JSD, and the gap closed to the floor."""
    views = dict.fromkeys(row["anchors"] for row in result["rows"])
    tables = []
    for anchors in views:
        models = [row for row in result["rows"] if row["anchors"] == anchors]
        rows = [_phase2_row(row) for row in models]
        rows.insert(2, _phase2_floor(models[-1]))
        title = f"JSD in bits, and gap closed to the floor; anchors of the {anchors}"
        tables.append(Table.from_records(rows, title).as_rich())
    return Group(*tables)


def _phase2_row(row: Mapping[str, Any]) -> dict[str, str]:
    shuffled = f"shuffled {row['partition']}" if row["shuffled"] else row["partition"] or ""
    scores = {name: row["metrics"][name] for name in PAPER_METRICS}
    cells = {
        name: f"{score['jsd']:.3f} {_share(score['gap_closed_floor'])}"
        for name, score in scores.items()
    }
    variety = _variety(row["diversity"])
    return {"partition": shuffled, "model": row["model"]} | cells | variety


def _phase2_floor(row: Mapping[str, Any]) -> dict[str, str]:
    """Return the row of real people, which is the same for all models."""
    scores = {name: row["metrics"][name] for name in PAPER_METRICS}
    cells = {name: f"{score['floor']:.3f} {_share(1.0)}" for name, score in scores.items()}
    variety = _variety(row["diversity"]["held_out"])
    return {"partition": "", "model": "floor (real people)"} | cells | variety


def _variety(diversity: Mapping[str, Any]) -> dict[str, str]:
    return {name: f"{diversity[name]:.1%}" for name in ("distinct", "copies")}


def cost_table(result: Mapping[str, Any]) -> RenderableType:
    """Show the result of `python -m bench cost`."""
    loss = "the same or a lower" if result["reaches_the_same_loss"] else "a higher"
    lines = (
        f"recovery and dual alone: {result['recovery_and_dual_seconds']:.1f} s",
        f"tilt with calibration is {result['times_faster']:.0f} times faster than finetune as "
        f"published, at {loss} regional loss",
    )
    table = Table.from_records(result["rows"], "cost of phase 2").as_rich()
    return Group(table, Text("\n".join(lines)))


def speed_table(result: Mapping[str, Any]) -> RenderableType:
    """Show the result of `python -m bench speed`."""
    rows = tuple(
        (
            row["task"],
            row["size"],
            row["seconds"],
            row.get("reference", "-"),
            row.get("reference_seconds"),
            row.get("ratio"),
            row["peak_gb"],
        )
        for row in result["rows"]
    )
    columns = ("task", "size", "seconds", "reference", "its seconds", "ratio", "peak GB")
    formats = {"seconds": ".1f", "its seconds": ".1f", "ratio": ".2f", "peak GB": ".2f"}
    table = Table(columns, rows, f"speed, profile {result['profile']}", formats)
    starts = tuple(
        (
            row["command"],
            row["seconds"],
            row["limit_seconds"],
            "yes" if row["within_limit"] else "no",
        )
        for row in result["startup"]
    )
    startup = Table(("command", "seconds", "limit", "within the limit"), starts, "start")
    return Group(table.as_rich(), startup.as_rich())


def _share(value: float | None) -> str:
    return f"{'-' if value is None else format(value, '.0%'):>5}"
