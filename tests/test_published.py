"""The paper's published numbers can be looked up by the names that mobatlas uses."""

from __future__ import annotations

from itertools import product

import pytest

from bench.next_poi import NEXT_POI_METRICS
from bench.report.published import (
    AVERAGE,
    QUESTIONS,
    STATES,
    PublishedRow,
    published_rows,
)
from mobatlas.errors import MobatlasError
from mobatlas.evaluation.metrics import PAPER_METRICS
from mobatlas.features.maps import feature_maps
from mobatlas.groups import DEFAULT_GROUPS
from mobatlas.regions.partitions import PARTITIONS

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


def key(row: PublishedRow) -> Key:
    return row["partition"], row["feature"], row["model"], row["metric"]


def test_names_are_those_of_mobatlas() -> None:
    assert set(PAPER_PARTITIONS) < set(PARTITIONS)
    assert set(FEATURES) <= set(feature_maps())
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


def test_what_the_paper_does_not_have_is_refused() -> None:
    with pytest.raises(MobatlasError, match=r"no question 'rq4' \(known: rq1"):
        published_rows("rq4", "Virginia")
    with pytest.raises(MobatlasError, match="no state 'virginia'; did you mean 'Virginia'"):
        published_rows("rq1", "virginia")
