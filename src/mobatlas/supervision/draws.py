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
    RIDGE_FACTORS,
    Calibration,
    Choice,
    PoolFit,
    Weighting,
    comparable_moments,
    sample_pools,
)
from mobatlas.supervision.moments import Moments, tilt_to_mean

LEAST_CAP = 5.0  # draws are further from the samples of a model than the estimate is
SPREAD_DRAWS = 2  # the draws whose distance is compared with that of the samples they select


@dataclass(frozen=True)
class DrawnCalibration:
    """The calibrations of all draws, and facts about them."""

    calibration: Calibration
    spread: float  # share of the posterior spread that samples reach, see `calibrate_draws`
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
            "spread": round(self.spread, 4),
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
) -> tuple[Calibration, float]:
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
        The calibrations, and the share of the posterior spread that samples reach: the difference
        between the means of two draws, of held-out samples relative to the posterior.

    Examples
    --------
    >>> drawn = drawn_moments(posterior, moments, 20, seed=1)  # doctest: +SKIP
    >>> calibrate_draws(generator, drawn, calibration, "population")  # doctest: +SKIP
    """
    drawn = comparable_moments(model, drawn)
    size = len(drawn.groups)
    targets = drawn.means.reshape(-1, size, drawn.means.shape[1])  # (draws, groups, features)
    candidates = None if form == "population" else base.candidates
    ridge = base.ridge * (1 if candidates is None else RIDGE_FACTORS[-1])
    rows: dict[tuple[int, int], Weighting] = {}
    spread = np.zeros(2)
    pools = sample_pools(model, drawn, base.pool, base.candidates, seed, tracker)
    for group, phi in enumerate(pools):
        cap = max(base.population[group].cap, LEAST_CAP) if candidates is None else candidates
        choice = Choice(float(cap), ridge)
        fits = [PoolFit(drawn, phi, target, base.ridge) for target in targets[:, group]]
        for number, fit in enumerate(fits):
            rows[number, group] = fit.weighting(choice, candidates)
        spread += _spread(fits[:SPREAD_DRAWS], choice, candidates)
    calibration = replace(
        base,
        features=drawn.phi.features,
        **{form: tuple(rows[key] for key in sorted(rows))},
        **{other: () for other in ("population", "fixed_anchors") if other != form},
    )
    return calibration, float(spread[0] / max(spread[1], 1e-300))


def _spread(fits: list[PoolFit], choice: Choice, candidates: int | None) -> Floats:
    """Products of the difference of two draws with that of their samples, and with itself (2,)."""
    first, second = fits
    scale = first.moments.scale
    wanted = (first.target - second.target) / scale
    reached = [fit.held_out_mean(choice, candidates) / scale for fit in fits]
    return np.array([(reached[0] - reached[1]) @ wanted, wanted @ wanted])
