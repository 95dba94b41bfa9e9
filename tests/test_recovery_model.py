"""The parts of the recovery model agree with optimisers, integrals and matrices made by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, optimize

from mobatlas.data.types import Floats
from mobatlas.groups import Groups
from mobatlas.regions.recovery import solver
from mobatlas.regions.recovery.composition_error import calibrate_composition
from mobatlas.regions.recovery.priors import GroupFactors, average, mixture_weights, root_of
from mobatlas.regions.recovery.solver import Observed, Rows, find_modes, link, link_slope
from mobatlas.regions.types import Composition
from tests.regional import FOUR, THREE, TWO


def log_ratio(b: Floats) -> Floats:
    """The link, written once more: b above zero, b - b^2 / 2 below."""
    return np.where(b > 0, b, b - b**2 / 2)


def means_of(rows: Rows, centre: Floats, point: Floats) -> Floats:
    """q of one bin (rows,)."""
    b, a = point[: rows.columns], point[rows.columns :]
    return np.asarray(np.exp(rows.covariates @ a) * (rows.shares @ (centre * np.exp(log_ratio(b)))))


def log_posterior(rows: Rows, observed: Observed, k: Floats, point: Floats) -> float:
    """Of the only bin, without the determinant of the prior."""
    q = means_of(rows, observed.centre[0], point)
    v = observed.values[0]
    likelihood = float(observed.weight[0] @ (v * np.log(q) - q))
    return likelihood - 0.5 * float(point @ np.linalg.solve(k, point))


def evidence_of(
    seed: int, *, groups: int = 3, regions: int = 7, covariates: int = 1, people: float = 50.0
) -> tuple[Rows, Observed, Floats]:
    """Rows and values of one bin, and a dense prior covariance."""
    rng = np.random.default_rng(seed)
    rows = Rows(rng.dirichlet(np.ones(groups), regions), rng.normal(size=(regions, covariates)))
    size = groups + covariates
    root = 0.5 * rng.normal(size=(size, size)) + 0.5 * np.eye(size)
    k = root @ root.T
    centre = rng.uniform(0.5, 2, groups)
    truth = 0.5 * root @ rng.normal(size=size)
    n = people * rng.uniform(0.5, 1.5, regions)
    values = rng.poisson(n * means_of(rows, centre, truth)) / n
    return rows, Observed(values[None], n[None], centre[None]), k


def lowest(rows: Rows, observed: Observed, k: Floats, start: Floats) -> Any:
    """Minimise the negative log posterior, by a general optimiser."""

    def loss(point: Floats) -> float:
        return -log_posterior(rows, observed, k, point)

    return optimize.minimize(loss, start, tol=1e-10)


def whole_root(k: Floats) -> Floats:
    return np.asarray(np.linalg.cholesky(k))


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**31), covariates=st.integers(0, 2))
def test_the_mode_is_a_maximum_of_the_posterior(seed: int, covariates: int) -> None:
    rows, observed, k = evidence_of(seed, covariates=covariates)
    modes = find_modes(rows, observed, whole_root(k))
    solution = lowest(rows, observed, k, modes.mode[0] + 0.01)
    sd = np.sqrt(np.diag(modes.under(whole_root(k))[1][0]))
    assert (np.abs(modes.mode[0] - solution.x) < 0.15 * sd).all()
    value = log_posterior(rows, observed, k, modes.mode[0])
    assert value == pytest.approx(-solution.fun, abs=0.02)
    assert modes.log_likelihood[0] + modes.prior[0] == pytest.approx(value)


@pytest.mark.parametrize("seed", range(4))
def test_the_covariance_is_that_of_the_expected_information(seed: int) -> None:
    """Fisher's information of independent means q with variances q / N, by finite differences."""
    rows, observed, k = evidence_of(seed, covariates=2)
    modes = find_modes(rows, observed, whole_root(k))
    mode = modes.mode[0]
    jacobian = np.stack(
        [
            (
                means_of(rows, observed.centre[0], mode + step)
                - means_of(rows, observed.centre[0], mode - step)
            )
            / 2e-5
            for step in 1e-5 * np.eye(len(mode))
        ],
        axis=1,
    )
    variance = means_of(rows, observed.centre[0], mode) / observed.weight[0]
    fisher = (jacobian / variance[:, None]).T @ jacobian
    assert modes.information[0] == pytest.approx(fisher, rel=1e-4, abs=1e-4)
    mean, covariance, _ = modes.under(whole_root(k))
    assert covariance[0] == pytest.approx(np.linalg.inv(np.linalg.inv(k) + fisher), rel=1e-3)
    assert mean[0] == pytest.approx(mode, abs=1e-3)


