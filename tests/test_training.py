from __future__ import annotations

import json
import math
import multiprocessing
import os
import pickle
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from mobatlas import MobatlasError
from mobatlas.generators.checkpoints import Checkpoints, Identity, named_tensors, only_one_process
from mobatlas.generators.training import Share, Stage, Stopped, Trainer
from mobatlas.progress import Tracker

Loss = Callable[[nn.Module, int, Share], Tensor]
CONFIG = {"denoiser": {"depth": 4, "width": 16}, "batch": 32}
FINAL = "mlp-final.safetensors"
ROOT = Path(__file__).parents[1]


class Crash(Exception):  # noqa: N818 (a test raises it)
    """The process dies here, as far as the trainer can tell."""


def regression(network: nn.Module, step: int, share: Share) -> Tensor:
    """A batch that depends on the seed of the step, as does the dropout of the network."""
    x = torch.randn(32, 4)[share.rows(32)]
    return ((network(x) - x.sum(1, keepdim=True)) ** 2).mean()


def make_stage(
    steps: int = 12, loss: Loss = regression, dropout: float = 0.2, width: int = 16, **changes: Any
) -> Stage:
    torch.manual_seed(3)
    network = nn.Sequential(nn.Linear(4, width), nn.Dropout(dropout), nn.Tanh(), nn.Linear(width, 1))
    stage = Stage("mlp", network, steps, loss, 1e-2, optimizer="adamw", weight_decay=0.01, warmup=3, decay="cosine")
    return replace(stage, **({"ema": 0.9, "examples_per_step": 32} | changes))


def at_step(step: int, action: Callable[[], object]) -> Loss:
    """The usual loss, with something happening before one of its steps."""

    def loss(network: nn.Module, now: int, share: Share) -> Tensor:
        if now == step:
            action()
        return regression(network, now, share)

    return loss


def crash() -> None:
    raise Crash


def make_trainer(folder: Path | None, **changes: Any) -> Trainer:
    options: dict[str, Any] = {"seed": 5, "config": CONFIG, "accelerator": "cpu", "resume": True}
    return Trainer(folder, **(options | changes))


def train(folder: Path | None, stage: Stage | None = None, **changes: Any) -> dict[str, float]:
    return make_trainer(folder, **changes).run(stage or make_stage())


def begun(folder: Path, steps: int = 5) -> Path:
    """A training that crashed after so many steps; returns its newest checkpoint."""
    with pytest.raises(Crash):
        train(folder, make_stage(loss=at_step(steps, crash)), checkpoint_steps=1)
    return folder / f"mlp-{steps:08d}.safetensors"


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder.parent / "metrics.jsonl").read_text().splitlines()]


