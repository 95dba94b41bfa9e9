"""The diffusion transformer with adaLN-zero blocks (Peebles and Xie 2023; appendix, "DiT").

Home and work are added to the timestep embedding. A group is added there and to every token,
because adaLN alone conditions weakly on it. An unknown group initially adds zero to both.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mobatlas.data.dataset import TrajectoryDataset
from mobatlas.generators.latent_diffusion.config import DenoiserConfig
from mobatlas.generators.layers import Conditioning, feedforward, optional_biases
from mobatlas.groups import Groups

TIME_WIDTH = 128


class Estimate(NamedTuple):
    """An estimate of the clean latents behind noisy ones."""

    clean: Tensor  # (batch, length, latent)
    words: Tensor | None  # (batch, length, vocabulary) logits of tokens, if the network has them


class DiT(nn.Module):
    """Predicts the clean latents x0 from noisy ones."""

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
        width = config.width
        self.self_conditioning = config.self_conditioning
        self.input = nn.Linear((1 + config.self_conditioning) * latent, width)
        self.places = nn.Parameter(torch.randn(length, width) * 0.02)
        self.time = nn.Sequential(nn.Linear(TIME_WIDTH, width), nn.SiLU(), nn.Linear(width, width))
        self.conditioning = Conditioning(
            width, config.embedding, groups, wave_axis=1, to_tokens=True
        )
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.depth))
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.modulation = nn.Linear(width, 2 * width)
        self.output = nn.Linear(width, latent)
        self.words = nn.Linear(width, vocabulary) if config.cross_entropy else None
        self.distance_bias, self.group_bias = optional_biases(config, vocabulary, groups)
        if self.words is not None:
            # mean latent of each token, set after the autoencoder is trained
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
        """Estimate x0 from x (batch, length, latent) at timesteps t (batch,).

        `anchors` are (batch, 4), `levels` (batch, attributes). `estimate` is the last estimate of
        x0 by this network.
        """
        timestep = self.time(sinusoid(t, TIME_WIDTH))  # (batch, width)
        condition, to_tokens = self.conditioning(anchors, levels, timestep)  # (batch, width) each
        if self.self_conditioning:
            last = torch.zeros_like(x) if estimate is None else estimate
            x = torch.cat((x, last), -1)  # (batch, length, 2 latent)
        hidden = self.input(x) + self.places  # (batch, length, width)
        if to_tokens is not None:
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
        """Set the buffers that come from the dataset: anchors and coordinates of places."""
        self.conditioning.centre_on(dataset.anchors[dataset.split_people("train")])
        if self.distance_bias is not None:
            self.distance_bias.measure(dataset.vocabulary)


class Block(nn.Module):
    """A transformer block whose norms and gates depend on the condition; initially the identity."""

    def __init__(self, config: DenoiserConfig) -> None:
        super().__init__()
        width = config.width
        self.heads = config.heads
        self.norm_attention = nn.LayerNorm(width, elementwise_affine=False)
        self.norm_feedforward = nn.LayerNorm(width, elementwise_affine=False)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.feedforward = feedforward(width, config.expansion, config.activation)
        self.modulation = nn.Linear(width, 6 * width)
        nn.init.zeros_(self.modulation.weight)
        nn.init.zeros_(self.modulation.bias)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        modulation = self.modulation(condition)[:, None]  # (batch, 1, 6 width)
        shift_a, scale_a, gate_a, shift_f, scale_f, gate_f = modulation.chunk(6, -1)
        x = x + gate_a * self._attend(self.norm_attention(x) * (1 + scale_a) + shift_a)
        return x + gate_f * self.feedforward(self.norm_feedforward(x) * (1 + scale_f) + shift_f)

    def _attend(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # (batch, heads, length, head) each
        if self.training and x.device.type == "cpu":
            # the backward pass of attention in bf16 is five times slower there
            q, k, v = (part.float() for part in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width).to(x.dtype))


def sinusoid(t: Tensor, width: int) -> Tensor:
    """Return cosines and sines of timesteps, (batch, width)."""
    rates = torch.exp(-math.log(10_000) * torch.arange(width // 2, device=t.device) / (width // 2))
    angles = t[:, None].float() * rates  # (batch, width / 2)
    return torch.cat((angles.cos(), angles.sin()), 1)
