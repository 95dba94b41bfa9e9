"""Composition from several census tables, such as ages and genders, and how a panel compares.

Raking (iterative proportional fitting) scales a prior until it has the margins of every table.
"""

import re
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from mobatlas.data.types import Floats, Ints
from mobatlas.errors import MobatlasError
from mobatlas.groups import Groups
from mobatlas.regions.composition import read_composition
from mobatlas.regions.types import Composition

ROUNDS = 1_000  # of raking
EXACT = 1e-9  # of the margins of a raked region
SAME_TOTAL = 0.01  # relative difference of the totals of two tables that is not mentioned
FLOOR = 1e-4  # share of an even distribution in a prior, so that no group is impossible
CLEAR = 0.05  # relative difference of the share of a level that is mentioned
FEW = 0.5  # of the panel's people, once weighted to the census, that gives a warning


@dataclass(frozen=True)
class Census:
    """Census tables, and how to read them.

    Parameters
    ----------
    tables
        One table, or several that each have some of the attributes.
    prior
        With several tables: a composition table with the joint distribution of the attributes.
        By default attributes are independent within each region.
    straddle, rename
        As in `read_composition`.

    Examples
    --------
    >>> Census(("age.csv", "sex.csv")).name
    'age.csv and sex.csv'
    """

    tables: Sequence[Path | str]
    prior: Path | str | None = None
    straddle: str = "refuse"
    rename: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.prior is not None and len(self.tables) < 2:
            raise MobatlasError(
                f"--joint-prior {self.prior}: it needs several tables of --composition, each with "
                "some of the attributes; remove it"
            )

    @property
    def name(self) -> str:
        """The names of the files."""
        return " and ".join(Path(table).name for table in self.tables)

    @property
    def path(self) -> str:
        """The paths of the files."""
        return " and ".join(map(str, self.tables))

    @property
    def details(self) -> dict[str, Any]:
        """Provenance, for the manifest of regions."""
        return {"census": self.name, "joint": self.joint if len(self.tables) > 1 else None}

    def read(
        self, groups: Groups | None = None, n: float | None = None, notes: list[str] | None = None
    ) -> Composition:
        """Read the composition; for the parameters see `read_composition`."""
        notes = [] if notes is None else notes
        if len(self.tables) == 1:
            return read_composition(self.tables[0], groups, n, self.straddle, notes, self.rename)
        parts = [
            read_composition(each, groups, n, self.straddle, notes, self.rename, partial=True)
            for each in self.tables
        ]
        groups = self._require_all(parts, groups)
        first = parts[0].regions
        rows = [match_regions(first, part.regions, self.name, notes) for part in parts]
        common = np.flatnonzero(np.min(rows, axis=0) >= 0)
        if not len(common):
            raise MobatlasError(f"{self.name}: no region is in all tables; use the same ids")
        if len(common) < max(len(part.regions) for part in parts):
            notes.append(f"{self.name}: only the {len(common):,} regions of all tables are used")
        parts = [
            replace(part.select(row[common]), regions=parts[0].select(common).regions)
            for part, row in zip(parts, rows, strict=True)
        ]
        shares, gap = rake(
            self._prior(parts[0].regions, groups, notes),
            [(part.shares, _cell_of_group(part.groups, groups)) for part in parts],
        )
        notes.append(
            f"{self.name}: within each region, the joint distribution is an assumption "
            f"({self.joint}), raked to these tables"
        )
        self._note_conflicts(parts, gap, notes)
        return Composition(groups, parts[0].regions, shares, parts[0].n)

    @property
    def joint(self) -> str:
        """The assumption about the joint distribution of attributes in different tables."""
        prior = self.prior
        return "independent attributes" if prior is None else f"that of {Path(prior).name}"

    def _require_all(self, parts: Sequence[Composition], groups: Groups | None) -> Groups:
        """The groups of all tables together; refuse a missing attribute or different levels."""
        levels: dict[str, tuple[str, ...]] = {}
        for part in parts:
            for name, own in part.groups.attributes:
                if levels.setdefault(name, own) != own:
                    raise MobatlasError(
                        f"{self.name}: the tables have different levels of '{name}'; use the same "
                        "levels in both"
                    )
        for name in groups.attribute_names if groups is not None else ():
            if name not in levels:
                raise MobatlasError(f"{self.name}: no table has '{name}'; add one that has it")
        return Groups.of(levels) if groups is None else groups

    def _prior(self, regions: Sequence[str], groups: Groups, notes: list[str]) -> Floats:
        """The joint distribution (regions, groups) before raking."""
        even = np.full((len(regions), len(groups)), 1 / len(groups))
        if self.prior is None:
            return even
        table = read_composition(self.prior, groups, None, self.straddle, notes, self.rename)
        n = table.n if np.isfinite(table.n).all() else np.ones(len(table.n))
        overall = n @ table.shares / n.sum()
        row = match_regions(regions, table.regions)
        shares = np.where((row >= 0)[:, None], table.shares[row], overall)
        return (1 - FLOOR) * shares + FLOOR * even

    def _note_conflicts(self, parts: Sequence[Composition], gap: float, notes: list[str]) -> None:
        totals = np.stack([part.n for part in parts])  # (tables, regions)
        apart = np.abs(totals / totals[0] - 1).max() if np.isfinite(totals).all() else 0.0
        if apart > SAME_TOTAL:
            first = Path(self.tables[0]).name
            notes.append(
                f"{self.name}: totals of regions differ by up to {apart:.0%}; those of {first} "
                "are used"
            )
        if gap > SAME_TOTAL:
            notes.append(
                f"{self.name}: the tables contradict each other by up to {gap:.0%} of a region's "
                "people"
            )


