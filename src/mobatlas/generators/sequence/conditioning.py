"""What a trajectory is conditioned on, as one vector: where the person lives and works, and the group if it is told."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mobatlas.errors import MobatlasError
from mobatlas.generators.protocol import UNKNOWN, Floats, Ints
from mobatlas.groups import Groups

FREQUENCIES = 4  # octaves of sine and cosine of a coordinate
# What is known of the dataset without having been trained.
MEASURED = ("centre", "extent", "weekdays", "where", "there")


class Conditioning(nn.Module):
    """Anchors by a small network, attributes by one table each; a group that is not known begins as exactly nothing."""

    centre: Tensor
    extent: Tensor

    def __init__(self, width: int, embedding: int, groups: Groups | None) -> None:
        super().__init__()
        numbers = 4 * (1 + 2 * FREQUENCIES) + 2
        self.anchors = nn.Sequential(nn.Linear(numbers, width), nn.SiLU(), nn.Linear(width, width))
        self.groups = GroupTables(width, embedding, groups) if groups is not None else None
        # where coordinates are centred and how wide they are, degrees; set from the training people
        self.register_buffer("centre", torch.zeros(2))
        self.register_buffer("extent", torch.ones(2))

    def forward(self, anchors: Tensor, levels: Tensor | None = None) -> Tensor:
        """(batch, width) of anchors (batch, 4) in degrees, NaN where unknown, and levels (batch, attributes), 0 unknown."""
        condition: Tensor = self.anchors(self._waves(anchors))
        return (
            condition if self.groups is None or levels is None else condition + self.groups(levels)
        )

    def centre_on(self, anchors: Floats) -> None:
        """Measure coordinates from the middle of these anchors (people, 4), in units of twice their spread."""
        both = np.concatenate((anchors[:, :2], anchors[:, 2:]))
        both = both[~np.isnan(both).any(1)]
        if len(both):
            self.centre.copy_(torch.from_numpy(both.mean(0)))
            self.extent.copy_(torch.from_numpy(np.maximum(2 * both.std(0), 1e-6)))

    def _waves(self, anchors: Tensor) -> Tensor:
        known = ~anchors.isnan()  # (batch, 4)
        scaled = torch.where(
            known, (anchors - self.centre.repeat(2)) / self.extent.repeat(2), 0.0
        )  # (batch, 4)
        octaves = (
            math.pi / 2 * 2.0 ** torch.arange(FREQUENCIES, device=anchors.device)
        )  # (octaves,)
        angles = scaled[..., None] * octaves  # (batch, 4, octaves)
        waves = (
            torch.cat((angles.sin(), angles.cos()), 2) * known[..., None]
        )  # (batch, 4, 2 octaves)
        return torch.cat((scaled, waves.flatten(1), known[:, ::2].to(scaled.dtype)), 1)


class GroupTables(nn.Module):
    """One embedding table an attribute; level 0 is unknown and begins at zero, which this maps to zero."""

    def __init__(self, width: int, embedding: int, groups: Groups) -> None:
        super().__init__()
        tables = [nn.Embedding(len(levels) + 1, embedding) for _, levels in groups.attributes]
        self.tables = nn.ModuleList(tables)
        self.mix = nn.Linear(embedding * len(tables), width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        for table in tables:
            with torch.no_grad():
                table.weight[0] = 0.0

    def begin_alike(self) -> None:
        """Every group as the unknown one, until it is trained."""
        nn.init.zeros_(self.out.weight)

    def forward(self, levels: Tensor) -> Tensor:
        embedded = torch.cat([table(levels[:, a]) for a, table in enumerate(self.tables)], 1)
        mixed: Tensor = self.out(
            F.silu(self.mix(embedded))
        )  # (batch, width): attributes may interact
        return mixed


def begin_as(network: nn.Module, other: nn.Module, *, fresh: bool, alike: bool) -> None:
    """Take the weights of a network that knows no groups, or if `fresh` only what it has measured."""
    state = other.state_dict()
    kept = {name: state[name] for name in state if not fresh or name.rpartition(".")[2] in MEASURED}
    network.load_state_dict(network.state_dict() | kept)
    for tables in network.modules():
        if alike and isinstance(tables, GroupTables):
            tables.begin_alike()


def told(
    groups: Groups | None, chosen: Ints, anchors: Floats, device: torch.device
) -> tuple[Tensor, Tensor | None]:
    """What `Conditioning` is told of people of these groups (batch,) with these anchors (batch, 4)."""
    places = torch.from_numpy(np.asarray(anchors, dtype=np.float32)).to(device)
    if groups is None:
        if (chosen != UNKNOWN).any():
            raise MobatlasError(
                "this model is not conditioned on groups; supervise it first (mobatlas supervise)"
            )
        return places, None
    codes = np.concatenate(
        (groups.level_codes + 1, np.zeros((1, len(groups.attributes)), np.int64))
    )
    return places, torch.from_numpy(codes[chosen]).to(device)  # UNKNOWN, -1, is the last row
