"""Options that several commands share, and how a command prints its result."""

from __future__ import annotations

import json as jsonlib
import os
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

Out = Annotated[Path, typer.Option("--out", help="The folder to write.")]
Config = Annotated[Path | None, typer.Option("--config", help="A configuration file (YAML).")]
Preset = Annotated[str | None, typer.Option("--preset", help="small or paper.")]
Assignments = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Set a value of the configuration, e.g. window.days=1; may be repeated.",
    ),
]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace an existing output of mobatlas.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Resume = Annotated[bool, typer.Option("--resume", help="Continue from the last checkpoint.")]
Accelerator = Annotated[str, typer.Option("--accelerator", help="auto, cpu, cuda or mps.")]
Devices = Annotated[int, typer.Option("--devices", help="Number of devices; one process each.")]
Shard = Annotated[
    str | None,
    typer.Option(
        "--shard",
        metavar="I/K",
        help="Write only part I of K, for machines that share no disk.",
    ),
]
Precision = Annotated[str, typer.Option("--precision", help="auto, 32-true or bf16-mixed.")]
CheckpointSeconds = Annotated[float, typer.Option(help="Seconds between checkpoints.")]
TensorBoard = Annotated[
    bool, typer.Option("--tensorboard", help="Also log to TensorBoard, in the model folder.")
]
DatasetOverride = Annotated[
    Path | None, typer.Option("--dataset", help="The model's dataset folder, if it has moved.")
]
TrustCode = Annotated[
    bool,
    typer.Option("--trust-code", help="Allow importing the Python code of an external model."),
]
Quiet = Annotated[bool, typer.Option("--quiet", help="Print log lines instead of a progress bar.")]


def show(values: dict[str, Any], as_json: bool, table: Any) -> None:
    """Print a result as JSON or as a table; of several processes only the first prints."""
    if os.environ.get("LOCAL_RANK", "0") != "0":
        return
    if as_json:
        typer.echo(jsonlib.dumps(values, indent=2, ensure_ascii=False, default=str))
    else:
        Console().print(table)
