"""What a supervised MODEL folder keeps of its regions: enough to sample a region and to calibrate, nobody's id, no label."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from mobatlas.config import build
from mobatlas.data.arrays import Floats
from mobatlas.data.schema import ANCHORS
from mobatlas.errors import MobatlasError
from mobatlas.generators.store import COMPOSITION, REGION_ANCHORS, SUPERVISION, Model
from mobatlas.io.manifest import read_parquet
from mobatlas.progress import SILENT, Tracker
from mobatlas.supervision.calibration import fit_calibration
from mobatlas.supervision.evidence import Evidence, lives_by
from mobatlas.supervision.moments import Moments, Phi
from mobatlas.supervision.resample import CalibratedSampler, load_calibration
from mobatlas.supervision.strategies import CalibrationConfig
from mobatlas.training.checkpoints import write_whole

MEANS, CURVE = "group_means.parquet", "curve.jsonl"
MOST_COVARIANCES = 2**25  # numbers: a quarter of a gigabyte
COLUMNS = ("group", "feature", "mean", "population")  # of MEANS, that calibration reads


def keep_evidence(folder: Path, evidence: Evidence, tilt: Floats | None = None) -> None:
    """Write composition, anchors and recovered means; beside the means the tilt (groups, features), where there is one.

    A mean has its posterior covariance with the same mean of every group, in their order; where these are more than
    `MOST_COVARIANCES` its standard deviation alone is kept, and recovery tells the rest again.
    """
    composition, regions = evidence.regions.composition, evidence.regions.composition.regions
    groups, moments, told = evidence.groups.names, evidence.moments, evidence.means.shape[1]
    features = moments.phi.features
    sd = np.full(moments.means.shape, np.nan)  # of what the regions do not tell there is none
    sd[:, :told] = evidence.recovery.sd
    shares = {
        "region": np.repeat(regions, len(groups)).tolist(),
        "group": list(groups) * len(regions),
        "share": composition.shares.ravel(),
        "believed": evidence.believed_shares.ravel(),
    }
    pq.write_table(pa.table(shares), folder / COMPOSITION)
    pq.write_table(_anchors(evidence), folder / REGION_ANCHORS)
    means = {
        "group": np.repeat(groups, len(features)).tolist(),
        "feature": list(features) * len(groups),
        "mean": moments.means.ravel(),
        "sd": pa.array(sd.ravel(), from_pandas=True),
        "covariance": _covariances(evidence, len(features)),
        "population": np.tile(moments.baseline, len(groups)),
        "tilt": pa.nulls(moments.means.size, pa.float64()) if tilt is None else tilt.ravel(),
    }
    pq.write_table(pa.table(means), folder / MEANS)


def keep_curve(folder: Path, curve: Iterable[Mapping[str, Any]]) -> None:
    """Write the learning curve, a line for each validation."""
    write_whole(
        folder / CURVE, "".join(json.dumps(row, allow_nan=False) + "\n" for row in curve).encode()
    )


def load_moments(model: Model) -> Moments | None:
    """What `keep_evidence` wrote, as far as calibration needs it; None where nothing was."""
    path, groups, vocabulary = model.path / MEANS, model.groups, model.generator.vocabulary
    if not path.exists() or groups is None:
        return None
    try:
        table = read_parquet(path, columns=list(COLUMNS))
        features = table["feature"].unique().to_pylist()
        shape = len(groups), len(features)
        means, population = (
            table[name].to_numpy().reshape(shape) for name in ("mean", "population")
        )
        if table["group"].to_pylist() != [name for name in groups.names for _ in features]:
            raise ValueError("groups of another model")
    except (OSError, ValueError, KeyError, pa.ArrowException):
        raise MobatlasError(
            f"{path}: does not hold the means of the model's groups; supervise it again"
        ) from None
    phi = Phi.of(features, vocabulary, model.manifest.details.get(SUPERVISION, {}).get("mask", ()))
    return Moments(path, groups, phi, means, population[0], model.population(), load_lives(model))


def load_lives(model: Model) -> Floats | None:
    """How likely it is that who lives at a row of the model's population is of each group (rows, groups).

    None where it was not told to ask where people live.
    """
    if not model.manifest.details.get(SUPERVISION, {}).get("membership"):
        return None
    path = model.path / COMPOSITION
    try:
        table, homes = read_parquet(path), read_parquet(model.path / REGION_ANCHORS)
        regions = table["region"].unique().to_pylist()
        shares = table["believed"].to_numpy().reshape(len(regions), -1)
        place = {name: number for number, name in enumerate(regions)}
        region = [place[name] if name is not None else -1 for name in homes["region"].to_pylist()]
        order = np.lexsort(
            [homes[name].to_numpy() for name in ANCHORS]
        )  # that of `Model.population`
        return lives_by(shares, np.array(region, dtype=np.int64)[order])
    except (OSError, ValueError, KeyError, pa.ArrowException):
        raise MobatlasError(
            f"{path}: does not hold the regions of the model's anchors; supervise it again"
        ) from None


def load_sampler(model: Model, tracker: Tracker = SILENT) -> CalibratedSampler:
    """The model calibrated by what it keeps; where that is recovered means alone, a calibration is fitted here, by its seed."""
    calibration, moments = load_calibration(model.path), load_moments(model)
    if moments is None:
        raise MobatlasError(
            f"--calibrate: {model.path} keeps nothing of regions; supervise a model of phase 1 with them first "
            "(mobatlas supervise MODEL REGIONS --out MODEL2)"
        )
    if calibration is None:
        asked = build(
            CalibrationConfig,
            model.manifest.config.get("supervise", {}).get("calibration", {}),
            str(model.path),
        )
        seed = model.manifest.seed or 0
        calibration = fit_calibration(
            model.generator, moments, seed=seed, tracker=tracker, **asked.arguments()
        )
    return CalibratedSampler.of(model.generator, calibration, moments.anchors, moments.lives)


def _covariances(evidence: Evidence, features: int) -> pa.FixedSizeListArray:
    """A list for each mean, group by group."""
    groups, known = len(evidence.groups), evidence.recovery.covariance  # (told, groups, groups)
    if known.size > MOST_COVARIANCES:
        return pa.nulls(groups * features, pa.list_(pa.float64(), groups))
    every = np.full((groups, features, groups), np.nan)
    every[:, : len(known)] = known.transpose(1, 0, 2)
    return pa.FixedSizeListArray.from_arrays(pa.array(every.ravel(), from_pandas=True), groups)


def _anchors(evidence: Evidence) -> pa.Table:
    """Homes and workplaces by region, in an order that says nothing of who is who; null: of no region that is known."""
    names, anchors = (
        np.array([*evidence.regions.composition.regions, None], dtype=object),
        evidence.anchors,
    )
    region = np.full(len(anchors), -1) if evidence.region is None else evidence.region
    order = np.lexsort((*anchors.T, region))
    columns = {name: anchors[order, k] for k, name in enumerate(ANCHORS)}
    return pa.table({"region": pa.array(names[region[order]], pa.string()), **columns})
