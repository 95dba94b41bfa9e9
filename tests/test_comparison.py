"""Evaluation by group: equal sizes, the floor, the gap closed, and intervals over people."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest

from bench.score_models import mean_scores
from mobatlas import MobatlasError, TrajectoryDataset
from mobatlas.data.trajectories import Trajectories
from mobatlas.data.vocabulary import HOME
from mobatlas.evaluation.comparison import (
    EVERYBODY,
    Scores,
    bootstrap,
    compare,
    evaluate_groups,
    gap_closed,
    group_members,
    sampling_floor,
)
from mobatlas.evaluation.metrics import MetricSpec
from tests.small_town import CAFE, NAMES, PARK, SHOP, TOWN, small_dataset, walks


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


def test_real_and_synthetic_sizes_are_equal_in_every_group(
    spec: MetricSpec, by_group: dict[str, dict[str, Trajectories]]
) -> None:
    real = by_group["test"]
    synthetic = by_group["train"]
    scores = evaluate_groups(spec, real, synthetic, seed=3)
    assert scores.sizes == {name: min(len(real[name]), len(synthetic[name])) for name in real}
    for metric in NAMES:
        assert scores.average[metric] == pytest.approx(
            np.mean([scores.groups[name][metric] for name in real])
        )
    capped = evaluate_groups(spec, real, synthetic, size=10).sizes
    assert set(capped.values()) == {10}
    assert (
        evaluate_groups(spec, real, synthetic, size=dict.fromkeys(real, 7) | {"x": 1}).sizes[
            "<30, M"
        ]
        == 7
    )
    assert json.loads(json.dumps(scores.as_dict()))["sizes"] == scores.sizes


def test_scores_of_several_draws_are_their_mean() -> None:
    first = Scores(
        {"a": {"poi": 0.2}, "b": {"poi": 0.4}}, {"a": 5, "b": 6}, {"poi": 0.3}, {"distinct": 1.0}
    )
    second = Scores(
        {"a": {"poi": 0.4}, "b": {"poi": 0.8}}, {"a": 5, "b": 6}, {"poi": 0.6}, {"distinct": 0.5}
    )
    mean = mean_scores([first, second])
    assert mean.groups == {"a": {"poi": pytest.approx(0.3)}, "b": {"poi": pytest.approx(0.6)}}
    assert mean.average == {"poi": pytest.approx(0.45)} and mean.sizes == first.sizes
    assert mean_scores([first]).groups == first.groups and mean.diversity == first.diversity


def test_the_seed_alone_decides_who_is_compared(
    spec: MetricSpec, by_group: dict[str, dict[str, Trajectories]]
) -> None:
    real = by_group["test"]
    synthetic = by_group["train"]
    scores = evaluate_groups(spec, real, synthetic, seed=3)
    assert evaluate_groups(spec, real, dict(reversed(synthetic.items())), seed=3) == scores
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
        evaluate_groups(TOWN, {"x": real}, {"x": sample}).groups["x"]["length"]
        for sample in (first, second)
    ]
    assert lengths[0] == lengths[1]


def test_an_evaluation_of_other_groups_is_refused() -> None:
    some = walks([PARK])
    with pytest.raises(MobatlasError, match="group 'b' has no synthetic trajectories"):
        evaluate_groups(TOWN, {"a": some, "b": some}, {"a": some})
    with pytest.raises(MobatlasError, match="group 'b' has no real trajectories"):
        evaluate_groups(TOWN, {"a": some}, {"a": some, "b": some})
    with pytest.raises(
        MobatlasError, match="group 'a' cannot be compared: it has 0 real and 1 synthetic"
    ):
        evaluate_groups(TOWN, {"a": walks()}, {"a": some})
    with pytest.raises(MobatlasError, match="at size 0"):
        evaluate_groups(TOWN, {"a": some}, {"a": some}, size=0)
    with pytest.raises(MobatlasError, match="no group"):
        evaluate_groups(TOWN, {}, {})


def test_the_floor_compares_training_people_with_test_people(
    dataset: TrajectoryDataset, spec: MetricSpec, by_group: dict[str, dict[str, Trajectories]]
) -> None:
    floor = sampling_floor(dataset, spec, seed=2)
    assert floor.groups == evaluate_groups(spec, by_group["test"], by_group["train"], seed=2)
    assert floor.everybody.sizes == {EVERYBODY: len(dataset.split("test"))}


def test_the_floor_is_above_zero_and_sinks_with_more_people(
    dataset: TrajectoryDataset, spec: MetricSpec
) -> None:
    few, more, all_of_them = (
        sampling_floor(dataset, spec, size=size).everybody.average for size in (20, 80, 320)
    )
    for metric in NAMES:
        assert few[metric] > more[metric] > all_of_them[metric] > 0
    groups = sampling_floor(dataset, spec).groups
    assert groups is not None
    assert all(groups.average[metric] > all_of_them[metric] for metric in NAMES)


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
    assert gap_closed(0.2, baseline=0.31, target=0.3, spread=0.02) is None
    assert gap_closed(0.2, baseline=0.5, target=0.25, spread=0.25) == pytest.approx(1.2)
    assert gap_closed(math.nan, baseline=0.5, target=0.1) is None
    assert gap_closed(0.2, baseline=math.nan, target=0.1) is None


def test_the_interval_lies_around_the_average_of_the_evaluation(
    dataset: TrajectoryDataset, spec: MetricSpec, by_group: dict[str, dict[str, Trajectories]]
) -> None:
    people = {name: dataset.person[rows] for name, rows in group_members(dataset, "test").items()}
    sides = by_group["test"], by_group["train"]
    result = bootstrap(spec, *sides, people, size=40, seed=3, resamples=50)
    assert {name: one.estimate for name, one in result.items()} == pytest.approx(
        evaluate_groups(spec, *sides, size=40, seed=3).average
    )
    for one in result.values():
        assert 0 <= one.low < one.estimate < one.high <= 1
        assert 0 < one.spread < one.high - one.low
    assert bootstrap(spec, *sides, people, size=40, seed=3, resamples=50) == result


def test_resamples_agree_with_a_loop_over_people() -> None:
    """Three people of one window or two: the spread over all 27 equally likely draws."""
    real = walks([PARK], [PARK, SHOP], [SHOP], [CAFE])
    synthetic = walks(*[[PARK, SHOP]] * 4)
    person = np.array([7, 7, 3, 9])
    draws = []
    for drawn in np.ndindex(3, 3, 3):
        rows = [
            row for number in drawn for row in np.flatnonzero(person == np.unique(person)[number])
        ]
        draws.append(compare(TOWN, real.take(np.array(rows)), synthetic)["poi"])
    result = bootstrap(TOWN, {"x": real}, {"x": synthetic}, {"x": person}, resamples=20_000)["poi"]
    assert result.spread == pytest.approx(np.std(draws), rel=0.02)


def test_windows_of_one_person_are_drawn_together() -> None:
    real = walks([PARK, SHOP], [PARK], [SHOP, CAFE])
    synthetic = walks(*[[PARK]] * 3)
    one = bootstrap(
        TOWN, {"x": real}, {"x": synthetic}, {"x": np.zeros(3, dtype=np.int64)}, resamples=20
    )
    assert all(interval.spread == pytest.approx(0, abs=1e-12) for interval in one.values())
    three = bootstrap(TOWN, {"x": real}, {"x": synthetic}, {"x": np.arange(3)}, resamples=20)
    assert three["poi"].spread > 0.01


def test_more_people_narrow_the_interval(dataset: TrajectoryDataset, spec: MetricSpec) -> None:
    rows = dataset.split("train")
    other = dataset.split("test")
    real, synthetic = ({"x": Trajectories.of(dataset, index)} for index in (rows, other))
    few, many = (
        bootstrap(spec, real, synthetic, {"x": dataset.person[rows]}, size=size, resamples=60)
        for size in (20, 320)
    )
    # Not the trips: those of few people have nothing in common, draw after draw.
    unsaturated = ("travel_distance", "poi_all", "category", "transitions", "daily_distance")
    assert all(few[name].spread > 1.5 * many[name].spread for name in unsaturated)


def test_an_average_over_groups_has_a_narrower_interval_than_one_group() -> None:
    real = walks(*[[PARK], [SHOP, CAFE]] * 20)
    synthetic = walks(*[[PARK, SHOP]] * 40)
    person = np.arange(40)
    one, four = (
        bootstrap(
            TOWN,
            dict.fromkeys(names, real),
            dict.fromkeys(names, synthetic),
            dict.fromkeys(names, person),
        )
        for names in ("a", "abcd")
    )
    assert one["poi"].estimate == pytest.approx(four["poi"].estimate)
    assert four["poi"].spread == pytest.approx(one["poi"].spread / 2, rel=0.25)
