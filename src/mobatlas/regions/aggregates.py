"""Aggregates V: mean counts per window over the people of each region.

They come from visits or from a published table.
"""

import difflib
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy import sparse

from mobatlas.data.dataset import Trajectories, TrajectoryDataset
from mobatlas.data.prepare.tables import TRUE_WORDS
from mobatlas.data.types import (
    ATTRIBUTE_NAMES,
    Flags,
    Floats,
    Ints,
    Vocabulary,
    looks_like_region,
    region_column,
)
from mobatlas.errors import SYNONYMS, MobatlasError, refuse_faults
from mobatlas.features.maps import FeatureMap, build_feature
from mobatlas.io.tables import key_column, number_column, read_table, require_columns
from mobatlas.regions.census import ACS_COLUMN, Keys, pivot
from mobatlas.regions.composition import refuse_empty_regions, refuse_negative, region_codes
from mobatlas.regions.disclosure import NO_DISCLOSURE, Disclosure, apply_disclosure, clip_visits
from mobatlas.regions.patterns import (
    DEVICES,
    HOMES,
    census_digits,
    column_names,
    read_patterns,
    with_people,
)
from mobatlas.regions.periods import check_level, windows_per_period
from mobatlas.regions.places import DESCRIPTION, IDS, NAMES, match_places
from mobatlas.regions.types import Aggregates, bins_by_map, mean_over_regions

VISITS = ("visits", "visit_count", "visit_counts", "raw_visit_counts", "trips", "count")
GROUPED = ("group", "male", "female", *ATTRIBUTE_NAMES)
USUAL = ("feature", "value", "per", "suppressed", "noise_sd", *DEVICES, *VISITS, *IDS, *DESCRIPTION)
SIMILAR = 0.85  # features whose names may be misspelt
MOST_TOTAL = 1e15  # visits in a table
SMALLEST_VALUE = 1e-9  # above zero
MOST_PEOPLE = 1e10
MOST_DAILY = 1_000.0  # visits of one kind
ROUNDED = 2e-3  # of shares that are rounded


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
    unit = 10.0 ** (math.floor(math.log10(value or 1)) - 1)
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


@dataclass(frozen=True)
class TableContext:
    """The dataset and the composition that a published table is read for.

    Parameters
    ----------
    known_bins
        The features of the dataset; empty: any feature is accepted.
    vocabulary
        The places of the dataset, to match places of the table.
    window_days
        Days of a window of the dataset.
    per
        The period of the values, see `periods`; None: the table has it, or values are per window.
    home_panel
        A table of the devices that live in each region, for a table without `n`.
    regions
        Regions of the composition; block groups are added up to them.
    rename
        Columns, as in `read_composition`.
    """

    known_bins: Collection[str] = ()
    vocabulary: Vocabulary | None = None
    window_days: int = 1
    per: str | None = None
    home_panel: Path | str | None = None
    regions: Sequence[str] = ()
    rename: Mapping[str, str] = field(default_factory=dict)


