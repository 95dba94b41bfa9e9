"""Phase 2 on simulated cities: what strategies close of the way from baseline to floor, by how groups are mixed in regions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mobatlas.artifacts import library_versions, write_json
from mobatlas.benchmark.cells import MEASURE, PARTITIONS, Bench, Job, check_partitions, fill, summarise

OTHERS: Mapping[str, tuple[str, ...]] = {"demogroups": ("resample", "finetune")}  # beside the default, a tilt


def run(
    out: Path,
    seeds: int = 3,
    first_seed: int = 0,
    *,
    partitions: Sequence[str] = (),
    values: Mapping[str, Any] | None = None,
    city: Mapping[str, Any] | None = None,
    quiet: bool = False,
) -> dict[str, Any]:
    """Fill `out`, write phase2.json there; `values` and `city` change the preset `small`."""
    check_partitions(partitions)
    jobs = [Job(name, way) for name in partitions or PARTITIONS for way in ("tilt", *OTHERS.get(name, ()))]
    numbers = range(first_seed, first_seed + seeds)
    asked = "".join(f" --partition {name}" for name in partitions)
    command = "mobatlas benchmark phase2 --seeds 1 --first-seed {seed}" + asked + " --out {out}"
    fill(out, "phase 2", jobs, numbers, Bench(command, values or {}, city or {}, quiet=quiet))
    result = {
        "command": f"mobatlas benchmark phase2 --seeds {seeds} --first-seed {first_seed}{asked} --out {out.name}",
        "seed": first_seed,
        "versions": library_versions(),
        "measure": MEASURE,
        **summarise(out, numbers, jobs),
    }
    write_json(out / "phase2.json", result)
    return result
