"""Hostile files: damaged files of every format that we read, and the commands that read them.

A case is a target and a number, and always the same. `python -m tests.fuzz` runs many cases and
writes a tally.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pacsv
import pyarrow.parquet as pq

from bench.summary import summarise, write_summary
from mobatlas.io.manifest import file_hash, library_versions
from tests.breaking import MARK, break_file
from tests.commands import Outcome
from tests.faults import COMMANDS, LITTLE_MEMORY, World, leftovers, samples, tiny_world, watched
from tests.samples import SAMPLES

MEMORY = 2 * 2**30  # bytes, on top of what a warm process holds
SECONDS = 60  # of a processor
FAULTY = 99
# In the process of the command: limits, and an end as soon as a file makes it run something.
GUARD = (
    LITTLE_MEMORY
    + """
import os, sys
resource.setrlimit(resource.RLIMIT_CPU, ({seconds}, {seconds}))
os.chdir({workdir!r})
def guard(event, arguments):
    ran = event in (
        "pickle.find_class",
        "os.system",
        "subprocess.Popen",
        "os.exec",
        "os.posix_spawn",
        "socket.connect",
    )
    if ran or (event == "compile" and {mark!r} in str(arguments[0])):
        os.write(2, ("a file ran " + event + " " + str(arguments)[:200] + chr(10)).encode())
        os._exit({faulty})
