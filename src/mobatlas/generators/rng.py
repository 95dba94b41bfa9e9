"""Random numbers that depend on the seed and the number of a sample alone.

A sample is the same whether it is drawn alone, among others, or in another process.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from mobatlas.data.types import Floats, Ints
from mobatlas.errors import MobatlasError

TILE = 256  # samples that a network computes at a time


def uniforms(seed: int, start: int, stop: int, stream: int = 0) -> Floats:
    """Return four numbers in [0, 1) for each sample number from `start` to `stop`: (n, 4)."""
    # Philox produces four numbers at a time and can start at any position.
    bits = np.random.Philox(np.random.SeedSequence([seed, stream, 1])).advance(start)
    return np.random.Generator(bits).random((stop - start, 4))


def draw_rows(uniform: Floats, rows: int, weights: Floats | Ints | None = None) -> Ints:
    """Return a row number for each uniform number, equally likely or by `weights` (rows,)."""
    if weights is None:
        return (uniform * rows).astype(np.int64)
    total = np.cumsum(weights, dtype=np.float64)
    if not 0 < total[-1] < np.inf:
        raise MobatlasError("cannot draw: the weights sum to zero or are not finite numbers")
    return np.searchsorted(total / total[-1], uniform, side="right")


class Tile(NamedTuple):
    """A tile of TILE samples, and the part of it that is needed."""

    number: int
    rows: slice  # of the samples that are needed
    places: slice  # of the tile, where these samples are

    def spread(self, values: Any) -> Any:
        """Return values of the needed rows at their places of the tile: (TILE, ...).

        The other places repeat the first value; their samples are discarded.
        """
        needed = values[self.rows]
        out = np.repeat(needed[:1], TILE, axis=0)
        out[self.places] = needed
        return out


def tiles(first: int, n: int) -> Iterator[Tile]:
    """Yield the tiles that hold samples `first` to `first + n`."""
    for number in range(first // TILE, -(-(first + n) // TILE)):
        begin = number * TILE
        start = max(first, begin)
        stop = min(first + n, begin + TILE)
        yield Tile(number, slice(start - first, stop - first), slice(start - begin, stop - begin))
