"""Research questions RQ1 and RQ2 of the paper, on simulated cities.

RQ1 varies the partition: baseline, strong and every strategy under five partitions. Tilt and
resample match moments and minimise no divergence; finetune minimises JS or TV.
RQ2 varies the feature map of the aggregates: POIs, categories and transitions, under demogroups.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.cells import MEASURE, PARTITIONS, PHASE1, Job, Setup, model_cells
from bench.gaps import summarise
from bench.runner import Command, Experiment, Runner, read_cell
from bench.summary import write_result
from mobatlas.errors import MobatlasError, suggestion

GENERATOR = "latent-diffusion"
DIVERGENCES = ("js", "tv")
FEATURES = (("poi",), ("category",), ("transitions",))
FINETUNED = ("demogroups", "fullrank")  # partitions in profile quick: half an hour each


@dataclass(frozen=True)
class Profile:
    """The size of a benchmark."""

    preset: str
    seeds: int
    finetune_all: bool


PROFILES: Mapping[str, Profile] = {
    "quick": Profile("small", 1, finetune_all=False),
    "full": Profile("paper", 3, finetune_all=True),  # the sizes of the paper, for a GPU
}


@dataclass(frozen=True)
class Choice:
    """The generator of all models, and the jobs to measure."""

    generator: str = GENERATOR
    strategies: Sequence[str] = ()  # all by default
    without_rest: bool = False  # the regions of partitions stand alone

    def name(self, question: str) -> str:
        """Return the name of the result of a question."""
        generator = () if self.generator == GENERATOR else (self.generator,)
        return "-".join((question, *generator, *(("without-rest",) if self.without_rest else ())))

    def jobs(self, jobs: Sequence[Job]) -> list[Job]:
        """Return the chosen jobs."""
        known = list(dict.fromkeys(job.strategy for job in jobs))
        for name in self.strategies:
            if name not in known:
                raise MobatlasError(
                    f"--strategy {name} is not measured here{suggestion(name, known)} "
                    f"(known: {', '.join(known)})"
                )
        return [
            replace(job, rest=not self.without_rest)
            for job in jobs
            if job.strategy in (self.strategies or known)
        ]


ALL = Choice()


def get_profile(name: str) -> Profile:
    """Return a profile by its name."""
    if name not in PROFILES:
        raise MobatlasError(
            f"--profile {name} does not exist{suggestion(name, PROFILES)} "
            f"(known: {', '.join(PROFILES)})"
        )
    return PROFILES[name]


def rq1_jobs(profile: Profile) -> list[Job]:
    """Return every strategy under every partition; finetune where the profile allows the time."""
    jobs = [
        Job(partition, strategy) for partition in PARTITIONS for strategy in ("tilt", "resample")
    ]
    finetuned = [name for name in PARTITIONS if profile.finetune_all or name in FINETUNED]
    return jobs + [
        Job(partition, "finetune", divergence)
        for partition in finetuned
        for divergence in DIVERGENCES
    ]


def rq2_jobs(profile: Profile) -> list[Job]:
    """Return tilt with every feature map; finetune where the profile allows the time."""
    jobs = [Job("demogroups", "tilt", features=features) for features in FEATURES]
    finetuned = FEATURES if profile.finetune_all else ()
    return jobs + [
        Job("demogroups", "finetune", divergence, features)
        for features in finetuned
        for divergence in DIVERGENCES
    ]


QUESTIONS = {"rq1": rq1_jobs, "rq2": rq2_jobs}


def run(
    question: str,
    experiment: Experiment,
    profile: str = "quick",
    values: Mapping[str, Any] | None = None,
    city: Mapping[str, Any] | None = None,
    *,
    choice: Choice = ALL,
) -> dict[str, Any]:
    """Train and score the models of a question, then write rq1.json or rq2.json.

    `values` and `city` change the preset of the profile.
    """
    options = get_profile(profile)
    jobs = choice.jobs(QUESTIONS[question](options))
    setup = Setup(
        values or {}, city or {}, options.preset, choice.generator, quiet=experiment.quiet
    )
    command = Command(
        question,
        {
            "--profile": [profile],
            "--generator": [choice.generator],
            "--strategy": choice.strategies,
        },
        ["--without-rest"] if choice.without_rest else [],
    )
    out = experiment.out
    Runner(experiment, question, command).run(model_cells(out, setup, jobs, experiment.numbers))
    header = command.header(experiment)
    result = {
        "command": header.pop("command"),
        "question": question,
        "name": choice.name(question),
        "profile": profile,
        **header,
        "measure": MEASURE,
        **summarise(out, experiment.numbers, jobs),
        "between_groups": read_cell(out, experiment.first_seed, PHASE1)["between_groups"],
        "curves": finetune_curves(out, experiment.first_seed, jobs),
    }
    write_result(out, choice.name(question), result)
    return result


def finetune_curves(out: Path, seed: int, jobs: Sequence[Job]) -> dict[str, Any]:
    """Return the training curve of each finetune job of a seed: step, loss and JSD."""
    names = [job.name for job in jobs if job.strategy == "finetune"]
    return {name: read_cell(out, seed, name)["curve"] for name in names}