def weights(network: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in named_tensors(network).items()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "model" / "training"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The final file of a run that nothing happened to."""
    folder = tmp_path_factory.mktemp("undisturbed") / "training"
    train(folder)
    return (folder / FINAL).read_bytes()


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Ctrl-C as Python has it, even where the tests run in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


# Real processes come from a server that has imported torch already: importing it takes longer than all that they do.
_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(["lightning_fabric", "tests.test_training"])


def start(work: Callable[..., None], *arguments: Any) -> BaseProcess:
    process = _processes.Process(target=work, args=arguments)
    process.start()
    return process


def kill(process: BaseProcess) -> None:
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()


# ---- what a stage computes


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


def test_training_in_memory_gives_what_training_in_a_folder_gives(folder: Path, undisturbed: bytes) -> None:
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
    assert not torch.equal(one.network.state_dict()["0.weight"], two.network.state_dict()["0.weight"])


@pytest.mark.parametrize("kind", ["loss", "gradient"])
def test_a_divergence_stops_with_a_sentence_before_it_reaches_the_weights(folder: Path, kind: str) -> None:
    def loss(network: nn.Module, step: int, share: Share) -> Tensor:
        value = regression(network, step, share)
        if step < 7:
            return value
        return value * math.nan if kind == "loss" else value + (value - value.detach()).sqrt()  # slope infinite at 0

    stage = make_stage(loss=loss)
    with pytest.raises(MobatlasError, match=r"mlp diverged at step 8 .*learning rate, now .*step 6 is intact"):
        train(folder, stage, checkpoint_steps=3)
    assert all(tensor.isfinite().all() for tensor in stage.network.state_dict().values())
    assert names(folder) == ["mlp-00000003.safetensors", "mlp-00000006.safetensors"]


# ---- stopping and going on


def test_a_run_stopped_after_any_step_ends_in_the_same_bytes(tmp_path: Path, undisturbed: bytes) -> None:
    for steps in range(1, 12):
        folder = tmp_path / str(steps) / "training"
        begun(folder, steps)
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
    assert torch.equal(torch.rand(3), after), "what comes after must not depend on whether it was trained or read"
    for name, tensor in first.network.state_dict().items():
        assert torch.equal(tensor, second.network.state_dict()[name])
    assert (folder / FINAL).read_bytes() == before


def test_training_begun_needs_resume_and_an_empty_folder_does_not_mind_it(folder: Path) -> None:
    begun(folder)
    with pytest.raises(MobatlasError, match=r"training was begun here; pass --resume .* --overwrite"):
        make_trainer(folder, resume=False)
    assert train(folder.parent.parent / "new" / "training", resume=True)


def test_progress_counts_from_where_the_process_began(folder: Path) -> None:
    seen: list[tuple[float, str]] = []

    class Recorder:
        def step(self, done: float, note: str = "") -> None:
            seen.append((done, note))

    @contextmanager
    def progress(title: str, total: float) -> Iterator[Tracker]:
        assert (title, total) == ("training mlp", 7)
        yield Recorder()

    begun(folder, 5)
    train(folder, progress=progress)
    assert [done for done, _ in seen] == list(range(1, 8))
    assert "loss" in seen[-1][1] and "examples/s" in seen[-1][1]


def test_going_on_with_other_threads_warns_that_last_digits_may_differ(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    alike, other = tmp_path / "alike" / "training", tmp_path / "other" / "training"
    for folder in (alike, other):
        begun(folder)
    train(alike)
    assert "last digits" not in caplog.text
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        train(other)
    finally:
        torch.set_num_threads(threads)
    assert f"last digits may differ, it ran on torch {torch.__version__}, 1 x cpu, {threads} threads" in caplog.text


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


def test_a_second_process_is_kept_out_of_the_folder(folder: Path) -> None:
    begun(folder)
    with only_one_process(folder), pytest.raises(MobatlasError, match="another mobatlas process is training there"):
        train(folder)


# ---- files that are not what they should be


def test_a_truncated_checkpoint_is_refused_with_what_to_do(folder: Path, undisturbed: bytes) -> None:
    newest = begun(folder)
    os.truncate(newest, newest.stat().st_size // 2)
    with pytest.raises(
        MobatlasError, match=r"mlp-00000005.*not a readable checkpoint.*delete it to continue from step 4"
    ):
        train(folder)
    newest.unlink()
    train(folder)
    assert (folder / FINAL).read_bytes() == undisturbed


class Malice:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.marker,)


@pytest.mark.parametrize("name", ["mlp-00000006.safetensors", FINAL])
def test_a_pickle_named_like_a_checkpoint_is_refused_and_not_run(folder: Path, name: str) -> None:
    begun(folder)
    marker = folder / "marker"
    (folder / name).write_bytes(pickle.dumps(Malice(marker)))
    with pytest.raises(MobatlasError, match=rf"{name}: is not a readable checkpoint"):
        train(folder)
    assert not marker.exists()
    pickle.loads((folder / name).read_bytes())
    assert marker.exists(), "the pickle would have done it"


@pytest.mark.parametrize(
    "header", [None, {"other": "{}"}, {"mobatlas": "[]"}, {"mobatlas": "{"}, {"mobatlas": '{"format": 1, "step": "x"}'}]
)
def test_tensors_that_mobatlas_did_not_write_are_refused(folder: Path, header: dict[str, str] | None) -> None:
    newest = begun(folder)
    save_file(load_file(newest), newest, header)
    with pytest.raises(MobatlasError, match=r"not a readable checkpoint"):
        train(folder)


def test_a_checkpoint_of_another_run_is_refused_by_the_first_difference(folder: Path) -> None:
    begun(folder)
    deeper = {**CONFIG, "denoiser": {"depth": 6, "width": 16}}
    with pytest.raises(MobatlasError, match=r"denoiser.depth is 4 there and 6 here; pass the same config.*--overwrite"):
        train(folder, config=deeper)
    with pytest.raises(MobatlasError, match=r"dropout is absent there and 0.1 here"):
        train(folder, config=CONFIG | {"dropout": 0.1})
    with pytest.raises(MobatlasError, match=r"batch is 32 there and absent here"):
        train(folder, config={"denoiser": CONFIG["denoiser"]})
    with pytest.raises(MobatlasError, match=r"seed is 5 there and 6 here"):
        train(folder, seed=6)
    with pytest.raises(MobatlasError, match=r"mlp.learning_rate is 0.01 there and 0.02 here"):
        train(folder, make_stage(learning_rate=0.02))
    train(folder)
    with pytest.raises(MobatlasError, match=r"mlp-final.*seed is 5 there and 6 here"):
        train(folder, seed=6)


def test_names_shapes_and_dtypes_must_all_agree(folder: Path) -> None:
    begun(folder)
    with pytest.raises(MobatlasError, match=r"network/0.weight is float32 \[16, 4\] there and float32 \[8, 4\] here"):
        train(folder, make_stage(width=8))
    double = make_stage()
    double.network.double()
    with pytest.raises(MobatlasError, match=r"network/0.weight is float32 .* there and float64"):
        train(folder, double)
    longer = make_stage()
    longer.network.register_buffer("extra", torch.zeros(1))
    with pytest.raises(MobatlasError, match=r"network/extra is absent there"):
        train(folder, longer)
    shorter = make_stage()
    shorter.network.get_submodule("3").register_parameter("bias", None)
    with pytest.raises(MobatlasError, match=r"/3.bias is float32 \[1\] there and absent here"):
        train(folder, shorter)


def test_a_device_or_a_precision_that_is_not_there_is_named() -> None:
    with pytest.raises(MobatlasError, match="--accelerator quantum does not exist"):
        Trainer(None, accelerator="quantum")
    with pytest.raises(MobatlasError, match="--precision 8 does not exist"):
        Trainer(None, accelerator="cpu", precision="8")
    with pytest.raises(MobatlasError, match="--devices 0"):
        Trainer(None, accelerator="cpu", devices=0)
    if not torch.cuda.is_available():
        with pytest.raises(MobatlasError, match="--accelerator cuda: there is no such device here"):
            Trainer(None, accelerator="cuda")


def test_tensorboard_is_named_where_it_is_missing() -> None:
    try:
        import tensorboard  # type: ignore[import-not-found, import-untyped, unused-ignore]  # noqa: F401
    except ImportError:
        with pytest.raises(MobatlasError, match=r"mobatlas\[tensorboard\]"):
            Trainer(None, accelerator="cpu", tensorboard=True)
    else:
        pytest.skip("it is installed")


# ---- real signals, real disks, real processes


def train_quietly(folder: Path, steps: int, checkpoint_steps: int, said: Path) -> None:
    """What a process does: train, and leave its last words in a file."""
    try:
        train(folder, make_stage(steps), checkpoint_steps=checkpoint_steps)
    except MobatlasError as error:
        said.write_text(str(error))
        sys.exit(2)


def test_a_run_killed_at_ten_random_moments_ends_in_the_same_bytes(tmp_path: Path, folder: Path) -> None:
    steps, moments = 1200, random.Random(0)
    train(tmp_path / "whole" / "training", make_stage(steps))
    for number in range(10):
        process = start(train_quietly, folder, steps, 1, tmp_path / "said")
        if number % 2 == 0:  # the others are killed while they start, as likely as not
            wait_for_step(folder, last_step(folder) + moments.randint(1, 15), process)
        time.sleep(moments.uniform(0, 0.1 if number % 2 else 0.005))
        kill(process)
    assert last_step(folder) >= 5 and FINAL not in names(folder), "the kills came too early or too late to matter"
    process = start(train_quietly, folder, steps, 50, tmp_path / "said")
    process.join()
    assert process.exitcode == 0
    assert (folder / FINAL).read_bytes() == (tmp_path / "whole" / "training" / FINAL).read_bytes()
    assert names(folder) == [FINAL]
    assert [line["step"] for line in lines(folder)] == [1, *range(10, steps + 1, 10)]


def last_step(folder: Path) -> int:
    found = names(folder) if folder.exists() else []
    return max((int(name[4:12]) for name in found if name[4:12].isdigit()), default=0)


def wait_for_step(folder: Path, step: int, process: BaseProcess) -> None:
    deadline = time.monotonic() + 60
    while last_step(folder) < step:
        assert process.is_alive() and time.monotonic() < deadline
        time.sleep(0.001)


def checkpoints_in(folder: Path) -> Checkpoints:
    return Checkpoints(folder, Identity("mlp", 0, {}, {}))


def write_for_ever(folder: Path, step: int) -> None:
    while True:
        step += 1
        tensors = {str(part): torch.full((256, 1024), float(step)) for part in range(4)}  # 4 MB that tell their step
        checkpoints_in(folder).save(step, tensors, {})


def test_the_newest_checkpoint_is_whole_after_twenty_kills_while_writing(tmp_path: Path) -> None:
    moments, last, halves = random.Random(1), 0, 0
    for _ in range(20):
        process = start(write_for_ever, tmp_path, last)
        wait_for_step(tmp_path, last + 1, process)
        time.sleep(moments.uniform(0, 0.03))
        kill(process)
        halves += len(list(tmp_path.glob(".*.partial")))
        found = checkpoints_in(tmp_path).newest()
        assert found is not None and found.step > last
        assert all((tensor == found.step).all() for tensor in found.tensors.values())
        assert len(list(tmp_path.glob("mlp-*"))) <= 3  # two, and one that the kill kept from going
        last = found.step
        checkpoints_in(tmp_path).sweep()
        assert not list(tmp_path.glob(".*"))
    assert halves > 0, "no kill came while a file was being written"


def test_ctrl_c_saves_the_step_and_says_how_to_go_on(tmp_path: Path, folder: Path) -> None:
    steps, said = 300, tmp_path / "said"
    train(tmp_path / "whole" / "training", make_stage(steps))
    process = start(train_quietly, folder, steps, 20, said)
    wait_for_step(folder, 20, process)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGINT)
    process.join()
    assert process.exitcode == 2
    step = last_step(folder)
    assert said.read_text() == f"stopped at step {step} of {steps} of the mlp; continue with --resume"
    train(folder, make_stage(steps))
    assert (folder / FINAL).read_bytes() == (tmp_path / "whole" / "training" / FINAL).read_bytes()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_waits_for_the_end_of_the_step_and_the_handlers_come_back(
    folder: Path, undisturbed: bytes, ctrl_c: None, number: signal.Signals
) -> None:
    before = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(Stopped, match=r"stopped at step 8 of 12 of the mlp; continue with --resume") as stopped:
        train(folder, make_stage(loss=at_step(7, lambda: signal.raise_signal(number))))
    assert stopped.value.signal == number
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == before
    with pytest.raises(Stopped, match=r"stopped after the mlp"):  # its work is done, the next stage's is not
        train(folder, make_stage(loss=at_step(11, lambda: signal.raise_signal(number))))
    assert (folder / FINAL).read_bytes() == undisturbed


def test_a_second_ctrl_c_stops_at_once(folder: Path, undisturbed: bytes, ctrl_c: None) -> None:
    def twice() -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        train(folder, make_stage(loss=at_step(7, twice)), checkpoint_steps=5)
    assert names(folder) == ["mlp-00000005.safetensors"]
    train(folder)
    assert (folder / FINAL).read_bytes() == undisturbed


def fill_the_disk(folder: Path, said: Path) -> None:
    """From step 8 on no file may grow past 1000 bytes."""
    full = at_step(7, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY)))
    try:
        train(folder, make_stage(loss=full), checkpoint_steps=3)
    except MobatlasError as error:
        said.write_text(str(error))


def test_a_full_disk_leaves_the_last_checkpoint_and_no_half_file(
    tmp_path: Path, folder: Path, undisturbed: bytes
) -> None:
    process = start(fill_the_disk, folder, tmp_path / "said")
    process.join()
    path = folder / "mlp-00000009.safetensors"
    assert (tmp_path / "said").read_text() == (
        f"{path}: could not be written (File too large); the checkpoint of step 6 is intact, make room and continue "
        "with --resume"
    )
    assert names(folder) == ["mlp-00000003.safetensors", "mlp-00000006.safetensors"]
    train(folder)
    assert (folder / FINAL).read_bytes() == undisturbed


IN_TWO_PROCESSES = """
import os, signal, sys
from dataclasses import replace
from pathlib import Path
from tests.test_training import Stopped, at_step, make_stage, make_trainer
folder = Path(sys.argv[1])
trainer = make_trainer(folder, devices=2, log_every=1)
stage = make_stage(dropout=0.0, examples_per_step=16)
trainer.path("cache.npy").touch()
tell_one = at_step(6, lambda: trainer.share.rank == 1 and os.kill(os.getpid(), signal.SIGTERM))
try:
    trainer.run(replace(stage, loss=tell_one))
except Stopped as stopped:
    (folder / f"said-{trainer.share.rank}").write_text(str(stopped))
trainer.run(stage)
trainer.run(replace(stage, name="again"))
"""


def test_two_processes_go_down_the_same_losses_as_one(tmp_path: Path, folder: Path) -> None:
    stage = make_stage(dropout=0.0)
    one = make_trainer(tmp_path / "one" / "training", log_every=1)
    for name in ("mlp", "again"):  # two stages of one network
        one.run(replace(stage, name=name))
    script = tmp_path / "script.py"
    script.write_text(IN_TWO_PROCESSES)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    run = subprocess.run([sys.executable, script, folder], env=environment, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    said = "stopped at step 7 of 12 of the mlp; continue with --resume"
    assert [(folder / f"said-{rank}").read_text() for rank in range(2)] == [said, said]
    assert sorted(path.name for path in folder.glob("*.npy")) == ["cache-1.npy", "cache.npy"], "each has its own"
    alone, together = lines(tmp_path / "one" / "training"), lines(folder)
    assert [(line["stage"], line["step"]) for line in together] == [(line["stage"], line["step"]) for line in alone]
    for key in ("loss", "grad_norm", "lr"):
        assert [line[key] for line in together] == pytest.approx([line[key] for line in alone], abs=1e-5)
    for name in (FINAL, "again-final.safetensors"):
        ours, theirs = load_file(tmp_path / "one" / "training" / name), load_file(folder / name)
        for key, tensor in ours.items():
            torch.testing.assert_close(theirs[key], tensor, atol=1e-5, rtol=1e-5)
