"""Diversity: are samples different from each other, and from the people that the model learnt from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mobatlas.data.trajectories import Trajectories


def diversity(
    made: Trajectories, training: Trajectories, held_out: Trajectories | None = None
) -> dict[str, Any]:
    """The share of distinct trajectories, and of copies of training ones; the same of real held-out ones at equal size.

    Real trajectories are cut to the longest that was made, as the generator saw them.
    """
    longest = int(np.diff(made.offsets).max(initial=0))
    known = set(_words(training, longest))
    n = len(made) if held_out is None else min(len(made), len(held_out))
    found: dict[str, Any] = _variety(_words(made, longest), known, n)
    if held_out is not None:
        found["held_out"] = _variety(_words(held_out, longest), known, n)
    return found


def _words(trajectories: Trajectories, longest: int) -> list[bytes]:
    starts, lengths = (
        trajectories.offsets[:-1].tolist(),
        np.minimum(np.diff(trajectories.offsets), longest).tolist(),
    )
    return [trajectories.tokens[a : a + n].tobytes() for a, n in zip(starts, lengths, strict=True)]


def _variety(words: Sequence[bytes], known: set[bytes], n: int) -> dict[str, Any]:
    """Of n evenly spaced ones: people's windows follow each other."""
    chosen = [words[place] for place in np.linspace(0, len(words) - 1, n).astype(np.int64).tolist()]
    copies = sum(word in known for word in chosen)
    return {"n": n, "distinct": len(set(chosen)) / max(n, 1), "copies": copies / max(n, 1)}
