"""The REGIONS folder: composition, aggregates and population of regions, written and read."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from mobatlas.data.dataset import TrajectoryDataset
from mobatlas.data.types import Ints
from mobatlas.errors import MobatlasError, log
from mobatlas.groups import Groups
from mobatlas.io.manifest import MANIFEST, Manifest, read_manifest, read_parquet, refuse_corrupt
from mobatlas.io.output import new_folder
from mobatlas.regions.build import BuiltRegions, RegionsOptions, build_from_dataset
from mobatlas.regions.identifiability import Diagnosis, diagnose_regions
from mobatlas.regions.types import (
    Aggregates,
    Composition,
    GroupEvidence,
    Population,
    Regions,
    bins_by_map,
    blocks,
)

KIND = "regions"
COMPOSITION = "composition.parquet"
AGGREGATES = "aggregates.parquet"
VALIDATION = "validation.parquet"
POPULATION = "population.parquet"
CENTROIDS = "centroids.parquet"
SPREAD = "spread.parquet"
ASSIGNMENT = "assignment.parquet"
EVIDENCE = "evidence"  # a folder for each source, with the tables of its rows


def build_regions(
    dataset_path: Path | str,
    out: Path | str,
    options: RegionsOptions,
    *,
    seed: int = 0,
    overwrite: bool = False,
) -> Regions:
    """Build composition P and aggregates V of a dataset, and write them as a REGIONS folder.

    A partition does not use all people, so its folder also has the population. Real regions cover
    their population; an intercept absorbs differences between a census and a panel.

    Parameters
    ----------
    dataset_path
        A dataset folder, as `prepare` writes it.
    out
        The new folder.
    options
        Where the regions come from; see `RegionsOptions`.
    seed
        Random seed of assignment, halves and shuffling.
    overwrite
        Replace an existing folder.

    Returns
    -------
    Regions
        Composition and aggregates, as `load_regions` reads them.

    Examples
    --------
    >>> build_regions("dataset", "regions", RegionsOptions(partition="hot16"))  # doctest: +SKIP
    """
    dataset = TrajectoryDataset.open(dataset_path)
    with new_folder(Path(out), KIND, seed=seed, overwrite=overwrite) as folder:
        built = build_from_dataset(dataset, options, seed)
        folder.details |= _details(dataset, Path(out), built, options)
        _write(folder.path, dataset, built)
    for warning in built.warnings:
        log.warning("%s: %s", out, warning)
    del built  # free the memory before as much is read back
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
        """Check the files of a folder against its manifest; return an open folder as it is."""
        if isinstance(folder, RegionsFolder):
            return folder
        return cls(Path(folder), read_manifest(Path(folder), KIND))

    @cached_property
    def regions(self) -> Regions:
        """Composition, aggregates, population and centroids."""
        with refuse_corrupt(self.path):
            return _read(self.path, self.manifest.details)

    @cached_property
    def validation(self) -> Aggregates | None:
        """V of validation people, for the regions that have any; None for published tables."""
        file = self.path / VALIDATION
        with refuse_corrupt(self.path):
            return load_aggregates(file) if file.exists() else None

    @cached_property
    def assignment(self) -> dict[str, str] | None:
        """Region of each training and validation person by user id; None for published tables."""
        file = self.path / ASSIGNMENT
        if not file.exists():
            return None
        with refuse_corrupt(self.path):
            table = read_parquet(file)
            return dict(zip(table["user_id"].to_pylist(), table["region"].to_pylist(), strict=True))

    @cached_property
    def diagnosis(self) -> Diagnosis:
        """Which differences between groups the evidence identifies."""
        return diagnose_regions(self.regions)


def load_regions(path: Path | str) -> Regions:
    """Read composition and aggregates from a REGIONS folder.

    Parameters
    ----------
    path
        A folder that `build_regions` or `mobatlas regions` wrote.

    Returns
    -------
    Regions
        Composition, aggregates and, where known, population and centroids.

    Examples
    --------
    >>> load_regions("regions").groups.names  # doctest: +SKIP
    """
    return RegionsFolder.open(path).regions


def region_of(
    dataset: TrajectoryDataset,
    people: Ints,
    assignment: dict[str, str] | None,
    regions: Sequence[str],
) -> Ints | None:
    """The number of each person's region (people,), -1 if it has none; None without assignment."""
    if assignment is None:
        return None
    users = dataset.people["user_id"].to_pylist()
    number = {name: k for k, name in enumerate(regions)}
    return np.array(
        [number.get(assignment.get(users[person], ""), -1) for person in people.tolist()],
        dtype=np.int64,
    )


