"""mobatlas: synthetic human mobility by demographic group, learnt from aggregates."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mobatlas.atlas import Atlas, AtlasModel
    from mobatlas.config import CityConfig, PrepareConfig, RunConfig, load_run
    from mobatlas.data.city import City, simulate, write_city_folder
    from mobatlas.data.dataset import Batch, TrajectoryDataset
    from mobatlas.data.prepare.pipeline import prepare
    from mobatlas.data.prepare.summary import Summary
    from mobatlas.data.samples import Samples, read_samples
    from mobatlas.data.synthetic import read_synthetic
    from mobatlas.data.trajectories import Trajectories
    from mobatlas.data.vocabulary import Vocabulary
    from mobatlas.errors import MobatlasError
    from mobatlas.evaluation.comparison import compare, evaluate_groups, sampling_floor
    from mobatlas.evaluation.evaluate import Evaluation, evaluate
    from mobatlas.evaluation.metrics import Metric, MetricSpec, register_metric
    from mobatlas.evaluation.privacy.audit import Audit, audit
    from mobatlas.features.maps import build_feature, register_feature
    from mobatlas.generators.protocol import Generator, register_generator
    from mobatlas.generators.store import load_model
    from mobatlas.groups import DEFAULT_GROUPS, Groups
    from mobatlas.pipeline.train import supervise, train
    from mobatlas.regions.composition import read_composition
    from mobatlas.regions.identifiability import Diagnosis, diagnose
    from mobatlas.regions.recovery.recover import Recovery, recover
    from mobatlas.regions.store import build_regions, load_regions
    from mobatlas.regions.types import Aggregates, Composition, Population, Regions
    from mobatlas.report.html import write_report
    from mobatlas.report.privacy import audit_tables, write_audit
    from mobatlas.report.tables import Table, evaluation_tables, write_evaluation, write_tables
    from mobatlas.sampling.generate import generate
    from mobatlas.supervision.store import load_sampler

__version__ = version("mobatlas")

# Imported when first used: engines and torch take seconds, in which nobody would hear a Ctrl-C.
_LATER = {
    "Aggregates": "mobatlas.regions.types",
    "Atlas": "mobatlas.atlas",
    "AtlasModel": "mobatlas.atlas",
    "Audit": "mobatlas.evaluation.privacy.audit",
    "Batch": "mobatlas.data.dataset",
    "City": "mobatlas.data.city",
    "CityConfig": "mobatlas.config",
    "Composition": "mobatlas.regions.types",
    "DEFAULT_GROUPS": "mobatlas.groups",
    "Diagnosis": "mobatlas.regions.identifiability",
    "Evaluation": "mobatlas.evaluation.evaluate",
    "Generator": "mobatlas.generators.protocol",
    "Groups": "mobatlas.groups",
    "Metric": "mobatlas.evaluation.metrics",
    "MetricSpec": "mobatlas.evaluation.metrics",
    "MobatlasError": "mobatlas.errors",
    "Population": "mobatlas.regions.types",
    "PrepareConfig": "mobatlas.config",
    "Recovery": "mobatlas.regions.recovery.recover",
    "Regions": "mobatlas.regions.types",
    "RunConfig": "mobatlas.config",
    "Samples": "mobatlas.data.samples",
    "Summary": "mobatlas.data.prepare.summary",
    "Table": "mobatlas.report.tables",
    "Trajectories": "mobatlas.data.trajectories",
    "TrajectoryDataset": "mobatlas.data.dataset",
    "Vocabulary": "mobatlas.data.vocabulary",
    "audit": "mobatlas.evaluation.privacy.audit",
    "audit_tables": "mobatlas.report.privacy",
    "build_feature": "mobatlas.features.maps",
    "build_regions": "mobatlas.regions.store",
    "compare": "mobatlas.evaluation.comparison",
    "diagnose": "mobatlas.regions.identifiability",
    "evaluate": "mobatlas.evaluation.evaluate",
    "evaluate_groups": "mobatlas.evaluation.comparison",
    "evaluation_tables": "mobatlas.report.tables",
    "generate": "mobatlas.sampling.generate",
    "load_model": "mobatlas.generators.store",
    "load_regions": "mobatlas.regions.store",
    "load_run": "mobatlas.config",
    "load_sampler": "mobatlas.supervision.store",
    "prepare": "mobatlas.data.prepare.pipeline",
    "read_composition": "mobatlas.regions.composition",
    "read_samples": "mobatlas.data.samples",
    "read_synthetic": "mobatlas.data.synthetic",
    "recover": "mobatlas.regions.recovery.recover",
    "register_feature": "mobatlas.features.maps",
    "register_generator": "mobatlas.generators.protocol",
    "register_metric": "mobatlas.evaluation.metrics",
    "sampling_floor": "mobatlas.evaluation.comparison",
    "simulate": "mobatlas.data.city",
    "supervise": "mobatlas.pipeline.train",
    "train": "mobatlas.pipeline.train",
    "write_audit": "mobatlas.report.privacy",
    "write_city_folder": "mobatlas.data.city",
    "write_evaluation": "mobatlas.report.tables",
    "write_report": "mobatlas.report.html",
    "write_tables": "mobatlas.report.tables",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'mobatlas' has no attribute '{name}'")
    return getattr(import_module(_LATER[name]), name)


__all__ = [
    "DEFAULT_GROUPS",
    "Aggregates",
    "Atlas",
    "AtlasModel",
    "Audit",
    "Batch",
    "City",
    "CityConfig",
    "Composition",
    "Diagnosis",
    "Evaluation",
    "Generator",
    "Groups",
    "Metric",
    "MetricSpec",
    "MobatlasError",
    "Population",
    "PrepareConfig",
    "Recovery",
    "Regions",
    "RunConfig",
    "Samples",
    "Summary",
    "Table",
    "Trajectories",
    "TrajectoryDataset",
    "Vocabulary",
    "__version__",
    "audit",
    "audit_tables",
    "build_feature",
    "build_regions",
    "compare",
    "diagnose",
    "evaluate",
    "evaluate_groups",
    "evaluation_tables",
    "generate",
    "load_model",
    "load_regions",
    "load_run",
    "load_sampler",
    "prepare",
    "read_composition",
    "read_samples",
    "read_synthetic",
    "recover",
    "register_feature",
    "register_generator",
    "register_metric",
    "sampling_floor",
    "simulate",
    "supervise",
    "train",
    "write_audit",
    "write_city_folder",
    "write_evaluation",
    "write_report",
    "write_tables",
]
