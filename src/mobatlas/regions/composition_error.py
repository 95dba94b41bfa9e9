"""A composition that was counted on few people: what it is expected to be, and how far that may be off."""

from __future__ import annotations

import numpy as np

from mobatlas.regions.recovery.posterior import Doubt
from mobatlas.regions.types import Composition, Floats


def calibrate_composition(composition: Composition) -> tuple[Floats, Doubt | None]:
    """Regression calibration of a composition counted on n people: E[p | counts], and what is left of its variance.

    True shares vary between regions with a covariance that is estimated from how much more the counted ones vary than n
    explains, direction by direction: ages may differ much between regions where sexes do not. Plugging in the counted
    shares would attenuate every group difference.
    """
    shares, n = composition.shares, composition.n
    sampling = np.where(
        np.isfinite(n), 1 / np.maximum(n, 1), 0.0
    )  # (regions,) in units of one person's variance
    if not sampling.any():
        return shares, None
    weight = 1 / (sampling + 1 / len(n))
    weight = weight / weight.sum()
    centre = weight @ shares  # (groups,)
    values, vectors = np.linalg.eigh(
        np.diag(centre) - np.outer(centre, centre)
    )  # the covariance of one person's group
    spans = values > 1e-9
    axes = vectors[:, spans] * np.sqrt(values[spans])  # (groups, directions)
    whitened = (shares - centre) @ (
        vectors[:, spans] / np.sqrt(values[spans])
    )  # (regions, directions)
    observed = (whitened * weight[:, None]).T @ whitened / max(1 - float(weight @ weight), 1e-12)
    one, expected = np.eye(len(axes.T)), float(weight @ sampling)
    trust = len(n) / (len(n) + len(one))  # few regions do not tell directions apart
    observed = trust * observed + (1 - trust) * np.trace(observed) / max(len(one), 1) * one
    # Within a region people vary the less the more regions differ: observed = between + (1 - between) / n.
    variance, turn = np.linalg.eigh((observed - expected * one) / max(1 - expected, 1e-12))
    variance = np.clip(variance, 0, 1)  # (directions,) between regions
    counting = (1 - variance) * sampling[:, None]  # (regions, directions)
    reliability = variance / np.maximum(variance + counting, 1e-300)
    calibrated = centre + ((whitened @ turn) * reliability) @ (axes @ turn).T
    return calibrated, Doubt(axes @ turn, variance * (1 - reliability))
