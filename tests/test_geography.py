"""Recovery removes a surface over the map, and tests what transfers between its parts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mobatlas.config import CityConfig
from mobatlas.data.city import write_city_folder
from mobatlas.data.dataset import TrajectoryDataset
from mobatlas.data.prepare.pipeline import prepare
from mobatlas.evaluation.evaluate import held_out_regions
from mobatlas.regions.build import RegionsOptions
from mobatlas.regions.recovery.geography import (
    LOW_TRANSFER,
    MIN_BLOCKED_REGIONS,
    MIN_SURFACE_REGIONS,
    confounding,
    independent_columns,
    surface,
)
from mobatlas.regions.recovery.recover import RecoveryOptions, recover
from mobatlas.regions.store import RegionsFolder, build_regions, load_regions
from mobatlas.regions.types import Regions
from tests.regional import FOUR, dirichlet, error, regions_of, simulate


def confounded(
    seed: int, regions: int = 200, *, valley: bool = False
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """A town whose young live in the north or far from the river, where all travel more.

    Returns shares, values, truth and centroids.
    """
    rng = np.random.default_rng(seed)
    centroids = np.array([-33.4, -70.6]) + rng.normal(0, 0.1, (regions, 2))
    north = (centroids[:, 0] - centroids[:, 0].mean()) / 0.1
    north = north**2 - 1 if valley else north
    shares = rng.dirichlet(np.full(4, 6.0), regions)
    shares[:, 0] = np.clip(shares[:, 0] + 0.15 * north, 0.02, None)
    shares /= shares.sum(1, keepdims=True)
    means = 5 + rng.normal(0, 0.2, (4, 12))
    values = shares @ means + 0.5 * north[:, None] + rng.normal(0, 1, (regions, 12)) / np.sqrt(300)
    return shares, values, means, centroids


@pytest.mark.parametrize("valley", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_what_follows_the_map_is_not_taken_for_a_difference_between_groups(
    seed: int, valley: bool
) -> None:
    shares, values, means, centroids = confounded(seed, valley=valley)
    simulated = regions_of(shares, values, 300.0, FOUR, spread=np.ones(12), randomised=False)
    off = means - shares.mean(0) @ means  # what recovery is about: deviations from the population
    without = recover(simulated)
    with_map = recover(replace(simulated, centroids=centroids))
    left = [error(estimate.means - estimate.baseline, off) for estimate in (without, with_map)]
    assert left[1] < (0.8 if valley else 0.5) * left[0]
    assert left[1] < error(np.zeros_like(off), off), "nearer than the population is"
    assert recover(
        replace(simulated, centroids=centroids), options=RecoveryOptions(geography=False)
    ).means == pytest.approx(without.means)


def test_regions_that_are_left_out_take_their_places_and_their_noise_with_them() -> None:
    shares, values, _, centroids = confounded(0, regions=60)
    simulated = replace(
        regions_of(shares, values, 300.0, FOUR, spread=np.ones(12), randomised=False),
        centroids=centroids,
    )
    noise = np.random.default_rng(1).uniform(0, 0.1, values.shape)
    simulated = replace(simulated, aggregates=replace(simulated.aggregates, noise=noise))
    remaining = simulated.select(np.array([5, 3]))
    assert remaining.composition.regions == tuple(
        simulated.composition.regions[row] for row in (5, 3)
    )
    assert remaining.centroids is not None and np.array_equal(
        remaining.centroids, centroids[[5, 3]]
    )
    assert remaining.aggregates.noise is not None and np.array_equal(
        remaining.aggregates.noise, noise[[5, 3]]
    )
    estimate = held_out_regions(simulated)
    assert estimate is not None and estimate["by_groups"] < estimate["by_everybody"]


def test_people_who_were_dealt_to_regions_have_no_geography() -> None:
    simulated, _ = simulate(dirichlet(40, 8), 200.0, 0)
    centroids = np.random.default_rng(0).normal(size=(40, 2))
    assert recover(replace(simulated, centroids=centroids)).means == pytest.approx(
        recover(simulated).means
    )


def test_few_regions_or_unknown_places_have_no_surface() -> None:
    centroids = np.random.default_rng(0).normal(size=(MIN_SURFACE_REGIONS, 2))
    assert surface(centroids, MIN_SURFACE_REGIONS).shape == (MIN_SURFACE_REGIONS, 7)
    few = MIN_SURFACE_REGIONS - 1
    assert surface(centroids[1:], few).shape == (few, 0)
    assert surface(None, 100).shape == (100, 0)
    one_place = np.zeros((MIN_SURFACE_REGIONS, 2))
    assert surface(one_place, MIN_SURFACE_REGIONS).shape == (MIN_SURFACE_REGIONS, 0)


def test_a_surface_has_independent_columns_of_one_size_that_hold_every_quadratic() -> None:
    centroids = np.random.default_rng(1).normal(size=(80, 2)) / 10 - [33, 70]
    columns = surface(centroids, 80)
    assert columns.T @ columns == pytest.approx(80 * np.eye(7), abs=1e-6)
    assert columns.sum(0) == pytest.approx(np.zeros(7), abs=1e-6)
    north, east = (centroids - centroids.mean(0)).T
    shape = 2 + north - 3 * east + 10 * north * east + 20 * (north**2 - east**2)
    basis = np.column_stack([np.ones(80), columns])
    rest = shape - basis @ np.linalg.lstsq(basis, shape, rcond=None)[0]
    assert np.abs(rest).max() < 1e-6


def test_columns_that_depend_on_others_are_dropped() -> None:
    rng = np.random.default_rng(0)
    one, two = rng.normal(size=(2, 30))
    columns = independent_columns(np.column_stack([one, 2 * one + 3, two, one - two]))
    assert columns.shape == (30, 2)


def test_regions_of_a_column_know_where_their_people_live(tmp_path: Path) -> None:
    write_city_folder(
        tmp_path / "city", CityConfig(users=300, pois=40, days=6, districts=6), seed=1
    )
    prepare(tmp_path / "city", tmp_path / "dataset", preset="small")
    dataset = TrajectoryDataset.open(tmp_path / "dataset")
    build_regions(dataset.path, tmp_path / "regions", RegionsOptions(by="home_district"))
    regions = load_regions(tmp_path / "regions")
    assignment = RegionsFolder.open(tmp_path / "regions").assignment
    assert regions.centroids is not None and assignment is not None
    users = dataset.people["user_id"].to_pylist()
    train = set(dataset.split_people("train").tolist())
    for name, place in zip(regions.composition.regions, regions.centroids, strict=True):
        homes = [
            dataset.anchors[row, :2]
            for row, user in enumerate(users)
            if row in train and assignment.get(user) == name
        ]
        assert place == pytest.approx(np.mean(homes, axis=0))
    build_regions(dataset.path, tmp_path / "dealt", RegionsOptions(partition="demogroups"))
    assert load_regions(tmp_path / "dealt").centroids is None


def spread_out(seed: int, everywhere: bool) -> tuple[Regions, np.ndarray]:
    """Regions all over a map; groups differ alike everywhere, or by corner of the map."""
    rng = np.random.default_rng(seed)
    corners = np.array([[0, 0], [0, 1], [1, 0], [1, 1], [0.5, 0.5]])
    corner = np.arange(300) % 5
    centroids = np.array([-33.5, -70.6]) + 0.5 * corners[corner] + rng.normal(0, 0.03, (300, 2))
    shares = rng.dirichlet(np.full(4, 3.0), 300)
    means = 5 + rng.normal(0, 0.25, (1 if everywhere else 5, 4, 12))
    values = np.einsum("gd,gdj->gj", shares, means[corner if not everywhere else corner * 0])
    values += rng.normal(0, 1, values.shape) / np.sqrt(300)
    simulated = regions_of(shares, values, 300.0, FOUR, spread=np.ones(12), randomised=False)
    return replace(simulated, centroids=centroids), means[0]


@pytest.mark.parametrize("seed", range(3))
def test_what_holds_in_one_part_of_the_map_alone_is_believed_less_and_said(seed: int) -> None:
    alike = recover(spread_out(seed, True)[0])
    other = recover(spread_out(seed, False)[0])
    assert alike.transfer["category"] > 0.9 and confounding(alike) == []
    assert other.transfer["category"] < LOW_TRANSFER
    [sentence] = confounding(other)
    assert "'category' is confounded with where people live" in sentence
    share, less = (estimate.group_share for estimate in (alike, other))
    assert share is not None and less is not None and less.mean() < 0.5 * share.mean()


def test_few_regions_are_not_cut_into_blocks() -> None:
    shares, values, _, centroids = confounded(0, MIN_BLOCKED_REGIONS - 1)
    simulated = regions_of(shares, values, 300.0, FOUR, spread=np.ones(12), randomised=False)
    assert recover(replace(simulated, centroids=centroids)).transfer == {}


def test_each_feature_map_is_judged_by_itself() -> None:
    alike = spread_out(0, True)[0]
    other = spread_out(0, False)[0]
    both = np.hstack([alike.aggregates.values, other.aggregates.values[:, :12]])
    names = tuple(f"{name}:{number}" for name in ("category", "distance") for number in range(12))
    # The same people and centroids, so that only what they do differs.
    values = replace(alike.aggregates, features=names, values=both, spread=np.ones(24))
    estimate = recover(replace(alike, aggregates=values))
    assert estimate.transfer["category"] > LOW_TRANSFER > estimate.transfer["distance"]
