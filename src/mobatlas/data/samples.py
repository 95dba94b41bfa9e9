"""Files of samples, one row per visit: as `generate` or any other program writes them.

A place outside the vocabulary becomes OTHER. Consecutive OTHER are one visit, as in `prepare`.

Samples that `generate --posterior` spreads over draws have intervals. Means of draws differ for two
reasons: the posterior, and the finite number of samples in a draw.
With D draws, B is the variance between their means and W the variance of a mean of finitely many
samples. Then B (D - 1) / T has a chi-squared distribution with D - 1 degrees of freedom, where
T = V + W and V is the variance of the posterior. With the prior 1/T for T above W, V is estimated
by E[T | B, T > W] - W, which is never zero and has its own uncertainty in it. The interval of the
mean has the variance

    V (1 + 1/D) + W/D + S/pool

where S is the variance between samples, and `pool` the number of samples that calibrations were
fitted on. For a feature map whose samples show a share r of the spread of the draws, V is divided
by r squared.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from scipy import sparse, special

from mobatlas.data.dataset import Trajectories, monday
from mobatlas.data.types import (
    ANCHORS,
    DAY,
    HOME,
    OTHER,
    WORK,
    Flags,
    Floats,
    Ints,
    Tokens,
    Vocabulary,
)
from mobatlas.errors import MobatlasError, first_line, out_of_memory
from mobatlas.groups import Groups
from mobatlas.io.limits import refuse_bomb
from mobatlas.io.manifest import METADATA
from mobatlas.io.tables import renamed_columns, require_columns

TEXT = pa.string()
NUMBER = pa.float64()
TIME = pa.timestamp("us")
TIMES = ("arrival", "departure")
# HOME and WORK are at the anchors and OTHER has no position; an unknown value is null.
SCHEMA = pa.schema(
    [
        ("trajectory", pa.int64()),
        ("position", pa.int32()),
        ("poi_id", TEXT),
        ("lat", NUMBER),
        ("lon", NUMBER),
        ("category", TEXT),
        ("group", TEXT),
        ("region", TEXT),
        *((name, NUMBER) for name in ANCHORS),
    ]
)
# Naive local times, as in tables of visits. The day of the week matters and the date does not: all
# windows begin in one week.
TIMED_SCHEMA = pa.schema([*SCHEMA, *((name, TIME) for name in TIMES)])
DRAW = "draw"  # the column of samples that are spread over posterior draws
FIRST_MONDAY = int(np.datetime64("2024-01-01", "s").astype(np.int64))
MICROSECONDS = 1_000_000  # per second
MAX_NAMED_PLACES = 3  # in a warning
MAX_DEGREES = (90.0, 180.0, 90.0, 180.0)  # of the anchors
RENUMBER = "give trajectories new numbers when you combine files"
MIN_DRAWS = 10  # the variance between fewer is too uncertain
LEAST_SPREAD = 0.25  # a smaller share is not corrected for


def sample_schema(*, timed: bool, drawn: bool) -> pa.Schema:
    """The columns of a file of samples, with times or posterior draws if it has them."""
    schema = TIMED_SCHEMA if timed else SCHEMA
    return schema.append(pa.field(DRAW, pa.int32())) if drawn else schema


def to_rows(
    samples: Trajectories,
    first: int,
    groups: pa.Array,
    region: str | None,
    vocabulary: Vocabulary,
    draws: Ints | None = None,
) -> pa.RecordBatch:
    """The visits of samples as rows of a file; trajectories are numbered from `first` on."""
    owner = samples.owner
    tokens = samples.tokens
    anchors = samples.anchors[owner]  # (tokens, 4)
    places = np.where((tokens == HOME)[:, None], anchors[:, :2], vocabulary.coordinates[tokens])
    places = np.where((tokens == WORK)[:, None], anchors[:, 2:], places)  # (tokens, 2)
    columns = {
        "trajectory": pa.array(first + owner),
        "position": pa.array(samples.position.astype(np.int32)),
        "group": groups.take(pa.array(owner)),
        "region": pa.array([region], TEXT).take(pa.array(np.zeros_like(owner))),
    }
    for name in ("poi_id", "category"):
        columns[name] = vocabulary.table[name].combine_chunks().take(pa.array(tokens))
    for name, degrees in zip(("lat", "lon", *ANCHORS), (*places.T, *anchors.T), strict=True):
        columns[name] = pa.array(degrees, from_pandas=True)  # NaN becomes null
    schema = sample_schema(timed=samples.arrivals is not None, drawn=draws is not None)
    if draws is not None:
        columns[DRAW] = pa.array(draws[owner].astype(np.int32))
    if samples.arrivals is not None and samples.stays is not None:
        times = (samples.arrivals, samples.arrivals + samples.stays)
        for name, seconds in zip(TIMES, times, strict=True):
            columns[name] = pa.array((FIRST_MONDAY + seconds) * MICROSECONDS).view(TIME)
    return pa.RecordBatch.from_arrays([columns[name] for name in schema.names], schema=schema)


@dataclass(frozen=True)
class Samples:
    """The trajectories of a file.

    Parameters
    ----------
    path
        The file.
    trajectories
        Its trajectories, in order of appearance.
    groups
        The number of each trajectory's group, -1 where it has none. None if no trajectory has a
        group: then all of them are used for every group.
    draws
        The posterior draw of each trajectory; None unless the file has the column `draw`.
    posterior
        Facts about the draws, if the file has their metadata.
    unknown_places, unknown_visits
        Places that the vocabulary does not list, and visits to them. They count as OTHER.
    warnings
        Sentences about what was ignored or replaced.

    Examples
    --------
    >>> samples = read_samples("samples.parquet", dataset.vocabulary)  # doctest: +SKIP
    >>> len(samples.trajectories)  # doctest: +SKIP
    500
    """

    path: Path
    trajectories: Trajectories
    groups: Ints | None  # (trajectories,)
    draws: Ints | None = None  # (trajectories,)
    posterior: dict[str, Any] | None = None
    unknown_places: int = 0
    unknown_visits: int = 0
    warnings: tuple[str, ...] = ()

    def of_group(self, number: int) -> Trajectories:
        """Return the trajectories of a group, or all of them if the file names no groups."""
        if self.groups is None:
            return self.trajectories
        return self.trajectories.take(np.flatnonzero(self.groups == number))


def read_samples(
    path: Path | str,
    vocabulary: Vocabulary,
    groups: Groups | None = None,
    rename: Mapping[str, str] | None = None,
) -> Samples:
    """Read a Parquet file of samples, one row per visit.

    Parameters
    ----------
    path, rename
        A file with the columns `trajectory` and `poi_id`, and its names of columns. Visits are in
        the order of the column `position`, or of the file. It may have anchors and times.
    vocabulary, groups
        Those of the dataset that the samples are compared with. Without groups, the column `group`
        is ignored.

    Returns
    -------
    Samples
        Trajectories, the group of each, and warnings.

    Examples
    --------
    >>> read_samples("samples.parquet", dataset.vocabulary).warnings  # doctest: +SKIP
    ()
    """
    file = _SampleFile.open(Path(path), rename or {})
    rows = _Rows.sort(file)
    group_codes = rows.group_codes(groups) if groups is not None and "group" in file.names else None
    anchors = file.anchors(rows.order[rows.starts])  # (trajectories, 4)
    places = file.dictionary("poi_id", TEXT)
    token_of = _token_of(places.dictionary, vocabulary)  # (distinct places,)
    visits = np.bincount(places.indices.to_numpy(), minlength=len(token_of))
    unknown = visits * (token_of < 0)  # (distinct places,)
    times = rows.times()
    tokens, is_visit = _merge_unknown(token_of[places.indices.to_numpy()][rows.order], rows.same)
    ends = np.append(rows.starts, len(is_visit))
    offsets = np.concatenate(([0], np.cumsum(is_visit)))[ends]  # (trajectories + 1,)
    arrivals = None
    stays = None
    if times is not None:
        since_monday = DAY * monday(times[0][rows.starts] // DAY)  # (trajectories,)
        arrivals = times[0][is_visit] - np.repeat(since_monday, np.diff(offsets))
        stays = np.maximum.reduceat(times[1], np.flatnonzero(is_visit)) - times[0][is_visit]
    return Samples(
        path=file.path,
        trajectories=Trajectories(tokens, offsets, anchors, arrivals, stays),
        groups=group_codes,
        draws=rows.draws(),
        posterior=file.posterior(),
        unknown_places=int(np.count_nonzero(unknown)),
        unknown_visits=int(unknown.sum()),
        warnings=(
            *_place_warnings(file.path, places, unknown),
            *_anchor_warnings(file, tokens),
            *file.warnings,
            *_group_warnings(file.path, group_codes),
        ),
    )


@dataclass(frozen=True)
class _SampleFile:
    """A Parquet file that is read one column at a time, to save memory."""

    path: Path
    parquet: pq.ParquetFile
    names: list[str]  # after renaming
    warnings: list[str] = field(default_factory=list)

    @classmethod
    def open(cls, path: Path, rename: Mapping[str, str]) -> Self:
        if not path.is_file():
            reason = "this is a folder; give one Parquet file" if path.is_dir() else "no such file"
            raise MobatlasError(f"{path}: {reason}")
        refuse_bomb(path)
        try:
            parquet = pq.ParquetFile(path, memory_map=True)
        except (OSError, pa.ArrowException) as error:
            raise MobatlasError(
                f"{path}: this is not a readable Parquet file ({first_line(error)}); "
                "give one as `mobatlas generate` writes it"
            ) from None
        names = renamed_columns(parquet.schema_arrow.names, rename)
        require_columns(str(path), names, ("trajectory", "poi_id"))
        if not parquet.metadata.num_rows:
            raise MobatlasError(
                f"{path}: the file has no rows; give a file with at least one trajectory"
            )
        return cls(path, parquet, names)

    def column(
        self, name: str, kind: pa.DataType | None = None, nullable: bool = False
    ) -> pa.ChunkedArray:
        """Read a column, cast to a type if one is given."""
        try:
            theirs = self.parquet.schema_arrow.names[self.names.index(name)]
            values = self.parquet.read(columns=[theirs], use_threads=False)[theirs]
            values = values if kind is None else values.cast(kind)
        except (OSError, pa.ArrowException) as error:
            if out_of_memory(error):
                raise
            raise self._unreadable(name, error) from None
        if values.null_count and not nullable:
            raise MobatlasError(
                f"{self.path}: column '{name}' is empty in {values.null_count:,} rows; fill it"
            )
        return values

    def dictionary(
        self, name: str, kind: pa.DataType | None = None, nullable: bool = False
    ) -> pa.DictionaryArray:
        """Read a column as distinct values, in order of appearance, and one index per row."""
        try:
            return self.column(name, kind, nullable).dictionary_encode().combine_chunks()
        except pa.ArrowException as error:
            raise self._unreadable(name, error) from None

    def anchors(self, rows: Ints) -> Floats:
        """Read the anchors of some rows, (rows, 4); NaN where unknown."""
        anchors = np.full((len(rows), len(ANCHORS)), np.nan)
        for axis, (name, limit) in enumerate(zip(ANCHORS, MAX_DEGREES, strict=True)):
            if name in self.names:
                degrees = self.column(name, NUMBER, nullable=True).to_numpy()[rows]
                outside = np.abs(degrees.astype(np.float64)) > limit
                if outside.any():
                    raise MobatlasError(
                        f"{self.path}: column '{name}' is {degrees[outside][0]:g}, "
                        f"outside -{limit:g}..{limit:g}; give degrees"
                    )
                anchors[:, axis] = degrees
        return anchors

    def posterior(self) -> dict[str, Any] | None:
        """What `generate --posterior` wrote about its draws."""
        text = (self.parquet.schema_arrow.metadata or {}).get(METADATA, b"null")
        with suppress(ValueError, AttributeError, LookupError):
            facts = json.loads(text)
            return (facts[0] if isinstance(facts, list) else facts).get("posterior")
        return None

    def _unreadable(self, name: str, error: Exception) -> MobatlasError:
        return MobatlasError(
            f"{self.path}: column '{name}' cannot be read ({first_line(error)}); "
            "write it as `mobatlas generate` does"
        )


@dataclass(frozen=True)
class _Rows:
    """The rows of a file in order of trajectory and position."""

    file: _SampleFile
    names: pa.DictionaryArray  # (rows,) the trajectory of each row, as the file calls it
    order: Ints  # (rows,)
    same: Flags  # (rows - 1,) whether a row belongs to the same trajectory as the one before
    starts: Ints  # (trajectories,) first row of each

    @classmethod
    def sort(cls, file: _SampleFile) -> Self:
        """Sort the rows; refuse two of the same trajectory and position."""
        names = file.dictionary("trajectory")
        number = names.indices.to_numpy()
        keys = [number]
        if "position" in file.names:
            keys.insert(0, file.column("position", pa.int64()).to_numpy())
        order = np.lexsort(keys)
        same = np.diff(number[order]) == 0
        rows = cls(file, names, order, same, np.flatnonzero(np.append(True, ~same)))
        if len(keys) == 2:
            repeated = same & (np.diff(keys[0][order]) == 0)
            rows.refuse(repeated, f"has one position twice; {RENUMBER}")
        return rows

    def refuse(self, wrong: Flags, sentence: str) -> None:
        """Name the trajectory of the first wrong row."""
        if wrong.any():
            name = self.names[int(self.order[np.argmax(wrong)])].as_py()
            raise MobatlasError(f"{self.file.path}: trajectory {name} {sentence}")

    def times(self) -> tuple[Ints, Ints] | None:
        """Arrivals and departures in seconds, None unless the file has all of them."""
        present = [name for name in TIMES if name in self.file.names]
        columns = [self.file.column(name, TIME, nullable=True) for name in present]
        if all(column.null_count == len(column) for column in columns):
            return None
        if len(present) < len(TIMES) or any(column.null_count for column in columns):
            self.file.warnings.append(
                f"{self.file.path}: not every visit has 'arrival' and 'departure', "
                "so times are not compared"
            )
            return None
        arrivals, departures = (
            column.cast(pa.int64()).to_numpy()[self.order] // MICROSECONDS for column in columns
        )  # (rows,) each
        backwards = self.same & (np.diff(arrivals) < 0)
        self.refuse(backwards, "has visits out of order; order them by arrival")
        self.refuse(departures < arrivals, "has a departure before its arrival; correct its times")
        return arrivals, departures

    def draws(self) -> Ints | None:
        """The posterior draw of each trajectory; None if the file has none."""
        if DRAW not in self.file.names:
            return None
        rows = self.file.column(DRAW, pa.int64()).to_numpy()[self.order]
        self.refuse(self.same & (np.diff(rows) != 0), f"has two draws; {RENUMBER}")
        return rows[self.starts]

    def group_codes(self, groups: Groups) -> Ints | None:
        """The number of each trajectory's group, -1 where it has none; None if all are -1."""
        names = self.file.dictionary("group", TEXT, nullable=True)
        try:
            numbers = [groups.index(name) for name in names.dictionary.to_pylist()]
        except MobatlasError as error:
            raise MobatlasError(f"{self.file.path}: column 'group': {error}") from None
        rows = pc.fill_null(names.indices, -1).to_numpy()[self.order]
        codes = np.array([*numbers, -1])[rows]  # (rows,)
        self.refuse(self.same & (np.diff(codes) != 0), f"has two groups; {RENUMBER}")
        return codes[self.starts] if (codes >= 0).any() else None


