"""What regions can tell: singular values, ranks, the paper's bounds, which contrasts between groups are identified, and what
would help (Section "Theoretical Foundation" of the paper)."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from mobatlas.errors import MobatlasError
from mobatlas.groups import Groups
from mobatlas.regions.population import with_rest
from mobatlas.regions.types import Aggregates, Composition, Floats, Population, Regions, blocks

RANK_TOLERANCE = 1e-6  # of the largest singular value: published shares have six decimals
IDENTIFIED, PARTLY = (
    0.9,
    0.5,
)  # share of a contrast's square that lies where regions speak louder than noise
TYPICAL_SHARE, TYPICAL_VISITS = (
    0.05,
    10.0,
)  # a place with 5 % of ten visits a window, where no aggregates say better
HOT = 0.85
MERGED = 4_096  # regions among which the likest is looked for: the pairs of more would take minutes


@dataclass(frozen=True)
class Contrast:
    """A difference between groups, and how well these regions know it."""

    name: str
    kind: str  # attribute, level or group
    verdict: str  # identified, partly identified, not identified
    share_identified: float
    standard_error: float  # in standard deviations between people; infinite where not identified
    share_error: float  # the same on the share of visits that a bin takes

    @property
    def identified(self) -> bool:
        return self.verdict == "identified"

    def sentence(self) -> str:
        """In words and numbers."""
        if self.verdict == "not identified":
            return f"{self.name}: not identified by these regions"
        hedge = "" if self.identified else ", in part"
        return f"{self.name}: ± {self.share_error:.3f} on shares of visits{hedge}"


@dataclass(frozen=True)
class Proposal:
    """Something that would help."""

    action: str
    sigma_min: float
    effective_rank: int


@dataclass(frozen=True)
class Bounds:
    """The paper's finite-sample bound on |M_hat - M|_F, for features that are shares (|phi| <= B)."""

    delta: float
    feature_bound: float  # B
    features: int  # m
    n_min: float
    sampling_error: float  # epsilon_samp
    finite_sample: float  # Lemma "Finite Sample Error Bound"

    def overall(self, optimisation_error: float) -> float:
        """Theorem "Overall bound": with |V_theta - V_hat|_F left by the fit."""
        if not self.sampling_error:
            return float("inf")
        return self.finite_sample * (1 + optimisation_error / self.sampling_error)


@dataclass(frozen=True)
class Diagnosis:
    """Everything about P and n."""

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
    effective_rank_with_rest: int | None = (
        None  # with the people whom no region counts; None: there are no such
    )

    def as_dict(self) -> dict[str, Any]:
        """For --json."""
        values = asdict(self)
        values["contrasts"] = [
            asdict(contrast) | {"identified": contrast.identified} for contrast in self.contrasts
        ]
        return _finite(values)


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
    """Diagnose a composition; `n` are the people behind the aggregates, where there are any yet.

    `randomised`: people were assigned to regions, so that geography cannot pass for demography. Everything is about the regions
    alone, but for `effective_rank_with_rest`, which is what recovery has where it also knows the `population`.
    """
    people = _people(composition, n, aggregates)
    shares = composition.shares
    singular = np.linalg.svd(shares, compute_uv=False)  # (min(regions, groups),)
    groups = len(composition.groups)
    sigma_min = float(singular[-1]) if len(shares) >= groups else 0.0
    rank = int((singular > RANK_TOLERANCE * singular[0]).sum())
    bounds = _bounds(
        sigma_min if rank == groups else 0.0,
        people,
        len(aggregates.features) if aggregates else 1,
        delta,
    )
    return Diagnosis(
        groups=composition.groups.names,
        regions=len(shares),
        people=(float(people.min()), float(np.median(people)), float(people.max())),
        singular_values=tuple(float(value) for value in singular),
        sigma_min=sigma_min,
        rank=rank,
        effective_rank=effective_rank(shares, people),
        condition_number=float(singular[0] / sigma_min) if sigma_min > 0 else float("inf"),
        contrasts=tuple(_contrasts(composition.groups, shares, people, _share_unit(aggregates))),
        bounds=bounds,
        proposals=tuple(_proposals(composition, people, min_region)),
        warnings=(
            *_assumed(composition, n, aggregates),
            *_warnings(composition, aggregates, rank, randomised),
        ),
        effective_rank_with_rest=_rank_with_rest(composition, aggregates, randomised, population),
    )


