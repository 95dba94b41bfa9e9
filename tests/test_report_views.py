"""How a group looks in the report: when its people arrive, as far as anybody says."""

from __future__ import annotations

import re
from dataclasses import replace
from importlib import resources

import numpy as np
import pytest
from jinja2 import Template

from mobatlas import MetricSpec, Trajectories, TrajectoryDataset
from mobatlas.report.charts import REAL, Views
from tests.tiny import small_city


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> TrajectoryDataset:
    return small_city(tmp_path_factory.mktemp("city"), users=60)


def heights(distributions: str, title: str) -> dict[str, list[float]]:
    """Of the lines of a chart, who -> up on the page at the beginning of each step."""
    [chart] = [
        each
        for each in re.findall(r"<figure.*?</figure>", distributions, flags=re.DOTALL)
        if title in each
    ]
    lines = re.findall(r'<path class="line [^"]*" d="M([^"]*)"><title>([^<]*)</title>', chart)
    return {
        who: [-float(point.split()[1]) for point in path.split("L")[::2]] for path, who in lines
    }


def test_the_hours_of_a_chart_are_those_of_the_visits(dataset: TrajectoryDataset) -> None:
    real = Trajectories.of(dataset)
    assert real.hours is not None
    night = replace(real, arrivals=np.full(len(real.tokens), 3 * 3600))
    views = Views(dataset, MetricSpec.of(dataset))
    result = heights(
        str(views.view("somebody", {REAL: real, "supervised": night}).distributions),
        "Hour of arrival",
    )
    assert np.argmax(result["supervised"]) == 3 and len(set(result["supervised"][:3])) == 1
    assert np.corrcoef(result[REAL][:24], np.bincount(real.hours, minlength=24))[0, 1] > 0.999


def test_a_chart_says_that_samples_have_no_times(dataset: TrajectoryDataset) -> None:
    real, views = Trajectories.of(dataset), Views(dataset, MetricSpec.of(dataset))
    untimed = replace(real, arrivals=None, stays=None)
    shown = str(views.view("somebody", {REAL: real, "supervised": untimed}).distributions)
    assert list(heights(shown, "Hour of arrival, somebody (samples have no times)")) == [REAL]
    assert "Hour of arrival" not in str(
        views.view("somebody", {REAL: untimed, "supervised": untimed}).distributions
    )


def test_no_day_of_a_real_person_is_drawn(dataset: TrajectoryDataset) -> None:
    real = Trajectories.of(dataset)
    maps = (
        Views(dataset, MetricSpec.of(dataset))
        .view("somebody", {REAL: real, "supervised": real})
        .maps
    )
    assert "<path" not in maps[REAL] and "the lines are" not in maps[REAL]
    assert "<path" in maps["supervised"] and "the lines are" in maps["supervised"]


def test_a_note_that_asks_something_ends_as_a_question() -> None:
    page = (
        resources.files("mobatlas.report")
        .joinpath("templates", "report.html.j2")
        .read_text(encoding="utf-8")
    )
    [notes] = re.findall(r"{% for warning in .*?{% endfor %}", page, flags=re.DOTALL)
    said = Template(notes).render(
        chapter={"supervision": {"warnings": ["are windows alike?", "gender is not identified"]}}
    )
    assert "Note: are windows alike?</p>" in said and "Note: gender is not identified.</p>" in said