def _token_of(places: pa.Array, vocabulary: Vocabulary) -> Tokens:
    """The token of each place, -1 where unknown; tokens before HOME are not places."""
    known = vocabulary.table["poi_id"].combine_chunks()[HOME:]
    return (pc.fill_null(pc.index_in(places, known), -1 - HOME).to_numpy() + HOME).astype(np.int32)


def _merge_unknown(tokens: Tokens, same: Flags) -> tuple[Tokens, Flags]:
    """Replace -1 by OTHER and merge adjacent OTHER; also return which rows remain."""
    unknown = tokens < 0
    other = unknown | (tokens == OTHER)
    repeats = same & other[1:] & other[:-1] & (unknown[1:] | unknown[:-1])
    is_visit = np.append(True, ~repeats)  # (rows,)
    return np.where(unknown, np.int32(OTHER), tokens)[is_visit], is_visit


def _place_warnings(path: Path, places: pa.DictionaryArray, unknown: Ints) -> list[str]:
    codes = np.flatnonzero(unknown)
    if not len(codes):
        return []
    names = [f"'{places.dictionary[int(code)].as_py()}'" for code in codes[:MAX_NAMED_PLACES]]
    if len(codes) > MAX_NAMED_PLACES:
        names.append("...")
    visits = int(unknown.sum())
    return [
        f"{path}: {visits:,} visits ({visits / len(places):.1%}) are to {len(codes):,} places "
        f"that are not in the dataset and count as OTHER ({', '.join(names)})"
    ]


