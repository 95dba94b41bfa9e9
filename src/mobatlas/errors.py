"""Errors for people: one sentence that names the file, column or option, and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class MobatlasError(Exception):
    """Bad input; the command line prints the sentence and exits with code 2."""


def suggestion(word: str, known: Iterable[str]) -> str:
    """`"; did you mean 'x'?"` for the nearest known word, or nothing when none is near."""
    by_lower = {name.lower(): name for name in known}
    near = difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=0.5)
    return f"; did you mean '{by_lower[near[0]]}'?" if near else ""
