"""Earlier and present definitions side by side: floors, trips, and which gaps are clear.

No generator is needed: the baseline is training people of all groups, the floor training people of
the group. The earlier floor had as many trajectories as the held-out people of a group, but of more
people; the present one has as many people as well.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bench.cells import SeedFolder, Setup
from bench.runner import Cell, Command, Experiment, Runner
from bench.score_models import BASELINE, FLOOR
from bench.summary import write_result
from bench.survey import check_survey, display_names, prepare_survey
from mobatlas.data.dataset import Trajectories, TrajectoryDataset
from mobatlas.evaluation.comparison import SIGNAL, Comparison, compare_models, real_groups
from mobatlas.evaluation.metrics import MetricSpec

EARLIER = "earlier floor"
NAME = "definitions"
MEASURE = (
    "JSD in bits between test people of a group and training people, average over groups; "
    "baseline: people of all groups; floor: people of the group, equally many people and "
    "trajectories; earlier floor: equally many trajectories; signal: the gap from baseline to "
    "floor in standard errors over people"
)


def run(experiment: Experiment, data: Path | None = None) -> dict[str, Any]:
    """Compare definitions on simulated cities, or on a survey of labelled people."""
    command = Command(NAME, {})
    if data is not None:
        check_survey(data)
        survey = prepare_survey(data, experiment.out)
        command = Command(NAME, {"--data": [display_names(data, None)[0]]})
    setup = Setup(quiet=experiment.quiet)
    cells = [
        Cell(
            seed,
            NAME,
            setup.inputs() | {"survey": None if data is None else survey.manifest.content_hash},
            partial(
                measure,
                None if data is None else survey,
                SeedFolder(experiment.out, seed, setup),
            ),
        )
        for seed in experiment.numbers
    ]
    results = Runner(experiment, NAME, command).run(cells)
    metrics = {
        metric: {
            kind: round(float(np.mean([each["metrics"][metric][kind] for each in results])), 4)
            for kind in results[0]["metrics"][metric]
        }
        for metric in results[0]["metrics"]
    }
    result = {
        **command.header(experiment),
        "measure": MEASURE,
        "seeds": list(experiment.numbers),
        "rows": [{"metric": name, **values} for name, values in metrics.items()],
    }
    name = NAME if data is None else f"{NAME}-{data.name}"
    write_result(experiment.out, name, result)
    return result


def measure(dataset: TrajectoryDataset | None, folder: SeedFolder) -> dict[str, Any]:
    """Score training people of all groups and of the group against test people of the group."""
    if dataset is None:
        folder.prepare()
        dataset = folder.dataset
    training = real_groups(dataset, "train")
    everybody = Trajectories.of(dataset, dataset.split("train"))
    comparison = compare_models(
        MetricSpec.of(dataset),
        real_groups(dataset, "test"),
        {
            BASELINE: dict.fromkeys(training, everybody),
            FLOOR: training,
            EARLIER: {name: replace(each, person=None) for name, each in training.items()},
        },
        seed=folder.seed,
        reference=training,
    )
    names = comparison.scores[FLOOR].average
    return {"metrics": {metric: _row(comparison, metric) for metric in names}}


def _row(comparison: Comparison, metric: str) -> dict[str, float]:
    jsd = {name: scores.average[metric] for name, scores in comparison.scores.items()}
    gap, error = comparison.gap(metric, BASELINE, FLOOR)
    signal = gap / error if error > 0 else 0.0
    return {**jsd, "signal": signal, "clear": float(signal >= SIGNAL)}
