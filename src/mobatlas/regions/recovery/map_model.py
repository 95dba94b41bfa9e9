"""The model of one feature map: regions, labelled people and tables give group means of its bins.

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
    link,
    link_slope,
)

FIT_CELLS = 150_000  # regions x bins that the variances of a map are fitted on
FIT_BINS = (24, 300)  # the least and the greatest number of these bins
ROUNDS = 3  # of modes and variances in turn
BAND = 4.0  # bins whose frequencies are within this factor form a stratum
REGION_EFFECTS = (0.003, 1.0)  # bounds of omega
EFFECT_STEPS = 8
SURFACE_SD = 1.0  # prior of the surface over the map, in logarithms
OWN_SCALES = ((1.0, 0.5), (0.25, 0.25), (4.0, 0.25))  # of the assumed variance, with weights
DOUBT = (0.02, 0.95)  # bounds
REGIONS = "regions"  # the name of this source
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
    discrepancy: Mapping[str, float]  # fitted standard deviation of each table


@dataclass(frozen=True)
class Assumption:
    """What is assumed of regions."""

    region_effects: bool  # whether they differ for reasons other than composition
    # The variance of log ratios due to groups, where people chose their regions; None: all of the
    # differences with composition are due to groups.
    group_variance: float | None


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

    def slopes(self, assumption: Assumption) -> Slopes:
        """Fit the variances by their evidence."""
        regions = self.regions.select(self.sample)
        own = None
        if assumption.group_variance is not None:
            own = assumption.group_variance * self.factors.usual_shares()
        if not assumption.region_effects:
            return self._slopes_at(regions, 0.0, own)[0]
        low, high = np.log(REGION_EFFECTS)
        fits: dict[float, tuple[Slopes, float]] = {}

        def loss(x: float) -> float:
            fits[x] = self._slopes_at(regions, float(np.exp(x)), own)
            return -fits[x][1]

        optimize.minimize_scalar(
            loss, bounds=(low, high), method="bounded", options={"maxiter": EFFECT_STEPS}
        )
        best, evidence = max(fits.values(), key=lambda fit: fit[1])
        if own is None:
            return best
        gain = evidence - max(self._evidence_of_none(regions, float(np.exp(x))) for x in fits)
        return replace(best, doubt=float(np.clip(special.expit(-gain), *DOUBT)))

    def _slopes_at(
        self, regions: RegionRows, effect: float, own: Floats | None
    ) -> tuple[Slopes, float]:
        """Variances for one region effect, and their evidence."""
        medians = self.factors.prior_log_sd()
        log_sd = medians
        rows = Rows(regions.shares, regions.surface)
        fixed = 0.0 if own is None else own

        def covariance_of(x: Floats) -> Floats:
            return self.factors.covariance(fixed + np.exp(2 * x))

        for step in range(ROUNDS):
            covariance = covariance_of(log_sd)
            weight = regions.weight(effect, covariance)
            root = self.region_root(covariance)
            modes = find_modes(rows, Observed(regions.values, weight, regions.centre), root)
            if step < ROUNDS - 1:
                log_sd = maximise(
                    modes, lambda x: self.region_root(covariance_of(x)), log_sd, medians, LOG_SD
                )
        penalty = 0.5 * (((log_sd - medians) / LOG_SD) ** 2).sum()
        fitted = np.exp(2 * log_sd)
        slopes = Slopes(fitted, None, effect) if own is None else Slopes(own, fitted, effect)
        return slopes, _evidence(modes, root, regions, weight) - float(penalty)

    def _evidence_of_none(self, regions: RegionRows, effect: float) -> float:
        """The evidence if regions did not differ with their composition."""
        none = np.zeros((len(self.population),) * 2)
        weight = regions.weight(effect, none)
        root = self.region_root(none)
        rows = Rows(regions.shares, regions.surface)
        modes = find_modes(rows, Observed(regions.values, weight, regions.centre), root)
        return _evidence(modes, root, regions, weight)

    def region_root(self, covariance: Floats) -> Floats:
        """The prior of what regions show, with the surface over the map."""
        return root_of(covariance + LEVEL, np.full(self.regions.surface.shape[1], SURFACE_SD))

    def fit(self, slopes: Slopes, scale: Floats) -> MapFit:
        """The posterior; `scale` (bins,) multiplies the variance of group differences."""
        parts = []
        revised = self._revise(slopes, scale) if self.direct else None
        for bins in self.strata:
            own = slopes.own * float(scale[bins].mean())
            if revised is None:
                parts.append(_from_regions(self, bins, replace(slopes, own=own)))
            else:
                parts.append(_from_all(self, bins, slopes, revised))
        order = np.argsort(np.concatenate(self.strata), kind="stable")

        def joined(name: str) -> Floats:
            return np.concatenate([getattr(part, name) for part in parts])[order]

        return MapFit(
            log_means=joined("log_means"),
            log_covariance=joined("log_covariance"),
            prior_variance=joined("prior_variance"),
            region_ratio=joined("region_ratio"),
            sources={
                name: np.concatenate([part.sources[name] for part in parts])[order]
                for name in parts[0].sources
            },
            variances=self._variances(slopes, revised),
            group_share=joined("group_share"),
            discrepancy={} if revised is None else revised.discrepancy,
        )

    def _variances(self, slopes: Slopes, revised: Revised | None) -> dict[str, float]:
        own = slopes.own if revised is None else revised.own
        every = {"sd": own}
        if slopes.context is not None:
            scale = 1.0 if revised is None else revised.context**2
            every["contextual_sd"] = slopes.context * scale
        named = {
            f"{kind}_{name}": float(value)
            for kind, variances in every.items()
            for name, value in zip(self.factors.names, np.sqrt(variances), strict=True)
        }
        return named | {"region_effect": slopes.effect}

    def _revise(self, slopes: Slopes, scale: Floats) -> Revised:
        """Revise the variances by direct evidence on groups, from what was assumed."""
        usual = float(np.average(scale, weights=self.regions.mean))
        start = [np.log(slopes.own * usual) / 2]
        if slopes.context is not None:
            start.append(np.zeros(1))
        start += [np.log([LEVEL_SD[each.same_population]]) for each in self.direct]
        start += [np.log([DISCREPANCY_SD]) for each in self.direct if each.is_table]
        medians = np.concatenate(start)
        x = medians
        joint = Joint(self, slopes)
        for _ in range(ROUNDS):
            modes = joint.modes(self.sample, joint.root(Revised.of(joint, x)))
            x = maximise(
                modes, lambda each: joint.root(Revised.of(joint, each)), x, medians, EVIDENCE_SD
            )
        return Revised.of(joint, x)


def _evidence(modes: Modes, root: Floats, regions: RegionRows, weight: Floats) -> float:
    """Log evidence relative to a model that fits every cell."""
    v = regions.values
    known = weight > 0
    saturated = (weight * (v * np.log(np.maximum(v, 1e-300)) - v)).sum()
    spread = 0.5 * np.log(weight[known]).sum()
    return float(modes.evidence(root).sum() + spread - saturated)


@dataclass(frozen=True)
class Revised:
    """Variances after direct evidence on groups."""

    own: Floats  # (factors,) of groups
    context: float  # standard deviation of contextual slopes, relative to the one without labels
    level: Sequence[float]  # standard deviation of the level of each source of direct evidence
    discrepancy: Mapping[str, float]  # standard deviation of each table

    @classmethod
    def of(cls, joint: Joint, x: Floats) -> Revised:
        """From a vector of logarithms."""
        factors = len(joint.slopes.own)
        confounded = joint.slopes.context is not None
        direct = joint.model.direct
        log_sd, context, level, tables = np.split(
            x, np.cumsum([factors, int(confounded), len(direct)])
        )
        names = [each.name for each in direct if each.is_table]
        return cls(
            np.exp(2 * log_sd),
            float(np.exp(context[0])) if confounded else 0.0,
            np.exp(level).tolist(),
            dict(zip(names, np.exp(tables).tolist(), strict=True)),
        )


class Joint:
    """Columns of groups, of regions if they are confounded, and of tables, with all rows."""

    def __init__(self, model: MapModel, slopes: Slopes) -> None:
        self.model = model
        self.slopes = slopes
        self.groups = len(model.population)
        self.confounded = slopes.context is not None
        tables = [each for each in model.direct if each.is_table]
        self.blocks = ["", *([REGIONS] if self.confounded else []), *(t.name for t in tables)]
        self.rows = self._rows()
        self.kinds = self._kinds()
        context = np.zeros_like(slopes.own) if slopes.context is None else slopes.context
        self._context = model.factors.covariance(context)

    def _rows(self) -> Rows:
        surface = self.model.regions.surface
        covariates = surface.shape[1] + len(self.model.direct)
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
        return [(REGIONS, self.model.regions.shares), *direct]

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
        shown = model.factors.covariance(self.slopes.shown())
        weight = regions.weight(self.slopes.effect, shown)
        values = [regions.values, *(each.values[bins] for each in model.direct)]
        weights = [weight, *(each.weight[bins] for each in model.direct)]
        centre = [regions.centre if name == REGIONS else model.centre[bins] for name in self.blocks]
        return Observed(np.hstack(values), np.hstack(weights), np.hstack(centre))

    def modes(self, bins: Ints, root: Floats) -> Modes:
        """Posterior modes of some bins."""
        return find_modes(self.rows, self.observed(bins), root)

    def root(self, revised: Revised, own: Floats | None = None, scale: float = 1.0) -> Floats:
        """R with R R' = K, for other variances of groups or another scale of contextual slopes."""
        model = self.model
        base = model.factors.covariance(revised.own if own is None else own) + LEVEL
        k = np.tile(base, (len(self.blocks),) * 2)
        d = self.groups
        for number, name in enumerate(self.blocks):
            block = slice(number * d, (number + 1) * d)
            if name == REGIONS:
                k[block, block] += scale * revised.context**2 * self._context
            elif name:
                k[block, block] += revised.discrepancy[name] ** 2 * (np.eye(d) + 0.1)
        surface = np.full(model.regions.surface.shape[1], SURFACE_SD)
        return root_of(k, np.concatenate([surface, revised.level]))


