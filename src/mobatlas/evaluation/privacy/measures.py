"""The measurements of an audit: memorisation and membership inference.

Memorisation: do samples repeat training people more than people that the model never saw? Both
sides have equally many people, so matches by chance are equally frequent. A sample that
copies one training person matches a group of n of them with probability n / all. The excess of
training groups times all / n is therefore the share of samples that repeat a training person.

Membership inference: can an attacker who knows a person infer that the model saw that person? Every
attack gives each person a score; members should score higher. The best attack is chosen on one half
of the people and measured on the other, then the halves swap. A lucky choice gains nothing.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from scipy import stats

from mobatlas.data.arrays import Flags, Floats, Ints
from mobatlas.data.geodesy import haversine_km
from mobatlas.data.trajectories import Trajectories
from mobatlas.data.vocabulary import FIRST_POI
from mobatlas.evaluation.comparison import LEVEL, Interval, interval
from mobatlas.evaluation.privacy.cohort import (
    GRAM,
    HELD_OUT,
    REFERENCE,
    TRAIN,
    Cohort,
    EqualGroups,
    SampleDistances,
    log_likelihood,
)

RARE = 3  # a rare place has at most this many visitors among training people
FEWEST_PLACES = 20  # rare places that the check needs
FALSE_POSITIVES = 0.01
FAR_KM = 20_015.0  # half of the earth's circumference, if only one side has the anchor
ROWS = 256  # people whose anchors are compared at a time
Measure = Callable[[Floats, Floats], float]


@dataclass(frozen=True)
class Excess:
    """Shares of samples that match training people and held-out people, and the difference."""

    train: float
    held_out: float
    interval: Interval  # share of samples that repeat a training person; below 0 by chance alone


def shared(samples: Ints, real: Ints, person: Ints, groups: EqualGroups) -> Excess:
    """The share of samples that match a person of a group.

    `samples` and `real` number sequences, n-grams or pairs of places.
    """
    group = groups.group[person]
    kinds = 1 + max(int(samples.max()), int(real.max()))
    shares = np.empty(groups.total)
    for number in range(groups.total):
        known = np.zeros(kinds, dtype=bool)
        known[real[group == number]] = True
        shares[number] = known[samples].mean()
    sides = (shares[: groups.training], shares[groups.training :])
    train, held_out = (float(each.mean()) for each in sides)
    freedom = groups.total - 2
    spread = math.sqrt(sum(float(((each - each.mean()) ** 2).sum()) for each in sides) / freedom)
    return Excess(train, held_out, _scaled_interval(groups, train - held_out, spread, freedom))


def singled_out(samples: Ints, real: Ints, person: Ints, side: Ints) -> Excess:
    """The same for matches with exactly one real person, which identify that person.

    These matches add up over people, so no groups are needed. Shares are scaled to the number of
    held-out people.
    """
    kinds = 1 + max(int(samples.max()), int(real.max()))
    known = side[person] != REFERENCE
    kind, who = _distinct_pairs(real[known], person[known])
    unique = np.bincount(kind, minlength=kinds) == 1
    owner = np.zeros(kinds, dtype=np.int64)
    owner[kind] = who
    # (people,) the share of samples that repeat each person
    repeats = np.bincount(owner[samples[unique[samples]]], minlength=len(side)) / len(samples)
    train = repeats[side == TRAIN]
    held_out = repeats[side == HELD_OUT]
    variance = train.var(ddof=1) / len(train) + held_out.var(ddof=1) / len(held_out)
    estimate = float(train.mean() - held_out.mean()) * len(train)
    ours, theirs = (float(each.mean()) * len(held_out) for each in (train, held_out))
    return Excess(ours, theirs, _interval(estimate, math.sqrt(variance) * len(train)))


def closer(nearest: Floats, groups: EqualGroups) -> Excess:
    """Shares of samples that are closer to training or to held-out people; a tie counts half.

    `nearest` is the distance to the closest trajectory of each group, (samples, groups).
    """
    wins = np.array([[_share_closer(a, b) for b in nearest.T] for a in nearest.T])  # (g, g)
    training = slice(0, groups.training)
    share = float(wins[training, groups.training :].mean())
    # Two groups of training people differ only by chance, and both contribute to the deviation.
    between = wins[training, training][~np.eye(groups.training, dtype=bool)]
    spread = 2 * math.sqrt(float(((between - 0.5) ** 2).mean()) / 2)
    return Excess(
        share, 1 - share, _scaled_interval(groups, 2 * share - 1, spread, groups.training - 1)
    )


def rare_places(
    samples: Trajectories, train: Trajectories, person: Ints, held_out: Trajectories
) -> Excess | None:
    """The shares of rare places that samples, and as many held-out trajectories, visit.

    `person` is the person of each training trajectory. None if there are hardly any rare places.
    """
    kinds = 1 + max(int(each.tokens.max()) for each in (samples, train, held_out))
    places, _ = _distinct_pairs(train.tokens.astype(np.int64), person[train.owner])
    visitors = np.bincount(places, minlength=kinds)
    rare = np.flatnonzero((visitors > 0) & (visitors <= RARE) & (np.arange(kinds) >= FIRST_POI))
    if len(rare) < FEWEST_PLACES:
        return None
    ours, theirs = (np.isin(rare, each.tokens).astype(np.float64) for each in (samples, held_out))
    more = ours - theirs  # (rare,)
    spread = float(more.std(ddof=1)) / math.sqrt(len(rare))
    return Excess(float(ours.mean()), float(theirs.mean()), _interval(float(more.mean()), spread))


def _scaled_interval(
    groups: EqualGroups, difference: float, spread: float, freedom: int
) -> Interval:
    """The interval of a difference between groups, scaled to all training people."""
    error = spread * math.sqrt(1 / groups.training + 1 / groups.held_out)
    quantile = float(stats.t.ppf((1 + LEVEL) / 2, freedom))
    return _interval(groups.scale * difference, groups.scale * error, quantile)


def _interval(
    estimate: float, error: float, quantile: float = float(stats.norm.ppf((1 + LEVEL) / 2))
) -> Interval:
    return Interval(estimate, estimate - quantile * error, estimate + quantile * error, error)


def _distinct_pairs(kind: Ints, person: Ints) -> tuple[Ints, Ints]:
    """Each kind and each person who has it, once."""
    people = int(person.max()) + 1
    return np.divmod(np.unique(kind * people + person), people)


def _share_closer(a: Floats, b: Floats) -> float:
    return float((a < b).mean() + (a == b).mean() / 2)


@dataclass(frozen=True)
class Attack:
    """How well one attack separates training from held-out people, by itself."""

    name: str
    auc: float
    tpr: float


@dataclass(frozen=True)
class Inference:
    """The best attack, measured on people that were not used to choose it."""

    auc: Interval
    tpr: Interval
    chosen: tuple[str, ...]  # by AUC, on each half


def area(members: Floats, others: Floats) -> float:
    """AUC: the probability that a member scores higher than another person; ties count half."""
    ranks = stats.rankdata(np.concatenate((members, others)))[: len(members)]
    return float((ranks.mean() - (len(members) + 1) / 2) / len(others))


def hit_rate(members: Floats, others: Floats) -> float:
    """TPR: the share of members above the threshold that one in a hundred others exceeds.

    The threshold has rank (n + 1) / 100 among n others, which may be between two of them.
    Interpolation makes the expected TPR of a random score 1 % for every n.
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
    """Each attack on everybody; `member` is 1 for training people, 0 for held-out ones."""
    sides = {name: (score[member == 1], score[member == 0]) for name, score in scores.items()}
    return tuple(Attack(name, area(*two), hit_rate(*two)) for name, two in sides.items())


