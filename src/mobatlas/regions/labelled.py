"""Labelled people: the mean counts of each group among people whose attributes are known.

A labelled person of group d is an observation of row d of M without regional confounding.
"""

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd
from scipy import special

from mobatlas.data.dataset import Trajectories, TrajectoryDataset
from mobatlas.data.prepare.pipeline import prepare
from mobatlas.data.types import ANCHORS, FIRST_POI, OTHER, Floats, Ints
from mobatlas.errors import MobatlasError
from mobatlas.features.maps import FeatureMap
from mobatlas.groups import Groups
from mobatlas.io.manifest import MANIFEST
from mobatlas.io.tables import find_table, key_column, read_table, require_columns
from mobatlas.regions.aggregates import (
    aggregate,
    aggregates_from_dataset,
    count_features,
    person_means,
)
from mobatlas.regions.census import label_columns
from mobatlas.regions.composition import group_weights
from mobatlas.regions.partitions import derive_seed, renumber, restrict
from mobatlas.regions.patterns import column_names
from mobatlas.regions.types import (
    Aggregates,
    Composition,
    GroupEvidence,
    Regions,
    ReportedEvidence,
)

NAME = "labelled people"
VISITS = "visits"  # the one map whose counts do not grow with the length of the window
MAX_PLACES = 10**9  # of a survey; those outside the vocabulary of the dataset become OTHER
ROUNDING = 1e-9  # of the part of a row in a group
MIN_PEOPLE = 2  # of a group: one person has no variance
MIN_EXPECTED = 5.0  # people in a cell of a chi-square test; smaller cells are merged
SIGNIFICANT = 0.001  # p-value of a difference that is reported
CLEAR = 0.1  # share of people that would have to move; smaller differences are not reported


@dataclass(frozen=True)
class _People:
    """Users of a table and the group of each, -1 where it is unknown."""

    path: Path
    users: Sequence[str]
    group: Ints


def labelled_people(
    dataset: TrajectoryDataset,
    source: Path | int,
    maps: Sequence[FeatureMap],
    regions: Regions,
    region_of_person: Ints | None,
    seed: int,
    rename: Mapping[str, str] | None = None,
) -> ReportedEvidence:
    """Evidence from labelled people.

    Parameters
    ----------
    dataset
        The dataset whose features are counted.
    source
        A table of some of its people, a folder of a separate survey, or a number of random
        training people.
    maps
        Feature maps.
    regions, region_of_person
        The regions, and the region (people,) of each person or -1, to warn about a choice of
        people that differs from the population.
    seed
        Random seed of the sample.
    rename
        As in `read_composition`; for a folder, columns of its visits and people.

    Returns
    -------
    ReportedEvidence
        The evidence, with notes and warnings.

    Examples
    --------
    >>> labelled_people(dataset, 400, maps, regions, None, seed=0)  # doctest: +SKIP
    """
    notes: list[str] = []
    if isinstance(source, int):
        group = _draw(dataset, source, seed)
    elif source.is_dir():
        return _survey(dataset, source, maps, regions, rename or {})
    else:
        people = _read_people(source, regions.groups, read_table(source, rename, notes))
        group = _people_of_dataset(dataset, people, notes)
    number, rows = _counted_groups(group, regions.groups, notes)
    means = aggregates_from_dataset(dataset, maps, number[group], "train", rows)
    warnings = _group_warnings(group, regions)
    if region_of_person is not None and not regions.randomised:
        everyone = restrict(region_of_person, dataset.split_people("train"))
        warnings += _region_warnings(group, everyone, regions.composition)
    return ReportedEvidence(_evidence(means, regions.groups), notes, warnings)


def _draw(dataset: TrajectoryDataset, n: int, seed: int) -> Ints:
    """The groups (people,) of n random labelled training people, -1 for all others.

    The order in which people are drawn does not depend on labels, so that labels of people who are
    not drawn have no influence.
    """
    if dataset.groups is None or dataset.labels() is None:
        raise MobatlasError(f"--labelled-sample {n}: {dataset.path} has no labels to draw from")
    group = dataset.person_groups()
    people = np.intersect1d(dataset.split_people("train"), dataset.person)
    order = np.random.default_rng(derive_seed(seed, "labelled")).permutation(people)
    order = order[group[order] >= 0]
    if not 0 < n <= len(order):
        raise MobatlasError(
            f"--labelled-sample {n}: give a number from 1 to {len(order):,}, the labelled training "
            f"people of {dataset.path}"
        )
    return restrict(group, order[:n])


