"""`Table` for terminal, HTML and CSV; tables of evaluations and audits."""

import csv
import io
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from markupsafe import Markup, escape
from rich import table as rich_table
from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.text import Text

from mobatlas.errors import listed
from mobatlas.evaluation.comparison import EVERYBODY, FLOOR
from mobatlas.evaluation.evaluate import (
    BASELINE,
    MODELS,
    OURS,
    STRONG,
    STRONG_CALIBRATED,
    Evaluation,
)
from mobatlas.evaluation.metrics import metrics
from mobatlas.evaluation.privacy.audit import AMBER, AUC, GUESSES, RED, REPEATS, TPR, Audit
from mobatlas.features.maps import Feature

DIGITS = "z.3f"  # z: no zero has a sign
SHARE = "z.0%"
MINUS = "\N{MINUS SIGN}"
UNPRINTABLE = re.compile(r"[\s\x00-\x1f\x7f-\x9f]+")  # includes line breaks
FORMULAS = ("=", "+", "-", "@")  # a spreadsheet computes a cell that starts with one of these
LIMITS = {"repeats": REPEATS, "groups": GUESSES, "AUC": AUC, "TPR": TPR}
AUDIT_NOTE = (
    "Train, held-out: the share of samples that match equally many people of either side. "
    "Unique: a match counts only if a single person has it. "
    "Measured: the estimate; low and high are the ends of its 95 % interval. "
    "Most checks measure the share of samples that repeat a training person beyond chance. "
    "Group: correct guesses of the group of training people beyond those of held-out people. "
    "AUC: that of the best membership attack (chance: 0.5). "
    "TPR: the share of training people that this attack identifies at a false positive rate of "
    "1 % (chance: 0.01). "
    "Amber, red: the lower end is above "
    + ", ".join(f"{amber:.2f}, {red:.2f} ({name})" for name, (amber, red) in LIMITS.items())
    + ". Green: the upper end is at most the red limit. Otherwise the check is not decided."
)
HALF_WIDTH = "±"
TERMINAL = 80  # columns of a terminal that every header should fit
CEILING = "ceiling"  # a short name of the calibrated labelled model
Cell = str | int | float | None