def test_unknown_cells_do_not_count() -> None:
    rows, observed, k = evidence_of(3, regions=9)
    weight = observed.weight.copy()
    weight[0, [2, 5]] = 0
    values = np.where(weight > 0, observed.values, 0.0)
    fewer = np.setdiff1d(np.arange(9), [2, 5])
    holes = find_modes(rows, Observed(values, weight, observed.centre), whole_root(k))
    without = find_modes(rows.select(fewer), observed.of_rows(fewer), whole_root(k))
    assert holes.mode == pytest.approx(without.mode, abs=1e-6)
    assert holes.information == pytest.approx(without.information, rel=1e-5)


def integral(rows: Rows, observed: Observed, k: Floats, scale: float) -> float:
    """Log of the integral of the posterior over one or two parameters, without constants."""
    size = len(k)
    constant = -0.5 * np.linalg.slogdet(2 * np.pi * k)[1]
    highest = -float(lowest(rows, observed, k, np.zeros(size)).fun)

    def density(*point: float) -> float:
        return float(np.exp(log_posterior(rows, observed, k, np.array(point)) - highest))

    limits = [(-scale, scale)] * size
    value = integrate.nquad(density, limits, opts={"limit": 200, "epsrel": 1e-5})[0]
    return float(np.log(value) + highest + constant)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("seed", range(3))
def test_the_evidence_is_the_integral_of_likelihood_and_prior(seed: int, groups: int) -> None:
    rows, observed, k = evidence_of(seed, groups=groups, covariates=0, people=200.0)
    for scale in (0.05, 0.3):
        prior = scale * k
        root = whole_root(prior)
        laplace = find_modes(rows, observed, root).evidence(root)[0]
        assert laplace == pytest.approx(integral(rows, observed, prior, 2.5), abs=0.1)


@pytest.mark.parametrize("seed", range(4))
def test_another_prior_is_as_a_fit_under_it_where_people_are_many(seed: int) -> None:
    rows, observed, k = evidence_of(seed, groups=3, regions=12, people=20_000.0)
    modes = find_modes(rows, observed, whole_root(k))
    other = 2 * k + 0.1 * np.eye(len(k))
    root = whole_root(other)
    mean, covariance, gain = modes.under(root)
    again = find_modes(rows, observed, root)
    assert mean == pytest.approx(again.mode, abs=0.01)
    assert covariance == pytest.approx(again.under(root)[1], rel=0.1, abs=1e-5)
    ratio = gain - modes.under(whole_root(k))[2]
    laplace = again.evidence(root) - modes.evidence(whole_root(k))
    assert ratio == pytest.approx(laplace, abs=0.05)


def several_bins(bins: int = 40) -> tuple[Rows, Observed, Floats]:
    rng = np.random.default_rng(7)
    rows = Rows(rng.dirichlet(np.ones(4), 15), rng.normal(size=(15, 2)) / 3)
    centre = np.exp(rng.normal(0, 1, (bins, 4)))
    values = rng.poisson(30 * centre @ rows.shares.T) / 30
    return (
        rows,
        Observed(values, np.full((bins, 15), 30.0), centre),
        root_of(0.2 * np.eye(4) + 0.5, np.full(2, 0.5)),
    )


def test_modes_do_not_depend_on_the_size_of_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, observed, root = several_bins()
    whole = find_modes(rows, observed, root)
    monkeypatch.setattr(solver, "CELLS", 45)
    parts = find_modes(rows, observed, root)
    assert parts.mode == pytest.approx(whole.mode, abs=1e-3)
    assert parts.information == pytest.approx(whole.information, rel=1e-2, abs=1e-6)


def test_shared_weights_of_many_rows_leave_the_modes_where_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows, observed, root = several_bins()
    whole = find_modes(rows, observed, root)
    monkeypatch.setattr(solver, "PAIR_CELLS", 1)
    shared = find_modes(rows, observed, root)
    assert shared.mode == pytest.approx(whole.mode, abs=2e-3)


def test_bins_may_have_priors_of_their_own() -> None:
    rows, observed, root = several_bins(3)
    roots = np.stack([root, 0.3 * root, 2 * root])
    together = find_modes(rows, observed, roots)
    for number, each in enumerate(roots):
        alone = find_modes(rows, observed.select(np.array([number])), each)
        assert together.mode[number] == pytest.approx(alone.mode[0], abs=1e-3)
        assert together.evidence(roots)[number] == pytest.approx(alone.evidence(each)[0], abs=1e-3)


def test_the_link_is_smooth_and_steeper_below_zero() -> None:
    b = np.linspace(-3, 3, 61)
    assert link(b) == pytest.approx(log_ratio(b))
    numeric = (log_ratio(b + 1e-6) - log_ratio(b - 1e-6)) / 2e-6
    assert link_slope(b) == pytest.approx(numeric, abs=1e-5)
    assert (np.diff(link(b)) > 0).all()


def test_the_covariance_of_groups_adds_attributes_and_each_group() -> None:
    """Young men, young women, old men, old women, with variances 4 of age, 2 of sex, 1 of each."""
    factors = GroupFactors.of(FOUR)
    assert factors.names == ("age", "sex", "group")
    expected = np.array([[7, 4, 2, 0], [4, 7, 0, 2], [2, 0, 7, 4], [0, 2, 4, 7]])
    assert factors.covariance(np.array([4.0, 2.0, 1.0])) == pytest.approx(expected)


