"""Layers that the networks of several families share: conditioning on a person, and token biases.

A person is described by anchors (home and work, in degrees) and, after phase 2, by the level of
each attribute of the group. Level 0 of an attribute means unknown.
"""

import math
from typing import Any, Literal, Self

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from mobatlas.config import Section
from mobatlas.data.dataset import TrajectoryDataset
from mobatlas.data.types import Floats, Ints, Vocabulary
from mobatlas.errors import MobatlasError
from mobatlas.generators.protocol import UNKNOWN
from mobatlas.groups import Groups

FREQUENCIES = 4  # octaves of sine and cosine of a coordinate
# Buffers that are measured from the dataset rather than trained.
MEASURED = ("centre", "extent", "weekdays", "prototypes", "coordinates", "has_coordinates")
ANCHORS = 2  # home and work
KNOTS = 8  # of a distance curve, at 0, 0.5, 1.5, 3.5 ... 63.5 km: one per unit of log2(1 + 2 km)
# The Earth's radius is rounded here, unlike in `geodesy`: trained weights depend on it.
KM_PER_DEGREE = math.pi / 180 * 6_371
LARGEST_CACHE = 2**23  # numbers, which is 32 MB for each anchor

Person = tuple[Tensor, Tensor | None]  # anchors (batch, 4) and levels (batch, attributes)


class AttentionConfig(Section):
    """The width of a transformer."""

    width: int = Field(96, ge=8, le=4_096)
    heads: int = Field(4, ge=1)
    activation: Literal["relu", "gelu"] = "relu"  # gelu takes a sixth of a training step on a CPU

    @model_validator(mode="after")
    def _heads_divide_width(self) -> Self:
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is not a multiple of heads {self.heads}")
        return self


class NetworkConfig(AttentionConfig):
    """A transformer that is conditioned on a person."""

    depth: int = Field(3, ge=1, le=64)
    expansion: int = Field(4, ge=1, le=16)  # of the feed-forward layers
    embedding: int = Field(64, ge=1, le=4_096)  # of one demographic attribute
    # curves of the distance to each anchor, see DistanceBias; 0: no distance bias
    distance_curves: int = Field(0, ge=0, le=64)
    group_bias: bool = False  # see GroupTokenBias


class TransformerBlock(nn.Module):
    """The layers of a transformer block. A subclass says in `forward` how they are connected."""

    def __init__(self, config: NetworkConfig, *, affine_norms: bool) -> None:
        super().__init__()
        width = config.width
        self.heads = config.heads
        self.norm_attention = nn.LayerNorm(width, elementwise_affine=affine_norms)
        self.norm_feedforward = nn.LayerNorm(width, elementwise_affine=affine_norms)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.feedforward = nn.Sequential(
            nn.Linear(width, config.expansion * width),
            nn.ReLU(inplace=True) if config.activation == "relu" else nn.GELU(approximate="tanh"),
            nn.Linear(config.expansion * width, width),
        )

    def attend(
        self,
        x: Tensor,
        cache: Tensor | None = None,
        place: int = 0,
        *,
        valid: Tensor | None = None,
        causal: bool = False,
        backward: bool = False,
    ) -> Tensor:
        """Attend among the places of x (batch, any, width), or from one place to those before it.

        Keys and values of the places before are in the cache (2, batch, heads, length, head). Only
        `valid` places (batch, any) are attended. `backward` says that gradients will be computed.
        """
        batch, length, width = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # (batch, heads, any, head) each
        if cache is not None:
            cache[:, :, :, place] = torch.stack((k, v))[:, :, :, 0]
            q = q.to(cache.dtype)
            k, v = cache[:, :, :, : place + 1]
        elif backward and x.device.type == "cpu":
            # the backward pass of attention in bf16 is five times slower there
            q, k, v = (part.float() for part in (q, k, v))
        mask = None if valid is None else valid[:, None, None]  # (batch, 1, 1, any)
        causal = causal and cache is None
        mixed = F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width).to(x.dtype))


