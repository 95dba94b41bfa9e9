"""Likeness: what trajectories have in common, as numbers of sequences and of n-grams, a distance, and a likelihood."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
from scipy import sparse

from mobatlas.data.arrays import Floats, Ints
from mobatlas.data.trajectories import Trajectories
from mobatlas.data.vocabulary import BOS

BLOCK = 4_000_000  # distances of a block: 32 MB
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Grams:
    """The n-grams that end at each token, numbered: equal numbers are equal n-grams."""

    contexts: Ints  # (tokens,) of the n - 1 tokens before; BOS stands before the first
    numbers: Ints  # (tokens,) of these and the token itself
    whole: Flags  # (tokens,) whether all n are of the trajectory


def cut(trajectories: Trajectories, longest: int) -> Trajectories:
    """Without what comes after so many tokens."""
    kept = _position(trajectories) < longest
    lengths = np.minimum(np.diff(trajectories.offsets), longest)
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    return Trajectories(trajectories.tokens[kept], offsets, trajectories.anchors)


def number_sequences(trajectories: Trajectories) -> Ints:
    """A number for each trajectory, (trajectories,): equal ones have the same."""
    numbers: dict[bytes, int] = {}
    bounds = trajectories.offsets.tolist()
    words = (trajectories.tokens[a:b].tobytes() for a, b in pairwise(bounds))
    return np.array([numbers.setdefault(word, len(numbers)) for word in words], dtype=np.int64)


def number_grams(trajectories: Trajectories, n: int) -> list[Grams]:
    """Those of one token, of two, ... of n."""
    tokens, position = trajectories.tokens.astype(np.int64), _position(trajectories)
    words = int(tokens.max(initial=BOS)) + 1
    context, found = np.zeros(len(tokens), dtype=np.int64), []
    for before in range(n):
        if before:
            earlier = np.where(
                position >= before, tokens[np.maximum(np.arange(len(tokens)) - before, 0)], BOS
            )
            context = _renumbered(context * words + earlier)
        found.append(Grams(context, _renumbered(context * words + tokens), position >= before))
    return found


def log_likelihood(grams: Sequence[Grams], learnt: Flags, words: int) -> Floats:
    """Of each token after those before it (tokens,), under the n-gram model of the tokens marked `learnt`.

    Orders are mixed as Witten and Bell (1991) do: a context that c tokens followed, d of them different, is believed by
    c / (c + d), and the shorter context by the rest.
    """
    chance = np.full(len(learnt), 1 / words)
    for each in grams:
        seen = np.bincount(each.numbers[learnt], minlength=int(each.numbers.max(initial=0)) + 1)
        context_of = np.zeros(len(seen), dtype=np.int64)
        context_of[each.numbers] = each.contexts
        contexts = int(each.contexts.max(initial=0)) + 1
        followed = np.bincount(each.contexts[learnt], minlength=contexts)[
            each.contexts
        ]  # (tokens,)
        different = np.bincount(context_of[seen > 0], minlength=contexts)[each.contexts]
        mixed = (seen[each.numbers] + different * chance) / np.maximum(followed + different, 1)
        chance = np.where(followed > 0, mixed, chance)
    return np.log(chance)


def shingles(trajectories: Trajectories) -> sparse.csr_array:
    """The multiset of tokens and of pairs of consecutive tokens of each, (trajectories, kinds), ones.

    The second time that a trajectory has a token counts as another kind than the first, so that what two rows have in common,
    each as often as both have it, is the product of the two.
    """
    owner, rows, columns, kinds = trajectories.owner, [], [], 0
    for grams in number_grams(trajectories, 2):
        who, which = owner[grams.whole], grams.numbers[grams.whole]
        time = _times_before(who, which)
        kind = _renumbered(which * (int(time.max(initial=0)) + 1) + time)
        rows.append(who)
        columns.append(kinds + kind)
        kinds += int(kind.max(initial=-1)) + 1
    places = (np.concatenate(rows), np.concatenate(columns))
    return sparse.csr_array(
        (np.ones(len(places[0]), dtype=np.float32), places), shape=(len(trajectories), kinds)
    )


def distances(
    rows: sparse.csr_array, columns: sparse.csr_array
) -> Iterator[tuple[slice, npt.NDArray[np.float32]]]:
    """Jaccard distances of two sets of shingles, some rows at a time: 0 is the same, 1 has nothing in common."""
    mine, theirs = (np.asarray(side.sum(1)).ravel() for side in (rows, columns))
    turned, step = columns.T.tocsr(), max(1, BLOCK // max(1, columns.shape[0]))
    for start in range(0, rows.shape[0], step):
        here = slice(start, min(start + step, rows.shape[0]))
        common = (rows[here] @ turned).toarray()  # (block, columns)
        yield here, 1 - common / (mine[here, None] + theirs[None] - common)


def _position(trajectories: Trajectories) -> Ints:
    """Of each token in its trajectory."""
    return np.arange(len(trajectories.tokens)) - trajectories.offsets[trajectories.owner]


def _renumbered(codes: Ints) -> Ints:
    """0, 1, 2, ... in their place, so that products with them stay small."""
    return np.unique(codes, return_inverse=True)[1].astype(np.int64)


def _times_before(owner: Ints, which: Ints) -> Ints:
    """How often the same owner had the same before."""
    pair = owner * (int(which.max(initial=0)) + 1) + which
    order = np.argsort(pair, kind="stable")
    ordered, place = pair[order], np.arange(len(pair))
    first = np.concatenate(([True], ordered[1:] != ordered[:-1]))[: len(pair)]
    times = np.empty(len(pair), dtype=np.int64)
    times[order] = place - np.maximum.accumulate(np.where(first, place, 0))
    return times
