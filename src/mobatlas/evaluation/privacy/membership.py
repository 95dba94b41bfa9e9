"""Membership inference: can an attacker who knows a person tell from the samples whether a model learnt from that person.

Every attack gives each person a score, the higher the more likely a member. The best of several attacks is chosen on one half
of the people and measured on the other, then the halves change places: choosing by luck gains nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from scipy import stats

from mobatlas.data.arrays import Floats, Ints
from mobatlas.data.geodesy import haversine_km
from mobatlas.evaluation.comparison import Interval, interval
from mobatlas.evaluation.privacy.cohort import GRAM, REFERENCE, Crowd, Nearness
from mobatlas.evaluation.privacy.ngrams import Flags, log_likelihood

FALSE_POSITIVES = 0.01
FAR = (
    20_015.0  # km, half way round the earth: where a home or a workplace is known on one side only
)
ROWS = 256  # people whose anchors are compared at a time
Measure = Callable[[Floats, Floats], float]


@dataclass(frozen=True)
class Attack:
    """How well an attack tells training from held-out people, all of them; not corrected for having been the best."""

    name: str
    auc: float
    tpr: float


@dataclass(frozen=True)
class Inference:
    """What the best attack comes to, on people by whom it was not chosen."""

    auc: Interval
    tpr: Interval
    chosen: tuple[str, ...]  # by AUC, on each half


def area(members: Floats, others: Floats) -> float:
    """The chance that a member scores higher than another person; ties are halved."""
    ranks = stats.rankdata(np.concatenate((members, others)))[: len(members)]
    return float((ranks.mean() - (len(members) + 1) / 2) / len(others))


def hit_rate(members: Floats, others: Floats) -> float:
    """The share of members who are found when one in a hundred others is taken for one.

    The wanted rank of the threshold among n others, (n + 1) / 100, lies between two of them: the two shares are mixed, so that
    a score that knows nothing finds one in a hundred whatever n is.
    """
    rank = FALSE_POSITIVES * (len(others) + 1)
    low = int(rank)
    ordered = np.sort(others)[::-1]
    shares = [
        0.0 if not k else float((members > ordered[min(k, len(ordered)) - 1]).mean())
        for k in (low, low + 1)
    ]
    return shares[0] + (rank - low) * (shares[1] - shares[0])


def attacks(scores: Mapping[str, Floats], member: Ints) -> tuple[Attack, ...]:
    """Each on everybody; `member` is 1 for training people, 0 for held-out ones."""
    sides = {name: (score[member == 1], score[member == 0]) for name, score in scores.items()}
    return tuple(Attack(name, area(*two), hit_rate(*two)) for name, two in sides.items())


def infer(
    scores: Mapping[str, Floats], member: Ints, rng: np.random.Generator, resamples: int = 200
) -> Inference:
    """The best of these attacks, with intervals over people: in each half members and others are drawn again."""
    halves = _halves(member, rng)
    auc, chosen = _cross(scores, member, halves, area, rng, resamples)
    tpr, _ = _cross(scores, member, halves, hit_rate, rng, resamples)
    return Inference(auc, tpr, chosen)


def trajectory_scores(crowd: Crowd, near: Nearness) -> dict[str, Floats]:
    """Attacks that know a person's trajectories, (people,) each; without a reference those that need none."""
    owner, grams = crowd.owner, crowd.grams
    real = owner >= 0  # (tokens,)
    learnt = log_likelihood(grams, ~real, crowd.words)
    scores = {
        "closest sample": crowd.mean(-near.closest, near.person),
        "samples near by": crowd.mean(np.log1p(near.near), near.person),
        "likelihood": crowd.mean(learnt[real], owner[real]),
    }
    if near.reference is None:
        return scores
    reference, last = real & (crowd.side[owner] == REFERENCE), grams[-1]
    ratio = learnt - log_likelihood(grams, reference, crowd.words)
    # A place that neither side has ever seen tells nothing, but the smaller side would think it likelier. Training people visit
    # more such places than others do, because the vocabulary is theirs.
    ratio *= np.isin(grams[0].numbers, grams[0].numbers[~real | reference])
    ours, others = (
        np.isin(last.numbers, last.numbers[last.whole & marked]) for marked in (~real, reference)
    )
    alone = (last.whole & ours & ~others).astype(np.float64)
    return scores | {
        "closest sample, beside reference": crowd.mean(near.reference - near.closest, near.person),
        "likelihood, beside reference": crowd.mean(ratio[real], owner[real]),
        f"{GRAM}-grams that reference lacks": crowd.mean(alone[real], owner[real]),
    }


def anchor_scores(people: Floats, samples: Floats) -> dict[str, Floats]:
    """Minus the km from people's homes and workplaces (people, 4) to the nearest of samples, of both at once and of each."""
    samples = np.unique(samples, axis=0)
    nearest = np.empty((len(people), 3))
    for start in range(0, len(people), ROWS):
        here = people[start : start + ROWS, None]
        home, work = (
            _km(here[..., two], samples[None, :, two]) for two in (slice(0, 2), slice(2, 4))
        )
        nearest[start : start + ROWS] = np.stack(
            [each.min(1) for each in (np.maximum(home, work), home, work)], axis=1
        )
    return dict(zip(("home and work", "home", "work"), -nearest.T, strict=True))


def _km(a: Floats, b: Floats) -> Floats:
    km = np.nan_to_num(haversine_km(a, b), nan=FAR)
    return np.where(np.isnan(a).any(-1) & np.isnan(b).any(-1), 0.0, km)


def _halves(member: Ints, rng: np.random.Generator) -> Ints:
    """0 or 1 for each person, members and others dealt apart."""
    half = np.empty(len(member), dtype=np.int64)
    for side in (0, 1):
        people = rng.permutation(np.flatnonzero(member == side))
        half[people] = np.arange(len(people)) % 2
    return half


def _cross(
    scores: Mapping[str, Floats],
    member: Ints,
    half: Ints,
    measure: Measure,
    rng: np.random.Generator,
    resamples: int,
) -> tuple[Interval, tuple[str, ...]]:
    estimates, draws, chosen = [], np.zeros(resamples), []
    for learnt in (0, 1):
        known = half == learnt
        best = max(scores, key=lambda name: measure(*_sides(scores[name], member, known)))
        sides = _sides(scores[best], member, ~known)
        estimates.append(measure(*sides))
        draws += [
            measure(*(rng.choice(side, len(side)) for side in sides)) for _ in range(resamples)
        ]
        chosen.append(best)
    return interval(float(np.mean(estimates)), draws / 2), tuple(chosen)


def _sides(score: Floats, member: Ints, among: Flags) -> tuple[Floats, Floats]:
    return score[among & (member == 1)], score[among & (member == 0)]
