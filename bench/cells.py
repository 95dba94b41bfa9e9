"""Cells: models of phase 2 on simulated cities, each scored against test people; what several benchmarks are made of.

A folder is filled cell by cell. A run that stopped goes on where it was, and what is finished, as the JSON file of the cell
says, is not computed again; benchmarks that are given one folder share what they have in common.
"""

from __future__ import annotations

import json
import logging
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.score_models import FLOOR, draw_groups, mean_scores, pairwise, score_samples
from mobatlas.config import load_run, merge
from mobatlas.data.city import write_city_folder
from mobatlas.data.dataset import TrajectoryDataset
from mobatlas.data.prepare.pipeline import prepare
from mobatlas.data.trajectories import Trajectories
from mobatlas.errors import MobatlasError, suggestion
from mobatlas.evaluation.comparison import (
    Scores,
    gap_closed,
    real_groups,
)
from mobatlas.evaluation.metrics import MetricSpec
from mobatlas.generators.protocol import Generator
from mobatlas.generators.store import load_model
from mobatlas.io.manifest import library_versions, read_manifest, write_json
from mobatlas.pipeline.supervise import SuperviseOptions, split_options, supervise
from mobatlas.pipeline.train import train
from mobatlas.progress import track
from mobatlas.regions.build import RegionsOptions
from mobatlas.regions.store import KIND as REGIONS
from mobatlas.regions.store import build_regions
from mobatlas.supervision.samplers import PlainSampler, Sampler
from mobatlas.supervision.store import CURVE, load_sampler
from mobatlas.supervision.strategies import get_strategy
from mobatlas.training.checkpoints import START_OVER
from mobatlas.training.loop import Execution

log = logging.getLogger("mobatlas")
Samples = Mapping[str, Mapping[str, Trajectories]]  # name of a model -> group -> samples
PARTITIONS = ("demogroups", "hot16", "fullrank", "rankdef", "messy")
ANCHORS = ("group", "population")
# What a cell of preset `small` took on one thread of a slow machine; for the plan alone.
MINUTES: Mapping[str, int] = {"phase1": 20, "tilt": 18, "resample": 8, "finetune": 20}
BASELINE, STRONG, PHASE1 = "baseline", "strong", "phase1"
STRIDE = 1_000  # seeds between two draws
WORDS: Mapping[str, str] = {
    "continue with --resume": "the same command goes on",
    START_OVER: "choose another --out",
    "pass --overwrite to train it anew": "choose another --out",
}
MEASURE = (
    "JSD in bits against test people of each group at equal sizes, averaged over groups; floor: training people of the group; "
    "closed: the share of baseline - floor; spread: standard deviation between seeds"
)


@dataclass(frozen=True)
class Job:
    """One model of phase 2."""

    partition: str  # a controlled one, or the column of people that names the region they live in
    strategy: str
    divergence: str = "js"  # of finetuning; tilt and resample minimise none, they meet the moments
    features: tuple[str, ...] = ("poi",)
    shuffled: bool = False  # people are exchanged between regions: there is nothing to learn
    census: bool = False  # the composition of a column's regions is the benchmark's census table
    membership: bool = False  # where a person lives says who the person may be

    @property
    def regions(self) -> str:
        """The name of the folder of its regions."""
        shuffled = ("shuffled",) if self.shuffled else ()
        census = ("census",) if self.census else ()
        other = () if self.features == ("poi",) else ("+".join(self.features),)
        return "-".join((*shuffled, self.partition, *census, *other))

    @property
    def name(self) -> str:
        """Of its cell, and of the folder of the model."""
        own = (self.divergence,) if self.strategy == "finetune" else ()
        membership = ("membership",) if self.membership else ()
        return "-".join((self.regions, self.strategy, *own, *membership))


@dataclass(frozen=True)
class Bench:
    """What all cells of a benchmark have in common."""

    command: str  # for the files: how to make them again, with {seed} and {out}
    values: Mapping[str, Any] = field(default_factory=dict)  # changes of the preset
    city: Mapping[str, Any] = field(default_factory=dict)
    preset: str = "small"
    quiet: bool = False
    generator: str = "latent-diffusion"
    data: Path | None = (
        None  # a dataset of real people, the same for every seed; None: a city of each seed
    )
    census: Path | None = None
    draws: int = 1  # of the samples of a cell, whose scores are averaged
    views: Callable[[Samples, int], dict[str, dict[str, Scores]]] | None = (
        None  # other looks at the samples of a seed
    )


