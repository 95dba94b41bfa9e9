"""What further evidence would help most: expected intervals after hypothetical observations.

A mean over n people of group d measures one element of log M, with the gradient h = e_d. If C is
the present covariance of log M, rows H of labelled people lead to

    C' = C - C H' (H C H' + R)^-1 H C,   R = diag(E[phi / (n m)]) + level

Regions measure b + c with contextual slopes c ~ N(0, K_c). Their information W on b + c is

    (I + W K_c)^-1 W

on b, and a change of regions adds the difference. None of this depends on values that nobody has
seen yet. Places have the error of their category and their own, as in recovery.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from scipy import special

from mobatlas.data.types import Floats, Ints
from mobatlas.errors import MobatlasError
from mobatlas.features.maps import FEATURES
from mobatlas.groups import Groups
from mobatlas.regions.recovery.composition_error import CompositionError
from mobatlas.regions.recovery.joint_posterior import LEVEL_SD
from mobatlas.regions.recovery.map_model import SURFACE_SD, RegionRows
from mobatlas.regions.recovery.posterior import effective_information
from mobatlas.regions.recovery.recover import (
    DEFAULT_OPTIONS,
    FittedMap,
    RecoveryOptions,
    fit_maps,
)
from mobatlas.regions.recovery.solver import Observed, Rows, find_modes, information, link_slope
from mobatlas.regions.recovery.summary import check_level
from mobatlas.regions.types import Recovery, Regions, bins_by_map

KIND = "plan"
CHOSEN = "chosen by group"
SMALL = 0.005  # a smaller gain does not justify choosing
BUDGET = 200  # people of a small survey
LARGEST = 1_000_000  # people
SMALLEST = 2  # one labelled person has no variance
BINS = (24, 300)  # the least and the greatest number of bins of a map that are computed
CELLS = 400_000  # bins x groups x groups
REGION_CELLS = 1_500_000  # bins x regions
HALVINGS = (1, 2)  # of all regions
STEPS = 60  # of the search for the best allocation
SEED = 0  # of the regions that others are split like
NEGLIGIBLE = 1e-12


@dataclass(frozen=True)
class Action:
    """Evidence that could be added, and the intervals that are expected then."""

    name: str
    kind: str  # labelled people or smaller regions
    people: int | None  # of the budget; None: the budget does not say what it costs
    assumption: str
    half_widths: Mapping[str, float]  # group -> mean half-width
    maps: Mapping[str, float]  # feature map -> mean over groups
    reduction: float  # share of the mean half-width of groups
    allocation: Mapping[str, int]  # group -> people to label; empty: at random


@dataclass(frozen=True)
class EvidencePlan:
    """What would help most, most helpful action first.

    Half-widths are those of log ratios to the average: a ratio of 1 has the interval from
    exp(-h) to exp(h). They are means over features, weighted by visits.

    Attributes
    ----------
    now
        Group -> half-width with the present evidence.
    maps
        Feature map -> mean half-width over groups.
    actions
        What could be done.
    uninformed
        Feature maps that the regions do not cover.
    left_out
        Why some actions are not considered.

    Examples
    --------
    >>> plan = plan_evidence(load_regions("regions"), budget=400)  # doctest: +SKIP
    >>> plan.actions[0].name  # doctest: +SKIP
    'label 400 people, chosen by group'
    """

    level: float
    budget: int
    groups: Groups
    features: Mapping[str, int]  # feature map -> bins
    now: Mapping[str, float]
    maps: Mapping[str, float]
    actions: tuple[Action, ...]
    uninformed: tuple[str, ...]
    left_out: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """The plan for JSON, with intervals of a ratio of 1."""
        return {
            "kind": KIND,
            "level": self.level,
            "budget": self.budget,
            "groups": self.groups.as_dict(),
            "features": dict(self.features),
            "now": _intervals(self.now, self.maps),
            "actions": [
                {
                    "action": each.name,
                    "kind": each.kind,
                    "people": each.people,
                    "allocation": dict(each.allocation),
                    "assumption": each.assumption,
                    "reduction": each.reduction,
                    "expected": _intervals(each.half_widths, each.maps),
                }
                for each in self.actions
            ],
            "uninformed": list(self.uninformed),
            "left_out": list(self.left_out),
        }


def ends(half_width: float) -> tuple[float, float]:
    """The interval of a ratio of 1."""
    return float(np.exp(-half_width)), float(np.exp(half_width))


def mean_of(groups: Mapping[str, float]) -> float:
    """The mean over groups."""
    return float(np.mean(list(groups.values())))


def _intervals(groups: Mapping[str, float], maps: Mapping[str, float]) -> dict[str, Any]:
    return {
        "mean": ends(mean_of(groups)),
        "groups": {name: ends(half) for name, half in groups.items()},
        "feature_maps": {name: ends(half) for name, half in maps.items()},
    }


def plan_evidence(
    regions: Regions,
    budget: int = BUDGET,
    *,
    level: float = 0.9,
    options: RecoveryOptions = DEFAULT_OPTIONS,
) -> EvidencePlan:
    """Compare what further evidence would do to the intervals of group means.

    Parameters
    ----------
    regions
        The present evidence, as `load_regions` returns it.
    budget
        People who could be labelled. The default is a small survey.
    level
        Probability of each interval.
    options
        Assumptions of the recovery.

    Returns
    -------
    EvidencePlan
        Actions with their expected intervals.

    Examples
    --------
    >>> plan_evidence(load_regions("regions")).actions[0].reduction  # doctest: +SKIP
    0.42
    """
    groups = regions.groups
    if len(groups) == 1:
        raise MobatlasError("there is only one group: no evidence could distinguish it from others")
    check_level(level)
    if not SMALLEST <= budget <= LARGEST:
        raise MobatlasError(
            f"--budget {budget}: give a number of people from {SMALLEST} to {LARGEST:,}"
        )
    recovery, maps = fit_maps(regions, options)
    present = _Present.of(recovery, maps, regions.aggregates.features, level)
    now = present.half_widths(lambda layer: layer.covariance)
    planner = _Planner(present, budget, recovery.shares, now)
    actions = [*planner.labelled(), *planner.regions(regions)]
    # Of equally helpful actions, the simpler one comes first.
    actions.sort(key=lambda each: each.name.endswith(CHOSEN) * SMALL - each.reduction)
    features = {name: len(bins) for name, bins in bins_by_map(regions.aggregates.features).items()}
    return EvidencePlan(
        level=level,
        budget=budget,
        groups=groups,
        features=features,
        now=present.by_group(now),
        maps=present.by_map(now),
        actions=tuple(actions),
        uninformed=_uninformed(features, regions),
        left_out=_left_out(regions),
    )


def _uninformed(features: Mapping[str, int], regions: Regions) -> tuple[str, ...]:
    """Feature maps that the regions do not cover, not even as the sums of their parts."""
    informed = {*features, *(name.partition(":")[0] for name in regions.parents.values())}
    return tuple(
        name for name, each in FEATURES.items() if each.build is not None and name not in informed
    )


def _left_out(regions: Regions) -> tuple[str, ...]:
    """Why some actions are missing."""
    if regions.aggregates.noise is not None:
        return ("other regions, because their published noise is not known",)
    if len(regions.composition.regions) < 2:
        return ("smaller regions, because one region does not show how its parts would differ",)
    return ()


@dataclass(frozen=True)
class _Layer:
    """Some bins of a feature map, with the present errors that their parents do not have."""

    fitted: FittedMap
    bins: Ints  # positions in the fitted map
    numbers: Ints  # of the features
    parent: Ints  # (bins,) numbers of features, -1 for none
    weight: Floats  # (bins,) visits that each bin stands for; 0: only a parent
    means: Floats  # M (bins, groups)
    covariance: Floats  # C of log M (bins, groups, groups), without that of the parent
    contrasts: Floats  # (bins, groups, groups) of log ratios of each group to the average

    @property
    def dispersion(self) -> Floats:
        return self.fitted.model.regions.dispersion[self.bins]

    def observe(self, n: Floats) -> Floats:
        """C' after labelling n (groups,) people."""
        chosen = np.flatnonzero(n > 0)
        hc = self.covariance[:, chosen]  # (bins, rows, groups)
        inner = hc[:, :, chosen]  # (bins, rows, rows)
        means = np.maximum(self.means[:, chosen], NEGLIGIBLE)
        variance = self.dispersion[:, None] / (n[chosen] * means)  # (bins, rows)
        # The expected variance: a mean is uncertain, so its inverse is larger on average.
        variance = variance * np.exp(np.clip(np.diagonal(inner, axis1=1, axis2=2), 0, 1) / 2)
        inner = inner + variance[:, :, None] * np.eye(len(chosen)) + LEVEL_SD[True] ** 2
        return np.asarray(self.covariance - np.swapaxes(hc, 1, 2) @ np.linalg.solve(inner, hc))

    def inform(self, more: Floats) -> Floats:
        """C' after more information on log M (bins, groups, groups)."""
        inner = np.eye(self.means.shape[1]) + self.covariance @ more
        then = np.linalg.solve(inner, self.covariance)
        return np.asarray((then + np.swapaxes(then, 1, 2)) / 2)

    @cached_property
    def region_rows(self) -> RegionRows:
        return self.fitted.model.regions.select(self.bins)

    @cached_property
    def _mode(self) -> Floats:
        """Where regions alone are most likely: what they show, and the surface (bins, ...)."""
        rows = self.region_rows
        root = self.fitted.model.region_root(self._shown)
        observed = Observed(rows.values, self._weight(rows), rows.centre)
        return find_modes(Rows(rows.shares, rows.surface), observed, root).mode

    @property
    def _shown(self) -> Floats:
        return self.fitted.model.factors.covariance(self.fitted.slopes.shown())

    def _weight(self, rows: RegionRows) -> Floats:
        return rows.weight(self.fitted.slopes.effect, self._shown)

    @cached_property
    def present_information(self) -> Floats:
        """The information of the present regions."""
        return self.region_information(self.region_rows)

    def region_information(self, rows: RegionRows) -> Floats:
        """The information (bins, groups, groups) of regions on log M."""
        d = self.means.shape[1]
        observed = Observed(rows.values, self._weight(rows), rows.centre)
        w = information(Rows(rows.shares, rows.surface), observed, self._mode)
        slope = np.ones_like(self._mode)
        slope[:, :d] = link_slope(self._mode[:, :d])
        w = w / (slope[:, :, None] * slope[:, None])
        factors = self.fitted.model.factors
        sd = [self.fitted.variances.get(f"contextual_sd_{name}", 0.0) for name in factors.names]
        context = factors.covariance(np.square(sd))
        surface = np.full(w.shape[1] - d, SURFACE_SD**2)
        w = effective_information(w, slice(0, d), surface, context)
        doubt = 0.0 if self.fitted.model.direct else self.fitted.slopes.doubt
        return np.asarray((1 - doubt) * (w + np.swapaxes(w, 1, 2)) / 2)


