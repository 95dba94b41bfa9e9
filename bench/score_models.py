"""Models under the same conditions: samples with anchors of training people, the same for every model, against held-out people.

Labels choose the anchors of a group's samples, as in the paper, and nothing else. Models that are calibrated are scored as
samplers, in the form that fits where the anchors come from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from zlib import crc32

import numpy as np

from mobatlas.data.arrays import Floats, Ints
from mobatlas.data.dataset import TrajectoryDataset
from mobatlas.data.trajectories import Trajectories
from mobatlas.errors import MobatlasError
from mobatlas.evaluation.comparison import (
    EVERYBODY,
    Scores,
    average_scores,
    diversity,
    evaluate_groups,
    group_members,
    real_groups,
)
from mobatlas.evaluation.metrics import MetricSpec, metrics
from mobatlas.features.divergences import jsd
from mobatlas.generators.protocol import Generator
from mobatlas.supervision.samplers import PlainSampler, Sampler

FLOOR = "floor"
ANCHORS_OF = ("group", "population")


def score_everybody(
    dataset: TrajectoryDataset,
    spec: MetricSpec,
    model: Generator,
    seed: int = 0,
    split: str = "test",
) -> Scores:
    """As many samples as the split has trajectories, no group given, against the split."""
    members = dataset.split(split)
    made = model.sample(
        len(members),
        anchors=_anchors(dataset, dataset.split("train"), len(members), seed),
        seed=seed,
    )
    return evaluate_groups(
        spec, {EVERYBODY: Trajectories.of(dataset, members)}, {EVERYBODY: made}, seed=seed
    )


def score_groups(
    dataset: TrajectoryDataset,
    spec: MetricSpec,
    models: Mapping[str, Generator | Sampler],
    seed: int = 0,
    split: str = "test",
    *,
    anchors: str = "group",
) -> dict[str, Scores]:
    """Each model's samples of each group against the split's people of that group, and the sampling floor at the same sizes."""
    made = sample_groups(dataset, models, seed, split, anchors=anchors)
    return score_samples(dataset, spec, made, real_groups(dataset, split), seed)


def sample_groups(
    dataset: TrajectoryDataset,
    models: Mapping[str, Generator | Sampler],
    seed: int = 0,
    split: str = "test",
    *,
    anchors: str = "group",
) -> dict[str, dict[str, Trajectories]]:
    """As many samples of each group as the split has trajectories of it: name of a model -> group -> samples.

    A model that knows no groups is the baseline: its samples differ between groups by their anchors alone. With anchors of
    the `group` every model is given the same homes, of training people of the group, so a calibrated one chooses among
    candidates for each of them (the form `given`, which does not touch anchors; its tilt was fitted on homes of everybody, or
    of the group's regions, since whose they are is a label). With anchors of the `population` homes are drawn from everybody,
    or by regions, and a calibrated model chooses homes and trajectories together (the form `population`).
    """
    return draw_groups(dataset, models, 1, seed, split, anchors=anchors)[0]


def draw_groups(
    dataset: TrajectoryDataset,
    models: Mapping[str, Generator | Sampler],
    draws: int,
    seed: int = 0,
    split: str = "test",
    *,
    anchors: str = "group",
) -> list[dict[str, dict[str, Trajectories]]]:
    """`sample_groups` several times: what one draw of so few people says by chance, their mean says less.

    Anchors of the `group` are the same in all draws, and a calibrated model then chooses again among the same candidates.
    """
    if draws < 1:
        raise MobatlasError(f"--draws {draws}: ask for at least one")
    if anchors not in ANCHORS_OF:
        raise MobatlasError(
            f"anchors '{anchors}' do not exist; take those of the {' or the '.join(ANCHORS_OF)}"
        )
    held_out, training = group_members(dataset, split), group_members(dataset, "train")
    everybody = dataset.anchors[np.intersect1d(dataset.split_people("train"), dataset.person)]
    samples: list[dict[str, dict[str, Trajectories]]] = [
        {label: {} for label in models} for _ in range(draws)
    ]
    for label, model in models.items():
        sampler = model if isinstance(model, Sampler) else PlainSampler(model, everybody)
        for number, (name, rows) in enumerate(held_out.items()):
            n, group = len(rows), number if sampler.groups is None else sampler.groups.index(name)
            if anchors == "population":
                made = sampler.sample(draws * n, group, seed + number + 1).trajectories
            else:
                told, homes = (
                    np.full(n, group, dtype=np.int64),
                    _anchors(dataset, training[name], n, seed),
                )
                made = sampler.sample_at_anchors(told, homes, seed + number + 1, draws=draws)
            for draw, of in enumerate(samples):
                of[label][name] = made.take(np.arange(draw * n, (draw + 1) * n))
    return samples


def score_samples(
    dataset: TrajectoryDataset,
    spec: MetricSpec,
    samples: Mapping[str, Mapping[str, Trajectories]],
    real: Mapping[str, Trajectories],
    seed: int = 0,
    *,
    training: Mapping[str, Trajectories] | None = None,
) -> dict[str, Scores]:
    """The samples of each model against real people by group, and as the floor training people, all of them by default."""
    seen, others = (
        Trajectories.of(dataset, dataset.split("train")),
        Trajectories.joined(list(real.values())),
    )
    scores = {}
    for label, made in samples.items():
        variety = diversity(Trajectories.joined(list(made.values())), seen, others)
        scores[label] = replace(evaluate_groups(spec, real, made, seed=seed), diversity=variety)
    trained = real_groups(dataset, "train") if training is None else training
    return scores | {FLOOR: evaluate_groups(spec, real, trained, seed=seed)}


def mean_scores(scores: Sequence[Scores]) -> Scores:
    """Of several draws; sizes and diversity are those of the first."""
    first = scores[0]
    groups = {
        name: {
            metric: float(np.mean([each.groups[name][metric] for each in scores]))
            for metric in metrics
        }
        for name, metrics in first.groups.items()
    }
    return replace(first, groups=groups, average=average_scores(groups))


def pairwise(
    dataset: TrajectoryDataset, spec: MetricSpec, split: str = "train", seed: int = 0
) -> dict[str, Floats]:
    """How far groups are from each other: name of a metric -> (groups, groups), at equal sizes, zero with themselves."""
    members = {
        name: Trajectories.of(dataset, rows) for name, rows in group_members(dataset, split).items()
    }
    size = min(len(rows) for rows in members.values())
    rng = np.random.default_rng([seed, crc32(b"pairwise")])
    some = [rows.take(np.sort(rng.permutation(len(rows))[:size])) for rows in members.values()]
    counted = [spec.histograms(each) for each in some]
    return {
        metric.name: np.array(
            [[jsd(a[metric.name], b[metric.name]) for b in counted] for a in counted]
        )
        for metric in metrics()
    }


def _anchors(dataset: TrajectoryDataset, members: Ints, n: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng([seed, 77])
    return dataset.anchors[
        dataset.person[np.sort(rng.choice(members, n, replace=len(members) < n))]
    ]
