"""Labelled people and group tables beside real regions: what they add on a labelled survey.

Training people are weighted by the recovered means of each group and compared with held-out people
of the group, as in `bench reweight`. A seed draws a new split, halves of regions, and labelled
people.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from bench.group_means import SeedPeople, Source
from bench.reweight import METRICS, Behaviour, behaviour, reweight
from bench.runner import Cell, Command, Experiment, Runner, cell_name
from bench.summary import write_result
from bench.survey import (
    WEEKDAY,
    census_column,
    check_survey,
    display_names,
    prepare_people,
    region_columns,
    write_people,
)
from mobatlas.data.dataset import Trajectories, TrajectoryDataset
from mobatlas.data.prepare.tables import parquet_schema
from mobatlas.data.types import Ints
from mobatlas.features.maps import build_feature
from mobatlas.regions.aggregates import aggregate, person_means
from mobatlas.regions.build import RegionsOptions
from mobatlas.regions.recovery.recover import recover
from mobatlas.regions.store import build_regions
from mobatlas.regions.types import Aggregates, Composition, Regions

FEATURE = "category"
LABELLED = (0, 100, 200, 400, 1_000)
BIASED = (200, 400)  # labelled people of biased samples
ALONE = "labels alone"
CENSUS = "census"
THIRD = "a third of the regions"
TRIPLED = "one age tripled"
WEEKEND = "table of weekend people"
ELSEWHERE = "table of the other half"
SHUFFLED = "table with shuffled groups"
TABLES = (WEEKEND, ELSEWHERE, SHUFFLED)


@dataclass(frozen=True)
class Case:
    """Regions, labelled people and a group table."""

    regions: str  # a region column, "census", or "labels alone"
    labelled: int = 0
    sample: str = ""  # how labelled people were chosen; at random by default
    people: str = ""  # the kind of table beside the regions, which decides who trains
    table: bool = False

    @property
    def name(self) -> str:
        """The name of its cell and row."""
        labels = f", {self.labelled} labelled" if self.labelled else ""
        sample = f" ({self.sample})" if self.sample else ""
        table = f", {self.people if self.table else 'without the ' + self.people}"
        return f"{self.regions}{labels}{sample}{table if self.people else ''}"


def plan_cases(columns: Sequence[str], census: bool) -> list[Case]:
    """Return every case."""
    kinds = [*columns, *([CENSUS] if census else [])]
    cases = [Case(kind, n) for kind in kinds for n in LABELLED]
    cases += [Case(ALONE, n) for n in LABELLED[1:]]
    cases += [
        Case(kind, n, sample) for kind in columns for n in BIASED for sample in (THIRD, TRIPLED)
    ]
    return cases + [
        Case(columns[0], people=people, table=table) for people in TABLES for table in (False, True)
    ]


def run(
    data: Path, experiment: Experiment, census: Path | None = None, split: str = "test"
) -> dict[str, Any]:
    """Measure every case on a survey, and write evidence.json."""
    source, table = display_names(data, census)
    options = {
        "--data": [source],
        "--census": [] if table is None else [table],
        "--split": [split],
    }
    command = Command("evidence", options)
    check_survey(data, census=census)
    columns = region_columns(data)
    cases = [
        case
        for case in plan_cases(columns, census is not None)
        if case.people != WEEKEND or WEEKDAY in parquet_schema(data / "people.parquet").names
    ]
    surveys = {seed: _Survey(experiment.out, data, seed, split) for seed in experiment.numbers}
    inputs = {"data": source, "census": table, "split": split}
    cells = [
        Cell(
            seed,
            cell_name("evidence", case.name),
            inputs,
            partial(surveys[seed].measure, case, census),
        )
        for case in cases
        for seed in experiment.numbers
    ]
    results = Runner(experiment, "evidence", command).run(cells)
    n = experiment.seeds
    rows = [_row(case, results[i * n : (i + 1) * n]) for i, case in enumerate(cases)]
    result = {
        **command.header(experiment),
        "measure": f"training people weighted by recovered means of {FEATURE} against {split} "
        "people, JSD in bits averaged over groups; gap_closed_labelled: from the unweighted people "
        "to the labelled training people of the group",
        "rows": rows,
    }
    write_result(experiment.out, "evidence", result)
    return result


class _Survey:
    """The people of a survey with the split of a seed."""

    def __init__(self, out: Path, data: Path, seed: int, split: str) -> None:
        self._out = out
        self._data = data
        self._seed = seed
        self._split = split
        self._everybody = SeedPeople(out, Source(survey=data), seed, split)
        self._behaviour: dict[str, Behaviour] = {}
        self._parts: dict[str, tuple[TrajectoryDataset, Path]] = {}

    @cached_property
    def _columns(self) -> list[str]:
        return region_columns(self._data)

    def measure(self, case: Case, census: Path | None) -> dict[str, Any]:
        """Weight training people by the means of a case, and score them."""
        with tempfile.TemporaryDirectory(prefix=".evidence-", dir=self._out) as scratch:
            dataset, table = self._people(case)
            regions = self._regions(dataset, case, census, table, Path(scratch))
        key = str(dataset.path)
        if key not in self._behaviour:
            self._behaviour[key] = behaviour(dataset)
        result = reweight(dataset, regions, seen=self._behaviour[key], split=self._split)
        notes = recover(regions, parents=dataset.vocabulary.parents, quiet=True).notes
        metrics = {name: each["gap_closed_labelled"] for name, each in result["metrics"].items()}
        return {"metrics": metrics, "contradicts": any("contradicts" in note for note in notes)}

    def _people(self, case: Case) -> tuple[TrajectoryDataset, Path | None]:
        """Return the people who train, and the table of those who do not."""
        if not case.people:
            return self._everybody.dataset, None
        kind = ELSEWHERE if case.people == SHUFFLED else case.people
        if kind not in self._parts:
            self._parts[kind] = self._split_people(kind)
        dataset, table = self._parts[kind]
        if not case.table:
            return dataset, None
        if case.people == SHUFFLED:
            table = _shuffled_table(table, self._seed)
        return dataset, table

    def _split_people(self, kind: str) -> tuple[TrajectoryDataset, Path]:
        folder = self._out / f"seed-{self._seed}" / cell_name(kind)
        condition = f'"{WEEKDAY}"'
        if kind == ELSEWHERE:
            column = self._columns[-1]
            names = sorted(
                pd.read_parquet(self._data / "people.parquet", columns=[column])[column].unique()
            )
            half = np.random.default_rng([self._seed, 1]).permutation(names)[::2]
            condition = f'"{column}" IN ({", ".join(repr(str(name)) for name in half)})'
        parts = {}
        for name, which in (("here", condition), ("there", f"NOT ({condition})")):
            write_people(self._data, folder / f"{name}-tables", which)
            salt = {"split": {"salt": f"seed {self._seed}"}}
            parts[name] = prepare_people(folder / f"{name}-tables", folder / name, salt)
        return parts["here"], _write_table(parts["there"], parts["here"], folder / "table.csv")

    def _regions(
        self,
        dataset: TrajectoryDataset,
        case: Case,
        census: Path | None,
        table: Path | None,
        scratch: Path,
    ) -> Regions:
        by = case.regions
        if case.regions == ALONE:
            by = self._columns[0]
        if case.regions == CENSUS:
            assert census is not None
            by = census_column(dataset, self._columns, census)
        chosen = case.labelled and case.sample
        options = RegionsOptions(
            by=by,
            min_people=0,
            composition=census if case.regions == CENSUS else None,
            features=(FEATURE,),
            straddle="uniform" if case.regions == CENSUS else "refuse",
            labelled=self._choose(dataset, case, scratch) if chosen else None,
            labelled_sample=case.labelled or None if not chosen else None,
            group_tables=() if table is None else (table,),
        )
        regions = build_regions(dataset.path, scratch / "regions", options, seed=self._seed)
        return _without_regions(regions) if case.regions == ALONE else regions

    def _choose(self, dataset: TrajectoryDataset, case: Case, scratch: Path) -> Path:
        """Write a table of labelled people who were not chosen at random."""
        rng = np.random.default_rng([self._seed, 2])
        labels = dataset.labels()
        assert labels is not None
        people = labels.to_pandas()
        people["region"] = dataset.people[self._columns[-1]].to_pylist()
        train = np.intersect1d(dataset.split_people("train"), dataset.person)
        people = people.iloc[train]
        attributes = list(dataset.groups.attribute_names) if dataset.groups else []
        weight = np.ones(len(people))
        if case.sample == THIRD:
            names = np.array(sorted(people["region"].unique()))
            weight = (
                people["region"].isin(rng.permutation(names)[: len(names) // 3]).to_numpy(float)
            )
        else:
            oldest = sorted(people[attributes[0]].unique())[-1]
            weight[(people[attributes[0]] == oldest).to_numpy()] = 3
        chosen = rng.choice(len(people), case.labelled, replace=False, p=weight / weight.sum())
        path = scratch / "labelled.csv"
        people.iloc[chosen][["user_id", *attributes]].to_csv(path, index=False)
        return path


def _without_regions(regions: Regions) -> Regions:
    """One region with everybody: labelled people are all the evidence on groups."""
    v = regions.aggregates
    mean = v.n @ v.values / v.n.sum()
    n = np.array([v.n.sum()])
    everybody = regions.population_shares[None]
    return replace(
        regions,
        composition=Composition(regions.groups, ("everybody",), everybody, n),
        aggregates=Aggregates(("everybody",), v.features, mean[None], n, spread=v.spread),
        population=None,
        centroids=None,
        randomised=True,
    )


def _group_means(dataset: TrajectoryDataset, people: Ints) -> Iterator[dict[str, Any]]:
    feature = build_feature(FEATURE, dataset.vocabulary, ())
    counts = feature.counts(Trajectories.of(dataset))
    phi = person_means(counts, dataset.person, dataset.people.num_rows)[people]
    assert dataset.groups is not None
    means = aggregate(phi, dataset.person_groups()[people], dataset.groups.names, feature.bins)
    for group, values, n in zip(means.regions, means.values, means.n, strict=True):
        for name, value in zip(means.features, values, strict=True):
            yield {"group": group, "feature": name, "value": value, "n": n, "per": "window"}


def _write_table(there: TrajectoryDataset, here: TrajectoryDataset, path: Path) -> Path:
    """Write the means of all people there, in the features that both have."""
    rows = pd.DataFrame(_group_means(there, np.unique(there.person)))
    known = set(build_feature(FEATURE, here.vocabulary, ()).bins)
    rows[rows["feature"].isin(known)].to_csv(path, index=False)
    return path


def _shuffled_table(path: Path, seed: int) -> Path:
    """Write the table with the means of each group under the name of another, in random order."""
    table = pd.read_csv(path)
    names = table["group"].unique()
    rng = np.random.default_rng([seed, 3])
    order = np.arange(len(names))
    while (order == np.arange(len(names))).any():
        order = rng.permutation(len(names))
    table["group"] = table["group"].map(dict(zip(names, names[order], strict=True)))
    out = path.with_name("shuffled.csv")
    table.to_csv(out, index=False)
    return out


def _row(case: Case, cells: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    row: dict[str, Any] = {"evidence": case.name, "seeds": len(cells)}
    for metric in METRICS:
        shares = [cell["metrics"][metric] for cell in cells]
        known = [share for share in shares if share is not None]
        row[metric] = round(float(np.mean(known)), 3) if len(known) == len(cells) else None
        row[f"{metric}_by_seed"] = [None if each is None else round(each, 3) for each in shares]
    if case.people:
        row["contradicts"] = sum(cell["contradicts"] for cell in cells)
    return row
