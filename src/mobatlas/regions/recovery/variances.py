"""How much groups differ, regions of themselves, and bins of unlike frequency: the variances of recovery.

They are fitted by restricted likelihood, on as many bins as tell them, with weak priors on their logarithms.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy import optimize

from mobatlas.regions.recovery.posterior import Problem
from mobatlas.regions.recovery.strata import (
    Deviations,
    Ints,
    Part,
    Strata,
    Stratum,
    Variances,
    deviance,
)
from mobatlas.regions.types import Floats

FIT_CELLS, FIT_BINS = (
    200_000,
    64,
)  # the variances are fitted on so many regions x bins, but at least on so many bins
SCALE_CELLS = 2_000_000  # so is the scale of a stratum, on bins evenly spaced among its own
# Log variance of an attribute relative to what is a group's own, a priori: mean and standard deviation. Lowered from equal
# shares because intervals were too wide in simulated cities, whose groups share little by construction; the paper's Figure
# "Pairwise JSD" (all pairs nearly equally far apart) speaks for the same, but is not where the number comes from.
RATIO_PRIOR = (np.log(0.15), 1.0)
STRATUM_SPREAD = (
    3.0  # prior standard deviation of the log scale of a stratum around the overall one
)
EFFECT_PRIOR = (np.log(0.1), 2.0)  # of log omega
SCALE_PRIOR = (
    np.log(0.02),
    3.0,
)  # of log lambda: groups differ by about a seventh of a person's standard deviation
BOUNDS = (-14.0, 6.0)  # of the logarithms


def fit_variances(
    problem: Problem, y: Deviations, members: Strata, effects: bool
) -> tuple[Floats, Variances, dict[Stratum, Variances]]:
    """Shares of the attributes, the variances of all bins together, and those of each stratum."""
    published = y.published(np.arange(len(y.mean)))
    chosen = list(y.parts(problem, _most_telling(y)))
    ratios, effect, scale = _fit_ratios(chosen, problem, published, effects)
    overall = Variances(problem.prior(ratios), scale, effect, published)
    fitted = {}
    for name, bins in members.items():
        parts = list(y.parts(problem, _thinned(bins, len(problem.n))))
        fitted[name] = _fit_scale(parts, problem, overall._replace(published=y.published(bins)))
    return ratios, overall, fitted


def _fit_ratios(
    parts: Sequence[Part], problem: Problem, published: Floats, effects: bool
) -> tuple[Floats, float, float]:
    """Shares of the attributes in the variance between groups, the region effect relative to it, and its scale."""
    attributes = len(problem.factors) - 1

    def unpack(x: Floats) -> tuple[Floats, float, float]:
        rho = np.exp(np.append(x[1 : 1 + attributes], 0.0))
        effect = float(np.exp(x[-1])) if effects else 0.0
        return rho / rho.sum(), effect, float(np.exp(x[0]))

    def objective(x: Floats) -> float:
        rho, effect, scale = unpack(x)
        penalty = (((x[1 : 1 + attributes] - RATIO_PRIOR[0]) / RATIO_PRIOR[1]) ** 2).sum()
        penalty += ((x[0] - SCALE_PRIOR[0]) / SCALE_PRIOR[1]) ** 2
        if effects:
            penalty += ((x[-1] - EFFECT_PRIOR[0]) / EFFECT_PRIOR[1]) ** 2
        return float(penalty) + deviance(
            parts, problem, Variances(problem.prior(rho), scale, effect, published)
        )

    start = np.concatenate(
        (
            [SCALE_PRIOR[0]],
            np.full(attributes, RATIO_PRIOR[0]),
            [EFFECT_PRIOR[0]] if effects else [],
        )
    )
    bounds = [BOUNDS, *[(-6.0, 6.0)] * attributes, *([BOUNDS] if effects else [])]
    found = optimize.minimize(
        objective, start, method="L-BFGS-B", bounds=bounds, options={"maxiter": 60}
    )
    return unpack(found.x)


def _fit_scale(parts: Sequence[Part], problem: Problem, start: Variances) -> Variances:
    """Frequent bins differ more between groups, in units of noise, than rare ones: each stratum has its own scale."""
    overall = np.log(start.scale)

    def objective(x: float) -> float:
        prior = ((x - overall) / STRATUM_SPREAD) ** 2
        return float(prior) + deviance(parts, problem, start._replace(scale=float(np.exp(x))))

    found = optimize.minimize_scalar(
        objective, bounds=(overall - 6, overall + 4), method="bounded", options={"xatol": 0.02}
    )
    return start._replace(scale=float(np.exp(found.x)))


def _thinned(bins: Ints, regions: int) -> Ints:
    """Enough of them to tell one variance by."""
    most = max(SCALE_CELLS // regions, FIT_BINS)
    return bins if len(bins) <= most else bins[np.linspace(0, len(bins) - 1, most).astype(np.int64)]


def _most_telling(y: Deviations) -> Ints:
    """The most frequent bins, those without suppressed cells first."""
    enough = max(FIT_CELLS // len(y.values), FIT_BINS)
    order = np.argsort(-y.mean, kind="stable")
    complete = y.complete[order]
    chosen = order[complete][:enough]
    if len(chosen) < FIT_BINS:
        chosen = np.concatenate([chosen, order[~complete][: FIT_BINS - len(chosen)]])
    return chosen