@dataclass(frozen=True)
class Place:
    """The folder of one seed: a city or real people, their baseline, and what is made of them."""

    path: Path
    seed: int
    bench: Bench

    @property
    def dataset(self) -> TrajectoryDataset:
        return TrajectoryDataset.open(
            self.path / "dataset" if self.bench.data is None else self.bench.data
        )

    @property
    def execution(self) -> Execution:
        """How models are trained: they resume, and log lines replace the bar if asked."""
        return Execution(resume=True, quiet=self.bench.quiet)

    def prepared(self) -> Path:
        """The dataset; that of a city is simulated if it is not there."""
        self.path.mkdir(parents=True, exist_ok=True)
        if self.bench.data is not None:
            return self.bench.data
        out, preset = self.path / "dataset", self.bench.preset
        if not out.exists():
            simulated = load_run(preset=preset).simulate
            simulated = simulated.model_validate(merge(simulated.model_dump(), self.bench.city))
            write_city_folder(self.path / "city", simulated, self.seed, overwrite=True)
            prepare(self.path / "city", out, preset=preset)
        return out

    def baseline(self) -> Path:
        """The model of phase 1, made if it is not there."""
        made, bench = self.path / BASELINE, self.bench
        train(
            self.prepared(),
            made,
            generator=bench.generator,
            preset=bench.preset,
            values=split_options(bench.values)[1],
            seed=self.seed,
            execution=self.execution,
        )
        return made

    def strong(self) -> Path:
        """The labelled upper bound."""
        made = self.path / STRONG
        supervise(
            self.baseline(),
            made,
            None,
            SuperviseOptions(STRONG, values=split_options(self.bench.values)[1]),
            seed=self.seed,
            execution=self.execution,
        )
        return made

    def regions(self, job: Job) -> Path:
        """The folder of its regions, made if it is not there."""
        folder = self.path / "regions" / job.regions
        if not folder.exists():
            controlled = job.partition in PARTITIONS
            options = RegionsOptions(
                partition=job.partition if controlled else None,
                by=None if controlled else job.partition,
                composition=self.bench.census if job.census else None,
                features=job.features,
                shuffle_regions=job.shuffled,
                straddle="uniform" if job.census else "refuse",
            )
            build_regions(self.dataset.path, folder, options, seed=self.seed)
        read_manifest(folder, REGIONS)
        return folder

    def supervised(self, job: Job) -> tuple[Path, dict[str, Any]]:
        """The model of a job, made if it is not there, and what was reported of it."""
        baseline, regions = self.baseline(), self.regions(job)
        out, strategy = self.path / job.name, get_strategy(job.strategy)
        own, _ = split_options(self.bench.values)
        values = {
            section: value
            for section, value in own.items()
            if f"--set {section}" in strategy.options
        }
        if "--divergence" in strategy.options:
            values = merge(values, {"finetune": {"divergence": job.divergence}})
        preset = self.bench.preset if "--preset" in strategy.options else None
        options = SuperviseOptions(
            job.strategy, membership=job.membership, preset=preset, values=values
        )
        return out, supervise(
            baseline, out, regions, options, seed=self.seed, execution=self.execution
        )

    def samplers(self, job: Job) -> dict[str, Generator | Sampler]:
        """What a job is scored as: as it learnt, and with candidates chosen where it is calibrated."""
        model = load_model(self.supervised(job)[0])
        if job.strategy == "finetune":
            return {"finetune": model.generator}
        if job.strategy == "resample":
            return {"resample": load_sampler(model)}
        calibrated = load_sampler(model)
        plain = (
            PlainSampler(model.generator, calibrated.anchors, calibrated.residence)
            if job.membership
            else model.generator
        )
        return {job.strategy: plain, f"{job.strategy}, calibrated": calibrated}

    def scored(self, name: str) -> bool:
        """Whether the file of the cell is there, of as many draws."""
        path = self.path / f"{name}.json"
        return (
            path.exists()
            and json.loads(path.read_text(encoding="utf-8")).get("draws", 1) == self.bench.draws
        )

    def score(
        self, name: str, models: Mapping[str, Generator | Sampler], facts: Mapping[str, Any]
    ) -> None:
        """Against test people, both ways to choose anchors; the file says that the cell is finished, and how it was made."""
        dataset = self.dataset
        spec, real = MetricSpec.of(dataset), real_groups(dataset, "test")
        draws = self.bench.draws
        made = {
            anchors: draw_groups(dataset, models, draws, self.seed, anchors=anchors)
            for anchors in ANCHORS
        }
        rounds = []
        for draw in range(draws):
            some, seed = (
                {anchors: each[draw] for anchors, each in made.items()},
                self.seed + STRIDE * draw,
            )
            rounds.append(
                {
                    view: score_samples(dataset, spec, each, real, seed)
                    for view, each in some.items()
                }
            )
            if self.bench.views is not None:
                rounds[-1] |= self.bench.views(some["group"], seed)
        found = {
            view: {label: mean_scores([each[view][label] for each in rounds]) for label in labels}
            for view, labels in rounds[0].items()
        }
        average, by_group, variety = (
            {
                view: {label: what(each) for label, each in scores.items()}
                for view, scores in found.items()
            }
            for what in (_average, _by_group, _diversity)
        )
        for kinds in variety.values():
            del kinds[FLOOR]
        write_cell(
            self,
            name,
            {
                **facts,
                "draws": draws,
                "jsd": average,
                "groups": by_group["group"],
                "diversity": variety,
            },
        )


