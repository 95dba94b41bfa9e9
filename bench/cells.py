"""Cells that train and score models of phase 2, which several benchmarks share.

The folder of a seed contains a simulated city or real people, their baseline, and the models that
regions supervise. Each cell scores one of them against test people.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bench.runner import Cell, compute_once
from bench.score_models import BASELINE, FLOOR, draw_groups, mean_scores, pairwise, score_samples
from mobatlas.config import load_run, merge
from mobatlas.data.city import write_city_folder
from mobatlas.data.dataset import Trajectories, TrajectoryDataset
from mobatlas.data.prepare.pipeline import prepare
from mobatlas.errors import MobatlasError, suggestion
from mobatlas.evaluation.comparison import Scores, real_groups
from mobatlas.evaluation.metrics import MetricSpec
from mobatlas.generators.protocol import Generator
from mobatlas.generators.store import load_model
from mobatlas.io.manifest import file_hash, read_manifest
from mobatlas.pipeline.models import SuperviseOptions, split_options, supervise, train
from mobatlas.pipeline.run import StepCache
from mobatlas.regions.build import RegionsOptions
from mobatlas.regions.store import KIND as REGIONS
from mobatlas.regions.store import build_regions
from mobatlas.supervision.calibration import PlainSampler, Sampler
from mobatlas.supervision.store import CURVE, load_sampler
from mobatlas.supervision.strategies import get_strategy
from mobatlas.training.loop import Execution

Samples = Mapping[str, Mapping[str, Trajectories]]  # model -> group -> samples
Views = dict[str, dict[str, Scores]]  # view of the samples -> model -> scores
PARTITIONS = ("demogroups", "hot16", "fullrank", "rankdef", "messy")
ANCHORS = ("group", "population")
# Minutes of a cell with preset `small` on one thread of a slow machine, for the forecast.
MINUTES: Mapping[str, int] = {"phase1": 20, "tilt": 18, "resample": 8, "finetune": 20}
STRONG = "strong"
STRONG_CALIBRATED = "strong, calibrated"
PHASE1 = "phase1"
DEFINITIONS = 3  # of metrics and floors: cells of other definitions are computed again
STRIDE = 1_000  # between the seeds of two draws
MEASURE = (
    "JSD in bits against test people of each group at equal sizes, averaged over groups; "
    "floor: training people of the group, as many people and trajectories; gap_closed_floor, "
    "gap_closed_strong: the share of the gap from the baseline to the floor, or to strong, null "
    "if the gap is below three standard errors; spread: standard deviation between seeds"
)


@dataclass(frozen=True)
class Job:
    """One supervised model."""

    partition: str  # a controlled partition, or a region column of people
    strategy: str
    divergence: str = "js"  # of finetune; tilt and resample match moments instead
    features: tuple[str, ...] = ("poi",)
    shuffled: bool = False  # regions are shuffled among people: the negative control
    census: bool = False  # the composition comes from the census table
    membership: bool = False  # the home region of a person informs its group
    rest: bool = True  # people outside a partition are one more region
    labelled: int = 0  # labelled training people beside the regions

    @property
    def regions(self) -> str:
        """The name of its REGIONS folder."""
        shuffled = ("shuffled",) if self.shuffled else ()
        alone = () if self.rest else ("alone",)
        census = ("census",) if self.census else ()
        features = () if self.features == ("poi",) else ("+".join(self.features),)
        labelled = (f"{self.labelled}-labelled",) if self.labelled else ()
        return "-".join((*shuffled, self.partition, *census, *alone, *features, *labelled))

    @property
    def name(self) -> str:
        """The name of its cell and of its model folder."""
        divergence = (self.divergence,) if self.strategy == "finetune" else ()
        membership = ("membership",) if self.membership else ()
        return "-".join((self.regions, self.strategy, *divergence, *membership))


@dataclass(frozen=True)
class OtherViews:
    """Further comparisons of the samples of a seed."""

    inputs: Mapping[str, Any]  # inputs of the scores
    score: Callable[[Samples, int], Views]  # (samples, seed)


@dataclass(frozen=True)
class Setup:
    """The data and options that all models of a benchmark share."""

    values: Mapping[str, Any] = field(default_factory=dict)  # changes of the preset
    city: Mapping[str, Any] = field(default_factory=dict)  # changes of the simulated city
    preset: str = "small"
    generator: str = "latent-diffusion"
    data: Path | None = None  # a dataset of real people; None: simulate a city for each seed
    census: Path | None = None
    draws: int = 1  # sets of samples in a cell; their scores are averaged
    views: OtherViews | None = None
    strong_features: tuple[str, ...] = ("poi",)  # whose labelled means strong is calibrated to
    quiet: bool = False

    def inputs(self) -> dict[str, Any]:
        """Return the inputs that all models share."""
        data = None if self.data is None else TrajectoryDataset.open(self.data).manifest
        return {
            "generator": self.generator,
            "preset": self.preset,
            "values": self.values,
            "city": self.city,
            "dataset": None if data is None else data.content_hash,
            "definitions": DEFINITIONS,
        }


@dataclass(frozen=True)
class SeedFolder:
    """The folder of one seed with its dataset, regions and models."""

    out: Path
    seed: int
    setup: Setup

    @property
    def path(self) -> Path:
        """The folder."""
        return self.out / f"seed-{self.seed}"

    @property
    def dataset(self) -> TrajectoryDataset:
        """The dataset, which `prepare` has written."""
        return TrajectoryDataset.open(self.setup.data or self.path / "dataset")

    @property
    def execution(self) -> Execution:
        """How models are trained: interrupted training resumes."""
        return Execution(resume=True, quiet=self.setup.quiet)

    def prepare(self) -> Path:
        """Return the dataset of real people, or simulate and prepare a city once."""
        if self.setup.data is not None:
            return self.setup.data
        preset = self.setup.preset
        out = self.path / "dataset"

        def simulate() -> None:
            defaults = load_run(preset=preset).simulate
            config = defaults.model_validate(merge(defaults.model_dump(), self.setup.city))
            write_city_folder(self.path / "city", config, self.seed, overwrite=True)
            prepare(
                self.path / "city",
                out,
                preset=preset,
                values={"min_people_per_place": 0},
                overwrite=True,
            )

        return compute_once(
            StepCache(self.path),
            "dataset",
            out,
            {"preset": preset, "city": self.setup.city},
            simulate,
        )

    def baseline(self) -> Path:
        """Return the model of phase 1, trained once."""
        out = self.path / BASELINE
        train(
            self.prepare(),
            out,
            generator=self.setup.generator,
            preset=self.setup.preset,
            values=split_options(self.setup.values)[1],
            seed=self.seed,
            execution=self.execution,
        )
        return out

    def strong(self) -> Path:
        """Return the upper bound trained on labels, and its calibration, trained once."""
        out = self.path / STRONG
        features = {STRONG: {"features": list(self.setup.strong_features)}}
        own, values = split_options(self.setup.values)
        shared = {name: own[name] for name in (STRONG, "calibration") if name in own}
        values = merge(features, shared, values)
        options = SuperviseOptions(STRONG, values=values)
        supervise(self.baseline(), out, None, options, seed=self.seed, execution=self.execution)
        return out

    def regions(self, job: Job) -> Path:
        """Return the REGIONS folder of a job, built once."""
        folder = self.path / "regions" / job.regions
        controlled = job.partition in PARTITIONS
        census = self.setup.census if job.census else None
        options = RegionsOptions(
            partition=job.partition if controlled else None,
            by=None if controlled else job.partition,
            min_people=0,
            composition=census,
            features=job.features,
            shuffle_regions=job.shuffled,
            straddle="uniform" if job.census else "refuse",
            rest=job.rest,
            labelled_sample=job.labelled or None,
        )
        dataset = self.dataset
        inputs = {
            "dataset": dataset.manifest.content_hash,
            "census": None if census is None else file_hash(census),
        }

        def build() -> None:
            build_regions(dataset.path, folder, options, seed=self.seed, overwrite=True)

        compute_once(StepCache(self.path), f"regions {job.regions}", folder, inputs, build)
        read_manifest(folder, REGIONS)
        return folder

    def supervise(self, job: Job) -> tuple[Path, dict[str, Any]]:
        """Train the model of a job once; return its folder and its report."""
        baseline = self.baseline()
        regions = self.regions(job)
        out = self.path / job.name
        strategy = get_strategy(job.strategy)
        values = {
            section: value
            for section, value in split_options(self.setup.values)[0].items()
            if f"--set {section}" in strategy.options
        }
        if "--divergence" in strategy.options:
            values = merge(values, {"finetune": {"divergence": job.divergence}})
        preset = self.setup.preset if "--preset" in strategy.options else None
        options = SuperviseOptions(
            job.strategy, membership=job.membership, preset=preset, values=values
        )
        report = supervise(
            baseline, out, regions, options, seed=self.seed, execution=self.execution
        )
        return out, report

    def samplers(self, job: Job) -> dict[str, Generator | Sampler]:
        """Return the samplers of a job: uncalibrated, and calibrated if it has a calibration."""
        model = load_model(self.supervise(job)[0])
        if job.strategy == "finetune":
            return {"finetune": model.generator}
        if job.strategy == "resample":
            return {"resample": load_sampler(model, observed=True)}
        calibrated = load_sampler(model, observed=True)
        plain = (
            PlainSampler(model.generator, calibrated.anchors, calibrated.residence)
            if job.membership
            else model.generator
        )
        return {job.strategy: plain, f"{job.strategy}, calibrated": calibrated}

    def score(self, models: Mapping[str, Generator | Sampler]) -> dict[str, Any]:
        """Score models against test people, with anchors of the group and of the population."""
        dataset = self.dataset
        spec = MetricSpec.of(dataset)
        real = real_groups(dataset, "test")
        draws = self.setup.draws
        samples = {
            anchors: draw_groups(dataset, models, draws, self.seed, anchors=anchors)
            for anchors in ANCHORS
        }
        rounds: list[Views] = []
        for draw in range(draws):
            seed = self.seed + STRIDE * draw
            views = {
                anchors: score_samples(dataset, spec, sets[draw], real, seed)
                for anchors, sets in samples.items()
            }
            if self.setup.views is not None:
                views |= self.setup.views.score(samples["group"][draw], seed)
            rounds.append(views)
        mean = {
            view: {model: mean_scores([views[view][model] for views in rounds]) for model in scores}
            for view, scores in rounds[0].items()
        }
        return {"draws": draws, **_tables(mean)}


def model_cells(out: Path, setup: Setup, jobs: Sequence[Job], seeds: Sequence[int]) -> list[Cell]:
    """Return the cells of baseline and strong, and of every job, seed by seed."""
    inputs = setup.inputs() | {"draws": setup.draws}
    inputs["views"] = None if setup.views is None else setup.views.inputs
    census = None if setup.census is None else file_hash(setup.census)
    minutes = MINUTES if setup.preset == "small" else {}
    cells = []
    for seed in seeds:
        folder = SeedFolder(out, seed, setup)
        cells.append(
            Cell(
                seed,
                PHASE1,
                inputs,
                partial(_score_phase1, folder),
                label="baseline and strong",
                minutes=minutes.get(PHASE1, 0),
            )
        )
        for job in jobs:
            own = {"job": asdict(job), "census": census if job.census else None}
            compute = partial(_score_job, folder, job)
            forecast = minutes.get(job.strategy, 0)
            cells.append(Cell(seed, job.name, inputs | own, compute, minutes=forecast))
    return cells


def check_partition(name: str, known: Sequence[str] = PARTITIONS) -> None:
    """Refuse an unknown partition before anything is trained."""
    if name not in known:
        raise MobatlasError(
            f"--partition {name} does not exist{suggestion(name, known)} "
            f"(known: {', '.join(known)})"
        )


def rounded(values: Mapping[str, float]) -> dict[str, float]:
    """Round to four digits."""
    return {name: round(value, 4) for name, value in values.items()}


def _score_phase1(folder: SeedFolder) -> dict[str, Any]:
    paths = {BASELINE: folder.baseline(), STRONG: folder.strong()}
    dataset = folder.dataset
    distances = {
        metric: np.round(table, 4).tolist()
        for metric, table in pairwise(dataset, MetricSpec.of(dataset)).items()
    }
    strong = load_model(paths[STRONG])
    models: dict[str, Generator | Sampler] = {
        BASELINE: load_model(paths[BASELINE]).generator,
        STRONG: strong.generator,
        STRONG_CALIBRATED: load_sampler(strong, observed=True),
    }
    return {"between_groups": distances, **folder.score(models)}


def _score_job(folder: SeedFolder, job: Job) -> dict[str, Any]:
    out, report = folder.supervise(job)
    facts: dict[str, Any] = {
        "supervision": {name: value for name, value in report.items() if name != "regions"}
    }
    if (out / CURVE).exists():
        lines = (out / CURVE).read_text(encoding="utf-8").splitlines()
        facts["curve"] = [json.loads(line) for line in lines]
    return {**facts, **folder.score(folder.samplers(job))}


def _tables(views: Views) -> dict[str, Any]:
    """Return JSD on average by view, JSD by group, and diversity by view."""
    return {
        "jsd": {
            view: {model: rounded(each.average) for model, each in scores.items()}
            for view, scores in views.items()
        },
        "gap_error": {
            view: {model: rounded(each.gap_error or {}) for model, each in scores.items()}
            for view, scores in views.items()
        },
        "excess": {
            view: {model: rounded(each.excess) for model, each in scores.items()}
            for view, scores in views.items()
        },
        "groups": {
            model: {group: rounded(values) for group, values in each.groups.items()}
            for model, each in views["group"].items()
        },
        "diversity": {
            view: {
                model: dict(each.diversity or {})
                for model, each in scores.items()
                if model != FLOOR
            }
            for view, scores in views.items()
        },
    }
