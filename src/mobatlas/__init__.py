"""mobatlas: synthetic human mobility by demographic group, learnt from aggregates."""

from importlib import import_module
from importlib.metadata import version
from typing import Any

__version__ = version("mobatlas")

# The public API by module; `__init__.pyi` lists it for type checkers. A module is imported
# when a name is first used, because torch and the engines take seconds to import.
_NAMES = {
    "mobatlas.atlas": "Atlas AtlasModel",
    "mobatlas.config": "CityConfig PrepareConfig RunConfig load_run",
    "mobatlas.data.city": "City simulate write_city_folder",
    "mobatlas.data.dataset": "Trajectories TrajectoryDataset",
    "mobatlas.data.prepare.pipeline": "Summary prepare",
    "mobatlas.data.samples": "PosteriorIntervals Samples posterior_intervals read_samples",
    "mobatlas.data.types": "Vocabulary",
    "mobatlas.errors": "MobatlasError",
    "mobatlas.evaluation.comparison": "compare",
    "mobatlas.evaluation.evaluate": "Evaluation evaluate",
    "mobatlas.evaluation.metrics": "MetricSpec register_metric",
    "mobatlas.evaluation.privacy.audit": "Audit audit",
    "mobatlas.features.maps": "build_feature register_feature",
    "mobatlas.generators.protocol": "Generator register_generator",
    "mobatlas.generators.store": "load_model",
    "mobatlas.groups": "DEFAULT_GROUPS Groups",
    "mobatlas.pipeline.models": "SuperviseOptions supervise train",
    "mobatlas.pipeline.run": "run",
    "mobatlas.regions.build": "RegionsOptions",
    "mobatlas.regions.composition": "read_composition",
    "mobatlas.regions.identifiability": "Diagnosis diagnose",
    "mobatlas.regions.recovery.design": "EvidencePlan plan_evidence",
    "mobatlas.regions.recovery.recover": "RecoveryOptions recover",
    "mobatlas.regions.recovery.summary": "RecoverySummary summarise_recovery",
    "mobatlas.regions.store": "build_regions load_regions",
    "mobatlas.regions.types": "Aggregates Composition Population Recovery Regions",
    "mobatlas.report.html": "write_report",
    "mobatlas.report.recovery": "RecoveryView write_recovery",
    "mobatlas.sampling.chunks": "SampleRequest",
    "mobatlas.sampling.generate": "generate",
    "mobatlas.supervision.store": "load_sampler",
    "mobatlas.supervision.strategies": "Strategy StrategyOptions Supervised register_strategy",
    "mobatlas.training.loop": "Execution",
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}
__all__ = ["__version__", *sorted(_MODULES)]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'mobatlas' has no attribute '{name}'")
    return getattr(import_module(_MODULES[name]), name)
