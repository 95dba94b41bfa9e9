"""The command line: thin, every command calls one public function."""

from __future__ import annotations

import logging
import os
import signal
import sys
import traceback
from typing import Annotated, Any

import typer

import mobatlas
from mobatlas.cli import benchmarks, data, models, runs
from mobatlas.errors import MobatlasError

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
app.add_typer(benchmarks.app, name="benchmark")


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        typer.echo(mobatlas.__version__)
        raise typer.Exit


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
