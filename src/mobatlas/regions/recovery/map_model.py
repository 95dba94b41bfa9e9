"""The model of one feature map: its evidence, and the variances of its prior.

See `solver` for the likelihood and `priors` for the prior. The variance of a regional value is

    phi_j q (1 / n_g + omega^2)  (people, region effects)
    + q mu0_j error_g            (errors in P)
    + noise

- phi_j is the variance between people relative to the mean.
- omega is the size of region effects that composition does not explain, in standard deviations
  between people; 0 under random assignment.
- Where people chose their regions, slopes of regions are b + c. Without direct evidence on groups
  an assumed share of their variance is due to groups; with it, the evidence sets the share.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from scipy import optimize, special

from mobatlas.data.types import Flags, Floats, Ints
from mobatlas.regions.recovery.composition_error import CompositionError
from mobatlas.regions.recovery.priors import (
    LEVEL,
    LOG_SD,
    GroupFactors,
    maximise,
    mean_variances,
    root_of,
)
from mobatlas.regions.recovery.solver import Modes, Observed, Rows, find_modes

FIT_CELLS = 150_000  # regions x bins that the variances of a map are fitted on
FIT_BINS = (24, 300)  # the least and the greatest number of these bins
ROUNDS = 3  # of modes and variances in turn
BAND = 4.0  # bins whose frequencies are within this factor form a stratum
REGION_EFFECTS = (0.003, 1.0)  # bounds of omega
EFFECT_STEPS = 8
STRATUM_CELLS = 1_000_000  # bins x groups x groups that are computed at once
SURFACE_SD = 1.0  # prior of the surface over the map, in logarithms
SMALLER_OWN = (1.0, 0.25, 0.0625)  # of the assumed variance, before composition is doubted
DOUBT = (0.02, 0.95)  # bounds where people chose their regions
DISPERSION = (0.05, 50.0)  # bounds of phi
REGIONS = "regions"  # the name of this source


@dataclass(frozen=True)
class DirectRows:
    """Rows of labelled people or of a table, in the bins of a feature map."""

    name: str
    is_table: bool
    same_population: bool
    shares: Floats  # (rows, groups)
    values: Floats  # (bins, rows), 0 where unknown
    weight: Floats  # (bins, rows), 0 where unknown


@dataclass(frozen=True)
class RegionRows:
    """Regional aggregates of the bins of a feature map, all with visits."""

    shares: Floats  # P (regions, groups)
    n: Floats  # (regions,)
    surface: Floats  # (regions, covariates), without ones
    error: CompositionError | None
    published: Floats  # V (bins, regions), NaN where unknown; a view of the aggregates
    noise: Floats | None  # (bins, regions) variance of published noise
    mean: Floats  # mu0 (bins,)
    dispersion: Floats  # phi (bins,)
    centre: Floats  # (bins, groups) prior centre of what regions show

    def select(self, bins: Ints) -> RegionRows:
        """Some of the bins."""
        return RegionRows(
            self.shares,
            self.n,
            self.surface,
            self.error,
            self.published[bins],
            None if self.noise is None else self.noise[bins],
            self.mean[bins],
            self.dispersion[bins],
            self.centre[bins],
        )

    @cached_property
    def known(self) -> Flags:
        """Whether a value is known (bins, regions)."""
        return ~np.isnan(self.published)

    @cached_property
    def values(self) -> Floats:
        """V (bins, regions), 0 where unknown or, because of noise, negative."""
        return np.where(self.known, np.maximum(self.published, 0), 0.0)

    def weight(self, effect: float, covariance: Floats) -> Floats:
        """N (bins, regions) for a region effect omega and the covariance K of groups."""
        people = 1 / self.n + effect**2  # (regions,)
        relative = self.composition_variance(covariance)  # (regions,)
        variance = self.dispersion[:, None] * people + self.mean[:, None] * relative
        if self.noise is not None:
            variance = variance + self.noise / self.mean[:, None]
        return np.asarray(self.known / variance)

    def composition_variance(self, covariance: Floats) -> Floats:
        """Relative variance of regional means due to an uncertain composition (regions,)."""
        if self.error is None:
            return np.zeros(len(self.n))
        along = np.einsum("ak,ab,bk->k", self.error.axes, covariance, self.error.axes)
        return np.asarray(self.error.variance @ along)


@dataclass(frozen=True)
class MapFit:
    """Posterior of log group means of the bins of a feature map."""

    log_means: Floats  # (bins, groups)
    log_covariance: Floats  # (bins, groups, groups)
    prior_variance: Floats  # (bins, groups) of log ratios to the population
    region_ratio: Floats  # (bins, groups) fitted ratios that regions show, for their parts
    sources: Mapping[str, Floats]  # (bins, groups) share of the information
    variances: Mapping[str, float]
    group_share: Floats  # (bins,)


@dataclass(frozen=True)
class Slopes:
    """The prior of log ratios of groups, and of what else makes regions differ."""

    own: Floats  # (factors,) variances of b
    context: Floats | None  # (factors,) variances of c; None if regions show b
    effect: float  # omega
    doubt: float = 0.0  # probability that composition does not matter to what regions show

    def shown(self) -> Floats:
        """Variances of what regions show (factors,)."""
        return self.own if self.context is None else self.own + self.context


@dataclass(frozen=True)
class MapModel:
    """Evidence on a feature map, and the structure of groups."""

    factors: GroupFactors
    population: Floats  # w (groups,)
    regions: RegionRows
    centre: Floats  # (bins, groups) prior centre of M
    assumed: Floats  # (bins,) variance of log ratios between groups that is usual
    confounded: bool  # regions may differ with their composition for other reasons than groups
    nested: bool = False  # the prior centre differs between groups
    direct: Sequence[DirectRows] = ()

    @cached_property
    def strata(self) -> list[Ints]:
        """Bins by powers of four of their frequency in units of people; large strata in parts."""
        frequency = np.log(self.regions.mean / self.regions.dispersion) / np.log(BAND)
        bands = np.floor(frequency).astype(np.int64)
        size = max(STRATUM_CELLS // len(self.population) ** 2, 1)
        strata = [np.flatnonzero(bands == band) for band in np.unique(bands)]
        return [
            bins[start : start + size] for bins in strata for start in range(0, len(bins), size)
        ]

    @cached_property
    def sample(self) -> Ints:
        """Bins of all frequencies that the variances are fitted on."""
        order = np.argsort(-self.regions.mean, kind="stable")
        least, most = FIT_BINS
        size = int(np.clip(FIT_CELLS // max(len(self.regions.n), 1), least, most))
        if len(order) <= size:
            return order
        return order[np.linspace(0, len(order) - 1, size).astype(np.int64)]

    def usual_variances(self, bins: Ints | None = None) -> Floats:
        """Usual variances of factors (factors,), in some bins or all."""
        chosen = slice(None) if bins is None else bins
        mean = self.regions.mean[chosen]
        usual = float(np.average(self.assumed[chosen], weights=mean))
        return usual * self.factors.usual_shares()

    def slopes(self, region_effects: bool) -> Slopes:
        """Fit the variances by their evidence, and compare it with that of equal groups."""
        regions = self.regions.select(self.sample)
        own = self.usual_variances() if self.confounded else None
        if not region_effects:
            best, evidence = self._slopes_at(regions, 0.0, own)
            # Places need not differ by more than their categories: that is no reason to doubt.
            doubt = 0.0 if self.nested else self._doubt(regions, evidence, [0.0])
            return replace(best, doubt=doubt)
        low, high = np.log(REGION_EFFECTS)
        fits: dict[float, tuple[Slopes, float]] = {}

        def loss(x: float) -> float:
            fits[x] = self._slopes_at(regions, float(np.exp(x)), own)
            return -fits[x][1]

        optimize.minimize_scalar(
            loss, bounds=(low, high), method="bounded", options={"maxiter": EFFECT_STEPS}
        )
        best, evidence = max(fits.values(), key=lambda fit: fit[1])
        if own is not None:
            smaller = [scale * own for scale in SMALLER_OWN[1:]]
            others = [self._slopes_at(regions, best.effect, each)[1] for each in smaller]
            evidence = max(evidence, *others)
        effects = [float(np.exp(x)) for x in fits]
        return replace(best, doubt=self._doubt(regions, evidence, effects))

    def _doubt(self, regions: RegionRows, evidence: float, effects: Sequence[float]) -> float:
        gain = evidence - max(self._evidence_of_none(regions, effect) for effect in effects)
        least, most = DOUBT if self.confounded else (0.0, DOUBT[1])
        return float(np.clip(special.expit(-gain), least, most))

    def _slopes_at(
        self, regions: RegionRows, effect: float, own: Floats | None
    ) -> tuple[Slopes, float]:
        """Variances for one region effect, and their evidence: the best of some rounds."""
        medians = self.factors.prior_log_sd()
        rows = Rows(regions.shares, regions.surface)
        fixed = 0.0 if own is None else own

        def covariance_of(x: Floats) -> Floats:
            return self.factors.covariance(fixed + np.exp(2 * x))

        log_sd = medians
        best = (medians, -np.inf)
        for step in range(ROUNDS):
            covariance = covariance_of(log_sd)
            weight = regions.weight(effect, covariance)
            root = self.region_root(covariance)
            modes = find_modes(rows, Observed(regions.values, weight, regions.centre), root)
            penalty = 0.5 * (((log_sd - medians) / LOG_SD) ** 2).sum()
            evidence = log_evidence(modes, root, regions, weight) - float(penalty)
            if evidence > best[1]:
                best = (log_sd, evidence)
            if step < ROUNDS - 1:
                log_sd = maximise(
                    modes, lambda x: self.region_root(covariance_of(x)), log_sd, medians, LOG_SD
                )
        fitted = np.exp(2 * best[0])
        if own is None:
            fitted = mean_variances(
                modes, lambda x: self.region_root(covariance_of(x)), best[0], medians
            )
        slopes = Slopes(fitted, None, effect) if own is None else Slopes(own, fitted, effect)
        return slopes, best[1]

    def _evidence_of_none(self, regions: RegionRows, effect: float) -> float:
        """The evidence if regions did not differ with their composition."""
        none = np.zeros((len(self.population),) * 2)
        weight = regions.weight(effect, none)
        root = self.region_root(none)
        rows = Rows(regions.shares, regions.surface)
        modes = find_modes(rows, Observed(regions.values, weight, regions.centre), root)
        return log_evidence(modes, root, regions, weight)

    def region_root(self, covariance: Floats) -> Floats:
        """The prior of what regions show, with the surface over the map."""
        return root_of(covariance + LEVEL, np.full(self.regions.surface.shape[1], SURFACE_SD))

    def without_composition(self) -> MapModel:
        """The model in which all regions are like the population."""
        shares = np.broadcast_to(self.population, self.regions.shares.shape)
        return replace(self, regions=replace(self.regions, shares=shares, error=None))


def log_evidence(modes: Modes, root: Floats, observed: RegionRows | Observed, w: Floats) -> float:
    """Log evidence relative to a model that fits every cell; `w` are the weights of cells."""
    v = observed.values
    known = w > 0
    saturated = (w * (v * np.log(np.maximum(v, 1e-300)) - v)).sum()
    spread = 0.5 * np.log(w[known]).sum()
    return float(modes.evidence(root).sum() + spread - saturated)
