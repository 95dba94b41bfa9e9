"""The command line: thin, every command calls one public function."""

from __future__ import annotations

import json as jsonlib
import logging
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

import mobatlas
from mobatlas.benchmark import recovery as recovery_benchmark
from mobatlas.benchmark import reweight as reweight_benchmark
from mobatlas.benchmark import speed as speed_benchmark
from mobatlas.config import CityConfig, build, load_run, load_values, merge, parse_assignments
from mobatlas.data.city import write_city_folder
from mobatlas.data.prepare import STEPS, prepare
from mobatlas.demo import run_demo
from mobatlas.errors import MobatlasError
from mobatlas.progress import track
from mobatlas.regions.composition import read_composition
from mobatlas.regions.folder import build_regions, load_regions
from mobatlas.regions.identifiability import diagnose as run_diagnosis
from mobatlas.report.figures import diagnosis_figure
from mobatlas.report.text import (
    city_table,
    diagnosis_table,
    generated_table,
    phase1_table,
    phase2_table,
    regions_table,
    rows_table,
    speed_table,
    summary_table,
    supervised_table,
    training_table,
)

app = typer.Typer(
    name="mobatlas",
    help="Synthetic human mobility by demographic group, learnt from aggregates.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
benchmark_app = typer.Typer(help="Measurements that can be made again.", no_args_is_help=True)
app.add_typer(benchmark_app, name="benchmark")

Out = Annotated[Path, typer.Option("--out", help="The folder to write; it appears whole or not at all.")]
Config = Annotated[Path | None, typer.Option("--config", help="A run's YAML file.")]
Preset = Annotated[str | None, typer.Option("--preset", help="small or paper.")]
Assignments = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="A value of the configuration, e.g. window.days=1."),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace what mobatlas wrote.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on where an earlier run stopped.")]
Accelerator = Annotated[str, typer.Option("--accelerator", help="auto, cpu, cuda or mps.")]
Devices = Annotated[int, typer.Option("--devices", help="Processes, one to a device.")]
Precision = Annotated[str, typer.Option("--precision", help="auto, 32-true or bf16-mixed.")]
CheckpointSeconds = Annotated[float, typer.Option(help="Between checkpoints, at most.")]
TensorBoard = Annotated[bool, typer.Option("--tensorboard", help="Also log to TensorBoard, in the model's folder.")]
DatasetOverride = Annotated[Path | None, typer.Option("--dataset", help="The model's dataset, if it has moved.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Log lines instead of a progress bar.")]


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        typer.echo(mobatlas.__version__)
        raise typer.Exit


