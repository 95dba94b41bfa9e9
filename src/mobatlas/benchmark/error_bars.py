"""Recovered group means against those of labelled people: are they where their error bars say, what helped them there, and
what do they tell of everything else that a group does?

Real regions differ in more than their people, so that recovery takes several precautions; each is measured with those before
it, on validation people. Training people weighed by recovered means, by those that are known from labels, and by where they
live show, against test people, what comes of them before any generator. What is found reaches no model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from scipy import sparse, special

from mobatlas.artifacts import read_manifest
from mobatlas.benchmark.cells import PARTITIONS, Job, Place, read_cell, write_cell
from mobatlas.benchmark.people import METRICS, Crowd
from mobatlas.benchmark.reweight import RIDGE, person_features
from mobatlas.data.dataset import TrajectoryDataset
from mobatlas.progress import track
from mobatlas.regions.bins import maps_of
from mobatlas.regions.folder import KIND as REGIONS
from mobatlas.regions.folder import load_assignment, load_regions
from mobatlas.regions.recovery import Recovery, recover
from mobatlas.regions.transfer import confounding
from mobatlas.supervision.evidence import believed_shares, lives_by, region_of
from mobatlas.supervision.tilt import fit_tilt

KNOWN, RECOVERED, RESIDENCE = "known means", "recovered means", "residence"  # by which training people are weighed
LEVEL = 0.9  # of the error bars that are checked
FEW = 30  # visits of a group's training people, which do not tell a spread
TRUST = 1e6  # groups may differ as much as regions say
# More in each than in the one before: doubt of the composition; regions that differ by themselves, and by themselves in each
# feature map; a surface over the map, and belief in what holds all over it; a limit to what groups explain, which is all.
PRECAUTIONS: Mapping[str, Mapping[str, Any]] = {
    "none": {"exact_composition": True, "region_effects": False, "geography": False},
    "composition": {"region_effects": False, "geography": False},
    "regions": {"geography": False, "groups_explain": TRUST},
    "map": {"groups_explain": TRUST},
    "all": {},
}


def error_bars(places: Sequence[Place], jobs: Sequence[Job]) -> list[dict[str, Any]]:
    """A row for each kind of regions, means over seeds; what the guard says is of the first seed."""
    rows, kinds = [], {job.regions: job for job in jobs}
    known = _kept(places, list(kinds.values()))
    for regions, job in kinds.items():
        found = known[regions]
        measured: dict[str, Any] = {"error": _mean([each["error"] for each in found])}
        measured["coverage"] = {
            name: _mean([each["coverage"][name] for each in found]) for name in found[0]["coverage"]
        }
        kind = {"partition": job.partition, "features": list(job.features), "census": job.census}
        row: dict[str, Any] = {**kind, "shuffled": job.shuffled, **measured, "said": found[0]["said"]}
        row["people"] = {
            stage: {metric: _known([each["people"][stage][metric] for each in found]) for metric in METRICS}
            for stage in found[0]["people"]
        }
        if job.partition not in PARTITIONS:
            row["precautions"] = {name: _mean([each["precautions"][name] for each in found]) for name in PRECAUTIONS}
        rows.append(row)
    return rows


def _kept(places: Sequence[Place], jobs: Sequence[Job]) -> dict[str, list[dict[str, Any]]]:
    """Name of regions -> what was found in each place: a file of its own each, made if it is not there of the same regions."""
    plan = [(place, job, f"error-bars-{job.regions}", _made_of(place, job)) for job in jobs for place in places]
    missing = [(place, job, name, of) for place, job, name, of in plan if not _known_of(place, name, of)]
    if missing:
        crowd = Crowd.of(places[0].dataset)
        with track("error bars", len(missing), quiet=True) as tracker:  # lines, as of the other cells
            for done, (place, job, name, of) in enumerate(missing):
                tracker.step(done, f"seed {place.seed}, {job.regions}")
                write_cell(place, name, _one(place, job, crowd) | {"of": of})
    found: dict[str, list[dict[str, Any]]] = {job.regions: [] for job in jobs}
    for place, job, name, _ in plan:
        found[job.regions].append(read_cell(place.path.parent, place.seed, name))
    return found


def _made_of(place: Place, job: Job) -> dict[str, Any]:
    """What else than code they depend on."""
    regions = read_manifest(place.regions(job), REGIONS).content_hash
    asked = {"level": LEVEL, "few": FEW, "precautions": list(PRECAUTIONS), "metrics": list(METRICS)}
    return {"dataset": place.dataset.manifest.content_hash, "regions": regions, **asked, **_asked(place)}


def _known_of(place: Place, name: str, of: Mapping[str, Any]) -> bool:
    there = (place.path / f"{name}.json").exists()
    return there and read_cell(place.path.parent, place.seed, name).get("of") == of


def _one(place: Place, job: Job, crowd: Crowd) -> dict[str, Any]:
    dataset, regions = place.dataset, load_regions(place.regions(job))
    phi, parents = person_features(dataset, regions), dataset.vocabulary.parents
    believe = partial(recover, regions, parents=parents, quiet=True)
    recovery = believe(**_asked(place))
    known = _group_means(dataset, phi, "train")
    found: dict[str, Any] = {"error": error_left(recovery, known)}
    found["coverage"] = coverage(recovery, _group_means(dataset, phi, "test"), _chance(recovery, dataset, phi))
    found["said"] = confounding(recovery)
    people = np.intersect1d(dataset.split_people("train"), dataset.person)
    wanted = {KNOWN: np.where(np.isnan(known), recovery.means, known), RECOVERED: recovery.means}
    found["people"] = {stage: crowd.closed(_tilted(phi[people], means)) for stage, means in wanted.items()}
    if job.partition not in PARTITIONS:
        region = region_of(dataset, people, load_assignment(place.regions(job)), regions.composition.regions)
        if region is not None:
            found["people"][RESIDENCE] = crowd.closed(lives_by(believed_shares(regions), region))
        truth = _group_means(dataset, phi, "val")
        ways = {name: believe(**{**_asked(place), **way}) for name, way in PRECAUTIONS.items()}
        found["precautions"] = {name: error_left(way, truth) for name, way in ways.items()}
    return found


def _asked(place: Place) -> dict[str, Any]:
    """How models of this place believe their regions."""
    return {name: value for name, value in place.bench.values.items() if name == "groups_explain"}


def error_left(recovery: Recovery, truth: np.ndarray) -> float:
    """The distance to the truth (groups, features), 1 being that of the population's mean; groups without one are NaN."""
    scale, known = np.sqrt(np.maximum(recovery.baseline, 1e-6)), ~np.isnan(truth).any(1)
    left, whole = (
        float(np.linalg.norm(((means - truth) / scale)[known])) for means in (recovery.means, recovery.baseline)
    )
    return left / max(whole, 1e-12)


