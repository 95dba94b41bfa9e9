"""The MODEL folder: which generator, its weights, the vocabulary it writes in, and the lengths of what it was trained on."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import BaseModel, ConfigDict

from mobatlas.config import build
from mobatlas.data.arrays import Floats, Ints
from mobatlas.data.dataset import TrajectoryDataset
from mobatlas.data.schema import ANCHORS
from mobatlas.data.vocabulary import FIRST_POI, SCHEMA, SPECIALS, Vocabulary
from mobatlas.errors import MobatlasError, suggestion
from mobatlas.generators.protocol import Generator, family_of, generator_names
from mobatlas.groups import Groups
from mobatlas.io.manifest import (
    MANIFEST,
    Manifest,
    as_written,
    read_manifest,
    read_parquet,
    write_json,
    write_parquet,
)
from mobatlas.io.output import unfinished
from mobatlas.regions.store import RegionsFolder

log = logging.getLogger("mobatlas")
KIND = "model"
CONFIG = "config.json"
VOCABULARY = "vocabulary.parquet"
LENGTHS = "lengths.json"
COMPOSITION, REGION_ANCHORS = (
    "composition.parquet",
    "anchors.parquet",
)  # of a model that was supervised with regions
SUPERVISION = "supervision"  # what the manifest of a supervised model says of it
MEANING = (
    "poi_id",
    "lat",
    "lon",
    "category",
)  # what a token stands for; how often it was visited is not part of it


Values = TypeVar("Values", bound=BaseModel)


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class _Description(_File):
    """config.json."""

    generator: str
    config: dict[str, Any]
    groups: dict[str, list[str]] | None


class _Lengths(_File):
    """lengths.json."""

    counts: list[int]


class _Trained(_File):
    """What the manifest says of the dataset."""

    path: str
    hash: str


@dataclass(frozen=True)
class Model:
    """A trained generator with what is known of its training."""

    path: Path
    name: str  # of the family
    manifest: Manifest
    generator: Generator
    lengths: Ints  # (max_length + 1,) training trajectories by number of tokens; longer ones count as the longest
    dataset: Path  # where its dataset should be
    dataset_hash: str  # of the content that it was trained on

    @property
    def groups(self) -> Groups | None:
        """The groups it can be asked for: those of its generator, or those by which its samples are chosen (`resample`)."""
        chosen = self.manifest.details.get(SUPERVISION, {}).get("groups")
        return self.generator.groups or (Groups.of(chosen) if chosen else None)

    @property
    def strategy(self) -> str | None:
        """By which it was supervised; None after phase 1."""
        found: str | None = self.manifest.details.get(SUPERVISION, {}).get("strategy")
        return found

    def open_dataset(self) -> TrajectoryDataset:
        """The dataset that it was trained on, or another one with the same vocabulary."""
        if not self.dataset.exists():
            raise MobatlasError(
                f"{self.path}: there is no dataset at {self.dataset}; pass --dataset with the folder that it is in now"
            )
        dataset = TrajectoryDataset.open(self.dataset)
        if dataset.manifest.content_hash != self.dataset_hash:
            ours, theirs = (
                tokens.table.select(MEANING)
                for tokens in (self.generator.vocabulary, dataset.vocabulary)
            )
            if not ours.equals(theirs):
                raise MobatlasError(
                    f"{self.dataset}: its vocabulary is not the one that {self.path} was trained on; pass --dataset with the "
                    "one that it was"
                )
            log.warning(
                "%s: is not the dataset that %s was trained on, though its places are",
                self.dataset,
                self.path,
            )
        return dataset

    def population(self) -> Floats:
        """Where training people live and work (people, 4): as a model supervised with regions keeps it, or of the dataset."""
        if not (self.path / REGION_ANCHORS).exists():
            dataset = self.open_dataset()
            return dataset.anchors[dataset.split_people("train")]
        with as_written(self.path):
            anchors = _columns(read_parquet(self.path / REGION_ANCHORS))
            return anchors[np.lexsort(anchors.T)]

    def region(self, name: str, regions: Path | None = None) -> tuple[Floats, Floats | None]:
        """Where people of a region live and work (people, 4), and p(d|g) (groups,), None if the model knows no groups.

        A model that was supervised with regions keeps both; for another one a REGIONS folder says who of the training people
        lives there.
        """
        own = (self.path / COMPOSITION).exists() and (self.path / REGION_ANCHORS).exists()
        folder = self.path if own else regions
        if folder is None:
            raise MobatlasError(
                f"--region {name}: {self.path} knows no regions; pass --regions with the folder that `mobatlas regions` wrote"
            )
        if own and regions is not None:
            log.warning(
                "%s: holds its own regions, so --regions %s is not read", self.path, regions
            )
        opened = None if own else RegionsFolder.open(folder)  # checks the folder before reading
        shares = self._shares(name, folder)
        anchors = self._kept_anchors(name) if opened is None else self._anchors_of(name, opened)
        if not len(anchors):
            raise MobatlasError(
                f"--region {name}: {folder} knows no training person who lives there; pass --anchors with a table of homes "
                "and groups instead"
            )
        return anchors, shares

    def _shares(self, region: str, folder: Path) -> Floats | None:
        with as_written(folder):
            table = read_parquet(folder / COMPOSITION, columns=["region", "group", "share"])
        known, groups = table["region"].unique().to_pylist(), self.groups
        if region not in known:
            raise MobatlasError(
                f"--region {region}: is no region of {folder}{suggestion(region, known)}"
            )
        if groups is None:
            return None
        rows = table.filter(pc.equal(table["region"], region)).to_pylist()
        shares = {row["group"]: row["share"] for row in rows}
        if set(shares) != set(groups.names):
            raise MobatlasError(
                f"{folder}: its groups ({'; '.join(shares)}) are not those of {self.path} ({'; '.join(groups.names)})"
            )
        return np.array([shares[name] for name in groups.names])

    def _kept_anchors(self, region: str) -> Floats:
        with as_written(self.path):
            table = read_parquet(self.path / REGION_ANCHORS)
            return _columns(table.filter(pc.equal(table["region"], region)))

    def _anchors_of(self, region: str, regions: RegionsFolder) -> Floats:
        dataset = self.open_dataset()
        assignment = regions.assignment or {}
        origin = regions.manifest.details["dataset"]
        if origin["content_hash"] != dataset.manifest.content_hash:
            log.warning(
                "%s: was made of another dataset than %s; people are matched by user_id",
                regions.path,
                dataset.path,
            )
        train, users = dataset.split_people("train"), dataset.people["user_id"].to_pylist()
        lives = np.array(
            [assignment.get(users[person]) == region for person in train.tolist()], dtype=bool
        )
        return dataset.anchors[train[lives]]


def _columns(table: pa.Table) -> Floats:
    """Anchors of a table, (rows, 4)."""
    return np.stack(
        [table[name].to_numpy(zero_copy_only=False).astype(np.float64) for name in ANCHORS], axis=1
    )


def save_model(folder: Path, generator: Generator, name: str, dataset: TrajectoryDataset) -> None:
    """Write a generator of the family of that name, trained on the dataset, into a folder that exists."""
    groups = generator.groups.as_dict() if generator.groups is not None else None
    config = generator.config.model_dump(mode="json")
    write_json(folder / CONFIG, {"generator": name, "config": config, "groups": groups})
    write_json(folder / LENGTHS, {"counts": length_counts(dataset, generator.max_length).tolist()})
    write_parquet(folder / VOCABULARY, SCHEMA, generator.vocabulary.table.to_batches())
    generator.save(folder)


def length_counts(dataset: TrajectoryDataset, longest: int) -> Ints:
    """How many training trajectories have each number of tokens, those past the longest truncated: (longest + 1,)."""
    lengths = np.minimum(dataset.lengths[dataset.split("train")], longest)
    return np.bincount(lengths, minlength=longest + 1)


def load_model(path: Path | str, dataset: Path | None = None) -> Model:
    """Read a MODEL folder, every file checked; `dataset` says where its dataset is if that is not where it was."""
    folder = Path(path)
    if not (folder / MANIFEST).exists() and unfinished(folder).is_dir():
        raise MobatlasError(
            f"{folder}: is not trained to the end; continue it with the command that began it and --resume "
            f"(mobatlas train ... --out {folder} --resume)"
        )
    manifest = read_manifest(folder, KIND)
    with as_written(folder):
        return _loaded(folder, manifest, dataset)


def _loaded(folder: Path, manifest: Manifest, dataset: Path | None) -> Model:
    trained = _built(_Trained, manifest.details.get("dataset"), folder / MANIFEST)
    described = _built(_Description, _json(folder / CONFIG), folder / CONFIG)
    generator = _generator(folder, described)
    return Model(
        path=folder,
        name=described.generator,
        manifest=manifest,
        generator=generator,
        lengths=_lengths(folder / LENGTHS, generator.max_length),
        dataset=dataset or Path(trained.path),
        dataset_hash=trained.hash,
    )


def _generator(folder: Path, described: _Description) -> Generator:
    name, where = described.generator, folder / CONFIG
    if name not in generator_names():
        known = generator_names()
        raise MobatlasError(
            f"{where}: the generator '{name}' does not exist{suggestion(name, known)} (known: {', '.join(known)})"
        )
    family = family_of(name)
    try:
        groups = Groups.of(described.groups) if described.groups is not None else None
    except MobatlasError as error:
        raise MobatlasError(f"{where}: {error}") from None
    config = build(family.config, described.config, str(where))
    return family.load(folder, config, _vocabulary(folder / VOCABULARY), groups)


def _vocabulary(path: Path) -> Vocabulary:
    try:
        table = read_parquet(path)
    except (OSError, pa.ArrowInvalid):
        raise MobatlasError(f"{path}: not a readable Parquet file; train the model again") from None
    if (
        not table.schema.equals(SCHEMA)
        or table["token"].to_pylist() != list(range(table.num_rows))
        or tuple(table["poi_id"].slice(0, FIRST_POI).to_pylist()) != SPECIALS
    ):
        raise MobatlasError(
            f"{path}: is not a table of tokens as mobatlas writes it; train the model again"
        )
    return Vocabulary(table)


def _lengths(path: Path, longest: int) -> Ints:
    counts = np.array(_built(_Lengths, _json(path), path).counts, dtype=np.int64)
    if len(counts) != longest + 1 or counts[0] != 0 or counts.min() < 0 or not counts.any():
        raise MobatlasError(
            f"{path}: does not count trajectories of 1 to {longest} tokens; train the model again"
        )
    return counts


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        raise MobatlasError(
            f"{path}: is missing or not valid JSON; train the model again"
        ) from None


def _built(model: type[Values], values: Any, where: Path) -> Values:
    if not isinstance(values, dict):
        raise MobatlasError(
            f"{where}: does not hold what mobatlas writes there; train the model again"
        )
    return build(model, values, str(where))
