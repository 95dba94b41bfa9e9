"""Before a run: check its tables with the readers of the run, and estimate its costs.

The estimate trains a few steps and samples one tile on this machine. The constants below were
measured on one core of a server. An estimate is right within a factor of three.
"""

import logging
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from mobatlas.config import RegionsConfig, RunConfig
from mobatlas.data.dataset import TrajectoryDataset
from mobatlas.data.prepare.pipeline import Summary
from mobatlas.errors import MobatlasError, refuse_faults
from mobatlas.generators.protocol import TILE
from mobatlas.pipeline.models import configure
from mobatlas.pipeline.run import StepCache, Steps, region_files
from mobatlas.regions.aggregates import read_aggregates, refuse_interchanged
from mobatlas.regions.build import (
    BuiltRegions,
    RegionsOptions,
    build_from_dataset,
    table_context,
)
from mobatlas.regions.identifiability import diagnose_regions
from mobatlas.regions.margins import Census
from mobatlas.regions.periods import UndeclaredPeriod, infer_period
from mobatlas.regions.types import bins_by_map
from mobatlas.training.loop import Execution, Share, Stage, Trainer
from mobatlas.training.resources import peak_gb

MOST_ROWS = 200_000  # visits that are prepared; of a larger table, a sample of people
MEASURED_STEPS = 4
POOL = 4_096  # samples of a group behind its calibration
CANDIDATES = 3  # samples drawn for each calibrated one
RECOVERY = 3e-5  # seconds per region and feature
SCORES = 8e-3  # seconds per sample of the evaluation and the audit
WEIGHTS = 4  # copies on disk: the model, and a checkpoint with the state of its optimiser


