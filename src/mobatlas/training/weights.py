"""Weights on disk: safetensors, whole or not at all, and loaded strictly."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor, nn

from mobatlas.errors import MobatlasError
from mobatlas.training.checkpoints import named_tensors, write_whole

WEIGHTS = "weights.safetensors"


def save_weights(folder: Path, networks: Mapping[str, nn.Module]) -> None:
    """Write the weights and buffers of named networks."""
    tensors = {
        name: tensor.detach().cpu().contiguous() for name, tensor in _named(networks).items()
    }
    write_whole(folder / WEIGHTS, save(tensors))


def load_weights(folder: Path, networks: Mapping[str, nn.Module]) -> None:
    """Read them back; names, shapes and types must all agree before any is touched."""
    path = folder / WEIGHTS
    try:
        found = load_file(path)
    except (OSError, SafetensorError, ValueError):
        raise MobatlasError(
            f"{path}: is not a readable safetensors file (cut short, or not written by mobatlas); train the model again"
        ) from None
    wanted = _named(networks)
    for name in [*wanted, *found]:
        there, here = found.get(name), wanted.get(name)
        if there is None or here is None or there.shape != here.shape or there.dtype != here.dtype:
            raise MobatlasError(
                f"{path}: its weights are not those of config.json ({name} differs); train the model again"
            )
        if not bool(there.isfinite().all()):
            raise MobatlasError(f"{path}: not all of {name} is a number; train the model again")
    with torch.no_grad():
        for name, tensor in wanted.items():
            tensor.copy_(found[name])


def _named(networks: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    return {
        f"{prefix}.{name}": tensor
        for prefix, network in networks.items()
        for name, tensor in named_tensors(network).items()
    }
