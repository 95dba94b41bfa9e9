"""Reweighting: training people weighed by recovered group means against test people of the group, without any generator."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import sparse

from bench.summary import write_result
from bench.survey import DIARY, census_column, check_survey, region_columns, said_files
from mobatlas.data.arrays import Floats
from mobatlas.data.dataset import TrajectoryDataset
from mobatlas.data.prepare.pipeline import prepare
from mobatlas.data.trajectories import Trajectories
from mobatlas.errors import MobatlasError
from mobatlas.evaluation.metrics import travel_distance
from mobatlas.features.divergences import js, normalise
from mobatlas.features.maps import build_feature
from mobatlas.io.manifest import library_versions
from mobatlas.io.output import new_folder, refuse_overlap
from mobatlas.progress import track
from mobatlas.regions.aggregates import person_means
from mobatlas.regions.build import RegionsOptions
from mobatlas.regions.recovery.recover import GROUPS_EXPLAIN, RecoveryOptions, recover
from mobatlas.regions.store import build_regions
from mobatlas.regions.types import Regions
from mobatlas.supervision.tilt import fit_tilt

MASK = ("HOME", "WORK", "OTHER")
METRICS = ("poi", "travel_distance", "category", "transitions")
# Equal widths up to that quantile of real trajectories, then one bin for the rest.
DISTANCE_BINS, DISTANCE_QUANTILE = 50, 0.99
RIDGE = 3e-3  # on validation people of the Santiago survey 1e-2 was no better
CONTROLLED = ("demogroups", "fullrank", "hot16", "rankdef", "messy")
# Rare places borrow what they do not tell from the category that they share. Real regions are confounded with the places
# near them, so there places are not named.
CONTROLLED_FEATURES, REAL_FEATURES = ("poi", "category"), ("category",)
# These leave people over, whom recovery knows as the rest of the population: measured with and without them.
LEAVING = CONTROLLED[1:]
ALONE, CENSUS = "regions_alone", "census"
SPLITS = ("test", "val")
LIFTED = 1e6  # a limit that is none
Ints = npt.NDArray[np.int64]


def planned(
    columns: Sequence[str], limits: Sequence[float] = (), census: bool = False
) -> list[dict[str, Any]]:
    """Every kind of regions; or real ones alone, with each of the limits to what groups explain: no other depends on it."""
    controlled: list[dict[str, Any]] = [
        {"partition": name, "features": CONTROLLED_FEATURES} for name in CONTROLLED
    ]
    controlled += [
        {"partition": name, "features": CONTROLLED_FEATURES, ALONE: True} for name in LEAVING
    ]
    controlled += [
        {"partition": name, "features": CONTROLLED_FEATURES, "shuffle_regions": True}
        for name in LEAVING
    ]
    real: list[dict[str, Any]] = [{"by": name, "features": REAL_FEATURES} for name in columns]
    real += [{"features": REAL_FEATURES, CENSUS: True}] if census else []
    if limits:
        return [
            {**case, "groups_explain": limit} for case in real for limit in dict.fromkeys(limits)
        ]
    return [
        *controlled,
        *real,
        *({**case, "shuffle_regions": True} for case in real if not case.get(CENSUS)),
    ]


def run(
    source: Path,
    out: Path,
    seeds: int = 3,
    first_seed: int = 0,
    *,
    groups_explain: Sequence[float] = (),
    census: Path | None = None,
    split: str = SPLITS[0],
    overwrite: bool = False,
    quiet: bool = True,
) -> dict[str, Any]:
    """Reweight the people of a one-day survey as `planned`, against those of `split`; write reweighting.json.

    A seed deals people to the regions of a partition, or halves them into those whose labels and those whose visits count.
    """
    check_survey(source, census=census)
    refuse_overlap(source, out)
    columns = region_columns(source)
    if not columns:
        raise MobatlasError(
            f"{source / 'people.parquet'}: has no column of regions, such as home_zone; add one"
        )
    if split not in SPLITS:
        raise MobatlasError(
            f"--split {split}: is not among those to compare with; give {' or '.join(SPLITS)}"
        )
    for limit in groups_explain:
        if not 0 < limit <= LIFTED:
            raise MobatlasError(
                f"--groups-explain {limit:g}: give a share of the variance above 0; 100 lifts the limit"
            )
    cases = planned(columns, groups_explain, census is not None)
    data, about_census = said_files(source, census)
    asked = [word for limit in groups_explain for word in ("--groups-explain", repr(limit))]
    asked += [] if about_census is None else ["--census", about_census]
    asked += [] if split == SPLITS[0] else ["--split", split]
    config = {
        "seeds": seeds,
        "first_seed": first_seed,
        "ridge": RIDGE,
        "prepare": DIARY,
        "asked": asked,
    }
    with (
        new_folder(out, "benchmark", seed=first_seed, config=config, overwrite=overwrite) as folder,
        track("reweighting", len(cases), quiet) as tracker,
    ):
        scratch = folder.scratch()
        prepare(source, scratch / "dataset", values=DIARY)
        dataset = TrajectoryDataset.open(scratch / "dataset")
        if dataset.groups is None or len(dataset.groups) < 2:
            raise MobatlasError(
                f"{source / 'people.parquet'}: all people are of one group; give people of several"
            )
        if census is not None:
            column = census_column(dataset, columns, census)
            cases = [{**case, "by": column} if case.get(CENSUS) else case for case in cases]
        seen, rows = behaviour(dataset), []
        for number, case in enumerate(cases):
            tracker.step(number, case_label(case))
            options = RegionsOptions(
                partition=case.get("partition"),
                by=case.get("by"),
                composition=census if case.get(CENSUS) else None,
                features=case.get("features"),
                shuffle_regions=case.get("shuffle_regions", False),
                straddle="uniform" if case.get(CENSUS) else "refuse",
            )
            limit, found = case.get("groups_explain", GROUPS_EXPLAIN), []
            for seed in range(first_seed, first_seed + seeds):
                regions = build_regions(
                    dataset.path, scratch / f"{number}-{seed}", options, seed=seed
                )
                if case.get(ALONE):
                    regions = replace(regions, population=None)
                found.append(
                    reweight(dataset, regions, seen=seen, split=split, groups_explain=limit)
                )
            rows.append(_row(case, found))
        command = [
            "python",
            "-m",
            "bench",
            "reweight",
            "--data",
            data,
            *asked,
            "--seeds",
            str(seeds),
            "--out",
            out.name,
        ]
        result = {
            "command": shlex.join(command),
            "seed": first_seed,
            "versions": library_versions(),
            "measure": f"JSD in bits against {split} people of the group, averaged over groups; gap closed towards labelled "
            "people",
            "rows": rows,
        }
        write_result(folder.path, "reweighting", result)
        tracker.step(len(cases), "done")
    return result


def case_label(case: Mapping[str, Any]) -> str:
    """What tells it from the others."""
    notes = {"shuffle_regions": " (shuffled)", ALONE: " (regions alone)", CENSUS: ", census"}
    name: str = case.get("partition") or case.get("by") or ""
    limit = f", limit {case['groups_explain']:g}" if "groups_explain" in case else ""
    return name + "".join(note for key, note in notes.items() if case.get(key)) + limit


def _row(case: dict[str, Any], found: list[dict[str, Any]]) -> dict[str, Any]:
    metrics: dict[str, Any] = {}
    for metric in METRICS:
        each = [one["metrics"][metric] for one in found]
        metrics[metric] = {
            kind: round(float(np.mean([one[kind] for one in each])), 4) for kind in each[0]
        }
        metrics[metric]["gap_closed_by_seed"] = [round(one["gap_closed"], 3) for one in each]
    size = round(float(np.mean([one["effective_sample_size"] for one in found])))
    return {**case, "seeds": len(found), "effective_sample_size": size} | metrics


@dataclass(frozen=True)
class Behaviour:
    """What each person does on average, as the metrics count it."""

    counts: dict[str, sparse.csr_array]  # metric -> (people, bins)

    def distribution(self, metric: str, people: Ints, weights: Floats | None = None) -> Floats:
        """Shares of the bins among weighted people."""
        each = np.full(len(people), 1 / len(people)) if weights is None else weights
        return np.asarray(normalise(self.counts[metric][people].T @ each))


def behaviour(dataset: TrajectoryDataset) -> Behaviour:
    """POI frequency without HOME, WORK and OTHER, travel distance, category and transitions of every person."""
    trajectories, people = Trajectories.of(dataset), dataset.people.num_rows

    def of_people(counts: sparse.csr_array) -> sparse.csr_array:
        return person_means(counts, dataset.person, people)

    maps = {
        name: build_feature(name, dataset.vocabulary, MASK if name == "poi" else ())
        for name in METRICS[::2]
    }
    maps["transitions"] = build_feature("transitions", dataset.vocabulary)
    counted = {name: of_people(feature.counts(trajectories)) for name, feature in maps.items()}
    km = travel_distance(trajectories, dataset.vocabulary)
    edges = np.linspace(0, np.quantile(km, DISTANCE_QUANTILE), DISTANCE_BINS + 1)[1:]
    where = (np.arange(len(km)), np.searchsorted(edges, km, side="right"))
    counted["travel_distance"] = of_people(
        sparse.csr_array((np.ones(len(km)), where), shape=(len(km), DISTANCE_BINS + 1))
    )
    return Behaviour(counted)


def reweight(
    dataset: TrajectoryDataset,
    regions: Regions,
    *,
    seen: Behaviour | None = None,
    split: str = "test",
    ridge: float = RIDGE,
    groups_explain: float = GROUPS_EXPLAIN,
) -> dict[str, Any]:
    """Recover group means, tilt training people to them, and compare with people of `split` by JSD in bits.

    Baseline are unweighted training people, labelled the training people of the group; gap closed is 1 - (tilted - labelled) /
    (baseline - labelled), of divergences averaged over groups. Labels serve to compare, and for nothing else.
    """
    seen = behaviour(dataset) if seen is None else seen
    train, others = (
        np.intersect1d(dataset.split_people(name), dataset.person) for name in ("train", split)
    )
    group = dataset.person_groups()
    recovered = recover(
        regions,
        options=RecoveryOptions(groups_explain=groups_explain),
        parents=dataset.vocabulary.parents,
        quiet=True,
    )
    phi = person_features(dataset, regions)[train]
    found = []
    for number, name in enumerate(regions.groups.names):
        theirs = others[group[others] == number]
        if not len(theirs):
            raise MobatlasError(
                f"{dataset.path}: nobody of group '{name}' in split '{split}' to compare with"
            )
        tilt = fit_tilt(phi, recovered.means[number], ridge)
        samples = {
            "tilted": (train, tilt.weights),
            "baseline": (train, None),
            "labelled": (train[group[train] == number], None),
        }
        row: dict[str, Any] = {"group": name, "effective_sample_size": tilt.effective_sample_size}
        for metric in METRICS:
            real = seen.distribution(metric, theirs)
            row[metric] = {
                kind: float(js(seen.distribution(metric, *sample), real))
                for kind, sample in samples.items()
            }
        found.append(row)
    metrics = {}
    for metric in METRICS:
        mean = {
            kind: float(np.mean([row[metric][kind] for row in found]))
            for kind in ("tilted", "baseline", "labelled")
        }
        gap = 1 - (mean["tilted"] - mean["labelled"]) / (mean["baseline"] - mean["labelled"])
        metrics[metric] = mean | {"gap_closed": gap}
    size = float(np.mean([row["effective_sample_size"] for row in found]))
    return {
        "metrics": metrics,
        "effective_sample_size": size,
        "groups": found,
        "variances": recovered.variances,
    }


def person_features(dataset: TrajectoryDataset, regions: Regions) -> sparse.csr_array:
    """phi of every person, in the bins of the aggregates."""
    trajectories = Trajectories.of(dataset)
    mask: Sequence[str] = regions.details.get("mask", ())
    maps = dict.fromkeys(name.partition(":")[0] for name in regions.aggregates.features)
    built = [build_feature(name, dataset.vocabulary, mask) for name in maps]
    counts = sparse.csr_array(
        sparse.hstack([feature.counts(trajectories) for feature in built], format="csr")
    )
    position = {
        name: number
        for number, name in enumerate(name for feature in built for name in feature.bins)
    }
    columns = [position[name] for name in regions.aggregates.features]
    return sparse.csr_array(
        person_means(counts, dataset.person, dataset.people.num_rows)[:, columns]
    )