def _from_regions(model: MapModel, bins: Ints, slopes: Slopes) -> MapFit:
    """The posterior of a stratum from regions alone."""
    regions = model.regions.select(bins)
    factors = model.factors
    d = len(model.population)
    rows = Rows(regions.shares, regions.surface)
    variants = _variants(factors, slopes)

    def fit(chosen: Slopes) -> tuple[Modes, Floats, list[tuple[Floats, Floats]]]:
        covariance = factors.covariance(chosen.shown())
        weight = regions.weight(slopes.effect, covariance)
        observed = Observed(regions.values, weight, regions.centre)
        modes = find_modes(rows, observed, model.region_root(covariance))
        roots = [model.region_root(factors.covariance(each.shown())) for each, _ in variants]
        weights, parts = _mixture(modes, roots, np.array([count for _, count in variants]))
        return modes, weights, [(mean[:, :d], c[:, :d, :d]) for mean, c in parts]

    modes, weights, parts = fit(slopes)
    best = variants[int(weights.mean(0).argmax())][0]
    if best is not slopes:
        modes, weights, parts = fit(best)
    shown = average(weights, parts)
    posterior = shown
    if slopes.context is not None:
        attributed = [
            _attribute(model, each, part) for (each, _), part in zip(variants, parts, strict=True)
        ]
        posterior = average(weights, attributed)
        if slopes.doubt:
            posterior = _doubted(model, slopes, posterior)
    return _finish(model, bins, posterior, shown[0], (modes, best))


