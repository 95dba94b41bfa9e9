"""Regions made in one of three ways: a controlled partition, a column of people, two published tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mobatlas.data.dataset import TrajectoryDataset
from mobatlas.data.vocabulary import FIRST_POI
from mobatlas.errors import MobatlasError, suggestion
from mobatlas.features.maps import FEATURE_MAPS, FeatureMap, build_feature
from mobatlas.groups import Groups
from mobatlas.regions.aggregates import aggregates_from_dataset, read_aggregates
from mobatlas.regions.assignment import (
    first_half,
    left_out,
    matched,
    only,
    renumbered,
    shuffled,
    sizes,
    stream,
    unmatched,
)
from mobatlas.regions.composition import composition_from_labels, read_composition, region_codes
from mobatlas.regions.disclosure import Disclosure
from mobatlas.regions.geography import region_places
from mobatlas.regions.partitions import assign, nominal_partition
from mobatlas.regions.population import population_from_labels
from mobatlas.regions.types import Aggregates, Composition, Floats, Population
from mobatlas.regions.window_check import compared_with_dataset

MOST_NOMINAL = 100_000  # shares
OF_CATEGORIES = ("category", "transitions")  # feature maps
MIN_PEOPLE = 2  # on either side: one person is no region, and has no spread


@dataclass(frozen=True)
class Made:
    """Regions before they are written."""

    composition: Composition
    aggregates: Aggregates
    randomised: bool
    details: dict[str, Any]
    population: Population | None = None
    validation: Aggregates | None = None
    region_of_person: npt.NDArray[np.int64] | None = (
        None  # (people,) of train and val people, -1: none
    )
    places: Floats | None = None  # (regions, 2) where their people live
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def from_partition(
    dataset: TrajectoryDataset,
    name: str,
    maps: list[FeatureMap],
    shuffle: bool,
    disclosure: Disclosure,
    seed: int,
) -> Made:
    """Groups dealt to regions as a partition wants, from labels of training people; validation people likewise."""
    groups, labels = _labels(dataset, f"--partition {name}", "")
    nominal = nominal_partition(name, groups, seed)
    region = np.full(len(labels), -1, dtype=np.int64)
    notes = []
    of_split = {
        split: np.intersect1d(dataset.split_people(split), dataset.person)
        for split in ("train", "val")
    }
    for split, members in of_split.items():
        try:
            region[members] = assign(labels[members], nominal, stream(seed, split))
        except MobatlasError as error:
            if split == "train":
                raise MobatlasError(
                    str(error).replace("--partition", f"--partition {name}", 1)
                ) from None
            notes.append(
                f"no validation twin: of {len(members):,} validation people no such regions can be made"
            )
    dealt = only(region, dataset.split_people("train"))
    if (
        shuffle
    ):  # only the aggregates: a composition counted on the shuffled people would be true of them
        # Among those left over too: the population less the shuffled regions must be anybody, as the regions are.
        labelled = [members[labels[members] >= 0] for members in of_split.values()]
        region = shuffled(region, labelled, seed)
    counted = only(region, dataset.split_people("train"))
    assigned = int(np.count_nonzero(counted >= 0))
    population = population_from_labels(dataset, maps, labels, groups, of_split["train"])
    return Made(
        composition_from_labels(labels, dealt, groups, nominal.regions),
        aggregates_from_dataset(dataset, maps, counted, "train", nominal.regions, disclosure),
        randomised=True,
        details={
            "way": "partition",
            "partition": name if Path(name).suffix == "" else Path(name).name,
            "separation": "controlled partition",
            "nominal": _nominal(nominal),
            "people": {"assigned": assigned, "surplus": round(population.n) - assigned},
        },
        population=None
        if disclosure.asked
        else population,  # its exact totals would give away what is hidden
        validation=_validation(dataset, maps, region, nominal.regions, disclosure),
        region_of_person=region,
        notes=notes,
        warnings=without_categories(dataset, maps),
    )


def from_column(
    dataset: TrajectoryDataset,
    by: str,
    census: Path | str | None,
    maps: list[FeatureMap],
    shuffle: bool,
    same_people: bool,
    straddle: str,
    disclosure: Disclosure,
    seed: int,
) -> Made:
    """Where people live; the composition is a census, or counted on other people than the aggregates."""
    if by not in dataset.region_columns:
        known = ", ".join(dataset.region_columns) or "none"
        raise MobatlasError(
            f"--by {by}: is no region column of {dataset.path}{suggestion(by, dataset.region_columns)} (known: {known})"
        )
    region, names = region_codes(dataset.people[by].to_pylist())
    region = only(region, dataset.person)
    if shuffle:
        placed = np.flatnonzero(region >= 0)
        region = shuffled(
            region,
            [np.intersect1d(dataset.split_people(s), placed) for s in ("train", "val")],
            seed,
        )
    train = only(region, dataset.split_people("train"))
    notes: list[str] = []
    warnings = without_categories(dataset, maps)
    if census is not None:
        separation, with_phi = "census file", train
        published = read_composition(census, dataset.groups, straddle=straddle, notes=notes)
        row = matched(names, published.regions)  # (regions,) of the census, -1: not in it
        # A census may well be of more regions than anybody was seen in.
        warnings += left_out(Path(census).name, (), by, unmatched(published.regions, names, row)[1])
        warnings += absent_groups(Path(census).name, published)
        counted = row >= 0
    else:
        groups, labels = _labels(
            dataset, f"--by {by}", "; pass --composition FILE with a census instead"
        )
        separation = "same people" if same_people else "disjoint halves"
        with_labels = with_phi = only(train, np.flatnonzero(labels >= 0))
        if not same_people:
            first = first_half(dataset, seed)
            with_labels, with_phi = (
                only(with_labels, np.flatnonzero(first)),
                only(train, np.flatnonzero(~first)),
            )
        counted = sizes(with_labels, len(names)) >= MIN_PEOPLE
    keep = np.flatnonzero(counted & (sizes(with_phi, len(names)) >= MIN_PEOPLE))
    if not len(keep):
        where = (
            f"in common with {census}"
            if census is not None
            else f"with {MIN_PEOPLE} people on either side"
        )
        raise MobatlasError(
            f"--by {by}: no region {where}; choose a coarser column or check its ids"
        )
    kept, number = renumbered(names, keep)
    if census is not None:
        composition = Composition(
            published.groups, kept, published.shares[row[keep]], published.n[row[keep]]
        )
    else:
        composition = composition_from_labels(labels, number[with_labels], groups, kept)
    return Made(
        composition,
        aggregates_from_dataset(dataset, maps, number[with_phi], "train", kept, disclosure),
        randomised=False,
        details={
            "way": "by",
            "by": by,
            "separation": separation,
            "census": Path(census).name if census is not None else None,
            "dropped_regions": len(names) - len(kept),
        },
        validation=_validation(dataset, maps, number[region], kept, disclosure),
        region_of_person=number[region],
        places=region_places(dataset, number[train], len(kept)),
        notes=notes,
        warnings=warnings,
    )


def from_tables(
    dataset: TrajectoryDataset,
    composition: Path,
    aggregates: Path,
    features: Sequence[str] | None,
    mask: Sequence[str],
    shuffle: bool,
    straddle: str,
    seed: int,
) -> Made:
    """The regions that two published tables have in common."""
    notes: list[str] = []
    p = read_composition(composition, dataset.groups, straddle=straddle, notes=notes)
    vocabulary = dataset.vocabulary
    known = {name for each in FEATURE_MAPS for name in build_feature(each, vocabulary).bins}
    v = read_aggregates(aggregates, known, notes)
    chosen = features or tuple(dict.fromkeys(name.partition(":")[0] for name in v.features))
    maps = [build_feature(name, vocabulary, mask) for name in chosen]
    wanted = {name for each in maps for name in each.bins}
    columns = np.flatnonzero([name in wanted for name in v.features])
    if not len(columns):
        raise MobatlasError(
            f"{aggregates}: has no feature of {', '.join(chosen)}; choose another --feature"
        )
    row = matched(v.regions, p.regions)
    keep = np.flatnonzero(row >= 0)
    if not len(keep):
        raise MobatlasError(
            f"{composition} and {aggregates}: no region in common ('{p.regions[0]}' in one, '{v.regions[0]}' in the other); "
            "give both the same ids"
        )
    regions, _ = renumbered(v.regions, keep)
    rows = row[keep]
    if shuffle:
        rows = np.random.default_rng(stream(seed, "shuffle")).permutation(rows)
    kept = replace(
        v,
        regions=regions,
        features=tuple(v.features[number] for number in columns.tolist()),
        values=v.values[np.ix_(keep, columns)],
        n=v.n[keep],
        noise=None if v.noise is None else v.noise[np.ix_(keep, columns)],
    )
    only_p, only_v = unmatched(p.regions, v.regions, row)
    return Made(
        Composition(p.groups, regions, p.shares[rows], p.n[rows]),
        kept,
        randomised=False,
        details={
            "way": "tables",
            "separation": "published tables",
            "census": composition.name,
            "aggregates": aggregates.name,
            "only_in_composition": len(only_p),
            "only_in_aggregates": len(only_v),
        },
        notes=notes,
        warnings=[
            *left_out(composition.name, only_p, aggregates.name, only_v),
            *absent_groups(composition.name, p),
            *compared_with_dataset(kept, dataset, maps),
        ],
    )


def absent_groups(census: str, composition: Composition) -> list[str]:
    """A group that a published table has in no region is rather a part of the table that is missing."""
    absent = [
        name
        for name, some in zip(composition.groups.names, composition.shares.sum(0), strict=True)
        if not some
    ]
    return (
        [f"{census} counts nobody of {'; '.join(absent)}: is a part of the table missing?"]
        if absent
        else []
    )


def without_categories(dataset: TrajectoryDataset, maps: Sequence[FeatureMap]) -> list[str]:
    """Categories of places that have none tell home, work and other alone."""
    asked = [each.name for each in maps if each.name in OF_CATEGORIES]
    if not asked or any(dataset.vocabulary.categories[FIRST_POI:]):
        return []
    return [
        f"no place has a category, so that {' and '.join(asked)} tell home, work and other alone; add a column category"
    ]


def _nominal(aimed: Composition) -> dict[str, Any] | None:
    """For the manifest, unless that would be megabytes: the partition's name and the seed make it again."""
    if aimed.shares.size > MOST_NOMINAL:
        return None
    return {"regions": list(aimed.regions), "shares": aimed.shares.tolist()}


def _labels(
    dataset: TrajectoryDataset, option: str, advice: str
) -> tuple[Groups, npt.NDArray[np.int64]]:
    if dataset.groups is None or dataset.labels() is None:
        raise MobatlasError(f"{option}: {dataset.path} has no labels to count groups from{advice}")
    return dataset.groups, dataset.person_groups()


def _validation(
    dataset: TrajectoryDataset,
    maps: list[FeatureMap],
    region: npt.NDArray[np.int64],
    regions: Sequence[str],
    disclosure: Disclosure,
) -> Aggregates | None:
    """The twin of V from validation people, for the regions that have any."""
    of_val = only(region, dataset.split_people("val"))
    present = np.flatnonzero(sizes(of_val, len(regions)))
    if not len(present):
        return None
    names, number = renumbered(regions, present)
    return aggregates_from_dataset(dataset, maps, number[of_val], "val", names, disclosure)
