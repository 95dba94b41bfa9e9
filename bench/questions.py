"""The paper's first two research questions on simulated cities.

RQ1: how does the way in which groups are mixed in regions bear on what can be learnt? Baseline, strong and every strategy, over
the five partitions. Tilt and resample minimise no divergence, they meet the moments; finetuning is run with JS and TV.
RQ2: how does the choice of the feature bear on it? POIs, categories and transitions, under demogroups.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.cells import MEASURE, PARTITIONS, PHASE1, Bench, Job, fill, read_cell, summarise
from bench.summary import write_result
from mobatlas.errors import MobatlasError, suggestion
from mobatlas.io.manifest import library_versions

DIVERGENCES = ("js", "tv")
FEATURES = (("poi",), ("category",), ("transitions",))
FINETUNED = ("demogroups", "fullrank")  # in profile quick: half an hour each


@dataclass(frozen=True)
class Profile:
    """How much is computed."""

    preset: str
    seeds: int
    everything: bool


PROFILES: Mapping[str, Profile] = {
    "quick": Profile("small", 1, everything=False),
    "full": Profile("paper", 3, everything=True),  # the sizes of the paper, for a GPU
}


def profile_named(name: str) -> Profile:
    if name not in PROFILES:
        raise MobatlasError(
            f"--profile {name} does not exist{suggestion(name, PROFILES)} (known: {', '.join(PROFILES)})"
        )
    return PROFILES[name]


def rq1_jobs(profile: Profile) -> list[Job]:
    """Every strategy under every partition; finetuning where the profile has time for it."""
    jobs = [
        Job(partition, strategy) for partition in PARTITIONS for strategy in ("tilt", "resample")
    ]
    tuned = [name for name in PARTITIONS if profile.everything or name in FINETUNED]
    return jobs + [
        Job(partition, "finetune", divergence) for partition in tuned for divergence in DIVERGENCES
    ]


def rq2_jobs(profile: Profile) -> list[Job]:
    """The default strategy with every feature; finetuning where the profile has time for it."""
    jobs = [Job("demogroups", "tilt", features=features) for features in FEATURES]
    tuned = FEATURES if profile.everything else ()
    return jobs + [
        Job("demogroups", "finetune", way, features) for features in tuned for way in DIVERGENCES
    ]


PLANS = {"rq1": rq1_jobs, "rq2": rq2_jobs}


def run(
    question: str,
    out: Path,
    profile: str = "quick",
    *,
    seeds: int | None = None,
    first_seed: int = 0,
    values: Mapping[str, Any] | None = None,
    city: Mapping[str, Any] | None = None,
    quiet: bool = False,
) -> dict[str, Any]:
    """Fill `out`, write rq1.json or rq2.json there; `values` and `city` change the preset of the profile."""
    chosen = profile_named(profile)
    numbers = range(first_seed, first_seed + (chosen.seeds if seeds is None else seeds))
    jobs = PLANS[question](chosen)
    said = f"python -m bench {question} --profile {profile}"
    command = f"{said} --seeds 1 --first-seed {{seed}} --out {{out}}"
    fill(
        out, question, jobs, numbers, Bench(command, values or {}, city or {}, chosen.preset, quiet)
    )
    result = {
        "command": f"{said} --seeds {len(numbers)} --first-seed {first_seed} --out {out.name}",
        "question": question,
        "profile": profile,
        "seed": first_seed,
        "versions": library_versions(),
        "measure": MEASURE,
        **summarise(out, numbers, jobs),
        "between_groups": read_cell(out, first_seed, PHASE1)["between_groups"],
        "curves": curves(out, first_seed, jobs),
    }
    write_result(out, question, result)
    return result


def curves(out: Path, seed: int, jobs: Sequence[Job]) -> dict[str, Any]:
    """How finetuning went, of one seed: name of the job -> rows with the step, the loss, and JSD on average and by group."""
    cells = {job.name: read_cell(out, seed, job.name) for job in jobs if job.strategy == "finetune"}
    return {name: cell["curve"] for name, cell in cells.items()}
