"""The paper's numbers are all there, and agree with each other wherever the paper's own do."""

from __future__ import annotations

import math
import statistics
from itertools import product

import pytest

from bench.next_poi import NEXT_POI_METRICS
from mobatlas.errors import MobatlasError
from mobatlas.evaluation.metrics import PAPER_METRICS
from mobatlas.features.maps import FEATURE_MAPS
from mobatlas.groups import DEFAULT_GROUPS
from mobatlas.regions.partitions import PARTITIONS
from mobatlas.report.published import (
    AVERAGE,
    QUESTIONS,
    STATES,
    PublishedRow,
    published,
    published_rows,
)

Model = tuple[str | None, str | None, str]  # partition, feature, name
Key = tuple[str | None, str | None, str, str]  # and metric
GROUPS = DEFAULT_GROUPS.names
PAPER_PARTITIONS = ("demogroups", "fullrank", "rankdef", "messy")
FEATURES = ("poi", "transitions", "category")
OURS = ("atlas-js", "atlas-tv")
NEXT_POI = NEXT_POI_METRICS[:4]
BOUNDS: list[Model] = [(None, None, "baseline"), (None, None, "strong")]
MODELS: dict[str, list[Model]] = {
    "rq1": BOUNDS
    + [(partition, "poi", model) for partition, model in product(PAPER_PARTITIONS, OURS)],
    "rq2": BOUNDS + [("demogroups", feature, "atlas-js") for feature in FEATURES],
    "rq2_groups": BOUNDS
    + [("demogroups", feature, model) for feature, model in product(FEATURES, OURS)],
    "rq3": [
        (None, None, "real"),
        (None, None, "baseline"),
        *(("fullrank", "poi", model) for model in OURS),
    ],
}
MODELS["rq1_groups"] = MODELS["rq1"]

# Where the paper's tables disagree with themselves.
GAPS_THAT_DO_NOT_FOLLOW: set[tuple[str, Key]] = set()  # all do
AVERAGES_THAT_ARE_NOT_OF_THE_GROUPS = {("California", (None, None, "baseline", "accuracy"))}
STDS_THAT_ARE_NOT_OF_THE_GROUPS = {
    ("Virginia", (None, None, "baseline", "travel_distance")),
    ("Virginia", ("demogroups", "poi", "atlas-js", "spatial")),
    *(("Virginia", ("messy", "poi", "atlas-js", metric)) for metric in ("spatial", "trip", "poi")),
    *(("Virginia", ("messy", "poi", "atlas-tv", metric)) for metric in PAPER_METRICS),
}
ROWS_OF_ANOTHER_METRIC = {("Virginia", (None, None, "baseline", "poi"))}
IMPOSSIBLE_NDCG = {("California", "baseline", group) for group in ("40-50, M", ">50, M", ">50, F")}


def key(row: PublishedRow) -> Key:
    return row["partition"], row["feature"], row["model"], row["metric"]


def averages(question: str, state: str) -> dict[Key, PublishedRow]:
    return {key(row): row for row in published_rows(question, state) if row["group"] == AVERAGE}


def of_groups(question: str, state: str) -> dict[Key, list[float]]:
    found: dict[Key, list[float]] = {}
    for row in published_rows(question, state):
        if row["group"] != AVERAGE:
            found.setdefault(key(row), []).append(row["mean"])
    return found


def test_names_are_those_of_mobatlas() -> None:
    assert set(PAPER_PARTITIONS) < set(PARTITIONS)
    assert set(FEATURES) <= set(FEATURE_MAPS)
    assert NEXT_POI == ("accuracy", "hr10", "ndcg10", "geo_error_km")


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("question", QUESTIONS)
def test_every_model_metric_and_group_is_there_once(question: str, state: str) -> None:
    metrics = NEXT_POI if question == "rq3" else PAPER_METRICS
    groups = (AVERAGE,) if question in ("rq1", "rq2") else (*GROUPS, AVERAGE)
    expected = [
        ((*model, metric), group)
        for model, metric, group in product(MODELS[question], metrics, groups)
    ]
    rows = published_rows(question, state)
    assert {row["state"] for row in rows} == {state}
    assert sorted(map(repr, expected)) == sorted(repr((key(row), row["group"])) for row in rows)


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("question", QUESTIONS)
def test_values_are_possible(question: str, state: str) -> None:
    for row in published_rows(question, state):
        assert 0 < row["mean"] < (200 if row["metric"] == "geo_error_km" else 1), row
        without = question == "rq3" or (question == "rq2_groups" and row["group"] == AVERAGE)
        assert (row["std"] is None) == without, row
        assert row["std"] is None or 0 <= row["std"] < 0.5, row
        assert (row["gap_closed"] is None) == (question != "rq1" or row["model"] == "baseline"), row


