"""Writing trajectories token after token."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from mobatlas.data.vocabulary import BOS, EOS, PAD
from mobatlas.generators.sequence.network import CausalTransformer
from mobatlas.generators.tiling import draw

TOKENS, LATENT, TIMES, START = range(4)  # streams of random numbers
Chance = Callable[
    ..., Tensor
]  # (stream, *shape) -> numbers in [0, 1) of the samples of a tile, (TILE, *shape)


@torch.no_grad()
def write(
    network: CausalTransformer, condition: Tensor, chance: Tensor, lengths: Tensor | None = None
) -> Tensor:
    """Tokens (batch, length), PAD after the end, each by its number of `chance` (batch, length) in [0, 1).

    `lengths` (batch,) says where the end is. It stops when all have ended, which changes none of them.
    """
    batch, length = chance.shape
    cache, written = (
        network.new_cache(batch),
        torch.full((batch, length), PAD, device=condition.device),
    )
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
