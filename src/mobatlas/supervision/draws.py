"""Posterior samples: one calibration for each draw of the group means from their posterior.

Estimated means are uncertain. If every sample aims at the same means, intervals from samples show
sampling noise only. Here the means of each draw are drawn from the posterior, and the samples of
a draw are selected so that they have these means. Draw number k is the same for all groups, so
that contrasts of groups have the right error. Labels are not read.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mobatlas.data.arrays import Floats
from mobatlas.generators.protocol import Generator
from mobatlas.progress import SILENT, Tracker
from mobatlas.regions.posterior import Posterior
from mobatlas.regions.types import bins_by_map
from mobatlas.supervision.calibration import (
    CAPS,
    RIDGE_FACTORS,
    Calibration,
    Choice,
    PoolFit,
    Weighting,
    comparable_moments,
    sample_pools,
)
from mobatlas.supervision.moments import Moments, tilt_to_mean

POPULATION = "population"  # a form of calibration
LEAST_CAP = 5.0  # draws are further from the samples of a model than the estimate is
ENOUGH = 0.9  # of the spread that the largest cap reaches: the cheapest that reaches it is used


@dataclass(frozen=True)
class DrawnCalibration:
    """The calibrations of all draws, and facts about them."""

    calibration: Calibration
    spread: dict[str, float]  # by feature map, see `calibrate_draws`
    draws: int
    seed: int  # of the draws
    joint: bool  # see `Posterior.is_joint`

    def facts(self) -> dict[str, Any]:
        """For the metadata of a file."""
        return {
            "draws": self.draws,
            "seed": self.seed,
            "joint": self.joint,
            "pool": self.calibration.pool,
            "spread": {name: round(share, 4) for name, share in self.spread.items()},
        }


def drawn_moments(posterior: Posterior, moments: Moments, n: int, seed: int) -> Moments:
    """The moments of n draws, their means stacked: (draws x groups, features).

    The number of visits, if the evidence does not have it, follows the total of the draw.
    """
    size = len(posterior.features)
    number = moments.phi.visits[size:]
    first = bins_by_map(posterior.features)[posterior.features[0].partition(":")[0]]
    usual = np.maximum(posterior.medians[:, first].sum(1), 1e-300)  # (groups,)
    rows: list[Floats] = []
    for means in posterior.draws(n, seed):
        level = means[:, first].sum(1) / usual
        visits = [
            tilt_to_mean(share, number, float(each)) if len(number) else share
            for share, each in zip(moments.means[:, size:], level, strict=True)
        ]
        rows.append(np.hstack([means, visits]))
    return replace(moments, means=np.vstack(rows))


def calibrate_draws(
    model: Generator,
    drawn: Moments,
    base: Calibration,
    form: str,
    seed: int = 0,
    tracker: Tracker = SILENT,
) -> tuple[Calibration, dict[str, float]]:
    """Fit one form of the calibration for every draw and group.

    Parameters
    ----------
    model
        The generator.
    drawn
        The moments of draws, as `drawn_moments` returns them.
    base
        The calibration to the estimate; it decides pool, candidates and caps.
    form
        The form to fit; the other one stays empty.
    seed
        Random seed of the pool.
    tracker
        Counts per cent.

    Returns
    -------
    tuple
        The calibrations, and by feature map the share of the posterior spread that samples reach:
        the difference between the means of two draws, of held-out samples and of the posterior.

    Examples
    --------
    >>> drawn = drawn_moments(posterior, moments, 20, seed=1)  # doctest: +SKIP
    >>> calibrate_draws(generator, drawn, calibration, "population")  # doctest: +SKIP
    """
    drawn = comparable_moments(model, drawn)
    groups = len(drawn.groups)
    targets = drawn.means.reshape(-1, groups, drawn.means.shape[1])  # (draws, groups, features)
    candidates = None if form == POPULATION else base.candidates
    rows: dict[tuple[int, int], Weighting] = {}
    spread = np.zeros((len(bins_by_map(drawn.phi.features)), 2))
    pools = sample_pools(model, drawn, base.pool, base.candidates, seed, tracker)
    for group, phi in enumerate(pools):
        fits = [PoolFit(drawn, phi, target, base.ridge) for target in targets[:, group]]
        choice, products = _choose(fits, base.population[group].cap, candidates)
        spread += products
        for number, fit in enumerate(fits):
            rows[number, group] = fit.weighting(choice, candidates)
    weightings = tuple(rows[key] for key in sorted(rows))
    calibration = replace(
        base,
        features=drawn.phi.features,
        population=weightings if form == POPULATION else (),
        fixed_anchors=() if form == POPULATION else weightings,
    )
    shares = spread[:, 0] / np.maximum(spread[:, 1], 1e-300)
    named = zip(bins_by_map(drawn.phi.features), np.maximum(shares, 0).tolist(), strict=True)
    return calibration, dict(named)


def _choose(fits: list[PoolFit], cap: float, candidates: int | None) -> tuple[Choice, Floats]:
    """The cheapest tilt with nearly the spread of the best, and its products (maps, 2)."""
    ridge = fits[0].ridge
    choices = [Choice(each, ridge) for each in CAPS if each >= max(cap, LEAST_CAP)]
    if candidates is not None:
        choices = [Choice(float(candidates), RIDGE_FACTORS[-1] * ridge)]
    products = [_spread(fits[:2], choice, candidates) for choice in choices]
    reached = [each[:, 0].sum() for each in products]
    # Below zero, samples of held-out candidates differ in the wrong direction: the pool is small.
    enough = max(reached) - (1 - ENOUGH) * abs(max(reached))
    best = next(k for k, each in enumerate(reached) if each >= enough)
    return choices[best], products[best]


def _spread(fits: list[PoolFit], choice: Choice, candidates: int | None) -> Floats:
    """By map, products of the difference of two draws with their samples' and with itself."""
    first, second = fits
    scale = first.moments.scale
    wanted = (first.target - second.target) / scale
    reached = [fit.held_out_mean(choice, candidates) / scale for fit in fits]
    products = np.array([(reached[0] - reached[1]) * wanted, wanted**2])  # (2, features)
    bins = bins_by_map(first.moments.phi.features).values()
    return np.array([products[:, each].sum(1) for each in bins])
