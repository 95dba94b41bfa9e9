"""What this process takes of the machine."""

from __future__ import annotations

import ctypes
import os
import resource
import sys

TRIM, MAPPED = -1, -3  # of mallopt: M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
KEPT = 2**30  # bytes that are free and not given back, at most
LARGEST = 2**25  # of a piece that is kept: older versions take no more
TOLD = (
    "MALLOC_TRIM_THRESHOLD_",
    "MALLOC_MMAP_THRESHOLD_",
    "GLIBC_TUNABLES",
)  # whoever sets one knows better


def keep_memory() -> bool:
    """Use memory again instead of giving it back between two steps, where glibc can; whether it does.

    A network frees and asks for the same tens of megabytes hundreds of times a second, and pages that were given back are
    cleared one by one before they can be used again.
    """
    if not sys.platform.startswith("linux") or any(name in os.environ for name in TOLD):
        return False
    try:
        tell = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):  # another C library
        return False
    return bool(tell(MAPPED, LARGEST)) and bool(tell(TRIM, KEPT))


def peak_gb() -> float:
    """The most memory that it has held."""
    return (
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        * (1 if sys.platform == "darwin" else 1024)
        / 1e9
    )
