"""Results of benchmarks as tables for the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from mobatlas.evaluation.metrics import PAPER_METRICS
from mobatlas.report.tables import Table


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
        tables.append(Table.from_records(rows, title).as_rich())
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
            Table.from_records(
                rows, f"JSD in bits, and closed of baseline - floor; anchors of the {anchors}"
            ).as_rich()
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
    return Group(
        Table.from_records(result["rows"], "cost of phase 2").as_rich(), Text("\n".join(lines))
    )


def speed_table(result: Mapping[str, Any]) -> RenderableType:
    """The rows of `python -m bench speed`."""
    rows = tuple(
        (
            row["what"],
            row["size"],
            row["seconds"],
            row.get("reference", "-"),
            row.get("reference_seconds"),
            row.get("ratio"),
            row["peak_gb"],
        )
        for row in result["rows"]
    )
    columns = ("what", "size", "seconds", "reference", "its seconds", "ratio", "peak GB")
    formats = {"seconds": ".1f", "its seconds": ".1f", "ratio": ".2f", "peak GB": ".2f"}
    return Table(columns, rows, f"speed, profile {result['profile']}", formats).as_rich()


def _closed(share: float | None) -> str:
    return f"{'-' if share is None else format(share, '.0%'):>5}"
