"""Feature maps phi: what is counted in a trajectory, exactly on tokens and differentiably on token probabilities.

phi(x) counts in one window. On one-hot probabilities the two forms are equal; nothing is normalised here, because shares
mix only after counts do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import numpy as np
import numpy.typing as npt
from scipy import sparse

from mobatlas.data.geodesy import haversine_km
from mobatlas.data.trajectories import SoftTrajectories, Tensor, Trajectories
from mobatlas.data.vocabulary import HOME, SPECIALS, WORK, Vocabulary
from mobatlas.errors import MobatlasError, suggestion

BAND_EDGES_KM = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0)
VISITS_FROM = (*range(1, 13), 14, 16, 18, 20, 24, 28, 32, 40, 48, 64)  # the least of each bin


class FeatureMap(Protocol):
    """A feature of trajectories."""

    @property
    def name(self) -> str: ...

    @property
    def bins(self) -> tuple[str, ...]:
        """`map:bin` for each column."""
        ...

    def counts(self, trajectories: Trajectories) -> sparse.csr_array:
        """Exact counts: (trajectories, bins)."""
        ...

    def soft(self, trajectories: SoftTrajectories) -> Tensor:
        """Expected counts, differentiable: (batch, bins)."""
        ...


@dataclass(frozen=True)
class TokenFeature:
    """Counts of tokens by a bin that depends on the token alone: POI, category."""

    name: str
    bins: tuple[str, ...]
    bin_of_token: npt.NDArray[np.int64]  # (vocabulary,) -1: not counted

    def counts(self, trajectories: Trajectories) -> sparse.csr_array:
        return _count(
            trajectories, trajectories.owner, self.bin_of_token[trajectories.tokens], len(self.bins)
        )

    def soft(self, trajectories: SoftTrajectories) -> Tensor:
        return _expected(trajectories, self.bin_of_token, len(self.bins))


@dataclass(frozen=True)
class TransitionFeature:
    """Counts of consecutive pairs of categories."""

    name: str
    bins: tuple[str, ...]
    bin_of_token: npt.NDArray[np.int64]  # (vocabulary,) category, -1: pairs with it are not counted
    categories: int

    def counts(self, trajectories: Trajectories) -> sparse.csr_array:
        owner = trajectories.owner
        category = self.bin_of_token[trajectories.tokens]
        pair = category[:-1] * self.categories + category[1:]
        valid = (owner[:-1] == owner[1:]) & (category[:-1] >= 0) & (category[1:] >= 0)
        return _count(trajectories, owner[:-1], np.where(valid, pair, -1), len(self.bins))

    def soft(self, trajectories: SoftTrajectories) -> Tensor:
        one_hot = self.bin_of_token[:, None] == np.arange(
            self.categories
        )  # (vocabulary, categories)
        category = _matmul(trajectories.tokens, one_hot)  # (batch, length, categories)
        first = category
        if (
            trajectories.written is not None
        ):  # what could have been drawn does not stand before what was drawn after it
            first = category.new_tensor(one_hot)[trajectories.written]
        pairs = first[:, :-1].swapaxes(1, 2) @ category[:, 1:]  # (batch, categories, categories)
        return pairs.reshape(len(pairs), -1)


@dataclass(frozen=True)
class DistanceFeature:
    """Counts of visits by distance from the person's home; HOME, OTHER and people without a home are not counted."""

    name: str
    bins: tuple[str, ...]
    coordinates: npt.NDArray[np.float64]  # (vocabulary, 2)
    counted: npt.NDArray[np.bool_]  # (vocabulary,)
    edges: npt.NDArray[np.float64]  # km

    def counts(self, trajectories: Trajectories) -> sparse.csr_array:
        owner = trajectories.owner
        anchors = trajectories.anchors[owner]  # (tokens, 4)
        places = np.where(
            (trajectories.tokens == WORK)[:, None],
            anchors[:, 2:],
            self.coordinates[trajectories.tokens],
        )
        km = haversine_km(anchors[:, :2], places)
        band = np.where(self.counted[trajectories.tokens], self._band(km), -1)
        return _count(trajectories, owner, band, len(self.bins))

    def soft(self, trajectories: SoftTrajectories) -> Tensor:
        anchors = trajectories.anchors
        places = np.repeat(self.coordinates[None], len(anchors), axis=0)  # (batch, vocabulary, 2)
        places[:, WORK] = anchors[:, 2:]
        km = haversine_km(anchors[:, None, :2], places)  # (batch, vocabulary)
        return _expected(trajectories, np.where(self.counted, self._band(km), -1), len(self.bins))

    def _band(self, km: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
        return np.where(np.isnan(km), -1, np.searchsorted(self.edges, km, side="right"))


@dataclass(frozen=True)
class HourFeature:
    """Counts of arrivals by hour of the day, where times exist."""

    name: str
    bins: tuple[str, ...]
    counted: npt.NDArray[np.bool_]  # (vocabulary,)

    def counts(self, trajectories: Trajectories) -> sparse.csr_array:
        if trajectories.hours is None:
            raise MobatlasError(
                "feature 'hour': these trajectories carry no times; choose another feature"
            )
        hours = np.where(self.counted[trajectories.tokens], trajectories.hours, -1)
        return _count(trajectories, trajectories.owner, hours, len(self.bins))

    def soft(self, trajectories: SoftTrajectories) -> Tensor:
        if trajectories.hours is None:
            raise MobatlasError(
                "feature 'hour': this generator does not tell when; choose another feature"
            )
        visited = _matmul(trajectories.tokens, self.counted)  # (batch, length)
        if (
            trajectories.written is not None
        ):  # hours are of what was drawn: it is counted, its chance gives the gradient
            visited = (
                visited - visited.detach() + visited.new_tensor(self.counted)[trajectories.written]
            )
        return (trajectories.hours * visited[..., None]).sum(1)


@dataclass(frozen=True)
class VisitsFeature:
    """How many visits a trajectory has: 1 in the bin of their number, nothing if there is none."""

    name: str
    bins: tuple[str, ...]
    counted: npt.NDArray[np.bool_]  # (vocabulary,)

    def numbers(self, trajectories: Trajectories) -> npt.NDArray[np.int64]:
        """Visits of each trajectory."""
        counted = trajectories.owner[self.counted[trajectories.tokens]]
        return np.bincount(counted, minlength=len(trajectories))

    def counts(self, trajectories: Trajectories) -> sparse.csr_array:
        return _count(
            trajectories,
            np.arange(len(trajectories)),
            _visits_bin(self.numbers(trajectories)),
            len(self.bins),
        )

    def soft(self, trajectories: SoftTrajectories) -> Tensor:
        visited = _matmul(trajectories.tokens, self.counted)  # (batch, length)
        number = np.arange(visited.shape[1] + 1)
        none, one_more = number[None] == 0, number[:, None] + 1 == number
        chance = _matmul(
            visited[:, :1] * 0 + 1, none
        )  # (batch, length + 1) of each number of visits so far
        for place in range(visited.shape[1]):
            here = visited[:, place : place + 1]
            chance = chance * (1 - here) + _matmul(chance, one_more) * here
        return _matmul(chance, _visits_bin(number)[:, None] == np.arange(len(self.bins)))


Builder = Callable[[Vocabulary, Sequence[str]], FeatureMap]


def _poi(vocabulary: Vocabulary, mask: Sequence[str]) -> FeatureMap:
    return _by_token("poi", vocabulary.poi_ids, vocabulary, mask)


def _category(vocabulary: Vocabulary, mask: Sequence[str]) -> FeatureMap:
    return _by_token("category", _category_names(vocabulary), vocabulary, mask)


def _transitions(vocabulary: Vocabulary, mask: Sequence[str]) -> FeatureMap:
    single = _by_token("category", _category_names(vocabulary), vocabulary, mask)
    # Categories may hold the sign between them ("Food>Bar"): escaped, so that no two pairs share a name.
    names = [
        name.removeprefix("category:").replace("\\", r"\\").replace(">", r"\>")
        for name in single.bins
    ]
    bins = tuple(f"transitions:{first}>{second}" for first in names for second in names)
    return TransitionFeature("transitions", bins, single.bin_of_token, len(names))


def _distance(vocabulary: Vocabulary, mask: Sequence[str]) -> FeatureMap:
    edges = [0.0, *BAND_EDGES_KM]
    bands = [f"{low:g}-{high:g}" for low, high in pairwise(edges)] + [f"{edges[-1]:g}+"]
    bins = tuple(f"distance:{band}" for band in bands)
    counted = _counted(vocabulary, [*mask, SPECIALS[HOME]])
    return DistanceFeature(
        "distance", bins, vocabulary.coordinates, counted, np.array(BAND_EDGES_KM)
    )


def _hour(vocabulary: Vocabulary, mask: Sequence[str]) -> FeatureMap:
    return HourFeature(
        "hour", tuple(f"hour:{hour:02d}" for hour in range(24)), _counted(vocabulary, mask)
    )


def _visits(vocabulary: Vocabulary, mask: Sequence[str]) -> FeatureMap:
    spans = [
        f"{low}" if high == low + 1 else f"{low}-{high - 1}" for low, high in pairwise(VISITS_FROM)
    ]
    bins = tuple(f"visits:{span}" for span in (*spans, f"{VISITS_FROM[-1]}+"))
    return VisitsFeature("visits", bins, _counted(vocabulary, mask))


def _visits_bin(number: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    return np.searchsorted(np.array(VISITS_FROM), number, side="right") - 1


BUILDERS: dict[str, Builder] = {
    "poi": _poi,
    "category": _category,
    "transitions": _transitions,
    "distance": _distance,
    "hour": _hour,
    "visits": _visits,
}


def register_feature(name: str, builder: Builder) -> None:
    """Add a feature map of your own: `builder(vocabulary, mask)` returns it."""
    if name in BUILDERS:
        raise MobatlasError(f"feature '{name}' exists already; choose another name")
    BUILDERS[name] = builder


def build_feature(name: str, vocabulary: Vocabulary, mask: Sequence[str] = ()) -> FeatureMap:
    """The feature map of that name over a vocabulary; `mask` leaves out HOME, WORK or OTHER."""
    check_feature(name)
    maskable = SPECIALS[HOME:]
    for word in mask:
        if word not in maskable:
            raise MobatlasError(
                f"mask '{word}' does not exist{suggestion(word, maskable)} (known: {', '.join(maskable)})"
            )
    return BUILDERS[name](vocabulary, mask)


def check_feature(name: str) -> None:
    """Refuse one that does not exist."""
    if name not in BUILDERS:
        raise MobatlasError(
            f"--feature {name} does not exist{suggestion(name, BUILDERS)} (known: {', '.join(BUILDERS)})"
        )


def _category_names(vocabulary: Vocabulary) -> list[str]:
    return [name if name is not None else "unknown" for name in vocabulary.categories]


def _counted(vocabulary: Vocabulary, mask: Sequence[str]) -> npt.NDArray[np.bool_]:
    counted = np.arange(len(vocabulary)) >= HOME  # (vocabulary,)
    counted[[SPECIALS.index(word) for word in mask]] = False
    return counted


def _by_token(
    name: str, labels: Sequence[str], vocabulary: Vocabulary, mask: Sequence[str]
) -> TokenFeature:
    counted = np.flatnonzero(_counted(vocabulary, mask)).tolist()
    order = list(dict.fromkeys(labels[token] for token in counted))
    position = {label: number for number, label in enumerate(order)}
    bin_of_token = np.full(len(vocabulary), -1, dtype=np.int64)
    bin_of_token[counted] = [position[labels[token]] for token in counted]
    return TokenFeature(name, tuple(f"{name}:{label}" for label in order), bin_of_token)


def _count(
    trajectories: Trajectories, owner: npt.NDArray[np.int64], bins: npt.NDArray[np.int64], n: int
) -> sparse.csr_array:
    counted = bins >= 0
    ones = np.ones(int(np.count_nonzero(counted)))
    counts = sparse.coo_array(
        (ones, (owner[counted], bins[counted])), shape=(len(trajectories), n)
    ).tocsr()
    counts.sum_duplicates()
    return counts


def _expected(trajectories: SoftTrajectories, bins: npt.NDArray[np.int64], n: int) -> Tensor:
    """Expected counts from the bin of each token, (vocabulary,) or (batch, vocabulary).

    Scattered, not multiplied: one-hot weights of 7,000 POIs would take 392 MB.
    """
    visits = trajectories.tokens.sum(1)  # (batch, vocabulary)
    column = np.where(bins < 0, n, bins)  # what is not counted goes to a column past the last
    if hasattr(visits, "new_zeros"):
        import torch  # only where a tensor came in: counting alone does not wait for it

        index = torch.from_numpy(column).to(visits.device).expand(visits.shape)
        return visits.new_zeros(len(visits), n + 1).scatter_add(1, index, visits)[:, :n]
    place = np.arange(len(visits))[:, None] * (n + 1) + column  # (batch, vocabulary)
    sums = np.bincount(place.ravel(), visits.ravel(), minlength=len(visits) * (n + 1))
    return sums.reshape(len(visits), n + 1)[:, :n]


def _matmul(tokens: Tensor, weights: npt.NDArray[np.bool_]) -> Tensor:
    return tokens @ (
        tokens.new_tensor(weights)
        if hasattr(tokens, "new_tensor")
        else weights.astype(tokens.dtype)
    )
