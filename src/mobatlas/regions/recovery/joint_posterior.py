"""The posterior of bins of a feature map from regions and direct evidence on groups together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from mobatlas.data.types import Floats, Ints
from mobatlas.regions.recovery.map_model import (
    REGIONS,
    ROUNDS,
    SURFACE_SD,
    MapFit,
    MapModel,
    Slopes,
    log_evidence,
)
from mobatlas.regions.recovery.posterior import (
    Posterior,
    contrast_variance,
    effective_information,
    log_covariance,
    mixture,
    normalised,
    shares_of_information,
    with_heavy_tails,
)
from mobatlas.regions.recovery.priors import (
    LEVEL,
    OTHER_BINS,
    average,
    maximise,
    root_of,
)
from mobatlas.regions.recovery.solver import (
    Modes,
    Observed,
    Rows,
    find_modes,
    information,
    link,
)

CONTEXT_SCALES = (1 / 4, 4.0)  # variants of the variance of contextual slopes
EVIDENCE_SD = 1.0  # prior standard deviation of logarithms that direct evidence revises
LEVEL_SD = {True: 0.1, False: 0.7}  # of the level of labelled people or a table; same population?
DISCREPANCY_SD = 0.15  # prior median of a table's discrepancy between groups
TABLE_LEVEL = 0.1  # share of a discrepancy's variance that all groups share


@dataclass(frozen=True)
class Revised:
    """Variances after direct evidence on groups."""

    own: Floats  # (factors,) of groups
    context: float  # standard deviation of contextual slopes, relative to the one without labels
    level: Floats  # (sources,) standard deviation of the level of each source of direct evidence
    discrepancy: Mapping[str, float]  # standard deviation of each table


class Joint:
    """Columns of groups, of regions if they are confounded, and of tables, with all rows."""

    def __init__(self, model: MapModel, slopes: Slopes) -> None:
        self.model = model
        self.slopes = slopes
        self.groups = len(model.population)
        self.tables = [each.name for each in model.direct if each.is_table]
        self.blocks = ["", *([REGIONS] if model.confounded else []), *self.tables]
        context = np.zeros_like(slopes.own) if slopes.context is None else slopes.context
        self.context = model.factors.covariance(context)
        parts = [
            (REGIONS, model.regions.shares),
            *((each.name, each.shares) for each in model.direct),
        ]
        surface = model.regions.surface
        covariates = surface.shape[1] + len(model.direct)
        shares = []
        columns = []
        self.kinds: dict[str, Ints] = {}  # the rows of each source
        first = 0
        for number, (name, p) in enumerate(parts):
            wide = np.zeros((len(p), self.groups * len(self.blocks)))
            wide[:, self.columns_of(name)] = p
            x = np.zeros((len(p), covariates))
            if number:
                x[:, surface.shape[1] + number - 1] = 1
            else:
                x[:, : surface.shape[1]] = surface
            shares.append(wide)
            columns.append(x)
            self.kinds[name] = np.arange(first, first + len(p))
            first += len(p)
        self.rows = Rows(np.vstack(shares), np.vstack(columns))

    def columns_of(self, name: str) -> slice:
        """The columns that rows of a source show."""
        block = self.blocks.index(name) if name in self.blocks else 0
        return slice(block * self.groups, (block + 1) * self.groups)

    def observed(self, bins: Ints) -> Observed:
        """All rows in some bins."""
        model = self.model
        regions = model.regions.select(bins)
        shown = model.factors.covariance(self.slopes.shown())
        weight = regions.weight(self.slopes.effect, shown)
        values = [regions.values, *(each.values[bins] for each in model.direct)]
        weights = [weight, *(each.weight[bins] for each in model.direct)]
        centre = [regions.centre if name == REGIONS else model.centre[bins] for name in self.blocks]
        return Observed(np.hstack(values), np.hstack(weights), np.hstack(centre))

    def root(self, revised: Revised, own: Floats | None = None, scale: float = 1.0) -> Floats:
        """R with R R' = K, for other variances of groups or another scale of contextual slopes."""
        model = self.model
        base = model.factors.covariance(revised.own if own is None else own) + LEVEL
        k = np.tile(base, (len(self.blocks),) * 2)
        for name in self.blocks[1:]:
            block = self.columns_of(name)
            k[block, block] += scale * self.confounder(name, revised)
        return root_of(k, np.sqrt(self.nuisance_variance(revised)))

    def confounder(self, name: str, revised: Revised) -> Floats:
        """The covariance of what a source shows beside group differences."""
        if name == REGIONS:
            return revised.context**2 * self.context
        return revised.discrepancy[name] ** 2 * (np.eye(self.groups) + TABLE_LEVEL)

    def nuisance_variance(self, revised: Revised) -> Floats:
        """Prior variances of the surface over the map and of levels."""
        surface = np.full(self.model.regions.surface.shape[1], SURFACE_SD)
        return np.concatenate([surface, revised.level]) ** 2

    def revise(self) -> tuple[Revised, float]:
        """Revise the variances by direct evidence, from what was assumed; and the evidence."""
        medians = np.concatenate(
            [
                np.log(self.slopes.own) / 2,
                np.zeros(int(self.model.confounded)),
                np.log([LEVEL_SD[each.same_population] for each in self.model.direct]),
                np.log([DISCREPANCY_SD] * len(self.tables)),
            ]
        )
        observed = self.observed(self.model.sample)
        x = medians
        best = (medians, -np.inf)
        for step in range(ROUNDS + 1):
            root = self.root(self.revised(x))
            modes = find_modes(self.rows, observed, root)
            penalty = 0.5 * (((x - medians) / EVIDENCE_SD) ** 2).sum()
            evidence = log_evidence(modes, root, observed, observed.weight) - float(penalty)
            if evidence > best[1]:
                best = (x, evidence)
            if step < ROUNDS:
                x = maximise(
                    modes, lambda each: self.root(self.revised(each)), x, medians, EVIDENCE_SD
                )
        return self.revised(best[0]), best[1]

    def revised(self, x: Floats) -> Revised:
        """Variances from a vector of logarithms."""
        sizes = [len(self.slopes.own), int(self.model.confounded), len(self.model.direct)]
        log_sd, context, level, tables = np.split(x, np.cumsum(sizes))
        return Revised(
            np.exp(2 * log_sd),
            float(np.exp(context[0])) if self.model.confounded else 0.0,
            np.exp(level),
            dict(zip(self.tables, np.exp(tables).tolist(), strict=True)),
        )


