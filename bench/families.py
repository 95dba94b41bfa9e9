"""Families of generators at equal training time, on the same cities and regions.

A short trial measures how many steps fit into the time on this machine. It is a cell, so a
resumed run trains for the same number of steps.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bench.cells import MEASURE, Job, SeedFolder, Setup, model_cells
from bench.gaps import summarise
from bench.runner import Cell, Command, Experiment, Runner
from bench.score_models import BASELINE
from bench.summary import write_result
from mobatlas.config import merge
from mobatlas.errors import MobatlasError
from mobatlas.generators.protocol import GENERATORS, family_of
from mobatlas.generators.store import load_model
from mobatlas.pipeline.models import split_options, train
from mobatlas.training.loop import METRICS, Execution

JOBS = (Job("demogroups", "tilt"), Job("hot16", "tilt"))
SECONDS = 600.0  # of phase 1; the weighted fit has half of it
TRIAL_STEPS = 60  # of each stage
WARM_STEPS = 20  # the first steps of a trial, which are not timed
WEIGHTED_FIT = "weighted_fit"
SAMPLES = 2_048  # to time sampling


def run(
    experiment: Experiment,
    generators: Sequence[str] = (),
    seconds: float = SECONDS,
    values: Mapping[str, Mapping[str, Any]] | None = None,
    city: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Train and score each family in a folder of its own, then write families.json.

    `values` change the preset of a family.
    """
    names = list(generators or (name for name in GENERATORS if family_of(name).trainable))
    for name in names:
        if not family_of(name).trainable:
            raise MobatlasError(
                f"--generator {name}: mobatlas does not train this family; leave it out"
            )
    command = Command("families", {"--seconds": [f"{seconds:g}"], "--generator": generators})
    runners = {
        name: Runner(experiment, name, command, folder=experiment.out / name) for name in names
    }
    setups = {}
    steps = {}
    for name in names:  # all trials come first, under the same load of the machine
        options = merge(_without_map(name), (values or {}).get(name, {}))
        setup = Setup(options, city or {}, generator=name, quiet=experiment.quiet)
        steps[name] = _measure_steps(runners[name], setup, seconds)
        setups[name] = replace(setup, values=merge(options, steps[name]))
    for name, setup in setups.items():
        runner = runners[name]
        runner.run(model_cells(runner.out, setup, JOBS, experiment.numbers))
    rows = [
        {
            "generator": name,
            "steps": steps[name],
            "trajectories_per_second": _measure_sampling(runners[name], setup),
            **summarise(runners[name].out, experiment.numbers, JOBS),
        }
        for name, setup in setups.items()
    ]
    result = {
        **command.header(experiment),
        "seconds": seconds,
        "measure": f"{MEASURE}; every family trains for as many steps as take {seconds:g} s here, "
        "and half of that in phase 2; "
        "none of them is given a map (network.distance_curves)",
        "families": rows,
    }
    write_result(experiment.out, "families", result)
    return result


def _without_map(name: str) -> dict[str, Any]:
    """Return options that turn off distances between places, which not all families have."""
    network = getattr(family_of(name).config(), "network", None)
    has_map = getattr(network, "distance_curves", 0)
    return {"network": {"distance_curves": 0, "group_bias": False}} if has_map else {}


def stages(config: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return the sections of a family's configuration that phase 1 trains, in their order."""
    return {
        name: section
        for name, section in config.items()
        if isinstance(section, Mapping) and {"steps", "batch"} <= section.keys()
    }


def budget(
    config: Mapping[str, Any], step_seconds: Sequence[float], seconds: float
) -> dict[str, dict[str, int]]:
    """Return the steps of all stages that take `seconds`, in the proportions of the preset.

    The weighted fit of phase 2 has half of the time.
    """
    sections = stages(config)
    preset_seconds = sum(
        section["steps"] * each
        for section, each in zip(sections.values(), step_seconds, strict=True)
    )
    shares = {
        name: section["steps"] * seconds / preset_seconds for name, section in sections.items()
    }
    shares[WEIGHTED_FIT] = seconds / 2 / step_seconds[-1]  # it trains the last stage
    steps = {name: max(1, round(share)) for name, share in shares.items()}
    return {
        name: {"steps": n, "warmup": min(config[name]["warmup"], n // 5)}
        for name, n in steps.items()
    }


def _measure_steps(runner: Runner, setup: Setup, seconds: float) -> dict[str, Any]:
    """Return the steps that take `seconds` on this machine, measured once for all seeds."""
    folder = SeedFolder(runner.out, runner.experiment.first_seed, setup)
    inputs = setup.inputs() | {"seconds": seconds}
    [cell] = runner.run([Cell(None, "steps-budget", inputs, partial(_trial, folder, seconds))])
    steps: dict[str, Any] = cell["steps"]
    return steps


def _trial(folder: SeedFolder, seconds: float) -> dict[str, Any]:
    setup = folder.setup
    dataset = folder.prepare()
    family = family_of(setup.generator)
    values = split_options(setup.values)[1]
    config = family.config.model_validate(merge(family.presets[setup.preset], values)).model_dump()
    brief = {name: {"steps": TRIAL_STEPS, "warmup": 0} for name in stages(config)}
    with tempfile.TemporaryDirectory(prefix=".trial-", dir=folder.out) as scratch:
        model = Path(scratch) / "model"
        train(
            dataset,
            model,
            generator=setup.generator,
            preset=setup.preset,
            values=merge(values, brief),
            seed=folder.seed,
            execution=Execution(quiet=setup.quiet),
        )
        text = (model / METRICS).read_text(encoding="utf-8")
    lines = [json.loads(line) for line in text.splitlines()]
    names = dict.fromkeys(line["stage"] for line in lines)
    return {"steps": budget(config, [_step_seconds(lines, name) for name in names], seconds)}


def _step_seconds(lines: Sequence[Mapping[str, Any]], stage: str) -> float:
    """Return the time of a step after the first ones."""
    own = [line for line in lines if line["stage"] == stage]
    last = own[-1]
    first = next((line for line in own if line["step"] >= WARM_STEPS), own[0])
    steps = last["step"] - first["step"]
    if not steps:
        return float(last["seconds"] / last["step"])
    return float((last["seconds"] - first["seconds"]) / steps)


def _measure_sampling(runner: Runner, setup: Setup) -> float:
    """Return the samples per second of the baseline, measured once."""
    seed = runner.experiment.first_seed
    folder = SeedFolder(runner.out, seed, setup)
    cell = Cell(seed, "sampling-speed", setup.inputs(), partial(_time_sampling, folder))
    return float(runner.run([cell])[0]["trajectories_per_second"])


def _time_sampling(folder: SeedFolder) -> dict[str, Any]:
    model = load_model(folder.path / BASELINE).generator
    anchors = np.resize(folder.dataset.anchors, (SAMPLES, 4))
    # The first call also fills caches.
    model.sample(model.tile, anchors=np.resize(anchors, (model.tile, 4)), seed=1)
    start = time.perf_counter()
    model.sample(SAMPLES, anchors=anchors, seed=2)
    seconds = time.perf_counter() - start
    return {"trajectories_per_second": round(SAMPLES / seconds, 1)}
