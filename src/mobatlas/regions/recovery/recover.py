"""Group means M from all evidence: composition P, aggregates V, labelled people, group tables.

For every bin j, log M_dj is the log of the population mean plus a log ratio with a Gaussian prior
(`priors`), and regions, labelled people and lines of tables are quasi-Poisson means of M
(`map_model`, `solver`). Variances maximise the evidence, and estimates average over variants of the
prior. Directions that nothing identifies stay at the population mean, with wide intervals. Places
borrow strength from their categories.

If the population includes people outside all regions, these people form one more region.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from mobatlas.data.arrays import Floats, Ints
from mobatlas.errors import MobatlasError
from mobatlas.progress import log
from mobatlas.regions.composition import refuse_empty_regions
from mobatlas.regions.posterior import Families
from mobatlas.regions.recovery.composition_error import CompositionError, calibrate_composition
from mobatlas.regions.recovery.geography import confounding, surface, transfer
from mobatlas.regions.recovery.least_squares import fit_least_squares
from mobatlas.regions.recovery.map_model import (
    DISPERSION,
    Assumption,
    DirectRows,
    MapFit,
    MapModel,
    RegionRows,
    Slopes,
)
from mobatlas.regions.recovery.priors import GroupFactors
from mobatlas.regions.recovery.sharpness import sample_like
from mobatlas.regions.recovery.solver import Observed, Rows
from mobatlas.regions.types import (
    GroupEvidence,
    Recovery,
    Regions,
    bins_by_map,
    population_mean,
    with_rest,
)

# Where people chose their regions, aggregates also follow composition because the regions differ.
# These contextual slopes are not group differences, and only their size reveals them. Without
# direct evidence, groups explain at most this share of the variance between people. Larger slopes
# are attributed to groups in proportion. In the Santiago survey, age and sex explain 0.06 of the
# variance of a category on average, and 0.37 for education. Of 0.1, 0.2 and 0.4, its validation
# people support 0.2.
GROUPS_EXPLAIN = 0.2
# In rare bins, that share would let groups differ by several times the mean. Below this squared
# ratio of mean to standard deviation, the limit therefore falls in proportion.
RARE = 0.1
METHODS = ("bayes", "least-squares", "simplex")
MAX_LOG_VARIANCE = 0.5  # due to groups, also of rare bins
MOSTLY_PRIOR = 0.5  # with less information, an estimate depends mostly on the prior
UNKNOWN_N = 1e6  # people of a region whose values are shares: region effects are the only error


@dataclass(frozen=True)
class RecoveryOptions:
    """Assumptions of the Bayesian recovery.

    Parameters
    ----------
    region_effects
        Whether regions differ for reasons other than composition; each feature map is then fitted
        separately. Default: unless people were assigned to regions at random.
    exact_composition
        Whether the composition has no counting error. Default: if people were assigned at random.
    geography
        Whether to remove a smooth surface over the map. Default: as `region_effects`.
    groups_explain
        The largest share of the variance between people that groups explain, with region effects.
        100 removes this limit.

    Examples
    --------
    >>> without_limit = RecoveryOptions(groups_explain=100)
    >>> recover(load_regions("regions"), options=without_limit)  # doctest: +SKIP
    """

    region_effects: bool | None = None
    exact_composition: bool | None = None
    geography: bool | None = None
    groups_explain: float = GROUPS_EXPLAIN

    def __post_init__(self) -> None:
        if not self.groups_explain > 0:
            raise MobatlasError(
                f"groups_explain={self.groups_explain}: give a number above 0, such as 0.2"
            )


DEFAULT_OPTIONS = RecoveryOptions()


def recover(
    regions: Regions,
    method: str = "bayes",
    *,
    options: RecoveryOptions = DEFAULT_OPTIONS,
    parents: Mapping[str, str] | None = None,
    quiet: bool = False,
) -> Recovery:
    """Estimate group means from regions, labelled people and group tables.

    Parameters
    ----------
    regions
        Composition, aggregates and further evidence, as `load_regions` returns them.
    method
        "bayes", "least-squares" (the paper's pseudo-inverse) or "simplex".
    options
        Assumptions of "bayes".
    parents
        The parent of a feature, such as the category of a place; default: those of the regions.
        Estimates of places borrow strength from their category.
    quiet
        Do not log warnings about confounding with places.

    Returns
    -------
    Recovery
        Means, covariances and intervals per group and feature. Where people were assigned at
        random, `targets` are less smooth than the means: as uneven as means of samples of people.

    Examples
    --------
    >>> recovery = recover(load_regions("regions"))  # doctest: +SKIP
    >>> recovery.means.shape  # doctest: +SKIP
    (8, 40)
    """
    if method not in METHODS:
        raise MobatlasError(
            f"recovery method '{method}' does not exist (known: {', '.join(METHODS)})"
        )
    _check_regions(regions)
    regions = with_rest(regions)
    if method != "bayes":
        return fit_least_squares(regions.composition, regions.aggregates, method == "simplex")
    parents = regions.parents if parents is None else parents
    complete = _with_parents(regions, parents)
    recovery = _Recoverer(complete, options, parents).recover()
    assert recovery.log_covariance is not None
    families = Families.of(recovery.features, recovery.log_covariance, parents)
    recovery = replace(recovery, families=families)
    if complete is not regions:
        recovery = _select_features(recovery, len(regions.aggregates.features))
    for warning in () if quiet else (*confounding(recovery), *recovery.notes):
        log.warning("%s", warning)
    return recovery


def _with_parents(regions: Regions, parents: Mapping[str, str]) -> Regions:
    """Add the sums of places as categories, if the aggregates have places only."""
    v = regions.aggregates
    known = [parents.get(name) for name in v.features]
    names = dict.fromkeys(name for name in known if name is not None)
    if not names or set(names) & set(v.features) or v.pooled or v.noise is not None:
        return regions
    position = {name: number for number, name in enumerate(names)}
    member = np.zeros((len(v.features), len(names)))
    for number, name in enumerate(known):
        if name is not None:
            member[number, position[name]] = 1
    population = regions.population
    return replace(
        regions,
        aggregates=replace(
            v,
            features=(*v.features, *names),
            values=np.hstack([v.values, v.values @ member]),
            spread=None if v.spread is None else np.append(v.spread, v.spread @ member),
        ),
        population=population
        and replace(population, values=np.append(population.values, population.values @ member)),
    )


def _select_features(recovery: Recovery, size: int) -> Recovery:
    """The first features of a recovery."""
    columns = ("means", "prior_variance", "targets", "resolution")
    assert recovery.log_covariance is not None
    return replace(
        recovery,
        features=recovery.features[:size],
        families=recovery.families and recovery.families.select(size),
        log_covariance=recovery.log_covariance[:size],
        baseline=recovery.baseline[:size],
        group_share=recovery.group_share[:size],
        sources={name: each[:, :size] for name, each in recovery.sources.items()},
        **{name: getattr(recovery, name)[:, :size] for name in columns},
    )


class _Recoverer:
    """Recovers all feature maps of regions: categories first, then their places."""

    def __init__(
        self, regions: Regions, options: RecoveryOptions, parents: Mapping[str, str]
    ) -> None:
        composition = regions.composition
        randomised = regions.randomised
        exact = randomised if options.exact_composition is None else options.exact_composition
        effects = not randomised if options.region_effects is None else options.region_effects
        geography = effects if options.geography is None else options.geography
        self._regions = regions
        self._effects = effects
        # Beyond the whole variance between people, there is no limit.
        self._confounded = effects and options.groups_explain <= 1
        self._groups_explain = options.groups_explain
        self._parents = parents
        self._shares: Floats = composition.shares
        self._error: CompositionError | None = None
        if not exact:
            self._shares, self._error = calibrate_composition(composition)
        self._centroids = regions.centroids if geography else None
        self._factors = GroupFactors.of(composition.groups)
        v = regions.aggregates
        self._population, mean = population_mean(self._shares, v)
        # With published noise, the mean of the population is a better estimate.
        if regions.population is not None and v.noise is not None:
            mean = regions.population.values
        self._mean = np.maximum(mean, 0)  # noise may make the mean of a rare place negative
        spread = self._mean if v.spread is None else v.spread
        ratio = spread / np.maximum(self._mean, 1e-300)
        self._dispersion = np.clip(ratio, *DISPERSION)
        self._n = np.full(len(v.n), UNKNOWN_N) if v.pooled else v.n
        size = (len(v.features), len(self._population))
        self._log_means = np.full(size, -np.inf)
        self._log_covariance = np.zeros((*size, size[1]))
        self._prior_variance = np.zeros(size)
        self._region_ratio = np.ones(size)
        self._group_share = np.ones(len(v.features))
        self._sources: dict[str, Floats] = {}
        self._variances: dict[str, float] = {}
        self._transfer: dict[str, float] = {}
        self._notes: dict[str, None] = {}

    def recover(self) -> Recovery:
        """Fit all maps."""
        v = self._regions.aggregates
        maps = bins_by_map(v.features)
        parts = {name.partition(":")[0] for name in self._parents}
        for name in sorted(maps, key=lambda each: each in parts):
            bins = maps[name]
            visited = bins[(self._mean[bins] > 0) & ~np.isnan(v.values[:, bins]).all(0)]
            self._log_means[bins] = np.log(np.maximum(self._mean[bins], 1e-300))[:, None]
            if len(visited):
                prefix = f"{name} " if len(maps) > 1 else ""
                self._fit(name, visited, prefix)
        means = np.where(self._mean > 0, np.exp(self._log_means).T, 0.0)
        known = np.asarray(sum(self._sources.values())) if self._sources else 0.0
        sources = {
            name: each if name != "assumption" else np.maximum(1 - (known - each), 0.0)
            for name, each in self._sources.items()
        }
        recovery = Recovery(
            groups=self._regions.groups,
            features=v.features,
            means=means,
            log_covariance=self._log_covariance,
            prior_variance=self._prior_variance.T,
            baseline=self._mean,
            shares=self._population,
            variances=self._variances,
            group_share=self._group_share,
            transfer=self._transfer,
            sources=sources,
            resolution=self._resolution(),
            notes=tuple(self._notes),
        )
        if self._confounded:
            return replace(recovery, targets=means)
        return replace(recovery, targets=sample_like(recovery, self._regions, self._dispersion))

    def _fit(self, name: str, bins: Ints, prefix: str) -> None:
        """Fit one feature map."""
        model = self._model(bins)
        limits = self._limits(model)
        usual = None
        scale = np.ones(len(bins))
        if limits is not None:
            usual = float(np.average(limits, weights=model.regions.mean))
            scale = limits / usual
        slopes = model.slopes(Assumption(self._effects, usual))
        transferred = self._test_transfer(model, slopes)
        if transferred is not None:
            self._transfer[name] = transferred
            slopes = _transferred(slopes, transferred)
        fit = model.fit(slopes, scale)
        self._keep(bins, fit)
        self._variances |= {prefix + key: value for key, value in fit.variances.items()}

    def _keep(self, bins: Ints, fit: MapFit) -> None:
        parent = self._parent_numbers(bins)
        inherited = np.where((parent >= 0)[:, None, None], self._log_covariance[parent], 0)
        self._log_means[bins] = fit.log_means
        # Slightly conservative: the category's variance ignores the evidence from its places.
        self._log_covariance[bins] = fit.log_covariance + inherited
        own = np.where((parent >= 0)[:, None], self._prior_variance[parent], 0)
        self._prior_variance[bins] = fit.prior_variance + own
        self._region_ratio[bins] = fit.region_ratio
        self._group_share[bins] = fit.group_share
        shape = (len(self._population), len(self._mean))
        for source, share in fit.sources.items():
            self._sources.setdefault(source, np.zeros(shape))[:, bins] = share.T

    def _parent_numbers(self, bins: Ints) -> Ints:
        """The number of the parent of each bin, -1 for none that is visited."""
        features = self._regions.aggregates.features
        position = {name: number for number, name in enumerate(features)}
        numbers = [
            position.get(self._parents.get(features[number], ""), -1) for number in bins.tolist()
        ]
        parent = np.array(numbers, dtype=np.int64)
        return np.where((parent >= 0) & (self._mean[parent] > 0), parent, -1)

    def _model(self, bins: Ints) -> MapModel:
        v = self._regions.aggregates
        mean = self._mean[bins]
        values = v.values[:, bins].T
        known = ~np.isnan(values)
        parent = self._parent_numbers(bins)
        nested = (parent >= 0)[:, None]
        log_parent = np.log(np.maximum(self._mean[parent], 1e-300))[:, None]
        centre = np.where(nested, np.exp(self._log_means[parent] - log_parent), 1.0)
        shown = np.where(nested, self._region_ratio[parent], 1.0)
        rows = RegionRows(
            shares=self._shares,
            n=self._n,
            surface=surface(self._centroids, len(self._n)),
            error=self._error,
            values=np.where(known, np.maximum(values, 0), 0.0),
            known=known.astype(np.float64),
            noise=None if v.noise is None else np.nan_to_num(v.noise[:, bins].T),
            mean=mean,
            dispersion=self._dispersion[bins],
            centre=mean[:, None] * (shown if self._confounded else centre),
        )
        direct = [
            each
            for source in self._regions.evidence
            if (each := self._direct(source, bins)) is not None
        ]
        return MapModel(
            self._factors,
            self._population,
            rows,
            centre=mean[:, None] * centre,
            direct=direct,
        )

    def _direct(self, source: GroupEvidence, bins: Ints) -> DirectRows | None:
        """Rows of a source in some bins; None if it has none of them."""
        names = self._regions.aggregates.features
        position = {name: number for number, name in enumerate(source.features)}
        column = np.array([position.get(names[number], -1) for number in bins.tolist()])
        values = np.where(column >= 0, source.values[:, column], np.nan).T  # (bins, rows)
        known = ~np.isnan(values)
        if not known.any():
            return None
        mean = self._mean[bins][:, None]
        variance = self._dispersion[bins][:, None] / source.n
        if source.standard_error is not None:
            error = np.where(column >= 0, source.standard_error[:, column], np.nan).T
            variance = np.where(np.isnan(error), variance, error**2 / mean)
        known &= (variance > 0) & np.isfinite(variance)
        return DirectRows(
            source.name,
            source.kind == "table",
            source.same_population,
            source.shares,
            np.where(known, np.maximum(values, 0), 0.0),
            np.where(known, 1 / np.maximum(variance, 1e-12), 0.0),
        )

    def _test_transfer(self, model: MapModel, slopes: Slopes) -> float | None:
        if not self._confounded or self._centroids is None:
            return None
        rows = Rows(model.regions.shares, model.regions.surface)
        complete = np.flatnonzero(model.regions.known.all(1))
        if not len(complete):
            return None
        covariance = self._factors.covariance(slopes.shown())
        chosen = model.regions.select(complete)
        weight = chosen.weight(slopes.effect, covariance)
        observed = Observed(chosen.values, weight, chosen.centre)
        return transfer(rows, observed, model.region_root(covariance), self._centroids)

    def _limits(self, model: MapModel) -> Floats | None:
        """The assumed variance of log ratios due to groups (bins,); None: no assumption."""
        if not self._confounded:
            return None
        frequency = model.regions.mean / model.regions.dispersion  # (mean / sd of people) squared
        explained = self._groups_explain * np.minimum(1.0, frequency / RARE)
        return np.asarray(np.minimum(explained / frequency, MAX_LOG_VARIANCE))

    def _resolution(self) -> Floats:
        """The mean of a group that would leave one visit in the evidence (groups, features)."""
        people = self._n @ self._shares  # (groups,)
        for source in self._regions.evidence:
            people = people + np.nan_to_num(source.n, posinf=0.0) @ source.shares
        return self._dispersion / np.maximum(people, 1e-9)[:, None]


def _check_regions(regions: Regions) -> None:
    aggregates = regions.aggregates
    if not len(aggregates.features):
        raise MobatlasError(
            "aggregates: no feature is left; choose another --feature or less --mask"
        )
    refuse_empty_regions("aggregates", aggregates.regions, aggregates.n)
    if not ((aggregates.values != 0) & ~np.isnan(aggregates.values)).any():
        raise MobatlasError(
            "aggregates: every value is zero or suppressed; nothing can be estimated"
        )
    if np.isnan(regions.composition.shares).any():
        raise MobatlasError("composition: some shares are missing (NaN); complete the table")


def _transferred(slopes: Slopes, transfer: float) -> Slopes:
    """Attribute slopes that do not hold in other parts of the map to places."""
    if slopes.context is None:
        return slopes
    share = max(transfer, 1e-3)
    return replace(
        slopes, own=share * slopes.own, context=slopes.context + (1 - share) * slopes.own
    )
