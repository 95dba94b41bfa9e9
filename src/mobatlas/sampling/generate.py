"""Samples on disk: trajectories of groups, a region or a table, streamed to one Parquet file.

The content does not depend on the number of processes, see `sampling.chunks`. Labels are not
read.
"""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from mobatlas.config import MIN_PEOPLE, Coarsening
from mobatlas.data.anchors import OBSERVED, SYNTHETIC
from mobatlas.data.samples import sample_schema
from mobatlas.data.types import ANCHORS, Floats
from mobatlas.errors import MobatlasError, log
from mobatlas.generators.protocol import has_times
from mobatlas.generators.store import SUPERVISION, Model, load_model
from mobatlas.groups import evenly_spaced
from mobatlas.io.manifest import METADATA, file_hash, library_versions, write_parquet
from mobatlas.io.output import new_file, refuse_overlap
from mobatlas.io.tables import key_column, number_column, read_table, require_columns
from mobatlas.progress import SILENT, Tracker
from mobatlas.sampling.chunks import (
    POPULATION,
    Chunk,
    ChunkSampler,
    Part,
    People,
    Plan,
    SampleRequest,
    Shard,
    coarsen_anchors,
    sample_chunks,
)
from mobatlas.sampling.copies import ATTEMPTS, protected_trajectories
from mobatlas.supervision.calibration import Weighting
from mobatlas.supervision.store import (
    informed_features,
    load_draws,
    load_people,
    load_sampler,
    refuse_without_posterior,
)
from mobatlas.training.devices import check_devices
from mobatlas.training.resources import peak_gb

