"""Speed of the latent diffusion generator: sampling against the arrangement of the paper's published code, training against
fp32 without our savings, each in the same run, and the share of the machine's measured matmul peak that they reach."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from bench.phase1 import POOLED
from mobatlas.config import build, load_run, merge
from mobatlas.data.city import write_city_folder
from mobatlas.data.dataset import TrajectoryDataset
from mobatlas.data.prepare.pipeline import prepare
from mobatlas.data.trajectories import Trajectories
from mobatlas.data.vocabulary import PAD
from mobatlas.evaluation.comparison import EVERYBODY, evaluate_groups, sampling_floor
from mobatlas.evaluation.metrics import MetricSpec
from mobatlas.generators.latent_diffusion.config import LatentDiffusionConfig
from mobatlas.generators.latent_diffusion.generator import LatentDiffusion
from mobatlas.generators.protocol import UNKNOWN, unlabelled
from mobatlas.training.devices import fast_bf16, trains_in_bf16
from mobatlas.training.loop import Execution, Share, Trainer
from mobatlas.training.resources import keep_memory, peak_gb

# The arrangement of the published code; the widths stay ours, so that nothing but the arrangement is compared. Its time hardly
# depends on how well it is trained (samples must end where they should); its divergences are those of our weights sampled so.
PUBLISHED: dict[str, Any] = {"length": 64, "diffusion": {"solver": "ddim", "steps": 50}}
ENOUGH: dict[str, Any] = {"denoiser": {"steps": 250}}
BEAMS = 4
SOLVER = ("ddim", 50)
PUBLISHED_BATCH = 64
REPEATS = 3


def rows(
    scratch: Path, options: Mapping[str, Any], samples: int, compared: int | None, seed: int
) -> list[dict[str, Any]]:
    """Train both arrangements on the small city and measure them; meant for a process of its own."""
    write_city_folder(scratch / "small-city", load_run(preset="small").simulate, seed)
    prepare(scratch / "small-city", scratch / "small-dataset", preset="small")
    dataset = TrajectoryDataset.open(scratch / "small-dataset")
    ours = _trained(dataset, options, seed)
    kept = _memory_row(dataset, ours, samples, seed)
    published = _trained(dataset, merge(ENOUGH, options, PUBLISHED), seed)
    peak, trained = (
        matmul_peak(torch.bfloat16 if in_bf16(ours.device) else torch.float32)
        for in_bf16 in (fast_bf16, trains_in_bf16)
    )
    return [
        _sampling_row(dataset, ours, published, samples, peak, seed)
        | _divergences(dataset, ours, compared, seed),
        kept,
        _training_row(dataset, ours, trained, seed),
        {
            "what": "matmul peak",
            "size": "2048 x 2048",
            "seconds": 0.0,
            "gflops": round(peak / 1e9),
            "peak_gb": peak_gb(),
        },
    ]


def _trained(dataset: TrajectoryDataset, values: Mapping[str, Any], seed: int) -> LatentDiffusion:
    model = LatentDiffusion(
        build(LatentDiffusionConfig, values, "speed"), dataset.vocabulary, seed=seed
    )
    model.fit(dataset, Trainer(None, Execution(quiet=True), seed=seed))
    return model


def _sampling_row(
    dataset: TrajectoryDataset,
    ours: LatentDiffusion,
    published: LatentDiffusion,
    samples: int,
    peak: float,
    seed: int,
) -> dict[str, Any]:
    anchors = _anchors(dataset, samples, seed)
    timed = {}
    start = time.perf_counter()
    slow = sample_as_published(published, anchors, seed)
    timed["published"] = samples / (time.perf_counter() - start)
    seconds = _sampling_seconds(ours, anchors, seed)
    timed["ours"] = samples / seconds
    flops = _flops(lambda: ours.sample(samples, anchors=anchors, seed=seed))
    reached = flops / seconds / peak
    return {
        "what": "sample",
        "size": f"{samples} trajectories",
        "seconds": samples / timed["ours"],
        "reference": f"64 places, fp32, 50 DDIM steps, {BEAMS} beams, no cache; same widths",
        "reference_seconds": samples / timed["published"],
        "ratio": timed["published"] / timed["ours"],
        "speedup": timed["ours"] / timed["published"],
        "trajectories_per_second": round(timed["ours"], 1),
        "reference_trajectories_per_second": round(timed["published"], 2),
        "reference_tokens": round(float(np.diff(slow.offsets).mean()), 1),  # of a trajectory
        "share_of_matmul_peak": round(reached, 3),
        "peak_gb": peak_gb(),
    }


def _memory_row(
    dataset: TrajectoryDataset, model: LatentDiffusion, samples: int, seed: int
) -> dict[str, Any]:
    """What it saves to keep memory, as commands do from here on, instead of giving it back."""
    anchors = _anchors(dataset, samples, seed)
    given_back = _sampling_seconds(model, anchors, seed)
    able = keep_memory()
    kept = _sampling_seconds(model, anchors, seed)
    return {
        "what": "sample, memory kept",
        "size": f"{samples} trajectories",
        "seconds": kept,
        "reference": "memory given back to the system",
        "reference_seconds": given_back,
        "ratio": kept / given_back,
        "kept": able,
        "peak_gb": peak_gb(),
    }


def _sampling_seconds(model: LatentDiffusion, anchors: Any, seed: int) -> float:
    """The best of a few."""
    seconds = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        model.sample(len(anchors), anchors=anchors, seed=seed)
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def _divergences(
    dataset: TrajectoryDataset, model: LatentDiffusion, compared: int | None, seed: int
) -> dict[str, Any]:
    """Both ways of sampling the same weights, and the floor at the same size."""
    anchors = _anchors(dataset, compared or len(dataset.split("test")), seed)
    fast = model.sample(len(anchors), anchors=anchors, seed=seed)
    slow = sample_as_published(model.with_solver(*SOLVER), anchors, seed)
    floor = sampling_floor(
        dataset, MetricSpec.of(dataset), size=len(anchors), seed=seed
    ).everybody.average
    return {
        "jsd": _jsd(dataset, fast, seed),
        "reference_jsd": _jsd(dataset, slow, seed),
        "floor_jsd": {name: round(floor[name], 4) for name in POOLED},
        "jsd_samples": len(anchors),
    }


@torch.no_grad()
def sample_as_published(model: LatentDiffusion, anchors: Any, seed: int) -> Trajectories:
    """In fp32 and batches of 64, by beam search that computes every prefix again."""
    made = []
    generator = torch.Generator().manual_seed(seed)
    for start in range(0, len(anchors), PUBLISHED_BATCH):
        some = anchors[start : start + PUBLISHED_BATCH]
        noise = torch.randn(
            len(some), model.max_length, model.config.autoencoder.latent, generator=generator
        )
        latents = model.roll_out(noise, np.full(len(some), UNKNOWN), some).clean
        made.append(
            model.autoencoder.decode(model.autoencoder.restore(latents), beams=BEAMS, cache=False)
        )
    tokens = torch.cat(made).numpy()
    valid = tokens != PAD
    return Trajectories(
        tokens[valid].astype(np.int32), np.concatenate(([0], np.cumsum(valid.sum(1)))), anchors
    )


def _training_row(
    dataset: TrajectoryDataset, model: LatentDiffusion, peak: float, seed: int
) -> dict[str, Any]:
    """A step of the denoiser: cached latents in the precision of this machine, against fp32 that encodes in every step."""
    trainer = Trainer(None, Execution(quiet=True), seed=seed)
    stage = model.training_stage(
        dataset, unlabelled(dataset, seed), "denoiser", trainer, fresh=True
    )
    network, optimizer = trainer.fabric.setup(model.network.train(), stage.state().optimizer)

    def ours() -> Tensor:
        loss = stage.loss(network, 1, Share())
        trainer.fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    plain = stage.state().optimizer
    tokens = dataset.batch("train", model.config.denoiser.batch, seed, 1, model.max_length)

    def reference() -> Tensor:
        model.encode(tokens.tokens)
        loss = stage.loss(model.network, 1, Share())
        torch.autograd.backward(loss)
        plain.step()
        plain.zero_grad()
        return loss

    fast, slow = _best(ours), _best(reference)
    flops = _flops(ours)
    model.network.eval()
    return {
        "what": "train, one step of the denoiser",
        "size": f"{model.config.denoiser.batch} trajectories",
        "seconds": fast,
        "reference": "fp32 eager, latents encoded in the step",
        "reference_seconds": slow,
        "ratio": fast / slow,
        "share_of_matmul_peak": round(flops / fast / peak, 3),
        "peak_gb": peak_gb(),
    }


def matmul_peak(dtype: torch.dtype, size: int = 2_048) -> float:
    """Floating-point operations a second of a large product, the best of a few."""
    a, b = torch.randn(2, size, size).to(dtype)
    return 2 * size**3 / _best(lambda: a @ b)


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


def _jsd(dataset: TrajectoryDataset, made: Trajectories, seed: int) -> dict[str, float]:
    real = Trajectories.of(dataset, dataset.split("test"))
    found = evaluate_groups(
        MetricSpec.of(dataset), {EVERYBODY: real}, {EVERYBODY: made}, seed=seed
    ).average
    return {name: round(found[name], 4) for name in POOLED}


def _anchors(dataset: TrajectoryDataset, n: int, seed: int) -> Any:
    chosen = np.random.default_rng(seed).choice(dataset.split("train"), n)
    return dataset.anchors[dataset.person[chosen]]
