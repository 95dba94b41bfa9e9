"""Visits with their times: how datasets and trajectories become what the network reads, and how it writes them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from mobatlas.data.dataset import DAY, TrajectoryDataset
from mobatlas.data.trajectories import SoftTrajectories, Trajectories, monday
from mobatlas.data.vocabulary import BOS, EOS, HOME, PAD
from mobatlas.errors import MobatlasError
from mobatlas.generators.point_process.network import TimedTransformer
from mobatlas.generators.protocol import Floats, Ints
from mobatlas.generators.sequence.codec import flat, padded
from mobatlas.generators.sequence.decode import START, TIMES, TOKENS, Chance
from mobatlas.generators.sequence.network import valid, with_end
from mobatlas.generators.tiling import draw


@dataclass(frozen=True)
class Timed:
    """Rows (token, arrival, departure), the start of the window first; `Script` says what each method promises."""

    days: int  # of a window
    has_times = True

    def shape(self, length: int) -> tuple[int, ...]:
        return (1 + length, 3)

    def gathered(self, dataset: TrajectoryDataset, indices: Ints, length: int) -> Tensor:
        if dataset.window_days != self.days:
            raise MobatlasError(
                f"{dataset.path}: its windows have {dataset.window_days} days, those of the model {self.days}; train another"
            )
        tokens = torch.from_numpy(dataset.gather(indices, length).tokens).long()
        first = dataset.first_days[indices]  # (batch,)
        since = torch.from_numpy(DAY * monday(first))[:, None]
        arrival, departure = (
            torch.from_numpy(times) - since for times in dataset.gather_times(indices, length)
        )
        return _rows(
            tokens, arrival, departure, torch.from_numpy(DAY * first)[:, None] - since, length
        )

    def read(self, trajectories: Trajectories, length: int) -> Tensor:
        """Their windows begin on the day of the first arrival, for all that is known."""
        if trajectories.arrivals is None or trajectories.stays is None:
            raise MobatlasError(
                "point-process: these trajectories carry no times; it cannot tell how likely they are"
            )
        tokens, arrival, stay = (
            padded(trajectories, values)
            for values in (trajectories.tokens, trajectories.arrivals, trajectories.stays)
        )
        return _rows(tokens, arrival, arrival + stay, arrival[:, :1] // DAY * DAY, length)

    def tokens(self, visits: Tensor) -> Tensor:
        return visits[:, 1:, 0]

    @torch.no_grad()
    def write(
        self,
        decoder: TimedTransformer,
        condition: Tensor,
        chance: Chance,
        length: int,
        ends: Tensor | None,
    ) -> Tensor:
        """The day on which the window begins, then visit after visit: where, when, how long."""
        chosen = chance(START)
        start = DAY * draw(decoder.weekdays.log().expand(len(chosen), -1), chosen)  # (batch,)
        batch, tokens, times = len(start), chance(TOKENS, length), chance(TIMES, length, 2)
        last = torch.stack((torch.full_like(start, BOS), start, start), 1)  # (batch, 3)
        written = last.new_full((batch, 1 + length, 3), PAD)
        written[:, 0] = last
        cache, ended, barred = (
            decoder.writer.new_cache(batch),
            torch.zeros_like(start, dtype=torch.bool),
            None,
        )
        for place in range(length):
            hidden, logits = decoder.step(last, start, condition, place, cache)
            if ends is not None:
                logits[:, EOS] = -torch.inf
                ended, barred = (
                    ended | (ends <= place),
                    ends > place + 1,
                )  # to be followed by another
                logits = torch.where(ended[:, None], 0.0, logits)  # whatever
            token = draw(logits, tokens[:, place])
            ended = ended | (token == EOS)
            if bool(ended.all()):
                break
            arrival = last[:, 2] + decoder.gap(hidden, token, last[:, 2], start).draw(
                times[:, place, 0]
            )
            stay = decoder.stay(hidden, token, arrival, start, barred).draw(times[:, place, 1])
            last = torch.where(
                ended[:, None], last, torch.stack((token, arrival, arrival + stay), 1)
            )
            written[:, place + 1] = torch.where(ended[:, None], PAD, last)
        return written

    def trajectories(self, written: Tensor, anchors: Floats) -> Trajectories:
        tokens, offsets = flat(written[:, 1:, 0])
        _, arrival, departure = written[:, 1:][valid(written)[:, 1:]].unbind(-1)
        return Trajectories(
            tokens.numpy().astype(np.int32),
            offsets,
            anchors,
            arrival.numpy(),
            (departure - arrival).numpy(),
        )

    def soft(
        self, decoder: TimedTransformer, written: Tensor, condition: Tensor, anchors: Floats
    ) -> SoftTrajectories:
        """With the hours of arrivals, given the token that was written; at an end given the likeliest other."""
        longest = int(valid(written).sum(1).max()) if len(written) else 1
        _, arrival, departure = written[:, 1:longest].unbind(-1)
        visits = _rows(
            written[:, 1:longest, 0], arrival, departure, written[:, :1, 1], written.shape[1] - 1
        )
        tokens = self.tokens(visits)  # (batch, any)
        hidden, logits, left = decoder.known(visits, condition)
        likeliest = logits[..., HOME:].argmax(-1) + HOME
        spans = decoder.gap(
            hidden, torch.where(tokens >= HOME, tokens, likeliest), left, visits[:, :1, 1]
        )
        there = (tokens != PAD)[..., None]
        return SoftTrajectories(
            logits.softmax(-1) * there, anchors, spans.hours() * there, written=tokens
        )


def _rows(tokens: Tensor, arrival: Tensor, departure: Tensor, start: Tensor, length: int) -> Tensor:
    """Visits (batch, 1 + any, 3) from tokens and times (batch, any), with ends; start (batch, 1) is when the window begins.

    A visit that lasts beyond the next arrival is left then: who is in two places is thought to be in the later one.
    """
    following = F.pad(arrival, (0, 1))[:, 1:]
    last = F.pad(tokens, (0, 1), value=PAD)[:, 1:] == PAD
    departure = torch.where(last, departure, torch.minimum(departure, following))
    ended = with_end(tokens, length)  # (batch, any)
    room = (0, ended.shape[1] - min(tokens.shape[1], length))
    times = (
        torch.where(ended >= HOME, F.pad(each[:, :length], room), start)  # an end is at no time
        for each in (arrival, departure)
    )
    rows = torch.stack((ended, *times), -1)
    first = torch.stack((torch.full_like(start, BOS), start, start), -1)  # (batch, 1, 3)
    return torch.cat((first, rows), 1)
