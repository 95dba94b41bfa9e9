"""Finetune: the estimate of a region, the gap to hard samples, resuming, and no use of labels."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bench.gradients import gradient_agreement
from mobatlas import MobatlasError
from mobatlas.config import build
from mobatlas.data.dataset import TrajectoryDataset
from mobatlas.features.divergences import DIVERGENCES, js
from mobatlas.features.maps import TokenFeature, build_feature
from mobatlas.generators.protocol import Generator
from mobatlas.groups import DEFAULT_GROUPS, Groups
from mobatlas.regions.build import RegionsOptions
from mobatlas.regions.store import RegionsFolder, build_regions, load_regions
from mobatlas.supervision.calibration import PlainSampler
from mobatlas.supervision.finetune import (
    PRESETS,
    FinetuneConfig,
    Goal,
    Target,
    allocate,
    finetune,
)
from mobatlas.training.loop import Execution, Share, Trainer
from tests.tiny import OPTIONS, fitted, small_city
from tests.trainers import make_trainer

BRIEF: dict[str, Any] = {
    "steps": 4,
    "batch": 16,
    "learning_rate": 1e-3,
    "warmup": 0,
    "rollout_steps": 2,
    "validate_every": 2,
    "validation_samples": 16,
}
FINAL = "finetune-final.safetensors"


class Crash(Exception):  # noqa: N818
    """The process dies here, as far as the trainer can tell."""


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> TrajectoryDataset:
    return small_city(tmp_path_factory.mktemp("city"), users=200, pois=12)


@pytest.fixture(scope="module")
def model(dataset: TrajectoryDataset) -> Generator:
    """Its autoencoder is well trained; its denoiser is not."""
    family = OPTIONS["latent-diffusion"]
    longer = family["autoencoder"] | {"steps": 200}
    return fitted(
        "latent-diffusion", dataset, autoencoder=longer, denoiser=family["denoiser"] | {"steps": 60}
    )


@pytest.fixture(scope="module")
def regions(dataset: TrajectoryDataset, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("regions") / "districts"
    build_regions(
        dataset.path, folder, RegionsOptions(by="home_district", features=("poi", "category"))
    )
    return folder


def tuned(
    model: Generator,
    dataset: TrajectoryDataset,
    regions: Path,
    trainer: Trainer | None = None,
    **changes: Any,
) -> tuple[Generator, dict[str, Any]]:
    on_validation = changes.pop("on_validation", None)
    config = build(FinetuneConfig, BRIEF | changes, "finetune")
    return finetune(model, dataset, regions, trainer or quiet(), config, on_validation)


def quiet(folder: Path | None = None, **options: Any) -> Trainer:
    return make_trainer(
        folder, config={}, **({"resume": False, "quiet": True, "precision": "32-true"} | options)
    )


def weights(model: Generator) -> list[torch.Tensor]:
    return [tensor.clone() for tensor in model.network.state_dict().values()]


def same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def a_target(shares: list[list[float]], values: list[np.ndarray[Any, Any]]) -> Target:
    """Feature maps over as many tokens as they have bins."""
    goals = []
    for number, each in enumerate(values):
        bins = np.arange(each.shape[1])
        goals.append(Goal(TokenFeature(f"map{number}", tuple(map(str, bins)), bins), bins, each))
    homes = [np.arange(40.0).reshape(10, 4) for _ in shares]
    return Target("train", goals, "js", np.array(shares), homes, np.arange(len(shares)))


# ---- the estimate of a region


@given(
    st.lists(st.floats(0, 1), min_size=1, max_size=9).filter(lambda shares: sum(shares) > 0.1),
    st.integers(9, 600),
)
def test_every_group_of_a_region_has_samples_in_proportion(shares: list[float], n: int) -> None:
    p = np.array(shares) / sum(shares)
    counts = allocate(p, n)
    present = p > 0
    assert counts.sum() == n
    assert (counts[present] >= 1).all() and not counts[~present].any()
    assert (np.abs(counts - (present + p * (n - present.sum()))) < 1).all()


def test_stratified_groups_have_the_mean_of_random_ones_with_less_noise() -> None:
    """Fixed proportions of groups remove the noise of drawing groups at random."""
    rng = np.random.default_rng(0)
    n = 32
    repeats = 4_000
    shares = np.array([0.5, 0.3, 0.15, 0.05, 0.0])
    means = np.array([0.0, 1.0, 4.0, 9.0, 50.0])
    target = a_target([shares.tolist()], [np.ones((1, 2))])
    stratified = np.empty(repeats)
    drawn = np.empty(repeats)
    for repeat in range(repeats):
        people = target.people(0, n, rng)
        stratified[repeat] = people.weights @ rng.normal(means[people.groups], 0.5)
        drawn[repeat] = rng.normal(means[rng.choice(5, n, p=shares)], 0.5).mean()
    truth = shares @ means
    error = np.array([stratified.std(), drawn.std()]) / math.sqrt(repeats)
    assert stratified.mean() == pytest.approx(truth, abs=4 * error[0])
    assert drawn.mean() == pytest.approx(truth, abs=4 * error[1])
    assert stratified.var() < drawn.var() / 10


def test_counts_mix_before_they_become_shares() -> None:
    """Half the people visit place 1 once, half visit place 2 nine times: its share is 0.9."""
    target = a_target([[0.5, 0.5]], [np.array([[0.5, 4.5]])])
    people = target.people(0, 10, np.random.default_rng(0))
    counts = np.array([[1.0, 0.0], [0.0, 9.0]])[people.groups]
    assert target.loss([people.weights @ counts], 0) == pytest.approx(0)
    assert target.loss([np.array([0.5, 0.5])], 0) == pytest.approx(
        js(np.array([0.1, 0.9]), np.array([0.5, 0.5]))
    )


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_the_loss_is_a_sum_over_maps_of_known_bins_in_arrays_and_tensors_alike(
    divergence: str,
) -> None:
    values = [
        np.array([[1.0, 3.0, np.nan]]),
        np.array([[20.0, 20.0]]),
        np.array([[np.nan, np.nan]]),
    ]
    target = replace(a_target([[1.0]], values), divergence=divergence)
    found = [np.array([2.0, 2.0, 99.0]), np.array([30.0, 10.0]), np.array([1.0, 2.0])]
    measure = DIVERGENCES[divergence]
    expected = measure(np.array([0.25, 0.75]), np.array([0.5, 0.5])) + measure(
        np.array([0.5, 0.5]), np.array([0.75, 0.25])
    )
    assert target.loss(found, 0) == pytest.approx(expected)
    assert float(target.loss([torch.from_numpy(each) for each in found], 0)) == pytest.approx(
        expected
    )


def test_hidden_coordinates_are_a_share_of_the_simulated_people() -> None:
    target = a_target([[1.0]], [np.ones((1, 2))])
    people = target.people(0, 2_000, np.random.default_rng(0), hidden=0.25)
    assert np.isnan(people.anchors).all(1).mean() == pytest.approx(0.25, abs=0.04)
    assert np.isfinite(target.people(0, 100, np.random.default_rng(0)).anchors).all()


# ---- the gap of the published code


def by_group(dataset: TrajectoryDataset, folder: Path) -> Target:
    """The groups themselves as regions, with everybody's homes."""
    table = load_regions(folder)
    feature = build_feature("poi", dataset.vocabulary)
    assert table.aggregates.features == feature.bins
    goal = Goal(feature, np.arange(len(feature.bins)), table.aggregates.values)
    homes = [dataset.anchors[dataset.split_people("train")]] * len(DEFAULT_GROUPS)
    return Target("train", [goal], "js", table.composition.shares, homes, np.arange(len(homes)))


