"""What every feature map promises in both of its forms, counts by hand, and what is refused."""

from __future__ import annotations

import math
import tracemalloc
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from mobatlas import MobatlasError
from mobatlas.data.dataset import SoftTrajectories, Trajectories
from mobatlas.data.types import FIRST_POI, HOME, OTHER, PAD, WORK
from mobatlas.features.maps import build_feature, register_feature
from tests.feature_maps import (
    DOWNTOWN,
    MASKS,
    NAMES,
    TOWN,
    as_tensors,
    build_trajectories,
    make_vocabulary,
    named,
    one_hot,
    start_feature,
    start_registered,
)

BAKERY = FIRST_POI
DINER = FIRST_POI + 1
PARK = FIRST_POI + 2
NAN = math.nan


@pytest.fixture(scope="module", autouse=True)
def own_feature() -> Iterator[None]:
    with start_registered():
        yield


@st.composite
def random_trajectories(draw: st.DrawFn) -> Trajectories:
    """Of any length, some empty; some people have no home or no work."""
    rows = draw(
        st.lists(st.lists(st.integers(HOME, len(TOWN) - 1), max_size=9), min_size=1, max_size=6)
    )
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    anchors = rng.uniform(-0.3, 0.3, (len(rows), 4))
    for part in (slice(0, 2), slice(2, 4)):
        anchors[rng.random(len(rows)) < 0.25, part] = np.nan
    return build_trajectories(
        rows, anchors.tolist(), [rng.integers(0, 24, len(row)).tolist() for row in rows]
    )


contract = pytest.mark.parametrize(("name", "mask"), list(product(NAMES, MASKS)))


@contract
@settings(max_examples=25, deadline=None)
@given(trajectories=random_trajectories())
def test_both_forms_agree_on_certain_tokens(
    name: str, mask: Sequence[str], trajectories: Trajectories
) -> None:
    feature = build_feature(name, TOWN, mask)
    exact = feature.counts(trajectories).toarray()
    assert exact.shape == (len(trajectories), len(feature.bins))
    soft = one_hot(trajectories, len(TOWN))
    np.testing.assert_allclose(feature.soft(soft), exact, atol=1e-9)
    np.testing.assert_allclose(feature.soft(as_tensors(soft)).numpy(), exact, atol=1e-9)
    single = feature.soft(as_tensors(soft, torch.float32))
    assert single.dtype == torch.float32
    np.testing.assert_allclose(single.numpy(), exact, atol=1e-4)


