"""The autoregressive generator: a causal transformer alone, whose likelihood is exact."""

from __future__ import annotations

from mobatlas.generators.sequence.config import PRESETS, AutoregressiveConfig
from mobatlas.generators.sequence.network import CausalTransformer
from mobatlas.generators.sequence.sequence_generator import writer_family
from mobatlas.groups import Groups


def _network(
    config: AutoregressiveConfig, vocabulary: int, groups: Groups | None
) -> CausalTransformer:
    return CausalTransformer(config.network, vocabulary, config.length, groups)


FAMILY = writer_family("autoregressive", AutoregressiveConfig, PRESETS, _network)
