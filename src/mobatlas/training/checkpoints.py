"""What training leaves on disk: checkpoints that load whole or are refused, and one stream of metrics.

A checkpoint is one safetensors file, never a pickle: reading it runs no code. It is written under a hidden name, synced and
renamed, so that a process killed at any moment leaves whole files only.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from mobatlas.errors import MobatlasError
from mobatlas.io.manifest import sync as sync
from mobatlas.io.manifest import write_whole as write_whole

FORMAT = 1  # of the checkpoints; another one is refused, not guessed at
KEPT = 2  # the newest, and the one before it should a disk lose the newest
HEADER = "mobatlas"  # one key for all facts: safetensors writes several in random order, and equal runs give equal bytes
FINAL = "final"
START_ANEW = "start anew with --overwrite"
_NAME = re.compile(r"(?P<stage>.+)-(?P<step>\d{8}|final)\.safetensors")
_FACTS = {
    "format": int,
    "step": int,
    "stage": str,
    "seed": int,
    "config_hash": str,
    "config": dict,
    "settings": dict,
}


@dataclass(frozen=True)
class Identity:
    """What a checkpoint and the run that goes on from it must agree on."""

    stage: str
    seed: int
    config: Mapping[str, Any]
    settings: Mapping[str, Any]  # of the stage: steps, learning rate, ...

    def facts(self) -> dict[str, Any]:
        """As it is written."""
        values = json.loads(
            json.dumps({"config": self.config, "settings": self.settings}, default=str)
        )
        text = json.dumps([self.stage, self.seed, values], sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()
        return {"stage": self.stage, "seed": self.seed, "config_hash": digest, **values}

    def difference(self, other: Mapping[str, Any]) -> str | None:
        """The first fact that another run has otherwise, in words; None when there is none."""
        own = self.facts()
        if own["config_hash"] == other["config_hash"]:
            return None
        here, there = _by_dotted_name(own), _by_dotted_name(other)
        for key in [*here, *there]:
            ours, theirs = here.get(key, "absent"), there.get(key, "absent")
            if ours != theirs:
                return f"{key} is {theirs} there and {ours} here"
        return "its configuration has another hash"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint as read: tensors by name, and the facts of its header."""

    path: Path
    tensors: dict[str, Tensor]
    facts: dict[str, Any]

    @property
    def step(self) -> int:
        """Steps that were done."""
        return int(self.facts["step"])

    @property
    def metrics(self) -> dict[str, float] | None:
        """What the stage came to, if it is finished; then the tensors are its weights and nothing else."""
        return self.facts.get("metrics")


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of one stage: `<stage>-<step>.safetensors` on the way, `<stage>-final.safetensors` in the end."""

    folder: Path
    identity: Identity

    def sweep(self) -> None:
        """Take away what a killed process left: half-written files, and steps that are not needed any more."""
        for leftover in self.folder.glob(".*.partial"):
            leftover.unlink(missing_ok=True)
        self._keep(0 if self._path(FINAL).exists() else KEPT)

    def newest(self) -> Checkpoint | None:
        """The final weights, or the last step; refused if it cannot be read or belongs to another run."""
        if self._path(FINAL).exists():
            return self._read(
                self._path(FINAL), f"delete it to train the {self.identity.stage} again"
            )
        steps = self._steps()
        if not steps:
            return None
        before = f"from step {steps[-2]}" if len(steps) > 1 else "from the beginning"
        return self._read(self._path(steps[-1]), f"delete it to continue {before}")

    def save(self, step: int, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        """Write the checkpoint of a step and let the oldest go."""
        self._write(self._path(step), tensors, {"step": step, **facts})
        self._keep(KEPT)

    def finish(
        self, step: int, weights: Mapping[str, Tensor], metrics: Mapping[str, float]
    ) -> None:
        """Write the final weights; the steps are not needed any more."""
        self._write(self._path(FINAL), weights, {"step": step, "metrics": dict(metrics)})
        self._keep(0)

    def intact(self) -> str:
        """What there is to go on from, for the sentence of an error."""
        steps = self._steps()
        return (
            f"the checkpoint of step {steps[-1]} is intact"
            if steps
            else "there is no earlier checkpoint"
        )

    def _path(self, step: int | str) -> Path:
        name = step if isinstance(step, str) else f"{step:08d}"
        return self.folder / f"{self.identity.stage}-{name}.safetensors"

    def _steps(self) -> list[int]:
        names = [name for path in self.folder.iterdir() if (name := _NAME.fullmatch(path.name))]
        return sorted(
            int(n["step"])
            for n in names
            if n["stage"] == self.identity.stage and n["step"] != FINAL
        )

    def _keep(self, newest: int) -> None:
        steps = self._steps()
        for step in steps[: max(0, len(steps) - newest)]:
            self._path(step).unlink(missing_ok=True)

    def _write(self, path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        header = {"format": FORMAT, **self.identity.facts(), **facts}
        on_cpu = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        content = save(on_cpu, {HEADER: json.dumps(header)})
        try:
            write_whole(path, content)
        except OSError as error:
            raise MobatlasError(
                f"{path}: could not be written ({error.strerror}); {self.intact()}, make room and continue with --resume"
            ) from None

    def _read(self, path: Path, remedy: str) -> Checkpoint:
        try:
            with safe_open(path, framework="pt") as opened:
                facts = json.loads((opened.metadata() or {})[HEADER])
                tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
            if any(not isinstance(facts[key], kind) for key, kind in _FACTS.items()):
                raise ValueError
        except (OSError, SafetensorError, ValueError, KeyError, TypeError, RecursionError):
            raise MobatlasError(
                f"{path}: is not a readable checkpoint (cut short, or not written by mobatlas); {remedy}, or {START_ANEW}"
            ) from None
        if facts["format"] != FORMAT:
            raise MobatlasError(
                f"{path}: has checkpoint format {facts['format']}, and this mobatlas reads {FORMAT}; {START_ANEW}"
            )
        difference = self.identity.difference(facts)
        if difference:
            raise MobatlasError(
                f"{path}: belongs to another run, {difference}; pass the same configuration, or {START_ANEW}"
            )
        return Checkpoint(path, tensors, facts)


class State:
    """All that a step of training changes: weights, their average, and the moments of the optimiser."""

    def __init__(
        self, network: nn.Module, optimizer: torch.optim.Optimizer, ema: float | None
    ) -> None:
        self.network, self.optimizer, self.ema = network, optimizer, ema
        self.trained = {name: p for name, p in network.named_parameters() if p.requires_grad}
        self.average = (
            {} if ema is None else {name: p.detach().clone() for name, p in self.trained.items()}
        )

    @torch.no_grad()
    def update_average(self, step: int) -> None:
        """Move the average towards the weights, fast at first, so that it forgets where they began."""
        if self.ema is not None:
            weight = 1.0 - min(self.ema, (1 + step) / (10 + step))
            for name, average in self.average.items():
                average.lerp_(self.trained[name], weight)

    @torch.no_grad()
    def use_average(self) -> None:
        """Put the average in place of the weights."""
        for name, average in self.average.items():
            self.trained[name].copy_(average)

    @contextmanager
    def averaged(self) -> Iterator[nn.Module]:
        """The network with averaged weights, in eval mode and without gradients; as it was afterwards."""
        before = {name: self.trained[name].detach().clone() for name in self.average}
        self.use_average()
        self.network.eval()
        try:
            with torch.no_grad():
                yield self.network
        finally:
            self.network.train()
            with torch.no_grad():
                for name, weights in before.items():
                    self.trained[name].copy_(weights)

    def tensors(self) -> dict[str, Tensor]:
        """By the names that they have in a checkpoint."""
        weights = {
            f"network/{name}": tensor for name, tensor in named_tensors(self.network).items()
        }
        averages = {f"average/{name}": tensor for name, tensor in self.average.items()}
        moments = {
            f"optimizer/{name}/{moment}": value
            for name, parameter in self.trained.items()
            for moment, value in self.optimizer.state[parameter].items()
        }
        return weights | averages | moments | {"rng": torch.get_rng_state()}

    def load(self, checkpoint: Checkpoint) -> None:
        """Become what a checkpoint holds."""
        for name, parameter in self.trained.items():
            if (
                f"optimizer/{name}/step" in checkpoint.tensors
            ):  # a parameter that never had a gradient has no moments
                self.optimizer.state[parameter] = {
                    "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }
        wanted = self.tensors()
        copy_strictly(checkpoint.path, checkpoint.tensors, wanted)
        torch.set_rng_state(wanted["rng"])


def training_state(folder: Path) -> Path | None:
    """A checkpoint of any stage, if the folder holds one."""
    paths = sorted(folder.iterdir()) if folder.is_dir() else []
    return next((path for path in paths if _NAME.fullmatch(path.name)), None)


def named_tensors(network: nn.Module) -> dict[str, Tensor]:
    """Weights and buffers under their first names: tied weights are one tensor and are written once."""
    first_names: dict[int, str] = {}
    tensors = network.state_dict(keep_vars=True)
    for name, tensor in tensors.items():
        first_names.setdefault(id(tensor), name)
    return {name: tensors[name] for name in first_names.values()}


def copy_strictly(path: Path, found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    """Copy tensors of a file into place; names, shapes and dtypes must all agree before any is touched."""
    for name in [*wanted, *found]:
        there, here = _layout(found.get(name)), _layout(wanted.get(name))
        if there != here:
            raise MobatlasError(
                f"{path}: has another layout, {name} is {there} there and {here} here; "
                f"pass the same configuration, or {START_ANEW}"
            )
    with torch.no_grad():
        for name, tensor in wanted.items():
            tensor.copy_(found[name])


@contextmanager
def only_one_process(folder: Path) -> Iterator[None]:
    """Keep a second process out of a folder; the lock ends with the process."""
    with _opened(folder) as descriptor:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise MobatlasError(
                f"{folder}: another mobatlas process is training there; wait for it"
            ) from None
        yield


def append_line(path: Path, values: Mapping[str, Any]) -> None:
    """One more line of JSON; what is not a number is null, as JSON has no word for it."""
    plain = {
        key: None if isinstance(v, float) and not math.isfinite(v) else v
        for key, v in values.items()
    }
    with _disk(path), path.open("a", encoding="utf-8") as handle:
        handle.write(json.dumps(plain) + "\n")


def rewind_lines(path: Path, stage: str, step: int) -> None:
    """Drop what a stage logged past a step, and a line that a kill cut short."""
    with _disk(path):
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        write_whole(
            path, "".join(f"{line}\n" for line in lines if _stays(line, stage, step)).encode()
        )


def _stays(line: str, stage: str, step: int) -> bool:
    try:
        values = json.loads(line)
        return bool(values["stage"] != stage or values["step"] <= step)
    except (ValueError, KeyError, TypeError):
        return False


@contextmanager
def _disk(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise MobatlasError(
            f"{path}: could not be written ({error.strerror}); checkpoints are intact, make room and continue with --resume"
        ) from None


def _by_dotted_name(facts: Mapping[str, Any]) -> dict[str, Any]:
    flat = _flat(facts["config"]) | _flat(facts["settings"], f"{facts['stage']}.")
    return {"stage": facts["stage"], "seed": facts["seed"]} | flat


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= (
            _flat(value, f"{prefix}{key}.")
            if isinstance(value, dict)
            else {f"{prefix}{key}": value}
        )
    return flat


def _layout(tensor: Tensor | None) -> str:
    return (
        "absent"
        if tensor is None
        else f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
    )


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
