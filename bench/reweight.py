"""Training people weighted by recovered group means, against test people; no generator."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from scipy import sparse

from bench.runner import Cell, Command, Experiment, Runner
from bench.summary import write_result
from bench.survey import (
    DIARY,
    census_column,
    check_survey,
    display_names,
    prepare_survey,
    region_columns,
)
from mobatlas.data.dataset import Trajectories, TrajectoryDataset
from mobatlas.data.types import Floats, Ints
from mobatlas.errors import MobatlasError
from mobatlas.evaluation.comparison import gap_closed
from mobatlas.evaluation.metrics import travel_distance
from mobatlas.evaluation.resampling import resample
from mobatlas.features.divergences import js, normalise
from mobatlas.features.maps import build_feature
from mobatlas.io.manifest import file_hash
from mobatlas.io.output import refuse_overlap
from mobatlas.regions.aggregates import person_means
from mobatlas.regions.build import RegionsOptions
from mobatlas.regions.recovery.recover import GROUPS_EXPLAIN, RecoveryOptions, recover
from mobatlas.regions.store import build_regions
from mobatlas.regions.types import Regions
from mobatlas.supervision.tilt import fit_tilt

MASK = ("HOME", "WORK", "OTHER")
METRICS = ("poi", "travel_distance", "category", "transitions")
# Bins of equal width up to that quantile of real trajectories, then one bin for the rest.
DISTANCE_BINS = 50
DISTANCE_QUANTILE = 0.99
RIDGE = 3e-3  # on validation people of the Santiago survey 1e-2 was no better
CONTROLLED = ("demogroups", "fullrank", "hot16", "rankdef", "messy")
# Rare places borrow from their category. Real regions are confounded with the places near them,
# so their features contain no places.
CONTROLLED_FEATURES = ("poi", "category")
REAL_FEATURES = ("category",)
# These partitions do not assign everybody: measured with and without the population.
INCOMPLETE = CONTROLLED[1:]
ALONE = "regions_alone"
SHUFFLED = "shuffle_regions"
CENSUS = "census"
SPLITS = ("test", "val")
MAX_LIMIT = 1e6  # a limit without effect
GAP_DRAWS = 50  # bootstrap draws of a gap


@dataclass(frozen=True)
class Case:
    """One kind of regions."""

    partition: str | None = None  # controlled, or
    by: str | None = None  # a region column of people
    features: tuple[str, ...] = CONTROLLED_FEATURES
    alone: bool = False  # without the population
    shuffled: bool = False  # regions are shuffled among people
    census: bool = False  # the composition comes from the census table
    groups_explain: float | None = None  # the limit; None: the default

    def row(self) -> dict[str, Any]:
        """Return the keys of its row in the result, without options that are not set."""
        keys = {
            "partition": self.partition,
            "by": self.by,
            "features": list(self.features),
            ALONE: self.alone or None,
            SHUFFLED: self.shuffled or None,
            CENSUS: self.census or None,
            "groups_explain": self.groups_explain,
        }
        return {name: value for name, value in keys.items() if value is not None}


@dataclass(frozen=True)
class ReweightOptions:
    """What is measured on a survey."""

    groups_explain: Sequence[float] = ()  # limits; with them only real regions are measured
    census: Path | None = None
    split: str = SPLITS[0]  # people to compare with

    def command(self, source: Path) -> Command:
        """Return the command that measures them."""
        data, census = display_names(source, self.census)
        return Command(
            "reweight",
            {
                "--data": [data],
                "--groups-explain": [repr(limit) for limit in self.groups_explain],
                "--census": [] if census is None else [census],
                "--split": [] if self.split == SPLITS[0] else [self.split],
            },
        )


def plan_cases(
    columns: Sequence[str], limits: Sequence[float] = (), census: str | None = None
) -> list[Case]:
    """Return every kind of regions; with limits only real regions, which depend on them.

    `census` is the region column that the census covers.
    """
    controlled = [
        *(Case(name) for name in CONTROLLED),
        *(Case(name, alone=True) for name in INCOMPLETE),
        *(Case(name, shuffled=True) for name in INCOMPLETE),
    ]
    own = [Case(by=name, features=REAL_FEATURES) for name in columns]
    real = list(own)
    if census is not None:
        real.append(Case(by=census, features=REAL_FEATURES, census=True))
    if limits:
        return [
            replace(case, groups_explain=limit) for case in real for limit in dict.fromkeys(limits)
        ]
    return [*controlled, *real, *(replace(case, shuffled=True) for case in own)]


def run(source: Path, experiment: Experiment, options: ReweightOptions) -> dict[str, Any]:
    """Reweight the people of a one-day survey in each case, and write reweighting.json.

    A seed assigns people to the regions of a partition, or halves them into people whose labels
    count and people whose visits count.
    """
    columns = _check(source, experiment.out, options)
    dataset = prepare_survey(source, experiment.out)
    census = None if options.census is None else census_column(dataset, columns, options.census)
    cases = plan_cases(columns, options.groups_explain, census)
    inputs = {
        "dataset": dataset.manifest.content_hash,
        "ridge": RIDGE,
        "prepare": DIARY,
        "split": options.split,
        "census": None if options.census is None else file_hash(options.census),
    }

    @cache
    def person_behaviour() -> Behaviour:
        return behaviour(dataset)

    def measure(case: Case, seed: int) -> dict[str, Any]:
        with tempfile.TemporaryDirectory(prefix=".regions-", dir=experiment.out) as scratch:
            regions = _build_regions(dataset, Path(scratch) / "regions", case, options, seed)
        limit = GROUPS_EXPLAIN if case.groups_explain is None else case.groups_explain
        result = reweight(
            dataset, regions, seen=person_behaviour(), split=options.split, groups_explain=limit
        )
        return {name: result[name] for name in ("metrics", "effective_sample_size")}

    cells = [
        Cell(seed, _cell_name(case), inputs | {"case": case.row()}, partial(measure, case, seed))
        for case in cases
        for seed in experiment.numbers
    ]
    command = options.command(source)
    results = Runner(experiment, "reweighting", command).run(cells)
    n = experiment.seeds
    rows = [_row(case, results[i * n : (i + 1) * n]) for i, case in enumerate(cases)]
    result = {
        **command.header(experiment),
        "measure": f"JSD in bits against {options.split} people of the group, averaged over "
        "groups; gap closed towards labelled people",
        "rows": rows,
    }
    write_result(experiment.out, "reweighting", result)
    return result


def _check(source: Path, out: Path, options: ReweightOptions) -> list[str]:
    """Refuse wrong options before anything is written; return the region columns."""
    check_survey(source, census=options.census)
    refuse_overlap(source, out)
    columns = region_columns(source)
    if not columns:
        raise MobatlasError(
            f"{source / 'people.parquet'}: has no column of regions, such as home_zone; add one"
        )
    if options.split not in SPLITS:
        raise MobatlasError(
            f"--split {options.split}: cannot be compared with; give {' or '.join(SPLITS)}"
        )
    for limit in options.groups_explain:
        if not 0 < limit <= MAX_LIMIT:
            raise MobatlasError(
                f"--groups-explain {limit:g}: give a share of the variance above 0; "
                "100 lifts the limit"
            )
    return columns


def _build_regions(
    dataset: TrajectoryDataset, out: Path, case: Case, options: ReweightOptions, seed: int
) -> Regions:
    regions_options = RegionsOptions(
        partition=case.partition,
        by=case.by,
        min_people=0,
        composition=options.census if case.census else None,
        features=case.features,
        shuffle_regions=case.shuffled,
        straddle="uniform" if case.census else "refuse",
        rest=not case.alone,
    )
    return build_regions(dataset.path, out, regions_options, seed=seed)


def case_label(row: Mapping[str, Any]) -> str:
    """Return the name of a case."""
    notes = {SHUFFLED: " (shuffled)", ALONE: " (regions alone)", CENSUS: ", census"}
    name: str = row.get("partition") or row.get("by") or ""
    limit = f", limit {row['groups_explain']:g}" if "groups_explain" in row else ""
    return name + "".join(note for key, note in notes.items() if row.get(key)) + limit


def _cell_name(case: Case) -> str:
    words = re.findall(r"[\w.+]+", case_label(case.row()))
    return "-".join(["reweight", *words])


def _row(case: Case, cells: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return means over seeds."""
    metrics: dict[str, Any] = {}
    for metric in METRICS:
        by_seed = [cell["metrics"][metric] for cell in cells]
        metrics[metric] = {kind: _mean([each[kind] for each in by_seed]) for kind in by_seed[0]}
        shares = [each["gap_closed_labelled"] for each in by_seed]
        metrics[metric]["gap_closed_labelled_by_seed"] = [
            None if share is None else round(share, 3) for share in shares
        ]
    size = round(float(np.mean([cell["effective_sample_size"] for cell in cells])))
    return {**case.row(), "seeds": len(cells), "effective_sample_size": size} | metrics


