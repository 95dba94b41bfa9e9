"""The comparison of earlier with present definitions: floors of people, and clear gaps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.cells import SeedFolder, Setup
from bench.definitions import measure
from bench.report.questions import definitions_table, write_page
from mobatlas import TrajectoryDataset
from mobatlas.evaluation.comparison import real_groups
from mobatlas.evaluation.metrics import PAPER_METRICS
from tests.outcomes import refused, run
from tests.test_questions import result_of
from tests.tiny import small_city


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> TrajectoryDataset:
    return small_city(tmp_path_factory.mktemp("city"), users=400, pois=20)


def test_people_of_a_group_are_compared_under_both_definitions(
    dataset: TrajectoryDataset, tmp_path: Path
) -> None:
    metrics = measure(dataset, SeedFolder(tmp_path, 0, Setup()))["metrics"]
    assert {*PAPER_METRICS, "flows", "poi_all"} <= set(metrics)
    for row in metrics.values():
        assert set(row) == {"baseline", "floor", "earlier floor", "signal", "clear"}
        assert row["clear"] == (row["signal"] >= 3)
        assert all(0 <= row[kind] <= 1 for kind in ("baseline", "floor", "earlier floor"))
    assert metrics["poi"]["clear"] == 1, "the groups of this city visit other places"
    # Windows of one person are alike, so equally many trajectories of more people are less noisy.
    people = [np.unique(each.people, return_counts=True)[1] for each in
              real_groups(dataset, "test").values()]  # fmt: skip
    assert min(each.min() for each in people) > 1
    for name in ("spatial", "flows", "poi"):
        assert metrics[name]["earlier floor"] < metrics[name]["floor"]


def test_a_survey_is_compared_once_and_the_command_resumes(
    dataset: TrajectoryDataset, tmp_path: Path
) -> None:
    survey = dataset.path.with_name("city")
    out = tmp_path / "out"
    command = ("bench", "definitions", "--data", survey, "--seeds", 2, "--quiet", "--out", out)
    done = run(*command)
    assert done.code == 0, done.err
    assert "earlier floor" in done.out and "gap is clear" in done.out
    result = json.loads((out / "definitions-city.json").read_text())
    assert result["command"] == (
        "python -m bench definitions --data city --seeds 2 --first-seed 0 --out out"
    )
    assert result["seeds"] == [0, 1]
    cells = [json.loads((out / f"seed-{n}" / "definitions.json").read_text()) for n in (0, 1)]
    for row in result["rows"]:
        for kind in ("baseline", "floor", "earlier floor", "signal", "clear"):
            mean = np.mean([cell["metrics"][row["metric"]][kind] for cell in cells])
            assert row[kind] == pytest.approx(mean, abs=1e-4)
    before = [path.stat().st_mtime_ns for path in sorted(out.glob("seed-*/definitions.json"))]
    assert run(*command).code == 0
    assert json.loads((out / "definitions-city.json").read_text()) == result
    assert before == [
        path.stat().st_mtime_ns for path in sorted(out.glob("seed-*/definitions.json"))
    ]
    sentence = refused("bench", "definitions", "--data", tmp_path / "no", "--out", tmp_path / "new")
    assert "does not exist" in sentence and not (tmp_path / "new").exists()


def hand_made() -> dict[str, Any]:
    row = {"baseline": 0.4, "floor": 0.3, "earlier floor": 0.2}
    rows = [
        row | {"metric": "poi", "signal": 7.0, "clear": 1.0},
        row | {"metric": "trip", "signal": -0.04, "clear": 0.0},
        row | {"metric": "flows", "signal": 3.1, "clear": 0.6667},
    ]
    command = "python -m bench definitions --out defs"
    return {"command": command, "measure": "JSD", "seeds": [0, 1, 2], "rows": rows}


def test_the_table_says_in_how_many_seeds_a_gap_is_clear() -> None:
    table = definitions_table(hand_made())
    assert [row[-2:] for row in table.rows] == [
        ("7.0", "yes"),
        ("0.0", "no"),
        ("3.1", "in some seeds"),
    ]
    assert table.rows[0][1:4] == (0.4, 0.2, 0.3)
    assert table.columns[1:4] == ("baseline", "earlier floor", "floor")


def test_the_page_of_results_begins_with_the_definitions(tmp_path: Path) -> None:
    (tmp_path / "rq2.json").write_text(json.dumps(result_of("rq2")))
    write_page(tmp_path, tmp_path / "page.md")
    assert "earlier and present" not in (tmp_path / "page.md").read_text(encoding="utf-8")
    (tmp_path / "definitions.json").write_text(json.dumps(hand_made()))
    write_page(tmp_path, tmp_path / "page.md")
    page = (tmp_path / "page.md").read_text(encoding="utf-8")
    definitions = page.index("## Definitions, earlier and present")
    assert definitions < page.index("| in some seeds |") < page.index("## RQ2")
    assert "`python -m bench definitions --out defs`, mean of 3 seeds." in page
