"""Research question RQ3 of the paper: do samples help to predict where a group goes next?

The partition is fullrank, as in the paper. A predictor for each group learns from real training
people, from the baseline, from strong or from a supervised model. It is tested on real test people
of the group.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bench.cells import STRONG, Job, SeedFolder, Setup
from bench.downstream import ByGroup, Comparison, compare_predictors
from bench.next_poi import NEXT_POI_METRICS, NextPoiConfig, next_poi_config, with_two_visits
from bench.options import check_options
from bench.questions import get_profile
from bench.real import PARTITION_FEATURES
from bench.runner import Cell, Command, Experiment, Runner, read_cell
from bench.score_models import BASELINE
from bench.summary import write_result
from bench.survey import check_survey, display_names, split_survey
from mobatlas.config import format_assignments
from mobatlas.data.dataset import Trajectories
from mobatlas.errors import MobatlasError
from mobatlas.evaluation.comparison import gap_closed, group_members, real_groups
from mobatlas.generators.protocol import Generator
from mobatlas.generators.store import load_model
from mobatlas.supervision.calibration import PlainSampler, Sampler

PARTITION = "fullrank"
REAL = "real"
GENERATOR = "latent-diffusion"
POI = ("poi",)
DIVERGENCES = ("js", "tv")  # of finetune, on simulated cities only
SIZES: Mapping[str, int] = {"quick": 8_000, "full": 30_000}  # trajectories of all groups together
SPARE = 1.1  # draw more samples: predictors cannot learn from fewer than two visits
BLOCK = 1_024  # samples at a time
STREAM = 1_000  # of random numbers
LESS_IS_BETTER = ("geo_error_km",)
MEASURE = (
    "of the next visit of real test people of a group, by a predictor that learnt from each "
    "material, as many trajectories of each; average over groups; spread: standard deviation "
    "between seeds; gap_closed_real: the share of the gap from the baseline to real training "
    "people, null for one seed or if the gap is below three standard errors over seeds"
)


@dataclass(frozen=True)
class PredictionOptions:
    """The data and models of RQ3.

    `data` is a folder of labelled real people. Its models are those of `python -m bench real`.
    """

    profile: str = "quick"
    size: int | None = None  # trajectories of all groups together; None: that of the profile
    data: Path | None = None  # None: simulate a city for each seed
    generator: str = GENERATOR
    prepared: Mapping[str, Any] = field(default_factory=dict)  # changes how `data` is prepared
    predictor: Mapping[str, Any] = field(default_factory=dict)  # changes of the predictor
    values: Mapping[str, Any] = field(default_factory=dict)  # changes of the preset

    @property
    def total(self) -> int:
        """Trajectories of all groups together."""
        return SIZES[self.profile] if self.size is None else self.size

    @property
    def name(self) -> str:
        """The name of the result."""
        return "rq3" if self.data is None else f"rq3-real-{self.generator}"


@dataclass(frozen=True)
class Material:
    """Trajectories that predictors learn from."""

    label: str
    sample: Callable[[SeedFolder, int], ByGroup]  # (folder, trajectories of each group)

    @property
    def cell(self) -> str:
        """The name of its cell."""
        return f"rq3-{self.label.replace(', ', '-')}"


def materials(
    features: tuple[str, ...] = POI, divergences: Sequence[str] = DIVERGENCES
) -> list[Material]:
    """Return the materials in the order of the tables.

    `features` are those of the regions, `divergences` those of finetune.
    """

    def real(folder: SeedFolder, n: int) -> ByGroup:
        return real_groups(folder.dataset)

    def plain(path: Callable[[SeedFolder], Path], folder: SeedFolder, n: int) -> ByGroup:
        return sample_at_homes(folder, load_model(path(folder)).generator, n)

    def supervised(job: Job, label: str, folder: SeedFolder, n: int) -> ByGroup:
        return sample_at_homes(folder, folder.samplers(job)[label], n)

    tilt = Job(PARTITION, "tilt", features=features)
    finetuned = [Job(PARTITION, "finetune", divergence) for divergence in divergences]
    return [
        Material(REAL, real),
        Material(BASELINE, partial(plain, SeedFolder.baseline)),
        Material(STRONG, partial(plain, SeedFolder.strong)),
        Material("tilt, calibrated", partial(supervised, tilt, "tilt, calibrated")),
        *(
            Material(f"finetune, {job.divergence}", partial(supervised, job, "finetune"))
            for job in finetuned
        ),
    ]


def sample_at_homes(folder: SeedFolder, model: Generator | Sampler, n: int) -> ByGroup:
    """Draw n samples of each group with the homes and workplaces of its training people."""
    dataset = folder.dataset
    sampler = model if isinstance(model, Sampler) else PlainSampler(model, dataset.anchors)
    samples = {}
    for number, (name, rows) in enumerate(group_members(dataset, "train").items()):
        group = number if sampler.groups is None else sampler.groups.index(name)
        rng = np.random.default_rng([folder.seed, STREAM, number])
        homes = dataset.anchors[dataset.person[rng.choice(rows, n, replace=len(rows) < n)]]
        groups = np.full(n, group, dtype=np.int64)
        seed = folder.seed + STREAM + number
        blocks = [slice(start, start + BLOCK) for start in range(0, n, BLOCK)]
        parts = [
            sampler.sample_at_anchors(groups[block], homes[block], seed, first=block.start)
            for block in blocks
        ]
        samples[name] = Trajectories.joined(parts)
    return samples


def run(
    experiment: Experiment, options: PredictionOptions, city: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Train and test the predictors, then write rq3.json, or rq3-real-GENERATOR.json."""
    config = next_poi_config(options.profile, options.predictor)
    _check(options)
    simulated = options.data is None
    people = None
    folder = experiment.out
    sources = materials()
    if options.data is not None:
        people = split_survey(options.data, experiment.out, prepared=options.prepared)[0]
        folder = experiment.out / options.generator
        sources = materials(PARTITION_FEATURES, ())
    setup = Setup(
        options.values,
        city or {},
        get_profile(options.profile).preset,
        options.generator,
        data=people,
        strong_features=POI if simulated else PARTITION_FEATURES,
        quiet=experiment.quiet,
    )
    task = _Task(options.total, config)
    inputs = setup.inputs() | {
        "size": task.size,
        "predictor": config.model_dump(mode="json"),
        "features": POI if simulated else PARTITION_FEATURES,
    }
    cells = [
        Cell(
            seed,
            material.cell,
            inputs,
            partial(task.measure, SeedFolder(folder, seed, setup), material),
            label=material.label,
        )
        for seed in experiment.numbers
        for material in sources
    ]
    command = _command(options)
    Runner(experiment, "rq3", command, folder).run(cells)
    header = command.header(experiment)
    result = {
        "command": header.pop("command"),
        "question": "rq3",
        "name": options.name,
        "profile": options.profile,
        **header,
        "partition": PARTITION,
        "predictor": config.model_dump(mode="json"),
        "measure": MEASURE,
        **summarise(folder, experiment.numbers, sources),
    }
    write_result(experiment.out, options.name, result)
    return result


