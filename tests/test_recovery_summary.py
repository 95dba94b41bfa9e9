"""A summary of group means has the margins, ratios and errors of its posterior."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from mobatlas import MobatlasError
from mobatlas.data.types import Floats
from mobatlas.groups import DEFAULT_GROUPS, Groups
from mobatlas.regions.recovery.recover import recover
from mobatlas.regions.recovery.summary import RecoverySummary, summarise_recovery
from mobatlas.regions.types import Aggregates, Composition, Recovery, Regions

TWO = Groups.of({"sex": ("M", "F")})
FOUR = Groups.of({"age": ("young", "old"), "sex": ("M", "F")})
QUANTILES = (0.05, 0.95)


def posterior(
    groups: Groups,
    log_ratios: Floats,
    log_covariance: Floats,
    *,
    shares: Floats | None = None,
    features: tuple[str, ...] | None = None,
    sources: dict[str, Floats] | None = None,
) -> Recovery:
    """A posterior of log ratios (groups, features) to one visit per person."""
    size, bins = log_ratios.shape
    w = np.full(size, 1 / size) if shares is None else shares
    means = np.exp(log_ratios)
    return Recovery(
        groups=groups,
        features=features or tuple(f"category:{number}" for number in range(bins)),
        means=means,
        log_covariance=np.broadcast_to(log_covariance, (bins, size, size)).copy(),
        prior_variance=np.ones((size, bins)),
        baseline=w @ means,
        shares=w,
        variances={},
        group_share=np.ones(bins),
        regions_differ=np.ones(bins, dtype=bool),
        sources=sources
        or {"regions": np.full((size, bins), 0.6)} | {"assumption": np.full((size, bins), 0.4)},
    )


def random_posterior(
    groups: Groups, bins: int, sd: float, seed: int, size: float = 0.3
) -> Recovery:
    """Random means and correlations; about `sd` of error in each logarithm."""
    rng = np.random.default_rng(seed)
    root = rng.normal(size=(bins, len(groups), len(groups))) / np.sqrt(len(groups))
    shares = rng.dirichlet(np.full(len(groups), 5.0))
    return posterior(
        groups,
        rng.normal(0, size, (len(groups), bins)),
        sd**2 * root @ np.swapaxes(root, 1, 2),
        shares=shares,
    )


def brute_force(recovery: Recovery, n: int = 100_000) -> Floats:
    """Draws of M (n, groups, features), by Cholesky factors instead of `Recovery.draws`."""
    rng = np.random.default_rng(5)
    assert recovery.log_covariance is not None
    jitter = 1e-12 * np.eye(len(recovery.groups))
    noise = rng.normal(size=(n, len(recovery.features), len(recovery.groups)))
    root = np.linalg.cholesky(recovery.log_covariance + jitter)
    return recovery.means * np.exp(np.einsum("jab,njb->naj", root, noise))


def check_quantiles(low: Floats, high: Floats, draws: Floats) -> None:
    """Ends of 90 % intervals, to a tenth of the interval of draws (n, features)."""
    ends = np.quantile(draws, QUANTILES, axis=0)
    width = ends[1] - ends[0]
    assert (np.abs(low - ends[0]) / width).max() <= 0.1
    assert (np.abs(high - ends[1]) / width).max() <= 0.1


def test_a_group_has_the_interval_of_the_recovery() -> None:
    recovery = random_posterior(FOUR, 5, 0.8, seed=0)
    summary = summarise_recovery(recovery, level=0.8)
    assert summary.rows == FOUR.names
    assert summary.value == pytest.approx(recovery.means)
    low, high = recovery.interval(0.8)
    assert summary.low == pytest.approx(low)
    assert summary.high == pytest.approx(high)


def test_a_level_is_the_mean_of_its_people() -> None:
    recovery = random_posterior(FOUR, 4, 0.15, seed=1)
    summary = summarise_recovery(recovery, by="sex")
    draws = brute_force(recovery)
    average = np.einsum("g,ngj->nj", recovery.shares, draws)
    for row, sex in enumerate(("M", "F")):
        members = [name.endswith(sex) for name in FOUR.names]
        w = recovery.shares[members] / recovery.shares[members].sum()
        assert summary.rows[row] == sex
        assert summary.value[row] == pytest.approx(w @ recovery.means[members])
        level = np.einsum("g,ngj->nj", w, draws[:, members])
        check_quantiles(summary.low[row], summary.high[row], level)
        check_quantiles(summary.ratio_low[row], summary.ratio_high[row], level / average)
    assert summary.reference[0] == pytest.approx(recovery.shares @ recovery.means)


def test_errors_that_groups_share_cancel_in_their_ratio() -> None:
    common = posterior(FOUR, np.zeros((4, 1)), np.full((4, 4), 0.25))
    summary = summarise_recovery(common)
    assert summary.high[0, 0] == pytest.approx(np.exp(0.5 * stats.norm.ppf(0.95)))
    assert summary.ratio_high == pytest.approx(1)
    assert set(summary.verdicts.ravel()) == {"not sure"}


def test_a_comparison_has_both_sides() -> None:
    recovery = random_posterior(FOUR, 4, 0.15, seed=2)
    draws = brute_force(recovery)
    summary = summarise_recovery(recovery, compare=("old", "young"))
    w = recovery.shares
    young, old = (
        np.einsum("g,ngj->nj", w[part] / w[part].sum(), draws[:, part])
        for part in (slice(0, 2), slice(2, 4))
    )
    assert (summary.rows, summary.compared_with) == (("old", "young"), ("young", "old"))
    check_quantiles(summary.ratio_low[0], summary.ratio_high[0], old / young)
    assert summary.ratio[1] == pytest.approx(1 / summary.ratio[0])
    assert summary.reference[0] == pytest.approx(summary.value[1])
    groups = summarise_recovery(recovery, compare=("old, F", "young, M"))
    check_quantiles(groups.ratio_low[0], groups.ratio_high[0], draws[:, 3] / draws[:, 0])


def test_a_level_without_people_is_the_plain_mean_of_its_groups() -> None:
    recovery = random_posterior(FOUR, 2, 0.1, seed=3)
    absent = replace(recovery, shares=np.array([0.5, 0.5, 0, 0]))
    summary = summarise_recovery(absent, by="age")
    assert summary.value[1] == pytest.approx(recovery.means[2:].mean(0))


def test_a_mean_too_small_to_be_seen_may_be_zero() -> None:
    recovery = posterior(TWO, np.log([[0.2], [0.02]]), 0.25 * np.eye(2))
    # One visit unseen would be 0.02 of a group, and 0.01 of both groups together.
    seen = replace(recovery, resolution=np.full((2, 1), 0.02))
    summary = summarise_recovery(seen)
    assert summary.low[0, 0] == pytest.approx(0.2 * np.exp(-0.5 * stats.norm.ppf(0.95)))
    assert (summary.low[1, 0], summary.ratio_low[1, 0]) == (0, 0)
    assert (seen.interval(0.9)[0] == summary.low).all()


def test_a_side_that_may_be_zero_is_not_more_than_the_other() -> None:
    recovery = posterior(TWO, np.log([[0.02], [0.001]]), 0.09 * np.eye(2))
    clear = summarise_recovery(recovery, compare=("M", "F"))
    assert clear.verdicts.ravel().tolist() == ["more", "less"]
    unseen = replace(recovery, resolution=np.full((2, 1), 0.02))
    for compare in (("M", "F"), None):
        summary = summarise_recovery(unseen, compare=compare)
        assert summary.verdicts[0, 0] == "not sure"
        assert (summary.ratio_low[0, 0], summary.certainty[0, 0]) == (0, 0)
    # Only the smaller side may be zero: then the difference is clear.
    fewer = replace(recovery, resolution=np.array([[0.001], [0.02]]))
    assert summarise_recovery(fewer, compare=("M", "F")).verdicts.ravel().tolist() == [
        "more",
        "less",
    ]


def test_equally_certain_features_are_ordered_by_frequency() -> None:
    log_ratios = np.log([[1.5, 3.0, 6.0], [0.5, 1.0, 2.0]])
    summary = summarise_recovery(posterior(TWO, log_ratios, 0.04 * np.eye(2)))
    assert summary.most_certain("category", 2).tolist() == [2, 1]


def test_verdicts_follow_benjamini_and_yekutieli_in_each_feature_map() -> None:
    bins = 60
    names = tuple(f"{'poi' if number % 3 else 'hour'}:{number}" for number in range(bins))
    recovery = replace(random_posterior(FOUR, bins, 0.2, seed=4), features=names)
    summary = summarise_recovery(recovery, level=0.95)
    p = 2 * stats.norm.sf(summary.certainty)
    expected = np.full(p.shape, "not sure", dtype=object)
    for name in ("poi", "hour"):
        columns = [number for number in range(bins) if names[number].startswith(name)]
        adjusted = stats.false_discovery_control(p[:, columns], axis=None, method="by")
        called = np.where(summary.ratio[:, columns] > 1, "more", "less")
        expected[:, columns] = np.where(adjusted.reshape(called.shape) <= 0.05, called, "not sure")
    assert (summary.verdicts == expected).all()
    assert {"more", "less", "not sure"} == set(summary.verdicts.ravel())
    # A map has the same verdicts without the others.
    alone = summarise_recovery(recovery, level=0.95, features=["hour"])
    assert alone.features == names[::3]
    assert (alone.verdicts == summary.verdicts[:, ::3]).all()


def wrong_share(summary: RecoverySummary, truth: Floats) -> float:
    """The share of wrong verdicts; `truth` (rows, features) are log ratios."""
    called = summary.verdicts != "not sure"
    right = np.where(summary.verdicts == "more", truth > 0, truth < 0)
    return float((called & ~right).sum() / max(called.sum(), 1))


@pytest.mark.parametrize("different", [0, 10])
def test_few_verdicts_are_wrong(different: int) -> None:
    """Estimates are the truth plus noise with the covariance of the posterior."""
    rng = np.random.default_rng(different)
    groups, bins, sd = DEFAULT_GROUPS, 30, 0.2
    wrong = []
    for _ in range(300):
        truth = np.zeros((8, bins))
        truth[:, :different] = rng.choice([-0.5, 0.5], (4, different)).repeat(2, axis=0)
        # Errors are strongly correlated between groups that share an age.
        covariance = sd**2 * (0.3 * np.eye(8) + 0.7 * np.kron(np.eye(4), np.ones((2, 2))))
        noise = rng.multivariate_normal(np.zeros(8), covariance, bins).T
        summary = summarise_recovery(posterior(groups, truth + noise, covariance), level=0.9)
        differences = truth - np.log(np.exp(truth).mean(0))
        wrong.append(wrong_share(summary, np.round(differences, 9)))
    mean, error = np.mean(wrong), np.std(wrong) / np.sqrt(len(wrong))
    assert mean <= 0.1 + 2 * error


def test_regions_without_differences_give_few_verdicts() -> None:
    """People are counted whatever their group; 90 % verdicts in at most 10 % of the cities."""
    any_verdict = []
    for seed in range(12):
        rng = np.random.default_rng(seed)
        shares = rng.dirichlet(np.full(4, 0.5), 30)
        n = np.full(30, 400.0)
        mean = rng.gamma(2.0, 0.3, 12)
        values = rng.poisson(n[:, None] * mean) / n[:, None]
        names = tuple(f"R{number}" for number in range(30))
        bins = tuple(f"category:{number}" for number in range(12))
        regions = Regions(
            Composition(FOUR, names, shares, np.full(30, np.inf)),
            Aggregates(names, bins, values, n, spread=mean),
            randomised=True,
        )
        summary = summarise_recovery(recover(regions, quiet=True), level=0.9)
        any_verdict.append((summary.verdicts != "not sure").any())
    assert sum(any_verdict) <= 3  # of 12: more have a probability of 3 % at a rate of 10 %


def test_a_feature_without_visits_gets_no_verdict_and_costs_none() -> None:
    recovery = random_posterior(FOUR, 6, 0.2, seed=6)
    means = recovery.means.copy()
    means[:, 2] = 0
    summary = summarise_recovery(replace(recovery, means=means))
    assert np.isnan(summary.ratio[:, 2]).all() and not summary.certainty[:, 2].any()
    assert set(summary.verdicts[:, 2]) == {"not sure"}
    columns = summary.as_columns()
    assert columns["ratio"][2] is None and columns["low"][2] == 0
    others = [0, 1, 3, 4, 5]
    assert recovery.log_covariance is not None
    without = summarise_recovery(
        replace(
            recovery,
            features=tuple(recovery.features[number] for number in others),
            means=means[:, others],
            log_covariance=recovery.log_covariance[others],
            sources={name: share[:, others] for name, share in recovery.sources.items()},
        )
    )
    assert (without.verdicts == summary.verdicts[:, others]).all()


def test_a_level_has_the_sources_of_its_people() -> None:
    rng = np.random.default_rng(7)
    parts = rng.dirichlet(np.ones(3), (4, 2))  # (groups, features, sources)
    names = ("regions", "labelled people", "assumption")
    sources = {name: parts[:, :, number] for number, name in enumerate(names)}
    shares = np.array([0.1, 0.3, 0.4, 0.2])
    recovery = posterior(FOUR, np.zeros((4, 2)), np.eye(4), shares=shares, sources=sources)
    summary = summarise_recovery(recovery, by="age")
    for name in names:
        assert summary.sources[name][0] == pytest.approx(
            0.25 * sources[name][0] + 0.75 * sources[name][1]
        )
    columns = summary.as_columns()
    assert [name for name in columns if name.startswith("from_")] == [
        "from_regions",
        "from_labelled_people",
        "from_assumption",
    ]
    assert np.sum([columns[name] for name in columns if name.startswith("from_")], 0) == (
        pytest.approx(1)
    )


def test_an_attribute_without_differences_is_named() -> None:
    """Ages differ clearly; women and men of an age have the same means."""
    log_ratios = np.log([[2.0, 1.0], [2.0, 1.0], [0.5, 1.0], [0.5, 1.0]])
    summary = summarise_recovery(posterior(FOUR, log_ratios, 0.01 * np.eye(4)))
    assert summary.undistinguished == {"category": ("sex",)}
    nothing = summarise_recovery(posterior(FOUR, 0 * log_ratios, 0.01 * np.eye(4)))
    assert nothing.undistinguished == {"category": ("age", "sex")}
    assert (
        summarise_recovery(posterior(FOUR, log_ratios, np.eye(4)), by="age").undistinguished == {}
    )


def test_the_most_certain_features_come_first() -> None:
    log_ratios = np.array([[0.1, -0.9, 0.3], [-0.1, 0.4, -0.2]])
    names = ("category:gym", "category:park", "hour:3")
    recovery = posterior(TWO, log_ratios, 0.04 * np.eye(2), features=names)
    summary = summarise_recovery(recovery)
    assert summary.most_certain("category", 5).tolist() == [1, 0]
    assert summary.most_certain("hour", 5).tolist() == [2]


def test_one_group_is_the_average() -> None:
    one = Groups.of({"age": ("all",)})
    summary = summarise_recovery(posterior(one, np.zeros((1, 2)), np.array([[0.04]])))
    assert summary.ratio_low.tolist() == summary.ratio_high.tolist() == [[1, 1]]
    assert set(summary.verdicts.ravel()) == {"not sure"}


def test_many_groups_and_places_are_summarised_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    recovery = random_posterior(FOUR, 40, 0.3, seed=8)
    whole = summarise_recovery(recovery).as_columns()
    monkeypatch.setattr("mobatlas.regions.types.BLOCK_CELLS", 100)  # three features at a time
    assert summarise_recovery(recovery).as_columns() == whole


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"level": 90}, "level 90: give a probability between 0 and 1, such as 0.9"),
        ({"by": "gender"}, r"attribute 'gender' does not exist \(known: age, sex\)"),
        ({"by": "age", "compare": ("M", "F")}, "not both"),
        ({"compare": ("M", "M")}, "'M' cannot be compared with itself"),
        ({"compare": ("M", "old")}, "'M' is a level of sex and 'old' of age"),
        ({"compare": ("M", "old, F")}, "group 'M' does not exist"),
        ({"compare": ("women", "men")}, "group 'women' does not exist"),
        ({"features": ["categry"]}, "'categry'; did you mean 'category'"),
    ],
)
def test_bad_options_are_refused(options: dict[str, object], sentence: str) -> None:
    recovery = random_posterior(FOUR, 2, 0.1, seed=9)
    with pytest.raises(MobatlasError, match=sentence):
        summarise_recovery(recovery, **options)  # type: ignore[arg-type]


def test_levels_that_two_attributes_have_are_refused() -> None:
    groups = Groups.of({"income": ("low", "high"), "education": ("low", "high")})
    with pytest.raises(MobatlasError, match="several attributes; compare two groups"):
        summarise_recovery(random_posterior(groups, 2, 0.1, seed=9), compare=("low", "high"))
