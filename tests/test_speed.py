"""The speed benchmark measures what a command does, and reports limits without failing on them."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from rich.console import Console

from bench import many_regions, speed
from bench.measure import measure, run_in_process
from bench.report.console import speed_table
from mobatlas import MobatlasError
from mobatlas.generators.protocol import GENERATORS
from tests.outcomes import run
from tests.tiny import OPTIONS

HEAVY = ("torch", "pandas", "scipy", "pyarrow", "duckdb", "ibis", "matplotlib")


def sleep_and_allocate(seconds: float, megabytes: int) -> int:
    """Return the process that did it."""
    memory = bytearray(b"x") * (megabytes * 1_000_000)
    time.sleep(seconds)
    assert memory
    return os.getpid()


def test_time_and_peak_memory_are_those_of_the_work_alone() -> None:
    small = measure(sleep_and_allocate, 0.3, 1)
    large = measure(sleep_and_allocate, 0.0, 200)
    assert 0.3 <= small.seconds < 5
    assert large.peak_gb - small.peak_gb == pytest.approx(0.2, abs=0.05)
    assert len({os.getpid(), small.value, large.value}) == 3, "each has a process of its own"
    assert run_in_process(os.getpid) != os.getpid()


def test_start_up_times_are_reported_with_their_limits() -> None:
    slow = speed.Startup("slow", ("-c", "import time; time.sleep(0.3)"), 0.1)
    fast = speed.Startup("fast", ("-c", "pass"), 60.0)
    slow_row, fast_row = speed.startup_rows((slow, fast))
    assert slow_row["seconds"] >= 0.3 and not slow_row["within_limit"]
    assert fast_row["seconds"] < slow_row["seconds"] and fast_row["within_limit"]
    assert [row["limit_seconds"] for row in (slow_row, fast_row)] == [0.1, 60.0]


def test_import_and_help_are_the_commands_with_a_limit() -> None:
    limits = {startup.name: startup.limit_seconds for startup in speed.STARTUPS}
    assert limits == {"import mobatlas": 0.5, "mobatlas --help": 1.0}


@pytest.mark.parametrize("module", ["mobatlas", "mobatlas.cli.commands"])
def test_import_and_help_load_no_heavy_library(module: str) -> None:
    code = f"import sys, {module}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert set(HEAVY).isdisjoint(done.stdout.split())


def test_the_help_of_train_lists_every_generator() -> None:
    text = run("train", "--help").out
    words = set(text.replace(",", " ").replace("│", " ").split())
    assert set(GENERATORS) <= words


def test_quick_measures_data_evaluation_and_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = speed.Workload(20_000, OPTIONS["latent-diffusion"], 32, 32)
    monkeypatch.setitem(speed.WORKLOADS, "quick", tiny)
    result = speed.run(tmp_path / "speed", "quick", seed=1)
    assert json.loads((tmp_path / "speed" / "speed.json").read_text()) == result
    rows = {row["task"]: row for row in result["rows"]}
    assert list(rows) == [
        "simulate",
        "prepare",
        "evaluate",
        "sample",
        "sample, memory kept",
        "train, one step of the denoiser",
        "matmul peak",
    ]
    sampled = rows["sample"]
    trained = rows["train, one step of the denoiser"]
    assert trained["ratio"] < 2, "cached latents are no slower than encoding in every step"
    assert all(0 < row["share_of_matmul_peak"] < 1.5 for row in (sampled, trained))
    assert set(sampled["jsd"]) == set(sampled["reference_jsd"]) == set(sampled["floor_jsd"])
    assert rows["evaluate"]["size"] == "100,000 trajectories, 8 groups"
    assert rows["evaluate"]["test_trajectories"] > 8
    assert 0.05 < rows["prepare"]["peak_gb"] < 3, "memory of its own process"
    commands = [row["command"] for row in result["startup"]]
    assert commands == ["import mobatlas", "mobatlas --help"]
    assert sorted(path.name for path in (tmp_path / "speed").iterdir()) == [
        "manifest.json",
        "speed.json",
        "speed.summary.json",
    ]


def test_a_profile_of_growth_is_written_and_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(many_regions, "POIS", 300)
    monkeypatch.setitem(speed.GROWTH, "regions", partial(many_regions.rows, sizes=((60, 4),)))
    result = speed.run(tmp_path / "speed", "regions", seed=1)
    assert json.loads((tmp_path / "speed" / "speed.json").read_text()) == result
    assert result["command"] == "python -m bench speed --profile regions --seed 1 --out speed"
    for row in result["rows"]:
        assert row["size"].startswith("60 regions, 4 groups")
        assert row["peak_gb"] > 0
    page = io.StringIO()
    Console(width=160, file=page).print(speed_table(result))
    for text in (*(row["task"] for row in result["rows"]), "mobatlas --help", "within the limit"):
        assert text in page.getvalue()


def test_an_unknown_profile_is_refused_before_any_work(tmp_path: Path) -> None:
    with pytest.raises(MobatlasError, match="--profile huge does not exist"):
        speed.run(tmp_path / "speed", "huge")
    assert not (tmp_path / "speed").exists()
