"""Latents of a dataset, encoded once by the frozen autoencoder and read from a memory-mapped file after that."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mobatlas.data.dataset import TrajectoryDataset
from mobatlas.data.vocabulary import PAD
from mobatlas.generators.latent_diffusion.autoencoder import Autoencoder, with_end

TILE = 512  # trajectories encoded at a time
STATISTICS_FROM = 20_000  # trajectories


@dataclass(frozen=True)
class Latents:
    """Latents of some trajectories, end to end, their end tokens included; scaled to mean 0 and variance 1."""

    values: npt.NDArray[
        np.float16
    ]  # (places, latent); half precision is far below the noise that training adds
    offsets: npt.NDArray[
        np.int64
    ]  # (trajectories of the dataset + 1,); empty for those that were not encoded
    padding: npt.NDArray[np.float32]  # (latent,)
    length: int

    def batch(self, indices: npt.NDArray[np.int64]) -> Tensor:
        """(batch, length, latent)."""
        starts = self.offsets[indices]
        taken = self.offsets[indices + 1] - starts  # (batch,)
        columns = np.arange(self.length)
        valid = columns < taken[:, None]  # (batch, length)
        out = np.tile(self.padding, (*valid.shape, 1))
        out[valid] = self.values[(starts[:, None] + columns)[valid]]
        return torch.from_numpy(out)


def set_statistics(autoencoder: Autoencoder, dataset: TrajectoryDataset) -> Tensor:
    """Take mean and standard deviation of each latent dimension from training trajectories.

    Returns the mean scaled latent of each token (vocabulary, latent); one that was not met is encoded alone.
    """
    members = dataset.split("train")
    chosen = np.sort(np.random.default_rng(0).permutation(members)[:STATISTICS_FROM])
    size, width = len(dataset.vocabulary), autoencoder.config.latent
    counts = torch.zeros(size, dtype=torch.float64)
    totals, squares = (
        torch.zeros(size, width, dtype=torch.float64),
        torch.zeros(width, dtype=torch.float64),
    )
    for start in range(0, len(chosen), TILE):
        latents, tokens = _encode(autoencoder, dataset, chosen[start : start + TILE])
        valid = tokens != PAD
        found, words = latents[valid].double().cpu(), tokens[valid].cpu()
        counts += torch.bincount(words, minlength=size)
        totals.index_add_(0, words, found)
        squares += found.square().sum(0)
    mean = totals.sum(0) / counts.sum()
    deviation = (squares / counts.sum() - mean.square()).clamp(min=0).sqrt()
    autoencoder.mean.copy_(mean)
    autoencoder.deviation.copy_(
        deviation.clamp(min=1e-3)
    )  # a dimension that never moves stays where it is
    with torch.no_grad():
        alone = autoencoder.encode(torch.arange(size, device=autoencoder.places.device)[:, None])[
            :, 0
        ].cpu()
    alone[PAD] = 0
    typical = torch.where(counts[:, None] > 0, totals / counts.clamp(min=1)[:, None], alone)
    return autoencoder.standardise(typical.to(autoencoder.mean))


def encode_split(
    autoencoder: Autoencoder, dataset: TrajectoryDataset, split: str, path: Path | None
) -> Latents:
    """Encode the trajectories of a split, into a file if a path is given; one that is there already is read."""
    members = dataset.split(split)
    taken = np.zeros(len(dataset), dtype=np.int64)
    taken[members] = np.minimum(dataset.lengths[members] + 1, autoencoder.length)
    offsets = np.concatenate(([0], np.cumsum(taken)))
    shape = (int(offsets[-1]), autoencoder.config.latent)
    padding, length = autoencoder.padding.cpu().numpy(), autoencoder.length
    if path is not None and (found := _whole(path, shape)) is not None:
        return Latents(found, offsets, padding, length)
    if path is None:
        values = np.empty(shape, np.float16)
        _fill(values, autoencoder, dataset, members, offsets)
        return Latents(values, offsets, padding, length)
    partial = path.with_name(f".{path.name}.partial")
    mapped = np.lib.format.open_memmap(partial, "w+", np.float16, shape)
    _fill(mapped, autoencoder, dataset, members, offsets)
    mapped.flush()
    partial.replace(path)
    return Latents(np.load(path, mmap_mode="r", allow_pickle=False), offsets, padding, length)


def _whole(path: Path, shape: tuple[int, int]) -> npt.NDArray[np.float16] | None:
    """The latents of a file; None if it is not there, or not what was written, and they must be encoded again."""
    try:
        found = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None
    return found if found.shape == shape and found.dtype == np.float16 else None


def _fill(
    values: npt.NDArray[np.float16],
    autoencoder: Autoencoder,
    dataset: TrajectoryDataset,
    members: npt.NDArray[np.int64],
    offsets: npt.NDArray[np.int64],
) -> None:
    for start in range(0, len(members), TILE):
        chosen = members[start : start + TILE]
        latents, tokens = _encode(autoencoder, dataset, chosen)
        # trajectory by trajectory, as the offsets have it
        scaled = autoencoder.standardise(latents)[tokens != PAD].cpu().numpy()
        values[offsets[chosen[0]] : offsets[chosen[-1] + 1]] = scaled


@torch.no_grad()
def _encode(
    autoencoder: Autoencoder, dataset: TrajectoryDataset, chosen: npt.NDArray[np.int64]
) -> tuple[Tensor, Tensor]:
    """Latents (batch, any, latent) and tokens (batch, any), end tokens included."""
    tokens = with_end(
        torch.from_numpy(dataset.gather(chosen, autoencoder.length).tokens).long(),
        autoencoder.length,
    )
    tokens = tokens.to(autoencoder.places.device)
    return autoencoder.encode(tokens), tokens
