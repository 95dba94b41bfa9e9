from __future__ import annotations

import numpy as np
import pytest

from mobatlas import DEFAULT_GROUPS, Groups, MobatlasError
from mobatlas.groups import order_levels


def test_the_default_groups_are_the_papers_eight() -> None:
    assert DEFAULT_GROUPS.names == (
        "<30, M", "<30, F", "30-40, M", "30-40, F", "40-50, M", "40-50, F", ">50, M", ">50, F",
    )  # fmt: skip


def test_groups_keep_their_factors() -> None:
    groups = Groups.of({"a": ("x", "y"), "b": ("1", "2", "3")})
    assert groups.level_codes.tolist() == [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2]]
    assert [groups.index(name) for name in groups.names] == list(range(6))


def test_a_wrong_group_names_the_nearest() -> None:
    with pytest.raises(MobatlasError, match="did you mean '30-40, F'"):
        DEFAULT_GROUPS.index("30-4O, Women")
    with pytest.raises(MobatlasError, match="did you mean '<30, F'"):
        DEFAULT_GROUPS.index("F, <30")
    assert DEFAULT_GROUPS.index("30-40,F") == DEFAULT_GROUPS.index("30-40, F")


def test_labels_become_groups_and_unknown_ones_minus_one() -> None:
    labels: dict[str, list[str | None]] = {
        "age": ["<30", ">50", None, "90"],
        "gender": ["F", "M", "F", "M"],
    }
    assert DEFAULT_GROUPS.codes(labels).tolist() == [1, 6, -1, -1]
    with pytest.raises(MobatlasError, match="column 'gender' is missing"):
        DEFAULT_GROUPS.codes({"age": ["<30"]})


@pytest.mark.parametrize(
    ("levels", "ordered"),
    [
        ({">50", "30-40", "<30", "40-50"}, ("<30", "30-40", "40-50", ">50")),
        ({"65+", "00-24", "45-64", "25-44"}, ("00-24", "25-44", "45-64", "65+")),
        ({"F", "M"}, ("M", "F")),
        ({"low", "high"}, ("high", "low")),
        ({"5-9", "10-14"}, ("5-9", "10-14")),
    ],
)
def test_levels_stand_in_the_order_a_reader_expects(
    levels: set[str], ordered: tuple[str, ...]
) -> None:
    assert order_levels(levels) == ordered


@pytest.mark.parametrize("levels", [(), ("a", "a"), ("a, b",), ("",)])
def test_ambiguous_levels_are_refused(levels: tuple[str, ...]) -> None:
    with pytest.raises(MobatlasError, match="attribute 'x'"):
        Groups.of({"x": levels})


def test_groups_survive_a_manifest() -> None:
    assert Groups.of(DEFAULT_GROUPS.as_dict()) == DEFAULT_GROUPS
    assert len(DEFAULT_GROUPS) == 8
    assert np.array_equal(np.unique(DEFAULT_GROUPS.level_codes, axis=0), DEFAULT_GROUPS.level_codes)
