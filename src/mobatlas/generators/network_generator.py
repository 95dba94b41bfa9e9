"""Generators with torch networks: people, tiles of samples, saved weights.

`SequenceGenerator` is the common part of those that write token after token. A family of these has
options, a network and a codec.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from mobatlas.config import Section
from mobatlas.data.dataset import SoftTrajectories, Trajectories, TrajectoryDataset
from mobatlas.data.types import PAD, Floats, Ints, Vocabulary
from mobatlas.errors import MobatlasError
from mobatlas.generators.layers import Person, copy_weights, person_tensors
from mobatlas.generators.protocol import TILE, UNKNOWN, Draw, Family, tiles, unlabelled
from mobatlas.generators.transformer import LATENT_STREAM, TokenCodec, TransformerConfig
from mobatlas.groups import Groups
from mobatlas.training.checkpoints import load_weights, save_weights
from mobatlas.training.devices import autocast
from mobatlas.training.loop import Share, Stage, Trainer

VALIDATED = 2_048  # trajectories that validation reads at most


class OptimizerConfig(Section):
    """Training of a network in phase 1."""

    steps: int = Field(1_500, ge=1)
    batch: int = Field(128, ge=1)
    learning_rate: float = Field(2e-3, gt=0)
    warmup: int = Field(100, ge=0)
    decay: Literal["none", "linear", "cosine"] = "cosine"  # of the learning rate after the warm-up


class WeightedFitConfig(Section):
    """Training on examples with groups, which continues from phase 1."""

    steps: int = Field(800, ge=1)
    learning_rate: float = Field(1e-3, gt=0)
    warmup: int = Field(100, ge=0)
    # share of examples whose group is hidden, so that the model keeps an unknown group
    group_dropout: float = Field(0.1, ge=0, le=1)


class NetworkGenerator(ABC):
    """A generator whose samples come from `network` in tiles. `Generator` documents its methods."""

    config: Any
    vocabulary: Vocabulary
    groups: Groups | None
    codec = TokenCodec()
    network: Any
    tile = TILE

    def __init__(
        self, config: Any, vocabulary: Vocabulary, groups: Groups | None = None, seed: int = 0
    ) -> None:
        self.config = config
        self.vocabulary = vocabulary
        self.groups = groups
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self._build(len(vocabulary))
        for network in self._networks().values():
            network.eval()

    @property
    def max_length(self) -> int:
        return int(self.config.length)

    @property
    def has_times(self) -> bool:
        return self.codec.has_times

    @property
    def device(self) -> torch.device:
        return torch.device(next(self.network.parameters()).device)

    @abstractmethod
    def training_stage(
        self, dataset: TrajectoryDataset, draw: Draw, name: str, trainer: Trainer, *, fresh: bool
    ) -> Stage:
        """Return the stage that trains `network` on the examples of `draw`."""

    @abstractmethod
    def _build(self, size: int) -> None:
        """Set `network`, for a vocabulary of that size, and `codec` if visits have times."""

    @abstractmethod
    def _sample_tile(self, number: int, groups: Ints, anchors: Floats, seed: int) -> Tensor:
        """Return the samples (TILE, ...) of a tile as its codec has them."""

    def _networks(self) -> dict[str, nn.Module]:
        """Return the networks to save, by prefix of the tensor names."""
        return {"network": self.network}

    def with_groups(
        self, groups: Groups, seed: int, fresh: bool = False, *, equal_groups: bool = False
    ) -> Self:
        if self.groups is not None:
            raise MobatlasError(
                "this model is conditioned on groups already; pass the model that "
                "`mobatlas train` wrote"
            )
        other = type(self)(self.config, self.vocabulary, groups, seed)
        copy_weights(other.network, self.network, fresh=fresh, equal_groups=equal_groups)
        other.network.to(self.device)
        return other

    def weighted_fit_stage(
        self,
        dataset: TrajectoryDataset,
        draw: Draw,
        name: str,
        trainer: Trainer,
        *,
        fresh: bool = False,
    ) -> Stage:
        if self.groups is None:
            raise MobatlasError("this model has no groups; call `with_groups` first")
        return self.training_stage(dataset, draw, name, trainer, fresh=fresh)

    def _draw_examples(
        self, dataset: TrajectoryDataset, draw: Draw, size: int, step: int, share: Share
    ) -> tuple[Ints, Person]:
        """Return this process's trajectories of a step and their people, some without group."""
        # every process draws for the whole batch, then takes its rows
        examples = draw(size, step)
        rows = share.rows(size)
        dropout = 0.0 if self.groups is None else self.config.weighted_fit.group_dropout
        groups = np.where(torch.rand(size).numpy() < dropout, UNKNOWN, examples.groups)
        indices = examples.indices[rows]
        return indices, self._person(groups[rows], dataset.anchors[dataset.person[indices]])

    def _person(self, groups: Ints, anchors: Floats) -> Person:
        return person_tensors(self.groups, groups, anchors, self.device)

    def _validation_members(self, dataset: TrajectoryDataset, split: str) -> Ints:
        """Return the first trajectories of a split, or of training if it has none."""
        members = dataset.split(split)
        return (members if len(members) else dataset.split("train"))[:VALIDATED]

    def _truncated(self, dataset: TrajectoryDataset) -> int:
        """Count the training trajectories that are longer than the model's longest."""
        return int((dataset.lengths[dataset.split("train")] > self.max_length).sum())

    def sample(
        self,
        n: int,
        groups: Ints | None = None,
        anchors: Floats | None = None,
        seed: int = 0,
        *,
        first: int = 0,
    ) -> Trajectories:
        groups = unknown_groups(n) if groups is None else groups
        anchors = np.full((n, 4), np.nan) if anchors is None else anchors
        return self.codec.to_trajectories(self._sample_rows(groups, anchors, seed, first), anchors)

    @torch.no_grad()
    def _sample_rows(self, groups: Ints, anchors: Floats, seed: int, first: int = 0) -> Tensor:
        """Return samples (n, ...) as the codec has them, PAD after the end."""
        samples = torch.full((len(groups), *self.codec.row_shape(self.max_length)), PAD)
        for tile in tiles(first, len(groups)):
            with autocast(self.device):
                rows = self._sample_tile(
                    tile.number, tile.spread(groups), tile.spread(anchors), seed
                )
            samples[tile.rows] = rows[tile.places].cpu()
        return samples

    def to(self, device: str) -> None:
        for network in self._networks().values():
            network.to(device)

    def save(self, folder: Path) -> None:
        save_weights(folder, self._networks())

    def load(self, folder: Path) -> None:
        """Read the weights that `save` wrote."""
        load_weights(folder, self._networks())


