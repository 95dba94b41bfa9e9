"""The cosine noise schedule, and the solvers of `diffusers` with x0 prediction."""

from collections.abc import Callable
from typing import Literal

import torch
from diffusers import DDIMScheduler, DDPMScheduler, DPMSolverMultistepScheduler
from pydantic import Field
from torch import Tensor

from mobatlas.config import Section

Denoiser = Callable[[Tensor, Tensor], Tensor]  # (x_t, t) -> x0
COSINE = "squaredcos_cap_v2"
# diffusers' advice: below this half log-SNR the cosine schedule is numerically pure noise
LAMBDA_MIN = -5.1


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
