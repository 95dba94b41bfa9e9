"""Families of generators side by side: each trains for the same time on the same city, and learns groups from the same regions.

How many steps that is on this machine is found out by a trial and kept, so that a run that stopped goes on with the same.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from bench.cells import BASELINE, MEASURE, Bench, Job, Place, fill, summarise
from bench.summary import write_result
from mobatlas.config import merge
from mobatlas.errors import MobatlasError
from mobatlas.generators.protocol import family_of, generator_names
from mobatlas.generators.store import load_model
from mobatlas.io.manifest import library_versions, write_json
from mobatlas.pipeline.supervise import split_options
from mobatlas.pipeline.train import train
from mobatlas.training.loop import METRICS, Execution

JOBS = (Job("demogroups", "tilt"), Job("hot16", "tilt"))
SECONDS = 600.0  # of phase 1; teaching has half of it
TRIAL, WARM = 60, 20  # steps of a stage, and the first of them, which are not timed
WEIGHTED_FIT = "weighted_fit"
SAMPLES = 2_048  # that are timed
STEPS_FILE, SPEED_FILE = "steps.json", "speed.json"


def run(
    out: Path,
    seeds: int = 1,
    first_seed: int = 0,
    *,
    generators: Sequence[str] = (),
    seconds: float = SECONDS,
    values: Mapping[str, Mapping[str, Any]] | None = None,
    city: Mapping[str, Any] | None = None,
    quiet: bool = False,
) -> dict[str, Any]:
    """Fill a folder for each family within `out`, write families.json there; `values` change the preset of a family."""
    names = list(generators or (name for name in generator_names() if family_of(name).trainable))
    for name in names:  # refused before anything is trained
        if not family_of(name).trainable:
            raise MobatlasError(
                f"--generator {name}: is not trained here, so its time says nothing; leave it out"
            )
    numbers = range(first_seed, first_seed + seeds)
    asked = "".join(f" --generator {name}" for name in generators)
    told = f"python -m bench families --seconds {seconds:g}{asked}"
    command = f"{told} --seeds 1 --first-seed {{seed}} --out {out.name}"
    steps: dict[str, dict[str, Any]] = {}
    benches: dict[str, Bench] = {}
    for name in names:  # all trials before anything long, so that they meet the same machine
        own = Bench(
            command,
            merge(_mapless(name), (values or {}).get(name, {})),
            city or {},
            quiet=quiet,
            generator=name,
        )
        steps[name] = _steps(out / name, first_seed, own, seconds)
        benches[name] = replace(own, values=merge(own.values, steps[name]))
    for name, bench in benches.items():
        fill(out / name, name, JOBS, numbers, bench)
    rows = [
        {
            "generator": name,
            "steps": steps[name],
            "trajectories_per_second": _speed(
                Place(out / name / f"seed-{first_seed}", first_seed, bench)
            ),
            **summarise(out / name, numbers, JOBS),
        }
        for name, bench in benches.items()
    ]
    result = {
        "command": f"{told} --seeds {seeds} --first-seed {first_seed} --out {out.name}",
        "seed": first_seed,
        "versions": library_versions(),
        "seconds": seconds,
        "measure": f"{MEASURE}; every family trains for as many steps as take {seconds:g} s here, and half of that in phase 2; "
        "none of them is given a map (network.distance_curves)",
        "families": rows,
    }
    write_result(out, "families", result)
    return result


def _mapless(name: str) -> dict[str, Any]:
    """Options of a family without what not all of them have: how far places are."""
    network = getattr(family_of(name).config(), "network", None)
    return (
        {"network": {"distance_curves": 0, "group_bias": False}}
        if getattr(network, "distance_curves", 0)
        else {}
    )


def stages(config: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The parts of a family's configuration that are trained in phase 1, in their order."""
    return {
        name: part
        for name, part in config.items()
        if isinstance(part, Mapping) and {"steps", "batch"} <= part.keys()
    }


def budget(
    config: Mapping[str, Any], step_seconds: Sequence[float], seconds: float
) -> dict[str, dict[str, int]]:
    """Steps of all stages in proportion to those of the preset, so that together they take so long; teaching half of it."""
    parts = stages(config)
    whole = sum(
        part["steps"] * each for part, each in zip(parts.values(), step_seconds, strict=True)
    )
    wanted = {name: part["steps"] * seconds / whole for name, part in parts.items()}
    wanted[WEIGHTED_FIT] = seconds / 2 / step_seconds[-1]  # of what phase 1 trained last
    told = {name: max(1, round(steps)) for name, steps in wanted.items()}
    return {
        name: {"steps": n, "warmup": min(config[name]["warmup"], n // 5)}
        for name, n in told.items()
    }


def _steps(folder: Path, seed: int, bench: Bench, seconds: float) -> dict[str, Any]:
    """What the budget comes to on this machine, found out once."""
    kept = folder / STEPS_FILE
    if kept.exists():
        found: dict[str, Any] = json.loads(kept.read_text(encoding="utf-8"))
        return found
    place = Place(folder / f"seed-{seed}", seed, bench)
    place.prepared()
    family, values = family_of(bench.generator), split_options(bench.values)[1]
    config = family.config.model_validate(merge(family.presets[bench.preset], values)).model_dump()
    brief = {name: {"steps": TRIAL, "warmup": 0} for name in stages(config)}
    with tempfile.TemporaryDirectory(prefix=".trial-", dir=folder) as scratch:
        out = Path(scratch) / "model"
        train(
            place.dataset.path,
            out,
            generator=bench.generator,
            preset=bench.preset,
            values=merge(values, brief),
            seed=seed,
            execution=Execution(quiet=bench.quiet),
        )
        lines = [
            json.loads(line) for line in (out / METRICS).read_text(encoding="utf-8").splitlines()
        ]
    found = budget(
        config,
        [_step_seconds(lines, name) for name in dict.fromkeys(line["stage"] for line in lines)],
        seconds,
    )
    write_json(kept, found)
    return found


def _step_seconds(lines: Sequence[Mapping[str, Any]], stage: str) -> float:
    """How long a step took, once it was warm."""
    mine = [line for line in lines if line["stage"] == stage]
    last, first = mine[-1], next((line for line in mine if line["step"] >= WARM), mine[0])
    steps = last["step"] - first["step"]
    return float(
        (last["seconds"] - first["seconds"]) / steps if steps else last["seconds"] / last["step"]
    )


def _speed(place: Place) -> float:
    """Samples of the baseline a second; measured once, so that a run that goes on says the same."""
    kept = place.path / SPEED_FILE
    if not kept.exists():
        model = load_model(place.path / BASELINE).generator
        anchors = np.resize(place.dataset.anchors, (SAMPLES, 4))
        model.sample(
            model.tile, anchors=np.resize(anchors, (model.tile, 4)), seed=1
        )  # what is made once is made now
        start = time.perf_counter()
        model.sample(SAMPLES, anchors=anchors, seed=2)
        write_json(
            kept, {"trajectories_per_second": round(SAMPLES / (time.perf_counter() - start), 1)}
        )
    return float(json.loads(kept.read_text(encoding="utf-8"))["trajectories_per_second"])
