"""Real people: baseline, strong and tilt on a labelled survey, under partitions and real regions.

Controlled partitions show the method where its assumption holds. Real home regions take their
composition from people whose visits the aggregates do not count, or from a census; shuffled regions
are the negative control. People of another kind of day are left out of training and test the shift.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bench.cells import (
    MEASURE,
    PARTITIONS,
    PHASE1,
    Job,
    OtherViews,
    Samples,
    SeedFolder,
    Setup,
    Views,
    check_partition,
    model_cells,
)
from bench.error_bars import error_bars
from bench.gaps import over_seeds, summarise
from bench.options import check_options
from bench.people import DRAWING
from bench.runner import Command, Experiment, Runner, read_cell
from bench.score_models import FLOOR, score_samples
from bench.summary import write_result
from bench.survey import SHIFT, census_column, check_survey, display_names, split_survey
from mobatlas.config import DEFAULT_GENERATOR, format_assignments
from mobatlas.data.dataset import Trajectories, TrajectoryDataset
from mobatlas.data.types import FIRST_POI, OTHER, Vocabulary
from mobatlas.errors import MobatlasError, suggestion
from mobatlas.evaluation.comparison import real_groups
from mobatlas.evaluation.metrics import MetricSpec
from mobatlas.features import maps as registered

FEATURES = (("category",), ("transitions",), ("category", "transitions"))  # no places
# People who live far out travel far, whatever their group. No model is trained on distances;
# they show the warning about confounding.
DISTANCE = ("distance",)
# Of partitions: rare places borrow from their category.
PARTITION_FEATURES = ("poi", "category")
DRAWS = 3  # the spread between seeds shows whether they are enough
MIN_LONG = 4  # visits; a shorter day is home, one place, home
NONE = "none"  # instead of partitions or regions: measure only the others
KINDS = ("partitions", "regions")
FOUR_VISITS = "four visits"
Groups = Mapping[str, Trajectories]


@dataclass(frozen=True)
class RealOptions:
    """What is measured on a survey.

    An empty list means all: all partitions, all region columns. The last of `features` is used if
    only one is tried. `shift` is a column that is false for people to leave out of training;
    `weekday` by default. `prepared` changes how the survey is prepared.
    """

    generator: str = DEFAULT_GENERATOR
    partitions: Sequence[str] = ()
    regions: Sequence[str] = ()
    features: Sequence[tuple[str, ...]] = FEATURES
    census: Path | None = None
    shift: str | None = None
    draws: int = DRAWS
    labelled: int = 0  # training people whose labels are known beside real regions
    prepared: Mapping[str, Any] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)  # changes of the preset

    @property
    def controlled(self) -> tuple[str, ...]:
        """The partitions."""
        return () if list(self.partitions) == [NONE] else tuple(self.partitions or PARTITIONS)


def real_jobs(
    partitions: Sequence[str],
    columns: Sequence[str],
    census: str | None,
    features: Sequence[tuple[str, ...]] = FEATURES,
    labelled: int = 0,
) -> list[Job]:
    """Return jobs of partitions, real regions, census regions and shuffled regions.

    `census` is the region column that the census covers. Membership and shuffled regions use
    the last of the features. With labelled people, regions are measured with and without them.
    """
    last = features[-1]
    jobs = [Job(name, "tilt", features=PARTITION_FEATURES) for name in partitions]
    jobs += [Job(column, "tilt", features=maps) for column in columns for maps in features]
    if labelled:
        return jobs + [Job(column, "tilt", features=last, labelled=labelled) for column in columns]
    jobs += [Job(column, "tilt", features=last, membership=True) for column in columns]
    if census is not None:
        jobs += [Job(census, "tilt", features=maps, census=True) for maps in features]
        jobs += [Job(census, "tilt", features=last, census=True, membership=True)]
    return jobs + [Job(column, "tilt", features=last, shuffled=True) for column in columns]


def _distance_jobs(
    dataset: TrajectoryDataset, columns: Sequence[str], census: str | None
) -> list[Job]:
    """Return jobs with aggregates of distances, if homes are known."""
    if np.isnan(dataset.anchors[dataset.split_people("train"), :2]).all():
        return []
    jobs = [Job(column, "tilt", features=DISTANCE) for column in columns]
    return jobs if census is None else [*jobs, Job(census, "tilt", features=DISTANCE, census=True)]


def run(source: Path, experiment: Experiment, options: RealOptions) -> dict[str, Any]:
    """Train and score models in `out`/GENERATOR, then write real-GENERATOR.json.

    With partitions or regions alone the file is real-GENERATOR-KIND.json.
    """
    _check(source, options)
    trained_on, others = split_survey(source, experiment.out, options.shift, options.prepared)
    dataset = TrajectoryDataset.open(trained_on)
    columns = _region_columns(dataset, options.regions)
    census = None if options.census is None else census_column(dataset, columns, options.census)
    setup = Setup(
        options.values,
        quiet=experiment.quiet,
        generator=options.generator,
        data=trained_on,
        census=options.census,
        draws=options.draws,
        views=_other_views(dataset, others),
        strong_features=PARTITION_FEATURES,
    )
    jobs = real_jobs(options.controlled, columns, census, options.features, options.labelled)
    command = _command(source, options)
    folder = experiment.out / options.generator
    seeds = experiment.numbers
    runner = Runner(experiment, options.generator, command, folder)
    runner.run(model_cells(folder, setup, jobs, seeds))
    distances = _distance_jobs(dataset, columns, census)
    bars = error_bars(
        Runner(experiment, "error bars", command, folder),
        [SeedFolder(folder, seed, setup) for seed in seeds],
        [*jobs, *distances],
    )
    kinds = [
        kind for kind, names in zip(KINDS, (options.controlled, columns), strict=True) if names
    ]
    phase1 = [read_cell(folder, seed, PHASE1) for seed in seeds]
    header = command.header(experiment)
    result = {
        "command": header.pop("command"),
        "question": "real",
        "generator": options.generator,
        **header,
        "kinds": kinds,
        "people": DRAWING,
        "draws": options.draws,
        "measure": f"{MEASURE}; mean of {options.draws} draws; "
        f"{FOUR_VISITS}: trajectories of at least {MIN_LONG} visits on either side; "
        f"{SHIFT}: against people of another kind of day",
        **summarise(folder, seeds, jobs),
        "floor_of_groups": over_seeds(phase1, FLOOR),
        "error_bars": bars,
        "between_groups": phase1[0]["between_groups"],
    }
    write_result(experiment.out, real_name(options.generator, kinds), result)
    return result


def _check(source: Path, options: RealOptions) -> None:
    """Refuse wrong options before anything is prepared."""
    _check_kinds(options)
    for name in {name for maps in options.features for name in maps}:
        registered.FEATURES.get_entry(name, among=registered.feature_maps())
    check_options(options.generator, Setup.preset, options.values)
    regions = () if list(options.regions) == [NONE] else options.regions
    check_survey(source, regions, options.prepared, options.census)


def _command(source: Path, options: RealOptions) -> Command:
    data, census = display_names(source, options.census)
    default_features = tuple(options.features) == FEATURES
    features = [] if default_features else ["+".join(maps) for maps in options.features]
    return Command(
        "real",
        {
            "--data": [data],
            "--generator": [options.generator],
            "--census": [] if census is None else [census],
            "--partition": options.partitions,
            "--regions": options.regions,
            "--feature": features,
            "--shift": [] if options.shift is None else [options.shift],
            "--labelled": [str(options.labelled)] if options.labelled else [],
            "--draws": [] if options.draws == DRAWS else [str(options.draws)],
            "--set": list(format_assignments(options.values)),
        },
    )


def real_name(generator: str, kinds: Sequence[str]) -> str:
    """Return the name of a result; that of one kind alone contains the kind."""
    return "-".join(("real", generator, *(kinds if len(kinds) < len(KINDS) else ())))


def _check_kinds(options: RealOptions) -> None:
    """Refuse unknown partitions, and `none` together with other names."""
    for option, names in {"--partition": options.partitions, "--regions": options.regions}.items():
        if NONE in names and len(names) > 1:
            raise MobatlasError(f"{option} none: leave out either none or the other names")
    for name in options.partitions:
        check_partition(name, (*PARTITIONS, NONE))
    if list(options.regions) != [NONE]:
        return
    if list(options.partitions) == [NONE]:
        raise MobatlasError(
            "--partition none --regions none: nothing is left to measure; leave one of them out"
        )
    about_regions = {
        "--census": options.census is not None,
        "--feature": tuple(options.features) != FEATURES,
    }
    for option in (option for option, used in about_regions.items() if used):
        raise MobatlasError(f"{option}: has no effect with --regions none; leave one of them out")


def _region_columns(dataset: TrajectoryDataset, names: Sequence[str]) -> list[str]:
    known = dataset.region_columns
    if list(names) == [NONE]:
        return []
    for name in names:
        if name not in known:
            raise MobatlasError(
                f"--regions {name}: is no region column{suggestion(name, known)} "
                f"(known: {', '.join(known)})"
            )
    if not known:
        raise MobatlasError(
            f"{dataset.path}: people have no region column, such as home_zone; add one"
        )
    return list(names or known)


def _other_views(dataset: TrajectoryDataset, others: Path | None) -> OtherViews:
    shifted = None if others is None else TrajectoryDataset.open(others)
    inputs = {
        "min_long": MIN_LONG,
        "shift": None if shifted is None else shifted.manifest.content_hash,
    }
    return OtherViews(inputs, partial(_score_views, dataset, shifted))


def _score_views(
    dataset: TrajectoryDataset, others: TrajectoryDataset | None, samples: Samples, seed: int
) -> Views:
    """Score long days against long days, and all samples against people of another kind of day."""
    spec = MetricSpec.of(dataset)
    training = real_groups(dataset, "train")
    long = {label: _long(groups) for label, groups in samples.items()}
    real = _long(real_groups(dataset, "test"))
    views = {FOUR_VISITS: score_samples(dataset, spec, long, real, seed, training=_long(training))}
    if others is not None:
        shifted = _retokenise(dataset.vocabulary, others)
        views[SHIFT] = score_samples(dataset, spec, samples, shifted, seed, training=training)
    return views


def _long(groups: Groups) -> dict[str, Trajectories]:
    return {
        name: each.take(np.flatnonzero(np.diff(each.offsets) >= MIN_LONG))
        for name, each in groups.items()
    }


def _retokenise(vocabulary: Vocabulary, others: TrajectoryDataset) -> dict[str, Trajectories]:
    """Return all people of another dataset by group, in tokens of this vocabulary.

    A place that this vocabulary does not know becomes OTHER.
    """
    token = {poi: FIRST_POI + number for number, poi in enumerate(vocabulary.poi_ids[FIRST_POI:])}
    known = (token.get(poi, OTHER) for poi in others.vocabulary.poi_ids[FIRST_POI:])
    tokens = np.array([*range(FIRST_POI), *known], dtype=np.int32)
    splits = [real_groups(others, split) for split in ("train", "val", "test")]
    return {
        name: map_tokens(Trajectories.joined([each[name] for each in splits]), tokens)
        for name in splits[0]
    }


def map_tokens(trajectories: Trajectories, token: np.ndarray) -> Trajectories:
    """Replace tokens; as in `prepare`, equal tokens in a row become one visit."""
    tokens = token[trajectories.tokens]
    owner = trajectories.owner
    first = np.ones(len(tokens), dtype=bool)
    first[1:] = (tokens[1:] != tokens[:-1]) | (owner[1:] != owner[:-1])
    lengths = np.bincount(owner[first], minlength=len(trajectories))
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    return Trajectories(tokens[first], offsets, trajectories.anchors)
