"""Trajectories in memory: concatenated tokens with anchors and times, and a differentiable form."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np

from mobatlas.data.arrays import Flags, Floats, Ints, Tokens
from mobatlas.data.dataset import TrajectoryDataset
from mobatlas.data.schema import DAY

Tensor = Any  # torch.Tensor, or a numpy array in its place


@dataclass(frozen=True)
class Trajectories:
    """Concatenated trajectories.

    Parameters
    ----------
    tokens
        Tokens of all trajectories: (tokens,).
    offsets
        First token of each trajectory, and the end: (trajectories + 1,).
    anchors
        Home lat, lon, work lat, lon, NaN where unknown: (trajectories, 4).
    arrivals
        Seconds since Monday, 0:00, of the week in which the window begins, None without times:
        (tokens,).
    stays
        Seconds of each visit, None without times: (tokens,).
    person
        The person of each trajectory, None if each has a person of its own: (trajectories,).

    Examples
    --------
    >>> two = Trajectories(np.array([4, 7, 4]), np.array([0, 2, 3]), np.zeros((2, 4)))
    >>> len(two), two.owner.tolist()
    (2, [0, 0, 1])
    """

    tokens: Tokens
    offsets: Ints
    anchors: Floats
    arrivals: Ints | None = None
    stays: Ints | None = None
    person: Ints | None = None

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def owner(self) -> Ints:
        """The trajectory of each token."""
        return np.repeat(np.arange(len(self)), np.diff(self.offsets))

    @property
    def position(self) -> Ints:
        """The place of each token in its trajectory, from 0."""
        return np.arange(len(self.tokens)) - self.offsets[self.owner]

    @property
    def people(self) -> Ints:
        """The person of each trajectory; a number for each trajectory if people are unknown."""
        return np.arange(len(self)) if self.person is None else self.person

    @property
    def hours(self) -> Ints | None:
        """The hour of each arrival, None without times."""
        return None if self.arrivals is None else self.arrivals // 3600 % 24

    @classmethod
    def of(cls, dataset: TrajectoryDataset, indices: Ints | None = None) -> Self:
        """Return trajectories of a dataset, by default all, with their times."""
        arrivals, departures = dataset.all_times()
        mondays = DAY * monday(dataset.first_days)  # (trajectories,)
        everything = cls(
            tokens=dataset.all_tokens(),
            offsets=np.concatenate(([0], np.cumsum(dataset.lengths))),
            anchors=dataset.anchors[dataset.person],
            arrivals=arrivals - np.repeat(mondays, dataset.lengths),
            stays=departures - arrivals,
            person=dataset.person.astype(np.int64),
        )
        return everything if indices is None else everything.take(np.asarray(indices, np.int64))

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """Return all parts as one; without times or people unless all parts have them."""
        lengths = np.concatenate([np.diff(part.offsets) for part in parts])
        return cls(
            tokens=np.concatenate([part.tokens for part in parts]),
            offsets=np.concatenate(([0], np.cumsum(lengths))),
            anchors=np.concatenate([part.anchors for part in parts]),
            arrivals=_joined([part.arrivals for part in parts]),
            stays=_joined([part.stays for part in parts]),
            person=_joined([part.person for part in parts]),
        )

    def take(self, chosen: Ints) -> Self:
        """Return some trajectories, in that order."""
        lengths = np.diff(self.offsets)[chosen]
        offsets = np.concatenate(([0], np.cumsum(lengths)))
        places = np.repeat(self.offsets[chosen] - offsets[:-1], lengths) + np.arange(offsets[-1])
        person = None if self.person is None else self.person[chosen]
        return replace(
            self._with_tokens(places, offsets), anchors=self.anchors[chosen], person=person
        )

    def cut(self, longest: Ints | int) -> Self:
        """Return the first tokens of each trajectory, at most `longest` of each."""
        lengths = np.minimum(np.diff(self.offsets), longest)  # (trajectories,)
        inside = self.position < lengths[self.owner]
        return self._with_tokens(inside, np.concatenate(([0], np.cumsum(lengths))))

    def _with_tokens(self, places: Ints | Flags, offsets: Ints) -> Self:
        arrivals, stays = (
            None if times is None else times[places] for times in (self.arrivals, self.stays)
        )
        return replace(
            self, tokens=self.tokens[places], offsets=offsets, arrivals=arrivals, stays=stays
        )


@dataclass(frozen=True)
class SoftTrajectories:
    """Distributions over tokens, position by position; rows after the end are zero."""

    tokens: Tensor  # (batch, length, vocabulary)
    anchors: Floats  # (batch, 4)
    hours: Tensor | None = None  # (batch, length, 24), of generators with times
    # (batch, length) drawn tokens, where each distribution is conditioned on the tokens before it
    drawn_tokens: Tensor | None = None


def monday(days: Ints) -> Ints:
    """The Monday of the week of each day; days are counted from 1970-01-01, a Thursday."""
    return days - (days + 3) % 7


def _joined(parts: Sequence[Ints | None]) -> Ints | None:
    known = [part for part in parts if part is not None]
    return np.concatenate(known) if len(known) == len(parts) else None
