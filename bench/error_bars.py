"""Recovered group means against those of labelled people: are they where their error bars say, what helped them there, and
what do they tell of everything else that a group does?

Real regions differ in more than their people, so that recovery takes several precautions; each is measured with those before
it, on validation people. Training people weighed by recovered means, by those that are known from labels, and by where they
live show, against test people, what comes of them before any generator. What is found reaches no model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import sparse, special

from bench.cells import PARTITIONS, Job, Place, read_cell, write_cell
from bench.people import MANNER, METRICS, Crowd
from bench.reweight import RIDGE, person_features
from mobatlas.data.arrays import Floats, Ints
from mobatlas.data.dataset import TrajectoryDataset
from mobatlas.groups import Groups
from mobatlas.io.manifest import read_manifest
from mobatlas.progress import track
from mobatlas.regions.composition import composition_from_labels, region_codes
from mobatlas.regions.recovery.geography import confounding
from mobatlas.regions.recovery.recover import GROUPS_EXPLAIN, RecoveryOptions, recover
from mobatlas.regions.store import KIND as REGIONS
from mobatlas.regions.store import RegionsFolder
from mobatlas.regions.types import Recovery
from mobatlas.supervision.evidence import region_of, residence_shares, shrunk_shares
from mobatlas.supervision.tilt import fit_tilt

# By which training people are weighed: what labels know of means, what regions tell of them; what the composition says of who
# lives where, and what labels of all of them say of it.
KNOWN, RECOVERED, RESIDENCE, KNOWN_RESIDENCE = (
    "known means",
    "recovered means",
    "residence",
    "known residence",
)
STAGES = (KNOWN, RECOVERED, RESIDENCE, KNOWN_RESIDENCE)
LEVEL = 0.9  # of the error bars that are checked
FEW = 30.0  # visits of test people, which tell something
MEASURED = ("coverage", "coverage_of_labels", "error")
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
        measured: dict[str, Any] = {
            name: _known([each[name] for each in found]) for name in MEASURED
        }
        measured["cells"] = found[0]["cells"]
        kind = {"partition": job.partition, "features": list(job.features), "census": job.census}
        row: dict[str, Any] = {
            **kind,
            "shuffled": job.shuffled,
            **measured,
            "said": found[0]["said"],
        }
        row["people"] = {
            stage: {
                metric: _known([each["people"][stage][metric] for each in found])
                for metric in METRICS
            }
            for stage in found[0]["people"]
        }
        if job.partition not in PARTITIONS:
            row["precautions"] = {
                name: _known([each["precautions"][name] for each in found]) for name in PRECAUTIONS
            }
        rows.append(row)
    return rows


def _kept(places: Sequence[Place], jobs: Sequence[Job]) -> dict[str, list[dict[str, Any]]]:
    """Name of regions -> what was found in each place: a file of its own each, made if it is not there of the same regions."""
    plan = [
        (place, job, f"error-bars-{job.regions}", _made_of(place, job))
        for job in jobs
        for place in places
    ]
    missing = [
        (place, job, name, of) for place, job, name, of in plan if not _known_of(place, name, of)
    ]
    if missing:
        crowd = Crowd.of(places[0].dataset)
        with track(
            "error bars", len(missing), quiet=True
        ) as tracker:  # lines, as of the other cells
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
    asked = {
        "level": LEVEL,
        "few": FEW,
        "metrics": list(METRICS),
        "ridge": RIDGE,
        "groups_explain": GROUPS_EXPLAIN,
    }
    ways = {"precautions": {name: dict(way) for name, way in PRECAUTIONS.items()}, "people": MANNER}
    ways["stages"] = list(STAGES)
    return {
        "dataset": place.dataset.manifest.content_hash,
        "regions": regions,
        **asked,
        **ways,
        **_asked(place),
    }


def _known_of(place: Place, name: str, of: Mapping[str, Any]) -> bool:
    there = (place.path / f"{name}.json").exists()
    return there and read_cell(place.path.parent, place.seed, name).get("of") == of


def _one(place: Place, job: Job, crowd: Crowd) -> dict[str, Any]:
    dataset, folder = place.dataset, RegionsFolder.open(place.regions(job))
    regions = folder.regions
    phi, parents = person_features(dataset, regions), dataset.vocabulary.parents

    def believe(**assumptions: Any) -> Recovery:
        options = RecoveryOptions(**{**_asked(place), **assumptions})
        return recover(regions, parents=parents, options=options, quiet=True)

    recovery = believe()
    told, tested = (Sample.of(dataset, phi, split) for split in ("train", "test"))
    known = told.means
    found: dict[str, Any] = {
        "error": error_left(recovery, known),
        **coverage(recovery, told, tested),
    }
    found["said"] = confounding(recovery)
    people = np.intersect1d(dataset.split_people("train"), dataset.person)
    wanted = {KNOWN: np.where(np.isnan(known), recovery.means, known), RECOVERED: recovery.means}
    found["people"] = {
        stage: crowd.closed(_tilted(phi[people], means)) for stage, means in wanted.items()
    }
    if job.partition not in PARTITIONS:
        region = region_of(dataset, people, folder.assignment, regions.composition.regions)
        if region is not None:
            known_there = known_residence(
                regions.composition.regions, region, crowd.group, regions.groups
            )
            homes = {
                RESIDENCE: residence_shares(shrunk_shares(regions), region),
                KNOWN_RESIDENCE: known_there,
            }
            found["people"] |= {stage: crowd.closed(lives) for stage, lives in homes.items()}
        truth = Sample.of(dataset, phi, "val").means
        ways = {name: believe(**way) for name, way in PRECAUTIONS.items()}
        found["precautions"] = {name: error_left(way, truth) for name, way in ways.items()}
    return found


def known_residence(regions: Sequence[str], region: Ints, group: Ints, groups: Groups) -> Floats:
    """What labels of all people say of who lives where they do (people, groups); without a region or label: of all of them."""
    names = np.array([*regions, None], dtype=object)[region]
    names[group < 0] = None
    return residence_shares(
        composition_from_labels(group, names, groups).shares, region_codes(names)[0]
    )


def _asked(place: Place) -> dict[str, Any]:
    """How models of this place believe their regions."""
    return {name: value for name, value in place.bench.values.items() if name == "groups_explain"}


def error_left(recovery: Recovery, truth: Floats) -> float | None:
    """The distance to the truth (groups, features), 1 being that of the population's mean; groups without one are NaN."""
    scale, known = np.sqrt(np.maximum(recovery.baseline, 1e-6)), ~np.isnan(truth).any(1)
    left, whole = (
        float(np.linalg.norm(((means - truth) / scale)[known]))
        for means in (recovery.means, recovery.baseline)
    )
    return left / max(whole, 1e-12) if known.any() else None


