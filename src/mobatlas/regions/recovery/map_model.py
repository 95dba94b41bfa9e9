"""The model of one feature map: regions, labelled people and tables give group means of its bins.

See `solver` for the likelihood and `priors` for the prior. The variance of a regional value is

    phi_j q / n_g  (people)  +  q mu0_j (omega^2 + error_g)  (region effects, errors in P)  +  noise

- phi_j is the variance between people relative to the mean.
- omega is the size of region effects that composition does not explain, 0 under random assignment.
- Where people chose their regions, slopes of regions are b + c. Without direct evidence on groups
  an assumed share of their variance is due to groups; with it, the evidence sets the share.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy import optimize

from mobatlas.data.arrays import Floats, Ints
from mobatlas.regions.recovery.composition_error import CompositionError
from mobatlas.regions.recovery.priors import (
    CONCENTRATION,
    LEVEL,
    LOG_SD,
    OTHER_BINS,
    GroupFactors,
    Mixture,
    average,
    maximise,
    root_of,
)
from mobatlas.regions.recovery.solver import (
    Modes,
    Observed,
    Rows,
    find_modes,
    information,
)

FIT_CELLS = 150_000  # regions x bins that the variances of a map are fitted on
FIT_BINS = (24, 300)  # the least and the greatest number of these bins
ROUNDS = 3  # of modes and variances in turn
BAND = 4.0  # bins whose frequencies are within this factor form a stratum
REGION_EFFECTS = (0.01, 1.5)  # bounds of omega
EFFECT_STEPS = 8
SURFACE_SD = 1.0  # prior of the surface over the map, in logarithms
SHARE_VARIANTS = ((1 / 3, 0.25), (1.0, 0.5), (3.0, 0.25))  # of the assumed share, with weights
CONTEXT_SCALES = (1 / 4, 4.0)  # variants of the variance of contextual slopes
EVIDENCE_SD = 1.0  # prior standard deviation of logarithms that direct evidence revises
LEVEL_SD = {True: 0.1, False: 0.7}  # of the level of labelled people or a table; same population?
DISCREPANCY_SD = 0.15  # prior median of a table's discrepancy between groups
DISPERSION = (0.05, 50.0)  # bounds of phi


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
    values: Floats  # (bins, regions), 0 where unknown
    known: Floats  # (bins, regions) 1 or 0
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
            self.values[bins],
            self.known[bins],
            None if self.noise is None else self.noise[bins],
            self.mean[bins],
            self.dispersion[bins],
            self.centre[bins],
        )

    def weight(self, effect: float, covariance: Floats) -> Floats:
        """N (bins, regions) for a region effect omega and the covariance K of groups."""
        relative = effect**2 + self.composition_variance(covariance)  # (regions,)
        variance = self.dispersion[:, None] / self.n + self.mean[:, None] * relative
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
    discrepancy: Mapping[str, float]  # fitted standard deviation of each table


@dataclass(frozen=True)
class Slopes:
    """The fitted prior of what regions show."""

    log_sd: Floats  # (factors,)
    effect: float  # omega

    def variances(self) -> Floats:
        return np.exp(2 * self.log_sd)


@dataclass(frozen=True)
class MapModel:
    """Evidence on a feature map, and the structure of groups."""

    factors: GroupFactors
    population: Floats  # w (groups,)
    regions: RegionRows
    confounded: bool
    centre: Floats  # (bins, groups) prior centre of M
    direct: Sequence[DirectRows] = ()

    @cached_property
    def strata(self) -> list[Ints]:
        """Bins by powers of four of their frequency in units of people."""
        frequency = np.log(self.regions.mean / self.regions.dispersion) / np.log(BAND)
        bands = np.floor(frequency).astype(np.int64)
        return [np.flatnonzero(bands == band) for band in np.unique(bands)]

    @cached_property
    def sample(self) -> Ints:
        """Bins of all frequencies that the variances are fitted on."""
        order = np.argsort(-self.regions.mean, kind="stable")
        least, most = FIT_BINS
        size = int(np.clip(FIT_CELLS // max(len(self.regions.n), 1), least, most))
        if len(order) <= size:
            return order
        return order[np.linspace(0, len(order) - 1, size).astype(np.int64)]

    def slopes(self) -> Slopes:
        """Fit the variances of what regions show, by their evidence."""
        regions = self.regions.select(self.sample)
        if not self.confounded:
            return self._slopes_at(regions, 0.0)[0]
        low, high = np.log(REGION_EFFECTS)
        fits: dict[float, tuple[Slopes, float]] = {}

        def loss(x: float) -> float:
            fits[x] = self._slopes_at(regions, float(np.exp(x)))
            return -fits[x][1]

        optimize.minimize_scalar(
            loss, bounds=(low, high), method="bounded", options={"maxiter": EFFECT_STEPS}
        )
        return max(fits.values(), key=lambda fit: fit[1])[0]

    def _slopes_at(self, regions: RegionRows, effect: float) -> tuple[Slopes, float]:
        """Variances for one region effect, and their evidence."""
        medians = self.factors.prior_log_sd()
        log_sd = medians
        rows = Rows(regions.shares, regions.surface)
        for step in range(ROUNDS):
            covariance = self.factors.covariance(np.exp(2 * log_sd))
            weight = regions.weight(effect, covariance)
            root = self.region_root(covariance)
            modes = find_modes(rows, Observed(regions.values, weight, regions.centre), root)
            if step < ROUNDS - 1:
                log_sd = maximise(
                    modes,
                    lambda x: self.region_root(self.factors.covariance(np.exp(2 * x))),
                    log_sd,
                    medians,
                    LOG_SD,
                )
        known = weight > 0
        evidence = modes.evidence(root).sum() + 0.5 * np.log(weight[known]).sum()
        evidence -= 0.5 * (((log_sd - medians) / LOG_SD) ** 2).sum()
        return Slopes(log_sd, effect), float(evidence - _saturated(regions, weight))

    def region_root(self, covariance: Floats) -> Floats:
        """The prior of what regions show, with the surface over the map."""
        return root_of(covariance + LEVEL, np.full(self.regions.surface.shape[1], SURFACE_SD))

    def fit(self, slopes: Slopes, shares: Floats) -> MapFit:
        """The posterior, where groups have these shares (bins,) of the variance of slopes."""
        parts = []
        revised = self._revise(slopes, shares) if self.direct else None
        for bins in self.strata:
            share = float(np.clip(shares[bins].mean(), 1e-6, 1.0))
            if revised is None:
                parts.append(_from_regions(self, bins, slopes, share))
            else:
                parts.append(_from_all(self, bins, slopes, revised))
        order = np.argsort(np.concatenate(self.strata), kind="stable")
        names = parts[0].sources
        return MapFit(
            *(
                np.concatenate([getattr(part, name) for part in parts])[order]
                for name in ("log_means", "log_covariance", "prior_variance", "region_ratio")
            ),
            sources={
                name: np.concatenate([part.sources[name] for part in parts])[order]
                for name in names
            },
            variances=self._variances(slopes, revised),
            group_share=np.concatenate([part.group_share for part in parts])[order],
            discrepancy={} if revised is None else revised.discrepancy,
        )

    def _variances(self, slopes: Slopes, revised: Revised | None) -> dict[str, float]:
        sd = slopes.log_sd if revised is None else revised.log_sd
        named = {
            f"sd_{name}": float(value)
            for name, value in zip(self.factors.names, np.exp(sd), strict=True)
        }
        if revised is not None:
            named["contextual_scale"] = revised.context
        return named | {"region_effect": slopes.effect}

    def _revise(self, slopes: Slopes, shares: Floats) -> Revised:
        """Revise the variances by direct evidence on groups, from what was assumed."""
        share = float(np.clip(np.average(shares, weights=self.regions.mean), 1e-3, 1.0))
        context = np.log(max(1 - share, 0.01)) / 2 if self.confounded else -9.0
        start = [slopes.log_sd + np.log(share) / 2, [context]]
        start += [[np.log(LEVEL_SD[each.same_population])] for each in self.direct]
        start += [[np.log(DISCREPANCY_SD)] for each in self.direct if each.is_table]
        x = np.concatenate(start)
        medians = x
        joint = Joint(self, slopes)
        for _ in range(ROUNDS - 1):
            modes = joint.modes(self.sample, joint.root(Revised.of(self, x)))
            x = maximise(
                modes, lambda each: joint.root(Revised.of(self, each)), x, medians, EVIDENCE_SD
            )
            if not self.confounded:
                x[len(slopes.log_sd)] = -9.0
        return Revised.of(self, x)


def _saturated(regions: RegionRows, weight: Floats) -> float:
    """The log likelihood of a model that fits every cell."""
    v = regions.values
    return float((weight * (v * np.log(np.maximum(v, 1e-300)) - v)).sum())


@dataclass(frozen=True)
class Revised:
    """Standard deviations after direct evidence on groups."""

    log_sd: Floats  # (factors,) of groups
    context: float  # of contextual slopes, relative to those of regions
    level: Sequence[float]  # of each source of direct evidence
    discrepancy: Mapping[str, float]  # of each table

    @classmethod
    def of(cls, model: MapModel, x: Floats) -> Revised:
        """From a vector of logarithms."""
        sizes = np.cumsum([len(model.factors.names), 1, len(model.direct)])
        log_sd, context, level, tables = np.split(x, sizes)
        names = [each.name for each in model.direct if each.is_table]
        return cls(
            log_sd,
            float(np.exp(context[0])),
            np.exp(level).tolist(),
            dict(zip(names, np.exp(tables).tolist(), strict=True)),
        )


class Joint:
    """Columns of groups, of regions if they are confounded, and of tables, with all rows."""

    def __init__(self, model: MapModel, slopes: Slopes) -> None:
        self.model = model
        self.slopes = slopes
        self.groups = len(model.population)
        tables = [each for each in model.direct if each.is_table]
        self.blocks = ["", *(["regions"] if model.confounded else []), *(t.name for t in tables)]
        self.covariance = model.factors.covariance(slopes.variances())
        self.rows = self._rows()
        self.kinds = self._kinds()

    def _rows(self) -> Rows:
        model = self.model
        surface = model.regions.surface
        covariates = surface.shape[1] + len(model.direct)
        shares = []
        columns = []
        for number, (name, p) in enumerate(self._parts()):
            block = self.blocks.index(name) if name in self.blocks else 0
            wide = np.zeros((len(p), self.groups * len(self.blocks)))
            wide[:, block * self.groups : (block + 1) * self.groups] = p
            x = np.zeros((len(p), covariates))
            if number:
                x[:, surface.shape[1] + number - 1] = 1
            else:
                x[:, : surface.shape[1]] = surface
            shares.append(wide)
            columns.append(x)
        return Rows(np.vstack(shares), np.vstack(columns))

    def _parts(self) -> list[tuple[str, Floats]]:
        direct = [(each.name, each.shares) for each in self.model.direct]
        return [("regions", self.model.regions.shares), *direct]

    def _kinds(self) -> dict[str, Ints]:
        """The rows of each source."""
        rows = {}
        first = 0
        for name, p in self._parts():
            rows[name] = np.arange(first, first + len(p))
            first += len(p)
        return rows

    def observed(self, bins: Ints) -> Observed:
        """All rows in some bins."""
        model = self.model
        regions = model.regions.select(bins)
        weight = regions.weight(self.slopes.effect, self.covariance)
        values = [regions.values, *(each.values[bins] for each in model.direct)]
        weights = [weight, *(each.weight[bins] for each in model.direct)]
        centre = [
            regions.centre if name == "regions" else model.centre[bins] for name in self.blocks
        ]
        return Observed(np.hstack(values), np.hstack(weights), np.hstack(centre))

    def modes(self, bins: Ints, root: Floats) -> Modes:
        """Posterior modes of some bins."""
        return find_modes(self.rows, self.observed(bins), root)

    def root(self, revised: Revised, variances: Floats | None = None, scale: float = 1.0) -> Floats:
        """R with R R' = K, for other variances of groups or another scale of contextual slopes."""
        model = self.model
        own = np.exp(2 * revised.log_sd) if variances is None else variances
        base = model.factors.covariance(own) + LEVEL
        k = np.tile(base, (len(self.blocks),) * 2)
        d = self.groups
        for number, name in enumerate(self.blocks):
            block = slice(number * d, (number + 1) * d)
            if name == "regions":
                k[block, block] += scale * revised.context**2 * self.covariance
            elif name:
                k[block, block] += revised.discrepancy[name] ** 2 * (np.eye(d) + 0.1)
        surface = np.full(model.regions.surface.shape[1], SURFACE_SD)
        return root_of(k, np.concatenate([surface, revised.level]))


