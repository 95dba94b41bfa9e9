"""The measurements of an audit: memorisation and membership inference.

Memorisation: do samples repeat training people more than people that the model never saw? Both
sides have equally many people, so matches by chance are equally frequent. A sample that
copies one training person matches a group of n of them with probability n / all. The excess of
training groups times all / n is therefore the share of samples that repeat a training person.

Membership inference: can an attacker who knows a person infer that the model saw that person? Every
attack gives each person a score; members should score higher. The best attack is chosen on one half
of the people and measured on the other, then the halves swap. A lucky choice gains nothing.

Trajectories are compared as numbered sequences and n-grams, by a Jaccard distance, and by the
likelihood of an n-gram model.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy import sparse, spatial, stats

from mobatlas.data.dataset import Trajectories, TrajectoryDataset
from mobatlas.data.types import BOS, EARTH_KM, Flags, Floats, Ints
from mobatlas.errors import MobatlasError
from mobatlas.evaluation.comparison import LEVEL, Interval, interval, token_sequences

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
FALSE_POSITIVES = 0.01
LINK_KM = 0.03  # an emitted home at most this far from a person's home is linked to it
Measure = Callable[[Floats, Floats], float]


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
    rows: Ints  # (people,) rows of the dataset's people
    vocabulary_size: int

    @property
    def people(self) -> dict[str, int]:
        """The number of people of each split."""
        return {split: int((self.side == side).sum()) for split, side in SPLITS.items()}

    @classmethod
    def of(
        cls, dataset: TrajectoryDataset, samples: Trajectories, longest: int | None = None
    ) -> Self:
        """The people of a dataset who have a trajectory, cut to the longest sample or to that."""
        refuse_few_people(dataset)
        rows = {side: dataset.split(split) for split, side in SPLITS.items()}
        chosen = np.concatenate(list(rows.values()))
        people, person = np.unique(dataset.person[chosen], return_inverse=True)
        side_of_person = np.empty(len(people), dtype=np.int64)
        side_of_person[person] = np.repeat(list(rows), [len(each) for each in rows.values()])
        return cls(
            samples,
            Trajectories.of(dataset, chosen).cut(longest or int(np.diff(samples.offsets).max())),
            person.astype(np.int64),
            side_of_person,
            dataset.anchors[people],
            people.astype(np.int64),
            len(dataset.vocabulary),
        )

    @cached_property
    def everything(self) -> Trajectories:
        """Samples, then real trajectories."""
        return Trajectories.joined([self.samples, self.real])

    @cached_property
    def sequences(self) -> Ints:
        """The number of each sequence of `everything`."""
        sequences = np.array(token_sequences(self.everything), dtype=object)
        return pd.factorize(sequences)[0].astype(np.int64)

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


def refuse_few_people(dataset: TrajectoryDataset) -> None:
    """Refuse a dataset with too few training or test people for an audit."""
    for split, side in SPLITS.items():
        count = len(np.unique(dataset.person[dataset.split(split)]))
        if side != REFERENCE and count < FEWEST:
            raise MobatlasError(
                f"{dataset.path}: split '{split}' has {count} people, and an audit needs "
                f"{FEWEST} or more; use more people, or give that split a larger share "
                "(prepare --set split.test=0.2; in a run, --set prepare.split.test=0.2)"
            )


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
    to_reference = (
        np.concatenate([block.min(1) for _, block in distances(table[real], table[reference])])
        if len(reference)
        else None
    )
    return SampleDistances(by_group, cohort.person[rows], closest, near, to_reference)


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
    return _excess_of_groups(shares, groups)


def shared_nearby(samples: Floats, real: Floats, groups: EqualGroups) -> Excess:
    """The share of places (n, 2) of samples that are near a place (people, 2) of each group.

    Unknown places are near each other on either side, so they do not add to the difference.
    """
    shares = np.empty(groups.total)
    emitted = _on_sphere(samples)
    for number in range(groups.total):
        tree = spatial.cKDTree(_on_sphere(real[groups.group == number]))
        shares[number] = np.mean(tree.query(emitted)[0] <= LINK_KM / EARTH_KM)
    return _excess_of_groups(shares, groups)


def _on_sphere(places: Floats) -> Floats:
    """Places (n, 2) on a sphere of radius 1: (n, 3). Unknown ones are at its centre: far away."""
    lat, lon = np.radians(places).T
    points = [np.cos(lat) * np.cos(lon), np.cos(lat) * np.sin(lon), np.sin(lat)]
    return np.nan_to_num(np.stack(points, axis=1))


def _excess_of_groups(shares: Floats, groups: EqualGroups) -> Excess:
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


def better_guesses(correct: Floats, side: Ints) -> Excess:
    """How much more often an attacker guesses the group of training than of held-out people."""
    ours, theirs = (correct[side == which] for which in (TRAIN, HELD_OUT))
    variance = sum(float(each.var(ddof=1)) / len(each) for each in (ours, theirs))
    train, held_out = float(ours.mean()), float(theirs.mean())
    return Excess(train, held_out, _interval(train - held_out, math.sqrt(variance)))


def guessed_groups(cohort: Cohort, groups_of_samples: Ints, count: int) -> dict[str, Ints]:
    """The group that an attacker guesses for each person (people,), by attack.

    Samples of each group are the attacker's knowledge: how likely an n-gram model of them makes
    the person's trajectories, and the group of the sample with the nearest home.
    """
    owner = cohort.owner
    real = owner >= 0  # (tokens,)
    group = np.full(len(owner), -1)
    group[~real] = groups_of_samples[cohort.samples.owner]
    likelihoods = [
        np.bincount(
            owner[real],
            log_likelihood(cohort.grams, group == number, cohort.vocabulary_size)[real],
            minlength=len(cohort.side),
        )
        for number in range(count)
    ]
    homes, asked = (_on_sphere(each.anchors[:, :2]) for each in (cohort.samples, cohort))
    return {
        "group_by_trajectory": np.argmax(likelihoods, axis=0),
        "group_by_home": groups_of_samples[spatial.cKDTree(homes).query(asked)[1]],
    }


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
    """Minus the distance of people's homes and workplaces (people, 4) to the nearest of samples."""
    ours, theirs = (
        np.hstack([_on_sphere(each[:, :2]), _on_sphere(each[:, 2:])]) for each in (people, samples)
    )
    parts = {"home and work": slice(0, 6), "home": slice(0, 3), "work": slice(3, 6)}
    return {
        name: -np.asarray(spatial.cKDTree(theirs[:, part]).query(ours[:, part])[0])
        for name, part in parts.items()
    }


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
