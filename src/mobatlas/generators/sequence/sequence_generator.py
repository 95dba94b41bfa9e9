"""What is common to generators that write token after token; a family of them is a network and its configuration."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from mobatlas.data.dataset import TrajectoryDataset
from mobatlas.data.trajectories import SoftTrajectories, Trajectories
from mobatlas.data.vocabulary import PAD, Vocabulary
from mobatlas.errors import MobatlasError
from mobatlas.generators.protocol import UNKNOWN, Draw, Family, Floats, Ints, unlabelled
from mobatlas.generators.sequence.codec import Script, Tokens
from mobatlas.generators.sequence.conditioning import begin_as, told
from mobatlas.generators.sequence.config import WriterConfig
from mobatlas.generators.sequence.decode import LATENT
from mobatlas.generators.tiling import TILE, spread, stream, tiles
from mobatlas.groups import Groups
from mobatlas.training.devices import autocast
from mobatlas.training.loop import Share, Stage, Trainer
from mobatlas.training.weights import load_weights, save_weights

VALIDATED = 2_048  # trajectories


class Network(Protocol):
    """What the module of such a family answers; levels are those of attributes, None if it knows no groups."""

    @property
    def decoder(self) -> Any:
        """What the script of the family writes with; its `measure(dataset)` is called before it is trained."""
        ...

    @property
    def latent(self) -> int:
        """How many normal random numbers a trajectory begins from, its noise."""
        ...

    def forward(
        self,
        tokens: Tensor,
        anchors: Tensor,
        levels: Tensor | None,
        noise: Tensor,
        step: int | None = None,
    ) -> Tensor:
        """What training minimises (batch,); `step` is None once phase 1 is over."""
        ...

    def terms(
        self, tokens: Tensor, anchors: Tensor, levels: Tensor | None, noise: Tensor
    ) -> dict[str, Tensor]:
        """Parts (batch,) whose sum is minus the log-likelihood, or expected to be no less."""
        ...

    def condition(self, anchors: Tensor, levels: Tensor | None, noise: Tensor) -> Tensor:
        """What the decoder writes from, (batch, width)."""
        ...


Make = Callable[
    [Any, int, Groups | None], nn.Module
]  # (config, size of the vocabulary, groups) -> a `Network`
TOKENS = Tokens()


class Writer:
    """Trajectories token after token; `Generator` says what each method promises."""

    def __init__(
        self,
        make: Make,
        config: WriterConfig,
        vocabulary: Vocabulary,
        groups: Groups | None = None,
        seed: int = 0,
        script: Script = TOKENS,
    ) -> None:
        self.config, self.vocabulary, self.groups, self._make = config, vocabulary, groups, make
        self.script = script
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.network: Any = make(config, len(vocabulary), groups).eval()

    @property
    def max_length(self) -> int:
        return self.config.length

    @property
    def tile(self) -> int:
        return TILE

    @property
    def has_times(self) -> bool:
        return self.script.has_times

    @property
    def device(self) -> torch.device:
        return next(self.network.parameters()).device

    def fit(self, dataset: TrajectoryDataset, trainer: Trainer) -> dict[str, Any]:
        """Maximise the likelihood of training trajectories."""
        self.network.decoder.measure(dataset)
        draw = unlabelled(dataset, trainer.seed)
        found = trainer.run(self._stage(dataset, draw, "transformer", trainer, fresh=True))
        longer = int((dataset.lengths[dataset.split("train")] > self.max_length).sum())
        return {"transformer": found, "truncated": longer}

    def with_groups(
        self, groups: Groups, seed: int, fresh: bool = False, *, alike: bool = False
    ) -> Writer:
        """A copy that can be told groups; without one it samples what this one does, unless it begins `fresh`."""
        if self.groups is not None:
            raise MobatlasError(
                "this model is conditioned on groups already; give the model of phase 1"
            )
        other = Writer(self._make, self.config, self.vocabulary, groups, seed, self.script)
        begin_as(other.network, self.network, fresh=fresh, alike=alike)
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
        """Go on with (x, z, d) as drawn: of what is drawn by weights, the weighted likelihood."""
        if self.groups is None:
            raise MobatlasError("this model knows no groups; give it some with `with_groups` first")
        return self._stage(dataset, draw, name, trainer, fresh=fresh)

    def _stage(
        self, dataset: TrajectoryDataset, draw: Draw, name: str, trainer: Trainer, *, fresh: bool
    ) -> Stage:
        config, weighted_fit = self.config.training, self.config.weighted_fit
        return Stage(
            name=name,
            network=self.network,
            steps=config.steps if fresh else weighted_fit.steps,
            loss=self._loss(dataset, draw, fresh),
            learning_rate=config.learning_rate if fresh else weighted_fit.learning_rate,
            optimizer="adamw",
            weight_decay=config.weight_decay,
            warmup=config.warmup if fresh else weighted_fit.warmup,
            decay=config.decay,
            ema=config.ema,
            validate=(lambda _: self.held_out(dataset)) if self.groups is None else None,
            examples_per_step=config.batch,
        )

    def _loss(
        self, dataset: TrajectoryDataset, draw: Draw, fresh: bool
    ) -> Callable[[nn.Module, int, Share], Tensor]:
        """Nats a token, of as many tokens as trajectories have on average: a trajectory counts the same in every batch."""
        size, length = self.config.training.batch, self.max_length
        places = float(np.minimum(dataset.lengths[dataset.split("train")] + 1, length).mean())
        hidden = 0.0 if self.groups is None else self.config.weighted_fit.group_dropout

        def loss(network: nn.Module, step: int, share: Share) -> Tensor:
            # every process draws for the whole batch, then takes its rows
            examples, rows = draw(size, step), share.rows(size)
            groups = np.where(torch.rand(size).numpy() < hidden, UNKNOWN, examples.groups)
            noise = torch.randn(size, self.network.latent)[rows].to(self.device)
            visits = self.script.gathered(dataset, examples.indices[rows], length).to(self.device)
            anchors = dataset.anchors[dataset.person[examples.indices[rows]]]
            person = told(self.groups, groups[rows], anchors, self.device)
            found: Tensor = network(visits, *person, noise, step if fresh else None)
            return found.sum() * (share.world / (size * places))

        return loss

    def held_out(self, dataset: TrajectoryDataset, split: str = "val") -> dict[str, float]:
        """Nats a token of held-out trajectories, groups unknown: minus the log-likelihood, and the terms it is made of."""
        members = dataset.split(split) if len(dataset.split(split)) else dataset.split("train")
        members = members[:VALIDATED]
        visits = self.script.gathered(dataset, members, self.max_length).to(self.device)
        terms = self._terms(
            visits, _unknown(len(members)), dataset.anchors[dataset.person[members]], seed=0
        )
        places = (self.script.tokens(visits) != PAD).sum()
        found = {name: float(values.sum() / places) for name, values in terms.items()}
        return {"nats": sum(found.values())} | (found if len(found) > 1 else {})

    def log_likelihood(
        self, trajectories: Trajectories, groups: Ints | None = None, seed: int = 0
    ) -> Floats:
        """Log-probabilities (trajectories,) of being written, given anchors and groups; longer ones are cut off.

        Exact where tokens are all that is drawn, so of the autoregressive family; else a lower bound, on average over seeds.
        """
        visits = self.script.read(trajectories, self.max_length).to(self.device)
        groups = _unknown(len(visits)) if groups is None else groups
        terms = self._terms(visits, groups, trajectories.anchors, seed)
        return -sum(terms.values(), np.zeros(len(visits)))

    @torch.no_grad()
    def _terms(self, visits: Tensor, groups: Ints, anchors: Floats, seed: int) -> dict[str, Floats]:
        """Those of the network, for visits (n, any, ...) with their ends: (n,) each."""
        found: dict[str, list[Floats]] = {}
        for number, rows, places in tiles(0, len(visits)):
            person = told(self.groups, groups[rows], anchors[rows], self.device)
            for name, nats in self.network.terms(
                visits[rows], *person, self._noise(number, seed)[places]
            ).items():
                found.setdefault(name, []).append(nats.double().cpu().numpy())
        return {name: np.concatenate(parts) for name, parts in found.items()}

    def _noise(self, number: int, seed: int) -> Tensor:
        """What the trajectories of a tile begin from."""
        return torch.randn(TILE, self.network.latent, generator=stream(seed, number, LATENT)).to(
            self.device
        )

    def sample(
        self,
        n: int,
        groups: Ints | None = None,
        anchors: Floats | None = None,
        seed: int = 0,
        *,
        first: int = 0,
        lengths: Ints | None = None,
    ) -> Trajectories:
        """Trajectories number `first` to `first + n`, tile by tile."""
        groups = _unknown(n) if groups is None else groups
        anchors = np.full((n, 4), np.nan) if anchors is None else anchors
        return self.script.trajectories(
            self._written(groups, anchors, seed, first, lengths), anchors
        )

    @torch.no_grad()
    def _written(
        self, groups: Ints, anchors: Floats, seed: int, first: int = 0, lengths: Ints | None = None
    ) -> Tensor:
        """Visits (n, ...) as the script has them, PAD after the end."""
        made = torch.full((len(groups), *self.script.shape(self.max_length)), PAD)
        for number, rows, places in tiles(first, len(groups)):
            ends = (
                None
                if lengths is None
                else torch.from_numpy(spread(lengths[rows], places)).to(self.device)
            )
            person = told(
                self.groups,
                spread(groups[rows], places),
                spread(anchors[rows], places),
                self.device,
            )
            with autocast(self.device):
                condition = self.network.condition(*person, self._noise(number, seed))
                chance = partial(self._chance, seed, number)
                made[rows] = self.script.write(
                    self.network.decoder, condition, chance, self.max_length, ends
                )[places].cpu()
        return made

    def _chance(self, seed: int, number: int, purpose: int, *shape: int) -> Tensor:
        return torch.rand(TILE, *shape, generator=stream(seed, number, purpose)).to(self.device)

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
        """Write as `sample` does, then ask for the distribution behind each token, given those that were written before it.

        What a token changes in later ones the gradient does not see: from 256 samples of a city of 200 places it had a cosine
        of 0.98 with the exact one, as had the score function averaged over what could have been drawn, which sees it, with
        more noise. Straight-through tokens gave the loss of two batches gradients 0.89 alike, these 0.995; the plain score
        function came to 0.84, and on a smaller city relaxed tokens (Gumbel-softmax) to 0.94, in four times the time.
        """
        with self._without_dropout():
            written = self._written(groups, anchors, seed).to(self.device)
            noise = torch.cat(
                [self._noise(number, seed)[places] for number, _, places in tiles(0, len(groups))]
            )
            condition = self.network.condition(
                *told(self.groups, groups, anchors, self.device), noise
            )
            return self.script.soft(self.network.decoder, written, condition, anchors)

    @contextmanager
    def _without_dropout(self) -> Iterator[None]:
        """Phase 2 asks for samples while it trains."""
        training = self.network.training
        self.network.eval()
        try:
            yield
        finally:
            self.network.train(training)

    def to(self, device: str) -> None:
        self.network.to(device)

    def save(self, folder: Path) -> None:
        save_weights(folder, {"network": self.network})


def _unknown(n: int) -> Ints:
    return np.full(n, UNKNOWN, dtype=np.int64)


def writer_family(
    name: str,
    config: type[WriterConfig],
    presets: Mapping[str, Mapping[str, Any]],
    make: Make,
    script: Callable[[Any], Script] = lambda config: TOKENS,
) -> Family:
    """The family of a network, and of a script if it writes more than tokens."""

    def create(config: WriterConfig, dataset: TrajectoryDataset, seed: int) -> Writer:
        return Writer(make, config, dataset.vocabulary, seed=seed, script=script(config))

    def load(
        folder: Path, config: WriterConfig, vocabulary: Vocabulary, groups: Groups | None
    ) -> Writer:
        model = Writer(make, config, vocabulary, groups, script=script(config))
        load_weights(folder, {"network": model.network})
        return model

    return Family(name, config, presets, create, load)
