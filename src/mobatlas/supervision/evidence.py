"""Evidence: what regions tell about groups, counted as the dataset counts, and how sure it is; no label is read here."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
from scipy import optimize

from mobatlas.data.arrays import Floats
from mobatlas.data.dataset import TrajectoryDataset
from mobatlas.data.trajectories import Trajectories
from mobatlas.data.vocabulary import Vocabulary
from mobatlas.errors import MobatlasError
from mobatlas.features.maps import VisitsFeature, build_feature
from mobatlas.groups import Groups
from mobatlas.regions.aggregates import compare_levels, person_means, same_level
from mobatlas.regions.identifiability import Diagnosis
from mobatlas.regions.recovery.posterior import calibrate_composition
from mobatlas.regions.recovery.recover import GROUPS_EXPLAIN, MOSTLY_PRIOR, RecoveryOptions, recover
from mobatlas.regions.recovery.transfer import confounding
from mobatlas.regions.store import RegionsFolder
from mobatlas.regions.types import Aggregates, Population, Recovery, Regions, blocks
from mobatlas.supervision.moments import VISITS, Ints, Moments, Phi

log = logging.getLogger("mobatlas")
NAMED = 20  # groups in a sentence, at most
STEEPEST = 3.0  # of the tilt of the number of visits, in standard deviations


@dataclass(frozen=True)
class Visits:
    """How many visits trajectories have: the population's distribution, tilted to each group's mean and no further.

    Mean counts alone leave the spread of their sum free, and tilts to them take the more unusual trajectories: many days of
    many visits, many of few.
    """

    phi: Phi
    means: Floats  # (groups, bins), rows sum to 1
    baseline: Floats  # (bins,) of the population


@dataclass(frozen=True)
class Evidence:
    """Regions, the group means recovered from them, and the training people they are about."""

    source: Path
    content_hash: str  # of the folder
    regions: Regions
    phi: Phi
    recovery: Recovery
    validation: Aggregates | None  # V of validation people, where some are known
    training_mean: Floats  # (features,) of phi over training people
    visits: Visits | None  # None where the regions themselves tell it, or where it is left open
    people: Ints  # (people,) training people who have windows, as rows of the dataset's people
    anchors: Floats  # (people, 4)
    region: Ints | None  # (people,) number of the region, -1: none; None where no people are known
    warnings: tuple[str, ...]

    @property
    def groups(self) -> Groups:
        return self.regions.groups

    @property
    def means(self) -> Floats:
        """What each group should do, as far as the regions tell it (groups, features)."""
        return self.recovery.means

    @cached_property
    def moments(self) -> Moments:
        """What tilts meet: what the regions tell, and how many visits; people in an order that says nothing of who is who."""
        order = np.lexsort(self.anchors.T)
        phi, means, baseline = self.phi, self.means, self.recovery.baseline
        if self.visits is not None:
            phi = phi.joined(self.visits.phi)
            means, baseline = (
                np.hstack([means, self.visits.means]),
                np.concatenate([baseline, self.visits.baseline]),
            )
        return Moments(self.source, self.groups, phi, means, baseline, self.anchors[order])

    def moments_by(self, membership: bool) -> Moments:
        """The moments; with `membership` a group lives where its regions are."""
        order = np.lexsort(self.anchors.T)
        return replace(self.moments, lives=self.membership()[order]) if membership else self.moments

    @cached_property
    def told(self) -> Moments:
        """The moments without what the regions do not tell."""
        return replace(
            self.moments, phi=self.phi, means=self.means, baseline=self.recovery.baseline
        )

    def information(self) -> dict[str, float]:
        """Per group the share of prior variance that the regions removed: 0 is all prior, 1 is all data."""
        return dict(zip(self.groups.names, self.recovery.information().tolist(), strict=True))

    def anchors_of(self, region: str) -> Floats:
        """Where training people of a region live and work, (people, 4); of all of them where no assignment is known."""
        if self.region is None:
            return self.anchors
        return self.anchors[self.region == self.regions.composition.regions.index(region)]

    def membership(self) -> Floats:
        """p(d|g) of the region that each training person lives in, (people, groups); where it is unknown that of all others."""
        if self.region is None:
            raise MobatlasError(
                f"--membership: {self.source} does not say who lives in which region; leave it out"
            )
        return lives_by(self.believed_shares, self.region)

    @property
    def believed_shares(self) -> Floats:
        return believed_shares(self.regions)

    def against_validation(self, means: Floats) -> dict[str, float] | None:
        """P M (groups, features) against V of validation people, averaged over people; None where there is no such V."""
        seen = self.validation
        if seen is None:
            return None
        place = {name: number for number, name in enumerate(self.regions.composition.regions)}
        shares = self.regions.composition.shares[
            [place[name] for name in seen.regions]
        ]  # (regions, groups)
        found = [
            self.told.distances(shares[some] @ means, seen.values[some])
            for some in blocks(*seen.values.shape)
        ]
        return {
            kind: float(seen.n @ np.hstack([each[kind] for each in found]) / seen.n.sum())
            for kind in found[0]
        }


def believed_shares(regions: Regions) -> Floats:
    """p(d|g) (regions, groups), counted shares of few people drawn to those of all regions."""
    composition = regions.composition
    return np.maximum(
        composition.shares if regions.randomised else calibrate_composition(composition)[0], 0
    )


def lives_by(shares: Floats, region: Ints) -> Floats:
    """Rows of shares (regions, groups) by the number of a region (people,), -1 being none: the mean of all who have one."""
    there = np.bincount(region[region >= 0], minlength=len(shares))
    mean = there @ shares / max(there.sum(), 1) if there.any() else shares.mean(0)
    return np.asarray(np.vstack([shares, mean])[region])


def of_group(lives: Floats | None, group: int) -> Floats | None:
    """The column of a group."""
    return None if lives is None else lives[:, group]


def gather_evidence(
    dataset: TrajectoryDataset,
    regions_folder: RegionsFolder | Path | str,
    *,
    visits: bool = True,
    groups_explain: float = GROUPS_EXPLAIN,
) -> Evidence:
    """Read a REGIONS folder for phase 2 on this dataset; what it cannot tell is logged, what cannot be used is refused.

    With `visits` tilts also keep the spread of the number of visits, see `Visits`; `groups_explain` is of `recover`.
    """
    folder = RegionsFolder.open(regions_folder)
    regions = folder.regions
    _refuse_unusable(folder.path, regions)
    known = np.flatnonzero(~np.isnan(regions.aggregates.values).all(0))
    warnings = []
    if len(known) < len(regions.aggregates.features):
        hidden = len(regions.aggregates.features) - len(known)
        warnings.append(f"{hidden} features are suppressed in every region and left out")
        regions = _columns(regions, known)
    phi, of_others = _matched_phi(dataset, folder, regions)
    warnings += of_others
    people = np.intersect1d(dataset.split_people("train"), dataset.person)
    indices = dataset.split("train")
    trajectories = Trajectories.of(dataset, indices)
    row = np.searchsorted(people, dataset.person[indices])  # (trajectories,) places in people
    training_mean = np.asarray(
        person_means(phi.counts(trajectories), row, len(people)).mean(0)
    ).ravel()
    regions = _with_known_mean(regions, training_mean, len(people))
    # What recovery has to say is among the warnings.
    recovery = recover(
        regions,
        options=RecoveryOptions(groups_explain=groups_explain),
        parents=dataset.vocabulary.parents,
        quiet=True,
    )
    if regions.aggregates.pooled:
        recovery = _as_counts(recovery, training_mean)
    warnings += _warnings(folder.diagnosis, recovery, training_mean)
    for sentence in warnings:
        log.warning("%s: %s", folder.path, sentence)
    validation = folder.validation
    return Evidence(
        source=folder.path,
        content_hash=folder.content_hash,
        regions=regions,
        phi=phi,
        recovery=recovery,
        # Of shares without device counts there is no validation twin: they come with published tables.
        validation=None if validation is None else validation.select_features(known),
        training_mean=training_mean,
        visits=_visits(phi, recovery, trajectories, 1 / np.bincount(row)[row], dataset.vocabulary)
        if visits
        else None,
        people=people,
        anchors=dataset.anchors[people],
        region=region_of(dataset, people, folder.assignment, regions.composition.regions),
        warnings=tuple(warnings),
    )


def _refuse_unusable(folder: Path, regions: Regions) -> None:
    values, shares = regions.aggregates.values, regions.composition.shares
    if np.isnan(values).all():
        raise MobatlasError(
            f"{folder}: every value of the aggregates is suppressed; there is nothing to learn from"
        )
    if not ((values != 0) & ~np.isnan(values)).any():
        raise MobatlasError(
            f"{folder}: every value of the aggregates is zero; there is nothing to learn from, make them anew"
        )
    never = [
        name
        for name, total in zip(regions.groups.names, shares.sum(0), strict=True)
        if not total > 0
    ]
    if never:
        raise MobatlasError(
            f"{folder}: no region has anybody of group '{never[0]}'; merge it with another group or add regions where it lives"
        )


def _matched_phi(
    dataset: TrajectoryDataset, folder: RegionsFolder, regions: Regions
) -> tuple[Phi, list[str]]:
    """phi in the words of the dataset; regions of another dataset pass, with a warning, if they count the very same bins."""
    features, details = regions.aggregates.features, regions.details
    try:
        phi = Phi.of(features, dataset.vocabulary, details.get("mask", ()))
    except MobatlasError as error:
        raise MobatlasError(
            f"{folder.path}: was made of another dataset than {dataset.path} ({error}); make the regions of this one"
        ) from None
    if details.get("dataset", {}).get("content_hash") == dataset.manifest.content_hash:
        return phi, []
    all_bins = {name for each in phi.maps for name in each.bins}
    if details.get("source") != "tables" and all_bins != set(folder.regions.aggregates.features):
        raise MobatlasError(
            f"{folder.path}: was made of another dataset than {dataset.path}, whose places are others; make the regions of this one"
        )
    return phi, [f"was made of another dataset than {dataset.path}; people are matched by user_id"]


def _visits(
    phi: Phi,
    recovery: Recovery,
    trajectories: Trajectories,
    weights: Floats,
    vocabulary: Vocabulary,
) -> Visits | None:
    """From training trajectories, weighed so that people count alike; a group's mean is to theirs as its counts are."""
    if any(each.name == VISITS for each in phi.maps):
        return None
    feature = build_feature(VISITS, vocabulary, phi.mask)
    counts = feature.counts(trajectories)  # (trajectories, bins)
    assert isinstance(feature, VisitsFeature)
    weights = weights / weights.sum()
    first = np.array([name.startswith(f"{phi.maps[0].name}:") for name in phi.features])
    level = recovery.means[:, first].sum(1) / max(
        recovery.baseline[first].sum(), 1e-300
    )  # (groups,)
    number, where, which = np.unique(
        feature.visit_counts(trajectories), return_index=True, return_inverse=True
    )
    share = np.bincount(which, weights).astype(np.float64)  # (numbers,): they are few
    means = [_tilted_to(share, number.astype(np.float64), each) @ counts[where] for each in level]
    return Visits(Phi.of(feature.bins, vocabulary, phi.mask), np.stack(means), counts.T @ weights)


