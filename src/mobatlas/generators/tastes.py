"""Which places each group prefers, as logits of tokens that are added to those of a network.

A group prefers hundreds of places by a little. Through the few numbers of an embedding a network learns that last, from fewer
examples of each place than tell it; the coefficients of a tilt tell it before anything is taught.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from mobatlas.generators.base import Floats
from mobatlas.groups import Groups


class Tastes(nn.Module):
    """One row of logits for every group, and for groups of which not all attributes are known; they begin as nothing."""

    radix: Tensor
    rows: Tensor

    def __init__(self, groups: Groups, vocabulary: int) -> None:
        super().__init__()
        sizes = [len(levels) + 1 for _, levels in groups.attributes]
        self.table = nn.Embedding(math.prod(sizes), vocabulary)
        nn.init.zeros_(self.table.weight)
        radix = torch.tensor([math.prod(sizes[a + 1 :]) for a in range(len(sizes))])
        self.register_buffer("radix", radix, persistent=False)
        rows = ((torch.from_numpy(groups.level_codes) + 1) * radix).sum(1)
        self.register_buffer("rows", rows, persistent=False)

    def forward(self, levels: Tensor | None, batch: int) -> Tensor:
        """(batch, vocabulary) of levels (batch, attributes), 0 unknown."""
        known = self.radix.new_zeros(batch) if levels is None else (levels * self.radix).sum(1)
        logits: Tensor = self.table(known)
        return logits


@torch.no_grad()
def begin_with(network: nn.Module, shifts: Floats) -> None:
    """Every group with these logits (groups, vocabulary), wherever the network has a place for them."""
    for part in network.modules():
        if isinstance(part, Tastes):
            part.table.weight[part.rows] = torch.from_numpy(shifts).to(part.table.weight)
