"""The latent diffusion generator: autoencoder, denoiser and sampler (appendix, "Architecture").

It has a cosine noise schedule, and the solvers of `diffusers` with x0 prediction.
"""

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt
import torch
from diffusers import DDIMScheduler, DDPMScheduler, DPMSolverMultistepScheduler
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from mobatlas.config import Section, build, merge
from mobatlas.data.dataset import SoftTrajectories, TrajectoryDataset
from mobatlas.data.types import PAD, Floats, Ints
from mobatlas.errors import log
from mobatlas.generators.latent_diffusion.autoencoder import (
    Autoencoder,
    AutoencoderConfig,
    encode_split,
    hide_spans,
    set_statistics,
)
from mobatlas.generators.latent_diffusion.dit import DenoiserConfig, DiT, Estimate
from mobatlas.generators.layers import measure_layers
from mobatlas.generators.network_generator import (
    NetworkGenerator,
    WeightedFitConfig,
    network_family,
    tile_rng,
)
from mobatlas.generators.protocol import TILE, Draw, Tile, tiles, unlabelled
from mobatlas.generators.transformer import gather_tokens, with_end
from mobatlas.groups import Groups
from mobatlas.training.loop import Share, Stage, Trainer

Denoiser = Callable[[Tensor, Tensor], Tensor]  # (x_t, t) -> x0
COSINE = "squaredcos_cap_v2"
# diffusers' advice: below this half log-SNR the cosine schedule is numerically pure noise
LAMBDA_MIN = -5.1
ENOUGH = 0.95  # of held-out tokens reconstructed
LATENTS = "latents.npy"
LATENT_STREAM, TOKEN_STREAM, EARLY_STREAM = range(3)  # of random numbers


class DiffusionConfig(Section):
    """The noise schedule, the solver and the decoding."""

    train_steps: int = Field(1_000, ge=2)  # of the cosine schedule
    # "likeliest" makes frequent places too frequent, because a latent between two tokens always
    # becomes the more frequent one.
    decoding: Literal["draw", "likeliest"] = "draw"
    solver: Literal["dpm++", "ddim"] = "dpm++"
    steps: int = Field(10, ge=1)  # of the solver


def noise_schedule(config: DiffusionConfig) -> DDPMScheduler:
    """Return the forward process."""
    return DDPMScheduler(
        config.train_steps, beta_schedule=COSINE, prediction_type="sample", clip_sample=False
    )


def solver(config: DiffusionConfig) -> DDIMScheduler | DPMSolverMultistepScheduler:
    """Return the reverse process: DDIM with eta 0 (the paper's protocol) or DPM-Solver++.

    DPM-Solver++ is of second order and needs fewer steps.
    """
    if config.solver == "ddim":
        scheduler = DDIMScheduler(
            config.train_steps,
            beta_schedule=COSINE,
            prediction_type="sample",
            clip_sample=False,
            timestep_spacing="trailing",
        )
    else:
        scheduler = DPMSolverMultistepScheduler(
            config.train_steps,
            beta_schedule=COSINE,
            prediction_type="sample",
            algorithm_type="dpmsolver++",
            solver_order=2,
            lambda_min_clipped=LAMBDA_MIN,
            timestep_spacing="trailing",
            final_sigmas_type="zero",
        )
    scheduler.set_timesteps(config.steps)
    return scheduler


def rollout(
    denoise: Denoiser,
    noise: Tensor,
    config: DiffusionConfig,
    differentiable: int = 0,
    stop: int | None = None,
) -> Tensor:
    """Return clean latents from noise, or their estimate after `stop` steps.

    The gradient flows through the last `differentiable` steps only.
    """
    scheduler = solver(config)
    x = noise
    x0 = noise
    timesteps = scheduler.timesteps[:stop]
    for number, t in enumerate(timesteps):
        with torch.set_grad_enabled(len(timesteps) - number <= differentiable):
            x0 = denoise(x, t.expand(len(x)).to(x.device))
            x = scheduler.step(x0, t, x).prev_sample
    return x0  # not x, which DDIM leaves noisy if the steps do not divide the schedule


