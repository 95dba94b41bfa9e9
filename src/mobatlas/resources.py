"""What this process takes of the machine."""

from __future__ import annotations

import resource
import sys


def peak_gb() -> float:
    """The most memory that it has held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e9
