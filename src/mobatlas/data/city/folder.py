"""The simulated city as a folder of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mobatlas.config import CityConfig
from mobatlas.data.city.simulation import write_city
from mobatlas.io.output import new_folder
from mobatlas.progress import SILENT, Tracker

KIND = "city"


def write_city_folder(
    out: Path | str,
    config: CityConfig,
    seed: int = 0,
    *,
    overwrite: bool = False,
    tracker: Tracker = SILENT,
) -> dict[str, Any]:
    """Simulate into `out`: visits.parquet, people.parquet, pois.parquet; returns what was written."""
    recorded = {"simulate": config.model_dump(mode="json")}
    with new_folder(Path(out), KIND, seed=seed, config=recorded, overwrite=overwrite) as folder:
        facts = write_city(config, seed, folder.path, lambda done, _: tracker.step(done))
        folder.details.update(facts)
    return facts
