"""Scores of models on equal terms: samples at the same training anchors, against held-out people.

Labels only choose the anchors of a group's samples, as in the paper. Calibrated models are scored
as samplers, in the form that fits the source of the anchors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from zlib import crc32

import numpy as np

from mobatlas.data.dataset import Trajectories, TrajectoryDataset
from mobatlas.data.types import Floats, Ints
from mobatlas.errors import MobatlasError
from mobatlas.evaluation.comparison import (
    EVERYBODY,
    Scores,
    average_scores,
    compare_models,
    diversity,
    group_members,
    real_groups,
)
from mobatlas.evaluation.metrics import MetricSpec, metrics
from mobatlas.features.divergences import jsd
from mobatlas.generators.protocol import Generator
from mobatlas.supervision.calibration import PlainSampler, Sampler

BASELINE = "baseline"
FLOOR = "floor"
ANCHORS_OF = ("group", "population")


def score_everybody(
    dataset: TrajectoryDataset,
    spec: MetricSpec,
    model: Generator,
    seed: int = 0,
    split: str = "test",
) -> Scores:
    """Score as many samples as the split has trajectories, without groups."""
    members = dataset.split(split)
    anchors = _anchors(dataset, dataset.split("train"), len(members), seed)
    samples = model.sample(len(members), anchors=anchors, seed=seed)
    real = Trajectories.of(dataset, members)
    training = {EVERYBODY: Trajectories.of(dataset, dataset.split("train"))}
    comparison = compare_models(
        spec, {EVERYBODY: real}, {"model": {EVERYBODY: samples}}, seed=seed, reference=training
    )
    return comparison.scores["model"]


def score_groups(
    dataset: TrajectoryDataset,
    spec: MetricSpec,
    models: Mapping[str, Generator | Sampler],
    seed: int = 0,
    split: str = "test",
    *,
    anchors: str = "group",
) -> dict[str, Scores]:
    """Score samples of each group against people of the split, and the sampling floor."""
    samples = sample_groups(dataset, models, seed, split, anchors=anchors)
    return score_samples(dataset, spec, samples, real_groups(dataset, split), seed)


def sample_groups(
    dataset: TrajectoryDataset,
    models: Mapping[str, Generator | Sampler],
    seed: int = 0,
    split: str = "test",
    *,
    anchors: str = "group",
) -> dict[str, dict[str, Trajectories]]:
    """Draw as many samples of each group as the split has: model -> group -> samples.

    A model without groups is the baseline: its samples differ between groups only by anchors. With
    anchors of the `group` every model samples at the same homes of training people of the group. A
    calibrated model then selects among candidates at each home (the form `given`); its tilt was
    fitted at homes of all people, since knowing the group of a home needs a label. With anchors of
    the `population` homes come from all people or from regions, and a calibrated model selects
    homes and trajectories together (the form `population`).
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
    """Draw `sample_groups` several times, to average out chance.

    Anchors of the `group` are the same in all draws; a calibrated model selects again among the
    same candidates.
    """
    if draws < 1:
        raise MobatlasError(f"--draws {draws}: give at least 1")
    if anchors not in ANCHORS_OF:
        raise MobatlasError(
            f"anchors '{anchors}' do not exist; use those of the {' or the '.join(ANCHORS_OF)}"
        )
    held_out = group_members(dataset, split)
    training = group_members(dataset, "train")
    all_anchors = dataset.anchors[np.intersect1d(dataset.split_people("train"), dataset.person)]
    samples: list[dict[str, dict[str, Trajectories]]] = [
        {label: {} for label in models} for _ in range(draws)
    ]
    for label, model in models.items():
        sampler = model if isinstance(model, Sampler) else PlainSampler(model, all_anchors)
        for number, (name, rows) in enumerate(held_out.items()):
            n = len(rows)
            group = number if sampler.groups is None else sampler.groups.index(name)
            if anchors == "population":
                drawn = sampler.sample(draws * n, group, seed + number + 1).trajectories
            else:
                groups = np.full(n, group, dtype=np.int64)
                homes = _anchors(dataset, training[name], n, seed)
                drawn = sampler.sample_at_anchors(groups, homes, seed + number + 1, draws=draws)
            for draw, each in enumerate(samples):
                each[label][name] = drawn.take(np.arange(draw * n, (draw + 1) * n))
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
    """Score the samples of each model against real people by group.

    The floor is that of `training` people, of all training people by default.
    """
    seen = Trajectories.of(dataset, dataset.split("train"))
    others = Trajectories.joined(list(real.values()))
    floor = real_groups(dataset, "train") if training is None else training
    models = {**samples, FLOOR: floor}
    comparison = compare_models(spec, real, models, seed=seed, reference=floor)
    scores = {}
    for label, each in comparison.scores.items():
        groups = samples.get(label)
        shares = None
        if groups is not None:
            shares = diversity(Trajectories.joined(list(groups.values())), seen, others)
        errors = None
        if BASELINE in samples:
            timeless = comparison.scores[BASELINE].average.keys() & each.average.keys()
            errors = {name: comparison.gap(name, BASELINE, label)[1] for name in sorted(timeless)}
        scores[label] = replace(each, diversity=shares, gap_error=errors)
    return scores


def mean_scores(scores: Sequence[Scores]) -> Scores:
    """Average the scores of several draws; sizes and diversity are those of the first.

    Standard errors are averaged as well: the draws share the real people.
    """
    first = scores[0]
    groups = {
        name: {
            metric: float(np.mean([each.groups[name][metric] for each in scores]))
            for metric in metrics
        }
        for name, metrics in first.groups.items()
    }
    return replace(
        first,
        groups=groups,
        average=average_scores(groups),
        excess=_mean([each.excess for each in scores]),
        standard_error=_mean([each.standard_error for each in scores]),
        gap_error=_mean([each.gap_error or {} for each in scores]) or None,
    )


def _mean(values: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: float(np.mean([each[name] for each in values])) for name in values[0]}


def pairwise(
    dataset: TrajectoryDataset, spec: MetricSpec, split: str = "train", seed: int = 0
) -> dict[str, Floats]:
    """Return the JSD between groups at equal sizes: metric -> (groups, groups)."""
    members = {
        name: Trajectories.of(dataset, rows) for name, rows in group_members(dataset, split).items()
    }
    size = min(len(rows) for rows in members.values())
    rng = np.random.default_rng([seed, crc32(b"pairwise")])
    equal = [rows.take(np.sort(rng.permutation(len(rows))[:size])) for rows in members.values()]
    histograms = [spec.histograms(each) for each in equal]
    return {
        metric.name: np.array(
            [[jsd(a[metric.name], b[metric.name]) for b in histograms] for a in histograms]
        )
        for metric in metrics()
    }


def _anchors(dataset: TrajectoryDataset, members: Ints, n: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng([seed, 77])
    rows = np.sort(rng.choice(members, n, replace=len(members) < n))
    return dataset.anchors[dataset.person[rows]]
