"""`train` and `supervise` as a user types them, and as a machine that fails interrupts them."""

from __future__ import annotations

import fcntl
import json
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from mobatlas.artifacts import is_complete, read_manifest, resumable_folder, unfinished
from mobatlas.data.dataset import TrajectoryDataset
from tests.tiny import OPTIONS, small_city

FAMILY = "latent-diffusion"
BRIEF = {"steps": 60, "batch": 16}
CONFIG: dict[str, Any] = {
    "train": {
        "generator": FAMILY,
        "options": {
            **OPTIONS[FAMILY],
            "autoencoder": OPTIONS[FAMILY]["autoencoder"] | BRIEF,
            "denoiser": OPTIONS[FAMILY]["denoiser"] | BRIEF,
        },
    }
}
FILES = ["config.json", "lengths.json", "manifest.json", "metrics.jsonl", "vocabulary.parquet", "weights.safetensors"]
SAME = ["config.json", "lengths.json", "vocabulary.parquet", "weights.safetensors"]
KEPT = ("autoencoder.", "denoiser.centre", "denoiser.extent", "denoiser.prototypes")  # by supervision
PATIENCE = 600  # seconds, on a machine that does other things as well
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}

# Importing torch takes longer than all that these runs do. This process has imported it, and becomes `mobatlas` with the
# arguments it is sent, in a process of its own each time; it waits for that one only when told to, so that its number
# stays its own.
WARM = """
import gc, json, os, sys
from mobatlas.cli import main
import lightning_fabric, mobatlas.training
from mobatlas.generators.base import family_of
family_of("latent-diffusion")
gc.freeze()
print("ready", flush=True)
while line := sys.stdin.readline():
    arguments, out, err, before = json.loads(line)
    child = os.fork()
    if not child:
        for stream, path in ((0, os.devnull), (1, out), (2, err)):
            os.dup2(os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC), stream)
        sys.argv, code = ["mobatlas", *arguments], 0
        exec(before)
        try:
            main()
        except SystemExit as end:
            code = end.code or 0
        sys.stdout.flush()
        os._exit(code)  # to take all modules down takes longer than to refuse a bad option
    print(child, flush=True)
    sys.stdin.readline()
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
os._exit(0)
"""


@dataclass(frozen=True)
class Outcome:
    """What a command came to."""

    code: int
    out: str
    err: str

    @property
    def said(self) -> str:
        """The last line on stderr, the sentence of a failure."""
        return self.err.strip().splitlines()[-1] if self.err.strip() else ""


@dataclass(frozen=True)
class Running:
    """A command under way."""

    pid: int
    finish: Callable[[], Outcome]

    def signal(self, number: signal.Signals) -> Outcome:
        os.kill(self.pid, number)
        return self.finish()


class Warm:
    """Runs commands in processes that have imported torch already."""

    def __init__(self, folder: Path) -> None:
        self._out, self._err = folder / "stdout", folder / "stderr"
        self._server = subprocess.Popen(
            [sys.executable, "-c", WARM], env=ENVIRONMENT, stdin=-1, stdout=-1, text=True, bufsize=1
        )
        assert self._server.stdin and self._server.stdout
        self._ask, self._answer = self._server.stdin, self._server.stdout
        assert self._answer.readline() == "ready\n"

    def start(self, *arguments: object, before: str = "") -> Running:
        """Start a command, after some Python that makes its world worse."""
        self._ask.write(json.dumps([[str(a) for a in arguments], str(self._out), str(self._err), before]) + "\n")
        pid = int(self._answer.readline())
        alarm = threading.Timer(PATIENCE, os.kill, (pid, signal.SIGKILL))
        alarm.start()

        def finish() -> Outcome:
            self._ask.write("\n")
            code = int(self._answer.readline())
            alarm.cancel()
            return Outcome(code, self._out.read_text(), self._err.read_text())

        return Running(pid, finish)

    def run(self, *arguments: object, before: str = "") -> Outcome:
        return self.start(*arguments, before=before).finish()

    def close(self) -> None:
        self._ask.close()
        self._server.wait()


