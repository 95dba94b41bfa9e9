"""What `mobatlas recover` answers: sentences and a table for the terminal, and files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Group, RenderableType
from rich.text import Text

from mobatlas.data.arrays import Ints
from mobatlas.errors import MobatlasError
from mobatlas.io.manifest import METADATA, write_json
from mobatlas.io.output import new_file
from mobatlas.regions.recovery.summary import AVERAGE, KIND, NOT_SURE, RecoverySummary
from mobatlas.regions.types import Regions, bins_by_map
from mobatlas.report.charts import recovery_figure
from mobatlas.report.tables import Cell, Table

ASSUMPTION = "assumption"
LINES = 40  # of a table
FEWEST = 3  # features of a table
MOST = 20
PANELS = 9  # of a figure
LISTED = 4  # names in a sentence
MOSTLY = 0.5  # of the information
UNITS = (1, 100, 1_000, 10_000, 100_000)  # people
TEXTS = ("group", "feature", "compared_with", "verdict")  # columns
# What files of ours start with, so that `overwrite` replaces no other file.
STARTS = (b"group,feature,compared_with,value,", f'{{\n  "kind": "{KIND}"'.encode())
SUFFIXES = (".csv", ".parquet", ".json")


def write_recovery(out: Path | str, summary: RecoverySummary, *, overwrite: bool = False) -> None:
    """Write a summary as a long table: CSV, Parquet or JSON, as the name of the file says.

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
    check_suffix(out)
    columns = summary.as_columns()
    with new_file(out, overwrite, STARTS) as path:
        if out.suffix == ".json":
            write_json(path, summary.as_dict())
        elif out.suffix == ".csv":
            rows = tuple(zip(*columns.values(), strict=True))
            path.write_text(Table(tuple(columns), rows).as_csv(), encoding="utf-8", newline="")
        else:
            types = {name: pa.string() if name in TEXTS else pa.float64() for name in columns}
            schema = pa.schema(list(types.items()), metadata={METADATA: KIND.encode()})
            pq.write_table(pa.table(columns, schema), path)


def check_suffix(out: Path) -> None:
    """Refuse a file that is neither CSV, Parquet nor JSON."""
    if out.suffix not in SUFFIXES:
        raise MobatlasError(
            f"--out {out}: give a file that ends in {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}"
        )


def _shown_maps(summary: RecoverySummary, names: Sequence[str]) -> list[str]:
    """The named maps, or else category, or else the map with the fewest bins."""
    maps = bins_by_map(summary.features)
    fewest = min(maps, key=lambda name: len(maps[name]))
    return list(dict.fromkeys(names)) or ["category" if "category" in maps else fewest]


