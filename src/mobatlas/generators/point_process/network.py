"""The decoder that tells when: the causal transformer over visits, each a token, an arrival and a departure.

    p(x, a, b | u, z, d) = prod_i p(x_i | before) p(a_i - b_{i-1} | x_i, before) p(b_i - a_i | x_i, a_i, before)

Visits are rows (token, arrival, departure), times in seconds since the Monday of the week in which the window begins. The first
row is the start, at the midnight at which the window begins.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mobatlas.data.dataset import DAY, TrajectoryDataset
from mobatlas.data.vocabulary import EOS, HOME, PAD
from mobatlas.generators.point_process.durations import MOMENT, Durations, moment
from mobatlas.generators.sequence.config import TransformerConfig
from mobatlas.generators.sequence.network import CausalTransformer
from mobatlas.groups import Groups


class Times(nn.Module):
    """When visits are, embedded: arrival, departure, and how long they stay."""

    def __init__(self, width: int, days: int) -> None:
        super().__init__()
        self.days = days
        self.linear = nn.Linear(2 * MOMENT + 1, width)

    def forward(self, visits: Tensor, start: Tensor) -> Tensor:
        """(..., width) of visits (..., 3) in windows that start then (...,)."""
        _, arrival, departure = visits.unbind(-1)
        stay = torch.log1p((departure - arrival) / 60)[..., None] / 8  # a week is about 1
        embedded: Tensor = self.linear(
            torch.cat(
                (moment(arrival, start, self.days), moment(departure, start, self.days), stay), -1
            )
        )
        return embedded


class Visits(nn.Module):
    """What the encoder reads of visits."""

    def __init__(self, vocabulary: int, width: int, days: int) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)
        self.times = Times(width, days)

    def forward(self, visits: Tensor) -> Tensor:
        """(batch, any, width) of visits (batch, any, 3), the start first."""
        found: Tensor = self.words(visits[..., 0]) + self.times(visits, visits[:, :1, 1])
        return found


class TimedTransformer(nn.Module):
    """Likelihood of visits with their times, all at once, or with `step` as they are written."""

    weekdays: Tensor

    def __init__(
        self,
        config: TransformerConfig,
        vocabulary: int,
        length: int,
        groups: Groups | None,
        days: int,
    ) -> None:
        super().__init__()
        self.days = days
        self.writer = CausalTransformer(
            config, vocabulary, length + 1, groups
        )  # the encoder reads the start as well
        self.times = Times(config.width, days)
        self.gap = Durations(config.width, vocabulary, days, until=False)
        self.stay = Durations(config.width, vocabulary, days, until=True)
        # shares of windows that begin on each day, Monday first; set from the training windows
        self.register_buffer("weekdays", torch.full((7,), 1 / 7))

    @property
    def places(self) -> Tensor:
        return self.writer.places

    def person(self, anchors: Tensor, levels: Tensor | None) -> Tensor:
        """As the writer has it."""
        return self.writer.person(anchors, levels)

    def measure(self, dataset: TrajectoryDataset) -> None:
        """What is known of training people without training: where they live, and on which days windows begin."""
        self.writer.measure(dataset)
        weekday = torch.from_numpy((dataset.first_days[dataset.split("train")] + 3) % 7)
        self.weekdays.copy_(torch.bincount(weekday, minlength=7) / max(1, len(weekday)))

    def nats(self, visits: Tensor, condition: Tensor) -> Tensor:
        """Minus the log-likelihood (batch,) of visits (batch, 1 + any, 3), the start first, their ends included."""
        tokens, arrival, departure = visits[:, 1:].unbind(-1)
        hidden, logits, left = self.known(visits, condition)
        nats = F.cross_entropy(
            logits.flatten(0, 1), tokens.flatten(), ignore_index=PAD, reduction="none"
        )
        start, there = visits[:, :1, 1], tokens >= HOME  # (batch, 1), (batch, any)
        gap = self.gap(hidden, tokens, left, start).nats(torch.where(there, arrival - left, 0))
        stay = self.stay(hidden, tokens, torch.where(there, arrival, left), start).nats(
            torch.where(there, departure - arrival, 0)
        )
        return (nats.view(tokens.shape) + torch.where(there, gap + stay, 0.0)).sum(1)

    def known(self, visits: Tensor, condition: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of each place, given visits before: hidden (batch, any, width), logits of its token, when the last visit ended."""
        before, start = visits[:, :-1], visits[:, :1, 1]
        hidden = self.writer.hidden(
            self.writer.words(before[..., 0]) + self.times(before, start), condition
        )
        return (
            hidden,
            self._open(self.writer.scores(hidden, condition), before[..., 2], start),
            before[..., 2],
        )

    def step(
        self, last: Tensor, start: Tensor, condition: Tensor, place: int, cache: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Hidden (batch, width) and logits (batch, vocabulary) at a place, given the last visit (batch, 3)."""
        embedded = self.writer.words(last[:, 0]) + self.times(last, start)
        hidden = self.writer.hidden_at(place, embedded, condition, cache)
        return hidden, self._open(
            self.writer.scores_at(place, hidden, condition), last[:, 2], start
        )

    def _open(self, logits: Tensor, left: Tensor, start: Tensor) -> Tensor:
        """Who stayed until the window ended goes nowhere else."""
        over = (left >= start + self.days * DAY)[..., None] & (
            torch.arange(logits.shape[-1], device=left.device) != EOS
        )
        return logits.masked_fill(over, -torch.inf)
