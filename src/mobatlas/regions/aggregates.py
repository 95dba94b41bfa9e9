"""Aggregates V: the mean over the people of each region of the counts in a window, from visits or from a published table."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from scipy import sparse

from mobatlas.data.dataset import TrajectoryDataset
from mobatlas.data.prepare.columns import TRUE_WORDS
from mobatlas.data.schema import region_column
from mobatlas.data.trajectories import Trajectories
from mobatlas.errors import MobatlasError, suggestion
from mobatlas.features.maps import FeatureMap
from mobatlas.io.tables import keys, numbers, read_table, require_columns
from mobatlas.regions.composition import region_codes
from mobatlas.regions.disclosure import AS_COUNTED, Disclosure, clipped, protected
from mobatlas.regions.types import Aggregates, Floats, blocks


def person_means(
    counts: sparse.csr_array, person: npt.NDArray[np.integer[Any]], people: int | None = None
) -> sparse.csr_array:
    """phi of each person, (people, bins): the mean over the person's windows; zero for people without any."""
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
    """Mean over the people of each region, and the variance between people of one region, pooled over regions.

    `region_of_person` holds region ids (None: none) or their numbers in `regions` (-1: none).
    """
    codes, names = region_codes(region_of_person, regions)
    members = np.flatnonzero(codes >= 0)
    n = np.bincount(codes[members], minlength=len(names)).astype(np.float64)  # (regions,)
    if not len(n) or not n.all():
        which = f"region '{names[int(np.argmin(n))]}'" if len(n) else "every region"
        raise MobatlasError(f"aggregates: {which} has no people; leave it out")
    belongs = sparse.csr_array(
        (np.ones(len(members)), (codes[members], members)), shape=(len(names), person_phi.shape[0])
    )
    values = (belongs @ person_phi).toarray()  # V (regions, features)
    values /= n[:, None]
    bins = (
        tuple(features)
        if features is not None
        else tuple(f"bin:{number}" for number in range(values.shape[1]))
    )
    return Aggregates(names, bins, values, n, spread=_pooled_variance(person_phi, codes, values, n))


def aggregates_from_dataset(
    dataset: TrajectoryDataset,
    features: Sequence[FeatureMap],
    region_of_person: Sequence[str | None] | npt.NDArray[Any],
    split: str = "train",
    regions: Sequence[str] | None = None,
    disclosure: Disclosure = AS_COUNTED,
) -> Aggregates:
    """V of the people of one split, as `disclosure` lets it be seen; `region_of_person` is row for row with people, None or -1
    for people to leave out.
    """
    codes, names = region_codes(region_of_person, regions)
    people = dataset.people.num_rows
    if len(codes) != people:
        raise MobatlasError(
            f"{dataset.path}: has {people:,} people, but regions of {len(codes):,} were given"
        )
    indices = dataset.split(split)
    person = dataset.person[indices]
    seen = np.zeros(
        people, dtype=bool
    )  # someone without a window here has no phi, which is not a phi of zero
    seen[person] = True
    indices = indices[codes[person] >= 0]
    trajectories = Trajectories.of(dataset, indices)
    counts = sparse.hstack([feature.counts(trajectories) for feature in features], format="csr")
    bins = tuple(name for feature in features for name in feature.bins)
    phi = person_means(sparse.csr_array(counts), dataset.person[indices], people)
    region = np.where(seen, codes, -1)
    if disclosure.max_visits is not None:
        phi = clipped(phi, disclosure.max_visits)
    found = aggregate(phi, region, names, bins)
    return protected(found, phi, region, disclosure) if disclosure.asked else found


