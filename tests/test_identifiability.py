"""A diagnosis is true of the matrices, and the paper's bounds hold in simulation."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import sparse

from bench.least_squares import pseudo_inverse
from mobatlas import MobatlasError
from mobatlas.data.types import Floats
from mobatlas.groups import DEFAULT_GROUPS, Groups
from mobatlas.regions.aggregates import aggregate
from mobatlas.regions.identifiability import (
    Contrast,
    Diagnosis,
    contrast_vectors,
    diagnose,
    effective_rank,
)
from mobatlas.regions.partitions import PAPER, nominal_partition
from mobatlas.regions.types import Aggregates, Composition, Population

SEX = Groups.of({"sex": ("M", "F")})


def composition_of(
    shares: Floats, groups: Groups = DEFAULT_GROUPS, n: float = np.inf
) -> Composition:
    names = tuple(f"R{number}" for number in range(len(shares)))
    return Composition(groups, names, np.asarray(shares, dtype=np.float64), np.full(len(shares), n))


def of_paper(name: str) -> Diagnosis:
    shares = np.eye(8) if name == "demogroups" else np.array(PAPER[name])
    return diagnose(composition_of(shares), n=1_000)


def contrast(diagnosis: Diagnosis, start: str) -> Contrast:
    return next(each for each in diagnosis.contrasts if each.name.startswith(start))


def test_the_papers_full_rank_matrix_is_all_but_singular() -> None:
    """Every region is half men, half women: the published decimals alone make the rank 8."""
    diagnosis = of_paper("fullrank")
    assert diagnosis.rank == 8
    assert diagnosis.sigma_min == pytest.approx(5.05e-5, rel=0.02)
    assert diagnosis.effective_rank == 7
    assert contrast(diagnosis, "gender").verdict == "not identified"
    assert (
        contrast(diagnosis, "gender").sentence()
        == "gender, averaged over age: not identified by these regions"
    )
    assert contrast(diagnosis, "age: <30 against >50").identified


@pytest.mark.parametrize(
    ("name", "rank", "effective"),
    [("rankdef", 7, 5), ("messy", None, 4), ("demogroups", 8, 8), ("fullrank", 8, 7)],
)
def test_the_effective_ranks_of_the_papers_matrices(
    name: str, rank: int | None, effective: int
) -> None:
    diagnosis = of_paper(name)
    assert diagnosis.effective_rank == effective
    assert rank is None or diagnosis.rank == rank


def test_everything_is_identified_where_groups_live_apart() -> None:
    diagnosis = of_paper("demogroups")
    assert all(each.identified for each in diagnosis.contrasts)
    assert diagnosis.condition_number == pytest.approx(1)
    # Men against women, four regions of 1,000 people each: a difference of two means.
    assert contrast(diagnosis, "gender").standard_error == pytest.approx(np.sqrt(2 / 4 / 1_000))


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**31), regions=st.integers(1, 12))
def test_standard_errors_are_those_of_weighted_least_squares(seed: int, regions: int) -> None:
    rng = np.random.default_rng(seed)
    shares = rng.dirichlet(np.ones(2), regions)
    n = 10_000.0
    diagnosis = diagnose(composition_of(shares, SEX), n=n)
    information = n * shares.T @ shares
    weights = np.array([1.0, -1.0])
    only = diagnosis.contrasts[0]
    if diagnosis.effective_rank == 2:
        assert only.share_identified == pytest.approx(1)
        assert only.standard_error == pytest.approx(
            np.sqrt(weights @ np.linalg.inv(information) @ weights), rel=1e-6
        )
    assert diagnosis.effective_rank == int((np.linalg.eigvalsh(information) > 1).sum())


def test_contrasts_are_differences_of_averages() -> None:
    for name, kind, weights in contrast_vectors(DEFAULT_GROUPS):
        assert weights.sum() == pytest.approx(0, abs=1e-12), name
        assert np.abs(weights).sum() == pytest.approx(2), name
        assert kind in {"attribute", "level", "group"}
    vectors = {name: weights for name, _, weights in contrast_vectors(DEFAULT_GROUPS)}
    assert vectors["gender, averaged over age"].tolist() == [0.25, -0.25] * 4
    assert vectors["30-40, F against the others"][3] == 1


def test_more_people_identify_more() -> None:
    shares = nominal_partition("rankdef", DEFAULT_GROUPS).shares
    ranks = [effective_rank(shares, np.full(8, n)) for n in (1.0, 100.0, 1e4, 1e14)]
    assert ranks == sorted(ranks)
    assert ranks[0] < ranks[-1]


def test_matching_aggregates_determines_group_means() -> None:
    """Lemma "Uniqueness": P of full rank and equal V leave one M; a P of lower rank leaves many."""
    rng = np.random.default_rng(0)
    shares = rng.dirichlet(np.ones(8), 10)
    means = rng.random((8, 5))
    assert pseudo_inverse(shares, shares @ means) == pytest.approx(means)
    poor = rng.dirichlet(np.ones(8), 5)
    null = np.linalg.svd(poor)[2][-1]
    other = means + np.outer(null, np.ones(5))
    assert poor @ other == pytest.approx(poor @ means)


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**31), regions=st.integers(8, 20))
def test_perturbed_aggregates_move_means_by_no_more_than_the_bound(seed: int, regions: int) -> None:
    """Lemma "Stability": |M1 - M2| <= |V1 - V2| / sigma_min, and the worst direction attains it."""
    rng = np.random.default_rng(seed)
    shares = rng.dirichlet(np.ones(8), regions)
    sigma_min = diagnose(composition_of(shares), n=100).sigma_min
    one, two = rng.random((2, regions, 6))
    moved = np.linalg.norm(pseudo_inverse(shares, one) - pseudo_inverse(shares, two))
    assert moved <= np.linalg.norm(one - two) / sigma_min * (1 + 1e-9)
    worst = np.outer(np.linalg.svd(shares, full_matrices=False)[0][:, -1], np.eye(6)[0])
    assert np.linalg.norm(pseudo_inverse(shares, worst)) == pytest.approx(1 / sigma_min, rel=1e-6)


@pytest.mark.parametrize("n", [50, 500])
def test_the_finite_sample_bound_holds_as_often_as_it_says(n: int) -> None:
    """Lemma "Finite Sample Error Bound": people choose one of m bins, so |phi| = 1 = B."""
    rng = np.random.default_rng(n)
    shares = rng.dirichlet(np.ones(8), 16)
    means = rng.dirichlet(np.ones(12), 8)
    composition = composition_of(shares)
    aggregates = Aggregates(
        composition.regions, tuple("abcdefghijkl"), shares @ means, np.full(16, float(n))
    )
    bounds = diagnose(composition, aggregates=aggregates, delta=0.05).bounds
    assert (bounds.n_min, bounds.features, bounds.feature_bound) == (n, 12, 1.0)
    observed = np.stack([rng.multinomial(n, row, size=200) for row in shares @ means], axis=1) / n
    errors = np.array(
        [np.linalg.norm(pseudo_inverse(shares, values) - means) for values in observed]
    )
    assert (errors <= bounds.finite_sample).mean() >= 0.95
    # and with what a fit leaves (Theorem "Overall bound")
    left = rng.normal(0, 0.05, observed[0].shape)
    overall = bounds.finite_sample * (1 + np.linalg.norm(left) / bounds.sampling_error)
    fitted = np.array(
        [np.linalg.norm(pseudo_inverse(shares, values + left) - means) for values in observed]
    )
    assert (fitted <= overall).mean() >= 0.95
    sigma = np.linalg.svd(shares, compute_uv=False)[-1]
    assert overall == pytest.approx((np.linalg.norm(left) + bounds.sampling_error) / sigma)


def test_the_bound_is_the_papers_formula() -> None:
    bounds = diagnose(composition_of(np.eye(8)), n=400, delta=0.1).bounds
    expected = (np.sqrt(1) + np.sqrt(2 * np.log(8 / 0.1))) / np.sqrt(400) * np.sqrt(8)
    assert bounds.sampling_error == pytest.approx(expected)
    assert bounds.finite_sample == pytest.approx(expected)  # sigma_min of the identity is 1


def test_the_bound_uses_the_largest_counts_of_a_person() -> None:
    """With counts, B is the largest norm of phi among the people, rounded up to two digits."""
    rng = np.random.default_rng(4)
    composition = composition_of(rng.dirichlet(np.ones(8), 16))
    counts = rng.poisson(3.0, (1_600, 5)).astype(float)
    region = np.repeat(np.arange(16), 100)
    aggregates = aggregate(sparse.csr_array(counts), region, composition.regions)
    bounds = diagnose(composition, aggregates=aggregates, delta=0.1).bounds
    norm = max(math.sqrt(sum(value**2 for value in row)) for row in counts.tolist())
    assert 10 < norm < 100
    largest = math.ceil(norm)
    assert bounds.feature_bound == pytest.approx(largest)
    assert not bounds.of_shares
    expected = largest * (np.sqrt(5) + np.sqrt(2 * np.log(16 / 0.1))) / np.sqrt(100) * np.sqrt(16)
    assert bounds.sampling_error == pytest.approx(expected)
    shares = diagnose(composition, n=100, delta=0.1).bounds
    assert (shares.feature_bound, shares.of_shares) == (1.0, True)


def test_a_census_without_people_observed_says_who_counts_as_such() -> None:
    counted = composition_of(np.eye(8), n=5e5)
    assert (
        "without --n, we assume that all people of the census are observed"
        in diagnose(counted).warnings
    )
    assert (
        "without --n, we assume that everyone is observed"
        in diagnose(composition_of(np.eye(8))).warnings
    )
    assert not any("--n" in warning for warning in diagnose(counted, n=100).warnings)


def test_what_limits_a_partition_is_said() -> None:
    few = diagnose(composition_of(np.eye(8)[:3]), n=100)
    assert (
        "3 regions for 8 groups: at most 3 combinations of groups can be estimated" in few.warnings
    )
    assert any("no region has people of" in warning for warning in few.warnings)
    assert few.sigma_min == 0
    assert few.condition_number == np.inf
    twins = diagnose(composition_of(np.vstack([np.eye(8), np.eye(8)[:2]])), n=100)
    assert (
        "2 regions repeat the composition of another: they add people, but do not help to "
        "distinguish groups" in twins.warnings
    )
    alone = diagnose(composition_of(np.ones((3, 1)), Groups.of({"all": ("x",)})), n=100)
    assert "there is only one group: nothing to distinguish" in alone.warnings
    assert alone.contrasts == ()
    one = diagnose(composition_of(np.full((1, 8), 1 / 8)), n=100)
    assert (one.rank, one.effective_rank) == (1, 1)
    assert not any(each.identified for each in one.contrasts)


def test_the_diagnosis_is_json_with_the_promised_keys() -> None:
    diagnosis = diagnose(composition_of(np.eye(8)[:3]), n=100).as_dict()
    text = json.dumps(diagnosis, allow_nan=False)
    promised = {
        "singular_values",
        "sigma_min",
        "rank",
        "effective_rank",
        "condition_number",
        "contrasts",
    }
    assert promised <= json.loads(text).keys()
    assert diagnosis["condition_number"] is None
    assert {"name", "verdict", "identified", "standard_error"} <= diagnosis["contrasts"][0].keys()


@pytest.mark.parametrize("n", [0.0, -5.0, float("nan")])
def test_regions_without_people_are_refused(n: float) -> None:
    with pytest.raises(MobatlasError, match="--n: give a positive number of people per region"):
        diagnose(composition_of(np.eye(8)), n=n)


def test_the_papers_rankdef_hides_the_middle_ages_altogether() -> None:
    """Each region pairs an outer with an inner age, so no region shows their difference."""
    _, singular, right = np.linalg.svd(np.sqrt(1_000) * np.array(PAPER["rankdef"]))
    inner_ages = np.array([-1, -1, 1, 1, 1, 1, -1, -1]) / 4
    assert np.abs(right[singular > 1] @ inner_ages).max() < 1e-3


def test_the_rest_of_the_population_is_said_beside_the_regions() -> None:
    """1,000 people per region of rankdef, with twice as many of working age as others.

    The people outside all regions identify what rankdef does not.
    """
    composition = composition_of(np.array(PAPER["rankdef"]))
    n = np.full(8, 1_000.0)
    aggregates = Aggregates(composition.regions, ("category:a",), np.ones((8, 1)), n)
    everybody = Population(np.array([1, 1, 2, 2, 2, 2, 1, 1]) / 12, np.ones(1), 18_000.0)
    alone = diagnose(composition, aggregates=aggregates, randomised=True)
    known = diagnose(composition, aggregates=aggregates, randomised=True, population=everybody)
    assert (alone.effective_rank, alone.effective_rank_with_rest) == (5, None)
    assert (known.effective_rank, known.effective_rank_with_rest) == (5, 6)
    assert known.as_dict()["effective_rank_with_rest"] == 6
    assert known.singular_values == alone.singular_values
    assert (
        diagnose(composition, aggregates=aggregates, population=everybody).effective_rank_with_rest
        is None
    )