@app.command()
def simulate(
    out: Out,
    users: Annotated[int | None, typer.Option(help="People.")] = None,
    pois: Annotated[int | None, typer.Option(help="Places.")] = None,
    districts: Annotated[int | None, typer.Option(help="Districts of the city.")] = None,
    days: Annotated[int | None, typer.Option(help="Days of visits.")] = None,
    divergence: Annotated[
        float | None, typer.Option(help="How strongly groups differ: mean pairwise JSD (bits) of their POI visits.")
    ] = None,
    segregation: Annotated[float | None, typer.Option(help="How much the districts' compositions differ.")] = None,
    seed: Annotated[int | None, typer.Option(help="Same seed, same city.")] = None,
    preset: Preset = None,
    config: Config = None,
    assignments: Assignments = None,
    overwrite: Overwrite = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Simulate a city of people with known groups: visits, people and pois."""
    run = load_run(config, preset)
    options = {
        "users": users,
        "pois": pois,
        "districts": districts,
        "days": days,
        "divergence": divergence,
        "segregation": segregation,
    }
    given = {key: value for key, value in options.items() if value is not None}
    values = merge(run.simulate.model_dump(), parse_assignments(assignments or []), given)
    city = build(CityConfig, values, "simulate")
    with track("simulating", city.users, quiet) as tracker:
        facts = write_city_folder(out, city, run.seed if seed is None else seed, overwrite=overwrite, tracker=tracker)
    _show(facts, json, city_table(facts, out))


@app.command("prepare")
def prepare_command(
    source: Annotated[Path, typer.Argument(help="The raw data: a file or a folder, as its format has it.")],
    out: Out,
    format: Annotated[  # noqa: A002
        str, typer.Option("--format", help="plain, embee, veraset, foursquare, yjmob100k or geolife.")
    ] = "plain",
    engine: Annotated[str, typer.Option("--engine", help="duckdb, or spark.")] = "duckdb",
    config: Config = None,
    preset: Preset = None,
    assignments: Assignments = None,
    overwrite: Overwrite = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Turn raw visits into trajectories: a dataset folder."""
    values = load_values(config, preset).get("prepare", {})
    with track("preparing", STEPS, quiet) as tracker:
        summary = prepare(
            source,
            out,
            format=format,
            values=merge(values, parse_assignments(assignments or [])),
            engine=engine,
            overwrite=overwrite,
            tracker=tracker,
        )
    _show(summary.as_dict(), json, summary_table(summary.as_dict(), out))


@app.command()
def demo(
    out: Annotated[Path, typer.Option("--out", help="The folder of the demo.")] = Path("runs/demo"),
    seed: Annotated[int, typer.Option(help="Same seed, same demo.")] = 0,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Begin anew instead of going on where it stopped.")
    ] = False,
    quiet: Quiet = False,
) -> None:
    """A simulated city, a generator, groups for it from regions and, to compare, from labels, and how good all are."""
    for table in run_demo(out, seed, quiet, overwrite=overwrite):
        Console().print(table)


@app.command()
def regions(
    dataset: Annotated[Path, typer.Argument(help="A dataset folder.")],
    out: Out,
    partition: Annotated[
        str | None,
        typer.Option(help="demogroups, fullrank, rankdef, messy, hot16, dirichlet:G:alpha, or a table of P."),
    ] = None,
    by: Annotated[str | None, typer.Option(help="A region column of people.")] = None,
    composition: Annotated[Path | None, typer.Option(help="A census table: region, group, count or share.")] = None,
    aggregates: Annotated[Path | None, typer.Option(help="A published table: region, feature, value, n.")] = None,
    feature: Annotated[
        list[str] | None,
        typer.Option("--feature", help="poi, category, transitions, distance or hour; may be repeated."),
    ] = None,
    mask: Annotated[list[str] | None, typer.Option("--mask", help="HOME, WORK or OTHER, to leave out.")] = None,
    shuffle_regions: Annotated[bool, typer.Option("--shuffle-regions", help="The negative control.")] = False,
    same_people: Annotated[
        bool, typer.Option("--same-people", help="Composition from the people of the aggregates: gives labels away.")
    ] = False,
    split_ages: Annotated[
        bool,
        typer.Option("--split-ages", help="Spread a census age range that straddles two groups evenly over its years."),
    ] = False,
    seed: Annotated[int, typer.Option(help="Of assignment, halves and shuffling.")] = 0,
    overwrite: Overwrite = False,
    json: Json = False,
) -> None:
    """Composition P and aggregates V: a controlled partition, real regions, or published tables."""
    made = build_regions(
        dataset,
        out,
        partition=partition,
        by=by,
        composition=composition,
        aggregates=aggregates,
        features=feature,
        mask=mask or (),
        shuffle_regions=shuffle_regions,
        same_people=same_people,
        straddle="uniform" if split_ages else "refuse",
        seed=seed,
        overwrite=overwrite,
    )
    found = run_diagnosis(
        made.composition, aggregates=made.aggregates, randomised=made.randomised, population=made.population
    )
    _show(made.details | {"diagnosis": found.as_dict()}, json, regions_table(made, found, out))


