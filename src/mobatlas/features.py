"""Feature maps phi: what is counted in a trajectory, exactly on tokens and differentiably on token probabilities.

phi(x) counts in one window. On one-hot probabilities the two forms are equal; nothing is normalised here, because shares
mix only after counts do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from scipy import sparse

from mobatlas.data.dataset import TrajectoryDataset
from mobatlas.data.vocabulary import HOME, SPECIALS, WORK, Vocabulary
from mobatlas.errors import MobatlasError, suggestion

EARTH_KM = 6371.0088
BAND_EDGES_KM = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0)
Tensor = Any  # torch.Tensor, or a numpy array in its place


@dataclass(frozen=True)
class Trajectories:
    """Trajectories end to end."""

    tokens: npt.NDArray[np.int32]  # (tokens,)
    offsets: npt.NDArray[np.int64]  # (trajectories + 1,)
    anchors: npt.NDArray[np.float64]  # (trajectories, 4) home lat, lon, work lat, lon; NaN where unknown
    hours: npt.NDArray[np.int64] | None = None  # (tokens,) hour of arrival

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def owner(self) -> npt.NDArray[np.int64]:
        """The trajectory of each token."""
        return np.repeat(np.arange(len(self)), np.diff(self.offsets))

    @classmethod
    def of(cls, dataset: TrajectoryDataset, indices: npt.NDArray[np.int64] | None = None) -> Trajectories:
        """Those of a dataset, with the hours of their arrivals."""
        chosen = np.arange(len(dataset)) if indices is None else np.asarray(indices, dtype=np.int64)
        lengths = dataset.lengths[chosen]
        offsets = np.concatenate(([0], np.cumsum(lengths)))
        everything = np.concatenate(([0], np.cumsum(dataset.lengths)))
        places = np.repeat(everything[chosen] - offsets[:-1], lengths) + np.arange(offsets[-1])
        seconds = dataset.times()[0].combine_chunks().flatten().cast("int64").to_numpy()[places]
        return cls(
            tokens=dataset.all_tokens()[places],
            offsets=offsets,
            anchors=dataset.anchors[dataset.person[chosen]],
            hours=seconds // 3600 % 24,
        )


@dataclass(frozen=True)
class SoftTrajectories:
    """Distributions over tokens, position by position; rows after the end are zero."""

    tokens: Tensor  # (batch, length, vocabulary)
    anchors: npt.NDArray[np.float64]  # (batch, 4)
    hours: Tensor | None = None  # (batch, length, 24), for generators that tell when


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
        return _count(trajectories, trajectories.owner, self.bin_of_token[trajectories.tokens], len(self.bins))

    def soft(self, trajectories: SoftTrajectories) -> Tensor:
        return _matmul(trajectories.tokens.sum(1), _one_hot(self.bin_of_token, len(self.bins)))


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
        category = _matmul(
            trajectories.tokens, _one_hot(self.bin_of_token, self.categories)
        )  # (batch, length, categories)
        pairs = category[:, :-1].swapaxes(1, 2) @ category[:, 1:]  # (batch, categories, categories)
        return pairs.reshape(len(pairs), -1)


@dataclass(frozen=True)
class DistanceFeature:
    """Counts of visits by distance from the person's home; HOME, OTHER and people without a home are not counted."""

    name: str
    bins: tuple[str, ...]
    coordinates: npt.NDArray[np.float64]  # (vocabulary, 2)
    edges: npt.NDArray[np.float64]  # km

    def counts(self, trajectories: Trajectories) -> sparse.csr_array:
        owner = trajectories.owner
        anchors = trajectories.anchors[owner]  # (tokens, 4)
        places = np.where((trajectories.tokens == WORK)[:, None], anchors[:, 2:], self.coordinates[trajectories.tokens])
        band = self._band(haversine_km(anchors[:, :2], places))
        band = np.where(trajectories.tokens == HOME, -1, band)
        return _count(trajectories, owner, band, len(self.bins))

    def soft(self, trajectories: SoftTrajectories) -> Tensor:
        tokens, anchors = trajectories.tokens, trajectories.anchors
        places = np.repeat(self.coordinates[None], len(anchors), axis=0)  # (batch, vocabulary, 2)
        places[:, WORK] = anchors[:, 2:]
        band = self._band(haversine_km(anchors[:, None, :2], places))  # (batch, vocabulary)
        band[:, HOME] = -1
        visits = tokens.sum(1)  # (batch, vocabulary)
        in_band = (band[:, None] == np.arange(len(self.bins))[:, None]).astype(np.float64)  # (batch, bins, vocabulary)
        return (_like(in_band, tokens) * visits[:, None]).sum(-1)

    def _band(self, km: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
        return np.where(np.isnan(km), -1, np.searchsorted(self.edges, km, side="right"))


@dataclass(frozen=True)
class HourFeature:
    """Counts of arrivals by hour of the day, where times exist."""

    name: str
    bins: tuple[str, ...]

    def counts(self, trajectories: Trajectories) -> sparse.csr_array:
        if trajectories.hours is None:
            raise MobatlasError("feature 'hour': these trajectories carry no times; choose another feature")
        return _count(trajectories, trajectories.owner, trajectories.hours, len(self.bins))

    def soft(self, trajectories: SoftTrajectories) -> Tensor:
        if trajectories.hours is None:
            raise MobatlasError("feature 'hour': this generator does not tell when; choose another feature")
        return trajectories.hours.sum(1)


Builder = Callable[[Vocabulary, Sequence[str]], FeatureMap]


def _poi(vocabulary: Vocabulary, mask: Sequence[str]) -> FeatureMap:
    return _by_token("poi", vocabulary.poi_ids, vocabulary, mask)


def _category(vocabulary: Vocabulary, mask: Sequence[str]) -> FeatureMap:
    return _by_token("category", _category_names(vocabulary), vocabulary, mask)


def _transitions(vocabulary: Vocabulary, mask: Sequence[str]) -> FeatureMap:
    single = _by_token("category", _category_names(vocabulary), vocabulary, mask)
    names = [name.removeprefix("category:") for name in single.bins]
    bins = tuple(f"transitions:{first}>{second}" for first in names for second in names)
    return TransitionFeature("transitions", bins, single.bin_of_token, len(names))


def _distance(vocabulary: Vocabulary, mask: Sequence[str]) -> FeatureMap:
    edges = [0.0, *BAND_EDGES_KM]
    bands = [f"{low:g}-{high:g}" for low, high in pairwise(edges)] + [f"{edges[-1]:g}+"]
    coordinates = vocabulary.coordinates.copy()
    bins = tuple(f"distance:{band}" for band in bands)
    return DistanceFeature("distance", bins, coordinates, np.array(BAND_EDGES_KM))


def _hour(vocabulary: Vocabulary, mask: Sequence[str]) -> FeatureMap:
    return HourFeature("hour", tuple(f"hour:{hour:02d}" for hour in range(24)))


BUILDERS: dict[str, Builder] = {
    "poi": _poi,
    "category": _category,
    "transitions": _transitions,
    "distance": _distance,
    "hour": _hour,
}


def register_feature(name: str, builder: Builder) -> None:
    """Add a feature map of your own: `builder(vocabulary, mask)` returns it."""
    if name in BUILDERS:
        raise MobatlasError(f"feature '{name}' exists already; choose another name")
    BUILDERS[name] = builder


def build_feature(name: str, vocabulary: Vocabulary, mask: Sequence[str] = ()) -> FeatureMap:
    """The feature map of that name over a vocabulary; `mask` leaves out HOME, WORK or OTHER."""
    if name not in BUILDERS:
        raise MobatlasError(
            f"--feature {name} does not exist{suggestion(name, BUILDERS)} (known: {', '.join(BUILDERS)})"
        )
    maskable = SPECIALS[HOME:]
    for word in mask:
        if word not in maskable:
            raise MobatlasError(
                f"mask '{word}' does not exist{suggestion(word, maskable)} (known: {', '.join(maskable)})"
            )
    return BUILDERS[name](vocabulary, mask)


def haversine_km(a: npt.NDArray[np.float64], b: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Great-circle distance of coordinates in degrees, (..., 2) against (..., 2)."""
    (lat_a, lon_a), (lat_b, lon_b) = (np.moveaxis(np.radians(x), -1, 0) for x in (a, b))
    h = np.sin((lat_b - lat_a) / 2) ** 2 + np.cos(lat_a) * np.cos(lat_b) * np.sin((lon_b - lon_a) / 2) ** 2
    return np.asarray(2 * EARTH_KM * np.arcsin(np.sqrt(np.clip(h, 0, 1))))


def _category_names(vocabulary: Vocabulary) -> list[str]:
    return [name if name is not None else "unknown" for name in vocabulary.categories]


def _by_token(name: str, labels: Sequence[str], vocabulary: Vocabulary, mask: Sequence[str]) -> TokenFeature:
    counted = [token for token in range(HOME, len(vocabulary)) if token >= len(SPECIALS) or SPECIALS[token] not in mask]
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
    counts = sparse.coo_array((ones, (owner[counted], bins[counted])), shape=(len(trajectories), n)).tocsr()
    counts.sum_duplicates()
    return counts


def _one_hot(bin_of_token: npt.NDArray[np.int64], n: int) -> npt.NDArray[np.float64]:
    return (bin_of_token[:, None] == np.arange(n)).astype(np.float64)  # (vocabulary, bins)


def _matmul(tokens: Tensor, weights: npt.NDArray[np.float64]) -> Tensor:
    return tokens @ _like(weights, tokens)


def _like(values: npt.NDArray[np.float64], other: Tensor) -> Tensor:
    return other.new_tensor(values) if hasattr(other, "new_tensor") else values
