"""The application with all commands."""

from typing import Annotated

import typer

import mobatlas
from mobatlas.cli import data, models, runs

app = typer.Typer(
    name="mobatlas",
    help="Synthetic human mobility by demographic group, learnt from aggregates.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.add_typer(runs.app)
app.add_typer(data.app)
app.add_typer(models.app)


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        typer.echo(mobatlas.__version__)
        raise typer.Exit