def write_cell(place: Place, name: str, found: Mapping[str, Any]) -> None:
    """The file of a finished cell."""
    made = {
        "command": place.bench.command.format(seed=place.seed, out=place.path.parent.name),
        "seed": place.seed,
        "versions": library_versions(),
        "threads": torch.get_num_threads(),
    }
    write_json(place.path / f"{name}.json", {**made, **found})


def command_of(benchmark: str, asked: Mapping[str, Sequence[str]]) -> str:
    """The command line with what was asked for of each option, to be formatted: its own braces are doubled."""
    options = [word for name, each in asked.items() for one in each for word in (name, one)]
    return (
        shlex.join(["python", "-m", "bench", benchmark, *options])
        .replace("{", "{{")
        .replace("}", "}}")
    )


def fill(out: Path, title: str, jobs: Sequence[Job], seeds: Sequence[int], bench: Bench) -> None:
    """Compute the cells that are not there yet; what is planned is said first, and how long it may take once one is known."""
    places = [Place(out / f"seed-{seed}", seed, bench) for seed in seeds]
    plan = [(place, job) for place in places for job in (None, *jobs)]
    missing = [
        (place, job) for place, job in plan if not place.scored(PHASE1 if job is None else job.name)
    ]
    minutes = sum(MINUTES[PHASE1 if job is None else job.strategy] for _, job in missing)
    about = f", about {minutes} minutes on two cores" if bench.preset == "small" and minutes else ""
    log.info(
        "%s: %d cells, %d of them finished%s", title, len(plan), len(plan) - len(missing), about
    )
    with (
        in_one_folder(),
        track(title, max(len(missing), 1), quiet=True) as tracker,
    ):  # lines: what it is made of has bars of its own
        for done, (place, job) in enumerate(missing):
            tracker.step(
                done, f"seed {place.seed}, {'baseline and strong' if job is None else job.name}"
            )
            if job is None:
                _phase1(place)
            else:
                _cell(place, job)


@contextmanager
def in_one_folder() -> Iterator[None]:
    """Benchmarks have no --resume and no --overwrite to point at: the same command goes on."""
    try:
        yield
    except MobatlasError as error:
        said = str(error)
        for theirs, ours in WORDS.items():
            said = said.replace(theirs, ours)
        error.args = (said,)
        raise


def check_partition(name: str, known: Sequence[str] = PARTITIONS) -> None:
    """Refuse one that does not exist, before anything is trained."""
    if name not in known:
        raise MobatlasError(
            f"--partition {name} does not exist{suggestion(name, known)} (known: {', '.join(known)})"
        )


def summarise(out: Path, seeds: Iterable[int], jobs: Iterable[Job]) -> dict[str, Any]:
    """Means and spreads over seeds, of divergences and of what they close; `anchors` names the look at the samples."""
    numbers = list(seeds)
    phase1 = [read_cell(out, seed, PHASE1) for seed in numbers]
    found = [(job, [read_cell(out, seed, job.name) for seed in numbers]) for job in jobs]
    rows = [
        {
            "anchors": anchors,
            "partition": None if job is None else job.partition,
            "divergence": job.divergence
            if job is not None and job.strategy == "finetune"
            else None,
            "features": None if job is None else list(job.features),
            "shuffled": job is not None and job.shuffled,
            "census": job is not None and job.census,
            "membership": job is not None and job.membership,
            "model": model,
            "metrics": _compared(phase1, cell, anchors, model),
            "groups": over_seeds(cell, model) if anchors == "group" else None,
            "diversity": _variety(cell, anchors, model),
        }
        for anchors in phase1[0]["jsd"]
        for job, cell in [(None, phase1), *found]
        for model in cell[0]["diversity"][anchors]
    ]
    threads = [each["threads"] for each in phase1]
    return {"seeds": numbers, "threads": threads, "rows": rows}


