"""Generators that write token after token; a family is a network, its options and a codec."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, Protocol, Self

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from mobatlas.config import Section
from mobatlas.data.arrays import Floats, Ints
from mobatlas.data.dataset import TrajectoryDataset
from mobatlas.data.trajectories import SoftTrajectories, Trajectories
from mobatlas.data.vocabulary import PAD, Vocabulary
from mobatlas.generators.network_generator import (
    NetworkGenerator,
    WeightedFitConfig,
    network_family,
    tile_rng,
    unknown_groups,
)
from mobatlas.generators.protocol import Draw, Family, unlabelled
from mobatlas.generators.rng import TILE, tiles
from mobatlas.generators.sequence.codec import LATENT_STREAM, PLAIN_TOKENS, TokenCodec
from mobatlas.generators.sequence.network import TransformerConfig
from mobatlas.groups import Groups
from mobatlas.training.loop import Share, Stage, Trainer


class TrainingConfig(Section):
    """Training of phase 1."""

    steps: int = Field(1_500, ge=1)
    batch: int = Field(128, ge=1)
    learning_rate: float = Field(2e-3, gt=0)
    warmup: int = Field(100, ge=0)
    weight_decay: float = Field(0.01, ge=0)
    decay: Literal["none", "linear", "cosine"] = "cosine"  # of the learning rate after the warm-up
    ema: float = Field(0.99, ge=0, lt=1)


class SequenceConfig(Section):
    """Options that all sequence generators share."""

    length: int = Field(24, ge=2, le=4_096)  # tokens; longer trajectories are truncated
    network: TransformerConfig = TransformerConfig()
    training: TrainingConfig = TrainingConfig()
    weighted_fit: WeightedFitConfig = WeightedFitConfig()


# The paper's table of transformer hyperparameters, where it applies here.
PAPER: Mapping[str, Any] = {
    "length": 64,
    "network": {
        "depth": 12,
        "width": 512,
        "heads": 4,
        "activation": "gelu",
        "dropout": 0.1,
        "embedding": 256,
    },
    "training": {
        "steps": 100_000,
        "batch": 512,
        "learning_rate": 1e-4,
        "warmup": 1_000,
        "decay": "none",
        "ema": 0.9999,
    },
    "weighted_fit": {"steps": 30_000, "learning_rate": 1e-5, "warmup": 1_000},
}


class Network(Protocol):
    """The network of a sequence generator. Levels (batch, attributes) are None without groups."""

    @property
    def decoder(self) -> Any:
        """What the codec samples with. Its `measure(dataset)` is called before training."""

    @property
    def latent(self) -> int:
        """The number of normal random numbers (the noise) that a trajectory starts from."""

    def forward(
        self,
        tokens: Tensor,
        anchors: Tensor,
        levels: Tensor | None,
        noise: Tensor,
        step: int | None = None,
    ) -> Tensor:
        """Return the loss (batch,); `step` is None after phase 1."""

    def terms(
        self, tokens: Tensor, anchors: Tensor, levels: Tensor | None, noise: Tensor
    ) -> dict[str, Tensor]:
        """Return terms (batch,) whose sum is, or bounds, minus the log-likelihood."""

    def condition(self, anchors: Tensor, levels: Tensor | None, noise: Tensor) -> Tensor:
        """Return the condition (batch, width) of the decoder."""


# (config, size of the vocabulary, groups) -> a `Network`
BuildNetwork = Callable[[Any, int, Groups | None], nn.Module]


class SequenceGenerator(NetworkGenerator):
    """Writes trajectories token after token. `Generator` documents its methods."""

    def __init__(
        self,
        build_network: BuildNetwork,
        config: SequenceConfig,
        vocabulary: Vocabulary,
        groups: Groups | None = None,
        seed: int = 0,
        codec: TokenCodec = PLAIN_TOKENS,
    ) -> None:
        self.config = config
        self.vocabulary = vocabulary
        self.groups = groups
        self.codec = codec
        self._build_network = build_network
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.network = build_network(config, len(vocabulary), groups).eval()

    def _untrained(self, groups: Groups, seed: int) -> Self:
        return type(self)(
            self._build_network, self.config, self.vocabulary, groups, seed, self.codec
        )

    def fit(self, dataset: TrajectoryDataset, trainer: Trainer) -> dict[str, Any]:
        """Maximise the likelihood of training trajectories."""
        self.network.decoder.measure(dataset)
        draw = unlabelled(dataset, trainer.seed)
        stage = self.training_stage(dataset, draw, "transformer", trainer, fresh=True)
        return {"transformer": trainer.run(stage), "truncated": self._truncated(dataset)}

    def training_stage(
        self, dataset: TrajectoryDataset, draw: Draw, name: str, trainer: Trainer, *, fresh: bool
    ) -> Stage:
        training = self.config.training
        phase = training if fresh else self.config.weighted_fit
        return Stage(
            name=name,
            network=self.network,
            steps=phase.steps,
            loss=self._loss(dataset, draw, fresh),
            learning_rate=phase.learning_rate,
            optimizer="adamw",
            weight_decay=training.weight_decay,
            warmup=phase.warmup,
            decay=training.decay,
            ema=training.ema,
            validate=(lambda _: self.held_out(dataset)) if self.groups is None else None,
            examples_per_step=training.batch,
        )

    def _loss(
        self, dataset: TrajectoryDataset, draw: Draw, fresh: bool
    ) -> Callable[[nn.Module, int, Share], Tensor]:
        """Return the loss in nats per token.

        It divides by the mean length of all trajectories, not of the batch, so that a trajectory
        has the same weight in every batch.
        """
        size = self.config.training.batch
        lengths = dataset.lengths[dataset.split("train")]
        mean_length = float(np.minimum(lengths + 1, self.max_length).mean())

        def loss(network: nn.Module, step: int, share: Share) -> Tensor:
            indices, person = self._draw_examples(dataset, draw, size, step, share)
            noise = torch.randn(size, self.network.latent)[share.rows(size)].to(self.device)
            visits = self.codec.read_dataset(dataset, indices, self.max_length).to(self.device)
            nats: Tensor = network(visits, *person, noise, step if fresh else None)
            return nats.sum() * (share.world / (size * mean_length))

        return loss

    def held_out(self, dataset: TrajectoryDataset, split: str = "val") -> dict[str, float]:
        """Return nats per token of held-out trajectories of unknown group, and their terms."""
        members = self._validation_members(dataset, split)
        visits = self.codec.read_dataset(dataset, members, self.max_length).to(self.device)
        anchors = dataset.anchors[dataset.person[members]]
        terms = self._terms(visits, unknown_groups(len(members)), anchors, seed=0)
        tokens = (self.codec.target_tokens(visits) != PAD).sum()
        means = {name: float(values.sum() / tokens) for name, values in terms.items()}
        return {"nats": sum(means.values())} | (means if len(means) > 1 else {})

    def log_likelihood(
        self, trajectories: Trajectories, groups: Ints | None = None, seed: int = 0
    ) -> Floats:
        """Return log-probabilities (trajectories,), given anchors and groups.

        Longer trajectories are truncated. The value is exact for the autoregressive family. For
        families with a latent its mean over seeds is a lower bound.
        """
        visits = self.codec.read_trajectories(trajectories, self.max_length).to(self.device)
        groups = unknown_groups(len(visits)) if groups is None else groups
        terms = self._terms(visits, groups, trajectories.anchors, seed)
        return -sum(terms.values(), np.zeros(len(visits)))

    @torch.no_grad()
    def _terms(self, visits: Tensor, groups: Ints, anchors: Floats, seed: int) -> dict[str, Floats]:
        """Return the network's terms (n,) of visits (n, any, ...) with end tokens."""
        parts: dict[str, list[Floats]] = {}
        for number, rows, places in tiles(0, len(visits)):
            person = self._person(groups[rows], anchors[rows])
            noise = self._noise(number, seed)[places]
            for name, nats in self.network.terms(visits[rows], *person, noise).items():
                parts.setdefault(name, []).append(nats.double().cpu().numpy())
        return {name: np.concatenate(values) for name, values in parts.items()}

    def _noise(self, number: int, seed: int) -> Tensor:
        """Return the noise (TILE, latent) of a tile."""
        rng = tile_rng(seed, number, LATENT_STREAM)
        return torch.randn(TILE, self.network.latent, generator=rng).to(self.device)

    def _uniform(self, seed: int, number: int, stream: int, *shape: int) -> Tensor:
        return torch.rand(TILE, *shape, generator=tile_rng(seed, number, stream)).to(self.device)

    def _sample_tile(
        self, number: int, groups: Ints, anchors: Floats, seed: int, lengths: Tensor | None
    ) -> Tensor:
        noise = self._noise(number, seed)
        condition = self.network.condition(*self._person(groups, anchors), noise)
        uniform = partial(self._uniform, seed, number)
        return self.codec.sample(self.network.decoder, condition, uniform, self.max_length, lengths)

    def soft_sample(
        self,
        groups: Ints,
        anchors: Floats,
        seed: int,
        *,
        steps: int | None = None,
        differentiable: int = 1,
        early: bool = False,
    ) -> SoftTrajectories:
        """Sample, then return the distribution behind each token, given the sampled ones before.

        The gradient ignores how a token changes later ones. With 256 samples of a city of 200
        places its cosine with the exact gradient was 0.98. Between two batches its cosine was
        0.995; that of straight-through tokens was 0.89, and that of the score function 0.84.
        Gumbel-softmax tokens reached 0.94 on a smaller city in four times the time.
        """
        with self._without_dropout():
            rows = self._sample_rows(groups, anchors, seed).to(self.device)
            noises = [self._noise(tile.number, seed)[tile.places] for tile in tiles(0, len(groups))]
            person = self._person(groups, anchors)
            condition = self.network.condition(*person, torch.cat(noises))
            return self.codec.soft_trajectories(self.network.decoder, rows, condition, anchors)

    @contextmanager
    def _without_dropout(self) -> Iterator[None]:
        """Switch dropout off; phase 2 samples while it trains."""
        training = self.network.training
        self.network.eval()
        try:
            yield
        finally:
            self.network.train(training)


def sequence_family(
    name: str,
    config: type[SequenceConfig],
    presets: Mapping[str, Mapping[str, Any]],
    build_network: BuildNetwork,
    codec: Callable[[Any], TokenCodec] = lambda config: PLAIN_TOKENS,
) -> Family:
    """Return the family of a network; `codec(config)` is its codec if visits have times."""

    def build(
        config: SequenceConfig, vocabulary: Vocabulary, groups: Groups | None, seed: int
    ) -> SequenceGenerator:
        return SequenceGenerator(
            build_network, config, vocabulary, groups, seed, codec=codec(config)
        )

    return network_family(name, config, presets, build)
