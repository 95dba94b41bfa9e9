"""The summary of a preparation: what came in, what was kept, and why the rest fell."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from mobatlas.data.prepare.canonical import RowCounts
from mobatlas.data.vocabulary import HOME, OTHER, WORK


@dataclass(frozen=True)
class WindowCounts:
    """Windows with at least one observed day."""

    kept: int
    fell: dict[str, int]  # reason -> windows; each window falls for the first reason that applies


@dataclass
class SplitCounts:
    """Counts of one split, added up while its trajectories are written."""

    users: int = 0
    trajectories: int = 0
    tokens: int = 0
    poi_tokens: int = 0  # neither HOME nor WORK
    other_tokens: int = 0  # OTHER among them
    lengths: npt.NDArray[np.int64] = field(
        default_factory=lambda: np.zeros(1, np.int64)
    )  # (length,) trajectories of each

    def add(self, tokens: npt.NDArray[np.int32], lengths: npt.NDArray[np.int64]) -> None:
        """Count some trajectories: all their tokens, and how many tokens each has."""
        self.trajectories += len(lengths)
        self.tokens += len(tokens)
        self.poi_tokens += int(np.count_nonzero((tokens != HOME) & (tokens != WORK)))
        self.other_tokens += int(np.count_nonzero(tokens == OTHER))
        histogram = np.bincount(lengths, minlength=len(self.lengths))
        histogram[: len(self.lengths)] += self.lengths
        self.lengths = histogram.astype(np.int64)

    def length_quantile(self, q: float) -> int | None:
        """The smallest length that at least a share q of the trajectories do not exceed."""
        if not self.trajectories:
            return None
        return int(np.searchsorted(np.cumsum(self.lengths), q * self.trajectories))

    @property
    def coverage(self) -> float | None:
        """Share of POI tokens that the vocabulary knows by name."""
        return 1 - self.other_tokens / self.poi_tokens if self.poi_tokens else None

    def as_dict(self) -> dict[str, Any]:
        return {
            "users": self.users,
            "trajectories": self.trajectories,
            "tokens": self.tokens,
            "vocabulary_coverage": self.coverage,
            "length_median": self.length_quantile(0.5),
            "length_p95": self.length_quantile(0.95),
            "length_max": len(self.lengths) - 1 if self.trajectories else None,
        }


@dataclass(frozen=True)
class Summary:
    """What a preparation did."""

    rows: RowCounts
    duplicates: int
    users: int  # who had a usable visit
    windows: WindowCounts
    pois: int  # distinct places that are nobody's home or work at the time
    splits: Mapping[str, SplitCounts]
    inferred: tuple[str, ...] = ()  # anchors that the source lacked
    columns: Mapping[str, tuple[str, ...]] = field(
        default_factory=dict
    )  # of people: what each was taken for
    users_in_people: int | None = (
        None  # of those with a usable visit; None: there is no people table
    )
    notes: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """For summary.json and --json."""
        return {
            "visits": asdict(self.rows) | {"duplicates": self.duplicates},
            "users": self.users,
            "users_in_people": self.users_in_people,
            "pois": self.pois,
            "windows": {"kept": self.windows.kept, "fell": self.windows.fell},
            "splits": {name: counts.as_dict() for name, counts in self.splits.items()},
            "inferred_anchors": list(self.inferred),
            "people_columns": {key: list(names) for key, names in self.columns.items()},
            "notes": list(self.notes),
        }