def effective_rank(shares: Floats, n: Floats) -> int:
    """The number of singular values of diag(sqrt(n)) P above 1: directions in which regions speak louder than one person."""
    return int((np.linalg.svd(np.sqrt(n)[:, None] * shares, compute_uv=False) > 1).sum())


def feature_ipm(one: Floats, other: Floats) -> Floats:
    """d_phi: the largest difference of a linear functional of unit norm, that is the distance of the feature means."""
    return np.asarray(np.linalg.norm(np.asarray(one) - np.asarray(other), axis=-1))


def contrast_vectors(groups: Groups) -> list[tuple[str, str, Floats]]:
    """(name, kind, weights): attributes and their levels averaged over the rest, and single groups against the others."""
    found = []
    for number, (attribute, levels) in enumerate(groups.attributes):
        others = [name for name in groups.attribute_names if name != attribute]
        averaged = f", averaged over {' and '.join(others)}" if others else ""
        member = [groups.level_codes[:, number] == code for code in range(len(levels))]
        if len(levels) == 2:
            found.append((f"{attribute}{averaged}", "attribute", _difference(member[0], member[1])))
        elif len(levels) > 2:
            name = f"{attribute}: {levels[0]} against {levels[-1]}{averaged}"
            found.append((name, "attribute", _difference(member[0], member[-1])))
            found += [
                (
                    f"{attribute}: {level} against the rest{averaged}",
                    "level",
                    _difference(member[code], ~member[code]),
                )
                for code, level in enumerate(levels)
            ]
    if len(groups) > 1:
        one = np.eye(len(groups), dtype=bool)
        found += [
            (f"{name} against the others", "group", _difference(row, ~row))
            for name, row in zip(groups.names, one, strict=True)
        ]
    return found


def _difference(first: Any, second: Any) -> Floats:
    return np.asarray(first / first.sum() - second / second.sum(), dtype=np.float64)


def _contrasts(groups: Groups, shares: Floats, n: Floats, unit: float) -> list[Contrast]:
    _, singular, right = np.linalg.svd(np.sqrt(n)[:, None] * shares, full_matrices=False)
    heard = right[singular > 1]  # (effective rank, groups)
    strength = singular[singular > 1]
    contrasts = []
    for name, kind, weights in contrast_vectors(groups):
        along = heard @ weights
        share = float((along**2).sum() / (weights**2).sum())
        error = float(np.sqrt(((along / strength) ** 2).sum()))
        verdict = (
            "identified"
            if share >= IDENTIFIED
            else "partly identified"
            if share >= PARTLY
            else "not identified"
        )
        if verdict == "not identified":
            error = float("inf")
        contrasts.append(Contrast(name, kind, verdict, share, error, error * unit))
    return contrasts


def _rank_with_rest(
    composition: Composition,
    aggregates: Aggregates | None,
    randomised: bool,
    population: Population | None,
) -> int | None:
    if aggregates is None or population is None:
        return None
    regions = Regions(composition, aggregates, randomised, population=population)
    whole = with_rest(regions)
    return (
        None if whole is regions else effective_rank(whole.composition.shares, whole.aggregates.n)
    )


def _share_unit(aggregates: Aggregates | None) -> float:
    """One standard deviation between people, on the share of visits that a typical bin takes."""
    if aggregates is None:
        return float(np.sqrt(TYPICAL_SHARE / TYPICAL_VISITS))
    values = aggregates.values
    total = sum(
        (np.nan_to_num(values[some]).sum(0) for some in blocks(*values.shape)),
        np.zeros(values.shape[1]),
    )
    mean = total / len(values)
    spread = mean if aggregates.spread is None else aggregates.spread
    visits = max(float(mean.sum()), 1e-300)
    return float((mean / visits) @ np.sqrt(np.maximum(spread, 0)) / visits)


