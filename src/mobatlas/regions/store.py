"""The REGIONS folder: composition and aggregates of the same regions, written and read back."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from mobatlas.data.dataset import TrajectoryDataset
from mobatlas.errors import MobatlasError
from mobatlas.features.maps import build_feature
from mobatlas.groups import Groups
from mobatlas.io.manifest import Manifest, as_written, read_manifest, read_parquet
from mobatlas.io.output import new_folder
from mobatlas.regions.aggregates import load_aggregates, write_aggregates
from mobatlas.regions.build import Made, from_column, from_partition, from_tables
from mobatlas.regions.disclosure import AS_COUNTED, Disclosure
from mobatlas.regions.geography import load_places, write_places
from mobatlas.regions.identifiability import Diagnosis, diagnose
from mobatlas.regions.population import load_population, write_population
from mobatlas.regions.types import Aggregates, Composition, Regions

log = logging.getLogger("mobatlas")
KIND = "regions"


def build_regions(
    dataset_path: Path | str,
    out: Path | str,
    *,
    partition: str | None = None,
    by: str | None = None,
    composition: Path | str | None = None,
    aggregates: Path | str | None = None,
    features: Sequence[str] | None = None,
    mask: Sequence[str] = (),
    shuffle_regions: bool = False,
    same_people: bool = False,
    straddle: str = "refuse",
    disclosure: Disclosure = AS_COUNTED,
    seed: int = 0,
    overwrite: bool = False,
) -> Regions:
    """Write (P, V) of a dataset: a controlled `partition`, real regions `by` a column of people, or two published tables.

    `features` default to `poi` for a partition, and to `category` for real regions, where places lie near homes. A partition
    leaves people over, so it also writes the population; real regions cover theirs, and an intercept takes up where a census
    and a panel differ. `disclosure` says what may be seen of aggregates that are counted here.
    """
    _choose_one(partition, by, composition, aggregates, same_people)
    if disclosure.asked and aggregates is not None:
        raise MobatlasError(
            f"--suppress, --round and --epsilon are for aggregates counted from visits; {aggregates} is as it was published"
        )
    dataset = TrajectoryDataset.open(dataset_path)
    with new_folder(Path(out), KIND, seed=seed, overwrite=overwrite) as folder:
        if partition is not None:
            maps = [build_feature(name, dataset.vocabulary, mask) for name in features or ("poi",)]
            made = from_partition(dataset, partition, maps, shuffle_regions, disclosure, seed)
        elif by is not None:
            maps = [
                build_feature(name, dataset.vocabulary, mask) for name in features or ("category",)
            ]
            made = from_column(
                dataset,
                by,
                composition,
                maps,
                shuffle_regions,
                same_people,
                straddle,
                disclosure,
                seed,
            )
        else:
            assert composition is not None
            assert aggregates is not None
            made = from_tables(
                dataset,
                Path(composition),
                Path(aggregates),
                features,
                mask,
                shuffle_regions,
                straddle,
                seed,
            )
        folder.details |= _details(dataset, Path(out), made, mask, shuffle_regions)
        folder.details["disclosure"] = disclosure.details() if disclosure.asked else None
        _write(folder.path, dataset, made)
    for sentence in made.warnings:
        log.warning("%s: %s", out, sentence)
    del made  # what is read back is as large
    return load_regions(out)


@dataclass(frozen=True)
class RegionsFolder:
    """An opened REGIONS folder. Files are hashed once, when it is opened, and read when needed.

    Examples
    --------
    >>> folder = RegionsFolder.open("regions")  # doctest: +SKIP
    >>> folder.regions.composition.shares.shape  # doctest: +SKIP
    (16, 8)
    """

    path: Path
    manifest: Manifest

    @classmethod
    def open(cls, folder: RegionsFolder | Path | str) -> RegionsFolder:
        """Check the files of a folder against its manifest; an open folder is returned as it is."""
        if isinstance(folder, RegionsFolder):
            return folder
        return cls(Path(folder), read_manifest(Path(folder), KIND))

    @property
    def content_hash(self) -> str:
        return self.manifest.content_hash

    @cached_property
    def regions(self) -> Regions:
        """Composition, aggregates, population and centroids."""
        with as_written(self.path):
            return _read(self.path, self.manifest.details)

    @cached_property
    def validation(self) -> Aggregates | None:
        """V of validation people, for the regions that have any; None for published tables."""
        file = self.path / "validation.parquet"
        with as_written(self.path):
            return load_aggregates(file) if file.exists() else None

    @cached_property
    def assignment(self) -> dict[str, str] | None:
        """Region of each training and validation person by user id; None for published tables."""
        file = self.path / "assignment.parquet"
        if not file.exists():
            return None
        with as_written(self.path):
            table = read_parquet(file)
            return dict(zip(table["user_id"].to_pylist(), table["region"].to_pylist(), strict=True))

    @cached_property
    def diagnosis(self) -> Diagnosis:
        """Which differences between groups these regions identify."""
        return diagnose(
            self.regions.composition,
            aggregates=self.regions.aggregates,
            randomised=self.regions.randomised,
            population=self.regions.population,
        )


def load_regions(path: Path | str) -> Regions:
    """Composition and aggregates of a REGIONS folder."""
    return RegionsFolder.open(path).regions


def _read(folder: Path, details: dict[str, Any]) -> Regions:
    groups = Groups.of(details["groups"])
    table = read_parquet(folder / "composition.parquet")
    regions = tuple(table["region"].unique().to_pylist())
    shares = table["share"].to_numpy().reshape(len(regions), len(groups))
    composition = Composition(groups, regions, shares, table["n"].to_numpy()[:: len(groups)])
    values = load_aggregates(folder / "aggregates.parquet")
    spread = read_parquet(folder / "spread.parquet")
    variance = (
        None if spread["variance"].null_count else spread["variance"].cast(pa.float64()).to_numpy()
    )
    if (values.regions, list(values.features)) != (regions, spread["feature"].to_pylist()):
        raise LookupError("tables of other regions or features")
    aggregates = replace(values, spread=variance, pooled=details["pooled"])
    population = load_population(folder / "population.parquet")
    places = load_places(folder / "places.parquet")
    return Regions(composition, aggregates, details["randomised"], details, population, places)


def _choose_one(
    partition: Any, by: Any, composition: Any, aggregates: Any, same_people: bool
) -> None:
    published = (
        composition is not None and aggregates is not None and by is None and partition is None
    )
    controlled = partition is not None and by is None and composition is None and aggregates is None
    real = by is not None and partition is None and aggregates is None
    if not (published or controlled or real):
        raise MobatlasError(
            "choose one of --partition NAME, --by COLUMN (with --composition FILE for a census), or --composition FILE with "
            "--aggregates FILE"
        )
    if same_people and (not real or composition is not None):
        raise MobatlasError("--same-people goes with --by COLUMN alone; leave it out")


def _details(
    dataset: TrajectoryDataset, out: Path, made: Made, mask: Sequence[str], shuffled: bool
) -> dict[str, Any]:
    maps = dict.fromkeys(name.partition(":")[0] for name in made.aggregates.features)
    return {
        "dataset": {
            "name": dataset.path.absolute().name,
            "path": os.path.relpath(dataset.path, out),
            "content_hash": dataset.manifest.content_hash,
        },
        "groups": made.composition.groups.as_dict(),
        "features": list(maps),
        "mask": list(mask),
        "randomised": made.randomised,
        "shuffled": shuffled,
        "pooled": made.aggregates.pooled,
        **made.details,
        "notes": made.notes,
    }


def _write(folder: Path, dataset: TrajectoryDataset, made: Made) -> None:
    p, v = made.composition, made.aggregates
    rows = {
        "region": [name for name in p.regions for _ in p.groups.names],
        "group": list(p.groups.names) * len(p.regions),
        "share": p.shares.ravel(),
        "n": np.repeat(p.n, len(p.groups)),
    }
    pq.write_table(pa.table(rows), folder / "composition.parquet")
    write_aggregates(folder / "aggregates.parquet", v)
    if made.population is not None:
        write_population(folder / "population.parquet", made.population, p.groups, v.features)
    if made.places is not None:
        write_places(folder / "places.parquet", p.regions, made.places)
    if made.validation is not None:
        write_aggregates(folder / "validation.parquet", made.validation)
    unknown = pa.nulls(len(v.features), pa.float64())
    spread = {
        "feature": list(v.features),
        "variance": unknown if v.spread is None else v.spread,
    }
    pq.write_table(pa.table(spread), folder / "spread.parquet")
    if made.region_of_person is not None:
        in_use = np.union1d(dataset.split_people("train"), dataset.split_people("val"))
        people = in_use[made.region_of_person[in_use] >= 0]
        ids = dataset.people["user_id"].take(pa.array(people))
        names = pa.array([p.regions[code] for code in made.region_of_person[people]], pa.string())
        pq.write_table(pa.table({"user_id": ids, "region": names}), folder / "assignment.parquet")
