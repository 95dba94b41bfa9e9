"""How far the gradients of finetuning agree between batches."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from mobatlas.generators.protocol import Generator
from mobatlas.supervision.finetune import FinetuneConfig, Target

COMPARED_REGIONS = 4


def gradient_agreement(
    target: Target, model: Generator, config: FinetuneConfig, seed: int
) -> float:
    """Mean cosine between gradients of one region from two batches: 0 is noise, 1 is exact."""
    trained = [parameter for parameter in model.network.parameters() if parameter.requires_grad]
    cosines = []
    for region in target.usable[:COMPARED_REGIONS].tolist():
        pair = []
        for batch in range(2):
            rng = np.random.default_rng([seed, region, batch, 2])
            gradients = torch.autograd.grad(
                target.soft_loss(model, region, rng, config), trained, allow_unused=True
            )
            pair.append(torch.cat([each.flatten() for each in gradients if each is not None]))
        cosines.append(float(nn.functional.cosine_similarity(pair[0], pair[1], dim=0)))
    return round(float(np.mean(cosines)), 3)