def _variants(factors: GroupFactors, slopes: Slopes) -> list[tuple[Slopes, float]]:
    """Variants of the prior, the fitted one first, with their prior counts of bins."""
    if slopes.context is None:
        every = [replace(slopes, own=own) for own in factors.variants(slopes.own)]
        counts = np.full(len(every), OTHER_BINS)
        counts[0] = CONCENTRATION
        return [(slopes, CONCENTRATION), *zip(every[1:], counts[1:].tolist(), strict=True)]
    variants = [(slopes, CONCENTRATION)]
    for scale, share in OWN_SCALES:
        for number, context in enumerate(factors.variants(slopes.context)):
            if scale == 1 and not number:
                continue
            count = share * (CONCENTRATION if not number else OTHER_BINS)
            variants.append((replace(slopes, own=scale * slopes.own, context=context), count))
    return variants


def _attribute(
    model: MapModel, slopes: Slopes, shown: tuple[Floats, Floats]
) -> tuple[Floats, Floats]:
    """Log ratios of groups, from what regions show: the rest is due to places."""
    gain, rest = _gain(model, slopes)
    mean, variance = shown
    return mean @ gain.T, gain @ variance @ gain.T + rest


def _gain(model: MapModel, slopes: Slopes) -> tuple[Floats, Floats]:
    """G with E[b | b + c] = G (b + c), and the variance of b that remains."""
    d = len(model.population)
    if slopes.context is None:
        return np.eye(d), np.zeros((d, d))
    own = model.factors.covariance(slopes.own) + LEVEL
    shown = model.factors.covariance(slopes.shown()) + LEVEL
    gain = np.linalg.solve(shown + 1e-9 * np.eye(d), own).T
    rest = own - gain @ own
    return gain, (rest + rest.T) / 2


