from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial.distance import jensenshannon
from scipy.special import rel_entr

from mobatlas.errors import MobatlasError
from mobatlas.features.divergences import (
    DIVERGENCES,
    hellinger,
    js,
    kl,
    normalise,
    tv,
)

Floats = npt.NDArray[np.float64]
NAMES = sorted(DIVERGENCES)
SYMMETRIC = ("hellinger", "js", "tv")
unhurried = settings(
    max_examples=50, deadline=None
)  # the first call of an operation takes torch a while


@st.composite
def pairs(draw: st.DrawFn, same_support: bool = False) -> tuple[Floats, Floats]:
    """Two distributions over the same bins: many zeros, some tiny shares, some equal pairs."""
    size = draw(st.integers(1, 12))
    weight = st.sampled_from([0.0, 0.0, 1e-15, 1e-9, 1e-3, 0.1, 1.0, 7.0])
    p, q = (
        np.array(draw(st.lists(weight, min_size=size, max_size=size).filter(sum))) for _ in range(2)
    )
    if draw(st.integers(0, 9)) == 0:
        q = p
    if same_support:
        p = p + 1e-3
        q = q + 1e-3
    return p / p.sum(), q / q.sum()


@pytest.mark.parametrize("name", NAMES)
@unhurried
@given(pair=pairs())
def test_numpy_and_torch_agree(name: str, pair: tuple[Floats, Floats]) -> None:
    divergence = DIVERGENCES[name]
    (p, q) = pair
    exact = float(divergence(p, q))
    assert float(divergence(torch.tensor(p), torch.tensor(q))) == pytest.approx(exact, abs=1e-6)
    if name != "kl":  # shares below the floor are not the same shares in single precision
        single = [values.astype(np.float32) for values in pair]
        assert float(divergence(*single)) == pytest.approx(exact, abs=1e-5)
        assert float(divergence(*map(torch.tensor, single))) == pytest.approx(exact, abs=1e-5)


@unhurried
@given(pair=pairs())
def test_js_is_the_square_of_scipys_distance(pair: tuple[Floats, Floats]) -> None:
    with np.errstate(invalid="ignore"):  # scipy takes the root of what rounding left below zero
        distance = np.nan_to_num(jensenshannon(*pair, base=2))
    assert js(*pair) == pytest.approx(distance**2, abs=1e-9)


@unhurried
@given(pair=pairs(same_support=True))
def test_kl_is_scipys_where_it_is_finite(pair: tuple[Floats, Floats]) -> None:
    assert kl(*pair) == pytest.approx(rel_entr(*pair).sum() / np.log(2), abs=1e-9)


@unhurried
@given(pair=pairs())
def test_hellinger_is_one_less_the_affinity_even_with_zeros(pair: tuple[Floats, Floats]) -> None:
    p, q = pair
    assert hellinger(p, q) ** 2 == pytest.approx(1 - np.sqrt(p * q).sum(), abs=1e-12)


def test_disjoint_distributions_are_one_apart_whatever_their_number_of_bins() -> None:
    p = np.repeat([1.0, 0.0], 7_000) / 7_000
    for name in SYMMETRIC:
        assert DIVERGENCES[name](p, p[::-1]) == pytest.approx(1, abs=1e-9), name


def test_by_hand() -> None:
    p = np.array([0.5, 0.5, 0.0])
    q = np.array([0.5, 0.25, 0.25])
    assert tv(p, q) == 0.25
    assert kl(p, q) == 0.5  # half of the mass, twice as probable: one bit
    assert hellinger(p, q) == pytest.approx((1 - (0.5 + 0.125**0.5)) ** 0.5)
    assert kl(q, p) == pytest.approx(
        0.25 * np.log2(0.25 / 1e-12) - 0.25
    )  # infinite but for the floor


@pytest.mark.parametrize("name", NAMES)
@unhurried
@given(pair=pairs())
def test_divergences_keep_their_bounds(name: str, pair: tuple[Floats, Floats]) -> None:
    value = DIVERGENCES[name](*pair)
    assert 0 <= value < np.inf
    if name in SYMMETRIC:
        assert value <= 1 + 1e-12
        assert value == pytest.approx(DIVERGENCES[name](*pair[::-1]), abs=1e-15)


@pytest.mark.parametrize("name", NAMES)
@unhurried
@given(pair=pairs())
def test_a_divergence_is_zero_if_and_only_if_both_are_equal(
    name: str, pair: tuple[Floats, Floats]
) -> None:
    divergence = DIVERGENCES[name]
    (p, q) = pair
    assert divergence(p, p) == 0
    assert divergence(torch.tensor(p), torch.tensor(p)) == 0
    if np.abs(p - q).max() > 1e-4:  # nearer than this, the square of the gap is lost in rounding
        assert divergence(p, q) > 1e-10


