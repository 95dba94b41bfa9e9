"""Samples in tiles: number i is a function of (seed, i), whatever else is asked for; and a token by one number."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mobatlas.errors import MobatlasError

TILE = 256


def tiles(first: int, n: int) -> Iterator[tuple[int, slice, slice]]:
    """Tiles that hold samples `first` to `first + n`: the tile's number, which rows of the n, which places of the tile."""
    for number in range(first // TILE, -(-(first + n) // TILE)):
        start, stop = max(first, number * TILE), min(first + n, (number + 1) * TILE)
        yield (
            number,
            slice(start - first, stop - first),
            slice(start - number * TILE, stop - number * TILE),
        )


def spread(values: Any, places: slice) -> Any:
    """Values at their places of a tile; the other places repeat the first, they are computed and thrown away."""
    out = np.repeat(values[:1], TILE, axis=0)
    out[places] = values
    return out


def stream(seed: int, number: int, purpose: int) -> torch.Generator:
    """Random numbers of a tile."""
    state = np.random.SeedSequence([seed, number, purpose]).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(state[0] >> 1))


def draw(logits: Tensor, chance: Tensor) -> Tensor:
    """A token (batch,) of each distribution (batch, vocabulary): where the cumulated probability passes the chance (batch,)."""
    # In float a chance near 1 could pass all of it, and Apple's devices have nothing longer.
    place = "cpu" if logits.device.type == "mps" else logits.device
    total = logits.softmax(-1).to(place).double().cumsum(-1)  # (batch, vocabulary)
    if not bool(total[:, -1].isfinite().all()):
        raise MobatlasError(
            "the model gives no probabilities: its weights are too large to compute with; train it again"
        )
    token = torch.searchsorted(total, chance.to(place)[:, None] * total[:, -1:], right=True)
    return token.squeeze(1).to(logits.device)
