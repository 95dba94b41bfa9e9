"""Priors of log ratios between groups, and their variances, chosen by the evidence.

The log ratio of group d to the population in bin j is

    b_dj = level_j + sum_a B_a[level of d in attribute a] + e_dj
    B_a ~ N(0, s_a^2),  e_dj ~ N(0, s_0^2)

Real regions also differ because of where they are: their rows show b + c with contextual slopes c.
Published tables show b + t with discrepancies t. The standard deviations maximise Laplace's
evidence, which is the likelihood of each region given the regions before it. Bins of similar
frequency then choose among variants of the prior, and estimates average over the variants.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
from scipy import optimize, special

from mobatlas.data.types import Floats, Ints
from mobatlas.groups import Groups
from mobatlas.regions.recovery.solver import Modes

LEVEL = 1.0  # prior variance of the level of a bin, which all groups share
OWN_SD = 0.5  # prior median of s_0
ATTRIBUTE_SD = 0.2  # prior median of s_a
LOG_SD = 1.5  # prior standard deviation of their logarithms
ATTRIBUTES_SHARE = 0.8  # of differences between real groups, which attributes explain together
JITTER = 1e-8
SCALES = (1 / 16, 1 / 4, 1.0, 4.0, 16.0)  # of all variances between groups
DOMINANT = 0.8  # of the variance, in variants where one factor dominates
CONCENTRATION = 4.0  # prior bins with the variances of all bins together
RAISED = 0.16  # of one variance: twice the prior median of an attribute's standard deviation
RAISED_BINS = 1.0  # prior bins with each variance raised
OTHER_BINS = 0.25  # prior bins with each other variant
OFFSETS = np.arange(-1.5, 1.6, 0.5)  # of a logarithm, where its posterior is evaluated
EM_STEPS = 60


@dataclass(frozen=True)
class GroupFactors:
    """The structure of differences between groups: [same level] of attributes, and identity."""

    names: tuple[str, ...]
    matrices: Floats  # (factors, groups, groups); the last is the identity

    @classmethod
    def of(cls, groups: Groups) -> Self:
        """Attributes that several groups share, and each group for itself."""
        names = []
        matrices = []
        for number, name in enumerate(groups.attribute_names):
            same = groups.level_codes[:, [number]] == groups.level_codes[:, number]
            if not same.all() and same.sum() > len(groups):
                names.append(name)
                matrices.append(same.astype(np.float64))
        return cls((*names, "group"), np.stack([*matrices, np.eye(len(groups))]))

    def covariance(self, variances: Floats) -> Floats:
        """K (groups, groups) of variances (factors,)."""
        return np.asarray(np.tensordot(variances, self.matrices, 1))

    def prior_log_sd(self) -> Floats:
        """Prior medians of the logarithms of standard deviations (factors,)."""
        return np.log([ATTRIBUTE_SD] * (len(self.names) - 1) + [OWN_SD])

    def usual_shares(self) -> Floats:
        """Shares of factors in differences between real groups: attributes matter most."""
        attributes = len(self.names) - 1
        if not attributes:
            return np.ones(1)
        return np.append(np.full(attributes, ATTRIBUTES_SHARE / attributes), 1 - ATTRIBUTES_SHARE)

    def variants(self, variances: Floats, *, raised: bool = True) -> list[tuple[Floats, float]]:
        """The fitted variances first, then variants, all with their prior counts of bins.

        All factors have another scale, or another factor dominates. Single factors are `raised`
        if one that evidence hardly shows may still matter in some bins.
        """
        total = variances.sum()
        factors = np.eye(len(variances))
        shapes = [variances]
        single = []
        if len(factors) > 1:
            rest = (1 - DOMINANT) / (len(factors) - 1)
            shapes += [total * (rest + (DOMINANT - rest) * factor) for factor in factors]
            single = [(variances + RAISED * factor, RAISED_BINS) for factor in factors if raised]
        scaled = [
            (scale * shape, OTHER_BINS)
            for scale in SCALES
            for number, shape in enumerate(shapes)
            if scale != 1 or number
        ]
        return [(variances, CONCENTRATION), *single, *scaled]


def root_of(covariance: Floats, covariate_sd: Floats) -> Floats:
    """R with R R' = K of columns, and independent covariates with these standard deviations."""
    columns = len(covariance)
    root = np.zeros((columns + len(covariate_sd),) * 2)
    largest = float(np.diag(covariance).max(initial=0))
    root[:columns, :columns] = np.linalg.cholesky(
        covariance + JITTER * max(largest, 1.0) * np.eye(columns)
    )
    root[columns:, columns:] = np.diag(covariate_sd)
    return root


