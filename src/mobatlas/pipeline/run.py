"""A whole run: from tables or a simulated city to samples by group, an evaluation and report.html.

Every step is cached with a hash of its inputs: a finished step whose inputs have not changed is not
computed again, and an interrupted run resumes. The demo is a run with a configuration that is part
of the package.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import resources
from itertools import chain
from pathlib import Path
from typing import Any

import yaml

from mobatlas.config import RegionsConfig, RunConfig, build_run, load_run, merge
from mobatlas.data.city import write_city_folder
from mobatlas.data.dataset import TrajectoryDataset
from mobatlas.data.prepare.pipeline import STEPS, Summary, prepare
from mobatlas.data.samples import Samples
from mobatlas.errors import MobatlasError, log
from mobatlas.evaluation.comparison import labelled_groups
from mobatlas.evaluation.evaluate import (
    BASELINE,
    OURS,
    STRONG,
    STRONG_CALIBRATED,
    evaluate,
    held_out_people,
    held_out_regions,
    sample_reader,
)
from mobatlas.evaluation.privacy.audit import STEPS as AUDIT_STEPS
from mobatlas.evaluation.privacy.audit import audit
from mobatlas.evaluation.privacy.measures import refuse_few_people
from mobatlas.generators.protocol import Family, family_of
from mobatlas.generators.store import KIND as MODEL
from mobatlas.generators.store import load_model
from mobatlas.groups import Groups
from mobatlas.io.manifest import file_hash, library_versions, read_manifest, write_json
from mobatlas.io.output import lock_output
from mobatlas.pipeline.models import SuperviseOptions, split_options, supervise, train
from mobatlas.progress import SILENT, Tracker, track
from mobatlas.regions.build import RegionsOptions
from mobatlas.regions.store import RegionsFolder, build_regions
from mobatlas.regions.types import bins_by_map
from mobatlas.report.html import RUN, write_report
from mobatlas.sampling.chunks import SampleRequest
from mobatlas.sampling.generate import generate
from mobatlas.supervision.calibration import PlainSampler, Sampler
from mobatlas.supervision.store import is_calibrated, load_sampler
from mobatlas.training.loop import Execution

STEPS_FILE = "steps.json"
FILES_OF_REGIONS = (
    "composition",
    "joint_prior",
    "aggregates",
    "group_tables",
    "labelled",
    "home_panel",
    "polygons",
)


@dataclass(frozen=True)
class StepCache:
    """The steps of one folder, each with a hash of its inputs.

    The file is read again before every step, so several processes can compute different steps.

    Examples
    --------
    >>> cache = StepCache(Path("run"))  # doctest: +SKIP
    >>> cache.run("city", Path("run/city"), {"seed": 0}, write_city)  # doctest: +SKIP
    """

    folder: Path
    recompute: bool = False  # compute every step again

    def is_done(self, name: str, out: Path, inputs: Mapping[str, Any]) -> bool:
        """Return whether `out` exists and was computed from `inputs`."""
        step = {"key": _key(inputs), "done": True}
        return not self.recompute and self._read().get(name) == step and out.exists()

    def has_other_inputs(self, name: str, inputs: Mapping[str, Any]) -> bool:
        """Return whether a step was started or finished with other inputs."""
        step = self._read().get(name)
        return step is not None and step.get("key") != _key(inputs)

    def run(
        self, name: str, out: Path, inputs: Mapping[str, Any], compute: Callable[[bool], Any]
    ) -> Path:
        """Compute `out` from `inputs` unless it exists; return its path.

        `compute` receives whether an interrupted attempt with the same inputs may be resumed.
        """
        if self.is_done(name, out, inputs):
            log.info("%s: already computed", name)
            return out
        key = _key(inputs)
        same_inputs = not self.recompute and self._read().get(name, {}).get("key") == key
        self._record(name, key, done=False)
        out.parent.mkdir(parents=True, exist_ok=True)
        compute(same_inputs)
        self._record(name, key, done=True)
        return out

    def _read(self) -> dict[str, dict[str, Any]]:
        try:
            steps = json.loads((self.folder / STEPS_FILE).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):  # missing or damaged: compute everything
            return {}
        valid = isinstance(steps, dict) and all(isinstance(step, dict) for step in steps.values())
        return steps if valid else {}

    def _record(self, name: str, key: str, *, done: bool) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        write_json(self.folder / STEPS_FILE, {**self._read(), name: {"key": key, "done": done}})


def _key(inputs: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(inputs, sort_keys=True, default=str).encode()).hexdigest()


def refuse_foreign_folder(folder: Path) -> None:
    """Refuse a folder that has files but no step cache; a run writes the cache first.

    Hidden files do not count: a process killed while it writes the cache leaves only those.
    """
    entries = list(folder.iterdir()) if folder.is_dir() else []
    visible = [path.name for path in entries if not path.name.startswith(".")]
    if visible and STEPS_FILE not in visible:
        raise MobatlasError(
            f"{folder}: the folder contains files that are not from a run of this version; "
            "choose another --out"
        )


def path_hash(path: Path) -> str:
    """A hash of a file, or of all files in a folder with their names."""
    if path.is_file():
        return file_hash(path)
    files = sorted(each for each in path.rglob("*") if each.is_file())
    lines = [f"{each.relative_to(path).as_posix()} {file_hash(each)}" for each in files]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


@dataclass(frozen=True)
class RunResult:
    """The folder of a run, its report, and the facts that run.json holds."""

    folder: Path
    report: Path
    facts: dict[str, Any]


def run(
    config: Path | RunConfig,
    out: Path | str,
    *,
    overwrite: bool = False,
    quiet: bool = False,
    values: Mapping[str, Any] | None = None,
) -> RunResult:
    """Run all steps of a configuration and write the results to a folder.

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
    values
        Values that override those of the YAML file.

    Returns
    -------
    RunResult
        The folder, the report and the facts of the run.

    Examples
    --------
    >>> run(Path("city.yaml"), "runs/city").report  # doctest: +SKIP
    """
    loaded = config if isinstance(config, RunConfig) else load_run(config, values=values)
    base = Path() if isinstance(config, RunConfig) else config.parent
    folder = Path(out)
    refuse_foreign_folder(folder)
    with lock_output(folder):
        return _run(Steps(loaded, base, folder, StepCache(folder, overwrite), quiet))


def run_demo(
    out: Path,
    seed: int = 0,
    quiet: bool = False,
    *,
    overwrite: bool = False,
    values: Mapping[str, Any] | None = None,
) -> RunResult:
    """Run the demo in `out`; `values` change its configuration."""
    text = resources.files("mobatlas.pipeline").joinpath("demo.yaml").read_text(encoding="utf-8")
    config = build_run(merge(yaml.safe_load(text), {"seed": seed}, values or {}))
    return run(config, out, overwrite=overwrite, quiet=quiet)


def _run(steps: Steps) -> RunResult:
    config = steps.config
    start = time.perf_counter()
    steps.check()
    strong_groups = steps.strong_groups()
    # Errors in regions must show before hours of training.
    regions = {name: steps.regions(name, source) for name, source in config.regions.items()}
    samples = {BASELINE: steps.sample_population()}
    if strong_groups is not None:
        strong = steps.strong(regions.values())
        samples[STRONG] = steps.sample_groups(STRONG, strong, strong_groups, calibrate=False)
        if is_calibrated(strong):
            samples[STRONG_CALIBRATED] = steps.sample_groups(
                STRONG_CALIBRATED, strong, strong_groups, calibrate=True
            )
    chapters = {name: steps.chapter(name, folder, samples) for name, folder in regions.items()}
    facts = {
        "title": config.title,
        "seed": config.seed,
        "dataset": steps.relative(steps.dataset.path),
        "models": {name: name.partition(",")[0] for name in samples},
        "samples": {name: steps.relative(path) for name, path in samples.items()},
        "regions": chapters,
        "config": config.model_dump(mode="json", exclude_none=True),
        "versions": library_versions(),
        "seconds": round(time.perf_counter() - start, 1),
    }
    write_json(steps.out / RUN, facts)
    report = write_report(steps.out, steps.out / "report.html", overwrite=True, read=steps.read)
    return RunResult(steps.out, report, facts)


@dataclass(frozen=True)
class Steps:
    """The cached steps of a run."""

    config: RunConfig
    base: Path  # paths in the configuration are relative to it
    out: Path
    cache: StepCache
    quiet: bool

    def relative(self, path: Path) -> str:
        """A path within the run's folder, as run.json holds it."""
        return str(path.relative_to(self.out))

    def check(self) -> None:
        """Refuse what cannot work, before anything is computed."""
        for problem in self.problems():
            raise MobatlasError(problem)
        _ = self.generator_options  # refuses files that do not exist

    def problems(self) -> Iterator[str]:
        """What is wrong with the configuration itself."""
        if not self.config.regions:
            yield (
                "regions: the configuration has none; give `composition` and `aggregates`, "
                "`by` with a column of people, or a `partition`"
            )
        paths = []
        for name, source in self.config.regions.items():
            reserved = name in (BASELINE, STRONG) or name.startswith(".")
            if reserved or not name.strip() or not set(name).isdisjoint("/\\"):
                yield f"regions.{name}: this cannot be the name of a folder; choose another name"
            tables = self.tables(source)
            paths += [(path, f"regions.{name}.{key}") for key in tables for path in tables[key]]
        if self.config.source is not None:
            paths.append((self.base / self.config.source.path, "source.path"))
        for path, key in paths:
            if not path.exists():
                yield (
                    f"{path}: this path does not exist; `{key}` is relative to the "
                    "configuration file"
                )
        if self.config.strong and not self.family.trainable:
            yield (
                f"strong: the generator {self.family.name} cannot be trained on labels; "
                "remove `strong`"
            )

    def tables(self, source: RegionsConfig) -> dict[str, tuple[Path, ...]]:
        """The files of a source of regions, by their key in the configuration."""
        files = region_files(source).items()
        return {key: tuple(self.base / path for path in paths) for key, paths in files}

    @property
    def family(self) -> Family:
        return family_of(self.config.train.generator)

    @cached_property
    def generator_options(self) -> dict[str, Any]:
        """Options of the generator, with the files they name resolved and checked."""
        return self.family.resolve(self.config.train.options, self.base)

    @cached_property
    def dataset(self) -> TrajectoryDataset:
        """Trajectories of the source, or of a simulated city."""
        out = self.out / "dataset"

        def compute(_: bool) -> None:
            with track("preparing", STEPS, self.quiet) as tracker:
                self.prepare(out, tracker)

        source = self.config.source
        inputs = {
            "source": path_hash(self.source),
            "format": "plain" if source is None else source.format,
            "preset": self.config.preset,
            "values": self.config.prepare.model_dump(mode="json", exclude_unset=True),
        }
        return TrajectoryDataset.open(self.cache.run("dataset", out, inputs, compute))

    @cached_property
    def source(self) -> Path:
        """The visits of the user, or a simulated city."""
        source = self.config.source
        return self._city() if source is None else self.base / source.path

    def prepare(
        self, out: Path, tracker: Tracker = SILENT, most_rows: int | None = None
    ) -> Summary:
        """Prepare the source into a folder; for the parameters see `prepare`."""
        source = self.config.source
        return prepare(
            self.source,
            out,
            format="plain" if source is None else source.format,
            engine="duckdb" if source is None else source.engine,
            preset=self.config.preset,
            values=self.config.prepare.model_dump(mode="json", exclude_unset=True),
            overwrite=True,
            tracker=tracker,
            most_rows=most_rows,
        )

    def _city(self) -> Path:
        out = self.out / "city"
        city = self.config.simulate

        def compute(_: bool) -> None:
            with track("simulating", city.users, self.quiet) as tracker:
                write_city_folder(out, city, self.config.seed, overwrite=True, tracker=tracker)

        return self._seeded("city", out, {"city": city.model_dump(mode="json")}, compute)

    def _seeded(
        self, name: str, out: Path, inputs: Mapping[str, Any], compute: Callable[[bool], Any]
    ) -> Path:
        """Cache a step that depends on the seed."""
        return self.cache.run(name, out, {**inputs, "seed": self.config.seed}, compute)

    @cached_property
    def read(self) -> Callable[..., Samples]:
        """Reads each file of samples once, for all evaluations and the report."""
        return sample_reader(self.dataset)

    def regions(self, name: str, source: RegionsConfig) -> RegionsFolder:
        """Composition and aggregates."""
        out = self.out / "regions" / name
        tables = self.tables(source)
        options = self.regions_options(source)

        def compute(_: bool) -> None:
            build_regions(self.dataset.path, out, options, seed=self.config.seed, overwrite=True)

        inputs = {
            "dataset": self.dataset.manifest.content_hash,
            "options": source.model_dump(exclude_none=True),
            **{key: [path_hash(path) for path in paths] for key, paths in tables.items()},
        }
        return RegionsFolder.open(self._seeded(f"regions {name}", out, inputs, compute))

    def regions_options(
        self,
        source: RegionsConfig,
        per: Mapping[str, str] | None = None,
        *,
        require_per: bool = False,
    ) -> RegionsOptions:
        """The options of `build_regions`; `per` are other periods than those of the source."""
        tables = self.tables(source)
        return RegionsOptions(
            partition=source.partition,
            by=source.by,
            composition=tables.get("composition"),
            joint_prior=_only(tables, "joint_prior"),
            aggregates=_only(tables, "aggregates"),
            features=source.features,
            mask=source.mask,
            min_people=source.min_people,
            straddle=source.straddle or "refuse",
            rename=source.rename,
            group_tables=tables.get("group_tables", ()),
            labelled=_only(tables, "labelled"),
            labelled_sample=source.labelled_sample,
            per=source.per if per is None else per,
            require_per=require_per,
            home_panel=_only(tables, "home_panel"),
            polygons=_only(tables, "polygons"),
        )

    @cached_property
    def baseline(self) -> Path:
        """Phase 1."""
        out = self.out / BASELINE
        config = self.config

        def compute(resume: bool) -> None:
            train(
                self.dataset.path,
                out,
                generator=config.train.generator,
                preset=config.preset,
                values=self.generator_options,
                seed=config.seed,
                execution=self._execution(resume),
            )

        inputs = {
            "dataset": self.dataset.manifest.content_hash,
            "preset": config.preset,
            "generator": config.train.generator,
            "options": self.generator_options,
        }
        return self._seeded(BASELINE, out, inputs, compute)

    def strong_groups(self) -> Groups | None:
        """The groups of the labelled upper bound; None if it is not wanted or not possible."""
        groups = labelled_groups(self.dataset)
        if self.config.strong and groups is None:
            raise MobatlasError(
                "strong: the people of this dataset have no labels; remove `strong`"
            )
        return groups if self.family.trainable and self.config.strong is not False else None

    def strong(self, regions: Iterable[RegionsFolder]) -> Path:
        """The labelled upper bound, calibrated to the features of all regions."""
        own, values = split_options(self.config.supervise.options)
        folders = list(regions)
        names = chain.from_iterable(each.regions.aggregates.features for each in folders)
        features = bins_by_map(list(dict.fromkeys(names)))
        masks = {tuple(each.regions.details.get("mask", ())) for each in folders}
        mask = list(masks.pop()) if len(masks) == 1 else []
        values = merge(
            values,
            {STRONG: {"features": list(features), "mask": mask}},
            {name: own[name] for name in (STRONG, "calibration") if name in own},
        )
        options = SuperviseOptions(strategy=STRONG, values=values)
        return self._supervise(STRONG, self.out / STRONG, None, options, {"options": values})

    def _supervised(self, name: str, regions: RegionsFolder) -> Path:
        chosen = self.config.supervise
        options = SuperviseOptions(
            strategy=chosen.strategy,
            divergence=chosen.divergence,
            membership=chosen.membership,
            values=chosen.options,
        )
        inputs = {"regions": regions.manifest.content_hash, **chosen.model_dump(mode="json")}
        return self._supervise(
            f"model {name}", self.out / "models" / name, regions, options, inputs
        )

    def _supervise(
        self,
        step: str,
        out: Path,
        regions: RegionsFolder | None,
        options: SuperviseOptions,
        inputs: Mapping[str, Any],
    ) -> Path:
        def compute(resume: bool) -> None:
            supervise(
                self.baseline,
                out,
                regions,
                options,
                seed=self.config.seed,
                execution=self._execution(resume),
            )

        return self._seeded(step, out, {"model": _model_hash(self.baseline), **inputs}, compute)

    def _execution(self, resume: bool) -> Execution:
        return Execution(resume=resume, overwrite=not resume, quiet=self.quiet)

    def sample_population(self) -> Path:
        """Samples of the model without groups, as many as all groups have together."""
        groups = self.dataset.groups
        n = self.config.samples.each * (1 if groups is None else len(groups))
        return self._samples(BASELINE, self.baseline, n, SampleRequest())

    def sample_groups(self, name: str, model: Path, groups: Groups, *, calibrate: bool) -> Path:
        """Equally many samples of each group, in one file."""
        request = SampleRequest(group=groups.names, calibrate=calibrate)
        return self._samples(name, model, self.config.samples.each, request)

    def _samples(self, name: str, model: Path, n: int, request: SampleRequest) -> Path:
        out = self.out / "samples" / f"{name.replace(', ', '-')}.parquet"
        options = self.config.samples
        request = replace(
            request, anchors=options.anchors, coarsen=options.coarsen, seed=self.config.seed
        )

        def compute(_: bool) -> None:
            with track(f"sampling {name}", n, self.quiet) as tracker:
                generate(model, out, n, request, overwrite=True, tracker=tracker)

        inputs = {
            "model": _model_hash(model),
            "wanted": {str(group): n for group in request.group or (None,)},
            "calibrate": request.calibrate,
            "coarsen": request.coarsen,
            "anchors": request.anchors,
        }
        return self._seeded(f"samples {name}", out, inputs, compute)

    def chapter(
        self, name: str, regions: RegionsFolder, samples: Mapping[str, Path]
    ) -> dict[str, Any]:
        """One source of regions: its diagnosis, a model, samples and their evaluation."""
        model = self._supervised(name, regions)
        own = self.sample_groups(name, model, regions.regions.groups, calibrate=True)
        evaluation = self._evaluation(name, {**samples, OURS: own}, model, regions)
        chapter = {
            "regions": self.relative(regions.path),
            "model": self.relative(model),
            "samples": self.relative(own),
            "evaluation": self.relative(evaluation),
            "information": read_manifest(model, MODEL).details["report"]["information"],
            "diagnosis": regions.diagnosis.as_dict(),
        }
        if self._audited:
            path = self._audit(name, own)
            answer = json.loads(path.read_text(encoding="utf-8"))["answer"]
            chapter |= {"audit": self.relative(path), "answer": answer}
        return chapter

    @cached_property
    def _audited(self) -> bool:
        """Whether to audit; too few people are an error only where the user asked for an audit."""
        if self.config.audit and "audit" not in self.config.model_fields_set:
            try:
                refuse_few_people(self.dataset)
            except MobatlasError as error:
                log.warning("no privacy audit: %s", error)
                return False
        return self.config.audit

    def _evaluation(
        self, name: str, samples: Mapping[str, Path], model: Path, regions: RegionsFolder
    ) -> Path:
        def compute() -> dict[str, Any]:
            groups = labelled_groups(self.dataset)
            files = {label: self.read(path, groups=groups) for label, path in samples.items()}
            result = evaluate(
                files[OURS],
                self.dataset,
                baseline=files[BASELINE],
                strong=files.get(STRONG),
                strong_calibrated=files.get(STRONG_CALIBRATED),
                seed=self.config.seed,
            )
            return result.as_dict() | {"regional": self._regional_scores(model, regions)}

        inputs = {key: path_hash(path) for key, path in samples.items()}
        return self._json(
            "evaluation", name, inputs | {"regions": regions.manifest.content_hash}, compute
        )

    def _regional_scores(self, model: Path, regions: RegionsFolder) -> dict[str, Any]:
        """Scores that need no labels: held-out people of the regions, and held-out regions."""
        dataset = self.dataset
        baseline = load_model(self.baseline)
        samplers: dict[str, Sampler] = {
            BASELINE: PlainSampler(baseline.generator, baseline.population.anchors),
            "supervised": load_sampler(load_model(model)),
        }
        return {
            "held_out_people": held_out_people(samplers, dataset, regions, self.config.seed),
            "held_out_regions": held_out_regions(
                regions.regions, self.config.seed, parents=dataset.vocabulary.parents
            ),
        }

    def _audit(self, name: str, samples: Path) -> Path:
        def compute() -> dict[str, Any]:
            with track(f"auditing {name}", AUDIT_STEPS, self.quiet) as tracker:
                return audit(
                    samples, self.dataset.path, seed=self.config.seed, tracker=tracker
                ).as_dict()

        return self._json("audit", name, {"samples": path_hash(samples)}, compute)

    def _json(
        self, step: str, name: str, inputs: Mapping[str, Any], compute: Callable[[], dict[str, Any]]
    ) -> Path:
        """Cache the result of a function in the file STEP/NAME.json."""
        out = self.out / step / f"{name}.json"

        def write(_: bool) -> None:
            write_json(out, compute())

        inputs = {**inputs, "dataset": self.dataset.manifest.content_hash}
        return self._seeded(f"{step} {name}", out, inputs, write)


def region_files(source: RegionsConfig) -> dict[str, tuple[Path, ...]]:
    """The paths of a source of regions as they are written, by their key."""
    values = ((key, getattr(source, key)) for key in FILES_OF_REGIONS)
    return {key: (value,) if isinstance(value, Path) else value for key, value in values if value}


def _only(tables: Mapping[str, tuple[Path, ...]], key: str) -> Path | None:
    return tables.get(key, (None,))[0]


def _model_hash(model: Path) -> str:
    return read_manifest(model, MODEL).content_hash