def write_aggregates(path: Path, v: Aggregates) -> None:
    """Write region, feature, value, n, and noise_sd where noise was added, region by region."""
    columns = ["value", "n", *(["noise_sd"] if v.noise is not None else [])]
    texts = [(name, pa.dictionary(pa.int32(), pa.string())) for name in ("region", "feature")]
    schema = pa.schema([*texts, *((name, pa.float64()) for name in columns)])
    features = pa.array(v.features, pa.string())
    with pq.ParquetWriter(
        path, schema, compression="zstd", store_schema=False, write_statistics=False
    ) as writer:
        for rows in blocks(len(v.regions), len(v.features)):
            values = v.values[rows]
            region, feature = np.indices(values.shape, dtype=np.int32)
            names = pa.array(v.regions[rows], pa.string())
            block = {
                "region": pa.DictionaryArray.from_arrays(region.ravel(), names),
                "feature": pa.DictionaryArray.from_arrays(feature.ravel(), features),
                "value": values.ravel(),
                "n": np.repeat(v.n[rows], len(features)),
            }
            if v.noise is not None:
                block["noise_sd"] = np.sqrt(v.noise[rows].ravel())
            writer.write_table(pa.table(block, schema))


def load_aggregates(path: Path) -> Aggregates:
    """Read a file that `write_aggregates` wrote; `read_aggregates` reads published tables."""
    file = pq.ParquetFile(path, read_dictionary=["region", "feature"])
    if not file.metadata.num_rows:
        return Aggregates((), (), np.zeros((0, 0)), np.zeros(0))
    names: dict[str, dict[str, None]] = {"region": {}, "feature": {}}  # dicts as ordered sets
    for group in range(file.num_row_groups):
        part = file.read_row_group(group, columns=list(names))
        for column, distinct in names.items():
            distinct.update(dict.fromkeys(part[column].unique().to_pylist()))
    regions, features = (tuple(distinct) for distinct in names.values())
    tables = {
        name: np.empty((len(regions), len(features)))
        for name in ("value", "noise_sd")
        if name in file.schema_arrow.names
    }
    n = []
    done = 0
    for group in range(file.num_row_groups):
        part = file.read_row_group(group, columns=[*tables, "n"])
        for name, values in tables.items():
            values.ravel()[done : done + len(part)] = part[name].to_numpy()
        n.append(part["n"].to_numpy()[-done % len(features) :: len(features)].copy())
        done += len(part)
    noise = tables["noise_sd"] ** 2 if "noise_sd" in tables else None
    return Aggregates(regions, features, tables["value"], np.concatenate(n), noise=noise)


def _details(
    dataset: TrajectoryDataset, out: Path, built: BuiltRegions, options: RegionsOptions
) -> dict[str, Any]:
    regions = built.regions
    return {
        "dataset": {
            "name": dataset.path.absolute().name,
            "path": os.path.relpath(dataset.path, out),
            "content_hash": dataset.manifest.content_hash,
        },
        "groups": regions.groups.as_dict(),
        "features": list(bins_by_map(regions.aggregates.features)),
        "mask": list(options.mask),
        "randomised": regions.randomised,
        "shuffled": options.shuffle_regions,
        "pooled": regions.aggregates.pooled,
        "feature_bound": regions.aggregates.largest,
        **regions.details,
        "evidence": [
            {"name": each.name, "kind": each.kind, "same_population": each.same_population}
            for each in regions.evidence
        ],
        "notes": built.notes,
        "disclosure": asdict(options.disclosure) if options.disclosure.active else None,
    }


def _write(folder: Path, dataset: TrajectoryDataset, built: BuiltRegions) -> None:
    p = built.regions.composition
    v = built.regions.aggregates
    _write_rows(folder, p, v, built.regions.parents)
    for number, evidence in enumerate(built.regions.evidence):
        rows = _evidence_folder(folder, number)
        rows.mkdir(parents=True)
        _write_rows(rows, *_as_regions(evidence, p.groups), built.regions.parents)
    if built.validation is not None:
        write_aggregates(folder / VALIDATION, built.validation)
    tables: dict[str, dict[str, Any]] = {}
    if (population := built.regions.population) is not None:
        tables[POPULATION] = {
            "table": ["composition"] * len(p.groups) + ["aggregates"] * len(v.features),
            "name": [*p.groups.names, *v.features],
            "value": np.concatenate([population.shares, population.values]),
            "n": np.full(len(p.groups) + len(v.features), population.n),
        }
    if (centroids := built.regions.centroids) is not None:
        tables[CENTROIDS] = {
            "region": list(p.regions),
            "lat": centroids[:, 0],
            "lon": centroids[:, 1],
        }
    if built.region_of_person is not None:
        in_use = np.union1d(dataset.split_people("train"), dataset.split_people("val"))
        people = in_use[built.region_of_person[in_use] >= 0]
        tables[ASSIGNMENT] = {
            "user_id": dataset.people["user_id"].take(pa.array(people)),
            "region": pa.array(
                [p.regions[code] for code in built.region_of_person[people]], pa.string()
            ),
        }
    for name, columns in tables.items():
        pq.write_table(pa.table(columns), folder / name)