@pytest.mark.parametrize("early", [False, True])
def test_steps_go_down_the_aggregate_loss(
    model: Generator, dataset: TrajectoryDataset, tmp_path: Path, early: bool
) -> None:
    """Soft and hard losses of the same people and noise fall during training."""
    build_regions(dataset.path, tmp_path / "groups", RegionsOptions(partition="demogroups"))
    target = by_group(dataset, tmp_path / "groups")
    people = {
        group: target.people(group, 64, np.random.default_rng(group))
        for group in range(len(DEFAULT_GROUPS))
    }

    def losses(model: Generator) -> tuple[float, float]:
        soft = []
        for group, own in people.items():
            counts = (
                target.goals[0]
                .feature.soft(model.soft_sample(own.groups, own.anchors, seed=group))
                .detach()
                .numpy()
            )
            soft.append(target.loss([own.weights @ counts], group))
        return float(np.mean(soft)), target.score(
            PlainSampler(model, dataset.anchors), people, seed=0
        )

    changes: dict[str, Any] = {
        "batch": 64,
        "ema": None,
        "rollout_steps": None,
        "validation_samples": 64,
        "early": early,
    }
    found, report = tuned(
        model, dataset, tmp_path / "groups", steps=16, validate_every=16, **changes
    )
    assert report["validated_on"] == "train"  # too few validation people for eight regions
    assert report["best"]["step"] == 16
    before = losses(model.with_groups(DEFAULT_GROUPS, seed=5, equal_groups=True))
    after = losses(found)
    assert after[0] < 0.98 * before[0]
    if early:  # the other gradient hardly knows what is sampled
        assert after[1] < 0.95 * before[1]