def _tilted_to(weights: Floats, number: Floats, level: float) -> Floats:
    """Weights times exp(b number), so that their mean number is `level` times what it was."""
    mean = float(weights @ number)
    span = float(np.sqrt(weights @ (number - mean) ** 2)) or 1.0

    def tilted(b: float) -> Floats:
        logits = b * (number - mean) / span
        changed = weights * np.exp(logits - logits.max())
        return np.asarray(changed / changed.sum())

    def missing(b: float) -> float:
        return float(tilted(b) @ number) - level * mean

    low, high = -STEEPEST, STEEPEST
    if missing(low) >= 0 or missing(high) <= 0:  # further than people go at all
        return tilted(low if missing(low) >= 0 else high)
    return tilted(optimize.brentq(missing, low, high))


def _as_counts(recovery: Recovery, training_mean: Floats) -> Recovery:
    """Shares as counts, as if every group went out as much as training people do: nothing published says otherwise."""
    names = np.array([name.partition(":")[0] for name in recovery.features])
    level = np.ones(len(names))  # (features,)
    for name in np.unique(names):
        level[names == name] = training_mean[names == name].sum() / max(
            recovery.baseline[names == name].sum(), 1e-300
        )
    return replace(
        recovery,
        means=recovery.means * level,
        covariance=recovery.covariance * (level**2)[:, None, None],
        prior_variance=recovery.prior_variance * level**2,
        baseline=recovery.baseline * level,
    )


