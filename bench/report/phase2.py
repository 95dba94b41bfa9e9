"""Tables of phase 2 on simulated cities: the gap closed, the change of JSD, and the cost."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.report.files import write_tables
from bench.score_models import FLOOR
from mobatlas.evaluation.metrics import metrics
from mobatlas.report.tables import SHARE, Cell, Table

SHOWN = ("poi", "spatial")  # groups differ by more than sampling noise
Result = Mapping[str, Any]


def phase2_tables(result: Result) -> dict[str, Table]:
    """Return both tables by name; anchors are those of the group."""
    return {"gaps": _gap_table(result), "changes": _change_table(result)}


def write_phase2(out: Path, result: Result) -> None:
    """Write both tables in four formats, in a folder within `out`."""
    folder = out / "phase2-tables"
    folder.mkdir(exist_ok=True)
    write_tables(folder, phase2_tables(result))


def cost_table(result: Result) -> Table:
    """Return the seconds and the regional loss of strategies, from `python -m bench cost`."""
    rows: list[tuple[Cell, ...]] = [
        (row["strategy"], row["seconds"], row["regional_loss"], row["gradient_agreement"])
        for row in result["rows"]
    ]
    caption = (
        f"One simulated city, preset small, latent diffusion, seed {result['seed']}, "
        f"{result['threads']} threads."
    )
    note = (
        "Regional loss: JSD in bits between simulated regions and those of validation people. "
        "Gradient agreement: mean cosine between gradients of one region from two batches."
    )
    columns = ("strategy", "seconds", "regional loss", "gradient agreement")
    return Table(columns, tuple(rows), caption, {"seconds": ".0f"}, note)


def _rows(result: Result) -> list[Mapping[str, Any]]:
    return [row for row in result["rows"] if row["anchors"] == "group"]


def _regions(row: Mapping[str, Any]) -> str:
    return f"{row['partition'] or ''}{', shuffled' if row['shuffled'] else ''}"


def _gap_table(result: Result) -> Table:
    titles = {metric.name: metric.title for metric in metrics()}
    rows: list[tuple[Cell, ...]] = []
    for row in _rows(result):
        cells: list[Cell] = []
        for name in SHOWN:
            score = row["metrics"][name]
            range_of_seeds = " to ".join(_seed_range(score))
            cells += [
                score["jsd"],
                score["gap_closed_floor"],
                range_of_seeds,
                score["gap_closed_strong"],
            ]
        rows.append((_regions(row), row["model"], *cells))
    first = _rows(result)[0]["metrics"]
    rows.insert(
        2, ("", FLOOR, *(cell for name in SHOWN for cell in (first[name]["floor"], 1.0, "", None)))
    )
    columns = tuple(
        f"{prefix}{titles[name]}"
        for name in SHOWN
        for prefix in ("", "gap closed, ", "lowest and highest seed, ", "gap to strong closed, ")
    )
    formats = {name: SHARE for name in columns if name.startswith("gap")}
    note = (
        "JSD in bits, mean over seeds. Gap closed: share of the distance from the baseline to the "
        "floor, or to strong. It is empty if that gap is below three standard errors."
    )
    return Table(("regions", "model", *columns), tuple(rows), _caption(result), formats, note)


def _seed_range(score: Mapping[str, Any]) -> list[str]:
    """Return the smallest and the largest gap closed of a seed."""
    shares = [share for share in score["by_seed"] if share is not None]
    return [format(share, ".0%") for share in (min(shares), max(shares))] if shares else []


def _change_table(result: Result) -> Table:
    first = _rows(result)[0]["metrics"]
    shown = [metric for metric in metrics() if metric.name in first]
    rows: list[tuple[Cell, ...]] = []
    for row in _rows(result):
        if row["model"] == "baseline":
            continue
        seeds = len(result["seeds"])
        changes = (_change(row["metrics"][metric.name], seeds) for metric in shown)
        rows.append((_regions(row), row["model"], *changes))
    rows.insert(0, ("", "baseline", *(f"{first[metric.name]['baseline']:.4f}" for metric in shown)))
    rows.insert(1, ("", FLOOR, *(f"{first[metric.name]['floor']:.4f}" for metric in shown)))
    note = "An exclamation mark: worse than the baseline by more than the spread between seeds."
    caption = (
        "Difference to the JSD of the baseline and its standard deviation between seeds; lower is "
        "better."
    )
    return Table(
        ("regions", "model", *(metric.title for metric in shown)),
        tuple(rows),
        caption,
        note=note,
    )


def _change(score: Mapping[str, Any], seeds: int) -> str:
    change = score["jsd"] - score["baseline"]
    spread = score["spread"]
    if seeds == 1:
        return f"{change:+.4f}"
    return f"{change:+.4f} ± {spread:.4f}{' !' if change > spread else ''}"


def _caption(result: Result) -> str:
    seeds = len(result["seeds"])
    number = f"{seeds} seeds" if seeds > 1 else "one seed"
    return (
        f"Simulated city, preset small, latent diffusion, {number}; homes of training people of "
        "the group."
    )
