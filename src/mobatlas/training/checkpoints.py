"""Checkpoints, weights and the metrics log on disk.

Tensors are safetensors files, never pickles, so reading them runs no code. They load completely or
are refused. A killed process leaves complete files only: each file is written under a hidden name,
synced and renamed.
"""

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save
from torch import Tensor, nn

from mobatlas.config import format_assignments
from mobatlas.errors import MachineError, MobatlasError
from mobatlas.io.manifest import SNAPSHOTS, write_atomic

FORMAT = 2  # of checkpoints; other formats are refused
MAX_CHECKPOINTS = 2  # the newest, and the one before it in case the disk loses the newest
# All facts are under one key: safetensors writes several keys in random order, and equal runs must
# give equal bytes.
HEADER = "mobatlas"
FINAL = "final"
STEP_PATTERN = "[0-9]" * 8
WEIGHTS = "weights.safetensors"
START_OVER = "start over with --overwrite"
SAME_CONFIGURATION = f"pass the same configuration, or {START_OVER}"
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
class StageIdentity:
    """The values that a checkpoint shares with every run that can resume from it."""

    stage: str
    seed: int
    config: Mapping[str, Any]
    settings: Mapping[str, Any]  # of the stage: steps, learning rate, ...

    def facts(self) -> dict[str, Any]:
        """The identity as JSON values, with a hash."""
        values = json.loads(
            json.dumps({"config": self.config, "settings": self.settings}, default=str)
        )
        text = json.dumps([self.stage, self.seed, values], sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()
        return {"stage": self.stage, "seed": self.seed, "config_hash": digest, **values}

    def difference(self, other: Mapping[str, Any]) -> str | None:
        """Describe the first difference from the facts of another run; None if there is none."""
        own = self.facts()
        if own["config_hash"] == other["config_hash"]:
            return None
        now = _flatten(own)
        before = _flatten(other)
        differences = (
            _compare(key, before.get(key, "absent"), now.get(key, "absent"))
            for key in [*now, *before]
            if now.get(key) != before.get(key)
        )
        return next(differences, "its configuration has another hash")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint in memory: tensors by name, and the facts of its header."""

    path: Path
    tensors: dict[str, Tensor]
    facts: dict[str, Any]

    @property
    def step(self) -> int:
        """The number of finished steps."""
        return int(self.facts["step"])

    @property
    def metrics(self) -> dict[str, float] | None:
        """The metrics of a finished stage, whose tensors are its weights; None before that."""
        return self.facts.get("metrics")


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of one stage: `STAGE-STEP.safetensors`, and `STAGE-final.safetensors`."""

    folder: Path
    identity: StageIdentity

    def sweep(self) -> None:
        """Remove the partial files and obsolete checkpoints of a killed process."""
        # Other processes of this training may be writing files of other names.
        for partial in self.folder.glob(f".{self.identity.stage}-*.partial"):
            partial.unlink(missing_ok=True)
        self._keep(0 if self._path(FINAL).exists() else MAX_CHECKPOINTS)

    def newest(self) -> Checkpoint | None:
        """Read the final weights or the last step; refuse a damaged file and another run's."""
        if self._path(FINAL).exists():
            return self._read(
                self._path(FINAL), f"delete it to train the {self.identity.stage} again"
            )
        if not (steps := self._steps()):
            return None
        earlier = f"step {steps[-2]}" if len(steps) > 1 else "the beginning"
        return self._read(self._path(steps[-1]), f"delete it to continue from {earlier}")

    def save(self, step: int, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        """Write the checkpoint of a step and delete the oldest."""
        self._write(self._path(step), tensors, {"step": step, **facts})
        self._keep(MAX_CHECKPOINTS)

    def finish(
        self, step: int, weights: Mapping[str, Tensor], metrics: Mapping[str, float]
    ) -> None:
        """Write the final weights and delete the checkpoints of steps."""
        self._write(self._path(FINAL), weights, {"step": step, "metrics": dict(metrics)})
        self._keep(0)

    def describe(self) -> str:
        """Say which checkpoint training can resume from."""
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
        paths = self.folder.glob(f"{self.identity.stage}-{STEP_PATTERN}.safetensors")
        return sorted(int(path.stem[-8:]) for path in paths)

    def _keep(self, count: int) -> None:
        steps = self._steps()
        for step in steps[: max(0, len(steps) - count)]:
            self._path(step).unlink(missing_ok=True)

    def _write(self, path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        header = {"format": FORMAT, **self.identity.facts(), **facts}
        content = save(_on_cpu(tensors), {HEADER: json.dumps(header)})
        with _explain_disk_error(path, self.describe()):
            write_atomic(path, content)

    def _read(self, path: Path, remedy: str) -> Checkpoint:
        try:
            with safe_open(path, framework="pt") as opened:
                facts = json.loads((opened.metadata() or {})[HEADER])
                tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
            if any(not isinstance(facts[key], kind) for key, kind in _FACTS.items()):
                raise ValueError
        except (OSError, SafetensorError, ValueError, KeyError, TypeError, RecursionError):
            raise MobatlasError(
                f"{path}: this is not a readable checkpoint (cut short, or not written by "
                f"mobatlas); {remedy}, or {START_OVER}"
            ) from None
        if facts["format"] != FORMAT:
            raise MobatlasError(
                f"{path}: the file has checkpoint format {facts['format']}, and this version of "
                f"mobatlas reads format {FORMAT}; {START_OVER}"
            )
        if difference := self.identity.difference(facts):
            raise MobatlasError(
                f"{path}: this checkpoint is from another run: {difference}; {SAME_CONFIGURATION}"
            )
        return Checkpoint(path, tensors, facts)


class State:
    """Everything that a training step changes: weights, their moving average, and the optimiser."""

    def __init__(
        self, network: nn.Module, optimizer: torch.optim.Optimizer, ema: float | None
    ) -> None:
        self.network = network
        self.optimizer = optimizer
        self.ema = ema
        self.trained = {name: p for name, p in network.named_parameters() if p.requires_grad}
        self.average = {
            name: p.detach().clone() for name, p in self.trained.items() if ema is not None
        }

    @torch.no_grad()
    def update_average(self, step: int) -> None:
        """Move the average towards the weights; faster at first, to forget the initial weights."""
        if self.ema is not None:
            weight = 1.0 - min(self.ema, (1 + step) / (10 + step))
            for name, average in self.average.items():
                average.lerp_(self.trained[name], weight)

    @torch.no_grad()
    def use_average(self) -> None:
        """Replace the weights by their average."""
        for name, average in self.average.items():
            self.trained[name].copy_(average)

    @contextmanager
    def averaged(self) -> Iterator[nn.Module]:
        """Yield the network with averaged weights, in eval mode and without gradients."""
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
        """The state as tensors, by their names in a checkpoint."""
        return {
            **{f"network/{name}": tensor for name, tensor in named_tensors(self.network).items()},
            **{f"average/{name}": tensor for name, tensor in self.average.items()},
            **{
                f"optimizer/{name}/{moment}": value
                for name, parameter in self.trained.items()
                for moment, value in self.optimizer.state[parameter].items()
            },
            "rng": torch.get_rng_state(),
        }

    def load(self, checkpoint: Checkpoint) -> None:
        """Restore the state of a checkpoint."""
        for name, parameter in self.trained.items():
            # A parameter that never had a gradient has no moments.
            if f"optimizer/{name}/step" in checkpoint.tensors:
                self.optimizer.state[parameter] = {
                    "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }
        tensors = self.tensors()
        copy_strictly(checkpoint.path, checkpoint.tensors, tensors)
        torch.set_rng_state(tensors["rng"])


def named_tensors(network: nn.Module) -> dict[str, Tensor]:
    """Weights and buffers by name; tied weights are one tensor, under their first name."""
    first_names: dict[int, str] = {}
    tensors = network.state_dict(keep_vars=True)
    for name, tensor in tensors.items():
        first_names.setdefault(id(tensor), name)
    return {name: tensors[name] for name in first_names.values()}


def copy_strictly(
    path: Path,
    saved: Mapping[str, Tensor],
    target: Mapping[str, Tensor],
    remedy: str = SAME_CONFIGURATION,
) -> None:
    """Copy the tensors of a file; nothing is copied unless all names, shapes and dtypes agree."""
    for name in [*target, *saved]:
        before = _layout(saved.get(name))
        now = _layout(target.get(name))
        if before != now:
            raise MobatlasError(f"{path}: {_compare(name, before, now)}; {remedy}")
    with torch.no_grad():
        for name, tensor in target.items():
            tensor.copy_(saved[name])


def save_weights(folder: Path, networks: Mapping[str, nn.Module]) -> None:
    """Write the weights and buffers of named networks."""
    write_atomic(folder / WEIGHTS, save(_on_cpu(_prefixed_tensors(networks))))


def save_snapshot(folder: Path, stage: str, step: int, network: nn.Module) -> None:
    """Write the weights of a network after a step into the folder of a model."""
    path = folder / SNAPSHOTS / f"{stage}-{step:08d}.safetensors"
    path.parent.mkdir(exist_ok=True)
    write_atomic(path, save(_on_cpu(named_tensors(network))))


def read_weights(path: Path) -> dict[str, Tensor]:
    """Read tensors by name."""
    try:
        return load_file(path)
    except (OSError, SafetensorError, ValueError):
        raise MobatlasError(
            f"{path}: this is not a readable safetensors file (cut short, or not written by "
            "mobatlas); train the model again"
        ) from None


def load_weights(folder: Path, networks: Mapping[str, nn.Module]) -> None:
    """Read the weights of named networks; they must fit and be finite."""
    path = folder / WEIGHTS
    saved = read_weights(path)
    for name, tensor in saved.items():
        if not bool(tensor.isfinite().all()):
            raise MobatlasError(f"{path}: {name} has infinite or NaN values; train the model again")
    copy_strictly(
        path,
        saved,
        _prefixed_tensors(networks),
        remedy="its weights do not fit config.json, so train the model again",
    )


def append_line(path: Path, values: Mapping[str, Any]) -> None:
    """Append a line of JSON; infinite and NaN values become null."""
    finite = {
        key: None if isinstance(v, float) and not math.isfinite(v) else v
        for key, v in values.items()
    }
    with _explain_disk_error(path), path.open("a", encoding="utf-8") as handle:
        handle.write(json.dumps(finite) + "\n")


def rewind_lines(path: Path, stage: str, step: int) -> None:
    """Delete the lines of a stage after a step, and a line that a kill cut short."""
    with _explain_disk_error(path):
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        valid = [line for line in lines if _precedes(line, stage, step)]
        write_atomic(path, "".join(f"{line}\n" for line in valid).encode())


def _precedes(line: str, stage: str, step: int) -> bool:
    try:
        values = json.loads(line)
        return bool(values["stage"] != stage or values["step"] <= step)
    except (ValueError, KeyError, TypeError):
        return False


@contextmanager
def _explain_disk_error(path: Path, intact: str = "checkpoints are intact") -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise MachineError(
            f"{path}: could not be written ({error.strerror}); {intact}; make room, then "
            "continue with --resume"
        ) from None


def _flatten(facts: Mapping[str, Any]) -> dict[str, str]:
    """Facts by dotted name, as JSON."""
    lines = [
        *format_assignments({"stage": facts["stage"], "seed": facts["seed"], **facts["config"]}),
        *format_assignments(facts["settings"], f"{facts['stage']}."),
    ]
    return dict(line.split("=", 1) for line in lines)


def _compare(name: str, before: str, now: str) -> str:
    return f"{name} is {before} in the file and {now} now"


def _layout(tensor: Tensor | None) -> str:
    return (
        "absent"
        if tensor is None
        else f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
    )


def _on_cpu(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


def _prefixed_tensors(networks: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    return {
        f"{prefix}.{name}": tensor
        for prefix, network in networks.items()
        for name, tensor in named_tensors(network).items()
    }
