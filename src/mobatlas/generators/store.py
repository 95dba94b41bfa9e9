"""The MODEL folder: a generator, its weights and its vocabulary."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import BaseModel, ConfigDict

from mobatlas.config import build
from mobatlas.data.dataset import TrajectoryDataset
from mobatlas.data.types import (
    ANCHORS,
    FIRST_POI,
    SPECIALS,
    VOCABULARY_SCHEMA,
    Floats,
    Vocabulary,
)
from mobatlas.errors import MobatlasError, log, refuse_unknown, suggestion
from mobatlas.generators.protocol import GENERATORS, Generator, family_of
from mobatlas.groups import Groups
from mobatlas.io.manifest import (
    MANIFEST,
    Manifest,
    read_manifest,
    read_parquet,
    refuse_corrupt,
    write_json,
    write_parquet,
)
from mobatlas.io.output import checkpoint_folder
from mobatlas.regions.store import RegionsFolder

KIND = "model"
CONFIG = "config.json"
VOCABULARY = "vocabulary.parquet"
COMPOSITION = "composition.parquet"  # of a model that was supervised with regions
REGION_ANCHORS = "anchors.parquet"  # likewise
SUPERVISION = "supervision"  # key of the manifest of a supervised model
MEANING = ("poi_id", "lat", "lon", "category")  # what a token stands for; visits may differ

Values = TypeVar("Values", bound=BaseModel)


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class _Description(_File):
    """config.json."""

    generator: str
    config: dict[str, Any]
    groups: dict[str, list[str]] | None


class _Dataset(_File):
    """The dataset in manifest.json."""

    path: str
    hash: str


@dataclass(frozen=True)
class Model:
    """A trained generator, and facts about its training.

    Attributes
    ----------
    path
        The MODEL folder.
    name
        The family of the generator.
    manifest
        The manifest of the folder.
    generator
        The generator.
    dataset
        The folder of its dataset.
    dataset_hash
        The content hash of the dataset that it was trained on.

    Examples
    --------
    >>> from mobatlas import load_model
    >>> model = load_model("model")  # doctest: +SKIP
    >>> model.generator.sample(100, seed=1)  # doctest: +SKIP
    """

    path: Path
    name: str
    manifest: Manifest
    generator: Generator
    dataset: Path
    dataset_hash: str

    @property
    def groups(self) -> Groups | None:
        """The groups of its generator, or those that `resample` chooses samples for."""
        groups = self.manifest.details.get(SUPERVISION, {}).get("groups")
        return self.generator.groups or (Groups.of(groups) if groups else None)

    @property
    def strategy(self) -> str | None:
        """The strategy that supervised it; None after phase 1."""
        return self.manifest.details.get(SUPERVISION, {}).get("strategy")

    def open_dataset(self) -> TrajectoryDataset:
        """Open its dataset, or another one with the same vocabulary."""
        if not self.dataset.exists():
            raise MobatlasError(
                f"{self.path}: there is no dataset at {self.dataset}; pass --dataset with its "
                "new folder"
            )
        dataset = TrajectoryDataset.open(self.dataset)
        if dataset.manifest.content_hash != self.dataset_hash:
            expected = self.generator.vocabulary.table.select(MEANING)
            if not expected.equals(dataset.vocabulary.table.select(MEANING)):
                raise MobatlasError(
                    f"{self.dataset}: its vocabulary is not the one that {self.path} was trained "
                    "on; pass --dataset with the dataset of the model"
                )
            log.warning(
                "%s: this is not the dataset that %s was trained on, but has the same places",
                self.dataset,
                self.path,
            )
        return dataset

    def population(self) -> Floats:
        """Return the anchors (people, 4) of training people, from the folder or the dataset."""
        if not (self.path / REGION_ANCHORS).exists():
            dataset = self.open_dataset()
            return dataset.anchors[dataset.split_people("train")]
        anchors = self._stored_anchors(None)
        return anchors[np.lexsort(anchors.T)]

    def region(self, name: str, regions: Path | None = None) -> tuple[Floats, Floats | None]:
        """Return the anchors (people, 4) of a region, and p(d|g) (groups,) if the model has groups.

        A model that was supervised with regions contains both. For another model they come from a
        REGIONS folder and the training people who live in the region.
        """
        own = (self.path / COMPOSITION).exists() and (self.path / REGION_ANCHORS).exists()
        folder = self.path if own else regions
        if folder is None:
            raise MobatlasError(
                f"--region {name}: {self.path} has no regions; pass --regions with the folder that "
                "`mobatlas regions` wrote"
            )
        if own and regions is not None:
            log.warning(
                "%s: the model contains its own regions, so --regions %s is not read",
                self.path,
                regions,
            )
        opened = None if own else RegionsFolder.open(folder)  # checks the folder before reading
        shares = self._shares(name, folder)
        anchors = self._stored_anchors(name) if opened is None else self._anchors_in(name, opened)
        if not len(anchors):
            raise MobatlasError(
                f"--region {name}: {folder} has no training person who lives there; pass --anchors "
                "with a table of homes and groups instead"
            )
        return anchors, shares

    def _shares(self, region: str, folder: Path) -> Floats | None:
        with refuse_corrupt(folder):
            table = read_parquet(folder / COMPOSITION, columns=["region", "group", "share"])
        known = table["region"].unique().to_pylist()
        groups = self.groups
        if region not in known:
            raise MobatlasError(
                f"--region {region}: {folder} has no such region{suggestion(region, known)}"
            )
        if groups is None:
            return None
        rows = table.filter(pc.equal(table["region"], region)).to_pylist()
        shares = {row["group"]: row["share"] for row in rows}
        if set(shares) != set(groups.names):
            raise MobatlasError(
                f"{folder}: its groups ({'; '.join(shares)}) are not those of {self.path} "
                f"({'; '.join(groups.names)})"
            )
        return np.array([shares[name] for name in groups.names])

    def _stored_anchors(self, region: str | None) -> Floats:
        """Return the anchors (people, 4) that the folder has, of one region or of all."""
        with refuse_corrupt(self.path):
            table = read_parquet(self.path / REGION_ANCHORS)
            if region is not None:
                table = table.filter(pc.equal(table["region"], region))
            columns = [table[name].to_numpy(zero_copy_only=False) for name in ANCHORS]
            return np.stack(columns, axis=1).astype(np.float64)

    def _anchors_in(self, region: str, regions: RegionsFolder) -> Floats:
        dataset = self.open_dataset()
        assignment = regions.assignment or {}
        if regions.manifest.details["dataset"]["content_hash"] != dataset.manifest.content_hash:
            log.warning(
                "%s: these regions are from another dataset than %s; people are matched by user_id",
                regions.path,
                dataset.path,
            )
        users = dataset.people["user_id"].to_pylist()
        residents = [
            person
            for person in dataset.split_people("train").tolist()
            if assignment.get(users[person]) == region
        ]
        return dataset.anchors[np.array(residents, dtype=np.int64)]


def save_model(folder: Path, generator: Generator, name: str) -> None:
    """Write a trained generator of the family `name` into an existing folder."""
    groups = generator.groups.as_dict() if generator.groups is not None else None
    config = generator.config.model_dump(mode="json")
    write_json(folder / CONFIG, {"generator": name, "config": config, "groups": groups})
    write_parquet(folder / VOCABULARY, VOCABULARY_SCHEMA, generator.vocabulary.table.to_batches())
    generator.save(folder)


def load_model(path: Path | str, dataset: Path | None = None) -> Model:
    """Read a MODEL folder and check every file.

    Parameters
    ----------
    path
        The folder that `mobatlas train` or `mobatlas supervise` wrote.
    dataset
        The folder of its dataset, if that has moved.

    Returns
    -------
    Model
        The generator, and facts about its training.

    Examples
    --------
    >>> from mobatlas import load_model
    >>> load_model("model").generator.sample(100, seed=1)  # doctest: +SKIP
    """
    folder = Path(path)
    if not (folder / MANIFEST).exists() and checkpoint_folder(folder).is_dir():
        raise MobatlasError(
            f"{folder}: its training is not finished; continue with the same command and --resume "
            f"(mobatlas train ... --out {folder} --resume)"
        )
    manifest = read_manifest(folder, KIND)
    with refuse_corrupt(folder):
        trained = build(_Dataset, manifest.details["dataset"], str(folder / MANIFEST))
        described = _read_json(_Description, folder / CONFIG)
        generator = _load_generator(folder, described)
        return Model(
            path=folder,
            name=described.generator,
            manifest=manifest,
            generator=generator,
            dataset=dataset or Path(trained.path),
            dataset_hash=trained.hash,
        )


def _load_generator(folder: Path, described: _Description) -> Generator:
    where = folder / CONFIG
    name = described.generator
    refuse_unknown(f"{where}: the generator '{name}'", name, GENERATORS)
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
        raise MobatlasError(
            f"{path}: this is not a readable Parquet file; train the model again"
        ) from None
    if (
        not table.schema.equals(VOCABULARY_SCHEMA)
        or table["token"].to_pylist() != list(range(table.num_rows))
        or tuple(table["poi_id"].slice(0, FIRST_POI).to_pylist()) != SPECIALS
    ):
        raise MobatlasError(
            f"{path}: this is not a table of tokens as mobatlas writes it; train the model again"
        )
    return Vocabulary(table)


def _read_json(model: type[Values], path: Path) -> Values:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        raise MobatlasError(
            f"{path}: the file is missing or not valid JSON; train the model again"
        ) from None
    if not isinstance(values, dict):
        raise MobatlasError(
            f"{path}: the file is damaged or was not written by mobatlas; train the model again"
        )
    return build(model, values, str(path))
