"""The demo, on a very small city."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from rich.console import Console

from mobatlas.generators.store import load_model
from mobatlas.pipeline.run import run_demo
from mobatlas.report.console import run_tables
from tests.tiny import OPTIONS

SMALLER: dict[str, Any] = {
    "simulate": {"users": 300, "pois": 24, "districts": 4, "days": 15},
    "train": {"options": OPTIONS["autoregressive"]},
    "supervise": {
        "options": {
            "weighted_fit": {"steps": 4, "warmup": 1},
            "calibration": {"pool": 64, "candidates": 4},
        }
    },
    "samples": {"each": 20},
}


def test_the_demo_goes_from_a_city_to_tables_of_models_and_a_report(tmp_path: Path) -> None:
    out = tmp_path / "demo"
    page = io.StringIO()
    result = run_demo(out, quiet=True, values=SMALLER)
    Console(file=page, width=120).print(run_tables(out, result.facts))
    text = page.getvalue()
    sentences = " ".join(text.split())
    for word in (
        "regions hot16",
        "regions messy",
        "baseline",
        "ours",
        "strong",
        "floor",
        "gap",
        "POI frequency",
    ):
        assert word in text
    assert "These 16 regions" in sentences and "These 8 regions" in sentences
    assert result.report == out / "report.html" and result.report.exists()
    assert load_model(out / "baseline").generator.groups is None
    assert load_model(out / "models" / "messy").strategy == "tilt"
