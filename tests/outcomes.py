"""Commands as a user types them, in this process: another one would import torch first."""

from __future__ import annotations

import io
import signal
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass

import bench.__main__
import mobatlas.cli


@dataclass(frozen=True)
class Outcome:
    """What a command came to."""

    code: int
    out: str
    err: str


def run(*arguments: object) -> Outcome:
    """Run a command of `mobatlas`, or after the word `bench` one of `python -m bench`."""
    program, *words = map(str, arguments)
    if program == "bench":
        return _run("python -m bench", bench.__main__.main, words)
    return _run("mobatlas", mobatlas.cli.main, [program, *words])


def _run(program: str, main: Callable[[], None], words: list[str]) -> Outcome:
    out, err, argv = io.StringIO(), io.StringIO(), sys.argv
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    sys.argv = [program, *words]
    try:
        with redirect_stdout(out), redirect_stderr(err):
            main()
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    finally:
        sys.argv = argv
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return Outcome(code, out.getvalue(), err.getvalue())


def refused(*arguments: object) -> str:
    """The one sentence with which a command is refused."""
    done = run(*arguments)
    assert done.code == 2, done.err
    said = [
        line
        for line in done.err.splitlines()
        if line.startswith(("mobatlas: ", "python -m bench: "))
    ]
    assert len(said) == 1 and done.out == "" and "Traceback" not in done.err
    return said[0]
