"""The variational autoencoder over tokens: a latent for the whole trajectory, and a causal decoder (Bowman et al. 2016).

A trajectory is written from a normal latent u, by a decoder that carries it beside the condition at every place. Training
minimises E_q[-log p(x | u, z, d)] + weight * KL(q(u | x, z, d) | N(0, I)), a bound on minus the log-likelihood at weight 1.
A decoder that reads what it wrote can do without the latent, and at first it would: so the weight rises from zero, and each
number of the latent may tell some bits at no cost (Kingma et al. 2016).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from mobatlas.config import Section
from mobatlas.generators.sequence.config import PAPER, WriterConfig
from mobatlas.generators.sequence.network import Block, CausalTransformer, in_parts, valid
from mobatlas.generators.sequence.sequence_generator import writer_family
from mobatlas.groups import Groups


class LatentConfig(Section):
    """The latent, and how it is learnt."""

    size: int = Field(16, ge=1, le=4_096)  # numbers in it
    depth: int = Field(2, ge=1, le=64)  # of the encoder, as wide as the decoder
    warmup: int = Field(500, ge=0)  # steps until the KL has its full weight, linear
    free_bits: float = Field(
        0.1, ge=0
    )  # that each number tells at no cost, on average over a batch


class LatentWriterConfig(WriterConfig):
    """What generators that write from a latent share; `network` is the decoder."""

    latent: LatentConfig = LatentConfig()


class VaeConfig(LatentWriterConfig):
    """The whole generator."""


PRESETS: Mapping[str, Mapping[str, Any]] = {
    "small": {},
    "paper": {**PAPER, "latent": {"size": 256, "depth": 4, "warmup": 10_000}},
}


class Variational(nn.Module):
    """Encoder, latent and decoder; `Network` says what each method promises.

    A family that writes more than tokens has a decoder of its own, and another embedding of what the encoder reads.
    """

    def __init__(
        self,
        config: LatentWriterConfig,
        vocabulary: int,
        groups: Groups | None = None,
        *,
        decoder: Callable[..., Any] = CausalTransformer,
        words: Callable[[int, int], nn.Module] = nn.Embedding,
    ) -> None:
        super().__init__()
        self.config, width = config.latent, config.network.width
        self.decoder = decoder(config.network, vocabulary, config.length, groups)
        self.words = words(vocabulary, width)
        self.blocks = nn.ModuleList(
            Block(config.network, causal=False) for _ in range(config.latent.depth)
        )
        self.norm = nn.LayerNorm(width)
        self.to_latent = nn.Linear(width, 2 * config.latent.size)
        self.from_latent = nn.Linear(config.latent.size, width)

    @property
    def latent(self) -> int:
        return self.config.size

    def forward(
        self,
        tokens: Tensor,
        anchors: Tensor,
        levels: Tensor | None,
        noise: Tensor,
        step: int | None = None,
    ) -> Tensor:
        """Reconstruction and weighted KL (batch,); a number of the latent whose mean KL is free counts as a constant."""
        nats, kl = self._parts(tokens, anchors, levels, noise)
        free = self.config.free_bits * math.log(2)
        charged = torch.where(
            kl.detach().mean(0) > free, kl, free
        )  # (batch, latent); its mean is max(mean KL, free)
        weight = 1.0 if step is None else min(1.0, (step + 1) / max(1, self.config.warmup))
        return nats + weight * charged.sum(1)

    def terms(
        self, tokens: Tensor, anchors: Tensor, levels: Tensor | None, noise: Tensor
    ) -> dict[str, Tensor]:
        """The bound."""
        nats, kl = self._parts(tokens, anchors, levels, noise)
        return {"reconstruction": nats, "kl": kl.sum(1)}

    def condition(self, anchors: Tensor, levels: Tensor | None, noise: Tensor) -> Tensor:
        """Of the person and the latent."""
        return self._with(self.decoder.person(anchors, levels), noise)

    def _with(self, person: Tensor, latent: Tensor) -> Tensor:
        """The condition of a person, which may tell more than the network is wide, and of a latent."""
        told: Tensor = self.from_latent(latent)
        return person + F.pad(told, (0, person.shape[1] - told.shape[1]))

    def _parts(
        self, tokens: Tensor, anchors: Tensor, levels: Tensor | None, noise: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Minus the log-likelihood given a latent drawn by the encoder (batch,), and the KL of its numbers (batch, latent)."""
        person = self.decoder.person(anchors, levels)
        mean, log_deviation = in_parts(self.encode, tokens, person).chunk(
            2, -1
        )  # (batch, latent) each
        drawn = mean + log_deviation.exp() * noise
        kl = (mean.square() + (2 * log_deviation).exp() - 1) / 2 - log_deviation
        return in_parts(self.decoder.nats, tokens, self._with(person, drawn)), kl

    def encode(self, tokens: Tensor, person: Tensor) -> Tensor:
        """Means of q(u | x, z, d), then logarithms of its standard deviations: (batch, 2 latent)."""
        there = valid(tokens)  # (batch, any)
        condition = person[:, None, : self.norm.normalized_shape[0]]  # (batch, 1, width)
        hidden = (
            self.words(tokens) + self.decoder.places[: tokens.shape[1]] + condition
        )  # (batch, any, width)
        for block in self.blocks:
            hidden = block(hidden, valid=there)
        mean = (hidden * there[..., None]).sum(1) / there.sum(1, keepdim=True)  # (batch, width)
        found: Tensor = self.to_latent(self.norm(mean))
        return found.float().clamp(-8, 8)  # of a deviation of 3,000 or 1 / 3,000 nobody can learn


def _network(config: VaeConfig, vocabulary: int, groups: Groups | None) -> Variational:
    return Variational(config, vocabulary, groups)


FAMILY = writer_family("vae", VaeConfig, PRESETS, _network)
