"""Evidence: the group means that regions identify, in the features of a dataset; reads no labels.

A REGIONS folder is matched with the training people of a dataset. The means of each group are
recovered from it with their uncertainty (regions.recovery). `Phi` is the feature vector phi(x).
`Moments` has the target means of phi, which groups are calibrated to, and measures distances from
them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import compress
from pathlib import Path
from typing import Self

import numpy as np
from scipy import optimize, sparse

from mobatlas.data.anchors import AnchorModel, Residents
from mobatlas.data.dataset import Trajectories, TrajectoryDataset
from mobatlas.data.types import Floats, Ints, Vocabulary
from mobatlas.errors import MobatlasError, listed, log, refuse_faults, suggestion
from mobatlas.features.divergences import js, normalise
from mobatlas.features.maps import FEATURES, FeatureMap, VisitsFeature, build_feature
from mobatlas.groups import Groups
from mobatlas.regions.aggregates import person_means
from mobatlas.regions.identifiability import Diagnosis
from mobatlas.regions.periods import compare_levels, same_level
from mobatlas.regions.recovery.composition_error import calibrate_composition
from mobatlas.regions.recovery.geography import confounding
from mobatlas.regions.recovery.recover import GROUPS_EXPLAIN, MOSTLY_PRIOR, RecoveryOptions, recover
from mobatlas.regions.store import RegionsFolder, region_of
from mobatlas.regions.types import (
    Population,
    Recovery,
    Regions,
    bins_by_map,
)

STEEPEST = 3.0  # tilt of the number of visits, per standard deviation
VISITS = "visits"


@dataclass(frozen=True)
class Phi:
    """The feature vector phi(x): chosen bins of one or more feature maps."""

    features: tuple[str, ...]  # `map:bin`
    mask: tuple[str, ...]
    maps: tuple[FeatureMap, ...]
    columns: Ints  # (features,) among the bins of all maps

    @classmethod
    def of(cls, features: Sequence[str], vocabulary: Vocabulary, mask: Sequence[str] = ()) -> Self:
        """Build phi from the names of its bins; bins that the vocabulary lacks are refused."""
        maps = tuple(build_feature(name, vocabulary, mask) for name in bins_by_map(features))
        bins = [name for each in maps for name in each.bins]
        position = {name: number for number, name in enumerate(bins)}
        for name in features:
            if name not in position:
                raise MobatlasError(
                    f"feature '{name}' is not in the vocabulary{suggestion(name, position)}"
                )
        columns = np.array([position[name] for name in features], dtype=np.int64)
        return cls(tuple(features), tuple(mask), maps, columns)

    @property
    def timed_maps(self) -> list[str]:
        """The feature maps that need arrival times, which few generators sample."""
        return [each.name for each in self.maps if FEATURES[each.name].needs_times]

    def counts(self, trajectories: Trajectories) -> sparse.csr_array:
        """phi of each trajectory, (trajectories, features)."""
        counts = sparse.hstack([each.counts(trajectories) for each in self.maps], format="csr")
        return sparse.csr_array(counts[:, self.columns])

    @property
    def visits(self) -> Floats:
        """The number of visits that each bin of the map `visits` stands for, else 0 (features,)."""
        prefix = f"{VISITS}:"
        least = (name.removeprefix(prefix).rstrip("+").partition("-")[0] for name in self.features)
        pairs = zip(self.features, least, strict=True)
        return np.array([float(low) if name.startswith(prefix) else 0.0 for name, low in pairs])


@dataclass(frozen=True)
class Moments:
    """The target means of each group and the anchors of the population, for calibration."""

    source: Path  # the folder or file that they come from
    groups: Groups
    phi: Phi
    means: Floats  # (groups, features)
    baseline: Floats  # (features,) of the whole population
    people: int  # that it was estimated from
    anchors: Floats  # (rows, 4) of a synthetic population
    residence: Floats | None = None  # (rows, groups) p(d | home region); None: not used

    @property
    def scale(self) -> Floats:
        """sqrt(mu0) (features,), in which counts are about equally noisy."""
        return np.sqrt(np.maximum(self.baseline, 1 / max(self.people, 1)))

    def distance(self, means: Floats, target: Floats) -> dict[str, float]:
        """Distances between two means of phi.

        "scaled" is the norm in scaled coordinates; "js" is the JSD in bits of the shares within
        each map, averaged over maps.
        """
        pairs = ((np.maximum(means[part], 0), target[part]) for part in self._map_bins)
        return {
            "scaled": float(np.linalg.norm((means - target) / self.scale, axis=-1)),
            "js": float(np.mean([js(normalise(one), normalise(other)) for one, other in pairs])),
        }

    @cached_property
    def _map_bins(self) -> list[Ints]:
        return list(bins_by_map(self.phi.features).values())

    def without_times(self, vocabulary: Vocabulary) -> Self:
        """The moments of samples without arrival times."""
        timed = self.phi.timed_maps
        if {each.name for each in self.phi.maps} <= {*timed, VISITS}:
            raise MobatlasError(
                f"{self.source}: '{' and '.join(timed)}' is the only feature, and samples of this "
                "model have no times; add another feature"
            )
        timeless = [name.partition(":")[0] not in timed for name in self.phi.features]
        phi = Phi.of(list(compress(self.phi.features, timeless)), vocabulary, self.phi.mask)
        return replace(
            self, phi=phi, means=self.means[:, timeless], baseline=self.baseline[timeless]
        )


@dataclass(frozen=True)
class Visits:
    """Visits per trajectory: the population's distribution, tilted to the mean of each group.

    Mean counts alone do not fix the spread of their sum. Tilts to them prefer unusual trajectories
    with very many or very few visits.
    """

    phi: Phi  # features of the aggregates, then bins of the number of visits
    means: Floats  # (groups, bins), rows sum to 1
    baseline: Floats  # (bins,) of the population


def labelled_moments(
    dataset: TrajectoryDataset, features: Sequence[str], mask: Sequence[str] = ()
) -> Moments:
    """The means of labelled training people, which calibrate the labelled upper bound.

    `features` are names of feature maps; the number of visits is kept in any case. A group without
    people has the mean of the population.
    """
    groups = dataset.groups
    assert groups is not None  # the strategy has checked it
    maps = [
        build_feature(name, dataset.vocabulary, mask) for name in dict.fromkeys([*features, VISITS])
    ]
    phi = Phi.of([name for each in maps for name in each.bins], dataset.vocabulary, mask)
    indices = dataset.split("train")
    people, row = np.unique(dataset.person[indices], return_inverse=True)
    counts = person_means(phi.counts(Trajectories.of(dataset, indices)), row, len(people))
    group = dataset.person_groups()[people]
    baseline = np.asarray(counts.mean(0)).ravel()
    members = [counts[np.flatnonzero(group == number)] for number in range(len(groups))]
    means = [np.asarray(each.mean(0)).ravel() if each.shape[0] else baseline for each in members]
    everyone = dataset.anchors[dataset.split_people("train")]
    anchors = AnchorModel.fit(everyone).population().anchors
    return Moments(dataset.path, groups, phi, np.stack(means), baseline, len(everyone), anchors)


def tilt_to_mean(weights: Floats, number: Floats, level: float) -> Floats:
    """Weights times exp(b number) such that the mean number becomes `level` times its value."""
    mean = float(weights @ number)
    spread = float(np.sqrt(weights @ (number - mean) ** 2)) or 1.0

    def tilt(b: float) -> Floats:
        logits = b * (number - mean) / spread
        changed = weights * np.exp(logits - logits.max())
        return np.asarray(changed / changed.sum())

    def missing(b: float) -> float:
        return float(tilt(b) @ number) - level * mean

    if missing(-STEEPEST) >= 0:  # the target is out of reach
        return tilt(-STEEPEST)
    if missing(STEEPEST) <= 0:
        return tilt(STEEPEST)
    return tilt(optimize.brentq(missing, -STEEPEST, STEEPEST))


@dataclass(frozen=True)
class Evidence:
    """Regions, the group means recovered from them, and the training people they describe."""

    folder: RegionsFolder
    regions: Regions  # of the folder, without features that every region suppresses
    phi: Phi
    recovery: Recovery
    visits: Visits | None  # None if the regions have this feature, or if it is left free
    people: Ints  # (people,) training people with windows, as rows of the dataset's people
    anchors: Floats  # (people, 4)
    region: Ints | None  # (people,) number of the region, -1: none; None: no assignment
    warnings: tuple[str, ...]

    @property
    def source(self) -> Path:
        return self.folder.path

    @property
    def groups(self) -> Groups:
        return self.regions.groups

    @property
    def means(self) -> Floats:
        """The means that samples of each group aim at (groups, features)."""
        return self.recovery.aims

    @cached_property
    def moments(self) -> Moments:
        """The targets of tilts: estimated means and the number of visits."""
        if self.visits is None:
            return self.aggregate_moments
        return replace(
            self.aggregate_moments,
            phi=self.visits.phi,
            means=np.hstack([self.means, self.visits.means]),
            baseline=np.concatenate([self.recovery.baseline, self.visits.baseline]),
        )

    @cached_property
    def aggregate_moments(self) -> Moments:
        """The moments of the features that the aggregates hold."""
        return Moments(
            self.source,
            self.groups,
            self.phi,
            self.means,
            self.recovery.baseline,
            len(self.anchors),
            self.population.anchors,
        )

    @cached_property
    def anchor_model(self) -> AnchorModel:
        """The distribution of synthetic homes and workplaces, by region where people have one."""
        return AnchorModel.fit(self.anchors, self.region, self.regions.composition.regions)

    @cached_property
    def population(self) -> Residents:
        """Synthetic people, as the MODEL folder has them."""
        return self.anchor_model.population()

    def moments_by(self, membership: bool) -> Moments:
        """The moments; with `membership` they include p(d | home region) of synthetic people."""
        if not membership:
            return self.moments
        return replace(self.moments, residence=self.membership(self.population.region))

    def information(self) -> dict[str, float]:
        """Per group, the share of prior variance that the regions removed: 0 is all prior."""
        return dict(zip(self.groups.names, self.recovery.information().tolist(), strict=True))

    def membership(self, region: Ints | None = None) -> Floats:
        """p(d|g) of each training person's region, (people, groups); the mean where unknown.

        Or that of other numbers of regions (rows,).
        """
        if self.region is None:
            raise MobatlasError(
                f"--membership: {self.source} does not assign people to regions; leave it out"
            )
        return residence_shares(
            shrunk_shares(self.regions), self.region if region is None else region
        )


def describe_informed(shares: Mapping[str, float]) -> str:
    """What the evidence informs and what it does not, in words; see `Evidence.informed`."""

    texts = {name: f"{name} ({share:.0%})" for name, share in shares.items()}
    informed = [texts[name] for name, share in shares.items() if share >= MOSTLY_PRIOR]
    vague = [texts[name] for name, share in shares.items() if not share >= MOSTLY_PRIOR]
    sentences = (
        f"The evidence informs {listed(informed)}." if informed else "",
        f"It says little about {listed(vague)}." if vague else "",
        "For all other behaviour samples show the average of the population.",
    )
    return " ".join(filter(None, sentences))


def shrunk_shares(regions: Regions) -> Floats:
    """p(d|g) (regions, groups); counted shares of few people are shrunk to the overall shares."""
    composition = regions.composition
    exact = regions.randomised
    return np.maximum(composition.shares if exact else calibrate_composition(composition)[0], 0)


def residence_shares(shares: Floats, region: Ints) -> Floats:
    """Shares (regions, groups) of each person's region (people,); for -1 the mean over people."""
    people = np.bincount(region[region >= 0], minlength=len(shares))
    mean = people @ shares / max(people.sum(), 1) if people.any() else shares.mean(0)
    return np.asarray(np.vstack([shares, mean])[region])


