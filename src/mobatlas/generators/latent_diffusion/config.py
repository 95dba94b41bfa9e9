"""Options of latent diffusion; the preset `paper` is the paper's table of hyperparameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, model_validator

from mobatlas.config import Section
from mobatlas.generators.network_generator import WeightedFitConfig


class AutoencoderConfig(Section):
    """BART over POI tokens, with a projection to one narrow latent per token."""

    encoder_layers: int = Field(2, ge=1, le=48)
    decoder_layers: int = Field(1, ge=1, le=48)
    width: int = Field(96, ge=8, le=4_096)
    feedforward: int = Field(384, ge=8)
    heads: int = Field(4, ge=1)
    latent: int = Field(8, ge=1, le=4_096)  # dimensions of a latent
    activation: Literal["relu", "gelu"] = "relu"  # gelu takes a sixth of a training step on a CPU
    dropout: float = Field(0.0, ge=0, lt=1)
    mask_share: float = Field(0.1, ge=0, lt=1)  # of tokens hidden in spans during training
    mask_span: float = Field(3.0, ge=1)  # mean length of a hidden span (Poisson)
    # added to latents in training, so that small errors of the denoiser do not change tokens
    noise: float = Field(0.3, ge=0)
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
    # curves of the distance to each anchor, see DistanceBias; 0: no distance bias
    distance_curves: int = Field(0, ge=0, le=64)
    group_bias: bool = False  # see GroupTokenBias
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
                "distance_curves and group_bias need cross_entropy above 0; set distance_curves to "
                "0 and group_bias to false, or raise cross_entropy"
            )
        return self


class DenoiserFitConfig(WeightedFitConfig):
    """Training of the denoiser on examples with groups, which continues from phase 1."""

    steps: int = Field(1_500, ge=1)


class DiffusionConfig(Section):
    """The noise schedule, the solver and the decoding."""

    train_steps: int = Field(1_000, ge=2)  # of the cosine schedule
    # "likeliest" makes frequent places too frequent, because a latent between two tokens always
    # becomes the more frequent one.
    decoding: Literal["draw", "likeliest"] = "draw"
    solver: Literal["dpm++", "ddim"] = "dpm++"
    steps: int = Field(10, ge=1)  # of the solver


class LatentDiffusionConfig(Section):
    """Options of latent diffusion."""

    length: int = Field(24, ge=2, le=4_096)  # tokens; longer trajectories are truncated
    autoencoder: AutoencoderConfig = AutoencoderConfig()
    denoiser: DenoiserConfig = DenoiserConfig()
    weighted_fit: DenoiserFitConfig = DenoiserFitConfig()
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
