"""Ways to break a file that suit its form, each drawn by dice that are given."""

from __future__ import annotations

import gzip
import json
import pickle
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tests.malice import Malice

MARK = "mobatlas_was_here"
RUNS = f"__import__('pathlib').Path('{MARK}').touch()"
NUMBERS: tuple[Any, ...] = (
    -1,
    0,
    2**31,
    2**63,
    -(2**63),
    10**30,
    1e308,
    -1e308,
    1e-320,
    float("inf"),
    float("nan"),
)
WORDS = (
    *(
        "",
        " ",
        "NaN",
        "null",
        "true",
        "inf",
        "1e999",
        "-0",
        "0x1F",
        "1_000",
        "२",
        "2024-02-30",
        "9999-12-31 23:59:59",
    ),
    *(
        "0001-01-01",
        "2024-03-04T08:00:00Z",
        "<script>alert(1)</script>",
        "=cmd|' /C calc'!A0",
        "'; DROP TABLE visits; --",
    ),
    *(
        f"'); COPY (SELECT 1) TO '{MARK}'; --",
        RUNS,
        "../../../etc/passwd",
        "/dev/zero",
        "a\x00b",
        "\u202e\ufeff",
        "é" * 3,
    ),
    *(
        "x" * 100_000,
        "1" * 5_000,
        "HOME",
        "<pad>",
        "%s%n{0}${x}",
        '"',
        "'",
        "\\",
        "\ud7ff",
        "\U0001d54f",
    ),
)
BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{chr(98 + n)}: &{chr(98 + n)} [{','.join(['*' + chr(97 + n)] * 9)}]\n" for n in range(9)
)
ALIASES = (  # harmless
    "train: {options: {x: &x [1, 1]}}\n"
    f"supervise: {{options: {{y: [{', '.join(['*x'] * 50)}]}}}}\n"
)
YAML = (
    BOMB,
    ALIASES,
    "train:\n  options:\n    k0: &k0 [1]\n"
    + "".join(f"    k{n}: &k{n} {{a: *k{n - 1}, b: *k{n - 1}}}\n" for n in range(1, 40)),
    "train: &t\n  options: *t\n",
    "[" * 3_000,
    "{a: " * 3_000,
    "- " * 20_000,
    f"seed: !!python/object/apply:os.system ['touch {MARK}']\n",
    f"title: !!python/object/new:type [{MARK}, [], {{}}]\n",
    "seed: 2024-13-45\n",
    "seed: !!int x\n",
    "seed: !!bool x\n",
    "seed: !!timestamp x\n",
    "seed: !!float []\n",
    "seed: !!binary x\n",
    "seed: " + "9" * 5_000 + "\n",
    "? [a, b]\n: 1\n",
    "? {a: b}\n: 1\n",
    "%YAML 9.9\n---\nseed: 1\n",
    "seed: 1\n---\nseed: 2\n",
    "title: 'never ends",
    "\x00",
    "<<: 1\n",
    "<<: [*a]\n",
)


def break_file(path: Path, dice: random.Random) -> None:
    """In one of the ways that suit it."""
    ways: list[Callable[[Path, random.Random], None]] = [_break_bytes]
    suffix = path.suffix if path.suffix != ".jsonl" else ".json"
    ways += {
        ".parquet": [_break_table] * 4,
        ".arrow": [_break_arrow] * 2,
        ".csv": [_break_lines] * 4,
        ".txt": [_break_lines] * 4,
        ".plt": [_break_lines] * 4,
        ".gz": [_break_gzip] * 4,
        ".yaml": [_break_yaml] * 3,
        ".json": [_break_json] * 5,
        ".safetensors": [_break_tensors] * 4,
    }.get(suffix, [])
    dice.choice(ways)(path, dice)