def _shown_features(summary: RecoverySummary, feature_map: str, top: int | None) -> Ints:
    """The most certain features of a map: by default as many as a screen has room for."""
    lines = 1 if summary.is_comparison else len(summary.rows) + 1
    n = min(max(FEWEST, LINES // lines), MOST) if top is None else top
    return summary.most_certain(feature_map, n)


def _feature_label(feature: str, parents: Mapping[str, str]) -> str:
    """A bin without its map, such as "gym", and with its parent for a place, "p12 (gym)"."""
    name = feature.partition(":")[2]
    parent = parents.get(feature)
    return name if parent is None else f"{name} ({parent.partition(':')[2]})"


def recovery_table(
    summary: RecoverySummary,
    regions: Regions,
    *,
    maps: Sequence[str] = (),
    top: int | None = None,
) -> RenderableType:
    """Means and ratios of the most informative features, with what is known and what is not.

    Parameters
    ----------
    summary
        The result of `summarise_recovery`.
    regions
        The evidence behind it.
    maps
        The feature maps to show. Default: category, or the map with the fewest bins.
    top
        The number of features of each map to show.

    Returns
    -------
    RenderableType
        For a terminal of 80 characters.
    """
    maps = _shown_maps(summary, maps)
    parts: list[RenderableType] = []
    for name in maps:
        bins = _shown_features(summary, name, top)
        parts += [
            Text(_known(summary, regions, name)),
            _table(summary, bins, name, regions.parents).as_rich(),
            _lines([*_unknown(summary, name), *_explained(summary, name, len(bins))]),
        ]
    others = [name for name in bins_by_map(summary.features) if name not in maps]
    notes = [f"note: {note}" for note in summary.notes]
    if others:
        notes.append(f"For other features pass --feature {' or --feature '.join(others)}.")
    return Group(*parts, *([_lines(notes)] if notes else []))


def draw_recovery(
    path: Path | str,
    summary: RecoverySummary,
    regions: Regions,
    *,
    maps: Sequence[str] = (),
    top: int | None = None,
) -> None:
    """Draw the most informative features as PNG: dots with intervals, and the average as a line.

    Parameters
    ----------
    path
        The file to write.
    summary, regions, maps, top
        As in `recovery_table`.
    """
    maps = _shown_maps(summary, maps)
    most = MOST if summary.is_comparison else PANELS
    panels = {
        (f"{name}: " if len(maps) > 1 else "")
        + _feature_label(summary.features[number], regions.parents): number
        for name in maps
        for number in summary.most_certain(name, top or most).tolist()
    }
    unit = _unit(summary, np.array(list(panels.values())))
    recovery_figure(summary, panels, unit, Path(path))


def _lines(lines: Iterable[str]) -> Text:
    return Text("\n".join(lines))


def _listed(names: Sequence[str]) -> str:
    """The first names; those of groups contain commas."""
    more = f" and {len(names) - LISTED:,} others" if len(names) > LISTED + 1 else ""
    return "; ".join(names[: LISTED if more else None]) + more


def _known(summary: RecoverySummary, regions: Regions, name: str) -> str:
    """What the evidence shows."""
    n = len(regions.composition.regions)
    evidence = ["this region" if n == 1 else f"these {n:,} regions"]
    for source in regions.evidence:
        labelled = f"{source.n.sum():,.0f} labelled people"
        evidence.append(labelled if source.kind == "labelled" else f"the table {source.name}")
    subject = " and ".join(filter(None, (", ".join(evidence[:-1]), evidence[-1])))
    verb = "show" if len(evidence) > 1 or n > 1 else "shows"
    bins = bins_by_map(summary.features)[name]
    clear = int((summary.verdicts[:, bins] != NOT_SURE).sum())
    compared = f"{len(bins):,} features of {name}"
    between = "from the average"
    if summary.is_comparison:
        clear //= 2  # either side has a verdict
        between = f"between {' and '.join(summary.rows)}"
    else:
        rows = "groups" if summary.rows == summary.groups.names else "levels"
        compared = f"{len(summary.rows)} {rows}, {compared}"
    found = f"{clear:,} clear difference{'' if clear == 1 else 's'}" if clear else "no difference"
    sentence = f"{subject[:1].upper()}{subject[1:]} {verb} {found} {between} ({compared})."
    return f"{sentence} {_clearest(summary, name, regions.parents)}" if clear else sentence


def _clearest(summary: RecoverySummary, name: str, parents: Mapping[str, str]) -> str:
    number = int(summary.most_certain(name, 1)[0])
    place = int(summary.certainty[:, number].argmax())
    other = summary.compared_with[place]
    than = "the average" if other == AVERAGE else f"the mean of {other}"
    return (
        f"The clearest: {summary.rows[place]} have {_short(summary.ratio[place, number])} times "
        f"{than} in {_feature_label(summary.features[number], parents)}."
    )


def _explained(summary: RecoverySummary, name: str, shown: int) -> list[str]:
    """How to read the table, and where the information came from."""
    bins = bins_by_map(summary.features)[name]
    level = 100 * summary.level
    lines = [
        f"Each interval contains the true value with a probability of {level:.4g} %. At most "
        f"{100 - level:.4g} % of the verdicts more and less are expected to be wrong "
        "(Benjamini-Yekutieli, over all features).",
    ]
    if shown < len(bins):
        lines.append(
            f"These are the {shown:,} most certain of {len(bins):,} features; --top N shows more, "
            "--out FILE.csv writes all."
        )
    weight = summary.value[:, bins]
    total = max(float(weight.sum()), 1e-300)
    shares = {
        source: float((weight * share[:, bins]).sum()) / total
        for source, share in summary.sources.items()
    }
    if shares:
        parts = ", ".join(f"{source} {share:.0%}" for source, share in shares.items())
        lines.append(f"Information on {name}: {parts}.")
    return lines


def _unknown(summary: RecoverySummary, name: str) -> list[str]:
    """What the evidence does not show."""
    bins = bins_by_map(summary.features)[name]
    unclear = (summary.verdicts[:, bins] == NOT_SURE).all(1)
    lines = []
    if summary.is_comparison:
        if unclear.all():
            lines.append(f"Nothing in {name} distinguishes {' from '.join(summary.rows)}.")
    elif unclear.any() and not unclear.all():
        names = [row for row, each in zip(summary.rows, unclear, strict=True) if each]
        lines.append(f"Nothing in {name} distinguishes from the average: {_listed(names)}.")
    for attribute in summary.undistinguished.get(name, ()):
        levels = summary.groups.as_dict()[attribute]
        text = " from ".join(levels) if len(levels) == 2 else f"the levels of {attribute}"
        lines.append(f"Nothing in {name} distinguishes {text}.")
    vague = _mostly_assumed(summary, bins)
    if vague:
        everything = len(vague) == len(summary.rows) > 1
        names_text = "all rows" if everything else _listed(vague)
        lines.append(f"Mostly assumption, so trust the intervals only: {names_text}.")
    return lines


def _mostly_assumed(summary: RecoverySummary, bins: Ints) -> list[str]:
    """The rows whose information is mostly assumption, weighted by counts."""
    share = summary.sources.get(ASSUMPTION)
    if share is None:
        return []
    weight = summary.value[:, bins]
    assumed = (weight * share[:, bins]).sum(1) > MOSTLY * weight.sum(1)
    return [row for row, each in zip(summary.rows, assumed, strict=True) if each]


def _unit(summary: RecoverySummary, bins: Ints) -> int:
    """The number of people that counts are shown for, so that the median count is not below 1."""
    typical = float(np.median(summary.reference[0, bins])) if len(bins) else 1.0
    return next((unit for unit in UNITS if unit * typical >= 1), UNITS[-1])


def _table(summary: RecoverySummary, bins: Ints, name: str, parents: Mapping[str, str]) -> Table:
    unit = _unit(summary, bins)
    people = "person" if unit == 1 else f"{unit:,} people"
    caption = f"Mean counts per {people} and window, with intervals."
    build = _comparison_rows if summary.is_comparison else _block_rows
    rows = [row for number in bins.tolist() for row in build(summary, number, unit, parents)]
    counts: tuple[str, ...] = ("mean", f"x {AVERAGE}")
    if summary.is_comparison:
        counts = (*summary.rows, " / ".join(summary.rows))
    columns = (name, *counts, "verdict", "evidence")
    bold = {
        (number, place)
        for number, row in enumerate(rows)
        if not row[-1]  # an average
        for place in range(len(columns))
    }
    return Table(columns, tuple(rows), caption, bold=frozenset(bold))


def _block_rows(
    summary: RecoverySummary, number: int, unit: int, parents: Mapping[str, str]
) -> Iterator[tuple[Cell, ...]]:
    """The average of a feature, then the groups or levels."""
    average = _short(unit * summary.reference[0, number])
    yield _feature_label(summary.features[number], parents), average, "1", "", ""
    for place, row in enumerate(summary.rows):
        values = (summary.value, summary.low, summary.high)
        yield (
            f"  {row}",
            _interval(*(unit * each[place, number] for each in values)),
            *_verdict(summary, place, number),
        )


def _comparison_rows(
    summary: RecoverySummary, number: int, unit: int, parents: Mapping[str, str]
) -> Iterator[tuple[Cell, ...]]:
    """Both sides of a comparison."""
    sides = (_short(unit * value) for value in summary.value[:, number])
    yield _feature_label(summary.features[number], parents), *sides, *_verdict(summary, 0, number)


def _verdict(summary: RecoverySummary, place: int, number: int) -> tuple[str, str, str]:
    """Ratio, verdict and the share of the information that is not assumption."""
    ratios = (summary.ratio, summary.ratio_low, summary.ratio_high)
    assumed = summary.sources.get(ASSUMPTION)
    return (
        _interval(*(each[place, number] for each in ratios)),
        str(summary.verdicts[place, number]),
        "-" if assumed is None else f"{1 - assumed[place, number]:.0%}",
    )


def _interval(value: float, low: float, high: float) -> str:
    return "-" if np.isnan(value) else f"{_short(value)} ({_short(low)}-{_short(high)})"


def _short(value: float) -> str:
    """A number in at most four characters up to 9,999."""
    return f"{value:,.{2 if value < 9.995 else 1 if value < 99.95 else 0}f}"
