"""The latent diffusion generator: autoencoder, denoiser and sampler as one (the paper's appendix, "Model Architecture")."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mobatlas.config import build, merge
from mobatlas.data.dataset import TrajectoryDataset
from mobatlas.data.trajectories import SoftTrajectories, Trajectories
from mobatlas.data.vocabulary import PAD, Vocabulary
from mobatlas.errors import MobatlasError
from mobatlas.generators.latent_diffusion.autoencoder import Autoencoder, hide_spans, with_end
from mobatlas.generators.latent_diffusion.config import PRESETS, LatentDiffusionConfig
from mobatlas.generators.latent_diffusion.diffusion import noise_schedule, rollout
from mobatlas.generators.latent_diffusion.dit import DiT, Estimate
from mobatlas.generators.latent_diffusion.latents import Latents, encode_split, set_statistics
from mobatlas.generators.protocol import UNKNOWN, Draw, Family, Floats, Ints, unlabelled
from mobatlas.generators.tiling import TILE, spread, stream, tiles
from mobatlas.groups import Groups
from mobatlas.training.devices import autocast
from mobatlas.training.loop import Share, Stage, Trainer
from mobatlas.training.weights import load_weights, save_weights

log = logging.getLogger("mobatlas")
ENOUGH = 0.95  # of held-out tokens reconstructed
VALIDATED = 2_048  # trajectories
LATENTS = "latents.npy"
LATENT, TOKENS, EARLY = 0, 1, 2  # streams of random numbers
# what the denoiser knows of the dataset without having been trained
MEASURED = ("centre", "extent", "prototypes", "distance_bias.where", "distance_bias.there")


class LatentDiffusion:
    """Trajectories from noise; `Generator` says what each method promises."""

    def __init__(
        self,
        config: LatentDiffusionConfig,
        vocabulary: Vocabulary,
        groups: Groups | None = None,
        seed: int = 0,
    ) -> None:
        self.config, self.vocabulary, self.groups = config, vocabulary, groups
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.autoencoder = Autoencoder(
                config.autoencoder, len(vocabulary), config.length
            ).eval()
            network = DiT(
                config.denoiser, config.autoencoder.latent, config.length, len(vocabulary), groups
            )
        self.network = network.eval()
        self._schedule = noise_schedule(config.diffusion)

    @property
    def max_length(self) -> int:
        return self.config.length

    @property
    def tile(self) -> int:
        return TILE

    @property
    def device(self) -> torch.device:
        return next(self.network.parameters()).device

    def with_solver(self, solver: str, steps: int) -> LatentDiffusion:
        """The same model, sampled by another solver."""
        changed = merge(self.config.model_dump(), {"diffusion": {"solver": solver, "steps": steps}})
        other = copy.copy(self)
        other.config = build(LatentDiffusionConfig, changed, "sampler")
        return other

    def fit(self, dataset: TrajectoryDataset, trainer: Trainer) -> dict[str, Any]:
        """Train the autoencoder, freeze it, encode the training trajectories once, train the denoiser on them."""
        found = trainer.run(self._autoencoding(dataset, trainer.seed))
        self.autoencoder.requires_grad_(False)
        rate = found["reconstruction"]
        if rate < ENOUGH:
            log.warning(
                "WARNING: the autoencoder reconstructs %.1f %% of held-out tokens, fewer than %.0f %%: what it cannot write no "
                "denoiser can make; train it longer (autoencoder.steps) or widen its latents (autoencoder.latent)",
                100 * rate,
                100 * ENOUGH,
            )
        prototypes = set_statistics(self.autoencoder, dataset)
        if self.network.words is not None:
            self.network.prototypes.copy_(prototypes)
        self.network.measure(dataset)
        draw = unlabelled(dataset, trainer.seed)
        denoised = trainer.run(self.denoising(dataset, draw, "denoiser", trainer, fresh=True))
        longer = int((dataset.lengths[dataset.split("train")] > self.max_length).sum())
        return {"autoencoder": found, "denoiser": denoised, "truncated": longer}

    def with_groups(
        self, groups: Groups, seed: int, fresh: bool = False, *, alike: bool = False
    ) -> LatentDiffusion:
        """A copy that can be told groups; without one it samples what this one does, unless the denoiser begins `fresh`."""
        if self.groups is not None:
            raise MobatlasError(
                "this model is conditioned on groups already; give the model of phase 1"
            )
        other = LatentDiffusion(self.config, self.vocabulary, groups, seed)
        other.autoencoder = copy.deepcopy(self.autoencoder)
        mine, theirs = self.network.state_dict(), other.network.state_dict()
        kept = [name for name in mine if not fresh or name in MEASURED]
        other.network.load_state_dict(theirs | {name: mine[name] for name in kept})
        if alike and other.network.group is not None:
            other.network.group.begin_alike()
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
        """Go on training the denoiser with (x, z, d) as drawn."""
        if self.groups is None:
            raise MobatlasError("this model knows no groups; give it some with `with_groups` first")
        return self.denoising(dataset, draw, name, trainer, fresh=fresh)

    def _autoencoding(self, dataset: TrajectoryDataset, seed: int) -> Stage:
        config, length = self.config.autoencoder, self.max_length

        def loss(network: nn.Module, step: int, share: Share) -> Tensor:
            chosen = dataset.order_by_length("train", config.batch, seed, step)
            tokens = with_end(
                torch.from_numpy(dataset.gather(chosen, length).tokens).long(), length
            )
            seen = hide_spans(tokens, config.mask_share, config.mask_span)
            noise = torch.randn(
                len(tokens), length, config.latent
            )  # of the whole batch, like all that is drawn
            rows, whole = share.rows(len(tokens)), (tokens != PAD).sum()
            total: Tensor = network(*(part[rows].to(self.device) for part in (seen, tokens, noise)))
            return total * share.world / whole

        def validate(network: nn.Module) -> dict[str, float]:
            return {"reconstruction": self.reconstruction(dataset)}

        return Stage(
            name="autoencoder",
            network=self.autoencoder,
            steps=config.steps,
            loss=loss,
            learning_rate=config.learning_rate,
            optimizer="adamw",
            weight_decay=config.weight_decay,
            warmup=config.warmup,
            decay=config.decay,
            validate=validate,
            examples_per_step=config.batch,
        )

    @torch.no_grad()
    def encode(self, tokens: npt.NDArray[np.int32]) -> Tensor:
        """Raw latents at all places, (batch, length, latent), of tokens (batch, any)."""
        ended = with_end(torch.from_numpy(tokens).long().to(self.device), self.max_length)
        return self.autoencoder.all_places(self.autoencoder.encode(ended))

    def reconstruction(self, dataset: TrajectoryDataset, split: str = "val") -> float:
        """The share of held-out tokens that come back, place for place."""
        members = dataset.split(split) if len(dataset.split(split)) else dataset.split("train")
        same = count = 0
        for start in range(0, min(len(members), VALIDATED), TILE):
            batch = dataset.gather(
                members[start : start + TILE][: VALIDATED - start], self.max_length
            )
            tokens = torch.from_numpy(batch.tokens).long().to(self.device)  # (batch, any)
            back = self.autoencoder.decode(self.encode(batch.tokens))[:, : tokens.shape[1]]
            same += int(((back == tokens) & (tokens != PAD)).sum())
            count += int((tokens != PAD).sum())
        return same / count

    def denoising(
        self, dataset: TrajectoryDataset, draw: Draw, name: str, trainer: Trainer, *, fresh: bool
    ) -> Stage:
        config, weighted_fit = self.config.denoiser, self.config.weighted_fit
        latents = encode_split(self.autoencoder, dataset, "train", trainer.path(LATENTS))
        loss = self._denoising_loss(
            latents, dataset, draw, 0.0 if self.groups is None else weighted_fit.group_dropout
        )
        return Stage(
            name=name,
            network=self.network,
            steps=config.steps if fresh else weighted_fit.steps,
            loss=loss,
            learning_rate=config.learning_rate if fresh else weighted_fit.learning_rate,
            warmup=config.warmup if fresh else weighted_fit.warmup,
            decay=config.decay,
            ema=config.ema,
            examples_per_step=config.batch,
        )

    def _denoising_loss(
        self, latents: Latents, dataset: TrajectoryDataset, draw: Draw, hidden: float
    ) -> Callable[[nn.Module, int, Share], Tensor]:
        """Mean squared error of the predicted clean latents, a mean over latents, and the cross-entropy of their tokens."""
        weight = self.config.denoiser.cross_entropy
        size, levels = self.config.denoiser.batch, self.config.diffusion.train_steps
        shape = (size, self.max_length, self.config.autoencoder.latent)

        def loss(network: nn.Module, step: int, share: Share) -> Tensor:
            # every process draws for the whole batch, then takes its rows
            noise, rows = torch.randn(shape), share.rows(size)
            parts = (
                torch.arange(size) + torch.rand(size)
            ) / size  # one number in each of as many equal parts of 0 to 1
            t = (
                (parts ** (1 / self.config.denoiser.timestep_emphasis) * levels)
                .long()
                .clamp(max=levels - 1)
            )
            examples = draw(size, step)
            groups = np.where(torch.rand(size).numpy() < hidden, UNKNOWN, examples.groups)
            chosen = examples.indices[rows]
            clean = latents.batch(chosen).to(self.device)
            noisy = self._schedule.add_noise(
                clean, noise[rows].to(self.device), t[rows].to(self.device)
            )
            condition = self._condition(groups[rows], dataset.anchors[dataset.person[chosen]])
            inputs = (noisy, t[rows].to(self.device), *condition)
            estimate = None
            if (
                self.config.denoiser.self_conditioning and torch.rand(()) < 0.5
            ):  # the same in every process
                with torch.no_grad():
                    estimate = network(*inputs).clean
            found: Estimate = network(*inputs, estimate)
            error = (found.clean - clean).square().mean()
            if found.words is not None:
                tokens = self._words(dataset, chosen).flatten()
                error = (1 - weight) * error + weight * F.cross_entropy(
                    found.words.flatten(0, 1), tokens
                )
            return error * (share.world * len(chosen) / size)

        return loss

    def _words(self, dataset: TrajectoryDataset, chosen: Ints) -> Tensor:
        """Tokens at all places, (batch, length)."""
        tokens = with_end(
            torch.from_numpy(dataset.gather(chosen, self.max_length).tokens).long(), self.max_length
        )
        return F.pad(tokens, (0, self.max_length - tokens.shape[1]), value=PAD).to(self.device)

    def _condition(self, groups: Ints, anchors: Floats) -> tuple[Tensor, Tensor | None]:
        """What the denoiser is told: anchors in degrees, and the level of each attribute from 1, 0 where it is unknown."""
        places = torch.from_numpy(np.asarray(anchors, dtype=np.float32)).to(self.device)
        if self.groups is None:
            if (groups != UNKNOWN).any():
                raise MobatlasError(
                    "this model is not conditioned on groups; supervise it first (mobatlas supervise)"
                )
            return places, None
        codes = np.concatenate(
            (self.groups.level_codes + 1, np.zeros((1, len(self.groups.attributes)), np.int64))
        )
        return places, torch.from_numpy(codes[groups]).to(
            self.device
        )  # UNKNOWN, -1, is the last row

    @torch.no_grad()
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
        groups = np.full(n, UNKNOWN, dtype=np.int64) if groups is None else groups
        anchors = np.full((n, 4), np.nan) if anchors is None else anchors
        made = np.full((n, self.max_length), PAD)
        for number, rows, places in tiles(first, n):
            ends = None if lengths is None else spread(lengths[rows], places)
            told, where = spread(groups[rows], places), spread(anchors[rows], places)
            made[rows] = self._sample_tile(number, told, where, seed, ends)[places].numpy()
        valid = made != PAD
        offsets = np.concatenate(([0], np.cumsum(valid.sum(1))))
        return Trajectories(made[valid].astype(np.int32), offsets, anchors)

    def _sample_tile(
        self, number: int, groups: Ints, anchors: Floats, seed: int, lengths: Ints | None
    ) -> Tensor:
        ends = None if lengths is None else torch.from_numpy(lengths).to(self.device)
        with autocast(self.device):
            latents = self.roll_out(self._noise(number, seed), groups, anchors, ends).clean
            return self._write(self.autoencoder.restore(latents), number, seed, ends).cpu()

    def _write(
        self, latents: Tensor, number: int, seed: int, lengths: Tensor | None = None
    ) -> Tensor:
        """Tokens of a tile."""
        noise = stream(seed, number, TOKENS) if self.config.diffusion.decoding == "draw" else None
        return self.autoencoder.decode(latents, lengths, noise=noise)

    def _noise(self, number: int, seed: int) -> Tensor:
        shape = (TILE, self.max_length, self.config.autoencoder.latent)
        return torch.randn(shape, generator=stream(seed, number, LATENT)).to(self.device)

    def roll_out(
        self,
        noise: Tensor,
        groups: Ints,
        anchors: Floats,
        lengths: Tensor | None = None,
        *,
        differentiable: int = 0,
        stop: int | None = None,
    ) -> Estimate:
        """Clean latents from noise, and what the last step thought of their tokens; `stop` ends after so many steps."""
        condition = self._condition(groups, anchors)
        places = torch.arange(self.max_length, device=self.device)
        # what lies past the end is known: padding
        past = None if lengths is None else (places > lengths[:, None])[..., None]
        padding, last = self.autoencoder.padding, None

        def denoise(x: Tensor, t: Tensor) -> Tensor:
            nonlocal last
            found: Estimate = self.network(x, t, *condition, None if last is None else last.clean)
            last = (
                found
                if past is None
                else found._replace(clean=torch.where(past, padding, found.clean))
            )
            return last.clean

        latents = rollout(denoise, noise, self.config.diffusion, differentiable, stop)
        return Estimate(latents, None if last is None else last.words)

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
        """Roll out, write tokens as `sample` does, then ask the decoder for the distribution behind each of them.

        At the end of a rollout each latent is one token, and moving it a little changes nothing. On the way the denoiser
        hesitates between tokens, and its hesitation averages to what it will write; it says so if it has a head for tokens.
        """
        if steps is not None:
            shorter = self.with_solver(self.config.diffusion.solver, steps)
            return shorter.soft_sample(
                groups, anchors, seed, differentiable=differentiable, early=early
            )
        stop = None
        if early and self.network.words is not None:
            stop = 1 + int(
                np.random.default_rng([seed, EARLY]).integers(self.config.diffusion.steps)
            )
        parts = []
        for number, rows, places in tiles(0, len(groups)):
            told, where = spread(groups[rows], places), spread(anchors[rows], places)
            noise = self._noise(number, seed)
            found = self.roll_out(noise, told, where, differentiable=differentiable, stop=stop)
            if stop is not None and found.words is not None:
                parts.append(
                    found.words[places].softmax(-1)
                    * (torch.arange(len(self.vocabulary)) != PAD).to(noise)
                )
                continue
            restored = self.autoencoder.restore(found.clean)
            tokens = self._write(restored.detach(), number, seed)[places]  # (batch, length)
            written = with_end(tokens, self.max_length)
            probabilities = self.autoencoder.logits(restored[places], written).softmax(
                -1
            )  # (batch, length, vocabulary)
            parts.append(probabilities * (written != PAD)[..., None])
        return SoftTrajectories(torch.cat(parts), anchors)

    def to(self, device: str) -> None:
        self.autoencoder.to(device)
        self.network.to(device)

    def save(self, folder: Path) -> None:
        save_weights(folder, self._networks())

    def _networks(self) -> dict[str, nn.Module]:
        return {"autoencoder": self.autoencoder, "denoiser": self.network}


def _create(
    config: LatentDiffusionConfig, dataset: TrajectoryDataset, seed: int
) -> LatentDiffusion:
    return LatentDiffusion(config, dataset.vocabulary, seed=seed)


def _load(
    folder: Path, config: LatentDiffusionConfig, vocabulary: Vocabulary, groups: Groups | None
) -> LatentDiffusion:
    model = LatentDiffusion(config, vocabulary, groups)
    load_weights(folder, model._networks())
    model.autoencoder.requires_grad_(False)
    return model


FAMILY = Family("latent-diffusion", LatentDiffusionConfig, PRESETS, _create, _load)