@unhurried
@given(pair=pairs(same_support=True))
def test_the_inequalities_between_them_hold(pair: tuple[Floats, Floats]) -> None:
    slack = 1e-9
    assert hellinger(*pair) ** 2 <= tv(*pair) + slack
    assert tv(*pair) <= 2**0.5 * hellinger(*pair) + slack
    assert tv(*pair) <= (kl(*pair) * np.log(2) / 2) ** 0.5 + slack  # Pinsker
    assert js(*pair) <= tv(*pair) + slack


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", NAMES)
@unhurried
@given(pair=pairs())
def test_gradients_are_finite_at_zeros_and_at_equality(
    name: str, dtype: torch.dtype, pair: tuple[Floats, Floats]
) -> None:
    for p, q in (pair, (pair[0], pair[0])):
        left, right = (torch.tensor(values, dtype=dtype, requires_grad=True) for values in (p, q))
        DIVERGENCES[name](left, right).backward()
        for values in (left, right):
            assert values.grad is not None
            assert torch.isfinite(values.grad).all()


@pytest.mark.parametrize("name", NAMES)
def test_gradients_through_a_softmax_are_finite_and_bounded(name: str) -> None:
    """A softmax that underflows to exact zeros, against a target with zeros elsewhere."""
    target = normalise(torch.tensor([0.0, 3.0, 1.0, 0.0, 2.0]))
    for scale in (0.1, 1.0, 30.0, 300.0):
        logits = (scale * torch.tensor([1.0, -1.0, 0.0, 0.5, -0.5])).requires_grad_()
        DIVERGENCES[name](torch.softmax(logits, -1), target).backward()
        assert logits.grad is not None
        assert torch.isfinite(logits.grad).all()
        assert logits.grad.abs().max() < 100


@pytest.mark.parametrize("name", NAMES)
def test_the_gradient_is_the_slope(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 3, 6, generator=generator, dtype=torch.float64, requires_grad=True)

    def between(values: torch.Tensor) -> Any:
        return DIVERGENCES[name](*torch.softmax(values, -1))

    assert torch.autograd.gradcheck(between, (logits,), fast_mode=True)


@pytest.mark.parametrize("name", ["js", "hellinger"])
def test_at_equality_nothing_pulls(name: str) -> None:
    p = normalise(torch.arange(5.0)).requires_grad_()
    DIVERGENCES[name](p, p.detach()).backward()
    assert p.grad is not None
    assert p.grad.abs().max() < 1e-6


@pytest.mark.parametrize("name", ["js", "tv", "hellinger"])
def test_descent_reaches_the_target(name: str) -> None:
    target = normalise(torch.tensor([0.0, 3.0, 1.0, 0.0, 2.0]))
    logits = torch.zeros(5, requires_grad=True)
    optimiser = torch.optim.Adam([logits], lr=0.1)
    for _ in range(200):
        optimiser.zero_grad()
        loss = DIVERGENCES[name](torch.softmax(logits, -1), target)
        loss.backward()
        optimiser.step()
    assert tv(torch.softmax(logits, -1), target) < 0.05


@pytest.mark.parametrize("name", NAMES)
def test_leading_axes_broadcast(name: str) -> None:
    rng = np.random.default_rng(0)
    regions = rng.dirichlet(np.ones(6), 4)
    groups = rng.dirichlet(np.ones(6), 3)
    divergence = DIVERGENCES[name]
    table = divergence(regions[:, None], groups)  # (4, 3)
    assert table.shape == (4, 3)
    for i, p in enumerate(regions):
        for j, q in enumerate(groups):
            assert table[i, j] == pytest.approx(divergence(p, q))
    tensors = divergence(torch.tensor(regions)[:, None], torch.tensor(groups))
    np.testing.assert_allclose(tensors.numpy(), table, atol=1e-12)


@unhurried
@given(
    counts=st.lists(st.lists(st.integers(0, 50), min_size=4, max_size=4), min_size=1, max_size=5)
)
def test_shares_sum_to_one_or_stay_zero(counts: list[list[int]]) -> None:
    values = np.array(counts)
    shares = normalise(values)
    expected = [[value / sum(row) if sum(row) else 0 for value in row] for row in counts]
    np.testing.assert_allclose(shares, expected, atol=1e-15)
    np.testing.assert_allclose(
        normalise(torch.tensor(values, dtype=torch.float64)).numpy(), expected, atol=1e-15
    )


def test_an_unknown_divergence_names_the_nearest() -> None:
    assert DIVERGENCES.get_entry("tv") is tv
    with pytest.raises(MobatlasError, match="did you mean 'hellinger'") as caught:
        DIVERGENCES.get_entry("helinger")
    assert all(name in str(caught.value) for name in NAMES)
