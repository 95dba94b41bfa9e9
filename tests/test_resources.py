"""What a process takes of the machine."""

from __future__ import annotations

import logging
import multiprocessing
import subprocess
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from mobatlas import cli
from mobatlas.sampling import chunks as workers
from mobatlas.training.resources import keep_memory

# Allocates, fills and frees eight blocks in each of twenty rounds; prints the page faults of the
# last ten. It calls the C library directly, because other layers may keep a block by chance.
ROUNDS = """
import ctypes, resource
from mobatlas.training.resources import keep_memory

{first}
library, size = ctypes.CDLL(None), 20_000_000
library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
library.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
library.free.argtypes = [ctypes.c_void_p]
for number in range(20):
    if number == 10:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    pieces = [library.malloc(size) for _ in range(8)]
    for piece in pieces:
        library.memset(piece, 1, size)
    for piece in pieces:
        library.free(piece)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def _python(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.strip()


def test_memory_that_was_freed_is_used_again_instead_of_given_back() -> None:
    if (
        _python("from mobatlas.training.resources import keep_memory; print(keep_memory())")
        != "True"
    ):
        pytest.skip("the C library of this machine does not say how it keeps memory")
    assert 100 * int(_python(ROUNDS.format(first="keep_memory()"))) < int(
        _python(ROUNDS.format(first=""))
    )


def test_peak_memory_is_that_of_the_process_and_not_of_its_parent() -> None:
    code = "from mobatlas.training.resources import peak_gb; {first}; print(peak_gb())"
    inherited = np.ones(50_000_000)  # 0.4 GB, which a forked process shares until it loads Python
    small, large = (
        float(_python(code.format(first=first)))
        for first in ("pass", "memory = bytearray(b'x') * 300_000_000; del memory")
    )
    assert inherited.nbytes / 1e9 == 0.4
    assert 0 < small < 0.2
    assert large - small == pytest.approx(0.3, abs=0.02)


def test_memory_is_not_kept_on_other_systems_or_against_the_users_settings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "0")
    assert not keep_memory()
    monkeypatch.delenv("MALLOC_TRIM_THRESHOLD_")
    monkeypatch.setattr(sys, "platform", "darwin")
    assert not keep_memory()


def test_commands_and_processes_that_sample_keep_their_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(cli, "keep_memory", lambda: asked.append("command"))
    monkeypatch.setattr(cli, "_catch_signals", list)
    monkeypatch.setattr(sys, "argv", ["mobatlas", "--help"])
    with pytest.raises(SystemExit):
        cli.main()
    monkeypatch.setattr(workers, "keep_memory", lambda: asked.append("process"))
    monkeypatch.setattr(threading, "Thread", lambda **_: SimpleNamespace(start=lambda: None))
    ours, theirs = multiprocessing.Pipe()
    ours.close()  # the first process is gone
    try:
        workers._run(theirs)
    finally:
        logging.disable(logging.NOTSET)
    assert asked == ["command", "process"]
