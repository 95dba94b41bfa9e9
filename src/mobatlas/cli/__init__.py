"""The command line: thin, every command calls one public function."""

from __future__ import annotations

import errno
import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mobatlas.errors import MobatlasError, out_of_memory
from mobatlas.training.resources import keep_memory

if TYPE_CHECKING:
    from mobatlas.cli.commands import app

__all__ = ["app", "main"]

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def __getattr__(name: str) -> Any:
    if name != "app":
        raise AttributeError(f"module 'mobatlas.cli' has no attribute '{name}'")
    from mobatlas.cli.commands import app

    return app


def main() -> None:
    """Run a command of `mobatlas`."""
    run_application(_load_app, "mobatlas")


def _load_app() -> Any:
    from mobatlas.cli.commands import app

    return app


def run_application(load: Callable[[], Any], name: str) -> None:
    """Run a command line application; errors become one sentence and an exit code."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    logging.getLogger("mobatlas").setLevel(logging.INFO)
    stopped = _watch_signals()
    try:
        keep_memory()
        app = load()  # takes seconds, in which somebody may press Ctrl-C
        code = app(
            standalone_mode=False, prog_name=name
        )  # what is wrong with options comes here too, instead of into a box
        sys.exit(code if isinstance(code, int) else 0)
    except MobatlasError as error:
        # training that was stopped says so itself, because it knows how to go on
        told = getattr(error, "signal", stopped[0] if stopped else None)
        _fail(name, str(error), 2 if told is None else 128 + told)
    except (
        BaseException
    ) as error:  # the last door: a person gets a sentence, a developer asks for the rest
        if stopped:  # engines turn an interrupt into errors of their own
            _fail(name, "stopped; nothing was left half-written", 128 + stopped[0])
        if isinstance(error, SystemExit):
            raise
        if hasattr(error, "format_message"):  # of the command line: an option or an argument
            _refuse_usage(name, error)
        if os.environ.get("MOBATLAS_DEBUG"):
            traceback.print_exc()
        _fail(name, _sentence(error), 1)


def _refuse_usage(name: str, error: Any) -> None:
    """What is wrong with a command line, and where to read how it is meant."""
    said, asked = error.format_message().rstrip("."), getattr(error.ctx, "command_path", name)
    if not said:  # no argument at all: the help was printed
        raise SystemExit(2)
    _fail(name, f"{said[:1].lower()}{said[1:]}; see {asked} --help", 2)


def _sentence(error: BaseException) -> str:
    """What a person can do something about; the rest is ours to mend."""
    said = str(error).strip()
    if out_of_memory(error):
        return "there is not enough memory; end other programs or ask for less, nothing was left half-written"
    if any(os.strerror(number) in said for number in FULL):
        return "the disk is full; make room and run it again, nothing was left half-written"
    if isinstance(error, OSError):
        return f"{error.filename or 'the disk'}: {error.strerror or error}"
    first_line = said.splitlines()[0] if said else "no further word"
    return (
        f"unexpected {type(error).__name__}: {first_line} (set MOBATLAS_DEBUG=1 for the traceback)"
    )


class _Stopped(KeyboardInterrupt):
    """A kind of its own: Python ends by the signal instead of the exit code if a plain one ever crossed an exec()."""


def _watch_signals() -> list[int]:
    """Ctrl-C and a polite kill stop the work where it is and let it tidy up; which of them came is in the list."""
    received: list[int] = []

    def stop(number: int, _: Any) -> None:
        received.append(number)
        raise _Stopped

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    return received


def _fail(name: str, sentence: str, code: int) -> None:
    print(f"{name}: {sentence}", file=sys.stderr)  # noqa: T201
    raise SystemExit(code)
