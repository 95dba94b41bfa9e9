"""Summaries of benchmark results: what git keeps is small, and every page can be made from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.summary import COMMAND, read_result, summarise, write_result, write_summary
from mobatlas import MobatlasError

RESULTS = Path(__file__).parent.parent / "bench" / "results"
SUMMARIES = sorted(RESULTS.rglob("*.json"))
OTHER_COMMANDS = {"fuzz": "python -m tests.fuzz", "privacy": "mobatlas generate"}


def full_result() -> dict[str, Any]:
    """A result with everything that a summary leaves out."""
    values = {"jsd": 0.123456789, "by_seed": [0.5, 0.6]}
    row = {
        "anchors": "group",
        "model": "tilt",
        "metrics": {"poi": values, "length": values},
        "groups": {"<30, M": {"poi": [0.1, 0.0], "dwell": [0.2, 0.0]}},
        "diversity": {"distinct": 0.9},
    }
    return {
        "command": f"{COMMAND} phase2 --out out",
        "versions": {"mobatlas": "1", "torch": "2", "numpy": "3"},
        "threads": [1],
        "rows": [row, row | {"model": "tilt, calibrated", "groups": None}],
    }


def test_a_summary_keeps_what_pages_show_and_rounds_it() -> None:
    summary = summarise(full_result())
    assert summary["versions"] == {"mobatlas": "1", "torch": "2"}
    row = summary["rows"][0]
    assert row["metrics"]["poi"] == {"jsd": 0.123457, "by_seed": [0.5, 0.6]}
    assert row["metrics"]["length"] == {"jsd": 0.123457}, "pages show two metrics seed by seed"
    assert row["groups"] == {"<30, M": {"poi": [0.1, 0.0]}} and "diversity" not in row
    assert summary["rows"][1]["groups"] is None
    assert summarise(summary) == summary


def test_a_result_is_written_in_full_with_its_summary_beside_it(tmp_path: Path) -> None:
    write_result(tmp_path, "phase2", full_result())
    assert read_result(tmp_path / "phase2.json") == full_result()
    path = tmp_path / "phase2.summary.json"
    assert read_result(path) == summarise(full_result())
    lines = path.read_text().splitlines()
    assert sum('"model"' in line for line in lines) == 2, "one row per line"
    assert len(lines) == 9


def test_a_file_that_is_no_result_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rq1.json").write_text("{")
    with pytest.raises(MobatlasError, match=r"rq1\.json: this file is not the result"):
        read_result(tmp_path / "rq1.json")


@pytest.mark.parametrize("path", SUMMARIES, ids=lambda path: path.stem)
def test_a_committed_result_is_a_summary_with_its_command(path: Path, tmp_path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    summary = json.loads(text)
    prefix = OTHER_COMMANDS.get(path.stem, OTHER_COMMANDS.get(path.parent.name, f"{COMMAND} "))
    assert summary["command"].startswith(prefix)
    write_summary(tmp_path / "again.json", summarise(summary))
    assert (tmp_path / "again.json").read_text(encoding="utf-8") == text
    assert text.count("\n") < 250
