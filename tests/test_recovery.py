"""Recovery agrees with dense textbook formulas and with simulations of its model."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize

from mobatlas import MobatlasError
from mobatlas.data.arrays import Floats
from mobatlas.groups import DEFAULT_GROUPS, Groups
from mobatlas.regions.partitions import nominal_partition
from mobatlas.regions.recovery.posterior import calibrate_composition, nonnegative
from mobatlas.regions.recovery.recover import METHODS, RecoveryOptions, recover
from mobatlas.regions.types import (
    Aggregates,
    Composition,
    Population,
    Recovery,
    Regions,
    population_mean,
    with_rest,
)

TWO = Groups.of({"sex": ("M", "F")})
THREE = Groups.of({"age": ("young", "middle", "old")})
FOUR = Groups.of({"age": ("young", "old"), "sex": ("M", "F")})


def regions_of(
    shares: Floats,
    values: Floats,
    n: Floats | float = 1_000.0,
    groups: Groups = DEFAULT_GROUPS,
    *,
    counted: Floats | float = np.inf,
    spread: Floats | None = None,
    noise: Floats | None = None,
    randomised: bool = True,
) -> Regions:
    names = tuple(f"R{number}" for number in range(len(shares)))
    each = np.broadcast_to(np.asarray(n, dtype=np.float64), (len(shares),)).copy()
    people = np.broadcast_to(np.asarray(counted, dtype=np.float64), (len(shares),)).copy()
    bins = tuple(f"category:{number}" for number in range(values.shape[1]))
    aggregates = Aggregates(names, bins, values, each, spread=spread, noise=noise)
    return Regions(Composition(groups, names, shares, people), aggregates, randomised)


def simulate(
    shares: Floats,
    n: Floats | float,
    seed: int,
    groups: Groups = DEFAULT_GROUPS,
    bins: int = 30,
    scale: float = 0.1,
) -> tuple[Regions, Floats]:
    """Group means around 5 visits with variance 1 between people, and their regions."""
    rng = np.random.default_rng(seed)
    means = 5 + rng.normal(0, np.sqrt(scale), (len(groups), bins))  # M
    each = np.broadcast_to(np.asarray(n, dtype=np.float64), (len(shares),))
    values = shares @ means + rng.normal(0, 1, (len(shares), bins)) / np.sqrt(each)[:, None]
    return regions_of(shares, values, each, groups, spread=np.ones(bins)), means


def error(means: Floats, truth: Floats) -> float:
    return float(np.sqrt(((means - truth) ** 2).mean()))


def dirichlet(regions: int, groups: int, alpha: float = 0.5, seed: int = 0) -> Floats:
    return np.asarray(np.random.default_rng(seed).dirichlet(np.full(groups, alpha), regions))


def dense_posterior(
    regions: Regions, recovery: Recovery, bin_: int, known: Floats
) -> tuple[Floats, Floats]:
    """The textbook: y = 1 alpha + P b + e with flat alpha, by (regions, regions) matrices."""
    groups = regions.groups
    v = regions.aggregates
    rows = np.flatnonzero(known)
    p = regions.composition.shares[rows]
    n = v.n[rows]
    inner = recovery.variances["share_group"] * np.eye(len(groups))
    for number, name in enumerate(groups.attribute_names):
        same = groups.level_codes[:, [number]] == groups.level_codes[:, number]
        inner = inner + recovery.variances.get(f"share_{name}", 0.0) * same
    centring = np.eye(len(groups)) - np.outer(np.ones(len(groups)), recovery.shares)
    s = centring @ inner @ centring.T
    s *= len(groups) / np.trace(s)
    s *= recovery.prior_variance[0, bin_] / s[0, 0]  # the scale of this bin, as it was fitted
    scale = recovery.prior_variance[:, bin_].sum() / len(groups)
    noise = np.diag(1 / n + scale * recovery.variances["region_effect"])
    sigma = np.linalg.inv(p @ s @ p.T + noise)
    one = np.ones(len(rows))
    q = sigma - np.outer(sigma @ one, sigma @ one) / (one @ sigma @ one)  # alpha integrated out
    mean = recovery.baseline[bin_] + s @ p.T @ q @ (v.values[rows, bin_] - recovery.baseline[bin_])
    covariance = s - s @ p.T @ q @ p @ s + 1 / n.sum()
    gain = s @ p.T @ q
    relative = mean / recovery.baseline[bin_]  # noise grows with the mean
    more = (relative - 1) * (np.diag(gain @ noise @ gain.T) + 1 / n.sum())
    wider = np.diag(np.sqrt(1 + more / np.diag(covariance)))
    return mean, wider @ covariance @ wider


@pytest.mark.parametrize("randomised", [True, False])
@pytest.mark.parametrize("groups", [TWO, THREE, FOUR])
def test_the_posterior_is_the_textbook_one(groups: Groups, randomised: bool) -> None:
    shares = dirichlet(12, len(groups), seed=1)
    n = np.random.default_rng(2).integers(50, 500, 12).astype(float)
    simulated, _ = simulate(shares, n, 3, groups, bins=5, scale=0.02)
    simulated = Regions(simulated.composition, simulated.aggregates, randomised)
    recovery = recover(simulated)
    for bin_ in range(5):
        mean, covariance = dense_posterior(simulated, recovery, bin_, np.ones(12))
        assert recovery.means[:, bin_] == pytest.approx(mean, abs=1e-8)
        assert recovery.covariance[bin_] == pytest.approx(covariance, abs=1e-9)
        assert np.linalg.eigvalsh(recovery.covariance[bin_]).min() > -1e-12


def test_a_suppressed_cell_is_one_region_less_for_that_bin_alone() -> None:
    simulated, _ = simulate(dirichlet(14, 4), 300.0, 5, FOUR, bins=6)
    holes = simulated.aggregates.values.copy()
    holes[[2, 7], 1] = np.nan
    holes[7, 4] = np.nan
    simulated = regions_of(simulated.composition.shares, holes, 300.0, FOUR, spread=np.ones(6))
    recovery = recover(simulated)
    for bin_ in range(6):
        mean, covariance = dense_posterior(simulated, recovery, bin_, ~np.isnan(holes[:, bin_]))
        assert recovery.means[:, bin_] == pytest.approx(mean, abs=1e-8)
        assert recovery.covariance[bin_] == pytest.approx(covariance, abs=1e-9)


def test_variances_are_fitted_even_where_every_bin_has_a_suppressed_cell() -> None:
    simulated, means = simulate(dirichlet(30, 8), 500.0, 6, bins=40)
    holes = simulated.aggregates.values.copy()
    holes[np.arange(40) % 30, np.arange(40)] = np.nan
    recovery = recover(regions_of(simulated.composition.shares, holes, 500.0, spread=np.ones(40)))
    assert recovery.variances["group_scale"] == pytest.approx(0.1, rel=0.5)
    assert error(recovery.means, means) < 0.5 * error(np.tile(recovery.baseline, (8, 1)), means)


def test_a_bin_that_every_region_suppressed_stays_at_the_prior() -> None:
    simulated, _ = simulate(dirichlet(10, 8), 500.0, 6, bins=4)
    holes = simulated.aggregates.values.copy()
    holes[:, 2] = np.nan
    recovery = recover(regions_of(simulated.composition.shares, holes, 500.0, spread=np.ones(4)))
    assert np.isfinite(recovery.means).all()
    assert np.ptp(recovery.means[:, 2]) == 0
    assert recovery.sd[:, 2].min() > 0


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    regions=st.integers(1, 20),
    groups=st.sampled_from([TWO, THREE, FOUR]),
)
def test_the_groups_together_are_the_population(seed: int, regions: int, groups: Groups) -> None:
    n = np.random.default_rng(seed).integers(20, 2_000, regions).astype(float)
    for randomised in (True, False):
        simulated, _ = simulate(
            dirichlet(regions, len(groups), seed=seed), n, seed, groups, bins=4, scale=0.01
        )
        recovery = recover(Regions(simulated.composition, simulated.aggregates, randomised))
        w, mu0 = population_mean(simulated.composition.shares, simulated.aggregates)
        assert w @ recovery.means == pytest.approx(mu0, abs=1e-9)


def test_the_population_less_its_regions_is_one_region_more() -> None:
    """Of 60 men who go out once and 40 women who go twice, a region has 20 and 30."""
    simulated = regions_of(np.array([[0.4, 0.6]]), np.array([[1.6]]), 50.0, TWO, spread=np.ones(1))
    recovery = with_rest(
        replace(simulated, population=Population(np.array([0.6, 0.4]), np.array([1.4]), 100.0))
    )
    assert recovery.composition.regions == ("R0", "rest")
    assert recovery.composition.shares[1] == pytest.approx([0.8, 0.2])
    assert recovery.aggregates.values[1] == pytest.approx([1.2])
    assert recovery.aggregates.n.tolist() == [50, 50]


def test_the_rest_of_the_population_has_no_negative_counts() -> None:
    """Rounded shares: 50.5 women in the regions of a population that has 50."""
    simulated = regions_of(np.array([[0.495, 0.505]]), np.array([[1.01, 0.5]]), 100.0, TWO)
    recovery = with_rest(
        replace(
            simulated, population=Population(np.array([0.75, 0.25]), np.array([0.5, 0.5]), 200.0)
        )
    )
    assert recovery.composition.shares[1].tolist() == [1, 0]
    assert recovery.aggregates.values[1].tolist() == [0, 0.5]


def test_a_rest_that_cannot_be_known_or_hardly_exists_is_left_alone() -> None:
    simulated = regions_of(np.array([[0.4, 0.6]]), np.array([[1.6]]), 5_000.0, TWO)
    everybody = Population(np.array([0.6, 0.4]), np.array([1.4]), 10_000.0)
    assert len(with_rest(replace(simulated, population=everybody)).composition.regions) == 2
    few = [
        replace(simulated, population=replace(everybody, n=n))
        for n in (4_000.0, 5_000.0, 5_029.0, 5_050.0)
    ]
    published = replace(simulated.aggregates, noise=np.ones((1, 1)))
    shares_only = replace(simulated.aggregates, pooled=True)
    unknown = [
        replace(simulated, aggregates=v, population=everybody) for v in (published, shares_only)
    ]
    for regions in (
        simulated,
        *few,
        *unknown,
        replace(simulated, randomised=False, population=everybody),
    ):
        assert with_rest(regions) is regions


def test_what_a_region_suppresses_is_unknown_of_the_rest_too() -> None:
    simulated = regions_of(np.eye(2), np.array([[1.0, np.nan], [2.0, 3.0]]), 50.0, TWO)
    recovery = with_rest(
        replace(simulated, population=Population(np.full(2, 0.5), np.array([1.5, 3.0]), 200.0))
    )
    assert np.isnan(recovery.aggregates.values[2]).tolist() == [False, True]


def test_who_is_left_over_tells_what_the_regions_hide() -> None:
    """Regions of half men, half women identify nothing; the rest, mostly women, does."""
    rng = np.random.default_rng(0)
    means = 5 + rng.normal(0, 0.3, (2, 20))
    shares = np.full((4, 2), 0.5)
    n = np.full(4, 500.0)
    rest = np.array([0.1, 0.9])
    left = 2_000.0
    values = (
        np.vstack([shares, rest]) @ means
        + rng.normal(0, 1, (5, 20)) / np.sqrt(np.append(n, left))[:, None]
    )
    total = n.sum() + left
    w = (n @ shares + left * rest) / total
    mu0 = (n @ values[:4] + left * values[4]) / total
    alone = regions_of(shares, values[:4], n, TWO, spread=np.ones(20))
    known = replace(alone, population=Population(w, mu0, float(total)))
    for method in METHODS:
        recovery = recover(known, method)
        assert recovery.shares == pytest.approx(w)
        assert recovery.baseline == pytest.approx(mu0)
    recovery = recover(known)
    poor = recover(alone)
    assert poor.shares == pytest.approx([0.5, 0.5])
    assert w @ recovery.means == pytest.approx(mu0)
    assert error(recovery.means, means) < 0.5 * error(poor.means, means)
    low, high = recovery.interval(0.9)
    assert ((low <= means) & (means <= high)).mean() > 0.75


def test_positivity_keeps_the_population_mean_and_uses_what_it_knows() -> None:
    """Only the sum of two groups is known: if one would be negative, the other takes all."""
    covariance = np.array([[1.0, -1.0], [-1.0, 1.0]])
    means, left = nonnegative(np.array([[-0.3, 1.3], [0.4, 0.6]]), covariance)
    assert means == pytest.approx(np.array([[0.0, 1.0], [0.4, 0.6]]), abs=1e-9)
    assert left[1] == pytest.approx(covariance)
    assert left[0, 1, 1] == pytest.approx(1 - 2 / np.pi)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**31))
def test_positivity_finds_the_nearest_point_in_the_metric_of_the_covariance(seed: int) -> None:
    rng = np.random.default_rng(seed)
    root = rng.normal(size=(4, 4)) + np.eye(4)
    covariance = root @ root.T + 0.1 * np.eye(4)
    mean = rng.normal(0.3, 1, 4)
    half = np.linalg.cholesky(np.linalg.inv(covariance)).T
    expected, _ = optimize.nnls(half, half @ mean)
    assert nonnegative(mean[None], covariance)[0][0] == pytest.approx(expected, abs=1e-5)


def test_what_no_region_tells_apart_stays_at_the_baseline() -> None:
    """Regions differ in age only: men and women of an age get equal means and wide intervals."""
    ages = dirichlet(12, 4, seed=4)
    simulated, _ = simulate(np.repeat(ages, 2, axis=1) / 2, 2_000.0, 8)
    recovery = recover(simulated)
    assert recovery.means[::2] == pytest.approx(recovery.means[1::2], abs=1e-8)
    gap = np.array([1, -1, 0, 0, 0, 0, 0, 0.0])
    age = np.array([1, 1, 0, 0, 0, 0, -1, -1.0]) / 2
    unknown, known = (
        np.sqrt(np.einsum("i,jik,k->j", c, recovery.covariance, c)).mean() for c in (gap, age)
    )
    assert unknown > 4 * known


@pytest.mark.parametrize(
    "name", ["demogroups", "fullrank", "rankdef", "messy", "hot16", "dirichlet:24:0.5"]
)
def test_recovery_beats_the_population_mean_and_says_how_sure_it_is(name: str) -> None:
    shares = nominal_partition(name, DEFAULT_GROUPS).shares
    inside = []
    won = []
    for seed in range(5):
        simulated, means = simulate(shares, 400.0, seed)
        recovery = recover(simulated)
        low, high = recovery.interval(0.9)
        inside.append(((low <= means) & (means <= high)).mean())
        won.append(error(recovery.means, means) < error(np.tile(recovery.baseline, (8, 1)), means))
    assert all(won)
    assert (
        0.85 <= np.mean(inside) <= 0.98
    )  # a prior for attributes that these groups do not share makes fullrank careful


def test_one_region_says_nothing_about_groups() -> None:
    simulated, _ = simulate(np.full((1, 8), 1 / 8), 500.0, 0)
    recovery = recover(simulated)
    assert recovery.means == pytest.approx(np.tile(simulated.aggregates.values, (8, 1)))
    assert recovery.information() == pytest.approx(np.zeros(8), abs=0.01)


def test_one_group_is_the_population() -> None:
    alone = Groups.of({"everybody": ("all",)})
    simulated, _ = simulate(np.ones((5, 1)), 500.0, 0, alone)
    recovery = recover(simulated)
    assert recovery.means[0] == pytest.approx(recovery.baseline)
    assert recovery.sd == pytest.approx(np.full((1, 30), np.sqrt(1 / 2_500)), rel=1e-6)


def test_a_duplicated_region_counts_as_its_people() -> None:
    shares = dirichlet(10, 8)
    simulated, _ = simulate(shares, 300.0, 1)
    doubled = regions_of(
        np.vstack([shares, shares]),
        np.vstack([simulated.aggregates.values] * 2),
        150.0,
        spread=np.ones(30),
    )
    one = recover(simulated)
    two = recover(doubled)
    assert two.means == pytest.approx(one.means, abs=0.02)
    assert np.isfinite(two.covariance).all()


def test_fewer_regions_than_groups_recover_what_they_can() -> None:
    shares = dirichlet(3, 8, seed=2)
    simulated, means = simulate(shares, 2_000.0, 2)
    recovery = recover(simulated)
    assert np.isfinite(recovery.means).all()
    assert error(shares @ recovery.means, shares @ means) < 0.05
    assert error(recovery.means, means) < error(np.tile(recovery.baseline, (8, 1)), means)


def test_the_estimate_for_a_group_that_no_region_has_is_uncertain() -> None:
    shares = np.hstack([dirichlet(12, 7, seed=3), np.zeros((12, 1))])
    simulated, _ = simulate(shares, 2_000.0, 3)
    recovery = recover(simulated)
    assert np.isfinite(recovery.means).all()
    assert recovery.sd[7].mean() > 2 * recovery.sd[:7].mean()
    assert recovery.information()[7] < 0.5 < recovery.information()[:7].min()


def test_published_noise_widens_the_intervals_of_recovery() -> None:
    shares = dirichlet(30, 8)
    simulated, means = simulate(shares, 1_000.0, 4)
    values = simulated.aggregates.values + np.random.default_rng(1).normal(0, 0.2, (30, 30))
    noisy = recover(
        regions_of(shares, values, 1_000.0, spread=np.ones(30), noise=np.full(values.shape, 0.04))
    )
    assert noisy.sd.mean() > 1.5 * recover(simulated).sd.mean()
    low, high = noisy.interval(0.9)
    assert 0.85 < ((low <= means) & (means <= high)).mean() < 0.98


def counted(shares: Floats, n: int, rng: np.random.Generator) -> Floats:
    return np.stack([rng.multinomial(n, row) for row in shares]) / n


def test_a_composition_counted_on_few_people_does_not_attenuate_differences() -> None:
    """Slope of recovered on true contrasts: n / (n + a) with counts, 1 when calibrated."""
    slopes: dict[bool, list[float]] = {True: [], False: []}
    for seed in range(6):
        rng = np.random.default_rng(seed)
        truth = rng.dirichlet(np.full(4, 5.0), 400)  # a = 20
        simulated, means = simulate(truth, 400.0, seed, FOUR, bins=20)
        few = regions_of(
            counted(truth, 20, rng),
            simulated.aggregates.values,
            400.0,
            FOUR,
            counted=20,
            spread=np.ones(20),
            randomised=False,
        )
        for exact in slopes:
            recovery = recover(few, options=RecoveryOptions(exact_composition=exact))
            wanted = means - means.mean(0)
            got = recovery.means - recovery.means.mean(0)
            slopes[exact].append(float((wanted * got).sum() / (wanted**2).sum()))
    assert np.mean(slopes[True]) < 0.65
    assert 0.85 < np.mean(slopes[False]) < 1.1


def test_calibration_finds_the_expected_composition() -> None:
    """Dirichlet(a w) regions: E[p | counts] is the conjugate (counts + a w) / (n + a)."""
    rng = np.random.default_rng(1)
    w = np.array([0.1, 0.2, 0.3, 0.4])
    a = 30.0
    n = 25
    observed = counted(rng.dirichlet(a * w, 4_000), n, rng)
    composition = Composition(
        FOUR, tuple(map(str, range(4_000))), observed, np.full(4_000, float(n))
    )
    calibrated, error = calibrate_composition(composition)
    assert calibrated == pytest.approx((n * observed + a * w) / (n + a), abs=0.02)
    assert calibrated.sum(1) == pytest.approx(np.ones(4_000))
    assert error is not None


def test_an_exact_composition_needs_no_calibration() -> None:
    shares = dirichlet(6, 4)
    calibrated, error = calibrate_composition(
        Composition(FOUR, tuple("abcdef"), shares, np.full(6, np.inf))
    )
    assert calibrated is shares
    assert error is None


def test_regions_that_do_not_differ_calibrate_to_the_population() -> None:
    rng = np.random.default_rng(0)
    observed = counted(np.tile([0.4, 0.3, 0.2, 0.1], (300, 1)), 15, rng)
    calibrated, _ = calibrate_composition(
        Composition(FOUR, tuple(map(str, range(300))), observed, np.full(300, 15.0))
    )
    assert calibrated.std(0).max() < 0.25 * observed.std(0).max()


def test_slopes_too_steep_for_people_are_mostly_ascribed_to_places() -> None:
    """Regions with older people are other places: ten standard deviations exceed any age effect."""
    rng = np.random.default_rng(3)
    shares = rng.dirichlet(np.full(4, 5.0), 60)
    places = 20 + 10 * rng.normal(size=(4, 10))
    values = shares @ places + rng.normal(0, 0.05, (60, 10))
    recovery = recover(
        regions_of(shares, values, 400.0, FOUR, spread=np.ones(10), randomised=False)
    )
    assert np.abs(recovery.means - recovery.baseline).max() < 2
    assert recovery.sd.min() > 0.1


@pytest.mark.parametrize(("regions", "bins", "groups"), [(1_000, 2_000, 8), (10_000, 50, 8)])
def test_many_regions_and_bins_are_recovered(regions: int, bins: int, groups: int) -> None:
    simulated, means = simulate(dirichlet(regions, groups), 200.0, 0, bins=bins)
    recovery = recover(simulated)
    assert error(recovery.means, means) < 0.2 * error(
        np.tile(recovery.baseline, (groups, 1)), means
    )


def test_least_squares_recover_exactly_where_there_is_no_noise() -> None:
    shares = dirichlet(12, 8)
    means = np.random.default_rng(0).dirichlet(np.ones(6), 8) * 3
    simulated = regions_of(shares, shares @ means)
    assert recover(simulated, "least-squares").means == pytest.approx(means, abs=1e-8)
    assert recover(simulated, "simplex").means == pytest.approx(means, abs=1e-3)
    assert recover(simulated, "simplex").means.sum(1) == pytest.approx(np.full(8, 3.0))


def test_bad_input_is_said_in_a_sentence() -> None:
    simulated, _ = simulate(dirichlet(4, 8), 100.0, 0)
    with pytest.raises(MobatlasError, match=f"'magic' does not exist.*{METHODS[0]}"):
        recover(simulated, "magic")
    shares = simulated.composition.shares
    values = simulated.aggregates.values
    with pytest.raises(MobatlasError, match="region 'R2' has no people; remove it"):
        recover(regions_of(shares, values, np.array([5, 5, 0, 5.0])))
    with pytest.raises(MobatlasError, match="nothing can be estimated"):
        recover(regions_of(shares, np.full_like(values, np.nan)))
    with pytest.raises(MobatlasError, match="no feature is left"):
        recover(regions_of(shares, values[:, :0]))
    with pytest.raises(MobatlasError, match="some shares are missing"):
        recover(regions_of(np.where(shares > 0.9, np.nan, shares) * np.nan, values))
    with pytest.raises(
        MobatlasError,
        match=r"the population has \(groups, features\) \(2, 30\), but the regions have \(8, 30\)",
    ):
        replace(simulated, population=Population(np.full(2, 0.5), np.ones(30), 500.0))
    with pytest.raises(MobatlasError, match="must list the same regions"):
        Regions(simulated.composition, simulate(dirichlet(5, 8), 9.0, 0)[0].aggregates, True)
