"""Writing trajectories token after token, in tiles: sample number i is a function of (seed, i), whatever else is asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mobatlas.data.vocabulary import BOS, EOS, PAD
from mobatlas.errors import MobatlasError
from mobatlas.generators.autoregressive.network import CausalTransformer

TILE = 256
TOKENS, LATENT, TIMES, START = range(4)  # streams of random numbers
Chance = Callable[..., Tensor]  # (stream, *shape) -> numbers in [0, 1) of the samples of a tile, (TILE, *shape)


def tiles(first: int, n: int) -> Iterator[tuple[int, slice, slice]]:
    """Tiles that hold samples `first` to `first + n`: the tile's number, which rows of the n, which places of the tile."""
    for number in range(first // TILE, -(-(first + n) // TILE)):
        start, stop = max(first, number * TILE), min(first + n, (number + 1) * TILE)
        yield number, slice(start - first, stop - first), slice(start - number * TILE, stop - number * TILE)


def spread(values: Any, places: slice) -> Any:
    """Values at their places of a tile; the other places repeat the first, they are computed and thrown away."""
    out = np.repeat(values[:1], TILE, axis=0)
    out[places] = values
    return out


def stream(seed: int, number: int, purpose: int) -> torch.Generator:
    """Random numbers of a tile."""
    state = np.random.SeedSequence([seed, number, purpose]).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(state[0] >> 1))


@torch.no_grad()
def write(network: CausalTransformer, condition: Tensor, chance: Tensor, lengths: Tensor | None = None) -> Tensor:
    """Tokens (batch, length), PAD after the end, each by its number of `chance` (batch, length) in [0, 1).

    `lengths` (batch,) says where the end is. It stops when all have ended, which changes none of them.
    """
    batch, length = chance.shape
    cache, written = network.new_cache(batch), torch.full((batch, length), PAD, device=condition.device)
    last = torch.full((batch,), BOS, device=condition.device)
    ended = torch.zeros_like(last, dtype=torch.bool)
    for place in range(length):
        logits = network.step(last, condition, place, cache)  # (batch, vocabulary)
        if lengths is not None:
            logits[:, EOS] = -torch.inf
            ended |= lengths <= place
        last = draw(logits, chance[:, place])
        ended |= last == EOS
        if bool(ended.all()):
            break
        written[:, place] = torch.where(ended, PAD, last)
    return written


def draw(logits: Tensor, chance: Tensor) -> Tensor:
    """A token (batch,) of each distribution (batch, vocabulary): where the cumulated probability passes the chance (batch,)."""
    total = logits.softmax(-1).double().cumsum(-1)  # (batch, vocabulary); in float a chance near 1 could pass all of it
    if not bool(total[:, -1].isfinite().all()):
        raise MobatlasError(
            "the model gives no probabilities: its weights are too large to compute with; train it again"
        )
    return torch.searchsorted(total, chance[:, None] * total[:, -1:], right=True).squeeze(1)
