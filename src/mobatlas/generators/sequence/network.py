"""The causal transformer over POI tokens: the next token given the person and the tokens before (Radford et al. 2019).

The first place holds the start token; it and all later ones carry the condition. A trajectory ends with an end token unless it
fills all places. Tokens that no trajectory holds have no probability, nor has an end before the first token, so that the
probabilities of all trajectories sum to 1.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mobatlas.data.dataset import TrajectoryDataset
from mobatlas.data.vocabulary import BOS, EOS, MASK, PAD
from mobatlas.generators.layers.distance_bias import DistanceBias
from mobatlas.generators.layers.group_bias import GroupTokenBias
from mobatlas.generators.sequence.conditioning import Conditioning
from mobatlas.generators.sequence.config import TransformerConfig
from mobatlas.groups import Groups

PARTS = 4  # of a batch, by length: two thirds of the time of one


class CausalTransformer(nn.Module):
    """Likelihood of trajectories, place by place all at once, or with `step` as they are written."""

    barred: Tensor
    barred_first: Tensor
    latent = 0

    def __init__(
        self, config: TransformerConfig, vocabulary: int, length: int, groups: Groups | None = None
    ) -> None:
        super().__init__()
        self.heads, self.width = config.heads, config.width
        self.words = nn.Embedding(vocabulary, config.width)
        self.places = nn.Parameter(torch.randn(length, config.width) * config.width**-0.5)
        self.conditioning = Conditioning(config.width, config.embedding, groups)
        self.distance_bias = (
            DistanceBias(config.width, vocabulary, config.distance_curves)
            if config.distance_curves
            else None
        )
        self.group_bias = (
            GroupTokenBias(groups, vocabulary) if config.group_bias and groups is not None else None
        )
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.depth))
        self.norm = nn.LayerNorm(config.width)
        self.output = nn.Linear(config.width, vocabulary)
        nn.init.normal_(self.words.weight, std=config.width**-0.5)
        for part in (self.output.weight, self.output.bias):  # all tokens equally likely
            nn.init.zeros_(part)
        barred = torch.zeros(2, vocabulary)
        barred[:, [PAD, BOS, MASK]] = -torch.inf
        barred[0, EOS] = -torch.inf
        self.register_buffer("barred_first", barred[0], persistent=False)
        self.register_buffer("barred", barred[1], persistent=False)

    @property
    def decoder(self) -> CausalTransformer:
        return self

    def measure(self, dataset: TrajectoryDataset) -> None:
        """What is known of training people without training: where they live."""
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
        """Minus the log-likelihood (batch,)."""
        return in_parts(self.nats, tokens, self.person(anchors, levels))

    def terms(
        self, tokens: Tensor, anchors: Tensor, levels: Tensor | None, noise: Tensor
    ) -> dict[str, Tensor]:
        """As `forward`: it is exact."""
        return {"nats": self.nats(tokens, self.person(anchors, levels))}

    def condition(self, anchors: Tensor, levels: Tensor | None, noise: Tensor) -> Tensor:
        """Of the person alone."""
        return self.person(anchors, levels)

    def person(self, anchors: Tensor, levels: Tensor | None) -> Tensor:
        """A condition: (batch, width), and after it logits of places: by their distance, and by the person's group."""
        parts: list[Tensor] = [self.conditioning(anchors, levels)]
        if self.distance_bias is not None:
            parts.append(self.distance_bias(anchors, parts[0]))
        if self.group_bias is not None:
            parts.append(self.group_bias(levels, len(anchors)))
        return torch.cat(parts, 1)

    def logits(self, before: Tensor, condition: Tensor) -> Tensor:
        """Of the token at each place, (batch, any, vocabulary), given the tokens before each (batch, any)."""
        return self.scores(self.hidden(self.words(before), condition), condition)

    def hidden(self, before: Tensor, condition: Tensor) -> Tensor:
        """What is known at each place (batch, any, width), given what is before each, embedded (batch, any, width)."""
        hidden = self.dropout(
            before + self.places[: before.shape[1]] + condition[:, None, : self.width]
        )
        for block in self.blocks:
            hidden = block(hidden)
        known: Tensor = self.norm(hidden)
        return known

    def scores(self, hidden: Tensor, condition: Tensor) -> Tensor:
        """Logits of tokens (batch, any, vocabulary) from what is known at all places."""
        logits = self._scores(hidden, condition) + self.barred  # (batch, any, vocabulary)
        return torch.cat((logits[:, :1] + self.barred_first, logits[:, 1:]), 1)

    def nats(self, tokens: Tensor, condition: Tensor) -> Tensor:
        """Minus the log-likelihood (batch,) of tokens (batch, any), their ends included, PAD after them."""
        logits = self.logits(before(tokens), condition)
        nats = F.cross_entropy(
            logits.flatten(0, 1), tokens.flatten(), ignore_index=PAD, reduction="none"
        )
        return nats.view(tokens.shape).sum(1)

    def step(self, last: Tensor, condition: Tensor, place: int, cache: Tensor) -> Tensor:
        """Logits (batch, vocabulary) of the token at a place, given the last one (batch,); of those before the cache knows."""
        return self.scores_at(
            place, self.hidden_at(place, self.words(last), condition, cache), condition
        )

    def hidden_at(self, place: int, last: Tensor, condition: Tensor, cache: Tensor) -> Tensor:
        """As `hidden`, of one place (batch, width)."""
        hidden = (last + self.places[place] + condition[:, : self.width])[
            :, None
        ]  # (batch, 1, width)
        for block, kept in zip(self.blocks, cache, strict=True):
            hidden = block(hidden, kept, place)
        known: Tensor = self.norm(hidden[:, 0])
        return known

    def scores_at(self, place: int, hidden: Tensor, condition: Tensor) -> Tensor:
        """As `scores`, of one place (batch, vocabulary)."""
        logits = self._scores(hidden[:, None], condition)[:, 0]
        return logits + (self.barred if place else self.barred_first)

    def _scores(self, hidden: Tensor, condition: Tensor) -> Tensor:
        logits: Tensor = self.output(hidden).float()
        of_person = condition[:, self.width :]
        if self.group_bias is not None:
            logits = logits + of_person[:, None, -logits.shape[-1] :]
            of_person = of_person[:, : -logits.shape[-1]]
        return (
            logits
            if self.distance_bias is None
            else logits + self.distance_bias.logits(hidden, of_person)
        )

    def new_cache(self, batch: int) -> Tensor:
        """Room for keys and values: (layers, 2, batch, heads, length, head)."""
        length, width = self.places.shape
        return self.places.new_empty(
            len(self.blocks), 2, batch, self.heads, length, width // self.heads
        )