def _from_regions(model: MapModel, bins: Ints, slopes: Slopes, share: float) -> MapFit:
    """The posterior of a stratum from regions alone."""
    regions = model.regions.select(bins)
    factors = model.factors
    d = len(model.population)
    rows = Rows(regions.shares, regions.surface)
    every = factors.variants(slopes.variances())
    centre = every[0]

    def modes_of(variances: Floats) -> Modes:
        covariance = factors.covariance(variances)
        weight = regions.weight(slopes.effect, covariance)
        observed = Observed(regions.values, weight, regions.centre)
        return find_modes(rows, observed, model.region_root(covariance))

    modes = modes_of(centre)
    weights, parts = _mixture(modes, [model.region_root(factors.covariance(v)) for v in every])
    best = every[int(weights.mean(0).argmax())]
    if best is not centre:
        modes = modes_of(best)
        weights, parts = _mixture(modes, [model.region_root(factors.covariance(v)) for v in every])
    means, covariance = average(weights, [(m[:, :d], c[:, :d, :d]) for m, c in parts])
    if not model.confounded:
        shown = means, covariance
    else:
        variants = [
            _attribute(factors.covariance(v), share, (m[:, :d], c[:, :d, :d]))
            for v, (m, c) in zip(every, parts, strict=True)
        ]
        shown = average(weights, variants)
    return _finish(model, bins, shown, means, (modes, best, share))


