"""The configuration of a run: pydantic models, YAML files, `--set`, and the presets.

The sections of a YAML file are the fields of `RunConfig`. Later layers override earlier ones: the
defaults below, a preset, the suggestions of a reader, the file, `--set section.key=value`.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)
from yaml.constructor import ConstructorError

from mobatlas.errors import MobatlasError, refuse_unknown, suggestion

DEFAULT_GENERATOR = "autoregressive"  # the family that benchmarks best
MIN_PEOPLE = 10  # behind each place, region and group: the k of docs/privacy.md


class Section(BaseModel):
    """A part of the configuration: immutable, without unknown keys."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, str_strip_whitespace=True, allow_inf_nan=False
    )


class CityConfig(Section):
    """The size and behaviour of a simulated city.

    Examples
    --------
    >>> CityConfig(users=500).days
    28
    """

    users: int = Field(4_000, ge=1)
    pois: int = Field(240, ge=12, le=50_000)  # at least one of each category
    districts: int = Field(16, ge=1)
    days: int = Field(28, ge=1, le=3_650)
    start: date = date(2024, 3, 4)  # a Monday, so that weeks and windows begin together
    attributes: dict[str, tuple[str, ...]] = {
        "age": ("<30", "30-40", "40-50", ">50"),
        "gender": ("M", "F"),
    }
    # Mean pairwise JSD (bits) of the groups' expected POI visits. Realised visits differ more,
    # most of all at POIs with few visits. With the presets, all realised pairs are within the
    # paper's range, 0.40 to 0.54.
    divergence: float = Field(0.44, ge=0, lt=0.9)
    # How much the compositions of the districts differ; with 0 they are equal.
    segregation: float = Field(1.0, ge=0, le=10)
    activity: float = Field(1.0, gt=0, le=5)  # outings per day, relative to the default
    dropout: float = Field(0.03, ge=0, lt=1)  # share of a person's days without any record


class WindowConfig(Section):
    """The calendar days of a trajectory."""

    days: int = Field(14, ge=1, le=366)
    stride: int = Field(7, ge=1, le=366)
    # The first day of the first window: the person's first observed day, or a date for everyone.
    origin: Literal["user"] | date = "user"


class QualityConfig(Section):
    """The quality that a window needs; the thresholds are those of the paper's appendix."""

    # A day with a wider bounding box is spatially unreliable.
    max_day_km: float = Field(800.0, gt=0)
    max_unreliable: float = Field(0.1, ge=0, le=1)  # share of a window's days
    # A day with at least this observed share has high quality; 0 disables the rule.
    min_coverage: float = Field(0.2, ge=0, le=1)
    min_high_quality: float = Field(0.8, ge=0, le=1)  # share of a window's days
    min_tokens: int = Field(1, ge=1)  # shorter trajectories are left out


Hour = Annotated[int, Field(ge=0, le=24)]


class AnchorConfig(Section):
    """Home and work: from the source, or the modal place at night and in working hours."""

    # auto: for people with neither flagged visits nor anchors in the source
    infer: Literal["auto", "always", "never"] = "auto"
    # If the source flags no visits, visits within this distance of an anchor get its flag.
    radius_metres: float = Field(250.0, gt=0)
    night: tuple[Hour, Hour] = (22, 6)  # may wrap around midnight
    working_hours: tuple[Hour, Hour] = (9, 17)  # on weekdays
    min_days: int = Field(3, ge=1)  # distinct days with visits that a home or work place needs
    require_both: bool = True  # keep only people with a home and a work location


class SplitConfig(Section):
    """Shares of people; a hash of the user id and the salt assigns each person."""

    train: float = Field(0.8, gt=0, le=1)
    val: float = Field(0.1, ge=0, lt=1)
    test: float = Field(0.1, ge=0, lt=1)
    salt: str = "mobatlas"

    @model_validator(mode="after")
    def _shares_sum_to_one(self) -> Self:
        if abs(self.train + self.val + self.test - 1) > 1e-9:
            raise ValueError(f"train + val + test is {self.train + self.val + self.test:g}, not 1")
        return self


def _increasing(limits: tuple[float, ...]) -> tuple[float, ...]:
    if not limits or list(limits) != sorted(set(limits)):
        raise ValueError("give at least one limit, in increasing order")
    return limits


