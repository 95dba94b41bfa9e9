"""Two processes against one on the same machine: throughput, equal losses and identical samples.

Each process computes on one thread. Two processes that share a core cannot halve the time.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from bench.measure import Row, measure
from mobatlas.config import load_run
from mobatlas.data.city import write_city_folder
from mobatlas.data.prepare.pipeline import prepare
from mobatlas.errors import MobatlasError
from mobatlas.progress import SILENT, Tracker
from mobatlas.sampling.chunks import SampleRequest

COMPARED_STEPS = (1, 10, 50, 100)  # losses are compared up to each of these steps
# Fields of a logged line; all others are validation losses.
LOGGED = ("stage", "step", "loss", "lr", "grad_norm", "examples_per_second", "seconds")
Lines = Sequence[Mapping[str, Any]]  # of metrics.jsonl


@dataclass(frozen=True)
class Work:
    """The training and sampling of one generator family."""

    family: str
    stages: Mapping[str, str]  # stage -> section of the configuration with its steps and batch
    steps: int  # of each stage
    samples: int


@dataclass(frozen=True)
class Training:
    """The log and the peak memory of a finished training."""

    lines: list[dict[str, Any]]
    peak_gb: float


WORK = (
    Work("autoregressive", {"transformer": "training"}, 200, 12 * 1_024),
    Work("latent-diffusion", {"autoencoder": "autoencoder", "denoiser": "denoiser"}, 80, 3 * 1_024),
)


def rows(
    scratch: Path, seed: int, tracker: Tracker = SILENT, work: tuple[Work, ...] = WORK
) -> list[Row]:
    """Train and sample each family with one process and with two, on the small city."""
    write_city_folder(scratch / "small-city", load_run(preset="small").simulate, seed)
    prepare(
        scratch / "small-city",
        scratch / "small-dataset",
        preset="small",
        values={"min_people_per_place": 0},
    )
    table: list[Row] = []
    for number, each in enumerate(work):
        tracker.step(number / len(work), f"training {each.family}")
        table += _training_rows(scratch, each, seed)
        tracker.step((number + 0.5) / len(work), f"sampling {each.family}")
        table.append(_generation_row(scratch, each, seed))
    return table


def _training_rows(scratch: Path, work: Work, seed: int) -> list[Row]:
    alone = _train(scratch, work, seed, devices=1)
    together = _train(scratch, work, seed, devices=2)
    config = json.loads((scratch / f"{work.family}-1" / "config.json").read_text())["config"]
    table: list[Row] = []
    for stage, section in work.stages.items():
        one = [line for line in alone.lines if line["stage"] == stage]
        two = [line for line in together.lines if line["stage"] == stage]
        examples = work.steps * config[section]["batch"]
        table.append(
            {
                "task": f"train {work.family}, {stage}, 2 processes",
                "size": f"{work.steps} steps of {config[section]['batch']} trajectories",
                "seconds": two[-1]["seconds"],
                "reference": "1 process",
                "reference_seconds": one[-1]["seconds"],
                "ratio": two[-1]["seconds"] / one[-1]["seconds"],
                "examples_per_second": round(examples / two[-1]["seconds"], 1),
                "reference_examples_per_second": round(examples / one[-1]["seconds"], 1),
                **compare_losses(one, two),
                "peak_gb": together.peak_gb,  # of the first process
                "reference_peak_gb": alone.peak_gb,
            }
        )
    return table


def compare_losses(one: Lines, two: Lines) -> dict[str, Any]:
    """Return final losses, and the largest relative difference of losses up to several steps."""
    if [line["step"] for line in one] != [line["step"] for line in two]:
        raise MobatlasError(
            "training with one process and with two logged different steps, so their losses "
            "cannot be compared; run the benchmark again"
        )
    differences = {
        line["step"]: abs(line["loss"] - other["loss"]) / abs(line["loss"])
        for line, other in zip(one, two, strict=True)
    }
    comparison: dict[str, Any] = {}
    for name in ("loss", *(key for key in one[-1] if key not in LOGGED)):
        comparison[name] = two[-1][name]
        comparison[f"reference_{name}"] = one[-1][name]
        comparison[f"{name}_difference"] = two[-1][name] - one[-1][name]
    last = one[-1]["step"]
    comparison["largest_relative_difference"] = {
        f"to step {limit}": max(value for step, value in differences.items() if step <= limit)
        for limit in sorted({*COMPARED_STEPS, last})
        if limit <= last
    }
    return comparison


def _train(scratch: Path, work: Work, seed: int, devices: int) -> Training:
    """Train with the command line, because Fabric starts the second process with its command."""
    out = scratch / f"{work.family}-{devices}"
    options = ["--generator", work.family, "--seed", seed, "--out", out, "--json", "--quiet"]
    options += ["--accelerator", "cpu", "--devices", devices]
    for section in work.stages.values():
        options += ["--set", f"{section}.steps={work.steps}"]
    command = [sys.executable, "-m", "mobatlas", "train", scratch / "small-dataset", *options]
    with _one_thread():
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    if done.returncode:
        message = done.stderr.strip().splitlines()[-1]
        raise MobatlasError(f"training {work.family} with {devices} processes failed: {message}")
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return Training(lines, json.loads(done.stdout)["peak_gb"])


def _generation_row(scratch: Path, work: Work, seed: int) -> Row:
    model = scratch / f"{work.family}-1"
    out = scratch / f"{work.family}-samples"
    out.mkdir()
    requests = {
        devices: SampleRequest(seed=seed, accelerator="cpu", devices=devices) for devices in (1, 2)
    }
    shards = [SampleRequest(seed=seed, accelerator="cpu", shard=f"{k}/2") for k in (1, 2)]
    with _one_thread():
        one, two = (
            measure(_generate, model, out / f"{devices}", work.samples, request).value
            for devices, request in requests.items()
        )
        for k, request in enumerate(shards):
            measure(_generate, model, out / f"shard-{k}", work.samples, request)
    parts = pa.concat_tables([pq.read_table(out / f"shard-{k}") for k in range(len(shards))])
    return {
        "task": f"generate {work.family}, 2 processes",
        "size": f"{work.samples:,} trajectories",
        "seconds": two["seconds"],  # with the start of the processes
        "reference": "1 process",
        "reference_seconds": one["seconds"],
        "ratio": two["seconds"] / one["seconds"],
        "trajectories_per_second": round(two["rate"], 1),  # after all processes have started
        "reference_trajectories_per_second": round(one["rate"], 1),
        "identical": (out / "1").read_bytes() == (out / "2").read_bytes(),
        "shards_identical": parts.equals(pq.read_table(out / "1")),
        "peak_gb": two["peak_gb"],  # of the largest process
        "reference_peak_gb": one["peak_gb"],
    }


@dataclass
class _Clock:
    """A tracker that records the time of each chunk."""

    steps: list[tuple[float, float]] = field(default_factory=list)  # seconds, trajectories

    def step(self, done: float, note: str = "") -> None:
        self.steps.append((time.perf_counter(), done))

    def rate(self, skipped: int) -> float:
        """Return trajectories per second after the first chunks."""
        start, before = self.steps[skipped - 1]
        end, total = self.steps[-1]
        return (total - before) / (end - start)


def _generate(model: Path, out: Path, n: int, request: SampleRequest) -> dict[str, Any]:
    from mobatlas.sampling.generate import generate  # torch only in the process that needs it

    clock = _Clock()
    samples = generate(model, out, n, request, tracker=clock)
    return samples.as_dict() | {"rate": clock.rate(request.devices)}


@contextmanager
def _one_thread() -> Iterator[None]:
    """Restrict processes that start in this context to one thread."""
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        yield
    finally:
        del os.environ["OMP_NUM_THREADS"]
        if before is not None:
            os.environ["OMP_NUM_THREADS"] = before