def coverage(recovery: Recovery, truth: np.ndarray, chance: np.ndarray) -> dict[str, float]:
    """Feature map -> how often error bars hold the means of people of whom nothing was told (groups, features).

    An error bar is about a group, and those people are a sample of it, so bars are widened by the variance `chance` of their
    means. The people behind the aggregates would not do: their means are the data, noise and all, which recovery smooths.
    """
    wide = special.ndtri(0.5 + LEVEL / 2) * np.sqrt(recovery.sd**2 + chance)  # (groups, features)
    inside = (np.abs(truth - recovery.means) <= wide)[~np.isnan(truth).any(1)]
    return {name: float(inside[:, bins].mean()) for name, bins in maps_of(recovery.features).items()}


def _chance(recovery: Recovery, dataset: TrajectoryDataset, phi: sparse.csr_array) -> np.ndarray:
    """Variance of the means of a group's test people (groups, features), by the spread between its training people."""
    tested = np.array([max(len(some), 1) for some in _members(dataset, "test")])
    return np.asarray(_spread_of(recovery, dataset, phi) / tested[:, None])


def _spread_of(recovery: Recovery, dataset: TrajectoryDataset, phi: sparse.csr_array) -> np.ndarray:
    """Variance between people of a group (groups, features), of training people; too few visits: everybody's, by the mean."""
    members = _members(dataset, "train")
    every = _moments(phi[np.concatenate(members)])
    disperse = np.divide(every[1], every[0], out=np.zeros_like(every[1]), where=every[0] > 0)
    rows = []
    for some, mean in zip(members, recovery.means, strict=True):
        own = _moments(phi[some]) if len(some) else (np.zeros_like(mean), np.zeros_like(mean))
        rows.append(np.where(own[0] * len(some) >= FEW, own[1], mean * disperse))
    return np.stack(rows)


def _moments(phi: sparse.csr_array) -> tuple[np.ndarray, np.ndarray]:
    """Mean and variance of each feature."""
    mean, square = (np.asarray(each.mean(0)).ravel() for each in (phi, phi.multiply(phi)))
    return mean, square - mean**2


def _group_means(dataset: TrajectoryDataset, phi: Any, split: str) -> np.ndarray:
    """Of labelled people of a split, (groups, features); NaN for a group that has none there."""
    nobody = np.full(phi.shape[1], np.nan)
    return np.stack([_moments(phi[some])[0] if len(some) else nobody for some in _members(dataset, split)])


def _members(dataset: TrajectoryDataset, split: str) -> list[np.ndarray]:
    """Of each group, the people of a split who have trajectories."""
    people, group = np.intersect1d(dataset.split_people(split), dataset.person), dataset.person_groups()
    assert dataset.groups is not None  # or there would be no regions of them
    return [people[group[people] == number] for number in range(len(dataset.groups))]


def _tilted(phi: sparse.csr_array, means: np.ndarray) -> np.ndarray:
    """Weights of people (people, groups) that give them the means of each group."""
    return np.stack([fit_tilt(phi, wanted, RIDGE).weights for wanted in means], axis=1)


def _known(values: Sequence[float | None]) -> float | None:
    """The mean, None where one of them is."""
    some = [value for value in values if value is not None]
    return _mean(some) if len(some) == len(values) else None


def _mean(values: Sequence[float]) -> float:
    return round(float(np.mean(values)), 4)