BinLimits = Annotated[tuple[float, ...], AfterValidator(_increasing)]


class PrepareConfig(Section):
    """How raw visits become trajectories; the defaults are those of the paper.

    Examples
    --------
    >>> PrepareConfig(vocabulary_size=500).window.days
    14
    """

    window: WindowConfig = WindowConfig()
    quality: QualityConfig = QualityConfig()
    anchors: AnchorConfig = AnchorConfig()
    split: SplitConfig = SplitConfig()
    vocabulary_size: int = Field(7_000, ge=1)  # POIs beyond the most frequent become OTHER
    # POIs that fewer training people have visited become OTHER too; 0 keeps them.
    min_people_per_place: int = Field(MIN_PEOPLE, ge=0)
    # Label columns of people, in order; None to recognise them by name.
    attributes: tuple[str, ...] | dict[str, tuple[str, ...]] | None = None
    regions: tuple[str, ...] | None = None  # region columns; None to recognise them by name
    # Limits of bins for numeric attributes: {age: [30, 40]} gives <30, 30-40 and >40.
    bins: dict[str, BinLimits] = {}
    # until_next: a visit without a departure lasts until the person's next arrival, but no longer
    # than max_gap_hours.
    missing_departure: Literal["instant", "until_next"] = "instant"
    max_gap_hours: float = Field(12.0, gt=0)
    max_stay_days: int = Field(60, ge=1)  # a longer visit is a broken record
    # Share of rows without coordinates above which the source is refused.
    max_missing_coordinates: float = Field(0.2, ge=0, le=1)
    invalid_rows: Literal["refuse", "drop"] = "refuse"
    rename: dict[str, str] = {}  # columns of the source: expected name to the name in the source
    reader: dict[str, Any] = {}  # options of the reader, which checks them
    # Memory of DuckDB, which spills to disk beyond it, or the heap of a new Spark session.
    memory_limit: str = "2GB"

    @field_validator("attributes")
    @classmethod
    def _require_attributes(cls, value: Any) -> Any:
        if value is not None and len(value) == 0:
            raise ValueError("give at least one attribute, or remove the key")
        return value


class TrainConfig(Section):
    """Phase 1: the generator and its options, which the generator checks."""

    generator: str = DEFAULT_GENERATOR
    options: dict[str, Any] = {}


class SupervisionConfig(Section):
    """Phase 2: the strategy and its options, which the strategy and the generator check."""

    strategy: str = "auto"
    divergence: str | None = None
    membership: bool = False
    options: dict[str, Any] = {}


class SourceConfig(Section):
    """The visits: a file or folder, relative to the folder of the configuration."""

    path: Path
    format: str = "plain"
    engine: str = "duckdb"


class RegionsConfig(Section):
    """One source of regions: two tables, a column of people, or a partition of labelled people."""

    # Several tables, such as one of ages and one of genders, are combined by raking, from the joint
    # distribution of `joint_prior`, or as independent attributes.
    composition: Path | tuple[Path, ...] | None = None
    joint_prior: Path | None = None
    aggregates: Path | None = None
    by: str | None = None
    partition: str | None = None
    # Evidence beside the regions: published means by group, and people with known attributes.
    group_tables: tuple[Path, ...] | None = None
    # The period of the values of a published table, by its file name: day, week, month, window,
    # share, "10 days" or "2024-03-01 to 2024-03-31".
    per: dict[str, str] = {}
    home_panel: Path | None = None  # devices by home region, for aggregates without people
    polygons: Path | None = None  # regions as GeoJSON or GeoPackage; `by` is their property
    labelled: Path | None = None
    labelled_sample: int | None = Field(None, ge=1)
    features: tuple[str, ...] | None = None
    mask: tuple[str, ...] = ()
    min_people: int = Field(MIN_PEOPLE, ge=0)  # of a region and of a group
    # An age range of the composition that overlaps two groups is refused by default; "uniform"
    # spreads its people evenly over its years.
    straddle: Literal["refuse", "uniform"] | None = None
    rename: dict[str, str] = {}  # columns of the tables: expected name to the name in the table

    @model_validator(mode="after")
    def _straddle_needs_composition(self) -> Self:
        if self.straddle is not None and self.composition is None:
            raise ValueError(
                "straddle applies to the age ranges of a composition; add one, or remove straddle"
            )
        return self


