"""The evidence in a supervised MODEL folder: enough to sample a region and to calibrate.

It contains no ids and no labels.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from mobatlas.config import build
from mobatlas.data.arrays import Floats
from mobatlas.data.schema import ANCHORS
from mobatlas.errors import MobatlasError
from mobatlas.generators.store import COMPOSITION, REGION_ANCHORS, SUPERVISION, Model
from mobatlas.io.manifest import read_parquet, refuse_corrupt, write_atomic, write_json
from mobatlas.progress import SILENT, Tracker
from mobatlas.regions.posterior import Families, Posterior
from mobatlas.regions.recovery.recover import MOSTLY_PRIOR
from mobatlas.supervision.calibration import (
    CalibratedSampler,
    Calibration,
    CalibrationConfig,
    fit_calibration,
)
from mobatlas.supervision.draws import DrawnCalibration, calibrate_draws, drawn_moments
from mobatlas.supervision.evidence import (
    Evidence,
    describe_informed,
    residence_shares,
    shrunk_shares,
)
from mobatlas.supervision.moments import Moments, Phi

MEANS = "group_means.parquet"
CURVE = "curve.jsonl"
CALIBRATION_FILES = ("calibration.json", "calibration.safetensors")
MAX_COVARIANCES = 2**25  # numbers: a quarter of a gigabyte


def save_evidence(folder: Path, evidence: Evidence, tilt: Floats | None = None) -> None:
    """Write composition, anchors and estimated means, with the tilt (groups, features) if any.

    Each mean has its posterior covariance with the same mean of every group. Above
    `MAX_COVARIANCES` numbers only the standard deviation is saved; `recover` computes the rest.
    For posterior draws, there is also the posterior median and, for features that share the error
    of a parent, the covariance of the logarithm of the parent's means.
    """
    regions = evidence.regions.composition.regions
    groups = evidence.groups.names
    moments = evidence.moments
    features = moments.phi.features
    # NaN for features that regions do not have
    sd = np.full(moments.means.shape, np.nan)
    median = np.full(moments.means.shape, np.nan)
    sd[:, : evidence.means.shape[1]] = evidence.recovery.sd
    median[:, : evidence.means.shape[1]] = evidence.recovery.means
    shares = {
        "region": np.repeat(regions, len(groups)).tolist(),
        "group": list(groups) * len(regions),
        "share": evidence.regions.composition.shares.ravel(),
        "believed": shrunk_shares(evidence.regions).ravel(),
    }
    pq.write_table(pa.table(shares), folder / COMPOSITION)
    pq.write_table(_anchor_table(evidence), folder / REGION_ANCHORS)
    columns = {
        "sd": pa.array(sd.ravel(), from_pandas=True),
        "covariance": _covariances(evidence.recovery.covariance, len(features)),
        "tilt": pa.nulls(moments.means.size, pa.float64()) if tilt is None else tilt.ravel(),
        "median": pa.array(median.ravel(), from_pandas=True),
        **_family_columns(evidence, len(features)),
    }
    save_moments(folder, moments, columns)


def save_moments(folder: Path, moments: Moments, columns: Mapping[str, Any] | None = None) -> None:
    """Write the means of each group, with further columns, for calibrations."""
    groups = moments.groups.names
    features = moments.phi.features
    table = {
        "group": np.repeat(groups, len(features)).tolist(),
        "feature": list(features) * len(groups),
        "mean": moments.means.ravel(),
        "population": np.tile(moments.baseline, len(groups)),
        **(columns or {}),
    }
    pq.write_table(pa.table(table), folder / MEANS)


def _covariances(covariance: Floats, features: int) -> pa.FixedSizeListArray:
    """Covariances (aggregate features, groups, groups), one list per mean, group by group."""
    groups = covariance.shape[1]
    if covariance.size > MAX_COVARIANCES:
        return pa.nulls(groups * features, pa.list_(pa.float64(), groups))
    rows = np.full((groups, features, groups), np.nan)
    rows[:, : len(covariance)] = covariance.transpose(1, 0, 2)
    return pa.FixedSizeListArray.from_arrays(pa.array(rows.ravel(), from_pandas=True), groups)


def _family_columns(evidence: Evidence, features: int) -> dict[str, Any]:
    """The parent of each feature, and the covariance of the logarithm of the parent's means."""
    groups = len(evidence.groups)
    families = evidence.recovery.families
    names = np.full(features, None, dtype=object)
    covariance = np.full((len(evidence.recovery.features), groups, groups), np.nan)
    if families is not None and len(families.names):
        known = np.flatnonzero(families.parent >= 0)
        names[known] = np.array(families.names, dtype=object)[families.parent[known]]
        covariance[known] = families.covariance[families.parent[known]]
    return {
        "parent": pa.array(np.tile(names, groups), pa.string()),
        "parent_covariance": _covariances(covariance, features),
    }


