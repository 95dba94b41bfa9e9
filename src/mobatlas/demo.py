"""The demo: a simulated city, a generator without demographics, groups learnt from regions and, to compare, from labels."""

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
from mobatlas.regions.folder import build_regions
from mobatlas.report.text import city_table, scores_table, summary_table, training_table

PARTITION = "hot16"  # sixteen regions, most of them with one group in the majority
# Shorter than the preset `small`: the demo shows the way in minutes, `benchmark phase2` how good the preset is.
OPTIONS: dict[str, Any] = {"denoiser": {"steps": 800}, "teaching": {"steps": 400}}
CALIBRATION: dict[str, Any] = {"calibration": {"pool": 1_024}}


def run_demo(
    out: Path,
    seed: int = 0,
    quiet: bool = False,
    *,
    overwrite: bool = False,
    city: Mapping[str, Any] | None = None,
    options: Mapping[str, Any] | None = None,
    calibration: Mapping[str, Any] | None = None,
) -> list[RenderableType]:
    """Fill `out` with city, dataset, regions and three models; what to show of them. The options change the defaults.

    What takes long goes on where an earlier call stopped, unless `overwrite` begins anew; the rest is made again.
    """
    from mobatlas.evaluation.metrics import Yardstick  # what needs torch takes seconds to import
    from mobatlas.evaluation.models import score_groups
    from mobatlas.generators.base import Generator
    from mobatlas.generators.folder import load_model
    from mobatlas.supervision.kept import load_sampler
    from mobatlas.supervision.resample import Sampler
    from mobatlas.training import supervise, train

    run = load_run(preset="small")
    simulated = run.simulate.model_validate(merge(run.simulate.model_dump(), city or {}))
    with track("simulating a city", simulated.users, quiet) as tracker:
        facts = write_city_folder(out / "city", simulated, seed, overwrite=True, tracker=tracker)
    with track("preparing its visits", STEPS, quiet) as tracker:
        summary = prepare(out / "city", out / "dataset", preset="small", overwrite=True, tracker=tracker)
    values = OPTIONS if options is None else options
    common: dict[str, Any] = {"seed": seed, "resume": not overwrite, "overwrite": overwrite, "quiet": quiet}
    report = train(out / "dataset", out / "baseline", preset="small", values=values, **common)
    build_regions(out / "dataset", out / "regions", partition=PARTITION, seed=seed, overwrite=True)
    chosen = merge(values, CALIBRATION if calibration is None else calibration)
    supervise(out / "baseline", out / "supervised", out / "regions", values=chosen, **common)
    supervise(out / "baseline", out / "strong", strategy="strong", values=values, **common)
    dataset = TrajectoryDataset.open(out / "dataset")
    models: dict[str, Generator | Sampler] = {
        "baseline": load_model(out / "baseline").generator,
        "supervised": load_sampler(load_model(out / "supervised")),
        "strong": load_model(out / "strong").generator,
    }
    scores = score_groups(dataset, Yardstick.of(dataset), models, seed)
    return [
        city_table(facts, out / "city"),
        summary_table(summary.as_dict(), out / "dataset"),
        training_table(report, out / "baseline"),
        scores_table(scores),
    ]
