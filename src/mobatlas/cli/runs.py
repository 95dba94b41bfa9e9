"""Commands for a whole run: demo, init, run, report."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Group
from rich.text import Text

import mobatlas
from mobatlas.cli.options import (
    Assignments,
    GroupTables,
    HomePanel,
    Json,
    LabelledPath,
    Overwrite,
    Per,
    Quiet,
    Rename,
    SplitAges,
    parse_periods,
    print_result,
    show,
)
from mobatlas.config import RegionsConfig, load_run, parse_assignments, parse_renames

app = typer.Typer()
StartOver = Annotated[
    bool, typer.Option("--overwrite", help="Start over instead of resuming an interrupted run.")
]


@app.command()
def demo(
    out: Annotated[Path, typer.Option("--out", help="The folder of the demo.")] = Path("runs/demo"),
    seed: Annotated[int, typer.Option(help="The same seed gives the same demo.")] = 0,
    overwrite: StartOver = False,
    quiet: Quiet = False,
) -> None:
    """Simulate a city, train on it, and report how well its groups are recovered."""
    from mobatlas.pipeline.run import run_demo

    result = run_demo(out, seed, quiet, overwrite=overwrite)
    print_result(_printed(result.folder, result.report, result.facts))


@app.command()
def init(
    out: Annotated[Path, typer.Option("--out", help="The configuration file (YAML) to write.")],
    visits: Annotated[Path | None, typer.Option(help="Your visits: a file or a folder.")] = None,
    composition: Annotated[
        list[Path] | None,
        typer.Option(
            help="A table of the groups that live in each region. Repeat it for tables of ages, of "
            "genders and so on."
        ),
    ] = None,
    aggregates: Annotated[
        Path | None, typer.Option(help="A table of average mobility in each region.")
    ] = None,
    by: Annotated[
        str | None,
        typer.Option(
            help="The column of the people table that names a person's region. Aggregates are "
            "then counted from your visits."
        ),
    ] = None,
    group_table: GroupTables = None,
    labelled: LabelledPath = None,
    home_panel: HomePanel = None,
    split_ages: SplitAges = False,
    per: Per = None,
    rename: Rename = None,
    overwrite: Overwrite = False,
    json: Json = False,
) -> None:
    """Check your tables and write a commented configuration for `mobatlas run`."""
    from mobatlas.pipeline.init import write_configuration
    from mobatlas.report.console import check_table

    source = RegionsConfig(
        composition=composition[0]
        if composition and len(composition) == 1
        else composition or None,
        aggregates=aggregates,
        by=by,
        group_tables=group_table or None,
        labelled=labelled,
        home_panel=home_panel,
        straddle="uniform" if split_ages and composition else None,
        per=parse_periods(per, aggregates),
        rename=parse_renames(rename or ()),
    )
    facts = write_configuration(out, visits, source, overwrite=overwrite)
    show(
        facts,
        json,
        Group(check_table(facts), Text(f"wrote {out}; check it, then start: mobatlas run {out}")),
    )


@app.command()
def run(
    config: Annotated[Path, typer.Argument(help="A configuration, as `mobatlas init` writes it.")],
    out: Annotated[
        Path | None, typer.Option("--out", help="The folder of the run; runs/NAME by default.")
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Check the tables and estimate time, memory and disk; write nothing.",
        ),
    ] = False,
    assignments: Assignments = None,
    overwrite: StartOver = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Run all steps from your tables to report.html; finished steps are not repeated."""
    from mobatlas.report.console import check_table, costs_table

    values = parse_assignments(assignments or [])
    if dry_run:
        from mobatlas.pipeline.check import dry_run as estimate

        facts = estimate(load_run(config, values=values), config.parent)
        show(facts, json, Group(check_table(facts), costs_table(facts["costs"])))
        return
    result = mobatlas.run(
        config,
        out or Path("runs") / config.stem,
        overwrite=overwrite,
        quiet=quiet,
        values=values,
    )
    show(result.facts, json, _printed(result.folder, result.report, result.facts))


def _printed(folder: Path, report: Path, facts: dict[str, Any]) -> Group:
    """The tables of a run, the path of its report, and whether its samples are safe to share."""
    from mobatlas.report.console import answers, run_tables

    lines = [f"report: {report}", *answers(facts)]
    return Group(run_tables(folder, facts), *map(Text, lines))


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")],
    out: Annotated[Path, typer.Option("--out", help="The HTML file to write.")],
    overwrite: Overwrite = False,
) -> None:
    """Write the HTML report of a run."""
    from mobatlas.report.html import write_report

    print_result(f"wrote {write_report(folder, out, overwrite=overwrite)}")
