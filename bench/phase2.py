"""Phase 2 on simulated cities: what strategies close of the way from baseline to floor, by how groups are mixed in regions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.cells import MEASURE, PARTITIONS, Bench, Job, check_partition, fill, summarise
from bench.summary import write_result
from mobatlas.io.manifest import library_versions

OTHERS: Mapping[str, tuple[str, ...]] = {
    "demogroups": ("resample", "finetune")
}  # beside the default, a tilt
SHUFFLED = "shuffled"  # demogroups, whose people are exchanged between regions
KNOWN = (*PARTITIONS, SHUFFLED)


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
    for name in partitions:
        check_partition(name, KNOWN)
    jobs = [job for name in partitions or KNOWN for job in jobs_of(name)]
    numbers = range(first_seed, first_seed + seeds)
    asked = "".join(f" --partition {name}" for name in partitions)
    command = "python -m bench phase2 --seeds 1 --first-seed {seed}" + asked + " --out {out}"
    fill(out, "phase 2", jobs, numbers, Bench(command, values or {}, city or {}, quiet=quiet))
    result = {
        "command": f"python -m bench phase2 --seeds {seeds} --first-seed {first_seed}{asked} --out {out.name}",
        "seed": first_seed,
        "versions": library_versions(),
        "measure": MEASURE,
        **summarise(out, numbers, jobs),
    }
    write_result(out, "phase2", result)
    return result


def jobs_of(partition: str) -> list[Job]:
    """The default strategy, and the others where they are compared."""
    if partition == SHUFFLED:
        return [Job("demogroups", "tilt", shuffled=True)]
    return [Job(partition, way) for way in ("tilt", *OTHERS.get(partition, ()))]
