"""Hostile files: valid ones of every format that we read, broken in many ways and given to the commands that read them.

A case is a target and a number, and always the same. `python -m tests.fuzz` goes through many and writes a tally.
"""

from __future__ import annotations

import argparse
import gzip
import json
import pickle
import random
import shutil
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pacsv
import pyarrow.parquet as pq

from mobatlas.artifacts import file_hash, library_versions, write_json
from tests.commands import Outcome
from tests.faults import COMMANDS, LITTLE_MEMORY, World, leftovers, samples, tiny_world, watched
from tests.malice import Malice
from tests.samples import SAMPLES

MARK = "mobatlas_was_here"
MEMORY = 2 * 2**30  # bytes, on top of what a warm process holds
SECONDS = 60  # of a processor
FAULTY = 99
# In the process of the command: limits, and an end as soon as a file makes it run something.
GUARD = (
    LITTLE_MEMORY
    + """
import os, sys
resource.setrlimit(resource.RLIMIT_CPU, ({seconds}, {seconds}))
os.chdir({here!r})
def guard(event, given):
    ran = event in ("pickle.find_class", "os.system", "subprocess.Popen", "os.exec", "os.posix_spawn", "socket.connect")
    if ran or (event == "compile" and {mark!r} in str(given[0])):
        os.write(2, ("a file ran " + event + " " + str(given)[:200] + chr(10)).encode())
        os._exit({faulty})
sys.addaudithook(guard)
"""
)
RUNS = f"__import__('pathlib').Path('{MARK}').touch()"
NUMBERS: tuple[Any, ...] = (-1, 0, 2**31, 2**63, -(2**63), 10**30, 1e308, -1e308, 1e-320, float("inf"), float("nan"))
WORDS = (
    *("", " ", "NaN", "null", "true", "inf", "1e999", "-0", "0x1F", "1_000", "२", "2024-02-30", "9999-12-31 23:59:59"),
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
    *("x" * 100_000, "1" * 5_000, "HOME", "<pad>", "%s%n{0}${x}", '"', "'", "\\", "\ud7ff", "\U0001d54f"),
)
BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{chr(98 + n)}: &{chr(98 + n)} [{','.join(['*' + chr(97 + n)] * 9)}]\n" for n in range(9)
)
ALIASES = (
    f"train: {{options: {{x: &x [1, 1]}}}}\nsupervise: {{options: {{y: [{', '.join(['*x'] * 50)}]}}}}\n"  # no harm
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

MEASURE = (
    "cases: files broken in one way each; accepted: exit code 0; refused: exit code 2 and one sentence; seconds and peak_mb: "
    "the most of one case; faults: anything else, be it a traceback, a hang, a crash, code that ran or a file that was left"
)


@dataclass(frozen=True)
class Target:
    """Files of one form in a folder, one of which is broken, and the command that reads them."""

    name: str
    lay: Callable[[World, Path], list[Path]]  # writes them into a folder; which may be broken
    command: Callable[[World, Path], list[object]]
    rehash: str | None = None  # the folder whose manifest is made to list the broken file as if it were right


@dataclass
class Tally:
    """What came of the cases of a target."""

    cases: int = 0
    accepted: int = 0
    refused: int = 0
    seconds: float = 0.0  # the slowest, of a processor
    peak_mb: float = 0.0
    faults: list[str] = field(default_factory=list)

    def count(self, outcome: Outcome) -> None:
        self.cases += 1
        self.accepted += outcome.code == 0
        self.refused += outcome.code == 2
        self.seconds = round(max(self.seconds, outcome.seconds), 2)
        self.peak_mb = round(max(self.peak_mb, outcome.peak_mb))


def _copy(*names: str) -> Callable[[World, Path], list[Path]]:
    """Folders or files of the finished run; any of their files may be broken."""

    def lay(world: World, here: Path) -> list[Path]:
        found = []
        for name in names:
            source, target = world.run / name, here / Path(name).name
            if source.is_dir():
                shutil.copytree(source, target)
                found += [path for path in target.rglob("*") if path.is_file() and path.name != "manifest.json"]
            else:
                shutil.copyfile(source, target)
                found.append(target)
        return sorted(found)

    return lay


def _manifest_of(name: str) -> Callable[[World, Path], list[Path]]:
    def lay(world: World, here: Path) -> list[Path]:
        shutil.copytree(world.run / name, here / Path(name).name)
        return [here / Path(name).name / "manifest.json"]

    return lay


def _city(suffix: str) -> Callable[[World, Path], list[Path]]:
    """The tables of a few people."""

    def lay(world: World, here: Path) -> list[Path]:
        (here / "city").mkdir()
        files = []
        for name in ("visits", "people", "pois"):
            table = pq.read_table(world.run / "city" / f"{name}.parquet")
            if "user_id" in table.column_names:
                keep = sorted(set(table["user_id"].to_pylist()))[:12]
                table = table.filter(pc.is_in(table["user_id"], pa.array(keep)))
            path = here / "city" / f"{name}{suffix}"
            if suffix == ".parquet":
                pq.write_table(table, path)
            else:
                pacsv.write_csv(table, here / "plain.csv")
                content = (here / "plain.csv").read_bytes()
                path.write_bytes(gzip.compress(content) if suffix.endswith(".gz") else content)
                (here / "plain.csv").unlink()
            files.append(path)
        return files

    return lay


def _published(suffix: str) -> Callable[[World, Path], list[Path]]:
    """A census and a published table of aggregates."""

    def lay(world: World, here: Path) -> list[Path]:
        shutil.copytree(world.run / "dataset", here / "dataset")
        for name in ("composition", "aggregates"):
            table = pq.read_table(world.run / "regions" / "demogroups" / f"{name}.parquet")
            if suffix == ".csv":
                pacsv.write_csv(table, here / f"{name}.csv")
            else:
                pq.write_table(table, here / f"{name}.parquet")
        return [here / f"composition{suffix}", here / f"aggregates{suffix}"]

    return lay


def _anchors(suffix: str) -> Callable[[World, Path], list[Path]]:
    def lay(world: World, here: Path) -> list[Path]:
        table = pq.read_table(world.run / "dataset" / "people.parquet").slice(0, 8)
        table = table.select(["home_lat", "home_lon", "work_lat", "work_lon"])
        path = here / f"anchors{suffix}"
        if suffix == ".csv":
            pacsv.write_csv(table, path)
        else:
            pq.write_table(table, path)
        return [path]

    return lay


def _source(name: str) -> Callable[[World, Path], list[Path]]:
    """A sample of a reader in its published layout."""

    def lay(_: World, here: Path) -> list[Path]:
        folder = here / "source"
        folder.mkdir()
        SAMPLES[name](folder)
        return sorted(path for path in folder.rglob("*") if path.is_file())

    return lay


def _configuration(world: World, here: Path) -> list[Path]:
    shutil.copyfile(world.config, here / "run.yaml")
    return [here / "run.yaml"]


def _half_trained(world: World, here: Path) -> list[Path]:
    """A model that a kill left with a checkpoint; made once."""
    half = world.root / "half"
    command = COMMANDS["train"]
    for at in range(8, 40):
        if any((half / "out" / "training").glob("*.safetensors")):
            break
        half.mkdir(exist_ok=True)
        world.warm.run(*command.line(world, half, "--resume"), before=watched(half, at))
    shutil.copytree(half, here / "half")
    return sorted((here / "half" / "out" / "training").glob("*.safetensors"))


def _run_files(world: World, here: Path) -> list[Path]:
    shutil.copytree(world.run, here / "run")
    (here / "run" / "report.html").unlink()
    names = ("run.json", "evaluation/demogroups.json", "audit/demogroups.json", "baseline/metrics.jsonl")
    return [here / "run" / name for name in names]


def _generate(_: World, here: Path) -> list[object]:
    return ["generate", here / "demogroups", "--n", 8, "--group", "F", "--calibrate", "--out", here / "out.parquet"]


def _prepare(name: str, form: str) -> Callable[[World, Path], list[object]]:
    def command(world: World, here: Path) -> list[object]:
        config = (
            ["--config", world.config] if form == "plain" else ["--set", "window.days=1", "--set", "window.stride=1"]
        )
        return ["prepare", here / name, "--format", form, *config, "--out", here / "out", "--quiet"]

    return command


def _regions(suffix: str) -> Callable[[World, Path], list[object]]:
    def command(_: World, here: Path) -> list[object]:
        tables = ["--composition", here / f"composition{suffix}", "--aggregates", here / f"aggregates{suffix}"]
        return ["regions", here / "dataset", *tables, "--out", here / "out"]

    return command


def _evaluate(world: World, here: Path) -> list[object]:
    dataset = here / "dataset" if (here / "dataset").exists() else world.run / "dataset"
    ours = here / "demogroups.parquet" if (here / "demogroups.parquet").exists() else samples(world)
    return ["evaluate", ours, "--dataset", dataset, "--out", here / "out"]


TARGETS = {
    target.name: target
    for target in (
        Target("parquet: visits, people, pois", _city(".parquet"), _prepare("city", "plain")),
        Target("parquet: composition, aggregates", _published(".parquet"), _regions(".parquet")),
        Target("parquet: samples", _copy("samples/demogroups.parquet"), _evaluate),
        Target("parquet: dataset folder", _copy("dataset"), _evaluate, rehash="dataset"),
        Target(
            "parquet: regions folder",
            _copy("regions/demogroups"),
            lambda _, here: ["diagnose", here / "demogroups"],
            rehash="demogroups",
        ),
        Target("csv: visits, people, pois", _city(".csv"), _prepare("city", "plain")),
        Target("csv: compressed", _city(".csv.gz"), _prepare("city", "plain")),
        Target("csv: composition, aggregates", _published(".csv"), _regions(".csv")),
        Target(
            "csv: anchors",
            _anchors(".csv"),
            lambda w, here: [
                *("generate", w.run / "baseline", "--anchors", here / "anchors.csv", "--out", here / "out.parquet")
            ],
        ),
        *(
            Target(f"{form}: {name}", _source(name), _prepare("source", name))
            for name, form in (
                ("embee", "csv"),
                ("veraset", "csv"),
                ("foursquare", "csv"),
                ("yjmob100k", "csv"),
                ("geolife", "plt"),
            )
        ),
        Target(
            "yaml: configuration",
            _configuration,
            lambda _, here: ["prepare", here / "nowhere", "--config", here / "run.yaml", "--out", here / "out"],
        ),
        Target(
            "yaml: run",
            _configuration,
            lambda _, here: ["train", here / "nowhere", "--config", here / "run.yaml", "--out", here / "out"],
        ),
        Target(
            "json: run, evaluation, audit, metrics",
            _run_files,
            lambda _, here: ["report", here / "run", "--out", here / "out.html"],
        ),
        Target("json, safetensors: model folder", _copy("models/demogroups"), _generate, rehash="demogroups"),
        Target(
            "safetensors: checkpoint",
            _half_trained,
            lambda w, here: [*COMMANDS["train"].arguments(w), "--out", here / "half" / "out", "--resume"],
        ),
        Target("manifest: dataset", _manifest_of("dataset"), _evaluate),
        Target(
            "manifest: regions",
            _manifest_of("regions/demogroups"),
            lambda _, here: ["diagnose", here / "demogroups"],
        ),
        Target("manifest: model", _manifest_of("models/demogroups"), _generate),
    )
}


def attempt(world: World, target: Target, number: int, here: Path) -> tuple[Outcome, str | None]:
    """Break a file and run the command; what came of it, and what is wrong with that, if anything is."""
    dice = random.Random(f"{target.name} {number}")
    broken = dice.choice(target.lay(world, here))
    break_file(broken, dice)
    if target.rehash and broken.exists():
        _list_again(here / target.rehash, broken)
    before = GUARD.format(more=MEMORY, seconds=SECONDS, here=str(here), mark=MARK, faulty=FAULTY)
    outcome = world.warm.run(*target.command(world, here), before=before)
    return outcome, _wrong(outcome, here)


def _wrong(outcome: Outcome, here: Path) -> str | None:
    said = [line for line in outcome.err.splitlines() if line.startswith("mobatlas: ")]
    if outcome.code not in (0, 2):
        return f"code {outcome.code}: {outcome.said[:300]}"
    if "Traceback" in outcome.err:
        return "a traceback"
    if outcome.code == 2 and (len(said) != 1 or not outcome.said.startswith("mobatlas: ") or outcome.out):
        return f"not one sentence: {outcome.err[-300:]}"
    if outcome.code == 2 and ((here / "out").exists() or (here / "out.parquet").exists() or leftovers(here)):
        return f"something was left: {leftovers(here)}"
    if list(here.rglob(f"*{MARK}*")):
        return "something ran"
    return None


def _list_again(folder: Path, changed: Path) -> None:
    values = json.loads((folder / "manifest.json").read_text())
    name = changed.relative_to(folder).as_posix()
    if name in values["files"]:
        values["files"][name] = {"sha256": file_hash(changed), "bytes": changed.stat().st_size}
        (folder / "manifest.json").write_text(json.dumps(values))


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
        table = table.rename_columns([dice.choice(WORDS) if each == name else each for each in table.column_names])
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
    path.write_text("\n".join(lines) + dice.choice(("\n", "", "\r\n", "\n\n\n")), encoding="utf-8", errors="replace")


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
        lines[row] = f"{key}: {dice.choice((*WORDS, *map(str, NUMBERS), '[]', '{}', '[[1]]', '*x', '&x', '!!set {a}'))}"
        path.write_text("\n".join(lines), errors="replace")


def _break_json(path: Path, dice: random.Random) -> None:
    """One value somewhere becomes another, or goes."""
    text = path.read_text()
    lines = text.splitlines() if path.suffix == ".jsonl" else [text]
    row = dice.randrange(len(lines))
    if dice.random() < 0.1:
        lines[row] = dice.choice(("[" * 100_000, '{"a":' * 50_000, "NaN", "null", "[]", "1" * 5_000, '"\\ud800"'))
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
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
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
        path.write_bytes(struct.pack("<Q", dice.choice((2**63, 2**40, size + 10**6, 1, 0))) + content[8:])
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
        header["__metadata__"] = dice.choice(({}, {"mobatlas": "{}"}, {"mobatlas": "[" * 50_000}, {"mobatlas": "null"}))
    else:
        values = np.frombuffer(rest, np.uint8).copy()
        values[:] = 255  # not a number, in every float
        rest = values.tobytes()
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + rest)