def _evidence_folder(folder: Path, number: int) -> Path:
    return folder / EVIDENCE / str(number + 1)


def _as_regions(evidence: GroupEvidence, groups: Groups) -> tuple[Composition, Aggregates]:
    """Rows of evidence in the form of regions; `_as_evidence` is the inverse."""
    rows = tuple(str(number + 1) for number in range(evidence.rows))
    noise = None if evidence.standard_error is None else evidence.standard_error**2
    return Composition(groups, rows, evidence.shares, evidence.n), Aggregates(
        rows, evidence.features, evidence.values, evidence.n, evidence.spread, noise=noise
    )


def _as_evidence(details: dict[str, Any], p: Composition, v: Aggregates) -> GroupEvidence:
    return GroupEvidence(
        details["name"],
        details["kind"],
        p.shares,
        v.features,
        v.values,
        v.n,
        None if v.noise is None else np.sqrt(v.noise),
        v.spread,
        details["same_population"],
    )


def _write_rows(folder: Path, p: Composition, v: Aggregates, parents: Mapping[str, str]) -> None:
    """Write composition and aggregates of regions, or of rows of evidence."""
    write_aggregates(folder / AGGREGATES, v)
    composition = {
        "region": [name for name in p.regions for _ in p.groups.names],
        "group": list(p.groups.names) * len(p.regions),
        "share": p.shares.ravel(),
        "n": np.repeat(p.n, len(p.groups)),
    }
    if p.sample is not None:
        composition["sample"] = np.repeat(p.sample, len(p.groups))
    spread = {
        "feature": list(v.features),
        "variance": pa.nulls(len(v.features), pa.float64()) if v.spread is None else v.spread,
        "parent": pa.array(map(parents.get, v.features), pa.string()),
    }
    pq.write_table(pa.table(composition), folder / COMPOSITION)
    pq.write_table(pa.table(spread), folder / SPREAD)


def _read_rows(folder: Path, groups: Groups) -> tuple[Composition, Aggregates, dict[str, str]]:
    """Read what `_write_rows` wrote."""
    table = read_parquet(folder / COMPOSITION)
    regions = tuple(table["region"].unique().to_pylist())
    shares = table["share"].to_numpy().reshape(len(regions), len(groups))
    people = {
        name: table[name].to_numpy()[:: len(groups)]
        for name in ("n", "sample")
        if name in table.column_names
    }
    composition = Composition(groups, regions, shares, **people)
    aggregates = load_aggregates(folder / AGGREGATES)
    spread = read_parquet(folder / SPREAD)
    variance = spread["variance"].cast(pa.float64())
    if (aggregates.regions, list(aggregates.features)) != (regions, spread["feature"].to_pylist()):
        raise LookupError("its tables list different regions or features")
    if not variance.null_count:
        aggregates = replace(aggregates, spread=variance.to_numpy())
    parents: dict[str, str] = {}
    if "parent" in spread.column_names:  # older folders have no parents
        pairs = zip(aggregates.features, spread["parent"].to_pylist(), strict=True)
        parents = {name: parent for name, parent in pairs if parent is not None}
    return composition, aggregates, parents


def _read(folder: Path, details: dict[str, Any]) -> Regions:
    groups = Groups.of(details["groups"])
    composition, aggregates, parents = _read_rows(folder, groups)
    evidence = []
    for number, each in enumerate(details.get("evidence", ())):
        rows = _evidence_folder(folder, number)
        if not rows.is_dir():
            raise MobatlasError(
                f"{folder / MANIFEST}: it lists evidence that the folder does not have; build the "
                "regions again"
            )
        p, v, more = _read_rows(rows, groups)
        evidence.append(_as_evidence(each, p, v))
        parents |= more
    population = None
    if (folder / POPULATION).exists():
        rows = read_parquet(folder / POPULATION)
        shares, means = np.split(rows["value"].to_numpy(), [len(groups)])
        population = Population(shares, means, float(rows["n"][0].as_py()))
    centroids = None
    if (folder / CENTROIDS).exists():
        homes = read_parquet(folder / CENTROIDS)
        centroids = np.stack([homes[name].to_numpy() for name in ("lat", "lon")], axis=1)
    return Regions(
        composition,
        replace(
            aggregates,
            pooled=details["pooled"],
            largest=details.get("feature_bound"),
        ),
        details["randomised"],
        details,
        population,
        centroids,
        tuple(evidence),
        parents,
    )
