"""Aggregates V: mean counts per window over the people of each region.

They come from visits or from a published table.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy import sparse

from mobatlas.data.dataset import Trajectories, TrajectoryDataset
from mobatlas.data.prepare.tables import TRUE_WORDS
from mobatlas.data.types import Flags, Floats, Ints, region_column
from mobatlas.errors import MobatlasError, suggestion
from mobatlas.features.maps import FeatureMap
from mobatlas.io.tables import key_column, number_column, read_table, require_columns
from mobatlas.regions.census import Keys, pivot
from mobatlas.regions.composition import (
    refuse_empty_regions,
    refuse_negative,
    region_codes,
)
from mobatlas.regions.disclosure import NO_DISCLOSURE, Disclosure, apply_disclosure, clip_visits
from mobatlas.regions.types import Aggregates, bins_by_map, mean_over_regions

SAME_LEVEL = 1.5  # windows of one length may differ by this factor in visits per person


def count_features(
    maps: Sequence[FeatureMap], trajectories: Trajectories
) -> tuple[sparse.csr_array, tuple[str, ...]]:
    """Counts (trajectories, bins) of several feature maps, and the names of the bins."""
    counts = sparse.hstack([each.counts(trajectories) for each in maps], format="csr")
    return sparse.csr_array(counts), tuple(name for each in maps for name in each.bins)


def person_means(
    counts: sparse.csr_array, person: npt.NDArray[np.integer[Any]], people: int | None = None
) -> sparse.csr_array:
    """phi (people, bins): the mean over each person's windows; zero for people without any."""
    size = int(person.max(initial=-1)) + 1 if people is None else people
    windows = np.bincount(person, minlength=size)
    mean = sparse.csr_array(
        (1 / windows[person], (person, np.arange(len(person)))), shape=(size, len(person))
    )
    return sparse.csr_array(mean @ counts)


def aggregate(
    person_phi: sparse.csr_array,
    region_of_person: Sequence[str | None] | npt.NDArray[Any],
    regions: Sequence[str],
    features: Sequence[str] | None = None,
) -> Aggregates:
    """Mean over the people of each region, and the variance between people within regions.

    `region_of_person` has region ids (None: no region) or numbers in `regions` (-1: no region).
    """
    codes, names = region_codes(region_of_person, regions)
    members = np.flatnonzero(codes >= 0)
    n = np.bincount(codes[members], minlength=len(names)).astype(np.float64)  # (regions,)
    refuse_empty_regions("aggregates", names, n)
    membership = sparse.csr_array(
        (np.ones(len(members)), (codes[members], members)), shape=(len(names), person_phi.shape[0])
    )
    values = (membership @ person_phi).toarray()  # V (regions, features)
    values /= n[:, None]
    if features is None:
        features = [f"bin:{number}" for number in range(values.shape[1])]
    spread = _pooled_variance(person_phi, codes, values, n)
    squares = np.asarray(person_phi[members].power(2).sum(1)).ravel()
    # Rounded up to two digits: it is the norm of one person.
    largest = _round_up(float(np.sqrt(squares.max(initial=0))))
    return Aggregates(names, tuple(features), values, n, spread=spread, largest=largest)


def _round_up(value: float) -> float:
    """The next number with two significant digits."""
    if value <= 0:
        return value
    unit = 10.0 ** (math.floor(math.log10(value)) - 1)
    return math.ceil(value / unit) * unit


