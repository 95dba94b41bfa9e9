"""The demo: a simulated city, prepared; a generator trained on it, with and without labels; how good both are."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import RenderableType

from mobatlas.config import load_run, merge
from mobatlas.data.city import write_city_folder
from mobatlas.data.dataset import TrajectoryDataset
from mobatlas.data.prepare import STEPS, prepare
from mobatlas.progress import track
from mobatlas.report.text import city_table, scores_table, summary_table, training_table

# Shorter than the preset `small`: the demo shows the way in minutes, `benchmark phase1` how good the preset is.
OPTIONS: dict[str, Any] = {"denoiser": {"steps": 1_500}, "teaching": {"steps": 800}}


def run_demo(
    out: Path,
    seed: int = 0,
    quiet: bool = False,
    *,
    city: Mapping[str, Any] | None = None,
    options: Mapping[str, Any] | None = None,
) -> list[RenderableType]:
    """Fill `out` with city, dataset, baseline and strong; what to show of them. `city` and `options` change the defaults."""
    from mobatlas.evaluation.metrics import Yardstick  # what needs torch takes seconds to import
    from mobatlas.evaluation.models import score_groups
    from mobatlas.generators.folder import load_model
    from mobatlas.training import supervise, train

    run = load_run(preset="small")
    simulated = run.simulate.model_validate(merge(run.simulate.model_dump(), city or {}))
    with track("simulating a city", simulated.users, quiet) as tracker:
        facts = write_city_folder(out / "city", simulated, seed, overwrite=True, tracker=tracker)
    with track("preparing its visits", STEPS, quiet) as tracker:
        summary = prepare(out / "city", out / "dataset", preset="small", overwrite=True, tracker=tracker)
    values = OPTIONS if options is None else options
    common: dict[str, Any] = {"values": values, "seed": seed, "overwrite": True, "quiet": quiet}
    report = train(out / "dataset", out / "baseline", preset="small", **common)
    supervise(out / "baseline", out / "strong", strategy="strong", **common)
    dataset = TrajectoryDataset.open(out / "dataset")
    models = {name: load_model(out / name).generator for name in ("baseline", "strong")}
    scores = score_groups(dataset, Yardstick.of(dataset), models, seed)
    return [
        city_table(facts, out / "city"),
        summary_table(summary.as_dict(), out / "dataset"),
        training_table(report, out / "baseline"),
        scores_table(scores),
    ]
