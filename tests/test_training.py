"""A stage of training: its results, its log, and that an interruption changes neither."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor, nn

from mobatlas import MobatlasError
from mobatlas.progress import Tracker
from mobatlas.training.checkpoints import named_tensors
from mobatlas.training.devices import fast_bf16
from mobatlas.training.loop import Execution, Share, Stage, Trainer
from tests.trainers import (
    FINAL,
    Crash,
    Loss,
    at_step,
    crash,
    interrupted_training,
    lines,
    make_stage,
    make_trainer,
    names,
    regression,
    train,
    undisturbed_bytes,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "model" / "training"


@pytest.fixture(scope="module")
def undisturbed() -> bytes:
    return undisturbed_bytes()


def weights(network: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in named_tensors(network).items()}


@given(st.integers(0, 50), st.integers(1, 7))
def test_the_shares_of_a_batch_are_all_of_it_and_nearly_equal(n: int, world: int) -> None:
    parts = [range(n)[Share(rank, world).rows(n)] for rank in range(world)]
    assert [row for part in parts for row in part] == list(range(n))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_the_learning_rate_warms_up_and_decays_as_asked(folder: Path) -> None:
    stage = make_stage(steps=13, decay="linear")
    expected = [1e-2 / 3, 2e-2 / 3, 1e-2, *(1e-2 * (1 - k / 10) for k in range(10))]
    train(folder, stage, log_every=1)
    assert [line["lr"] for line in lines(folder)] == pytest.approx(expected)
    cosine = replace(stage, decay="cosine")
    assert cosine.rate(8) == pytest.approx(1e-2 / 2)
    assert cosine.rate(3) == pytest.approx(1e-2)
    assert replace(stage, decay="none", warmup=0).rate(12) == 1e-2


def test_the_final_weights_are_the_average_computed_by_hand() -> None:
    seen: list[dict[str, Tensor]] = []

    def watched(network: nn.Module, step: int, share: Share) -> Tensor:
        seen.append(weights(stage.network))
        return regression(network, step, share)

    stage = make_stage(loss=watched, ema=None)
    train(None, stage)
    seen.append(weights(stage.network))
    average = seen[0]
    for step, now in enumerate(seen[1:]):
        decay = min(0.5, (1 + step) / (10 + step))
        average = {name: decay * average[name] + (1 - decay) * now[name] for name in now}
    averaged = make_stage(ema=0.5)
    train(None, averaged)
    for name, tensor in named_tensors(averaged.network).items():
        torch.testing.assert_close(tensor.detach(), average[name])


def test_validation_sees_averaged_weights_in_eval_mode_without_gradients() -> None:
    seen: list[dict[str, Tensor]] = []

    def validate(network: nn.Module) -> dict[str, float]:
        assert not network.training and not torch.is_grad_enabled()
        torch.rand(7)  # its use of randomness must not reach the training
        seen.append(weights(network))
        return {"score": 0.5}

    stage = make_stage(validate=validate, validate_every=5)
    metrics = train(None, stage)
    assert metrics.keys() == {"loss", "score"}
    assert len(seen) == 3  # after 5, 10 and 12 steps
    alone = make_stage()
    train(None, alone)
    for name, tensor in named_tensors(alone.network).items():
        assert torch.equal(tensor, seen[-1][name])
        assert torch.equal(tensor, stage.network.state_dict()[name])


def test_training_in_memory_gives_what_training_in_a_folder_gives(
    folder: Path, undisturbed: bytes
) -> None:
    stage = make_stage()
    train(None, stage)
    (folder / FINAL).parent.mkdir(parents=True)
    (folder / FINAL).write_bytes(undisturbed)
    for name, tensor in load_file(folder / FINAL).items():
        assert torch.equal(tensor, stage.network.state_dict()[name])
    assert make_trainer(None).path("cache") is None
    assert make_trainer(folder).path("cache") == folder / "cache"


def test_another_seed_gives_other_weights() -> None:
    one, two = make_stage(), make_stage()
    train(None, one)
    train(None, two, seed=6)
    assert not torch.equal(
        one.network.state_dict()["0.weight"], two.network.state_dict()["0.weight"]
    )


@pytest.mark.parametrize("kind", ["loss", "gradient"])
def test_a_divergence_stops_with_a_sentence_before_it_reaches_the_weights(
    folder: Path, kind: str
) -> None:
    def loss(network: nn.Module, step: int, share: Share) -> Tensor:
        value = regression(network, step, share)
        if step < 7:
            return value
        return (
            value * math.nan if kind == "loss" else value + (value - value.detach()).sqrt()
        )  # slope infinite at 0

    stage = make_stage(loss=loss)
    with pytest.raises(
        MobatlasError, match=r"mlp diverged at step 8 .*learning rate, now .*step 6 is intact"
    ):
        train(folder, stage, checkpoint_steps=3)
    assert all(tensor.isfinite().all() for tensor in stage.network.state_dict().values())
    assert names(folder) == ["mlp-00000003.safetensors", "mlp-00000006.safetensors"]


def test_a_run_stopped_after_any_step_ends_in_the_same_bytes(
    tmp_path: Path, undisturbed: bytes
) -> None:
    for steps in range(1, 12):
        folder = tmp_path / str(steps) / "training"
        interrupted_training(folder, steps)
        assert len(names(folder)) == min(steps, 2)
        train(folder)
        assert (folder / FINAL).read_bytes() == undisturbed
        assert names(folder) == [FINAL]


def test_work_since_the_last_checkpoint_is_done_again(folder: Path, undisturbed: bytes) -> None:
    with pytest.raises(Crash):
        train(folder, make_stage(loss=at_step(9, crash)), checkpoint_steps=4, log_every=1)
    assert names(folder) == ["mlp-00000004.safetensors", "mlp-00000008.safetensors"]
    train(folder, checkpoint_seconds=0.0)
    assert (folder / FINAL).read_bytes() == undisturbed


def test_every_step_is_logged_once_whatever_happened(folder: Path) -> None:
    with pytest.raises(Crash):
        train(folder, make_stage(loss=at_step(9, crash)), checkpoint_steps=4, log_every=1)
    log = folder.parent / "metrics.jsonl"
    assert len(lines(folder)) == 9
    log.write_text(log.read_text() + '{"stage": "mlp", "st')  # a kill may cut a line
    train(folder, log_every=1)
    assert [line["step"] for line in lines(folder)] == list(range(1, 13))
    expected = {"stage", "step", "loss", "lr", "grad_norm", "examples_per_second", "seconds"}
    assert all(line.keys() == expected for line in lines(folder))
    seconds = [line["seconds"] for line in lines(folder)]
    assert seconds == sorted(seconds)
    train(folder, replace(make_stage(), name="next"))
    assert [line["step"] for line in lines(folder)] == [*range(1, 13), 1, 10, 12]


def test_a_finished_stage_is_read_and_not_trained_again(folder: Path) -> None:
    first = make_stage(validate=lambda network: {"score": 0.25})
    metrics = train(folder, first)
    after = torch.rand(3)
    before = (folder / FINAL).read_bytes()
    second = make_stage(loss=at_step(0, crash))
    nn.init.zeros_(second.network.get_parameter("0.weight"))
    assert train(folder, second) == metrics
    assert torch.equal(torch.rand(3), after), (
        "what comes after must not depend on whether it was trained or read"
    )
    for name, tensor in first.network.state_dict().items():
        assert torch.equal(tensor, second.network.state_dict()[name])
    assert (folder / FINAL).read_bytes() == before


def test_resuming_without_a_checkpoint_trains_from_the_beginning(folder: Path) -> None:
    folder.mkdir(parents=True)
    log = folder.parent / "metrics.jsonl"
    log.write_text('{"stage": "other", "step": 1}\n')  # of a run killed before any checkpoint
    assert train(folder, resume=True)
    assert {line["stage"] for line in lines(folder)} == {"mlp"}


def test_progress_counts_from_where_the_process_began(folder: Path) -> None:
    seen: list[tuple[float, str]] = []

    class Recorder:
        def step(self, done: float, note: str = "") -> None:
            seen.append((done, note))

    @contextmanager
    def progress(title: str, total: float) -> Iterator[Tracker]:
        assert (title, total) == ("training mlp", 7)
        yield Recorder()

    interrupted_training(folder, 5)
    train(folder, progress=progress)
    assert [done for done, _ in seen] == list(range(1, 8))
    assert "loss" in seen[-1][1] and "examples/s" in seen[-1][1]


def test_going_on_with_other_threads_warns_that_last_digits_may_differ(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    alike, other = tmp_path / "alike" / "training", tmp_path / "other" / "training"
    for folder in (alike, other):
        interrupted_training(folder)
    train(alike)
    assert "last digits" not in caplog.text
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        train(other)
    finally:
        torch.set_num_threads(threads)
    assert (
        "the last digits may differ; the checkpoint was written with "
        f"torch {torch.__version__}, 1 x cpu, {threads} threads" in caplog.text
    )


def test_what_is_not_a_number_is_null_in_the_log(folder: Path) -> None:
    metrics = train(folder, make_stage(validate=lambda network: {"score": math.nan}))
    assert math.isnan(metrics["score"]) and lines(folder)[-1]["score"] is None
    assert math.isnan(train(folder)["score"])


def test_tied_and_frozen_and_unused_weights_survive_a_stop(tmp_path: Path) -> None:
    def tied(loss: Loss = regression) -> Stage:
        torch.manual_seed(0)
        network = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 1))
        network[2].weight = network[0].weight
        network[0].bias.requires_grad_(False)
        network.register_parameter("spare", nn.Parameter(torch.ones(2)))  # never has a gradient
        return replace(make_stage(loss=loss), network=network)

    whole, stopped = tmp_path / "whole" / "training", tmp_path / "stopped" / "training"
    train(whole, tied())
    with pytest.raises(Crash):
        train(stopped, tied(at_step(6, crash)), checkpoint_steps=2)
    train(stopped, tied())
    assert (whole / FINAL).read_bytes() == (stopped / FINAL).read_bytes()
    assert "2.weight" not in load_file(whole / FINAL)


@pytest.mark.parametrize(("amx", "avx"), [(True, True), (False, True), (False, False)])
def test_a_cpu_trains_in_single_precision_even_with_units_for_bf16(
    monkeypatch: pytest.MonkeyPatch, amx: bool, avx: bool
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx)
    chosen = Trainer(None, Execution(accelerator="cpu")).fabric.strategy.precision.precision
    assert str(chosen).startswith("32")
    assert fast_bf16(torch.device("cpu")) is (amx or avx)


def test_a_device_or_a_precision_that_is_not_there_is_named() -> None:
    with pytest.raises(MobatlasError, match="--accelerator quantum does not exist"):
        Trainer(None, Execution(accelerator="quantum"))
    with pytest.raises(MobatlasError, match="--precision 8 does not exist"):
        Trainer(None, Execution(accelerator="cpu", precision="8"))
    with pytest.raises(MobatlasError, match="--devices 0"):
        Trainer(None, Execution(accelerator="cpu", devices=0))
    if not torch.cuda.is_available():
        with pytest.raises(
            MobatlasError, match="--accelerator cuda: this machine has no such device"
        ):
            Trainer(None, Execution(accelerator="cuda"))
