"""Windows: do people make as many visits in one of the aggregates as in one of the dataset?"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mobatlas.data.dataset import TrajectoryDataset
from mobatlas.features.maps import FeatureMap
from mobatlas.regions.aggregates import aggregates_from_dataset
from mobatlas.regions.types import Aggregates, mean_over_regions

SAME_LEVEL = 1.5  # factor between visits of the aggregates and of the dataset that is no surprise


def same_level(published: float, ours: float) -> bool:
    """Whether both may be visits of windows of one length."""
    return 1 / SAME_LEVEL < published / max(ours, 1e-300) < SAME_LEVEL


def unlike_windows(published: float, ours: float) -> list[str]:
    """A sentence where visits a window in the aggregates are not what they are in the dataset."""
    if same_level(published, ours):
        return []
    return [
        f"people make {published:.3g} visits a window in the aggregates, {ours:.3g} in the dataset: are the windows alike?"
    ]


def compared_with_dataset(
    aggregates: Aggregates, dataset: TrajectoryDataset, maps: Sequence[FeatureMap]
) -> list[str]:
    """The same of published aggregates and training people; shares have no level to compare."""
    if aggregates.pooled or not len(dataset.split("train")):
        return []
    told = np.flatnonzero(~np.isnan(aggregates.values).all(0))
    published = mean_over_regions(aggregates.values, aggregates.n / aggregates.n.sum())
    everybody = np.zeros(dataset.people.num_rows, dtype=np.int64)
    seen = aggregates_from_dataset(dataset, maps, everybody, "train", ("everybody",))
    ours = dict(zip(seen.features, seen.values[0].tolist(), strict=True))
    features = [aggregates.features[number] for number in told.tolist()]
    return unlike_windows(float(published[told].sum()), sum(ours[name] for name in features))
