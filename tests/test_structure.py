"""The checks of `make lint` that this repository brings itself."""

from __future__ import annotations

import ast

from scripts import check_structure
from scripts.check_structure import COPIED_LINES, ROOT, count_statements, find_copies

CODE = [f"value_{number} = compute({number})" for number in range(COPIED_LINES)]


def copies(first: list[str], second: list[str]) -> list[str]:
    sources = {ROOT / "a.py": "\n".join(first), ROOT / "b.py": "\n".join(second)}
    return list(find_copies(sources))


def test_ten_equal_lines_in_two_files_are_a_copy() -> None:
    assert copies(CODE, ["import os", *CODE]) == ["b.py:2: 10 lines are also at a.py:1"]


def test_nine_equal_lines_are_not_a_copy() -> None:
    assert copies(CODE, [*CODE[:-1], "value = 0"]) == []


def test_comments_blank_lines_and_indentation_do_not_hide_a_copy() -> None:
    spaced = [line for code in CODE for line in ("", "    # why", f"    {code}")]
    assert copies(CODE, ["def f() -> None:", *spaced])


def test_equal_docstrings_imports_and_signatures_are_not_a_copy() -> None:
    imports = [f"import module_{number}" for number in range(COPIED_LINES)]
    signature = ["def f(", *(f"    argument_{n}: int," for n in range(COPIED_LINES)), ") -> int:"]
    docstring = ['    """One', *(f"    line {n}" for n in range(COPIED_LINES)), '    """']
    module = [*imports, *signature, *docstring]
    assert copies([*module, "    return 1"], [*module, "    return 2"]) == []


def test_docstrings_are_not_statements() -> None:
    source = '"""Module."""\ndef f():\n    """Function."""\n    return 1\n'
    assert count_statements(ast.parse(source)) == 2


def test_identifiers_with_a_word_to_avoid_are_named() -> None:
    trees = {ROOT / "a.py": ast.parse("def what_regions_told(heldOut): return RegionLives")}
    assert [line.split()[3] for line in check_structure._identifiers(trees)] == [
        "RegionLives",
        "what_regions_told",
    ]
