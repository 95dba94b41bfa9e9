"""Samples on disk: trajectories of people of a group, of a region or of a table, streamed to one Parquet file.

What is in it does not depend on how many processes made it; `sampling` says why. No label is read here.
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

from mobatlas.config import Coarsening
from mobatlas.data.arrays import Floats
from mobatlas.data.schema import ANCHORS
from mobatlas.data.synthetic import SCHEMA, TIMED
from mobatlas.errors import MobatlasError, suggestion
from mobatlas.generators.protocol import has_times
from mobatlas.generators.store import SUPERVISION, Model, load_model
from mobatlas.io.manifest import METADATA, file_hash, library_versions, write_parquet
from mobatlas.io.output import new_file, refuse_overlap
from mobatlas.io.tables import keys, numbers, read_table, require_columns
from mobatlas.progress import SILENT, Tracker
from mobatlas.sampling.coarsen import coarsened
from mobatlas.sampling.processes import made_by
from mobatlas.sampling.request import Chunk, Maker, People, Plan, Shard
from mobatlas.supervision.store import load_lives, load_sampler
from mobatlas.training.devices import find_devices
from mobatlas.training.resources import peak_gb

log = logging.getLogger("mobatlas")
LENGTHS = ("model", "empirical")
OTHER_FORMS = {
    ".csv",
    ".tsv",
    ".txt",
    ".json",
    ".geojson",
    ".xlsx",
    ".gz",
    ".zip",
    ".feather",
    ".arrow",
}
MARGIN, MARGIN_DEGREES = (
    0.5,
    0.5,
)  # homes lie outside the box of places: by half its size, or about 50 km


@dataclass(frozen=True)
class Generated:
    """What was written, and how fast."""

    path: str
    n: int
    tokens: int
    seconds: float  # of sampling and writing; loading comes on top
    trajectories_per_second: float
    peak_gb: float  # of the largest process
    devices: int = 1
    shard: str | None = None
    acceptance_rate: float | None = None  # of candidates, if samples were chosen by a calibration
    calibration: dict[str, Any] | None = (
        None  # its form, and how far each group's means were from the recovered ones
    )

    def as_dict(self) -> dict[str, Any]:
        """For reports."""
        return asdict(self)


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
    devices: int = 1,
    shard: str | None = None,
    overwrite: bool = False,
    chunk: int | None = None,
    tracker: Tracker = SILENT,
) -> Generated:
    """Sample n trajectories into `out`; `chunk` is how many tiles of the generator are made at a time.

    People are those of the table `anchors` in their order (all of them for n = None), or drawn from the training people of a
    `region`, or from all training people; `coarsen` moves where they live and work, at random within a radius ("1km") or to the
    middle of a square ("grid:500m"). With `calibrate` samples of groups are chosen among candidates so that their means are the
    recovered ones, in one of two forms: anchors that are drawn from everybody are chosen together with the trajectory, those of
    a table or a region stay as they are. Several `devices` have a process each and write the same bytes as one; `shard` "3/8"
    writes the third of eight parts of the rows, those of the whole, numbered as they are there.
    """
    _check_options(n, region, regions, anchors, lengths, seed)
    if Path(out).suffix.lower() in OTHER_FORMS:
        raise MobatlasError(
            f"--out {out}: samples are written as Parquet; name a file that ends in .parquet"
        )
    coarsening = None if coarsen is None else _coarsening(coarsen)
    piece = Shard() if shard is None else Shard.parse(shard)
    kind = find_devices(accelerator, devices)
    table, folder, override = (
        Path(path) if path is not None else None for path in (anchors, regions, dataset)
    )
    with new_file(Path(out), overwrite) as partial:
        loaded = load_model(model, override)
        loaded.generator.to(kind)
        for source in filter(None, (loaded.path, loaded.dataset, folder, table)):
            refuse_overlap(source, Path(out))
        people = _people(loaded, group, region, folder, table)
        if coarsening is not None:
            secret = people.anchors if table is not None else loaded.population()
            people = replace(people, anchors=coarsened(people.anchors, coarsening, secret))
        if loaded.manifest.details.get(SUPERVISION, {}).get("membership"):
            log.warning(
                "%s: was supervised with --membership, the region that each person lives in",
                loaded.path,
            )
        form = _form(
            loaded, people, calibrate, lengths, given=region is not None or table is not None
        )
        calibration = load_sampler(loaded, _Calibrating(tracker)).calibration if form else None
        n = len(people.anchors) if n is None else n
        facts = {
            "model": loaded.manifest.content_hash,
            "seed": seed,
            "n": n,
            "group": group,
            "region": region,
        }
        facts |= {
            "lengths": lengths,
            "coarsen": coarsening and str(coarsening),
            "calibrated": form,
            "shard": shard,
        }
        facts |= {
            "anchors": file_hash(table) if table is not None else None,
            "versions": library_versions(),
        }
        schema = (TIMED if has_times(loaded.generator) else SCHEMA).with_metadata(
            {METADATA: json.dumps(facts, sort_keys=True)}
        )
        start = time.perf_counter()
        maker = Maker(Plan(people, n, seed, lengths, region, form, calibration, chunk), loaded)
        chunks = maker.chunks(piece)
        tally = _Tally(tracker, n / piece.of / max(1, sum(stop - first for first, stop in chunks)))
        with made_by(maker, chunks, kind, devices) as made_chunks:
            tokens = write_parquet(partial, schema, tally.rows(made_chunks))
        seconds = time.perf_counter() - start
    peak = max(peak_gb(), tally.peak_gb)
    made = Generated(str(out), tally.n, tokens, seconds, tally.n / seconds, peak, devices, shard)
    if calibration is None or not tally.candidates:  # an empty shard refuses nothing
        return made
    return replace(made, acceptance_rate=tally.n / tally.candidates, calibration=maker.calibrated())


def _form(model: Model, people: People, calibrate: bool, lengths: str, given: bool) -> str | None:
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
        raise MobatlasError(
            "--lengths empirical: calibrated samples are as long as the model makes them; leave it out"
        )
    return "given" if given else "population"


def _coarsening(told: float | str) -> Coarsening:
    try:
        return Coarsening.of(told)
    except ValueError as error:
        raise MobatlasError(f"--coarsen {told}: {error}") from None


def _check_options(
    n: int | None, region: Any, regions: Any, anchors: Any, lengths: str, seed: int
) -> None:
    missing = n is None and anchors is None
    word = f"--lengths {lengths} does not exist{suggestion(lengths, LENGTHS)} (known: {', '.join(LENGTHS)})"
    for wrong, sentence in (
        (
            missing,
            "--n is missing: say how many trajectories, or give --anchors to have one for each of its rows",
        ),
        (n is not None and n <= 0, f"--n {n}: ask for at least 1 trajectory"),
        (not 0 <= seed < 2**63, f"--seed {seed}: give a whole number from 0 to 2^63 - 1"),
        (region and anchors, "--anchors and --region each say where people live; give one of them"),
        (regions and region is None, "--regions goes with --region ID; say which of its regions"),
        (lengths not in LENGTHS, word),
    ):
        if wrong:
            raise MobatlasError(sentence)


def _people(
    model: Model, group: str | None, region: str | None, regions: Path | None, anchors: Path | None
) -> People:
    groups = model.groups
    if group is not None and groups is None:
        raise MobatlasError(f"{model.path}: knows no groups, it is of phase 1; supervise it first")
    one = (
        None if group is None or groups is None else np.eye(len(groups))[groups.index(group)]
    )  # (groups,)
    if anchors is not None:
        return _people_of_table(anchors, model, one)
    names = groups.names if groups is not None else ()
    if region is not None:
        homes, shares = model.region(region, regions)
        return People(homes, names, shares if one is None else one)
    return People(model.population(), names, one, lives=None if one is None else load_lives(model))


def _people_of_table(path: Path, model: Model, one: Floats | None) -> People:
    groups, table = model.groups, read_table(path)
    require_columns(str(path), table.columns, ANCHORS)
    anchors = np.stack(
        [numbers(path, table, name, missing=True) for name in ANCHORS], axis=1
    )  # (rows, 4)
    _check_anchors(path, anchors, model)
    if "group" not in table.columns:
        return People(anchors, groups.names if groups is not None else (), one, in_order=True)
    if one is not None:
        raise MobatlasError(f"--group: {path} has a column 'group' already; leave one of them out")
    codes, names = keys(path, table, "group")
    if groups is None:  # a baseline, on the same people as the models that it is compared with
        log.warning(
            "%s: knows no groups, so column 'group' of %s is copied but changes no sample",
            model.path,
            path,
        )
        return People(anchors, names, groups=codes, in_order=True)
    try:
        number = np.array([groups.index(name) for name in names])
    except MobatlasError as error:
        raise MobatlasError(f"{path}: column 'group': {error}") from None
    return People(anchors, groups.names, groups=number[codes], in_order=True)


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
            (
                np.isnan(two) != np.isnan(two[:, ::-1]),
                f"only one of {both} is given; give both or none",
            ),
            ((two < low - margin) | (two > high + margin), far),
        ):
            row = _first(wrong.any(1))
            if row is not None:
                raise MobatlasError(
                    f"{path}: in row {row + 1} ({two[row, 0]:g}, {two[row, 1]:g}) {what}"
                )


class _Calibrating:
    """Tells of a calibration before the samples begin."""

    def __init__(self, tracker: Tracker) -> None:
        self._tracker = tracker

    def step(self, done: float, note: str = "") -> None:
        self._tracker.step(0, f"calibrating, {int(done) // 10 * 10} %")


@dataclass
class _Tally:
    """What has been written so far."""

    tracker: Tracker
    weight: float  # of a sample for the tracker, to whom every shard is n / K samples, a tile more or less
    n: int = 0
    candidates: int = 0
    peak_gb: float = 0.0

    def rows(self, chunks: Iterator[Chunk]) -> Iterator[pa.RecordBatch]:
        for chunk in chunks:
            yield chunk.rows
            self.n, self.candidates = self.n + chunk.n, self.candidates + chunk.candidates
            self.peak_gb = max(self.peak_gb, chunk.peak_gb)
            self.tracker.step(self.n * self.weight)


def _first(wrong: Any) -> int | None:
    """The first row that is, None if there is none."""
    return int(np.argmax(wrong)) if wrong.any() else None
