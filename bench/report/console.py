"""Results of benchmarks as tables for the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from mobatlas.evaluation.metrics import PAPER_METRICS
from mobatlas.report.console import rows_table


def phase1_table(result: Mapping[str, Any]) -> RenderableType:
    """The figures of `python -m bench phase1`, seed by seed."""
    tables: list[RenderableType] = []
    for row in result["rows"]:
        everybody, groups = row["everybody"], row["groups"]
        rows = [
            {"metric": name}
            | {key: everybody[key][name] for key in ("baseline", "floor")}
            | {f"groups: {label}": values[name] for label, values in groups["jsd"].items()}
            for name in everybody["baseline"]
        ]
        seconds = ", ".join(
            f"{name} {value:.0f} s" for name, value in row["training_seconds"].items()
        )
        title = f"seed {row['seed']}: {100 * row['reconstruction']:.1f} % reconstructed; {seconds}"
        tables.append(rows_table(rows, title))
    return Group(*tables)


def phase2_table(result: Mapping[str, Any]) -> RenderableType:
    """The figures of `python -m bench phase2`: JSD, and the share of the way from baseline to floor that is closed."""
    tables = []
    for anchors in dict.fromkeys(row["anchors"] for row in result["rows"]):
        rows = []
        for row in (each for each in result["rows"] if each["anchors"] == anchors):
            found = {name: row["metrics"][name] for name in PAPER_METRICS}
            told = {
                name: f"{each['jsd']:.3f} {_closed(each['floor_closed'])}"
                for name, each in found.items()
            }
            variety = {
                "distinct": f"{row['diversity']['distinct']:.1%}",
                "copies": f"{row['diversity']['copies']:.1%}",
            }
            where = f"shuffled {row['partition']}" if row["shuffled"] else row["partition"] or ""
            rows.append({"partition": where, "model": row["model"]} | told | variety)
        real = row["diversity"]["held_out"]
        floor = {name: f"{each['floor']:.3f} {_closed(1.0)}" for name, each in found.items()}
        variety = {"distinct": f"{real['distinct']:.1%}", "copies": f"{real['copies']:.1%}"}
        rows.insert(2, {"partition": "", "model": "floor (real people)"} | floor | variety)
        tables.append(
            rows_table(
                rows, f"JSD in bits, and closed of baseline - floor; anchors of the {anchors}"
            )
        )
    return Group(*tables)


def cost_table(result: Mapping[str, Any]) -> RenderableType:
    """The figures of `python -m bench cost`."""
    also = (
        "at the same regional loss or a lower one"
        if result["reaches_the_same_loss"]
        else "at a higher regional loss"
    )
    lines = (
        f"recovery and dual alone: {result['recovery_and_dual_seconds']:.1f} s",
        f"tilt with calibration is {result['times_faster']:.0f} times faster than finetune as published, {also}",
    )
    return Group(rows_table(result["rows"], "cost of phase 2"), Text("\n".join(lines)))


def speed_table(result: Mapping[str, Any]) -> RenderableType:
    """The rows of `python -m bench speed`."""
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
            "-" if row["peak_gb"] is None else f"{row['peak_gb']:.2f} GB",
        )
    return table


def _closed(share: float | None) -> str:
    return f"{'-' if share is None else format(share, '.0%'):>5}"