def _break_bytes(path: Path, dice: random.Random) -> None:
    content = bytearray(path.read_bytes())
    way = dice.randrange(7)
    at = dice.randrange(len(content) + 1)
    if way == 0:
        for _ in range(dice.choice((1, 3, 30))):
            place = dice.randrange(max(1, len(content)))
            content[place : place + 1] = bytes([dice.randrange(256)])
    elif way == 1:
        del content[at:]
    elif way == 2:
        del content[at : at + dice.choice((1, 8, 500))]
    elif way == 3:
        content[at:at] = dice.randbytes(dice.choice((1, 8, 500)))
    elif way == 4:
        content[at:at] = content[: dice.choice((8, 500))]
    elif way == 5:
        content[:] = pickle.dumps(Malice(Path(MARK)))
    else:
        content[at : at + 8] = struct.pack("<Q", dice.choice((2**63, 2**40, 2**32 - 1, 0)))
    path.write_bytes(content)


def _break_table(path: Path, dice: random.Random) -> None:
    """Columns go, change places, names, types or values."""
    table = pq.read_table(path)
    place = dice.randrange(table.num_columns)
    name, column = table.column_names[place], table.column(place)
    way = dice.randrange(9)
    if way == 0:
        table = table.drop_columns([name])
    elif way == 1:
        names = list(table.column_names)
        dice.shuffle(names)
        table = table.rename_columns(names)
    elif way == 2:
        table = table.rename_columns(
            [dice.choice(WORDS) if each == name else each for each in table.column_names]
        )
    elif way == 3:
        table = table.slice(0, dice.choice((0, 1)))
    elif way == 4:
        table = pa.concat_tables([table, table])
    elif way == 5:
        table = table.append_column(name, column)
    else:
        table = table.set_column(place, name, _other_values(column, dice))
    pq.write_table(table, path)


def _other_values(column: pa.ChunkedArray, dice: random.Random) -> pa.Array:
    n = len(column)
    kinds: list[Callable[[], pa.Array]] = [
        lambda: pa.nulls(n, column.type),
        lambda: pa.nulls(n),
        lambda: pa.array([dice.choice(WORDS[:40]) for _ in range(n)]),
        lambda: pa.array([float(dice.choice(NUMBERS)) for _ in range(n)]),
        lambda: pa.array([dice.choice((-1, 0, 2**31, 2**62)) for _ in range(n)]),
        lambda: pa.array([[1, 2]] * n),
        lambda: pa.array([{"a": 1}] * n),
        lambda: pa.array([b"\xff\x00"] * n),
        lambda: pa.array([True] * n),
        lambda: pa.array(["x"] * n).dictionary_encode(),
        lambda: pa.array([dice.randrange(2**62) for _ in range(n)], pa.timestamp("ns")),
        lambda: pa.array([dice.randrange(2**40) for _ in range(n)], pa.timestamp("us", "UTC")),
        lambda: pa.array([0] * n, pa.duration("s")),
        lambda: pa.array([1] * n).cast(pa.decimal128(38, 2)),
    ]
    return dice.choice(kinds)()


def _break_arrow(path: Path, dice: random.Random) -> None:
    """Numbers inside the buffers, where only they can be wrong."""
    content = bytearray(path.read_bytes())
    for _ in range(dice.choice((1, 20))):
        at = dice.randrange(0, max(1, len(content) - 8)) // 4 * 4
        content[at : at + 4] = struct.pack("<i", dice.choice((-1, 2**31 - 1, 10**6, 0, 77)))
    path.write_bytes(content)


def _break_lines(path: Path, dice: random.Random) -> None:
    lines = path.read_text(encoding="latin-1").splitlines()
    separator = max(",;\t|", key=lines[min(8, len(lines) - 1)].count)
    for _ in range(dice.choice((1, 1, 5))):
        row = dice.choice((0, dice.randrange(len(lines))))
        cells = lines[row].split(separator)
        place = dice.randrange(len(cells))
        way = dice.randrange(8)
        if way < 4:
            cells[place] = dice.choice((*WORDS, *map(str, NUMBERS)))
        elif way == 4:
            del cells[place]
        elif way == 5:
            cells.insert(place, cells[place])
        elif way == 6:
            dice.shuffle(cells)
        lines[row] = separator.join(cells)
        if way == 7:
            lines[row] = dice.choice(("", '"', "\x00", separator * 5_000, lines[row] * 3))
    path.write_text(
        "\n".join(lines) + dice.choice(("\n", "", "\r\n", "\n\n\n")),
        encoding="utf-8",
        errors="replace",
    )


