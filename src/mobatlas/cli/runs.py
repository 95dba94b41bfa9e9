"""Commands for the whole way: demo, init, run, report."""

from __future__ import annotations

from collections.abc import Mapping
from json import loads
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, Group
from rich.text import Text

from mobatlas.cli.options import Json, Overwrite, Quiet, show
from mobatlas.pipeline.demo import run_demo, run_tables
from mobatlas.pipeline.init import write_configuration

app = typer.Typer()
Anew = Annotated[
    bool, typer.Option("--overwrite", help="Begin anew instead of going on where it stopped.")
]


@app.command()
def demo(
    out: Annotated[Path, typer.Option("--out", help="The folder of the demo.")] = Path("runs/demo"),
    seed: Annotated[int, typer.Option(help="Same seed, same demo.")] = 0,
    overwrite: Anew = False,
    quiet: Quiet = False,
) -> None:
    """A simulated city, groups learnt from good regions and from bad ones, and a report of how near they come."""
    for table in run_demo(out, seed, quiet, overwrite=overwrite):
        Console().print(table)


@app.command()
def init(
    out: Annotated[Path, typer.Option("--out", help="The configuration to write, a YAML file.")],
    visits: Annotated[Path | None, typer.Option(help="Your visits: a file or a folder.")] = None,
    composition: Annotated[
        Path | None, typer.Option(help="Who lives in which region: a table.")
    ] = None,
    aggregates: Annotated[
        Path | None, typer.Option(help="What people of each region do on average: a table.")
    ] = None,
    by: Annotated[
        str | None,
        typer.Option(
            help="The column of people that names their region; visits are counted by it."
        ),
    ] = None,
    overwrite: Overwrite = False,
) -> None:
    """Write a commented configuration from your files, for `mobatlas run`."""
    for line in write_configuration(out, visits, composition, aggregates, by, overwrite=overwrite):
        typer.echo(line)


@app.command()
def run(
    config: Annotated[Path, typer.Argument(help="A configuration, as `mobatlas init` writes it.")],
    out: Annotated[
        Path | None, typer.Option("--out", help="The folder of the run; runs/NAME by default.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on where it stopped; it always does.")
    ] = False,
    overwrite: Anew = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """The whole way from your tables to report.html; what was finished before is not made again."""
    from mobatlas.pipeline.run import run as run_all  # torch takes seconds to import

    made = run_all(config, out or Path("runs") / config.stem, overwrite=overwrite, quiet=quiet)
    lines, facts = [f"report: {made.report}"], made.facts
    if verdicts := _verdicts(made.folder, made.facts):
        lines.append(
            "privacy audit: " + ", ".join(f"{name} {verdict}" for name, verdict in verdicts.items())
        )
        facts = facts | {"audit": verdicts}
    show(facts, json, Group(*run_tables(made.folder, made.facts), *map(Text, lines)))


def _verdicts(folder: Path, facts: Mapping[str, Any]) -> dict[str, str]:
    """What the audit of each way to know regions says, where one was asked for."""
    audits = {
        name: folder / each["audit"] for name, each in facts["regions"].items() if "audit" in each
    }
    return {
        name: str(loads(path.read_text(encoding="utf-8"))["verdict"])
        for name, path in audits.items()
    }


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")],
    out: Annotated[Path, typer.Option("--out", help="The HTML file to write.")],
    overwrite: Overwrite = False,
) -> None:
    """One HTML file about a run."""
    from mobatlas.report.html import write_report

    typer.echo(f"{write_report(folder, out, overwrite=overwrite)}: written")
