"""The training loop of all generators; a run that was killed and resumed ends in the same bytes.

The random numbers of a step are a function of (seed, stage, step). A checkpoint contains everything
that a step changes.
"""

import hashlib
import math
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from mobatlas.errors import MobatlasError, log
from mobatlas.io.manifest import SNAPSHOTS, sync
from mobatlas.progress import SILENT, Tracker, track
from mobatlas.training.checkpoints import (
    Checkpoint,
    Checkpoints,
    StageIdentity,
    State,
    append_line,
    copy_strictly,
    named_tensors,
    rewind_lines,
    save_snapshot,
)
from mobatlas.training.devices import defer_signals, deterministic, launch_fabric

METRICS = "metrics.jsonl"
SECONDS_BETWEEN_NOTES = 5.0  # a loss that changes at every step cannot be read
IDENTIFYING_SETTINGS = (
    "steps",
    "learning_rate",
    "optimizer",
    "weight_decay",
    "warmup",
    "decay",
    "clip",
    "ema",
)
Progress = Callable[[str, float], AbstractContextManager[Tracker]]  # (title, total)


@dataclass(frozen=True)
class Execution:
    """Where and how a training command runs; the defaults suit one machine.

    Parameters
    ----------
    resume
        Continue an interrupted training of the same configuration.
    overwrite
        Replace a folder that mobatlas wrote.
    accelerator
        "auto", "cpu", "cuda" or "mps".
    devices
        Number of processes, one per device.
    precision
        "auto", "32-true" or "bf16-mixed".
    checkpoint_seconds
        Longest time between two checkpoints.
    snapshot_steps
        Steps between two snapshots of the weights, which stay in the MODEL folder so that
        `python -m bench checkpoints` can draw a learning curve; None for no snapshots.
    quiet
        Print log lines instead of a progress bar.

    Examples
    --------
    >>> from mobatlas import Atlas, Execution
    >>> atlas = Atlas(execution=Execution(accelerator="cpu", quiet=True))
    """

    resume: bool = False
    overwrite: bool = False
    accelerator: str = "auto"
    devices: int = 1
    precision: str = "auto"
    checkpoint_seconds: float = 30.0
    snapshot_steps: int | None = None
    quiet: bool = False


DEFAULT_EXECUTION = Execution()


class Stopped(MobatlasError):  # noqa: N818
    """A signal stopped training after a checkpoint; `signal` is its number."""

    def __init__(self, sentence: str, received: list[int]) -> None:
        super().__init__(f"{sentence}; continue with --resume")
        # With several processes, another one may have received the signal.
        self.signal = received[0] if received else int(signal.SIGINT)