def _break_gzip(path: Path, dice: random.Random) -> None:
    if dice.random() < 0.4:  # a bomb: a quarter of a gigabyte without an end of line, or with many
        path.write_bytes(gzip.compress(dice.choice((b"x" * 2**20, b"a,b\n" * 2**18)) * 2**8, 1))
        return
    plain = path.with_name("plain.csv")
    plain.write_bytes(gzip.decompress(path.read_bytes()))
    _break_lines(plain, dice)
    path.write_bytes(gzip.compress(plain.read_bytes()))
    plain.unlink()


def _break_yaml(path: Path, dice: random.Random) -> None:
    text = path.read_text()
    way = dice.randrange(3)
    if way == 0:
        path.write_text(dice.choice(YAML))
    elif way == 1:
        path.write_text(dice.choice((text + "\n", "")) + dice.choice(YAML))
    else:
        lines = text.splitlines()
        row = dice.randrange(len(lines))
        key = lines[row].split(":")[0]
        odd_values = ("[]", "{}", "[[1]]", "*x", "&x", "!!set {a}")
        lines[row] = f"{key}: {dice.choice((*WORDS, *map(str, NUMBERS), *odd_values))}"
        path.write_text("\n".join(lines), errors="replace")


def _break_json(path: Path, dice: random.Random) -> None:
    """One value somewhere becomes another, or goes."""
    text = path.read_text()
    lines = text.splitlines() if path.suffix == ".jsonl" else [text]
    row = dice.randrange(len(lines))
    if dice.random() < 0.1:
        lines[row] = dice.choice(
            ("[" * 100_000, '{"a":' * 50_000, "NaN", "null", "[]", "1" * 5_000, '"\\ud800"')
        )
    else:
        value = json.loads(lines[row])
        places = list(_places(value))
        parent, key = dice.choice(places)
        nasty = (*WORDS[:30], *NUMBERS, None, True, [], {}, [[]], {"": None}, [None] * 100)
        if dice.random() < 0.25:
            del parent[key]
        else:
            parent[key] = dice.choice(nasty)
        lines[row] = json.dumps(value)
    path.write_text("\n".join(lines), errors="replace")


def _places(value: Any) -> Any:
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, each in list(items):
        yield value, key
        yield from _places(each)


def _break_tensors(path: Path, dice: random.Random) -> None:
    """The header lies: sizes, shapes, types, names, offsets."""
    content = path.read_bytes()
    size = struct.unpack("<Q", content[:8])[0]
    header, rest = json.loads(content[8 : 8 + size]), content[8 + size :]
    way = dice.randrange(6)
    if way == 0:
        path.write_bytes(
            struct.pack("<Q", dice.choice((2**63, 2**40, size + 10**6, 1, 0))) + content[8:]
        )
        return
    name = dice.choice([each for each in header if each != "__metadata__"])
    if way == 1:
        header[name]["shape"] = dice.choice(([2**62, 4], [-1], [10**9] * 4, [], [0], "x", [1.5]))
    elif way == 2:
        header[name]["dtype"] = dice.choice(("F64", "I8", "BOOL", "BF16", "F128", "", 7))
    elif way == 3:
        header[name]["data_offsets"] = dice.choice(([0, 2**62], [5, 1], [-8, 8], [0], "x"))
    elif way == 4:
        header[dice.choice(WORDS[:30])] = header.pop(name)
    elif "__metadata__" in header:
        header["__metadata__"] = dice.choice(
            ({}, {"mobatlas": "{}"}, {"mobatlas": "[" * 50_000}, {"mobatlas": "null"})
        )
    else:
        values = np.frombuffer(rest, np.uint8).copy()
        values[:] = 255  # not a number, in every float
        rest = values.tobytes()
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + rest)
