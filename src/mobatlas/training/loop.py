"""The training loop that all generators share: killed at any moment, it goes on to the same bytes.

Everything a step draws is a function of (seed, stage, step), and everything a step changes is in the checkpoint, so that a run
that was stopped and one that was not cannot be told apart by their weights.
"""

from __future__ import annotations

import hashlib
import logging
import math
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from mobatlas.errors import MobatlasError
from mobatlas.progress import SILENT, Tracker, track
from mobatlas.training.checkpoints import (
    Checkpoint,
    Checkpoints,
    Identity,
    State,
    append_line,
    copy_strictly,
    named_tensors,
    only_one_process,
    rewind_lines,
    sync,
    training_state,
)
from mobatlas.training.devices import deterministic, fabric_on, signals_wait

log = logging.getLogger("mobatlas")
METRICS = "metrics.jsonl"
SECONDS_BETWEEN_NOTES = 5.0  # a loss that flickers cannot be read
Progress = Callable[[str, float], AbstractContextManager[Tracker]]  # (title, total)


class Stopped(MobatlasError):  # noqa: N818
    """Training was told to stop, and left a checkpoint of its last step; `signal` is the number it was told by."""

    def __init__(self, sentence: str, received: list[int]) -> None:
        super().__init__(f"{sentence}; continue with --resume")
        self.signal = (
            received[0] if received else int(signal.SIGINT)
        )  # another process may have been told


