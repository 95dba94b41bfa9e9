"""The method from Python: `Atlas(...).fit(dataset).supervise(regions).sample(group=...)`; thin, as the commands are."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from mobatlas.data.dataset import TrajectoryDataset
from mobatlas.data.schema import ANCHORS
from mobatlas.errors import MobatlasError
from mobatlas.generators.store import KIND, Model, load_model
from mobatlas.groups import Groups
from mobatlas.io.manifest import MANIFEST
from mobatlas.io.output import new_folder
from mobatlas.pipeline.train import Hardware, supervise, train
from mobatlas.sampling.generate import generate
from mobatlas.supervision.resample import FILES


@dataclass(frozen=True)
class Atlas:
    """How to train: a family of generators, its preset, changes to it (`{"denoiser": {"steps": 500}}`), and the seed."""

    generator: str = "latent-diffusion"
    preset: str | None = None
    values: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    hardware: Hardware = field(default_factory=Hardware)
    quiet: bool = False

    def fit(
        self,
        dataset: TrajectoryDataset | Path | str,
        out: Path | str | None = None,
        *,
        resume: bool = False,
        overwrite: bool = False,
    ) -> AtlasModel:
        """Phase 1. Without `out` the model lives in a temporary folder, as long as it is in use; `save` keeps it."""
        source = dataset.path if isinstance(dataset, TrajectoryDataset) else Path(dataset)
        folder = _Place(out)
        manner: dict[str, Any] = {"seed": self.seed, "hardware": self.hardware, "quiet": self.quiet}
        report = train(
            source,
            folder.path,
            generator=self.generator,
            preset=self.preset,
            values=self.values,
            resume=resume,
            overwrite=overwrite,
            **manner,
        )
        return AtlasModel(folder.path, source, report, manner, folder)

    @staticmethod
    def open(path: Path | str, dataset: Path | str | None = None) -> AtlasModel:
        """A model on disk, of phase 1 or supervised; `dataset` says where its dataset is if that has moved."""
        loaded = load_model(path, Path(dataset) if dataset else None)
        return AtlasModel(Path(path), loaded.dataset, loaded.manifest.details.get("report", {}), {})


@dataclass(frozen=True)
class AtlasModel:
    """A trained model: a MODEL folder, and what its training reported. It does not change; `supervise` makes another."""

    path: Path
    dataset: Path
    report: Mapping[str, Any]
    manner: Mapping[str, Any] = field(default_factory=dict, repr=False)  # seed, hardware, quiet
    _place: Any = field(default=None, repr=False, compare=False)  # keeps a temporary folder alive

    @property
    def groups(self) -> Groups | None:
        """The groups that samples can be asked of; None after phase 1."""
        return self._load().groups

    def supervise(
        self, regions: Path | str | None = None, out: Path | str | None = None, **options: Any
    ) -> AtlasModel:
        """Phase 2, with a REGIONS folder; options are those of `mobatlas.supervise` (strategy, membership, values, ...)."""
        folder = _Place(out)
        manner = dict(self.manner) | {
            name: options.pop(name) for name in ("seed", "hardware", "quiet") if name in options
        }
        report = supervise(
            self.path, folder.path, regions, dataset=self.dataset, **manner, **options
        )
        return AtlasModel(folder.path, self.dataset, report, manner, folder)

    def sample(
        self,
        n: int | None = None,
        group: str | None = None,
        *,
        region: str | None = None,
        anchors: np.ndarray[Any, Any] | Path | str | None = None,
        calibrate: bool | None = None,
        seed: int = 0,
        **options: Any,
    ) -> pa.Table:
        """n trajectories, one row a visit, as an Arrow table (`to_pandas` where pandas is installed).

        `anchors` are a table on disk or rows of home lat, lon, work lat, lon. Samples of groups are calibrated if the model
        keeps a calibration, unless `calibrate` says otherwise. Options are those of `mobatlas.generate`.
        """
        kept = (self.path / FILES[0]).exists() and (group is not None or region is not None)
        with tempfile.TemporaryDirectory(prefix="mobatlas-") as scratch:
            if isinstance(anchors, np.ndarray):
                anchors = _table(anchors, Path(scratch) / "anchors.parquet")
            manner: dict[str, Any] = {
                "calibrate": kept if calibrate is None else calibrate,
                "seed": seed,
            } | options
            where: dict[str, Any] = {
                "group": group,
                "region": region,
                "anchors": anchors,
                "dataset": self.dataset,
            }
            out = Path(scratch) / "samples.parquet"
            generate(self.path, out, n, **where, **manner)
            return pq.read_table(out, memory_map=False)

    def save(self, path: Path | str, *, overwrite: bool = False) -> AtlasModel:
        """Copy the folder; the model there."""
        manifest = self._load().manifest
        how: dict[str, Any] = {
            "seed": manifest.seed,
            "config": manifest.config,
            "overwrite": overwrite,
        }
        with new_folder(Path(path), KIND, **how) as folder:
            shutil.copytree(
                self.path, folder.path, dirs_exist_ok=True, ignore=shutil.ignore_patterns(MANIFEST)
            )
            folder.details |= manifest.details
            folder.unlisted |= set(manifest.unlisted)
        return AtlasModel(Path(path), self.dataset, self.report, self.manner)

    def _load(self) -> Model:
        return load_model(self.path, self.dataset)


class _Place:
    """Where a model is written: a folder that was asked for, or one that goes when nobody uses it any more."""

    def __init__(self, out: Path | str | None) -> None:
        if out is not None:
            self.path = Path(out)
            return
        scratch = tempfile.mkdtemp(prefix="mobatlas-")
        self.path = Path(scratch) / "model"
        weakref.finalize(self, shutil.rmtree, scratch, ignore_errors=True)


def _table(anchors: np.ndarray[Any, Any], path: Path) -> Path:
    if anchors.ndim != 2 or anchors.shape[1] != len(ANCHORS):
        raise MobatlasError(
            f"anchors: have the shape {anchors.shape}; give rows of {', '.join(ANCHORS)}"
        )
    pq.write_table(
        pa.table({name: anchors[:, k].astype(np.float64) for k, name in enumerate(ANCHORS)}), path
    )
    return path
