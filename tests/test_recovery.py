"""Recovery of group means: simulations with known truth, limits, and bad input."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.least_squares import least_squares, least_squares_on_simplex
from mobatlas import MobatlasError
from mobatlas.data.types import Floats, Ints
from mobatlas.groups import DEFAULT_GROUPS, Groups
from mobatlas.regions.partitions import nominal_partition
from mobatlas.regions.recovery.recover import RecoveryOptions, recover
from mobatlas.regions.types import (
    GroupEvidence,
    Population,
    Recovery,
    Regions,
    population_mean,
    with_rest,
)
from tests.regional import (
    FOUR,
    THREE,
    TWO,
    baseline_error,
    coverage,
    dirichlet,
    error,
    group_means,
    regions_of,
    simulate,
)

PARTITIONS = ["demogroups", "fullrank", "rankdef", "messy", "hot16", "dirichlet:24:0.5"]
SEEDS = range(5)


def relative_error(recovery: Recovery, truth: Floats) -> float:
    """The error relative to that of the population mean."""
    return error(recovery.means, truth) / baseline_error(recovery, truth)


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    regions=st.integers(1, 20),
    groups=st.sampled_from([TWO, THREE, FOUR]),
    randomised=st.booleans(),
)
def test_means_are_positive_and_the_groups_together_are_the_population(
    seed: int, regions: int, groups: Groups, randomised: bool
) -> None:
    n = np.random.default_rng(seed).integers(20, 2_000, regions).astype(float)
    simulated, _ = simulate(
        dirichlet(regions, len(groups), seed=seed), n, seed, groups, bins=4, sd=1.0, mean=0.2
    )
    recovery = recover(replace(simulated, randomised=randomised), quiet=True)
    w, mu0 = population_mean(simulated.composition.shares, simulated.aggregates)
    assert w @ recovery.means == pytest.approx(mu0, rel=1e-6)
    assert (recovery.means[:, mu0 > 0] > 0).all()
    low, high = recovery.interval(0.9)
    assert (low >= 0).all() and (low <= recovery.means).all() and (recovery.means <= high).all()
    assert np.linalg.eigvalsh(recovery.covariance).min() > -1e-9


@pytest.mark.parametrize("name", PARTITIONS)
def test_recovery_beats_the_population_mean_and_covers_the_truth(name: str) -> None:
    shares = nominal_partition(name, DEFAULT_GROUPS).shares
    inside = []
    relative = []
    for seed in SEEDS:
        simulated, means = simulate(shares, 400.0, seed)
        recovery = recover(simulated)
        inside.append(coverage(recovery, means))
        relative.append(relative_error(recovery, means))
    assert max(relative) < 1
    assert np.mean(inside) > 0.85


def test_intervals_are_not_too_wide_where_regions_identify_the_groups() -> None:
    shares = nominal_partition("demogroups", DEFAULT_GROUPS).shares
    inside = [
        coverage(recover(simulated), means)
        for simulated, means in (simulate(shares, 400.0, seed) for seed in range(10))
    ]
    assert 0.86 < np.mean(inside) < 0.97


@pytest.mark.parametrize("level", [0.5, 0.8])
def test_intervals_of_other_levels_cover_as_often_as_they_say(level: float) -> None:
    inside = []
    for seed in range(10):
        simulated, means = simulate(dirichlet(24, 8, seed=seed), 400.0, seed)
        inside.append(coverage(recover(simulated), means, level))
    assert np.mean(inside) == pytest.approx(level, abs=0.06)


def people_in_places(seed: int, *, shuffled: bool) -> tuple[Regions, Floats]:
    """People choose a region by group; regions differ beside their people, or are shuffled.

    Persons visit with rates of their own, so counts vary more than Poisson's.
    """
    rng = np.random.default_rng(seed)
    regions = 60
    means = group_means(FOUR, 15, seed, 0.25, 3.0)
    shares = rng.dirichlet(np.full(4, 6.0), regions)
    group = np.concatenate([rng.choice(4, 150, p=row) for row in shares])
    region = np.arange(regions).repeat(150)
    places = np.exp(rng.normal(0, 0.08, (regions, 15)))
    rates = means[group] * (1.0 if shuffled else places[region])
    counts = rng.poisson(rates * rng.gamma(4, 1 / 4, rates.shape))
    if shuffled:
        region = rng.permutation(region)
    values = np.zeros((regions, 15))
    np.add.at(values, region, counts)
    composition = np.zeros((regions, 4))
    np.add.at(composition, (region, group), 1)
    spread = counts.var(0, ddof=1)
    simulated = regions_of(
        composition / 150, values / 150, 150.0, FOUR, spread=spread, randomised=False
    )
    truth = np.stack([counts[group == each].mean(0) for each in range(4)])
    return simulated, truth if shuffled else means


@pytest.mark.parametrize("groups_explain", [0.2, 100])
def test_intervals_cover_the_truth_where_people_chose_their_regions(groups_explain: float) -> None:
    inside = []
    options = RecoveryOptions(groups_explain=groups_explain)
    for seed in range(8):
        simulated, truth = people_in_places(seed, shuffled=False)
        recovery = recover(simulated, options=options, quiet=True)
        inside.append(coverage(recovery, truth))
        assert relative_error(recovery, truth) < 1
    assert np.mean(inside) > 0.85


def test_intervals_cover_the_truth_where_regions_are_shuffled() -> None:
    """The composition of shuffled regions varies by chance alone."""
    measured = [
        (coverage(recovery, truth), relative_error(recovery, truth))
        for recovery, truth in (
            (recover(simulated, quiet=True), truth)
            for simulated, truth in (people_in_places(seed, shuffled=True) for seed in range(8))
        )
    ]
    inside, relative = np.mean(measured, axis=0)
    assert inside > 0.85
    assert relative < 1


@pytest.mark.parametrize("randomised", [True, False])
def test_shuffled_aggregates_leave_wide_intervals(randomised: bool) -> None:
    """Aggregates are of other people than the composition says, so they say nothing of groups."""
    inside = []
    relative = []
    for seed in SEEDS:
        means = group_means(FOUR, 30, seed)
        values = np.random.default_rng(seed).poisson(300 * np.tile(means.mean(0), (24, 1))) / 300
        shares = dirichlet(24, 4, 2.0, seed)
        shuffled = regions_of(shares, values, 300.0, FOUR, randomised=randomised)
        recovery = recover(shuffled, quiet=True)
        inside.append(coverage(recovery, means))
        relative.append(relative_error(recovery, means))
    assert np.mean(relative) < 1.05
    assert np.mean(inside) > 0.85


def test_identical_regions_leave_the_population_mean_with_wide_intervals() -> None:
    mixed = np.tile([0.1, 0.2, 0.3, 0.4], (12, 1))
    simulated, means = simulate(mixed, 2_000.0, 3, FOUR)
    for randomised in (True, False):
        recovery = recover(replace(simulated, randomised=randomised), quiet=True)
        ratio = recovery.means / recovery.baseline
        assert ratio == pytest.approx(np.ones_like(ratio), abs=0.05)
        assert coverage(recovery, means) > 0.85
        assert recovery.information().max() < 0.3
    apart, _ = simulate(np.eye(4).repeat(3, 0), 2_000.0, 3, FOUR)
    assert recovery.log_sd.mean() > 3 * recover(apart).log_sd.mean()


def test_directions_that_regions_do_not_identify_stay_at_the_population_mean() -> None:
    """Regions differ in age only: men and women of an age get equal means and wide intervals."""
    ages = dirichlet(12, 4, seed=4)
    simulated, _ = simulate(np.repeat(ages, 2, axis=1) / 2, 2_000.0, 8)
    recovery = recover(simulated)
    assert recovery.means[::2] == pytest.approx(recovery.means[1::2], rel=0.02)
    gap = np.array([1, -1, 0, 0, 0, 0, 0, 0.0])
    age = np.array([1, 1, 0, 0, 0, 0, -1, -1.0]) / 2
    unknown, known = (
        np.sqrt(np.einsum("i,jik,k->j", c, recovery.covariance, c)).mean() for c in (gap, age)
    )
    assert unknown > 4 * known


def test_rank_deficient_regions_are_as_good_as_the_identified_part() -> None:
    """Every region is half men, half women; what remains are four directions of seven."""
    shares = nominal_partition("rankdef", DEFAULT_GROUPS).shares
    relative = []
    for seed in range(12):
        simulated, means = simulate(shares, 2_000.0, seed)
        recovery = recover(simulated)
        relative.append(relative_error(recovery, means))
        fitted = shares @ recovery.means
        assert error(fitted, shares @ means) < np.sqrt(1 / 2_000), "the sampling error of a region"
        assert coverage(recovery, means) > 0.8
    assert np.mean(relative) < 0.85
    assert max(relative) < 1.05


def test_one_region_says_nothing_about_groups() -> None:
    simulated, _ = simulate(np.full((1, 8), 1 / 8), 500.0, 0)
    recovery = recover(simulated)
    same = np.tile(simulated.aggregates.values, (8, 1))
    assert recovery.means == pytest.approx(same, rel=0.02)
    assert recovery.information().max() < 0.3


def test_one_group_is_the_population() -> None:
    alone = Groups.of({"everybody": ("all",)})
    simulated, _ = simulate(np.ones((5, 1)), 500.0, 0, alone)
    recovery = recover(simulated)
    assert recovery.means[0] == pytest.approx(recovery.baseline)
    # Poisson counts of 2,500 people.
    expected = np.sqrt(recovery.baseline / 2_500)
    assert recovery.sd[0] == pytest.approx(expected, rel=0.05)


def test_a_duplicated_region_counts_as_its_people() -> None:
    shares = dirichlet(10, 8)
    simulated, _ = simulate(shares, 300.0, 1)
    doubled = regions_of(
        np.vstack([shares, shares]), np.vstack([simulated.aggregates.values] * 2), 150.0
    )
    one = recover(simulated)
    two = recover(doubled)
    assert two.means == pytest.approx(one.means, rel=0.02)
    assert two.sd == pytest.approx(one.sd, rel=0.05)


def test_more_people_narrow_the_intervals_as_the_square_root_of_their_number() -> None:
    shares = np.eye(4).repeat(5, 0)
    few, many = (
        recover(simulate(shares, n, 2, FOUR, mean=3.0)[0]).log_sd.mean() for n in (200.0, 20_000.0)
    )
    assert few / many == pytest.approx(10, rel=0.15)


def test_fewer_regions_than_groups_recover_what_they_can() -> None:
    shares = dirichlet(3, 8, seed=2)
    simulated, means = simulate(shares, 2_000.0, 2)
    recovery = recover(simulated)
    assert error(shares @ recovery.means, shares @ means) < 0.05
    assert relative_error(recovery, means) < 1


def test_the_estimate_for_a_group_that_no_region_has_is_uncertain() -> None:
    shares = np.hstack([dirichlet(12, 7, seed=3), np.zeros((12, 1))])
    simulated, _ = simulate(shares, 2_000.0, 3)
    recovery = recover(simulated)
    assert np.isfinite(recovery.means).all()
    assert recovery.log_sd[7].mean() > 2 * recovery.log_sd[:7].mean()
    assert recovery.information()[7] < 0.6 < recovery.information()[:7].min()


def test_the_size_of_group_differences_is_estimated() -> None:
    """Half of the variance is due to age, half to each group, none to sex."""
    age = Groups.of({"age": tuple("abcdef"), "sex": ("M", "F")})
    simulated, _ = simulate(np.eye(12).repeat(2, 0), 2_000.0, 4, age, bins=150, sd=0.4)
    variances = recover(simulated).variances
    assert variances["sd_age"] == pytest.approx(0.4 / np.sqrt(2), rel=0.15)
    assert variances["sd_group"] == pytest.approx(0.4 / np.sqrt(2), rel=0.15)
    assert variances["sd_sex"] < 0.08


def test_an_attribute_that_regions_identify_informs_groups_that_they_do_not() -> None:
    """Of old people there are only men in the regions; women differ from men everywhere."""
    rng = np.random.default_rng(0)
    ages = Groups.of({"age": tuple("abcdef"), "sex": ("M", "F")})
    women = rng.normal(0, 0.5, 40)
    means = np.exp(np.outer(np.tile([-0.5, 0.5], 6), women) + rng.normal(0, 0.05, (12, 40)))
    shares = np.eye(12)[:11]
    values = rng.poisson(2_000 * shares @ means) / 2_000
    everyone = Population(np.full(12, 1 / 12), values.mean(0), 50_000.0)
    regions = replace(regions_of(shares, values, 2_000.0, ages), population=everyone)
    recovery = recover(replace(regions, randomised=False), options=RecoveryOptions(False, True))
    estimate = np.log(recovery.means[11] / recovery.means[10])
    assert np.corrcoef(estimate, women)[0, 1] > 0.9
    assert recovery.log_sd[11].mean() > 1.5 * recovery.log_sd[:11].mean()


@pytest.mark.parametrize(("groups", "sd"), [(FOUR, 1.2), (DEFAULT_GROUPS, 0.8)])
def test_regions_that_say_nothing_do_not_shrink_what_labels_say(groups: Groups, sd: float) -> None:
    size = len(groups)
    inside = []
    for seed in range(6):
        means = group_means(groups, 100, seed, sd, 0.02)
        values = np.random.default_rng(seed).poisson(300 * np.tile(means.mean(0), (24, 1))) / 300
        shuffled = regions_of(dirichlet(24, size, 2.0, seed), values, 300.0, groups)
        recovery = recover(replace(shuffled, evidence=(labelled(means, 25, seed),)), quiet=True)
        inside.append(coverage(recovery, means))
    assert np.mean(inside) > 0.85


@pytest.mark.parametrize("name", ["demogroups", "fullrank", "hot16", "messy", "rankdef", "zones"])
def test_a_behaviour_of_some_ages_only_is_covered_or_reported(name: str) -> None:
    """Only people of 30 to 50 work; less than 1 % of the mean counts as nothing."""
    inside = []
    notes = 0
    age = DEFAULT_GROUPS.level_codes[:, 0]
    for seed in SEEDS:
        means = group_means(DEFAULT_GROUPS, 30, seed)
        means[:, 0] = np.where((age == 1) | (age == 2), 2.0, 0.0)
        if name == "zones":
            shares = dirichlet(60, 8, 3.0, seed)
        else:
            shares = nominal_partition(name, DEFAULT_GROUPS).shares
        values = np.random.default_rng([seed, 1]).poisson(400 * shares @ means) / 400
        recovery = recover(
            regions_of(shares, values, 400.0, randomised=name != "zones"), quiet=True
        )
        low, high = (each[:, 0] for each in recovery.interval(0.9))
        nothing = 0.01 * recovery.baseline[0]
        inside.append((low - nothing <= means[:, 0]) & (means[:, 0] <= high))
        notes += bool(recovery.notes)
    assert np.mean(inside) > 0.85 or notes == len(SEEDS)


# Suppressed cells, shares of visits, and noise


def with_holes(simulated: Regions, cells: tuple[list[int], list[int]]) -> Regions:
    values = simulated.aggregates.values.copy()
    values[cells] = np.nan
    return replace(simulated, aggregates=replace(simulated.aggregates, values=values))


def test_suppressed_cells_are_ignored() -> None:
    """Hidden cells of a bin are as its absence from those regions, if the baseline is known."""
    shares = dirichlet(14, 4, seed=5)
    simulated, means = simulate(shares, 3_000.0, 5, FOUR, bins=20)
    rows, columns = np.nonzero(np.random.default_rng(0).random((14, 20)) < 0.2)
    recovery = recover(with_holes(simulated, (rows.tolist(), columns.tolist())))
    assert relative_error(recovery, means) < 0.5
    assert coverage(recovery, means) > 0.8
    whole = recover(simulated)
    hidden = np.unique(columns)
    assert (recovery.log_sd[:, hidden].mean(0) > whole.log_sd[:, hidden].mean(0)).mean() > 0.8


def test_a_cell_is_suppressed_whatever_other_bins_have_there() -> None:
    """A region that suppresses everything is as if it were left out, for a known population."""
    shares = dirichlet(12, 4, seed=6)
    simulated, _ = simulate(shares, 500.0, 6, FOUR)
    simulated = replace(simulated, randomised=False)
    options = RecoveryOptions(region_effects=False, exact_composition=True)
    empty = with_holes(simulated, ([3] * 30, list(range(30))))
    rest = np.setdiff1d(np.arange(12), [3])
    hidden = recover(empty, options=options)
    absent = recover(simulated.select(rest), options=options)
    # Only the composition of the population differs, by one region of twelve.
    relative = [each.means / each.baseline for each in (hidden, absent)]
    assert relative[0] == pytest.approx(relative[1], rel=0.2)
    assert np.corrcoef(np.log(relative[0]).ravel(), np.log(relative[1]).ravel())[0, 1] > 0.97


def test_a_bin_that_every_region_suppressed_is_unknown() -> None:
    simulated, _ = simulate(dirichlet(10, 8), 500.0, 6, bins=4)
    recovery = recover(with_holes(simulated, (list(range(10)), [2] * 10)))
    assert np.isfinite(recovery.means).all()
    assert np.ptp(recovery.means[:, 2]) == 0


def test_shares_of_visits_without_numbers_of_people_give_group_means() -> None:
    """With `pooled`, regions have no numbers of people: their differences show the precision."""
    inside = []
    relative = []
    for seed in SEEDS:
        simulated, means = simulate(dirichlet(40, 4, seed=seed), 300.0, seed, FOUR)
        pooled = replace(
            simulated, randomised=False, aggregates=replace(simulated.aggregates, pooled=True)
        )
        recovery = recover(pooled, options=RecoveryOptions(groups_explain=100), quiet=True)
        assert recovery.variances["region_effect"] > 0.02
        inside.append(coverage(recovery, means))
        relative.append(relative_error(recovery, means))
    assert np.mean(relative) < 0.5
    assert np.mean(inside) > 0.85


def test_published_noise_widens_the_intervals_of_recovery() -> None:
    shares = dirichlet(30, 8)
    simulated, means = simulate(shares, 1_000.0, 4)
    values = simulated.aggregates.values + np.random.default_rng(1).normal(0, 0.2, (30, 30))
    noisy = recover(regions_of(shares, values, 1_000.0, noise=np.full(values.shape, 0.04)))
    assert noisy.sd.mean() > 1.5 * recover(simulated).sd.mean()
    assert coverage(noisy, means) > 0.85
    careless = recover(regions_of(shares, values, 1_000.0))
    assert relative_error(noisy, means) < relative_error(careless, means)


# Compositions with errors


def counted(shares: Floats, n: int, rng: np.random.Generator) -> Floats:
    return np.stack([rng.multinomial(n, row) for row in shares]) / n


def counted_regions(seed: int) -> tuple[Regions, Floats]:
    """400 regions with the aggregates of many people and the composition of 20."""
    rng = np.random.default_rng(seed)
    truth = rng.dirichlet(np.full(4, 5.0), 400)  # a = 20
    simulated, means = simulate(truth, 400.0, seed, FOUR, bins=20, sd=0.2)
    shares = counted(truth, 20, rng)
    values = simulated.aggregates.values
    return regions_of(shares, values, 400.0, FOUR, counted=20, randomised=False), means


def slope(recovery: Recovery, truth: Floats) -> float:
    """The regression of recovered contrasts on true ones."""
    wanted = truth - truth.mean(0)
    return float((wanted * recovery.means).sum() / (wanted**2).sum())


def test_a_composition_counted_on_few_people_does_not_attenuate_differences() -> None:
    """Slope of recovered on true contrasts: n / (n + a) with counts, 1 when calibrated."""
    slopes: dict[bool, list[float]] = {True: [], False: []}
    for seed in range(4):
        few, means = counted_regions(seed)
        for exact in slopes:
            options = RecoveryOptions(exact_composition=exact, groups_explain=100)
            slopes[exact].append(slope(recover(few, options=options, quiet=True), means))
    assert np.mean(slopes[True]) < 0.65
    assert 0.85 < np.mean(slopes[False]) < 1.1


@pytest.mark.parametrize("people", [40, 100])
def test_intervals_allow_for_errors_of_counted_compositions(people: int) -> None:
    inside = []
    for seed in range(8):
        rng = np.random.default_rng(seed)
        truth = rng.dirichlet(np.full(4, 2.0), 60)
        simulated, means = simulate(truth, 5_000.0, seed, FOUR, sd=0.4)
        shares = counted(truth, people, rng)
        values = simulated.aggregates.values
        few = regions_of(shares, values, 5_000.0, FOUR, counted=people, randomised=False)
        recovery = recover(few, options=RecoveryOptions(region_effects=False), quiet=True)
        inside.append(coverage(recovery, means))
    assert np.mean(inside) > 0.85


def test_counting_errors_do_not_make_clear_slopes_doubtful() -> None:
    for seed in range(6):
        few, means = counted_regions(seed)
        assert slope(recover(few, quiet=True), means) > 0.7


# The limit on what groups explain


def test_slopes_too_steep_for_people_are_mostly_attributed_to_places() -> None:
    """Regions with older people are other places: ten standard deviations exceed any age effect."""
    rng = np.random.default_rng(3)
    shares = rng.dirichlet(np.full(4, 5.0), 60)
    places = 20 + 10 * rng.normal(size=(4, 10))
    values = np.maximum(shares @ places + rng.normal(0, 0.05, (60, 10)), 0)
    steep = regions_of(shares, values, 400.0, FOUR, spread=np.ones(10), randomised=False)
    limited = recover(steep, quiet=True)
    assert np.abs(limited.means - limited.baseline).max() < 3
    assert limited.group_share.max() < 0.1
    free = recover(steep, options=RecoveryOptions(groups_explain=100), quiet=True)
    assert np.abs(free.means - free.baseline).max() > 10
    assert free.group_share == pytest.approx(np.ones(10))


def test_slopes_that_groups_can_explain_are_attributed_to_them() -> None:
    for seed in range(3):
        simulated, means = simulate(dirichlet(80, 4, 5.0, seed), 2_000.0, seed, FOUR, sd=0.2)
        recovery = recover(replace(simulated, randomised=False), quiet=True)
        assert recovery.group_share.mean() > 0.8
        assert relative_error(recovery, means) < 0.35


# Equivariance


def permuted(simulated: Regions, rows: Ints, columns: Ints) -> Regions:
    p = simulated.composition
    v = simulated.aggregates
    return Regions(p.select(rows), v.select(rows).select_features(columns), simulated.randomised)


@pytest.mark.parametrize("randomised", [True, False])
def test_the_order_of_regions_and_features_does_not_matter(randomised: bool) -> None:
    simulated, _ = simulate(dirichlet(20, 4, seed=2), 300.0, 2, FOUR, bins=12)
    simulated = replace(simulated, randomised=randomised)
    rng = np.random.default_rng(0)
    columns = rng.permutation(12)
    one = recover(simulated, quiet=True)
    other = recover(permuted(simulated, rng.permutation(20), columns), quiet=True)
    assert other.features == tuple(one.features[number] for number in columns)
    assert other.means == pytest.approx(one.means[:, columns], rel=1e-3)
    assert other.sd == pytest.approx(one.sd[:, columns], rel=1e-2)


@pytest.mark.parametrize("randomised", [True, False])
def test_the_order_of_levels_does_not_matter(randomised: bool) -> None:
    """FOUR with its ages and its sexes in the other order."""
    simulated, _ = simulate(dirichlet(20, 4, seed=3), 300.0, 3, FOUR, bins=12)
    simulated = replace(simulated, randomised=randomised)
    turned = Groups.of({"age": ("old", "young"), "sex": ("F", "M")})
    order = [FOUR.names.index(name) for name in turned.names]
    composition = replace(
        simulated.composition,
        groups=turned,
        shares=simulated.composition.shares[:, order],
    )
    one = recover(simulated, quiet=True)
    other = recover(replace(simulated, composition=composition), quiet=True)
    assert other.means == pytest.approx(one.means[order], rel=1e-3)
    assert other.sd == pytest.approx(one.sd[order], rel=1e-2)


def test_a_rare_activity_is_a_frequent_one_of_more_people() -> None:
    """Poisson counts of n people with means M are those of 64 n people with M / 64."""
    shares = dirichlet(20, 4, seed=4)
    simulated, _ = simulate(shares, 300.0, 4, FOUR)
    often = recover(simulated)
    rare = recover(regions_of(shares, simulated.aggregates.values / 64, 64 * 300.0, FOUR))
    assert 64 * rare.means == pytest.approx(often.means, rel=1e-3)
    assert rare.log_sd == pytest.approx(often.log_sd, rel=1e-2)


# Labelled people and tables


def labelled(
    truth: Floats, people: Floats | float, seed: int = 0, features: int | None = None
) -> GroupEvidence:
    """Mean counts of labelled people of each group, in the first `features`."""
    n = np.broadcast_to(np.asarray(people, dtype=np.float64), (len(truth),))
    chosen = truth[:, :features]
    values = np.random.default_rng([seed, 2]).poisson(chosen * n[:, None]) / n[:, None]
    names = tuple(f"category:{number}" for number in range(chosen.shape[1]))
    return GroupEvidence("labelled people", "labelled", np.eye(len(truth)), names, values, n)


def zones(seed: int, regions: int = 40) -> tuple[Regions, Floats]:
    """Regions whose people chose them; half of the slopes are due to places."""
    rng = np.random.default_rng([seed, 3])
    shares = dirichlet(regions, 4, 6.0, seed)
    means = group_means(FOUR, 20, seed, 0.3)
    context = np.exp(rng.normal(0, 0.3, (4, 20)))
    noise = np.exp(rng.normal(0, 0.05, (regions, 20)))
    values = rng.poisson(300 * shares @ (means * context) * noise) / 300
    return regions_of(shares, values, 300.0, FOUR, randomised=False), means


def shape_error(recovery: Recovery, truth: Floats) -> float:
    """The error of log ratios between groups."""
    gap = np.log(recovery.means) - np.log(truth)
    return float(np.sqrt(((gap - gap.mean(0)) ** 2).mean()))


def test_estimates_approach_the_labelled_means_as_labels_grow() -> None:
    sizes = [0, 25, 200, 20_000]
    left = np.zeros((4, len(sizes)))
    inside = np.zeros((4, len(sizes)))
    for seed in range(4):
        regions, means = zones(seed)
        for column, people in enumerate(sizes):
            direct = (labelled(means, people, seed),) if people else ()
            recovery = recover(replace(regions, evidence=direct), quiet=True)
            left[seed, column] = shape_error(recovery, means)
            # Regions fix the mean of the population, which places change here too.
            ratio = means / (recovery.shares @ means) * recovery.baseline
            inside[seed, column] = coverage(recovery, ratio)
    assert (np.diff(left.mean(0)) < 0).all()
    assert left.mean(0)[-1] < 0.1 * left.mean(0)[0]
    assert (inside.mean(0) > 0.85).all()


def test_labelled_people_beside_regions_are_better_than_either() -> None:
    errors: dict[str, list[float]] = {"regions": [], "labels": [], "both": []}
    for seed in range(5):
        regions, means = zones(seed)
        direct = labelled(means, 40, seed)
        uninformative = regions_of(
            np.tile(regions.composition.shares.mean(0), (4, 1)),
            np.tile(regions.aggregates.values.mean(0), (4, 1)),
            300.0,
            FOUR,
            randomised=False,
        )
        for name, chosen in (
            ("regions", regions),
            ("labels", replace(uninformative, evidence=(direct,))),
            ("both", replace(regions, evidence=(direct,))),
        ):
            errors[name].append(shape_error(recover(chosen, quiet=True), means))
    assert np.mean(errors["both"]) < 0.95 * min(
        np.mean(errors["regions"]), np.mean(errors["labels"])
    )


def test_labels_show_that_regions_are_confounded() -> None:
    """Slopes of these regions have the wrong sign; labelled people outweigh them."""
    means = group_means(FOUR, 20, 0, 0.3)
    shares = dirichlet(60, 4, 6.0)
    rng = np.random.default_rng(0)
    values = rng.poisson(2_000 * shares @ (1 / means)) / 2_000
    regions = regions_of(shares, values, 2_000.0, FOUR, randomised=False)
    alone = recover(regions, quiet=True)
    informed = recover(replace(regions, evidence=(labelled(means, 400),)), quiet=True)
    truth = np.log(means) - np.log(means).mean(0)

    def agreement(recovery: Recovery) -> float:
        found = np.log(recovery.means)
        return float(np.corrcoef((found - found.mean(0)).ravel(), truth.ravel())[0, 1])

    assert agreement(alone) < -0.5
    assert agreement(informed) > 0.9
    assert informed.sources["labelled people"].mean() > 0.6 > informed.sources["regions"].mean()


def test_a_sample_of_more_active_people_does_not_bias_the_ratios() -> None:
    """Labelled people go out twice as often as others of their group: a level is no difference."""
    for seed in range(3):
        regions, means = zones(seed)
        fair = recover(replace(regions, evidence=(labelled(means, 400, seed),)), quiet=True)
        active = recover(replace(regions, evidence=(labelled(2 * means, 400, seed),)), quiet=True)
        assert shape_error(active, means) < shape_error(fair, means) + 0.05
        assert active.shares @ active.means == pytest.approx(active.baseline, rel=1e-6)


def test_a_sample_mostly_of_one_group_is_no_worse_than_regions_alone() -> None:
    for seed in range(4):
        regions, means = zones(seed)
        alone = recover(regions, quiet=True)
        uneven = labelled(means, np.array([600.0, 10.0, 10.0, 10.0]), seed)
        with_sample = recover(replace(regions, evidence=(uneven,)), quiet=True)
        assert shape_error(with_sample, means) < shape_error(alone, means)


def table(
    truth: Floats, shares: Floats | None = None, error_of: float = 0.02, seed: int = 0
) -> GroupEvidence:
    """A published table of means of mixtures of groups, with standard errors."""
    shares = np.eye(len(truth)) if shares is None else shares
    values = shares @ truth
    errors = error_of * values
    values = values + np.random.default_rng([seed, 4]).normal(size=values.shape) * errors
    names = tuple(f"category:{number}" for number in range(truth.shape[1]))
    return GroupEvidence(
        "survey.csv",
        "table",
        shares,
        names,
        np.maximum(values, 0),
        np.full(len(shares), np.inf),
        standard_error=errors,
    )


def test_a_group_table_improves_the_estimate() -> None:
    for seed in range(3):
        regions, means = zones(seed)
        alone = recover(regions, quiet=True)
        informed = recover(replace(regions, evidence=(table(means, seed=seed),)), quiet=True)
        assert shape_error(informed, means) < 0.5 * shape_error(alone, means)


def test_a_table_that_halves_the_error_is_a_main_source() -> None:
    regions, means = zones(0)
    sources = recover(replace(regions, evidence=(table(means),)), quiet=True).sources
    assert sources["survey.csv"].mean() > max(0.25, sources["regions"].mean())


def test_a_table_by_age_informs_ages_and_leaves_sexes_to_regions() -> None:
    ages = np.array([[0.5, 0.5, 0, 0], [0, 0, 0.5, 0.5]])
    regions, means = zones(1)
    alone = recover(regions, quiet=True)
    informed = recover(replace(regions, evidence=(table(means, ages),)), quiet=True)

    def gap(recovery: Recovery, contrast: list[float]) -> float:
        difference = np.array(contrast) @ (np.log(recovery.means) - np.log(means))
        return float(np.sqrt((difference**2).mean()))

    assert gap(informed, [1, 1, -1, -1]) < 0.4 * gap(alone, [1, 1, -1, -1])
    sexes = [1.0, -1, 1, -1]
    assert gap(informed, sexes) == pytest.approx(gap(alone, sexes), rel=0.5)


def test_a_table_that_contradicts_regions_and_labels_has_little_weight() -> None:
    for seed in range(3):
        regions, means = zones(seed)
        people = labelled(means, 300, seed)
        shuffled = table(means[[3, 2, 1, 0]], seed=seed)
        without = recover(replace(regions, evidence=(people,)), quiet=True)
        true_table = recover(replace(regions, evidence=(people, table(means))), quiet=True)
        wrong = recover(replace(regions, evidence=(people, shuffled)), quiet=True)
        assert shape_error(wrong, means) < 1.15 * shape_error(without, means)
        assert shape_error(true_table, means) < shape_error(without, means)


def eight_in_zones(seed: int) -> tuple[Regions, Floats]:
    """Eight groups that differ by age and by sex, in regions whose people chose them."""
    means = group_means(DEFAULT_GROUPS, 30, seed, 0.4)
    shares = dirichlet(80, 8, 3.0, seed)
    values = np.random.default_rng([seed, 5]).poisson(400 * shares @ means) / 400
    return regions_of(shares, values, 400.0, randomised=False), means


def test_a_table_with_shuffled_groups_is_reported_and_left_out() -> None:
    for seed in range(4):
        regions, means = eight_in_zones(seed)
        order = np.random.default_rng(seed).permutation(8)
        wrong = replace(regions, evidence=(table(means[order], seed=seed),))
        recovery = recover(wrong, quiet=True)
        assert any("contradicts" in note and "survey.csv" in note for note in recovery.notes)
        assert recovery.means == pytest.approx(recover(regions, quiet=True).means)


def test_a_true_table_is_kept_also_from_elsewhere_or_by_age_alone() -> None:
    by_age = np.kron(np.eye(4), np.full((1, 2), 0.5))
    for seed in range(4):
        regions, means = eight_in_zones(seed)
        different = means * np.exp(np.random.default_rng([seed, 6]).normal(0, 0.2, means.shape))
        elsewhere = replace(table(3 * different, seed=seed), same_population=False)
        for evidence in (table(means, seed=seed), table(means, by_age, seed=seed), elsewhere):
            recovery = recover(replace(regions, evidence=(evidence,)), quiet=True)
            assert not any("contradicts" in note for note in recovery.notes)
            assert recovery.sources["survey.csv"].mean() > 0.05


def test_shares_of_information_sum_to_one() -> None:
    regions, means = zones(0)
    evidence = (labelled(means, 50, features=10), table(means))
    recovery = recover(replace(regions, evidence=evidence), quiet=True)
    assert set(recovery.sources) == {"regions", "labelled people", "survey.csv", "assumption"}
    total = sum(recovery.sources.values())
    assert total == pytest.approx(np.ones((4, 20)), abs=1e-6)
    assert min(each.min() for each in recovery.sources.values()) >= 0
    unlabelled = recovery.sources["labelled people"][:, 10:].mean()
    assert unlabelled < recovery.sources["labelled people"][:, :10].mean()


# The rest of the population


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
    recovery = recover(known)
    assert recovery.shares == pytest.approx(w)
    assert recovery.baseline == pytest.approx(mu0)
    poor = recover(alone)
    assert poor.shares == pytest.approx([0.5, 0.5])
    assert w @ recovery.means == pytest.approx(mu0)
    assert error(recovery.means, means) < 0.5 * error(poor.means, means)
    low, high = recovery.interval(0.9)
    assert ((low <= means) & (means <= high)).mean() > 0.75


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
    assert least_squares(simulated) == pytest.approx(means, abs=1e-8)
    on_simplex = least_squares_on_simplex(simulated)
    assert on_simplex == pytest.approx(means, abs=1e-3)
    assert on_simplex.sum(1) == pytest.approx(np.full(8, 3.0))


def test_bad_input_is_said_in_a_sentence() -> None:
    simulated, _ = simulate(dirichlet(4, 8), 100.0, 0)
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
