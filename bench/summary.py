"""Results of benchmarks: the full result of a run, and the small summary that git keeps."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mobatlas.errors import MobatlasError
from mobatlas.evaluation.metrics import PAPER_METRICS
from mobatlas.io.manifest import write_atomic, write_json

COMMAND = "python -m bench"
SUMMARY = ".summary.json"
DIGITS = 6  # significant digits of a number in a summary
LIBRARIES = ("mobatlas", "torch")
GROUP_METRICS = (*PAPER_METRICS, "category", "transitions")  # pages show these by group
SEED_METRICS = ("poi", "spatial")  # pages show these seed by seed
DROPPED = ("diversity",)  # no page shows it
Result = Mapping[str, Any]


def write_result(folder: Path, name: str, result: Result) -> None:
    """Write NAME.json, the full result, and NAME.summary.json, which `bench/results` keeps."""
    write_json(folder / f"{name}.json", result)
    write_summary(folder / f"{name}{SUMMARY}", summarise(result))


def read_result(path: Path) -> Result:
    """Read a result or a summary."""
    try:
        result: Result = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise MobatlasError(
            f"{path}: this file is not the result of a benchmark; run the benchmark again"
        ) from None
    return result


def summarise(result: Result) -> dict[str, Any]:
    """Keep what pages and figures need, with numbers rounded to six significant digits.

    A summary has the keys of the full result, so every table and figure accepts both.
    """
    summary = {name: value for name, value in result.items() if name not in DROPPED}
    if "versions" in summary:
        versions = summary["versions"]
        summary["versions"] = {name: versions[name] for name in LIBRARIES if name in versions}
    if "between_groups" in summary:
        tables = summary["between_groups"]
        summary["between_groups"] = {name: tables[name] for name in SEED_METRICS if name in tables}
    if "floor_of_groups" in summary:
        summary["floor_of_groups"] = _group_metrics(summary["floor_of_groups"])
    if "families" in summary:
        summary["families"] = [summarise(family) for family in summary["families"]]
    if "rows" in summary:
        summary["rows"] = [_summarise_row(row) for row in summary["rows"]]
    rounded: dict[str, Any] = _round(summary)
    return rounded


def write_summary(path: Path, summary: Result) -> None:
    """Write compact JSON with one table row per line, so that a diff shows which row changed."""
    write_atomic(path, f"{_lines(summary, '')}\n".encode())


def _summarise_row(row: Any) -> dict[str, Any]:
    """Drop the metrics of groups and seeds that no page shows; other rows stay as they are."""
    short = {name: value for name, value in row.items() if name not in DROPPED}
    if "anchors" not in row:
        return short
    short["metrics"] = {
        metric: {
            name: value
            for name, value in values.items()
            if name != "by_seed" or metric in SEED_METRICS
        }
        for metric, values in row["metrics"].items()
    }
    short["groups"] = _group_metrics(row["groups"]) if row["groups"] else None
    return short


def _group_metrics(groups: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    return {
        group: {metric: value for metric, value in metrics.items() if metric in GROUP_METRICS}
        for group, metrics in groups.items()
    }


def _round(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, Mapping):
        return {name: _round(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_round(each) for each in value]
    return value


def _lines(value: Any, indent: str) -> str:
    """JSON in which containers of tables span lines and everything else is on one line."""
    if not _has_table(value):
        return json.dumps(value, ensure_ascii=False, allow_nan=False, default=str)
    inner = f"{indent} "
    if isinstance(value, Mapping):
        parts = [f"{inner}{json.dumps(k)}: {_lines(each, inner)}" for k, each in value.items()]
        return "{\n" + ",\n".join(parts) + f"\n{indent}}}"
    parts = [f"{inner}{_lines(each, inner)}" for each in value]
    return "[\n" + ",\n".join(parts) + f"\n{indent}]"


def _has_table(value: Any) -> bool:
    """Whether a value contains a list of rows."""
    if isinstance(value, Mapping):
        return any(map(_has_table, value.values()))
    return isinstance(value, list) and any(isinstance(each, Mapping) for each in value)