def infer(
    scores: Mapping[str, Floats], member: Ints, rng: np.random.Generator, resamples: int = 200
) -> Inference:
    """The best of these attacks, with intervals over people."""
    halves = _halves(member, rng)
    auc, chosen = _cross_validated(scores, member, halves, area, rng, resamples)
    tpr, _ = _cross_validated(scores, member, halves, hit_rate, rng, resamples)
    return Inference(auc, tpr, chosen)


def trajectory_scores(cohort: Cohort, distances: SampleDistances) -> dict[str, Floats]:
    """Attacks that know a person's trajectories, (people,) each.

    Without reference people, only the attacks that need none.
    """
    owner = cohort.owner
    grams = cohort.grams
    real = owner >= 0  # (tokens,)
    likelihood = log_likelihood(grams, ~real, cohort.vocabulary_size)
    person = distances.person
    scores = {
        "closest sample": cohort.person_means(-distances.closest, person),
        "nearby samples": cohort.person_means(np.log1p(distances.near), person),
        "likelihood": cohort.person_means(likelihood[real], owner[real]),
    }
    if distances.reference is None:
        return scores
    reference = real & (cohort.side[owner] == REFERENCE)
    ratio = likelihood - log_likelihood(grams, reference, cohort.vocabulary_size)
    # A place that neither side has seen carries no information, but the smaller side would give it
    # a higher probability. Training people visit more such places: the vocabulary comes from them.
    ratio *= np.isin(grams[0].numbers, grams[0].numbers[~real | reference])
    last = grams[-1]
    ours, others = (
        np.isin(last.numbers, last.numbers[last.complete & marked]) for marked in (~real, reference)
    )
    only_ours = (last.complete & ours & ~others).astype(np.float64)
    return scores | {
        "closest sample, against reference": cohort.person_means(
            distances.reference - distances.closest, person
        ),
        "likelihood, against reference": cohort.person_means(ratio[real], owner[real]),
        f"{GRAM}-grams not in reference": cohort.person_means(only_ours[real], owner[real]),
    }


