"""The autoregressive generator: a causal transformer alone, whose likelihood is exact."""

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from mobatlas.generators.network_generator import (
    PAPER,
    SequenceConfig,
    SequenceGenerator,
    network_family,
)
from mobatlas.generators.transformer import CausalTransformer, TransformerConfig


class MappedConfig(TransformerConfig):
    """A transformer with distance and group biases, which learns places from few visits."""

    distance_curves: int = Field(4, ge=0, le=64)
    group_bias: bool = True


class AutoregressiveConfig(SequenceConfig):
    """Options of the autoregressive generator."""

    network: MappedConfig = MappedConfig()


PRESETS: Mapping[str, Mapping[str, Any]] = {"small": {}, "paper": PAPER}


class Autoregressive(SequenceGenerator):
    """The generator of the causal transformer."""

    def _build(self, size: int) -> None:
        self.network = CausalTransformer(self.config.network, size, self.config.length, self.groups)


FAMILY = network_family("autoregressive", Autoregressive, AutoregressiveConfig, PRESETS)