def read_aggregates(
    path: Path | str, context: TableContext, notes: list[str] | None = None
) -> tuple[Aggregates, float | None]:
    """Read V from a published table, and the days of a value: NaN for shares, None if not known.

    The table is long (region, feature or place or category, value or visits, n), wide (a column
    for each feature), or Patterns of SafeGraph and Advan. Columns suppressed, noise_sd and per are
    optional. Cells that are empty, flagged or written like `<5` are suppressed and become NaN.
    Without n only shares are known (`pooled`). `notes` receives one sentence per decision.
    """
    path = Path(path)
    notes = [] if notes is None else notes
    table = _read_rows(path, context, notes)
    measure = "visits" if "visits" in table.columns and "value" not in table.columns else "value"
    require_columns(str(path), table.columns, ("feature", measure))
    if table.empty:
        raise MobatlasError(f"{path}: no column has visits to a place or category; add one")
    table = _known_rows(path, table, measure, context.known_bins, notes)
    region = key_column(path, table, "region")
    feature = key_column(path, table, "feature")
    published = table.assign(**{measure: table[measure].mask(_suppressed(table, measure))})
    rows = number_column(path, published, measure, missing=True)
    n = people_behind(path, table, region)
    scale = windows_per_period(path, table, context.window_days, context.per)
    absent = np.nan if np.isnan(rows).any() else 0.0
    values = pivot(path, region, feature, rows, absent)  # V (regions, features)
    noisy = "noise_sd" in table.columns  # noise may make a count negative
    if not noisy:
        refuse_negative(path, measure, region[1], feature[1], values)
    _refuse_empty(path, region[1], values)
    notes += _suppression_notes(path.name, values, len(rows))
    refuse_absurd(path, measure, rows, (-MOST_TOTAL, MOST_TOTAL), SMALLEST_VALUE)
    if n is None or _holds_shares(path, table, rows, scale, notes):
        if n is None:
            notes.append(
                f"{path.name}: the table has no column 'n', so only shares of visits are known. "
                "Groups that go out more have more weight, and all regions have equal weight"
            )
        values = _shares(values, feature[1])
        n = np.ones(len(region[1]))
        aggregates = Aggregates(region[1], feature[1], values, n, pooled=True)
    else:
        factor = np.ones(len(rows)) if scale is None else scale  # (table rows,)
        factor = factor / n[region[0]] if measure == "visits" else factor
        most = MOST_DAILY * context.window_days
        refuse_absurd(path, f"{measure} per person", rows * factor, (-most, most))
        values = pivot(path, region, feature, rows * factor, absent)
        aggregates = Aggregates(region[1], feature[1], values, n)
        if noisy:
            sd = np.nan_to_num(number_column(path, table, "noise_sd", missing=True))
            refuse_absurd(path, "noise_sd", sd, (0, MOST_TOTAL))
            noise = pivot(path, region, feature, sd * factor) ** 2
            aggregates = replace(aggregates, noise=noise)
    return (
        aggregates.select(np.flatnonzero(~np.isnan(values).all(1))),
        None if scale is None else float(context.window_days / np.median(scale)),
    )


def _read_rows(path: Path, context: TableContext, notes: list[str]) -> pd.DataFrame:
    """Rows of region, feature, value or visits and, where known, n of a table of any layout."""
    columns = {name.lower() for name in column_names(path)}
    if context.vocabulary is not None and not columns.isdisjoint(HOMES.values()):
        return read_patterns(path, context.vocabulary, context.regions, context.home_panel, notes)
    table = read_table(path, context.rename, notes).rename(
        columns=lambda name: name.lower() if name.lower() in USUAL else name
    )
    names = {region_column(path, list(table.columns)): "region"}
    for name, synonyms in {"n": DEVICES, "visits": VISITS}.items():
        names |= {each: name for each in table.columns if each in synonyms and name not in table}
    if "visitors" in table.columns and not {"visits", "value"} & {*table.columns, *names.values()}:
        raise MobatlasError(
            f"{path}: has visitors, but aggregates count visits; give visits, or the Patterns "
            "file, which has visits per visitor of each place"
        )
    table = _with_features(path, table.rename(columns=names), context, notes)
    if context.home_panel is None or "n" in table.columns:
        return table
    digits = census_digits(table["region"].unique().tolist())
    return with_people(path, table, context.home_panel, digits, notes)


