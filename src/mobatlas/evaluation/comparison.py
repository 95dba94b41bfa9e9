"""Compare real with synthetic trajectories by group: scores, sampling floor, gap closed, intervals.

All sides of a comparison have equally many trajectories, because the JSD falls with their number,
and sides with people, such as the floor, also equally many people.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
from scipy import sparse

from mobatlas.data.dataset import Trajectories, TrajectoryDataset
from mobatlas.data.types import Floats, Ints
from mobatlas.evaluation.metrics import MetricSpec, metrics
from mobatlas.evaluation.resampling import (
    Divergence,
    Pairing,
    Reference,
    diverge,
    match_people,
    pair_at_random,
    rank_of_person,
    resample,
)
from mobatlas.features.divergences import jsd
from mobatlas.groups import Groups

EVERYBODY = "everybody"
FLOOR = "floor"
REAL, SYNTHETIC, RESAMPLING, PAIRING, SWAPPING, REFERENCE = range(6)  # streams of random numbers
LEVEL = 0.95  # of intervals
RESAMPLES = 200
SWAPS = "swaps"  # a source of chance
NO_ERROR = 1e-9  # a smaller standard error is rounding
MAX_UNITS = 2_048  # of a bootstrap
SIGNAL = 3.0  # a gap of fewer standard errors has no percentage
Size = int | Mapping[str, int] | None  # largest number of trajectories of a group


@dataclass(frozen=True)
class Scores:
    """Divergences by group, and their unweighted mean over groups."""

    groups: dict[str, dict[str, float]]  # group -> metric -> JSD in bits
    sizes: dict[str, int]  # trajectories on either side
    people: dict[str, int]  # real people behind them
    average: dict[str, float]
    excess: dict[str, float]  # average of the JSD beyond chance, see `resampling`
    standard_error: dict[str, float]  # of the average and of the excess, over people
    diversity: dict[str, Any] | None = None  # of the samples of all groups, see `diversity`
    gap_error: dict[str, float] | None = None  # standard error of baseline minus this average

    def as_dict(self) -> dict[str, Any]:
        """The scores, for JSON."""
        return asdict(self, dict_factory=present)


def present(items: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """The fields of a result for JSON, without those that were not measured."""
    optional = ("diversity", "gap_error")
    return {name: value for name, value in items if value is not None or name not in optional}


@dataclass(frozen=True)
class Interval:
    """An estimate with its confidence interval, and the standard deviation of its resamples."""

    estimate: float
    low: float
    high: float
    spread: float


def compare(spec: MetricSpec, real: Trajectories, synthetic: Trajectories) -> dict[str, float]:
    """Every metric between two samples.

    Parameters
    ----------
    spec
        The bins, from `MetricSpec.of(dataset)`.
    real, synthetic
        Samples of equal size: the JSD falls with the size of either.

    Returns
    -------
    dict
        Metric -> JSD in bits. Metrics of time are left out unless both samples have times.

    Examples
    --------
    >>> compare(MetricSpec.of(dataset), real, synthetic)["poi"]  # doctest: +SKIP
    """
    ours = spec.histograms(real)
    theirs = spec.histograms(synthetic)
    return {name: jsd(ours[name], theirs[name]) for name in ours if name in theirs}


@dataclass(frozen=True)
class ChanceError:
    """Where the chance of a model comes from, and the variance of its mean by metric."""

    source: str
    variance: dict[str, float]


@dataclass(frozen=True)
class Comparison:
    """Scores of several models against the same real people, with bootstrap draws of averages."""

    scores: dict[str, Scores]  # model -> scores
    draws: dict[str, dict[str, Floats]]  # model -> metric -> (resamples,)
    # Model -> error of what chance leaves; without it, chance is the same for all models.
    chance: dict[str, ChanceError] = field(default_factory=dict)

    def intervals(self, model: str) -> dict[str, Interval]:
        """The 95 % interval of the average of each metric, by resampling people."""
        average = self.scores[model].average
        return {name: interval(average[name], draws) for name, draws in self.draws[model].items()}

    def gap(self, metric: str, start: str, end: str) -> tuple[float, float]:
        """The gap between two models in the excess of a metric, and its standard error.

        Excess, not JSD, because chance differs between samples with and without people.
        """
        gap = self.scores[start].excess[metric] - self.scores[end].excess[metric]
        variance = float(np.var(self.draws[start][metric] - self.draws[end][metric], ddof=1))
        ends = [self.chance[name] for name in (start, end) if name in self.chance]
        if len({each.source for each in ends}) > 1:  # otherwise chance is the same and cancels
            variance += sum(each.variance[metric] for each in ends)
        return gap, math.sqrt(variance)

    def gap_closed(self, model: str, metric: str, start: str, end: str) -> float | None:
        """The share of the gap from `start` to `end` that a model closes; None: no clear gap."""
        values = [self.scores[name].excess[metric] for name in (model, start, end)]
        error = self.gap(metric, start, end)[1]
        return gap_closed(*values, standard_error=error) if self.has_error(error) else None

    def has_error(self, error: float) -> bool:
        """Whether the standard error of a gap is known: every group has several people."""
        people = next(iter(self.scores.values())).people.values()
        return error > NO_ERROR and min(people, default=2) > 1


def compare_models(
    spec: MetricSpec,
    real: Mapping[str, Trajectories],
    models: Mapping[str, Mapping[str, Trajectories]],
    *,
    size: Size = None,
    seed: int = 0,
    resamples: int = RESAMPLES,
    reference: Mapping[str, Trajectories] | None = None,
) -> Comparison:
    """Score several models against the same real trajectories of each group.

    Parameters
    ----------
    spec
        The bins, from `MetricSpec.of(dataset)`.
    real
        Group -> trajectories of real people.
    models
        Model -> group -> trajectories, with the groups of the real side. Trajectories that have
        people, such as those of the floor, are compared at equal numbers of people as well.
    size
        Maximum number of trajectories of a group.
    seed
        Random seed of all choices.
    resamples
        Bootstrap resamples of people.
    reference
        Group -> all trajectories of training people, who show what chance leaves to models
        without people; see `resampling`.

    Returns
    -------
    Comparison
        Scores by model.

    Examples
    --------
    >>> models = {"ours": samples, "floor": training}
    >>> compare_models(spec, real, models).intervals("ours")["poi"]  # doctest: +SKIP
    """
    matched = match_groups(real, models, size, seed)
    scored: dict[str, dict[str, _GroupScore]] = {key: {} for key in models}
    for name, (ours, sides) in matched.items():
        scorer = _GroupScorer(spec, ours, [seed, crc32(name.encode())], resamples)
        chance = scorer.chance(None if reference is None else reference.get(name))
        for key, side in sides.items():
            scored[key][name] = scorer.score(side, crc32(key.encode()), chance)
    sizes = {name: len(ours) for name, (ours, _) in matched.items()}
    people = {name: len(np.unique(ours.people)) for name, (ours, _) in matched.items()}
    draws = {key: _mean_draws(groups) for key, groups in scored.items()}
    return Comparison(
        {key: _scores(groups, draws[key], sizes, people) for key, groups in scored.items()},
        draws,
        {key: _chance_error(groups, key) for key, groups in scored.items()},
    )


def match_groups(
    real: Mapping[str, Trajectories],
    models: Mapping[str, Mapping[str, Trajectories]],
    size: Size = None,
    seed: int = 0,
) -> dict[str, tuple[Trajectories, dict[str, Trajectories]]]:
    """The trajectories that `compare_models` compares: group -> real side, model -> other side."""
    return {
        name: _match(
            name, real[name], {key: side[name] for key, side in models.items()}, size, seed
        )
        for name in real
    }


def labelled_groups(dataset: TrajectoryDataset) -> Groups | None:
    """The groups of a dataset; None if its people have no labels."""
    return None if dataset.labels() is None else dataset.groups


def group_members(dataset: TrajectoryDataset, split: str) -> dict[str, Ints]:
    """The indices of the trajectories of each group, among the people of a split."""
    members = dataset.split(split)
    group = dataset.person_groups()[dataset.person[members]]
    assert dataset.groups is not None  # person_groups() raises without groups
    return {name: members[group == number] for number, name in enumerate(dataset.groups.names)}


def real_groups(dataset: TrajectoryDataset, split: str = "train") -> dict[str, Trajectories]:
    """The trajectories of real people by group."""
    return {
        name: Trajectories.of(dataset, rows) for name, rows in group_members(dataset, split).items()
    }


def average_scores(groups: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """The mean over groups of every metric that all groups have."""
    return {
        metric.name: float(np.mean([row[metric.name] for row in groups.values()]))
        for metric in metrics(with_times=True)
        if all(metric.name in row for row in groups.values())
    }


def gap_closed(
    model: float, baseline: float, target: float, *, standard_error: float = 0.0
) -> float | None:
    """The share of the gap from baseline to target that a model closes; 1 at the target.

    The target is the sampling floor (`gap_closed_floor`), the model trained on labels
    (`gap_closed_strong`, the paper's Gap Closed) or people weighted to labelled means
    (`gap_closed_labelled`). Returns None if there is no clear gap: the baseline is not worse than
    the target by at least three standard errors of the gap.
    """
    gap = baseline - target
    if not all(map(math.isfinite, (model, gap, standard_error))) or gap <= 0:
        return None
    return None if gap < SIGNAL * standard_error else 1 - (model - target) / gap


def interval(estimate: float, draws: Floats) -> Interval:
    """The interval of a number between 0 and 1, from deviations of resamples from their mean."""
    tails = ((1 - LEVEL) / 2, (1 + LEVEL) / 2)
    low, high = estimate + np.quantile(draws - draws.mean(), tails)
    return Interval(estimate, max(0.0, float(low)), min(1.0, float(high)), float(draws.std(ddof=1)))


def diversity(
    samples: Trajectories, training: Trajectories, held_out: Trajectories | None = None
) -> dict[str, Any]:
    """Shares of distinct samples and of copies of training trajectories.

    The same shares of real held-out trajectories, at equal size, are under "held_out". Real
    trajectories are cut to the length of the longest sample, as the generator saw them.
    """
    longest = int(np.diff(samples.offsets).max(initial=0))
    known = set(token_sequences(training, longest))
    n = len(samples) if held_out is None else min(len(samples), len(held_out))
    shares = _distinct_and_copies(token_sequences(samples, longest), known, n)
    if held_out is not None:
        shares["held_out"] = _distinct_and_copies(token_sequences(held_out, longest), known, n)
    return shares


def token_sequences(trajectories: Trajectories, longest: int | None = None) -> list[bytes]:
    """The tokens of each trajectory as bytes, cut to the `longest` first ones."""
    tokens = trajectories.tokens
    return [tokens[a:b][:longest].tobytes() for a, b in pairwise(trajectories.offsets.tolist())]


def _distinct_and_copies(sequences: Sequence[bytes], known: set[bytes], n: int) -> dict[str, Any]:
    """Shares among n evenly spaced sequences, because the windows of a person are adjacent."""
    rows = np.linspace(0, len(sequences) - 1, n).astype(np.int64)
    chosen = [sequences[row] for row in rows.tolist()]
    copies = sum(sequence in known for sequence in chosen)
    return {"n": n, "distinct": len(set(chosen)) / max(n, 1), "copies": copies / max(n, 1)}


# Whether a model's samples have people -> metric -> JSD by chance (draws,).
Chance = Mapping[bool, Mapping[str, Floats] | None]


class _GroupScore(NamedTuple):
    """The divergences of one group of a model."""

    found: dict[str, Divergence]  # by metric
    deviations: Floats  # (resamples, metrics)
    source: str  # of chance


GroupScores = Mapping[str, _GroupScore]  # by group


def _values(
    groups: GroupScores, value: Callable[[Divergence], float]
) -> dict[str, dict[str, float]]:
    """Group -> metric -> value."""
    return {
        group: {name: value(each) for name, each in score.found.items()}
        for group, score in groups.items()
    }


def _scores(
    groups: GroupScores, draws: Mapping[str, Floats], sizes: dict[str, int], people: dict[str, int]
) -> Scores:
    jsd_of_groups = _values(groups, lambda each: each.jsd)
    return Scores(
        groups=jsd_of_groups,
        sizes=sizes,
        people=people,
        average=average_scores(jsd_of_groups),
        excess=average_scores(_values(groups, lambda each: each.excess)),
        standard_error={name: float(each.std(ddof=1)) for name, each in draws.items()},
    )


def _mean_draws(groups: GroupScores) -> dict[str, Floats]:
    """Draws of the averages over groups."""
    draws = [
        {
            name: each.jsd + score.deviations[:, column]
            for column, (name, each) in enumerate(score.found.items())
        }
        for score in groups.values()
    ]
    average = average_scores(_values(groups, lambda each: each.jsd))
    return {name: np.mean([each[name] for each in draws], axis=0) for name in average}


def _chance_error(groups: GroupScores, model: str) -> ChanceError:
    """The error of what chance leaves."""
    sources = {score.source for score in groups.values()}
    source = sources.pop() if len(sources) == 1 else SWAPS
    means = average_scores(_values(groups, lambda each: each.chance_variance))
    variance = {name: value / len(groups) for name, value in means.items()}
    return ChanceError(f"{source} of {model}" if source == SWAPS else source, variance)


@dataclass(frozen=True)
class _GroupScorer:
    """Compares the people of one group with the samples of each model."""

    spec: MetricSpec
    real: Trajectories
    key: list[int]  # seeds of the group
    resamples: int

    def chance(self, training: Trajectories | None) -> Chance:
        """The JSDs (draws,) that chance leaves by metric, to models with and without people.

        A value is None without enough training people.
        """
        if training is None or training.person is None:
            return {True: None, False: None}
        counts = self.spec.counts(training)
        chance: dict[bool, dict[str, Floats] | None] = {}
        for by_person in (True, False):
            rng = np.random.default_rng([*self.key, REFERENCE, by_person])
            reference = Reference.of(self.real.people, training.person, rng, by_person=by_person)
            chance[by_person] = (
                None
                if reference is None
                else {name: reference.jsd(each) for name, each in counts.items()}
            )
        return chance

    def score(self, side: Trajectories, model: int, chance: Chance) -> _GroupScore:
        """Compare the real side with one model."""
        key = [*self.key, model]
        person = _numbered(self.real.people)
        partner = (
            pair_at_random(person, np.random.default_rng([*key, PAIRING]))
            if side.person is None
            else person  # _match has put partners into the order of the real side
        )
        pairing = Pairing(person, partner, _numbered(side.people), [*key, SWAPPING])
        by_chance = chance[side.person is not None]
        others = self.spec.counts(side)
        found = {
            name: diverge(
                self._counts[name],
                others[name],
                pairing,
                None if by_chance is None else by_chance.get(name),
            )
            for name in self._counts
            if name in others
        }
        weights = resample(
            pairing.people, self.resamples, np.random.default_rng([*self.key, RESAMPLING])
        )
        own_weights = resample(
            pairing.units, self.resamples, np.random.default_rng([*key, RESAMPLING])
        )
        deviations = weights @ np.stack([each.real for each in found.values()], 1)
        deviations += own_weights @ np.stack([each.other for each in found.values()], 1)
        people = "people" if side.person is not None else "samples"
        return _GroupScore(found, deviations, SWAPS if by_chance is None else people)

    @cached_property
    def _counts(self) -> dict[str, sparse.csr_array]:
        """The counts of the real side, which all models share."""
        return self.spec.counts(self.real)


def _numbered(people: Ints) -> Ints:
    """People as numbers from 0 on; above `MAX_UNITS` several of them count as one unit.

    Units of several people have the same variance, and their bootstrap takes less time.
    """
    return np.unique(people, return_inverse=True)[1] % MAX_UNITS


def _match(
    name: str,
    real: Trajectories,
    sides: Mapping[str, Trajectories],
    size: Size,
    seed: int,
) -> tuple[Trajectories, dict[str, Trajectories]]:
    """The trajectories of a group that are compared, equally many on all sides.

    The rows of a side with people are in the order of their partners on the real side.
    """
    limit = size.get(name) if isinstance(size, Mapping) else size
    smallest = min(map(len, (real, *sides.values())))
    n = smallest if limit is None else min(smallest, limit)
    key = [seed, crc32(name.encode())]
    rows = _thinned(len(real), n, [*key, REAL])
    partners = {}
    for label, side in sides.items():
        if side.person is not None:
            rng = np.random.default_rng([*key, SYNTHETIC, crc32(label.encode())])
            kept, chosen, person = match_people(real.people[rows], side.person, rng)
            partners[label] = (chosen, person)
            rows = rows[kept]
    matched = {
        label: side.take(
            _in_order(real.people[rows], *partners[label])
            if label in partners
            else _thinned(len(side), len(rows), [*key, SYNTHETIC])
        )
        for label, side in sides.items()
    }
    return real.take(rows), matched


def _thinned(total: int, n: int, key: Sequence[int]) -> Ints:
    """n of so many rows at random, in ascending order."""
    return np.sort(np.random.default_rng(key).permutation(total)[:n])


def _in_order(people: Ints, rows: Ints, partner: Ints) -> Ints:
    """Rows (any,) in the order of the real trajectories of their partners, without the others."""
    by_partner = np.argsort(partner, kind="stable")
    starts = np.searchsorted(partner[by_partner], people)  # (trajectories,)
    return rows[by_partner[starts + rank_of_person(people)]]
