"""The simulated city as a folder on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from mobatlas.artifacts import new_folder
from mobatlas.config import CityConfig
from mobatlas.data.city import write_city
from mobatlas.groups import Groups
from mobatlas.progress import SILENT, Tracker

KIND = "city"


def write_city_folder(
    out: Path | str, config: CityConfig, seed: int = 0, *, overwrite: bool = False, tracker: Tracker = SILENT
) -> dict[str, Any]:
    """Simulate into `out`: visits.parquet, people.parquet, pois.parquet; returns how much was written."""
    groups = Groups.of(config.attributes)
    recorded = {"simulate": config.model_dump(mode="json")}
    with new_folder(Path(out), KIND, seed=seed, config=recorded, overwrite=overwrite) as folder:
        write_city(config, seed, folder.path, lambda done, _: tracker.step(done))
        rows = {
            name: pq.read_metadata(folder.path / f"{name}.parquet").num_rows for name in ("visits", "people", "pois")
        }
        facts = rows | {"days": config.days, "groups": len(groups)}
        folder.details.update(facts)
    return facts
