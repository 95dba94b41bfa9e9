from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mobatlas.errors import MobatlasError
from mobatlas.groups import DEFAULT_GROUPS, Groups
from mobatlas.regions.partitions import PAPER, assign, nominal_partition
from mobatlas.regions.types import Composition

NAMES = ("demogroups", "fullrank", "rankdef", "messy", "hot16", "dirichlet:20:0.7")
THREE = Groups.of({"age": ("<30", "30-60", ">60")})


def counts_of(
    region: npt.NDArray[np.int64], group: npt.NDArray[np.int64], nominal: Composition
) -> npt.NDArray[np.int64]:
    counts = np.zeros(nominal.shares.shape, dtype=np.int64)
    np.add.at(counts, (region[region >= 0], group[region >= 0]), 1)
    return counts


@pytest.mark.parametrize("name", PAPER)
def test_the_papers_rows_sum_to_one_as_printed(name: str) -> None:
    assert np.array(PAPER[name]).sum(1) == pytest.approx(np.ones(8), abs=1e-9)
    assert nominal_partition(name, DEFAULT_GROUPS).shares == pytest.approx(
        np.array(PAPER[name]), abs=1e-9
    )


def test_the_papers_ranks() -> None:
    """Singular values of the printed matrices: fullrank is rank 8 by a hair, sigma_min 5.05e-5."""
    sigma = {
        name: np.linalg.svd(nominal_partition(name, DEFAULT_GROUPS).shares, compute_uv=False)
        for name in NAMES
    }
    ranks = {name: int((sigma[name] > 1e-6).sum()) for name in NAMES[:4]}
    assert ranks == {"demogroups": 8, "fullrank": 8, "rankdef": 7, "messy": 4}
    assert sigma["fullrank"][-1] == pytest.approx(5.05e-5, rel=0.02)


def test_hot16_has_eight_hot_regions_and_eight_pairs() -> None:
    shares = nominal_partition("hot16", DEFAULT_GROUPS).shares
    assert shares.shape == (16, 8)
    assert shares[2] == pytest.approx(np.where(np.arange(8) == 2, 0.85, 0.15 / 7))
    assert shares[8].tolist() == [0.5, 0.5, 0, 0, 0, 0, 0, 0]
    assert shares[15].tolist() == [0.5, 0, 0, 0, 0, 0, 0, 0.5]
    assert nominal_partition("hot16", THREE).shares.shape == (6, 3)
    assert nominal_partition("hot16", Groups.of({"all": ("all",)})).shares.tolist() == [[1], [1]]


def test_dirichlet_is_drawn_by_the_seed() -> None:
    one = nominal_partition("dirichlet:30:0.5", DEFAULT_GROUPS, seed=4)
    assert one.shares.shape == (30, 8)
    assert np.array_equal(
        one.shares, nominal_partition("dirichlet:30:0.5", DEFAULT_GROUPS, seed=4).shares
    )
    assert not np.array_equal(
        one.shares, nominal_partition("dirichlet:30:0.5", DEFAULT_GROUPS, seed=5).shares
    )


def test_a_partition_may_come_from_a_table(tmp_path: Path) -> None:
    (tmp_path / "mine.csv").write_text(
        "region,group,share\nnorth,<30,1\nsouth,30-60,0.5\nsouth,>60,0.5\n"
    )
    nominal = nominal_partition(str(tmp_path / "mine.csv"), THREE)
    assert nominal.regions == ("north", "south")
    assert nominal.shares.tolist() == [[1, 0, 0], [0, 0.5, 0.5]]


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("fulrank", "--partition fulrank does not exist; did you mean 'fullrank'"),
        ("fullrank", "--partition fullrank: the paper's matrix has 8 groups, your data has 3"),
        ("dirichlet:4", "write dirichlet:G:alpha"),
        ("dirichlet:0:1", "write dirichlet:G:alpha"),
        ("dirichlet:4:-1", "write dirichlet:G:alpha"),
        ("absent.csv", "absent.csv: no such file"),
    ],
)
def test_what_is_no_partition_is_refused(name: str, sentence: str) -> None:
    with pytest.raises(MobatlasError, match=sentence):
        nominal_partition(name, THREE)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("people", [400, 5_000])
def test_people_match_the_nominal_composition_to_less_than_one_person(
    name: str, people: int
) -> None:
    rng = np.random.default_rng(people)
    group = rng.choice(9, people, p=[0.05, 0.1, 0.2, 0.1, 0.15, 0.1, 0.1, 0.15, 0.05]) - 1
    nominal = nominal_partition(name, DEFAULT_GROUPS)
    region = assign(group, nominal, seed=1)
    counts = counts_of(region, group, nominal)
    sizes = counts.sum(1)
    assert (region[group < 0] == -1).all()
    assert (counts.sum(0) <= np.bincount(group[group >= 0], minlength=8)).all()
    assert np.abs(counts - sizes[:, None] * nominal.shares).max() < 1
    assert np.abs(counts / sizes[:, None] - nominal.shares).max() < 1 / sizes.min()


def test_surplus_people_stay_unassigned_and_the_rest_are_used() -> None:
    """Half and half from 30 and 10 people: two regions of ten people, and 20 are surplus."""
    group = np.array([0] * 30 + [1] * 10)
    gender = Groups.of({"gender": ("M", "F")})
    nominal = Composition(gender, ("A", "B"), np.full((2, 2), 0.5), np.full(2, np.inf))
    counts = counts_of(assign(group, nominal, seed=0), group, nominal)
    assert counts.tolist() == [[5, 5], [5, 5]]
    whole = nominal_partition("demogroups", gender)
    assert (assign(group, whole, seed=0) == group).all()


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 5), st.integers(1, 12))
def test_any_composition_is_met_with_whole_people(seed: int, k: int, g: int) -> None:
    rng = np.random.default_rng(seed)
    shares = rng.dirichlet(np.full(k, 0.7), g) * (rng.random((g, k)) < 0.8)
    shares[shares.sum(1) == 0] = 1 / k
    shares /= shares.sum(1, keepdims=True)
    levels = Groups.of({"group": tuple(f"g{number}" for number in range(k))})
    nominal = Composition(
        levels, tuple(f"R{number}" for number in range(g)), shares, np.full(g, np.inf)
    )
    group = np.repeat(np.arange(k), rng.integers(40, 400, k) * g)
    counts = counts_of(assign(group, nominal, seed), group, nominal)
    assert (counts.sum(0) <= np.bincount(group, minlength=k)).all()
    assert np.abs(counts - counts.sum(1, keepdims=True) * shares).max() < 1 + 1e-6


def test_the_assignment_is_random_within_groups_and_fixed_by_the_seed() -> None:
    group = np.random.default_rng(0).integers(0, 8, 2_000)
    nominal = nominal_partition("hot16", DEFAULT_GROUPS)
    one = assign(group, nominal, seed=7)
    assert np.array_equal(one, assign(group, nominal, seed=7))
    other = assign(group, nominal, seed=8)
    assert not np.array_equal(one, other)
    assert np.array_equal(counts_of(one, group, nominal), counts_of(other, group, nominal))


@pytest.mark.parametrize(
    ("group", "sentence"),
    [
        ([0, 0, 2, 2], "needs people of '30-60', but the data has none"),
        ([0, 1, 2], "3 people .* are too few: region"),
    ],
)
def test_too_few_people_are_refused_in_one_sentence(group: list[int], sentence: str) -> None:
    with pytest.raises(MobatlasError, match=sentence):
        assign(np.array(group), nominal_partition("hot16", THREE), seed=0)
