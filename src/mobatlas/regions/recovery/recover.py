"""Group means M from all evidence: composition P, aggregates V, labelled people, group tables.

For every bin j, log M_dj is the log of the population mean plus a log ratio with a Gaussian prior
(`priors`), and regions, labelled people and lines of tables are quasi-Poisson means of M
(`map_model`, `solver`). Variances maximise the evidence, and estimates average over variants of the
prior. Directions that nothing identifies stay at the population mean, with wide intervals. Places
borrow strength from their categories.

If the population includes people outside all regions, these people form one more region.

Posterior means are smoother than the truth, place by place, as every estimate with the least
expected error is. Distributions are compared by a divergence, with a finite sample of people that
is rougher than the truth, and there a smooth estimate loses. Expectation maximisation steps of the
likelihood lead from the posterior towards the observed values, in the directions that regions
identify. Draws from the posterior show which share of the way has the least expected divergence
from a sample of held-out people (`sample_like`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from mobatlas.data.types import Floats, Ints
from mobatlas.errors import MobatlasError, log, refuse_faults
from mobatlas.features.divergences import js
from mobatlas.regions.composition import refuse_empty_regions
from mobatlas.regions.recovery.composition_error import CompositionError, calibrate_composition
from mobatlas.regions.recovery.exchanged import exchanged_tables
from mobatlas.regions.recovery.geography import confounding, surface, transfer
from mobatlas.regions.recovery.map_fit import fit_map
from mobatlas.regions.recovery.map_model import (
    DISPERSION,
    DirectRows,
    MapFit,
    MapModel,
    RegionRows,
    Slopes,
)
from mobatlas.regions.recovery.priors import GroupFactors
from mobatlas.regions.recovery.solver import Observed, Rows
from mobatlas.regions.types import (
    Aggregates,
    Families,
    GroupEvidence,
    Recovery,
    Regions,
    bins_by_map,
    blocks,
    population_mean,
    square_roots,
    with_rest,
)

STEPS = 2  # of expectation maximisation
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)  # of the way to the result of these steps
HELD_OUT = 0.1  # of the people of a group, as in an evaluation
DRAWS = 8
SEED = 0
# Where people chose their regions, aggregates also follow composition because the regions differ.
# These contextual slopes are not group differences, and only their size reveals them. Without
# direct evidence, groups explain at most this share of the variance between people. Larger slopes
# are attributed to groups in proportion. In the Santiago survey, age and sex explain 0.06 of the
# variance of a category on average, and 0.37 for education. Of 0.1, 0.2 and 0.4, its validation
# people support 0.2.
GROUPS_EXPLAIN = 0.2
# In rare bins, that share would let groups differ by many times the mean: the variance of log
# ratios that is attributed to groups is limited, too. Of 0.5, 1 and 2, the same people support 1.
MAX_LOG_VARIANCE = 1.0
MAX_NAMED = 4  # groups in one note
NOTABLE = 0.05  # a smaller difference of a logarithm is none
MAY_BE_ZERO = 0.25  # a larger variance of log ratios: groups may be without a feature
DOUBTFUL = 0.5  # a larger probability that composition does not matter is reported
CONTRADICTS = 0.5  # so is a table with a larger discrepancy, in logarithms
MOSTLY_PRIOR = 0.5  # with less information, an estimate depends mostly on the prior
UNKNOWN_N = 1e6  # people of a region whose values are shares: region effects are the only error


@dataclass(frozen=True)
class RecoveryOptions:
    """Assumptions of the recovery.

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
    options
        Assumptions of the model.
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
    _check_regions(regions)
    regions = with_rest(regions)
    parents = regions.parents if parents is None else parents
    complete = _with_parents(regions, parents)
    recovery = _Recoverer(complete, options, parents).recover()
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
    return replace(
        recovery,
        features=recovery.features[:size],
        families=recovery.families and recovery.families.select(size),
        log_covariance=recovery.log_covariance[:size],
        baseline=recovery.baseline[:size],
        group_share=recovery.group_share[:size],
        regions_differ=recovery.regions_differ[:size],
        sources={name: each[:, :size] for name, each in recovery.sources.items()},
        **{name: getattr(recovery, name)[:, :size] for name in columns},
    )


