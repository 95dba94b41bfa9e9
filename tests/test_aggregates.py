from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import sparse

from mobatlas import CityConfig, MobatlasError, TrajectoryDataset, prepare, write_city_folder
from mobatlas.data.types import HOME
from mobatlas.features.maps import build_feature
from mobatlas.groups import Groups
from mobatlas.regions.aggregates import (
    TableContext,
    aggregate,
    aggregates_from_dataset,
    person_means,
)
from mobatlas.regions.aggregates import read_aggregates as read_published
from mobatlas.regions.composition import composition_from_labels
from mobatlas.regions.types import Aggregates


def read_aggregates(
    path: Path, known_bins: tuple[str, ...] = (), notes: list[str] | None = None
) -> Aggregates:
    return read_published(path, TableContext(known_bins), notes)[0]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> TrajectoryDataset:
    root = tmp_path_factory.mktemp("city")
    write_city_folder(root / "city", CityConfig(users=200, pois=40, days=9, districts=4), seed=1)
    prepare(root / "city", root / "dataset", preset="small")
    return TrajectoryDataset.open(root / "dataset")


def table(tmp_path: Path, columns: dict[str, list[Any]]) -> Path:
    path = tmp_path / "aggregates.csv"
    pd.DataFrame(columns).to_csv(path, index=False)
    return path


def published(**changes: list[Any]) -> dict[str, list[Any]]:
    rows: dict[str, list[Any]] = {
        "region": ["A", "A", "B", "B"],
        "feature": ["category:food", "category:shop"] * 2,
        "value": [1.0, 2.0, 0.5, 0.0],
        "n": [10, 10, 40, 40],
    }
    return {name: values for name, values in (rows | changes).items() if values}


def test_a_person_with_ten_windows_counts_as_one_person() -> None:
    counts = sparse.csr_array(np.array([[1.0, 0.0]] * 10 + [[0.0, 4.0]]))
    person = np.array([0] * 10 + [1])
    phi = person_means(counts, person)
    assert phi.toarray() == pytest.approx(np.array([[1, 0], [0, 4]]))
    result = aggregate(phi, ["A", "A"], ["A"])
    assert result.values == pytest.approx(np.array([[0.5, 2.0]]))
    assert result.n.tolist() == [2]


def test_spread_is_the_variance_between_people_of_one_region() -> None:
    """Squares about the means 2 and 2 are 2 in A (1, 3) and 24 in B (0, 0, 6).

    The variance is 26 over 5 people less 2 means.
    """
    phi = sparse.csr_array(np.array([[1.0], [3.0], [0.0], [0.0], [6.0], [99.0]]))
    result = aggregate(phi, np.array([0, 0, 1, 1, 1, -1]), ["A", "B"])
    assert result.values.ravel().tolist() == [2, 2]
    assert result.spread == pytest.approx(np.array([26 / 3]))
    assert aggregate(phi[:2], np.array([0, 1]), ["A", "B"]).spread is None


def test_a_region_without_people_is_refused() -> None:
    with pytest.raises(MobatlasError, match="region 'B' has no people"):
        aggregate(sparse.csr_array(np.ones((2, 1))), ["A", None], ["A", "B"])


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 6), st.integers(1, 9), st.floats(0.01, 100))
def test_aggregates_are_composition_times_group_means(
    seed: int, groups: int, regions: int, activity: float
) -> None:
    """V = P M exactly, also if one group goes out more; people of a group behave alike."""
    rng = np.random.default_rng(seed)
    cells = [(region, group) for region in range(regions) for group in range(groups)]
    chosen = [cell for cell in cells if rng.random() < 0.7] or cells
    people = [cell for cell in chosen for _ in range(rng.integers(1, 4))]
    region = np.array([cell[0] for cell in people])
    group = np.array([cell[1] for cell in people])
    rate = activity ** rng.uniform(-1, 1, groups)
    typical = rng.poisson(3 * rate[:, None], (groups, 5)).astype(
        float
    )  # everybody of a group does the same
    names = [f"R{number}" for number in sorted(set(region.tolist()))]
    code = np.searchsorted(np.unique(region), region)
    levels = Groups.of({"group": tuple(f"g{number}" for number in range(groups))})
    v = aggregate(
        person_means(sparse.csr_array(typical[group]), np.arange(len(group))), code, names
    )
    p = composition_from_labels(group, code, levels, names)
    assert v.values == pytest.approx(p.shares @ typical, rel=1e-12, abs=1e-12)
    assert (v.n == p.n).all()


def test_aggregates_within_groups_mix_to_the_population(dataset: TrajectoryDataset) -> None:
    """With everybody in one region V = P M holds on real windows; M are means over people."""
    assert dataset.groups is not None
    labels = dataset.person_groups()
    phi = [build_feature("poi", dataset.vocabulary)]
    everybody = aggregates_from_dataset(
        dataset, phi, np.zeros(len(labels), dtype=int), regions=["all"]
    )
    means = aggregates_from_dataset(dataset, phi, labels, regions=dataset.groups.names)
    train = np.isin(np.arange(len(labels)), dataset.split_people("train"))
    p = composition_from_labels(labels, np.where(train, 0, -1), dataset.groups, ["all"])
    assert everybody.values == pytest.approx(p.shares @ means.values, abs=1e-12)


