from __future__ import annotations

import json
from pathlib import Path

import pytest

from mobatlas import MobatlasError
from mobatlas.benchmark import speed
from tests.tiny import OPTIONS


def test_speed_is_a_ratio_measured_in_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = speed.Profile(20_000, OPTIONS["latent-diffusion"], 32, 32)
    monkeypatch.setitem(speed.PROFILES, "quick", tiny)
    result = speed.run(tmp_path / "speed", "quick", seed=1)
    assert json.loads((tmp_path / "speed" / "speed.json").read_text()) == result
    simulated, prepared, evaluated, sampled, trained, _ = result["rows"]
    for row in (sampled, trained):
        assert row["ratio"] == pytest.approx(row["seconds"] / row["reference_seconds"])
        assert 0 < row["share_of_matmul_peak"] < 1.5
    assert sampled["speedup"] == pytest.approx(1 / sampled["ratio"])
    assert set(sampled["jsd"]) == set(sampled["reference_jsd"]) == set(sampled["floor_jsd"])
    assert sampled["jsd_samples"] == 32
    assert simulated["visits_per_second"] == round(
        int(simulated["size"].split()[0].replace(",", "")) / simulated["seconds"]
    )
    assert evaluated["size"] == "100,000 trajectories, 8 groups" and evaluated["test_trajectories"] > 8
    assert prepared["ratio"] == prepared["seconds"] / prepared["reference_seconds"]
    assert 0.05 < prepared["peak_gb"] < 3
    assert sorted(path.name for path in (tmp_path / "speed").iterdir()) == ["manifest.json", "speed.json"]


def test_a_profile_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(MobatlasError, match="--profile huge does not exist"):
        speed.run(tmp_path / "speed", "huge")
