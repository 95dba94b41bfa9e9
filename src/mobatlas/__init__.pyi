"""The public API for type checkers; `__init__.py` imports the same names when they are used."""

from mobatlas.atlas import Atlas as Atlas
from mobatlas.atlas import AtlasModel as AtlasModel
from mobatlas.config import (
    CityConfig as CityConfig,
)
from mobatlas.config import (
    PrepareConfig as PrepareConfig,
)
from mobatlas.config import (
    RunConfig as RunConfig,
)
from mobatlas.config import (
    load_run as load_run,
)
from mobatlas.data.city import (
    City as City,
)
from mobatlas.data.city import (
    simulate as simulate,
)
from mobatlas.data.city import (
    write_city_folder as write_city_folder,
)
from mobatlas.data.dataset import Trajectories as Trajectories
from mobatlas.data.dataset import TrajectoryDataset as TrajectoryDataset
from mobatlas.data.prepare.pipeline import Summary as Summary
from mobatlas.data.prepare.pipeline import prepare as prepare
from mobatlas.data.samples import PosteriorIntervals as PosteriorIntervals
from mobatlas.data.samples import Samples as Samples
from mobatlas.data.samples import posterior_intervals as posterior_intervals
from mobatlas.data.samples import read_samples as read_samples
from mobatlas.data.types import Vocabulary as Vocabulary
from mobatlas.errors import MobatlasError as MobatlasError
from mobatlas.evaluation.comparison import compare as compare
from mobatlas.evaluation.evaluate import Evaluation as Evaluation
from mobatlas.evaluation.evaluate import evaluate as evaluate
from mobatlas.evaluation.metrics import MetricSpec as MetricSpec
from mobatlas.evaluation.metrics import register_metric as register_metric
from mobatlas.evaluation.privacy.audit import Audit as Audit
from mobatlas.evaluation.privacy.audit import audit as audit
from mobatlas.features.maps import (
    build_feature as build_feature,
)
from mobatlas.features.maps import (
    register_feature as register_feature,
)
from mobatlas.generators.protocol import (
    Generator as Generator,
)
from mobatlas.generators.protocol import (
    register_generator as register_generator,
)
from mobatlas.generators.store import load_model as load_model
from mobatlas.groups import DEFAULT_GROUPS as DEFAULT_GROUPS
from mobatlas.groups import Groups as Groups
from mobatlas.pipeline.models import SuperviseOptions as SuperviseOptions
from mobatlas.pipeline.models import supervise as supervise
from mobatlas.pipeline.models import train as train
from mobatlas.pipeline.run import run as run
from mobatlas.regions.build import RegionsOptions as RegionsOptions
from mobatlas.regions.composition import read_composition as read_composition
from mobatlas.regions.identifiability import Diagnosis as Diagnosis
from mobatlas.regions.identifiability import diagnose as diagnose
from mobatlas.regions.recovery.design import EvidencePlan as EvidencePlan
from mobatlas.regions.recovery.design import plan_evidence as plan_evidence
from mobatlas.regions.recovery.recover import RecoveryOptions as RecoveryOptions
from mobatlas.regions.recovery.recover import recover as recover
from mobatlas.regions.recovery.summary import RecoverySummary as RecoverySummary
from mobatlas.regions.recovery.summary import summarise_recovery as summarise_recovery
from mobatlas.regions.store import build_regions as build_regions
from mobatlas.regions.store import load_regions as load_regions
from mobatlas.regions.types import (
    Aggregates as Aggregates,
)
from mobatlas.regions.types import (
    Composition as Composition,
)
from mobatlas.regions.types import (
    Population as Population,
)
from mobatlas.regions.types import (
    Recovery as Recovery,
)
from mobatlas.regions.types import (
    Regions as Regions,
)
from mobatlas.report.html import write_report as write_report
from mobatlas.report.recovery import RecoveryView as RecoveryView
from mobatlas.report.recovery import write_recovery as write_recovery
from mobatlas.sampling.chunks import SampleRequest as SampleRequest
from mobatlas.sampling.generate import generate as generate
from mobatlas.supervision.store import load_sampler as load_sampler
from mobatlas.supervision.strategies import Strategy as Strategy
from mobatlas.supervision.strategies import StrategyOptions as StrategyOptions
from mobatlas.supervision.strategies import Supervised as Supervised
from mobatlas.supervision.strategies import register_strategy as register_strategy
from mobatlas.training.loop import Execution as Execution

__version__: str

__all__: list[str]