@pytest.mark.parametrize("groups", [TWO, THREE, Groups.of({"all": ("x",), "sex": ("M", "F")})])
def test_an_attribute_that_names_single_groups_or_all_of_them_is_no_factor(groups: Groups) -> None:
    factors = GroupFactors.of(groups)
    assert factors.names == ("group",)
    assert factors.covariance(np.array([2.0])) == pytest.approx(2 * np.eye(len(groups)))


def test_a_prior_root_multiplies_to_the_covariance() -> None:
    inner = GroupFactors.of(FOUR).covariance(np.array([0.3, 0.2, 0.1])) + 1
    root = root_of(inner, np.array([0.5, 2.0]))
    expected = np.zeros((6, 6))
    expected[:4, :4] = inner
    expected[4, 4] = 0.25
    expected[5, 5] = 4
    assert root @ root.T == pytest.approx(expected, abs=1e-6)


def test_variants_keep_the_fitted_prior_first_and_are_all_different() -> None:
    factors = GroupFactors.of(FOUR)
    variants = [each for each, _ in factors.variants(np.array([0.5, 0.3, 0.2]))]
    assert variants[0] == pytest.approx([0.5, 0.3, 0.2])
    assert len({tuple(each.round(9)) for each in variants}) == len(variants)
    totals = sorted({round(float(each.sum()), 9) for each in variants})
    assert totals[0] < 1 < totals[-1], "smaller and larger differences are possible"


def test_bins_choose_the_variant_that_their_evidence_supports() -> None:
    evidence = np.zeros((200, 3))
    evidence[:, 1] = 8
    evidence[:20, 2] = 16
    weights = mixture_weights(evidence, np.array([4.0, 0.25, 0.25]))
    assert weights.sum(1) == pytest.approx(np.ones(200))
    assert weights[20:, 1].min() > 0.95 and weights[:20, 2].min() > 0.95
    # Bins that know nothing follow the others.
    evidence[:50] = 0
    undecided = mixture_weights(evidence, np.array([4.0, 0.25, 0.25]))[0]
    assert undecided[1] > 0.8


def test_evidence_that_prefers_nothing_keeps_the_prior_weights() -> None:
    weights = mixture_weights(np.zeros((50, 2)), np.array([3.0, 1.0]))
    assert weights == pytest.approx(np.tile([0.75, 0.25], (50, 1)))


def test_an_average_of_gaussians_has_the_moments_of_its_draws() -> None:
    rng = np.random.default_rng(0)
    weight = np.array([[0.3, 0.7]])
    centres = [np.array([[1.0, 0.0]]), np.array([[-1.0, 2.0]])]
    spreads = [np.array([[[1.0, 0.5], [0.5, 2.0]]]), np.array([[[0.5, 0.0], [0.0, 0.1]]])]
    mean, covariance = average(weight, list(zip(centres, spreads, strict=True)))
    which = rng.random(200_000) < 0.3
    draws = np.where(
        which[:, None],
        rng.multivariate_normal(centres[0][0], spreads[0][0], 200_000),
        rng.multivariate_normal(centres[1][0], spreads[1][0], 200_000),
    )
    assert mean[0] == pytest.approx(draws.mean(0), abs=0.02)
    assert covariance[0] == pytest.approx(np.cov(draws.T), abs=0.03)


def counted(shares: Floats, n: int, rng: np.random.Generator) -> Floats:
    return np.stack([rng.multinomial(n, row) for row in shares]) / n


def test_calibration_finds_the_expected_composition_and_its_error() -> None:
    """Dirichlet(a w) regions: p given counts is Dirichlet(counts + a w)."""
    rng = np.random.default_rng(1)
    w = np.array([0.1, 0.2, 0.3, 0.4])
    a = 30.0
    n = 25
    observed = counted(rng.dirichlet(a * w, 4_000), n, rng)
    composition = Composition(
        FOUR, tuple(map(str, range(4_000))), observed, np.full(4_000, float(n))
    )
    calibrated, error = calibrate_composition(composition)
    posterior = (n * observed + a * w) / (n + a)
    assert calibrated == pytest.approx(posterior, abs=0.02)
    assert calibrated.sum(1) == pytest.approx(np.ones(4_000))
    assert error is not None
    exact = np.mean([np.diag(p) - np.outer(p, p) for p in posterior], axis=0) / (n + a + 1)
    ours = (error.axes * error.variance.mean(0)) @ error.axes.T
    assert ours == pytest.approx(exact, abs=0.1 * np.abs(exact).max())


def test_an_exact_composition_needs_no_calibration() -> None:
    shares = np.random.default_rng(0).dirichlet(np.ones(4), 6)
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
