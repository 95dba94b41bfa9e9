"""Errors of a composition that was counted on a sample of people."""

from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from mobatlas.data.types import Floats, Ints
from mobatlas.regions.types import Composition


@dataclass(frozen=True)
class CompositionError:
    """Uncertainty of a composition: its covariance in region g is axes diag(variance_g) axes'."""

    axes: Floats  # (groups, directions)
    variance: Floats  # (regions, directions)

    def select(self, rows: Ints) -> Self:
        """The error of some regions."""
        return replace(self, variance=self.variance[rows])


def calibrate_composition(composition: Composition) -> tuple[Floats, CompositionError | None]:
    """Regression calibration of a composition counted on n people: E[p | counts] and its error.

    True shares vary between regions. Their covariance is the observed one beyond what n explains,
    direction by direction: ages may differ between regions where sexes do not. Using the counted
    shares directly would attenuate every difference between groups.
    """
    shares = composition.shares
    n = composition.n if composition.sample is None else composition.sample
    # (regions,) in units of one person's variance
    sampling = np.where(np.isfinite(n), 1 / np.maximum(n, 1), 0.0)
    if not sampling.any():
        return shares, None
    weight = 1 / (sampling + 1 / len(n))
    weight = weight / weight.sum()
    centre = weight @ shares  # (groups,)
    # The covariance of one person's group.
    values, vectors = np.linalg.eigh(np.diag(centre) - np.outer(centre, centre))
    spans = values > 1e-9
    axes = vectors[:, spans] * np.sqrt(values[spans])  # (groups, directions)
    whitening = vectors[:, spans] / np.sqrt(values[spans])
    whitened = (shares - centre) @ whitening  # (regions, directions)
    observed = (whitened * weight[:, None]).T @ whitened / max(1 - float(weight @ weight), 1e-12)
    identity = np.eye(len(axes.T))
    expected = float(weight @ sampling)
    # With few regions the directions cannot be distinguished: shrink towards a common variance.
    trust = len(n) / (len(n) + len(identity))
    common = (1 - trust) * np.trace(observed) / max(len(identity), 1)
    observed = trust * observed + common * identity
    # The more regions differ, the less people vary within: observed = between + (1 - between) / n.
    variance, turn = np.linalg.eigh((observed - expected * identity) / max(1 - expected, 1e-12))
    variance = np.clip(variance, 0, 1)  # (directions,) between regions
    counting = (1 - variance) * sampling[:, None]  # (regions, directions)
    reliability = variance / np.maximum(variance + counting, 1e-300)
    calibrated = centre + ((whitened @ turn) * reliability) @ (axes @ turn).T
    return calibrated, CompositionError(axes @ turn, variance * (1 - reliability))