def _attribute(
    covariance: Floats, share: float, shown: tuple[Floats, Floats]
) -> tuple[Floats, Floats]:
    """Log ratios of groups, from the slopes that regions show, for an uncertain share."""
    parts = []
    weights = np.array([weight for _, weight in SHARE_VARIANTS])
    for factor, _ in SHARE_VARIANTS:
        own = min(share * factor, 1.0) * covariance + LEVEL
        gain = np.linalg.solve(covariance + LEVEL + 1e-9 * np.eye(len(own)), own).T
        rest = own - gain @ own
        mean, variance = shown
        parts.append((mean @ gain.T, gain @ variance @ gain.T + (rest + rest.T) / 2))
    return average(np.tile(weights, (len(shown[0]), 1)), parts)


def _mixture(modes: Modes, roots: Sequence[Floats]) -> tuple[Floats, list[tuple[Floats, Floats]]]:
    """Weights of priors (bins, priors), and the posterior under each; the first prior is fitted."""
    posteriors = [modes.under(root) for root in roots]
    evidence = np.stack([each[2] for each in posteriors], axis=1)
    prior = np.full(len(roots), OTHER_BINS)
    prior[0] = CONCENTRATION
    weights = Mixture.of(evidence, prior).weights
    return weights, [(mean, covariance) for mean, covariance, _ in posteriors]


