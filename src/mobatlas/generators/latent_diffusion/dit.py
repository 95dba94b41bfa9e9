"""The diffusion transformer with adaLN-zero blocks (Peebles and Xie 2023; appendix, "DiT").

Home and work are added to the timestep embedding. A group is added there and to every token,
because adaLN alone conditions weakly on it. An unknown group initially adds zero to both.
"""

import math
from typing import NamedTuple, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from mobatlas.generators.layers import (
    Conditioning,
    NetworkConfig,
    TransformerBlock,
    optional_biases,
)
from mobatlas.generators.network_generator import OptimizerConfig
from mobatlas.groups import Groups

TIME_WIDTH = 128


class DenoiserConfig(NetworkConfig, OptimizerConfig):
    """The diffusion transformer."""

    depth: int = Field(4, ge=1, le=64)
    # The network also reads its last estimate of x0 (Chen et al. 2023), because the latents of
    # tokens are nearly discrete.
    self_conditioning: bool = True
    # Timesteps are drawn with density t^(timestep_emphasis - 1). A value above 1 learns whole days
    # better, a value below 1 learns places better.
    timestep_emphasis: float = Field(1.5, gt=0, le=10)
    # Share of the cross-entropy of tokens in the loss. The rest is squared error, which alone
    # hardly learns which places a group prefers. With it x0 is estimated as a mixture of the
    # latents of tokens (Dieleman et al. 2022).
    cross_entropy: float = Field(0.9, ge=0, le=1)
    ema: float = Field(0.999, ge=0, lt=1)
    steps: int = Field(3_000, ge=1)

    @model_validator(mode="after")
    def _heads_divide_width(self) -> Self:
        if self.width % (2 * self.heads):
            raise ValueError(
                f"width {self.width} is not a multiple of twice the heads {self.heads}"
            )
        if (self.distance_curves or self.group_bias) and not self.cross_entropy:
            raise ValueError(
                "distance_curves and group_bias need cross_entropy above 0; set distance_curves to "
                "0 and group_bias to false, or raise cross_entropy"
            )
        return self


class Estimate(NamedTuple):
    """An estimate of the clean latents behind noisy ones."""

    clean: Tensor  # (batch, length, latent)
    words: Tensor | None  # (batch, length, vocabulary) logits of tokens, if the network has them


class DiT(nn.Module):
    """Predicts the clean latents x0 from noisy ones."""

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
            self.prototypes = nn.Buffer(torch.zeros(vocabulary, latent))
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


class Block(TransformerBlock):
    """A transformer block whose norms and gates depend on the condition; initially the identity."""

    def __init__(self, config: DenoiserConfig) -> None:
        super().__init__(config, affine_norms=False)
        self.modulation = nn.Linear(config.width, 6 * config.width)
        nn.init.zeros_(self.modulation.weight)
        nn.init.zeros_(self.modulation.bias)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        modulation = self.modulation(condition)[:, None]  # (batch, 1, 6 width)
        # (batch, 1, width) each, for attention and for the feed-forward layers
        shift_a, scale_a, gate_a, shift_f, scale_f, gate_f = modulation.chunk(6, -1)
        normed = self.norm_attention(x) * (1 + scale_a) + shift_a  # (batch, length, width)
        x = x + gate_a * self.attend(normed, backward=self.training)
        return x + gate_f * self.feedforward(self.norm_feedforward(x) * (1 + scale_f) + shift_f)


def sinusoid(t: Tensor, width: int) -> Tensor:
    """Return cosines and sines of timesteps, (batch, width)."""
    rates = torch.exp(-math.log(10_000) * torch.arange(width // 2, device=t.device) / (width // 2))
    angles = t[:, None].float() * rates  # (batch, width / 2)
    return torch.cat((angles.cos(), angles.sin()), 1)
