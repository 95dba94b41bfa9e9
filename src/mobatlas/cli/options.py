"""Options that several commands have, and how a command says what it found."""

from __future__ import annotations

import json as jsonlib
import os
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

Out = Annotated[
    Path, typer.Option("--out", help="The folder to write; it appears whole or not at all.")
]
Config = Annotated[Path | None, typer.Option("--config", help="A run's YAML file.")]
Preset = Annotated[str | None, typer.Option("--preset", help="small or paper.")]
Assignments = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="A value of the configuration, e.g. window.days=1."
    ),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace what mobatlas wrote.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on where an earlier run stopped.")]
Accelerator = Annotated[str, typer.Option("--accelerator", help="auto, cpu, cuda or mps.")]
Devices = Annotated[int, typer.Option("--devices", help="Processes, one to a device.")]
Shard = Annotated[
    str | None,
    typer.Option(
        "--shard",
        metavar="I/K",
        help="The I-th of K parts of the file, for machines that share nothing.",
    ),
]
Precision = Annotated[str, typer.Option("--precision", help="auto, 32-true or bf16-mixed.")]
CheckpointSeconds = Annotated[float, typer.Option(help="Between checkpoints, at most.")]
TensorBoard = Annotated[
    bool, typer.Option("--tensorboard", help="Also log to TensorBoard, in the model's folder.")
]
DatasetOverride = Annotated[
    Path | None, typer.Option("--dataset", help="The model's dataset, if it has moved.")
]
TrustCode = Annotated[
    bool,
    typer.Option(
        "--trust-code", help="Import the code that an external model takes its samples from."
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", help="Log lines instead of a progress bar.")]


def show(values: dict[str, Any], as_json: bool, table: Any) -> None:
    if os.environ.get("LOCAL_RANK", "0") != "0":  # the first process of several speaks for all
        return
    if as_json:
        typer.echo(jsonlib.dumps(values, indent=2, ensure_ascii=False, default=str))
    else:
        Console().print(table)