@contract
@settings(max_examples=5, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_the_soft_form_is_the_expectation_over_independent_positions(
    name: str, mask: Sequence[str], seed: int
) -> None:
    """Every sequence of three of five tokens, weighted by its probability."""
    rng = np.random.default_rng(seed)
    feature = build_feature(name, TOWN, mask)
    support = rng.choice(np.arange(HOME, len(TOWN)), 5, replace=False)
    shares = rng.dirichlet(np.ones(5), 3)  # (length, support)
    choices = list(product(range(5), repeat=3))
    hours = rng.integers(0, 24, 3).tolist()
    every = build_trajectories(
        [support[list(choice)].tolist() for choice in choices], hours=[hours] * len(choices)
    )
    weights = np.array(
        [math.prod(shares[i, k] for i, k in enumerate(choice)) for choice in choices]
    )
    tokens = np.zeros((1, 3, len(TOWN)))
    tokens[0][:, support] = shares
    soft = SoftTrajectories(tokens, np.array([DOWNTOWN]), np.eye(24)[None, hours])
    expected = weights @ feature.counts(every).toarray()
    np.testing.assert_allclose(feature.soft(soft)[0], expected, atol=1e-9)
    np.testing.assert_allclose(feature.soft(as_tensors(soft))[0].numpy(), expected, atol=1e-9)


@contract
def test_gradients_flow(name: str, mask: Sequence[str]) -> None:
    feature = build_feature(name, TOWN, mask)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(
        2, 3, len(TOWN), generator=generator, dtype=torch.float64, requires_grad=True
    )
    hours = torch.randn(2, 3, 24, generator=generator, dtype=torch.float64, requires_grad=True)

    def counts(token_logits: torch.Tensor, hour_logits: torch.Tensor) -> Any:
        probabilities = torch.softmax(token_logits, -1), torch.softmax(hour_logits, -1)
        return feature.soft(
            SoftTrajectories(probabilities[0], np.array([DOWNTOWN] * 2), probabilities[1])
        )

    assert torch.autograd.gradcheck(counts, (tokens, hours), fast_mode=True)
    (counts(tokens, hours) ** 2).sum().backward()
    wanted = hours if name == "hour" else tokens
    assert wanted.grad is not None
    assert wanted.grad.abs().sum() > 1e-3


@contract
def test_bins_are_unique_and_carry_the_name_of_their_map(name: str, mask: Sequence[str]) -> None:
    for vocabulary in (
        TOWN,
        make_vocabulary(
            [("x", 0, 0, "a>b"), ("y", 0, 0, "c"), ("z", 0, 0, "a"), ("w", 0, 0, "b>c")]
        ),
    ):
        feature = build_feature(name, vocabulary, mask)
        assert feature.name == name
        assert len(set(feature.bins)) == len(feature.bins) > 0
        assert all(bin_.startswith(f"{name}:") for bin_ in feature.bins)


@contract
def test_tokens_for_models_are_never_counted(name: str, mask: Sequence[str]) -> None:
    feature = build_feature(name, TOWN, mask)
    padding = build_trajectories([range(PAD, HOME)], hours=[range(HOME - PAD)])
    assert feature.counts(padding).sum() == 0
    assert feature.soft(one_hot(padding, len(TOWN))).sum() == 0


@contract
def test_nothing_at_all_counts_as_nothing(name: str, mask: Sequence[str]) -> None:
    feature = build_feature(name, TOWN, mask)
    assert (
        feature.counts(build_trajectories([[], []], hours=[[], []])).toarray().tolist()
        == [[0.0] * len(feature.bins)] * 2
    )
    none = Trajectories(
        np.zeros(0, np.int32), np.zeros(1, np.int64), np.zeros((0, 4)), np.zeros(0, np.int64)
    )
    assert feature.counts(none).shape == (0, len(feature.bins))


def test_pois_of_one_category_share_a_bin_and_a_poi_without_one_is_unknown() -> None:
    feature = build_feature("category", TOWN)
    result = named(
        feature, feature.counts(build_trajectories([[BAKERY, DINER, BAKERY, PARK], [HOME, WORK]]))
    )
    assert result == [
        {"category:food": 3, "category:unknown": 1},
        {"category:home": 1, "category:work": 1},
    ]


def test_transitions_stay_within_a_trajectory_and_do_not_jump_over_what_is_masked() -> None:
    rows = [[BAKERY, HOME, PARK, DINER], [BAKERY]]
    plain = build_feature("transitions", TOWN)
    masked = build_feature("transitions", TOWN, ("HOME",))
    assert named(plain, plain.counts(build_trajectories(rows))) == [
        {"transitions:food>home": 1, "transitions:home>unknown": 1, "transitions:unknown>food": 1},
        {},
    ]
    assert named(masked, masked.counts(build_trajectories(rows))) == [
        {"transitions:unknown>food": 1},
        {},
    ]


def test_a_place_without_coordinates_is_at_no_distance() -> None:
    feature = build_feature("distance", TOWN)
    nowhere = len(TOWN) - 1
    rows = [[HOME, BAKERY, WORK, OTHER, DINER, nowhere], [OTHER, nowhere]]
    assert named(feature, feature.counts(build_trajectories(rows))) == [
        {"distance:0-1": 1, "distance:5-10": 1, "distance:2-5": 1},
        {},
    ]


def test_people_without_a_home_are_at_no_distance_and_without_work_only_their_work_is_not() -> None:
    feature = build_feature("distance", TOWN)
    trajectories = build_trajectories(
        [[WORK, BAKERY]] * 2, [(NAN, NAN, 0.0, 0.06), (0.0, 0.0, NAN, NAN)]
    )
    assert named(feature, feature.counts(trajectories)) == [{}, {"distance:0-1": 1}]
    soft = feature.soft(one_hot(trajectories, len(TOWN)))
    assert np.isfinite(soft).all()
    assert soft.sum(1).tolist() == [0, 1]


def test_the_mask_holds_for_distances_and_hours_too() -> None:
    trajectories = build_trajectories([[HOME, WORK, BAKERY]], hours=[[7, 9, 18]])
    distance, hour = (build_feature(name, TOWN, ("WORK",)) for name in ("distance", "hour"))
    assert named(distance, distance.counts(trajectories)) == [{"distance:0-1": 1}]
    assert named(hour, hour.counts(trajectories)) == [{"hour:07": 1, "hour:18": 1}]


def test_hours_need_times() -> None:
    feature = build_feature("hour", TOWN)
    trajectories = build_trajectories([[HOME]])
    with pytest.raises(MobatlasError, match="have no times; choose another feature") as caught:
        feature.counts(trajectories)
    assert "\n" not in str(caught.value)
    with pytest.raises(MobatlasError, match="produces no times; choose another feature"):
        feature.soft(one_hot(trajectories, len(TOWN)))


class LargestTensor(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Remembers the size of the largest tensor that any operation made."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.elements = max(self.elements, result.numel())
        return result


@pytest.mark.parametrize("name", ["poi", "category", "distance"])
def test_the_soft_form_takes_no_more_memory_than_its_input(name: str) -> None:
    """One-hot weights of 7,000 POIs would be 392 MB."""
    size = 7_000
    vocabulary = make_vocabulary([(f"p{i}", 0.0, i / size, f"c{i // 2}") for i in range(size)])
    feature = build_feature(name, vocabulary)
    tokens = np.full((4, 2, len(vocabulary)), 1 / len(vocabulary))
    soft = SoftTrajectories(tokens, np.array([DOWNTOWN] * 4))
    tracemalloc.start()
    try:
        values = feature.soft(soft)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    tensors = as_tensors(soft)
    tensors.tokens.requires_grad_()
    with LargestTensor() as largest:  # type: ignore[no-untyped-call]
        differentiable = feature.soft(tensors)
        differentiable.sum().backward()
    np.testing.assert_allclose(differentiable.detach().numpy(), values, atol=1e-9)
    assert peak < 20e6
    assert largest.elements <= tokens.size


def test_a_wrong_feature_or_mask_names_the_nearest() -> None:
    with pytest.raises(
        MobatlasError, match="--feature transition does not exist; did you mean 'transitions'"
    ):
        build_feature("transition", TOWN)
    with pytest.raises(MobatlasError, match="mask 'home' does not exist; did you mean 'HOME'"):
        build_feature("poi", TOWN, ("home",))
    with pytest.raises(MobatlasError, match="mask '<pad>' does not exist"):
        build_feature("poi", TOWN, ("<pad>",))
    with pytest.raises(MobatlasError, match="feature 'poi' exists already"):
        register_feature("poi", start_feature)
