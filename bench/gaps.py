"""Means and spreads over seeds of the cells of models: JSD, and the gap that a model closes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.cells import PHASE1, STRONG, Job, rounded
from bench.runner import read_cell
from bench.score_models import BASELINE, FLOOR
from mobatlas.data.types import Floats
from mobatlas.evaluation.comparison import gap_closed

DIVERSITY = ("distinct", "copies")
Cells = Sequence[Mapping[str, Any]]  # one cell for each seed


def summarise(out: Path, seeds: Iterable[int], jobs: Iterable[Job]) -> dict[str, Any]:
    """Return a row for each model and view of its samples; the key `anchors` names the view."""
    numbers = list(seeds)
    phase1 = [read_cell(out, seed, PHASE1) for seed in numbers]
    models: list[tuple[Job | None, Cells]] = [(None, phase1)]
    models += [(job, [read_cell(out, seed, job.name) for seed in numbers]) for job in jobs]
    rows = [
        {
            "anchors": view,
            **_describe(job),
            "model": model,
            "metrics": _compare(phase1, cells, view, model),
            "groups": over_seeds(cells, model) if view == "group" else None,
            "diversity": _mean_diversity(cells, view, model),
        }
        for view in phase1[0]["jsd"]
        for job, cells in models
        for model in cells[0]["diversity"][view]
    ]
    threads = [cell["threads"] for cell in phase1]
    return {"seeds": numbers, "threads": threads, "rows": rows}


def over_seeds(cells: Cells, model: str) -> dict[str, dict[str, list[float]]]:
    """Return mean and standard deviation over seeds of JSD, by group and metric."""
    by_seed = [cell["groups"][model] for cell in cells if "groups" in cell]
    return {
        group: {metric: _mean_sd([each[group][metric] for each in by_seed]) for metric in metrics}
        for group, metrics in (by_seed[0] if by_seed else {}).items()
    }


def _describe(job: Job | None) -> dict[str, Any]:
    """Return the columns that identify a job; baseline and strong have none."""
    if job is None:
        flags = dict.fromkeys(("shuffled", "census", "membership"), False)
        return {"partition": None, "divergence": None, "features": None, **flags, "labelled": 0}
    return {
        "partition": job.partition,
        "divergence": job.divergence if job.strategy == "finetune" else None,
        "features": list(job.features),
        "shuffled": job.shuffled,
        "census": job.census,
        "membership": job.membership,
        "labelled": job.labelled,
    }


def _compare(phase1: Cells, cells: Cells, view: str, model: str) -> dict[str, dict[str, Any]]:
    """Compare a model with baseline, strong and floor, metric by metric.

    A share is None if its gap is below three standard errors, over people or over seeds.
    """
    references = [cell["jsd"][view] for cell in phase1]
    beyond = [cell["excess"][view] for cell in phase1]
    errors = [cell["gap_error"][view] for cell in phase1]
    scores = [cell["jsd"][view][model] for cell in cells]
    excess = [cell["excess"][view][model] for cell in cells]
    metrics = {}
    for metric in references[0][BASELINE]:
        ends = {
            name: np.array([reference[name][metric] for reference in references])
            for name in (BASELINE, STRONG, FLOOR)
        }
        jsd = np.array([each[metric] for each in scores])  # (seeds,)
        mean = {name: float(each.mean()) for name, each in ends.items()}
        average = float(jsd.mean())
        change = jsd - ends[BASELINE]
        spread = float(change.std(ddof=1)) if len(jsd) > 1 else 0.0
        over = {name: [each[name][metric] for each in beyond] for name in ends}
        own = [each[metric] for each in excess]
        seeds = zip(own, over[BASELINE], over[FLOOR], errors, strict=True)
        metrics[metric] = {
            "jsd": round(average, 4),
            "excess": round(float(np.mean(own)), 4),
            **rounded(mean),
            "spread": round(spread, 4),
            **{
                f"gap_closed_{end}": share(
                    float(np.mean(own)),
                    over[BASELINE],
                    over[end],
                    [each[end][metric] for each in errors],
                )
                for end in (FLOOR, STRONG)
            },
            "by_seed": [
                share(value, [start], [end], [error[FLOOR][metric]])
                for value, start, end, error in seeds
            ],
        }
    return metrics


def share(
    value: float,
    starts: Sequence[float] | Floats,
    ends: Sequence[float] | Floats,
    errors: Sequence[float],
) -> float | None:
    """Return the gap in excess closed, on average over seeds, by a model with that average.

    `starts` and `ends` are the two ends of the gap in each seed, `errors` the standard errors of
    the gaps over people. The larger of the errors over people and over seeds counts.
    """
    gaps = np.asarray(starts) - np.asarray(ends)
    n = len(gaps)
    people = float(np.mean(errors))  # seeds may share their people, so it does not sink with them
    seeds = float(gaps.std(ddof=1)) / np.sqrt(n) if n > 1 else 0.0
    closed = gap_closed(
        value, float(np.mean(starts)), float(np.mean(ends)), standard_error=max(people, seeds)
    )
    return None if closed is None else round(closed, 3)


def _mean_diversity(cells: Cells, view: str, model: str) -> dict[str, Any]:
    """Return the mean shares of distinct samples and of copies, for samples and for test people."""
    by_seed = [cell["diversity"][view][model] for cell in cells]
    held_out = [each["held_out"] for each in by_seed]
    return {**_mean_shares(by_seed), "held_out": _mean_shares(held_out)}


def _mean_shares(shares: Cells) -> dict[str, float]:
    return {name: round(float(np.mean([each[name] for each in shares])), 4) for name in DIVERSITY}


def _mean_sd(values: Sequence[float]) -> list[float]:
    sd = float(np.std(values, ddof=1)) if len(values) > 1 else 0.0
    return [round(float(np.mean(values)), 4), round(sd, 4)]