def read_aggregates(
    path: Path | str, known_bins: Collection[str] | None = None, notes: list[str] | None = None
) -> Aggregates:
    """V from a published table: region, feature, value (or total visits), n; optionally suppressed, noise_sd.

    Cells that are empty, flagged or written like `<5` are suppressed, NaN here. Without n only shares are known (`pooled`).
    `notes` collects what was decided on the way, one sentence each.
    """
    path, notes = Path(path), [] if notes is None else notes
    table = read_table(path)
    columns = list(table.columns)
    column = "visits" if "visits" in columns and "value" not in columns else "value"
    require_columns(str(path), columns, ("feature", column))
    region, regions = keys(path, table, region_column(path, columns))
    feature, features = keys(path, table, "feature")
    _check_features(path, features, known_bins)
    cell = _cells(path, region, regions, feature, features)
    hidden = _suppressed(table, column)
    value = numbers(
        path, table.assign(**{column: table[column].mask(hidden)}), column, missing=True
    )
    if (value < 0).any() and "noise_sd" not in columns:  # noise may take a count below zero
        row = int(np.argmax(value < 0))
        where = f"'{features[feature[row]]}' in region '{regions[region[row]]}'"
        raise MobatlasError(
            f"{path}: the {column} of {where} is negative ({value[row]:g}); mend it"
        )
    n = _region_sizes(path, table, region, regions)
    per_person = n[region] if column == "visits" and n is not None else 1.0
    value = value / per_person

    absent = np.nan if np.isnan(value).any() else 0.0
    values = np.full((len(regions), len(features)), absent)  # V (regions, features)
    values.flat[cell] = value
    if values.size > len(cell):
        meaning = "suppressed" if np.isnan(absent) else "zero"
        notes.append(
            f"{path.name}: {values.size - len(cell):,} cells are not in the table and count as {meaning}"
        )
    if np.isnan(values).any():
        notes.append(
            f"{path.name}: {int(np.isnan(values).sum()):,} of {values.size:,} cells are suppressed"
        )
    _refuse_empty(path, regions, values)
    kept = ~np.isnan(values).all(1)
    if not kept.all():
        notes.append(
            f"{path.name}: {int((~kept).sum()):,} regions are left out, all their values are suppressed"
        )
    pooled = n is None
    if n is None:
        values, n = _shares(values, features), np.ones(len(regions))
        notes.append(
            f"{path.name}: has no column 'n', so only shares of visits are known: groups that go out more weigh more in them, "
            "and all regions count alike"
        )
    names = tuple(name for name, keep in zip(regions, kept, strict=True) if keep)
    noise = _published_noise(path, table, per_person, cell, values.shape)
    return Aggregates(
        names,
        features,
        values[kept],
        n[kept],
        pooled=pooled,
        noise=None if noise is None else noise[kept],
    )


def write_aggregates(path: Path, v: Aggregates) -> None:
    """Values and n as region, feature, value, n, and noise_sd where noise was added: all cells, region by region."""
    names = ["value", "n", *(["noise_sd"] if v.noise is not None else [])]
    texts = [(name, pa.dictionary(pa.int32(), pa.string())) for name in ("region", "feature")]
    schema = pa.schema([*texts, *((name, pa.float64()) for name in names)])
    features = pa.array(v.features, pa.string())
    with pq.ParquetWriter(
        path, schema, compression="zstd", store_schema=False, write_statistics=False
    ) as writer:
        for some in blocks(len(v.regions), len(v.features)):
            values = v.values[some]
            region, feature = np.indices(values.shape, dtype=np.int32)
            columns = {
                "region": pa.DictionaryArray.from_arrays(
                    region.ravel(), pa.array(v.regions[some], pa.string())
                ),
                "feature": pa.DictionaryArray.from_arrays(feature.ravel(), features),
                "value": values.ravel(),
                "n": np.repeat(v.n[some], len(features)),
            }
            if v.noise is not None:
                columns["noise_sd"] = np.sqrt(v.noise[some].ravel())
            writer.write_table(pa.table(columns, schema))


def load_aggregates(path: Path) -> Aggregates:
    """What `write_aggregates` wrote; the door for tables of others is `read_aggregates`."""
    file = pq.ParquetFile(path, read_dictionary=["region", "feature"])
    if not file.metadata.num_rows:
        return Aggregates((), (), np.zeros((0, 0)), np.zeros(0))
    names: dict[str, dict[str, None]] = {
        "region": {},
        "feature": {},
    }  # as sets that keep their order
    for group in range(file.num_row_groups):
        part = file.read_row_group(group, columns=list(names))
        for column, seen in names.items():
            seen.update(dict.fromkeys(part[column].unique().to_pylist()))
    regions, features = (tuple(seen) for seen in names.values())
    shape = len(regions), len(features)
    found = {
        name: np.empty(shape) for name in ("value", "noise_sd") if name in file.schema_arrow.names
    }
    n, done = [], 0
    for group in range(file.num_row_groups):
        part = file.read_row_group(group, columns=[*found, "n"])
        for name, values in found.items():
            values.ravel()[done : done + len(part)] = part[name].to_numpy()
        n.append(part["n"].to_numpy()[-done % shape[1] :: shape[1]].copy())
        done += len(part)
    noise = found["noise_sd"] ** 2 if "noise_sd" in found else None
    return Aggregates(regions, features, found["value"], np.concatenate(n), noise=noise)


