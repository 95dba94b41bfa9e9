"""The people and samples of an audit, and what their trajectories have in common.

Trajectories are compared as numbered sequences and n-grams, by a Jaccard distance, and by the
likelihood of an n-gram model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy import sparse

from mobatlas.data.arrays import Flags, Floats, Ints
from mobatlas.data.dataset import TrajectoryDataset
from mobatlas.data.trajectories import Trajectories
from mobatlas.data.vocabulary import BOS
from mobatlas.errors import MobatlasError
from mobatlas.evaluation.comparison import token_sequences

# Sides of people: members, people that the model never saw, and people that an attacker knows.
TRAIN, HELD_OUT, REFERENCE = range(3)
SPLITS = {"train": TRAIN, "test": HELD_OUT, "val": REFERENCE}
FEWEST = 20  # people on either side
GRAM = 5
NEAR = 0.5  # a sample at a smaller distance is near
LEAST_GROUPS = 4  # of training people: their spread shows how much groups differ by chance
MOST_GROUPS = 16
# Limits of pairwise comparison, so that an audit takes seconds: samples, and people and
# trajectories of each side.
MOST_SAMPLES = 4_000
MOST_PEOPLE = 4_000
MOST_TRAJECTORIES = {TRAIN: 32_000, HELD_OUT: 8_000, REFERENCE: 2_000}
BLOCK = 4_000_000  # distances in a block: 32 MB


@dataclass(frozen=True)
class Grams:
    """The n-gram that ends at each token; equal n-grams have equal numbers."""

    contexts: Ints  # (tokens,) number of the n - 1 tokens before; BOS stands before the first
    numbers: Ints  # (tokens,) number of the n-gram
    complete: Flags  # (tokens,) whether all n tokens are of the trajectory


@dataclass(frozen=True)
class Cohort:
    """Samples and real trajectories; the real ones are cut to the longest sample."""

    samples: Trajectories
    real: Trajectories
    person: Ints  # (real,) a row of `side` and `anchors`
    side: Ints  # (people,) TRAIN, HELD_OUT or REFERENCE
    anchors: Floats  # (people, 4)
    vocabulary_size: int

    @classmethod
    def of(cls, dataset: TrajectoryDataset, samples: Trajectories) -> Cohort:
        """The people of a dataset who have a trajectory."""
        rows = {side: dataset.split(split) for split, side in SPLITS.items()}
        for split, side in SPLITS.items():
            count = len(np.unique(dataset.person[rows[side]]))
            if side != REFERENCE and count < FEWEST:
                raise MobatlasError(
                    f"{dataset.path}: has {count} people in split '{split}', and an audit needs "
                    f"{FEWEST} or more; prepare more people, or give that split a larger share, "
                    "e.g. --set split.test=0.2"
                )
        chosen = np.concatenate(list(rows.values()))
        people, person = np.unique(dataset.person[chosen], return_inverse=True)
        side_of_person = np.empty(len(people), dtype=np.int64)
        side_of_person[person] = np.repeat(list(rows), [len(each) for each in rows.values()])
        return cls(
            samples,
            Trajectories.of(dataset, chosen).cut(int(np.diff(samples.offsets).max())),
            person.astype(np.int64),
            side_of_person,
            dataset.anchors[people],
            len(dataset.vocabulary),
        )

    @cached_property
    def everything(self) -> Trajectories:
        """Samples, then real trajectories."""
        return Trajectories.joined([self.samples, self.real])

    @cached_property
    def sequences(self) -> Ints:
        """The number of each sequence of `everything`."""
        return number_sequences(self.everything)

    @cached_property
    def grams(self) -> list[Grams]:
        """The n-grams of `everything`, for n from 1 to GRAM."""
        return number_grams(self.everything, GRAM)

    @cached_property
    def owner(self) -> Ints:
        """The person of each token of `everything`, -1 for samples."""
        person = np.concatenate((np.full(len(self.samples), -1), self.person))
        return person[self.everything.owner]

    def of_side(self, side: int) -> Trajectories:
        """The real trajectories of one side."""
        return self.real.take(np.flatnonzero(self.side[self.person] == side))

    def person_means(self, values: Floats, person: Ints) -> Floats:
        """The mean of the values of each person, (people,); 0 for people without any."""
        n = len(self.side)
        sums = np.bincount(person, values, minlength=n)
        return sums / np.maximum(np.bincount(person, minlength=n), 1)

    def draw_people(self, rng: np.random.Generator) -> Flags:
        """The people who are compared pairwise, (people,)."""
        chosen = np.zeros(len(self.side), dtype=bool)
        windows = np.bincount(self.person)
        for side, most in MOST_TRAJECTORIES.items():
            people = rng.permutation(np.flatnonzero(self.side == side))[:MOST_PEOPLE]
            n = int(np.searchsorted(np.cumsum(windows[people]), most, side="right"))
            chosen[people[: max(FEWEST, n)]] = True
        return chosen

    def draw_samples(self, rng: np.random.Generator) -> Trajectories:
        """The samples that are compared pairwise."""
        return self.samples.take(np.sort(rng.permutation(len(self.samples))[:MOST_SAMPLES]))


@dataclass(frozen=True)
class EqualGroups:
    """Random groups of equally many people; groups of training people come first."""

    group: Ints  # (people,) -1: in none
    training: int  # groups
    held_out: int  # groups
    scale: float  # all training people / people of one group

    @property
    def total(self) -> int:
        return self.training + self.held_out


def draw_equal_groups(side: Ints, among: Flags, rng: np.random.Generator) -> EqualGroups:
    """Groups as large as all held-out people, or smaller, so that there are LEAST_GROUPS."""
    people = [np.flatnonzero(among & (side == which)) for which in (TRAIN, HELD_OUT)]
    size = min(len(people[1]), len(people[0]) // LEAST_GROUPS)
    training, held_out = (min(len(each) // size, MOST_GROUPS) for each in people)
    group = np.full(len(side), -1, dtype=np.int64)
    for each, count, first in zip(people, (training, held_out), (0, training), strict=True):
        chosen = rng.permutation(each)[: count * size]
        group[chosen] = first + np.arange(len(chosen)) // size
    return EqualGroups(group, training, held_out, int(np.count_nonzero(side == TRAIN)) / size)


@dataclass(frozen=True)
class SampleDistances:
    """Distances between some samples and the trajectories of some people."""

    groups: Floats  # (samples, groups) to the closest trajectory of each group of people
    person: Ints  # (trajectories,)
    closest: Floats  # (trajectories,) to the closest sample
    near: Ints  # (trajectories,) number of near samples
    reference: Floats | None  # (trajectories,) to the closest trajectory of the reference

    @property
    def sizes(self) -> dict[str, int]:
        """What was compared."""
        return {
            "samples": len(self.groups),
            "people": len(np.unique(self.person)),
            "trajectories": len(self.person),
        }


def measure_distances(
    cohort: Cohort, samples: Trajectories, people: Flags, groups: EqualGroups
) -> SampleDistances:
    """Jaccard distances of tokens and of pairs of consecutive tokens, see `shingles`."""
    group = np.where(people, groups.group, -1)[cohort.person]  # (real,)
    compared = people[cohort.person]
    is_reference = cohort.side[cohort.person] == REFERENCE
    rows = np.flatnonzero(compared & ~is_reference)
    rows = rows[np.argsort(group[rows], kind="stable")]  # by group; people in none come first
    others = np.flatnonzero(compared & is_reference)
    table = shingles(
        Trajectories.joined([samples, cohort.real.take(rows), cohort.real.take(others)])
    )
    synthetic, real, reference = np.split(
        np.arange(table.shape[0]), np.cumsum([len(samples), len(rows)])
    )
    starts = np.searchsorted(group[rows], np.arange(groups.total))
    by_group = np.empty((len(samples), groups.total))
    closest = np.ones(len(rows))
    near = np.zeros(len(rows), dtype=np.int64)
    for rows_of_block, block in distances(table[synthetic], table[real]):
        by_group[rows_of_block] = np.minimum.reduceat(block, starts, axis=1)
        closest = np.minimum(closest, block.min(0))
        near += (block < NEAR).sum(0)
    to_reference = None
    if len(reference):
        to_reference = np.concatenate(
            [block.min(1) for _, block in distances(table[real], table[reference])]
        )
    return SampleDistances(by_group, cohort.person[rows], closest, near, to_reference)


def number_sequences(trajectories: Trajectories) -> Ints:
    """A number for each trajectory, (trajectories,): equal sequences have equal numbers."""
    return pd.factorize(np.array(token_sequences(trajectories), dtype=object))[0].astype(np.int64)


def number_grams(trajectories: Trajectories, n: int) -> list[Grams]:
    """The n-grams of one token, of two, ... of n."""
    tokens = trajectories.tokens.astype(np.int64)
    position = trajectories.position
    base = int(tokens.max(initial=BOS)) + 1
    context = np.zeros(len(tokens), dtype=np.int64)
    grams = []
    for before in range(n):
        if before:
            earlier = tokens[np.maximum(np.arange(len(tokens)) - before, 0)]
            context = _renumbered(context * base + np.where(position >= before, earlier, BOS))
        grams.append(Grams(context, _renumbered(context * base + tokens), position >= before))
    return grams


def log_likelihood(grams: Sequence[Grams], training: Flags, vocabulary_size: int) -> Floats:
    """The log probability of each token (tokens,) under an n-gram model of the training tokens.

    Orders are mixed as in Witten and Bell (1991). A context followed by c tokens, d of them
    distinct, has weight c / (c + d); the shorter context has the rest.
    """
    chance = np.full(len(training), 1 / vocabulary_size)
    for each in grams:
        seen = np.bincount(each.numbers[training], minlength=int(each.numbers.max(initial=0)) + 1)
        context_of = np.zeros(len(seen), dtype=np.int64)
        context_of[each.numbers] = each.contexts
        contexts = int(each.contexts.max(initial=0)) + 1
        followed = np.bincount(each.contexts[training], minlength=contexts)  # (contexts,)
        followed = followed[each.contexts]  # (tokens,)
        different = np.bincount(context_of[seen > 0], minlength=contexts)[each.contexts]
        mixed = (seen[each.numbers] + different * chance) / np.maximum(followed + different, 1)
        chance = np.where(followed > 0, mixed, chance)
    return np.log(chance)


def shingles(trajectories: Trajectories) -> sparse.csr_array:
    """The multiset of tokens and of token pairs of each trajectory: ones (trajectories, kinds).

    Repeats of a token in a trajectory count as different kinds. The product of two rows is
    therefore the size of the intersection of their multisets.
    """
    owner = trajectories.owner
    rows = []
    columns = []
    kinds = 0
    for grams in number_grams(trajectories, 2):
        row = owner[grams.complete]
        gram = grams.numbers[grams.complete]
        repeat = _times_before(row, gram)
        kind = _renumbered(gram * (int(repeat.max(initial=0)) + 1) + repeat)
        rows.append(row)
        columns.append(kinds + kind)
        kinds += int(kind.max(initial=-1)) + 1
    places = (np.concatenate(rows), np.concatenate(columns))
    ones = np.ones(len(places[0]), dtype=np.float32)
    return sparse.csr_array((ones, places), shape=(len(trajectories), kinds))


def distances(
    rows: sparse.csr_array, columns: sparse.csr_array
) -> Iterator[tuple[slice, npt.NDArray[np.float32]]]:
    """Jaccard distances of two sets of shingles, a block of rows at a time: 0 is the same."""
    mine, theirs = (np.asarray(side.sum(1)).ravel() for side in (rows, columns))
    transposed = columns.T.tocsr()
    step = max(1, BLOCK // max(1, columns.shape[0]))
    for start in range(0, rows.shape[0], step):
        block = slice(start, min(start + step, rows.shape[0]))
        common = (rows[block] @ transposed).toarray()  # (block, columns)
        yield block, 1 - common / (mine[block, None] + theirs[None] - common)


def _renumbered(codes: Ints) -> Ints:
    """0, 1, 2, ... instead of large codes, so that products of them stay small."""
    return np.unique(codes, return_inverse=True)[1].astype(np.int64)


def _times_before(owner: Ints, gram: Ints) -> Ints:
    """How often the same owner had the same n-gram before."""
    pair = pd.Series(owner * (int(gram.max(initial=0)) + 1) + gram)
    return pair.groupby(pair).cumcount().to_numpy().astype(np.int64)
