"""The command line. Each command calls one public function."""

import errno
import logging
import os
import signal
import sys
import traceback
from importlib import import_module
from typing import Any

from mobatlas.errors import MobatlasError, out_of_memory
from mobatlas.training.resources import keep_memory

DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def main() -> None:
    """Run a command of `mobatlas`."""
    run_application("mobatlas.cli.commands", "mobatlas")


def run_application(module: str, name: str) -> None:
    """Run the `app` of a module; an error becomes one sentence and an exit code."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    logging.getLogger("mobatlas").setLevel(logging.INFO)
    signals = _catch_signals()
    try:
        keep_memory()
        app = import_module(module).app  # takes seconds, so Ctrl-C must already be caught
        code = app(standalone_mode=False, prog_name=name)  # usage errors are raised, not printed
        sys.exit(code if isinstance(code, int) else 0)
    except MobatlasError as error:
        # Training that was stopped has its own message, which says how to resume.
        number = getattr(error, "signal", signals[0] if signals else None)
        _fail(name, str(error), error.exit_code if number is None else 128 + number)
    except BaseException as error:
        if signals:  # libraries turn an interrupt into other errors
            _fail(name, "stopped; no incomplete file was left", 128 + signals[0])
        if isinstance(error, SystemExit):
            raise
        if hasattr(error, "format_message"):  # an error of typer: an option or an argument
            _fail_usage(name, error)
        if os.environ.get("MOBATLAS_DEBUG"):
            traceback.print_exc()
        _fail(name, _describe(error), 1)


def _fail_usage(name: str, error: Any) -> None:
    """Say what is wrong with the command line and which help to read."""
    message = error.format_message().rstrip(".")
    if not message:  # no argument at all: the help was printed
        raise SystemExit(2)
    command = getattr(error.ctx, "command_path", name)
    _fail(name, f"{message[:1].lower()}{message[1:]} (see {command} --help)", 2)


def _describe(error: BaseException) -> str:
    """One sentence about an unexpected error."""
    message = str(error).strip()
    if out_of_memory(error):
        return (
            "there is not enough memory; close other programs or ask for less "
            "(no incomplete file was left)"
        )
    if any(os.strerror(number) in message for number in DISK_FULL):
        return "the disk is full; make room and run the command again (no incomplete file was left)"
    if isinstance(error, OSError):
        return f"{error.filename or 'the disk'}: {error.strerror or error}"
    first_line = message.splitlines()[0] if message else "no message"
    return (
        f"unexpected {type(error).__name__}: {first_line} (set MOBATLAS_DEBUG=1 for the traceback)"
    )


class _Interrupted(KeyboardInterrupt):
    """Ctrl-C or SIGTERM.

    Python exits by the signal, not by our exit code, after a plain KeyboardInterrupt in `exec`.
    """


def _catch_signals() -> list[int]:
    """Raise an exception at Ctrl-C or SIGTERM, so that clean-up runs; return the signals so far."""
    received: list[int] = []

    def interrupt(number: int, _: Any) -> None:
        received.append(number)
        raise _Interrupted

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, interrupt)
    return received


def _fail(name: str, sentence: str, code: int) -> None:
    print(f"{name}: {sentence}", file=sys.stderr)  # noqa: T201
    raise SystemExit(code)