def anchor_scores(people: Floats, samples: Floats) -> dict[str, Floats]:
    """Minus the km from people's homes and workplaces (people, 4) to the nearest of samples."""
    samples = np.unique(samples, axis=0)
    nearest = np.empty((len(people), 3))
    for start in range(0, len(people), ROWS):
        block = people[start : start + ROWS, None]
        home, work = (
            _km(block[..., two], samples[None, :, two]) for two in (slice(0, 2), slice(2, 4))
        )
        nearest[start : start + ROWS] = np.stack(
            [km.min(1) for km in (np.maximum(home, work), home, work)], axis=1
        )
    return dict(zip(("home and work", "home", "work"), -nearest.T, strict=True))


def _km(a: Floats, b: Floats) -> Floats:
    km = np.nan_to_num(haversine_km(a, b), nan=FAR_KM)
    return np.where(np.isnan(a).any(-1) & np.isnan(b).any(-1), 0.0, km)


def _halves(member: Ints, rng: np.random.Generator) -> Ints:
    """0 or 1 for each person; members and others are halved separately."""
    half = np.empty(len(member), dtype=np.int64)
    for side in (0, 1):
        people = rng.permutation(np.flatnonzero(member == side))
        half[people] = np.arange(len(people)) % 2
    return half


def _cross_validated(
    scores: Mapping[str, Floats],
    member: Ints,
    half: Ints,
    measure: Measure,
    rng: np.random.Generator,
    resamples: int,
) -> tuple[Interval, tuple[str, ...]]:
    estimates = []
    draws = np.zeros(resamples)
    chosen = []
    for number in (0, 1):
        chooses = half == number
        values = {name: measure(*_sides(each, member, chooses)) for name, each in scores.items()}
        best = max(values, key=values.__getitem__)
        sides = _sides(scores[best], member, ~chooses)
        estimates.append(measure(*sides))
        draws += [
            measure(*(rng.choice(side, len(side)) for side in sides)) for _ in range(resamples)
        ]
        chosen.append(best)
    return interval(float(np.mean(estimates)), draws / 2), tuple(chosen)


def _sides(score: Floats, member: Ints, among: Flags) -> tuple[Floats, Floats]:
    return score[among & (member == 1)], score[among & (member == 0)]