def _read_people(path: Path, groups: Groups, table: pd.DataFrame) -> _People:
    """Read user ids and attributes, and match the attributes with the groups."""
    columns = list(table.columns)
    require_columns(str(path), columns, ("user_id",))
    codes, users = key_column(path, table, "user_id")
    if len(users) < len(codes):
        twice = users[int(np.argmax(np.bincount(codes) > 1))]
        raise MobatlasError(f"{path}: user_id '{twice}' has two rows; keep one row per person")
    attributes = label_columns(path, columns, "user_id", groups)
    texts = table[attributes].astype("string").fillna("")
    known = np.flatnonzero((texts != "").all(axis=1))
    group = np.full(len(table), -1, dtype=np.int64)
    if len(known):
        weights = group_weights(path, table.iloc[known], attributes, groups)
        # An age range that spans two groups says too little about one person.
        group[known] = np.where(weights.max(1) > 1 - ROUNDING, weights.argmax(1), -1)
    return _People(path, users, group)


def _people_of_dataset(dataset: TrajectoryDataset, people: _People, notes: list[str]) -> Ints:
    """The groups (people,) of the training people in a table, -1 for all others."""
    ids = dataset.people["user_id"].to_pylist()
    row = {user: number for number, user in enumerate(ids)}
    rows = np.array([row.get(user, -1) for user in people.users], dtype=np.int64)
    if not (rows >= 0).any():
        raise MobatlasError(
            f"{people.path}: no user_id is in {dataset.path} ('{people.users[0]}' in one, "
            f"'{ids[0]}' in the other); write the ids the same way in both"
        )
    group = np.full(len(ids), -1, dtype=np.int64)
    group[rows[rows >= 0]] = people.group[rows >= 0]
    used = restrict(group, np.intersect1d(dataset.split_people("train"), dataset.person))
    held_out = len(np.setdiff1d(rows[rows >= 0], dataset.split_people("train")))
    _note_unused(
        notes,
        people,
        {
            "not in the dataset": int((rows < 0).sum()),
            "validation or test people": held_out,
            "without a known group": int((people.group < 0).sum()),
        },
    )
    return used


def _note_unused(notes: list[str], people: _People, unused: dict[str, int]) -> None:
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in unused.items() if count)
    if reasons:
        notes.append(f"{people.path.name}: {len(people.users):,} people; not used: {reasons}")


def _survey(
    dataset: TrajectoryDataset,
    folder: Path,
    maps: Sequence[FeatureMap],
    regions: Regions,
    rename: Mapping[str, str],
) -> ReportedEvidence:
    """Means of the people of a separate survey, a dataset folder or tables of visits and people."""
    if (folder / MANIFEST).exists():
        survey = TrajectoryDataset.open(folder)
        if survey.manifest.content_hash == dataset.manifest.content_hash:
            raise MobatlasError(
                f"--labelled {folder}: this is the dataset itself; give a table of user_id and "
                "attributes of the people whose labels may be used"
            )
        labels = survey.labels()
        table = None if labels is None else labels.to_pandas()
        if table is None:
            raise MobatlasError(f"--labelled {folder}: this dataset has no labels")
        people = _read_people(folder, regions.groups, table)
        return _survey_means(dataset, survey, people, maps, regions)
    file = find_table(folder, "people")
    if file is None:
        raise MobatlasError(
            f"--labelled {folder}: the folder has no people.parquet or people.csv; add user_id and "
            "the attributes of each person"
        )
    table = read_table(file, rename)
    people = _read_people(file, regions.groups, table)
    with tempfile.TemporaryDirectory(prefix="mobatlas-") as scratch:
        survey = _prepare_survey(dataset, folder, table, Path(scratch), rename)
        return _survey_means(dataset, survey, people, maps, regions)


