"""The evidence in a supervised MODEL folder: enough to sample a region and to calibrate.

It contains no ids and no labels.

Estimated means are uncertain. If every sample aims at the same means, intervals from samples show
sampling noise only. Posterior samples therefore have one calibration for each draw of the group
means from their posterior, and the samples of a draw are selected so that they have these means.
Draw number k is the same for all groups, so that contrasts of groups have the right error.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from mobatlas.config import build
from mobatlas.data.types import Floats
from mobatlas.errors import MobatlasError
from mobatlas.generators.protocol import Generator
from mobatlas.generators.store import COMPOSITION, SUPERVISION, Model
from mobatlas.io.manifest import MANIFEST, read_parquet, refuse_corrupt, write_atomic, write_json
from mobatlas.progress import SILENT, Tracker
from mobatlas.regions.recovery.recover import MOSTLY_PRIOR
from mobatlas.regions.types import Families, Posterior, bins_by_map
from mobatlas.supervision.calibration import (
    CAPS,
    RIDGE_FACTORS,
    CalibratedSampler,
    Calibration,
    CalibrationConfig,
    Choice,
    PoolFit,
    Weighting,
    comparable_moments,
    fit_calibration,
    sample_pools,
)
from mobatlas.supervision.evidence import (
    Evidence,
    Moments,
    Phi,
    describe_informed,
    residence_shares,
    shrunk_shares,
    tilt_to_mean,
)

POPULATION = "population"  # a form of calibration
LEAST_CAP = 5.0  # draws are further from the samples of a model than the estimate is
ENOUGH = 0.9  # of the spread that the largest cap reaches: the cheapest that reaches it is used
MEANS = "group_means.parquet"
CURVE = "curve.jsonl"
CALIBRATION_FILES = ("calibration.json", "calibration.safetensors")
MAX_COVARIANCES = 2**25  # numbers: a quarter of a gigabyte


@dataclass(frozen=True)
class DrawnCalibration:
    """The calibrations of all draws, and facts about them."""

    calibration: Calibration
    spread: dict[str, float]  # by feature map, see `calibrate_draws`
    draws: int
    seed: int  # of the draws
    joint: bool  # see `Posterior.is_joint`

    def facts(self) -> dict[str, Any]:
        """For the metadata of a file."""
        return {
            "draws": self.draws,
            "seed": self.seed,
            "joint": self.joint,
            "pool": self.calibration.pool,
            "spread": {name: round(share, 4) for name, share in self.spread.items()},
        }


def drawn_moments(posterior: Posterior, moments: Moments, n: int, seed: int) -> Moments:
    """The moments of n draws, their means stacked: (draws x groups, features).

    The number of visits, if the evidence does not have it, follows the total of the draw.
    """
    size = len(posterior.features)
    number = moments.phi.visits[size:]
    first = bins_by_map(posterior.features)[posterior.features[0].partition(":")[0]]
    usual = np.maximum(posterior.medians[:, first].sum(1), 1e-300)  # (groups,)
    rows: list[Floats] = []
    for means in posterior.draws(n, seed):
        level = means[:, first].sum(1) / usual
        visits = [
            tilt_to_mean(share, number, float(each)) if len(number) else share
            for share, each in zip(moments.means[:, size:], level, strict=True)
        ]
        rows.append(np.hstack([means, visits]))
    return replace(moments, means=np.vstack(rows))


def calibrate_draws(
    model: Generator,
    drawn: Moments,
    base: Calibration,
    form: str,
    seed: int = 0,
    tracker: Tracker = SILENT,
) -> tuple[Calibration, dict[str, float]]:
    """Fit one form of the calibration for every draw and group.

    Parameters
    ----------
    model
        The generator.
    drawn
        The moments of draws, as `drawn_moments` returns them.
    base
        The calibration to the estimate; it decides pool, candidates and caps.
    form
        The form to fit; the other one stays empty.
    seed
        Random seed of the pool.
    tracker
        Counts per cent.

    Returns
    -------
    tuple
        The calibrations, and by feature map the share of the posterior spread that samples reach:
        the difference between the means of two draws, of held-out samples and of the posterior.

    Examples
    --------
    >>> drawn = drawn_moments(posterior, moments, 20, seed=1)  # doctest: +SKIP
    >>> calibrate_draws(generator, drawn, calibration, "population")  # doctest: +SKIP
    """
    drawn = comparable_moments(model, drawn)
    groups = len(drawn.groups)
    targets = drawn.means.reshape(-1, groups, drawn.means.shape[1])  # (draws, groups, features)
    candidates = None if form == POPULATION else base.candidates
    rows: dict[tuple[int, int], Weighting] = {}
    spread = np.zeros((len(bins_by_map(drawn.phi.features)), 2))
    pools = sample_pools(model, drawn, base.pool, base.candidates, seed, tracker)
    for group, phi in enumerate(pools):
        fits = [PoolFit(drawn, phi, target, base.ridge) for target in targets[:, group]]
        choice, products = _choose(fits, base.population[group].cap, candidates)
        spread += products
        for number, fit in enumerate(fits):
            rows[number, group] = fit.weighting(choice, candidates)
    weightings = tuple(rows[key] for key in sorted(rows))
    calibration = replace(
        base,
        features=drawn.phi.features,
        population=weightings if form == POPULATION else (),
        fixed_anchors=() if form == POPULATION else weightings,
    )
    shares = spread[:, 0] / np.maximum(spread[:, 1], 1e-300)
    named = zip(bins_by_map(drawn.phi.features), np.maximum(shares, 0).tolist(), strict=True)
    return calibration, dict(named)


def _choose(fits: list[PoolFit], cap: float, candidates: int | None) -> tuple[Choice, Floats]:
    """The cheapest tilt with nearly the spread of the best, and its products (maps, 2)."""
    ridge = fits[0].ridge
    choices = (
        [Choice(float(candidates), RIDGE_FACTORS[-1] * ridge)]
        if candidates is not None
        else [Choice(each, ridge) for each in CAPS if each >= max(cap, LEAST_CAP)]
    )
    products = [_spread(fits[:2], choice, candidates) for choice in choices]
    reached = [each[:, 0].sum() for each in products]
    # Below zero, samples of held-out candidates differ in the wrong direction: the pool is small.
    enough = max(reached) - (1 - ENOUGH) * abs(max(reached))
    best = next(k for k, each in enumerate(reached) if each >= enough)
    return choices[best], products[best]


def _spread(fits: list[PoolFit], choice: Choice, candidates: int | None) -> Floats:
    """By map, products of the difference of two draws with their samples' and with itself."""
    first, second = fits
    scale = first.moments.scale
    wanted = (first.target - second.target) / scale
    reached = [fit.held_out_mean(choice, candidates) / scale for fit in fits]
    products = np.array([(reached[0] - reached[1]) * wanted, wanted**2])  # (2, features)
    bins = bins_by_map(first.moments.phi.features).values()
    return np.array([products[:, each].sum(1) for each in bins])


