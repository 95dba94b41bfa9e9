"""The demo: a simulated city, prepared."""

from __future__ import annotations

from pathlib import Path

from rich.console import RenderableType

from mobatlas.config import load_run
from mobatlas.data.city import write_city_folder
from mobatlas.data.prepare import STEPS, prepare
from mobatlas.progress import track
from mobatlas.report.text import city_table, summary_table


def run_demo(out: Path, seed: int = 0, quiet: bool = False) -> list[RenderableType]:
    """Simulate the default city into `out/city`, prepare it into `out/dataset`; what to show of both."""
    run = load_run(preset="small")
    with track("simulating a city", run.simulate.users, quiet) as tracker:
        facts = write_city_folder(out / "city", run.simulate, seed, overwrite=True, tracker=tracker)
    with track("preparing its visits", STEPS, quiet) as tracker:
        summary = prepare(out / "city", out / "dataset", preset="small", overwrite=True, tracker=tracker)
    return [city_table(facts, out / "city"), summary_table(summary.as_dict(), out / "dataset")]
