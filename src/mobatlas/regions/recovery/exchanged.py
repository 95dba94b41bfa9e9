"""Tables whose rows fit the other evidence better under each other's names.

A table with exchanged groups looks like groups that differ much, so no variance reveals it. It is
compared with what regions, labelled people and the structure of attributes predict for its rows.
An exchange of two levels that no other evidence tells apart stays unnoticed.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import numpy as np
from scipy import optimize, special

from mobatlas.data.types import Floats, Ints
from mobatlas.regions.recovery.joint_posterior import (
    DISCREPANCY_SD,
    LEVEL_SD,
    TABLE_LEVEL,
    DirectFit,
)
from mobatlas.regions.recovery.map_model import DirectRows, MapModel, Slopes
from mobatlas.regions.recovery.solver import link, link_slope

EXCHANGED = 0.1  # prior odds that rows have names of other groups
DISCREPANCIES = tuple(DISCREPANCY_SD * factor for factor in (0.5, 1, 2, 4))
IMPOSSIBLE = 1e9  # the cost of exchanging rows that cover different numbers of groups
MOST_ROWS = 24  # of tables whose pairs of rows are compared one by one


def exchanged_tables(model: MapModel, slopes: Slopes) -> list[str]:
    """Names of tables whose rows probably belong to other groups."""
    found: list[str] = []
    for table in (each for each in model.direct if each.is_table):
        others = [each for each in model.direct if each.name not in (table.name, *found)]
        if _log_odds(replace(model, direct=others), slopes, table) > 0:
            found.append(table.name)
    return found


def _log_odds(others: MapModel, slopes: Slopes, table: DirectRows) -> float:
    """The log odds that rows are in another order; all orders are equally likely."""
    visits = table.weight * table.values
    bins = others.sample[visits[others.sample].min(1) > 1]
    covered = (table.shares > 0).sum(1)
    orders = float(special.gammaln(np.unique(covered, return_counts=True)[1] + 1).sum())
    if not len(bins) or not orders:
        return -np.inf
    mean, covariance = DirectFit.of(others, slopes).posterior(bins)[1]
    means = others.centre[bins] * np.exp(link(mean))
    predicted = means @ table.shares.T  # (bins, rows)
    slope = (means * link_slope(mean))[:, None] * table.shares / predicted[:, :, None]
    rows = _Rows(
        np.log(table.values[bins]),
        1 / visits[bins],
        np.log(predicted),
        slope @ covariance @ slope.swapaxes(1, 2) + LEVEL_SD[table.same_population] ** 2,
    )
    given = rows.log_density(np.arange(len(covered)))
    return float(rows.log_density(rows.best_order(covered)) - orders - given + np.log(EXCHANGED))


@dataclass(frozen=True)
class _Rows:
    """Logarithms of the values of a table, and of what other evidence predicts for its rows."""

    values: Floats  # (bins, rows)
    noise: Floats  # (bins, rows) variance of the values
    predicted: Floats  # (bins, rows)
    covariance: Floats  # (bins, rows, rows) of the predictions

    def log_density(self, order: Ints) -> float:
        """The log density of the values in an order, at the discrepancy that suits it best."""
        gap = self.values[:, order] - self.predicted
        eye = np.eye(len(order))
        total = self.covariance + self.noise[:, order, None] * eye
        return max(_log_normal(gap, total + sd**2 * (eye + TABLE_LEVEL)) for sd in DISCREPANCIES)

    def best_order(self, covered: Ints) -> Ints:
        """An order that fits well: the best for independent rows, then the best exchanges."""
        variance = np.diagonal(self.covariance, axis1=1, axis2=2) + DISCREPANCY_SD**2
        gap = _centred(self.predicted)[:, :, None] - _centred(self.values)[:, None]
        cost = (gap**2 / variance[:, :, None]).sum(0)  # (rows, rows)
        cost += IMPOSSIBLE * (covered[:, None] != covered)
        best: Ints = optimize.linear_sum_assignment(cost)[1]
        density = self.log_density(best)
        pairs = list(itertools.combinations(range(len(best)), 2)) if len(best) <= MOST_ROWS else []
        improved = True
        while improved:
            improved = False
            for one, other in pairs:
                if covered[one] != covered[other]:
                    continue
                order = best.copy()
                order[[one, other]] = best[[other, one]]
                if (value := self.log_density(order)) > density + 1e-6:
                    best, density, improved = order, value, True
        return best


def _centred(values: Floats) -> Floats:
    return values - values.mean(1, keepdims=True)


def _log_normal(gap: Floats, covariance: Floats) -> float:
    """The log density (without constants) of vectors, summed."""
    fit = np.einsum("ja,ja->", gap, np.linalg.solve(covariance, gap[:, :, None])[:, :, 0])
    return float(-0.5 * (fit + np.linalg.slogdet(covariance)[1].sum()))
