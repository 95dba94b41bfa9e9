"""The method in Python: `Atlas().fit("dataset").supervise("regions").sample(500)`."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from mobatlas.config import DEFAULT_GENERATOR
from mobatlas.data.anchors import SYNTHETIC
from mobatlas.data.dataset import TrajectoryDataset
from mobatlas.data.types import ANCHORS
from mobatlas.errors import MobatlasError
from mobatlas.generators.store import KIND, load_model
from mobatlas.groups import Groups
from mobatlas.io.manifest import MANIFEST
from mobatlas.io.output import new_folder
from mobatlas.pipeline.models import DEFAULT_OPTIONS, SuperviseOptions, supervise, train
from mobatlas.sampling.chunks import SampleRequest
from mobatlas.sampling.generate import generate
from mobatlas.supervision.store import is_calibrated
from mobatlas.training.loop import DEFAULT_EXECUTION, Execution


@dataclass(frozen=True)
class Atlas:
    """The options of a model; `fit` trains it.

    Parameters
    ----------
    generator
        The generator family: "autoregressive", "latent-diffusion", "vae", "point-process",
        "external", or one added with `register_generator`.
    preset
        "small" or "paper".
    values
        Options of the generator that change the preset, such as `{"training": {"steps": 500}}`.
    seed
        Random seed of both phases.
    execution
        Hardware, checkpoints and progress.

    Examples
    --------
    >>> from mobatlas import Atlas
    >>> model = Atlas(preset="small").fit("dataset")  # doctest: +SKIP
    >>> by_group = model.supervise("regions")  # doctest: +SKIP
    >>> table = by_group.sample(500, group="30-40, F")  # doctest: +SKIP
    """

    generator: str = DEFAULT_GENERATOR
    preset: str | None = None
    values: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    execution: Execution = DEFAULT_EXECUTION

    def fit(
        self, dataset: TrajectoryDataset | Path | str, out: Path | str | None = None
    ) -> AtlasModel:
        """Phase 1: train a generator on a dataset, without demographics.

        Parameters
        ----------
        dataset
            A dataset, or its folder.
        out
            The MODEL folder to write. If None, a temporary folder, which is deleted with the
            returned model; `save` copies it.

        Returns
        -------
        AtlasModel
            The trained model.

        Examples
        --------
        >>> model = Atlas(preset="small").fit("dataset", "model")  # doctest: +SKIP
        """
        source = dataset.path if isinstance(dataset, TrajectoryDataset) else Path(dataset)
        path, scratch = _model_path(out)
        report = train(
            source,
            path,
            generator=self.generator,
            preset=self.preset,
            values=self.values,
            seed=self.seed,
            execution=self.execution,
        )
        return AtlasModel(path, source, report, self.seed, self.execution, scratch)

    @staticmethod
    def open(path: Path | str, dataset: Path | str | None = None) -> AtlasModel:
        """Open a MODEL folder of either phase.

        Parameters
        ----------
        path
            The MODEL folder.
        dataset
            The folder of its dataset, if that has moved.

        Returns
        -------
        AtlasModel
            The model.

        Examples
        --------
        >>> model = Atlas.open("model")  # doctest: +SKIP
        """
        loaded = load_model(path, Path(dataset) if dataset else None)
        return AtlasModel(Path(path), loaded.dataset, loaded.manifest.details.get("report", {}))


@dataclass(frozen=True)
class AtlasModel:
    """A trained model: a MODEL folder and its training report.

    `Atlas.fit`, `Atlas.open` and `supervise` create it.

    Attributes
    ----------
    path
        The MODEL folder.
    dataset
        The folder of its dataset.
    report
        The training report.
    seed
        Random seed of training.
    execution
        Hardware, checkpoints and progress of further training.

    Examples
    --------
    >>> from mobatlas import Atlas
    >>> Atlas.open("model").report["loss"]  # doctest: +SKIP
    """

    path: Path
    dataset: Path
    report: Mapping[str, Any]
    seed: int = 0
    execution: Execution = DEFAULT_EXECUTION
    _folder: Any = field(default=None, repr=False, compare=False)  # keeps a temporary folder alive

    @property
    def groups(self) -> Groups | None:
        """The groups that the model can sample; None after phase 1."""
        return load_model(self.path, self.dataset).groups

    def supervise(
        self,
        regions: Path | str | None = None,
        options: SuperviseOptions = DEFAULT_OPTIONS,
        out: Path | str | None = None,
        *,
        seed: int | None = None,
    ) -> AtlasModel:
        """Phase 2: condition the model on groups so that it matches regional aggregates.

        Parameters
        ----------
        regions
            A REGIONS folder; the strategy "strong" needs none.
        options
            The strategy and its options.
        out
            The MODEL folder to write; a temporary one if None.
        seed
            Random seed; the seed of phase 1 if None.

        Returns
        -------
        AtlasModel
            A new model; this one does not change.

        Examples
        --------
        >>> by_group = model.supervise("regions")  # doctest: +SKIP
        """
        path, scratch = _model_path(out)
        used_seed = self.seed if seed is None else seed
        report = supervise(
            self.path,
            path,
            regions,
            options,
            dataset=self.dataset,
            seed=used_seed,
            execution=self.execution,
        )
        return AtlasModel(path, self.dataset, report, used_seed, self.execution, scratch)

    def sample(
        self,
        n: int | None = None,
        group: str | Sequence[str] | None = None,
        *,
        region: str | None = None,
        anchors: np.ndarray[Any, Any] | Path | str = SYNTHETIC,
        calibrate: bool | None = None,
        posterior: bool = False,
        seed: int = 0,
    ) -> pa.Table:
        """Sample trajectories into an Arrow table with one row per visit.

        Parameters
        ----------
        n
            Number of trajectories of each group; with `anchors`, one per row if None.
        group
            A group such as "30-40, F", several groups, or "all"; each gets n trajectories.
        region
            Sample groups and homes in the proportions of this region.
        anchors
            "synthetic", "observed" for homes and workplaces of training people, a table on disk, or
            rows of home lat, home lon, work lat, work lon.
        calibrate
            Select samples so that groups have the estimated means. If None, samples of groups are
            calibrated whenever the model has a calibration.
        posterior
            Spread the samples of each group over posterior draws of its means; see `SampleRequest`.
        seed
            Random seed.

        Returns
        -------
        pyarrow.Table
            The visits as `mobatlas generate` writes them; its schema metadata says which features
            the evidence informs.

        Examples
        --------
        >>> table = by_group.sample(500, group=["<30, F", "30-40, F"])  # doctest: +SKIP
        """
        if calibrate is None:
            calibrate = (group or region) is not None and is_calibrated(self.path)
        with tempfile.TemporaryDirectory(prefix="mobatlas-") as scratch:
            if isinstance(anchors, np.ndarray):
                anchors = _write_anchors(anchors, Path(scratch) / "anchors.parquet")
            out = Path(scratch) / "samples.parquet"
            people = SampleRequest(group=group, region=region, anchors=anchors)
            request = replace(people, calibrate=calibrate, posterior=posterior, seed=seed)
            generate(self.path, out, n, request, dataset=self.dataset)
            return pq.read_table(out, memory_map=False)

    def save(self, path: Path | str, *, overwrite: bool = False) -> AtlasModel:
        """Copy the MODEL folder.

        Parameters
        ----------
        path
            The folder to write.
        overwrite
            Replace a MODEL folder that mobatlas wrote.

        Returns
        -------
        AtlasModel
            The model in its new folder.

        Examples
        --------
        >>> by_group.save("model-by-group")  # doctest: +SKIP
        """
        manifest = load_model(self.path, self.dataset).manifest
        with new_folder(
            Path(path), KIND, seed=manifest.seed, config=manifest.config, overwrite=overwrite
        ) as folder:
            shutil.copytree(
                self.path,
                folder.path,
                dirs_exist_ok=True,
                ignore=shutil.ignore_patterns(MANIFEST),
            )
            folder.details |= manifest.details
            folder.unlisted |= set(manifest.unlisted)
        return AtlasModel(Path(path), self.dataset, self.report, self.seed, self.execution)


def _model_path(out: Path | str | None) -> tuple[Path, Any]:
    """The requested folder of a model, or a temporary one that is deleted with the second value."""
    if out is not None:
        return Path(out), None
    scratch = tempfile.TemporaryDirectory(prefix="mobatlas-", ignore_cleanup_errors=True)
    return Path(scratch.name) / "model", scratch


def _write_anchors(anchors: np.ndarray[Any, Any], path: Path) -> Path:
    if anchors.ndim != 2 or anchors.shape[1] != len(ANCHORS):
        raise MobatlasError(
            f"anchors: the array has the shape {anchors.shape}; give rows of {', '.join(ANCHORS)}"
        )
    pq.write_table(pa.table(dict(zip(ANCHORS, anchors.astype(np.float64).T, strict=True))), path)
    return path
