"""Composition P, aggregates V and population of the same regions, and group means M from them.

Composition counts people. Aggregates are mean counts per person and window. Group means have a
posterior, in draws of which places move with their category.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from scipy import special

from mobatlas.data.types import Flags, Floats, Ints
from mobatlas.errors import MobatlasError
from mobatlas.features.maps import pair_name
from mobatlas.groups import Groups

BLOCK_CELLS = 4_000_000  # regions x features that a computation copies at once
REST = "rest"
MIN_REST = 30  # people
MIN_REST_SHARE = 0.01  # of the population: rounding errors dominate a smaller rest
CATEGORY = "category:"
ROUNDS = 3  # of scaling transitions to either category
EQUAL = 1e-9  # a smaller difference of variances is a rounding error


@dataclass(frozen=True)
class Composition:
    """p(d|g): the share of each group among the people of each region.

    Examples
    --------
    >>> groups = Groups.of({"gender": ("M", "F")})
    >>> Composition(groups, ("north",), np.array([[0.4, 0.6]]), np.array([250.0])).absent_groups
    []
    """

    groups: Groups
    regions: tuple[str, ...]
    shares: Floats  # P (regions, groups), rows sum to 1
    n: Floats  # (regions,) people counted; infinite where the shares are exact
    sample: Floats | None = None  # (regions,) people behind the shares of a survey; None: n

    @property
    def absent_groups(self) -> list[str]:
        """The groups that no region has."""
        return [self.groups.names[group] for group in np.flatnonzero(self.shares.sum(0) == 0)]

    def refuse_small_groups(self, where: Path | str, fewest: int = 0) -> None:
        """Refuse groups of no people, which cannot be learnt, and of fewer than `fewest`."""
        absent = "' or '".join(self.absent_groups)
        if absent:
            raise MobatlasError(
                f"{where}: no region has people of group '{absent}'; "
                "merge it with another group, or add the missing part of the table"
            )
        # exact shares, without people behind them, have infinite n
        people = np.round(np.nan_to_num(self.n, posinf=1e300) @ self.shares, 6)
        for group in np.flatnonzero(people < fewest).tolist():
            raise MobatlasError(
                f"{where}: group '{self.groups.names[group]}' has {people[group]:.0f} people in "
                f"all regions, fewer than {fewest}; merge it with another group, for example "
                "by wider age ranges in `prepare`, or lower --min-people"
            )

    def select(self, rows: Ints) -> Self:
        """Return the composition of some regions."""
        return replace(
            self,
            regions=tuple(self.regions[row] for row in rows.tolist()),
            shares=self.shares[rows],
            n=self.n[rows],
            sample=None if self.sample is None else self.sample[rows],
        )


@dataclass(frozen=True)
class Aggregates:
    """nu(g): the mean counts per window over the people of each region.

    Examples
    --------
    >>> v = Aggregates(("north",), ("poi:gym", "poi:park"), np.array([[0.5, 2]]), np.array([250.0]))
    >>> v.select_features(np.array([1])).features
    ('poi:park',)
    """

    regions: tuple[str, ...]
    features: tuple[str, ...]  # `map:bin`
    values: Floats  # V (regions, features); NaN where suppressed
    n: Floats  # (regions,) people behind the values
    spread: Floats | None = None  # (features,) variance between people of a region; None: unknown
    pooled: bool = False  # only shares of visits are known, because n was not published
    noise: Floats | None = None  # (regions, features) variance of added noise, without sampling
    largest: float | None = None  # the largest norm of a person's phi; None: not known

    def select(self, rows: Ints) -> Self:
        """Return the aggregates of some regions."""
        return replace(
            self,
            regions=tuple(self.regions[row] for row in rows.tolist()),
            values=self.values[rows],
            n=self.n[rows],
            noise=None if self.noise is None else self.noise[rows],
        )

    def select_features(self, bins: Ints) -> Self:
        """Return the aggregates of some features."""
        return replace(
            self,
            features=tuple(self.features[number] for number in bins.tolist()),
            values=self.values[:, bins],
            spread=None if self.spread is None else self.spread[bins],
            noise=None if self.noise is None else self.noise[:, bins],
        )


@dataclass(frozen=True)
class Population:
    """All people that the regions were drawn from, including people outside every region.

    Examples
    --------
    >>> Population(shares=np.array([0.4, 0.6]), values=np.array([0.5, 2]), n=1_000).n
    1000
    """

    shares: Floats  # w (groups,), sum to 1
    values: Floats  # mu0 (features,) mean counts per window over people
    n: float  # people


@dataclass(frozen=True)
class GroupEvidence:
    """Mean counts of groups, or of mixtures of groups, that do not come from regions.

    They come from labelled people (`kind` "labelled") or from a published table ("table").

    Examples
    --------
    >>> women = np.array([[0, 1.0]])  # the composition of the only row
    >>> value = np.array([[0.5]])
    >>> GroupEvidence("survey", "table", women, ("poi:gym",), value, np.array([90.0])).rows
    1
    """

    name: str  # as messages call it: "labelled people", or the name of a file
    kind: Literal["labelled", "table"]
    shares: Floats  # (rows, groups) composition of each row, sums to 1
    features: tuple[str, ...]  # `map:bin`; features that the aggregates do not have count too
    values: Floats  # (rows, features) mean counts per person and window; NaN where unknown
    n: Floats  # (rows,) people behind the values; infinite where only standard errors are known
    standard_error: Floats | None = None  # (rows, features); None: computed from n and spread
    spread: Floats | None = None  # (features,) variance between people of a row; None: unknown
    same_population: bool = True  # False: people of another place or time

    @property
    def rows(self) -> int:
        return len(self.shares)

    @property
    def title(self) -> str:
        """The evidence in a sentence, such as "200 labelled people"."""
        return (
            f"{self.n.sum():,.0f} {self.name}"
            if self.kind == "labelled"
            else f"the table {self.name}"
        )

    def as_dict(self) -> dict[str, Any]:
        """Facts for JSON: which evidence this is, and about which feature maps."""
        people = float(self.n.sum())
        return {
            "name": self.name,
            "kind": self.kind,
            "title": self.title,
            "rows": self.rows,
            "people": people if np.isfinite(people) else None,
            "features": list(bins_by_map(self.features)),
            "same_population": self.same_population,
        }


@dataclass(frozen=True)
class ReportedEvidence:
    """Evidence, with the decisions and doubts that a user should read."""

    evidence: GroupEvidence
    notes: list[str]
    warnings: list[str]


@dataclass(frozen=True)
class Regions:
    """Composition and aggregates of the same regions, in the same order.

    Examples
    --------
    >>> load_regions("regions").composition.shares.shape  # doctest: +SKIP
    (16, 8)
    """

    composition: Composition
    aggregates: Aggregates
    randomised: bool  # people were assigned to regions at random within groups: no region effects
    details: dict[str, Any] = field(default_factory=dict)  # provenance, for manifests and reports
    population: Population | None = None  # None: unknown, or the regions cover all of it
    centroids: Floats | None = None  # (regions, 2) mean home latitude and longitude; None: unknown
    evidence: tuple[GroupEvidence, ...] = ()  # labelled people and published group tables
    parents: Mapping[str, str] = field(default_factory=dict)  # feature -> the feature it is part of

    def __post_init__(self) -> None:
        if self.composition.regions != self.aggregates.regions:
            raise MobatlasError(
                "composition and aggregates must list the same regions in the same order"
            )
        if self.population is not None:
            population_size = (len(self.population.shares), len(self.population.values))
            size = (len(self.groups), len(self.aggregates.features))
            if population_size != size:
                raise MobatlasError(
                    f"the population has (groups, features) {population_size}, "
                    f"but the regions have {size}"
                )

    @property
    def groups(self) -> Groups:
        return self.composition.groups

    @property
    def population_shares(self) -> Floats:
        """w (groups,): the composition of all people, or of all regions."""
        if self.population is not None:
            return self.population.shares
        # A census counts everybody; exact shares have no number of people.
        n = self.composition.n if np.isfinite(self.composition.n).all() else self.aggregates.n
        return np.asarray(n @ self.composition.shares / n.sum())

    def select(self, rows: Ints) -> Self:
        """Return some of the regions, without the population, which would reveal the others."""
        return replace(
            self,
            composition=self.composition.select(rows),
            aggregates=self.aggregates.select(rows),
            population=None,
            centroids=None if self.centroids is None else self.centroids[rows],
        )


@dataclass(frozen=True)
class Families:
    """The parent of each feature, and the errors that features of one parent share.

    An error in the mean of a category moves all its places. A parent is in its own family.
    """

    names: tuple[str, ...]  # of the parents
    parent: Ints  # (features,) number of the parent, -1 for none
    covariance: Floats  # (parents, groups, groups) of log M of the parents

    @classmethod
    def of(
        cls, features: Sequence[str], log_covariance: Floats, parents: Mapping[str, str]
    ) -> Self:
        """The families of features whose covariance includes that of their parent."""
        position = {name: number for number, name in enumerate(features)}
        names = dict.fromkeys(parents[name] for name in features if parents.get(name) in position)
        rows = np.array([position[name] for name in names], dtype=np.int64)
        number = {name: k for k, name in enumerate(names)}
        parent = np.array([number.get(parents.get(name, name), -1) for name in features])
        variances = np.diagonal(log_covariance, axis1=1, axis2=2)  # (features, groups)
        inherits = np.zeros(len(features), dtype=bool)
        if names:
            inherits = (variances >= variances[rows][parent] - EQUAL).all(1)
        return cls(tuple(names), np.where(inherits, parent, -1), log_covariance[rows])

    def select(self, size: int) -> Self:
        """The families of the first features."""
        return replace(self, parent=self.parent[:size])


@dataclass(frozen=True)
class Posterior:
    """The posterior of group means: Gaussian errors of log M.

    Examples
    --------
    >>> two = np.eye(2)[None] / 100  # variances of two groups
    >>> Posterior(("poi:gym",), np.array([[1.0], [2]]), two).draws(5, seed=1).shape
    (5, 2, 1)
    """

    features: tuple[str, ...]
    medians: Floats  # (groups, features)
    log_covariance: Floats  # (features, groups, groups), or variances (features, groups)
    families: Families | None = None

    @property
    def is_joint(self) -> bool:
        """Whether the covariance of groups is known; without it, groups are independent."""
        return self.log_covariance.ndim == 3

    def draws(self, n: int, seed: int = 0) -> Floats:
        """Draws of M (n, groups, features); draw number k does not depend on n.

        The places of a category have its error in common, and transitions from and to a category
        move with it. Apart from this, features are independent. Sums of places are not scaled to
        their category: that would make places which dominate it too certain.
        """
        pairs = _category_pairs(self.features)
        return np.array([self._with_transitions(each, *pairs) for each in self._draws(n, seed)])

    def _with_transitions(self, means: Floats, transitions: Ints, ends: Ints) -> Floats:
        """Scale transitions (pairs,) such that sums by either end (pairs, 2) follow categories."""
        for _ in range(ROUNDS if len(transitions) else 0):
            for end in ends.T:
                category, number = np.unique(end, return_inverse=True)
                member = np.arange(len(category)) == number[:, None]  # (pairs, categories)
                wanted = self.medians[:, transitions] @ member * means[:, category]
                current = means[:, transitions] @ member * self.medians[:, category]
                means[:, transitions] *= _ratio(wanted, current)[:, number]
        return means

    def _draws(self, n: int, seed: int) -> Iterator[Floats]:
        root = square_roots(self.log_covariance)
        rng = np.random.default_rng(seed)
        families = self.families
        if families is None or not len(families.names):
            for _ in range(n):
                yield self.medians * np.exp(_correlated(root, rng))
            return
        known = families.parent >= 0
        parent = families.parent[known]
        root[known] = square_roots(self.log_covariance[known] - families.covariance[parent])
        common_root = square_roots(families.covariance)
        common_rng = np.random.default_rng([seed, 1])  # another stream
        for _ in range(n):
            common = _correlated(common_root, common_rng)  # (groups, parents)
            means = self.medians * np.exp(_correlated(root, rng))
            means[:, known] *= np.exp(common[:, parent])
            yield means


def _ratio(wanted: Floats, current: Floats) -> Floats:
    """Factors to reach the wanted sums; 1 where there is nothing to scale."""
    return np.where(current > 0, wanted / np.where(current > 0, current, 1.0), 1.0)


def _category_pairs(features: Sequence[str]) -> tuple[Ints, Ints]:
    """The numbers of transitions (pairs,), and of the categories at their ends (pairs, 2)."""
    position = {name: number for number, name in enumerate(features)}
    categories = {
        pair_name(name.removeprefix(CATEGORY)): number
        for name, number in position.items()
        if name.startswith(CATEGORY)
    }
    found = [
        (position[name], first, second)
        for start, first in categories.items()
        for end, second in categories.items()
        if (name := f"transitions:{start}>{end}") in position
    ]
    rows = np.array(found, dtype=np.int64).reshape(-1, 3)
    return rows[:, 0], rows[:, 1:]


def square_roots(covariance: Floats) -> Floats:
    """A root of each covariance (rows, groups, groups), or of variances (rows, groups)."""
    if covariance.ndim == 2:
        return np.sqrt(covariance)
    values, vectors = np.linalg.eigh(covariance)
    return np.asarray(vectors * np.sqrt(np.maximum(values, 0))[:, None])


def _correlated(root: Floats, rng: np.random.Generator) -> Floats:
    """Gaussian noise (groups, rows) with the covariances that `_roots` had."""
    noise = rng.normal(size=root.shape[:2])
    return (root * noise).T if root.ndim == 2 else np.einsum("jab,jb->aj", root, noise)


@dataclass(frozen=True)
class Recovery:
    """Estimated group means, with their uncertainty.

    Logarithms of means have a Gaussian posterior in each bin, so intervals are not negative and
    wider above the estimate than below.

    Examples
    --------
    >>> recovery = recover(load_regions("regions"))  # doctest: +SKIP
    >>> low, high = recovery.interval(0.9)  # doctest: +SKIP
    """

    groups: Groups
    features: tuple[str, ...]
    means: Floats  # M (groups, features), posterior medians
    log_covariance: Floats  # (features, groups, groups) of log M
    prior_variance: Floats  # (groups, features) of a group's log ratio to the population
    baseline: Floats  # mu0 (features,) population mean
    shares: Floats  # w (groups,)
    variances: Mapping[str, float]  # fitted standard deviations, and region effects
    group_share: Floats  # (features,) share of slopes attributed to groups
    regions_differ: Flags  # (features,) whether regions differ with their composition
    transfer: Mapping[str, float] = field(default_factory=dict)  # feature map -> transfer, 0 to 1
    # Source -> (groups, features): its share of the information. They sum to 1 with "assumption".
    sources: Mapping[str, Floats] = field(default_factory=dict)
    # (groups, features) the means that samples aim at: as uneven as those of people, see `recover`
    targets: Floats | None = None
    resolution: Floats | None = None  # (groups, features) a mean that would leave one visit unseen
    notes: tuple[str, ...] = ()  # assumptions that bind, and evidence that contradicts
    families: Families | None = None  # None: no feature has a parent

    @property
    def aims(self) -> Floats:
        """The means that samples aim at (groups, features)."""
        return self.means if self.targets is None else self.targets

    @property
    def log_sd(self) -> Floats:
        """Posterior standard deviations of log M (groups, features)."""
        return np.sqrt(np.diagonal(self.log_covariance, axis1=1, axis2=2).T)

    @property
    def covariance(self) -> Floats:
        """Posterior covariance of M (features, groups, groups), to first order."""
        columns = self.means.T
        return np.asarray(self.log_covariance * columns[:, :, None] * columns[:, None])

    @property
    def sd(self) -> Floats:
        """Posterior standard deviations of M (groups, features), to first order."""
        return self.means * self.log_sd

    def interval(self, level: float = 0.9) -> tuple[Floats, Floats]:
        """Lower and upper ends of posterior intervals (groups, features)."""
        reach = special.ndtri(0.5 + level / 2) * self.log_sd
        low = self.means * np.exp(-reach)
        if self.resolution is not None:  # so few visits could not be told from none
            low = np.where(low < self.resolution, 0.0, low)
        return low, self.means * np.exp(reach)

    @property
    def posterior(self) -> Posterior:
        """The posterior of M, to draw from."""
        return Posterior(self.features, self.means, self.log_covariance, self.families)

    def draws(self, n: int, seed: int = 0) -> Floats:
        """Draws of M from the posterior (n, groups, features); see `Posterior.draws`."""
        return self.posterior.draws(n, seed)

    def evidence_by_map(self) -> dict[str, float]:
        """Feature map -> share of the information on group means that is not assumption."""
        if (assumed := self.sources.get("assumption")) is None:
            return {}
        weight = self.shares[:, None] * self.means  # (groups, features)
        return {
            name: float(1 - (weight * assumed)[:, bins].sum() / max(weight[:, bins].sum(), 1e-300))
            for name, bins in bins_by_map(self.features).items()
        }

    def information(self) -> Floats:
        """Share of each group's prior variance that the evidence removed: 0 is prior, 1 is data."""
        centring = np.eye(len(self.groups)) - self.shares
        left = np.einsum("ab,jbc,ac->aj", centring, self.log_covariance, centring)
        removed = 1 - np.minimum(left / np.maximum(self.prior_variance, 1e-300), 1)
        return np.asarray(removed @ self.baseline / max(self.baseline.sum(), 1e-300))


