"""The configuration of a run: pydantic models that refuse what they do not know, and the presets `small` and `paper`.

One YAML file describes a whole run; its sections are the fields of `RunConfig`. Values come in layers, the later over the
earlier: the defaults below, a preset, the suggestions of a reader, the file, `--set section.key=value`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from mobatlas.errors import MobatlasError, suggestion


class Section(BaseModel):
    """A part of the configuration: immutable, and closed to unknown keys."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, str_strip_whitespace=True, allow_inf_nan=False
    )


class CityConfig(Section):
    """The simulated city."""

    users: int = Field(4_000, ge=1)
    pois: int = Field(240, ge=12, le=50_000)  # at least one of each category
    districts: int = Field(16, ge=1)
    days: int = Field(28, ge=1, le=3_650)
    start: date = date(2024, 3, 4)  # a Monday, so that weeks and windows begin together
    attributes: dict[str, tuple[str, ...]] = {
        "age": ("<30", "30-40", "40-50", ">50"),
        "gender": ("M", "F"),
    }
    # Mean pairwise JSD (bits) of the groups' expected POI visits. Realised visits differ by more, the more the fewer
    # there are to a POI: the presets are set so that all realised pairs lie in the paper's band, 0.40 to 0.54.
    divergence: float = Field(0.44, ge=0, lt=0.9)
    segregation: float = Field(
        1.0, ge=0, le=10
    )  # how much the districts' compositions differ; 0 is not at all
    activity: float = Field(1.0, gt=0, le=5)  # outings a day, relative to the default
    dropout: float = Field(
        0.03, ge=0, lt=1
    )  # share of a person's days on which the phone is silent


class WindowConfig(Section):
    """Which calendar days make a trajectory."""

    days: int = Field(14, ge=1, le=366)
    stride: int = Field(7, ge=1, le=366)
    # `user`: windows are counted from the person's first observed day; a date: from that day, for everybody
    origin: Literal["user"] | date = "user"


class QualityConfig(Section):
    """Which windows are good enough (the thresholds of the paper's appendix)."""

    max_day_km: float = Field(
        800.0, gt=0
    )  # a day whose bounding box is wider is spatially unreliable
    max_unreliable: float = Field(0.1, ge=0, le=1)  # share of a window's days
    min_coverage: float = Field(
        0.2, ge=0, le=1
    )  # observed share of a day that makes it high quality; 0: no rule
    min_high_quality: float = Field(0.8, ge=0, le=1)  # share of a window's days
    min_tokens: int = Field(1, ge=1)  # shorter trajectories are left out


Hour = Annotated[int, Field(ge=0, le=24)]


class AnchorConfig(Section):
    """Home and work: given by the source, or inferred as the modal place at night and in working hours."""

    infer: Literal["auto", "always", "never"] = (
        "auto"  # auto: for people with neither flagged visits nor given anchors
    )
    radius_metres: float = Field(
        250.0, gt=0
    )  # visits this near to a given anchor are at it, where the source has no flags
    night: tuple[Hour, Hour] = (22, 6)  # may wrap around midnight
    working_hours: tuple[Hour, Hour] = (9, 17)  # on weekdays
    min_days: int = Field(3, ge=1)  # on fewer distinct days a place is neither home nor work
    require_both: bool = True  # keep only people with a home and a work location


class SplitConfig(Section):
    """Shares of people; who goes where is a hash of the user id and the salt."""

    train: float = Field(0.8, gt=0, le=1)
    val: float = Field(0.1, ge=0, lt=1)
    test: float = Field(0.1, ge=0, lt=1)
    salt: str = "mobatlas"

    @model_validator(mode="after")
    def _shares_sum_to_one(self) -> SplitConfig:
        if abs(self.train + self.val + self.test - 1) > 1e-9:
            raise ValueError(f"train + val + test is {self.train + self.val + self.test:g}, not 1")
        return self


class PrepareConfig(Section):
    """From raw visits to trajectories; the defaults are the paper's."""

    window: WindowConfig = WindowConfig()
    quality: QualityConfig = QualityConfig()
    anchors: AnchorConfig = AnchorConfig()
    split: SplitConfig = SplitConfig()
    vocabulary_size: int = Field(7_000, ge=1)  # POIs beyond the most frequent become OTHER
    attributes: tuple[str, ...] | dict[str, tuple[str, ...]] | None = (
        None  # label columns of people, in order; None: by name
    )
    regions: tuple[str, ...] | None = None  # region columns of people; None: by name
    missing_departure: Literal["instant", "until_next"] = (
        "instant"  # until_next: until the person's next arrival
    )
    max_gap_hours: float = Field(12.0, gt=0)  # but no longer than this
    max_stay_days: int = Field(60, ge=1)  # a longer visit is a broken record
    max_missing_coordinates: float = Field(
        0.2, ge=0, le=1
    )  # share of rows; above it the source is refused
    invalid_rows: Literal["refuse", "drop"] = "refuse"
    reader: dict[str, Any] = {}  # options of the reader, checked by it
    memory_limit: str = (
        "2GB"  # of DuckDB, which spills to disk beyond it, or the heap of a Spark session of ours
    )

    @field_validator("attributes")
    @classmethod
    def _attribute_names(cls, value: Any) -> Any:
        if value is not None and len(value) == 0:
            raise ValueError("give at least one attribute, or leave the key out")
        return value


