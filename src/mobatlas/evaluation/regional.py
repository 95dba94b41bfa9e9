"""Evaluation without labels: predict the regions of held-out people, and regions left out."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mobatlas.data.arrays import Floats
from mobatlas.data.dataset import TrajectoryDataset
from mobatlas.features.divergences import js, normalise
from mobatlas.regions.recovery.recover import recover
from mobatlas.regions.store import RegionsFolder
from mobatlas.regions.types import Regions
from mobatlas.supervision.calibration import Sampler
from mobatlas.supervision.finetune import FinetuneConfig, regional_loss

FOLDS = 5


def held_out_people(
    samplers: Mapping[str, Sampler],
    dataset: TrajectoryDataset,
    regions_folder: RegionsFolder | Path | str,
    seed: int = 0,
) -> dict[str, float] | None:
    """JSD in bits between the regions that each sampler simulates and those of validation people.

    None if the folder has no aggregates of validation people.
    """
    folder = RegionsFolder.open(regions_folder)
    if folder.validation is None:
        return None
    config = FinetuneConfig()
    return {
        name: regional_loss(sampler, dataset, folder, config, seed)
        for name, sampler in samplers.items()
    }


def held_out_regions(
    regions: Regions, seed: int = 0, folds: int = FOLDS, *, parents: Mapping[str, str] | None = None
) -> dict[str, Any] | None:
    """JSD in bits between regions and their prediction from the other regions.

    Predictions are by group means and by the mean of everybody. None if there are too few regions
    to leave some out.
    """
    count = len(regions.composition.regions)
    if count < 2 * folds:
        return None
    fold = np.random.default_rng([seed, 5]).permutation(count) % folds
    by_groups = np.zeros(count)
    by_everybody = np.zeros(count)
    for number in range(folds):
        test = np.flatnonzero(fold == number)
        recovery = recover(
            regions.select(np.flatnonzero(fold != number)), parents=parents, quiet=True
        )
        predicted = regions.composition.shares[test] @ recovery.means  # (regions, features)
        for row, region in zip(predicted, test.tolist(), strict=True):
            values = regions.aggregates.values[region]
            by_groups[region] = _jsd_of_known(row, values)
            by_everybody[region] = _jsd_of_known(recovery.baseline, values)
    weight = regions.aggregates.n
    return {
        "regions": count,
        "by_groups": float(np.average(by_groups, weights=weight)),
        "by_everybody": float(np.average(by_everybody, weights=weight)),
        "better_in": float((by_groups < by_everybody).mean()),
    }


def _jsd_of_known(predicted: Floats, values: Floats) -> float:
    """The JSD of shares over the bins that are not suppressed."""
    known = ~np.isnan(values)
    if not known.any() or not values[known].sum() > 0:
        return 0.0
    return float(js(normalise(np.maximum(predicted[known], 0)), normalise(values[known])))
