"""The labelled upper bound: the same model, trained on pairs of trajectory and group.

This is the one strategy that reads labels of individuals.
"""

from __future__ import annotations

import numpy as np

from mobatlas.data.dataset import TrajectoryDataset
from mobatlas.errors import MobatlasError
from mobatlas.generators.protocol import Draw, Examples, Generator
from mobatlas.training.loop import Trainer


def labelled(dataset: TrajectoryDataset, seed: int) -> Draw:
    """All labelled training trajectories once an epoch, each with the group of its person; unlabelled people stay unknown."""
    group_of = dataset.person_groups()  # (people,)

    def draw(size: int, step: int) -> Examples:
        indices = dataset.order("train", size, seed, step)
        return Examples(indices, group_of[dataset.person[indices]])

    return draw


def teach_labels(
    model: Generator, dataset: TrajectoryDataset, trainer: Trainer, *, from_scratch: bool = False
) -> tuple[Generator, dict[str, float]]:
    """The model that labels would give: continued from phase 1, or its conditional part trained anew."""
    if dataset.groups is None or not np.any(
        dataset.person_groups()[dataset.split_people("train")] >= 0
    ):
        raise MobatlasError(
            f"{dataset.path}: the strategy 'strong' needs labels, and no training person has any"
        )
    taught = model.with_groups(dataset.groups, trainer.seed, from_scratch)
    draw = labelled(dataset, trainer.seed)
    report = trainer.run(
        taught.weighted_fit_stage(dataset, draw, "strong", trainer, fresh=from_scratch)
    )
    return taught, report