@dataclass(frozen=True)
class FittedMap:
    """A feature map as it was fitted: its visited bins and their evidence."""

    name: str
    bins: Ints  # numbers of its features
    parent: Ints  # (bins,) numbers of the features they are part of, -1 for none
    model: MapModel
    slopes: Slopes
    variances: Mapping[str, float]


def fit_maps(
    regions: Regions, options: RecoveryOptions = DEFAULT_OPTIONS
) -> tuple[Recovery, list[FittedMap]]:
    """Recover group means, and return the fitted maps; parents of features may be added."""
    _check_regions(regions)
    regions = with_rest(regions)
    recoverer = _Recoverer(_with_parents(regions, regions.parents), options, regions.parents)
    return recoverer.recover(), recoverer.maps


class _Recoverer:
    """Recovers all feature maps of regions: categories first, then their places."""

    def __init__(
        self, regions: Regions, options: RecoveryOptions, parents: Mapping[str, str]
    ) -> None:
        composition = regions.composition
        by_choice = not regions.randomised  # people chose their regions
        exact = not by_choice if options.exact_composition is None else options.exact_composition
        effects = by_choice if options.region_effects is None else options.region_effects
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
        spread = mean if v.spread is None else v.spread
        if v.noise is not None:
            mean = _mean_despite_noise(v, spread)
        # With published noise, the mean of the population is a better estimate.
        if regions.population is not None and v.noise is not None:
            mean = regions.population.values
        self._mean = np.maximum(mean, 0)  # noise may make the mean of a rare place negative
        self._dispersion = np.clip(spread / np.maximum(self._mean, 1e-300), *DISPERSION)
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
        self._doubt = 0.0  # of the maps fitted so far: categories come before their places
        self._notes: dict[str, None] = {}
        self.maps: list[FittedMap] = []

    def recover(self) -> Recovery:
        """Fit all maps."""
        v = self._regions.aggregates
        maps = bins_by_map(v.features)
        parts = {name.partition(":")[0] for name in self._parents}
        for name in sorted(maps, key=lambda each: each in parts):
            bins = maps[name]
            unknown = np.isnan(_columns(v.values, bins)).all(0)
            visited = bins[(self._mean[bins] > 0) & ~unknown]
            self._log_means[bins] = np.log(np.maximum(self._mean[bins], 1e-300))[:, None]
            if len(visited):
                self._fit(name, visited, f"{name} " if len(maps) > 1 else "")
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
            regions_differ=np.abs(np.log(np.maximum(self._region_ratio, 1e-300))).max(1) > NOTABLE,
            transfer=self._transfer,
            sources=sources,
            resolution=self._resolution(),
        )
        recovery = replace(recovery, notes=(*self._notes, *_assumed_groups(recovery)))
        if self._confounded:
            return replace(recovery, targets=means)
        return replace(recovery, targets=sample_like(recovery, self._regions, self._dispersion))

    def _fit(self, name: str, bins: Ints, prefix: str) -> None:
        """Fit one feature map."""
        model = self._model(bins)
        slopes = model.slopes(self._effects)
        exchanged = exchanged_tables(model, slopes)
        if exchanged:
            direct = [each for each in model.direct if each.name not in exchanged]
            model = replace(model, direct=direct)
        if model.nested and not self._confounded:
            slopes = replace(slopes, doubt=self._doubt)
        if (transferred := self._test_transfer(model, slopes)) is not None:
            self._transfer[name] = transferred
            slopes = _transferred(slopes, transferred)
        fit, slopes, discrepancy = fit_map(model, slopes)
        self._doubt = max(self._doubt, slopes.doubt)
        self._keep(bins, fit)
        parent = self._parent_numbers(bins)
        self.maps.append(FittedMap(name, bins, parent, model, slopes, fit.variances))
        self._variances |= {prefix + key: value for key, value in fit.variances.items()}
        self._note(name, slopes, discrepancy)
        for table in exchanged:
            self._notes[
                f"'{table}' contradicts the other evidence on '{name}': its rows fit better under "
                "the names of other groups, so it is left out. Check whether groups are exchanged"
            ] = None

    def _note(self, name: str, slopes: Slopes, discrepancy: Mapping[str, float]) -> None:
        """Say which assumption binds, and which evidence contradicts."""
        if slopes.doubt > DOUBTFUL:
            self._notes[
                f"regions do not differ in '{name}' as their composition does. Either the groups "
                "hardly differ, or the composition describes other people; the intervals allow "
                "for both. Check that composition and aggregates are of the same regions"
            ] = None
        for table, sd in discrepancy.items():
            if sd > CONTRADICTS:
                self._notes[
                    f"'{table}' contradicts the other evidence on '{name}': its differences "
                    f"between groups are off by a factor of {np.exp(sd):.1f}, so it counts "
                    "little. Check its groups and units"
                ] = None

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
            published=_columns(v.values, bins).T,
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
            assumed=self._assumed(bins),
            confounded=self._confounded,
            nested=bool(nested.any()),
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
        sample = model.sample
        complete = sample[~np.isnan(model.regions.published[sample]).any(1)]
        if not len(complete):
            return None
        covariance = self._factors.covariance(slopes.shown())
        chosen = model.regions.select(complete)
        observed = Observed(chosen.values, chosen.weight(slopes.effect, covariance), chosen.centre)
        return transfer(rows, observed, model.region_root(covariance), self._centroids)

    def _assumed(self, bins: Ints) -> Floats:
        """The assumed variance of log ratios between groups (bins,)."""
        frequency = self._mean[bins] / self._dispersion[bins]  # (mean / sd of people) squared
        share = min(self._groups_explain, 1.0) if self._confounded else GROUPS_EXPLAIN
        return np.asarray(np.minimum(share / frequency, MAX_LOG_VARIANCE))

    def _resolution(self) -> Floats:
        """The mean of a group that would leave one visit in the evidence (groups, features).

        Where a group may do without a feature altogether, only the visits count that the evidence
        can attribute to the group.
        """
        people = self._n @ self._shares  # (groups,)
        for source in self._regions.evidence:
            people = people + np.nan_to_num(source.n, posinf=0.0) @ source.shares
        visit = self._dispersion / np.maximum(people, 1e-9)[:, None]
        variance = np.diagonal(self._log_covariance, axis1=1, axis2=2).T  # (groups, features)
        prior = self._prior_variance.T
        visits = np.maximum(1 / np.maximum(variance, 1e-12) - 1 / np.maximum(prior, 1e-12), 1e-9)
        attributed = np.exp(self._log_means.T) / visits
        return np.where(prior > MAY_BE_ZERO, np.maximum(visit, attributed), visit)