def _check(options: PredictionOptions) -> None:
    """Refuse wrong options before anything is prepared."""
    check_options(options.generator, get_profile(options.profile).preset, options.values)
    if options.data is not None:
        check_survey(options.data, prepared=options.prepared)
    elif options.generator != GENERATOR:
        raise MobatlasError(
            f"--generator {options.generator}: works only with --data; simulated cities use "
            f"{GENERATOR}"
        )


def _command(options: PredictionOptions) -> Command:
    data = [] if options.data is None else [display_names(options.data, None)[0]]
    return Command(
        "rq3",
        {
            "--profile": [options.profile],
            "--size": [] if options.size is None else [str(options.size)],
            "--data": data,
            "--generator": [] if options.generator == GENERATOR else [options.generator],
            "--set": list(format_assignments(options.values)),
        },
    )


@dataclass(frozen=True)
class _Task:
    """How predictors learn."""

    size: int  # trajectories of all groups together
    predictor: NextPoiConfig

    def measure(self, folder: SeedFolder, material: Material) -> dict[str, Any]:
        """Train and test predictors on a material, at most as large as real training people."""
        folder.baseline()
        dataset = folder.dataset
        real = {name: len(with_two_visits(each)) for name, each in real_groups(dataset).items()}
        sizes = {name: min(n, self.size // len(real)) for name, n in real.items()}
        samples = material.sample(folder, int(SPARE * max(sizes.values())) + 1)
        comparison = Comparison(sizes, fewest=1, seed=folder.seed, quiet=folder.setup.quiet)
        result = compare_predictors(dataset, {material.label: samples}, self.predictor, comparison)
        return {**result, **result.pop("materials")[material.label]}


def summarise(out: Path, seeds: Sequence[int], sources: Sequence[Material]) -> dict[str, Any]:
    """Return means over seeds, on average and by group, and the gap closed to real people.

    A group counts if every material is as large as that of real people in every seed. `left_out`
    lists the other groups.
    """
    cells = {each.label: [read_cell(out, seed, each.cell) for seed in seeds] for each in sources}
    left_out = _left_out(cells)
    names = [name for name in cells[REAL][0]["groups"] if name not in left_out]
    groups = {
        label: {name: _mean([cell["groups"][name] for cell in by_seed]) for name in names}
        for label, by_seed in cells.items()
    }
    average = {label: _mean(list(each.values())) for label, each in groups.items()}
    spread = {
        label: _spread([_mean([cell["groups"][name] for name in names]) for cell in by_seed])
        for label, by_seed in cells.items()
    }
    rows = []
    for label, scores in average.items():
        closed = {
            metric: _gap_closed(
                metric,
                scores[metric],
                (average[BASELINE][metric], average[REAL][metric]),
                (spread[BASELINE][metric], spread[REAL][metric]),
                len(seeds),
            )
            for metric in NEXT_POI_METRICS
        }
        row = {
            "material": label,
            "average": scores,
            "spread": spread[label],
            "gap_closed_real": closed,
        }
        rows.append(row | {"groups": groups[label]})
    sizes = {name: cells[REAL][0]["sizes"][name] for name in names}
    return {"seeds": list(seeds), "sizes": sizes, "left_out": left_out, "rows": rows}


def _left_out(cells: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, str]:
    """Return the groups for which a material is smaller than real people, with the reason."""
    left_out: dict[str, str] = {}
    for label, by_seed in cells.items():
        for cell, real in zip(by_seed, cells[REAL], strict=True):
            left_out |= {name: f"{label}: {reason}" for name, reason in cell["left_out"].items()}
            less = [name for name, n in real["sizes"].items() if cell["sizes"].get(name, n) < n]
            left_out |= dict.fromkeys(less, f"{label}: too few samples have two visits")
    return left_out


def _mean(scores: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """Return the mean of each metric; None if there are no scores or one of them is None."""
    means: dict[str, float | None] = {}
    for metric in NEXT_POI_METRICS:
        values = [each[metric] for each in scores]
        complete = values and None not in values
        means[metric] = round(float(np.mean(values)), 4) if complete else None
    return means


def _spread(averages: Sequence[Mapping[str, float | None]]) -> dict[str, float | None]:
    """Return the standard deviation between seeds; None for one seed or an unknown average."""
    spread: dict[str, float | None] = {}
    for metric in NEXT_POI_METRICS:
        values = [each[metric] for each in averages]
        comparable = len(values) > 1 and None not in values
        sd = float(np.std(np.array(values, float), ddof=1)) if comparable else 0.0
        spread[metric] = round(sd, 4) if comparable else None
    return spread


def _gap_closed(
    metric: str,
    value: float | None,
    ends: tuple[float | None, float | None],  # baseline, real
    spreads: tuple[float | None, float | None],
    seeds: int,
) -> float | None:
    """Return the gap closed; None for one seed, or if the gap is below three standard errors."""
    baseline, real = ends
    if value is None or baseline is None or real is None or None in spreads:
        return None
    error = math.hypot(*(spread or 0.0 for spread in spreads)) / math.sqrt(seeds)
    # `gap_closed` expects that lower is better.
    sign = 1 if metric in LESS_IS_BETTER else -1
    share = gap_closed(sign * value, sign * baseline, sign * real, standard_error=error)
    return None if share is None else round(share, 3)
