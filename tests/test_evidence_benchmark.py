"""Benchmarks of group means and of further evidence: measures by hand, and the real survey."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bench import evidence, group_means
from bench.evidence import SHUFFLED
from bench.group_means import Source, expectation_maximisation, interval_score
from bench.report.evidence import evidence_table, group_means_table
from bench.runner import Experiment
from tests.regional import FOUR, regions_of

ZONES = "home_zone"


def test_an_interval_score_adds_what_lies_outside() -> None:
    low, high, truth = np.array([1.0, 1.0, 1.0]), np.full(3, 2.0), np.array([1.5, 0.9, 2.3])
    assert interval_score(low, high, truth) == pytest.approx([1, 1 + 20 * 0.1, 1 + 20 * 0.3])


def test_multiplicative_updates_approach_the_means_of_pure_regions() -> None:
    means = np.array([[1.0, 4.0], [2.0, 3.0], [3.0, 2.0], [4.0, 1.0]])
    regions = regions_of(np.eye(4), means, 100.0, FOUR)
    assert expectation_maximisation(regions, steps=1) == pytest.approx(means)
    mixed = regions_of(np.full((4, 4), 0.25), means, 100.0, FOUR)
    assert expectation_maximisation(mixed) == pytest.approx(np.full((4, 2), 2.5))


def test_cases_cover_all_kinds_of_regions_with_and_without_labels() -> None:
    names = [case.name for case in group_means.plan_cases([ZONES], (0, 200))]
    assert {"messy", "shuffled hot16", ZONES, f"shuffled {ZONES}, 200 labelled"} <= set(names)
    assert len(set(names)) == len(names) == 16
    names = [case.name for case in evidence.plan_cases([ZONES, "comuna"], census=True)]
    assert len(set(names)) == len(names)
    assert {"labels alone, 100 labelled", "census, 400 labelled"} <= set(names)


def test_group_means_of_a_survey_are_compared_with_held_out_people(
    data_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases = [group_means.Case(partition="demogroups"), group_means.Case(by=ZONES, labelled=200)]
    monkeypatch.setattr(group_means, "plan_cases", lambda columns, labelled: cases)
    source = Source(survey=data_folder / "santiago")
    experiment = Experiment(tmp_path / "out", quiet=True)
    result = group_means.run(experiment, source, split="val")
    rows = {(row["regions"], row["feature"]): row for row in result["rows"]}
    assert list(rows) == [
        ("demogroups", "poi"),
        ("demogroups", "category"),
        (f"{ZONES}, 200 labelled", "category"),
    ]
    for row in rows.values():
        assert row["recovered"] > 0.4
        assert 0.7 < row["coverage_by_mean"] <= 1
        assert 0 < row["interval_score"] < row["prior_score"]
    assert "--data santiago --labelled 0 --labelled 200 --split val" in result["command"]
    table = group_means_table(result)
    assert table.rows[0][:3] == (
        "demogroups",
        "poi",
        f"{rows['demogroups', 'poi']['recovered']:.0%}",
    )
    assert group_means.run(experiment, source, split="val") == result


def test_labelled_people_help_and_a_shuffled_table_is_left_out(
    data_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases = [
        evidence.Case(ZONES),
        evidence.Case(ZONES, 400),
        evidence.Case(ZONES, 400, evidence.TRIPLED),
        *(evidence.Case(ZONES, people=SHUFFLED, table=table) for table in (False, True)),
    ]
    monkeypatch.setattr(evidence, "plan_cases", lambda columns, census: cases)
    result = evidence.run(data_folder / "santiago", Experiment(tmp_path / "out", quiet=True))
    alone, labelled, biased, without, shuffled = result["rows"]
    assert min(labelled["category"], biased["category"]) > alone["category"] + 0.2
    assert shuffled["contradicts"] == 1
    assert without["contradicts"] == 0
    assert shuffled["category"] == pytest.approx(without["category"], abs=0.03)
    assert evidence_table(result).rows[-1][-1] == "1 of 1 seeds"
