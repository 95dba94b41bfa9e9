"""Errors for people: one sentence that names the file, column or option, and what to do."""

from __future__ import annotations

import difflib
import errno
import os
from collections.abc import Iterable

# As Python and its relatives, DuckDB, torch on a GPU and torch on a CPU say it; the words are also Arrow's, and those of the
# loader of shared libraries.
NO_MEMORY = ("MemoryError", "OutOfMemoryException", "OutOfMemoryError")
NO_MEMORY_WORDS = (
    "not enough memory",
    "can't allocate memory",
    "std::bad_alloc",
    "can't start new thread",
    "Failed to launch worker thread",
    "failed to map segment from shared object",
    os.strerror(errno.ENOMEM),
)


class MobatlasError(Exception):
    """Bad input; the command line prints the sentence and exits with code 2."""


def suggestion(word: str, known: Iterable[str]) -> str:
    """`"; did you mean 'x'?"` for the nearest known word, or nothing when none is near."""
    by_lower = {name.lower(): name for name in known}
    near = difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=0.5)
    return f"; did you mean '{by_lower[near[0]]}'?" if near else ""


def out_of_memory(error: BaseException) -> bool:
    """Whether it says that memory does not suffice: as no other error may be taken for it, nor it for another."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    if isinstance(error, RuntimeError) and str(error) == "could not create a primitive":
        return True  # oneDNN: what a machine has no kernel for fails earlier, at the primitive's descriptor
    if isinstance(error, SystemError) and str(error).startswith("<function "):
        return True  # a function in Python that returned nothing at all: the interpreter had no memory left to say so
    return not kinds.isdisjoint(NO_MEMORY) or any(words in str(error) for words in NO_MEMORY_WORDS)