def aggregates_from_dataset(
    dataset: TrajectoryDataset,
    features: Sequence[FeatureMap],
    region_of_person: Sequence[str | None] | npt.NDArray[Any],
    split: str = "train",
    regions: Sequence[str] | None = None,
    disclosure: Disclosure = NO_DISCLOSURE,
) -> Aggregates:
    """V of the people of one split, under disclosure control.

    `region_of_person` has one entry per row of people: None or -1 leaves a person out.
    """
    codes, names = region_codes(region_of_person, regions)
    people = dataset.people.num_rows
    if len(codes) != people:
        raise MobatlasError(
            f"{dataset.path}: has {people:,} people, but {len(codes):,} regions of people were "
            "passed; pass one per person"
        )
    indices = dataset.split(split)
    person = dataset.person[indices]
    # A person without a window in this split has no phi, which differs from a phi of zero.
    observed = np.zeros(people, dtype=bool)
    observed[person] = True
    indices = indices[codes[person] >= 0]
    counts, bins = count_features(features, Trajectories.of(dataset, indices))
    phi = person_means(counts, dataset.person[indices], people)
    region = np.where(observed, codes, -1)
    if disclosure.max_visits is not None:
        phi = clip_visits(phi, disclosure.max_visits)
    aggregates = aggregate(phi, region, names, bins)
    return (
        apply_disclosure(aggregates, phi, region, disclosure) if disclosure.active else aggregates
    )


def read_aggregates(
    path: Path | str,
    known_bins: Collection[str] = (),
    notes: list[str] | None = None,
    rename: Mapping[str, str] | None = None,
) -> Aggregates:
    """Read V from a published table: region, feature, value (or total visits), n.

    Columns suppressed and noise_sd are optional. Cells that are empty, flagged or written like
    `<5` are suppressed and become NaN. Without n only shares are known (`pooled`). `notes`
    receives one sentence per decision.
    """
    path = Path(path)
    table = read_table(path, rename, notes)
    columns = list(table.columns)
    measure = "visits" if "visits" in columns and "value" not in columns else "value"
    require_columns(str(path), columns, ("feature", measure))
    region = key_column(path, table, region_column(path, columns))
    feature = key_column(path, table, "feature")
    regions = region[1]
    features = feature[1]
    unknown = [name for name in features if known_bins and name not in known_bins]
    if unknown:
        raise MobatlasError(
            f"{path}: feature '{unknown[0]}' does not exist in the dataset"
            f"{suggestion(unknown[0], known_bins)}"
        )
    published = table.assign(**{measure: table[measure].mask(_suppressed(table, measure))})
    rows = number_column(path, published, measure, missing=True)
    absent = np.nan if np.isnan(rows).any() else 0.0
    values = pivot(path, region, feature, rows, absent)  # V (regions, features)
    noisy = "noise_sd" in columns  # noise may make a count negative
    if not noisy:
        refuse_negative(path, measure, regions, features, values)
    n = people_behind(path, table, region)
    per_person = n[:, None] if measure == "visits" and n is not None else 1.0
    values = values / per_person
    _refuse_empty(path, regions, values)
    decisions = _suppression_notes(path.name, values, len(rows))
    pooled = n is None
    if n is None:
        values = _shares(values, features)
        n = np.ones(len(regions))
        decisions.append(
            f"{path.name}: the table has no column 'n', so only shares of visits are known. Groups "
            "that go out more have more weight in them, and all regions have equal weight"
        )
    if notes is not None:
        notes += decisions
    noise = None
    if noisy:
        sd = np.nan_to_num(number_column(path, table, "noise_sd", missing=True))
        noise = (pivot(path, region, feature, sd) / per_person) ** 2
    aggregates = Aggregates(regions, features, values, n, pooled=pooled, noise=noise)
    return aggregates.select(np.flatnonzero(~np.isnan(values).all(1)))


def same_level(published: float, ours: float) -> bool:
    """Whether two numbers of visits per person may come from windows of one length."""
    return 1 / SAME_LEVEL < published / max(ours, 1e-300) < SAME_LEVEL


def compare_levels(published: float, ours: float, where: str = "aggregates") -> list[str]:
    """A warning if a published table and the dataset differ in visits per person and window."""
    if same_level(published, ours):
        return []
    return [
        f"people make {published:.3g} visits per window in the {where}, but {ours:.3g} in the "
        "dataset: do both use windows of the same length?"
    ]


def compare_with_dataset(
    aggregates: Aggregates, dataset: TrajectoryDataset, maps: Sequence[FeatureMap]
) -> list[str]:
    """Compare published aggregates with training people; shares have no level to compare."""
    if aggregates.pooled or not len(dataset.split("train")):
        return []
    known = np.flatnonzero(~np.isnan(aggregates.values).all(0))
    published = mean_over_regions(aggregates.values, aggregates.n / aggregates.n.sum())
    mean = training_means(dataset, maps)
    ours = sum(mean[aggregates.features[number]] for number in known.tolist())
    return compare_levels(float(published[known].sum()), ours)


