"""The MODEL folder: a generator, its weights and its vocabulary."""

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import BaseModel, ConfigDict

from mobatlas.config import MIN_PEOPLE, build
from mobatlas.data.anchors import AnchorModel, Residents
from mobatlas.data.dataset import TrajectoryDataset
from mobatlas.data.types import (
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
from mobatlas.regions.store import RegionsFolder, region_of

KIND = "model"
CONFIG = "config.json"
VOCABULARY = "vocabulary.parquet"
COMPOSITION = "composition.parquet"  # of a model that was supervised with regions
ANCHOR_MODEL = "anchors.json"
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

    @cached_property
    def anchors(self) -> AnchorModel:
        """The distribution of synthetic homes and workplaces."""
        with refuse_corrupt(self.path / ANCHOR_MODEL):
            values = json.loads((self.path / ANCHOR_MODEL).read_text(encoding="utf-8"))
            return AnchorModel.of(values)

    @cached_property
    def population(self) -> Residents:
        """Synthetic people, the same ones whenever the model is loaded."""
        with refuse_corrupt(self.path / ANCHOR_MODEL):
            return self.anchors.population()

    @property
    def regions_path(self) -> Path | None:
        """The REGIONS folder that it was supervised with."""
        facts = self.manifest.details.get(SUPERVISION, {}).get("regions")
        return Path(facts["path"]) if facts else None

    def observed(self, regions: Path | None = None) -> Residents:
        """Return the training people of the dataset, and their regions in a REGIONS folder."""
        dataset = self.open_dataset()
        people = dataset.split_people("train")
        region = None
        if regions is not None:
            folder = RegionsFolder.open(regions)
            if folder.manifest.details["dataset"]["content_hash"] != dataset.manifest.content_hash:
                log.warning(
                    "%s: these regions are from another dataset than %s; people are matched by "
                    "user_id",
                    folder.path,
                    dataset.path,
                )
            names = folder.regions.composition.regions
            region = region_of(dataset, people, folder.assignment, names)
        return Residents(
            dataset.anchors[people], np.full(len(people), -1) if region is None else region
        )

    def region(
        self, name: str, regions: Path | None = None, *, observed: bool = False
    ) -> tuple[Floats, Floats | None]:
        """Return the anchors (people, 4) of a region, and p(d|g) (groups,) if the model has groups.

        A model that was supervised with regions contains both. For another model they come from a
        REGIONS folder and the training people who live in the region. With `observed`, anchors are
        those of these people.
        """
        own = (self.path / COMPOSITION).exists()
        folder = self.path if own else regions
        if folder is None:
            raise MobatlasError(
                f"--region {name}: {self.path} has no regions; pass --regions with the folder that "
                "`mobatlas regions` wrote"
            )
        if own and regions is not None and not observed:
            log.warning(
                "%s: the model contains its own regions, so --regions %s is not read",
                self.path,
                regions,
            )
        if not own:
            RegionsFolder.open(folder)  # checks the folder before reading
        number, shares = self._shares(name, folder)
        anchors = self._anchors_in(number, regions, own=own, observed=observed)
        if not len(anchors):
            few = "no" if observed else f"fewer than {MIN_PEOPLE}"
            raise MobatlasError(
                f"--region {name}: {folder} has {few} training people with a home there; pass "
                "--anchors FILE, a table of homes and groups, instead of --region"
            )
        return anchors, shares

    def _anchors_in(
        self, number: int, regions: Path | None, *, own: bool, observed: bool
    ) -> Floats:
        """Return the anchors of people in a region (people, 4)."""
        if own and not observed:
            with refuse_corrupt(self.path / ANCHOR_MODEL):
                return self.anchors.population(number).anchors
        people = self.observed(regions or self.regions_path)
        inside = people.region == number
        if observed:
            return people.anchors[inside]
        return AnchorModel.fit(people.anchors, inside - 1, ("inside",)).population(0).anchors

    def _shares(self, region: str, folder: Path) -> tuple[int, Floats | None]:
        """Return the number of a region, and p(d|g) (groups,)."""
        with refuse_corrupt(folder):
            table = read_parquet(folder / COMPOSITION, columns=["region", "group", "share"])
        known = table["region"].unique().to_pylist()
        groups = self.groups
        if region not in known:
            raise MobatlasError(
                f"--region {region}: {folder} has no such region{suggestion(region, known)}"
            )
        number = known.index(region)
        if groups is None:
            return number, None
        rows = table.filter(pc.equal(table["region"], region)).to_pylist()
        shares = {row["group"]: row["share"] for row in rows}
        if set(shares) != set(groups.names):
            raise MobatlasError(
                f"{folder}: its groups ({'; '.join(shares)}) are not those of {self.path} "
                f"({'; '.join(groups.names)})"
            )
        return number, np.array([shares[name] for name in groups.names])


def save_model(
    folder: Path,
    generator: Generator,
    name: str,
    dataset: TrajectoryDataset,
    anchors: AnchorModel | None = None,
) -> None:
    """Write a trained generator of the family `name` into an existing folder.

    Without `anchors`, their model is fitted to the training people, without regions.
    """
    anchors = anchors or AnchorModel.fit(dataset.anchors[dataset.split_people("train")])
    write_json(folder / ANCHOR_MODEL, anchors.as_dict())
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
