"""Memory of this process; a module without torch, so that the command line can import it."""

import ctypes
import os
import re
import resource
import sys
from pathlib import Path

# Options of mallopt with their values.
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
MAX_FREE_BYTES = 2**30  # free memory that the process keeps
MAX_BLOCK_BYTES = 2**25  # largest block that is kept; older versions of glibc accept no more
# A user who sets one of these variables has chosen a policy.
ALLOCATOR_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def keep_memory() -> bool:
    """Make glibc keep freed memory for the next step; return whether it does.

    A network frees and allocates the same tens of megabytes hundreds of times a second. Memory
    that was returned to the system must be cleared page by page before it can be used again.
    """
    if not sys.platform.startswith("linux") or not os.environ.keys().isdisjoint(
        ALLOCATOR_VARIABLES
    ):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):  # another C library
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, MAX_BLOCK_BYTES)) and bool(
        mallopt(M_TRIM_THRESHOLD, MAX_FREE_BYTES)
    )


def peak_gb() -> float:
    """The peak memory of this process in GB."""
    # On Linux ru_maxrss also counts the parent's memory before this program was loaded.
    status = Path("/proc/self/status")
    peak = status.exists() and re.search(r"VmHWM:\s+(\d+) kB", status.read_text("ascii"))
    if peak:
        return int(peak[1]) * 1024 / 1e9
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9