def _assumed_groups(recovery: Recovery) -> list[str]:
    """A note on groups whose intervals rest on assumptions more than on evidence."""
    assumed = recovery.sources.get("assumption")
    total = float(recovery.baseline.sum())
    if assumed is None or len(recovery.groups) < 2 or not total > 0:
        return []
    share = assumed @ recovery.baseline / total  # (groups,)
    names = [recovery.groups.names[number] for number in np.flatnonzero(share > MOSTLY_PRIOR)]
    if not names:
        return []
    more = f" and {len(names) - MAX_NAMED} more groups" if len(names) > MAX_NAMED else ""
    some = "; ".join(names[:MAX_NAMED]) + more
    which = "any group" if len(names) == len(recovery.groups) else some
    return [
        f"the evidence says little about {which}. Their estimates stay close to the average "
        "of the population, and their intervals assume that groups differ as much as usual. A "
        "behaviour that only some groups have may lie outside"
    ]


def _columns(values: Floats, bins: Ints) -> Floats:
    """Columns of a large table: a view if they are adjacent."""
    if len(bins) and int(bins[-1] - bins[0]) == len(bins) - 1:
        return values[:, int(bins[0]) : int(bins[-1]) + 1]
    return values[:, bins]


def _mean_despite_noise(v: Aggregates, spread: Floats) -> Floats:
    """The mean over regions (features,): regions with more noise count less."""
    assert v.noise is not None
    people = np.maximum(spread, 1e-12) / v.n[:, None]  # (regions, features) variance of a mean
    weight = np.where(np.isnan(v.values), 0.0, 1 / (people + v.noise))
    return (weight * np.nan_to_num(v.values)).sum(0) / np.maximum(weight.sum(0), 1e-300)


