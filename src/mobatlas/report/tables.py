"""Tables for papers and programs: one `Table`, written as CSV, Markdown, LaTeX and JSON; and the tables of an evaluation."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mobatlas.evaluation.comparison import EVERYBODY
from mobatlas.evaluation.evaluate import BASELINE, FLOOR, OURS, STRONG, Evaluation, ModelScores
from mobatlas.evaluation.metrics import METRICS, Metric
from mobatlas.io.manifest import write_json
from mobatlas.io.output import new_folder, refuse_overlap

KIND = "evaluation"
ORDER = (BASELINE, OURS, STRONG, FLOOR)
DIGITS, SHARE = "z.3f", "z.0%"  # no zero has a sign
MINUS = "\N{MINUS SIGN}"
# A bracket or a star after the \\ of the row before would be taken for its argument.
LATEX = {character: f"\\{character}" for character in "&%$#_{}"} | {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "`": r"\textasciigrave{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "[": "{[}",
    "*": "{*}",
    MINUS: "$-$",
}
MARKDOWN = {character: f"\\{character}" for character in "\\`*_[]<>|~&$"}
UNPRINTABLE = re.compile(r"[\s\x00-\x1f\x7f-\x9f]+")  # and what would break a line
FORMULAS = ("=", "+", "-", "@")  # what a cell of a spreadsheet begins with to be one
Cell = str | int | float | None


@dataclass(frozen=True)
class Table:
    """Rows under columns; numbers keep all their digits in CSV and JSON and have `formats` elsewhere."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    caption: str = ""
    formats: Mapping[str, str] = field(
        default_factory=dict
    )  # column -> of its fractions; three digits if left out
    note: str = ""  # what its columns mean

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(
                    f"a row of {len(row)} cells under {len(self.columns)} columns: {row}"
                )

    @property
    def numeric(self) -> tuple[bool, ...]:
        """Which columns hold no text."""
        return tuple(
            not any(isinstance(row[place], str) for row in self.rows)
            for place in range(len(self.columns))
        )

    def texts(self, missing: str = "-") -> list[list[str]]:
        """The cells as a person reads them."""
        formats = [self.formats.get(name, DIGITS) for name in self.columns]
        return [
            [_text(cell, how, missing) for cell, how in zip(row, formats, strict=True)]
            for row in self.rows
        ]

    def as_csv(self) -> str:
        """A header and a line a row; what is missing is empty."""
        out, known = io.StringIO(), ([_known(cell) for cell in row] for row in self.rows)
        lines = (
            [_inert(cell) if isinstance(cell, str) else cell for cell in row]
            for row in (self.columns, *known)
        )
        csv.writer(out, lineterminator="\n").writerows(lines)
        return out.getvalue()

    def as_markdown(self) -> str:
        """As GitHub has it."""
        rule = ["---:" if numeric else "---" for numeric in self.numeric]
        lines = [
            _escaped(self.columns, MARKDOWN),
            rule,
            *(_escaped(row, MARKDOWN) for row in self.texts()),
        ]
        table = "".join(f"| {' | '.join(line)} |\n" for line in lines)
        caption, note = (_escape(text, MARKDOWN) for text in (self.caption, self.note))
        return "\n".join(
            part for part in (caption and f"{caption}\n", table, note and f"{note}\n") if part
        )

    def as_latex(self, label: str = "") -> str:
        """With the rules of booktabs."""
        head, *body = (
            " & ".join(_escaped(row, LATEX)) + r" \\"
            for row in (self.columns, *self.texts(missing="--"))
        )
        caption = _escape(f"{self.caption} {self.note}", LATEX)
        lines = [
            r"% \usepackage{booktabs}",
            r"\begin{table}[t]",
            r"\centering",
            *([rf"\caption{{{caption}}}"] if caption else []),
            *([rf"\label{{tab:{label}}}"] if label else []),
            rf"\begin{{tabular}}{{{''.join('r' if numeric else 'l' for numeric in self.numeric)}}}",
            r"\toprule",
            head,
            r"\midrule",
            *body,
            r"\bottomrule",
            r"\end{tabular}",
            r"\end{table}",
        ]
        return "\n".join(lines) + "\n"

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        rows = [[_known(cell) for cell in row] for row in self.rows]
        return {
            "caption": self.caption,
            "columns": list(self.columns),
            "rows": rows,
            "note": self.note,
        }


def write_tables(folder: Path, tables: Mapping[str, Table]) -> None:
    """Each as name.csv, name.md, name.tex and name.json."""
    for name, table in tables.items():
        texts = {"csv": table.as_csv(), "md": table.as_markdown(), "tex": table.as_latex(name)}
        for suffix, text in texts.items():
            (folder / f"{name}.{suffix}").write_text(text, encoding="utf-8", newline="")
        write_json(folder / f"{name}.json", table.as_dict())


def write_evaluation(out: Path | str, found: Evaluation, *, overwrite: bool = False) -> None:
    """A folder of its tables, and all of it as evaluation.json; it appears whole or not at all."""
    for source in (found.dataset, *(file["path"] for file in found.files.values())):
        refuse_overlap(Path(source), Path(out))
    with new_folder(Path(out), KIND, seed=found.seed, overwrite=overwrite) as folder:
        write_tables(folder.path, evaluation_tables(found))
        write_json(folder.path / "evaluation.json", found.as_dict())


