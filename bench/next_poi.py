"""Next-POI prediction, the downstream task of the paper's RQ3: an LSTM and its scores.

The paper: it "takes a variable-length history of visited POIs as input" and "predicts the next POI
from the final hidden state via a linear output layer over the full POI vocabulary", with "early
stopping based on the validation loss". Choices that the paper leaves open:

- Every visit but the first of a trajectory is predicted, from all visits before it.
- HOME, WORK and OTHER are predicted like POIs, because they are in the paper's vocabulary. The end
  of a trajectory is not, because it is the end of a window. Padding, start, end and mask are not
  outputs.
- Training trajectories are cut to `length` tokens, the paper's "max sequence length", so that real
  ones are no longer than generated ones. Those of validation and test people are not cut.
- Ties are broken by the lower token number.
- GeoError is the mean distance between the true and the predicted place; a correct prediction has 0
  km. HOME and WORK are at the person's anchors. OTHER and unknown anchors have no place: a true
  visit there is left out, and the predicted place is the likeliest one that has a place. All
  predictors are therefore scored on the same visits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from mobatlas.config import Section, build, merge
from mobatlas.data.dataset import Trajectories
from mobatlas.data.types import FIRST_POI, HOME, PAD, WORK, Floats, Ints, Vocabulary, haversine_km
from mobatlas.errors import MobatlasError, suggestion
from mobatlas.training.loop import Execution, Progress, Share, Stage, Trainer

TOP = 10  # of HR@10 and NDCG@10
TILE = 4_096  # tokens that are scored at a time


class NextPoiConfig(Section):
    """The predictor and its training; defaults are the paper's where it gives any."""

    embedding: int = Field(256, ge=1, le=4_096)
    layers: int = Field(2, ge=1, le=16)
    hidden: int = Field(256, ge=1, le=4_096)
    dropout: float = Field(0.2, ge=0, lt=1)  # between the layers
    learning_rate: float = Field(1e-4, gt=0)  # of Adam
    # The paper does not give the rest.
    batch: int = Field(64, ge=1)  # trajectories
    length: int = Field(64, ge=2)  # tokens of a training trajectory; the rest is cut
    steps: int = Field(20_000, ge=1)  # at most
    validate_every: int = Field(200, ge=1)  # steps
    patience: int = Field(5, ge=1)  # validations without a lower loss before training stops


PROFILES: Mapping[str, Mapping[str, Any]] = {
    "full": {},
    # For two CPU cores. With few steps, the paper's learning rate would be too low.
    "quick": {
        "embedding": 64,
        "hidden": 64,
        "learning_rate": 3e-3,
        "steps": 1_000,
        "validate_every": 100,
        "patience": 3,
    },
}


def next_poi_config(
    profile: str = "full", values: Mapping[str, Any] | None = None
) -> NextPoiConfig:
    """Return the configuration of a profile, changed by `values`."""
    if profile not in PROFILES:
        raise MobatlasError(
            f"--profile {profile} does not exist{suggestion(profile, PROFILES)} "
            f"(known: {', '.join(PROFILES)})"
        )
    return build(
        NextPoiConfig,
        merge(PROFILES[profile], values or {}),
        f"next-POI predictor, profile {profile}",
    )