def with_rest(regions: Regions) -> Regions:
    """Add the people outside every region as one more region, if they can be computed.

    Composition and mean of the rest are the population's minus the regions'. This needs people
    assigned at random: then the rest is a random part of each group and has no region effect.
    Cells that one region suppresses are unknown for the rest too. Nothing is added where the
    aggregates are noisy or are shares.
    """
    p = regions.composition
    v = regions.aggregates
    population = regions.population
    if population is None or not regions.randomised or v.pooled or v.noise is not None:
        return regions
    n = population.n - float(v.n.sum())
    if n < max(MIN_REST, MIN_REST_SHARE * population.n):
        return regions
    # Rounding may leave slightly less than zero people.
    people = np.maximum(population.n * population.shares - v.n @ p.shares, 0)  # (groups,)
    values = np.maximum(population.n * population.values - v.n @ v.values, 0) / n  # (features,)
    names = (*p.regions, REST)
    return replace(
        regions,
        composition=Composition(
            p.groups, names, np.vstack([p.shares, people / people.sum()]), np.append(p.n, n)
        ),
        aggregates=replace(
            v, regions=names, values=np.vstack([v.values, values]), n=np.append(v.n, n)
        ),
        population=None,
    )


def blocks(rows: int, columns: int) -> Iterator[slice]:
    """Slices of rows with at most `BLOCK_CELLS` cells each."""
    step = max(1, BLOCK_CELLS // max(columns, 1))
    return (slice(start, start + step) for start in range(0, rows, step))


def bins_by_map(features: Sequence[str]) -> dict[str, Ints]:
    """The numbers of the bins of each feature map."""
    names = np.array([name.partition(":")[0] for name in features])
    return {name: np.flatnonzero(names == name) for name in dict.fromkeys(names.tolist())}


def mean_over_regions(values: Floats, weight: Floats) -> Floats:
    """The weighted mean (features,) of values (regions, features), ignoring suppressed cells."""
    total = np.zeros(values.shape[1])
    known_weight = np.zeros(values.shape[1])
    for rows in blocks(*values.shape):
        total += weight[rows] @ np.nan_to_num(values[rows])
        known_weight += weight[rows] @ ~np.isnan(values[rows])
    return total / np.maximum(known_weight, 1e-300)


def population_mean(shares: Floats, aggregates: Aggregates) -> tuple[Floats, Floats]:
    """Composition w (groups,) and mean mu0 (features,) of all regions, weighted by people."""
    weight = aggregates.n / aggregates.n.sum()
    return weight @ shares, mean_over_regions(aggregates.values, weight)
