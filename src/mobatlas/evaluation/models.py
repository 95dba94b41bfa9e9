"""Models under the same conditions: samples with anchors of training people, the same for every model, against held-out people.

Labels choose the anchors of a group's samples, as in the paper, and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from mobatlas.data.dataset import TrajectoryDataset
from mobatlas.evaluation.comparison import (
    EVERYBODY,
    Scores,
    evaluate_groups,
    group_members,
    sampling_floor,
)
from mobatlas.evaluation.metrics import Ints, Yardstick
from mobatlas.features import Trajectories
from mobatlas.generators.base import Generator

FLOOR = "floor"


def score_everybody(
    dataset: TrajectoryDataset, yardstick: Yardstick, model: Generator, seed: int = 0, split: str = "test"
) -> Scores:
    """As many samples as the split has trajectories, no group given, against the split."""
    members = dataset.split(split)
    made = model.sample(len(members), anchors=_anchors(dataset, dataset.split("train"), len(members), seed), seed=seed)
    return evaluate_groups(yardstick, {EVERYBODY: Trajectories.of(dataset, members)}, {EVERYBODY: made}, seed=seed)


def score_groups(
    dataset: TrajectoryDataset,
    yardstick: Yardstick,
    models: Mapping[str, Generator],
    seed: int = 0,
    split: str = "test",
) -> dict[str, Scores]:
    """Each model's samples of each group against the split's people of that group, and the sampling floor at the same sizes.

    A model that knows no groups is the baseline: its samples differ between groups by their anchors alone.
    """
    held_out, training = group_members(dataset, split), group_members(dataset, "train")
    real = {name: Trajectories.of(dataset, rows) for name, rows in held_out.items()}
    scores = {}
    for label, model in models.items():
        made = {}
        for number, (name, rows) in enumerate(held_out.items()):
            groups = None if model.groups is None else np.full(len(rows), model.groups.index(name), dtype=np.int64)
            anchors = _anchors(dataset, training[name], len(rows), seed)
            made[name] = model.sample(len(rows), groups, anchors, seed=seed + number + 1)
        scores[label] = evaluate_groups(yardstick, real, made, seed=seed)
    floor = sampling_floor(dataset, yardstick, split=split, seed=seed).groups
    assert floor is not None  # there are labels, or there would be no members
    return scores | {FLOOR: floor}


def _anchors(dataset: TrajectoryDataset, members: Ints, n: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng([seed, 77])
    return dataset.anchors[dataset.person[np.sort(rng.choice(members, n, replace=len(members) < n))]]
