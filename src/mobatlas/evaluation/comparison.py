"""Compare real with synthetic trajectories by group: scores, sampling floor, gap closed, intervals.

Both sides of a comparison have equally many trajectories, because the JSD falls with their number.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any
from zlib import crc32

import numpy as np
import numpy.typing as npt
from scipy import sparse

from mobatlas.data.arrays import Floats, Ints
from mobatlas.data.dataset import TrajectoryDataset
from mobatlas.data.trajectories import Trajectories
from mobatlas.errors import MobatlasError
from mobatlas.evaluation.metrics import METRICS, MetricSpec, metrics
from mobatlas.features.divergences import column_sums, drop_empty_bins, jsd, jsd_rows
from mobatlas.groups import Groups

EVERYBODY = "everybody"
REAL, SYNTHETIC, RESAMPLING = range(3)  # streams of random numbers
LEVEL = 0.95  # of intervals
BLOCK = 4_000_000  # numbers in a block of resampled histograms: 32 MB
People = npt.NDArray[np.integer[Any]]  # (trajectories,) the person of each
Size = int | Mapping[str, int] | None  # largest number of trajectories of a group


@dataclass(frozen=True)
class Scores:
    """Divergences by group, and their unweighted mean over groups."""

    groups: dict[str, dict[str, float]]  # group -> metric -> JSD in bits
    sizes: dict[str, int]  # trajectories on either side
    average: dict[str, float]
    diversity: dict[str, Any] | None = None  # of the samples of all groups, see `diversity`

    def as_dict(self) -> dict[str, Any]:
        """The scores, for JSON."""
        return asdict(self, dict_factory=present)


def present(items: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """The fields of a result for JSON, without a diversity that was not measured."""
    return {name: value for name, value in items if (name, value) != ("diversity", None)}


@dataclass(frozen=True)
class Floor:
    """Scores of real training people: the JSD that sampling alone leaves."""

    groups: Scores | None  # None if the dataset has no labels
    everybody: Scores  # all people as one group, with or without labels


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


def evaluate_groups(
    spec: MetricSpec,
    real: Mapping[str, Trajectories],
    synthetic: Mapping[str, Trajectories],
    *,
    size: Size = None,
    seed: int = 0,
) -> Scores:
    """Every metric by group, at equal sizes.

    Parameters
    ----------
    spec
        The bins, from `MetricSpec.of(dataset)`.
    real, synthetic
        Group -> trajectories, with the same groups on both sides.
    size
        Maximum number of trajectories of a group. The larger side is thinned at random to the size
        of the smaller one.
    seed
        Random seed of the thinning. Models with equally many samples are compared with the same
        real trajectories.

    Returns
    -------
    Scores
        Divergences by group and their average.

    Examples
    --------
    >>> scores = evaluate_groups(spec, real, synthetic)  # doctest: +SKIP
    >>> scores.average["poi"]  # doctest: +SKIP
    """
    groups = {}
    sizes = {}
    for name in _common_groups(real, synthetic):
        mine, theirs = _equal_rows(name, len(real[name]), len(synthetic[name]), size, seed)
        groups[name] = compare(spec, real[name].take(mine), synthetic[name].take(theirs))
        sizes[name] = len(mine)
    return Scores(groups, sizes, average_scores(groups))


def sampling_floor(
    dataset: TrajectoryDataset,
    spec: MetricSpec | None = None,
    *,
    split: str = "test",
    size: Size = None,
    seed: int = 0,
) -> Floor:
    """Score real training people against real people of a split, at equal sizes.

    Parameters
    ----------
    dataset
        The prepared dataset. A person is in one split only.
    spec
        The bins, by default those of the training people.
    split
        The people to compare with.
    size
        Maximum number of trajectories, as in `evaluate_groups`. Pass the sizes of the scores that
        you compare with the floor; a mapping may also name 'everybody'.
    seed
        Decides which trajectories are compared.

    Returns
    -------
    Floor
        Scores by group, if the dataset has labels, and of everybody.

    Examples
    --------
    >>> sampling_floor(dataset).everybody.average["poi"]  # doctest: +SKIP
    """
    spec = MetricSpec.of(dataset) if spec is None else spec
    everybody = [
        {EVERYBODY: Trajectories.of(dataset, dataset.split(side))} for side in (split, "train")
    ]
    groups = None
    if labelled_groups(dataset) is not None:
        sides = [real_groups(dataset, side) for side in (split, "train")]
        groups = evaluate_groups(spec, *sides, size=size, seed=seed)
    return Floor(groups, evaluate_groups(spec, *everybody, size=size, seed=seed))


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
        name: float(np.mean([row[name] for row in groups.values()]))
        for name in METRICS
        if all(name in row for row in groups.values())
    }


def gap_closed(model: float, baseline: float, target: float, spread: float = 0.0) -> float | None:
    """The share of the gap from baseline to target that a model closes; 1 at the target.

    The target is the sampling floor or the labelled model. Returns None if there is no gap:
    the baseline is not worse than the target, or by less than `spread`.
    """
    gap = baseline - target
    if not (math.isfinite(model) and math.isfinite(gap)) or gap <= 0 or gap < spread:
        return None
    return 1 - (model - target) / gap


def bootstrap(
    spec: MetricSpec,
    real: Mapping[str, Trajectories],
    synthetic: Mapping[str, Trajectories],
    people: Mapping[str, People],
    *,
    size: Size = None,
    seed: int = 0,
    resamples: int = 200,
) -> dict[str, Interval]:
    """95 % intervals of the averages that `evaluate_groups` returns for the same arguments.

    `people` is the person of each real trajectory. Real people, with all their windows, and
    synthetic trajectories are resampled with replacement. The JSD of resamples is larger than that
    of the samples because histograms are sparse. Each interval is therefore centred on the
    estimate.
    """
    names = _common_groups(real, synthetic)
    timed = all(side.stays is not None for side in (*real.values(), *synthetic.values()))
    draws = {metric.name: np.zeros(resamples) for metric in metrics(timed)}
    estimates = dict.fromkeys(draws, 0.0)
    for name in names:
        mine, theirs = _equal_rows(name, len(real[name]), len(synthetic[name]), size, seed)
        rng = np.random.default_rng([seed, crc32(name.encode()), RESAMPLING])
        weights = (
            _resampled_weights(people[name][mine], resamples, rng),
            _resampled_weights(np.arange(len(theirs)), resamples, rng),
        )
        ours = spec.counts(real[name].take(mine))
        others = spec.counts(synthetic[name].take(theirs))
        for metric in draws:
            estimates[metric] += jsd(column_sums(ours[metric]), column_sums(others[metric]))
            draws[metric] += _resampled_jsd(drop_empty_bins(ours[metric], others[metric]), weights)
    return {
        metric: interval(estimates[metric] / len(names), each / len(names))
        for metric, each in draws.items()
    }


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


def _common_groups(
    real: Mapping[str, Trajectories], synthetic: Mapping[str, Trajectories]
) -> list[str]:
    """The groups in the order of the real side; both sides must have the same."""
    for name in [*real, *synthetic]:
        if name not in real or name not in synthetic:
            missing = "synthetic" if name in real else "real"
            raise MobatlasError(
                f"group '{name}' has no {missing} trajectories; give the same groups on both sides"
            )
    if not real:
        raise MobatlasError("there is no group to evaluate; give at least one on both sides")
    return list(real)


def _equal_rows(name: str, real: int, synthetic: int, size: Size, seed: int) -> tuple[Ints, Ints]:
    """Which trajectories of a group are compared, equally many on either side."""
    limit = size.get(name) if isinstance(size, Mapping) else size
    n = min(real, synthetic) if limit is None else min(real, synthetic, limit)
    if n < 1:
        raise MobatlasError(
            f"group '{name}' cannot be compared: it has {real} real and {synthetic} synthetic "
            "trajectories" + ("" if limit is None else f" at size {limit}")
        )
    mine, theirs = (
        np.sort(np.random.default_rng([seed, crc32(name.encode()), side]).permutation(total)[:n])
        for side, total in ((REAL, real), (SYNTHETIC, synthetic))
    )
    return mine, theirs


def _resampled_weights(unit: People, resamples: int, rng: np.random.Generator) -> Floats:
    """How often each row is drawn, (resamples, rows), if units are drawn with all their rows."""
    _, number = np.unique(unit, return_inverse=True)
    units = int(number.max()) + 1
    drawn = rng.multinomial(units, np.full(units, 1 / units), size=resamples)  # (resamples, units)
    return drawn[:, number].astype(np.float64)


def _resampled_jsd(
    tables: tuple[sparse.csr_array, sparse.csr_array], weights: tuple[Floats, Floats]
) -> Floats:
    """The JSD of each resample, (resamples,): weights times counts, a block at a time."""
    block = max(1, BLOCK // max(1, tables[0].shape[1]))
    blocks = [slice(start, start + block) for start in range(0, len(weights[0]), block)]
    return np.concatenate(
        [jsd_rows(weights[0][rows] @ tables[0], weights[1][rows] @ tables[1]) for rows in blocks]
    )