def _with_known_mean(regions: Regions, mean: Floats, n: int) -> Regions:
    """Where noise was added to aggregates, what everybody does on average is better known from the trajectories."""
    v = regions.aggregates
    if v.noise is None or v.pooled or regions.population is not None:
        return regions
    weight = v.n / v.n.sum()
    published = float((weight @ np.nan_to_num(v.values)).sum())
    if not same_level(published, float(mean.sum())):  # windows are not alike, which is said
        return regions
    return replace(
        regions, population=Population(weight @ regions.composition.shares, mean, float(n))
    )


def _warnings(diagnosis: Diagnosis, recovery: Recovery, training_mean: Floats) -> list[str]:
    said = list(diagnosis.warnings)
    said += [
        each.sentence()
        for each in diagnosis.contrasts
        if each.kind == "attribute" and not each.identified
    ]
    told = zip(recovery.groups.names, recovery.information().tolist(), strict=True)
    vague = [f"{name} ({share:.0%})" for name, share in told if share < MOSTLY_PRIOR]
    if vague:
        named = (
            vague if len(vague) <= NAMED else [*vague[:NAMED], f"{len(vague) - NAMED} groups more"]
        )
        said.append(
            f"mostly prior, and so near the population, is what the regions tell of {'; '.join(named)}"
        )
    said += confounding(recovery)
    return said + compare_levels(float(recovery.baseline.sum()), float(training_mean.sum()))


def region_of(
    dataset: TrajectoryDataset,
    people: Ints,
    assignment: dict[str, str] | None,
    regions: Sequence[str],
) -> Ints | None:
    """The number of the region of each person, -1 where it is none of these; None where nobody's is known."""
    if assignment is None:
        return None
    users, place = (
        dataset.people["user_id"].to_pylist(),
        {name: number for number, name in enumerate(regions)},
    )
    found = [place.get(assignment.get(users[person], ""), -1) for person in people.tolist()]
    return np.array(found, dtype=np.int64)


def _columns(regions: Regions, keep: Ints) -> Regions:
    population = regions.population
    return replace(
        regions,
        aggregates=regions.aggregates.select_features(keep),
        population=None
        if population is None
        else replace(population, values=population.values[keep]),
    )
