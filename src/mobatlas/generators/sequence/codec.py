"""How trajectories become tensors that a sequence network reads, and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from mobatlas.data.arrays import Floats, Ints
from mobatlas.data.dataset import TrajectoryDataset
from mobatlas.data.trajectories import SoftTrajectories, Trajectories
from mobatlas.data.vocabulary import BOS, EOS, PAD
from mobatlas.generators.layers import draw_tokens, gather_tokens, previous_tokens, with_end
from mobatlas.generators.sequence.network import CausalTransformer

TOKEN_STREAM, LATENT_STREAM, TIME_STREAM, START_STREAM = range(4)  # of random numbers
# (stream, *shape) -> numbers in [0, 1) for the samples of a tile, (TILE, *shape)
Uniform = Callable[..., Tensor]


class TokenCodec(Protocol):
    """Trajectories as rows of visits (batch, any, ...), with end tokens and then PAD."""

    @property
    def has_times(self) -> bool:
        """Whether rows carry arrival and departure times."""

    def row_shape(self, length: int) -> tuple[int, ...]:
        """Return the shape of a sampled trajectory of at most `length` tokens."""

    def read_dataset(self, dataset: TrajectoryDataset, indices: Ints, length: int) -> Tensor:
        """Return rows of trajectories of a dataset, truncated to `length` tokens."""

    def read_trajectories(self, trajectories: Trajectories, length: int) -> Tensor:
        """Return rows of trajectories, truncated to `length` tokens."""

    def target_tokens(self, visits: Tensor) -> Tensor:
        """Return the tokens (batch, any) that the network predicts."""

    def sample(
        self, decoder: Any, condition: Tensor, uniform: Uniform, length: int, ends: Tensor | None
    ) -> Tensor:
        """Draw a tile of trajectories (TILE, ...) without end tokens.

        `ends` (TILE,) forces the number of tokens.
        """

    def to_trajectories(self, rows: Tensor, anchors: Floats) -> Trajectories:
        """Return sampled rows as the trajectories of people with these anchors."""

    def soft_trajectories(
        self, decoder: Any, rows: Tensor, condition: Tensor, anchors: Floats
    ) -> SoftTrajectories:
        """Return the distribution behind each visit of sampled rows, given the visits before."""


class PlainTokenCodec:
    """Tokens without times, (batch, any). `TokenCodec` documents its methods."""

    has_times = False

    def row_shape(self, length: int) -> tuple[int, ...]:
        return (length,)

    def read_dataset(self, dataset: TrajectoryDataset, indices: Ints, length: int) -> Tensor:
        return gather_tokens(dataset, indices, length)

    def read_trajectories(self, trajectories: Trajectories, length: int) -> Tensor:
        return with_end(pad_rows(trajectories, trajectories.tokens), length)

    def target_tokens(self, visits: Tensor) -> Tensor:
        return visits

    def sample(
        self,
        decoder: CausalTransformer,
        condition: Tensor,
        uniform: Uniform,
        length: int,
        ends: Tensor | None,
    ) -> Tensor:
        return sample_tokens(decoder, condition, uniform(TOKEN_STREAM, length), ends)

    def to_trajectories(self, rows: Tensor, anchors: Floats) -> Trajectories:
        tokens, offsets = join_rows(rows)
        return Trajectories(tokens.numpy().astype(np.int32), offsets, anchors)

    def soft_trajectories(
        self, decoder: CausalTransformer, rows: Tensor, condition: Tensor, anchors: Floats
    ) -> SoftTrajectories:
        longest = int((rows != PAD).sum(1).max()) if len(rows) else 0
        tokens = with_end(rows[:, :longest], rows.shape[1])  # (batch, any)
        logits = decoder.logits(previous_tokens(tokens), condition)  # (batch, any, vocabulary)
        probabilities = logits.softmax(-1) * (tokens != PAD)[..., None]
        return SoftTrajectories(probabilities, anchors, written=tokens)


PLAIN_TOKENS = PlainTokenCodec()


@torch.no_grad()
def sample_tokens(
    network: CausalTransformer, condition: Tensor, uniform: Tensor, lengths: Tensor | None = None
) -> Tensor:
    """Draw tokens (batch, length) by `uniform` (batch, length) in [0, 1), PAD after the end.

    `lengths` (batch,) forces the number of tokens. Sampling stops when all trajectories have ended.
    """
    batch, length = uniform.shape
    cache = network.new_cache(batch)
    tokens = torch.full((batch, length), PAD, device=condition.device)
    last = torch.full((batch,), BOS, device=condition.device)
    ended = torch.zeros_like(last, dtype=torch.bool)
    for place in range(length):
        logits = network.step(last, condition, place, cache)  # (batch, vocabulary)
        if lengths is not None:
            logits[:, EOS] = -torch.inf
            ended |= lengths <= place
        last = draw_tokens(logits, uniform[:, place])
        ended |= last == EOS
        if bool(ended.all()):
            break
        tokens[:, place] = torch.where(ended, PAD, last)
    return tokens


def pad_rows(trajectories: Trajectories, values: Any) -> Tensor:
    """Return one value per token as (trajectories, longest), PAD after the end."""
    lengths = np.diff(trajectories.offsets)
    is_token = np.arange(lengths.max(initial=0)) < lengths[:, None]
    rows = np.full(is_token.shape, PAD, dtype=np.int64)
    rows[is_token] = values
    return torch.from_numpy(rows)


def join_rows(tokens: Tensor) -> tuple[Tensor, Ints]:
    """Return tokens (batch, any) end to end, and the offsets (batch + 1,) of the rows."""
    is_token = tokens != PAD
    return tokens[is_token], np.concatenate(([0], np.cumsum(is_token.sum(1).numpy())))
