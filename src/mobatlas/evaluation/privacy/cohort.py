"""The crowd of an audit: samples, and the real people beside whom they stand."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from mobatlas.data.arrays import Floats, Ints
from mobatlas.data.dataset import TrajectoryDataset
from mobatlas.data.trajectories import Trajectories
from mobatlas.errors import MobatlasError
from mobatlas.evaluation.privacy.ngrams import (
    Flags,
    Grams,
    cut,
    distances,
    number_grams,
    number_sequences,
    shingles,
)

TRAIN, HELD_OUT, REFERENCE = (
    0,
    1,
    2,
)  # sides of people; the last are those whom an attacker knows besides
SPLITS = {"train": TRAIN, "test": HELD_OUT, "val": REFERENCE}
FEWEST = 20  # people on either side
GRAM = 5
NEAR = 0.5  # distance of a sample that is near
GROUPS = 4  # of training people, at least: their spread tells how much groups differ by chance
MOST_GROUPS = 16
# What is compared one by one, at most: samples, people of a side, trajectories of a side. Seconds, not hours.
MOST_SAMPLES, MOST_PEOPLE, MOST = 4_000, 4_000, {TRAIN: 32_000, HELD_OUT: 8_000, REFERENCE: 2_000}


@dataclass(frozen=True)
class Crowd:
    """Samples and real trajectories, the latter cut to the longest sample, as the generator saw them."""

    made: Trajectories
    real: Trajectories
    person: Ints  # (real,) a row of the two below
    side: Ints  # (people,) training, held-out, or an attacker's reference
    anchors: Floats  # (people, 4)
    words: int  # of the vocabulary

    @classmethod
    def of(cls, dataset: TrajectoryDataset, made: Trajectories) -> Crowd:
        """Training, test and validation people of a dataset, who have a trajectory."""
        rows = {which: dataset.split(split) for split, which in SPLITS.items()}
        for split, which in SPLITS.items():
            count = len(np.unique(dataset.person[rows[which]]))
            if which != REFERENCE and count < FEWEST:
                raise MobatlasError(
                    f"{dataset.path}: has {count} people in split '{split}', and an audit needs {FEWEST} or more; prepare more "
                    "people, or give that split a larger share, e.g. --set split.test=0.2"
                )
        chosen = np.concatenate(list(rows.values()))
        people, person = np.unique(dataset.person[chosen], return_inverse=True)
        side = np.empty(len(people), dtype=np.int64)
        side[person] = np.repeat(list(rows), [len(each) for each in rows.values()])
        longest = int(np.diff(made.offsets).max())
        real = cut(Trajectories.of(dataset, chosen), longest)
        return cls(
            made,
            real,
            person.astype(np.int64),
            side,
            dataset.anchors[people],
            len(dataset.vocabulary),
        )

    @cached_property
    def everything(self) -> Trajectories:
        """Samples, then real trajectories."""
        return Trajectories.joined([self.made, self.real])

    @cached_property
    def sequences(self) -> Ints:
        """Numbers of them all."""
        return number_sequences(self.everything)

    @cached_property
    def grams(self) -> list[Grams]:
        """Of one to five tokens, of them all."""
        return number_grams(self.everything, GRAM)

    @cached_property
    def owner(self) -> Ints:
        """The person of each token of them all, -1 of samples."""
        return np.concatenate((np.full(len(self.made), -1), self.person))[self.everything.owner]

    def of_side(self, side: int) -> Trajectories:
        """The real trajectories of one side."""
        return self.real.take(np.flatnonzero(self.side[self.person] == side))

    def mean(self, values: Floats, person: Ints) -> Floats:
        """Over what each person has, (people,); 0 for nothing."""
        n = len(self.side)
        return np.bincount(person, values, minlength=n) / np.maximum(
            np.bincount(person, minlength=n), 1
        )

    def some_people(self, rng: np.random.Generator) -> Flags:
        """Those who are compared one by one, (people,)."""
        chosen, windows = np.zeros(len(self.side), dtype=bool), np.bincount(self.person)
        for side, most in MOST.items():
            people = rng.permutation(np.flatnonzero(self.side == side))[:MOST_PEOPLE]
            n = int(np.searchsorted(np.cumsum(windows[people]), most, side="right"))
            chosen[people[: max(FEWEST, n)]] = True
        return chosen

    def some_samples(self, rng: np.random.Generator) -> Trajectories:
        """Those that are compared one by one."""
        return self.made.take(np.sort(rng.permutation(len(self.made))[:MOST_SAMPLES]))


@dataclass(frozen=True)
class Deal:
    """People dealt at random into groups of one size, those of training people first."""

    group: Ints  # (people,) -1: in none
    training: int  # groups
    held_out: int
    scale: float  # training people for each one of a group

    @property
    def groups(self) -> int:
        return self.training + self.held_out


def deal(side: Ints, among: Flags, rng: np.random.Generator) -> Deal:
    """Groups of some people: as large as there are held-out ones, or smaller, so that training people make several."""
    people = [np.flatnonzero(among & (side == which)) for which in (TRAIN, HELD_OUT)]
    size = min(len(people[1]), len(people[0]) // GROUPS)
    counts = [min(len(each) // size, MOST_GROUPS) for each in people]
    group, made = np.full(len(side), -1, dtype=np.int64), 0
    for each, count in zip(people, counts, strict=True):
        chosen = rng.permutation(each)[: count * size]
        group[chosen] = made + np.arange(len(chosen)) // size
        made += count
    return Deal(group, counts[0], counts[1], int(np.count_nonzero(side == TRAIN)) / size)


@dataclass(frozen=True)
class Nearness:
    """Distances between some samples and the trajectories of some people."""

    groups: Floats  # (samples, groups) to the closest trajectory of each group of people
    person: Ints  # (trajectories,)
    closest: Floats  # (trajectories,) to the closest sample
    near: Ints  # (trajectories,) samples that are near
    reference: Floats | None  # (trajectories,) to the closest trajectory of the reference


def nearness(crowd: Crowd, samples: Trajectories, people: Flags, dealt: Deal) -> Nearness:
    """Jaccard distances of tokens and pairs of consecutive tokens, see `shingles`."""
    group = np.where(people, dealt.group, -1)[crowd.person]  # (real,)
    compared = people[crowd.person]
    rows = np.flatnonzero(compared & (crowd.side[crowd.person] != REFERENCE))
    rows = rows[
        np.argsort(group[rows], kind="stable")
    ]  # a group after the other, those in none first
    others = np.flatnonzero(compared & (crowd.side[crowd.person] == REFERENCE))
    table = shingles(Trajectories.joined([samples, crowd.real.take(rows), crowd.real.take(others)]))
    made, real, known = np.split(np.arange(table.shape[0]), np.cumsum([len(samples), len(rows)]))
    starts = np.searchsorted(group[rows], np.arange(dealt.groups))
    groups = np.empty((len(samples), dealt.groups))
    closest, near = np.ones(len(rows)), np.zeros(len(rows), dtype=np.int64)
    for here, found in distances(table[made], table[real]):
        groups[here] = np.minimum.reduceat(found, starts, axis=1)
        closest = np.minimum(closest, found.min(0))
        near += (found < NEAR).sum(0)
    reference = None
    if len(known):
        reference = np.concatenate(
            [found.min(1) for _, found in distances(table[real], table[known])]
        )
    return Nearness(groups, crowd.person[rows], closest, near, reference)