def read_cell(out: Path, seed: int, name: str) -> dict[str, Any]:
    """What `write_cell` wrote."""
    found: dict[str, Any] = json.loads(
        (out / f"seed-{seed}" / f"{name}.json").read_text(encoding="utf-8")
    )
    return found


def over_seeds(cells: Sequence[Mapping[str, Any]], model: str) -> dict[str, dict[str, list[float]]]:
    """By group and metric the mean over seeds and their standard deviation, 0 for one; cells may have kept averages alone."""
    found = [cell["groups"][model] for cell in cells if "groups" in cell]
    return {
        group: {metric: _mean_sd([each[group][metric] for each in found]) for metric in metrics}
        for group, metrics in (found[0] if found else {}).items()
    }


def rounded(values: Mapping[str, float]) -> dict[str, float]:
    """To four digits, for JSON."""
    return {name: round(value, 4) for name, value in values.items()}


def _phase1(place: Place) -> None:
    paths = {BASELINE: place.baseline(), STRONG: place.strong()}
    dataset = place.dataset
    apart = {
        name: np.round(table, 4).tolist()
        for name, table in pairwise(dataset, MetricSpec.of(dataset)).items()
    }
    models = {name: load_model(path).generator for name, path in paths.items()}
    place.score(PHASE1, models, {"between_groups": apart})


def _cell(place: Place, job: Job) -> None:
    out, report = place.supervised(job)
    facts: dict[str, Any] = {
        "supervision": {name: value for name, value in report.items() if name != "regions"}
    }
    if (out / CURVE).exists():
        facts["curve"] = [
            json.loads(line) for line in (out / CURVE).read_text(encoding="utf-8").splitlines()
        ]
    place.score(job.name, place.samplers(job), facts)


def _average(scores: Scores) -> dict[str, Any]:
    return dict(rounded(scores.average))


def _diversity(scores: Scores) -> dict[str, Any]:
    return dict(scores.diversity or {})


def _by_group(scores: Scores) -> dict[str, Any]:
    return {group: rounded(values) for group, values in scores.groups.items()}


def _compared(
    phase1: Sequence[Mapping[str, Any]], cell: Sequence[Mapping[str, Any]], anchors: str, model: str
) -> dict[str, dict[str, Any]]:
    """Metric by metric over seeds; what is closed is None where baseline and floor are within the seed spread."""
    first, found = ([each["jsd"][anchors] for each in some] for some in (phase1, cell))
    metrics = {}
    for metric in first[0][BASELINE]:
        values = {
            name: np.array([row[name][metric] for row in first])
            for name in (BASELINE, STRONG, FLOOR)
        }
        ours = np.array([row[model][metric] for row in found])
        mean = {name: float(each.mean()) for name, each in values.items()}
        changed = ours - values[BASELINE]
        spread = float(changed.std(ddof=1)) if len(ours) > 1 else 0.0
        metrics[metric] = {
            "jsd": round(float(ours.mean()), 4),
            **rounded(mean),
            "spread": round(spread, 4),
            "floor_closed": _rounded(
                gap_closed(float(ours.mean()), mean[BASELINE], mean[FLOOR], spread)
            ),
            "gap_closed": _rounded(
                gap_closed(float(ours.mean()), mean[BASELINE], mean[STRONG], spread)
            ),
            "by_seed": [
                _rounded(gap_closed(*three))
                for three in zip(ours, values[BASELINE], values[FLOOR], strict=True)
            ],
        }
    return metrics


def _mean_sd(values: Sequence[float]) -> list[float]:
    return [
        round(float(np.mean(values)), 4),
        round(float(np.std(values, ddof=1)) if len(values) > 1 else 0.0, 4),
    ]


def _variety(cells: Sequence[Mapping[str, Any]], anchors: str, model: str) -> dict[str, Any]:
    """Means over seeds of the shares of distinct samples and of copies, beside those of test people."""
    found = [cell["diversity"][anchors][model] for cell in cells]
    kinds = ("distinct", "copies")
    ours = {kind: round(float(np.mean([each[kind] for each in found])), 4) for kind in kinds}
    real = {
        kind: round(float(np.mean([each["held_out"][kind] for each in found])), 4) for kind in kinds
    }
    return {**ours, "held_out": real}


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
