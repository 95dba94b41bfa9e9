"""A dataset, models with and without groups, and regions, for tests of generation."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pandas as pd

from mobatlas import TrajectoryDataset, build_regions
from mobatlas.data.types import ANCHORS
from mobatlas.generators.protocol import Generator
from mobatlas.generators.store import save_model
from mobatlas.io.manifest import MANIFEST
from mobatlas.io.output import new_folder
from mobatlas.regions.build import RegionsOptions
from tests.tiny import fitted, small_city

FAMILY = "latent-diffusion"
GROUP = "30-40, F"
TINY: dict[str, Any] = {
    "length": 16,
    "autoencoder": {"encoder_layers": 1, "width": 32, "feedforward": 64, "latent": 8, "batch": 64}
    | {"steps": 100, "learning_rate": 5e-3, "warmup": 5},
    "denoiser": {
        "depth": 2,
        "width": 32,
        "heads": 2,
        "embedding": 8,
        "steps": 40,
        "batch": 64,
        "warmup": 5,
    },
}


@dataclass(frozen=True)
class World:
    """A dataset and what was made of it."""

    dataset: TrajectoryDataset
    model: Path  # of phase 1
    grouped: Path  # can be told groups
    regions: Path  # hot16: one group is most of each region


def keep(out: Path, generator: Generator, dataset: TrajectoryDataset, family: str = FAMILY) -> Path:
    with new_folder(out, "model") as folder:
        save_model(folder.path, generator, family, dataset)
        folder.details["dataset"] = {
            "path": str(dataset.path),
            "hash": dataset.manifest.content_hash,
        }
    return out


def remade(source: Path, out: Path, change: Callable[[Path], Any]) -> Path:
    """A model folder whose files were changed before its manifest was written."""
    manifest = json.loads((source / MANIFEST).read_text())
    with new_folder(out, manifest["kind"], config=manifest["config"]) as folder:
        shutil.copytree(
            source, folder.path, dirs_exist_ok=True, ignore=shutil.ignore_patterns(MANIFEST)
        )
        folder.details |= manifest["details"]
        change(folder.path)
    return out


@functools.cache
def small_world(base: Path) -> World:
    """Made once below the folder of a session."""
    root = Path(mkdtemp(prefix="world-", dir=base))
    dataset = small_city(root, users=400)
    generator = fitted(FAMILY, dataset, **TINY)
    assert dataset.groups is not None
    grouped = keep(root / "grouped", generator.with_groups(dataset.groups, 1), dataset)
    build_regions(dataset.path, root / "regions", RegionsOptions(partition="hot16"))
    return World(dataset, keep(root / "model", generator, dataset), grouped, root / "regions")


def write_homes(world: World, path: Path) -> Path:
    """Anchors of five people, the last without work."""
    table = pd.DataFrame(world.dataset.anchors[:5], columns=list(ANCHORS))
    table.loc[4, ["work_lat", "work_lon"]] = None
    table.to_csv(path, index=False)
    return path


def firsts(path: Path) -> pd.DataFrame:
    """One row a trajectory."""
    return pd.read_parquet(path).groupby("trajectory", sort=False).head(1)


def rows(frame: pd.DataFrame) -> set[tuple[float, ...]]:
    return set(map(tuple, frame[list(ANCHORS)].to_numpy().tolist()))


def cut(path: Path, share: float = 0.5) -> None:
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])