class Conditioning(nn.Module):
    """Embeds a person. Initially an unknown group adds exactly zero.

    `wave_axis` is the order of the sines and cosines among the inputs: 1 puts all sines first, 2
    keeps those of a coordinate together. With `to_tokens` a group also has a vector that is added
    to every token (the paper's appendix, "DiT").
    """

    def __init__(
        self,
        width: int,
        embedding: int,
        groups: Groups | None,
        *,
        wave_axis: int = 2,
        to_tokens: bool = False,
    ) -> None:
        super().__init__()
        self.wave_axis = wave_axis
        inputs = 4 * (1 + 2 * FREQUENCIES) + 2
        self.anchors = nn.Sequential(nn.Linear(inputs, width), nn.SiLU(), nn.Linear(width, width))
        self.groups = (
            None if groups is None else GroupEmbedding(width, embedding, groups, to_tokens)
        )
        # centre and extent of the anchors of training people, in degrees
        self.centre = nn.Buffer(torch.zeros(2))
        self.extent = nn.Buffer(torch.ones(2))

    def forward(
        self, anchors: Tensor, levels: Tensor | None = None, timestep: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the condition (batch, width), and what a group adds to every token (batch, width).

        `anchors` (batch, 4) are NaN where unknown; `timestep` (batch, width) is added.
        """
        condition: Tensor = self.anchors(self._waves(anchors))  # (batch, width)
        if timestep is not None:
            condition = timestep + condition  # (batch, width)
        if self.groups is None or levels is None:
            return condition, None
        to_condition, to_tokens = self.groups(levels)  # (batch, width) each
        return condition + to_condition, to_tokens

    def centre_on(self, anchors: Floats) -> None:
        """Set centre and extent from the anchors (people, 4) of training people."""
        both = np.concatenate((anchors[:, :2], anchors[:, 2:]))  # (2 people, 2)
        both = both[~np.isnan(both).any(1)]
        if len(both):
            self.centre.copy_(torch.from_numpy(both.mean(0)))
            self.extent.copy_(torch.from_numpy(np.maximum(2 * both.std(0), 1e-6)))

    def _waves(self, anchors: Tensor) -> Tensor:
        known = ~anchors.isnan()  # (batch, 4)
        scaled = (anchors - self.centre.repeat(2)) / self.extent.repeat(2)  # (batch, 4)
        scaled = torch.where(known, scaled, 0.0)
        octaves = math.pi / 2 * 2.0 ** torch.arange(FREQUENCIES, device=anchors.device)
        angles = scaled[..., None] * octaves  # (batch, 4, octaves)
        mask = known[..., None]  # (batch, 4, 1)
        waves = torch.stack((angles.sin() * mask, angles.cos() * mask), self.wave_axis)
        return torch.cat((scaled, waves.flatten(1), known[:, ::2].to(scaled.dtype)), 1)


class GroupEmbedding(nn.Module):
    """Embeds a group by one table per attribute. Level 0 (unknown) initially maps to zero."""

    def __init__(self, width: int, embedding: int, groups: Groups, to_tokens: bool) -> None:
        super().__init__()
        tables = [nn.Embedding(len(levels) + 1, embedding) for _, levels in groups.attributes]
        self.tables = nn.ModuleList(tables)
        self.mix = nn.Linear(embedding * len(tables), width, bias=False)
        self.to_condition = nn.Linear(width, width, bias=False)
        self.to_tokens = nn.Linear(width, width, bias=False) if to_tokens else None
        for table in tables:
            nn.init.zeros_(table.weight.data[0])

    def forward(self, levels: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return additions to the condition and to every token, (batch, width) each."""
        embedded = torch.cat([table(levels[:, a]) for a, table in enumerate(self.tables)], 1)
        mixed = F.silu(self.mix(embedded))  # (batch, width); attributes may interact here
        to_tokens = None if self.to_tokens is None else self.to_tokens(mixed)
        return self.to_condition(mixed), to_tokens


def full_precision(tensor: Tensor) -> torch.autocast:
    """No mixed precision: logits of thousands of places differ in the third digit."""
    return torch.autocast(tensor.device.type, enabled=False)


class DistanceBias(nn.Module):
    """Adds to the logits of a place a function of its distance to home and work.

    Without it a network must learn the map from visits alone, which takes millions of them.

        bias[person, r, place] = curve[person, r](distance) * place_scale[r, place]

    is mixed over r by gates that depend on the hidden state. A curve is piecewise linear. The bias
    is zero before training, and for places or anchors without coordinates.
    """

    def __init__(self, width: int, vocabulary: int, curves: int) -> None:
        super().__init__()
        self.curves = curves
        self.total = ANCHORS * curves
        self.knot_values = nn.Linear(width, KNOTS * self.total)
        self.place_scale = nn.Parameter(1 + torch.randn(self.total, vocabulary) / 4)
        self.gates = nn.Linear(width, self.total)
        nn.init.zeros_(self.knot_values.weight)
        nn.init.zeros_(self.knot_values.bias)
        nn.init.ones_(self.gates.bias)
        # the last anchors, and the knot weights of their distances
        self._cache: tuple[Tensor, list[Tensor]] | None = None
        self.coordinates = nn.Buffer(torch.zeros(vocabulary, 2))  # degrees
        self.has_coordinates = nn.Buffer(torch.zeros(vocabulary))

    def measure(self, vocabulary: Vocabulary) -> None:
        """Set the coordinates of places."""
        coordinates = torch.from_numpy(vocabulary.coordinates)  # (vocabulary, 2)
        known = ~coordinates.isnan().any(1)  # (vocabulary,)
        self.has_coordinates.copy_(known.to(self.has_coordinates.dtype))
        self.coordinates.copy_(coordinates.nan_to_num())
        self._cache = None

    def forward(self, anchors: Tensor, condition: Tensor) -> Tensor:
        """Return the bias (batch, total * vocabulary) of anchors (batch, 4), before gates."""
        values = self.knot_values(condition).float()  # (batch, total * knots)
        values = values.view(len(anchors), ANCHORS, self.curves, KNOTS)
        weights = self._distances(anchors)  # of each anchor (batch, knots, vocabulary)
        with full_precision(anchors):
            # (batch, curves, vocabulary) each
            curves = [values[:, a] @ weights[a] for a in range(ANCHORS)]
        return (torch.cat(curves, 1) * self.place_scale).flatten(1)

    def logits(self, hidden: Tensor, bias: Tensor) -> Tensor:
        """Mix a bias by gates of hidden (batch, any, width), to (batch, any, vocabulary)."""
        gates = self.gates(hidden).float()  # (batch, any, total)
        with full_precision(bias):
            return gates @ bias.view(len(bias), self.total, -1)

    def _distances(self, anchors: Tensor) -> list[Tensor]:
        """Return knot weights of both anchors; a denoiser needs the same ones at every step."""
        cache = self._cache
        if cache is not None and cache[0] is anchors:
            return cache[1]
        weights = [self._knot_weights(anchor) for anchor in (anchors[:, :2], anchors[:, 2:])]
        self._cache = (anchors, weights) if weights[0].numel() <= LARGEST_CACHE else None
        return weights

    @torch.no_grad()
    def _knot_weights(self, anchor: Tensor) -> Tensor:
        """Return weights of the two knots around each distance, (batch, knots, vocabulary)."""
        degrees = self.coordinates - anchor.nan_to_num()[:, None]  # (batch, vocabulary, 2)
        north, east = degrees.unbind(-1)  # (batch, vocabulary) each
        east = east * torch.cos(torch.deg2rad(self.coordinates[:, 0]))
        knot = torch.hypot(north, east).mul_(2 * KM_PER_DEGREE)
        knot = knot.add_(1).log2_().clamp_(max=KNOTS - 1)  # (batch, vocabulary)
        # at -2 all weights are zero, because the first knot is at 0
        unknown = anchor.isnan().any(1)[:, None] | ~self.has_coordinates.bool()
        knot = knot.masked_fill_(unknown, -2.0)
        weights = knot[:, None] - torch.arange(KNOTS, device=knot.device)[:, None]
        return weights.abs_().neg_().add_(1).relu_()


class GroupTokenBias(nn.Module):
    """Adds logits of tokens that depend on the group alone; zero before they are set.

    A group slightly prefers hundreds of places. An embedding learns these preferences last; the
    weights of a tilt provide them before training.
    """

    def __init__(self, groups: Groups, vocabulary: int) -> None:
        super().__init__()
        self.table = nn.Embedding(1 + len(groups), vocabulary)  # row 0: unknown group
        nn.init.zeros_(self.table.weight)
        sizes = [len(levels) + 1 for _, levels in groups.attributes]
        radix = torch.tensor([math.prod(sizes[a + 1 :]) for a in range(len(sizes))])
        codes = ((torch.from_numpy(groups.level_codes) + 1) * radix).sum(1)  # (groups,)
        row = torch.zeros(math.prod(sizes), dtype=torch.long)
        row[codes] = torch.arange(1, 1 + len(groups))
        self.radix = nn.Buffer(radix, persistent=False)
        self.row = nn.Buffer(row, persistent=False)

    def forward(self, levels: Tensor | None, batch: int) -> Tensor:
        """Return the bias (batch, vocabulary) of levels (batch, attributes)."""
        zeros = self.row.new_zeros(batch)
        rows = zeros if levels is None else self.row[(levels * self.radix).sum(1)]  # (batch,)
        return F.embedding(rows, self.table.weight)


def optional_biases(
    config: NetworkConfig, vocabulary: int, groups: Groups | None
) -> tuple[DistanceBias | None, GroupTokenBias | None]:
    """Return the biases that a configuration asks for."""
    curves = config.distance_curves
    distance_bias = DistanceBias(config.width, vocabulary, curves) if curves else None
    if groups is None or not config.group_bias:
        return distance_bias, None
    return distance_bias, GroupTokenBias(groups, vocabulary)


def measure_layers(network: Any, dataset: TrajectoryDataset) -> None:
    """Set the buffers that come from the dataset: anchors of people and coordinates of places."""
    network.conditioning.centre_on(dataset.anchors[dataset.split_people("train")])
    if network.distance_bias is not None:
        network.distance_bias.measure(dataset.vocabulary)


def has_group_bias(network: nn.Module) -> bool:
    """Whether a network has a token bias for groups."""
    return any(isinstance(part, GroupTokenBias) for part in network.modules())


@torch.no_grad()
def set_group_bias(network: nn.Module, logits: Floats) -> None:
    """Set the token bias (groups, vocabulary) of a network that has one."""
    for part in network.modules():
        if isinstance(part, GroupTokenBias):
            part.table.weight[1:] = torch.from_numpy(logits).to(part.table.weight)


def copy_weights(network: nn.Module, source: nn.Module, *, fresh: bool, equal_groups: bool) -> None:
    """Copy the weights of a network without groups, or with `fresh` only its measured buffers.

    With `equal_groups` every group has the effect of the unknown group.
    """
    state = source.state_dict()
    names = [name for name in state if not fresh or name.rpartition(".")[2] in MEASURED]
    network.load_state_dict(network.state_dict() | {name: state[name] for name in names})
    for part in network.modules():
        if equal_groups and isinstance(part, GroupEmbedding):
            for layer in filter(None, (part.to_condition, part.to_tokens)):
                nn.init.zeros_(layer.weight)


def person_tensors(
    groups: Groups | None, numbers: Ints, anchors: Floats, device: torch.device
) -> Person:
    """Return the tensors of people with these group numbers (batch,) and anchors (batch, 4)."""
    degrees = torch.from_numpy(np.asarray(anchors, dtype=np.float32)).to(device)
    if groups is None:
        if (numbers != UNKNOWN).any():
            raise MobatlasError(
                "this model is not conditioned on groups; supervise it first (mobatlas supervise)"
            )
        return degrees, None
    unknown = np.zeros((1, len(groups.attributes)), np.int64)
    codes = np.concatenate((groups.level_codes + 1, unknown))  # UNKNOWN, -1, is the last row
    return degrees, torch.from_numpy(codes[numbers]).to(device)
