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
from mobatlas.features import Trajectories, build_feature, register_feature
from mobatlas.groups import DEFAULT_GROUPS, Groups
from mobatlas.regions.composition import read_composition
from mobatlas.regions.folder import build_regions, load_regions
from mobatlas.regions.identifiability import Diagnosis, diagnose
from mobatlas.regions.recovery import Recovery, recover
from mobatlas.regions.table import Aggregates, Composition, Regions

__version__ = version("mobatlas")

__all__ = [
    "DEFAULT_GROUPS",
    "Aggregates",
    "Batch",
    "City",
    "CityConfig",
    "Composition",
    "Diagnosis",
    "Groups",
    "MobatlasError",
    "PrepareConfig",
    "Recovery",
    "Regions",
    "RunConfig",
    "Summary",
    "Trajectories",
    "TrajectoryDataset",
    "Vocabulary",
    "__version__",
    "build_feature",
    "build_regions",
    "diagnose",
    "load_regions",
    "load_run",
    "prepare",
    "read_composition",
    "recover",
    "register_feature",
    "simulate",
    "write_city_folder",
]
