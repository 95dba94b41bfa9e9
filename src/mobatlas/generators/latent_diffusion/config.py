"""How a latent diffusion generator is configured; the preset `paper` is the paper's table of hyperparameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, model_validator

from mobatlas.config import Section


class AutoencoderConfig(Section):
    """BART over POI tokens, with a projection to narrow latents, one to a token."""

    encoder_layers: int = Field(2, ge=1, le=48)
    decoder_layers: int = Field(1, ge=1, le=48)
    width: int = Field(96, ge=8, le=4_096)
    feedforward: int = Field(384, ge=8)
    heads: int = Field(4, ge=1)
    latent: int = Field(8, ge=1, le=4_096)  # dimensions of a latent
    activation: Literal["relu", "gelu"] = "relu"  # gelu takes a sixth of a training step on a CPU
    dropout: float = Field(0.0, ge=0, lt=1)
    mask_share: float = Field(
        0.1, ge=0, lt=1
    )  # share of tokens hidden in spans while it learns to reconstruct
    mask_span: float = Field(3.0, ge=1)  # mean length of a hidden span (Poisson)
    noise: float = Field(
        0.3, ge=0
    )  # added to latents in training: what diffusion leaves wrong must not change a token
    steps: int = Field(600, ge=1)
    batch: int = Field(128, ge=1)
    learning_rate: float = Field(1e-3, gt=0)
    warmup: int = Field(100, ge=0)
    weight_decay: float = Field(0.01, ge=0)
    decay: Literal["none", "linear", "cosine"] = "cosine"  # of the learning rate after the warm-up

    @model_validator(mode="after")
    def _heads_divide_width(self) -> AutoencoderConfig:
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is not a multiple of heads {self.heads}")
        return self


class DenoiserConfig(Section):
    """The diffusion transformer."""

    depth: int = Field(4, ge=1, le=64)
    width: int = Field(96, ge=8, le=4_096)
    heads: int = Field(4, ge=1)
    expansion: int = Field(4, ge=1, le=16)  # of the feed-forward layers
    activation: Literal["relu", "gelu"] = "relu"
    embedding: int = Field(64, ge=1, le=4_096)  # of one demographic attribute
    # the network also sees its own last estimate of x0 (Chen et al. 2023): latents of tokens are nearly discrete
    self_conditioning: bool = True
    # Timesteps are drawn with density t^(timestep_emphasis - 1): more than 1 learns whole days better, less learns places better.
    timestep_emphasis: float = Field(1.5, gt=0, le=10)
    # Share of the cross-entropy of tokens in the loss; the rest is squared error, which alone hardly learns which places a
    # group prefers. With it x0 is estimated as a mixture of the latents of tokens (Dieleman et al. 2022).
    cross_entropy: float = Field(0.9, ge=0, le=1)
    # Curves of the distance to each anchor that are added to the logits of tokens, see DistanceBias; 0: a denoiser without a map.
    distance_curves: int = Field(0, ge=0, le=64)
    group_bias: bool = False  # logits of places of every group, see GroupTokenBias
    ema: float = Field(0.999, ge=0, lt=1)
    steps: int = Field(3_000, ge=1)
    batch: int = Field(128, ge=1)
    learning_rate: float = Field(2e-3, gt=0)
    warmup: int = Field(100, ge=0)
    decay: Literal["none", "linear", "cosine"] = "cosine"

    @model_validator(mode="after")
    def _heads_divide_width(self) -> DenoiserConfig:
        if self.width % (2 * self.heads):
            raise ValueError(
                f"width {self.width} is not a multiple of twice the heads {self.heads}"
            )
        if (self.distance_curves or self.group_bias) and not self.cross_entropy:
            raise ValueError(
                "distance_curves and group_bias are of logits of tokens, which cross_entropy 0 does without; change one"
            )
        return self


class WeightedFitConfig(Section):
    """Going on from phase 1 with groups: `strong`, and what phase 2 teaches."""

    steps: int = Field(1_500, ge=1)
    learning_rate: float = Field(1e-3, gt=0)
    warmup: int = Field(100, ge=0)
    group_dropout: float = Field(
        0.1, ge=0, le=1
    )  # share of examples whose group is hidden, so that the null condition stays alive


class DiffusionConfig(Section):
    """The noise, and the way back from it."""

    train_steps: int = Field(1_000, ge=2)  # of the cosine schedule
    # Tokens are drawn from the decoder's distribution, or the likeliest are taken, which makes frequent places too frequent:
    # what denoising leaves between two tokens always becomes the more frequent one.
    decoding: Literal["draw", "likeliest"] = "draw"
    solver: Literal["dpm++", "ddim"] = "dpm++"
    steps: int = Field(10, ge=1)  # of the solver


class LatentDiffusionConfig(Section):
    """The whole generator."""

    length: int = Field(
        24, ge=2, le=4_096
    )  # tokens; longer trajectories are truncated, and counted
    autoencoder: AutoencoderConfig = AutoencoderConfig()
    denoiser: DenoiserConfig = DenoiserConfig()
    weighted_fit: WeightedFitConfig = WeightedFitConfig()
    diffusion: DiffusionConfig = DiffusionConfig()

    @model_validator(mode="after")
    def _fewer_steps_than_noise_levels(self) -> LatentDiffusionConfig:
        if self.diffusion.steps > self.diffusion.train_steps:
            raise ValueError("diffusion.steps is larger than diffusion.train_steps")
        return self


PRESETS: Mapping[str, Mapping[str, Any]] = {
    "small": {},
    "paper": {
        "length": 64,
        "autoencoder": {
            "encoder_layers": 4,
            "decoder_layers": 2,
            "width": 256,
            "feedforward": 1_024,
            "heads": 4,
            "latent": 256,
            "activation": "gelu",
            "dropout": 0.1,
            "mask_share": 0.3,
            "noise": 0.0,
            "steps": 30_000,
            "batch": 512,
            "learning_rate": 1e-4,
            "warmup": 1_000,
            "decay": "linear",
        },
        "denoiser": {
            "depth": 12,
            "width": 512,
            "heads": 4,
            "activation": "gelu",
            "self_conditioning": False,
            "timestep_emphasis": 1.0,
            "cross_entropy": 0.0,
            "embedding": 256,
            "ema": 0.9999,
            "steps": 100_000,
            "batch": 512,
            "learning_rate": 1e-4,
            "warmup": 1_000,
            "decay": "none",
        },
        "weighted_fit": {"steps": 30_000, "learning_rate": 1e-5, "warmup": 1_000},
        "diffusion": {"solver": "ddim", "steps": 50, "decoding": "likeliest"},
    },
}