class DenoiserFitConfig(WeightedFitConfig):
    """Training of the denoiser on examples with groups, which continues from phase 1."""

    steps: int = Field(1_500, ge=1)


class LatentDiffusionConfig(Section):
    """Options of latent diffusion."""

    length: int = Field(24, ge=2, le=4_096)  # tokens; longer trajectories are truncated
    autoencoder: AutoencoderConfig = AutoencoderConfig()
    denoiser: DenoiserConfig = DenoiserConfig()
    weighted_fit: DenoiserFitConfig = DenoiserFitConfig()
    diffusion: DiffusionConfig = DiffusionConfig()

    @model_validator(mode="after")
    def _fewer_steps_than_noise_levels(self) -> Self:
        if self.diffusion.steps > self.diffusion.train_steps:
            raise ValueError("diffusion.steps is larger than diffusion.train_steps")
        return self


PRESETS: Mapping[str, Mapping[str, Any]] = {
    "small": {},
    "paper": {
        "length": 64,
        "autoencoder": {
            "encoder_layers": 4,
            "decoder_layers": 2,
            "width": 256,
            "feedforward": 1_024,
            "heads": 4,
            "latent": 256,
            "activation": "gelu",
            "dropout": 0.1,
            "mask_share": 0.3,
            "noise": 0.0,
            "steps": 30_000,
            "batch": 512,
            "learning_rate": 1e-4,
            "warmup": 1_000,
            "decay": "linear",
        },
        "denoiser": {
            "depth": 12,
            "width": 512,
            "heads": 4,
            "activation": "gelu",
            "self_conditioning": False,
            "timestep_emphasis": 1.0,
            "cross_entropy": 0.0,
            "embedding": 256,
            "ema": 0.9999,
            "steps": 100_000,
            "batch": 512,
            "learning_rate": 1e-4,
            "warmup": 1_000,
            "decay": "none",
        },
        "weighted_fit": {"steps": 30_000, "learning_rate": 1e-5, "warmup": 1_000},
        "diffusion": {"solver": "ddim", "steps": 50, "decoding": "likeliest"},
    },
}


