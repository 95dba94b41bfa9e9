"""The benchmark of disclosure control: its rules, its figure, and that it resumes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.disclosure import RULES, run
from bench.report.figures import disclosure_figure
from bench.runner import Experiment


def test_every_rule_is_measured_beside_exact_aggregates(tmp_path: Path) -> None:
    pytest.importorskip("opendp")
    experiment = Experiment(tmp_path / "out")
    result = run(experiment, users=1_500, panels=(900,), draw=disclosure_figure)
    rows = {(row["partition"], row["feature"], row["rule"]): row for row in result["rows"]}
    assert {rule for _, _, rule in rows} == set(RULES)
    exact, private = (rows["demogroups", "category", rule] for rule in ("exact", "epsilon 0.1"))
    assert exact["error"] < 0.6 < private["error"], "noise hides the groups"
    assert private["error"] < 3, "the population mean is known, so noise invents no groups"
    assert json.loads((tmp_path / "out" / "disclosure.json").read_text()) == result
    assert run(experiment, users=1_500, panels=(900,)) == result, "noise is not drawn again"
    assert (tmp_path / "out" / "disclosure.png").read_bytes().startswith(b"\x89PNG")
