"""`mobatlas train`: its output, a finished model, refused input, and several processes."""

from __future__ import annotations

import functools
import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch

from mobatlas.io.manifest import read_manifest
from tests.commands import (
    CONFIG,
    FAMILY,
    FILES,
    OFTEN,
    SAME,
    Refusal,
    World,
    check_same,
    finish_cold,
    last_step,
    lines,
    names,
    refusal_of,
    snapshot,
    start_cold,
    trained_world,
    wait_until,
)

NO_CUDA = pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
# what the autoencoder adds to its latents is drawn in each process for itself
FEW = (
    "--set",
    "autoencoder.steps=20",
    "--set",
    "denoiser.steps=20",
    "--set",
    "autoencoder.noise=0",
)
TWO = ("--devices", 2, "--accelerator", "cpu")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return trained_world(tmp_path_factory.getbasetemp())


@pytest.fixture
def refusal(world: World, tmp_path: Path) -> Refusal:
    return functools.partial(refusal_of, world, tmp_path)


def test_train_makes_a_model_folder(world: World) -> None:
    assert names(world.model) == FILES
    described = json.loads((world.model / "config.json").read_text())
    assert (described["generator"], described["groups"]) == (FAMILY, None)
    assert described["config"]["denoiser"]["steps"] == 60
    manifest = read_manifest(world.model, "model")
    assert manifest.details["dataset"]["hash"] == world.dataset.manifest.content_hash
    assert {line["stage"] for line in lines(world.model)} == {"autoencoder", "denoiser"}
    assert not [name for name in names(world.root) if name.startswith(".")], (
        "no lock, nothing half-written"
    )


def test_json_is_the_report_with_reconstruction_and_peak_memory(world: World) -> None:
    assert world.report == read_manifest(world.model, "model").details["report"]
    assert 0 < world.report["autoencoder"]["reconstruction"] <= 1
    assert world.report["denoiser"]["loss"] > 0
    assert 0.1 < world.report["peak_gb"] < 8
    longer = (
        world.dataset.lengths[world.dataset.split("train")] > CONFIG["train"]["options"]["length"]
    )
    assert world.report["truncated"] == longer.sum() > 0


def test_the_same_seed_gives_the_same_bytes_and_another_one_others(
    world: World, tmp_path: Path
) -> None:
    check_same(world.root / "again", world.model)
    other = world.warm.run(
        *world.train(tmp_path / "other", "--seed", 1, "--set", "denoiser.steps=1")
    )
    assert other.code == 0
    assert "autoencoder" in other.out and "peak memory" in other.out
    assert (tmp_path / "other" / SAME[-1]).read_bytes() != (world.model / SAME[-1]).read_bytes()


def test_a_finished_model_is_resumed_by_doing_nothing(world: World) -> None:
    before = snapshot(world.root)
    again = world.warm.run(*world.train(world.model, "--resume", "--json"))
    assert (again.code, json.loads(again.out)) == (0, world.report)
    assert snapshot(world.root) == before


def test_a_finished_model_is_not_the_model_of_another_configuration(world: World) -> None:
    before = snapshot(world.root)
    for change in (("--set", "denoiser.depth=3"), ("--seed", "7")):
        refused = world.warm.run(*world.train(world.model, "--resume", *change))
        assert refused.code == 2
        assert "training finished with another configuration or seed" in refused.said
    assert snapshot(world.root) == before


def test_a_finished_model_is_not_trained_over_without_overwrite(world: World) -> None:
    before = snapshot(world.root)
    refused = world.warm.run(*world.train(world.model))
    assert refused.code == 2
    assert refused.err == (
        f"mobatlas: {world.model}: this output exists already; "
        "choose another --out or pass --overwrite\n"
    )
    assert snapshot(world.root) == before


def test_a_model_is_overwritten_when_asked(world: World, tmp_path: Path) -> None:
    out = tmp_path / "model"
    shutil.copytree(world.model, out)
    (out / "weights.safetensors").write_bytes(b"old")
    assert world.warm.run(*world.train(out, "--overwrite")).code == 0
    check_same(out, world.model)