def rake(prior: Floats, margins: Sequence[tuple[Floats, Ints]]) -> tuple[Floats, float]:
    """Scale a prior (regions, groups) to margins, by iterative proportional fitting.

    Parameters
    ----------
    prior
        Positive shares.
    margins
        Shares (regions, cells) of each table, and the cell (groups,) of each group.

    Returns
    -------
    shares, gap
        The shares (regions, groups), and the largest difference from a margin.

    Examples
    --------
    >>> ages, genders = np.array([[0.2, 0.8]]), np.array([[0.5, 0.5]])
    >>> margins = [(ages, np.array([0, 0, 1, 1])), (genders, np.array([0, 1, 0, 1]))]
    >>> rake(np.full((1, 4), 0.25), margins)[0].tolist()
    [[0.1, 0.1, 0.4, 0.4]]
    """
    shares = prior
    members = [np.eye(target.shape[1])[cell] for target, cell in margins]  # (groups, cells)
    gap = np.inf
    for _ in range(ROUNDS):
        for (target, cell), member in zip(margins, members, strict=True):
            shares = shares * (target / np.maximum(shares @ member, 1e-300))[:, cell]
        gap = max(
            float(np.abs(shares @ member - target).max())
            for (target, _), member in zip(margins, members, strict=True)
        )
        if gap < EXACT:
            break
    return shares / shares.sum(1, keepdims=True), gap


def _cell_of_group(part: Groups, groups: Groups) -> Ints:
    """The number (groups,) of the group of some attributes that each group belongs to."""
    columns = [groups.attribute_names.index(name) for name in part.attribute_names]
    sizes = [len(levels) for _, levels in part.attributes]
    return np.ravel_multi_index(tuple(groups.level_codes[:, columns].T), sizes).astype(np.int64)


def match_regions(
    regions: Sequence[str],
    others: Sequence[str],
    source: str = "",
    notes: list[str] | None = None,
) -> Ints:
    """The row of each region among others, -1 for none.

    Ids are matched as they are, then without the prefix of a census GEO_ID, then ignoring case,
    accents, spaces, leading zeros and `.0`. A form that fits two ids of one side matches nothing.
    """
    row = np.full(len(regions), -1, dtype=np.int64)
    for form in (str, _without_prefix, _plain_region):
        ours, theirs = ([form(name) for name in names] for names in (regions, others))
        number = {name: k for k, name in enumerate(theirs)}
        # Distinct ids must not become one.
        once = {name for name, count in Counter(ours).items() if count == 1}
        once &= {name for name, count in Counter(theirs).items() if count == 1}
        found = [number[name] if name in once else -1 for name in ours]
        row = np.where(row < 0, np.array(found, dtype=np.int64), row)
    pairs = [(name, others[k]) for name, k in zip(regions, row.tolist(), strict=True) if k >= 0]
    unlike = [pair for pair in pairs if _without_prefix(pair[0]) != _without_prefix(pair[1])]
    if unlike and notes is not None:
        one, two = unlike[0]
        notes.append(
            f"{source}: {len(unlike):,} region ids are written differently, such as '{one}' and "
            f"'{two}'; they are matched"
        )
    return row


def _without_prefix(region: str) -> str:
    return re.sub(r"^\d{7}US", "", region)


def _plain_region(region: str) -> str:
    letters = unicodedata.normalize("NFKD", _without_prefix(region)).casefold()
    text = "".join(each for each in letters if not unicodedata.combining(each))
    return re.sub(r"^0+(?=\d)", "", re.sub(r"^(\d+)\.0+$", r"\1", re.sub(r"\s+", "", text)))


def compare_panel(census: Composition, panel: Floats) -> dict[str, Any] | None:
    """How well a panel represents the census, by its people (regions,) in each region.

    None where the census has no numbers of people. People would be weighted by census share over
    panel share of their region; the effective people are those of an equally precise panel without
    weights.
    """
    if not np.isfinite(census.n).all():
        return None
    expected = census.n / census.n.sum()  # (regions,)
    observed = panel / panel.sum()
    ratio = observed / expected
    most, least = int(ratio.argmax()), int(ratio.argmin())
    levels = {}
    for number, (name, own) in enumerate(census.groups.attributes):
        member = np.eye(len(own))[census.groups.level_codes[:, number]]  # (groups, levels)
        here, there = (weight @ census.shares @ member for weight in (observed, expected))
        parts = np.where(there > 0, here / np.maximum(there, 1e-300), 1.0)
        levels[name] = dict(zip(own, parts.tolist(), strict=True))
    return {
        "people": float(panel.sum()),
        "effective_people": float(panel.sum() / (expected / ratio).sum()),
        "most": {"region": census.regions[most], "ratio": float(ratio[most])},
        "least": {"region": census.regions[least], "ratio": float(ratio[least])},
        "levels": levels,
    }


def panel_sentences(panel: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Notes and warnings about a comparison from `compare_panel`."""
    share = panel["effective_people"] / panel["people"]
    most, least = panel["most"], panel["least"]
    sentences = [
        f"panel against census: weighted to the census by region, {panel['people']:,.0f} people "
        f"are as precise as {panel['effective_people']:,.0f}; '{most['region']}' has "
        f"{most['ratio']:.2g} times its census share, and '{least['region']}' has "
        f"{least['ratio']:.2g} times"
    ]
    ratios = {
        f"{level} ({name})": ratio
        for name, levels in panel["levels"].items()
        for level, ratio in levels.items()
    }
    level = max(ratios, key=lambda each: abs(ratios[each] - 1))
    if abs(ratios[level] - 1) > CLEAR:
        sentences.append(
            f"panel against census: because of its regions alone, the panel has "
            f"{ratios[level]:.2g} times the census share of {level}"
        )
    return ([], sentences) if share < FEW else (sentences, [])
