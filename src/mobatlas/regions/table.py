"""Regions: the composition P and the aggregates V of the same regions, in the units of people and counts per window."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from mobatlas.errors import MobatlasError
from mobatlas.groups import Groups

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Composition:
    """p(d|g): the share of each group among the people of each region."""

    groups: Groups
    regions: tuple[str, ...]
    shares: Floats  # P (regions, groups), rows sum to 1
    n: Floats  # (regions,) people counted; infinite where the shares are known exactly


@dataclass(frozen=True)
class Aggregates:
    """nu(g): the mean over people of each region of the counts in a window."""

    regions: tuple[str, ...]
    features: tuple[str, ...]  # `map:bin`
    values: Floats  # V (regions, features); NaN where suppressed
    n: Floats  # (regions,) people behind the values
    spread: Floats | None = None  # (features,) variance between people of one region; None where unknown
    pooled: bool = False  # shares only: no device counts were published
    noise: Floats | None = None  # (features,) variance of published noise, on top of sampling


@dataclass(frozen=True)
class Regions:
    """Both, aligned region by region."""

    composition: Composition
    aggregates: Aggregates
    randomised: bool  # people were assigned to regions at random given their group: no region effect of its own
    details: dict[str, Any] = field(default_factory=dict)  # how they were made, for manifests and reports

    def __post_init__(self) -> None:
        if self.composition.regions != self.aggregates.regions:
            raise MobatlasError("composition and aggregates list different regions, or in another order")

    @property
    def groups(self) -> Groups:
        return self.composition.groups
