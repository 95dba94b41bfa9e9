"""The causal transformer over tokens (Radford et al. 2019): p(token | person, tokens before).

The first place holds the start token, and every place carries the condition. A trajectory ends with
an end token unless it fills all places. Tokens that no trajectory contains, and an end before the
first token, have probability zero. So the probabilities of all trajectories sum to 1.

A codec turns trajectories into tensors that a sequence network reads, and back.
"""

from collections.abc import Callable
from typing import Any, Self

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from mobatlas.data.dataset import SoftTrajectories, Trajectories, TrajectoryDataset
from mobatlas.data.types import BOS, EOS, MASK, PAD, Floats, Ints
from mobatlas.errors import MobatlasError
from mobatlas.generators.layers import (
    Conditioning,
    NetworkConfig,
    TransformerBlock,
    measure_layers,
    optional_biases,
)
from mobatlas.groups import Groups

TOKEN_STREAM, LATENT_STREAM, TIME_STREAM, START_STREAM = range(4)  # of random numbers
# (stream, *shape) -> numbers in [0, 1) for the samples of a tile, (TILE, *shape)
Uniform = Callable[..., Tensor]
BUCKETS = 4  # parts of a batch, by length; they take two thirds of the time of a whole batch


class TokenCodec:
    """Trajectories as rows of tokens (batch, any), with end tokens and then PAD.

    A codec of visits with times overrides all methods; its rows are (batch, any, ...).
    """

    has_times = False  # whether rows carry arrival and departure times

    def row_shape(self, length: int) -> tuple[int, ...]:
        """Return the shape of a sampled trajectory of at most `length` tokens."""
        return (length,)

    def read_dataset(self, dataset: TrajectoryDataset, indices: Ints, length: int) -> Tensor:
        """Return rows of trajectories of a dataset, truncated to `length` tokens."""
        return gather_tokens(dataset, indices, length)

    def read_trajectories(self, trajectories: Trajectories, length: int) -> Tensor:
        """Return rows of trajectories, truncated to `length` tokens."""
        return with_end(pad_rows(trajectories, trajectories.tokens), length)

    def target_tokens(self, visits: Tensor) -> Tensor:
        """Return the tokens (batch, any) that the network predicts."""
        return visits

    def to_trajectories(self, rows: Tensor, anchors: Floats) -> Trajectories:
        """Return sampled rows as the trajectories of people with these anchors."""
        tokens, offsets = join_rows(rows)
        return Trajectories(tokens.numpy().astype(np.int32), offsets, anchors)

    def soft_trajectories(
        self, decoder: Any, rows: Tensor, condition: Tensor, anchors: Floats
    ) -> SoftTrajectories:
        """Return the distribution behind each visit of sampled rows, given the visits before."""
        longest = int((rows != PAD).sum(1).max()) if len(rows) else 0
        tokens = with_end(rows[:, :longest], rows.shape[1])  # (batch, any)
        logits = decoder.logits(previous_tokens(tokens), condition)  # (batch, any, vocabulary)
        probabilities = logits.softmax(-1) * (tokens != PAD)[..., None]
        return SoftTrajectories(probabilities, anchors, drawn_tokens=tokens)


def is_token(tokens: Tensor) -> Tensor:
    """Whether each place (batch, any) holds a token; of rows (batch, any, 3) the first column."""
    return (tokens if tokens.ndim == 2 else tokens[..., 0]) != PAD


def previous_tokens(tokens: Tensor) -> Tensor:
    """Return the token before each place of tokens (batch, any); BOS before the first."""
    return F.pad(tokens[:, :-1], (1, 0), value=BOS)


def with_end(tokens: Tensor, length: int) -> Tensor:
    """Append an end token to tokens (batch, any) wherever `length` places leave room for it."""
    tokens = F.pad(tokens[:, :length], (0, 1), value=PAD)[:, :length]
    ends = (tokens != PAD).sum(1, keepdim=True)  # (batch, 1)
    return torch.where(torch.arange(tokens.shape[1], device=tokens.device) == ends, EOS, tokens)