def test_gradients_agree_where_nothing_is_drawn_and_less_where_few_people_are(
    model: Generator, dataset: TrajectoryDataset, tmp_path: Path
) -> None:
    build_regions(dataset.path, tmp_path / "groups", RegionsOptions(partition="demogroups"))
    target = by_group(dataset, tmp_path / "groups")
    student = model.with_groups(DEFAULT_GROUPS, seed=5, equal_groups=True)
    few, many = (
        gradient_agreement(target, student, FinetuneConfig(batch=size), seed=0) for size in (2, 256)
    )
    assert -1 <= few < many <= 1
    assert many > 0.5


# ---- results of a run


def test_the_learning_curve_has_both_losses_and_the_numbers_of_the_hook(
    model: Generator, dataset: TrajectoryDataset, regions: Path
) -> None:
    seen: list[bool] = []

    def hook(now: Generator) -> dict[str, float]:
        seen.append(now.groups == DEFAULT_GROUPS and not now.network.training)
        return {"jsd": len(seen) / 8}

    _, report = tuned(model, dataset, regions, steps=5, on_validation=hook)
    curve = report["curve"]
    assert [row["step"] for row in curve] == [0, 2, 4, 5]
    assert [row["jsd"] for row in curve] == [1 / 8, 2 / 8, 3 / 8, 4 / 8]
    assert [row["train"] is None for row in curve] == [True, False, False, False]
    assert all(0 < row["validation"] < 2 for row in curve) and all(seen)
    best = min(curve, key=lambda row: row["validation"])
    assert report["best"] == best
    assert report["validated_on"] == "val"
    assert report["left_out"] == []
    json.dumps(report)


def test_the_weights_of_the_best_validation_are_used(
    model: Generator, dataset: TrajectoryDataset, regions: Path
) -> None:
    worse: dict[str, Any] = {
        "learning_rate": 3.0,
        "warmup": 0,
        "steps": 1,
        "validate_every": 1,
        "ema": None,
    }
    found, report = tuned(model, dataset, regions, **worse, validation_samples=64)
    assert report["best"]["step"] == 0
    assert same(
        weights(found), weights(model.with_groups(DEFAULT_GROUPS, seed=5, equal_groups=True))
    )


def test_finetuning_continues_from_a_tilted_model_and_leaves_it_unchanged(
    model: Generator, dataset: TrajectoryDataset, regions: Path
) -> None:
    tilted = model.with_groups(DEFAULT_GROUPS, seed=9)
    before = weights(tilted)
    found, _ = tuned(tilted, dataset, regions, learning_rate=1e-9, steps=1)
    assert same(before, weights(tilted))
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(before, weights(found), strict=True))
    with pytest.raises(MobatlasError, match="the model has the groups"):
        tuned(model.with_groups(Groups.of({"sex": ("M", "F")}), 0), dataset, regions)


def test_a_masked_word_is_left_out_on_both_sides(
    model: Generator, dataset: TrajectoryDataset, regions: Path
) -> None:
    stages: list[Any] = []

    class Watching(Trainer):
        def run(self, stage: Any) -> dict[str, float]:
            stages.append(stage)
            return super().run(stage)

    def first_loss(**changes: Any) -> float:
        tuned(
            model,
            dataset,
            regions,
            Watching(None, Execution(quiet=True, accelerator="cpu"), seed=5),
            steps=1,
            **changes,
        )
        return float(stages[-1].network.curve[-1, 0])

    assert first_loss(mask=("HOME", "WORK")) != first_loss()
    with pytest.raises(MobatlasError, match="did you mean 'HOME'"):
        tuned(model, dataset, regions, mask=("HOEM",))


def test_a_run_that_was_killed_ends_in_the_same_bytes(
    model: Generator, dataset: TrajectoryDataset, regions: Path, tmp_path: Path
) -> None:
    whole = tmp_path / "whole" / "training"
    killed = tmp_path / "killed" / "training"
    changes: dict[str, Any] = {"steps": 7, "validate_every": 2}
    _, expected = tuned(model, dataset, regions, quiet(whole), **changes)
    validations = 0

    def crash(now: Generator) -> dict[str, float]:
        nonlocal validations
        validations += 1
        if validations == 4:  # at step 6; the last checkpoint is of step 5
            raise Crash
        return {}

    with pytest.raises(Crash):
        tuned(
            model,
            dataset,
            regions,
            quiet(killed, checkpoint_steps=1),
            on_validation=crash,
            **changes,
        )
    assert (killed / "finetune-00000005.safetensors").exists()
    for _ in range(2):  # resumes, then reads the finished stage
        _, report = tuned(model, dataset, regions, quiet(killed, resume=True), **changes)
        assert report == expected
        assert (killed / FINAL).read_bytes() == (whole / FINAL).read_bytes()


