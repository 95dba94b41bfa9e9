"""The benchmark of families: how time becomes steps, and that a run resumes with the same ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.families import budget, run, stages
from bench.report.families import families_table, write_families
from bench.report.files import as_markdown
from bench.runner import Experiment
from mobatlas import MobatlasError
from tests.test_phase2_benchmark import CITY
from tests.tiny import OPTIONS

FAMILY = "point-process"


def test_stages_share_the_time_as_their_preset_shares_the_steps() -> None:
    config = {
        "length": 12,
        "first": {"steps": 100, "batch": 8, "warmup": 10},
        "second": {"steps": 300, "batch": 8, "warmup": 50},
        "weighted_fit": {"steps": 50, "warmup": 10},
        "sampler": {"steps": 10},
    }
    assert list(stages(config)) == ["first", "second"]
    steps = budget(config, [1.0, 2.0], 70.0)
    assert {name: part["steps"] for name, part in steps.items()} == {
        "first": 10,
        "second": 30,
        "weighted_fit": 18,
    }
    assert {name: part["warmup"] for name, part in steps.items()} == {
        "first": 2,
        "second": 6,
        "weighted_fit": 3,
    }


def test_an_unknown_family_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(
        MobatlasError, match=r"--generator autoregresive does not exist.*autoregressive"
    ):
        run(Experiment(tmp_path / "out"), ["autoregresive"])
    assert not (tmp_path / "out").exists()


def test_a_family_is_measured_and_a_run_resumes_with_the_same_steps(tmp_path: Path) -> None:
    values: dict[str, Any] = OPTIONS[FAMILY] | {"calibration": {"pool": 64, "candidates": 4}}
    experiment = Experiment(tmp_path / "out", quiet=True)
    first = run(experiment, [FAMILY], 1.0, {FAMILY: values}, CITY)
    [family] = first["families"]
    assert family["generator"] == FAMILY and family["trajectories_per_second"] > 0
    assert family["steps"]["training"]["steps"] >= 1
    assert {row["model"] for row in family["rows"]} == {
        "baseline",
        "strong",
        "strong, calibrated",
        "tilt",
        "tilt, calibrated",
    }
    table = families_table(first)
    assert table.texts()[0][0] == FAMILY and "gap closed, hot16" in table.columns
    assert {"POI frequency", "Hour of arrival", "Dwell"} <= {row[2] for row in table.texts()}
    write_families(tmp_path / "out", first)
    assert (tmp_path / "out" / "families-tables" / "families.md").read_text() == as_markdown(table)
    assert run(experiment, [FAMILY], 1.0, {FAMILY: values}, CITY) == first
    assert json.loads((tmp_path / "out" / "families.json").read_text()) == first