@app.command()
def diagnose(
    folder: Annotated[Path | None, typer.Argument(metavar="REGIONS", help="A regions folder.")] = None,
    composition: Annotated[Path | None, typer.Option(help="A bare census table, before any dataset exists.")] = None,
    n: Annotated[float | None, typer.Option("--n", help="People per region, with --composition.")] = None,
    split_ages: Annotated[
        bool, typer.Option("--split-ages", help="Spread age ranges that straddle two groups.")
    ] = False,
    min_region: Annotated[float, typer.Option(help="People that a region should have at least.")] = 50.0,
    figure: Annotated[Path | None, typer.Option(help="Also draw it, as a PNG file.")] = None,
    json: Json = False,
) -> None:
    """Can these regions tell the groups apart, and how well?"""
    if (folder is None) == (composition is None):
        raise MobatlasError("diagnose: give either a regions folder or --composition FILE")
    if folder is not None:
        if n is not None:
            raise MobatlasError("--n goes with --composition; a regions folder knows its people")
        made = load_regions(folder)
        known = made.composition
        found = run_diagnosis(
            known,
            aggregates=made.aggregates,
            min_region=min_region,
            randomised=made.randomised,
            population=made.population,
        )
    else:
        assert composition is not None
        known = read_composition(composition, n=n, straddle="uniform" if split_ages else "refuse")
        found = run_diagnosis(known, n, min_region=min_region)
    if figure is not None:
        diagnosis_figure(found, known, figure)
    _show(found.as_dict(), json, diagnosis_table(found))