@dataclass(frozen=True)
class Sample:
    """People of a split: how many of each group, what they do on average, and how they vary (groups, features)."""

    n: Floats  # (groups,)
    means: Floats  # NaN for a group that has nobody
    spread: Floats  # variance between people

    @classmethod
    def of(cls, dataset: TrajectoryDataset, phi: sparse.csr_array, split: str) -> Sample:
        people, group = (
            np.intersect1d(dataset.split_people(split), dataset.person),
            dataset.person_groups(),
        )
        assert dataset.groups is not None  # or there would be no regions of them
        members = [people[group[people] == number] for number in range(len(dataset.groups))]
        nobody = np.full(phi.shape[1], np.nan)
        means = np.stack([_mean_of(phi[some]) if len(some) else nobody for some in members])
        squares = np.stack(
            [_mean_of(phi[some].multiply(phi[some])) if len(some) else nobody for some in members]
        )
        return cls(
            np.array([float(len(some)) for some in members]),
            means,
            np.maximum(squares - means**2, 0),
        )


def coverage(recovery: Recovery, told: Sample, tested: Sample) -> dict[str, Any]:
    """How often error bars hold the means of test people, of whom nothing was told; how often labels would; in how many cells.

    An error bar is about a group, and test people are a sample of it, so bars are widened by what chance does to so many. The
    people behind the aggregates would not do: their means are the data, noise and all, which recovery smooths. Cells in which
    `FEW` visits of test people are expected count; in others chance is all. Places are named because training people visit
    them often, so test people do less, and even bars around what labels tell of training people fall short of their level.
    """
    with np.errstate(divide="ignore", invalid="ignore"):  # a group may have nobody
        chance = told.spread / tested.n[:, None]
        known = recovery.baseline * tested.n[:, None] >= FEW
        known &= ~np.isnan(tested.means) & ~np.isnan(told.means)
        bars = {
            "coverage": (recovery.means, recovery.sd**2 + chance),
            "coverage_of_labels": (told.means, told.spread / told.n[:, None] + chance),
        }
        wide = special.ndtri(0.5 + LEVEL / 2)
        inside = {
            name: np.abs(tested.means - mean) <= wide * np.sqrt(width)
            for name, (mean, width) in bars.items()
        }
    found: dict[str, Any] = {
        name: float(each[known].mean()) if known.any() else None for name, each in inside.items()
    }
    return found | {"cells": int(known.sum())}


def _mean_of(phi: sparse.csr_array) -> Floats:
    return np.asarray(phi.mean(0)).ravel()


def _tilted(phi: sparse.csr_array, means: np.ndarray) -> np.ndarray:
    """Weights of people (people, groups) that give them the means of each group."""
    return np.stack([fit_tilt(phi, wanted, RIDGE).weights for wanted in means], axis=1)


def _known(values: Sequence[float | None]) -> float | None:
    """The mean, None where one of them is."""
    some = [value for value in values if value is not None]
    return _mean(some) if len(some) == len(values) else None


def _mean(values: Sequence[float]) -> float:
    return round(float(np.mean(values)), 4)
