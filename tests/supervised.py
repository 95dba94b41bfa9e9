"""A city, a model of phase 1, regions, and models of every strategy, for tests of phase 2."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from mobatlas import TrajectoryDataset, build_regions, generate
from mobatlas.io.manifest import MANIFEST
from mobatlas.io.output import new_folder
from mobatlas.pipeline.models import train
from mobatlas.regions.build import RegionsOptions
from mobatlas.sampling.chunks import SampleRequest
from mobatlas.training.loop import Execution
from tests.outcomes import run
from tests.tiny import OPTIONS, small_city

FAMILY = "latent-diffusion"
GROUP = "30-40, F"
BRIEF: dict[str, Any] = OPTIONS[FAMILY] | {
    "autoencoder": OPTIONS[FAMILY]["autoencoder"] | {"steps": 60, "batch": 16},
    "denoiser": OPTIONS[FAMILY]["denoiser"] | {"steps": 30, "batch": 16},
    "weighted_fit": {"steps": 6, "learning_rate": 3e-3, "warmup": 2},
    "diffusion": {"steps": 2},
}
SMALL = ("--set", "calibration.pool=64", "--set", "calibration.candidates=2")
TUNING = {
    "steps": 4,
    "batch": 16,
    "warmup": 0,
    "rollout_steps": 2,
    "validate_every": 2,
    "validation_samples": 16,
}
HOW: dict[str, tuple[object, ...]] = {
    "auto": SMALL,
    "tilt": SMALL,
    "resample": SMALL,
    "finetune": (
        *SMALL,
        *(word for key, value in TUNING.items() for word in ("--set", f"finetune.{key}={value}")),
    ),
}


@dataclass(frozen=True)
class World:
    """A city with a model of phase 1; its groups as regions, and its four districts."""

    root: Path
    dataset: TrajectoryDataset

    @property
    def model(self) -> Path:
        return self.root / "model"

    @property
    def groups(self) -> Path:
        return self.root / "groups"

    @property
    def districts(self) -> Path:
        return self.root / "districts"

    def supervised(self, strategy: str) -> Path:
        """The model of a strategy, trained at the first call."""
        out = self.root / strategy
        if not out.exists():
            done = run(
                "supervise",
                self.model,
                self.groups,
                "--strategy",
                strategy,
                *HOW[strategy],
                "--out",
                out,
            )
            assert done.code == 0, done.err
        return out

    def samples(self, strategy: str) -> Path:
        """Calibrated samples of that model."""
        out = self.root / f"{strategy}.parquet"
        if not out.exists():
            made = generate(
                self.supervised(strategy), out, 20, SampleRequest(group=GROUP, calibrate=True)
            )
            assert made.acceptance_rate is not None, "of finetune too, which keeps no calibration"
        return out


def made_world(root: Path) -> World:
    """A small city with a model of phase 1."""
    dataset = small_city(root, users=160, pois=20)
    quiet = Execution(quiet=True)
    train(
        dataset.path,
        root / "model",
        generator="latent-diffusion",
        values=BRIEF,
        execution=quiet,
    )
    build_regions(
        dataset.path,
        root / "groups",
        RegionsOptions(partition="demogroups", features=("category",)),
    )
    build_regions(
        dataset.path,
        root / "districts",
        RegionsOptions(by="home_district", features=("category", "transitions")),
    )
    return World(root, dataset)


def remade(
    source: Path, out: Path, name: str, column: str, change: Callable[[pd.DataFrame], Any]
) -> Path:
    """A REGIONS folder with one changed column and a valid manifest."""
    manifest = json.loads((source / MANIFEST).read_text())
    with new_folder(out, manifest["kind"]) as folder:
        shutil.copytree(
            source, folder.path, dirs_exist_ok=True, ignore=shutil.ignore_patterns(MANIFEST)
        )
        folder.details |= manifest["details"]
        table = pq.read_table(source / name)
        values = pa.array(np.asarray(change(table.to_pandas()), dtype=np.float64))
        pq.write_table(
            table.set_column(table.schema.get_field_index(column), column, values),
            folder.path / name,
        )
    return out
