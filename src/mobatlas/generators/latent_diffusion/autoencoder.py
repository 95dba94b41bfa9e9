"""The autoencoder: BART over POI tokens, one narrow latent a token (the paper's appendix, "Autoencoder").

A trajectory takes `length` places: its tokens, an end token if there is room, then padding, whose latent is zero. The decoder
reads all places, because a generated trajectory ends where the decoder says so.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import BartConfig, BartForConditionalGeneration
from transformers.modeling_outputs import BaseModelOutput

from mobatlas.data.vocabulary import BOS, EOS, HOME, MASK, PAD
from mobatlas.generators.latent_diffusion.config import AutoencoderConfig
from mobatlas.generators.tiling import draw


class Autoencoder(nn.Module):
    """Tokens to latents and back."""

    mean: Tensor
    deviation: Tensor

    def __init__(self, config: AutoencoderConfig, vocabulary: int, length: int) -> None:
        super().__init__()
        self.config, self.length = config, length
        self.bart = BartForConditionalGeneration(
            BartConfig(
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
                init_std=config.width
                ** -0.5,  # BART's 0.02 is for a width of 1,024; narrow ones hardly start with it
                pad_token_id=PAD,
                bos_token_id=BOS,
                eos_token_id=EOS,
                decoder_start_token_id=BOS,
                forced_eos_token_id=None,
            )
        )
        self.bart.generation_config.forced_eos_token_id = None
        self.to_latent = nn.Linear(config.width, config.latent)
        self.scale = nn.LayerNorm(config.latent, elementwise_affine=False)
        self.from_latent = nn.Linear(config.latent, config.width)
        self.places = nn.Parameter(torch.randn(length, config.width))
        # statistics of the latents, for the denoiser: set once, after training
        self.register_buffer("mean", torch.zeros(config.latent))
        self.register_buffer("deviation", torch.ones(config.latent))
        self._look_where_you_write()

    def encode(self, tokens: Tensor) -> Tensor:
        """Latents (batch, any, latent) of tokens (batch, any); zero at padding."""
        valid = tokens != PAD  # (batch, any)
        hidden = self.bart.get_encoder()(
            input_ids=tokens, attention_mask=valid.long()
        ).last_hidden_state
        return self.scale(self.to_latent(hidden)) * valid[..., None]  # (batch, any, latent)

    def logits(self, latents: Tensor, tokens: Tensor) -> Tensor:
        """Of the token at each place, (batch, any, vocabulary), given the latents and the tokens (batch, any) before it."""
        before = F.pad(tokens[:, :-1], (1, 0), value=BOS)  # (batch, any)
        out = self.bart(
            encoder_outputs=self._memory(latents), decoder_input_ids=before, use_cache=False
        )
        return out.logits

    def forward(self, seen: Tensor, tokens: Tensor, noise: Tensor) -> Tensor:
        """Sum over a batch of the cross-entropy of `tokens`, after encoding what is `seen` of them.

        `noise` (batch, length, latent) is added to the latents, as much of it as the configuration says.
        """
        latents = self.all_places(self.encode(seen)) + self.config.noise * noise
        logits = self.logits(latents, tokens)
        return F.cross_entropy(
            logits.flatten(0, 1).float(), tokens.flatten(), ignore_index=PAD, reduction="sum"
        )

    @torch.no_grad()
    def decode(
        self,
        latents: Tensor,
        lengths: Tensor | None = None,
        *,
        noise: torch.Generator | None = None,
        beams: int = 1,
        cache: bool = True,
    ) -> Tensor:
        """Tokens (batch, length), PAD after the end: the likeliest, or with `noise` drawn from the decoder's distribution.

        `lengths` (batch,) says where the end is.
        """
        out = self.bart.generate(
            encoder_outputs=self._memory(latents),
            max_new_tokens=self.length,
            num_beams=beams,
            do_sample=False,
            use_cache=cache,
            logits_processor=[_Choice(lengths, noise)],
        )[:, 1:]  # (batch, longest)
        out = torch.where((out == EOS).cumsum(1) > 0, PAD, out)
        return F.pad(out, (0, self.length - out.shape[1]), value=PAD)

    @torch.no_grad()
    def _look_where_you_write(self) -> None:
        """Begin with a decoder that reads the latent of the place it writes; to find that by itself takes most of the training.

        Both sides of its cross-attention carry the same vector of the place, and compare them by the same projection.
        """
        decoder = self.bart.get_decoder()
        positions = decoder.embed_positions.weight  # two more than places: BART counts from 2
        positions[2 : 2 + self.length] = self.places
        for layer in decoder.layers:
            nn.init.orthogonal_(layer.encoder_attn.q_proj.weight)
            layer.encoder_attn.k_proj.weight.copy_(layer.encoder_attn.q_proj.weight)

    def standardise(self, latents: Tensor) -> Tensor:
        """Latents with mean 0 and variance 1 over training trajectories."""
        return (latents - self.mean) / self.deviation

    def restore(self, standard: Tensor) -> Tensor:
        """The inverse of `standardise`."""
        return standard * self.deviation + self.mean

    @property
    def padding(self) -> Tensor:
        """The standardised latent of padding."""
        return self.standardise(torch.zeros_like(self.mean))

    def all_places(self, latents: Tensor) -> Tensor:
        """Latents at all places, (batch, length, latent), zero past those given."""
        return F.pad(latents, (0, 0, 0, self.length - latents.shape[1]))

    def _memory(self, latents: Tensor) -> BaseModelOutput:
        return BaseModelOutput(last_hidden_state=self.from_latent(latents) + self.places)


class _Choice:
    """Bans tokens that no trajectory holds, an end before the first token, and ends elsewhere than at the lengths given.

    With `noise` the only score left is a draw: one number a row at every step, from a generator of its own, whoever has ended,
    so that a row depends on its place in the batch alone.
    """

    def __init__(self, lengths: Tensor | None, noise: torch.Generator | None) -> None:
        self.lengths, self.noise = lengths, noise

    def __call__(self, tokens: Tensor, scores: Tensor) -> Tensor:
        done = tokens.shape[1] - 1  # tokens so far, without BOS
        scores[:, [PAD, BOS, MASK]] = -torch.inf
        if done == 0:
            scores[:, EOS] = -torch.inf
        if self.lengths is not None:
            ends = (
                self.lengths.repeat_interleave(len(scores) // len(self.lengths)) <= done
            )  # (batch * beams,)
            scores[~ends, EOS] = -torch.inf
            scores[ends] = torch.where(
                torch.arange(scores.shape[1], device=scores.device) == EOS, 0.0, -torch.inf
            )
        if self.noise is None:
            return scores
        # one number a row: noise of every token, of which the largest is as good a draw, would take ten times as long
        token = draw(scores, torch.rand(len(scores), generator=self.noise, dtype=torch.float64))
        return torch.full_like(scores, -torch.inf).scatter_(1, token[:, None], 0.0)


def with_end(tokens: Tensor, length: int) -> Tensor:
    """Tokens (batch, any) with an end token after each trajectory that leaves room for it within `length` places."""
    tokens = F.pad(tokens[:, :length], (0, 1), value=PAD)[:, :length]
    ends = (tokens != PAD).sum(1)  # (batch,)
    rows = torch.nonzero(ends < tokens.shape[1]).squeeze(1)
    tokens[rows, ends[rows]] = EOS
    return tokens


def hide_spans(tokens: Tensor, share: float, mean: float) -> Tensor:
    """Tokens with about that share of them hidden by MASK, in spans of Poisson length; end and padding stay."""
    if share <= 0:
        return tokens
    spans = torch.poisson(torch.full(tokens.shape, mean, device=tokens.device)).clamp(
        min=1
    )  # (batch, length)
    starts = torch.rand(tokens.shape, device=tokens.device) < share / mean
    # a place is hidden if a span that started at or before it reaches it
    places = torch.arange(tokens.shape[1], device=tokens.device)
    reach = torch.where(starts, places + spans, torch.zeros_like(spans)).cummax(1).values
    return torch.where((reach > places) & (tokens >= HOME), MASK, tokens)
