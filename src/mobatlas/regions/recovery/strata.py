"""Bins of aggregates as recovery goes through them: in units of their spread, by the regions that tell about them, and no
more of them at once than there is room for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mobatlas.regions.recovery.posterior import Fit, Problem
from mobatlas.regions.types import Floats, blocks

BAND = 4.0  # bins whose frequencies lie within this factor share a prior variance
Ints = npt.NDArray[np.int64]
Stratum = tuple[str, int]  # a feature map and a band of frequencies
Strata = dict[Stratum, Ints]  # the bins of each


class Variances(NamedTuple):
    """All that is fitted, and what was published of noise."""

    root: Floats  # (groups, groups) of S
    scale: float  # lambda
    effect: float  # omega
    published: Floats  # (regions,)


@dataclass(frozen=True)
class Deviations:
    """y: aggregates less the population mean, in units of the spread between people, made bin by bin."""

    values: Floats  # V (regions, features)
    mean: Floats  # mu0 (features,)
    scale: Floats  # (features,)
    noise: Floats | None  # (regions, features) variance of published noise

    @cached_property
    def complete(self) -> npt.NDArray[np.bool_]:
        """Bins that every region tells (features,)."""
        return np.asarray(~np.isnan(self.values).any(0))

    def of(self, bins: Ints) -> Floats:
        """(regions, bins)"""
        y = self.values[:, bins]
        y -= self.mean[bins]
        y /= self.scale[bins]
        return y

    def published(self, bins: Ints) -> Floats:
        """The variance of published noise in these units, averaged over bins (regions,)."""
        total = np.zeros(len(self.values))
        for some in self.in_turn(bins) if self.noise is not None else ():
            assert self.noise is not None
            total += self.noise[:, some] @ (1 / self.scale[some] ** 2)
        return total / max(len(bins), 1)

    def parts(self, problem: Problem, bins: Ints) -> Iterator[Part]:
        """Bins by the regions that tell about them: a suppressed cell is a region less for that bin."""
        for some in self.in_turn(bins):
            yield from _parts(problem, some, self.of(some))

    def in_turn(self, bins: Ints) -> Iterator[Ints]:
        """So many at once as there is room for."""
        return (bins[some] for some in blocks(len(bins), len(self.values)))


@dataclass(frozen=True)
class Part:
    """Bins that are known in the same regions."""

    bins: Ints
    problem: Problem
    y: Floats  # (regions, bins)
    regions: Ints  # (regions,) among all
    silent: Ints  # rows of y that do not tell, zero there

    def fit(self, whole: Fit, variances: Variances) -> Fit:
        """From that of all regions, or where these are other regions of them alone."""
        if len(self.regions) < len(whole.weight):
            root, scale, effect, published = variances
            return Fit.of(self.problem, root, scale, effect, published[self.regions])
        return whole.without(self.problem, self.silent) if len(self.silent) else whole

    def mean_variance(self, published: Floats) -> float:
        """Of the population mean itself, in units of a bin."""
        n = np.delete(self.problem.n, self.silent)
        weight = n / n.sum()
        return float(weight**2 @ (1 / n + np.delete(published[self.regions], self.silent)))


def deviance(parts: Sequence[Part], problem: Problem, variances: Variances) -> float:
    """-2 log restricted likelihood of all bins of all parts."""
    whole = Fit.of(problem, *variances)
    return float(
        sum(part.fit(whole, variances).deviance(part.problem, part.y).sum() for part in parts)
    )


def maps_of(features: Sequence[str]) -> dict[str, Ints]:
    """The bins of each feature map."""
    names = np.array([name.partition(":")[0] for name in features])
    return {name: np.flatnonzero(names == name) for name in dict.fromkeys(names.tolist())}


def strata(features: Sequence[str], frequency: Floats) -> Strata:
    """Bins of a map by powers of four of their frequency: what everybody does daily differs otherwise than what few do ever."""
    bands = np.floor(np.log(np.maximum(frequency, 1e-12)) / np.log(BAND)).astype(np.int64)
    names = [
        (name.partition(":")[0], band) for name, band in zip(features, bands.tolist(), strict=True)
    ]
    found: dict[Stratum, list[int]] = {}
    for place, name in enumerate(names):
        found.setdefault(name, []).append(place)
    return {name: np.array(found[name], dtype=np.int64) for name in sorted(found)}


def _parts(problem: Problem, bins: Ints, y: Floats) -> Iterator[Part]:
    known, everywhere = ~np.isnan(y), np.arange(len(y))
    if known.all():
        yield Part(bins, problem, y, everywhere, everywhere[:0])
        return
    patterns, which = np.unique(known, axis=1, return_inverse=True)
    for number, told in enumerate(patterns.T):
        columns, rows = np.flatnonzero(which.ravel() == number), np.flatnonzero(told)
        if 2 * len(rows) > len(y):
            yield Part(
                bins[columns],
                problem,
                np.nan_to_num(y[:, columns]),
                everywhere,
                np.flatnonzero(~told),
            )
        elif len(rows):
            yield Part(
                bins[columns], problem.of_regions(rows), y[np.ix_(rows, columns)], rows, rows[:0]
            )