class LatentDiffusion(NetworkGenerator):
    """Denoises latents and decodes them to trajectories. `Generator` documents its methods."""

    config: LatentDiffusionConfig
    network: DiT

    def _build(self, size: int) -> None:
        config = self.config
        self.autoencoder = Autoencoder(config.autoencoder, size, config.length)
        self.network = DiT(
            config.denoiser, config.autoencoder.latent, config.length, size, self.groups
        )
        self._schedule = noise_schedule(config.diffusion)

    def with_groups(
        self, groups: Groups, seed: int, fresh: bool = False, *, equal_groups: bool = False
    ) -> Self:
        other = super().with_groups(groups, seed, fresh, equal_groups=equal_groups)
        other.autoencoder = copy.deepcopy(self.autoencoder)
        return other

    def with_solver(self, solver: str, steps: int) -> Self:
        """Return the same model with another solver."""
        changed = merge(self.config.model_dump(), {"diffusion": {"solver": solver, "steps": steps}})
        other = copy.copy(self)
        other.config = build(LatentDiffusionConfig, changed, "sampler")
        return other

    def fit(self, dataset: TrajectoryDataset, trainer: Trainer) -> dict[str, Any]:
        """Train the autoencoder, freeze it, encode training trajectories, train the denoiser."""
        autoencoded = trainer.run(self._autoencoder_stage(dataset, trainer.seed))
        self.autoencoder.requires_grad_(False)
        rate = autoencoded["reconstruction"]
        if rate < ENOUGH:
            log.warning(
                "WARNING: the autoencoder reconstructs %.1f %% of held-out tokens, fewer than "
                "%.0f %%. The denoiser cannot correct that. Train the autoencoder longer "
                "(autoencoder.steps) or widen its latents (autoencoder.latent).",
                100 * rate,
                100 * ENOUGH,
            )
        prototypes = set_statistics(self.autoencoder, dataset)
        if self.network.words is not None:
            self.network.prototypes.copy_(prototypes)
        measure_layers(self.network, dataset)
        draw = unlabelled(dataset, trainer.seed)
        denoised = trainer.run(self.training_stage(dataset, draw, "denoiser", trainer, fresh=True))
        return {
            "autoencoder": autoencoded,
            "denoiser": denoised,
            "truncated": self._truncated(dataset),
        }

    def _autoencoder_stage(self, dataset: TrajectoryDataset, seed: int) -> Stage:
        config = self.config.autoencoder

        def loss(network: nn.Module, step: int, share: Share) -> Tensor:
            indices = dataset.order_by_length("train", config.batch, seed, step)
            tokens = gather_tokens(dataset, indices, self.max_length)
            masked = hide_spans(tokens, config.mask_share, config.mask_span)
            # every process draws for the whole batch, then takes its rows
            noise = torch.randn(len(tokens), self.max_length, config.latent)
            rows = share.rows(len(tokens))
            inputs = (part[rows].to(self.device) for part in (masked, tokens, noise))
            return network(*inputs) * share.world / (tokens != PAD).sum()

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
            validate=lambda _: {"reconstruction": self.reconstruction(dataset)},
            examples_per_step=config.batch,
        )

    @torch.no_grad()
    def encode(self, tokens: npt.NDArray[np.int32]) -> Tensor:
        """Return raw latents (batch, length, latent) of tokens (batch, any)."""
        ended = with_end(torch.from_numpy(tokens).long().to(self.device), self.max_length)
        return self.autoencoder.all_places(self.autoencoder.encode(ended))

    def reconstruction(self, dataset: TrajectoryDataset, split: str = "val") -> float:
        """Return the share of held-out tokens that the autoencoder reconstructs."""
        members = self._validation_members(dataset, split)
        same = 0
        count = 0
        for start in range(0, len(members), TILE):
            batch = dataset.gather(members[start : start + TILE], self.max_length)
            tokens = torch.from_numpy(batch).long().to(self.device)  # (batch, any)
            decoded = self.autoencoder.decode(self.encode(batch))[:, : tokens.shape[1]]
            same += int(((decoded == tokens) & (tokens != PAD)).sum())
            count += int((tokens != PAD).sum())
        return same / count

    def training_stage(
        self, dataset: TrajectoryDataset, draw: Draw, name: str, trainer: Trainer, *, fresh: bool
    ) -> Stage:
        """Return the stage that trains the denoiser on the examples of `draw`."""
        config = self.config.denoiser
        phase = config if fresh else self.config.weighted_fit
        return Stage(
            name=name,
            network=self.network,
            steps=phase.steps,
            loss=self._denoiser_loss(dataset, draw, trainer),
            learning_rate=phase.learning_rate,
            warmup=phase.warmup,
            decay=config.decay,
            ema=config.ema,
            examples_per_step=config.batch,
        )

    def _denoiser_loss(
        self, dataset: TrajectoryDataset, draw: Draw, trainer: Trainer
    ) -> Callable[[nn.Module, int, Share], Tensor]:
        """Return the squared error of clean latents, mixed with the cross-entropy of tokens."""
        latents = encode_split(self.autoencoder, dataset, "train", trainer.path(LATENTS))
        config = self.config.denoiser
        shape = (config.batch, self.max_length, self.config.autoencoder.latent)

        def loss(network: nn.Module, step: int, share: Share) -> Tensor:
            # every process draws for the whole batch, then takes its rows
            noise = torch.randn(shape)
            t = self._draw_timesteps()
            indices, person = self._draw_examples(dataset, draw, config.batch, step, share)
            rows = share.rows(config.batch)
            clean = latents.batch(indices).to(self.device)
            t = t[rows].to(self.device)
            noisy = self._schedule.add_noise(clean, noise[rows].to(self.device), t)
            first = None
            if config.self_conditioning and torch.rand(()) < 0.5:  # the same in every process
                with torch.no_grad():
                    first = network(noisy, t, *person).clean
            estimate: Estimate = network(noisy, t, *person, first)
            error = (estimate.clean - clean).square().mean()
            if estimate.words is not None:
                tokens = gather_tokens(dataset, indices, self.max_length)
                tokens = F.pad(tokens, (0, self.max_length - tokens.shape[1]), value=PAD)
                tokens = tokens.flatten().to(self.device)  # (batch * length,)
                cross_entropy = F.cross_entropy(estimate.words.flatten(0, 1), tokens)
                error = (1 - config.cross_entropy) * error + config.cross_entropy * cross_entropy
            return error * (share.world * len(indices) / config.batch)

        return loss

    def _draw_timesteps(self) -> Tensor:
        """Draw timesteps (batch,), one in each of as many equal parts of the distribution."""
        size = self.config.denoiser.batch
        levels = self.config.diffusion.train_steps
        parts = (torch.arange(size) + torch.rand(size)) / size
        t = parts ** (1 / self.config.denoiser.timestep_emphasis) * levels
        return t.long().clamp(max=levels - 1)

    def _sample_tile(self, number: int, groups: Ints, anchors: Floats, seed: int) -> Tensor:
        latents = self.roll_out(self._noise(number, seed), groups, anchors).clean
        return self._decode(self.autoencoder.restore(latents), number, seed)

    def _decode(self, latents: Tensor, number: int, seed: int) -> Tensor:
        """Return the tokens (TILE, length) of a tile."""
        rng = tile_rng(seed, number, TOKEN_STREAM)
        likeliest = self.config.diffusion.decoding == "likeliest"
        return self.autoencoder.decode(latents, noise=None if likeliest else rng)

    def _noise(self, number: int, seed: int) -> Tensor:
        shape = (TILE, self.max_length, self.config.autoencoder.latent)
        return torch.randn(shape, generator=tile_rng(seed, number, LATENT_STREAM)).to(self.device)

    def roll_out(
        self,
        noise: Tensor,
        groups: Ints,
        anchors: Floats,
        *,
        differentiable: int = 0,
        stop: int | None = None,
    ) -> Estimate:
        """Denoise noise (batch, length, latent); the token logits are those of the last step.

        With `stop` it ends after that many steps.
        """
        person = self._person(groups, anchors)
        last: Estimate | None = None

        def denoise(x: Tensor, t: Tensor) -> Tensor:
            nonlocal last
            last = self.network(x, t, *person, None if last is None else last.clean)
            assert last is not None
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
        """Sample, then return the decoder's distribution behind each token.

        At the end of a rollout a small change of a latent changes no token, so the gradient is
        small. Earlier the denoiser is unsure between tokens. With `early` its token logits at a
        random step are returned, if it has them; their mean is that of samples.
        """
        if steps is not None:
            return self.with_solver(self.config.diffusion.solver, steps).soft_sample(
                groups, anchors, seed, differentiable=differentiable, early=early
            )
        stop = None
        if early and self.network.words is not None:
            rng = np.random.default_rng([seed, EARLY_STREAM])
            stop = 1 + int(rng.integers(self.config.diffusion.steps))
        parts = []
        for tile in tiles(0, len(groups)):
            noise = self._noise(tile.number, seed)
            estimate = self.roll_out(
                noise,
                tile.spread(groups),
                tile.spread(anchors),
                differentiable=differentiable,
                stop=stop,
            )
            if stop is not None and estimate.words is not None:
                is_token = (torch.arange(len(self.vocabulary)) != PAD).to(noise)
                parts.append(estimate.words[tile.places].softmax(-1) * is_token)
            else:
                parts.append(self._soft_tokens(estimate.clean, tile, seed))
        return SoftTrajectories(torch.cat(parts), anchors)

    def _soft_tokens(self, latents: Tensor, tile: Tile, seed: int) -> Tensor:
        """Return the distributions (batch, length, vocabulary) behind the tokens of a tile."""
        restored = self.autoencoder.restore(latents)
        tokens = self._decode(restored.detach(), tile.number, seed)[tile.places]  # (batch, length)
        ended = with_end(tokens, self.max_length)
        probabilities = self.autoencoder.logits(restored[tile.places], ended).softmax(-1)
        return probabilities * (ended != PAD)[..., None]

    def _networks(self) -> dict[str, nn.Module]:
        return {"autoencoder": self.autoencoder, "denoiser": self.network}

    def load(self, folder: Path) -> None:
        super().load(folder)
        self.autoencoder.requires_grad_(False)


FAMILY = network_family("latent-diffusion", LatentDiffusion, LatentDiffusionConfig, PRESETS)
