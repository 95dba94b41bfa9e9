"""Checks of generator and supervision options, before a benchmark prepares anything."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mobatlas.config import build, merge
from mobatlas.generators.protocol import family_of
from mobatlas.pipeline.models import split_options
from mobatlas.supervision.strategies import config_class


def check_options(generator: str, preset: str, values: Mapping[str, Any]) -> None:
    """Refuse wrong options of either phase."""
    family = family_of(generator)
    supervision_values, generator_values = split_options(values)
    resolved = family.resolve(generator_values, Path())
    build(family.config, merge(family.presets[preset], resolved), "--set")
    build(config_class(), supervision_values, "--set")
