"""The diffusion transformer: adaLN-zero blocks over latents (Peebles and Xie 2023; the paper's appendix, "DiT").

Where a person lives and works is added to the timestep embedding. A group enters twice: there, and at every token, because
adaLN alone is a weak door for it. The null condition is exactly zero at both.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mobatlas.data.dataset import TrajectoryDataset
from mobatlas.generators.latent_diffusion.config import DenoiserConfig
from mobatlas.generators.layers.distance_bias import DistanceBias
from mobatlas.generators.layers.group_bias import GroupTokenBias
from mobatlas.groups import Groups

Floats = npt.NDArray[np.float64]
FREQUENCIES = 4  # octaves of sine and cosine of a coordinate
TIME_WIDTH = 128


class Estimate(NamedTuple):
    """What noisy latents come from."""

    clean: Tensor  # (batch, length, latent)
    words: (
        Tensor | None
    )  # (batch, length, vocabulary) logits of tokens; None if x0 is estimated without them


class DiT(nn.Module):
    """Predicts the clean latents x0 from noisy ones."""

    centre: Tensor
    extent: Tensor
    prototypes: Tensor

    def __init__(
        self,
        config: DenoiserConfig,
        latent: int,
        length: int,
        vocabulary: int,
        groups: Groups | None = None,
    ) -> None:
        super().__init__()
        self.self_conditioning = config.self_conditioning
        self.input = nn.Linear((1 + config.self_conditioning) * latent, config.width)
        self.places = nn.Parameter(torch.randn(length, config.width) * 0.02)
        self.time = nn.Sequential(
            nn.Linear(TIME_WIDTH, config.width), nn.SiLU(), nn.Linear(config.width, config.width)
        )
        self.anchors = nn.Sequential(
            nn.Linear(4 * (1 + 2 * FREQUENCIES) + 2, config.width),
            nn.SiLU(),
            nn.Linear(config.width, config.width),
        )
        self.group = GroupCondition(config, groups) if groups is not None else None
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.depth))
        self.norm = nn.LayerNorm(config.width, elementwise_affine=False)
        self.modulation = nn.Linear(config.width, 2 * config.width)
        self.output = nn.Linear(config.width, latent)
        self.words = nn.Linear(config.width, vocabulary) if config.cross_entropy else None
        self.distance_bias = (
            DistanceBias(config.width, vocabulary, config.distance_curves)
            if config.distance_curves
            else None
        )
        self.group_bias = (
            GroupTokenBias(groups, vocabulary) if config.group_bias and groups is not None else None
        )
        # where coordinates are centred and how wide they are, degrees; set from the training people
        self.register_buffer("centre", torch.zeros(2))
        self.register_buffer("extent", torch.ones(2))
        if self.words is not None:
            # latents of tokens; set when the autoencoder is trained
            self.register_buffer("prototypes", torch.zeros(vocabulary, latent))
        for layer in filter(None, (self.modulation, self.output, self.words)):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(
        self,
        x: Tensor,
        t: Tensor,
        anchors: Tensor,
        levels: Tensor | None = None,
        estimate: Tensor | None = None,
    ) -> Estimate:
        """x (batch, length, latent), t (batch,), anchors (batch, 4) in degrees, levels (batch, attributes), 0 unknown.

        `estimate` is what this network last thought x0 to be, if it has thought before.
        """
        condition = self.time(sinusoid(t, TIME_WIDTH)) + self.anchors(
            self._places_of(anchors)
        )  # (batch, width)
        if self.self_conditioning:
            x = torch.cat(
                (x, torch.zeros_like(x) if estimate is None else estimate), -1
            )  # (batch, length, 2 latent)
        hidden = self.input(x) + self.places  # (batch, length, width)
        if self.group is not None and levels is not None:
            to_condition, to_tokens = self.group(levels)  # (batch, width) each
            condition = condition + to_condition
            hidden = hidden + to_tokens[:, None]
        condition = F.silu(condition)
        for block in self.blocks:
            hidden = block(hidden, condition)
        shift, scale = self.modulation(condition)[:, None].chunk(2, -1)  # (batch, 1, width) each
        hidden = self.norm(hidden) * (1 + scale) + shift
        clean = self.output(hidden).float()
        if self.words is None:
            return Estimate(clean, None)
        words = self.words(hidden).float()  # (batch, length, vocabulary)
        if self.distance_bias is not None:
            words += self.distance_bias.logits(hidden, self.distance_bias(anchors, condition))
        if self.group_bias is not None:
            words += self.group_bias(levels, len(words))[:, None]
        return Estimate(clean + words.softmax(-1) @ self.prototypes, words)

    def measure(self, dataset: TrajectoryDataset) -> None:
        """What is known of training people without training: where they live, and how far places are from there."""
        self.centre_on(dataset.anchors[dataset.split_people("train")])
        if self.distance_bias is not None:
            self.distance_bias.measure(dataset.vocabulary)

    def centre_on(self, anchors: Floats) -> None:
        """Measure coordinates from the middle of these anchors (people, 4), in units of twice their spread."""
        both = np.concatenate((anchors[:, :2], anchors[:, 2:]))
        both = both[~np.isnan(both).any(1)]
        if len(both):
            self.centre.copy_(torch.from_numpy(both.mean(0)))
            self.extent.copy_(torch.from_numpy(np.maximum(2 * both.std(0), 1e-6)))

    def _places_of(self, anchors: Tensor) -> Tensor:
        known = ~anchors.isnan()  # (batch, 4)
        scaled = (anchors - self.centre.repeat(2)) / self.extent.repeat(2)  # (batch, 4)
        scaled = torch.where(known, scaled, 0.0)
        octaves = math.pi * 2.0 ** torch.arange(FREQUENCIES, device=anchors.device)  # (octaves,)
        angles = (scaled[..., None] * octaves / 2).flatten(1)  # (batch, 4 * octaves)
        mask = known.repeat_interleave(FREQUENCIES, dim=1)
        waves = torch.cat((angles.sin() * mask, angles.cos() * mask), 1)
        return torch.cat((scaled, waves, known[:, ::2].to(scaled.dtype)), 1).to(self.places.dtype)


class GroupCondition(nn.Module):
    """One embedding table an attribute; level 0 is unknown and begins at zero, which this maps to zero."""

    def __init__(self, config: DenoiserConfig, groups: Groups) -> None:
        super().__init__()
        tables = [
            nn.Embedding(len(levels) + 1, config.embedding) for _, levels in groups.attributes
        ]
        self.tables = nn.ModuleList(tables)
        width = config.embedding * len(self.tables)
        self.mix = nn.Linear(width, config.width, bias=False)
        self.to_condition = nn.Linear(config.width, config.width, bias=False)
        self.to_tokens = nn.Linear(config.width, config.width, bias=False)
        for table in tables:
            with torch.no_grad():
                table.weight[0] = 0.0

    def begin_alike(self) -> None:
        """Every group as the unknown one, until it is trained."""
        nn.init.zeros_(self.to_condition.weight)
        nn.init.zeros_(self.to_tokens.weight)

    def forward(self, levels: Tensor) -> tuple[Tensor, Tensor]:
        embedded = torch.cat([table(levels[:, a]) for a, table in enumerate(self.tables)], 1)
        mixed = F.silu(self.mix(embedded))  # (batch, width): attributes may interact from here on
        return self.to_condition(mixed), self.to_tokens(mixed)


class Block(nn.Module):
    """A transformer block whose norms and gates the condition sets; it begins as the identity."""

    def __init__(self, config: DenoiserConfig) -> None:
        super().__init__()
        width = config.width
        self.heads = config.heads
        self.norm_attention = nn.LayerNorm(width, elementwise_affine=False)
        self.norm_feedforward = nn.LayerNorm(width, elementwise_affine=False)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.feedforward = nn.Sequential(
            nn.Linear(width, config.expansion * width),
            nn.ReLU(inplace=True) if config.activation == "relu" else nn.GELU(approximate="tanh"),
            nn.Linear(config.expansion * width, width),
        )
        self.modulation = nn.Linear(width, 6 * width)
        nn.init.zeros_(self.modulation.weight)
        nn.init.zeros_(self.modulation.bias)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        shift_a, scale_a, gate_a, shift_f, scale_f, gate_f = self.modulation(condition)[
            :, None
        ].chunk(6, -1)
        x = x + gate_a * self._attend(self.norm_attention(x) * (1 + scale_a) + shift_a)
        return x + gate_f * self.feedforward(self.norm_feedforward(x) * (1 + scale_f) + shift_f)

    def _attend(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        )  # (batch, heads, length, head)
        if (
            self.training and x.device.type == "cpu"
        ):  # the backward pass of attention in bf16 is five times slower there
            q, k, v = q.float(), k.float(), v.float()
        mixed = F.scaled_dot_product_attention(q, k, v)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width).to(x.dtype))


def sinusoid(t: Tensor, width: int) -> Tensor:
    """Sines and cosines of the timestep, (batch, width)."""
    rates = torch.exp(-math.log(10_000) * torch.arange(width // 2, device=t.device) / (width // 2))
    angles = t[:, None].float() * rates  # (batch, width / 2)
    return torch.cat((angles.cos(), angles.sin()), 1)