def gather_evidence(
    dataset: TrajectoryDataset,
    regions_folder: RegionsFolder | Path | str,
    *,
    visits: bool = True,
    groups_explain: float = GROUPS_EXPLAIN,
) -> Evidence:
    """Read a REGIONS folder for phase 2 on this dataset.

    Limits of the evidence are logged; unusable evidence is refused. With `visits`, tilts also keep
    the spread of the number of visits, see `Visits`. For `groups_explain` see `recover`.
    """
    folder = RegionsFolder.open(regions_folder)
    _check_regions(folder.path, folder.regions)
    known = np.flatnonzero(~np.isnan(folder.regions.aggregates.values).all(0))
    regions, warnings = _without_suppressed(folder.regions, known)
    phi, dataset_warnings = _build_phi(dataset, folder, regions)
    people = np.intersect1d(dataset.split_people("train"), dataset.person)
    indices = dataset.split("train")
    trajectories = Trajectories.of(dataset, indices)
    row = np.searchsorted(people, dataset.person[indices])  # (trajectories,) rows of people
    counts = person_means(phi.counts(trajectories), row, len(people))
    training_mean = np.asarray(counts.mean(0)).ravel()
    regions = _with_known_mean(regions, training_mean, len(people))
    # Quiet: the warnings of the recovery are among those below.
    recovery = recover(
        regions,
        options=RecoveryOptions(groups_explain=groups_explain),
        parents=dataset.vocabulary.parents,
        quiet=True,
    )
    if regions.aggregates.pooled:
        recovery = _as_counts(recovery, training_mean)
    warnings += dataset_warnings + _recovery_warnings(folder.diagnosis, recovery, training_mean)
    for sentence in warnings:
        log.warning("%s: %s", folder.path, sentence)
    weights = 1 / np.bincount(row)[row]  # people have equal weight
    return Evidence(
        folder=folder,
        regions=regions,
        phi=phi,
        recovery=recovery,
        visits=_visits(phi, recovery, trajectories, weights, dataset.vocabulary)
        if visits
        else None,
        people=people,
        anchors=dataset.anchors[people],
        region=region_of(dataset, people, folder.assignment, regions.composition.regions),
        warnings=tuple(warnings),
    )


