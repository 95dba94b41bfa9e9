"""A small city, and generators that train in seconds, for tests of everything but quality."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from mobatlas.config import CityConfig, build
from mobatlas.data.city import write_city_folder
from mobatlas.data.dataset import Trajectories, TrajectoryDataset
from mobatlas.data.prepare.pipeline import prepare
from mobatlas.generators.protocol import Generator, family_of
from mobatlas.training.loop import Execution, Trainer
from tests.written import write


def training_pool(dataset: TrajectoryDataset) -> str:
    """Training trajectories as a file of samples, beside the dataset."""
    path = dataset.path.with_suffix(".pool.parquet")
    if not path.exists():
        write(path, dataset, Trajectories.of(dataset, dataset.split("train")))
    return str(path)


BRIEF = {"steps": 120, "batch": 64, "learning_rate": 3e-3, "warmup": 10}
OPTIONS: dict[str, dict[str, Any]] = {  # a function is called with the dataset
    "latent-diffusion": {
        "length": 12,
        "autoencoder": {"encoder_layers": 1, "width": 32, "feedforward": 64, "latent": 8} | BRIEF,
        "denoiser": {"depth": 2, "width": 32, "heads": 2, "embedding": 8} | BRIEF,
        "weighted_fit": {"steps": 40, "learning_rate": 3e-3, "warmup": 5},
        "diffusion": {"steps": 4},
    },
    "autoregressive": {
        "length": 12,
        "network": {"depth": 2, "width": 32, "heads": 2, "embedding": 8},
        "training": BRIEF | {"steps": 60},
        "weighted_fit": {"steps": 40, "learning_rate": 3e-3, "warmup": 5},
    },
    "vae": {
        "length": 12,
        "network": {"depth": 2, "width": 32, "heads": 2, "embedding": 8},
        "latent": {"size": 4, "depth": 1, "warmup": 40},
        "training": BRIEF | {"steps": 60},
        "weighted_fit": {"steps": 40, "learning_rate": 3e-3, "warmup": 5},
    },
    "point-process": {
        "length": 12,
        "network": {"depth": 2, "width": 32, "heads": 2, "embedding": 8},
        "latent": {"size": 4, "depth": 1, "warmup": 40},
        "training": BRIEF | {"steps": 60},
        "weighted_fit": {"steps": 40, "learning_rate": 3e-3, "warmup": 5},
    },
    "external": {"pool": training_pool},
}


def small_city(folder: Path, users: int = 250, pois: int = 40) -> TrajectoryDataset:
    """A prepared city in that folder."""
    write_city_folder(
        folder / "city", CityConfig(users=users, pois=pois, districts=4, days=15), seed=3
    )
    prepare(folder / "city", folder / "dataset", preset="small")
    return TrajectoryDataset.open(folder / "dataset")


def fresh(name: str, dataset: TrajectoryDataset, seed: int = 0, **options: Any) -> Generator:
    """A generator that is not trained."""
    family = family_of(name)
    values = {
        key: value(dataset) if callable(value) else value
        for key, value in (OPTIONS[name] | options).items()
    }
    return family.create(build(family.config, values, name), dataset, seed)


def fitted(name: str, dataset: TrajectoryDataset, seed: int = 0, **options: Any) -> Generator:
    """A generator after phase 1."""
    model = fresh(name, dataset, seed, **options)
    model.fit(dataset, Trainer(None, Execution(quiet=True), seed=seed))
    return model


def with_other_labels(dataset: TrajectoryDataset, copy: Path, change: str) -> Path:
    """Copy a dataset with its labels "shuffled" among people or "deleted"."""
    shutil.copytree(dataset.path, copy)
    labels = pq.read_table(copy / "labels.parquet")
    (copy / "labels.parquet").unlink()
    if change == "shuffled":
        order = np.random.default_rng(0).permutation(labels.num_rows)
        pq.write_table(
            labels.take(order).set_column(0, "user_id", labels["user_id"]), copy / "labels.parquet"
        )
    return copy