@dataclass(frozen=True)
class Coarsening:
    """How homes and workplaces are coarsened.

    A disc moves a place at random within a radius; a grid moves it to the centre of its square.
    """

    form: Literal["disc", "grid"]
    km: float  # radius or side

    @classmethod
    def parse(cls, value: float | str) -> Self:
        """Read a radius such as 1, "1km" or "500m", or a grid such as "grid:1km"."""
        text = value.strip().lower() if isinstance(value, str) else ""
        match = re.fullmatch(r"(grid:)?(\d+\.?\d*|\.\d+) ?(km|m)?", text)
        grid, number, unit = match.groups() if match else (None, value, None)
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
    """The samples of a run."""

    each: int = Field(500, ge=1)  # trajectories of each group
    # observed: homes and workplaces of training people, which disclose them
    anchors: Literal["synthetic", "observed"] = "synthetic"
    coarsen: float | str | None = None  # as `Coarsening.parse` reads it

    @field_validator("coarsen")
    @classmethod
    def _check_coarsening(cls, value: float | str | None) -> float | str | None:
        if value is not None:
            Coarsening.parse(value)
        return value


class RunConfig(Section):
    """All sections of a run.

    Examples
    --------
    >>> RunConfig(seed=3).prepare.split.train
    0.8
    """

    preset: Literal["small", "paper"] | None = None
    seed: int = Field(0, ge=0, lt=2**63)
    title: str = "Synthetic mobility by group"
    source: SourceConfig | None = None  # None for the simulated city
    regions: dict[str, RegionsConfig] = {}
    strong: bool | None = None  # whether to train the labelled upper bound; None if labels exist
    samples: SamplesConfig = SamplesConfig()
    audit: bool = True  # whether to audit the privacy of the samples
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

MAX_CHARACTERS = 200_000  # in a configuration file
MAX_VALUES = 100_000  # counting the content of an alias at each use

Model = TypeVar("Model", bound=BaseModel)


