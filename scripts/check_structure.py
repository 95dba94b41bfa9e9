"""Check the limits on size and names that ruff and mypy cannot check; `make lint` runs it."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TypeGuard

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "mobatlas"
MAX_STATEMENTS = 16_430
MAX_MODULES = 130
MAX_TOP_LEVEL = 8  # modules beside the packages
MAX_FUNCTION_LINES = 60
MAX_PARAMETERS = 7
MAX_WIDE_FUNCTIONS = 8  # functions outside cli with more parameters than that
COPIED_LINES = 10  # the shortest run of equal lines that counts as a copy
AVOID = (
    "told",
    "manner",
    "begun",
    "heard",
    "meddled",
    "taste",
    "tastes",
    "nearness",
    "crowd",
    "yardstick",
    "whoever",
    "nobody",
    "untaught",
    "lives",
    "way_of",
    "made_by",
)
Function = ast.FunctionDef | ast.AsyncFunctionDef


def main() -> int:
    """Print every breach and return the exit code."""
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(_sources())}
    package = {path: tree for path, tree in trees.items() if path.is_relative_to(PACKAGE)}
    breaches = [
        *_sizes(package),
        *_functions(package),
        *_identifiers(trees),
        *find_copies({path: path.read_text(encoding="utf-8") for path in package}),
    ]
    for breach in breaches:
        print(breach)  # noqa: T201
    return 1 if breaches else 0


def _sources() -> Iterator[Path]:
    for folder in ("src", "tests", "bench", "scripts"):
        yield from (ROOT / folder).rglob("*.py")


def _sizes(package: dict[Path, ast.Module]) -> Iterator[str]:
    statements = sum(map(count_statements, package.values()))
    # `__main__` and `__init__` of the package count as well.
    top_level = [path for path in package if path.parent == PACKAGE]
    for name, count, limit in (
        ("statements", statements, MAX_STATEMENTS),
        ("modules", len(package), MAX_MODULES),
        ("top-level modules", len(top_level), MAX_TOP_LEVEL),
    ):
        if count > limit:
            yield f"src/mobatlas: {count:,} {name}; the limit is {limit:,}"


def count_statements(tree: ast.Module) -> int:
    """Count the statements of a module without its docstrings."""
    return sum(isinstance(node, ast.stmt) and not _is_string(node) for node in ast.walk(tree))


def _is_string(node: ast.AST) -> TypeGuard[ast.Expr]:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def _functions(package: dict[Path, ast.Module]) -> Iterator[str]:
    wide = []
    for path, tree in package.items():
        for node in ast.walk(tree):
            if not isinstance(node, Function):
                continue
            place = f"{path.relative_to(ROOT)}:{node.lineno}: {node.name}"
            is_command = path.is_relative_to(PACKAGE / "cli")
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > MAX_FUNCTION_LINES:
                yield f"{place} has {lines} lines; the limit is {MAX_FUNCTION_LINES}"
            if _parameters(node) > MAX_PARAMETERS and not is_command:
                wide.append(f"{place} has {_parameters(node)} parameters")
    if len(wide) > MAX_WIDE_FUNCTIONS:
        yield (
            f"{len(wide)} functions have more than {MAX_PARAMETERS} parameters; "
            f"the limit is {MAX_WIDE_FUNCTIONS}"
        )
        yield from wide


def _parameters(node: Function) -> int:
    arguments = node.args
    names = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return sum(each.arg not in ("self", "cls") for each in names)


def _identifiers(trees: dict[Path, ast.Module]) -> Iterator[str]:
    avoid = re.compile(rf"(?:^|_)(?:{'|'.join(AVOID)})(?:_|$)")
    for path, tree in trees.items():
        words = {name for node in ast.walk(tree) for name in _names(node)} | {path.stem}
        for name in sorted(words):
            spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
            if avoid.search(spaced):
                yield f"{path.relative_to(ROOT)}: the identifier {name} has a word to avoid"


def find_copies(sources: dict[Path, str]) -> Iterator[str]:
    """Name every second place of `COPIED_LINES` equal lines of code."""
    first_place: dict[tuple[str, ...], str] = {}
    for path, source in sources.items():
        lines = list(_code_lines(source))
        position = 0
        while position + COPIED_LINES <= len(lines):
            window = tuple(text for _, text in lines[position : position + COPIED_LINES])
            place = f"{path.relative_to(ROOT)}:{lines[position][0]}"
            if window in first_place:
                yield f"{place}: {COPIED_LINES} lines are also at {first_place[window]}"
                position += COPIED_LINES
            else:
                first_place[window] = place
                position += 1


def _code_lines(source: str) -> Iterator[tuple[int, str]]:
    """Yield the lines of code with their numbers, without docstrings, imports and signatures."""
    ignored: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom) or _is_string(node):
            ignored.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        if isinstance(node, Function):
            ignored.update(range(node.lineno, node.body[0].lineno))
    for number, line in enumerate(source.splitlines(), 1):
        text = line.strip()
        if text and not text.startswith("#") and number not in ignored:
            yield number, text


def _names(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
            yield name
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            yield name
        case ast.keyword(arg=str(name)):
            yield name


if __name__ == "__main__":
    sys.exit(main())
