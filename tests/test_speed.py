from __future__ import annotations

import io
import json
from functools import partial
from pathlib import Path

import pytest
from rich.console import Console

from bench import many_regions, speed
from bench.report.console import speed_table
from mobatlas import MobatlasError
from tests.tiny import OPTIONS


def test_speed_is_a_ratio_measured_in_one_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = speed.Profile(20_000, OPTIONS["latent-diffusion"], 32, 32)
    monkeypatch.setitem(speed.PROFILES, "quick", tiny)
    result = speed.run(tmp_path / "speed", "quick", seed=1)
    assert json.loads((tmp_path / "speed" / "speed.json").read_text()) == result
    rows = {row["what"]: row for row in result["rows"]}
    assert list(rows) == [
        "simulate",
        "prepare",
        "evaluate",
        "sample",
        "sample, memory kept",
        "train, one step of the denoiser",
        "matmul peak",
    ]
    sampled, trained = rows["sample"], rows["train, one step of the denoiser"]
    assert trained["ratio"] < 2, "cached latents are no slower than encoding in every step"
    assert all(0 < row["share_of_matmul_peak"] < 1.5 for row in (sampled, trained))
    assert set(sampled["jsd"]) == set(sampled["reference_jsd"]) == set(sampled["floor_jsd"])
    assert rows["evaluate"]["size"] == "100,000 trajectories, 8 groups"
    assert rows["evaluate"]["test_trajectories"] > 8
    assert 0.05 < rows["prepare"]["peak_gb"] < 3, "memory of its own process"
    assert set(result["startup"]) == {"import mobatlas", "mobatlas --help"}
    assert 0 < result["startup"]["import mobatlas"] < result["startup"]["mobatlas --help"]
    assert sorted(path.name for path in (tmp_path / "speed").iterdir()) == [
        "manifest.json",
        "speed.json",
        "speed.summary.json",
    ]


def test_a_profile_of_growth_is_kept_and_printed_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(many_regions, "POIS", 300)
    monkeypatch.setattr(many_regions, "rows", partial(many_regions.rows, sizes=((60, 4),)))
    result = speed.run(tmp_path / "speed", "regions", seed=1)
    assert json.loads((tmp_path / "speed" / "speed.json").read_text()) == result
    assert result["command"] == "python -m bench speed --profile regions --seed 1 --out speed"
    assert all(
        row["size"].startswith("60 regions, 4 groups") and row["peak_gb"] > 0
        for row in result["rows"]
    )
    page = io.StringIO()
    Console(width=160, file=page).print(speed_table(result))
    assert all(row["what"] in page.getvalue() for row in result["rows"])


def test_a_profile_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(MobatlasError, match="--profile huge does not exist"):
        speed.run(tmp_path / "speed", "huge")
