"""The benchmark of phase 2: means and spreads over seeds, and that it resumes."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from bench.cells import ANCHORS, Job
from bench.gaps import summarise
from bench.phase2 import run
from bench.report.console import phase2_table
from bench.report.phase2 import phase2_tables, write_phase2
from bench.runner import Experiment
from mobatlas import MobatlasError
from mobatlas.evaluation.metrics import metrics
from mobatlas.io.manifest import write_json
from tests.tiny import OPTIONS

NAMES = [metric.name for metric in metrics()]
CITY = {"users": 700, "pois": 40, "districts": 4, "days": 15}
VALUES: dict[str, Any] = OPTIONS["latent-diffusion"] | {
    "weighted_fit": {"steps": 4, "warmup": 1},
    "calibration": {"pool": 64, "candidates": 4},
    "finetune": {
        "steps": 2,
        "batch": 16,
        "validate_every": 2,
        "validation_samples": 16,
        "warmup": 1,
    },
}


def scored(models: dict[str, float], seed: int = 0, gap_error: float = 0.0) -> dict[str, Any]:
    """A cell in which all metrics of a model have one value, and one standard error of the gap."""

    def table(values: dict[str, float]) -> dict[str, Any]:
        by_model = {model: dict.fromkeys(NAMES, value) for model, value in values.items()}
        return dict.fromkeys(ANCHORS, by_model)

    diversity = {
        "n": 10,
        "distinct": 1 - 0.2 * seed,
        "copies": 0.1,
        "held_out": {"n": 10, "distinct": 1.0, "copies": 0.5},
    }
    without_floor = [model for model in models if model != "floor"]
    by_view = {anchors: dict.fromkeys(without_floor, diversity) for anchors in ANCHORS}
    groups = {model: {"a": {"poi": value}, "b": {"poi": value}} for model, value in models.items()}
    return {
        "threads": 1,
        "jsd": table(models),
        "gap_error": table(dict.fromkeys(models, gap_error)),
        "excess": table({model: value - 0.05 for model, value in models.items()}),
        "groups": groups,
        "diversity": by_view,
    }


def write_cell(
    folder: Path, seed: int, name: str, models: dict[str, float], gap_error: float = 0.0
) -> None:
    (folder / f"seed-{seed}").mkdir(exist_ok=True)
    write_json(folder / f"seed-{seed}" / f"{name}.json", scored(models, seed, gap_error))


def test_gap_closed_is_that_of_means_over_seeds_and_the_spread_is_between_seeds(
    tmp_path: Path,
) -> None:
    for seed, (baseline, ours) in enumerate([(0.35, 0.2), (0.45, 0.3)]):
        write_cell(tmp_path, seed, "phase1", {"baseline": baseline, "strong": 0.15, "floor": 0.1})
        write_cell(tmp_path, seed, "messy-tilt", {"tilt": ours, "floor": 0.1})
    rows = summarise(tmp_path, range(2), [Job("messy", "tilt")])["rows"]
    row = next(row for row in rows if row["model"] == "tilt" and row["anchors"] == "group")
    assert row["diversity"] == {
        "distinct": 0.9,
        "copies": 0.1,
        "held_out": {"distinct": 1.0, "copies": 0.5},
    }
    assert row["groups"]["b"]["poi"] == pytest.approx([0.25, 0.1 / 2**0.5], abs=1e-4)
    poi = row["metrics"]["poi"]
    assert poi["jsd"] == pytest.approx(0.25)
    assert poi["excess"] == pytest.approx(0.2)
    assert poi["baseline"] == pytest.approx(0.4)
    assert poi["gap_closed_floor"] == pytest.approx(0.15 / 0.3)
    assert poi["gap_closed_strong"] == pytest.approx(0.15 / 0.25)
    assert poi["spread"] == 0, "both seeds improve by 0.15"
    assert poi["by_seed"] == pytest.approx([0.15 / 0.25, 0.15 / 0.35], abs=5e-4)
    strong = next(row for row in rows if row["model"] == "strong")
    assert strong["metrics"]["poi"]["gap_closed_strong"] == pytest.approx(1.0)
    assert strong["metrics"]["poi"]["spread"] == pytest.approx(0.1 / 2**0.5, abs=1e-4)


def test_an_increase_above_the_spread_is_marked(tmp_path: Path) -> None:
    for seed, (messy, shuffled) in enumerate([(0.39, 0.52), (0.43, 0.48), (0.41, 0.51)]):
        write_cell(tmp_path, seed, "phase1", {"baseline": 0.4, "strong": 0.2, "floor": 0.1})
        write_cell(tmp_path, seed, "messy-tilt", {"tilt": messy, "floor": 0.1})
        write_cell(tmp_path, seed, "shuffled-demogroups-tilt", {"tilt": shuffled, "floor": 0.1})
    jobs = [Job("messy", "tilt"), Job("demogroups", "tilt", shuffled=True)]
    result = summarise(tmp_path, range(3), jobs)
    tables = phase2_tables(result)
    changes = {row[:2]: row[2] for row in tables["changes"].rows}
    assert changes["messy", "tilt"] == "+0.0100 ± 0.0200"
    assert changes["demogroups, shuffled", "tilt"] == "+0.1033 ± 0.0208 !"
    closed: dict[Any, Any] = {row[:2]: row[2:6] for row in tables["gaps"].rows}
    assert closed["messy", "tilt"] == (
        0.41,
        pytest.approx(-0.033),
        "-10% to 3%",
        pytest.approx(-0.05),
    )
    assert closed["", "floor"] == (0.1, 1.0, "", None)
    write_phase2(tmp_path, result)
    assert (tmp_path / "phase2-tables" / "changes.csv").exists()


def test_gap_closed_is_none_without_a_gap(tmp_path: Path) -> None:
    write_cell(tmp_path, 0, "phase1", {"baseline": 0.1, "strong": 0.2, "floor": 0.1})
    write_cell(tmp_path, 0, "messy-tilt", {"tilt": 0.1, "floor": 0.1})
    poi = summarise(tmp_path, [0], [Job("messy", "tilt")])["rows"][-1]["metrics"]["poi"]
    assert poi["gap_closed_floor"] is None
    assert poi["gap_closed_strong"] is None


def test_an_unknown_partition_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MobatlasError, match=r"--partition mesy does not exist.*messy"):
        run(Experiment(tmp_path / "out"), ["mesy"])
    assert not (tmp_path / "out").exists()


def test_the_benchmark_runs_and_resumes(tmp_path: Path) -> None:
    experiment = Experiment(tmp_path / "out", first_seed=3, quiet=True)
    first = run(experiment, ["demogroups"], VALUES, CITY)
    supervised = {"tilt", "tilt, calibrated", "resample", "finetune"}
    references = {"baseline", "strong", "strong, calibrated"}
    assert {row["model"] for row in first["rows"]} == references | supervised
    for row in first["rows"]:
        poi = row["metrics"]["poi"]
        assert 0 <= poi["floor"] <= poi["baseline"] <= 1 and 0 <= poi["jsd"] <= 1
        assert 0 < row["diversity"]["distinct"] <= 1 and 0 <= row["diversity"]["copies"] <= 1
    page = io.StringIO()
    Console(width=160, file=page).print(phase2_table(first))
    assert "floor (real people)" in page.getvalue()
    folder = tmp_path / "out" / "seed-3"
    cell = json.loads((folder / "demogroups-tilt.json").read_text())
    assert (
        cell["command"]
        == "python -m bench phase2 --partition demogroups --seeds 1 --first-seed 3 --out out"
    )
    assert set(cell["groups"]) == {"tilt", "tilt, calibrated", "floor"}
    assert len(cell["groups"]["tilt"]) == 8
    curve = json.loads((folder / "demogroups-finetune-js.json").read_text())["curve"]
    assert curve[0]["step"] == 0
    assert "js average" in curve[-1]
    distances = json.loads((folder / "phase1.json").read_text())["between_groups"]["poi"]
    between = np.array(distances)  # (groups, groups)
    assert between.shape == (8, 8)
    assert (np.diag(between) == 0).all()
    assert (between == between.T).all()
    assert between.max() > 0.1
    assert cell["seed"] == 3
    assert "mobatlas" in cell["versions"]
    assert str(tmp_path) not in json.dumps(cell)
    written = {path.name: path.stat().st_mtime_ns for path in folder.glob("*-*.json")}
    (folder / "demogroups-resample.json").unlink()
    again = run(experiment, ["demogroups"], VALUES, CITY)
    assert again["rows"] == first["rows"]
    del written["demogroups-resample.json"]
    assert written == {name: (folder / name).stat().st_mtime_ns for name in written}
    assert json.loads((tmp_path / "out" / "phase2.json").read_text())["command"] == cell["command"]
