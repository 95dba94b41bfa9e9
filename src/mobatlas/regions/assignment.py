"""Who is dealt to which region: numbers of regions by person, -1 for none, and random streams of their own for each use."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from mobatlas.data.dataset import TrajectoryDataset

SEEDS = {"halves": 1, "shuffle": 2, "train": 3, "val": 4}  # one stream of random numbers each
NAMED = 3  # regions of a warning


def stream(seed: int, what: str) -> int:
    """A seed of its own for each use, so that one does not follow from another."""
    return int(np.random.SeedSequence([seed, SEEDS[what]]).generate_state(1)[0])


def first_half(dataset: TrajectoryDataset, seed: int) -> npt.NDArray[np.bool_]:
    """A random half of people that depends on each user id alone."""
    salt = f"{stream(seed, 'halves')}:"
    digests = (
        hashlib.md5(f"{salt}{user}".encode(), usedforsecurity=False)
        for user in dataset.people["user_id"].to_pylist()
    )
    return np.array([digest.digest()[0] < 128 for digest in digests])  # (people,)


def shuffled(
    region: npt.NDArray[np.int64], splits: Sequence[npt.NDArray[np.integer[Any]]], seed: int
) -> npt.NDArray[np.int64]:
    """The same region sizes with other people in them, split by split."""
    rng = np.random.default_rng(stream(seed, "shuffle"))
    changed = region.copy()
    for members in splits:
        changed[members] = rng.permutation(region[members])
    return changed


def only(
    region: npt.NDArray[np.int64], people: npt.NDArray[np.integer[Any]]
) -> npt.NDArray[np.int64]:
    """The regions of these people, -1 for all others."""
    kept = np.full(len(region), -1, dtype=np.int64)
    kept[people] = region[people]
    return kept


def renumbered(
    names: Sequence[str], keep: npt.NDArray[np.integer[Any]]
) -> tuple[tuple[str, ...], npt.NDArray[np.int64]]:
    """The kept regions, and the new number of each old one; -1 for the rest, and for people without one (-1, the last)."""
    number = np.full(len(names) + 1, -1, dtype=np.int64)
    number[keep] = np.arange(len(keep))
    return tuple(names[code] for code in keep.tolist()), number


def sizes(region: npt.NDArray[np.int64], regions: int) -> npt.NDArray[np.int64]:
    """How many people each region has."""
    return np.bincount(region[region >= 0], minlength=regions)


def matched(regions: Sequence[str], others: Sequence[str]) -> npt.NDArray[np.int64]:
    """For each region its row among others, -1 for none; `1400000US01001020100` is `01001020100`."""
    plain = [re.sub(r"^\d{7}US", "", name) for name in others]
    row = {name: number for names in (plain, others) for number, name in enumerate(names)}
    found = [row.get(name, row.get(re.sub(r"^\d{7}US", "", name), -1)) for name in regions]
    return np.array(found, dtype=np.int64)


def unmatched(
    composition: Sequence[str], aggregates: Sequence[str], row: npt.NDArray[np.int64]
) -> tuple[list[str], list[str]]:
    """Regions of the composition that no row says, and regions of the aggregates whose row is -1."""
    met = set(row.tolist())
    only_p = [name for number, name in enumerate(composition) if number not in met]
    return only_p, [
        name for name, number in zip(aggregates, row.tolist(), strict=True) if number < 0
    ]


def left_out(
    composition: str, only_p: Sequence[str], aggregates: str, only_v: Sequence[str]
) -> list[str]:
    """A sentence about regions that one table has and the other has not."""
    parts = []
    if only_p:
        parts.append(
            f"{_counted(only_p)} of {composition} without values in {aggregates} ({_named(only_p)})"
        )
    if only_v:
        parts.append(f"{_counted(only_v)} of {aggregates} not in {composition} ({_named(only_v)})")
    return [f"left out: {' and '.join(parts)}; are the names written alike?"] if parts else []


def _counted(regions: Sequence[str]) -> str:
    return f"{len(regions):,} region{'s' if len(regions) > 1 else ''}"


def _named(regions: Sequence[str]) -> str:
    return ", ".join(
        [*(f"'{name}'" for name in regions[:NAMED]), *(["..."] if len(regions) > NAMED else [])]
    )
