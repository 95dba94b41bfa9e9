"""Groups: demographic attributes with their levels, and the cells of their product, kept as factors."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from mobatlas.errors import MobatlasError, suggestion

SEPARATOR = ", "
MAX_LEVELS = 64
# Where a column holds just these levels they stand in this order; other levels are ordered by their first number, then by name.
FAMILIAR_ORDERS = (("M", "F"), ("male", "female"), ("Male", "Female"))


@dataclass(frozen=True)
class Groups:
    """Attributes x levels; group d is one level of each attribute, the last attribute varying fastest."""

    attributes: tuple[tuple[str, tuple[str, ...]], ...]

    def __post_init__(self) -> None:
        if not self.attributes:
            raise MobatlasError("groups need at least one attribute")
        for name, levels in self.attributes:
            if not levels or len(set(levels)) != len(levels):
                raise MobatlasError(
                    f"attribute '{name}': its levels are {list(levels)}; give each level once, at least one"
                )
            if len(levels) > MAX_LEVELS:
                raise MobatlasError(
                    f"attribute '{name}' has {len(levels)} levels; bin it to at most {MAX_LEVELS} first"
                )
            for level in levels:
                if SEPARATOR.strip() in level or not level.strip():
                    raise MobatlasError(
                        f"attribute '{name}': level '{level}' may not be empty or contain a comma; rename it"
                    )

    @classmethod
    def of(cls, attributes: Mapping[str, Sequence[str]]) -> Groups:
        """From a mapping of attribute names to levels."""
        return cls(tuple((name, tuple(levels)) for name, levels in attributes.items()))

    @property
    def attribute_names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.attributes)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """`"30-40, F"`: the levels in attribute order."""
        return tuple(
            SEPARATOR.join(cell)
            for cell in itertools.product(*(levels for _, levels in self.attributes))
        )

    @cached_property
    def level_codes(self) -> npt.NDArray[np.int64]:
        """The level of each attribute in each group."""
        cells = itertools.product(*(range(len(levels)) for _, levels in self.attributes))
        return np.array(list(cells), dtype=np.int64)  # (groups, attributes)

    def __len__(self) -> int:
        return len(self.names)

    def index(self, name: str) -> int:
        """The number of a group by its name; spaces around commas do not matter."""
        parts = [part.strip() for part in name.split(SEPARATOR.strip())]
        tidy = SEPARATOR.join(parts)
        if tidy not in self.names:
            same = [
                each for each in self.names if sorted(each.split(SEPARATOR)) == sorted(parts)
            ]  # in another order
            near = suggestion(tidy, self.names) if not same else f"; did you mean '{same[0]}'?"
            raise MobatlasError(
                f"group '{name}' does not exist{near} (known: {'; '.join(self.names)})"
            )
        return self.names.index(tidy)

    def codes(self, labels: Mapping[str, Sequence[str | None]]) -> npt.NDArray[np.int64]:
        """The group of each person, -1 where a label is unknown."""
        group: npt.NDArray[np.int64] | None = None
        for name, levels in self.attributes:
            if name not in labels:
                raise MobatlasError(f"labels: column '{name}' is missing{suggestion(name, labels)}")
            position = {level: code for code, level in enumerate(levels)}
            code = np.array(
                [position.get(value, -1) if value is not None else -1 for value in labels[name]],
                dtype=np.int64,
            )
            known = code >= 0
            group = (
                code
                if group is None
                else np.where((group >= 0) & known, group * len(levels) + code, -1)
            )
        assert group is not None
        return group  # (people,)

    def as_dict(self) -> dict[str, list[str]]:
        """For manifests; `of` is its inverse."""
        return {name: list(levels) for name, levels in self.attributes}


DEFAULT_GROUPS = Groups.of({"age": ("<30", "30-40", "40-50", ">50"), "gender": ("M", "F")})


def order_levels(levels: Iterable[str]) -> tuple[str, ...]:
    """Levels in the order a reader expects: `<30` before `30-40` before `>50`, M before F, else by name."""
    found = set(levels)
    for familiar in FAMILIAR_ORDERS:
        if found == set(familiar):
            return familiar
    return tuple(sorted(found, key=_level_key))


def _level_key(level: str) -> tuple[bool, float, int, str]:
    number = re.search(r"\d+(?:\.\d+)?", level)
    before_or_after = (
        -1 if level.lstrip().startswith("<") else (1 if level.lstrip().startswith(">") else 0)
    )
    return (number is None, float(number.group()) if number else 0.0, before_or_after, level)
