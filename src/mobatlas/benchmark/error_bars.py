"""Recovered group means against those of labelled people: are they where their error bars say, what helped them there, and
what do they tell of everything else that a group does?

Real regions differ in more than their people, so that recovery takes several precautions; each is measured with those before
it, on validation people. Training people weighed by recovered means, by those that are known from labels, and by where they
live show, against test people, what comes of them before any generator. What is found reaches no model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy import sparse

from mobatlas.artifacts import read_manifest
from mobatlas.benchmark.cells import PARTITIONS, Job, Place, read_cell, write_cell
from mobatlas.benchmark.people import METRICS, Crowd
from mobatlas.benchmark.reweight import RIDGE, person_features
from mobatlas.data.dataset import TrajectoryDataset
from mobatlas.progress import track
from mobatlas.regions.folder import KIND as REGIONS
from mobatlas.regions.folder import load_assignment, load_regions
from mobatlas.regions.recovery import Recovery, recover
from mobatlas.regions.transfer import confounding
from mobatlas.supervision.evidence import believed_shares, lives_by, region_of
from mobatlas.supervision.tilt import fit_tilt

KNOWN, RECOVERED, RESIDENCE = "known means", "recovered means", "residence"  # by which training people are weighed
LEVEL = 0.9  # of the error bars that are checked
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
        measured = {name: _mean([each[name] for each in found]) for name in ("coverage", "error")}
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
    asked = {"level": LEVEL, "precautions": list(PRECAUTIONS), "metrics": list(METRICS)}
    return {"dataset": place.dataset.manifest.content_hash, "regions": regions, **asked}


def _known_of(place: Place, name: str, of: Mapping[str, Any]) -> bool:
    there = (place.path / f"{name}.json").exists()
    return there and read_cell(place.path.parent, place.seed, name).get("of") == of


def _one(place: Place, job: Job, crowd: Crowd) -> dict[str, Any]:
    dataset, regions = place.dataset, load_regions(place.regions(job))
    phi, parents = person_features(dataset, regions), dataset.vocabulary.parents
    recovery = recover(regions, parents=parents, quiet=True)
    known = _group_means(dataset, phi, "train")
    found: dict[str, Any] = judged(recovery, known)
    found["said"] = confounding(recovery)
    people = np.intersect1d(dataset.split_people("train"), dataset.person)
    wanted = {KNOWN: np.where(np.isnan(known), recovery.means, known), RECOVERED: recovery.means}
    found["people"] = {stage: crowd.closed(_tilted(phi[people], means)) for stage, means in wanted.items()}
    if job.partition not in PARTITIONS:
        region = region_of(dataset, people, load_assignment(place.regions(job)), regions.composition.regions)
        if region is not None:
            found["people"][RESIDENCE] = crowd.closed(lives_by(believed_shares(regions), region))
        truth = _group_means(dataset, phi, "val")
        ways = {name: recover(regions, parents=parents, quiet=True, **way) for name, way in PRECAUTIONS.items()}
        found["precautions"] = {name: judged(way, truth)["error"] for name, way in ways.items()}
    return found


def judged(recovery: Recovery, truth: np.ndarray) -> dict[str, float]:
    """How often the truth lies within the error bars, and the distance that is left to it, 1 being the population's.

    Groups whose truth (groups, features) is NaN are left out.
    """
    low, high = recovery.interval(LEVEL)
    scale = np.sqrt(np.maximum(recovery.baseline, 1e-6))
    known = ~np.isnan(truth).any(1)
    left, whole = (
        float(np.linalg.norm(((means - truth) / scale)[known])) for means in (recovery.means, recovery.baseline)
    )
    inside = ((truth >= low) & (truth <= high))[known]
    return {"coverage": float(np.mean(inside)), "error": left / max(whole, 1e-12)}


def _group_means(dataset: TrajectoryDataset, phi: Any, split: str) -> np.ndarray:
    """Of labelled people of a split, (groups, features); NaN for a group that has none there."""
    people, group = np.intersect1d(dataset.split_people(split), dataset.person), dataset.person_groups()
    assert dataset.groups is not None  # or there would be no regions of them
    members = [people[group[people] == number] for number in range(len(dataset.groups))]
    nobody = np.full(phi.shape[1], np.nan)
    return np.stack([np.asarray(phi[some].mean(0)).ravel() if len(some) else nobody for some in members])


def _tilted(phi: sparse.csr_array, means: np.ndarray) -> np.ndarray:
    """Weights of people (people, groups) that give them the means of each group."""
    return np.stack([fit_tilt(phi, wanted, RIDGE).weights for wanted in means], axis=1)


def _known(values: Sequence[float | None]) -> float | None:
    """The mean, None where one of them is."""
    some = [value for value in values if value is not None]
    return _mean(some) if len(some) == len(values) else None


def _mean(values: Sequence[float]) -> float:
    return round(float(np.mean(values)), 4)
