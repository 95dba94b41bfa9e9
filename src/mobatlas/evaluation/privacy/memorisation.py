"""Memorisation: do samples repeat training people more than people that the model never saw?

Both sides have equally many people, so what they share with samples by chance is equal. A sample
that copies one training person matches a group of n of them with probability n / all. The excess
of training groups times all / n is therefore the share of samples that repeat a training person.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy import stats

from mobatlas.data.arrays import Floats, Ints
from mobatlas.data.trajectories import Trajectories
from mobatlas.data.vocabulary import FIRST_POI
from mobatlas.evaluation.comparison import LEVEL, Interval
from mobatlas.evaluation.privacy.cohort import HELD_OUT, REFERENCE, TRAIN, EqualGroups

RARE = 3  # a rare place has at most so many visitors among training people
FEWEST_PLACES = 20  # rare places that the check needs


@dataclass(frozen=True)
class Excess:
    """What equally many people of either side share with samples, and the excess of training."""

    train: float
    held_out: float
    interval: Interval  # share of samples that repeat a training person; below 0 by chance alone


def shared(samples: Ints, real: Ints, person: Ints, groups: EqualGroups) -> Excess:
    """The share of samples that somebody of a group has too.

    `samples` and `real` are numbers of sequences, n-grams or pairs of places.
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
    """The same for what exactly one real person has, which points at that person.

    People add up, so nobody is divided into groups. Shares are scaled to the number of held-out
    people.
    """
    kinds = 1 + max(int(samples.max()), int(real.max()))
    known = side[person] != REFERENCE
    kind, who = _distinct_pairs(real[known], person[known])
    unique = np.bincount(kind, minlength=kinds) == 1
    owner = np.zeros(kinds, dtype=np.int64)
    owner[kind] = who
    repeated = owner[samples[unique[samples]]]
    # (people,) the share of samples that repeat each person
    repeats = np.bincount(repeated, minlength=len(side)) / len(samples)
    train = repeats[side == TRAIN]
    held_out = repeats[side == HELD_OUT]
    variance = train.var(ddof=1) / len(train) + held_out.var(ddof=1) / len(held_out)
    spread = math.sqrt(variance) * len(train)
    estimate = float(train.mean() - held_out.mean()) * len(train)
    ours, theirs = (float(each.mean()) * len(held_out) for each in (train, held_out))
    return Excess(ours, theirs, _interval(estimate, spread))


def closer(nearest: Floats, groups: EqualGroups) -> Excess:
    """Shares of samples whose closest trajectory is of training or held-out people; ties halve.

    `nearest` is the distance to the closest trajectory of each group, (samples, groups).
    """
    wins = np.array([[_share_closer(a, b) for b in nearest.T] for a in nearest.T])  # (g, g)
    training = slice(0, groups.training)
    share = float(wins[training, groups.training :].mean())
    # Two groups of training people should tie; their deviation is chance, once for each of them.
    between = wins[training, training][~np.eye(groups.training, dtype=bool)]
    spread = 2 * math.sqrt(float(((between - 0.5) ** 2).mean()) / 2)
    interval = _scaled_interval(groups, 2 * share - 1, spread, groups.training - 1)
    return Excess(share, 1 - share, interval)


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
    """From the difference between the mean groups of either side to all samples."""
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
