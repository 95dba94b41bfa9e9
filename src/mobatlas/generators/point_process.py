"""The point process: a variational marked temporal point process (after Mehrasa et al. 2019).

It is the variational autoencoder with a decoder that writes a token, its arrival and its stay, a
causal transformer over visits with times:

    p(x, a, b | u, z, d) = prod_i p(x_i | before) p(a_i - b_{i-1} | x_i, before)
                                  p(b_i - a_i | x_i, a_i, before)

Visits are rows (token, arrival, departure). Times are seconds since the Monday before the window
starts. The first row is the start, at the midnight at which the window starts. The weekday on which
a window starts is drawn first, with its frequency among training windows.

A gap or a stay is a duration of whole seconds s within the window,

    p(s | h, t) = softmax_k(f_k(h) + g_{clock(t + s)}(h)) / seconds in bin k,   k the bin of s,

where t is when it starts and h the hidden state. f learns how long things take, g at what time of
the day they end: people leave home at eight whether they came at six or at nine. Seconds are
whole, so p is a probability; zero seconds and "until the window ends" need no special case.
"""

import math
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from mobatlas.data.dataset import SoftTrajectories, Trajectories, TrajectoryDataset, monday
from mobatlas.data.types import BOS, DAY, EOS, HOME, PAD, Floats, Ints
from mobatlas.errors import MobatlasError
from mobatlas.generators.network_generator import SequenceGenerator, network_family
from mobatlas.generators.transformer import (
    START_STREAM,
    TIME_STREAM,
    TOKEN_STREAM,
    CausalTransformer,
    TokenCodec,
    TransformerConfig,
    Uniform,
    draw_tokens,
    is_token,
    join_rows,
    pad_rows,
    token_nats,
    with_end,
)
from mobatlas.generators.vae import PRESETS, VaeConfig, VariationalAutoencoder
from mobatlas.groups import Groups

HOUR = 3_600
QUARTER = 900
# Bins start at 0 and 1 seconds, at these minutes, every quarter hour of a day, then every hour.
MINUTES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 15, 18, 21, 25, 30, 35, 40, 45, 50, 55)
WAVES = 6  # harmonics of the time of the day
MOMENT = 2 * WAVES + 7 + 1  # numbers that encode a moment


def bin_starts(days: int) -> list[int]:
    """Return the seconds at which bins of durations start; no bin is longer than an hour."""
    short = [60 * minutes for minutes in MINUTES]
    return [0, 1, *short, *range(HOUR, DAY, QUARTER), *range(DAY, days * DAY, HOUR)]


