"""mobatlas: synthetic human mobility by demographic group, learnt from aggregates."""

from __future__ import annotations

from importlib.metadata import version

from mobatlas.config import CityConfig, PrepareConfig, RunConfig, load_run
from mobatlas.data.city import City, simulate, write_city_folder
from mobatlas.data.dataset import Batch, TrajectoryDataset
from mobatlas.data.prepare import prepare
from mobatlas.data.summary import Summary
from mobatlas.data.vocabulary import Vocabulary
from mobatlas.errors import MobatlasError
from mobatlas.groups import DEFAULT_GROUPS, Groups

__version__ = version("mobatlas")

__all__ = [
    "DEFAULT_GROUPS",
    "Batch",
    "City",
    "CityConfig",
    "Groups",
    "MobatlasError",
    "PrepareConfig",
    "RunConfig",
    "Summary",
    "TrajectoryDataset",
    "Vocabulary",
    "__version__",
    "load_run",
    "prepare",
    "simulate",
    "write_city_folder",
]
