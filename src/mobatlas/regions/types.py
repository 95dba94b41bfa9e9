"""Regions: the composition P and the aggregates V of the same regions, in the units of people and counts per window."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from mobatlas.errors import MobatlasError
from mobatlas.groups import Groups

Floats = npt.NDArray[np.float64]
CELLS = 4_000_000  # of regions x features that are held a second time while one thing is made of another


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
    spread: Floats | None = (
        None  # (features,) variance between people of one region; None where unknown
    )
    pooled: bool = False  # shares only: no device counts were published
    noise: Floats | None = (
        None  # (regions, features) variance of published noise, on top of sampling
    )

    def of_features(self, bins: npt.NDArray[np.int64]) -> Aggregates:
        """Some of the features alone."""
        spread, noise = (
            None if each is None else each[..., bins] for each in (self.spread, self.noise)
        )
        names = tuple(self.features[number] for number in bins.tolist())
        return replace(
            self, features=names, values=self.values[:, bins], spread=spread, noise=noise
        )


@dataclass(frozen=True)
class Population:
    """Everybody whom the regions were drawn from, whether a region counts them or not."""

    shares: Floats  # w (groups,), sum to 1
    values: Floats  # mu0 (features,): the mean over people of the counts in a window
    n: float  # people


@dataclass(frozen=True)
class Regions:
    """Both, aligned region by region."""

    composition: Composition
    aggregates: Aggregates
    randomised: bool  # people were assigned to regions at random given their group: no region effect of its own
    details: dict[str, Any] = field(
        default_factory=dict
    )  # how they were made, for manifests and reports
    population: Population | None = None  # None: not known, or the regions are all of it
    places: Floats | None = (
        None  # (regions, 2) latitude and longitude of where their people live; None: not known
    )

    def __post_init__(self) -> None:
        if self.composition.regions != self.aggregates.regions:
            raise MobatlasError(
                "composition and aggregates list different regions, or in another order"
            )
        if self.population is not None:
            theirs = len(self.population.shares), len(self.population.values)
            ours = len(self.groups), len(self.aggregates.features)
            if theirs != ours:
                raise MobatlasError(
                    f"population: has (groups, features) {theirs}, but the regions have {ours}"
                )

    @property
    def groups(self) -> Groups:
        return self.composition.groups

    def some(self, rows: npt.NDArray[np.int64]) -> Regions:
        """Some of the regions, without what is known of all people together: it would tell of those that are left out."""
        names = tuple(self.composition.regions[row] for row in rows.tolist())
        composition, v = self.composition, self.aggregates
        noise, places = (None if each is None else each[rows] for each in (v.noise, self.places))
        return replace(
            self,
            composition=replace(
                composition, regions=names, shares=composition.shares[rows], n=composition.n[rows]
            ),
            aggregates=replace(v, regions=names, values=v.values[rows], n=v.n[rows], noise=noise),
            population=None,
            places=places,
        )


def blocks(rows: int, columns: int) -> Iterator[slice]:
    """Rows by as many as `CELLS` allows."""
    step = max(1, CELLS // max(columns, 1))
    return (slice(start, start + step) for start in range(0, rows, step))


def mean_over_regions(values: Floats, weight: Floats) -> Floats:
    """The weighted mean (features,) of values (regions, features), over those regions that tell them."""
    total, heard = np.zeros((2, values.shape[1]))
    for some in blocks(*values.shape):
        total += weight[some] @ np.nan_to_num(values[some])
        heard += weight[some] @ ~np.isnan(values[some])
    return total / np.maximum(heard, 1e-300)
