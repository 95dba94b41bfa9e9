"""Memorisation: do samples repeat training people more than they repeat people whom the model never saw.

Both sides have equally many people. What a group of training people has more than chance gives, held-out people lack; a sample
that copies one training person finds that person in a group of n of them with chance n / all. So the excess times all / n is
the share of samples that repeat a training person, at any number of people.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy import stats

from mobatlas.data.arrays import Floats, Ints
from mobatlas.data.trajectories import Trajectories
from mobatlas.data.vocabulary import FIRST_POI
from mobatlas.evaluation.comparison import Interval
from mobatlas.evaluation.privacy.cohort import HELD_OUT, REFERENCE, TRAIN, Deal

LEVEL = 0.95
RARE, FEW_PLACES = (
    3,
    20,
)  # training people who visit a rare place, at most; places that tell something, at least


@dataclass(frozen=True)
class Excess:
    """What equally many people of either side give, and what that says of all samples."""

    train: float
    held_out: float
    beyond: Interval  # share of samples that repeat a training person beyond chance; below 0 by chance alone


def shared(made: Ints, real: Ints, person: Ints, dealt: Deal) -> Excess:
    """Of what samples have (numbers of sequences, n-grams, pairs of places), the share that somebody of a group has too."""
    group, kinds = dealt.group[person], 1 + max(int(made.max()), int(real.max()))
    shares = np.empty(dealt.groups)
    for number in range(dealt.groups):
        known = np.zeros(kinds, dtype=bool)
        known[real[group == number]] = True
        shares[number] = known[made].mean()
    sides = shares[: dealt.training], shares[dealt.training :]
    train, held_out = (float(each.mean()) for each in sides)
    freedom = dealt.groups - 2
    spread = math.sqrt(sum(float(((each - each.mean()) ** 2).sum()) for each in sides) / freedom)
    return Excess(train, held_out, _beyond(dealt, train - held_out, spread, freedom))


def singled_out(made: Ints, real: Ints, person: Ints, side: Ints) -> Excess:
    """The same of what exactly one real person has, which points at that person; train and held-out as of all held-out people.

    Each thing is of one person, so people simply add up, and none need be dealt into groups.
    """
    kinds, known = 1 + max(int(made.max()), int(real.max())), side[person] != REFERENCE
    which, who = _pairs(real[known], person[known])
    alone = np.bincount(which, minlength=kinds) == 1
    owner = np.zeros(kinds, dtype=np.int64)
    owner[which] = who
    found = owner[made[alone[made]]]
    repeats = np.bincount(found, minlength=len(side)) / len(
        made
    )  # (people,) share of samples that repeat each
    train, held_out = repeats[side == TRAIN], repeats[side == HELD_OUT]
    spread = math.sqrt(train.var(ddof=1) / len(train) + held_out.var(ddof=1) / len(held_out)) * len(
        train
    )
    estimate = float(train.mean() - held_out.mean()) * len(train)
    ours, theirs = (float(each.mean()) * len(held_out) for each in (train, held_out))
    return Excess(ours, theirs, _around(estimate, spread))


def closer(nearest: Floats, dealt: Deal) -> Excess:
    """Shares of samples whose closest record is of training people, and of held-out ones; ties are halved.

    `nearest` holds the distance of each sample to the closest trajectory of each group, (samples, groups).
    """
    wins = np.array([[_closer(a, b) for b in nearest.T] for a in nearest.T])  # (groups, groups)
    training = slice(0, dealt.training)
    share = float(wins[training, dealt.training :].mean())
    # Two groups of training people should draw; how far they do not is chance, once for each of the two.
    between = wins[training, training][~np.eye(dealt.training, dtype=bool)]
    spread = 2 * math.sqrt(float(((between - 0.5) ** 2).mean()) / 2)
    return Excess(share, 1 - share, _beyond(dealt, 2 * share - 1, spread, dealt.training - 1))


def rare_places(
    made: Trajectories, train: Trajectories, person: Ints, held_out: Trajectories
) -> Excess | None:
    """Of the places that few training people visit, the shares that samples and as many held-out trajectories visit.

    `person` is that of each training trajectory, both others have equally many. None where hardly any place is rare.
    """
    kinds = 1 + max(int(each.tokens.max()) for each in (made, train, held_out))
    visitors = np.bincount(
        _pairs(train.tokens.astype(np.int64), person[train.owner])[0], minlength=kinds
    )
    rare = np.flatnonzero((visitors > 0) & (visitors <= RARE) & (np.arange(kinds) >= FIRST_POI))
    if len(rare) < FEW_PLACES:
        return None
    ours, theirs = (np.isin(rare, each.tokens).astype(np.float64) for each in (made, held_out))
    more = ours - theirs  # (rare,)
    spread = float(more.std(ddof=1)) / math.sqrt(len(rare))
    return Excess(float(ours.mean()), float(theirs.mean()), _around(float(more.mean()), spread))


def _beyond(dealt: Deal, difference: float, spread: float, freedom: int) -> Interval:
    """What a difference between the mean groups of either side says of all samples; the spread is that of one group."""
    error = spread * math.sqrt(1 / dealt.training + 1 / dealt.held_out)
    return _around(
        dealt.scale * difference, dealt.scale * error, float(stats.t.ppf((1 + LEVEL) / 2, freedom))
    )


def _around(
    estimate: float, spread: float, errors: float = float(stats.norm.ppf((1 + LEVEL) / 2))
) -> Interval:
    """So many standard errors to either side."""
    return Interval(estimate, estimate - errors * spread, estimate + errors * spread, spread)


def _pairs(which: Ints, person: Ints) -> tuple[Ints, Ints]:
    """Each thing and each person who has it, once."""
    people = int(person.max()) + 1
    return np.divmod(np.unique(which * people + person), people)


def _closer(a: Floats, b: Floats) -> float:
    return float((a < b).mean() + (a == b).mean() / 2)
