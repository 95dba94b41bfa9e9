"""The external generator: a pool of samples of another program, or a function that returns samples.

It has no network to train. The strategies `resample` and `tilt` choose among its samples.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn, Self

import numpy as np
from pydantic import Field, field_validator, model_validator

from mobatlas.config import Section
from mobatlas.data.arrays import Floats, Ints
from mobatlas.data.dataset import TrajectoryDataset
from mobatlas.data.trajectories import Trajectories
from mobatlas.data.vocabulary import Vocabulary
from mobatlas.errors import MobatlasError
from mobatlas.generators.external.code import Code, trust
from mobatlas.generators.external.pool import Pool
from mobatlas.generators.protocol import UNKNOWN, Family
from mobatlas.groups import Groups
from mobatlas.io.manifest import file_hash
from mobatlas.training.loop import Trainer

TILE = 64  # rows that code is called with at a time; samples do not depend on it


class ExternalConfig(Section):
    """The source of samples."""

    pool: str | None = None  # a Parquet file as `mobatlas generate` writes it
    sha256: str | None = None  # of that file, filled in
    entry_point: str | None = None  # package.module:function, see `code`
    neighbours: int = Field(32, ge=1)  # a sample is drawn from at least this many of a pool
    # longer samples are truncated; None: the longest of pool or dataset
    length: int | None = Field(None, ge=1, le=100_000)

    @field_validator("entry_point")
    @classmethod
    def _is_function_name(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*", value):
            raise ValueError("write it as package.module:function")
        return value

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.pool is None) == (self.entry_point is None):
            problem = "pass only one" if self.pool is not None else "pass one of them"
            raise ValueError(
                "the generator external needs a source of samples, --set pool=FILE.parquet or "
                f"--set entry_point=package.module:function; {problem}"
            )
        return self


def _refuse_training(*_: Any, **__: Any) -> NoReturn:
    raise MobatlasError(
        "an external generator cannot be trained; choose among its samples with "
        "--strategy resample or --strategy tilt"
    )


class External:
    """Samples of a pool or of code. `Generator` documents its methods."""

    groups: Groups | None = None
    tile = TILE
    network = property(_refuse_training)
    with_groups = _refuse_training
    weighted_fit_stage = _refuse_training
    soft_sample = _refuse_training

    def __init__(self, config: ExternalConfig, vocabulary: Vocabulary, source: Pool | Code) -> None:
        self.config = config
        self.vocabulary = vocabulary
        self.source = source

    @property
    def max_length(self) -> int:
        assert self.config.length is not None
        return self.config.length

    @property
    def has_times(self) -> bool:
        return isinstance(self.source, Pool) and self.source.samples.arrivals is not None

    def fit(self, dataset: TrajectoryDataset, trainer: Trainer) -> dict[str, Any]:
        """Report what the pool contains, or try the code. Nothing is fitted."""
        if isinstance(self.source, Pool):
            return {"pool": dict(self.source.facts)}
        anchors = dataset.anchors[dataset.split_people("train")]
        return {"entry_point": self.source.try_out(anchors, trainer.seed)}

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
        """Draw samples; their anchors are the requested ones, not those of the pool."""
        if groups is not None and (groups != UNKNOWN).any():
            raise MobatlasError(
                "this model is not conditioned on groups; supervise it first (mobatlas supervise)"
            )
        anchors = np.full((n, 4), np.nan) if anchors is None else anchors
        return self.source.draw(anchors, seed, first, lengths)

    def to(self, device: str) -> None:
        """Do nothing: there is no network."""

    def save(self, folder: Path) -> None:
        """Write the samples of a pool. For code, the configuration has the entry point."""
        if isinstance(self.source, Pool):
            self.source.save(folder)


def _resolve(values: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Find and hash the pool that a user names, and trust the code that a user names."""
    pool = values.get("pool")
    entry_point = values.get("entry_point")
    if isinstance(entry_point, str):
        trust(entry_point)
    if not isinstance(pool, str | Path):
        return dict(values)
    path = folder / pool
    if not path.is_file():
        problem = "this is a folder; pass one Parquet file" if path.is_dir() else "no such file"
        raise MobatlasError(f"{path}: {problem} (option pool)")
    return dict(values) | {"pool": str(path), "sha256": file_hash(path)}


def _create(config: ExternalConfig, dataset: TrajectoryDataset, seed: int) -> Any:
    if config.pool is not None:
        pool = Pool.read(Path(config.pool), dataset.vocabulary, config.neighbours, config.length)
        complete = config.model_copy(update={"length": int(pool.lengths.max())})
        return External(complete, dataset.vocabulary, pool)
    length = config.length or int(dataset.lengths[dataset.split("train")].max())
    complete = config.model_copy(update={"length": length})
    code = Code(str(config.entry_point), dataset.vocabulary, length, TILE)
    return External(complete, dataset.vocabulary, code)


def _load(
    folder: Path, config: ExternalConfig, vocabulary: Vocabulary, groups: Groups | None
) -> Any:
    if groups is not None or config.length is None:
        raise MobatlasError(
            f"{folder}: its samples do not fit config.json; an external generator has a length and "
            "no groups; train the model again"
        )
    if config.pool is not None:
        pool = Pool.load(folder, vocabulary, config.neighbours, config.length)
        return External(config, vocabulary, pool)
    code = Code(str(config.entry_point), vocabulary, config.length, TILE, folder)
    return External(config, vocabulary, code)


FAMILY = Family(
    "external",
    ExternalConfig,
    {"small": {}, "paper": {}},
    _create,
    _load,
    trainable=False,
    resolve=_resolve,
)
