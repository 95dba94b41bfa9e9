"""The point process: a variational marked temporal point process (after Mehrasa et al. 2019).

It is the variational autoencoder with a decoder that writes a token, its arrival and its stay. The
weekday on which a window starts is drawn first, with its frequency among training windows.
"""

from __future__ import annotations

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
from mobatlas.data.vocabulary import BOS, EOS, HOME, PAD
from mobatlas.errors import MobatlasError
from mobatlas.generators.layers import draw_tokens, is_token, with_end
from mobatlas.generators.point_process.network import TimedTransformer, VisitEmbedding
from mobatlas.generators.protocol import Generator
from mobatlas.generators.sequence.codec import (
    START_STREAM,
    TIME_STREAM,
    TOKEN_STREAM,
    Uniform,
    join_rows,
    pad_rows,
)
from mobatlas.generators.sequence.sequence_generator import sequence_family
from mobatlas.generators.vae import PRESETS, LatentSequenceConfig, VariationalAutoencoder
from mobatlas.groups import Groups


class PointProcessConfig(LatentSequenceConfig):
    """Options of the point process."""

    days: int | None = Field(None, ge=1, le=366)  # of a window; None: as the dataset has


@dataclass(frozen=True)
class TimedTokenCodec:
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
        """Return rows; a window is taken to start on the day of the first arrival."""
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

    @torch.no_grad()
    def sample(
        self,
        decoder: TimedTransformer,
        condition: Tensor,
        uniform: Uniform,
        length: int,
        ends: Tensor | None,
    ) -> Tensor:
        """Draw the day on which the window starts, then visits: token, arrival, stay."""
        weekday = uniform(START_STREAM)
        logits = decoder.weekdays.log().expand(len(weekday), -1)  # (batch, 7)
        start = DAY * draw_tokens(logits, weekday)  # (batch,)
        tokens = uniform(TOKEN_STREAM, length)
        times = uniform(TIME_STREAM, length, 2)
        last = torch.stack((torch.full_like(start, BOS), start, start), 1)  # (batch, 3)
        rows = last.new_full((len(start), 1 + length, 3), PAD)
        rows[:, 0] = last
        cache = decoder.transformer.new_cache(len(start))
        ended = torch.zeros_like(start, dtype=torch.bool)
        continues = None
        for place in range(length):
            hidden, logits = decoder.step(last, start, condition, place, cache)
            if ends is not None:
                logits[:, EOS] = -torch.inf
                ended = ended | (ends <= place)
                continues = ends > place + 1  # another visit follows
                logits = torch.where(ended[:, None], 0.0, logits)  # ended rows are not used
            token = draw_tokens(logits, tokens[:, place])
            ended = ended | (token == EOS)
            if bool(ended.all()):
                break
            gap = decoder.gap(hidden, token, last[:, 2], start).draw(times[:, place, 0])
            arrival = last[:, 2] + gap
            stay = decoder.stay(hidden, token, arrival, start, continues).draw(times[:, place, 1])
            visit = torch.stack((token, arrival, arrival + stay), 1)  # (batch, 3)
            last = torch.where(ended[:, None], last, visit)
            rows[:, place + 1] = torch.where(ended[:, None], PAD, last)
        return rows

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

        At an end token the hours are given the likeliest other token.
        """
        longest = int(is_token(rows).sum(1).max()) if len(rows) else 1
        sampled, arrival, departure = rows[:, 1:longest].unbind(-1)
        visits = _visit_rows(sampled, arrival, departure, rows[:, :1, 1], rows.shape[1] - 1)
        tokens = self.target_tokens(visits)  # (batch, any)
        hidden, logits, departed = decoder.predict(visits, condition)
        likeliest = logits[..., HOME:].argmax(-1) + HOME
        visited = torch.where(tokens >= HOME, tokens, likeliest)
        spans = decoder.gap(hidden, visited, departed, visits[:, :1, 1])
        valid = (tokens != PAD)[..., None]
        probabilities = logits.softmax(-1) * valid  # (batch, any, vocabulary)
        return SoftTrajectories(probabilities, anchors, spans.hours() * valid, written=tokens)


def _visit_rows(
    tokens: Tensor, arrival: Tensor, departure: Tensor, start: Tensor, length: int
) -> Tensor:
    """Return rows (batch, 1 + any, 3) with end tokens, from tokens and times (batch, any).

    `start` (batch, 1) is when the window starts. A visit that lasts beyond the next arrival is
    shortened, because a person in two places is taken to be in the later one.
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


def _network(
    config: PointProcessConfig, vocabulary: int, groups: Groups | None
) -> VariationalAutoencoder:
    days = _codec(config).days
    decoder = partial(TimedTransformer, days=days)
    words = partial(VisitEmbedding, days=days)
    return VariationalAutoencoder(config, vocabulary, groups, decoder=decoder, words=words)


def _codec(config: PointProcessConfig) -> TimedTokenCodec:
    if config.days is None:
        raise MobatlasError(
            "config.json: does not say how many 'days' a window has; train the model again"
        )
    return TimedTokenCodec(config.days)


def _create(config: PointProcessConfig, dataset: TrajectoryDataset, seed: int) -> Generator:
    if config.days not in (None, dataset.window_days):
        raise MobatlasError(
            f"train: days is {config.days}, but the windows of {dataset.path} have "
            f"{dataset.window_days} days; leave the option out"
        )
    complete = config.model_copy(update={"days": dataset.window_days})
    return _WITH_DAYS.create(complete, dataset, seed)


_WITH_DAYS = sequence_family("point-process", PointProcessConfig, PRESETS, _network, _codec)
FAMILY = replace(_WITH_DAYS, create=_create)
