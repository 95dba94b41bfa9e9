"""Samples on disk: trajectories of people of a group, of a region or of a table, streamed to one Parquet file.

Whom sample number i is of is a function of (seed, i), as the generator's tokens are: neither how many are asked for nor the
chunks in which they are made change a row. No label is read here.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from mobatlas.artifacts import METADATA, file_hash, library_versions, write_parquet
from mobatlas.coarsening import coarsened
from mobatlas.config import Coarsening
from mobatlas.data.schema import ANCHORS, require_columns
from mobatlas.data.vocabulary import Vocabulary
from mobatlas.draws import uniforms
from mobatlas.errors import MobatlasError, suggestion
from mobatlas.features import Trajectories
from mobatlas.folders import new_file, refuse_overlap
from mobatlas.generators.base import UNKNOWN, Floats, Ints, tells_times
from mobatlas.generators.devices import find_device
from mobatlas.generators.folder import SUPERVISION, Model, load_model
from mobatlas.progress import SILENT, Tracker
from mobatlas.regions.reading import keys, numbers, read_table
from mobatlas.resources import peak_gb
from mobatlas.supervision.kept import load_sampler
from mobatlas.supervision.resample import CalibratedSampler
from mobatlas.synthetic import SCHEMA, TIMED, rows_of

log = logging.getLogger("mobatlas")
PER_CHUNK = 1_024  # trajectories, about: seconds of work, so that progress shows
LENGTHS = ("model", "empirical")
DRAWS = 1  # a stream of random numbers
MARGIN, MARGIN_DEGREES = 0.5, 0.5  # homes lie outside the box of places: by half its size, or about 50 km


@dataclass(frozen=True)
class Generated:
    """What was written, and how fast."""

    path: str
    n: int
    tokens: int
    seconds: float  # of sampling and writing; loading comes on top
    trajectories_per_second: float
    peak_gb: float  # of this process
    acceptance_rate: float | None = None  # of candidates, if samples were chosen by a calibration
    calibration: dict[str, Any] | None = None  # its form, and how far each group's means were from the recovered ones

    def as_dict(self) -> dict[str, Any]:
        """For reports."""
        return asdict(self)


@dataclass(frozen=True)
class _People:
    """Whom to sample: rows of anchors, and a group for each row or shares to draw it by."""

    anchors: Floats  # (rows, 4) home lat, lon, work lat, lon; NaN where unknown
    names: tuple[str, ...] = ()  # of groups
    shares: Floats | None = None  # (groups,)
    groups: Ints | None = None  # (rows,) places in `names`
    in_order: bool = False  # each row in its turn, then from the first again; else rows are drawn

    def conditions(self, draws: Floats, first: int) -> tuple[Ints, Floats]:
        """Groups (n,) and anchors (n, 4) of samples from `first` on, each by its row of draws."""
        numbers = first + np.arange(len(draws)) if self.in_order else (draws[:, 0] * len(self.anchors)).astype(np.int64)
        rows = numbers % len(self.anchors)  # (n,)
        if self.groups is not None:
            return self.groups[rows], self.anchors[rows]
        unknown = np.full(len(rows), UNKNOWN, dtype=np.int64)
        return unknown if self.shares is None else _pick(self.shares, draws[:, 1]), self.anchors[rows]


def generate(
    model: Path | str,
    out: Path | str,
    n: int | None = None,
    *,
    group: str | None = None,
    region: str | None = None,
    regions: Path | str | None = None,
    anchors: Path | str | None = None,
    dataset: Path | str | None = None,
    lengths: str = "model",
    coarsen: float | str | None = None,
    calibrate: bool = False,
    seed: int = 0,
    accelerator: str = "auto",
    overwrite: bool = False,
    chunk: int | None = None,
    tracker: Tracker = SILENT,
) -> Generated:
    """Sample n trajectories into `out`; `chunk` is how many tiles of the generator are made at a time.

    People are those of the table `anchors` in their order (all of them for n = None), or drawn from the training people of a
    `region`, or from all training people; `coarsen` moves where they live and work, at random within a radius ("1km") or to the
    middle of a square ("grid:500m"). With `calibrate` samples of groups are chosen among candidates so that their means are the
    recovered ones, in one of two forms: anchors that are drawn from everybody are chosen together with the trajectory, those of
    a table or a region stay as they are.
    """
    _check_options(n, region, regions, anchors, lengths, seed)
    coarsening = None if coarsen is None else _coarsening(coarsen)
    table, folder, override = (Path(path) if path is not None else None for path in (anchors, regions, dataset))
    with new_file(Path(out), overwrite) as partial:
        loaded = load_model(model, override)
        loaded.generator.to(find_device(accelerator)[0])
        for source in filter(None, (loaded.path, loaded.dataset, folder, table)):
            refuse_overlap(source, Path(out))
        people = _people(loaded, group, region, folder, table)
        if coarsening is not None:
            secret = people.anchors if table is not None else loaded.population()
            people = replace(people, anchors=coarsened(people.anchors, coarsening, secret))
        if loaded.manifest.details.get(SUPERVISION, {}).get("membership"):
            log.warning("%s: was supervised with --membership, the region that each person lives in", loaded.path)
        form = _form(loaded, people, calibrate, lengths, given=region is not None or table is not None)
        sampler = replace(load_sampler(loaded, _Calibrating(tracker)), anchors=people.anchors) if form else None
        n = len(people.anchors) if n is None else n
        facts = {"model": loaded.manifest.content_hash, "seed": seed, "n": n, "group": group, "region": region}
        facts |= {
            "lengths": lengths,
            "coarsen": coarsening and str(coarsening),
            "calibrated": form,
            "versions": library_versions(),
        }
        facts["anchors"] = file_hash(table) if table is not None else None
        schema = (TIMED if tells_times(loaded.generator) else SCHEMA).with_metadata(
            {METADATA: json.dumps(facts, sort_keys=True)}
        )
        start = time.perf_counter()
        chunks = _Chunks(loaded, people, sampler, form, n, lengths, seed, chunk)
        batches = _batches(chunks, region, loaded.generator.vocabulary, tracker)
        tokens = write_parquet(partial, schema, batches)
        seconds = time.perf_counter() - start
    made = Generated(str(out), n, tokens, seconds, n / seconds, peak_gb())
    return made if sampler is None else replace(made, acceptance_rate=n / chunks.drawn, calibration=chunks.report())


def _form(model: Model, people: _People, calibrate: bool, lengths: str, given: bool) -> str | None:
    """Which form of the calibration applies, None if none does."""
    of_groups = people.groups is not None or people.shares is not None
    if calibrate and not of_groups:
        raise MobatlasError(
            "--calibrate chooses samples by their group; give --group, --region, or --anchors with a column 'group'"
        )
    only_way = model.groups is not None and model.generator.groups is None  # `resample`
    if not of_groups or not (calibrate or only_way):
        return None
    if lengths == "empirical":
        raise MobatlasError("--lengths empirical: calibrated samples are as long as the model makes them; leave it out")
    return "given" if given else "population"


def _coarsening(told: float | str) -> Coarsening:
    try:
        return Coarsening.of(told)
    except ValueError as error:
        raise MobatlasError(f"--coarsen {told}: {error}") from None


def _check_options(n: int | None, region: Any, regions: Any, anchors: Any, lengths: str, seed: int) -> None:
    missing = n is None and anchors is None
    word = f"--lengths {lengths} does not exist{suggestion(lengths, LENGTHS)} (known: {', '.join(LENGTHS)})"
    for wrong, sentence in (
        (missing, "--n is missing: say how many trajectories, or give --anchors to have one for each of its rows"),
        (n is not None and n <= 0, f"--n {n}: ask for at least 1 trajectory"),
        (not 0 <= seed < 2**63, f"--seed {seed}: give a whole number from 0 to 2^63 - 1"),
        (region and anchors, "--anchors and --region each say where people live; give one of them"),
        (regions and region is None, "--regions goes with --region ID; say which of its regions"),
        (lengths not in LENGTHS, word),
    ):
        if wrong:
            raise MobatlasError(sentence)


def _people(model: Model, group: str | None, region: str | None, regions: Path | None, anchors: Path | None) -> _People:
    groups = model.groups
    if group is not None and groups is None:
        raise MobatlasError(f"{model.path}: knows no groups, it is of phase 1; supervise it first")
    one = None if group is None or groups is None else np.eye(len(groups))[groups.index(group)]  # (groups,)
    if anchors is not None:
        return _people_of_table(anchors, model, one)
    names = groups.names if groups is not None else ()
    if region is not None:
        homes, shares = model.region(region, regions)
        return _People(homes, names, shares if one is None else one)
    return _People(model.population(), names, one)


def _people_of_table(path: Path, model: Model, one: Floats | None) -> _People:
    groups, table = model.groups, read_table(path)
    require_columns(str(path), table.columns, ANCHORS)
    anchors = np.stack([numbers(path, table, name, missing=True) for name in ANCHORS], axis=1)  # (rows, 4)
    _check_anchors(path, anchors, model)
    if "group" not in table.columns:
        return _People(anchors, groups.names if groups is not None else (), one, in_order=True)
    if one is not None:
        raise MobatlasError(f"--group: {path} has a column 'group' already; leave one of them out")
    codes, names = keys(path, table, "group")
    if groups is None:  # a baseline, on the same people as the models that it is compared with
        log.warning("%s: knows no groups, so column 'group' of %s is copied but changes no sample", model.path, path)
        return _People(anchors, names, groups=codes, in_order=True)
    try:
        number = np.array([groups.index(name) for name in names])
    except MobatlasError as error:
        raise MobatlasError(f"{path}: column 'group': {error}") from None
    return _People(anchors, groups.names, groups=number[codes], in_order=True)


def _check_anchors(path: Path, anchors: Floats, model: Model) -> None:
    """Refuse what is no place on the globe, half a place, or far from every place that the model knows."""
    known = model.generator.vocabulary.coordinates
    low, high = np.nanmin(known, axis=0), np.nanmax(known, axis=0)  # (2,) each
    margin = np.maximum(MARGIN * (high - low), MARGIN_DEGREES)
    box = f"lat {low[0]:.3f} to {high[0]:.3f}, lon {low[1]:.3f} to {high[1]:.3f}"
    for place, two in (("home", anchors[:, :2]), ("work", anchors[:, 2:])):
        both = f"'{place}_lat' and '{place}_lon'"
        far = f"{both} are far from all places of {model.path} ({box}); give anchors of that area"
        for wrong, what in (
            (np.abs(two) > (90, 180), f"{both} are outside -90..90 and -180..180"),
            (np.isnan(two) != np.isnan(two[:, ::-1]), f"only one of {both} is given; give both or none"),
            ((two < low - margin) | (two > high + margin), far),
        ):
            row = _first(wrong.any(1))
            if row is not None:
                raise MobatlasError(f"{path}: in row {row + 1} ({two[row, 0]:g}, {two[row, 1]:g}) {what}")


class _Calibrating:
    """Tells of a calibration before the samples begin."""

    def __init__(self, tracker: Tracker) -> None:
        self._tracker = tracker

    def step(self, done: float, note: str = "") -> None:
        self._tracker.step(0, f"calibrating, {int(done) // 10 * 10} %")


@dataclass
class _Chunks:
    """All samples, a chunk at a time."""

    model: Model
    people: _People
    sampler: CalibratedSampler | None
    form: str | None
    n: int
    lengths: str
    seed: int
    tiles: int | None  # in a chunk
    drawn: int = 0  # candidates so far

    def __iter__(self) -> Iterator[tuple[int, Trajectories, Ints]]:
        """Number of the first, trajectories and groups."""
        tile = self.model.generator.tile
        each = self.sampler.calibration.candidates if self.sampler and self.form == "given" else 1
        step = tile * (self.tiles or max(1, PER_CHUNK // tile // each))
        for start in range(0, self.n, step):
            size = min(step, self.n - start)
            yield start, *(self._population(size) if self.form == "population" else self._drawn(start, size))

    def _population(self, size: int) -> tuple[Trajectories, Ints]:
        assert self.sampler is not None and self.people.shares is not None
        group = int(self.people.shares.argmax())  # one group was asked for
        accepted = self.sampler.sample(size, group, self.seed, first=self.drawn)
        self.drawn = accepted.following
        return accepted.trajectories, np.full(size, group, dtype=np.int64)

    def _drawn(self, start: int, size: int) -> tuple[Trajectories, Ints]:
        draws, generator = uniforms(self.seed, start, start + size, DRAWS), self.model.generator  # (size, 4)
        groups, anchors = self.people.conditions(draws, start)
        if self.sampler is not None:
            self.drawn += size * self.sampler.calibration.candidates
            return self.sampler.sample_given(groups, anchors, self.seed, first=start), groups
        told = None if generator.groups is None else groups
        ends = _pick(self.model.lengths, draws[:, 2]) if self.lengths == "empirical" else None
        return generator.sample(size, told, anchors, self.seed, first=start, lengths=ends), groups

    def report(self) -> dict[str, Any]:
        """Of the groups that were asked for: how far they are from the recovered means, on the pool of the calibration."""
        assert self.sampler is not None and self.form is not None
        calibration, people = self.sampler.calibration, self.people
        asked = np.flatnonzero(np.asarray(people.shares)) if people.groups is None else people.groups
        rows = {calibration.groups.names[k]: getattr(calibration, self.form)[k] for k in np.unique(asked).tolist()}
        return {
            "form": self.form,
            "groups": {name: {"before": row.before, "after": row.after} for name, row in rows.items()},
        }


def _batches(chunks: _Chunks, region: str | None, vocabulary: Vocabulary, tracker: Tracker) -> Iterator[pa.RecordBatch]:
    """The rows of all samples."""
    for start, made, groups in chunks:
        names = pa.array([chunks.people.names[code] if code != UNKNOWN else None for code in groups], pa.string())
        yield rows_of(made, start, names, region, vocabulary)
        tracker.step(start + len(made))


def _pick(weights: Floats | Ints, uniform: Floats) -> Ints:
    """Numbers of weights, drawn in proportion to them."""
    cumulative = np.cumsum(weights, dtype=np.float64)
    return np.searchsorted(cumulative / cumulative[-1], uniform, side="right")


def _first(wrong: Any) -> int | None:
    """The first row that is, None if there is none."""
    return int(np.argmax(wrong)) if wrong.any() else None