def _prepare_survey(
    dataset: TrajectoryDataset,
    folder: Path,
    people: pd.DataFrame,
    scratch: Path,
    rename: Mapping[str, str],
) -> TrajectoryDataset:
    """Prepare visits as those of the dataset were; only ids and anchors of people are passed on."""
    source = scratch / folder.name
    source.mkdir()
    for name in ("visits", "pois"):
        file = find_table(folder, name)
        if file is not None:
            (source / file.name).symlink_to(file.absolute())
    anchors = [name for name in ANCHORS if name in people.columns]
    ids = people["user_id"].astype(str)
    people[anchors].assign(user_id=ids).to_parquet(source / "people.parquet", index=False)
    names = {name for file in source.iterdir() for name in column_names(file)}
    values = {
        "rename": {name: theirs for name, theirs in rename.items() if theirs in names},
        "split": {"train": 1.0, "val": 0.0, "test": 0.0},
        "vocabulary_size": MAX_PLACES,
        "min_people_per_place": 0,  # rare places of the dataset are OTHER already
        "attributes": None,
        "regions": None,
        "reader": {},
    }
    try:
        prepare(source, scratch / "dataset", values=dataset.manifest.config["prepare"] | values)
    except MobatlasError as error:
        message = str(error).replace(str(source), str(folder))
        raise MobatlasError(
            f"{message} (the survey is prepared like {dataset.path}; for other settings, prepare "
            "it yourself and give its dataset folder)"
        ) from None
    return TrajectoryDataset.open(scratch / "dataset")


def _survey_means(
    dataset: TrajectoryDataset,
    survey: TrajectoryDataset,
    people: _People,
    maps: Sequence[FeatureMap],
    regions: Regions,
) -> ReportedEvidence:
    """Means in the features of the dataset, per window of its length."""
    notes: list[str] = []
    label = dict(zip(people.users, people.group.tolist(), strict=True))
    users = survey.people["user_id"].to_pylist()
    rows = dataset.people["user_id"]
    held_out = set(rows.to_pylist()) - set(rows.take(dataset.split_people("train")).to_pylist())
    group = np.array([-1 if user in held_out else label.get(user, -1) for user in users], np.int64)
    observed = restrict(group, survey.person)
    _note_unused(
        notes,
        people,
        {
            "validation or test people of the dataset": sum(user in held_out for user in users),
            "without a known group": int((people.group < 0).sum()),
        },
    )
    scale = dataset.window_days / survey.window_days
    if scale != 1:
        maps = [each for each in maps if each.name != VISITS]
        notes.append(
            f"{people.path.name}: counts of windows of {survey.window_days} days are scaled to "
            f"{dataset.window_days} days"
        )
    counts, bins = count_features(maps, _in_vocabulary(dataset, survey, people.path, notes))
    phi = person_means(counts * scale, survey.person, len(users))
    number, names = _counted_groups(observed, regions.groups, notes)
    means = aggregate(phi, number[observed], names, bins)
    evidence = replace(_evidence(means, regions.groups), same_population=False)
    return ReportedEvidence(evidence, notes, _group_warnings(observed, regions))


def _in_vocabulary(
    dataset: TrajectoryDataset, survey: TrajectoryDataset, path: Path, notes: list[str]
) -> Trajectories:
    """Trajectories of a survey in the tokens of the dataset; other places become OTHER."""
    number = {poi: token for token, poi in enumerate(dataset.vocabulary.poi_ids)}
    token = np.array([number.get(poi, OTHER) for poi in survey.vocabulary.poi_ids])
    trajectories = Trajectories.of(survey)
    visits = trajectories.tokens[trajectories.tokens >= FIRST_POI]
    unknown = float(np.mean(token[visits] == OTHER)) if len(visits) else 0.0
    if unknown == 1:
        raise MobatlasError(
            f"{path}: no place of the survey is in {dataset.path}; use the same poi_id in both, or "
            "give means of categories with --group-table"
        )
    if unknown:
        notes.append(f"{path.name}: {unknown:.0%} of visits are to places that count as OTHER")
    return replace(trajectories, tokens=token[trajectories.tokens].astype(np.int32))


