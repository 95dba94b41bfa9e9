"""What phase 2 costs: the paper's finetuning for a fixed number of steps, and how soon a tilt has reached the same regions.

Everything is measured in one run, on one baseline, in one folder of cells, where it is made if it is not there.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from bench.cells import Bench, Job, Place, check_partition
from bench.summary import write_result
from mobatlas.config import merge
from mobatlas.generators.store import load_model
from mobatlas.io.manifest import library_versions
from mobatlas.pipeline.supervise import SuperviseOptions, split_options, supervise
from mobatlas.progress import SILENT, Tracker
from mobatlas.supervision.evidence import gather_evidence
from mobatlas.supervision.finetune import FinetuneConfig, regional_loss
from mobatlas.supervision.group_tilts import fit_group_tilts
from mobatlas.supervision.samplers import PlainSampler, Sampler
from mobatlas.supervision.store import load_sampler
from mobatlas.training.loop import Execution

# The rollout and the batch of the paper; the learning rate is ours, larger than the paper's, so that few steps get further.
PUBLISHED: Mapping[str, Any] = {"rollout_steps": 50, "batch": 256, "early": False}
SHORT: Mapping[str, Any] = {
    "rollout_steps": 5,
    "batch": 256,
    "early": False,
}  # what is lost by a shorter rollout
EARLY: Mapping[str, Any] = {}  # our defaults
# A tilt in a hurry.
BRIEF: Mapping[str, Any] = {
    "weighted_fit": {"steps": 40, "warmup": 10},
    "calibration": {"pool": 512},
}
STEPS = 6


def run(
    out: Path,
    seed: int = 0,
    *,
    partition: str = "demogroups",
    steps: int = 150,
    values: Mapping[str, Any] | None = None,
    city: Mapping[str, Any] | None = None,
    quiet: bool = False,
    tracker: Tracker = SILENT,
) -> dict[str, Any]:
    """Measure, write cost.json into `out`; `values` and `city` change the preset `small`."""
    check_partition(partition)
    own, rest = split_options(values or {})
    command = f"python -m bench cost --partition {partition} --steps {steps} --seed {seed} --out {out.name}"
    place = Place(out / f"seed-{seed}", seed, Bench(command, rest, city or {}, quiet=quiet))
    tracker.step(0, "baseline")
    baseline, regions, dataset = (
        place.baseline(),
        place.regions(Job(partition, "tilt")),
        place.dataset,
    )
    asked: dict[str, Any] = merge(
        {"steps": steps, "validate_every": steps, "warmup": steps // 10}, own.get("finetune", {})
    )
    config = FinetuneConfig.model_validate(
        {k: v for k, v in asked.items() if k.startswith("validation")}
    )
    rows: list[dict[str, Any]] = []

    def row(name: str, seconds: float, sampler: Sampler, agreement: float | None = None) -> None:
        loss = round(regional_loss(sampler, dataset, regions, config, seed), 5)
        found = {
            "seconds": round(seconds, 1),
            "regional_loss": loss,
            "gradient_agreement": agreement,
        }
        rows.append({"strategy": name, **found})
        tracker.step(len(rows), name)

    row("baseline", 0.0, PlainSampler(load_model(baseline).generator, dataset.anchors))
    start = time.perf_counter()
    fit_group_tilts(gather_evidence(dataset, regions), dataset)
    recovered = time.perf_counter() - start
    brief = merge(BRIEF, {"calibration": own["calibration"]} if "calibration" in own else {})
    scratch = Path(tempfile.mkdtemp(prefix=".cost-", dir=out))
    execution = Execution(quiet=quiet)
    try:
        start = time.perf_counter()
        tilt_options = SuperviseOptions("tilt", values=brief)
        supervise(baseline, scratch / "tilt", regions, tilt_options, seed=seed, execution=execution)
        row(
            "tilt, calibrated",
            time.perf_counter() - start,
            load_sampler(load_model(scratch / "tilt")),
        )
        for name, how in {
            "early": EARLY,
            "5-step rollout": SHORT,
            "as published": PUBLISHED,
        }.items():
            tuning = {"finetune": merge(asked, how)}
            start = time.perf_counter()
            options = SuperviseOptions("finetune", values=tuning)
            report = supervise(
                baseline, scratch / name, regions, options, seed=seed, execution=execution
            )
            seconds, tuned = time.perf_counter() - start, load_model(scratch / name).generator
            agreement = report["finetune"]["gradient_agreement"]
            row(f"finetune, {name}", seconds, PlainSampler(tuned, dataset.anchors), agreement)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    by_name = {each["strategy"]: each for each in rows}
    tilt, published = by_name["tilt, calibrated"], by_name["finetune, as published"]
    result = {
        "command": command,
        "seed": seed,
        "versions": library_versions(),
        "threads": torch.get_num_threads(),
        "measure": "regional_loss: JSD in bits between simulated regions and those of validation people, a mean over regions; "
        "seconds: of `supervise` from the baseline's weights to the new ones on disk; gradient_agreement: mean cosine between "
        "gradients of one region from two batches, before training",
        "rows": rows,
        "recovery_and_dual_seconds": round(recovered, 2),
        "times_faster": round(published["seconds"] / tilt["seconds"], 1),
        "reaches_the_same_loss": tilt["regional_loss"] <= published["regional_loss"],
    }
    write_result(out, "cost", result)
    return result
