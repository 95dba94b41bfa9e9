"""Identifiability: which differences between groups the regions can distinguish.

Singular values, ranks, the paper's bounds, contrasts and proposals for better regions (Section
"Theoretical Foundation" of the paper).
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from pydantic_core import to_json

from mobatlas.data.types import Floats
from mobatlas.errors import MobatlasError
from mobatlas.features.maps import FEATURES
from mobatlas.groups import Groups
from mobatlas.regions.types import (
    Aggregates,
    Composition,
    GroupEvidence,
    Population,
    Regions,
    bins_by_map,
    blocks,
    population_mean,
    with_rest,
)

RANK_TOLERANCE = 1e-6  # of the largest singular value: published shares have six decimals
IDENTIFIED = 0.9  # share of a contrast's square in directions with signal above noise
PARTLY = 0.5
SHARES_BOUND = 1.0  # the largest norm of shares
TYPICAL_SHARE = 0.05  # of visits at a typical place, if there are no aggregates
TYPICAL_VISITS = 10.0  # per window
HOT_SHARE = 0.85  # of one group in a proposed region
HALF_WIDTH = 1.645  # of a 90 % interval, in standard errors
MERGE_BLOCK = 4_096  # regions compared pairwise at once: more would take minutes


@dataclass(frozen=True)
class Contrast:
    """A difference between groups, and how well the regions identify it."""

    name: str
    kind: str  # attribute, level or group
    verdict: str  # identified, partly identified, not identified
    share_identified: float
    standard_error: float  # in standard deviations between people; infinite if not identified
    share_error: float  # the same for the share of visits of a bin
    evidence: str = "these regions"  # what identifies it

    @property
    def identified(self) -> bool:
        return self.verdict == "identified"

    def sentence(self) -> str:
        """The contrast in words and numbers."""
        if self.verdict == "not identified":
            return f"{self.name}: not identified by {self.evidence}"
        hedge = "" if self.identified else ", partly identified"
        half_width = HALF_WIDTH * self.share_error
        return f"{self.name}: ± {half_width:.3f} of the visits (90 % interval){hedge}"


@dataclass(frozen=True)
class Proposal:
    """A change of regions that would help."""

    action: str
    sigma_min: float
    effective_rank: int


@dataclass(frozen=True)
class Bounds:
    """The paper's finite-sample bound on |M_hat - M|_F, for features with |phi| <= B.

    B is the largest norm of the counts of a person. Where these counts are not known, the features
    are shares, and B is 1.
    """

    delta: float
    feature_bound: float  # B
    of_shares: bool  # whether the bound is for shares instead of counts
    features: int  # m
    n_min: float
    sampling_error: float  # epsilon_samp
    finite_sample: float  # Lemma "Finite Sample Error Bound"

    def overall(self, optimisation_error: float) -> float:
        """Theorem "Overall bound", given the remaining |V_theta - V_hat|_F of the fit."""
        if not self.sampling_error:
            return float("inf")
        return self.finite_sample * (1 + optimisation_error / self.sampling_error)


@dataclass(frozen=True)
class Diagnosis:
    """The differences between groups that P and n identify.

    Examples
    --------
    >>> diagnosis = diagnose(read_composition("census.csv"), n=500)  # doctest: +SKIP
    >>> [each.sentence() for each in diagnosis.contrasts]  # doctest: +SKIP
    """

    groups: tuple[str, ...]
    regions: int
    people: tuple[float, float, float]  # smallest, median, largest region
    singular_values: tuple[float, ...]
    sigma_min: float
    rank: int
    effective_rank: int
    condition_number: float
    contrasts: tuple[Contrast, ...]
    bounds: Bounds
    proposals: tuple[Proposal, ...]
    warnings: tuple[str, ...]
    effective_rank_with_rest: int | None = None  # with people outside regions; None: no such people
    evidence: tuple[str, ...] = ()  # beyond regions, such as "200 labelled people"
    effective_rank_with_evidence: int | None = None  # None: there is no evidence beyond regions
    attributes: tuple[tuple[str, tuple[str, ...]], ...] = ()  # names and levels

    def as_dict(self) -> dict[str, Any]:
        """The diagnosis for JSON, with null for infinity."""
        values: dict[str, Any] = json.loads(to_json(self, inf_nan_mode="null"))
        for contrast in values["contrasts"]:
            contrast["identified"] = contrast["verdict"] == "identified"
        return values


def diagnose(
    composition: Composition,
    n: Floats | float | None = None,
    aggregates: Aggregates | None = None,
    *,
    randomised: bool = False,
    population: Population | None = None,
    delta: float = 0.05,
    min_region: float = 50.0,
) -> Diagnosis:
    """Diagnose which differences between groups a composition identifies.

    Parameters
    ----------
    composition
        Shares of groups per region.
    n
        People behind the aggregates, if there are no aggregates yet.
    aggregates
        The aggregates of the same regions.
    randomised, population
        As in `Regions`; random assignment rules out confounding with geography.
    delta, min_region
        Probability that the bound fails. Regions of fewer people are proposed for merging.

    Returns
    -------
    Diagnosis
        Ranks, bounds, contrasts, proposals and warnings.

    Examples
    --------
    >>> diagnose(read_composition("census.csv"), n=500).effective_rank  # doctest: +SKIP
    8
    """
    people = _people(composition, n, aggregates)
    shares = composition.shares
    singular = np.linalg.svd(shares, compute_uv=False)  # (min(regions, groups),)
    groups = len(composition.groups)
    sigma_min = float(singular[-1]) if len(shares) >= groups else 0.0
    rank = int((singular > RANK_TOLERANCE * singular[0]).sum())
    return Diagnosis(
        groups=composition.groups.names,
        attributes=composition.groups.attributes,
        regions=len(shares),
        people=(float(people.min()), float(np.median(people)), float(people.max())),
        singular_values=tuple(float(value) for value in singular),
        sigma_min=sigma_min,
        rank=rank,
        effective_rank=effective_rank(shares, people),
        condition_number=float(singular[0] / sigma_min) if sigma_min > 0 else float("inf"),
        contrasts=tuple(_contrasts(composition.groups, shares, people, _share_unit(aggregates))),
        bounds=_bounds(sigma_min if rank == groups else 0.0, people, aggregates, delta),
        proposals=tuple(_proposals(composition, people, min_region)),
        warnings=_warnings(composition, aggregates, rank, randomised, n),
        effective_rank_with_rest=None
        if aggregates is None
        else _rank_with_rest(Regions(composition, aggregates, randomised, population=population)),
    )


def diagnose_regions(regions: Regions, min_region: float = 50.0) -> Diagnosis:
    """Diagnose regions with their labelled people and group tables.

    Ranks, bounds and proposals are those of the regions. Contrasts count all evidence, as if
    tables agreed with the rest; `recover` estimates how far they do.

    Parameters
    ----------
    regions
        As `load_regions` returns them.
    min_region
        As in `diagnose`.

    Returns
    -------
    Diagnosis
        Also with the effective rank of all evidence together.

    Examples
    --------
    >>> diagnose_regions(load_regions("regions")).effective_rank_with_evidence  # doctest: +SKIP
    """
    v = regions.aggregates
    diagnosis = diagnose(
        regions.composition,
        aggregates=v,
        randomised=regions.randomised,
        population=regions.population,
        min_region=min_region,
    )
    if not regions.evidence:
        return diagnosis
    counted = [each for each in regions.evidence if each.same_population]
    shares = np.vstack([regions.composition.shares, *(each.shares for each in counted)])
    n = np.concatenate([v.n, *(_people_behind(each, v) for each in counted)])
    contrasts = _contrasts(regions.groups, shares, n, _share_unit(v))
    return replace(
        diagnosis,
        contrasts=tuple(replace(each, evidence="this evidence") for each in contrasts),
        evidence=tuple(each.title for each in regions.evidence),
        effective_rank_with_evidence=effective_rank(shares, n),
        warnings=(*diagnosis.warnings, *_evidence_warnings(regions)),
    )


def _people_behind(evidence: GroupEvidence, v: Aggregates) -> Floats:
    """The people behind each row (rows,), computed from standard errors if they are not known."""
    if evidence.standard_error is None or np.isfinite(evidence.n).all():
        return evidence.n
    position = {name: number for number, name in enumerate(v.features)}
    shared = [(k, position[name]) for k, name in enumerate(evidence.features) if name in position]
    own, ours = np.array(shared, dtype=np.int64).reshape(-1, 2).T
    _, mean = population_mean(np.zeros((len(v.n), 1)), v)
    variance = (mean if v.spread is None else v.spread)[ours]
    error = evidence.standard_error[:, own]  # (rows, shared features)
    known = np.isfinite(error) & (error > 0) & (variance > 0)
    people = np.where(known, variance / np.where(known, error, 1.0) ** 2, 0.0)
    # The features of a row have several errors; their mean is that of all its information.
    implied = people.sum(1) / np.maximum(known.sum(1), 1)
    return np.where(np.isfinite(evidence.n), evidence.n, implied)


def _evidence_warnings(regions: Regions) -> Iterator[str]:
    maps = bins_by_map(regions.aggregates.features)
    for each in regions.evidence:
        missing = [name for name in maps if name not in bins_by_map(each.features)]
        if not each.same_population:
            yield (
                f"{each.title} is about other people, so it does not count here; run "
                "`mobatlas recover` to see what it adds"
            )
        elif missing:
            yield f"{each.title} says nothing about {' and '.join(missing)}"


def effective_rank(shares: Floats, n: Floats) -> int:
    """The number of singular values of diag(sqrt(n)) P above 1: signal above noise."""
    return int((np.linalg.svd(np.sqrt(n)[:, None] * shares, compute_uv=False) > 1).sum())


def _rank_with_rest(regions: Regions) -> int | None:
    """The effective rank with people outside all regions; None if they cannot be computed."""
    extended = with_rest(regions)
    if extended is regions:
        return None
    return effective_rank(extended.composition.shares, extended.aggregates.n)


def contrast_vectors(groups: Groups) -> list[tuple[str, str, Floats]]:
    """(name, kind, weights) of attributes, of their levels, and of single groups."""
    vectors = []
    for number, (attribute, levels) in enumerate(groups.attributes):
        others = [name for name in groups.attribute_names if name != attribute]
        averaged = f", averaged over {' and '.join(others)}" if others else ""
        member = [groups.level_codes[:, number] == code for code in range(len(levels))]
        if len(levels) == 2:
            vectors.append((f"{attribute}{averaged}", "attribute", _difference(*member)))
        elif len(levels) > 2:
            name = f"{attribute}: {levels[0]} against {levels[-1]}{averaged}"
            vectors.append((name, "attribute", _difference(member[0], member[-1])))
            vectors += [
                (
                    f"{attribute}: {level} against the rest{averaged}",
                    "level",
                    _difference(own, ~own),
                )
                for level, own in zip(levels, member, strict=True)
            ]
    if len(groups) > 1:
        vectors += [
            (f"{name} against the others", "group", _difference(own, ~own))
            for name, own in zip(groups.names, np.eye(len(groups), dtype=bool), strict=True)
        ]
    return vectors


def _difference(first: Any, second: Any) -> Floats:
    return np.asarray(first / first.sum() - second / second.sum(), dtype=np.float64)


def _contrasts(groups: Groups, shares: Floats, n: Floats, unit: float) -> list[Contrast]:
    _, singular, right = np.linalg.svd(np.sqrt(n)[:, None] * shares, full_matrices=False)
    directions = right[singular > 1]  # (effective rank, groups)
    strength = singular[singular > 1]
    contrasts = []
    for name, kind, weights in contrast_vectors(groups):
        along = directions @ weights
        share = float((along**2).sum() / (weights**2).sum())
        error = float(np.sqrt(((along / strength) ** 2).sum()))
        verdict = "identified" if share >= IDENTIFIED else "partly identified"
        if share < PARTLY:
            verdict = "not identified"
            error = float("inf")
        contrasts.append(Contrast(name, kind, verdict, share, error, error * unit))
    return contrasts


def _share_unit(aggregates: Aggregates | None) -> float:
    """One standard deviation between people, on the share of visits of a typical bin."""
    if aggregates is None:
        return float(np.sqrt(TYPICAL_SHARE / TYPICAL_VISITS))
    values = aggregates.values
    total = sum(
        (np.nan_to_num(values[rows]).sum(0) for rows in blocks(*values.shape)),
        np.zeros(values.shape[1]),
    )
    mean = total / len(values)
    variance = mean if aggregates.spread is None else aggregates.spread
    visits = max(float(mean.sum()), 1e-300)
    return float((mean / visits) @ np.sqrt(np.maximum(variance, 0)) / visits)


def _bounds(sigma_min: float, n: Floats, aggregates: Aggregates | None, delta: float) -> Bounds:
    features = 1 if aggregates is None else len(aggregates.features)
    n_min = float(n.min())
    deviation = np.sqrt(features) + np.sqrt(2 * np.log(len(n) / delta))
    largest = None if aggregates is None else aggregates.largest
    feature_bound = SHARES_BOUND if largest is None else largest
    sampling = float(feature_bound * deviation / np.sqrt(n_min) * np.sqrt(len(n)))
    finite_sample = sampling / sigma_min if sigma_min > 0 else float("inf")
    return Bounds(delta, feature_bound, largest is None, features, n_min, sampling, finite_sample)


def _proposals(composition: Composition, n: Floats, min_region: float) -> list[Proposal]:
    """The region to add, to split and to merge that helps most."""
    shares = composition.shares
    names = composition.groups.names
    if len(names) == 1:
        return []
    typical = float(np.median(n))
    current = _triangles(shares, n)
    added = []
    for group, name in enumerate(names):
        row = np.full((1, len(names)), (1 - HOT_SHARE) / (len(names) - 1))
        row[0, group] = HOT_SHARE
        action = f"add a region of {typical:,.0f} people, {HOT_SHARE:.0%} of them {name}"
        added.append(_propose(action, current, len(shares), row, np.array([typical])))
    proposals = [max(added, key=lambda proposal: (proposal.effective_rank, proposal.sigma_min))]
    proposals += _split(composition, n, min_region)
    small = int((n < min_region).sum())
    if small and len(shares) > 1:
        action = (
            f"merge the {small:,} region{'s' if small > 1 else ''} below {min_region:g} people "
            "with regions of similar composition"
        )
        rows, people = _merge(shares, n, min_region)
        merged = _propose(action, _triangles(rows, people), len(rows))
        now = _propose("", current, len(shares))
        # Merging never adds information: propose it only where nothing is lost.
        loss = now.sigma_min - merged.sigma_min
        if merged.effective_rank >= now.effective_rank and loss <= RANK_TOLERANCE:
            proposals.append(merged)
    return proposals


def _triangles(shares: Floats, n: Floats) -> tuple[Floats, Floats]:
    """R of QR of P and of diag(sqrt(n)) P: small matrices with the same singular values."""
    return np.linalg.qr(shares).R, np.linalg.qr(np.sqrt(n)[:, None] * shares).R


def _propose(
    action: str,
    triangles: tuple[Floats, Floats],
    regions: int,
    rows: Floats | None = None,
    n: Floats | None = None,
) -> Proposal:
    """A proposal, with the singular value and rank of these regions plus new rows."""
    plain, weighted = triangles
    if rows is not None and n is not None:
        plain = np.vstack([plain, rows])
        weighted = np.vstack([weighted, np.sqrt(n)[:, None] * rows])
        regions += len(rows)
    sigma = float(np.linalg.svd(plain, compute_uv=False)[-1]) if regions >= plain.shape[1] else 0.0
    return Proposal(action, sigma, int((np.linalg.svd(weighted, compute_uv=False) > 1).sum()))


def _split(composition: Composition, n: Floats, min_region: float) -> list[Proposal]:
    """Split the largest region along the direction with least information."""
    largest = int(np.argmax(n))
    if n[largest] < 2 * min_region:
        return []
    # The triangle has the same right singular vectors as the regions.
    _, _, right = np.linalg.svd(_triangles(composition.shares, n)[1], full_matrices=True)
    weakest = right[-1]
    halves = [composition.shares[largest] * mask for mask in (weakest > 0, weakest <= 0)]
    sizes = np.array([n[largest] * half.sum() for half in halves])
    if min(half.sum() for half in halves) <= 0 or sizes.min() < min_region:
        return []
    others = _triangles(np.delete(composition.shares, largest, 0), np.delete(n, largest))
    apart = [composition.groups.names[group] for group in np.flatnonzero(weakest > 0)]
    action = (
        f"split region '{composition.regions[largest]}' to separate {'; '.join(apart)} "
        "from the other groups"
    )
    rows = np.vstack([half / half.sum() for half in halves])
    return [_propose(action, others, len(n) - 1, rows, sizes)]


def _merge(shares: Floats, n: Floats, min_region: float) -> tuple[Floats, Floats]:
    """Merge small regions, block by block along the leading direction if there are many."""
    order = np.arange(len(n))
    if len(n) > MERGE_BLOCK:
        leading = np.linalg.svd(np.linalg.qr(shares - shares.mean(0)).R)[2][0]  # (groups,)
        order = np.argsort(shares @ leading, kind="stable")
    parts = [
        _merge_block(shares[rows], n[rows], min_region)
        for rows in np.array_split(order, -(-len(n) // MERGE_BLOCK))
    ]
    merged_shares, merged_n = zip(*parts, strict=True)
    return np.concatenate(merged_shares), np.concatenate(merged_n)


def _merge_block(shares: Floats, n: Floats, min_region: float) -> tuple[Floats, Floats]:
    """Merge the smallest region with the one of nearest composition until none is too small."""
    rows = shares.copy()
    people = n.astype(np.float64)
    squares = (rows**2).sum(1)
    left = np.ones(len(n), dtype=bool)
    while left.sum() > 1 and people.min() < min_region:
        smallest = int(np.argmin(people))
        distance = squares - 2 * rows @ rows[smallest]  # squared, up to a constant
        distance[smallest] = np.inf
        other = int(np.argmin(np.where(left, distance, np.inf)))
        total = people[smallest] + people[other]
        rows[other] = (people[smallest] * rows[smallest] + people[other] * rows[other]) / total
        squares[other] = (rows[other] ** 2).sum()
        people[other] = total
        people[smallest] = np.inf
        left[smallest] = False
    return rows[left], people[left]


def _people(
    composition: Composition, n: Floats | float | None, aggregates: Aggregates | None
) -> Floats:
    if aggregates is not None:
        return aggregates.n
    size = np.asarray(composition.n if n is None else n, dtype=np.float64)
    people = np.broadcast_to(size, (len(composition.regions),))
    if not (people > 0).all():
        raise MobatlasError("--n: give a positive number of people per region")
    return np.where(np.isfinite(people), people, 1e9)


def _warnings(
    composition: Composition,
    aggregates: Aggregates | None,
    rank: int,
    randomised: bool,
    n: Floats | float | None,
) -> tuple[str, ...]:
    regions, groups = composition.shares.shape
    absent = "; ".join(composition.absent_groups)
    repeated = regions - len(np.unique(composition.shares, axis=0))
    observed = "all people of the census are" if np.isfinite(composition.n).all() else "everyone is"
    maps = () if aggregates is None or randomised else bins_by_map(aggregates.features)
    warnings = {
        f"without --n, we assume that {observed} observed": n is None and aggregates is None,
        "there is only one group: nothing to distinguish": groups == 1,
        f"{regions} regions for {groups} groups: at most {rank} combinations of groups can be "
        "estimated": regions < groups,
        f"no region has people of {absent}: `mobatlas regions` refuses empty groups": absent,
        f"{repeated} regions repeat the composition of another: they add people, but do not help "
        "to distinguish groups": repeated,
        "the aggregates are shares without numbers of people: groups that go out more have more "
        "weight in them": aggregates is not None and aggregates.pooled,
        "in real home regions, places and distances are confounded with geography; prefer "
        "--feature category or transitions": any(
            name in FEATURES and FEATURES[name].geographic for name in maps
        ),
    }
    return tuple(warning for warning, applies in warnings.items() if applies)