def encode_moment(seconds: Tensor, start: Tensor, days: int) -> Tensor:
    """Encode times (...,) in windows that start at `start`: (..., MOMENT)."""
    harmonics = torch.arange(1, WAVES + 1, device=seconds.device)
    angles = 2 * math.pi / DAY * (seconds % DAY)[..., None] * harmonics
    weekday = F.one_hot(seconds // DAY % 7, 7)
    share = (seconds - start)[..., None] / (days * DAY)  # of the window
    return torch.cat((angles.sin(), angles.cos(), weekday, share), -1)


@dataclass(frozen=True)
class Spans:
    """Distributions over bins of durations that end before the window does."""

    log_probabilities: Tensor  # (..., bins) or (..., bins + 1): the last until the window ends
    starts: Tensor  # (...,) seconds since a Monday
    remaining: Tensor  # (...,) seconds until the window ends, at least 1
    low: Tensor  # (bins,) where bins start
    width: Tensor  # (..., bins) seconds of each bin within the window

    def nats(self, duration: Tensor) -> Tensor:
        """Return minus the log-probabilities of durations (...,)."""
        bins = len(self.low)
        to_end = (duration >= self.remaining) & (self.log_probabilities.shape[-1] > bins)
        inside = torch.minimum(duration, self.remaining - 1)
        place = torch.searchsorted(self.low, inside, right=True) - 1  # (...,)
        within = self.width.gather(-1, place[..., None]).squeeze(-1).log()
        column = torch.where(to_end, bins, place)[..., None]
        log_probability = self.log_probabilities.gather(-1, column).squeeze(-1)
        return torch.where(to_end, 0.0, within) - log_probability

    def draw(self, uniform: Tensor) -> Tensor:
        """Draw durations (batch,) by inversion at `uniform` (batch,)."""
        bins = len(self.low)
        total = self.log_probabilities.exp().double().cumsum(-1)  # (batch, bins or bins + 1)
        passed = uniform[:, None] * total[:, -1:]
        place = torch.searchsorted(total, passed, right=True)  # (batch, 1)
        after = total.gather(1, place)
        below = F.pad(total, (1, 0)).gather(1, place)
        share = (passed - below) / (after - below)
        inside = place.clamp(max=bins - 1)
        width = self.width.gather(1, inside)
        drawn = self.low[inside] + torch.minimum((share * width).long(), width - 1)
        return torch.where(place < bins, drawn, self.remaining[:, None]).squeeze(1)

    def hours(self) -> Tensor:
        """Return probabilities (..., 24) of the hour at which durations end."""
        first = self.starts[..., None] + self.low  # (..., bins)
        # share of a bin before its hour is over; a bin touches two hours at most
        share = ((HOUR - first % HOUR) / self.width).clamp(max=1)
        probabilities = self.log_probabilities[..., : len(self.low)].exp()
        hour = first // HOUR % 24
        hours = probabilities.new_zeros(*self.starts.shape, 24)
        hours = hours.scatter_add(-1, hour, probabilities * share)
        return hours.scatter_add(-1, (hour + 1) % 24, probabilities * (1 - share))


class Durations(nn.Module):
    """Distributions of gaps before visits, or of stays, given the visited token.

    With `to_window_end` a duration may last until the window ends.
    """

    def __init__(self, width: int, vocabulary: int, days: int, *, to_window_end: bool) -> None:
        super().__init__()
        self.days = days
        low = bin_starts(days)
        self.low = nn.Buffer(torch.tensor(low), persistent=False)
        self.high = nn.Buffer(torch.tensor([*low[1:], days * DAY]), persistent=False)
        self.tokens = nn.Embedding(vocabulary, width)
        self.mix = nn.Linear(width + MOMENT, width)
        self.bins = nn.Linear(width, len(low) + to_window_end)
        self.clock = nn.Linear(width, DAY // QUARTER)
        for part in (*self.bins.parameters(), *self.clock.parameters()):  # all bins equally likely
            nn.init.zeros_(part)

    def forward(self, hidden: Tensor, tokens: Tensor, starts: Tensor, window: Tensor) -> Spans:
        """Return distributions of durations that start at `starts` (...,).

        `hidden` is (..., width), `tokens` and `window`, the start of the window, are (...,).
        """
        remaining = (window + self.days * DAY - starts).clamp(min=1)  # (...,)
        moment = encode_moment(starts, window, self.days).to(hidden.dtype)
        mixed = F.silu(self.mix(torch.cat((hidden, moment), -1)) + self.tokens(tokens))
        middle = starts[..., None] + (self.low + self.high) // 2  # (..., bins)
        logits = self.bins(mixed).float()
        clock = self.clock(mixed).float().gather(-1, middle % DAY // QUARTER)  # (..., bins)
        inside = logits[..., : len(self.low)] + clock
        inside = inside.masked_fill(self.low >= remaining[..., None], -torch.inf)
        last = logits[..., len(self.low) :]  # (..., 0 or 1)
        width = (torch.minimum(self.high, remaining[..., None]) - self.low).clamp(min=1)
        log_probabilities = torch.cat((inside, last), -1).log_softmax(-1)
        return Spans(log_probabilities, starts, remaining, self.low, width)


class TimeEmbedding(nn.Module):
    """Embeds arrival, departure and stay of visits."""

    def __init__(self, width: int, days: int) -> None:
        super().__init__()
        self.days = days
        self.linear = nn.Linear(2 * MOMENT + 1, width)

    def forward(self, visits: Tensor, start: Tensor) -> Tensor:
        """Return (..., width) of visits (..., 3) in windows that start at `start` (...,)."""
        _, arrival, departure = visits.unbind(-1)
        stay = torch.log1p((departure - arrival) / 60)[..., None] / 8  # a week is about 1
        moments = [encode_moment(each, start, self.days) for each in (arrival, departure)]
        return self.linear(torch.cat((*moments, stay), -1))


class VisitEmbedding(nn.Module):
    """Embeds visits (batch, any, 3), the start first, for the encoder."""

    def __init__(self, vocabulary: int, width: int, days: int) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)
        self.times = TimeEmbedding(width, days)

    def forward(self, visits: Tensor) -> Tensor:
        # (batch, any, width)
        return self.words(visits[..., 0]) + self.times(visits, visits[:, :1, 1])


class TimedTransformer(nn.Module):
    """The likelihood of visits with times, all at once or visit by visit with a cache."""

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
        # one place more, because the encoder reads the start as well
        self.transformer = CausalTransformer(config, vocabulary, length + 1, groups)
        self.times = TimeEmbedding(config.width, days)
        self.gap = Durations(config.width, vocabulary, days, to_window_end=False)
        self.stay = Durations(config.width, vocabulary, days, to_window_end=True)
        # shares of training windows that start on each weekday, Monday first
        self.weekdays = nn.Buffer(torch.full((7,), 1 / 7))

    @property
    def places(self) -> Tensor:
        return self.transformer.places

    def person(self, anchors: Tensor, levels: Tensor | None) -> Tensor:
        """Return the condition of the transformer."""
        return self.transformer.person(anchors, levels)

    def measure(self, dataset: TrajectoryDataset) -> None:
        """Set the buffers that come from the dataset: anchors, coordinates and weekdays."""
        self.transformer.measure(dataset)
        weekday = torch.from_numpy((dataset.first_days[dataset.split("train")] + 3) % 7)
        self.weekdays.copy_(torch.bincount(weekday, minlength=7) / max(1, len(weekday)))

    def nats(self, visits: Tensor, condition: Tensor) -> Tensor:
        """Return minus the log-likelihood (batch,) of visits (batch, 1 + any, 3) with ends."""
        tokens, arrival, departure = visits[:, 1:].unbind(-1)  # (batch, any) each
        departed = visits[:, :-1, 2]  # (batch, any) from the visit before
        start = visits[:, :1, 1]  # (batch, 1)
        hidden, logits = self.predict(visits[:, :-1], start, condition)
        nats = token_nats(logits, tokens)  # (batch, any)
        is_visit = tokens >= HOME  # (batch, any)
        gaps = self.gap(hidden, tokens, departed, start)
        gap = gaps.nats(torch.where(is_visit, arrival - departed, 0))
        stays = self.stay(hidden, tokens, torch.where(is_visit, arrival, departed), start)
        stay = stays.nats(torch.where(is_visit, departure - arrival, 0))
        return (nats + torch.where(is_visit, gap + stay, 0.0)).sum(1)

    def predict(
        self,
        previous: Tensor,
        start: Tensor,
        condition: Tensor,
        cache: Tensor | None = None,
        place: int = 0,
    ) -> tuple[Tensor, Tensor]:
        """Return hidden state (batch, any, width) and logits (batch, any, vocabulary) of places.

        `previous` (batch, any, 3) is the visit before each of them, in windows that start at
        `start` (batch, 1). With a cache there is one place, number `place`.
        """
        embedded = self.transformer.words(previous[..., 0]) + self.times(previous, start)
        hidden = self.transformer.hidden(embedded, condition, cache, place)
        logits = self.transformer.token_logits(hidden, condition, place)
        # after a stay that lasts until the window ends, only the end is possible
        over = (previous[..., 2] >= start + self.days * DAY)[..., None]  # (batch, any, 1)
        is_visit = torch.arange(logits.shape[-1], device=start.device) != EOS
        return hidden, logits.masked_fill(over & is_visit, -torch.inf)

    @torch.no_grad()
    def sample(self, condition: Tensor, uniform: Uniform, length: int) -> Tensor:
        """Draw the day on which the window starts, then visits: token, arrival, stay.

        Returns rows (batch, 1 + length, 3) without end tokens, the start first and PAD after the
        end.
        """
        weekday = uniform(START_STREAM)  # (batch,)
        logits = self.weekdays.log().expand(len(weekday), -1)  # (batch, 7)
        start = DAY * draw_tokens(logits, weekday)  # (batch,)
        tokens = uniform(TOKEN_STREAM, length)
        times = uniform(TIME_STREAM, length, 2)
        last = torch.stack((torch.full_like(start, BOS), start, start), 1)  # (batch, 3)
        rows = last.new_full((len(start), 1 + length, 3), PAD)
        rows[:, 0] = last
        cache = self.transformer.new_cache(len(start))
        ended = torch.zeros_like(start, dtype=torch.bool)
        for place in range(length):
            predicted = self.predict(last[:, None], start[:, None], condition, cache, place)
            hidden, logits = (part[:, 0] for part in predicted)  # (batch, width or vocabulary)
            token = draw_tokens(logits, tokens[:, place])
            ended = ended | (token == EOS)
            if bool(ended.all()):
                break
            gap = self.gap(hidden, token, last[:, 2], start).draw(times[:, place, 0])
            arrival = last[:, 2] + gap
            stay = self.stay(hidden, token, arrival, start).draw(times[:, place, 1])
            visit = torch.stack((token, arrival, arrival + stay), 1)  # (batch, 3)
            last = torch.where(ended[:, None], last, visit)
            rows[:, place + 1] = torch.where(ended[:, None], PAD, last)
        return rows


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
        tokens = torch.from_numpy(dataset.gather(indices, length)).long()
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
