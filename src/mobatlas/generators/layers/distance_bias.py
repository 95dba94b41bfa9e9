"""How far places are from where a person lives and works, as writers see it: a network would need millions of visits to learn
the map, and a sum over distances that it bends as it likes learns it from thousands."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from mobatlas.data.vocabulary import Vocabulary

KNOTS = 8  # at 0, 0.5, 1.5, 3.5 ... 63.5 km: each is a unit of log2(1 + 2 km)
KM = math.pi / 180 * 6_371  # of a degree of latitude
ANCHORS = 2
KEPT = 2**23  # numbers: 32 MB of each anchor, at most


class DistanceBias(nn.Module):
    """Logits of places by their distance to both anchors: curves of the person, several, mixed by place and moment.

    Q[person, r, place] = curve[person, r](distance) * kind[r, place], and a moment mixes them by its r gates. It begins as
    nothing, and knows nothing of places or anchors without coordinates.
    """

    where: Tensor
    there: Tensor

    def __init__(self, width: int, vocabulary: int, curves: int) -> None:
        super().__init__()
        self.curves, self.total = curves, ANCHORS * curves
        self.bend = nn.Linear(width, KNOTS * self.total)
        self.kind = nn.Parameter(1 + torch.randn(self.total, vocabulary) / 4)
        self.gates = nn.Linear(width, self.total)
        for part in (self.bend.weight, self.bend.bias):
            nn.init.zeros_(part)
        nn.init.ones_(self.gates.bias)
        self._seen: tuple[Tensor, list[Tensor]] | None = (
            None  # the last people, and how far places are from them
        )
        # degrees, and whether they are known; set from the vocabulary
        self.register_buffer("where", torch.zeros(vocabulary, 2))
        self.register_buffer("there", torch.zeros(vocabulary))

    def measure(self, vocabulary: Vocabulary) -> None:
        """Where places are."""
        where = torch.from_numpy(vocabulary.coordinates)
        self.there.copy_((~where.isnan().any(1)).to(self.there.dtype))
        self.where.copy_(where.nan_to_num())
        self._seen = None

    def forward(self, anchors: Tensor, condition: Tensor) -> Tensor:
        """Q (batch, total * vocabulary) of anchors (batch, 4), NaN where unknown, and a condition (batch, width)."""
        bends = self.bend(condition).float().view(len(anchors), ANCHORS, self.curves, KNOTS)
        hats = self._distances(anchors)
        found = [bends[:, a] @ hats[a] for a in range(ANCHORS)]
        return (torch.cat(found, 1) * self.kind).flatten(
            1
        )  # each found (batch, curves, vocabulary)

    def logits(self, hidden: Tensor, curves: Tensor) -> Tensor:
        """(batch, any, vocabulary) of what is known at some places (batch, any, width), and Q."""
        return self.gates(hidden).float() @ curves.view(len(curves), self.total, -1)

    def _distances(self, anchors: Tensor) -> list[Tensor]:
        """Hats of both anchors; a denoiser asks for the same people at every step, and they are kept if they are not large."""
        kind = anchors.device.type
        # as they will be multiplied, so that they are not made so at every step
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else anchors.dtype
        if self._seen is not None and self._seen[0] is anchors and self._seen[1][0].dtype == dtype:
            return self._seen[1]
        hats = [self._hats(anchors[:, 2 * a : 2 * a + 2]).to(dtype) for a in range(ANCHORS)]
        self._seen = (anchors, hats) if hats[0].numel() <= KEPT else None
        return hats

    @torch.no_grad()
    def _hats(self, anchor: Tensor) -> Tensor:
        """Distances as weights of the two knots that they are between, (batch, knots, vocabulary)."""
        north, east = (self.where - anchor.nan_to_num()[:, None]).unbind(
            -1
        )  # (batch, vocabulary) degrees
        unit = torch.hypot(north, east * torch.cos(torch.deg2rad(self.where[:, 0]))).mul_(2 * KM)
        unit = unit.add_(1).log2_().clamp_(max=KNOTS - 1)
        # hats are nothing at two knots' distance and further: so are those of what has no coordinates
        unit = unit.masked_fill_(anchor.isnan().any(1)[:, None] | ~self.there.bool(), -2.0)
        hats = unit[:, None] - torch.arange(KNOTS, device=unit.device)[:, None]
        return hats.abs_().neg_().add_(1).relu_()