def _check_regions(folder: Path, regions: Regions) -> None:
    values = regions.aggregates.values
    refuse_faults(
        {
            f"{folder}: every value of the aggregates is suppressed; use other ones": (
                np.isnan(values).all()
            ),
            f"{folder}: every value of the aggregates is zero; create the regions again with "
            "`mobatlas regions`": not np.nan_to_num(values).any(),
        }
    )
    regions.composition.refuse_small_groups(folder)


def _without_suppressed(regions: Regions, known: Ints) -> tuple[Regions, list[str]]:
    """Drop features that every region suppresses, with a warning."""
    hidden = len(regions.aggregates.features) - len(known)
    if not hidden:
        return regions, []
    population = regions.population
    visible = replace(
        regions,
        aggregates=regions.aggregates.select_features(known),
        population=population and replace(population, values=population.values[known]),
    )
    return visible, [f"{hidden} features are suppressed in every region and left out"]


def _build_phi(
    dataset: TrajectoryDataset, folder: RegionsFolder, regions: Regions
) -> tuple[Phi, list[str]]:
    """phi in the vocabulary of the dataset.

    Regions of another dataset are accepted, with a warning, if they have exactly the same bins.
    """
    details = regions.details
    again = "create it again with `mobatlas regions`"
    try:
        phi = Phi.of(regions.aggregates.features, dataset.vocabulary, details.get("mask", ()))
    except MobatlasError as error:
        raise MobatlasError(
            f"{folder.path}: these regions belong to another dataset than {dataset.path} "
            f"({error}); {again}"
        ) from None
    if details.get("dataset", {}).get("content_hash") == dataset.manifest.content_hash:
        return phi, []
    all_bins = {name for each in phi.maps for name in each.bins}
    if details.get("source") != "tables" and all_bins != set(folder.regions.aggregates.features):
        raise MobatlasError(
            f"{folder.path}: these regions belong to another dataset than {dataset.path}, with "
            f"other places; {again}"
        )
    return phi, [
        f"these regions belong to another dataset than {dataset.path}; people are matched by "
        "user_id"
    ]


