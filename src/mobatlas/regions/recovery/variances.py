"""Variance components of recovery: differences between groups, region effects and noise.

Restricted likelihood fits them, with weak priors on their logarithms. Bins are in units of their
standard deviation between people. Bins of similar frequency form a stratum with its own scale.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy import optimize

from mobatlas.data.arrays import Flags, Floats, Ints
from mobatlas.regions.recovery.posterior import Design, Fit, Variances
from mobatlas.regions.types import blocks

BAND = 4.0  # bins whose frequencies are within this factor form a stratum
FIT_CELLS = 200_000  # regions x bins that the shared variances are fitted on
FIT_BINS = 64  # the minimum number of these bins
SCALE_CELLS = 2_000_000  # regions x bins that the scale of a stratum is fitted on
# Prior mean and standard deviation of the log variance of an attribute, relative to the group's
# own. It was lowered from equal shares because intervals were too wide in simulated cities, whose
# groups share little by construction. The paper's Figure "Pairwise JSD" supports this.
RATIO_PRIOR = (np.log(0.15), 1.0)
STRATUM_SPREAD = 3.0  # prior standard deviation of a stratum's log scale around the overall one
EFFECT_PRIOR = (np.log(0.1), 2.0)  # of log omega
SCALE_PRIOR = (np.log(0.02), 3.0)  # of log lambda: a seventh of a standard deviation of people
BOUNDS = (-14.0, 6.0)  # of the logarithms
Stratum = tuple[str, int]  # a feature map and a band of frequencies


@dataclass(frozen=True)
class BinSet:
    """Bins whose values are known in the same regions."""

    bins: Ints
    design: Design
    y: Floats  # (regions, bins)
    regions: Ints  # (regions,) among all regions
    missing: Ints  # rows of y without values, zero there

    def fit(self, overall: Fit, variances: Variances) -> Fit:
        """The fit to these regions, derived from the overall fit where this is cheaper."""
        if len(self.regions) < len(overall.weight):
            noise = variances.added_noise[self.regions]
            return Fit.of(self.design, variances._replace(added_noise=noise))
        return overall.without(self.design, self.missing) if len(self.missing) else overall

    def mean_variance(self, added_noise: Floats) -> float:
        """The variance of the population mean, in units of a bin."""
        n = np.delete(self.design.n, self.missing)
        weight = n / n.sum()
        return float(weight**2 @ (1 / n + np.delete(added_noise[self.regions], self.missing)))


@dataclass(frozen=True)
class Deviations:
    """y: aggregates minus the population mean, in units of the standard deviation of people."""

    values: Floats  # V (regions, features)
    mean: Floats  # mu0 (features,)
    scale: Floats  # (features,)
    noise: Floats | None  # (regions, features) variance of published noise

    @cached_property
    def complete(self) -> Flags:
        """Bins without suppressed cells (features,)."""
        return np.asarray(~np.isnan(self.values).any(0))

    def of(self, bins: Ints) -> Floats:
        """(regions, bins)"""
        y = self.values[:, bins]
        y -= self.mean[bins]
        y /= self.scale[bins]
        return y

    def added_noise(self, bins: Ints) -> Floats:
        """The mean variance of published noise over bins, in these units (regions,)."""
        total = np.zeros(len(self.values))
        if self.noise is not None:
            for chunk in self.chunks(bins):
                total += self.noise[:, chunk] @ (1 / self.scale[chunk] ** 2)
        return total / max(len(bins), 1)

    def bin_sets(self, design: Design, bins: Ints) -> Iterator[BinSet]:
        """Bins by the regions that have values; a suppressed cell removes its region."""
        for chunk in self.chunks(bins):
            yield from _bin_sets(design, chunk, self.of(chunk))

    def chunks(self, bins: Ints) -> Iterator[Ints]:
        """Chunks of bins that fit in memory."""
        return (bins[rows] for rows in blocks(len(bins), len(self.values)))


def strata(features: Sequence[str], frequency: Floats) -> dict[Stratum, Ints]:
    """Bins by feature map and by powers of four of their frequency.

    Frequent activities differ between groups in other proportions than rare ones.
    """
    bands = np.floor(np.log(np.maximum(frequency, 1e-12)) / np.log(BAND)).astype(np.int64)
    members: dict[Stratum, list[int]] = {}
    for number, (name, band) in enumerate(zip(features, bands.tolist(), strict=True)):
        members.setdefault((name.partition(":")[0], band), []).append(number)
    return {stratum: np.array(members[stratum], dtype=np.int64) for stratum in sorted(members)}


def fit_variances(
    design: Design, y: Deviations, members: dict[Stratum, Ints], region_effects: bool
) -> tuple[Floats, Variances, dict[Stratum, Variances]]:
    """Shares of the attributes, the variances of all bins together, and those of each stratum."""
    noise = y.added_noise(np.arange(len(y.mean)))
    most_frequent = list(y.bin_sets(design, _most_frequent(y)))
    ratios, effect, scale = _fit_ratios(most_frequent, design, noise, region_effects)
    overall = Variances(design.prior_root(ratios), scale, effect, noise)
    fitted = {}
    for stratum, bins in members.items():
        bin_sets = list(y.bin_sets(design, _thin(bins, len(design.n))))
        start = overall._replace(added_noise=y.added_noise(bins))
        fitted[stratum] = _fit_scale(bin_sets, design, start)
    return ratios, overall, fitted


def _fit_ratios(
    bin_sets: Sequence[BinSet], design: Design, noise: Floats, region_effects: bool
) -> tuple[Floats, float, float]:
    """Shares of attributes in the variance between groups, relative region effect, scale."""
    attributes = len(design.factors) - 1

    def unpack(x: Floats) -> tuple[Floats, float, float]:
        rho = np.exp(np.append(x[1 : 1 + attributes], 0.0))
        effect = float(np.exp(x[-1])) if region_effects else 0.0
        return rho / rho.sum(), effect, float(np.exp(x[0]))

    def objective(x: Floats) -> float:
        rho, effect, scale = unpack(x)
        penalty = (((x[1 : 1 + attributes] - RATIO_PRIOR[0]) / RATIO_PRIOR[1]) ** 2).sum()
        penalty += ((x[0] - SCALE_PRIOR[0]) / SCALE_PRIOR[1]) ** 2
        if region_effects:
            penalty += ((x[-1] - EFFECT_PRIOR[0]) / EFFECT_PRIOR[1]) ** 2
        variances = Variances(design.prior_root(rho), scale, effect, noise)
        return float(penalty) + _deviance(bin_sets, design, variances)

    start = [SCALE_PRIOR[0], *[RATIO_PRIOR[0]] * attributes]
    bounds = [BOUNDS, *[(-6.0, 6.0)] * attributes]
    if region_effects:
        start.append(EFFECT_PRIOR[0])
        bounds.append(BOUNDS)
    solution = optimize.minimize(
        objective, np.array(start), method="L-BFGS-B", bounds=bounds, options={"maxiter": 60}
    )
    return unpack(solution.x)


def _fit_scale(bin_sets: Sequence[BinSet], design: Design, start: Variances) -> Variances:
    """The scale of a stratum: in units of noise, frequent bins differ more between groups."""
    overall = np.log(start.scale)

    def objective(x: float) -> float:
        prior = ((x - overall) / STRATUM_SPREAD) ** 2
        return float(prior) + _deviance(bin_sets, design, start._replace(scale=float(np.exp(x))))

    solution = optimize.minimize_scalar(
        objective, bounds=(overall - 6, overall + 4), method="bounded", options={"xatol": 0.02}
    )
    return start._replace(scale=float(np.exp(solution.x)))


def _deviance(bin_sets: Sequence[BinSet], design: Design, variances: Variances) -> float:
    """-2 log restricted likelihood of all bins."""
    overall = Fit.of(design, variances)
    return float(
        sum(part.fit(overall, variances).deviance(part.design, part.y).sum() for part in bin_sets)
    )


def _thin(bins: Ints, regions: int) -> Ints:
    """Enough evenly spaced bins to estimate one variance."""
    most = max(SCALE_CELLS // regions, FIT_BINS)
    return bins if len(bins) <= most else bins[np.linspace(0, len(bins) - 1, most).astype(np.int64)]


def _most_frequent(y: Deviations) -> Ints:
    """The most frequent bins, those without suppressed cells first."""
    enough = max(FIT_CELLS // len(y.values), FIT_BINS)
    order = np.argsort(-y.mean, kind="stable")
    complete = y.complete[order]
    chosen = order[complete][:enough]
    if len(chosen) < FIT_BINS:
        chosen = np.concatenate([chosen, order[~complete][: FIT_BINS - len(chosen)]])
    return chosen


def _bin_sets(design: Design, bins: Ints, y: Floats) -> Iterator[BinSet]:
    known = ~np.isnan(y)
    regions = np.arange(len(y))
    if known.all():
        yield BinSet(bins, design, y, regions, regions[:0])
        return
    patterns, pattern_of_bin = np.unique(known, axis=1, return_inverse=True)
    for number, pattern in enumerate(patterns.T):
        columns = np.flatnonzero(pattern_of_bin.ravel() == number)
        rows = np.flatnonzero(pattern)
        if 2 * len(rows) > len(y):
            missing = np.flatnonzero(~pattern)
            yield BinSet(bins[columns], design, np.nan_to_num(y[:, columns]), regions, missing)
        elif len(rows):
            values = y[np.ix_(rows, columns)]
            yield BinSet(bins[columns], design.select(rows), values, rows, rows[:0])
