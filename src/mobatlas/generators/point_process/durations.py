"""How long: distributions of whole seconds within a window, of gaps between visits and of stays.

    p(s | h, t) = softmax_k(f_k(h) + g_{clock(t + s)}(h)) / seconds in bin k,   k the bin of s

where t is when the duration begins and h what is known then. One part of it knows how long things take, the other at what time
of the day they end: people leave home at eight whether they came at six or at nine. Times are whole seconds, so this is a
probability and no density: that of an instant, or of a stay until the window ends, needs no limit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mobatlas.data.dataset import DAY

HOUR, QUARTER = 3_600, 900
# Minutes at which bins begin, after that of exactly zero; then every quarter of an hour for a day, then every hour.
SHORT = (1, 2, 3, 4, 5, 6, 8, 10, 12, 15, 18, 21, 25, 30, 35, 40, 45, 50, 55)
WAVES = 6  # of the time of the day
MOMENT = 2 * WAVES + 7 + 1  # numbers that tell a moment


def beginnings(days: int) -> list[int]:
    """Seconds at which the bins of durations within so many days begin; none is longer than an hour."""
    short = [60 * minutes for minutes in SHORT]
    return [0, 1, *short, *range(HOUR, DAY, QUARTER), *range(DAY, days * DAY, HOUR)]


def moment(seconds: Tensor, start: Tensor, days: int) -> Tensor:
    """Numbers (..., MOMENT) that tell seconds since a Monday, within a window of some days from `start`."""
    angles = (
        2
        * math.pi
        / DAY
        * (seconds % DAY)[..., None]
        * torch.arange(1, WAVES + 1, device=seconds.device)
    )
    weekday = F.one_hot(seconds // DAY % 7, 7)
    share = (seconds - start)[..., None] / (days * DAY)
    return torch.cat((angles.sin(), angles.cos(), weekday, share), -1)


@dataclass(frozen=True)
class Spans:
    """Distributions over bins, (..., bins), of durations that begin at some time of the week and end before the window does."""

    logs: Tensor  # log p, (..., bins) or (..., bins + 1): the last until the window ends
    begins: Tensor  # (...,) seconds since a Monday
    left: Tensor  # (...,) seconds until the window ends, at least 1
    low: Tensor  # (bins,)
    width: Tensor  # (..., bins) seconds in each, as far as they are in the window

    def nats(self, duration: Tensor) -> Tensor:
        """Minus the log-probabilities of durations (...,)."""
        bins = len(self.low)
        ends = (duration >= self.left) & (self.logs.shape[-1] > bins)
        inside = torch.minimum(duration, self.left - 1)
        place = torch.searchsorted(self.low, inside, right=True) - 1  # (...,)
        within = self.width.gather(-1, place[..., None]).squeeze(-1).log()
        chosen = self.logs.gather(-1, torch.where(ends, bins, place)[..., None]).squeeze(-1)
        return torch.where(ends, 0.0, within) - chosen

    def draw(self, chance: Tensor) -> Tensor:
        """Durations (batch,) of distributions (batch, bins), where the cumulated probability passes the chance (batch,)."""
        bins = len(self.low)
        total = self.logs.exp().double().cumsum(-1)  # (batch, bins or bins + 1)
        passed = chance[:, None] * total[:, -1:]
        place = torch.searchsorted(total, passed, right=True)  # (batch, 1)
        after, below = total.gather(1, place), F.pad(total, (1, 0)).gather(1, place)
        share = (passed - below) / (after - below)
        inside = place.clamp(max=bins - 1)
        width = self.width.gather(1, inside)
        drawn = self.low[inside] + torch.minimum((share * width).long(), width - 1)
        return torch.where(place < bins, drawn, self.left[:, None]).squeeze(1)

    def hours(self) -> Tensor:
        """The hour of the day at which they end, (..., 24); a bin touches two at most."""
        first = self.begins[..., None] + self.low  # (..., bins)
        share = ((HOUR - first % HOUR) / self.width).clamp(
            max=1
        )  # of the bin, before the hour is over
        chances, hour = self.logs[..., : len(self.low)].exp(), first // HOUR % 24
        found = chances.new_zeros(*self.begins.shape, 24)
        return found.scatter_add(-1, hour, chances * share).scatter_add(
            -1, (hour + 1) % 24, chances * (1 - share)
        )


class Durations(nn.Module):
    """Gaps before visits, or stays, given the token that is visited; `until` lets them last until the window ends."""

    low: Tensor
    high: Tensor

    def __init__(self, width: int, vocabulary: int, days: int, *, until: bool) -> None:
        super().__init__()
        self.days, self.until = days, until
        low = beginnings(days)
        self.register_buffer("low", torch.tensor(low), persistent=False)
        self.register_buffer("high", torch.tensor([*low[1:], days * DAY]), persistent=False)
        self.given = nn.Embedding(vocabulary, width)
        self.mix = nn.Linear(width + MOMENT, width)
        self.bins = nn.Linear(width, len(low) + until)
        self.clock = nn.Linear(width, DAY // QUARTER)
        for part in (*self.bins.parameters(), *self.clock.parameters()):  # all bins equally likely
            nn.init.zeros_(part)

    def forward(
        self,
        hidden: Tensor,
        tokens: Tensor,
        begins: Tensor,
        start: Tensor,
        barred: Tensor | None = None,
    ) -> Spans:
        """Given what is known (..., width), tokens and when they begin (...,), in windows that start then (...,).

        Those that are `barred` (...,) do not last until the window ends.
        """
        left = (start + self.days * DAY - begins).clamp(min=1)  # (...,)
        known = torch.cat((hidden, moment(begins, start, self.days).to(hidden.dtype)), -1)
        mixed = F.silu(self.mix(known) + self.given(tokens))  # (..., width)
        middle = begins[..., None] + (self.low + self.high) // 2  # (..., bins)
        logits = self.bins(mixed).float()
        inside = logits[..., : len(self.low)] + self.clock(mixed).float().gather(
            -1, middle % DAY // QUARTER
        )
        inside = inside.masked_fill(self.low >= left[..., None], -torch.inf)
        last = logits[..., len(self.low) :]
        if barred is not None:
            last = last.masked_fill(barred[..., None], -torch.inf)
        width = (torch.minimum(self.high, left[..., None]) - self.low).clamp(min=1)
        return Spans(torch.cat((inside, last), -1).log_softmax(-1), begins, left, self.low, width)