def _visits(
    phi: Phi,
    recovery: Recovery,
    trajectories: Trajectories,
    weights: Floats,
    vocabulary: Vocabulary,
) -> Visits | None:
    """The number of visits in each group; its mean scales with the group's total count."""
    if any(each.name == VISITS for each in phi.maps):
        return None
    feature = build_feature(VISITS, vocabulary, phi.mask)
    assert isinstance(feature, VisitsFeature)
    counts = feature.counts(trajectories)  # (trajectories, bins)
    weights = weights / weights.sum()
    first = np.array([name.startswith(f"{phi.maps[0].name}:") for name in phi.features])
    # (groups,)
    level = recovery.means[:, first].sum(1) / max(recovery.baseline[first].sum(), 1e-300)
    number, example, which = np.unique(
        feature.visit_counts(trajectories), return_index=True, return_inverse=True
    )
    share = np.bincount(which, weights).astype(np.float64)  # (numbers,): they are few
    means = [tilt_to_mean(share, number.astype(float), each) @ counts[example] for each in level]
    return Visits(
        phi=Phi.of((*phi.features, *feature.bins), vocabulary, phi.mask),
        means=np.stack(means),
        baseline=counts.T @ weights,
    )


def _as_counts(recovery: Recovery, training_mean: Floats) -> Recovery:
    """Turn shares into counts, as if every group had as many visits as training people."""
    names = np.array([name.partition(":")[0] for name in recovery.features])
    level = np.ones(len(names))  # (features,)
    for name in np.unique(names):
        total = max(recovery.baseline[names == name].sum(), 1e-300)
        level[names == name] = training_mean[names == name].sum() / total
    return replace(
        recovery,
        means=recovery.means * level,
        targets=recovery.aims * level,
        resolution=None if recovery.resolution is None else recovery.resolution * level,
        baseline=recovery.baseline * level,
    )


def _with_known_mean(regions: Regions, mean: Floats, n: int) -> Regions:
    """If aggregates are noisy, take the mean of the population from the trajectories."""
    v = regions.aggregates
    if v.noise is None or v.pooled or regions.population is not None:
        return regions
    weight = v.n / v.n.sum()
    published = float((weight @ np.nan_to_num(v.values)).sum())
    if not same_level(published, float(mean.sum())):  # the windows differ, and a warning is logged
        return regions
    population = Population(weight @ regions.composition.shares, mean, float(n))
    return replace(regions, population=population)


def _recovery_warnings(
    diagnosis: Diagnosis, recovery: Recovery, training_mean: Floats
) -> list[str]:
    unidentified = [
        each.sentence()
        for each in diagnosis.contrasts
        if each.kind == "attribute" and not each.identified
    ]
    return [
        *diagnosis.warnings,
        *unidentified,
        *confounding(recovery),
        *recovery.notes,
        *compare_levels(float(recovery.baseline.sum()), float(training_mean.sum())),
    ]
