"""Tables survive every name and number, in each of their forms."""

from __future__ import annotations

import csv
import io
import json
import math
import re
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from markdown_it.token import Token

from bench.report.files import as_dict, as_latex, as_markdown, write_tables
from mobatlas.report.tables import Table

ODD = [
    "<30, M",
    ">50 & co_",
    r"\input{x} 100 %",
    "[b]*",
    "a|b",
    "`x` ~y~ **z**",
    "{$#^}",
    "&amp; <b>",
    "two\nlines",
    "\\",
]
# What may stand in a LaTeX cell: a letter, a command for a sign, an escaped sign, or one in braces.
SIGNS = {
    r"\textbackslash{}": "\\",
    r"\textasciitilde{}": "~",
    r"\textasciicircum{}": "^",
    r"\textasciigrave{}": "`",
    r"\textless{}": "<",
    r"\textgreater{}": ">",
    r"\textbar{}": "|",
    "$-$": "\N{MINUS SIGN}",
    **{f"\\{sign}": sign for sign in "&%$#_{}"},
    **{f"{{{sign}}}": sign for sign in "[*"},
}
LATEX = re.compile("|".join(map(re.escape, SIGNS)) + r"|[^\\{}$&#%_^~`<>|*\[]")
names = (
    st.text(max_size=12)
    | st.sampled_from(ODD)
    | st.text(alphabet="\\{}[]()<>|&%$#_*^~`\"'!-. \n\ta1", max_size=12)
)
cells = names | st.none() | st.integers(-(10**9), 10**9) | st.floats()
tables = st.integers(1, 4).flatmap(
    lambda width: st.tuples(
        st.lists(names, min_size=width, max_size=width),
        st.lists(st.lists(cells, min_size=width, max_size=width), max_size=4),
    )
)


def built(columns: list[str], rows: list[list[Any]], **more: Any) -> Table:
    return Table(tuple(columns), tuple(map(tuple, rows)), **more)


def seen(text: str) -> str:
    """What a reader sees of a text on one line."""
    return re.sub(r"[\s\x00-\x1f\x7f-\x9f]+", " ", text).strip()


def inert(cell: Any) -> str:
    """A cell of CSV: an apostrophe precedes a name that a spreadsheet would compute."""
    text = seen(str(cell))
    return f"'{text}" if isinstance(cell, str) and text[:1] in {"=", "+", "-", "@"} else text


def shown(table: Table, missing: str) -> list[list[str]]:
    return [[seen(cell) for cell in row] for row in ([*table.columns], *table.texts(missing))]


def rendered(table: Table) -> list[list[str]]:
    """The cells that a Markdown reader makes of it: their text, if they hold nothing but text."""
    parsed = MarkdownIt("commonmark").enable(["table", "strikethrough"]).parse(as_markdown(table))
    inside = [token for token in parsed if token.type in ("tr_open", "inline")]
    rows: list[list[str]] = []
    for token in inside:
        if token.type == "tr_open":
            rows.append([])
        else:
            children: list[Token] = token.children or []
            assert {child.type for child in children} <= {"text", "text_special"}, token.content
            rows[-1].append("".join(child.content for child in children))
    return rows


def typeset(cell: str) -> str:
    """The letters that LaTeX makes of a cell; fails on a sign that would do something."""
    pieces = LATEX.findall(cell)
    assert "".join(pieces) == cell, cell
    return "".join(SIGNS.get(piece, piece) for piece in pieces)


@given(tables)
def test_markdown_shows_every_name_as_it_is(content: tuple[list[str], list[list[Any]]]) -> None:
    table = built(*content)
    assert rendered(table) == shown(table, "-")


@given(tables)
def test_latex_shows_every_name_as_it_is(content: tuple[list[str], list[list[Any]]]) -> None:
    table = built(*content)
    lines = as_latex(table, "x").splitlines()
    body = [
        line
        for line in lines[lines.index(r"\toprule") + 1 : lines.index(r"\bottomrule")]
        if line != r"\midrule"
    ]
    expected = shown(table, "--")
    assert len(body) == len(expected)
    for line, row in zip(body, expected, strict=True):
        assert line.endswith(r" \\")
        parts = re.split(r"(?<!\\) ?& ?|(?<!\\)&", line.removesuffix(r" \\"))
        assert [typeset(part).strip() for part in parts] == row


@given(tables)
def test_csv_and_json_keep_names_and_numbers(content: tuple[list[str], list[list[Any]]]) -> None:
    table = built(*content)
    known: list[list[Any]] = [
        [None if isinstance(cell, float) and not math.isfinite(cell) else cell for cell in row]
        for row in content[1]
    ]
    result = json.loads(json.dumps(as_dict(table), allow_nan=False))
    assert (result["columns"], result["rows"]) == (content[0], known)
    read = list(csv.reader(io.StringIO(table.as_csv(), newline="")))
    texts = [["" if cell is None else inert(cell) for cell in row] for row in [content[0], *known]]
    assert read == texts and table.as_csv().count("\n") == len(texts)


def test_a_table_in_its_four_forms(tmp_path: Path) -> None:
    table = built(
        ["group", "n", "JSD", "closed"],
        [
            ["<30, M", 1_200, 0.12345, 0.5],
            ["all", None, math.nan, -0.251],
            ["none", 3, -0.0001, None],
        ],
        caption="JSD, 95 %",
        formats={"closed": ".0%"},
        note="closed: of the way.",
    )
    write_tables(tmp_path, {"jsd": table})
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "jsd.csv",
        "jsd.json",
        "jsd.md",
        "jsd.tex",
    ]
    assert (tmp_path / "jsd.csv").read_text() == (
        'group,n,JSD,closed\n"<30, M",1200,0.12345,0.5\nall,,,-0.251\nnone,3,-0.0001,\n'
    )
    assert (tmp_path / "jsd.md").read_text() == (
        "JSD, 95 %\n\n| group | n | JSD | closed |\n| --- | ---: | ---: | ---: |\n"
        "| \\<30, M | 1,200 | 0.123 | 50% |\n"
        "| all | - | - | \N{MINUS SIGN}25% |\n| none | 3 | 0.000 | - |\n\nclosed: of the way.\n"
    )
    assert (tmp_path / "jsd.tex").read_text() == "\n".join(
        [
            r"% \usepackage{booktabs}",
            r"\begin{table}[t]",
            r"\centering",
            r"\caption{JSD, 95 \% closed: of the way.}",
            r"\label{tab:jsd}",
            r"\begin{tabular}{lrrr}",
            r"\toprule",
            r"group & n & JSD & closed \\",
            r"\midrule",
            r"\textless{}30, M & 1,200 & 0.123 & 50\% \\",
            r"all & -- & -- & $-$25\% \\",
            r"none & 3 & 0.000 & -- \\",
            r"\bottomrule",
            r"\end{tabular}",
            r"\end{table}",
            "",
        ]
    )
    result = json.loads((tmp_path / "jsd.json").read_text())
    assert result["rows"][1] == ["all", None, None, -0.251] and result["caption"] == "JSD, 95 %"
