"""The point process: a variational marked temporal point process (after Mehrasa et al. 2019).

It is the variational autoencoder with a decoder that writes a token, its arrival and its stay. The
weekday on which a window starts is drawn first, with its frequency among training windows.
"""

from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from mobatlas.data.arrays import Floats, Ints
from mobatlas.data.dataset import TrajectoryDataset
from mobatlas.data.schema import DAY
from mobatlas.data.trajectories import SoftTrajectories, Trajectories, monday
from mobatlas.data.vocabulary import BOS, HOME, PAD
from mobatlas.errors import MobatlasError
from mobatlas.generators.codec import TokenCodec, is_token, join_rows, pad_rows, with_end
from mobatlas.generators.network_generator import SequenceGenerator, network_family
from mobatlas.generators.timed_transformer import TimedTransformer, VisitEmbedding
from mobatlas.generators.vae import PRESETS, VaeConfig, VariationalAutoencoder


class PointProcessConfig(VaeConfig):
    """Options of the point process."""

    days: int | None = Field(None, ge=1, le=366)  # of a window; None: as the dataset has


@dataclass(frozen=True)
class TimedTokenCodec(TokenCodec):
    """Rows (token, arrival, departure), the start first. `TokenCodec` documents its methods.

    Times are seconds since the Monday before the window starts.
    """

    days: int  # of a window
    has_times = True

    def row_shape(self, length: int) -> tuple[int, ...]:
        return (1 + length, 3)

    def read_dataset(self, dataset: TrajectoryDataset, indices: Ints, length: int) -> Tensor:
        if dataset.window_days != self.days:
            raise MobatlasError(
                f"{dataset.path}: its windows have {dataset.window_days} days, those of the model "
                f"{self.days}; train a model on this dataset"
            )
        tokens = torch.from_numpy(dataset.gather(indices, length).tokens).long()
        first = dataset.first_days[indices]  # (batch,)
        since = torch.from_numpy(DAY * monday(first))[:, None]
        times = dataset.gather_times(indices, length)
        arrival, departure = (torch.from_numpy(part) - since for part in times)
        start = torch.from_numpy(DAY * first)[:, None] - since
        return _visit_rows(tokens, arrival, departure, start, length)

    def read_trajectories(self, trajectories: Trajectories, length: int) -> Tensor:
        """Return rows; a window is assumed to start on the day of the first arrival."""
        if trajectories.arrivals is None or trajectories.stays is None:
            raise MobatlasError(
                "point-process: these trajectories carry no times, which its likelihood needs"
            )
        tokens = pad_rows(trajectories, trajectories.tokens)
        arrival = pad_rows(trajectories, trajectories.arrivals)
        departure = arrival + pad_rows(trajectories, trajectories.stays)
        return _visit_rows(tokens, arrival, departure, arrival[:, :1] // DAY * DAY, length)

    def target_tokens(self, visits: Tensor) -> Tensor:
        return visits[:, 1:, 0]

    def to_trajectories(self, rows: Tensor, anchors: Floats) -> Trajectories:
        tokens, offsets = join_rows(rows[:, 1:, 0])
        _, arrival, departure = rows[:, 1:][is_token(rows)[:, 1:]].unbind(-1)
        stays = (departure - arrival).numpy()
        return Trajectories(
            tokens.numpy().astype(np.int32), offsets, anchors, arrival.numpy(), stays
        )

    def soft_trajectories(
        self, decoder: TimedTransformer, rows: Tensor, condition: Tensor, anchors: Floats
    ) -> SoftTrajectories:
        """Return distributions of tokens, and of arrival hours given the sampled token.

        At an end token, hours are conditioned on the likeliest other token.
        """
        longest = int(is_token(rows).sum(1).max()) if len(rows) else 1
        sampled, arrival, departure = rows[:, 1:longest].unbind(-1)
        visits = _visit_rows(sampled, arrival, departure, rows[:, :1, 1], rows.shape[1] - 1)
        tokens = self.target_tokens(visits)  # (batch, any)
        start = visits[:, :1, 1]  # (batch, 1)
        hidden, logits = decoder.predict(visits[:, :-1], start, condition)
        likeliest = logits[..., HOME:].argmax(-1) + HOME  # (batch, any)
        visited = torch.where(tokens >= HOME, tokens, likeliest)
        spans = decoder.gap(hidden, visited, visits[:, :-1, 2], start)
        valid = (tokens != PAD)[..., None]
        probabilities = logits.softmax(-1) * valid  # (batch, any, vocabulary)
        return SoftTrajectories(probabilities, anchors, spans.hours() * valid, drawn_tokens=tokens)


def _visit_rows(
    tokens: Tensor, arrival: Tensor, departure: Tensor, start: Tensor, length: int
) -> Tensor:
    """Return rows (batch, 1 + any, 3) with end tokens, from tokens and times (batch, any).

    `start` (batch, 1) is when the window starts. A visit that lasts beyond the next arrival is
    shortened, because a person in two places is assumed to be in the later one.
    """
    following = F.pad(arrival, (0, 1))[:, 1:]
    last = F.pad(tokens, (0, 1), value=PAD)[:, 1:] == PAD
    departure = torch.where(last, departure, torch.minimum(departure, following))
    ended = with_end(tokens, length)  # (batch, any)
    padding = (0, ended.shape[1] - min(tokens.shape[1], length))
    times = (
        torch.where(ended >= HOME, F.pad(each[:, :length], padding), start)  # an end has no time
        for each in (arrival, departure)
    )
    rows = torch.stack((ended, *times), -1)
    first = torch.stack((torch.full_like(start, BOS), start, start), -1)  # (batch, 1, 3)
    return torch.cat((first, rows), 1)


class PointProcess(SequenceGenerator):
    """Writes visits with arrival and departure times."""

    def _build(self, size: int) -> None:
        if self.config.days is None:
            raise MobatlasError(
                "config.json: 'days', the length of a window, is missing; train the model again"
            )
        self.codec = TimedTokenCodec(self.config.days)
        self.network = VariationalAutoencoder(
            self.config,
            size,
            self.groups,
            decoder=partial(TimedTransformer, days=self.config.days),
            words=partial(VisitEmbedding, days=self.config.days),
        )


def _create(config: PointProcessConfig, dataset: TrajectoryDataset, seed: int) -> PointProcess:
    if config.days not in (None, dataset.window_days):
        raise MobatlasError(
            f"train: days is {config.days}, but the windows of {dataset.path} have "
            f"{dataset.window_days} days; leave the option out"
        )
    return PointProcess(
        config.model_copy(update={"days": dataset.window_days}), dataset.vocabulary, None, seed
    )


FAMILY = replace(
    network_family("point-process", PointProcess, PointProcessConfig, PRESETS), create=_create
)
