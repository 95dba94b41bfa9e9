"""The downstream comparison: a predictor for each group and material, on equal terms."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from bench.downstream import Comparison, average_metrics, compare_predictors
from bench.next_poi import NEXT_POI_METRICS, next_poi_config
from mobatlas import MobatlasError, TrajectoryDataset
from mobatlas.data.dataset import Trajectories
from mobatlas.data.types import HOME, WORK
from mobatlas.evaluation.comparison import group_members, real_groups
from tests.small_town import walks
from tests.tiny import small_city

CONFIG = next_poi_config(
    "quick",
    {
        "embedding": 16,
        "hidden": 16,
        "learning_rate": 0.02,
        "batch": 32,
        "steps": 60,
        "validate_every": 15,
    },
)
SOME = ("<30, M", "30-40, F", "40-50, F")
Material = dict[str, Trajectories]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> TrajectoryDataset:
    return small_city(tmp_path_factory.mktemp("city"), users=400)


@pytest.fixture(scope="module")
def real(dataset: TrajectoryDataset) -> Material:
    groups = real_groups(dataset)
    return {group: groups[group] for group in SOME}


@pytest.fixture(scope="module")
def nonsense(real: Material) -> Material:
    """The visits of the first half of the trajectories in random order."""
    rng = np.random.default_rng(0)
    halves = {group: each.take(np.arange(len(each) // 2)) for group, each in real.items()}
    return {
        group: Trajectories(rng.permutation(each.tokens), each.offsets, each.anchors)
        for group, each in halves.items()
    }


@pytest.fixture(scope="module")
def compared(dataset: TrajectoryDataset, real: Material, nonsense: Material) -> dict[str, Any]:
    small = dict(nonsense)
    small["<30, M"] = small["<30, M"].take(np.arange(7))
    materials = {"real": real, "nonsense": small}
    return compare_predictors(dataset, materials, CONFIG, Comparison(fewest=8, quiet=True))


def with_questions(trajectories: Trajectories) -> int:
    return int(np.sum(np.diff(trajectories.offsets) >= 2))


def test_real_trajectories_teach_more_than_random_ones(compared: dict[str, Any]) -> None:
    real, nonsense = (compared["materials"][name]["average"] for name in ("real", "nonsense"))
    assert real["accuracy"] > nonsense["accuracy"] + 0.05
    assert real["ndcg10"] > nonsense["ndcg10"]
    assert real["geo_error_km"] < nonsense["geo_error_km"]


def test_materials_of_a_group_have_one_size_and_the_same_test_people(
    dataset: TrajectoryDataset, compared: dict[str, Any], nonsense: Material
) -> None:
    test = real_groups(dataset, "test")
    for group in SOME[1:]:
        assert compared["sizes"][group] == with_questions(nonsense[group])
        sensible, random = (
            compared["materials"][name]["groups"][group] for name in ("real", "nonsense")
        )
        predictions = int(np.maximum(np.diff(test[group].offsets) - 1, 0).sum())
        assert sensible["predictions"] == random["predictions"] == predictions
        assert sensible["located"] == random["located"]
        assert sensible["pois"] == random["pois"]
        assert random["learnt"] == np.maximum(np.diff(nonsense[group].offsets) - 1, 0).sum()


def test_averages_are_over_the_groups_that_could_be_compared(compared: dict[str, Any]) -> None:
    assert "material 'nonsense' has" in compared["left_out"]["<30, M"]
    assert "fewer than 8" in compared["left_out"]["<30, M"]
    assert compared["left_out"][">50, F"].startswith(
        "material 'real' has 0 trajectories of two visits"
    )
    assert list(compared["sizes"]) == list(SOME[1:])
    for scores in compared["materials"].values():
        assert list(scores["groups"]) == list(SOME[1:])
        for metric in NEXT_POI_METRICS:
            mean = np.mean([scores["groups"][group][metric] for group in SOME[1:]])
            assert scores["average"][metric] == pytest.approx(mean)
    assert json.loads(json.dumps(compared, allow_nan=False)) == compared


def test_a_size_limits_the_material_and_the_seed_selects_it(
    dataset: TrajectoryDataset, real: Material
) -> None:
    brief = CONFIG.model_copy(update={"steps": 2})
    group = "30-40, F"

    def run(seed: int, **material: Trajectories) -> dict[str, Any]:
        materials = {name: {group: each} for name, each in material.items()}
        comparison = Comparison(size={group: 20}, fewest=8, seed=seed, quiet=True)
        return compare_predictors(dataset, materials, brief, comparison)

    alone = run(1, a=real[group])
    beside = run(1, b=real[group], a=real[group])
    other = run(2, a=real[group])
    assert alone["sizes"] == other["sizes"] == {group: 20}
    assert alone["materials"]["a"] == beside["materials"]["a"] == beside["materials"]["b"]
    assert alone["materials"]["a"] != other["materials"]["a"]
    commuters = walks(*[[HOME, WORK, HOME]] * 50)
    assert run(1, c=commuters)["materials"]["c"]["groups"][group]["learnt"] == 20 * 2


def test_a_metric_that_a_group_lacks_does_not_count_in_the_average() -> None:
    scores: list[dict[str, Any]] = [
        dict.fromkeys(NEXT_POI_METRICS, value) for value in (0.5, 0.7, 0.9)
    ]
    scores[2]["geo_error_km"] = None
    average = average_metrics(dict(zip("abc", scores, strict=True)))
    assert average["geo_error_km"] == pytest.approx(0.6)
    assert average["accuracy"] == pytest.approx(0.7)


def test_a_group_without_test_people_is_reported_and_not_averaged(
    dataset: TrajectoryDataset, tmp_path: Path
) -> None:
    """Test people of one group and validation people of another lose their labels."""
    shutil.copytree(dataset.path, tmp_path / "copy")
    chosen = [(dataset.split_people("test"), 0), (dataset.split_people("val"), 1)]
    unlabelled = np.concatenate(
        [people[dataset.person_groups()[people] == group] for people, group in chosen]
    )
    users = {dataset.people["user_id"][int(person)].as_py() for person in unlabelled}
    labels = pq.read_table(dataset.path / "labels.parquet").to_pandas()
    (tmp_path / "copy" / "labels.parquet").unlink()
    labels[~labels.user_id.isin(users)].to_parquet(
        tmp_path / "copy" / "labels.parquet", index=False
    )
    changed = TrajectoryDataset.open(tmp_path / "copy")
    first, second, third = list(group_members(changed, "test"))[:3]
    groups = {group: real_groups(changed)[group] for group in (first, second, third)}
    brief = CONFIG.model_copy(update={"steps": 1})
    result = compare_predictors(changed, {"real": groups}, brief, Comparison(fewest=8, quiet=True))
    assert result["left_out"][first] == "no test person of the group has two visits"
    assert result["left_out"][second] == "no validation person of the group has two visits"
    assert list(result["materials"]["real"]["groups"]) == [third]
    assert result["materials"]["real"]["average"]["accuracy"] is not None


def test_without_a_comparable_group_there_is_no_average(
    dataset: TrajectoryDataset, real: Material
) -> None:
    comparison = Comparison(fewest=10**6, quiet=True)
    result = compare_predictors(dataset, {"real": real}, CONFIG, comparison)
    assert len(result["left_out"]) == 8
    assert not result["sizes"]
    assert set(result["materials"]["real"]["average"].values()) == {None}


def test_progress_counts_predictors(
    dataset: TrajectoryDataset, real: Material, caplog: pytest.LogCaptureFixture
) -> None:
    brief = CONFIG.model_copy(update={"steps": 2})
    with caplog.at_level(logging.INFO, logger="mobatlas"):
        comparison = Comparison(size=20, fewest=8, quiet=True)
        compare_predictors(dataset, {"real": real}, brief, comparison)
    assert caplog.messages[-1].startswith("next-POI prediction: real, 40-50, F, 3 of 3")


@pytest.mark.parametrize(
    ("groups", "comparison", "sentence"),
    [
        (
            ["30-40 F"],
            Comparison(),
            "material 'x': the dataset has no group '30-40 F'; did you mean '30-40, F'",
        ),
        (
            ["30-40, F"],
            Comparison(size=0, fewest=1),
            "size 0 of group '30-40, F' leaves nothing to learn from",
        ),
        ([], Comparison(), "no material to compare"),
    ],
)
def test_a_comparison_without_usable_material_is_refused(
    dataset: TrajectoryDataset,
    real: Material,
    groups: list[str],
    comparison: Comparison,
    sentence: str,
) -> None:
    materials = {"x": dict.fromkeys(groups, real["30-40, F"])} if groups else {}
    with pytest.raises(MobatlasError, match=sentence) as error:
        compare_predictors(dataset, materials, CONFIG, comparison)
    assert "\n" not in str(error.value)