def _pooled_variance(
    phi: sparse.csr_array, codes: npt.NDArray[np.int64], values: Floats, n: Floats
) -> npt.NDArray[np.float64] | None:
    """Variance between people of one region; None where every region has one person."""
    freedom = n.sum() - len(n)  # each region's mean costs one
    if freedom <= 0:
        return None
    rows = phi[codes >= 0]
    squares = np.asarray(rows.multiply(rows).sum(0)).ravel() - np.einsum(
        "g,gj,gj->j", n, values, values
    )  # (features,)
    return np.maximum(squares, 0) / freedom


def _check_features(path: Path, features: Sequence[str], known: Collection[str] | None) -> None:
    for name in features:
        if known is not None and name not in known:
            raise MobatlasError(
                f"{path}: feature '{name}' is not in the vocabulary of the dataset{suggestion(name, known)}"
            )


def _cells(
    path: Path,
    region: npt.NDArray[np.int64],
    regions: Sequence[str],
    feature: npt.NDArray[np.int64],
    features: Sequence[str],
) -> npt.NDArray[np.int64]:
    flat = region * len(features) + feature
    twice = pd.Series(flat).duplicated().to_numpy()
    if twice.any():
        row = int(np.argmax(twice))
        raise MobatlasError(
            f"{path}: region '{regions[region[row]]}' has feature '{features[feature[row]]}' twice; give it one row"
        )
    return flat


def _suppressed(table: pd.DataFrame, column: str) -> npt.NDArray[np.bool_]:
    hidden = np.zeros(len(table), dtype=np.bool_)
    if not pd.api.types.is_numeric_dtype(table[column]):
        hidden = np.asarray(
            table[column].astype(str).str.strip().str.startswith("<"), dtype=np.bool_
        )
    if "suppressed" in table.columns:
        hidden = hidden | np.asarray(
            table["suppressed"].astype(str).str.strip().str.lower().isin(TRUE_WORDS)
        )
    return hidden


def _region_sizes(
    path: Path, table: pd.DataFrame, region: npt.NDArray[np.int64], regions: Sequence[str]
) -> Floats | None:
    if "n" not in table.columns:
        return None
    rows = numbers(path, table, "n")
    n = np.zeros(len(regions))
    n[region] = rows
    if (n[region] != rows).any():
        row = int(np.argmax(n[region] != rows))
        raise MobatlasError(
            f"{path}: n of region '{regions[region[row]]}' is {rows[row]:g} and {n[region[row]]:g}; n counts the people of a "
            "region, give it one number"
        )
    if not (n > 0).all() or np.isinf(n).any():
        row = int(np.argmax(~(n > 0) | np.isinf(n)))
        raise MobatlasError(
            f"{path}: region '{regions[row]}' has no people (n is {n[row]:g}); leave it out"
        )
    return n


def _published_noise(
    path: Path,
    table: pd.DataFrame,
    per_person: Floats | float,
    cell: npt.NDArray[np.int64],
    shape: tuple[int, ...],
) -> Floats | None:
    """Variance of the noise that the publisher added, (regions, features)."""
    if "noise_sd" not in table.columns:
        return None
    variance = np.zeros(shape)
    variance.flat[cell] = (
        np.nan_to_num(numbers(path, table, "noise_sd", missing=True)) / per_person
    ) ** 2
    return variance


def _refuse_empty(path: Path, regions: Sequence[str], values: Floats) -> None:
    if np.isnan(values).all():
        raise MobatlasError(f"{path}: every value is suppressed; there is nothing to learn from")
    nothing = (np.nansum(values, axis=1) == 0) & ~np.isnan(values).any(1)
    if nothing.any():
        raise MobatlasError(
            f"{path}: region '{regions[int(np.argmax(nothing))]}' has zeros only; leave it out"
        )


def _shares(values: Floats, features: Sequence[str]) -> Floats:
    """Each feature map of each region on its own scale: its known bins sum to 1."""
    maps = np.array([name.partition(":")[0] for name in features])
    shares = values.copy()
    for name in np.unique(maps):
        total = np.nansum(values[:, maps == name], axis=1, keepdims=True)
        shares[:, maps == name] = values[:, maps == name] / np.where(total > 0, total, 1)
    return shares