class Block(nn.Module):
    """Attention to places, by default the earlier ones, and a feed-forward layer, both added to a stream that they read."""

    def __init__(self, config: TransformerConfig, *, causal: bool = True) -> None:
        super().__init__()
        width = config.width
        self.heads, self.causal = config.heads, causal
        self.norm_attention = nn.LayerNorm(width)
        self.norm_feedforward = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.feedforward = nn.Sequential(
            nn.Linear(width, config.expansion * width),
            nn.ReLU(inplace=True) if config.activation == "relu" else nn.GELU(approximate="tanh"),
            nn.Linear(config.expansion * width, width),
        )
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self, x: Tensor, kept: Tensor | None = None, place: int = 0, valid: Tensor | None = None
    ) -> Tensor:
        """x (batch, any, width), or one place of it while `kept` (2, batch, heads, length, head) holds those before.

        Of x only places that are `valid` (batch, any) are attended to.
        """
        x = x + self.dropout(self._attend(self.norm_attention(x), kept, place, valid))
        return x + self.dropout(self.feedforward(self.norm_feedforward(x)))

    def _attend(self, x: Tensor, kept: Tensor | None, place: int, valid: Tensor | None) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        )  # (batch, heads, any, head)
        if kept is not None:
            kept[:, :, :, place] = torch.stack((k, v))[:, :, :, 0]
            q, (k, v) = q.to(kept.dtype), kept[:, :, :, : place + 1]
        elif (
            torch.is_grad_enabled() and x.device.type == "cpu"
        ):  # attention in bf16 goes back five times slower there
            q, k, v = q.float(), k.float(), v.float()
        mask = None if valid is None else valid[:, None, None]  # (batch, 1, 1, any)
        mixed = F.scaled_dot_product_attention(
            q, k, v, mask, is_causal=self.causal and kept is None
        )
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width).to(x.dtype))


def in_parts(read: Callable[[Tensor, Tensor], Tensor], tokens: Tensor, condition: Tensor) -> Tensor:
    """What is read of tokens (batch, any, ...), row by row; those of like length are read together, for less padding."""
    lengths, order = valid(tokens).sum(1).sort(stable=True)
    parts = zip(
        *(whole.chunk(PARTS) for whole in (lengths, tokens[order], condition[order])), strict=True
    )
    return torch.cat([read(some[:, : int(ends[-1])], given) for ends, some, given in parts])[
        order.argsort()
    ]


def valid(tokens: Tensor) -> Tensor:
    """Where tokens (batch, any) are, or what begins with tokens (batch, any, more): not PAD, (batch, any)."""
    return (tokens if tokens.ndim == 2 else tokens[..., 0]) != PAD


def before(tokens: Tensor) -> Tensor:
    """The token before each place, (batch, any)."""
    return F.pad(tokens[:, :-1], (1, 0), value=BOS)


def with_end(tokens: Tensor, length: int) -> Tensor:
    """Tokens (batch, any) with an end token after each trajectory that leaves room for it within `length` places."""
    tokens = F.pad(tokens[:, :length], (0, 1), value=PAD)[:, :length]
    ends = (tokens != PAD).sum(1, keepdim=True)  # (batch, 1)
    return torch.where(torch.arange(tokens.shape[1], device=tokens.device) == ends, EOS, tokens)