@dataclass
class Check:
    """What the tables of a configuration hold, as far as they can be read, and every problem.

    Attributes
    ----------
    steps
        The steps of the run, in a temporary folder.
    problems
        One sentence each. With problems of the options, tables are only read one by one.
    span
        Days from the first to the last visit. If it is given, periods of tables that do not say
        them are inferred.
    periods
        By file name: the periods that were inferred, and the reasons.
    seconds
        Time of each step.
    """

    steps: Steps
    problems: list[str]
    span: int | None = None
    dataset: TrajectoryDataset | None = None
    summary: Summary | None = None
    regions: dict[str, BuiltRegions] = field(default_factory=dict)
    periods: dict[str, tuple[str, str]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def raise_problems(self) -> None:
        """Refuse all problems at once."""
        problems = list(dict.fromkeys(self.problems))
        if problems[1:]:
            lines = (f"\n{number}. {each}" for number, each in enumerate(problems, 1))
            raise MobatlasError(f"{len(problems)} problems:{''.join(lines)}")
        refuse_faults(dict.fromkeys(problems, True))

    @contextmanager
    def collect(self, step: str = "") -> Iterator[None]:
        """Record an error as a problem and go on; measure a step."""
        start = time.perf_counter()
        try:
            yield
        except MobatlasError as error:
            self.problems.append(
                # The dataset is in a temporary folder.
                str(error).replace(f"{self.steps.out / 'dataset'}", "the table of visits")
            )
        self.seconds[step] = time.perf_counter() - start

    def read_visits(self) -> None:
        """Prepare the visits, or a sample of them."""
        out = self.steps.out / "dataset"
        if self.steps.source.is_file() and not self.steps.config.prepare.rename:
            refuse_interchanged(self.steps.source, "--visits")
        self.summary = self.steps.prepare(out, most_rows=MOST_ROWS)
        self.dataset = TrajectoryDataset.open(out)

    def read_regions(self, name: str, source: RegionsConfig) -> None:
        """Build regions with all evidence; if that fails, check each table alone."""
        complete = self.dataset is not None and not self.problems
        if self.dataset is not None and complete:
            with self.collect(f"regions {name}"):
                self.regions[name] = self._build(self.dataset, source)
        if name in self.regions:
            return
        for key, paths in region_files(source).items():
            for path in paths:
                if (self.steps.base / path).exists():
                    with self.collect():
                        self._check_alone(key, path, source, complete)

    def _build(self, dataset: TrajectoryDataset, source: RegionsConfig) -> BuiltRegions:
        """Build regions; infer the periods of tables that do not say them."""
        per = {name: period for name, (period, _) in self.periods.items()} | source.per
        options = self.steps.regions_options(source, per, require_per=self.span is not None)
        try:
            return build_from_dataset(dataset, options, self.steps.config.seed)
        except UndeclaredPeriod as error:
            period = infer_period(*error.comparison, self.span)
            if self.span is None or period is None:
                raise
            self.periods[error.path.name] = period
        return self._build(dataset, source)

    def _check_alone(self, key: str, path: Path, source: RegionsConfig, complete: bool) -> None:
        where = self.steps.base / path
        if key == "composition":
            refuse_interchanged(where, "--composition")
            Census((where,), None, source.straddle or "refuse", source.rename).read()
        elif self.dataset is None or (key == "group_tables" and not complete):
            raise MobatlasError(f"{where}: not checked, because of the problems above")
        elif key == "aggregates":
            refuse_interchanged(where, "--aggregates")
            alone = RegionsOptions(composition=where, aggregates=where, rename=source.rename)
            read_aggregates(where, table_context(self.dataset, alone, where, ()))
        elif key == "group_tables":
            names = {path.name, getattr(source.aggregates, "name", "")}
            per = {name: period for name, period in source.per.items() if name in names}
            self._build(
                self.dataset,
                source.model_copy(update={"group_tables": (path,), "labelled": None, "per": per}),
            )

    def as_dict(self) -> dict[str, Any]:
        """What was found, for the screen and for JSON."""
        assert self.summary is not None and self.dataset is not None
        facts: dict[str, Any] = {
            "visits": self.summary.as_dict(),
            "share": self.summary.share,
            "days": self.span,
            "window": {"days": self.dataset.window_days},
            "periods": dict(self.periods),
            "regions": {},
            "notes": [*self.summary.notes],
            "warnings": [*self.summary.warnings],
        }
        for name, built in self.regions.items():
            v = built.regions.aggregates
            diagnosis = diagnose_regions(built.regions)
            facts["regions"][name] = {
                "people": None if v.pooled else float(v.n.sum()),
                "features": {each: len(bins) for each, bins in bins_by_map(v.features).items()},
                "days": built.regions.details.get("days"),
                "diagnosis": diagnosis.as_dict(),
            }
            facts["notes"] += built.notes
            facts["warnings"] += [*built.warnings, *diagnosis.warnings]
        return facts


@contextmanager
def check_run(
    config: RunConfig, base: Path, problems: Sequence[str] = (), span: int | None = None
) -> Iterator[Check]:
    """Read all tables of a configuration into a temporary folder.

    `base` is the folder that paths are relative to; for `problems` and `span` see `Check`.
    """
    with tempfile.TemporaryDirectory(prefix="mobatlas-") as work:
        steps = Steps(config, base, Path(work), StepCache(Path(work)), quiet=True)
        check = Check(steps, list(problems), span)
        if config.source is None or steps.source.exists():
            with check.collect("prepare"):
                check.read_visits()
        for name, source in config.regions.items():
            check.read_regions(name, source)
        yield check


def dry_run(config: RunConfig, base: Path) -> dict[str, Any]:
    """Check the tables of a configuration, refuse all problems, and estimate every step.

    Parameters
    ----------
    config, base
        The configuration, and the folder that its paths are relative to.

    Returns
    -------
    dict
        What the tables hold, and `costs`: seconds, memory and disk of each step.

    Examples
    --------
    >>> dry_run(load_run(Path("run.yaml")), Path())["costs"]["baseline"]  # doctest: +SKIP
    {'seconds': 214.0, 'memory_gb': 0.9, 'disk_gb': 0.006}
    """
    with check_run(config, base) as check:
        check.problems = [*check.steps.problems(), *check.problems]
        check.raise_problems()
        return check.as_dict() | {"costs": _costs(check)}


class _Stopwatch(Trainer):
    """Trains a few steps of each stage and computes the seconds that all its steps take."""

    seconds = 0.0  # of all stages
    per_step = 0.0  # of the last stage

    def run(self, stage: Stage) -> dict[str, float]:
        times = []

        def loss(network: nn.Module, step: int, share: Share) -> Tensor:
            times.append(time.perf_counter())
            return stage.loss(network, step, share)

        metrics = super().run(replace(stage, steps=MEASURED_STEPS, loss=loss))
        self.per_step = (times[-1] - times[0]) / (MEASURED_STEPS - 1)
        self.seconds += self.per_step * stage.steps
        return metrics


def _costs(check: Check) -> dict[str, dict[str, float]]:
    """Seconds, memory and disk (GB) of each step."""
    run, dataset, summary = check.steps, check.dataset, check.summary
    assert dataset is not None and summary is not None
    dataset_gb = sum(path.stat().st_size for path in dataset.path.rglob("*")) / 1e9 / summary.share
    config = configure(run.family, run.config.preset, run.generator_options)
    stopwatch = _Stopwatch(None, Execution(quiet=True))
    logging.disable(logging.WARNING)  # that a model of a few steps is bad
    try:
        model = run.family.create(config, dataset, run.config.seed)
        model.fit(dataset, stopwatch)
        start = time.perf_counter()
        model.sample(TILE)
        per_sample = (time.perf_counter() - start) / TILE
    finally:
        logging.disable(logging.NOTSET)
    trained = model.network.parameters() if run.family.trainable else ()
    model_gb = WEIGHTS * sum(each.nbytes for each in trained) / 1e9
    fit = stopwatch.per_step * config.weighted_fit.steps if run.family.trainable else 0.0
    each = run.config.samples.each
    pool = run.config.supervise.options.get("calibration", {}).get("pool") or POOL
    of_group = (pool + (1 + CANDIDATES) * each) * per_sample + SCORES * each
    costs = {
        "prepare": (check.seconds["prepare"] / summary.share, dataset_gb),
        "baseline": (stopwatch.seconds, model_gb),
    }
    if dataset.groups is not None and model_gb and run.config.strong is not False:
        costs["strong"] = (fit + len(dataset.groups) * of_group, model_gb)
    for name, built in check.regions.items():
        groups = len(built.regions.groups)
        seconds = check.seconds[f"regions {name}"] + fit + groups * of_group
        seconds += RECOVERY * built.regions.aggregates.values.size
        costs[f"regions {name}"] = (seconds, model_gb)
    # What was not read is mapped into memory too.
    memory = peak_gb() + dataset_gb * (1 - summary.share)
    return {
        name: {"seconds": seconds, "memory_gb": memory, "disk_gb": disk}
        for name, (seconds, disk) in costs.items()
    }