@dataclass(frozen=True)
class DirectFit:
    """Regions and direct evidence on groups, with the variances that they support together."""

    joint: Joint
    revised: Revised
    evidence: float

    @classmethod
    def of(cls, model: MapModel, slopes: Slopes) -> DirectFit:
        """Fit the variances."""
        joint = Joint(model, slopes)
        revised, evidence = joint.revise()
        return cls(joint, revised, evidence)

    @cached_property
    def context(self) -> Floats | None:
        """Variances of contextual slopes (factors,)."""
        slopes = self.joint.slopes
        return None if slopes.context is None else self.revised.context**2 * slopes.context

    def gain(self) -> float:
        """The log evidence that direct evidence adds to that of regions."""
        regions = Joint(replace(self.joint.model, direct=()), self.joint.slopes)
        return self.evidence - regions.revise()[1]

    def posterior(self, bins: Ints) -> tuple[Modes, Posterior, Floats, Floats]:
        """Modes, the posterior of linked log ratios, what regions show, and prior variances."""
        joint = self.joint
        revised = self.revised
        d = joint.groups
        variants = joint.model.factors.variants(revised.own)
        every = [own for own, _ in variants]
        counts = [count for _, count in variants]
        roots = [joint.root(revised, each) for each in every]
        if joint.model.confounded:
            roots += [joint.root(revised, scale=scale) for scale in CONTEXT_SCALES]
            counts += [OTHER_BINS] * len(CONTEXT_SCALES)
            every = every + [revised.own] * len(CONTEXT_SCALES)
        modes = find_modes(joint.rows, joint.observed(bins), roots[0])
        numbers, weights, parts = mixture(modes, roots, np.array(counts))
        posterior = average(weights, [(m[:, :d], c[:, :d, :d]) for m, c in parts])
        block = joint.columns_of(REGIONS)
        shown = np.einsum("jv,vjd->jd", weights, np.stack([m[:, block] for m, _ in parts]))
        covariances = [joint.model.factors.covariance(every[number]) for number in numbers]
        prior = weights @ contrast_variance(joint.model.population, np.stack(covariances))
        return modes, posterior, shown, prior

    def fit(self, bins: Ints, without: DirectFit | None, doubt: float) -> MapFit:
        """The posterior of a stratum, averaged with the one `without` composition."""
        model = self.joint.model
        modes, posterior, shown, prior = self.posterior(bins)
        informed = self._informed(bins, modes)
        variances = self.revised.own
        if without is not None:
            _, other, _, prior_without = without.posterior(bins)
            weights = np.tile([1 - doubt, doubt], (len(bins), 1))
            posterior = average(weights, [posterior, other])
            prior = (1 - doubt) * prior + doubt * prior_without
            variances = (1 - doubt) * variances + doubt * without.revised.own
            informed[REGIONS] = (1 - doubt) * informed[REGIONS]
        if not model.confounded:
            known = np.sum(list(informed.values()), axis=0)  # (bins, groups, groups)
            posterior = with_heavy_tails(model.population, posterior, known)
        own = model.factors.covariance(variances)
        total = variances if self.context is None else variances + self.context
        return MapFit(
            log_means=normalised(model, bins, posterior[0]),
            log_covariance=log_covariance(posterior),
            prior_variance=prior,
            region_ratio=np.exp(link(shown)),
            sources=shares_of_information(model.population, own + LEVEL, informed),
            variances={},
            group_share=np.full(len(bins), variances.sum() / max(total.sum(), 1e-300)),
        )

    def _informed(self, bins: Ints, modes: Modes) -> dict[str, Floats]:
        """The information of each source on differences between groups."""
        joint = self.joint
        observed = joint.observed(bins)
        nuisance = joint.nuisance_variance(self.revised)
        informed = {}
        for name, rows in joint.kinds.items():
            w = information(joint.rows.select(rows), observed.of_rows(rows), modes.mode)
            confounder = joint.confounder(name, self.revised) if name in joint.blocks else None
            informed[name] = effective_information(w, joint.columns_of(name), nuisance, confounder)
        return informed
