"""The sampling floor: real training people against held-out people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mobatlas.data.dataset import Trajectories, TrajectoryDataset
from mobatlas.evaluation.comparison import (
    EVERYBODY,
    FLOOR,
    Scores,
    Size,
    compare_models,
    labelled_groups,
    real_groups,
)
from mobatlas.evaluation.metrics import MetricSpec


@dataclass(frozen=True)
class Floor:
    """Scores of real training people: the JSD that sampling alone leaves."""

    groups: Scores | None  # None if the dataset has no labels
    everybody: Scores  # all people as one group, with or without labels


def evaluate_groups(
    spec: MetricSpec,
    real: Mapping[str, Trajectories],
    synthetic: Mapping[str, Trajectories],
    *,
    size: Size = None,
    seed: int = 0,
) -> Scores:
    """Every metric by group, at equal sizes.

    Parameters
    ----------
    spec
        The bins, from `MetricSpec.of(dataset)`.
    real, synthetic
        Group -> trajectories, with the same groups on both sides.
    size
        Maximum number of trajectories of a group. The larger side is thinned at random to the size
        of the smaller one.
    seed
        Random seed of the thinning. Models with equally many samples are compared with the same
        real trajectories.

    Returns
    -------
    Scores
        Divergences by group and their average.

    Examples
    --------
    >>> scores = evaluate_groups(spec, real, synthetic)  # doctest: +SKIP
    >>> scores.average["poi"]  # doctest: +SKIP
    """
    return compare_models(spec, real, {"model": synthetic}, size=size, seed=seed).scores["model"]


def sampling_floor(
    dataset: TrajectoryDataset,
    spec: MetricSpec | None = None,
    *,
    split: str = "test",
    size: Size = None,
    seed: int = 0,
) -> Floor:
    """Score real training people against real people of a split.

    Both sides have equally many people, and each person has a partner with as many trajectories.

    Parameters
    ----------
    dataset
        The prepared dataset. A person is in one split only.
    spec
        The bins, by default those of the training people.
    split
        The people to compare with.
    size
        Maximum number of trajectories, as in `evaluate_groups`; a mapping may also name
        'everybody'.
    seed
        Decides which trajectories are compared.

    Returns
    -------
    Floor
        Scores by group, if the dataset has labels, and of everybody.

    Examples
    --------
    >>> sampling_floor(dataset).everybody.average["poi"]  # doctest: +SKIP
    """
    spec = MetricSpec.of(dataset) if spec is None else spec
    everybody = [
        {EVERYBODY: Trajectories.of(dataset, dataset.split(side))} for side in (split, "train")
    ]
    groups = None
    if labelled_groups(dataset) is not None:
        groups = _floor(spec, [real_groups(dataset, side) for side in (split, "train")], size, seed)
    return Floor(groups, _floor(spec, everybody, size, seed))


def _floor(
    spec: MetricSpec, sides: Sequence[Mapping[str, Trajectories]], size: Size, seed: int
) -> Scores:
    real, training = sides
    comparison = compare_models(
        spec, real, {FLOOR: training}, size=size, seed=seed, reference=training
    )
    return comparison.scores[FLOOR]