def training_means(dataset: TrajectoryDataset, maps: Sequence[FeatureMap]) -> dict[str, float]:
    """The mean counts of training people by feature."""
    everyone = np.zeros(dataset.people.num_rows, dtype=np.int64)
    training = aggregates_from_dataset(dataset, maps, everyone, "train", ("everyone",))
    return dict(zip(training.features, training.values[0].tolist(), strict=True))


def _pooled_variance(
    phi: sparse.csr_array, codes: Ints, values: Floats, n: Floats
) -> Floats | None:
    """Variance between people within regions (features,); None if every region has one person."""
    freedom = n.sum() - len(n)  # each regional mean costs one degree of freedom
    if freedom <= 0:
        return None
    rows = phi[codes >= 0]
    squares = np.asarray(rows.multiply(rows).sum(0)).ravel()
    squares = squares - np.einsum("g,gj,gj->j", n, values, values)
    return np.maximum(squares, 0) / freedom


def _suppressed(table: pd.DataFrame, column: str) -> Flags:
    suppressed = np.zeros(len(table), dtype=np.bool_)
    if not pd.api.types.is_numeric_dtype(table[column]):
        texts = table[column].astype(str).str.strip()
        suppressed |= np.asarray(texts.str.startswith("<"), dtype=np.bool_)
    if "suppressed" in table.columns:
        flags = table["suppressed"].astype(str).str.strip().str.lower()
        suppressed |= np.asarray(flags.isin(TRUE_WORDS))
    return suppressed


def _suppression_notes(name: str, values: Floats, rows: int) -> list[str]:
    unknown = np.isnan(values)
    empty = int(unknown.all(1).sum())
    meaning = "suppressed" if unknown.any() else "zero"
    notes = {
        f"{name}: {values.size - rows:,} cells are not in the table and count as {meaning}": (
            values.size > rows
        ),
        f"{name}: {int(unknown.sum()):,} of {values.size:,} cells are suppressed": unknown.any(),
        f"{name}: {empty:,} regions are left out: all their values are suppressed": empty > 0,
    }
    return [note for note, applies in notes.items() if applies]


def people_behind(
    path: Path, table: pd.DataFrame, rows: Keys, kind: str = "region"
) -> Floats | None:
    """The column n, which has one value for each region or group; None without it."""
    if "n" not in table.columns:
        return None
    codes, names = rows
    values = number_column(path, table, "n")
    n = np.zeros(len(names))
    n[codes] = values
    if (n[codes] != values).any():
        row = int(np.argmax(n[codes] != values))
        raise MobatlasError(
            f"{path}: {kind} '{names[codes[row]]}' has two values of n, {values[row]:g} and "
            f"{n[codes[row]]:g}; n is the number of people of a {kind}, so give one value"
        )
    if not (n > 0).all() or np.isinf(n).any():
        row = int(np.argmax(~(n > 0) | np.isinf(n)))
        raise MobatlasError(
            f"{path}: {kind} '{names[row]}' has no people (n is {n[row]:g}); remove it"
        )
    return n


def _refuse_empty(path: Path, regions: Sequence[str], values: Floats) -> None:
    if np.isnan(values).all():
        raise MobatlasError(f"{path}: every value is suppressed; nothing can be estimated")
    zero = (np.nansum(values, axis=1) == 0) & ~np.isnan(values).any(1)
    if zero.any():
        raise MobatlasError(
            f"{path}: region '{regions[int(np.argmax(zero))]}' has only zeros; remove it"
        )


def _shares(values: Floats, features: Sequence[str]) -> Floats:
    """Normalise each feature map of each region: its known bins sum to 1."""
    shares = values.copy()
    for bins in bins_by_map(features).values():
        total = np.nansum(values[:, bins], axis=1, keepdims=True)
        shares[:, bins] = values[:, bins] / np.where(total > 0, total, 1)
    return shares
