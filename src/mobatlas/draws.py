"""Random numbers that are a function of (seed, number): whoever begins anywhere meets the same ones."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def uniforms(seed: int, start: int, stop: int, stream: int = 0) -> npt.NDArray[np.float64]:
    """Four numbers in [0, 1) for each of `start` to `stop`, (n, 4): Philox makes four at a time and can begin anywhere."""
    bits = np.random.Philox(np.random.SeedSequence([seed, stream, 1])).advance(start)
    return np.random.Generator(bits).random((stop - start, 4))
