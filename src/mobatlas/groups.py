"""Groups: the product of demographic attributes (the D groups of the paper)."""

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np
import numpy.typing as npt

from mobatlas.errors import MobatlasError, plain_text, suggestion

SEPARATOR = ", "
MAX_LEVELS = 64
# A column with just these levels has them in this order. Other levels are ordered by their first
# number, then by name.
FAMILIAR_ORDERS = (("M", "F"), ("male", "female"), ("Male", "Female"))

GENDERS = {
    "M": (
        "m",
        "male",
        "males",
        "man",
        "men",
        "boys",
        "hombres",
        "hommes",
        "m\u00e4nnlich",
        "m\u00e4nner",
        "maschi",
    ),
    "F": (
        "f",
        "w",
        "female",
        "females",
        "woman",
        "women",
        "girls",
        "mujeres",
        "frauen",
        "femmine",
        "femmes",
        "weiblich",
    ),
}


def evenly_spaced(name: str) -> str:
    """The name of a group with one space after each comma."""
    return SEPARATOR.join(level.strip() for level in name.split(SEPARATOR.strip()))


@dataclass(frozen=True)
class Groups:
    """Demographic attributes with their levels; a group is one level of each attribute.

    Parameters
    ----------
    attributes
        Pairs of an attribute name and its levels. The last attribute varies fastest.

    Examples
    --------
    >>> groups = Groups.of({"age": ("<30", "30+"), "gender": ("M", "F")})
    >>> groups.names
    ('<30, M', '<30, F', '30+, M', '30+, F')
    >>> groups.index("30+, M")
    2
    """

    attributes: tuple[tuple[str, tuple[str, ...]], ...]

    def __post_init__(self) -> None:
        if not self.attributes:
            raise MobatlasError("groups need at least one attribute")
        for name, levels in self.attributes:
            if not levels or len(set(levels)) != len(levels):
                raise MobatlasError(
                    f"attribute '{name}': its levels are {list(levels)}; give at least one, and "
                    "each only once"
                )
            if len(levels) > MAX_LEVELS:
                raise MobatlasError(
                    f"attribute '{name}' has {len(levels)} levels; bin it to at most {MAX_LEVELS}"
                )
            for level in levels:
                if SEPARATOR.strip() in level or not level.strip():
                    raise MobatlasError(
                        f"attribute '{name}': level '{level}' may not be empty or contain a "
                        "comma; rename it"
                    )

    @classmethod
    def of(cls, attributes: Mapping[str, Sequence[str]]) -> Self:
        """Create groups from a mapping of attribute names to levels."""
        return cls(tuple((name, tuple(levels)) for name, levels in attributes.items()))

    @property
    def attribute_names(self) -> tuple[str, ...]:
        """The names of the attributes."""
        return tuple(name for name, _ in self.attributes)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names of the groups, such as "30-40, F"."""
        return tuple(map(SEPARATOR.join, itertools.product(*self.as_dict().values())))

    @cached_property
    def level_codes(self) -> npt.NDArray[np.int64]:
        """(groups, attributes) the level of each attribute in each group."""
        sizes = [len(levels) for _, levels in self.attributes]
        return np.stack(np.unravel_index(np.arange(len(self)), sizes), axis=1).astype(np.int64)

    def __len__(self) -> int:
        return len(self.names)

    def index(self, name: str) -> int:
        """The number of a group; spaces around commas do not matter."""
        normalized = evenly_spaced(name)
        if normalized not in self.names:
            hint = same_group(normalized, self.names)
            raise MobatlasError(
                f"group '{name}' does not exist{hint} (known: {'; '.join(self.names)})"
            )
        return self.names.index(normalized)

    def codes(self, labels: Mapping[str, Sequence[str | None]]) -> npt.NDArray[np.int64]:
        """(people,) the group of each person; -1 if a label is unknown."""
        codes = np.zeros(1, np.int64)
        for name, levels in self.attributes:
            if name not in labels:
                raise MobatlasError(f"labels: column '{name}' is missing{suggestion(name, labels)}")
            position: dict[str | None, int] = {level: k for k, level in enumerate(levels)}
            level = np.array([position.get(label, -1) for label in labels[name]], np.int64)
            codes = np.where((codes >= 0) & (level >= 0), codes * len(levels) + level, -1)
        return codes

    def as_dict(self) -> dict[str, list[str]]:
        """The levels by attribute name; `of` is the inverse."""
        return {name: list(levels) for name, levels in self.attributes}


DEFAULT_GROUPS = Groups.of({"age": ("<30", "30-40", "40-50", ">50"), "gender": ("M", "F")})


def order_levels(levels: Iterable[str]) -> tuple[str, ...]:
    """Sort levels as a reader expects: "<30", "30-40", ">50"; M, F; others by name."""
    distinct = set(levels)
    familiar = (order for order in FAMILIAR_ORDERS if distinct == set(order))
    return next(familiar, tuple(sorted(distinct, key=_level_key)))


def _level_key(level: str) -> tuple[bool, float, int, str]:
    number = re.search(r"\d+(?:\.\d+)?", level)
    sign = {"<": -1, ">": 1}.get(level.lstrip()[:1], 0)
    return (number is None, float(number.group()) if number else 0.0, sign, level)


def gender(level: str) -> str | None:
    """M or F for a word of that meaning; None for other words."""
    return next((name for name, words in GENDERS.items() if level.strip().lower() in words), None)


def plain_level(level: str) -> str:
    """A level in a form that ignores case, spaces and the word chosen for a gender."""
    return gender(level) or plain_text(level)


def same_group(name: str, known: Iterable[str]) -> str:
    """`"; did you mean 'x'?"` with the group or level of the same meaning; empty without one.

    Only the order, the spelling and look-alike characters may differ, never a level.
    """
    same = [each for each in known if _plain_group(each) == _plain_group(name)]
    return f"; did you mean '{same[0]}'?" if len(same) == 1 else ""


def _plain_group(name: str) -> list[str]:
    """The words of a group in any order, as in `30-40, F`, `F 30-40` and `30-4O, women`."""
    text = re.sub(r"(?<=[<>-])\s+|\s+(?=[-+])", "", name.replace(",", " "))
    looks = str.maketrans("oOl", "001")  # letters that look like digits
    words = [word.translate(looks) if re.search(r"\d", word) else word for word in text.split()]
    return sorted(map(plain_level, words))
