"""The benchmark of disclosure control: what it compares, and that its figure belongs to its folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.disclosure import RULES, run
from bench.report.figures import disclosure_figure


def test_every_rule_is_measured_beside_exact_aggregates(tmp_path: Path) -> None:
    pytest.importorskip("opendp")
    found = run(tmp_path / "out", 1, users=1_500, panels=(900,), draw=disclosure_figure)
    rows = {(row["partition"], row["feature"], row["rule"]): row for row in found["rows"]}
    assert {rule for _, _, rule in rows} == set(RULES)
    exact, private = (rows["demogroups", "category", rule] for rule in ("exact", "epsilon 0.1"))
    assert exact["error"] < 0.6 < private["error"], "noise hides the groups"
    assert private["error"] < 3, (
        "and does not invent others: what everybody does is known from trajectories"
    )
    assert json.loads((tmp_path / "out" / "disclosure.json").read_text()) == found
    assert (tmp_path / "out" / "disclosure.png").read_bytes().startswith(b"\x89PNG")
