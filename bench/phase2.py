"""Phase 2 on simulated cities: the gap that strategies close, by partition of groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bench.cells import MEASURE, PARTITIONS, Job, Setup, check_partition, model_cells
from bench.gaps import summarise
from bench.runner import Command, Experiment, Runner
from bench.summary import write_result

OTHER_STRATEGIES: Mapping[str, tuple[str, ...]] = {"demogroups": ("resample", "finetune")}
SHUFFLED = "shuffled"  # demogroups, with people exchanged between regions
KNOWN = (*PARTITIONS, SHUFFLED)


def run(
    experiment: Experiment,
    partitions: Sequence[str] = (),
    values: Mapping[str, Any] | None = None,
    city: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Train and score the models, then write phase2.json.

    `values` and `city` change the preset `small`.
    """
    for name in partitions:
        check_partition(name, KNOWN)
    jobs = [job for name in partitions or KNOWN for job in partition_jobs(name)]
    setup = Setup(values or {}, city or {}, quiet=experiment.quiet)
    command = Command("phase2", {"--partition": partitions})
    cells = model_cells(experiment.out, setup, jobs, experiment.numbers)
    Runner(experiment, "phase 2", command).run(cells)
    result = {
        **command.header(experiment),
        "measure": MEASURE,
        **summarise(experiment.out, experiment.numbers, jobs),
    }
    write_result(experiment.out, "phase2", result)
    return result


def partition_jobs(partition: str) -> list[Job]:
    """Return a job for tilt, and for the other strategies where they are compared."""
    if partition == SHUFFLED:
        return [Job("demogroups", "tilt", shuffled=True)]
    return [Job(partition, name) for name in ("tilt", *OTHER_STRATEGIES.get(partition, ()))]
