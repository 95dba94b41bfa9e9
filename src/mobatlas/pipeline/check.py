"""Check the tables of a configuration before anything is trained, with the readers of a run."""

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from mobatlas.config import RegionsConfig, RunConfig
from mobatlas.data.dataset import TrajectoryDataset
from mobatlas.data.prepare.pipeline import Summary
from mobatlas.errors import MobatlasError
from mobatlas.pipeline.run import StepCache, Steps
from mobatlas.regions.aggregates import TableContext, read_aggregates, refuse_interchanged
from mobatlas.regions.build import (
    BuiltRegions,
    RegionsOptions,
    build_without_evidence,
    read_evidence,
    table_context,
    with_evidence,
)
from mobatlas.regions.identifiability import diagnose_regions
from mobatlas.regions.margins import Census
from mobatlas.regions.patterns import is_patterns
from mobatlas.regions.periods import UndeclaredPeriod, infer_period
from mobatlas.regions.types import ReportedEvidence, bins_by_map

MOST_ROWS = 200_000  # visits that are prepared; of a larger table, a sample of people
MOST_USERS = 300  # of a simulated city

Value = TypeVar("Value")


@dataclass
class Check:
    """What the tables of a configuration hold, as far as they can be read, and every problem.

    Attributes
    ----------
    steps
        The steps of the run, in a temporary folder.
    infer
        Whether to find the periods of tables that do not have one.
    build
        Whether to build regions; otherwise each table is only read.
    share
        The share of the visits that was read.
    periods
        By file name: the periods that were found, and the reasons.
    unchecked
        What could not be checked, because another table could not be read.
    """

    steps: Steps
    infer: bool = False
    build: bool = True
    dataset: TrajectoryDataset | None = None
    summary: Summary | None = None
    span: int | None = None  # days from the first to the last visit, if known
    share: float = 1.0
    seconds: dict[str, float] = field(default_factory=dict)  # of steps
    regions: dict[str, BuiltRegions] = field(default_factory=dict)
    periods: dict[str, tuple[str, str]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)

    def raise_problems(self) -> None:
        """Refuse all problems at once."""
        others = [f"not checked: {each}" for each in self.unchecked]
        if len(self.problems) + len(others) > 1:
            lines = [f"{number}. {each}" for number, each in enumerate(self.problems, 1)]
            count = f"{len(lines)} problem{'s' if len(lines) > 1 else ''}"
            raise MobatlasError("\n".join([f"{count}; nothing was written", *lines, *others]))
        for problem in self.problems:
            raise MobatlasError(problem)

    @contextmanager
    def collect(self) -> Iterator[None]:
        """Record an error as a problem and go on."""
        try:
            yield
        except MobatlasError as error:
            self.add(str(error))

    def add(self, *problems: str) -> None:
        """Record problems, each once."""
        for problem in problems:
            sentence = problem.replace(str(self.steps.out / "dataset"), str(self.steps.source))
            self.problems += [sentence] * (sentence not in self.problems)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Measure a step."""
        start = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - start

    def read_visits(self) -> None:
        """Prepare the visits, or a sample of them."""
        out = self.steps.out / "dataset"
        try:
            with self.timed("prepare"):
                self.summary = self.steps.prepare(out, most_rows=MOST_ROWS)
        except MobatlasError:
            refuse_interchanged(self.steps.source, "--visits")
            raise
        self.share *= self.summary.share
        self.dataset = TrajectoryDataset.open(out)
        if self.span is None:
            self.span = days_of_visits(self.dataset)[0]

    def read_regions(self, name: str, source: RegionsConfig) -> None:
        """Build regions and read the evidence beside them; of tables, read at least each alone."""
        problems = len(self.problems)
        dataset = self.dataset
        tables = self.steps.tables(source)
        complete = all(path.exists() for paths in tables.values() for path in paths)
        if dataset is not None and complete and self.build:
            with self.collect(), self.timed(f"regions {name}"):
                self.regions[name] = self._build(dataset, self.steps.regions_options(source))
        if name not in self.regions:
            whole = self.problems[problems:]
            self.problems[problems:] = []
            self._read_each(source)
            self.add(*whole)
            for key in ("labelled", "group_tables"):
                self.unchecked += map(str, tables.get(key, ()))

    def _build(self, dataset: TrajectoryDataset, options: RegionsOptions) -> BuiltRegions:
        seed = self.steps.config.seed
        options = replace(options, require_per=self.infer)
        built = self._with_periods(partial(build_without_evidence, dataset, seed=seed), options)
        parts = []
        for source in options.evidence:
            with self.collect():
                read = partial(_evidence, source, dataset, built, seed)
                parts.append(self._with_periods(read, options))
        return with_evidence(dataset, built, parts)

    def _with_periods(self, read: Callable[[RegionsOptions], Value], options: RegionsOptions) -> Value:
        """Read a table; find the period of one that has none."""
        found = {name: period for name, (period, _) in self.periods.items()}
        try:
            return read(replace(options, per={**options.per, **found}))
        except UndeclaredPeriod as error:
            assert self.dataset is not None
            if not self.infer:
                raise
            days = self.dataset.window_days
            period = infer_period(*error.levels, days, self.span)
            if period is None:
                raise
            self.periods[error.path.name] = period
        return self._with_periods(read, options)

    def _read_each(self, source: RegionsConfig) -> None:
        """Read the tables of the composition and the aggregates alone."""
        tables = self.steps.tables(source)
        census = [path for path in tables.get("composition", ()) if path.exists()]
        groups = None if self.dataset is None else self.dataset.groups
        for path in census:
            with self.collect():
                refuse_interchanged(path, "--composition")
                Census((path,), None, source.straddle or "refuse", source.rename).read(
                    groups if len(census) == 1 else None
                )
        for path in filter(Path.exists, tables.get("aggregates", ())):
            with self.collect():
                refuse_interchanged(path, "--aggregates")
                context = TableContext(rename=source.rename)
                if self.dataset is not None:
                    panel = next(iter(tables.get("home_panel", ())), None)
                    options = RegionsOptions(
                        composition=path, aggregates=path, home_panel=panel, rename=source.rename
                    )
                    context = table_context(self.dataset, options, path, ())
                elif is_patterns(path):  # its places cannot be found without those of the visits
                    self.unchecked.append(str(path))
                    continue
                read_aggregates(path, context)

    def as_dict(self) -> dict[str, Any]:
        """What was found, for the screen and for JSON."""
        facts: dict[str, Any] = {"notes": [], "warnings": [], "share": self.share, "regions": {}}
        if self.summary is not None and self.dataset is not None:
            facts["visits"] = self.summary.as_dict()
            facts["window_days"] = self.dataset.window_days
            facts["days"] = self.span
            facts["notes"] += self.summary.notes
            facts["warnings"] += self.summary.warnings
        for name, built in self.regions.items():
            regions = built.regions
            diagnosis = diagnose_regions(regions)
            facts["regions"][name] = {
                "regions": diagnosis.regions,
                "attributes": dict(diagnosis.attributes),
                "people": None if regions.aggregates.pooled else float(regions.aggregates.n.sum()),
                "features": {
                    each: len(bins) for each, bins in bins_by_map(regions.aggregates.features).items()
                },
                "days": regions.details.get("days"),
                "evidence": [each.title for each in regions.evidence],
                "diagnosis": diagnosis.as_dict(),
            }
            facts["notes"] += built.notes
            facts["warnings"] += [*built.warnings, *diagnosis.warnings]
        facts["periods"] = {
            name: {"per": period, "reason": reason}
            for name, (period, reason) in self.periods.items()
        }
        return facts


@contextmanager
def check_run(
    config: RunConfig,
    base: Path,
    *,
    infer: bool = False,
    build: bool = True,
    span: int | None = None,
) -> Iterator[Check]:
    """Read all tables of a configuration into a temporary folder.

    Parameters
    ----------
    config, base
        The configuration, and the folder that its paths are relative to.
    infer, build, span
        As in `Check`.
    """
    city = config.simulate
    users = min(city.users, MOST_USERS)
    small = config.model_copy(update={"simulate": city.model_copy(update={"users": users})})
    with tempfile.TemporaryDirectory(prefix="mobatlas-") as work:
        steps = Steps(small, base, Path(work), StepCache(Path(work)), quiet=True)
        check = Check(steps, infer, build, span=span)
        check.share = users / city.users if config.source is None else 1.0
        if config.source is None or steps.source.exists():
            with check.collect():
                check.read_visits()
        for name, source in config.regions.items():
            check.read_regions(name, source)
        yield check


def days_of_visits(dataset: TrajectoryDataset) -> tuple[int, float]:
    """Days from the first to the last visit, and the median days with visits, of 1-day windows."""
    days = dataset.first_days
    return int(days.max() - days.min()) + 1, float(np.median(np.bincount(dataset.person)))


def _evidence(
    source: Path | int,
    dataset: TrajectoryDataset,
    built: BuiltRegions,
    seed: int,
    options: RegionsOptions,
) -> ReportedEvidence:
    return read_evidence(source, dataset, built, options, seed)
