"""Time and peak memory of one piece of work, in a process of its own."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

from mobatlas.config import CityConfig
from mobatlas.training.resources import keep_memory, peak_gb

MEMORY_LIMIT = "2GB"  # of DuckDB, for a reference as for mobatlas
VISITS_PER_USER = 67.0  # of the default city in 28 days; rows report the exact number of visits
Row = dict[str, Any]  # of the speed table


@dataclass(frozen=True)
class Measured:
    """One piece of work in a process of its own."""

    seconds: float
    peak_gb: float
    value: Any


def measure(work: Callable[..., Any], *arguments: Any) -> Measured:
    """Time a function in a fresh process that keeps its memory, as commands do."""
    measured: Measured = run_in_process(_measure, work, *arguments)
    return measured


def run_in_process(work: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function in a fresh process, so that its peak memory is its own."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(work, *arguments).result()


def city_of(visits: int) -> CityConfig:
    """Configure a city with about `visits` visits."""
    return CityConfig(users=max(1, round(visits / VISITS_PER_USER)), pois=9_000, districts=36)


def _measure(work: Callable[..., Any], *arguments: Any) -> Measured:
    keep_memory()
    start = time.perf_counter()
    value = work(*arguments)
    seconds = time.perf_counter() - start
    return Measured(seconds, peak_gb(), value)
