"""What needs nobody's label: do simulated regions look like those of held-out people, and do regions predict each other?"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mobatlas.data.dataset import TrajectoryDataset
from mobatlas.features.divergences import js, normalise
from mobatlas.regions.recovery.recover import recover
from mobatlas.regions.store import RegionsFolder
from mobatlas.regions.types import Floats, Regions
from mobatlas.supervision.finetune import FinetuneConfig, regional_loss
from mobatlas.supervision.resample import Sampler

FOLDS = 5


def held_out_people(
    samplers: Mapping[str, Sampler],
    dataset: TrajectoryDataset,
    regions_folder: RegionsFolder | Path | str,
    seed: int = 0,
) -> dict[str, float] | None:
    """JSD (bits) between regions as each sampler simulates them and as validation people have them; None if none are known."""
    folder = RegionsFolder.open(regions_folder)
    if folder.validation is None:
        return None
    config = FinetuneConfig()
    return {
        name: regional_loss(each, dataset, folder, config, seed) for name, each in samplers.items()
    }


def held_out_regions(
    regions: Regions, seed: int = 0, folds: int = FOLDS, *, parents: Mapping[str, str] | None = None
) -> dict[str, Any] | None:
    """JSD (bits) between regions and what the others predict for them: by recovered groups, and by the mean of all.

    None where there are too few regions to leave any out.
    """
    count = len(regions.composition.regions)
    if count < 2 * folds:
        return None
    fold = np.random.default_rng([seed, 5]).permutation(count) % folds
    groups, everybody, weight = np.zeros(count), np.zeros(count), regions.aggregates.n
    for number in range(folds):
        out, kept = np.flatnonzero(fold == number), np.flatnonzero(fold != number)
        found = recover(regions.some(kept), parents=parents, quiet=True)
        predicted = regions.composition.shares[out] @ found.means  # (regions, features)
        for row, region in zip(predicted, out.tolist(), strict=True):
            groups[region] = _distance(row, regions.aggregates.values[region])
            everybody[region] = _distance(found.baseline, regions.aggregates.values[region])
    return {
        "regions": count,
        "by_groups": float(np.average(groups, weights=weight)),
        "by_everybody": float(np.average(everybody, weights=weight)),
        "better_in": float((groups < everybody).mean()),
    }


def _distance(ours: Floats, theirs: Floats) -> float:
    """Of shares of the bins that are known."""
    known = ~np.isnan(theirs)
    if not known.any() or not theirs[known].sum() > 0:
        return 0.0
    return float(js(normalise(np.maximum(ours[known], 0)), normalise(theirs[known])))