def _counted_groups(group: Ints, groups: Groups, notes: list[str]) -> tuple[Ints, tuple[str, ...]]:
    """The row of each group, -1 for groups with too few people, and the names of the rows."""
    people = np.bincount(group[group >= 0], minlength=len(groups))  # (groups,)
    kept = np.flatnonzero(people >= MIN_PEOPLE)
    if not len(kept):
        raise MobatlasError(
            f"{NAME}: no group has {MIN_PEOPLE} people with trajectories; label more people"
        )
    names, number = renumber(groups.names, kept)
    notes.append(f"{NAME}: {int(people[kept].sum()):,} people of {len(kept)} groups")
    single = [groups.names[each] for each in np.flatnonzero(people == 1)]
    if single:
        notes.append(f"{NAME}: left out, because the group has one person: {'; '.join(single)}")
    return number, names


def _evidence(means: Aggregates, groups: Groups) -> GroupEvidence:
    """Evidence from the means of some groups, which are the regions of `means`."""
    rows = [groups.index(name) for name in means.regions]
    return GroupEvidence(
        NAME,
        "labelled",
        np.eye(len(groups))[rows],
        means.features,
        means.values,
        means.n,
        spread=means.spread,
    )


def _group_warnings(group: Ints, regions: Regions) -> list[str]:
    """Warnings about groups without labelled people, and about an uneven choice of groups."""
    people = np.bincount(group[group >= 0], minlength=len(regions.groups)).astype(np.float64)
    shares = regions.population_shares
    absent = [regions.groups.names[each] for each in np.flatnonzero((people == 0) & (shares > 0))]
    warnings = []
    if absent:
        warnings.append(f"no labelled people of {'; '.join(absent)}: other evidence decides there")
    cell = _largest_difference(people, shares)
    if cell is not None:
        warnings.append(
            f"the groups of the labelled people differ from the population: "
            f"{people[cell] / people.sum():.0%} are '{regions.groups.names[cell]}', but "
            f"{shares[cell]:.0%} of the population; estimates correct for this if the labelled "
            "people of a group behave as others of that group do"
        )
    return warnings


def _region_warnings(group: Ints, region: Ints, composition: Composition) -> list[str]:
    """A warning if labelled people live in other regions than people of their groups.

    `group` and `region` (people,) have numbers, -1 where unknown.
    """
    names = composition.regions
    residents = np.bincount(region[region >= 0], minlength=len(names))
    usable = (group >= 0) & (region >= 0)
    people = np.bincount(region[usable], minlength=len(names)).astype(np.float64)
    labelled = np.bincount(group[usable], minlength=len(composition.groups))
    where = residents[:, None] * composition.shares  # (regions, groups)
    expected = where @ (labelled / np.maximum(where.sum(0), 1e-300))
    if not people.any() or not expected.any():
        return []
    cell = _largest_difference(people, expected)
    if cell is None:
        return []
    return [
        f"the labelled people live in other regions than people of their groups: "
        f"{people[cell] / people.sum():.0%} in '{names[cell]}', where "
        f"{expected[cell] / expected.sum():.0%} are expected; their behaviour may be that of their "
        "regions, so label people everywhere if you can"
    ]


def _largest_difference(people: Floats, shares: Floats) -> int | None:
    """The cell with the largest difference from expected shares; None if there is none to report.

    A difference is reported if a chi-square test finds it and if it is not small.
    """
    shares = shares / shares.sum()
    expected = people.sum() * shares
    merged = _merge_small(expected)
    observed, expected = np.bincount(merged, people), np.bincount(merged, expected)
    if len(observed) < 2:
        return None
    distance = np.abs(observed - expected).sum() / 2 / people.sum()
    statistic = ((observed - expected) ** 2 / np.maximum(expected, 1e-300)).sum()
    if distance < CLEAR or special.chdtrc(len(observed) - 1, statistic) > SIGNIFICANT:
        return None
    return int(np.argmax(np.abs(people / people.sum() - shares)))


def _merge_small(expected: Floats) -> Ints:
    """The number of the merged cell of each cell; merged cells are neighbours."""
    merged = np.zeros(len(expected), dtype=np.int64)
    cell, total = 0, 0.0
    for number, each in enumerate(expected.tolist()):
        merged[number] = cell
        total += each
        if total >= MIN_EXPECTED:
            cell, total = cell + 1, 0.0
    return np.minimum(merged, max(cell - 1, 0))  # what is left joins the last full cell
