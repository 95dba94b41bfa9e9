"""Want of memory is told from other faults, however it is said."""

from __future__ import annotations

import pytest

from mobatlas.errors import out_of_memory


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OSError(12, "Cannot allocate memory"),
        RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"),
        RuntimeError("can't start new thread"),
        RuntimeError("could not create a primitive"),
        ImportError("ft2font.so: failed to map segment from shared object"),
        SystemError(
            "<function Block.__init__ at 0x7f98c9d7e200> returned NULL without setting an exception"
        ),
    ],
)
def test_what_says_that_memory_does_not_suffice(error: BaseException) -> None:
    assert out_of_memory(error)


@pytest.mark.parametrize(
    "error",
    [
        OSError(28, "No space left on device"),
        ValueError("memory_limit: give a size"),
        RuntimeError("could not create a primitive descriptor for a matmul primitive"),
        ImportError("ft2font.so: cannot open shared object file"),
        SystemError(
            "<built-in method read of _io.FileIO object> returned NULL without setting an exception"
        ),
    ],
)
def test_other_faults_are_not_taken_for_it(error: BaseException) -> None:
    assert not out_of_memory(error)