def _anchor_warnings(file: _SampleFile, tokens: Tokens) -> Iterator[str]:
    for token, name, columns in ((HOME, "HOME", ANCHORS[:2]), (WORK, "WORK", ANCHORS[2:])):
        missing = [column for column in columns if column not in file.names]
        if missing and (tokens == token).any():
            yield (
                f"{file.path}: the file has no column '{missing[0]}', so visits to {name} have no "
                "position"
            )


def _group_warnings(path: Path, codes: Ints | None) -> list[str]:
    if codes is None or (codes >= 0).all():
        return []
    without = np.count_nonzero(codes < 0)
    return [f"{path}: {without:,} of {len(codes):,} trajectories have no group and are left out"]


Statistic = Any  # a feature map, or a function of trajectories


@dataclass(frozen=True)
class PosteriorIntervals:
    """Means of statistics by group, with intervals that include posterior and sampling errors.

    Attributes
    ----------
    groups
        (groups,) numbers of the groups; -1 for samples without a group.
    mean, low, high
        (groups, statistics) the means and the ends of their intervals.

    Examples
    --------
    >>> intervals = posterior_intervals(samples, statistic)  # doctest: +SKIP
    >>> intervals.high - intervals.low  # doctest: +SKIP
    """

    groups: Ints
    mean: Floats
    low: Floats
    high: Floats