def gather_tokens(dataset: TrajectoryDataset, indices: Ints, length: int) -> Tensor:
    """Return the tokens (batch, any) of trajectories of a dataset, with end tokens."""
    return with_end(torch.from_numpy(dataset.gather(indices, length)).long(), length)


def draw_tokens(logits: Tensor, uniform: Tensor) -> Tensor:
    """Draw a token (batch,) from each row of logits (batch, vocabulary) by inversion.

    The token is the first whose cumulative probability exceeds `uniform` (batch,).
    """
    # In single precision a number near 1 could pass the total. Apple's devices have no double.
    device = "cpu" if logits.device.type == "mps" else logits.device
    total = logits.softmax(-1).to(device).double().cumsum(-1)  # (batch, vocabulary)
    if not bool(total[:, -1].isfinite().all()):
        raise MobatlasError(
            "the model returns no probabilities because its weights are too large; train it again"
        )
    token = torch.searchsorted(total, uniform.to(device)[:, None] * total[:, -1:], right=True)
    return token.squeeze(1).to(logits.device)


def pad_rows(trajectories: Trajectories, values: Any) -> Tensor:
    """Return one value per token as (trajectories, longest), PAD after the end."""
    lengths = np.diff(trajectories.offsets)
    inside = np.arange(lengths.max(initial=0)) < lengths[:, None]  # (trajectories, longest)
    rows = np.full(inside.shape, PAD, dtype=np.int64)
    rows[inside] = values
    return torch.from_numpy(rows)


def join_rows(tokens: Tensor) -> tuple[Tensor, Ints]:
    """Return tokens (batch, any) end to end, and the offsets (batch + 1,) of the rows."""
    inside = tokens != PAD  # (batch, any)
    return tokens[inside], np.concatenate(([0], np.cumsum(inside.sum(1).numpy())))


class TransformerConfig(NetworkConfig):
    """A transformer over tokens."""

    dropout: float = Field(0.0, ge=0, lt=1)