@dataclass(frozen=True)
class Share:
    """Which rows of the global batch this process works on."""

    rank: int = 0
    world: int = 1

    def rows(self, n: int) -> slice:
        """Its part of n rows: contiguous, and as long as the others' to within one."""
        return slice(n * self.rank // self.world, n * (self.rank + 1) // self.world)


@dataclass(frozen=True)
class Stage:
    """One optimisation: a network, the loss of a step, and how to go down it."""

    name: str
    network: nn.Module
    steps: int
    # (network to call, step from 0, share) -> scalar; its mean over the processes is the loss of the global batch
    loss: Callable[[nn.Module, int, Share], Tensor]
    learning_rate: float
    optimizer: Literal["adam", "adamw"] = "adam"
    weight_decay: float = 0.0
    warmup: int = 0  # steps, linear
    decay: Literal["none", "linear", "cosine"] = (
        "none"  # of the learning rate over the rest of the steps
    )
    clip: float | None = 1.0  # gradient norm
    ema: float | None = None  # decay of the average of the weights, with which the network ends
    validate: Callable[[nn.Module], dict[str, float]] | None = (
        None  # sees the averaged weights, in eval mode
    )
    validate_every: int | None = None  # steps; at the end in any case
    examples_per_step: int = 0  # for the throughput
    unused_parameters: bool = (
        False  # some steps leave a parameter out: several processes must then look for it
    )

    def rate(self, step: int) -> float:
        """The learning rate of a step: up linearly, then down as `decay` says."""
        if step < self.warmup:
            return self.learning_rate * (step + 1) / self.warmup
        gone = (step - self.warmup) / max(1, self.steps - self.warmup)  # 0 to 1
        factor = {
            "none": 1.0,
            "linear": 1.0 - gone,
            "cosine": 0.5 * (1.0 + math.cos(math.pi * gone)),
        }[self.decay]
        return self.learning_rate * factor

    def validates(self, done: int) -> bool:
        """Whether it is time to after so many steps."""
        every = self.validate_every
        return self.validate is not None and (
            done == self.steps or (every is not None and done % every == 0)
        )

    def settings(self) -> dict[str, Any]:
        """What its numbers depend on, beside the configuration."""
        names = (
            "steps",
            "learning_rate",
            "optimizer",
            "weight_decay",
            "warmup",
            "decay",
            "clip",
            "ema",
        )
        return {name: getattr(self, name) for name in names}

    def state(self) -> State:
        """Network and optimiser before the first step."""
        kind = torch.optim.AdamW if self.optimizer == "adamw" else torch.optim.Adam
        trained = [parameter for parameter in self.network.parameters() if parameter.requires_grad]
        # fused: a quarter of the time on a CPU
        optimizer = kind(trained, lr=self.learning_rate, weight_decay=self.weight_decay, fused=True)
        return State(self.network, optimizer, self.ema)


@dataclass
class _Journal:
    """What a stage tells of itself while it runs: the bar, metrics.jsonl, TensorBoard."""

    stage: Stage
    tracker: Tracker
    metrics: Path | None
    board: Any
    first: int  # steps that processes before this one did
    start: float  # when the stage would have begun, had they been this one

    def __post_init__(self) -> None:
        self._logged, self._clock = self.first, time.monotonic()
        self._note, self._noted = "", -math.inf

    @property
    def seconds(self) -> float:
        """Spent on the stage so far."""
        return round(time.monotonic() - self.start, 3)

    def speed(self, done: int) -> float:
        """Examples a second since the last line."""
        passed = max(time.monotonic() - self._clock, 1e-9)
        return round((done - self._logged) * self.stage.examples_per_step / passed, 1)

    def step(self, done: int) -> None:
        """Move the bar; it counts from where this process began, and so does its ETA."""
        self.tracker.step(done - self.first, self._note)

    def line(self, done: int, values: dict[str, float]) -> None:
        """Log the values of a step."""
        now, speed = time.monotonic(), values["examples_per_second"]
        if now - self._noted >= SECONDS_BETWEEN_NOTES or done == self.stage.steps:
            self._note = f"loss {values['loss']:.4g}" + (
                f", {speed:.0f} examples/s" if speed else ""
            )
            self._noted = now
        if self.metrics:
            append_line(
                self.metrics,
                {"stage": self.stage.name, "step": done, **values, "seconds": self.seconds},
            )
        if self.board:
            for name, value in values.items():
                self.board.add_scalar(f"{self.stage.name}/{name}", value, done)
        self._clock, self._logged = now, done


@dataclass(frozen=True)
class _Run:
    """A stage on its way."""

    stage: Stage
    state: State
    checkpoints: Checkpoints | None
    journal: _Journal
    received: list[int]  # signals


class Trainer:
    """Runs stages one after the other: each is trained, continued or read, as the folder has it."""

    def __init__(
        self,
        folder: Path | None,
        *,
        seed: int = 0,
        config: dict[str, Any] | None = None,
        resume: bool = False,
        checkpoint_seconds: float = 30.0,
        checkpoint_steps: int | None = None,  # whichever comes first
        log_every: int = 10,
        accelerator: str = "auto",
        devices: int = 1,
        precision: str = "auto",
        tensorboard: bool = False,
        quiet: bool = False,
        progress: Progress | None = None,
    ) -> None:
        if not 0 <= seed < 2**63:
            raise MobatlasError(f"--seed {seed}: is not a whole number from 0 to 2^63 - 1")
        self.folder, self.seed, self.config = folder, seed, config or {}
        self.checkpoint_seconds, self.checkpoint_steps, self.log_every = (
            checkpoint_seconds,
            checkpoint_steps,
            log_every,
        )
        self.fabric = fabric_on(accelerator, devices, precision)
        self.device: torch.device = self.fabric.device
        self.share = Share(self.fabric.global_rank, self.fabric.world_size)
        self._progress: Progress = progress or (lambda title, total: track(title, total, quiet))
        self._board = _summary_writer() if tensorboard else None
        if folder:
            self._first(lambda: _open(folder, resume))

    def path(self, name: str) -> Path | None:
        """A file in the training folder, for caches, if there is a folder; each process has its own."""
        if self.folder is None:
            return None
        path = self.folder / name
        return path.with_stem(f"{path.stem}-{self.share.rank}") if self.share.rank else path

    def run(self, stage: Stage) -> dict[str, float]:
        """Train a stage, or continue it, or read what it came to; the final weights are in its network."""
        stage.network.to(self.device)
        with signals_wait(self.folder is not None) as received, deterministic(), self._locked():
            metrics = self._train_or_read(stage, received)
            if any(self._agree(bool(received))):
                raise Stopped(f"stopped after the {stage.name}", received)
        stage.network.zero_grad()
        stage.network.eval()
        self._seed(stage, "end")  # what comes next begins alike, whether this was trained or read
        return metrics

    def _train_or_read(self, stage: Stage, received: list[int]) -> dict[str, float]:
        checkpoints, found = None, None
        if self.folder:
            checkpoints = Checkpoints(
                self.folder, Identity(stage.name, self.seed, self.config, stage.settings())
            )
            self._first(checkpoints.sweep)
            found = checkpoints.newest()
        if found and found.metrics is not None:
            copy_strictly(found.path, found.tensors, named_tensors(stage.network))
            return found.metrics
        state = stage.state()
        if found:
            state.load(found)
        if found and self.share.rank == 0:
            log.info("%s: continues from step %d of %d", stage.name, found.step, stage.steps)
            if found.facts.get("machine") != self._machine():
                log.warning(
                    "%s: last digits may differ, it ran on %s before",
                    stage.name,
                    found.facts.get("machine"),
                )
        with self._journal(stage, found) as journal:
            return self._train(_Run(stage, state, checkpoints, journal, received))

    def _train(self, run: _Run) -> dict[str, float]:
        stage, saved = run.stage, time.monotonic()
        if self.share.world > 1:
            strategy: Any = (
                self.fabric.strategy
            )  # has one option for all modules, where each stage has its own
            strategy._ddp_kwargs["find_unused_parameters"] = stage.unused_parameters
        wrapped, optimizer = self.fabric.setup(stage.network, run.state.optimizer)
        stage.network.train()
        metrics: dict[str, float] = {}
        for done in range(run.journal.first + 1, stage.steps + 1):
            loss, norm = self._step(run, wrapped, optimizer, done - 1)
            metrics = self._tell(run, done, loss, norm)
            if done == stage.steps:
                break
            due = self.share.rank == 0 and self._due(done, time.monotonic() - saved)
            stop, due = self._agree(bool(run.received), due)
            if stop or due:
                self._save(run, done, metrics)
                saved = time.monotonic()
            if stop:
                raise Stopped(
                    f"stopped at step {done} of {stage.steps} of the {stage.name}", run.received
                )
        run.state.use_average()
        self._save(run, stage.steps, metrics)
        return metrics

    def _step(
        self, run: _Run, wrapped: nn.Module, optimizer: torch.optim.Optimizer, step: int
    ) -> tuple[Tensor, Tensor]:
        """One step down; returns the loss of this process and the norm of the gradient of all."""
        stage = run.stage
        self._seed(stage, step)
        for group in optimizer.param_groups:
            group["lr"] = stage.rate(step)
        optimizer.zero_grad()
        loss = stage.loss(wrapped, step, self.share)
        self.fabric.backward(loss)
        limit = math.inf if stage.clip is None else stage.clip
        norm = self.fabric.clip_gradients(
            wrapped, optimizer, max_norm=limit, error_if_nonfinite=False
        )
        assert norm is not None
        loss = loss.detach()
        # the norm is the same in every process, so that all stop or none
        if not math.isfinite(norm if self.share.world > 1 else loss + norm):
            kept = f"; {run.checkpoints.intact()}" if run.checkpoints else ""
            raise MobatlasError(
                f"the {stage.name} diverged at step {step + 1} (loss {float(loss):.4g}, gradient norm {float(norm):.4g}): "
                f"lower its learning rate, now {stage.rate(step):.3g}{kept}"
            )
        optimizer.step()
        run.state.update_average(step)
        return loss, norm

    def _tell(self, run: _Run, done: int, loss: Tensor, norm: Tensor) -> dict[str, float]:
        """Validate and log if it is time to; returns what there is to say of the model after so many steps."""
        stage, metrics = run.stage, {}
        if stage.validates(done) or done in (1, stage.steps) or done % self.log_every == 0:
            timing = {"examples_per_second": run.journal.speed(done)}
            metrics = {"loss": float(self._mean(loss))}
            if stage.validate and stage.validates(done):
                self._seed(stage, "validation")  # the same noise each time
                with run.state.averaged() as network:
                    metrics |= {
                        name: float(value) for name, value in stage.validate(network).items()
                    }
            values = {**metrics, "lr": stage.rate(done - 1), "grad_norm": float(norm), **timing}
            self._first(lambda: run.journal.line(done, values))
        run.journal.step(done)
        return metrics

    def _save(self, run: _Run, done: int, metrics: dict[str, float]) -> None:
        """A checkpoint of a step, or in the end the weights and what they came to."""
        checkpoints, journal = run.checkpoints, run.journal

        def save() -> None:
            if checkpoints and journal.metrics:
                sync(journal.metrics)  # its lines up to this step are not written again
                if done == run.stage.steps:
                    checkpoints.finish(done, named_tensors(run.stage.network), metrics)
                else:
                    facts = {"seconds": journal.seconds, "machine": self._machine()}
                    checkpoints.save(done, run.state.tensors(), facts)

        self._first(save)

    def _due(self, done: int, seconds: float) -> bool:
        by_steps = self.checkpoint_steps is not None and done % self.checkpoint_steps == 0
        return self.folder is not None and (by_steps or seconds >= self.checkpoint_seconds)

    def _machine(self) -> str:
        """What the last digits of a sum depend on."""
        kind, precision = self.device.type, self.fabric.strategy.precision.precision
        return f"torch {torch.__version__}, {self.share.world} x {kind}, {torch.get_num_threads()} threads, {precision}"

    def _seed(self, stage: Stage, step: int | str) -> None:
        """Begin the randomness of a step, the same in every process."""
        digest = hashlib.blake2b(
            f"{self.seed}/{stage.name}/{step}".encode(), digest_size=8
        ).digest()
        number = int.from_bytes(digest) >> 1  # 63 bits
        # torch.manual_seed seeds accelerators as well, and takes half a millisecond to find that there are none
        seed = (
            torch.default_generator.manual_seed if self.device.type == "cpu" else torch.manual_seed
        )
        seed(number)

    @contextmanager
    def _journal(self, stage: Stage, found: Checkpoint | None) -> Iterator[_Journal]:
        """Only the first process has anything to tell."""
        done, seconds = (found.step, found.facts.get("seconds", 0.0)) if found else (0, 0.0)
        tracker, metrics, board = SILENT, None, None
        with ExitStack() as stack:
            if self.share.rank == 0:
                tracker = stack.enter_context(
                    self._progress(f"training {stage.name}", stage.steps - done)
                )
            if self.share.rank == 0 and self.folder:
                metrics = self.folder.parent / METRICS
                board = self._board and self._board(
                    str(self.folder.parent / "tensorboard"), purge_step=done + 1
                )
                stack.callback(board.close if board else lambda: None)
            if self.folder:
                self._first(partial(rewind_lines, self.folder.parent / METRICS, stage.name, done))
            yield _Journal(stage, tracker, metrics, board, done, time.monotonic() - seconds)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with ExitStack() as stack:
            folder = self.folder
            self._first(lambda: folder and stack.enter_context(only_one_process(folder)))
            yield

    def _first(self, action: Callable[[], object]) -> None:
        """Do something in the first process only; the others wait, and learn if it failed."""
        failure: MobatlasError | None = None
        if self.share.rank == 0:
            try:
                action()
            except MobatlasError as error:
                failure = error
        if any(self._agree(failure is not None)):
            raise failure or MobatlasError("the first process stopped, and says why")

    def _agree(self, *flags: bool) -> tuple[bool, ...]:
        """Which flags any process has raised: the same answer everywhere."""
        if self.share.world == 1:
            return flags
        return tuple(
            (self._mean(torch.tensor(flags, dtype=torch.float32, device=self.device)) > 0).tolist()
        )

    def _mean(self, values: Tensor) -> Tensor:
        """Over the processes."""
        mean = self.fabric.all_reduce(values, reduce_op="mean")
        assert isinstance(mean, Tensor)
        return mean


def _open(folder: Path, resume: bool) -> None:
    state = training_state(folder)
    if state and not resume:
        raise MobatlasError(
            f"{state}: training was begun here; pass --resume to go on or --overwrite to start anew"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not state:
            (folder.parent / METRICS).unlink(
                missing_ok=True
            )  # of a run that never came to a checkpoint
    except OSError as error:
        raise MobatlasError(f"{folder}: cannot be made ({error.strerror})") from None


def _summary_writer() -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise MobatlasError(
            "--tensorboard: it is not installed; pip install 'mobatlas[tensorboard]'"
        ) from None
    return SummaryWriter