def maximise(
    modes: Modes, root: Callable[[Floats], Floats], start: Floats, medians: Floats, spread: float
) -> Floats:
    """The logarithms of standard deviations that maximise the evidence of all bins.

    `root` builds the prior from them. They have a Gaussian prior around `medians`.
    """

    def objective(x: Floats) -> float:
        penalty = 0.5 * (((x - medians) / spread) ** 2).sum()
        return float(penalty - modes.under(root(np.clip(x, -9, 3)))[2].sum())

    simplex = np.vstack([start, start + 0.7 * np.eye(len(start))])
    solution = optimize.minimize(
        objective,
        start,
        method="Nelder-Mead",
        options={
            "initial_simplex": simplex,
            "xatol": 0.03,
            "fatol": 0.05,
            "maxfev": 60 * len(start),
        },
    )
    return np.clip(np.asarray(solution.x, dtype=np.float64), -9, 3)


def mean_variances(
    modes: Modes, root: Callable[[Floats], Floats], fitted: Floats, medians: Floats
) -> Floats:
    """Posterior means of variances, one at a time; evidence may hardly bound them from above.

    `fitted` are the logarithms of standard deviations with the largest evidence.
    """

    def mean(number: int) -> float:
        points = np.tile(fitted, (len(OFFSETS), 1))
        points[:, number] += OFFSETS
        penalty = 0.5 * (((points - medians) / LOG_SD) ** 2).sum(1)
        evidence = np.array([modes.under(root(x))[2].sum() for x in points])
        return float(special.softmax(evidence - penalty) @ np.exp(2 * points[:, number]))

    return np.array([mean(number) for number in range(len(fitted))])


def mixture_weights(log_evidence: Floats, prior: Floats) -> Floats:
    """Weights (bins, variants) of variants of the prior, whose shares all bins determine by EM.

    `prior` are prior counts of bins (variants,).
    """
    share = prior / prior.sum()
    weights = np.empty_like(log_evidence)
    for _ in range(EM_STEPS):
        weights = special.softmax(log_evidence + np.log(share), axis=1)
        share = (weights.sum(0) + prior) / (len(weights) + prior.sum())
    return weights


def average(weights: Floats, parts: Sequence[tuple[Floats, Floats]]) -> tuple[Floats, Floats]:
    """Means and covariances (bins, ...) of a mixture of Gaussians with weights (bins, parts)."""
    mean = sum(w[:, None] * m for w, (m, _) in zip(weights.T, parts, strict=True))
    mean = np.asarray(mean)
    covariance = np.zeros_like(parts[0][1])
    for w, (m, c) in zip(weights.T, parts, strict=True):
        gap = m - mean
        covariance += w[:, None, None] * (c + gap[:, :, None] * gap[:, None])
    return mean, covariance


def select_modes(modes: Modes, bins: Ints) -> Modes:
    """The modes of some bins."""
    return replace(
        modes,
        mode=modes.mode[bins],
        information=modes.information[bins],
        score=modes.score[bins],
        log_likelihood=modes.log_likelihood[bins],
        prior=modes.prior[bins],
    )
