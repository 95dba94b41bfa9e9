"""Small latent diffusion models, untrained or with perturbed weights, for tests."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from mobatlas.data.dataset import TrajectoryDataset
from mobatlas.generators.latent_diffusion.generator import LatentDiffusion
from tests.tiny import fresh

VOCABULARY = 30
LENGTH = 12
LATENT = 8


def chance(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def stirred(network: nn.Module) -> nn.Module:
    """With weights unlike those it began with, so that nothing is hidden behind a zero."""
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=chance(parameter.numel())))
    return network.requires_grad_(False)


def new_model(dataset: TrajectoryDataset, **options: Any) -> LatentDiffusion:
    """The whole of it, before any training."""
    made = fresh("latent-diffusion", dataset, **options)
    assert isinstance(made, LatentDiffusion)
    return made