class NextPoiNetwork(nn.Module):
    """An embedding, an LSTM and one linear layer over all tokens that can follow."""

    def __init__(self, config: NextPoiConfig, vocabulary: int) -> None:
        super().__init__()
        between = config.dropout if config.layers > 1 else 0.0
        self.embedding = nn.Embedding(vocabulary, config.embedding, padding_idx=PAD)
        self.lstm = nn.LSTM(
            config.embedding, config.hidden, config.layers, batch_first=True, dropout=between
        )
        self.output = nn.Linear(config.hidden, vocabulary - HOME)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return scores of all tokens from HOME on, for each visit that follows another."""
        history = tokens[:, :-1]  # (batch, length - 1)
        follows = tokens[:, 1:] != PAD  # (batch, length - 1)
        hidden, _ = self.lstm(self.embedding(history))  # (batch, length - 1, hidden)
        scores: Tensor = self.output(hidden[follows])  # (predictions, vocabulary - HOME)
        return scores


@dataclass(frozen=True)
class Predictor:
    """A trained network with the weights of its lowest validation loss."""

    network: nn.Module = field(repr=False)  # tokens -> scores, as `NextPoiNetwork`
    vocabulary: Vocabulary = field(repr=False)
    learnt: int  # predictions of a training epoch
    steps: int  # until training stopped
    best_step: int
    losses: tuple[float, ...]  # of validation people, in nats per prediction

    @property
    def validation_loss(self) -> float:
        """The loss of the weights."""
        return min(self.losses)


@dataclass(frozen=True)
class PredictionScores:
    """Scores of next visits of real people; None where there was no visit to predict."""

    accuracy: float | None  # the true token is the likeliest
    hr10: float | None  # it is among the ten likeliest
    ndcg10: float | None  # 1 / log2(1 + its rank) if it is, else 0
    geo_error_km: float | None
    # Visits to POIs, ranked among POIs alone; HOME and WORK are almost always likelier than a POI.
    poi_accuracy: float | None
    poi_hr10: float | None
    predictions: int
    located: int  # predictions with a true place, for GeoError
    pois: int  # predictions of visits to POIs

    def as_dict(self) -> dict[str, Any]:
        """For reports."""
        return asdict(self)


NEXT_POI_METRICS = ("accuracy", "hr10", "ndcg10", "geo_error_km", "poi_accuracy", "poi_hr10")


class _StopTraining(Exception):  # noqa: N818
    """The validation loss has stopped falling."""


@dataclass
class _EarlyStopping:
    """Keeps the best weights of a stage and ends it when the validation loss stops falling."""

    validation: Trajectories
    patience: int
    losses: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)

    def __call__(self, network: nn.Module) -> dict[str, float]:
        self.losses.append(_loss(network, self.validation))
        best = int(np.argmin(self.losses))
        if best == len(self.losses) - 1:
            self.weights = {
                name: tensor.detach().clone() for name, tensor in network.state_dict().items()
            }
        elif len(self.losses) - 1 - best >= self.patience:
            raise _StopTraining
        return {"validation_loss": self.losses[-1]}


def train_predictor(
    trajectories: Trajectories,
    validation: Trajectories,
    config: NextPoiConfig,
    vocabulary: Vocabulary,
    seed: int = 0,
    *,
    accelerator: str = "auto",
    quiet: bool = False,
    progress: Progress | None = None,
) -> Predictor:
    """Train on real or synthetic trajectories until the loss of validation people stops falling.

    The same arguments give the same weights on the same machine: the seed determines the initial
    weights, the seed and the step determine batches and dropout.
    """
    learnt = _usable(trajectories, vocabulary, "training trajectories")
    watch = _EarlyStopping(
        _usable(validation, vocabulary, "validation trajectories"), config.patience
    )
    # An LSTM has no backward pass in bf16 on CPUs.
    trainer = Trainer(
        None,
        Execution(accelerator=accelerator, precision="32-true", quiet=quiet),
        seed=seed,
        progress=progress,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        network = NextPoiNetwork(config, len(vocabulary))

        def loss(called: nn.Module, step: int, _: Share) -> Tensor:
            chosen = _batch(len(learnt), config.batch, seed, step)
            tokens = _padded(learnt, chosen, config.length).to(trainer.device)
            return F.cross_entropy(called(tokens), _truths(tokens))

        stage = Stage(
            name="next-POI predictor",
            network=network,
            steps=config.steps,
            loss=loss,
            learning_rate=config.learning_rate,
            validate=watch,
            validate_every=config.validate_every,
            examples_per_step=config.batch,
        )
        with suppress(_StopTraining):
            trainer.run(stage)
    network.load_state_dict(watch.weights)
    network.zero_grad()
    validated = [
        min(number * config.validate_every, config.steps)
        for number in range(1, len(watch.losses) + 1)
    ]
    return Predictor(
        network=network.eval(),
        vocabulary=vocabulary,
        learnt=int((np.minimum(np.diff(learnt.offsets), config.length) - 1).sum()),
        steps=validated[-1],
        best_step=validated[int(np.argmin(watch.losses))],
        losses=tuple(watch.losses),
    )


def score_predictor(predictor: Predictor, trajectories: Trajectories) -> PredictionScores:
    """Score all visits that follow another; a trajectory of one visit has none."""
    vocabulary = predictor.vocabulary
    _check_tokens(trajectories, vocabulary, "test trajectories")
    ranks = [np.empty(0, np.int64)]
    among_pois = [np.empty(0, np.int64)]
    km = [np.empty(0)]
    first = FIRST_POI - HOME  # column
    for scores, true, owner in _predictions(predictor.network, trajectories):
        anchors = trajectories.anchors[owner]  # (predictions, 4)
        poi = true >= first  # (predictions,)
        predicted = _places(_likeliest_place(scores, anchors, vocabulary), anchors, vocabulary)
        actual = _places(true.cpu().numpy() + HOME, anchors, vocabulary)
        km.append(haversine_km(predicted, actual))
        ranks.append(_ranks(scores, true))
        among_pois.append(_ranks(scores[poi, first:], true[poi] - first))
    rank = np.concatenate(ranks)
    poi_rank = np.concatenate(among_pois)
    distance = np.concatenate(km)
    located = ~np.isnan(distance)
    return PredictionScores(
        accuracy=_mean(rank == 0),
        hr10=_mean(rank < TOP),
        ndcg10=_mean(np.where(rank < TOP, 1 / np.log2(rank + 2), 0.0)),
        geo_error_km=_mean(distance[located]),
        poi_accuracy=_mean(poi_rank == 0),
        poi_hr10=_mean(poi_rank < TOP),
        predictions=len(rank),
        located=int(located.sum()),
        pois=len(poi_rank),
    )


def with_two_visits(trajectories: Trajectories) -> Trajectories:
    """Return the trajectories that have a visit to predict."""
    return trajectories.take(np.flatnonzero(np.diff(trajectories.offsets) >= 2))


def _usable(trajectories: Trajectories, vocabulary: Vocabulary, name: str) -> Trajectories:
    _check_tokens(trajectories, vocabulary, name)
    usable = with_two_visits(trajectories)
    if not len(usable):
        raise MobatlasError(
            f"{name}: none of {len(trajectories)} has two visits, so there is no next visit to "
            "predict; pass longer ones"
        )
    return usable


def _check_tokens(trajectories: Trajectories, vocabulary: Vocabulary, name: str) -> None:
    wrong = trajectories.tokens[
        (trajectories.tokens < HOME) | (trajectories.tokens >= len(vocabulary))
    ]
    if len(wrong):
        raise MobatlasError(
            f"{name}: token {wrong[0]} is no place of this vocabulary, whose places have numbers "
            f"{HOME} to {len(vocabulary) - 1}; pass trajectories and the vocabulary of one dataset"
        )


def _batch(n: int, size: int, seed: int, step: int) -> Ints:
    """Choose the trajectories of a step: all once per epoch, shuffled by the seed and the epoch."""
    epochs, places = np.divmod(step * size + np.arange(size), n)
    return np.concatenate(
        [
            np.random.default_rng([seed, epoch]).permutation(n)[places[epochs == epoch]]
            for epoch in np.unique(epochs)
        ]
    )


def _padded(trajectories: Trajectories, chosen: Ints, longest: int | None = None) -> Tensor:
    """Return the tokens of some trajectories, padded: (chosen, length)."""
    lengths = np.diff(trajectories.offsets)[chosen]
    columns = np.arange(min(int(lengths.max()), longest or np.iinfo(np.int64).max))
    valid = columns < lengths[:, None]  # (chosen, length)
    tokens = np.full(valid.shape, PAD, dtype=np.int64)
    tokens[valid] = trajectories.tokens[(trajectories.offsets[chosen, None] + columns)[valid]]
    return torch.from_numpy(tokens)


def _truths(tokens: Tensor) -> Tensor:
    """Return the columns of the true tokens in the scores of the network: (predictions,)."""
    later = tokens[:, 1:]
    return later[later != PAD] - HOME


@torch.no_grad()
def _predictions(
    network: nn.Module, trajectories: Trajectories
) -> Iterator[tuple[Tensor, Tensor, Ints]]:
    """Yield scores, true columns and trajectories of predictions, in tiles by length.

    Shapes are (predictions, vocabulary - HOME), (predictions,) and (predictions,).
    """
    lengths = np.diff(trajectories.offsets)
    order = np.argsort(lengths, kind="stable")
    order = order[lengths[order] >= 2]
    device = next(network.parameters()).device
    while len(order):
        fits = np.arange(1, len(order) + 1) * lengths[order] <= TILE  # tokens with padding
        tile, order = np.split(order, [max(1, int(fits.sum()))])
        tokens = _padded(trajectories, tile).to(device)
        yield network(tokens), _truths(tokens), np.repeat(tile, lengths[tile] - 1)


def _loss(network: nn.Module, trajectories: Trajectories) -> float:
    """Return the cross-entropy in nats per prediction."""
    parts = [
        (float(F.cross_entropy(scores, true, reduction="sum")), len(true))
        for scores, true, _ in _predictions(network, trajectories)
    ]
    total, predictions = map(sum, zip(*parts, strict=True))
    return total / predictions


def _ranks(scores: Tensor, true: Tensor) -> Ints:
    """Count the tokens that rank before the true one: (predictions,)."""
    true_scores = scores.gather(1, true[:, None])  # (predictions, 1)
    lower = torch.arange(scores.shape[1], device=scores.device) < true[:, None]
    return ((scores > true_scores) | ((scores == true_scores) & lower)).sum(1).cpu().numpy()


def _likeliest_place(scores: Tensor, anchors: Floats, vocabulary: Vocabulary) -> Ints:
    """Return the likeliest token that has a place for the person: (predictions,)."""
    has_place = np.repeat(~np.isnan(vocabulary.coordinates[None, HOME:]).any(2), len(anchors), 0)
    has_place[:, HOME - HOME] = ~np.isnan(anchors[:, :2]).any(1)
    has_place[:, WORK - HOME] = ~np.isnan(anchors[:, 2:]).any(1)
    unplaced = torch.from_numpy(~has_place).to(scores.device)  # (predictions, vocabulary - HOME)
    tokens: Ints = scores.masked_fill(unplaced, -math.inf).argmax(1).cpu().numpy() + HOME
    return tokens


def _places(tokens: Ints, anchors: Floats, vocabulary: Vocabulary) -> Floats:
    """Return latitude and longitude of tokens, NaN where there is no place: (tokens, 2)."""
    places = vocabulary.coordinates[tokens]
    for token, columns in ((HOME, slice(0, 2)), (WORK, slice(2, 4))):
        places[tokens == token] = anchors[tokens == token, columns]
    return places


def _mean(values: Any) -> float | None:
    return float(np.mean(values)) if len(values) else None