def save_evidence(folder: Path, evidence: Evidence, tilt: Floats | None = None) -> None:
    """Write composition and estimated means, with the tilt (groups, features) if any.

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
        means, population = (
            table[name].to_numpy().reshape(shape) for name in ("mean", "population")
        )
    mask = model.manifest.details.get(SUPERVISION, {}).get("mask", ())
    phi = Phi.of(features, model.generator.vocabulary, mask)
    people = model.anchors.people
    return Moments(path, groups, phi, means, population[0], people, *load_people(model))


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
        if (covariance := _lists(table["covariance"], size)) is None:
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
    if (posterior := load_posterior(model)) is None:
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
    with refuse_corrupt(model.path / MANIFEST):
        if (shares := model.manifest.details.get(SUPERVISION, {}).get("informed")) is None:
            return None
        informed = [name for name, share in shares.items() if share >= MOSTLY_PRIOR]
        return {"features": informed, "evidence": shares, "others": describe_informed(shares)}


def load_people(model: Model, *, observed: bool = False) -> tuple[Floats, Floats | None]:
    """Anchors (rows, 4) of synthetic or of training people, and their p(d | home region).

    The latter (rows, groups) is None if the model was supervised without membership.
    """
    membership = model.manifest.details.get(SUPERVISION, {}).get("membership")
    people = (
        model.observed(model.regions_path if membership else None) if observed else model.population
    )
    if not membership:
        return people.anchors, None
    path = model.path / COMPOSITION
    with refuse_corrupt(path):
        table = read_parquet(path)
        shares = table["believed"].to_numpy().reshape(len(table["region"].unique()), -1)
        return people.anchors, residence_shares(shares, people.region)


def load_sampler(
    model: Model, tracker: Tracker = SILENT, *, observed: bool = False
) -> CalibratedSampler:
    """The calibrated sampler of a model that was supervised with regions or labels.

    If the folder has no calibration, the model is calibrated here with its own seed.

    Parameters
    ----------
    model
        A model, as `load_model` returns it.
    tracker
        Receives the progress of a calibration, in per cent.
    observed
        Use the homes and workplaces of training people, not synthetic ones.

    Returns
    -------
    CalibratedSampler
        Samples of groups with the estimated means.

    Examples
    --------
    >>> sampler = load_sampler(load_model("model-by-group"))  # doctest: +SKIP
    >>> sampler.sample(100, group=0).trajectories  # doctest: +SKIP
    """
    if (moments := load_moments(model)) is None:
        raise MobatlasError(
            f"--calibrate: {model.path} has no estimated group means; "
            "run `mobatlas supervise MODEL REGIONS --out MODEL2` first"
        )
    if (calibration := load_calibration(model.path)) is None:
        values = model.manifest.config.get("supervise", {}).get("calibration", {})
        config = build(CalibrationConfig, values, str(model.path))
        calibration = fit_calibration(
            model.generator, moments, config, model.manifest.seed or 0, tracker
        )
    return CalibratedSampler.of(
        model.generator, calibration, *load_people(model, observed=observed)
    )