class TrainConfig(Section):
    """Phase 1: which family of generators, and what it is told; the family knows its own options and presets."""

    generator: str = "latent-diffusion"
    options: dict[str, Any] = {}


class SupervisionConfig(Section):
    """Phase 2: which strategy, and what it is told; the strategy and the generator know their own options."""

    strategy: str = "auto"
    divergence: str | None = None
    membership: bool = False
    options: dict[str, Any] = {}


class SourceConfig(Section):
    """The visits: a file or a folder as its format has it; relative to the configuration's own folder."""

    path: Path
    format: str = "plain"
    engine: str = "duckdb"


class RegionsConfig(Section):
    """One way to know regions: two tables, a column of people, or, of labelled people, a controlled partition."""

    composition: Path | None = None
    aggregates: Path | None = None
    by: str | None = None
    partition: str | None = None
    features: tuple[str, ...] | None = None
    mask: tuple[str, ...] = ()
    # An age range of the composition that straddles two groups: refused by default, or spread evenly over its years.
    straddle: Literal["refuse", "uniform"] | None = None

    @model_validator(mode="after")
    def _straddle_is_of_a_composition(self) -> RegionsConfig:
        if self.straddle is not None and self.composition is None:
            raise ValueError(
                "straddle is about the ages of a composition; give one, or leave it out"
            )
        return self


@dataclass(frozen=True)
class Coarsening:
    """How homes and workplaces are made less exact: moved at random within a radius, or to the middle of a square."""

    form: Literal["disc", "grid"]
    km: float  # radius, or side

    @classmethod
    def parse(cls, told: float | str) -> Coarsening:
        """From what a user writes: 1, 1km or 500m, and grid:1km or grid:500m."""
        written = (
            re.fullmatch(r"(grid:)?(\d+\.?\d*|\.\d+) ?(km|m)?", told.strip().lower())
            if isinstance(told, str)
            else None
        )
        grid, number, unit = written.groups() if written else (None, told, None)
        try:
            km = float(number) / (1_000 if unit == "m" else 1)
        except ValueError:
            km = math.nan
        if not 0 <= km < math.inf or (grid and not km):
            raise ValueError(
                "give a radius of 0 km or more, such as 1km, or a grid, such as grid:500m"
            )
        return cls("grid" if grid else "disc", km)

    def __str__(self) -> str:
        return f"{'grid:' if self.form == 'grid' else ''}{self.km:g}km"


class SamplesConfig(Section):
    """What a run writes."""

    each: int = Field(500, ge=1)  # trajectories of each group
    coarsen: float | str | None = None  # see Coarsening

    @field_validator("coarsen")
    @classmethod
    def _is_a_coarsening(cls, value: float | str | None) -> float | str | None:
        if value is not None:
            Coarsening.parse(value)
        return value


class RunConfig(Section):
    """A whole run."""

    preset: Literal["small", "paper"] | None = None
    seed: int = Field(0, ge=0, lt=2**63)
    title: str = "Synthetic mobility by group"
    source: SourceConfig | None = None  # None: the city of `simulate`
    regions: dict[str, RegionsConfig] = {}
    strong: bool | None = None  # also train the labelled upper bound; None: if there are labels
    samples: SamplesConfig = SamplesConfig()
    audit: bool = False  # also ask what the samples give away of training people
    simulate: CityConfig = CityConfig()
    prepare: PrepareConfig = PrepareConfig()
    train: TrainConfig = TrainConfig()
    supervise: SupervisionConfig = SupervisionConfig()


PRESETS: dict[str, dict[str, Any]] = {
    "small": {
        "simulate": {},
        "prepare": {"window": {"days": 3, "stride": 3}, "vocabulary_size": 200},
    },
    "paper": {
        "simulate": {
            "users": 4_600,
            "pois": 9_000,
            "districts": 36,
            "days": 140,
            "divergence": 0.30,
        },
        "prepare": {"window": {"days": 14, "stride": 7}, "vocabulary_size": 7_000},
    },
}

LONGEST_FILE = 200_000  # characters of a configuration
MOST_VALUES = 100_000  # in it, aliases written out

Model = TypeVar("Model", bound=BaseModel)


