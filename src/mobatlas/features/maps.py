"""Feature maps phi: counts in one trajectory, exact on tokens and differentiable on probabilities.

phi(x) counts events in one window (paper, Section 3). On one-hot probabilities both forms are
equal. Counts are not normalised here: means over people and groups are linear in counts, but not
in shares. The registry also holds the metrics of `evaluation.metrics`, which only count.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
from scipy import sparse

from mobatlas.data.dataset import SoftTrajectories, Tensor, Trajectories
from mobatlas.data.types import HOME, SPECIALS, WORK, Flags, Floats, Ints, Vocabulary, haversine_km
from mobatlas.errors import MobatlasError, refuse_unknown
from mobatlas.registry import Registry

BAND_EDGES_KM = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0)
VISITS_FROM = (*range(1, 13), 14, 16, 18, 20, 24, 28, 32, 40, 48, 64)  # the smallest of each bin


class FeatureMap(Protocol):
    """A feature map: it counts events of one kind in trajectories.

    Implement this protocol, and pass a function that builds it to `register_feature`. Exact and
    expected counts must agree on one-hot probabilities.
    """

    @property
    def name(self) -> str:
        """The name under which the map is registered."""

    @property
    def bins(self) -> tuple[str, ...]:
        """The name of each column, `map:bin`."""

    def counts(self, trajectories: Trajectories) -> sparse.csr_array:
        """Exact counts.

        Parameters
        ----------
        trajectories
            Tokens, anchors and, where known, times.

        Returns
        -------
        scipy.sparse.csr_array
            Counts of shape (trajectories, bins).
        """

    def soft(self, trajectories: SoftTrajectories) -> Tensor:
        """Expected counts, differentiable in the probabilities.

        Parameters
        ----------
        trajectories
            Distributions over tokens for each position, as numpy arrays or torch tensors.

        Returns
        -------
        numpy.ndarray or torch.Tensor
            Expected counts of shape (batch, bins).
        """


Builder = Callable[[Vocabulary, Sequence[str]], FeatureMap]


@dataclass(frozen=True)
class Feature:
    """A registered count of events: a feature map of regions, a metric, or both."""

    name: str
    build: Builder | None = None  # the feature map; None: evaluation only
    title: str = ""  # of the metric in tables; empty: no metric
    description: str = ""  # of the metric: one sentence
    # The counts of a metric, from an evaluation.metrics.MetricInput; None: those of the map.
    count: Callable[[Any], sparse.csr_array] | None = None
    mask: tuple[str, ...] = ()  # tokens that the metric leaves out
    needs_times: bool = False
    needs_categories: bool = False
    geographic: bool = False  # geography makes it differ between home regions


@dataclass(frozen=True)
class _Bins:
    """The name of a feature map and of its bins, `name:bin`."""

    name: str
    bins: tuple[str, ...]


@dataclass(frozen=True)
class TokenFeature(_Bins):
    """Counts tokens in bins that depend on the token alone: POIs, categories."""

    bin_of_token: Ints  # (vocabulary,) -1: not counted

    def counts(self, trajectories: Trajectories) -> sparse.csr_array:
        bins = self.bin_of_token[trajectories.tokens]
        return count_bins(trajectories.owner, bins, (len(trajectories), len(self.bins)))

    def soft(self, trajectories: SoftTrajectories) -> Tensor:
        return _expected(trajectories, self.bin_of_token, len(self.bins))


@dataclass(frozen=True)
class TransitionFeature(_Bins):
    """Counts pairs of categories of consecutive visits."""

    bin_of_token: Ints  # (vocabulary,) category, -1: pairs with it are not counted
    categories: int

    def counts(self, trajectories: Trajectories) -> sparse.csr_array:
        owner = trajectories.owner
        category = self.bin_of_token[trajectories.tokens]
        pair = category[:-1] * self.categories + category[1:]
        valid = (owner[:-1] == owner[1:]) & (category[:-1] >= 0) & (category[1:] >= 0)
        shape = (len(trajectories), len(self.bins))
        return count_bins(owner[:-1], np.where(valid, pair, -1), shape)

    def soft(self, trajectories: SoftTrajectories) -> Tensor:
        one_hot = self.bin_of_token[:, None] == np.arange(self.categories)  # (vocabulary, c)
        category = _matmul(trajectories.tokens, one_hot)  # (batch, length, c)
        first = category
        # A later token was sampled given the drawn earlier token, not its alternatives.
        if trajectories.drawn_tokens is not None:
            first = category.new_tensor(one_hot)[trajectories.drawn_tokens]
        pairs = first[:, :-1].swapaxes(1, 2) @ category[:, 1:]  # (batch, c, c)
        return pairs.reshape(len(pairs), -1)


@dataclass(frozen=True)
class DistanceFeature(_Bins):
    """Counts visits by distance from the person's home.

    Visits to HOME and OTHER, and people without a known home, are not counted.
    """

    coordinates: Floats  # (vocabulary, 2)
    counted: Flags  # (vocabulary,)
    edges: Floats  # km

    def counts(self, trajectories: Trajectories) -> sparse.csr_array:
        owner = trajectories.owner
        tokens = trajectories.tokens
        anchors = trajectories.anchors[owner]  # (tokens, 4)
        places = np.where((tokens == WORK)[:, None], anchors[:, 2:], self.coordinates[tokens])
        band = np.where(self.counted[tokens], self._band(haversine_km(anchors[:, :2], places)), -1)
        return count_bins(owner, band, (len(trajectories), len(self.bins)))

    def soft(self, trajectories: SoftTrajectories) -> Tensor:
        anchors = trajectories.anchors
        places = np.repeat(self.coordinates[None], len(anchors), axis=0)  # (batch, vocabulary, 2)
        places[:, WORK] = anchors[:, 2:]
        km = haversine_km(anchors[:, None, :2], places)  # (batch, vocabulary)
        return _expected(trajectories, np.where(self.counted, self._band(km), -1), len(self.bins))

    def _band(self, km: Floats) -> Ints:
        return np.where(np.isnan(km), -1, np.searchsorted(self.edges, km, side="right"))


@dataclass(frozen=True)
class HourFeature(_Bins):
    """Counts arrivals by hour of the day; needs trajectories with times."""

    counted: Flags  # (vocabulary,)

    def counts(self, trajectories: Trajectories) -> sparse.csr_array:
        if trajectories.hours is None:
            raise MobatlasError(
                "feature 'hour': these trajectories have no times; choose another feature"
            )
        hours = np.where(self.counted[trajectories.tokens], trajectories.hours, -1)
        return count_bins(trajectories.owner, hours, (len(trajectories), len(self.bins)))

    def soft(self, trajectories: SoftTrajectories) -> Tensor:
        if trajectories.hours is None:
            raise MobatlasError(
                "feature 'hour': this generator produces no times; choose another feature"
            )
        visited = _matmul(trajectories.tokens, self.counted)  # (batch, length)
        # Hours belong to the drawn token: its count is exact, its probability gives the gradient.
        if trajectories.drawn_tokens is not None:
            drawn = visited.new_tensor(self.counted)[trajectories.drawn_tokens]
            visited = visited - visited.detach() + drawn
        return (trajectories.hours * visited[..., None]).sum(1)


@dataclass(frozen=True)
class VisitsFeature(_Bins):
    """Counts each trajectory once, by its number of visits; without visits it is not counted."""

    counted: Flags  # (vocabulary,)

    def visit_counts(self, trajectories: Trajectories) -> Ints:
        """The number of visits of each trajectory, (trajectories,)."""
        counted = trajectories.owner[self.counted[trajectories.tokens]]
        return np.bincount(counted, minlength=len(trajectories))

    def counts(self, trajectories: Trajectories) -> sparse.csr_array:
        bins = _visits_bin(self.visit_counts(trajectories))
        return count_bins(np.arange(len(bins)), bins, (len(bins), len(self.bins)))

    def soft(self, trajectories: SoftTrajectories) -> Tensor:
        visited = _matmul(trajectories.tokens, self.counted)  # (batch, length)
        number = np.arange(visited.shape[1] + 1)
        one_more = number[:, None] + 1 == number
        # (batch, length + 1) the probability of each number of visits so far
        chance = _matmul(visited[:, :1] * 0 + 1, number[None] == 0)
        for place in range(visited.shape[1]):
            visit = visited[:, place : place + 1]
            chance = chance * (1 - visit) + _matmul(chance, one_more) * visit
        return _matmul(chance, _visits_bin(number)[:, None] == np.arange(len(self.bins)))


def _poi(vocabulary: Vocabulary, mask: Sequence[str]) -> FeatureMap:
    return _by_token("poi", vocabulary.poi_ids, vocabulary, mask)


def _category(vocabulary: Vocabulary, mask: Sequence[str]) -> TokenFeature:
    names = ["unknown" if name is None else name for name in vocabulary.categories]
    return _by_token("category", names, vocabulary, mask)


def pair_name(category: str) -> str:
    """A category in the name of a pair; an escaped separator, so no two pairs share a name."""
    return category.replace("\\", r"\\").replace(">", r"\>")


def _transitions(vocabulary: Vocabulary, mask: Sequence[str]) -> FeatureMap:
    single = _category(vocabulary, mask)
    names = [pair_name(name.removeprefix("category:")) for name in single.bins]
    bins = tuple(f"transitions:{first}>{second}" for first in names for second in names)
    return TransitionFeature("transitions", bins, single.bin_of_token, len(names))


def _distance(vocabulary: Vocabulary, mask: Sequence[str]) -> FeatureMap:
    edges = [0.0, *BAND_EDGES_KM]
    bands = [f"{low:g}-{high:g}" for low, high in pairwise(edges)] + [f"{edges[-1]:g}+"]
    return DistanceFeature(
        "distance",
        tuple(f"distance:{band}" for band in bands),
        vocabulary.coordinates,
        _counted(vocabulary, [*mask, SPECIALS[HOME]]),
        np.array(BAND_EDGES_KM),
    )


def _hour(vocabulary: Vocabulary, mask: Sequence[str]) -> FeatureMap:
    bins = tuple(f"hour:{hour:02d}" for hour in range(24))
    return HourFeature("hour", bins, _counted(vocabulary, mask))


def _visits(vocabulary: Vocabulary, mask: Sequence[str]) -> FeatureMap:
    spans = [
        f"{low}" if high == low + 1 else f"{low}-{high - 1}" for low, high in pairwise(VISITS_FROM)
    ]
    bins = tuple(f"visits:{span}" for span in (*spans, f"{VISITS_FROM[-1]}+"))
    return VisitsFeature("visits", bins, _counted(vocabulary, mask))


FEATURES = Registry[Feature](
    "feature",
    "--feature",
    {
        feature.name: feature
        for feature in (
            Feature(
                "poi",
                _poi,
                "POI frequency",
                "JSD of visits over POIs, without HOME, WORK and OTHER.",
                mask=SPECIALS[HOME:],
                geographic=True,
            ),
            Feature(
                "category",
                _category,
                "Category",
                "JSD of visits over categories.",
                needs_categories=True,
            ),
            Feature(
                "transitions",
                _transitions,
                "Transitions",
                "JSD of pairs of categories of consecutive visits.",
                needs_categories=True,
            ),
            Feature(
                "distance",
                _distance,
                "Distance from home",
                "JSD of visits over bands of distance from home.",
                geographic=True,
            ),
            Feature(
                "hour",
                _hour,
                "Hour of arrival",
                "JSD of arrivals over the hours of the day.",
                needs_times=True,
            ),
            Feature("visits", _visits),
        )
    },
)


def register_feature(
    name: str,
    builder: Builder,
    *,
    title: str = "",
    description: str = "",
    needs_times: bool = False,
    needs_categories: bool = False,
    geographic: bool = False,
) -> None:
    """Add a feature map, for `--feature NAME` and `build_feature`; with a title, also a metric.

    Parameters
    ----------
    name
        A name that no other feature map and no metric has.
    builder
        A function `builder(vocabulary, mask)` that returns a `FeatureMap`.
    title, description
        Of the metric, in tables and in the report. Without a title the map is no metric.
    needs_times
        Whether it counts arrival times, which few generators sample.
    needs_categories
        Whether it counts categories; a dataset without them gives a warning.
    geographic
        Whether it depends on where people live; real home regions then give a warning.

    Examples
    --------
    >>> register_feature("start", build_start, title="First visit")  # doctest: +SKIP
    """
    feature = Feature(
        name,
        builder,
        title,
        description,
        needs_times=needs_times,
        needs_categories=needs_categories,
        geographic=geographic,
    )
    FEATURES.register(name, feature)


def feature_maps() -> list[str]:
    """The names of the registered feature maps."""
    return [name for name, feature in FEATURES.items() if feature.build is not None]


def build_feature(name: str, vocabulary: Vocabulary, mask: Sequence[str] = ()) -> FeatureMap:
    """Build a feature map over a vocabulary.

    Parameters
    ----------
    name
        A registered feature map: "poi", "category", "transitions", "distance", "hour", "visits".
    vocabulary
        The places of a dataset.
    mask
        Tokens that are not counted: any of "HOME", "WORK", "OTHER".

    Returns
    -------
    FeatureMap
        Its `counts(trajectories)` has one column for each of its `bins`.

    Examples
    --------
    >>> poi = build_feature("poi", dataset.vocabulary, mask=["HOME"])  # doctest: +SKIP
    """
    build = FEATURES.get_entry(name, among=feature_maps()).build
    assert build is not None
    for word in mask:
        refuse_unknown(f"mask '{word}'", word, SPECIALS[HOME:])
    return build(vocabulary, mask)


def count_bins(
    rows: Ints, bins: np.ndarray[tuple[int], np.dtype[np.integer]], shape: tuple[int, int]
) -> sparse.csr_array:
    """How often each row has each bin; a bin below zero is not counted."""
    counted = bins >= 0
    ones = np.ones(int(np.count_nonzero(counted)))
    return sparse.csr_array((ones, (rows[counted], bins[counted])), shape=shape)


def _visits_bin(number: Ints) -> Ints:
    return np.searchsorted(np.array(VISITS_FROM), number, side="right") - 1


def _counted(vocabulary: Vocabulary, mask: Sequence[str]) -> Flags:
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


def _expected(trajectories: SoftTrajectories, bins: Ints, n: int) -> Tensor:
    """Expected counts from the bin of each token, (vocabulary,) or (batch, vocabulary).

    Scatters instead of multiplying: one-hot weights of 7,000 POIs would take 392 MB.
    """
    visits = trajectories.tokens.sum(1)  # (batch, vocabulary)
    column = np.where(bins < 0, n, bins)  # column n collects tokens that are not counted
    if hasattr(visits, "new_zeros"):
        import torch  # imported only for tensors, because it takes seconds

        index = torch.from_numpy(column).to(visits.device).expand(visits.shape)
        return visits.new_zeros(len(visits), n + 1).scatter_add(1, index, visits)[:, :n]
    place = np.arange(len(visits))[:, None] * (n + 1) + column  # (batch, vocabulary)
    sums = np.bincount(place.ravel(), visits.ravel(), minlength=len(visits) * (n + 1))
    return sums.reshape(len(visits), n + 1)[:, :n]


def _matmul(tokens: Tensor, weights: Flags) -> Tensor:
    if hasattr(tokens, "new_tensor"):
        return tokens @ tokens.new_tensor(weights)
    return tokens @ weights.astype(tokens.dtype)