def _mean(values: Sequence[float | None]) -> float | None:
    """Return the mean over seeds; None if a seed has no value."""
    known = [value for value in values if value is not None]
    return round(float(np.mean(known)), 4) if len(known) == len(values) else None


@dataclass(frozen=True)
class Behaviour:
    """The average counts of each person in the bins of each metric."""

    counts: dict[str, sparse.csr_array]  # metric -> (people, bins)

    def distribution(self, metric: str, people: Ints, weights: Floats | None = None) -> Floats:
        """Return the shares of the bins among weighted people."""
        shares = np.full(len(people), 1 / len(people)) if weights is None else weights
        return np.asarray(normalise(self.counts[metric][people].T @ shares))

    def gap_draws(
        self, metric: str, members: Ints, train: Ints, labelled: Ints, seed: int
    ) -> Floats:
        """Bootstrap the gap from all training people to labelled ones, (draws,).

        Held-out members of the group and labelled people are resampled.
        """
        rng = np.random.default_rng([seed, len(labelled)])
        real, near = (
            normalise((resample(len(people), GAP_DRAWS, rng) + 1) @ self.counts[metric][people])
            for people in (members, labelled)
        )
        return np.asarray(js(self.distribution(metric, train), real) - js(near, real))


def behaviour(dataset: TrajectoryDataset) -> Behaviour:
    """Return POI frequency without HOME, WORK and OTHER, and the other metrics of every person."""
    trajectories = Trajectories.of(dataset)

    def per_person(counts: sparse.csr_array) -> sparse.csr_array:
        return person_means(counts, dataset.person, dataset.people.num_rows)

    masks = {"poi": MASK, "category": (), "transitions": ()}
    counts = {
        name: per_person(build_feature(name, dataset.vocabulary, mask).counts(trajectories))
        for name, mask in masks.items()
    }
    km = travel_distance(trajectories, dataset.vocabulary)
    edges = np.linspace(0, np.quantile(km, DISTANCE_QUANTILE), DISTANCE_BINS + 1)[1:]
    bins = (np.arange(len(km)), np.searchsorted(edges, km, side="right"))
    shape = (len(km), DISTANCE_BINS + 1)
    counts["travel_distance"] = per_person(sparse.csr_array((np.ones(len(km)), bins), shape=shape))
    return Behaviour(counts)