def unknown_groups(n: int) -> Ints:
    """Return group numbers (n,) of people whose group is unknown."""
    return np.full(n, UNKNOWN, dtype=np.int64)


def tile_rng(seed: int, number: int, purpose: int) -> torch.Generator:
    """Return the random number generator of a tile for one purpose."""
    state = np.random.SeedSequence([seed, number, purpose]).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(state[0] >> 1))


def network_family(
    name: str,
    generator: type[NetworkGenerator],
    config: type[Section],
    presets: Mapping[str, Mapping[str, Any]],
) -> Family:
    """Return the family of a class of generators."""

    def create(config: Section, dataset: TrajectoryDataset, seed: int) -> Any:
        return generator(config, dataset.vocabulary, None, seed)

    def load(folder: Path, config: Section, vocabulary: Vocabulary, groups: Groups | None) -> Any:
        loaded = generator(config, vocabulary, groups)
        loaded.load(folder)
        return loaded

    return Family(name, config, presets, create, load)


class TrainingConfig(OptimizerConfig):
    """Training of phase 1."""

    weight_decay: float = Field(0.01, ge=0)
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


class SequenceGenerator(NetworkGenerator):
    """Writes trajectories token after token. `Generator` documents its methods.

    A family sets a network that has the members of `CausalTransformer` down to `condition`.
    """

    def fit(self, dataset: TrajectoryDataset, trainer: Trainer) -> dict[str, Any]:
        """Maximise the likelihood of training trajectories."""
        self.network.decoder.measure(dataset)
        stage = self.training_stage(
            dataset, unlabelled(dataset, trainer.seed), "transformer", trainer, fresh=True
        )
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
            nats = network(visits, *person, noise, step if fresh else None)  # (batch,)
            return nats.sum() * (share.world / (size * mean_length))

        return loss

    def held_out(self, dataset: TrajectoryDataset, split: str = "val") -> dict[str, float]:
        """Return nats per token of held-out trajectories of unknown group, and their terms."""
        members = self._validation_members(dataset, split)
        visits = self.codec.read_dataset(dataset, members, self.max_length).to(self.device)
        terms = self._terms(
            visits,
            unknown_groups(len(members)),
            dataset.anchors[dataset.person[members]],
            seed=0,
        )
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
        return torch.randn(
            TILE, self.network.latent, generator=tile_rng(seed, number, LATENT_STREAM)
        ).to(self.device)

    def _uniform(self, seed: int, number: int, stream: int, *shape: int) -> Tensor:
        return torch.rand(TILE, *shape, generator=tile_rng(seed, number, stream)).to(self.device)

    def _sample_tile(self, number: int, groups: Ints, anchors: Floats, seed: int) -> Tensor:
        noise = self._noise(number, seed)
        condition = self.network.condition(*self._person(groups, anchors), noise)
        uniform = partial(self._uniform, seed, number)
        return self.network.decoder.sample(condition, uniform, self.max_length)

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
        training = self.network.training
        self.network.eval()  # no dropout, although phase 2 samples while it trains
        rows = self._sample_rows(groups, anchors, seed).to(self.device)
        noises = [self._noise(tile.number, seed)[tile.places] for tile in tiles(0, len(groups))]
        condition = self.network.condition(*self._person(groups, anchors), torch.cat(noises))
        soft = self.codec.soft_trajectories(self.network.decoder, rows, condition, anchors)
        self.network.train(training)
        return soft
