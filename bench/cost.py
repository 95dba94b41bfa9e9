"""The cost of phase 2: the time of finetuning for a fixed number of steps, and of tilt.

All strategies start from one baseline and are measured on one machine. Each row is a cell, so an
interrupted measurement resumes.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.cells import Job, SeedFolder, Setup, check_partition
from bench.gradients import gradient_agreement
from bench.runner import Cell, Command, Experiment, Runner
from bench.summary import write_result
from mobatlas.config import merge
from mobatlas.generators.store import load_model
from mobatlas.pipeline.models import SuperviseOptions, split_options, supervise
from mobatlas.regions.store import RegionsFolder
from mobatlas.supervision.calibration import PlainSampler, Sampler
from mobatlas.supervision.evidence import gather_evidence
from mobatlas.supervision.finetune import FinetuneConfig, TargetBuilder, regional_loss
from mobatlas.supervision.store import load_sampler
from mobatlas.supervision.tilt import fit_group_tilts
from mobatlas.training.loop import Execution

# "as published" has the rollout and batch of the paper. Its learning rate is ours, which is
# larger, so that few steps get further. "early" has our defaults.
FINETUNE: Mapping[str, Mapping[str, Any]] = {
    "early": {},
    "5-step rollout": {"rollout_steps": 5, "batch": 256, "early": False},
    "as published": {"rollout_steps": 50, "batch": 256, "early": False},
}
BRIEF_TILT: Mapping[str, Any] = {
    "weighted_fit": {"steps": 40, "warmup": 10},
    "calibration": {"pool": 512},
}
MEASURE = (
    "regional_loss: JSD in bits between simulated regions and those of validation people, a mean "
    "over regions; seconds: of `supervise` from the baseline's weights to the new ones on disk; "
    "gradient_agreement: mean cosine between gradients of one region from two batches, before "
    "training"
)
ROW = ("seconds", "regional_loss", "gradient_agreement")


def run(
    experiment: Experiment,
    partition: str = "demogroups",
    steps: int = 150,
    values: Mapping[str, Any] | None = None,
    city: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Measure the first seed and write cost.json; `values` and `city` change preset `small`."""
    check_partition(partition)
    seed = experiment.first_seed
    own, rest = split_options(values or {})
    setup = Setup(rest, city or {}, quiet=experiment.quiet)
    warmup = {"steps": steps, "validate_every": steps, "warmup": steps // 10}
    task = _Task(
        SeedFolder(experiment.out, seed, setup),
        partition,
        merge(warmup, own.get("finetune", {})),
        merge(BRIEF_TILT, {"calibration": own["calibration"]} if "calibration" in own else {}),
    )
    computations = {"baseline": task.baseline, "tilt, calibrated": task.tilt}
    for name, options in FINETUNE.items():
        computations[f"finetune, {name}"] = partial(task.finetune, options)
    inputs = setup.inputs() | {"partition": partition, "values": values, "steps": steps}
    cells = [
        Cell(seed, f"cost-{name.replace(', ', '-')}", inputs, compute, label=name)
        for name, compute in computations.items()
    ]
    command = Command("cost", {"--partition": [partition], "--steps": [str(steps)]}, one_seed=True)
    results = Runner(experiment, "cost", command).run(cells)
    rows = {
        name: {key: result[key] for key in ROW}
        for name, result in zip(computations, results, strict=True)
    }
    tilt = rows["tilt, calibrated"]
    published = rows["finetune, as published"]
    result = {
        **command.header(experiment),
        "threads": torch.get_num_threads(),
        "measure": MEASURE,
        "rows": [{"strategy": name, **row} for name, row in rows.items()],
        "recovery_and_dual_seconds": results[1]["recovery_and_dual_seconds"],
        "times_faster": round(published["seconds"] / tilt["seconds"], 1),
        "reaches_the_same_loss": tilt["regional_loss"] <= published["regional_loss"],
    }
    write_result(experiment.out, "cost", result)
    return result


@dataclass(frozen=True)
class _Task:
    """The rows of one seed and partition."""

    folder: SeedFolder
    partition: str
    finetune_values: Mapping[str, Any]
    tilt_values: Mapping[str, Any]

    def baseline(self) -> dict[str, Any]:
        path = self.folder.baseline()
        sampler = PlainSampler(load_model(path).generator, self.folder.dataset.anchors)
        return self._row(0.0, sampler)

    def tilt(self) -> dict[str, Any]:
        self.folder.baseline()
        dataset = self.folder.dataset
        start = time.perf_counter()
        fit_group_tilts(gather_evidence(dataset, self._regions()), dataset)
        seconds = round(time.perf_counter() - start, 2)
        with self._supervised("tilt", self.tilt_values) as (model, took, _):
            row = self._row(took, load_sampler(load_model(model), observed=True))
        return {**row, "recovery_and_dual_seconds": seconds}

    def finetune(self, options: Mapping[str, Any]) -> dict[str, Any]:
        values = {"finetune": merge(self.finetune_values, options)}
        with self._supervised("finetune", values) as (model, took, _):
            sampler = PlainSampler(load_model(model).generator, self.folder.dataset.anchors)
            return self._row(took, sampler, self._agreement(values["finetune"]))

    def _agreement(self, values: Mapping[str, Any]) -> float:
        """The agreement of gradients before training."""
        config = FinetuneConfig.model_validate(values)
        folder = RegionsFolder.open(self._regions())
        dataset = self.folder.dataset
        seed = self.folder.seed
        target = TargetBuilder(folder, dataset, dataset.vocabulary, config).target(
            folder.regions.aggregates, "train"
        )
        model = load_model(self.folder.baseline()).generator
        student = model.with_groups(folder.regions.groups, seed, equal_groups=True)
        return gradient_agreement(target, student, config, seed)

    def _regions(self) -> Path:
        return self.folder.regions(Job(self.partition, "tilt"))

    @contextmanager
    def _supervised(
        self, strategy: str, values: Mapping[str, Any]
    ) -> Iterator[tuple[Path, float, dict[str, Any]]]:
        """Yield a supervised model that is deleted afterwards, its seconds and its report."""
        baseline = self.folder.baseline()
        regions = self._regions()
        options = SuperviseOptions(strategy, values=values)
        execution = Execution(quiet=self.folder.setup.quiet)
        seed = self.folder.seed
        with tempfile.TemporaryDirectory(prefix=".cost-", dir=self.folder.out) as scratch:
            model = Path(scratch) / "model"
            start = time.perf_counter()
            report = supervise(baseline, model, regions, options, seed=seed, execution=execution)
            yield model, time.perf_counter() - start, report

    def _row(
        self, seconds: float, sampler: Sampler, agreement: float | None = None
    ) -> dict[str, Any]:
        validation = {
            name: value
            for name, value in self.finetune_values.items()
            if name.startswith("validation")
        }
        config = FinetuneConfig.model_validate(validation)
        loss = regional_loss(
            sampler, self.folder.dataset, self._regions(), config, self.folder.seed
        )
        return {
            "seconds": round(seconds, 1),
            "regional_loss": round(loss, 5),
            "gradient_agreement": agreement,
        }