def posterior_intervals(
    samples: Samples, statistic: Statistic, level: float = 0.9
) -> PosteriorIntervals:
    """Estimate means of a statistic by group, with posterior intervals.

    Parameters
    ----------
    samples
        Samples of `generate --posterior`, as `read_samples` returns them.
    statistic
        A feature map, or a function of trajectories that returns one value for each, or a row of
        values: an array or a sparse matrix (trajectories, statistics).
    level
        Probability of each interval.

    Returns
    -------
    PosteriorIntervals
        Means and ends of intervals. A statistic that is the same in all samples has no width.

    Examples
    --------
    >>> samples = read_samples("samples.parquet", vocabulary, groups)  # doctest: +SKIP
    >>> category = build_feature("category", vocabulary)  # doctest: +SKIP
    >>> posterior_intervals(samples, category).low  # doctest: +SKIP
    """
    if not 0 < level < 1:
        raise MobatlasError(f"level {level:g}: give a probability between 0 and 1, such as 0.9")
    counts: Any = getattr(statistic, "counts", statistic)
    values = counts(samples.trajectories)
    if not sparse.issparse(values):
        values = np.asarray(values, dtype=np.float64).reshape(len(samples.trajectories), -1)
    values = sparse.csr_array(values)
    groups, cells, draws = _cells(samples)
    size = np.asarray(cells.sum(1)).ravel().reshape(-1, draws, 1)  # (groups, draws, 1)
    shape = (len(groups), draws, values.shape[1])
    total = (cells @ values).toarray().reshape(shape)
    squares = (cells @ values.power(2)).toarray().reshape(shape)
    means = total / size
    freedom = np.maximum(size.sum(1) - draws, 1)
    between_samples = np.maximum(squares - total * means, 0).sum(1) / freedom  # S
    noise = between_samples * (1 / size).mean(1)  # W
    facts = samples.posterior or {}
    reached = facts.get("spread", {}).get(getattr(statistic, "name", None), 1.0)
    posterior = _posterior_variance(means.var(1, ddof=1), noise, draws)
    posterior /= np.clip(reached, LEAST_SPREAD, 1.0) ** 2
    variance = posterior * (1 + 1 / draws) + noise / draws
    variance += between_samples / facts.get("pool", np.inf)
    mean = means.mean(1)
    positive = bool(values.nnz == 0 or values.data.min() >= 0)
    return PosteriorIntervals(groups, mean, *_ends(mean, variance, level, positive))


