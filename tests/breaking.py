"""Damage to files that suits their format; a random generator chooses the damage."""

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


def break_file(path: Path, rng: random.Random) -> None:
    """Damage a file at random, in bytes or in the terms of its format."""
    damages: list[Callable[[Path, random.Random], None]] = [_break_bytes]
    suffix = path.suffix if path.suffix != ".jsonl" else ".json"
    damages += {
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
    rng.choice(damages)(path, rng)


def _break_bytes(path: Path, rng: random.Random) -> None:
    content = bytearray(path.read_bytes())
    damage = rng.randrange(7)
    at = rng.randrange(len(content) + 1)
    if damage == 0:
        for _ in range(rng.choice((1, 3, 30))):
            place = rng.randrange(max(1, len(content)))
            content[place : place + 1] = bytes([rng.randrange(256)])
    elif damage == 1:
        del content[at:]
    elif damage == 2:
        del content[at : at + rng.choice((1, 8, 500))]
    elif damage == 3:
        content[at:at] = rng.randbytes(rng.choice((1, 8, 500)))
    elif damage == 4:
        content[at:at] = content[: rng.choice((8, 500))]
    elif damage == 5:
        content[:] = pickle.dumps(Malice(Path(MARK)))
    else:
        content[at : at + 8] = struct.pack("<Q", rng.choice((2**63, 2**40, 2**32 - 1, 0)))
    path.write_bytes(content)


def _break_table(path: Path, rng: random.Random) -> None:
    """Drop, repeat or rename columns, drop or repeat rows, or change types and values."""
    table = pq.read_table(path)
    place = rng.randrange(table.num_columns)
    name = table.column_names[place]
    column = table.column(place)
    damage = rng.randrange(9)
    if damage == 0:
        table = table.drop_columns([name])
    elif damage == 1:
        names = list(table.column_names)
        rng.shuffle(names)
        table = table.rename_columns(names)
    elif damage == 2:
        table = table.rename_columns(
            [rng.choice(WORDS) if each == name else each for each in table.column_names]
        )
    elif damage == 3:
        table = table.slice(0, rng.choice((0, 1)))
    elif damage == 4:
        table = pa.concat_tables([table, table])
    elif damage == 5:
        table = table.append_column(name, column)
    else:
        table = table.set_column(place, name, _other_values(column, rng))
    pq.write_table(table, path)


def _other_values(column: pa.ChunkedArray, rng: random.Random) -> pa.Array:
    n = len(column)
    kinds: list[Callable[[], pa.Array]] = [
        lambda: pa.nulls(n, column.type),
        lambda: pa.nulls(n),
        lambda: pa.array([rng.choice(WORDS[:40]) for _ in range(n)]),
        lambda: pa.array([float(rng.choice(NUMBERS)) for _ in range(n)]),
        lambda: pa.array([rng.choice((-1, 0, 2**31, 2**62)) for _ in range(n)]),
        lambda: pa.array([[1, 2]] * n),
        lambda: pa.array([{"a": 1}] * n),
        lambda: pa.array([b"\xff\x00"] * n),
        lambda: pa.array([True] * n),
        lambda: pa.array(["x"] * n).dictionary_encode(),
        lambda: pa.array([rng.randrange(2**62) for _ in range(n)], pa.timestamp("ns")),
        lambda: pa.array([rng.randrange(2**40) for _ in range(n)], pa.timestamp("us", "UTC")),
        lambda: pa.array([0] * n, pa.duration("s")),
        lambda: pa.array([1] * n).cast(pa.decimal128(38, 2)),
    ]
    return rng.choice(kinds)()


def _break_arrow(path: Path, rng: random.Random) -> None:
    """Replace numbers inside the buffers."""
    content = bytearray(path.read_bytes())
    for _ in range(rng.choice((1, 20))):
        at = rng.randrange(0, max(1, len(content) - 8)) // 4 * 4
        content[at : at + 4] = struct.pack("<i", rng.choice((-1, 2**31 - 1, 10**6, 0, 77)))
    path.write_bytes(content)


def _break_lines(path: Path, rng: random.Random) -> None:
    lines = path.read_text(encoding="latin-1").splitlines()
    separator = max(",;\t|", key=lines[min(8, len(lines) - 1)].count)
    for _ in range(rng.choice((1, 1, 5))):
        row = rng.choice((0, rng.randrange(len(lines))))
        cells = lines[row].split(separator)
        place = rng.randrange(len(cells))
        damage = rng.randrange(8)
        if damage < 4:
            cells[place] = rng.choice((*WORDS, *map(str, NUMBERS)))
        elif damage == 4:
            del cells[place]
        elif damage == 5:
            cells.insert(place, cells[place])
        elif damage == 6:
            rng.shuffle(cells)
        lines[row] = separator.join(cells)
        if damage == 7:
            lines[row] = rng.choice(("", '"', "\x00", separator * 5_000, lines[row] * 3))
    path.write_text(
        "\n".join(lines) + rng.choice(("\n", "", "\r\n", "\n\n\n")),
        encoding="utf-8",
        errors="replace",
    )


def _break_gzip(path: Path, rng: random.Random) -> None:
    if rng.random() < 0.4:  # a bomb: a quarter of a gigabyte without an end of line, or with many
        path.write_bytes(gzip.compress(rng.choice((b"x" * 2**20, b"a,b\n" * 2**18)) * 2**8, 1))
        return
    plain = path.with_name("plain.csv")
    plain.write_bytes(gzip.decompress(path.read_bytes()))
    _break_lines(plain, rng)
    path.write_bytes(gzip.compress(plain.read_bytes()))
    plain.unlink()


def _break_yaml(path: Path, rng: random.Random) -> None:
    text = path.read_text()
    damage = rng.randrange(3)
    if damage == 0:
        path.write_text(rng.choice(YAML))
    elif damage == 1:
        path.write_text(rng.choice((text + "\n", "")) + rng.choice(YAML))
    else:
        lines = text.splitlines()
        row = rng.randrange(len(lines))
        key = lines[row].split(":")[0]
        odd_values = ("[]", "{}", "[[1]]", "*x", "&x", "!!set {a}")
        lines[row] = f"{key}: {rng.choice((*WORDS, *map(str, NUMBERS), *odd_values))}"
        path.write_text("\n".join(lines), errors="replace")


def _break_json(path: Path, rng: random.Random) -> None:
    """Replace or delete one value."""
    text = path.read_text()
    lines = text.splitlines() if path.suffix == ".jsonl" else [text]
    row = rng.randrange(len(lines))
    if rng.random() < 0.1:
        lines[row] = rng.choice(
            ("[" * 100_000, '{"a":' * 50_000, "NaN", "null", "[]", "1" * 5_000, '"\\ud800"')
        )
    else:
        value = json.loads(lines[row])
        places = list(_places(value))
        parent, key = rng.choice(places)
        nasty = (*WORDS[:30], *NUMBERS, None, True, [], {}, [[]], {"": None}, [None] * 100)
        if rng.random() < 0.25:
            del parent[key]
        else:
            parent[key] = rng.choice(nasty)
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


def _break_tensors(path: Path, rng: random.Random) -> None:
    """Write wrong sizes, shapes, types, names or offsets into the header."""
    content = path.read_bytes()
    size = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + size])
    rest = content[8 + size :]
    damage = rng.randrange(6)
    if damage == 0:
        path.write_bytes(
            struct.pack("<Q", rng.choice((2**63, 2**40, size + 10**6, 1, 0))) + content[8:]
        )
        return
    name = rng.choice([each for each in header if each != "__metadata__"])
    if damage == 1:
        header[name]["shape"] = rng.choice(([2**62, 4], [-1], [10**9] * 4, [], [0], "x", [1.5]))
    elif damage == 2:
        header[name]["dtype"] = rng.choice(("F64", "I8", "BOOL", "BF16", "F128", "", 7))
    elif damage == 3:
        header[name]["data_offsets"] = rng.choice(([0, 2**62], [5, 1], [-8, 8], [0], "x"))
    elif damage == 4:
        header[rng.choice(WORDS[:30])] = header.pop(name)
    elif "__metadata__" in header:
        header["__metadata__"] = rng.choice(
            ({}, {"mobatlas": "{}"}, {"mobatlas": "[" * 50_000}, {"mobatlas": "null"})
        )
    else:
        values = np.frombuffer(rest, np.uint8).copy()
        values[:] = 255  # not a number, in every float
        rest = values.tobytes()
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + rest)
