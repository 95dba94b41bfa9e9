"""Group means as an answer: margins and contrasts, ratios to the average, and verdicts.

The posterior of the group means of a feature is lognormal. A summary compares mixtures a'M of
groups with a reference b'M. Both are approximated by lognormal variables with the same means,
variances and covariance (Fenton-Wilkinson), which is exact for single groups.

A verdict says whether a ratio differs from 1. The procedure of Benjamini and Yekutieli (2001)
controls the expected share of wrong verdicts in each feature map. It is valid however the
estimates depend on each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import special

from mobatlas.data.arrays import Flags, Floats, Ints
from mobatlas.errors import MobatlasError, suggestion
from mobatlas.groups import Groups
from mobatlas.regions.types import Recovery, bins_by_map, blocks

AVERAGE = "average"
MORE = "more"
LESS = "less"
NOT_SURE = "not sure"
EQUAL = 1e-6  # a smaller standard deviation of a log ratio is a rounding error


@dataclass(frozen=True)
class RecoverySummary:
    """Mean counts per person and window by row and feature, with intervals and verdicts.

    A row is a group, a level of an attribute, or the first side of a comparison.

    Attributes
    ----------
    level
        Probability of each interval. At most `1 - level` of the verdicts in a feature map are
        expected to be wrong.
    compared_with
        What ratios compare with: "average", or the second side of a comparison.
    reference
        The mean counts of the average or of the second side.
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
    compared_with: str
    features: tuple[str, ...]
    value: Floats  # (rows, features)
    low: Floats  # (rows, features)
    high: Floats  # (rows, features)
    reference: Floats  # (features,)
    ratio: Floats  # (rows, features); NaN where a side is zero
    ratio_low: Floats  # (rows, features)
    ratio_high: Floats  # (rows, features)
    certainty: Floats  # (rows, features) |log ratio| in standard deviations
    verdicts: npt.NDArray[np.str_]  # (rows, features)
    sources: Mapping[str, Floats]  # (rows, features)
    notes: tuple[str, ...] = ()
    undistinguished: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def most_certain(self, feature_map: str, n: int) -> Ints:
        """The n features of a map with the most certain differences, in that order."""
        bins = bins_by_map(self.features)[feature_map]
        best = self.certainty[:, bins].max(0)
        return np.asarray(bins[np.argsort(-best, kind="stable")[:n]])

    def as_columns(self) -> dict[str, list[Any]]:
        """A long table by column name, with a line for each row and feature."""
        rows = np.repeat(np.array(self.rows), len(self.features))
        cells = {
            "value": self.value,
            "low": self.low,
            "high": self.high,
            "reference": np.broadcast_to(self.reference, self.value.shape),
            "ratio": self.ratio,
            "ratio_low": self.ratio_low,
            "ratio_high": self.ratio_high,
            "verdict": self.verdicts,
        } | {f"from_{name.replace(' ', '_')}": share for name, share in self.sources.items()}
        return {
            "group": rows.tolist(),
            "feature": list(self.features) * len(self.rows),
            "compared_with": [self.compared_with] * len(rows),
            **{name: values.ravel().tolist() for name, values in cells.items()},
        }

    def as_dict(self) -> dict[str, Any]:
        """The summary for JSON, with null for unknown ratios."""
        columns = {
            name: [None if isinstance(cell, float) and np.isnan(cell) else cell for cell in cells]
            for name, cells in self.as_columns().items()
        }
        return {
            "level": self.level,
            "verdicts": "Benjamini-Yekutieli: expected share of wrong verdicts in a feature map at "
            f"most {1 - self.level:.6g}",
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
    if not 0 < level < 1:
        raise MobatlasError(f"level {level:g}: give a probability between 0 and 1, such as 0.9")
    if by is not None and compare is not None:
        raise MobatlasError("give either an attribute or two groups to compare, not both")
    mixtures = _mixtures(recovery, by, compare)
    bins = _bins_of_maps(recovery.features, features)
    names = tuple(recovery.features[number] for number in bins.tolist())
    estimate = _Estimate.of(recovery, bins, mixtures)
    z = float(special.ndtri(0.5 + level / 2))
    spread = z * np.sqrt(estimate.variance)
    ratio_spread = z * np.sqrt(estimate.ratio_variance)
    by_group = by is None and compare is None
    return RecoverySummary(
        level=level,
        groups=recovery.groups,
        rows=mixtures.names,
        compared_with=mixtures.compared_with,
        features=names,
        value=estimate.value,
        low=np.exp(estimate.median - spread),
        high=np.exp(estimate.median + spread),
        reference=estimate.reference,
        ratio=estimate.ratio,
        ratio_low=np.exp(estimate.ratio_median - ratio_spread),
        ratio_high=np.exp(estimate.ratio_median + ratio_spread),
        certainty=np.abs(estimate.z),
        verdicts=_verdicts(estimate, names, 1 - level),
        sources={
            # Both sides of a comparison count alike.
            name: mixtures.evidence_weights @ shares[:, bins]
            for name, shares in recovery.sources.items()
        },
        notes=recovery.notes,
        undistinguished=_undistinguished(recovery, bins, 1 - level) if by_group else {},
    )


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
class _Mixtures:
    """Mixtures of groups, and the mixture that they are compared with."""

    names: tuple[str, ...]
    weights: Floats  # (rows, groups), rows sum to 1
    compared_with: str
    reference: Floats  # (groups,), sums to 1

    @property
    def evidence_weights(self) -> Floats:
        """Weights of the groups whose evidence counts (rows, groups)."""
        return (
            self.weights if self.compared_with == AVERAGE else (self.weights + self.reference) / 2
        )


def _mixtures(recovery: Recovery, by: str | None, compare: tuple[str, str] | None) -> _Mixtures:
    """Groups or levels against the average, or one side of a comparison against the other."""
    groups = recovery.groups
    if compare is not None:
        first, second = _weights(recovery, _sides(groups, *compare))
        return _Mixtures(compare[:1], first[None], compare[1], second)
    if by is None:
        return _Mixtures(groups.names, np.eye(len(groups)), AVERAGE, recovery.shares)
    known = groups.attribute_names
    if by not in known:
        raise MobatlasError(
            f"attribute '{by}' does not exist{suggestion(by, known)} (known: {', '.join(known)})"
        )
    levels = groups.as_dict()[by]
    members = groups.level_codes[:, known.index(by)] == np.arange(len(levels))[:, None]
    return _Mixtures(tuple(levels), _weights(recovery, members), AVERAGE, recovery.shares)


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
    """Posterior of mixtures a'M and of their ratio to the reference b'M.

    Medians and variances are those of logarithms.
    """

    value: Floats  # (rows, features) mean
    reference: Floats  # (features,) mean
    median: Floats  # (rows, features)
    variance: Floats  # (rows, features)
    ratio_median: Floats  # (rows, features)
    ratio_variance: Floats  # (rows, features)

    @classmethod
    def of(cls, recovery: Recovery, bins: Ints, mixtures: _Mixtures) -> _Estimate:
        low, high = recovery.interval()
        with np.errstate(divide="ignore", invalid="ignore"):  # a bin may be zero for everyone
            medians = (np.log(low) + np.log(high))[:, bins].T / 2  # (features, groups)
            size = max(len(mixtures.names), len(recovery.groups))
            parts = [
                _log_moments(medians[part], recovery.log_covariance[bins[part]], mixtures)
                for part in blocks(len(bins), size**2)
            ]
        moments = [np.concatenate(each).T for each in zip(*parts, strict=True)]
        means = recovery.means[:, bins]
        return cls(mixtures.weights @ means, mixtures.reference @ means, *moments)

    @property
    def ratio(self) -> Floats:
        """The ratio of the means; NaN where a side is zero."""
        reference = np.where(self.reference > 0, self.reference, np.nan)
        return np.where(np.isfinite(self.ratio_median), self.value / reference, np.nan)

    @property
    def z(self) -> Floats:
        """The logarithm of the ratio in standard deviations; 0 where it is not known."""
        sd = np.sqrt(self.ratio_variance)
        return np.where(sd > EQUAL, self.ratio_median / np.maximum(sd, EQUAL), 0.0)


def _log_moments(
    medians: Floats, covariance: Floats, mixtures: _Mixtures
) -> tuple[Floats, Floats, Floats, Floats]:
    """Medians and variances (features, rows) of log a'M and of log (a'M / b'M).

    `medians` (features, groups) and `covariance` (features, groups, groups) are those of log M.
    """
    means = np.exp(medians + np.diagonal(covariance, axis1=1, axis2=2) / 2)
    relative = np.expm1(covariance)  # covariance of M / mean
    totals = [means @ weights.T for weights in (mixtures.weights, mixtures.reference[None])]
    rows, reference = (
        weights * means[:, None] / total[:, :, None]  # (features, mixtures, groups)
        for weights, total in zip((mixtures.weights, mixtures.reference[None]), totals, strict=True)
    )
    weighted = rows @ relative
    variance = np.log1p((weighted * rows).sum(2))
    with_reference = np.log1p((weighted * reference).sum(2))
    reference_variance = np.log1p(((reference @ relative) * reference).sum(2))
    median = np.log(totals[0]) - variance / 2
    return (
        median,
        variance,
        median - np.log(totals[1]) + reference_variance / 2,
        np.maximum(variance + reference_variance - 2 * with_reference, 0),
    )


def _verdicts(estimate: _Estimate, features: Sequence[str], wrong: float) -> npt.NDArray[np.str_]:
    """Verdicts (rows, features); at most the share `wrong` of each map is expected to be wrong."""
    known = np.isfinite(estimate.ratio_median)
    direction = np.where(estimate.z > 0, MORE, LESS)
    p = 2 * special.ndtr(-np.abs(estimate.z))
    verdicts = np.full(p.shape, NOT_SURE)
    for bins in bins_by_map(features).values():
        in_map = np.zeros(p.shape, dtype=bool)
        in_map[:, bins] = known[:, bins]
        clear = np.zeros(p.shape, dtype=bool)
        clear[in_map] = _discoveries(p[in_map], wrong)
        verdicts[clear] = direction[clear]
    return verdicts


def _discoveries(p: Floats, wrong: float) -> Flags:
    """Which p-values are significant at a false discovery rate (Benjamini and Yekutieli)."""
    rank = np.arange(1, len(p) + 1)
    ordered = np.sort(p)
    passed = np.flatnonzero(ordered <= wrong * rank / (len(p) * (1 / rank).sum()))
    return p <= ordered[passed[-1]] if len(passed) else np.zeros(len(p), dtype=bool)


def _undistinguished(recovery: Recovery, bins: Ints, wrong: float) -> dict[str, tuple[str, ...]]:
    """Feature map -> attributes with several levels, none of which differs from the average."""
    names = [recovery.features[number] for number in bins.tolist()]
    maps = bins_by_map(names)
    unclear: dict[str, tuple[str, ...]] = dict.fromkeys(maps, ())
    for attribute, levels in recovery.groups.attributes:
        if len(levels) > 1:
            estimate = _Estimate.of(recovery, bins, _mixtures(recovery, attribute, None))
            verdicts = _verdicts(estimate, names, wrong)
            for name, own in maps.items():
                if (verdicts[:, own] == NOT_SURE).all():
                    unclear[name] += (attribute,)
    return unclear
