"""Families of generators as one table."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mobatlas.evaluation.metrics import METRICS
from mobatlas.report.tables import SHARE, Cell, Table, write_tables

SHOWN = ("poi", "spatial", "travel_distance", "length", "hour", "dwell")
LEAST = 0.01  # bits between baseline and floor of which a share can be told
OWN = "tilt, calibrated"  # the default strategy


def families_table(result: Mapping[str, Any]) -> Table:
    """A family and a metric a row: baseline, strong, floor, and what the default strategy comes to under each partition."""
    titles = {metric.name: metric.title for metric in METRICS.values()}
    partitions = list(
        dict.fromkeys(row["partition"] for row in result["families"][0]["rows"] if row["partition"])
    )
    rows: list[tuple[Cell, ...]] = []
    for family in result["families"]:
        ours = {
            row["partition"]: row["metrics"]
            for row in family["rows"]
            if row["model"] == OWN and row["anchors"] == "group"
        }
        told = [
            metric for metric in SHOWN if metric in ours[partitions[0]]
        ]  # not everybody tells times
        for number, metric in enumerate(told):
            first = ours[partitions[0]][metric]
            said = (
                (family["generator"], family["trajectories_per_second"])
                if number == 0
                else ("", None)
            )
            cells: list[Cell] = [first["baseline"], first["strong"], first["floor"]]
            for name in partitions:
                cells += [ours[name][metric]["jsd"], _closed(ours[name][metric])]
            rows.append((*said, titles[metric], *cells))
    columns = [name for partition in partitions for name in (partition, f"closed, {partition}")]
    formats = {name: SHARE for name in columns if name.startswith("closed")} | {
        "samples a second": ",.0f"
    }
    caption = f"JSD in bits to test people of a group, average over groups; {result['seconds']:g} s of training each."
    note = (
        f"Closed: of the way from the baseline to the floor; none where the two are within {LEAST:g} bits or the "
        "spread between seeds."
    )
    head = ("generator", "samples a second", "metric", "baseline", "strong", "floor", *columns)
    return Table(head, tuple(rows), caption, formats, note)


def _closed(found: Mapping[str, Any]) -> float | None:
    """Of the way to the floor, where there is one."""
    closed: float | None = found["floor_closed"]
    return closed if found["baseline"] - found["floor"] >= LEAST else None


def write_families(out: Path, result: Mapping[str, Any]) -> None:
    """The table in four formats, in a folder within `out`."""
    folder = out / "families-tables"
    folder.mkdir(exist_ok=True)
    write_tables(folder, {"families": families_table(result)})