@app.command()
def train(
    dataset: Annotated[Path, typer.Argument(help="A dataset folder.")],
    out: Out,
    generator: Annotated[str | None, typer.Option("--generator", help="latent-diffusion.")] = None,
    preset: Preset = None,
    config: Config = None,
    assignments: Assignments = None,
    seed: Annotated[int | None, typer.Option(help="Same seed, same machine: same weights.")] = None,
    resume: Resume = False,
    accelerator: Accelerator = "auto",
    devices: Devices = 1,
    precision: Precision = "auto",
    checkpoint_seconds: CheckpointSeconds = 30.0,
    tensorboard: TensorBoard = False,
    overwrite: Overwrite = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Phase 1: fit a generator of trajectories without demographics."""
    from mobatlas.training import Hardware  # torch takes seconds to import, and other commands do without it
    from mobatlas.training import train as run_training

    run = load_run(config, preset)
    report = run_training(
        dataset,
        out,
        generator=generator or run.train.generator,
        preset=preset or run.preset,
        values=merge(run.train.options, parse_assignments(assignments or [])),
        seed=run.seed if seed is None else seed,
        resume=resume,
        overwrite=overwrite,
        hardware=Hardware(accelerator, devices, precision, checkpoint_seconds),
        tensorboard=tensorboard,
        quiet=quiet,
    )
    _show(report, json, training_table(report, out))


@app.command()
def supervise(
    model: Annotated[Path, typer.Argument(help="A model folder of phase 1; finetune also goes on from a tilted one.")],
    out: Out,
    regions: Annotated[
        Path | None, typer.Argument(metavar="REGIONS", help="A regions folder; all but strong learn from it.")
    ] = None,
    strategy: Annotated[
        str,
        typer.Option(
            "--strategy",
            help="auto, tilt (weigh training people, teach, calibrate), resample (no training), finetune (the paper's), or "
            "strong (labels, the upper bound).",
        ),
    ] = "auto",
    divergence: Annotated[
        str | None, typer.Option("--divergence", help="finetune: js, tv, kl or hellinger; js by default.")
    ] = None,
    membership: Annotated[
        bool, typer.Option("--membership", help="tilt: weights begin from the composition of each person's region.")
    ] = False,
    from_scratch: Annotated[
        bool, typer.Option("--from-scratch", help="strong, tilt: train the conditional part anew, not on from phase 1.")
    ] = False,
    preset: Annotated[str | None, typer.Option("--preset", help="finetune: small or paper.")] = None,
    dataset: DatasetOverride = None,
    assignments: Assignments = None,
    seed: Annotated[int, typer.Option(help="Same seed, same machine: same weights.")] = 0,
    resume: Resume = False,
    accelerator: Accelerator = "auto",
    devices: Devices = 1,
    precision: Precision = "auto",
    checkpoint_seconds: CheckpointSeconds = 30.0,
    tensorboard: TensorBoard = False,
    overwrite: Overwrite = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Phase 2: give a model groups, from what regions tell."""
    from mobatlas.training import Hardware
    from mobatlas.training import supervise as run_supervision

    report = run_supervision(
        model,
        out,
        regions,
        strategy=strategy,
        divergence=divergence,
        membership=membership,
        from_scratch=from_scratch,
        preset=preset,
        values=parse_assignments(assignments or []),
        dataset=dataset,
        seed=seed,
        resume=resume,
        overwrite=overwrite,
        hardware=Hardware(accelerator, devices, precision, checkpoint_seconds),
        tensorboard=tensorboard,
        quiet=quiet,
    )
    _show(report, json, supervised_table(report, out))


@app.command()
def generate(
    model: Annotated[Path, typer.Argument(help="A model folder.")],
    out: Annotated[Path, typer.Option("--out", help="The Parquet file to write; it appears whole or not at all.")],
    n: Annotated[
        int | None, typer.Option("--n", help="Trajectories; with --anchors, as many as its rows if left out.")
    ] = None,
    group: Annotated[str | None, typer.Option(help='A group, e.g. "30-40, F".')] = None,
    region: Annotated[
        str | None, typer.Option(help="Groups and anchors as the people of this region have them.")
    ] = None,
    regions: Annotated[Path | None, typer.Option(help="The regions folder that knows --region.")] = None,
    anchors: Annotated[
        Path | None, typer.Option(help="A table of home_lat, home_lon, work_lat, work_lon, perhaps group.")
    ] = None,
    lengths: Annotated[str, typer.Option(help="model, or empirical: from all training trajectories.")] = "model",
    coarsen: Annotated[
        float | None, typer.Option(metavar="KM", help="Displace anchors at random within this radius.")
    ] = None,
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="Choose samples so that groups have the means that regions tell.")
    ] = False,
    dataset: DatasetOverride = None,
    seed: Annotated[int, typer.Option(help="Same seed, same machine: same file.")] = 0,
    accelerator: Accelerator = "auto",
    overwrite: Overwrite = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Sample trajectories into a Parquet file."""
    from mobatlas.generation import generate as run_generation

    with track("generating", n or 1, quiet) as tracker:
        made = run_generation(
            model,
            out,
            n,
            group=group,
            region=region,
            regions=regions,
            anchors=anchors,
            dataset=dataset,
            lengths=lengths,
            coarsen=coarsen,
            calibrate=calibrate,
            seed=seed,
            accelerator=accelerator,
            overwrite=overwrite,
            tracker=tracker,
        )
    _show(made.as_dict(), json, generated_table(made.as_dict()))


@benchmark_app.command("recovery")
def recovery(
    out: Out,
    seeds: Annotated[int, typer.Option(help="Simulated cities.")] = 20,
    first_seed: Annotated[int, typer.Option(help="The first of them.")] = 0,
    overwrite: Overwrite = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """How near recovered group means come to the truth, and whether their error bars say so."""
    with track("recovering", seeds, quiet) as tracker:
        result = recovery_benchmark.run(out, seeds, first_seed, overwrite=overwrite, tracker=tracker)
    _show(result, json, rows_table(result["rows"], "recovery"))


@benchmark_app.command("phase1")
def phase1(
    out: Out,
    seeds: Annotated[int, typer.Option(help="Simulated cities, each with its own models.")] = 1,
    first_seed: Annotated[int, typer.Option(help="The first of them.")] = 0,
    from_scratch: Annotated[bool, typer.Option("--from-scratch", help="Also train strong anew.")] = False,
    assignments: Assignments = None,
    overwrite: Overwrite = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Is the generator as good as real training people, and does conditioning bite when labels are given?"""
    from mobatlas.benchmark import phase1 as phase1_benchmark

    result = phase1_benchmark.run(
        out,
        seeds,
        first_seed,
        values=parse_assignments(assignments or []),
        from_scratch=from_scratch,
        overwrite=overwrite,
        quiet=quiet,
    )
    _show(result, json, phase1_table(result))