@dataclass(frozen=True)
class Table:
    """Rows under columns, rendered as text, HTML or CSV.

    Parameters
    ----------
    columns
        The name of each column. Without any name the table has no header in the terminal.
    rows
        Texts, numbers, or None for a missing value.
    caption, note
        Text above and below the table.
    formats
        Column -> format of its fractions, by default three decimals. CSV has all digits.
    bold
        (row, column) of the cells to print in bold type.

    Examples
    --------
    >>> print(Table(("group", "share"), (("A", 0.5),), formats={"share": ".0%"}).as_csv(), end="")
    group,share
    A,0.5
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    caption: str = ""
    formats: Mapping[str, str] = field(default_factory=dict)
    note: str = ""
    bold: frozenset[tuple[int, int]] = frozenset()

    @classmethod
    def from_records(cls, records: Sequence[Mapping[str, Cell]], caption: str = "") -> Self:
        """A table of records with the same keys, which name the columns."""
        columns = tuple(name.replace("_", " ") for name in records[0])
        return cls(columns, tuple(tuple(record.values()) for record in records), caption)

    @property
    def numeric(self) -> tuple[bool, ...]:
        """Whether each column has no text."""
        return tuple(
            not any(isinstance(row[place], str) for row in self.rows)
            for place in range(len(self.columns))
        )

    def texts(self, missing: str = "-") -> list[list[str]]:
        """The cells as formatted text."""
        formats = [self.formats.get(name, DIGITS) for name in self.columns]
        return [
            [_text(cell, format_, missing) for cell, format_ in zip(row, formats, strict=True)]
            for row in self.rows
        ]

    def as_rich(self) -> RenderableType:
        """For the terminal, without lines between columns: nine columns fit into 80 characters."""
        table = rich_table.Table(
            box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True, show_header=any(self.columns)
        )
        texts = self.texts()
        widths = []
        for place, numeric in enumerate(self.numeric):
            # Headers and texts wrap between words, numbers do not wrap.
            cells = [row[place] for row in texts]
            parts = cells if numeric else [word for cell in cells for word in cell.split()]
            widths.append(max(map(len, parts), default=1))
        heads = [max(map(len, name.split()), default=0) for name in self.columns]
        wide = [max(pair) for pair in zip(widths, heads, strict=True)]
        if sum(wide) + 2 * (len(wide) - 1) <= TERMINAL:  # two spaces between columns
            widths = wide
        for name, numeric, width in zip(self.columns, self.numeric, widths, strict=True):
            table.add_column(Text(name), justify="right" if numeric else "left", min_width=width)
        for number, row in enumerate(texts):
            table.add_row(
                *(
                    Text(cell, "bold" if (number, place) in self.bold else "")
                    for place, cell in enumerate(row)
                )
            )
        return Group(Text(self.caption, style="italic"), table) if self.caption else table

    def as_html(self) -> Markup:
        """For a web page; the first column holds row headers."""
        head = "".join(f'<th scope="col">{escape(name)}</th>' for name in self.columns)
        body = []
        best = ' class="best"'
        for number, (first, *others) in enumerate(self.texts()):
            cells = "".join(
                f"<td{best if (number, place) in self.bold else ''}>{escape(cell)}</td>"
                for place, cell in enumerate(others, 1)
            )
            body.append(f'<tr><th scope="row">{escape(first)}</th>{cells}</tr>')
        caption = f"<caption>{escape(self.caption)}</caption>" if self.caption else ""
        note = f'<p class="quiet">{escape(self.note)}</p>' if self.note else ""
        return Markup(
            f'<div class="scroll"><table>{caption}<thead><tr>{head}</tr></thead>'
            f"<tbody>{''.join(body)}</tbody></table></div>{note}"
        )

    def as_csv(self) -> str:
        """One line a row after a header; missing values are empty."""
        out = io.StringIO()
        lines = (
            [_inert(cell) if isinstance(cell, str) else finite(cell) for cell in row]
            for row in (self.columns, *self.rows)
        )
        csv.writer(out, lineterminator="\n").writerows(lines)
        return out.getvalue()


def evaluation_tables(evaluation: Evaluation) -> list[Table]:
    """Tables that fit a terminal: averages over groups, if there are labels; everybody; diversity.

    Parameters
    ----------
    evaluation
        The result of `evaluate`.

    Examples
    --------
    >>> evaluation_tables(evaluate("samples.parquet", "dataset"))[-1].columns  # doctest: +SKIP
    """
    results = evaluation.as_dict()
    distance = f"JSD in bits to {evaluation.split} people"
    tables = []
    if evaluation.groups is not None:
        n = len(evaluation.groups.sizes)
        caption = f"{distance} of the same group, average over {n} group{'s' if n > 1 else ''}."
        tables.append(scores_table(results["groups"], caption, brief=True))
    size = evaluation.everybody.sizes[EVERYBODY]
    caption = f"{distance}, all groups together, {size:,} trajectories on either side."
    tables.append(scores_table(results["everybody"], caption, brief=True))
    return [*tables, _diversity(results)]


def scores_table(
    scores: Mapping[str, Any],
    caption: str,
    *,
    ours: str = OURS,
    digits: str = DIGITS,
    only: Sequence[str] = (),
    brief: bool = False,
) -> Table:
    """One metric a row: the models, interval and excess of ours, and the gap that ours closes.

    `scores` is `ModelScores.as_dict()`; `ours` the header of ours; `only` the metrics to show. A
    `brief` table fits a terminal: it leaves out the gap to strong, and has half the width of the
    interval instead of its ends.
    """
    labels = [label for label in MODELS if label in scores["scores"]]
    ends = (HALF_WIDTH,) if brief else ("low", "high")
    targets = (FLOOR,) if brief else (FLOOR, STRONG)
    gaps = {f"gap closed to {target}": scores[f"gap_closed_{target}"] for target in targets}
    gaps = {name: gap for name, gap in gaps.items() if gap}
    titles = {STRONG_CALIBRATED: CEILING} if brief else {}
    columns = ["metric"]
    for label in labels:
        columns += [ours, *ends, "excess"] if label == OURS else [titles.get(label, label)]
    rows: list[tuple[Cell, ...]] = []
    better = []
    for metric in _compared(scores):
        if only and metric.name not in only:
            continue
        row: list[Cell] = [metric.title]
        for label in labels:
            interval = scores["intervals"][label].get(metric.name, {})
            row.append(interval.get("estimate"))
            if label == OURS:
                low, high = interval["low"], interval["high"]
                row += [(high - low) / 2] if brief else [low, high]
                row.append(scores["scores"][OURS]["excess"].get(metric.name))
        row += [gap.get(metric.name, {}).get("share") for gap in gaps.values()]
        baseline = scores["intervals"].get(BASELINE, {}).get(metric.name, {}).get("estimate")
        if baseline is not None and scores["intervals"][OURS][metric.name]["estimate"] < baseline:
            better.append((len(rows), columns.index(ours)))
        rows.append(tuple(row))
    formats = dict.fromkeys(columns, digits) | dict.fromkeys(gaps, SHARE)
    interval_note = (
        f"{HALF_WIDTH} is half the width of the 95 % interval over people."
        if brief
        else "Low and high are the ends of the 95 % interval over people."
    )
    note = f"{interval_note} {_scores_note(scores, labels, gaps)}"
    return Table((*columns, *gaps), tuple(rows), caption, formats, note, frozenset(better))


def _scores_note(
    scores: Mapping[str, Any], labels: Sequence[str], gaps: Mapping[str, Mapping[str, Any]]
) -> str:
    sentences = [
        "Excess is the JSD beyond that of two equally large samples of the same people.",
    ]
    if STRONG_CALIBRATED in labels:
        sentences.append(f"Strong, calibrated to labelled means, is a reference ({CEILING}).")
    if gaps:
        strong = ", or to the model trained on labels (strong) as in the paper"
        sentences.append(
            "Gap closed is the share of the gap in excess from the baseline to the floor"
            + (strong if len(gaps) > 1 else "")
            + "."
        )
    if any(each["share"] is None for gap in gaps.values() for each in gap.values()):
        sentences.append("A dash there means that the gap is below three standard errors.")
    timed = {metric.name: metric.title for metric in metrics(with_times=True) if metric.needs_times}
    has_times = [not timed.keys().isdisjoint(scores["intervals"][label]) for label in labels]
    if not all(has_times):
        files = "one of these files has" if any(has_times[:-1]) else "these samples have"
        titles = listed(list(timed.values()))
        sentences.append(f"{titles} are not compared, because {files} no times.")
    return " ".join(sentences)


def _compared(scores: Mapping[str, Any]) -> list[Feature]:
    """The metrics that ours was measured with; those of time only if samples have times."""
    return [
        metric for metric in metrics(with_times=True) if metric.name in scores["intervals"][OURS]
    ]


def _diversity(results: Mapping[str, Any]) -> Table:
    shares = ("distinct", "copies")
    scores = results["everybody"]["scores"]
    rows: list[tuple[Cell, ...]] = []
    for label in MODELS:
        if (ours := scores.get(label, {}).get("diversity")) is not None:
            sides = (ours, ours["held_out"])
            rows.append((label, ours["n"], *(side[share] for side in sides for share in shares)))
    columns = ("model", "n", *shares, *(f"{share}, real" for share in shares))
    caption = (
        "Shares of distinct trajectories and of exact copies of training trajectories, for "
        f"samples and for real {results['split']} people."
    )
    return Table(columns, tuple(rows), caption, dict.fromkeys(columns[2:], ".1%"))


def attacks_table(audit: Audit) -> Table:
    """The membership attacks, each by itself."""
    rows = [
        (f"by {evidence}", attack.name, attack.auc, attack.tpr)
        for evidence, attacks in audit.attacks.items()
        for attack in attacks
    ]
    caption = (
        "Membership attacks, each on all people compared. "
        "The checks correct for choosing the best of them; this table does not."
    )
    return Table(("membership", "attack", "AUC", "TPR at 1 % FPR"), tuple(rows), caption)


def checks_table(audit: Mapping[str, Any], *, limits: bool = True) -> Table:
    """The checks of `Audit.as_dict()` with their verdicts, and with or without their limits."""
    shown = (AMBER, RED) if limits else ()
    rows = [
        (
            *(check[name] for name in ("title", "train", "held_out")),
            *((check["measured"] or {}).get(name) for name in ("estimate", "low", "high")),
            *(check[name] for name in (*shown, "verdict")),
        )
        for check in audit["checks"]
    ]
    columns = ("check", "train", "held-out", "measured", "low", "high", *shown, "verdict")
    formats = {"train": ".1%", "held-out": ".1%", AMBER: ".2f", RED: ".2f"}
    subject = f"{audit['trajectories']:,} samples" if audit["trajectories"] else "the model"
    caption = f"Privacy of {subject}: {audit['verdict']}."
    return Table(columns, tuple(rows), caption, formats, AUDIT_NOTE)


def finite(cell: Cell) -> Cell:
    """The cell, or None for infinity and NaN."""
    return None if isinstance(cell, float) and not math.isfinite(cell) else cell


def _text(cell: Cell, format_: str, missing: str) -> str:
    cell = finite(cell)
    if cell is None:
        return missing
    if isinstance(cell, str):
        return cell
    text = f"{cell:,}" if isinstance(cell, int) else format(cell, format_)
    return text.replace("-", MINUS, 1) if cell < 0 else text


def _inert(text: str) -> str:
    """One line that no spreadsheet reads as a formula."""
    line = one_line(text)
    return f"'{line}" if line.startswith(FORMULAS) else line


def one_line(text: str) -> str:
    """The text without line breaks and characters that cannot be printed."""
    return UNPRINTABLE.sub(" ", text).strip()