def start_cold(*arguments: object) -> subprocess.Popen[str]:
    """The command as the shell starts it, in a group of its own."""
    command = [sys.executable, "-m", "mobatlas", *map(str, arguments)]
    return subprocess.Popen(
        command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def finish_cold(process: subprocess.Popen[str]) -> Outcome:
    try:
        out, err = process.communicate(timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return Outcome(process.returncode, out, err)


@dataclass(frozen=True)
class World:
    """A dataset, a model that nothing happened to, and how it was asked for."""

    root: Path
    dataset: TrajectoryDataset
    config: Path
    model: Path
    report: dict[str, Any]
    warm: Warm
    seconds: float  # that the same training takes in a warm process

    def train(self, out: Path, *more: object) -> list[object]:
        return ["train", self.dataset.path, "--out", out, "--config", self.config, "--quiet", *more]

    def supervise(self, out: Path, *more: object) -> list[object]:
        return ["supervise", self.model, "--strategy", "strong", "--out", out, "--quiet", *more]


OFTEN = ("--checkpoint-seconds", 0.2)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    root = tmp_path_factory.mktemp("world")
    dataset = small_city(root, users=120)
    config = root / "run.yaml"
    config.write_text(yaml.safe_dump(CONFIG))
    warm = Warm(tmp_path_factory.mktemp("warm"))
    command = ["train", dataset.path, "--config", config, "--quiet", "--json", "--out"]
    first = finish_cold(start_cold(*command, root / "model"))
    assert first.code == 0, first.err
    start = time.monotonic()
    assert warm.run(*command, root / "again").code == 0
    seconds = time.monotonic() - start
    yield World(root, dataset, config, root / "model", json.loads(first.out), warm, seconds)
    warm.close()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def snapshot(folder: Path) -> dict[str, tuple[int, int]]:
    """Every file and folder below, with its size and when it was written."""
    return {
        path.relative_to(folder).as_posix(): (0, 0) if path.is_dir() else (path.stat().st_size, path.stat().st_mtime_ns)
        for path in folder.rglob("*")
    }


def lines(model: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (model / "metrics.jsonl").read_text().splitlines()]


def check_same(model: Path, other: Path) -> None:
    """Finished, and not to be told from the other one, except by when it was made."""
    assert names(model) == FILES
    for name in SAME:
        assert (model / name).read_bytes() == (other / name).read_bytes(), name
    ours, theirs = (read_manifest(path, "model") for path in (model, other))
    assert (ours.content_hash, ours.config, ours.seed) == (theirs.content_hash, theirs.config, theirs.seed)
    timing = ("seconds", "examples_per_second")
    plain = [[{k: v for k, v in line.items() if k not in timing} for line in lines(path)] for path in (model, other)]
    assert plain[0] == plain[1]


def wait_until(happened: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not happened():
        assert time.monotonic() < deadline, f"{what}: did not happen"
        time.sleep(0.001)


def last_step(model: Path, stage: str) -> int:
    """Of the newest checkpoint of a stage."""
    steps = [path.stem.removeprefix(f"{stage}-") for path in (model / "training").glob(f"{stage}-*.safetensors")]
    return max((int(step) for step in steps if step.isdigit()), default=0)


# ---- what a run leaves


def test_train_makes_a_model_folder(world: World) -> None:
    assert names(world.model) == FILES
    described = json.loads((world.model / "config.json").read_text())
    assert (described["generator"], described["groups"]) == (FAMILY, None)
    assert described["config"]["denoiser"]["steps"] == 60
    manifest = read_manifest(world.model, "model")
    assert manifest.details["dataset"]["hash"] == world.dataset.manifest.content_hash
    assert {line["stage"] for line in lines(world.model)} == {"autoencoder", "denoiser"}
    assert not [name for name in names(world.root) if name.startswith(".")], "no lock, nothing half-written"


def test_json_is_the_report_with_reconstruction_and_peak_memory(world: World) -> None:
    assert world.report == read_manifest(world.model, "model").details["report"]
    assert 0 < world.report["autoencoder"]["reconstruction"] <= 1
    assert world.report["denoiser"]["loss"] > 0
    assert 0.1 < world.report["peak_gb"] < 8
    longer = world.dataset.lengths[world.dataset.split("train")] > CONFIG["train"]["options"]["length"]
    assert world.report["truncated"] == longer.sum() > 0


def test_the_same_seed_gives_the_same_bytes_and_another_one_others(world: World, tmp_path: Path) -> None:
    check_same(world.root / "again", world.model)
    other = world.warm.run(*world.train(tmp_path / "other", "--seed", 1, "--set", "denoiser.steps=1"))
    assert other.code == 0
    assert "reconstruction" in other.out and "GB at most" in other.out
    assert (tmp_path / "other" / SAME[-1]).read_bytes() != (world.model / SAME[-1]).read_bytes()


# ---- stopped and continued


def kill_until(kills: int, command: list[object], out: Path, whole: Path, longest: float, warm: Warm) -> None:
    """Kill a command at so many random moments, beginning anew whenever it was faster; then let it end."""
    moments, done = random.Random(kills), 0
    while done < kills:
        running = warm.start(*command, "--resume")
        time.sleep(moments.uniform(0, longest))
        code = running.signal(signal.SIGKILL).code
        assert code in (0, -signal.SIGKILL)
        done += code != 0
        if code == 0:
            check_same(out, whole)
            shutil.rmtree(out)
    finished = warm.run(*command, "--resume")
    assert finished.code == 0, finished.err
    check_same(out, whole)
    assert names(out.parent) == [out.name], "no lock, nothing half-written"


def test_killed_at_three_random_moments_it_ends_in_the_same_bytes(world: World, tmp_path: Path) -> None:
    command = world.train(tmp_path / "model", *OFTEN)
    kill_until(3, command, tmp_path / "model", world.model, 0.6 * world.seconds, world.warm)


@pytest.mark.slow
def test_killed_at_ten_random_moments_it_ends_in_the_same_bytes(world: World, tmp_path: Path) -> None:
    command = world.train(tmp_path / "model", "--checkpoint-seconds", 0.05)
    kill_until(10, command, tmp_path / "model", world.model, 0.5 * world.seconds, world.warm)


@pytest.mark.slow
def test_killed_as_the_shell_starts_it_it_ends_in_the_same_bytes(world: World, tmp_path: Path) -> None:
    """With all of the start-up that a warm process leaves out."""
    command, moments = world.train(tmp_path / "model", *OFTEN, "--resume"), random.Random(0)
    for _ in range(3):
        process = start_cold(*command)
        time.sleep(moments.uniform(0, 15 + world.seconds))
        process.kill()
        finish_cold(process)
    assert finish_cold(start_cold(*command)).code == 0
    check_same(tmp_path / "model", world.model)


def test_killed_as_each_of_its_files_appears_it_ends_in_the_same_bytes(world: World, tmp_path: Path) -> None:
    """Between the stages and at the very end, where random moments seldom fall."""
    out = tmp_path / "model"
    begun = unfinished(out) / "begun.json"
    for path in (
        begun,
        unfinished(out) / "autoencoder-final.safetensors",
        unfinished(out) / "latents.npy",
        unfinished(out) / "denoiser-final.safetensors",
        out / "weights.safetensors",
        out / "manifest.json",
    ):
        running = world.warm.start(*world.train(out, *OFTEN, "--resume"))
        wait_until(path.exists, path.name)
        assert running.signal(signal.SIGKILL).code in (0, -signal.SIGKILL)
        if path != begun:
            assert (out / "training").exists() or path.name == "manifest.json"
    assert world.warm.run(*world.train(out, *OFTEN, "--resume")).code == 0
    check_same(out, world.model)


def test_a_model_killed_after_its_last_file_is_tidied_up_by_resuming(world: World, tmp_path: Path) -> None:
    """It is complete, but for what the process would have swept up: its lock, and what it went on from."""
    out = tmp_path / "model"
    shutil.copytree(world.model, out)
    unfinished(out).mkdir()
    for left in (unfinished(out) / "begun.json", unfinished(out) / "latents.npy", tmp_path / ".model.lock"):
        left.write_text("{}")
    assert world.warm.run(*world.train(out, "--resume")).code == 0
    check_same(out, world.model)
    assert names(tmp_path) == ["model"]


class Killed(BaseException):
    """The process dies here."""


@pytest.mark.parametrize("removals", range(4))
def test_a_model_killed_while_it_sweeps_up_is_tidied_up_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, removals: int
) -> None:
    """Whichever file was the last to go, the next run knows that the rest is to go too."""
    out, unlink = tmp_path / "model", os.unlink
    gone: list[Any] = []

    def until_killed(path: Any, **options: Any) -> None:
        if str(path).endswith((".json", ".npy", ".safetensors")):
            if len(gone) == removals:
                raise Killed
            gone.append(path)
        unlink(path, **options)

    with pytest.raises(Killed), resumable_folder(out, "model") as folder:
        (folder.path / "weights").write_text("w")
        for name in ("autoencoder-final.safetensors", "denoiser-final.safetensors", "latents.npy"):
            (unfinished(out) / name).write_text("for going on")
        monkeypatch.setattr(os, "unlink", until_killed)
    monkeypatch.undo()
    assert len(gone) == removals
    assert is_complete(out)
    assert names(out) == ["manifest.json", "weights"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_ctrl_c_says_how_to_go_on_and_the_rest_ends_in_the_same_bytes(
    world: World, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    out = tmp_path / "model"
    stage = "autoencoder" if number == signal.SIGINT else "denoiser"
    running = world.warm.start(*world.train(out, *OFTEN))
    wait_until(lambda: last_step(out, stage) > 0, "a checkpoint")
    stopped = running.signal(number)
    step = last_step(out, stage)
    assert stopped.said == f"mobatlas: stopped at step {step} of 60 of the {stage}; continue with --resume"
    resumed = world.warm.run(*world.train(out, "--resume"))
    assert resumed.code == 0
    assert f"{stage}: continues from step {step} of 60" in resumed.err
    check_same(out, world.model)
    assert stopped.code == code


INTERRUPTED_ENCODING = """
import signal
import mobatlas.generators.latent_diffusion.generator as generator
encode = generator.encode_split
generator.encode_split = lambda *arguments: signal.raise_signal(signal.SIGINT) or encode(*arguments)
"""


def test_ctrl_c_between_the_stages_says_how_to_go_on(world: World, tmp_path: Path) -> None:
    """While latents are encoded there is no step to wait for the end of."""
    out = tmp_path / "model"
    stopped = world.warm.run(*world.train(out), before=INTERRUPTED_ENCODING)
    assert stopped.code == 130
    assert world.warm.run(*world.train(out, "--resume")).code == 0
    check_same(out, world.model)
    assert "--resume" in stopped.said


def test_a_second_process_is_kept_out(world: World, tmp_path: Path) -> None:
    out = tmp_path / "model"
    for more in ((), ("--resume",), ("--overwrite",)):
        with (tmp_path / ".model.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            refused = world.warm.run(*world.train(out, *more))
        assert refused.code == 2
        assert "another mobatlas process is writing it" in refused.said
        assert names(tmp_path) == [".model.lock"]


# ---- asked for again


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
        assert "is finished, with another configuration or seed" in refused.said
    assert snapshot(world.root) == before


def test_a_finished_model_is_not_trained_over_without_overwrite(world: World) -> None:
    before = snapshot(world.root)
    refused = world.warm.run(*world.train(world.model))
    assert refused.code == 2
    assert refused.err == f"mobatlas: {world.model}: exists already; choose another --out or pass --overwrite\n"
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


@pytest.fixture(scope="module")
def begun(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was killed in the middle of its second stage, with two checkpoints of it."""
    out = tmp_path_factory.mktemp("begun") / "model"
    running = world.warm.start(*world.train(out, "--checkpoint-seconds", 0.01))
    wait_until(lambda: last_step(out, "denoiser") >= 5, "a checkpoint")
    assert running.signal(signal.SIGKILL).code == -signal.SIGKILL
    assert not (out / "manifest.json").exists()
    *older, _, _ = sorted(unfinished(out).glob("denoiser-*"))
    for path in [*older, *unfinished(out).glob(".*")]:  # what resuming sweeps up
        path.unlink()
    return out


@pytest.fixture
def half(begun: Path, tmp_path: Path) -> Path:
    """A copy of it, to be hurt."""
    shutil.copytree(begun, tmp_path / "model")
    return tmp_path / "model"


def refused_unchanged(world: World, half: Path, *more: object) -> str:
    """The sentence with which a command leaves an unfinished model as it is."""
    before = snapshot(half.parent)
    refused = world.warm.run(*world.train(half, *more))
    assert refused.code == 2, refused.err
    assert "Traceback" not in refused.err
    after = snapshot(half.parent)
    marker = "model/training/begun.json"  # may be written again
    assert {name: at for name, at in after.items() if name != marker} == {
        name: at for name, at in before.items() if name != marker
    }
    return refused.said


def test_an_unfinished_model_asks_for_resume_or_overwrite(world: World, half: Path) -> None:
    sentence = refused_unchanged(world, half)
    assert "was begun and not finished" in sentence and "--resume" in sentence and "--overwrite" in sentence


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        (("--set", "denoiser.depth=3"), "denoiser.depth is 2 there and 3 here"),
        (("--set", "autoencoder.noise=0.2", "--set", "diffusion.steps=5"), "autoencoder.noise is 0.3 there and 0.2"),
        (("--seed", "7"), "seed is 0 there and 7 here"),
    ],
)
def test_an_unfinished_model_names_the_first_value_that_is_another(
    world: World, half: Path, change: tuple[str, ...], difference: str
) -> None:
    sentence = refused_unchanged(world, half, "--resume", *change)
    assert difference in sentence and "--overwrite" in sentence


def test_an_unfinished_model_starts_anew_with_overwrite(world: World, half: Path) -> None:
    assert world.warm.run(*world.train(half, "--overwrite")).code == 0
    check_same(half, world.model)


def test_a_file_of_somebody_else_in_an_unfinished_model_survives_overwrite(world: World, half: Path) -> None:
    (half / "notes.txt").write_text("mine")
    sentence = refused_unchanged(world, half, "--overwrite")
    assert "notes.txt" in sentence


def test_an_unfinished_model_cannot_be_supervised_and_says_why(world: World, half: Path) -> None:
    out = half.parent / "taught"
    refused = world.warm.run("supervise", half, "--strategy", "strong", "--out", out)
    assert refused.code == 2
    assert "is not trained to the end" in refused.said and "--resume" in refused.said
    assert not out.exists()


def newest_checkpoint(half: Path) -> Path:
    return unfinished(half) / f"denoiser-{last_step(half, 'denoiser'):08d}.safetensors"


def test_a_truncated_checkpoint_is_refused_and_the_one_before_it_will_do(world: World, half: Path) -> None:
    newest = newest_checkpoint(half)
    os.truncate(newest, newest.stat().st_size // 2)
    sentence = refused_unchanged(world, half, "--resume")
    newest.unlink()
    before = last_step(half, "denoiser")
    assert before > 0
    assert f"{newest.name}: is not a readable checkpoint" in sentence
    assert f"delete it to continue from step {before}" in sentence
    assert world.warm.run(*world.train(half, "--resume")).code == 0
    check_same(half, world.model)


class Malice:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.marker,)


@pytest.mark.parametrize("stage", ["denoiser", "autoencoder"])
def test_a_pickle_named_like_a_checkpoint_is_refused_and_not_run(world: World, half: Path, stage: str) -> None:
    path = newest_checkpoint(half) if stage == "denoiser" else unfinished(half) / "autoencoder-final.safetensors"
    marker = half.parent.parent / f"{half.parent.name}-marker"
    path.write_bytes(pickle.dumps(Malice(marker)))
    sentence = refused_unchanged(world, half, "--resume")
    assert f"{path.name}: is not a readable checkpoint" in sentence
    assert not marker.exists()
    pickle.loads(path.read_bytes())
    assert marker.exists(), "the pickle would have done it"


def test_a_pickle_in_place_of_the_latents_is_not_run(world: World, half: Path) -> None:
    marker = half.parent.parent / f"{half.parent.name}-marker"
    (unfinished(half) / "latents.npy").unlink()
    (unfinished(half) / "latents.npy").write_bytes(pickle.dumps(Malice(marker)))
    resumed = world.warm.run(*world.train(half, "--resume"))
    assert not marker.exists()
    assert resumed.code == 0, "latents can be computed again"
    check_same(half, world.model)


# ---- supervised


@pytest.fixture(scope="module")
def taught(world: World) -> Path:
    out = world.root / "taught"
    made = world.warm.run(*world.supervise(out, "--json"))
    assert made.code == 0, made.err
    report = json.loads(made.out)
    assert (report["strategy"], set(report)) == ("strong", {"strategy", "reason", "strong", "peak_gb"})
    return out


def test_supervise_gives_a_model_the_groups_of_the_labels(world: World, taught: Path) -> None:
    assert names(taught) == FILES
    described = json.loads((taught / "config.json").read_text())
    assert world.dataset.groups is not None
    assert described["groups"] == world.dataset.groups.as_dict()
    assert {line["stage"] for line in lines(taught)} == {"strong"}
    before, after = (load_file(path / "weights.safetensors") for path in (world.model, taught))
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]) == name.startswith(KEPT), name
    assert {name.split(".")[1] for name in after.keys() - before.keys()} == {"group"}


def test_supervision_killed_at_three_random_moments_ends_in_the_same_bytes(
    world: World, taught: Path, tmp_path: Path
) -> None:
    command = world.supervise(tmp_path / "model", *OFTEN)
    kill_until(3, command, tmp_path / "model", taught, 0.4 * world.seconds, world.warm)


def test_supervision_can_begin_from_scratch(world: World, taught: Path, tmp_path: Path) -> None:
    few = ("--set", "denoiser.steps=10", "--from-scratch")
    made = world.warm.run(*world.supervise(tmp_path / "anew", *few))
    assert made.code == 0, made.err
    assert max(line["step"] for line in lines(tmp_path / "anew")) == 10, "as many steps as phase 1 has"
    anew, before = (load_file(path / "weights.safetensors") for path in (tmp_path / "anew", world.model))
    for name, tensor in before.items():
        assert torch.equal(tensor, anew[name]) == name.startswith(KEPT), name
    other = world.warm.run(*world.supervise(taught, "--resume", *few))
    assert other.code == 2 and "another configuration" in other.said


@pytest.fixture
def refusal(world: World, tmp_path: Path) -> Callable[..., str]:
    """The one sentence with which a command is refused, after a check that it left everything as it was."""

    def ask(*command: object) -> str:
        before = snapshot(world.root), snapshot(tmp_path)
        refused = world.warm.run(*command)
        assert refused.code == 2, refused.err
        assert refused.out == ""
        assert refused.err.startswith("mobatlas: ") and refused.err.count("\n") == 1, refused.err
        assert (snapshot(world.root), snapshot(tmp_path)) == before
        return refused.said

    return ask


Refusal = Callable[..., str]


def test_a_strategy_that_does_not_exist_is_refused_with_the_nearest(
    world: World, refusal: Refusal, tmp_path: Path
) -> None:
    sentence = refusal("supervise", world.model, "--strategy", "storng", "--out", tmp_path / "new")
    assert "--strategy storng does not exist; did you mean 'strong'?" in sentence


def test_strong_needs_labels(world: World, refusal: Refusal, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(world.dataset.path, bare)
    (bare / "labels.parquet").unlink()
    assert "labels" in refusal(*world.supervise(tmp_path / "new", "--dataset", bare))


def test_a_dataset_of_other_places_is_refused(world: World, refusal: Refusal, tmp_path: Path) -> None:
    other = small_city(tmp_path, users=60, pois=20)
    sentence = refusal(*world.supervise(tmp_path / "new", "--dataset", other.path))
    assert f"{other.path}: its vocabulary is not the one" in sentence


def test_a_dataset_that_has_moved_is_asked_for(world: World, refusal: Refusal, tmp_path: Path) -> None:
    moved = world.dataset.path.rename(world.root / "moved")
    try:
        assert "pass --dataset" in refusal(*world.supervise(tmp_path / "new"))
        found = world.warm.run(*world.supervise(tmp_path / "new", "--dataset", moved, "--set", "teaching.steps=1"))
        assert found.code == 0, found.err
    finally:
        moved.rename(world.dataset.path)


def test_a_supervised_model_is_not_supervised_again(refusal: Refusal, taught: Path, tmp_path: Path) -> None:
    assert "already" in refusal("supervise", taught, "--strategy", "strong", "--out", tmp_path / "new")


def test_supervision_cannot_change_what_phase_1_built(world: World, refusal: Refusal, tmp_path: Path) -> None:
    sentence = refusal(*world.supervise(tmp_path / "new", "--set", "denoiser.depth=3"))
    assert "weights" in sentence or "denoiser.depth" in sentence


@pytest.mark.parametrize("what", ["nowhere", "dataset", "city"])
def test_what_is_not_a_model_is_not_supervised(world: World, refusal: Refusal, tmp_path: Path, what: str) -> None:
    command = ["supervise", world.root / what, "--strategy", "strong", "--out", tmp_path / "new"]
    assert f"{world.root / what}: " in refusal(*command)


# ---- bad input

NO_CUDA = pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
NO_BOARD = pytest.mark.skipif(find_spec("tensorboard") is not None, reason="it is installed")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        pytest.param(["--generator", "latent-difusion"], "did you mean 'latent-diffusion'?", id="generator"),
        pytest.param(["--preset", "papr"], "did you mean 'paper'?", id="preset"),
        pytest.param(["--set", "denoiser.depht=3"], "unknown key 'depht' in 'denoiser'; did you mean", id="key"),
        pytest.param(["--set", "denoiser.depth=deep"], "'denoiser.depth' is wrong", id="value"),
        pytest.param(["--set", "denoiser.width=30"], "width 30 is not a multiple", id="width"),
        pytest.param(["--set", "denoiser"], "write it as section.key=value", id="assignment"),
        pytest.param(["--config", "nowhere.yaml"], "nowhere.yaml: no such configuration file", id="config"),
        pytest.param(["--accelerator", "cuda"], "--accelerator cuda: there is no such", marks=NO_CUDA, id="cuda"),
        pytest.param(["--accelerator", "quantum"], "--accelerator quantum does not exist", id="accelerator"),
        pytest.param(["--devices", "0"], "--devices 0", id="devices"),
        pytest.param(["--precision", "8"], "--precision 8 does not exist", id="precision"),
        pytest.param(["--tensorboard"], "mobatlas[tensorboard]", marks=NO_BOARD, id="tensorboard"),
        pytest.param(["--seed", "-1"], "seed", id="seed"),
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
        ("model", "model: holds a model, not a dataset"),
        ("run.yaml", "run.yaml: not a dataset folder"),
        ("city", "city: holds a city, not a dataset"),
    ],
)
def test_what_is_not_a_dataset_is_one_sentence_and_nothing_is_left(
    world: World, refusal: Refusal, tmp_path: Path, dataset: str, sentence: str
) -> None:
    command = ["train", world.root / dataset, "--out", tmp_path / "new", "--config", world.config]
    assert sentence in refusal(*command)


@pytest.mark.parametrize("out", ["dataset", "dataset/model", "."])
def test_an_out_that_lies_over_the_dataset_is_refused(world: World, refusal: Refusal, out: str) -> None:
    for option in ("--quiet", "--overwrite", "--resume"):
        assert "lies over the source" in refusal(*world.train(world.root / out, option)), option


@pytest.mark.parametrize("out", ["city", "run.yaml", "run.yaml/model"])
def test_an_out_that_is_something_else_is_left_alone(world: World, refusal: Refusal, out: str) -> None:
    for option in ("--quiet", "--overwrite", "--resume"):
        assert f"{out}: " in refusal(*world.train(world.root / out, option)), option


# ---- several processes

# what the autoencoder adds to its latents is drawn in each process for itself
FEW = ("--set", "autoencoder.steps=20", "--set", "denoiser.steps=20", "--set", "autoencoder.noise=0")
TWO = ("--devices", 2, "--accelerator", "cpu")


@pytest.mark.slow
def test_two_processes_train_to_the_losses_of_one(world: World, tmp_path: Path) -> None:
    assert world.warm.run(*world.train(tmp_path / "one", *FEW)).code == 0
    two = finish_cold(start_cold(*world.train(tmp_path / "two", *FEW, *TWO, "--json")))
    assert two.code == 0, two.err
    assert names(tmp_path) == ["one", "two"]
    assert names(tmp_path / "two") == FILES
    alone, together = lines(tmp_path / "one"), lines(tmp_path / "two")
    assert [(line["stage"], line["step"]) for line in together] == [(line["stage"], line["step"]) for line in alone]
    assert [line["loss"] for line in together] == pytest.approx([line["loss"] for line in alone], abs=1e-5)
    report = json.loads(two.out)  # printed once
    assert report["denoiser"]["loss"] == together[-1]["loss"]


@pytest.mark.slow
def test_two_processes_stopped_and_killed_end_in_the_same_bytes(world: World, tmp_path: Path) -> None:
    whole, out = tmp_path / "whole", tmp_path / "model"
    assert finish_cold(start_cold(*world.train(whole, *TWO))).code == 0
    process = start_cold(*world.train(out, *TWO, *OFTEN))
    wait_until(lambda: last_step(out, "autoencoder") > 0, "a checkpoint")
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to both
    stopped = finish_cold(process)
    assert "continue with --resume" in stopped.err
    process = start_cold(*world.train(out, *TWO, *OFTEN, "--resume"))
    wait_until(lambda: last_step(out, "denoiser") > 0, "a checkpoint")
    process.kill()  # the first only; the other one must not stay behind, it holds our end of the pipe
    assert finish_cold(process).code == -signal.SIGKILL
    assert finish_cold(start_cold(*world.train(out, *TWO, "--resume"))).code == 0
    check_same(out, whole)
    assert stopped.code == 130
