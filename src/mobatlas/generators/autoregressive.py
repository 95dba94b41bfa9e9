"""The autoregressive generator: a causal transformer alone, whose likelihood is exact."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from mobatlas.generators.sequence.network import CausalTransformer, TransformerConfig
from mobatlas.generators.sequence.sequence_generator import PAPER, SequenceConfig, sequence_family
from mobatlas.groups import Groups


class MappedConfig(TransformerConfig):
    """A transformer with distance and group biases, which learns places from few visits."""

    distance_curves: int = Field(4, ge=0, le=64)
    group_bias: bool = True


class AutoregressiveConfig(SequenceConfig):
    """Options of the autoregressive generator."""

    network: MappedConfig = MappedConfig()


PRESETS: Mapping[str, Mapping[str, Any]] = {"small": {}, "paper": PAPER}


def _network(
    config: AutoregressiveConfig, vocabulary: int, groups: Groups | None
) -> CausalTransformer:
    return CausalTransformer(config.network, vocabulary, config.length, groups)


FAMILY = sequence_family("autoregressive", AutoregressiveConfig, PRESETS, _network)
