"""What `mobatlas recover` answers: sentences and a table for the terminal, a figure, and files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Group, RenderableType
from rich.text import Text

from mobatlas.data.types import Ints
from mobatlas.errors import MobatlasError, listed
from mobatlas.io.manifest import METADATA, write_json
from mobatlas.io.output import check_replaceable_file, new_file, refuse_overlap
from mobatlas.regions.recovery.summary import AVERAGE, KIND, NOT_SURE, RecoverySummary
from mobatlas.regions.types import Regions, bins_by_map
from mobatlas.report.charts import people, recovery_figure
from mobatlas.report.tables import Cell, Table

ASSUMPTION = "assumption"
LINES = 40  # of a table
FEATURES = (3, 20)  # the least and the greatest number of features of a table by default
PANELS = 9  # of a figure
LONGEST = 20  # characters of the header of a ratio
LISTED = 4  # names in a sentence
MOSTLY = 0.5  # of the information
UNITS = (1, 100, 1_000, 10_000, 100_000)  # people
TEXTS = ("group", "feature", "compared_with", "verdict")  # columns
SUFFIXES = (".csv", ".parquet", ".json")
# How our files start, so that `overwrite` replaces no other file.
STARTS = (b"group,feature,compared_with,value,", f'{{\n  "kind": "{KIND}"'.encode())


def write_recovery(out: Path | str, summary: RecoverySummary, *, overwrite: bool = False) -> None:
    """Write all numbers of a summary as CSV, Parquet or JSON, as the name of the file says.

    Parameters
    ----------
    out
        The file. It appears when it is complete.
    summary
        The result of `summarise_recovery`.
    overwrite
        Whether to replace an existing file of this kind.

    Examples
    --------
    >>> write_recovery("means.csv", summarise_recovery(recovery))  # doctest: +SKIP
    """
    out = Path(out)
    check_output(out, overwrite)
    columns = summary.as_columns()
    with new_file(out, overwrite, STARTS) as path:
        if out.suffix == ".json":
            write_json(path, summary.as_dict())
        elif out.suffix == ".csv":
            table = Table(tuple(columns), tuple(zip(*columns.values(), strict=True)))
            path.write_text(table.as_csv(), encoding="utf-8", newline="")
        else:
            types = {name: pa.string() if name in TEXTS else pa.float64() for name in columns}
            schema = pa.schema(list(types.items()), metadata={METADATA: KIND.encode()})
            pq.write_table(pa.table(columns, schema), path)


def check_output(out: Path, overwrite: bool, source: Path | None = None) -> None:
    """Refuse an unknown format, a file that may not be replaced, or one inside the source."""
    if out.suffix not in SUFFIXES:
        raise MobatlasError(
            f"--out {out}: give a file that ends in {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}"
        )
    if source is not None:
        refuse_overlap(source, out)
    check_replaceable_file(out, overwrite, STARTS)


@dataclass(frozen=True)
class RecoveryView:
    """A summary for readers: the most informative features as a table and as a figure.

    Parameters
    ----------
    summary
        The result of `summarise_recovery`.
    regions
        The evidence behind it.
    maps
        The feature maps to show. Default: category, or the map with the fewest bins.
    top
        The number of features of each map. Default: as many as there is room for.

    Examples
    --------
    >>> RecoveryView(summary, load_regions("regions")).draw("means.png")  # doctest: +SKIP
    """

    summary: RecoverySummary
    regions: Regions
    maps: Sequence[str] = ()
    top: int | None = None

    def as_rich(self) -> RenderableType:
        """For a terminal of 80 characters."""
        lines = 1 if self.summary.is_comparison else len(self.summary.rows) + 1
        n = self.top or int(np.clip(LINES // lines, *FEATURES))
        parts: list[RenderableType] = []
        for each in self._shown():
            bins = self.summary.most_certain(each.name, n)
            sentences = (*each.unknown(), *each.explained(len(bins)))
            parts += [Text(each.known()), each.table(bins).as_rich(), Text("\n".join(sentences))]
        notes = [f"note: {note}" for note in self.summary.notes]
        shown = {each.name for each in self._shown()}
        if others := [name for name in bins_by_map(self.summary.features) if name not in shown]:
            notes.append(f"For other features pass --feature {' or --feature '.join(others)}.")
        return Group(*parts, *([Text("\n".join(notes))] if notes else []))

    def draw(self, path: Path | str) -> None:
        """Write a PNG file: dots with intervals, and the average as a line."""
        n = self.top or (FEATURES[1] if self.summary.is_comparison else PANELS)
        shown = self._shown()
        panels = {
            (f"{each.name}: " if len(shown) > 1 else "") + each.label(number): number
            for each in shown
            for number in self.summary.most_certain(each.name, n).tolist()
        }
        unit = _unit(self.summary, np.array(list(panels.values())))
        recovery_figure(self.summary, panels, unit, Path(path))

    def _shown(self) -> list[_MapView]:
        maps = bins_by_map(self.summary.features)
        fewest = min(maps, key=lambda name: len(maps[name]))
        names = list(dict.fromkeys(self.maps)) or ["category" if "category" in maps else fewest]
        return [_MapView(self.summary, self.regions, name, maps[name]) for name in names]


@dataclass(frozen=True)
class _MapView:
    """The bins of one feature map."""

    summary: RecoverySummary
    regions: Regions
    name: str
    bins: Ints

    def label(self, number: int) -> str:
        """A bin without its map, such as "gym", and with its parent for a place, "p12 (gym)"."""
        feature = self.summary.features[number]
        parent = self.regions.parents.get(feature)
        name = feature.partition(":")[2]
        return name if parent is None else f"{name} ({parent.partition(':')[2]})"

    def known(self) -> str:
        """What the evidence shows."""
        summary = self.summary
        clear = int((summary.verdicts[:, self.bins] != NOT_SURE).sum())
        compared = f"{len(self.bins):,} features of {self.name}"
        between = "from the average"
        if summary.is_comparison:
            clear //= 2  # either side has a verdict
            between = f"between {' and '.join(summary.rows)}"
        else:
            rows = "groups" if summary.rows == summary.groups.names else "levels"
            compared = f"{len(summary.rows)} {rows}, {compared}"
        found = (
            f"{clear:,} clear difference{'s' if clear > 1 else ''}"
            if clear
            else "no clear difference"
        )
        sentence = f"{_evidence(self.regions)} {found} {between} ({compared})."
        return f"{sentence} {self._clearest()}" if clear else sentence

    def _clearest(self) -> str:
        summary = self.summary
        number = int(summary.most_certain(self.name, 1)[0])
        place = int(summary.certainty[:, number].argmax())
        other = summary.compared_with[place]
        than = "the average" if other == AVERAGE else f"the mean of {other}"
        ratio = _short(summary.ratio[place, number])
        return (
            f"The clearest: {summary.rows[place]} have {ratio} times {than} in "
            f"{self.label(number)}."
        )

    def unknown(self) -> list[str]:
        """What the evidence does not show."""
        summary = self.summary
        unclear = (summary.verdicts[:, self.bins] == NOT_SURE).all(1)
        alike = []  # what nothing distinguishes
        if summary.is_comparison and unclear.all():
            alike.append(" from ".join(summary.rows))
        elif not unclear.all():
            names = [row for row, each in zip(summary.rows, unclear, strict=True) if each]
            alike += [f"these from the average: {_listed(names)}"] if names else []
        for attribute in summary.undistinguished.get(self.name, ()):
            levels = summary.groups.as_dict()[attribute]
            alike.append(
                " from ".join(levels) if len(levels) == 2 else f"the levels of {attribute}"
            )
        sentences = [f"Nothing in {self.name} distinguishes {each}." for each in alike]
        vague = [
            row
            for place, row in enumerate(summary.rows)
            if self._sources(place).get(ASSUMPTION, 0) > MOSTLY
        ]
        if vague:
            names_text = _listed(vague) if len(vague) < len(summary.rows) else "all rows"
            sentences.append(f"Mostly assumption, so rely on intervals only: {names_text}.")
        return sentences

    def explained(self, shown: int) -> list[str]:
        """How to read the table, and where the information came from."""
        level = 100 * self.summary.level
        sentences = [
            f"Each interval contains the true value with a probability of {level:.4g} %. At most "
            f"{100 - level:.4g} % of the verdicts more and less are expected to be wrong "
            "(Benjamini-Yekutieli, over all features)."
        ]
        if shown < len(self.bins):
            sentences.append(
                f"These are the {shown:,} most certain of {len(self.bins):,} features; --top N "
                "shows more, --out FILE.csv writes all."
            )
        shares = ", ".join(f"{source} {share:.0%}" for source, share in self._sources().items())
        return [*sentences, f"Information on {self.name}: {shares}."] if shares else sentences

    def _sources(self, rows: int | slice = slice(None)) -> dict[str, float]:
        """The mean share of each source, weighted by counts."""
        weight = self.summary.value[rows][..., self.bins]
        total = max(float(weight.sum()), 1e-300)
        return {
            name: float((weight * share[rows][..., self.bins]).sum()) / total
            for name, share in self.summary.sources.items()
        }

    def table(self, bins: Ints) -> Table:
        """Means, ratios, verdicts and the share of the information that is not assumption."""
        summary = self.summary
        unit = _unit(summary, bins)
        caption = f"Mean counts per {people(unit)} and window, with intervals."
        counts: tuple[str, ...] = ("mean", f"x {AVERAGE}")
        if summary.is_comparison:
            sides = " / ".join(summary.rows)
            brief = ("first", "second", "ratio")
            counts = (*summary.rows, sides) if len(sides) <= LONGEST else brief
        rows = [row for number in bins.tolist() for row in self._rows(number, unit)]
        bold = {
            (number, place)
            for number, row in enumerate(rows)
            if not row[-1]  # an average
            for place in range(len(row))
        }
        columns = (self.name, *counts, "verdict", "evidence")
        return Table(columns, tuple(rows), caption, bold=frozenset(bold))

    def _rows(self, number: int, unit: int) -> Iterator[tuple[Cell, ...]]:
        """Both sides of a comparison; or the average, then the groups or levels."""
        summary = self.summary
        if summary.is_comparison:
            sides = (_short(unit * value) for value in summary.value[:, number])
            yield self.label(number), *sides, *self._verdict(0, number)
            return
        yield self.label(number), _short(unit * summary.reference[0, number]), "1", "", ""
        for place, row in enumerate(summary.rows):
            ends = (summary.value, summary.low, summary.high)
            mean = _interval(*(unit * each[place, number] for each in ends))
            yield f"  {row}", mean, *self._verdict(place, number)

    def _verdict(self, place: int, number: int) -> tuple[str, str, str]:
        summary = self.summary
        ends = (summary.ratio, summary.ratio_low, summary.ratio_high)
        assumed = summary.sources.get(ASSUMPTION)
        return (
            _interval(*(each[place, number] for each in ends)),
            str(summary.verdicts[place, number]),
            "-" if assumed is None else f"{1 - assumed[place, number]:.0%}",
        )


def _evidence(regions: Regions) -> str:
    """The evidence and its verb, such as "These 16 regions and 200 labelled people show"."""
    n = len(regions.composition.regions)
    names = ["This region" if n == 1 else f"These {n:,} regions"]
    names += [source.title for source in regions.evidence]
    return f"{listed(names)} {'show' if len(names) > 1 or n > 1 else 'shows'}"


def _listed(names: Sequence[str]) -> str:
    """The first names; names of groups contain commas."""
    more = f"; and {len(names) - LISTED:,} others" if len(names) > LISTED + 1 else ""
    return "; ".join(names[: LISTED if more else None]) + more


def _unit(summary: RecoverySummary, bins: Ints) -> int:
    """The number of people that counts are shown for, so that the median count is not below 1."""
    typical = float(np.median(summary.reference[0, bins]))
    return next((unit for unit in UNITS if unit * typical >= 1), UNITS[-1])


def _interval(value: float, low: float, high: float) -> str:
    return "-" if np.isnan(value) else f"{_short(value)} ({_short(low)}-{_short(high)})"


def _short(value: float) -> str:
    """A number in at most four characters up to 9,999."""
    return f"{value:,.{2 if value < 9.995 else 1 if value < 99.95 else 0}f}"