@pytest.mark.parametrize("state", STATES)
def test_the_gap_closed_follows_from_the_averages(state: str) -> None:
    rows = averages("rq1", state)
    odd = set()
    for row in rows.values():
        baseline, strong = (
            rows[(None, None, model, row["metric"])]["mean"] for model in ("baseline", "strong")
        )
        closed = (baseline - row["mean"]) / (baseline - strong)
        if row["gap_closed"] is not None and abs(row["gap_closed"] - closed) > 0.005 + 1e-9:
            odd.add((state, key(row)))
    assert odd == {each for each in GAPS_THAT_DO_NOT_FOLLOW if each[0] == state}


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("question", ["rq1_groups", "rq2_groups", "rq3"])
def test_averages_are_those_of_the_groups(question: str, state: str) -> None:
    printed = averages(question, state)
    odd = set()
    for which, values in of_groups(question, state).items():
        last_digit = 0.0001 if question == "rq3" and which[-1] != "geo_error_km" else 0.001
        if abs(statistics.fmean(values) - printed[which]["mean"]) > last_digit + 1e-9:
            odd.add((state, which))
    known = AVERAGES_THAT_ARE_NOT_OF_THE_GROUPS if question == "rq3" else set()
    assert odd == {each for each in known if each[0] == state}


@pytest.mark.parametrize("state", STATES)
def test_stds_over_groups_are_those_of_the_groups(state: str) -> None:
    printed = averages("rq1", state)
    odd = {
        (state, which)
        for which, values in of_groups("rq1_groups", state).items()
        if abs(statistics.stdev(values) - (printed[which]["std"] or 0)) > 0.0011  # both are rounded
    }
    assert odd == {each for each in STDS_THAT_ARE_NOT_OF_THE_GROUPS if each[0] == state}


@pytest.mark.parametrize("state", STATES)
def test_what_several_tables_print_is_the_same(state: str) -> None:
    first, by_group, feature, feature_by_group = (averages(each, state) for each in QUESTIONS[:4])
    for which, row in by_group.items():
        assert (row["mean"], row["std"]) == (first[which]["mean"], first[which]["std"])
    for which in first.keys() & feature.keys():
        assert (first[which]["mean"], first[which]["std"]) == (
            feature[which]["mean"],
            feature[which]["std"],
        )
    odd = {
        (state, which)
        for which, row in feature.items()
        if row["mean"] != feature_by_group[which]["mean"]
    }
    assert odd == {each for each in ROWS_OF_ANOTHER_METRIC if each[0] == state}
    groups, feature_groups = of_groups("rq1_groups", state), of_groups("rq2_groups", state)
    shared = groups.keys() & feature_groups.keys()
    assert {(state, which) for which in shared if groups[which] != feature_groups[which]} == odd
    for _, (partition, feature_map, model, _) in odd:
        poi, travel = (
            feature_groups[partition, feature_map, model, metric]
            for metric in ("poi", "travel_distance")
        )
        assert poi == travel


@pytest.mark.parametrize("state", STATES)
def test_ndcg_lies_where_accuracy_and_hit_rate_leave_it(state: str) -> None:
    """Hits below the first rank count between 1 / log2(3), all second, and 1 / log2(11), all tenth."""
    cells = {
        (row["model"], row["group"], row["metric"]): row["mean"]
        for row in published_rows("rq3", state)
    }
    odd = set()
    for model, group in {which[:2] for which in cells}:
        accuracy, hits, ndcg = (cells[model, group, metric] for metric in NEXT_POI[:3])
        low, high = (accuracy + (hits - accuracy) / math.log2(1 + rank) for rank in (10, 2))
        if not low - 2e-4 < ndcg < high + 2e-4:
            odd.add((state, model, group))
    assert odd == {each for each in IMPOSSIBLE_NDCG if each[0] == state}


def test_it_says_whose_numbers_they_are() -> None:
    source = published()["source"]
    assert "Aggregate Supervision" in source["title"]
    assert "proprietary" in source["caveat"]
    assert all(
        remark["question"] in QUESTIONS and remark["state"] in STATES
        for remark in published()["remarks"]
    )
    assert all(published()[question]["note"] for question in QUESTIONS)


def test_what_the_paper_does_not_have_is_refused() -> None:
    with pytest.raises(MobatlasError, match="no question 'rq4'; did you mean 'rq"):
        published_rows("rq4", "Virginia")
    with pytest.raises(MobatlasError, match="no state 'virginia'; did you mean 'Virginia'"):
        published_rows("rq1", "virginia")
