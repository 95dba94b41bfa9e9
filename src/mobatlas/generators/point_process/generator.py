"""The point process: a variational marked temporal point process over visits (after Mehrasa et al. 2019).

As in the variational autoencoder a trajectory is written from a normal latent, and training minimises the same bound; what is
written is a token, when it is arrived at and how long it is stayed at. On which day of the week a window begins is drawn first,
as often as in training.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from pydantic import Field

from mobatlas.data.dataset import TrajectoryDataset
from mobatlas.errors import MobatlasError
from mobatlas.generators.point_process.codec import Timed
from mobatlas.generators.point_process.network import TimedTransformer, Visits
from mobatlas.generators.protocol import Generator
from mobatlas.generators.sequence.config import PAPER
from mobatlas.generators.sequence.sequence_generator import writer_family
from mobatlas.generators.vae import LatentWriterConfig, Variational
from mobatlas.groups import Groups


class PointProcessConfig(LatentWriterConfig):
    """The whole generator."""

    days: int | None = Field(
        None, ge=1, le=366
    )  # of a window; None: as many as those of the dataset have


PRESETS: Mapping[str, Mapping[str, Any]] = {
    "small": {},
    "paper": {**PAPER, "latent": {"size": 256, "depth": 4, "warmup": 10_000}},
}


def _network(config: PointProcessConfig, vocabulary: int, groups: Groups | None) -> Variational:
    days = _script(config).days
    decoder, words = partial(TimedTransformer, days=days), partial(Visits, days=days)
    return Variational(config, vocabulary, groups, decoder=decoder, words=words)


def _script(config: PointProcessConfig) -> Timed:
    if config.days is None:
        raise MobatlasError(
            "config.json: does not say how many 'days' a window has; train the model again"
        )
    return Timed(config.days)


def _create(config: PointProcessConfig, dataset: TrajectoryDataset, seed: int) -> Generator:
    if config.days not in (None, dataset.window_days):
        raise MobatlasError(
            f"train: days is {config.days}, but windows of {dataset.path} have {dataset.window_days}; leave it out"
        )
    return _WRITERS.create(config.model_copy(update={"days": dataset.window_days}), dataset, seed)


_WRITERS = writer_family("point-process", PointProcessConfig, PRESETS, _network, _script)
FAMILY = replace(_WRITERS, create=_create)
