"""The variational autoencoder: one latent per trajectory, a causal decoder (Bowman et al. 2016).

A trajectory is decoded from a normal latent u, which is added to the condition at every place.
Training minimises

    E_q[-log p(x | u, z, d)] + weight * KL(q(u | x, z, d) | N(0, I)),

which at weight 1 bounds minus the log-likelihood. A causal decoder would ignore the latent at
first, so the weight rises from zero, and each number of the latent has some free bits (Kingma et
al. 2016).
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from mobatlas.config import Section
from mobatlas.generators.network_generator import (
    PAPER,
    SequenceConfig,
    SequenceGenerator,
    network_family,
)
from mobatlas.generators.transformer import Block, CausalTransformer, in_length_buckets, is_token
from mobatlas.groups import Groups


class LatentConfig(Section):
    """The latent and its encoder."""

    size: int = Field(16, ge=1, le=4_096)  # numbers in it
    depth: int = Field(2, ge=1, le=64)  # of the encoder, which is as wide as the decoder
    warmup: int = Field(500, ge=0)  # steps until the KL has its full weight, linear
    free_bits: float = Field(0.1, ge=0)  # of each number, a mean over a batch


class VaeConfig(SequenceConfig):
    """Options of the variational autoencoder; `network` is the decoder."""

    latent: LatentConfig = LatentConfig()


PRESETS: Mapping[str, Mapping[str, Any]] = {
    "small": {},
    "paper": {**PAPER, "latent": {"size": 256, "depth": 4, "warmup": 10_000}},
}


class VariationalAutoencoder(nn.Module):
    """Encoder, latent and decoder. `CausalTransformer` documents its methods.

    A family whose visits have times passes its own decoder and its own embedding of visits.
    """

    def __init__(
        self,
        config: VaeConfig,
        vocabulary: int,
        groups: Groups | None = None,
        *,
        decoder: Callable[..., Any] = CausalTransformer,
        words: Callable[[int, int], nn.Module] = nn.Embedding,
    ) -> None:
        super().__init__()
        self.config = config.latent
        width = config.network.width
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
        """Return reconstruction and weighted KL (batch,), at least the free bits per number."""
        nats, kl = self._nats_and_kl(tokens, anchors, levels, noise)
        free = self.config.free_bits * math.log(2)
        # (batch, latent); the mean over the batch is max(mean KL, free)
        charged = torch.where(kl.detach().mean(0) > free, kl, free)
        weight = 1.0 if step is None else min(1.0, (step + 1) / max(1, self.config.warmup))
        return nats + weight * charged.sum(1)

    def terms(
        self, tokens: Tensor, anchors: Tensor, levels: Tensor | None, noise: Tensor
    ) -> dict[str, Tensor]:
        """Return the two terms (batch,) of the bound."""
        nats, kl = self._nats_and_kl(tokens, anchors, levels, noise)
        return {"reconstruction": nats, "kl": kl.sum(1)}

    def condition(self, anchors: Tensor, levels: Tensor | None, noise: Tensor) -> Tensor:
        """Return the condition of a person and a latent."""
        return self._add_latent(self.decoder.person(anchors, levels), noise)

    def _add_latent(self, person: Tensor, latent: Tensor) -> Tensor:
        """Add a latent to the first `width` columns of the condition of a person."""
        embedded: Tensor = self.from_latent(latent)  # (batch, width)
        return person + F.pad(embedded, (0, person.shape[1] - embedded.shape[1]))

    def _nats_and_kl(
        self, tokens: Tensor, anchors: Tensor, levels: Tensor | None, noise: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return nats (batch,) given a latent of the encoder, and the KL (batch, latent)."""
        person = self.decoder.person(anchors, levels)
        encoded = in_length_buckets(self.encode, tokens, person)
        mean, log_deviation = encoded.chunk(2, -1)  # (batch, latent) each
        latent = mean + log_deviation.exp() * noise
        kl = (mean.square() + (2 * log_deviation).exp() - 1) / 2 - log_deviation
        return in_length_buckets(self.decoder.nats, tokens, self._add_latent(person, latent)), kl

    def encode(self, tokens: Tensor, person: Tensor) -> Tensor:
        """Return means, then log standard deviations of q(u | x, z, d): (batch, 2 latent)."""
        valid = is_token(tokens)  # (batch, any)
        condition = person[:, None, : self.norm.normalized_shape[0]]  # (batch, 1, width)
        # (batch, any, width)
        hidden = self.words(tokens) + self.decoder.places[: tokens.shape[1]] + condition
        for block in self.blocks:
            hidden = block(hidden, valid=valid)
        mean = (hidden * valid[..., None]).sum(1) / valid.sum(1, keepdim=True)  # (batch, width)
        # deviations beyond 3,000 cannot be learnt
        return self.to_latent(self.norm(mean)).float().clamp(-8, 8)


class Vae(SequenceGenerator):
    """The generator of the variational autoencoder."""

    def _build(self, size: int) -> None:
        self.network = VariationalAutoencoder(self.config, size, self.groups)


FAMILY = network_family("vae", Vae, VaeConfig, PRESETS)