def _with_features(
    path: Path, table: pd.DataFrame, context: TableContext, notes: list[str]
) -> pd.DataFrame:
    """Add the column feature from a column of places or categories, or from a wide header."""
    column = next((name for name in (*IDS, "category") if name in table.columns), None)
    measured = not {"value", "visits"}.isdisjoint(table.columns)
    if "feature" in table.columns or (measured and column is None):
        return table
    if column is None or not measured:
        keys = [name for name in ("region", "n", "per") if name in table.columns]
        column = "category"
        table = table.drop(columns=[*NAMES], errors="ignore").melt(keys, var_name=column)
        if (
            "n" in keys
            and (pd.to_numeric(table["value"], errors="coerce").fillna(0) % 1 == 0).all()
        ):
            notes.append(f"{path.name}: whole numbers are totals of visits, and divided by people")
            table = table.rename(columns={"value": "visits"})
    codes, names = key_column(path, table, column)
    known = {name.casefold(): name for name in context.known_bins}
    kind = "category" if column == "category" else "poi"
    spelled = [[f"{each}{name}".casefold() for each in ("", "category:", "poi:")] for name in names]
    features = [
        next(filter(None, map(known.get, each)), f"{kind}:{name}")
        for name, each in zip(names, spelled, strict=True)
    ]
    if kind == "poi" and context.vocabulary is not None:
        first = table.iloc[np.unique(codes, return_index=True)[1]].reset_index(drop=True)
        token = match_places(path, first, context.vocabulary, notes)
        pairs = zip(token.tolist(), features, strict=True)
        ids = context.vocabulary.poi_ids
        features = [f"poi:{ids[number]}" if number >= 0 else name for number, name in pairs]
    return table.assign(feature=np.array(features, dtype=object)[codes])


def _known_rows(
    path: Path, table: pd.DataFrame, measure: str, known: Collection[str], notes: list[str]
) -> pd.DataFrame:
    """The rows with features of the dataset; other places are left out, others refused."""
    codes, features = key_column(path, table, "feature")
    unknown = [name for name in features if known and name not in known]
    others = [name for name in unknown if not name.startswith("poi:")]
    if others or len(unknown) == len(features):
        name = (others or unknown)[0]
        same_map = [each for each in known if each.partition(":")[0] == name.partition(":")[0]]
        similar = difflib.get_close_matches(name, same_map if others else (), 1, SIMILAR)
        hint = f"; did you mean '{similar[0]}'?" if similar else ""
        raise MobatlasError(
            f"{path}: feature '{name}' does not exist in the dataset{hint} (one of "
            f"{len(unknown):,} such features)"
        )
    keep = ~np.isin(np.array(features, dtype=object), unknown)[codes]
    if unknown:
        numbers = pd.to_numeric(table[measure], errors="coerce").fillna(0)
        notes.append(
            f"{path.name}: {len(unknown):,} of {len(features):,} places are not in the dataset and "
            f"are left out; {numbers[keep].sum() / max(numbers.sum(), 1e-300):.0%} of the visits "
            "in the table remain"
        )
    return table[keep].reset_index(drop=True)


def _holds_shares(
    path: Path, table: pd.DataFrame, rows: Floats, scale: Floats | None, notes: list[str]
) -> bool:
    """Whether values are shares: declared so, or fractions or percentages that sum to a whole."""
    declared = scale is not None and bool(np.isnan(scale).any())
    if declared or "visits" in table.columns:
        return declared
    totals = pd.Series(rows).groupby([table["region"], table["feature"].str.partition(":")[0]])
    whole = next((one for one in (1, 100) if np.allclose(totals.sum(), one, rtol=ROUNDED)), None)
    if whole is None or totals.ngroups < 2 or (totals.size() < 2).any():
        return False
    sentence = f"the values of every region sum to {whole}, so they are shares"
    if scale is not None:
        raise MobatlasError(f"{path}: {sentence}; give 'share' as their period")
    notes.append(f"{path.name}: {sentence} of visits")
    return True


