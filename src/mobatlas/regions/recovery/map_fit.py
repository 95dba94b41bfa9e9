"""Fits all bins of a feature map: variances first, then the posterior stratum by stratum."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from scipy import special

from mobatlas.data.types import Floats, Ints
from mobatlas.regions.recovery.joint_posterior import DirectFit
from mobatlas.regions.recovery.map_model import MapFit, MapModel, Slopes
from mobatlas.regions.recovery.region_posterior import NEGLIGIBLE, fit_regions


def fit_map(model: MapModel, slopes: Slopes) -> tuple[MapFit, Slopes, dict[str, float]]:
    """The posterior of a feature map, its slopes, and the discrepancy of each table.

    In strata of rare bins, the variance of group differences is scaled like the assumed one.
    """
    if model.direct:
        return _fit_with_direct(model, slopes)
    usual = model.usual_variances().sum()
    parts = []
    for bins in model.strata:
        own = slopes.own
        if model.confounded:
            own = own * (float(model.assumed[bins].mean()) / usual)
        parts.append(fit_regions(model, bins, replace(slopes, own=own)))
    variances = _named(model, slopes.own, slopes.context) | {"region_effect": slopes.effect}
    return _joined(model, parts, variances), slopes, {}


def _fit_with_direct(model: MapModel, slopes: Slopes) -> tuple[MapFit, Slopes, dict[str, float]]:
    fitted = DirectFit.of(model, slopes)
    without = None
    doubt = 0.0
    if not model.confounded and slopes.doubt > 0:
        usual = Slopes(model.usual_variances(), None, slopes.effect)
        without = DirectFit.of(model.without_composition(), usual)
        # Direct evidence revises the doubt that regions alone leave.
        gain = fitted.gain() - without.gain()
        doubt = float(special.expit(special.logit(slopes.doubt) - gain))
        if doubt < NEGLIGIBLE:
            without = None
    parts = [fitted.fit(bins, without, doubt) for bins in model.strata]
    variances = _named(model, fitted.revised.own, fitted.context)
    variances["region_effect"] = slopes.effect
    revised = replace(slopes, doubt=doubt)
    return _joined(model, parts, variances), revised, dict(fitted.revised.discrepancy)


def _named(model: MapModel, own: Floats, context: Floats | None) -> dict[str, float]:
    """Standard deviations of factors by name."""
    kinds = {"sd": own} | ({} if context is None else {"contextual_sd": context})
    return {
        f"{kind}_{name}": float(value)
        for kind, variances in kinds.items()
        for name, value in zip(model.factors.names, np.sqrt(variances), strict=True)
    }


def _joined(model: MapModel, parts: list[MapFit], variances: Mapping[str, float]) -> MapFit:
    """The strata as one fit, in the order of bins."""
    order: Ints = np.argsort(np.concatenate(model.strata), kind="stable")

    def joined(name: str) -> Floats:
        return np.concatenate([getattr(part, name) for part in parts])[order]

    return MapFit(
        log_means=joined("log_means"),
        log_covariance=joined("log_covariance"),
        prior_variance=joined("prior_variance"),
        region_ratio=joined("region_ratio"),
        sources={
            name: np.concatenate([part.sources[name] for part in parts])[order]
            for name in parts[0].sources
        },
        variances=variances,
        group_share=joined("group_share"),
    )