def _finish(
    model: MapModel,
    bins: Ints,
    shown: tuple[Floats, Floats],
    region_ratio: Floats,
    fitted: tuple[Modes, Floats, float],
) -> MapFit:
    """Ratios as means that average to the population, with the information of regions."""
    modes, variances, share = fitted
    d = len(model.population)
    covariance = model.factors.covariance(variances)
    own = share * covariance if model.confounded else covariance
    gain = np.eye(d)
    if model.confounded:
        gain = np.linalg.solve(covariance + LEVEL + 1e-9 * np.eye(d), own + LEVEL).T
    posterior = modes.under(model.region_root(covariance))[1]
    lift = gain @ posterior[:, :d]
    informed = lift @ modes.information @ np.swapaxes(lift, 1, 2)
    sources = shares_of_information(model.population, {"regions": informed}, shown[1])
    return MapFit(
        log_means=normalised(model, bins, shown[0]),
        log_covariance=shown[1],
        prior_variance=np.tile(contrast_variance(model.population, own), (len(bins), 1)),
        region_ratio=np.exp(region_ratio),
        sources=sources,
        variances={},
        group_share=np.full(len(bins), share if model.confounded else 1.0),
        discrepancy={},
    )


def _from_all(model: MapModel, bins: Ints, slopes: Slopes, revised: Revised) -> MapFit:
    """The posterior of a stratum from regions and direct evidence on groups."""
    joint = Joint(model, slopes)
    d = joint.groups
    own = np.exp(2 * revised.log_sd)
    every = model.factors.variants(own)
    scales = CONTEXT_SCALES if model.confounded else ()

    def roots() -> list[Floats]:
        return [
            *(joint.root(revised, each) for each in every),
            *(joint.root(revised, own, scale) for scale in scales),
        ]

    modes = joint.modes(bins, joint.root(revised))
    weights, parts = _mixture(modes, roots())
    means, covariance = average(weights, [(m[:, :d], c[:, :d, :d]) for m, c in parts])
    second = d if model.confounded else 0
    shown = sum(
        w[:, None] * m[:, second : second + d] for w, (m, _) in zip(weights.T, parts, strict=True)
    )
    posterior = modes.under(joint.root(revised))[1][:, :d]
    observed = joint.observed(bins)
    informed = {}
    for name, rows in joint.kinds.items():
        w = information(joint.rows.select(rows), observed.of_rows(rows), modes.mode)
        informed[name] = posterior @ w @ np.swapaxes(posterior, 1, 2)
    k = model.factors.covariance(own)
    context = revised.context**2 * joint.covariance if model.confounded else 0 * k
    return MapFit(
        log_means=normalised(model, bins, means),
        log_covariance=covariance,
        prior_variance=np.tile(contrast_variance(model.population, k), (len(bins), 1)),
        region_ratio=np.exp(np.asarray(shown)),
        sources=shares_of_information(model.population, informed, covariance),
        variances={},
        group_share=np.full(len(bins), np.trace(k) / max(np.trace(k + context), 1e-300)),
        discrepancy={},
    )