def _doubted(
    model: MapModel, slopes: Slopes, posterior: tuple[Floats, Floats]
) -> tuple[Floats, Floats]:
    """Average with the prior, as far as regions do not differ with their composition."""
    mean, covariance = posterior
    centring = np.eye(len(model.population)) - model.population
    own = centring @ model.factors.covariance(slopes.own) @ centring.T
    prior = np.broadcast_to(own, covariance.shape)
    weights = np.tile([1 - slopes.doubt, slopes.doubt], (len(mean), 1))
    return average(weights, [posterior, (np.zeros_like(mean), prior)])


def _mixture(
    modes: Modes, roots: Sequence[Floats], counts: Floats
) -> tuple[Floats, list[tuple[Floats, Floats]]]:
    """Weights of priors (bins, priors), and the posterior under each."""
    posteriors = [modes.under(root) for root in roots]
    evidence = np.stack([each[2] for each in posteriors], axis=1)
    weights = Mixture.of(evidence, counts).weights
    return weights, [(mean, covariance) for mean, covariance, _ in posteriors]


def _finish(
    model: MapModel,
    bins: Ints,
    posterior: tuple[Floats, Floats],
    shown: Floats,
    fitted: tuple[Modes, Slopes],
) -> MapFit:
    """Ratios as means that average to the population, with the information of regions."""
    modes, slopes = fitted
    d = len(model.population)
    own = model.factors.covariance(slopes.own)
    covariance = model.factors.covariance(slopes.shown())
    gain = _gain(model, slopes)[0]
    lift = gain @ modes.under(model.region_root(covariance))[1][:, :d]
    informed = lift @ modes.information @ np.swapaxes(lift, 1, 2)
    share = np.trace(own) / max(np.trace(covariance), 1e-300)
    return MapFit(
        log_means=normalised(model, bins, posterior[0]),
        log_covariance=_steepened(posterior),
        prior_variance=np.tile(contrast_variance(model.population, own), (len(bins), 1)),
        region_ratio=np.exp(link(shown)),
        sources=shares_of_information(model.population, {REGIONS: informed}, posterior[1]),
        variances={},
        group_share=np.full(len(bins), share),
        discrepancy={},
    )


def _from_all(model: MapModel, bins: Ints, slopes: Slopes, revised: Revised) -> MapFit:
    """The posterior of a stratum from regions and direct evidence on groups."""
    joint = Joint(model, slopes)
    d = joint.groups
    every = model.factors.variants(revised.own)
    roots = [joint.root(revised, each) for each in every]
    counts = [CONCENTRATION, *[OTHER_BINS] * (len(every) - 1)]
    if joint.confounded:
        roots += [joint.root(revised, scale=scale) for scale in CONTEXT_SCALES]
        counts += [OTHER_BINS] * len(CONTEXT_SCALES)
    modes = joint.modes(bins, roots[0])
    weights, parts = _mixture(modes, roots, np.array(counts))
    means, covariance = average(weights, [(m[:, :d], c[:, :d, :d]) for m, c in parts])
    shown = means
    if joint.confounded:
        shown = np.einsum("jv,vjd->jd", weights, np.stack([m[:, d : 2 * d] for m, _ in parts]))
    lift = modes.under(roots[0])[1][:, :d]
    observed = joint.observed(bins)
    informed = {}
    for name, rows in joint.kinds.items():
        w = information(joint.rows.select(rows), observed.of_rows(rows), modes.mode)
        informed[name] = lift @ w @ np.swapaxes(lift, 1, 2)
    own = model.factors.covariance(revised.own)
    context = np.zeros_like(revised.own) if slopes.context is None else slopes.context
    total = revised.own + revised.context**2 * context
    return MapFit(
        log_means=normalised(model, bins, means),
        log_covariance=_steepened((means, covariance)),
        prior_variance=np.tile(contrast_variance(model.population, own), (len(bins), 1)),
        region_ratio=np.exp(link(shown)),
        sources=shares_of_information(model.population, informed, covariance),
        variances={},
        group_share=np.full(len(bins), revised.own.sum() / max(total.sum(), 1e-300)),
        discrepancy={},
    )


def _steepened(posterior: tuple[Floats, Floats]) -> Floats:
    """The covariance of log ratios, from that of the linked parameters."""
    mean, covariance = posterior
    slope = link_slope(mean)
    return np.asarray(covariance * slope[:, :, None] * slope[:, None])


def normalised(model: MapModel, bins: Ints, ratio: Floats) -> Floats:
    """Log means (bins, groups) that average to the population mean."""
    log_means = np.log(model.centre[bins]) + link(ratio)
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