def compare_with_dataset(
    path: Path,
    published: tuple[Aggregates, float | None],
    dataset: TrajectoryDataset,
    mask: Sequence[str] = (),
    strict: bool = False,
) -> list[str]:
    """Compare published aggregates with training people; shares have no level to compare."""
    aggregates, days = published
    if aggregates.pooled or not len(dataset.split("train")):
        return []
    known = aggregates.select_features(np.flatnonzero(~np.isnan(aggregates.values).all(0)))
    level = float(mean_over_regions(known.values, known.n / known.n.sum()).sum())
    ours = level_of_dataset(dataset, known.features, mask)
    return check_level(
        path, level, ours, dataset.window_days, declared=days is not None, strict=strict
    )


def level_of_dataset(
    dataset: TrajectoryDataset, features: Sequence[str], mask: Sequence[str] = ()
) -> float:
    """Mean visits per window of training people over some features."""
    maps = [build_feature(name, dataset.vocabulary, mask) for name in bins_by_map(features)]
    everyone = np.zeros(dataset.people.num_rows, dtype=np.int64)
    training = aggregates_from_dataset(dataset, maps, everyone, "train", ("everyone",))
    return float(training.values[0, np.isin(training.features, features)].sum())


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
    suppressed = table[column].astype(str).str.strip().str.startswith("<")
    if "suppressed" in table.columns:
        suppressed |= table["suppressed"].astype(str).str.strip().str.lower().isin(TRUE_WORDS)
    return np.asarray(suppressed, dtype=np.bool_)


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
    if (n <= 0).any():
        raise MobatlasError(f"{path}: {kind} '{names[int(np.argmin(n))]}' has no people; remove it")
    refuse_absurd(path, "n", values, (1, MOST_PEOPLE))
    return n


def refuse_interchanged(path: Path, option: str) -> None:
    """Refuse a table whose columns are those of another option's table."""
    names = column_names(path)
    columns = {name.lower() for name in names}
    by_group = not columns.isdisjoint(GROUPED) or any(map(ACS_COLUMN.fullmatch, names))
    by_feature = not columns.isdisjoint(("feature", "visits", *IDS, *HOMES.values()))
    by_region = any(map(looks_like_region, names)) or not columns.isdisjoint(HOMES.values())
    likely = "--composition" if by_group and by_region else option
    if by_feature and by_group != by_region:
        likely = "--group-table" if by_group else "--aggregates"
    # required of visits
    if not any(columns.isdisjoint({name, *SYNONYMS[name]}) for name in ("user_id", "arrival")):
        likely = "--visits"
    if likely != option:
        raise MobatlasError(
            f"{path}: its columns are those of a table for {likely}, not for {option} "
            f"({', '.join(names[:6])}); are two tables interchanged?"
        )


def refuse_absurd(
    path: Path, column: str, values: Floats, limits: tuple[float, float], smallest: float = 0.0
) -> None:
    """Refuse numbers (rows,) outside limits, or nearer to zero than `smallest`; NaN is unknown."""
    low, high = limits
    bad = (values < low) | (values > high) | ((np.abs(values) < smallest) & (values != 0))
    if bad.any():
        row = int(np.argmax(bad))
        raise MobatlasError(
            f"{path}: column '{column}' is {values[row]:.6g} in row {row + 1}; possible are "
            f"{low:g} to {high:g}; correct it"
        )


def _refuse_empty(path: Path, regions: Sequence[str], values: Floats) -> None:
    zero = (np.nansum(values, axis=1) == 0) & ~np.isnan(values).any(1)
    refuse_faults(
        {
            f"{path}: every value is suppressed; nothing can be estimated": np.isnan(values).all(),
            f"{path}: region '{regions[int(np.argmax(zero))]}' has only zeros; remove it": (
                zero.any()
            ),
        }
    )


def _shares(values: Floats, features: Sequence[str]) -> Floats:
    """Normalise each feature map of each region: its known bins sum to 1."""
    shares = values.copy()
    for bins in bins_by_map(features).values():
        total = np.nansum(values[:, bins], axis=1, keepdims=True)
        shares[:, bins] = values[:, bins] / np.where(total > 0, total, 1)
    return shares