@benchmark_app.command("phase2")
def phase2(
    out: Annotated[Path, typer.Option("--out", help="Folder to fill; one that was begun is gone on with.")],
    seeds: Annotated[int, typer.Option(help="Simulated cities, each with its own models.")] = 3,
    first_seed: Annotated[int, typer.Option(help="The first of them.")] = 0,
    partition: Annotated[list[str] | None, typer.Option(help="How groups are mixed; may be repeated.")] = None,
    assignments: Assignments = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """What each strategy of phase 2 closes of the way from the baseline to the sampling floor."""
    from mobatlas.benchmark import phase2 as phase2_benchmark

    values = parse_assignments(assignments or [])
    result = phase2_benchmark.run(out, seeds, first_seed, partitions=partition or (), values=values, quiet=quiet)
    _show(result, json, phase2_table(result))


@benchmark_app.command("reweight")
def reweight(
    data: Annotated[Path, typer.Option("--data", help="A labelled one-day survey in the canonical tables.")],
    out: Out,
    seeds: Annotated[int, typer.Option(help="Ways to deal or halve the people.")] = 3,
    overwrite: Overwrite = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Real training people weighed by recovered group means, against test people of the groups; no generator."""
    with track("reweighting", reweight_benchmark.STEPS, quiet) as tracker:
        result = reweight_benchmark.run(data, out, seeds, overwrite=overwrite, tracker=tracker)
    _show(result, json, rows_table(reweight_benchmark.gaps(result), "gap closed"))


@benchmark_app.command("speed")
def speed(
    out: Out,
    profile: Annotated[str, typer.Option("--profile", help="quick (1 million visits) or full (10 million).")] = "quick",
    seed: Annotated[int, typer.Option(help="Of the simulated city.")] = 0,
    overwrite: Overwrite = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """How fast, each as a ratio to a reference measured in the same run."""
    with track("measuring", speed_benchmark.STEPS, quiet) as tracker:
        result = speed_benchmark.run(out, profile, seed, overwrite=overwrite, tracker=tracker)
    _show(result, json, speed_table(result))


def _show(values: dict[str, Any], as_json: bool, table: Any) -> None:
    if os.environ.get("LOCAL_RANK", "0") != "0":  # the first process of several speaks for all
        return
    if as_json:
        typer.echo(jsonlib.dumps(values, indent=2, ensure_ascii=False, default=str))
    else:
        Console().print(table)


def main() -> None:
    """Run a command; errors become one sentence and an exit code."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    logging.getLogger("mobatlas").setLevel(logging.INFO)
    stopped = _watch_signals()
    try:
        app()
    except MobatlasError as error:
        # training that was stopped says so itself, because it knows how to go on
        told = getattr(error, "signal", stopped[0] if stopped else None)
        _fail(str(error), 2 if told is None else 128 + told)
    except BaseException as error:  # the last door: a person gets a sentence, a developer asks for the rest
        if stopped:  # engines turn an interrupt into errors of their own
            _fail("stopped; nothing was left half-written", 128 + stopped[0])
        if isinstance(error, SystemExit):
            raise
        if os.environ.get("MOBATLAS_DEBUG"):
            traceback.print_exc()
        if isinstance(error, OSError):
            _fail(f"{error.filename or 'the disk'}: {error.strerror or error}", 1)
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else "no further word"
        _fail(f"unexpected {type(error).__name__}: {first_line} (set MOBATLAS_DEBUG=1 for the traceback)", 1)


def _watch_signals() -> list[int]:
    """Ctrl-C and a polite kill stop the work where it is and let it tidy up; which of them came is in the list."""
    received: list[int] = []

    def stop(number: int, _: Any) -> None:
        received.append(number)
        raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    return received


def _fail(sentence: str, code: int) -> None:
    typer.echo(f"mobatlas: {sentence}", err=True)
    raise SystemExit(code)
