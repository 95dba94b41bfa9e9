"""A whole run: from a user's tables, or a simulated city, to samples by group, an evaluation and report.html.

Every stage is kept with the hash of what it was made of, so that a second call makes only what is new, and one that was stopped
goes on where it was.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

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
    METADATA,
    beside,
    library_versions,
    read_manifest,
    write_json,
    write_parquet,
)
from mobatlas.io.output import new_file, only_writer
from mobatlas.pipeline.cache import Stages, content_of, made, refuse_other
from mobatlas.pipeline.train import divided, supervise, train
from mobatlas.progress import track
from mobatlas.regions.identifiability import diagnose
from mobatlas.regions.store import KIND as REGIONS
from mobatlas.regions.store import build_regions, load_regions
from mobatlas.report.html import RUN, write_report
from mobatlas.sampling.generate import generate
from mobatlas.supervision.resample import PlainSampler, Sampler
from mobatlas.supervision.store import load_sampler

REPORT = "report.html"
BASELINE, STRONG = "baseline", "strong"


@dataclass(frozen=True)
class Result:
    """Where things are, and how good they came out."""

    folder: Path
    report: Path
    facts: dict[str, Any]


def run(
    config: Path | RunConfig, out: Path | str, *, overwrite: bool = False, quiet: bool = False
) -> Result:
    """Everything that a configuration asks for, into `out`."""
    whole, above = (
        (config, Path()) if isinstance(config, RunConfig) else (load_run(config), config.parent)
    )
    refuse_other(Path(out))
    with only_writer(Path(out)):
        return _run(_Job(whole, above, Path(out), Stages(Path(out), overwrite), quiet))


def _run(job: _Job) -> Result:
    whole, start = job.config, time.perf_counter()
    ways, options, family = job.ways(), job.options(), family_of(whole.train.generator)
    if whole.strong and not family.trainable:
        raise MobatlasError(
            f"strong: is asked for, but the generator {family.name} cannot be taught; leave it out"
        )
    dataset = job.dataset()
    opened = TrajectoryDataset.open(dataset)
    labelled = opened.groups is not None and opened.labels() is not None
    if whole.strong and not labelled:
        raise MobatlasError(
            "strong: is asked for, but the people of this dataset have no labels; leave it out"
        )
    # Before hours of training: what is wrong with regions is seen here.
    regions = {name: job.regions(name, way, opened) for name, way in ways.items()}
    baseline = job.baseline(dataset, options)
    strong = (
        job.strong(baseline)
        if labelled and family.trainable and whole.strong is not False
        else None
    )
    files = {BASELINE: job.everybody(baseline, opened)}
    if strong is not None and opened.groups is not None:
        files[STRONG] = job.by_group(STRONG, strong, opened.groups, calibrate=False)
    chapters = {
        name: job.chapter(name, folder, opened, baseline, files) for name, folder in regions.items()
    }
    facts = {
        "title": whole.title,
        "seed": whole.seed,
        "dataset": str(dataset.relative_to(job.out)),
        "models": {BASELINE: BASELINE} | ({STRONG: STRONG} if strong else {}),
        "samples": {name: str(path.relative_to(job.out)) for name, path in files.items()},
        "regions": chapters,
        "config": whole.model_dump(mode="json", exclude_none=True),
        "versions": library_versions(),
        "seconds": round(time.perf_counter() - start, 1),
    }
    write_json(job.out / RUN, facts)
    report = write_report(job.out, job.out / REPORT, overwrite=True)
    return Result(job.out, report, facts)


@dataclass(frozen=True)
class _Job:
    """The stages of a run."""

    config: RunConfig
    beside: Path  # what paths of the configuration are relative to
    out: Path
    stages: Stages
    quiet: bool

    def dataset(self) -> Path:
        """Visits of the source, or of a city, as trajectories."""
        config, preset = self.config, self.config.preset
        out, values = (
            self.out / "dataset",
            self.config.prepare.model_dump(mode="json", exclude_unset=True),
        )
        if config.source is None:
            source, form, engine = self._city(), "plain", "duckdb"
        else:
            source, form, engine = (
                self.beside / config.source.path,
                config.source.format,
                config.source.engine,
            )
            if not source.exists():
                raise MobatlasError(
                    f"{source}: does not exist; `source.path` is relative to the configuration"
                )

        def make(_: bool) -> None:
            with track("preparing", STEPS, self.quiet) as tracker:
                manner: dict[str, Any] = {
                    "format": form,
                    "engine": engine,
                    "preset": preset,
                    "tracker": tracker,
                }
                prepare(source, out, values=values, overwrite=True, **manner)

        of = {"source": content_of(source), "format": form, "preset": preset, "values": values}
        return self.stages.run("dataset", out, of, make)

    def _city(self) -> Path:
        config, out = self.config.simulate, self.out / "city"

        def make(_: bool) -> None:
            with track("simulating", config.users, self.quiet) as tracker:
                write_city_folder(out, config, self.config.seed, overwrite=True, tracker=tracker)

        return self.stages.run(
            "city", out, {"city": config.model_dump(mode="json"), "seed": self.config.seed}, make
        )

    def ways(self) -> dict[str, RegionsConfig]:
        """The ways to know regions; refused before hours of training if there are none, or their tables are not there."""
        if not self.config.regions:
            raise MobatlasError(
                "regions: the configuration has none; give composition and aggregates, `by` a column of people, or a partition"
            )
        for name, way in self.config.regions.items():
            if (
                name in (BASELINE, STRONG)
                or not name.strip()
                or not set(name).isdisjoint("/\\")
                or name.startswith(".")
            ):
                raise MobatlasError(
                    f"regions.{name}: names a folder here, and cannot be called so; choose another name"
                )
            for key, path in self._tables(way).items():
                if not path.exists():
                    raise MobatlasError(
                        f"{path}: does not exist; `regions.{name}.{key}` is relative to the configuration"
                    )
        return dict(self.config.regions)

    def _tables(self, way: RegionsConfig) -> dict[str, Path]:
        named = {"composition": way.composition, "aggregates": way.aggregates}
        return {key: self.beside / path for key, path in named.items() if path is not None}

    def options(self) -> dict[str, Any]:
        """Of the generator; files are there."""
        chosen = self.config.train
        return family_of(chosen.generator).resolve(chosen.options, self.beside)

    def baseline(self, dataset: Path, options: dict[str, Any]) -> Path:
        """Phase 1."""
        name, out = self.config.train.generator, self.out / BASELINE

        def make(same: bool) -> None:
            train(
                dataset,
                out,
                generator=name,
                preset=self.config.preset,
                values=options,
                **self._manner(same),
            )

        of = {
            "dataset": made(dataset, DATASET),
            "preset": self.config.preset,
            "generator": name,
            "options": options,
        }
        return self.stages.run(BASELINE, out, of | {"seed": self.config.seed}, make)

    def strong(self, baseline: Path) -> Path:
        """The labelled upper bound."""
        out, options = self.out / STRONG, divided(self.config.supervise.options)[1]

        def make(same: bool) -> None:
            supervise(baseline, out, strategy=STRONG, values=options, **self._manner(same))

        of = {"model": made(baseline, MODEL), "options": options, "seed": self.config.seed}
        return self.stages.run(STRONG, out, of, make)

    def chapter(
        self,
        name: str,
        regions: Path,
        dataset: TrajectoryDataset,
        baseline: Path,
        files: Mapping[str, Path],
    ) -> dict[str, Any]:
        """One way to know regions: how much it can tell, a model, its samples, and how good they are."""
        model = self._supervised(name, baseline, regions)
        known = load_regions(regions)
        samples = self.by_group(name, model, known.groups, calibrate=True)
        evaluation = self._evaluated(name, samples, dataset, model, regions, baseline, files)
        audited = (
            {"audit": str(self._audited(name, samples, dataset).relative_to(self.out))}
            if self.config.audit
            else {}
        )
        return audited | {
            "regions": str(regions.relative_to(self.out)),
            "model": str(model.relative_to(self.out)),
            "samples": str(samples.relative_to(self.out)),
            "evaluation": str(evaluation.relative_to(self.out)),
            "information": read_manifest(model, MODEL).details["report"]["information"],
            "diagnosis": diagnose(
                known.composition,
                aggregates=known.aggregates,
                randomised=known.randomised,
                population=known.population,
            ).as_dict(),
        }

    def regions(self, name: str, way: RegionsConfig, dataset: TrajectoryDataset) -> Path:
        """Composition and aggregates."""
        out, values = self.out / "regions" / name, way.model_dump(exclude_none=True)
        tables = self._tables(way)

        def make(_: bool) -> None:
            build_regions(
                dataset.path, out, **values | tables, seed=self.config.seed, overwrite=True
            )

        of = {"dataset": dataset.manifest.content_hash, "way": values, "seed": self.config.seed}
        return self.stages.run(
            f"regions {name}",
            out,
            of | {key: content_of(path) for key, path in tables.items()},
            make,
        )

    def _supervised(self, name: str, baseline: Path, regions: Path) -> Path:
        out, chosen = self.out / "models" / name, self.config.supervise

        def make(same: bool) -> None:
            how: dict[str, Any] = {"strategy": chosen.strategy, "divergence": chosen.divergence}
            how |= {"membership": chosen.membership, "values": chosen.options}
            supervise(baseline, out, regions, **how, **self._manner(same))

        of = {
            "model": made(baseline, MODEL),
            "regions": made(regions, REGIONS),
            **chosen.model_dump(mode="json"),
        }
        return self.stages.run(f"model {name}", out, of | {"seed": self.config.seed}, make)

    def everybody(self, model: Path, dataset: TrajectoryDataset) -> Path:
        """Samples of a model that knows no groups, as many as there are of all groups together."""
        groups = len(dataset.groups) if dataset.groups is not None else 1
        return self._sampled(
            BASELINE, model, {None: groups * self.config.samples.each}, calibrate=False
        )

    def by_group(self, name: str, model: Path, groups: Groups, *, calibrate: bool) -> Path:
        """As many samples of each group, in one file."""
        return self._sampled(
            name, model, dict.fromkeys(groups.names, self.config.samples.each), calibrate=calibrate
        )

    def _sampled(
        self, name: str, model: Path, wanted: Mapping[str | None, int], *, calibrate: bool
    ) -> Path:
        out, coarsen = self.out / "samples" / f"{name}.parquet", self.config.samples.coarsen

        def make(_: bool) -> None:
            out.parent.mkdir(parents=True, exist_ok=True)
            done, total = 0, sum(wanted.values())
            with track(f"sampling {name}", total, self.quiet) as tracker, _scratch(out) as folder:
                parts: dict[Path, int] = {}
                for number, (group, n) in enumerate(wanted.items()):
                    part = folder / f"{number}.parquet"
                    how: dict[str, Any] = {
                        "group": group,
                        "calibrate": calibrate and group is not None,
                    }
                    generate(model, part, n, **how, coarsen=coarsen, seed=self.config.seed + number)
                    parts[part] = n
                    done += n
                    tracker.step(done, group or "everybody")
                with new_file(out, overwrite=True) as partial:
                    _join(parts, partial)

        of = {
            "model": made(model, MODEL),
            "wanted": {str(k): v for k, v in wanted.items()},
            "calibrate": calibrate,
        }
        return self.stages.run(
            f"samples {name}", out, of | {"coarsen": coarsen, "seed": self.config.seed}, make
        )

    def _evaluated(
        self,
        name: str,
        samples: Path,
        dataset: TrajectoryDataset,
        model: Path,
        regions: Path,
        baseline: Path,
        files: Mapping[str, Path],
    ) -> Path:
        out = self.out / "evaluation" / f"{name}.json"

        def make(_: bool) -> None:
            found = evaluate(
                samples,
                dataset.path,
                baseline=files[BASELINE],
                strong=files.get(STRONG),
                seed=self.config.seed,
            )
            homes = dataset.anchors[np.intersect1d(dataset.split_people("train"), dataset.person)]
            samplers: dict[str, Sampler] = {
                BASELINE: PlainSampler(load_model(baseline).generator, homes),
                "supervised": load_sampler(load_model(model)),
            }
            regional = {
                "held_out_people": held_out_people(samplers, dataset, regions, self.config.seed),
                "held_out_regions": held_out_regions(
                    load_regions(regions), self.config.seed, parents=dataset.vocabulary.parents
                ),
            }
            out.parent.mkdir(parents=True, exist_ok=True)
            write_json(out, found.as_dict() | {"regional": regional})

        of = {name: content_of(path) for name, path in {**files, "ours": samples}.items()}
        of |= {
            "dataset": dataset.manifest.content_hash,
            "regions": made(regions, REGIONS),
            "seed": str(self.config.seed),
        }
        return self.stages.run(f"evaluation {name}", out, of, make)

    def _audited(self, name: str, samples: Path, dataset: TrajectoryDataset) -> Path:
        out = self.out / "audit" / f"{name}.json"

        def make(_: bool) -> None:
            with track(f"auditing {name}", AUDIT_STEPS, self.quiet) as tracker:
                found = audit(samples, dataset.path, seed=self.config.seed, tracker=tracker)
            out.parent.mkdir(parents=True, exist_ok=True)
            write_json(out, found.as_dict())

        of = {
            "samples": content_of(samples),
            "dataset": dataset.manifest.content_hash,
            "seed": self.config.seed,
        }
        return self.stages.run(f"audit {name}", out, of, make)

    def _manner(self, same: bool) -> dict[str, Any]:
        """How to train: on with what was begun of the same, or anew."""
        return {
            "seed": self.config.seed,
            "quiet": self.quiet,
            "resume": same,
            "overwrite": not same,
        }


@contextmanager
def _scratch(out: Path) -> Iterator[Path]:
    """A hidden folder beside a file; what a killed process left there goes first."""
    folder = beside(out, "parts")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _join(parts: Mapping[Path, int], out: Path) -> None:
    """Files of so many trajectories one after the other, numbered through; the metadata hold those of all."""
    schemas = [pq.read_schema(part) for part in parts]
    told = [json.loads(each.metadata[METADATA]) for each in schemas]
    schema = schemas[0].with_metadata({METADATA: json.dumps(told, sort_keys=True)})

    def batches() -> Iterator[pa.RecordBatch]:
        first = 0
        for part, n in parts.items():
            for batch in pq.ParquetFile(part).iter_batches():
                numbers = pc.add(batch["trajectory"], first)
                yield batch.set_column(0, "trajectory", numbers).cast(schema)
            first += n

    write_parquet(out, schema, batches())