def _check_regions(regions: Regions) -> None:
    aggregates = regions.aggregates
    refuse_empty_regions("aggregates", aggregates.regions, aggregates.n)
    refuse_faults(
        {
            "aggregates: no feature is left; choose another --feature or less --mask": not (
                aggregates.features
            ),
            "aggregates: every value is zero or suppressed; nothing can be estimated": not (
                np.nan_to_num(aggregates.values).any()
            ),
            "composition: some shares are missing (NaN); complete the table": np.isnan(
                regions.composition.shares
            ).any(),
        }
    )


def _transferred(slopes: Slopes, transfer: float) -> Slopes:
    """Attribute slopes that do not hold in other parts of the map to places."""
    if slopes.context is None:
        return slopes
    share = max(transfer, 1e-3)
    return replace(
        slopes, own=share * slopes.own, context=slopes.context + (1 - share) * slopes.own
    )


def sample_like(recovery: Recovery, regions: Regions, dispersion: Floats) -> Floats:
    """Means (groups, features) with the least expected divergence from samples of people."""
    targets = recovery.means.copy()
    for bins in bins_by_map(recovery.features).values():
        visited = bins[recovery.baseline[bins] > 0]
        if len(visited) > 1:
            targets[:, visited] = _best(recovery, regions, dispersion, visited)
    return targets


def _best(recovery: Recovery, regions: Regions, dispersion: Floats, bins: Ints) -> Floats:
    means = recovery.means[:, bins]
    rough = np.empty_like(means)
    for some in blocks(len(bins), regions.aggregates.values.shape[0]):
        rough[:, some] = _maximise(regions, means[:, some], bins[some])
    rough = np.maximum(rough, 1e-12 * recovery.baseline[bins])
    samples = _samples(recovery, regions, dispersion, bins)
    candidates = [means ** (1 - share) * rough**share for share in SHARES]
    expected = [float(np.mean([js(each, sample) for sample in samples])) for each in candidates]
    return candidates[int(np.argmin(expected))]


def _maximise(regions: Regions, means: Floats, bins: Ints) -> Floats:
    """Multiplicative steps of expectation maximisation (groups, bins)."""
    p = regions.composition.shares
    v = np.maximum(regions.aggregates.values[:, bins], 0)  # (regions, bins)
    people = p * regions.aggregates.n[:, None]  # (regions, groups)
    known = ~np.isnan(v)
    for _ in range(STEPS):
        ratio = np.where(known, v, 0) / np.maximum(p @ means, 1e-300)
        means = means * (people.T @ ratio) / np.maximum(people.T @ known, 1e-300)
    return means


def _samples(recovery: Recovery, regions: Regions, dispersion: Floats, bins: Ints) -> Floats:
    """Mean counts of simulated held-out people of each group (draws, groups, bins)."""
    rng = np.random.default_rng(SEED)
    n = HELD_OUT * regions.aggregates.n.sum() * recovery.shares  # (groups,)
    samples = np.empty((DRAWS, len(n), len(bins)))
    for some in blocks(len(bins), len(n) ** 2):
        chosen = bins[some]
        root = square_roots(recovery.log_covariance[chosen])
        people = np.maximum(n, 1)[:, None] / dispersion[chosen]  # (groups, bins)
        noise = rng.normal(size=(DRAWS, len(chosen), len(n)))
        moved = np.clip(np.einsum("jab,ijb->iaj", root, noise), -20, 20)
        truth = recovery.means[:, chosen] * np.exp(moved)
        counts = rng.poisson(np.minimum(truth * people, 1e9)).astype(np.float64)
        samples[:, :, some] = np.maximum(counts, 1e-12) / people
    return samples