def main() -> None:
    """Cases of all targets in turn, until the time is over."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--seconds", type=float, default=600.0, help="of a processor, spent in commands")
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--only", default="", help="targets whose name holds this")
    parser.add_argument("--cases", type=int, default=10**9, help="of each target, at most")
    parser.add_argument("--out", type=Path, help="the tally, as JSON")
    asked = parser.parse_args()
    chosen = {name: target for name, target in TARGETS.items() if asked.only in name}
    tallies = {name: Tally() for name in chosen}
    with TemporaryDirectory(prefix="mobatlas-fuzz-") as scratch:
        world = tiny_world(Path(scratch))
        spent, number, start = 0.0, asked.first, time.monotonic()
        while spent < asked.seconds and number < asked.first + asked.cases:
            for name, target in chosen.items():
                with TemporaryDirectory(dir=scratch, prefix="case-") as here:
                    outcome, wrong = attempt(world, target, number, Path(here))
                tallies[name].count(outcome)
                spent += outcome.seconds
                if wrong is not None:
                    tallies[name].faults.append(f"case {number}: {wrong}")
                    print(f"{name}, case {number}: {wrong}", flush=True)  # noqa: T201
            number += 1
            result = {
                # As far as it came: somebody may stop it.
                "command": f"python -m tests.fuzz --first {asked.first} --cases {number - asked.first}",
                "seed": asked.first,
                "versions": library_versions(),
                "measure": MEASURE,
                "processor_seconds": round(spent, 1),
                "wall_seconds": round(time.monotonic() - start, 1),
                "cases": sum(each.cases for each in tallies.values()),
                "faults": sum(len(each.faults) for each in tallies.values()),
                "targets": {name: vars(each) for name, each in tallies.items()},
            }
            if asked.out:  # after each round, for whoever stops it
                write_json(asked.out, result)
            print(json.dumps({key: result[key] for key in ("cases", "faults", "processor_seconds")}), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
