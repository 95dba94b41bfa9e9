"""Two processes beside one on the same machine: throughput, losses that must be equal, samples that must be the same bytes.

Each process computes on one thread. Where two share a core, as hyperthreads do, a ratio of one half is out of reach.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from bench.speed import measure
from mobatlas.config import load_run
from mobatlas.data.city import write_city_folder
from mobatlas.data.prepare.pipeline import prepare
from mobatlas.errors import MobatlasError
from mobatlas.progress import SILENT, Tracker
from mobatlas.sampling.request import SampleRequest

UNTIL = (1, 10, 50, 100)  # steps, up to which losses are compared
TIMING = (
    "stage",
    "step",
    "loss",
    "lr",
    "grad_norm",
    "examples_per_second",
    "seconds",
)  # what else is logged, is validation


@dataclass(frozen=True)
class Work:
    """What a family is asked for."""

    family: str
    stages: dict[
        str, str
    ]  # to the section of the configuration that says how many steps and how large a batch
    steps: int  # of each stage
    samples: int


WORK = (
    Work("autoregressive", {"transformer": "training"}, 200, 12 * 1_024),
    Work("latent-diffusion", {"autoencoder": "autoencoder", "denoiser": "denoiser"}, 80, 3 * 1_024),
)


def rows(
    scratch: Path, seed: int, tracker: Tracker = SILENT, work: tuple[Work, ...] = WORK
) -> list[dict[str, Any]]:
    """Train and sample each family by one process and by two, on the small city."""
    write_city_folder(scratch / "small-city", load_run(preset="small").simulate, seed)
    prepare(scratch / "small-city", scratch / "small-dataset", preset="small")
    found = []
    for number, each in enumerate(work):
        tracker.step(number / len(work), f"training {each.family}")
        found += _training_rows(scratch, each, seed)
        tracker.step((number + 0.5) / len(work), f"sampling {each.family}")
        found.append(_generation_row(scratch, each, seed))
    return found


def _training_rows(scratch: Path, work: Work, seed: int) -> list[dict[str, Any]]:
    made = [_train(scratch, work, seed, devices) for devices in (1, 2)]
    config = json.loads((scratch / f"{work.family}-1" / "config.json").read_text())["config"]
    found = []
    for stage, section in work.stages.items():
        one, two = ([line for line in each["lines"] if line["stage"] == stage] for each in made)
        examples = work.steps * config[section]["batch"]
        found.append(
            {
                "what": f"train {work.family}, {stage}, 2 processes",
                "size": f"{work.steps} steps of {config[section]['batch']} trajectories",
                "seconds": two[-1]["seconds"],
                "reference": "1 process",
                "reference_seconds": one[-1]["seconds"],
                "ratio": two[-1]["seconds"] / one[-1]["seconds"],
                "examples_per_second": round(examples / two[-1]["seconds"], 1),
                "reference_examples_per_second": round(examples / one[-1]["seconds"], 1),
                **compared(one, two),
                "peak_gb": made[1]["peak_gb"],  # of the first process
                "reference_peak_gb": made[0]["peak_gb"],
            }
        )
    return found


def compared(one: list[dict[str, Any]], two: list[dict[str, Any]]) -> dict[str, Any]:
    """Final losses, and the largest relative difference of losses up to some steps."""
    if [line["step"] for line in one] != [line["step"] for line in two]:
        raise MobatlasError("one process and two logged other steps; nothing can be compared")
    apart = [
        (a["step"], abs(a["loss"] - b["loss"]) / abs(a["loss"]))
        for a, b in zip(one, two, strict=True)
    ]
    last = one[-1]["step"]
    final: dict[str, Any] = {}
    for name in ("loss", *(key for key in one[-1] if key not in TIMING)):
        a, b = one[-1][name], two[-1][name]
        final |= {name: b, f"reference_{name}": a, f"{name}_difference": b - a}
    until = {
        step: max(each for at, each in apart if at <= step)
        for step in sorted({*UNTIL, last})
        if step <= last
    }
    return final | {
        "largest_relative_difference": {f"to step {step}": value for step, value in until.items()}
    }


def _train(scratch: Path, work: Work, seed: int, devices: int) -> dict[str, Any]:
    """As a user does, because Fabric starts the second process by the command of the first."""
    out = scratch / f"{work.family}-{devices}"
    command = [
        sys.executable,
        "-m",
        "mobatlas",
        "train",
        scratch / "small-dataset",
        "--generator",
        work.family,
    ]
    command += [
        "--accelerator",
        "cpu",
        "--devices",
        devices,
        "--seed",
        seed,
        "--out",
        out,
        "--json",
        "--quiet",
    ]
    for section in work.stages.values():
        command += ["--set", f"{section}.steps={work.steps}"]
    with _one_thread():
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    if done.returncode:
        raise MobatlasError(
            f"training {work.family} by {devices} processes: {done.stderr.strip().splitlines()[-1]}"
        )
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return {"lines": lines, "peak_gb": json.loads(done.stdout)["peak_gb"]}


def _generation_row(scratch: Path, work: Work, seed: int) -> dict[str, Any]:
    model, n, out = scratch / f"{work.family}-1", work.samples, scratch / f"{work.family}-samples"
    out.mkdir()
    with _one_thread():
        one, two = (measure(_generate, model, out / f"{k}", n, seed, k, None).value for k in (1, 2))
        for k in (1, 2):
            measure(_generate, model, out / f"shard-{k}", n, seed, 1, f"{k}/2")
    parts = pa.concat_tables([pq.read_table(out / f"shard-{k}") for k in (1, 2)])
    return {
        "what": f"generate {work.family}, 2 processes",
        "size": f"{n:,} trajectories",
        "seconds": two["seconds"],  # with the start of the processes
        "reference": "1 process",
        "reference_seconds": one["seconds"],
        "ratio": two["seconds"] / one["seconds"],
        "trajectories_per_second": round(two["rate"], 1),  # once all processes have begun
        "reference_trajectories_per_second": round(one["rate"], 1),
        "identical": (out / "1").read_bytes() == (out / "2").read_bytes(),
        "shards_identical": parts.equals(pq.read_table(out / "1")),
        "peak_gb": two["peak_gb"],  # of the largest process
        "reference_peak_gb": one["peak_gb"],
    }


@dataclass
class _Clock:
    """Notes when each chunk was written."""

    noted: list[tuple[float, float]] = field(default_factory=list)

    def step(self, done: float, note: str = "") -> None:
        self.noted.append((time.perf_counter(), done))

    def rate(self, skipped: int) -> float:
        """Trajectories a second after so many chunks."""
        (begun, some), (ended, all_) = self.noted[skipped - 1], self.noted[-1]
        return (all_ - some) / (ended - begun)


def _generate(
    model: Path, out: Path, n: int, seed: int, devices: int, shard: str | None
) -> dict[str, Any]:
    from mobatlas.sampling.generate import generate  # torch only in the process that needs it

    clock = _Clock()
    request = SampleRequest(seed=seed, accelerator="cpu", devices=devices, shard=shard)
    made = generate(model, out, n, request, tracker=clock)
    return made.as_dict() | {"rate": clock.rate(devices)}


@contextmanager
def _one_thread() -> Iterator[None]:
    """For the processes that are started meanwhile."""
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        yield
    finally:
        del os.environ["OMP_NUM_THREADS"]
        if before is not None:
            os.environ["OMP_NUM_THREADS"] = before