@dataclass(frozen=True)
class _Present:
    """The present estimate of the features that are computed."""

    layers: Sequence[_Layer]  # parents come first
    groups: Groups
    weight: Floats  # (groups,) of each group in the mean over those that the population has
    quantile: float

    @classmethod
    def of(
        cls, recovery: Recovery, maps: Sequence[FittedMap], features: Sequence[str], level: float
    ) -> Self:
        """Choose bins in proportion to their visits, and the features they are part of."""
        groups = recovery.groups
        layers: list[_Layer] = []
        needed: set[int] = set()
        for each in reversed(maps):  # children first
            own = each.bins < len(features)
            most = min(CELLS // len(groups) ** 2, REGION_CELLS // len(each.model.regions.n))
            visits = np.where(own, recovery.baseline[each.bins], 0.0)
            weight = _sample(visits, int(np.clip(most, *BINS)))
            chosen = np.flatnonzero((weight > 0) | np.isin(each.bins, list(needed)))
            needed |= set(each.parent[chosen].tolist())
            layers.insert(0, _layer(recovery, each, chosen, weight[chosen]))
        present = recovery.shares > 0
        return cls(layers, groups, present / present.sum(), float(special.ndtri(0.5 + level / 2)))

    @cached_property
    def position(self) -> Mapping[int, int]:
        """The position of each feature among all that are computed."""
        numbers = np.concatenate([layer.numbers for layer in self.layers])
        return {number: place for place, number in enumerate(numbers.tolist())}

    def parents(self, layer: _Layer) -> tuple[Ints, Ints]:
        """The bins with a parent, and the positions of their parents."""
        nested = np.flatnonzero(layer.parent >= 0)
        places = [self.position[number] for number in layer.parent[nested].tolist()]
        return nested, np.array(places, dtype=np.int64)

    def half_widths(self, change: Callable[[_Layer], Floats]) -> Floats:
        """Mean half-widths (maps, groups) if `change` gives the covariance of each layer."""
        d = len(self.groups)
        total = np.zeros((len(self.position), d, d))
        widths = np.zeros((len(self.layers), d))
        for number, layer in enumerate(self.layers):
            covariance = change(layer).copy()
            nested, parents = self.parents(layer)
            covariance[nested] += total[parents]
            total[[self.position[each] for each in layer.numbers.tolist()]] = covariance
            sd = self.quantile * np.sqrt(_along(layer.contrasts, covariance))
            widths[number] = layer.weight @ sd / max(layer.weight.sum(), NEGLIGIBLE)
        return widths

    @property
    def visits(self) -> Floats:
        """The share (maps,) of visits."""
        visits = np.array([layer.weight.sum() for layer in self.layers])
        return np.asarray(visits / visits.sum())

    def by_group(self, widths: Floats) -> dict[str, float]:
        """Means over maps, of the groups that the population has."""
        means = (self.visits @ widths).tolist()
        return {
            name: mean
            for name, mean, weight in zip(self.groups.names, means, self.weight, strict=True)
            if weight
        }

    def by_map(self, widths: Floats) -> dict[str, float]:
        """Means over groups."""
        return {
            layer.fitted.name: float(each @ self.weight)
            for layer, each in zip(self.layers, widths, strict=True)
            if layer.weight.any()
        }


def _sample(visits: Floats, size: int) -> Floats:
    """Weights (bins,) of bins that are chosen in proportion to their visits; 0: not chosen."""
    if (visits > 0).sum() <= size:
        return visits
    order = np.argsort(-visits, kind="stable")
    marks = (np.arange(size) + 0.5) / size * visits.sum()
    chosen = order[np.searchsorted(np.cumsum(visits[order]), marks)]
    return np.bincount(chosen, minlength=len(visits)) * visits.sum() / size


def _layer(recovery: Recovery, fitted: FittedMap, chosen: Ints, weight: Floats) -> _Layer:
    numbers = fitted.bins[chosen]
    parent = fitted.parent[chosen]
    covariance = recovery.log_covariance[numbers]
    inherited = np.where((parent >= 0)[:, None, None], recovery.log_covariance[parent], 0)
    means = recovery.means[:, numbers].T
    average = recovery.shares * means
    average = average / np.maximum(average.sum(1, keepdims=True), NEGLIGIBLE)
    contrasts = np.eye(means.shape[1]) - average[:, None]
    return _Layer(fitted, chosen, numbers, parent, weight, means, covariance - inherited, contrasts)


def _along(contrasts: Floats, covariance: npt.NDArray[Any]) -> Floats:
    """Variances (bins, rows) of contrasts (bins, rows, groups)."""
    along = ((contrasts @ covariance) * contrasts).sum(2)
    return np.asarray(np.maximum(along, 0), dtype=np.float64)


@dataclass(frozen=True)
class _Planner:
    """The actions that a budget allows."""

    present: _Present
    budget: int
    population: Floats  # w (groups,)
    now: Floats  # the present half-widths (maps, groups)

    def _action(
        self,
        name: str,
        kind: str,
        people: int | None,
        assumption: str,
        change: Callable[[_Layer], Floats],
        allocation: Mapping[str, int] | None = None,
    ) -> Action:
        """An action with the half-widths to expect; `change` gives the covariance of a layer."""
        then = self.present.half_widths(change)
        return Action(
            name,
            kind,
            people,
            assumption,
            self.present.by_group(then),
            self.present.by_map(then),
            1 - self.mean(then) / max(self.mean(self.now), NEGLIGIBLE),
            allocation or {},
        )

    def mean(self, widths: Floats) -> float:
        """The mean half-width of groups."""
        return float(self.present.visits @ widths @ self.present.weight)

    def labelled(self) -> list[Action]:
        """Labelled people: at random, and the best number of each group."""
        size = f"label {self.budget:,} people"
        at_random = self._label(f"{size} at random", self._spread(self.population))
        return [replace(at_random, allocation={}), self._label(f"{size}, {CHOSEN}", self._best())]

    def _spread(self, weights: Any) -> Floats:
        """The budget in proportion to weights (groups,)."""
        return np.asarray(self.budget * weights / weights.sum(), dtype=np.float64)

    def _label(self, name: str, n: Floats) -> Action:
        whole = np.floor(n).astype(np.int64)
        whole[np.argsort(whole - n, kind="stable")[: round(n.sum()) - whole.sum()]] += 1
        return self._action(
            name,
            "labelled people",
            self.budget,
            "they behave as others of their group do",
            lambda layer: layer.observe(n),
            {
                group: count
                for group, count in zip(self.present.groups.names, whole.tolist(), strict=True)
                if count
            },
        )

    def _width_of(self, n: Floats) -> float:
        return self.mean(self.present.half_widths(lambda layer: layer.observe(n)))

    def _best(self) -> Floats:
        """The allocation (groups,) with the least mean half-width, by multiplicative steps.

        The mean is convex in the allocation.
        """
        n = self._spread(self.population > 0)
        best = (self._width_of(n), n)
        for _ in range(STEPS):
            n = self._spread(n * np.sqrt(np.maximum(self._gain_per_person(n), NEGLIGIBLE)))
            best = min(best, (self._width_of(n), n), key=lambda each: each[0])
        return best[1]

    def _gain_per_person(self, n: Floats) -> Floats:
        """How much one more person of each group (groups,) narrows the mean."""
        present = self.present
        d = len(n)
        total = np.zeros((len(present.position), d, d))
        lifts = np.zeros_like(total)  # sqrt(information of a person) x C' h
        gain = np.zeros(d)
        for layer, visits in zip(present.layers, present.visits, strict=True):
            extended = np.zeros((len(layer.bins), d + 1, d + 1))  # groups and level
            extended[:, :d, :d] = layer.covariance
            extended[:, d, d] = LEVEL_SD[True] ** 2
            h = np.hstack([np.eye(d), np.ones((d, 1))])  # (groups, groups + 1)
            person = layer.means / layer.dispersion[:, None]  # (bins, groups)
            w = np.swapaxes((person * n)[:, :, None] * h, 1, 2) @ h
            then = np.linalg.solve(np.eye(d + 1) + extended @ w, extended)
            lift = (then @ h.T)[:, :d] * np.sqrt(person)[:, None]
            places = [present.position[each] for each in layer.numbers.tolist()]
            nested, parents = present.parents(layer)
            covariance = then[:, :d, :d].copy()
            covariance[nested] += total[parents]
            total[places] = covariance
            lifts[places] = lift
            sd = np.sqrt(np.maximum(_along(layer.contrasts, covariance), NEGLIGIBLE))
            change = (layer.contrasts @ lift) ** 2  # (bins, rows, groups)
            change[nested] += (layer.contrasts[nested] @ lifts[parents]) ** 2
            share = layer.weight / max(layer.weight.sum(), NEGLIGIBLE)
            weight = visits * share[:, None] * present.weight
            gain += np.einsum("jr,jra->a", weight / sd, change) / 2
        return gain

    def regions(self, regions: Regions) -> list[Action]:
        """Smaller regions."""
        if _left_out(regions):
            return []
        return [
            self._action(
                f"divide each region into {2**n}",
                "smaller regions",
                None,
                "parts of a region differ as much as regions do, in composition and otherwise, "
                "and have the same people together",
                _other_regions(partial(_split, n)),
            )
            for n in HALVINGS
        ]


def _other_regions(alter: Callable[[RegionRows], RegionRows]) -> Callable[[_Layer], Floats]:
    """What other regions do to the covariance of a layer."""

    def change(layer: _Layer) -> Floats:
        more = layer.region_information(alter(layer.region_rows)) - layer.present_information
        values, vectors = np.linalg.eigh(more)
        # No information is lost, because parts of regions can be merged again.
        more = (vectors * np.maximum(values, 0)[:, None]) @ np.swapaxes(vectors, 1, 2)
        return layer.inform(more)

    return change


def _split(halvings: int, rows: RegionRows) -> RegionRows:
    """Regions that are divided into halves, some times in a row."""
    rng = np.random.default_rng(SEED)
    differences = rows.shares - (rows.n / rows.n.sum()) @ rows.shares  # between regions
    for _ in range(halvings):
        rows = _halves(rows, differences[rng.integers(len(differences), size=len(rows.n))])
    return rows


def _halves(rows: RegionRows, difference: Floats) -> RegionRows:
    """Both parts of each region, which differ from it by plus and minus a difference."""
    p = rows.shares
    relative = np.divide(difference, p, out=np.zeros_like(p), where=p > 0)
    first = p * (1 + np.clip(relative, -1, 1)) / 2  # of the people of the region
    people = np.vstack([first, p - first])
    size = np.maximum(people.sum(1), NEGLIGIBLE)
    error = rows.error
    if error is not None:  # with half the people behind each count
        error = CompositionError(error.axes, np.vstack([2 * error.variance] * 2))
    return replace(
        rows,
        shares=people / size[:, None],
        n=np.maximum(np.concatenate([rows.n, rows.n]) * size, NEGLIGIBLE),
        surface=np.vstack([rows.surface, rows.surface]),
        error=error,
        published=np.hstack([rows.published, rows.published]),
    )
