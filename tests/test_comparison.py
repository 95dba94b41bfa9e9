"""Evaluation by group: equal sizes, the floor, several models, the gap closed, and intervals."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bench.floors import evaluate_groups, sampling_floor
from bench.score_models import mean_scores
from mobatlas import TrajectoryDataset
from mobatlas.data.dataset import Trajectories
from mobatlas.data.types import HOME
from mobatlas.evaluation.comparison import (
    EVERYBODY,
    Comparison,
    Interval,
    Scores,
    compare_models,
    gap_closed,
    group_members,
)
from mobatlas.evaluation.metrics import MetricSpec
from mobatlas.features.divergences import jsd
from tests.small_town import CAFE, NAMES, PARK, SHOP, TOWN, small_dataset, walks

ByGroup = Mapping[str, Trajectories]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> TrajectoryDataset:
    return small_dataset(tmp_path_factory.mktemp("city"))


@pytest.fixture(scope="module")
def spec(dataset: TrajectoryDataset) -> MetricSpec:
    return MetricSpec.of(dataset, cells=12)


@pytest.fixture(scope="module")
def by_group(dataset: TrajectoryDataset) -> dict[str, dict[str, Trajectories]]:
    return {
        split: {
            name: Trajectories.of(dataset, rows)
            for name, rows in group_members(dataset, split).items()
        }
        for split in ("train", "test")
    }


def one_group(sample: Trajectories, person: Sequence[int] | None = None) -> ByGroup:
    """A group, with the person of each trajectory."""
    return {"x": sample if person is None else replace(sample, person=np.array(person))}


def without_people(groups: ByGroup) -> ByGroup:
    """As samples of a generator, where each trajectory is independent of the others."""
    return {name: replace(sample, person=None) for name, sample in groups.items()}


def intervals(
    spec: MetricSpec,
    real: ByGroup,
    synthetic: ByGroup,
    *,
    size: int | None = None,
    seed: int = 0,
    resamples: int = 200,
) -> dict[str, Interval]:
    models = {"model": synthetic}
    found = compare_models(spec, real, models, size=size, seed=seed, resamples=resamples)
    return found.intervals("model")


def test_real_and_synthetic_sizes_are_equal_in_every_group(
    spec: MetricSpec, by_group: dict[str, dict[str, Trajectories]]
) -> None:
    real = by_group["test"]
    synthetic = by_group["train"]
    scores = evaluate_groups(spec, real, without_people(synthetic), seed=3)
    assert scores.sizes == {name: min(len(real[name]), len(synthetic[name])) for name in real}
    assert scores.people == {name: len(set(each.people.tolist())) for name, each in real.items()}
    for metric in NAMES:
        assert scores.average[metric] == pytest.approx(
            np.mean([scores.groups[name][metric] for name in real])
        )
        assert scores.standard_error[metric] >= 0
    assert max(scores.excess[metric] for metric in NAMES) < 0.1 < scores.average["trip"]
    capped = evaluate_groups(spec, real, synthetic, size=10).sizes
    assert set(capped.values()) == {10}
    sizes = dict.fromkeys(real, 7) | {"x": 1}
    assert evaluate_groups(spec, real, synthetic, size=sizes).sizes["<30, M"] == 7
    assert json.loads(json.dumps(scores.as_dict()))["sizes"] == scores.sizes


def scores_of(groups: dict[str, dict[str, float]], error: float, distinct: float) -> Scores:
    average = {"poi": float(np.mean([row["poi"] for row in groups.values()]))}
    return Scores(
        groups=groups,
        sizes={"a": 5, "b": 6},
        people={"a": 3, "b": 2},
        average=average,
        excess={"poi": average["poi"] - 0.1},
        standard_error={"poi": error},
        diversity={"distinct": distinct},
    )


def test_scores_of_several_draws_are_their_mean() -> None:
    first = scores_of({"a": {"poi": 0.2}, "b": {"poi": 0.4}}, 0.01, 1.0)
    second = scores_of({"a": {"poi": 0.4}, "b": {"poi": 0.8}}, 0.02, 0.5)
    mean = mean_scores([first, second])
    assert mean.groups == {"a": {"poi": pytest.approx(0.3)}, "b": {"poi": pytest.approx(0.6)}}
    assert mean.average == {"poi": pytest.approx(0.45)} and mean.sizes == first.sizes
    assert mean.people == first.people
    assert mean_scores([first]).groups == first.groups and mean.diversity == first.diversity


def test_the_seed_alone_decides_who_is_compared(
    spec: MetricSpec, by_group: dict[str, dict[str, Trajectories]]
) -> None:
    real = by_group["test"]
    synthetic = by_group["train"]
    scores = evaluate_groups(spec, real, synthetic, seed=3)
    backwards = dict(reversed(synthetic.items()))
    assert evaluate_groups(spec, real, backwards, seed=3) == scores
    assert evaluate_groups(spec, real, synthetic, seed=4) != scores
    alone = {"<30, M": real["<30, M"]}
    only = evaluate_groups(spec, alone, {"<30, M": synthetic["<30, M"]}, seed=3)
    assert only.groups["<30, M"] == scores.groups["<30, M"]


def test_models_of_one_size_are_compared_with_the_same_real_trajectories() -> None:
    rng = np.random.default_rng(0)
    real = walks(*([HOME] * 2 + [PARK] * int(n) for n in rng.integers(0, 3, size=60)))
    first = walks(*[[PARK]] * 20)
    second = walks(*[[SHOP]] * 20)
    lengths = [
        evaluate_groups(TOWN, one_group(real), one_group(sample)).groups["x"]["length"]
        for sample in (first, second)
    ]
    assert lengths[0] == lengths[1]


def test_models_of_several_sizes_are_compared_at_the_smallest_of_them(
    spec: MetricSpec, by_group: dict[str, dict[str, Trajectories]]
) -> None:
    synthetic = without_people(by_group["train"])
    few = {name: side.take(np.arange(15)) for name, side in synthetic.items()}
    models = {"many": synthetic, "few": few, "floor": by_group["train"]}
    comparison = compare_models(spec, by_group["test"], models, resamples=5)
    assert set(comparison.scores) == set(models)
    for scores in comparison.scores.values():
        assert scores.sizes == {name: min(15, len(side)) for name, side in by_group["test"].items()}
        assert scores.people == comparison.scores["floor"].people


def test_the_floor_compares_training_people_with_test_people(
    dataset: TrajectoryDataset, spec: MetricSpec, by_group: dict[str, dict[str, Trajectories]]
) -> None:
    floor = sampling_floor(dataset, spec, seed=2)
    training = by_group["train"]
    alone = compare_models(spec, by_group["test"], {"floor": training}, seed=2, reference=training)
    assert floor.groups == alone.scores["floor"]
    assert floor.everybody.sizes == {EVERYBODY: len(dataset.split("test"))}


def test_the_floor_is_above_zero_and_sinks_with_more_people(
    dataset: TrajectoryDataset, spec: MetricSpec
) -> None:
    few, more, all_of_them = (
        [sampling_floor(dataset, spec, size=size, seed=seed).everybody for seed in range(12)]
        for size in (20, 80, 320)
    )
    for metric in NAMES:
        means = [
            np.mean([floor.average[metric] for floor in floors])
            for floors in (few, more, all_of_them)
        ]
        assert means[0] > means[1] > means[2] > 0, metric
    groups = sampling_floor(dataset, spec).groups
    assert groups is not None
    assert all(groups.average[metric] > all_of_them[0].average[metric] for metric in NAMES)


def test_the_floor_has_no_excess(dataset: TrajectoryDataset, spec: MetricSpec) -> None:
    floor = sampling_floor(dataset, spec).everybody
    for metric in NAMES:
        assert abs(floor.excess[metric]) < 4 * floor.standard_error[metric], metric


def test_a_dataset_without_labels_has_a_floor_for_everybody(
    dataset: TrajectoryDataset, tmp_path: Path
) -> None:
    shutil.copytree(dataset.path, tmp_path / "unlabelled")
    (tmp_path / "unlabelled" / "labels.parquet").unlink()
    floor = sampling_floor(TrajectoryDataset.open(tmp_path / "unlabelled"))
    assert floor.groups is None
    assert floor.everybody == sampling_floor(dataset).everybody


@pytest.mark.parametrize(
    ("model", "expected"), [(0.5, 0.0), (0.1, 1.0), (0.3, 0.5), (0.7, -0.5), (0.0, 1.25)], ids=str
)
def test_the_gap_closed_is_zero_at_the_baseline_and_one_at_the_target(
    model: float, expected: float
) -> None:
    assert gap_closed(model, baseline=0.5, target=0.1) == pytest.approx(expected)


def test_there_is_no_gap_to_close_where_the_target_is_no_better() -> None:
    assert gap_closed(0.2, baseline=0.3, target=0.3) is None
    assert gap_closed(0.2, baseline=0.2, target=0.3) is None
    assert gap_closed(0.2, baseline=0.35, target=0.3, standard_error=0.02) is None
    assert gap_closed(0.2, baseline=0.5, target=0.25, standard_error=0.08) == pytest.approx(1.2)
    assert gap_closed(0.2, baseline=0.5, target=0.25, standard_error=0.0) == pytest.approx(1.2)
    assert gap_closed(math.nan, baseline=0.5, target=0.1) is None
    assert gap_closed(0.2, baseline=math.nan, target=0.1) is None


def test_the_interval_lies_around_the_average_of_the_evaluation(
    spec: MetricSpec, by_group: dict[str, dict[str, Trajectories]]
) -> None:
    sides = by_group["test"], by_group["train"]
    result = intervals(spec, *sides, size=40, seed=3, resamples=50)
    scores = evaluate_groups(spec, *sides, size=40, seed=3)
    assert {name: one.estimate for name, one in result.items()} == scores.average
    for one in result.values():
        assert 0 <= one.low < one.estimate < one.high <= 1
        assert 0 < one.spread < one.high - one.low
    assert intervals(spec, *sides, size=40, seed=3, resamples=50) == result


def test_resamples_agree_with_a_loop_over_people() -> None:
    """People of one window or two, against samples that are certain."""
    rng = np.random.default_rng(0)
    person = np.array([*range(80), *range(40)])
    places = rng.choice([PARK, SHOP, CAFE], size=(120, 4), p=[0.6, 0.3, 0.1])
    synthetic = walks(*[[PARK, SHOP, CAFE]] * 120)
    counts = np.array(
        [
            [np.sum(places[person == one] == place) for place in (PARK, SHOP, CAFE)]
            for one in range(80)
        ]
    )
    draws = [
        jsd(counts[rng.integers(80, size=80)].sum(0).astype(np.float64), np.ones(3))
        for _ in range(2_000)
    ]
    real = one_group(walks(*places.tolist()), person.tolist())
    result = intervals(TOWN, real, one_group(synthetic), resamples=4_000)
    assert result["poi"].spread == pytest.approx(np.std(draws), rel=0.1)


def test_windows_of_one_person_are_drawn_together() -> None:
    rng = np.random.default_rng(1)
    habits = rng.choice([PARK, SHOP], size=20)
    real = walks(*[[habit] * 3 for habit in habits for _ in range(4)])
    synthetic = one_group(walks(*[[CAFE, PARK]] * 80))
    people = np.repeat(np.arange(20), 4).tolist()
    together, apart = (
        intervals(TOWN, one_group(real, person), synthetic)["poi"].spread
        for person in (people, None)
    )
    assert together == pytest.approx(2 * apart, rel=0.25), "the root of four windows each"


def test_samples_are_drawn_as_well_as_real_people() -> None:
    rng = np.random.default_rng(2)
    certain = one_group(walks(*[[PARK, CAFE]] * 60))
    varied = one_group(walks(*[[PARK if rng.random() < 0.8 else CAFE] * 2 for _ in range(60)]))
    here = intervals(TOWN, certain, varied)["poi"]
    back = intervals(TOWN, varied, certain)["poi"]
    assert here.spread > 0.01
    assert here.spread == pytest.approx(back.spread, rel=0.25)
    assert intervals(TOWN, certain, certain)["poi"].spread == pytest.approx(0, abs=1e-6)


def test_more_people_narrow_the_interval(dataset: TrajectoryDataset, spec: MetricSpec) -> None:
    real, other = (
        one_group(Trajectories.of(dataset, dataset.split(split))) for split in ("train", "test")
    )
    few, many = (intervals(spec, real, without_people(other), size=size) for size in (20, 320))
    # Not the trips: those of few people have nothing in common, draw after draw.
    unsaturated = ("travel_distance", "poi_all", "category", "transitions", "daily_distance")
    assert all(few[name].spread > 1.5 * many[name].spread for name in unsaturated)


def test_an_average_over_groups_has_a_narrower_interval_than_one_group() -> None:
    real = walks(*[[PARK], [SHOP, CAFE]] * 20)
    synthetic = walks(*[[PARK, SHOP]] * 40)
    one, four = (
        intervals(TOWN, dict.fromkeys(names, real), dict.fromkeys(names, synthetic))
        for names in ("a", "abcd")
    )
    assert one["poi"].estimate == pytest.approx(four["poi"].estimate)
    assert four["poi"].spread == pytest.approx(one["poi"].spread / 2, rel=0.25)


def test_a_comparison_gives_gaps_and_their_share_of_each_metric(
    spec: MetricSpec, by_group: dict[str, dict[str, Trajectories]]
) -> None:
    real = by_group["test"]
    names = list(real)
    training = by_group["train"]
    turned = {name: training[names[place - 1]] for place, name in enumerate(names)}
    models = {"wrong": turned, "right": without_people(training), "floor": training}
    found: Comparison = compare_models(spec, real, models, seed=1)
    # Chance differs between samples with and without people, so gaps are gaps of excess.
    excess = {model: found.scores[model].excess["poi"] for model in models}
    gap, error = found.gap("poi", "wrong", "floor")
    assert gap == excess["wrong"] - excess["floor"] > 3 * error > 0
    share = found.gap_closed("right", "poi", "wrong", "floor")
    assert share == pytest.approx(1 - (excess["right"] - excess["floor"]) / gap)
    assert found.gap_closed("wrong", "poi", "wrong", "floor") == pytest.approx(0)
    assert found.gap_closed("floor", "poi", "wrong", "floor") == pytest.approx(1)
    assert found.gap_closed("wrong", "poi", "floor", "wrong") is None
    assert found.scores["floor"].standard_error["poi"] == found.intervals("floor")["poi"].spread
