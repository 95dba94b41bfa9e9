"""The limit on what groups explain: recovery warns where it binds, and an option removes it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from mobatlas import MobatlasError
from mobatlas.regions.recovery.recover import RecoveryOptions, recover
from mobatlas.regions.types import Regions
from tests.regional import TWO, regions_of


def of_bars(times: float) -> Regions:
    """5 % to 95 % of a region are old and go to bars `times` as often; all else is equal."""
    old = np.linspace(0.05, 0.95, 40)
    shares = np.column_stack([1 - old, old])
    means = np.array([[10 - 10 * times, 40.0], [10 + 10 * times, 40.0]])
    values = np.random.default_rng(0).poisson(400 * shares @ means) / 400
    simulated = regions_of(shares, values, 400.0, TWO, randomised=False)
    return replace(
        simulated,
        aggregates=replace(simulated.aggregates, features=("category:bar", "category:home")),
    )


def about_places(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Warnings, except that the evidence says little about a group."""
    return [each.message for each in caplog.records if "says little about" not in each.message]


def test_a_limit_that_keeps_estimates_near_the_average_is_reported(
    caplog: pytest.LogCaptureFixture,
) -> None:
    recovery = recover(of_bars(1.0))
    assert recovery.means[0, 0] > 5  # the truth is 0
    assert recovery.group_share[0] < 0.2
    [message] = about_places(caplog)
    assert "regions differ in 'category:bar' by more than groups can plausibly explain" in message
    assert "intervals are valid only under this assumption" in message
    assert "set groups_explain=100 to remove the limit" in message


def test_only_features_that_differ_between_regions_are_reported(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Everybody is at home as often, everywhere."""
    recover(of_bars(1.0))
    [message] = about_places(caplog)
    assert "more)" not in message


def test_the_named_option_removes_the_limit(caplog: pytest.LogCaptureFixture) -> None:
    recovery = recover(of_bars(1.0), options=RecoveryOptions(groups_explain=100))
    assert recovery.means[:, 0] == pytest.approx([0, 20], abs=0.3)
    recover(of_bars(1.0), quiet=True)
    assert not about_places(caplog)


def test_regions_that_differ_as_groups_may_give_no_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    recovery = recover(of_bars(0.05))
    assert recovery.means[:, 0] == pytest.approx([9.5, 10.5], abs=0.3)
    assert not about_places(caplog)


def of_rare() -> Regions:
    """Only the old go somewhere, two in five of them, and they are one in twenty."""
    old = np.linspace(0.002, 0.1, 40)
    shares = np.column_stack([1 - old, old])
    values = np.random.default_rng(0).poisson(40_000 * shares @ [[0.0, 1.0], [0.4, 1.0]]) / 40_000
    simulated = regions_of(shares, values, 40_000.0, TWO, randomised=False)
    return replace(
        simulated,
        aggregates=replace(simulated.aggregates, features=("category:rare", "category:home")),
    )


def test_groups_differ_little_more_than_the_mean_of_a_rare_activity() -> None:
    """For a rare activity, a share of the variance would be several times its mean."""
    limited = recover(of_rare(), quiet=True)
    assert limited.means[1, 0] < 5 * limited.baseline[0]
    free = recover(of_rare(), options=RecoveryOptions(groups_explain=100), quiet=True)
    assert free.means[1, 0] == pytest.approx(0.4, rel=0.1)


def test_the_estimate_of_a_map_does_not_depend_on_other_maps() -> None:
    """Bars follow composition; a feature that follows places must not lower their share."""
    bars = of_bars(0.3)
    rng = np.random.default_rng(1)
    other = 5 + 3 * rng.normal(size=(40, 2))  # of each region, whoever lives there
    both = replace(
        bars,
        aggregates=replace(
            bars.aggregates,
            features=("hour:1", *bars.aggregates.features, "hour:2"),
            values=np.column_stack([other[:, :1], bars.aggregates.values, other[:, 1:]]),
            spread=None,
        ),
    )
    alone = recover(bars, quiet=True)
    beside = recover(both, quiet=True)
    np.testing.assert_allclose(beside.means[:, 1:3], alone.means)
    np.testing.assert_allclose(beside.covariance[1:3], alone.covariance)
    assert beside.features == both.aggregates.features and len(beside.baseline) == 4


def test_a_feature_without_visits_gives_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    bars = of_bars(0.05)
    empty = np.column_stack([bars.aggregates.values, np.zeros(40)])
    features = (*bars.aggregates.features, "category:never")
    recovery = recover(
        replace(
            bars, aggregates=replace(bars.aggregates, features=features, values=empty, spread=None)
        )
    )
    assert recovery.means[:, 2].max() == 0 and not about_places(caplog)


@pytest.mark.parametrize("share", [0.0, -1.0, float("nan")])
def test_groups_that_explain_nothing_are_refused(share: float) -> None:
    with pytest.raises(MobatlasError, match="give a number above 0"):
        recover(of_bars(1.0), options=RecoveryOptions(groups_explain=share))