def merge(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Deep merge; later layers win."""
    merged: dict[str, Any] = {}
    for layer in layers:
        for key, value in layer.items():
            old = merged.get(key)
            merged[key] = (
                merge(old, value)
                if isinstance(old, Mapping) and isinstance(value, Mapping)
                else value
            )
    return merged


def build(model: type[Model], values: Mapping[str, Any], where: str) -> Model:
    """Validate, with one sentence for the first thing that is wrong."""
    try:
        return model.model_validate(dict(values))
    except ValidationError as error:
        raise MobatlasError(f"{where}: {_sentence(model, error)}") from None


def _sentence(model: type[BaseModel], error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    path = [str(part) for part in first["loc"]]
    name = ".".join(path)
    if first["type"] == "extra_forbidden":
        parent = _section_at(model, path[:-1])
        known = list(parent.model_fields) if parent else []
        section = ".".join(path[:-1])
        place = f" in '{section}'" if section else ""
        return f"unknown key '{path[-1]}'{place}{suggestion(path[-1], known)} (known: {', '.join(known)})"
    message = first["msg"].removeprefix("Value error, ")
    return f"'{name}' is wrong: {message[0].lower()}{message[1:]}" if name else message


def _section_at(model: type[BaseModel], path: list[str]) -> type[BaseModel] | None:
    for part in path:
        field = model.model_fields.get(part)
        if field is None or not (
            isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
        ):
            return None
        model = field.annotation
    return model


def parse_assignments(assignments: list[str]) -> dict[str, Any]:
    """`["window.days=1", "quality.min_coverage=0"]` as nested values; each value is read as YAML."""
    values: dict[str, Any] = {}
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not equals or not key.strip():
            raise MobatlasError(f"--set {assignment}: write it as section.key=value")
        try:
            value = _parsed(text)
        except ValueError:
            raise MobatlasError(
                f"--set {assignment}: '{text}' is not a value that YAML can read"
            ) from None
        for part in reversed(key.strip().split(".")):
            value = {part: value}
        values = merge(values, value)
    return values


def format_assignments(values: Mapping[str, Any], under: str = "") -> Iterator[str]:
    """The inverse of `parse_assignments`, one after the other."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from format_assignments(value, f"{under}{name}.")
        else:
            text = json.dumps(value, default=str)
            tiny = isinstance(value, float) and "e-" in text  # 1e-05, which YAML takes for a word
            yield f"{under}{name}={f'{value:.17f}' if tiny else text}"


def _parsed(text: str) -> Any:
    """What YAML says; a ValueError tells where it is none, or that it is larger than a configuration can be."""
    if len(text) > LONGEST_FILE:
        raise ValueError(f": a configuration has at most {LONGEST_FILE:,} characters")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        raise ValueError(f" at line {mark.line + 1}" if mark else "") from None
    except (
        ValueError,
        LookupError,
        AttributeError,
        TypeError,
        RecursionError,
    ):  # PyYAML's own, of odd values and deep nesting
        raise ValueError(": a value of it cannot be read") from None
    waiting, seen = [value], 0
    while (
        waiting
    ):  # aliases count each time, because whoever writes the values down writes them out
        each, seen = waiting.pop(), seen + 1
        waiting += (
            each.values()
            if isinstance(each, dict)
            else each
            if isinstance(each, (list, tuple, set))
            else ()
        )
        if seen > MOST_VALUES:
            raise ValueError(f": a configuration has at most {MOST_VALUES:,} values")
    return value


def read_yaml(path: Path) -> dict[str, Any]:
    """A YAML mapping from a file."""
    try:
        with path.open(encoding="utf-8") as file:
            values = _parsed(file.read(LONGEST_FILE + 1))
    except FileNotFoundError:
        raise MobatlasError(f"{path}: no such configuration file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise MobatlasError(f"{path}: cannot be read as a configuration file ({error})") from None
    except ValueError as error:
        raise MobatlasError(f"{path}: not valid YAML{error}") from None
    if values is None:
        return {}
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise MobatlasError(f"{path}: a configuration is a mapping of section names to values")
    return values


def preset_values(preset: str | None) -> dict[str, Any]:
    """The sections of a preset; nothing for none."""
    if preset is None:
        return {}
    if not isinstance(preset, str) or preset not in PRESETS:
        raise MobatlasError(
            f"preset '{preset}' does not exist{suggestion(str(preset), PRESETS)} (known: small, paper)"
        )
    return PRESETS[preset]


def load_values(path: Path | None = None, preset: str | None = None) -> dict[str, Any]:
    """The values of a run: a preset (the one asked for, else the file's), then the file; refused if they do not validate."""
    values = read_yaml(path) if path else {}
    merged = _with_preset(values, preset)
    build(RunConfig, merged, str(path) if path else f"preset {merged['preset']}")
    return merged


def build_run(values: Mapping[str, Any], where: str = "run") -> RunConfig:
    """A validated run of values that are in hand, on top of the preset that they name."""
    return build(RunConfig, _with_preset(values), where)


def _with_preset(values: Mapping[str, Any], preset: str | None = None) -> dict[str, Any]:
    chosen = preset or values.get("preset")
    return merge(preset_values(chosen), values, {"preset": chosen})


def load_run(path: Path | None = None, preset: str | None = None) -> RunConfig:
    """A validated run from a YAML file, on top of a preset."""
    return RunConfig.model_validate(load_values(path, preset))
