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
from mobatlas.benchmark import speed as speed_benchmark
from mobatlas.config import CityConfig, build, load_run, load_values, merge, parse_assignments
from mobatlas.data.city import write_city_folder
from mobatlas.data.prepare import STEPS, prepare
from mobatlas.demo import run_demo
from mobatlas.errors import MobatlasError
from mobatlas.progress import track
from mobatlas.report.text import city_table, speed_table, summary_table

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
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace a folder that mobatlas wrote.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
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
    quiet: Quiet = False,
) -> None:
    """A simulated city, prepared: the whole way as far as it goes today."""
    for table in run_demo(out, seed, quiet):
        Console().print(table)


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
        _fail(str(error), 2)
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