def _cells(samples: Samples) -> tuple[Ints, sparse.csr_array, int]:
    """Groups, which samples are in each cell (groups x draws, samples), and the number of draws."""
    if samples.draws is None:
        raise MobatlasError(
            f"{samples.path}: the file has no column 'draw', so that its samples do not show the "
            "error of group means; write it with `mobatlas generate --posterior`"
        )
    n = len(samples.draws)
    groups = np.full(n, -1) if samples.groups is None else samples.groups
    names, row = np.unique(groups, return_inverse=True)
    numbers, column = np.unique(samples.draws, return_inverse=True)
    draws = len(numbers)
    cell = row * draws + column
    size = len(names) * draws
    if draws < MIN_DRAWS or not np.bincount(cell, minlength=size).all():
        raise MobatlasError(
            f"{samples.path}: intervals need at least {MIN_DRAWS} draws, each with samples of "
            "every group; write the whole file with `mobatlas generate --posterior`"
        )
    return names, sparse.csr_array((np.ones(n), (cell, np.arange(n))), shape=(size, n)), draws


def _posterior_variance(between: Floats, noise: Floats, draws: int) -> Floats:
    """E[T | B, T > W] - W, where T has an inverse gamma distribution."""
    shape = (draws - 1) / 2
    scale = (draws - 1) / 2 * between
    x = np.maximum(scale / np.maximum(noise, 1e-300), 1e-9)
    below = special.gammainc(shape, x)
    # For small x both functions are powers of x, and underflow.
    ratio = np.where(
        x < 1e-3, shape / x, special.gammainc(shape - 1, x) / np.maximum(below, 1e-300)
    )
    total = np.where(scale > 0, scale / (shape - 1) * ratio, noise * shape / (shape - 1))
    return np.asarray(np.maximum(total - noise, 0))


def _ends(mean: Floats, variance: Floats, level: float, positive: bool) -> tuple[Floats, Floats]:
    """Ends of intervals: log-normal where a statistic is never negative, otherwise normal."""
    quantile = special.ndtri(0.5 + level / 2)
    if not positive:
        reach = quantile * np.sqrt(variance)
        return mean - reach, mean + reach
    relative = np.sqrt(variance) / np.where(mean > 0, mean, 1.0)
    log_variance = np.log1p(relative**2)
    median = mean * np.exp(-log_variance / 2)
    reach = np.exp(quantile * np.sqrt(log_variance))
    return median / reach, median * reach
