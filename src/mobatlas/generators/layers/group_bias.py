"""Which places each group prefers, as logits of tokens that are added to those of a network.

A group prefers hundreds of places by a little. Through the few numbers of an embedding a network learns that last, from fewer
examples of each place than tell it; the people whom a tilt weighs tell it before anything is taught.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from mobatlas.generators.protocol import Floats
from mobatlas.groups import Groups


class GroupTokenBias(nn.Module):
    """A row of logits for every group, after one for whoever is of none that is known; they begin as nothing."""

    row: Tensor
    radix: Tensor

    def __init__(self, groups: Groups, vocabulary: int) -> None:
        super().__init__()
        self.table = nn.Embedding(1 + len(groups), vocabulary)
        nn.init.zeros_(self.table.weight)
        sizes = [len(levels) + 1 for _, levels in groups.attributes]
        radix = torch.tensor([math.prod(sizes[a + 1 :]) for a in range(len(sizes))])
        row = torch.zeros(math.prod(sizes), dtype=torch.long)
        row[((torch.from_numpy(groups.level_codes) + 1) * radix).sum(1)] = torch.arange(
            1, 1 + len(groups)
        )
        self.register_buffer("radix", radix, persistent=False)
        self.register_buffer("row", row, persistent=False)

    def forward(self, levels: Tensor | None, batch: int) -> Tensor:
        """(batch, vocabulary) of levels (batch, attributes), 0 unknown."""
        known = (
            self.row.new_zeros(batch) if levels is None else self.row[(levels * self.radix).sum(1)]
        )
        logits: Tensor = self.table(known)
        return logits


def has_group_bias(network: nn.Module) -> bool:
    """Whether it has a place for them."""
    return any(isinstance(part, GroupTokenBias) for part in network.modules())


@torch.no_grad()
def set_group_bias(network: nn.Module, shifts: Floats) -> None:
    """Every group with these logits (groups, vocabulary), wherever the network has a place for them."""
    for part in network.modules():
        if isinstance(part, GroupTokenBias):
            part.table.weight[1:] = torch.from_numpy(shifts).to(part.table.weight)
