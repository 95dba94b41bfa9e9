"""Gaps of benchmarks: a share of a gap in excess is shown only where the gap is clear."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.cells import Job
from bench.gaps import share, summarise
from bench.report.console import phase2_table
from bench.report.phase2 import phase2_tables
from bench.reweight import _gap
from tests.test_phase2_benchmark import write_cell

JOB = Job("messy", "tilt")


def scores_of(folder: Path, model: str) -> dict[str, Any]:
    """The row of a model at homes of its group, for POI frequency."""
    seeds = sorted(int(path.name.removeprefix("seed-")) for path in folder.glob("seed-*"))
    rows = summarise(folder, seeds, [JOB])["rows"]
    found = next(row for row in rows if row["model"] == model and row["anchors"] == "group")
    metrics: dict[str, Any] = found["metrics"]["poi"]
    return metrics


def write_seed(
    folder: Path, seed: int, ends: tuple[float, float, float], ours: float, gap_error: float
) -> None:
    """The cells of a seed: baseline, strong and floor, and one supervised model."""
    phase1 = dict(zip(("baseline", "strong", "floor"), ends, strict=True))
    write_cell(folder, seed, "phase1", phase1, gap_error)
    write_cell(folder, seed, JOB.name, {"tilt": ours, "floor": ends[2]}, gap_error)


def test_a_share_is_the_mean_improvement_over_the_mean_gap() -> None:
    # The gaps are 0.2 and 0.3, the model improves by 0.1 on average.
    assert share(0.25, [0.3, 0.4], [0.1, 0.1], [0.0, 0.0]) == pytest.approx(0.1 / 0.25)
    assert share(0.1, [0.3], [0.1], [0.01]) == 1
    assert share(0.3, [0.3], [0.1], [0.01]) == 0
    assert share(0.35, [0.3], [0.1], [0.01]) == pytest.approx(-0.25)
    assert share(0.05, [0.3], [0.1], [0.01]) == pytest.approx(1.25)


@pytest.mark.parametrize(("error", "expected"), [(0.0999, 0.5), (0.1001, None)])
def test_a_share_needs_three_standard_errors_over_people(
    error: float, expected: float | None
) -> None:
    assert share(0.25, [0.4], [0.1], [error]) == expected
    # Seeds may share their people, so more of them do not make the error smaller.
    assert share(0.25, [0.4] * 4, [0.1] * 4, [error] * 4) == expected


@pytest.mark.parametrize(("apart", "expected"), [(0.099, 0.5), (0.101, None)])
def test_a_share_needs_three_standard_errors_over_seeds(
    apart: float, expected: float | None
) -> None:
    # Two gaps, `apart` above and below 0.3, have the standard error `apart`.
    starts = [0.4 - apart, 0.4 + apart]
    assert share(0.25, starts, [0.1, 0.1], [0.0, 0.0]) == expected
    assert share(0.25, starts, [0.1, 0.1], [0.09, 0.09]) == expected, "the larger error counts"


def test_one_seed_has_no_error_over_seeds() -> None:
    assert share(0.25, [0.4], [0.1], [0.0]) == pytest.approx(0.5)


def test_without_a_gap_there_is_no_share() -> None:
    assert share(0.2, [0.3], [0.3], [0.0]) is None
    assert share(0.2, [0.2], [0.3], [0.0]) is None


@given(
    st.floats(0.01, 1),
    st.floats(-0.2, 0.2),
    st.floats(1e-6, 0.2),
    st.floats(-3, 3),
)
def test_a_model_as_good_as_the_baseline_by_chance_never_has_a_large_share(
    baseline: float, gap: float, error: float, errors_away: float
) -> None:
    """Thousands of percent came from models within chance of the baseline, and gaps of nothing."""
    closed = share(baseline + errors_away * error, [baseline], [baseline - gap], [error])
    assert closed is None or abs(closed) <= 1.001


def test_a_gap_of_noise_has_no_share_of_thousands_of_percent(tmp_path: Path) -> None:
    # Without its error, -4460 % of this gap would be closed.
    write_seed(tmp_path, 0, (0.0650, 0.0649, 0.0645), 0.0873, gap_error=0.002)
    metrics = scores_of(tmp_path, "tilt")
    assert (metrics["baseline"] - metrics["jsd"]) / (
        metrics["baseline"] - metrics["floor"]
    ) == pytest.approx(-44.6)
    assert metrics["gap_closed_floor"] is None
    assert metrics["gap_closed_strong"] is None
    assert metrics["by_seed"] == [None]
    tables = phase2_tables(summarise(tmp_path, [0], [JOB]))
    row = next(row for row in tables["gaps"].rows if row[1] == "tilt")
    assert row[2:6] == (0.0873, None, "", None)


def test_cells_close_to_the_limit_have_a_share_and_others_none(tmp_path: Path) -> None:
    """The floor is 0.3 below the baseline and strong 0.2; the errors of both gaps are 0.08."""
    write_seed(tmp_path, 0, (0.4, 0.2, 0.1), 0.22, gap_error=0.08)
    one = scores_of(tmp_path, "tilt")
    assert one["gap_closed_floor"] == pytest.approx(0.18 / 0.3)
    assert one["gap_closed_strong"] is None, "0.2 is fewer than three errors of 0.08"
    assert one["by_seed"] == [pytest.approx(0.18 / 0.3)]
    write_seed(tmp_path, 1, (0.4, 0.2, 0.1), 0.22, gap_error=0.05)
    two = scores_of(tmp_path, "tilt")
    assert two["gap_closed_strong"] == pytest.approx(0.18 / 0.2), "0.065, the mean of both seeds"
    assert two["gap_closed_floor"] == pytest.approx(0.18 / 0.3)


def test_the_gap_is_that_of_excess_because_chance_differs_between_models(tmp_path: Path) -> None:
    """Chance is 0.05 for all models but the floor: 0.02 for its samples of real people."""
    write_seed(tmp_path, 0, (0.4, 0.2, 0.1), 0.25, gap_error=0.0)
    for name in ("phase1", JOB.name):
        path = tmp_path / "seed-0" / f"{name}.json"
        cell = json.loads(path.read_text())
        cell["excess"]["group"]["floor"]["poi"] = 0.08
        path.write_text(json.dumps(cell))
    metrics = scores_of(tmp_path, "tilt")
    assert (metrics["jsd"], metrics["floor"]) == (0.25, 0.1)
    assert metrics["excess"] == pytest.approx(0.2)
    # Excess: 0.35 at the baseline, 0.2 for the model, 0.08 at the floor.
    assert metrics["gap_closed_floor"] == pytest.approx(0.15 / 0.27, abs=5e-4)
    assert metrics["by_seed"] == [pytest.approx(0.15 / 0.27, abs=5e-4)]
    assert metrics["gap_closed_strong"] == pytest.approx(0.15 / 0.2)


def test_seeds_that_disagree_leave_no_share_of_their_mean(tmp_path: Path) -> None:
    write_seed(tmp_path, 0, (0.3, 0.29, 0.2), 0.25, gap_error=0.001)
    write_seed(tmp_path, 1, (0.9, 0.29, 0.2), 0.25, gap_error=0.001)
    metrics = scores_of(tmp_path, "tilt")
    # The gaps are 0.1 and 0.7: on average 0.4, with a standard error of 0.3.
    assert metrics["gap_closed_floor"] is None
    assert metrics["by_seed"] == [pytest.approx(0.5), pytest.approx(0.65 / 0.7, abs=5e-4)]


def test_a_result_without_any_share_is_shown(tmp_path: Path) -> None:
    write_seed(tmp_path, 0, (0.4, 0.2, 0.1), 0.22, gap_error=1.0)
    result = summarise(tmp_path, [0], [JOB])
    assert phase2_table(result)
    scores = [score for row in result["rows"] for score in row["metrics"].values()]
    assert {score["gap_closed_floor"] for score in scores} == {None}


def test_reweighted_people_have_a_share_only_of_a_clear_gap() -> None:
    divergences = [
        {"tilted": 0.3, "baseline": 0.4, "labelled": 0.2},
        {"tilted": 0.2, "baseline": 0.4, "labelled": 0.1},
    ]
    # The gap is 0.25 on average; two draws differ by sqrt(2) times their standard deviation.
    for sd, expected in ((0.083, 0.15 / 0.25), (0.084, None)):
        draws = 0.25 + np.array([-sd, sd]) / 2**0.5
        found = _gap(divergences, draws)
        assert {name: found[name] for name in ("tilted", "baseline", "labelled")} == pytest.approx(
            {"tilted": 0.25, "baseline": 0.4, "labelled": 0.15}
        )
        if expected is None:
            assert found["gap_closed_labelled"] is None
        else:
            assert found["gap_closed_labelled"] == pytest.approx(expected)
