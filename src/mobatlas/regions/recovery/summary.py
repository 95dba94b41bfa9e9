"""Group means as an answer: margins and comparisons, ratios to the average, and verdicts.

A summary compares mixtures a'M of groups with mixtures b'M, such as the population w'M. For each
feature, log M has a Gaussian posterior with covariance C. To first order

    Var log a'M = s'Cs,    Var log (a'M / b'M) = (s - t)'C(s - t)

where s and t are the shares of the groups in a'M and b'M. This is exact for single groups. The
population mean stays as certain as it is, because uncertain differences cancel in it.

A verdict says whether a ratio differs from 1. The procedure of Benjamini and Yekutieli (2001)
controls the expected share of wrong verdicts in each feature map. It is valid however the
estimates depend on each other.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from scipy import special, stats

from mobatlas.data.types import Flags, Floats, Ints
from mobatlas.errors import MobatlasError, refuse_unknown, suggestion
from mobatlas.groups import Groups
from mobatlas.regions.types import Recovery, bins_by_map, blocks

KIND = "recovery"
AVERAGE = "average"
MORE = "more"
LESS = "less"
NOT_SURE = "not sure"
EQUAL = 1e-6  # a smaller standard deviation of a log ratio is a rounding error


@dataclass(frozen=True)
class RecoverySummary:
    """Mean counts per person and window by row and feature, with intervals and verdicts.

    A row is a group, a level of an attribute, or a side of a comparison.

    Attributes
    ----------
    level
        Probability of each interval. At most `1 - level` of the verdicts in a feature map are
        expected to be wrong.
    compared_with
        What the ratio of each row compares with: "average", or the other side of a comparison.
    reference
        The mean counts of the average, or of the other side.
    verdicts
        "more", "less" or "not sure": whether the ratio is above or below 1.
    sources
        Where the information came from: "regions", "labelled people", names of tables and
        "assumption", as shares that sum to 1.
    undistinguished
        Feature map -> attributes whose levels have no verdict; only in a summary by group.

    Examples
    --------
    >>> summary = summarise_recovery(recover(load_regions("regions")), by="age")  # doctest: +SKIP
    >>> summary.as_columns()["verdict"]  # doctest: +SKIP
    """

    level: float
    groups: Groups
    rows: tuple[str, ...]
    compared_with: tuple[str, ...]  # (rows,)
    features: tuple[str, ...]
    value: Floats  # (rows, features)
    low: Floats  # (rows, features)
    high: Floats  # (rows, features)
    reference: Floats  # (rows, features)
    ratio: Floats  # (rows, features); NaN where a side is zero
    ratio_low: Floats  # (rows, features)
    ratio_high: Floats  # (rows, features)
    certainty: Floats  # (rows, features) |log ratio| in standard deviations
    verdicts: npt.NDArray[np.str_]  # (rows, features)
    sources: Mapping[str, Floats]  # (rows, features)
    notes: tuple[str, ...] = ()
    undistinguished: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def is_comparison(self) -> bool:
        """Whether two sides are compared with each other instead of with the average."""
        return AVERAGE not in self.compared_with

    def most_certain(self, feature_map: str, n: int) -> Ints:
        """The n features of a map with the most certain differences, in that order.

        Of equally certain ones, such as places that only borrow from their category, the most
        frequent come first.
        """
        bins = bins_by_map(self.features)[feature_map]
        order = np.lexsort((-self.reference[0, bins], -self.certainty[:, bins].max(0).round(1)))
        return np.asarray(bins[order[:n]])

    def as_columns(self) -> dict[str, list[Any]]:
        """A long table by column name, with a line for each row and feature; None for NaN."""
        cells = {
            "value": self.value,
            "low": self.low,
            "high": self.high,
            "reference": self.reference,
            "ratio": self.ratio,
            "ratio_low": self.ratio_low,
            "ratio_high": self.ratio_high,
            "verdict": self.verdicts,
        } | {f"from_{name.replace(' ', '_')}": share for name, share in self.sources.items()}
        return {
            "group": np.repeat(self.rows, len(self.features)).tolist(),
            "feature": list(self.features) * len(self.rows),
            "compared_with": np.repeat(self.compared_with, len(self.features)).tolist(),
            **{
                # NaN differs from itself.
                name: [cell if cell == cell else None for cell in values.ravel().tolist()]
                for name, values in cells.items()
            },
        }

    def as_dict(self) -> dict[str, Any]:
        """The summary for JSON."""
        columns = self.as_columns()
        return {
            "kind": KIND,
            "level": self.level,
            "verdicts": "Benjamini-Yekutieli: at most this share is expected to be wrong in each "
            "feature map",
            "wrong_verdicts": round(1 - self.level, 9),
            "groups": self.groups.as_dict(),
            "undistinguished": {name: list(each) for name, each in self.undistinguished.items()},
            "notes": list(self.notes),
            "rows": [
                dict(zip(columns, cells, strict=True))
                for cells in zip(*columns.values(), strict=True)
            ],
        }


def summarise_recovery(
    recovery: Recovery,
    *,
    level: float = 0.9,
    by: str | None = None,
    compare: tuple[str, str] | None = None,
    features: Sequence[str] | None = None,
) -> RecoverySummary:
    """Summarise group means: counts per person by group and feature, intervals and verdicts.

    Parameters
    ----------
    recovery
        Estimated group means, as `recover` returns them.
    level
        Probability of each interval. `1 - level` is the largest expected share of wrong verdicts.
    by
        An attribute: summarise its levels instead of groups. A level is the mean of its groups,
        weighted by their shares of the population.
    compare
        Two levels of one attribute, or two groups: compare the first with the second instead of
        with the average.
    features
        Names of feature maps. Default: all.

    Returns
    -------
    RecoverySummary
        Values, ratios, verdicts and sources of information.

    Examples
    --------
    >>> recovery = recover(load_regions("regions"))  # doctest: +SKIP
    >>> women_and_men = summarise_recovery(recovery, compare=("F", "M"))  # doctest: +SKIP
    """
    check_level(level)
    mixtures = Mixtures.of(recovery, by, compare)
    bins = _bins_of_maps(recovery.features, features)
    names = tuple(recovery.features[number] for number in bins.tolist())
    estimate = _Estimate.of(recovery, bins, mixtures, level)
    return RecoverySummary(
        level=level,
        groups=recovery.groups,
        rows=mixtures.names,
        compared_with=mixtures.compared_with,
        features=names,
        value=estimate.value,
        reference=estimate.reference,
        ratio=estimate.ratio,
        **estimate.intervals(),
        certainty=np.abs(estimate.z),
        verdicts=_verdicts(estimate, names),
        sources={
            name: mixtures.weights @ shares[:, bins] for name, shares in recovery.sources.items()
        },
        notes=recovery.notes,
        undistinguished={} if by or compare else _undistinguished(recovery, bins, level),
    )


def check_level(level: float) -> None:
    """Refuse what is not a probability of an interval."""
    if not 0 < level < 1:
        raise MobatlasError(f"level {level:g}: give a probability between 0 and 1, such as 0.9")


def _bins_of_maps(features: Sequence[str], names: Sequence[str] | None) -> Ints:
    """The numbers of the bins of some feature maps, in order."""
    maps = bins_by_map(features)
    for name in names or ():
        if name not in maps:
            raise MobatlasError(
                f"the regions have no feature map '{name}'{suggestion(name, maps)} "
                f"(known: {', '.join(maps)})"
            )
    return np.sort(np.concatenate([maps[name] for name in dict.fromkeys(names or maps)]))


@dataclass(frozen=True)
class Mixtures:
    """Mixtures of groups, and the mixture that each is compared with."""

    names: tuple[str, ...]
    weights: Floats  # (rows, groups), rows sum to 1
    compared_with: tuple[str, ...]
    reference: Floats  # (rows, groups), rows sum to 1

    @classmethod
    def of(
        cls, recovery: Recovery, by: str | None = None, compare: tuple[str, str] | None = None
    ) -> Self:
        """Groups or levels against the average, or either side of a comparison against the other.

        Groups in a mixture have weights in proportion to their people.
        """
        groups = recovery.groups
        if by is not None and compare is not None:
            raise MobatlasError("give either an attribute or two groups to compare, not both")
        if compare is not None:
            sides = _weights(recovery, _sides(groups, *compare))
            return cls(compare, sides, compare[::-1], sides[::-1])
        names: Sequence[str] = groups.names
        weights = np.eye(len(groups))
        if by is not None:
            known = groups.attribute_names
            refuse_unknown(f"attribute '{by}'", by, known)
            names = groups.as_dict()[by]
            codes = groups.level_codes[:, known.index(by)]
            weights = _weights(recovery, codes == np.arange(len(names))[:, None])
        average = np.tile(recovery.shares, (len(names), 1))
        return cls(tuple(names), weights, (AVERAGE,) * len(names), average)


def _sides(groups: Groups, first: str, second: str) -> Flags:
    """The groups of either side of a comparison (2, groups)."""
    if first == second:
        raise MobatlasError(f"'{first}' cannot be compared with itself; name two levels or groups")
    shared = [
        (levels, codes)
        for (_, levels), codes in zip(groups.attributes, groups.level_codes.T, strict=True)
        if {first, second} <= set(levels)
    ]
    if len(shared) > 1:
        raise MobatlasError(
            f"'{first}' and '{second}' are levels of several attributes; compare two groups instead"
        )
    if shared:
        levels, codes = shared[0]
        return np.array([codes == levels.index(name) for name in (first, second)])
    known = {level: name for name, levels in groups.attributes for level in levels}
    if first in known and second in known:
        raise MobatlasError(
            f"'{first}' is a level of {known[first]} and '{second}' of {known[second]}; compare "
            "two levels of one attribute"
        )
    return np.eye(len(groups), dtype=bool)[[groups.index(first), groups.index(second)]]


def _weights(recovery: Recovery, members: Flags) -> Floats:
    """Weights of groups (sets, groups) in proportion to their people; equal if there are none."""
    people = members * recovery.shares
    people = np.where(people.sum(1, keepdims=True) > 0, people, members)
    return np.asarray(people / people.sum(1, keepdims=True))


@dataclass(frozen=True)
class _Estimate:
    """Posterior of mixtures a'M and of their ratios to mixtures b'M."""

    level: float
    value: Floats  # (rows, features) a'M
    reference: Floats  # (rows, features) b'M
    sd: Floats  # (rows, features) of log a'M
    ratio_sd: Floats  # (rows, features) of the log ratio
    seen: Flags  # (rows, features) whether a'M is too large to be zero
    reference_seen: Flags  # (rows, features)

    @classmethod
    def of(cls, recovery: Recovery, bins: Ints, mixtures: Mixtures, level: float) -> Self:
        means = recovery.means[:, bins].T  # (features, groups)
        size = len(mixtures.names) * len(recovery.groups) + len(recovery.groups) ** 2
        parts = [
            _log_sds(means[part], recovery.log_covariance[bins[part]], mixtures)
            for part in blocks(len(bins), size)
        ]
        sd, reference_sd, ratio_sd = (np.concatenate(each).T for each in zip(*parts, strict=True))
        value = mixtures.weights @ means.T
        reference = mixtures.reference @ means.T
        seen, reference_seen = (
            mean * np.exp(-_quantile(level) * error) >= _resolution(recovery, bins, weights)
            for mean, error, weights in (
                (value, sd, mixtures.weights),
                (reference, reference_sd, mixtures.reference),
            )
        )
        return cls(level, value, reference, sd, ratio_sd, seen, reference_seen)

    @property
    def ratio(self) -> Floats:
        """The ratios; NaN where a side is zero."""
        known = (self.value > 0) & (self.reference > 0)
        return np.where(known, self.value / np.where(known, self.reference, 1), np.nan)

    def intervals(self) -> dict[str, Floats]:
        """Lower and upper ends of values and ratios."""
        reach, ratio_reach = (
            np.exp(_quantile(self.level) * error) for error in (self.sd, self.ratio_sd)
        )
        return {
            "low": np.where(self.seen, self.value / reach, 0.0),
            "high": self.value * reach,
            "ratio_low": np.where(self.seen, self.ratio / ratio_reach, 0.0),
            "ratio_high": self.ratio * ratio_reach,
        }

    @property
    def z(self) -> Floats:
        """The log ratios in standard deviations; 0 where a side is zero.

        They are also 0 where the larger side is too small to be told from zero.
        """
        log_ratio = np.log(np.nan_to_num(self.ratio, nan=1.0))
        z = np.where(self.ratio_sd > EQUAL, log_ratio / np.maximum(self.ratio_sd, EQUAL), 0.0)
        return np.where(np.where(z > 0, self.seen, self.reference_seen), z, 0.0)


def _quantile(level: float) -> float:
    """The number of standard deviations of an interval."""
    return float(special.ndtri(0.5 + level / 2))


def _resolution(recovery: Recovery, bins: Ints, weights: Floats) -> Floats:
    """Means (rows, features) with one visit among all observed people of a mixture."""
    if recovery.resolution is None:
        return np.zeros((len(weights), len(bins)))
    people = 1 / np.maximum(recovery.resolution[:, bins], 1e-300)
    return np.asarray(1 / ((weights > 0) @ people))


def _log_sds(
    means: Floats, covariance: Floats, mixtures: Mixtures
) -> tuple[Floats, Floats, Floats]:
    """Standard deviations (features, rows) of log a'M, log b'M and log (a'M / b'M).

    `means` are M (features, groups), and `covariance` (features, groups, groups) that of log M.
    """
    shares, reference = (
        counts / np.maximum(counts.sum(2, keepdims=True), 1e-300)  # (features, rows, groups)
        for counts in (
            weights * means[:, None] for weights in (mixtures.weights, mixtures.reference)
        )
    )
    first, second, ratio = (
        np.sqrt(np.maximum(((each @ covariance) * each).sum(2), 0))
        for each in (shares, reference, shares - reference)
    )
    return first, second, ratio


def _verdicts(estimate: _Estimate, features: Sequence[str]) -> npt.NDArray[np.str_]:
    """Verdicts (rows, features); in each map, at most 1 - level are expected to be wrong."""
    known = np.isfinite(estimate.ratio)
    z = estimate.z
    p = 2 * special.ndtr(-np.abs(z))
    verdicts = np.full(p.shape, NOT_SURE)
    for bins in bins_by_map(features).values():
        tested = np.zeros(p.shape, dtype=bool)
        tested[:, bins] = known[:, bins]
        clear = np.zeros(p.shape, dtype=bool)
        adjusted = stats.false_discovery_control(p[tested], method="by")
        clear[tested] = adjusted <= 1 - estimate.level
        verdicts[clear] = np.where(z[clear] > 0, MORE, LESS)
    return verdicts


def _undistinguished(recovery: Recovery, bins: Ints, level: float) -> dict[str, tuple[str, ...]]:
    """Feature map -> attributes with several levels, none of which differs from the average."""
    names = [recovery.features[number] for number in bins.tolist()]
    maps = bins_by_map(names)
    unclear: dict[str, tuple[str, ...]] = dict.fromkeys(maps, ())
    for attribute, levels in recovery.groups.attributes:
        if len(levels) > 1:
            estimate = _Estimate.of(recovery, bins, Mixtures.of(recovery, attribute), level)
            verdicts = _verdicts(estimate, names)
            for name, own in maps.items():
                if (verdicts[:, own] == NOT_SURE).all():
                    unclear[name] += (attribute,)
    return unclear
