"""Group means recovered at several sizes: gap closed, coverage of intervals, and their scores.

Means are compared directly with held-out people, without a generator. A seed draws a new city or
split, partition and labelled sample.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from scipy import sparse, special

from bench.least_squares import least_squares, least_squares_on_simplex
from bench.recovery import LEVEL, covered
from bench.reweight import CONTROLLED, person_features
from bench.runner import Cell, Command, Experiment, Runner, cell_name, compute_once
from bench.summary import write_result
from bench.survey import DIARY, check_survey, display_names, region_columns
from mobatlas.config import load_run, merge
from mobatlas.data.city import write_city_folder
from mobatlas.data.dataset import TrajectoryDataset
from mobatlas.data.prepare.pipeline import prepare
from mobatlas.data.types import Floats, Ints
from mobatlas.evaluation.comparison import gap_closed
from mobatlas.evaluation.resampling import resample
from mobatlas.features.divergences import js, normalise
from mobatlas.pipeline.run import StepCache
from mobatlas.regions.build import RegionsOptions
from mobatlas.regions.recovery.recover import recover
from mobatlas.regions.store import build_regions
from mobatlas.regions.types import Recovery, Regions, bins_by_map, with_rest

SIZES = ("small", "paper")  # presets of simulated cities
MASK = ("HOME", "WORK", "OTHER")
LABELLED = (0, 200)  # labelled people beside the regions
DISTRICTS = "home_district"
EM_STEPS = 4
GAP_DRAWS = 50  # bootstrap draws of a gap
MIN_VISITS = 20  # of training people to a bin whose coverage counts alone
METHODS = ("recovered", "aims", "least_squares", "simplex", "em4")
COVERAGE = ("coverage_by_mean", "coverage_of_bins", "interval_score", "prior_score")


@dataclass(frozen=True)
class Source:
    """Where people come from."""

    size: str = "small"
    survey: Path | None = None

    @property
    def title(self) -> str:
        """The name in results."""
        return self.size if self.survey is None else display_names(self.survey, None)[0]


@dataclass(frozen=True)
class Case:
    """One kind of regions and labels."""

    partition: str | None = None
    by: str | None = None
    shuffled: bool = False
    labelled: int = 0

    @property
    def name(self) -> str:
        """The name of its cell and row."""
        shuffled = "shuffled " if self.shuffled else ""
        labels = f", {self.labelled} labelled" if self.labelled else ""
        return f"{shuffled}{self.partition or self.by}{labels}"

    @property
    def features(self) -> tuple[str, ...]:
        """Feature maps of the aggregates: real regions are confounded with the places nearby."""
        return ("poi", "category") if self.partition else ("category",)


def plan_cases(columns: Sequence[str], labelled: Sequence[int] = LABELLED) -> list[Case]:
    """Return partitions, region columns and shuffled regions, without labels and with them."""
    kinds = [
        *(Case(partition=name) for name in CONTROLLED),
        Case(partition="hot16", shuffled=True),
        *(Case(by=name) for name in columns),
        *(Case(by=name, shuffled=True) for name in columns[:1]),
    ]
    return [replace(kind, labelled=n) for kind in kinds for n in labelled]


def run(
    experiment: Experiment, source: Source, labelled: Sequence[int] = LABELLED, split: str = "test"
) -> dict[str, Any]:
    """Recover group means in every case, and write group-means-SIZE.json."""
    command = Command(
        "group-means",
        {
            "--size": [source.size] if source.survey is None else [],
            "--data": [] if source.survey is None else [source.title],
            "--labelled": [str(n) for n in labelled],
            "--split": [split],
        },
    )
    columns = [DISTRICTS]
    if source.survey is not None:
        check_survey(source.survey)
        columns = region_columns(source.survey)
    cases = plan_cases(columns, labelled)
    datasets = {
        seed: SeedPeople(experiment.out, source, seed, split) for seed in experiment.numbers
    }
    cells = [
        Cell(
            seed,
            cell_name("means", source.title, case.name),
            {"source": source.title, "split": split},
            partial(_measure, datasets[seed], case),
        )
        for case in cases
        for seed in experiment.numbers
    ]
    results = Runner(experiment, "group means", command).run(cells)
    n = experiment.seeds
    rows = [
        row for i, case in enumerate(cases) for row in _rows(case, results[i * n : (i + 1) * n])
    ]
    result = {
        **command.header(experiment),
        "source": source.title,
        "measure": f"JSD in bits of group means against {split} people, averaged over groups; "
        "gap_closed_labelled: from the mean of everybody to means of labelled training people; "
        f"coverage of {LEVEL:.0%} intervals, and interval scores relative to the prior's mean",
        "rows": rows,
    }
    write_result(experiment.out, f"group-means-{source.title}", result)
    return result


class SeedPeople:
    """The dataset of a seed, prepared once, with the features of its people."""

    def __init__(self, out: Path, source: Source, seed: int, split: str) -> None:
        self._out = out
        self._source = source
        self._split = split
        self.seed = seed

    @cached_property
    def dataset(self) -> TrajectoryDataset:
        """The prepared people."""
        folder = self._out / f"seed-{self.seed}"
        path = folder / f"dataset-{self._source.title}"
        inputs = {"seed": self.seed, "source": self._source.title}
        cache = StepCache(folder)
        return TrajectoryDataset.open(
            compute_once(cache, path.name, path, inputs, partial(self._prepare, path))
        )

    def _prepare(self, path: Path) -> None:
        split = {"split": {"salt": f"seed {self.seed}"}}
        if self._source.survey is not None:
            prepare(self._source.survey, path, values=merge(DIARY, split), overwrite=True)
            return
        size = self._source.size
        with tempfile.TemporaryDirectory(prefix=".city-", dir=path.parent) as scratch:
            city = Path(scratch) / "city"
            write_city_folder(city, load_run(None, size).simulate, self.seed)
            prepare(
                city, path, preset=size, values=split | {"min_people_per_place": 0}, overwrite=True
            )

    @cached_property
    def train(self) -> Ints:
        """Training people with trajectories."""
        return self._people("train")

    @cached_property
    def held_out(self) -> Ints:
        """People to compare with."""
        return self._people(self._split)

    def _people(self, split: str) -> Ints:
        dataset = self.dataset
        people = np.intersect1d(dataset.split_people(split), dataset.person)
        return people[dataset.person_groups()[people] >= 0]

    def regions(self, case: Case) -> Regions:
        """The regions of a case, from training people."""
        options = RegionsOptions(
            partition=case.partition,
            by=case.by,
            min_people=0,
            features=case.features,
            mask=MASK,
            shuffle_regions=case.shuffled,
            labelled_sample=case.labelled or None,
        )
        with tempfile.TemporaryDirectory(prefix=".regions-", dir=self._out) as scratch:
            return build_regions(
                self.dataset.path, Path(scratch) / "regions", options, seed=self.seed
            )


@dataclass(frozen=True)
class _Means:
    """Means of the groups of some people."""

    values: Floats  # (groups, bins)
    spread: Floats  # (groups, bins) variance between people
    people: Ints  # (groups,)
    visits: Floats  # (bins,)

    @classmethod
    def of(cls, phi: sparse.csr_array, group: Ints, groups: int) -> _Means:
        people = np.bincount(group, minlength=groups)  # (groups,)
        member = sparse.csr_array(
            (np.ones(len(group)), (group, np.arange(len(group)))), shape=(groups, len(group))
        )
        mean = (member @ phi).toarray() / people[:, None]
        square = (member @ phi.multiply(phi)).toarray() / people[:, None]
        return cls(
            mean,
            np.maximum(square - mean**2, 0),
            people,
            np.asarray(phi.sum(0), dtype=np.float64).ravel(),
        )


def _measure(people: SeedPeople, case: Case) -> dict[str, Any]:
    regions = people.regions(case)
    dataset = people.dataset
    phi = person_features(dataset, regions)
    group = dataset.person_groups()
    size = len(regions.groups)
    train = _Means.of(phi[people.train], group[people.train], size)
    held_out = _Means.of(phi[people.held_out], group[people.held_out], size)
    started = time.process_time()
    recovered = recover(regions, quiet=True)
    seconds = time.process_time() - started
    estimates = _estimates(regions, recovered)
    comparison = _Comparison(phi, group, people, train, held_out)
    return {
        "seconds": round(seconds, 2),
        "sources": {name: float(each.mean()) for name, each in recovered.sources.items()},
        "maps": {
            name: comparison.scores(bins, estimates) | comparison.coverage(bins, recovered)
            for name, bins in bins_by_map(recovered.features).items()
        },
    }


def _estimates(regions: Regions, recovered: Recovery) -> dict[str, Floats]:
    """Means (groups, bins) by every method; methods other than recovery read regions alone."""
    return {
        "recovered": recovered.means,
        "aims": recovered.aims,
        "least_squares": np.maximum(least_squares(regions), 0),
        "simplex": least_squares_on_simplex(regions),
        "em4": expectation_maximisation(with_rest(regions)),
    }


def expectation_maximisation(regions: Regions, steps: int = EM_STEPS) -> Floats:
    """Multiplicative updates from the population mean: M <- M P'(n V / P M) / P'n."""
    p = regions.composition.shares
    n = regions.aggregates.n
    v = np.nan_to_num(regions.aggregates.values)
    means = np.tile(n @ v / n.sum(), (p.shape[1], 1))
    for _ in range(steps):
        ratio = n[:, None] * v / np.maximum(p @ means, 1e-300)
        means = means * (p.T @ ratio) / np.maximum(p.T @ n, 1e-300)[:, None]
    return np.asarray(means)


def _divergence(estimate: Floats, truth: Floats) -> float:
    """Return the JSD in bits, averaged over groups."""
    return float(
        np.mean([js(normalise(a), normalise(b)) for a, b in zip(estimate, truth, strict=True)])
    )


@dataclass(frozen=True)
class _Comparison:
    """Features of people, and means of training and held-out people by group."""

    phi: sparse.csr_array  # (people, bins)
    group: Ints  # (people,)
    people: SeedPeople
    train: _Means
    held_out: _Means

    @cached_property
    def everybody(self) -> Floats:
        """Means of all training people."""
        return np.asarray(self.phi[self.people.train].mean(0)).ravel()

    def scores(self, bins: Ints, estimates: Mapping[str, Floats]) -> dict[str, Any]:
        """Return divergences from held-out people, and the gap that each method closes."""
        truth = self.held_out.values[:, bins]
        baseline = _divergence(np.tile(self.everybody[bins], (len(truth), 1)), truth)
        labelled = _divergence(self.train.values[:, bins], truth)
        error = self._gap_error(bins)
        result: dict[str, Any] = {"baseline": baseline, "labelled": labelled, "gap_error": error}
        for name, means in estimates.items():
            value = _divergence(means[:, bins], truth)
            result[name] = value
            result[f"{name} closed"] = gap_closed(value, baseline, labelled, standard_error=error)
        return result

    def _gap_error(self, bins: Ints) -> float:
        """Return the standard error of the gap, from resampled held-out and labelled people."""
        total = np.zeros(GAP_DRAWS)
        size = len(self.train.people)
        for number in range(size):
            rng = np.random.default_rng([self.people.seed, number])
            real, near = (
                normalise((resample(len(chosen), GAP_DRAWS, rng) + 1) @ self.phi[chosen][:, bins])
                for chosen in (
                    each[self.group[each] == number]
                    for each in (self.people.held_out, self.people.train)
                )
            )
            total += js(normalise(self.everybody[bins]), real) - js(near, real)
        return float((total / size).std(ddof=1))

    def coverage(self, bins: Ints, recovered: Recovery) -> dict[str, Any]:
        """Return coverage of intervals of distinct bins, and interval scores."""
        truth = self.held_out.values
        sampling = self.train.spread / self.held_out.people[:, None]
        inside = covered(recovered, truth, sampling, LEVEL)[:, bins]
        weight = self.train.values[:, bins].mean(0)
        frequent = self.train.visits[bins] >= MIN_VISITS
        score, reference = (
            interval_score(low, high, truth)[:, bins] for low, high in _intervals(recovered)
        )
        scale = np.maximum(weight, 1e-12)
        return {
            "coverage_by_mean": float(np.average(inside.mean(0), weights=weight)),
            "coverage_of_bins": float(inside[:, frequent].mean()) if frequent.any() else None,
            "coverage_by_group": [float(np.average(each, weights=weight)) for each in inside],
            "bins": int(frequent.sum()),
            "interval_score": float(np.average((score / scale).mean(0), weights=weight)),
            "prior_score": float(np.average((reference / scale).mean(0), weights=weight)),
        }


def _intervals(recovered: Recovery) -> list[tuple[Floats, Floats]]:
    """Return the intervals, and those of the prior around the mean of everybody."""
    reach = special.ndtri(0.5 + LEVEL / 2) * np.sqrt(recovered.prior_variance)
    mean = recovered.baseline
    return [recovered.interval(LEVEL), (mean * np.exp(-reach), mean * np.exp(reach))]


def interval_score(low: Floats, high: Floats, truth: Floats) -> Floats:
    """Return the interval score: the width, and a penalty for what lies outside."""
    outside = np.maximum(low - truth, 0) + np.maximum(truth - high, 0)
    return np.asarray(high - low + 2 / (1 - LEVEL) * outside)


def _rows(case: Case, cells: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    rows = []
    for name in cells[0]["maps"]:
        own = [cell["maps"][name] for cell in cells]
        row: dict[str, Any] = {"regions": case.name, "feature": name, "seeds": len(cells)}
        for method in METHODS:
            shares = [each[f"{method} closed"] for each in own]
            known = [share for share in shares if share is not None]
            row[method] = round(float(np.mean(known)), 3) if known else None
            if method == "recovered":
                row["by_seed"] = [None if each is None else round(each, 3) for each in shares]
        for key in COVERAGE:
            values = [each[key] for each in own if each[key] is not None]
            row[key] = round(float(np.mean(values)), 3) if values else None
        row["seconds"] = round(float(np.mean([cell["seconds"] for cell in cells])), 1)
        rows.append(row)
    return rows
