"""The charts and maps of a group in the report."""

from __future__ import annotations

import re
from dataclasses import replace
from importlib import resources

import numpy as np
import pytest
from jinja2 import Template

from mobatlas import MetricSpec, Trajectories, TrajectoryDataset
from mobatlas.report.charts import REAL, Chart, Views
from tests.tiny import small_city


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> TrajectoryDataset:
    return small_city(tmp_path_factory.mktemp("city"), users=60)


def heights(charts: list[Chart], title: str) -> dict[str, list[float]]:
    """The height of each step of the lines of a chart, by the name of the line."""
    [chart] = [each for each in charts if title in each.title]
    return {
        line.name: [-float(point.split()[1]) for point in line.path[1:].split("L")[::2]]
        for line in chart.lines
    }


def test_the_chart_of_hours_shows_the_hours_of_the_visits(dataset: TrajectoryDataset) -> None:
    real = Trajectories.of(dataset)
    assert real.hours is not None
    night = replace(real, arrivals=np.full(len(real.tokens), 3 * 3600))
    view = Views(dataset, MetricSpec.of(dataset)).view("<30, F", {REAL: real, "supervised": night})
    result = heights(view.distributions, "Hour of arrival")
    assert np.argmax(result["supervised"]) == 3 and len(set(result["supervised"][:3])) == 1
    assert np.corrcoef(result[REAL][:24], np.bincount(real.hours, minlength=24))[0, 1] > 0.999


def test_a_chart_says_that_samples_have_no_times(dataset: TrajectoryDataset) -> None:
    real = Trajectories.of(dataset)
    views = Views(dataset, MetricSpec.of(dataset))
    untimed = replace(real, arrivals=None, stays=None)
    charts = views.view("<30, F", {REAL: real, "supervised": untimed}).distributions
    assert list(heights(charts, "Hour of arrival, <30, F (samples have no times)")) == [REAL]
    charts = views.view("<30, F", {REAL: untimed, "supervised": untimed}).distributions
    assert not any("Hour of arrival" in chart.title for chart in charts)


def test_no_day_of_a_real_person_is_drawn(dataset: TrajectoryDataset) -> None:
    trajectories = Trajectories.of(dataset)
    views = Views(dataset, MetricSpec.of(dataset))
    real, supervised = views.view("<30, F", {REAL: trajectories, "supervised": trajectories}).maps
    assert real.lines == [] and "the lines are" not in real.description
    assert supervised.lines and "the lines are" in supervised.description


def test_maps_of_real_people_leave_out_cells_of_few_people(dataset: TrajectoryDataset) -> None:
    views = Views(dataset, MetricSpec.of(dataset))
    real = Trajectories.of(dataset)
    every, some = (views._density(real, fewest) for fewest in (0, 10))
    visits = views.spec.counts(real)["spatial"]
    people = np.zeros(every.size)
    for person in range(len(dataset.people)):
        own = dataset.person == person
        people += (np.asarray(visits[own][:, : every.size].sum(0)).ravel() > 0).astype(int)
    shown = people.reshape(every.shape)[::-1] >= 10
    assert ((some > 0) == shown).all() and 0 < shown.sum() < (every > 0).sum()


def test_a_note_that_is_a_question_gets_no_full_stop() -> None:
    template = resources.files("mobatlas.report").joinpath("templates", "report.html.j2")
    page = template.read_text(encoding="utf-8")
    [notes] = re.findall(r"{% for warning in .*?{% endfor %}", page, flags=re.DOTALL)
    warnings = ["are windows alike?", "gender is not identified"]
    text = Template(notes).render(chapter={"supervision": {"warnings": warnings}})
    assert "Note: are windows alike?</p>" in text and "Note: gender is not identified.</p>" in text