def _anchor_table(evidence: Evidence) -> pa.Table:
    """Anchors by region, sorted so that their order does not identify people; null: no region."""
    names = np.array([*evidence.regions.composition.regions, None], dtype=object)
    anchors = evidence.anchors
    region = np.full(len(anchors), -1) if evidence.region is None else evidence.region
    order = np.lexsort((*anchors.T, region))
    columns = {name: anchors[order, k] for k, name in enumerate(ANCHORS)}
    return pa.table({"region": pa.array(names[region[order]], pa.string()), **columns})


def save_curve(folder: Path, curve: Iterable[Mapping[str, Any]]) -> None:
    """Write the learning curve, one line per validation."""
    lines = "".join(json.dumps(row, allow_nan=False) + "\n" for row in curve)
    write_atomic(folder / CURVE, lines.encode())


def save_calibration(folder: Path, calibration: Calibration) -> None:
    """Write a calibration into a folder that exists."""
    write_json(folder / CALIBRATION_FILES[0], calibration.as_dict())
    write_atomic(folder / CALIBRATION_FILES[1], save(calibration.tensors()))


def is_calibrated(folder: Path) -> bool:
    """Whether a MODEL folder has a calibration."""
    return (folder / CALIBRATION_FILES[0]).exists()


def load_calibration(folder: Path) -> Calibration | None:
    """Read what `save_calibration` wrote; None if there is no calibration."""
    path = folder / CALIBRATION_FILES[0]
    if not path.exists():
        return None
    try:
        return Calibration.of(
            json.loads(path.read_text(encoding="utf-8")), load_file(folder / CALIBRATION_FILES[1])
        )
    except (OSError, ValueError, TypeError, KeyError, SafetensorError, MobatlasError):
        raise MobatlasError(
            f"{path}: this is not a calibration, or {CALIBRATION_FILES[1]} belongs to another one; "
            "supervise the model again"
        ) from None


def load_moments(model: Model) -> Moments | None:
    """The moments that `save_evidence` wrote; None if there are none."""
    path = model.path / MEANS
    groups = model.groups
    if not path.exists() or groups is None:
        return None
    with refuse_corrupt(path):
        table = read_parquet(path, columns=["feature", "mean", "population"])
        features = table["feature"].unique().to_pylist()
        shape = (len(groups), len(features))
        means = table["mean"].to_numpy().reshape(shape)
        population = table["population"].to_numpy().reshape(shape)
    mask = model.manifest.details.get(SUPERVISION, {}).get("mask", ())
    phi = Phi.of(features, model.generator.vocabulary, mask)
    return Moments(
        path, groups, phi, means, population[0], model.population(), load_residence(model)
    )


def load_posterior(model: Model) -> Posterior | None:
    """The posterior of group means that `save_evidence` wrote; None without error bars."""
    path = model.path / MEANS
    groups = model.groups
    if groups is None or not path.exists() or "sd" not in pq.read_schema(path).names:
        return None
    size = len(groups)
    with refuse_corrupt(path):
        table = read_parquet(path)
        table = table.filter(pc.is_valid(table["sd"]))
        features = tuple(table["feature"].unique().to_pylist())
        shape = (size, len(features))
        median = table["median"].to_numpy().reshape(shape)
        scale = np.where(median > 0, median, 1.0).T  # (features, groups)
        covariance = _lists(table["covariance"], size)
        if covariance is None:
            sd = table["sd"].to_numpy().reshape(shape).T
            return Posterior(features, median, (sd / scale) ** 2)
        covariance /= scale[:, :, None] * scale[:, None]
        parents = table["parent"].to_pylist()[: len(features)]
        names = dict.fromkeys(name for name in parents if name is not None)
        rows = [parents.index(name) for name in names]
        number = {name: k for k, name in enumerate(names)}
        parent = np.array([number.get(name, -1) for name in parents], dtype=np.int64)
        shared = _lists(table["parent_covariance"], size)
        assert shared is not None
        return Posterior(features, median, covariance, Families(tuple(names), parent, shared[rows]))


