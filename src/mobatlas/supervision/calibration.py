"""Calibration: tilts fitted on a model's own samples, by which candidates are chosen when it samples (step 4 of the tilt).

Two exact forms, which are not mixed, of the distribution nearest to the model's (in Kullback-Leibler) with the group's means:

population: the joint of anchors and trajectory is tilted, by at most a factor cap, or nearly all candidates would be refused.
    w(x) = min(exp(<lambda, phi(x)> - nu), cap) has mean 1; a fresh candidate is accepted with probability w(x) / cap, so one in
    cap is. (lambda, nu) minimise mean f*(<lambda, phi(x)> - nu) + nu - <lambda, target> + ridge/2 |lambda|^2, where
    f*(s) = exp(s) up to log cap and goes on straight.
given: anchors stay as they are. Of K candidates with the same anchors one is taken, see `given`.

Both are fitted on anchors drawn from all training people, or where regions say that the group lives; no label is read here.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from scipy import sparse

from mobatlas.data.arrays import Floats
from mobatlas.errors import MobatlasError
from mobatlas.generators.protocol import Generator, has_times
from mobatlas.generators.rng import draw_rows
from mobatlas.groups import Groups
from mobatlas.progress import SILENT, Tracker
from mobatlas.supervision.evidence import Evidence
from mobatlas.supervision.fixed_anchor_calibration import fit_given_tilt, given_weights
from mobatlas.supervision.moments import TIMES, Ints, Moments
from mobatlas.supervision.tilt import Product, minimise_dual, refuse_unusable, scaled_features

log = logging.getLogger("mobatlas")
POOL = 4_096  # samples of each group: the distance that is left falls with the root of their number
CANDIDATES = 8  # K: with 4 the means were twice as far off (JSD), with 16 not nearer
RIDGE = 3e-2  # ten times that of training people: fewer rows, and lambda must hold for others
GENTLER = (
    30.0,
    10.0,
    3.0,
)  # times that, in the form `given`, where a pool has fewer anchors than features
CAPS = (1.0, 2.0, 3.0, 5.0, 8.0, 12.0)  # the first is no tilt at all
ENOUGH = 0.95  # of the way that the best of them comes: the cheapest that does is taken
BLOCK = 1_024  # samples made at a time
STREAM = 11  # of random numbers
FORMS = ("population", "given")
PLAIN = ("told", "candidates", "pool", "ridge")
Fitted = tuple[
    Floats, float, bool
]  # lambda (features,), nu (in the form `given` the ratio of visits), whether they converged


class Choice(NamedTuple):
    """One way to tilt a pool; a cap of 1 is no tilt."""

    cap: float
    ridge: float


@dataclass(frozen=True)
class Weighting:
    """The tilt of one group in one form: what it costs, and how near the group comes to its recovered means."""

    coefficients: Floats  # lambda (features,)
    offset: float  # nu
    visits: float  # how many more the group has than the model's samples, which the form `given` holds at every anchor
    cap: float  # candidates for one sample, on average; K in the form `given`
    ridge: float
    effective_sample_size: float  # of a pool that is weighed, as a share of it
    converged: bool
    before: dict[str, float]  # distance of the model's own means, see Moments.distance
    after: dict[str, float]  # of means of samples that the tilt was not fitted on

    @property
    def acceptance(self) -> float:
        """The share of candidates that become samples."""
        return 1 / self.cap


@dataclass(frozen=True)
class Calibration:
    """Tilts of every group in both forms, with all that is needed to apply them."""

    groups: Groups
    features: tuple[str, ...]
    mask: tuple[str, ...]
    told: bool  # candidates are samples of the group, not of everybody
    candidates: int  # K of the form `given`
    pool: int  # samples behind each fit
    ridge: float
    population: tuple[Weighting, ...]  # one a group
    given: tuple[Weighting, ...]

    def tensors(self) -> dict[str, Floats]:
        """lambda of both forms, (groups, features) each."""
        return {
            form: np.stack([each.coefficients for each in getattr(self, form)]) for form in FORMS
        }

    def as_dict(self) -> dict[str, Any]:
        """Everything else, for JSON; `of` puts the two together again."""
        values = {
            "groups": self.groups.as_dict(),
            "features": list(self.features),
            "mask": list(self.mask),
        }
        forms = {form: [asdict(each) for each in getattr(self, form)] for form in FORMS}
        for row in (row for form in forms.values() for row in form):
            del row["coefficients"]
        return values | {name: getattr(self, name) for name in PLAIN} | forms

    @classmethod
    def of(cls, values: Mapping[str, Any], tensors: Mapping[str, Floats]) -> Calibration:
        """The inverse of `as_dict` and `tensors`; the two must be of one calibration."""
        groups = Groups.of(values["groups"])
        names, plainly = (*values["features"], *values["mask"]), [values[name] for name in PLAIN]
        if not all(isinstance(name, str) for name in names) or not all(
            isinstance(v, int | float) for v in plainly
        ):
            raise MobatlasError(
                "calibration: its features are no names, or what is a number there is none"
            )
        shape = (len(groups), len(values["features"]))
        if any(tensors[form].shape != shape or len(values[form]) != len(groups) for form in FORMS):
            raise MobatlasError(
                f"calibration: its tensors are not those of {shape[0]} groups and {shape[1]} features"
            )
        if not all(_is_weighting(facts) for form in FORMS for facts in values[form]):
            raise MobatlasError(
                "calibration: it does not say of each group how far its means were and are"
            )
        forms = (
            tuple(
                Weighting(row, **facts)
                for row, facts in zip(tensors[form], values[form], strict=True)
            )
            for form in FORMS
        )
        plain: dict[str, Any] = {name: values[name] for name in PLAIN} | dict(
            zip(FORMS, forms, strict=True)
        )
        return cls(groups, tuple(values["features"]), tuple(values["mask"]), **plain)

    def report(self) -> dict[str, Any]:
        """What to say of it, for JSON: by group and form, one candidate in `cap` being accepted."""
        values = self.as_dict()
        groups = {
            name: {form: values[form][k] for form in FORMS}
            for k, name in enumerate(self.groups.names)
        }
        return {name: values[name] for name in PLAIN} | {"groups": groups}


def _is_weighting(facts: Any) -> bool:
    """Whether it holds numbers where a `Weighting` does."""
    if not isinstance(facts, dict) or not all(
        isinstance(facts.get(name), dict) for name in ("before", "after")
    ):
        return False
    distances = (facts[name].get("js") for name in ("before", "after"))
    told = (
        facts.get(name) for name in ("offset", "visits", "cap", "ridge", "effective_sample_size")
    )
    return all(isinstance(value, int | float) for value in (*distances, *told))


def fit_calibration(
    model: Generator,
    evidence: Evidence | Moments,
    anchors: Floats | None = None,
    seed: int = 0,
    *,
    pool: int = POOL,
    candidates: int = CANDIDATES,
    ridge: float = RIDGE,
    tracker: Tracker = SILENT,
) -> Calibration:
    """Fit both forms for every group, on `pool` samples of each; a model that knows no groups has one pool for all of them.

    A pool is `candidates` samples for each of some anchors of the population (training people). The tracker is told per cent.
    """
    known = evidence.moments if isinstance(evidence, Evidence) else evidence
    known = known if anchors is None else replace(known, lives=None)  # these are of other homes
    homes = known.anchors if anchors is None else anchors
    moments = _comparable(model, known, homes, pool, candidates)
    rng = np.random.default_rng([seed, STREAM])
    people = _people(moments, len(homes), pool // candidates, rng)
    found: dict[str, list[Weighting]] = {form: [] for form in FORMS}
    seeds = rng.integers(2**62, size=len(moments.groups)).tolist()
    pools = _pools(
        model, moments, [homes[rows].repeat(candidates, axis=0) for rows in people], seeds, tracker
    )
    for name, target, phi in zip(moments.groups.names, moments.means, pools, strict=True):
        found["population"].append(_weighting(moments, phi, target, ridge, None))
        found["given"].append(_weighting(moments, phi, target, ridge, candidates))
        last = found["population"][-1]
        said = (name, last.before["js"], last.after["js"], last.cap)
        log.info(
            "group '%s': JSD to its recovered means %.4f, calibrated %.4f, accepting 1 in %g", *said
        )
    plain = (model.groups is not None, candidates, candidates * (pool // candidates), ridge)
    forms = (tuple(found[form]) for form in FORMS)
    return Calibration(moments.groups, moments.phi.features, moments.phi.mask, *plain, *forms)


def fit_capped_tilt(
    phi: sparse.csr_array, target: Floats, cap: float, ridge: float = RIDGE
) -> Fitted:
    """lambda and nu of the form `population`; features are scaled as in `fit_tilt`."""
    refuse_unusable(phi, target, ridge, None)
    if cap <= 1:  # weights of mean 1 are all 1
        return np.zeros(phi.shape[1]), 0.0, True
    scale, scaled, transposed = scaled_features(phi)
    wanted, top, rows = target / scale, np.log(cap), phi.shape[0]

    def dual(x: Floats) -> tuple[float, Floats]:
        coefficients, offset = x[:-1], x[-1]
        s = scaled @ coefficients - offset
        weights = np.exp(np.minimum(s, top))  # (rows,)
        conjugate = np.mean(weights + cap * np.maximum(s - top, 0))  # f*
        value = (
            conjugate + offset - coefficients @ wanted + ridge / 2 * (coefficients @ coefficients)
        )
        return float(value), np.append(
            transposed @ weights / rows - wanted + ridge * coefficients, 1 - weights.mean()
        )

    def curvature(x: Floats) -> Product:
        s = scaled @ x[:-1] - x[-1]
        weights = np.where(s < top, np.exp(np.minimum(s, top)), 0) / rows

        def product(v: Floats) -> Floats:
            along = weights * (scaled @ v[:-1] - v[-1])
            return np.append(transposed @ along + ridge * v[:-1], -along.sum())

        return product

    x, converged = minimise_dual(dual, curvature, np.zeros(phi.shape[1] + 1))
    return x[:-1] / scale, float(x[-1]), converged


def _weighting(
    moments: Moments, phi: sparse.csr_array, target: Floats, ridge: float, candidates: int | None
) -> Weighting:
    """The cheapest or gentlest tilt that comes about as near as the best.

    Each half of the pool is weighed by a fit on the other. No tilt is among the choices, so that a pool too small for its
    features does no harm.
    """
    k = candidates or 1
    middle = phi.shape[0] // 2 // k * k
    halves = phi[:middle], phi[middle:]
    number = moments.phi.visits  # (features,)

    def fit(rows: sparse.csr_array, choice: Choice) -> Fitted:
        if candidates is None or choice.cap <= 1:
            return fit_capped_tilt(rows, target, choice.cap, choice.ridge)
        visits = rows @ number
        ratio = float(target @ number / visits.mean()) if visits.any() else 1.0
        coefficients, converged = fit_given_tilt(rows, target, k, choice.ridge, visits, ratio)
        return coefficients, ratio, converged

    def weights(rows: sparse.csr_array, fitted: Fitted, choice: Choice) -> Floats:
        if candidates is None or choice.cap <= 1:
            return np.exp(np.minimum(rows @ fitted[0] - fitted[1], np.log(choice.cap)))
        return given_weights(
            (rows @ fitted[0]).reshape(-1, k), (rows @ number).reshape(-1, k), fitted[1]
        ).ravel()

    def crossed(choice: Choice) -> dict[str, float]:
        both = [
            (mine, weights(mine, fit(other, choice), choice))
            for mine, other in (halves, halves[::-1])
        ]
        return moments.distance(np.mean([mine.T @ w / w.sum() for mine, w in both], axis=0), target)

    tilted = (
        [Choice(cap, ridge) for cap in CAPS[1:]]
        if candidates is None
        else [Choice(k, times * ridge) for times in GENTLER]
    )
    choices = [Choice(1.0, ridge), *tilted]
    distances = {choice: crossed(choice) for choice in choices}
    start, least = (
        distances[choices[0]]["scaled"],
        min(each["scaled"] for each in distances.values()),
    )
    chosen = next(
        each for each in choices if distances[each]["scaled"] <= start - ENOUGH * (start - least)
    )
    whole = fit(phi, chosen)
    w = weights(phi, whole, chosen)
    return Weighting(
        coefficients=whole[0],
        offset=whole[1] if candidates is None else 0.0,
        visits=whole[1] if candidates is not None and chosen.cap > 1 else 1.0,
        cap=chosen.cap if candidates is None else float(candidates),
        ridge=chosen.ridge,
        effective_sample_size=float(w.sum() ** 2 / (w**2).sum() / len(w)),
        converged=whole[2],
        before=moments.distance(np.asarray(phi.mean(0)).ravel(), target),
        after=distances[chosen],
    )


def _people(moments: Moments, people: int, n: int, rng: np.random.Generator) -> list[Ints]:
    """Rows of n people for the pool of each group, or of all groups where they may live anywhere."""
    if moments.lives is None:
        times = -(-n // people)  # everybody as often as the others, to within one
        return [np.concatenate([rng.permutation(people) for _ in range(times)])[:n]]
    # one number in each of n equal parts of 0 to 1
    strata = np.minimum((rng.permutation(n) + rng.random(n)) / n, np.nextafter(1, 0))
    return [draw_rows(strata, people, weights) for weights in moments.lives.T]


def _pools(
    model: Generator,
    moments: Moments,
    anchors: Sequence[Floats],
    seeds: Sequence[int],
    tracker: Tracker,
) -> Iterator[sparse.csr_array]:
    """phi of the pool of each group, (rows, features): samples of the group, or of everybody, made once if they may be.

    `anchors` are those of the pool of each group, or one for all.
    """
    told, n, phi = model.groups is not None, len(anchors[0]), moments.phi
    apart = told or len(anchors) > 1
    for group, seed in enumerate(seeds if apart else seeds[:1]):
        parts: list[sparse.csr_array] = []
        for start in range(0, n, BLOCK):
            some = anchors[group % len(anchors)][start : start + BLOCK]
            groups = np.full(len(some), group, dtype=np.int64) if told else None
            parts.append(phi.counts(model.sample(len(some), groups, some, seed, first=start)))
            tracker.step(100 * (group + (start + len(some)) / n) / (len(seeds) if apart else 1))
        whole = sparse.csr_array(sparse.vstack(parts, format="csr"))
        yield from [whole] if apart else [whole] * len(seeds)


def _comparable(
    model: Generator, moments: Moments, anchors: Floats, pool: int, candidates: int
) -> Moments:
    """The moments that samples of the model can be held against."""
    if model.groups is not None and model.groups.names != moments.groups.names:
        ours, theirs = "; ".join(model.groups.names), "; ".join(moments.groups.names)
        raise MobatlasError(
            f"calibration: the model's groups ({ours}) are not those of {moments.source} ({theirs})"
        )
    if candidates < 2 or pool < 4 * candidates:
        raise MobatlasError(
            f"calibration: a pool of {pool} samples, {candidates} for each anchor, is too small; give 2 for each of 4 at least"
        )
    if not len(anchors):
        raise MobatlasError("calibration: there are no anchors to draw samples for")
    if has_times(model) or not any(each.name == TIMES for each in moments.phi.maps):
        return moments
    log.warning(
        "%s: samples do not tell when, so the feature '%s' is not calibrated", moments.source, TIMES
    )
    return moments.without(TIMES)