def reweight(
    dataset: TrajectoryDataset,
    regions: Regions,
    *,
    seen: Behaviour | None = None,
    split: str = "test",
    ridge: float = RIDGE,
    groups_explain: float = GROUPS_EXPLAIN,
) -> dict[str, Any]:
    """Recover group means, tilt training people to them, and compare with people of `split`.

    The baseline is unweighted training people; `labelled` is the training people of the group.
    JSD in bits is averaged over groups, and the gap closed is 1 - (tilted - labelled) /
    (baseline - labelled). Labels are used only for the comparison.
    """
    counts = behaviour(dataset) if seen is None else seen
    group = dataset.person_groups()
    train, others = (
        np.intersect1d(dataset.split_people(name), dataset.person) for name in ("train", split)
    )
    options = RecoveryOptions(groups_explain=groups_explain)
    recovered = recover(regions, options=options, parents=dataset.vocabulary.parents, quiet=True)
    phi = person_features(dataset, regions)[train]
    rows = []
    gaps = {metric: np.zeros(GAP_DRAWS) for metric in METRICS}
    for number, name in enumerate(regions.groups.names):
        members = others[group[others] == number]
        if not len(members):
            raise MobatlasError(
                f"{dataset.path}: split '{split}' has no people of group '{name}' to compare with"
            )
        tilt = fit_tilt(phi, recovered.means[number], ridge)
        samples = {
            "tilted": (train, tilt.weights),
            "baseline": (train, None),
            "labelled": (train[group[train] == number], None),
        }
        row: dict[str, Any] = {"group": name, "effective_sample_size": tilt.effective_sample_size}
        for metric in METRICS:
            real = counts.distribution(metric, members)
            row[metric] = {
                kind: float(js(counts.distribution(metric, *sample), real))
                for kind, sample in samples.items()
            }
            gaps[metric] += counts.gap_draws(metric, members, train, samples["labelled"][0], number)
        rows.append(row)
    return {
        "metrics": {
            metric: _gap([row[metric] for row in rows], gaps[metric] / len(rows))
            for metric in METRICS
        },
        "effective_sample_size": float(np.mean([row["effective_sample_size"] for row in rows])),
        "groups": rows,
        "variances": recovered.variances,
    }


def _gap(divergences: Sequence[Mapping[str, float]], draws: Floats) -> dict[str, float | None]:
    """Average over groups, and add the gap closed; None if the gap is not clear."""
    mean = {
        kind: float(np.mean([each[kind] for each in divergences]))
        for kind in ("tilted", "baseline", "labelled")
    }
    error = float(draws.std(ddof=1))
    closed = gap_closed(mean["tilted"], mean["baseline"], mean["labelled"], standard_error=error)
    return mean | {"gap_closed_labelled": closed}


def person_features(dataset: TrajectoryDataset, regions: Regions) -> sparse.csr_array:
    """Return phi (people, bins) of every person, in the bins of the aggregates."""
    trajectories = Trajectories.of(dataset)
    mask: Sequence[str] = regions.details.get("mask", ())
    names = dict.fromkeys(name.partition(":")[0] for name in regions.aggregates.features)
    maps = [build_feature(name, dataset.vocabulary, mask) for name in names]
    counts = sparse.csr_array(
        sparse.hstack([feature.counts(trajectories) for feature in maps], format="csr")
    )
    bins = [name for feature in maps for name in feature.bins]
    position = {name: number for number, name in enumerate(bins)}
    columns = [position[name] for name in regions.aggregates.features]
    means = person_means(counts, dataset.person, dataset.people.num_rows)
    return sparse.csr_array(means[:, columns])
