"""Snapshots of a training, and the learning curve that is drawn from them."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from bench.checkpoints import list_snapshots, load_snapshot
from bench.report.learning_curve import learning_curve_table
from bench.score_models import score_everybody, score_groups
from mobatlas import MobatlasError, TrajectoryDataset
from mobatlas.evaluation.metrics import PAPER_METRICS, MetricSpec
from mobatlas.generators.store import load_model
from mobatlas.pipeline.models import train as train_model
from mobatlas.regions.build import RegionsOptions
from mobatlas.regions.store import build_regions
from mobatlas.training.checkpoints import named_tensors
from mobatlas.training.loop import Execution, Share
from tests.outcomes import refused, run
from tests.supervised import TUNING
from tests.tiny import OPTIONS, small_city, with_other_labels
from tests.trainers import (
    FINAL,
    Crash,
    at_step,
    crash,
    make_stage,
    names,
    regression,
    train,
    undisturbed_bytes,
)

PNG = b"\x89PNG"
FEW = {"steps": 10, "batch": 32, "learning_rate": 3e-3, "warmup": 2}
SEQUENCES: dict[str, Any] = OPTIONS["autoregressive"] | {
    "training": FEW,
    "weighted_fit": {"steps": 6, "learning_rate": 3e-3, "warmup": 2},
}
DIFFUSION: dict[str, Any] = OPTIONS["latent-diffusion"] | {
    "autoencoder": OPTIONS["latent-diffusion"]["autoencoder"] | FEW | {"steps": 5},
    "denoiser": OPTIONS["latent-diffusion"]["denoiser"] | FEW | {"steps": 5},
}
CURVE = ["step-00000004.json", "step-00000008.json", "step-00000010.json"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "model" / "training"


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> TrajectoryDataset:
    return small_city(tmp_path_factory.mktemp("city"), users=400, pois=20)


@pytest.fixture(scope="module")
def model(dataset: TrajectoryDataset) -> Path:
    """A model of phase 1 with a snapshot every four steps."""
    return trained(dataset.path, dataset.path.with_name("model"), 4)


def trained(dataset: Path, out: Path, snapshot_steps: int | None) -> Path:
    execution = Execution(quiet=True, snapshot_steps=snapshot_steps)
    train_model(
        dataset, out, generator="autoregressive", values=SEQUENCES, seed=2, execution=execution
    )
    return out


def snapshots(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((folder / "snapshots").iterdir())}


def same_weights(path: Path, network: nn.Module) -> bool:
    saved = load_file(path)
    weights = named_tensors(network)
    return saved.keys() == weights.keys() and all(
        torch.equal(saved[name], weights[name].cpu()) for name in saved
    )


@pytest.mark.parametrize(
    ("every", "steps"), [(5, [5, 10, 12]), (4, [4, 8, 12]), (100, [12]), (None, [])]
)
def test_snapshots_appear_after_every_n_steps_and_at_the_end(
    folder: Path, every: int | None, steps: list[int]
) -> None:
    stage = make_stage()
    train(folder, stage, snapshot_steps=every)
    found = list_snapshots(folder.parent, "mlp")
    assert list(found) == steps
    assert [path.name for path in found.values()] == [f"mlp-{s:08d}.safetensors" for s in steps]
    if steps:
        assert same_weights(found[12], stage.network)
    else:
        assert not (folder.parent / "snapshots").exists()


def test_a_snapshot_holds_the_moving_average_of_the_weights(folder: Path) -> None:
    seen: list[dict[str, Tensor]] = []

    def watched(network: nn.Module, step: int, share: Share) -> Tensor:
        seen.append({name: w.detach().clone() for name, w in named_tensors(plain.network).items()})
        return regression(network, step, share)

    plain = make_stage(loss=watched, ema=None)
    train(None, plain)
    train(folder, make_stage(ema=0.5), snapshot_steps=5)
    average = seen[0]
    for done in range(1, 11):
        decay = min(0.5, done / (9 + done))
        average = {name: decay * average[name] + (1 - decay) * seen[done][name] for name in average}
        if done in (5, 10):
            saved = load_file(list_snapshots(folder.parent, "mlp")[done])
            for name, tensor in average.items():
                torch.testing.assert_close(saved[name], tensor)
                assert not torch.equal(saved[name], seen[done][name])


def test_snapshots_change_nothing_in_the_trained_weights(folder: Path) -> None:
    train(folder, snapshot_steps=1)
    assert (folder / FINAL).read_bytes() == undisturbed_bytes()
    assert names(folder) == [FINAL]


def test_a_training_without_a_folder_writes_no_snapshots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert train(None, snapshot_steps=2)["loss"] > 0
    assert names(tmp_path) == []


def test_a_run_that_was_killed_and_resumed_writes_the_same_snapshots(tmp_path: Path) -> None:
    whole = tmp_path / "whole" / "training"
    train(whole, snapshot_steps=3)
    expected = snapshots(whole.parent)
    assert len(expected) == 4
    for steps in (2, 3, 5, 6, 7, 11):  # checkpoints are after steps 4 and 8
        folder = tmp_path / str(steps) / "training"
        with pytest.raises(Crash):
            train(
                folder,
                make_stage(loss=at_step(steps, crash)),
                checkpoint_steps=4,
                snapshot_steps=3,
            )
        train(folder, snapshot_steps=3)
        assert snapshots(folder.parent) == expected
        assert (folder / FINAL).read_bytes() == undisturbed_bytes()


def test_a_run_that_starts_again_forgets_the_snapshots_of_an_earlier_attempt(folder: Path) -> None:
    with pytest.raises(Crash):
        train(folder, make_stage(loss=at_step(5, crash)), snapshot_steps=2)
    assert list(list_snapshots(folder.parent, "mlp")) == [2, 4]
    train(folder, snapshot_steps=5)
    assert list(list_snapshots(folder.parent, "mlp")) == [5, 10, 12]


def test_a_damaged_snapshot_and_that_of_another_network_are_refused(folder: Path) -> None:
    train(folder, snapshot_steps=6)
    path = list_snapshots(folder.parent, "mlp")[6]
    with pytest.raises(MobatlasError, match=r"mlp-00000006.*it belongs to another model"):
        load_snapshot(path, make_stage(width=8).network)
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(
        MobatlasError, match=r"mlp-00000006.safetensors: .*not a readable safetensors file"
    ):
        load_snapshot(path, make_stage().network)


def test_a_model_keeps_its_snapshots_and_the_last_is_the_model(model: Path) -> None:
    found = list_snapshots(model, "transformer")
    assert list(found) == [4, 8, 10]
    network = load_model(model).generator.network
    assert same_weights(found[10], network)
    assert not same_weights(found[8], network)
    load_snapshot(found[4], network)
    assert same_weights(found[4], network)


def test_a_model_with_and_without_snapshots_has_the_same_bytes(
    dataset: TrajectoryDataset, model: Path, tmp_path: Path
) -> None:
    plain = trained(dataset.path, tmp_path / "plain", None)
    for name in ("weights.safetensors", "config.json"):
        assert (plain / name).read_bytes() == (model / name).read_bytes()
    assert {*names(model)} - {*names(plain)} == {"snapshots"}


@pytest.mark.parametrize("change", ["shuffled", "deleted"])
def test_snapshots_do_not_depend_on_labels(
    dataset: TrajectoryDataset, model: Path, tmp_path: Path, change: str
) -> None:
    copy = with_other_labels(dataset, tmp_path / "dataset", change)
    assert snapshots(trained(copy, tmp_path / "model", 4)) == snapshots(model)


def test_each_stage_of_train_and_supervise_has_snapshots(
    dataset: TrajectoryDataset, tmp_path: Path
) -> None:
    """Of finetune too, whose network is trained together with its own record of the curve."""
    config = tmp_path / "run.yaml"
    train = {"generator": "latent-diffusion", "options": DIFFUSION}
    config.write_text(json.dumps({"train": train}))
    phase1 = ("train", dataset.path, "--config", config, "--quiet", "--out", tmp_path / "phase1")
    assert run(*phase1, "--snapshot-steps", 3).code == 0
    for stage in ("autoencoder", "denoiser"):
        assert list(list_snapshots(tmp_path / "phase1", stage)) == [3, 5]
    build_regions(dataset.path, tmp_path / "regions", RegionsOptions(partition="demogroups"))
    tuning = [f"finetune.{name}={value}" for name, value in TUNING.items()]
    small = ["calibration.pool=64", "calibration.candidates=2", *tuning]
    done = run(
        "supervise",
        tmp_path / "phase1",
        tmp_path / "regions",
        *("--strategy", "finetune", "--snapshot-steps", 2, "--quiet"),
        *(word for each in small for word in ("--set", each)),
        *("--out", tmp_path / "tuned"),
    )
    assert done.code == 0, done.err
    assert names(tmp_path / "tuned" / "snapshots") == [
        "finetune-00000002.safetensors",
        "finetune-00000004.safetensors",
    ]
    generator = load_model(tmp_path / "tuned").generator
    assert load_file(list_snapshots(tmp_path / "tuned", "finetune")[4]).keys() == (
        named_tensors(generator.network).keys()
    )
    curve = curve_of(tmp_path / "tuned", tmp_path / "curve")
    assert (curve["stage"], [row["step"] for row in curve["rows"]]) == ("finetune", [2, 4])
    assert dataset.groups is not None
    assert set(curve["rows"][0]["model"]["groups"]) == set(dataset.groups.names)
    load_snapshot(list_snapshots(tmp_path / "tuned", "finetune")[4], generator.network)
    spec = MetricSpec.of(dataset)
    scores = score_groups(dataset, spec, {"model": generator}, seed=0)
    for name in PAPER_METRICS:
        assert curve["rows"][1]["model"][name]["jsd"] == pytest.approx(
            scores["model"].average[name], abs=1e-5
        )
        assert curve["rows"][1]["floor"][name]["jsd"] == pytest.approx(
            scores["floor"].average[name], abs=1e-5
        )
    assert curve_of(tmp_path / "phase1", tmp_path / "first")["stage"] == "denoiser"


def curve_of(model: Path, out: Path) -> dict[str, Any]:
    done = run("bench", "checkpoints", model, "--out", out, "--quiet")
    assert done.code == 0, done.err
    result: dict[str, Any] = json.loads((out / "learning_curve.json").read_text())
    return result


def test_a_learning_curve_has_a_row_for_each_snapshot_and_the_floor(
    dataset: TrajectoryDataset, model: Path, tmp_path: Path
) -> None:
    out = tmp_path / "curve"
    result = curve_of(model, out)
    assert (result["model"], result["stage"]) == ("model", "transformer")
    words = result["command"].split()
    assert words[:4] == ["python", "-m", "bench", "checkpoints"]
    assert "model" in words and words[-2:] == ["--out", "curve"], "it can be repeated"
    assert [row["step"] for row in result["rows"]] == [4, 8, 10]
    [table] = out.rglob("*.csv")
    with table.open(encoding="utf-8", newline="") as handle:
        rows = list(csv.reader(line for line in handle if line.strip()))
    head = next(number for number, row in enumerate(rows) if row[0] == "step")
    assert [row[0] for row in rows[head + 1 : head + 5]] == ["4", "8", "10", "floor"]
    assert rows[head][1:3] == ["Spatial", "excess, Spatial"] and len(rows[head]) == 9
    assert (out / "learning_curve.png").read_bytes().startswith(PNG)
    assert table.with_suffix(".md").exists()
    # The last snapshot scores as the finished model does.
    scores = score_everybody(dataset, MetricSpec.of(dataset), load_model(model).generator, seed=0)
    last = result["rows"][-1]["model"]
    for name in (*PAPER_METRICS, "poi_all", "flows", "length"):
        assert last[name] == pytest.approx(
            {
                "jsd": scores.average[name],
                "excess": scores.excess[name],
                "standard_error": scores.standard_error[name],
            },
            abs=1e-5,
        )
    assert result["rows"][0]["model"] != last
    floors = [row["floor"] for row in result["rows"]]
    assert floors == [floors[0]] * 3
    assert floors[0]["poi"]["jsd"] < last["poi"]["jsd"], "ten steps do not reach real people"


def test_a_learning_curve_resumes_with_the_snapshots_that_are_not_scored(
    model: Path, tmp_path: Path
) -> None:
    out = tmp_path / "curve"
    first = curve_of(model, out)
    cells = out / "seed-0"
    assert [path.name for path in sorted(cells.glob("step-*.json"))] == CURVE
    before = {name: (cells / name).stat().st_mtime_ns for name in CURVE}
    assert curve_of(model, out) == first
    (cells / CURVE[1]).unlink()
    assert curve_of(model, out) == first
    after = {name: (cells / name).stat().st_mtime_ns for name in CURVE}
    assert [name for name in CURVE if before[name] != after[name]] == [CURVE[1]]


def test_wrong_models_and_options_of_a_learning_curve_are_refused(
    model: Path, tmp_path: Path
) -> None:
    out = tmp_path / "curve"
    plain = tmp_path / "plain"
    shutil.copytree(model, plain, ignore=shutil.ignore_patterns("snapshots"))
    sentence = refused("bench", "checkpoints", plain, "--out", out)
    assert "plain: this model has no snapshots; train it with --snapshot-steps N" in sentence
    assert "nowhere" in refused("bench", "checkpoints", tmp_path / "nowhere", "--out", out)
    assert not out.exists()
    city = load_model(model).open_dataset().path
    zero = refused("train", city, "--snapshot-steps", 0, "--out", tmp_path / "zero")
    assert "--snapshot-steps" in zero


@pytest.mark.parametrize("split", ["tst", "train"])
def test_a_learning_curve_is_drawn_against_held_out_people_only(
    model: Path, tmp_path: Path, split: str
) -> None:
    out = tmp_path / "curve"
    assert f"--split {split}" in refused(
        "bench", "checkpoints", model, "--split", split, "--out", out
    )
    assert not out.exists()


def test_the_table_of_a_learning_curve_is_the_mean_over_seeds() -> None:
    def point(value: float) -> dict[str, Any]:
        return {name: {"jsd": value, "excess": value - 0.05} for name in PAPER_METRICS}

    rows = [
        {"step": step, "seed": seed, "model": point(value), "floor": point(0.1 + 0.02 * seed)}
        for step, seed, value in ((5, 0, 0.4), (10, 0, 0.3), (5, 1, 0.6), (10, 1, 0.3))
    ]
    table = learning_curve_table({"rows": rows, "model": "m", "stage": "vae", "measure": "JSD"})
    assert [row[0] for row in table.rows] == ["5", "10", "floor"]
    expected = [(0.5, 0.45), (0.3, 0.25), (0.11, 0.06)]
    for row, (jsd, excess) in zip(table.rows, expected, strict=True):
        assert row[1::2] == pytest.approx([jsd] * 4) and row[2::2] == pytest.approx([excess] * 4)