@dataclass(frozen=True)
class Share:
    """The rows of the global batch that this process works on."""

    rank: int = 0
    world: int = 1

    def rows(self, n: int) -> slice:
        """Its contiguous part of n rows; the parts of two processes differ by at most one row."""
        return slice(n * self.rank // self.world, n * (self.rank + 1) // self.world)


@dataclass(frozen=True)
class Stage:
    """One optimisation: a network, the loss of a step, and the settings of the optimiser."""

    name: str
    network: nn.Module
    steps: int
    # (network to call, step from 0, share) -> scalar loss; the loss of the global batch is the
    # mean over the processes.
    loss: Callable[[nn.Module, int, Share], Tensor]
    learning_rate: float
    optimizer: Literal["adam", "adamw"] = "adam"
    weight_decay: float = 0.0
    warmup: int = 0  # steps of linear warm-up
    decay: Literal["none", "linear", "cosine"] = "none"  # of the learning rate, after the warm-up
    clip: float | None = 1.0  # largest gradient norm
    ema: float | None = None  # decay of the moving average, which becomes the final weights
    validate: Callable[[nn.Module], dict[str, float]] | None = None  # of the averaged weights
    validate_every: int | None = None  # steps; the last step is always validated
    examples_per_step: int = 0  # for the throughput
    exported: nn.Module | None = None  # the generator's network, in snapshots; None: `network`

    def rate(self, step: int) -> float:
        """The learning rate of a step: a linear warm-up, then `decay`."""
        if step < self.warmup:
            return self.learning_rate * (step + 1) / self.warmup
        progress = (step - self.warmup) / max(1, self.steps - self.warmup)  # 0 to 1
        factor = {
            "none": 1.0,
            "linear": 1.0 - progress,
            "cosine": 0.5 * (1.0 + math.cos(math.pi * progress)),
        }[self.decay]
        return self.learning_rate * factor

    def validates(self, done: int) -> bool:
        """Whether the model is validated after this number of steps."""
        return self.validate is not None and (
            done == self.steps
            or (self.validate_every is not None and done % self.validate_every == 0)
        )

    def identity(self, seed: int, config: dict[str, Any]) -> StageIdentity:
        """The identity that a checkpoint of this stage must match."""
        settings = {name: getattr(self, name) for name in IDENTIFYING_SETTINGS}
        return StageIdentity(self.name, seed, config, settings)

    def state(self) -> State:
        """Network and optimiser before the first step."""
        kind = torch.optim.AdamW if self.optimizer == "adamw" else torch.optim.Adam
        trained = [parameter for parameter in self.network.parameters() if parameter.requires_grad]
        # `fused` takes a quarter of the time on a CPU.
        optimizer = kind(trained, lr=self.learning_rate, weight_decay=self.weight_decay, fused=True)
        return State(self.network, optimizer, self.ema)


@dataclass
class _Journal:
    """The log of a stage: progress bar and metrics.jsonl."""

    stage: Stage
    first: int  # steps that earlier processes finished
    start: float  # monotonic time, moved back by the seconds of earlier processes
    tracker: Tracker = SILENT
    metrics: Path | None = None
    _note: str = ""
    _noted_at: float = -math.inf

    def __post_init__(self) -> None:
        self._logged = self.first
        self._logged_at = time.monotonic()

    @property
    def seconds(self) -> float:
        """Time spent on the stage."""
        return round(time.monotonic() - self.start, 3)

    def speed(self, done: int) -> float:
        """Examples per second since the last line."""
        elapsed = max(time.monotonic() - self._logged_at, 1e-9)
        return round((done - self._logged) * self.stage.examples_per_step / elapsed, 1)

    def step(self, done: int) -> None:
        """Move the bar. It counts only the steps of this process, so that its ETA is right."""
        self.tracker.step(done - self.first, self._note)

    def line(self, done: int, values: dict[str, float]) -> None:
        """Log the values of a step."""
        now = time.monotonic()
        if now - self._noted_at >= SECONDS_BETWEEN_NOTES or done == self.stage.steps:
            speed = values["examples_per_second"]
            suffix = f", {speed:.0f} examples/s" if speed else ""
            self._note = f"loss {values['loss']:.4g}{suffix}"
            self._noted_at = now
        if self.metrics:
            append_line(
                self.metrics,
                {"stage": self.stage.name, "step": done, **values, "seconds": self.seconds},
            )
        self._logged = done
        self._logged_at = now


@dataclass(frozen=True)
class _Run:
    """A stage in training."""

    stage: Stage
    state: State
    checkpoints: Checkpoints | None
    journal: _Journal
    received: list[int]  # signals


class Trainer:
    """Runs stages one after another; a finished stage is read, an interrupted one is resumed.

    Only one process may use `folder` at a time: the caller locks it.

    Parameters
    ----------
    folder
        Folder of the checkpoints; None to train without any.
    execution
        Hardware, checkpoints and progress.
    seed
        Random seed.
    config
        The configuration of the model; a checkpoint of another configuration is refused.
    checkpoint_steps
        Steps between two checkpoints, in addition to `execution.checkpoint_seconds`.
    log_every
        Steps between two lines of metrics.jsonl.
    progress
        Creates the progress bar of a stage from its title and its number of steps.
    """

    def __init__(
        self,
        folder: Path | None,
        execution: Execution = DEFAULT_EXECUTION,
        *,
        seed: int = 0,
        config: dict[str, Any] | None = None,
        checkpoint_steps: int | None = None,
        log_every: int = 10,
        progress: Progress | None = None,
    ) -> None:
        if not 0 <= seed < 2**63:
            raise MobatlasError(f"--seed {seed}: pass a whole number from 0 to 2^63 - 1")
        self.folder = folder
        self.execution = execution
        self.seed = seed
        self.config = config or {}
        self.checkpoint_steps = checkpoint_steps
        self.log_every = log_every
        self.fabric = launch_fabric(execution.accelerator, execution.devices, execution.precision)
        self.device: torch.device = self.fabric.device
        self.share = Share(self.fabric.global_rank, self.fabric.world_size)
        self._progress: Progress = progress or partial(track, quiet=execution.quiet)
        if folder:
            folder.mkdir(parents=True, exist_ok=True)
            if self.share.rank == 0 and not any(folder.glob("*.safetensors")):
                # These belong to a run that stopped before its first checkpoint.
                (folder.parent / METRICS).unlink(missing_ok=True)
                shutil.rmtree(folder.parent / SNAPSHOTS, ignore_errors=True)

    def path(self, name: str) -> Path | None:
        """The path of a cache file of this process, if there is a folder."""
        if self.folder is None:
            return None
        path = self.folder / name
        return path.with_stem(f"{path.stem}-{self.share.rank}") if self.share.rank else path

    def run(self, stage: Stage) -> dict[str, float]:
        """Train, resume or read a stage; return its metrics and leave its network trained."""
        stage.network.to(self.device)
        with defer_signals(self.folder is not None) as received, deterministic():
            metrics = self._train_or_read(stage, received)
            if any(self._agree(bool(received))):
                raise Stopped(f"stopped after the {stage.name}", received)
        stage.network.zero_grad()
        stage.network.eval()
        self._seed(stage, "end")  # later draws must not depend on whether it was read
        return metrics

    def _train_or_read(self, stage: Stage, received: list[int]) -> dict[str, float]:
        checkpoints = None
        newest = None
        if self.folder:
            checkpoints = Checkpoints(self.folder, stage.identity(self.seed, self.config))
            self._first(checkpoints.sweep)
            newest = checkpoints.newest()
        if newest and newest.metrics is not None:
            copy_strictly(newest.path, newest.tensors, named_tensors(stage.network))
            return newest.metrics
        state = stage.state()
        if newest:
            state.load(newest)
            self._report_resume(stage, newest)
        with ExitStack() as stack:
            journal = self._journal(stage, newest, stack)
            return self._train(_Run(stage, state, checkpoints, journal, received))

    def _report_resume(self, stage: Stage, newest: Checkpoint) -> None:
        if self.share.rank == 0:
            log.info("%s: resumes from step %d of %d", stage.name, newest.step, stage.steps)
            machine = newest.facts.get("machine")
            if machine != self._machine():
                log.warning(
                    "%s: the last digits may differ; the checkpoint was written with %s",
                    stage.name,
                    machine,
                )

    def _train(self, run: _Run) -> dict[str, float]:
        stage = run.stage
        saved_at = time.monotonic()
        wrapped, optimizer = self.fabric.setup(stage.network, run.state.optimizer)
        stage.network.train()
        metrics: dict[str, float] = {}
        for done in range(run.journal.first + 1, stage.steps + 1):
            loss, norm = self._step(run, wrapped, optimizer, done - 1)
            metrics = self._log_step(run, done, loss, norm)
            every = self.execution.snapshot_steps
            if every and (done % every == 0 or done == stage.steps):
                self._first(partial(self._write_snapshot, run, done))
            if done == stage.steps:
                break
            due = self.share.rank == 0 and self._due(done, time.monotonic() - saved_at)
            stop, due = self._agree(bool(run.received), due)
            if stop or due:
                self._save(run, done, metrics)
                saved_at = time.monotonic()
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
        """Update the weights; return the loss of this process and the global gradient norm."""
        stage = run.stage
        self._seed(stage, step)
        for group in optimizer.param_groups:
            group["lr"] = stage.rate(step)
        optimizer.zero_grad()
        loss = stage.loss(wrapped, step, self.share)
        self.fabric.backward(loss)
        norm = self.fabric.clip_gradients(
            wrapped,
            optimizer,
            max_norm=math.inf if stage.clip is None else stage.clip,
            error_if_nonfinite=False,
        )
        assert norm is not None
        loss = loss.detach()
        # The norm is equal in all processes, so either all of them stop or none.
        if not math.isfinite(norm if self.share.world > 1 else loss + norm):
            intact = f"; {run.checkpoints.describe()}" if run.checkpoints else ""
            raise MobatlasError(
                f"the {stage.name} diverged at step {step + 1} (loss {float(loss):.4g}, gradient "
                f"norm {float(norm):.4g}): lower its learning rate, now "
                f"{stage.rate(step):.3g}{intact}"
            )
        optimizer.step()
        run.state.update_average(step)
        return loss, norm

    def _log_step(self, run: _Run, done: int, loss: Tensor, norm: Tensor) -> dict[str, float]:
        """Validate and log after some steps; return the metrics of this step, if any."""
        stage = run.stage
        metrics: dict[str, float] = {}
        if stage.validates(done) or done in (1, stage.steps) or done % self.log_every == 0:
            speed = run.journal.speed(done)
            metrics = {"loss": float(self._mean(loss))}
            if stage.validate and stage.validates(done):
                self._seed(stage, "validation")  # the same noise each time
                with run.state.averaged() as network:
                    scores = stage.validate(network)
                metrics |= {name: float(value) for name, value in scores.items()}
            values = {
                **metrics,
                "lr": stage.rate(done - 1),
                "grad_norm": float(norm),
                "examples_per_second": speed,
            }
            self._first(lambda: run.journal.line(done, values))
        run.journal.step(done)
        return metrics

    def _save(self, run: _Run, done: int, metrics: dict[str, float]) -> None:
        """Write the checkpoint of a step, or after the last step the weights and metrics."""

        def save() -> None:
            if run.checkpoints and run.journal.metrics:
                # Resuming does not write the lines of finished steps again.
                sync(run.journal.metrics)
                if done == run.stage.steps:
                    run.checkpoints.finish(done, named_tensors(run.stage.network), metrics)
                else:
                    facts = {"seconds": run.journal.seconds, "machine": self._machine()}
                    run.checkpoints.save(done, run.state.tensors(), facts)

        self._first(save)

    def _write_snapshot(self, run: _Run, done: int) -> None:
        """Write the averaged weights of a step, for a learning curve."""
        if self.folder is not None:
            with run.state.averaged():
                stage = run.stage
                exported = stage.network if stage.exported is None else stage.exported
                save_snapshot(self.folder.parent, stage.name, done, exported)

    def _due(self, done: int, seconds: float) -> bool:
        by_steps = self.checkpoint_steps is not None and done % self.checkpoint_steps == 0
        return self.folder is not None and (
            by_steps or seconds >= self.execution.checkpoint_seconds
        )

    def _machine(self) -> str:
        """The software and hardware that the last digits of a sum depend on."""
        return (
            f"torch {torch.__version__}, {self.share.world} x {self.device.type}, "
            f"{torch.get_num_threads()} threads, {self.fabric.strategy.precision.precision}"
        )

    def _seed(self, stage: Stage, step: int | str) -> None:
        """Seed the random numbers of a step, equally in all processes."""
        text = f"{self.seed}/{stage.name}/{step}"
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        # torch.manual_seed also looks for accelerators, which takes half a millisecond.
        generator = torch.default_generator if self.device.type == "cpu" else torch
        generator.manual_seed(int.from_bytes(digest) >> 1)  # 63 bits

    def _journal(self, stage: Stage, newest: Checkpoint | None, stack: ExitStack) -> _Journal:
        """Open the journal of a stage; only the first process shows and writes anything."""
        done = newest.step if newest else 0
        seconds = newest.facts.get("seconds", 0.0) if newest else 0.0
        journal = _Journal(stage, done, time.monotonic() - seconds)
        if self.share.rank == 0:
            journal.tracker = stack.enter_context(
                self._progress(f"training {stage.name}", stage.steps - done)
            )
        if self.folder:
            journal.metrics = self.folder.parent / METRICS
            self._first(partial(rewind_lines, journal.metrics, stage.name, done))
        return journal

    def _first(self, action: Callable[[], object]) -> None:
        """Call `action` in the first process; the others wait, and stop if it failed."""
        failure: MobatlasError | None = None
        if self.share.rank == 0:
            try:
                action()
            except MobatlasError as error:
                failure = error
        if any(self._agree(failure is not None)):
            raise failure or MobatlasError("the first process stopped; see its error message")

    def _agree(self, *flags: bool) -> tuple[bool, ...]:
        """Which flags are set in any process."""
        if self.share.world == 1:
            return flags
        shares = self._mean(torch.tensor(flags, dtype=torch.float32, device=self.device))
        return tuple((shares > 0).tolist())

    def _mean(self, values: Tensor) -> Tensor:
        """The mean over the processes."""
        return cast(Tensor, self.fabric.all_reduce(values, reduce_op="mean"))
