"""A whole run: from tables or a simulated city to samples by group, an evaluation and report.html.

Every step is cached with a hash of its inputs. A second call computes only what changed, and an
interrupted run resumes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from mobatlas.config import RegionsConfig, RunConfig, load_run
from mobatlas.data.city import write_city_folder
from mobatlas.data.dataset import KIND as DATASET
from mobatlas.data.dataset import TrajectoryDataset
from mobatlas.data.prepare.pipeline import STEPS, prepare
from mobatlas.errors import MobatlasError
from mobatlas.evaluation.evaluate import evaluate
from mobatlas.evaluation.privacy.audit import STEPS as AUDIT_STEPS
from mobatlas.evaluation.privacy.audit import audit
from mobatlas.evaluation.regional import held_out_people, held_out_regions
from mobatlas.generators.protocol import family_of
from mobatlas.generators.store import KIND as MODEL
from mobatlas.generators.store import load_model
from mobatlas.groups import Groups
from mobatlas.io.manifest import (
    library_versions,
    read_manifest,
    write_json,
)
from mobatlas.io.output import lock_output
from mobatlas.pipeline.cache import StepCache, manifest_hash, path_hash, refuse_foreign_folder
from mobatlas.pipeline.supervise import SuperviseOptions, split_options, supervise
from mobatlas.pipeline.train import train
from mobatlas.progress import track
from mobatlas.regions.build import RegionsOptions
from mobatlas.regions.store import KIND as REGIONS
from mobatlas.regions.store import RegionsFolder, build_regions
from mobatlas.report.html import RUN, write_report
from mobatlas.sampling.generate import generate
from mobatlas.sampling.request import SampleRequest
from mobatlas.supervision.samplers import PlainSampler, Sampler
from mobatlas.supervision.store import load_sampler
from mobatlas.training.loop import Execution

REPORT = "report.html"
BASELINE = "baseline"
STRONG = "strong"


@dataclass(frozen=True)
class RunResult:
    """The folder of a run, its report, and the facts that run.json holds."""

    folder: Path
    report: Path
    facts: dict[str, Any]


def run(
    config: Path | RunConfig, out: Path | str, *, overwrite: bool = False, quiet: bool = False
) -> RunResult:
    """Run everything that a configuration asks for and write it to a folder.

    Parameters
    ----------
    config
        A YAML file, or a `RunConfig`.
    out
        The folder of the run. An interrupted run resumes there.
    overwrite
        Compute every step again.
    quiet
        Print log lines instead of progress bars.

    Returns
    -------
    RunResult
        The folder, the report and the facts of the run.

    Examples
    --------
    >>> run(Path("city.yaml"), "runs/city").report  # doctest: +SKIP
    """
    if isinstance(config, RunConfig):
        loaded = config
        base = Path()
    else:
        loaded = load_run(config)
        base = config.parent
    folder = Path(out)
    refuse_foreign_folder(folder)
    with lock_output(folder):
        return _run(_Steps(loaded, base, folder, StepCache(folder, overwrite), quiet))


def _run(steps: _Steps) -> RunResult:
    config = steps.config
    start = time.perf_counter()
    sources = steps.region_sources()
    options = steps.generator_options()
    family = family_of(config.train.generator)
    if config.strong and not family.trainable:
        raise MobatlasError(
            f"strong: the generator {family.name} cannot be trained on labels; remove `strong`"
        )
    dataset = steps.dataset()
    opened = TrajectoryDataset.open(dataset)
    labelled = opened.groups is not None and opened.labels() is not None
    if config.strong and not labelled:
        raise MobatlasError("strong: the people of this dataset have no labels; remove `strong`")
    # Errors in regions must show before hours of training.
    regions = {name: steps.regions(name, source, opened) for name, source in sources.items()}
    baseline = steps.baseline(dataset, options)
    samples = {BASELINE: steps.sample_population(baseline, opened)}
    models = {BASELINE: BASELINE}
    if labelled and family.trainable and config.strong is not False and opened.groups is not None:
        strong = steps.strong(baseline)
        samples[STRONG] = steps.sample_groups(STRONG, strong, opened.groups, calibrate=False)
        models[STRONG] = STRONG
    chapters = {
        name: steps.chapter(name, folder, opened, baseline, samples)
        for name, folder in regions.items()
    }
    facts = {
        "title": config.title,
        "seed": config.seed,
        "dataset": steps.relative(dataset),
        "models": models,
        "samples": {name: steps.relative(path) for name, path in samples.items()},
        "regions": chapters,
        "config": config.model_dump(mode="json", exclude_none=True),
        "versions": library_versions(),
        "seconds": round(time.perf_counter() - start, 1),
    }
    write_json(steps.out / RUN, facts)
    report = write_report(steps.out, steps.out / REPORT, overwrite=True)
    return RunResult(steps.out, report, facts)


@dataclass(frozen=True)
class _Steps:
    """The cached steps of a run."""

    config: RunConfig
    base: Path  # paths in the configuration are relative to it
    out: Path
    cache: StepCache
    quiet: bool

    def relative(self, path: Path) -> str:
        """A path within the run's folder, as run.json holds it."""
        return str(path.relative_to(self.out))

    def dataset(self) -> Path:
        """Trajectories of the source, or of a simulated city."""
        out = self.out / "dataset"
        preset = self.config.preset
        values = self.config.prepare.model_dump(mode="json", exclude_unset=True)
        if self.config.source is None:
            source = self._city()
            layout = "plain"
            engine = "duckdb"
        else:
            source = self.base / self.config.source.path
            layout = self.config.source.format
            engine = self.config.source.engine
            if not source.exists():
                raise MobatlasError(
                    f"{source}: does not exist; `source.path` is relative to the configuration file"
                )

        def compute(_: bool) -> None:
            with track("preparing", STEPS, self.quiet) as tracker:
                prepare(
                    source,
                    out,
                    format=layout,
                    engine=engine,
                    preset=preset,
                    values=values,
                    overwrite=True,
                    tracker=tracker,
                )

        inputs = {
            "source": path_hash(source),
            "format": layout,
            "preset": preset,
            "values": values,
        }
        return self.cache.run("dataset", out, inputs, compute)

    def _city(self) -> Path:
        out = self.out / "city"
        config = self.config.simulate
        seed = self.config.seed

        def compute(_: bool) -> None:
            with track("simulating", config.users, self.quiet) as tracker:
                write_city_folder(out, config, seed, overwrite=True, tracker=tracker)

        inputs = {"city": config.model_dump(mode="json"), "seed": seed}
        return self.cache.run("city", out, inputs, compute)

    def region_sources(self) -> dict[str, RegionsConfig]:
        """The configured sources of regions; missing tables and unusable names are refused."""
        if not self.config.regions:
            raise MobatlasError(
                "regions: the configuration has none; give `composition` and `aggregates`, "
                "`by` with a column of people, or a `partition`"
            )
        for name, source in self.config.regions.items():
            reserved = name in (BASELINE, STRONG) or name.startswith(".")
            if reserved or not name.strip() or not set(name).isdisjoint("/\\"):
                raise MobatlasError(
                    f"regions.{name}: this cannot be the name of a folder; choose another name"
                )
            for key, path in self._tables(source).items():
                if not path.exists():
                    raise MobatlasError(
                        f"{path}: does not exist; "
                        f"`regions.{name}.{key}` is relative to the configuration file"
                    )
        return dict(self.config.regions)

    def _tables(self, source: RegionsConfig) -> dict[str, Path]:
        paths = {"composition": source.composition, "aggregates": source.aggregates}
        return {key: self.base / path for key, path in paths.items() if path is not None}

    def generator_options(self) -> dict[str, Any]:
        """Options of the generator, with the files they name resolved and checked."""
        chosen = self.config.train
        return family_of(chosen.generator).resolve(chosen.options, self.base)

    def baseline(self, dataset: Path, options: dict[str, Any]) -> Path:
        """Phase 1."""
        out = self.out / BASELINE
        inputs = {
            "dataset": manifest_hash(dataset, DATASET),
            "preset": self.config.preset,
            "generator": self.config.train.generator,
            "options": options,
            "seed": self.config.seed,
        }

        def compute(resume: bool) -> None:
            train(
                dataset,
                out,
                generator=self.config.train.generator,
                preset=self.config.preset,
                values=options,
                seed=self.config.seed,
                execution=self._execution(resume),
            )

        return self.cache.run(BASELINE, out, inputs, compute)

    def strong(self, baseline: Path) -> Path:
        """The labelled upper bound."""
        out = self.out / STRONG
        _, values = split_options(self.config.supervise.options)
        inputs = {
            "model": manifest_hash(baseline, MODEL),
            "options": values,
            "seed": self.config.seed,
        }
        options = SuperviseOptions(strategy=STRONG, values=values)
        return self.cache.run(STRONG, out, inputs, self._supervision(baseline, out, None, options))

    def _supervised(self, name: str, baseline: Path, regions: Path) -> Path:
        out = self.out / "models" / name
        chosen = self.config.supervise
        inputs = {
            "model": manifest_hash(baseline, MODEL),
            "regions": manifest_hash(regions, REGIONS),
            **chosen.model_dump(mode="json"),
            "seed": self.config.seed,
        }
        options = SuperviseOptions(
            strategy=chosen.strategy,
            divergence=chosen.divergence,
            membership=chosen.membership,
            values=chosen.options,
        )
        compute = self._supervision(baseline, out, regions, options)
        return self.cache.run(f"model {name}", out, inputs, compute)

    def _supervision(
        self, baseline: Path, out: Path, regions: Path | None, options: SuperviseOptions
    ) -> Callable[[bool], Any]:
        seed = self.config.seed

        def compute(resume: bool) -> None:
            execution = self._execution(resume)
            supervise(baseline, out, regions, options, seed=seed, execution=execution)

        return compute

    def chapter(
        self,
        name: str,
        regions: Path,
        dataset: TrajectoryDataset,
        baseline: Path,
        samples: Mapping[str, Path],
    ) -> dict[str, Any]:
        """One source of regions: its diagnosis, a model, samples and their evaluation."""
        model = self._supervised(name, baseline, regions)
        opened = RegionsFolder.open(regions)
        own = self.sample_groups(name, model, opened.regions.groups, calibrate=True)
        models = {BASELINE: baseline, "supervised": model}
        evaluation = self._evaluation(name, {**samples, "ours": own}, dataset, models, opened)
        chapter = {
            "regions": self.relative(regions),
            "model": self.relative(model),
            "samples": self.relative(own),
            "evaluation": self.relative(evaluation),
            "information": read_manifest(model, MODEL).details["report"]["information"],
            "diagnosis": opened.diagnosis.as_dict(),
        }
        if self.config.audit:
            chapter["audit"] = self.relative(self._audit(name, own, dataset))
        return chapter

    def regions(self, name: str, source: RegionsConfig, dataset: TrajectoryDataset) -> Path:
        """Composition and aggregates."""
        out = self.out / "regions" / name
        tables = self._tables(source)
        seed = self.config.seed
        options = RegionsOptions(
            partition=source.partition,
            by=source.by,
            composition=tables.get("composition"),
            aggregates=tables.get("aggregates"),
            features=source.features,
            mask=source.mask,
            straddle=source.straddle or "refuse",
        )

        def compute(_: bool) -> None:
            build_regions(dataset.path, out, options, seed=seed, overwrite=True)

        inputs = {
            "dataset": dataset.manifest.content_hash,
            "options": source.model_dump(exclude_none=True),
            "seed": seed,
            **{key: path_hash(path) for key, path in tables.items()},
        }
        return self.cache.run(f"regions {name}", out, inputs, compute)

    def sample_population(self, model: Path, dataset: TrajectoryDataset) -> Path:
        """Samples of a model without groups, as many as all groups have together."""
        groups = len(dataset.groups) if dataset.groups is not None else 1
        n = groups * self.config.samples.each
        return self._samples(BASELINE, model, n, SampleRequest())

    def sample_groups(self, name: str, model: Path, groups: Groups, *, calibrate: bool) -> Path:
        """Equally many samples of each group, in one file."""
        request = SampleRequest(group=groups.names, calibrate=calibrate)
        return self._samples(name, model, self.config.samples.each, request)

    def _samples(self, name: str, model: Path, n: int, request: SampleRequest) -> Path:
        out = self.out / "samples" / f"{name}.parquet"
        request = replace(request, coarsen=self.config.samples.coarsen, seed=self.config.seed)

        def compute(_: bool) -> None:
            out.parent.mkdir(parents=True, exist_ok=True)
            with track(f"sampling {name}", n, self.quiet) as tracker:
                generate(model, out, n, request, overwrite=True, tracker=tracker)

        inputs = {
            "model": manifest_hash(model, MODEL),
            "wanted": {str(group): n for group in request.group or (None,)},
            "calibrate": request.calibrate,
            "coarsen": request.coarsen,
            "seed": request.seed,
        }
        return self.cache.run(f"samples {name}", out, inputs, compute)

    def _evaluation(
        self,
        name: str,
        samples: Mapping[str, Path],
        dataset: TrajectoryDataset,
        models: Mapping[str, Path],
        regions: RegionsFolder,
    ) -> Path:
        out = self.out / "evaluation" / f"{name}.json"
        seed = self.config.seed

        def compute(_: bool) -> None:
            result = evaluate(
                samples["ours"],
                dataset.path,
                baseline=samples[BASELINE],
                strong=samples.get(STRONG),
                seed=seed,
            )
            regional = _regional_scores(dataset, models, regions, seed)
            out.parent.mkdir(parents=True, exist_ok=True)
            write_json(out, result.as_dict() | {"regional": regional})

        inputs = {key: path_hash(path) for key, path in samples.items()} | {
            "dataset": dataset.manifest.content_hash,
            "regions": regions.manifest.content_hash,
            "seed": str(seed),
        }
        return self.cache.run(f"evaluation {name}", out, inputs, compute)

    def _audit(self, name: str, samples: Path, dataset: TrajectoryDataset) -> Path:
        out = self.out / "audit" / f"{name}.json"
        seed = self.config.seed

        def compute(_: bool) -> None:
            with track(f"auditing {name}", AUDIT_STEPS, self.quiet) as tracker:
                result = audit(samples, dataset.path, seed=seed, tracker=tracker)
            out.parent.mkdir(parents=True, exist_ok=True)
            write_json(out, result.as_dict())

        inputs = {
            "samples": path_hash(samples),
            "dataset": dataset.manifest.content_hash,
            "seed": seed,
        }
        return self.cache.run(f"audit {name}", out, inputs, compute)

    def _execution(self, resume: bool) -> Execution:
        return Execution(resume=resume, overwrite=not resume, quiet=self.quiet)


def _regional_scores(
    dataset: TrajectoryDataset, models: Mapping[str, Path], regions: RegionsFolder, seed: int
) -> dict[str, Any]:
    """Scores that need no labels: held-out people of the regions, and held-out regions."""
    people = np.intersect1d(dataset.split_people("train"), dataset.person)
    homes = dataset.anchors[people]  # (people, 4)
    samplers: dict[str, Sampler] = {
        BASELINE: PlainSampler(load_model(models[BASELINE]).generator, homes),
        "supervised": load_sampler(load_model(models["supervised"])),
    }
    parents = dataset.vocabulary.parents
    return {
        "held_out_people": held_out_people(samplers, dataset, regions, seed),
        "held_out_regions": held_out_regions(regions.regions, seed, parents=parents),
    }
