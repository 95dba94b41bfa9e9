"""Runs two versions of the package side by side on small inputs and compares their output files.

`python -m bench.compare_versions` compares this checkout with the version before the restructuring.
It uses only the command line, `python -m mobatlas`, and output files. Names that changed
on purpose belong in `bench.versions.renames`; the cases are in `bench.versions.cases`. Outputs of
the base version are cached by commit, so a second comparison runs the new version only.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import inspect
import json
import os
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml

from bench.versions import inputs
from bench.versions.cases import CASES, Case
from bench.versions.files import Comparison, compare_documents, compare_outputs
from bench.versions.renames import rename_command, rename_config

ROOT = Path(__file__).resolve().parents[1]
BASE = ("v0.1.0-before-restructure", "507766d")  # the tag, and its commit where there is no tag
CITY = "city"  # the input files are derived from the output of this case
SHOWN = 4  # differences of a case in the table
LIMIT = 900  # timeout of a command in seconds
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", "MOBATLAS_DEBUG": ""}
# Importing libraries takes longer than most commands. This process imports them, but not mobatlas,
# and runs each command in a fork of itself as `python -m mobatlas` would.
SERVER = """
import importlib, importlib.util, json, os, runpy, sys
for name in ("torch", "lightning_fabric", "pandas", "pyarrow.parquet", "duckdb", "ibis",
             "scipy.sparse", "scipy.optimize", "safetensors.torch", "typer", "pydantic", "yaml",
             "rich.progress", "diffusers.schedulers", "transformers.models.bart.modeling_bart"):
    try:
        importlib.import_module(name)
    except ImportError:
        pass
