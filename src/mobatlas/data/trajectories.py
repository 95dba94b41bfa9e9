"""Trajectories in memory: tokens end to end, with anchors and times; and their differentiable form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mobatlas.data.dataset import DAY, TrajectoryDataset

Tensor = Any  # torch.Tensor, or a numpy array in its place


@dataclass(frozen=True)
class Trajectories:
    """Trajectories end to end."""

    tokens: npt.NDArray[np.int32]  # (tokens,)
    offsets: npt.NDArray[np.int64]  # (trajectories + 1,)
    anchors: npt.NDArray[
        np.float64
    ]  # (trajectories, 4) home lat, lon, work lat, lon; NaN where unknown
    # (tokens,) seconds since the Monday, 0:00, of the week in which the window begins; None where nobody tells when
    arrivals: npt.NDArray[np.int64] | None = None
    stays: npt.NDArray[np.int64] | None = None  # (tokens,) seconds

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def owner(self) -> npt.NDArray[np.int64]:
        """The trajectory of each token."""
        return np.repeat(np.arange(len(self)), np.diff(self.offsets))

    @property
    def hours(self) -> npt.NDArray[np.int64] | None:
        """The hour of each arrival, where times are known."""
        return None if self.arrivals is None else self.arrivals // 3600 % 24

    @classmethod
    def of(
        cls, dataset: TrajectoryDataset, indices: npt.NDArray[np.int64] | None = None
    ) -> Trajectories:
        """Those of a dataset, with their times."""
        chosen = np.arange(len(dataset)) if indices is None else np.asarray(indices, dtype=np.int64)
        lengths = dataset.lengths[chosen]
        offsets = np.concatenate(([0], np.cumsum(lengths)))
        everything = np.concatenate(([0], np.cumsum(dataset.lengths)))
        places = np.repeat(everything[chosen] - offsets[:-1], lengths) + np.arange(offsets[-1])
        arrivals, departures = (times[places] for times in dataset.all_times())
        mondays = DAY * monday(dataset.first_days[chosen])  # (trajectories,)
        return cls(
            tokens=dataset.all_tokens()[places],
            offsets=offsets,
            anchors=dataset.anchors[dataset.person[chosen]],
            arrivals=arrivals - np.repeat(mondays, lengths),
            stays=departures - arrivals,
        )

    @classmethod
    def joined(cls, parts: Sequence[Trajectories]) -> Trajectories:
        """One after the other; without times, unless all have them."""
        lengths = np.concatenate([np.diff(part.offsets) for part in parts])
        return cls(
            tokens=np.concatenate([part.tokens for part in parts]),
            offsets=np.concatenate(([0], np.cumsum(lengths))),
            anchors=np.concatenate([part.anchors for part in parts]),
            arrivals=_end_to_end([part.arrivals for part in parts]),
            stays=_end_to_end([part.stays for part in parts]),
        )

    def take(self, chosen: npt.NDArray[np.int64]) -> Trajectories:
        """Some of them, in that order."""
        lengths = np.diff(self.offsets)[chosen]
        offsets = np.concatenate(([0], np.cumsum(lengths)))
        places = np.repeat(self.offsets[chosen] - offsets[:-1], lengths) + np.arange(offsets[-1])
        arrivals, stays = (
            None if times is None else times[places] for times in (self.arrivals, self.stays)
        )
        return Trajectories(self.tokens[places], offsets, self.anchors[chosen], arrivals, stays)


@dataclass(frozen=True)
class SoftTrajectories:
    """Distributions over tokens, position by position; rows after the end are zero."""

    tokens: Tensor  # (batch, length, vocabulary)
    anchors: npt.NDArray[np.float64]  # (batch, 4)
    hours: Tensor | None = None  # (batch, length, 24), for generators that tell when
    # (batch, length) the tokens that were drawn, where each distribution is given those before it
    written: Tensor | None = None


def monday(days: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The Monday of the week of each day, both counted from 1970-01-01, a Thursday."""
    return days - (days + 3) % 7


def _end_to_end(parts: Sequence[npt.NDArray[np.int64] | None]) -> npt.NDArray[np.int64] | None:
    known = [part for part in parts if part is not None]
    return np.concatenate(known) if len(known) == len(parts) else None
