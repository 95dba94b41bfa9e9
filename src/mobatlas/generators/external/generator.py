"""A generator that somebody else made, behind our protocol: a pool of its samples, or a function that makes them.

It cannot be taught, and need not be: `resample` and `tilt` choose among its samples.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from pydantic import Field, field_validator, model_validator

from mobatlas.config import Section
from mobatlas.data.arrays import Floats, Ints
from mobatlas.data.dataset import TrajectoryDataset
from mobatlas.data.trajectories import Trajectories
from mobatlas.data.vocabulary import Vocabulary
from mobatlas.errors import MobatlasError
from mobatlas.generators.external.code import Code, ask_for
from mobatlas.generators.external.pool import Pool
from mobatlas.generators.protocol import UNKNOWN, Family
from mobatlas.groups import Groups
from mobatlas.io.manifest import file_hash
from mobatlas.training.loop import Trainer

TILE = 64  # what a sample is does not depend on it; code is called with as many at a time


class ExternalConfig(Section):
    """Where samples come from."""

    pool: str | None = None  # a Parquet file as `mobatlas generate` writes it
    sha256: str | None = None  # of that file, filled in
    entry_point: str | None = None  # package.module:function, see `code`
    neighbours: int = Field(
        32, ge=1
    )  # samples of a pool, at least, among which one for given anchors is drawn
    length: int | None = Field(
        None, ge=1, le=100_000
    )  # longer ones are cut off; None: the longest of pool or dataset

    @field_validator("entry_point")
    @classmethod
    def _names_a_function(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*", value):
            raise ValueError("write it as package.module:function")
        return value

    @model_validator(mode="after")
    def _one_of_two(self) -> ExternalConfig:
        if (self.pool is None) == (self.entry_point is None):
            both = "not both" if self.pool is not None else "it has nothing to sample from"
            raise ValueError(
                f"the generator external takes --set pool=FILE.parquet or --set entry_point=package.module:function; {both}"
            )
        return self


class External:
    """Samples of a pool or of code; `Generator` says what each method promises."""

    groups: Groups | None = None
    tile = TILE

    def __init__(self, config: ExternalConfig, vocabulary: Vocabulary, source: Pool | Code) -> None:
        self.config, self.vocabulary, self.source = config, vocabulary, source

    @property
    def max_length(self) -> int:
        assert self.config.length is not None
        return self.config.length

    @property
    def has_times(self) -> bool:
        """Where the samples of a pool do."""
        return isinstance(self.source, Pool) and self.source.samples.arrivals is not None

    @property
    def network(self) -> NoReturn:
        _cannot_be_taught()

    def fit(self, dataset: TrajectoryDataset, trainer: Trainer) -> dict[str, Any]:
        """Nothing is fitted; says what the pool holds, or tries the code."""
        if isinstance(self.source, Pool):
            return {"pool": dict(self.source.facts)}
        homes = dataset.anchors[dataset.split_people("train")]
        return {"entry_point": self.source.tried(homes, trainer.seed)}

    def with_groups(
        self, groups: Groups, seed: int, fresh: bool = False, *, alike: bool = False
    ) -> NoReturn:
        _cannot_be_taught()

    def weighted_fit_stage(self, *_: Any, **__: Any) -> NoReturn:
        _cannot_be_taught()

    def soft_sample(self, *_: Any, **__: Any) -> NoReturn:
        _cannot_be_taught()

    def sample(
        self,
        n: int,
        groups: Ints | None = None,
        anchors: Floats | None = None,
        seed: int = 0,
        *,
        first: int = 0,
        lengths: Ints | None = None,
    ) -> Trajectories:
        """Trajectories number `first` to `first + n`; anchors are those that were asked for, not those of the pool."""
        if groups is not None and (groups != UNKNOWN).any():
            raise MobatlasError(
                "this model is not conditioned on groups; supervise it first (mobatlas supervise)"
            )
        return self.source.draw(
            np.full((n, 4), np.nan) if anchors is None else anchors, seed, first, lengths
        )

    def to(self, device: str) -> None:
        """There is nothing to move."""

    def save(self, folder: Path) -> None:
        """The samples of a pool; of code its name is all there is, and the configuration has it."""
        if isinstance(self.source, Pool):
            self.source.save(folder)


def _cannot_be_taught() -> NoReturn:
    raise MobatlasError(
        "an external generator cannot be taught; choose among its samples (--strategy resample or tilt)"
    )


def _resolve(values: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Options from a user's own hand: the pool lies where they say, seen from that folder, and code may be imported."""
    pool, entry_point = values.get("pool"), values.get("entry_point")
    if isinstance(entry_point, str):
        ask_for(entry_point)
    if not isinstance(pool, str | Path):
        return dict(values)
    path = folder / pool
    if not path.is_file():
        raise MobatlasError(
            f"{path}: {'is a folder; give one Parquet file' if path.is_dir() else 'no such file'} (pool)"
        )
    return dict(values) | {"pool": str(path), "sha256": file_hash(path)}


def _create(config: ExternalConfig, dataset: TrajectoryDataset, seed: int) -> External:
    if config.pool is not None:
        pool = Pool.read(Path(config.pool), dataset.vocabulary, config.neighbours, config.length)
        whole = config.model_copy(update={"length": int(pool.lengths.max())})
        return External(whole, dataset.vocabulary, pool)
    longest = config.length or int(dataset.lengths[dataset.split("train")].max())
    whole = config.model_copy(update={"length": longest})
    return External(
        whole, dataset.vocabulary, Code(str(config.entry_point), dataset.vocabulary, longest, TILE)
    )


def _load(
    folder: Path, config: ExternalConfig, vocabulary: Vocabulary, groups: Groups | None
) -> External:
    if groups is not None or config.length is None:
        raise MobatlasError(
            f"{folder}: an external generator has a length and no groups of its own, so what it holds is not those of "
            "config.json; train the model again"
        )
    if config.pool is not None:
        return External(
            config, vocabulary, Pool.load(folder, vocabulary, config.neighbours, config.length)
        )
    return External(
        config, vocabulary, Code(str(config.entry_point), vocabulary, config.length, TILE, folder)
    )


FAMILY = Family(
    "external",
    ExternalConfig,
    {"small": {}, "paper": {}},
    _create,
    _load,
    trainable=False,
    resolve=_resolve,
)
