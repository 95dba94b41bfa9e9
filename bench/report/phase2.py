"""Phase 2 on simulated cities as two tables: what is closed of the way to the floor, and what changed for better or worse."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.score_models import FLOOR
from mobatlas.evaluation.metrics import metrics
from mobatlas.report.tables import SHARE, Cell, Table, write_tables

CLOSED = ("poi", "spatial")  # where groups differ by more than sampling
Result = Mapping[str, Any]


def phase2_tables(result: Result) -> dict[str, Table]:
    """By name; anchors are those of the group."""
    return {"closed": _closed(result), "changes": _changes(result)}


def write_phase2(out: Path, result: Result) -> None:
    """Both in four formats, in a folder within `out`."""
    folder = out / "phase2-tables"
    folder.mkdir(exist_ok=True)
    write_tables(folder, phase2_tables(result))


def cost_table(result: Result) -> Table:
    """What strategies cost, of `python -m bench cost`."""
    rows: list[tuple[Cell, ...]] = [
        (row["strategy"], row["seconds"], row["regional_loss"], row["gradient_agreement"])
        for row in result["rows"]
    ]
    caption = f"One simulated city, preset small, latent diffusion, seed {result['seed']}, threads: {result['threads']}."
    note = (
        "Regional loss: JSD in bits between simulated regions and those of validation people. Gradient agreement: mean cosine "
        "between gradients of one region from two batches."
    )
    columns = ("strategy", "seconds", "regional loss", "gradient agreement")
    return Table(columns, tuple(rows), caption, {"seconds": ".0f"}, note)


def _rows(result: Result) -> list[Mapping[str, Any]]:
    return [row for row in result["rows"] if row["anchors"] == "group"]


def _regions(row: Mapping[str, Any]) -> str:
    return f"{row['partition'] or ''}{', shuffled' if row['shuffled'] else ''}"


def _closed(result: Result) -> Table:
    titles = {metric.name: metric.title for metric in metrics()}
    rows: list[tuple[Cell, ...]] = []
    for row in _rows(result):
        cells: list[Cell] = []
        for name in CLOSED:
            found = row["metrics"][name]
            cells += [
                found["jsd"],
                found["floor_closed"],
                " to ".join(_by_seed(found)),
                found["gap_closed"],
            ]
        rows.append((_regions(row), row["model"], *cells))
    first = _rows(result)[0]["metrics"]
    rows.insert(
        2, ("", FLOOR, *(cell for name in CLOSED for cell in (first[name]["floor"], 1.0, "", None)))
    )
    columns = tuple(
        f"{what}{titles[name]}"
        for name in CLOSED
        for what in ("", "closed, ", "lowest and highest seed, ", "gap, ")
    )
    formats = {name: SHARE for name in columns if name.startswith(("closed", "gap"))}
    note = (
        "JSD in bits, mean over seeds. Closed: of the way from the baseline to the floor; gap: of the way from the baseline to "
        "strong; none where that way is within the spread between seeds."
    )
    return Table(("regions", "model", *columns), tuple(rows), _caption(result), formats, note)


def _by_seed(found: Mapping[str, Any]) -> list[str]:
    """The least and the most that a seed closes."""
    shares = [share for share in found["by_seed"] if share is not None]
    return [format(share, ".0%") for share in (min(shares), max(shares))] if shares else []


def _changes(result: Result) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for row in _rows(result):
        if row["model"] == "baseline":
            continue
        told = (_change(row["metrics"][metric.name], len(result["seeds"])) for metric in metrics())
        rows.append((_regions(row), row["model"], *told))
    first = _rows(result)[0]["metrics"]
    rows.insert(
        0, ("", "baseline", *(f"{first[metric.name]['baseline']:.4f}" for metric in metrics()))
    )
    rows.insert(1, ("", FLOOR, *(f"{first[metric.name]['floor']:.4f}" for metric in metrics())))
    note = (
        "An exclamation mark: above the baseline by more than the standard deviation between seeds."
    )
    caption = "Difference to the JSD of the baseline and its standard deviation between seeds; less is better."
    return Table(
        ("regions", "model", *(metric.title for metric in metrics())),
        tuple(rows),
        caption,
        note=note,
    )


def _change(found: Mapping[str, Any], seeds: int) -> str:
    change, spread = found["jsd"] - found["baseline"], found["spread"]
    return (
        f"{change:+.4f} ± {spread:.4f}{' !' if change > spread else ''}"
        if seeds > 1
        else f"{change:+.4f}"
    )


def _caption(result: Result) -> str:
    seeds = len(result["seeds"])
    said = f"{seeds} seeds" if seeds > 1 else "one seed"
    return f"Simulated city, preset small, latent diffusion, {said}; homes of training people of the group."
