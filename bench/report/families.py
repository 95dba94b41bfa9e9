"""The comparison of generator families as one table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.report.files import write_tables
from mobatlas.features.maps import FEATURES
from mobatlas.report.tables import SHARE, Cell, Table

SHOWN = ("poi", "spatial", "travel_distance", "length", "hour", "dwell")
MIN_GAP = 0.01  # bits between baseline and floor; no share is computed below
DEFAULT = "tilt, calibrated"  # the default strategy


def families_table(result: Mapping[str, Any]) -> Table:
    """Compare families: baseline, strong, floor, and the default strategy for each partition."""
    first_rows = result["families"][0]["rows"]
    partitions = list(dict.fromkeys(row["partition"] for row in first_rows if row["partition"]))
    rows = [row for family in result["families"] for row in _family_rows(family, partitions)]
    columns = [name for partition in partitions for name in (partition, f"gap closed, {partition}")]
    formats = {name: SHARE for name in columns if name.startswith("gap closed")}
    formats["samples per second"] = ",.0f"
    caption = (
        "JSD in bits to test people of the same group, average over groups; each family trained "
        f"for {result['seconds']:g} s."
    )
    note = (
        "Gap closed: share of the gap from the baseline to the floor. It is empty if that gap is "
        f"below {MIN_GAP:g} bits or three standard errors."
    )
    head = ("generator", "samples per second", "metric", "baseline", "strong", "floor", *columns)
    return Table(head, tuple(rows), caption, formats, note)


def _family_rows(family: Mapping[str, Any], partitions: Sequence[str]) -> list[tuple[Cell, ...]]:
    """Return a row for each metric of a family; only the first names the family."""
    scores = {
        row["partition"]: row["metrics"]
        for row in family["rows"]
        if row["model"] == DEFAULT and row["anchors"] == "group"
    }
    # Only families that generate times have metrics of time.
    metrics = [metric for metric in SHOWN if metric in scores[partitions[0]]]
    rows: list[tuple[Cell, ...]] = []
    for number, metric in enumerate(metrics):
        first = scores[partitions[0]][metric]
        cells: list[Cell] = ["", None]
        if number == 0:
            cells = [family["generator"], family["trajectories_per_second"]]
        cells += [FEATURES[metric].title, first["baseline"], first["strong"], first["floor"]]
        for partition in partitions:
            score = scores[partition][metric]
            cells += [score["jsd"], _gap_closed(score)]
        rows.append(tuple(cells))
    return rows


def _gap_closed(score: Mapping[str, Any]) -> float | None:
    share: float | None = score["gap_closed_floor"]
    return share if score["baseline"] - score["floor"] >= MIN_GAP else None


def write_families(out: Path, result: Mapping[str, Any]) -> None:
    """Write the table in four formats, in a folder within `out`."""
    folder = out / "families-tables"
    folder.mkdir(exist_ok=True)
    write_tables(folder, {"families": families_table(result)})