def test_a_dataset_gives_the_mean_over_people_of_the_mean_over_windows(
    dataset: TrajectoryDataset,
) -> None:
    region = dataset.people["home_district"].to_pylist()
    maps = [build_feature(name, dataset.vocabulary) for name in ("poi", "category")]
    aggregates = aggregates_from_dataset(dataset, maps, region, split="val")
    assert aggregates.features == (*maps[0].bins, *maps[1].bins)
    column = aggregates.features.index("poi:HOME")
    for name, value, n in zip(
        aggregates.regions, aggregates.values[:, column], aggregates.n, strict=True
    ):
        per_person: dict[int, list[int]] = {}
        for index in dataset.split("val").tolist():
            if region[dataset.person[index]] == name:
                homes = int((dataset.trajectory(index) == HOME).sum())
                per_person.setdefault(int(dataset.person[index]), []).append(homes)
        assert value == pytest.approx(
            np.mean([np.mean(windows) for windows in per_person.values()])
        )
        assert n == len(per_person)


def test_regions_of_other_people_are_refused(dataset: TrajectoryDataset) -> None:
    with pytest.raises(MobatlasError, match="2 regions of people were passed"):
        aggregates_from_dataset(dataset, [build_feature("poi", dataset.vocabulary)], ["A", "B"])


def test_a_published_table_is_read_with_its_device_counts(tmp_path: Path) -> None:
    aggregates = read_aggregates(
        table(tmp_path, published()), known_bins=("category:food", "category:shop")
    )
    assert (aggregates.regions, aggregates.features) == (
        ("A", "B"),
        ("category:food", "category:shop"),
    )
    assert aggregates.values.tolist() == [[1, 2], [0.5, 0]]
    assert aggregates.n.tolist() == [10, 40]
    assert not aggregates.pooled
    assert aggregates.spread is None


def test_total_visits_are_divided_by_devices(tmp_path: Path) -> None:
    rows = published(value=[], visits=[10, 20, 20, 0], noise_sd=[1, 1, 2, 2])
    aggregates = read_aggregates(table(tmp_path, rows))
    assert aggregates.values.tolist() == [[1, 2], [0.5, 0]]
    assert aggregates.noise == pytest.approx(np.array([[0.1**2] * 2, [0.05**2] * 2]))


@pytest.mark.parametrize(
    "changes",
    [
        {"value": [1.0, "<5", 0.5, 0.0]},
        {"value": [1.0, "", 0.5, 0.0]},
        {"value": [1.0, 4, 0.5, 0.0], "suppressed": [False, True, False, False]},
    ],
)
def test_suppressed_cells_are_unknown_not_zero(
    tmp_path: Path, changes: dict[str, list[Any]]
) -> None:
    notes: list[str] = []
    aggregates = read_aggregates(table(tmp_path, published(**changes)), notes=notes)
    assert np.isnan(aggregates.values).tolist() == [[False, True], [False, False]]
    assert notes == ["aggregates.csv: 1 of 4 cells are suppressed"]


def test_absent_cells_are_zero_unless_the_table_suppresses(tmp_path: Path) -> None:
    rows = {name: values[:3] for name, values in published().items()}
    assert read_aggregates(table(tmp_path, rows)).values.tolist() == [[1, 2], [0.5, 0]]
    assert np.isnan(
        read_aggregates(table(tmp_path, rows | {"value": [1.0, "<5", 0.5]})).values[1, 1]
    )


def test_a_region_with_nothing_but_suppressed_cells_is_left_out(tmp_path: Path) -> None:
    notes: list[str] = []
    aggregates = read_aggregates(
        table(tmp_path, published(value=[1.0, 2.0, "<5", "<5"])), notes=notes
    )
    assert aggregates.regions == ("A",)
    assert notes[-1] == "aggregates.csv: 1 regions are left out: all their values are suppressed"


def test_without_device_counts_only_shares_are_known(tmp_path: Path) -> None:
    notes: list[str] = []
    aggregates = read_aggregates(
        table(tmp_path, published(n=[], value=[10, 30, 5, 0])), notes=notes
    )
    assert aggregates.pooled
    assert aggregates.values.tolist() == [[0.25, 0.75], [1, 0]]
    assert "only shares of visits are known" in notes[0]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"feature": ["category:food", "category:shpo"] * 2},
            "'category:shpo' does not exist in the dataset.*'category:shop'",
        ),
        ({"value": [1, -2, 0.5, 0]}, "the value of 'category:shop' in region 'A' is negative"),
        ({"value": [1, "few", 0.5, 0]}, "column 'value' is empty or not a number in row 2"),
        ({"n": [10, 10, 0, 0]}, "region 'B' has no people"),
        ({"n": [10, 11, 40, 40]}, "region 'A' has two values of n, 10 and 11"),
        ({"n": [10, 10, "", 40]}, "column 'n' is empty or not a number in row 3"),
        ({"value": [1, 1, 0, 0]}, "region 'B' has only zeros"),
        ({"value": ["<5"] * 4}, "every value is suppressed"),
        ({"feature": ["category:food"] * 4}, "region 'A' has two rows of 'category:food'"),
        ({"value": []}, "column 'value' is missing"),
        ({"feature": []}, "column 'feature' is missing"),
        ({"region": []}, "column 'region' is missing"),
    ],
)
def test_bad_tables_are_refused_in_one_sentence(
    tmp_path: Path, changes: dict[str, list[Any]], sentence: str
) -> None:
    with pytest.raises(MobatlasError, match=f"aggregates.csv: .*{sentence}"):
        read_aggregates(
            table(tmp_path, published(**changes)), known_bins=("category:food", "category:shop")
        )