def evaluation_tables(found: Evaluation) -> dict[str, Table]:
    """The averages over groups, each metric by group as the paper has it, everybody together, and diversity."""
    tables = {}
    to, of_all = f"JSD in bits to {found.split} people", found.everybody.sizes[EVERYBODY]
    if found.groups is not None:
        tables["average"] = _average(
            found.groups, f"{to} of a group, average over {_groups(len(found.groups.sizes))}."
        )
        tables["groups"] = _by_group(found.groups, f"{to} of each group, at equal sizes.")
    tables["everybody"] = _average(
        found.everybody, f"{to}, all together, {of_all:,} trajectories on either side."
    )
    tables["diversity"] = _diversity(found)
    return tables


def _average(standing: ModelScores, caption: str) -> Table:
    """A metric a row: the models side by side, ours with its interval, and what it closes."""
    labels = [label for label in ORDER if label in standing.scores]
    closed = {
        "closed": (FLOOR, standing.gap_closed_floor),
        "gap closed": (STRONG, standing.gap_closed_strong),
    }
    closed = {name: found for name, found in closed.items() if found[1]}
    columns = [
        name for label in labels for name in ((OURS, "low", "high") if label == OURS else (label,))
    ]
    rows = []
    for metric in _compared(standing):
        row: list[Cell] = [metric.title]
        for label in labels:
            one = standing.intervals[label].get(metric.name)
            row += (
                [None]
                if one is None
                else [one.estimate, one.low, one.high]
                if label == OURS
                else [one.estimate]
            )
        found = [shares.get(metric.name) for _, shares in closed.values()]
        rows.append((*row, *(None if each is None else each.share for each in found)))
    words = ["Low and high: 95 % interval over people"]
    words += [
        f"{name}: of the way from the baseline to {target}" for name, (target, _) in closed.items()
    ]
    if any(one.share is None for _, shares in closed.values() for one in shares.values()):
        words.append("none where that way is no longer than the spread of resampled people")
    timed = ["hour" in standing.intervals[label] for label in labels]
    if not all(timed):
        lacking = "one of these files does" if any(timed[:-1]) else "these samples do"
        words.append(f"hours and dwell are compared where samples tell when, and {lacking} not")
    formats = dict.fromkeys(closed, SHARE)
    return Table(
        ("metric", *columns, *closed), tuple(rows), caption, formats, f"{'; '.join(words)}."
    )


def _compared(standing: ModelScores) -> list[Metric]:
    """Metrics on which ours was measured: of when only if its samples tell it."""
    return [metric for metric in METRICS.values() if metric.name in standing.intervals[OURS]]


def _by_group(standing: ModelScores, caption: str) -> Table:
    """Blocks of a metric: a model a row, a group a column."""
    names, labels = list(standing.sizes), [label for label in ORDER if label in standing.scores]
    rows: list[tuple[Cell, ...]] = [("Trajectories", "each", *standing.sizes.values(), None)]
    for metric in _compared(standing):
        for label in (label for label in labels if metric.name in standing.scores[label].average):
            scores = standing.scores[label]
            values = [scores.groups[name][metric.name] for name in names]
            rows.append((metric.title, label, *values, scores.average[metric.name]))
    return Table(("metric", "model", *names, "average"), tuple(rows), caption)


def _diversity(found: Evaluation) -> Table:
    """Distinct samples and copies of training people, beside those of real people."""
    kinds = ("distinct", "copies")
    scores = found.everybody.scores
    rows: list[tuple[Cell, ...]] = []
    for label in ORDER:
        variety = scores[label].diversity if label in scores else None
        if variety is not None:
            real = variety["held_out"]
            rows.append(
                (label, variety["n"], *(each[kind] for each in (variety, real) for kind in kinds))
            )
    columns = ("model", "n", *kinds, *(f"{kind}, real" for kind in kinds))
    caption = f"Shares of distinct trajectories and of copies of training ones, beside those of {found.split} people."
    return Table(columns, tuple(rows), caption, dict.fromkeys(columns[2:], ".1%"))


def _known(cell: Cell) -> Cell:
    return None if isinstance(cell, float) and not math.isfinite(cell) else cell


def _text(cell: Cell, how: str, missing: str) -> str:
    cell = _known(cell)
    if cell is None:
        return missing
    if isinstance(cell, str):
        return cell
    text = f"{cell:,}" if isinstance(cell, int) else format(cell, how)
    return text.replace("-", MINUS, 1) if cell < 0 else text


def _escaped(cells: Iterable[str], signs: Mapping[str, str]) -> list[str]:
    return [_escape(cell, signs) for cell in cells]


def _escape(text: str, signs: Mapping[str, str]) -> str:
    return "".join(signs.get(character, character) for character in _line(text))


def _inert(text: str) -> str:
    """One line that no spreadsheet takes for a formula."""
    line = _line(text)
    return f"'{line}" if line.startswith(FORMULAS) else line


def _line(text: str) -> str:
    return UNPRINTABLE.sub(" ", text).strip()


def _groups(n: int) -> str:
    return "1 group" if n == 1 else f"{n} groups"