def merge(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Merge nested mappings; later layers override earlier ones."""
    merged: dict[str, Any] = {}
    for layer in layers:
        for key, value in layer.items():
            nested = isinstance(merged.get(key), Mapping) and isinstance(value, Mapping)
            merged[key] = merge(merged[key], value) if nested else value
    return merged


def build(model: type[Model], values: Mapping[str, Any], where: str) -> Model:
    """Validate values; the first error becomes one sentence."""
    try:
        return model.model_validate(dict(values))
    except ValidationError as error:
        raise MobatlasError(f"{where}: {_sentence(model, error)}") from None


def _sentence(model: type[BaseModel], error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    *sections, name = [str(part) for part in first["loc"]] or [""]
    if first["type"] == "extra_forbidden":
        known = _section_fields(model, sections)
        place = f" in '{'.'.join(sections)}'" if sections else ""
        return f"unknown key '{name}'{place}{suggestion(name, known)} (known: {', '.join(known)})"
    message = first["msg"].removeprefix("Value error, ")
    if not name:
        return message
    return f"'{'.'.join([*sections, name])}' is wrong: {message[0].lower()}{message[1:]}"


def _section_fields(model: type[BaseModel], sections: list[str]) -> list[str]:
    """The keys of a nested section; none for a section in a mapping or union."""
    for name in sections:
        section = getattr(model.model_fields.get(name), "annotation", None)
        if not (isinstance(section, type) and issubclass(section, BaseModel)):
            return []
        model = section
    return list(model.model_fields)


def parse_assignments(assignments: list[str]) -> dict[str, Any]:
    """Nested values from `["window.days=1", "quality.min_coverage=0"]`; each value is YAML."""
    values: dict[str, Any] = {}
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not equals or not key.strip():
            raise MobatlasError(f"--set {assignment}: write it as section.key=value")
        try:
            value = _parse_yaml(text)
        except ValueError:
            raise MobatlasError(
                f"--set {assignment}: '{text}' is not a value that YAML can read"
            ) from None
        for part in reversed(key.strip().split(".")):
            value = {part: value}
        values = merge(values, value)
    return values


def parse_renames(renames: Sequence[str]) -> dict[str, str]:
    """Names of columns from `["user_id=device_id"]`: the expected name to that in a table."""
    pairs = {
        ours.strip(): theirs.strip()
        for ours, _, theirs in (text.partition("=") for text in renames)
    }
    if not all((*pairs, *pairs.values())):
        raise MobatlasError(
            f"--rename {' '.join(renames)}: write it as expected=theirs, user_id=device_id"
        )
    return pairs


def format_assignments(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """The inverse of `parse_assignments`."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from format_assignments(value, f"{prefix}{name}.")
        else:
            text = json.dumps(value, default=str)
            is_small = isinstance(value, float) and "e-" in text  # YAML reads 1e-05 as a string
            yield f"{prefix}{name}={f'{value:.17f}' if is_small else text}"


class _Loader(yaml.SafeLoader):
    """Refuses repeated keys, of which YAML readers silently take the last."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in seen:
                    raise ConstructorError(
                        problem=f"the key '{key.value}' is repeated; remove one",
                        problem_mark=key.start_mark,
                    )
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def _parse_yaml(text: str) -> Any:
    """Parse YAML of limited size; a ValueError continues the sentence "not valid YAML"."""
    if len(text) > MAX_CHARACTERS:
        raise ValueError(f": a configuration has at most {MAX_CHARACTERS:,} characters")
    try:
        value = _Loader(text).get_single_data()
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        reason = f" ({error.problem})" if isinstance(error, ConstructorError) else ""
        raise ValueError(f" at line {mark.line + 1}{reason}" if mark else "") from None
    except (ValueError, LookupError, AttributeError, TypeError, RecursionError):
        # PyYAML raises these for odd values and deep nesting.
        raise ValueError(": it has a value that cannot be read") from None
    pending = [value]
    count = 0
    while pending:  # an alias counts each time, because the values are written out elsewhere
        item = pending.pop()
        count += 1
        if isinstance(item, dict):
            pending += item.values()
        elif isinstance(item, list | tuple | set):
            pending += item
        if count > MAX_VALUES:
            raise ValueError(f": a configuration has at most {MAX_VALUES:,} values")
    return value


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        with path.open(encoding="utf-8") as file:
            values = _parse_yaml(file.read(MAX_CHARACTERS + 1))
    except FileNotFoundError:
        raise MobatlasError(f"{path}: no such configuration file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise MobatlasError(
            f"{path}: the file cannot be read as a configuration file ({error})"
        ) from None
    except ValueError as error:
        raise MobatlasError(f"{path}: the file is not valid YAML{error}") from None
    values = {} if values is None else values
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise MobatlasError(f"{path}: a configuration is a mapping of section names to values")
    return values


def preset_values(
    preset: str | None,
    presets: Mapping[str, Mapping[str, Any]] = PRESETS,
    what: str = "preset '{}'",
) -> Mapping[str, Any]:
    """The values of a preset; none without a preset. `what` is it in an error message."""
    if preset is None:
        return {}
    refuse_unknown(what.format(preset), str(preset), presets)
    return presets[preset]


def load_values(
    path: Path | None = None,
    preset: str | None = None,
    changes: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The validated values of a file on top of a preset; `preset` and `changes` override them."""
    values = _with_preset(merge(_read_yaml(path) if path else {}, changes or {}), preset)
    build(RunConfig, values, str(path) if path else f"preset {values['preset']}")
    return values


def load_run(
    path: Path | None = None,
    preset: str | None = None,
    values: Mapping[str, Any] | None = None,
) -> RunConfig:
    """Read and validate the configuration of a run.

    Parameters
    ----------
    path
        A YAML file; None for the defaults.
    preset
        "small" or "paper"; overrides the preset of the file.
    values
        Values that override those of the file.

    Returns
    -------
    RunConfig
        The values of the file on top of the preset.

    Examples
    --------
    >>> load_run(preset="small").prepare.vocabulary_size
    200
    """
    return RunConfig.model_validate(load_values(path, preset, values))


def build_run(values: Mapping[str, Any], where: str = "run") -> RunConfig:
    """Validate the values of a run on top of the preset that they name."""
    return build(RunConfig, _with_preset(values), where)


def _with_preset(values: Mapping[str, Any], preset: str | None = None) -> dict[str, Any]:
    name = preset or values.get("preset")
    return merge(preset_values(name), values, {"preset": name})
