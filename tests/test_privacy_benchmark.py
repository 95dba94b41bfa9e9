"""The benchmark of privacy: what rare places and rejected copies cost, in one small city."""

from __future__ import annotations

import json
from pathlib import Path

from bench.privacy import METRICS, run
from bench.runner import Experiment


def test_every_rule_is_measured_in_the_same_city(tmp_path: Path) -> None:
    experiment = Experiment(tmp_path / "out", quiet=True)
    result = run(experiment, users=250, steps=1, samples=100, places=(60,))
    rows = {(row["min_people"], row["reject"]): row for row in result["rows"]}
    assert set(rows) == {(least, reject) for least in (0, 10) for reject in (False, True)}
    assert rows[0, False]["became_other"] == 0 < rows[10, False]["became_other"] < 1
    assert all(0 < row[metric] <= 1 for row in rows.values() for metric in METRICS)
    assert all(rows[least, False]["rejected"] == 0 for least in (0, 10))
    assert json.loads((tmp_path / "out" / "privacy.json").read_text()) == result