class CausalTransformer(nn.Module):
    """The likelihood of trajectories, at all places at once or place by place with a cache.

    `levels` (batch, attributes) are None without groups.
    """

    latent = 0  # how many normal random numbers (the noise) a trajectory starts from

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
        self.forbidden_first = nn.Buffer(forbidden[0], persistent=False)
        self.forbidden = nn.Buffer(forbidden[1], persistent=False)

    @property
    def decoder(self) -> Self:
        """The network that writes tokens: this network itself."""
        return self

    def measure(self, dataset: TrajectoryDataset) -> None:
        """Set the buffers that come from the dataset: anchors and coordinates of places."""
        measure_layers(self, dataset)

    def forward(
        self,
        tokens: Tensor,
        anchors: Tensor,
        levels: Tensor | None,
        noise: Tensor,
        step: int | None = None,
    ) -> Tensor:
        """Return the loss (batch,), minus the log-likelihood; `step` is None after phase 1."""
        return in_length_buckets(self.nats, tokens, self.person(anchors, levels))

    def terms(
        self, tokens: Tensor, anchors: Tensor, levels: Tensor | None, noise: Tensor
    ) -> dict[str, Tensor]:
        """Return terms (batch,) whose sum is, or bounds, minus the log-likelihood."""
        return {"nats": self.nats(tokens, self.person(anchors, levels))}

    def condition(self, anchors: Tensor, levels: Tensor | None, noise: Tensor) -> Tensor:
        """Return the condition (batch, width + ...) of the decoder."""
        return self.person(anchors, levels)

    def person(self, anchors: Tensor, levels: Tensor | None) -> Tensor:
        """Return the condition (batch, width + ...): embedding, distance bias, group bias."""
        parts: list[Tensor] = [self.conditioning(anchors, levels)[0]]  # (batch, width)
        if self.distance_bias is not None:
            parts.append(self.distance_bias(anchors, parts[0]))  # (batch, curves * vocabulary)
        if self.group_bias is not None:
            parts.append(self.group_bias(levels, len(anchors)))  # (batch, vocabulary)
        return torch.cat(parts, 1)

    def nats(self, tokens: Tensor, condition: Tensor) -> Tensor:
        """Return minus the log-likelihood (batch,) of tokens (batch, any) with end tokens."""
        return token_nats(self.logits(previous_tokens(tokens), condition), tokens).sum(1)

    def logits(
        self, previous: Tensor, condition: Tensor, cache: Tensor | None = None, place: int = 0
    ) -> Tensor:
        """Return logits (batch, any, vocabulary) of each place, given the tokens before each.

        With a cache, `previous` (batch, 1) is the token before `place`, and the cache has the rest.
        """
        hidden = self.hidden(self.words(previous), condition, cache, place)  # (batch, any, width)
        return self.token_logits(hidden, condition, place)

    def hidden(
        self, previous: Tensor, condition: Tensor, cache: Tensor | None = None, place: int = 0
    ) -> Tensor:
        """Return hidden states (batch, any, width) from the embeddings before each place."""
        places = self.places[place : place + previous.shape[1]]  # (any, width)
        hidden = self.dropout(previous + places + condition[:, None, : self.width])
        for layer, block in enumerate(self.blocks):
            hidden = block(hidden, None if cache is None else cache[layer], place)
        return self.norm(hidden)

    def token_logits(self, hidden: Tensor, condition: Tensor, place: int = 0) -> Tensor:
        """Return logits (batch, any, vocabulary) from the hidden states of `place` and later."""
        logits: Tensor = self.output(hidden).float()  # (batch, any, vocabulary)
        biases = condition[:, self.width :]  # (batch, ...)
        if self.group_bias is not None:
            vocabulary = logits.shape[-1]
            logits = logits + biases[:, None, -vocabulary:]
            biases = biases[:, :-vocabulary]
        if self.distance_bias is not None:
            logits = logits + self.distance_bias.logits(hidden, biases)
        logits = logits + self.forbidden
        if place:
            return logits
        return torch.cat((logits[:, :1] + self.forbidden_first, logits[:, 1:]), 1)

    @torch.no_grad()
    def sample(self, condition: Tensor, uniform: Uniform, length: int) -> Tensor:
        """Draw tokens (batch, length), PAD after the end; stop when all trajectories have ended."""
        numbers = uniform(TOKEN_STREAM, length)  # (batch, length)
        cache = self.new_cache(len(condition))
        tokens = torch.full(numbers.shape, PAD, device=condition.device)
        last = torch.full(numbers.shape[:1], BOS, device=condition.device)  # (batch,)
        ended = torch.zeros_like(last, dtype=torch.bool)
        for place in range(length):
            logits = self.logits(last[:, None], condition, cache, place)[:, 0]
            last = draw_tokens(logits, numbers[:, place])
            ended |= last == EOS
            if bool(ended.all()):
                break
            tokens[:, place] = torch.where(ended, PAD, last)
        return tokens

    def new_cache(self, batch: int) -> Tensor:
        """Return room for keys and values: (layers, 2, batch, heads, length, head)."""
        length, width = self.places.shape
        head = width // self.heads
        return self.places.new_empty(len(self.blocks), 2, batch, self.heads, length, head)


class Block(TransformerBlock):
    """A pre-norm transformer block: attention, by default causal, and feed-forward layers."""

    def __init__(self, config: TransformerConfig, *, causal: bool = True) -> None:
        super().__init__(config, affine_norms=True)
        self.causal = causal
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self, x: Tensor, cache: Tensor | None = None, place: int = 0, valid: Tensor | None = None
    ) -> Tensor:
        """Transform x (batch, any, width), or one place of it with a cache of the places before."""
        attended = self.attend(
            self.norm_attention(x),
            cache,
            place,
            valid=valid,
            causal=self.causal,
            backward=torch.is_grad_enabled(),
        )
        x = x + self.dropout(attended)  # (batch, any, width)
        return x + self.dropout(self.feedforward(self.norm_feedforward(x)))


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