def _lists(column: pa.ChunkedArray, groups: int) -> Floats | None:
    """Covariances (features, groups, groups) that `_covariances` wrote; None if there are none."""
    values = pc.list_flatten(column).combine_chunks().to_numpy(zero_copy_only=False)
    if not len(values):
        return None
    return np.ascontiguousarray(values.reshape(groups, -1, groups).transpose(1, 0, 2))


def refuse_without_posterior(model: Model) -> Posterior:
    """The posterior of group means, or one sentence."""
    posterior = load_posterior(model)
    if posterior is None:
        raise MobatlasError(
            f"--posterior: {model.path} has no posterior of group means; run "
            "`mobatlas supervise MODEL REGIONS --out MODEL2` with another strategy than strong"
        )
    return posterior


def load_draws(
    model: Model,
    calibration: Calibration,
    form: str,
    draws: tuple[int, int],
    tracker: Tracker = SILENT,
) -> DrawnCalibration:
    """Calibrate a model to posterior draws of its group means.

    `draws` is their number and their seed, and `calibration` the one to the estimate.
    """
    posterior = refuse_without_posterior(model)
    moments = load_moments(model)
    assert moments is not None
    drawn = drawn_moments(posterior, moments, *draws)
    seed = model.manifest.seed or 0
    fitted = calibrate_draws(model.generator, drawn, calibration, form, seed, tracker)
    return DrawnCalibration(*fitted, *draws, joint=posterior.is_joint)


def informed_features(model: Model) -> dict[str, Any] | None:
    """What the evidence behind a model informs; None for a model without regions.

    `features` are the feature maps that the evidence mostly determines, `evidence` the share of
    the information on each map that is not assumption, and `others` a sentence on all other
    behaviour.
    """
    shares = model.manifest.details.get(SUPERVISION, {}).get("informed")
    if shares is None:
        return None
    informed = [name for name, share in shares.items() if share >= MOSTLY_PRIOR]
    return {"features": informed, "evidence": shares, "others": describe_informed(shares)}


def load_residence(model: Model) -> Floats | None:
    """p(d | home region) of each row of the model's population (rows, groups).

    None if the model was supervised without membership.
    """
    if not model.manifest.details.get(SUPERVISION, {}).get("membership"):
        return None
    path = model.path / COMPOSITION
    with refuse_corrupt(path):
        table = read_parquet(path)
        homes = read_parquet(model.path / REGION_ANCHORS)
        regions = table["region"].unique().to_pylist()
        shares = table["believed"].to_numpy().reshape(len(regions), -1)
        number = {name: k for k, name in enumerate(regions)} | {None: -1}
        region = np.array([number[name] for name in homes["region"].to_pylist()], dtype=np.int64)
        order = np.lexsort([homes[name].to_numpy() for name in ANCHORS])  # of `Model.population`
        return residence_shares(shares, region[order])


def load_sampler(model: Model, tracker: Tracker = SILENT) -> CalibratedSampler:
    """The calibrated sampler of a model that was supervised with regions or labels.

    If the folder has no calibration, the model is calibrated here with its own seed.

    Parameters
    ----------
    model
        A model, as `load_model` returns it.
    tracker
        Receives the progress of a calibration, in per cent.

    Returns
    -------
    CalibratedSampler
        Samples of groups with the estimated means.

    Examples
    --------
    >>> sampler = load_sampler(load_model("model-by-group"))  # doctest: +SKIP
    >>> sampler.sample(100, group=0).trajectories  # doctest: +SKIP
    """
    moments = load_moments(model)
    if moments is None:
        raise MobatlasError(
            f"--calibrate: {model.path} has no estimated group means; "
            "run `mobatlas supervise MODEL REGIONS --out MODEL2` first"
        )
    calibration = load_calibration(model.path)
    if calibration is None:
        values = model.manifest.config.get("supervise", {}).get("calibration", {})
        config = build(CalibrationConfig, values, str(model.path))
        calibration = fit_calibration(
            model.generator, moments, config, model.manifest.seed or 0, tracker
        )
    return CalibratedSampler.of(model.generator, calibration, moments.anchors, moments.residence)
