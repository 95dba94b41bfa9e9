"""The causal transformer over tokens (Radford et al. 2019): p(token | person, tokens before).

The first place holds the start token, and every place carries the condition. A trajectory ends with
an end token unless it fills all places. Tokens that no trajectory contains have probability zero,
as has an end before the first token, so the probabilities of all trajectories sum to 1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from mobatlas.config import Section
from mobatlas.data.dataset import TrajectoryDataset
from mobatlas.data.vocabulary import BOS, EOS, MASK, PAD
from mobatlas.generators.layers import (
    Conditioning,
    feedforward,
    is_token,
    optional_biases,
    previous_tokens,
)
from mobatlas.groups import Groups

BUCKETS = 4  # parts of a batch, by length; they take two thirds of the time of one


class TransformerConfig(Section):
    """A transformer over tokens."""

    depth: int = Field(3, ge=1, le=64)
    width: int = Field(96, ge=8, le=4_096)
    heads: int = Field(4, ge=1)
    expansion: int = Field(4, ge=1, le=16)  # of the feed-forward layers
    activation: Literal["relu", "gelu"] = "relu"
    dropout: float = Field(0.0, ge=0, lt=1)
    embedding: int = Field(64, ge=1, le=4_096)  # of one demographic attribute
    # curves of the distance to each anchor, see DistanceBias; 0: no distance bias
    distance_curves: int = Field(0, ge=0, le=64)
    group_bias: bool = False  # see GroupTokenBias

    @model_validator(mode="after")
    def _heads_divide_width(self) -> TransformerConfig:
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is not a multiple of heads {self.heads}")
        return self


class CausalTransformer(nn.Module):
    """The likelihood of trajectories, at all places at once or place by place with `step`."""

    forbidden: Tensor
    forbidden_first: Tensor
    latent = 0

    def __init__(
        self, config: TransformerConfig, vocabulary: int, length: int, groups: Groups | None = None
    ) -> None:
        super().__init__()
        width = config.width
        self.heads = config.heads
        self.width = width
        self.words = nn.Embedding(vocabulary, width)
        self.places = nn.Parameter(torch.randn(length, width) * width**-0.5)
        self.conditioning = Conditioning(width, config.embedding, groups)
        self.distance_bias, self.group_bias = optional_biases(config, vocabulary, groups)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.depth))
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, vocabulary)
        nn.init.normal_(self.words.weight, std=width**-0.5)
        nn.init.zeros_(self.output.weight)  # all tokens equally likely
        nn.init.zeros_(self.output.bias)
        forbidden = torch.zeros(2, vocabulary)
        forbidden[:, [PAD, BOS, MASK]] = -torch.inf
        forbidden[0, EOS] = -torch.inf
        self.register_buffer("forbidden_first", forbidden[0], persistent=False)
        self.register_buffer("forbidden", forbidden[1], persistent=False)

    @property
    def decoder(self) -> CausalTransformer:
        return self

    def measure(self, dataset: TrajectoryDataset) -> None:
        """Set the buffers that come from the dataset: anchors and coordinates of places."""
        self.conditioning.centre_on(dataset.anchors[dataset.split_people("train")])
        if self.distance_bias is not None:
            self.distance_bias.measure(dataset.vocabulary)

    def forward(
        self,
        tokens: Tensor,
        anchors: Tensor,
        levels: Tensor | None,
        noise: Tensor,
        step: int | None = None,
    ) -> Tensor:
        """Return minus the log-likelihood (batch,)."""
        return in_length_buckets(self.nats, tokens, self.person(anchors, levels))

    def terms(
        self, tokens: Tensor, anchors: Tensor, levels: Tensor | None, noise: Tensor
    ) -> dict[str, Tensor]:
        """Return minus the exact log-likelihood (batch,)."""
        return {"nats": self.nats(tokens, self.person(anchors, levels))}

    def condition(self, anchors: Tensor, levels: Tensor | None, noise: Tensor) -> Tensor:
        """Return the condition of a person; there is no latent."""
        return self.person(anchors, levels)

    def person(self, anchors: Tensor, levels: Tensor | None) -> Tensor:
        """Return the condition (batch, width + ...): embedding, distance bias, group bias."""
        parts: list[Tensor] = [self.conditioning(anchors, levels)[0]]
        if self.distance_bias is not None:
            parts.append(self.distance_bias(anchors, parts[0]))
        if self.group_bias is not None:
            parts.append(self.group_bias(levels, len(anchors)))
        return torch.cat(parts, 1)

    def logits(self, previous: Tensor, condition: Tensor) -> Tensor:
        """Return logits (batch, any, vocabulary) of each place, given the tokens before each."""
        return self.token_logits(self.hidden(self.words(previous), condition), condition)

    def hidden(self, previous: Tensor, condition: Tensor) -> Tensor:
        """Return hidden states (batch, any, width) from the embeddings before each place."""
        places = self.places[: previous.shape[1]]  # (any, width)
        hidden = self.dropout(previous + places + condition[:, None, : self.width])
        for block in self.blocks:
            hidden = block(hidden)
        normed: Tensor = self.norm(hidden)
        return normed

    def token_logits(self, hidden: Tensor, condition: Tensor) -> Tensor:
        """Return logits (batch, any, vocabulary) from the hidden states of all places."""
        logits = self._logits(hidden, condition) + self.forbidden  # (batch, any, vocabulary)
        return torch.cat((logits[:, :1] + self.forbidden_first, logits[:, 1:]), 1)

    def nats(self, tokens: Tensor, condition: Tensor) -> Tensor:
        """Return minus the log-likelihood (batch,) of tokens (batch, any) with end tokens."""
        return token_nats(self.logits(previous_tokens(tokens), condition), tokens).sum(1)

    def step(self, last: Tensor, condition: Tensor, place: int, cache: Tensor) -> Tensor:
        """Return logits (batch, vocabulary) of a place, given the last token and a cache."""
        hidden = self.hidden_at(place, self.words(last), condition, cache)
        return self.token_logits_at(place, hidden, condition)

    def hidden_at(self, place: int, last: Tensor, condition: Tensor, cache: Tensor) -> Tensor:
        """Return `hidden` of one place (batch, width)."""
        hidden = last + self.places[place] + condition[:, : self.width]  # (batch, width)
        hidden = hidden[:, None]  # (batch, 1, width)
        for block, layer_cache in zip(self.blocks, cache, strict=True):
            hidden = block(hidden, layer_cache, place)
        normed: Tensor = self.norm(hidden[:, 0])
        return normed

    def token_logits_at(self, place: int, hidden: Tensor, condition: Tensor) -> Tensor:
        """Return `token_logits` of one place (batch, vocabulary)."""
        logits = self._logits(hidden[:, None], condition)[:, 0]
        return logits + (self.forbidden if place else self.forbidden_first)

    def _logits(self, hidden: Tensor, condition: Tensor) -> Tensor:
        logits: Tensor = self.output(hidden).float()
        biases = condition[:, self.width :]
        if self.group_bias is not None:
            vocabulary = logits.shape[-1]
            logits = logits + biases[:, None, -vocabulary:]
            biases = biases[:, :-vocabulary]
        if self.distance_bias is None:
            return logits
        return logits + self.distance_bias.logits(hidden, biases)

    def new_cache(self, batch: int) -> Tensor:
        """Return room for keys and values: (layers, 2, batch, heads, length, head)."""
        length, width = self.places.shape
        head = width // self.heads
        return self.places.new_empty(len(self.blocks), 2, batch, self.heads, length, head)


class Block(nn.Module):
    """A pre-norm transformer block: attention, by default causal, and feed-forward layers."""

    def __init__(self, config: TransformerConfig, *, causal: bool = True) -> None:
        super().__init__()
        width = config.width
        self.heads = config.heads
        self.causal = causal
        self.norm_attention = nn.LayerNorm(width)
        self.norm_feedforward = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.feedforward = feedforward(width, config.expansion, config.activation)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self, x: Tensor, cache: Tensor | None = None, place: int = 0, valid: Tensor | None = None
    ) -> Tensor:
        """Transform x (batch, any, width), or one place of it with a cache of the places before.

        The cache is (2, batch, heads, length, head). Only `valid` places (batch, any) are attended.
        """
        x = x + self.dropout(self._attend(self.norm_attention(x), cache, place, valid))
        return x + self.dropout(self.feedforward(self.norm_feedforward(x)))

    def _attend(self, x: Tensor, cache: Tensor | None, place: int, valid: Tensor | None) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # (batch, heads, any, head) each
        if cache is not None:
            cache[:, :, :, place] = torch.stack((k, v))[:, :, :, 0]
            q = q.to(cache.dtype)
            k, v = cache[:, :, :, : place + 1]
        elif torch.is_grad_enabled() and x.device.type == "cpu":
            # the backward pass of attention in bf16 is five times slower there
            q, k, v = (part.float() for part in (q, k, v))
        mask = None if valid is None else valid[:, None, None]  # (batch, 1, 1, any)
        causal = self.causal and cache is None
        mixed = F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width).to(x.dtype))


def token_nats(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return minus the log-probability of each token (batch, any), 0 at PAD."""
    nats = F.cross_entropy(
        logits.flatten(0, 1), tokens.flatten(), ignore_index=PAD, reduction="none"
    )
    return nats.view(tokens.shape)


def in_length_buckets(
    function: Callable[[Tensor, Tensor], Tensor], tokens: Tensor, condition: Tensor
) -> Tensor:
    """Apply a function of rows to parts of a batch of similar length, which need less padding."""
    lengths, order = is_token(tokens).sum(1).sort(stable=True)
    columns = (lengths, tokens[order], condition[order])
    buckets = zip(*(column.chunk(BUCKETS) for column in columns), strict=True)
    parts = [function(rows[:, : int(ends[-1])], part) for ends, rows, part in buckets]
    return torch.cat(parts)[order.argsort()]
