"""How generators that write token after token are configured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, model_validator

from mobatlas.config import Section


class TransformerConfig(Section):
    """A transformer over tokens."""

    depth: int = Field(3, ge=1, le=64)
    width: int = Field(96, ge=8, le=4_096)
    heads: int = Field(4, ge=1)
    expansion: int = Field(4, ge=1, le=16)  # of the feed-forward layers
    activation: Literal["relu", "gelu"] = "relu"
    dropout: float = Field(0.0, ge=0, lt=1)
    embedding: int = Field(64, ge=1, le=4_096)  # of one demographic attribute
    distance_curves: int = Field(
        0, ge=0, le=64
    )  # of the distance to each anchor, see DistanceBias; 0: a network without a map
    group_bias: bool = False  # logits of places of every group, see GroupTokenBias

    @model_validator(mode="after")
    def _heads_divide_width(self) -> TransformerConfig:
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is not a multiple of heads {self.heads}")
        return self


class TrainingConfig(Section):
    """Phase 1."""

    steps: int = Field(1_500, ge=1)
    batch: int = Field(128, ge=1)
    learning_rate: float = Field(2e-3, gt=0)
    warmup: int = Field(100, ge=0)
    weight_decay: float = Field(0.01, ge=0)
    decay: Literal["none", "linear", "cosine"] = "cosine"  # of the learning rate after the warm-up
    ema: float = Field(0.99, ge=0, lt=1)


class WeightedFitConfig(Section):
    """Going on from phase 1 with groups: `strong`, and what phase 2 teaches."""

    steps: int = Field(800, ge=1)
    learning_rate: float = Field(1e-3, gt=0)
    warmup: int = Field(100, ge=0)
    group_dropout: float = Field(
        0.1, ge=0, le=1
    )  # share of examples whose group is hidden, so that the null group stays alive


class WriterConfig(Section):
    """What all of them share."""

    length: int = Field(
        24, ge=2, le=4_096
    )  # tokens; longer trajectories are truncated, and counted
    network: TransformerConfig = TransformerConfig()
    training: TrainingConfig = TrainingConfig()
    weighted_fit: WeightedFitConfig = WeightedFitConfig()


class MappedConfig(TransformerConfig):
    """A transformer that knows how far places are and which a group prefers: real cities have too few visits to learn it by."""

    distance_curves: int = Field(4, ge=0, le=64)
    group_bias: bool = True


class AutoregressiveConfig(WriterConfig):
    """The whole generator."""

    network: MappedConfig = MappedConfig()


# What the paper's table says of its transformers, where it concerns this one.
PAPER: Mapping[str, Any] = {
    "length": 64,
    "network": {
        "depth": 12,
        "width": 512,
        "heads": 4,
        "activation": "gelu",
        "dropout": 0.1,
        "embedding": 256,
    },
    "training": {
        "steps": 100_000,
        "batch": 512,
        "learning_rate": 1e-4,
        "warmup": 1_000,
        "decay": "none",
        "ema": 0.9999,
    },
    "weighted_fit": {"steps": 30_000, "learning_rate": 1e-5, "warmup": 1_000},
}
PRESETS: Mapping[str, Mapping[str, Any]] = {"small": {}, "paper": PAPER}