print(importlib.util.find_spec("mobatlas").origin, flush=True)
for line in sys.stdin:
    arguments, out, err = json.loads(line)
    child = os.fork()
    if not child:
        for stream, path in ((0, os.devnull), (1, out), (2, err)):
            os.dup2(os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC), stream)
        sys.argv = ["mobatlas", *arguments]
        code = 0
        try:
            runpy.run_module("mobatlas", run_name="__main__", alter_sys=True)
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@dataclass(frozen=True)
class Version:
    """A checkout, and the folder in which its commands run and write."""

    name: str
    source: Path
    folder: Path
    renamed: bool = False
    lock: Path | None = None  # a file to lock while a case runs, if processes share the folder

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables of its commands."""
        return {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(self.source / "src")}

    def arguments(self, case: Case) -> list[str]:
        """The command line of a case."""
        words = [word.replace("{out}", case.name) for word in shlex.split(case.command)]
        return rename_command(words) if self.renamed else words

    def log(self, case: Case, stream: str) -> Path:
        """The output that a case printed."""
        return self.folder / "logs" / f"{case.name}.{stream}"

    def record(self, case: Case) -> Path:
        """The file with the exit code and seconds of a case."""
        return self.folder / "logs" / f"{case.name}.json"


class Runner:
    """Runs commands of one version."""

    def __init__(self, version: Version) -> None:
        self.version = version
        self._server: subprocess.Popen[str] | None = None

    def run(self, case: Case) -> int:
        """The exit code of a case."""
        version = self.version
        arguments = version.arguments(case)
        out, err = (version.log(case, stream) for stream in ("out", "err"))
        if case.fresh:
            with out.open("w") as stdout, err.open("w") as stderr:
                return subprocess.run(
                    [sys.executable, "-m", "mobatlas", *arguments],
                    cwd=version.folder,
                    env=version.environment,
                    stdout=stdout,
                    stderr=stderr,
                    timeout=LIMIT,
                ).returncode
        server = self._server or self._start()
        assert server.stdin and server.stdout
        server.stdin.write(json.dumps([arguments, str(out), str(err)]) + "\n")
        server.stdin.flush()
        return int(server.stdout.readline())

    def _start(self) -> subprocess.Popen[str]:
        version = self.version
        self._server = subprocess.Popen(
            [sys.executable, "-c", SERVER],
            cwd=version.folder,
            env=version.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._server.stdout
        found = self._server.stdout.readline().strip()
        if not Path(found).is_relative_to(version.source):
            raise SystemExit(
                f"{version.name}: imports {found}, not the package in {version.source}"
            )
        return self._server

    def close(self) -> None:
        """End the process that runs commands."""
        if self._server:
            self._server.communicate()


def cache_keys(cases: Sequence[Case]) -> dict[str, str]:
    """A hash of the inputs of each case, without the version."""
    common = inspect.getsource(inputs) + metadata.version("torch") + metadata.version("pyarrow")
    keys: dict[str, str] = {}
    for case in cases:
        text = "\n".join([common, case.command, *(keys[name] for name in case.needs)])
        keys[case.name] = hashlib.sha256(text.encode()).hexdigest()
    return keys


def run_cases(version: Version, cases: Sequence[Case], inputs_from: Path | None) -> None:
    """Run cases that have no outputs yet, in order.

    `inputs_from` is the folder of input files to copy; without one they are derived from the city.
    """
    (version.folder / "logs").mkdir(parents=True, exist_ok=True)
    keys = cache_keys(CASES)
    runner = Runner(version)
    try:
        for number, case in enumerate(cases, 1):
            with _locked(version.lock):
                if _read(version.record(case)).get("key") == keys[case.name]:
                    continue
                seconds, code = _run_case(runner, case, inputs_from)
                record = {"key": keys[case.name], "code": code, "seconds": seconds}
                version.record(case).write_text(json.dumps(record))
            _say(f"{version.name} {number}/{len(cases)} {case.name}: exit {code}, {seconds} s")
    finally:
        runner.close()


def _run_case(runner: Runner, case: Case, inputs_from: Path | None) -> tuple[float, int]:
    """Run a case again and return its seconds and exit code."""
    version = runner.version
    for name in case.compared:
        _remove(version.folder / name)
    version.record(case).unlink(missing_ok=True)
    start = time.monotonic()
    code = runner.run(case)
    seconds = round(time.monotonic() - start, 2)
    if case.name == CITY:
        _provide_inputs(version, inputs_from)
    return seconds, code


def _provide_inputs(version: Version, source: Path | None) -> None:
    folder = version.folder / "inputs"
    _remove(folder)
    if source is None:
        inputs.write_inputs(version.folder / CITY, folder)
        return
    shutil.copytree(source, folder)
    for path in folder.glob("*.yaml"):
        path.write_text(yaml.safe_dump(rename_config(yaml.safe_load(path.read_text()))))


def compare_case(case: Case, base: Version, new: Version) -> tuple[str, Comparison]:
    """Whether a case is `same`, `different` or `failed`, with its differences."""
    comparison = Comparison()
    codes = [_read(version.record(case)).get("code") for version in (base, new)]
    if codes[0] != case.code:
        comparison.add("base", f"exit code {codes[0]}: {_last_line(base.log(case, 'err'))}")
        return "failed", comparison
    if codes[0] != codes[1]:
        comparison.add("new", f"exit code {codes[1]}: {_last_line(new.log(case, 'err'))}")
        return "failed", comparison
    if case.code == 0:
        for name in case.compared:
            compare_outputs(base.folder / name, new.folder / name, comparison)
        if "--json" in shlex.split(case.command):
            before, after = (_parse(version.log(case, "out")) for version in (base, new))
            comparison.files += 1
            compare_documents("printed", before, after, comparison)
    if case.code == 0 and not comparison.files:
        comparison.add("outputs", "nothing was compared")
    return ("different" if comparison.differences else "same"), comparison


def _parse(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except ValueError:
        return f"not JSON: {path.read_text()[:200]}"


def select(names: Sequence[str]) -> list[Case]:
    """The cases that match one of the patterns and those whose outputs they read, in order."""
    by_name = {case.name: case for case in CASES}
    unknown = {need for case in CASES for need in case.needs} - by_name.keys()
    if unknown or len(by_name) < len(CASES):
        raise SystemExit(f"cases: unknown needs {sorted(unknown)}, or two cases of one name")
    chosen = {case.name for case in CASES if not names or any(fnmatch(case.name, n) for n in names)}
    for case in reversed(CASES):
        if case.name in chosen:
            chosen.update(case.needs)
    return [case for case in CASES if case.name in chosen]


def base_version(revision: str | None, cache: Path) -> Version:
    """A checkout of the base revision in the cache."""
    commit = _commit([revision] if revision else BASE)
    folder = cache / commit
    source = folder / "source"
    lock = folder / "lock"
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(lock):
        if not (source / "src").exists():
            archive = folder / "source.tar"
            _git("archive", "--output", str(archive), commit)
            with tarfile.open(archive) as tar:
                tar.extractall(source, filter="data")
            archive.unlink()
    return Version("base", source, folder / "outputs", lock=lock)


@contextmanager
def _locked(path: Path | None) -> Iterator[None]:
    """Wait for a lock and acquire it."""
    if path is None:
        yield
        return
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _commit(revisions: Sequence[str]) -> str:
    for revision in revisions:
        try:
            return _git("rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}")
        except subprocess.CalledProcessError:
            continue
    raise SystemExit(f"no such revision: {' or '.join(revisions)}")


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)


def _last_line(path: Path) -> str:
    lines = path.read_text(errors="replace").strip().splitlines() if path.exists() else []
    return lines[-1] if lines else "no message"


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)  # noqa: T201


def report(cases: Sequence[Case], base: Version, new: Version) -> bool:
    """Print the table of cases and the seconds of each version; whether all are the same."""
    states: list[str] = []
    for case in cases:
        state, comparison = compare_case(case, base, new)
        states.append(state)
        exact = f", {comparison.inexact} floats not exact" if comparison.inexact else ""
        print(f"{case.name:32} {state:10} {comparison.files:3} files{exact}")  # noqa: T201
        for difference in comparison.differences[:SHOWN]:
            print(f"    {difference[:300]}")  # noqa: T201
        if len(comparison.differences) > SHOWN:
            print(f"    and {len(comparison.differences) - SHOWN} more")  # noqa: T201
    for version in (base, new):
        seconds = sum(_read(version.record(case)).get("seconds", 0) for case in cases)
        print(f"{version.name}: {seconds:.0f} s of commands, {version.folder}")  # noqa: T201
    counts = {state: states.count(state) for state in ("same", "different", "failed")}
    print(", ".join(f"{count} {state}" for state, count in counts.items()))  # noqa: T201
    return counts["same"] == len(states)


def main() -> int:
    """Run the comparison; 1 if anything differs."""
    parser = argparse.ArgumentParser(
        description="Compare the output files of two versions of mobatlas."
    )
    parser.add_argument("--base", help="revision to compare with; the tag before the restructuring")
    parser.add_argument("--new", type=Path, default=ROOT, help="checkout to test; this one")
    parser.add_argument(
        "--keep", type=Path, help="folder of the new outputs; cases there are reused"
    )
    parser.add_argument("--only", nargs="+", default=[], help="names or patterns of cases")
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "mobatlas-versions"
    parser.add_argument("--cache", type=Path, default=cache, help="folder of the base outputs")
    options = parser.parse_args()
    cases = select(options.only)
    with tempfile.TemporaryDirectory(prefix="mobatlas-new-") as scratch:
        folder = options.keep.resolve() if options.keep else Path(scratch)
        new = Version("new", options.new.resolve(), folder, renamed=True)
        base = base_version(options.base, options.cache.resolve())
        city = [case for case in CASES if case.name == CITY]
        ordered = [*city, *(case for case in cases if case not in city)]
        run_cases(base, ordered, None)
        run_cases(new, ordered, base.folder / "inputs")
        return 0 if report(cases, base, new) else 1


if __name__ == "__main__":
    sys.exit(main())