sys.addaudithook(guard)
"""
)
MEASURE = (
    "cases: damaged files; accepted: exit code 0; refused: exit code 2 and one sentence; seconds "
    "and peak_mb: the largest of any case; "
    "faults: anything else, such as a traceback, a hang, a crash, executed code or a leftover file"
)


@dataclass(frozen=True)
class Target:
    """Files of one format, one of which is damaged, and the command that reads them."""

    name: str
    write_files: Callable[[World, Path], list[Path]]  # returns the files that may be damaged
    command: Callable[[World, Path], list[object]]
    rehash: str | None = None  # a folder whose manifest then lists the hash of the damaged file


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
    """Folders or files of the finished run; any of their files may be damaged."""

    def write_files(world: World, workdir: Path) -> list[Path]:
        files = []
        for name in names:
            source = world.run / name
            target = workdir / Path(name).name
            if source.is_dir():
                shutil.copytree(source, target)
                files += [
                    path
                    for path in target.rglob("*")
                    if path.is_file() and path.name != "manifest.json"
                ]
            else:
                shutil.copyfile(source, target)
                files.append(target)
        return sorted(files)

    return write_files


def _manifest_of(name: str) -> Callable[[World, Path], list[Path]]:
    def write_files(world: World, workdir: Path) -> list[Path]:
        shutil.copytree(world.run / name, workdir / Path(name).name)
        return [workdir / Path(name).name / "manifest.json"]

    return write_files


def _city(suffix: str) -> Callable[[World, Path], list[Path]]:
    """The tables of a few people."""

    def write_files(world: World, workdir: Path) -> list[Path]:
        (workdir / "city").mkdir()
        files = []
        for name in ("visits", "people", "pois"):
            table = pq.read_table(world.run / "city" / f"{name}.parquet")
            if "user_id" in table.column_names:
                keep = sorted(set(table["user_id"].to_pylist()))[:12]
                table = table.filter(pc.is_in(table["user_id"], pa.array(keep)))
            path = workdir / "city" / f"{name}{suffix}"
            if suffix == ".parquet":
                pq.write_table(table, path)
            else:
                pacsv.write_csv(table, workdir / "plain.csv")
                content = (workdir / "plain.csv").read_bytes()
                path.write_bytes(gzip.compress(content) if suffix.endswith(".gz") else content)
                (workdir / "plain.csv").unlink()
            files.append(path)
        return files

    return write_files


def _published(suffix: str) -> Callable[[World, Path], list[Path]]:
    """A census and a published table of aggregates."""

    def write_files(world: World, workdir: Path) -> list[Path]:
        shutil.copytree(world.run / "dataset", workdir / "dataset")
        for name in ("composition", "aggregates"):
            table = pq.read_table(world.run / "regions" / "demogroups" / f"{name}.parquet")
            if suffix == ".csv":
                pacsv.write_csv(table, workdir / f"{name}.csv")
            else:
                pq.write_table(table, workdir / f"{name}.parquet")
        return [workdir / f"composition{suffix}", workdir / f"aggregates{suffix}"]

    return write_files


def _anchors(suffix: str) -> Callable[[World, Path], list[Path]]:
    def write_files(world: World, workdir: Path) -> list[Path]:
        table = pq.read_table(world.run / "dataset" / "people.parquet").slice(0, 8)
        table = table.select(["home_lat", "home_lon", "work_lat", "work_lon"])
        path = workdir / f"anchors{suffix}"
        if suffix == ".csv":
            pacsv.write_csv(table, path)
        else:
            pq.write_table(table, path)
        return [path]

    return write_files


def _source(name: str) -> Callable[[World, Path], list[Path]]:
    """A sample of a reader in its published layout."""

    def write_files(_: World, workdir: Path) -> list[Path]:
        folder = workdir / "source"
        folder.mkdir()
        SAMPLES[name](folder)
        return sorted(path for path in folder.rglob("*") if path.is_file())

    return write_files


def _configuration(world: World, workdir: Path) -> list[Path]:
    shutil.copyfile(world.config, workdir / "run.yaml")
    return [workdir / "run.yaml"]


def _half_trained(world: World, workdir: Path) -> list[Path]:
    """A model that a kill left with a checkpoint; made once."""
    half = world.root / "half"
    command = COMMANDS["train"]
    for at in range(8, 40):
        if any((half / "out" / "training").glob("*.safetensors")):
            break
        half.mkdir(exist_ok=True)
        world.warm.run(*command.line(world, half, "--resume"), before=watched(half, at))
    shutil.copytree(half, workdir / "half")
    return sorted((workdir / "half" / "out" / "training").glob("*.safetensors"))


def _run_files(world: World, workdir: Path) -> list[Path]:
    shutil.copytree(world.run, workdir / "run")
    (workdir / "run" / "report.html").unlink()
    names = (
        "run.json",
        "evaluation/demogroups.json",
        "audit/demogroups.json",
        "baseline/metrics.jsonl",
    )
    return [workdir / "run" / name for name in names]


def _generate(_: World, workdir: Path) -> list[object]:
    return [
        "generate",
        workdir / "demogroups",
        "--n",
        8,
        "--group",
        "F",
        "--calibrate",
        "--out",
        workdir / "out.parquet",
    ]


def _prepare(name: str, form: str) -> Callable[[World, Path], list[object]]:
    def command(world: World, workdir: Path) -> list[object]:
        config = (
            ["--config", world.config]
            if form == "plain"
            else ["--set", "window.days=1", "--set", "window.stride=1"]
        )
        return [
            "prepare",
            workdir / name,
            "--format",
            form,
            *config,
            "--out",
            workdir / "out",
            "--quiet",
        ]

    return command


def _regions(suffix: str) -> Callable[[World, Path], list[object]]:
    def command(_: World, workdir: Path) -> list[object]:
        tables = [
            "--composition",
            workdir / f"composition{suffix}",
            "--aggregates",
            workdir / f"aggregates{suffix}",
        ]
        return ["regions", workdir / "dataset", *tables, "--out", workdir / "out"]

    return command


def _evaluate(world: World, workdir: Path) -> list[object]:
    dataset = workdir / "dataset" if (workdir / "dataset").exists() else world.run / "dataset"
    sample_file = (
        workdir / "demogroups.parquet"
        if (workdir / "demogroups.parquet").exists()
        else samples(world)
    )
    return ["evaluate", sample_file, "--dataset", dataset]


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
            lambda _, workdir: ["diagnose", workdir / "demogroups"],
            rehash="demogroups",
        ),
        Target("csv: visits, people, pois", _city(".csv"), _prepare("city", "plain")),
        Target("csv: compressed", _city(".csv.gz"), _prepare("city", "plain")),
        Target("csv: composition, aggregates", _published(".csv"), _regions(".csv")),
        Target(
            "csv: anchors",
            _anchors(".csv"),
            lambda w, workdir: [
                *(
                    "generate",
                    w.run / "baseline",
                    "--anchors",
                    workdir / "anchors.csv",
                    "--out",
                    workdir / "out.parquet",
                )
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
            lambda _, workdir: [
                "prepare",
                workdir / "nowhere",
                "--config",
                workdir / "run.yaml",
                "--out",
                workdir / "out",
            ],
        ),
        Target(
            "yaml: run",
            _configuration,
            lambda _, workdir: [
                "train",
                workdir / "nowhere",
                "--config",
                workdir / "run.yaml",
                "--out",
                workdir / "out",
            ],
        ),
        Target(
            "json: run, evaluation, audit, metrics",
            _run_files,
            lambda _, workdir: ["report", workdir / "run", "--out", workdir / "out.html"],
        ),
        Target(
            "json, safetensors: model folder",
            _copy("models/demogroups"),
            _generate,
            rehash="demogroups",
        ),
        Target(
            "safetensors: checkpoint",
            _half_trained,
            lambda w, workdir: [
                *COMMANDS["train"].arguments(w),
                "--out",
                workdir / "half" / "out",
                "--resume",
            ],
        ),
        Target("manifest: dataset", _manifest_of("dataset"), _evaluate),
        Target(
            "manifest: regions",
            _manifest_of("regions/demogroups"),
            lambda _, workdir: ["diagnose", workdir / "demogroups"],
        ),
        Target("manifest: model", _manifest_of("models/demogroups"), _generate),
    )
}


def attempt(world: World, target: Target, number: int, workdir: Path) -> tuple[Outcome, str | None]:
    """Damage a file and run the command; return the outcome and its faults."""
    rng = random.Random(f"{target.name} {number}")
    damaged = rng.choice(target.write_files(world, workdir))
    break_file(damaged, rng)
    if target.rehash and damaged.exists():
        _update_manifest(workdir / target.rehash, damaged)
    before = GUARD.format(
        more=MEMORY, seconds=SECONDS, workdir=str(workdir), mark=MARK, faulty=FAULTY
    )
    outcome = world.warm.run(*target.command(world, workdir), before=before)
    return outcome, _fault(outcome, workdir)


def _fault(outcome: Outcome, workdir: Path) -> str | None:
    messages = [line for line in outcome.err.splitlines() if line.startswith("mobatlas: ")]
    if outcome.code not in (0, 2):
        return f"code {outcome.code}: {outcome.said[:300]}"
    if "Traceback" in outcome.err:
        return "a traceback"
    if outcome.code == 2 and (
        len(messages) != 1 or not outcome.said.startswith("mobatlas: ") or outcome.out
    ):
        return f"not one sentence: {outcome.err[-300:]}"
    if outcome.code == 2 and (
        (workdir / "out").exists() or (workdir / "out.parquet").exists() or leftovers(workdir)
    ):
        return f"something was left: {leftovers(workdir)}"
    if list(workdir.rglob(f"*{MARK}*")):
        return "something ran"
    return None


def _update_manifest(folder: Path, changed: Path) -> None:
    values = json.loads((folder / "manifest.json").read_text())
    name = changed.relative_to(folder).as_posix()
    if name in values["files"]:
        values["files"][name] = {"sha256": file_hash(changed), "bytes": changed.stat().st_size}
        (folder / "manifest.json").write_text(json.dumps(values))


def main() -> None:
    """Cases of all targets in turn, until the time is over."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument(
        "--seconds", type=float, default=600.0, help="of a processor, spent in commands"
    )
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
                with TemporaryDirectory(dir=scratch, prefix="case-") as workdir:
                    outcome, wrong = attempt(world, target, number, Path(workdir))
                tallies[name].count(outcome)
                spent += outcome.seconds
                if wrong is not None:
                    tallies[name].faults.append(f"case {number}: {wrong}")
                    print(f"{name}, case {number}: {wrong}", flush=True)  # noqa: T201
            number += 1
            result = {
                # As far as it came: somebody may stop it.
                "command": (
                    f"python -m tests.fuzz --first {asked.first} --cases {number - asked.first}"
                ),
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
                write_summary(asked.out, summarise(result))
            print(  # noqa: T201
                json.dumps({key: result[key] for key in ("cases", "faults", "processor_seconds")}),
                flush=True,
            )


if __name__ == "__main__":
    main()
