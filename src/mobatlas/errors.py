"""Errors and warnings for users: one sentence that says what is wrong, where, and what to do."""

import difflib
import errno
import logging
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence

log = logging.getLogger("mobatlas")
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

# What other sources call a column; no synonym may fit two columns.
SYNONYMS = {
    "user_id": ("device_id", "caid", "uid", "userid", "user", "person_id", "hashed_device_id"),
    "poi_id": ("placekey", "safegraph_place_id", "venue_id", "place_id"),
    "lat": ("latitude",),
    "lon": ("longitude", "lng", "long"),
    "arrival": ("timestamp", "local_timestamp", "arrival_time", "start_time", "started_at"),
    "departure": ("departure_time", "end_time", "finished_at"),
    "category": ("top_category", "venue_category"),
    "home_lat": ("home_latitude",),
    "home_lon": ("home_longitude", "home_lng"),
    "work_lat": ("work_latitude",),
    "work_lon": ("work_longitude", "work_lng"),
    "region": ("geo", "geography", "area_code", "region_id", "region_code"),
    "count": ("population", "persons", "people", "pop", "inhabitants", "obs_value"),
}


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


def refuse_faults(faults: Mapping[str, object]) -> None:
    """Raise the first sentence whose condition holds."""
    for sentence, applies in faults.items():
        if applies:
            raise MobatlasError(sentence)


def suggestion(word: str, known: Iterable[str]) -> str:
    """`"; did you mean 'x'?"` if exactly one known word is clearly meant; empty if unsure.

    A word is meant if it differs in case, spaces or separators only, or by one wrong letter. Digits
    and signs must be equal: "R12" is not "R1", and "<30" is not ">30".
    """
    known = list(dict.fromkeys(known))
    similar = [each for each in known if plain_text(each) == plain_text(word)]
    similar = similar or [each for each in known if _one_letter_apart(each.lower(), word.lower())]
    return f"; did you mean '{similar[0]}'?" if len(similar) == 1 else ""


def same_column(name: str, columns: Iterable[str]) -> str:
    """As `suggestion`, for a required column and those of a table: spellings and synonyms only."""
    accepted = {plain_text(name), *map(plain_text, SYNONYMS.get(name, ()))}
    similar = [each for each in columns if plain_text(each) in accepted]
    if len(similar) != 1:
        return ""
    return f"; did you mean '{similar[0]}'? Rename it (--rename {name}={similar[0]})"


def plain_text(text: str) -> str:
    """Lower case without spaces, underscores and commas, and with one form of hyphen."""
    return re.sub(r"[\s_,]+", "", re.sub("[\u2010-\u2015\u2212]", "-", text.casefold()))


def _one_letter_apart(known: str, word: str) -> bool:
    """Whether one letter is added, missing or wrong, or two letters are swapped."""
    edits = difflib.SequenceMatcher(None, known, word, autojunk=False).get_opcodes()
    wrong = sum(max(b - a, d - c) for kind, a, b, c, d in edits if kind != "equal")
    swapped = wrong == 2 and sorted(known) == sorted(word)
    signs, others = (re.sub("[^0-9<>+]", "", text) for text in (known, word))
    return (wrong == 1 or swapped) and min(len(known), len(word)) > 2 and signs == others


def refuse_unknown(what: str, name: str, known: Collection[str]) -> None:
    """Refuse a name that is not known and suggest a similar one; `what` is "--split tset"."""
    if name not in known:
        raise MobatlasError(
            f"{what} does not exist{suggestion(name, known)} (known: {', '.join(known)})"
        )


def listed(names: Sequence[str]) -> str:
    """The names as in a sentence: "a, b and c"."""
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


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