def test_a_model_outlives_an_overwrite_that_cannot_begin(world: World, tmp_path: Path) -> None:
    out = tmp_path / "model"
    shutil.copytree(world.model, out)
    refused = world.warm.run(*world.train(out, "--overwrite", "--devices", 0))
    assert refused.code == 2
    assert names(tmp_path) == ["model"]
    check_same(out, world.model)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        pytest.param(
            ["--generator", "latent-difusion"], "did you mean 'latent-diffusion'?", id="generator"
        ),
        pytest.param(["--preset", "papr"], "did you mean 'paper'?", id="preset"),
        pytest.param(
            ["--set", "denoiser.depht=3"],
            "unknown key 'depht' in 'denoiser'; did you mean",
            id="key",
        ),
        pytest.param(["--set", "denoiser.depth=deep"], "'denoiser.depth' is wrong", id="value"),
        pytest.param(["--set", "denoiser.width=30"], "width 30 is not a multiple", id="width"),
        pytest.param(["--set", "denoiser"], "write it as section.key=value", id="assignment"),
        pytest.param(
            ["--config", "nowhere.yaml"], "nowhere.yaml: no such configuration file", id="config"
        ),
        pytest.param(
            ["--accelerator", "cuda"],
            "--accelerator cuda: this machine has no such device",
            marks=NO_CUDA,
            id="cuda",
        ),
        pytest.param(
            ["--accelerator", "quantum"], "--accelerator quantum does not exist", id="accelerator"
        ),
        pytest.param(["--devices", "0"], "--devices 0", id="devices"),
        pytest.param(["--precision", "8"], "--precision 8 does not exist", id="precision"),
        pytest.param(["--seed", "-1"], "seed", id="seed"),
        pytest.param(["--seed", "one"], "invalid value for '--seed'", id="no number"),
        pytest.param(["--sed", "1"], "no such option: --sed", id="no option"),
    ],
)
def test_a_bad_option_is_one_sentence_and_nothing_is_left(
    world: World, refusal: Refusal, tmp_path: Path, options: list[str], sentence: str
) -> None:
    assert sentence in refusal(*world.train(tmp_path / "new" / "model", *options))


@pytest.mark.parametrize(
    ("dataset", "sentence"),
    [
        ("nowhere", "nowhere: no such dataset folder"),
        ("model", "model: this is a model folder, not a dataset folder"),
        ("run.yaml", "run.yaml: this is not a dataset folder"),
        ("city", "city: this is a city folder, not a dataset folder"),
    ],
)
def test_what_is_not_a_dataset_is_one_sentence_and_nothing_is_left(
    world: World, refusal: Refusal, tmp_path: Path, dataset: str, sentence: str
) -> None:
    command = ["train", world.root / dataset, "--out", tmp_path / "new", "--config", world.config]
    assert sentence in refusal(*command)


@pytest.mark.parametrize("out", ["dataset", "dataset/model", "."])
def test_an_out_that_lies_over_the_dataset_is_refused(
    world: World, refusal: Refusal, out: str
) -> None:
    for option in ("--quiet", "--overwrite", "--resume"):
        assert "overlaps with the source" in refusal(*world.train(world.root / out, option)), option


@pytest.mark.parametrize("out", ["city", "run.yaml", "run.yaml/model"])
def test_an_out_that_is_something_else_is_left_alone(
    world: World, refusal: Refusal, out: str
) -> None:
    for option in ("--quiet", "--overwrite", "--resume"):
        assert f"{out}: " in refusal(*world.train(world.root / out, option)), option


@pytest.mark.slow
def test_two_processes_train_to_the_losses_of_one(world: World, tmp_path: Path) -> None:
    few = (*FEW, "--precision", "32-true")  # in bf16 the order of sums shows
    assert world.warm.run(*world.train(tmp_path / "one", *few)).code == 0
    two = finish_cold(start_cold(*world.train(tmp_path / "two", *few, *TWO, "--json")))
    assert two.code == 0, two.err
    assert names(tmp_path) == ["one", "two"]
    assert names(tmp_path / "two") == FILES
    alone, together = lines(tmp_path / "one"), lines(tmp_path / "two")
    assert [(line["stage"], line["step"]) for line in together] == [
        (line["stage"], line["step"]) for line in alone
    ]
    assert [line["loss"] for line in together] == pytest.approx(
        [line["loss"] for line in alone], abs=1e-5
    )
    report = json.loads(two.out)  # printed once
    assert report["denoiser"]["loss"] == together[-1]["loss"]


@pytest.mark.slow
def test_two_processes_stopped_and_killed_end_in_the_same_bytes(
    world: World, tmp_path: Path
) -> None:
    whole, out = tmp_path / "whole", tmp_path / "model"
    assert finish_cold(start_cold(*world.train(whole, *TWO))).code == 0
    process = start_cold(*world.train(out, *TWO, *OFTEN))
    wait_until(lambda: last_step(out, "autoencoder") > 0, "a checkpoint")
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to both
    stopped = finish_cold(process)
    assert "continue with --resume" in stopped.err
    process = start_cold(*world.train(out, *TWO, *OFTEN, "--resume"))
    wait_until(lambda: last_step(out, "denoiser") > 0, "a checkpoint")
    process.kill()  # the first process; the other must end too, because it holds our pipe
    assert finish_cold(process).code == -signal.SIGKILL
    assert finish_cold(start_cold(*world.train(out, *TWO, "--resume"))).code == 0
    check_same(out, whole)
    assert stopped.code == 130
