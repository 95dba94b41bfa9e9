"""A tiny run, computed once per session."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

from mobatlas.config import build_run
from mobatlas.pipeline.run import run
from tests.tiny import OPTIONS

VALUES: dict[str, Any] = {
    "title": "A tiny <city>",
    "seed": 3,
    "preset": "small",
    "simulate": {"users": 300, "pois": 24, "districts": 4, "days": 15},
    "train": {"generator": "latent-diffusion", "options": OPTIONS["latent-diffusion"]},
    "supervise": {
        "options": {
            "weighted_fit": {"steps": 4, "warmup": 1},
            "calibration": {"pool": 64, "candidates": 4},
        }
    },
    "samples": {"each": 20},
    "audit": True,
    "regions": {"hot16": {"partition": "hot16"}},
}


@functools.cache
def finished_run() -> Path:
    """The folder of the run; tests must not change it."""
    out = Path(tempfile.mkdtemp(prefix="mobatlas-")) / "run"
    run(build_run(VALUES), out, quiet=True)
    return out
