"""What networks read and write of a trajectory: its tokens, or tokens and whatever else a family tells of a visit."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from mobatlas.data.dataset import TrajectoryDataset
from mobatlas.data.trajectories import SoftTrajectories, Trajectories
from mobatlas.data.vocabulary import PAD
from mobatlas.generators.protocol import Floats, Ints
from mobatlas.generators.sequence.decode import TOKENS, Chance, write
from mobatlas.generators.sequence.network import CausalTransformer, before, with_end


class Script(Protocol):
    """Trajectories as visits (batch, any, ...): what networks of a family read has ends, PAD after them."""

    @property
    def has_times(self) -> bool: ...

    def shape(self, length: int) -> tuple[int, ...]:
        """Of one trajectory of at most `length` tokens, as it is written."""
        ...

    def gathered(self, dataset: TrajectoryDataset, indices: Ints, length: int) -> Tensor:
        """Trajectories of a dataset, to be read; those past `length` tokens are cut off."""
        ...

    def read(self, trajectories: Trajectories, length: int) -> Tensor:
        """Any others."""
        ...

    def tokens(self, visits: Tensor) -> Tensor:
        """Those that a network foretells, (batch, any)."""
        ...

    def write(
        self, decoder: Any, condition: Tensor, chance: Chance, length: int, ends: Tensor | None
    ) -> Tensor:
        """A tile of trajectories (TILE, ...) without ends; `ends` (TILE,) forces the number of tokens."""
        ...

    def trajectories(self, written: Tensor, anchors: Floats) -> Trajectories:
        """What was written, of people with these anchors."""
        ...

    def soft(
        self, decoder: Any, written: Tensor, condition: Tensor, anchors: Floats
    ) -> SoftTrajectories:
        """The distributions behind what was written, each given what was written before."""
        ...


class Tokens:
    """Tokens alone, (batch, any); `Script` says what each method promises."""

    has_times = False

    def shape(self, length: int) -> tuple[int, ...]:
        return (length,)

    def gathered(self, dataset: TrajectoryDataset, indices: Ints, length: int) -> Tensor:
        return with_end(torch.from_numpy(dataset.gather(indices, length).tokens).long(), length)

    def read(self, trajectories: Trajectories, length: int) -> Tensor:
        return with_end(padded(trajectories, trajectories.tokens), length)

    def tokens(self, visits: Tensor) -> Tensor:
        return visits

    def write(
        self,
        decoder: CausalTransformer,
        condition: Tensor,
        chance: Chance,
        length: int,
        ends: Tensor | None,
    ) -> Tensor:
        return write(decoder, condition, chance(TOKENS, length), ends)

    def trajectories(self, written: Tensor, anchors: Floats) -> Trajectories:
        tokens, offsets = flat(written)
        return Trajectories(tokens.numpy().astype(np.int32), offsets, anchors)

    def soft(
        self, decoder: CausalTransformer, written: Tensor, condition: Tensor, anchors: Floats
    ) -> SoftTrajectories:
        tokens = with_end(trimmed(written), written.shape[1])  # (batch, any)
        logits = decoder.logits(before(tokens), condition)
        return SoftTrajectories(
            logits.softmax(-1) * (tokens != PAD)[..., None], anchors, written=tokens
        )


def padded(trajectories: Trajectories, values: Any) -> Tensor:
    """Values of tokens, end to end, as (trajectories, longest), PAD after the end."""
    lengths = np.diff(trajectories.offsets)
    valid = np.arange(lengths.max(initial=0)) < lengths[:, None]
    found = np.full(valid.shape, PAD, dtype=np.int64)
    found[valid] = values
    return torch.from_numpy(found)


def flat(tokens: Tensor) -> tuple[Tensor, Ints]:
    """Tokens (batch, any) end to end, and offsets."""
    valid = tokens != PAD
    return tokens[valid], np.concatenate(([0], np.cumsum(valid.sum(1).numpy())))


def trimmed(tokens: Tensor) -> Tensor:
    """Tokens (batch, any) without the places that are PAD in all rows."""
    return tokens[:, : int((tokens != PAD).sum(1).max()) if len(tokens) else 0]