def _bounds(sigma_min: float, n: Floats, features: int, delta: float, bound: float = 1.0) -> Bounds:
    regions, n_min = len(n), float(n.min())
    spread = bound * (np.sqrt(features) + np.sqrt(2 * np.log(regions / delta))) / np.sqrt(n_min)
    sampling = float(spread * np.sqrt(regions))
    finite = sampling / sigma_min if sigma_min > 0 else float("inf")
    return Bounds(delta, bound, features, n_min, sampling, finite)


def _proposals(composition: Composition, n: Floats, min_region: float) -> list[Proposal]:
    """Which region to add, which to split, which to merge, with what it would give."""
    shares, names = composition.shares, composition.groups.names
    groups = len(names)
    if groups == 1:
        return []
    typical = float(np.median(n))
    known = _triangles(shares, n)
    added = []
    for group, name in enumerate(names):
        row = np.full((1, groups), (1 - HOT) / (groups - 1))
        row[0, group] = HOT
        action = f"add a region of {typical:,.0f} people, {HOT:.0%} of them {name}"
        added.append(_gives(action, known, len(shares), row, np.array([typical])))
    proposals = [max(added, key=lambda proposal: (proposal.effective_rank, proposal.sigma_min))]
    proposals += _split(composition, n, min_region)
    small = np.flatnonzero(n < min_region)
    if len(small) and len(shares) > 1:
        rows, people = _merge(shares, n, min_region)
        plural = "s" if len(small) > 1 else ""
        action = f"join the {len(small):,} region{plural} below {min_region:g} people with those most like them in composition"
        merged, now = (
            _gives(action, _triangles(rows, people), len(rows)),
            _gives("", known, len(shares)),
        )
        # A mean of two regions tells no more than both: at best nothing is lost.
        lost = now.sigma_min - merged.sigma_min > RANK_TOLERANCE
        if merged.effective_rank >= now.effective_rank and not lost:
            proposals.append(merged)
    return proposals


def _triangles(shares: Floats, n: Floats) -> tuple[Floats, Floats]:
    """R of QR of P and of diag(sqrt(n)) P: as few rows as there are groups, with the same singular values."""
    return np.linalg.qr(shares).R, np.linalg.qr(np.sqrt(n)[:, None] * shares).R


def _gives(
    action: str,
    known: tuple[Floats, Floats],
    regions: int,
    rows: Floats | None = None,
    n: Floats | None = None,
) -> Proposal:
    """What these regions would give with a few more of them."""
    plain, weighed = known
    if rows is not None and n is not None:
        plain, weighed = np.vstack([plain, rows]), np.vstack([weighed, np.sqrt(n)[:, None] * rows])
        regions += len(rows)
    sigma = float(np.linalg.svd(plain, compute_uv=False)[-1]) if regions >= plain.shape[1] else 0.0
    return Proposal(action, sigma, int((np.linalg.svd(weighed, compute_uv=False) > 1).sum()))


def _split(composition: Composition, n: Floats, min_region: float) -> list[Proposal]:
    """Split the largest region along the direction that regions know least."""
    largest = int(np.argmax(n))
    if n[largest] < 2 * min_region:
        return []
    # Of the triangle, whose right singular vectors are those of the regions.
    _, _, right = np.linalg.svd(_triangles(composition.shares, n)[1], full_matrices=True)
    weakest = right[-1]
    halves = [composition.shares[largest] * mask for mask in (weakest > 0, weakest <= 0)]
    if min(half.sum() for half in halves) <= 0:
        return []
    sizes = np.array([n[largest] * half.sum() for half in halves])
    if sizes.min() < min_region:
        return []
    others = _triangles(np.delete(composition.shares, largest, 0), np.delete(n, largest))
    apart = [name for name, sign in zip(composition.groups.names, weakest > 0, strict=True) if sign]
    action = f"split region '{composition.regions[largest]}' so that {'; '.join(apart)} live apart from the others"
    return [
        _gives(action, others, len(n) - 1, np.vstack([half / half.sum() for half in halves]), sizes)
    ]


