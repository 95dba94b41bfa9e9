"""Sampling error of the JSD between real people and other trajectories.

People are the units, because the windows of one person are alike. Two numbers follow from them:

excess
    Even two samples of the same people have a JSD above zero; the excess is the JSD beyond what
    chance leaves. Without other information each person and the partner change sides at random,
    and the mean JSD of these swaps is chance. The excess then has mean zero if both sides come
    from the same people. If all training people are known, chance is the JSD between two sets of
    them, see `Reference`: the same for all models, so that differences of excess are differences
    of JSD.
draws
    A bootstrap over people of either side. It resamples the linear part of the JSD, the
    contribution of every person, which costs one matrix product for all metrics. Near the floor
    the quadratic part dominates: there the linear part is up to 1.4 times too wide, which the
    variance of chance corrects.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np
from scipy import sparse

from mobatlas.data.types import Flags, Floats, Ints
from mobatlas.features.divergences import jsd, jsd_rows

SWAPS = 32
MAX_RATIO = 1.3  # of chance to the JSD
NULL_SHARE = 0.55  # of the variance by chance: the smallest variance of a JSD
MAX_REFERENCE_ROWS = 30_000  # over all draws, but at least four and at most 16 draws
MANY_VISITS = 10  # of a bin on either side
BLOCKS = 128  # of pairs that change sides together
TINY = np.float32(1e-30)
DENSE_CELLS = 2**22  # a larger table of blocks and bins is sparse


@dataclass(frozen=True)
class Pairing:
    """Which trajectories of the two sides belong together.

    Parameters
    ----------
    person
        The person of each real trajectory, from 0: (trajectories,).
    partner
        The real person that each other trajectory is paired with: (trajectories,). A real person
        has as many partners as trajectories.
    unit
        The person of each other trajectory, from 0: (trajectories,).
    seed
        Random seed of swaps.
    """

    person: Ints
    partner: Ints
    unit: Ints
    seed: Sequence[int]

    @cached_property
    def people(self) -> int:
        """Real people."""
        return int(self.person.max()) + 1

    @cached_property
    def units(self) -> int:
        """People of the other side."""
        return int(self.unit.max()) + 1

    @cached_property
    def blocks(self) -> int:
        """Blocks of pairs."""
        return min(self.people, BLOCKS)

    @cached_property
    def swaps(self) -> Floats:
        """Whether each block keeps its side, (swaps, blocks)."""
        rng = np.random.default_rng(self.seed)
        return rng.integers(0, 2, (SWAPS, self.blocks)).astype(np.float64)

    def block(self, person: Ints) -> Ints:
        """The block of the pair of each real person."""
        return person * self.blocks // self.people


@dataclass(frozen=True)
class Divergence:
    """The JSD of one metric with its sampling error."""

    jsd: float
    excess: float
    real: Floats  # (people,) contribution of each real person to the error
    other: Floats  # (units,) contribution of each person of the other side
    chance_variance: float  # of the mean over draws of chance


@dataclass(frozen=True)
class _Side:
    """Entries of a table of counts: trajectory, bin among those that occur, count."""

    row: Ints
    bin: Ints
    count: Floats
    total: Floats  # (bins,)


def diverge(
    real: sparse.csr_array,
    other: sparse.csr_array,
    pairing: Pairing,
    by_chance: Floats | None = None,
) -> Divergence:
    """Compare counts (trajectories, bins) of the two sides of a pairing.

    `by_chance` are JSDs (draws,) that chance leaves, by default those of swaps.
    """
    first, second = _sides(real, other)
    value = float(jsd_rows(first.total[None], second.total[None])[0])
    if not len(first.row) or not len(second.row):
        return Divergence(value, value, np.zeros(pairing.people), np.zeros(pairing.units), 0.0)
    draws = _swapped_jsd(first, second, pairing) if by_chance is None else by_chance
    chance = float(draws.mean())
    contributions = (
        _contributions(first, second, pairing.person, pairing.people),
        _contributions(second, first, pairing.unit, pairing.units),
    )
    linear = sum(float(np.square(each).sum()) for each in contributions)
    # By chance alone the JSD is quadratic in bins with many visits, and its variance L / 2.
    # Not capped at 1: a JSD that is by chance below what chance leaves must not widen the others.
    ratio = min(MAX_RATIO, chance / value) if value > 0 else 1.0
    quadratic = ratio * _dense_share(first, second)
    variance = max(linear * (1 - quadratic / 2), NULL_SHARE * float(draws.var(ddof=1)))
    scale = np.sqrt(variance / linear) if linear > 0 else 0.0
    ours, theirs = (scale * each for each in contributions)
    chance_variance = float(draws.var(ddof=1)) / len(draws)
    return Divergence(value, value - chance, ours, theirs, chance_variance)


@dataclass(frozen=True)
class Reference:
    """Pairs of samples of real training people, whose JSD is what chance leaves to a model.

    Parameters
    ----------
    first, second
        For each draw, which trajectories of training people are on either side: (draws,
        trajectories), one or zero.
    """

    first: sparse.csr_array
    second: sparse.csr_array

    @classmethod
    def of(
        cls, real: Ints, training: Ints, rng: np.random.Generator, *, by_person: bool
    ) -> Self | None:
        """Draw both sides from the people of training trajectories; None if they are too few.

        The first side has as many people as the real side, and as many trajectories of each. The
        second is alike with `by_person`, as for a model whose samples have people. Otherwise it
        has as many trajectories, of as many other people as there are.
        """
        n = len(real)
        rows: list[list[Ints]] = [[], []]
        for _ in range(int(np.clip(MAX_REFERENCE_ROWS // max(n, 1), 4, 16))):
            _, first, _ = match_people(real, training, rng)
            others = np.flatnonzero(~np.isin(training, training[first]))
            if by_person:
                second = others[match_people(real, training[others], rng)[1]]
            else:
                order = rng.permutation(len(others))
                rank = rank_of_person(training[others[order]])
                second = others[order[np.argsort(rank, kind="stable")]][:n]
            if min(len(first), len(second)) < n:
                return None
            rows[0].append(first)
            rows[1].append(second)
        return cls(*(_indicator(each, len(training)) for each in rows))

    def jsd(self, counts: sparse.csr_array) -> Floats:
        """The JSD of each draw, (draws,), from counts of training people (trajectories, bins)."""
        ours, others = self.first @ counts, self.second @ counts
        return np.array([jsd(ours[[draw]], others[[draw]]) for draw in range(ours.shape[0])])


def _indicator(rows: list[Ints], columns: int) -> sparse.csr_array:
    """How often each draw has each trajectory, (draws, columns)."""
    draw = np.repeat(np.arange(len(rows)), [len(each) for each in rows])
    shape = (len(rows), columns)
    return sparse.csr_array((np.ones(len(draw)), (draw, np.concatenate(rows))), shape=shape)


def rank_of_person(person: Ints) -> Ints:
    """The number of earlier rows of the same person, (rows,)."""
    order = np.argsort(person, kind="stable")
    rank = np.empty(len(person), dtype=np.int64)
    rank[order] = np.arange(len(person)) - np.searchsorted(person[order], person[order])
    return rank


def resample(units: int, draws: int, rng: np.random.Generator) -> Floats:
    """How often each of `units` people is drawn with replacement, minus one: (draws, units)."""
    places = rng.integers(units, size=(draws, units)) + units * np.arange(draws)[:, None]
    counts = np.bincount(places.ravel(), minlength=draws * units)
    return np.asarray(counts.reshape(draws, units) - 1.0)


def pair_at_random(person: Ints, rng: np.random.Generator) -> Ints:
    """Partners for trajectories that have no people: a random real person for each."""
    return rng.permutation(person)


def match_people(
    person: Ints, candidates: Ints, rng: np.random.Generator
) -> tuple[Ints, Ints, Ints]:
    """Choose candidates with as many people, and as many trajectories of each, as the real side.

    Parameters
    ----------
    person
        The person of each real trajectory: (trajectories,).
    candidates
        The person of each trajectory of the other side: (candidates,).
    rng
        Random numbers.

    Returns
    -------
    tuple
        The rows of real trajectories that have a partner, the rows of candidates, and the real
        person of each of these candidates. A real person loses trajectories only if no candidate
        is left with as many.
    """
    mine = _rows_by_person(person, rng)
    theirs = _rows_by_person(candidates, rng)
    order = sorted(theirs, key=lambda each: -len(theirs[each]))
    free: list[int] = []  # candidates with enough trajectories, in random order
    real_rows: list[Ints] = []
    rows: list[Ints] = []
    partners: list[Ints] = []
    position = 0
    for name in sorted(mine, key=lambda each: -len(mine[each])):
        wanted = len(mine[name])
        while position < len(order) and len(theirs[order[position]]) >= wanted:
            free.append(order[position])
            position += 1
        if free:
            place = int(rng.integers(len(free)))
            free[place], free[-1] = free[-1], free[place]
            chosen = free.pop()
        elif position < len(order):
            chosen = order[position]
            position += 1
        else:
            break
        n = min(wanted, len(theirs[chosen]))
        real_rows.append(mine[name][:n])
        rows.append(theirs[chosen][:n])
        partners.append(np.full(n, name))
    if not rows:
        empty = np.zeros(0, dtype=np.int64)
        return empty, empty, empty
    return np.sort(np.concatenate(real_rows)), np.concatenate(rows), np.concatenate(partners)


def _rows_by_person(person: Ints, rng: np.random.Generator) -> dict[int, Ints]:
    """The rows of each person, people and rows in random order."""
    rows = rng.permutation(len(person))
    rows = rows[np.argsort(person[rows], kind="stable")]
    names, starts = np.unique(person[rows], return_index=True)
    parts = dict(zip(names.tolist(), np.split(rows, starts[1:]), strict=True)) if len(rows) else {}
    return {names[place]: parts[names[place]] for place in rng.permutation(len(names))}


def _sides(real: sparse.csr_array, other: sparse.csr_array) -> tuple[_Side, _Side]:
    """Both tables with bins numbered among those that occur on either side."""
    bins = real.shape[1]
    if bins <= 4 * (real.nnz + other.nnz):
        occurs = np.zeros(bins, dtype=bool)
        occurs[real.indices] = True
        occurs[other.indices] = True
        place = np.cumsum(occurs) - 1
        columns = place[real.indices], place[other.indices]
        number = int(place[-1]) + 1
    else:
        distinct, back = np.unique(
            np.concatenate((real.indices, other.indices)), return_inverse=True
        )
        columns = back[: real.nnz], back[real.nnz :]
        number = len(distinct)
    first, second = (
        _Side(
            np.repeat(np.arange(table.shape[0]), np.diff(table.indptr)),
            column,
            table.data,
            np.bincount(column, weights=table.data, minlength=number).astype(np.float64),
        )
        for table, column in zip((real, other), columns, strict=True)
    )
    return first, second


def _dense_share(first: _Side, second: _Side) -> float:
    """The share of the JSD that comes from bins with many visits, from 0 to 1."""
    p, q = (each.total / each.total.sum() for each in (first, second))
    middle = (p + q) / 2
    parts = np.zeros(len(p))
    for side in (p, q):
        parts += side * np.log2(side / middle, out=np.zeros(len(p)), where=side > 0)
    visits = (first.total + second.total) / 2
    total = float(parts.sum())
    return float(parts @ np.minimum(visits / MANY_VISITS, 1)) / total if total > 0 else 1.0


def _contributions(side: _Side, other: _Side, person: Ints, people: int) -> Floats:
    """What each person of a side adds to the JSD, to first order: (people,)."""
    p, q = (each.total / each.total.sum() for each in (side, other))
    slope = np.zeros(len(p))
    np.log2(2 * p / (p + q), out=slope, where=p > 0)
    slope = (slope - p @ slope) / (2 * side.total.sum())
    added = np.bincount(
        person[side.row], weights=side.count * slope[side.bin], minlength=people
    ).astype(np.float64)
    # A bootstrap of n people has the variance of n - 1.
    return np.asarray(added * np.sqrt(people / max(people - 1, 1)))


def _swapped_jsd(first: _Side, second: _Side, pairing: Pairing) -> Floats:
    """The JSD after each swap, (swaps,)."""
    bins = len(first.total)
    blocks = pairing.block(pairing.person), pairing.block(pairing.partner)
    tables = [
        _table(blocks[number][side.row], side, pairing.blocks, bins)
        for number, side in enumerate((first, second))
    ]
    occurring = _cells(tables[0]) + _cells(tables[1])  # (bins,)
    shared = np.flatnonzero(occurring > 1)
    # A bin of one block has all of its visits on one side, whichever: only their sum matters.
    single = occurring == 1  # (bins,)
    sums = np.stack([table @ single.astype(np.float64) for table in tables])  # (2, blocks)
    a, b = (table[:, shared] for table in tables)
    stay = pairing.swaps  # (swaps, blocks)
    ours = np.asarray(stay @ (a - b)) + np.asarray(b.sum(0)).ravel()  # (swaps, shared)
    theirs = first.total[shared] + second.total[shared] - ours
    alone = stay @ (sums[0] - sums[1]) + sums[1].sum()  # (swaps,)
    return _jsd_with_single(ours, theirs, alone, sums.sum() - alone)


def _jsd_with_single(p: Floats, q: Floats, p_single: Floats, q_single: Floats) -> Floats:
    """The JSD of histograms (rows, bins), each with visits (rows,) in bins of its own."""
    p_sum = p.sum(1) + p_single
    q_sum = q.sum(1) + q_single
    empty: Flags = np.minimum(p_sum, q_sum) == 0
    # Single precision is ten times faster, and its error of 1e-7 far below chance.
    p = (p / np.maximum(p_sum, 1e-300)[:, None]).astype(np.float32)
    q = (q / np.maximum(q_sum, 1e-300)[:, None]).astype(np.float32)
    share = p / np.maximum(p + q, TINY)
    nats = (p * np.log(np.maximum(2 * share, TINY))).sum(1, dtype=np.float64)
    nats += (q * np.log(np.maximum(2 - 2 * share, TINY))).sum(1, dtype=np.float64)
    alone = p_single / np.maximum(p_sum, 1e-300) + q_single / np.maximum(q_sum, 1e-300)
    return np.where(empty, 1.0, np.clip(nats / np.log(4) + alone / 2, 0, 1))


def _table(block: Ints, side: _Side, blocks: int, bins: int) -> Floats | sparse.csr_array:
    """The counts of each block, (blocks, bins)."""
    if blocks * bins <= DENSE_CELLS:
        cells = np.bincount(block * bins + side.bin, weights=side.count, minlength=blocks * bins)
        return cells.reshape(blocks, bins).astype(np.float64)
    return sparse.csr_array((side.count, (block, side.bin)), shape=(blocks, bins))


def _cells(table: Floats | sparse.csr_array) -> Ints:
    """In how many blocks each bin occurs, (bins,)."""
    if isinstance(table, sparse.csr_array):
        return np.bincount(table.indices, minlength=table.shape[1])
    return np.count_nonzero(table, axis=0)
