"""The autoencoder: BART over POI tokens, one narrow latent per token (appendix, "Autoencoder").

A trajectory takes `length` places: its tokens, an end token if there is room, then padding, whose
latent is zero. The decoder reads all places, because it decides where a trajectory ends. After
training the autoencoder is frozen, and the latents of a dataset are encoded once.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import numpy.typing as npt
import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import BartConfig, BartForConditionalGeneration
from transformers.modeling_outputs import BaseModelOutput

from mobatlas.data.dataset import TrajectoryDataset
from mobatlas.data.types import BOS, EOS, HOME, MASK, PAD, Ints
from mobatlas.generators.layers import AttentionConfig
from mobatlas.generators.network_generator import OptimizerConfig
from mobatlas.generators.transformer import draw_tokens, gather_tokens, previous_tokens

ENCODE_BATCH = 512  # trajectories encoded at a time
STATISTICS_SAMPLE = 20_000  # trajectories
Halves = npt.NDArray[np.float16]


class AutoencoderConfig(AttentionConfig, OptimizerConfig):
    """BART over POI tokens, with a projection to one narrow latent per token."""

    encoder_layers: int = Field(2, ge=1, le=48)
    decoder_layers: int = Field(1, ge=1, le=48)
    feedforward: int = Field(384, ge=8)
    latent: int = Field(8, ge=1, le=4_096)  # dimensions of a latent
    dropout: float = Field(0.0, ge=0, lt=1)
    mask_share: float = Field(0.1, ge=0, lt=1)  # of tokens hidden in spans during training
    mask_span: float = Field(3.0, ge=1)  # mean length of a hidden span (Poisson)
    # added to latents in training, so that small errors of the denoiser do not change tokens
    noise: float = Field(0.3, ge=0)
    steps: int = Field(600, ge=1)
    learning_rate: float = Field(1e-3, gt=0)
    weight_decay: float = Field(0.01, ge=0)


class Autoencoder(nn.Module):
    """Encodes tokens as latents and decodes them."""

    def __init__(self, config: AutoencoderConfig, vocabulary: int, length: int) -> None:
        super().__init__()
        self.config = config
        self.length = length
        bart = BartConfig(
            vocab_size=vocabulary,
            max_position_embeddings=length + 2,
            d_model=config.width,
            encoder_layers=config.encoder_layers,
            decoder_layers=config.decoder_layers,
            encoder_ffn_dim=config.feedforward,
            decoder_ffn_dim=config.feedforward,
            encoder_attention_heads=config.heads,
            decoder_attention_heads=config.heads,
            activation_function=config.activation,
            dropout=config.dropout,
            init_std=config.width**-0.5,  # BART's 0.02 suits a width of 1,024, not a narrow one
            pad_token_id=PAD,
            bos_token_id=BOS,
            eos_token_id=EOS,
            decoder_start_token_id=BOS,
            forced_eos_token_id=None,
        )
        self.bart = BartForConditionalGeneration(bart)
        self.bart.generation_config.forced_eos_token_id = None
        self.to_latent = nn.Linear(config.width, config.latent)
        self.scale = nn.LayerNorm(config.latent, elementwise_affine=False)
        self.from_latent = nn.Linear(config.latent, config.width)
        self.places = nn.Parameter(torch.randn(length, config.width))
        # statistics of the latents, set once after training
        self.mean = nn.Buffer(torch.zeros(config.latent))
        self.deviation = nn.Buffer(torch.ones(config.latent))
        self._align_attention()

    def encode(self, tokens: Tensor) -> Tensor:
        """Return latents (batch, any, latent) of tokens (batch, any); zero at padding."""
        valid = tokens != PAD  # (batch, any)
        encoder = self.bart.get_encoder()
        hidden = encoder(input_ids=tokens, attention_mask=valid.long()).last_hidden_state
        return self.scale(self.to_latent(hidden)) * valid[..., None]  # (batch, any, latent)

    def logits(self, latents: Tensor, tokens: Tensor) -> Tensor:
        """Return logits (batch, any, vocabulary) of each place, given latents and tokens before."""
        output = self.bart(
            encoder_outputs=self._memory(latents),
            decoder_input_ids=previous_tokens(tokens),
            use_cache=False,
        )
        return cast(Tensor, output.logits.float())

    def forward(self, masked: Tensor, tokens: Tensor, noise: Tensor) -> Tensor:
        """Return the cross-entropy of `tokens`, summed over a batch, after encoding `masked`.

        `noise` (batch, length, latent) times `config.noise` is added to the latents.
        """
        latents = self.all_places(self.encode(masked)) + self.config.noise * noise
        logits = self.logits(latents, tokens).flatten(0, 1)
        return F.cross_entropy(logits, tokens.flatten(), ignore_index=PAD, reduction="sum")

    @torch.no_grad()
    def decode(
        self,
        latents: Tensor,
        *,
        noise: torch.Generator | None = None,
        beams: int = 1,
        cache: bool = True,
    ) -> Tensor:
        """Return the likeliest tokens (batch, length), PAD after the end; with `noise`, draw."""
        out = self.bart.generate(
            encoder_outputs=self._memory(latents),
            max_new_tokens=self.length,
            num_beams=beams,
            do_sample=False,
            use_cache=cache,
            logits_processor=[_TokenRules(noise)],
        )[:, 1:]  # (batch, longest)
        out = torch.where((out == EOS).cumsum(1) > 0, PAD, out)
        return F.pad(out, (0, self.length - out.shape[1]), value=PAD)

    @torch.no_grad()
    def _align_attention(self) -> None:
        """Let the decoder attend to the latent of the place that it writes, from the start.

        Learning this takes most of the training otherwise. Both sides of the cross-attention carry
        the same vector of the place, and the same projection compares them.
        """
        decoder = self.bart.get_decoder()
        positions = decoder.embed_positions.weight  # BART counts from 2
        positions[2 : 2 + self.length] = self.places
        for layer in decoder.layers:
            nn.init.orthogonal_(layer.encoder_attn.q_proj.weight)
            layer.encoder_attn.k_proj.weight.copy_(layer.encoder_attn.q_proj.weight)

    def standardise(self, latents: Tensor) -> Tensor:
        """Scale latents to mean 0 and variance 1 over training trajectories."""
        return (latents - self.mean) / self.deviation

    def restore(self, standard: Tensor) -> Tensor:
        """Invert `standardise`."""
        return standard * self.deviation + self.mean

    @property
    def padding(self) -> Tensor:
        """The standardised latent of padding."""
        return self.standardise(torch.zeros_like(self.mean))

    def all_places(self, latents: Tensor) -> Tensor:
        """Pad latents with zeros to (batch, length, latent)."""
        return F.pad(latents, (0, 0, 0, self.length - latents.shape[1]))

    def _memory(self, latents: Tensor) -> BaseModelOutput:
        return BaseModelOutput(last_hidden_state=self.from_latent(latents) + self.places)


@dataclass(frozen=True)
class _TokenRules:
    """Forbids tokens that no trajectory contains, and an end before the first token.

    With `noise` it draws a token by one number per row and step, even for rows that have ended. So
    a row depends on its place in the batch alone.
    """

    noise: torch.Generator | None

    def __call__(self, tokens: Tensor, scores: Tensor) -> Tensor:
        scores[:, [PAD, BOS, MASK]] = -torch.inf
        if tokens.shape[1] == 1:  # BOS alone
            scores[:, EOS] = -torch.inf
        if self.noise is None:
            return scores
        # the Gumbel trick, a number per token, would take ten times as long
        uniform = torch.rand(len(scores), generator=self.noise, dtype=torch.float64)
        token = draw_tokens(scores, uniform)
        return torch.full_like(scores, -torch.inf).scatter_(1, token[:, None], 0.0)


def hide_spans(tokens: Tensor, share: float, mean: float) -> Tensor:
    """Replace about a share of tokens by MASK, in spans of Poisson length, never end or padding."""
    if share <= 0:
        return tokens
    rates = torch.full(tokens.shape, mean, device=tokens.device)
    spans = torch.poisson(rates).clamp(min=1)  # (batch, length)
    starts = torch.rand(tokens.shape, device=tokens.device) < share / mean
    # a place is hidden if a span that started at or before it reaches it
    places = torch.arange(tokens.shape[1], device=tokens.device)
    reach = torch.where(starts, places + spans, torch.zeros_like(spans)).cummax(1).values
    return torch.where((reach > places) & (tokens >= HOME), MASK, tokens)


@dataclass(frozen=True)
class Latents:
    """Standardised latents of trajectories and their end tokens, end to end."""

    values: Halves  # (places, latent); half precision errs far less than the noise of training
    offsets: Ints  # (trajectories of the dataset + 1,); empty if not encoded
    padding: npt.NDArray[np.float32]  # (latent,)
    length: int

    def batch(self, indices: Ints) -> Tensor:
        """Return latents (batch, length, latent)."""
        starts = self.offsets[indices]
        lengths = self.offsets[indices + 1] - starts  # (batch,)
        columns = np.arange(self.length)
        valid = columns < lengths[:, None]  # (batch, length)
        out = np.tile(self.padding, (*valid.shape, 1))
        out[valid] = self.values[(starts[:, None] + columns)[valid]]
        return torch.from_numpy(out)


def set_statistics(autoencoder: Autoencoder, dataset: TrajectoryDataset) -> Tensor:
    """Set mean and deviation of the latents from training trajectories.

    Returns the mean standardised latent of each token (vocabulary, latent). A token that no
    trajectory contains is encoded alone.
    """
    members = np.random.default_rng(0).permutation(dataset.split("train"))
    members = np.sort(members[:STATISTICS_SAMPLE])
    size = len(dataset.vocabulary)
    width = autoencoder.config.latent
    counts = torch.zeros(size, dtype=torch.float64)
    totals = torch.zeros(size, width, dtype=torch.float64)
    squares = torch.zeros(width, dtype=torch.float64)
    for _, latents, tokens in _encode_batches(autoencoder, dataset, members):
        valid = tokens != PAD
        values = latents[valid].double().cpu()  # (places, latent)
        words = tokens[valid].cpu()  # (places,)
        counts += torch.bincount(words, minlength=size)
        totals.index_add_(0, words, values)
        squares += values.square().sum(0)
    mean = totals.sum(0) / counts.sum()
    deviation = (squares / counts.sum() - mean.square()).clamp(min=0).sqrt()
    autoencoder.mean.copy_(mean)
    autoencoder.deviation.copy_(deviation.clamp(min=1e-3))  # a constant dimension stays finite
    with torch.no_grad():
        each_token = torch.arange(size, device=autoencoder.places.device)[:, None]
        alone = autoencoder.encode(each_token)[:, 0].cpu()  # (vocabulary, latent)
    alone[PAD] = 0
    typical = torch.where(counts[:, None] > 0, totals / counts.clamp(min=1)[:, None], alone)
    return autoencoder.standardise(typical.to(autoencoder.mean))


def encode_split(
    autoencoder: Autoencoder, dataset: TrajectoryDataset, split: str, path: Path | None
) -> Latents:
    """Encode the trajectories of a split, to a memory-mapped file if there is a `path`."""
    members = dataset.split(split)
    lengths = np.zeros(len(dataset), dtype=np.int64)
    lengths[members] = np.minimum(dataset.lengths[members] + 1, autoencoder.length)
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    shape = (int(offsets[-1]), autoencoder.config.latent)
    values: Halves = np.empty(shape, np.float16)
    if path is not None:
        values = np.lib.format.open_memmap(path, "w+", np.float16, shape)
    for indices, latents, tokens in _encode_batches(autoencoder, dataset, members):
        scaled = autoencoder.standardise(latents)[tokens != PAD].cpu().numpy()
        values[offsets[indices[0]] : offsets[indices[-1] + 1]] = scaled
    return Latents(values, offsets, autoencoder.padding.cpu().numpy(), autoencoder.length)


@torch.no_grad()
def _encode_batches(
    autoencoder: Autoencoder, dataset: TrajectoryDataset, members: Ints
) -> Iterator[tuple[Ints, Tensor, Tensor]]:
    """Yield indices, latents (batch, any, latent) and tokens (batch, any) with end tokens."""
    for start in range(0, len(members), ENCODE_BATCH):
        indices = members[start : start + ENCODE_BATCH]
        tokens = gather_tokens(dataset, indices, autoencoder.length).to(autoencoder.places.device)
        yield indices, autoencoder.encode(tokens), tokens