def normalised(model: MapModel, bins: Ints, ratio: Floats) -> Floats:
    """Log means (bins, groups) that average to the population mean."""
    log_means = np.log(model.centre[bins]) + ratio
    total = np.exp(log_means) @ model.population
    return np.asarray(log_means + np.log(model.regions.mean[bins] / total)[:, None])


def contrast_variance(population: Floats, covariance: Floats) -> Floats:
    """The variance of each group's log ratio to the population, (..., groups)."""
    centring = np.eye(len(population)) - population
    return np.einsum("ab,...bc,ac->...a", centring, covariance, centring)


def shares_of_information(
    population: Floats, informed: Mapping[str, Floats], covariance: Floats
) -> dict[str, Floats]:
    """The share of each source, and of the assumptions, in what is known of group differences.

    With S = (K^-1 + sum W_k)^-1 the variance S is the sum of S W_k S and S K^-1 S.
    """
    total = np.maximum(contrast_variance(population, covariance), 1e-300)
    shares = {
        name: np.clip(contrast_variance(population, each) / total, 0, 1)
        for name, each in informed.items()
    }
    known = np.asarray(sum(shares.values()))
    excess = np.maximum(known, 1.0)
    shares = {name: each / excess for name, each in shares.items()}
    return shares | {"assumption": np.maximum(1 - known, 0.0)}
