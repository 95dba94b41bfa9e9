"""Daily motifs: the network of places and moves of one day (Schneider et al. 2013)."""

from functools import cache
from itertools import permutations

import numpy as np

from mobatlas.data.arrays import Ints
from mobatlas.data.schema import DAY
from mobatlas.data.trajectories import Trajectories

MAX_PLACES = 6  # days with more places share one bin
MORE_PLACES = -1
COMMON = 60  # motifs of real days with bins of their own


def daily_motifs(trajectories: Trajectories, window_days: int) -> tuple[Ints, Ints]:
    """The motif of every day of every trajectory with times.

    A day has the places where a person stays during it, also those of a stay that begins the day
    before. Its motif is the directed graph of moves between different places, up to the names of
    the places.

    Parameters
    ----------
    trajectories
        Trajectories with times.
    window_days
        Longest stay that is counted, in days.

    Returns
    -------
    tuple
        The trajectory of each day, in ascending order, and the code of its motif: one bit for each
        move, or `MORE_PLACES`.
    """
    assert trajectories.arrivals is not None and trajectories.stays is not None
    owner, day, token = _visits_by_day(trajectories, window_days)
    if not len(owner):
        return owner, owner
    new_day = np.append(True, (np.diff(owner) != 0) | (np.diff(day) != 0))
    number = np.cumsum(new_day) - 1  # of the day, (visits,)
    place = _order_of_places(number, token)  # (visits,)
    places = np.zeros(int(number[-1]) + 1, dtype=np.int64)
    np.maximum.at(places, number, place + 1)
    moves = (number[:-1] == number[1:]) & (place[:-1] != place[1:])
    small = places[number[:-1]] <= MAX_PLACES
    bit = (place[:-1] * MAX_PLACES + place[1:])[moves & small]
    codes = np.zeros(len(places), dtype=np.int64)
    np.bitwise_or.at(codes, number[:-1][moves & small], np.left_shift(1, bit))
    distinct, back = np.unique(codes, return_inverse=True)
    codes = np.array([_canonical(code) for code in distinct.tolist()], dtype=np.int64)[back]
    return owner[new_day], np.where(places > MAX_PLACES, MORE_PLACES, codes)


def common_motifs(trajectories: Trajectories, window_days: int) -> tuple[int, ...]:
    """The most frequent motifs of real days, at most `COMMON` of them."""
    _, codes = daily_motifs(trajectories, window_days)
    distinct, days = np.unique(codes[codes != MORE_PLACES], return_counts=True)
    return tuple(sorted(distinct[np.argsort(-days, kind="stable")][:COMMON].tolist()))


def motif_bins(codes: Ints, known: Ints) -> Ints:
    """The bin of each code: its place in `known`, then other motifs, then more places."""
    if not len(known):
        return np.where(codes == MORE_PLACES, 1, 0)
    place = np.minimum(np.searchsorted(known, codes), len(known) - 1)
    bins = np.where(known[place] == codes, place, len(known))
    return np.where(codes == MORE_PLACES, len(known) + 1, bins)


def _visits_by_day(trajectories: Trajectories, window_days: int) -> tuple[Ints, Ints, Ints]:
    """The trajectory, the day and the token of each visit on each of its days, in order."""
    arrivals = trajectories.arrivals
    stays = trajectories.stays
    assert arrivals is not None and stays is not None
    first = arrivals // DAY
    # A stay that ends at midnight does not reach the next day.
    last = np.maximum((arrivals + stays - 1) // DAY, first)
    days = np.minimum(last - first, window_days) + 1  # (visits,)
    visit = np.repeat(np.arange(len(days)), days)
    day = first[visit] + np.arange(len(visit)) - np.repeat(np.cumsum(days) - days, days)
    owner = trajectories.owner[visit]
    order = np.lexsort((visit, day, owner))
    return owner[order], day[order], trajectories.tokens[visit][order].astype(np.int64)


def _order_of_places(number: Ints, token: Ints) -> Ints:
    """For each visit the place as a number: the first place of a day is 0, the next new one 1."""
    size = int(token.max(initial=0)) + 1
    _, first, back = np.unique(number * size + token, return_index=True, return_inverse=True)
    is_first = np.zeros(len(token), dtype=bool)
    is_first[first] = True
    seen = np.cumsum(is_first)  # new places up to each visit, over all days
    starts = np.append(True, np.diff(number) != 0)
    before = np.maximum.accumulate(np.where(starts, seen - 1, 0))
    return (seen - 1 - before)[first[back]]


@cache
def _canonical(code: int) -> int:
    """The smallest code of a motif under all names of its places."""
    edges = [divmod(bit, MAX_PLACES) for bit in range(MAX_PLACES**2) if code >> bit & 1]
    places = 1 + max((max(edge) for edge in edges), default=0)
    return min(
        sum(1 << (names[a] * MAX_PLACES + names[b]) for a, b in edges)
        for names in permutations(range(places))
    )