@pytest.mark.parametrize("change", ["shuffled", "deleted"])
def test_no_label_is_read(
    model: Generator, dataset: TrajectoryDataset, regions: Path, tmp_path: Path, change: str
) -> None:
    shutil.copytree(dataset.path, tmp_path / "copy")
    path = tmp_path / "copy" / "labels.parquet"
    labels = pq.read_table(path)
    path.unlink()
    if change == "shuffled":
        order = np.random.default_rng(0).permutation(labels.num_rows)
        pq.write_table(labels.take(order).set_column(0, "user_id", labels["user_id"]), path)
    with_labels, report = tuned(model, dataset, regions)
    without, other = tuned(model, TrajectoryDataset.open(tmp_path / "copy"), regions)
    assert same(weights(with_labels), weights(without))
    assert report == other


# ---- bad input


def test_a_divergence_that_does_not_exist_is_refused_with_the_nearest() -> None:
    with pytest.raises(
        MobatlasError, match=r"--divergence helinger does not exist; did you mean 'hellinger'"
    ):
        build(FinetuneConfig, {"divergence": "helinger"}, "finetune")
    for name in PRESETS:
        build(FinetuneConfig, PRESETS[name], name)


def test_a_batch_smaller_than_the_groups_is_refused(
    model: Generator, dataset: TrajectoryDataset, regions: Path
) -> None:
    with pytest.raises(MobatlasError, match=r"a region has \d groups; set finetune.batch"):
        tuned(model, dataset, regions, batch=1)


def test_regions_without_known_aggregates_are_left_out_and_refused_if_all_are(
    model: Generator, dataset: TrajectoryDataset, regions: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = load_regions(regions)
    table = replace(
        table, aggregates=replace(table.aggregates, values=table.aggregates.values.copy())
    )
    table.aggregates.values[0] = np.nan
    monkeypatch.setattr("mobatlas.regions.store.RegionsFolder.regions", table)
    assert tuned(model, dataset, regions, steps=1)[1]["left_out"] == [table.composition.regions[0]]
    table.aggregates.values[1:] = 0
    with pytest.raises(MobatlasError, match="all aggregates are zero, masked or suppressed"):
        tuned(model, dataset, regions)


def test_a_region_without_people_is_named(
    model: Generator, dataset: TrajectoryDataset, regions: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RegionsFolder.open(regions)
    name = folder.regions.composition.regions[1]
    elsewhere = {
        user: region for user, region in (folder.assignment or {}).items() if region != name
    }
    monkeypatch.setattr("mobatlas.regions.store.RegionsFolder.assignment", elsewhere)
    with pytest.raises(MobatlasError, match=f"region '{name}' has no train people"):
        tuned(model, dataset, regions)


def test_features_of_another_vocabulary_are_refused(
    model: Generator, dataset: TrajectoryDataset, regions: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = load_regions(regions)
    names = tuple(name.replace("poi:HOME", "poi:HUME") for name in table.aggregates.features)
    other = replace(table, aggregates=replace(table.aggregates, features=names))
    monkeypatch.setattr("mobatlas.regions.store.RegionsFolder.regions", other)
    with pytest.raises(
        MobatlasError, match="feature 'poi:HUME' is not in the vocabulary; did you mean 'poi:HOME'"
    ):
        tuned(model, dataset, regions)


def test_published_tables_use_all_homes_and_validate_on_training_aggregates(
    model: Generator, dataset: TrajectoryDataset, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Some categories of two regions, one cell suppressed, and nobody known to live there."""
    assert dataset.groups is not None
    counts = [
        f'{region},"{name}",{number + shift}\n'
        for region, shift in (("A", 1), ("B", 3))
        for number, name in enumerate(dataset.groups.names)
    ]
    (tmp_path / "p.csv").write_text("region,group,count\n" + "".join(counts))
    (tmp_path / "v.csv").write_text(
        "region,feature,value,n\nA,category:home,5,50\nA,category:work,<5,50\n"
        "B,category:home,4,50\nB,category:work,2,50\n"
    )
    build_regions(
        dataset.path,
        tmp_path / "published",
        RegionsOptions(composition=tmp_path / "p.csv", aggregates=tmp_path / "v.csv"),
    )
    _, report = tuned(model, dataset, tmp_path / "published", steps=1)
    assert (report["validated_on"], report["left_out"]) == ("train", [])
    assert "the best weights are chosen on training people" in caplog.text


def test_several_processes_are_refused(
    model: Generator, dataset: TrajectoryDataset, regions: Path
) -> None:
    trainer = quiet()
    trainer.share = Share(0, 2)
    with pytest.raises(MobatlasError, match="--devices 1"):
        tuned(model, dataset, regions, trainer)