ALL = "all"  # every group of the model
OTHER_FORMATS = {
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
MIN_DRAWS = 10
PER_DRAW = 2  # trajectories, at least
FAITHFUL = 0.8  # share of the posterior spread; below it, a warning
MARGIN = 0.5  # homes may be outside the box of places by half its size
MARGIN_DEGREES = 0.5  # or by about 50 km
DEFAULT_REQUEST = SampleRequest()
DISCLOSES = {
    SYNTHETIC: f"Synthetic homes and workplaces, from cells of {MIN_PEOPLE} or more people each.",
    OBSERVED: "Homes and workplaces of training people, coarsened where `coarsen` says so.",
    "table": "Homes and workplaces of the table of --anchors, coarsened where `coarsen` says so.",
}


@dataclass(frozen=True)
class Generated:
    """A file of samples: its size, speed and calibration."""

    path: str
    n: int
    tokens: int
    seconds: float  # of sampling and writing, without loading
    trajectories_per_second: float
    peak_gb: float  # of the largest process
    devices: int = 1
    shard: str | None = None
    acceptance_rate: float | None = None  # of candidates, if samples were calibrated
    calibration: dict[str, Any] | None = None  # its form, and distances to the estimated means
    posterior: dict[str, Any] | None = None  # draws, and the share of their spread that is reached
    copies: dict[str, int] | None = None  # of training trajectories: rejected and left out
    informed: dict[str, Any] | None = None  # what the evidence informs; see `informed_features`

    def as_dict(self) -> dict[str, Any]:
        """For reports."""
        return asdict(self)


def generate(
    model: Path | str,
    out: Path | str,
    n: int | None = None,
    request: SampleRequest = DEFAULT_REQUEST,
    *,
    dataset: Path | str | None = None,
    overwrite: bool = False,
    tracker: Tracker = SILENT,
) -> Generated:
    """Sample trajectories from a MODEL folder into a Parquet file.

    Parameters
    ----------
    model
        A MODEL folder.
    out
        The Parquet file to write.
    n
        Number of trajectories, of each group if the request names several. If None, one for each
        row of the request's table of anchors.
    request
        Groups, region, anchors, seed and other options.
    dataset
        The folder of the model's dataset, if it has moved.
    overwrite
        Replace a file that mobatlas wrote.
    tracker
        Receives the progress, as a number of trajectories up to n.

    Returns
    -------
    Generated
        The size of the file, the speed, and distances of calibrated groups to their means.

    Examples
    --------
    >>> request = SampleRequest(group="all", calibrate=True)
    >>> generate("model-by-group", "samples.parquet", 500, request)  # doctest: +SKIP
    """
    target = Path(out)
    _check_request(n, target, request)
    shard = Shard.parse(request.shard)
    coarsening = _parse_coarsening(request.coarsen)
    device = check_devices(request.accelerator, request.devices)
    with new_file(target, overwrite) as partial:
        loaded = load_model(model, Path(dataset) if dataset is not None else None)
        loaded.generator.to(device)
        for source in (loaded.path, loaded.dataset, request.regions, request.table):
            if source is not None:
                refuse_overlap(Path(source), target)
        plan = _plan(loaded, n, request, coarsening, tracker)
        sampler = ChunkSampler(replace(plan, shard=shard), loaded)
        result = _write(partial, sampler, request, device, tracker)
    return replace(result, path=str(out))


def _write(
    path: Path, sampler: ChunkSampler, request: SampleRequest, device: str, tracker: Tracker
) -> Generated:
    """Sample into a file."""
    plan = sampler.plan
    facts = _facts(sampler.model, plan, request)
    metadata = json.dumps(facts if len(facts) > 1 else facts[0], sort_keys=True)
    schema = sample_schema(timed=has_times(sampler.model.generator), drawn=plan.draws > 0)
    start = time.perf_counter()
    tasks = sampler.tasks()
    total = sum(task.stop - task.start for task in tasks)
    tally = _Tally(tracker, plan.n / plan.shard.of / max(1, total))
    with sample_chunks(sampler, tasks, device, request.devices) as chunks:
        tokens = write_parquet(path, schema.with_metadata({METADATA: metadata}), tally.rows(chunks))
    seconds = time.perf_counter() - start
    if tally.copies["left_out"]:
        log.warning(
            "--reject-copies: %s samples still reproduced a training trajectory after %d attempts "
            "and were left out; the file has fewer trajectories than requested",
            f"{tally.copies['left_out']:,}",
            ATTEMPTS,
        )
    has_calibration = plan.calibration is not None and tally.candidates > 0  # not an empty shard
    return Generated(
        path=str(path),
        n=tally.n,
        tokens=tokens,
        seconds=seconds,
        trajectories_per_second=tally.n / seconds,
        peak_gb=max(peak_gb(), tally.peak_gb),
        devices=request.devices,
        shard=request.shard,
        acceptance_rate=tally.n / tally.candidates if has_calibration else None,
        calibration=_calibration_report(plan) if has_calibration else None,
        posterior=facts[0]["posterior"],
        copies=tally.copies if request.reject_copies else None,
        informed=facts[0]["informed"],
    )


def _check_request(n: int | None, out: Path, request: SampleRequest) -> None:
    for is_wrong, sentence in (
        (
            n is None and request.table is None,
            "--n is missing: give the number of trajectories, "
            "or --anchors FILE to sample one for each of its rows",
        ),
        (n is not None and n <= 0, f"--n {n}: ask for at least 1 trajectory"),
        (
            out.suffix.lower() in OTHER_FORMATS,
            f"--out {out}: samples are written as Parquet; name a file that ends in .parquet",
        ),
        (
            not 0 <= request.seed < 2**63,
            f"--seed {request.seed}: give a whole number from 0 to 2^63 - 1",
        ),
        (
            request.region is not None and request.table is not None,
            "--anchors FILE and --region both choose the homes of people; pass only one of them",
        ),
        (
            request.regions is not None and request.region is None,
            "--regions needs --region; pass the ID of one of its regions",
        ),
        (
            request.posterior and request.draws < MIN_DRAWS,
            f"--draws {request.draws}: give at least {MIN_DRAWS}, so that intervals have a width",
        ),
    ):
        if is_wrong:
            raise MobatlasError(sentence)


def _parse_coarsening(value: float | str | None) -> Coarsening | None:
    try:
        return None if value is None else Coarsening.parse(value)
    except ValueError as error:
        raise MobatlasError(f"--coarsen {value}: {error}") from None


def _plan(
    model: Model,
    n: int | None,
    request: SampleRequest,
    coarsening: Coarsening | None,
    tracker: Tracker,
) -> Plan:
    """Resolve a request with a model."""
    groups = _group_shares(model, request.group)
    people, region_shares = _people(model, request, bool(groups))
    if coarsening is not None and request.anchors == SYNTHETIC:
        log.warning(
            "--coarsen %s has no effect: the homes and workplaces are synthetic", coarsening
        )
        coarsening = None
    if coarsening is not None:
        secret = people.anchors if request.table is not None else model.observed().anchors
        people = replace(people, anchors=coarsen_anchors(people.anchors, coarsening, secret))
    if model.manifest.details.get(SUPERVISION, {}).get("membership"):
        log.warning(
            "%s: this model was supervised with --membership, which uses each person's region",
            model.path,
        )
    size = len(people.anchors) if n is None else n
    parts = tuple(
        Part(shares, request.seed + number, number * size)
        for number, shares in enumerate(groups or [region_shares])
    )
    form = _calibration_form(
        model, request, people.groups is not None or parts[0].shares is not None
    )
    plan = Plan(
        people=people,
        parts=parts,
        n=size,
        coarsening=coarsening,
        region=request.region,
        form=form,
        calibration=load_sampler(model, _Calibrating(tracker)).calibration if form else None,
        tiles=request.chunk,
        protected=protected_trajectories(model.open_dataset(), model.generator.max_length)
        if request.reject_copies
        else None,
    )
    return _spread_over_draws(model, plan, request, tracker) if request.posterior else plan


def _spread_over_draws(model: Model, plan: Plan, request: SampleRequest, tracker: Tracker) -> Plan:
    """The plan with a calibration for each posterior draw."""
    least = PER_DRAW * request.draws
    if plan.n < least:
        raise MobatlasError(
            f"--posterior: {plan.n} trajectories are too few for {request.draws} draws; give "
            f"--n {least} or more, better {10 * least:,}"
        )
    assert plan.calibration is not None and plan.form is not None
    drawn = load_draws(
        model, plan.calibration, plan.form, (request.draws, request.seed), _Calibrating(tracker)
    )
    if low := {name: share for name, share in drawn.spread.items() if share < FAITHFUL}:
        log.warning(
            "%s: the error bars of %s are too wide for the samples of this model, which show %s "
            "of them; `posterior_intervals` corrects for this",
            model.path,
            " and ".join(low),
            " and ".join(f"{share:.0%}" for share in low.values()),
        )
    return replace(
        plan, calibration=drawn.calibration, draws=request.draws, posterior=drawn.facts()
    )


def _group_shares(model: Model, group: Any) -> list[Floats]:
    """Shares (groups,) of each requested group: one for itself; empty if none is requested."""
    if group is None:
        return []
    groups = model.groups
    if groups is None:
        raise MobatlasError(
            f"{model.path}: this model of phase 1 has no groups; "
            "run `mobatlas supervise` first, or leave out --group"
        )
    names = [group] if isinstance(group, str) else list(group)
    if names == [ALL] and ALL not in groups.names:
        names = list(groups.names)
    return [np.eye(len(groups))[groups.index(name)] for name in names]


def _people(model: Model, request: SampleRequest, has_group: bool) -> tuple[People, Floats | None]:
    """The people to sample, and the shares of groups in their region (groups,)."""
    names = model.groups.names if model.groups is not None else ()
    if request.table is not None:
        return _people_of_table(request.table, request.rename, model, has_group), None
    is_observed = request.anchors == OBSERVED
    if is_observed:
        log.warning(
            "--anchors observed: the samples disclose where training people of %s live and work; "
            "run `mobatlas audit` before you share them",
            model.dataset,
        )
    if request.region is not None:
        folder = Path(request.regions) if request.regions is not None else None
        homes, shares = model.region(request.region, folder, observed=is_observed)
        return People(homes, names), shares
    anchors, residence = load_people(model, observed=is_observed)
    return People(anchors, names, residence=residence if has_group else None), None


def _people_of_table(
    path: Path, rename: Mapping[str, str], model: Model, has_group: bool
) -> People:
    groups = model.groups
    table = read_table(path, rename)
    require_columns(str(path), table.columns, ANCHORS)
    anchors = np.stack(  # (rows, 4)
        [number_column(path, table, name, missing=True) for name in ANCHORS], axis=1
    )
    _check_anchors(path, anchors, model)
    if "group" not in table.columns:
        return People(anchors, groups.names if groups is not None else (), in_order=True)
    if has_group:
        raise MobatlasError(f"--group: {path} also has a column 'group'; leave out one of the two")
    codes, names = key_column(path, table, "group")
    if groups is None:  # a baseline, sampled for the people of the models it is compared with
        log.warning(
            "%s: this model has no groups, so the column 'group' of %s is copied "
            "but does not change the samples",
            model.path,
            path,
        )
        return People(anchors, tuple(map(evenly_spaced, names)), codes, in_order=True)
    try:
        number = np.array([groups.index(name) for name in names])
    except MobatlasError as error:
        raise MobatlasError(f"{path}: column 'group': {error}") from None
    return People(anchors, groups.names, number[codes], in_order=True)


def _check_anchors(path: Path, anchors: Floats, model: Model) -> None:
    """Refuse coordinates that are invalid, incomplete or far from all places of the model."""
    known = model.generator.vocabulary.coordinates
    low = np.nanmin(known, axis=0)  # (2,)
    high = np.nanmax(known, axis=0)
    margin = np.maximum(MARGIN * (high - low), MARGIN_DEGREES)
    box = f"lat {low[0]:.3f} to {high[0]:.3f}, lon {low[1]:.3f} to {high[1]:.3f}"
    for place, pair in (("home", anchors[:, :2]), ("work", anchors[:, 2:])):
        both = f"'{place}_lat' and '{place}_lon'"
        for wrong, problem in (
            (np.abs(pair) > (90, 180), f"{both} are outside -90..90 and -180..180"),
            (
                np.isnan(pair) != np.isnan(pair[:, ::-1]),
                f"only one of {both} is filled; give both or none",
            ),
            (
                (pair < low - margin) | (pair > high + margin),
                f"{both} are far from all places of {model.path} ({box}); use homes of that area",
            ),
        ):
            if wrong.any():
                row = int(np.argmax(wrong.any(1)))
                raise MobatlasError(
                    f"{path}: row {row + 1} ({pair[row, 0]:g}, {pair[row, 1]:g}): {problem}"
                )


def _calibration_form(model: Model, request: SampleRequest, has_groups: bool) -> str | None:
    """The form of calibration to apply; None for none."""
    option = "--posterior" if request.posterior else "--calibrate"
    wanted = request.calibrate or request.posterior
    if wanted and not has_groups:
        raise MobatlasError(
            f"{option} needs groups; pass --group, --region, or --anchors with a column 'group'"
        )
    if request.posterior:
        refuse_without_posterior(model)
    # Without groups in the generator, only a calibration can sample them (`resample`).
    needs_calibration = model.groups is not None and model.generator.groups is None
    if not has_groups or not (wanted or needs_calibration):
        return None
    return POPULATION if request.region is None and request.table is None else "fixed_anchors"


def _facts(model: Model, plan: Plan, request: SampleRequest) -> list[dict[str, Any]]:
    """The metadata of the file, one entry per part."""
    has_groups = plan.people.groups is not None or plan.parts[0].shares is not None
    common = {
        "model": model.manifest.content_hash,
        "n": plan.n,
        "region": request.region,
        "reject_copies": request.reject_copies,
        "coarsen": plan.coarsening and str(plan.coarsening),
        "calibrated": plan.form,
        "posterior": plan.posterior,
        "informed": informed_features(model) if has_groups else None,
        "shard": request.shard,
        "anchors": file_hash(request.table) if request.table is not None else request.anchors,
        "discloses": DISCLOSES.get(str(request.anchors), DISCLOSES["table"]),
        "versions": library_versions(),
    }
    return [
        common
        | {
            "seed": part.seed,
            "group": None
            if request.group is None or part.shares is None
            else plan.people.names[int(part.shares.argmax())],
        }
        for part in plan.parts
    ]


def _calibration_report(plan: Plan) -> dict[str, Any]:
    """Distances of the sampled groups to their estimated means, on the calibration's pool."""
    assert plan.calibration is not None and plan.form is not None
    shares = [part.shares for part in plan.parts if part.shares is not None]
    groups = plan.people.groups
    sampled = np.flatnonzero(np.sum(shares, 0)) if groups is None else np.unique(groups)
    names = plan.calibration.groups.names
    weightings = getattr(plan.calibration, plan.form)
    distances = {names[k]: _mean_distances(weightings[k :: len(names)]) for k in sampled}
    return {"form": plan.form, "groups": distances}


def _mean_distances(weightings: Sequence[Weighting]) -> dict[str, dict[str, float]]:
    """Distances before and after, averaged over the draws of a group."""
    return {
        when: {
            kind: float(np.mean([getattr(each, when)[kind] for each in weightings]))
            for kind in getattr(weightings[0], when)
        }
        for when in ("before", "after")
    }


@dataclass(frozen=True)
class _Calibrating:
    """Reports the progress of a calibration before sampling starts."""

    tracker: Tracker

    def step(self, done: float, note: str = "") -> None:
        self.tracker.step(0, f"calibrating, {int(done) // 10 * 10} %")


@dataclass
class _Tally:
    """Counts what has been written."""

    tracker: Tracker
    weight: float  # progress per sample; each of K shards ends at n / K
    n: int = 0
    candidates: int = 0
    peak_gb: float = 0.0
    copies: dict[str, int] = field(default_factory=lambda: {"rejected": 0, "left_out": 0})

    def rows(self, chunks: Iterator[Chunk]) -> Iterator[pa.RecordBatch]:
        for chunk in chunks:
            yield chunk.rows
            self.n += chunk.n
            self.candidates += chunk.candidates
            self.copies["rejected"] += chunk.rejected
            self.copies["left_out"] += chunk.left_out
            self.peak_gb = max(self.peak_gb, chunk.peak_gb)
            self.tracker.step(self.n * self.weight)
