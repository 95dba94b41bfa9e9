"""Tables as files: CSV, Markdown, LaTeX and JSON."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mobatlas.io.manifest import write_json
from mobatlas.report.tables import MINUS, Table, finite, one_line

# A bracket or a star after the \\ of the row before would be read as its argument.
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


def as_markdown(table: Table) -> str:
    """GitHub's Markdown."""
    rule = ["---:" if numeric else "---" for numeric in table.numeric]
    head, *body = (
        [_escape(cell, MARKDOWN) for cell in row] for row in (table.columns, *table.texts())
    )
    body_text = "".join(f"| {' | '.join(line)} |\n" for line in (head, rule, *body))
    caption, note = (_escape(text, MARKDOWN) for text in (table.caption, table.note))
    return "\n".join(
        part for part in (caption and f"{caption}\n", body_text, note and f"{note}\n") if part
    )


def as_latex(table: Table, label: str = "") -> str:
    """LaTeX with the rules of booktabs."""
    head, *body = (
        " & ".join(_escape(cell, LATEX) for cell in row) + r" \\"
        for row in (table.columns, *table.texts(missing="--"))
    )
    caption = _escape(f"{table.caption} {table.note}", LATEX)
    lines = [
        r"% \usepackage{booktabs}",
        r"\begin{table}[t]",
        r"\centering",
        *([rf"\caption{{{caption}}}"] if caption else []),
        *([rf"\label{{tab:{label}}}"] if label else []),
        rf"\begin{{tabular}}{{{''.join('r' if numeric else 'l' for numeric in table.numeric)}}}",
        r"\toprule",
        head,
        r"\midrule",
        *body,
        r"\bottomrule",
        r"\end{tabular}",
        r"\end{table}",
    ]
    return "\n".join(lines) + "\n"


def as_dict(table: Table) -> dict[str, Any]:
    """All digits, for JSON."""
    return {
        "caption": table.caption,
        "columns": list(table.columns),
        "rows": [[finite(cell) for cell in row] for row in table.rows],
        "note": table.note,
    }


def write_tables(folder: Path, tables: Mapping[str, Table]) -> None:
    """Write each table as NAME.csv, NAME.md, NAME.tex and NAME.json.

    Parameters
    ----------
    folder
        An existing folder.
    tables
        Name -> table.
    """
    for name, table in tables.items():
        texts = {"csv": table.as_csv(), "md": as_markdown(table), "tex": as_latex(table, name)}
        for suffix, text in texts.items():
            (folder / f"{name}.{suffix}").write_text(text, encoding="utf-8", newline="")
        write_json(folder / f"{name}.json", as_dict(table))


def _escape(text: str, signs: Mapping[str, str]) -> str:
    return "".join(signs.get(character, character) for character in one_line(text))