def _merge(shares: Floats, n: Floats, min_region: float) -> tuple[Floats, Floats]:
    """The smallest with its likest, again and again; of more than `MERGED` regions, among neighbours in what differs most."""
    order = np.arange(len(n))
    if len(n) > MERGED:
        leading = np.linalg.svd(np.linalg.qr(shares - shares.mean(0)).R)[2][0]  # (groups,)
        order = np.argsort(shares @ leading, kind="stable")
    parts = [
        _merge_all(shares[some], n[some], min_region)
        for some in np.array_split(order, -(-len(n) // MERGED))
    ]
    return np.concatenate([rows for rows, _ in parts]), np.concatenate(
        [people for _, people in parts]
    )


def _merge_all(shares: Floats, n: Floats, min_region: float) -> tuple[Floats, Floats]:
    rows, people = shares.copy(), n.astype(np.float64)
    squares, left = (rows**2).sum(1), np.ones(len(n), dtype=bool)
    while left.sum() > 1 and people.min() < min_region:
        smallest = int(np.argmin(people))
        gap = squares - 2 * rows @ rows[smallest]  # the distance, less what is the same for all
        gap[smallest] = np.inf
        other = int(np.argmin(np.where(left, gap, np.inf)))
        total = people[smallest] + people[other]
        rows[other] = (people[smallest] * rows[smallest] + people[other] * rows[other]) / total
        people[other], squares[other] = total, (rows[other] ** 2).sum()
        people[smallest], left[smallest] = np.inf, False
    return rows[left], people[left]


def _people(
    composition: Composition, n: Floats | float | None, aggregates: Aggregates | None
) -> Floats:
    if aggregates is not None:
        return aggregates.n
    people = np.broadcast_to(
        np.asarray(composition.n if n is None else n, dtype=np.float64), (len(composition.regions),)
    )
    if not (people > 0).all():
        raise MobatlasError("--n: give a positive number of people per region")
    return np.where(np.isfinite(people), people, 1e9)


def _assumed(
    composition: Composition, n: Floats | float | None, aggregates: Aggregates | None
) -> list[str]:
    """What stands in for the people observed where nobody said how many they are."""
    if n is not None or aggregates is not None:
        return []
    if np.isfinite(composition.n).all():
        return ["without --n the census population counts as people observed"]
    return ["without --n shares count as if everybody had been observed"]


def _warnings(
    composition: Composition, aggregates: Aggregates | None, rank: int, randomised: bool
) -> list[str]:
    regions, groups = composition.shares.shape
    said = []
    if groups == 1:
        said.append("there is one group: nothing to tell apart")
    if regions < groups:
        said.append(
            f"{regions} regions for {groups} groups: at most {rank} combinations of groups can be known"
        )
    never = [
        name
        for name, total in zip(composition.groups.names, composition.shares.sum(0), strict=True)
        if total == 0
    ]
    if never:
        said.append(
            f"no region has anybody of {'; '.join(never)}: these groups stay at the population mean"
        )
    twins = regions - len(np.unique(composition.shares, axis=0))
    if twins and regions > 1:
        said.append(
            f"{twins} regions repeat the composition of another: they add people, not directions"
        )
    if aggregates is not None and aggregates.pooled:
        said.append(
            "the aggregates are shares without device counts: groups that go out more weigh more in them"
        )
    features = () if aggregates is None or randomised else aggregates.features
    if any(name.startswith(("poi:", "distance:")) for name in features):
        said.append(
            "with real home regions, places and distances are confounded with geography; prefer category or transitions"
        )
    return said


def _finite(value: Any) -> Any:
    """JSON knows no infinity: null."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not np.isfinite(value):
        return None
    return value
