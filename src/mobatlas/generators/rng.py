"""Random numbers that are a function of (seed, number): whoever begins anywhere meets the same ones."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from mobatlas.errors import MobatlasError


def uniforms(seed: int, start: int, stop: int, stream: int = 0) -> npt.NDArray[np.float64]:
    """Four numbers in [0, 1) for each of `start` to `stop`, (n, 4): Philox makes four at a time and can begin anywhere."""
    bits = np.random.Philox(np.random.SeedSequence([seed, stream, 1])).advance(start)
    return np.random.Generator(bits).random((stop - start, 4))


def draw_rows(uniform: np.ndarray, rows: int, weights: np.ndarray | None = None) -> np.ndarray:
    """Numbers of rows, one for each uniform number in [0, 1): all alike, or in proportion to weights (rows,)."""
    if weights is None:
        return (uniform * rows).astype(np.int64)
    total = np.cumsum(weights, dtype=np.float64)
    if not 0 < total[-1] < np.inf:
        raise MobatlasError("nobody to draw: all weights are zero, or they are no numbers")
    return np.searchsorted(total / total[-1], uniform, side="right")
