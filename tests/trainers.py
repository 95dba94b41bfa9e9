"""A network that trains in a blink, on its own or until it crashes, for tests of the trainer."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mobatlas.training.loop import Execution, Share, Stage, Trainer

Loss = Callable[[nn.Module, int, Share], Tensor]
CONFIG = {"denoiser": {"depth": 4, "width": 16}, "batch": 32}
FINAL = "mlp-final.safetensors"


class Crash(Exception):  # noqa: N818
    """The process dies here, as far as the trainer can tell."""


def regression(network: nn.Module, step: int, share: Share) -> Tensor:
    """A batch that depends on the seed of the step, as does the dropout of the network."""
    x = torch.randn(32, 4)[share.rows(32)]
    return ((network(x) - x.sum(1, keepdim=True)) ** 2).mean()


def make_stage(
    steps: int = 12, loss: Loss = regression, dropout: float = 0.2, width: int = 16, **changes: Any
) -> Stage:
    torch.manual_seed(3)
    network = nn.Sequential(
        nn.Linear(4, width), nn.Dropout(dropout), nn.Tanh(), nn.Linear(width, 1)
    )
    stage = Stage(
        "mlp",
        network,
        steps,
        loss,
        1e-2,
        optimizer="adamw",
        weight_decay=0.01,
        warmup=3,
        decay="cosine",
    )
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
    options |= changes
    names = {field.name for field in fields(Execution)} & options.keys()
    execution = Execution(**{name: options.pop(name) for name in names})
    return Trainer(folder, execution, **options)


def train(folder: Path | None, stage: Stage | None = None, **changes: Any) -> dict[str, float]:
    return make_trainer(folder, **changes).run(stage or make_stage())


@functools.cache
def undisturbed_bytes() -> bytes:
    """The final file of a run that nothing happened to."""
    with TemporaryDirectory() as folder:
        train(Path(folder) / "training")
        return (Path(folder) / "training" / FINAL).read_bytes()


def interrupted_training(folder: Path, steps: int = 5) -> Path:
    """A training that crashed after so many steps; returns its newest checkpoint."""
    with pytest.raises(Crash):
        train(folder, make_stage(loss=at_step(steps, crash)), checkpoint_steps=1)
    return folder / f"mlp-{steps:08d}.safetensors"


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder.parent / "metrics.jsonl").read_text().splitlines()]
