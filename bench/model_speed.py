"""Speed of latent diffusion against the setup of the paper's published code, in the same run.

Training is compared with plain fp32. Both report their share of the machine's peak for matrix
multiplication.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from bench.floors import evaluate_groups, sampling_floor
from bench.measure import Row
from bench.phase1 import POOLED
from mobatlas.config import build, load_run, merge
from mobatlas.data.city import write_city_folder
from mobatlas.data.dataset import Trajectories, TrajectoryDataset
from mobatlas.data.prepare.pipeline import prepare
from mobatlas.data.types import PAD
from mobatlas.evaluation.comparison import EVERYBODY
from mobatlas.evaluation.metrics import MetricSpec
from mobatlas.generators.latent_diffusion.generator import LatentDiffusion, LatentDiffusionConfig
from mobatlas.generators.protocol import UNKNOWN, unlabelled
from mobatlas.training.devices import fast_bf16, trains_in_bf16
from mobatlas.training.loop import Execution, Share, Trainer
from mobatlas.training.resources import keep_memory, peak_gb

# The setup of the published code. Widths are ours, so that only the setup differs. Its time hardly
# depends on how well it is trained, but samples must end; its JSD is that of our weights.
PUBLISHED: dict[str, Any] = {"length": 64, "diffusion": {"solver": "ddim", "steps": 50}}
PUBLISHED_TRAINING: dict[str, Any] = {"denoiser": {"steps": 250}}
PUBLISHED_SOLVER = ("ddim", 50)
PUBLISHED_BATCH = 64
BEAMS = 4
REPEATS = 3


@dataclass(frozen=True)
class _Job:
    """The trained model that is measured, and the data it is measured with."""

    dataset: TrajectoryDataset
    model: LatentDiffusion
    samples: int
    seed: int

    def anchors(self, n: int) -> Any:
        """Draw anchors of training people, (n, 4)."""
        chosen = np.random.default_rng(self.seed).choice(self.dataset.split("train"), n)
        return self.dataset.anchors[self.dataset.person[chosen]]


def rows(
    scratch: Path, options: Mapping[str, Any], samples: int, compared: int | None, seed: int
) -> list[Row]:
    """Train both setups on the small city and measure them; needs a process of its own."""
    write_city_folder(scratch / "small-city", load_run(preset="small").simulate, seed)
    prepare(
        scratch / "small-city",
        scratch / "small-dataset",
        preset="small",
        values={"min_people_per_place": 0},
    )
    dataset = TrajectoryDataset.open(scratch / "small-dataset")
    job = _Job(dataset, _train(dataset, options, seed), samples, seed)
    memory_row = _memory_row(job)
    published = _train(dataset, merge(PUBLISHED_TRAINING, options, PUBLISHED), seed)
    peak = matmul_peak(torch.bfloat16 if fast_bf16(job.model.device) else torch.float32)
    training_peak = matmul_peak(
        torch.bfloat16 if trains_in_bf16(job.model.device) else torch.float32
    )
    return [
        _sampling_row(job, published, peak) | _divergences(job, compared),
        memory_row,
        _training_row(job, training_peak),
        {
            "task": "matmul peak",
            "size": "2048 x 2048",
            "seconds": 0.0,
            "gflops": round(peak / 1e9),
            "peak_gb": peak_gb(),
        },
    ]


def _train(dataset: TrajectoryDataset, values: Mapping[str, Any], seed: int) -> LatentDiffusion:
    config = build(LatentDiffusionConfig, values, "speed")
    model = LatentDiffusion(config, dataset.vocabulary, seed=seed)
    model.fit(dataset, Trainer(None, Execution(quiet=True), seed=seed))
    return model


def _sampling_row(job: _Job, published: LatentDiffusion, peak: float) -> Row:
    anchors = job.anchors(job.samples)
    start = time.perf_counter()
    reference = sample_as_published(published, anchors, job.seed)
    reference_seconds = time.perf_counter() - start
    seconds = _sampling_seconds(job, anchors)
    flops = _flops(lambda: job.model.sample(job.samples, anchors=anchors, seed=job.seed))
    return {
        "task": "sample",
        "size": f"{job.samples} trajectories",
        "seconds": seconds,
        "reference": f"64 places, fp32, 50 DDIM steps, {BEAMS} beams, no cache; same widths",
        "reference_seconds": reference_seconds,
        "ratio": seconds / reference_seconds,
        "speedup": reference_seconds / seconds,
        "trajectories_per_second": round(job.samples / seconds, 1),
        "reference_trajectories_per_second": round(job.samples / reference_seconds, 2),
        "reference_tokens": round(float(np.diff(reference.offsets).mean()), 1),  # per trajectory
        "share_of_matmul_peak": round(flops / seconds / peak, 3),
        "peak_gb": peak_gb(),
    }


def _memory_row(job: _Job) -> Row:
    """Compare a process that keeps its memory, as commands do, with one that returns it."""
    anchors = job.anchors(job.samples)
    reference_seconds = _sampling_seconds(job, anchors)
    keeps_memory = keep_memory()
    seconds = _sampling_seconds(job, anchors)
    return {
        "task": "sample, memory kept",
        "size": f"{job.samples} trajectories",
        "seconds": seconds,
        "reference": "memory returned to the system",
        "reference_seconds": reference_seconds,
        "ratio": seconds / reference_seconds,
        "kept": keeps_memory,
        "peak_gb": peak_gb(),
    }


def _sampling_seconds(job: _Job, anchors: Any) -> float:
    """Return the shortest of several times."""
    seconds = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        job.model.sample(len(anchors), anchors=anchors, seed=job.seed)
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def _divergences(job: _Job, compared: int | None) -> dict[str, Any]:
    """Return JSD of our samples, of samples as published from the same weights, and the floor."""
    dataset = job.dataset
    anchors = job.anchors(compared or len(dataset.split("test")))
    ours = job.model.sample(len(anchors), anchors=anchors, seed=job.seed)
    published = sample_as_published(job.model.with_solver(*PUBLISHED_SOLVER), anchors, job.seed)
    floor = sampling_floor(dataset, MetricSpec.of(dataset), size=len(anchors), seed=job.seed)
    return {
        "jsd": _jsd(dataset, ours, job.seed),
        "reference_jsd": _jsd(dataset, published, job.seed),
        "floor_jsd": {name: round(floor.everybody.average[name], 4) for name in POOLED},
        "jsd_samples": len(anchors),
    }


@torch.no_grad()
def sample_as_published(model: LatentDiffusion, anchors: Any, seed: int) -> Trajectories:
    """Sample in fp32 and batches of 64, with a beam search that has no cache."""
    batches = []
    generator = torch.Generator().manual_seed(seed)
    for start in range(0, len(anchors), PUBLISHED_BATCH):
        batch = anchors[start : start + PUBLISHED_BATCH]
        noise = torch.randn(
            len(batch), model.max_length, model.config.autoencoder.latent, generator=generator
        )
        latents = model.roll_out(noise, np.full(len(batch), UNKNOWN), batch).clean
        memory = model.autoencoder.restore(latents)
        batches.append(model.autoencoder.decode(memory, beams=BEAMS, cache=False))
    tokens = torch.cat(batches).numpy()
    valid = tokens != PAD
    return Trajectories(
        tokens[valid].astype(np.int32), np.concatenate(([0], np.cumsum(valid.sum(1)))), anchors
    )


def _training_row(job: _Job, peak: float) -> Row:
    """Compare a denoiser step on cached latents with one in fp32 that encodes its batch."""
    model = job.model
    trainer = Trainer(None, Execution(quiet=True), seed=job.seed)
    examples = unlabelled(job.dataset, job.seed)
    stage = model.training_stage(job.dataset, examples, "denoiser", trainer, fresh=True)
    network, optimizer = trainer.fabric.setup(model.network.train(), stage.state().optimizer)

    def ours() -> Tensor:
        loss = stage.loss(network, 1, Share())
        trainer.fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    plain = stage.state().optimizer
    batch_size = model.config.denoiser.batch
    tokens = job.dataset.gather(
        job.dataset.order("train", batch_size, job.seed, 1), model.max_length
    )

    def reference() -> Tensor:
        model.encode(tokens)
        loss = stage.loss(model.network, 1, Share())
        torch.autograd.backward(loss)
        plain.step()
        plain.zero_grad()
        return loss

    seconds = _best(ours)
    reference_seconds = _best(reference)
    flops = _flops(ours)
    model.network.eval()
    return {
        "task": "train, one step of the denoiser",
        "size": f"{batch_size} trajectories",
        "seconds": seconds,
        "reference": "fp32 eager, latents encoded in the step",
        "reference_seconds": reference_seconds,
        "ratio": seconds / reference_seconds,
        "share_of_matmul_peak": round(flops / seconds / peak, 3),
        "peak_gb": peak_gb(),
    }


def matmul_peak(dtype: torch.dtype, size: int = 2_048) -> float:
    """Return floating point operations per second of a large matrix product."""
    left, right = torch.randn(2, size, size).to(dtype)
    return 2 * size**3 / _best(lambda: left @ right)


def _best(work: Callable[[], Tensor]) -> float:
    work()
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def _flops(work: Callable[[], object]) -> float:
    with FlopCounterMode(display=False) as counter:
        work()
    return float(counter.get_total_flops())


def _jsd(dataset: TrajectoryDataset, samples: Trajectories, seed: int) -> dict[str, float]:
    real = Trajectories.of(dataset, dataset.split("test"))
    spec = MetricSpec.of(dataset)
    scores = evaluate_groups(spec, {EVERYBODY: real}, {EVERYBODY: samples}, seed=seed)
    return {name: round(scores.average[name], 4) for name in POOLED}
