"""Errors for users: one sentence that says what is wrong, where, and what to do."""

import difflib
import errno
import os
from collections.abc import Iterable

# Errors of Python, DuckDB and torch on a GPU; then messages of torch on a CPU, Arrow, and the
# loader of shared libraries.
MEMORY_ERRORS = ("MemoryError", "OutOfMemoryException", "OutOfMemoryError")
MEMORY_MESSAGES = (
    "not enough memory",
    "can't allocate memory",
    "std::bad_alloc",
    "can't start new thread",
    "Failed to launch worker thread",
    "failed to map segment from shared object",
    os.strerror(errno.ENOMEM),
)


class MobatlasError(Exception):
    """Bad input; the command line prints the message and exits with code 2.

    Examples
    --------
    >>> from mobatlas import Groups, MobatlasError
    >>> try:
    ...     Groups.of({})
    ... except MobatlasError as error:
    ...     print(error)
    groups need at least one attribute
    """

    exit_code = 2


class MachineError(MobatlasError):
    """The machine failed, not the input: the disk is full, say."""

    exit_code = 1


def suggestion(word: str, known: Iterable[str]) -> str:
    """`"; did you mean 'x'?"` with a similar known word; empty if none is similar."""
    by_lower = {name.lower(): name for name in known}
    similar = difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=0.5)
    return f"; did you mean '{by_lower[similar[0]]}'?" if similar else ""


def clear_suggestion(word: str, known: Iterable[str]) -> str:
    """As `suggestion`, but empty unless one known word is clearly more similar than all others."""
    ratio = {
        name: difflib.SequenceMatcher(None, name.lower(), word.lower()).ratio() for name in known
    }
    best, second, *_ = [*sorted(ratio.values(), reverse=True), 0.0, 0.0]
    return suggestion(word, [max(ratio, key=ratio.__getitem__)]) if best > second + 0.05 else ""


def first_line(error: BaseException) -> str:
    """The first line of an error's message; its type if it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def out_of_memory(error: BaseException) -> bool:
    """Whether an error is caused by a lack of memory."""
    message = str(error)
    names = {kind.__name__ for kind in type(error).__mro__}
    return (
        not names.isdisjoint(MEMORY_ERRORS)
        or any(text in message for text in MEMORY_MESSAGES)
        # oneDNN. A missing kernel fails earlier, with a message about the primitive's descriptor.
        or (isinstance(error, RuntimeError) and message == "could not create a primitive")
        # A Python function that returned NULL: the interpreter had no memory to raise an error.
        or (isinstance(error, SystemError) and message.startswith("<function "))
    )
