from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from rich.console import Console

from mobatlas.demo import run_demo
from mobatlas.generators.folder import load_model
from tests.tiny import OPTIONS


def test_the_demo_goes_from_a_city_to_a_table_of_models(tmp_path: Path) -> None:
    city = {"users": 700, "pois": 40, "districts": 4, "days": 15}
    small: dict[str, Any] = {
        "options": OPTIONS["latent-diffusion"],
        "calibration": {"calibration": {"pool": 64, "candidates": 4}},
    }
    shown = run_demo(tmp_path / "demo", quiet=True, city=city, **small)
    console = Console(file=io.StringIO(), width=120)
    console.print(*shown)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    for word in ("baseline", "supervised", "strong", "floor", "POI"):
        assert word in text
    assert load_model(tmp_path / "demo" / "baseline").generator.groups is None
    assert load_model(tmp_path / "demo" / "strong").generator.groups is not None
    assert load_model(tmp_path / "demo" / "supervised").strategy == "tilt"
    trained = (tmp_path / "demo" / "baseline" / "weights.safetensors").stat().st_mtime_ns
    console.print(*run_demo(tmp_path / "demo", quiet=True, city=city, **small))
    assert (tmp_path / "demo" / "baseline" / "weights.safetensors").stat().st_mtime_ns == trained, "not trained again"
