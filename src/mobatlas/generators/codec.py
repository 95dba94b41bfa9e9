"""Trajectories as tensors that a sequence network reads, and back."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from mobatlas.data.dataset import SoftTrajectories, Trajectories, TrajectoryDataset
from mobatlas.data.types import BOS, EOS, PAD, Floats, Ints
from mobatlas.errors import MobatlasError

TOKEN_STREAM, LATENT_STREAM, TIME_STREAM, START_STREAM = range(4)  # of random numbers
# (stream, *shape) -> numbers in [0, 1) for the samples of a tile, (TILE, *shape)
Uniform = Callable[..., Tensor]


class TokenCodec:
    """Trajectories as rows of tokens (batch, any), with end tokens and then PAD.

    A codec of visits with times overrides all methods; its rows are (batch, any, ...).
    """

    has_times = False  # whether rows carry arrival and departure times

    def row_shape(self, length: int) -> tuple[int, ...]:
        """Return the shape of a sampled trajectory of at most `length` tokens."""
        return (length,)

    def read_dataset(self, dataset: TrajectoryDataset, indices: Ints, length: int) -> Tensor:
        """Return rows of trajectories of a dataset, truncated to `length` tokens."""
        return gather_tokens(dataset, indices, length)

    def read_trajectories(self, trajectories: Trajectories, length: int) -> Tensor:
        """Return rows of trajectories, truncated to `length` tokens."""
        return with_end(pad_rows(trajectories, trajectories.tokens), length)

    def target_tokens(self, visits: Tensor) -> Tensor:
        """Return the tokens (batch, any) that the network predicts."""
        return visits

    def to_trajectories(self, rows: Tensor, anchors: Floats) -> Trajectories:
        """Return sampled rows as the trajectories of people with these anchors."""
        tokens, offsets = join_rows(rows)
        return Trajectories(tokens.numpy().astype(np.int32), offsets, anchors)

    def soft_trajectories(
        self, decoder: Any, rows: Tensor, condition: Tensor, anchors: Floats
    ) -> SoftTrajectories:
        """Return the distribution behind each visit of sampled rows, given the visits before."""
        longest = int((rows != PAD).sum(1).max()) if len(rows) else 0
        tokens = with_end(rows[:, :longest], rows.shape[1])  # (batch, any)
        logits = decoder.logits(previous_tokens(tokens), condition)  # (batch, any, vocabulary)
        probabilities = logits.softmax(-1) * (tokens != PAD)[..., None]
        return SoftTrajectories(probabilities, anchors, drawn_tokens=tokens)


def is_token(tokens: Tensor) -> Tensor:
    """Whether each place (batch, any) holds a token; of rows (batch, any, 3) the first column."""
    return (tokens if tokens.ndim == 2 else tokens[..., 0]) != PAD


def previous_tokens(tokens: Tensor) -> Tensor:
    """Return the token before each place of tokens (batch, any); BOS before the first."""
    return F.pad(tokens[:, :-1], (1, 0), value=BOS)


def with_end(tokens: Tensor, length: int) -> Tensor:
    """Append an end token to tokens (batch, any) wherever `length` places leave room for it."""
    tokens = F.pad(tokens[:, :length], (0, 1), value=PAD)[:, :length]
    ends = (tokens != PAD).sum(1, keepdim=True)  # (batch, 1)
    return torch.where(torch.arange(tokens.shape[1], device=tokens.device) == ends, EOS, tokens)


def gather_tokens(dataset: TrajectoryDataset, indices: Ints, length: int) -> Tensor:
    """Return the tokens (batch, any) of trajectories of a dataset, with end tokens."""
    return with_end(torch.from_numpy(dataset.gather(indices, length).tokens).long(), length)


def draw_tokens(logits: Tensor, uniform: Tensor) -> Tensor:
    """Draw a token (batch,) from each row of logits (batch, vocabulary) by inversion.

    The token is the first whose cumulative probability exceeds `uniform` (batch,).
    """
    # In single precision a number near 1 could pass the total. Apple's devices have no double.
    device = "cpu" if logits.device.type == "mps" else logits.device
    total = logits.softmax(-1).to(device).double().cumsum(-1)  # (batch, vocabulary)
    if not bool(total[:, -1].isfinite().all()):
        raise MobatlasError(
            "the model returns no probabilities because its weights are too large; train it again"
        )
    token = torch.searchsorted(total, uniform.to(device)[:, None] * total[:, -1:], right=True)
    return token.squeeze(1).to(logits.device)


def pad_rows(trajectories: Trajectories, values: Any) -> Tensor:
    """Return one value per token as (trajectories, longest), PAD after the end."""
    lengths = np.diff(trajectories.offsets)
    inside = np.arange(lengths.max(initial=0)) < lengths[:, None]  # (trajectories, longest)
    rows = np.full(inside.shape, PAD, dtype=np.int64)
    rows[inside] = values
    return torch.from_numpy(rows)


def join_rows(tokens: Tensor) -> tuple[Tensor, Ints]:
    """Return tokens (batch, any) end to end, and the offsets (batch + 1,) of the rows."""
    inside = tokens != PAD  # (batch, any)
    return tokens[inside], np.concatenate(([0], np.cumsum(inside.sum(1).numpy())))
