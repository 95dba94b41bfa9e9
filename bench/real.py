"""Real people: baseline, strong and the default strategy on a labelled survey, under partitions and under real regions.

Controlled partitions show what the method gives where its assumption holds. Real home regions take their composition from
people whom the aggregates were not counted on, or from a census; shuffled ones are the negative control. Those who are marked
as another kind of day do not train: they are the shift test.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.cells import (
    MEASURE,
    PARTITIONS,
    PHASE1,
    Bench,
    Job,
    Place,
    Samples,
    check_partition,
    command_of,
    fill,
    over_seeds,
    read_cell,
    summarise,
)
from bench.error_bars import error_bars
from bench.options import check_options
from bench.people import MANNER
from bench.score_models import FLOOR, score_samples
from bench.summary import write_result
from bench.survey import SHIFT, census_column, check_survey, divided_people, said_files
from mobatlas.config import format_assignments
from mobatlas.data.dataset import TrajectoryDataset
from mobatlas.data.trajectories import Trajectories
from mobatlas.data.vocabulary import FIRST_POI, OTHER, Vocabulary
from mobatlas.errors import MobatlasError, suggestion
from mobatlas.evaluation.comparison import Scores, real_groups
from mobatlas.evaluation.metrics import MetricSpec
from mobatlas.features.maps import FEATURE_MAPS
from mobatlas.io.manifest import library_versions

log = logging.getLogger("mobatlas")
FEATURES = (("category",), ("transitions",), ("category", "transitions"))  # that name no place
# Who lives far out travels far, of whatever group: nothing is trained on distances, they show the guard.
BANDS = ("distance",)
DEALT = (
    "poi",
    "category",
)  # of partitions: rare places borrow from their category what they do not tell themselves
DRAWS = 3  # the spread between seeds says whether they are enough
LONG = 4  # visits: a day with fewer is home, one place, home
NONE = "none"  # in the place of partitions, or of regions: the others alone
KINDS = ("partitions", "regions")
FOUR_VISITS = "four visits"
Real = Mapping[str, Trajectories]


def real_jobs(
    partitions: Sequence[str],
    columns: Sequence[str],
    census: str | None,
    features: Sequence[tuple[str, ...]] = FEATURES,
) -> list[Job]:
    """(a) partitions, (b) real regions, (c) those of the census, (d) shuffled ones; `census` is the column that it is about.

    Where a person lives counts, and regions are shuffled, with the last of the features.
    """
    last = features[-1]
    jobs = [Job(name, "tilt", features=DEALT) for name in partitions]
    jobs += [Job(column, "tilt", features=some) for column in columns for some in features]
    jobs += [Job(column, "tilt", features=last, membership=True) for column in columns]
    if census is not None:
        jobs += [Job(census, "tilt", features=some, census=True) for some in features]
        jobs += [Job(census, "tilt", features=last, census=True, membership=True)]
    return jobs + [Job(column, "tilt", features=last, shuffled=True) for column in columns]


def _bands(dataset: TrajectoryDataset, columns: Sequence[str], census: str | None) -> list[Job]:
    """Regions that tell distances, where it is known where people live."""
    if np.isnan(dataset.anchors[dataset.split_people("train"), :2]).all():
        return []
    jobs = [Job(column, "tilt", features=BANDS) for column in columns]
    return jobs if census is None else [*jobs, Job(census, "tilt", features=BANDS, census=True)]


def run(
    source: Path,
    out: Path,
    seeds: int = 3,
    first_seed: int = 0,
    *,
    generator: str = "autoregressive",
    partitions: Sequence[str] = (),
    regions: Sequence[str] = (),
    features: Sequence[tuple[str, ...]] = FEATURES,
    census: Path | None = None,
    shift: str | None = None,
    draws: int = DRAWS,
    prepared: Mapping[str, Any] | None = None,
    values: Mapping[str, Any] | None = None,
    quiet: bool = False,
) -> dict[str, Any]:
    """Fill a folder of the family within `out`, write real-FAMILY.json there (of one kind alone real-FAMILY-KIND.json).

    `partitions` are all by default, `regions` all columns of people that look like regions, and either may be `none`.
    `features` are what real regions tell, the last of them is used for what is tried with one alone; `shift` is a column that
    is false for those who do not train, `weekday` where there is one; scores are means of so many `draws`; `prepared` and
    `values` change how data are prepared and models trained.
    """
    _check_kinds(partitions, regions, census, features)
    for name in {name for some in features for name in some}:
        FEATURE_MAPS.get_entry(name)
    check_options(generator, Bench.preset, values or {})
    check_survey(source, () if list(regions) == [NONE] else regions, prepared, census)
    train_on, others = divided_people(source, out, shift, prepared)
    dataset = TrajectoryDataset.open(train_on)
    columns = _columns(dataset, regions)
    about = None if census is None else census_column(dataset, columns, census)
    folder, numbers = out / generator, range(first_seed, first_seed + seeds)
    data, about_census = said_files(source, census)
    asked = {
        "--data": [data],
        "--generator": [generator],
        "--census": [] if about_census is None else [about_census],
        "--partition": partitions,
        "--regions": regions,
        "--feature": [] if tuple(features) == FEATURES else ["+".join(some) for some in features],
        "--shift": [] if shift is None else [shift],
        "--draws": [] if draws == DRAWS else [str(draws)],
        "--set": list(format_assignments(values or {})),
    }
    told = command_of("real", asked)
    bench = Bench(
        f"{told} --seeds 1 --first-seed {{seed}} --out {out.name}",
        values or {},
        quiet=quiet,
        generator=generator,
        data=train_on,
        census=census,
        draws=draws,
        views=lambda samples, seed: _views(dataset, others, samples, seed),
    )
    dealt = () if list(partitions) == [NONE] else tuple(partitions or PARTITIONS)
    jobs = real_jobs(dealt, columns, about, features)
    kinds = [kind for kind, some in zip(KINDS, (dealt, columns), strict=True) if some]
    fill(folder, generator, jobs, numbers, bench)
    places = [Place(folder / f"seed-{seed}", seed, bench) for seed in numbers]
    result = {
        "command": f"{told.format()} --seeds {seeds} --first-seed {first_seed} --out {out.name}",
        "question": "real",
        "generator": generator,
        "seed": first_seed,
        "versions": library_versions(),
        "kinds": kinds,
        "people": MANNER,
        "draws": draws,
        "measure": f"{MEASURE}; mean of {draws} draws; {FOUR_VISITS}: trajectories of at least {LONG} visits on either side; "
        f"{SHIFT}: against people of another kind of day",
        **summarise(folder, numbers, jobs),
        "floor_of_groups": over_seeds([read_cell(folder, seed, PHASE1) for seed in numbers], FLOOR),
        "error_bars": error_bars(places, [*jobs, *_bands(dataset, columns, about)]),
        "between_groups": read_cell(folder, first_seed, PHASE1)["between_groups"],
    }
    write_result(out, real_name(generator, kinds), result)
    return result


def real_name(generator: str, kinds: Sequence[str]) -> str:
    """Of the result, that of one kind alone by its kind as well."""
    return "-".join(("real", generator, *(kinds if len(kinds) < len(KINDS) else ())))


def _check_kinds(
    partitions: Sequence[str],
    regions: Sequence[str],
    census: Path | None,
    features: Sequence[tuple[str, ...]],
) -> None:
    """Partitions that do not exist, and `none` beside something."""
    for option, asked in {"--partition": partitions, "--regions": regions}.items():
        if NONE in asked and len(asked) > 1:
            raise MobatlasError(f"{option} none: stands beside others; leave it or them out")
    for name in partitions:
        check_partition(name, (*PARTITIONS, NONE))
    if list(regions) == [NONE]:
        if list(partitions) == [NONE]:
            raise MobatlasError(
                "--partition none --regions none: nothing is left to measure; leave one of them out"
            )
        about = {"--census": census is not None, "--feature": tuple(features) != FEATURES}
        for option in (option for option, given in about.items() if given):
            raise MobatlasError(
                f"{option}: is about regions, and --regions none asks for none; leave one out"
            )


def _columns(dataset: TrajectoryDataset, asked: Sequence[str]) -> list[str]:
    known = dataset.region_columns
    if list(asked) == [NONE]:
        return []
    for name in asked:
        if name not in known:
            raise MobatlasError(
                f"--regions {name}: is no region column{suggestion(name, known)} (known: {', '.join(known)})"
            )
    if not known:
        raise MobatlasError(
            f"{dataset.path}: people have no region column, such as home_zone; add one"
        )
    return list(asked or known)


def _views(
    dataset: TrajectoryDataset, others: Path | None, samples: Samples, seed: int
) -> dict[str, dict[str, Scores]]:
    """The same samples, those of long days against long days, and all of them against people of another kind of day."""
    spec, training = MetricSpec.of(dataset), real_groups(dataset, "train")
    long = {label: _long(made) for label, made in samples.items()}
    real = _long(real_groups(dataset, "test"))
    found = {FOUR_VISITS: score_samples(dataset, spec, long, real, seed, training=_long(training))}
    if others is not None:
        shifted = _in_words_of(dataset.vocabulary, TrajectoryDataset.open(others))
        found[SHIFT] = score_samples(dataset, spec, samples, shifted, seed, training=training)
    return found


def _long(groups: Real) -> dict[str, Trajectories]:
    return {
        name: each.take(np.flatnonzero(np.diff(each.offsets) >= LONG))
        for name, each in groups.items()
    }


def _in_words_of(vocabulary: Vocabulary, others: TrajectoryDataset) -> dict[str, Trajectories]:
    """All people of another dataset by group, their places as tokens of this one: OTHER where it has none."""
    token = {poi: FIRST_POI + number for number, poi in enumerate(vocabulary.poi_ids[FIRST_POI:])}
    known = (token.get(poi, OTHER) for poi in others.vocabulary.poi_ids[FIRST_POI:])
    own = np.array([*range(FIRST_POI), *known], dtype=np.int32)
    splits = [real_groups(others, split) for split in ("train", "val", "test")]
    return {
        name: _collapsed(Trajectories.joined([each[name] for each in splits]), own)
        for name in splits[0]
    }


def _collapsed(trajectories: Trajectories, token: np.ndarray) -> Trajectories:
    """With other tokens; those that repeat the one before are one visit, as `prepare` has it."""
    tokens, owner = token[trajectories.tokens], trajectories.owner
    keep = np.ones(len(tokens), dtype=bool)
    keep[1:] = (tokens[1:] != tokens[:-1]) | (owner[1:] != owner[:-1])
    lengths = np.bincount(owner[keep], minlength=len(trajectories))
    return Trajectories(
        tokens[keep], np.concatenate(([0], np.cumsum(lengths))), trajectories.anchors
    )
